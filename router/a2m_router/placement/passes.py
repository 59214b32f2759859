"""Passes: each pass carries out the policy. Promotions run first, then spills, until nothing is left to do.

A pass runs on request (memory/consolidate, memory/session/close), and in the background if the settings say so. Records
that a tier refuses, or that belong to a tier that is down, stay where they are: a full tier exceeds its capacity before
anything is lost. The log says once why a bucket stays over its capacity. Moves log what blocks records between two
tiers; passes log that one group alone exceeds its bucket.
"""

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Final, Protocol

import anyio
import msgspec

from a2m_router.catalog.records import unit_of
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.placement.core import Core
from a2m_router.placement.distilling import Distilling
from a2m_router.placement.moves import Moved
from a2m_router.process.alerts import Alerts
from a2m_router.protocol.wire.errors import STOPPING
from a2m_router.protocol.wire.events import Consolidated, Event, Place
from a2m_router.ranking.policy import Unit, evictions

log = logging.getLogger(__name__)

# Seconds until a pass retries a move that a tier refused.
_FIRST_WAIT: Final = 1.0
_LONGEST_WAIT: Final = 30.0

# Failed attempts in a row between two tiers before a rest.
_MOST_TRIALS: Final = 16


class Stayed(Exception):
    """No record of a conversation could leave its working tier. `is_broken`: this is permanent."""

    def __init__(self, reason: str, *, is_broken: bool = False) -> None:
        super().__init__(reason)
        self.is_broken = is_broken


class Report(msgspec.Struct):
    """The result of a pass: for each kind of change, how many records of which place."""

    moved: Counter[Place] = msgspec.field(default_factory=Counter)
    promoted: Counter[Place] = msgspec.field(default_factory=Counter)
    dropped: Counter[Place] = msgspec.field(default_factory=Counter)
    summarized: Counter[Place] = msgspec.field(default_factory=Counter)

    def promoted_by(self, moved: Moved) -> None:
        """Add the result of a promotion."""
        self.promoted += moved.places

    def spilled(self, moved: Moved) -> None:
        """Add the result of a spill."""
        self.moved += moved.places
        self.summarized += moved.rewritten

    def figures(self) -> Mapping[str, Counter[Place]]:
        """Return the counts by their names in §4.7."""
        return msgspec.structs.asdict(self)


class Passes:
    """Runs the policy of one federation.

    Args:
        emit: appends an event to the event log.
        clock: returns the time, in milliseconds since 1970.
    """

    def __init__(
        self,
        settings: Settings,
        core: Core,
        distilling: Distilling,
        emit: Callable[[Event], None],
        clock: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._reconciler = core.reconciler
        self._moves = distilling.moves
        self._distilling = distilling
        self._emit = emit
        self._clock = clock
        self._turn = anyio.Lock()
        self._units_left = False
        self._rests: dict[tuple[str, str], _Rest] = {}
        self._alerts = Alerts(log)
        self._wanted = anyio.Event()
        self._idle = anyio.Event()
        self._asked: set[anyio.CancelScope] = set()
        self._stopped = False

    def wake(self) -> None:
        """Start a background pass: a record was written, or has earned a promotion."""
        self._wanted.set()

    def tier_changed(self) -> None:
        """End all rests and start a background pass: blocked moves may succeed now."""
        self._rests.clear()
        self._wanted.set()

    def stop(self) -> None:
        """End the passes that callers requested. Each returns what it has done so far."""
        self._stopped = True
        for scope in list(self._asked):
            scope.cancel()

    @contextmanager
    def _until_stopped(self) -> Iterator[anyio.CancelScope]:
        with anyio.CancelScope() as scope:
            self._asked.add(scope)
            try:
                if self._stopped:
                    scope.cancel()
                yield scope
            finally:
                self._asked.discard(scope)

    async def run(self) -> None:
        """Run a pass whenever woken, until cancelled."""
        while True:
            self._wanted = anyio.Event()
            report = Report()
            async with self._turn_to_move(report):
                await self._pass(report)
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

    async def consolidate(self, by: str | None) -> Report:
        """Run a pass over all records that are due or over capacity, for an owner (§4.7).

        The pass also retries moves that rest. Return what it did; after `stop`, what it did so far.
        """
        report = Report()
        with self._until_stopped():
            await self._consolidate(report, by)
        return report

    async def _consolidate(self, report: Report, by: str | None) -> None:
        async with self._turn_to_move(report, by, asked=True):
            self._rests.clear()
            await self._pass(report)

    async def close_session(self, session: str, owner: str | None) -> tuple[Moved, Report]:
        """Move an owner's conversation out of the working tiers, then run a pass (§4.11).

        Return the result of the first step, and the report of both; after `stop`, what was done so far.

        Raises:
            Stayed: no record of the conversation could leave.
        """
        flushed = Moved()
        report = Report()
        with self._until_stopped() as scope:
            await self._close_session(session, owner, flushed, report)
        if flushed.left == 0 and scope.cancelled_caught:
            raise Stayed(STOPPING)
        return flushed, report

    async def _close_session(self, session: str, owner: str | None, flushed: Moved, report: Report) -> None:
        async with self._turn_to_move(report, owner, asked=True):
            for tier in self._settings.managed:
                if tier.kind == "working" and tier.spill_to is not None:
                    units = self._catalog.queries.in_session(tier.name, session, owner)
                    moved = Moved()
                    try:
                        await self._spilling(tier)(units, tier.name, tier.spill_to, result=moved)
                    finally:
                        report.spilled(moved)
                        flushed.records += moved.records
                        flushed.rewritten += moved.rewritten
                        flushed.blocker = moved.blocker or flushed.blocker
            self._rests.clear()
            await self._pass(report)
            if flushed.left == 0 and flushed.reason is not None:
                if self._stopped:
                    raise Stayed(STOPPING)
                raise Stayed(flushed.reason, is_broken=flushed.is_broken)

    @asynccontextmanager
    async def _turn_to_move(self, report: Report, by: str | None = None, *, asked: bool = False) -> AsyncIterator[None]:
        """Hold the turn to move records, one pass at a time. Then emit one event of all that was done (§4.12)."""
        async with self._turn:
            try:
                yield
            except BaseException:
                asked = False  # a failed pass emits an event only for what it changed
                raise
            finally:
                if asked or any(report.figures().values()):
                    self._emit(Consolidated(at=self._clock(), by=by, asked=asked, figures=report.figures()))

    async def _pass(self, report: Report) -> None:
        stuck = _Stuck(set(), Counter())
        while await self._promote(report, stuck) or await self._spill(report, stuck):
            pass
        self._units_left = bool(stuck.units)
        self._moves.end_alerts(waiting={*stuck.in_vain, *self._rests})
        self._log_overfull_groups()

    def _log_overfull_groups(self) -> None:
        """Log once each bucket that is over capacity because one group alone is larger."""
        filled: set[_Filled] = set()
        for tier in self._settings.managed:
            for bucket, held in self._catalog.buckets.overfull(tier.name):
                unit = next(self._catalog.buckets.weakest(tier.name, bucket), None)
                if unit is None or unit.group is None or unit.weight != held:
                    continue
                condition = _Filled(bucket, unit.owner, unit.group)
                filled.add(condition)
                sentence = (
                    f"tier={tier.name} group {unit.group!r} kept whole over the capacity of {tier.capacity}: it alone "
                    f"has {held} records"
                )
                self._alerts.begin(condition, logging.INFO, sentence)
        for alert in self._alerts:
            if alert not in filled:
                self._alerts.end(alert)

    def _rested(self) -> float:
        """Drop the rests that are over. Return when the next one ends."""
        now = anyio.current_time()
        self._rests = {way: rest for way, rest in self._rests.items() if rest.until > now}
        # units that other changes kept busy are retried after a while: their end wakes no pass
        last = now + _LONGEST_WAIT if self._units_left else math.inf
        return min([last, *(rest.until for rest in self._rests.values())])

    async def _promote(self, report: Report, stuck: "_Stuck") -> bool:
        progress = False
        for tier in self._settings.managed:
            target = tier.promote_to
            if target is None or self._rests_on(tier.name, target):
                continue
            units = [
                unit
                for unit in map(unit_of, self._catalog.records.units(self._catalog.buckets.due(tier.name)))
                if unit.ids not in stuck.units
            ]
            if units:
                moved = await self._carry_out(
                    self._moves.carry_out,
                    units,
                    tier.name,
                    target,
                    stuck,
                    report.promoted_by,
                )
                progress |= moved.left > 0
        return progress

    async def _spill(self, report: Report, stuck: "_Stuck") -> bool:
        progress = False
        for tier in self._settings.managed:
            if tier.overflow == "spill" and (tier.spill_to is None or self._rests_on(tier.name, tier.spill_to)):
                continue
            for bucket, _ in self._catalog.buckets.overfull(tier.name):
                units = self._leaving(tier, bucket, stuck)
                if units:
                    # the next round skips units that could not leave, and takes stronger ones instead
                    await self._evict(tier, units, report, stuck)
                    progress = True
        return progress

    def _leaving(self, tier: Tier, bucket: int, stuck: "_Stuck") -> list[Unit]:
        """Return the units that leave a bucket now.

        This is decided anew before each step, because clients write and forget during a step. Units to be distilled,
        which may take long, are returned one at a time.
        """
        assert tier.capacity is not None
        free = (
            unit
            for unit in self._catalog.buckets.weakest(tier.name, bucket)
            if unit.ids not in stuck.units and not self._distilling.is_busy(unit)
        )
        held = self._catalog.buckets.held(bucket) - self._distilling.leaving(tier.name, bucket)
        units = evictions(free, held, tier.capacity)
        free.close()  # its open read would keep others waiting for the disk
        return units[:1] if tier.distil else units

    async def _evict(self, tier: Tier, units: Sequence[Unit], report: Report, stuck: "_Stuck") -> None:
        if tier.overflow == "drop":
            dropped = self._catalog.forget([id for unit in units for id in unit.ids], Scope(), self._clock())
            report.dropped.update(Place(entry.owner, entry.home) for entry in dropped)
            self._reconciler.wake()
            await self._catalog.synced()
        elif tier.spill_to is not None and not self._rests_on(tier.name, tier.spill_to):
            await self._carry_out(self._spilling(tier), units, tier.name, tier.spill_to, stuck, report.spilled)

    def _spilling(self, tier: Tier) -> "_CarryOut":
        """Return the function that carries out the spills of a tier: plain moves, or distilling."""
        return partial(self._distilling.carry_out, thinking=self._others_turn) if tier.distil else self._moves.carry_out

    @asynccontextmanager
    async def _others_turn(self) -> AsyncIterator[None]:
        """Let other passes run while the summarizer works."""
        self._turn.release()
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                await self._turn.acquire()

    async def _carry_out(
        self,
        carry_out: "_CarryOut",
        units: Sequence[Unit],
        source: str,
        target: str,
        stuck: "_Stuck",
        report: Callable[[Moved], None],
    ) -> Moved:
        """Move units. Those that stay are not retried in this pass, and a blocked move rests.

        `report` gets the result, also after a cancellation.
        """
        way = source, target
        moved = Moved()
        try:
            await carry_out(units, source, target, result=moved)
        finally:
            report(moved)
        rest = self._rests.pop(way, None)
        stuck.in_vain[way] = 0 if moved.left else stuck.in_vain[way] + 1
        if moved.blocked or stuck.in_vain[way] >= _MOST_TRIALS:
            wait = _FIRST_WAIT if rest is None else min(2 * rest.wait, _LONGEST_WAIT)
            self._rests[way] = _Rest(wait, anyio.current_time() + wait)
        for unit in units:
            if any(entry.home == source for entry in self._catalog.records.find(unit.ids).values()):
                stuck.units.add(unit.ids)
        return moved

    def _rests_on(self, source: str, target: str) -> bool:
        rest = self._rests.get((source, target))
        return rest is not None and anyio.current_time() < rest.until


class _CarryOut(Protocol):
    """A function that moves units from one tier to another. Units that fail stay, and the result says why."""

    async def __call__(self, units: Sequence[Unit], source: str, target: str, /, *, result: Moved) -> Moved: ...


class _Stuck(msgspec.Struct):
    """The units that a pass could not move and does not retry; failed attempts in a row, by (source, target)."""

    units: set[tuple[str, ...]]
    in_vain: Counter[tuple[str, str]]


class _Filled(msgspec.Struct, frozen=True):
    """A bucket that holds one owner's group and nothing else."""

    bucket: int
    owner: str | None
    group: str


class _Rest(msgspec.Struct, frozen=True):
    """A pause between two tiers, until a moment of the event loop's clock."""

    wait: float
    until: float
