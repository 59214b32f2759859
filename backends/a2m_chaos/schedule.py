"""Which fault applies to a call. Pure: time and the existence of files come in as arguments, chance from the seed.

A fault counts the calls that it could be done to: those of its methods, with its text in them. Whether it is done to
the n-th of them depends on the plan, its seed and n alone, so that a run can be repeated, and one that was interrupted
can go on from the counts.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec

from a2m_chaos.plan import Fault, Plan


class Count(msgspec.Struct):
    """Of one fault: how many calls it could have been done to, and how many it was done to."""

    calls: int = 0
    done: int = 0


class Applied(msgspec.Struct, frozen=True):
    """A fault that is to be done, and to which of the calls it could be done to (from 1)."""

    fault: Fault
    number: int


class Schedule:
    """Says of each call, as they come, which fault of a plan is done to it.

    Args:
        counts: where an earlier run had got to; those of another plan's length are not for this one.
        exists: whether there is such a file, for faults with a switch.

    `counts` is the mutable state, one for each fault, in the plan's order.
    """

    def __init__(
        self, plan: Plan, counts: Sequence[Count] = (), *, exists: Callable[[Path], bool] = Path.exists
    ) -> None:
        self._plan = plan
        self._exists = exists
        fits = len(counts) == len(plan.faults)
        self.counts = list(counts) if fits else [Count() for _ in plan.faults]

    def next(self, method: str, message: bytes, now: float) -> Applied | None:
        """The fault to do to this call, `now` seconds after the start; every fault that could be done counts it."""
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
