"""A stderr that never blocks: what is written waits in a bounded queue, and a thread of its own writes it out.

A parent that starts a program with a pipe for stderr and never reads it stops whoever writes there once the pipe is
full. The descriptor itself stays blocking: O_NONBLOCK would also reach every other process that holds it.

Rules:
- nobody but the thread waits for stderr; `flush` does not, `drain` does for as long as it is told;
- the queue keeps the order of all that is written, by the log and by `print`;
- what does not fit is dropped as whole lines and counted; the log has the count when there is room again;
- a thread that is stuck does not keep the process from ending.
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

# characters that wait for somebody to read
_MOST: Final = 1 << 20

# seconds that the end of a program waits for its last lines to be taken
_LAST_LINES: Final = 1.0

# bytes of one write: what a pipe takes at once
_PIECE: Final = 65_536

log = logging.getLogger(__name__)


@contextmanager
def unblocked_stderr() -> Iterator[None]:
    """sys.stderr never blocks until the end of the block, which waits up to a second for what is left to be written.

    Where that is not taken, sys.stderr stays as it is in the block: whatever writes there later, such as the
    interpreter as it ends, does not block either.
    """
    before = sys.stderr
    if before is None:  # as it is in a process that was started with descriptor 2 closed
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
    """Wait until what was written to stderr is written out: before the process dies, or writes to stdout what belongs
    after it. Returns after `seconds` in any case."""
    if isinstance(sys.stderr, UnblockedStderr):
        sys.stderr.drain(seconds)


class UnblockedStderr(TextIOBase):
    """A text stream before another one. Any thread may write.

    Args:
        stream: what the lines are written to; its descriptor, where it has one.
        most: characters that may wait.
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
        self._held = 0  # characters of what waits and of what is being written
        self._begun = ""  # of a line whose end has not come
        self._dropped = 0
        self._ended = False
        self._thread = threading.Thread(target=self._write_out, name="stderr", daemon=True)
        self._thread.start()

    def write(self, text: str, /) -> int:
        """Note what is to be written. Never blocks."""
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
        """Let the thread write a line whose end has not come, such as a question. Does not wait."""
        with self._changed:
            if self._begun:
                text, self._begun = self._begun, ""
                self._put(text)

    def drain(self, seconds: float) -> bool:
        """Wait until all is written out, or for `seconds`; returns whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            self.flush()
            return self._changed.wait_for(self._is_written, max(0.0, deadline - time.monotonic()))

    def end(self, seconds: float) -> bool:
        """`drain`, after which nothing more is written, and the thread ends as soon as it can."""
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
        # there is always room for the count of what was dropped, which the thread itself writes
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
                with suppress(OSError, ValueError):  # nobody need listen
                    self._write_text(text)
            elif dropped:
                # not while the lock is held: a handler has a lock of its own, and writes here while it holds that
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
        # not through the stream: a thread that is stuck in it holds a lock that the interpreter takes as it ends
        view = memoryview(text.encode(self.encoding or "utf-8", self.errors or "backslashreplace"))
        while view:
            try:
                view = view[os.write(self._descriptor, view[:_PIECE]) :]
            except BlockingIOError:  # another process that holds it has made it non-blocking
                select.select([], [self._descriptor], [])
