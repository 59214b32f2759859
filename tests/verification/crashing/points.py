"""All moments at which a process may die: a change is carried out once, with a photograph of all files at each moment.

    python -m tests.verification.crashing [--kind NAME] [--every N] [--jobs N]

A *kind* is a change: the records before it, and the calls of clients, some of them concurrent. While it is carried out,
all files of the router and its tiers are photographed before and after each call to a tier, each transaction and each
sync. A *point* is one of these moments. It has several variants: files as a killed process leaves them or as a power
cut does, on some machines or on all; calls in a child's pipe carried out, or not. The next router starts on each.

A ledger of the clients' calls alone decides what must be found. After any crash, the records are those of one moment:
every acknowledged call has happened, and every other one has happened wholly or not at all.

A tier may die, too, while the router lives. For this the change is carried out again for each of its calls, and the
tier dies before or after it has carried the call out.
"""

import functools
import random
import shutil
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations, count
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anyio
import anyio.lowlevel
import msgspec
import trio
from anyio import wait_all_tasks_blocked
from msgspec import Raw

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Draft, Record, digest, draft_of
from a2m_router.protocol.wire.timestamps import render
from a2m_store.server import serving
from a2m_store.store import Store
from tests.support.clocks import Pace, jumping
from tests.support.disk import Disk, Fate, Files, Moment, Photograph, laid
from tests.support.federated import (
    ALL_NATIVE,
    FOUR_TIERS,
    LOCAL,
    START,
    Clock,
    Foreign,
    Mix,
    Trial,
    assert_nothing_under_way,
    at_once,
    method_of,
    redone,
    settings_of,
    stored,
)
from tests.support.histories import TIERS
from tests.support.summarizers import Thinker, thinking

# the seconds after a start until pending writes of an earlier router have been carried out
_REDONE_SECONDS: Final = 31.0

# the seconds within which the router reaches a tier that is up again
_BACK_SECONDS: Final = 600.0

# how often a reader looks before it lets time pass
_LOOKS: Final = 12

# more calls than any change makes
_MOST_CALLS: Final = 1000

# the label of a run in which nothing dies
READER: Final = "with a reader"

# --- what clients may expect


class Fact:
    """A record as it must be found, in any tier. Two are equal if all fields that a move must keep are equal."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        # the id of a summary is not known beforehand
        self.id = draft.id or ""
        self._is = (draft.content,) if draft.role == "memory" else (self.id, digest(draft), draft.salience or 1.0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fact) and self._is == other._is

    def __hash__(self) -> int:
        return hash(self._is)

    def __repr__(self) -> str:
        return f"{self.id}: {self.draft.content!r}, revision {self.draft.revision or 0}"


World = frozenset[Fact]
# The worlds that a call makes of a world; several where the call has a choice.
Change = Callable[[World], Iterable[World]]


def nothing(world: World) -> Iterable[World]:
    return [world]


def written(drafts: Sequence[Draft]) -> Change:
    """Return the change of a write: new records, and replacements, which keep the id of the record at their key."""

    def change(world: World) -> Iterable[World]:
        for draft in drafts:
            same = [fact for fact in world if draft.key is not None and fact.draft.key == draft.key]
            if same:
                [old] = same
                revision = (old.draft.revision or 0) + 1
                new = msgspec.structs.replace(draft, id=old.id, created_at=old.draft.created_at, revision=revision)
                world = (world - {old}) | {Fact(new)}
            elif draft.id not in {fact.id for fact in world}:
                world |= {Fact(draft)}
        return [world]

    return change


def forgotten(ids: Collection[str]) -> Change:
    return lambda world: [frozenset(fact for fact in world if fact.id not in ids)]


def distilled(ids: Sequence[str]) -> Change:
    """Return the change of a pass that may replace a complete group by its summary."""

    def change(world: World) -> Iterable[World]:
        group = [fact for fact in world if fact.id in ids]
        if len(group) < len(ids):
            return [world]
        told = [fact.draft.content or "" for fact in sorted(group, key=lambda fact: ids.index(fact.id))]
        summary = Fact(Draft(content=f"gist of {', '.join(told)}", role="memory"))
        return [world, (world - set(group)) | {summary}]

    return change


class _Op:
    def __init__(self, change: Change, begun: int) -> None:
        self.change = change
        self.begun = begun
        self.ended: int | None = None


class Ledger:
    """The calls that clients made, and which of them were acknowledged."""

    def __init__(self) -> None:
        self._base: World = frozenset()
        self._ops: list[_Op] = []
        self._ticks = count(1)

    def begin(self, change: Change) -> _Op:
        op = _Op(change, next(self._ticks))
        self._ops.append(op)
        return op

    def acknowledge(self, op: _Op) -> None:
        op.ended = next(self._ticks)

    def refuse(self, op: _Op) -> None:
        """Note that a call failed: nothing of it has happened, and nothing will."""
        self._ops.remove(op)

    def tick(self) -> int:
        return next(self._ticks)

    def settle(self) -> None:
        """Note that nothing is under way, so that only one world is possible from here on."""
        [world] = self.worlds()
        self.found(world)

    def found(self, world: World) -> None:
        """Note that nothing is under way, and that this world was found."""
        self._base, self._ops = world, []

    def worlds(self, since: int | None = None) -> frozenset[World]:
        """Return the worlds that are possible now; with `since`, at any moment from then on."""

        def certain(op: _Op) -> bool:
            return op.ended is not None and (since is None or op.ended < since)

        def explored(world: World, left: tuple[_Op, ...]) -> Iterator[World]:
            if not any(map(certain, left)):
                yield world
            for op in left:
                if not any(other.ended is not None and other.ended < op.begun for other in left):
                    for after in op.change(world):
                        yield from explored(after, tuple(other for other in left if other is not op))

        return frozenset(explored(self._base, tuple(self._ops)))


class Client:
    """A client that notes its calls in the ledger. It notes a refusal and otherwise ignores the error."""

    def __init__(self, fed: Trial, ledger: Ledger) -> None:
        self.fed = fed
        self.ledger = ledger

    async def ask(self, change: Change, method: str, **params: Any) -> bool:
        op = self.ledger.begin(change)
        try:
            await self.fed.call(method, **params)
        except A2MError:
            self.ledger.refuse(op)
            return False
        self.ledger.acknowledge(op)
        return True

    async def write(self, *drafts: Draft) -> bool:
        whole = [msgspec.structs.replace(draft, tier=None) for draft in drafts]
        return await self.ask(written(whole), "remember", records=list(drafts))

    async def forget(self, *ids: str) -> bool:
        return await self.ask(forgotten(ids), "forget", ids=list(ids))

    async def move(self, method: str, **params: Any) -> bool:
        return await self.ask(nothing, method, **params)

    async def look(self) -> tuple[World, set[str]]:
        """Return the world that a reader sees, and the tiers that did not answer.

        Asserts that no id comes twice, that each group is in one tier, and each record in a tier where it may be.
        """
        answer = msgspec.json.decode(await self.fed.raw("timeline", b'{"embeddings":true}'), type=_Timeline)
        ids = [record.id for record in answer.records]
        assert len(ids) == len(set(ids)), f"an id comes twice: {ids}"
        places: dict[object, set[str | None]] = {}
        for record in answer.records:
            if record.group is not None:
                places.setdefault((record.owner, record.group), set()).add(record.tier)
            assert (record.tier == "procedural") == record.id.startswith("p"), f"{record.id} is in {record.tier}"
        assert all(len(tiers) == 1 for tiers in places.values()), f"a group is in two tiers: {places}"
        return _facts(answer.records), {each.tier for each in answer.degraded}


class _Degraded(msgspec.Struct):
    tier: str


class _Timeline(msgspec.Struct):
    records: list[Record]
    degraded: list[_Degraded] = []


def _facts(records: Iterable[Record]) -> World:
    return frozenset(Fact(draft_of(record)) for record in records)


# --- kinds of changes


class Kind(msgspec.Struct, frozen=True):
    """A kind of change.

    Args:
        prepare: is carried out, with all its consequences, before `act` begins.
        victim: the record that a concurrent forget deletes.
        way: the source and the target, for a move.
    """

    prepare: Callable[[Client], Awaitable[Any]]
    act: Callable[[Client], Awaitable[Any]]
    victim: str | None = None
    servers: Mix = ALL_NATIVE
    way: tuple[str, str] | None = None
    settings: Settings = settings_of(policy="explicit")


_moments = count(START + 1)


def draft(id: str | None, content: str | None = None, **fields: Any) -> Draft:
    """Return a record all of whose fields are known beforehand."""
    known: dict[str, Any] = {"created_at": render(next(_moments)), "session": "s"}
    return Draft(**{**known, **fields, "id": id, "content": content or f"content of {id}"})


_VECTOR: Final = [0.1, -0.0, 3.0]
_METADATA: Final = Raw(b'{ "m" : 1.0 , "big":123456789012345678901234567890}')

BYSTANDER: Final = draft("bystander", session="t", metadata=_METADATA)
KEYED: Final = draft("x", "one", key="k", metadata=_METADATA)
AGAIN: Final = draft(None, "two", key="k", metadata=Raw(b'{"m":2}'))
GROUP: Final = [draft(f"g{n}", group="g", metadata=_METADATA) for n in range(2)]
LONERS: Final = [draft(f"l{n}", embedding=_VECTOR) for n in range(3)]
EARNED: Final = draft("e", "seldom seen", tier="episodic")
SEVERAL: Final = [
    *GROUP,
    draft("e", tier="episodic", embedding=_VECTOR),
    draft("s", tier="semantic", metadata=_METADATA),
    draft("p", tier="procedural"),
]

PLAIN: Final = FOUR_TIERS.replace('spill_to = "episodic"', 'spill_to = "episodic"\ndistil = true')
DISTILLING: Final = settings_of(PLAIN, policy="explicit")
GROUP_IDS: Final = [fact.id or "" for fact in GROUP]


def one_by_one(*drafts: Draft) -> Callable[[Client], Awaitable[None]]:
    async def write(client: Client) -> None:
        for each in (BYSTANDER, *drafts):
            assert await client.write(each)

    return write


async def write_group_and_loners(client: Client) -> None:
    assert await client.write(BYSTANDER)
    assert await client.write(*GROUP)
    for each in LONERS:
        assert await client.write(each)


async def earn(client: Client) -> None:
    await one_by_one(EARNED)(client)
    for _ in range(3):
        await client.fed.call("recall", query="seldom")


async def write_group_with_a_key(client: Client) -> None:
    assert await client.write(BYSTANDER)
    assert await client.write(*GROUP, msgspec.structs.replace(KEYED, group="g"))


def writes(*drafts: Draft) -> Callable[[Client], Awaitable[Any]]:
    return lambda client: client.write(*drafts)


def moves(method: str, **params: Any) -> Callable[[Client], Awaitable[Any]]:
    return lambda client: client.move(method, **params)


LESSER: Final = Foreign()
SPILL: Final = ("working", "episodic")

KINDS: Final[Mapping[str, Kind]] = {
    "write to one tier": Kind(one_by_one(), writes(msgspec.structs.replace(KEYED, embedding=_VECTOR)), "x"),
    "write to several tiers": Kind(one_by_one(), writes(*SEVERAL), "s"),
    "write to a lesser server": Kind(one_by_one(), writes(*SEVERAL), "g0", {"working": LESSER, "semantic": LESSER}),
    "spill": Kind(write_group_and_loners, moves("consolidate"), "g0", way=SPILL),
    "spill to a lesser server": Kind(write_group_and_loners, moves("consolidate"), "g0", {"episodic": LESSER}, SPILL),
    "spill from a lesser server": Kind(write_group_and_loners, moves("consolidate"), "g0", {"working": LESSER}, SPILL),
    "promotion": Kind(
        write_group_and_loners,
        moves("promote", ids=["g0", "l0"], tier="semantic"),
        "g1",
        way=("working", "semantic"),
    ),
    "earned promotion": Kind(earn, moves("consolidate"), "e", way=("episodic", "semantic")),
    "session close": Kind(write_group_and_loners, moves("session/close", session="s"), "l1", way=SPILL),
    "distilling spill": Kind(
        write_group_and_loners,
        lambda client: client.ask(distilled(GROUP_IDS), "consolidate"),
        "g1",
        settings=DISTILLING,
    ),
    "key replaced": Kind(one_by_one(KEYED), writes(AGAIN), "x"),
    "key replaced in another tier": Kind(
        one_by_one(KEYED), writes(msgspec.structs.replace(AGAIN, tier="semantic")), "x"
    ),
    "key replaced with its group in another tier": Kind(
        write_group_with_a_key, writes(msgspec.structs.replace(AGAIN, tier="semantic", group="g")), "g0"
    ),
    "key replaced in a batch": Kind(one_by_one(KEYED), writes(draft("n"), AGAIN, draft("m", tier="semantic")), "x"),
    "key replaced at a lesser server": Kind(one_by_one(KEYED), writes(AGAIN), "x", {"working": LESSER}),
    "key replaced at a lesser server in another tier": Kind(
        one_by_one(KEYED), writes(msgspec.structs.replace(AGAIN, tier="semantic")), "x", {"semantic": LESSER}
    ),
    "key replaced in a batch at a lesser server": Kind(
        one_by_one(KEYED), writes(draft("n"), AGAIN), "x", {"working": LESSER}
    ),
    "forget": Kind(write_group_and_loners, lambda client: client.forget("g0", "l0")),
    "forget at a lesser server": Kind(
        write_group_and_loners, lambda client: client.forget("g0", "l0"), servers={"working": LESSER}
    ),
}

# --- how a change is carried out


class Way(msgspec.Struct, frozen=True):
    """The order of concurrent steps, and when a forget begins.

    Args:
        sync_last: the catalog is synced after all concurrent steps; else calls to tiers come last.
        forget_at: the forget of the kind's victim begins when so many calls have been made; None for no forget.
    """

    sync_last: bool
    forget_at: int | None = None

    def __str__(self) -> str:
        forget = "" if self.forget_at is None else f", a forget at call {self.forget_at}"
        return ("sync last" if self.sync_last else "sync first") + forget


class Point(msgspec.Struct, frozen=True):
    """A moment: the photograph, the worlds that were possible, and the calls in the pipes to the tiers."""

    label: str
    photograph: Photograph
    worlds: frozenset[World]
    pending: Mapping[str, Sequence[bytes]]


class Death(msgspec.Struct, frozen=True):
    """The death of a tier before or after it carries out this call; it is back at once (`soon`), or later."""

    call: int
    after: bool
    soon: bool

    def __str__(self) -> str:
        when, back = "after" if self.after else "before", "soon" if self.soon else "later"
        return f"the tier dies {when} call {self.call}, back {back}"


class Stage:
    """Stands between the router and its tiers, and watches the disk. Photographs each moment while it is open."""

    def __init__(self, disk: Disk, ledger: Ledger, way: Way, death: Death | None = None) -> None:
        self.points: list[Point] = []
        self.calls = 0
        self.down: set[str] = set()
        self.died: str | None = None
        self.fed: Trial | None = None
        self._open = False
        self._disk = disk
        self._ledger = ledger
        self._way = way
        self._death = death
        self._pending: dict[str, list[bytes]] = {}
        self._turns: dict[str, anyio.Lock] = {}
        self._changed = anyio.Event()
        self._ended = False
        self._death_is_over = False
        disk.watch = self._moment

    @contextmanager
    def open(self) -> Iterator[None]:
        self._open = True
        self._shoot("at the beginning")
        try:
            yield
        finally:
            self._shoot("at the end")
            self._open = False

    async def has_begun(self) -> None:
        """Wait until the tier has died, if one is to die."""
        while self._death is not None and self.died is None:
            await self._changed.wait()

    async def reached(self, calls: int) -> None:
        """Wait until so many calls have been made, or the change has ended."""
        while self.calls < calls and not self._ended:
            await self._changed.wait()

    def bring_back(self) -> None:
        """Make all tiers reachable; no tier dies after this."""
        self.down.clear()
        self._death_is_over = True

    def has_ended(self) -> None:
        """Note that the calls of the change have been answered."""
        self._ended = True
        self._tell()

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if not self._open:
            return await go_on()
        if tier in self.down:
            await anyio.sleep_forever()
        self.calls += 1
        number = self.calls
        self._tell()
        method = method_of(message)
        pending = self._pending.setdefault(tier, [])
        pending.append(message)
        try:
            self._shoot(f"before call {number}, {method} at {tier}")
            async with self._turns.setdefault(tier, anyio.Lock()):
                if not self._way.sync_last:
                    await wait_all_tasks_blocked()
                await self._die(number, tier, after=False)
                answer = await go_on()
        finally:
            pending.remove(message)
        self._shoot(f"after call {number}, {method} at {tier}")
        await self._die(number, tier, after=True)
        return answer

    async def _die(self, number: int, tier: str, *, after: bool) -> None:
        death = self._death
        if death is None or self._death_is_over or (death.call, death.after) != (number, after):
            return
        assert self.fed is not None
        self.died = tier
        self._tell()
        self.down.add(tier)
        peer = self.fed.federation.links[tier]._peer
        if peer is not None:
            peer.lose("it died")  # type: ignore[attr-defined]  # a connection within this process has it
        if death.soon:
            self.down.discard(tier)
        await anyio.sleep_forever()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _moment(self, moment: Moment) -> None:
        kind, name = moment
        self._shoot(f"{kind} of {name or 'the folder'}")

    def _shoot(self, label: str) -> None:
        if self._open and self._death is None:
            waiting = {tier: tuple(map(bytes, calls)) for tier, calls in self._pending.items() if calls}
            self.points.append(Point(label, self._disk.photograph(), self._ledger.worlds(), waiting))


@contextmanager
def _syncs_last(way: Way) -> Iterator[None]:
    synced = Catalog.synced

    async def late(self: Catalog) -> None:
        await wait_all_tasks_blocked()
        await synced(self)

    if way.sync_last:
        with patch.object(Catalog, "synced", late):
            yield
    else:
        yield


async def carried_out(
    kind: Kind, way: Way, folder: Path, death: Death | None = None, *, watched: bool = False
) -> Stage:
    """Carry out a change; with a death, assert that it costs nothing.

    Args:
        watched: a reader watches all the time. With a death, a reader watches from the death on, too.
    """
    with (disk := Disk(folder)).mounted(), _syncs_last(way):
        ledger = Ledger()
        stage = Stage(disk, ledger, way, death)
        clock = Clock()
        async with thinking(
            Thinker(),
            kind.settings,
            servers=kind.servers,
            weather=stage,
            folder=folder,
            clock=clock,
            down=stage.down,
        ) as fed:
            stage.fed = fed
            client = Client(fed, ledger)
            await kind.prepare(client)
            await fed.settled()
            ledger.settle()
            assert (await client.look())[0] in ledger.worlds(), "what was prepared is not what is there"

            async def act() -> None:
                await kind.act(client)
                stage.has_ended()

            async def forget() -> None:
                if way.forget_at is not None and kind.victim is not None:
                    await stage.reached(way.forget_at)
                    await client.forget(kind.victim)

            with stage.open():
                async with anyio.create_task_group() as tasks:
                    if watched or death is not None:
                        tasks.start_soon(watch, client, stage)
                    await at_once(act, forget)
                    if death is None:
                        await anyio.sleep(1.0)
                    else:
                        await anyio.sleep(3.0)
                        stage.bring_back()
                        with anyio.fail_after(_BACK_SECONDS):
                            # the welcome ends after the link is up, without an event to wait for
                            while (await client.look())[1]:  # noqa: ASYNC110
                                await anyio.sleep(1.0)
                        await anyio.sleep(_REDONE_SECONDS)
                    await fed.settled()
                    tasks.cancel_scope.cancel()
            if watched or death is not None:
                ledger.found(await _one_of(client, ledger.worlds(), []))
                await assert_whole(client)
                await assert_usable(client, kind)
    return stage


async def watch(client: Client, stage: Stage) -> None:
    """Read everything again and again; assert that reads show every certain record, and no impossible one."""
    await stage.has_begun()
    pace = Pace(_LOOKS, 5.0)
    while True:
        since = client.ledger.tick()
        world, missing = await client.look()
        worlds = client.ledger.worlds(since)
        possible = frozenset[Fact]().union(*worlds)
        assert world <= possible, f"{set(world - possible)} is seen, which is not there"
        if not missing:
            certain = functools.reduce(frozenset[Fact].intersection, worlds)
            assert world >= certain, f"{set(certain - world)} is not seen"
        await pace()


# --- what is found after a crash


class Variant(msgspec.Struct, frozen=True):
    """The files after a crash, and which tiers carried out the calls in their pipes."""

    label: str
    files: Files
    carried_out: tuple[str, ...] = ()


MACHINES: Final = ("router", *TIERS)


def _is_routers(name: str) -> bool:
    return name.startswith("router.")


def variants(point: Point, torn: int, lesser: Collection[str]) -> Iterator[Variant]:
    """Yield all variants of one moment."""
    photograph = point.photograph
    yield Variant("killed", photograph.killed())
    tiers = sorted(point.pending)
    if len(tiers) > 1:
        for number in range(1, len(tiers) + 1):
            for some in combinations(tiers, number):
                yield Variant(f"killed, {' and '.join(some)} did what they were told", photograph.killed(), some)
    yield Variant("power cut everywhere", photograph.cut())
    yield Variant("power cut at the router", photograph.after(lambda n: Fate.LOST if _is_routers(n) else Fate.KEPT))
    yield Variant("power cut at the tiers", photograph.after(lambda n: Fate.KEPT if _is_routers(n) else Fate.LOST))
    for seed in range(torn):
        chance = random.Random(seed)
        fates = {name: chance.choice(list(Fate)) for name in MACHINES}
        # the specification does not say what a lifted server makes of an incomplete line
        fates |= {tier: Fate.LOST for tier in lesser if fates[tier] is Fate.TORN}

        def fate(name: str, fates: Mapping[str, Fate] = fates) -> Fate:
            return fates[name.partition(".")[0]]

        yield Variant(f"torn, seed {seed}", photograph.after(fate, seed))


class Scene(msgspec.Struct, frozen=True):
    """A variant of a point. Points and variants with equal files, calls and worlds make one scene."""

    label: str
    variant: Variant
    point: Point


def target_forgot(points: Sequence[Point], kind: Kind, number: int) -> Iterator[Variant]:
    """Yield a variant in which the target of a move has lost all that it acknowledged.

    Nothing may be lost by that as long as the source has not been called to forget its copies.
    """
    if kind.way is None:
        return
    source, target = kind.way
    told = f"memory/forget at {source}"
    if any(told in point.label for point in points[: number + 1]):
        return
    now, before = points[number].photograph.killed(), points[0].photograph.killed()
    theirs = {name: content for name, content in before.items() if name.startswith(f"{target}.")}
    rest = {name: content for name, content in now.items() if not name.startswith(f"{target}.")}
    yield Variant(f"killed, and {target} has lost what it acknowledged", {**rest, **theirs})


def scenes(points: Sequence[Point], torn: int, kind: Kind) -> dict[object, Scene]:
    """Return the different scenes of the moments."""
    found: dict[object, Scene] = {}
    for number, point in enumerate(points):
        for variant in (*variants(point, torn, kind.servers), *target_forgot(points, kind, number)):
            calls = tuple(sorted((tier, *point.pending[tier]) for tier in variant.carried_out))
            shot = (tuple(sorted(variant.files.items())), calls, point.worlds)
            found.setdefault(shot, Scene(f"point {number}, {point.label}, {variant.label}", variant, point))
    return found


async def recovered(kind: Kind, scene: Scene, folder: Path, clock: Clock) -> None:
    """Start the next router on a scene. Raises AssertionError where a rule is broken."""
    laid(scene.variant.files, folder)
    # a disk of the folder around it, so that nothing is recorded and no sync is delayed
    with Disk(folder.parent).mounted():
        for tier in scene.variant.carried_out:
            await _carry_out(kind, tier, folder, scene.point.pending[tier], clock)
        ledger = Ledger()
        async with thinking(Thinker(), kind.settings, servers=kind.servers, folder=folder, clock=clock) as fed:
            client = Client(fed, ledger)
            seen: list[World] = []
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_watch_recovery, client, scene.point.worlds, seen)
                await anyio.lowlevel.checkpoint()
                if redone(fed):
                    await anyio.sleep(_REDONE_SECONDS)
                await fed.settled()
                tasks.cancel_scope.cancel()
            ledger.found(await _one_of(client, scene.point.worlds, seen))
            await assert_whole(client)
            await assert_usable(client, kind)


async def _carry_out(kind: Kind, tier: str, folder: Path, calls: Sequence[bytes], clock: Clock) -> None:
    """Carry out the calls in a tier's pipe, as a process may before it ends."""
    path = folder / f"{tier}.db"
    if tier in kind.servers:
        server = kind.servers[tier].behind(kind.settings.tier(tier), path)
        for call in calls:
            server.answer(call)
        return
    store = Store(path, clock=clock, name=tier)
    async with serving(store, threads=False) as native:
        for call in calls:
            await native(call, LOCAL)
    store.close()


async def _watch_recovery(client: Client, worlds: frozenset[World], seen: list[World]) -> None:
    wait = 0.0
    while True:
        await _one_of(client, worlds, seen)
        await anyio.sleep(wait)
        wait = min(wait * 4 or 0.001, 10.0)


async def _one_of(client: Client, worlds: frozenset[World], seen: list[World]) -> World:
    """Assert that a reader sees one of the worlds, and none that an earlier look saw before another one; return it."""
    world, missing = await client.look()
    assert not missing, f"{missing} did not answer"
    if world not in worlds:
        may = " or ".join(str(sorted(map(repr, each))) for each in worlds)
        raise AssertionError(f"found {sorted(map(repr, world))}, which should be {may}")
    if not seen or seen[-1] != world:
        assert world not in seen, "what had come was gone again"
        seen.append(world)
    return world


async def assert_whole(client: Client) -> None:
    """Assert that nothing is under way, each record has one copy, at its home and as written, and a pass leaves no
    bucket over its capacity."""
    fed = client.fed
    [expected] = client.ledger.worlds()
    assert_nothing_under_way(fed)
    world, missing = await client.look()
    assert (world, missing) == (expected, set())
    copies = stored(fed)
    assert _facts(record for held in copies.values() for _, record in held) == expected, "copies differ"
    homes = {record["id"]: [record["tier"]] for record in await fed.timeline()}
    assert {id: [tier for tier, _ in held] for id, held in copies.items()} == homes
    counts = {tier: sum(homes[id] == [tier] for id in homes) for tier in TIERS}
    assert fed.federation.catalog.queries.counts(Scope()) == counts, "more is accounted for than is there"
    ids = [fact.id for fact in expected]
    distils = any(tier.distil for tier in fed.federation.settings.managed)
    op = client.ledger.begin(distilled(GROUP_IDS) if distils else nothing)
    await fed.call("consolidate")
    client.ledger.acknowledge(op)
    await fed.settled()
    world, _ = await client.look()
    assert world in client.ledger.worlds(), f"a pass has changed {ids} to {world}"
    client.ledger.found(world)
    for tier in fed.federation.settings.managed:
        assert list(fed.federation.catalog.buckets.overfull(tier.name)) == [], f"{tier.name} is over its capacity"


async def assert_usable(client: Client, kind: Kind) -> None:
    """Assert that the same records can be forgotten, written, moved and forgotten again."""
    fed = client.fed
    assert await client.forget(*[record["id"] for record in await fed.timeline()])
    await fed.settled()
    assert fed.copies() == {}
    client.ledger.found(frozenset())
    await kind.prepare(client)
    client.ledger.settle()
    await fed.settled()
    await assert_whole(client)
    ids = [record["id"] for record in await fed.timeline() if record["tier"] == "working"]
    await fed.call("promote", ids=ids, tier="semantic")
    await fed.settled()
    await assert_whole(client)
    ids = [record["id"] for record in await fed.timeline()]
    assert await client.forget(*ids)
    await fed.settled()
    assert fed.copies() == {}
    assert await fed.timeline() == []


# --- all crash points


class Tally(msgspec.Struct):
    """The numbers of moments, of different scenes, of deaths of a tier, and of runs with only a reader."""

    points: int = 0
    scenes: int = 0
    looked: int = 0
    deaths: int = 0
    watched: int = 0

    def add(self, other: "Tally") -> None:
        self.points += other.points
        self.scenes += other.scenes
        self.looked += other.looked
        self.deaths += other.deaths
        self.watched += other.watched

    def __str__(self) -> str:
        return (
            f"{self.points:,} points, {self.scenes:,} different things found, {self.looked:,} looked into; "
            f"{self.deaths:,} deaths of tiers"
        )


def running(test: Callable[[], Awaitable[Any]]) -> Any:
    """Run on trio with a clock that jumps, and with an order of tasks that is the same each time."""
    random_ = random.Random(0)
    with ExitStack() as stack:
        stack.enter_context(patch.object(trio._core._run, "_r", random_))
        random.seed(0)  # the jitter of links
        stack.enter_context(patch.object(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True))
        return trio.run(test, **jumping())


def ways(kind: Kind, forgets: Iterable[int]) -> Iterator[Way]:
    for sync_last in (False, True):
        yield Way(sync_last)
        if kind.victim is not None:
            for number in forgets:
                yield Way(sync_last, number)


class Broken(AssertionError):
    """A rule is broken, or something else has failed.

    Args:
        at: the label of the point, of the death, or of the reader.
        before: the labels of the moments up to it.
    """

    def __init__(self, way: Way, at: str, before: Sequence[str], problem: BaseException) -> None:
        self.at = at
        self.before = before
        self.problem = problem
        is_told = isinstance(problem, AssertionError) and str(problem)
        super().__init__(f"{way}: {at}: {problem if is_told else repr(problem)}")


def crash_points(
    kind: Kind,
    way: Way,
    folder: Path,
    tally: Tally,
    *,
    torn: int = 0,
    every: int = 1,
    first: int = 0,
    only: str = "",
) -> None:
    """Recover every `every`th scene from the `first` on. Raises Broken.

    Args:
        only: recover only the scene of this label or, if there is none, those whose label contains it.
    """
    with _named(way, "nothing dies"):
        stage = running(lambda: carried_out(kind, way, _new(folder, "act")))
    found = list(scenes(stage.points, torn, kind).values())
    meant = [scene for scene in found if scene.label == only] or [scene for scene in found if only in scene.label]
    tally.points += len(stage.points)
    tally.scenes += len(found)
    for number, scene in enumerate(meant[first % every :: every]):
        clock = Clock()
        clock.now += 1_000_000
        place = next(place for place, point in enumerate(stage.points) if point is scene.point)
        with _named(way, scene.label, [point.label for point in stage.points[: place + 1]]):
            running(functools.partial(recovered, kind, scene, folder / f"found-{number}", clock))
        shutil.rmtree(folder / f"found-{number}")
        tally.looked += 1
    shutil.rmtree(folder / "act")


def deaths(kind: Kind, way: Way, folder: Path, tally: Tally, *, every: int = 1, first: int = 0, only: str = "") -> None:
    """Let a tier die before and after each call, or at every `every`th of these deaths. Raises Broken.

    Args:
        only: try only the deaths whose label contains it.
    """
    possible = [
        Death(call, after, soon=(call + after) % 2 == 0) for call in range(1, _MOST_CALLS) for after in (False, True)
    ]
    for death in [death for death in possible if only in str(death)][first % every :: every]:
        with _named(way, str(death)):
            stage = running(functools.partial(carried_out, kind, way, _new(folder, "act"), death))
        shutil.rmtree(folder / "act")
        if stage.died is None:
            return  # the change makes fewer calls
        tally.deaths += 1


def watched(kind: Kind, way: Way, folder: Path) -> None:
    """Carry out the change with a reader, without a death. Raises Broken."""
    with _named(way, READER):
        running(functools.partial(carried_out, kind, way, _new(folder, "act"), watched=True))
    shutil.rmtree(folder / "act")


@contextmanager
def _named(way: Way, at: str, before: Sequence[str] = ()) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        innermost: BaseException = problem
        while isinstance(innermost, BaseExceptionGroup):
            innermost = innermost.exceptions[0]
        raise Broken(way, at, before, innermost) from problem


def _new(folder: Path, name: str) -> Path:
    (folder / name).mkdir()
    return folder / name
