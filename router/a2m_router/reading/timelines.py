"""Timelines, pages and fetches (§4.4, §4.9): the catalog says which records are meant; they are read at their homes.

What only the records themselves can tell (content, metadata, `uri`, `media_type`) is asked of the tiers; mounts answer
for themselves.
"""

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Final, NamedTuple

import msgspec

from a2m_router.catalog.active_reads import Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Record
from a2m_router.reading.answers import (
    Answer,
    Degraded,
    age,
    as_answered,
    reason_of,
    refuse_if_nothing,
    with_unaccounted,
)
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import Homes, still, undisturbed
from a2m_router.reading.question import Question
from a2m_router.tiers.failures import changing, untrue
from a2m_router.tiers.gather import gather
from a2m_router.tiers.mounts import Mounts

# A fetch whose record is gone when it is read looks again: there may be another one at its key by now, or nobody's.
_LOOKS: Final = 3


class _Part(NamedTuple):
    """Records with their places in a timeline (when each was created, then in which order it was written), and the
    tiers that they had to do without."""

    placed: list[tuple[tuple[int, int], Record]]
    degraded: list[Degraded]


class Timelines:
    """Carries out timelines, and what else is read by id."""

    def __init__(self, catalog: Catalog, fan_out: FanOut, homes: Homes, mounts: Mounts) -> None:
        self._catalog = catalog
        self._fan_out = fan_out
        self._homes = homes
        self._mounts = mounts

    async def newest(self, question: Question) -> Answer:
        """The newest `limit` records, oldest first; all of them for a limit of 0.

        Raises A2MError if none of the tiers answers, or a required one does not.
        """
        return await undisturbed(self._catalog, partial(self._newest, question))

    async def _newest(self, question: Question) -> Answer:
        with self._catalog.reads.reading() as read:
            unaccounted = self._fan_out.unaccounted(question.tiers)
            look = self._matching(question, read) if question.where.rest else self._known_and_mounted(question)
            placed, degraded = await look
        placed.sort(key=itemgetter(0))
        records = [record for _, record in placed][-question.limit :]
        return Answer(records, with_unaccounted(degraded, {**unaccounted, **self._fan_out.unaccounted(question.tiers)}))

    async def _known_and_mounted(self, question: Question) -> _Part:
        """A timeline by what the catalog knows; mounts, which it does not know, answer for themselves."""
        mounted = [tier for tier in question.tiers if tier in self._mounts]
        selection = question.selection()
        newest = self._catalog.queries.newest(selection, question.limit or None)
        looks = [partial(self._known, question, newest)]
        if mounted:
            looks.append(partial(self._mounted, msgspec.structs.replace(question, tiers=mounted)))
        parts = await gather(looks)
        degraded = [down for part in parts for down in part.degraded]
        refuse_if_nothing(question.tiers, degraded)
        # what one part has found may have changed while the other was waited for
        gone = {entry.id for entry in newest} - {entry.id for entry in self._homes.still_meant(newest, selection)}
        placed = [each for part in parts for each in part.placed if each[1].id not in gone]
        return _Part(placed, degraded)

    async def _known(self, question: Question, newest: Sequence[Entry]) -> _Part:
        """The newest of a timeline in the catalog, read where they live."""
        tiers = [tier for tier in question.tiers if tier not in self._mounts]
        records, missing = await self._homes.read(newest, tiers, question.scope, embeddings=question.embeddings)
        there = [entry for entry in newest if entry.id in records]
        return _Part([((entry.created_at, entry.seq), records[entry.id]) for entry in there], missing)

    async def _mounted(self, question: Question) -> _Part:
        """What mounts have of a timeline."""
        answers = await self._fan_out.listings(question)
        there = [record for records in answers.lists.values() for record in records]
        managed = self._catalog.records.find(record.id for record in there)
        shown = [as_answered(record, None, question.embeddings) for record in there if record.id not in managed]
        silent = [Degraded(tier, reason_of(failure)) for tier, failure in answers.failures.items()]
        return _Part([(age(record, {}), record) for record in shown], silent)

    async def _matching(self, question: Question, read: Reading) -> _Part:
        """A timeline by what only the records themselves can tell."""
        answers = await self._fan_out.listings(question)
        missing = answers.missing(question.tiers)
        shown, now, differing = self._homes.shown(question, answers.lists, read)
        meant = {entry.id for entry in self._catalog.queries.among(now, question.selection())}
        records = [
            as_answered(record, now.get(id), question.embeddings)
            for id, record in shown.items()
            if id in meant or id not in now
        ]
        return _Part([(age(record, now), record) for record in records], [*missing, *differing])

    async def page(self, question: Question, place: int) -> tuple[list[Record], int | None]:
        """The next `limit` records of a walk over managed tiers, in the order of writing, oldest first; and the place
        where it goes on, None at the end. They may be none before the end.

        Raises INTERNAL_ERROR if a tier does not answer, or is not accounted for.
        """
        return await undisturbed(self._catalog, partial(self._page, question, place))

    async def _page(self, question: Question, place: int) -> tuple[list[Record], int | None]:
        self._fan_out.refuse_unaccounted(question.tiers)
        selection = question.selection()
        with self._catalog.reads.reading():
            there, next_place = self._catalog.queries.walk(selection, place, question.limit)
            records, missing = await self._homes.read(
                there, question.tiers, question.scope, embeddings=question.embeddings
            )
            meant = self._homes.still_meant(there, selection)
        for down in missing:
            raise down.error()
        for entry in meant:
            if entry.id not in records:
                raise _lost(entry)
        return [records[entry.id] for entry in sorted(meant, key=lambda entry: entry.created_at)], next_place

    async def fetch(self, key: str, tiers: Sequence[Tier], scope: Scope, *, embeddings: bool) -> Record | None:
        """The caller's record at a key, else the ownerless one, else none.

        Raises INTERNAL_ERROR if a tier must be read that does not answer, or if there may be a better record than what
        would be answered, since a tier is not accounted for.
        """
        with self._catalog.reads.reading():
            for _ in range(_LOOKS):
                entry = self._catalog.records.by_key(scope.owner, key) or self._catalog.records.by_key(None, key)
                if entry is None or entry.owner != scope.owner:
                    self._fan_out.refuse_unaccounted(tiers)
                if entry is None:
                    return None
                records, missing = await self._homes.read([entry], tiers, scope, embeddings=embeddings)
                for down in missing:
                    raise down.error()
                if entry.id in records:
                    return records[entry.id]
        assert entry is not None
        if not still([entry], self._catalog.records.find([entry.id]).values()):
            raise changing("the record at the key is being forgotten and written anew all the time; try again")
        raise _lost(entry)


def _lost(entry: Entry) -> A2MError:
    return untrue(entry.home, f"it has lost the record {entry.id!r}; write it anew as it was, or forget it by its id")
