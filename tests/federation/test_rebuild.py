"""`a2m-router --rebuild`: makes a new catalog from the tiers and from the readable part of the old catalog.

The rebuild keeps the old file in any condition. A rebuild that is killed leaves a catalog: the old one, or the complete
new one.
"""

import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

import a2m_router.storage.database
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.rebuild import swap
from a2m_router.catalog.rebuild.swap import REBUILDING
from a2m_router.placement.rebuilding import print_rebuilt
from a2m_router.placement.scanning import Scanner
from a2m_router.ranking.policy import strength
from a2m_router.storage.database import Damaged, DatabaseError, InUse
from a2m_router.tiers.profile import CannotServe
from tests.support.crashes import crash, photograph
from tests.support.federated import Foreign, Hold, Steered, Trial, redone, trial
from tests.support.rebuilding import rebuilt, settings_in

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def running(folder: Path, **how: Any) -> AbstractAsyncContextManager[Trial]:
    return trial(settings_in(folder), folder=folder, **how)


async def lived(folder: Path) -> list[dict[str, Any]]:
    """Return all records of a federation that has been used: with moves, recalls, reinforcement, groups and keys."""
    async with running(folder) as fed:
        ids = await fed.remember("alpha", "beta", session="s", metadata={"m": 1})
        await fed.call("remember", records=[{"id": f"g{n}", "content": f"g{n}", "group": "g"} for n in range(3)])
        await fed.remember("keyed", key="k", tier="semantic", embedding=[1.0, 0.5])
        await fed.call("promote", ids=["g0"], tier="episodic")
        await fed.call("recall", query="alpha")
        await fed.call("reinforce", ids=ids[:1], amount=2.5)
        await fed.settled()
        return await fed.timeline()


def nothing_of_it(file: Path) -> None:
    file.unlink()


def garbage(file: Path) -> None:
    file.write_bytes(b"these are not the pages you are looking for\n" * 200)


def cut_off(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:1000])


def half(file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 8192 * 4096])


def newer(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()


def without_a_table(file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.execute("DROP TABLE tiers")
    database.close()


def page_of(file: Path, table: str) -> int:
    with sqlite3.connect(file) as database:
        [(page,)] = database.execute("SELECT rootpage FROM sqlite_schema WHERE name = ?", (table,))
    database.close()
    return int(page)


def overwritten(table: str) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        page = page_of(file, table)
        with file.open("r+b") as opened:
            opened.seek((page - 1) * 4096)
            opened.write(b"\xa5" * 4096)

    damage.__name__ = f"the page of {table} overwritten"
    return damage


DAMAGES = [garbage, cut_off, half, newer, without_a_table, overwritten("facts"), overwritten("tiers")]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_a_damaged_catalog_is_refused_with_a_way_out_and_the_way_out_works(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    before = await lived(tmp_path)
    file = tmp_path / "router.db"
    damage(file)
    with pytest.raises(Damaged, match=r"router\.db: .*--rebuild") as refused:
        Catalog(file, settings_in(tmp_path).managed, strength, threads=False)
    # the text before the parenthesis is the router's own; SQLite's follows in it
    ours = str(refused.value).partition(f"{REBUILDING} (")[0]
    assert re.search("this file is not a database|newer version|cannot be read from it", ours)
    assert not re.search("malformed|no such table|btree|[Pp]age", ours)
    broken = file.read_bytes()
    done = await rebuilt(tmp_path)
    assert [path.read_bytes() for path in done.aside if not path.name.endswith(("-wal", "-shm"))] == [broken]
    async with running(tmp_path) as fed:
        after = await fed.timeline()
        assert [(r["id"], r["content"], r["tier"]) for r in after] == [
            (r["id"], r["content"], r["tier"]) for r in before
        ]
        assert (await fed.call("fetch", key="k"))["record"]["content"] == "keyed"
        await fed.settled()
        assert {tier for tiers in fed.copies().values() for tier in tiers[1:]} == set()


async def test_after_an_unclean_end_every_page_is_looked_at(tmp_path: Path) -> None:
    await lived(tmp_path)
    file = tmp_path / "router.db"
    overwritten("forgotten_by_time")(file)
    catalog = Catalog(file, settings_in(tmp_path).managed, strength, threads=False)
    assert catalog.damage() is not None
    catalog.database.close()  # not closed in good order
    with pytest.raises(Damaged, match="--rebuild"):
        Catalog(file, settings_in(tmp_path).managed, strength, threads=False)


async def test_a_rebuild_from_a_whole_catalog_changes_nothing(tmp_path: Path) -> None:
    before = await lived(tmp_path)
    done = await rebuilt(tmp_path)
    assert done.warnings == []
    assert sum(each.adopted for each in done.tiers) == len(before)
    async with running(tmp_path) as fed:
        assert await fed.timeline() == before


async def test_what_can_be_read_of_a_damaged_catalog_comes_along(tmp_path: Path) -> None:
    before = await lived(tmp_path)
    overwritten("record_by_home")(tmp_path / "router.db")  # an index: the pages of the records are intact
    await rebuilt(tmp_path)
    async with running(tmp_path) as fed:
        assert await fed.timeline() == before


async def test_without_any_catalog_what_was_earned_is_lost_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = await lived(tmp_path)
    nothing_of_it(tmp_path / "router.db")
    print_rebuilt(await rebuilt(tmp_path), settings_in(tmp_path))
    said = capsys.readouterr().out
    assert "there is no catalog" in said
    assert "is lost with it" in said
    async with running(tmp_path) as fed:
        assert [record["id"] for record in await fed.timeline()] == [record["id"] for record in before]


async def test_what_was_forgotten_while_its_tier_was_down_does_not_come_back(tmp_path: Path) -> None:
    await lived(tmp_path)
    async with running(tmp_path, down={"semantic"}) as fed:
        assert await fed.call("forget", key_prefix="k") == {"forgotten": 1}
    done = await rebuilt(tmp_path)
    assert [each.unwanted for each in done.tiers if each.tier == "semantic"] == [1]
    async with running(tmp_path) as fed:
        assert "keyed" not in [record["content"] for record in await fed.timeline()]
        await fed.settled()
        assert len(fed.copies()) == 5


async def test_without_the_notes_of_the_old_catalog_it_does_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("a2m_router.catalog.rebuild.salvage.Salvage.forgotten", lambda self: iter(()))
    monkeypatch.setattr("a2m_router.catalog.rebuild.salvage.Salvage.unwanted", lambda self: iter(()))
    with pytest.raises(AssertionError):
        await test_what_was_forgotten_while_its_tier_was_down_does_not_come_back(tmp_path)


async def test_a_record_stays_where_the_old_catalog_contradicts_itself(tmp_path: Path) -> None:
    before = await lived(tmp_path)
    with sqlite3.connect(tmp_path / "router.db") as database:
        database.execute("INSERT INTO forgotten VALUES (?, '', 0)", (before[0]["id"],))
    database.close()
    await rebuilt(tmp_path)
    async with running(tmp_path) as fed:
        assert await fed.timeline() == before


async def test_a_replacement_that_its_tier_has_not_caught_up_with_comes_along(tmp_path: Path) -> None:
    foreign = {"semantic": Foreign()}
    steer = Steered()
    async with running(tmp_path, servers=foreign, weather=steer) as fed:
        await fed.remember("old", key="k", tier="semantic")
        steer.refuse("semantic", "forget")
        await fed.remember("new", key="k", tier="semantic")
        assert len(redone(fed)) == 1
    server = foreign["semantic"].behind(settings_in(tmp_path).tier("semantic"), tmp_path / "semantic.db")
    done = await rebuilt(tmp_path, servers={"semantic": server})
    assert done.redone == 1
    async with running(tmp_path, servers=foreign) as fed:
        assert [record["content"] for record in await fed.timeline()] == ["new"]
        assert (await fed.call("fetch", key="k"))["record"]["revision"] == 1


@pytest.mark.parametrize("arrived", [("w",), ("w", "s")])
@pytest.mark.parametrize("replaces", [False, True])
async def test_a_batch_that_was_being_written_is_given_up(
    tmp_path: Path, arrived: tuple[str, ...], *, replaces: bool
) -> None:
    batch = [{"id": "w", "content": "w"}, {"id": "s", "content": "s", "tier": "semantic"}]
    if replaces:
        batch.append({"id": "k", "content": "new", "key": "k"})

    async def prepare(fed: Trial) -> None:
        await fed.call("remember", records=[{"id": "k", "content": "old", "key": "k"}])

    def told(steer: Steered) -> Hold:
        return steer.hold("semantic", "remember", after="s" in arrived)

    folder = await crash(tmp_path, told, lambda fed: fed.call("remember", records=batch), prepare)
    done = await rebuilt(folder)
    assert done.taken.interrupted == 2
    async with running(folder) as fed:
        await fed.settled()
        ids = {record["id"] for record in await fed.timeline()}
        assert ids == {"k"}
        assert fed.copies().keys() == ids
        assert (await fed.call("fetch", key="k"))["record"]["content"] == "old"


async def test_another_store_than_the_old_catalog_knew_is_refused(tmp_path: Path) -> None:
    await lived(tmp_path)
    nothing_of_it(tmp_path / "semantic.db")
    with pytest.raises(ExceptionGroup) as refused:
        await rebuilt(tmp_path)
    assert refused.group_contains(CannotServe, match=r"tiers\.semantic: another store")


async def test_a_tier_that_is_down_is_named_and_nothing_has_changed(tmp_path: Path) -> None:
    before = await lived(tmp_path)
    with pytest.raises(ExceptionGroup) as refused:
        await rebuilt(tmp_path, down=frozenset({"episodic"}))
    assert refused.group_contains(CannotServe, match=r"tiers\.episodic: .*it is not there")
    async with running(tmp_path) as fed:
        assert await fed.timeline() == before


async def test_a_running_router_keeps_its_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 0.0)
    async with running(tmp_path):
        with pytest.raises(InUse):
            await rebuilt(tmp_path)


async def test_another_programs_file_is_not_put_aside(tmp_path: Path) -> None:
    await lived(tmp_path)
    shutil.copy(tmp_path / "semantic.db", tmp_path / "router.db")
    with pytest.raises(DatabaseError, match="another program"):
        await rebuilt(tmp_path)
    assert (tmp_path / "router.db").read_bytes() == (tmp_path / "semantic.db").read_bytes()


# --- killed halfway


class Killed(BaseException):
    """Stands for the death of the process."""


STEPS = ("unlink", "replace", "rename")


async def killed_at(folder: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> bool:
    """Run a rebuild that ends before the `step`th change of the folder; return whether it reached that change."""
    count = 0

    def counted(change: Callable[..., Any]) -> Callable[..., Any]:
        def act(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count >= step:  # a dead process changes nothing more
                raise Killed
            return change(*arguments, **named)

        return act

    with monkeypatch.context() as patch:
        for name in STEPS:
            patch.setattr(Path, name, counted(getattr(Path, name)))
        try:
            await rebuilt(folder)
        except Killed:
            return True
    return False


async def test_a_rebuild_that_is_killed_leaves_the_old_catalog_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await lived(tmp_path / "lived")
    async with running(tmp_path / "lived") as fed:
        await fed.call("reinforce", ids=[before[0]["id"]], amount=1.0)
        before = await fed.timeline()
        # an unclean end: the write-ahead log of the old file must never be used with the new file
        died = photograph(tmp_path / "lived", tmp_path / "died")
    assert (died / "router.db-wal").stat().st_size > 0
    step = 0
    got_there = True
    while got_there:
        step += 1
        folder = tmp_path / f"{step}"
        shutil.copytree(died, folder)
        got_there = await killed_at(folder, monkeypatch, step)
        async with running(folder) as fed:
            assert await fed.timeline() == before
        aside = {path.name.partition("Z")[2]: path for path in folder.glob("router.db.aside-*")}
        if aside:
            assert aside["-wal"].read_bytes() == (died / "router.db-wal").read_bytes()
            assert aside[""].read_bytes() == (died / "router.db").read_bytes()
    assert step > 8


async def test_a_rebuild_that_fails_in_a_scan_leaves_only_the_old_catalog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await lived(tmp_path)
    old = (tmp_path / "router.db").read_bytes()

    async def dies(self: Scanner, tier: str) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(Scanner, "scan", dies)
        with pytest.raises(ExceptionGroup) as failed:
            await rebuilt(tmp_path)
        assert failed.group_contains(OSError)
    assert (tmp_path / "router.db").read_bytes() == old
    assert not swap.rebuilding(tmp_path / "router.db").exists()
    await rebuilt(tmp_path)
    async with running(tmp_path) as fed:
        assert await fed.timeline() == before


# --- as a command


@pytest.mark.process
def test_the_command_does_its_work_says_what_it_found_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(
        'name = "home"\nstate = "router.db"\n'
        '[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "working.db"]\n'
        '[tiers.semantic]\nkind = "semantic"\ncommand = ["a2m-store", "semantic.db"]\n'
    )
    (tmp_path / "router.db").write_bytes(b"no catalog, and long enough to be one" * 100)
    command = [str(Path(sys.executable).with_name("a2m-router")), "--config", str(config)]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)

    refused = run("--check")
    assert refused.returncode == 1
    assert re.search(r"a2m-router: .*router\.db: this file is not a database; .*--rebuild", refused.stderr)
    assert "Traceback" not in refused.stderr
    done = run("--rebuild")
    assert done.returncode == 0, done.stderr
    assert re.search(r"semantic +0 +0", done.stdout)
    [aside] = tmp_path.glob("router.db.aside-*")
    assert f"the old file is kept: {aside}" in done.stdout.replace("\n", "")
    assert run("--check").returncode == 0
