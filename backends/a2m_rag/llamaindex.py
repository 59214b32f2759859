"""A LlamaIndex retriever, or the retriever of an index, as a service.

A result is a node: its id, its text as `content`, its metadata, and the id of its source document as `document`.
"""

import copy
from collections.abc import Sequence
from typing import Any

from a2m_rag.importing import library, made
from a2m_rag.mapping import shown
from a2m_rag.service import ByWords, CannotStart, Result
from a2m_rag.threads import Threads


def llamaindex_service(reference: str) -> "LlamaIndexService":
    """Return the service of a retriever or index, or of a function that returns one, at `module:name`.

    Raises CannotStart.
    """
    retrievers = library("llama_index.core.base.base_retriever", "llamaindex")
    schema = library("llama_index.core.schema", "llamaindex")
    found = made(reference)
    if hasattr(found, "as_retriever"):
        found = found.as_retriever()
    if not isinstance(found, retrievers.BaseRetriever):
        raise CannotStart(f"{reference}: expected a LlamaIndex retriever or index, got {shown(found)}")
    return LlamaIndexService(reference, found, schema.MetadataMode.NONE)


class LlamaIndexService(ByWords):
    """The `Service` of a retriever. It passes the limit to retrievers that have a `similarity_top_k`.

    Args:
        reference: the name of the retriever in error messages.
        retriever: the retriever.
        bare: the library's constant for a text without metadata in it.
    """

    def __init__(self, reference: str, retriever: Any, bare: Any) -> None:
        self._reference = reference
        self._retriever = retriever
        self._bare = bare
        self._threads = Threads()

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        def nodes() -> list[Result]:
            retriever = self._retriever
            if hasattr(retriever, "similarity_top_k"):
                # a copy, because a concurrent search may need another limit
                retriever = copy.copy(retriever)
                retriever.similarity_top_k = limit
            return [self._result(found) for found in retriever.retrieve(query)]

        found: list[Result] = await self._threads.run(self._reference, nodes)
        return found

    def _result(self, found: Any) -> Result:
        node = found.node
        content = node.get_content(metadata_mode=self._bare)
        value = {"content": content, "metadata": node.metadata, "document": node.ref_doc_id, "score": found.score}
        return Result(value, id=node.node_id)
