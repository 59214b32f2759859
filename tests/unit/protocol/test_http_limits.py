"""The most that the HTTP server spends on its clients: requests, bytes, connections and time, over real sockets."""

import asyncio
import contextlib
import hashlib
import json
import logging
import random
import tracemalloc
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import anyio.streams.buffered
import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule
from uvicorn.server import ServerState

from a2m_router.daemon.serve.authentication import admission
from a2m_router.protocol.server.http import application, serve_http
from a2m_router.protocol.server.http_connection import ConnectionConfig, HttpConnection
from a2m_router.protocol.server.http_limits import DEFAULT_LIMITS, MIN_RATE, Busy, HttpLimits, Limiter, patience
from a2m_router.protocol.server.server import Caller
from tests.support.examples import scaled

PATIENCE = 20  # far more than any step here takes; a hang becomes a failure
SOON = 0.4  # a short idle_timeout in which a busy machine can still send a request
CALL = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "memory/describe"}).encode()
POST = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param}


class Principal(msgspec.Struct, frozen=True):
    owner: str
    token_sha256: str


ALICE = Principal("alice", hashlib.sha256(b"open sesame").hexdigest())
ALICES = b"Authorization: Bearer open sesame\r\n"


class Gate:
    """An `Answering` whose calls wait until the gate opens. `begun` and `ended` count them."""

    def __init__(self, answer: bytes = b"{}") -> None:
        self.begun = self.ended = 0
        self.open = anyio.Event()
        self._answer = answer
        self._changed = anyio.Event()

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        self.begun += 1
        self._tell()
        try:
            await self.open.wait()
        finally:
            self.ended += 1
            self._tell()
        return self._answer

    async def until(self, reached: Callable[[], bool]) -> None:
        with anyio.fail_after(PATIENCE):
            while not reached():
                await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


async def at_once(message: bytes, caller: Caller) -> bytes | None:
    return message


async def profile(_: Caller) -> Any:
    return {"name": "home"}


class Answer(msgspec.Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes


class Wire:
    """A client that sends exactly the given bytes."""

    def __init__(self, stream: anyio.abc.ByteStream) -> None:
        self._stream = stream
        self._buffered = anyio.streams.buffered.BufferedByteReceiveStream(stream)

    async def send(self, data: bytes) -> None:
        await self._stream.send(data)

    async def answer(self, *, head_only: bool = False) -> Answer:
        with anyio.fail_after(PATIENCE):
            head = (await self._buffered.receive_until(b"\r\n\r\n", 2**16)).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:])}
            length = 0 if head_only else int(headers.get("content-length", "0"))
            body = await self._buffered.receive_exactly(length) if length else b""
        return Answer(int(head[0].split(" ")[1]), headers, body)

    async def ask(self, data: bytes, *, head_only: bool = False) -> Answer:
        await self.send(data)
        return await self.answer(head_only=head_only)

    async def call(self, body: bytes = CALL, headers: bytes = b"") -> Answer:
        return await self.ask(posted(body, headers))

    async def closed(self) -> bytes:
        """Return the bytes that come before the server closes the connection."""
        rest = bytearray()
        with anyio.fail_after(PATIENCE), contextlib.suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                rest += await self._buffered.receive()
        return bytes(rest)

    async def trickle(self, piece: bytes = b"x") -> bytes:
        """Send a piece now and then until the server closes the connection; return the bytes that came."""
        async with anyio.create_task_group() as tasks:

            async def send() -> None:
                with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):
                    while True:
                        await self._stream.send(piece)
                        await anyio.sleep(SOON / 10)

            tasks.start_soon(send)
            rest = await self.closed()
            tasks.cancel_scope.cancel()
        return rest

    async def hang_up(self) -> None:
        await self._stream.aclose()


class Served:
    def __init__(self, port: int) -> None:
        self.port = port

    @asynccontextmanager
    async def wire(self) -> AsyncIterator[Wire]:
        async with await anyio.connect_tcp("127.0.0.1", self.port) as stream:
            yield Wire(stream)

    async def call(self, body: bytes = CALL, headers: bytes = b"") -> Answer:
        async with self.wire() as wire:
            return await wire.call(body, headers)

    async def until_it_is_held(self, too_much: int) -> None:
        """Wait until a body of that many bytes does not fit any more."""
        with anyio.fail_after(PATIENCE):
            while (await self.call(b"x" * too_much)).status != 503:
                pass

    async def until_there_is_room(self, body: bytes = CALL) -> None:
        """Wait until the server has noticed that clients have gone; there is no event for it."""
        with anyio.fail_after(PATIENCE):
            while True:
                with contextlib.suppress(anyio.IncompleteRead, anyio.BrokenResourceError):  # cut off if time is short
                    if (await self.call(body)).status != 503:
                        return


@asynccontextmanager
async def served(
    answer: Any = at_once,
    limits: HttpLimits = DEFAULT_LIMITS,
    *,
    principals: Collection[Principal] = (),
    origins: Collection[str] = (),
    ready: Callable[[], str | None] = lambda: None,
    max_message: int = 1000,
) -> AsyncIterator[Served]:
    admit = admission(origins, principals)
    app = application(answer, admit=admit, profile=profile, ready=ready, max_message=max_message, limits=limits)
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(serve_http, app, "127.0.0.1", 0, limits)
        yield Served(port)
        tasks.cancel_scope.cancel()


def posted(body: bytes, headers: bytes = b"") -> bytes:
    return POST + headers + b"Content-Length: %d\r\n\r\n" % len(body) + body


def announced(length: int, headers: bytes = b"") -> bytes:
    return POST + headers + b"Content-Length: %d\r\n\r\n" % length


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def is_busy(answer: Answer) -> bool:
    assert answer.status != 503 or int(answer.headers["retry-after"]) >= 1
    return answer.status == 503


# --- requests and bytes


class Interleavings(RuleBasedStateMachine):
    """Requests come, grow, shrink and end in any order; a model of plain numbers predicts the answers."""

    MAX_REQUESTS, MAX_HELD = 3, 100
    requests = Bundle("requests")
    sizes = st.integers(0, 150)

    def __init__(self) -> None:
        super().__init__()
        self.limiter = Limiter(self.MAX_REQUESTS, self.MAX_HELD)
        self.held: dict[int, int] = {}
        self.places: dict[int, tuple[ExitStack, Callable[[int], None]]] = {}
        self.names = iter(range(10**6))

    def fits(self, size: int, others: int) -> bool:
        return size == 0 or others == 0 or others + size <= self.MAX_HELD

    @rule(target=requests, size=sizes)
    def come(self, size: int) -> int:
        name, stack = next(self.names), ExitStack()
        admitted = len(self.held) < self.MAX_REQUESTS and self.fits(size, sum(self.held.values()))
        try:
            self.places[name] = stack, stack.enter_context(self.limiter.place(size))
            self.held[name] = size
            assert admitted
        except Busy:
            assert not admitted
        return name

    @rule(name=requests, size=sizes)
    def hold(self, name: int, size: int) -> None:
        if name not in self.held:
            return
        less = size <= self.held[name]
        fits = less or self.fits(size, sum(self.held.values()) - self.held[name])
        try:
            self.places[name][1](size)
            self.held[name] = size
            assert fits
        except Busy:
            assert not fits

    @rule(name=consumes(requests), fault=st.booleans())
    def go(self, name: int, fault: bool) -> None:
        if self.held.pop(name, None) is not None:
            stack, _ = self.places.pop(name)
            stack.__exit__(*((ValueError, ValueError(), None) if fault else (None, None, None)))

    @invariant()
    def what_is_counted_is_what_is_held(self) -> None:
        assert f"{len(self.held)}/3 requests, {sum(self.held.values())}/100 bytes" in repr(self.limiter)

    @precondition(lambda self: not self.held)
    @rule(size=st.integers(0, 10**9))
    def one_alone_always_fits(self, size: int) -> None:
        with self.limiter.place(size) as hold:
            hold(2 * size)


TestInterleavings = Interleavings.TestCase


class Visit:
    """One request directly to the application; the test determines each step of its client and the end of its call."""

    def __init__(self, declared: bool, sizes: list[int]) -> None:
        self.status: int | None = None
        self.finish = anyio.Event()
        self.fails = False
        self._scope = anyio.CancelScope()
        length = [(b"content-length", b"%d" % sum(sizes))] if declared else []
        self._headers = [(b"content-type", b"application/json"), *length]
        self._pieces = [{"type": "http.request", "body": b" " * size, "more_body": True} for size in sizes]
        self._pieces[-1]["more_body"] = False
        self._events, self._receive = anyio.create_memory_object_stream[dict[str, Any]](100)

    async def run(self, app: Any) -> None:
        VISIT.set(self)
        scope = {"type": "http", "method": "POST", "path": "/", "raw_path": b"/", "query_string": b""}
        with self._receive, self._events, self._scope, contextlib.suppress(ZeroDivisionError):
            await app({**scope, "headers": self._headers}, self._receive.receive, self._send)

    def step(self, what: str) -> None:
        match what:
            case "send":
                if self._pieces:
                    self._tell(self._pieces.pop(0))
            case "hang up":
                self._pieces.clear()
                self._tell({"type": "http.disconnect"})
            case "cancel":
                self._scope.cancel()
            case _:
                self.fails = what == "fail"
                self.finish.set()

    def _tell(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
            self._events.send_nowait(event)

    async def _send(self, message: Any) -> None:
        await anyio.lowlevel.checkpoint()
        self.status = message.get("status", self.status)


async def settled() -> None:
    """Wait until no task has anything to do: no step of a request takes so many turns of the loop."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


VISIT: ContextVar[Visit] = ContextVar("VISIT")
STEPS = ("send", "send", "send", "hang up", "cancel", "answer", "fail")


@settings(max_examples=scaled(30))
@given(
    requests=st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 50), min_size=1, max_size=3)), max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.sampled_from(STEPS)), max_size=30),
    backend=st.sampled_from(["asyncio", "trio"]),
)
def test_however_requests_end_their_room_is_free_again(
    requests: list[tuple[bool, list[int]]], steps: list[tuple[int, str]], backend: str
) -> None:
    """Bodies come in pieces, stop, are cut off or cancelled, and answers fail, in any order."""
    limits = HttpLimits(max_requests=3, max_held=90)
    under_way: list[int] = []

    async def answer(message: bytes, _: Caller) -> bytes | None:
        under_way.append(len(message))
        assert len(under_way) <= limits.max_requests
        assert len(under_way) == 1 or sum(under_way) <= limits.max_held
        try:
            await VISIT.get().finish.wait()
            if VISIT.get().fails:
                raise ZeroDivisionError
            return message
        finally:
            under_way.remove(len(message))

    async def scenario() -> None:
        app = application(answer, admit=admission((), ()), profile=profile, max_message=100, limits=limits)
        visits = [Visit(declared, sizes) for declared, sizes in requests]
        async with anyio.create_task_group() as tasks:
            for visit in visits:
                tasks.start_soon(visit.run, app)
            for number, step in steps:
                if number < len(visits):
                    visits[number].step(step)
                await settled()
            for visit in visits:
                visit.step("cancel")
        whole = [Visit(True, [30]), Visit(True, [30]), Visit(False, [30])]
        async with anyio.create_task_group() as tasks:
            for visit in whole:
                tasks.start_soon(visit.run, app)
                visit.step("send")
            await settled()
            assert under_way == [30, 30, 30]
            for visit in whole:
                visit.step("answer")
        assert [visit.status for visit in whole] == [200, 200, 200]

    with without_logs():
        anyio.run(scenario, backend=backend)


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.anyio
async def test_one_request_too_many_is_refused_at_once() -> None:
    gate = Gate()
    async with served(gate, HttpLimits(max_requests=2)) as server, server.wire() as first, server.wire() as second:
        await first.send(posted(CALL))
        await second.send(announced(100))  # it counts as under way before any byte of its body has come
        await gate.until(lambda: gate.begun == 1)
        async with server.wire() as third:
            refused = await third.ask(announced(1000))  # the server does not wait for the body
            assert is_busy(refused)
            assert b"try again" in refused.body
        assert gate.begun == 1
        gate.open.set()
        assert (await first.answer()).status == 200
        assert (await server.call()).status == 200
        await second.send(b" " * 100)
        assert (await second.answer()).status == 200


@pytest.mark.anyio
async def test_a_refused_request_leaves_its_connection_usable() -> None:
    gate = Gate()
    async with served(gate, HttpLimits(max_requests=1)) as server, server.wire() as first, server.wire() as second:
        await first.send(posted(CALL))
        await gate.until(lambda: gate.begun == 1)
        assert is_busy(await second.call(b"x" * 900))
        assert is_busy(await second.call(b"x" * 900))
        gate.open.set()
        assert (await first.answer()).status == 200
        assert (await second.call()).status == 200


@pytest.mark.anyio
async def test_a_stranger_does_not_learn_that_there_is_no_room() -> None:
    gate = Gate()
    limits = HttpLimits(max_requests=1)
    async with served(gate, limits, principals=[ALICE]) as server, server.wire() as first:
        await first.send(posted(CALL, ALICES))
        await gate.until(lambda: gate.begun == 1)
        assert (await server.call()).status == 401
        assert (await server.call(headers=b"Authorization: Bearer wrong\r\n")).status == 401
        assert (await server.call(headers=ALICES + b"Origin: https://evil.example\r\n")).status == 403
        assert is_busy(await server.call(headers=ALICES))
        gate.open.set()


@pytest.mark.anyio
async def test_the_profile_takes_a_place_too() -> None:
    async with served(limits=HttpLimits(max_requests=0)) as server, server.wire() as wire:
        assert is_busy(await wire.ask(get(b"/.well-known/a2m-server.json")))


@pytest.mark.anyio
async def test_a_page_may_read_when_to_try_again() -> None:
    page = b"Origin: https://app.example\r\n"
    async with served(limits=HttpLimits(max_requests=0), origins=["https://app.example"]) as server:
        refused = await server.call(headers=page)
        assert is_busy(refused)
        assert refused.headers["access-control-allow-origin"] == "https://app.example"
        assert refused.headers["access-control-expose-headers"] == "Retry-After"


@pytest.mark.anyio
async def test_bodies_are_admitted_by_their_announced_length() -> None:
    async with served(limits=HttpLimits(max_held=1000)) as server, server.wire() as first:
        await first.send(announced(600) + b"x")
        await server.until_it_is_held(401)
        assert (await server.call(b"x" * 400)).status == 200
        await first.hang_up()
        await server.until_there_is_room(b"x" * 401)


@pytest.mark.anyio
async def test_bodies_of_unknown_length_are_admitted_by_what_has_come() -> None:
    async with served(limits=HttpLimits(max_held=1000)) as server, server.wire() as first, server.wire() as second:
        await first.send(CHUNKED + chunk(b"x" * 300) + chunk(b"x" * 300))
        await server.until_it_is_held(401)
        refused = await second.ask(CHUNKED + chunk(b"x" * 400) + chunk(b"x"))
        assert is_busy(refused)
        await first.send(chunk(b"x" * 400) + b"0\r\n\r\n")
        assert (await first.answer()).status == 200
        assert (await server.call(b"x" * 401)).status == 200


@pytest.mark.anyio
async def test_one_body_alone_is_taken_though_it_is_more_than_all_may_hold() -> None:
    async with served(limits=HttpLimits(max_held=10)) as server:
        assert (await server.call(b"x" * 1000)).status == 200
        async with server.wire() as wire:
            whole = CHUNKED + chunk(b"x" * 500) + chunk(b"x" * 500) + b"0\r\n\r\n"
            assert (await wire.ask(whole)).status == 200


@pytest.mark.anyio
async def test_what_is_refused_for_its_length_holds_nothing() -> None:
    async with served(limits=HttpLimits(max_held=1000)) as server, server.wire() as wire:
        await wire.send(announced(4000) + b"x" * 1500)
        assert (await server.call(b"x" * 1000)).status == 200
        async with server.wire() as holding:
            await holding.send(announced(1000))
            await server.until_it_is_held(1)
            # it will never fit, so the answer is not to try again later
            assert (await server.call(b"x" * 2000)).status == 413
        await wire.send(b"x" * 2500)
        assert (await wire.answer()).status == 413


@pytest.mark.anyio
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_that_is_too_long_is_not_held(declared: bool) -> None:
    size, piece = 12 * 2**20, b"x" * 2**18
    async with served(max_message=4 * 2**20) as server, server.wire() as wire:
        tracemalloc.start()
        try:
            await wire.send(announced(size) if declared else CHUNKED)
            for _ in range(size // len(piece)):
                await wire.send(piece if declared else chunk(piece))
            await wire.send(b"" if declared else b"0\r\n\r\n")
            assert (await wire.answer()).status == 413
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < (3 if declared else 7) * 2**20


# --- clients that have gone, and clients that do not read


@pytest.mark.anyio
async def test_a_call_whose_client_is_gone_is_called_off() -> None:
    gate = Gate()
    async with served(gate, HttpLimits(max_requests=1)) as server:
        async with server.wire() as wire:
            await wire.send(posted(CALL))
            await gate.until(lambda: gate.begun == 1)
        await gate.until(lambda: gate.ended == 1)
        gate.open.set()
        await server.until_there_is_room()


@pytest.mark.anyio
async def test_a_call_that_must_be_finished_keeps_its_place_without_its_client() -> None:
    """A call that must be finished goes on without its client, and counts as under way until its end."""
    gate = Gate()

    async def finished(message: bytes, caller: Caller) -> bytes | None:
        with anyio.CancelScope(shield=True):
            answer = await gate(message, caller)
        return answer  # noqa: RET504  # mypy takes a block that may swallow exceptions for one that may not return

    async with served(finished, HttpLimits(max_requests=1)) as server:
        async with server.wire() as wire:
            await wire.send(posted(CALL))
            await gate.until(lambda: gate.begun == 1)
        assert is_busy(await server.call())
        gate.open.set()
        await server.until_there_is_room()
        assert gate.ended >= 2


@pytest.mark.anyio
async def test_a_client_that_does_not_read_is_cut_off_and_leaves_its_place() -> None:
    async def long(message: bytes, _: Caller) -> bytes | None:
        return b" " * 2**25 if message == CALL else b"{}"

    limits = HttpLimits(max_requests=1, idle_timeout=SOON)
    async with served(long, limits) as server, server.wire() as wire:
        await wire.send(posted(CALL))
        assert (await wire.answer(head_only=True)).status == 200
        await server.until_there_is_room(b"{}")
        assert len(await wire.closed()) < 2**25


@pytest.mark.anyio
async def test_a_client_that_does_not_read_holds_no_body_any_more() -> None:
    async def long(message: bytes, _: Caller) -> bytes | None:
        return b" " * 2**25 if len(message) > 500 else b"{}"

    async with served(long, HttpLimits(max_held=1000)) as server, server.wire() as wire:
        await wire.send(posted(b"x" * 900))
        assert (await wire.answer(head_only=True)).status == 200
        assert (await server.call(b"x" * 400)).status == 200


class Stuck(asyncio.Transport):
    """A connection whose client reads nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.aborted = anyio.Event()
        self._closing = False

    def write(self, data: Any) -> None: ...

    def close(self) -> None:
        self._closing = True

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self.aborted.set()


@pytest.mark.anyio
async def test_a_client_that_does_not_take_the_last_of_its_answer_is_cut_off_too() -> None:
    """The rest is too short to pause the transport, and closing would wait until it is written."""
    app = application(at_once, admit=admission((), ()), profile=profile)
    state, stuck = ServerState(), Stuck()
    connection = HttpConnection(ConnectionConfig(app, HttpLimits(idle_timeout=SOON), lifespan="off"), state, {})
    connection.connection_made(stuck)
    connection.data_received(posted(CALL, b"Connection: close\r\n"))
    with anyio.fail_after(PATIENCE):
        await stuck.aborted.wait()
    assert stuck.is_closing()
    connection.connection_lost(None)


@pytest.mark.anyio
async def test_a_long_answer_arrives_whole() -> None:
    whole = bytes(range(256)) * 2**14

    async def long(message: bytes, _: Caller) -> bytes | None:
        return whole

    async with served(long) as server, server.wire() as wire:
        assert (await wire.call()).body == whole
        assert (await wire.call()).body == whole


@pytest.mark.anyio
async def test_a_client_that_asks_on_and_on_and_never_reads_is_cut_off() -> None:
    async def long(message: bytes, _: Caller) -> bytes | None:
        return b" " * 2**15

    async with served(long, HttpLimits(idle_timeout=SOON)) as server, server.wire() as wire:
        with anyio.fail_after(PATIENCE), contextlib.suppress(anyio.BrokenResourceError):
            while True:
                await wire.send(posted(CALL))


# --- time


@given(took=st.floats(0, 1e6), came=st.integers(0, 2**30), idle=st.floats(0.1, 1e3))
def test_a_body_has_time_by_its_length_and_must_not_stand_still(took: float, came: int, idle: float) -> None:
    """A body has a time limit by its length from the start, and another one between two pieces."""
    left = patience(took, came, idle)
    assert left <= idle
    assert (left > 0) == (took < idle + came / MIN_RATE)
    assert patience(took, came + 1, idle) >= left >= patience(took + 1, came, idle)


SLOW = HttpLimits(idle_timeout=SOON, max_requests=1)


@pytest.mark.anyio
async def test_a_connection_on_which_nothing_comes_is_closed() -> None:
    async with served(limits=SLOW) as server, server.wire() as wire:
        assert await wire.closed() == b""


@pytest.mark.anyio
async def test_a_connection_that_is_idle_after_an_answer_is_closed() -> None:
    async with served(limits=SLOW) as server, server.wire() as wire:
        assert (await wire.call()).status == 200
        assert (await wire.call()).status == 200
        assert await wire.closed() == b""


@pytest.mark.anyio
@pytest.mark.parametrize("before", [b"", posted(CALL)], ids=["first", "second"])
async def test_a_head_that_comes_byte_by_byte_is_not_waited_for(before: bytes) -> None:
    async with served(limits=SLOW) as server, server.wire() as wire:
        if before:
            assert (await wire.ask(before)).status == 200
        await wire.send(b"POST / HTTP/1.1\r\nHost: localhost\r\nX: ")
        rest = await wire.trickle()
        assert rest.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in rest.lower()


@pytest.mark.anyio
async def test_what_comes_after_the_last_answer_is_not_carried_out(caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    async with served(gate, HttpLimits(idle_timeout=SOON, max_connections=1)) as server, server.wire() as wire:
        whole = posted(CALL)
        await wire.send(whole[:50])
        assert (await wire.answer()).status == 408
        with contextlib.suppress(anyio.BrokenResourceError):
            await wire.send(whole[50:])
        assert await wire.closed() == b""
        await wire.hang_up()
        gate.open.set()
        await server.until_there_is_room()
        assert gate.begun == 1
    assert "Traceback" not in caplog.text


@pytest.mark.anyio
@pytest.mark.parametrize("piece", [b"", b"x", chunk(b"x")], ids=["nothing", "bytes", "chunks"])
async def test_a_body_that_comes_byte_by_byte_is_not_waited_for(piece: bytes) -> None:
    async with served(limits=SLOW) as server, server.wire() as wire:
        await wire.send(CHUNKED if piece == chunk(b"x") else announced(1000))
        rest = await wire.trickle(piece) if piece else await wire.closed()
        assert rest.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in rest.lower()
        await server.until_there_is_room()


@pytest.mark.anyio
async def test_the_rest_of_a_body_is_not_waited_for_when_its_request_is_refused() -> None:
    async with served(limits=SLOW, principals=[ALICE]) as server, server.wire() as wire:
        refused = await wire.ask(announced(10**9))
        assert refused.status == 401
        assert await wire.trickle() == b""


@pytest.mark.anyio
async def test_a_call_under_way_is_not_cut_off_for_its_silence() -> None:
    gate = Gate()
    async with served(gate, SLOW) as server, server.wire() as wire:
        await wire.send(posted(CALL))
        await gate.until(lambda: gate.begun == 1)
        async with server.wire() as silent:
            assert await silent.closed() == b""  # an idle_timeout has passed by now
        gate.open.set()
        assert (await wire.answer()).status == 200


# --- connections


@pytest.mark.anyio
async def test_a_connection_too_many_is_told_so_and_closed() -> None:
    async with served(limits=HttpLimits(max_connections=2)) as server:
        async with server.wire() as first, server.wire() as second:
            assert (await first.call()).status == (await second.call()).status == 200
            async with server.wire() as third:
                refused = await third.answer()  # although it has sent no request
                assert is_busy(refused)
                assert refused.headers["connection"] == "close"
                assert await third.closed() == b""
            assert is_busy(await server.call())
            assert (await first.call()).status == 200
        await server.until_there_is_room()


@pytest.mark.anyio
async def test_a_pile_of_connections_does_not_grow() -> None:
    """Many surplus connections are closed, and the established ones are served."""
    async with served(limits=HttpLimits(max_connections=10)) as server, server.wire() as early:
        assert (await early.call()).status == 200
        async with contextlib.AsyncExitStack() as stack:
            pile = [await stack.enter_async_context(server.wire()) for _ in range(200)]
            turned_away = [await wire.answer() for wire in pile[9:]]
            assert all(is_busy(answer) for answer in turned_away)
            assert (await early.call()).status == 200
            assert [(await wire.call()).status for wire in pile[:9]] == [200] * 9
        await server.until_there_is_room()


@pytest.mark.anyio
async def test_no_more_connections_are_taken_than_the_process_may_open_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (258, 258))
    async with served() as server, server.wire() as first, server.wire() as second:
        assert (await first.call()).status == (await second.call()).status == 200
        assert is_busy(await server.call())


# --- heads


BOMBS = {
    "one long line": b"X: " + b"x" * 5000,
    "many lines": b"X: x\r\n" * 1000 + b"Y: y",
    "a long address": b"",
}


@pytest.mark.anyio
@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("size", [50, 2**20], ids=["in pieces", "at once"])
async def test_a_head_that_is_too_long_is_431(bomb: str, size: int, caplog: pytest.LogCaptureFixture) -> None:
    head = b"GET /%b HTTP/1.1\r\nHost: localhost\r\n%b\r\n\r\n" % (b"" if BOMBS[bomb] else b"x" * 5000, BOMBS[bomb])
    async with served(limits=HttpLimits(max_header=2000)) as server, server.wire() as wire:
        with contextlib.suppress(anyio.BrokenResourceError):
            for start in range(0, len(head), size):
                await wire.send(head[start : start + size])
        assert (await wire.closed()).startswith(b"HTTP/1.1 431 ")
        assert (await server.call()).status == 200
    assert "Traceback" not in caplog.text


@pytest.mark.anyio
async def test_a_head_that_never_ends_is_431_and_its_sender_is_cut_off() -> None:
    """A head without an end is answered 431, and a client that goes on sending is cut off."""
    limits = HttpLimits(max_header=2000, max_connections=1, idle_timeout=SOON)
    async with served(limits=limits) as server, server.wire() as wire:
        await wire.send(b"x" * 3000)  # in one piece, so that the time limit does not come first
        assert (await wire.trickle(b"x" * 1000)).startswith(b"HTTP/1.1 431 ")
        with anyio.fail_after(PATIENCE), contextlib.suppress(anyio.BrokenResourceError):
            while True:
                await wire.send(b"x" * 1000)
        await server.until_there_is_room()


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\xfc\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n\r\n", 400),
        (POST + b"Content-Length: -1\r\n\r\n", 400),
        (POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
        (POST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
        (CHUNKED + b"xyz\r\n", 400),
    ],
)
async def test_what_is_no_http_is_told_so(sent: bytes, status: int, caplog: pytest.LogCaptureFixture) -> None:
    async with served(limits=HttpLimits(max_requests=1)) as server, server.wire() as wire:
        answer = await wire.ask(sent)
        assert (answer.status, answer.headers["connection"]) == (status, "close")
        assert "server" not in answer.headers
        assert await wire.closed() == b""
        await server.until_there_is_room()
    assert "Traceback" not in caplog.text


@pytest.mark.anyio
async def test_garbage_after_an_early_refusal_only_closes_the_connection(caplog: pytest.LogCaptureFixture) -> None:
    async with served(principals=[ALICE]) as server, server.wire() as wire:
        assert (await wire.ask(CHUNKED)).status == 401
        await wire.send(b"no chunk at all\r\n")
        assert await wire.closed() == b""
        assert (await server.call()).status == 401
    assert "Traceback" not in caplog.text


FRAGMENTS = (
    *(POST, CHUNKED, announced(5), posted(CALL), posted(b"x" * 2000), b"\r\n", b"\r\n\r\n", b"x" * 700, b"0\r\n\r\n"),
    *(chunk(b"abc"), b"ffffffffff\r\n", b"Expect: 100-continue\r\n", b"Connection: close\r\n", b"Upgrade: h2c\r\n"),
    *(
        b"HEAD / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ),
    *(
        b"CONNECT a:1 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /%ff%00 HTTP/1.0\r\n\r\n",
    ),
    *(
        b"GET http://a/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x00\xff",
        b"GET / HTTP/9.9\r\n\r\n",
    ),
)


@pytest.mark.anyio
async def test_whatever_is_sent_the_server_goes_on_and_nothing_leaks(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(8)
    async with served(limits=HttpLimits(max_requests=1, max_connections=1, max_header=1000)) as server:
        for _ in range(300):
            async with server.wire() as wire:
                with contextlib.suppress(anyio.BrokenResourceError):
                    for fragment in chance.choices(FRAGMENTS, k=chance.randint(1, 6)):
                        await wire.send(fragment)
                        if chance.random() < 0.5:
                            await anyio.lowlevel.checkpoint()
            await server.until_there_is_room()
    assert "Traceback" not in caplog.text
    assert "Exception" not in caplog.text


# --- well-behaved clients


@pytest.mark.anyio
async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served(limits=HttpLimits(max_requests=1)) as server, server.wire() as wire:
        await wire.send(b"".join(posted(b"%d" % number) for number in range(50)))
        assert [(await wire.answer()).body for _ in range(50)] == [b"%d" % number for number in range(50)]


@pytest.mark.anyio
async def test_a_client_that_asks_first_is_told_to_go_on() -> None:
    async with served() as server, server.wire() as wire:
        assert (await wire.ask(announced(3, b"Expect: 100-continue\r\n"), head_only=True)).status == 100
        assert (await wire.ask(b"abc")).body == b"abc"


@pytest.mark.anyio
async def test_a_client_that_asks_first_and_is_refused_need_not_send() -> None:
    """The client may then send the body or not, so the server cannot tell its bytes from a request."""
    gate = Gate()
    limits = HttpLimits(max_requests=1)
    async with served(gate, limits, principals=[ALICE]) as server, server.wire() as first:
        await first.send(posted(CALL, ALICES))
        await gate.until(lambda: gate.begun == 1)
        for headers, status in [(b"", 401), (ALICES, 503), (ALICES + b"A2M-Protocol-Version: a2m/9\r\n", 400)]:
            async with server.wire() as wire:
                refused = await wire.ask(announced(3, headers + b"Expect: 100-continue\r\n"))
                assert (refused.status, refused.headers["connection"]) == (status, "close")
                assert await wire.closed() == b""
        gate.open.set()


# --- liveness and readiness


def get(path: bytes, headers: bytes = b"", version: bytes = b"1.1", method: bytes = b"GET") -> bytes:
    return b"%b %b HTTP/%b\r\nHost: localhost\r\n%b\r\n" % (method, path, version, headers)


@pytest.mark.anyio
async def test_a_full_server_still_answers_that_it_is_alive() -> None:
    """A full server still answers that it is alive and ready."""
    limits = HttpLimits(max_requests=0)
    async with served(limits=limits, principals=[ALICE]) as server, server.wire() as wire:
        for path, word in [(b"/healthz", b"alive"), (b"/readyz", b"ready")]:
            told = await wire.ask(get(path))
            assert (told.status, told.body) == (200, word)
            assert told.headers["content-type"].startswith("text/plain")
            assert (await wire.ask(get(path, method=b"HEAD"), head_only=True)).status == 200
            wrong = await wire.ask(posted(CALL).replace(b"/", path, 1))
            assert (wrong.status, wrong.headers["allow"]) == (405, "GET, HEAD")
        await wire.send(b"GET /healthz HTTP/1.0\r\n\r\n")  # some load balancers
        assert (await wire.answer()).status == 200


@pytest.mark.anyio
async def test_why_it_is_not_ready_is_told_only_to_those_who_may_call() -> None:
    async with served(principals=[ALICE], ready=lambda: "working is down") as server, server.wire() as wire:
        for headers in (b"", b"Authorization: Bearer wrong\r\n"):
            told = await wire.ask(get(b"/readyz", headers))
            assert (told.status, told.body) == (503, b"not ready")
        told = await wire.ask(get(b"/readyz", ALICES))
        assert (told.status, told.body) == (503, b"not ready: working is down")
        assert (await wire.ask(get(b"/healthz"))).status == 200
    async with served(ready=lambda: "working is down") as server, server.wire() as wire:
        assert (await wire.ask(get(b"/readyz"))).body == b"not ready: working is down"


@pytest.mark.anyio
@pytest.mark.parametrize("path", [b"/healthz", b"/readyz"])
async def test_a_foreign_page_is_not_even_told_that_there_is_a_server(path: bytes) -> None:
    async with served(origins=["https://app.example"]) as server, server.wire() as wire:
        assert (await wire.ask(get(path, b"Origin: https://evil.example\r\n"))).status == 403
        told = await wire.ask(get(path, b"Origin: https://app.example\r\n"))
        assert (told.status, told.headers["access-control-allow-origin"]) == (200, "https://app.example")
