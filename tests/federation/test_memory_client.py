"""The client API: the typed client over every binding, with this project's servers and with others."""

import contextlib
import inspect
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import a2m_router
from a2m_router import blocking
from a2m_router.config.loading import ConfigError
from a2m_router.config.settings import Principal
from a2m_router.daemon.serve.authentication import admission
from a2m_router.protocol.client import results
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import ConnectionLost, NoAnswer, Settled, connect_local, settled
from a2m_router.protocol.client.inputs import NewRecord, Prompt
from a2m_router.protocol.client.memory import RESET, Memory
from a2m_router.protocol.client.results import BadAnswer, Description, Record
from a2m_router.protocol.server.http import application, serve_http
from a2m_router.protocol.server.server import Answering, Caller
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.storage.database import DatabaseError
from a2m_router.tiers.profile import CannotServe
from tests.conformance.small_server import Server
from tests.servers.habits import HABITS
from tests.support.examples import scaled
from tests.support.federated import Trial, trial
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

STORE: Final = [sys.executable, "-m", "a2m_store.cli"]
SMALL: Final = [sys.executable, "-c", "from tests.conformance.small_server import Server; Server().serve_stdio()"]
FEDERATION: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
[tiers.semantic]
kind = "semantic"
command = ["a2m-store", "semantic.db"]
"""

EVERYTHING: Final = {
    "protocol": "a2m/0.1",
    "name": "fake",
    "capabilities": [
        *("core", "tiers", "salience", "scopes", "sessions", "keys", "embeddings", "external", "events"),
        *("summarize", "prompt"),
    ],
    "methods": [],
}


class Fake:
    """A `Peer` that returns the given results of each method in turn, and repeats the last one.

    A result that is an exception is raised. `asked` lists the calls.
    """

    def __init__(self, **results: list[Any]) -> None:
        self.lost = anyio.Event()
        self.reason: str | None = None
        self.heard = -math.inf
        self.asked: list[tuple[str, Mapping[str, Any]]] = []
        self._results = {"describe": [EVERYTHING], **results}

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> msgspec.Raw:
        await anyio.lowlevel.checkpoint()
        name = method.removeprefix("memory/").replace("/", "_")
        self.asked.append((name, msgspec.json.decode(msgspec.json.encode(params))))
        results = self._results[name]
        result = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(result, Exception):
            raise result
        return msgspec.Raw(result if isinstance(result, bytes) else msgspec.json.encode(result))

    def params_of(self, method: str) -> Mapping[str, Any]:
        """Return the parameters of the last call of a method."""
        return next(params for name, params in reversed(self.asked) if name == method)


def small(server: Server) -> Answering:
    """Return a small server as a binding's handler of messages."""

    async def answer(message: bytes, caller: Caller) -> bytes | None:
        return server.answer(message)

    return answer


@asynccontextmanager
async def memory_of(server: Server) -> AsyncIterator[Memory]:
    async with connect_local(small(server)) as peer:
        yield Memory(peer)


def record(**fields: Any) -> dict[str, Any]:
    return {"id": "r1", "content": "x", "created_at": "2026-07-28T10:15:30.123Z", **fields}


# --- calls and their results


async def test_every_method_of_a_full_server_can_be_used() -> None:
    async with memory_of(Server()) as memory:
        described = await memory.describe()
        assert (described.name, described.protocol) == ("small", "a2m/0.1")
        assert described.tiers is not None
        assert [tier.name for tier in described.tiers] == ["working", "episodic", "semantic", "procedural"]
        before = (await memory.events()).cursor
        [city] = await memory.remember("Rome is the city", key="user/city", metadata={"n": [1, 2.5, None]}, owner="al")
        [turn] = await memory.remember("a turn", session="s", role="user", group="g", tier="working")
        picture = await memory.remember(uri="file:///a.png", media_type="image/png", embedding=[1.0, 0.0])
        found = await memory.recall("which city", limit=3, where={"owner": "al"}, prompt=Prompt(budget=100, cite=True))
        [best] = found.records
        assert (best.id, best.key, best.revision, best.metadata) == (city, "user/city", 0, {"n": [1, 2.5, None]})
        assert (found.prompt, found.prompt_ids, found.degraded) == ("- Rome is the city", (city,), ())
        assert best.score == 0.5
        assert [one.id for one in (await memory.timeline(session="s")).records] == [turn]
        assert [one.id for one in (await memory.recall(embedding=[1.0, 0.1], embeddings=True)).records] == picture
        assert await memory.fetch("user/city", owner="al") == msgspec.structs.replace(best, score=None)
        assert await memory.fetch("user/town") is None
        assert await memory.promote([turn], "semantic", salience=2) == 1
        assert await memory.reinforce([turn], amount=3) == 1
        assert [(one.session, one.records) for one in await memory.sessions()] == [("s", 1)]
        closed = await memory.close_session("s")
        assert (closed.closed, closed.flushed, closed.moved) == ("s", 0, 0)
        assert (await memory.consolidate()).counts == {"working": 2, "episodic": 0, "semantic": 1, "procedural": 0}
        summary = await memory.summarize(tier="working", into="semantic", key="sum")
        assert (summary.read, summary.written, [one.tier for one in summary.records]) == (2, 1, ["semantic"])
        assert await memory.forget([turn, "nobody"]) == 1
        seen = await memory.events(before, kinds=["written"])
        assert [event["id"] for event in seen.events] == [city, turn, *picture, summary.records[0].id]
        with pytest.raises(A2MError) as refused:
            await memory.recall("x", tier="nowhere")
        assert refused.value.code == Code.UNKNOWN_TIER


async def test_the_server_is_greeted_once_before_anything_else() -> None:
    fake = Fake(recall=[{"records": []}])
    memory = Memory(fake)
    await memory.recall("x")
    await memory.for_owner("alice").recall("y")
    assert [name for name, _ in fake.asked] == ["describe", "recall", "recall"]
    assert fake.asked[0][1] == {"protocol": "a2m/0.1"}


async def test_a_method_of_an_undeclared_capability_is_not_called() -> None:
    fake = Fake(describe=[{**EVERYTHING, "capabilities": ["core"]}])
    memory = Memory(fake)
    for call in (memory.fetch("k"), memory.sessions(), memory.promote(["x"], "t"), memory.subscribe()):
        with pytest.raises(A2MError) as refused:
            await call
        assert refused.value.code == Code.CAPABILITY_NOT_SUPPORTED
    assert [name for name, _ in fake.asked] == ["describe"]


async def test_what_is_not_given_is_not_sent() -> None:
    fake = Fake(recall=[{"records": []}], timeline=[{"records": []}], events=[{"events": [], "cursor": "1"}])
    memory = Memory(fake)
    await memory.recall()
    await memory.timeline(prompt=True, embeddings=True)
    await memory.events()
    assert fake.asked[1:] == [("recall", {}), ("timeline", {"embeddings": True, "prompt": True}), ("events", {})]


async def test_a_view_has_its_own_defaults_and_a_call_its_own_word() -> None:
    fake = Fake(remember=[{"ids": ["a"]}], timeline=[{"records": []}], recall=[{"records": []}])
    memory = Memory(fake)
    alice = memory.for_owner("alice").in_session("s")
    await alice.remember("x")
    assert fake.params_of("remember") == {"records": [{"content": "x"}], "owner": "alice", "session": "s"}
    await alice.remember("x", owner="bob", session="t")
    assert fake.params_of("remember") == {"records": [{"content": "x"}], "owner": "bob", "session": "t"}
    await alice.timeline(where={"role": "user"})
    assert fake.params_of("timeline") == {"where": {"role": "user", "session": "s"}, "owner": "alice"}
    await memory.recall("x")
    assert fake.params_of("recall") == {"query": "x"}


async def test_a_call_takes_as_long_as_it_may() -> None:
    given_up = anyio.Event()

    async def slow(message: bytes, caller: Caller) -> bytes | None:
        if b"recall" in message:
            await given_up.wait()
        return Server().answer(message)

    async with connect_local(slow) as peer:
        with pytest.raises(NoAnswer, match=r"no answer within 0\.01 s"):
            await Memory(peer).within(0.01).recall("x")
        given_up.set()


@pytest.mark.parametrize(
    ("method", "result", "sentence"),
    [
        (
            "recall",
            {"records": [record(created_at=5)]},
            r"memory/recall: .*records\[0\]\.created_at: expected a string",
        ),
        ("recall", {}, r"memory/recall: .*records: required, and missing"),
        ("recall", [], r"memory/recall: .*expected an object"),
        ("timeline", {"records": [record(metadata=[])]}, "memory/timeline: .*'r1': metadata: expected an object"),
        ("forget", {"forgotten": "all"}, "memory/forget: .*forgotten: expected an integer"),
        ("remember", {"ids": []}, "memory/remember: the server returned 0 ids for 1 records"),
        ("fetch", {}, "memory/fetch: .*record: required, and missing"),
        ("events", {"events": []}, "memory/events: .*cursor"),
        ("events_subscribe", {"subscribed": False}, "memory/events/subscribe: .*false"),
        ("describe", {**EVERYTHING, "protocol": "a2m/0.2"}, "memory/describe: the server speaks 'a2m/0.2'"),
    ],
)
async def test_an_answer_of_another_shape_is_named(method: str, result: Any, sentence: str) -> None:
    memory = Memory(Fake(**{method: [result]}))
    calls: dict[str, Callable[[], Any]] = {
        "recall": lambda: memory.recall("x"),
        "timeline": memory.timeline,
        "forget": lambda: memory.forget(["a"]),
        "remember": lambda: memory.remember("x"),
        "fetch": lambda: memory.fetch("k"),
        "events": memory.events,
        "events_subscribe": memory.subscribe,
        "describe": memory.describe,
    }
    with pytest.raises(BadAnswer, match=sentence):
        await calls[method]()


async def test_optional_members_may_be_missing_and_unknown_ones_are_ignored() -> None:
    """Optional members may also be null."""
    bare = {"protocol": "a2m/0.1", "name": "other", "capabilities": ["core"], "limits": None, "color": "green"}
    nulls = record(metadata=None, tier=None, embedding=None, color="green")
    memory = Memory(Fake(describe=[bare], recall=[{"records": [record(), nulls], "degraded": "no", "prompt": None}]))
    assert await memory.describe() == Description(protocol="a2m/0.1", name="other", capabilities=frozenset({"core"}))
    found = await memory.recall("x")
    plain = Record(id="r1", content="x", created_at="2026-07-28T10:15:30.123Z")
    assert (found.records, found.degraded) == ((plain, plain), ())


def test_metadata_that_python_cannot_count_with_is_read_all_the_same() -> None:
    text = '{"huge": 1e400, "long": ' + "9" * 5000 + ', "exact": ' + "8" * 30 + "}"
    raw = json.dumps({"records": [record(metadata="here")]}).replace('"here"', text)
    [found] = results.read_found("memory/recall", raw.encode()).records
    assert found.metadata == {"huge": float("inf"), "long": float("inf"), "exact": int("8" * 30)}


@pytest.mark.parametrize("nothing", [{}, {"limit": 5}])
async def test_a_selector_is_needed_to_forget_and_to_summarize(nothing: dict[str, Any]) -> None:
    fake = Fake()
    memory = Memory(fake)
    with pytest.raises(A2MError, match="at least one of ids, query") as refused:
        await memory.summarize(**nothing)
    assert refused.value.code == Code.INVALID_PARAMS
    with pytest.raises(A2MError, match="at least one of ids, query"):
        await memory.forget(owner="alice")
    assert fake.asked == []


async def test_what_is_no_record_is_refused_before_it_is_sent() -> None:
    fake = Fake()
    memory = Memory(fake)
    endless: dict[str, Any] = {}
    endless["n"] = endless
    for what, sentence in (
        ({"contents": "x"}, "contents"),
        ({"content": 5}, "content: expected a string"),
        ({"role": "user"}, "expected content, a uri or an embedding"),
        ({"content": "x", "metadata": {"n": float("nan")}}, "JSON"),
        ({"content": "x", "metadata": {"n": object()}}, "JSON"),
        ({"content": "x", "metadata": endless}, "JSON"),
    ):
        with pytest.raises(ValueError, match=sentence):
            await memory.remember(what)
    with pytest.raises(ValueError, match="for one record"):
        await memory.remember([{"content": "x"}, {"content": "y"}], key="k")
    with pytest.raises(ValueError, match="JSON"):
        # NaN would arrive as null, which matches every record without that member.
        await memory.forget(where={"n": float("nan")})
    with pytest.raises(ValueError, match="several strings"):
        await memory.forget("r1")
    assert fake.asked == []


async def test_keywords_fill_in_what_records_leave_out() -> None:
    fake = Fake(remember=[{"ids": ["a", "b"]}])
    await Memory(fake).remember([{"content": "x", "tier": "a"}, NewRecord(content="y")], tier="b", role="user")
    assert fake.params_of("remember")["records"] == [
        {"content": "x", "tier": "a", "role": "user"},
        {"content": "y", "tier": "b", "role": "user"},
    ]


HEEDING: Final = {**EVERYTHING, "store": {"pages": True, "if_revision": True}}


@pytest.mark.parametrize("said", [None, "sqlite", {"if_revision": "yes"}, {"pages": True}])
async def test_a_server_that_would_ignore_a_condition_is_not_asked(said: object) -> None:
    fake = Fake(describe=[{**EVERYTHING, "store": said}], remember=[{"ids": ["a"]}])
    memory = Memory(fake)
    for condition in (0, None):
        calls: tuple[Callable[[], Awaitable[object]], ...] = (
            lambda: memory.remember("x", key="k", if_revision=condition),  # noqa: B023
            lambda: memory.remember_all([{"content": "x", "key": "k", "if_revision": condition}]),  # noqa: B023
        )
        for call in calls:
            with pytest.raises(
                A2MError, match="it would ignore the condition and replace the record at the key"
            ) as refused:
                await call()
            assert refused.value.code == Code.CAPABILITY_NOT_SUPPORTED
    assert [method for method, _ in fake.asked] == ["describe"]
    await memory.remember("x", key="k")
    assert "if_revision" not in fake.params_of("remember")["records"][0]


async def test_a_condition_is_sent_as_it_is_given() -> None:
    """`if_revision=None` is sent, too. It is the condition that no record has the key."""
    fake = Fake(describe=[HEEDING], remember=[{"ids": ["a"]}, {"ids": ["a", "b", "c"]}])
    memory = Memory(fake)
    for condition in (0, 7, None):
        await memory.remember("x", key="k", if_revision=condition)
        assert fake.params_of("remember")["records"] == [{"content": "x", "key": "k", "if_revision": condition}]
        fake._results["remember"].insert(0, {"ids": ["a"]})
    fake._results["remember"] = [{"ids": ["a", "b", "c"]}]
    records: list[NewRecord | Mapping[str, Any]] = [
        {"content": "x", "key": "k", "if_revision": None},
        NewRecord(content="y", key="l", if_revision=3),
    ]
    await memory.remember([*records, {"content": "z", "key": "m"}])
    assert [record.get("if_revision", "-") for record in fake.params_of("remember")["records"]] == [None, 3, "-"]
    with pytest.raises(ValueError, match="for one record"):
        await memory.remember(records, if_revision=None)
    with pytest.raises(ValueError, match="if_revision: expected an integer or null, got a string"):
        await memory.remember({"content": "x", "key": "k", "if_revision": "new"})


async def test_a_page_is_edited_by_what_was_fetched_of_it() -> None:
    async with trial() as fed:
        memory = Memory(fed.client)
        assert (await memory.describe()).heeds_if_revision
        for number in range(3):
            page = await memory.fetch("k")
            seen = None if page is None else page.revision
            assert len(await memory.remember(str(number), key="k", if_revision=seen)) == 1
            with pytest.raises(A2MError, match="fetch it, and repeat the change on its current content") as refused:
                await memory.remember("another", key="k", if_revision=seen)
            assert refused.value.data == {"reason": "revision", "revision": number}


async def test_any_number_of_records_is_written_within_the_servers_limits() -> None:
    server = Server()
    async with memory_of(server) as memory:
        ids = await memory.remember_all({"content": f"note {number}", "tier": "semantic"} for number in range(250))
        found = await memory.timeline(tier="semantic")
    assert ids == [f"r{number}" for number in range(1, 251)]
    assert [one.content for one in found.records] == [f"note {number}" for number in range(250)]


JSON: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(metadata=st.dictionaries(st.text(), JSON, max_size=4), content=st.text())
@settings(max_examples=scaled(20))
def test_what_is_written_comes_back_equal(metadata: dict[str, Any], content: str) -> None:
    async def round_trip() -> None:
        async with trial() as fed:
            memory = Memory(fed.client)
            [id] = await memory.remember(content, metadata=metadata)
            [back] = (await memory.timeline(where={"id": id})).records
            assert (back.content, back.metadata) == (content, metadata)

    anyio.run(round_trip)


# --- events


async def seen_by(memory: Memory, **watching: Any) -> list[Mapping[str, Any]]:
    """Return the events of a watch until the connection is lost."""
    seen: list[Mapping[str, Any]] = []
    with contextlib.suppress(ConnectionLost):
        async for event in memory.watch(interval=0.001, **watching):
            seen.append(event)  # noqa: PERF401 - what came before the end counts
    return seen


def told(cursor: str, *numbers: int, **more: Any) -> dict[str, Any]:
    return {"events": [{"kind": "written", "id": str(number)} for number in numbers], "cursor": cursor, **more}


GONE: Final = ConnectionLost("gone", settled())


async def test_a_watch_asks_on_from_where_it_is_and_tells_what_was_lost() -> None:
    fake = Fake(events=[told("5"), told("7", 5, 6, more=True), told("9", 8, reset=True), told("9"), GONE])
    seen = await seen_by(Memory(fake), kinds=["written"])
    assert [event.get("id", event["kind"]) for event in seen] == ["5", "6", RESET, "8"]
    assert [params.get("cursor") for name, params in fake.asked if name == "events"] == [None, "5", "7", "9", "9"]
    assert {tuple(params["kinds"]) for name, params in fake.asked if name == "events"} == {("written",)}


async def test_a_watch_begins_anew_where_its_cursor_is_refused() -> None:
    refusal = A2MError(Code.INVALID_PARAMS, "no cursor of mine")
    fake = Fake(events=[refusal, told("1"), told("2", 1), GONE])
    seen = await seen_by(Memory(fake), cursor="of another life")
    assert [event["kind"] for event in seen] == [RESET, "written"]


async def test_a_watch_that_is_refused_for_another_reason_ends() -> None:
    fake = Fake(events=[A2MError(Code.INVALID_PARAMS, "no such kind")])
    with pytest.raises(A2MError, match="no such kind"):
        await anext(Memory(fake).watch(kinds=["wrtten"]))


async def test_the_routers_events_can_be_watched() -> None:
    event = None
    async with trial() as fed:
        memory = Memory(fed.client)
        if "events" in (await memory.describe()).capabilities:
            cursor = (await memory.events()).cursor
            [id] = await memory.remember("x")
            async with contextlib.aclosing(memory.watch(["written"], cursor=cursor)) as watch:
                event = await anext(watch)
    if event is None:
        pytest.skip("the router does not declare events")
    assert (event["kind"], event["id"], event["tier"]) == ("written", id, "working")


async def test_the_router_summarizes_and_renders() -> None:
    async with trial() as fed:
        memory = Memory(fed.client)
        declared = (await memory.describe()).capabilities
        ids = await memory.remember(
            [{"content": "the deploy key rotates every 90 days"}, {"content": "Rome is a city"}]
        )
        if "prompt" in declared:
            found = await memory.recall("deploy key", prompt=Prompt(style="facts", budget=60))
            assert found.prompt is not None
            assert "rotates every 90 days" in found.prompt
            assert found.prompt_ids == (ids[0],)
        if "summarize" in declared:
            summary = await memory.summarize(ids, into="semantic", key="page")
            assert (summary.read, summary.written) == (2, len(summary.records))
            assert {one.tier for one in summary.records} <= {"semantic"}
    if not {"prompt", "summarize"} <= declared:
        pytest.skip("the router does not declare prompt and summarize")


# --- ways to connect


async def federation_at(folder: Path, text: str = FEDERATION) -> Path:
    path = folder / "federation.toml"
    await anyio.Path(path).write_text(text)
    return path


async def test_a_federation_is_opened_in_the_program_itself(tmp_path: Path) -> None:
    path = await federation_at(tmp_path)
    for content in ("the first life", "the second life"):
        async with a2m_router.open_federation(path, owner="alice") as memory:
            await memory.remember(content, tier="semantic")
            last = (await memory.recall("life")).records
    assert {(one.content, one.owner) for one in last} == {("the first life", "alice"), ("the second life", "alice")}


async def test_what_is_raised_in_the_block_comes_out_as_it_is(tmp_path: Path) -> None:
    path = await federation_at(tmp_path)
    with pytest.raises(A2MError) as refused:
        async with a2m_router.open_federation(path) as memory:
            await memory.recall("x", tier="nowhere")
    assert refused.value.code == Code.UNKNOWN_TIER


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_federation_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such file"):
        async with a2m_router.open_federation(tmp_path / "nothing.toml"):
            pass
    path = await federation_at(tmp_path)
    async with a2m_router.open_federation(path) as memory:
        with pytest.raises(DatabaseError, match="in use by"):
            async with a2m_router.open_federation(path):
                pass
        await memory.remember("x", tier="semantic")
    async for file in anyio.Path(tmp_path).glob("semantic.db*"):
        await file.unlink()
    with pytest.raises(CannotServe, match="another store is behind this tier"):
        async with a2m_router.open_federation(path):
            pass


async def test_the_file_and_its_programs_see_the_environment_that_is_given(tmp_path: Path) -> None:
    path = await federation_at(
        tmp_path, FEDERATION + '[[serve.principals]]\nowner = "alice"\ntoken_env = "ONLY_IN_THE_TEST"\n'
    )
    with pytest.raises(ConfigError, match="token_env: the environment variable ONLY_IN_THE_TEST is not set"):
        async with a2m_router.open_federation(path, environ={}):
            pass


@pytest.mark.process
async def test_a_store_is_reached_behind_its_command(tmp_path: Path) -> None:
    async with a2m_router.connect_command([*STORE, str(tmp_path / "a.db")]) as memory:
        [id] = await memory.remember("hello", key="k")
        found = await memory.fetch("k")
        assert found is not None
        assert found.id == id
    with pytest.raises(CannotStart, match="there is no such program"):
        async with a2m_router.connect_command(["/no/such/program"]):
            pass
    with pytest.raises(a2m_router.Unanswered, match="status 1"):
        async with a2m_router.connect_command(["false"]):
            pass


@pytest.mark.process
async def test_events_come_by_themselves_to_the_callback(tmp_path: Path) -> None:
    arrived, events = anyio.create_memory_object_stream[dict[str, Any]](10)

    def hand_on(event: dict[str, Any]) -> None:
        arrived.send_nowait(event)
        raise RuntimeError("a callback that fails does not end the connection")

    with arrived, events:
        async with a2m_router.connect_command(SMALL, cwd=ROOT, on_notification=hand_on) as memory:
            described = await memory.describe()
            assert described.events is not None
            assert described.events.push
            await memory.subscribe(["written"])
            ids = await memory.remember("one") + await memory.remember("two")
            with anyio.fail_after(30):
                assert [(await events.receive())["id"] for _ in ids] == ids
            await memory.unsubscribe()
            await memory.remember("three")
            await memory.describe()
            assert events.statistics().current_buffer_used == 0


async def test_the_routers_events_come_by_themselves(tmp_path: Path) -> None:
    event = None
    arrived, events = anyio.create_memory_object_stream[dict[str, Any]](10)
    with arrived, events:
        federation = await federation_at(tmp_path)
        async with a2m_router.open_federation(federation, on_notification=arrived.send_nowait) as memory:
            described = await memory.describe()
            if described.events is not None and described.events.push:
                await memory.subscribe()
                [id] = await memory.remember("x")
                with anyio.fail_after(30):
                    event = await events.receive()
    if event is None:
        pytest.skip("the router pushes no events in its own process")
    assert (event["kind"], event["id"]) == ("written", id)


@asynccontextmanager
async def over_http(fed: Trial, **tokens: str) -> AsyncIterator[str]:
    """Serve a federation over HTTP and yield its URL. `tokens` maps owners to their tokens."""
    principals = [
        Principal(owner=owner, token_sha256=sha256(token.encode()).hexdigest()) for owner, token in tokens.items()
    ]

    async def profile(caller: Caller) -> Any:
        return {}

    app = application(fed.federation.answer, admit=admission((), principals), profile=profile)
    async with anyio.create_task_group() as tasks:
        host, port = await tasks.start(serve_http, app, "127.0.0.1", 0)
        yield f"http://{host}:{port}/"
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_server_is_reached_over_http() -> None:
    async with (
        trial() as fed,
        over_http(fed, alice="open sesame", bob="geheim") as url,
        a2m_router.connect(url, "open sesame") as alice,
        a2m_router.connect(url, token="geheim") as bob,
    ):
        await alice.remember("alice's cat", tier="semantic")
        await bob.remember("bob's cat", tier="semantic")
        assert [one.content for one in (await alice.recall("cat")).records] == ["alice's cat"]
        with pytest.raises(A2MError) as refused:
            await alice.for_owner("bob").recall("cat")
        assert refused.value.code == Code.SCOPE_DENIED
        with pytest.raises(a2m_router.Unanswered, match="401"):
            async with a2m_router.connect(url, "open says me"):
                pass


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("url", ["", "127.0.0.1:8778", "ftp://x/", "http://", "http://[", "http://x:99999999/"])
async def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected a URL"):
        async with a2m_router.connect(url):
            pass


@pytest.mark.parametrize("token", ["", "secret\nX-Owner: bob", " secret", "sécret"])
async def test_a_token_that_no_header_can_carry_is_not_quoted(token: str) -> None:
    with pytest.raises(ValueError, match="the token") as refused:
        async with a2m_router.connect("http://127.0.0.1:1/", token):
            pass
    assert "cret" not in str(refused.value)


async def test_a_server_that_is_not_there_is_said_in_a_sentence() -> None:
    with pytest.raises(a2m_router.Unanswered, match="cannot be reached"):
        async with a2m_router.connect("http://127.0.0.1:1/", "secret") as memory:
            await memory.describe()


# --- without async


def public(type: type) -> dict[str, inspect.Signature]:
    """Return the public methods of a class by name, with their signatures."""
    members = inspect.getmembers(type, inspect.isfunction)
    return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}


def test_the_blocking_memory_has_the_same_methods_with_the_same_parameters() -> None:
    waiting, finished = public(Memory), public(blocking.Memory)
    assert {name: list(s.parameters.values()) for name, s in waiting.items()} == {
        name: list(s.parameters.values()) for name, s in finished.items()
    }
    for name in ("connect", "connect_command", "open_federation"):
        assert inspect.signature(getattr(blocking, name)) == inspect.signature(getattr(a2m_router, name))


@pytest.mark.process
def test_scripts_use_a_store_without_async(tmp_path: Path) -> None:
    with blocking.connect_command([*STORE, str(tmp_path / "a.db")]) as memory:
        alice = memory.for_owner("alice")
        [id] = alice.remember("hello", key="k")
        found = alice.fetch("k")
        assert found is not None
        assert (found.id, found.owner) == (id, "alice")
        with pytest.raises(A2MError):
            memory.recall("x", where={"a": {}}, limit=0)
    with pytest.raises(ValueError, match="expected a URL"), blocking.connect("nowhere"):
        pass


def test_scripts_use_a_federation_without_async(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    with blocking.open_federation(tmp_path / "federation.toml") as memory:
        memory.remember_all([{"content": "one"}, {"content": "two"}])
        assert [one.content for one in memory.timeline().records] == ["one", "two"]
        assert memory.describe().name == "federation"


@pytest.mark.process
def test_scripts_watch_without_async() -> None:
    with blocking.connect_command(SMALL, cwd=ROOT) as memory:
        before = memory.events().cursor
        ids = memory.remember("one") + memory.remember("two")
        watch = memory.watch(cursor=before)
        assert [next(watch)["id"] for _ in ids] == ids
        watch.close()


# --- the exported names, and what an import loads


def test_all_that_is_offered_is_there() -> None:
    for name in a2m_router.__all__:
        assert getattr(a2m_router, name) is not None
    assert a2m_router.Memory is Memory
    assert set(a2m_router.__all__) <= set(dir(a2m_router))
    with pytest.raises(AttributeError, match="no attribute 'memory_of_things'"):
        _ = a2m_router.memory_of_things


@pytest.mark.process
def test_a_part_can_be_used_without_loading_the_whole() -> None:
    program = (
        "import sys\n"
        "import a2m_router.protocol.client.client, a2m_router.protocol.server.server, a2m_router.storage.database\n"
        "late = {'a2m_router.daemon.app', 'a2m_router.config.loading', 'a2m_router.catalog', 'httpx'}\n"
        "assert not late & set(sys.modules), sys.modules\n"
        "from a2m_router import A2MError\n"
        "assert 'a2m_router.daemon.app' not in sys.modules\n"
        "from a2m_router import open_federation, blocking\n"
        "assert 'a2m_router.daemon.app' in sys.modules and blocking.open_federation\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


async def test_no_token_is_in_a_repr() -> None:
    with contextlib.suppress(a2m_router.Unanswered):
        async with a2m_router.connect("http://127.0.0.1:1/", "very-secret") as memory:
            assert "very-secret" not in repr(memory)
    assert "very-secret" not in repr(Memory(Fake(), owner="alice"))


@pytest.mark.parametrize("habit", HABITS)
async def test_a_program_reads_servers_with_habits(habit: str) -> None:
    """These servers return other fields than they were given."""
    capabilities = ("tiers", "salience", "sessions", "keys", "embeddings")
    server = HABITS[habit](capabilities=capabilities, limits={"max_recall_limit": 9})

    async def answer(message: bytes, caller: Caller) -> bytes | None:
        return server.answer(message)

    async with connect_local(answer) as peer:
        memory = Memory(peer)
        described = await memory.describe()
        assert described.limits is not None
        assert described.tiers is not None
        assert (described.limits.max_recall_limit, described.tiers[0].count) == (9, 0)
        [id] = await memory.remember("a light ", session="s", key="k", embedding=[1, 2])
        for found in (await memory.recall("light", embeddings=True), await memory.timeline(embeddings=True)):
            assert [(each.id, each.content, each.revision) for each in found.records] == [(id, "a light ", 0)]
            assert found.records[0].embedding == (1.0, 2.0)
        assert [(each.session, each.records) for each in await memory.sessions()] == [("s", 1)]
        assert await memory.reinforce([id]) == 1
        with pytest.raises(A2MError) as refused:
            await memory.recall("light", tier="nowhere")
        assert refused.value.code == Code.UNKNOWN_TIER
        assert await memory.forget([id]) == 1
