"""A stderr that is not read blocks no program: each one gets a pipe for stderr that is full, or fills up."""

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from tests.support.addresses import reserved_port
from tests.support.unread import Unread

# seconds, and far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60


# a store that writes 4,000 bytes to stderr for each message, before it reads the message
LOUD: Final = """
import subprocess, sys
store = subprocess.Popen([sys.argv[1], "loud.db"], stdin=subprocess.PIPE)
for line in sys.stdin.buffer:
    sys.stderr.write("x" * 4000 + chr(10))
    store.stdin.write(line)
    store.stdin.flush()
store.stdin.close()
store.wait()
"""


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture
def unread() -> Iterator[Unread]:
    pipe = Unread()
    yield pipe
    pipe.close()


def call(method: str, id: int = 1, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": f"memory/{method}", "params": params}).encode() + b"\n"


def ran(folder: Path, unread: Unread, *command: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [program(command[0]), *command[1:]],
        cwd=folder,
        input=given,
        stdout=subprocess.PIPE,
        stderr=unread.writing,
        timeout=PATIENCE,
    )


def ids(out: bytes) -> set[int]:
    return {json.loads(line)["id"] for line in out.splitlines()}


@pytest.mark.parametrize(
    "command",
    [
        ("a2m-router", "--config", "none.toml"),
        ("a2m-store", "/dev/null/notes.db"),
        ("a2m-rag", "python", "no_such_module_anywhere:retrieve"),
        ("a2m-chaos", "--plan", "none.toml", "--", "cat"),
    ],
)
def test_a_program_that_cannot_start_ends_though_nobody_reads_why(
    tmp_path: Path, unread: Unread, command: tuple[str, ...]
) -> None:
    unread.fill()
    assert ran(tmp_path, unread, *command).returncode == 1


def test_chaos_says_what_it_does_to_each_call_and_waits_for_no_reader(tmp_path: Path, unread: Unread) -> None:
    (tmp_path / "faults.toml").write_text('[[fault]]\ndo = "answer-late"\nwait = "1ms"\n')
    unread.fill()
    given = b"".join(call("describe", id) for id in range(20))
    ended = ran(tmp_path, unread, "a2m-chaos", "--plan", "faults.toml", "--", program("a2m-store"), "n.db", given=given)
    assert ids(ended.stdout) == set(range(20))
    assert ended.returncode == 0


def test_what_a_retriever_prints_is_waited_for_by_nobody(tmp_path: Path, unread: Unread) -> None:
    (tmp_path / "mine.py").write_text('def retrieve(query, limit):\n    print("x" * 9000)\n    return ["found"]\n')
    unread.fill()
    given = b"".join(call("recall", id, query="found") for id in range(5))
    ended = ran(tmp_path, unread, "a2m-rag", "python", "mine:retrieve", given=given)
    assert [json.loads(line)["result"]["records"][0]["content"] for line in ended.stdout.splitlines()] == ["found"] * 5
    assert ended.returncode == 0


def test_a_store_over_http_serves_and_ends_though_nobody_reads_where(tmp_path: Path, unread: Unread) -> None:
    unread.fill()
    with reserved_port() as port:
        command = [program("a2m-store"), str(tmp_path / "n.db"), "--http", f"127.0.0.1:{port}"]
        with serving(*command, stderr=unread.writing) as store:
            with httpx.Client(transport=httpx.HTTPTransport(retries=20, verify=False), timeout=PATIENCE) as client:
                answer = client.post(
                    f"http://127.0.0.1:{port}/", content=call("describe"), headers={"Content-Type": "application/json"}
                )
            assert answer.json()["result"]["name"] == "n"
            store.send_signal(signal.SIGTERM)
            assert store.wait(PATIENCE) == 0


@pytest.fixture
def loud(tmp_path: Path) -> Path:
    """Return a federation whose tier fills a pipe for stderr with each call."""
    path = tmp_path / "federation.toml"
    command = [sys.executable, "-c", LOUD, program("a2m-store")]
    path.write_text(f'state = "router.db"\n[tiers.working]\nkind = "working"\ncommand = {json.dumps(command)}\n')
    return path


@contextlib.contextmanager
def serving(*command: str, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            assert stream is not None
            stream.close()


def test_a_router_answers_calls_and_a_signal_with_its_log_unread(loud: Path, unread: Unread) -> None:
    with serving(program("a2m-router"), "--config", str(loud), stderr=unread.writing) as router:
        assert router.stdin is not None
        assert router.stdout is not None
        for id in range(60):
            router.stdin.write(call("remember", id, records=[{"content": "x"}]))
            router.stdin.flush()
            assert json.loads(router.stdout.readline())["result"]["ids"]
        router.send_signal(signal.SIGTERM)
        assert router.wait(PATIENCE) == 0


def test_a_router_over_http_is_healthy_though_nobody_reads_its_log(loud: Path, unread: Unread) -> None:
    unread.fill()
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}/"
        command = [program("a2m-router"), "--config", str(loud), "--http", f"127.0.0.1:{port}"]
        with serving(*command, stderr=unread.writing) as router:
            with httpx.Client(transport=httpx.HTTPTransport(retries=20, verify=False), timeout=PATIENCE) as client:
                for id in range(5):
                    headers = {"Content-Type": "application/json"}
                    answer = client.post(url, content=call("remember", id, records=[{"content": "x"}]), headers=headers)
                    assert answer.json()["result"]["ids"]
                assert client.get(f"{url}healthz").status_code == 200
            router.send_signal(signal.SIGTERM)
            assert router.wait(PATIENCE) == 0


def test_the_log_counts_what_it_dropped_as_soon_as_somebody_reads_it(loud: Path, unread: Unread) -> None:
    with serving(program("a2m-router"), "--config", str(loud), "--log-format", "json", stderr=unread.writing) as router:
        assert router.stdin is not None
        assert router.stdout is not None
        for id in range(400):  # much more than the queue and the pipe hold
            router.stdin.write(call("describe", id))
            router.stdin.write(call("recall", id, query="x"))
            router.stdin.flush()
            router.stdout.readline()
            router.stdout.readline()
        with open(unread.reading, "rb", closefd=False) as log:
            events = until("dropped", log)
            assert events[-1]["level"] == "error"
            assert int(events[-1]["message"].split()[0]) >= 1
            assert sum("xxxx" in event["message"] for event in events) >= 200  # a MiB of them was kept
            router.stdin.close()
            until("stopped", log)  # from there on, the log is complete
        assert router.wait(PATIENCE) == 0


def until(wanted: str, log: Iterable[bytes]) -> list[Any]:
    """Return the events up to the first that contains this text."""
    events = []
    for line in log:
        events.append(json.loads(line))
        if wanted in events[-1]["message"]:
            return events
    raise AssertionError(f"the log has ended, and nothing of it said {wanted!r}")
