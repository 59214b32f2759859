"""Each fault of a2m-chaos on a clock that jumps: what the server gets and the client is sent, and when.

Both the wire and the server are a notebook of entries: (seconds, what was done).
"""

import json
from collections.abc import Mapping
from typing import Any, get_args

import anyio
import pytest

from a2m_chaos import altering
from a2m_chaos.faults import KINDS, FaultName
from a2m_chaos.misbehaving import misbehave
from a2m_chaos.plan import Fault
from tests.support.clocks import jumping

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> Any:
    return "trio", jumping()


def call(method: str = "memory/remember", **params: Any) -> bytes:
    params = params or {"records": [{"id": "r", "content": "pears", "metadata": {"n": 1}}]}
    return json.dumps({"jsonrpc": "2.0", "id": 7, "method": method, "params": params}).encode()


ANSWER = b'{"jsonrpc": "2.0", "id": 7,  "result": {"ids": ["r"]}}'


class Notebook:
    """A wire and a server in one; `events` has everything that happened, in order, with its second."""

    def __init__(self, answer: bytes | None = ANSWER) -> None:
        self.events: list[tuple[float, Any]] = []
        self._answer = answer
        self._began = anyio.current_time()

    def write(self, *what: Any) -> None:
        self.events.append((anyio.current_time() - self._began, *what))

    async def go_on(self, message: bytes) -> bytes | None:
        self.write("server", message)
        return self._answer

    async def send(self, message: bytes) -> None:
        self.write("client", message)

    async def send_in_two(self, message: bytes, pause: float) -> None:
        self.write("in two", message, pause)

    async def send_half(self, message: bytes) -> None:
        self.write("half", message)

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.write("refused", status, dict(headers))

    async def reset(self) -> None:
        self.write("reset")

    async def die(self, away: float, *, empty: bool) -> None:
        self.write("dies", away, empty)

    async def keep_aside(self) -> None:
        self.write("kept")

    def note(self, sentence: str) -> None:
        self.write("note", sentence)


async def done(fault: Fault, message: bytes | None = None, answer: bytes | None = ANSWER) -> list[tuple[Any, ...]]:
    """Return what happens when a fault is carried out on a call."""
    book = Notebook(answer)
    await misbehave(fault, call() if message is None else message, book.go_on, book)
    return list(book.events)


def told(events: list[tuple[Any, ...]]) -> Any:
    """Return the one message that the client was sent."""
    [message] = [event[2] for event in events if event[1] == "client"]
    return json.loads(message)


WORK = (0.0, "server", call())
SAID = (0.0, "client", ANSWER)

IN_TURN: dict[FaultName, list[tuple[Any, ...]]] = {
    "delay": [(2.0, "server", call()), (2.0, "client", ANSWER)],
    "hang": [],
    "drop-answer": [WORK],
    "answer-late": [WORK, (2.0, "client", ANSWER)],
    "apply-late": [(2.0, "note", "carried out now"), (2.0, "server", call())],
    "answer-twice": [WORK, SAID, (2.0, "client", ANSWER), (2.0, "note", "sent again")],
    "tear-line": [WORK, (0.0, "in two", ANSWER, 2.0)],
    "exit-before-work": [(0.0, "dies", 2.0, False)],
    "exit-after-work": [WORK, (0.0, "dies", 2.0, False)],
    "exit-after-answer": [WORK, SAID, (0.0, "dies", 2.0, False)],
    "restart-empty": [(0.0, "dies", 2.0, True)],
    "lose-at-crash": [(0.0, "kept"), WORK, SAID],
    "http-500": [(0.0, "refused", 500, {})],
    "http-500-after-work": [WORK, (0.0, "refused", 500, {})],
    "http-429": [(0.0, "refused", 429, {"Retry-After": "2"})],
    "reset": [(0.0, "reset")],
    "reset-after-work": [WORK, (0.0, "reset")],
    "half-body": [WORK, (0.0, "half", ANSWER)],
}


@pytest.mark.parametrize("name", IN_TURN)
async def test_a_fault_does_its_things_in_their_turn(name: FaultName) -> None:
    assert await done(Fault(do=name, wait=2.0)) == IN_TURN[name]


async def test_a_hang_that_holds_up_others_never_ends() -> None:
    with anyio.move_on_after(1_000_000) as waiting:
        await done(Fault(do="hang", in_order=True))
    assert waiting.cancelled_caught


async def test_what_is_applied_late_may_be_answered_with_an_error_first() -> None:
    events = await done(Fault(do="apply-late", wait=300.0, answer="error"))
    assert [event[:2] for event in events] == [(0.0, "client"), (300.0, "note"), (300.0, "server")]
    assert told(events)["error"]["code"] == -32603


@pytest.mark.parametrize("name", ["log-line", "garbage-line", "huge-line"])
async def test_a_line_comes_before_the_answer(name: str) -> None:
    work, line, answer = await done(Fault(do=name, size=5000))
    assert (work, answer) == (WORK, SAID)
    assert altering.answered_in(line[2]) is None
    assert name != "huge-line" or len(line[2]) == 5000


async def test_a_huge_answer_is_the_answer_and_as_long_as_that() -> None:
    events = await done(Fault(do="huge-answer", size=5000))
    [message] = [event[2] for event in events if event[1] == "client"]
    assert 5000 <= len(message) < 5100
    assert {**told(events), "padding": None} == {**json.loads(ANSWER), "padding": None}


async def test_a_wrong_id_is_another_calls_and_the_rest_is_as_it_was() -> None:
    answer = told(await done(Fault(do="wrong-id")))
    assert answer.pop("id") != 7
    assert answer == {"jsonrpc": "2.0", "result": {"ids": ["r"]}}


@pytest.mark.parametrize(("name", "reason"), [("refuse-writes", "refused"), ("disk-full", "disk full")])
async def test_a_write_is_refused_and_not_handed_on(name: str, reason: str) -> None:
    events = await done(Fault(do=name))
    assert [event[1] for event in events] == ["client"]
    assert (told(events)["id"], told(events)["error"]["code"]) == (7, -32603)
    assert told(events)["error"]["data"] == {"reason": reason}


async def test_a_lost_write_is_acknowledged_with_ids() -> None:
    """A record without an id gets a generated one."""
    events = await done(Fault(do="lose-write"), call(records=[{"id": "a", "content": "x"}, {"content": "y"}]))
    assert [event[1] for event in events] == ["client"]
    first, second = told(events)["result"]["ids"]
    assert first == "a"
    assert second not in ("", "a")


async def test_a_record_is_altered_before_it_is_written() -> None:
    raw = b'{"jsonrpc":"2.0","id":7,"method":"memory/remember","params":{"records":[%b,{"content":"z"}],"session":"s"}}'
    for field, altered in (
        ("content", b'{"content":"pears [altered]","metadata":{"n":1.0,"big":100000000000000000000}}'),
        ("metadata", b'{"content":"pears","metadata":{"n":1.0,"big":100000000000000000000,"altered":true}}'),
    ):
        message = raw % b'{"content":"pears","metadata":{"n":1.0,"big":100000000000000000000}}'
        events = await done(Fault(do="alter-record", field=field), message)  # type: ignore[arg-type]
        assert events == [(0.0, "server", raw % altered), SAID]


@pytest.mark.parametrize(
    ("method", "result", "altered"),
    [
        (
            "recall",
            '{"records":[{"content":"a"},{"content":"b"}]}',
            '{"records":[{"content":"a [altered]"},{"content":"b"}]}',
        ),
        ("timeline", '{"records":[]}', '{"records":[]}'),
        ("fetch", '{"record":{"content":"a"}}', '{"record":{"content":"a [altered]"}}'),
        ("fetch", '{"record":null}', '{"record":null}'),
        ("recall", "null", "null"),
    ],
)
async def test_a_record_is_altered_in_what_is_answered(method: str, result: str, altered: str) -> None:
    message = call(f"memory/{method}", query="a")
    answer = f'{{"jsonrpc":"2.0","id":7,"result":{result}}}'.encode()
    events = await done(Fault(do="alter-record"), message, answer)
    assert events == [(0.0, "server", message), (0.0, "client", answer.replace(result.encode(), altered.encode()))]


async def test_less_is_forgotten_than_asked_and_the_answer_hides_it() -> None:
    events = await done(Fault(do="forget-less"), call("memory/forget", ids=["a", "b", "c"], owner="o"))
    [handed] = [json.loads(event[2]) for event in events if event[1] == "server"]
    assert handed["params"] == {"ids": ["a", "b"], "owner": "o"}
    assert told(events) == {"jsonrpc": "2.0", "id": 7, "result": {"forgotten": 3}}


@pytest.mark.parametrize("params", [{"ids": ["a"]}, {"query": "pears"}])
async def test_where_nothing_is_left_to_forget_nothing_is_forgotten(params: dict[str, Any]) -> None:
    events = await done(Fault(do="forget-less"), call("memory/forget", **params))
    assert [event[1] for event in events] == ["client"]
    assert told(events)["result"] == {"forgotten": len(params.get("ids", []))}


@pytest.mark.parametrize("name", ["lose-write", "forget-less", "alter-record"])
async def test_a_message_that_a_fault_cannot_change_is_passed_on_and_logged(name: str) -> None:
    method = "memory/forget" if name == "forget-less" else "memory/remember"
    message = call(method, records="none", ids="none")
    events = await done(Fault(do=name), message)
    assert [event[1] for event in events] == ["note", "server", "client"]
    assert events[1:] == [(0.0, "server", message), SAID]


@pytest.mark.parametrize("name", get_args(FaultName))
async def test_a_server_that_dies_meanwhile_is_not_spoken_for(name: FaultName) -> None:
    events = await done(Fault(do=name, wait=2.0, size=100), answer=None)
    asked = [event for event in events if event[1] == "server"]
    said = [event for event in events if event[1] in ("client", "in two", "half", "refused")]
    lines = ("log-line", "garbage-line", "huge-line")
    assert not asked or not said or name in lines


def test_every_fault_is_tried_here() -> None:
    lines = {"log-line", "garbage-line", "huge-line", "huge-answer", "wrong-id"}
    contents = {"refuse-writes", "disk-full", "lose-write", "alter-record", "forget-less"}
    assert set(IN_TURN) | lines | contents == set(KINDS)


@pytest.mark.parametrize("id", [b"[1]", b'{"a":1}', b"true", b"null", b"1e999", rb'"\ud800"'])
def test_what_no_answer_could_name_is_no_call(id: bytes) -> None:
    assert altering.call_in(b'{"jsonrpc":"2.0","id":%b,"method":"memory/recall"}' % id) is None
    assert altering.answered_in(b'{"jsonrpc":"2.0","id":%b,"error":{}}' % id) is None


def test_an_answer_is_told_from_what_only_looks_like_one() -> None:
    assert altering.answered_in(b'{"jsonrpc":"2.0","id":"seven","result":1}') == b'"seven"'
    assert altering.answered_in(b'{"jsonrpc":"2.0","method":"memory/event","params":{"id":7}}') is None
    for garbage in (b"INFO ready", b"[1]", b'{"id": 7', b"\xff"):
        assert altering.answered_in(garbage) is None
        assert altering.call_in(garbage) is None
