"""A small share of the generated messages, and tests that the fuzzer notices faults.

    python -m tests.verification.fuzz

sends many more.
"""

import base64
import json
import random
import re
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Raw

from a2m_router.protocol.wire.jsonrpc import Request, parse_request
from a2m_router.protocol.wire.lines import LineSplitter
from tests.support.paths import ROOT
from tests.verification.fuzz import codec
from tests.verification.fuzz.__main__ import main
from tests.verification.fuzz.codec import fuzz_codec
from tests.verification.fuzz.generating import METHODS, Messages
from tests.verification.fuzz.http import fuzz_http
from tests.verification.fuzz.owing import Pending, owed, read_answer
from tests.verification.fuzz.pipes import fuzz_stdio
from tests.verification.fuzz.reporting import FLAT, Report, Wrong, growth
from tests.verification.fuzz.serving import PATIENCE

# --- a share of the messages


@pytest.mark.parametrize("seed", [1, 2])
def test_the_codec_bears_everything(seed: int) -> None:
    report = fuzz_codec(seed, 2_000)
    assert report.findings == []
    assert report.answers.total() == report.messages == 2_000


@pytest.mark.process
def test_the_router_on_pipes_bears_everything() -> None:
    report = fuzz_stdio(3, 500)
    assert report.findings == []
    assert report.messages == 500
    assert report.answers["result"] > 100


@pytest.mark.process
def test_the_router_on_http_bears_everything() -> None:
    report = fuzz_http(4, 200)
    assert report.findings == []
    assert report.messages >= 200
    assert report.answers["200"] > 50


# --- the generated messages


def test_what_is_sent_follows_from_the_seed() -> None:
    one, same, other = (list(islice(iter(Messages(random.Random(seed)).next, None), 300)) for seed in (1, 1, 2))
    assert one == same
    assert one != other


def test_every_method_is_called_well_and_badly() -> None:
    made: Counter[tuple[str, str]] = Counter()
    source = Messages(random.Random(1))
    for _ in range(2_000):
        message = source.next()
        due = owed(message)
        if due is not None and due.id is not None:
            method = json.loads(message)["method"]
            made[method, codec.check_codec(message)] += 1
    for method in METHODS:
        assert made[method, "result"] > 5
        assert made[method, "INVALID_PARAMS"] > 0 or method in ("memory/consolidate", "memory/events/unsubscribe")


# --- the expected answers

CALL: Final = '{"jsonrpc":"2.0","id":%s,"method":"memory/describe"}'


@pytest.mark.parametrize("head", ["", "\ufeff"])
@pytest.mark.parametrize("id", ["1", '"a"', '"\\u0041"', "1e400", "-0.0", "null", "1" * 30])
def test_a_call_is_owed_one_answer_with_its_id_to_the_byte(id: str, head: str) -> None:
    due = owed((head + CALL % id).encode())
    assert due is not None
    assert due.id == id.encode()


@pytest.mark.parametrize(
    "message",
    [
        *("{", "[]", "1", "", "{}", CALL % "[1]", CALL % "NaN", CALL % "1" + "}", "\ufeff\ufeff" + CALL % "1"),
        *(
            CALL.replace('"2.0"', "2.0") % 1,
            CALL.replace("method", "m") % 1,
            CALL % '1,"params":[]',
            CALL % '1,"x":"\\ud800"',
        ),
        CALL % ('1,"params":{"where":{"a":' + "[" * 126 + "]" * 126 + "}}"),
    ],
)
def test_a_malformed_message_is_owed_an_answer_that_may_be_null(message: str) -> None:
    due = owed(message.encode())
    assert due is not None
    assert due.id is None


def test_a_notification_is_owed_nothing() -> None:
    assert owed(b'{"jsonrpc":"2.0","method":"memory/describe"}') is None


def pending(*messages: str) -> Pending:
    made = Pending()
    for message in messages:
        due = owed(message.encode())
        assert due is not None
        made.add(due)
    return made


def test_null_may_answer_any_malformed_message_and_no_other() -> None:
    fine = pending(CALL % 1, '{"id":2}', '{"id":3}')
    for id in (b"null", b"2", b"1"):
        fine.take(id)
    assert len(fine) == 0
    fine.settle()
    wrong = pending(CALL % 1, '{"id":2}')
    for id in (b"null", b"2"):
        wrong.take(id)
    with pytest.raises(Wrong, match="null answered the message with id 1"):
        wrong.settle()


@pytest.mark.parametrize("id", [b"2", b'"1"', b"1.0"])
def test_an_answer_to_nobody_is_noticed(id: bytes) -> None:
    with pytest.raises(Wrong, match="nobody asked"):
        pending(CALL % 1).take(id)


@pytest.mark.parametrize(
    "line",
    [
        *(
            b"hello",
            b"[]",
            b'{"jsonrpc":"2.0","id":1}',
            b'{"jsonrpc":"2.0","id":1,"result":NaN}',
            b'{"id":1,"result":1}',
        ),
        *(b'{"jsonrpc":"2.0","id":1,"result":1,"error":{}}', b'{"jsonrpc":"2.0","id":1,"id":1,"result":1}'),
        *(b'{"jsonrpc":"2.0","id":1,"error":{"code":1,"message":""}}', b'{"jsonrpc":"2.0",\r"id":1,"result":1}'),
        *(b'{"jsonrpc":"2.0","id":1,"error":{"code":-32602}}', b'{"jsonrpc":"2.0","method":"x","params":{}}'),
    ],
)
def test_what_is_no_answer_is_noticed(line: bytes) -> None:
    with pytest.raises(Wrong):
        read_answer(line)


@pytest.mark.parametrize(
    ("data", "excused"),
    [
        ({"tier": "working", "reason": "no answer within 5 s", "retry_after": 1.0}, True),
        ({"reason": "changing", "retry_after": 1.0}, True),
        ({"tier": "working", "reason": "it refuses: no", "retry_after": 60.0}, False),
        ({"reason": "disk full"}, False),
        (None, False),
    ],
)
def test_a_failure_is_a_finding_unless_a_tier_was_late_or_others_faster(data: Any, excused: bool) -> None:
    line = {"jsonrpc": "2.0", "id": 1, "error": {"code": -32603, "message": "it failed", "data": data}}
    assert (read_answer(json.dumps(line).encode()).fault is None) is excused


# --- the fuzzer notices faults: of the codec


def refusing(_: bytes) -> Request:
    raise KeyError("what no codec raises")


def renaming(message: bytes) -> Request:
    request = parse_request(message)
    return Request(Raw(b"7"), request.method, request.params)


@pytest.mark.parametrize("broken", [refusing, renaming])
def test_a_broken_codec_is_noticed(broken: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "parse_request", broken)
    report = fuzz_codec(1, 200)
    assert report.findings
    assert all(finding.messages for finding in report.findings)


def test_a_codec_that_takes_too_long_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MOST_SECONDS", -1e-9)
    monkeypatch.setattr(codec, "MOST_SECONDS_PER_BYTE", 0)
    assert "too long" in fuzz_codec(1, 5).findings[0].what


def test_lines_that_depend_on_the_chunks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class ByChunk(LineSplitter):
        def feed(self, chunk: bytes) -> list[bytes | None]:
            return [*super().feed(chunk), *self.end()]

    monkeypatch.setattr(codec, "LineSplitter", ByChunk)
    report = fuzz_codec(1, 1_000)
    assert any("chunks" in finding.what for finding in report.findings)


def test_a_finding_is_written_down_with_its_seed_and_its_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tmp_path / "found.jsonl"
    arguments = ["--only", "codec", "--messages", "100", "--seed", "7", "--findings", str(told)]
    assert main(arguments) == 0
    assert not told.exists()
    monkeypatch.setattr(codec, "parse_request", refusing)
    assert main(arguments) == 1
    assert f"{told}; again: --seed 7" in capsys.readouterr().out
    first = json.loads(told.read_text().splitlines()[0])
    assert (first["seed"], first["door"], first["number"]) == (7, "codec", 1)
    assert base64.b64decode(first["messages"][0]) == Messages(random.Random("7 codec")).next()


# --- the fuzzer notices faults: of servers

SMALL: Final = """
import sys
from msgspec import Raw
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.jsonrpc import MalformedMessage, parse_request, render_error, render_result
from a2m_router.protocol.wire.lines import LineSplitter
from tests.verification.fuzz.generating import MAX_MESSAGE

fault = sys.argv[1]
kept = []
last = None
answered = 0
splitter = LineSplitter(MAX_MESSAGE)

def answer(line):
    global last
    try:
        request = parse_request(b"" if line is None else line)
    except MalformedMessage as malformed:
        return render_error(malformed.id, malformed)
    if request.id is None:
        return None
    if fault == "failing" and answered == 50:
        return render_error(request.id, A2MError(-32603, "the server failed"))
    if bytes(request.id) != b'"canary"':
        return render_result(request.id, {})
    if request.method == "memory/remember":
        last = bytes(request.params).split(b'"id": "')[1].split(b'"')[0].decode()
    if fault == "forgetful" and request.method == "memory/recall":
        return render_result(request.id, {"records": []})
    return render_result(request.id, {"records": [{"id": last}], "record": {"id": last}})

while chunk := sys.stdin.buffer.read1():
    for line in splitter.feed(chunk):
        reply = answer(line)
        if reply is None:
            continue
        answered += 1
        if fault == "growing":
            kept.append(bytearray(b"x" * 2**17))
        if answered == 50:
            if fault == "silent":
                continue
            if fault == "garbage":
                reply = b"Starting...\\n" + reply
            if fault == "twice":
                reply += b"\\n" + reply
            if fault == "wrong":
                reply = render_result(Raw(b'"another"'), {}) + b"\\n" + reply
            if fault == "malformed":
                reply = reply[:-1] + b',"error":null}\\n' + reply
            if fault == "traceback":
                print("Traceback (most recent call last):", file=sys.stderr)
            if fault == "ending":
                sys.exit(0)
        sys.stdout.buffer.write(reply + b"\\n")
    sys.stdout.buffer.flush()
if fault == "status":
    sys.exit(3)
"""


def small(fault: str, count: int = 300) -> Report:
    """Fuzz a small server that has this fault."""
    root = str(ROOT)
    script = f"import sys; sys.path.insert(0, {root!r}){SMALL}"
    return fuzz_stdio(
        5, count, command=[sys.executable, "-c", script, fault], patience=1 if fault == "silent" else PATIENCE
    )


def test_a_good_server_passes() -> None:
    report = small("none")
    assert report.findings == []


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("silent", "no answer within 1 s"),
        ("garbage", "not JSON"),
        ("twice", "nobody asked|more answers with id null"),
        ("wrong", 'an answer to "another", which nobody asked'),
        ("malformed", "neither a result nor an error|not one JSON-RPC"),
        ("failing", "the server failed"),
        ("forgetful", "a record that was written is not there"),
        ("traceback", "a traceback on stderr"),
        ("ending", "its stdout has ended|does not read any more"),
        ("status", "it ended with status 3"),
    ],
)
def test_a_server_on_pipes_that_is_wrong_is_noticed(fault: str, said: str) -> None:
    report = small(fault)
    assert any(re.search(said, finding.what) for finding in report.findings)


def test_memory_that_grows_is_noticed() -> None:
    report = small("growing", 900)
    [finding] = report.findings
    assert "memory grew by" in finding.what


def test_only_what_grows_after_the_warm_up_counts() -> None:
    level = 100 * 2**20
    assert growth([0, 50, level, level + 9, level, level + FLAT, level, level + 5]) == 0
    assert growth([0, 0, 1, 2, 3, 4, 5, 6]) == 4
    assert growth([1, 2]) == 0


FAILING: Final = """
import http.server, signal, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(500)
        self.send_header("Content-Length", "0")
        self.send_header("Connection", "close")
        self.end_headers()
    def log_message(self, *arguments):
        pass

signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
server.daemon_threads = True
server.handle_error = lambda *_: None
print("hello", flush=True)
print(f"listens on http://127.0.0.1:{server.server_port}/", file=sys.stderr, flush=True)
server.serve_forever()
"""


def test_a_server_on_http_that_is_wrong_is_noticed() -> None:
    report = fuzz_http(5, 100, command=[sys.executable, "-c", FAILING], patience=20)
    said = [finding.what for finding in report.findings]
    assert "a call is answered with 500: " in said
    assert "on its stdout: hello\\n" in said
