"""The concurrency limit of a tier: how many calls may be under way. Pure: no clock, no waiting.

An overloaded tier answers every call late, and late answers are useless. So the limit follows the tier's answers, like
TCP's window (additive increase, multiplicative decrease). A late answer halves the limit, once for all the calls that
were under way together. Answers in time raise it again: as many answers as the limit raise it by one.
"""

from typing import Final

_LOWERED: Final = 0.5


class ConcurrencyLimit:
    """The limit on the calls under way.

    Args:
        most: the greatest limit.
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._bound = float(most)
        self._begun = 0
        self._counted = 0  # late answers to calls up to this number have been counted already

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit for {self.calls} calls, at most {self._most:g}>"

    @property
    def calls(self) -> int:
        """How many calls may be under way."""
        return int(self._bound)

    @property
    def waiting(self) -> int:
        """How many more calls may wait for a place."""
        return max(1, self.calls // 4)

    def begin(self) -> int:
        """Note that a call begins; return its number, for `ended`."""
        self._begun += 1
        return self._begun

    def ended(self, number: int, *, in_time: bool) -> None:
        """Note that a call was answered, in time or too late. Do not call it for a call without an answer."""
        if in_time:
            self._bound = min(self._most, self._bound + 1 / self._bound)
        elif number > self._counted:
            self._bound = max(1.0, self._bound * _LOWERED)
            self._counted = self._begun
