"""a2m-chaos as a process: what it passes on unaltered, how it ends, what it reports, and what it keeps."""

import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.abc
import httpx
import psutil
import pytest

from a2m_chaos import cli
from a2m_chaos.altering import Call
from a2m_chaos.faults import KINDS
from a2m_chaos.misbehaving import GoOn
from a2m_chaos.over_stdio import _Line, _Out
from a2m_chaos.plan import Fault, Plan
from a2m_chaos.running import Run
from a2m_router.conformance.client import Stdio
from a2m_router.conformance.running import State, judged
from tests.servers.bindings import over_http

CHAOS: Final = str(Path(sys.executable).with_name("a2m-chaos"))
STORE: Final = str(Path(sys.executable).with_name("a2m-store"))

# seconds, and far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60
_LOOK: Final = 0.02  # seconds between two polls of a state that triggers no event

# its answers have spaces, escapes, unsorted keys, notifications, and a last line without a newline
ODD: Final = r"""
import sys
received = open("received", "wb", buffering=0)
for number, line in enumerate(sys.stdin.buffer):
    received.write(line)
    sys.stderr.buffer.write(b"heard \xff %d\n" % number)
    sys.stderr.buffer.flush()
    sys.stdout.buffer.write(b'{"method" : "memory/event","params":{"n":1.0},"jsonrpc":"2.0"}\n')
    sys.stdout.buffer.write(b'{ "result": {"a":1e400,"a":"\\u00fc \xc3\xbc"} ,"id":%d, "jsonrpc":"2.0"}\r\n' % number)
    sys.stdout.buffer.flush()
sys.stdout.buffer.write(b'{"jsonrpc":"2.0","method":"memory/event","params":{"last":true}}')
"""

# it answers its first call after all others, or after a while
OUT_OF_ORDER: Final = r"""
import json, sys, threading
def answer(call):
    print(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": call["params"]["key"]}), flush=True)
for number, line in enumerate(sys.stdin):
    threading.Timer(0.0 if number else 0.3, answer, [json.loads(line)]).start()
"""


def calls(*methods: str, **params: Any) -> bytes:
    """Return calls, one a line, with the ids 0, 1, ..."""
    return b"".join(call(f"memory/{method}", id, **params) + b"\n" for id, method in enumerate(methods))


def call(method: str, id: Any = 1, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": id, "method": method, "params": params}).encode()


def written(content: str, id: Any = 1) -> bytes:
    return call("memory/remember", id, records=[{"id": content, "content": content}])


def plan(folder: Path, text: str = "") -> str:
    (folder / "faults.toml").write_text(text)
    return "faults.toml"


def ran(folder: Path, stdin: bytes, *command: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(command, cwd=folder, input=stdin, capture_output=True, timeout=PATIENCE)


def answers(done: subprocess.CompletedProcess[bytes]) -> dict[Any, Any]:
    """Return the answers by id."""
    return {answer["id"]: answer for answer in map(json.loads, done.stdout.splitlines())}


@contextmanager
def at_an_address(folder: Path, *arguments: str) -> Iterator[str]:
    """Run a2m-chaos on HTTP and end it by SIGTERM; the file `stderr` has its output."""
    command = [CHAOS, "--http", "127.0.0.1:0", *arguments]
    with (
        (folder / "stderr").open("wb", buffering=0) as said,
        subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE) as process,
    ):
        assert process.stderr is not None
        rest = threading.Thread(target=said.writelines, args=(process.stderr,))  # writes each line as it comes
        try:
            found = None
            while found is None:
                line = process.stderr.readline()
                assert line, (folder / "stderr").read_text()
                said.write(line)
                found = re.search(rb"listening on (\S+)", line)
            rest.start()
            yield found[1].decode()
        finally:
            process.terminate()
            try:
                status = process.wait(PATIENCE)
            finally:
                process.kill()
            if rest.ident is not None:
                rest.join(PATIENCE)
        assert status == 0


def posted(url: str, message: bytes, **headers: str) -> httpx.Response:
    # no certificates are checked here, and loading them takes longer than a call
    headers = {"Content-Type": "application/json", **headers}
    return httpx.post(url, content=message, headers=headers, timeout=PATIENCE, trust_env=False, verify=False)


def got(url: str) -> httpx.Response:
    return httpx.get(url, timeout=PATIENCE, trust_env=False, verify=False)


def raw(url: str, request: bytes) -> bytes:
    """Send a request on a separate connection; return the whole answer."""
    where = httpx.URL(url)
    with socket.create_connection((where.host, where.port or 0), timeout=PATIENCE) as connected:
        connected.sendall(request)
        return b"".join(iter(lambda: connected.recv(2**16), b""))


def test_it_answers_those_who_mean_this_machine_as_any_server_of_ours_does(tmp_path: Path) -> None:
    with at_an_address(tmp_path, "--plan", plan(tmp_path), "--", STORE, "some.db") as url:
        assert posted(url, calls("describe"), Host="localhost").status_code == 200
        refused = posted(url, calls("describe"), Host="evil.example")
        assert (refused.status_code, "expected localhost" in refused.text) == (421, True)
        body = calls("describe")
        for target, lengths, status in (
            (b"http://localhost/", b"Content-Length: %d\r\n" % len(body), b"200"),
            (b"http://evil.example/", b"Content-Length: %d\r\n" % len(body), b"421"),
            (b"/", b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", b"400"),
        ):
            head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%b\r\n" % (target, lengths)
            came = raw(url, head + (b"0\r\n\r\n" if status == b"400" else body))
            assert came.split(b" ", 2)[1] == status


# --- without a fault


def test_what_passes_on_stdio_is_unaltered_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    server = (sys.executable, "odd.py")
    said = b'{"id" : 0,  "method":"memory/recall","jsonrpc":"2.0","params":{"query":"\\u00fc"}}\n'
    said += b'{"method":"memory/note","jsonrpc":"2.0"}\nno JSON at all \xff\n[1]\n' + calls("describe")
    alone = ran(tmp_path, said, *server)
    received = (tmp_path / "received").read_bytes()
    through = ran(tmp_path, said, CHAOS, "--plan", plan(tmp_path), "--", *server)
    assert (tmp_path / "received").read_bytes() == received == said
    # a2m-chaos adds the newline that the last line lacks
    assert through.stdout == alone.stdout + b"\n"
    assert through.stderr == alone.stderr
    assert through.returncode == alone.returncode == 0


def test_what_passes_over_http_is_unaltered(tmp_path: Path) -> None:
    seen: list[bytes] = []

    def odd(message: bytes) -> bytes | None:
        seen.append(message)
        return b'{ "result":\n {"a":1e400} ,"id":1,"jsonrpc":"2.0"}' if b'"id"' in message else None

    with over_http(odd) as behind, at_an_address(tmp_path, "--plan", plan(tmp_path), "--url", behind) as url:
        message = b'{"jsonrpc":"2.0",\n "id":1,"method":"memory/describe"}'
        for sent in (message, b'{"jsonrpc":"2.0","method":"memory/note"}'):
            direct, through = posted(behind, sent), posted(url, sent)
            assert (through.status_code, through.content) == (direct.status_code, direct.content)
        assert seen[0] == seen[1] == message
        assert posted(url, message, Origin="http://elsewhere").status_code == 403
        assert posted(url, message, **{"A2M-Protocol-Version": "a2m/7"}).status_code == 400
        assert got(url).status_code == 405


def test_a_child_can_be_served_over_http_and_a_url_on_stdio(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with at_an_address(tmp_path, "--plan", plan(tmp_path), "--", STORE, "notes/some.db") as url:
        assert posted(url, written("pears").replace(b", ", b",\n")).json()["result"] == {"ids": ["pears"]}
        assert posted(url, b'{"jsonrpc":"2.0","method":"memory/recall"}').status_code == 202
        assert got(url).status_code == 405
        done = ran(tmp_path, calls("timeline", "nonsense"), CHAOS, "--plan", plan(tmp_path), "--url", url)
        assert [record["content"] for record in answers(done)[0]["result"]["records"]] == ["pears"]
        assert answers(done)[1]["error"]["code"] == -32601
        assert done.returncode == 0


def test_clients_that_take_the_same_id_get_their_own_answers(tmp_path: Path) -> None:
    (tmp_path / "out_of_order.py").write_text(OUT_OF_ORDER)
    command = ("--plan", plan(tmp_path), "--", sys.executable, "out_of_order.py")
    with at_an_address(tmp_path, *command) as url, ThreadPoolExecutor() as threads:
        keys = ["one", "another"]
        came = threads.map(lambda key: posted(url, call("memory/fetch", key=key)), keys)
        assert [answer.json()["result"] for answer in came] == keys


def test_a_server_behind_it_keeps_to_the_protocol_as_it_does_alone(tmp_path: Path) -> None:
    path = tmp_path / plan(tmp_path)
    came = judged(Stdio([CHAOS, "--plan", str(path), "--", STORE, str(tmp_path / "some.db")], PATIENCE))
    assert [(each.check.name, each.why) for each in came if each.state is State.FAILED] == []
    assert sum(each.state is State.PASSED for each in came) > 50


# --- order


def test_a_call_that_waits_on_a_pipe_holds_up_those_behind_it(tmp_path: Path) -> None:
    path = plan(tmp_path, '[[fault]]\ndo = "delay"\nwait = "50ms"\nin_order = true\nmethod = "memory/remember"')
    said = written("pears", 0) + b"\n" + call("memory/timeline", 1) + b"\n"
    done = ran(tmp_path, said, CHAOS, "--plan", path, "--", STORE, "some.db")
    assert [record["id"] for record in answers(done)[1]["result"]["records"]] == ["pears"]


def test_a_call_that_waits_without_order_holds_up_nobody(tmp_path: Path) -> None:
    # the write still waits when the test ends; if it held up the other call, that would find it carried out
    text = '[[fault]]\ndo = "delay"\nwait = "1m"\nin_order = false\nmethod = "memory/remember"'
    with running(tmp_path, text) as process:
        assert process.stdin is not None
        process.stdin.write(written("pears", 0) + b"\n")
        answer = asked(process, call("memory/timeline", 1))
        assert (answer["id"], answer["result"]["records"]) == (1, [])
        process.terminate()
        assert process.wait(PATIENCE) == 0


def test_a_call_whose_answer_is_lost_is_carried_out_before_those_behind_it(tmp_path: Path) -> None:
    path = plan(tmp_path, '[[fault]]\ndo = "drop-answer"\nmethod = "memory/remember"')
    said = (
        b"".join(written(f"{number:02}", number) + b"\n" for number in range(20)) + call("memory/timeline", 99) + b"\n"
    )
    done = ran(tmp_path, said, CHAOS, "--plan", path, "--", STORE, "some.db")
    assert list(answers(done)) == [99]
    assert [r["id"] for r in answers(done)[99]["result"]["records"]] == [f"{number:02}" for number in range(20)]


class Notebook(_Line):
    """A line that records messages instead of passing them to a server."""

    def __init__(self, run: Run, tasks: anyio.abc.TaskGroup) -> None:
        super().__init__(_Out(Nowhere()), run, tasks)
        self.handed: list[bytes] = []

    async def pass_on(self, message: bytes) -> None:
        self.handed.append(message)

    def go_on(self, call: Call, told: anyio.Event) -> GoOn:
        async def go_on(message: bytes) -> bytes | None:
            self.handed.append(message)
            told.set()
            await anyio.sleep_forever()
            raise AssertionError("this was cancelled")

        return go_on


class Nowhere(anyio.abc.ByteSendStream):
    async def send(self, item: bytes) -> None:
        pass

    async def aclose(self) -> None:
        pass


@pytest.mark.anyio
async def test_calls_are_handed_on_in_the_order_they_came() -> None:
    """The order does not depend on which task runs first."""
    faults = Plan(faults=(Fault(do="drop-answer", every=2), Fault(do="hang", times=1)))
    said = [call("memory/recall", number) for number in range(9)]
    async with anyio.create_task_group() as tasks:
        line = Notebook(Run(faults, lambda sentence: None), tasks)
        for message in said:
            await line.take(message)
        tasks.cancel_scope.cancel()
    assert line.handed == said[1:]


# --- ids


@pytest.mark.parametrize("id", [[1], {"a": 1}, True, None])
def test_a_call_without_an_id_that_it_could_be_answered_by_is_passed_on(id: Any, tmp_path: Path) -> None:
    path = plan(tmp_path, '[[fault]]\ndo = "delay"\nwait = "1ms"')
    said = call("memory/describe", id) + b"\n"
    alone = ran(tmp_path, said, STORE, "some.db")
    through = ran(tmp_path, said, CHAOS, "--plan", path, "--", STORE, "some.db")
    assert through.stdout == alone.stdout != b""
    assert (through.stderr, through.returncode) == (b"", 0)


def test_a_call_with_an_impossible_id_is_accepted_like_a_notification(tmp_path: Path) -> None:
    path = plan(tmp_path, '[[fault]]\ndo = "delay"\nwait = "1ms"')
    with at_an_address(tmp_path, "--plan", path, "--", STORE, "some.db") as url:
        assert posted(url, call("memory/describe", [1])).status_code == 202
        assert "result" in posted(url, call("memory/describe")).json()


@pytest.mark.parametrize(("id", "again"), [("1.0", "1"), ("1", "1.0"), (r'"\u00fc"', '"ü"'), ('"1"', '"1"')])
def test_an_answer_is_known_by_its_id_however_the_server_writes_it(id: str, again: str, tmp_path: Path) -> None:
    answer = f'{{"jsonrpc":"2.0","id":{again},"result":{{}}}}'
    path = plan(tmp_path, '[[fault]]\ndo = "answer-twice"')
    said = f'{{"jsonrpc":"2.0","id":{id},"method":"memory/recall","params":{{}}}}\n'.encode()
    server = ("/bin/sh", "-c", 'while read -r line; do printf "%s\\n" "$0"; done', answer)
    assert ran(tmp_path, said, CHAOS, "--plan", path, "--", *server).stdout == f"{answer}\n{answer}\n".encode()


# --- its server


def test_a_server_without_a_slash_is_the_one_installed_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes before one on the path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    for name, status in (("a2m-store", 7), ("another-store", 8)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(0o755)
    path = plan(tmp_path)
    done = ran(tmp_path, calls("describe"), CHAOS, "--plan", path, "--", "a2m-store", "some.db")
    assert "result" in answers(done)[0]
    assert ran(tmp_path, b"", CHAOS, "--plan", path, "--", "another-store").returncode == 8
    assert ran(tmp_path, b"", CHAOS, "--plan", path, "--", "./a2m-store").returncode == 7


# --- its end


def test_it_ends_with_its_input_and_answers_what_is_under_way(tmp_path: Path) -> None:
    path = plan(tmp_path, '[[fault]]\ndo = "answer-late"\nwait = "100ms"')
    done = ran(tmp_path, calls("describe", "timeline"), CHAOS, "--plan", path, "--", STORE, "some.db")
    assert sorted(answers(done)) == [0, 1]
    assert done.returncode == 0


@pytest.mark.parametrize("fault", ["", '[[fault]]\ndo = "hang"\nin_order = true\nhaving = "nobody answers"'])
def test_it_ends_in_order_when_it_is_told_to_and_its_child_with_it(fault: str, tmp_path: Path) -> None:
    with running(tmp_path, fault) as process:
        asked(process, call("memory/describe"))
        [child] = psutil.Process(process.pid).children()
        assert process.stdin is not None
        if fault:
            process.stdin.write(call("memory/recall", query="nobody answers") + b"\n")
            assert process.stderr is not None
            assert b"hang" in process.stderr.readline()
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert not child.is_running()


def test_a_child_does_not_outlive_it(tmp_path: Path) -> None:
    with running(tmp_path) as process:
        asked(process, call("memory/describe"))
        [child] = psutil.Process(process.pid).children()
        process.kill()
        child.wait(PATIENCE)


def test_a_child_that_ends_by_itself_ends_it_with_its_status(tmp_path: Path) -> None:
    assert ran(tmp_path, b"", CHAOS, "--plan", plan(tmp_path), "--", "/bin/sh", "-c", "exit 7").returncode == 7
    assert ran(tmp_path, b"", CHAOS, "--plan", plan(tmp_path), "--", "/bin/sh", "-c", "kill -9 $$").returncode == 137


def test_a_server_that_has_died_at_an_address_is_there_again_after_a_while(tmp_path: Path) -> None:
    text = '[[fault]]\ndo = "exit-after-work"\nwait = "10ms"\nhaving = "pears"'
    with at_an_address(tmp_path, "--plan", plan(tmp_path, text), "--", STORE, "some.db") as url:
        with pytest.raises(httpx.TransportError):
            posted(url, written("pears"))
        answer = again(lambda: posted(url, call("memory/timeline")))
        assert [record["id"] for record in answer.json()["result"]["records"]] == ["pears"]
    assert "fault=exit-after-work the call is carried out, then the server dies" in (tmp_path / "stderr").read_text()


def test_what_lands_late_while_its_server_is_started_again_ends_nothing(tmp_path: Path) -> None:
    text = (
        '[[fault]]\nmethod = "memory/remember"\ndo = "apply-late"\nwait = "400ms"\nanswer = "error"\n'
        '[[fault]]\nmethod = "memory/fetch"\ntimes = 1\ndo = "exit-before-work"\nwait = "10ms"\n'
    )
    with at_an_address(tmp_path, "--plan", plan(tmp_path, text), "--", STORE, "some.db") as url:
        # so many that some of them land at that very moment
        for number in range(100):
            assert "error" in posted(url, written(str(number))).json()
        with pytest.raises(httpx.TransportError):
            posted(url, call("memory/fetch", key="k"))
        assert "result" in again(lambda: posted(url, call("memory/timeline"))).json()


# --- what it keeps


def test_what_was_counted_outlives_it(tmp_path: Path) -> None:
    text = '[[fault]]\ndo = "exit-before-work"\nmethod = "memory/remember"\nafter = 1\ntimes = 1\n'
    command = (CHAOS, "--plan", "faults.toml", "--", STORE, "some.db")
    for counts, statuses in (("", [0, 0, 0]), ('counts = "faults.counts"\n', [0, 3, 0])):
        plan(tmp_path, counts + text)
        assert [ran(tmp_path, written("pears") + b"\n", *command).returncode for _ in statuses] == statuses


def test_what_was_not_durable_is_gone_even_if_all_were_killed(tmp_path: Path) -> None:
    """a2m-chaos is killed, and so cannot restore the memory; its next start does."""
    text = 'memory = ["some.db*"]\n[[fault]]\ndo = "lose-at-crash"\nhaving = "not on disk"'
    with running(tmp_path, text) as process:
        for content in ("before", "not on disk", "afterwards"):
            assert asked(process, written(content))["result"] == {"ids": [content]}
        [child] = psutil.Process(process.pid).children()
        process.kill()
        child.wait(PATIENCE)
    with running(tmp_path, text) as process:
        assert [record["id"] for record in asked(process, call("memory/timeline"))["result"]["records"]] == ["before"]
        asked(process, written("not on disk"))
    # a regular end is no crash
    with running(tmp_path, text) as process:
        held = [record["id"] for record in asked(process, call("memory/timeline"))["result"]["records"]]
        assert held == ["before", "not on disk"]


def test_a_plan_whose_memory_is_all_there_is_stays_where_it_is(tmp_path: Path) -> None:
    text = 'memory = ["*"]\ncounts = "faults.counts"\n'
    text += '[[fault]]\ndo = "restart-empty"\ntimes = 1\nwhile = "trouble"\n'
    command = (CHAOS, "--plan", plan(tmp_path, text), "--", STORE, "some.db")
    assert answers(ran(tmp_path, written("pears") + b"\n", *command))[1]["result"] == {"ids": ["pears"]}
    (tmp_path / "trouble").touch()
    assert ran(tmp_path, calls("timeline"), *command).returncode == 3
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} == {"faults.toml", "faults.counts", "trouble"}
    assert (tmp_path / "faults.chaos-moved-1" / "some.db").exists()
    assert answers(ran(tmp_path, calls("timeline"), *command))[0]["result"]["records"] == []


# --- what it reports


class Called:
    """The command, in this process."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def __call__(self, *arguments: str) -> tuple[Any, str, str]:
        code: Any = None
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        return code, *self._capfd.readouterr()


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Called:
    return Called(capfd)


def test_it_explains_itself(here: Called) -> None:
    code, said, _ = here("--help")
    assert code == 0
    for word in ("--plan", "--seed", "--http", "--url", "--list", "--version", "[[fault]]", "COMMAND"):
        assert word in said
    code, said, _ = here("--list")
    assert code == 0
    for kind in KINDS.values():
        assert re.search(rf"^{kind.name} +{re.escape(kind.sentence)}", said, re.MULTILINE)
    for line in (
        r'apply-late .*settings: wait = "120s", in_order = true on stdio, answer = "nothing"',
        r"answer-twice .*settings: wait = none",
        r'huge-line .*settings: size = "65MiB"',
        r'exit-after-work .*settings: wait = "1s" over HTTP',
        r'alter-record .*settings: field = "content"',
    ):
        assert re.search(rf"^{line}", said, re.MULTILINE)


MEMORY: Final = 'memory = ["some.db*"]\n[[fault]]\nmethod = "memory/remember"\n'


@pytest.mark.parametrize("front", ["stdio", "http"])
def test_memory_that_cannot_be_kept_aside_is_a_sentence_and_the_end(front: str, tmp_path: Path) -> None:
    (tmp_path / "faults.chaos-kept-making").write_text("no folder can be made here")
    told = f"the server's memory cannot be saved: {tmp_path}/faults.chaos-kept-making: File exists\n"
    command = [CHAOS, "--plan", plan(tmp_path, MEMORY + 'do = "lose-at-crash"'), "--", STORE, "some.db"]
    if front == "stdio":
        done = ran(tmp_path, written("one"), *command)
        code, out, said = done.returncode, done.stdout, done.stderr.decode()
        assert out == b""
    else:
        process = subprocess.Popen([*command[:1], "--http", "127.0.0.1:0", *command[1:]], **at(tmp_path))
        try:
            assert process.stderr is not None
            first = process.stderr.readline()
            url = first.split()[-1].decode()
            with pytest.raises(httpx.TransportError):
                posted(url, written("one"))
            said = process.communicate(timeout=PATIENCE)[1].decode()
            code = process.returncode
        finally:
            process.kill()
            process.communicate()
    assert (code, "Traceback" in said) == (1, False), said
    assert said.endswith(f"a2m-chaos: {told}")
    # the write was not carried out, and the server ended regularly: only its own file is left
    assert {path.name for path in tmp_path.glob("some.db*")} <= {"some.db", "some.db.lock"}


def at(folder: Path) -> dict[str, Any]:
    # nothing is read ahead: `communicate` would not get it
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "bufsize": 0}
    return {"cwd": folder, "stdin": subprocess.DEVNULL, **pipes}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ((), 2, "expected either a server's command after --, or --url"),
        (("--plan", "faults.toml", "--url", "http://127.0.0.1:1/", "--", "a2m-store"), 2, "expected either"),
        (("--", "a2m-store", "notes.db"), 2, "required: --plan"),
        (("--plan", "no.toml", "--", "a2m-store"), 1, "no.toml: cannot be read: No such file or directory"),
        (("--plan", "mistaken.toml", "--", "a2m-store"), 1, 'did you mean "exit-after-work"?'),
        (("--plan", "faults.toml", "--url", "notes.db"), 1, "expected a URL like http://"),
        (("--plan", "faults.toml", "--", "/no/such/program"), 1, "'/no/such/program' cannot be started: No such file"),
        (("--plan", "faults.toml", "--", "no-such-program"), 1, "'no-such-program' cannot be started: No such file"),
        (("--plan", "faults.toml", "--http", "0.0.0.0:1", "--", "a2m-store"), 2, "can be reached from other machines"),
    ],
)
def test_a_mistake_is_a_sentence(
    arguments: tuple[str, ...],
    code: int,
    sentence: str,
    here: Called,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    plan(tmp_path)
    (tmp_path / "mistaken.toml").write_text('[[fault]]\ndo = "exit-after"')
    came, out, said = here(*arguments)
    assert (came, out) == (code, "")
    assert sentence in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("counts", "sentence"),
    [
        ("no/such/folder/faults.counts", "cannot be written: No such file or directory"),
        (".", "cannot be read: Is a directory"),
        ("faults.toml", "not a file of counts; name a file that a2m-chaos may overwrite"),
    ],
)
def test_counts_that_cannot_be_kept_are_refused_before_serving(
    counts: str, sentence: str, here: Called, tmp_path: Path
) -> None:
    text = f'counts = "{counts}"\n'
    code, out, said = here("--plan", str(tmp_path / plan(tmp_path, text)), "--", "/bin/sh", "-c", "echo served")
    assert (code, out) == (1, "")
    assert said == f"a2m-chaos: counts: {tmp_path / counts}: {sentence}\n"
    assert (tmp_path / "faults.toml").read_text() == text


def test_a_fault_is_done_though_its_counts_can_no_longer_be_kept(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "kept").mkdir()
    run = Run(Plan(faults=(Fault(do="hang", after=1),), counts=tmp_path / "kept" / "faults.counts"), said.append)
    (tmp_path / "kept").rename(tmp_path / "away")
    came = [run.decide(call("memory/recall"))[1] for _ in range(2)]
    run.keep()
    assert [None if applied is None else applied.fault.do for applied in came] == [None, "hang"]
    told = [sentence for sentence in said if sentence.endswith("no longer written: No such file or directory")]
    assert len(told) == 2


def test_counts_that_were_being_written_when_it_died_begin_anew(tmp_path: Path) -> None:
    (tmp_path / "faults.counts").touch()
    run = Run(Plan(faults=(Fault(do="hang", times=1),), counts=tmp_path / "faults.counts"), lambda sentence: None)
    assert [run.decide(call("memory/recall"))[1] is not None for _ in range(2)] == [True, False]


# --- processes


@contextmanager
def running(folder: Path, text: str = "") -> Iterator[subprocess.Popen[bytes]]:
    """Run a2m-chaos on pipes, in front of a store; close its input at the end."""
    process = subprocess.Popen(
        [CHAOS, "--plan", plan(folder, text), "--", STORE, "some.db"],
        bufsize=0,
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        yield process
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.communicate()


def asked(process: subprocess.Popen[bytes], message: bytes) -> Any:
    """Send a message; return the next answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(message + b"\n")
    return json.loads(process.stdout.readline())


def again(attempt: Callable[[], httpx.Response]) -> httpx.Response:
    """Repeat the attempt until it gets a response; return that."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            return attempt()
        except httpx.TransportError:
            assert time.monotonic() < until
            time.sleep(_LOOK)
