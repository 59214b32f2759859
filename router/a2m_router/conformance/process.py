"""A server's process: its pipes, how it ended, and the last lines of its stderr."""

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

# a longer line, or more lines in a row without a message, cannot be the stdout of a server
_LONGEST_LINE: Final = 1 << 26
_MOST_JUNK: Final = 10_000

# how many last lines of stderr are shown, and how many characters of each
_LAST_WORDS: Final = 5
_LONGEST_WORDS: Final = 300

# seconds from the end of the pipes to the exit of the process, or from the exit to the end of the pipes
_MOMENT_SECONDS: Final = 2.0


class CannotStart(Exception):
    """The process cannot be started; the message is one sentence."""


class Process:
    """A process of the command, in its own process group. Its stderr is passed on.

    `took` gets each line of stdout, and returns whether it is a message; `on_end` is called after the last one. Both
    run on another thread. Raises CannotStart.
    """

    def __init__(self, command: Sequence[str], took: Callable[[bytes], bool], on_end: Callable[[], None]) -> None:
        try:
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
            raise CannotStart(
                f"The command `{shlex.join(command)}` cannot be started: {why}. Expected the path of a program, or "
                "a name that is on PATH, and its arguments."
            ) from None
        assert self._popen.stdin is not None
        self._stdin = self._popen.stdin
        self.ended = False  # its stdout
        self._deaf = False
        self._left = False  # the process has ended: further lines are from other processes with its pipes
        self._flood: str | None = None
        self._last_words: deque[str] = deque(maxlen=_LAST_WORDS)
        self._threads = [
            threading.Thread(target=self._read_stdout, args=[took, on_end], daemon=True),
            threading.Thread(target=self._read_stderr, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_lost(self) -> bool:
        """Whether it has died, or can no longer be used: it stopped reading, or closed its stdout."""
        return self.ended or self._deaf or self._popen.poll() is not None

    def write(self, line: bytes) -> bool:
        """Write a line; return whether that succeeded."""
        try:
            self._stdin.write(line + b"\n")
            self._stdin.flush()
        except (OSError, ValueError):
            self._deaf = True
            self._threads[0].join(_MOMENT_SECONDS)  # so that its last output can be quoted
        return not self._deaf

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()

    def exit_code(self, seconds: float) -> int | None:
        """Return the exit code, or None if it still runs after these seconds."""
        try:
            return self._popen.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Kill it if it still runs, with its process group; return when its pipes were read to their end."""
        self._kill()
        self.close_stdin()
        for thread in self._threads:
            thread.join(_MOMENT_SECONDS)
        self._left = True

    def how_it_ended(self) -> str:
        """Return a sentence on how it was lost, with the last lines of its stderr; kill it if it still runs."""
        code = None if self._flood else self.exit_code(_MOMENT_SECONDS)
        self.end()
        if self._flood:
            how = f"The server was killed, since {self._flood}"
        elif code is None:
            closed = "closed its stdout" if self.ended else "no longer read its stdin"
            how = f"The server {closed} and did not exit; it was killed"
        elif code < 0:
            how = f"The server died of {_signal_name(-code)}"
        else:
            how = f"The server died with exit code {code}"
        if not self._last_words:
            return f"{how}; its stderr is empty."
        return "\n".join([f"{how}; the last lines of its stderr:", *(f"  {line}" for line in self._last_words)])

    def _kill(self) -> None:
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def _read_stdout(self, took: Callable[[bytes], bool], on_end: Callable[[], None]) -> None:
        assert self._popen.stdout is not None
        junk = 0
        with self._popen.stdout as stdout:
            while self._flood is None and (line := stdout.readline(_LONGEST_LINE)) and not self._left:
                junk = 0 if took(line) else junk + 1
                if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                    self._flood = f"a line of its stdout is longer than {_LONGEST_LINE:,} bytes"
                elif junk == _MOST_JUNK:
                    self._flood = f"the last {junk:,} lines of its stdout are not messages"
            if self._flood:
                self._kill()  # before it finds its stdout closed and reports that
        self.ended = True
        on_end()

    def _read_stderr(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as stderr:
            while line := stderr.readline(1 << 16):
                text = line.decode(errors="replace")
                if words := "".join(letter if letter.isprintable() else " " for letter in text).rstrip():
                    self._last_words.append(words[:_LONGEST_WORDS])
                with contextlib.suppress(OSError, ValueError):
                    sys.stderr.write(text)
                    sys.stderr.flush()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
