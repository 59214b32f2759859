"""a2m-chaos on an HTTP address, in front of a child process or a URL.

- A request is read whole and answered, and the connection is kept. Requests on one connection are processed in order.
- A fault runs in a separate task that outlives the connection, so it completes even if the client gives up. A call
  without an answer keeps its connection open until the client closes it.
- When the server dies, every connection is reset, and so is every new one until the server is back.
- A request other than POST is forwarded to a URL unchanged, and rejected in front of a child.
"""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from http import HTTPStatus
from typing import Final

import anyio
import anyio.abc
import h11
import msgspec

from a2m_chaos.altering import Call
from a2m_chaos.child import Child
from a2m_chaos.memory_files import MemoryFiles
from a2m_chaos.misbehaving import GoOn, misbehave
from a2m_chaos.running import Run
from a2m_chaos.schedule import Applied
from a2m_chaos.sockets import Listener, Stream
from a2m_chaos.upstream import Headers, Request, Response, Unreachable, Upstream
from a2m_router.process.timing import first_of
from a2m_router.protocol.server.http_addressing import addressed
from a2m_router.protocol.server.server import Refusal
from a2m_router.protocol.server.shutdown import until_signalled

_JSON: Final[Headers] = ((b"content-type", b"application/json"),)
_LAST: Final[Headers] = ((b"content-type", b"text/plain"), (b"connection", b"close"))
# there is no limit of the length of a body, but the head of a request must end
_LONGEST_HEAD: Final = 2**20


async def serve_url(url: str, host: str, port: int, run: Run) -> int:
    """Serve an address with the server at `url`, until a signal. Raises CannotListen, and ValueError for a bad URL."""
    behind = _BehindUrl(Upstream(url), run)
    await _serve(host, port, run, behind)
    return 0


async def serve_child(command: Sequence[str], host: str, port: int, run: Run, memory: MemoryFiles) -> int:
    """Serve an address with a child process, until a signal or the child's own end. Return the exit code.

    Raises CannotListen and CannotStart.
    """
    behind = _BehindChild(command, run, memory)
    if memory.put_back():
        run.say("saved memory restored: the last run did not end in order")
    await _serve(host, port, run, behind)
    return behind.status


async def _serve(host: str, port: int, run: Run, behind: "_Behind") -> None:
    listener = Listener(host, port)
    try:
        async with anyio.create_task_group() as tasks, behind.running(tasks.cancel_scope.cancel):
            server = _Server(run, behind, tasks)
            behind.on_death = server.reset_all
            where = f"[{host}]" if ":" in host else host
            run.say(f"listening on http://{where}:{listener.port}/")
            async with until_signalled(tasks.cancel_scope.cancel):
                while True:
                    server.admit(await listener.accept())
    finally:
        listener.close()
        run.keep()


class _Behind:
    """The server. `away` is True while it is dead; `on_death` is called when a fault kills it."""

    def __init__(self) -> None:
        self.away = False
        self.on_death: Callable[[], None] = lambda: None

    def running(self, end: Callable[[], None]) -> AbstractAsyncContextManager[None]:
        """Run the server while the block runs. `end` is called if the server ends by itself."""
        raise NotImplementedError

    async def answer(self, request: Request, call: Call | None) -> Response | None:
        """Return the server's response; None if there is none, and the connection must be reset."""
        raise NotImplementedError

    async def die(self, away: float, *, empty: bool) -> None:
        """See `Wire`."""
        raise AssertionError("a plan for a URL has no such fault")

    async def keep_aside(self) -> None:
        """See `Wire`."""
        raise AssertionError("a plan for a URL has no such fault")


class _BehindUrl(_Behind):
    def __init__(self, upstream: Upstream, run: Run) -> None:
        super().__init__()
        self._upstream = upstream
        self._run = run

    @asynccontextmanager
    async def running(self, end: Callable[[], None]) -> AsyncIterator[None]:
        yield

    async def answer(self, request: Request, call: Call | None) -> Response | None:
        try:
            return await self._upstream.ask(request)
        except Unreachable as problem:
            self._run.say(str(problem))
            return None


class _Death(msgspec.Struct, frozen=True):
    """A death of the server by a fault: for how long, and whether its memory is empty afterwards."""

    away: float
    empty: bool


class _BehindChild(_Behind):
    """A child process as the server.

    Mutable state: the current child; `_death`, from the fault until the server is back; `status`, the exit code.
    """

    def __init__(self, command: Sequence[str], run: Run, memory: MemoryFiles) -> None:
        super().__init__()
        self.status = 0
        self._command = command
        self._run = run
        self._memory = memory
        self._child = Child(command, self._drop)
        self._death: _Death | None = None

    @asynccontextmanager
    async def running(self, end: Callable[[], None]) -> AsyncIterator[None]:
        await self._child.start()
        # shielded: the child's output must be read until its end, or a full pipe could keep it from ending
        watching = anyio.CancelScope(shield=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._watch, end, watching)
            try:
                yield
            finally:
                with anyio.CancelScope(shield=True):
                    await self._child.end()
                watching.cancel()

    async def _watch(self, end: Callable[[], None], watching: anyio.CancelScope) -> None:
        """Read the child's output, and start a new child when a fault has killed it."""
        with watching:
            while True:
                status = await self._child.run()
                if self._death is None:
                    break
                self._bury(self._death)
                await anyio.sleep(self._death.away)
                # until the new child runs, late messages go to the old one, which drops them
                child = Child(self._command, self._drop)
                await child.start()
                self._child = child
                self._death = None
                self.away = False
            self._settle_memory(orderly=status == 0)
            self.status = status if status >= 0 else 128 - status
            end()

    def _bury(self, death: _Death) -> None:
        self.on_death()
        if death.empty:
            self._run.say(f"memory moved to {self._memory.move_away()}")
        else:
            self._settle_memory(orderly=False)

    def _settle_memory(self, *, orderly: bool) -> None:
        if orderly:
            self._memory.release()
        elif self._memory.put_back():
            self._run.say("saved memory restored")

    async def answer(self, request: Request, call: Call | None) -> Response | None:
        if request.method != b"POST":
            return Response(405, ((b"allow", b"POST"),), b"")
        # on stdio a message is one line; in JSON, line breaks occur only between tokens
        message = request.body.replace(b"\r", b" ").replace(b"\n", b" ")
        if call is None:
            await self._child.send(message)
            return Response(202, (), b"")
        await self._child.idle(call.key)
        answer = await self._child.ask(message, call.key)
        return None if answer is None else Response(200, _JSON, answer)

    async def die(self, away: float, *, empty: bool) -> None:
        if self._death is None:
            self._death = _Death(away, empty)
            self.away = True
            await self._child.kill()

    async def keep_aside(self) -> None:
        await self._child.quiet()
        self._memory.keep()

    async def _drop(self, line: bytes) -> None:
        """Drop a line: a notification, which HTTP cannot carry here, or an answer that no caller waits for."""


class _Server:
    """The HTTP server. Mutable state: the open connections, and the lock of calls that block later ones."""

    def __init__(self, run: Run, behind: _Behind, tasks: anyio.abc.TaskGroup) -> None:
        self._run = run
        self._behind = behind
        self._tasks = tasks
        self._turn = anyio.Lock()
        self._streams: set[Stream] = set()

    def admit(self, stream: Stream) -> None:
        """Serve a connection, or reset it while the server is dead."""
        if self._behind.away:
            stream.reset()
        else:
            self._streams.add(stream)
            self._tasks.start_soon(self._serve, stream)

    def reset_all(self) -> None:
        """Reset every connection."""
        for stream in list(self._streams):
            stream.reset()

    async def _serve(self, stream: Stream) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
        try:
            while True:
                request = await _read(connection, stream)
                if request is None:
                    break
                if isinstance(request, Refusal):
                    self._run.say(f"request rejected: {request.message}")
                    await stream.send(_rendered(Response(request.status, _LAST, request.message.encode() + b"\n")))
                    break
                await self._respond(request, stream)
                if any(name == b"connection" and b"close" in value.lower() for name, value in request.headers):
                    break
                connection = _next(connection)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            pass
        except h11.RemoteProtocolError as problem:
            self._run.say(f"connection closed, the client's input is not HTTP: {problem}")
        finally:
            self._streams.discard(stream)
            stream.close()

    async def _respond(self, request: Request, stream: Stream) -> None:
        call, applied = self._run.decide(request.body) if request.method == b"POST" else (None, None)
        if call is None or applied is None:
            # wait for a running call that blocks later ones
            async with self._turn:
                pass
            response = await self._behind.answer(request, call)
            await (_Out(stream).reset() if response is None else _Out(stream).send(response))
            return
        out = _Out(stream)
        wire = _Wire(out, self._behind, self._run, call, applied)
        over = anyio.Event()
        self._tasks.start_soon(self._misbehave, request, wire, over)
        await first_of(over.wait, out.sent.wait)
        if not out.sent.is_set():
            with suppress(anyio.EndOfStream):
                while True:  # wait for the client to close the connection, and drop further input
                    await stream.receive()
            stream.close()

    async def _misbehave(self, request: Request, wire: "_Wire", over: anyio.Event) -> None:
        fault = wire.applied.fault
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
            async with self._turn:
                if fault.in_order:
                    await misbehave(fault, request.body, self._go_on(request, wire), wire)
            if not fault.in_order:
                await misbehave(fault, request.body, self._go_on(request, wire), wire)
        over.set()

    def _go_on(self, request: Request, wire: "_Wire") -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            changed = msgspec.structs.replace(request, body=message)
            response = await self._behind.answer(changed, wire.call)
            if response is None:
                await wire.reset()
                return None
            if response.status != 200:
                await wire.pass_on(response)
                return None
            return response.body

        return go_on


class _Out:
    """The output to a client for one request. `sent` is set when something was sent, or the connection was closed."""

    def __init__(self, stream: Stream) -> None:
        self.sent = anyio.Event()
        self._stream = stream
        self._turn = anyio.Lock()

    async def send(self, response: Response) -> None:
        async with self._turn:
            await self._stream.send(_rendered(response))
        self.sent.set()

    async def send_half(self, response: Response) -> None:
        async with self._turn:
            await self._stream.send(_rendered(response)[: -max(1, len(response.body) // 2)])
        self._stream.close()
        self.sent.set()

    async def reset(self) -> None:
        self._stream.reset()
        self.sent.set()


class _Wire:
    """The `Wire` of a call over HTTP."""

    def __init__(self, out: _Out, behind: _Behind, run: Run, call: Call, applied: Applied) -> None:
        self.call = call
        self.applied = applied
        self._out = out
        self._behind = behind
        self._run = run

    async def send(self, message: bytes) -> None:
        await self._out.send(Response(200, _JSON, message))

    async def pass_on(self, response: Response) -> None:
        """Send the server's response with another status than 200 to the client."""
        await self._out.send(response)

    async def send_in_two(self, message: bytes, pause: float) -> None:
        raise AssertionError("a plan for HTTP has no such fault")

    async def send_half(self, message: bytes) -> None:
        await self._out.send_half(Response(200, _JSON, message))

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        named = tuple((name.lower().encode(), value.encode()) for name, value in headers.items())
        await self._out.send(Response(status, (*named, (b"content-type", b"text/plain")), body))

    async def reset(self) -> None:
        await self._out.reset()

    async def die(self, away: float, *, empty: bool) -> None:
        await self._behind.die(away, empty=empty)

    async def keep_aside(self) -> None:
        await self._behind.keep_aside()

    def note(self, sentence: str) -> None:
        self._run.note(self.call, self.applied, sentence)


async def _read(connection: h11.Connection, stream: Stream) -> Request | Refusal | None:
    """Return the next request, or why it is rejected; None at the end of the connection."""
    head: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        match event:
            case h11.NEED_DATA:
                if head is not None and connection.they_are_waiting_for_100_continue:
                    go_on = h11.InformationalResponse(status_code=100, headers=[])
                    await stream.send(connection.send(go_on) or b"")
                try:
                    connection.receive_data(await stream.receive())
                except anyio.EndOfStream:
                    connection.receive_data(b"")
            case h11.Request():
                head = event
            case h11.Data():
                body += event.data
            case h11.EndOfMessage() if head is not None:
                path, mark, query = bytes(head.target).partition(b"?")
                target = addressed(path, list(head.headers), head.http_version.decode(), ())
                if isinstance(target, Refusal):
                    return target
                return Request(bytes(head.method), target.path + mark + query, tuple(target.headers), bytes(body))
            case _:
                return None


def _next(connection: h11.Connection) -> h11.Connection:
    """Return a new h11 connection for the next request. Responses bypass h11, which cannot send broken ones."""
    following = h11.Connection(h11.SERVER, max_incomplete_event_size=_LONGEST_HEAD)
    data, ended = connection.trailing_data
    if data:
        following.receive_data(data)
    if ended:
        following.receive_data(b"")
    return following


def _rendered(response: Response) -> bytes:
    """Return the bytes of a response."""
    try:
        phrase = HTTPStatus(response.status).phrase
    except ValueError:
        phrase = ""
    headers = (*response.headers, (b"content-length", b"%d" % len(response.body)))
    lines = [f"HTTP/1.1 {response.status} {phrase}".encode(), *[b"%b: %b" % header for header in headers]]
    return b"\r\n".join(lines) + b"\r\n\r\n" + response.body
