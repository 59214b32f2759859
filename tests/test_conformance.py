"""The conformance suite: that it accounts for the whole specification, that it can fail, and that our servers pass.

Where the specification's text is, A2M_SPECIFICATION may say; then its key words are counted, too.
"""

import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from router.a2m.stdio import LOCAL
from router.app import running_federation
from router.config import load
from router.tiers.starting import links_for
from tests.conformance.__main__ import main
from tests.conformance.checking import CHECKS, Target
from tests.conformance.client import Client, Http, InProcess, NoAnswer, Stdio
from tests.conformance.report import checks_of
from tests.conformance.running import ALL_CHECKS, Outcome, State, outcome, outcomes
from tests.conformance.sentences import COUNTS, KEY_WORDS, SENTENCES
from tests.conformance.small_server import Server, listening
from tests.conformance.wrong_servers import BINDINGS, CAUGHT_BY, WRONG

PACKAGE = Path(__file__).parent / "conformance"
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
    """How often each key word stands in each section of the specification."""
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
    for path in PACKAGE.glob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        assert {name.partition(".")[0] for name in imported} <= {"tests", *sys.stdlib_module_names}, path.name


# --- it can fail


@contextmanager
def reached(server: type[Server], binding: str) -> Iterator[tuple[Client, Client | None]]:
    """One of the servers written for this, and another principal's client over HTTP."""
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


def judged(client: Client, other: Client | None = None) -> list[Outcome]:
    target = Target(client, other)
    target.meet()
    return list(outcomes(target))


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
        target = Target(client, other, patience=1)  # what never comes need not be waited for longer
        target.meet()
        if isinstance(client, Stdio) and meant == "stdio.the_end_of_stdin_ends_it":
            client.timeout = 2  # once it has started: how long it may take to end
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


# --- our servers


COMMANDS = Path(sys.executable).parent


def store(folder: Path, kind: str = "episodic") -> list[str]:
    return [str(COMMANDS / "a2m-store"), str(folder / f"{kind}.db"), "--kind", kind, "--durability", "normal"]


def federation(folder: Path, head: str = "") -> list[str]:
    """A router's command, with four stores as its tiers."""
    ways = {
        "working": 'capacity = 12\nper_session = true\nspill_to = "episodic"\nrequired = true',
        "episodic": 'promote_to = "semantic"\npromote_after = 50',
        "semantic": "",
        "procedural": "",
    }
    tiers = [f'[tiers.{kind}]\nkind = "{kind}"\ncommand = {store(folder, kind)}\n{way}' for kind, way in ways.items()]
    path = folder / "federation.toml"
    path.write_text("\n".join([f"state = '{folder / 'router.db'}'", head, *tiers]))
    return [str(COMMANDS / "a2m-router"), "--config", str(path), "--log-level", "warning"]


def summary(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code and the whole report."""
    code = main(list(arguments))
    return code, capsys.readouterr().out


@contextmanager
def serving_http(command: list[str]) -> Iterator[str]:
    """A server as a process, and the address it says it listens on."""
    with subprocess.Popen([*command, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = next(found[0] for line in process.stderr if (found := re.search(r"http://\S+", line)))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield url
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.parametrize("kind", ["working", "episodic", "semantic", "procedural"])
def test_a_store_passes_on_stdio(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = summary(capsys, "--stdio", *store(tmp_path, kind))
    assert code == 0, report


def test_a_store_passes_on_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_http(store(tmp_path)) as url:
        code, report = summary(capsys, "--http", url)
    assert code == 0, report


def test_the_router_passes_on_stdio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = summary(capsys, "--timeout", "60", "--stdio", *federation(tmp_path))
    assert code == 0, report
    assert report.endswith(" 0 failed, 0 skipped\n")  # there is no capability that it does not declare


def test_the_router_passes_on_http(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving_http(federation(tmp_path)) as url:
        code, report = summary(capsys, "--http", url)
    assert code == 0, report


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
