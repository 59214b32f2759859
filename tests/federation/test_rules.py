"""The rules of the federation, each as a property of what clients see.

A property that test_mixes.py also checks with foreign servers is a function of its own, apart from the test that draws
its examples. A2M_EXAMPLES=50 runs fifty times as many examples.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.protocol.wire.timestamps import parse
from tests.support.examples import examples, run
from tests.support.federated import (
    ALL_NATIVE,
    FOUR_TIERS,
    Clock,
    Foreign,
    Mix,
    settings_of,
    trial,
)
from tests.support.histories import TIERS, History, histories, run_history
from tests.support.paths import ROOT
from tests.support.properties import (
    Doings,
    Earning,
    all_there,
    births,
    doings,
    earnings,
    filling,
    grouping,
    moves_change_nothing,
    moving,
    own_doings_are_seen_at_once,
    paths,
    promoted_before_spilled,
    replacing,
    several_records,
    timelines_ascend,
    within_capacity,
)

# --- all rules together


@pytest.mark.slow
@pytest.mark.rule(n=11)
@pytest.mark.rule(n=5)
@pytest.mark.rule(n=2)
@pytest.mark.rule(n=1)
@examples(12)
@given(history=histories())
def test_every_answer_is_true_whatever_happens_at_once(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history, within_capacity))


# --- 1


@pytest.mark.rule(n=1)
@examples(6)
@given(history=moving)
def test_an_acknowledged_record_stays_readable_while_everything_moves(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history, all_there))


# --- 2


@pytest.mark.rule(n=2)
@examples(6)
@given(history=replacing)
def test_no_answer_holds_an_id_twice_and_in_the_end_there_is_one_copy(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history))


# --- 3


@pytest.mark.slow
@pytest.mark.rule(n=3)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(10)
@given(records=several_records, path=paths, recalls=st.integers(0, 2))
def test_a_move_changes_nothing_but_the_tier(
    anyio_backend: str, records: list[dict[str, Any]], path: list[str], recalls: int
) -> None:
    run(anyio_backend, partial(moves_change_nothing, records, path, recalls))


# --- 4


@pytest.mark.rule(n=4)
@examples(6)
@given(history=grouping)
def test_a_group_leaves_its_tier_whole_in_every_kind_of_move(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history))


# --- 5


# on one loop only: the test of all rules together runs it on both
@pytest.mark.rule(n=5)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(6)
@given(history=filling)
def test_after_a_pass_no_bucket_exceeds_its_capacity_but_by_one_group(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history, within_capacity))


# --- 7


@pytest.mark.rule(n=7)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(6)
@given(earning=earnings)
def test_what_is_due_is_promoted_and_not_spilled_however_weak_it_is(anyio_backend: str, earning: Earning) -> None:
    run(anyio_backend, partial(promoted_before_spilled, earning))


# --- 8


@pytest.mark.rule(n=8)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(10)
@given(written=births, limit=st.integers(1, 15), metadata=st.booleans(), seed=st.integers(0, 2**32))
def test_a_timeline_ascends_across_tiers_and_its_limit_takes_the_newest(
    anyio_backend: str, written: list[tuple[str, int | None]], limit: int, metadata: bool, seed: int
) -> None:
    run(anyio_backend, partial(timelines_ascend, written, limit, metadata, seed))


EVER: Final = -(2**62)
YEARS: Final = 5 * 365 * 24 * 3600 * 1000
steps = st.sampled_from([-YEARS, -60_000, -1, 0, 0, 1, 60_000, YEARS])
turns = st.lists(
    st.tuples(steps, st.sampled_from(["s", "t", None]), st.sampled_from(["a", "b", None]), st.integers(1, 2)),
    max_size=14,
)


async def conversations_are_replayed(turns: list[tuple[int, str | None, str | None, int]], servers: Mix) -> None:
    """Write turns by a clock that jumps forwards and backwards; assert that each conversation is replayed in its order
    of writing, and that only records of a conversation get another date than the clock's.
    """
    clock = Clock()
    newest: dict[tuple[str | None, str], int] = {}
    expected: dict[str, str | None] = {}
    async with trial(settings_of(policy="background"), servers=servers, clock=clock) as fed:
        for number, (step, session, owner, count) in enumerate(turns):
            clock.now += step
            before = clock.now
            contents = [f"{number} {place}" for place in range(count)]
            ids = await fed.remember(*contents, session=session, owner=owner)
            told = {record["id"]: record for record in await fed.timeline(where={"id": ids})}
            moments = [parse(told[id]["created_at"]) for id in ids]
            least = EVER if session is None else newest.get((owner, session), EVER)
            if least > clock.now:
                assert moments == list(range(least + 1, least + 1 + count))
            else:
                latest = max(clock.now, least + count)  # the clock may catch up with the conversation during the call
                assert all(max(before, least) <= moment <= latest for moment in moments)
            if session is not None:
                newest[owner, session] = max(moments)
            expected.update(dict.fromkeys(ids, session and f"{session} {owner}"))
        for conversation in {each for each in expected.values() if each is not None}:
            session, owner = conversation.split()
            where = {"session": session, "owner": None if owner == "None" else owner}
            told_ids = [record["id"] for record in await fed.timeline(where=where)]
            assert told_ids == [id for id, of in expected.items() if of == conversation]


@pytest.mark.rule(n=8)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(6)
@given(turns=turns, lesser=st.booleans())
def test_a_conversation_is_replayed_in_order_whatever_the_clock_does(
    anyio_backend: str, turns: list[tuple[int, str | None, str | None, int]], lesser: bool
) -> None:
    servers = {"working": Foreign(), "episodic": Foreign()} if lesser else ALL_NATIVE
    run(anyio_backend, partial(conversations_are_replayed, turns, servers))


@pytest.mark.rule(n=8)
@pytest.mark.anyio
async def test_a_clock_that_was_set_back_is_told_once_with_how_far(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    for ahead in (True, False):
        async with trial(folder=tmp_path, clock=clock) as fed:
            for step in (-500, 0, YEARS if ahead else 0):
                clock.now += step
                await fed.remember("a turn", session="s")
        if ahead:
            assert "set back" not in caplog.text
            clock.now -= YEARS
    assert [record.getMessage() for record in caplog.records if "set back" in record.getMessage()] == [
        "clock set back by 1825 days, 0:00:00: new records of a conversation are not dated before its newest record"
    ]


# --- 9

INCREASING: Final[dict[str, Callable[[float], float]]] = {
    "as it is": lambda score: score,
    "halved": lambda score: score / 2,
    "cubed": lambda score: score**3,
    "near one": lambda score: 0.9 + score / 10,
    "far beyond": lambda score: 1000 * score - 7,
}


@pytest.mark.rule(n=9)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(6)
@given(
    records=st.lists(
        st.tuples(st.sampled_from(TIERS), st.lists(st.sampled_from(["red", "green", "blue"]), max_size=4)),
        min_size=1,
        max_size=12,
    ),
    query=st.sampled_from(["red", "red green", "blue blue red"]),
    vector=st.none() | st.just([1.0, 0.5]),
    scales=st.tuples(*(st.sampled_from(list(INCREASING)) for _ in TIERS)),
)
def test_two_tiers_scores_are_never_compared(
    anyio_backend: str,
    records: list[tuple[str, list[str]]],
    query: str,
    vector: list[float] | None,
    scales: tuple[str, ...],
) -> None:
    written = [
        {"id": f"{n}", "content": " ".join(words), "tier": tier, "embedding": [n / 7, 1.0]}
        for n, (tier, words) in enumerate(records)
    ]

    async def answer(scaled: dict[str, str]) -> Any:
        async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
            reply = await go_on()
            decoded = msgspec.json.decode(reply or b"null")
            for record in decoded["result"].get("records", []):
                if "score" in record:
                    record["score"] = INCREASING[scaled[tier]](record["score"])
            return msgspec.json.encode(decoded)

        async with trial(settings_of(policy="explicit"), weather=weather) as fed:
            await fed.call("remember", records=written)
            found = await fed.call("recall", query=query, embedding=vector, limit=20)
            return [(record["id"], record["score"]) for record in found["records"]]

    async def scenario() -> None:
        plain = await answer(dict.fromkeys(TIERS, "as it is"))
        assert await answer(dict(zip(TIERS, scales, strict=True))) == plain

    run(anyio_backend, scenario)


# --- 11


@pytest.mark.rule(n=11)
@examples(6)
@given(clients=doings, seed=st.integers(0, 2**32))
def test_a_client_sees_its_writes_and_forgets_at_once(anyio_backend: str, clients: Doings, seed: int) -> None:
    run(anyio_backend, partial(own_doings_are_seen_at_once, clients, seed))


# --- 13

NOISY = """
import os, sys
sys.stderr.buffer.write(b'{"jsonrpc":"2.0","id":1,"result":{}}\\n\\xff\\x00 what a day\\nno newline')
sys.stderr.flush()
os.execv(sys.executable, [sys.executable, "-m", "a2m_store.cli", *sys.argv[1:]])
"""


@contextmanager
def router_process(folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    (folder / "noisy.py").write_text(NOISY)
    command = json.dumps([sys.executable, str(folder / "noisy.py"), "TIER.db"])
    text = FOUR_TIERS.replace("{policy}", "background")
    for tier in TIERS:
        text = text.replace('command = ["-"]', f"command = {command.replace('TIER', tier)}", 1)
    (folder / "federation.toml").write_text(f'state = "router.db"\n[limits]\nmax_message = "64KiB"\n{text}')
    process = subprocess.Popen(
        [sys.executable, "-m", "a2m_router.daemon.cli", "--config", str(folder / "federation.toml")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


garbage = st.lists(
    st.binary(max_size=60).map(lambda line: line.replace(b"\n", b""))
    | st.sampled_from(
        [
            b"{",
            b"[]",
            b"null",
            b'{"jsonrpc":"2.0","id":7}',
            b'{"jsonrpc":"2.0","id":{},"method":"memory/recall"}',
            b'{"jsonrpc":"2.0","method":"memory/describe"}',
            b'{"jsonrpc":"2.0","id":8,"method":"memory/nothing"}',
            b'{"jsonrpc":"2.0","id":9,"method":"memory/remember","params":{"records":[{"content":"a\\u0000b"}]}}',
            b'{"jsonrpc":"2.0","id":9,"method":"memory/remember","params":{"records":[{"content":"x","metadata":[]}]}}',
            b"\xff" * 200,
            b"[" * 70_000,
            b"\r",
            b"",
        ]
    ),
    max_size=6,
)


@pytest.mark.process
@pytest.mark.rule(n=13)
def test_stdout_carries_json_rpc_and_nothing_else(tmp_path: Path) -> None:
    with router_process(tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        source, sink = process.stdout, process.stdin
        asked = iter(range(1_000_000_000, 2_000_000_000))

        @examples(30)
        @given(lines=garbage)
        def garbage_in(lines: list[bytes]) -> None:
            id = next(asked)
            end = json.dumps({"jsonrpc": "2.0", "id": id, "method": "memory/recall", "params": {"query": "x"}})
            sink.write(b"".join(line + b"\n" for line in [*lines, end.encode()]))
            sink.flush()
            while is_json_rpc(source.readline())["id"] != id:
                pass

        garbage_in()
        sink.close()
        for line in source:
            is_json_rpc(line)
        assert process.wait() == 0


def is_json_rpc(line: bytes) -> Any:
    assert line.endswith(b"\n")
    message = json.loads(line)
    assert message["jsonrpc"] == "2.0"
    assert ("result" in message) != ("error" in message)
    assert "error" not in message or isinstance(message["error"]["code"], int)
    return message


# --- 15


@pytest.mark.rule(n=15)
def test_no_uri_is_ever_fetched(anyio_backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    listening.setblocking(False)
    port = listening.getsockname()[1]
    secret = tmp_path / "secret"
    secret.write_text("nobody may read this")
    uris = [
        f"http://127.0.0.1:{port}/x",
        f"ftp://127.0.0.1:{port}/x",
        f"//127.0.0.1:{port}",
        f"http://localhost:{port}",
        secret.as_uri(),
        str(secret),
    ]
    tried: list[object] = []

    def refuse(*arguments: object, **_: object) -> None:
        tried.append(arguments)
        raise OSError("nothing here may open a connection")

    async def scenario() -> None:
        for name in ("connect", "connect_ex"):
            monkeypatch.setattr(socket.socket, name, refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        async with trial(settings_of(policy="explicit")) as fed:
            records = [{"uri": uri, "media_type": "text/html", "role": "tool", "session": "s"} for uri in uris]
            ids = (await fed.call("remember", records=records))["ids"]
            await fed.call("remember", records=[{"uri": uris[0], "key": "k"}])
            await fed.call("remember", records=[{"uri": uris[1], "key": "k", "tier": "semantic"}])
            await fed.call("recall", query="http localhost secret nobody", limit=20)
            await fed.call("recall", where={"uri": uris}, embeddings=True)
            await fed.timeline(where={"media_type": "text/html"})
            await fed.call("fetch", key="k")
            await fed.call("promote", ids=ids[:2], tier="semantic")
            await fed.call("consolidate")
            await fed.call("session/close", session="s")
            await fed.settled()
            shown = await fed.timeline()
            assert {record["uri"] for record in shown} == set(uris)
            assert not any("nobody may read this" in json.dumps(record) for record in shown)
            await fed.call("forget", where={"uri": uris})

    run(anyio_backend, scenario)
    monkeypatch.undo()
    assert tried == []
    with listening, pytest.raises(BlockingIOError):
        listening.accept()
