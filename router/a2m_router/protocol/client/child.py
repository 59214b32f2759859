"""The client end of the stdio binding (§8.2): a server that is a child process.

The child leads its own session, so that a terminal's Ctrl-C does not signal it; it sees only the end of its input. When
the block ends, or is cancelled, the child is shut down: its input is closed; after a grace period its process group
gets SIGTERM, then SIGKILL. Its output is read meanwhile, and its end is always awaited.
"""

import logging
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final, Self

import anyio
import anyio.abc

from a2m_router.process.descriptors import DescriptorSink, DescriptorSource
from a2m_router.process.paths import expanded
from a2m_router.protocol.client.client import LAST_WORDS, Connection, tending
from a2m_router.protocol.wire.errors import cut
from a2m_router.protocol.wire.jsonrpc import Notification
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE

# seconds after the end of its input for the child to answer calls in progress and to end by itself
_CLOSED: Final = 5.0
# seconds after SIGTERM for a child that ignores the end of its input
_TERMINATED: Final = 2.0
# seconds after SIGKILL, when only the kernel can be slow; a child blocked there is left running, and the log says so
_KILLED: Final = 10.0
# bytes of a line of stderr; the rest follows as further lines
_STDERR_LINE: Final = 8192

log = logging.getLogger(__name__)


class CannotStart(Exception):
    """A command cannot be started; the message is one sentence that says why."""


def executable(program: str, cwd: Path) -> str:
    """Return the path of a command's program.

    A name without a slash is searched beside this interpreter first, then on PATH: a router in a virtual environment
    then starts the servers that are installed there."""
    if os.sep in program:
        with suppress(ValueError):  # there is no such home directory, so no program in it
            program = str(expanded(program))
        return str(cwd / program)
    beside = Path(sys.executable).parent / program
    return str(beside) if os.access(beside, os.X_OK) else shutil.which(program) or program


@asynccontextmanager
async def connect_process(
    command: Sequence[str],
    *,
    name: str,
    on_stderr: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    max_message: int = DEFAULT_MAX_MESSAGE,
    on_notification: Callable[[Notification], None] | None = None,
) -> AsyncIterator[Connection]:
    """Start `command` and yield a connection over its standard streams.

    Args:
        name: the server's name in the log.
        on_stderr: is called with each line of its stderr, without the newline, with undecodable bytes replaced.
        env: its whole environment; None passes on this process's own.
        cwd: the folder it starts in.

    Raises:
        CannotStart: the command cannot be started.
    """
    connection = Connection(name, max_message=max_message, on_notification=on_notification)
    child = await _Child.start(command, env, cwd, on_stderr)
    # no awaits until the task group is entered: a cancellation delivered in the gap would leak the live process
    pumps = anyio.CancelScope(shield=True)
    try:
        async with tending() as tasks:

            async def pump() -> None:
                # shielded: the child's output must be read during shutdown, or the child would block and never end
                with pumps:
                    async with anyio.create_task_group() as pumping:
                        pumping.start_soon(child.watch, connection)
                        pumping.start_soon(child.relay)
                        pumping.start_soon(child.carry, connection)

            tasks.start_soon(pump)
            try:
                yield connection
            finally:
                with anyio.CancelScope(shield=True):
                    connection.lose("the connection was closed")
                    await child.shut_down(name)
                pumps.cancel()
    finally:
        child.close()
        if child.process.returncode is not None:
            connection.end()


class StderrLines:
    """A child's stderr, passed on line by line. Mutable state: the last line, and whether stderr has ended.

    Args:
        on_line: is called with each line, without the newline, with undecodable bytes replaced.
    """

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self.last = ""
        """The last line that is not blank."""
        self.ended = anyio.Event()

    async def relay(self, stderr: anyio.abc.ByteReceiveStream) -> None:
        """Read stderr to its end."""
        held = b""
        try:
            async for chunk in stderr:
                *lines, held = (held + chunk).split(b"\n")
                while len(held) > _STDERR_LINE:
                    lines.append(held[:_STDERR_LINE])
                    held = held[_STDERR_LINE:]
                for line in lines:
                    self._pass_on(line)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        if held:
            self._pass_on(held)
        self.ended.set()

    def _pass_on(self, line: bytes) -> None:
        for start in range(0, len(line) or 1, _STDERR_LINE):
            text = line[start : start + _STDERR_LINE].decode("utf-8", "replace").rstrip("\r")
            self.last = text.strip() or self.last
            self._on_line(text)


class _Child:
    def __init__(
        self,
        process: anyio.abc.Process,
        stdin: DescriptorSink,
        stdout: DescriptorSource,
        stderr: DescriptorSource,
        on_stderr: Callable[[str], None],
    ) -> None:
        self.process = process
        self._stdin = stdin
        self._stdout = stdout
        self._stderr = stderr
        self._stderr_lines = StderrLines(on_stderr)

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        env: Mapping[str, str] | None,
        cwd: Path | None,
        on_stderr: Callable[[str], None],
    ) -> Self:
        with ExitStack() as theirs, ExitStack() as ours:
            ends: list[int] = []
            for own in (1, 0, 0):  # this process writes the child's stdin, and reads its stdout and stderr
                pipe = os.pipe()
                ours.callback(os.close, pipe[own])
                theirs.callback(os.close, pipe[1 - own])
                os.set_blocking(pipe[own], False)
                ends += pipe[own], pipe[1 - own]
            try:
                with anyio.CancelScope(shield=True):  # a cancellation here would leave a process that nothing ends
                    process = await anyio.open_process(
                        list(command),
                        stdin=ends[1],
                        stdout=ends[3],
                        stderr=ends[5],
                        env=env,
                        cwd=cwd,
                        start_new_session=True,
                    )
            except (OSError, ValueError) as problem:
                raise CannotStart(_why(command, cwd, problem)) from problem
            ours.pop_all()
            stdin, stdout, stderr = DescriptorSink(ends[0]), DescriptorSource(ends[2]), DescriptorSource(ends[4])
            return cls(process, stdin, stdout, stderr, on_stderr)

    async def carry(self, connection: Connection) -> None:
        """Carry calls until the connection has ended, then report the most precise reason."""
        reason = await connection.run(self._stdout, self._stdin)
        with anyio.move_on_after(LAST_WORDS):
            await self.process.wait()
            await self._stderr_lines.ended.wait()
        connection.lose(self._ending() or reason)
        # discard further output: the child would block on a full pipe and never end
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
            while True:
                await self._stdout.receive()

    async def watch(self, connection: Connection) -> None:
        """End the connection when the child has ended, even if a process that it started still holds its stdout."""
        await self.process.wait()
        with anyio.move_on_after(2 * LAST_WORDS):
            await connection.lost.wait()
        connection.lose(self._ending() or "it has ended")

    async def relay(self) -> None:
        """Pass on stderr, line by line, until it ends."""
        await self._stderr_lines.relay(self._stderr)

    def _ending(self) -> str | None:
        status = self.process.returncode
        if status is None:
            return None
        ending = f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
        last = self._stderr_lines.last
        return f"{ending}; its last line on stderr: {cut(last)}" if last else ending

    async def shut_down(self, name: str) -> None:
        """End the child and the rest of its process group, and wait for the child."""
        self._stdin.close()
        if not await self._ends_within(_CLOSED):
            self._signal(signal.SIGTERM)
            if not await self._ends_within(_TERMINATED):
                self._signal(signal.SIGKILL)
                if not await self._ends_within(_KILLED):
                    log.error("peer=%s process %d not ended, SIGKILL has had no effect", name, self.process.pid)
                    return
        # kill processes that it left behind, such as a server whose shell has ended
        self._signal(signal.SIGKILL)
        await self.process.aclose()
        with anyio.move_on_after(LAST_WORDS):
            await self._stderr_lines.ended.wait()

    async def _ends_within(self, seconds: float) -> bool:
        with anyio.move_on_after(seconds):
            await self.process.wait()
        return self.process.returncode is not None

    def _signal(self, number: signal.Signals) -> None:
        # the child leads its session, so its pid is the group's; for an empty group, systems raise one or the other
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)

    def close(self) -> None:
        if self.process.returncode is None:
            # asyncio's own cancellation ignores shields and has interrupted the shutdown
            self._signal(signal.SIGKILL)
        self._stdin.close()
        self._stdout.close()
        self._stderr.close()


def _why(command: Sequence[str], cwd: Path | None, problem: Exception) -> str:
    program = repr(command[0]) if command else "an empty command"
    if cwd is not None and not cwd.is_dir():
        return f"{program} cannot be started: its folder {str(cwd)!r} does not exist"
    match problem:
        case FileNotFoundError() if "/" in command[0] and Path(cwd or "", command[0]).is_file():
            why = "the interpreter in its first line does not exist"
        case FileNotFoundError():
            why = "there is no such program"
        case PermissionError():
            why = (
                "it, or the interpreter in its first line, is not executable for the user of this process, or is in a "
                "folder that this user cannot enter"
            )
        case OSError(strerror=str(text)):
            why = text
        case _:
            why = str(problem)
    return f"{program} cannot be started: {why}"
