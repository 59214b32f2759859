"""When to try again. Pure: time comes in as an argument, chance as a function."""

from collections.abc import Callable
from typing import Final

FIRST: Final = 0.5  # seconds; what restarts fast is back before anybody's deadline (5 s) has passed
LONGEST: Final = 30.0
STEADY: Final = 30.0  # of health; a tier that comes up and falls over at once is not a healthy one


class Backoff:
    """Waits that double from FIRST to LONGEST, and start over after STEADY seconds of health.

    Args:
        random: uniform in [0, 1). Each wait is between half and all of its length, so that the tiers of one machine
            do not all come back in the same moment.
    """

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self._failures = 0
        self._healthy_since: float | None = None

    def succeeded(self, now: float) -> None:
        """Health begins, or goes on."""
        if self._healthy_since is None:
            self._healthy_since = now

    def failed(self, now: float) -> float:
        """Health, if there was any, has ended; returns how many seconds to wait."""
        if self._healthy_since is not None and now - self._healthy_since >= STEADY:
            self._failures = 0
        self._healthy_since = None
        length = min(LONGEST, FIRST * 2.0 ** min(self._failures, 16))
        self._failures += 1
        return length * (0.5 + 0.5 * self._random())
