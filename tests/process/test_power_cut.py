"""The power fails, a sync fails, the disk is full: what the files of a store and of a catalog hold afterwards.

After a power cut a file holds the state after some whole transaction, and none before the last confirmed one. That is
checked at every moment: before and after each transaction and each sync, including the first ones and those in which
the log is written to the database.
"""

import errno
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import apsw
import msgspec
import pytest

import a2m_router.storage.database
from a2m_router.catalog.records import Replacement
from a2m_router.catalog.selection import Scope
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Forget, Reinforce, Remember
from a2m_router.protocol.wire.records import Draft
from a2m_router.storage.database import Database
from a2m_store.batch import Call, carry_out
from a2m_store.schema import open_file
from a2m_store.store import Store
from tests.support.catalogs import entry, opened, rewritten
from tests.support.disk import Disk, Fate, Files, Moment, Photograph, laid
from tests.support.federated import LOCAL, Clock, settings_of, trial
from tests.support.older_stores import set_back
from tests.support.paths import ROOT
from tests.support.small_disk import LONG, held, remember
from tests.support.store_calls import Asked

# all rows of all tables, without what each opening changes
State = dict[str, list[tuple[Any, ...]]]
Opening = Callable[[Path], Any]

TORN_SEEDS = int(os.environ.get("A2M_TORN_SEEDS", "2"))


def state(connection: apsw.Connection) -> State:
    tables = connection.execute(
        "SELECT name FROM sqlite_schema WHERE type = 'table' AND sql NOT LIKE 'CREATE VIRTUAL%' ORDER BY name"
    )
    found: State = {name: list(connection.execute(f'SELECT * FROM "{name}"')) for (name,) in list(tables)}
    found["facts"] = [row for row in found.get("facts", []) if row[0] not in ("opened", "recovered", "federation")]
    found.pop("epochs", None)  # each start adds a random one
    return found


class Witness:
    """Takes photographs of a disk at every moment, and knows the states that it may hold then.

    `done` is called after every transaction, `confirmed` after every call that promises to survive a power cut.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._states: list[State] = []
        self._least = 0
        self._seen: list[tuple[Photograph, int, int]] = []
        disk.watch = self.look

    def done(self, connection: apsw.Connection) -> None:
        self._states.append(state(connection))
        self.look()

    def confirmed(self) -> None:
        self._least = len(self._states) - 1
        self.look()

    def look(self, moment: Moment | None = None) -> None:
        # `done` for a transaction that has just been written comes after this
        self._seen.append((self._disk.photograph(), self._least, len(self._states) + 1))

    def check(self, folder: Path, open: Callable[[Path], Database], *, opened: bool) -> int:
        """Open every possible disk, and assert that it holds one of the states that it may hold; return their number.

        `opened`: the file existed before; else it may be missing.
        """
        # no test waits for the real disk here either
        with Disk(folder).mounted():
            return self._check(folder, open, opened=opened)

    def _check(self, folder: Path, open: Callable[[Path], Database], *, opened: bool) -> int:
        numbers = count()
        looked: dict[tuple[tuple[str, bytes], ...], State | None] = {}
        for photograph, least, most in self._seen:
            allowed: list[State | None] = list(self._states[least:most])
            torn = [photograph.after(lambda name: Fate.TORN, seed) for seed in range(TORN_SEEDS)]
            for files in (photograph.killed(), photograph.cut(), *torn):
                shot = tuple(sorted(files.items()))
                if shot not in looked:
                    looked[shot] = _found(laid(files, folder / str(next(numbers))), open)
                # before the first confirmation there may be no file, or empty tables
                nothing_yet = least == 0 and not opened
                assert looked[shot] in allowed or nothing_yet, "what was confirmed is lost, or what is there is half"
        return len(looked)


def _found(folder: Path, open: Callable[[Path], Database]) -> State | None:
    with closing(open(folder / "a.db")) as database:
        assert database.connection.pragma("integrity_check") == "ok"
        found = state(database.connection)
    shutil.rmtree(folder)
    return found


def store_database(path: Path) -> Database:
    return open_file(path)


def catalog_database(path: Path) -> Database:
    return opened(path).database


# --- streams of changes


def store_calls(store: Store, seed: int, number: int) -> Iterator[Call]:
    """Yield writes, replacements, forgets and other calls, as clients of a store send them."""
    chance = random.Random(seed)
    for n in range(number):
        known = [f"r{chance.randrange(n + 1)}" for _ in range(2)]
        content = f"content {n} " + "x" * chance.choice([0, 100, 5000])
        two = Remember(records=[Draft(id=f"r{n}", content=content), Draft(content="beside")])
        vector = Remember(records=[Draft(id=f"r{n}", content=content, embedding=[1.0, n])])
        key = Remember(records=[Draft(content=content, key=f"k{n % 3}")])
        run: Callable[[], Any] = chance.choice(
            [
                partial(store.remember, two, LOCAL),
                partial(store.remember, vector, LOCAL),
                partial(store.remember, key, LOCAL),
                partial(store.forget, Forget(ids=known), LOCAL),
                partial(store.reinforce, Reinforce(ids=known, amount=1.0), LOCAL),
            ]
        )
        yield Call(run, writes=True)


def write_to_a_store(folder: Path, witness: Witness, *, durable: bool = True, calls: int = 12, seed: int = 1) -> None:
    with closing(Store(folder / "a.db", clock=Clock())) as store:
        witness.done(store._connection)
        witness.confirmed()
        for call in store_calls(store, seed, calls):
            [outcome] = carry_out(store, [call], durable=durable)
            witness.done(store._connection)
            if durable and not isinstance(outcome, Exception):
                witness.confirmed()


def change_a_catalog(folder: Path, witness: Witness) -> None:
    with closing(opened(folder / "a.db")) as catalog:

        def done(*, synced: bool = False) -> None:
            witness.done(catalog.database.connection)
            if synced:
                catalog.database.sync()
                witness.confirmed()

        done(synced=True)
        for n in range(4):
            one, other = entry(f"a{n}", key=f"k{n}", group="g"), entry(f"b{n}", group="g", session="s" * 2000)
            catalog.reserve([one, other])
            done(synced=True)
            catalog.commit_write([one, other], [])
            done()
            found = catalog.records.find([one.id, other.id])
            replacement = Replacement(rewritten(found[one.id]), found[one.id].version)
            redo = {one.id: Draft(id=one.id, content="again")}
            catalog.commit_write([], [replacement], redo=redo)
            done(synced=True)
            if n % 2:  # else the record is forgotten, or moved, while its write is pending
                catalog.end_pending(catalog.records.find([one.id]).values(), {one.id: None})
                done()
            catalog.touch([one.id], 2000)
            done()
            group = list(catalog.records.find([one.id, other.id]).values())
            catalog.note_copies(group, "semantic")
            done(synced=True)
            catalog.flip([catalog.records.unit(group[0])], "semantic")
            done(synced=True)
            catalog.forget([one.id], Scope(), 3000)
            done(synced=True)
            catalog.remove_notes("semantic", [one.id])
            done()


# --- power cuts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disk"
    made.mkdir()
    return made


@pytest.fixture(params=[8, 40, 1000], ids=lambda pages: f"checkpoint at {pages} pages")
def checkpoints(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the size of the log that leads to a checkpoint: from one with nearly every call to none at all."""
    monkeypatch.setattr(a2m_router.storage.database, "_CHECKPOINT", request.param)
    pages: int = request.param
    return pages


def test_a_store_loses_nothing_that_it_acknowledged(folder: Path, tmp_path: Path, checkpoints: int) -> None:
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        write_to_a_store(folder, witness)
    assert witness.check(tmp_path, store_database, opened=False) > 50


def test_a_store_that_is_opened_again_loses_nothing(folder: Path, tmp_path: Path, checkpoints: int) -> None:
    with Disk(folder).mounted():
        Store(folder / "a.db", clock=Clock()).close()
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        write_to_a_store(folder, witness, calls=3)
        write_to_a_store(folder, witness, calls=3, seed=2)
    assert witness.check(tmp_path, store_database, opened=True) > 20


def test_a_catalog_loses_nothing_that_it_synced(folder: Path, tmp_path: Path, checkpoints: int) -> None:
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        change_a_catalog(folder, witness)
    assert witness.check(tmp_path, catalog_database, opened=False) > 50


def test_without_durability_a_store_loses_the_end_at_most(folder: Path, tmp_path: Path, checkpoints: int) -> None:
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        write_to_a_store(folder, witness, durable=False)
    assert witness.check(tmp_path, store_database, opened=False) > 20


def test_a_store_that_does_not_sync_is_found_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        monkeypatch.setattr(Store, "sync", lambda self: None)
        write_to_a_store(folder, witness, calls=3)
        monkeypatch.undo()
    with pytest.raises(AssertionError, match="what was confirmed is lost"):
        witness.check(tmp_path, store_database, opened=False)


def test_a_store_that_does_not_sync_its_folder_is_found_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "sync_folder", lambda folder: None)
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        write_to_a_store(folder, witness, calls=3)
    with pytest.raises(AssertionError, match="what was confirmed is lost"):
        witness.check(tmp_path, store_database, opened=False)


# --- failing syncs


def fails(*names: str, number: int = errno.EIO) -> Callable[[str], int | None]:
    return lambda name: number if name in names else None


def works(name: str) -> int | None:
    return None


SCHEMA = ("CREATE TABLE t (x)",)


def plain(path: Path) -> Database:
    return Database(path, SCHEMA, application=b"test", holder="a-test")


def insert(database: Database, *values: object) -> None:
    for value in values:
        with database.transaction() as connection:
            connection.execute("INSERT INTO t VALUES (?)", (value,))


def values(files: Files, folder: Path) -> list[object]:
    with closing(plain(laid(files, folder) / "a.db")) as database:
        return [x for (x,) in database.connection.execute("SELECT x FROM t ORDER BY rowid")]


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_a_failed_sync_dropped_is_written_anew_before_the_next_answer(
    folder: Path, tmp_path: Path, number: int
) -> None:
    with (disk := Disk(folder)).mounted(), closing(plain(folder / "a.db")) as database:
        insert(database, 1)
        database.sync()
        insert(database, 2)
        disk.failure = fails("a.db-wal", number=number)
        for _ in range(2):
            with pytest.raises(OSError, match=os.strerror(number)):
                database.sync()
        assert values(disk.photograph().cut(), tmp_path / "failed") == [1]
        disk.failure = works
        insert(database, 3)
        database.sync()
        assert values(disk.photograph().cut(), tmp_path / "healed") == [1, 2, 3]


def test_a_sync_that_trusts_the_one_after_a_failure_is_found_out(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Database, "_write_log_anew", lambda self, wal: None)
    with pytest.raises(AssertionError):
        test_what_a_failed_sync_dropped_is_written_anew_before_the_next_answer(folder, tmp_path, errno.EIO)


def test_what_cannot_be_read_any_more_is_not_confirmed(folder: Path) -> None:
    with (disk := Disk(folder)).mounted():
        database = plain(folder / "a.db")
        insert(database, 1)
        database.sync()
        safe = (folder / "a.db-wal").stat().st_size
        insert(database, 2)
        disk.failure = fails("a.db-wal")
        with pytest.raises(OSError, match="Input/output"):
            database.sync()
        disk.failure = works
        # the system has dropped the page, and later reads the old one from the disk
        with (folder / "a.db-wal").open("r+b") as log:
            log.seek(safe)
            log.write(bytes(4096))
        for _ in range(2):
            with pytest.raises(OSError, match="the disk has lost commits that it had not confirmed"):
                database.sync()
        with pytest.raises(OSError, match="the disk has lost commits that it had not confirmed"):
            database.close()


def test_a_log_that_is_not_confirmed_does_not_go_into_the_database(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_CHECKPOINT", 10)
    with (disk := Disk(folder)).mounted(), closing(plain(folder / "a.db")) as database:
        monkeypatch.setattr(database, "_checkpoint_at", 30)
        insert(database, *("a" * 3000 for _ in range(5)))
        disk.failure = fails("a.db-wal")
        insert(database, *("b" * 3000 for _ in range(20)))
        before = disk.photograph().present["a.db"].now
        insert(database, *("c" * 3000 for _ in range(20)))
        assert disk.photograph().present["a.db"].now == before
        disk.failure = works
        database.sync()
        insert(database, *("d" * 3000 for _ in range(20)))
        database.sync()
        assert disk.photograph().present["a.db"].now != before
        assert len(values(disk.photograph().cut(), tmp_path / "healed")) == 65


def test_a_database_not_synced_at_its_end_is_durable_once_reopened(folder: Path, tmp_path: Path) -> None:
    with (disk := Disk(folder)).mounted():
        database = plain(folder / "a.db")
        database.sync()
        insert(database, 1)
        disk.failure = fails("a.db-wal", "a.db")
        with pytest.raises(OSError, match="Input/output"):
            database.close()
        assert values(disk.photograph().cut(), tmp_path / "failed") == []
        disk.failure = works
        with closing(plain(folder / "a.db")):
            assert values(disk.photograph().cut(), tmp_path / "opened again") == [1]


@pytest.mark.parametrize("seed", range(4))
def test_syncs_that_fail_now_and_then_cost_nothing_that_was_confirmed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_CHECKPOINT", 15)
    chance = random.Random(seed)
    with (disk := Disk(folder)).mounted():
        witness = Witness(disk)
        with suppress(OSError), closing(Store(folder / "a.db", clock=Clock())) as store:
            witness.done(store._connection)
            witness.confirmed()
            disk.failure = lambda name: errno.EIO if name and chance.random() < 0.4 else None
            for call in store_calls(store, seed, 12):
                [outcome] = carry_out(store, [call], durable=True)
                witness.done(store._connection)
                if not isinstance(outcome, Exception):
                    witness.confirmed()
            disk.failure = works
    assert witness.check(tmp_path, store_database, opened=False) > 30


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_is_brought_up_to_date_whole_or_not_at_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_CHECKPOINT", 15)
    path = folder / "a.db"
    asked = Asked(path)
    asked.remember(*({"content": f"content {n} " + "x" * 500, "embedding": [1.0, n]} for n in range(40)))
    contents = asked.contents()
    asked.store.close()
    set_back(path, version)
    seen: list[Photograph] = []
    with (disk := Disk(folder)).mounted():
        disk.watch = lambda moment: seen.append(disk.photograph())
        Store(path, clock=Clock()).close()
    looked: set[tuple[tuple[str, bytes], ...]] = set()
    for number, photograph in enumerate(seen):
        torn = [photograph.after(lambda name: Fate.TORN, seed) for seed in range(TORN_SEEDS)]
        for place, files in enumerate((photograph.killed(), photograph.cut(), *torn)):
            shot = tuple(sorted(files.items()))
            if shot not in looked:
                looked.add(shot)
                again = Asked(laid(files, tmp_path / f"{number} {place}") / "a.db")
                assert again.contents() == contents
                assert len(again("recall", query="content", limit=50)["records"]) == 40
                again.store.close()
    assert len(looked) > 12


# --- full disks


@contextmanager
def full(disk: Disk, *names: str) -> Iterator[None]:
    """Let files whose names begin so not grow."""
    disk.room = lambda name: not name.startswith(names)
    try:
        yield
    finally:
        disk.room = lambda name: True


def test_a_full_disk_costs_a_store_nothing(folder: Path, tmp_path: Path) -> None:
    """Its writes succeed again when there is room."""
    with (disk := Disk(folder)).mounted(), closing(Store(folder / "a.db", clock=Clock())) as store:
        assert remember(store, "a") == {"ids": ["a"]}
        with full(disk, "a.db"):
            refused = remember(store, "b")
            assert isinstance(refused, A2MError)
            assert (refused.code, refused.data) == (Code.INTERNAL_ERROR, {"reason": "disk full"})
            assert held(store) == ["a"]
        assert remember(store, "b") == {"ids": ["b"]}
        laid(disk.photograph().cut(), tmp_path / "cut")
    with closing(Store(tmp_path / "cut" / "a.db", clock=Clock())) as found:
        assert held(found) == ["a", "b"]


def test_a_disk_that_is_full_at_a_checkpoint_costs_nothing(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full when the log is written to the database."""
    monkeypatch.setattr(a2m_router.storage.database, "_CHECKPOINT", 10)
    with (disk := Disk(folder)).mounted(), closing(Store(folder / "a.db", clock=Clock())) as store:
        disk.room = lambda name: name != "a.db"  # the log has its space already
        ids = [f"r{n}" for n in range(10)]
        assert [remember(store, id) for id in ids] == [{"ids": [id]} for id in ids]
        laid(disk.photograph().cut(), tmp_path / "cut")
        disk.room = lambda name: True
        assert remember(store, "more") == {"ids": ["more"]}
    with closing(Store(tmp_path / "cut" / "a.db", clock=Clock())) as found:
        assert held(found) == ids


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("whose", ["router", "working"])
async def test_a_full_disk_under_a_federation_is_named_and_costs_nothing(folder: Path, whose: str) -> None:
    with (disk := Disk(folder)).mounted():
        async with trial(settings_of(policy="explicit"), folder=folder) as fed:
            await fed.remember("before", id="a")
            with full(disk, whose):
                with pytest.raises(A2MError) as refused:
                    await fed.remember(*(f"{n} {LONG}" for n in range(50)))
                assert refused.value.code == Code.INTERNAL_ERROR
                assert "disk full" in (refused.value.data or {})["reason"]
                assert [record["id"] for record in await fed.timeline()] == ["a"]
            await fed.settled()
            await fed.remember("after", id="b")
            assert [record["id"] for record in await fed.timeline()] == ["a", "b"]
            assert fed.copies() == {"a": ["working"], "b": ["working"]}


def test_a_real_disk_that_is_full_costs_nothing(tmp_path: Path) -> None:
    """It uses a small memory disk, where the system permits to mount one."""
    mount = f"mount -t tmpfs -o size=3m none {tmp_path} && exec {sys.executable} -m tests.support.small_disk {tmp_path}"
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", str(tmp_path)], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("nothing can be mounted here")
    ended = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ended.returncode == 0, ended.stderr
    told = msgspec.json.decode(ended.stdout)
    assert told["refusals"] == 6
    assert told["kept"] > 20
