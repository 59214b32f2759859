"""a2m-chaos on stdin and stdout, before a child or a URL.

Lines are taken in the order in which they came, and each is handed on before the next is looked at, unless its fault
holds it back: a server on a pipe works in order, and clients may rely on that. What is said to the client is said line
by line, by one task at a time.
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

# how a2m-chaos ends when a fault has made the server die
DIED: Final = 3

_LONGEST: Final = 2**40
# lines that have come and are not looked at yet
_AHEAD: Final = 256
_JSON: Final = ((b"content-type", b"application/json"), (b"accept", b"application/json"))


async def serve_child(command: Sequence[str], run: Run, memory: MemoryFiles) -> int:
    """Passes stdin on to a child and what it says to stdout, until either ends; returns the status to end with.

    Raises CannotStart.
    """
    with standard_streams() as (source, sink):
        out = _Out(sink)
        child = Child(command, out.say)
        if memory.put_back():
            run.say("the memory is what it was kept aside as: the last run had no orderly end")
        await child.start()
        async with anyio.create_task_group() as tasks:
            ending = _Ending(child, run, memory, tasks.cancel_scope)
            tasks.start_soon(ending.watch)
            await _serve(source, lambda faults: _ChildLine(child, out, run, ending, memory, faults))
            await child.end()
    return ending.status


async def serve_url(url: str, run: Run) -> int:
    """Passes each line on to the server at `url` and its answer to stdout, one after the other, until stdin ends.

    Raises ValueError for what is no URL.
    """
    upstream = Upstream(url)
    with standard_streams() as (source, sink):
        out = _Out(sink)
        await _serve(source, lambda faults: _UrlLine(upstream, out, run, faults))
    run.keep()
    return 0


class _Out:
    """stdout; lines are said whole. When nobody reads it any more, nothing is said."""

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
        # where nobody reads any more, the end of stdin will follow
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            await self._sink.send(data)


class _Ending:
    """How it all ends. `status` is what this process ends with."""

    def __init__(self, child: Child, run: Run, memory: MemoryFiles, everything: anyio.CancelScope) -> None:
        self.status = 0
        self._child = child
        self._run = run
        self._memory = memory
        self._everything = everything
        self._dying = False

    async def watch(self) -> None:
        """Ends everything when the child has ended."""
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
        """Ends the server as a kill would, and then this."""
        self._dying = True
        await self._child.kill()
        if empty:
            self._run.say(f"the memory was moved to {self._memory.move_away()}")
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
            self._run.say("the memory is what it was kept aside as")


async def _serve(source: anyio.abc.ByteReceiveStream, make: Callable[[anyio.abc.TaskGroup], "_Line"]) -> None:
    """Serves until stdin has ended and all faults with it; a signal ends faults that are under way, too."""
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
    """Takes line after line until stdin ends, and reads on meanwhile."""
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
    """One end of a pipe: takes a line, and returns when the next may be taken."""

    def __init__(self, out: _Out, run: Run, tasks: anyio.abc.TaskGroup) -> None:
        self._out = out
        self._run = run
        self._tasks = tasks

    async def take(self, message: bytes) -> None:
        call, applied = self._run.decide(message)
        if call is None or applied is None:
            await self.pass_on(message)
            return
        told = anyio.Event()

        async def do() -> None:
            try:
                wire = _Wire(self, self._out, self._run, call, applied)
                await misbehave(applied.fault, message, self.go_on(call, told), wire)
            finally:
                told.set()

        if applied.fault.in_order:
            await do()
        else:
            self._tasks.start_soon(do)
            if not KINDS[applied.fault.do].holds_back:
                await told.wait()

    async def pass_on(self, message: bytes) -> None:
        raise NotImplementedError

    def go_on(self, call: Call, told: anyio.Event) -> GoOn:
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
        await self._child.tell(message)

    def go_on(self, call: Call, told: anyio.Event) -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            return await self._child.ask(message, call.key, told.set)

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

    def go_on(self, call: Call, told: anyio.Event) -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            answer = await self._ask(message)
            told.set()
            return answer

        return go_on

    async def _ask(self, message: bytes) -> bytes | None:
        headers = (*_JSON, (VERSION_HEADER.lower().encode(), PROTOCOL.encode()))
        try:
            response = await self._upstream.ask(Request(b"POST", b"/", headers, message))
        except Unreachable as problem:
            self._run.say(str(problem))
            return None
        # a message is one line here, and a line break can only stand between its tokens
        return response.body.replace(b"\r", b" ").replace(b"\n", b" ").strip() or None


class _Wire:
    """A call on a pipe; see `Wire`."""

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
