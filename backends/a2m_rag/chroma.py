"""A service that is a collection of a Chroma database, opened where it lies.

A result is an entry: its id, its document as `content`, and its metadata. Whoever writes to the database goes on doing
so: each question is put to what is there then.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from a2m_rag.importing import library
from a2m_rag.over_python import Embedding
from a2m_rag.service import CannotStart, Result, ServiceFailure, starting, told
from a2m_rag.threads import Threads
from a2m_rag.thresholds import DISTANCE, Threshold

_METRICS: Final = {"cosine": "cosine", "ip": "dot", "l2": "l2"}

# entries that are read at once when all are listed
_PAGE: Final = 1000


def chroma_service(
    path: Path, collection: str, embed: str | None, threshold: Threshold | None = None
) -> "ChromaService":
    """The service of a collection.

    Args:
        embed: `module:function`, from texts to vectors; None takes the collection's own embedding function.
        threshold: a distance, as Chroma measures it.

    Raises CannotStart: there is no such database, or no such collection in it.
    """
    chromadb = library("chromadb", "chroma")
    settings = library("chromadb.config", "chroma").Settings(anonymized_telemetry=False)
    if threshold is not None and threshold.option != DISTANCE:
        raise CannotStart(
            f"Chroma measures distances, and no similarities; say {DISTANCE} X instead of {threshold.option}"
        )
    if not (path / "chroma.sqlite3").is_file():  # else one would be made
        raise CannotStart(f"{path}: there is no Chroma database here; expected the folder that holds chroma.sqlite3")
    threads = Threads()
    embedding = None if embed is None else Embedding(embed, threads)
    with starting(f"{path}: the collection {collection!r} cannot be opened"):
        client = chromadb.PersistentClient(path=str(path), settings=settings)
        names = sorted(each.name for each in client.list_collections())
        if collection not in names:
            there = f"there are: {', '.join(names)}" if names else "there is none"
            raise CannotStart(f"{path}: there is no collection {collection!r}; {there}")
        # without a function of its own it would take one that is downloaded, and whose vectors mean something else
        found = client.get_collection(collection, embedding_function=None)
        if embedding is None:
            _check_embedding_function(f"{path}: the collection {collection!r}", found)
        return ChromaService(collection, found, embedding, threads, threshold)


def _check_embedding_function(what: str, collection: Any) -> None:
    """Raises CannotStart where a collection has an embedding function of its own that cannot be made here."""
    function = _embedding_function(collection)
    if function is None:
        return
    known = library("chromadb.utils.embedding_functions", "chroma").known_embedding_functions
    if function in known:
        try:
            _ = collection.configuration  # this makes the function
            return
        except Exception as problem:  # noqa: BLE001 - the function may be anybody's
            # Chroma puts the configuration before the reason, at any length
            why = told(problem.__context__ or problem)
    else:
        why = "nothing of that name is registered with Chroma in this process"
    raise CannotStart(
        f"{what} makes vectors with the embedding function {function!r}, which cannot be made here: {why}; provide "
        "what is missing, or give a function that makes the same vectors: --embed MODULE:FUNCTION"
    )


def _embedding_function(collection: Any) -> str | None:
    """The name of the embedding function that a collection was made with, None where it has none.

    It is read from the configuration as JSON: to read that as an object makes the function, which may be missing here.
    """
    registered = collection.configuration_json.get("embedding_function") or {"type": "legacy"}
    return None if registered["type"] == "legacy" else str(registered.get("name"))


class ChromaService:
    """A `Service`. Mutable state: the width of the vectors, once there is one."""

    lists = True

    def __init__(
        self,
        name: str,
        collection: Any,
        embedding: Embedding | None,
        threads: Threads,
        threshold: Threshold | None,
    ) -> None:
        self._what = f"the collection {name!r}"
        self._collection = collection
        self._embedding = embedding
        self._threads = threads
        self._threshold = threshold
        self._dimensions: int | None = None
        index = collection.configuration_json.get("hnsw") or collection.configuration_json.get("spann") or {}
        self.metric = _METRICS.get(index.get("space") or "l2")

    async def dimensions(self) -> int | None:
        def width() -> int | None:
            vectors = self._collection.get(limit=1, include=["embeddings"])["embeddings"]
            return len(vectors[0]) if len(vectors) else None

        if self._dimensions is None:
            self._dimensions = await self._threads.run(self._what, width)
        return self._dimensions

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        if vector is None and self._embedding is not None:
            vector = await self._embedding(query)
        asked = self._asked_in_words(query) if vector is None else {"query_embeddings": [list(vector)]}

        def found() -> list[Result]:
            answer = self._collection.query(**asked, n_results=limit, include=[*_included(vectors), "distances"])
            results = _results({name: rows[0] if rows else rows for name, rows in answer.items() if name in _ROWS})
            if self._threshold is None:
                return results
            admits = self._threshold.admits
            return [each for each, distance in zip(results, answer["distances"][0], strict=True) if admits(distance)]

        results: list[Result] = await self._threads.run(self._what, found)
        return results

    def _asked_in_words(self, query: str) -> dict[str, Any]:
        if _embedding_function(self._collection) is None:
            raise ServiceFailure(
                f"{self._what} has no embedding function of its own, so that a query in words cannot be searched for; "
                "give one: --embed MODULE:FUNCTION"
            )
        return {"query_texts": [query]}

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        results: list[Result] = []
        while len(results) <= most:
            page = await self._threads.run(self._what, partial(self._page, len(results), vectors))
            results += page
            if len(page) < _PAGE:
                break
        return results

    def _page(self, offset: int, vectors: bool) -> list[Result]:
        return _results(self._collection.get(limit=_PAGE, offset=offset, include=_included(vectors)))


_ROWS: Final = ("ids", "documents", "metadatas", "embeddings")


def _included(vectors: bool) -> list[str]:
    return ["documents", "metadatas", "embeddings"] if vectors else ["documents", "metadatas"]


def _results(columns: Any) -> list[Result]:
    """The rows of an answer, which comes as columns."""
    embeddings = columns["embeddings"]
    return [
        Result(
            {"content": document, "metadata": metadata},
            id=id,
            embedding=None if embeddings is None else embeddings[place].tolist(),
        )
        for place, (id, document, metadata) in enumerate(
            zip(columns["ids"], columns["documents"], columns["metadatas"], strict=True)
        )
    ]
