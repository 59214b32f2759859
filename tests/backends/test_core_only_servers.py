"""The servers that stand for third-party ones: they keep to the protocol, lose nothing, and the lying ones do lie."""

import http.client
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from a2m_router.conformance.checking import READ_ONLY, Target
from a2m_router.conformance.client import Client, Http, InProcess, Stdio, rendered
from a2m_router.conformance.running import Outcome, State, outcomes
from tests.servers import javascript
from tests.servers.bindings import over_http
from tests.servers.core_only import CoreOnly, main
from tests.servers.habits import HABITS
from tests.servers.lying import LIES
from tests.servers.protocol import CAPABILITIES
from tests.support.examples import scaled
from tests.support.paths import SERVERS

NODE: Final = shutil.which("node")
FURTHER: Final = tuple(name for name in CAPABILITIES if name != "core")

# checks that a server may fail that ignores where on memory/timeline, which is a SHOULD (§4.4)
NO_WHERE_ON_TIMELINE: Final = {"core.where_selects_by_field_and_by_metadata", "core.where_works_on_timeline"}

needs_node = pytest.mark.skipif(NODE is None, reason="there is no node")

IN_PYTHON: Final = [sys.executable, str(SERVERS / "core_only.py")]
IN_JAVASCRIPT: Final = [NODE or "node", str(SERVERS / "core_only.mjs")]
EITHER: Final = [pytest.param(IN_PYTHON, id="python"), pytest.param(IN_JAVASCRIPT, id="node", marks=needs_node)]


def failing(client: Client) -> Iterator[Outcome]:
    """Yield the checks of the conformance suite that a server fails, one by one."""
    target = Target(client)
    target.meet()
    return (came for came in outcomes(target) if came.state is State.FAILED)


def failures(client: Client) -> dict[str, str]:
    """Return all failed checks with their reasons. Ends the connection."""
    try:
        return {came.check.name: came.why for came in failing(client)}
    finally:
        client.close()


def call(server: CoreOnly, method: str, **params: Any) -> Any:
    """Return the result, or the error's code."""
    answer = server.answer(rendered(f"memory/{method}", params, 1))
    assert answer is not None
    response = json.loads(answer)
    return response["result"] if "result" in response else response["error"]["code"]


def contents(server: CoreOnly, method: str = "timeline", **params: Any) -> list[str]:
    return [record["content"] for record in call(server, method, **params)["records"]]


# --- they keep to the protocol


def test_they_share_no_code_with_what_they_stand_behind() -> None:
    for path in SERVERS.glob("*.py"):
        imported = re.findall(r"^\s*(?:from|import) ([\w.]+)", path.read_text(), re.MULTILINE)
        ours = {name for name in imported if name.partition(".")[0] not in sys.stdlib_module_names}
        # the server of another protocol uses that protocol's SDK, and that SDK's pydantic
        assert all(name.startswith(("tests.servers", "mcp.", "pydantic")) for name in ours), path.name


def test_core_fails_nothing_but_where_on_timeline() -> None:
    assert failures(InProcess(CoreOnly().answer)).keys() == NO_WHERE_ON_TIMELINE


def test_core_passes_with_where_on_timeline() -> None:
    assert failures(InProcess(CoreOnly(where_on_timeline=True).answer)) == {}


def test_a_server_with_limits_passes() -> None:
    limits = {"max_records_per_call": 20, "max_recall_limit": 50, "max_content_length": 5000}
    assert failures(InProcess(CoreOnly(limits=limits, where_on_timeline=True).answer)) == {}


def test_a_read_only_server_passes_its_profile() -> None:
    server = CoreOnly(read_only=True)
    assert failures(InProcess(server.answer)) == {}
    assert call(server, "remember", records=[]) == call(server, "forget") == READ_ONLY


@pytest.mark.parametrize("capability", FURTHER)
def test_each_further_capability_passes(capability: str) -> None:
    server = CoreOnly(capabilities=[capability], where_on_timeline=True)
    assert failures(InProcess(server.answer)) == {}
    assert call(server, "describe")["capabilities"] == ["core", capability]


def test_all_further_capabilities_pass_together() -> None:
    assert failures(InProcess(CoreOnly(capabilities=FURTHER).answer)) == {}


def test_the_suite_s_metadata_survives_javascript() -> None:
    # its numbers are doubles, no name is an integer, and its strings are whole; what JavaScript changes is tested below
    assert failures(InProcess(CoreOnly(capabilities=FURTHER, like_javascript=True).answer)) == {}


def test_the_command_passes_on_stdio(tmp_path: Path) -> None:
    command = [*IN_PYTHON, "--file", str(tmp_path / "records"), "--where-on-timeline"]
    assert failures(Stdio(command)) == {}


@needs_node
def test_the_server_in_javascript_passes_on_stdio(tmp_path: Path) -> None:
    command = [*IN_JAVASCRIPT, "--file", str(tmp_path / "records"), "--where-on-timeline"]
    assert failures(Stdio(command)) == {}


@needs_node
def test_the_server_in_javascript_fails_nothing_but_where_on_timeline() -> None:
    assert failures(Stdio(IN_JAVASCRIPT)).keys() == NO_WHERE_ON_TIMELINE


def test_a_server_passes_over_http() -> None:
    with over_http(CoreOnly(where_on_timeline=True).answer) as url:
        assert failures(Http(url)) == {}


@pytest.mark.process
def test_the_command_passes_over_http() -> None:
    command = [*IN_PYTHON, "--http", "127.0.0.1:0", "--where-on-timeline"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert failures(Http(process.stderr.readline().strip())) == {}
        finally:
            process.terminate()


def test_a_connection_is_kept_whatever_is_refused() -> None:
    described = rendered("memory/describe", {}, 1)
    asked: list[tuple[str, str, dict[str, str]]] = [
        ("POST", "/", {}),
        ("POST", "/", {"Origin": "http://elsewhere.example"}),
        ("POST", "/", {"A2M-Protocol-Version": "a2m/0.9"}),
        ("POST", "/elsewhere", {}),
        ("GET", "/", {}),
        ("POST", "/", {}),
    ]
    with over_http(CoreOnly().answer) as url:
        connection = http.client.HTTPConnection(urlsplit(url).netloc)
        statuses = []
        sockets = set()
        for verb, path, headers in asked:
            connection.request(verb, path, described if verb == "POST" else None, headers)
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
            sockets.add(connection.sock)
        connection.close()
    assert statuses == [200, 403, 400, 404, 405, 200]
    assert len(sockets) == 1


def test_the_command_declares_no_scopes_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(CoreOnly, ["--http", "127.0.0.1:0", "--capability", "scopes"])
    assert "scopes cannot be declared over HTTP" in capsys.readouterr().err


def test_options_reach_the_server(tmp_path: Path) -> None:
    options = ["--capability", "tiers", "--tier", "now=working", "--tier", "later=episodic", "--limit"]
    client = Stdio([*IN_PYTHON, *options, "max_recall_limit=9", "--read-only", "--like-javascript"])
    described = client.request("memory/describe")["result"]
    refused = client.request("memory/consolidate")["error"]["code"]
    client.close()
    assert [(tier["name"], tier["kind"]) for tier in described["tiers"]] == [("now", "working"), ("later", "episodic")]
    assert described["limits"] == {"max_recall_limit": 9}
    assert refused == READ_ONLY


@pytest.mark.parametrize(
    "wrong", [{"capabilities": ["events"]}, {"limits": {"max_words": 1}}, {"tiers": {"hot": "warm"}}]
)
def test_what_it_cannot_do_is_not_declared(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected some of .*, got (events|max_words|warm)"):
        CoreOnly(**wrong)


@pytest.mark.parametrize("command", EITHER)
def test_created_at_is_the_server_s_own_and_unknown_fields_are_dropped(command: list[str]) -> None:
    record = {"id": "a", "content": "a b", "created_at": "1999-01-01T00:00:00.000Z", "mood": "good", "key": "k"}
    client = Stdio(command)
    client.request("memory/remember", {"records": [record]})
    client.request("memory/remember", {"records": [{"id": "a", "content": "another"}]})
    (shown,) = client.request("memory/recall", {"query": "b c"})["result"]["records"]
    client.close()
    assert shown.keys() == {"id", "content", "created_at", "score"}
    assert (shown["content"], shown["score"]) == ("a b", 0.5)
    assert shown["created_at"] > "2020"


@pytest.mark.parametrize("command", EITHER)
def test_forget_ignores_no_selector(command: list[str]) -> None:
    client = Stdio(command)
    client.request("memory/remember", {"records": [{"content": "one two"}, {"content": "two"}]})
    codes = [
        client.request("memory/forget", {"where": {}, **undeclared})["error"]["code"]
        for undeclared in ({"tier": "hot"}, {"key_prefix": "a"})
    ]
    wordless = client.request("memory/forget", {"query": " ?"})["error"]["code"]
    forgotten = client.request("memory/forget", {"query": "two one"})["result"]["forgotten"]
    left = [record["content"] for record in client.request("memory/timeline")["result"]["records"]]
    client.close()
    assert (codes, wordless, forgotten, left) == ([-32003, -32003], -32602, 1, ["two"])


@pytest.mark.parametrize("command", EITHER)
def test_what_nests_too_deeply_is_refused_and_the_rest_still_read(command: list[str]) -> None:
    client = Stdio(command)
    codes = []
    for depth in (150, 250, 100_000):
        nested = b"[" * depth + b"]" * depth
        body = rendered("memory/remember", {"records": [{"content": "a", "metadata": {"nested": 0}}]}, 1)
        codes.append(client.raw(body.replace(b'"nested": 0', b'"nested": ' + nested)).get("error", {}).get("code"))
    found = client.request("memory/timeline")["result"]["records"]
    client.close()
    assert codes[:2] == [None, -32602]
    assert codes[2] in (-32602, -32600)  # nested so deeply that Python does not read it at all
    assert len(found) == 1


def test_vectors_are_doubles_of_one_width_and_rank_by_cosine() -> None:
    server = CoreOnly(capabilities=["embeddings"])
    near, far, opposite = [2, 0.2, 0], [1e200, 1e200, 0], [-1, 0, 0]
    records = [{"content": name, "embedding": vector} for name, vector in (("far", far), ("near", near))]
    call(server, "remember", records=[*records, {"content": "opposite", "embedding": opposite}, {"content": "none"}])
    found = call(server, "recall", embedding=[1, 0, 0], embeddings=True)["records"]
    assert [record["content"] for record in found] == ["near", "far", "opposite"]
    assert found[0]["embedding"] == [2.0, 0.2, 0.0]
    assert [record["score"] for record in found[1:]] == [pytest.approx((1 + 0.5**0.5) / 2), 0]
    assert call(server, "recall", embedding=[1, 0]) == -32008


def test_a_replaced_record_keeps_its_birth_and_what_it_has_earned(monkeypatch: pytest.MonkeyPatch) -> None:
    times = (f"2026-07-28T10:15:30.{number:03}Z" for number in range(1000))
    monkeypatch.setattr("tests.servers.core_only._now", lambda: next(times))
    server = CoreOnly(capabilities=["keys", "salience", "tiers"])
    old = {"content": "old", "key": "k", "role": "user", "tier": "cold", "salience": 3}
    (id,) = call(server, "remember", records=[old])["ids"]
    call(server, "recall")
    again = call(server, "remember", records=[{"id": "other", "content": "new", "key": "k"}])["ids"]
    (record,) = call(server, "timeline")["records"]
    assert again == [id]
    assert record == {
        "id": id,
        "content": "new",
        "key": "k",
        "revision": 1,
        "created_at": "2026-07-28T10:15:30.000Z",
        "tier": "cold",
        "salience": 3,
        "access_count": 1,
        "accessed_at": "2026-07-28T10:15:30.001Z",
    }
    call(server, "remember", records=[{**old, "id": id, "content": "new", "role": "tool"}])  # the same write again
    assert call(server, "timeline")["records"] == [record]


# --- like JavaScript


class Node:
    """A process that re-encodes texts: it reads a line with a list of them, and writes a line with the results."""

    _SCRIPT = """
        import { createInterface } from 'node:readline';
        const reencoded = (text) => { try { return JSON.stringify(JSON.parse(text)); } catch { return null; } };
        for await (const line of createInterface({ input: process.stdin }))
            console.log(JSON.stringify(JSON.parse(line).map(reencoded)));
    """

    def __init__(self) -> None:
        command = [NODE or "node", "--input-type=module", "-e", self._SCRIPT]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def reencoded(self, texts: list[str]) -> list[str | None]:
        """Return each text as JavaScript writes it after reading it; None if it cannot read it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(texts).encode() + b"\n")
        self.process.stdin.flush()
        came: list[str | None] = json.loads(self.process.stdout.readline())
        return came


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    node = Node()
    with node.process:
        yield node


def reencoded(text: str) -> str | None:
    try:
        return javascript.reencoded(text)
    except ValueError:
        return None


space = st.sampled_from(["", "", "", " ", "\n", "\t\r"])
numbers = st.one_of(
    st.from_regex(
        re.compile(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,30})?([eE][+-]?[0-9]{1,3})?", re.ASCII), fullmatch=True
    ),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(2**70), 2**70).map(str),
    st.builds(lambda digits, places: f"{digits}e{places}", st.integers(1, 10**17), st.integers(-30, 30)),
)
pieces = st.one_of(
    st.characters(exclude_characters='"\\', exclude_categories=["Cs"], min_codepoint=32),
    st.sampled_from(['\\"', "\\\\", "\\/", "\\b", "\\f", "\\n", "\\r", "\\t", "\\ud83d\\ude00", "\\ude00\\ud83d"]),
    st.integers(0, 0xFFFF).map(lambda unit: f"\\u{unit:04X}"),
    st.integers(0xD7FF, 0xE000).map(lambda unit: f"\\u{unit:04x}"),
)
strings = st.lists(pieces, max_size=6).map(lambda parts: f'"{"".join(parts)}"')
names = st.one_of(
    st.sampled_from(["0", "1", "10", "2", "01", "-1", "1.0", "b", "a", "", "__proto__", "4294967294", "4294967295"]),
    st.integers(0, 2**33).map(str),
).map(json.dumps)


def joined(brackets: str, parts: list[str], gap: str) -> str:
    return f"{brackets[0]}{gap}{f'{gap},{gap}'.join(parts)}{gap}{brackets[1]}"


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    members = st.tuples(names | strings, space, inner).map(lambda parts: f"{parts[0]}{parts[1]}:{parts[2]}")
    return st.one_of(
        st.builds(joined, st.just("[]"), st.lists(inner, max_size=5), space),
        st.builds(joined, st.just("{}"), st.lists(members, max_size=6), space),
    )


words = st.sampled_from(["true", "false", "null", "NaN", "Infinity", "-Infinity", "undefined"])
values = st.recursive(st.one_of(numbers, strings, words), nested, max_leaves=12)
almost = st.text('{}[]",:0123456789.eE+-\\untrfals \u2028\x1f', max_size=12)


@pytest.mark.process
@needs_node
@settings(max_examples=scaled(20))
@given(texts=st.lists(values | almost, min_size=1, max_size=8))
@example(texts=["1e21", "1e20", "123456789012345680000", "1e-6", "1e-7", "-0", "-1e-400", "1e400", "5e-324", "0.1e-6"])
@example(
    texts=[
        '{"2":1,"b":2,"1":3,"2":4}',
        '{"b":0,"4294967295":1,"4294967294":2}',
        '["\\ud800","\\udc00\\ud800"]',
        "01",
        "",
    ]
)
def test_it_agrees_with_javascript_on_every_text(node: Node, texts: list[str]) -> None:
    assert [reencoded(text) for text in texts] == node.reencoded(texts)


CHANGED: Final = {
    "123456789012345678901234567890": "1.2345678901234568e+29",
    "9007199254740993": "9007199254740992",
    "1.0": "1",
    "1e400": "null",
    "-0": "0",
    "1E-7": "1e-7",
    '{"b":1,"2":2,"a":3,"1":4,"b":5}': '{"1":4,"2":2,"b":5,"a":3}',
    '"\\ud800\\uDC00\\ud83d"': '"\U00010000\\ud83d"',
}


def metadata_sent_back(ask: Callable[[bytes], bytes | None], written: str) -> str:
    """Write metadata with `written` in it; return how the server spells that in its answer."""
    record = '{"id":"a","content":"a","metadata":{"it":' + written + "}}"
    ask(b'{"jsonrpc":"2.0","id":1,"method":"memory/remember","params":{"records":[' + record.encode() + b"]}}")
    answer = ask(rendered("memory/timeline", None, 2)) or b""
    spelled = re.search(r'"metadata": ?\{"it": ?(.*?)\}\}\]\}', answer.decode())
    assert spelled is not None, answer
    return spelled[1].removesuffix(" ")


@pytest.mark.parametrize("written", CHANGED)
def test_metadata_comes_back_as_javascript_spells_it(written: str) -> None:
    assert metadata_sent_back(CoreOnly(like_javascript=True).answer, written) == CHANGED[written]


@needs_node
@pytest.mark.parametrize("written", CHANGED)
def test_metadata_comes_back_from_javascript_itself_the_same(written: str) -> None:
    client = Stdio(IN_JAVASCRIPT)

    def ask(line: bytes) -> bytes:
        client.raw(line)
        return client.arrived[-1].line.rstrip(b"\n")

    try:
        assert metadata_sent_back(ask, written) == CHANGED[written]
    finally:
        client.close()


def test_a_python_server_keeps_long_integers_and_refuses_non_doubles() -> None:
    server = CoreOnly()
    number = 123456789012345678901234567890
    assert metadata_sent_back(server.answer, f"[{number},1.0]").replace(" ", "") == f"[{number},1.0]"
    for endless in ("1e400", "9" * 5000):
        body = rendered("memory/remember", {"records": [{"content": "a", "metadata": {"it": "endless"}}]}, 1)
        answer = json.loads(server.answer(body.replace(b'"endless"', endless.encode())) or b"")
        assert answer["error"]["code"] == -32602


# --- they lose nothing


@pytest.mark.process
@pytest.mark.parametrize("command", EITHER)
def test_what_was_acknowledged_survives_a_kill(command: list[str], tmp_path: Path) -> None:
    command = [*command, "--file", str(tmp_path / "records")]
    written = {f"id{number}": f"record {number}" for number in range(300)}
    calls = [
        rendered("memory/remember", {"records": [{"id": "gone", "content": "gone"}]}, "gone"),
        rendered("memory/forget", {"ids": ["gone"]}, "forgotten"),
        *(rendered("memory/remember", {"records": [{"id": id, "content": written[id]}]}, id) for id in written),
    ]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"".join(call + b"\n" for call in calls))  # less than a pipe holds
        process.stdin.flush()
        answers = [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal.SIGKILL)
        answers += process.stdout.read().splitlines(keepends=True)
    acknowledged = {json.loads(answer)["id"] for answer in answers if answer.endswith(b"\n")} - {"gone", "forgotten"}
    assert len(acknowledged) >= 38
    client = Stdio(command)
    left = {record["id"]: record["content"] for record in client.request("memory/timeline")["result"]["records"]}
    client.close()
    assert acknowledged <= left.keys()
    assert left.items() <= written.items()


def test_every_write_is_synced_before_it_is_acknowledged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def synced(file: int) -> None:
        if stat.S_ISREG(os.fstat(file).st_mode):  # its folder is synced once, too
            sizes.append(os.fstat(file).st_size)

    monkeypatch.setattr(os, "fsync", synced)
    path = tmp_path / "records"
    server = CoreOnly(path)
    call(server, "remember", records=[{"id": "a", "content": "a"}, {"content": "b"}])
    assert sizes == [path.stat().st_size]
    call(server, "forget", ids=["a"])
    assert len(sizes) == 2
    assert sizes[-1] == path.stat().st_size
    call(server, "timeline")
    assert len(sizes) == 2


ids = st.sampled_from(["a", "b", "c", "d"])
entries = st.fixed_dictionaries({"id": ids, "key": ids, "content": st.sampled_from(["x", "y"])}).map(
    lambda entry: {**entry, "embedding": [1, len(entry)]}
)
some_ids = st.lists(ids, min_size=1, max_size=2)
operations: Final[st.SearchStrategy[tuple[str, dict[str, Any]]]] = st.one_of(
    st.tuples(st.just("remember"), st.fixed_dictionaries({"records": st.lists(entries, max_size=4)})),
    st.tuples(st.just("forget"), st.fixed_dictionaries({"ids": some_ids})),
    st.tuples(st.just("promote"), st.fixed_dictionaries({"ids": some_ids, "tier": st.just("cold")})),
    st.tuples(st.just("reinforce"), st.fixed_dictionaries({"ids": some_ids})),
    st.tuples(st.just("recall"), st.just({"query": "x"})),
)


@settings(max_examples=scaled(12), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(calls=st.lists(operations, max_size=10))
def test_what_is_opened_again_is_what_it_was(tmp_path: Path, calls: list[tuple[str, dict[str, Any]]]) -> None:
    path = tmp_path / os.urandom(8).hex()
    server = CoreOnly(path, capabilities=FURTHER)
    for method, params in calls:
        assert isinstance(call(server, method, **params), dict)
    again = CoreOnly(path, capabilities=FURTHER)
    assert call(again, "timeline", embeddings=True) == call(server, "timeline", embeddings=True)
    assert call(again, "describe") == call(server, "describe")


@pytest.mark.parametrize("command", EITHER)
def test_a_last_line_without_its_end_is_cut_off(command: list[str], tmp_path: Path) -> None:
    path = tmp_path / "records"
    for number in range(3):
        client = Stdio([*command, "--file", str(path)])
        found = [record["content"] for record in client.request("memory/timeline")["result"]["records"]]
        assert found == [f"é {before}" for before in range(number)]
        client.request("memory/remember", {"records": [{"content": f"é {number}"}]})
        client.close()
        with path.open("ab") as file:
            file.write(b'{"put": [{"id": "torn", "conte\xc3')


# --- the lying ones lie, and the honest one does not

THREE: Final = [
    {"id": "a", "content": "the deploy  key\nrotates every 90 days", "metadata": {"n": 1}},
    {"id": "b", "content": "the deploy key", "metadata": {"n": 2}},
    {"id": "c", "content": "a key", "metadata": {"n": 2}},
]


def ids_of(found: Any) -> list[str | None]:
    return [record.get("id") for record in found["records"]]


def with_three(server: CoreOnly) -> CoreOnly:
    call(server, "remember", records=THREE)
    return server


def timeline_is_there(server: CoreOnly) -> Any:
    listed = "memory/timeline" in call(server, "describe")["methods"]
    came = call(server, "timeline")
    return listed, came if isinstance(came, int) else "answered"


def ids_acknowledged(server: CoreOnly) -> Any:
    return call(server, "remember", records=THREE)["ids"], len(contents(server))


def given_ids_are_kept(server: CoreOnly) -> Any:
    came = call(server, "remember", records=THREE)["ids"]
    call(server, "remember", records=THREE)
    return came == ["a", "b", "c"], "a" in ids_of(call(server, "timeline")), len(contents(server))


def scores_recalled(server: CoreOnly) -> Any:
    return [record["score"] for record in call(with_three(server), "recall", query="the deploy key rotates")["records"]]


def ids_shown(server: CoreOnly) -> Any:
    with_three(server)
    return ids_of(call(server, "recall", query="the deploy key")), ids_of(call(server, "timeline"))


def ids_where(server: CoreOnly) -> Any:
    with_three(server)
    found = [ids_of(call(server, method, where={"n": 1})) for method in ("recall", "timeline")]
    return [sorted(ids) for ids in found]


def ids_limited(server: CoreOnly) -> Any:
    with_three(server)
    return [ids_of(call(server, method, limit=1)) for method in ("recall", "timeline")]


def records_recalled(server: CoreOnly) -> Any:
    return type(call(with_three(server), "recall", query="days")["records"])


def forgotten_and_left(server: CoreOnly) -> Any:
    return call(with_three(server), "forget", ids=["a", "c", "z"]), ids_of(call(server, "timeline"))


def acknowledged_and_left(server: CoreOnly) -> Any:
    came = [call(server, "remember", records=[record])["ids"] for record in THREE]
    return came, ids_of(call(server, "timeline"))


def content_kept(server: CoreOnly) -> Any:
    return contents(with_three(server))[0]


def trailing_space_kept(server: CoreOnly) -> Any:
    call(server, "remember", records=[{"content": " kept? \n"}])
    return contents(server)[0]


def letters_kept(server: CoreOnly) -> Any:
    call(server, "remember", records=[{"content": "cafe\u0301"}])
    return contents(server)[0]


def metadata_kept(server: CoreOnly) -> Any:
    return [record.get("metadata") for record in call(with_three(server), "timeline")["records"]]


def protocol_described(server: CoreOnly) -> Any:
    return call(server, "describe", protocol="a2m/0.1")["protocol"]


def capabilities_described(server: CoreOnly) -> Any:
    return call(server, "describe")["capabilities"]


def writes_refused(server: CoreOnly) -> Any:
    calls: list[tuple[str, dict[str, Any]]] = [("remember", {"records": THREE}), ("forget", {"ids": ["a"]})] * 2
    return [call(server, method, **params) == READ_ONLY for method, params in calls]


# for each lie: the function that looks at it, what an honest server shows, and what the lying one shows
LOOKED_AT: Final[dict[str, tuple[Callable[[CoreOnly], Any], Any, Any]]] = {
    "HasNoTimeline": (timeline_is_there, (True, "answered"), (True, -32601)),
    "DeclinesTimeline": (timeline_is_there, (True, "answered"), (True, -32003)),
    "AnswersWithFewerIds": (ids_acknowledged, (["a", "b", "c"], 3), (["a", "b"], 3)),
    "ChoosesOtherIds": (given_ids_are_kept, (True, True, 3), (False, False, 6)),
    "ScoresAscending": (scores_recalled, [1, 0.75, 0.25], [0.25, 0.75, 1]),
    "LeavesOutAnId": (ids_shown, (["b", "a", "c"], ["a", "b", "c"]), ([None, "a", "c"], [None, "b", "c"])),
    "RepeatsARecord": (ids_shown, (["b", "a", "c"], ["a", "b", "c"]), (["b", "b", "a", "c"], ["a", "b", "c"])),
    "IgnoresWhere": (ids_where, [["a"], ["a"]], [["a", "b", "c"], ["a", "b", "c"]]),
    "IgnoresLimit": (ids_limited, [["c"], ["c"]], [["c", "b", "a"], ["a", "b", "c"]]),
    "AnswersRecallWithAString": (records_recalled, list, str),
    "ForgetsNothing": (forgotten_and_left, ({"forgotten": 2}, ["b"]), ({"forgotten": 2}, ["a", "b", "c"])),
    "LosesWrites": (
        acknowledged_and_left,
        ([["a"], ["b"], ["c"]], ["a", "b", "c"]),
        ([["a"], ["b"], ["c"]], ["a", "c"]),
    ),
    "TruncatesContent": (content_kept, THREE[0]["content"], "the deploy  key\nrota"),
    "RewritesContent": (content_kept, THREE[0]["content"], "the deploy key rotates every 90 days"),
    "TrimsContent": (trailing_space_kept, " kept? \n", " kept?"),
    "ComposesContent": (letters_kept, "cafe\u0301", "caf\xe9"),
    "DropsMetadata": (metadata_kept, [{"n": 1}, {"n": 2}, {"n": 2}], [None, None, None]),
    "SpeaksAnotherVersion": (protocol_described, "a2m/0.1", "a2m/0.2"),
    "DeclaresNoCore": (capabilities_described, ["core"], []),
    "IsReadOnlySometimes": (writes_refused, [False] * 4, [False, True] * 2),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_server_differs_from_an_honest_one_as_it_is_named(lie: str) -> None:
    look, honest, lying = LOOKED_AT[lie]
    assert look(CoreOnly(where_on_timeline=True)) == honest
    assert look(LIES[lie](where_on_timeline=True)) == lying
    assert call(LIES[lie](), "describe")["name"] == lie


@pytest.mark.parametrize("lie", LIES)
def test_the_suite_catches_every_lie(lie: str) -> None:
    client = InProcess(LIES[lie](where_on_timeline=True).answer)
    assert next(failing(client), None) is not None


def test_a_lying_server_runs_as_a_process() -> None:
    client = Stdio([sys.executable, str(SERVERS / "lying.py"), "SpeaksAnotherVersion", "--limit", "max_recall_limit=5"])
    described = client.request("memory/describe")["result"]
    client.close()
    assert (described["protocol"], described["limits"]) == ("a2m/0.2", {"max_recall_limit": 5})


# --- servers with habits

METADATA: Final = {"a2m-router": "{}", "n": [1, {"z": 1, "b": 2}], "b": 1}


def answered(server: CoreOnly) -> tuple[str, dict[str, Any]]:
    """Return a timeline of one record as text, without the moment, and the record."""
    call(server, "remember", records=[{"id": "a", "content": " as \n given ", "metadata": METADATA}])
    answer = (server.answer(rendered("memory/timeline", {}, 1)) or b"").decode()
    timeless = re.sub(r"\.\d{3}(?=[Z+])", ".", re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d", "", answer))
    return timeless, json.loads(answer)["result"]["records"][0]


@pytest.mark.parametrize("habit", HABITS)
def test_a_server_with_a_habit_keeps_what_it_must_and_answers_otherwise(habit: str) -> None:
    text, kept = answered(HABITS[habit]())
    assert text != answered(CoreOnly())[0]
    assert (kept["id"], kept["content"], kept["metadata"]["a2m-router"]) == ("a", " as \n given ", "{}")


def test_two_honest_servers_answer_alike() -> None:
    assert answered(CoreOnly())[0] == answered(CoreOnly())[0]
