"""A collection of a Qdrant server, or of a local folder of Qdrant's client, as a service.

A result is a point: its id, and the members of its payload.
"""

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from a2m_rag.importing import library
from a2m_rag.over_python import Embedding
from a2m_rag.service import CannotStart, Result, ServiceFailure, starting
from a2m_rag.threads import Threads
from a2m_rag.thresholds import DISTANCE, SIMILARITY, Threshold

API_KEY: Final = "QDRANT_API_KEY"
"""The environment variable with the key, for a server that requires one."""

_METRICS: Final = {"Cosine": "cosine", "Dot": "dot", "Euclid": "l2"}
_THRESHOLDS: Final = {"Cosine": SIMILARITY, "Dot": SIMILARITY, "Euclid": DISTANCE, "Manhattan": DISTANCE}

# the number of points in one read of a listing
_PAGE: Final = 1000


def qdrant_service(
    place: str,
    collection: str,
    embed: str | None,
    *,
    vector: str | None = None,
    timeout: float = 5.0,
    threshold: Threshold | None = None,
) -> "QdrantService":
    """Return the service of a collection.

    Args:
        place: the address of a server, or the path of a folder.
        collection: the name of the collection.
        embed: `module:function`, from texts to vectors; without it, only calls with a vector can be answered.
        vector: the name of the vectors to search, if the points have several.
        timeout: seconds for each request to a server.
        threshold: a similarity or a distance, whichever the collection uses to compare vectors.

    Raises:
        CannotStart: the place, the collection or the vectors do not exist, or the threshold is not of the kind that the
            collection uses.
    """
    qdrant = library("qdrant_client", "qdrant")
    threads = Threads()
    embedding = None if embed is None else Embedding(embed, threads)
    with starting(f"{place}: the collection {collection!r} cannot be opened"):
        client = _client(qdrant, place, timeout)
        names = sorted(each.name for each in client.get_collections().collections)
        if collection not in names:
            existing = f"its collections are: {', '.join(names)}" if names else "it has no collections"
            raise CannotStart(f"{place}: there is no collection {collection!r}; {existing}")
        config = client.get_collection(collection).config.params.vectors
    try:
        using, size, distance = _vectors(config, vector)
    except ValueError as problem:
        raise CannotStart(f"{place}: the collection {collection!r} {problem}") from None
    fitting = _THRESHOLDS.get(str(distance))
    if threshold is not None and threshold.option != fitting:
        client.close()
        instead = f"use {fitting} X instead of" if fitting else "no threshold is supported for that; leave out"
        raise CannotStart(
            f"{place}: the collection {collection!r} compares vectors by {distance}; {instead} {threshold.option}"
        )
    least = None if threshold is None else threshold.value
    return QdrantService(client, collection, using, size, _METRICS.get(str(distance)), embedding, threads, least)


def _client(qdrant: Any, place: str, timeout: float) -> Any:
    if place.startswith(("http://", "https://")):
        key = os.environ.get(API_KEY) or None
        return qdrant.QdrantClient(url=place, api_key=key, timeout=math.ceil(timeout), check_compatibility=False)
    if not (Path(place) / "meta.json").is_file():  # without this check, the client would create a collection
        raise CannotStart(
            f"{place}: expected a server's address like http://127.0.0.1:6333, or the folder of a local collection, "
            "which holds meta.json"
        )
    return qdrant.QdrantClient(path=place, force_disable_check_same_thread=True)


def _vectors(config: Any, wanted: str | None) -> tuple[str | None, int, Any]:
    """Return the name, width and distance of the selected vectors. If there are none, raises ValueError: why."""
    if not config:
        raise ValueError("has no dense vectors")
    named = config if isinstance(config, dict) else {None: config}
    if wanted is None and len(named) == 1:
        (wanted,) = named
    if wanted not in named:
        there = ", ".join(sorted(name for name in named if name is not None)) or "those without a name"
        raise ValueError(
            f"has several vectors, {there}; select one with --vector"
            if wanted is None
            else f"has no vectors {wanted!r}; there are: {there}"
        )
    found = named[wanted]
    return wanted, found.size, getattr(found.distance, "value", found.distance)


class QdrantService:
    """The `Service` of a collection.

    Args:
        threshold: the least similarity or the greatest distance of a point, in the measure of its collection.
    """

    lists = True

    def __init__(
        self,
        client: Any,
        collection: str,
        using: str | None,
        size: int,
        metric: str | None,
        embedding: Embedding | None,
        threads: Threads,
        threshold: float | None,
    ) -> None:
        self._what = f"the collection {collection!r}"
        self._client = client
        self._collection = collection
        self._using = using
        self._size = size
        self._embedding = embedding
        self._threads = threads
        self._threshold = threshold
        self.metric = metric

    def close(self) -> None:
        """Close the client."""
        with suppress(Exception):  # nothing was written, so nothing can be lost
            self._client.close()

    async def dimensions(self) -> int | None:
        return self._size

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        if vector is None:
            if self._embedding is None:
                raise ServiceFailure(
                    f"{self._what} has no embedding function, so it cannot search for a query in words; name a "
                    "function: --embed MODULE:FUNCTION"
                )
            vector = await self._embedding(query)
        numbers = list(vector)

        def found() -> list[Result]:
            answer = self._client.query_points(
                self._collection,
                query=numbers,
                using=self._using,
                limit=limit,
                score_threshold=self._threshold,
                with_payload=True,
                with_vectors=self._with(vectors),
            )
            return [self._result(point) for point in answer.points]

        results: list[Result] = await self._threads.run(self._what, found)
        return results

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        results: list[Result] = []
        after: Any = None
        while len(results) <= most:
            page, after = await self._threads.run(self._what, partial(self._page, after, vectors))
            results += page
            if after is None:
                break
        return results

    def _page(self, after: Any, vectors: bool) -> tuple[list[Result], Any]:
        points, following = self._client.scroll(
            self._collection, limit=_PAGE, offset=after, with_payload=True, with_vectors=self._with(vectors)
        )
        return [self._result(point) for point in points], following

    def _with(self, vectors: bool) -> Any:
        return [self._using] if vectors and self._using is not None else vectors

    def _result(self, point: Any) -> Result:
        vector = point.vector.get(self._using) if isinstance(point.vector, dict) else point.vector
        return Result(point.payload or {}, id=str(point.id), embedding=vector)
