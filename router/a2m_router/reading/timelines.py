"""Timelines, pages and fetches (§4.4, §4.9): the catalog selects the records; they are read at their homes.

Conditions that need the records themselves (content, metadata, `uri`, `media_type`) are sent to the tiers. Mounts
apply the question to their own records.
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

# Attempts of a fetch whose record is gone when it is read: its key may have another record by now, or none.
_LOOKS: Final = 3


class _Part(NamedTuple):
    """Records with their positions in a timeline (creation time, then order of writing), and the missing tiers."""

    placed: list[tuple[tuple[int, int], Record]]
    degraded: list[Degraded]


class Timelines:
    """Carries out timelines, pages and fetches."""

    def __init__(self, catalog: Catalog, fan_out: FanOut, homes: Homes, mounts: Mounts) -> None:
        self._catalog = catalog
        self._fan_out = fan_out
        self._homes = homes
        self._mounts = mounts

    async def newest(self, question: Question) -> Answer:
        """Return the newest `limit` records, oldest first; all records for a limit of 0.

        Raises:
            A2MError: no tier answered, or a required one failed.
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
        """Make a timeline from the catalog, and from mounts, whose records the catalog does not have."""
        mounted = [tier for tier in question.tiers if tier in self._mounts]
        selection = question.selection()
        newest = self._catalog.queries.newest(selection, question.limit or None)
        looks = [partial(self._known, question, newest)]
        if mounted:
            looks.append(partial(self._mounted, msgspec.structs.replace(question, tiers=mounted)))
        parts = await gather(looks)
        degraded = [down for part in parts for down in part.degraded]
        refuse_if_nothing(question.tiers, degraded)
        # records of one part may have changed while the other part was awaited
        gone = {entry.id for entry in newest} - {entry.id for entry in self._homes.still_matching(newest, selection)}
        placed = [each for part in parts for each in part.placed if each[1].id not in gone]
        return _Part(placed, degraded)

    async def _known(self, question: Question, newest: Sequence[Entry]) -> _Part:
        """Read the newest records of the catalog at their homes."""
        tiers = [tier for tier in question.tiers if tier not in self._mounts]
        records, missing = await self._homes.read(newest, tiers, question.scope, embeddings=question.embeddings)
        there = [entry for entry in newest if entry.id in records]
        return _Part([((entry.created_at, entry.seq), records[entry.id]) for entry in there], missing)

    async def _mounted(self, question: Question) -> _Part:
        """Return the mounts' part of a timeline."""
        answers = await self._fan_out.listings(question)
        there = [record for records in answers.lists.values() for record in records]
        managed = self._catalog.records.find(record.id for record in there)
        shown = [as_answered(record, None, question.embeddings) for record in there if record.id not in managed]
        silent = [Degraded(tier, reason_of(failure)) for tier, failure in answers.failures.items()]
        return _Part([(age(record, {}), record) for record in shown], silent)

    async def _matching(self, question: Question, read: Reading) -> _Part:
        """Make a timeline by conditions that need the records themselves."""
        answers = await self._fan_out.listings(question)
        missing = answers.missing(question.tiers)
        shown, now, differing = self._homes.shown(question, answers.lists, read)
        matching = {entry.id for entry in self._catalog.queries.among(now, question.selection())}
        records = [
            as_answered(record, now.get(id), question.embeddings)
            for id, record in shown.items()
            if id in matching or id not in now
        ]
        return _Part([(age(record, now), record) for record in records], [*missing, *differing])

    async def page(self, question: Question, place: int) -> tuple[list[Record], int | None]:
        """Return the next `limit` records of a walk over managed tiers, in the order of writing.

        Within a page they are sorted by creation time. The second value is the place of the next page; None at the end.
        A page may be empty before the end.

        Raises:
            A2MError: INTERNAL_ERROR, a tier does not answer, or may hold records that the catalog does not have.
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
            matching = self._homes.still_matching(there, selection)
        for down in missing:
            raise down.error()
        for entry in matching:
            if entry.id not in records:
                raise _lost(entry)
        return [records[entry.id] for entry in sorted(matching, key=lambda entry: entry.created_at)], next_place

    async def fetch(self, key: str, tiers: Sequence[Tier], scope: Scope, *, embeddings: bool) -> Record | None:
        """Return the caller's record at a key, otherwise the ownerless one, otherwise None.

        Raises:
            A2MError: INTERNAL_ERROR, a tier that must be read does not answer; or a tier may hold a better match that
                the catalog does not have.
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
            raise changing("the record at the key is replaced faster than it can be read; try again")
        raise _lost(entry)


def _lost(entry: Entry) -> A2MError:
    return untrue(entry.home, f"it has lost the record {entry.id!r}; write it anew as it was, or forget it by its id")
