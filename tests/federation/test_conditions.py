"""`if_revision`, an extension of memory/remember: a page is written only at the revision that its writer has read.

Either all of a batch is written or nothing. A call that is repeated after its answer was lost succeeds.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.protocol.wire.errors import A2MError, Code
from tests.support.clocks import simulated
from tests.support.crashes import photograph
from tests.support.federated import (
    CALM,
    Mix,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    at_once,
    joined,
    lose,
    one_home_each,
    redone,
    stored,
    trial,
)
from tests.support.histories import restless
from tests.support.replacements import Trouble, fail, native_and_lesser, servers_of_all_kinds
from tests.support.router_process import PATIENCE, federation, on_http, post, running

pytestmark = pytest.mark.anyio

PAGE: Final = {"content": "one", "key": "k"}


async def write(fed: Trial, *records: dict[str, Any], **params: Any) -> list[str]:
    ids: list[str] = (await fed.call("remember", records=list(records), **params))["ids"]
    return ids


async def page(fed: Trial, key: str = "k", owner: str | None = None) -> dict[str, Any] | None:
    found: dict[str, Any] | None = (await fed.call("fetch", key=key, owner=owner))["record"]
    return found


async def conflict(call: Awaitable[Any]) -> Any:
    """Assert that the call fails with a revision conflict, and return the revision in the error."""
    with pytest.raises(A2MError) as refused:
        await call
    return told_by(refused.value)


def told_by(refused: A2MError) -> Any:
    """Return the revision in a conflict error. Fail on any other error."""
    assert refused.code == Code.INVALID_PARAMS, refused
    assert refused.data is not None, refused
    assert refused.data.keys() == {"reason", "revision"}
    assert refused.data["reason"] == "revision"
    assert "if_revision: expected " in refused.message
    return refused.data["revision"]


# --- which conditions are met


async def test_it_is_announced_with_the_other_extensions() -> None:
    async with trial(CALM) as fed:
        assert (await fed.call("describe"))["store"] == {"pages": True, "if_revision": True}


@servers_of_all_kinds
async def test_a_page_is_written_only_at_the_revision_that_its_writer_has_seen(servers: Mix) -> None:
    async with trial(CALM, servers=servers) as fed:
        wanted: int | None
        for wanted in (0, 1, 2**62):
            assert await conflict(write(fed, {**PAGE, "if_revision": wanted})) is None
        [id] = await write(fed, {**PAGE, "if_revision": None, "tier": "semantic"})
        for revision in range(3):
            for wanted in (None, revision + 1, revision - 1 if revision else 7):
                assert await conflict(write(fed, {"content": "other", "key": "k", "if_revision": wanted})) == revision
            assert await write(fed, {"content": f"new {revision}", "key": "k", "if_revision": revision}) == [id]
            now = await page(fed)
            assert now is not None
            assert (now["content"], now["revision"], now["tier"]) == (f"new {revision}", revision + 1, "semantic")
        # A write without a condition replaces any revision.
        await write(fed, {"content": "again", "key": "k"})
        await fed.call("forget", ids=[id])
        assert await conflict(write(fed, {**PAGE, "if_revision": 4})) is None
        [other] = await write(fed, {**PAGE, "if_revision": None})
        assert other != id
        await one_home_each(fed)


@pytest.mark.parametrize("wrong", [True, False, 1.0, 1.5, -1, "1", "new", [], {}, 2**62 + 1])
async def test_what_is_no_revision_is_refused_by_name(wrong: Any) -> None:
    async with trial(CALM) as fed:
        await write(fed, PAGE)
        with pytest.raises(A2MError) as refused:
            await write(fed, PAGE, {**PAGE, "if_revision": wrong})
        assert refused.value.code == Code.INVALID_PARAMS
        assert refused.value.message.startswith("records[1].if_revision: expected ")
        assert (await page(fed) or {})["revision"] == 0


@pytest.mark.parametrize("condition", [None, 0, 3])
@pytest.mark.parametrize("fields", [{}, {"key": None}, {"id": "x"}])
async def test_a_condition_without_a_key_is_refused(condition: int | None, fields: dict[str, Any]) -> None:
    async with trial(CALM) as fed:
        with pytest.raises(A2MError) as refused:
            await write(fed, {"content": "one", **fields, "if_revision": condition})
        assert refused.value.code == Code.INVALID_PARAMS
        assert refused.value.message.startswith("records[0].if_revision: expected a key beside it")
        assert await fed.timeline() == []


@pytest.mark.parametrize("condition", [5, None], ids=["another revision", "new"])
async def test_of_a_batch_with_one_condition_that_is_not_met_nothing_is_written(condition: int | None) -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await write(fed, {**PAGE, "group": "g"}, {"content": "mate", "group": "g"}, {"content": "x", "key": "other"})
        before = await fed.timeline()
        steer.seen.clear()
        batch: list[dict[str, Any]] = [
            {"content": "new"},
            {"content": "new other", "key": "other", "if_revision": 0},
            {"content": "elsewhere", "tier": "semantic"},
            {"content": "new one", "key": "k", "group": "g", "tier": "episodic", "if_revision": condition},
        ]
        assert await conflict(write(fed, *batch)) == 0
        assert steer.seen == [], "no tier has heard of it, and nothing has been moved"
        assert await fed.timeline() == before
        assert_nothing_under_way(fed)
        batch[3]["if_revision"] = 0
        await write(fed, *batch)
        found = {record["content"]: record["tier"] for record in await fed.timeline()}
        assert found == {
            "new": "working",
            "new other": "working",
            "elsewhere": "semantic",
            "new one": "episodic",
            "mate": "episodic",
        }


# The conditions of one call's records, all with one key; the page's revision before; whether they are met.
BATCHES: list[tuple[list[Any], int | None, bool]] = [
    ([None, 0], None, True),
    ([None, "-", 1], None, True),
    (["-", 0], None, True),
    (["-", 4], 3, True),
    ([3, "-"], 3, True),
    ([3, 4, 5], 3, True),
    ([None, None], None, False),
    ([0, 1], None, False),
    ([3, 3], 3, False),
    ([3, None], 3, False),
    (["-", None], None, False),
    (["-", 3], 3, False),
    ([None, 0], 1, False),
]


@pytest.mark.parametrize(("conditions", "before", "met"), BATCHES, ids=str)
async def test_records_of_one_call_at_one_key_are_written_one_after_the_other(
    conditions: list[Any], before: int | None, met: bool
) -> None:
    async with trial(CALM) as fed:
        if before is not None:
            await write(fed, *({"content": f"old {n}", "key": "k"} for n in range(before + 1)))
        batch = [
            {"content": f"new {place}", "key": "k", **({} if wanted == "-" else {"if_revision": wanted})}
            for place, wanted in enumerate(conditions)
        ]
        was = await page(fed)
        if not met:
            assert await conflict(write(fed, *batch)) == before
            assert await page(fed) == was
            return
        ids = await write(fed, *batch)
        now = await page(fed)
        assert now is not None
        assert ids == [now["id"]] * len(batch)
        first = 0 if before is None else before + 1
        assert (now["content"], now["revision"]) == (batch[-1]["content"], first + len(batch) - 1)
        assert await write(fed, *batch) == ids
        assert await page(fed) == now


async def test_a_page_is_its_owners_and_nobodys_page_is_another_one() -> None:
    async with trial(CALM) as fed:
        await write(fed, {"content": "all's", "key": "k"})
        await write(fed, {"content": "all's again", "key": "k"})
        # A fetch by owner a returns the page without an owner, but a write by owner a does not replace it.
        assert (await page(fed, owner="a") or {})["revision"] == 1
        assert await conflict(write(fed, {**PAGE, "if_revision": 1}, owner="a")) is None
        [mine] = await write(fed, {**PAGE, "if_revision": None}, owner="a")
        assert await conflict(write(fed, {**PAGE, "owner": "a", "if_revision": 1})) == 0
        assert await write(fed, {**PAGE, "content": "mine", "if_revision": 0}, owner="a") == [mine]
        assert await conflict(write(fed, {**PAGE, "if_revision": 0}, owner="b")) is None
        assert await conflict(write(fed, {**PAGE, "if_revision": 0})) == 1
        both = [{"content": "a's", "key": "k", "owner": "a", "if_revision": 1}, {**PAGE, "if_revision": 1}]
        assert len(set(await write(fed, *both))) == 2
        with pytest.raises(A2MError) as refused:
            await write(fed, {"content": "b's", "key": "k", "owner": "a", "if_revision": 2}, owner="b")
        assert refused.value.code == Code.SCOPE_DENIED


async def test_an_id_names_the_page_or_nothing_that_is_there() -> None:
    async with trial(CALM) as fed:
        await write(fed, {"id": "p", **PAGE}, {"id": "x", "content": "x"}, {"id": "y", "content": "y", "key": "y"})
        before = await fed.timeline()
        for id, revision in (("x", 0), ("y", 0), ("x", None), ("y", None)):
            with pytest.raises(A2MError) as refused:
                await write(fed, {"id": id, "content": "new", "key": "k", "if_revision": revision})
            assert refused.value.code == Code.INVALID_PARAMS
            assert refused.value.data is None, "no other revision would make it right"
            assert all(word in refused.value.message for word in (f"'{id}'", "'k'", "leave the id out"))
        with pytest.raises(A2MError, match="an earlier record of this call has the id 'new'"):
            await write(fed, {"id": "new", "content": "new"}, {"id": "new", **PAGE, "if_revision": 0})
        assert await fed.timeline() == before
        assert await write(fed, {"id": "p", "content": "two", "key": "k", "if_revision": 0}) == ["p"]
        assert await conflict(write(fed, {"id": "p", "content": "three", "key": "k", "if_revision": 0})) == 1
        assert await write(fed, {"id": "fresh", "content": "three", "key": "k", "if_revision": 1}) == ["p"]
        assert await write(fed, {"id": "z", "content": "z", "key": "z", "if_revision": None}) == ["z"]


# --- repeated calls


@servers_of_all_kinds
async def test_a_call_that_is_repeated_is_done_until_the_page_is_another(servers: Mix) -> None:
    rich: dict[str, Any] = {"key": "k", "role": "user", "metadata": {"by": "a"}, "embedding": [1.0, 0.5], "uri": "u:1"}
    edits = [{**rich, "content": "new", "if_revision": None}, {**rich, "content": "newer", "if_revision": 0}]
    async with trial(CALM, servers=servers) as fed:
        for number, record in enumerate(edits):
            [id] = await write(fed, record)
            now, cursor = await page(fed), (await fed.call("events"))["cursor"]
            assert now is not None
            assert now["revision"] == number
            assert await write(fed, record) == [id]
            await fed.settled()
            assert await write(fed, record, {"content": f"beside {number}"}) != [id]
            for field, other in (("content", "other"), ("role", "tool"), ("metadata", {"by": "b"}), ("uri", None)):
                assert await conflict(write(fed, {**record, field: other})) == number
            await fed.call("promote", ids=[id], tier="episodic")
            assert await write(fed, record) == [id], "where it lives is another matter"
            kept = await page(fed)
            assert kept == {**now, "tier": "episodic"}
            kinds = [event["kind"] for event in (await fed.call("events", cursor=cursor))["events"]]
            assert kinds == ["written", "promoted"]
        await write(fed, {"content": "newest", "key": "k"})
        assert await conflict(write(fed, record)) == 2
        await one_home_each(fed)


@native_and_lesser
@simulated
async def test_a_repeated_call_is_done_though_its_tier_has_not_caught_up(servers: Mix) -> None:
    trouble = Trouble("refuses", servers)
    async with trial(CALM, servers=servers, weather=trouble) as fed:
        await write(fed, {**PAGE, "tier": "semantic", "if_revision": None})
        await fed.settled()
        trouble.begin()
        edit = {"content": "two", "key": "k", "if_revision": 0}
        ids = await write(fed, edit)
        assert redone(fed) == ids
        assert await write(fed, edit) == ids
        assert await conflict(write(fed, {**edit, "content": "three"})) == 1
        assert await write(fed, {"content": "three", "key": "k", "if_revision": 1}) == ids
        assert await conflict(write(fed, edit)) == 2
        trouble.end()
        await anyio.sleep(100)
        await fed.settled()
        assert [(tier, copy.content) for tier, copy in stored(fed)[ids[0]]] == [("semantic", "three")]


@native_and_lesser
@pytest.mark.parametrize("before", [None, 0], ids=["a new page", "a page"])
@pytest.mark.parametrize("after", [False, True], ids=["before its tier has it", "after its tier has it"])
async def test_a_call_of_which_the_router_died_is_repeated_by_the_next_one(
    servers: Mix, before: int | None, after: bool, tmp_path: Path
) -> None:
    """The router dies before or after the tier has the page. After the repeated call the page has been written once."""
    steer = Steered()
    (tmp_path / "1").mkdir()
    async with trial(CALM, servers=servers, weather=steer, folder=tmp_path / "1") as fed:
        if before is not None:
            await write(fed, PAGE)
            await fed.settled()
        edit = {"content": "two", "key": "k", "if_revision": before}
        writing = steer.hold("working", "remember", after=after)
        async with anyio.create_task_group() as tasks:
            Task(tasks, lambda: write(fed, edit))
            await writing.reached.wait()
            folder = photograph(tmp_path / "1", tmp_path / "2")
            writing.release()
    async with trial(CALM, servers=servers, folder=folder) as fed:
        await joined(fed, "working")
        ids = await write(fed, edit)
        now = await page(fed)
        assert now is not None
        assert (ids, now["content"], now["revision"]) == ([now["id"]], "two", 0 if before is None else 1)
        assert await write(fed, edit) == ids
        assert await conflict(write(fed, {**edit, "content": "three"})) == now["revision"]
        await one_home_each(fed)


async def test_a_repeated_call_is_done_only_when_the_disk_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trial(CALM) as fed:
        [id] = await write(fed, PAGE)
        steer = {"content": "two", "key": "k", "if_revision": 0}
        with monkeypatch.context() as failing:
            failing.setattr(GroupCommit, "wait", fail)
            for _ in range(2):
                with pytest.raises(A2MError, match="may be lost after a power cut"):
                    await write(fed, steer)
        assert await write(fed, steer) == [id]
        await one_home_each(fed)


async def test_a_caller_that_gives_up_has_written_once_and_may_say_it_again() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        edit = {"content": "two", "key": "k", "if_revision": None}
        writing = steer.hold("working", "remember")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(write, fed, edit))
            await writing.reached.wait()
            again = Task(tasks, lambda: write(fed, edit))  # the first call is still in progress
            await wait_all_tasks_blocked()
            assert not again.done
            writing.release()
            ids = await again.ended()
        now = await page(fed)
        assert now is not None
        assert ([now["id"]], now["revision"]) == (ids, 0)


# --- concurrent writers


@servers_of_all_kinds
@pytest.mark.parametrize("before", [None, 0], ids=["a new page", "a page"])
@pytest.mark.parametrize("seed", range(3))
async def test_of_writers_who_have_seen_the_same_revision_one_is_first(
    servers: Mix, before: int | None, seed: int
) -> None:
    async with trial(CALM, servers=servers, weather=restless(seed)) as fed:
        if before is not None:
            await write(fed, PAGE)
        told: dict[str, Any] = {}
        seen: list[Any] = []

        async def edit(name: str) -> None:
            try:
                told[name] = await write(fed, {"content": name, "key": "k", "if_revision": before})
            except A2MError as refused:
                told[name] = None
                seen.append(told_by(refused))

        await at_once(*(partial(edit, name) for name in "abcd"))
        [(winner, ids)] = [(name, ids) for name, ids in told.items() if ids is not None]
        now = await page(fed)
        assert now is not None
        assert (now["content"], [now["id"]]) == (winner, ids)
        assert seen == [now["revision"]] * 3
        await one_home_each(fed)


@native_and_lesser
async def test_a_waiting_write_is_checked_against_what_the_other_one_wrote(servers: Mix) -> None:
    """If the first write fails, the page still does not exist, and the second write succeeds."""
    steer = Steered()
    steer.refuse("semantic", "remember")
    new = {"content": "first", "key": "k", "if_revision": None}
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        for beside in ("semantic", "procedural"):  # the first write fails, then it succeeds
            first = steer.hold("working", "remember")
            writing = Task(tasks, partial(write, fed, new, {"content": "beside", "tier": beside}))
            await first.reached.wait()
            waiting = Task(tasks, partial(write, fed, {**new, "content": "second", "tier": "episodic"}))
            await wait_all_tasks_blocked()
            assert not waiting.done
            first.release()
            if beside == "semantic":
                with pytest.raises(A2MError, match="'semantic' did not take the write"):
                    await writing.ended()
                await fed.call("forget", ids=await waiting.ended())
            else:
                await writing.ended()
                assert await conflict(waiting.ended()) == 0
        await one_home_each(fed)


TURNS: Final = 20
CLIENTS: Final = "abcd"


async def increments(remember: Callable[..., Awaitable[Any]], fetch: Callable[[], Awaitable[Any]], name: str) -> None:
    """Increment the number on a page `TURNS` times.

    The metadata names the writer and the turn. Without it, two writers that write the same number at one revision would
    look like one repeated call.
    """
    for turn in range(TURNS):
        while True:
            now = await fetch()
            number = 0 if now is None else int(now["content"])
            record = {"content": str(number + 1), "key": "k", "metadata": {"by": name, "turn": turn}}
            try:
                await remember({**record, "if_revision": None if now is None else now["revision"]})
                break
            except A2MError as refused:
                told_by(refused)


@native_and_lesser
@pytest.mark.parametrize("seed", range(2))
async def test_of_four_writers_with_twenty_increments_each_none_is_lost(servers: Mix, seed: int) -> None:
    async with trial(CALM, servers=servers, weather=restless(seed)) as fed:
        await at_once(*(partial(increments, partial(write, fed), partial(page, fed), name) for name in CLIENTS))
        now = await page(fed)
        assert now is not None
        assert (now["content"], now["revision"]) == ("80", 79)
        await one_home_each(fed)


ADDER: Final = """
import sys
from a2m_router import A2MError, blocking

url, name, turns = sys.argv[1:]
with blocking.connect(url) as memory:
    for turn in range(int(turns)):
        while True:
            page = memory.fetch("k")
            number, seen = (0, None) if page is None else (int(page.content), page.revision)
            try:
                memory.remember(str(number + 1), key="k", metadata={"by": name, "turn": turn}, if_revision=seen)
                break
            except A2MError as refused:
                if (refused.data or {}).get("reason") != "revision":
                    raise
"""


@pytest.mark.process
def test_of_four_processes_with_twenty_increments_each_none_is_lost(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (_, client, _), ExitStack() as ending:
        url = str(client.base_url)
        arguments = [sys.executable, "-c", ADDER, url]
        adders = [
            ending.enter_context(subprocess.Popen([*arguments, name, str(TURNS)], stderr=subprocess.PIPE))
            for name in CLIENTS
        ]
        for adder in adders:
            ending.callback(adder.kill)
        for adder in adders:
            _, said = adder.communicate(timeout=PATIENCE)
            assert adder.returncode == 0, said.decode()
        record = post(client, "fetch", key="k")["record"]
        assert (record["content"], record["revision"]) == ("80", 79)


@pytest.mark.process
def test_a_call_whose_answer_nobody_read_is_repeated_over_http(tmp_path: Path) -> None:
    """The caller disconnects before it reads the answer, so the first call may or may not have been carried out."""
    with on_http(federation(tmp_path)) as (_, client, _):
        host, port = client.base_url.host, client.base_url.port
        assert port is not None
        for number in range(10):
            edit = {"content": f"edit {number}", "key": "k", "if_revision": number - 1 if number else None}
            message = {"jsonrpc": "2.0", "id": 1, "method": "memory/remember", "params": {"records": [edit]}}
            body = json.dumps(message).encode()
            head = f"POST / HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
            with socket.create_connection((host, port), timeout=PATIENCE) as hasty:
                hasty.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(2):
                assert "ids" in post(client, "remember", records=[edit])
            record = post(client, "fetch", key="k")["record"]
            assert (record["content"], record["revision"]) == (f"edit {number}", number)


@pytest.mark.process
def test_a_call_whose_router_was_killed_is_repeated_at_the_next_one(tmp_path: Path) -> None:
    config = federation(tmp_path)
    for number in range(4):
        edit = {"content": f"edit {number}", "key": "k", "if_revision": number - 1 if number else None}
        with running(config) as router:
            assert router.ask("describe")["result"]["store"]["if_revision"] is True
            router.send("remember", records=[edit])
            if number % 2:
                router.answer()
            router.popen.kill()
        with running(config) as router:
            answer = router.ask_until(lambda answer: "result" in answer, "remember", records=[edit])
            record = router.ask("fetch", key="k")["result"]["record"]
            assert answer["result"]["ids"] == [record["id"]]
            assert (record["content"], record["revision"]) == (f"edit {number}", number)


# --- the tiers


async def test_no_tier_hears_of_a_condition_and_none_is_kept() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await write(fed, {**PAGE, "if_revision": None})
        steer.refuse("working", "remember")
        await write(fed, {"content": "two", "key": "k", "if_revision": 0})
        kept = fed.federation.catalog._tables.execute("SELECT draft FROM redo").get
        assert b"two" in kept
        assert b"if_revision" not in kept
        steer.allow("working", "remember")
        await fed.settled()
        assert steer.seen
        assert not any(b"if_revision" in message for _, message in steer.seen)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_conflict_is_answered_though_the_tier_is_down(tmp_path: Path) -> None:
    """A tier that is down fails a write that its condition allows. A conflict is found without the tier."""
    down: set[str] = set()
    edit = {"content": "two", "key": "k", "if_revision": 0}
    async with trial(CALM, folder=tmp_path) as fed:
        [id] = await write(fed, {**PAGE, "tier": "semantic"})
    down.add("semantic")
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        assert await conflict(write(fed, {**edit, "if_revision": 3})) == 0
        assert await conflict(write(fed, {**edit, "if_revision": None})) == 0
        with pytest.raises(A2MError, match="'semantic' did not take the write") as refused:
            await write(fed, edit)
        assert refused.value.code == Code.INTERNAL_ERROR
        down.clear()
        await joined(fed, "semantic")
        assert await write(fed, edit) == [id]
        assert (await page(fed) or {})["revision"] == 1


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_whether_there_is_a_page_is_open_until_all_tiers_are_read(tmp_path: Path) -> None:
    """A tier that was not scanned may hold the page."""
    async with trial(CALM, folder=tmp_path) as fed:
        id, _ = await write(fed, {**PAGE, "tier": "semantic"}, {"content": "x", "key": "x"})
    (tmp_path / "router.db").unlink()
    down = {"semantic"}
    async with trial(CALM, folder=tmp_path, down=down, adopt=True) as fed:
        for condition in (None, 0, 3):
            with pytest.raises(A2MError) as refused:
                await write(fed, {"content": "two", "key": "k", "if_revision": condition})
            assert refused.value.code == Code.INTERNAL_ERROR
            assert "semantic" in refused.value.message
        await write(fed, {"content": "two", "key": "x", "if_revision": 0})  # the catalog has this page
        down.clear()
        await joined(fed, "semantic")
        assert await conflict(write(fed, {"content": "two", "key": "k", "if_revision": None})) == 0
        assert await write(fed, {"content": "two", "key": "k", "if_revision": 0}) == [id]


async def test_a_repeated_call_brings_back_a_page_that_its_tier_lost() -> None:
    async with trial(CALM) as fed:
        record = {**PAGE, "id": "p", "if_revision": None}
        await write(fed, record)
        lose(fed, "working", "p")
        assert await write(fed, record) == ["p"]
        assert (await page(fed) or {})["content"] == "one"
