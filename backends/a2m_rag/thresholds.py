"""A threshold for what a search finds: a service by vectors always finds something, however far away it is.

Rules:
- A similarity must be at least the threshold, a distance at most; what is as far away as that counts.
- Each result is judged by itself, and before it has a rank: ranks are given to what is left.
- A result whose score cannot be read is left out, and the log says so once. If no score of an answer can be read, no
  result of it is usable: a path that is wrong must not look like a service that has nothing.
- Only searches have scores. What is listed is listed whole.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from decimal import Decimal
from numbers import Real
from typing import Any, Final

import msgspec
from msgspec import Raw

from a2m_rag.mapping import Path, has, shown
from a2m_rag.service import Result, Service, ServiceFailure

log = logging.getLogger(__name__)

SIMILARITY: Final = "--min-score"
DISTANCE: Final = "--max-distance"


class Threshold(msgspec.Struct, frozen=True):
    """How near a result must be.

    option: SIMILARITY or DISTANCE, which it was said by.
    value: the least similarity, or the greatest distance.
    """

    option: str
    value: float

    def admits(self, score: float) -> bool:
        """Whether a result with this similarity or distance is near enough; NaN never is."""
        return score >= self.value if self.option == SIMILARITY else score <= self.value


class NearService:
    """A `Service`: what another one finds, what is not near enough marked as left out.

    Mutable state: whether the log has said that a score cannot be read.
    """

    def __init__(self, service: Service, path: Path, threshold: Threshold) -> None:
        self._service = service
        self._path = path
        self._threshold = threshold
        self._has_said = False

    @property
    def lists(self) -> bool:
        return self._service.lists

    @property
    def metric(self) -> str | None:
        return self._service.metric

    async def dimensions(self) -> int | None:
        return await self._service.dimensions()

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        return await self._service.listed(most, vectors=vectors)

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        results = await self._service.search(query, vector, limit, vectors=vectors)
        judged: list[Result] = []
        unreadable: list[Result] = []
        for result in results:
            try:
                near = self._threshold.admits(_score(self._path, result.value))
            except ServiceFailure as failure:
                unreadable.append(msgspec.structs.replace(result, unusable=result.unusable or str(failure)))
                judged.append(msgspec.structs.replace(result, left_out="unreadable"))
            else:
                judged.append(result if near else msgspec.structs.replace(result, left_out="far"))
        if len(unreadable) == len(results):
            return unreadable
        if unreadable and not self._has_said:
            self._has_said = True
            log.warning(
                "%s %g: a result is left out, and so is every later one like it: %s",
                self._threshold.option,
                self._threshold.value,
                unreadable[0].unusable,
            )
        return judged


def _score(path: Path, value: Any) -> float:
    """The number that a path finds in a result. Raises ServiceFailure where that is no number."""
    found = path.find(value)
    if isinstance(found, Raw):  # a number with more digits than a float keeps
        return float(bytes(found))
    plain = found.tolist() if hasattr(found, "tolist") else found  # the numbers of libraries
    if isinstance(plain, Real | Decimal) and not isinstance(plain, bool) and not math.isnan(plain):
        return float(plain)
    there = has(value) if isinstance(value, Mapping) else f"the result is {shown(value)}"
    hint = "; to_number(…) takes a number out of a string" if isinstance(found, str) else ""
    raise ServiceFailure(f"expected its score, a number, at {path.text!r}, got {shown(found)}; {there}{hint}")
