"""What one tier is asked, and how its answer is brought to what was meant.

- A native tier applies everything itself. A lifted one is told little, so that what it answers is looked through once
  more: by the catalog, and by what only the records themselves can tell. Where that leaves too little, it is asked for
  more; where the catalog knows that only a few records are meant, their ids go along. So they do where its server was
  seen to hold another federation's records, too.
- A mount answers for itself, and its records are shown under the mount's name.
- A record that has been replaced, and whose tier has not caught up, is as the catalog says, whatever its tier answers.

A question is prepared for all tiers in one step that does not wait, so that a record on its way from one to the other
is looked for where it was.
"""

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.readers import Reading
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.config.settings import Tier
from a2m_router.methods.selecting import Filter, owner_for, unaccounted, unanswered
from a2m_router.protocol.wire.equality import NULL, text_of
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.messages import Recall, Timeline
from a2m_router.protocol.wire.records import Record, record_of
from a2m_router.protocol.wire.timestamps import parse
from a2m_router.ranking.fusion import Ranking, lexical, reciprocal_rank
from a2m_router.storage.nearest import MAX_NEAREST
from a2m_router.tiers.answers import Untrusted
from a2m_router.tiers.copies import Copies, raw_json
from a2m_router.tiers.lifting import delegable
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.together import failures_in, outcomes

# How many times more a tier is asked for when too little of its answer may be shown.
_MORE: Final = 8

# A tier is asked for at most so many candidates.
_MOST: Final = 10_000

# Where no more records than this are meant, a lifted tier is told which.
_FEW: Final = 1000

# What a tier without a limit of its own is asked to tell at most by a query that is to be forgotten.
_MOST_MATCHES: Final = 4096

# What no record of a mount has: it belongs to nobody, to no conversation, and has earned nothing.
_NOT_IN_MOUNTS: Final = ("owner", "session", "key", "revision", "salience", "access_count", "accessed_at")

# A record that is told without its vector does not show whether it has one.
_EMBEDDING: Final = "embedding"

# Why a tier may have what is better than what it told.
CROWDED: Final = (
    "its server holds another federation's records too, which fill its answers, so that some of this one's may be "
    "missing; give each federation a server of its own"
)

# Why a mount is not asked by a vector; where there are words, it is asked by these.
NO_VECTORS: Final = "it cannot search by a vector, and there are no words to ask it by"
OTHER_WIDTH: Final = "its vectors have another width than the one given, and there are no words to ask it by"

Ask = Callable[[], Awaitable[list[Record]]]

# The first ids, so many, of what a question means in a tier.
_Order = Callable[["Question", Tier, int], list[str]]


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of some tiers at once, for one caller.

    Args:
        query: None for no words.
        limit: candidates that each tier is asked for.
        wanted: of these, so many have to be what is meant; else it is asked for more.
        read: what is written since it began is not meant, and of a record the copy that it accepts stands for it; None
            if that does not matter.
        ids: the records that are meant, where no tier could tell by itself.
        crowded: the tiers of which another federation's records have filled the answers; they are put in as they
            answer.
    """

    tiers: Sequence[Tier]
    scope: Scope
    where: Filter
    key_prefix: str | None = None
    query: str | None = None
    embedding: list[float] | None = None
    limit: int = 1
    wanted: int = 1
    read: Reading | None = None
    embeddings: bool = False
    ids: Sequence[str] | None = None
    crowded: set[str] = msgspec.field(default_factory=set)

    def selection(self, tiers: Sequence[Tier] | None = None) -> Selection:
        """What of it the catalog can tell."""
        names = [tier.name for tier in (self.tiers if tiers is None else tiers)]
        return Selection(tiers=names, scope=self.scope, where=self.where.known, key_prefix=self.key_prefix)

    def may_mean(self, entry: Entry) -> bool:
        """Whether the record was there when this was asked."""
        return self.read is None or entry.seq <= self.read.newest

    @property
    def is_narrow(self) -> bool:
        """Whether it means less than all that a tier holds, as far as the catalog can tell."""
        return not self.scope.everyone or bool(self.where.known) or self.key_prefix is not None


class Barred(NamedTuple):
    """Why a tier cannot be asked a question: as one of several, and as an error where there is no answer without it."""

    reason: str
    error: A2MError


class _Found(NamedTuple):
    """What a tier's server was seen to find.

    Args:
        kept: of its answer, what is meant.
        is_enough: of these there are as many as are wanted.
        is_full: the answer has as many records as the server tells at once.
        is_all: the server finds no more.
        is_shared: some of the answer was another federation's.
    """

    kept: list[Record]
    is_enough: bool
    is_full: bool
    is_all: bool
    is_shared: bool


class Asking:
    """Asks the tiers of one federation."""

    def __init__(self, catalog: Catalog, copies: Copies, mounts: Mounts) -> None:
        self._catalog = catalog
        self._copies = copies
        self._mounts = mounts

    def recalls(self, question: Question) -> list[Ask]:
        """For each of the question's tiers, what gets its ranking; prepared now."""
        return [_prepared(self._recall, tier, question) for tier in question.tiers]

    def listings(self, question: Question) -> list[Ask]:
        """For each of the question's tiers, what gets all that it holds of what is meant; prepared now."""
        return [_prepared(self._listing, tier, question) for tier in question.tiers]

    def searches(self, question: Question) -> list[Ask]:
        """For each of the question's tiers, none of them a mount, what gets all that its query finds; prepared now.

        They raise QUOTA_EXCEEDED if that is more than a tier tells in one call.
        """
        return [_prepared(self._search, tier, question) for tier in question.tiers]

    def overlay(self, lists: dict[str, list[Record]], question: Question) -> None:
        """Put what has been replaced in place of what tiers that have not caught up answered; waits for nothing."""
        pending = self._pending(question.tiers)
        if not pending:
            return
        redone = self._catalog.redo.drafts(id for _, ids in pending for id in ids)
        for name, records in lists.items():
            lists[name] = [record for record in records if record.id not in redone]
        meant = [
            record
            for tier, ids in pending
            for record in self._keep(tier, question, [record_of(redone[id]) for id in ids])
        ]
        if question.query is not None:
            found = set(lexical(question.query, {record.id: record.content for record in meant}))
            meant = [r for r in meant if r.id in found or None not in (question.embedding, r.embedding)]
        elif question.embedding is not None:
            meant = [record for record in meant if record.embedding is not None]
        for tier, ids in pending:
            lists.setdefault(tier.name, []).extend(record for record in meant if record.id in ids)

    def acceptable(self, read: Reading, entries: Iterable[Entry]) -> Callable[[Entry, str], bool]:
        """Whether `read` may take what `overlay` has left of a record in a tier's list for the record; to be asked in
        the same breath."""
        behind = self._catalog.redo.behind(entry.id for entry in entries)
        accepts = self._catalog.readers.accepts
        return lambda entry, tier: tier == entry.home if entry.id in behind else accepts(read, entry, tier)

    def _pending(self, tiers: Iterable[Tier]) -> list[tuple[Tier, list[str]]]:
        """The tiers that do not hold something yet as it is, and its ids."""
        if not self._catalog.redo.is_open():
            return []
        pending = [(tier, self._catalog.redo.ids_in(tier.name)) for tier in tiers if tier not in self._mounts]
        return [(tier, ids) for tier, ids in pending if ids]

    def check_riders(self, tier: str, records: Iterable[Record], entries: Mapping[str, Entry]) -> None:
        """Raises Untrusted where a tier's server has returned one of its records without its rider."""
        for record in records:
            entry = entries.get(record.id)
            if entry is not None:
                self._copies.check_rider(tier, record, created_at=entry.created_at, owner=entry.owner, key=entry.key)

    # --- what nobody can tell yet

    def unaccounted(self, tiers: Sequence[Tier]) -> dict[str, str]:
        """Those of the tiers that may hold what nobody knows of, by their names, and why."""
        managed = [tier.name for tier in tiers if tier not in self._mounts]
        return {
            name: self._copies.why_unaccounted(name) for name in managed if not self._catalog.tiers.is_scanned(name)
        }

    def refuse_unaccounted(self, tiers: Sequence[Tier]) -> None:
        """Raises INTERNAL_ERROR if one of the tiers may hold what nobody knows of."""
        for name, why in self.unaccounted(tiers).items():
            raise unaccounted(name, why) if self._copies.link(name).status == "up" else unanswered(name, why, 1.0)

    # --- recalls

    def _recall(self, tier: Tier, question: Question) -> Ask:
        if tier in self._mounts:
            return partial(self._from_mount, tier, question)
        mode = self._copies.mode(tier.name)
        if mode.native:
            return partial(self._from_native, tier, question)
        if question.query is None and question.embedding is None:
            # a server's own times are those of its writes
            return self._in_order(tier, question, self._newest, _MOST)
        if question.embedding is None or mode.vectors:
            return self._by_its_own_ranking(tier, question)
        by_vector = self._in_order(tier, question, self._nearest, MAX_NEAREST)
        if question.query is None:
            return by_vector
        return partial(_blended, self._by_its_own_ranking(tier, question), by_vector)

    async def _from_native(self, tier: Tier, question: Question) -> list[Record]:
        profile = self._copies.link(tier.name).profile
        similar = profile is not None and profile.store.similarity
        where = question.where.sent
        asked = Recall(
            query=question.query,
            embedding=question.embedding,
            where=where if question.ids is None else {**(where or {}), "id": raw_json(question.ids)},
            owner=owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            embeddings=question.embeddings or (question.embedding is not None and not similar),
        )
        known = partial(self._known, tier, question)
        found = await self._enough(tier, asked, question, known)
        few = self._here(tier, question, _FEW) if found.is_full and not found.is_enough else None
        if few is None:
            return found.kept
        # what is not meant fills all that it tells at once; asked for a few ids at a time, it tells all that it finds
        return _one_ranking([known(part) async for part in self._copies.parts(tier.name, few, asked)])

    def _by_its_own_ranking(self, tier: Tier, question: Question) -> Ask:
        """What gets what a lifted tier's server ranks itself."""
        return partial(self._from_lifted, tier, question, self._few(tier, question))

    async def _from_lifted(self, tier: Tier, question: Question, few: Sequence[str] | None) -> list[Record]:
        if few == []:
            return []
        found = await self._among_few(tier, question, few)
        if found.is_enough:
            return found.kept
        if few is None and found.is_shared:
            return await self._among_others(tier, question, found)
        if few is None:
            few = self._here(tier, question, _FEW)
        return await self._in_parts(tier, question, few) if found.is_full and few is not None else found.kept

    async def _among_few(self, tier: Tier, question: Question, few: Sequence[str] | None) -> "_Found":
        asked = self._of_a_lifted_tier(tier, question)
        if few is not None:
            asked.where = {**(asked.where or {}), "id": raw_json(few)}
        return await self._enough(tier, asked, question, partial(self._keep, tier, question))

    async def _among_others(self, tier: Tier, question: Question, found: "_Found") -> list[Record]:
        """What is meant, at a server whose answer another federation's records have filled, or as good as: it is asked
        for the ids of ours, so many at a time. Only places count, as in `_in_parts`."""
        # an answer that is not full is all, unless the server tells fewer at once than it says
        ids = self._here(tier, question, _FEW if found.is_all else _MOST)
        if ids is None:
            if not found.is_all:
                question.crowded.add(tier.name)
            return found.kept
        parts = []
        for start in range(0, len(ids), _FEW):
            few = ids[start : start + _FEW]
            part = await self._among_few(tier, question, few)
            parts.append(await self._in_parts(tier, question, few) if part.is_full else part.kept)
        return _one_ranking(parts)[: question.limit]

    async def _in_parts(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """The ranking of a server that tells fewer records at once than are wanted: asked of a few ids at a time, it
        tells all that it finds. Only places count: scores of two calls are never compared (§5.3)."""
        asked = self._of_a_lifted_tier(tier, question)
        parts = [self._keep(tier, question, part) async for part in self._copies.parts(tier.name, ids, asked)]
        return _one_ranking(parts)[: question.limit]

    def _here(self, tier: Tier, question: Question, most: int) -> list[str] | None:
        """The ids of what is meant in a tier, now that it has answered; None if they are more than `most`."""
        here = self._catalog.queries.few(question.selection([tier]), most)
        return None if here is None else self._with_left(tier, question, here)

    def _with_left(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[str]:
        """The ids, and behind them those of what has moved on since the read began: it is in the list of no tier but
        this, where it still may be read."""
        left = [] if question.read is None else self._catalog.readers.left(question.read, tier.name)
        meant = [entry.id for entry in self._catalog.queries.among(left, question.selection())]
        return list(dict.fromkeys([*ids, *meant]))

    def _in_order(self, tier: Tier, question: Question, order: _Order, most: int) -> Ask:
        """What gets the records of a lifted tier in an order that the catalog knows; where it is asked for more, of
        `most` at most, what has moved on since the read began comes last."""
        asked = msgspec.structs.replace(self._of_a_lifted_tier(tier, question), query=None, embedding=None)
        begun = min(question.limit, most)
        prepared = order(question, tier, begun)

        async def ask() -> list[Record]:
            count, ids = begun, prepared
            is_all = len(ids) < count
            while True:
                found = {record.id: record for record in await self._copies.among(tier.name, ids, asked)}
                kept = self._keep(tier, question, [found[id] for id in ids if id in found])
                if is_all or self._standing(kept) >= question.wanted or count >= most:
                    return kept
                count = min(_MORE * count, most)
                here = order(question, tier, count)
                is_all = len(here) < count
                ids = self._with_left(tier, question, here)

        return ask

    def _newest(self, question: Question, tier: Tier, count: int) -> list[str]:
        return [entry.id for entry in reversed(self._catalog.queries.newest(question.selection([tier]), count))]

    def _nearest(self, question: Question, tier: Tier, count: int) -> list[str]:
        assert question.embedding is not None
        return self._catalog.queries.nearest(question.selection([tier]), question.embedding, count)

    async def _from_mount(self, tier: Tier, question: Question) -> list[Record]:
        where = _mounted(tier, question)
        if where is None:
            return []
        barred = self._why_no_vector(tier, question.embedding)
        if barred is not None and question.query is None:
            raise barred.error  # without both it would tell what is newest
        vector = question.embedding if barred is None else None
        asked = Recall(
            query=question.query,
            embedding=vector,
            where=where or None,
            embeddings=question.embeddings or vector is not None or _EMBEDDING in question.where.rest,
        )
        show = partial(self._show, tier, question)
        try:
            return (await self._enough(tier, asked, question, show)).kept
        except A2MError as refused:
            # its width may have been fixed since it told of it
            if refused.code != Code.EMBEDDING_MISMATCH or vector is None or question.query is None:
                raise
            return (await self._enough(tier, msgspec.structs.replace(asked, embedding=None), question, show)).kept

    def barred(self, question: Question) -> dict[str, Barred]:
        """Those of the question's tiers, by their names, that a recall can ask nothing: mounts that cannot use its
        vector, where it has no words for them. A mount that has nothing of what is meant is not among them."""
        if question.query is not None:
            return {}
        asked = [tier for tier in question.tiers if tier in self._mounts and _mounted(tier, question) is not None]
        reasons = {tier.name: self._why_no_vector(tier, question.embedding) for tier in asked}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    def _why_no_vector(self, tier: Tier, embedding: Sequence[float] | None) -> Barred | None:
        """Why a mount that is up cannot search by a vector; None where it can, or may be able to.

        By which metric it compares is no matter: of its answer only places count.
        """
        link = self._copies.link(tier.name)
        if embedding is None or link.status != "up" or link.profile is None:
            return None  # what it said before it went down need not hold any more
        if "embeddings" not in link.profile.capabilities:
            problem = f"{tier.name!r} cannot search by a vector; ask it in words, with a query"
            return Barred(NO_VECTORS, invalid_params("embedding", problem))
        width = link.profile.dimensions
        if width is None or width == len(embedding):
            return None
        problem = (
            f"embedding: the vectors of {tier.name!r} have {width} dimensions, this one has {len(embedding)}; ask it "
            "by one of that width, or in words, with a query"
        )
        return Barred(OTHER_WIDTH, A2MError(Code.EMBEDDING_MISMATCH, problem, {"tier": tier.name, "dimensions": width}))

    async def _enough(
        self, tier: Tier, asked: Recall, question: Question, keep: Callable[[list[Record]], list[Record]]
    ) -> "_Found":
        """What of a tier's candidates is kept. Where copies that are only waiting to be removed, or that are not meant,
        or another federation's records fill its answer, so that not even the wanted number is left, it is asked for
        more."""
        most = self._copies.recall_limit(tier.name, _MOST)
        limit = min(question.limit, most)
        while True:
            found = await self._copies.recall(tier.name, msgspec.structs.replace(asked, limit=limit))
            kept = keep(found.records)
            standing = self._standing(kept)
            if found.told < limit or standing >= min(question.wanted, limit) or limit == most:
                is_full = found.told >= limit == most
                return _Found(kept, standing >= question.wanted, is_full, found.is_all, found.is_shared)
            limit = min(_MORE * limit, most)

    def _standing(self, kept: Sequence[Record]) -> int:
        """How many of a tier's records its answer stands for: what has been replaced may not be meant any more."""
        return len(kept) - len(self._catalog.redo.behind(record.id for record in kept))

    # --- all that is meant

    def _listing(self, tier: Tier, question: Question) -> Ask:
        if tier in self._mounts:
            return partial(self._mounted_timeline, tier, question)
        if self._copies.mode(tier.name).native:
            return partial(self._native_timeline, tier, question)
        return partial(self._among, tier, question, self._catalog.queries.ids(question.selection([tier])))

    async def _native_timeline(self, tier: Tier, question: Question) -> list[Record]:
        asked = Timeline(
            where=question.where.sent,
            owner=owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            embeddings=question.embeddings,
        )
        return [record async for page in self._copies.pages(tier.name, asked) for record in page]

    async def _among(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """Those of `ids` that are meant. The server selects by no condition: what is listed or forgotten must not
        depend on how it does that."""
        asked = msgspec.structs.replace(self._of_a_lifted_tier(tier, question), where=None)
        return self._keep(tier, question, await self._copies.among(tier.name, ids, asked))

    async def _mounted_timeline(self, tier: Tier, question: Question) -> list[Record]:
        where = _mounted(tier, question)
        if where is None:
            return []
        # a `where` may be ignored there, and others' records are left out, so that a limit would be filled with what
        # is not meant
        limit = question.limit if tier.shared and not question.where.given else None
        asked = Timeline(
            where=where or None,
            limit=limit or None,
            embeddings=question.embeddings or _EMBEDDING in question.where.rest,
        )
        found: dict[str, Record] = {}  # a server may tell one twice
        async for page in self._copies.pages(tier.name, asked):
            found.update((record.id, record) for record in self._show(tier, question, page))
        return list(found.values())

    def _search(self, tier: Tier, question: Question) -> Ask:
        if self._copies.mode(tier.name).native:
            return partial(self._native_search, tier, question)
        return partial(self._lifted_search, tier, question, self._catalog.queries.ids(question.selection([tier])))

    async def _native_search(self, tier: Tier, question: Question) -> list[Record]:
        most = self._copies.recall_limit(tier.name, _MOST_MATCHES)
        asked = Recall(
            query=question.query,
            where=question.where.sent,
            owner=owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            limit=most,
        )
        found = await self._copies.recall(tier.name, asked)
        if not found.is_all:
            raise A2MError(
                Code.QUOTA_EXCEEDED,
                f"query: at least {found.told:,} records of {tier.name!r} match, more than one call can tell; "
                "narrow it by where or key_prefix, or forget in parts",
                {"tier": tier.name, "limit": most},
            )
        return found.records

    async def _lifted_search(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """What the query finds and shares a word with it: a server may rank all that it has, however far away."""
        found = await self._among(tier, question, ids)
        sharing = set(lexical(question.query or "", {record.id: record.content for record in found}))
        return [record for record in found if record.id in sharing]

    # --- what is meant

    def _of_a_lifted_tier(self, tier: Tier, question: Question) -> Recall:
        """What of a question a lifted tier's server is sent; the rest is applied to its answer."""
        where = delegable(question.where.given, metadata=self._catalog.tiers.shows_metadata(tier.name))
        return Recall(
            query=question.query,
            embedding=question.embedding,
            where=where or None,
            embeddings=question.embeddings or question.embedding is not None,
        )

    def _few(self, tier: Tier, question: Question) -> list[str] | None:
        """The ids that are meant in a lifted tier, where it is to be told them; None where all that its server has is
        meant, or too much to be told."""
        is_told = question.is_narrow or self._copies.is_shared(tier.name)
        return self._catalog.queries.few(question.selection([tier]), _FEW) if is_told else None

    def _known(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Those of a native tier's records that are meant: these live in the question's tiers now, in the caller's
        sight, and were there when it was asked. What else it says the tier has judged."""
        names = {tier.name for tier in question.tiers}
        entries = self._catalog.records.find(record.id for record in records)
        meant = {
            entry.id
            for entry in self._told_by(tier, entries.values(), question)
            if entry.home in names and question.may_mean(entry) and self._catalog.queries.sees(question.scope, entry)
        }
        return [record for record in records if record.id in meant]

    def _keep(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Those of a lifted tier's records that are meant."""
        entries = self._catalog.queries.among((record.id for record in records), question.selection())
        self.check_riders(tier.name, records, {entry.id: entry for entry in entries})
        meant = {entry.id for entry in self._told_by(tier, entries, question) if question.may_mean(entry)}
        return [record for record in records if record.id in meant and matches(record, question.where.rest)]

    def _told_by(self, tier: Tier, entries: Collection[Entry], question: Question) -> Iterable[Entry]:
        """Those that the tier's copies stand for: what a move has left behind is its new home's to tell."""
        if question.read is None:
            return entries
        is_acceptable = self.acceptable(question.read, entries)
        return [entry for entry in entries if is_acceptable(entry, tier.name)]

    def _show(self, tier: Tier, question: Question, records: Iterable[Record]) -> list[Record]:
        """Those of a mount's records that are meant, as they are shown."""
        shown = []
        profile = self._copies.link(tier.name).profile
        # by another metric it would be on another scale than the others' similarities; then the vector has to tell
        is_comparable = profile is not None and profile.metric == self._catalog.vectors.metric()
        for record in records:
            # one that the file does not call a mount is as private as the file says
            if not (tier.shared or question.scope.holds(record.owner)):
                continue
            try:
                parse(record.created_at)
            except ValueError as problem:
                raise Untrusted(
                    tier.name, f"answered a record {record.id!r} whose created_at is none: {problem}"
                ) from None
            each = Record(
                id=f"{tier.name}/{record.id}",
                content=record.content,
                created_at=record.created_at,
                role=record.role,
                metadata=record.metadata,
                group=record.group,
                # of one that the file calls a mount nobody is the owner; another is as private as the file says
                owner=None if tier.shared else record.owner,
                tier=tier.name,
                uri=record.uri,
                media_type=record.media_type,
                embedding=record.embedding,
                score=record.score,
                similarity=record.similarity if is_comparable else None,
            )
            if matches(each, question.where.known) and matches(each, question.where.rest):
                shown.append(each)
        return shown


def _prepared(prepare: Callable[[Tier, Question], Ask], tier: Tier, question: Question) -> Ask:
    """What asks one tier; that it cannot be asked is its answer."""
    try:
        return prepare(tier, question)
    except TierDown as down:
        failure = down

    async def fail() -> list[Record]:
        raise failure

    return fail


def _mounted(tier: Tier, question: Question) -> dict[str, Raw] | None:
    """The conditions that a mount is asked to apply first; None where none of its records can meet all of them."""
    where = question.where
    if question.key_prefix is not None:
        return None
    if any(NULL not in where.known[name] for name in _NOT_IN_MOUNTS if name in where.known):
        return None
    asked = delegable(where.given, metadata=True, mounted=True)
    if "id" in where.known:
        prefix = f"{tier.name}/"
        named = [text for text in map(text_of, where.known["id"]) if text is not None and text.startswith(prefix)]
        if not named:
            return None
        asked["id"] = raw_json([text.removeprefix(prefix) for text in named])
    return asked


async def _blended(by_words: Ask, by_vector: Ask) -> list[Record]:
    """One ranking out of two of the same tier."""
    found = await outcomes([by_words, by_vector])
    for failure in failures_in(found):
        raise failure
    return _one_ranking([records for records in found if isinstance(records, list)])


def _one_ranking(rankings: Sequence[Sequence[Record]]) -> list[Record]:
    records = {record.id: record for ranking in rankings for record in ranking}
    ranked = reciprocal_rank([Ranking([record.id for record in ranking]) for ranking in rankings])
    return [records[id] for id, _ in ranked]
