"""The tiers of a simulated federation: servers in this process that work in order, go wrong, die, and come back.

What a fault is called is a2m-chaos's to say (backends/a2m_chaos/faults.py). A server may be late, silent, dead or
unwilling, and what it sends may be spoiled on its way. It may lie where its router looks twice: about copies of what
lives elsewhere, about what is removed, and, where it is a lesser one, about all that is written. What a native store
has acknowledged of a record that is nowhere else it keeps: no router could know better. Behind a tier that is remote by
its settings calls overtake each other, and land when their router is no more.
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

# what is done to some calls only
_METHODS: Final[Mapping[str, Sequence[str]]] = {
    "refuse-writes": ("memory/remember", "memory/forget"),
    "disk-full": ("memory/remember", "memory/forget"),
    "lose-write": ("memory/remember",),
    "alter-record": ("memory/remember",),
    "forget-less": ("memory/forget",),
}

# how often a fault is drawn, against the others
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
# over HTTP what lands late is the danger
REMOTE_FAULTS: Final[Mapping[str, int]] = {**FAULTS, "apply-late": 16}

# these are no reason for anything to fail
_HARMLESS: Final = frozenset({"answer-twice", "log-line"})

# what is under way at a server whose router lets go of it is given so long, seconds
_GRACE: Final = 5.0

# what a dead router has sent lands within so many seconds, which is less than a router waits for it
_LATEST: Final = 0.9 * SETTLING

_ROUTER: Final = Caller(asserts_owner=True)

# Trouble ends this long after its cause, in seconds: breakers have been tried, what was open is settled.
AFTERMATH: Final = 300.0


class Watched(Protocol):
    """The router that a tier serves."""

    dead: bool

    def point(self, what: str) -> None:
        """Something has just happened, or is just to happen: a moment to die at."""

    def homes(self, ids: Iterable[str]) -> list[str | None]:
        """In which tiers these records live; None for those that are none yet."""


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
    """One tier's records, and the process that serves them, if there is one.

    Args:
        tell: writes into the history.
        rate: how many of its calls go wrong.
        latency: how long a call takes at most, in seconds.
        is_remote: it is reached over HTTP: what a router that dies has sent may land when the next one has started.
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
        self._due: list[tuple[float, int, Callable[[], None]]] = []  # what happens later, and when
        self._numbers = count()
        self._more = trio.Event()  # there is some
        self._trouble_until = -1.0
        self._removed: dict[str, float] = {}

    def connect(self, router: Watched) -> Callable[[], Any]:
        """What opens a connection of `router`."""

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
        """The process dies, with all that it has not done yet."""
        self.trouble()
        if self.process is not None:
            self.process.die()

    def go_down(self) -> None:
        """The process dies, and none can be started."""
        self.tell(self.name, "DOWN")
        self.down = True
        self.exit()

    def come_up(self) -> None:
        """A process can be started again."""
        if self.down:
            self.tell(self.name, "can be started again")
            self.trouble()
        self.down = False

    def image(self) -> bytes:
        """What a native store's file holds, as it is now."""
        assert isinstance(self.kept, Store)
        return bytes(self.kept._connection.serialize("main"))

    def calm(self) -> None:
        """Nothing goes wrong any more."""
        self.rate = self.latency = 0.0
        self.come_up()

    @property
    def is_busy(self) -> bool:
        """Whether a call is being served, or waits."""
        return bool(self._due) or (self.process is not None and self.process.underway > 0)

    def leave(self, message: bytes) -> None:
        """A call to a remote tier goes its own way, and lands when nobody waits for it any more."""
        self.later(_LATEST * self.chance.random(), partial(self._land, message))

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Do this after so many seconds, whoever is alive then. Of remote tiers only."""
        heappush(self._due, (round(trio.current_time() + seconds, 3), next(self._numbers), act))
        self._more.set()

    async def run(self) -> None:
        """Does what is due, each in its time. Ends only by being cancelled."""
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
        """From now on, and for so long and its aftermath, calls may fail."""
        self._trouble_until = max(self._trouble_until, trio.current_time() + seconds + AFTERMATH)

    def is_troubled(self, since: float) -> bool:
        """Whether there has been a reason for it to fail at any time since then."""
        return self.down or self._trouble_until >= since

    def held(self, id: str, since: float) -> bool:
        """Whether it holds a record, or has held it at any time since then."""
        if self._removed.get(id, -1.0) >= since:
            return True
        if isinstance(self.kept, CoreOnly):
            return id in self.kept._records
        return self.kept._connection.execute("SELECT 1 FROM record WHERE id = ?", (id,)).get is not None

    def note_removed(self, message: bytes) -> None:
        """It is told to forget these."""
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
    """One way of a connection. What waits in it is received at once.

    The router's end is the real one (a2m_router.protocol.client.client); a server's end that is as real would cost as
    much as all the rest of the simulation, and is tested elsewhere.
    """

    def __init__(self) -> None:
        self._waiting = b""
        self._more = trio.Event()
        self._closed = False

    async def send(self, item: bytes) -> None:
        self.put(item)

    def put(self, item: bytes) -> None:
        """It never blocks."""
        self._waiting += item
        self._more.set()

    def left(self) -> list[bytes]:
        """The lines that nobody has received."""
        return self._waiting.split(b"\n")[:-1]

    @property
    def lines(self) -> int:
        """How many wait."""
        return self._waiting.count(b"\n")

    def close(self) -> None:
        """Nothing more comes."""
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
    """One on which no answer proves anything of other calls: what was given up is settled by time alone, as it is over
    HTTP (router/a2m_router/protocol/client/http_client.py)."""

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
    """A tier's server while it lives, as one router reaches it: calls are served in the order in which they came."""

    def __init__(self, tier: Tier, router: Watched, server: Callable[[bytes, Caller], Any]) -> None:
        self._peer = RemoteConnection(tier) if tier.is_remote else Connection(tier.name)
        self._tier = tier
        self._router = router
        self._server = server
        self._alive = True
        self._calls = Pipe()
        self._answers = Pipe()
        self._begun = 0
        self._waiting: list[bytes] = []  # what has been received, and not been carried out

    @property
    def underway(self) -> int:
        """Calls that are being served, or wait."""
        return self._begun + self._calls.lines

    @asynccontextmanager
    async def reached(self) -> AsyncIterator[Connection]:
        """The router's end. When the block ends, what is under way is given a moment, as a real server gives it."""
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
        """Nothing more is done, and nobody hears of it any more."""
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
                        self._tier.trouble()  # so many wait in front of it that it may miss its deadline
                    await self._answer(line, tasks)
                    self._begun -= 1

    async def _answer(self, message: bytes, tasks: anyio.abc.TaskGroup) -> None:
        if self._router.dead:
            if self._tier.is_remote:
                await trio.sleep_forever()  # it is on its way yet
            return
        reply, fault = await self._served(message)
        if reply is None:
            return
        if fault == "answer-late":
            # what comes behind it does not wait for it
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
        """The answer to a line, if there is one, and what goes wrong with it."""
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
            # what comes behind it waits, as on a pipe
            await trio.sleep(self._wait(fault))
        if self._router.dead and tier.is_remote:
            await trio.sleep_forever()  # it is on its way yet
        self._waiting.remove(message)
        if self._router.dead and tier.chance.random() < 0.5:
            fault = "exit-before-work"  # what a router leaves behind may be done, or not
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
        """All but the last of what is to be forgotten, and the answer hides it."""
        call = msgspec.json.decode(message, type=_Message)
        ids = msgspec.json.decode(call.params, type=_Ids).ids
        call.params = msgspec.Raw(msgspec.json.encode({"ids": ids[:-1]}))
        await self._server(msgspec.json.encode(call), _ROUTER)
        return _lie(message, {"forgotten": len(ids)})

    def _altered(self, message: bytes) -> bytes:
        """The first record that is written has another content, or lacks something."""
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
        """Whether the router sees for itself what becomes of what it writes."""
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
