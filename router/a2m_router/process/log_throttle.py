"""Logs a repeated sentence only once, so that a client with many calls cannot fill the log."""

import logging
import time
from typing import Final

# a sentence counts as new when it has not come for so many seconds
QUIET: Final = 60.0

# how many sentences are kept; beyond that the least recent one is dropped
_MOST: Final = 1000


class LogThrottle:
    """A throttle for one logger: the first sentence goes out at its level, repetitions at `debug`."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._last: dict[str, float] = {}  # when each sentence last came, on the monotonic clock; the latest last

    def say(self, level: int, sentence: str) -> None:
        """Log the sentence at `level`; at `debug` if it came less than `QUIET` seconds ago."""
        now = time.monotonic()
        repeated = now < self._last.pop(sentence, -QUIET) + QUIET
        if len(self._last) >= _MOST:
            del self._last[next(iter(self._last))]
        self._last[sentence] = now
        self._log.log(logging.DEBUG if repeated else level, "%s", sentence)
