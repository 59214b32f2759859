"""Histories of several concurrent clients: the strategies that draw them, and the run of one against a federation.

A history is plain data, so that a failing one can be read and shrunk. An operation that names a record by number looks
up one of the known records when it runs.
"""

import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any, Final, NamedTuple

import anyio
import anyio.lowlevel
import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from a2m_router.catalog.selection import Scope
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import render
from tests.support.federated import (
    ALL_NATIVE,
    FOUR_TIERS,
    START,
    Clock,
    Mix,
    Trial,
    Weather,
    assert_nothing_under_way,
    at_once,
    settings_of,
    stored,
    trial,
)
from tests.support.model import Model, Object, Selector, Version, none_excused

SHARED: Final = ("procedural",)
TIERS: Final = ("working", "episodic", "semantic", "procedural")
OWNERS: Final = (None, "a", "b")
# explicit ids with their owners: a write to another owner's id is refused, and is not tested here
POOL: Final[Mapping[str, str | None]] = {"p0": None, "p1": None, "p2": "a", "p3": "b"}

# raw metadata, and the JSON value of its `m`: no codec that decodes and encodes it again keeps its bytes
METADATA: Final[Sequence[tuple[bytes, object]]] = (
    (b'{"m":1}', 1),
    (b'{ "m" : 1.0 , "big":123456789012345678901234567890}', 1),
    (b'{"m":2,"m":1}', 1),
    (b'{"m":2,"x":1e400,"\\u0041":"\\u0000"}', 2),
    (b'{"y":[1.0,-0,0.1e1]}', None),
)

fields = st.fixed_dictionaries(
    {},
    optional={
        "content": st.sampled_from(["beta", "beta gamma", "delta"]),
        "role": st.sampled_from(["user", "tool"]),
        "session": st.sampled_from(["s", "t"]),
        "salience": st.sampled_from([0.0, 0.5, 2.0]),
        "uri": st.sampled_from(["http://127.0.0.1:9/x", "u:1"]),
        "media_type": st.just("text/plain"),
        "embedding": st.sampled_from([[0.1, -0.0, 3.0], [1e-310, 0.2, 1.0], [1.0, 0.0, 0.0]]),
        "created_at": st.sampled_from([render(START), render(START + 5)]),
    },
)
metadata = st.none() | st.integers(0, len(METADATA) - 1)


class Draft(msgspec.Struct, frozen=True):
    """One record to write. `id`: one of POOL; `known`: with the known id of the key's record."""

    fields: dict[str, Any]
    metadata: int | None = None
    id: str | None = None
    key: str | None = None
    known: bool = False
    tier: str | None = None
    late: int | None = None


class Write(msgspec.Struct, frozen=True):
    records: list[Draft]
    owner: str | None = None
    session: str | None = None


class WriteGroup(msgspec.Struct, frozen=True):
    """A batch that is one group, kept together from the beginning."""

    records: list[Draft]
    owner: str | None = None
    tier: str | None = None


class Edit(msgspec.Struct, frozen=True):
    """A fetch of a page, and a write of it with the fetched revision, or with one that differs by `off`.

    `again`: the write is repeated.
    """

    draft: Draft
    owner: str | None = None
    off: int = 0
    again: bool = False


class Read(msgspec.Struct, frozen=True):
    method: str
    owner: str | None = None
    tier: str | None = None
    where: dict[str, Any] = msgspec.field(default_factory=dict)
    key_prefix: str | None = None
    limit: int | None = None
    embeddings: bool = False
    query: str | None = None
    embedding: list[float] | None = None


class Fetch(msgspec.Struct, frozen=True):
    key: str
    owner: str | None = None


class Promote(msgspec.Struct, frozen=True):
    which: list[int]
    tier: str
    owner: str | None = None
    salience: float | None = None


class Forget(msgspec.Struct, frozen=True):
    which: list[int] | None = None
    owner: str | None = None
    where: dict[str, Any] = msgspec.field(default_factory=dict)
    tier: str | None = None
    key_prefix: str | None = None
    query: str | None = None


class Reinforce(msgspec.Struct, frozen=True):
    which: list[int]
    amount: float


class Consolidate(msgspec.Struct, frozen=True):
    pass


class Close(msgspec.Struct, frozen=True):
    session: str
    owner: str | None = None


Operation = Write | WriteGroup | Edit | Read | Fetch | Promote | Forget | Reinforce | Consolidate | Close


class History(msgspec.Struct, frozen=True):
    """The operations of each client, in order, and how the tiers delay calls meanwhile."""

    clients: list[list[Operation]]
    seed: int
    background: bool = True


owners = st.sampled_from(OWNERS)
some_tier = st.none() | st.sampled_from(TIERS)
which = st.lists(st.integers(0, 30), min_size=1, max_size=3)
wheres = st.sampled_from(
    [{}, {}, {"session": "s"}, {"session": "t"}, {"role": "user"}, {"m": 1}, {"m": 2, "session": "s"}, {"uri": "u:1"}]
)
prefixes = st.none() | st.sampled_from(["k", "k/a"])

new_drafts = st.builds(Draft, fields, metadata, tier=some_tier, late=st.none() | st.integers(0, 5))
pool_drafts = st.builds(Draft, fields, metadata, id=st.sampled_from(list(POOL)), tier=some_tier)
key_drafts = st.builds(
    Draft, fields, metadata, key=st.sampled_from(["k", "k/a", "x"]), known=st.booleans(), tier=some_tier
)
writes = st.builds(
    Write,
    st.lists(new_drafts | pool_drafts | key_drafts, min_size=1, max_size=3),
    owners,
    st.none() | st.just("s"),
)
edits = st.builds(Edit, key_drafts, owners, st.sampled_from([0, 0, 0, 1]), st.booleans())
groups = st.builds(WriteGroup, st.lists(st.builds(Draft, fields, metadata), min_size=2, max_size=3), owners, some_tier)
reads = st.builds(
    Read,
    st.sampled_from(["timeline", "recall"]),
    owners,
    some_tier,
    wheres,
    prefixes,
    st.sampled_from([None, 1, 3, 100]),
    st.booleans(),
    st.sampled_from([None, "alpha", "alpha beta"]),
    st.none() | st.just([1.0, 0.5, 0.0]),
)
full_reads = st.builds(Read, st.sampled_from(["timeline", "recall"]), owners, limit=st.just(100))
fetches = st.builds(Fetch, st.sampled_from(["k", "k/a", "x"]), owners)
promotes = st.builds(Promote, which, st.sampled_from(TIERS), owners, st.sampled_from([None, None, None, 1.0]))
forgets = st.one_of(
    st.builds(Forget, which, owners),
    st.builds(Forget, which, owners),
    st.builds(Forget, st.none(), owners, wheres.filter(bool), some_tier),
    st.builds(Forget, st.none(), owners, tier=st.sampled_from(TIERS)),
    st.builds(Forget, st.none(), owners, key_prefix=st.sampled_from(["k", "k/a"])),
    st.builds(Forget, st.none(), owners, wheres, query=st.just("beta")),
    st.builds(Forget, which, owners, wheres),
)
reinforces = st.builds(Reinforce, which, st.sampled_from([0.5, 1.0, 2.0]))
closes = st.builds(Close, st.sampled_from(["s", "t"]), owners)
moves = st.one_of(promotes, st.just(Consolidate()), closes)
anything = st.one_of(
    writes, writes, writes, groups, edits, reads, reads, full_reads, full_reads, fetches, promotes, promotes,
    forgets, reinforces, moves,
)  # fmt: skip


def histories(
    operations: st.SearchStrategy[Any] = anything, *, first: st.SearchStrategy[Any] = writes | groups, most: int = 8
) -> st.SearchStrategy[History]:
    """Draw two to four clients, each beginning with a write, so that other operations have records to work on."""
    client = st.tuples(first, st.lists(operations, max_size=most)).map(lambda drawn: [drawn[0], *drawn[1]])
    return st.builds(History, st.lists(client, min_size=2, max_size=4), st.integers(0, 2**32), st.booleans())


def restless(seed: int) -> Weather:
    """Return weather that delays each call by turns of the event loop, before and after; in some tiers by many more."""
    chance = random.Random(seed)
    longest = {tier: chance.choice([1, 4, 20, 80]) for tier in TIERS}

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        before, after = (int(longest.get(tier, 10) * chance.random() ** 2) for _ in range(2))
        for _ in range(before):
            await anyio.lowlevel.checkpoint()
        answer = await go_on()
        for _ in range(after):
            await anyio.lowlevel.checkpoint()
        return answer

    return weather


class Unheard(Exception):
    """The outcome of a call is unknown: its caller gave up, or the router died."""


class Shown(NamedTuple):
    """The answer to a read.

    Args:
        records: those that clients have written.
        excused: whether the answer may lack a record.
        pages: the number of further records in the answer, which no client here has written.
    """

    records: list[Record]
    excused: Callable[[Version], bool] = none_excused
    pages: int = 0


class Run:
    """A history in progress: the federation and the model beside it.

    The model gets the outcome of every operation: an answer, an error, or unknown. Here nothing fails, so an error is
    raised; a subclass may `bear` it.
    """

    def __init__(self, fed: Trial, clock: Clock) -> None:
        self.fed = fed
        self.model = Model(lambda: clock.now, SHARED)
        self.done = False

    async def client(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            await self.carry_out(operation)

    async def watch(self) -> None:
        """Read everything, over and over, until all clients are done."""
        looks = [
            Read("recall", limit=100),
            Read("timeline"),
            Read("timeline", where={"m": 1}),
            Read("recall", limit=100, query="alpha"),
            Read("timeline", owner="a"),
        ]
        for look in cycle(looks):
            if self.done:
                return
            await self.carry_out(look)

    async def carry_out(self, operation: Operation) -> None:
        match operation:
            case Write() | WriteGroup():
                await self._write(operation)
            case Edit():
                await self._edit(operation)
            case Read():
                await self._read(operation)
            case Fetch(key=key, owner=owner):
                await self._fetch(key, owner)
            case Promote():
                await self._promote(operation)
            case Forget():
                await self._forget(operation)
            case Reinforce(which=which, amount=amount):
                begin, ids = self.model.tick(), self._ids(which)
                try:
                    await self._raw("reinforce", ids=ids, amount=amount)
                except Unheard:
                    self.model.leave_reinforce(ids)
                else:
                    self.model.end_reinforce(begin, ids, amount)
            case Consolidate():
                await self._moved("consolidate")
            case Close(session=session, owner=owner):
                await self._moved("session/close", session=session, owner=owner)

    async def everything(self) -> list[Record]:
        return await self._records("timeline", embeddings=True)

    def bear(self, refused: A2MError) -> None:
        """Handle an operation that was answered with an error and has changed nothing."""
        raise refused

    async def shown(self, method: str, **params: Any) -> "Shown":
        """Return an answer. Nothing fails here, so no record may be missing."""
        return Shown(await self._records(method, **params))

    # --- operations

    async def _write(self, write: Write | WriteGroup) -> None:
        session = write.session if isinstance(write, Write) else None
        group = f"g{self.model.tick()}" if isinstance(write, WriteGroup) else None
        versions = []
        for draft in write.records:
            version = self._version(draft, write.owner, session)
            if group is not None and isinstance(write, WriteGroup):
                version.fields["group"] = group
                version.tier = write.tier
            versions.append(version)
        if group is not None:
            mates = frozenset(version.number for version in versions)
            for version in versions:
                version.group_mates = mates
        begun = self.model.begin_write(versions)
        sent = [self._sent(version, draft) for version, draft in zip(versions, write.records, strict=True)]
        try:
            answer = await self._raw("remember", records=sent, owner=write.owner, session=session)
        except Unheard:
            self.model.leave_write(begun)
            return
        except A2MError as refused:
            self.model.refuse_write(begun)
            self.bear(refused)
            return
        ids = msgspec.json.decode(answer, type=_Ids).ids
        self.model.end_write(begun, {v.number: id for v, id in zip(versions, ids, strict=True)})

    async def _fetch(self, key: str, owner: str | None) -> "_Fetched | None":
        """Return the record at the key; None if the outcome is unknown."""
        begin = self.model.tick()
        try:
            answer = await self._raw("fetch", key=key, owner=owner)
        except Unheard:
            return None
        except A2MError as refused:
            self.bear(refused)
            return None
        fetched = msgspec.json.decode(answer, type=_Fetched)
        self.model.end_fetch(begin, owner, key, fetched.record)
        return fetched

    async def _edit(self, edit: Edit) -> None:
        assert edit.draft.key is not None
        fetched = await self._fetch(edit.draft.key, edit.owner)
        if fetched is None:
            return
        page = fetched.record
        # an owner's own page is not the page without an owner
        seen = None if page is None or page.owner != edit.owner else (page.revision or 0) + edit.off
        version = self._version(edit.draft, edit.owner, None)
        sent = {**self._sent(version, msgspec.structs.replace(edit.draft, known=False)), "if_revision": seen}
        begun = self.model.begin_write([version])
        try:
            answer = await self._raw("remember", records=[sent], owner=edit.owner)
        except Unheard:
            self.model.leave_write(begun)
            return
        except A2MError as refused:
            begin = begun[0][1].begin
            self.model.refuse_write(begun)
            self._bear_conflict(begin, version, refused)
            return
        [id] = msgspec.json.decode(answer, type=_Ids).ids
        self.model.end_edit(begun, id, seen)
        if not edit.again:
            return
        begin = self.model.tick()
        try:
            answer = await self._raw("remember", records=[sent], owner=edit.owner)
        except Unheard:
            return
        except A2MError as refused:
            self._bear_conflict(begin, version, refused)
            return
        [id] = msgspec.json.decode(answer, type=_Ids).ids
        self.model.end_repeat(begin, version, id)

    def _bear_conflict(self, begin: int, version: Version, refused: A2MError) -> None:
        data = refused.data or {}
        if data.get("reason") != "revision":
            self.bear(refused)
            return
        self.model.end_conflict(begin, version.object, data["revision"])

    def _version(self, draft: Draft, owner: str | None, session: str | None) -> Version:
        fields = dict(draft.fields)
        object: Object | None = None
        m: Any = None
        if draft.metadata is not None:
            raw, m = METADATA[draft.metadata]
            fields["metadata"] = Raw(raw)
        if session is not None:
            fields.setdefault("session", session)
        if owner is not None:
            fields["owner"] = owner
        if draft.key is not None:
            object = ("key", owner, draft.key)
            fields["key"] = draft.key
        elif draft.id is not None and owner in (None, POOL[draft.id]):
            object = ("id", draft.id)
            if POOL[draft.id] is not None:
                fields["owner"] = POOL[draft.id]
            elif owner is not None:
                object = None
        groups = [v.fields["group"] for v in self.model.versions.values() if v.group_mates and v.owner == owner]
        if draft.late is not None and groups and object is None:
            fields["group"] = groups[draft.late % len(groups)]
        if object is not None:
            fields.pop("created_at", None)
        return self.model.new_version(object, fields, draft.tier, m)

    def _sent(self, version: Version, draft: Draft) -> dict[str, Any]:
        sent = dict(version.fields)
        if version.tier is not None:
            sent["tier"] = version.tier
        if version.object[0] == "id":
            sent["id"] = version.object[1]
        elif version.object[0] == "key" and draft.known:
            same = [v.id for v in self.model.versions.values() if v.object == version.object and v.id is not None]
            if same:
                sent["id"] = same[-1]
        return sent

    async def _read(self, read: Read) -> None:
        selector = Selector(owner=read.owner, where=read.where, key_prefix=read.key_prefix, tier=read.tier)
        begin = self.model.tick()
        params: dict[str, Any] = {
            "owner": read.owner,
            "tier": read.tier,
            "where": read.where or None,
            "key_prefix": read.key_prefix,
            "limit": read.limit,
            "embeddings": read.embeddings,
        }
        if read.method == "timeline":
            try:
                shown = await self.shown("timeline", **params)
            except Unheard:
                return
            except A2MError as refused:
                self.bear(refused)
                return
            self.model.end_timeline(
                begin, selector, shown.records, embeddings=read.embeddings, limit=read.limit, excused=shown.excused
            )
            return
        vector = read.embedding if any("embedding" in v.fields for v in self.model.versions.values()) else None
        try:
            shown = await self.shown("recall", **params, query=read.query, embedding=vector)
        except Unheard:
            self.model.leave_recall()
            return
        except A2MError as refused:
            self.bear(refused)
            return
        if vector is not None:
            # a record without a vector need not be found by one
            selector = msgspec.structs.replace(selector, uncertain=True)
        limit = (read.limit or 8) - shown.pages
        self.model.end_recall(
            begin, selector, shown.records, embeddings=read.embeddings, limit=limit, excused=shown.excused
        )

    async def _promote(self, promote: Promote) -> None:
        ids = self._ids(promote.which)
        begun = self.model.begin_promote(ids, adds=promote.salience is not None)
        params = {"tier": promote.tier, "owner": promote.owner, "salience": promote.salience}
        if await self._moved("promote", ids=ids, **params):
            self.model.end_promote(begun)

    async def _forget(self, forget: Forget) -> None:
        ids = None if forget.which is None else self._ids(forget.which)
        selector = Selector(
            owner=forget.owner,
            ids=ids,
            where=forget.where,
            key_prefix=forget.key_prefix,
            tier=forget.tier,
            query=forget.query,
        )
        begin = self.model.begin_forget(selector)
        try:
            answer = await self._raw(
                "forget",
                ids=ids,
                owner=forget.owner,
                where=forget.where or None,
                tier=forget.tier,
                key_prefix=forget.key_prefix,
                query=forget.query,
            )
        except Unheard:
            self.model.leave_forget(begin, selector)
            return
        except A2MError as refused:
            self.model.refuse_forget(begin, selector)
            self.bear(refused)
            return
        self.model.end_forget(begin, selector, msgspec.json.decode(answer, type=_Forgotten).forgotten)

    def _ids(self, which: Sequence[int]) -> tuple[str, ...]:
        known = self.model.known_ids()
        return tuple(dict.fromkeys(known[number % len(known)] for number in which)) if known else ("nobody",)

    async def _moved(self, method: str, **params: Any) -> bool:
        """Make a call that moves records, again as long as a pending write blocks the move, as the answer says to do.

        Return whether the call was made.
        """
        while True:
            try:
                await self._raw(method, **params)
            except A2MError as refused:
                if "has pending writes" not in refused.message or "retry_after" not in (refused.data or {}):
                    raise
            else:
                return True

    async def _raw(self, method: str, **params: Any) -> bytes:
        given = {name: value for name, value in params.items() if value is not None}
        return await self.fed.raw(method, msgspec.json.encode(given))

    async def _records(self, method: str, **params: Any) -> list[Record]:
        return msgspec.json.decode(await self._raw(method, **params), type=_Records).records


async def run_history(
    history: History,
    finish: Callable[[Run], Awaitable[None]] | None = None,
    servers: Mix = ALL_NATIVE,
    *,
    text: str = FOUR_TIERS,
    kind: type[Run] = Run,
) -> None:
    """Run a history; check every answer when it comes, and everything at the end.

    Args:
        text: the federation's file: the four tiers, and perhaps mounts.
    """
    settings = settings_of(text, policy="background" if history.background else "explicit")
    clock = Clock()
    async with trial(settings, servers=servers, weather=restless(history.seed), clock=clock) as fed:
        run = kind(fed, clock)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.watch)
            await at_once(*(partial(run.client, operations) for operations in history.clients))
            run.done = True
        await fed.settled()
        await check_the_end(run)
        if finish is not None:
            await finish(run)


async def check_the_end(run: Run) -> None:
    """Check an idle federation: every written record is there once, and model, catalog and tiers agree."""
    records = await run.everything()
    run.model.check_the_end(records)
    assert_nothing_under_way(run.fed)
    check_the_tiers(run, records)


def check_the_tiers(run: Run, records: Sequence[Record]) -> None:
    """Assert that each tier holds the records whose home it is, as they were written, and no others. `records`: all."""
    fed = run.fed
    copies = stored(fed)
    assert {id: [tier for tier, _ in held] for id, held in copies.items()} == {r.id: [r.tier] for r in records}
    for record in records:
        [(_, copy)] = copies[record.id]
        version = run.model.version_of(record)
        assert run.model.unlike(copy, version, embeddings=True) is None
        assert copy.created_at == record.created_at
        assert (copy.revision or 0) == (record.revision or 0)
    real = {tier: sum(record.tier == tier for record in records) for tier in TIERS}
    assert fed.federation.catalog.queries.counts(Scope()) == real


class _Ids(msgspec.Struct):
    ids: list[str]


class _Forgotten(msgspec.Struct):
    forgotten: int


class _Fetched(msgspec.Struct):
    record: Record | None


class _Records(msgspec.Struct):
    records: list[Record]
