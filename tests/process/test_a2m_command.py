"""a2m as a process: its output, its exit codes, and exports and imports that lose and change nothing."""

import contextlib
import json
import os
import pty
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio
import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from a2m_router.command import cli, exporting, importing, showing
from a2m_router.command.arguments import parser
from a2m_router.command.exporting import Export, Incomplete, written_whole
from a2m_router.command.importing import Import, NotAnExport, Numbered
from a2m_router.command.peer import PatientPeer
from a2m_router.command.streams import Streams, streams
from a2m_router.protocol.client.client import connect_local
from a2m_router.protocol.client.results import Description, Record
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.timestamps import UNDATED
from a2m_router.storage.database import STDIO, Database, InUse, announced
from tests.conformance.small_server import Server, listening
from tests.support.addresses import reserved_port
from tests.support.examples import scaled
from tests.support.federated import Trial, settings_of, trial
from tests.support.paths import ROOT

COMMAND: Final = [sys.executable, "-m", "a2m_router.command.cli"]
# far more than anything here takes; a hang becomes a failure
PATIENCE: Final = 60
ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if not name.startswith("A2M_")}
ENVIRONMENT["PYTHONPATH"] = str(ROOT)

# two tiers that keep what they get
TWO_TIERS: Final = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""


class Called(NamedTuple):
    """The result of a command that ran in this process, which is faster than a process for each."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Called]:
    """Return a function that runs a command in this process."""
    for name in [name for name in os.environ if name.startswith("A2M_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(ROOT / "tests")
    monkeypatch.setattr(cli, "log_to_stderr", lambda level, form: None)

    def called(*arguments: str) -> Called:
        code: Any = None
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        came = Called(code, *capfd.readouterr())
        assert "Traceback" not in came.stderr
        return came

    return called


def run(
    *arguments: str, text: str = "", env: Mapping[str, str] | None = None, cwd: Path = ROOT / "tests"
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end; assert that it shows no traceback."""
    ended = subprocess.run(
        [*COMMAND, *arguments],
        input=text,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**ENVIRONMENT, **(env or {})},
        cwd=cwd,
        check=False,
    )
    assert "Traceback" not in ended.stderr
    return ended


@contextmanager
def started(*arguments: str, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options},
        env=ENVIRONMENT,
        cwd=ROOT / "tests",
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Wait until a process has ended by itself; return its exit code and its output on stderr."""
    _, said = process.communicate(timeout=PATIENCE)
    assert b"Traceback" not in said
    return process.returncode, said.decode()


@contextmanager
def small(**options: Any) -> Iterator[tuple[Server, str]]:
    """Run a small server over HTTP; yield it, and its address."""
    server = Server(http=True, **options)
    http = listening(server)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server, f"http://127.0.0.1:{http.server_address[1]}/"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def stdio(methods: str) -> str:
    """Return the command line of a small server on stdio, with these methods in place of its own."""
    program = f"from tests.conformance.small_server import Server\nclass Own(Server):\n{methods}\nOwn().serve_stdio()"
    return shlex.join([sys.executable, "-c", program])


def store(path: Path) -> str:
    return f"{sys.executable} -m a2m_store.cli {path}"


# --- commands, one by one


def test_it_explains_itself(call: Callable[..., Called]) -> None:
    explained = run("--help")
    assert explained.returncode == 0
    for word in ("--http", "--stdio", "--config", "A2M_URL", "A2M_TOKEN", "exit codes", "130", "export", "summarize"):
        assert word in explained.stdout
    assert call("--version").stdout.startswith("a2m 0.")
    assert call("recall", "--help").returncode == 0


def test_no_token_can_be_given_where_everybody_can_read_it(call: Callable[..., Called]) -> None:
    assert call("describe", "--token", "secret").returncode == 2
    options = [option for action in parser()._actions for option in action.option_strings]
    assert [option for option in options if "token" in option] == ["--token-env"]


def test_results_come_as_the_server_gave_them(call: Callable[..., Called]) -> None:
    with small() as (_, url):

        def ask(*arguments: str, code: int = 0) -> Any:
            done = call(*arguments, "--http", url)
            assert (done.returncode, done.stderr if code == 0 else "") == (code, ""), done.stderr
            [line] = done.stdout.splitlines()
            return json.loads(line)

        assert ask("describe")["name"] == "small"
        metadata = '{"n": [1, 2.5], "long": 123456789012345678901234567890}'
        written = ask(
            "remember", "Rome", "--key", "user/city", "--metadata", metadata, "--tier", "semantic", "--id", "r"
        )
        assert written == {"ids": ["r"]}
        place = ["--session", "s", "--role", "user", "--group", "g"]
        assert run("remember", "-", *place, "--http", url, text="from a pipe\n").returncode == 0
        [best] = ask("recall", "Rome", "--limit", "1", "--where", '{"tier": ["semantic"]}')["records"]
        assert (best["content"], best["metadata"]) == ("Rome", json.loads(metadata))
        assert ask("recall", "Rome", "--prompt")["prompt"] == "- Rome"
        [turn] = ask("timeline", "--session", "s")["records"]
        assert (turn["content"], turn["role"], turn["group"]) == ("from a pipe", "user", "g")
        assert ask("fetch", "user/city")["record"]["id"] == "r"
        assert ask("fetch", "user/town", code=3) == {"record": None}
        assert ask("recall", "Carthage", code=3) == {"records": []}
        assert ask("timeline", "--tier", "procedural", code=3) == {"records": []}
        assert ask("sessions") == {"sessions": [{"session": "s", "records": 1}]}
        assert ask("close", "s")["flushed"] == 1
        assert ask("consolidate")["counts"]["semantic"] == 1
        assert ask("summarize", "--tier", "semantic", "--into", "semantic", "--key", "sum")["written"] == 1
        assert ask("reinforce", "r", "nobody", "--amount", "0.5") == {"reinforced": 1}
        assert ask("reinforce", "nobody") == {"reinforced": 0}
        assert ask("promote", "r", "nobody", "--tier", "procedural", "--salience", "2") == {"promoted": 1}
        [record] = ask("timeline", "--tier", "procedural")["records"]
        assert (record["id"], record["salience"]) == ("r", 3.5)
        assert ask("forget", "r", "nobody") == {"forgotten": 1}
        assert ask("forget", "--where", '{"session": "s"}', "--yes") == {"forgotten": 1}


def test_a_server_is_asked_once_for_its_description(
    call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    describe = Server.describe

    def counted(server: Server, params: Any) -> Any:
        asked.append(params)
        return describe(server, params)

    monkeypatch.setattr(Server, "describe", counted)
    with small() as (_, url):
        assert call("recall", "Rome", "--http", url).returncode == 3
    assert len(asked) == 1


def test_fetch_rejects_the_id_of_a_mounted_record_with_the_reason(
    call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = Server.describe

    def describe_with_mount(server: Server, params: Any) -> Any:
        described = describe(server, params)
        described["tiers"].append({"name": "pages", "count": 0, "mount": True})
        return described

    monkeypatch.setattr(Server, "describe", describe_with_mount)
    with small() as (_, url):
        for key, has_hint in (("pages/doors", True), ("semantic/doors", False), ("pages", False)):
            done = call("fetch", key, "--json", "--http", url)
            assert (done.returncode, json.loads(done.stdout)) == (3, {"record": None})
            assert f"there is no record at the key {key!r}" in done.stderr
            assert ("the id of a record of the mount 'pages'" in done.stderr) == has_hint


def test_options_stand_before_or_after_the_command_or_in_the_environment(
    call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    with small() as (_, url):
        for arguments in (
            ["--http", url, "describe"],
            ["describe", "--http", url],
            ["--json", "describe", "--http", url],
        ):
            assert json.loads(call(*arguments).stdout)["name"] == "small"
        monkeypatch.setenv("A2M_URL", url)
        assert json.loads(call("describe").stdout)["name"] == "small"


def test_a_token_comes_from_the_environment(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    with small(tokens={"open sesame": "alice"}) as (server, url):
        assert run("remember", "x", "--http", url, env={"A2M_TOKEN": "open sesame"}).returncode == 0
        monkeypatch.setenv("MINE", "open sesame")
        assert call("remember", "y", "--http", url, "--token-env", "MINE").returncode == 0
        assert [record["owner"] for record in server.records] == ["alice", "alice"]
        for variables in ({}, {"A2M_TOKEN": "guessed"}):
            for name, value in variables.items():
                monkeypatch.setenv(name, value)
            refused = call("remember", "z", "--http", url)
            assert refused.returncode == 1
            assert "401" in refused.stderr
            assert "A2M_TOKEN" in refused.stderr
            assert "guessed" not in refused.stderr


def test_an_address_where_nobody_listens_is_said(call: Callable[..., Called]) -> None:
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}/"
        refused = call("describe", "--http", url)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"{url}: cannot be reached" in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("a2m")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["describe", "--stdio", "/no/such/program"], 1, "there is no such program"),
        (["describe", "--stdio", "false"], 1, "status 1"),
        (["describe", "--stdio", "echo nonsense"], 1, "echo nonsense: it ended"),
        (["describe", "--config", "no.toml"], 1, "there is no such file"),
        (["describe"], 2, "no memory selected"),
        (["describe", "--http", "http://x/", "--stdio", "y"], 2, "expected one of"),
        (["describe", "--http", "localhost:8778"], 2, "expected a URL"),
        (["describe", "--stdio", "a 'b"], 2, "--stdio"),
        (["describe", "--stdio", ""], 2, "--stdio"),
        (["describe", "--http", "http://x/", "--token-env", "NOT_SET"], 2, "NOT_SET"),
        (["recall", "x", "--http", "http://x/", "--where", "{"], 2, "--where"),
        (["recall", "x", "--http", "http://x/", "--where", "[]"], 2, "JSON object"),
        (["recall", "x", "--http", "http://x/", "--where", '{"a": NaN}'], 2, "NaN"),
        (["recall", "x", "--http", "http://x/", "--where", "[" * 100_000], 2, "JSON"),
        (["recall", "x", "--http", "http://x/", "--limit", "-1"], 2, "--limit"),
        (["promote", "a", "--http", "http://x/"], 2, "--tier"),
        (["promote", "--tier", "semantic", "--http", "http://x/"], 2, "ID"),
        (
            ["promote", "a", "--tier", "t", "--salience", "more", "--http", "http://x/"],
            2,
            "--salience: expected a number",
        ),
        (["reinforce", "--http", "http://x/"], 2, "ID"),
        (["reinforce", "a", "--amount", "nan", "--http", "http://x/"], 2, "--amount: expected a number, got 'nan'"),
        (["describe", "--http", "http://x/", "--timeout", "nan"], 2, "--timeout"),
        ([], 2, "COMMAND"),
        (["remember", os.fsdecode(b"\xff"), "--http", "http://x/"], 2, "not valid UTF-8"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    arguments: list[str], code: int, said: str, call: Callable[..., Called]
) -> None:
    refused = call(*arguments)
    assert (refused.returncode, refused.stdout) == (code, "")
    assert said in refused.stderr
    assert refused.stderr.splitlines()[-1].startswith("a2m")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["recall", "x", "--tier", "nowhere"], 1, "a2m: UNKNOWN_TIER: no tier nowhere\n"),
        (["recall", "x", "--limit", "100000"], 1, "a2m: INVALID_PARAMS: limit is too high\n"),
        (["promote", "r1", "--tier", "nowhere"], 1, "a2m: UNKNOWN_TIER: no tier nowhere\n"),
        (["forget"], 2, "a2m: forget: expected ids"),
        (["summarize"], 2, "a2m: summarize: expected ids"),
        (["forget", "--tier", "semantic"], 2, "add --yes"),
        (["remember", "x", "--metadata", '{"n": 1e999}'], 2, "JSON"),
        (
            ["remember", "x", "--if-revision", "3"],
            2,
            "a2m: remember: --if-revision needs --key, the key whose revision is checked",
        ),
        *(
            (
                ["remember", "x", "--key", "k", "--if-revision", wrong],
                2,
                f"expected a whole number, 0 or more, or new, got {wrong!r}",
            )
            for wrong in ("-1", "1.0", "null", "")
        ),
        (
            ["remember", "x", "--key", "k", "--if-revision", "3"],
            1,
            "CAPABILITY_NOT_SUPPORTED: this server's memory/describe does not declare",
        ),
        (["import", "/no/such/file"], 1, "No such file"),
        (["import", "/"], 1, "Is a directory"),
        (["export", "/no/such/folder/file"], 1, "No such file"),
    ],
)
def test_what_a_server_refuses_or_cannot_be_done_is_said_in_a_sentence(
    arguments: list[str], code: int, said: str, call: Callable[..., Called]
) -> None:
    with small() as (server, url):
        server.remember({"records": [{"content": "kept", "tier": "semantic"}]})
        refused = call(*arguments, "--http", url)
        assert (refused.returncode, refused.stdout) == (code, "")
        assert said in refused.stderr
        assert [record["content"] for record in server.records] == ["kept"]


def test_stdin_that_is_no_text_is_refused() -> None:
    with small() as (server, url), started("remember", "-", "--http", url, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"caf\xe9")
        process.stdin.close()
        process.stdin = None
        assert ended(process) == (2, "a2m: stdin: not valid UTF-8 at byte 3\n")
        assert server.records == []


def test_what_an_error_says_cannot_reach_the_terminal_as_a_command(call: Callable[..., Called]) -> None:
    with small() as (_, url):
        refused = call("recall", "x", "--tier", "\x1b]0;owned\x07", "--http", url)
    assert "\x1b" not in refused.stderr
    assert "\\x1b]0;owned\\x07" in refused.stderr


@contextmanager
def silent() -> Iterator[str]:
    """Yield the address of a server that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"


def wait_until(process: subprocess.Popen[bytes], condition: Callable[[psutil.Process], bool]) -> None:
    """Wait until a condition holds of a process; fail if the process ends before."""
    while not condition(psutil.Process(process.pid)):
        with contextlib.suppress(subprocess.TimeoutExpired):
            raise AssertionError(f"it has ended with {process.wait(0.01)}")


def has_called(process: psutil.Process) -> bool:
    return any(connection.status == psutil.CONN_ESTABLISHED for connection in process.net_connections())


def handles_signals(process: psutil.Process) -> bool:
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    mask = int(next(line.split()[1] for line in lines if line.startswith("SigCgt:")), 16)
    return bool(mask >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_can_be_interrupted_while_it_waits(number: signal.Signals) -> None:
    with silent() as url, started("recall", "x", "--http", url) as process:
        wait_until(process, has_called)
        process.send_signal(number)
        assert ended(process) == (130, "")


def test_it_can_be_interrupted_while_it_reads() -> None:
    with small() as (_, url), started("import", "--http", url, stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b'{"content": "x"}\n')
        process.stdin.flush()
        wait_until(process, handles_signals)
        process.send_signal(signal.SIGINT)
        code, _ = ended(process)
        assert code == 130


# --- terminals and pipes


@contextmanager
def on_a_terminal(*arguments: str, typed: bytes = b"") -> Iterator[tuple[int, bytes]]:
    """Run the command on a terminal; yield its exit code and what it showed."""
    leader, follower = pty.openpty()
    try:
        with started(*arguments, stdin=follower, stdout=follower, stderr=follower) as process:
            os.close(follower)
            os.write(leader, typed)
            shown = b""
            with contextlib.suppress(OSError):  # the last process with the other end open has closed it
                while chunk := os.read(leader, 65_536):
                    shown += chunk
            process.wait(PATIENCE)
            yield process.returncode, shown
    finally:
        os.close(leader)


@contextmanager
def as_if_shown() -> Iterator[Streams]:
    """Yield the streams of this process, as if stdout were a terminal."""
    with streams() as ours:
        ours.shows = True
        yield ours


def test_a_terminal_shows_tables_and_obeys_nobody(call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with small() as (server, url):
        server.remember({"records": [{"content": "[bold]Rome\x1b[2J\u202e", "key": "city", "session": "s"}]})
        with on_a_terminal("timeline", "--http", url) as (code, shown):
            assert code == 0
            assert b"[bold]Rome\\x1b[2J" in shown
            assert b"\x1b[2J" not in shown
            assert "\u202e".encode() not in shown
            assert b"content" in shown
        with on_a_terminal("timeline", "--http", url, "--json") as (_, shown):
            assert json.loads(shown)["records"][0]["key"] == "city"
        monkeypatch.setattr(cli, "streams", as_if_shown)
        for arguments, word in (
            (["describe"], "procedural"),
            (["fetch", "city"], "revision"),
            (["sessions"], "records"),
            (["consolidate"], "moved"),
            (["recall", "Rome", "--prompt"], "- [bold]Rome"),
            (["summarize", "--tier", "working"], "1 read, 1 written"),
            (["remember", "x"], "r3"),
            (["promote", "r3", "--tier", "semantic"], "1 promoted\n"),
            (["reinforce", "r3", "r3x"], "1 reinforced\n"),
        ):
            came = call(*arguments, "--http", url)
            assert (came.returncode, word in came.stdout) == (0, True), came


# the router itself, other HTTP libraries, and those that draw
HEAVY: Final = {"aiohttp", "httpcore", "httpx", "h2", "trio", "uvloop", "uvicorn", "starlette", "psutil"}
LOADED: Final = """
import json, sys
from a2m_router.command import cli
code = cli.main(sys.argv[1:])
print(json.dumps([code, sorted(sys.modules)]), file=sys.stderr)
"""


@pytest.mark.parametrize("over", ["http", "config"])
def test_a_call_of_a_router_that_runs_loads_no_more_than_it_needs(over: str, tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(FEDERATION)
    with serving(config):
        url = announced(tmp_path / "router.db")
        assert url is not None
        way = ["--http", url] if over == "http" else ["--config", str(config)]
        called = subprocess.run(
            [sys.executable, "-c", LOADED, "describe", *way],
            capture_output=True,
            check=True,
            timeout=PATIENCE,
            env=ENVIRONMENT,
        )
    assert json.loads(called.stdout)["protocol"] == "a2m/0.1"
    code, modules = json.loads(called.stderr)
    assert code == 0
    assert {module.partition(".")[0] for module in modules} & (HEAVY | {"rich"}) == set()
    assert {module for module in modules if module.startswith("a2m_router.")} & {
        "a2m_router.daemon.app",
        "a2m_router.daemon.opening",
    } == set()


def test_a_terminal_needs_only_what_draws_besides() -> None:
    with small() as (_, url):
        draws = f"from a2m_router.command import cli\ncli.main(['describe', '--http', {url!r}])\n"
        said = "import sys\nprint(' '.join({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
        leader, follower = pty.openpty()
        with subprocess.Popen(
            [sys.executable, "-c", draws + said], stdout=follower, stderr=subprocess.PIPE, env=ENVIRONMENT
        ) as process:
            os.close(follower)
            assert process.stderr is not None
            with contextlib.suppress(OSError):
                while os.read(leader, 65_536):
                    pass
            loaded = set(process.stderr.read().decode().split())
        os.close(leader)
    assert "rich" in loaded
    assert loaded & HEAVY == set()


@pytest.mark.parametrize(("typed", "code", "left"), [(b"y\n", 0, []), (b"\n", 1, ["kept"])])
def test_forgetting_by_more_than_ids_is_asked_on_a_terminal(typed: bytes, code: int, left: list[str]) -> None:
    with small() as (server, url):
        server.remember({"records": [{"content": "kept", "tier": "semantic"}]})
        with on_a_terminal("forget", "--tier", "semantic", "--http", url, typed=typed) as (came, shown):
            assert came == code
            assert b"every record with tier 'semantic'" in shown
        assert [record["content"] for record in server.records] == left


def test_nobody_has_to_read_to_the_end() -> None:
    with small() as (server, url):
        server.remember({"records": [{"content": "x" * 9000, "tier": "semantic"} for _ in range(50)]})
        for command, code, said in (("timeline", 0, ""), ("export", 1, "a2m: stdout was closed")):
            reading, writing = os.pipe()
            with started(command, "--http", url, stdout=writing) as process:
                os.close(writing)
                os.close(reading)
                came, told = ended(process)
                assert (came, told.startswith(said)) == (code, True)


def test_a_disk_that_is_full_is_said() -> None:
    with (
        small() as (_, url),
        Path("/dev/full").open("wb") as full,
        started("describe", "--http", url, stdout=full) as process,
    ):
        assert ended(process) == (1, "a2m: stdout: No space left on device\n")


# --- watching


@contextmanager
def watching(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    with started("watch", "--interval", "0.01", *arguments) as process:
        yield process


def first_event(process: subprocess.Popen[bytes], server: Server) -> Any:
    """Return the first event that a watch prints of a server that goes on writing records."""
    assert process.stdout is not None
    while not select.select([process.stdout], [], [], 0.05)[0]:
        with server.lock:
            server.remember({"records": [{"content": "x", "tier": "semantic"}]})
    return json.loads(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_watch_tells_events_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with small() as (server, url), watching("--http", url, "--kinds", "written") as process:
        event = first_event(process, server)
        assert (event["kind"], event["tier"]) == ("written", "semantic")
        process.send_signal(number)
        assert ended(process) == (0, "")


def test_a_watch_ends_when_nobody_reads_it_any_more() -> None:
    with small() as (server, url), watching("--http", url) as process:
        first_event(process, server)
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        assert ended(process) == (0, "")


def test_a_watch_ends_with_an_error_when_the_server_does() -> None:
    with contextlib.ExitStack() as stack:
        with small() as (server, url):
            process = stack.enter_context(watching("--http", url))
            first_event(process, server)
        code, said = ended(process)
        assert code == 1
        assert said.startswith(f"a2m: {url}: ")


# a server that writes records by itself once a client has subscribed, and then stays or dies
PUSHES: Final = """
    def events_subscribe(self, params):
        result = super().events_subscribe(params)
        self.remember({"records": [{"content": "x"}, {"content": "y"}]})
        return result
    def lines_for(self, line):
        yield from super().lines_for(line)
        if b"subscribe" in line and DIES:
            raise SystemExit(3)
"""


@pytest.mark.parametrize("dies", [False, True])
def test_a_watch_is_told_where_the_server_offers_that(dies: bool) -> None:
    with watching("--stdio", stdio(PUSHES.replace("DIES", str(dies)))) as process:
        assert process.stdout is not None
        assert [json.loads(process.stdout.readline())["id"] for _ in range(2)] == ["r1", "r2"]
        if not dies:
            process.send_signal(signal.SIGINT)
        code, said = ended(process)
        assert (code, "status 3" in said) == ((1, True) if dies else (0, False)), said


# --- export and import


async def exported(fed: Trial, owner: str | None = None) -> list[bytes]:
    """Return the lines of an export: the records, without the header."""
    lines: list[bytes] = []

    async def take(records: list[Raw]) -> None:
        lines.extend(map(bytes, records))

    export = Export(PatientPeer(fed.client, 60), owner)
    await export.open()
    await export.copy(take)
    return lines


async def imported(
    fed: Trial, lines: Iterable[str | bytes], *, drop: Iterable[str] = (), owner: str | None = None, token: bool = False
) -> tuple[Import, list[tuple[int, str]]]:
    """Run an import; return it, and the skipped lines with the reasons."""
    skipped: list[tuple[int, str]] = []
    into = Import(
        PatientPeer(fed.client, 60),
        owner=owner,
        drop=list(drop),
        told_by_token=token,
        on_skipped=lambda line, reason: skipped.append((line.number, reason)),
    )
    await into.open()
    file = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
    for number, text in Numbered().feed(file):
        await into.take(number, text)
    await into.finish()
    return into, skipped


def counts(into: Import) -> tuple[int, int, int]:
    return into.counts.written, into.counts.already_there, into.counts.skipped.total()


def two_tiers() -> Any:
    return trial(settings_of(TWO_TIERS))


ANY_TEXT: Final = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES: Final = st.sampled_from(["a", "b", "ü/x"])
# JSON as other programs may write it: with spaces, doubled names, and numbers that no float holds
RAW_JSON: Final = st.recursive(
    st.sampled_from(
        ["null", "true", "1.0", "1e400", "-0", "123456789012345678901234567890", '"\\u00e9"', '"\\ud83d\\ude00"']
    )
    | ANY_TEXT.map(lambda text: json.dumps(text, ensure_ascii=False)),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[ " + " , ".join(items) + "]")
        | st.lists(st.tuples(ANY_TEXT, inner), max_size=3).map(
            lambda items: "{" + ",".join(f"{json.dumps(name)} : {value}" for name, value in items) + " }"
        )
    ),
    max_leaves=6,
)
METADATA: Final = st.lists(st.tuples(ANY_TEXT, RAW_JSON), max_size=3).map(
    lambda items: "{" + " , ".join(f"{json.dumps(name)}:{value}" for name, value in items) + "}"
)
FIELDS: Final = st.fixed_dictionaries(
    {"content": ANY_TEXT},
    optional={
        "created_at": st.sampled_from(["2020-02-29T23:59:59.999Z", "2026-07-28T10:15:30.123Z"]),
        "role": NAMES,
        "group": NAMES,
        "tier": st.sampled_from(["working", "semantic"]),
        "salience": st.floats(0, 1e300),
        "owner": NAMES,
        "session": NAMES,
        "revision": st.integers(0, 2**53 - 1),
        "embedding": st.lists(st.floats(-1e30, 1e30), min_size=2, max_size=2),
        "uri": ANY_TEXT,
        "media_type": NAMES,
    },
)


@given(st.lists(st.tuples(FIELDS, METADATA, st.booleans()), max_size=8))
@settings(max_examples=scaled(15))
def test_an_export_imported_elsewhere_is_exported_again_to_the_byte(records: list[tuple[Any, str, bool]]) -> None:
    async def there_and_back() -> None:
        drafts = []
        for number, (fields, metadata, keyed) in enumerate(records):
            if keyed:
                fields = {**fields, "key": f"k/{number}"}
            drafts.append(json.dumps(fields, ensure_ascii=False)[:-1] + f',"metadata":{metadata}}}')
        async with two_tiers() as fed:
            await fed.raw("remember", b'{"records":[%s]}' % ",".join(drafts).encode())
            before = await exported(fed)
        assert len(before) == len(records)
        async with two_tiers() as other:
            into, skipped = await imported(other, before)
            assert (counts(into), skipped) == ((len(records), 0, 0), [])
            assert await exported(other) == before
            again, _ = await imported(other, before)
            assert counts(again) == (0, len(records), 0)
            assert await exported(other) == before

    anyio.run(there_and_back)


@pytest.mark.anyio
async def test_an_interrupted_import_is_repeated() -> None:
    lines = [json.dumps({"content": f"note {number}"}) for number in range(450)]  # they have no ids
    async with two_tiers() as fed:
        with pytest.raises(NotAnExport, match="line 251 is not a record"):
            await imported(fed, [*lines[:250], "half of a li"])
        assert len(await exported(fed)) == 200
        into, _ = await imported(fed, lines)
        assert counts(into) == (250, 200, 0)
        assert [json.loads(line)["content"] for line in await exported(fed)] == [
            f"note {number}" for number in range(450)
        ]


@pytest.mark.anyio
async def test_two_equal_lines_without_an_id_are_two_records() -> None:
    lines = ['{"content": "x"}', '{"content": "x"}']
    async with two_tiers() as fed:
        for expected in ((2, 0, 0), (0, 2, 0)):
            into, _ = await imported(fed, lines)
            assert counts(into) == expected


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "JSON"),
        (b'{"content": "x"} {"content": "y"}', "JSON"),
        (b'{"content": "x"},"params":{"content": "y"}', "JSON"),
        (b'"x"', "expected an object"),
        (b'["x"]', "expected an object"),
        (b'{"role": "user"}', "expected content, a uri or an embedding"),
        (b'{"content": 5}', "content: expected a string"),
        (b'{"content": "x", "created_at": "yesterday"}', "created_at"),
        (b'{"content": "x", "metadata": [1]}', "metadata: expected an object"),
        (b'{"content": "x", "metadata": {"a": "\\ud800"}}', "surrogate"),
        (b'{"content": "caf\xe9"}', "not valid UTF-8 at byte 16"),
        (b'{"content": "x", "metadata": {"a": "caf\xe9"}}', "UTF-8"),
        (b'{"content": "x", "metadata": {"a": ' + b"[" * 200 + b"]" * 200 + b"}}", "deep"),
        (b'{"content": "x", "salience": -1}', "salience"),
    ],
)
async def test_a_bad_line_stops_an_import_before_its_batch_is_written(line: bytes, said: str) -> None:
    async with two_tiers() as fed:
        with pytest.raises(NotAnExport, match=f"line 4 is not a record: .*{said}"):
            await imported(fed, ['{"format":"a2m-export","version":1}', '{"content":"good"}', "", line])
        assert await exported(fed) == []


@pytest.mark.anyio
async def test_an_export_of_a_later_version_is_not_read() -> None:
    async with two_tiers() as fed:
        with pytest.raises(NotAnExport, match="version 2"):
            await imported(fed, ['{"format":"a2m-export","version":2}', '{"content":"good"}'])


@pytest.mark.anyio
async def test_no_record_that_is_there_is_changed() -> None:
    async with two_tiers() as fed:
        await fed.remember("Rome", id="r", key="city", owner="al")
        await fed.remember("Bern", id="s", key="city")
        before = await exported(fed)
        into, skipped = await imported(
            fed,
            [
                '{"id":"r","content":"Milan","key":"city","owner":"al"}',  # written, it would replace the record
                '{"id":"x","content":"Milan","key":"city","owner":"al"}',
                '{"id":"y","content":"Milan","key":"city"}',
                '{"id":"z","content":"Oslo","key":"city","owner":"bo"}',
                '{"id":"w","content":"Paris","key":"city","owner":"bo"}',
                '{"id":"z","content":"Oslo again","key":"city","owner":"bo"}',
            ],
        )
        assert counts(into) == (1, 2, 3)
        assert [number for number, _ in skipped] == [2, 3, 5]
        assert skipped[0][1] == "another record has its key: 'city' belongs to 'r'"
        after = await exported(fed)
        assert after[:2] == before
        assert [json.loads(line)["content"] for line in after[2:]] == ["Oslo"]


@pytest.mark.anyio
async def test_whose_a_key_will_be_is_taken_into_account() -> None:
    async with two_tiers() as fed:
        await fed.remember("Rome", id="r", key="city", owner="al")
        line = '{"id":"x","content":"Milan","key":"city"}'
        for options in ({"owner": "al"}, {"token": True}):
            into, _ = await imported(fed, [line], **options)
            assert counts(into) == (0, 0, 1)
        into, _ = await imported(fed, [line])
        assert counts(into) == (1, 0, 0)
        assert (await fed.call("fetch", key="city", owner="al"))["record"]["content"] == "Rome"


@pytest.mark.anyio
async def test_records_that_are_refused_do_not_keep_the_others_out() -> None:
    async with two_tiers() as fed:
        await fed.remember("x", embedding=[1.0, 2.0])
        lines = [json.dumps({"id": str(number), "content": "x"}) for number in range(20)]
        lines[7] = '{"id":"7","content":"x","embedding":[1.0]}'
        lines[9] = '{"id":"9","content":"x","tier":"nowhere"}'
        into, skipped = await imported(fed, lines)
        assert counts(into) == (18, 0, 2)
        assert {(number, reason.partition(":")[0]) for number, reason in skipped} == {
            (8, "rejected with EMBEDDING_MISMATCH"),
            (10, "the server has no tier 'nowhere'; --drop tier lets the server choose one"),
        }
        again, _ = await imported(fed, lines, drop=["tier", "embedding"])
        assert counts(again) == (2, 18, 0)


@pytest.mark.anyio
async def test_what_a_server_would_lose_it_does_not_get() -> None:
    class Core(Server):
        capabilities = ("core",)

    server = Core()

    async def answer(message: bytes, caller: Any) -> bytes | None:
        return server.answer(message)

    lines = ['{"id":"a","content":"x","owner":"al","tier":"t"}', '{"id":"b","content":"y","revision":0}']
    async with connect_local(answer) as peer, two_tiers() as fed:
        fed.client = peer
        into, skipped = await imported(fed, lines)
        assert counts(into) == (1, 0, 1)
        assert skipped == [
            (
                1,
                "the server does not declare tiers, so it would lose the field tier; --drop tier imports the record "
                "without it",
            )
        ]
        into, _ = await imported(fed, lines, drop=["tier", "owner"])
        assert counts(into) == (1, 1, 0)
    assert [record["id"] for record in server.records] == ["b", "a"]


@pytest.mark.anyio
async def test_a_large_export_without_pages_reads_by_conversation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporting, "_of_store", without_pages)
    async with two_tiers() as fed:
        for number in range(30):
            place = {"session": f"s{number % 3}"} if number % 4 else {}
            await fed.remember(f"note {number}", owner=f"o{number % 2}", **place)
        whole = await exported(fed)
        monkeypatch.setattr(exporting, "_FEW", 0)
        parts = await exported(fed)
        assert parts != whole
        assert sorted(parts) == sorted(whole)
        assert len(parts) == 30


def without_pages(said: object) -> exporting._Store:
    """Return the store of a server without pages."""
    return exporting._Store()


@pytest.mark.anyio
@pytest.mark.parametrize("pages", [True, False])
async def test_an_export_of_what_is_too_long_for_one_message_goes_in_parts(
    pages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pages:
        monkeypatch.setattr(exporting, "_of_store", without_pages)
    async with two_tiers() as fed, connect_local(fed.federation.answer, max_message=20_000) as narrow:
        for number in range(24):
            tier = ("working", "semantic")[number % 2]
            await fed.remember("x" * 1500, id=f"{number:02}", session=f"s{number % 2 or number % 3}", tier=tier)
        fed.client = narrow
        ids = [json.loads(line)["id"] for line in await exported(fed)]
        assert sorted(ids) == [f"{number:02}" for number in range(24)]


@pytest.mark.anyio
@pytest.mark.parametrize("pages", [True, False])
async def test_an_export_without_a_tier_is_none(pages: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not pages:
        monkeypatch.setattr(exporting, "_of_store", without_pages)
    async with trial(settings_of(TWO_TIERS), down={"semantic"}) as fed:
        await fed.remember("x", tier="working")
        with pytest.raises(A2MError if pages else Incomplete, match=r"'semantic' (does not answer|did not return its)"):
            await exported(fed)


def test_a_store_is_exported_page_by_page_and_imported_by_the_command(
    tmp_path: Path, call: Callable[..., Called]
) -> None:
    lines = [
        json.dumps({"id": f"{number:04}", "content": "x", "created_at": "2026-07-28T10:15:30.123Z"})
        for number in range(1200)
    ]
    first, second, file = store(tmp_path / "a.db"), store(tmp_path / "b.db"), tmp_path / "all.jsonl"
    brought = run("import", "--stdio", first, text="\n".join(lines))
    assert (brought.returncode, brought.stderr) == (0, "")
    assert json.loads(brought.stdout) == {"written": 1200, "already_there": 0, "skipped": {}}
    assert call("export", str(file), "--stdio", first).returncode == 0
    header, *records = file.read_bytes().splitlines()
    assert json.loads(header) == {"format": "a2m-export", "version": 1, "server": "a", "records": 1200}
    assert [json.loads(record)["id"] for record in records] == [f"{number:04}" for number in range(1200)]
    assert file.stat().st_mode & 0o777 == 0o600
    assert json.loads(call("import", str(file), "--stdio", second).stdout)["written"] == 1200
    again = run("export", "--stdio", second)
    assert again.stdout.encode().splitlines()[1:] == records


def test_an_import_that_left_something_out_says_so_and_what(tmp_path: Path, call: Callable[..., Called]) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text('{"content":"x","tier":"semantic","id":"a"}\n{"content":"y"}\n')
    partly = call("import", str(file), "--stdio", store(tmp_path / "a.db"))
    assert partly.returncode == 1
    assert partly.stderr.startswith("a2m: line 1 skipped: the server does not declare tiers")
    assert json.loads(partly.stdout)["written"] == 1
    whole = call("import", str(file), "--drop", "tier", "--stdio", store(tmp_path / "a.db"))
    assert (whole.returncode, json.loads(whole.stdout)) == (0, {"written": 1, "already_there": 1, "skipped": {}})
    file.write_text('{"content":"z"}\nnonsense\n')
    stopped = call("import", str(file), "--stdio", store(tmp_path / "a.db"))
    assert stopped.returncode == 1
    assert "a2m: 0 written, 0 already there; the import can be repeated" in stopped.stderr
    assert "a2m: line 2 is not a record" in stopped.stderr


def test_a_file_is_replaced_when_all_is_written_and_not_before(tmp_path: Path) -> None:
    path = tmp_path / "all.jsonl"
    path.write_bytes(b"the last one")
    with contextlib.suppress(InterruptedError), written_whole(path) as file:
        file.write(b"half")
        raise InterruptedError
    assert path.read_bytes() == b"the last one"
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with written_whole(link) as file:
        file.write(b"whole")
    assert path.read_bytes() == b"whole"
    assert link.is_symlink()
    assert {each.name for each in tmp_path.iterdir()} == {"all.jsonl", "link.jsonl"}
    with written_whole(Path(os.devnull)) as file:
        file.write(b"whole")
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("size", range(1, 20))
def test_lines_keep_their_numbers_however_they_arrive(size: int) -> None:
    data = b"one\n\n  \nfour\nfive"
    lines = Numbered()
    found = [line for start in range(0, len(data), size) for line in lines.feed(data[start : start + size])]
    assert found + lines.end() == [(1, b"one"), (4, b"four"), (5, b"five")]


def test_a_line_without_an_end_is_not_held_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importing, "DEFAULT_MAX_MESSAGE", 100)
    lines = Numbered()
    assert lines.feed(b"one\n" + b"x" * 99) == [(1, b"one")]
    with pytest.raises(NotAnExport, match="line 2 is longer than 100 bytes"):
        lines.feed(b"xx")


@given(st.text())
def test_nothing_that_a_terminal_would_obey_is_shown(text: str) -> None:
    shown = showing.plain(text)
    assert not any(ord(character) < 32 and character not in "\t\n" for character in shown)
    assert not any(0x7F <= ord(character) < 0xA0 for character in shown)


UNDATED_RECORD: Final = {"id": "42", "content": "Tea is in the kitchen.", "created_at": UNDATED}


def test_what_has_no_date_is_undated_on_a_terminal() -> None:
    undated = msgspec.convert(UNDATED_RECORD, Record)
    dated = msgspec.structs.replace(undated, id="43", created_at="2026-07-28T10:15:30.123Z")
    for shown in (showing.records([undated, dated]), showing.record(undated)):
        assert b"1970" not in shown
        assert b"undated" in shown
    assert b"2026-07-28 10:15:30" in showing.records([undated, dated])
    assert b"2026-07-28T10:15:30.123Z" in showing.record(dated)


def test_an_undated_record_is_undated_where_an_export_of_it_is_imported() -> None:
    async def there_and_in_a_prompt() -> tuple[str, str]:
        async with two_tiers() as fed:
            await imported(fed, [json.dumps(UNDATED_RECORD)])
            (line,) = await exported(fed)
            return json.loads(line)["created_at"], (await fed.call("recall", query="tea", prompt=True))["prompt"]

    assert anyio.run(there_and_in_a_prompt) == (UNDATED, "- undated: Tea is in the kitchen.")


MOUNTS: Final = {
    "protocol": "a2m/0.1",
    "name": "home",
    "capabilities": ["core", "tiers"],
    "tiers": [
        {"name": "notes", "kind": "semantic", "count": 3, "status": "up", "mount": False},
        {"name": "pages", "kind": "semantic", "count": 0, "status": "up", "mount": True},
        {"name": "site", "count": 0, "status": "down", "mount": True, "reason": "it is\x1b[2J gone"},
    ],
}


def test_describe_shows_which_tiers_are_mounted_and_why_one_is_down() -> None:
    rows = showing.description(msgspec.convert(MOUNTS, Description)).decode().splitlines()
    of = {row.split()[0]: row for row in rows if row.strip() and row.split()[0] in ("notes", "pages")}
    assert "mounted" not in of["notes"]
    assert "semantic, mounted" in of["pages"]
    table, reason = (row for row in rows if "site" in row)
    assert "mounted" in table
    assert "down" in table
    assert "it is\\x1b[2J gone" in reason


@pytest.mark.parametrize(
    ("service", "told"),
    [
        ({"status": "up"}, "up"),
        ({"status": "down", "reason": "no answer within 4 s"}, "down: no answer within 4 s"),
        ({"status": "ill"}, None),
        ("pages", None),
        (None, None),
    ],
)
def test_describe_shows_how_the_service_behind_a_server_is(service: Any, told: str | None) -> None:
    described = {"protocol": "a2m/0.1", "name": "pages", "capabilities": ["core"], "service": service}
    rows = showing.description(msgspec.convert(described, Description)).decode().splitlines()
    found = [row for row in rows if "service behind it" in row]
    assert len(found) == (told is not None)
    assert all(told is not None and told in row for row in found)


@pytest.mark.parametrize("body", [b'{"results": []}', b"<html>sign in</html>", b""])
def test_an_address_that_is_no_server_s_is_said(body: bytes, call: Callable[..., Called]) -> None:
    class Stranger(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        thread = threading.Thread(target=stranger.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            refused = call("recall", "x", "--http", f"http://127.0.0.1:{stranger.server_port}/")
        finally:
            stranger.shutdown()
            thread.join()
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "is there an A2M server at this address? `a2m-rag http` puts one before a search service" in refused.stderr
    assert (body.decode() or "empty") in refused.stderr


# --- a federation that another router has open


FEDERATION: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
"""


@contextmanager
def serving(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a router that serves HTTP."""
    process = subprocess.Popen(
        [sys.executable, "-m", "a2m_router.daemon.cli", "--config", str(config), "--http", "127.0.0.1:0"],
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, "A_TOKEN": "open-sesame"},
    )
    try:
        assert process.stderr is not None
        while b"listens on" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_federation_that_a_router_has_is_reached_through_it(
    tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(FEDERATION)
    assert run("remember", "before", cwd=tmp_path).returncode == 0
    with serving(config) as process:
        assert call("remember", "meanwhile", "--config", str(config)).returncode == 0
        process.terminate()
        assert process.wait(PATIENCE) == 0
    monkeypatch.chdir(tmp_path)
    found = json.loads(call("timeline").stdout)["records"]
    assert [record["content"] for record in found] == ["before", "meanwhile"]


def test_a_page_is_written_at_the_revision_that_the_command_line_names(
    tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    monkeypatch.chdir(tmp_path)

    def write(text: str, condition: str) -> Called:
        return call("remember", text, "--key", "k", "--if-revision", condition)

    with serving(tmp_path / "federation.toml"):
        assert write("one", "0").stderr == (
            "a2m: INVALID_PARAMS: records[0].if_revision: expected a page at revision 0 at the key 'k', and there is "
            "none; to create a page, send null (no page expected)\n"
        )
        assert write("one", "new").returncode == write("one", "new").returncode == 0
        assert write("two", "0").returncode == 0
        for condition, wanted in (("new", "no page"), ("0", "a page at revision 0"), ("7", "a page at revision 7")):
            refused = write("three", condition)
            assert (refused.returncode, refused.stdout) == (1, "")
            assert f"expected {wanted} at the key 'k', and it is at revision 1; fetch it, and repeat" in refused.stderr
        record = json.loads(call("fetch", "k").stdout)["record"]
        assert (record["content"], record["revision"]) == ("two", 1)


def test_a_router_with_principals_is_asked_with_a_token(
    tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(FEDERATION + '[[serve.principals]]\nowner = "alice"\ntoken_env = "A_TOKEN"\n')
    with serving(config):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("A_TOKEN", "open-sesame")
        refused = call("remember", "x")
        assert refused.returncode == 1
        assert "A2M_TOKEN" in refused.stderr
        monkeypatch.setenv("A2M_TOKEN", "open-sesame")
        allowed = call("remember", "x")
        assert (allowed.returncode, allowed.stderr) == (0, "")


def test_a_router_that_nobody_can_join_is_named(
    tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "federation.toml"
    config.write_text(FEDERATION)
    with subprocess.Popen(
        [sys.executable, "-m", "a2m_router.daemon.cli", "--config", str(config)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=ENVIRONMENT,
        cwd=ROOT,
    ) as router:
        assert router.stdin is not None
        assert router.stdout is not None
        router.stdin.write(b'{"jsonrpc":"2.0","id":1,"method":"memory/describe"}\n')
        router.stdin.flush()
        router.stdout.readline()
        monkeypatch.chdir(tmp_path)
        refused = call("describe")
        router.stdin.close()
    assert refused.returncode == 1
    assert f"in use by a2m-router (process {router.pid})" in refused.stderr
    assert "does not serve HTTP" in refused.stderr


def test_a_watch_waits_for_nothing_where_no_router_is(
    tmp_path: Path, call: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    monkeypatch.chdir(tmp_path)
    refused = call("watch")
    assert refused.returncode == 1
    assert refused.stderr == (
        "a2m: no router serves the federation of federation.toml over HTTP; "
        "start a2m-router with --http 127.0.0.1:8778\n"
    )
    assert list(tmp_path.iterdir()) == [tmp_path / "federation.toml"]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ({"reason": "overloaded", "retry_after": 0.5}, "a2m: INTERNAL_ERROR: not now (retry in 0.5 s)\n"),
        ({"reason": "overloaded", "retry_after": 0}, "a2m: INTERNAL_ERROR: not now\n"),
        ({"reason": "overloaded", "retry_after": "soon"}, "a2m: INTERNAL_ERROR: not now\n"),
        (None, "a2m: INTERNAL_ERROR: not now\n"),
    ],
)
def test_when_to_repeat_a_call_is_told(call: Callable[..., Called], data: dict[str, Any] | None, told: str) -> None:
    refuses = """
    def answer_message(self, message):
        if message["method"] != "memory/remember":
            return super().answer_message(message)
        error = {"code": -32603, "message": "not now"}
        data = DATA
        return self.rendered({"id": message["id"], "error": error if data is None else {**error, "data": data}})
"""
    refused = call("remember", "x", "--stdio", stdio(refuses.replace("DATA", repr(data))))
    assert (refused.returncode, refused.stderr) == (1, told)


def database(path: Path) -> Database:
    return Database(path, ["CREATE TABLE t (x)"], application=b"test", holder="a-test")


def test_what_is_announced_is_read_for_as_long_as_the_file_is_held(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    assert announced(path) is None
    held = database(path)
    assert announced(path) is None
    held.announce("http://127.0.0.1:8778/a-long-way")
    held.announce("http://127.0.0.1:9/")
    assert announced(path) == "http://127.0.0.1:9/"
    with pytest.raises(
        InUse, match=r"in use by a-test \(process \d+\)\. Only one .* listens on http://127\.0\.0\.1:9/: call"
    ):
        database(path)
    held.announce(STDIO)
    assert announced(path) is None
    with pytest.raises(InUse, match=r"in use by a-test \(process \d+\)\. Only one .* serves its own stdin and stdout"):
        database(path)
    held.announce(None)
    assert announced(path) is None
    with pytest.raises(InUse, match=r"in use by a-test \(process \d+\)\. Only one process can use a file; "):
        database(path)
    for text in ("", "two\nlines"):
        with pytest.raises(ValueError, match="expected one line"):
            held.announce(text)
    held.close()
    assert announced(path) is None
    assert Path(f"{path}.lock").read_bytes() == b""
    again = database(path)
    assert announced(path) is None
    again.close()
    database_in_memory = Database(None, [], application=b"test", holder="a-test")
    database_in_memory.announce("nobody can ask")
    database_in_memory.close()


def test_what_a_dead_process_announced_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    program = (
        "import sys; from pathlib import Path; from a2m_router.storage.database import Database\n"
        "held = Database(Path(sys.argv[1]), ['CREATE TABLE t (x)'], application=b'test', holder='a-test')\n"
        "held.announce('http://127.0.0.1:9/'); print('ready', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert announced(path) == "http://127.0.0.1:9/"
        process.kill()
    left = Path(f"{path}.lock").read_bytes()
    assert b"http://127.0.0.1:9/" in left
    assert announced(path) is None
    # another process may have that process id by now
    Path(f"{path}.lock").write_bytes(b"a-test (process %d)\nhttp://127.0.0.1:9/\n" % os.getpid())
    assert announced(path) is None
    held = database(path)
    # as the file is for a moment after the lock was taken
    Path(f"{path}.lock").write_bytes(left)
    assert announced(path) is None
    # the address of the dead process is not reported, though another process has the file open
    with pytest.raises(InUse, match=r"in use by another process\. Only one process can use a file; ") as refusal:
        database(path)
    assert "127.0.0.1:9/" not in str(refusal.value)
    held.close()


@pytest.mark.parametrize(
    ("state", "lock", "then"), [(0o600, 0o644, 0o600), (0o640, 0o666, 0o640), (0o644, 0o600, 0o600)]
)
def test_a_lock_is_read_by_nobody_who_may_not_read_the_file(state: int, lock: int, then: int, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    database(path).close()
    beside = Path(f"{path}.lock")
    assert beside.stat().st_mode & 0o777 == 0o600
    path.chmod(state)
    beside.chmod(lock)
    held = database(path)
    held.announce("http://127.0.0.1:9/")
    assert beside.stat().st_mode & 0o777 == then
    held.close()
