"""When a tier counts as down although its connection is open, and when that connection is closed. Pure: time comes in
as an argument.

- FAILURES calls in a row without an answer open the breaker. An error is an answer, too. The service behind the tier's
  server may have been silent for more requests than the calls show; then that number counts.
- While the breaker is open the connection is kept, since it may be healthy. It is closed when it was useless for
  PATIENCE seconds (the server was silent, or the service behind it down), or when TRIALS greetings in a row got a wrong
  answer. A server that has never answered a greeting correctly on this connection has one trial.
- PATIENCE doubles as long as a new connection does not help. The silence of a service may also be its server's fault,
  such as threads that hang, so that connection is closed, too.
"""

from typing import Final

FAILURES: Final = 5
TRIALS: Final = 5
PATIENCE: Final = 60.0

# killing a server that takes longer than PATIENCE to start would never let it come up
_LONGEST_PATIENCE: Final = 960.0


class Breaker:
    """The failure counts of one tier."""

    def __init__(self) -> None:
        self.failures = 0  # calls in a row without an answer
        self._in_vain = 0  # connections in a row that were closed as useless
        self._since = 0.0  # when the connection was opened, or last useful
        self._has_greeted = False
        self._wrong = 0  # greetings in a row with a wrong answer

    def __repr__(self) -> str:
        return f"<Breaker {self.failures} of {FAILURES} failures, patience {self.patience:g} s>"

    @property
    def patience(self) -> float:
        """The seconds for which a connection may be useless."""
        return float(min(PATIENCE * 2.0 ** min(self._in_vain, 16), _LONGEST_PATIENCE))

    def answered(self) -> None:
        """Note that a call was answered."""
        self.failures = 0

    def failed(self, times: int = 0) -> bool:
        """Note a call without an answer; return whether the breaker is open.

        `times`: how often in a row the service behind the server did not answer.
        """
        self.failures = max(times, self.failures + 1)
        return self.failures >= FAILURES

    def connected(self, now: float) -> None:
        """Note a new connection."""
        self._since, self._has_greeted, self._wrong = now, False, 0

    def greeted(self) -> None:
        """Note a correct answer to a greeting; the service behind the server may still be down."""
        self._has_greeted, self._wrong = True, 0

    def rose(self) -> None:
        """Note that the tier has come up."""
        self.failures = self._in_vain = 0

    def fell(self, now: float) -> None:
        """Note that the connection was useful until now."""
        self._since = now

    def misgreeted(self, *, is_answer: bool) -> bool:
        """Note a failed greeting; return whether to close the connection. `is_answer`: the server sent something."""
        self._wrong = self._wrong + 1 if is_answer else 0
        return self._wrong >= (TRIALS if self._has_greeted else 1)

    def is_useless(self, now: float, heard: float) -> float | None:
        """Return for how many seconds the connection was useless, if it has to be closed for that; else None.

        Args:
            heard: when the server last sent anything.
        """
        silent = now - max(self._since, heard)
        if silent < self.patience:
            return None
        self._in_vain += 1
        return silent
