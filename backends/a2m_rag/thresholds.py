"""A threshold for the results of a search. A vector search always returns something, however far away it is.

Rules:
- A similarity must be at least the threshold, a distance at most. A value equal to the threshold is near enough.
- Each result is checked separately, before the ranks are assigned: only the remaining results have ranks.
- A result whose score cannot be read is left out, and logged once. If no score of an answer can be read, no result of
  it is usable: a wrong path must not look like a service without results.
- Only searches have scores. A listing is not filtered.
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

    option: SIMILARITY or DISTANCE, the option that set the value.
    value: the least similarity, or the greatest distance.
    """

    option: str
    value: float

    def admits(self, score: float) -> bool:
        """Return whether a result with this similarity or distance is near enough; NaN never is."""
        return score >= self.value if self.option == SIMILARITY else score <= self.value


class NearService:
    """A `Service` that marks the results of another one that are not near enough as left out.

    Mutable state: whether an unreadable score was logged.
    """

    def __init__(self, service: Service, path: Path, threshold: Threshold) -> None:
        self._service = service
        self._path = path
        self._threshold = threshold
        self._has_logged = False

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
        if unreadable and not self._has_logged:
            self._has_logged = True
            log.warning(
                "%s %g: result left out, and later ones like it without a further log line: %s",
                self._threshold.option,
                self._threshold.value,
                unreadable[0].unusable,
            )
        return judged


def _score(path: Path, value: Any) -> float:
    """Return the number at a path in a result. Raises ServiceFailure if there is no number."""
    found = path.find(value)
    if isinstance(found, Raw):  # a number with more digits than a float keeps
        return float(bytes(found))
    plain = found.tolist() if hasattr(found, "tolist") else found  # the numbers of libraries
    if isinstance(plain, Real | Decimal) and not isinstance(plain, bool) and not math.isnan(plain):
        return float(plain)
    there = has(value) if isinstance(value, Mapping) else f"the result is {shown(value)}"
    hint = "; to_number(…) converts a string to a number" if isinstance(found, str) else ""
    raise ServiceFailure(f"expected its score, a number, at {path.text!r}, got {shown(found)}; {there}{hint}")
