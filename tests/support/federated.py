"""A whole federation in one process: real stores, a real catalog, real links, and a clock that the test controls.

Tiers are in-process servers that the router calls by the protocol: our own stores, or `Foreign` ones. A test may put
`Weather` between the router and a tier, which delays, drops or alters messages. Nothing here uses threads, so that a
virtual clock can jump.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Container, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.loading import parse
from a2m_router.config.settings import Settings, Tier
from a2m_router.daemon.app import Federation, running_federation
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import Connection, Peer, connect_local
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error
from a2m_router.protocol.wire.method_params import Forget, Pages, Remember
from a2m_router.protocol.wire.records import Draft, Record, digest
from a2m_router.ranking.policy import strength
from a2m_router.tiers.lifting import ServerRecord, lowered
from a2m_router.tiers.link import Link
from a2m_store.server import serving
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly
from tests.support.catalogs import strays_left

START = 1_790_000_000_000

# a tier in this process needs far less time for its pending writes
_CATCHING_UP_SECONDS = 20.0

LOCAL = Caller(asserts_owner=True)

# the four tiers, with capacities so small that a few writes make them spill
FOUR_TIERS = """
[policy]
pass = "{policy}"
[tiers.working]
kind = "working"
command = ["-"]
capacity = 4
per_session = true
spill_to = "episodic"
half_life = "5m"
[tiers.episodic]
kind = "episodic"
command = ["-"]
capacity = 6
spill_to = "semantic"
promote_to = "semantic"
promote_after = 3
half_life = "1d"
[tiers.semantic]
kind = "semantic"
command = ["-"]
[tiers.procedural]
kind = "procedural"
command = ["-"]
shared = true
"""


class Foreign(msgspec.Struct, frozen=True):
    """A foreign server behind a tier, by the capabilities that it declares besides core; see CoreOnly.

    A server with tiers has two, of which the router must name the right one.
    """

    capabilities: tuple[str, ...] = ()
    like_javascript: bool = False
    limits: Mapping[str, int] = {}
    read_only: bool = False
    kind: type[CoreOnly] = CoreOnly

    def behind(self, tier: Tier, path: Path | None) -> CoreOnly:
        """Return the server, made for this tier."""
        other = "semantic" if tier.kind == "working" else "working"
        return self.kind(
            path,
            capabilities=self.capabilities,
            limits=self.limits,
            tiers={"other": other, "meant": tier.kind},
            like_javascript=self.like_javascript,
            read_only=self.read_only,
        )


def filled(*pages: dict[str, Any], where_on_timeline: bool = False, **options: Any) -> Foreign:
    """Return a foreign server that another program has filled with these records."""

    class Manual(CoreOnly):
        name = "manual"

        def __init__(self, path: Path | None = None, **chosen: Any) -> None:
            super().__init__(path, where_on_timeline=where_on_timeline, **chosen)
            self._make_true({"put": list(pages)})

    return Foreign(kind=Manual, **options)


# The tiers with foreign servers, by the tier's name; every other tier has a store.
Mix = Mapping[str, Foreign]
ALL_NATIVE: Mix = {}

# Gets every message to a tier and returns its answer: (tier, method, message, pass on) -> the answer, or None.
Weather = Callable[[str, bytes, Callable[[], Awaitable[bytes | None]]], Awaitable[bytes | None]]


class Hold:
    """A call to a tier that is stopped on its way: `reached` is set when it arrives, `release` lets it continue."""

    def __init__(self, tier: str, method: str, *, after: bool, having: bytes) -> None:
        self.reached = anyio.Event()
        self.after = after
        self._wanted = (tier, method, having)
        self._released = anyio.Event()

    def release(self) -> None:
        self._released.set()

    def is_for(self, tier: str, message: bytes) -> bool:
        wanted_tier, method, having = self._wanted
        return tier == wanted_tier and method_of(message) == f"memory/{method}" and having in message

    async def pass_by(self) -> None:
        self.reached.set()
        await self._released.wait()


class Steered:
    """Weather that a test controls. A call without a hold passes at once, and a tier works in order."""

    def __init__(self) -> None:
        self._holds: list[Hold] = []
        self._refused: dict[tuple[str, str], bytes] = {}  # the value: bytes that a message must contain to be refused
        self._turns: dict[str, anyio.Lock] = {}
        self.seen: list[tuple[str, bytes]] = []  # every message with its tier

    def hold(self, tier: str, method: str, *, after: bool = False, having: bytes = b"") -> Hold:
        """Stop the next call of a method whose message contains `having`; `after`: once the tier has carried it out."""
        hold = Hold(tier, method, after=after, having=having)
        self._holds.append(hold)
        return hold

    def refuse(self, tier: str, method: str, *, having: bytes = b"") -> None:
        """Answer these calls with an error from now on, if their message contains `having`; the tier gets none."""
        self._refused[tier, f"memory/{method}"] = having

    def allow(self, tier: str, method: str) -> None:
        del self._refused[tier, f"memory/{method}"]

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        self.seen.append((tier, message))
        hold = next((hold for hold in self._holds if hold.is_for(tier, message)), None)
        if hold is not None:
            self._holds.remove(hold)
        having = self._refused.get((tier, method_of(message)))
        if having is not None and having in message:
            refusal = A2MError(Code.INTERNAL_ERROR, "not today")
            return render_error(msgspec.Raw(msgspec.json.encode(msgspec.json.decode(message)["id"])), refusal)
        # a call that is stopped before the tier gets it also stops all later calls, as in a pipe
        async with self._turns.setdefault(tier, anyio.Lock()):
            if hold is not None and not hold.after:
                await hold.pass_by()
            answer = await go_on()
        if hold is not None and hold.after:
            await hold.pass_by()
        return answer


class Clock:
    """A clock that moves a millisecond each time it is read, and further when a test moves it."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> int:
        self.now += 1
        return self.now


class Trial:
    """A running federation and the servers behind its tiers. `call("recall", query="x")` returns the decoded result.

    `stores` and `servers` are the servers behind the tiers, by the tier's name: our own stores, and foreign ones.
    """

    def __init__(
        self,
        federation: Federation,
        client: Connection,
        stores: dict[str, Store],
        servers: dict[str, CoreOnly],
        clock: Clock,
    ) -> None:
        self.federation = federation
        self.client = client
        self.stores = stores
        self.servers = servers
        self.clock = clock

    async def call(self, method: str, **params: Any) -> Any:
        """Make one call over the protocol, and return its result; raise A2MError for an error answer."""
        raw = await self.client.call(f"memory/{method}", params, timeout=None)
        return msgspec.json.decode(raw)

    async def raw(self, method: str, params: bytes) -> bytes:
        """Make one call with parameters as raw JSON, and return the raw result."""
        return bytes(await self.client.call(f"memory/{method}", msgspec.Raw(params), timeout=None))

    async def remember(self, *contents: str, **fields: Any) -> list[str]:
        """Write one record for each content, all with the same further fields; return their ids."""
        result = await self.call("remember", records=[{"content": content, **fields} for content in contents])
        ids: list[str] = result["ids"]
        return ids

    async def timeline(self, **params: Any) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = (await self.call("timeline", **params))["records"]
        return records

    async def settled(self) -> None:
        """Wait until no background work is left: no pass, no pending write, no stray."""
        if self.federation.settings.policy.background:
            await self.federation.passes.idle()
        await self.caught_up()
        await self.federation.reconciler.idle()

    async def caught_up(self) -> None:
        """Wait until the claims that are held now are released, and no tier has pending writes."""
        claims = self.federation.catalog.claims
        claim = await claims.take(claims._waiting)
        claim.release()
        with anyio.fail_after(_CATCHING_UP_SECONDS):
            # between two attempts of a reconciler no claim is held that could be waited for
            while redone(self):
                retried(self)
                await anyio.sleep(0.01)

    def copies(self) -> dict[str, list[str]]:
        """Return the tiers that hold a copy of each id, read from their servers without the router."""
        return {id: [tier for tier, _ in copies] for id, copies in stored(self).items()}


def held_by(store: Store) -> list[dict[str, Any]]:
    """Return every record that a store holds, vectors included, from the store's own timeline."""
    with store.transaction():
        answer = store.timeline(Pages(embeddings=True), LOCAL)
    records: list[dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(answer))["records"]
    return records


def stored(fed: Trial) -> dict[str, list[tuple[str, Record]]]:
    """Return the copies of each id with their tiers, mounts excluded, read from the servers without the router."""
    found: dict[str, list[tuple[str, Record]]] = {}
    for tier, store in fed.stores.items():
        with store.transaction():
            for record in store.timeline(Pages(embeddings=True), LOCAL)["records"]:
                found.setdefault(record.id, []).append((tier, record))
    for tier, server in fed.servers.items():
        for record in told_by(server) if fed.federation.settings.tier(tier) not in fed.federation.mounts else ():
            found.setdefault(record.id, []).append((tier, lowered(record, vector=True)))
    return found


def told_by(server: CoreOnly) -> list[ServerRecord]:
    """Return every record that a foreign server holds, from the server's own timeline."""
    message = b'{"jsonrpc":"2.0","id":1,"method":"memory/timeline","params":{"embeddings":true}}'
    return msgspec.json.decode(server.answer(message) or b"null", type=_Told).result.records


class _ToldRecords(msgspec.Struct):
    records: list[ServerRecord]


class _Told(msgspec.Struct):
    result: _ToldRecords


def retried(fed: Trial) -> None:
    """Make the reconcilers retry at once what has failed."""
    for tier in fed.federation.settings.managed:
        fed.federation.reconciler.retry(tier.name)


def redone(fed: Trial) -> list[str]:
    """Return the ids of replaced records whose tiers have a pending write."""
    return [id for tier in fed.federation.settings.managed for id in fed.federation.catalog.pending.ids_in(tier.name)]


def has_claims(fed: Trial) -> bool:
    """Return whether any claim is held."""
    return bool(fed.federation.catalog.claims._waiting)


async def claims_released(fed: Trial) -> None:
    """Wait until no claim is held."""
    while has_claims(fed):
        released = anyio.Event()

        def let_go(names: object, event: anyio.Event = released) -> None:
            event.set()

        with fed.federation.catalog.claims.on_release(let_go):
            if has_claims(fed):
                await released.wait()


def assert_nothing_under_way(fed: Trial) -> None:
    """Assert that no claim is held, no read goes on, no stray is noted, nothing is reserved and no write is pending."""
    catalog = fed.federation.catalog
    assert not has_claims(fed)
    assert not catalog.reads._reads
    assert not catalog.reads._left
    assert strays_left(catalog) == 0
    assert redone(fed) == []
    assert catalog.records.reserved() == []


def settings_of(text: str = FOUR_TIERS, *, policy: str = "background", folder: Path = Path("/nowhere")) -> Settings:
    """Return the settings from the text of a federation file, with `{policy}` in it filled in."""
    return parse(text.replace("{policy}", policy), base=folder, environ={})


@asynccontextmanager
async def trial(
    settings: Settings | None = None,
    *,
    servers: Mix = ALL_NATIVE,
    weather: Weather | None = None,
    folder: Path | None = None,
    clock: Clock | None = None,
    down: Container[str] = (),
    adopt: bool = False,
) -> AsyncIterator[Trial]:
    """Run a federation with one in-process server for each tier: a store, unless `servers` names another.

    Args:
        weather: stands between the router and its tiers.
        folder: where the files are; without it, all data is in memory.
        down: tiers that cannot be connected, as long as they are in this container.
        adopt: accept a store behind a tier that is not the one of the last start.
    """
    settings = settings or settings_of()
    clock = clock or Clock()
    stores: dict[str, Store] = {}
    foreign: dict[str, CoreOnly] = {}

    @asynccontextmanager
    async def served(tier: str) -> AsyncIterator[Callable[[bytes, Caller], Awaitable[bytes | None]]]:
        """Yield the function that answers for a tier; its records outlive the connection."""
        path = None if folder is None else folder / f"{tier}.db"
        if tier in servers:
            if tier not in foreign:
                foreign[tier] = servers[tier].behind(settings.tier(tier), path)

            async def answer(message: bytes, caller: Caller) -> bytes | None:
                return foreign[tier].answer(message)

            yield answer
        else:
            if tier not in stores:
                stores[tier] = Store(path, clock=clock, name=tier)
            async with serving(stores[tier], threads=False) as server:
                yield server

    def connect(tier: str) -> Callable[[], AbstractAsyncContextManager[Peer]]:
        @asynccontextmanager
        async def connected() -> AsyncIterator[Peer]:
            if tier in down:
                raise CannotStart("it is not there")
            async with served(tier) as server:

                async def answer(message: bytes, caller: Caller) -> bytes | None:
                    if weather is None:
                        return await server(message, caller)
                    return await weather(tier, message, lambda: server(message, caller))

                async with connect_local(answer, name=tier) as peer:
                    yield peer

        return connected

    links = {
        tier.name: Link(tier.name, connect(tier.name), timeout=tier.timeout, most_calls=tier.max_calls)
        for tier in settings.tiers
    }
    catalog = Catalog(None if folder is None else folder / "router.db", settings.managed, strength, threads=False)
    try:
        async with (
            running_federation(settings, links, clock=clock, catalog=catalog, adopt=adopt) as federation,
            connect_local(federation.answer, name="router") as client,
        ):
            yield Trial(federation, client, stores, foreign, clock)
    finally:
        for store in stores.values():
            store.close()


def method_of(message: bytes) -> str:
    """Return the method that a message calls."""
    method: str = msgspec.json.decode(message)["method"]
    return method


def groups_of(records: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the records of each owner's group, across all tiers."""
    grouped: dict[tuple[Any, Any], list[dict[str, Any]]] = {}
    for record in records:
        if record.get("group") is not None:
            grouped.setdefault((record.get("owner"), record["group"]), []).append(record)
    yield from grouped.values()


async def at_once(*calls: Callable[[], Awaitable[object]]) -> None:
    """Run all calls concurrently; return when all have ended."""

    async def run(call: Callable[[], Awaitable[object]]) -> None:
        await call()

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(run, call)


class Task:
    """A call in progress beside the test."""

    def __init__(self, tasks: anyio.abc.TaskGroup, call: Callable[[], Awaitable[Any]]) -> None:
        self.result: Any = None
        self.error: A2MError | None = None
        self._done = anyio.Event()
        self._call = call
        tasks.start_soon(self._run)

    @property
    def done(self) -> bool:
        return self._done.is_set()

    async def ended(self) -> Any:
        await self._done.wait()
        if self.error is not None:
            raise self.error
        return self.result

    async def settled(self) -> None:
        """Wait until the call has ended, with a result or an error."""
        await self._done.wait()

    async def _run(self) -> None:
        try:
            self.result = await self._call()
        except A2MError as error:
            self.error = error
        self._done.set()


@asynccontextmanager
async def while_recalled(fed: Trial, steer: Steered, **params: Any) -> AsyncIterator[Task]:
    """Run a recall, and the block when every tier but procedural has answered; procedural answers after the block."""
    late = steer.hold("procedural", "recall")
    async with anyio.create_task_group() as tasks:
        read = Task(tasks, lambda: fed.call("recall", **params))
        await late.reached.wait()
        await anyio.wait_all_tasks_blocked()
        yield read
        late.release()


def contents(records: list[dict[str, Any]]) -> dict[str, str]:
    return {record["content"]: record["tier"] for record in records}


def lose(fed: Trial, tier: str, *ids: str) -> None:
    """Delete records from a tier without the router."""
    if tier in fed.servers:
        fed.servers[tier].call("memory/forget", {"ids": list(ids)})
        return
    with fed.stores[tier].transaction():
        fed.stores[tier].forget(Forget(ids=list(ids)), LOCAL)


def disconnect(fed: Trial, tier: str) -> None:
    """Lose the connection of a tier, as when its server dies."""
    peer = fed.federation.links[tier]._peer
    assert isinstance(peer, Connection)
    peer.lose("it died")


async def reconnected(fed: Trial, tier: str) -> None:
    """Lose the connection of a tier; return when it is connected again and the tier was welcomed."""
    welcomed = fed.federation.admission.welcomed[tier] = anyio.Event()
    disconnect(fed, tier)
    with anyio.fail_after(_CATCHING_UP_SECONDS):
        await welcomed.wait()


def plant(fed: Trial, tier: str, **fields: Any) -> None:
    """Write a record to a tier without the router."""
    if tier in fed.servers:
        fed.servers[tier].call("memory/remember", {"records": [fields]})
        return
    with fed.stores[tier].transaction():
        fed.stores[tier].remember(Remember(records=[Draft(**fields)]), LOCAL)


CALM = settings_of(policy="explicit")


async def one_home_each(fed: Trial) -> None:
    await fed.settled()
    assert fed.copies() == {r["id"]: [r["tier"]] for r in await fed.timeline()}
    assert_nothing_under_way(fed)


async def joined(fed: Trial, tier: str) -> None:
    """Wait until a tier was welcomed."""
    await fed.federation.links[tier].wait_up()
    await fed.federation.admission.welcomed[tier].wait()


def kept(fed: Trial) -> dict[tuple[str, str], bytes]:
    """Return the digest of each copy in each tier."""
    return {(id, tier): digest(record) for id, copies in stored(fed).items() for tier, record in copies}


async def refused(call: Awaitable[Any], code: Code) -> A2MError:
    with pytest.raises(A2MError) as error:
        await call
    assert error.value.code == code, error.value
    return error.value
