"""Mounts: tiers that are only read, beside managed tiers (§2.1).

The tests at the end mount existing services: a Chroma collection, a search endpoint and a search tool. In every test
the server of a mount gets only reads. A tier that may be a mount gets one test of whether it takes writes: a forget of
no records.
"""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.lowlevel
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from a2m_rag import server as rag
from a2m_rag.service import Result, ServiceFailure, ServiceSilent
from a2m_router.conformance.checking import Target, same
from a2m_router.conformance.client import InProcess, Stdio
from a2m_router.conformance.running import ALL_CHECKS, State, outcomes
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import Code
from a2m_router.protocol.wire.timestamps import UNDATED, parse
from a2m_router.reading.mounted import NO_VECTORS, OTHER_WIDTH
from tests.servers.core_only import CoreOnly
from tests.support.examples import scaled
from tests.support.federated import LOCAL, Foreign, filled, reconnected, settings_of, told_by, trial
from tests.support.mounted import MEMORY, MOUNT, Records, Watched, at, federation
from tests.support.paths import SERVERS
from tests.support.retrieval import Corpus, Moody, server

# Seconds; far longer than anything here takes. A hang becomes a failure.
PATIENCE = 60


# --- a federation in this process


# --- the mounted servers


PAGES: Final[Records] = [
    {"id": "1", "content": "The harbour is closed in a storm.", "created_at": at(-300), "metadata": {"part": 1}},
    {
        "id": "2",
        "content": "Masters of vessels report to the harbour office.",
        "created_at": at(-200),
        "role": "system",
        "group": "chapter 1",
        "metadata": {"part": 1, "tags": ["port", {"deep": None}], "draft": True},
    },
    {"id": "42", "content": "Lamps are lit at dusk.", "created_at": at(100), "metadata": {"part": 2.5, "draft": False}},
    {"id": "deep/7", "content": "Ropes are stored dry.", "created_at": at(200), "group": "chapter 1"},
]


def writable(*pages: dict[str, Any]) -> Foreign:
    """Return a server that would take writes."""
    return filled(*pages)


def read_only(*pages: dict[str, Any]) -> Foreign:
    return filled(*pages, read_only=True, where_on_timeline=True)


def retrieval(*pages: dict[str, Any]) -> rag.Server:
    """Return a retrieval service behind a2m-rag."""
    return server(Corpus(*({**page, "at": page["created_at"]} for page in pages)))


Mounted = Callable[..., Foreign | rag.Server]
each_kind = pytest.mark.parametrize("manual", [writable, read_only, retrieval])


SAID: Final[Records] = [
    {"id": "a", "content": "The storm closed the harbour for us.", "session": "s", "created_at": at(-250)},
    {"id": "b", "content": "We lit the lamps early.", "session": "s", "created_at": at(0), "metadata": {"part": 2.5}},
    {"id": "c", "content": "Ada likes storms.", "tier": "notes", "created_at": at(150), "metadata": {"part": 1}},
]

MANUAL: Final = [f"handbook/{page['id']}" for page in PAGES]

# The records of memory and manual by creation time.
ALL: Final = ["handbook/1", "a", "handbook/2", "b", "handbook/42", "c", "handbook/deep/7"]


@asynccontextmanager
async def mounted(manual: Foreign | rag.Server, tiers: str = MEMORY + MOUNT, **options: Any) -> AsyncIterator[Watched]:
    """A federation with records in memory, and a handbook as a mount."""
    async with federation(tiers, {"handbook": manual}, **options) as fed:
        await fed.call("remember", records=SAID)
        yield fed


# Reads of every kind. Each finds a record in memory.
READINGS: Final[list[tuple[str, dict[str, Any]]]] = [
    ("recall", {"query": "storm"}),
    ("recall", {}),
    ("timeline", {}),
    ("timeline", {"where": {"part": 1}}),
    ("timeline", {"limit": 2}),
]


# --- reads of memory and mounts together


@pytest.mark.anyio
@each_kind
async def test_recall_and_timeline_return_memory_and_manual_together(manual: Mounted) -> None:
    async with mounted(manual(*PAGES)) as fed:
        found = await fed.records("recall", query="storm harbour")
        assert {record["id"] for record in found} >= {"a", "handbook/1"}
        assert [record["score"] for record in found] == sorted((r["score"] for r in found), reverse=True)
        assert await fed.ids() == ALL
        assert await fed.ids("recall") == ALL[::-1]
        shown = {record["id"]: record for record in await fed.records()}
        for page in PAGES:
            as_shown = {**page, "id": f"handbook/{page['id']}", "tier": "handbook"}
            assert same(shown[as_shown["id"]], as_shown)
        text = await fed.call("recall", query="lamps dusk", prompt=True)
        assert "Lamps are lit at dusk." in text["prompt"]
        assert "handbook/42" in text["prompt_ids"]


@pytest.mark.anyio
@each_kind
async def test_whoever_asks_sees_the_manual_and_only_their_own_memory(manual: Mounted) -> None:
    async with mounted(manual(*PAGES)) as fed:
        await fed.call("remember", records=[{"id": "hers", "content": "storm"}], owner="ada")
        assert await fed.ids(owner="bob") == ALL
        assert set(await fed.ids("recall", owner="ada")) == {*ALL, "hers"}
        assert await fed.ids(where={"owner": "ada"}) == await fed.ids("recall", where={"owner": "ada"}) == ["hers"]


@pytest.mark.anyio
async def test_of_a_mount_s_records_only_what_a_corpus_can_know_is_shown() -> None:
    page = {**PAGES[0], "owner": "bob", "session": "s", "key": "k", "revision": 3, "salience": 9.0, "access_count": 5}
    manual = filled(page, capabilities=("scopes", "sessions", "keys", "salience"), read_only=True)
    async with mounted(manual) as fed:
        for _ in range(2):
            (shown,) = await fed.records("recall", owner="ada", tier="handbook")
            assert shown.keys() == {"id", "content", "created_at", "metadata", "tier", "score"}
        assert (await fed.call("fetch", key="k"))["record"] is None
        (session,) = (await fed.call("session/list"))["sessions"]
        assert (session["records"], session["tiers"]) == (2, {"working": 2})
        assert await fed.ids(key_prefix="k") == await fed.ids("recall", key_prefix="k") == []


@pytest.mark.anyio
async def test_a_page_without_a_date_is_undated_and_sorts_first() -> None:
    async with federation(
        MEMORY + MOUNT, {"handbook": server(Corpus({"id": "tea", "content": "Tea is here."}))}
    ) as fed:
        await fed.call("remember", records=SAID)
        found = await fed.call("timeline", prompt={"style": "facts"})
        assert found["prompt_ids"] == ["handbook/tea", "a", "b", "c"]
        assert found["prompt"].startswith("- undated: Tea is here.\n- 20")
        assert found["records"][0]["created_at"] == UNDATED
        assert (await fed.ids("recall"))[-1] == "handbook/tea"
        found = await fed.call("recall", query="tea", prompt={"style": "transcript"})
        assert "1970" not in found["prompt"]
        assert "undated\n-: Tea is here." in found["prompt"]


@pytest.mark.anyio
async def test_two_mounts_may_hold_the_same_ids() -> None:
    tiers = MEMORY + MOUNT + MOUNT.replace("handbook", "almanac")
    louder = [{**page, "content": page["content"].upper()} for page in PAGES]
    async with federation(tiers, {"handbook": writable(*PAGES), "almanac": retrieval(*louder)}) as fed:
        found = {record["id"]: record["content"] for record in await fed.records("recall", limit=20)}
        assert found == {
            **{f"handbook/{page['id']}": page["content"] for page in PAGES},
            **{f"almanac/{page['id']}": page["content"] for page in louder},
        }
        assert sorted(await fed.ids()) == sorted(found)
        assert set(await fed.ids("recall", where={"id": ["almanac/1", "handbook/42"]})) == {"almanac/1", "handbook/42"}
        assert await fed.ids(tier="almanac", where={"id": "handbook/1"}) == []


@pytest.mark.anyio
async def test_a_record_that_was_there_before_the_mount_keeps_its_id_for_itself(tmp_path: Path) -> None:
    async with federation(MEMORY, {}, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "handbook/1", "content": "my harbour", "tier": "notes"}])
    async with federation(MEMORY + MOUNT, {"handbook": writable(*PAGES)}, folder=tmp_path) as fed:
        for method, params in (
            ("timeline", {}),
            ("timeline", {"where": {"x": None}}),
            ("recall", {"query": "harbour"}),
        ):
            found = await fed.records(method, **params)
            there = [(record["tier"], record["content"]) for record in found if record["id"] == "handbook/1"]
            assert there == [("notes", "my harbour")], (method, params)
        assert await fed.call("forget", ids=["handbook/1"]) == {"forgotten": 1}
        assert [record["tier"] for record in await fed.records() if record["id"] == "handbook/1"] == ["handbook"]


# --- where


def equal(value: Any, wanted: Any) -> bool:
    """Return whether two values are equal as JSON (§5.2). A wanted array means any of its items."""
    return any(same(value, each) for each in wanted) if isinstance(wanted, list) else same(value, wanted)


FIELDS: Final = {"id", "content", "created_at", "role", "group", "tier", "owner", "session", "key", "metadata", "uri"}


def meets(record: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """Return whether the value equals the wanted one as JSON (§5.2). A wanted array means any of its items."""
    inner = record.get("metadata") or {}
    return all(equal(record.get(name) if name in FIELDS else inner.get(name), wanted) for name, wanted in where.items())


def one_or_some(*values: Any) -> st.SearchStrategy[Any]:
    one = st.sampled_from(values)
    return one.filter(lambda value: not isinstance(value, list)) | st.lists(one, max_size=3)


wheres = st.fixed_dictionaries(
    {},
    optional={
        "id": one_or_some(*ALL, "1", "handbook", "handbook/", "handbook/x", "notes/1", None),
        "tier": one_or_some("working", "notes", "handbook", "attic"),
        "owner": one_or_some(None, "ada"),
        "session": one_or_some(None, "s"),
        "key": one_or_some(None, "k"),
        "uri": one_or_some(None, "http://x"),
        "role": one_or_some(None, "system", "user"),
        "group": one_or_some(None, "chapter 1"),
        "content": one_or_some(PAGES[0]["content"], SAID[0]["content"], "", None),
        "created_at": one_or_some(PAGES[0]["created_at"], SAID[0]["created_at"], at(9), None),
        "part": one_or_some(1, 1.0, 2.5, True, "1", None),
        "draft": one_or_some(True, 1, False, 0, None),
        "tags": one_or_some(None, ["port", {"deep": None}], ["port"], "port"),
        "metadata": one_or_some(None, {"part": 1}, {"part": 1.0}, {"draft": False, "part": 2.5}),
    },
).filter(bool)

# One federation serves many questions, on one event loop.
cheaply = partial(settings, suppress_health_check=list(HealthCheck))


@each_kind
@cheaply(max_examples=scaled(5))
@given(asked=st.lists(wheres, min_size=8, max_size=8))
def test_where_means_the_same_for_memory_and_manual(manual: Mounted, asked: list[dict[str, Any]]) -> None:
    async def scenario() -> None:
        async with mounted(manual(*PAGES)) as fed:
            everything = await fed.records()
            for where in asked:
                meant = [record["id"] for record in everything if meets(record, where)]
                assert await fed.ids(where=where) == meant
                assert await fed.ids("recall", where=where) == meant[::-1]
                assert set(await fed.ids("recall", query="harbour lamps", where=where)) <= set(meant)

    anyio.run(scenario)


# --- timeline


@each_kind
@cheaply(max_examples=scaled(5))
@given(
    births=st.lists(st.integers(-3, 3), min_size=8, max_size=8),
    split=st.integers(0, 8),
)
def test_a_timeline_s_limit_takes_the_newest_of_memory_and_manual(
    manual: Mounted, births: list[int], split: int
) -> None:
    made: list[dict[str, Any]] = [
        {"id": str(number), "content": "x", "created_at": at(seconds), "metadata": {"part": number % 2}}
        for number, seconds in enumerate(births)
    ]

    async def scenario() -> None:
        async with federation(MEMORY + MOUNT, {"handbook": manual(*made[:split])}) as fed:
            for record in made[split:]:
                await fed.call("remember", records=[record])
            for where in ({}, {"part": 1}, {"role": None}):
                everything = await fed.records(where=where)
                moments = [parse(record["created_at"]) for record in everything]
                assert moments == sorted(moments)
                meant = [f"handbook/{page['id']}" for page in made[:split] if meets(page, where)]
                meant += [record["id"] for record in made[split:] if meets(record, where)]
                assert {record["id"] for record in everything} == set(meant)
                for limit in (1, 2, 3, len(meant) + 1):
                    assert await fed.records(where=where, limit=limit) == everything[-limit:]

    anyio.run(scenario)


# --- writes to a mount


FORGETS: Final[list[dict[str, Any]]] = [
    {"where": {"session": "s"}},
    {"query": "storm harbour lamps ropes"},
    {"where": {"part": [1, 2.5]}},
    {"where": {"id": ["handbook/1", "a", "1"]}},
    {"ids": ["a", "b", "c", "1", "42"]},
    {"where": {"owner": None}},
    {"where": {"content": [PAGES[0]["content"], SAID[0]["content"]]}},
    {"tier": "working"},
]


@pytest.mark.anyio
@pytest.mark.parametrize("selector", FORGETS, ids=str)
async def test_forgetting_leaves_the_manual_alone(selector: dict[str, Any]) -> None:
    async with mounted(writable(*PAGES)) as fed:
        before = {record["id"]: record for record in await fed.records()}
        forgotten = (await fed.call("forget", **selector))["forgotten"]
        after = {record["id"]: record for record in await fed.records()}
        assert [after[id] for id in MANUAL] == [before[id] for id in MANUAL]
        meant = {
            id
            for id in ("a", "b", "c")
            if meets(before[id], selector.get("where", {}))
            and id in selector.get("ids", before)
            and before[id]["tier"] == selector.get("tier", before[id]["tier"])
        }
        assert before.keys() - after.keys() == meant
        assert forgotten == len(meant) > 0


ELSEWHERE: Final = "tier: 'handbook' is mounted read-only; write to another tier"
NOTHING_FORGOTTEN: Final = "tier: 'handbook' is mounted read-only; nothing in it can be forgotten"
WRITES: Final[list[tuple[str, dict[str, Any], str]]] = [
    ("remember", {"records": [{"content": "x"}, {"content": "y", "tier": "handbook"}]}, f"records[1].{ELSEWHERE}"),
    ("remember", {"records": [{"content": "x", "key": "k", "tier": "handbook"}]}, f"records[0].{ELSEWHERE}"),
    ("promote", {"ids": ["a"], "tier": "handbook"}, ELSEWHERE),
    ("promote", {"ids": ["handbook/1"], "tier": "handbook"}, ELSEWHERE),
    ("forget", {"tier": "handbook"}, NOTHING_FORGOTTEN),
    ("forget", {"tier": "handbook", "ids": ["handbook/1"]}, NOTHING_FORGOTTEN),
    ("forget", {"tier": "handbook", "query": "storm"}, NOTHING_FORGOTTEN),
    ("summarize", {"query": "storm", "into": "handbook"}, ELSEWHERE.replace("tier:", "into:")),
]


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "params", "sentence"), WRITES)
async def test_a_write_aimed_at_a_mount_is_refused_and_says_why(
    method: str, params: dict[str, Any], sentence: str
) -> None:
    async with mounted(writable(*PAGES)) as fed:
        await fed.call("remember", records=[{"id": "k", "content": "at a key", "key": "k"}])
        before = await fed.records()
        refusal = await fed.refused(method, **params)
        assert (refusal.code, refusal.message) == (Code.INVALID_PARAMS, sentence)
        assert await fed.records() == before


@pytest.mark.anyio
@pytest.mark.parametrize("id", ["handbook/1", "handbook/new", "handbook/"])
async def test_a_record_under_a_mount_s_name_is_refused(id: str) -> None:
    async with mounted(writable(*PAGES)) as fed:
        refusal = await fed.refused("remember", records=[{"content": "x"}, {"id": id, "content": "y"}])
        sentence = f"records: the id {id!r} has the form of ids of the mount 'handbook'; choose another"
        assert (refusal.code, refusal.message) == (Code.INVALID_PARAMS, sentence)
        assert await fed.ids() == ALL
        free = ["handbook", "handbooks/1", "notes/1", "/handbook/1"]
        await fed.call("remember", records=[{"id": id, "content": "z"} for id in free])
        assert set(await fed.ids()) == {*ALL, *free}


CHANGES: Final[list[tuple[str, dict[str, Any]]]] = [
    ("forget", {}),
    ("forget", {"query": "storm"}),
    ("forget", {"where": {"part": 1}}),
    ("promote", {"tier": "notes"}),
    ("reinforce", {}),
]
each_change = pytest.mark.parametrize(("method", "params"), CHANGES, ids=str)


def of_the_handbook(place: int, id: str) -> tuple[int, str]:
    return (
        Code.INVALID_PARAMS,
        f"ids[{place}]: {id!r} is a record of 'handbook', which is mounted read-only; nothing was changed",
    )


@pytest.mark.anyio
@each_kind
@each_change
async def test_a_change_of_a_mounts_record_is_rejected_and_changes_nothing(
    manual: Mounted, method: str, params: dict[str, Any]
) -> None:
    async with mounted(manual(*PAGES)) as fed:
        before = await fed.records()
        for ids, place in (
            (["handbook/1"], 0),
            (["a", "handbook/deep/7", "handbook/1", "b"], 1),
            (["handbook/of nobody", "a"], 0),
        ):
            refusal = await fed.refused(method, **params, ids=ids)
            assert (refusal.code, refusal.message) == of_the_handbook(place, ids[place])
        assert await fed.records() == before
        # Ids that only look like those of a mount are unknown, and not counted.
        assert set((await fed.call(method, **params, ids=["handbook", "1", "/1", "notes/1"])).values()) == {0}


@pytest.mark.anyio
@each_change
async def test_a_record_of_ours_with_an_id_like_a_mount_s_is_changed_by_it(
    method: str, params: dict[str, Any], tmp_path: Path
) -> None:
    async with federation(MEMORY, {}, folder=tmp_path) as fed:
        records = [{"id": "handbook/1", "content": "my storm", "metadata": {"part": 1}}]
        await fed.call("remember", records=records, owner="ada")
    async with federation(MEMORY + MOUNT, {"handbook": writable(*PAGES)}, folder=tmp_path) as fed:
        # Another owner's error does not reveal that the record exists.
        refusal = await fed.refused(method, **params, ids=["handbook/1"], owner="bob")
        assert (refusal.code, refusal.message) == of_the_handbook(0, "handbook/1")
        refusal = await fed.refused(method, **params, ids=["handbook/1", "handbook/2"], owner="ada")
        assert (refusal.code, refusal.message) == of_the_handbook(1, "handbook/2")
        hers = partial(fed.call, method, **params, ids=["handbook/1"], owner="ada")
        assert set((await hers()).values()) == {1}
        assert set((await hers()).values()) <= {0, 1}  # a repeated call is no error


@pytest.mark.anyio
async def test_until_memory_is_read_through_an_id_may_be_one_of_its_records() -> None:
    """Before the scan of a managed tier, an id with the prefix of the mount may be that of a record there."""
    down = {"notes"}
    async with federation(MEMORY + MOUNT, {"handbook": writable(*PAGES)}, down=down) as fed:
        assert await fed.call("forget", ids=["handbook/1"]) == {"forgotten": 0}
        down.clear()
        await fed.federation.links["notes"].wait_up()
        while not fed.federation.catalog.tiers.is_scanned("notes"):
            await anyio.lowlevel.checkpoint()
        assert (await fed.refused("reinforce", ids=["handbook/2"])).code == Code.INVALID_PARAMS


@pytest.mark.anyio
async def test_a_summary_is_made_of_memory_and_manual_and_written_to_memory() -> None:
    async with mounted(writable(*PAGES)) as fed:
        made = await fed.call("summarize", query="storm harbour", into="notes")
        (summary,) = made["records"]
        assert summary["tier"] == "notes"
        assert {"a", "handbook/1"} <= set(summary["metadata"]["summary_of"]["ids"])
        only = await fed.call("summarize", tier="handbook", into="notes")
        assert (only["read"], only["written"]) == (len(PAGES), 1)
        assert await fed.ids(tier="handbook") == MANUAL


@pytest.mark.anyio
async def test_describe_marks_a_mount() -> None:
    async with mounted(read_only(*PAGES)) as fed:
        tiers = {tier["name"]: tier for tier in (await fed.call("describe"))["tiers"]}
    assert {name: tier["mount"] for name, tier in tiers.items()} == {"working": False, "notes": False, "handbook": True}
    assert (tiers["handbook"]["server"], tiers["handbook"]["shared"]) == ("manual", True)
    assert tiers["handbook"].keys().isdisjoint({"capacity", "spill_to", "promote_to"})


# --- a mount that is down


@pytest.mark.anyio
async def test_without_its_mount_memory_answers_and_says_so() -> None:
    down = {"handbook"}
    async with mounted(writable(*PAGES), down=down) as fed:
        for method, params in READINGS:
            answer = await fed.call(method, **params)
            assert answer["degraded"] == [{"tier": "handbook", "reason": "it is not there"}], (method, params)
            assert answer["records"], (method, params)
        for method in ("recall", "timeline"):
            alone = await fed.refused(method, tier="handbook")
            assert (alone.code, alone.message) == (
                Code.INTERNAL_ERROR,
                "the tier 'handbook' does not answer: it is not there",
            )
        # Calls that do not concern the mount do not wait for it.
        assert await fed.call("forget", query="storm closed") == {"forgotten": 2}
        assert await fed.call("promote", ids=["b"], tier="notes") == {"promoted": 1}
        handbook = (await fed.call("describe"))["tiers"][2]
        assert (handbook["status"], handbook["mount"]) == ("down", True)

        down.clear()
        await fed.federation.links["handbook"].wait_up()
        assert await fed.ids() == ["handbook/1", "handbook/2", "b", "handbook/42", "handbook/deep/7"]


@pytest.mark.anyio
async def test_without_a_required_mount_there_is_no_answer() -> None:
    async with mounted(writable(*PAGES), MEMORY + MOUNT + "required = true\n", down={"handbook"}) as fed:
        for method, params in READINGS:
            refusal = await fed.refused(method, **params)
            assert refusal.code == Code.INTERNAL_ERROR
            assert refusal.data is not None
            assert refusal.data["tier"] == "handbook"
        # Calls to other tiers are still answered.
        assert await fed.ids(tier="working") == ["a", "b"]
        assert await fed.ids(where={"tier": ["working", "notes"]}) == ["a", "b", "c"]
        assert await fed.call("forget", ids=["a"]) == {"forgotten": 1}


class Failing(Corpus):
    """A service that describes itself and fails at every search."""

    async def search(self, *_: Any, **__: Any) -> list[Result]:
        raise ServiceFailure("its index is being rebuilt")

    listed = search


@pytest.mark.anyio
async def test_a_service_that_fails_behind_its_mount_is_told_with_its_reason() -> None:
    async with mounted(server(Failing())) as fed:
        for method, params in READINGS:
            answer = await fed.call(method, **params)
            assert answer["records"], (method, params)
            (missing,) = answer["degraded"]
            assert missing["tier"] == "handbook"
            assert "its index is being rebuilt" in missing["reason"]


# --- a mount whose service does not answer


def moody(**options: Any) -> tuple[Moody, rag.Server]:
    service = Moody(*({**page, "at": page["created_at"]} for page in PAGES), **options)
    return service, server(service)


@pytest.mark.anyio
async def test_a_service_that_is_silent_again_and_again_is_not_waited_for() -> None:
    service, manual = moody(lists=False)
    async with mounted(manual) as fed:
        service.failure = ServiceSilent("no answer within 1 s")
        for number in range(5):
            answer = await fed.call("recall", query="storm")
            assert "a" in {record["id"] for record in answer["records"]}
            assert answer["degraded"] == [{"tier": "handbook", "reason": "corpus: no answer within 1 s"}]
            if number < 4:
                assert await fed.ids() == ["a", "b", "c"]  # the service cannot list, so this is no question to it
        asked = len(fed.told_to("handbook", "recall", "timeline"))
        for method, params in READINGS:
            answer = await fed.call(method, **params)
            (missing,) = answer["degraded"]
            assert missing["tier"] == "handbook"
            assert missing["reason"].endswith("corpus: no answer within 1 s")
        assert (await fed.refused("recall", query="storm", tier="handbook")).code == Code.INTERNAL_ERROR
        assert len(fed.told_to("handbook", "recall", "timeline")) == asked
        service.failure = None
        await fed.federation.links["handbook"].wait_up()
        assert "handbook/1" in await fed.ids("recall", query="storm", limit=20)


@pytest.mark.anyio
async def test_what_a_service_refuses_again_and_again_leaves_its_mount_up() -> None:
    service, manual = moody()
    async with mounted(manual) as fed:
        service.failure = ServiceFailure("422: no such query")
        for _ in range(12):
            (missing,) = (await fed.call("recall", query="storm"))["degraded"]
            assert missing["reason"] == "corpus: 422: no such query"
        assert (await fed.call("describe"))["tiers"][2]["status"] == "up"
        service.failure = None
        assert "handbook/1" in await fed.ids("recall", query="storm", limit=20)


@pytest.mark.anyio
async def test_describe_tells_a_mount_s_health_by_its_service_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2m_router.tiers.link._LOOKED_LATELY", 0.0)
    service, manual = moody()
    async with mounted(manual) as fed:
        assert (await fed.call("describe"))["tiers"][2]["status"] == "up"
        service.failure = ServiceSilent("it cannot be reached")
        handbook = (await fed.call("describe"))["tiers"][2]
        assert (handbook["status"], handbook["reason"]) == ("down", "corpus: it cannot be reached")
        assert (handbook["server"], handbook["mount"]) == ("corpus", True)
        asked = len(fed.told_to("handbook", "recall"))
        (missing,) = (await fed.call("recall", query="storm"))["degraded"]
        assert missing == {"tier": "handbook", "reason": "corpus: it cannot be reached"}
        assert len(fed.told_to("handbook", "recall")) == asked
        service.failure = None
        await fed.federation.links["handbook"].wait_up()
        assert (await fed.call("describe"))["tiers"][2]["status"] == "up"


@pytest.mark.anyio
async def test_describe_does_not_wait_for_a_service_that_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2m_router.methods.describing._LOOK_SECONDS", 0.01)
    held = anyio.Event()

    class Held(Moody):
        async def search(self, *asked: Any, **options: Any) -> list[Result]:
            if asked[0] == "is anybody there" and self.failure is not None:
                await held.wait()
            return await super().search(*asked, **options)

    service = Held(*({**page, "at": page["created_at"]} for page in PAGES))
    async with mounted(server(service, timeout=PATIENCE)) as fed:
        service.failure = ServiceSilent("it cannot be reached")
        for _ in range(2):
            handbook = (await fed.call("describe"))["tiers"][2]
            assert (handbook["status"], handbook["reason"]) == (
                "up",
                "no answer to a status check within 1 s",
            )
        held.set()
        while fed.federation.links["handbook"].status == "up":
            await anyio.lowlevel.checkpoint()
        assert (await fed.call("describe"))["tiers"][2]["reason"] == "corpus: it cannot be reached"


@pytest.mark.anyio
async def test_a_mount_whose_service_is_down_at_the_start_joins_when_it_is_back() -> None:
    service, manual = moody()
    service.failure = ServiceSilent("it cannot be reached")
    async with mounted(manual) as fed:
        handbook = (await fed.call("describe"))["tiers"][2]
        assert (handbook["status"], handbook["server"]) == ("down", "corpus")
        assert (await fed.call("recall", query="storm"))["degraded"][0]["tier"] == "handbook"
        service.failure = None
        await fed.federation.links["handbook"].wait_up()
        assert "handbook/1" in await fed.ids("recall", query="storm", limit=20)


# --- vectors


class Vectors(Corpus):
    """A service with a vector for each page. Page 1 has another vector than the rest."""

    width = 2

    async def dimensions(self) -> int | None:
        return self.width

    def _result(self, value: Any, vectors: bool) -> Result:
        return Result(value, embedding=[float(value["id"] == "1")] + [0.5] * (self.width - 1))


def vectored(*pages: dict[str, Any], width: int = 2, metric: str = "cosine") -> rag.Server:
    corpus = Vectors(*({**page, "at": page["created_at"]} for page in pages), metric=metric)
    corpus.width = width
    return server(corpus)


@pytest.mark.anyio
async def test_a_recall_by_vector_asks_a_mount_that_has_vectors_like_ours() -> None:
    async with federation(MEMORY + MOUNT, {"handbook": vectored(*PAGES)}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "x", "embedding": [0.0, 1.0]}])
        found = await fed.records("recall", embedding=[1.0, 0.5], embeddings=True)
        assert {"v", "handbook/1"} <= {record["id"] for record in found}
        assert (found[0]["id"], found[0]["embedding"]) == ("handbook/1", [1.0, 0.5])
        plain = await fed.records("recall", embedding=[1.0, 0.5])
        assert [record["id"] for record in plain] == [record["id"] for record in found]
        assert not any("embedding" in record for record in plain)
        assert [asked["embedding"] for asked in fed.told_to("handbook", "recall")] == [[1.0, 0.5]] * 2
        listed = await fed.records(embeddings=True)
        assert {record["id"] for record in listed if "embedding" in record} == {"v", *MANUAL}


@pytest.mark.anyio
async def test_a_mount_s_record_has_its_vector_whether_it_is_shown_or_not() -> None:
    async with federation(MEMORY + MOUNT, {"handbook": vectored(*PAGES)}) as fed:
        await fed.call("remember", records=[{"id": "p", "content": "harbour"}])
        shown: list[dict[str, Any]] = [{}, {"embeddings": True}]
        for params in shown:
            assert await fed.ids(where={"embedding": None}, **params) == ["p"]
            assert await fed.ids("recall", query="harbour", where={"embedding": None}, **params) == ["p"]


@pytest.mark.anyio
@pytest.mark.parametrize("metric", ["dot", "l2"])
async def test_by_which_metric_a_mount_compares_is_no_matter(metric: str) -> None:
    async with federation(MEMORY + MOUNT, {"handbook": vectored(*PAGES, metric=metric)}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "x", "embedding": [0.0, 1.0]}])
        found = await fed.ids("recall", embedding=[1.0, 0.5])
        assert {"v", "handbook/1"} <= set(found)
        assert found[0] == "handbook/1"
        assert set(await fed.ids("recall", embedding=[1.0, 0.5], min_score=0.0, limit=50)) == {"v", *MANUAL}
        assert {tuple(asked["embedding"]) for asked in fed.told_to("handbook", "recall")} == {(1.0, 0.5)}


class Boastful(CoreOnly):
    """A server that reports a high similarity for a record that is far from every query."""

    name = "boastful"
    metric = "cosine"

    def describe(self, params: Mapping[str, Any]) -> dict[str, Any]:
        more = {"embeddings": {"dimensions": 2, "metric": self.metric}, "store": {"similarity": True}}
        return {**super().describe(params), **more}

    def recall(self, params: Mapping[str, Any]) -> dict[str, Any]:
        far = {"id": "far", "content": "x", "created_at": at(0), "embedding": [-1.0, 0.0]}
        return {"records": [{**far, "similarity": 0.999, "score": 1.0}]}


class BoastfulOtherwise(Boastful):
    metric = "l2"


@pytest.mark.anyio
@pytest.mark.parametrize(("kind", "first"), [(BoastfulOtherwise, "v"), (Boastful, "handbook/far")])
async def test_a_similarity_by_another_metric_is_not_compared_with_ours(kind: type[CoreOnly], first: str) -> None:
    boastful = Foreign(kind=kind, capabilities=("embeddings",))
    async with federation(MEMORY + MOUNT, {"handbook": boastful}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "x", "embedding": [0.6, 0.8]}])
        assert (await fed.ids("recall", embedding=[1.0, 0.0]))[0] == first


other_vectors = pytest.mark.parametrize(
    ("manual", "reason", "code"),
    [
        (partial(vectored, width=3), OTHER_WIDTH, Code.EMBEDDING_MISMATCH),
        (writable, NO_VECTORS, Code.INVALID_PARAMS),
        (retrieval, NO_VECTORS, Code.INVALID_PARAMS),
    ],
    ids=["another width", "none", "a text-only service"],
)


@pytest.mark.anyio
@other_vectors
async def test_a_mount_that_cannot_use_a_vector_is_asked_by_the_words(manual: Mounted, reason: str, code: int) -> None:
    async with federation(MEMORY + MOUNT, {"handbook": manual(*PAGES)}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "storm", "embedding": [0.0, 1.0]}])
        assert {"v", "handbook/1"} <= set(await fed.ids("recall", query="storm", embedding=[1.0, 0.5]))
        assert [asked.get("embedding") for asked in fed.told_to("handbook", "recall")] == [None]


@pytest.mark.anyio
@other_vectors
async def test_a_mount_that_cannot_use_a_vector_alone_is_named_with_the_reason(
    manual: Mounted, reason: str, code: int
) -> None:
    async with federation(MEMORY + MOUNT, {"handbook": manual(*PAGES)}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "storm", "embedding": [0.0, 1.0], "session": "s"}])
        for words in ({}, {"query": ""}, {"query": " ?! "}, {"min_score": 0.1}):
            answer = await fed.call("recall", embedding=[1.0, 0.5], **words)
            assert [record["id"] for record in answer["records"]] == ["v"]
            assert answer["degraded"] == [{"tier": "handbook", "reason": reason}]
        # The mount is not degraded if it cannot match the selector or is not asked.
        for narrowed in ({"where": {"session": "s"}}, {"where": {"id": "v"}}, {"tier": "working"}):
            assert await fed.ids("recall", embedding=[1.0, 0.5], **narrowed) == ["v"]
        assert await fed.ids("recall", embedding=[1.0, 0.5], key_prefix="k") == []
        for alone in ({"tier": "handbook"}, {"where": {"tier": "handbook"}}):
            refusal = await fed.refused("recall", embedding=[1.0, 0.5], **alone)
            assert refusal.code == code
            assert "'handbook'" in refusal.message
        assert fed.told_to("handbook", "recall") == []


@pytest.mark.anyio
@other_vectors
async def test_a_principal_is_told_why_a_mount_was_not_asked_by_its_vector(
    manual: Mounted, reason: str, code: int
) -> None:
    async with mounted(manual(*PAGES)) as fed:
        call = {"jsonrpc": "2.0", "id": 1, "method": "memory/recall", "params": {"embedding": [1.0, 0.5]}}
        ada = Caller(asserts_owner=False, owner="ada")
        answer = json.loads(await fed.federation.answer(json.dumps(call).encode(), ada) or b"")
        # The reason is the router's own text and quotes no server, so a principal gets it.
        assert answer["result"]["degraded"] == [{"tier": "handbook", "reason": reason}]
        call["params"] = {"embedding": [1.0, 0.5], "tier": "handbook"}
        answer = json.loads(await fed.federation.answer(json.dumps(call).encode(), ada) or b"")
        assert answer["error"]["code"] == code


@pytest.mark.anyio
async def test_a_required_mount_that_cannot_use_a_vector_is_the_caller_s_to_mend() -> None:
    async with mounted(vectored(*PAGES, width=3), MEMORY + MOUNT + "required = true\n") as fed:
        assert (await fed.refused("recall", embedding=[1.0, 0.5])).code == Code.EMBEDDING_MISMATCH
        assert await fed.ids("recall", query="storm", embedding=[1.0, 0.5], limit=50)


@pytest.mark.anyio
async def test_each_of_several_mounts_is_asked_as_it_can_be() -> None:
    tiers = MEMORY + "".join(MOUNT.replace("handbook", name) for name in ("two", "three", "words"))
    servers: dict[str, Foreign | rag.Server] = {
        "two": vectored(*PAGES),
        "three": vectored(*PAGES, width=3),
        "words": writable(*PAGES),
    }
    async with federation(tiers, servers) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "storm", "embedding": [0.0, 1.0]}])
        answer = await fed.call("recall", embedding=[1.0, 0.5], limit=50)
        assert {record["tier"] for record in answer["records"]} == {"working", "two"}
        assert answer["degraded"] == [
            {"tier": "three", "reason": OTHER_WIDTH},
            {"tier": "words", "reason": NO_VECTORS},
        ]
        found = await fed.records("recall", query="storm", embedding=[1.0, 0.5], limit=50)
        assert {record["tier"] for record in found} == {"working", "two", "three", "words"}
        # A recall of one mount alone does not depend on the vector width of the managed tiers.
        (first, *_) = await fed.records("recall", embedding=[1.0, 0.5, 0.5], tier="three")
        assert first["id"] == "three/1"
        assert (await fed.refused("recall", embedding=[1.0, 0.5, 0.5])).code == Code.EMBEDDING_MISMATCH


class Unfixed(Vectors):
    """A service that returns its vector width only from the second request for it on."""

    def __init__(self, *values: Any, **options: Any) -> None:
        super().__init__(*values, **options)
        self.told: list[int | None] = [None]

    async def dimensions(self) -> int | None:
        return self.told.pop() if self.told else 3


@pytest.mark.anyio
async def test_a_width_that_is_fixed_after_it_was_asked_for_is_found_out() -> None:
    def unfixed() -> rag.Server:
        return server(Unfixed(*({**page, "at": page["created_at"]} for page in PAGES), metric="cosine"))

    async with federation(MEMORY + MOUNT, {"handbook": unfixed()}) as fed:
        await fed.call("remember", records=[{"id": "v", "content": "storm", "embedding": [0.0, 1.0]}])
        assert {"v", "handbook/1"} <= set(await fed.ids("recall", query="storm", embedding=[1.0, 0.5]))
        assert [asked.get("embedding") for asked in fed.told_to("handbook", "recall")] == [[1.0, 0.5], None]
        answer = await fed.call("recall", embedding=[1.0, 0.5])
        assert [record["id"] for record in answer["records"]] == ["v"]
        (missing,) = answer["degraded"]
        assert missing["tier"] == "handbook"
        assert "have 3 numbers, this one has 2" in missing["reason"]
        assert (await fed.refused("recall", embedding=[1.0, 0.5], tier="handbook")).code == Code.EMBEDDING_MISMATCH
        # By now the server declares the width itself, and the router does not ask it.
        await fed.call("describe")
        asked = len(fed.told_to("handbook", "recall"))
        answer = await fed.call("recall", embedding=[1.0, 0.5])
        assert answer["degraded"] == [{"tier": "handbook", "reason": OTHER_WIDTH}]
        assert len(fed.told_to("handbook", "recall")) == asked


# --- tiers that turn out to be mounts

UNDECLARED: Final = MOUNT.replace("mount = true", "")


@pytest.mark.anyio
async def test_a_tier_whose_server_takes_no_writes_becomes_a_mount(caplog: pytest.LogCaptureFixture) -> None:
    async with mounted(read_only(*PAGES), MEMORY + UNDECLARED) as fed:
        assert (
            "tier=handbook its server takes no writes: used as a mount, read-only; set mount = true for it in the file"
            in caplog.messages
        )
        assert await fed.ids() == ALL
        refusal = await fed.refused("remember", records=[{"content": "x", "tier": "handbook"}])
        assert (refusal.code, refusal.message) == (Code.INVALID_PARAMS, f"records[0].{ELSEWHERE}")
        assert [tier["mount"] for tier in (await fed.call("describe"))["tiers"]] == [False, False, True]
        assert await fed.call("forget", query="storm harbour lamps storms") == {"forgotten": 3}
        assert await fed.ids() == MANUAL


@pytest.mark.rule(n=6)
@pytest.mark.anyio
async def test_nothing_spills_into_a_read_only_tier() -> None:
    full = 'kind = "working"\ncapacity = 2\nspill_to = "handbook"'
    tiers = (MEMORY + UNDECLARED).replace('kind = "working"', full)
    async with federation(tiers, {"handbook": read_only(*PAGES)}) as fed:
        await fed.call("remember", session="s", records=[{"id": id, "content": "turn"} for id in "01234"])
        assert (await fed.call("consolidate"))["moved"] == 0
        assert (await fed.refused("session/close", session="s")).code == Code.INTERNAL_ERROR
        assert await fed.ids(tier="working") == [*"01234"]
        assert await fed.ids(tier="handbook") == MANUAL


@pytest.mark.anyio
async def test_where_the_working_tier_takes_no_writes_the_next_one_does() -> None:
    async with federation(MEMORY, {"working": read_only(*PAGES)}) as fed:
        await fed.call("remember", records=[{"id": "a", "content": "x"}])
        assert await fed.ids(tier="notes") == ["a"]


@pytest.mark.anyio
async def test_a_tier_that_holds_records_of_ours_does_not_become_a_mount(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def started(**options: Any) -> AbstractAsyncContextManager[Watched]:
        return federation(MEMORY + UNDECLARED, {"handbook": Foreign(**options)}, folder=tmp_path)

    async with started() as fed:
        await fed.call("remember", records=[{"id": id, "content": "note", "tier": "handbook"} for id in "xyz"])

    async with started(read_only=True) as fed:
        assert (
            "tier=handbook its server takes no writes any more: its records can be read, but not changed"
            in caplog.messages
        )
        assert [tier["mount"] for tier in (await fed.call("describe"))["tiers"]] == [False, False, False]
        assert await fed.ids() == [*"xyz"]
        refusal = await fed.refused("remember", records=[{"content": "new", "tier": "handbook"}])
        assert refusal.code == Code.INTERNAL_ERROR
        assert "the tier 'handbook' did not take the write: its server takes no writes" in refusal.message
        # A forgotten record is gone for readers at once, though its server still has it.
        assert await fed.call("forget", ids=["x"]) == {"forgotten": 1}
        assert await fed.ids() == [*"yz"]
        assert set(await fed.ids("recall", query="note")) == {*"yz"}
        assert await fed.call("promote", ids=["y"], tier="notes") == {"promoted": 1}
        assert [(record["id"], record["tier"]) for record in await fed.records()] == [("y", "notes"), ("z", "handbook")]

    async with started() as fed:
        await fed.federation.reconciler.idle()
        assert [record.id for record in told_by(fed.servers["handbook"])] == ["z"]
        assert [(record["id"], record["tier"]) for record in await fed.records()] == [("y", "notes"), ("z", "handbook")]


@pytest.mark.anyio
async def test_a_mount_that_turns_out_to_take_writes_is_a_tier_from_then_on(caplog: pytest.LogCaptureFixture) -> None:
    async with trial(settings_of(MEMORY + UNDECLARED), servers={"handbook": read_only(*PAGES)}) as fed:
        assert [record["id"] for record in await fed.timeline()] == MANUAL
        await reconnected(fed, "handbook")
        assert [tier["mount"] for tier in (await fed.call("describe"))["tiers"]] == [False, False, True]
        assert [record["id"] for record in await fed.timeline()] == MANUAL
        fed.servers["handbook"].read_only = False
        await reconnected(fed, "handbook")
        assert "tier=handbook its server takes writes now: no longer used as a mount" in caplog.messages
        assert [tier["mount"] for tier in (await fed.call("describe"))["tiers"]] == [False, False, False]
        own = [id.removeprefix("handbook/") for id in MANUAL]
        assert sorted(record["id"] for record in await fed.timeline()) == sorted(own)
        await fed.remember("new", tier="handbook")
        assert await fed.call("forget", ids=["42"]) == {"forgotten": 1}
        await fed.federation.reconciler.idle()
        assert "42" not in [record.id for record in told_by(fed.servers["handbook"])]


# --- federations of mounts alone

json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text("ab", max_size=2),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", max_size=2), inner, max_size=2),
    max_leaves=4,
)
any_params = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("query", "tier", "where", "key_prefix", "owner", "session", "into"), json_values),
        "records": json_values | st.lists(st.fixed_dictionaries({"content": json_values}), max_size=2),
        "ids": json_values | st.lists(st.text("ab", max_size=2), max_size=2),
    },
)


@pytest.mark.parametrize("tiers", [MOUNT, UNDECLARED], ids=["declared", "found out"])
def test_a_federation_of_mounts_passes_the_read_only_profile(tiers: str) -> None:
    both = tiers + tiers.replace("handbook", "almanac")
    servers: dict[str, Foreign | rag.Server] = {"handbook": read_only(*PAGES), "almanac": retrieval(*PAGES)}
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(federation(both, servers)) as fed:
        target = Target(InProcess(lambda message: portal.call(fed.federation.answer, message, LOCAL)))
        target.meet()
        came = list(outcomes(target))
    assert target.read_only
    assert [(each.check.name, each.why) for each in came if each.state in (State.FAILED, State.SKIPPED)] == []
    passed = {each.check.name for each in came if each.state is State.PASSED}
    assert passed >= {check.name for check in ALL_CHECKS if check.read_only}


@cheaply(max_examples=scaled(6))
@given(asked=st.lists(any_params, min_size=10, max_size=10))
def test_a_federation_of_mounts_refuses_every_write_whatever_it_carries(asked: list[dict[str, Any]]) -> None:
    async def scenario() -> None:
        async with federation(MOUNT, {"handbook": writable(*PAGES)}) as fed:
            for params in asked:
                for method in ("remember", "forget", "summarize", "promote", "reinforce"):
                    refusal = await fed.refused(method, **params)
                    assert (refusal.code, refusal.message) == (
                        Code.READ_ONLY,
                        "this federation consists of mounts only; it takes no writes",
                    )

    anyio.run(scenario)


@pytest.mark.anyio
async def test_a_federation_of_mounts_is_read_like_any_other() -> None:
    async with federation(MOUNT, {"handbook": writable(*PAGES)}) as fed:
        assert await fed.ids() == MANUAL
        assert (await fed.ids("recall", query="lamps"))[:1] == ["handbook/42"]
        assert (await fed.refused("promote", ids=["handbook/1"], tier="handbook")).code == Code.READ_ONLY
        assert (await fed.refused("reinforce", ids=MANUAL)).code == Code.READ_ONLY
        assert (await fed.refused("forget", ids=MANUAL)).code == Code.READ_ONLY
        assert (await fed.call("session/list"))["sessions"] == []
        assert (await fed.call("consolidate"))["moved"] == 0
        assert (await fed.call("events"))["events"] == []


# --- existing services

VECTORS: Final = {"storm": [1.0, 0.0], "lamp": [0.0, 1.0], "rope": [0.6, 0.8]}
ENTRIES: Final = {
    "1": ("A storm closes the harbour.", VECTORS["storm"], {"created_at": "2024-05-01", "part": 1}),
    "2": ("A lamp is lit at dusk.", VECTORS["lamp"], {"part": 2}),
    "3": ("A rope is stored dry.", VECTORS["rope"], {"created_at": 1609459200, "part": 2}),
}
HITS: Final = [
    {"id": "1", "text": "Storm warnings are sent by mail.", "published": "2025-02-03T04:05:06Z", "part": 1},
    {"id": "2", "text": "Ropes are bought in May.", "published": "2022-01-01", "part": 2},
]

EMBED: Final = f"""
VECTORS = {VECTORS}

def embed(texts):
    return [next((VECTORS[word] for word in VECTORS if word in text.lower()), [0.1, 0.1]) for text in texts]
"""

BESIDE: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
[tiers.notes]
kind = "semantic"
command = ["a2m-store", "notes.db"]
[tiers.pages]
kind = "semantic"
mount = true
command = {chroma}
timeout = "60s"
[tiers.site]
kind = "semantic"
mount = true
command = {http}
"""


@contextmanager
def site() -> Iterator[str]:
    """Serve a search endpoint that ranks by shared words, and yield its URL."""

    async def search(request: Request) -> Response:
        asked = await request.json()
        words = set(asked["q"].lower().split())
        hits = sorted(HITS, key=lambda hit: -len(words & set(str(hit["text"]).lower().split())))
        return JSONResponse({"hits": hits[: asked["k"]]})

    async def everything(_: Request) -> Response:
        return JSONResponse({"hits": HITS})

    with listening(Route("/search", search, methods=["POST"]), Route("/all", everything)) as url:
        yield url


@contextmanager
def listening(*routes: Route) -> Iterator[str]:
    """Serve these routes, and yield the URL."""
    app = Starlette(routes=routes)
    served = uvicorn.Server(uvicorn.Config(app, log_config=None, ws="none", timeout_graceful_shutdown=0))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=served.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            served.should_exit = True
            thread.join(PATIENCE)


@contextmanager
def collection(path: Path) -> Iterator[Any]:
    """Open the collection `pages` of a Chroma database with a new client. Create it if it does not exist."""
    import chromadb
    from chromadb.api.shared_system_client import SharedSystemClient
    from chromadb.config import Settings

    try:
        client = chromadb.PersistentClient(path=str(path), settings=Settings(anonymized_telemetry=False))
        yield client.get_or_create_collection(
            "pages", embedding_function=None, configuration={"hnsw": {"space": "cosine"}}
        )
    finally:
        SharedSystemClient.clear_system_cache()


def content_of(path: Path) -> dict[str, Any]:
    """Return everything that a collection holds."""
    with collection(path) as pages:
        found = pages.get(include=["documents", "metadatas", "embeddings"])
        return {
            "ids": found["ids"],
            "documents": found["documents"],
            "metadatas": found["metadatas"],
            "embeddings": found["embeddings"].tolist(),
        }


# Chroma warns about a collection without an embedding function.
@pytest.mark.filterwarnings("ignore:legacy embedding function config:DeprecationWarning")
def test_a_chroma_collection_and_a_search_endpoint_stand_beside_memory(tmp_path: Path) -> None:
    texts, vectors, metadatas = zip(*ENTRIES.values(), strict=True)
    with collection(tmp_path / "db") as pages:
        pages.add(ids=[*ENTRIES], documents=[*texts], embeddings=[*vectors], metadatas=[*metadatas])
    before = content_of(tmp_path / "db")
    (tmp_path / "vectors.py").write_text(EMBED)
    command = [sys.executable, "-m", "a2m_rag.cli"]
    chroma = [*command, "chroma", "db", "--collection", "pages", "--embed", "vectors:embed", "--timeout", "60"]
    with ExitStack() as stack:
        with site() as url:
            request = '{"q": "{query}", "k": "{limit}"}'
            http = [*command, "http", "--url", f"{url}/search", "--request", request, "--results", "hits"]
            http += ["--list", f"{url}/all", "--content", "text", "--created-at", "published", "--metadata", "*"]
            config = tmp_path / "federation.toml"
            config.write_text(BESIDE.format(chroma=json.dumps(chroma), http=json.dumps(http)))
            router = Stdio([str(Path(sys.executable).with_name("a2m-router")), "--config", str(config)], PATIENCE)
            stack.callback(router.close)
            _beside_memory(router)
        # The site has been shut down.
        answer = router.request("memory/recall", {"query": "storm"})["result"]
        assert answer["records"][0]["id"] == "pages/1"
        (missing,) = answer["degraded"]
        assert missing["tier"] == "site"
        assert url in missing["reason"]
    assert content_of(tmp_path / "db") == before


def _beside_memory(router: Stdio) -> None:
    def ask(method: str, **params: Any) -> Any:
        answer = router.request(f"memory/{method}", params)
        assert "result" in answer, answer
        return answer["result"]

    def ids(method: str = "timeline", **params: Any) -> list[str]:
        answer = ask(method, **params)
        assert answer.keys() == {"records"}, answer
        return [record["id"] for record in answer["records"]]

    assert [(t["name"], t["status"], t["mount"]) for t in ask("describe")["tiers"]] == [
        ("working", "up", False),
        ("notes", "up", False),
        ("pages", "up", True),
        ("site", "up", True),
    ]
    ask(
        "remember",
        session="s",
        records=[
            {"id": "a", "content": "The storm closed the harbour for us.", "embedding": [0.9, 0.1]},
            {"id": "b", "content": "Ada bought a rope.", "tier": "notes"},
        ],
    )
    manual = ["pages/2", "pages/3", "site/2", "pages/1", "site/1"]
    assert ids() == [*manual, "a", "b"]
    assert ids(limit=3) == ["site/1", "a", "b"]
    assert {"a", "pages/1", "site/1"} <= set(ids("recall", query="storm"))
    by_vector = ask("recall", embedding=[1.0, 0.0], limit=2)
    assert {record["id"] for record in by_vector["records"]} == {"a", "pages/1"}
    assert [(missing["tier"], missing["reason"]) for missing in by_vector["degraded"]] == [("site", NO_VECTORS)]
    assert ids(where={"part": 2}) == ["pages/2", "pages/3", "site/2"]
    assert ids("recall", query="storm", where={"id": ["pages/1", "site/1"], "tier": "site"}) == ["site/1"]
    assert ids(where={"created_at": "2024-05-01T00:00:00.000Z"}) == ["pages/1"]

    for method, params, sentence in WRITES:
        aimed = json.loads(json.dumps(params).replace("handbook", "pages"))
        refusal = router.request(f"memory/{method}", aimed)["error"]
        assert (refusal["code"], refusal["message"]) == (Code.INVALID_PARAMS, sentence.replace("handbook", "pages"))
    refusal = router.request("memory/promote", {"ids": ["a", "site/1"], "tier": "notes"})["error"]
    assert (refusal["code"], "'site/1' is a record of 'site'" in refusal["message"]) == (Code.INVALID_PARAMS, True)
    assert ask("summarize", query="storm", into="notes")["written"] == 1
    assert ask("forget", query="storm harbour rope lamp") == {"forgotten": 3}
    assert ask("forget", where={"session": "s"}) == {"forgotten": 0}
    assert ids() == manual


WITH_A_TOOL: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
[tiers.tool]
kind = "semantic"
mount = true
command = {tool}
timeout = "60s"
"""


def test_a_search_tool_beside_memory_comes_back_when_it_has_died(tmp_path: Path) -> None:
    server = [sys.executable, str(SERVERS / "mcp_search.py"), "--marks", str(tmp_path)]
    near = ["--score", "score", "--min-score", "0.3"]
    rag = [sys.executable, "-m", "a2m_rag.cli", "mcp", "--tool", "search", "--timeout", "60", *near, "--", *server]
    config = tmp_path / "federation.toml"
    config.write_text(WITH_A_TOOL.format(tool=json.dumps(rag)))
    router = Stdio([str(Path(sys.executable).with_name("a2m-router")), "--config", str(config)], PATIENCE)
    try:
        router.request("memory/remember", {"records": [{"id": "a", "content": "The office closes at six."}]})
        for mark in ("print", "die", "fail"):
            (tmp_path / mark).touch()
            answer = router.request("memory/recall", {"query": "when does the office open"})["result"]
            ids = {record["id"] for record in answer["records"]}
            if mark == "fail":
                (missing,) = answer["degraded"]
                assert missing["tier"] == "tool"
                assert "the tool 'search' returned an error" in missing["reason"]
                assert ids == {"a"}
            else:
                assert (ids, answer.get("degraded")) == ({"a", "tool/pay", "tool/doors"}, None)
        assert len(list(tmp_path.glob("started-*"))) == 2
    finally:
        router.close()


def test_a_search_tool_that_is_dead_is_left_alone(tmp_path: Path) -> None:
    real = SERVERS / "mcp_search.py"
    program = tmp_path / "program.py"
    program.write_text(f"import runpy\nrunpy.run_path({str(real)!r}, run_name='__main__')\n")
    server = [sys.executable, str(program), "--marks", str(tmp_path)]
    rag = [sys.executable, "-m", "a2m_rag.cli", "mcp", "--tool", "search", "--timeout", "60", "--", *server]
    config = tmp_path / "federation.toml"
    config.write_text(WITH_A_TOOL.format(tool=json.dumps(rag)))
    router = Stdio([str(Path(sys.executable).with_name("a2m-router")), "--config", str(config)], PATIENCE)
    try:
        router.request("memory/remember", {"records": [{"id": "a", "content": "The office closes at six."}]})
        program.write_text(
            f"import os, pathlib, sys\n(pathlib.Path({str(tmp_path)!r}) / f'dead-{{os.getpid()}}').touch()\n"
            "sys.exit('the index is gone')\n"
        )
        (tmp_path / "die").touch()
        deadline = time.monotonic() + PATIENCE
        is_left_alone = False
        while not is_left_alone:  # the router may start it again in between, to test whether it works
            assert time.monotonic() < deadline
            before = len(list(tmp_path.glob("dead-*")))
            (missing,) = router.request("memory/recall", {"query": "office"})["result"]["degraded"]
            assert (missing["tier"], "the index is gone" in missing["reason"]) == ("tool", True)
            is_left_alone = len(list(tmp_path.glob("dead-*"))) == before
        assert before > 0
    finally:
        router.close()


HANGING: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
[tiers.site]
kind = "semantic"
mount = true
command = {http}
timeout = "60s"
"""


class Hanging:
    """A search endpoint that answers or hangs, and records its queries."""

    def __init__(self) -> None:
        self.hangs = False
        self.asked: list[str] = []

    async def search(self, request: Request) -> Response:
        self.asked.append(request.query_params["q"])
        if self.hangs:
            await anyio.sleep_forever()
        return JSONResponse(HITS)


@pytest.mark.process
def test_a_service_that_hangs_is_left_alone_until_it_is_back(tmp_path: Path) -> None:
    site = Hanging()
    with ExitStack() as stack:
        url = stack.enter_context(listening(Route("/search", site.search)))
        http = [sys.executable, "-m", "a2m_rag.cli", "http", "--url", f"{url}/search?q={{query}}"]
        http += ["--content", "text", "--timeout", "0.5"]
        config = tmp_path / "federation.toml"
        config.write_text(HANGING.format(http=json.dumps(http)))
        command = [str(Path(sys.executable).with_name("a2m-router")), "--config", str(config)]
        with ExitStack() as while_it_runs:
            router = Stdio(command, PATIENCE)
            while_it_runs.callback(router.close)

            def ask(method: str, **params: Any) -> Any:
                return router.request(f"memory/{method}", params)["result"]

            def described() -> Any:
                return ask("describe")["tiers"][1]

            def until(wanted: Callable[[], bool]) -> None:
                deadline = time.monotonic() + PATIENCE
                while not wanted():
                    assert time.monotonic() < deadline

            ask("remember", records=[{"id": "a", "content": "The storm closed the harbour."}])
            until(lambda: "degraded" not in ask("recall", query="storm"))

            site.hangs = True
            site.asked.clear()

            def is_without_it() -> bool:
                asked = site.asked.count("storm")
                answer = ask("recall", query="storm")
                assert [record["id"] for record in answer["records"]] == ["a"]
                assert [missing["tier"] for missing in answer["degraded"]] == ["site"]
                return site.asked.count("storm") == asked

            until(is_without_it)
            assert site.asked.count("storm") <= 5
            assert all(is_without_it() for _ in range(20))
            down = described()
            assert (down["status"], down["mount"]) == ("down", True)
            assert "no answer within 0.5 s" in down["reason"]

            site.hangs = False
            until(lambda: "degraded" not in ask("recall", query="storm"))
            until(lambda: described()["status"] == "up")

        site.hangs = True
        checked = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert checked.returncode == 1
        (line,) = (line for line in checked.stdout.splitlines() if line.strip().startswith("site "))
        assert {"semantic, mounted", "down"} <= {cell.strip() for cell in re.split(r"\s{2,}", line)}
        assert f"site: {url.removeprefix('http://')}/search: no answer within 0.5 s" in checked.stdout
        site.hangs = False
