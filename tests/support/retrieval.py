"""A retrieval service that a test controls, and calls to the server in front of it."""

import json
from collections.abc import Sequence
from typing import Any

from a2m_rag.mapping import Path, Paths
from a2m_rag.server import SearchLimits, Server
from a2m_rag.service import Result
from a2m_router.protocol.server.stdio import LOCAL

PATHS = Paths(
    content=Path("content"),
    id=Path("id"),
    created_at=Path("at"),
    metadata=Path("metadata"),
    uri=Path("uri"),
    role=Path("role"),
    group=Path("group"),
)


class Corpus:
    """A service that answers every query with its values, in one order, and records each query with its limit."""

    def __init__(self, *values: Any, lists: bool = True, metric: str | None = None) -> None:
        self.values = list(values)
        self.lists = lists
        self.metric = metric
        self.asked: list[tuple[str, int]] = []

    async def dimensions(self) -> int | None:
        return 2

    def _result(self, value: Any, vectors: bool) -> Result:
        return Result(value, embedding=None if self.metric is None else [0.5, 2.0])

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        self.asked.append((query, limit))
        return [self._result(value, vectors) for value in self.values[:limit]]

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        return [self._result(value, vectors) for value in self.values[: most + 1]]


def server(service: Any, **limits: Any) -> Server:
    return Server(service, PATHS, name="corpus", limits=SearchLimits(**limits))


def message(method: str, params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}).encode()


async def answer(served: Server, method: str, **params: Any) -> Any:
    reply = await served(message(method, params), LOCAL)
    assert reply is not None
    return json.loads(reply)


async def ask(served: Server, method: str, **params: Any) -> Any:
    reply = await answer(served, method, **params)
    return reply["result"]


async def contents(served: Server, method: str = "recall", **params: Any) -> list[str]:
    return [record["content"] for record in (await ask(served, method, **params))["records"]]


async def refused(served: Server, method: str, **params: Any) -> tuple[int, str]:
    error = (await answer(served, method, **params))["error"]
    if error["code"] == -32603:
        assert error["data"]["reason"] == error["message"]
    return error["code"], error["message"]


class Moody(Corpus):
    """A service whose searches fail with `failure`."""

    failure: Exception | None = None

    async def search(self, query: str, vector: Any, limit: int, *, vectors: bool) -> list[Result]:
        if self.failure is not None:
            raise self.failure
        return await super().search(query, vector, limit, vectors=vectors)


async def unanswered(served: Server, method: str = "recall", **params: Any) -> int | None:
    """Return how often in a row the service has not answered, by the error's data; None if the error lacks it."""
    error = (await answer(served, method, **params))["error"]
    assert (error["code"], error["data"]["reason"]) == (-32603, error["message"])
    times: int | None = error["data"].get("unanswered")
    return times
