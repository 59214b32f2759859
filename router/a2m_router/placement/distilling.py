"""Distilling: a spill rewrites a group on its way (§4.7), and the summary replaces the group's records.

The records are read from the source and compared with the digests in the catalog. Then the summarizer runs; no claim is
held meanwhile. The rest is like a move, except that the copy is a different record from its sources. Under a claim,
which includes the summary's id, and if the group has not changed:
- a stray at the target is noted, durably;
- the summary is written there, read back, and compared;
- in one transaction the summary becomes a record and its sources are deleted. Synced, this is the commit point.

The reconciler removes the old copies. A crash before the commit leaves the group unchanged, and at most an unwanted
copy of a summary that no reader has seen.
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

# A refusal may concern one group: the model refuses its text, or the target refuses its summary. After so many refusals
# in a row, the fault is more general; and each attempt may cost an inference.
_MOST_REFUSALS: Final = 3


class Rewriter(msgspec.Struct, frozen=True):
    """The writer of the records that replace groups.

    Args:
        summarizer: produces the text.
        max_content: the maximum length of a record's content, in characters.
        new_id: returns a fresh record id.
    """

    summarizer: Summarizer
    max_content: int
    new_id: Callable[[], str]

    async def write(self, records: Sequence[Record]) -> Record | None:
        """Return the summary of the records, all of one group; None if the summarizer has nothing to write."""
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
    """Carries out spills that replace groups by summaries.

    Args:
        rewriter: writes the summaries.
        clock: returns the time, in milliseconds since 1970.
    """

    def __init__(self, core: Core, moves: Moves, rewriter: Rewriter, clock: Callable[[], int]) -> None:
        self._core = core
        self._catalog = core.catalog
        self.moves = moves
        self._rewriter = rewriter
        self._clock = clock
        self._busy: dict[frozenset[str], anyio.Event] = {}  # groups being summarized; the event is set at the end
        self._in_vain: Counter[tuple[str, str]] = Counter()  # refusals in a row, by (source, target)

    def is_busy(self, unit: Unit) -> bool:
        """Return whether the summarizer is working on the unit, or on a part of it."""
        return any(not busy.isdisjoint(unit.ids) for busy in self._busy)

    def leaving(self, tier: str, bucket: int) -> int:
        """Return how many records of a bucket will leave it as soon as their summaries are written."""
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
        """Move summaries of the units to `target`. Units that no summary can replace move unchanged.

        A unit stays if its summary fails or does not arrive.

        Args:
            thinking: entered while the summarizer runs.
            result: as in `Moves.carry_out`.
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
        self.moves.log_blocker(source, target, result)
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
        """Distil one unit. Return False if the unit is to move unchanged: no summary can replace it."""
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
        self._check(source, target)  # before an inference: a tier that is down could not take its result
        found = await self._core.gateway.read(source, [entry.id for entry in group], embeddings=True)
        records = _as_they_were(group, found)
        if records is None or not all(map(_is_rewritable, records)):
            return False
        if len(self._rewriter.summarizer.material(records)) < len(records):
            return False  # the summarizer would leave out some of the records
        # this pass holds its turn until the summarizer runs, so no other task has started on this unit meanwhile
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
            result.blocker = Blocker("changed", "it changed while its summary was written", unit.ids[0])
        return True

    async def _replace(self, unit: Unit, group: Sequence[Entry], summary: Record, source: str, target: str) -> bool:
        """Replace the group by its summary. Return False if the group has changed or others keep it busy."""
        self._check(source, target)
        entry = entry_of(summary, target)
        claimed = await self.moves.claim([unit], source, target)
        if claimed is None:
            return False
        claim, present = claimed
        # the summary's id is claimed, too, since its write may be in doubt at the end; a fresh id is always free
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
        """Commit the summary, with the highest salience that its sources have by now."""
        now = self._catalog.records.unchanged(group)
        if now is None:
            return False
        worth = max(entry.salience for entry in now)
        return self._catalog.distil(now, msgspec.structs.replace(summary, salience=worth), self._clock())


def _as_they_were(group: Sequence[Entry], found: Mapping[str, Record]) -> list[Record] | None:
    """Return the records of the group by time; None if the tier lacks one or holds one not as it was written."""
    records = [found[entry.id] for entry in group if entry.id in found and digest(found[entry.id]) == entry.digest]
    return sorted(records, key=lambda record: record.created_at) if len(records) == len(group) else None


def _is_rewritable(record: Record) -> bool:
    """Return whether a summary can replace the record: it has content, and no key, vector or `uri`."""
    return record.key is None and record.embedding is None and record.uri is None and bool(record.content.strip())
