"""The files of a router and of its stores while they are open: another program locks or removes one of them.

And the names under which they can be opened.
"""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import pytest

import a2m_router.storage.database
from a2m_router.catalog import catalog
from a2m_router.config.loading import load
from a2m_router.daemon.opening import open_federation
from a2m_router.protocol.client.connecting import connect_command
from a2m_router.protocol.client.memory import Memory
from a2m_router.protocol.wire.errors import FILE_GONE, FILE_HELD, A2MError
from a2m_router.storage.database import Database, DatabaseError, announced
from tests.support.holding import held

pytestmark = pytest.mark.anyio

# seconds, and far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60

# each starts its own programs; concurrent access is the database's concern, not the event loop's
ON_ASYNCIO: Final = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a change wait for a lock as long as it takes."""
    monkeypatch.setattr(catalog, "_PATIENCE", PATIENCE)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a change wait for a lock just long enough for a second attempt."""
    monkeypatch.setattr(catalog, "_PATIENCE", 0.1)


def federation(folder: Path, state: str = "router.db") -> Path:
    path = folder / "federation.toml"
    tiers = "".join(
        f'[tiers.{tier}]\nkind = "{tier}"\ncommand = ["a2m-store", "{tier}.db"]\n' for tier in ("working", "semantic")
    )
    path.write_text(f'state = {json.dumps(state)}\n[policy]\npass = "explicit"\n{tiers}')
    return path


@asynccontextmanager
async def remembering(folder: Path) -> AsyncIterator[Memory]:
    """Run a federation that holds one record, with a key and in a session."""
    async with open_federation(federation(folder)) as memory:
        await memory.remember("the first", id="first", key="page", session="s")
        yield memory


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def run(*command: str, cwd: Path | None = None, given: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program(command[0]), *command[1:]],
        cwd=cwd,
        input=given,
        capture_output=True,
        encoding="utf-8",
        timeout=PATIENCE,
    )


# --- another program locks the file


CHANGES: Final[dict[str, Callable[[Memory], Any]]] = {
    "remember": lambda memory: memory.remember("the second"),
    "forget": lambda memory: memory.forget(ids=["first"]),
    "promote": lambda memory: memory.promote(["first"], "semantic"),
    "reinforce": lambda memory: memory.reinforce(["first"]),
    "consolidate": lambda memory: memory.consolidate(),
    "close": lambda memory: memory.close_session("s"),
    "summarize": lambda memory: memory.summarize(ids=["first"], into="semantic"),
    "replace": lambda memory: memory.remember("the first, rewritten", key="page"),
}


@ON_ASYNCIO
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.usefixtures("patient")
async def test_others_are_served_while_a_change_waits_for_another_program(tmp_path: Path, change: str) -> None:
    async with remembering(tmp_path) as memory:
        done = anyio.Event()

        async def carry_out() -> None:
            await CHANGES[change](memory)
            done.set()

        with held(tmp_path / "router.db") as let_go:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(carry_out)
                for _ in range(3):
                    assert [record.id for record in (await memory.timeline(session="s")).records] == ["first"]
                    assert [record.id for record in (await memory.recall("first")).records] == ["first"]
                    assert (await memory.fetch("page")) is not None
                    assert (await memory.sessions())[0].records == 1
                    assert (await memory.describe()).tiers
                assert not done.is_set()
                await anyio.to_thread.run_sync(let_go)
        assert done.is_set()


@ON_ASYNCIO
@pytest.mark.usefixtures("impatient")
async def test_a_change_that_has_waited_long_enough_is_told_who_is_to_blame(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "a2m_router.storage.database")
    state = tmp_path / "router.db"
    async with remembering(tmp_path) as memory:
        with held(state):
            for change in CHANGES.values():
                with pytest.raises(A2MError) as refused:
                    await change(memory)
                assert refused.value.message == (
                    f"the catalog's file cannot be written to: {FILE_HELD}; nothing was written; "
                    "try again when the lock is released"
                )
                assert refused.value.data == {"reason": FILE_HELD, "retry_after": 1}
            await memory.recall("first")  # its access cannot be counted, and the read is answered all the same
        assert [record.content for record in (await memory.timeline()).records] == ["the first"]
        await memory.remember("the second")
        said = [record.getMessage() for record in caplog.records if record.name == "a2m_router.storage.database"]
        assert said == [
            f"file={state} writes rejected until the lock is released: {FILE_HELD}",
            f"file={state} no other program holds the file any more",
        ]


@ON_ASYNCIO
async def test_a_store_answers_reads_while_writes_wait_for_another_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with connect_command([program("a2m-store"), str(tmp_path / "notes.db")], timeout=PATIENCE) as memory:
        await memory.remember("the first", id="first")
        ids: list[str] = []

        async def write(id: str) -> None:
            await memory.remember(id, id=id)
            ids.append(id)

        with held(tmp_path / "notes.db") as let_go:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, "second")
                await anyio.lowlevel.checkpoint()
                tasks.start_soon(write, "third")
                assert [record.id for record in (await memory.timeline()).records] == ["first"]
                assert [record.id for record in (await memory.recall("first")).records] == ["first"]
                assert ids == []
                await anyio.to_thread.run_sync(let_go)
        assert sorted(ids) == ["second", "third"]
        assert [record.id for record in (await memory.timeline()).records] == ["first", "second", "third"]


@ON_ASYNCIO
async def test_a_store_that_is_held_too_long_says_so_and_its_router_too(tmp_path: Path) -> None:
    async with remembering(tmp_path) as memory:
        with held(tmp_path / "working.db"):
            with pytest.raises(A2MError) as refused:
                await memory.remember("the second")
            assert refused.value.data == {"tier": "working", "reason": FILE_HELD, "retry_after": 1}
            assert [record.id for record in (await memory.timeline()).records] == ["first"]
            await memory.remember("elsewhere", tier="semantic")
        await memory.remember("the second")
        contents = {record.content for record in (await memory.timeline()).records}
        assert contents == {"the first", "elsewhere", "the second"}


def test_nobody_waits_in_a_change_for_another_program(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    with closing(database(path)) as notes:
        with held(path):
            trials: tuple[Callable[[], object], ...] = (lambda: insert(notes, 1), notes.check_writable)
            for trial in trials:
                with pytest.raises(OSError, match=FILE_HELD) as refused:
                    trial()
                assert refused.value.errno == errno.EBUSY
            assert notes.connection.pragma("busy_timeout") == 0
            with notes.reading() as connection:
                assert connection.execute("SELECT count(*) FROM first").get == 0
        insert(notes, 2)


def test_a_start_beside_another_program_that_holds_the_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_BUSY", 1)
    path = tmp_path / "notes.db"
    database(path).close()
    with held(path), pytest.raises(DatabaseError, match=f"notes.db: cannot be opened: {FILE_HELD}$"):
        database(path)
    database(path).close()


# --- the file is removed


def database(path: Path) -> Database:
    return Database(path, ["CREATE TABLE first (value ANY) STRICT"], application=b"test", holder="a-test")


def insert(into: Database, value: int) -> None:
    with into.transaction() as connection:
        connection.execute("INSERT INTO first VALUES (?)", (value,))


def remove(path: Path) -> None:
    path.rename(path.with_name("away"))


def replace(path: Path) -> None:
    shutil.copy(path, path.with_name("copy"))
    remove(path)
    path.with_name("copy").rename(path)


def put_back(path: Path) -> None:
    path.with_name("away").rename(path)


@pytest.mark.parametrize("ending", ["", "-wal"])
@pytest.mark.parametrize("take", [remove, replace])
def test_a_file_that_is_not_where_it_was_takes_no_change_until_it_is_back(
    tmp_path: Path, take: Callable[[Path], None], ending: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "notes.db"
    file = Path(f"{path}{ending}")
    with closing(database(path)) as notes:
        insert(notes, 1)
        take(file)
        trials: tuple[Callable[[], object], ...] = (lambda: insert(notes, 2), notes.check_writable, notes.sync)
        for trial in trials:
            with pytest.raises(OSError, match=FILE_GONE) as refused:
                trial()
            assert refused.value.errno == errno.ESTALE
        assert notes.connection.execute("SELECT count(*) FROM first").get == 1
        assert not notes.connection.in_transaction
        put_back(file)
        insert(notes, 3)
        notes.sync()
    assert caplog.messages == [
        f"file={path} writes rejected until the file is back: {FILE_GONE}",
        f"file={path} the file is back",
    ]
    with closing(database(path)) as again:
        assert [value for (value,) in again.connection.execute("SELECT value FROM first")] == [1, 3]


def test_what_is_committed_when_the_file_goes_is_not_confirmed(tmp_path: Path) -> None:
    path = tmp_path / "notes.db"
    notes = database(path)
    insert(notes, 1)
    path.unlink()
    with pytest.raises(OSError, match=FILE_GONE):
        notes.sync()
    with pytest.raises(DatabaseError, match=FILE_GONE):
        notes.close()


def test_a_folder_that_is_moved_takes_its_file_along(tmp_path: Path) -> None:
    (tmp_path / "memories").mkdir()
    notes = database(tmp_path / "memories" / "notes.db")
    (tmp_path / "memories").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=FILE_GONE):
        insert(notes, 1)
    with pytest.raises(DatabaseError, match=FILE_GONE):
        notes.close()


@ON_ASYNCIO
async def test_a_router_without_its_catalog_reads_and_acknowledges_nothing(tmp_path: Path) -> None:
    state = tmp_path / "router.db"
    async with remembering(tmp_path) as memory:
        remove(state)
        for change in CHANGES.values():
            with pytest.raises(A2MError) as refused:
                await change(memory)
            assert refused.value.message == (
                f"the catalog's file cannot be written to: {FILE_GONE}; nothing was written; "
                "put it back, or stop this server"
            )
            assert refused.value.data == {"reason": FILE_GONE}
        assert [record.content for record in (await memory.recall("first")).records] == ["the first"]
        put_back(state)
        await memory.remember("the second")


@ON_ASYNCIO
async def test_a_store_without_its_file_reads_and_acknowledges_nothing(tmp_path: Path) -> None:
    async with remembering(tmp_path) as memory:
        remove(tmp_path / "working.db")
        with pytest.raises(A2MError, match=FILE_GONE):
            await memory.remember("the second")
        assert [record.id for record in (await memory.timeline(tier="working")).records] == ["first"]
        put_back(tmp_path / "working.db")
        await memory.remember("the third")
        contents = [record.content for record in (await memory.timeline()).records]
        assert contents == ["the first", "the third"]


@pytest.mark.parametrize("name", ["a2m-store", "a2m-router"])
def test_a_program_that_ends_without_its_file_says_so_in_a_sentence(tmp_path: Path, name: str) -> None:
    federation(tmp_path)
    file = tmp_path / ("notes.db" if name == "a2m-store" else "router.db")
    arguments = ["notes.db"] if name == "a2m-store" else ["--log-level", "warning"]
    with subprocess.Popen(
        [program(name), *arguments],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write('{"jsonrpc":"2.0","id":1,"method":"memory/describe"}\n')
        process.stdin.flush()
        assert process.stdout.readline()
        file.unlink()
        _, told = process.communicate(timeout=PATIENCE)
    last = told.splitlines()[-1]
    assert last == f"{name}: {file}: {FILE_GONE}; the latest writes may be lost with it"
    assert "Traceback" not in told
    assert process.returncode == 1


# --- names of files


def test_a_file_behind_a_link_has_one_lock_by_whatever_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.storage.database, "_HANDOVER_SECONDS", 0.0)
    (tmp_path / "there").mkdir()
    real, link = tmp_path / "there" / "notes.db", tmp_path / "link.db"
    folder = tmp_path / "folder"
    folder.symlink_to("there")
    link.symlink_to(real)
    names = [real, link, folder / "notes.db"]
    for name in names:  # the first of them is made through its link
        with closing(database(name)) as notes:
            insert(notes, 1)
            notes.announce("http://127.0.0.1:1/")
            for other in names:
                assert announced(other) == "http://127.0.0.1:1/"
                with pytest.raises(DatabaseError, match="in use by a-test"):
                    database(other)
    assert link.is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"there", "folder", "link.db"}


def test_a_link_that_leads_nowhere_yet_has_its_file_made(tmp_path: Path) -> None:
    (tmp_path / "link.db").symlink_to(tmp_path / "new" / "notes.db")
    database(tmp_path / "link.db").close()
    assert (tmp_path / "new" / "notes.db").is_file()


def test_a_link_that_leads_back_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.db").symlink_to(tmp_path / "loop.db")
    with pytest.raises(DatabaseError, match=r"loop.db: cannot be opened: a symbolic link leads back to itself$"):
        database(tmp_path / "loop.db")
    ended = run("a2m-store", str(tmp_path / "loop.db"))
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)


def test_a_link_that_leads_elsewhere_now_is_a_file_that_was_replaced(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "folder").symlink_to("old")
    with closing(database(tmp_path / "folder" / "notes.db")) as notes:
        (tmp_path / "folder").unlink()
        insert(notes, 1)  # its file is where it was
        assert notes.path == tmp_path / "old" / "notes.db"


@ON_ASYNCIO
async def test_a_federation_lives_behind_links(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    (tmp_path / "router.db").symlink_to(disk / "catalog.db")
    (tmp_path / "working.db").symlink_to(disk / "first.db")
    for number in range(2):
        async with open_federation(federation(tmp_path)) as memory:
            await memory.remember(f"turn {number}")
            assert len((await memory.timeline()).records) == number + 1
    path = federation(tmp_path)
    assert load(path, {}).state == disk / "catalog.db"
    rebuilt = run("a2m-router", "--config", str(path), "--rebuild")
    assert rebuilt.returncode == 0, rebuilt.stderr
    assert (tmp_path / "router.db").is_symlink()  # the new catalog is where the old one was
    async with open_federation(path) as memory:
        assert len((await memory.timeline()).records) == 2


@pytest.fixture
def odd(tmp_path: Path) -> Path:
    """Return a folder whose name is not UTF-8."""
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    return folder


@contextmanager
def one_sentence(ended: subprocess.CompletedProcess[str]) -> Iterator[str]:
    assert "Traceback" not in ended.stderr
    assert "UnicodeEncodeError" not in ended.stderr
    assert ended.returncode == 1, ended.stderr
    yield ended.stderr


def test_a_store_in_a_folder_that_is_no_utf_8_is_refused_in_one_sentence(odd: Path) -> None:
    for path, cwd in ((str(odd / "notes.db"), None), ("notes.db", odd)):
        with one_sentence(run("a2m-store", path, cwd=cwd)) as told:
            assert told.startswith("a2m-store: ")
            assert "the path is not valid UTF-8" in told
            assert told.count("\n") == 1
    assert list(odd.iterdir()) == []


@pytest.mark.parametrize("form", ["text", "json"])
@pytest.mark.parametrize("what", [(), ("--check",), ("--rebuild",)])
def test_a_router_in_a_folder_that_is_no_utf_8_is_refused_in_one_sentence(
    odd: Path, what: tuple[str, ...], form: str
) -> None:
    path = federation(odd)
    for config, cwd in ((str(path), None), ("federation.toml", odd)):
        with one_sentence(run("a2m-router", "--config", config, "--log-format", form, *what, cwd=cwd)) as told:
            assert "the path is not valid UTF-8" in told


def test_a_router_works_from_a_folder_whose_name_is_not_utf_8(odd: Path, tmp_path: Path) -> None:
    """Its catalog and the stores' files are in another folder."""
    path = federation(odd, state=str(tmp_path / "router.db"))
    text = path.read_text()
    for tier in ("working", "semantic"):
        text = text.replace(f'"{tier}.db"', json.dumps(str(tmp_path / f"{tier}.db")))
    path.write_text(text)
    given = '{"jsonrpc":"2.0","id":1,"method":"memory/remember","params":{"records":[{"content":"x"}]}}\n'
    for form in ("text", "json"):
        ended = run("a2m-router", "--config", str(path), "--log-format", form, given=given)
        assert "Traceback" not in ended.stderr
        assert '"ids"' in ended.stdout
        assert ended.returncode == 0
    assert run("a2m", "--config", str(path), "timeline").returncode == 0


def test_chaos_and_a2m_name_a_file_in_a_folder_that_is_no_utf_8(odd: Path, tmp_path: Path) -> None:
    with one_sentence(run("a2m-chaos", "--plan", str(odd / "none.toml"), "--", "cat")):
        pass
    with one_sentence(run("a2m", "--config", str(odd / "none.toml"), "timeline")):
        pass
    (odd / "faults.toml").write_text('counts = "counts"\n')
    given = '{"jsonrpc":"2.0","id":1,"method":"memory/describe"}\n'
    ended = run(
        "a2m-chaos", "--plan", str(odd / "faults.toml"), "--", program("a2m-store"), str(tmp_path / "n.db"), given=given
    )
    assert "Traceback" not in ended.stderr
