"""A replacement is true when its call returns, whatever its tier answers: for reads, for moves, and after a restart.
The tier gets it by a pending write.

Native tiers replace a record in place; at a lifted tier the router forgets the old copy first. Clients see no
difference.
"""

from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Draft
from tests.support.clocks import simulated
from tests.support.crashes import photograph
from tests.support.federated import (
    CALM,
    Mix,
    Steered,
    Task,
    Trial,
    contents,
    joined,
    lose,
    method_of,
    one_home_each,
    plant,
    redone,
    retried,
    stored,
    trial,
)
from tests.support.older_stores import draft, hold
from tests.support.replacements import SERVERS, Trouble, fail, native_and_lesser, servers_of_all_kinds

pytestmark = pytest.mark.anyio


async def seen_by_all(fed: Trial) -> dict[str, str]:
    """Return the shown contents with their tiers; assert that timeline, recall and fetch agree on them."""
    shown = await fed.timeline()
    assert len({record["id"] for record in shown}) == len(shown)
    found = contents(shown)
    recalled = (await fed.call("recall", query=" ".join(found), limit=50))["records"] if found else []
    assert contents(recalled) == found
    for record in shown:
        if record.get("key") is not None:
            assert (await fed.call("fetch", key=record["key"]))["record"]["content"] == record["content"]
    return found


def held(fed: Trial) -> dict[str, list[tuple[str, str]]]:
    """Return what the tiers hold: by id, each copy's tier and content."""
    return {id: [(tier, record.content) for tier, record in copies] for id, copies in stored(fed).items()}


# --- a promote right after a replacement


@servers_of_all_kinds
async def test_a_promote_right_after_a_replacement_moves_the_new_content(
    servers: Mix, caplog: pytest.LogCaptureFixture
) -> None:
    async with trial(CALM, servers=servers) as fed:
        [id] = await fed.remember("old", key="k")
        assert await fed.remember("new", key="k") == [id]
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}
        assert await seen_by_all(fed) == {"new": "semantic"}
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}
    assert "not moved" not in caplog.text


@native_and_lesser
async def test_a_promote_waits_for_the_tier_that_is_just_catching_up(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("old", key="k")
        catching_up = steer.hold("working", "remember", after=True, having=b"new")
        await fed.remember("new", key="k")
        await catching_up.reached.wait()
        promoting = Task(tasks, lambda: fed.call("promote", ids=[id], tier="semantic"))
        await wait_all_tasks_blocked()
        assert not promoting.done
        assert await seen_by_all(fed) == {"new": "working"}
        catching_up.release()
        assert await promoting.ended() == {"promoted": 1}
        assert await seen_by_all(fed) == {"new": "semantic"}
        await one_home_each(fed)


GROUP: Final = [{"id": id, "content": f"old {id}", "key": id, "group": "g"} for id in "abc"]


@servers_of_all_kinds
async def test_a_group_of_which_a_member_was_just_replaced_moves_whole(servers: Mix) -> None:
    async with trial(CALM, servers=servers) as fed:
        await fed.call("remember", records=GROUP)
        await fed.call("remember", records=[{"content": f"new {id}", "key": id, "group": "g"} for id in "bc"])
        assert await fed.call("promote", ids=["a"], tier="semantic") == {"promoted": 3}
        assert await seen_by_all(fed) == dict.fromkeys(["old a", "new b", "new c"], "semantic")
        await one_home_each(fed)


# --- reads while a tier has a pending write


@pytest.mark.parametrize("method", ["recall", "timeline"])
async def test_a_read_between_a_lifted_tiers_forget_and_write_sees_the_new(method: str) -> None:
    """The tier answers the read without the record. When the answer arrives, the pending write has been carried out."""
    steer = Steered()
    servers = SERVERS["lesser"]
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("old words", key="k")
        await fed.remember("beside")
        forgotten = steer.hold("working", "forget", after=True)
        assert await fed.remember("new words", key="k") == [id]
        await forgotten.reached.wait()
        asked = steer.hold("working", "recall", after=True)
        question = {"query": "words beside"} if method == "recall" else {}
        reading = Task(tasks, lambda: fed.call(method, **question))
        await asked.reached.wait()
        assert [content for copies in held(fed).values() for _, content in copies] == ["beside"]
        forgotten.release()
        await wait_all_tasks_blocked()
        assert held(fed)[id] == [("working", "new words")]
        asked.release()
        assert contents((await reading.ended())["records"]) == {"new words": "working", "beside": "working"}
        await one_home_each(fed)


# --- a tier that does not take a replacement


TROUBLES = ["refuses", "hangs", "is out of room"]

in_all_troubles = pytest.mark.parametrize("what", TROUBLES)

# longer than every deadline and than the first intervals between retries
A_WHILE: Final = 100.0


async def replaced(fed: Trial, trouble: Trouble) -> str:
    """Replace a record in semantic while the tier is in trouble, assert that reads show the new one; return its id."""
    [id] = await fed.remember("old", key="k", tier="semantic", metadata={"m": 1}, id="x")
    trouble.begin()
    assert await fed.remember("new", key="k", metadata={"m": 2}) == [id]
    await is_shown(fed, id)
    return id


async def is_shown(fed: Trial, id: str) -> None:
    assert (await fed.call("fetch", key="k"))["record"]["content"] == "new"
    [record] = await fed.timeline()
    assert (record["id"], record["content"], record["tier"]) == (id, "new", "semantic")
    assert (record["metadata"], record["revision"]) == ({"m": 2}, 1)


@native_and_lesser
@in_all_troubles
@simulated
async def test_a_replacement_that_its_tier_does_not_take_is_true(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str, servers: Mix
) -> None:
    """A replacement that its tier does not take is true at once, and the tier gets it later."""
    trouble = Trouble(what, servers)
    async with trial(CALM, servers=servers, weather=trouble, folder=tmp_path) as fed:
        id = await replaced(fed, trouble)
        await anyio.sleep(A_WHILE)
        await is_shown(fed, id)
        assert redone(fed) == [id]
        assert held(fed) == {id: [("semantic", "old")]}
        said = [record.getMessage() for record in caplog.records if "not up to date" in record.getMessage()]
        assert len(said) == 1
        assert said[0].startswith("tier=semantic copies are not up to date, will retry: ")
        trouble.end()
        await anyio.sleep(A_WHILE)
        await fed.settled()
        await is_shown(fed, id)
        assert held(fed) == {id: [("semantic", "new")]}
        await one_home_each(fed)


@native_and_lesser
@in_all_troubles
@simulated
async def test_a_pending_write_survives_one_crash_after_the_other(tmp_path: Path, what: str, servers: Mix) -> None:
    folder = tmp_path / "0"
    folder.mkdir()
    trouble = Trouble(what, servers)
    async with trial(CALM, servers=servers, weather=trouble, folder=folder) as fed:
        id = await replaced(fed, trouble)
        folder = photograph(folder, tmp_path / "1")
    for life in (2, 3):
        trouble = Trouble(what, servers)
        trouble.begin()
        async with trial(CALM, servers=servers, weather=trouble, folder=folder) as fed:
            await is_shown(fed, id)
            await anyio.sleep(A_WHILE)
            await is_shown(fed, id)
            folder = photograph(folder, tmp_path / str(life))
    async with trial(CALM, servers=servers, folder=folder) as fed:
        await is_shown(fed, id)
        await fed.settled()
        assert held(fed) == {id: [("semantic", "new")]}
        await one_home_each(fed)


@native_and_lesser
@in_all_troubles
@pytest.mark.parametrize("crashed", [False, True], ids=["by the same router", "after a crash"])
@simulated
async def test_a_forget_of_what_its_tier_has_not_caught_up_with_is_final(
    tmp_path: Path, what: str, servers: Mix, crashed: bool
) -> None:
    (tmp_path / "before").mkdir()
    folder = tmp_path / "before"
    trouble = Trouble(what, servers)
    async with trial(CALM, servers=servers, weather=trouble, folder=folder) as fed:
        id = await replaced(fed, trouble)
        await anyio.sleep(A_WHILE)
        assert await fed.call("forget", ids=[id]) == {"forgotten": 1}
        assert await fed.timeline() == []
        assert await fed.call("fetch", key="k") == {"record": None}
        folder = photograph(folder, tmp_path / "after") if crashed else folder
        trouble.end()
        await anyio.sleep(A_WHILE)
        await fed.settled()
        assert (held(fed), await fed.timeline()) == ({}, [])
    async with trial(CALM, servers=servers, folder=folder) as fed:
        await fed.settled()
        assert (held(fed), await fed.timeline()) == ({}, [])
        await fed.remember("again", key="k")
        assert await seen_by_all(fed) == {"again": "working"}
        await one_home_each(fed)


@native_and_lesser
@simulated
async def test_of_several_pending_writes_a_tier_gets_the_last(servers: Mix) -> None:
    trouble = Trouble("refuses", servers)
    async with trial(CALM, servers=servers, weather=trouble) as fed:
        id = await replaced(fed, trouble)
        for content in ("newer", "newest"):
            assert await fed.remember(content, key="k") == [id]
            assert await seen_by_all(fed) == {content: "semantic"}
        trouble.end()
        await anyio.sleep(A_WHILE)
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "newest")]}
        assert (await fed.call("fetch", key="k"))["record"]["revision"] == 3


@native_and_lesser
async def test_a_tier_that_has_no_part_in_it_may_hang_meanwhile(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        await fed.remember("old", key="k")
        hangs = steer.hold("semantic", "recall")
        async with anyio.create_task_group() as tasks:
            asking = Task(tasks, lambda: fed.call("recall", query="anything", tier="semantic"))
            await hangs.reached.wait()
            await fed.remember("new", key="k")
            assert contents(await fed.timeline(tier="working")) == {"new": "working"}
            hangs.release()
            await asking.ended()
        await one_home_each(fed)


# --- a replacement that names another tier


def calls(steer: Steered, tier: str, method: str) -> int:
    """Return the number of calls of a method that the tier has received."""
    return sum(where == tier and method_of(message) == f"memory/{method}" for where, message in steer.seen)


@servers_of_all_kinds
async def test_a_replacement_in_another_tier_is_shown_there_alone(servers: Mix) -> None:
    async with trial(CALM, servers=servers) as fed:
        [id] = await fed.remember("old", key="k")
        assert await fed.remember("new", key="k", tier="semantic") == [id]
        assert await seen_by_all(fed) == {"new": "semantic"}
        assert await fed.timeline(tier="working") == []
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}


@servers_of_all_kinds
async def test_nothing_is_shown_twice_or_missing_before_the_other_tier_has_it(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        [id] = await fed.remember("old", key="k")
        steer.refuse("semantic", "remember")
        assert await fed.remember("new", key="k", tier="semantic") == [id]
        for _ in range(3):
            assert await seen_by_all(fed) == {"new": "semantic"}
            assert await fed.timeline(tier="working") == []
            await fed.federation.reconciler.idle()
        assert held(fed) == {}  # the old copy need not stay: the catalog has the record
        steer.allow("semantic", "remember")
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}


@servers_of_all_kinds
@pytest.mark.parametrize("taken", [True, False], ids=["which takes it", "which refuses it"])
async def test_the_old_copy_stays_for_a_reader_who_may_have_begun_to_read_it(servers: Mix, taken: bool) -> None:
    steer = Steered()
    if not taken:
        steer.refuse("semantic", "remember")
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("old", key="k")
        on_its_way = steer.hold("working", "recall", after=True)
        reading = Task(tasks, fed.timeline)
        await on_its_way.reached.wait()
        before = calls(steer, "working", "forget")
        await fed.remember("new", key="k", tier="semantic")
        await wait_all_tasks_blocked()
        assert calls(steer, "working", "forget") == before
        assert ("working", "old") in held(fed)[id]
        assert await seen_by_all(fed) == {"new": "semantic"}
        on_its_way.release()
        [shown] = await reading.ended()
        assert shown["content"] in ("old", "new")
        if not taken:
            steer.allow("semantic", "remember")
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}


@servers_of_all_kinds
async def test_the_old_copy_stays_while_a_power_cut_could_need_it(
    servers: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old copy stays as long as a power cut could undo the replacement."""
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        [id] = await fed.remember("old", key="k")
        disk_is_well = anyio.Event()
        wait = GroupCommit.wait

        async def wait_for_the_disk(syncing: GroupCommit) -> None:
            await disk_is_well.wait()
            await wait(syncing)

        before = calls(steer, "working", "forget")
        monkeypatch.setattr(GroupCommit, "wait", wait_for_the_disk)
        async with anyio.create_task_group() as tasks:
            replacing = Task(tasks, lambda: fed.remember("new", key="k", tier="semantic"))
            await wait_all_tasks_blocked()
            assert not replacing.done  # the call does not return before its change is durable
            retried(fed)
            await wait_all_tasks_blocked()
            assert calls(steer, "working", "forget") == before
            assert held(fed) == {id: [("working", "old")]}
            disk_is_well.set()
            assert await replacing.ended() == [id]
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}


@servers_of_all_kinds
@simulated
async def test_the_old_copy_stays_while_the_catalogs_disk_fails(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        [id] = await fed.remember("old", key="k")
        before = calls(steer, "working", "forget")
        with pytest.MonkeyPatch.context() as failing:
            failing.setattr(GroupCommit, "wait", fail)
            with pytest.raises(A2MError, match="may be lost after a power cut"):
                await fed.remember("new", key="k", tier="semantic")
            assert await seen_by_all(fed) == {"new": "semantic"}
            await anyio.sleep(A_WHILE)
            assert calls(steer, "working", "forget") == before
            assert held(fed) == {id: [("working", "old")]}
        await anyio.sleep(A_WHILE)
        await one_home_each(fed)
        assert held(fed) == {id: [("semantic", "new")]}


@servers_of_all_kinds
async def test_a_member_that_is_replaced_into_another_tier_takes_its_group_along(servers: Mix) -> None:
    async with trial(CALM, servers=servers) as fed:
        await fed.call("remember", records=GROUP)
        await fed.remember("new a", key="a", group="g", tier="semantic")
        assert await seen_by_all(fed) == dict.fromkeys(["new a", "old b", "old c"], "semantic")
        await one_home_each(fed)


# --- records that a tier has lost


@servers_of_all_kinds
@pytest.mark.parametrize("to", ["working", "semantic"])
async def test_a_replacement_brings_back_what_its_tier_has_lost(servers: Mix, to: str) -> None:
    async with trial(CALM, servers=servers) as fed:
        [id, other] = await fed.remember("old", key="k") + await fed.remember("beside")
        lose(fed, "working", id)
        assert await fed.remember("new", key="k", tier=to) == [id]
        assert await seen_by_all(fed) == {"new": to, "beside": "working"}
        await one_home_each(fed)
        assert held(fed) == {id: [(to, "new")], other: [("working", "beside")]}
        assert (await fed.call("fetch", key="k"))["record"]["revision"] == 1


@native_and_lesser
async def test_a_replacement_makes_good_what_its_tier_has_altered(servers: Mix) -> None:
    async with trial(CALM, servers=servers) as fed:
        [id] = await fed.remember("old", key="k", id="x")
        lose(fed, "working", id)
        plant(fed, "working", id=id, content="altered", key="k")
        assert await fed.remember("new", key="k") == [id]
        assert await seen_by_all(fed) == {"new": "working"}
        await one_home_each(fed)
        assert held(fed) == {id: [("working", "new")]}


# --- a scan during a replacement


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_replacement_is_true_though_a_scan_changed_its_records_home(tmp_path: Path) -> None:
    """A scan takes no claims. It may change a record's home after the replacement was planned."""
    group: list[Draft] = [draft(id, key=id, group="g") for id in "ab"]
    hold(tmp_path, "working", group)
    hold(tmp_path, "episodic", group)
    down = {"episodic"}
    steer = Steered()
    async with trial(CALM, folder=tmp_path, weather=steer, down=down) as fed, anyio.create_task_group() as tasks:
        assert contents(await fed.timeline()) == {"a's": "working", "b's": "working"}
        beside = steer.hold("working", "remember", after=True, having=b"beside")
        batch: list[dict[str, Any]] = [{"content": "beside", "tier": "working"}, {"content": "new", "key": "a"}]
        writing = Task(tasks, lambda: fed.call("remember", records=batch))
        await beside.reached.wait()
        down.clear()
        await joined(fed, "episodic")
        beside.release()
        await writing.ended()
        assert (await fed.call("fetch", key="a"))["record"]["content"] == "new"
        assert sorted(await seen_by_all(fed)) == ["b's", "beside", "new"]
        await one_home_each(fed)
