"""The tiers of a simulated federation: servers in this process that carry out calls in order, fail, die, and come back.

The names of faults are those of a2m-chaos (backends/a2m_chaos/faults.py). A server may be late, silent or dead, may
refuse calls, and its answers may be corrupted. It may give false answers where its router verifies: about copies of
records that live elsewhere, about deletions, and, at a lifted tier, about all writes. A native store keeps what it
acknowledged of a record that has no other copy, since no router could detect the loss. At a tier that is remote by its
settings, calls overtake each other, and may land after the death of their router.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any, Final, Protocol

import anyio
import anyio.abc
import msgspec
import trio

from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import Connection, Settled, settled, tending
from a2m_router.protocol.client.http_client import SETTLING
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error
from a2m_store.server import serving
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly

# faults that are possible for some methods only
_METHODS: Final[Mapping[str, Sequence[str]]] = {
    "refuse-writes": ("memory/remember", "memory/forget"),
    "disk-full": ("memory/remember", "memory/forget"),
    "lose-write": ("memory/remember",),
    "alter-record": ("memory/remember",),
    "forget-less": ("memory/forget",),
}

# the weights of the faults
FAULTS: Final[Mapping[str, int]] = {
    "delay": 6,
    "hang": 2,
    "drop-answer": 6,
    "answer-late": 5,
    "answer-twice": 3,
    "apply-late": 3,
    "wrong-id": 4,
    "tear-line": 3,
    "log-line": 3,
    "garbage-line": 3,
    "exit-before-work": 4,
    "exit-after-work": 5,
    "exit-after-answer": 3,
    "refuse-writes": 8,
    "disk-full": 5,
    "lose-write": 6,
    "alter-record": 6,
    "forget-less": 10,
}
# over HTTP the danger is a call that lands late
REMOTE_FAULTS: Final[Mapping[str, int]] = {**FAULTS, "apply-late": 16}

# faults that never make a call fail
_HARMLESS: Final = frozenset({"answer-twice", "log-line"})

# the seconds for calls under way at a server whose router closes the connection
_GRACE: Final = 5.0

# the seconds within which calls of a dead router land, less than a router waits for them
_LATEST: Final = 0.9 * SETTLING

_ROUTER: Final = Caller(asserts_owner=True)

# Trouble ends so many seconds after its cause: breakers have been tried, and calls in doubt are resolved.
AFTERMATH: Final = 300.0


class Watched(Protocol):
    """The router that a tier serves."""

    dead: bool

    def point(self, what: str) -> None:
        """Note an event at this moment; the router may die here."""

    def homes(self, ids: Iterable[str]) -> list[str | None]:
        """Return the homes of records; None for an id without a record."""


class _Message(msgspec.Struct, kw_only=True):
    jsonrpc: str = "2.0"
    method: str
    id: msgspec.Raw
    params: msgspec.Raw = msgspec.Raw(b"{}")


class _Ids(msgspec.Struct):
    ids: list[str] = []


class _Records(msgspec.Struct):
    records: list[dict[str, msgspec.Raw]]


class Tier:
    """One tier's records, and the process that serves them, if it runs.

    Args:
        tell: writes into the history.
        rate: the share of its calls that go wrong.
        latency: the most seconds that a call takes.
        is_remote: it is reached over HTTP: calls of a router that dies may land after the start of the next one.
    """

    def __init__(
        self,
        name: str,
        kept: Store | CoreOnly,
        chance: Random,
        timeout: float,
        tell: Callable[[str, str], None],
        *,
        is_remote: bool = False,
    ) -> None:
        self.name = name
        self.kept = kept
        self.chance = chance
        self.timeout = timeout
        self.tell = tell
        self.rate = 0.0
        self.latency = 0.0
        self.is_remote = is_remote
        self.down = False
        self.process: Process | None = None
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # later actions, by their time
        self._numbers = count()
        self._more = trio.Event()  # set when an action is added
        self._trouble_until = -1.0
        self._removed: dict[str, float] = {}

    def connect(self, router: Watched) -> Callable[[], Any]:
        """Return the function that opens a connection of `router`."""

        @asynccontextmanager
        async def connected() -> AsyncIterator[Connection]:
            if self.down or router.dead:
                raise CannotStart("it is not there")
            async with self._server() as server:
                process = Process(self, router, server)
                async with process.reached() as peer:
                    self.process = process
                    yield peer

        return connected

    def exit(self) -> None:
        """End the process; the calls that it has not carried out are lost."""
        self.trouble()
        if self.process is not None:
            self.process.die()

    def go_down(self) -> None:
        """End the process, and let none start."""
        self.tell(self.name, "DOWN")
        self.down = True
        self.exit()

    def come_up(self) -> None:
        """Let a process start again."""
        if self.down:
            self.tell(self.name, "can be started again")
            self.trouble()
        self.down = False

    def image(self) -> bytes:
        """Return the content of a native store's file, as it is now."""
        assert isinstance(self.kept, Store)
        return bytes(self.kept._connection.serialize("main"))

    def calm(self) -> None:
        """Let nothing go wrong any more."""
        self.rate = self.latency = 0.0
        self.come_up()

    @property
    def is_busy(self) -> bool:
        """Whether a call is being served, or waits."""
        return bool(self._due) or (self.process is not None and self.process.underway > 0)

    def leave(self, message: bytes) -> None:
        """Let a call to a remote tier land later, when its router no longer waits for it."""
        self.later(_LATEST * self.chance.random(), partial(self._land, message))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something after so many seconds, even if the router has died by then. For remote tiers only."""
        heappush(self._due, (round(trio.current_time() + seconds, 3), next(self._numbers), act))
        self._more.set()

    async def run(self) -> None:
        """Carry out the later actions, each at its time. Ends only by cancellation."""
        while True:
            while self._due and self._due[0][0] <= trio.current_time():
                heappop(self._due)[2]()
            self._more = trio.Event()
            with trio.move_on_at(self._due[0][0] if self._due else math.inf):
                await self._more.wait()

    def _land(self, message: bytes) -> None:
        assert isinstance(self.kept, CoreOnly)
        self.tell(self.name, f"lands: {message[:200].decode()}")
        self.kept.answer(message)
        if b'"memory/forget"' in message:
            self.note_removed(message)

    def trouble(self, seconds: float = 0.0) -> None:
        """Note that calls may fail from now on, for so long and its aftermath."""
        self._trouble_until = max(self._trouble_until, trio.current_time() + seconds + AFTERMATH)

    def is_troubled(self, since: float) -> bool:
        """Return whether the tier has had a reason to fail at any time since then."""
        return self.down or self._trouble_until >= since

    def held(self, id: str, since: float) -> bool:
        """Return whether the tier holds a record, or has held it at any time since then."""
        if self._removed.get(id, -1.0) >= since:
            return True
        if isinstance(self.kept, CoreOnly):
            return id in self.kept._records
        return self.kept._connection.execute("SELECT 1 FROM record WHERE id = ?", (id,)).get is not None

    def note_removed(self, message: bytes) -> None:
        """Note that these records are deleted here."""
        ids = msgspec.json.decode(msgspec.json.decode(message, type=_Message).params, type=_Ids).ids
        self._removed.update(dict.fromkeys(ids, trio.current_time()))

    @asynccontextmanager
    async def _server(self) -> AsyncIterator[Callable[[bytes, Caller], Any]]:
        if isinstance(self.kept, CoreOnly):
            foreign = self.kept

            async def answer(message: bytes, caller: Caller) -> bytes | None:
                return foreign.answer(message)

            yield answer
        else:
            async with serving(self.kept, threads=False) as server:
                yield server


class Pipe(anyio.abc.ByteReceiveStream, anyio.abc.ByteSendStream):
    """One direction of a connection. Bytes that wait in it are received at once.

    The router's end is the real one (a2m_router.protocol.client.client). A real server's end would cost as much as the
    rest of the simulation, and has tests of its own.
    """

    def __init__(self) -> None:
        self._waiting = b""
        self._more = trio.Event()
        self._closed = False

    async def send(self, item: bytes) -> None:
        self.put(item)

    def put(self, item: bytes) -> None:
        """Add bytes; this never blocks."""
        self._waiting += item
        self._more.set()

    def left(self) -> list[bytes]:
        """Return the lines that have not been received."""
        return self._waiting.split(b"\n")[:-1]

    @property
    def lines(self) -> int:
        """The number of lines that wait."""
        return self._waiting.count(b"\n")

    def close(self) -> None:
        """Close the pipe: no more bytes will come."""
        self._closed = True
        self._more.set()

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not self._waiting:
            if self._closed:
                raise anyio.EndOfStream
            self._more = trio.Event()
            await self._more.wait()
        waiting, self._waiting = self._waiting, b""
        return waiting

    async def aclose(self) -> None:
        self.close()


class RemoteConnection(Connection):
    """A connection on which no answer resolves another call: calls in doubt are resolved by time alone, as over HTTP
    (router/a2m_router/protocol/client/http_client.py)."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier.name)
        self._tier = tier

    def _give_up(self, id: int) -> Settled:
        if self._queue.pop(id, None) is not None:
            return settled()
        certain = anyio.Event()
        self._tier.later(SETTLING, certain.set)
        return certain


class Process:
    """A tier's server while it lives, as seen by one router. It serves calls in the order of their arrival."""

    def __init__(self, tier: Tier, router: Watched, server: Callable[[bytes, Caller], Any]) -> None:
        self._peer = RemoteConnection(tier) if tier.is_remote else Connection(tier.name)
        self._tier = tier
        self._router = router
        self._server = server
        self._alive = True
        self._calls = Pipe()
        self._answers = Pipe()
        self._begun = 0
        self._waiting: list[bytes] = []  # received, and not yet carried out

    @property
    def underway(self) -> int:
        """The number of calls that are being served, or wait."""
        return self._begun + self._calls.lines

    @asynccontextmanager
    async def reached(self) -> AsyncIterator[Connection]:
        """Yield the router's end. At the end of the block, calls under way are given a moment, as by a real server."""
        try:
            async with tending() as tasks:
                tasks.start_soon(self._carry)
                async with tending() as serving:
                    serving.start_soon(self._serve, serving)
                    try:
                        yield self._peer
                    finally:
                        self._peer.lose("the connection was closed")
                        self._calls.close()
                        serving.cancel_scope.deadline = trio.current_time() + _GRACE
                tasks.cancel_scope.cancel()
        finally:
            if self._router.dead and self._tier.is_remote and self._alive:
                for message in [*self._waiting, *self._calls.left()]:
                    if self._tier.chance.random() < 0.7:
                        self._tier.leave(message)
            self._begun = 0
            self._peer.end()

    def die(self) -> None:
        """End: carry out no more calls, and answer none."""
        self._alive = False
        self._peer.lose("the server has exited")

    async def _carry(self) -> None:
        self._peer.lose(await self._peer.run(self._answers, self._calls))

    async def _serve(self, tasks: anyio.abc.TaskGroup) -> None:
        with suppress(anyio.EndOfStream):
            while True:
                lines = (await self._calls.receive()).split(b"\n")[:-1]
                self._begun = len(lines)
                self._waiting = lines
                for line in list(lines):
                    if 2 * self._tier.latency * self.underway >= self._tier.timeout:
                        self._tier.trouble()  # so many calls wait before it that it may miss its deadline
                    await self._answer(line, tasks)
                    self._begun -= 1

    async def _answer(self, message: bytes, tasks: anyio.abc.TaskGroup) -> None:
        if self._router.dead:
            if self._tier.is_remote:
                await trio.sleep_forever()  # the call is still on its way
            return
        reply, fault = await self._served(message)
        if reply is None:
            return
        if fault == "answer-late":
            # later answers do not wait for this one
            tasks.start_soon(self._say_late, reply, self._wait(fault))
            return
        spoiled = _spoiled(reply, fault) if fault else reply
        if spoiled is not None:
            self._answers.put(spoiled + b"\n")
        if fault == "exit-after-answer":
            self.die()

    async def _say_late(self, reply: bytes, wait: float) -> None:
        await trio.sleep(wait)
        self._answers.put(reply + b"\n")

    async def _served(self, message: bytes) -> tuple[bytes | None, str | None]:
        """Carry out a line; return its answer, if there is one, and its fault."""
        tier = self._tier
        method = msgspec.json.decode(message, type=_Message).method
        if tier.latency:
            await trio.sleep(round(tier.latency * tier.chance.random() ** 2, 3))
        self._router.point(method)
        fault = self._fault(method, message)
        if fault == "apply-late" and tier.is_remote:
            # over HTTP calls overtake each other
            self._waiting.remove(message)
            tier.leave(message)
            return None, fault
        if fault in ("delay", "apply-late", "hang"):
            # later calls wait for it, as on a pipe
            await trio.sleep(self._wait(fault))
        if self._router.dead and tier.is_remote:
            await trio.sleep_forever()  # the call is still on its way
        self._waiting.remove(message)
        if self._router.dead and tier.chance.random() < 0.5:
            fault = "exit-before-work"  # calls of a dead router may be carried out, or not
        if not self._alive or fault in ("hang", "exit-before-work"):
            if fault == "exit-before-work":
                self.die()
            return None, fault
        if fault in ("refuse-writes", "disk-full"):
            return _refusal(fault, message), None
        if fault == "lose-write":
            return _lie(message, {"ids": self._written(message)}), None
        reply: bytes | None
        if fault == "forget-less":
            reply = await self._forget_less(message)
        else:
            reply = await self._server(self._altered(message) if fault == "alter-record" else message, _ROUTER)
        if b'"memory/forget"' in message:
            tier.note_removed(message)
        self._router.point(method)
        if not self._alive or fault == "exit-after-work":
            self.die()
            return None, fault
        if tier.latency and tier.chance.random() < 0.3:
            await trio.sleep(round(tier.latency * tier.chance.random() ** 2, 3))
        return reply, fault

    async def _forget_less(self, message: bytes) -> bytes:
        """Forget all ids but the last; the answer claims to have forgotten all."""
        call = msgspec.json.decode(message, type=_Message)
        ids = msgspec.json.decode(call.params, type=_Ids).ids
        call.params = msgspec.Raw(msgspec.json.encode({"ids": ids[:-1]}))
        await self._server(msgspec.json.encode(call), _ROUTER)
        return _lie(message, {"forgotten": len(ids)})

    def _altered(self, message: bytes) -> bytes:
        """Return the call with the first record altered: with another content, or without one field."""
        call = msgspec.json.decode(message, type=_Message)
        records = msgspec.json.decode(call.params, type=_Records)
        record = records.records[0]
        field = self._tier.chance.choice([name for name in record if name not in ("id", "owner")])
        if field == "content":
            content = msgspec.json.decode(record[field], type=str)
            record[field] = msgspec.Raw(msgspec.json.encode(f"{content} indeed"))
        else:
            del record[field]
        call.params = msgspec.Raw(msgspec.json.encode(records))
        return msgspec.json.encode(call)

    def _written(self, message: bytes) -> list[str]:
        params = msgspec.json.decode(message, type=_Message).params
        records = msgspec.json.decode(params, type=_Records).records
        return [msgspec.json.decode(record["id"], type=str) for record in records]

    def _is_looked_at_twice(self, message: bytes) -> bool:
        """Return whether the router verifies the result of this write."""
        if isinstance(self._tier.kept, CoreOnly):
            return True
        homes = self._router.homes(self._written(message))
        return all(home not in (None, self._tier.name) for home in homes)

    def _fault(self, method: str, message: bytes) -> str | None:
        tier = self._tier
        if tier.chance.random() >= tier.rate or self._router.dead:
            return None
        often = REMOTE_FAULTS if tier.is_remote else FAULTS
        fault = tier.chance.choices(list(often), list(often.values()))[0]
        if method not in _METHODS.get(fault, (method,)):
            return None
        if fault in ("lose-write", "alter-record") and not self._is_looked_at_twice(message):
            return None
        tier.tell(tier.name, f"{fault} at {method}")
        if fault not in _HARMLESS:
            tier.trouble()
        return fault

    def _wait(self, fault: str) -> float:
        timeout = self._tier.timeout
        most = {"delay": 0.4, "hang": 1.0, "answer-late": 4.0, "apply-late": 40.0}[fault]
        wait = round(timeout * most * self._tier.chance.random(), 3)
        self._tier.trouble(wait)
        return wait


def _refusal(fault: str, message: bytes) -> bytes:
    id = msgspec.json.decode(message, type=_Message).id
    reason = "disk full" if fault == "disk-full" else "not today"
    return render_error(id, A2MError(Code.INTERNAL_ERROR, reason, {"reason": reason}))


def _lie(message: bytes, result: Mapping[str, Any]) -> bytes:
    id = msgspec.json.decode(message, type=_Message).id
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": result})


def _spoiled(reply: bytes, fault: str) -> bytes | None:
    if fault == "drop-answer":
        return None
    if fault == "answer-twice":
        return reply + b"\n" + reply
    if fault == "log-line":
        return b"INFO: serving\n" + reply
    if fault == "garbage-line":
        return b"\xff\xfe{]\n" + reply
    if fault == "tear-line":
        return reply[: len(reply) // 2] + b"\n" + reply[len(reply) // 2 :]
    if fault == "wrong-id":
        decoded = msgspec.json.decode(reply, type=dict[str, msgspec.Raw])
        return msgspec.json.encode({**decoded, "id": 10**12})
    return reply
