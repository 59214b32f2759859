"""The server as a child process on stdio: raw lines in both directions, and answers for the callers that wait for them.

- A line is forwarded byte for byte. Ids are read only while calls are running.
- The child leads its own session, so that it can be killed with all its own children. It shares our stderr.
"""

import os
import signal
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Final

import anyio
import anyio.abc

from a2m_chaos.altering import answered_in, call_in
from a2m_router.protocol.client.child import CannotStart, executable
from a2m_router.protocol.wire.lines import LineSplitter

# seconds for a child to end after the end of its stdin, and after SIGTERM; together less than our own client waits
# before it kills us
_CLOSED: Final = 3.0
_TERMINATED: Final = 1.0
# in effect no limit of the length of a line
_LONGEST: Final = 2**40


class Child:
    """The process of a server. Mutable state: the process, and the callers that wait for answers.

    Args:
        command: the program and its arguments.
        on_line: called with each line of its stdout that no caller waits for, without the newline.
    """

    def __init__(self, command: Sequence[str], on_line: Callable[[bytes], Awaitable[None]]) -> None:
        self._command = command
        self._on_line = on_line
        self._process: anyio.abc.Process | None = None
        self._writing = anyio.Lock()
        self._waiting: dict[bytes, deque[_Waiting]] = {}
        self._underway: set[bytes] = set()
        self._ended = False  # the process has ended, and its output is read
        self._answered = anyio.Event()

    async def start(self) -> None:
        """Start the process; the program is looked up as a router does. Raises CannotStart."""
        program, *arguments = self._command
        try:
            with anyio.CancelScope(shield=True):  # a cancelled start could leave a process that nothing ends
                self._process = await anyio.open_process(
                    [executable(program, Path.cwd()), *arguments],
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=None,
                    start_new_session=True,
                )
            self._ended = False
        except (OSError, ValueError) as problem:
            why = problem.strerror if isinstance(problem, OSError) else str(problem)
            raise CannotStart(f"{program!r} cannot be started: {why}") from problem

    async def run(self) -> int:
        """Forward its output until it ends. Return its exit status, negative for a signal."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, process.stdout)
            status = await process.wait()
            # its own children would keep its stdout open
            self._signal(signal.SIGKILL)
        self._ended = True
        for waiting in [each for all in self._waiting.values() for each in all]:
            waiting.over.set()
        self._waiting.clear()
        self._forget_underway()
        return status

    async def _read(self, stdout: anyio.abc.ByteReceiveStream) -> None:
        splitter = LineSplitter(_LONGEST)
        ended = False
        while not ended:
            try:
                lines = splitter.feed(await stdout.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                lines, ended = splitter.end(), True
            for line in lines:
                assert line is not None
                await self._take(line)

    async def send(self, message: bytes) -> None:
        """Send it a message. Its answer goes to `on_line`. If the process has ended, the message is dropped."""
        call = call_in(message)
        if call is not None:
            self._underway.add(call.key)
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            async with self._writing:
                await self._process.stdin.send(message + b"\n")

    async def ask(self, message: bytes, key: bytes, on_sent: Callable[[], None] = lambda: None) -> bytes | None:
        """Send it a call, and return the answer; None if the process ends without one.

        The answer does not go to `on_line`.

        Args:
            message: the call.
            key: the key of the call.
            on_sent: called when the call is sent.
        """
        waiting = _Waiting()
        self._waiting.setdefault(key, deque()).append(waiting)
        await self.send(message)
        on_sent()
        if self._ended:
            return None  # `run` has already released its waiting callers, and would not release this one
        await waiting.over.wait()
        return waiting.answer

    async def quiet(self) -> None:
        """Return when it has answered all calls."""
        while self._underway:
            await self._answered.wait()

    async def idle(self, key: bytes) -> None:
        """Return when no call with this key is running: two clients may use the same id."""
        while key in self._underway:
            await self._answered.wait()

    async def kill(self) -> None:
        """Kill the process and all its children."""
        with anyio.CancelScope(shield=True):
            self._signal(signal.SIGKILL)
            if self._process is not None:
                await self._process.wait()

    async def end(self) -> None:
        """End the process: close its stdin, then SIGTERM, then SIGKILL. `run` forwards its output meanwhile."""
        process = self._process
        if process is None:
            return
        with anyio.CancelScope(shield=True):
            assert process.stdin is not None
            with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
                await process.stdin.aclose()
            for patience, number in ((_CLOSED, signal.SIGTERM), (_TERMINATED, signal.SIGKILL)):
                with anyio.move_on_after(patience):
                    await process.wait()
                    break
                self._signal(number)
            await process.wait()

    async def _take(self, line: bytes) -> None:
        if self._waiting or self._underway:
            key = answered_in(line)
            if key is not None:
                self._underway.discard(key)
                self._forget_underway(everything=False)
                if key in self._waiting:
                    waiting = self._waiting[key].popleft()
                    if not self._waiting[key]:
                        del self._waiting[key]
                    waiting.answer = line
                    waiting.over.set()
                    return
        await self._on_line(line)

    def _forget_underway(self, *, everything: bool = True) -> None:
        if everything:
            self._underway.clear()
        self._answered.set()
        self._answered = anyio.Event()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


class _Waiting:
    def __init__(self) -> None:
        self.over = anyio.Event()
        self.answer: bytes | None = None
