"""The life of a seed: the federation, the calls of its clients, the faults, and the verdict.

A life consists of bursts of calls with hours between them. A router may die between any two steps, and may lose what
was not synced. Deaths are more frequent during writes and forgets than chance alone would make them. After some bursts,
and always at the end, faults cease, everything comes to rest, and all records are checked. Then a copy of the catalog
of any age may be put back: no record may be lost or come back by that. In other lives a copy of a store's file is put
back: only records that lived there may be missing, and none may be shown with an old content.
"""

import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from random import Random
from traceback import format_exception
from typing import Any, Final

import anyio
import msgspec
import trio

from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import render
from a2m_router.reading.mounted import NO_VECTORS
from tests.support.clocks import jumping
from tests.support.federated import FOUR_TIERS, START, Foreign, Mix, filled, settings_of
from tests.support.histories import SHARED, Operation, Run, Shown, Unheard, check_the_tiers
from tests.support.model import Model, Version
from tests.verification.simulation.chance import JumpingClock, following
from tests.verification.simulation.operations import draw_operation, draw_write
from tests.verification.simulation.routers import COMMIT
from tests.verification.simulation.world import Troubles, World

_BURSTS: Final = 7
_OPERATIONS: Final = 180

_COMMAND: Final = 'command = ["-"]'
_URL: Final = 'url = "http://127.0.0.1:9/{}"'

# the records of a foreign server that is only read
_PAGES: Final = {
    "one": "alpha as the library has it",
    "two": "beta as the library has it",
    "three": "nothing that anybody asks for",
}
_LIBRARY: Final = "library"
_MOUNT: Final = """
[tiers.library]
kind = "semantic"
command = ["-"]
mount = true
"""

_LESSER: Final = (
    Foreign(),
    Foreign(("keys", "scopes")),
    Foreign(("embeddings",)),
    Foreign(("salience", "sessions")),
    Foreign(("scopes", "sessions", "keys", "embeddings"), like_javascript=True),
    Foreign(("tiers",), limits={"max_recall_limit": 500}),
)


class Outcome(msgspec.Struct, frozen=True):
    """The outcome of a seed: `failure` is the broken rule, if any; `history` the events as lines."""

    seed: int
    failure: str | None
    history: list[str]
    operations: int
    deaths: int
    refusals: int = 0
    set_back: int = 0


class Shape(msgspec.Struct, frozen=True):
    """The shape of a federation."""

    background: bool
    text: str
    mix: Mix
    words: str


def draw_shape(chance: Random) -> Shape:
    """Draw a shape."""
    background = chance.random() < 0.7
    text = FOUR_TIERS
    words = ["background passes" if background else "explicit passes"]
    if chance.random() < 0.3:
        text = text.replace("per_session = true\n", "")
        words.append("one working tier for all sessions")
    mix: dict[str, Foreign] = {}
    if chance.random() < 0.5:
        for tier in ("working", "episodic", "semantic", "procedural"):
            if chance.random() < 0.4:
                mix[tier] = chance.choice(_LESSER)
                is_remote = chance.random() < 0.5
                if is_remote:
                    # the connection is the same here; only the tier's settings make the difference
                    before, after = text.split(f"[tiers.{tier}]")
                    text = f"{before}[tiers.{tier}]{after.replace(_COMMAND, _URL.format(tier), 1)}"
                where = f"{tier} over HTTP" if is_remote else tier
                words.append(f"{where} at a server of {', '.join(('core', *mix[tier].capabilities))}")
    if chance.random() < 0.3:
        text += _MOUNT
        mix[_LIBRARY] = filled(
            *({"id": id, "content": content, "created_at": render(START)} for id, content in _PAGES.items()),
            read_only=chance.random() < 0.5,
        )
        words.append("a library mounted")
    return Shape(background, text, mix, "; ".join(words))


def live(seed: int) -> Outcome:
    """Live the life of a seed to its end, or to the first broken rule."""
    life = Life(seed)
    failure: str | None = None
    with following(seed, life.clock) as chance:
        try:
            trio.run(life.run, chance, **jumping())
        except BaseException as problem:
            failure = _told(problem)
            if failure is None:
                raise
    return Outcome(seed, failure, life.history, life.operations, life.deaths, life.refusals, life.set_back)


class Life:
    """One seed under way."""

    def __init__(self, seed: int) -> None:
        self.clock = JumpingClock()
        self.history: list[str] = []
        self.operations = 0
        self.deaths = 0
        self.refusals = 0
        self.set_back = 0
        self._chance = Random(f"life {seed}")
        self._ages = Random(f"copies {seed}")
        # never both: a catalog rebuilt from an old one cannot know what an older store had acknowledged last
        self._sets_stores_back = Random(f"stores {seed}").random() < 0.4
        self._shape = draw_shape(self._chance)
        self._seed = seed

    async def run(self, chance: Random) -> None:
        """Live until everything has been checked. Raises AssertionError for the first broken rule."""
        settings = settings_of(self._shape.text, policy="background" if self._shape.background else "explicit")
        world = World(settings, self._shape.mix, chance, self.clock)
        world.history = self.history
        world.tell("seed", f"{self._seed}: {self._shape.words}")
        troubles = Troubles(lambda: world.router is None or world.router.dead)
        logging.getLogger("a2m_router").addHandler(troubles)
        clients = Clients(world, self.clock, Random(f"clients {self._seed}"))
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(world.run)
                for number in range(_BURSTS):
                    await self._burst(world, clients, number)
                    assert not troubles.found, troubles.found
                await clients.rest()
                await clients.within_capacity()
                assert not troubles.found, troubles.found
                await world.end()
        finally:
            logging.getLogger("a2m_router").removeHandler(troubles)
            self.operations = clients.operations
            self.deaths = world.deaths
            self.refusals = world.refusals
            self.set_back = world.set_back
            world.close()

    async def _burst(self, world: World, clients: "Clients", number: int) -> None:
        chance = self._chance
        count = chance.randint(2, 4)
        each = _OPERATIONS // _BURSTS // count
        clients.pause = chance.choice((0.0, 0.02, 2.0))
        rate = chance.choice((0.0, 0.0, 0.02, 0.1, 0.3))
        for tier in world.tiers.values():
            # some tiers are much slower than others, so that concurrent calls are answered at different moments
            tier.latency = chance.choice((0.0, 0.01, 0.1, 1.0))
            tier.rate = rate if chance.random() < 0.5 else 0.0
        async with anyio.create_task_group() as events:
            if self._ages.random() < 0.5:
                events.start_soon(self._copy, world, self._ages.uniform(0.0, 5.0))
            for _ in range(chance.choice((0, 1, 1, 2))):
                events.start_soon(self._event, world, clients, chance.choice(_EVENTS), chance.uniform(0.0, 20.0))
            async with anyio.create_task_group() as tasks:
                for client in range(count):
                    operations = [draw_write(chance), *(draw_operation(chance) for _ in range(each - 1))]
                    tasks.start_soon(clients.work, f"client {client + 1}", operations)
            events.cancel_scope.cancel()
        if chance.random() < 0.4:
            await clients.rest()
            if self._ages.random() < 0.5:
                if self._sets_stores_back:
                    await clients.set_a_store_back(self._ages)
                elif await world.put_back(self._ages):
                    clients.model.put_back()
                    await clients.rest()
        elif chance.random() < 0.7:
            for tier in world.tiers.values():
                tier.calm()
        await anyio.sleep(chance.choice((0.0, 600.0, 3600.0, 12 * 3600.0)))
        for tier in world.tiers.values():
            tier.come_up()

    async def _copy(self, world: World, after: float) -> None:
        await anyio.sleep(after)
        world.copy()

    async def _event(self, world: World, clients: "Clients", event: str, after: float) -> None:
        chance = world.chance
        if event == "death":
            # methods with few calls have few moments to die at
            world.dying_at = chance.choice((None, COMMIT, "memory/remember", "memory/remember", "memory/forget"))
            world.dying = chance.randint(1, 200 if world.dying_at in (None, COMMIT) else 20)
            return
        await anyio.sleep(after)
        tier = world.tiers[chance.choice(list(world.tiers))]
        if event == "exit":
            tier.tell(tier.name, "EXITS")
            tier.exit()
        elif event == "outage":
            tier.go_down()
            await anyio.sleep(chance.choice((1.0, 30.0, 600.0)))
            tier.come_up()
        elif event == "restart":
            await world.restart()


_EVENTS: Final = ("death", "death", "exit", "outage", "outage", "restart")


class Clients(Run):
    """The clients of the router, and the model that judges their answers."""

    def __init__(self, world: World, clock: JumpingClock, chance: Random) -> None:
        self.world = world
        self.chance = chance
        self.operations = 0
        self.pause = 0.0  # the most seconds between two calls of a client
        self.done = False
        self.model = Model(clock.look, SHARED)
        self._aimed: set[str] = set()  # ids that a client has promoted to procedural
        world.on_power_cut = self.model.cut

    async def work(self, name: str, operations: Sequence[Operation]) -> None:
        """Carry out the operations of one client, one after the other."""
        _WHO.set(name)
        for operation in operations:
            await anyio.sleep(self.chance.choice((0.0, self.pause)))
            _BEGAN.set(trio.current_time())
            self.operations += 1
            await self.carry_out(operation)

    async def rest(self) -> None:
        """Let everything come to rest, then check all records."""
        _WHO.set("rest")
        await self.world.rest()
        self.fed = self.world.trial
        records = (await self.shown("timeline", embeddings=True)).records
        self.model.decide(records)
        check_the_tiers(self, records)
        self._check_procedural(records)
        self.world.tell("rest", f"{len(records)} records: {_shown(records)}")

    async def set_a_store_back(self, chance: Random) -> None:
        """Put a store's old file back; records that came to it since may be missing, and all others must be unchanged.

        The missing records are forgotten, as by clients that notice the loss.
        """
        before = {record.id: record for record in (await self._everything()).records}
        tier = await self.world.set_back_a_store(chance)
        if tier is None:
            return
        await self.world.rest()
        self.fed = self.world.trial
        told = await self._everything()
        assert {each.tier for each in told.degraded} <= {tier}, f"{tier} was set back, and without: {told.degraded}"
        shown = {record.id: record for record in told.records}
        altered = {id: (before.get(id), record) for id, record in shown.items() if before.get(id) != record}
        assert not altered, f"{tier} was set back, and these are not as they were: {altered}"
        lost = before.keys() - shown.keys()
        elsewhere = [id for id in lost if before[id].tier != tier]
        assert not elsewhere, f"{tier} was set back, and these are missing, which lived elsewhere: {elsewhere}"
        if lost:
            await self._raw("forget", ids=sorted(lost))
        self.model.lose(before[id] for id in lost)
        await self.rest()

    async def _everything(self) -> "_Told":
        return msgspec.json.decode(await self._raw("timeline", embeddings=True), type=_Told)

    async def within_capacity(self) -> None:
        """Rule 5: after a pass with all tiers up no bucket exceeds its capacity, except by one group alone."""
        await self._raw("consolidate")
        await self.world.rest()
        buckets: dict[tuple[Any, ...], list[Record]] = {}
        for record in await self.everything():
            tier = self.world.settings.tier(record.tier or "")
            conversation = (record.owner, record.session) if tier.per_session else ()
            buckets.setdefault((tier.name, *conversation), []).append(record)
        for (name, *_), records in buckets.items():
            capacity = self.world.settings.tier(name).capacity
            one_group = records[0].group is not None and len({(r.owner, r.group) for r in records}) == 1
            assert capacity is None or len(records) <= capacity or one_group, f"{name} is over: {_shown(records)}"

    # --- results of operations

    def bear(self, refused: A2MError) -> None:
        """Check that an error has a reason, and that a fault of the federation explains it."""
        assert refused.code == Code.INTERNAL_ERROR, f"an error of the caller's, who made none: {refused}"
        data = refused.data or {}
        assert "reason" in data, f"an error without a reason: {refused}"
        # with slow tiers, another call may hold the claims of the same records for too long
        is_busy = data["reason"] == "unsettled" or "is still in doubt" in refused.message
        assert is_busy or self.world.is_troubled(_BEGAN.get()), f"an error for which there is no reason: {refused}"

    async def shown(self, method: str, **params: Any) -> Shown:
        began = trio.current_time()
        told = msgspec.json.decode(await self._raw(method, **params), type=_Told)
        silent = [each.tier for each in told.degraded]
        for down in told.degraded:
            # the library has no vectors
            is_mute = down == _Degraded(_LIBRARY, NO_VECTORS) and not params.get("query")
            is_explained = is_mute or self.world.is_tier_troubled(down.tier, began)
            assert is_explained, f"there is no reason for {down}"
        pages = [record for record in told.records if record.tier == _LIBRARY]
        is_cut = len(told.records) == (params.get("limit") or (8 if method == "recall" else None))
        answers = _LIBRARY in self.world.tiers and _LIBRARY not in silent
        self._check_pages(pages, params, are_all=answers and not is_cut)
        records = [record for record in told.records if record.tier != _LIBRARY]
        if pages and is_cut:
            return Shown(records, lambda version: True, len(pages))  # a page may rank before a missing record
        if not silent:
            return Shown(records, pages=len(pages))

        def excused(version: Version) -> bool:
            ids = {v.id for v in self.model.versions.values() if v.object == version.object and v.id is not None}
            return any(self.world.tiers[tier].held(id, began) for tier in silent for id in ids)

        return Shown(records, excused, len(pages))

    def _check_pages(self, pages: Sequence[Record], params: Mapping[str, Any], *, are_all: bool) -> None:
        """Check that records of the mount are shown unchanged; with `are_all`, that all matching ones are shown."""
        shown = {record.id: record.content for record in pages}
        assert len(shown) == len(pages), f"a page twice: {pages}"
        there = {f"{_LIBRARY}/{id}": content for id, content in _PAGES.items()}
        assert shown.items() <= there.items(), f"pages that are not there: {pages}"
        if are_all and not any(map(params.get, ("tier", "where", "key_prefix", "embedding"))):
            words = set(str(params.get("query") or "").split())
            wanted = {id for id, content in there.items() if not words or words & set(content.split())}
            assert shown.keys() >= wanted, f"of {wanted} there are only {shown.keys()}"

    async def _moved(self, method: str, **params: Any) -> bool:
        if method == "promote" and params["tier"] == "procedural":
            self._aimed.update(params["ids"])
        try:
            await self._raw(method, **params)
        except Unheard:
            return False
        except A2MError as refused:
            self.bear(refused)
            return False
        return True

    async def _raw(self, method: str, **params: Any) -> bytes:
        given = {name: value for name, value in params.items() if value is not None}
        who = _WHO.get()
        patience = None
        if who.startswith("client") and self.chance.random() < 0.08:
            patience = self.chance.choice((0.0, 0.001, 0.02, 0.5, 3.0))
        self.world.tell(who, f"{method} {_text(given)}")
        try:
            answer = await self.world.call(method, given, patience)
        except Unheard:
            self.world.tell(who, f"{method}: never heard")
            raise
        except A2MError as refused:
            self.world.tell(who, f"{method}: {refused.code} {refused.message}")
            raise
        self.world.tell(who, f"{method}: {_summary(answer)}")
        return answer

    def _check_procedural(self, records: Sequence[Record]) -> None:
        """Rule 6: a record in procedural was written there, or promoted to it by a client."""
        aimed = {v.object for v in self.model.versions.values() if v.tier == "procedural" or v.id in self._aimed}
        groups = {(v.owner, v.fields.get("group")) for v in self.model.versions.values() if v.object in aimed}
        for record in records:
            if record.tier == "procedural":
                by_group = record.group is not None and (record.owner, record.group) in groups
                assert self.model.version_of(record).object in aimed or by_group, f"nobody sent {record} there"


_WHO: ContextVar[str] = ContextVar("who")
_BEGAN: ContextVar[float] = ContextVar("began")


class _Degraded(msgspec.Struct):
    tier: str
    reason: str


class _Told(msgspec.Struct):
    records: list[Record]
    degraded: list[_Degraded] = []


class _Brief(msgspec.Struct):
    id: str
    content: str
    tier: str | None = None


class _Answer(msgspec.Struct):
    records: list[_Brief]
    degraded: list[_Degraded] = []


def _text(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _summary(answer: bytes) -> str:
    if not answer.startswith(b'{"records"'):
        return answer.decode()
    told = msgspec.json.decode(answer, type=_Answer)
    without = f"; without {', '.join(each.tier for each in told.degraded)}" if told.degraded else ""
    return (_shown(told.records) or "none") + without


def _shown(records: Sequence[_Brief | Record]) -> str:
    return ", ".join(f"{r.id}={r.content.partition(' ')[0]}@{r.tier}" for r in records)


def _told(problem: BaseException) -> str | None:
    """Return the failures of a run as text; None if it was interrupted from outside."""
    leaves: list[BaseException] = []
    todo = [problem]
    while todo:
        each = todo.pop()
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions[::-1]
        else:
            leaves.append(each)
    if any(isinstance(leaf, KeyboardInterrupt | SystemExit) for leaf in leaves):
        return None
    return "\n".join(
        str(leaf) if isinstance(leaf, AssertionError) and str(leaf) else "".join(format_exception(leaf))
        for leaf in leaves
    )


def live_quietly(seed: int) -> Outcome:
    """Live a life without log output, except for the check of errors. It is here since processes import it by name."""
    log = logging.getLogger("a2m_router")
    log.setLevel(logging.ERROR)
    log.propagate = False
    return live(seed)
