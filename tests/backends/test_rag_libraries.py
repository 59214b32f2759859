"""a2m-rag with the real libraries: LangChain, LlamaIndex, Chroma and Qdrant, which only these tests import."""

import errno
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path as FilePath
from typing import Any, Final

import numpy as np
import pytest

from a2m_rag.chroma import chroma_service
from a2m_rag.langchain import langchain_service
from a2m_rag.llamaindex import llamaindex_service
from a2m_rag.mapping import THE_REST, Path, Paths
from a2m_rag.over_python import Embedding
from a2m_rag.qdrant import QdrantService, qdrant_service
from a2m_rag.server import SearchLimits, Server
from a2m_rag.service import CannotStart, Service
from a2m_rag.threads import Threads
from a2m_rag.thresholds import NearService, Threshold
from tests.support.addresses import reserved_port
from tests.support.retrieval import answer, ask, contents, refused

TEXTS: Final[dict[str, tuple[str, list[float], dict[str, Any]]]] = {
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

# Chroma's own warning for a collection without an embedding function
pytestmark = pytest.mark.filterwarnings("ignore:legacy embedding function config:DeprecationWarning")


def served(service: Service, paths: Paths = BY_METADATA, **limits: Any) -> Server:
    return Server(service, paths, name="handbook", limits=SearchLimits(timeout=PATIENCE, **limits))


def near(service: Service, path: str, least: float) -> Server:
    return served(NearService(service, Path(path), Threshold("--min-score", least)))


def embed(texts: list[str]) -> list[list[float]]:
    """Return one vector for each text: that of the page that it begins like, else another one."""
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
    with pytest.raises(CannotStart, match=rf"^{module} is not installed; .*: pip install '\.\[{extra}\]'$"):
        make()


@pytest.mark.process
def test_no_library_is_loaded_that_is_not_used(tmp_path: FilePath) -> None:
    (tmp_path / "loaded.py").write_text(
        "import sys\n"
        "def search(query, limit):\n"
        "    wanted = ('chromadb', 'qdrant_client', 'langchain_core', 'llama_index', 'mcp', 'jsonschema')\n"
        "    return ['loaded: ' + name for name in wanted if name in sys.modules]\n"
    )
    command = [sys.executable, "-m", "a2m_rag.cli", "python", "loaded:search"]
    call = {"jsonrpc": "2.0", "id": 1, "method": "memory/recall", "params": {"query": "x"}}
    environment = {"PYTHONPATH": str(FilePath.cwd())}
    done = subprocess.run(
        command, input=json.dumps(call).encode(), capture_output=True, cwd=tmp_path, env=environment, timeout=PATIENCE
    )
    assert json.loads(done.stdout)["result"] == {"records": []}


# --- LangChain


def named(monkeypatch: pytest.MonkeyPatch, thing: Any) -> str:
    """Return a name for an object, as on a command line."""
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
        found: list[Any] = documents

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            if query == "fail":
                raise ValueError("no index")
            return self.found[: self.k]

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
    holes = served(langchain_service(named(monkeypatch, Fixed(k=9))))
    documents[1:1] = [None, 5]  # type: ignore[list-item]  # results that a retriever must not return
    assert len(await contents(holes, query="x")) == 3
    assert (await refused(server, "recall", query="fail"))[1].endswith("raised ValueError: no index")
    for way in (store, store.as_retriever(search_kwargs={"k": 1}), lambda: store.as_retriever()):
        found = await contents(served(langchain_service(named(monkeypatch, way))), query="x", limit=3)
        assert len(found) == 3
    ranked = [
        Document(page_content=str(score), metadata={"relevance_score": score})
        for score in (0.75, np.float32(0.5), 0.25)
    ]
    close = near(langchain_service(named(monkeypatch, Fixed(found=ranked))), "metadata.relevance_score", 0.5)
    assert await contents(close, query="x") == ["0.75", "0.5"]
    with pytest.raises(CannotStart, match="expected a LangChain retriever or vector store, got a list"):
        langchain_service(named(monkeypatch, [1]))


# --- LlamaIndex


@pytest.mark.anyio
async def test_a_llamaindex_retriever_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_index.core import VectorStoreIndex
    from llama_index.core.embeddings import MockEmbedding
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeRelationship, NodeWithScore, RelatedNodeInfo, TextNode

    of = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="handbook.pdf")}
    nodes = [
        TextNode(id_=id, text=text, embedding=vector, metadata=more, relationships=of)
        for id, (text, vector, more) in TEXTS.items()
    ]
    index = VectorStoreIndex(nodes=nodes, embed_model=MockEmbedding(embed_dim=2))

    class Scored(BaseRetriever):
        def _retrieve(self, query: Any) -> Any:
            scores = (0.5, 0.25, None)
            return [NodeWithScore(node=node, score=score) for node, score in zip(nodes, scores, strict=True)]

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
    assert await contents(near(llamaindex_service(named(monkeypatch, Scored())), "score", 0.5), query="x") == [
        "Expenses are paid on the 15th."
    ]
    with pytest.raises(CannotStart, match="expected a LlamaIndex retriever or index, got an object"):
        llamaindex_service(named(monkeypatch, {}))


# --- Chroma


@pytest.fixture(scope="module")
def chroma(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[FilePath, Any]]:
    """Yield a database's path, and the client that has made it."""
    import chromadb
    from chromadb.config import Settings

    path = tmp_path_factory.mktemp("chroma")
    client: Any = chromadb.PersistentClient(path=str(path), settings=Settings(anonymized_telemetry=False))
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
    holes = client.create_collection("holes", embedding_function=None)
    holes.add(ids=["a", "b"], embeddings=[[1.0, 0.0], [0.6, 0.8]], metadatas=[{"team": "people"}, None])
    holes.add(ids=["c"], embeddings=[[0.0, 1.0]], documents=["a page"])
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
    assert "expected a list of one vector" in (await refused(wrong, "recall", query="x"))[1]


@pytest.mark.anyio
async def test_an_empty_chroma_collection_is_served(chroma: tuple[FilePath, Any]) -> None:
    server = served(chroma_service(chroma[0], "empty", f"{__name__}:embed"))
    assert (await ask(server, "describe"))["embeddings"]["dimensions"] is None
    assert await contents(server, query="x") == await contents(server, "timeline") == []


@pytest.mark.anyio
async def test_a_chroma_collection_leaves_out_what_is_too_far(chroma: tuple[FilePath, Any]) -> None:
    def within(distance: float) -> Server:
        threshold = Threshold("--max-distance", distance)
        return served(chroma_service(chroma[0], "handbook", f"{__name__}:embed", threshold))

    assert await contents(within(0.5), query="Expenses") == ["Expenses are paid on the 15th.", "Tea is in the kitchen."]
    assert await contents(within(0.25), embedding=[0.6, 0.8]) == [
        "Tea is in the kitchen.",
        "The office opens at eight.",
    ]
    assert await contents(within(-0.5), query="Expenses") == []
    assert len(await contents(within(0.0), "timeline")) == 3
    with pytest.raises(CannotStart, match="Chroma measures distances"):
        chroma_service(chroma[0], "handbook", None, Threshold("--min-score", 0.5))


@pytest.mark.anyio
async def test_rows_without_a_document_are_left_out(
    chroma: tuple[FilePath, Any], caplog: pytest.LogCaptureFixture
) -> None:
    await check_holes(served(chroma_service(chroma[0], "holes", f"{__name__}:embed")))
    [line] = [each for each in caplog.messages if "left out" in each]
    assert "expected its content, a string, at 'content', got nothing" in line


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


OTHERS: Final = """
import sys, chromadb
from chromadb import EmbeddingFunction
from chromadb.utils.embedding_functions import (
    OpenAIEmbeddingFunction, SentenceTransformerEmbeddingFunction, register_embedding_function,
)

@register_embedding_function
class Letters(EmbeddingFunction):
    def __init__(self):
        pass
    def __call__(self, input):
        return [[1.0, 0.0] if "15th" in text else [0.0, 1.0] for text in input]
    @staticmethod
    def name():
        return "letters-of-another-process"
    @staticmethod
    def build_from_config(config):
        return Letters()
    def get_config(self):
        return {}

client = chromadb.PersistentClient(path=sys.argv[1])
for name, function in (
    ("custom", Letters()),
    ("package", SentenceTransformerEmbeddingFunction("m" * 400)),
    ("key", OpenAIEmbeddingFunction(api_key_env_var="KEY_OF_ANOTHER_PROCESS")),
):
    client.create_collection(name, embedding_function=function).add(
        ids=["expenses", "office"],
        embeddings=[[1.0, 0.0], [0.0, 1.0]],
        documents=["Expenses are paid on the 15th.", "The office opens at eight."],
    )
"""
# packages with no more than the embedding functions need when they are made
PACKAGES: Final = {
    "sentence_transformers.py": "class SentenceTransformer:\n    def __init__(self, *_, **__):\n        pass\n",
    "openai.py": "class OpenAI:\n    def __init__(self, **_):\n        pass\n",
}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    """Return a database whose collections another process made, which had what their embedding functions need."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "db").mkdir()
    for name, source in PACKAGES.items():
        (folder / name).write_text(source)
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "KEY_OF_ANOTHER_PROCESS": "a-key",
        "ANONYMIZED_TELEMETRY": "0",
    }
    subprocess.run(
        [sys.executable, "-c", OTHERS, str(folder / "db")],
        check=True,
        env=environment,
        timeout=PATIENCE,
        capture_output=True,
    )
    return folder / "db"


@pytest.mark.process
@pytest.mark.anyio
@pytest.mark.parametrize("collection", ["custom", "package", "key"])
async def test_a_collection_whose_function_is_missing_is_served_by_another(
    collection: str, elsewhere: FilePath
) -> None:
    server = served(chroma_service(elsewhere, collection, f"{__name__}:embed"))
    assert (await ask(server, "describe"))["embeddings"]["dimensions"] == 2
    assert await contents(server, query="Expenses", limit=1) == ["Expenses are paid on the 15th."]
    assert await contents(server, embedding=[0.0, 1.0], limit=1) == ["The office opens at eight."]
    assert len(await contents(server, "timeline")) == 2
    assert await contents(server, where={"id": "office"}) == ["The office opens at eight."]


@pytest.mark.process
@pytest.mark.parametrize(
    ("collection", "said"),
    [
        (
            "custom",
            "'letters-of-another-process', which cannot be created here: no function with this name is registered",
        ),
        (
            "package",
            "'sentence_transformer', which cannot be created here: The sentence_transformers python package is not",
        ),
        (
            "key",
            "'openai', which cannot be created here: The (openai python package|KEY_OF_ANOTHER_PROCESS environment)",
        ),
    ],
)
def test_a_collection_whose_function_is_missing_says_what_is_missing(
    collection: str, said: str, elsewhere: FilePath
) -> None:
    with pytest.raises(CannotStart, match=said) as refusal:
        chroma_service(elsewhere, collection, None)
    assert str(refusal.value).startswith(f"{elsewhere}: the collection {collection!r} ")
    assert "--embed MODULE:FUNCTION" in str(refusal.value)


@pytest.mark.process
def test_a_key_that_is_missing_is_named(elsewhere: FilePath, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(elsewhere.parent))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(CannotStart, match="The KEY_OF_ANOTHER_PROCESS environment variable is not set"):
        chroma_service(elsewhere, "key", None)
    monkeypatch.setenv("KEY_OF_ANOTHER_PROCESS", "a-key")
    chroma_service(elsewhere, "key", None)


def test_a_chroma_database_that_is_not_there_is_not_made(chroma: tuple[FilePath, Any], tmp_path: FilePath) -> None:
    with pytest.raises(CannotStart, match="there is no Chroma database here"):
        chroma_service(tmp_path, "handbook", None)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(
        CannotStart, match="there is no collection 'other'; its collections are: empty, handbook, holes"
    ):
        chroma_service(chroma[0], "other", None)


# --- Qdrant

BY_PAYLOAD = Paths(content=Path("text"), created_at=Path("created_at"), metadata=THE_REST)


@pytest.fixture(scope="module")
def qdrant(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the path of a folder with collections."""
    from qdrant_client import QdrantClient, models

    path = str(tmp_path_factory.mktemp("qdrant"))
    client = QdrantClient(path=path)
    vectors = models.VectorParams(size=2, distance=models.Distance.COSINE)
    points = list(enumerate(TEXTS.values()))
    client.create_collection("handbook", vectors_config=vectors)
    client.create_collection("two", vectors_config={"words": vectors, "looks": vectors})
    shapes: dict[str, Callable[[Any], Any]] = {
        "handbook": lambda vector: vector,
        "two": lambda vector: {"words": vector},
    }
    for name, of in shapes.items():
        client.upsert(
            name,
            [
                models.PointStruct(id=number, vector=of(vector), payload={"text": text, **more})
                for number, (text, vector, more) in points
            ],
        )
    client.create_collection("holes", vectors_config=vectors)
    payloads: dict[int, dict[str, Any] | None] = {1: {}, 2: {"text": None}, 3: {"text": "a page"}, 4: None}
    client.upsert(
        "holes",
        [
            models.PointStruct(id=n, vector=[0.0, 1.0] if n == 3 else [1.0, 0.0], payload=payload)
            for n, payload in payloads.items()
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
@pytest.mark.parametrize(
    ("distance", "option", "value", "other"),
    [
        ("Cosine", "--min-score", 0.5, "--max-distance"),
        ("Dot", "--min-score", 0.5, "--max-distance"),
        ("Euclid", "--max-distance", 1.0, "--min-score"),
        ("Manhattan", "--max-distance", 1.3, "--min-score"),
    ],
)
async def test_a_qdrant_collection_leaves_out_what_is_too_far(
    distance: str, option: str, value: float, other: str, tmp_path: FilePath
) -> None:
    from qdrant_client import QdrantClient, models

    client = QdrantClient(path=str(tmp_path))
    client.create_collection("c", vectors_config=models.VectorParams(size=2, distance=models.Distance(distance)))
    client.upsert(
        "c",
        [
            models.PointStruct(id=number, vector=vector, payload={"text": text})
            for number, (text, vector, _) in enumerate(TEXTS.values())
        ],
    )
    client.close()
    with pytest.raises(CannotStart, match=f"compares vectors by {distance}; use {option} X instead of {other}"):
        qdrant_service(str(tmp_path), "c", None, threshold=Threshold(other, value))
    service = qdrant_service(str(tmp_path), "c", f"{__name__}:embed", threshold=Threshold(option, value))
    try:
        server = served(service, BY_PAYLOAD)
        found = (await ask(server, "recall", query="Expenses"))["records"]
        assert [(record["content"], record["score"]) for record in found] == [
            ("Expenses are paid on the 15th.", 1.0),
            ("Tea is in the kitchen.", 0.5),
        ]
        assert len(await contents(server, "timeline")) == 3
    finally:
        service.close()


@pytest.mark.anyio
async def test_points_without_a_text_are_left_out(qdrant: str, caplog: pytest.LogCaptureFixture) -> None:
    service = qdrant_service(qdrant, "holes", f"{__name__}:embed")
    try:
        await check_holes(served(service, BY_PAYLOAD))
    finally:
        service.close()
    assert len([each for each in caplog.messages if "left out" in each]) == 1


@pytest.mark.anyio
async def test_words_without_a_function_are_refused_by_qdrant_in_a_sentence(qdrant: str) -> None:
    service: QdrantService = qdrant_service(qdrant, "handbook", None)
    try:
        server = served(service, BY_PAYLOAD)
        assert "name a function: --embed MODULE:FUNCTION" in (await refused(server, "recall", query="x"))[1]
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
        service = QdrantService(client, "handbook", None, 2, "cosine", embedding, threads, None)
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
async def test_a_collection_is_down_when_the_maker_of_its_vectors_is(chroma: tuple[FilePath, Any], qdrant: str) -> None:
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
        ("other", None, "there is no collection 'other'; its collections are: handbook, holes, two"),
        ("two", None, "the collection 'two' has several vectors, looks, words; select one with --vector"),
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


# --- Chroma and Qdrant


async def check_holes(server: Server) -> None:
    """Check a collection of which one row is a record; to no vector it is the nearest."""
    for params in ({"query": "x"}, {"query": "x", "limit": 1}, {"embedding": [1.0, 0.0], "limit": 1}, {}):
        assert await contents(server, **params) == ["a page"]
    assert await contents(server, "timeline") == ["a page"]
    [record] = (await ask(server, "timeline"))["records"]
    assert await contents(server, where={"id": record["id"]}) == ["a page"]


async def check_vectors(server: Server) -> None:
    """Check that callers' vectors are used, the collection's are returned, and every record is listed."""
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
