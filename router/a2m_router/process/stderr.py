"""A stderr that never blocks: text waits in a bounded queue, and a separate thread writes it.

If a parent starts a program with a pipe for stderr and never reads it, writers block once the pipe is full. The
descriptor itself stays blocking: O_NONBLOCK would also affect every other process that holds it.

Rules:
- only the thread waits for stderr; `flush` does not wait, and `drain` waits for a limited time;
- the queue keeps the order of all text, from the log and from `print`;
- lines that do not fit are dropped whole and counted; the count is logged when there is space again;
- a blocked thread does not prevent the process from ending.
"""

import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOBase
from typing import Final, TextIO, cast

# characters in the queue, at most
_MOST: Final = 1 << 20

# seconds that a program waits at its end for its last lines to be read
_LAST_LINES: Final = 1.0

# bytes of one write: the capacity of a pipe
_PIECE: Final = 65_536

log = logging.getLogger(__name__)


@contextmanager
def unblocked_stderr() -> Iterator[None]:
    """Replace sys.stderr in the block by one that never blocks; its end waits up to a second for the last lines.

    If these are not read in time, sys.stderr stays replaced: later writers, such as the interpreter at its end, do not
    block either.
    """
    before = sys.stderr
    if before is None:  # in a process that was started with descriptor 2 closed
        yield
        return
    unblocked = UnblockedStderr(before)
    sys.stderr = instead = cast(TextIO, unblocked)
    try:
        yield
    finally:
        if unblocked.end(_LAST_LINES) and sys.stderr is instead:
            sys.stderr = before


def drain_stderr(seconds: float = _LAST_LINES) -> None:
    """Wait until all text for stderr is written, at most `seconds`.

    Call this before the process is killed, or before it prints to stdout text that belongs after stderr's.
    """
    if isinstance(sys.stderr, UnblockedStderr):
        sys.stderr.drain(seconds)


class UnblockedStderr(TextIOBase):
    """A queue before a text stream. Any thread may write.

    Args:
        stream: the target of the lines; they go directly to its descriptor, if it has one.
        most: characters in the queue, at most.
    """

    def __init__(self, stream: TextIO, most: int = _MOST) -> None:
        self._stream = stream
        self._most = most
        try:
            self._descriptor = stream.fileno()
        except (OSError, ValueError):
            self._descriptor = -1
        # reentrant, since a finalizer may write to stderr while its thread is in here
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._held = 0  # characters in the queue and in the current write
        self._begun = ""  # the beginning of a line without its end
        self._dropped = 0
        self._ended = False
        self._thread = threading.Thread(target=self._write_out, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> int:
        """Put text into the queue. Never blocks."""
        with self._changed:
            self._begun += text
            lines, newline, rest = self._begun.rpartition("\n")
            if newline:
                self._begun = rest
                self._put(lines + newline)
            elif len(self._begun) > self._most:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Let the thread write an unfinished line, such as a prompt. Does not wait."""
        with self._changed:
            if self._begun:
                text, self._begun = self._begun, ""
                self._put(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all text is written, at most `seconds`; return whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self.flush()
            return self._changed.wait_for(self._is_written, max(0.0, deadline - time.monotonic()))

    def end(self, seconds: float) -> bool:
        """`drain`, then discard later text and let the thread end; return whether all earlier text is written."""
        done = self.drain(seconds)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        return done

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # the base class has an attribute that can be set
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # likewise
        return self._stream.errors

    def _is_written(self) -> bool:
        return self._held == 0 and self._dropped == 0

    def _put(self, text: str) -> None:
        if self._ended:
            return
        # the thread's own text always fits: it is the count of dropped lines
        if self._held + len(text) > self._most and threading.current_thread() is not self._thread:
            self._dropped += text.count("\n") or 1
            return
        self._held += len(text)
        self._waiting.append(text)
        self._changed.notify_all()

    def _write_out(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._dropped or self._ended)
                text = self._waiting.popleft() if self._waiting else ""
                dropped = self._dropped
            if text:
                with suppress(OSError, ValueError):  # stderr may be closed
                    self._write_text(text)
            elif dropped:
                # without the lock: a log handler has its own lock and writes here while it holds that
                log.error("%d lines of the log were dropped: stderr was not read", dropped)
            else:
                return
            with self._changed:
                self._held -= len(text)
                if not text:
                    self._dropped -= dropped
                self._changed.notify_all()

    def _write_text(self, text: str) -> None:
        if self._descriptor < 0:
            self._stream.write(text)
            self._stream.flush()
            return
        # not through the stream: a thread blocked in it would hold a lock that the interpreter takes at its end
        view = memoryview(text.encode(self.encoding or "utf-8", self.errors or "backslashreplace"))
        while view:
            try:
                view = view[os.write(self._descriptor, view[:_PIECE]) :]
            except BlockingIOError:  # another process made the shared descriptor non-blocking
                select.select([], [self._descriptor], [])
