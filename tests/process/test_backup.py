"""Backups: copies of a federation's files that are of one moment, though clients write while they are made."""

import json
import os
import pty
import pwd
import random
import re
import select
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
import anyio.lowlevel
import httpx
import msgspec
import psutil
import pytest

from a2m_router.backup.backing_up import INCOMPLETE, MANIFEST
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error
from a2m_router.protocol.wire.method_params import Backup, Describe
from a2m_router.storage import snapshots
from a2m_router.storage.database import Database
from a2m_store.backups import Backups, State
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly
from tests.support.backups import METHOD, made
from tests.support.federated import FOUR_TIERS, LOCAL, Foreign, at_once, settings_of, trial
from tests.support.router_process import PATIENCE, PRINCIPALS, Router, Said, child_of, running, terminate

A2M: Final = str(Path(sys.executable).with_name("a2m"))

# small tiers, so that written records move at once; and a tier that gets a part of each batch
FEDERATION: Final = """
state = "state/router.db"
{head}
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
capacity = 5
spill_to = "episodic"
[tiers.episodic]
kind = "episodic"
command = ["a2m-store", "episodic.db"]
capacity = 20
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = {semantic}
"""
STORE: Final = ["a2m-store", "semantic.db"]


def held(folder: Path) -> str:
    """Create a file "hold" in a folder; return code by which a router's copy of its catalog waits for its removal."""
    (folder / "hold").touch()
    return f"""
from a2m_router.storage import snapshots
import os, time
step = snapshots.Copying._step
held = {str(folder / "hold")!r}
snapshots.Copying._step = lambda self: (time.sleep(0.01), True)[1] if os.path.exists(held) else step(self)
"""


def waiting_store(folder: Path, before: str) -> list[str]:
    """Return the command of a store that waits before the method `before`, while there is a file "wait" in a folder.

    When it waits, there is a file "waits".
    """
    owner, _, name = before.rpartition(".")
    code = f"""
import sys, time
from pathlib import Path
from a2m_router.storage import snapshots
from a2m_store import cli, store
wait, waits = Path({str(folder / "wait")!r}), Path({str(folder / "waits")!r})
does = {owner}.{name}
def waited(self):
    while wait.exists():
        waits.touch()
        time.sleep(0.01)
    return does(self)
{owner}.{name} = waited
sys.argv = ["a2m-store", "semantic.db"]
sys.exit(cli.main())
"""
    return [sys.executable, "-c", code]


def federation(folder: Path, head: str = "", semantic: Sequence[str] = STORE) -> Path:
    path = folder / "federation.toml"
    path.write_text(FEDERATION.format(head=head, semantic=json.dumps(semantic)))
    return path


@contextmanager
def on_http(config: Path, hurried: str | None = None) -> Iterator[tuple[Router, Said, str]]:
    with running(config, "--http", "127.0.0.1:0", hurried=hurried) as router:
        said = Said(router)
        yield router, said, said.until(r"listens on (http://\S+)")[1]


def called(url: str, method: str, token: str | None = None, **params: Any) -> Any:
    """Return the whole answer to a call over HTTP."""
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return httpx.post(url, json=message, headers=headers, timeout=PATIENCE, verify=False).json()


def backed_up(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([A2M, *arguments], capture_output=True, text=True, timeout=PATIENCE, cwd=cwd, check=False)


class Load:
    """Clients that write, replace and forget over HTTP until the block ends, and the answers that they got.

    A batch is three records in two tiers, whose ids begin with the batch's name. `written` and `forgotten` have what
    was acknowledged; `forgetting` has what may be forgotten by now.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self.moved_on = threading.Condition()
        self.written: dict[str, str] = {}
        self.forgotten: set[str] = set()
        self.forgetting: set[str] = set()
        self.revisions: dict[str, int] = {}  # of each client's page: the last acknowledged one

    @contextmanager
    def running(self, clients: int) -> Iterator[None]:
        with ThreadPoolExecutor() as threads:
            work = [threads.submit(self._write, client) for client in range(clients)]
            try:
                yield
            finally:
                self._stop.set()
            for each in work:
                each.result()

    def until_more(self, batches: int) -> None:
        """Wait until so many further batches have been written."""
        with self.moved_on:
            until = len(self.written) + 3 * batches
            assert self.moved_on.wait_for(lambda: len(self.written) >= until, PATIENCE)

    def _write(self, client: int) -> None:
        number = 0
        while not self._stop.is_set():
            number += 1
            batch = [
                {
                    "id": f"{client}.{number}.{part}",
                    "content": f"note {client} {number} {part}",
                    "group": f"{client}.{number}",
                }
                for part in range(3)
            ]
            batch[2]["tier"] = "semantic"
            del batch[2]["group"]
            assert "result" in called(self._url, "memory/remember", records=batch)
            page = {"key": f"page/{client}", "content": f"page {client}: {number}"}
            assert "result" in called(self._url, "memory/remember", records=[page])
            gone = f"{client}.{number - 3}.0" if number % 4 == 0 and number > 3 else None
            if gone is not None:
                self.forgetting.add(gone)
                assert called(self._url, "memory/forget", ids=[gone])["result"] == {"forgotten": 1}
            with self.moved_on:
                self.written.update((record["id"], record["content"]) for record in batch)
                self.revisions[f"page/{client}"] = number
                if gone is not None:
                    self.forgotten.add(gone)
                self.moved_on.notify_all()

    def seen(self) -> tuple[dict[str, str], set[str], dict[str, int]]:
        """Return what has been acknowledged so far."""
        with self.moved_on:
            return dict(self.written), set(self.forgotten), dict(self.revisions)


def check_copy(
    copy: Path, written: dict[str, str], forgotten: set[str], revisions: dict[str, int], forgetting: set[str]
) -> None:
    """Start a copy by itself; assert that it holds what was acknowledged before the backup began, and no half batch."""
    with running(copy / "federation.toml") as router:
        # writes in doubt at the time of the copy are resolved when all tiers are up
        found = router.ask_until(lambda answer: "result" in answer and "degraded" not in answer["result"], "timeline")[
            "result"
        ]["records"]
        tiers = router.ask("describe")["result"]["tiers"]
        router.end()
    contents = {record["id"]: record["content"] for record in found}
    assert len(contents) == len(found)
    assert sum(tier["count"] for tier in tiers) == len(found)
    for id, content in written.items():
        if id not in forgetting:
            assert contents.get(id) == content, id
    assert forgotten.isdisjoint(contents)
    batches: dict[str, set[str]] = {}
    for id in contents:
        if id.count(".") == 2:
            batches.setdefault(id.rpartition(".")[0], set()).add(id)
    for batch, ids in batches.items():
        missing = {f"{batch}.{part}" for part in range(3)} - ids
        assert missing <= forgetting, (batch, ids)
    pages = {record["key"]: record for record in found if "key" in record}
    for key, number in revisions.items():
        # a page is replaced once a round
        assert int(pages[key]["content"].partition(": ")[2]) >= number
        assert pages[key]["revision"] + 1 >= number


def test_copies_taken_under_load_start_and_hold_what_was_acknowledged(tmp_path: Path) -> None:
    config = federation(tmp_path)
    wanted = []
    with on_http(config) as (router, said, url):
        load = Load(url)
        with load.running(clients=4):
            for number in range(2):
                load.until_more(5)
                before = load.seen()
                copy = tmp_path / "copies" / str(number)
                # either command asks the router
                if number == 0:
                    command = ["--config", str(config), "backup", str(copy)]
                    ended = backed_up(*command, cwd=tmp_path)
                else:
                    ended = backed_up("--http", url, "backup", f"copies/{number}", cwd=tmp_path)
                assert ended.returncode == 0, ended.stderr
                state = json.loads(ended.stdout)
                assert (state["done"], state["left_out"]) == (True, [])
                wanted.append((copy, before))
            load.until_more(5)
        everything, gone, revisions = load.seen()
        terminate(router)
        assert router.popen.wait(PATIENCE) == 0
        assert "Traceback" not in said.all()
    for copy, before in wanted:
        assert not (copy / INCOMPLETE).exists()
        check_copy(copy, *before, load.forgetting)
    check_copy(tmp_path, everything, gone, revisions, load.forgetting)


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


@pytest.mark.parametrize("program", ["a2m", "a2m-router"])
def test_a_stopped_federation_is_copied_to_a_folder_of_its_owners_alone(program: str, tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as router:
        router.ask("remember", records=[{"id": "a", "content": "one"}])
        router.end()
    router_program = [str(Path(sys.executable).with_name("a2m-router")), "--config", str(config), "--backup"]
    command = [A2M, "--config", str(config), "backup"] if program == "a2m" else router_program
    copy = tmp_path / "of" / "today"
    ended = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended.stderr
    assert modes(copy) == {
        **dict.fromkeys((".", "state"), 0o700),
        **dict.fromkeys(("federation.toml", MANIFEST, "state/router.db"), 0o600),
        **dict.fromkeys(("working.db", "episodic.db", "semantic.db"), 0o600),
    }
    manifest = json.loads((copy / MANIFEST).read_text())
    assert (manifest["format"], manifest["version"], manifest["left_out"]) == ("a2m-backup", 1, [])
    assert {file["of"]: file["origin"] for file in manifest["files"]} == {
        "router": str(tmp_path / "state" / "router.db"),
        **{tier: str(tmp_path / f"{tier}.db") for tier in ("working", "episodic", "semantic")},
    }
    for file in manifest["files"]:
        assert (copy / file["file"]).stat().st_size == file["bytes"]
    again = subprocess.run([*command, str(copy)], capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert again.returncode == 1
    assert "expected an empty folder" in again.stderr
    check_copy(copy, {"a": "one"}, set(), {}, set())


def test_who_serves_its_own_streams_makes_a_backup_when_it_is_asked_there(tmp_path: Path) -> None:
    """No other program can reach that router: `a2m backup` is refused."""
    config = federation(tmp_path)
    with running(config) as router:
        router.ask("remember", records=[{"id": "a", "content": "one"}])
        refused = backed_up("--config", str(config), "backup", "copy", cwd=tmp_path)
        assert refused.returncode == 1
        assert "serves its own stdin and stdout" in refused.stderr
        assert not (tmp_path / "copy").exists()
        message = {"jsonrpc": "2.0", "id": 1, "method": METHOD, "params": {"path": str(tmp_path / "copy")}}
        assert router.popen.stdin is not None
        while True:
            router.popen.stdin.write(json.dumps(message).encode() + b"\n")
            state = router.answer()["result"]
            if state["done"]:
                break
            message["params"] = {"backup": state["backup"]}
        router.end()
    check_copy(tmp_path / "copy", {"a": "one"}, set(), {}, set())


# --- backups that are not completed


def begun(url: str, folder: Path) -> str:
    """Begin a backup; return its id."""
    state = called(url, METHOD, path=str(folder))["result"]
    assert not state["done"]
    return str(state["backup"])


def test_a_backup_that_is_called_off_is_removed(tmp_path: Path) -> None:
    mine = tmp_path / "copies"
    mine.mkdir()
    with on_http(federation(tmp_path), held(tmp_path)) as (_, _, url):
        interrupted = subprocess.Popen(
            [A2M, "--http", url, "backup", str(mine / "x")],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        try:
            # other clients are served meanwhile, and cannot begin a second backup
            while not (mine / "x" / INCOMPLETE).exists():
                assert interrupted.poll() is None
            assert "result" in called(url, "memory/remember", records=[{"content": "meanwhile"}])
            assert "another backup is in progress" in called(url, METHOD, path=str(mine / "y"))["error"]["message"]
            interrupted.send_signal(signal.SIGINT)
            out, err = interrupted.communicate(timeout=PATIENCE)
            assert (interrupted.returncode, out, err) == (130, b"", b"")
        finally:
            interrupted.kill()
            interrupted.communicate()
        assert list(mine.iterdir()) == []
        (tmp_path / "hold").unlink()
        assert backed_up("--http", url, "backup", str(mine), cwd=tmp_path).returncode == 0  # it may be empty
        assert modes(mine)["."] == 0o700


def test_who_calls_a_backup_off_is_answered_that_it_is(tmp_path: Path) -> None:
    """The answer is no failure; later calls about that backup get the error "called off"."""
    copy = tmp_path / "copy"
    with on_http(federation(tmp_path), held(tmp_path)) as (_, _, url):
        backup = begun(url, copy)
        for _ in range(2):  # a second cancellation changes nothing
            state = called(url, METHOD, backup=backup, cancel=True)["result"]
            assert (state["done"], state["cancelled"]) == (False, True)
            assert not copy.exists()
        assert called(url, METHOD, backup=backup)["error"]["data"] == {"reason": "called off"}
        (tmp_path / "hold").unlink()
        backup = called(url, METHOD, path=str(copy))["result"]["backup"]
        while not called(url, METHOD, backup=backup)["result"]["done"]:
            pass
        late = called(url, METHOD, backup=backup, cancel=True)["result"]
        assert (late["done"], "cancelled" in late) == (True, False)
        assert (copy / MANIFEST).exists()
        unknown = called(url, METHOD, backup="another", cancel=True)["error"]
        assert unknown["code"] == Code.INVALID_PARAMS
        assert "ends with the process that makes it" in unknown["message"]


@pytest.mark.parametrize("by", ["its time", "its caller"])
def test_a_store_adds_nothing_to_a_backup_that_was_called_off(by: str, tmp_path: Path) -> None:
    """The folder existed before the backup, and so remains when the backup is removed."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "wait").touch()
    with on_http(federation(tmp_path, semantic=waiting_store(tmp_path, "store.Store.snapshot"))) as (router, _, url):
        assert "result" in called(url, "memory/remember", records=[{"id": "a", "content": "one"}])
        if by == "its time":
            assert "semantic" in called(url, METHOD, path=str(mine))["error"]["message"]
        else:
            asking = subprocess.Popen([A2M, "--http", url, "backup", str(mine)], cwd=tmp_path)
            while not (tmp_path / "waits").exists():
                assert asking.poll() is None
            asking.send_signal(signal.SIGINT)
            assert asking.wait(PATIENCE) == 130
        while any(mine.iterdir()):
            assert router.popen.poll() is None
        (tmp_path / "wait").unlink()
        # the store carries out the earlier calls first
        assert "result" in called(url, "memory/remember", records=[{"content": "x", "tier": "semantic"}])
        assert list(mine.iterdir()) == []
        assert backed_up("--http", url, "backup", str(mine), cwd=tmp_path).returncode == 0
    check_copy(mine, {"a": "one"}, set(), {}, set())


def test_a_store_that_is_started_anew_while_it_is_copied_is_what_is_named(tmp_path: Path) -> None:
    (tmp_path / "wait").touch()
    config = federation(tmp_path, semantic=waiting_store(tmp_path, "snapshots.Copying._step"))
    with on_http(config) as (router, _, url):
        backup = begun(url, tmp_path / "copy")
        while not (tmp_path / "waits").exists():
            assert router.popen.poll() is None
        psutil.Process(child_of(router, "semantic.db")).kill()
        while "result" in (answer := called(url, METHOD, backup=backup)):
            assert not answer["result"]["done"]
        assert answer["error"]["data"]["reason"] == "semantic: its server has ended meanwhile, and its copy with it"
        assert not (tmp_path / "copy").exists()
        (tmp_path / "wait").unlink()
        # the restarted store does not know the copy of the one before
        assert backed_up("--http", url, "backup", str(tmp_path / "copy"), cwd=tmp_path).returncode == 0


def test_a_router_that_is_told_to_end_leaves_no_half_backup(tmp_path: Path) -> None:
    with on_http(federation(tmp_path), held(tmp_path)) as (router, said, url):
        begun(url, tmp_path / "copy")
        terminate(router)
        assert router.popen.wait(PATIENCE) == 0
        assert "Traceback" not in said.all()
    assert not (tmp_path / "copy").exists()


def test_a_router_for_a_backup_alone_leaves_none_when_it_is_ended(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    with running(federation(tmp_path), "--backup", str(copy), hurried=held(tmp_path)) as router:
        said = Said(router)
        said.until("backup started: folder=")
        terminate(router)
        assert router.popen.wait(PATIENCE) == 1
        assert "Traceback" not in said.all()
        assert "the incomplete backup is deleted" in said.all()
    assert not copy.exists()


def test_a_router_is_asked_for_a_backup_by_another_that_is_to_make_one(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with on_http(config) as (_, _, url):
        assert "result" in called(url, "memory/remember", records=[{"id": "a", "content": "one"}])
        command = [str(Path(sys.executable).with_name("a2m-router")), "--config", str(config), "--backup", "copy"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.endswith(f"in {tmp_path / 'copy'}\n")
        assert "result" in called(url, "memory/describe")
    check_copy(tmp_path / "copy", {"a": "one"}, set(), {}, set())


def test_a_router_that_is_killed_leaves_what_says_that_it_is_half(tmp_path: Path) -> None:
    with on_http(federation(tmp_path), held(tmp_path)) as (router, _, url):
        begun(url, tmp_path / "copy")
        router.popen.kill()
        router.popen.wait()
    assert list((tmp_path / "copy").iterdir()) == [tmp_path / "copy" / INCOMPLETE]
    assert not (tmp_path / "copy" / INCOMPLETE / MANIFEST).exists()
    with on_http(federation(tmp_path)) as (_, _, url):
        refused = called(url, METHOD, path=str(tmp_path / "copy"))["error"]
    assert refused["code"] == Code.INVALID_PARAMS
    assert "is an incomplete backup of a router that was killed" in refused["message"]


def test_a_tier_that_is_down_makes_a_backup_fail_and_is_named(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (router, said, url):
        os.kill(child_of(router, "episodic.db"), signal.SIGSTOP)
        frozen = called(url, METHOD, path=str(tmp_path / "copy"))["error"]
        assert "episodic" in frozen["message"]
        assert not (tmp_path / "copy").exists()
        # writes to the other tiers go on
        assert "result" in called(url, "memory/remember", records=[{"content": "x", "tier": "semantic"}])
        psutil.Process(child_of(router, "episodic.db")).kill()
        said.until("tier=episodic down")
        failed = called(url, METHOD, path=str(tmp_path / "copy"))
        assert "result" in failed or "episodic" in failed["error"]["message"]  # the tier is restarted at once


def test_where_no_backup_can_be_is_said(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (router, said, url):
        for path, code, named in (
            ("copy", Code.INVALID_PARAMS, "absolute"),
            ("", Code.INVALID_PARAMS, "absolute"),
            ("/dev/null", Code.INVALID_PARAMS, "folder"),
            (f"{tmp_path}/a\0b", Code.INVALID_PARAMS, "NUL"),
            ("/proc/nowhere/copy", Code.INTERNAL_ERROR, "no backup can be made in '/proc/nowhere/copy': "),
            (f"{tmp_path}/{'x' * 300}", Code.INTERNAL_ERROR, "too long; name a folder on the router's machine"),
        ):
            refused = called(url, METHOD, path=path)["error"]
            assert (refused["code"], named in refused["message"]) == (code, True), refused
        assert "result" in called(url, METHOD)
        terminate(router)
        assert "Traceback" not in said.all()


@pytest.fixture
def closed() -> Iterator[Path]:
    """Yield a folder that every user can enter and only this one can write; those of pytest cannot be entered."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.mark.anyio
@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser can become another user")
async def test_a_folder_that_the_router_cannot_write_is_named_with_the_users(tmp_path: Path, closed: Path) -> None:
    async with trial(settings_of(FOUR_TIERS), folder=tmp_path) as fed:
        os.seteuid(65534)
        try:
            with pytest.raises(A2MError) as new:
                await made(fed, closed / "monday")
            with pytest.raises(A2MError) as existing:
                await made(fed, closed)
        finally:
            os.seteuid(0)
    runs = pwd.getpwuid(65534).pw_name
    users = f"{closed} belongs to the user root, and this process runs as {runs}"
    assert (new.value.code, new.value.data) == (Code.INTERNAL_ERROR, {"reason": "Permission denied"})
    assert new.value.message == (
        f"no backup can be made in '{closed}/monday': Permission denied; {closed}/monday cannot be created: {users}; "
        f"name a folder on the router's machine that the user {runs} can create or write"
    )
    assert (existing.value.code, existing.value.data) == (Code.INTERNAL_ERROR, {"reason": "Operation not permitted"})
    assert users in existing.value.message


def test_the_router_program_backs_up_with_the_token_of_an_admin(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with config.open("a") as file:
        file.write('[[serve.principals]]\nowner = "ops"\ntoken_file = "ops.token"\nadmin = true\n')
    (tmp_path / "ops.token").write_text("open-sesame")
    command = [str(Path(sys.executable).with_name("a2m-router")), "--config", str(config), "--backup", "copy"]
    with on_http(config):
        for token, code in (("", 1), ("wrong", 1), ("open-sesame", 0)):
            ended = subprocess.run(
                command,
                cwd=tmp_path,
                env={**os.environ, "A2M_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            assert ended.returncode == code, ended.stderr
            assert ("a token is taken from the variable A2M_TOKEN" in ended.stderr) == (code == 1)


def test_a_folder_whose_name_cannot_be_told_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (_, _, url):
        ended = backed_up("--http", url, "backup", os.fsdecode(b"\xff"), cwd=tmp_path)
        assert (ended.returncode, ended.stdout) == (1, "")
        assert re.fullmatch(r"a2m: b'.*': the folder's name cannot be sent: it is not valid UTF-8\n", ended.stderr)


def test_a_terminal_sees_how_far_each_copy_is(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with on_http(federation(tmp_path), held(tmp_path)) as (_, _, url):
        command = [A2M, "--http", url, "backup", "copy"]
        shown = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs, stdin=theirs)
        os.close(theirs)
        try:
            drawn = b""
            while not all(name in drawn for name in (b"router", b"working", b"episodic", b"semantic")):
                assert select.select([ours], [], [], PATIENCE)[0], drawn
                drawn += os.read(ours, 65536)
            (tmp_path / "hold").unlink()
            with ThreadPoolExecutor() as threads:
                threads.submit(drained, ours)
                assert json.loads(shown.communicate(timeout=PATIENCE)[0])["done"]
        finally:
            shown.kill()
            shown.communicate()
    os.close(ours)
    assert shown.returncode == 0


def drained(terminal: int) -> None:
    with suppress(OSError):  # the other end is closed
        while os.read(terminal, 65536):
            pass


def test_only_who_sees_what_belongs_to_all_may_have_a_backup(tmp_path: Path) -> None:
    with on_http(federation(tmp_path, PRINCIPALS)) as (_, _, url):
        refused = called(url, METHOD, "a-token", path=str(tmp_path / "copy"))["error"]
        assert refused["code"] == Code.SCOPE_DENIED
        assert "backup" not in called(url, "memory/describe", "a-token")["result"]["store"]
        assert not (tmp_path / "copy").exists()


def test_a_store_that_others_can_reach_writes_no_files_for_them(tmp_path: Path) -> None:
    anybody = Caller(asserts_owner=False)
    with closing(Store(tmp_path / "it.db", clock=lambda: 0)) as store, store.transaction():
        assert store.describe(Describe(), LOCAL)["store"]["backup"] is True
        assert "backup" not in store.describe(Describe(), anybody)["store"]

    async def refused() -> int:
        store = Store(tmp_path / "it.db", clock=lambda: 0)
        with closing(store), pytest.raises(A2MError) as problem:
            await Backups(store, lambda function: None, threads=False).backup(
                Backup(path=str(tmp_path / "copy.db")), anybody
            )
        return problem.value.code

    assert anyio.run(refused) == Code.METHOD_NOT_FOUND
    assert not (tmp_path / "copy.db").exists()


def test_a_store_calls_its_copy_off_and_gives_up_one_that_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another program has put in its place is not removed."""
    monkeypatch.setattr(snapshots, "_PAGES", 1)
    target = tmp_path / "copy.db"

    async def looks() -> None:
        store = Store(tmp_path / "it.db", clock=lambda: 0)
        with closing(store), store.transaction() as connection:
            connection.execute("CREATE TABLE large AS SELECT zeroblob(20000000)")
        async with anyio.create_task_group() as tasks:

            def spawn(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
                tasks.start_soon(work)

            backups = Backups(store, spawn, threads=False)

            async def asked(**params: Any) -> State:
                return await backups.backup(Backup(**params), LOCAL)

            async def followed(state: State) -> None:
                while not state.done:
                    state = await asked(backup=state.backup)

            called_off = await asked(path=str(target))
            assert target.exists()
            ended = await asked(backup=called_off.backup, cancel=True)
            assert (ended.done, ended.cancelled, target.exists()) == (False, True, False)
            for is_replaced in (False, True):
                removed = await asked(path=str(target))
                target.unlink()
                if is_replaced:
                    target.write_text("mine")
                with pytest.raises(A2MError, match="removed by another program before the copy was complete"):
                    await followed(removed)
            assert target.read_text() == "mine"
            with pytest.raises(A2MError, match="File exists"):
                await asked(path=str(target))
            with pytest.raises(A2MError, match="NUL"):
                await asked(path=f"{target}\0")

    anyio.run(looks)


# --- the places of the copies, and what survives a power cut

NAMES: Final = """
state = "../elsewhere/router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "outside"]
[tiers.router]
kind = "episodic"
command = ["a2m-store", "../elsewhere/x.db"]
[tiers.router-2]
kind = "semantic"
command = ["a2m-store", "../elsewhere/y.db"]
[tiers.a]
kind = "semantic"
command = ["a2m-store", "manifest.json/z.db"]
[tiers.b]
kind = "semantic"
command = ["a2m-store", "INCOMPLETE/z.db"]
[tiers.c]
kind = "semantic"
command = ["a2m-store", "deep/outside/z.db"]
"""


@pytest.mark.parametrize("name", ["federation.toml", "outside", "INCOMPLETE.toml", MANIFEST])
def test_whatever_files_and_tiers_are_called_each_has_a_place_of_its_own(name: str, tmp_path: Path) -> None:
    config = tmp_path / "it" / name
    config.parent.mkdir()
    config.write_text(NAMES if name != "outside" else NAMES.replace('"outside"', '"inside.db"'))
    if name == MANIFEST:
        config.write_text(NAMES.replace("manifest.json/", "other/"))
    tiers = ("working", "router", "router-2", "a", "b", "c")
    with on_http(config) as (_, _, url):
        records = [{"id": tier, "content": f"of {tier}", "tier": tier} for tier in tiers]
        assert "result" in called(url, "memory/remember", records=records)
        assert backed_up("--http", url, "backup", "copy", cwd=tmp_path).returncode == 0
    copy = tmp_path / "copy"
    manifest = json.loads((copy / MANIFEST).read_text())
    catalog, *stores = manifest["files"]
    assert (catalog["of"], catalog["file"]) == ("router", "outside/router.db")
    places = {file["of"]: copy / file["file"] for file in stores}
    assert places.keys() == {*tiers}
    assert {contents for tier in tiers for contents in contents_of(places[tier])} == {f"of {tier}" for tier in tiers}
    assert (copy / manifest["federation"]["file"]).read_text() == config.read_text()
    assert not (copy / INCOMPLETE).exists()
    assert places["c"] == copy / "deep" / "outside" / "z.db"


class Unsynced:
    """The new or renamed files and folders in a folder that are not synced yet, and would be lost in a power cut.

    A folder counts as unsynced when an entry of it changed. `at_removals` has the unsynced ones at each call of
    `rmdir`.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.paths: set[Path] = set()
        self.at_removals: dict[Path, set[Path]] = {}
        for name in ("open", "mkdir", "rename", "rmdir", "fsync"):
            patch.setattr(os, name, partial(getattr(self, name), getattr(os, name)))

    def _changed(self, *paths: Path) -> None:
        self.paths.update(path for path in paths if path.is_relative_to(self.folder))

    def open(self, really: Callable[..., int], path: str | Path, flags: int, *more: Any, **options: Any) -> int:
        descriptor = really(path, flags, *more, **options)
        if flags & os.O_CREAT:
            self._changed(Path(path), Path(path).parent)
        return descriptor

    def mkdir(self, really: Callable[..., None], path: Path, *more: Any) -> None:
        really(path, *more)
        self._changed(path, path.parent)

    def rename(self, really: Callable[..., None], old: Path, new: Path) -> None:
        really(old, new)
        moved = {path for path in self.paths if path.is_relative_to(old)}
        self.paths -= moved
        self._changed(old.parent, new.parent, *(new / path.relative_to(old) for path in moved))

    def rmdir(self, really: Callable[..., None], path: Path) -> None:
        # the folder itself need not be synced when it is removed
        self.at_removals[path] = self.paths - {path}
        really(path)
        self.paths.discard(path)
        self._changed(path.parent)

    def fsync(self, really: Callable[[int], None], descriptor: int) -> None:
        really(descriptor)
        self.paths.discard(Path(f"/proc/self/fd/{descriptor}").readlink())


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="what a descriptor is of is known from /proc")
@pytest.mark.parametrize("into", ["there", "new", "of/new"])
async def test_all_of_a_backup_outlives_a_power_cut_before_it_is_one(
    into: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That includes files, their names, and the folders above the backup that were made for it."""
    config = tmp_path / "federation.toml"
    config.touch()
    copies = tmp_path / "copies"
    for folder in (copies, copies / "there", tmp_path / "it", tmp_path / "it" / "below"):
        folder.mkdir()
    settings = msgspec.structs.replace(settings_of(FOUR_TIERS), path=config)
    async with trial(settings, folder=tmp_path / "it" / "below") as fed:
        await fed.remember("one")
        unsynced = Unsynced(copies, monkeypatch)
        await made(fed, copies / into)
        assert (copies / into / "it" / "below" / "router.db").exists()
        assert unsynced.at_removals == {copies / into / INCOMPLETE: set()}
        assert unsynced.paths == set()


# --- the moment of the copy, call by call


def contents_of(file: Path) -> set[str]:
    with closing(sqlite3.connect(f"file:{file}?immutable=1", uri=True)) as copy:
        return {content for (content,) in copy.execute("SELECT content FROM record")}


class Weathered:
    """Weather that records every message, and stops calls of a kind until `go`."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.waits: dict[tuple[str, str], anyio.Event] = {}
        self.there: dict[tuple[str, str], anyio.Event] = {}
        self.after: set[tuple[str, str]] = set()

    def stop(self, tier: str, method: str, *, after: bool = False) -> anyio.Event:
        """Stop the next calls before or after the tier carries them out; return an event, set when one arrives."""
        kind = tier, method
        self.waits[kind], self.there[kind] = anyio.Event(), anyio.Event()
        if after:
            self.after.add(kind)
        return self.there[kind]

    def go(self, tier: str, method: str) -> None:
        self.waits.pop((tier, method)).set()

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        kind = tier, msgspec.json.decode(message)["method"]
        if kind in self.waits and kind not in self.after:
            self.there[kind].set()
            await self.waits[kind].wait()
        self.seen.append(kind)
        answer = await go_on()
        if kind in self.waits and kind in self.after:
            self.there[kind].set()
            await self.waits[kind].wait()
        return answer


@pytest.mark.anyio
async def test_no_store_is_told_of_a_change_between_the_snapshots(tmp_path: Path) -> None:
    """The stores get the change afterwards; reads are not delayed."""
    weather = Weathered()
    async with trial(settings_of(FOUR_TIERS, policy="explicit"), folder=tmp_path, weather=weather) as fed:
        await fed.remember("before")
        asked_first = weather.stop("semantic", METHOD)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(made, fed, tmp_path / "copy")
            await asked_first.wait()  # the first call only asks for the path of the store's file
            weather.go("semantic", METHOD)
            opening = weather.stop("semantic", METHOD)
            await opening.wait()
            weather.seen.clear()
            tasks.start_soon(fed.remember, "meanwhile")
            assert [record["content"] for record in await fed.timeline()] == ["before"]
            await anyio.wait_all_tasks_blocked()
            assert {method for _, method in weather.seen} <= {"memory/recall", METHOD}
            weather.go("semantic", METHOD)
        assert {record["content"] for record in await fed.timeline()} == {"before", "meanwhile"}
    assert contents_of(tmp_path / "copy" / "working.db") == {"before"}


@pytest.mark.anyio
@pytest.mark.parametrize("carried_out", [True, False])
async def test_a_batch_that_is_under_way_when_a_copy_is_made_is_not_in_it(carried_out: bool, tmp_path: Path) -> None:
    weather = Weathered()
    settings = settings_of(FOUR_TIERS, policy="explicit")
    (tmp_path / "it").mkdir()
    async with trial(settings, folder=tmp_path / "it", weather=weather) as fed:
        await fed.remember("before")
        late = weather.stop("semantic", "memory/remember", after=carried_out)
        batch = [{"content": "x", "tier": "working"}, {"content": "y", "tier": "semantic"}]
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                await fed.call("remember", records=batch)

            tasks.start_soon(write)
            await late.wait()
            await anyio.wait_all_tasks_blocked()
            await made(fed, tmp_path / "copy")
            weather.go("semantic", "memory/remember")
    assert contents_of(tmp_path / "copy" / "working.db") == {"before", "x"}
    async with trial(settings, folder=tmp_path / "copy") as restored:
        await restored.settled()
        assert {record["content"] for record in await restored.timeline()} == {"before"}
        assert list(restored.copies().values()) == [["working"]]


@pytest.mark.anyio
async def test_a_write_after_its_stores_snapshot_is_nowhere_in_a_copy(tmp_path: Path) -> None:
    """A server that does not work in order may carry out an earlier call after a later one."""
    weather = Weathered()
    settings = settings_of(FOUR_TIERS, policy="explicit")
    (tmp_path / "it").mkdir()
    async with trial(settings, folder=tmp_path / "it", weather=weather) as fed:
        await fed.remember("before")
        under_way = weather.stop("working", "memory/remember")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fed.remember, "overtaken")
            await under_way.wait()
            asked_first = weather.stop("semantic", METHOD)
            tasks.start_soon(made, fed, tmp_path / "copy")
            await asked_first.wait()
            weather.go("semantic", METHOD)
            opening = weather.stop("semantic", METHOD)
            await opening.wait()
            await anyio.wait_all_tasks_blocked()  # all other stores have opened their snapshots
            weather.go("working", "memory/remember")
            while len(await fed.timeline()) < 2:
                await anyio.lowlevel.checkpoint()
            weather.go("semantic", METHOD)
    with closing(sqlite3.connect(f"file:{tmp_path}/copy/router.db?immutable=1", uri=True)) as catalog:
        assert catalog.execute("SELECT count(*) FROM records WHERE home IS NOT NULL").fetchone() == (1,)
    async with trial(settings, folder=tmp_path / "copy") as restored:
        await restored.settled()
        assert [record["content"] for record in await restored.timeline()] == ["before"]
        assert (await restored.call("describe"))["tiers"][0]["count"] == 1


def removed(path: str) -> None:
    Path(path).unlink()


@pytest.mark.anyio
@pytest.mark.parametrize("at_once", [False, True])
async def test_a_copy_that_its_store_cannot_end_takes_the_backup_with_it(tmp_path: Path, *, at_once: bool) -> None:
    """`at_once`: the copy's file is removed before the router gets the answer that the copy was begun."""
    full = A2MError(Code.INTERNAL_ERROR, "the backup failed: the disk is full", {"reason": "the disk is full"})

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        asked_what = msgspec.json.decode(message)
        if tier == "semantic" and "backup" in asked_what["params"] and "cancel" not in asked_what["params"]:
            return render_error(msgspec.Raw(msgspec.json.encode(asked_what["id"])), full)
        answer = await go_on()
        if at_once and tier == "semantic" and "path" in asked_what["params"]:
            removed(asked_what["params"]["path"])
        return answer

    (tmp_path / "it").mkdir()
    async with trial(settings_of(FOUR_TIERS), folder=tmp_path / "it", weather=weather) as fed:
        with pytest.raises(A2MError, match="removed: semantic: the disk is full"):
            await made(fed, tmp_path / "of" / "today")
        assert not (tmp_path / "of").exists()
        await fed.remember("writes go on")


@pytest.mark.anyio
async def test_a_copy_that_is_begun_while_its_folder_is_removed_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = tmp_path / "mine"
    for folder in (mine, tmp_path / "it"):
        folder.mkdir()
    late = [mine / INCOMPLETE / "working.db", mine / INCOMPLETE / "episodic.db"]
    rmdir = os.rmdir

    def removed(path: str, **more: Any) -> None:
        if late:  # just before the folder is removed, which then is not empty
            late.pop().touch()
        rmdir(path, **more)

    async with trial(settings_of(FOUR_TIERS), folder=tmp_path / "it", down={"semantic"}) as fed:
        monkeypatch.setattr(os, "rmdir", removed)
        with pytest.raises(A2MError, match="semantic"):
            await made(fed, mine)
    assert late == []
    assert list(mine.iterdir()) == []


@pytest.mark.anyio
async def test_what_cannot_be_copied_is_named(tmp_path: Path) -> None:
    (tmp_path / "it").mkdir()
    elsewhere = settings_of(
        """
        [tiers.working]
        kind = "working"
        command = ["-"]
        [tiers.episodic]
        kind = "episodic"
        url = "http://127.0.0.1:9/"
        [tiers.semantic]
        kind = "semantic"
        command = ["-"]
        [tiers.procedural]
        kind = "procedural"
        command = ["-"]
        mount = true
        """
    )
    async with trial(elsewhere, folder=tmp_path / "it", servers={"semantic": Foreign(kind=CoreOnly)}) as fed:
        await fed.remember("one")
        state = await made(fed, tmp_path / "copy")
    assert [file["of"] for file in state["files"]] == ["router", "working"]
    reasons = {each["tier"]: each["reason"] for each in state["left_out"]}
    assert reasons.keys() == {"episodic", "semantic", "procedural"}
    assert "HTTP" in reasons["episodic"]
    assert "makes no backups" in reasons["semantic"]
    assert "mount" in reasons["procedural"]
    assert json.loads((tmp_path / "copy" / MANIFEST).read_text())["left_out"] == state["left_out"]


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["trio"])
@pytest.mark.parametrize("seed", range(int(4 * float(os.environ.get("A2M_EXAMPLES", "1")))))
async def test_whatever_goes_on_a_copy_is_of_one_moment(seed: int, tmp_path: Path) -> None:
    """Batches into two tiers, pages, promotions, spills and forgets, with tiers that delay calls at random."""
    dice = random.Random(seed)
    settings = settings_of(FOUR_TIERS, policy="background")
    (tmp_path / "it").mkdir()

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        for _ in range(dice.randrange(6)):
            await anyio.lowlevel.checkpoint()
        answer = await go_on()
        for _ in range(dice.randrange(6)):
            await anyio.lowlevel.checkpoint()
        return answer

    written: dict[str, str] = {}
    touched: set[str] = set()  # by a forget that was called, acknowledged or not
    pages: dict[str, int] = {}
    wanted: list[tuple[Path, dict[str, str], dict[str, int]]] = []
    over = False

    async def write(client: int) -> None:
        for number in range(12):
            name = f"{client}.{number}"
            batch = [
                {"id": f"{name}.{part}", "content": f"{name}.{part}", "session": f"s{client}", "tier": tier}
                for part, tier in enumerate(("working", "episodic", "procedural"))
            ]
            await fed.call("remember", records=batch)
            written.update((f"{name}.{part}", f"{name}.{part}") for part in range(3))
            await fed.remember(f"page {number}", key=f"k{client}")
            pages[f"k{client}"] = number
            match dice.randrange(4):
                case 0:
                    gone = f"{name}.{dice.randrange(3)}"
                    touched.add(gone)
                    await fed.call("forget", ids=[gone])
                case 1:
                    await fed.call("promote", ids=[f"{name}.0"], tier="semantic")
                case 2:
                    await fed.call("session/close", session=f"s{client}")

    async def back_up() -> None:
        while not over:
            copy = tmp_path / f"copy{len(wanted)}"
            wanted.append((copy, dict(written), dict(pages)))
            await made(fed, copy)
            for _ in range(dice.randrange(200)):
                await anyio.lowlevel.checkpoint()

    async with trial(settings, folder=tmp_path / "it", weather=weather) as fed, anyio.create_task_group() as tasks:
        tasks.start_soon(back_up)
        await at_once(*(partial(write, client) for client in range(3)))
        over = True
    assert len(wanted) > 1
    for copy, before, reached in wanted:
        async with trial(settings, folder=copy) as restored:
            await restored.settled()
            found = {record["id"]: record for record in await restored.timeline()}
            for id, content in before.items():
                assert id in touched or found[id]["content"] == content
            for name in {id.rpartition(".")[0] for id in found if id.count(".") == 2}:
                assert all(f"{name}.{part}" in touched or f"{name}.{part}" in found for part in range(3))
            shown = {record["key"]: int(record["content"].split()[1]) for record in found.values() if "key" in record}
            assert all(shown[key] >= number for key, number in reached.items())
            copies = restored.copies()
            assert copies.keys() == found.keys()
            assert all(len(tiers) == 1 for tiers in copies.values())


# --- the cost of a snapshot


def test_a_snapshot_is_opened_on_any_thread_and_holds_nothing_half(tmp_path: Path) -> None:
    """It may be opened while another thread is in a transaction or commits.

    Open snapshots then end, and the log begins anew.
    """
    with closing(
        Database(tmp_path / "it.db", ["CREATE TABLE t (x)"], application=b"Test", holder="a test")
    ) as database:
        over = threading.Event()
        written = threading.Semaphore(0)

        def write() -> None:
            while not over.is_set():
                with database.transaction() as connection:
                    for _ in range(2):
                        connection.execute("INSERT INTO t VALUES (?)", ("x" * 10_000,))
                written.release()

        async def copied(snapshot: snapshots.Snapshot, target: Path) -> None:
            await (await snapshot.copy_to(target)).run()

        with ThreadPoolExecutor() as threads:
            writing = threads.submit(write)
            try:
                before = 0
                for number in range(10):
                    for _ in range(5):
                        assert written.acquire(timeout=PATIENCE)
                    before += 10
                    target = tmp_path / f"{number}.db"
                    anyio.run(copied, database.snapshot(), target)
                    with closing(sqlite3.connect(target)) as copy:
                        [rows] = copy.execute("SELECT count(*) FROM t").fetchone()
                    assert rows % 2 == 0
                    assert rows >= before
            finally:
                over.set()
            writing.result(PATIENCE)
        with database.transaction() as connection:
            connection.execute("DELETE FROM t")
            inside = database.snapshot()
        with closing(inside):
            anyio.run(copied, inside, tmp_path / "inside.db")
        with closing(sqlite3.connect(tmp_path / "inside.db")) as copy:
            assert copy.execute("SELECT count(*) FROM t").fetchone() > (0,)


def test_a_log_that_a_snapshot_holds_back_is_not_synced_with_every_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(
        Database(tmp_path / "it.db", ["CREATE TABLE t (x)"], application=b"Test", holder="a test")
    ) as database:
        syncs = 0
        sync = database.sync

        def counted() -> None:
            nonlocal syncs
            syncs += 1
            sync()

        monkeypatch.setattr(database, "sync", counted)
        snapshot = database.snapshot()

        def write(commits: int) -> None:
            for _ in range(commits):
                with database.transaction() as connection:
                    connection.execute("INSERT INTO t VALUES (?)", ("x" * 40_000,))

        write(300)  # of some ten pages each
        assert 0 < syncs <= 4
        log = (tmp_path / "it.db-wal").stat().st_size
        snapshot.close()
        write(300)
        # without a reader, the log begins anew
        assert (tmp_path / "it.db-wal").stat().st_size < 2 * log
        assert syncs <= 8
