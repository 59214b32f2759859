"""A collection of a Chroma database as a service. The database is opened in its own folder.

A result is an entry: its id, its document as `content`, and its metadata. Other programs may write to the database
meanwhile: each search sees the current entries.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from a2m_rag.importing import library
from a2m_rag.over_python import Embedding
from a2m_rag.service import CannotStart, Result, ServiceFailure, message_of, starting
from a2m_rag.threads import Threads
from a2m_rag.thresholds import DISTANCE, Threshold

_METRICS: Final = {"cosine": "cosine", "ip": "dot", "l2": "l2"}

# the number of entries in one read of a listing
_PAGE: Final = 1000


def chroma_service(
    path: Path, collection: str, embed: str | None, threshold: Threshold | None = None
) -> "ChromaService":
    """Return the service of a collection.

    Args:
        path: the folder that holds chroma.sqlite3.
        collection: the name of the collection.
        embed: `module:function`, from texts to vectors; None uses the collection's own embedding function.
        threshold: a distance, as Chroma measures it.

    Raises:
        CannotStart: the database, the collection or its embedding function cannot be used, or the threshold is not a
            distance.
    """
    chromadb = library("chromadb", "chroma")
    settings = library("chromadb.config", "chroma").Settings(anonymized_telemetry=False)
    if threshold is not None and threshold.option != DISTANCE:
        raise CannotStart(
            f"Chroma measures distances, not similarities; use {DISTANCE} X instead of {threshold.option}"
        )
    if not (path / "chroma.sqlite3").is_file():  # without this check, Chroma would create a database
        raise CannotStart(f"{path}: there is no Chroma database here; expected the folder that holds chroma.sqlite3")
    threads = Threads()
    embedding = None if embed is None else Embedding(embed, threads)
    with starting(f"{path}: the collection {collection!r} cannot be opened"):
        client = chromadb.PersistentClient(path=str(path), settings=settings)
        names = sorted(each.name for each in client.list_collections())
        if collection not in names:
            existing = f"its collections are: {', '.join(names)}" if names else "it has no collections"
            raise CannotStart(f"{path}: there is no collection {collection!r}; {existing}")
        # None: by default Chroma would download a function, whose vectors do not fit those of the collection
        found = client.get_collection(collection, embedding_function=None)
        if embedding is None:
            _check_embedding_function(f"{path}: the collection {collection!r}", found)
        return ChromaService(collection, found, embedding, threads, threshold)


def _check_embedding_function(what: str, collection: Any) -> None:
    """Raise CannotStart if a collection has an embedding function of its own that cannot be created here."""
    function = _embedding_function(collection)
    if function is None:
        return
    known = library("chromadb.utils.embedding_functions", "chroma").known_embedding_functions
    if function in known:
        try:
            _ = collection.configuration  # this access creates the function
            return
        except Exception as problem:  # noqa: BLE001 - a function of any library may raise anything
            # Chroma's own message puts the whole configuration before the reason
            why = message_of(problem.__context__ or problem)
    else:
        why = "no function with this name is registered with Chroma in this process"
    raise CannotStart(
        f"{what} uses the embedding function {function!r}, which cannot be created here: {why}; install or configure "
        "what it needs, or name a function that makes the same vectors: --embed MODULE:FUNCTION"
    )


def _embedding_function(collection: Any) -> str | None:
    """Return the name of the embedding function that a collection was created with; None if it has none.

    It reads the configuration as JSON: Chroma's object of the configuration would create the function, which can fail.
    """
    registered = collection.configuration_json.get("embedding_function") or {"type": "legacy"}
    return None if registered["type"] == "legacy" else str(registered.get("name"))


class ChromaService:
    """The `Service` of a collection. Mutable state: the width of the vectors, once the collection has one."""

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
        arguments = self._query_in_words(query) if vector is None else {"query_embeddings": [list(vector)]}

        def found() -> list[Result]:
            answer = self._collection.query(**arguments, n_results=limit, include=[*_included(vectors), "distances"])
            results = _results({name: rows[0] if rows else rows for name, rows in answer.items() if name in _ROWS})
            if self._threshold is None:
                return results
            admits = self._threshold.admits
            return [each for each, distance in zip(results, answer["distances"][0], strict=True) if admits(distance)]

        results: list[Result] = await self._threads.run(self._what, found)
        return results

    def _query_in_words(self, query: str) -> dict[str, Any]:
        if _embedding_function(self._collection) is None:
            raise ServiceFailure(
                f"{self._what} has no embedding function of its own, so it cannot search for a query in words; name a "
                "function: --embed MODULE:FUNCTION"
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
    """Return the rows of an answer that consists of columns."""
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
