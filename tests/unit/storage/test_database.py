"""An SQLite file: one process at a time, the error messages, and atomic changes."""

import logging
import os
import pwd
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import apsw
import pytest
from hypothesis import given
from hypothesis import strategies as st

import a2m_router.storage.database
from a2m_router.catalog.schema import APPLICATION, SCHEMA
from a2m_router.storage.database import Damaged, Database, DatabaseError, Migration, damaged
from tests.support.catalogs import entry, opened, write
from tests.support.paths import ROOT

STEPS: tuple[Migration, ...] = (
    "CREATE TABLE first (value ANY) STRICT",
    "CREATE TABLE second (value ANY) STRICT; INSERT INTO second SELECT value FROM first; DELETE FROM first",
)


def database(path: Path | None, schema: Sequence[Migration] = STEPS, application: bytes = b"test") -> Database:
    return Database(path, schema, application=application, holder="a-test")


def refusal(path: Path, schema: Sequence[Migration] = STEPS, application: bytes = b"test") -> str:
    with pytest.raises(DatabaseError) as refused:
        database(path, schema, application).close()
    told = str(refused.value)
    assert told.startswith(str(path.parent)), "it names the file"
    assert "\n" not in told
    assert "Traceback" not in told
    return told


def rows(of: Database, table: str) -> list[object]:
    return [row[0] for row in of.connection.execute(f"SELECT value FROM {table} ORDER BY value")]


def holder(path: Path) -> "subprocess.Popen[str]":
    """Start a process that holds the file open until its input ends."""
    program = (
        "import sys; from pathlib import Path; from tests.support.catalogs import opened;"
        "catalog = opened(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read(); catalog.close()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    return process


@contextmanager
def without_privileges() -> Iterator[None]:
    """Run the block as an unprivileged user, since the superuser may write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


# --- rejected files


def test_a_newer_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    database(path).close()
    told = refusal(path, STEPS[:1])
    assert str(path) in told
    assert "newer version (schema 2; this one reads up to 1)" in told
    with closing(database(path)) as again:
        assert rows(again, "second") == []


def test_a_catalog_from_the_future_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = opened(path)
    write(catalog, entry("x"))
    catalog.close()
    with closing(sqlite3.connect(path)) as future:
        future.execute(f"PRAGMA user_version = {len(SCHEMA) + 1}")
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match=r"catalog\.db: written by a newer version"):
        opened(path)
    assert path.read_bytes() == before


def test_another_programs_file_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with closing(sqlite3.connect(path)) as theirs:
        theirs.execute("CREATE TABLE mine (x)")
    before = path.read_bytes()
    assert refusal(path) == f"{path}: this file belongs to another program"
    assert path.read_bytes() == before
    assert not (tmp_path / "theirs.db-wal").exists()


def test_a_tiers_store_is_not_taken_for_a_catalog(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    database(path, application=b"else").close()
    assert "another program" in refusal(path)


@pytest.mark.parametrize(
    "bytes", [b"not a database at all, but long enough to look at " * 100, b"x", b"SQLite format 3\0" + b"\xff" * 500]
)
def test_garbage_is_refused_and_left_as_it_was(tmp_path: Path, bytes: bytes) -> None:
    path = tmp_path / "garbage.db"
    path.write_bytes(bytes)
    assert str(path) in refusal(path)
    assert path.read_bytes() == bytes


def test_a_damaged_file_is_told_in_our_words_and_sqlites_own_stand_last(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    database(path).close()
    path.write_bytes(path.read_bytes()[:1000])
    told = refusal(path)
    assert told.startswith(f"{path}: damaged: some of what was written to this file cannot be read from it (")
    with pytest.raises(Damaged) as refused:
        database(path)
    with_remedy = str(refused.value.with_remedy("do this"))
    assert with_remedy == told.replace("from it (", "from it; do this (")
    assert str(damaged(path, "*** in main ***\nTree 2")).endswith("from it (*** in main *** Tree 2)")


def test_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    assert "folder: cannot be used as a database" in refusal(tmp_path / "folder")


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "catalog.db") == f"{tmp_path / 'file'}: expected a folder, this is a file"
    assert "Not a directory" in refusal(tmp_path / "file" / "deeper" / "catalog.db")


@pytest.fixture
def reachable() -> Iterator[Path]:
    """Yield a folder that every user can enter; pytest's folders are closed to others."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder).resolve()


def test_a_folder_that_cannot_be_written_to_is_refused_with_the_users(reachable: Path) -> None:
    closed = reachable / "closed"
    closed.mkdir(mode=0o555)
    owner = pwd.getpwuid(os.geteuid()).pw_name
    with without_privileges():
        told, deeper = refusal(closed / "catalog.db"), refusal(closed / "memories" / "catalog.db")
        runs = pwd.getpwuid(os.geteuid()).pw_name
    users = f"{closed} belongs to the user {owner}, and this process runs as {runs}"
    denied = "cannot be opened: Permission denied;"
    assert told == f"{closed / 'catalog.db'}: {denied} {closed / 'catalog.db.lock'} cannot be created: {users}"
    assert deeper == f"{closed / 'memories/catalog.db'}: {denied} {closed / 'memories'} cannot be created: {users}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can make another user's file")
def test_a_file_of_another_user_is_refused_with_both_users(reachable: Path) -> None:
    path = reachable / "catalog.db"
    database(path).close()
    with without_privileges():
        told = refusal(path)
        runs = pwd.getpwuid(os.geteuid()).pw_name
    users = f"{path}.lock belongs to the user root, and this process runs as {runs}"
    assert told == f"{path}: cannot be opened: Permission denied; {users}"


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    database(tmp_path / "a" / "b" / "catalog.db").close()
    assert (tmp_path / "a" / "b" / "catalog.db").exists()


# --- one process at a time


@pytest.mark.process
def test_a_file_in_use_is_refused_and_the_process_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 0.1)
    path = tmp_path / "catalog.db"
    with holder(path) as process:
        told = refusal(path, SCHEMA, APPLICATION)
        assert f"{path}: in use by a2m-router (process {process.pid})" in told
        process.communicate()
    opened(path).close()


@pytest.mark.process
def test_a_process_that_is_just_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 30.0)
    path = tmp_path / "catalog.db"
    with ThreadPoolExecutor(1) as pool, holder(path) as process:
        starting = pool.submit(lambda: database(path, SCHEMA, APPLICATION).close())
        assert not starting.done()
        process.communicate()
        starting.result()


@pytest.mark.process
def test_a_killed_process_leaves_the_file_free_and_its_commits_there(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = opened(path)
    write(catalog, entry("x"))
    catalog.close()
    with holder(path) as process:
        process.kill()
        process.communicate()
    catalog = opened(path)
    assert set(catalog.records.find("x")) == {"x"}
    catalog.close()


def test_one_file_is_not_opened_twice_in_one_process_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 0.0)
    with closing(database(tmp_path / "catalog.db")):
        assert f"in use by a-test (process {os.getpid()})" in refusal(tmp_path / "catalog.db")


def test_a_refusal_lets_go_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    database(path).close()
    refusal(path, application=b"else")
    refusal(path, STEPS[:1])
    database(path).close()


# --- migrations


def test_an_older_file_is_brought_up_to_date_with_what_it_holds(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with closing(database(path, STEPS[:1])) as old:
        old.connection.execute("INSERT INTO first VALUES (1), ('x')")
    with closing(database(path)) as new:
        assert rows(new, "second") == [1, "x"]
        assert rows(new, "first") == []
    with closing(database(path)) as again:  # each step runs once
        assert rows(again, "second") == [1, "x"]


@pytest.mark.parametrize("callable", [True, False])
def test_a_migration_that_fails_changes_nothing(tmp_path: Path, callable: bool) -> None:
    def fail(connection: apsw.Connection) -> None:
        connection.execute("INSERT INTO second VALUES (2)")
        connection.execute("INSERT INTO nowhere VALUES (2)")

    failing: Migration = fail if callable else "INSERT INTO second VALUES (2); INSERT INTO nowhere VALUES (2)"
    path = tmp_path / "catalog.db"
    with closing(database(path, STEPS[:1])) as old:
        old.connection.execute("INSERT INTO first VALUES (1)")
    assert "nowhere" in refusal(path, [*STEPS, failing])
    with closing(database(path, STEPS[:1])) as same:  # its version has not changed
        assert rows(same, "first") == [1]
        assert same.connection.execute("SELECT name FROM sqlite_schema").get == "first"


def test_the_catalogs_own_schema_takes_a_further_step_or_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    catalog = opened(path)
    write(catalog, entry("x"))
    catalog.close()
    refusal(path, [*SCHEMA, "DROP TABLE groups; UPDATE records SET id = 'y'; SELECT nonsense"], APPLICATION)
    catalog = opened(path)
    assert set(catalog.records.find("xy")) == {"x"}
    catalog.close()
    database(path, [*SCHEMA, "CREATE TABLE more (x)"], APPLICATION).close()
    with pytest.raises(DatabaseError, match="newer"):
        opened(path)


# --- transactions


class Undone(Exception):
    """The exception that makes a transaction fail."""


nested = st.recursive(
    st.integers(0, 9),
    lambda inner: st.tuples(st.lists(inner, max_size=3), st.booleans()),
    max_leaves=12,
)


@given(nested)
def test_a_transaction_inside_another_is_undone_by_itself_and_with_it(tree: object) -> None:
    """A number in the tree is written; a list is a transaction, which fails if its flag is set."""

    def carry_out(node: object) -> list[object]:
        """Carry out a node; return the values that should remain if all transactions around it succeed."""
        if not isinstance(node, tuple):
            store.connection.execute("INSERT INTO first VALUES (?)", (node,))
            return [node]
        kept: list[object] = []
        with suppress(Undone), store.transaction():
            for inner in node[0]:
                kept += carry_out(inner)
            if node[1]:
                raise Undone
        return [] if node[1] else kept

    with closing(database(None)) as store:
        assert sorted(carry_out(tree), key=str) == rows(store, "first")
        assert not store.connection.in_transaction


def test_a_constraint_undoes_its_transaction_only() -> None:
    with closing(database(None, ["CREATE TABLE first (value ANY UNIQUE) STRICT"])) as store:
        with store.transaction():
            store.connection.execute("INSERT INTO first VALUES (1)")
            with suppress(apsw.ConstraintError), store.transaction():
                store.connection.execute("INSERT INTO first VALUES (2)")
                store.connection.execute("INSERT INTO first VALUES (1)")
                pytest.fail("1 is there twice")
            store.connection.execute("INSERT INTO first VALUES (3)")
        assert rows(store, "first") == [1, 3]


def write_too_much(store: Database) -> None:
    with store.transaction():
        store.connection.execute("INSERT INTO first VALUES (1)")
        with store.transaction():
            store.connection.execute("INSERT INTO first VALUES (?)", (b"x" * 100_000,))


def test_a_full_disk_undoes_everything_and_the_next_transaction_works(tmp_path: Path) -> None:
    with closing(database(tmp_path / "catalog.db")) as store:
        most = store.connection.pragma("page_count")
        store.connection.pragma("max_page_count", most)
        with pytest.raises(OSError, match="disk full"):
            write_too_much(store)
        assert not store.connection.in_transaction
        store.connection.pragma("max_page_count", most + 100)
        with store.transaction():
            store.connection.execute("INSERT INTO first VALUES (2)")
        assert rows(store, "first") == [2]


def test_a_full_disk_is_told_once_and_so_is_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "catalog.db"
    with closing(database(path)) as store:
        for _ in range(2):
            caplog.clear()
            monkeypatch.setattr(a2m_router.storage.database, "QUIET", 1e6)
            most = store.connection.pragma("page_count")
            store.connection.pragma("max_page_count", most)
            for _ in range(3):
                with pytest.raises(OSError, match="disk full"):
                    write_too_much(store)
                with store.transaction():
                    rows(store, "first")  # reading needs no space, and logs nothing
            store.connection.pragma("max_page_count", most + 100)
            for value in range(4):
                if value == 2:
                    monkeypatch.setattr(a2m_router.storage.database, "QUIET", 0.0)
                    assert len(caplog.messages) == 1  # no second line yet: the disk may fill up again at once
                with store.transaction():
                    store.connection.execute("INSERT INTO first VALUES (?)", (value,))
            assert caplog.messages == [
                f"file={path} writes rejected until the disk has space: disk full",
                f"file={path} the disk has space again",
            ]
