"""When a tier counts as down though its connection stands, and when that connection is given up. Pure: time comes in
as an argument.

- FAILURES calls in a row without an answer open the breaker. An answer that is an error is an answer. A service behind
  the tier's server may have been silent more often than the calls show; then that number counts.
- Behind an open breaker the connection is kept, since it may be well. It is given up when nothing has come of it for
  PATIENCE seconds, which doubles as long as that does not help (also a service's silence may be its server's fault,
  such as threads that hang), or when TRIALS greetings in a row were answered as they must not be. A server that has
  never greeted rightly on this connection has one trial.
"""

from typing import Final

FAILURES: Final = 5
TRIALS: Final = 5
PATIENCE: Final = 60.0

# killing a server that takes longer than PATIENCE to start would never let it come up
_LONGEST_PATIENCE: Final = 960.0


class Breaker:
    """What is counted of one tier's failures."""

    def __init__(self) -> None:
        self.failures = 0  # calls in a row without an answer
        self._in_vain = 0  # connections in a row that were given up for being of no use
        self._since = 0.0  # when the connection was made, or last of use
        self._has_greeted = False
        self._wrong = 0  # greetings in a row that were answered otherwise than they must be

    def __repr__(self) -> str:
        return f"<Breaker {self.failures} of {FAILURES} failures, patience {self.patience:g} s>"

    @property
    def patience(self) -> float:
        """For how many seconds a connection may be of no use."""
        return float(min(PATIENCE * 2.0 ** min(self._in_vain, 16), _LONGEST_PATIENCE))

    def answered(self) -> None:
        """A call was answered."""
        self.failures = 0

    def failed(self, times: int = 0) -> bool:
        """A call was not answered, or the service behind the server for so many `times`; returns whether the breaker is
        open."""
        self.failures = max(times, self.failures + 1)
        return self.failures >= FAILURES

    def connected(self, now: float) -> None:
        """A connection was made."""
        self._since, self._has_greeted, self._wrong = now, False, 0

    def greeted(self) -> None:
        """A greeting was answered rightly, though the service behind the server may be down."""
        self._has_greeted, self._wrong = True, 0

    def rose(self) -> None:
        """The tier has come up."""
        self.failures = self._in_vain = 0

    def fell(self, now: float) -> None:
        """The tier was of use until now."""
        self._since = now

    def misgreeted(self, *, is_answer: bool) -> bool:
        """A greeting has failed, though it may have been answered in some way; returns whether that is the end of the
        connection."""
        self._wrong = self._wrong + 1 if is_answer else 0
        return self._wrong >= (TRIALS if self._has_greeted else 1)

    def is_useless(self, now: float, heard: float) -> float | None:
        """For how many seconds the connection was of no use, where these are too many and it is given up.

        Args:
            heard: when it has last shown that it is alive.
        """
        silent = now - max(self._since, heard)
        if silent < self.patience:
            return None
        self._in_vain += 1
        return silent
