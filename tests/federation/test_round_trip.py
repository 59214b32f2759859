"""Moves keep a record as the client wrote it: metadata to the byte, vectors to the bit, and every other field.

The one exception: line breaks between the tokens of metadata become spaces, since stdio frames messages by line.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.protocol.wire.records import vector_bytes
from tests.support.examples import scaled
from tests.support.federated import FOUR_TIERS, Trial, held_by, settings_of, trial

PATIENCE = 60

METADATA: Final = {
    "a long integer": b'{"n":123456789012345678901234567890}',
    "one point nought": b'{"n":1.0,"m":1,"o":1.50,"p":10e-1}',
    "a number beyond doubles": b'{"n":1e400,"m":-1E+400,"o":1e-400}',
    "minus nought": b'{"n":-0.0,"m":-0,"o":0e0}',
    "names that come twice": b'{"a":1,"a":2,"b":{"c":1,"c":1}}',
    "spaces": b'{ "a" : [ 1 ,\t2 ] }',
    "nothing": b"{}",
    "an empty name": b'{"":null}',
    "escapes": rb'{"\u0061\/\b\f\n\r\t\"\\":"\u00e4\u00C4\u0000\ud83d\ude00\uD83D\uDE00"}',
    "every plane": '{"a":"é e\u0301 \u200f שלום \u202eabc\u202c 𝔸 \uffff \U0010ffff \u2028\u2029 \ufeff"}'.encode(),
    "deep": b'{"a":' + b"[" * 120 + b"]" * 120 + b"}",
    "the names of fields": b'{"id":"x","tier":"nowhere","owner":1,"metadata":{},"embedding":[1]}',
    "html": b'{"a":"</script>&amp;","__proto__":{"constructor":1}}',
}
PRETTY: Final = b'{\n  "a": [\n    1,\n    2.0\n  ],\r\n  "b": "c d"\r}'

VECTOR: Final = "[1,-0.0,1e-300,5e-324,0.1,1.7976931348623157e308,-2.2250738585072014e-308,3]"


def on_one_line(metadata: bytes) -> bytes:
    return metadata.replace(b"\n", b" ").replace(b"\r", b" ")


class ServerRecord(msgspec.Struct):
    """A record of an answer with its metadata as raw bytes."""

    id: str
    tier: str
    metadata: msgspec.Raw = msgspec.Raw(b"")
    embedding: list[float] = []


class Answer(msgspec.Struct):
    records: list[ServerRecord]


def remember(*records: tuple[str, bytes], session: str = "s") -> bytes:
    """Return the parameters of a remember call for pairs of id and raw metadata."""
    written = b",".join(
        b'{"id":%b,"content":"x","metadata":%b,"embedding":%b}' % (msgspec.json.encode(id), metadata, VECTOR.encode())
        for id, metadata in records
    )
    return b'{"session":%b,"records":[%b]}' % (msgspec.json.encode(session), written)


# --- JSON in every permitted spelling

characters = st.characters(codec="utf-8")


@st.composite
def json_strings(draw: st.DrawFn) -> str:
    """Draw a JSON string. Each character is plain or escaped, with pairs beyond the BMP; short escapes occur, too."""
    parts = []
    for character in draw(st.text(characters, max_size=12)):
        code = ord(character)
        must = character in '"\\' or code < 0x20
        if must or draw(st.booleans()):
            units = character.encode("utf-16-be")
            form = draw(st.sampled_from(["%04x", "%04X"]))
            pieces = [int.from_bytes(units[i : i + 2], "big") for i in range(0, len(units), 2)]
            parts.append("".join("\\u" + form % unit for unit in pieces))
        else:
            parts.append(character)
    parts.append(draw(st.sampled_from(["", "\\n", "\\/", '\\"', "\\\\", "\\b\\f\\r\\t"])))
    return '"' + "".join(parts) + '"'


numbers = st.from_regex(r"-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,25})?([eE][+-]?[0-9]{1,4})?", fullmatch=True).filter(
    str.isascii
)
gaps = st.sampled_from(["", "", "", " ", "\t", "  "])


@st.composite
def objects(draw: st.DrawFn, depth: int = 3) -> str:
    """Draw a JSON object with white space between its tokens. A name may occur twice."""
    members = []
    for _ in range(draw(st.integers(0, 3))):
        value = draw(values(depth - 1))
        members.append(f"{draw(gaps)}{draw(json_strings())}{draw(gaps)}:{draw(gaps)}{value}{draw(gaps)}")
    twice: bool = draw(st.booleans())
    if members and twice:
        members.append(members[0])
    return "{" + ",".join(members) + "}"


def values(depth: int) -> st.SearchStrategy[str]:
    simple = st.one_of(json_strings(), numbers, st.sampled_from(["true", "false", "null", "[]", "{}"]))
    if depth <= 0:
        return simple
    arrays = st.lists(st.deferred(lambda: values(depth - 1)), max_size=3).map(lambda them: "[" + ",".join(them) + "]")
    return st.one_of(simple, arrays, objects(depth))


async def told(fed: Trial, method: str = "timeline") -> dict[str, ServerRecord]:
    """Return the records of an answer by id; metadata stays raw, since a decoder loses some of what JSON holds."""
    answer = msgspec.json.decode(await fed.raw(method, b'{"embeddings":true}'), type=Answer)
    return {record.id: record for record in answer.records}


async def moved_twice(fed: Trial, ids: Sequence[str], session: str, way: str, owner: str | None = None) -> None:
    """Move records from working to episodic by closing the session, then on to semantic."""
    await fed.call("session/close", session=session, owner=owner)
    assert {record.tier for record in (await told(fed)).values()} == {"episodic"}
    if way == "promote":
        await fed.call("promote", ids=list(ids), tier="semantic")
    else:
        # newer records fill the capacity of episodic, so a pass moves the first ones down
        await fed.call("remember", records=[{"content": "later", "tier": "episodic"} for _ in range(6)])
        await fed.call("consolidate")
    await fed.settled()
    after = await told(fed)
    assert {after[id].tier for id in ids} == {"semantic"}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", ["promote", "consolidate"])
@pytest.mark.anyio
async def test_metadata_is_kept_to_the_byte_through_two_moves(way: str) -> None:
    for case, metadata in METADATA.items():
        async with trial(settings_of(policy="explicit")) as fed:
            await fed.raw("remember", remember((case, metadata)))
            await moved_twice(fed, [case], "s", way)
            record = (await told(fed))[case]
            assert bytes(record.metadata) == metadata
            assert vector_bytes(record.embedding) == vector_bytes(json.loads(VECTOR))


@settings(max_examples=scaled(10))
@given(written=st.lists(objects(), min_size=1, max_size=4))
def test_any_metadata_is_kept_to_the_byte_through_two_moves(written: list[str]) -> None:
    async def run() -> None:
        async with trial(settings_of(policy="explicit")) as fed:
            ids = [f"id {n}" for n in range(len(written))]
            raw = [text.encode() for text in written]
            await fed.raw("remember", remember(*zip(ids, raw, strict=True)))
            await moved_twice(fed, ids, "s", "promote")
            for method in ("timeline", "recall"):
                kept = {id: bytes(record.metadata) for id, record in (await told(fed, method)).items()}
                assert kept == dict(zip(ids, raw, strict=True))

    anyio.run(run)


@settings(max_examples=scaled(10))
@given(
    vectors=st.integers(1, 5).flatmap(
        lambda width: st.lists(
            st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=width, max_size=width),
            min_size=1,
            max_size=4,
        )
    )
)
def test_any_vector_is_kept_to_the_bit_through_two_moves(vectors: list[list[float]]) -> None:
    async def run() -> None:
        async with trial(settings_of(policy="explicit")) as fed:
            records = [{"content": str(n), "embedding": vector} for n, vector in enumerate(vectors)]
            ids = (await fed.call("remember", records=records, session="s"))["ids"]
            await moved_twice(fed, ids, "s", "promote")
            after = await told(fed)
            assert [vector_bytes(after[id].embedding) for id in ids] == list(map(vector_bytes, vectors))

    anyio.run(run)


texts = st.text(characters, max_size=20)
names = st.text(characters, min_size=1, max_size=20)


@settings(max_examples=scaled(10))
@given(
    record=st.fixed_dictionaries(
        {"id": names, "content": texts},
        optional={
            **dict.fromkeys(("role", "group", "owner", "uri", "media_type"), texts),
            "key": names,
            "revision": st.integers(0, 2**53 - 1),
            "salience": st.floats(0, 1e300),
            "embedding": st.just([0.1, -0.0]),
        },
    ),
    session=names,
)
def test_any_record_is_moved_unchanged(record: dict[str, Any], session: str) -> None:
    async def run() -> None:
        async with trial(settings_of(policy="explicit")) as fed:
            await fed.call("remember", records=[record], session=session)
            [before] = await fed.timeline(embeddings=True)
            assert {name: before[name] for name in record if name != "revision" or "key" in record} == {
                name: value for name, value in record.items() if name != "revision" or "key" in record
            }
            await moved_twice(fed, [record["id"]], session, "promote", record.get("owner"))
            [after] = await fed.timeline(embeddings=True)
            assert after == before | {"tier": "semantic"}

    anyio.run(run)


# --- all ways to move

WHOLE: Final = {
    "id": "whole",
    "content": "Anna moved to Rome",
    "created_at": "2020-02-29T23:59:59.999Z",
    "role": "user",
    "metadata": {"a": [1, {"b": None}]},
    "group": "g",
    "salience": 0.25,
    "owner": "anna",
    "session": "s",
    "key": "anna/city",
    "revision": 7,
    "embedding": [0.1, -0.0, 5e-324],
    "uri": "file:///photo.jpg",
    "media_type": "image/jpeg",
}


async def by_spill(fed: Trial) -> None:
    await fed.remember(*"123456", session="s", owner="anna")
    await fed.call("consolidate")


async def by_close(fed: Trial) -> None:
    await fed.call("session/close", session="s", owner="anna")


async def by_promote(fed: Trial) -> None:
    await fed.call("promote", ids=["whole"], tier="semantic", salience=0.5)


async def by_earning_it(fed: Trial) -> None:
    await fed.call("promote", ids=["whole"], tier="episodic")
    for _ in range(3):
        await fed.call("recall", query="Rome", limit=1)
    await fed.call("consolidate")


async def by_being_promoted_back(fed: Trial) -> None:
    await fed.call("promote", ids=["whole"], tier="semantic")
    await fed.settled()
    await fed.call("promote", ids=["whole"], tier="working")


@pytest.mark.parametrize("move", [by_spill, by_close, by_promote, by_earning_it, by_being_promoted_back])
@pytest.mark.anyio
async def test_a_move_changes_nothing_but_the_tier(move: Callable[[Trial], Any]) -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        await fed.call("remember", records=[WHOLE])
        await fed.call("recall", query="Rome")
        [before] = await fed.timeline(embeddings=True, where={"id": "whole"})
        earned = {"access_count": 1, "accessed_at": before["accessed_at"]}
        assert before == WHOLE | earned | {"tier": "working"}
        await move(fed)
        await fed.settled()
        [after] = await fed.timeline(embeddings=True, where={"id": "whole"})
        expected = before | {"tier": after["tier"]}
        if move is by_promote:
            expected["salience"] = 0.75
        if move is by_earning_it:
            expected |= {"access_count": 4, "accessed_at": after["accessed_at"]}
        assert after == expected
        assert (after["tier"] == "working") == (move is by_being_promoted_back)
        assert fed.copies()["whole"] == [after["tier"]]
        [kept] = [record for record in held_by(fed.stores[after["tier"]]) if record["id"] == "whole"]
        counted = {"tier", "salience", "access_count", "accessed_at"}
        assert {n: v for n, v in kept.items() if n not in counted} == {
            n: v for n, v in WHOLE.items() if n not in counted
        }


# --- real processes

FEDERATION: Final = FOUR_TIERS.replace("{policy}", "explicit")


@contextmanager
def served(folder: Path) -> Iterator[httpx.Client]:
    """Run a router over HTTP with one store process for each tier; yield a client for it."""
    text = f'state = "router.db"\n{FEDERATION}'
    for tier in ("working", "episodic", "semantic", "procedural"):
        text = text.replace('command = ["-"]', f'command = ["a2m-store", "{tier}.db"]', 1)
    (folder / "federation.toml").write_text(text)
    command = [
        str(Path(sys.executable).with_name("a2m-router")),
        "--config",
        "federation.toml",
        "--http",
        "127.0.0.1:0",
    ]
    process = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        words = (word for line in process.stderr for word in line.decode().split())
        url = next(word for word in words if word.startswith("http://127.0.0.1:"))
        with httpx.Client(base_url=url, timeout=PATIENCE, verify=False) as client:
            yield client
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)


def ask(client: httpx.Client, method: str, params: bytes = b"{}") -> bytes:
    message = b'{"jsonrpc":"2.0",\r\n "id":1,\n"method":"memory/%b","params":%b}' % (method.encode(), params)
    answer = client.post("/", content=message, headers={"Content-Type": "application/json"})
    assert b'"error"' not in answer.content, answer.content
    return answer.content


class Response(msgspec.Struct):
    result: Answer


@pytest.mark.process
def test_everything_is_kept_through_real_processes(tmp_path: Path) -> None:
    cases = [*METADATA.items(), ("pretty-printed", PRETTY)]
    with served(tmp_path) as client:
        ask(client, "remember", remember(*cases))
        ask(client, "session/close", b'{"session":"s"}')  # six stay in episodic, the others move to semantic
        ask(client, "promote", b'{"tier":"semantic","ids":%b}' % msgspec.json.encode([id for id, _ in cases]))
    with served(tmp_path) as client:
        answer = msgspec.json.decode(ask(client, "timeline", b'{"embeddings":true}'), type=Response).result
    assert {record.id: bytes(record.metadata) for record in answer.records} == {
        id: on_one_line(metadata) for id, metadata in cases
    }
    assert {vector_bytes(record.embedding) for record in answer.records} == {vector_bytes(json.loads(VECTOR))}
    assert {record.tier for record in answer.records} == {"semantic"}
