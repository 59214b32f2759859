"""A byte order mark at the beginning of a body, a line or a file, as some editors and shells write it, is skipped."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from a2m_chaos.plan import read_plan
from a2m_router.command.importing import Numbered
from a2m_router.config.loading import load
from a2m_router.protocol.wire.jsonrpc import MalformedMessage, Reply, parse_reply, parse_request
from a2m_router.protocol.wire.lines import BYTE_ORDER_MARK, LineSplitter

PATIENCE: Final = 60


def call(method: str, **params: Any) -> bytes:
    return json.dumps({"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}).encode()


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def test_a_message_may_begin_with_one() -> None:
    assert parse_request(BYTE_ORDER_MARK + call("describe")) == parse_request(call("describe"))
    answer = b'{"jsonrpc":"2.0","id":1,"result":{}}'
    assert isinstance(parse_reply(BYTE_ORDER_MARK + answer), Reply)
    deep = BYTE_ORDER_MARK + b'{"jsonrpc":"2.0","id":7,"method":"m","params":{"x":' + b"[" * 200 + b"]" * 200 + b"}}"
    with pytest.raises(MalformedMessage) as refused:
        parse_request(deep)
    assert bytes(refused.value.id) == b"7"


@pytest.mark.parametrize(
    "message",
    [
        BYTE_ORDER_MARK * 2 + call("describe"),
        call("describe") + BYTE_ORDER_MARK,
        b" " + BYTE_ORDER_MARK + call("describe"),
        BYTE_ORDER_MARK,
    ],
)
def test_anywhere_else_it_is_no_json(message: bytes) -> None:
    with pytest.raises(MalformedMessage):
        parse_request(message)


def test_in_a_string_it_is_a_character_like_any_other() -> None:
    request = parse_request(json.dumps({"jsonrpc": "2.0", "id": 1, "method": "\ufeffm"}, ensure_ascii=False).encode())
    assert request.method == "\ufeffm"


def test_a_line_of_nothing_else_is_blank_and_others_are_left_as_they_came() -> None:
    splitter = LineSplitter()
    line = BYTE_ORDER_MARK + b"{}"
    assert splitter.feed(BYTE_ORDER_MARK + b"\n" + line + b"\n" + BYTE_ORDER_MARK + b" \r\n") == [line]


@pytest.mark.parametrize(
    "command",
    [("a2m-store", "notes.db"), ("a2m-router",), ("a2m-chaos", "--plan", "plan.toml", "--", "a2m-store", "notes.db")],
)
def test_every_line_of_a_stream_may_begin_with_one(tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "plan.toml").write_bytes(BYTE_ORDER_MARK + b"seed = 1\n")
    (tmp_path / "federation.toml").write_bytes(
        BYTE_ORDER_MARK + b'[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "working.db"]\n'
    )
    lines = [BYTE_ORDER_MARK, call("remember", records=[{"content": "x"}]), call("timeline")]
    ended = subprocess.run(
        [program(command[0]), *command[1:]],
        input=b"".join(BYTE_ORDER_MARK + line.removeprefix(BYTE_ORDER_MARK) + b"\n" for line in lines),
        capture_output=True,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(answers) == 2
    assert all("result" in answer for answer in answers)


def test_a_body_may_begin_with_one(tmp_path: Path) -> None:
    command = [program("a2m-store"), str(tmp_path / "notes.db"), "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as store:
        try:
            assert store.stderr is not None
            url = store.stderr.readline().split()[-1]
            headers = {"Content-Type": "application/json"}
            answer = httpx.post(
                url, content=BYTE_ORDER_MARK + call("describe"), headers=headers, timeout=PATIENCE, verify=False
            )
            assert answer.json()["result"]["name"] == "notes"
        finally:
            store.terminate()


def test_a_plan_and_a_federation_file_may_begin_with_one(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_bytes(BYTE_ORDER_MARK + b"seed = 3\n")
    assert read_plan(tmp_path / "plan.toml", front="stdio", behind="command").seed == 3
    (tmp_path / "federation.toml").write_bytes(
        BYTE_ORDER_MARK + b'name = "home"\n[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "working.db"]\n'
    )
    assert load(tmp_path / "federation.toml", {}).name == "home"


def a2m(folder: Path, *arguments: str) -> bytes:
    store = f"{program('a2m-store')} {folder / 'notes.db'}"
    ended = subprocess.run(
        [program("a2m"), "--stdio", store, "--json", *arguments], capture_output=True, timeout=PATIENCE, cwd=folder
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_import_file_and_each_file_joined_to_it_may_begin_with_one(tmp_path: Path) -> None:
    (tmp_path / "export").write_bytes(b'{"id":"1","content":"x"}\n')
    a2m(tmp_path, "import", "export")
    exported = a2m(tmp_path, "export")
    (tmp_path / "first").mkdir()
    joined = BYTE_ORDER_MARK + exported + BYTE_ORDER_MARK + b'{"id":"2","content":"y"}\n' + BYTE_ORDER_MARK + b"\n"
    (tmp_path / "first" / "export").write_bytes(joined)
    a2m(tmp_path / "first", "import", "export")
    again = [json.loads(line) for line in a2m(tmp_path / "first", "export").splitlines()]
    assert [record["id"] for record in again if "id" in record] == ["1", "2"]


def test_the_id_that_a_line_is_given_does_not_depend_on_it() -> None:
    for ending in (b"\n", b""):
        marked, plain = Numbered(), Numbered()
        text = b'{"content":"x"}'
        assert [*marked.feed(BYTE_ORDER_MARK + text + ending), *marked.end()] == [
            *plain.feed(text + ending),
            *plain.end(),
        ]
