"""Distilling: a group that spills is rewritten on its way (§4.7), and its records give way to the summary.

The records are read from the source and compared with the digests in the catalog; then the summarizer thinks, and
nothing is claimed meanwhile. The rest is as in a move, but that the copy is another record than its sources. Under a
claim, on the summary's id as well, and if the group still is what it was:
- a stray at the target is noted, durably;
- the summary is written there, read back, and compared;
- in one transaction the summary becomes a record and its sources are struck out. Synced, this is the commit point.

The reconciler removes the old copies. What dies before the commit leaves the group as it was, and at most an unwanted
copy of a summary that nobody ever saw.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Final

import anyio
import msgspec

from a2m_router.catalog.claims import id_name
from a2m_router.catalog.entries import Entry, entry_of
from a2m_router.placement.core import Core
from a2m_router.placement.moves import Altered, Blocker, Moved, Moves, blocker_of, write
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.events import Place
from a2m_router.protocol.wire.records import Record, digest
from a2m_router.ranking.policy import Unit
from a2m_router.summaries.summarizing import Summarizer, check_length, provenance
from a2m_router.tiers.link import AnswerTooLong, TierDown

# One group may be at fault, that a model will not write of or the target does not take; so many in a row are not, and
# each trial may cost an inference.
_MOST_REFUSALS: Final = 3


class Rewriter(msgspec.Struct, frozen=True):
    """Writes the records that stand for groups.

    Args:
        summarizer: finds the text.
        max_content: characters that a record may have.
        new_id: gives a fresh record id.
    """

    summarizer: Summarizer
    max_content: int
    new_id: Callable[[], str]

    async def write(self, records: Sequence[Record]) -> Record | None:
        """What stands for the records, which all are of one group; None where there is nothing to say."""
        content = await self.summarizer.summarize(records)
        if content is None:
            return None
        check_length(content, self.max_content)
        sessions = {record.session for record in records}
        return Record(
            id=self.new_id(),
            content=content,
            created_at=max(record.created_at for record in records),
            role="memory",
            metadata=provenance(len(records), self.summarizer.model),
            group=records[0].group,
            owner=records[0].owner,
            session=sessions.pop() if len(sessions) == 1 else None,
        )


class Distilling:
    """Carries out spills that rewrite.

    Args:
        rewriter: writes the summaries.
        clock: the time, in milliseconds since 1970.
    """

    def __init__(self, core: Core, moves: Moves, rewriter: Rewriter, clock: Callable[[], int]) -> None:
        self._core = core
        self._catalog = core.catalog
        self.moves = moves
        self._rewriter = rewriter
        self._clock = clock
        self._busy: dict[frozenset[str], anyio.Event] = {}  # what is being thought about, and when that is over
        self._in_vain: Counter[tuple[str, str]] = Counter()  # refusals in a row, by the way that was refused

    def is_busy(self, unit: Unit) -> bool:
        """Whether a summary of the unit, or of some of it, is being thought of."""
        return any(not busy.isdisjoint(unit.ids) for busy in self._busy)

    def leaving(self, tier: str, bucket: int) -> int:
        """How many records of a bucket are on their way out, as soon as their summaries have been thought of."""
        return sum(self._catalog.buckets.of(id) == (tier, bucket) for busy in self._busy for id in busy)

    async def carry_out(
        self,
        units: Sequence[Unit],
        source: str,
        target: str,
        thinking: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        *,
        result: Moved | None = None,
    ) -> Moved:
        """Rewrite the units into `target`; those that no summary can stand for move as they are.

        What none could be written for, or does not arrive, stays. `thinking` is entered while the summarizer thinks;
        `result` is as in `Moves.carry_out`.
        """
        way = source, target
        result = Moved() if result is None else result
        verbatim: list[Unit] = []
        for unit in units:
            try:
                if not await self._distil(unit, source, target, thinking, result):
                    verbatim.append(unit)
                self._in_vain[way] = 0
            except (A2MError, Altered, AnswerTooLong) as refused:
                self._in_vain[way] += 1
                result.blocker = blocker_of(refused, unit)
                result.blocked = self._in_vain[way] == _MOST_REFUSALS
            except (TierDown, OSError) as failure:
                result.blocker, result.blocked = blocker_of(failure), True
            if result.blocked:
                self._in_vain[way] = 0
                break
        self.moves.say(source, target, result)
        if verbatim:
            moved = Moved()
            try:
                await self.moves.carry_out(verbatim, source, target, result=moved)
            finally:
                result.records += moved.records
            result.blocker = result.blocker or moved.blocker
            result.blocked |= moved.blocked
        return result

    async def _distil(
        self,
        unit: Unit,
        source: str,
        target: str,
        thinking: Callable[[], AbstractAsyncContextManager[None]],
        result: Moved,
    ) -> bool:
        """False if the unit is to move as it is: a summary cannot stand for it, or there is nothing to say."""
        groups = self.moves.present([unit], source)
        if len(groups) != 1:
            return False
        [group] = groups
        ids = frozenset(entry.id for entry in group)
        under_way = next((thought for busy, thought in self._busy.items() if not busy.isdisjoint(ids)), None)
        if under_way is not None:
            async with thinking():
                await under_way.wait()
            return await self._distil(unit, source, target, thinking, result)
        self._check(source, target)  # before anything is thought for a tier that cannot take it
        found = await self._core.gateway.read(source, [entry.id for entry in group], embeddings=True)
        records = _as_they_were(group, found)
        if records is None or not all(map(_is_rewritable, records)):
            return False
        if len(self._rewriter.summarizer.material(records)) < len(records):
            return False  # nothing is rewritten unread
        # the pass has its turn until it thinks, so nobody else has come to this unit since it was looked at
        self._busy[ids] = anyio.Event()
        try:
            async with thinking():
                summary = await self._rewriter.write(records)
        finally:
            self._busy.pop(ids).set()
        if summary is None:
            return False
        if await self._replace(unit, group, summary, source, target):
            result.rewritten.update(Place(entry.owner, target) for entry in group)
        else:
            result.blocker = Blocker("changed", "it has changed while it was summarized", unit.ids[0])
        return True

    async def _replace(self, unit: Unit, group: Sequence[Entry], summary: Record, source: str, target: str) -> bool:
        """Put the summary in the group's place, if that still is what it was."""
        self._check(source, target)
        entry = entry_of(summary, target)
        claimed = await self.moves.claim([unit], source, target)
        if claimed is None:
            return False  # others are at work on it
        claim, present = claimed
        # what of the summary may still land at the target must not be taken for removed; a fresh id is always free
        own = self._catalog.claims.take_if_free([id_name(summary.id)])
        catalog = self._catalog
        async with self._core.guard.change(*(each for each in (claim, own) if each is not None)) as change:
            change.note = partial(catalog.give_up, [entry], target)
            if not present or catalog.records.unchanged(group) is None:
                return False
            catalog.note_copies([entry], target)
            await catalog.synced()
            await write(self._core.gateway, target, [summary])
            return self._commit(group, entry)

    def _check(self, *tiers: str) -> None:
        for tier in tiers:
            self._core.reconciler.check(tier)

    def _commit(self, group: Sequence[Entry], summary: Entry) -> bool:
        """The summary is worth what the best of its sources is by now."""
        now = self._catalog.records.unchanged(group)
        if now is None:
            return False
        worth = max(entry.salience for entry in now)
        return self._catalog.distil(now, msgspec.structs.replace(summary, salience=worth), self._clock())


def _as_they_were(group: Sequence[Entry], found: Mapping[str, Record]) -> list[Record] | None:
    """The records of the group, by time; None if its tier does not hold all of them as they were written."""
    records = [found[entry.id] for entry in group if entry.id in found and digest(found[entry.id]) == entry.digest]
    return sorted(records, key=lambda record: record.created_at) if len(records) == len(group) else None


def _is_rewritable(record: Record) -> bool:
    """Whether a text can stand for it: not for what is fetched by its key, found by its vector, or lies elsewhere."""
    return record.key is None and record.embedding is None and record.uri is None and bool(record.content.strip())
