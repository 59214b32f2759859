"""Writes: how records are created and replaced.

The steps, in order; the crash table of docs/architecture.md says what remains if a process dies in between:
1. under a claim the batch becomes a plan;
2. the tiers are prepared: known records are read, and strays that block new ones are removed;
3. new records are reserved: each gets a row without a home, and a stray at its destination;
4. new records are written to their tiers, to all at once;
5. the commit: all new records and all replacements take effect in one transaction;
6. the sync. Then the write is acknowledged and the claim is released. The reconciler sends the replacements to their
   tiers as pending writes.

Reservations without a commit are given up by the next start of the router.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter

from a2m_router.catalog.claims import Claim, Name
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.records import Replacement
from a2m_router.catalog.selection import Scope
from a2m_router.placement.core import Core
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.planning import Plan, Planner
from a2m_router.placement.reconciler import StaleClaim
from a2m_router.placement.slots import Slot
from a2m_router.process.budget import left
from a2m_router.protocol.wire.errors import A2MError, Code, embedding_mismatch
from a2m_router.protocol.wire.records import ConditionalDraft, Draft


class WriteConflict(Exception):
    """A condition of a write stopped holding before the commit; nothing was written."""


class NotDurable(Exception):
    """The write is committed, but the catalog's disk has not synced it: `problem`."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Writes:
    """Carries writes out."""

    def __init__(self, core: Core, planner: Planner, delivering: Delivering) -> None:
        self._catalog = core.catalog
        self._guard = core.guard
        self._planner = planner
        self._delivering = delivering
        self._widths: Counter[int] = Counter()  # of the vectors in batches in progress

    async def carry_out(
        self,
        drafts: Sequence[ConditionalDraft],
        scope: Scope,
        committed: Callable[[Sequence[Entry]], None],
        still: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Write a batch, all of it or nothing. Return the ids in the order of the drafts.

        Args:
            committed: called in the step of the commit, with the written records in order.
            still: called in the same step; if it returns False, nothing is written.

        Raises:
            A2MError: the batch is wrong (`Planner.plan`); a tier rejects it for a fault of the caller's; or an earlier
                change of the same records takes too long.
            TierDown: a tier did not do its part; nothing was written.
            OSError: the catalog's disk failed; nothing was written.
            NotDurable: all was written, but a power cut may remove it.
            WriteConflict: `still` returned False; nothing was written.
        """
        slots, places = self._planner.slots(drafts)
        if any(slot.last.tier is not None and slot.last.group is not None for slot in slots):
            # planned first, so that a batch that is rejected moves nothing
            await self._delivering.take_groups_along(self._planner.plan(slots, scope), scope)
        written = False
        while not written:
            claim, plan = await self._claim(slots, scope)
            written = await self._write(plan, claim, committed, still)
        return [slot.answer for slot in places if slot.answer is not None]

    async def _claim(self, slots: Sequence[Slot], scope: Scope) -> tuple[Claim, Plan]:
        """Claim all names that the slots touch. Return the claim and the plan made under it."""

        def look() -> tuple[set[Name], Plan]:
            plan = self._planner.plan(slots, scope)
            return self._delivering.touched(plan), plan

        patience = self._planner.patience
        try:
            return await self._catalog.claims.take_touched(look, lambda: min(patience, left()))
        except TimeoutError:
            raise A2MError(
                Code.INTERNAL_ERROR,
                "an earlier change of the same records is still in doubt; try again",
                {"reason": "unsettled", "retry_after": patience},
            ) from None

    async def _write(
        self, plan: Plan, claim: Claim, committed: Callable[[Sequence[Entry]], None], still: Callable[[], bool] | None
    ) -> bool:
        """Carry out a plan under its claim. The claim is released at the end, or when no call is in doubt any more.

        Return False if a scan or a forget has outdated the plan: the caller makes a new one.
        """
        new, replacements = plan.entries, plan.replacements
        redo = {replacement.entry.id: draft for _, draft, replacement in plan.replaced}
        is_true = False
        try:
            async with self._guard.change(claim) as change:
                await self._delivering.prepare(plan)
                if self._is_outdated(new, replacements):
                    return False
                _check(still)
                with self._width(plan.drafts):
                    if new:
                        self._catalog.reserve(new)
                        change.note = partial(self._catalog.abandon, new)
                        change.failures += await self._delivering.write(
                            [(draft, entry.home) for _, draft, entry in plan.new], are_all=not replacements
                        )
                    for failure in change.failures:
                        raise failure
                    await self._catalog.writable()
                    _check(still)
                    if self._is_outdated((), replacements):
                        return False
                    vectors = {draft.id: draft.embedding for draft in plan.drafts if draft.id and draft.embedding}
                    lost = self._catalog.commit_write(new, replacements, vectors, redo)
                    is_true, change.note = True, None
                    committed(_written(plan, lost))
                # acknowledged records survive a power cut. Known ones, too: their earlier sync may have failed
                await self._catalog.synced()
            return True
        except StaleClaim:
            return False
        except OSError as failure:
            if is_true:
                raise NotDurable(failure) from failure
            raise

    def _is_outdated(self, new: Sequence[Entry], replacements: Sequence[Replacement]) -> bool:
        """Return whether a scan, which takes no claim, has outdated a plan.

        The scan has adopted a record that the plan takes for new, or has changed the home or state of a record to be
        replaced. A record that was forgotten meanwhile stays forgotten and outdates nothing.
        """
        records = self._catalog.records
        if any(
            records.get(entry.id) or (entry.key is not None and records.by_key(entry.owner, entry.key)) for entry in new
        ):
            return True
        now = records.find(replacement.entry.id for replacement in replacements)
        return any(r.entry.id in now and now[r.entry.id].version != r.replaces for r in replacements)

    @contextmanager
    def _width(self, drafts: Sequence[Draft]) -> Iterator[None]:
        """Reserve the width of a batch's vectors during the write: until a first vector exists, only this fixes it.

        Raises:
            A2MError: EMBEDDING_MISMATCH, the vectors of the federation or of a batch in progress have another width.
        """
        width = next((len(draft.embedding) for draft in drafts if draft.embedding is not None), None)
        fixed = self._catalog.vectors.dimensions() or next(iter(self._widths), None)
        if width is not None and fixed is not None and width != fixed:
            raise embedding_mismatch("records", fixed, width)
        if width is not None:
            self._widths[width] += 1
        try:
            yield
        finally:
            if width is not None:
                self._widths[width] -= 1
                self._widths += Counter()  # removes counts of zero


def _check(still: Callable[[], bool] | None) -> None:
    if still is not None and not still():
        raise WriteConflict


def _written(plan: Plan, lost: Sequence[Replacement]) -> list[Entry]:
    """Return the written records in the order of the batch, without replacements that were forgotten meanwhile."""
    gone = {replacement.entry.id for replacement in lost}
    written = [(slot.place, entry) for slot, _, entry in plan.new]
    written += [(slot.place, r.entry) for slot, _, r in plan.replaced if r.entry.id not in gone]
    return [entry for _, entry in sorted(written, key=itemgetter(0))]
