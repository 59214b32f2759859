"""memory/recall, memory/timeline and memory/fetch: one memory out of several (§4.3, §4.4, §4.9).

A recall asks every tier in question at once and fuses their rankings; a timeline and a fetch know from the catalog
which records they want, and read them where they live. A copy that is not in its record's home is never shown.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from typing import Final, TypeVar

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, former, is_as_it_is
from a2m_router.catalog.readers import Reading
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.config.settings import Settings, Tier
from a2m_router.methods.asking import CROWDED, Asking, Question
from a2m_router.methods.drafting import embedding_mismatch
from a2m_router.methods.selecting import Filter, changing, read_where, tiers_in_question, unanswered, untrue
from a2m_router.process.repeats import Repeats
from a2m_router.protocol.wire.errors import CALLERS_ERRORS, A2MError, invalid_params, quota
from a2m_router.protocol.wire.messages import Fetch, Pages, Recall, Timeline
from a2m_router.protocol.wire.records import Record, record_of
from a2m_router.protocol.wire.timestamps import parse, render
from a2m_router.protocol.wire.vectors import similarity
from a2m_router.ranking.fusion import POOL_WEIGHT, Ranking, by_similarity, lexical, reciprocal_rank
from a2m_router.ranking.text import query_tokens
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.together import Failure, failures_in, outcomes

log = logging.getLogger(__name__)

# Candidates beyond the caller's limit are asked for up to this many.
_MOST_CANDIDATES: Final = 1000

# A recall by what only the catalog knows names the records to the tiers: at most so many.
_MOST_IDS: Final = 10_000

# Records in a page, where the caller gives no number.
_PAGE: Final = 1000

# A fetch whose record is gone when it is read looks again: there may be another one at its key by now, or nobody's. So
# does a timeline with a limit of which too little is left: others come into it.
_LOOKS: Final = 3

# How often a read begins anew because a group has given way to its summary meanwhile.
_MOST_REWRITES: Final = 50

T = TypeVar("T")


class Degraded(msgspec.Struct, frozen=True):
    """A tier that an answer had to do without, and why."""

    tier: str
    reason: str

    def error(self) -> A2MError:
        """What a call is refused with that cannot do without it."""
        return unanswered(self.tier, self.reason, 1.0)


class Former(Degraded, frozen=True):
    """A tier that has answered, but some records not as they are by the account; these are not shown."""

    def error(self) -> A2MError:
        """As of any other, but that the tier has answered."""
        return untrue(self.tier, self.reason)


class Records(msgspec.Struct, omit_defaults=True):
    """The answer to a read: its records, the tiers that did not answer, and the text that was asked for (§4.16)."""

    records: list[Record]
    degraded: list[Degraded] | None = None
    prompt: str | None = None
    prompt_ids: list[str] | None = None


class Page(msgspec.Struct):
    """A page of a walk over everything; `next` is what to give as `after`, None at the end."""

    records: list[Record]
    next: str | None


class Fetched(msgspec.Struct):
    """The answer to a fetch."""

    record: Record | None


class Readings:
    """Carries out reads.

    Args:
        clock: the time, in milliseconds since 1970.
        earned: called when a recall has made a record due for promotion.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        copies: Copies,
        asking: Asking,
        mounts: Mounts,
        clock: Callable[[], int],
        earned: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies
        self._asking = asking
        self._mounts = mounts
        self._clock = clock
        self._earned = earned
        self._repeats = Repeats(log)

    async def best(self, params: Recall, scope: Scope) -> Records:
        """The best records for a query, a vector, or both; by recency without either (§4.3); not yet counted."""
        return await self._undisturbed(partial(self._best_now, params, scope))

    def count(self, found: Records) -> None:
        """Count what a recall has found as accessed, as the answer then says. An answer is not refused because it
        cannot be counted."""
        ids = [record.id for record in found.records]
        try:
            if self._catalog.touch(ids, self._clock()):
                self._earned()
        except OSError as problem:
            self._repeats.say(logging.ERROR, f"accesses were not counted: {problem}")
        now = self._catalog.records.find(ids)
        for record in found.records:
            entry = now.get(record.id)
            if entry is not None and entry.accessed_at is not None:
                record.access_count, record.accessed_at = entry.access_count, render(entry.accessed_at)

    @contextmanager
    def dropping_gone(self, found: Records, scope: Scope) -> Iterator[None]:
        """To be entered right after the read, while what takes long makes a text of an answer: at the end what has been
        forgotten meanwhile, or has left the caller's sight, is taken out of it. Mounts keep no account.

        Raises INTERNAL_ERROR, reason "changing", if one of these is in its text.
        """
        before = self._catalog.records.find(record.id for record in found.records)
        yield
        still = _still(before.values(), self._catalog.records.find(before).values())
        seen = {entry.id for entry in still if self._catalog.queries.sees(scope, entry)}
        there = [
            record
            for record in found.records
            if record.id in seen or self._settings.tier(record.tier or "") in self._mounts
        ]
        kept = {record.id for record in there}
        if not kept.issuperset(found.prompt_ids or ()):
            raise changing("a record has been forgotten while the model wrote of it; try again", retry_after=0.0)
        found.records = there

    async def _undisturbed(self, look: Callable[[], Awaitable[T]]) -> T:
        """What a look finds during which no group gives way to its summary: it could meet neither of the two.

        Raises INTERNAL_ERROR, reason "changing", if that goes on all the time.
        """
        for _ in range(_MOST_REWRITES):
            rewrites = self._catalog.rewrites
            found = await look()
            if self._catalog.rewrites == rewrites:
                return found
        raise changing("groups are being rewritten faster than they can be read; try again")

    async def _best_now(self, params: Recall, scope: Scope) -> Records:
        limit = self._limit(params.limit)
        where = read_where(params.where)
        in_question = tiers_in_question(params.tier, where, self._settings)
        self._check_vector(params.embedding, in_question)
        terms = query_tokens(params.query or "")
        question = self._question(params, where, limit, terms, scope, in_question)
        barred = self._asking.barred(question)
        for tier in in_question:
            if tier.name in barred and (tier.required or len(barred) == len(in_question)):
                raise barred[tier.name].error
        tiers = [tier for tier in in_question if tier.name not in barred]
        with self._catalog.readers.reading() as read:
            question = self._as_of(question, tiers, read)
            unaccounted = self._asking.unaccounted(tiers)
            lists, degraded = self._answers(tiers, await outcomes(self._asking.recalls(question)))
            # from here on nothing is waited for: the catalog is as it is when the answer is complete
            self._asking.overlay(lists, question)
            shown, entries, differing = self._homes(tiers, lists, read, scope)
        if terms or params.embedding is not None:
            ranked = self._fused(params, shown, lists)
        else:
            newest = sorted(shown, key=lambda each: _age(shown[each], entries), reverse=True)
            ranked = [(id, 1 - place / (len(newest) + 1)) for place, id in enumerate(newest)]
        least = params.min_score
        best = [(id, score) for id, score in ranked if least is None or score >= least][:limit]
        records = [_as_answered(shown[id], entries.get(id), score, params.embeddings) for id, score in best]
        degraded += [*differing, *(Degraded(name, CROWDED) for name in question.crowded)]
        degraded += [Degraded(name, why.reason) for name, why in barred.items()]
        return Records(records, self._with_unaccounted(tiers, degraded, unaccounted))

    async def timeline(self, params: Timeline, scope: Scope) -> Records:
        """Records in the order of their creation; `limit` keeps the newest (§4.4)."""
        return await self._undisturbed(partial(self._timeline_now, params, scope))

    async def _timeline_now(self, params: Timeline, scope: Scope) -> Records:
        where = read_where(params.where)
        tiers = tiers_in_question(params.tier, where, self._settings)
        if params.limit == 0:
            raise invalid_params("limit", "expected 1 or more; leave it out for no limit")
        limit = params.limit
        question = Question(
            tiers=tiers,
            scope=scope,
            where=where,
            key_prefix=params.key_prefix,
            limit=limit or 0,
            embeddings=params.embeddings,
        )
        with self._catalog.readers.reading() as read:
            unaccounted = self._asking.unaccounted(tiers)
            look = self._matching(question, read) if where.rest else self._known_and_mounted(question)
            placed, degraded = await look
        placed.sort(key=itemgetter(0))
        records = [record for _, record in placed]
        missing = self._with_unaccounted(tiers, degraded, unaccounted)
        return Records(records[-limit:] if limit is not None else records, missing)

    async def _known_and_mounted(self, question: Question) -> "_Part":
        """A timeline by what the catalog knows; mounts, which it does not know, answer for themselves."""
        mounted = [tier for tier in question.tiers if tier in self._mounts]
        looks = [partial(self._known, question)]
        if mounted:
            looks.append(partial(self._mounted, question, mounted))
        found: list[_Part | Failure] = await outcomes(looks)
        for failure in failures_in(found):
            raise failure
        parts = [part for part in found if isinstance(part, tuple)]
        degraded = [down for _, silent in parts for down in silent]
        self._refuse_if_nothing(question.tiers, degraded)
        return [each for placed, _ in parts for each in placed], degraded

    async def _known(self, question: Question) -> "_Part":
        """The newest of a timeline in the catalog, read where they live."""
        tiers = [tier for tier in question.tiers if tier not in self._mounts]
        selection = question.selection()
        limit = question.limit or None
        for look in range(_LOOKS):
            newest = self._catalog.queries.newest(selection, limit)
            found, silent = await self._read(newest, tiers, question.scope, embeddings=question.embeddings)
            if look and silent:
                missing = silent  # the look before has heard more, and may lack what only these could tell
                break
            entries, records, missing = newest, found, silent
            if limit is None or missing or len(self._still_meant(entries, selection)) == len(entries):
                break
        meant = self._still_meant(entries, selection)
        placed = [((entry.created_at, entry.seq), records[entry.id]) for entry in meant if entry.id in records]
        return placed, missing

    def _still_meant(self, entries: Sequence[Entry], selection: Selection) -> list[Entry]:
        """Those of the entries that are there still, as they are now, and still are what was asked for: one that has
        been replaced meanwhile may have another session; and one that has moved may have left the tiers in question, or
        the caller's sight."""
        return _still(entries, self._catalog.queries.among([entry.id for entry in entries], selection))

    async def _mounted(self, question: Question, tiers: Sequence[Tier]) -> "_Part":
        """What mounts have of a timeline."""
        found = await outcomes(self._asking.listings(msgspec.structs.replace(question, tiers=tiers)))
        there = [record for records in found if isinstance(records, list) for record in records]
        managed = self._catalog.records.find(record.id for record in there)
        shown = [_as_mounted(record, None, question.embeddings) for record in there if record.id not in managed]
        return [(_age(record, {}), record) for record in shown], _silent(tiers, found)

    async def _matching(self, question: Question, read: Reading) -> "_Part":
        """A timeline by what only the records themselves can tell."""
        found = await outcomes(self._asking.listings(question))
        lists, degraded = self._answers(question.tiers, found)
        self._asking.overlay(lists, question)
        shown, now, differing = self._homes(question.tiers, lists, read, question.scope)
        meant = {entry.id for entry in self._catalog.queries.among(now, question.selection())}
        records = [
            _as_answered(record, now.get(id), None, question.embeddings)
            for id, record in shown.items()
            if id in meant or id not in now
        ]
        return [(_age(record, now), record) for record in records], [*degraded, *differing]

    async def page(self, params: Pages, scope: Scope) -> Page:
        """The next page of all that `scope` sees in managed tiers, in the order of writing; it may be empty before the
        end.

        An extension, for those who want everything without holding it at once. A tier that does not answer is an error,
        so that what has been walked to its end was whole; so is a `where` that only tiers could answer. A group that
        gives way to its summary behind the walk is met as both.
        """
        return await self._undisturbed(partial(self._page_now, params, scope))

    async def _page_now(self, params: Pages, scope: Scope) -> Page:
        where = read_where(params.where)
        if where.rest:
            raise invalid_params(
                "where", "expected only fields that the router knows itself, where `page` or `after` is"
            )
        if params.limit is not None:
            raise invalid_params("limit", "expected none where `page` or `after` is: `page` is the number of records")
        if params.page == 0:
            raise invalid_params("page", "expected 1 or more; leave it out for the default")
        tiers = [tier for tier in tiers_in_question(params.tier, where, self._settings) if tier not in self._mounts]
        self._asking.refuse_unaccounted(tiers)
        selection = Selection(
            tiers=[tier.name for tier in tiers], scope=scope, where=where.known, key_prefix=params.key_prefix
        )
        size = min(params.page or _PAGE, _MOST_IDS)
        with self._catalog.readers.reading():
            there, place = self._catalog.queries.walk(selection, self._place(params.after), size)
            records, missing = await self._read(there, tiers, scope, embeddings=params.embeddings)
            meant = self._still_meant(there, selection)
        for down in missing:
            raise down.error()
        for entry in meant:
            if entry.id not in records:
                raise _lost(entry)
        ordered = sorted(meant, key=lambda entry: entry.created_at)
        return Page([records[e.id] for e in ordered], None if place is None else self._catalog.lineage.cursor(place))

    async def fetch(self, params: Fetch, scope: Scope) -> Fetched:
        """The caller's record at a key, else the ownerless one, else none (§4.9).

        Raises INTERNAL_ERROR if a tier must be read that does not answer, or if there may be a better record than what
        would be answered, since a tier is not accounted for.
        """
        if params.key == "":
            raise invalid_params("key", "expected a string that is not empty")
        with self._catalog.readers.reading():
            for _ in range(_LOOKS):
                entry = self._catalog.records.by_key(scope.owner, params.key) or self._catalog.records.by_key(
                    None, params.key
                )
                if entry is None or entry.owner != scope.owner:
                    self._asking.refuse_unaccounted(self._settings.managed)
                if entry is None:
                    return Fetched(None)
                records, missing = await self._read(
                    [entry], self._settings.managed, scope, embeddings=params.embeddings
                )
                for down in missing:
                    raise down.error()
                if entry.id in records:
                    return Fetched(records[entry.id])
        assert entry is not None
        if not _still([entry], self._catalog.records.find([entry.id]).values()):
            raise changing("the record at the key is being forgotten and written anew all the time; try again")
        raise _lost(entry)

    def _place(self, after: str | None) -> int:
        """Where a walk goes on. Raises INVALID_PARAMS for what this router has not given out, as far as its catalog
        knows."""
        place = 0 if after is None else self._catalog.lineage.place(after)
        if place is None:
            raise invalid_params("after", "expected what an earlier answer of this router gave as `next`; begin anew")
        return place

    # --- recall, step by step

    def _limit(self, limit: int | None) -> int:
        most = self._settings.recall.max_limit
        if limit is None:
            return self._settings.recall.limit
        if limit == 0:
            raise invalid_params(
                "limit", f"expected 1 to {most:,}; this server has a max_recall_limit, so 0 means nothing"
            )
        if limit > most:
            raise quota("limit", most, limit, "records")
        return limit

    def _check_vector(self, embedding: Sequence[float] | None, tiers: Sequence[Tier]) -> None:
        """Raises INVALID_PARAMS for what is no vector; EMBEDDING_MISMATCH for one of another width than the vectors
        that are kept, unless only mounts are in question, of which each has a width of its own."""
        width = self._catalog.vectors.dimensions() if any(tier not in self._mounts for tier in tiers) else None
        if embedding is None:
            return
        if not embedding:
            raise invalid_params("embedding", "expected at least one number")
        if width is not None and len(embedding) != width:
            raise embedding_mismatch("embedding", width, len(embedding))

    def _question(
        self,
        params: Recall,
        where: Filter,
        limit: int,
        terms: Sequence[str],
        scope: Scope,
        tiers: Sequence[Tier],
    ) -> Question:
        """What every tier is asked: more than the limit, since fusion chooses."""
        return Question(
            tiers=tiers,
            scope=scope,
            where=where,
            key_prefix=params.key_prefix,
            query=params.query if terms else None,
            embedding=params.embedding,
            limit=min(limit * self._settings.recall.candidates, max(limit, _MOST_CANDIDATES)),
            wanted=limit,
            embeddings=params.embeddings,
        )

    def _as_of(self, question: Question, tiers: Sequence[Tier], read: Reading) -> Question:
        """The question as it is put to some of its tiers within a read."""
        question = msgspec.structs.replace(question, tiers=tiers, read=read)
        if not question.where.needs_catalog:
            return question
        ids = self._catalog.queries.ids(question.selection())
        if len(ids) > _MOST_IDS:
            raise quota("where", _MOST_IDS, len(ids), "records that match what only the router counts")
        return msgspec.structs.replace(question, ids=ids)

    def _answers(
        self, tiers: Sequence[Tier], found: Sequence[list[Record] | Failure]
    ) -> tuple[dict[str, list[Record]], list[Degraded]]:
        lists = {tier.name: got for tier, got in zip(tiers, found, strict=True) if isinstance(got, list)}
        if not lists:
            # a width that was fixed only just now, a limit of the tier's own: what the caller can mend
            for failure in found:
                if isinstance(failure, A2MError) and failure.code in CALLERS_ERRORS:
                    raise failure
        degraded = _silent(tiers, found)
        self._refuse_if_nothing(tiers, degraded)
        return lists, degraded

    def _refuse_if_nothing(self, tiers: Sequence[Tier], degraded: Sequence[Degraded]) -> None:
        """No answer at all without a required tier, or when none of those asked has answered."""
        required = {tier.name for tier in tiers if tier.required}
        silent = [down for down in degraded if not isinstance(down, Former)]
        for down in silent:
            if down.tier in required or len(tiers) <= len(silent):
                raise down.error()

    def _with_unaccounted(
        self, tiers: Sequence[Tier], degraded: Sequence[Degraded], before: Mapping[str, str]
    ) -> list[Degraded] | None:
        """The tiers that an answer had to do without, and those that held what was not accounted for, `before` it was
        looked for or since."""
        silent = {down.tier for down in degraded}
        unaccounted = {**before, **self._asking.unaccounted(tiers)}
        return [*degraded, *(Degraded(*each) for each in unaccounted.items() if each[0] not in silent)] or None

    def _homes(
        self, tiers: Sequence[Tier], lists: dict[str, list[Record]], read: Reading, scope: Scope
    ) -> tuple[dict[str, Record], dict[str, Entry], list[Degraded]]:
        """What may be shown, one copy a record, and the entries of what is not a mount's; the rest is struck from the
        lists. With it the tiers that answer records in another state than they are in.

        What has left the tiers in question meanwhile is not shown as if it were still there.
        """
        asked = {tier.name for tier in tiers}
        entries = self._catalog.records.find(_ids_in(lists))
        is_acceptable = self._asking.acceptable(read, entries.values())
        shown: dict[str, Record] = {}
        degraded: list[Degraded] = []
        for tier, records in lists.items():
            kept, differing = [], []
            mounted = self._settings.tier(tier) in self._mounts
            for record in records:
                entry = entries.get(record.id)
                if mounted and entry is None:
                    shown[record.id] = record
                    kept.append(record)
                if mounted or entry is None or record.id in shown or not self._catalog.queries.sees(scope, entry):
                    continue
                if entry.home not in asked:
                    continue
                if is_acceptable(entry, tier):
                    if not is_as_it_is(record, entry):
                        differing.append(record.id)
                        continue
                    shown[record.id] = record
                    kept.append(record)
            lists[tier] = kept
            if differing:
                degraded.append(Former(tier, former(differing)))
        return shown, entries, degraded

    def _fused(
        self, params: Recall, shown: dict[str, Record], lists: dict[str, list[Record]]
    ) -> list[tuple[str, float]]:
        settings = self._settings.recall
        rankings = []
        if "tier" in settings.rankings:
            rankings += [
                Ranking([record.id for record in records], self._settings.tier(tier).weight)
                for tier, records in lists.items()
            ]
        if "lexical" in settings.rankings and params.query:
            texts = {id: record.content for id, record in shown.items()}
            rankings.append(Ranking(lexical(params.query, texts), POOL_WEIGHT))
        if "vector" in settings.rankings and params.embedding is not None:
            rankings.append(Ranking(by_similarity(self._similarities(params.embedding, shown)), POOL_WEIGHT))
        fused = reciprocal_rank(rankings, settings.k)
        # what none of the chosen rankings places is still an answer, behind what they place
        placed = {id for id, _ in fused}
        last = fused[-1][1] if fused else 1.0
        rest = [id for id in shown if id not in placed]
        return fused + [(id, last / (place + 2)) for place, id in enumerate(rest)]

    def _similarities(self, embedding: Sequence[float], shown: dict[str, Record]) -> dict[str, float]:
        """One scale for all: as the store says it, which is exact, or computed from the vector it sent."""
        found = {}
        for id, record in shown.items():
            if record.similarity is not None:
                found[id] = record.similarity
            elif record.embedding is not None and len(record.embedding) == len(embedding):
                found[id] = similarity(embedding, record.embedding, self._catalog.vectors.metric())
        return found

    # --- what is read by id

    async def _read(
        self, entries: Sequence[Entry], tiers: Sequence[Tier], scope: Scope, *, embeddings: bool
    ) -> tuple[dict[str, Record], list[Degraded]]:
        """The records of `entries`, as they have just been looked up, read at their homes; those that have moved on
        meanwhile are followed once. To be called within a read.

        What has left the tiers in question meanwhile, or the caller's sight, is not shown; nor is what was written anew
        under an id.
        """
        asked = {tier.name for tier in tiers}
        found: dict[str, Record] = {}
        degraded: dict[str, Degraded] = {}
        wanted = list(entries)
        differing: dict[str, str] = {}  # ids, and which tier holds them in another state
        for _ in range(2):
            differing.clear()
            homes: dict[str, list[str]] = {}
            late = self._catalog.redo.behind(entry.id for entry in wanted)
            for entry in wanted:
                if entry.id not in late:
                    homes.setdefault(entry.home, []).append(entry.id)
            copies = await outcomes(
                [partial(self._copies.read, home, ids, embeddings=embeddings) for home, ids in homes.items()]
            )
            now = {
                entry.id: entry
                for entry in _still(wanted, self._catalog.records.find(entry.id for entry in wanted).values())
                if entry.home in asked and self._catalog.queries.sees(scope, entry)
            }
            # what a tier has not caught up with is as it stands here
            for id, draft in self._catalog.redo.drafts(now).items():
                found[id] = _laid_over(record_of(draft), now[id], None, embeddings)
            for home, answer in zip(homes, copies, strict=True):
                if not isinstance(answer, dict):
                    degraded[home] = Degraded(home, reason_of(answer))
                    continue
                try:
                    self._asking.check_riders(home, answer.values(), now)
                except TierDown as untrusted:
                    degraded[home] = Degraded(home, untrusted.reason)
                    continue
                for id, record in answer.items():
                    # it may have moved since, and what it left behind stays until the read has ended
                    if id in now and id not in found:
                        if not is_as_it_is(record, now[id]):
                            differing[id] = home
                            continue
                        found[id] = _laid_over(record, now[id], None, embeddings)
            wanted = [now[e.id] for e in wanted if e.id in now and e.id not in found and now[e.id].home not in degraded]
            if not wanted:
                break
        for entry in wanted:
            if entry.id not in differing:
                log.error("%s does not hold %r, which should live there", entry.home, entry.id)
        for home in dict.fromkeys(differing.values()):
            degraded[home] = Former(home, former([id for id, holder in differing.items() if holder == home]))
        return found, list(degraded.values())


# Records with their places in a timeline (when each was created, then in which order it was written), and the tiers
# that did not answer.
_Part = tuple[list[tuple[tuple[int, int], Record]], list[Degraded]]


def _still(then: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """Those of the records that are there still, as they are now; not others, written under their ids since."""
    numbers = {entry.id: entry.seq for entry in then}
    return [entry for entry in now if entry.seq == numbers[entry.id]]


def _ids_in(lists: Mapping[str, Sequence[Record]]) -> set[str]:
    return {record.id for records in lists.values() for record in records}


def _age(record: Record, entries: Mapping[str, Entry]) -> tuple[int, int]:
    entry = entries.get(record.id)
    return (parse(record.created_at), 0) if entry is None else (entry.created_at, entry.seq)


def _lost(entry: Entry) -> A2MError:
    return untrue(entry.home, f"it has lost the record {entry.id!r}; write it anew as it was, or forget it by its id")


def _silent(tiers: Sequence[Tier], found: Sequence[object]) -> list[Degraded]:
    """The tiers that did not answer."""
    return [
        Degraded(tier.name, reason_of(failure))
        for tier, failure in zip(tiers, found, strict=True)
        if not isinstance(failure, list)
    ]


def reason_of(failure: object) -> str:
    """Why a tier did not answer, for `degraded`."""
    return failure.reason if isinstance(failure, TierDown) else str(failure)


def _as_answered(record: Record, entry: Entry | None, score: float | None, embeddings: bool) -> Record:
    """A record as it is answered; what has no entry is a mount's."""
    if entry is None:
        return _as_mounted(record, score, embeddings)
    return _laid_over(record, entry, score, embeddings)


def _as_mounted(record: Record, score: float | None, embeddings: bool) -> Record:
    """A mount's record as it is answered."""
    embedding = record.embedding if embeddings else None
    return msgspec.structs.replace(record, embedding=embedding, similarity=None, score=score)


def _laid_over(record: Record, entry: Entry, score: float | None, embeddings: bool) -> Record:
    """The record with what the router keeps account of: where it lives and what it has earned.

    Its revision is the tier's word: it belongs to the content, which may have been replaced since it was read.
    """
    return msgspec.structs.replace(
        record,
        tier=entry.home,
        salience=entry.salience,
        access_count=entry.access_count,
        accessed_at=None if entry.accessed_at is None else render(entry.accessed_at),
        revision=None if entry.key is None else record.revision or 0,
        embedding=record.embedding if embeddings else None,
        similarity=None,
        score=score,
    )
