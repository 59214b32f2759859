"""How many calls may be under way at a tier. Pure: no clock, no waiting.

A tier that is asked for more than it can do does all of it late, and what is late is of use to nobody. So the bound
follows what the tier shows (additive increase, multiplicative decrease, as TCP's window does): a call that it answers
too late lowers it, once for all the calls that were under way together; answers in time raise it again, by one for as
many as may be under way at once.
"""

from typing import Final

_LOWERED: Final = 0.5


class ConcurrencyLimit:
    """The bound on the calls under way.

    Args:
        most: what it never exceeds.
    """

    def __init__(self, most: int) -> None:
        self._most = float(most)
        self._bound = float(most)
        self._begun = 0
        self._told = 0  # of calls that were begun by then nothing more is to be learnt

    def __repr__(self) -> str:
        return f"<ConcurrencyLimit for {self.calls} calls, at most {self._most:g}>"

    @property
    def calls(self) -> int:
        """How many calls may be under way."""
        return int(self._bound)

    @property
    def waiting(self) -> int:
        """How many more may wait for their turn."""
        return max(1, self.calls // 4)

    def begin(self) -> int:
        """A call is begun; returns what `ended` is to be told of it."""
        self._begun += 1
        return self._begun

    def ended(self, number: int, *, in_time: bool) -> None:
        """A call was answered, in time or too late. Of one without any answer nothing is to be learnt."""
        if in_time:
            self._bound = min(self._most, self._bound + 1 / self._bound)
        elif number > self._told:
            self._bound = max(1.0, self._bound * _LOWERED)
            self._told = self._begun
