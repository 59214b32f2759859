"""Writes: how records come to be, and are replaced.

The steps, in their order; the crash table of docs/architecture.md says what remains when anything dies in between:
1. under a claim the batch becomes a plan;
2. the tiers are prepared: what is known is read, and nothing is in the way of what is new;
3. what is new is reserved: it has a row without a home, and a stray at its destination;
4. it is written to its tiers, to all at once;
5. the commit: all that is new, and all that replaces, becomes true in one transaction;
6. the sync. What was written is acknowledged when this is done, and the claim is released. The reconciler has the tiers
   catch up with what replaces.

What was only reserved when a router ended is given up by the next.
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
    """What a write depended on has changed before it could become true; nothing was written."""


class NotDurable(Exception):
    """What was written is true, but the catalog's disk has not synced it: `problem`."""

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
        self._widths: Counter[int] = Counter()  # of the vectors in batches under way

    async def carry_out(
        self,
        drafts: Sequence[ConditionalDraft],
        scope: Scope,
        committed: Callable[[Sequence[Entry]], None],
        still: Callable[[], bool] | None = None,
    ) -> list[str]:
        """Write a batch, all of it or nothing; the ids in the order of the drafts.

        Args:
            committed: called in the step in which the batch becomes true, with the records that were written, in order.
            still: asked in that step; if it does not hold, nothing is written.

        Raises:
            A2MError: the batch is wrong (`Planner.plan`), or a tier refuses it for a reason of the caller's; or an
                earlier change of the same records keeps it waiting for too long.
            TierDown: a tier did not take its part; nothing was written.
            OSError: the catalog's disk failed; nothing was written.
            NotDurable: all was written, and may be gone after a power cut.
            WriteConflict: `still` did not hold.
        """
        slots, places = self._planner.slots(drafts)
        if any(slot.last.tier is not None and slot.last.group is not None for slot in slots):
            # a batch that is refused moves nothing
            await self._delivering.take_groups_along(self._planner.plan(slots, scope), scope)
        written = False
        while not written:
            claim, plan = await self._claim(slots, scope)
            written = await self._write(plan, claim, committed, still)
        return [slot.answer for slot in places if slot.answer is not None]

    async def _claim(self, slots: Sequence[Slot], scope: Scope) -> tuple[Claim, Plan]:
        """A claim on all that the slots touch, and what they come to under it."""

        def look() -> tuple[set[Name], Plan]:
            plan = self._planner.plan(slots, scope)
            return self._delivering.touched(plan), plan

        patience = self._planner.patience
        try:
            return await self._catalog.claims.take_touched(look, lambda: min(patience, left()))
        except TimeoutError:
            raise A2MError(
                Code.INTERNAL_ERROR,
                "an earlier change of the same records has not been settled by its tier yet; try again",
                {"reason": "unsettled", "retry_after": patience},
            ) from None

    async def _write(
        self, plan: Plan, claim: Claim, committed: Callable[[Sequence[Entry]], None], still: Callable[[], bool] | None
    ) -> bool:
        """Carry out a plan under its claim, which is released at the end, or when none of its calls is in doubt.

        Returns False if a scan or a forget has brought about what the plan did not know: it has to be made anew.
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
                # what is acknowledged outlives a power cut; so must what is known: the disk may have refused it before
                await self._catalog.synced()
            return True
        except StaleClaim:
            return False
        except OSError as failure:
            if is_true:
                raise NotDurable(failure) from failure
            raise

    def _is_outdated(self, new: Sequence[Entry], replacements: Sequence[Replacement]) -> bool:
        """Whether a scan, which needs no claim, has changed what a plan was made from: it has taken in a record that
        the plan takes for new, or a record that is to be replaced has another home or state. One that was forgotten is
        gone, and stays so."""
        records = self._catalog.records
        if any(
            records.get(entry.id) or (entry.key is not None and records.by_key(entry.owner, entry.key)) for entry in new
        ):
            return True
        now = records.find(replacement.entry.id for replacement in replacements)
        return any(r.entry.id in now and now[r.entry.id].version != r.replaces for r in replacements)

    @contextmanager
    def _width(self, drafts: Sequence[Draft]) -> Iterator[None]:
        """The width of a batch's vectors, while it is being written: until the first is there, it holds for no others.

        Raises EMBEDDING_MISMATCH if the federation's vectors, or those of a batch under way, have another one.
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
                self._widths += Counter()  # drops what has come down to zero


def _check(still: Callable[[], bool] | None) -> None:
    if still is not None and not still():
        raise WriteConflict


def _written(plan: Plan, lost: Sequence[Replacement]) -> list[Entry]:
    """The records written, in the order of the batch. A replacement that was forgotten before it became true is none of
    them."""
    gone = {replacement.entry.id for replacement in lost}
    written = [(slot.place, entry) for slot, _, entry in plan.new]
    written += [(slot.place, r.entry) for slot, _, r in plan.replaced if r.entry.id not in gone]
    return [entry for _, entry in sorted(written, key=itemgetter(0))]
