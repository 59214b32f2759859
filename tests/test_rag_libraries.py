"""a2m-rag with the libraries themselves: LangChain, LlamaIndex, Chroma and Qdrant, each imported once, here only."""

import errno
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Any

import pytest

from backends.rag.chroma import chroma_service
from backends.rag.langchain import langchain_service
from backends.rag.llamaindex import llamaindex_service
from backends.rag.mapping import THE_REST, Path, Paths
from backends.rag.over_python import Embedding
from backends.rag.qdrant import QdrantService, qdrant_service
from backends.rag.server import Limits, Server
from backends.rag.service import CannotStart, Service
from backends.rag.threads import Threads
from tests.addresses import reserved_port
from tests.test_rag import answer, ask, contents, refused

TEXTS = {
    "expenses": ("Expenses are paid on the 15th.", [1.0, 0.0], {"team": "finance", "created_at": "2024-05-01"}),
    "office": ("The office opens at eight.", [0.0, 1.0], {"team": "people"}),
    "tea": ("Tea is in the kitchen.", [0.6, 0.8], {"team": "people", "created_at": 1609459200}),
}
BY_METADATA = Paths(
    content=Path("content"),
    created_at=Path("metadata.created_at"),
    metadata=Path("metadata"),
    group=Path("document"),
)
PATIENCE = 60

# what Chroma says to itself of a collection without an embedding function
pytestmark = pytest.mark.filterwarnings("ignore:legacy embedding function config:DeprecationWarning")


def served(service: Service, paths: Paths = BY_METADATA, **limits: Any) -> Server:
    return Server(service, paths, name="handbook", limits=Limits(timeout=PATIENCE, **limits))


def embed(texts: list[str]) -> list[list[float]]:
    """One vector for each text: that of the page that it begins like, else another."""
    return [next((v for text, v, _ in TEXTS.values() if text.startswith(each)), [0.9, 0.1]) for each in texts]


async def embed_in_the_loop(texts: list[str]) -> list[list[float]]:
    return embed(texts)


def embed_far_away(texts: list[str]) -> list[list[float]]:
    raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def embed_nothing(texts: list[str]) -> list[list[float]]:
    return []


@pytest.mark.parametrize(
    ("module", "extra", "make"),
    [
        ("chromadb", "chroma", lambda: chroma_service(FilePath("x"), "c", None)),
        ("qdrant_client", "qdrant", lambda: qdrant_service("x", "c", None)),
        ("langchain_core", "langchain", lambda: langchain_service("x:y")),
        ("llama_index", "llamaindex", lambda: llamaindex_service("x:y")),
    ],
)
def test_a_library_that_is_missing_is_a_sentence(
    module: str, extra: str, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CannotStart, match=rf"^{module} is not installed; pip install 'a2m-router\[{extra}\]'$"):
        make()


def test_no_library_is_loaded_that_is_not_used(tmp_path: FilePath) -> None:
    (tmp_path / "loaded.py").write_text(
        "import sys\n"
        "def search(query, limit):\n"
        "    wanted = ('chromadb', 'qdrant_client', 'langchain_core', 'llama_index')\n"
        "    return ['loaded: ' + name for name in wanted if name in sys.modules]\n"
    )
    command = [sys.executable, "-m", "backends.rag.cli", "python", "loaded:search"]
    call = {"jsonrpc": "2.0", "id": 1, "method": "memory/recall", "params": {"query": "x"}}
    environment = {"PYTHONPATH": str(FilePath.cwd())}
    done = subprocess.run(
        command, input=json.dumps(call).encode(), capture_output=True, cwd=tmp_path, env=environment, timeout=PATIENCE
    )
    assert json.loads(done.stdout)["result"] == {"records": []}


# --- LangChain


def named(monkeypatch: pytest.MonkeyPatch, thing: Any) -> str:
    """A name for it, as on a command line."""
    monkeypatch.setattr(sys.modules[__name__], "thing", thing, raising=False)
    return f"{__name__}:thing"


@pytest.mark.anyio
async def test_a_langchain_retriever_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from langchain_core.documents import Document
    from langchain_core.embeddings import DeterministicFakeEmbedding
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.vectorstores import InMemoryVectorStore

    documents = [Document(id=id, page_content=text, metadata=more) for id, (text, _, more) in TEXTS.items()]
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    store.add_documents(documents)

    class Fixed(BaseRetriever):
        k: int = 1

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            if query == "fail":
                raise ValueError("no index")
            return documents[: self.k]

    server = served(langchain_service(named(monkeypatch, Fixed())))
    assert await ask(server, "recall", query="x", limit=1) == {
        "records": [
            {
                "id": "expenses",
                "content": "Expenses are paid on the 15th.",
                "created_at": "2024-05-01T00:00:00.000Z",
                "metadata": {"team": "finance", "created_at": "2024-05-01"},
                "score": 1.0,
            }
        ]
    }
    assert await contents(server, query="x", limit=2, where={"team": "people"}) == [
        "The office opens at eight.",
        "Tea is in the kitchen.",
    ]
    assert await ask(server, "timeline") == {"records": []}
    assert (await refused(server, "recall", query="fail"))[1].endswith("raised ValueError: no index")
    for way in (store, store.as_retriever(search_kwargs={"k": 1}), lambda: store.as_retriever()):
        found = await contents(served(langchain_service(named(monkeypatch, way))), query="x", limit=3)
        assert len(found) == 3
    with pytest.raises(CannotStart, match="is a list, and no LangChain retriever"):
        langchain_service(named(monkeypatch, [1]))


# --- LlamaIndex


@pytest.mark.anyio
async def test_a_llamaindex_retriever_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="handbook.pdf")}
    nodes = [
        TextNode(id_=id, text=text, embedding=vector, metadata=more, relationships=of)
        for id, (text, vector, more) in TEXTS.items()
    ]
    index = VectorStoreIndex(nodes=nodes, embed_model=MockEmbedding(embed_dim=2))
    server = served(llamaindex_service(named(monkeypatch, index.as_retriever(similarity_top_k=1))))
    [record] = (await ask(server, "recall", query="x", limit=3, where={"id": "tea"}))["records"]
    assert record == {
        "id": "tea",
        "content": "Tea is in the kitchen.",
        "created_at": "2021-01-01T00:00:00.000Z",
        "metadata": {"team": "people", "created_at": 1609459200},
        "group": "handbook.pdf",
        "score": 1.0,
    }
    assert len(await contents(server, query="x", limit=2)) == 2
    assert len(await contents(served(llamaindex_service(named(monkeypatch, lambda: index))), query="x", limit=3)) == 3
    with pytest.raises(CannotStart, match="is an object, and no LlamaIndex retriever"):
        llamaindex_service(named(monkeypatch, {}))


# --- Chroma


@pytest.fixture(scope="module")
def chroma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FilePath, Any]]:
    """A database, and the client that has made it."""
    import chromadb
    from chromadb.config import Settings

    path = tmp_path_factory.mktemp("chroma")
    client = chromadb.PersistentClient(path=str(path), settings=Settings(anonymized_telemetry=False))
    collection = client.create_collection(
        "handbook", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
    )
    collection.add(
        ids=list(TEXTS),
        documents=[text for text, _, _ in TEXTS.values()],
        embeddings=[vector for _, vector, _ in TEXTS.values()],
        metadatas=[metadata for _, _, metadata in TEXTS.values()],
    )
    client.create_collection("empty", embedding_function=None, configuration={"hnsw": {"space": "ip"}})
    yield path, client
    importlib.import_module("chromadb.api.client").SharedSystemClient.clear_system_cache()


@pytest.mark.anyio
async def test_a_chroma_collection_is_served(chroma: tuple[FilePath, Any]) -> None:
    path, _ = chroma
    server = served(chroma_service(path, "handbook", f"{__name__}:embed"))
    described = await ask(server, "describe")
    assert described["capabilities"] == ["core", "embeddings"]
    assert described["embeddings"] == {"dimensions": 2, "metric": "cosine", "metrics": ["cosine"], "model": None}
    await check_vectors(server)
    assert (await ask(server, "recall", query="The office", limit=1))["records"] == [
        {
            "id": "office",
            "content": "The office opens at eight.",
            "created_at": "1970-01-01T00:00:00.000Z",
            "metadata": {"team": "people"},
            "score": 1.0,
        }
    ]
    by_words = served(chroma_service(path, "handbook", None))
    assert "has no embedding function of its own" in (await refused(by_words, "recall", query="x"))[1]
    assert await contents(by_words, embedding=[0, 1], limit=1) == ["The office opens at eight."]
    wrong = served(chroma_service(path, "handbook", f"{__name__}:embed_nothing"))
    assert "returned something else than a list of one vector" in (await refused(wrong, "recall", query="x"))[1]


@pytest.mark.anyio
async def test_an_empty_chroma_collection_is_served(chroma: tuple[FilePath, Any]) -> None:
    server = served(chroma_service(chroma[0], "empty", f"{__name__}:embed"))
    assert (await ask(server, "describe"))["embeddings"]["dimensions"] is None
    assert await contents(server, query="x") == await contents(server, "timeline") == []


@pytest.mark.anyio
async def test_a_chroma_collection_is_asked_by_its_own_function(chroma: tuple[FilePath, Any]) -> None:
    from chromadb import EmbeddingFunction
    from chromadb.utils.embedding_functions import known_embedding_functions, register_embedding_function

    if "pages" not in known_embedding_functions:

        @register_embedding_function
        class Pages(EmbeddingFunction[Any]):
            def __init__(self) -> None:
                pass

            def __call__(self, input: Any) -> Any:
                return embed(input)

            @staticmethod
            def name() -> str:
                return "pages"

            @staticmethod
            def build_from_config(config: dict[str, Any]) -> "Pages":
                return Pages()

            def get_config(self) -> dict[str, Any]:
                return {}

        own = chroma[1].create_collection("own", embedding_function=Pages())
        own.add(ids=list(TEXTS), documents=[text for text, _, _ in TEXTS.values()])
    server = served(chroma_service(chroma[0], "own", None))
    assert await contents(server, query="Tea", limit=1) == ["Tea is in the kitchen."]


def test_a_chroma_database_that_is_not_there_is_not_made(chroma: tuple[FilePath, Any], tmp_path: FilePath) -> None:
    with pytest.raises(CannotStart, match="there is no Chroma database here"):
        chroma_service(tmp_path, "handbook", None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CannotStart, match="there is no collection 'other'; there are: empty, handbook"):
        chroma_service(chroma[0], "other", None)


# --- Qdrant

BY_PAYLOAD = Paths(content=Path("text"), created_at=Path("created_at"), metadata=THE_REST)


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with collections."""
    from qdrant_client import QdrantClient, models

    path = str(tmp_path_factory.mktemp("qdrant"))
    client = QdrantClient(path=path)
    vectors = models.VectorParams(size=2, distance=models.Distance.COSINE)
    points = list(enumerate(TEXTS.values()))
    client.create_collection("handbook", vectors_config=vectors)
    client.create_collection("two", vectors_config={"words": vectors, "looks": vectors})
    for name, of in (("handbook", lambda vector: vector), ("two", lambda vector: {"words": vector})):
        client.upsert(
            name,
            [
                models.PointStruct(id=number, vector=of(vector), payload={"text": text, **more})
                for number, (text, vector, more) in points
            ],
        )
    client.close()
    return path


@pytest.mark.anyio
@pytest.mark.parametrize(("collection", "vector"), [("handbook", None), ("two", "words")])
async def test_a_qdrant_collection_is_served(qdrant: str, collection: str, vector: str | None) -> None:
    service = qdrant_service(qdrant, collection, f"{__name__}:embed_in_the_loop", vector=vector)
    try:
        server = served(service, BY_PAYLOAD)
        described = await ask(server, "describe")
        assert described["embeddings"] == {"dimensions": 2, "metric": "cosine", "metrics": ["cosine"], "model": None}
        await check_vectors(server)
        assert (await ask(server, "recall", query="The office", limit=1))["records"] == [
            {
                "id": "1",
                "content": "The office opens at eight.",
                "created_at": "1970-01-01T00:00:00.000Z",
                "metadata": {"team": "people"},
                "score": 1.0,
            }
        ]
    finally:
        service.close()


@pytest.mark.anyio
async def test_words_without_a_function_are_refused_by_qdrant_in_a_sentence(qdrant: str) -> None:
    service: QdrantService = qdrant_service(qdrant, "handbook", None)
    try:
        server = served(service, BY_PAYLOAD)
        assert "give a function: --embed MODULE:FUNCTION" in (await refused(server, "recall", query="x"))[1]
        assert await contents(server, embedding=[0, 1], limit=1) == ["The office opens at eight."]
    finally:
        service.close()


@pytest.mark.anyio
@pytest.mark.parametrize("embedded", [True, False])
async def test_a_qdrant_server_that_is_gone_is_down(embedded: bool) -> None:
    from qdrant_client import QdrantClient

    threads = Threads()
    with reserved_port() as port:
        client = QdrantClient(url=f"http://127.0.0.1:{port}", timeout=PATIENCE, check_compatibility=False)
        embedding = Embedding(f"{__name__}:embed", threads) if embedded else None
        service = QdrantService(client, "handbook", None, 2, "cosine", embedding, threads)
        server = served(service, BY_PAYLOAD)
        described = await ask(server, "describe")
        assert described["service"]["status"] == "down"
        assert described["embeddings"]["dimensions"] == 2
        asked: list[tuple[str, dict[str, Any]]] = [("recall", {"embedding": [0, 1]}), ("timeline", {})]
        if embedded:
            asked.append(("recall", {"query": "x"}))
        for times, (method, params) in enumerate(asked):
            assert (await answer(server, method, **params))["error"]["data"]["unanswered"] == 2 + times
        service.close()


@pytest.mark.anyio
async def test_a_collection_whose_vectors_are_made_elsewhere_is_down_when_that_is(
    chroma: tuple[FilePath, Any], qdrant: str
) -> None:
    embed = f"{__name__}:embed_far_away"
    in_qdrant = qdrant_service(qdrant, "handbook", embed)
    for service, paths in ((chroma_service(chroma[0], "handbook", embed), None), (in_qdrant, BY_PAYLOAD)):
        server = served(service) if paths is None else served(service, paths)
        assert (await ask(server, "describe"))["service"]["status"] == "down"
        assert (await answer(server, "recall", query="x"))["error"]["data"]["unanswered"] == 2
        assert len(await contents(server, embedding=[0, 1])) == len(TEXTS)
    in_qdrant.close()


@pytest.mark.parametrize(
    ("collection", "vector", "said"),
    [
        ("other", None, "there is no collection 'other'; there are: handbook, two"),
        ("two", None, "the collection 'two' has several vectors, looks, words; say which is meant: --vector"),
        ("two", "sounds", "the collection 'two' has no vectors 'sounds'; there are: looks, words"),
    ],
)
def test_a_qdrant_collection_that_is_not_there_is_a_sentence(
    collection: str, vector: str | None, said: str, qdrant: str
) -> None:
    with pytest.raises(CannotStart, match=said):
        qdrant_service(qdrant, collection, None, vector=vector)


def test_a_qdrant_that_is_not_there_is_not_made(tmp_path: FilePath) -> None:
    with pytest.raises(CannotStart, match="expected a server's address"):
        qdrant_service(str(tmp_path), "handbook", None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CannotStart, match="the collection 'handbook' cannot be opened"):
        qdrant_service("http://127.0.0.1:1", "handbook", None)


# --- what both have


async def check_vectors(server: Server) -> None:
    """Callers' vectors are used and the collection's returned, and everything is listed."""
    found = (await ask(server, "recall", embedding=[0.6, 0.8], query="ignored", embeddings=True))["records"]
    assert [record["content"] for record in found] == [TEXTS[id][0] for id in ("tea", "office", "expenses")]
    assert found[0]["embedding"] == pytest.approx([0.6, 0.8])
    [plain] = (await ask(server, "recall", embedding=[0.6, 0.8], limit=1))["records"]
    assert "embedding" not in plain
    assert (await answer(server, "recall", embedding=[1, 2, 3]))["error"]["code"] == -32008
    assert await contents(server, "timeline") == [TEXTS[id][0] for id in ("office", "tea", "expenses")]
    assert await contents(server, "timeline", limit=1) == [TEXTS["expenses"][0]]
    assert await contents(server, where={"team": "people"}) == [TEXTS[id][0] for id in ("tea", "office")]
    [whole] = (await ask(server, "timeline", embeddings=True, where={"team": "finance"}))["records"]
    assert whole["embedding"] == pytest.approx([1.0, 0.0])
