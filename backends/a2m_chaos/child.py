"""The server behind, as a child on stdio: raw lines both ways, and answers handed to whoever waits for them.

- A line is passed on as it came, to the byte. Only while somebody waits for an answer are ids looked at.
- The child leads a session of its own, so that it can be ended with all that it has started. Its stderr is ours.
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

# of a child that was told to end; together less than a client of ours waits before it kills us
_CLOSED: Final = 3.0
_TERMINATED: Final = 1.0
# nothing is refused for its length here
_LONGEST: Final = 2**40


class Child:
    """A server's process. Mutable state: the process, and who waits for which answer.

    Args:
        on_line: takes each line of its stdout that nobody waits for, without the newline.
    """

    def __init__(self, command: Sequence[str], on_line: Callable[[bytes], Awaitable[None]]) -> None:
        self._command = command
        self._on_line = on_line
        self._process: anyio.abc.Process | None = None
        self._writing = anyio.Lock()
        self._waiting: dict[bytes, deque[_Waiting]] = {}
        self._underway: set[bytes] = set()
        self._ended = False  # and nothing of it is to be read any more
        self._answered = anyio.Event()

    async def start(self) -> None:
        """Starts it, from where a router would. Raises CannotStart."""
        program, *arguments = self._command
        try:
            with anyio.CancelScope(shield=True):  # a process must not come to be without anybody to know of it
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
        """Passes on what it says until it ends; returns its status, negative for a signal."""
        process = self._process
        assert process is not None
        assert process.stdout is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._read, process.stdout)
            status = await process.wait()
            # what it has left behind would keep its output open
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

    async def tell(self, message: bytes) -> None:
        """Hands it a message; what it answers is passed on like all it says. One that has ended hears nothing."""
        call = call_in(message)
        if call is not None:
            self._underway.add(call.key)
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError, OSError):
            async with self._writing:
                await self._process.stdin.send(message + b"\n")

    async def ask(self, message: bytes, key: bytes, on_told: Callable[[], None] = lambda: None) -> bytes | None:
        """Its answer to a call, which is not passed on; None if it ended without.

        Args:
            key: the call's.
            on_told: is called when the call has been handed over.
        """
        waiting = _Waiting()
        self._waiting.setdefault(key, deque()).append(waiting)
        await self.tell(message)
        on_told()
        if self._ended:
            return None  # before it was told, and nobody would say so any more
        await waiting.over.wait()
        return waiting.answer

    async def quiet(self) -> None:
        """Returns when it has answered all that it was handed."""
        while self._underway:
            await self._answered.wait()

    async def idle(self, key: bytes) -> None:
        """Returns when no call with this key is under way: two clients may have taken the same."""
        while key in self._underway:
            await self._answered.wait()

    async def kill(self) -> None:
        """Ends it and all that it has started, at once."""
        with anyio.CancelScope(shield=True):
            self._signal(signal.SIGKILL)
            if self._process is not None:
                await self._process.wait()

    async def end(self) -> None:
        """Ends it in order: no more input, then SIGTERM, then no mercy. `run` passes on what it says meanwhile."""
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
