"""Mounts with foreign servers: fields they add, records they repeat or spoil, and private summaries."""

from typing import Any, Final

import pytest

from tests.servers.core_only import CoreOnly, Result
from tests.servers.habits import Habitual
from tests.servers.protocol import Params, Record
from tests.support.federated import Foreign, filled, settings_of
from tests.support.mounted import MEMORY, MOUNT, at, federation
from tests.support.summarizers import Thinker, thinking

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# A tier that is not configured as a mount and turns out to be one keeps the privacy of its configuration.
PRIVATE: Final = """
[tiers.working]
kind = "working"
command = ["-"]
[tiers.facts]
kind = "semantic"
command = ["-"]
shared = true
[tiers.old]
kind = "episodic"
command = ["-"]
"""
SECRET: Final = {"id": "1", "content": "The secret of alice is a harbour.", "created_at": at(-300), "owner": "alice"}


async def test_a_private_mounts_summary_is_published_on_purpose_only() -> None:
    """A summary of a private read-only tier is private, unless `into` names a shared tier."""
    old = filled(SECRET, read_only=True, where_on_timeline=True)
    async with thinking(Thinker(), settings_of(PRIVATE), servers={"old": old}) as fed:
        assert [each["id"] for each in await fed.timeline(owner="alice")] == ["old/1"]
        [summary] = (await fed.call("summarize", query="harbour secret", owner="alice"))["records"]
        assert (summary["tier"], summary["owner"]) == ("working", "alice")
        [summary] = (await fed.call("summarize", tier="old"))["records"]  # no owner given: it gets its sources' owner
        assert (summary["tier"], summary["owner"]) == ("working", "alice")
        assert await fed.timeline(owner="bob") == []
        counts = {tier["name"]: tier["count"] for tier in (await fed.call("describe", owner="bob"))["tiers"]}
        assert counts == {"working": 0, "facts": 0, "old": 0}
        [summary] = (await fed.call("summarize", tier="old", into="facts", owner="alice"))["records"]
        assert [each["id"] for each in await fed.timeline(owner="bob")] == [summary["id"]]


class HasASimilarity(Habitual):
    """Adds a field `similarity` of its own."""

    def told(self, record: Record) -> Record:
        return {**record, "similarity": 99 if "far" in record["id"] else 0.1}


@pytest.mark.parametrize("capabilities", [(), ("embeddings",)])
async def test_a_field_that_a_server_calls_similarity_decides_nothing(capabilities: tuple[str, ...]) -> None:
    servers = {"notes": Foreign(kind=HasASimilarity, capabilities=capabilities)}
    async with federation(MEMORY, servers) as fed:
        near = {"id": "near", "content": "x", "embedding": [1.0, 0.0]}
        far = {"id": "far", "content": "x", "embedding": [-1.0, 0.0], "tier": "notes"}
        await fed.call("remember", records=[near, far])
        assert await fed.ids("recall", embedding=[1.0, 0.0]) == ["near", "far"]


class TellsTwice(CoreOnly):
    """Lists each record of a timeline twice."""

    def timeline(self, params: Params) -> Result:
        records = super().timeline(params)["records"]
        return {"records": [each for record in records for each in (record, record)]}


def with_pages(kind: type[CoreOnly]) -> Foreign:
    class Filled(kind):  # type: ignore[misc, valid-type]  # a class from the argument
        def __init__(self, path: Any = None, **options: Any) -> None:
            super().__init__(path, **options)
            pages = [{"id": str(n), "content": f"storm {n}", "created_at": at(n - 9)} for n in range(3)]
            self._make_true({"put": pages})

    return Foreign(kind=Filled)


async def test_a_page_that_a_mount_tells_twice_is_told_once() -> None:
    async with federation(MEMORY + MOUNT, {"handbook": with_pages(TellsTwice)}) as fed:
        for question in ({}, {"limit": 5}, {"where": {"part": None}}):
            assert await fed.ids("timeline", **question) == ["handbook/0", "handbook/1", "handbook/2"]


class SpoilsOne(CoreOnly):
    """Leaves out the content of one record and the id of another."""

    def call(self, method: str, params: Any) -> Result:
        answer = super().call(method, params)
        missing = {"storm 0": "content", "storm 1": "id"}
        for place, each in enumerate(answer.get("records", ())):
            kept = {name: each[name] for name in each if name != missing.get(each["content"])}
            answer["records"][place] = kept
        return answer


@pytest.mark.parametrize("method", ["recall", "timeline"])
async def test_a_page_without_content_or_id_is_left_out(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with federation(MEMORY + MOUNT, {"handbook": with_pages(SpoilsOne)}) as fed:
        question = {"query": "storm"} if method == "recall" else {}
        for _ in range(2):
            answer = await fed.call(method, **question)
            assert [record["id"] for record in answer["records"]] == ["handbook/2"]
            assert "degraded" not in answer
    assert caplog.text.count("gave an answer that cannot be read") == 1
