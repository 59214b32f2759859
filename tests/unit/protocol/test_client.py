"""The client side: many calls on one stream, child processes, HTTP."""

import gc
import gzip
import json
import logging
import os
import sys
import textwrap
import tracemalloc
import zlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import psutil
import pytest

from a2m_router.protocol.client import child as child_module
from a2m_router.protocol.client.child import CannotStart, connect_process
from a2m_router.protocol.client.client import (
    AnswerTooLong,
    Connection,
    ConnectionLost,
    NoAnswer,
    Settled,
    connect_local,
    tending,
)
from a2m_router.protocol.client.http_client import HttpClient, HttpFailure, connect_http
from a2m_router.protocol.client.http_exchange import Answer, Posting
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.jsonrpc import Notification
from a2m_router.protocol.wire.lines import LineSplitter
from tests.support.addresses import reserved_port
from tests.support.clocks import simulated
from tests.support.deadlines import Deadline

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "asyncio+uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    name, _, loop = request.param.partition("+")
    return (name, {"use_uvloop": bool(loop)}) if name == "asyncio" else name


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Deadline:
    return Deadline(monkeypatch)


class Script:
    """The far end of a connection, controlled by the test."""

    def __init__(self, requests: anyio.abc.ObjectReceiveStream[bytes], replies: Any) -> None:
        self._requests = requests
        self._replies = replies
        self._splitter = LineSplitter()
        self._came: list[Any] = []

    async def next(self) -> Any:
        """Return the next call."""
        while not self._came:
            lines = self._splitter.feed(await self._requests.receive())
            self._came += [json.loads(line) for line in lines if line is not None]
        return self._came.pop(0)

    async def say(self, *lines: Any) -> None:
        text = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        await self._replies.send(b"".join(line + b"\n" for line in text))

    async def answer(self, call: Any, result: Any = None) -> None:
        await self.say({"jsonrpc": "2.0", "id": call["id"], "result": result})

    async def hang_up(self) -> None:
        await self._replies.aclose()


@asynccontextmanager
async def scripted(buffer: float = 100, **options: Any) -> AsyncIterator[tuple[Connection, Script]]:
    connection = Connection("scripted", **options)
    to_server, requests = anyio.create_memory_object_stream[bytes](buffer)
    replies, from_server = anyio.create_memory_object_stream[bytes](100)

    async def carry() -> None:
        connection.lose(await connection.run(from_server, to_server))

    with to_server, requests, replies, from_server, anyio.fail_after(20):
        async with tending() as tasks:
            tasks.start_soon(carry)
            yield connection, Script(requests, replies)
            tasks.cancel_scope.cancel()
    connection.end()


class Outcome:
    """The result of a call that runs in a task of its own."""

    def __init__(self) -> None:
        self.over = anyio.Event()
        self.scope = anyio.CancelScope()
        self.result: Any = None
        self.problem: Exception | None = None
        self.unsettled: list[Settled] = []

    async def run(self, connection: Any, method: str, timeout: float | None) -> None:
        with self.scope:
            try:
                raw = await connection.call(method, {}, timeout=timeout, on_unsettled=self.unsettled.append)
                self.result = msgspec.json.decode(raw)
            except Exception as problem:  # noqa: BLE001 - asserted on
                self.problem = problem
        self.over.set()

    @property
    def settled(self) -> bool:
        assert isinstance(self.problem, NoAnswer | ConnectionLost)
        return self.problem.settled.is_set()


def begin(tasks: anyio.abc.TaskGroup, connection: Any, method: str = "m", timeout: float | None = None) -> Outcome:
    outcome = Outcome()
    tasks.start_soon(outcome.run, connection, method, timeout)
    return outcome


async def test_answers_find_their_calls_in_any_order() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcomes = {name: begin(tasks, connection, name) for name in "abc"}
        calls = [await script.next() for _ in outcomes]
        assert sorted(call["id"] for call in calls) == [1, 2, 3]
        for call in reversed(calls):
            await script.answer(call, call["method"] * 2)
        for name, outcome in outcomes.items():
            await outcome.over.wait()
            assert outcome.result == name * 2


async def test_an_error_is_raised_as_the_peer_sent_it() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        call = await script.next()
        await script.say({"jsonrpc": "2.0", "id": call["id"], "error": {"code": 7, "message": "no", "data": {"a": 1}}})
        await outcome.over.wait()
        assert isinstance(outcome.problem, A2MError)
        assert (outcome.problem.code, outcome.problem.message, outcome.problem.data) == (7, "no", {"a": 1})


async def test_parameters_with_line_breaks_stay_on_one_line() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        tasks.start_soon(lambda: connection.call("m", msgspec.Raw(b'{"a":\n[1,\n"\\n"]}'), timeout=None))
        call = await script.next()
        assert call["params"] == {"a": [1, "\n"]}
        await script.answer(call)


async def test_garbage_is_skipped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        call = await script.next()
        stranger = {"jsonrpc": "2.0", "id": 99, "result": 1}
        refusal = {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "what?"}}
        await script.say(b"hello, world", b"\xff\xfe", b"[1]", b"", stranger, refusal, {"jsonrpc": "2.0", "method": 3})
        await script.answer(call, "good")
        await outcome.over.wait()
        assert outcome.result == "good"
    logged = "\n".join(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    for part in ["hello, world", "UTF-8", "id b'99'", "what?", "scripted"]:
        assert part in logged
    assert len(caplog.records) == 6


async def test_an_answer_that_cannot_be_read_ends_its_call_at_once() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        call = await script.next()
        await script.say({"jsonrpc": "2.0", "id": call["id"]})
        await outcome.over.wait()
        assert isinstance(outcome.problem, NoAnswer)
        assert outcome.settled


async def test_notifications_are_told() -> None:
    told: list[Notification] = []
    async with scripted(on_notification=told.append) as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        call = await script.next()
        await script.say({"jsonrpc": "2.0", "method": "memory/event", "params": {"kind": "written"}})
        await script.answer(call)
        await outcome.over.wait()
        assert [(note.method, bytes(note.params)) for note in told] == [("memory/event", b'{"kind": "written"}')]


async def late(
    connection: Connection, script: Script, tasks: anyio.abc.TaskGroup, deadline: Deadline
) -> tuple[Outcome, Any]:
    outcome = begin(tasks, connection, timeout=deadline.SECONDS)
    call = await script.next()
    deadline.passes()
    await outcome.over.wait()
    assert isinstance(outcome.problem, NoAnswer)
    assert not outcome.settled
    assert outcome.unsettled == [outcome.problem.settled]
    return outcome, call


async def test_its_own_late_answer_settles_a_call(deadline: Deadline) -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome, call = await late(connection, script, tasks, deadline)
        await script.answer(call)
        await outcome.unsettled[0].wait()


async def test_the_answer_to_a_later_call_settles_a_call(deadline: Deadline) -> None:
    """The answer to a later call resolves a call in doubt; the answer to an earlier one does not."""
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        earlier = begin(tasks, connection)
        before = await script.next()
        outcome, _ = await late(connection, script, tasks, deadline)
        await script.answer(before)
        await earlier.over.wait()
        assert not outcome.settled
        later = begin(tasks, connection)
        await script.answer(await script.next())
        await later.over.wait()
        assert outcome.settled


async def test_the_end_of_the_connection_settles_a_call(deadline: Deadline) -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome, _ = await late(connection, script, tasks, deadline)
        lost = begin(tasks, connection)
        await script.next()
        await script.hang_up()
        await lost.over.wait()
        assert isinstance(lost.problem, ConnectionLost)
        assert not lost.settled
        assert not outcome.settled
        connection.end()
        assert lost.settled
        assert outcome.settled


async def test_a_cancelled_call_tells_when_it_will_be_settled() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        call = await script.next()
        outcome.scope.cancel()
        await outcome.over.wait()
        (settled,) = outcome.unsettled
        assert not settled.is_set()
        await script.answer(call)
        await settled.wait()


async def test_a_peer_that_does_not_read_holds_no_call_beyond_its_deadline(deadline: Deadline) -> None:
    async with scripted(buffer=0) as (connection, script), anyio.create_task_group() as tasks:
        begun = begin(tasks, connection, "begun", timeout=deadline.SECONDS)
        await anyio.wait_all_tasks_blocked()
        deadline.passes()
        await begun.over.wait()
        never = begin(tasks, connection, "never", timeout=deadline.SECONDS)
        await anyio.wait_all_tasks_blocked()
        deadline.passes()
        await never.over.wait()
        assert (begun.settled, never.settled) == (False, True)
        # a message that was begun is finished; one that was not is never sent
        good = begin(tasks, connection, "good")
        assert (await script.next())["method"] == "begun"
        call = await script.next()
        assert call["method"] == "good"
        await script.answer(call)
        await good.over.wait()
        assert begun.settled


async def test_calls_made_together_are_written_together() -> None:
    async with scripted() as (connection, script), anyio.create_task_group() as tasks:
        outcomes = [begin(tasks, connection) for _ in range(20)]
        together = await script._requests.receive()
        assert together.count(b"\n") == 20
        await script.say(*[{"jsonrpc": "2.0", "id": id, "result": id} for id in range(1, 21)])
        for outcome in outcomes:
            await outcome.over.wait()


async def test_a_message_that_is_too_long_ends_the_connection() -> None:
    async with scripted(max_message=100) as (connection, script), anyio.create_task_group() as tasks:
        outcome = begin(tasks, connection)
        await script.next()
        await script.say(b"x" * 101)
        await outcome.over.wait()
        assert isinstance(outcome.problem, ConnectionLost)
        assert str(outcome.problem) == "it sent a message of more than 100 bytes"
        with pytest.raises(ConnectionLost, match="more than 100 bytes") as lost:
            await connection.call("m", {}, timeout=None)
        assert lost.value.settled.is_set()


async def test_a_server_in_this_process_is_reached_as_any_other(
    monkeypatch: pytest.MonkeyPatch, deadline: Deadline
) -> None:
    monkeypatch.setattr("a2m_router.protocol.client.client._GRACE", 0.1)

    async def answer(message: bytes, caller: Caller) -> bytes | None:
        call = json.loads(message)
        if call["method"] == "hang":
            deadline.passes()
            await anyio.sleep_forever()
        return json.dumps(
            {"jsonrpc": "2.0", "id": call["id"], "result": [call["params"], caller.asserts_owner]}
        ).encode()

    with anyio.fail_after(20):
        async with connect_local(answer) as connection:
            assert msgspec.json.decode(await connection.call("m", {"a": 1}, timeout=20)) == [{"a": 1}, True]
            with pytest.raises(NoAnswer) as unanswered:
                await connection.call("hang", {}, timeout=deadline.SECONDS)
            assert not unanswered.value.settled.is_set()
        assert unanswered.value.settled.is_set()


async def test_what_is_raised_in_the_block_comes_out_as_it_is() -> None:
    async def answer(message: bytes, caller: Caller) -> bytes | None:
        return None

    with pytest.raises(ZeroDivisionError):
        async with connect_local(answer):
            raise ZeroDivisionError


# children

PEER = """
    import json, os, signal, subprocess, sys, time

    def say(text):
        sys.stdout.write(text + "\\n")
        sys.stdout.flush()

    for line in sys.stdin:
        call = json.loads(line)
        match call["method"]:
            case "echo":
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": call["params"]}))
            case "pid":
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": os.getpid()}))
            case "die":
                print("out of ink", file=sys.stderr, flush=True)
                os._exit(3)
            case "answer and die":
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": "bye"}))
                os._exit(0)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "never":
                pass
            case "torn":
                sys.stdout.write('{"jsonrpc": "2.0", "id"')
                sys.stdout.flush()
                os._exit(0)
            case "big":
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": "x" * call["params"]["size"]}))
            case "flood":
                for _ in range(20_000):
                    os.write(2, b"a line of no interest, one of many" * 5 + b"\\n")
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": None}))
            case "mumble":
                os.write(2, b"caf\\xe9\\r\\n" + b"y" * 20_000 + b"\\nlast")
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": None}))
            case "ignore":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": os.getpid()}))
                while True:
                    time.sleep(100)
            case "daemon":
                one = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": one.pid}))
            case "daemon and die":
                subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
                os._exit(4)
            case "close":
                os.close(0)
                say(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": None}))
                while True:
                    time.sleep(100)
    print("the end", file=sys.stderr)
"""


class Child:
    def __init__(self, script: Path) -> None:
        self.command = [sys.executable, str(script)]
        self.stderr: list[str] = []

    def connect(self, command: list[str] | None = None, **options: Any) -> AbstractAsyncContextManager[Connection]:
        return connect_process(command or self.command, name="child", on_stderr=self.stderr.append, **options)


@pytest.fixture
def peer(tmp_path: Path) -> Child:
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(PEER))
    return Child(script)


async def said(connection: Any, method: str, timeout: float | None = 30, **params: Any) -> Any:
    return msgspec.json.decode(await connection.call(method, params, timeout=timeout))


def runs(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


async def gone(pid: int) -> None:
    # it is not our child, so only its absence can be observed
    with anyio.fail_after(20):
        while runs(pid):
            await anyio.lowlevel.checkpoint()


async def test_a_child_answers_and_ends_with_its_input(peer: Child) -> None:
    async with peer.connect() as connection:
        assert await said(connection, "echo", a="ä") == {"a": "ä"}
        pid = await said(connection, "pid")
        assert os.getsid(pid) == pid != os.getsid(0)
    assert not psutil.pid_exists(pid)
    assert peer.stderr == ["the end"]
    with pytest.raises(ConnectionLost, match="closed"):
        await connection.call("echo", {}, timeout=1)


async def test_large_calls_and_answers_pass(peer: Child) -> None:
    async with peer.connect() as connection, anyio.create_task_group() as tasks:
        for _ in range(3):
            tasks.start_soon(lambda: said(connection, "echo", text="z" * 3_000_000))
        assert len(await said(connection, "big", size=5_000_000)) == 5_000_000


async def test_a_child_that_dies_says_how_and_why(peer: Child) -> None:
    async with peer.connect() as connection:
        with pytest.raises(ConnectionLost) as lost:
            await said(connection, "die")
        assert str(lost.value) == "it ended with status 3; its last line on stderr: out of ink"
    assert lost.value.settled.is_set()


async def test_a_child_that_is_killed_says_so(peer: Child) -> None:
    async with peer.connect() as connection:
        with pytest.raises(ConnectionLost, match=r"^it was killed by SIGKILL$"):
            await said(connection, "kill")


async def test_a_child_that_ends_at_once_is_lost(peer: Child) -> None:
    async with peer.connect([sys.executable, "-c", "import sys; sys.exit('wrong arguments')"]) as connection:
        with pytest.raises(ConnectionLost, match=r"^it ended with status 1; its last line on stderr: wrong arguments$"):
            await said(connection, "echo")


@pytest.mark.parametrize(("characters", "quoted"), [(300, "x" * 300), (301, "x" * 299 + "…")])
async def test_last_words_that_are_cut_show_it(peer: Child, characters: int, quoted: str) -> None:
    async with peer.connect([sys.executable, "-c", f"import sys; sys.exit('x' * {characters})"]) as connection:
        with pytest.raises(ConnectionLost, match=rf"^it ended with status 1; its last line on stderr: {quoted}$"):
            await said(connection, "echo")


async def test_an_answer_given_before_dying_counts(peer: Child) -> None:
    async with peer.connect() as connection:
        assert await said(connection, "answer and die") == "bye"
        await connection.lost.wait()
        assert connection.reason == "it ended with status 0"


async def test_a_torn_answer_is_no_answer(peer: Child, caplog: pytest.LogCaptureFixture) -> None:
    async with peer.connect() as connection:
        with pytest.raises(ConnectionLost):
            await said(connection, "torn")
    assert "peer=child unreadable line received" in caplog.text


async def test_a_late_call_is_settled_by_the_death_of_the_child(peer: Child, deadline: Deadline) -> None:
    async def give_up() -> None:
        await said(connection, "echo")  # by its answer the child has received the call sent before this one
        deadline.passes()

    async with peer.connect() as connection:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)  # runs as soon as this task waits
            with pytest.raises(NoAnswer) as unanswered:
                await said(connection, "never", timeout=deadline.SECONDS)
        assert not unanswered.value.settled.is_set()
        with pytest.raises(ConnectionLost):
            await said(connection, "die")
        await connection.lost.wait()
    assert unanswered.value.settled.is_set()


@pytest.mark.usefixtures("impatient")
async def test_a_child_that_stops_to_listen_is_lost(peer: Child, anyio_backend: Any) -> None:
    if anyio_backend == ("asyncio", {"use_uvloop": True}):
        pytest.skip("under uvloop a child holds its input twice and cannot close it")
    async with peer.connect() as connection:
        await said(connection, "close")
        with pytest.raises(ConnectionLost, match="stopped reading calls"):
            await said(connection, "echo")


async def test_a_flood_of_stderr_is_read(peer: Child) -> None:
    async with peer.connect() as connection:
        await said(connection, "flood")
    assert peer.stderr.count("a line of no interest, one of many" * 5) == 20_000


async def test_stderr_is_bounded_and_readable(peer: Child) -> None:
    async with peer.connect() as connection:
        await said(connection, "mumble")
    assert peer.stderr == ["caf\ufffd", "y" * 8192, "y" * 8192, "y" * (20_000 - 2 * 8192), "lastthe end"]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_module, "_CLOSED", 0.2)
    monkeypatch.setattr(child_module, "_TERMINATED", 0.2)


@pytest.mark.usefixtures("impatient")
async def test_a_child_that_ignores_everything_is_killed(peer: Child) -> None:
    async with peer.connect() as connection:
        pid = await said(connection, "ignore")
    assert not psutil.pid_exists(pid)


@pytest.mark.usefixtures("impatient")
async def test_a_child_that_is_busy_is_terminated(peer: Child) -> None:
    busy = "import time, os; print(os.getpid(), file=__import__('sys').stderr, flush=True); time.sleep(1000)"
    pids: list[int] = []
    came = anyio.Event()

    def note(line: str) -> None:
        pids.append(int(line))
        came.set()

    async with connect_process([sys.executable, "-c", busy], name="busy", on_stderr=note) as connection:
        await came.wait()
    assert connection.reason == "the connection was closed"
    assert not psutil.pid_exists(pids[0])


async def test_what_a_child_leaves_behind_ends_with_it(peer: Child) -> None:
    async with peer.connect() as connection:
        pid = await said(connection, "daemon")
    await gone(pid)


async def test_a_dead_child_is_lost_though_another_process_holds_its_output(peer: Child) -> None:
    async with peer.connect() as connection:
        with pytest.raises(ConnectionLost, match=r"^it ended with status 4$"):
            await said(connection, "daemon and die")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", range(8))
async def test_a_cancellation_at_any_moment_leaves_no_child(peer: Child, moment: int) -> None:
    pids: list[int] = []
    before = set(psutil.Process().children())

    async def use(scope: anyio.CancelScope) -> None:
        with scope:
            async with peer.connect() as connection:
                pids.append(await said(connection, "pid"))
                await said(connection, "never")

    async with anyio.create_task_group() as tasks:
        scope = anyio.CancelScope()
        tasks.start_soon(use, scope)
        if moment == 7:
            while not pids:
                await anyio.lowlevel.checkpoint()
        for _ in range(moment):
            await anyio.lowlevel.checkpoint()
        scope.cancel()
    assert set(psutil.Process().children()) <= before
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("command", "cwd", "sentence"),
    [
        (["/no/such/program"], None, "'/no/such/program' cannot be started: there is no such program"),
        (
            ["/dev/null"],
            None,
            "'/dev/null' cannot be started: it, or the interpreter in its first line, is not executable",
        ),
        ([sys.executable], Path("/no/such/folder"), "its folder '/no/such/folder' does not exist"),
        (["a\0b"], None, "cannot be started: "),
    ],
)
async def test_a_command_that_cannot_be_started_says_why(
    peer: Child, command: list[str], cwd: Path | None, sentence: str
) -> None:
    gc.collect()
    before = psutil.Process().num_fds()
    with pytest.raises(CannotStart) as failure:
        async with peer.connect(command, cwd=cwd):
            pass
    assert sentence in str(failure.value)
    assert psutil.Process().num_fds() <= before  # fewer if objects of an earlier test have been collected by now


async def test_a_program_whose_interpreter_is_missing_says_so(peer: Child, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    with pytest.raises(CannotStart) as failure:
        async with peer.connect([str(program)]):
            pass
    assert str(failure.value) == f"{str(program)!r} cannot be started: the interpreter in its first line does not exist"


async def test_what_is_raised_while_a_child_lives_comes_out_as_it_is(peer: Child) -> None:
    with pytest.raises(ZeroDivisionError):
        async with peer.connect():
            raise ZeroDivisionError


# HTTP, apart from the libraries' parts; tests/unit/tiers/test_http_links.py has the rest


class Answering:
    """The far end of an exchange: one answer to every request."""

    def __init__(self, body: Any, status: int = 200, coding: str = "") -> None:
        self.posted: list[Any] = []
        self._answer = Answer(status, body if isinstance(body, bytes | None) else json.dumps(body).encode(), coding)

    async def post(self, posting: Posting) -> Answer:
        posting.sent = True
        self.posted.append(json.loads(posting.message))
        return self._answer


async def test_a_call_over_http_is_one_message() -> None:
    exchange = Answering({"jsonrpc": "2.0", "id": 1, "result": {"b": 2}})
    assert await said(HttpClient(exchange), "m", a=1) == {"b": 2}
    assert exchange.posted == [{"jsonrpc": "2.0", "id": 1, "method": "m", "params": {"a": 1}}]


@pytest.mark.parametrize("status", [200, 400])
async def test_an_error_over_http_is_raised_as_it_was_sent(status: int) -> None:
    exchange = Answering({"jsonrpc": "2.0", "id": None, "error": {"code": -32007, "message": "no"}}, status)
    with pytest.raises(A2MError, match="no"):
        await HttpClient(exchange).call("m", {}, timeout=5)


@pytest.mark.parametrize(
    ("status", "sentence", "settled"),
    [
        (302, "HTTP 302 Found: redirects are not followed", True),
        (401, "HTTP 401 Unauthorized: go away", True),
        (503, "HTTP 503 Service Unavailable: go away", False),
        (799, "HTTP 799: go away", False),
    ],
)
async def test_another_status_is_a_failure(status: int, sentence: str, settled: bool) -> None:
    outcome = Outcome()
    await outcome.run(HttpClient(Answering(b"go\naway", status)), "m", 5)
    assert isinstance(outcome.problem, HttpFailure)
    assert sentence in str(outcome.problem)
    assert outcome.settled is settled
    assert len(outcome.unsettled) == (not settled)


@pytest.mark.parametrize(("body", "quoted"), [("x" * 300, "x" * 300), ("x y " * 2000, "x y " * 74 + "x y…")])
async def test_what_a_server_says_is_cut_visibly(body: str, quoted: str) -> None:
    with pytest.raises(HttpFailure, match=f"^HTTP 503 Service Unavailable: {quoted}$"):
        await HttpClient(Answering(body.encode(), 503)).call("m", {}, timeout=5)


@pytest.mark.parametrize("secret", ["Bearer s3cret", "s3cret"])
async def test_what_a_server_says_is_quoted_without_what_it_was_shown(secret: str) -> None:
    exchange = Answering(f"no such token: {secret}; s3cret is unknown".encode(), 401)
    with pytest.raises(HttpFailure, match=r"HTTP 401 Unauthorized: no such token: ….*; … is unknown$") as failure:
        await HttpClient(exchange, secrets=[secret]).call("m", {}, timeout=5)
    assert "s3cret" not in repr(failure.value)


@pytest.mark.parametrize("sent", [True, False])
@simulated
async def test_an_unanswered_call_over_http_settles_with_time(sent: bool) -> None:
    """An unanswered call over HTTP is resolved after some time; one that was never sent is resolved at once."""

    class Deaf:
        async def post(self, posting: Posting) -> Answer:
            posting.sent = sent
            await anyio.sleep_forever()
            raise AssertionError

    began = anyio.current_time()
    outcome = Outcome()
    await outcome.run(HttpClient(Deaf(), settling=30), "m", 5)
    assert isinstance(outcome.problem, NoAnswer)
    assert str(outcome.problem) == f"no {'answer' if sent else 'connection'} within 5 s"
    assert outcome.settled is not sent
    for settled in outcome.unsettled:
        await settled.wait()
    assert outcome.settled
    assert anyio.current_time() - began == pytest.approx(35 if sent else 5)


PACKED = gzip.compress(b"x" * 100, mtime=0)


@pytest.mark.parametrize(
    ("body", "coding", "sentence"),
    [
        (None, "", "more than 99 bytes"),
        (PACKED, "gzip", "more than 99 bytes"),
        (gzip.compress(b"x" * 99, mtime=0), "gzip", "cannot be read: JSON is malformed"),
        (zlib.compress(b"x" * 99), "Deflate", "cannot be read: JSON is malformed"),
        (PACKED[:12], "gzip", "its gzip data is incomplete"),
        (b"xx", "gzip", "its Content-Encoding is gzip, but its data is not"),
        (b"xx", "br", "it has the coding 'br', which was not requested"),
        (PACKED, "gzip, br", "it has the coding 'br', which was not requested"),
        (b"xx", "identity", "cannot be read"),
    ],
    ids=["too long", "too long unpacked", "gzip", "deflate", "cut off", "no gzip", "unknown", "unknown too", "plain"],
)
async def test_an_answer_that_cannot_be_taken_says_why(body: bytes | None, coding: str, sentence: str) -> None:
    with pytest.raises(NoAnswer, match=sentence):
        await HttpClient(Answering(body, 200, coding), max_message=99).call("m", {}, timeout=5)


ANSWER = json.dumps({"jsonrpc": "2.0", "id": 1, "result": "short"}).encode()


@pytest.mark.parametrize(
    ("body", "coding"),
    [
        (gzip.compress(ANSWER), "gzip"),
        (gzip.compress(ANSWER[:9]) + gzip.compress(ANSWER[9:]), "x-gzip"),
        (zlib.compress(ANSWER), "deflate"),
        (zlib.compress(ANSWER)[2:-4], "deflate"),
        (gzip.compress(gzip.compress(ANSWER)), "gzip,GZIP"),
        (gzip.compress(ANSWER), "gzip, identity"),
    ],
    ids=["gzip", "members", "deflate", "raw deflate", "twice", "once"],
)
async def test_an_answer_is_read_out_of_its_coding(body: bytes, coding: str) -> None:
    assert await said(HttpClient(Answering(body, 200, coding), max_message=len(body) + 99), "m") == "short"


@pytest.mark.parametrize(("body", "coding"), [(b"xx", "br"), (b"xx", "gzip"), (b"", "gzip"), (PACKED[:-9], "gzip")])
async def test_a_status_is_told_though_what_comes_with_it_cannot_be_read(body: bytes, coding: str) -> None:
    with pytest.raises(HttpFailure, match=r"^HTTP 502 Bad Gateway$"):
        await HttpClient(Answering(body, 502, coding)).call("m", {}, timeout=5)


@pytest.mark.parametrize("coding", ["gzip", "gzip, gzip"])
def test_an_answer_that_unfolds_beyond_its_limit_is_not_held(coding: str) -> None:
    packed = gzip.compress(bytes(20_000_000))
    if coding != "gzip":
        packed = gzip.compress(packed)
    tracemalloc.start()
    try:
        with pytest.raises(AnswerTooLong):
            anyio.run(partial(HttpClient(Answering(packed, 200, coding), max_message=100_000).call, "m", {}, timeout=5))
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "url", ["http://alice@tier.example/", "https://alice:s3cret@tier.example/", "http://:s3cret@x/"]
)
async def test_an_address_with_a_password_is_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ValueError, match="must not hold a user or a password") as refusal:
        async with connect_http(url):
            pass
    assert "s3cret" not in str(refusal.value)


async def test_a_server_that_is_not_there_is_lost_and_nothing_can_have_landed() -> None:
    with reserved_port() as port:
        async with connect_http(f"http://127.0.0.1:{port}/") as client:
            with pytest.raises(ConnectionLost, match=r"^cannot be reached: ") as lost:
                await client.call("m", {}, timeout=20)
    assert lost.value.settled.is_set()
