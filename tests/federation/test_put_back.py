"""Files of different age: a catalog older than its tiers, a store older than the catalog, and a tier that lost a record
while the router ran.

Each test copies a file at one moment and puts it back at another. No record may be lost by that: either the federation
is right, or the start is refused with an error that names a way out, and that way works.
"""

import contextlib
import json
import re
import shutil
import sqlite3
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.selection import Scope
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import Enrol
from a2m_router.tiers.link import Link
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly
from tests.support.catalogs import opened
from tests.support.commands import ran
from tests.support.disk import Disk, Fate, Files, Moment, Photograph, laid
from tests.support.federated import (
    ALL_NATIVE,
    CALM,
    FOUR_TIERS,
    Clock,
    Foreign,
    Mix,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    contents,
    disconnect,
    held_by,
    joined,
    lose,
    plant,
    redone,
    settings_of,
    told_by,
    trial,
)
from tests.support.rebuilding import rebuilt
from tests.support.restored_files import (
    ANEW,
    CATALOG,
    TIERS,
    T,
    copied,
    files_of,
    heal,
    held,
    is_refused,
    leaves,
    put_back,
)
from tests.support.shared_servers import Shared

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# The servers: native stores, or lifted ones for some tiers.
MIXES: Final[Mapping[str, Mix]] = {
    "native": {},
    "lesser": {"working": Foreign(), "episodic": Foreign()},
    "lesser below": {"episodic": Foreign()},
    "all lesser": dict.fromkeys(TIERS, Foreign()),
}
mixes = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


async def assert_is_there(folder: Path, content: str, tier: str, mix: Mix = ALL_NATIVE) -> None:
    """Assert that the federation has this one record, in its tier alone, in this start and the next."""
    for _ in range(2):
        async with trial(CALM, servers=mix, folder=folder) as fed:
            await fed.settled()
            assert contents(await fed.timeline()) == {content: tier}
            assert_nothing_under_way(fed)
        assert held(folder) == {"t": [(tier, content)]}


# --- a catalog that is older than its tiers


@mixes
async def test_a_record_written_after_a_copy_that_has_its_tombstone_stays(tmp_path: Path, mix: Mix) -> None:
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[T])
        await fed.call("forget", ids=["t"])
        await fed.settled()
    copy = copied(tmp_path)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[ANEW])
        await fed.settled()
    put_back(tmp_path, copy)
    await is_refused(tmp_path, mix)
    await heal(tmp_path, mix)
    await assert_is_there(tmp_path, "anew", "working", mix)


async def halfway(folder: Path, mix: Mix, at: tuple[str, str, bool]) -> Files:
    """Promote a record. Return the catalog's files from the moment at which the move is at the given call."""
    steer = Steered()
    tier, method, after = at
    async with trial(CALM, weather=steer, servers=mix, folder=folder) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=[T])
        await fed.settled()
        hold = steer.hold(tier, method, after=after, having=b'"t"')
        task = Task(tasks, lambda: fed.call("promote", ids=["t"], tier="episodic"))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        copy = copied(folder)
        hold.release()
        await task.settled()
        await fed.settled()
    return copy


MOMENTS: Final = [
    ("working", "recall", False),
    ("episodic", "remember", False),
    ("episodic", "remember", True),
    ("episodic", "recall", True),
    ("working", "forget", False),
    ("working", "forget", True),
]


@mixes
@pytest.mark.parametrize("at", MOMENTS, ids=lambda at: f"{'after' if at[2] else 'before'} {at[1]} at {at[0]}")
async def test_a_copy_of_the_catalog_from_the_middle_of_a_move_costs_no_record(
    tmp_path: Path, mix: Mix, at: tuple[str, str, bool]
) -> None:
    put_back(tmp_path, await halfway(tmp_path, mix, at))
    await assert_is_there(tmp_path, "one", "episodic", mix)


@mixes
async def test_a_catalog_from_the_middle_of_a_move_restored_later_is_refused(tmp_path: Path, mix: Mix) -> None:
    copy = await halfway(tmp_path, mix, ("episodic", "remember", True))
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("forget", ids=["t"])
        await fed.settled()
        await fed.call("remember", records=[{**ANEW, "tier": "episodic"}])
    put_back(tmp_path, copy)
    await is_refused(tmp_path, mix)
    await heal(tmp_path, mix)
    await assert_is_there(tmp_path, "anew", "episodic", mix)


@mixes
@pytest.mark.parametrize("tier", ["working", "episodic"])
async def test_a_record_forgotten_and_written_anew_after_the_copy_is_not_hidden(
    tmp_path: Path, mix: Mix, tier: str
) -> None:
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[T])
    copy = copied(tmp_path)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("forget", ids=["t"])
        await fed.settled()
        await fed.call("remember", records=[{**ANEW, "tier": tier}])
    put_back(tmp_path, copy)
    await is_refused(tmp_path, mix)
    await heal(tmp_path, mix)
    await assert_is_there(tmp_path, "anew", tier, mix)


async def test_what_was_reserved_in_the_copy_is_not_taken_for_a_failed_write(tmp_path: Path) -> None:
    """The older catalog has the reservation of a record that was committed and replaced since."""
    steer = Steered()
    async with trial(CALM, weather=steer, folder=tmp_path) as fed, anyio.create_task_group() as tasks:
        hold = steer.hold("working", "remember")
        task = Task(tasks, lambda: fed.call("remember", records=[{**T, "key": "k"}]))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        copy = copied(tmp_path)
        hold.release()
        await task.settled()
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{**ANEW, "key": "k"}])
        await fed.caught_up()
    put_back(tmp_path, copy)
    await is_refused(tmp_path)
    await heal(tmp_path)
    await assert_is_there(tmp_path, "anew", "working")


async def test_a_pending_write_of_the_copy_does_not_undo_a_later_record(tmp_path: Path) -> None:
    mix, steer = {"working": Foreign()}, Steered()
    async with trial(CALM, servers=mix, weather=steer, folder=tmp_path) as fed:
        await fed.call("remember", records=[{**T, "key": "k"}])
        steer.refuse("working", "forget")
        await fed.call("remember", records=[{"content": "two", "key": "k"}])
        assert redone(fed) == ["t"]
        copy = copied(tmp_path)
        steer.allow("working", "forget")
        await fed.caught_up()
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("forget", ids=["t"])
        await fed.settled()
        await fed.call("remember", records=[{**ANEW, "key": "k"}])
    put_back(tmp_path, copy)
    await is_refused(tmp_path, mix)
    await heal(tmp_path, mix)
    await assert_is_there(tmp_path, "anew", "working", mix)


async def test_what_the_old_catalog_knows_and_is_still_true_comes_along(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[T, {"id": "u", "content": "u", "key": "k"}])
        await fed.call("reinforce", ids=["t"], amount=2.5)
    copy = copied(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"content": "u anew", "key": "k"}, {"id": "v", "content": "v"}])
        await fed.caught_up()
    put_back(tmp_path, copy)
    await is_refused(tmp_path)
    told = (await rebuilt(tmp_path)).warnings
    assert any("older than what the tiers hold" in sentence for sentence in told)
    async with trial(CALM, folder=tmp_path) as fed:
        found = {record["content"]: record["salience"] for record in await fed.timeline()}
        assert found == {"one": 3.5, "u anew": 1.0, "v": 1.0}


async def test_a_newer_tier_that_comes_up_late_is_inactive_and_loses_nothing(
    tmp_path: Path,
) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[T])
        await fed.call("forget", ids=["t"])
        await fed.settled()
    copy = copied(tmp_path)
    others = {"episodic", "semantic", "procedural"}
    async with trial(CALM, folder=tmp_path, down=others) as fed:
        await fed.call("remember", records=[ANEW])
    put_back(tmp_path, copy)
    down = {"working"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        down.clear()
        await fed.federation.links["working"].wait_up()
        await wait_all_tasks_blocked()
        assert "--rebuild" in fed.federation.problems["working"]
        await fed.federation.reconciler.idle()
        with pytest.raises(A2MError, match=r"what it holds|older than"):
            await fed.remember("x", tier="working")
        assert [degraded["tier"] for degraded in (await fed.call("timeline"))["degraded"]] == ["working"]
    assert held(tmp_path) == {"t": [("working", "anew")]}


async def test_a_stray_copy_stays_if_a_later_router_has_written_it(tmp_path: Path) -> None:
    """The look at the newest records does not show the later record. The read before the delete does."""
    mix = {"working": Foreign()}
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[T])
        lost = fed.federation.catalog
        lost.forget(["t"], Scope(), 1)
        server = fed.servers["working"]
        [told] = [record for record in told_by(server) if record.id == "t"]
        assert isinstance(told.metadata, msgspec.Raw)
        rider = msgspec.json.decode(msgspec.json.decode(bytes(told.metadata))["a2m-router"])
        rider["epoch"] = "of a later start"
        metadata = {"a2m-router": msgspec.json.encode(rider).decode()}
        server.call("memory/forget", {"ids": ["t"]})
        server.call("memory/remember", {"records": [{"id": "t", "content": "anew", "metadata": metadata}]})
        await fed.federation.reconciler.idle()
        assert [record.content for record in told_by(server)] == ["anew"]
        assert [stray.id for stray in lost.strays.removable("working", "", 9)] == ["t"]


# --- crashes of a start


def crashes(photographs: Iterable[Photograph], torn: int) -> Iterable[Files]:
    """Return each different state of the files that a crash at one of these moments may leave."""
    found: dict[tuple[tuple[str, bytes], ...], None] = {}
    for photograph in photographs:
        for files in (
            photograph.killed(),
            photograph.cut(),
            photograph.after(lambda name: Fate.LOST if name.startswith(CATALOG) else Fate.KEPT),
            photograph.after(lambda name: Fate.KEPT if name.startswith(CATALOG) else Fate.LOST),
            *(photograph.after(lambda name: Fate.TORN, seed) for seed in range(torn)),
        ):
            found[tuple(sorted(files.items()))] = None
    return map(dict, found)


async def write_some(fed: Trial) -> None:
    await fed.call("remember", records=[T, {"id": "u", "content": "u", "tier": "semantic"}])


async def test_no_crash_of_a_start_asks_for_a_rebuild(tmp_path: Path) -> None:
    folder = tmp_path / "act"
    folder.mkdir()
    starts: list[list[Photograph]] = [[], []]  # the first start, and a later one
    with (disk := Disk(folder)).mounted():
        for photographs in starts:

            def shoot(moment: Moment, into: list[Photograph] = photographs) -> None:
                into.append(disk.photograph())

            async def around(tier: str, message: bytes, go_on: Any, into: list[Photograph] = photographs) -> Any:
                into.append(disk.photograph())
                answer = await go_on()
                into.append(disk.photograph())
                return answer

            disk.watch = shoot
            async with trial(CALM, folder=folder, weather=around) as fed:
                disk.watch = lambda moment: None
                if not await fed.timeline():
                    await write_some(fed)
    # No torn files for the first start: a file that is being created may not be a database yet.
    found = [*crashes(starts[0], torn=0), *crashes(starts[1], torn=1)]
    assert len(found) > 100
    with Disk(tmp_path).mounted():
        for number, files in enumerate(found):
            async with trial(CALM, folder=laid(files, tmp_path / f"{number}")) as fed:
                records = {record["id"] for record in await fed.timeline()}
                assert records in (set(), {"t", "u"})
                await fed.call("remember", records=[{"content": "more"}])


@pytest.mark.parametrize("mix", [MIXES["native"], MIXES["all lesser"]], ids=["native", "lesser"])
async def test_no_server_hears_of_a_start_that_is_not_on_the_catalogs_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mix: Mix
) -> None:
    happened: list[str] = []
    synced = Catalog.synced

    async def noted(self: Catalog) -> None:
        await wait_all_tasks_blocked()  # the sync ends after everything else
        await synced(self)
        happened.append("synced")

    async def watched(tier: str, message: bytes, go_on: Any) -> bytes | None:
        happened.extend(["told"] if b'"epoch"' in message else ["written"] if b"memory/remember" in message else [])
        answer: bytes | None = await go_on()
        return answer

    monkeypatch.setattr(Catalog, "synced", noted)
    async with trial(CALM, servers=mix, folder=tmp_path, weather=watched) as fed:
        await fed.remember("in one call")
    assert happened[0] == "synced"
    assert happened.count("told") == (0 if mix else len(TIERS))
    assert "told" not in happened[happened.index("written") :]


async def test_nothing_is_written_to_a_store_before_it_was_told_of_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await write_some(fed)
    look, reached, let = Link.look, anyio.Event(), anyio.Event()

    async def held_up(self: Link, params: Any) -> None:
        if self.name == "working":
            reached.set()
            await let.wait()
        await look(self, params)

    monkeypatch.setattr(Link, "look", held_up)
    down = {"working"}
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        down.clear()
        await reached.wait()
        with pytest.raises(A2MError, match="did not take the write"):
            await fed.remember("too early", tier="working")
        let.set()
        await joined(fed, "working")
        await fed.remember("in time", tier="working")
    assert sorted(content for copies in held(tmp_path).values() for _, content in copies) == ["in time", "one", "u"]


# --- a store that is older than the catalog

PAGE: Final = {"key": "page", "tier": "semantic"}


async def older_store(folder: Path, *, starts: bool) -> None:
    """Put back the semantic tier's file from before a page was replaced and another record was written.

    Args:
        starts: Whether these writes were in a later start of the router than the copy.
    """
    async with trial(CALM, folder=folder) as fed:
        await fed.call(
            "remember", records=[{"content": "first", **PAGE}, {"id": "kept", "content": "kept", "tier": "semantic"}]
        )
        copy = copied(folder, "semantic")
        if not starts:
            await _go_on(fed)
    if starts:
        async with trial(CALM, folder=folder) as fed:
            await _go_on(fed)
    put_back(folder, copy, "semantic")


async def _go_on(fed: Trial) -> None:
    await fed.call(
        "remember", records=[{"content": "second", **PAGE}, {"id": "new", "content": "new", "tier": "semantic"}]
    )
    await fed.caught_up()


@pytest.mark.parametrize("starts", [True, False], ids=["of an earlier start", "of the same start"])
async def test_what_an_older_store_holds_as_it_once_was_is_not_shown_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, starts: bool
) -> None:
    await older_store(tmp_path, starts=starts)
    async with trial(CALM, folder=tmp_path) as fed:
        assert ("its store is older than the catalog" in caplog.text) == starts
        assert "1 records lost that should live there: new" in caplog.text
        for method, params in (
            ("timeline", {}),
            ("timeline", {"tier": "semantic"}),
            ("timeline", {"where": {"content": ["first", "kept"]}}),
            ("recall", {"query": "first kept"}),
            ("recall", {"query": "first kept", "tier": "semantic"}),
        ):
            answer = await fed.call(method, **params)
            assert [record["content"] for record in answer["records"]] == ["kept"], (method, params)
            [degraded] = answer["degraded"]
            assert degraded["tier"] == "semantic"
            assert "another state" in degraded["reason"]
        for call in (fed.call("fetch", key="page"), fed.call("timeline", page=10)):
            with pytest.raises(A2MError, match="another state"):
                await call
        # A new write makes the page readable again.
        await fed.call("remember", records=[{"content": "third", **PAGE}])
        await fed.caught_up()
        assert contents(await fed.timeline()) == {"kept": "semantic", "third": "semantic"}
        assert (await fed.call("fetch", key="page"))["record"]["revision"] == 2
    async with trial(CALM, folder=tmp_path) as fed:
        assert "degraded" not in await fed.call("timeline")
        assert len((await fed.call("timeline", page=10))["records"]) == 2


async def test_a_page_set_back_in_one_start_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """No record is missing, and the log still names the page."""
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "p", "content": "first", **PAGE}])
        copy = copied(tmp_path, "semantic")
        await fed.call("remember", records=[{"content": "second", **PAGE}])
        await fed.caught_up()
    put_back(tmp_path, copy, "semantic")
    async with trial(CALM, folder=tmp_path):
        assert "tier=semantic 1 records found in a former state" in caplog.text


async def test_a_former_state_that_is_forgotten_is_gone(tmp_path: Path) -> None:
    await older_store(tmp_path, starts=True)
    async with trial(CALM, folder=tmp_path) as fed:
        assert await fed.call("forget", key_prefix="page") == {"forgotten": 1}
        await fed.settled()
        assert "degraded" not in await fed.call("timeline")
    assert held(tmp_path) == {"kept": [("semantic", "kept")]}


async def test_a_record_is_brought_back_by_the_write_that_wrote_it(tmp_path: Path) -> None:
    await older_store(tmp_path, starts=True)
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"content": "second", **PAGE}])
        await fed.caught_up()
        record = (await fed.call("fetch", key="page"))["record"]
        assert (record["content"], record["revision"]) == ("second", 2)


async def test_an_older_store_does_not_bring_back_what_is_gone_from_it(tmp_path: Path) -> None:
    """The older store holds a record that was forgotten since, and one that was promoted since."""
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[T, {"id": "gone", "content": "gone"}])
    copy = copied(tmp_path, "working")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("forget", ids=["gone"])
        await fed.call("promote", ids=["t"], tier="episodic")
        await fed.settled()
    put_back(tmp_path, copy, "working")
    await assert_is_there(tmp_path, "one", "episodic")


async def test_what_was_forgotten_stays_so_after_the_note_of_it_has_ended(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[T, {"id": "gone", "content": "gone"}])
    copy = copied(tmp_path, "working")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("forget", ids=["gone"])
        await fed.settled()
        fed.federation.catalog.drop_notes_before(2**62)
        assert not fed.federation.catalog.tombstones.is_forgotten("gone")
    put_back(tmp_path, copy, "working")
    await assert_is_there(tmp_path, "one", "working")


@pytest.mark.parametrize("way", [("working", "semantic"), ("semantic", "working")], ids=" to ".join)
async def test_a_copy_in_an_older_store_is_not_a_record_that_lives_elsewhere(
    tmp_path: Path, way: tuple[str, str]
) -> None:
    """The copy would be preferred by its revision, its tier or its group."""
    source, target = way
    group = [{"id": id, "content": id, "group": "g", "tier": source} for id in ("g1", "g2")]
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[*group, {"id": "k", "content": "first", "key": "k", "tier": source}])
        await fed.call("remember", records=[{"content": "second", "key": "k", "tier": source}])
        await fed.caught_up()
    copy = copied(tmp_path, source)
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("promote", ids=["g1"], tier=target)
        await fed.call("forget", ids=["k"])
        await fed.settled()
        await fed.call("remember", records=[{"id": "k", "content": "third", "key": "k", "tier": target}])
        await fed.settled()
    put_back(tmp_path, copy, source)
    for _ in range(2):
        async with trial(CALM, folder=tmp_path) as fed:
            await fed.settled()
            assert contents(await fed.timeline()) == {"g1": target, "g2": target, "third": target}
            assert_nothing_under_way(fed)


@mixes
@pytest.mark.parametrize("tier", ["semantic", "procedural"])
async def test_a_forgotten_record_does_not_replace_a_later_one_of_its_id(tmp_path: Path, mix: Mix, tier: str) -> None:
    """The forgotten record has a higher revision, and may have the preferred tier."""
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        for content in ("first", "second", "third"):
            await fed.call("remember", records=[{"id": "t", "content": content, "key": "k", "tier": "working"}])
        await fed.caught_up()
    copy = copied(tmp_path, "working")
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("forget", ids=["t"])
        await fed.settled()
        await fed.call("remember", records=[{"id": "t", "content": "anew", "key": "k", "tier": tier}])
        await fed.settled()
    put_back(tmp_path, copy, "working")
    await assert_is_there(tmp_path, "anew", tier, mix)


@mixes
async def test_a_later_record_of_an_id_does_not_inherit_what_a_lost_one_earned(tmp_path: Path, mix: Mix) -> None:
    """The older catalog has the record as lost."""
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[T])
        await fed.call("reinforce", ids=["t"], amount=5.0)
        await fed.settled()
        lose(fed, "working", "t")
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.settled()
        assert await fed.timeline() == []
    copy = copied(tmp_path)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        fed.clock.now += 1000  # another created_at than the former record's
        await fed.call("remember", records=[{"id": "t", "content": "anew", "tier": "working"}])
    put_back(tmp_path, copy)
    await heal(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        [record] = (await fed.call("recall", query="anew"))["records"]
        assert (record["content"], record["salience"]) == ("anew", 1.0)


@mixes
async def test_what_two_older_stores_lack_leaves_the_account(tmp_path: Path, mix: Mix) -> None:
    """One store holds the forgotten record. The other lacks the later record of its id."""
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[{**T, "tier": "episodic"}, {"id": "u", "content": "u", "tier": "working"}])
    copies = {tier: copied(tmp_path, tier) for tier in ("working", "episodic")}
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("forget", ids=["t"])
        await fed.settled()
        fed.clock.now += 1000  # another created_at than the former record's
        await fed.call("remember", records=[{"id": "t", "content": "anew", "tier": "working"}])
        await fed.settled()
    for tier, copy in copies.items():
        put_back(tmp_path, copy, tier)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.settled()
        assert contents((await fed.call("timeline", page=10))["records"]) == {"u": "working"}
        assert sum(map(fed.federation.catalog.records.count, TIERS)) == 1
        await fed.call("remember", records=[{"id": "t", "content": "again", "tier": "working"}])
        await fed.settled()
        assert contents(await fed.timeline()) == {"u": "working", "again": "working"}
        assert fed.copies()["t"] == ["working"]


@mixes
async def test_a_page_that_its_home_lost_is_what_another_store_holds_of_it(tmp_path: Path, mix: Mix) -> None:
    """The home of the page has lost it. The router adopts the copy that another store still holds."""
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "t", "content": "one", "key": "k", "tier": "working"}])
        await fed.remember("u", tier="semantic")
    copies = {tier: copied(tmp_path, tier) for tier in ("working", "semantic")}
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.call("promote", ids=["t"], tier="semantic")
        await fed.settled()
        await fed.call("remember", records=[{"content": "two", "key": "k", "tier": "semantic"}])
        await fed.caught_up()
    for tier, copy in copies.items():
        put_back(tmp_path, copy, tier)
    for _ in range(2):
        async with trial(CALM, servers=mix, folder=tmp_path) as fed:
            await fed.settled()
            assert contents((await fed.call("timeline", page=10))["records"]) == {"one": "working", "u": "semantic"}
            assert_nothing_under_way(fed)


@mixes
async def test_a_record_lost_in_both_older_stores_leaves_the_catalog_at_once(tmp_path: Path, mix: Mix) -> None:
    """Both stores are from before the record, which has moved from one to the other."""
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.remember("u", tier="working")
        await fed.remember("v", tier="episodic")
    copies = {tier: copied(tmp_path, tier) for tier in ("working", "episodic")}
    steer = Steered()
    async with trial(CALM, servers=mix, folder=tmp_path, weather=steer) as fed:
        await fed.call("remember", records=[T])
        steer.refuse("working", "forget")
        await fed.call("promote", ids=["t"], tier="episodic")
    for tier, copy in copies.items():
        put_back(tmp_path, copy, tier)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.settled()
        assert contents((await fed.call("timeline", page=10))["records"]) == {"u": "working", "v": "episodic"}
        assert sum(map(fed.federation.catalog.records.count, TIERS)) == 2


@pytest.mark.parametrize("target", ["native", "lesser"])
async def test_a_move_does_not_remove_what_has_come_home_to_its_target(tmp_path: Path, target: str) -> None:
    """A move was interrupted after it wrote the copy, and the source has lost the record since."""
    mix = {"semantic": Foreign()} if target == "lesser" else {}
    steer = Steered()
    async with (
        trial(CALM, servers=mix, folder=tmp_path, weather=steer) as fed,
        anyio.create_task_group() as tasks,
    ):
        await fed.call("remember", records=[{**T, "tier": "episodic"}, {"id": "u", "content": "u", "tier": "episodic"}])
        copying = steer.hold("semantic", "remember", after=True)
        move = Task(tasks, lambda: fed.call("promote", ids=["t"], tier="semantic"))
        await copying.reached.wait()
        steer.refuse("semantic", "recall")
        copying.release()
        await move.settled()
        assert move.error is not None
        lose(fed, "episodic", "t")
        steer.allow("semantic", "recall")
        with contextlib.suppress(A2MError):
            await fed.call("promote", ids=["t"], tier="semantic")
        await fed.settled()
        assert contents(await fed.timeline()) == {"one": "semantic", "u": "episodic"}
        assert fed.copies()["t"] == ["semantic"]


@pytest.mark.parametrize("remade", [False, True], ids=["the same catalog", "one that was made anew meanwhile"])
async def test_the_newer_file_brings_back_what_the_older_one_lacked(tmp_path: Path, *, remade: bool) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "t", "content": "one"}])
    older = copied(tmp_path, "working")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "u", "content": "two"}])
    newer = copied(tmp_path, "working")
    put_back(tmp_path, older, "working")
    if remade:
        await heal(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"one": "working"}
    put_back(tmp_path, newer, "working")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.settled()
        assert contents(await fed.timeline()) == {"one": "working", "two": "working"}


async def test_what_was_set_aside_stays_in_a_store_that_is_set_back(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "a", "content": "a", "key": "k", "tier": "working"}])
        plant(fed, "semantic", id="b", content="b", key="k")
    async with trial(CALM, folder=tmp_path) as fed:
        assert [stray.id for stray in fed.federation.catalog.strays.of_kind("semantic", Stray.QUARANTINED)] == ["b"]
    copy = copied(tmp_path, "semantic")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.remember("since", tier="semantic")
    put_back(tmp_path, copy, "semantic")
    async with trial(CALM, folder=tmp_path) as fed:
        assert [stray.id for stray in fed.federation.catalog.strays.of_kind("semantic", Stray.QUARANTINED)] == ["b"]
        await fed.call("forget", ids=["a"])
        await fed.settled()
    async with trial(CALM, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"b": "semantic"}


async def test_an_end_while_an_older_store_is_read_through_brings_nothing_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[T, {"id": "gone", "content": "gone"}])
    copy = copied(tmp_path, "working")
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("forget", ids=["gone"])
        await fed.settled()
        fed.federation.catalog.drop_notes_before(2**62)
    put_back(tmp_path, copy, "working")
    with monkeypatch.context() as broken:
        broken.setattr(Catalog, "adopt", _fails)
        async with trial(CALM, folder=tmp_path) as fed:
            assert not fed.federation.catalog.tiers.is_scanned("working")
    await assert_is_there(tmp_path, "one", "working")


def _fails(*_: object) -> tuple[int, list[Entry]]:
    raise RuntimeError("while it is read through")


async def test_an_old_copy_in_its_home_does_not_cost_a_records_newer_copy(tmp_path: Path) -> None:
    """The target was set back to before a move. The copy that the move left at the source becomes the record."""
    steer = Steered()
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "t", "content": "first", "key": "k", "tier": "episodic"}])
    copy = copied(tmp_path, "episodic")
    async with trial(CALM, folder=tmp_path, weather=steer) as fed:
        await fed.call("remember", records=[{"content": "one", "key": "k", "tier": "working"}])
        await fed.caught_up()
        await fed.settled()
        steer.refuse("working", "forget")
        await fed.call("promote", ids=["t"], tier="episodic")
    put_back(tmp_path, copy, "episodic")
    await assert_is_there(tmp_path, "one", "working")


# --- a tier that lost something while the router ran


@pytest.mark.parametrize("others", [0, 150], ids=["few", "many"])
@pytest.mark.parametrize("exchanged", [False, True], ids=["lost", "exchanged"])
async def test_what_a_tier_lost_meanwhile_leaves_the_catalog_when_it_is_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, *, others: int, exchanged: bool
) -> None:
    down: set[str] = set()
    async with trial(CALM, folder=tmp_path, down=down) as fed:
        await fed.remember(*(f"n{n}" for n in range(others)), tier="semantic")
        await fed.call("remember", records=[{**T, "tier": "semantic"}])
        down.add("semantic")
        disconnect(fed, "semantic")
        lose(fed, "semantic", "t")
        if exchanged:
            _write_behind(fed, "semantic", "other")
        fed.federation.admission.welcomed["semantic"] = anyio.Event()
        down.clear()
        await joined(fed, "semantic")
        assert "1 records lost that should live there: t" in caplog.text
        assert fed.federation.catalog.records.count("semantic") == others + exchanged
        assert len((await fed.call("timeline", page=1000))["records"]) == others + exchanged
        await fed.call("remember", records=[{**ANEW, "tier": "semantic"}])
        assert "anew" in [record["content"] for record in await fed.timeline()]


def _write_behind(fed: Trial, tier: str, content: str) -> None:
    plant(fed, tier, id=content, content=content)


async def test_a_tier_that_has_lost_nothing_is_not_read_through_when_it_is_back(tmp_path: Path) -> None:
    steer = Steered()
    async with trial(CALM, folder=tmp_path, weather=steer) as fed:
        await fed.remember(*(f"n{n}" for n in range(20)), tier="semantic")
        disconnect(fed, "semantic")
        fed.federation.admission.welcomed["semantic"] = anyio.Event()
        steer.seen.clear()
        await joined(fed, "semantic")
        assert any(b"memory/timeline" in message for _, message in steer.seen)
        assert [tier for tier, message in steer.seen if b'"page"' in message] == []


# --- the commands


@pytest.mark.process
def test_a_refused_start_names_a_way_out_that_works(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    tiers = ("working", "semantic")
    config.write_text(
        'name = "home"\nstate = "router.db"\n'
        + "".join(f'[tiers.{tier}]\nkind = "{tier}"\ncommand = ["a2m-store", "{tier}.db"]\n' for tier in tiers)
    )

    run = partial(ran, config)
    run("a2m", "remember", "one", "--id", "t")
    run("a2m", "forget", "t")
    copy = copied(tmp_path)
    run("a2m", "remember", "anew", "--id", "t")
    put_back(tmp_path, copy)
    sentence = (
        r"a2m-router: tiers\.working, tiers\.semantic: the catalog is older than the records there: it does not know "
        r"the router start \(\w+\) that last wrote there; restore the newer catalog, or make a new one from the tiers, "
        r"which keeps what is still true of this one: a2m-router --config FILE --rebuild"
    )
    for arguments in ((), ("--check",), ("--adopt",)):
        assert re.fullmatch(sentence, run("a2m-router", *arguments, code=1).stderr.splitlines()[-1])
    run("a2m", "timeline", code=1)
    assert "older than what the tiers hold" in run("a2m-router", "--rebuild").stdout.replace("\n", " ")
    run("a2m-router", "--check")
    found = json.loads(run("a2m", "timeline", "--json").stdout)["records"]
    assert [(record["id"], record["content"]) for record in found] == [("t", "anew")]


# --- two federations on one server


async def test_two_federations_on_one_server_keep_to_what_is_theirs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mix = Shared(CoreOnly(tmp_path / "shared.db")).mix()
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        async with trial(CALM, servers=mix, folder=tmp_path / name) as fed:
            ids = await fed.remember(f"{name}'s", f"{name}'s other", tier="semantic")
            await fed.call("forget", ids=ids[1:])
            await fed.settled()
    for name in ("one", "two"):
        async with trial(CALM, servers=mix, folder=tmp_path / name) as fed:
            assert contents(await fed.timeline()) == {f"{name}'s": "semantic"}
            assert [r["content"] for r in (await fed.call("recall", query="other one's two's"))["records"]] == [
                f"{name}'s"
            ]
            await fed.settled()
            ours = fed.federation.catalog.lineage.federation
    assert re.search(
        rf"tier=semantic records of another federation not adopted: at least 1 there belong to \w+, this one is {ours}",
        caplog.text,
    )
    async with trial(CALM, servers=mix, folder=tmp_path / "two", adopt=True) as fed:
        assert contents(await fed.timeline()) == {"one's": "semantic", "two's": "semantic"}
    async with trial(CALM, servers=mix, folder=tmp_path / "two") as fed:
        assert contents(await fed.timeline()) == {"one's": "semantic", "two's": "semantic"}


async def test_a_mount_shows_what_another_federation_has_written(tmp_path: Path) -> None:
    shared = Shared(CoreOnly(tmp_path / "shared.db"))
    async with trial(CALM, servers=shared.mix()) as fed:
        await fed.remember("theirs", tier="semantic")
    library = '[tiers.library]\nkind = "semantic"\ncommand = ["-"]\nmount = true\n'
    settings = settings_of(FOUR_TIERS + library, policy="explicit")
    async with trial(settings, servers={"library": shared.mix()["semantic"]}) as fed:
        assert contents(await fed.timeline()) == {"theirs": "library"}


async def test_a_record_of_another_federation_is_not_removed_on_account_of_ours(tmp_path: Path) -> None:
    shared = Shared(CoreOnly(tmp_path / "shared.db"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        async with trial(CALM, servers=shared.mix(), folder=tmp_path / name) as fed:
            record = {"id": "same", "content": name, "tier": "semantic"}
            if name == "two":
                with pytest.raises(A2MError):
                    await fed.call("remember", records=[record])
                await fed.call("forget", ids=["same"])
                await fed.settled()
                assert await fed.timeline() == []
            else:
                await fed.call("remember", records=[record])
    assert [record.content for record in told_by(shared.server)] == ["one"]


async def test_a_store_of_another_federation_is_taken_only_if_it_is_asked_for(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        async with trial(CALM, folder=tmp_path / name) as fed:
            await fed.remember(name, tier="semantic")
    put_back(tmp_path / "two", copied(tmp_path / "one", "semantic"), "semantic")
    with contextlib.closing(sqlite3.connect(tmp_path / "two" / "router.db")) as catalog:
        catalog.execute("UPDATE tiers SET identity = NULL, scanned = 0")  # the catalog knows no store by its identity
        catalog.commit()
    with pytest.raises(BaseExceptionGroup) as refused:
        async with trial(CALM, folder=tmp_path / "two"):
            pass
    [problem] = leaves(refused.value)
    assert re.search(r"^tiers\.semantic: .* another federation \(\w+, this one is \w+\).*--adopt", str(problem))
    shutil.copytree(tmp_path / "two", tmp_path / "three")
    async with trial(CALM, folder=tmp_path / "two", adopt=True) as fed:
        assert "one" in contents(await fed.timeline())
    await rebuilt(tmp_path / "three", adopt=True)
    for name in ("two", "three"):
        async with trial(CALM, folder=tmp_path / name) as fed:
            assert "one" in contents(await fed.timeline())


async def test_a_rebuild_takes_the_federation_that_most_records_bear(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await write_some(fed)
        ours = fed.federation.catalog.lineage.federation
    for path in files_of(tmp_path, CATALOG):
        path.unlink()
    with pytest.raises(BaseExceptionGroup) as refused:
        async with trial(CALM, folder=tmp_path):
            pass
    [problem] = leaves(refused.value)
    assert re.search(r"another federation.*--adopt.*--rebuild", str(problem))
    await heal(tmp_path)
    async with trial(CALM, folder=tmp_path) as fed:
        assert fed.federation.catalog.lineage.federation == ours
        assert {record["id"] for record in await fed.timeline()} == {"t", "u"}


async def test_what_bears_no_federation_counts_as_ours(tmp_path: Path) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await write_some(fed)
    for tier in TIERS:
        with contextlib.closing(sqlite3.connect(tmp_path / f"{tier}.db")) as store:
            store.execute("UPDATE store SET federation = NULL, epoch = NULL")
            store.commit()
    async with trial(CALM, folder=tmp_path) as fed:
        assert {record["id"] for record in await fed.timeline()} == {"t", "u"}


def test_a_store_over_http_takes_nobodys_word_for_whose_it_is() -> None:
    store = Store(None, clock=Clock())
    for caller, kept in ((Caller(asserts_owner=False), None), (Caller(asserts_owner=True), "e")):
        with store.transaction():
            told = store.describe(Enrol(federation="f", epoch="e"), caller)["store"]
        assert told["epoch"] == kept
    assert held_by(store) == []
    store.close()


# --- the starts in the catalog


def test_each_start_has_an_epoch_and_the_federation_keeps_its_id(tmp_path: Path) -> None:
    epochs: list[str] = []
    federations: list[str] = []
    for _ in range(3):
        catalog = opened(tmp_path / "router.db")
        assert all(map(catalog.lineage.knows_epoch, [*epochs, catalog.lineage.epoch, None]))
        assert not catalog.lineage.knows_epoch("another")
        epochs.append(catalog.lineage.epoch)
        federations.append(catalog.lineage.federation)
        catalog.close()
    assert len(set(epochs)) == 3
    assert len(set(federations)) == 1


def test_a_store_is_set_back_if_it_has_held_a_later_epoch(tmp_path: Path) -> None:
    epochs: list[str] = []
    for _ in range(3):
        catalog = opened(tmp_path / "router.db")
        assert not catalog.lineage.is_set_back("working", epochs[-1] if epochs else None)
        catalog.lineage.note_epoch("working")
        epochs.append(catalog.lineage.epoch)
        catalog.close()
    catalog = opened(tmp_path / "router.db")
    assert [catalog.lineage.is_set_back("working", epoch) for epoch in [*epochs, catalog.lineage.epoch, None]] == [
        *(True, True, False, False, True)
    ]
    assert not catalog.lineage.is_set_back("semantic", epochs[0])  # the tier got no epoch that it could have lost
    catalog.close()


def test_what_was_adopted_is_ours_and_what_its_router_writes_since_is_not() -> None:
    """Records of the adopted epochs count as ours, those of the other federation's later epochs do not."""
    catalog = opened()
    assert not catalog.lineage.is_ours("theirs", "then")
    catalog.lineage.take_origins(["then"], ["theirs"])
    assert catalog.lineage.is_ours("theirs", "then")
    assert not catalog.lineage.is_ours("theirs", "later")
    assert catalog.lineage.is_ours(catalog.lineage.federation, "later")
    assert catalog.lineage.is_ours(None, None)
    catalog.close()
