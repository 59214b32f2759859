"""Conditions that last: the log reports each once when it begins and once when it ends."""

import logging
from collections.abc import Hashable, Iterator


class Alerts:
    """The logged conditions of one part of the program that hold now.

    Any hashable value names a condition. A condition whose cause changes is logged again.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._causes: dict[Hashable, str | None] = {}

    def begin(self, condition: Hashable, level: int, sentence: str, *, cause: str | None = None) -> None:
        """Note that the condition holds. Log the sentence, unless it already held with the same cause."""
        if condition not in self._causes or self._causes[condition] != cause:
            self._causes[condition] = cause
            self._log.log(level, "%s", sentence)

    def end(self, condition: Hashable, sentence: str | None = None) -> None:
        """Note that the condition is over. Log the sentence, if there is one and the condition held."""
        if condition in self._causes:
            del self._causes[condition]
            if sentence is not None:
                self._log.info("%s", sentence)

    def cause(self, condition: Hashable) -> str | None:
        """Return the cause of a condition; None if it does not hold or has no cause."""
        return self._causes.get(condition)

    def __contains__(self, condition: Hashable) -> bool:
        return condition in self._causes

    def __iter__(self) -> Iterator[Hashable]:
        return iter(list(self._causes))
