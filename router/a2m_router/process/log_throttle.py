"""What the log would say with every call says it once: a client decides how many calls there are, not how long the log
becomes."""

import logging
import time
from typing import Final

# the same sentence is said again when it has not been said for so many seconds
QUIET: Final = 60.0

# so many sentences are remembered; beyond that the one that was wanted longest ago is let go
_MOST: Final = 1000


class LogThrottle:
    """Sentences of one logger: the first at its level, its repetitions, for as long as they go on, at `debug`."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._said: dict[str, float] = {}  # when each was last wanted, on the monotonic clock; the latest last

    def say(self, level: int, sentence: str) -> None:
        """Says it, or that it goes on."""
        now = time.monotonic()
        goes_on = now < self._said.pop(sentence, -QUIET) + QUIET
        if len(self._said) >= _MOST:
            del self._said[next(iter(self._said))]
        self._said[sentence] = now
        self._log.log(logging.DEBUG if goes_on else level, "%s", sentence)
