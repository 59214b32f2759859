"""Starts where a tier does not hold what the catalog says, because the catalog is lost or the tier was changed behind
the router's back.

After the loss of a catalog, groups that were in the middle of a move come out whole: `torn` plants every state that a
group of three can have between two tiers, each state as a group of its own.
"""

import re
from collections.abc import Callable, Iterator
from itertools import chain, combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anyio import wait_all_tasks_blocked

import a2m_router.placement.recovery
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Stray
from a2m_router.catalog.findings import Decided
from a2m_router.daemon.checking import print_check
from a2m_router.protocol.wire.errors import A2MError
from tests.support.catalogs import entry, opened, replace, rewritten, strays_left
from tests.support.crashes import BEFORE_THE_FLIP, Act, crash, promote, write_group
from tests.support.federated import (
    Hold,
    Steered,
    Trial,
    assert_nothing_under_way,
    joined,
    lose,
    plant,
    settings_of,
    trial,
)
from tests.support.older_stores import draft, hold

pytestmark = pytest.mark.anyio

CALM = settings_of(policy="explicit")

MEMBERS = ("a", "b", "c")

# the members that have been written at the target, and those of them that have been deleted at the source
State = tuple[frozenset[str], frozenset[str]]


def subsets(of: frozenset[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(sorted(of), size) for size in range(len(of) + 1)))


STATES: list[State] = [(written, removed) for written in subsets(frozenset(MEMBERS)) for removed in subsets(written)]


def torn(folder: Path) -> None:
    """Fill both tiers with one group for each of STATES, on its way from working to episodic."""
    left, arrived = [], []
    for place, (written, removed) in enumerate(STATES):
        for member in MEMBERS:
            each = draft(f"{member}{place}", group=f"g{place}", owner="alice", embedding=[1.0, float(place)])
            if member in written:
                arrived.append(each)
            if member not in removed:
                left.append(each)
    hold(folder, "working", left)
    hold(folder, "episodic", arrived)


def expected(state: State) -> dict[str, str]:
    """Return the expected home of each member.

    All live in the tier that holds all of them; if both or neither do, in the lower one. Where the tiers have no member
    in common, each stays where it is, since a group can be written in that state.
    """
    written, removed = state
    if written == removed:
        return {member: "episodic" if member in written else "working" for member in MEMBERS}
    whole_at_target, whole_at_source = written == set(MEMBERS), not removed
    home = "working" if whole_at_source and not whole_at_target else "episodic"
    return dict.fromkeys(MEMBERS, home)


async def one_home_each(fed: Trial) -> None:
    await fed.settled()
    assert fed.copies() == {r["id"]: [r["tier"]] for r in await fed.timeline()}
    assert_nothing_under_way(fed)


async def torn_groups_come_out_whole(folder: Path, first: str | None) -> None:
    torn(folder)
    down = {"working", "episodic"} - {first} if first is not None else set()
    async with trial(CALM, folder=folder, down=down) as fed:
        for tier in sorted(down):
            down.discard(tier)
            await joined(fed, tier)
        found = {record["id"]: record["tier"] for record in await fed.timeline()}
        wanted = {
            f"{member}{place}": tier for place, state in enumerate(STATES) for member, tier in expected(state).items()
        }
        assert found == wanted
        await one_home_each(fed)


@pytest.mark.parametrize("first", [None, "working", "episodic"])
async def test_a_group_that_a_move_had_torn_is_whole_when_the_catalog_is_lost(
    tmp_path: Path, first: str | None
) -> None:
    await torn_groups_come_out_whole(tmp_path, first)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_decided_record_by_record_groups_stay_torn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Catalog, "decide_groups", lambda self: Decided())
    with pytest.raises(BaseExceptionGroup) as wrong:
        await torn_groups_come_out_whole(tmp_path, None)
    assert wrong.group_contains(AssertionError)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_groups_stay_in_doubt_until_their_tiers_are_read_through(tmp_path: Path) -> None:
    torn(tmp_path)
    down = {"episodic"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        await fed.settled()
        assert {tier for tiers in fed.copies().values() for tier in tiers} == {"working"}  # episodic is not open yet
        assert strays_left(fed.federation.catalog) == 0
        down.clear()
        await joined(fed, "episodic")
        await one_home_each(fed)


async def write_to_both(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "a"}, {"content": "b", "tier": "episodic"}])


async def forget_one(fed: Trial) -> None:
    await fed.call("forget", ids=["a"])


# the records expected afterwards: the whole change or nothing of it
OUTCOMES: dict[str, list[tuple[str, str]]] = {
    "a batch that one tier has": [],
    "a batch that both have": [],
    "a move that is copied": [("a", "working"), ("b", "working")],
    "a move that is compared": [("a", "working"), ("b", "working")],
    "a move that has flipped": [("a", "episodic"), ("b", "episodic")],
    "a forget": [("b", "working")],
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("step", range(len(BEFORE_THE_FLIP)))
async def test_a_move_that_was_cut_off_with_the_catalog_lost_leaves_one_of_each(tmp_path: Path, step: int) -> None:
    folder = await crash(tmp_path, BEFORE_THE_FLIP[step], promote, write_group)
    for file in folder.glob("router.db*"):
        file.unlink()
    async with trial(CALM, folder=folder, adopt=True) as fed:
        assert len({record["tier"] for record in await fed.timeline()}) == 1
        assert [record["content"] for record in await fed.timeline()] == ["a", "b"]
        await one_home_each(fed)


CUT_OFF: dict[str, tuple[Callable[[Steered], Hold], Act, Act | None]] = {
    "a batch that one tier has": (lambda steer: steer.hold("episodic", "remember"), write_to_both, None),
    "a batch that both have": (lambda steer: steer.hold("episodic", "remember", after=True), write_to_both, None),
    "a move that is copied": (lambda steer: steer.hold("episodic", "remember", after=True), promote, write_group),
    "a move that is compared": (lambda steer: steer.hold("episodic", "recall", after=True), promote, write_group),
    "a move that has flipped": (lambda steer: steer.hold("working", "forget"), promote, write_group),
    "a forget": (lambda steer: steer.hold("working", "forget"), forget_one, write_group),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("first", ["working", "episodic", "neither"])
@pytest.mark.parametrize("what", CUT_OFF)
async def test_whatever_was_cut_off_is_put_right_whichever_tier_comes_up_first(
    tmp_path: Path, what: str, first: str
) -> None:
    at, act, prepare = CUT_OFF[what]
    folder = await crash(tmp_path, at, act, prepare)
    down = {"working", "episodic"} - {first}
    async with trial(CALM, folder=folder, down=down) as fed:
        await fed.settled()
        for tier in sorted(down, reverse=True):
            down.discard(tier)
            await joined(fed, tier)
        found = [(record["content"], record["tier"]) for record in await fed.timeline()]
        assert found == OUTCOMES[what]
        await one_home_each(fed)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_of_unequal_copies_the_one_with_the_higher_revision_is_the_record(tmp_path: Path) -> None:
    hold(tmp_path, "working", [draft("x", key="k", revision=3, content="new"), draft("y", content="source")])
    hold(tmp_path, "episodic", [draft("x", key="k", revision=2, content="old"), draft("y", content="altered")])
    async with trial(CALM, folder=tmp_path) as fed:
        assert {r["content"]: r["tier"] for r in await fed.timeline()} == {"new": "working", "source": "working"}
        await one_home_each(fed)


def test_an_equal_copy_of_a_record_replaced_meanwhile_does_not_come_back() -> None:
    """An equal copy that awaits the end of a scan is deleted when its record is replaced meanwhile."""
    catalog = opened()
    found = entry("x", "working", group="g", key="k")
    catalog.adopt([found])
    catalog.end_scan("working")
    catalog.adopt([msgspec.structs.replace(found, home="episodic")])
    known = catalog.records.find(["x"])["x"]
    assert replace(catalog, rewritten(known), known)
    catalog.end_scan("episodic")
    now = catalog.records.find(["x"])["x"]
    assert (now.home, now.digest) == ("working", rewritten(known).digest)
    assert [(stray.tier, stray.kind) for stray in catalog.strays.removable("episodic", "", 5)] == [
        ("episodic", Stray.UNWANTED)
    ]
    catalog.close()


# --- behind the router's back


async def write_some(folder: Path) -> list[str]:
    async with trial(CALM, folder=folder) as fed:
        ids = await fed.remember(*(f"n{n}" for n in range(12)), tier="semantic")
        await fed.call("reinforce", ids=ids[:1], amount=2.5)
    return ids


def scans(steer: Steered) -> list[str]:
    """Return the tiers that a scan has read."""
    return [tier for tier, message in steer.seen if b"memory/timeline" in message and b'"embeddings":true' in message]


async def started(folder: Path) -> list[str]:
    """Start a router and return the tiers that it scans."""
    steer = Steered()
    async with trial(CALM, folder=folder, weather=steer):
        pass
    return scans(steer)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_start_with_nothing_new_reads_a_few_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that finds nothing new reads a fixed number of the newest records, however many there are."""
    monkeypatch.setattr(a2m_router.placement.recovery, "_WITNESSES", 3)
    await write_some(tmp_path)
    steer = Steered()
    async with trial(CALM, folder=tmp_path, weather=steer):
        asked = [msgspec.json.decode(message)["params"] for tier, message in steer.seen if b"timeline" in message]
    assert [params["limit"] for params in asked] == [3] * 4
    assert scans(steer) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_record_that_came_behind_the_routers_back_is_taken_in(tmp_path: Path) -> None:
    await write_some(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        plant(fed, "semantic", id="planted", content="from outside")
    async with trial(CALM, folder=tmp_path) as fed:
        assert "from outside" in [record["content"] for record in await fed.timeline()]
    assert await started(tmp_path) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_an_exchange_that_keeps_the_count_is_noticed(tmp_path: Path) -> None:
    ids = await write_some(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        lose(fed, "semantic", ids[4])
        plant(fed, "semantic", id="planted", content="from outside")
    async with trial(CALM, folder=tmp_path) as fed:
        found = [record["content"] for record in await fed.timeline()]
        assert "from outside" in found
        assert "n4" not in found
        assert fed.federation.catalog.records.count("semantic") == 12
    assert await started(tmp_path) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_lost_record_leaves_the_catalog_and_keeps_what_it_earned(tmp_path: Path) -> None:
    """A record that its tier has lost is removed from the catalog. When it comes back, it has its earlier salience and
    access count again.
    """
    ids = await write_some(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        [before] = [record for record in await fed.timeline() if record["id"] == ids[0]]
        lose(fed, "semantic", ids[0])
    async with trial(CALM, folder=tmp_path) as fed:
        assert fed.federation.catalog.records.count("semantic") == 11
    assert await started(tmp_path) == []  # a lost record does not cause a scan at every start
    async with trial(CALM, folder=tmp_path) as fed:
        plant(fed, "semantic", id=ids[0], content="n0", created_at=before["created_at"])
    async with trial(CALM, folder=tmp_path) as fed:
        assert [record for record in await fed.timeline() if record["id"] == ids[0]] == [before]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_group_is_not_held_back_by_a_member_that_its_tier_has_lost(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await write_group(fed)
        lose(fed, "working", "a")
    async with trial(CALM, folder=tmp_path) as fed:
        assert await fed.call("promote", ids=["b"], tier="episodic") == {"promoted": 1}
        await one_home_each(fed)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_scan_that_does_not_tell_of_a_record_does_not_prove_it_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write_some(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        whole = fed.federation.recovery._gateway.everything

        async def all_but_the_first(tier: str, written: Any) -> Any:
            async for page in whole(tier, written):
                yield page[1:]

        monkeypatch.setattr(fed.federation.recovery._gateway, "everything", all_but_the_first)
        await fed.federation.recovery._scanner.scan("semantic")
        assert len(await fed.timeline()) == 12


# --- two records at one key


async def with_a_conflict(folder: Path) -> None:
    """Write a record at alice's key into each of two tiers."""
    hold(folder, "working", [draft("x", key="k", owner="alice", content="one")])
    hold(folder, "semantic", [draft("y", key="k", owner="alice", content="two")])


def other_of(fed: Trial) -> tuple[str, str, str]:
    """Return the id that holds the key, the id of the quarantined record, and the tier of the latter."""
    [(tier, stray)] = [
        (name, s)
        for name in ("working", "semantic")
        for s in fed.federation.catalog.strays.of_kind(name, Stray.QUARANTINED)
    ]
    return ("y" if stray.id == "x" else "x"), stray.id, tier


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_second_record_at_a_key_is_kept_named_and_does_not_cause_scans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await with_a_conflict(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        holder, aside, tier = other_of(fed)
        assert [record["id"] for record in await fed.timeline()] == [holder]
        assert await print_check(fed.federation) == 0
        assert re.search(rf"{tier}: record '{aside}' is quarantined.*'k'", capsys.readouterr().out)
        await fed.settled()
        assert {id for id, tiers in fed.copies().items()} == {"x", "y"}
    assert await started(tmp_path) == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_was_set_aside_is_not_written_over_by_a_move(tmp_path: Path) -> None:
    await with_a_conflict(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        holder, _, tier = other_of(fed)
        with pytest.raises(A2MError):
            await fed.call("promote", ids=[holder], tier=tier)
        await fed.settled()
        assert {record["content"] for record in await fed.timeline()} | {"one", "two"} == {"one", "two"}
        assert fed.copies() == {"x": ["working"], "y": ["semantic"]}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_was_set_aside_is_taken_in_when_the_key_is_free(tmp_path: Path) -> None:
    await with_a_conflict(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        holder, aside, tier = other_of(fed)
        await fed.call("forget", ids=[holder])
        await fed.settled()
    async with trial(CALM, folder=tmp_path) as fed:
        assert [(record["id"], record["tier"]) for record in await fed.timeline()] == [(aside, tier)]
        assert (await fed.call("fetch", key="k", owner="alice"))["record"]["id"] == aside
        await one_home_each(fed)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_quarantined_record_is_forgotten_by_its_owners_call_alone(tmp_path: Path) -> None:
    await with_a_conflict(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        holder, aside, _ = other_of(fed)
        assert await fed.call("forget", ids=[aside], owner="bob") == {"forgotten": 0}
        assert await fed.call("forget", ids=[aside], owner="alice") == {"forgotten": 1}
        await one_home_each(fed)
        assert fed.copies() == {holder: ["working" if holder == "x" else "semantic"]}


# --- why a tier is inactive


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_check_says_why_a_tier_that_is_up_takes_no_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steer = Steered()
    steer.refuse("semantic", "timeline")
    down = {"semantic"}
    async with trial(CALM, folder=tmp_path, weather=steer, down=down) as fed:
        down.clear()
        await fed.federation.links["semantic"].wait_up()
        with pytest.raises(A2MError):
            await fed.remember("x", tier="semantic")
        await wait_all_tasks_blocked()
        assert await print_check(fed.federation) == 1
        assert re.search("semantic: .*not today", capsys.readouterr().out)
        steer.allow("semantic", "timeline")
        await joined(fed, "semantic")
        assert await print_check(fed.federation) == 0


def test_every_kind_of_stray_that_may_be_swept_is_known_to_be() -> None:
    # a new kind needs a decision in `Lookup.strays` and `Reconciler._remove`
    assert [kind.name for kind in Stray] == ["PENDING", "SUPERSEDED", "UNWANTED", "EQUAL", "QUARANTINED"]
