"""A service that is a LlamaIndex retriever, or an index, which has one.

A result is a node: its id, its text as `content`, its metadata, and as `document` the id of what it was cut from.
"""

import copy
from collections.abc import Sequence
from typing import Any

from a2m_rag.importing import library, made
from a2m_rag.mapping import shown
from a2m_rag.service import ByWords, CannotStart, Result
from a2m_rag.threads import Threads


def llamaindex_service(reference: str) -> "LlamaIndexService":
    """The service of the retriever, or index, or function that makes one, at `module:name`. Raises CannotStart."""
    retrievers = library("llama_index.core.base.base_retriever", "llamaindex")
    schema = library("llama_index.core.schema", "llamaindex")
    found = made(reference)
    if hasattr(found, "as_retriever"):
        found = found.as_retriever()
    if not isinstance(found, retrievers.BaseRetriever):
        raise CannotStart(f"{reference} is {shown(found)}, and no LlamaIndex retriever")
    return LlamaIndexService(reference, found, schema.MetadataMode.NONE)


class LlamaIndexService(ByWords):
    """A `Service`. How many nodes are wanted is told to retrievers that have a `similarity_top_k`.

    Args:
        bare: the library's name for a text without metadata in it.
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
                # a copy, since another search may be under way that wants another number
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
