"""What a router that dies at the worst moment leaves, and how the next start repairs it.

A crash is a copy of all files at that moment; the calls in progress have no effect on the copy.
"""

from pathlib import Path

import anyio
import pytest
from anyio.lowlevel import checkpoint

import a2m_router.storage.database
import a2m_router.tiers.gateway
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.findings import Findings
from a2m_router.placement.recovery import Recovery
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import Remember
from a2m_router.protocol.wire.records import Draft
from a2m_router.ranking.policy import strength
from a2m_router.storage.database import DatabaseError
from a2m_router.tiers.profile import CannotServe
from a2m_store.store import Store
from tests.support.crashes import BEFORE_THE_FLIP, crash, promote, write_group, write_one
from tests.support.federated import (
    CALM,
    LOCAL,
    Clock,
    Hold,
    Steered,
    Task,
    Trial,
    contents,
    joined,
    lose,
    one_home_each,
    plant,
    trial,
)

pytestmark = pytest.mark.anyio


async def test_a_write_that_no_tier_has_seen_is_as_if_it_had_never_been(tmp_path: Path) -> None:
    folder = await crash(tmp_path, lambda steer: steer.hold("working", "remember"), write_one)
    async with trial(CALM, folder=folder) as fed:
        assert await fed.timeline() == []
        await one_home_each(fed)
        await write_one(fed)
        assert contents(await fed.timeline()) == {"one": "working"}


async def test_a_write_that_its_tier_has_and_nobody_was_answered_is_given_up(tmp_path: Path) -> None:
    folder = await crash(tmp_path, lambda steer: steer.hold("working", "remember", after=True), write_one)
    async with trial(CALM, folder=folder) as fed:
        assert await fed.timeline() == []
        assert await fed.call("fetch", key="k") == {"record": None}
        await fed.settled()
        assert fed.copies() == {}
        await write_one(fed)
        assert contents(await fed.timeline()) == {"one": "working"}
        await one_home_each(fed)


BATCH = [{"id": "w", "content": "here"}, {"id": "s", "content": "there", "tier": "semantic"}]


async def write_two(fed: Trial) -> None:
    await fed.call("remember", records=BATCH)


async def test_a_batch_that_only_one_of_its_tiers_has_is_not_seen_and_is_removed(tmp_path: Path) -> None:
    folder = await crash(tmp_path, lambda steer: steer.hold("semantic", "remember"), write_two)
    async with trial(CALM, folder=folder) as fed:
        assert await fed.timeline() == []
        await fed.settled()
        assert fed.copies() == {}
        await write_two(fed)
        await one_home_each(fed)


def told_by_both(steer: Steered) -> Hold:
    steer.hold("working", "remember", after=True).release()
    return steer.hold("semantic", "remember", after=True)


async def test_a_batch_that_all_tiers_have_but_was_not_answered_is_abandoned(tmp_path: Path) -> None:
    folder = await crash(tmp_path, told_by_both, write_two)
    async with trial(CALM, folder=folder) as fed:
        assert await fed.timeline() == []
        await fed.settled()
        assert fed.copies() == {}
        await write_two(fed)
        await one_home_each(fed)


async def test_a_batch_is_given_up_at_once_though_one_of_its_tiers_is_down(tmp_path: Path) -> None:
    folder = await crash(tmp_path, told_by_both, write_two)
    down = {"semantic"}
    async with trial(CALM, folder=folder, down=down) as fed:
        assert await fed.timeline(tier="working") == []
        for changed in ("forget", "reinforce"):
            amount = {"amount": 1.0} if changed == "reinforce" else {}
            assert set((await fed.call(changed, ids=["w", "s"], **amount)).values()) == {0}
        await fed.call("remember", records=BATCH[:1])
        down.clear()
        await joined(fed, "semantic")
        assert contents(await fed.timeline()) == {"here": "working"}
        await one_home_each(fed)
        await write_two(fed)
        await one_home_each(fed)


@pytest.mark.parametrize("arrived", [True, False])
async def test_what_was_abandoned_at_a_tier_that_is_down_is_written_elsewhere(tmp_path: Path, arrived: bool) -> None:
    async def write(fed: Trial) -> None:
        await fed.call("remember", records=[{"id": "x", "content": "old", "key": "k", "tier": "semantic"}])

    folder = await crash(tmp_path, lambda steer: steer.hold("semantic", "remember", after=arrived), write)
    down = {"semantic"}
    async with trial(CALM, folder=folder, down=down) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "new", "key": "k", "tier": "episodic"}])
        down.clear()
        await joined(fed, "semantic")
        assert contents(await fed.timeline()) == {"new": "episodic"}
        await one_home_each(fed)
        # the abandoned write does not block the key of a later record
        await fed.call("promote", ids=["x"], tier="semantic")
        assert contents(await fed.timeline()) == {"new": "semantic"}
        await one_home_each(fed)


# the record's owner, the owner that forgets it, and the owner that writes the id again; cases that differ only in the
# names of the owners are left out
OWNERS = [
    (owner, by, anew)
    for owner in (None, "a")
    for by in (None, "a", "b")
    for anew in (None, "a", "b", "c")
    # names occur in alphabetical order
    if (by != "b" or owner == "a") and (anew != "b" or "a" in (owner, by)) and (anew != "c" or by == "b")
]


@pytest.mark.parametrize(("owner", "by", "anew"), OWNERS)
async def test_a_tier_that_was_down_loses_only_what_its_owner_forgot(
    tmp_path: Path, owner: str | None, by: str | None, anew: str | None
) -> None:
    """When a tier was down during a forget, it loses its copy of the id only if the forget covered the copy's owner."""
    past(tmp_path, "working", "x", owner=owner)
    down = {"working"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        await fed.call("forget", ids=["x"], owner=by)
        await fed.call("remember", records=[{"id": "x", "content": "new", "tier": "episodic", "owner": anew}])
        down.clear()
        await joined(fed, "working")
        await fed.settled()
        shown, copies = contents(await fed.timeline()), fed.copies()["x"]
        if by is None or owner in (None, by):
            assert (shown, copies) == ({"new": "episodic"}, ["episodic"])
            await one_home_each(fed)
        elif owner != anew:
            assert (shown, sorted(copies)) == ({"new": "episodic"}, ["episodic", "working"])
        else:
            assert len(shown) == 1  # either content: both may be of the same record


async def test_who_forgets_a_record_of_theirs_forgets_no_other_owners_of_that_id(tmp_path: Path) -> None:
    past(tmp_path, "working", "x", owner="a")
    down = {"working"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "new", "tier": "episodic", "owner": "b"}])
        assert await fed.call("forget", ids=["x"], owner="b") == {"forgotten": 1}
        down.clear()
        await joined(fed, "working")
        await fed.settled()
        assert contents(await fed.timeline(owner="a")) == {"past x": "working"}


async def test_of_two_owners_records_of_one_id_one_is_quarantined(tmp_path: Path) -> None:
    """Two owners have records with one id: one is quarantined until the other is forgotten."""
    past(tmp_path, "working", "x", "y", owner="a")
    down = {"working"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        new = [{"id": id, "content": f"new {id}", "tier": "episodic", "owner": "b"} for id in "xy"]
        await fed.call("remember", records=new)
        down.clear()
        await joined(fed, "working")
        assert contents(await fed.timeline()) == {"new x": "episodic", "new y": "episodic"}
        assert await fed.call("forget", ids=["x"], owner="a") == {"forgotten": 1}
        assert await fed.call("forget", ids=["y"], owner="b") == {"forgotten": 1}
        await fed.settled()
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"new x": "episodic", "past y": "working"}
        await one_home_each(fed)


async def test_a_scan_takes_a_copy_of_an_id_being_rewritten_for_the_forgotten(tmp_path: Path) -> None:
    """A copy that a scan finds while its id is written again counts as the forgotten record."""
    past(tmp_path, "working", "x")
    down = {"working"}
    steer = Steered()
    async with trial(CALM, folder=tmp_path, down=down, weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.call("forget", ids=["x"])
        writing = steer.hold("episodic", "remember")
        anew = Task(tasks, lambda: fed.call("remember", records=[{"id": "x", "content": "new", "tier": "episodic"}]))
        await writing.reached.wait()
        down.clear()
        await joined(fed, "working")
        writing.release()
        await anew.ended()
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"new": "episodic"}
        await one_home_each(fed)


async def test_an_abandoned_write_does_not_bring_back_the_forgotten_of_its_id(
    tmp_path: Path,
) -> None:
    async def forget_and_write(fed: Trial) -> None:
        plant(fed, "working", id="x", content="old")
        fed.federation.catalog.tiers.set_scanned("working", False)
        await fed.call("forget", ids=["x"])
        await fed.call("remember", records=[{"id": "x", "content": "new", "tier": "episodic"}])

    folder = await crash(tmp_path, lambda steer: steer.hold("episodic", "remember", after=True), forget_and_write)
    down = {"episodic"}
    async with trial(CALM, folder=folder, down=down) as fed:
        await joined(fed, "working")
        down.clear()
        await joined(fed, "episodic")
        assert await fed.timeline() == []
        await one_home_each(fed)


async def test_a_group_moves_whole_without_its_members_that_were_given_up(tmp_path: Path) -> None:
    async def write(fed: Trial) -> None:
        group = [{"id": id, "content": id, "group": "g"} for id in ("a", "b")]
        await fed.call("remember", records=[*group, {"id": "s", "content": "s", "tier": "semantic"}])

    folder = await crash(tmp_path, lambda steer: steer.hold("semantic", "remember", after=True), write)
    async with trial(CALM, folder=folder, down={"semantic"}) as fed:
        await fed.call("remember", records=[{"id": "late", "content": "late", "group": "g"}])
        assert await fed.call("promote", ids=["late"], tier="episodic") == {"promoted": 1}
        await fed.settled()
        assert {id: tiers for id, tiers in fed.copies().items() if id != "s"} == {"late": ["episodic"]}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("step", range(len(BEFORE_THE_FLIP)))
async def test_a_move_that_had_not_flipped_stays_where_it_was(tmp_path: Path, step: int) -> None:
    folder = await crash(tmp_path, BEFORE_THE_FLIP[step], promote, write_group)
    async with trial(CALM, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"a": "working", "b": "working"}
        await one_home_each(fed)
        await promote(fed)
        assert contents(await fed.timeline()) == {"a": "episodic", "b": "episodic"}
        await one_home_each(fed)


async def test_a_move_that_had_flipped_is_finished(tmp_path: Path) -> None:
    def sweeping(steer: Steered) -> Hold:
        return steer.hold("working", "forget")

    folder = await crash(tmp_path, sweeping, promote, write_group)
    async with trial(CALM, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"a": "episodic", "b": "episodic"}
        await one_home_each(fed)


async def test_what_was_forgotten_before_the_crash_stays_forgotten(tmp_path: Path) -> None:
    async def forget(fed: Trial) -> None:
        await fed.call("forget", ids=["a"])

    folder = await crash(tmp_path, lambda steer: steer.hold("working", "forget"), forget, write_group)
    async with trial(CALM, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"b": "working"}
        await one_home_each(fed)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("tier", ["working", "semantic"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_replacement_is_true_before_its_tier_hears_of_it(tmp_path: Path, tier: str, after: bool) -> None:
    async def replace(fed: Trial) -> None:
        await fed.remember("two", key="k", tier=tier)

    folder = await crash(tmp_path, lambda steer: steer.hold(tier, "remember", after=after), replace, write_one)
    async with trial(CALM, folder=folder) as fed:
        [record] = await fed.timeline()
        assert (record["id"], record["content"], record["revision"], record["tier"]) == ("x", "two", 1, tier)
        await one_home_each(fed)
        await fed.call("promote", ids=["x"], tier="procedural")
        await one_home_each(fed)


async def test_what_all_has_earned_survives_a_clean_restart(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        ids = await fed.remember("alpha", "beta", session="s", metadata={"m": 1})
        await fed.call("recall", query="alpha")
        await fed.call("reinforce", ids=ids[:1], amount=2.5)
        await fed.call("promote", ids=ids[1:], tier="semantic")
        before = await fed.timeline()
    async with trial(CALM, folder=tmp_path) as fed:
        assert await fed.timeline() == before
        await one_home_each(fed)


# --- a tier with earlier records


def past(folder: Path, tier: str, *ids: str, owner: str | None = None) -> None:
    store = Store(folder / f"{tier}.db", clock=Clock())
    with store.transaction():
        records = [Draft(id=id, content=f"past {id}", session="s", owner=owner) for id in ids]
        store.remember(Remember(records=records), LOCAL)
    store.close()


async def a_store_that_brings_a_past(folder: Path) -> None:
    past(folder, "episodic", *(f"e{n:02d}" for n in range(11)))
    down = {"episodic"}
    async with trial(CALM, folder=folder, down=down) as fed:
        # the catalog does not have the record yet; the forget leaves a tombstone, so that the scan does not adopt it
        assert await fed.call("forget", ids=["e03"]) == {"forgotten": 0}
        with pytest.raises(A2MError):
            await fed.call("forget", tier="episodic")
        down.clear()
        await joined(fed, "episodic")
        assert [record["id"] for record in await fed.timeline()] == [f"e{n:02d}" for n in range(11) if n != 3]
        await one_home_each(fed)


async def test_a_store_that_brings_a_past_is_adopted_page_by_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.tiers.gateway, "_PAGE", 3)
    await a_store_that_brings_a_past(tmp_path)


async def test_a_scan_that_ignores_notes_of_forgetting_brings_the_forgotten_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Findings, "is_unwanted", lambda *_: False)
    with pytest.raises(BaseExceptionGroup) as wrong:
        await a_store_that_brings_a_past(tmp_path)
    assert wrong.group_contains(AssertionError)


async def test_a_second_copy_found_by_a_scan_is_a_stray(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "one"}])
        plant(fed, "semantic", id="x", content="one")
        plant(fed, "semantic", id="y", content="two")
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"one": "working", "two": "semantic"}
        await one_home_each(fed)


@pytest.mark.rule(n=12)
async def test_a_tier_that_is_down_at_the_start_joins_later(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.remember("one", tier="semantic")
        await fed.remember("two")
    down = {"semantic"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        answer = await fed.call("timeline")
        assert contents(answer["records"]) == {"two": "working"}
        assert [each["tier"] for each in answer["degraded"]] == ["semantic"]
        with pytest.raises(A2MError):
            await fed.remember("three", tier="semantic")
        down.clear()
        await joined(fed, "semantic")
        assert contents(await fed.timeline()) == {"one": "semantic", "two": "working"}
        await fed.remember("three", tier="semantic")
        await one_home_each(fed)


async def test_a_move_does_not_go_to_a_tier_whose_past_is_not_accounted_for(tmp_path: Path) -> None:
    past(tmp_path, "semantic", "old")
    steer = Steered()
    down = {"semantic"}
    async with trial(CALM, folder=tmp_path, down=down, weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("one")
        scan = steer.hold("semantic", "timeline")
        down.clear()
        await scan.reached.wait()
        with pytest.raises(A2MError):
            await fed.call("promote", ids=ids, tier="semantic")
        scan.release()
        await joined(fed, "semantic")
        assert await fed.call("promote", ids=ids, tier="semantic") == {"promoted": 1}
        assert contents(await fed.timeline()) == {"past old": "semantic", "one": "semantic"}
        tasks.cancel_scope.cancel()


async def test_only_the_record_that_a_tier_lost_meanwhile_is_missing(
    tmp_path: Path,
) -> None:
    """Only the record that a tier lost while the router was not running is missing."""
    async with trial(CALM, folder=tmp_path) as fed:
        ids = await fed.remember("one", "two")
        lose(fed, "working", ids[0])
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"two": "working"}


# --- the identity of stores and of the state file


def exchange(folder: Path, tier: str) -> None:
    for file in folder.glob(f"{tier}.db*"):
        file.unlink()
    past(folder, tier, "other")


async def another_store_behind_a_tier(folder: Path) -> None:
    async with trial(CALM, folder=folder) as fed:
        await fed.remember("one")
    exchange(folder, "working")
    refused = False
    try:
        async with trial(CALM, folder=folder):
            pass
    except* CannotServe:
        refused = True
    assert refused


async def test_another_store_than_last_time_is_refused_unless_it_is_adopted(tmp_path: Path) -> None:
    await another_store_behind_a_tier(tmp_path)
    async with trial(CALM, folder=tmp_path, adopt=True) as fed:
        assert contents(await fed.timeline()) == {"past other": "working"}


async def test_without_a_check_of_identity_another_store_is_taken_for_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recovery, "check", lambda self, tier, profile: None)
    with pytest.raises(AssertionError):
        await another_store_behind_a_tier(tmp_path)


async def a_second_router_on_the_same_file(folder: Path) -> None:
    async with trial(CALM, folder=folder) as fed:
        await checkpoint()
        refused = False
        try:
            Catalog(folder / "router.db", fed.federation.settings.managed, strength).close()
        except DatabaseError:
            refused = True
        assert refused


async def test_one_router_has_a_state_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 0.0)
    await a_second_router_on_the_same_file(tmp_path)
