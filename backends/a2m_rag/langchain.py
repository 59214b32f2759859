"""A LangChain retriever, or the retriever of a vector store, as a service.

A result is a document: its id, its page_content as `content`, and its metadata.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from a2m_rag.importing import library, made
from a2m_rag.mapping import shown
from a2m_rag.service import ByWords, CannotStart, Result
from a2m_rag.threads import Threads


def langchain_service(reference: str) -> "LangChainService":
    """Return the service of a retriever or vector store, or of a function that returns one, at `module:name`.

    Raises CannotStart.
    """
    retrievers = library("langchain_core.retrievers", "langchain")
    found = made(reference)
    if hasattr(found, "as_retriever"):
        found = found.as_retriever()
    if not isinstance(found, retrievers.BaseRetriever):
        raise CannotStart(f"{reference}: expected a LangChain retriever or vector store, got {shown(found)}")
    return LangChainService(reference, found)


class LangChainService(ByWords):
    """The `Service` of a retriever. It passes the limit, as `k`, to retrievers that support that."""

    def __init__(self, reference: str, retriever: Any) -> None:
        self._reference = reference
        self._retrieve = _search_function(retriever)
        self._threads = Threads()

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        def documents() -> list[Result]:
            return [_result(document) for document in self._retrieve(query, limit)]

        found: list[Result] = await self._threads.run(self._reference, documents)
        return found


def _result(document: Any) -> Result:
    if not hasattr(document, "page_content"):
        return Result(document, unusable=f"expected a document, got {shown(document)}")
    id = None if document.id is None else str(document.id)
    return Result({"content": document.page_content, "metadata": document.metadata}, id=id)


def _search_function(retriever: Any) -> Callable[[str, int], Any]:
    """Return the function that asks the retriever for a number of documents."""
    vectorstores = library("langchain_core.vectorstores", "langchain")
    search = inspect.signature(retriever._get_relevant_documents).parameters
    if isinstance(retriever, vectorstores.VectorStoreRetriever) or "k" in search:
        return lambda query, limit: retriever.invoke(query, k=limit)
    for name in ("k", "top_k"):
        if name in type(retriever).model_fields:
            # a copy, because a concurrent search may need another limit
            return partial(_invoked_on_a_copy, retriever, name)
    return lambda query, _limit: retriever.invoke(query)


def _invoked_on_a_copy(retriever: Any, name: str, query: str, limit: int) -> Any:
    return retriever.model_copy(update={name: limit}).invoke(query)
