"""The conformance suite: it covers the whole specification, it can fail, and our servers pass it.

A2M_SPECIFICATION may have the path of the specification's text; then the key words in it are counted, too.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from anyio.from_thread import start_blocking_portal

from a2m_router.config.loading import load
from a2m_router.conformance.__main__ import main
from a2m_router.conformance.checking import CHECKS, Check, Target
from a2m_router.conformance.client import Client, Http, InProcess, NoAnswer, Stdio
from a2m_router.conformance.report import checks_of
from a2m_router.conformance.running import ALL_CHECKS, SECTIONS, Outcome, State, outcome, outcomes
from a2m_router.conformance.sentences import COUNTS, KEY_WORDS, SENTENCES
from a2m_router.daemon.app import running_federation
from a2m_router.protocol.server.stdio import LOCAL
from a2m_router.tiers.link_factory import links_for
from tests.conformance.small_server import Server, listening
from tests.conformance.wrong_servers import BINDINGS, CAUGHT_BY, WRONG
from tests.support.examples import scaled
from tests.support.judging import judged, store
from tests.support.pages import manual
from tests.support.paths import PROGRAMS, ROOT

PACKAGE = ROOT / "tests/conformance"
MANUAL = manual()
TOKENS = {"one-token": "one", "another-token": "another"}

# --- the list of sentences


def test_every_sentence_is_tested_or_says_why_not() -> None:
    checks = checks_of()
    assert [sentence.id for sentence in SENTENCES if not checks[sentence.id] and not sentence.untested] == []
    assert [sentence.id for sentence in SENTENCES if checks[sentence.id] and sentence.untested] == []
    assert len({sentence.id for sentence in SENTENCES}) == len(SENTENCES)


def test_every_check_names_sentences_that_are_there() -> None:
    known = {sentence.id for sentence in SENTENCES}
    assert [check.name for check in CHECKS if not check.sentences or not known.issuperset(check.sentences)] == []
    assert len({check.name for check in ALL_CHECKS}) == len(ALL_CHECKS)


def test_every_key_word_is_accounted_for() -> None:
    accounted: dict[str, Counter[str]] = {}
    for sentence in SENTENCES:
        if sentence.words:
            accounted.setdefault(sentence.section, Counter()).update(sentence.words)
    assert accounted == COUNTS


def counted(text: str) -> dict[str, Counter[str]]:
    """Return how often each key word is in each section of the specification."""
    section = "0"
    found: dict[str, Counter[str]] = {}
    for line in text.splitlines():
        heading = re.match(r"#+\s*(\d+(?:\.\d+)*)\.?\s", line)
        section = heading[1] if heading else section
        words = re.findall(rf"\b({'|'.join(KEY_WORDS)})\b", line)
        if words:
            found.setdefault(section, Counter()).update(words)
    return found


@pytest.mark.skipif("A2M_SPECIFICATION" not in os.environ, reason="A2M_SPECIFICATION does not say where the text is")
def test_the_key_words_are_those_of_the_text() -> None:
    assert counted(Path(os.environ["A2M_SPECIFICATION"]).read_text()) == COUNTS


def test_key_words_are_counted_by_section() -> None:
    text = "It MUST.\n#1. One\nMUST NOT, MUST; MAY\n#1.2 Two\nSHOULD\n#Appendix\n"
    assert counted(text) == {"0": {"MUST": 1}, "1": {"MUST NOT": 1, "MUST": 1, "MAY": 1}, "1.2": {"SHOULD": 1}}


def test_it_knows_nothing_of_the_servers_it_judges() -> None:
    for path in set(PACKAGE.glob("*.py")) - set(PACKAGE.glob("test_*.py")):
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        assert {name.partition(".")[0] for name in imported} <= {"tests", *sys.stdlib_module_names}, path.name


# --- it can fail


@contextmanager
def reached(server: type[Server], binding: str) -> Iterator[tuple[Client, Client | None]]:
    """Yield a client of one of the servers written for this and, over HTTP, another principal's client."""
    if binding == "process":
        yield InProcess(server().answer), None
    elif binding == "stdio":
        client = Stdio([sys.executable, "-m", "tests.conformance.wrong_servers", server.__name__])
        try:
            yield client, None
        finally:
            client.close()
    else:
        with listening(server(http=True, tokens=TOKENS)) as http:
            threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
            url = f"http://127.0.0.1:{http.server_port}/"
            one, another = (Http(url, token) for token in TOKENS)
            yield one, another
            http.shutdown()


def failures(came: list[Outcome]) -> dict[str, str]:
    return {outcome.check.name: outcome.why for outcome in came if outcome.state is State.FAILED}


@pytest.mark.parametrize("binding", ["process", "stdio", "http"])
def test_a_right_server_passes_every_check(binding: str) -> None:
    with reached(Server, binding) as (client, other):
        came = judged(client, other)
    assert failures(came) == {}
    assert [outcome.check.name for outcome in came if outcome.state is State.SKIPPED] == []


def test_a_right_server_of_core_alone_passes_too() -> None:
    class CoreAlone(Server):
        capabilities = ("core",)

    came = judged(InProcess(CoreAlone().answer))
    assert failures(came) == {}
    skipped = {outcome.check.section for outcome in came if outcome.state is State.SKIPPED}
    assert skipped >= {"tiers", "salience", "scopes", "sessions", "keys", "embeddings", "external", "events", "prompt"}


def test_a_right_read_only_server_passes_its_profile() -> None:
    class ReadOnly(Server):
        read_only = True

    came = judged(InProcess(ReadOnly().answer))
    assert failures(came) == {}
    assert {outcome.check.section for outcome in came if outcome.state is State.PASSED} >= {"core", "read_only"}


def test_there_are_many_ways_to_be_wrong() -> None:
    assert len(WRONG) >= 25
    assert set(CAUGHT_BY.values()) <= {check.name for check in ALL_CHECKS}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_server_is_caught_by_the_check_meant_for_it(name: str) -> None:
    meant = CAUGHT_BY[name]
    with reached(WRONG[name], BINDINGS[name]) as (client, other):
        target = Target(client, other, patience=1)  # shorter waits for messages that never come
        target.meet()
        if isinstance(client, Stdio) and (meant == "stdio.the_end_of_stdin_ends_it" or name == "HangsForGood"):
            client.timeout = 2  # after the start: the time to end, or to answer
        came = outcome(next(check for check in ALL_CHECKS if check.name == meant), target)
    assert came.state is State.FAILED
    assert came.why


def test_an_answer_to_a_notification_is_found_however_early_it_comes() -> None:
    with reached(WRONG["AnswersNotifications"], "stdio") as (client, _):
        assert isinstance(client, Stdio)
        client.notify("memory/describe", {})
        client.notify("memory/no/such", {})
        assert client.wait_for(lambda came: came.is_response, 0, client.timeout)
        with pytest.raises(NoAnswer, match="answered with id None"):
            client.request("memory/describe")


# --- it goes on when a server dies


def judged_by_name(name: str, timeout: float = 20, sections: Sequence[str] = SECTIONS) -> list[Outcome]:
    """Return the outcomes for a wrong server on stdio; `timeout` is for its answers after the start."""
    with reached(WRONG[name], "stdio") as (client, _):
        assert isinstance(client, Stdio)
        target = Target(client)
        target.meet()
        client.timeout = timeout
        return list(outcomes(target, sections))


ANEW = "\nIt was restarted, and answers."


@pytest.mark.parametrize(
    ("name", "sentences"),
    [
        (
            "DiesOfAnUnusedKey",
            "memory/fetch was not answered\nThe server died with exit code 3; the last lines of its stderr:"
            "\n  1\n  2\n  3\n  there is no such page\n   [31mthe pages are gone",
        ),
        ("DiesInTheMiddleOfALine", "The server died with exit code 4; its stderr is empty."),
        ("IsKilled", "The server died of SIGKILL; its stderr is empty."),
        ("ClosesItsStdout", "The server closed its stdout and did not exit; it was killed; its stderr is empty."),
        (
            "WritesWithoutEnd",
            "The server was killed, since the last 10,000 lines of its stdout are not messages; its stderr is empty.",
        ),
    ],
)
def test_a_check_during_which_a_server_dies_says_so(name: str, sentences: str) -> None:
    """The checks after that one run against a fresh server."""
    came = judged_by_name(name)
    failed = failures(came)
    # what the server wrote to stdout counts all the same, unless it was cut off
    beside = {"stdio.stdout_carried_only_json_rpc"} if name == "WritesWithoutEnd" else set()
    assert failed.keys() == {CAUGHT_BY[name], *beside}
    assert failed[CAUGHT_BY[name]].endswith(sentences + ANEW)
    assert [outcome for outcome in came if outcome.state is State.NOT_ASKED] == []


def test_a_server_that_answers_no_more_is_killed_and_started_anew() -> None:
    failed = failures(judged_by_name("HangsForGood", timeout=3, sections=["keys"]))
    assert failed == {
        CAUGHT_BY["HangsForGood"]: "memory/fetch was not answered within 3 s\n"
        f"The server stopped answering: no answer within 3 s; it was killed.{ANEW}"
    }


def test_a_server_that_dies_at_each_start_is_given_up_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    code, report = summary(capsys, "--stdio", sys.executable, "-m", "tests.conformance.wrong_servers", "StartsOnce")
    assert code == 1
    assert report.count("FAIL") == 1
    assert report.count("The server died") == 2
    assert "The server died with exit code 3; the last lines of its stderr:\n          1\n" in report
    assert (
        "It was restarted 3 times, and did not answer. The server died with exit code 7; the last lines of its "
        "stderr:\n          cannot start: it is running already\n" in report
    )
    assert "Traceback" not in report
    assert re.search(r"; [1-9]\d+ not run, since the server is gone; \d+ passed, 1 failed, 0 skipped$", report)


def test_a_server_that_died_between_two_checks_fails_the_next() -> None:
    """The checks after that one run against a fresh server."""
    with reached(Server, "stdio") as (client, _):
        assert isinstance(client, Stdio)
        target = Target(client)
        target.meet()
        ended = client._process
        ended._popen.kill()
        assert ended.exit_code(20) == -9
        came = [outcome(check, target) for check in ALL_CHECKS if check.section == "salience"]
    assert failures(came) == {
        came[0].check.name: "Before this check: The server died of SIGKILL; its stderr is empty."
        f"{ANEW}\nThe calls of this check were answered."
    }
    assert {outcome.state for outcome in came[1:]} == {State.PASSED}


def dying(names: list[str]) -> Check:
    """Return a check that writes a record and kills the server; the record's content is added to `names`."""

    def run(target: Target) -> None:
        note = target.note()
        names.append(note["content"])
        target.remember(note)
        target.stdio._process._popen.kill()
        target.ask("describe")

    return Check("core.dying", "core", run, ("4.1-1",), (), None, None, True, False)


def test_what_a_dead_server_was_given_is_forgotten_by_the_next(tmp_path: Path) -> None:
    written: list[str] = []
    client = Stdio(store(tmp_path))
    try:
        target = Target(client)
        target.meet()
        came = outcome(dying(written), target)
        assert came.state is State.FAILED
        assert "The server died of SIGKILL" in came.why
        held = [record["content"] for record in target.records("timeline")]
        assert len(written) == 1
        assert held == []
    finally:
        client.close()


def test_a_server_that_dies_of_forgetting_is_not_asked_to_for_ever() -> None:
    came = judged_by_name("DiesOfForgetting", sections=["keys"])
    failed = failures(came)
    assert "keys.a_forgotten_key_is_free_again" in failed
    assert all("The server died with exit code 6" in why for why in failed.values())
    assert any(outcome.state is State.PASSED for outcome in came)
    assert [outcome for outcome in came if outcome.state is State.NOT_ASKED] == []


def test_a_server_over_http_that_goes_away_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    class GoesAway(Server):
        def nothing_at(self, key: str) -> None:
            if key.endswith("/nothing"):
                http.server_close()  # accepts no further connections

    one, another = TOKENS
    with listening(GoesAway(http=True, tokens=TOKENS)) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        url = f"http://127.0.0.1:{http.server_port}/"
        code, report = summary(capsys, "--timeout", "5", "--token", one, "--other-token", another, "--http", url)
        http.shutdown()
    assert code == 1
    assert report.count("FAIL") == 1
    assert re.search(
        r"The server at http://127\.0\.0\.1:\d+/ stopped answering\.\n"
        r" +It cannot be started from here, and did not come back within 5 s\.\n",
        report,
    )
    assert re.search(r"; \d+ not run, since the server is gone; \d+ passed, 1 failed, \d+ skipped$", report)


def test_a_server_over_http_that_comes_back_is_asked_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(http=True)

    def serve(port: int = 0) -> ThreadingHTTPServer:
        http = listening(server, port)
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return http

    def end(http: ThreadingHTTPServer) -> None:
        http.shutdown()
        http.server_close()

    first = serve()
    target = Target(Http(f"http://127.0.0.1:{first.server_port}/"))
    target.meet()
    end(first)
    anew: list[ThreadingHTTPServer] = []
    monkeypatch.setattr(time, "sleep", lambda _: anew.append(serve(first.server_port)))
    came = [outcome(check, target) for check in ALL_CHECKS if check.section == "keys"]
    assert len(anew) == 1
    end(anew[0])
    assert failures(came).keys() == {came[0].check.name}
    assert came[0].why.endswith("stopped answering.\nIt came back, and answers.")


# --- what cannot be judged


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (
            ["nosuch"],
            "The command `nosuch` cannot be started: No such file or directory. Expected the path of a program",
        ),
        (["no such", "--x"], "The command `'no such' --x` cannot be started: No such file or directory."),
        ([__file__], f"The command `{__file__}` cannot be started: Permission denied."),
        (["/"], "The command `/` cannot be started: Permission denied."),
        (["a\0b"], "cannot be started: embedded null byte."),
        ([sys.executable, "-c", "raise SystemExit(3)"], "The server died with exit code 3; its stderr is empty."),
        (
            [sys.executable, "-c", "raise SystemExit('no database')"],
            "The server died with exit code 1; the last lines of its stderr:\n  no database\n",
        ),
        (
            [sys.executable, "-c", "print('hello', flush=True); input()"],
            "; the last line of its stdout is not a message: b'hello\\n'. The server died with exit code 0",
        ),
        ([sys.executable, "-c", "while True: print('hello')"], "the last 10,000 lines of its stdout are not messages"),
    ],
    ids=["no such", "no such with arguments", "a file", "a folder", "a null", "ends", "says why", "junk", "a flood"],
)
def test_a_command_that_is_no_server_is_a_sentence(
    command: list[str], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    code = main(["--stdio", *command])
    report, noise = capfd.readouterr()
    assert code == 1
    assert report.startswith("The server cannot be judged: ")
    assert report.endswith("\n\n0 passed, 1 failed, 0 skipped\n")
    assert sentence in report
    assert "Traceback" not in report + noise


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stdio"], "--stdio: expected a server's command, got nothing"),
        (["--stdio", ""], "--stdio: expected a server's command, got nothing"),
        (["--http", ""], "--http: expected a URL such as http://127.0.0.1:8080/, got ''"),
        (["--http", "127.0.0.1:8080"], "expected a URL such as http://127.0.0.1:8080/, got '127.0.0.1:8080'"),
        (["--http", "http://here:x/"], "expected a URL such as http://127.0.0.1:8080/, got 'http://here:x/'"),
        ([], "expected --stdio CMD... or --http URL"),
    ],
)
def test_a_command_line_that_names_no_server_is_a_sentence(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


# --- our servers


def federation(folder: Path, head: str = "") -> list[str]:
    """Return the command of a router with four stores as its tiers."""
    ways = {
        "working": 'capacity = 12\nper_session = true\nspill_to = "episodic"\nrequired = true',
        "episodic": 'promote_to = "semantic"\npromote_after = 50',
        "semantic": "",
        "procedural": "",
    }
    tiers = [f'[tiers.{kind}]\nkind = "{kind}"\ncommand = {store(folder, kind)}\n{way}' for kind, way in ways.items()]
    path = folder / "federation.toml"
    path.write_text("\n".join([f"state = '{folder / 'router.db'}'", head, *tiers]))
    return [str(PROGRAMS / "a2m-router"), "--config", str(path), "--log-level", "warning"]


def summary(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Run the command; return its exit code and the whole report."""
    code = main(list(arguments))
    return code, capsys.readouterr().out


@contextmanager
def serving_http(command: list[str]) -> Iterator[str]:
    """Run a server as a process; yield the address that it logs."""
    with subprocess.Popen([*command, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield url
        finally:
            process.terminate()
            process.wait(30)


# a store works alike whatever its kind; A2M_EXAMPLES=2 tests every kind
KINDS = ["working", "episodic", "semantic", "procedural"] if scaled(1) > 1 else ["working"]


@pytest.mark.process
@pytest.mark.parametrize("kind", KINDS)
def test_a_store_passes_on_stdio(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = summary(capsys, "--stdio", *store(tmp_path, kind))
    assert code == 0, report
    assert report.splitlines()[-1] in MANUAL.splitlines()


@pytest.mark.process
def test_a_store_passes_on_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_http(store(tmp_path)) as url:
        code, report = summary(capsys, "--http", url)
    assert code == 0, report


@pytest.mark.slow
@pytest.mark.process
def test_the_router_passes_on_stdio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = summary(capsys, "--timeout", "60", "--stdio", *federation(tmp_path))
    assert code == 0, report
    assert report.endswith(" 0 failed, 0 skipped\n")  # there is no capability that it does not declare
    assert report.splitlines()[-1] in MANUAL.splitlines()


@pytest.mark.slow
@pytest.mark.process
def test_the_router_passes_on_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_http(federation(tmp_path)) as url:
        code, report = summary(capsys, "--http", url)
    assert code == 0, report


@pytest.mark.slow
@pytest.mark.process
def test_the_router_passes_on_http_with_principals(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    principals = ""
    for number, (token, owner) in enumerate(TOKENS.items()):
        monkeypatch.setenv(f"TOKEN_{number}", token)
        principals += f'[[serve.principals]]\nowner = "{owner}"\ntoken_env = "TOKEN_{number}"\n'
    one, another = TOKENS
    with serving_http(federation(tmp_path, principals)) as url:
        code, report = summary(capsys, "--token", one, "--other-token", another, "--http", url)
    assert code == 0, report


def test_the_router_passes_in_process(tmp_path: Path) -> None:
    config = Path(federation(tmp_path)[2])
    settings = load(config, os.environ)
    with start_blocking_portal() as portal:
        opened = running_federation(settings, links_for(settings, os.environ))
        with portal.wrap_async_context_manager(opened) as memory:
            client = InProcess(lambda message: portal.call(memory.answer, message, LOCAL))
            assert failures(judged(client)) == {}


# --- the command


def test_the_command_ends_with_the_counts_and_says_what_failed(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [sys.executable, "-m", "tests.conformance.wrong_servers", "ShowsTheNewestFirst"]
    code, report = summary(capsys, "--only", "core", "--stdio", *wrong)
    assert code == 1
    assert "FAIL  timeline ascends (§4.4-3)\n        memory/timeline: expected ascending created_at" in report
    assert re.search(r"^\d+ passed, [1-9]\d* failed, 0 skipped$", report.splitlines()[-1])
    failed = re.findall(r"^  FAIL  (.+) \(§", report, re.MULTILINE)
    assert "timeline ascends" in failed
    # the list of failures is at the end of the report
    assert report.splitlines()[-len(failed) - 2 : -1] == ["", *(f"failed: core: {title}" for title in failed)]


def test_where_nothing_failed_no_list_of_failures_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    right = [sys.executable, "-m", "tests.conformance.wrong_servers", "Server"]
    code, report = summary(capsys, "--only", "keys", "--stdio", *right)
    assert code == 0
    assert "failed:" not in report
    assert report.splitlines()[-2] == ""


@pytest.mark.parametrize("name", ["CutsContent", "CutsTextInMetadata"])
def test_what_was_cut_is_shown_where_it_was_cut(name: str) -> None:
    with reached(WRONG[name], "process") as (client, _):
        target = Target(client)
        target.meet()
        why = outcome(next(check for check in ALL_CHECKS if check.name == CAUGHT_BY[name]), target).why
    lengths = [int(each.replace(",", "")) for each in re.findall(r"of ([\d,]+) characters in all", why)]
    assert len(lengths) == 2
    assert lengths[0] > 1900 + lengths[1]
    assert len(why) < 400


def test_content_is_no_longer_than_the_server_takes() -> None:
    class TakesLittle(Server):
        limits: ClassVar[dict[str, int]] = {**Server.limits, "max_content_length": 1500}

    came = judged(InProcess(TakesLittle().answer))
    assert failures(came) == {}


def test_a_server_that_says_nothing_cannot_be_judged(capsys: pytest.CaptureFixture[str]) -> None:
    code, report = summary(capsys, "--stdio", sys.executable, "-c", "pass")
    assert (code, report.splitlines()[-1]) == (1, "0 passed, 1 failed, 0 skipped")


def test_what_cannot_be_tested_is_listed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    right = [sys.executable, "-m", "tests.conformance.wrong_servers", "Server"]
    code, report = summary(capsys, "--only", "salience", "--verbose", "--stdio", *right)
    assert code == 0
    listed = re.findall(r"^§(\S+) .*\n      not tested: \S", report, re.MULTILINE)
    assert listed == [sentence.id for sentence in SENTENCES if sentence.untested]


def test_the_list_names_every_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    code, listed = summary(capsys, "--list")
    assert code == 0
    assert re.findall(r"^§(\S+) ", listed, re.MULTILINE) == [sentence.id for sentence in SENTENCES]
