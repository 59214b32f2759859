"""Selects the fault of a call. Pure: time and the existence of files are arguments, chance follows from the seed.

A fault counts the calls that it concerns: those that match its methods, its text, its times and its file. Whether it
applies to the n-th of them depends only on the plan, the seed, n and how often it has applied. So a run can be
repeated, and an interrupted run can continue from the counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from a2m_chaos.plan import Fault, Plan


class Count(msgspec.Struct):
    """The counts of one fault: the calls that it concerned, and those that it was applied to."""

    calls: int = 0
    done: int = 0


class Applied(msgspec.Struct, frozen=True):
    """A fault to apply, and the number of the call among those that it concerns, from 1."""

    fault: Fault
    number: int


class Schedule:
    """The selection of a fault for each call. Mutable state: `counts`, one for each fault, in the plan's order.

    Args:
        plan: the plan.
        counts: the counts of an earlier run; ignored if their number is not that of the plan's faults.
        exists: returns whether a file exists, for faults with `while`.
    """

    def __init__(
        self, plan: Plan, counts: Sequence[Count] = (), *, exists: Callable[[Path], bool] = Path.exists
    ) -> None:
        self._plan = plan
        self._exists = exists
        fits = len(counts) == len(plan.faults)
        self.counts = list(counts) if fits else [Count() for _ in plan.faults]

    def next(self, method: str, message: bytes, now: float) -> Applied | None:
        """Return the first fault that applies to this call, `now` seconds after the start; None if no fault does.

        Every fault that concerns the call counts it.
        """
        chosen: Applied | None = None
        for position, (fault, count) in enumerate(zip(self._plan.faults, self.counts, strict=True)):
            if not self._concerns(fault, method, message, now):
                continue
            count.calls += 1
            if chosen is None and self._applies(position, fault, count):
                count.done += 1
                chosen = Applied(fault, count.calls)
        return chosen

    def _concerns(self, fault: Fault, method: str, message: bytes, now: float) -> bool:
        return (
            (not fault.methods or method in fault.methods)
            and fault.having in message
            and fault.begins <= now
            and (fault.ends is None or now < fault.ends)
            and (fault.switch is None or self._exists(fault.switch))
        )

    def _applies(self, position: int, fault: Fault, count: Count) -> bool:
        behind = count.calls - fault.after
        if behind <= 0 or behind % fault.every or (fault.times is not None and count.done >= fault.times):
            return False
        return fault.chance >= 1 or Random(f"{self._plan.seed}/{position}/{count.calls}").random() < fault.chance
