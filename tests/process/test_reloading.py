"""Principals and tokens that are read again while the router runs (SIGHUP): the real process, over real sockets."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import pytest

from a2m_router.config.loading import ConfigError, parse
from a2m_router.config.settings import Settings
from a2m_router.daemon.serve.reloading import Authentication
from a2m_router.protocol.server.server import Caller, Refusal

ROUTER: Final = str(Path(sys.executable).with_name("a2m-router"))
# far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60
TIERS: Final = """
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
[tiers.pool]
kind = "semantic"
command = ["a2m-store", "pool.db"]
shared = true
"""
CALL: Final = {"jsonrpc": "2.0", "id": 1, "method": "memory/describe"}


def principal(owner: str, *lines: str, token: str | None = None) -> str:
    digest = sha256((token or f"{owner}s").encode()).hexdigest()
    shown = () if any(line.startswith("token") for line in lines) else (f'token_sha256 = "{digest}"',)
    return "\n".join(["[[serve.principals]]", f'owner = "{owner}"', *shown, *lines, ""])


class Router:
    """A router over HTTP whose stderr is read as it is written."""

    def __init__(self, folder: Path, *principals: str, environ: Mapping[str, str] = {}) -> None:
        self.config = folder / "federation.toml"
        self.write(*principals)
        self.process = subprocess.Popen(
            [ROUTER, "--config", str(self.config), "--http", "127.0.0.1:0"],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environ},
        )
        self._said = ""
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.url = self.until(r"listens on (http://\S+/)")[1]
        self.until(r"try: curl")

    def write(self, *principals: str, tiers: str = TIERS) -> None:
        """Replace the federation file, in one step."""
        new = self.config.with_suffix(".new")
        new.write_text("\n".join(['state = "router.db"', *principals, tiers]))
        new.replace(self.config)

    def hang_up(self, *, until: str) -> str:
        """Send SIGHUP; return what the router logs from then on, up to this pattern."""
        with self._changed:
            before = len(self._said)
        self.process.send_signal(signal.SIGHUP)
        self.until(until, after=before)
        return self._said[before:]

    def until(self, pattern: str, *, after: int = 0) -> re.Match[str]:
        """Wait until the router has logged a whole line with this pattern."""
        deadline = time.monotonic() + PATIENCE
        with self._changed:
            while (found := re.search(f"{pattern}.*\n", self._said[after:])) is None:
                assert self._changed.wait(deadline - time.monotonic()), self._said
                assert self._reader.is_alive() or re.search(pattern, self._said[after:]), self._said
            return found

    def status(self, token: str, client: httpx.Client | None = None) -> int:
        return self.ask(token, CALL, client).status_code

    def ask(self, token: str, call: Any, client: httpx.Client | None = None) -> httpx.Response:
        headers = {"Authorization": f"Bearer {token}"}
        if client is not None:
            return client.post(self.url, json=call, headers=headers)
        return httpx.post(self.url, json=call, headers=headers, timeout=PATIENCE, verify=False)

    def end(self) -> tuple[int, str]:
        """End the router by SIGTERM; return its exit code, and everything that it has logged."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(PATIENCE)
        self._reader.join(PATIENCE)
        return code, self._said

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._changed:
                self._said += line
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def running(folder: Path, *principals: str, environ: Mapping[str, str] = {}) -> Iterator[Router]:
    router = Router(folder, *principals, environ=environ)
    try:
        yield router
    finally:
        router.kill()


READ: Final = "principals reloaded: "
REFUSED: Final = "principals not reloaded, the old ones stay in force"


def test_principals_come_and_go_and_connections_stay(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice"), principal("bob")) as router, connection(router) as call:
        assert (call("alices"), call("bobs"), call("carols")) == (200, 200, 401)
        router.write(principal("alice", token="another"), principal("carol"))
        said = router.hang_up(until=READ)
        assert "new tokens of 'alice', 'carol'; removed tokens of 'alice', 'bob'" in said
        assert not any(token in said for token in ("alices", "another", "bobs", "carols"))
        # on the connection that was opened before
        assert [call(token) for token in ("alices", "another", "bobs", "carols")] == [401, 200, 401, 200]
        code, _ = router.end()
        assert code == 0


@contextmanager
def connection(router: Router) -> Iterator[Callable[[str], int]]:
    """Yield a function that calls with a token, over one connection that must stay open, and returns the status."""
    url = httpx.URL(router.url)
    with socket.create_connection((url.host, url.port or 0), timeout=PATIENCE) as connected:
        answers = connected.makefile("rb")

        def call(token: str) -> int:
            body = json.dumps(CALL).encode()
            head = f"POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            connected.sendall(head.encode() + body)
            status = int(answers.readline().split()[1])
            length = 0
            while (line := answers.readline().strip()) != b"":
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            answers.read(length)
            return status

        with answers:
            yield call


def test_a_call_under_way_is_answered_although_its_principal_is_gone(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice"), principal("bob")) as router:
        url = httpx.URL(router.url)
        body = json.dumps(CALL).encode()
        head = "POST / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer bobs\r\nContent-Type: application/json\r\n"
        with socket.create_connection((url.host, url.port or 0), timeout=PATIENCE) as calling:
            calling.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            answers = calling.makefile("rb")
            assert answers.readline().startswith(b"HTTP/1.1 100")  # the caller is authenticated
            assert answers.readline() == b"\r\n"
            router.write(principal("alice"))
            router.hang_up(until=READ)
            calling.sendall(body)
            assert answers.readline().startswith(b"HTTP/1.1 200")
            answers.close()
        assert router.status("bobs") == 401


BAD: Final = {
    "no TOML": ("[[serve.principals]", "not valid TOML"),
    "a principal without a token": ('[[serve.principals]]\nowner = "bob"\n', "expected one of token_sha256"),
    "a key with a typo": (principal("bob", "admn = true"), 'did you mean "admin"'),
    "a token's file that is not there": (principal("bob", 'token_file = "nowhere"'), "cannot be read"),
    "a variable that is not there": (principal("bob", 'token_env = "NOBODY_S"'), "NOBODY_S is not set"),
    "a tier that is not there": (principal("bob", 'write = ["pools"]'), 'did you mean "pool"'),
    "nobody any more": ("", "all principals are removed"),
    "something wrong elsewhere": ("[recall]\nk = -1\n" + principal("bob"), "recall.k"),
}


def test_a_bad_file_changes_nothing_and_the_log_says_why(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice")) as router:
        for text, sentence in BAD.values():
            router.write(text)
            assert sentence in router.hang_up(until=REFUSED)
            assert (router.status("alices"), router.status("bobs")) == (200, 401)
        others = TIERS.replace('kind = "working"', 'kind = "working"\nshared = true')
        router.write(principal("bob", 'write = ["working"]'), tiers=others)
        assert '"working" is not shared' in router.hang_up(until=REFUSED)  # not in the running router
        assert router.status("bobs") == 401
        router.config.unlink()
        assert "there is no such file" in router.hang_up(until=REFUSED)
        assert router.status("alices") == 200
        router.write(principal("bob"))
        router.hang_up(until=READ)
        assert (router.status("alices"), router.status("bobs")) == (401, 200)


def test_a_token_is_changed_in_its_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    with running(tmp_path, principal("alice", 'token_file = "token"')) as router:
        assert router.status("first") == 200
        (tmp_path / "token").write_text("second\n")
        assert router.status("first") == 200  # until the router gets SIGHUP
        router.hang_up(until=READ)
        assert (router.status("first"), router.status("second")) == (401, 200)


def test_what_the_environment_holds_stays_what_it_was(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice"), environ={"BOB_S": "bobs"}) as router:
        router.write(principal("alice"), principal("bob", 'token_env = "BOB_S"'))
        router.hang_up(until=READ)
        assert (router.status("alices"), router.status("bobs")) == (200, 200)


def test_rights_are_read_anew_and_told(tmp_path: Path) -> None:
    write = {
        "jsonrpc": "2.0",
        "id": 1,
        "method": "memory/remember",
        "params": {"records": [{"content": "x", "tier": "pool"}]},
    }
    with running(tmp_path, principal("alice"), principal("bob")) as router:
        assert "principal 'bob' may write: its own records in working and the shared pool" in router._said
        assert "every principal may write into the shared tiers (pool)" in router._said
        assert "ids" in router.ask("bobs", write).json()["result"]
        router.write(principal("alice", 'write = ["private", "pool"]'), principal("bob"))
        said = router.hang_up(until="'bob' may write")
        assert "changed rights of 'alice'" in said
        assert "principal 'bob' may write: its own records in working\n" in said
        assert router.ask("bobs", write).json()["error"]["code"] == -32005
        assert "ids" in router.ask("alices", write).json()["result"]


def test_what_else_has_changed_takes_a_restart_and_that_is_said(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice")) as router:
        router.write(principal("alice"), principal("bob"))
        router.hang_up(until=READ)
        router.write(principal("bob"), tiers=TIERS.replace("shared = true\n", "shared = true\nweight = 2\n"))
        assert "they need a restart" in router.hang_up(until="'bob' may write")
        _, said = router.end()
        assert said.count("they need a restart") == 1


def test_many_hang_ups_under_load_drop_no_call(tmp_path: Path) -> None:
    with running(tmp_path, principal("alice")) as router, ThreadPoolExecutor() as callers:
        called = threading.Semaphore(0)
        stop = threading.Event()

        def call() -> set[int]:
            statuses = set()
            with httpx.Client(timeout=PATIENCE, verify=False) as client:
                while not stop.is_set():
                    statuses.add(router.status("alices", client))
                    called.release()
            return statuses

        try:
            calling = [callers.submit(call) for _ in range(3)]
            for number in range(20):
                assert all(called.acquire(timeout=PATIENCE) for _ in calling)
                router.write(principal("alice"), principal(f"p{number}"))
                router.hang_up(until=f"{READ}new tokens of 'p{number}'")
        finally:
            stop.set()
        assert [one.result(PATIENCE) for one in calling] == [{200}] * 3


def test_a_hang_up_on_the_way_to_the_door_does_not_end_it(tmp_path: Path) -> None:
    """A SIGHUP while the router starts is carried out when it serves."""
    config = tmp_path / "federation.toml"
    config.write_text(f'state = "router.db"\n{principal("alice")}{TIERS}')
    (tmp_path / "slow.sh").write_text('kill -HUP "$PPID"; exec a2m-store working.db\n')
    slow = TIERS.replace('["a2m-store", "working.db"]', '["/bin/sh", "slow.sh"]')
    config.write_text(f'state = "router.db"\n{principal("alice")}{slow}')
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        [ROUTER, "--config", str(config), "--http", "127.0.0.1:0"],
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PATH": path},
    )
    try:
        assert process.stderr is not None
        said = ""
        while not ("listens on" in said and READ in said):
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("arguments", [["--http", "127.0.0.1:0"], []], ids=["http", "stdio"])
def test_where_stderr_is_a_terminal_a_hang_up_ends_it_in_good_order(arguments: list[str], tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(f'state = "router.db"\n{principal("alice")}{TIERS}')
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [ROUTER, "--config", str(config), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    try:
        said = b""
        if arguments:
            while b"listens on" not in said:
                said += os.read(ours, 2**16)
        else:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(json.dumps(CALL).encode() + b"\n")
            process.stdin.flush()
            assert b"result" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE) == 0
        while not said.endswith(b"stopped\r\n"):
            said += os.read(ours, 2**16)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


def test_a_router_on_pipes_has_nobody_to_let_in_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(f'state = "router.db"\n{TIERS}')
    with subprocess.Popen(
        [ROUTER, "--config", str(config)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(CALL).encode() + b"\n")
        process.stdin.flush()
        assert b"result" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.wait(PATIENCE) == 0
        process.kill()


# --- in one process


def settings(text: str) -> Settings:
    return parse(text + TIERS, base=Path("/nowhere"), environ={})


def who(door: Authentication, token: str) -> str | None:
    caller: Caller | Refusal = door.admit({"authorization": f"Bearer {token}"})
    return caller.owner if isinstance(caller, Caller) else None


async def until_let_in(door: Authentication, token: str) -> None:
    """Wait until a token is accepted; the reading of the file has no event."""
    with anyio.fail_after(PATIENCE):
        while who(door, token) is None:  # noqa: ASYNC110
            await anyio.sleep(0.001)


@pytest.mark.anyio
async def test_a_file_that_is_changed_while_it_is_read_is_read_once_more() -> None:
    """A request to read the file while it is being read may be for a newer content."""
    files = iter([principal("bob"), principal("carol")])
    reads = 0

    def read() -> Settings:
        nonlocal reads
        reads += 1
        if reads == 1:
            anyio.from_thread.run_sync(door.reload_soon)
        return settings(next(files))

    door = Authentication(settings(principal("alice")), read)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(door.run)
        door.reload_soon()
        door.reload_soon()
        await until_let_in(door, "carols")
        tasks.cancel_scope.cancel()
    assert reads == 2
    assert (who(door, "alices"), who(door, "bobs")) == (None, None)


@pytest.mark.anyio
@pytest.mark.parametrize("fault", [ConfigError("x: wrong"), RuntimeError("a fault of ours")])
async def test_whatever_happens_to_the_reading_the_door_stays_as_it_was(fault: Exception) -> None:
    outcomes: list[Exception | str] = [fault, principal("bob")]

    def read() -> Settings:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            anyio.from_thread.run_sync(failed.set)
            raise outcome
        return settings(outcome)

    failed = anyio.Event()
    door = Authentication(settings(principal("alice")), read)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(door.run)
        door.reload_soon()
        with anyio.fail_after(PATIENCE):
            await failed.wait()
        assert who(door, "alices") == "alice"
        door.reload_soon()
        await until_let_in(door, "bobs")
        tasks.cancel_scope.cancel()
    assert who(door, "alices") is None
