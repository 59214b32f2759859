"""The real process: pipes, signals, HTTP, and what a killed process leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = [sys.executable, "-m", "a2m_store.cli"]
# far more than anything here takes; a hang becomes a failure
PATIENCE = 60


class Process:
    """An a2m-store on pipes. Its output is not read ahead, since `communicate` would not get what was read before."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [*COMMAND, *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def send(self, *calls: tuple[str, dict[str, Any]]) -> None:
        assert self.popen.stdin is not None
        for number, (method, params) in enumerate(calls):
            message = {"jsonrpc": "2.0", "id": number, "method": f"memory/{method}", "params": params}
            line = json.dumps(message).encode() + b"\n"
            assert self.popen.stdin.write(line) == len(line)

    def answer(self) -> Any:
        assert self.popen.stdout is not None
        return json.loads(self.popen.stdout.readline())

    def ask(self, method: str, **params: Any) -> Any:
        self.send((method, params))
        return self.answer()["result"]

    def rest(self) -> list[bytes]:
        """Return the whole lines that are left, up to the end."""
        assert self.popen.stdout is not None
        return [line for line in self.popen.stdout.readlines() if line.endswith(b"\n")]

    def end(self) -> tuple[list[Any], str]:
        out, err = self.popen.communicate(timeout=PATIENCE)
        return [json.loads(line) for line in out.splitlines()], err.decode()


@contextmanager
def running(*arguments: object) -> Iterator[Process]:
    process = Process(*map(str, arguments))
    try:
        yield process
    finally:
        process.popen.kill()
        process.popen.communicate()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def note(number: int) -> tuple[str, dict[str, Any]]:
    return "remember", {"records": [{"id": str(number), "content": f"note {number}"}]}


def test_the_end_of_stdin_ends_it_after_everything_is_answered(path: Path) -> None:
    with running(path) as process:
        process.send(*(note(number) for number in range(500)), ("timeline", {}))
        answers, err = process.end()
    assert len(answers) == 501
    [timeline] = [answer["result"] for answer in answers if answer["id"] == 500]
    assert [record["id"] for record in timeline["records"]] == [str(number) for number in range(500)]
    assert (process.popen.returncode, err) == (0, "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(path: Path, sent: signal.Signals) -> None:
    with running(path, "--kind", "working", "--name", "w") as process:
        described = process.ask("describe")
        assert (described["name"], described["kind"]) == ("w", "working")
        assert process.ask(*note(1)[:1], **note(1)[1]) == {"ids": ["1"]}
        process.popen.send_signal(sent)
        assert process.end() == ([], "")
    assert process.popen.returncode == 0
    assert not path.with_name("store.db-wal").exists()


@pytest.mark.parametrize("durability", ["full", "normal"])
def test_what_was_acknowledged_outlives_a_kill(path: Path, durability: str) -> None:
    with running(path, "--durability", durability) as process:
        process.send(*(note(number) for number in range(300)))
        acknowledged = [process.answer()["result"]["ids"][0] for _ in range(100)]
        os.kill(process.popen.pid, signal.SIGKILL)
        acknowledged += [json.loads(line)["result"]["ids"][0] for line in process.rest()]
    with running(path) as again:
        kept = [record["id"] for record in again.ask("timeline")["records"]]
        assert again.ask("describe")["store"]["records"] == len(kept)
    assert set(acknowledged) <= set(kept)
    assert kept == [str(number) for number in range(len(kept))]


def test_a_second_process_is_refused_with_a_sentence(path: Path) -> None:
    with running(path) as process:
        process.ask("describe")
        with running(path) as second:
            answers, err = second.end()
        assert (second.popen.returncode, answers) == (1, [])
        assert re.fullmatch(rf"a2m-store: .*in use by an a2m-store \(process {process.popen.pid}\).*\n", err)


def test_a_file_that_is_no_database_is_refused_with_a_sentence(path: Path) -> None:
    path.write_text("not a database, but a text that is long enough to be looked at " * 100)
    with running(path) as process:
        answers, err = process.end()
    assert (process.popen.returncode, answers) == (1, [])
    assert err.startswith(f"a2m-store: {path}: ")
    assert err.count("\n") == 1


def test_the_command_explains_itself() -> None:
    explained = subprocess.run([*COMMAND, "--help"], capture_output=True, check=True, text=True)
    for option in ("--kind", "--name", "--http", "--durability", "--metric", "--max-records", "--max-content"):
        assert option in explained.stdout
    assert subprocess.run([*COMMAND, "--version"], capture_output=True, check=True, text=True).stdout.startswith("a2m-")
    wrong = subprocess.run([*COMMAND, "x.db", "--http", "nowhere"], capture_output=True, check=False, text=True)
    assert wrong.returncode == 2
    assert "HOST:PORT" in wrong.stderr


@contextmanager
def on_http(path: Path) -> Iterator[tuple[Process, httpx.Client]]:
    with running(path, "--http", "127.0.0.1:0") as process:
        assert process.popen.stderr is not None
        listening = re.search(r"http://\S+", process.popen.stderr.readline().decode())
        assert listening is not None
        with httpx.Client(base_url=listening[0], timeout=PATIENCE, verify=False) as client:
            yield process, client


def test_over_http_there_are_no_owners_and_no_browsers(path: Path) -> None:
    with on_http(path) as (process, client):

        def ask(method: str, **params: Any) -> Any:
            message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
            return client.post("/", json=message).json()["result"]

        assert "scopes" not in ask("describe")["capabilities"]
        ask("remember", records=[{"content": "a", "owner": "x"}], owner="y")
        [record] = ask("timeline", owner="z")["records"]
        assert "owner" not in record
        assert client.get("/.well-known/a2m-server.json").json()["store"]["records"] == 1
        refused = client.post("/", json={}, headers={"Origin": "https://example.com"})
        assert refused.status_code == 403
        process.popen.send_signal(signal.SIGTERM)
        assert process.end() == ([], "")
    assert process.popen.returncode == 0


def test_a_port_that_is_taken_is_said_in_a_sentence(path: Path) -> None:
    with on_http(path) as (_, client):
        taken = f"127.0.0.1:{client.base_url.port}"
        with running(path.with_name("other.db"), "--http", taken) as second:
            answers, err = second.end()
        assert (second.popen.returncode, answers) == (1, [])
        assert re.fullmatch(rf"a2m-store: cannot listen on {taken}: .*\n", err)
