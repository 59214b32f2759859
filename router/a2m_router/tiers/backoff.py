"""Retry times. Pure: time comes in as an argument, chance as a function."""

from collections.abc import Callable
from typing import Final

FIRST: Final = 0.5  # seconds; a server that restarts fast is back before a caller's deadline (5 s)
LONGEST: Final = 30.0
STEADY: Final = 30.0  # seconds up; a tier that comes up and goes down at once is not healthy


class Backoff:
    """Waits that double from FIRST to LONGEST, and start over after STEADY seconds of health.

    Args:
        random: uniform in [0, 1). Each wait is between half and all of its length, so that not all tiers of one machine
            are retried at the same moment.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._failures = 0
        self._healthy_since: float | None = None

    def succeeded(self, now: float) -> None:
        """Note that the tier is healthy."""
        if self._healthy_since is None:
            self._healthy_since = now

    def failed(self, now: float) -> float:
        """Note a failure, and return the seconds to wait before the next attempt."""
        if self._healthy_since is not None and now - self._healthy_since >= STEADY:
            self._failures = 0
        self._healthy_since = None
        length = min(LONGEST, FIRST * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return length * (0.5 + 0.5 * self._random())
