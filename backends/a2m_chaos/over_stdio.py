"""a2m-chaos on stdin and stdout, in front of a child process or a URL.

Lines are processed in order: each is forwarded before the next one is processed, unless its fault holds it back. A
server on a pipe works in order, and clients may rely on that. The client gets whole lines, from one task at a time.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Final, NoReturn

import anyio
import anyio.abc

from a2m_chaos.altering import Call
from a2m_chaos.child import Child
from a2m_chaos.faults import KINDS
from a2m_chaos.memory_files import MemoryFiles
from a2m_chaos.misbehaving import GoOn, misbehave
from a2m_chaos.running import Run
from a2m_chaos.schedule import Applied
from a2m_chaos.upstream import Request, Unreachable, Upstream
from a2m_router.process.descriptors import standard_streams
from a2m_router.protocol.server.shutdown import StoppableStream, until_signalled
from a2m_router.protocol.wire.capabilities import PROTOCOL, VERSION_HEADER
from a2m_router.protocol.wire.lines import LineSplitter

# the exit code when a fault has killed the server
DIED: Final = 3

_LONGEST: Final = 2**40
# the most lines that are read ahead
_AHEAD: Final = 256
_JSON: Final = ((b"content-type", b"application/json"), (b"accept", b"application/json"))


async def serve_child(command: Sequence[str], run: Run, memory: MemoryFiles) -> int:
    """Forward stdin to a child process and its output to stdout until either ends. Return the exit code.

    Raises CannotStart.
    """
    with standard_streams() as (source, sink):
        out = _Out(sink)
        child = Child(command, out.say)
        if memory.put_back():
            run.say("saved memory restored: the last run did not end in order")
        await child.start()
        async with anyio.create_task_group() as tasks:
            ending = _Ending(child, run, memory, tasks.cancel_scope)
            tasks.start_soon(ending.watch)
            await _serve(source, lambda faults: _ChildLine(child, out, run, ending, memory, faults))
            await child.end()
    return ending.status


async def serve_url(url: str, run: Run) -> int:
    """Forward each line to the server at `url` and its answer to stdout, in order, until stdin ends.

    Raises ValueError for an invalid URL.
    """
    upstream = Upstream(url)
    with standard_streams() as (source, sink):
        out = _Out(sink)
        await _serve(source, lambda faults: _UrlLine(upstream, out, run, faults))
    run.keep()
    return 0


class _Out:
    """stdout. Lines are sent whole; when its reader has closed it, they are dropped."""

    def __init__(self, sink: anyio.abc.ByteSendStream) -> None:
        self._sink = sink
        self._turn = anyio.Lock()

    async def say(self, line: bytes) -> None:
        async with self._turn:
            await self._send(line + b"\n")

    async def say_in_two(self, line: bytes, pause: float) -> None:
        async with self._turn:
            await self._send(line[: len(line) // 2])
            await anyio.sleep(pause)
            await self._send(line[len(line) // 2 :] + b"\n")

    async def _send(self, data: bytes) -> None:
        # when the client has closed stdout, it soon closes stdin, too, which ends this process
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._sink.send(data)


class _Ending:
    """The end of this process. `status` is the exit code."""

    def __init__(self, child: Child, run: Run, memory: MemoryFiles, everything: anyio.CancelScope) -> None:
        self.status = 0
        self._child = child
        self._run = run
        self._memory = memory
        self._everything = everything
        self._dying = False

    async def watch(self) -> None:
        """Wait for the end of the child, then end everything."""
        try:
            status = await self._child.run()
        finally:
            await self._child.end()
        if not self._dying:
            self._settle_memory(orderly=status == 0)
            self.status = status if status >= 0 else 128 - status
            self._run.keep()
            self._everything.cancel()

    async def die(self, *, empty: bool) -> NoReturn:
        """Kill the server, then end this process."""
        self._dying = True
        await self._child.kill()
        if empty:
            self._run.say(f"memory moved to {self._memory.move_away()}")
        else:
            self._settle_memory(orderly=False)
        self.status = DIED
        self._everything.cancel()
        await anyio.sleep_forever()
        raise AssertionError("this was cancelled")

    def _settle_memory(self, *, orderly: bool) -> None:
        if orderly:
            self._memory.release()
        elif self._memory.put_back():
            self._run.say("saved memory restored")


async def _serve(source: anyio.abc.ByteReceiveStream, make: Callable[[anyio.abc.TaskGroup], "_Line"]) -> None:
    """Serve until stdin has ended and all faults are complete. A signal ends running faults, too."""
    stdin = StoppableStream(source)
    working = anyio.CancelScope()

    def stop() -> None:
        stdin.end()
        working.cancel()

    async with until_signalled(stop):
        with working:
            async with anyio.create_task_group() as faults:
                await _take(stdin, make(faults))


async def _take(stdin: anyio.abc.ByteReceiveStream, line: "_Line") -> None:
    """Process line after line until stdin ends. Another task reads ahead."""
    give, take = anyio.create_memory_object_stream[bytes](_AHEAD)

    async def read() -> None:
        splitter = LineSplitter(_LONGEST)
        ended = False
        while not ended:
            try:
                lines = splitter.feed(await stdin.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                lines, ended = splitter.end(), True
            for message in lines:
                assert message is not None
                await give.send(message)
        give.close()

    async with anyio.create_task_group() as tasks, give, take:
        tasks.start_soon(read)
        async for message in take:
            await line.take(message)


class _Line:
    """The processing of lines: `take` returns when the next line may be processed."""

    def __init__(self, out: _Out, run: Run, tasks: anyio.abc.TaskGroup) -> None:
        self._out = out
        self._run = run
        self._tasks = tasks

    async def take(self, message: bytes) -> None:
        call, applied = self._run.decide(message)
        if call is None or applied is None:
            await self.pass_on(message)
            return
        forwarded = anyio.Event()

        async def do() -> None:
            try:
                wire = _Wire(self, self._out, self._run, call, applied)
                await misbehave(applied.fault, message, self.go_on(call, forwarded), wire)
            finally:
                forwarded.set()

        if applied.fault.in_order:
            await do()
        else:
            self._tasks.start_soon(do)
            if not KINDS[applied.fault.do].holds_back:
                await forwarded.wait()

    async def pass_on(self, message: bytes) -> None:
        raise NotImplementedError

    def go_on(self, call: Call, forwarded: anyio.Event) -> GoOn:
        raise NotImplementedError

    async def die(self, *, empty: bool) -> None:
        raise AssertionError("a plan for a URL has no such fault")

    async def keep_aside(self) -> None:
        raise AssertionError("a plan for a URL has no such fault")


class _ChildLine(_Line):
    def __init__(
        self, child: Child, out: _Out, run: Run, ending: _Ending, memory: MemoryFiles, tasks: anyio.abc.TaskGroup
    ) -> None:
        super().__init__(out, run, tasks)
        self._child = child
        self._ending = ending
        self._memory = memory

    async def pass_on(self, message: bytes) -> None:
        await self._child.send(message)

    def go_on(self, call: Call, forwarded: anyio.Event) -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            return await self._child.ask(message, call.key, forwarded.set)

        return go_on

    async def die(self, *, empty: bool) -> None:
        await self._ending.die(empty=empty)

    async def keep_aside(self) -> None:
        await self._child.quiet()
        self._memory.keep()


class _UrlLine(_Line):
    def __init__(self, upstream: Upstream, out: _Out, run: Run, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(out, run, tasks)
        self._upstream = upstream

    async def pass_on(self, message: bytes) -> None:
        answer = await self._ask(message)
        if answer:
            await self._out.say(answer)

    def go_on(self, call: Call, forwarded: anyio.Event) -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            answer = await self._ask(message)
            forwarded.set()
            return answer

        return go_on

    async def _ask(self, message: bytes) -> bytes | None:
        headers = (*_JSON, (VERSION_HEADER.lower().encode(), PROTOCOL.encode()))
        try:
            response = await self._upstream.ask(Request(b"POST", b"/", headers, message))
        except Unreachable as problem:
            self._run.say(str(problem))
            return None
        # on stdio a message is one line; in JSON, line breaks occur only between tokens
        return response.body.replace(b"\r", b" ").replace(b"\n", b" ").strip() or None


class _Wire:
    """The `Wire` of a call on stdio."""

    def __init__(self, line: _Line, out: _Out, run: Run, call: Call, applied: Applied) -> None:
        self._line = line
        self._out = out
        self._run = run
        self._call = call
        self._applied = applied

    async def send(self, message: bytes) -> None:
        await self._out.say(message)

    async def send_in_two(self, message: bytes, pause: float) -> None:
        await self._out.say_in_two(message, pause)

    async def send_half(self, message: bytes) -> None:
        raise AssertionError("a plan for stdio has no such fault")

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        raise AssertionError("a plan for stdio has no such fault")

    async def reset(self) -> None:
        raise AssertionError("a plan for stdio has no such fault")

    async def die(self, away: float, *, empty: bool) -> None:
        await self._line.die(empty=empty)

    async def keep_aside(self) -> None:
        await self._line.keep_aside()

    def note(self, sentence: str) -> None:
        self._run.note(self._call, self._applied, sentence)
