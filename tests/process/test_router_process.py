"""a2m-router as a process, with stores as processes behind it: its output, how it ends, and what it survives."""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NamedTuple

import psutil
import pytest

from a2m_router.daemon import cli
from a2m_router.protocol.wire.errors import Code
from a2m_router.storage import database
from tests.support.pages import manual
from tests.support.router_process import (
    AT_ITS_END,
    AT_ITS_START,
    COMMAND,
    PATIENCE,
    PRINCIPALS,
    Router,
    child_of,
    command,
    end_of_input,
    federation,
    on_http,
    post,
    running,
    terminate,
)

STORE: Final = str(Path(sys.executable).with_name("a2m-store"))


def run(*arguments: str, hurried: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command(hurried), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE
    )


class Called(NamedTuple):
    """The result of a command line that ran in this process; none of those here starts a tier."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Called]:
    monkeypatch.setattr(cli, "log_to_stderr", lambda level, form: None)

    def called(*arguments: str) -> Called:
        code: Any = None
        try:
            code = cli.main(arguments)
        except SystemExit as end:
            code = end.code
        return Called(code, *capfd.readouterr())

    return called


# --- its output


def test_it_explains_itself(here: Callable[..., Called]) -> None:
    explained = run("--help")
    assert explained.returncode == 0
    for option in ("--config", "--http", "--check", "--adopt", "--rebuild", "--log-level", "--log-format", "--version"):
        assert option in explained.stdout
    assert re.fullmatch(r"a2m-router \d+\.\d+\.\d+\n", here("--version").stdout)
    wrong = here("--nonsense")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "--nonsense" in wrong.stderr


def test_the_manual_lists_every_option_and_no_other() -> None:
    table = manual().partition("\n### a2m-router\n")[2].partition("\nExit codes")[0]
    listed = " ".join(line.split(" | ")[0] for line in table.splitlines())
    explained = re.findall(r"^ +(?:-h, )?(--[a-z-]+)", run("--help").stdout, re.MULTILINE)
    assert set(re.findall(r"--[a-z-]{2,}", listed)) == set(explained)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--rebuild", "--check"), "--rebuild and --check each do one thing and end: run a2m-router once for each"),
        (("--adopt", "--check", "--rebuild"), "--rebuild and --check each do one thing"),
        (("--rebuild", "token", "alice"), "token prints a token and does nothing else: leave out --rebuild"),
        (("--check", "token", "alice"), "leave out --check"),
        (("--backup", "copy", "--check"), "--backup makes a backup and ends: leave out --check"),
        (("--backup", "copy", "--adopt"), "leave out --adopt"),
        (("--backup", "copy", "token", "alice"), "leave out --backup"),
        (("--federation", "3f"), "--federation names the federation whose records --rebuild reads"),
    ],
)
def test_options_of_which_one_would_be_ignored_are_refused(
    here: Callable[..., Called], tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    refused = here("--config", str(federation(tmp_path)), *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert told in refused.stderr
    assert list(tmp_path.iterdir()) == [tmp_path / "federation.toml"]


def test_check_shows_every_tier(tmp_path: Path) -> None:
    config = federation(tmp_path)
    for _ in range(2):  # the second run finds the files of the first
        checked = run("--config", str(config), "--check")
        assert checked.returncode == 0, checked.stderr
        for word in ("working", "semantic", "up", "core"):
            assert word in checked.stdout
    assert "Traceback" not in checked.stderr


NO_METHODS: Final = """
import json, sys
for line in sys.stdin:
    call = json.loads(line)
    described = {"protocol": "a2m/0.1", "name": "small", "capabilities": ["core"], "methods": []}
    print(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": described}), flush=True)
"""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("exec /no/such/program", "/no/such/program"),
        ("echo the disk is gone >&2; exit 3", "status 3; its last line on stderr: the disk is gone"),
        ("exec false", "status 1"),
        ("while read line; do echo garbage; done", "semantic"),
        (f"exec {shlex.quote(sys.executable)} no_methods.py", "is of 'core', and missing"),
    ],
)
def test_check_says_what_is_wrong_with_a_tier(line: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "no_methods.py").write_text(NO_METHODS)
    hurried = AT_ITS_START if line.startswith("while") else None
    checked = run("--config", str(federation(tmp_path, semantic=line)), "--check", hurried=hurried)
    assert checked.returncode == 1
    assert said in checked.stdout + checked.stderr
    assert "semantic" in checked.stdout + checked.stderr
    assert "Traceback" not in checked.stderr


def test_check_says_that_a_program_does_not_exist(tmp_path: Path) -> None:
    config = federation(tmp_path)
    config.write_text(config.read_text().replace('"a2m-store", "semantic.db"', '"no-such-program"'))
    checked = run("--config", str(config), "--check")
    assert checked.returncode == 1
    assert "'no-such-program' cannot be started: there is no such program" in checked.stdout


def test_another_store_than_last_time_is_refused_unless_it_is_adopted(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as router:
        router.ask("remember", records=[{"id": "old", "content": "x", "tier": "semantic"}])
        router.end()
    for leftover in tmp_path.glob("semantic.db*"):
        leftover.unlink()
    refused = run("--config", str(config))
    assert refused.returncode == 1
    assert re.search(r"a2m-router: tiers\.semantic: another store is behind this tier.*--adopt", refused.stderr)
    assert "Traceback" not in refused.stderr
    assert run("--config", str(config), "--check", "--adopt").returncode == 0
    assert run("--config", str(config), "--check").returncode == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no such file"),
        ("tiers = ", "not valid TOML"),
        ("", "there is no tier"),
        ('[tiers.a]\nkind = "semantic"\ncommand = ["x"]\ncapacty = 5', '"capacity"'),
        ('[tiers.a]\nkind = "semantic"\ncommand = ["x"]\nhalf_life = "5"', "tiers.a.half_life"),
        ('[tiers.a]\nkind = "working"\ncommand = ["x"]\ncapacity = 1\nspill_to = "b"', "tiers.a.spill_to"),
        ('[tiers.a]\nkind = "semantic"\nurl = "http://x/"\nheaders = { A = "${NO_SUCH}" }', "NO_SUCH"),
        ('[serve]\nhttp = "0.0.0.0:80"\n[tiers.a]\nkind = "semantic"\ncommand = ["x"]', "serve.http"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_ends_it(
    text: str | None, said: str, tmp_path: Path, here: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "federation.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    ended = here()
    assert (ended.returncode, ended.stdout) == (1, "")
    assert said in ended.stderr
    assert ended.stderr.startswith("a2m-router: federation.toml")
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("http", ["nowhere", "127.0.0.1", "127.0.0.1:99999", "0.0.0.0:8778"])
def test_an_address_that_cannot_be_served_is_said_in_a_sentence(
    http: str, tmp_path: Path, here: Callable[..., Called]
) -> None:
    ended = here("--config", str(federation(tmp_path)), "--http", http)
    assert ended.returncode == 1
    assert http in ended.stderr
    assert "Traceback" not in ended.stderr


# --- one router for each state


def test_a_second_router_on_the_same_state_is_told_about_the_first(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as first:
        first.ask("describe")
        second = run("--config", str(config))
        assert (second.returncode, second.stdout) == (1, "")
        [line] = second.stderr.splitlines()
        assert line.startswith(
            f"a2m-router: {tmp_path / 'router.db'}: in use by a2m-router (process {first.popen.pid})"
        )
        assert "that process serves its own stdin and stdout; to share one federation" in line
        assert "run a router on HTTP" in line
        assert "result" in first.ask("describe")


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_whoever_wants_the_state_of_a_router_on_http_is_told_its_address(
    host: str, tmp_path: Path, here: Callable[..., Called], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "_HANDOVER_SECONDS", 0.1)  # the first router does not release the file
    if host == "[::1]" and not has_ipv6():
        pytest.skip("there is no IPv6 here")
    config = federation(tmp_path)
    with running(config, "--http", f"{host}:0") as first:
        assert first.popen.stderr is not None
        said = ""
        while (found := re.search(r"listens on (http://\S+)", said)) is None:
            line = first.popen.stderr.readline().decode()
            assert line, said
            said += line
        assert f"{host}:0/" not in found[1]
        for options in ((), ("--check",), ("--rebuild",), ("--adopt",), ("--http", "127.0.0.1:0")):
            second = here("--config", str(config), "--log-level", "error", *options)
            assert (second.returncode, second.stdout) == (1, "")
            [line] = second.stderr.splitlines()
            url = found[1]
            assert line == (
                f"a2m-router: {tmp_path / 'router.db'}: in use by a2m-router (process {first.popen.pid}). "
                f"Only one process can use a file, and that process listens on {url}: "
                f"call it there (a2m --http {url} …), or end it first"
            )
        # no client gets the address of a killed router
        first.popen.kill()
        first.popen.wait()
    assert found[1] in (tmp_path / "router.db.lock").read_text()
    with running(config) as next_one:
        next_one.ask("describe")
        third = here("--config", str(config), "--check", "--log-level", "error")
        assert (
            f"(process {next_one.popen.pid}). Only one process can use a file, and that process serves its own stdin"
            in (third.stderr)
        )
        assert found[1] not in third.stderr


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_second_store_on_the_same_file_is_told_about_the_first(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as router:
        router.ask("describe")
        second = subprocess.run(
            [STORE, str(tmp_path / "semantic.db")],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert (second.returncode, second.stdout) == (1, "")
        assert f"(process {child_of(router, 'semantic.db')})" in second.stderr
        assert "Traceback" not in second.stderr


def test_a_newer_catalog_is_refused_by_name(tmp_path: Path) -> None:
    config = federation(tmp_path)
    assert run("--config", str(config), "--check").returncode == 0
    database = sqlite3.connect(tmp_path / "router.db")
    database.execute("PRAGMA user_version = 999")
    database.close()
    refused = run("--config", str(config))
    assert (refused.returncode, refused.stdout) == (1, "")
    [line] = refused.stderr.splitlines()
    assert line.startswith(f"a2m-router: {tmp_path / 'router.db'}: written by a newer version (schema 999")


# --- its end


def interrupt(router: Router) -> None:
    router.popen.send_signal(signal.SIGINT)


WAYS: Final = [end_of_input, terminate, interrupt]


@pytest.mark.parametrize("end", WAYS)
def test_it_answers_what_is_under_way_and_leaves_nobody_behind(end: Callable[[Router], None], tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as router:
        for number in range(200):
            router.send("remember", id=number, records=[{"id": str(number), "content": f"note {number}"}])
        router.send("describe", id="last")
        router.answer("last")  # all others have been begun then
        children = router.children()
        end(router)
        answers, err = router.end()
        written = {*router.answers, *(answer["id"] for answer in answers)}
    assert router.popen.returncode == 0
    assert len(children) == 2
    assert not any(map(psutil.pid_exists, children))
    assert "Traceback" not in err
    assert written == set(range(200))
    with running(config) as again:
        kept = again.ask("timeline")["result"]["records"]
        assert [record["id"] for record in kept] == [str(number) for number in range(200)]


@pytest.mark.parametrize("end", [end_of_input, terminate])
def test_it_ends_though_a_child_hangs(end: Callable[[Router], None], tmp_path: Path) -> None:
    config = federation(tmp_path)
    config.write_text(config.read_text().replace('"working.db"]', '"working.db"]\ntimeout = "2s"'))
    with running(config, hurried=AT_ITS_END) as router:
        router.ask("describe")
        children = router.children()
        os.kill(child_of(router, "working.db"), signal.SIGSTOP)
        router.send("remember", id="under way", records=[{"content": "x"}])
        router.send("describe", id="last")
        router.answer("last")
        end(router)
        answers, _ = router.end()
    assert router.popen.returncode == 0
    [answer] = [*router.answers.values(), *answers]
    assert (answer["id"], answer["error"]["code"]) == ("under way", Code.INTERNAL_ERROR)
    assert answer["error"]["data"]["tier"] == "working"
    assert not any(map(psutil.pid_exists, children))


@pytest.mark.parametrize("end", [terminate, interrupt])
def test_it_ends_while_it_is_starting(end: Callable[[Router], None], tmp_path: Path) -> None:
    """The tier's process starts and sends nothing; it writes down its process id."""
    os.mkfifo(tmp_path / "started")
    config = federation(tmp_path, semantic="trap '' TERM; echo $$ > started; while :; do sleep 1000; done")
    with running(config, hurried=AT_ITS_END) as router:
        child = int((tmp_path / "started").read_text())
        end(router)
        answers, err = router.end()
    assert answers == []
    assert router.popen.returncode == 0
    assert not psutil.pid_exists(child)
    assert "Traceback" not in err


def test_a_killed_router_loses_nothing_it_had_acknowledged(tmp_path: Path) -> None:
    config = federation(tmp_path)
    with running(config) as router:
        for number in range(100):
            router.send("remember", id=number, records=[{"id": str(number), "content": "x"}])
        acknowledged = [router.answer(number)["result"]["ids"][0] for number in range(50)]
        router.popen.kill()
        router.popen.wait()
    with running(config) as again:
        records = again.ask("timeline")["result"]["records"]
        assert set(acknowledged) <= {record["id"] for record in records}


# --- a tier that dies


def test_a_killed_child_comes_back_and_the_answers_say_that_it_was_away(tmp_path: Path) -> None:
    # it cannot come back before the test removes the file
    line = f"test -e away && exit 7; exec {shlex.quote(STORE)} semantic.db"
    config = federation(tmp_path, semantic=line)
    # a read waits until its deadline for a tier that has just gone down
    config.write_text(f'{config.read_text()}timeout = "2s"\n')
    with running(config) as router:
        near, far = {"id": "w", "content": "near"}, {"id": "s", "content": "far", "tier": "semantic"}
        # the timeout may be too short for a write
        router.ask_until(lambda answer: "result" in answer, "remember", records=[near, far])
        (tmp_path / "away").touch()
        os.kill(child_of(router, "semantic.db"), signal.SIGKILL)

        answer = router.ask_until(lambda answer: "degraded" in answer["result"], "recall")
        assert [record["id"] for record in answer["result"]["records"]] == ["w"]
        [degraded] = answer["result"]["degraded"]
        assert degraded["tier"] == "semantic"
        assert degraded["reason"]

        timeline = router.ask("timeline")["result"]
        assert ([record["id"] for record in timeline["records"]], len(timeline["degraded"])) == (["w"], 1)
        refused = router.ask("remember", records=[{"content": "x", "tier": "semantic"}, {"content": "y"}])["error"]
        assert refused["code"] == Code.INTERNAL_ERROR
        assert refused["data"].keys() == {"tier", "reason", "retry_after"}
        assert (refused["data"]["tier"], refused["data"]["retry_after"] >= 0) == ("semantic", True)
        tiers = {tier["name"]: tier["status"] for tier in router.ask("describe")["result"]["tiers"]}
        assert tiers == {"working": "up", "semantic": "down"}
        assert "result" in router.ask("remember", records=[{"id": "w2", "content": "meanwhile"}])

        (tmp_path / "away").unlink()
        answer = router.ask_until(lambda answer: "degraded" not in answer["result"], "timeline")
        assert [record["id"] for record in answer["result"]["records"]] == ["w", "s", "w2"]
        # it is up, and may not have been welcomed yet
        again = {"id": "s2", "content": "again", "tier": "semantic"}
        written = router.ask_until(lambda answer: "result" in answer, "remember", records=[again])
        assert written["result"] == {"ids": ["s2"]}


def test_what_a_tier_says_is_passed_on_under_its_name(tmp_path: Path) -> None:
    line = f"echo hello from below >&2; exec {shlex.quote(STORE)} semantic.db"
    with running(federation(tmp_path, semantic=line)) as router:
        router.ask("describe")
        _, err = router.end()
    assert re.search(r"^\S+ \S+ \w+ +tier=semantic stderr: hello from below$", err, re.MULTILINE)


def test_the_log_can_be_json(tmp_path: Path) -> None:
    line = f'echo say \\"hello\\" >&2; exec {shlex.quote(STORE)} semantic.db'
    with running(federation(tmp_path, semantic=line), "--log-format", "json", "--http", "127.0.0.1:0") as router:
        assert router.popen.stderr is not None
        lines = []
        for raw in router.popen.stderr:
            lines.append(json.loads(raw))
            if "try: curl" in lines[-1]["message"]:
                break
        terminate(router)
        _, err = router.end()
    lines += map(json.loads, err.splitlines())
    assert all({"at", "level", "message"} <= line.keys() for line in lines)
    assert 'tier=semantic stderr: say "hello"' in [line["message"] for line in lines]


# --- on a terminal


def test_on_a_terminal_it_says_in_a_line_what_it_expects(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    process = subprocess.Popen(
        [COMMAND, "--config", str(federation(tmp_path)), "--log-level", "error"],
        bufsize=0,
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    os.close(theirs)
    try:
        assert process.stderr is not None
        line = process.stderr.readline().decode()
        assert "JSON-RPC on stdin" in line
        assert f"--config {tmp_path / 'federation.toml'} --http 127.0.0.1:8778" in line
        os.write(ours, b'{"jsonrpc":"2.0","id":1,"method":"memory/describe"}\n')
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["result"]["protocol"] == "a2m/0.1"
        os.write(ours, b"\x04")  # Ctrl-D, the end of input
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, out, err) == (0, b"", b"")
    finally:
        process.kill()
        process.communicate()
        os.close(ours)


# --- HTTP


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_command_line_it_offers_works(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (_, _, offered):
        tried = subprocess.run(offered, shell=True, capture_output=True, check=True, timeout=PATIENCE)
        assert json.loads(tried.stdout)["result"]["protocol"] == "a2m/0.1"


@pytest.mark.parametrize("end", [terminate, interrupt])
def test_on_http_a_signal_ends_it_too(end: Callable[[Router], None], tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (router, client, _):
        post(client, "remember", records=[{"content": "x"}])
        children = router.children()
        end(router)
        _, err = router.end()
        assert router.popen.returncode == 0
        assert not any(map(psutil.pid_exists, children))
        assert "Traceback" not in err


def test_the_end_of_stdin_does_not_end_a_server_on_http(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (router, client, _):
        end_of_input(router)
        assert "protocol" in post(client, "describe")
        assert "protocol" in post(client, "describe")
        terminate(router)
        router.end()


def test_a_port_that_is_taken_is_said_in_a_sentence(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with on_http(federation(tmp_path)) as (_, client, _):
        taken = f"127.0.0.1:{client.base_url.port}"
        second = run("--config", str(federation(other)), "--http", taken, "--log-level", "error")
        assert (second.returncode, second.stdout) == (1, "")
        [line] = second.stderr.splitlines()
        assert line.startswith(f"a2m-router: cannot listen on {taken}: ")


def test_http_refuses_before_any_work(tmp_path: Path) -> None:
    head = '[limits]\nmax_message = "1MiB"\n[serve]\norigins = ["https://app.example"]\nhosts = ["a2m.example"]\n'
    head += PRINCIPALS
    with on_http(federation(tmp_path, head)) as (_, client, offered):
        assert "Authorization: Bearer TOKEN" in offered
        good = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "memory/describe"})
        known = {"Content-Type": "application/json", "Authorization": "Bearer a-token"}

        def status(**headers: str) -> int:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            return client.post("/", content=good, headers=known | named).status_code

        assert status() == 200
        assert status(Authorization="") == 401
        assert status(Authorization="Bearer c-token") == 401
        assert status(Authorization="Basic a-token") == 401
        assert status(Authorization="bearer a-token") == 200
        assert status(Origin="https://evil.example") == 403
        assert status(Origin="https://app.example") == 200
        assert status(Origin="https://app.example", Authorization="Bearer x") == 401
        assert status(Host="a2m.example") == 200
        assert status(Host="evil.example") == 421
        assert client.get("/healthz", headers={"Host": "evil.example"}).status_code == 421
        assert status(Content_Type="text/plain") == 415
        assert status(A2M_Protocol_Version="a2m/9") == 400
        assert status(A2M_Protocol_Version="a2m/0.1") == 200
        assert client.get("/", headers=known).status_code == 405
        assert client.get("/").status_code == 401
        assert client.post("/", content=b" " * 2**21, headers=known).status_code == 413
        refused = client.post("/", content=good, headers=known | {"A2M-Protocol-Version": "a2m/9"}).json()
        assert (refused["id"], refused["error"]["code"]) == (None, Code.PROTOCOL_NOT_SUPPORTED)
        challenge = client.post("/", content=good, headers={"Content-Type": "application/json"})
        assert challenge.headers["www-authenticate"].startswith("Bearer")


def test_two_principals_do_not_see_each_other(tmp_path: Path) -> None:
    with on_http(federation(tmp_path, PRINCIPALS)) as (_, client, _):
        for name in ("alice", "bob"):
            record = {"id": name, "content": f"{name} likes figs", "session": "chat", "key": "likes"}
            assert post(client, "remember", f"{name[0]}-token", records=[record]) == {"ids": [name]}

        def alone(name: str, answer: Any) -> None:
            records = [(record["id"], record["owner"]) for record in answer["records"]]
            assert records == [(name, name)]

        for name, other in (("alice", "bob"), ("bob", "alice")):
            token = f"{name[0]}-token"
            alone(name, post(client, "recall", token, query="figs"))
            alone(name, post(client, "recall", token, where={"id": ["alice", "bob"]}))
            alone(name, post(client, "timeline", token))
            alone(name, post(client, "timeline", token, where={"session": "chat"}))
            alone(name, post(client, "timeline", token, where={"owner": [name, other]}))
            assert post(client, "fetch", token, key="likes")["record"]["id"] == name
            [session] = post(client, "session/list", token)["sessions"]
            assert (session["session"], session["records"]) == ("chat", 1)
            described = post(client, "describe", token)
            assert "scopes" in described["capabilities"]
            assert {tier["name"]: tier["count"] for tier in described["tiers"]} == {"working": 1, "semantic": 0}
            assert post(client, "consolidate", token)["counts"] == {"working": 1, "semantic": 0}

            assert post(client, "forget", token, ids=[other]) == {"forgotten": 0}
            assert post(client, "forget", token, where={"owner": other}) == {"forgotten": 0}
            assert post(client, "promote", token, ids=[other], tier="semantic") == {"promoted": 0}
            assert post(client, "reinforce", token, ids=[other]) == {"reinforced": 0}

            for method, params in (
                ("recall", {}),
                ("timeline", {}),
                ("fetch", {"key": "likes"}),
                ("session/list", {}),
                ("session/close", {"session": "chat"}),
                ("forget", {"ids": [other]}),
                ("describe", {}),
                ("remember", {"records": [{"content": "x"}]}),
            ):
                assert post(client, method, token, owner=other, **params)["code"] == Code.SCOPE_DENIED, method
            for record in ({"content": "x", "owner": other}, {"id": other, "content": "x"}):
                assert post(client, "remember", token, records=[record])["code"] == Code.SCOPE_DENIED
            assert post(client, "timeline", token, owner=name)["records"]

        assert post(client, "session/close", "a-token", session="chat")["closed"] == "chat"
        alone("bob", post(client, "timeline", "b-token", tier="working"))
        assert post(client, "forget", "a-token", ids=["alice"]) == {"forgotten": 1}
        assert post(client, "timeline", "a-token")["records"] == []
        alone("bob", post(client, "timeline", "b-token"))


def test_without_principals_http_knows_no_owners(tmp_path: Path) -> None:
    with on_http(federation(tmp_path)) as (_, client, _):
        assert "scopes" not in post(client, "describe")["capabilities"]
        post(client, "remember", owner="x", records=[{"content": "a", "owner": "y"}])
        [record] = post(client, "timeline", owner="z")["records"]
        assert "owner" not in record
