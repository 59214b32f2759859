"""Passes: the policy carried out. Promotions first, then spills, until nothing is left to do.

A pass may be asked for (memory/consolidate, memory/session/close), and runs in the background where the settings say
so. What a tier refuses, or cannot be asked, stays where it is: a full tier goes over its capacity before anything is
lost.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import anyio
import msgspec

from router.catalog.catalog import Catalog
from router.catalog.selection import Scope
from router.config import Settings, Tier
from router.moves import Moved, Moves
from router.policy import Unit, evictions
from router.sweeping import Sweeper

log = logging.getLogger(__name__)

# Waits before a pass tries again what a tier did not take.
_FIRST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 30.0

# Units that are tried one after the other where a tier refuses them, before the way rests.
_MOST_TRIALS: Final = 16


class Report(msgspec.Struct):
    """What a pass did: how many records of which owner."""

    moved: Counter[str | None] = msgspec.field(default_factory=Counter)
    promoted: Counter[str | None] = msgspec.field(default_factory=Counter)
    dropped: Counter[str | None] = msgspec.field(default_factory=Counter)

    def figures(self, scope: Scope) -> dict[str, int]:
        """The counts of what is `scope`'s own, or nobody's: what others have is nobody else's to know (§6)."""
        return {
            **{
                name: sum(count for owner, count in owners.items() if scope.holds(owner))
                for name, owners in (("moved", self.moved), ("promoted", self.promoted), ("dropped", self.dropped))
            },
            "summarized": 0,
        }


class Passes:
    """Runs the policy of one federation.

    Args:
        clock: the time, in milliseconds since 1970.
    """

    def __init__(
        self, settings: Settings, catalog: Catalog, moves: Moves, sweeper: Sweeper, clock: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._moves = moves
        self._sweeper = sweeper
        self._clock = clock
        self._turn = anyio.Lock()
        self._something_left = False
        self._rests: dict[tuple[str, str], _Rest] = {}
        self._wanted = anyio.Event()
        self._idle = anyio.Event()

    def wake(self) -> None:
        """Something was written, or has been earned."""
        self._wanted.set()

    def tier_changed(self) -> None:
        """What could not be moved may be movable now."""
        self._rests.clear()
        self._wanted.set()

    async def run(self) -> None:
        """Run a pass whenever woken. Ends only by being cancelled."""
        while True:
            self._wanted = anyio.Event()
            await self.consolidate(patient=True)
            if not self._wanted.is_set():
                self._idle.set()
                self._idle = anyio.Event()
            until = self._rested()
            with anyio.move_on_after(until - anyio.current_time()):
                await self._wanted.wait()

    async def idle(self) -> None:
        """Return when a background pass has found nothing more to do."""
        self.wake()
        await self._idle.wait()

    async def consolidate(self, *, patient: bool = False) -> Report:
        """One pass over everything that is due or over capacity (§4.7).

        A `patient` pass does not try again what was refused a moment ago.
        """
        async with self._turn:
            if not patient:
                self._rests.clear()
            report = Report()
            stuck = _Stuck(set(), Counter())
            while await self._promote(report, stuck) or await self._spill(report, stuck):
                pass
            self._something_left = bool(stuck.units)
            return report

    async def close_session(self, session: str, owner: str | None) -> tuple[Moved, Report]:
        """Move an owner's conversation out of the working tiers, then run a pass (§4.11).

        Returns what came of the first, and what both did together.
        """
        flushed = Moved()
        report = Report()
        for tier in self._settings.managed:
            if tier.kind == "working" and tier.spill_to is not None:
                units = self._catalog.in_session(tier.name, session, owner)
                moved = await self._moves.carry_out(units, tier.name, tier.spill_to)
                flushed.owners += moved.owners
                flushed.reason = moved.reason or flushed.reason
                report.moved += moved.owners
        after = await self.consolidate()
        after.moved += report.moved
        return flushed, after

    def _rested(self) -> float:
        """When the next rest ends. Rests that ended and were not renewed have nothing left to move."""
        now = anyio.current_time()
        self._rests = {way: rest for way, rest in self._rests.items() if rest.until > now}
        # what others were at work on is looked at again, though nobody says when they have done
        last = now + _LONGEST_WAIT if self._something_left else math.inf
        return min([last, *(rest.until for rest in self._rests.values())])

    async def _promote(self, report: Report, stuck: "_Stuck") -> bool:
        progress = False
        for tier in self._settings.managed:
            target = tier.promote_to
            if target is None or self._rests_on(tier.name, target):
                continue
            units = [
                Unit(ids, 0.0, len(ids))
                for unit in self._catalog.units(self._catalog.due(tier.name))
                if (ids := tuple(entry.id for entry in unit)) not in stuck.units
            ]
            if units:
                moved = await self._carry_out(units, tier.name, target, stuck)
                report.promoted += moved.owners
                progress |= moved.records > 0
        return progress

    async def _spill(self, report: Report, stuck: "_Stuck") -> bool:
        progress = False
        for tier in self._settings.managed:
            if tier.overflow == "spill" and (tier.spill_to is None or self._rests_on(tier.name, tier.spill_to)):
                continue
            for bucket, held in self._catalog.overfull(tier.name):
                assert tier.capacity is not None
                free = (unit for unit in self._catalog.weakest(tier.name, bucket) if unit.ids not in stuck.units)
                units = evictions(free, held, tier.capacity)
                if units:
                    # units that could not go are passed over in the next round, and stronger ones go instead
                    await self._evict(tier, units, report, stuck)
                    progress = True
        return progress

    async def _evict(self, tier: Tier, units: Sequence[Unit], report: Report, stuck: "_Stuck") -> None:
        if tier.overflow == "drop":
            dropped = self._catalog.forget([id for unit in units for id in unit.ids], Scope(), self._clock())
            await self._catalog.synced()
            self._sweeper.wake(tier.name)
            report.dropped.update(entry.owner for entry in dropped)
        elif tier.spill_to is not None and not self._rests_on(tier.name, tier.spill_to):
            moved = await self._carry_out(units, tier.name, tier.spill_to, stuck)
            report.moved += moved.owners

    async def _carry_out(self, units: Sequence[Unit], source: str, target: str, stuck: "_Stuck") -> Moved:
        """A move; what is still where it was is not tried again in this pass, and a way that is blocked rests."""
        way = source, target
        moved = await self._moves.carry_out(units, source, target)
        rest = self._rests.pop(way, None)
        stuck.in_vain[way] = 0 if moved.records else stuck.in_vain[way] + 1
        if moved.blocked or stuck.in_vain[way] >= _MOST_TRIALS:
            wait = _FIRST_WAIT if rest is None else min(2 * rest.wait, _LONGEST_WAIT)
            self._rests[way] = _Rest(wait, anyio.current_time() + wait)
        for unit in units:
            if any(entry.home == source for entry in self._catalog.find(unit.ids).values()):
                stuck.units.add(unit.ids)
        return moved

    def _rests_on(self, source: str, target: str) -> bool:
        rest = self._rests.get((source, target))
        return rest is not None and anyio.current_time() < rest.until


class _Stuck(msgspec.Struct):
    """The units that a pass could not move and does not try again; how often in a row each way was tried in vain."""

    units: set[tuple[str, ...]]
    in_vain: Counter[tuple[str, str]]


class _Rest(msgspec.Struct, frozen=True):
    """A way between two tiers that is not tried before a moment of the event loop's clock."""

    wait: float
    until: float
