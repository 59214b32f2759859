"""A principal never learns of another's private records (§6): by no method, no count, no event and no error.

The properties compare two worlds that differ in the private records of another owner; see `two_worlds`. Then follow one
plain test for each way to learn of them, one for each exception that the protocol makes, with how little it reveals,
and tests of what the policy may publish. A2M_EXAMPLES=50 runs fifty times as many examples.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import anyio
import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.config.loading import ConfigError, parse
from a2m_router.config.settings import Settings
from a2m_router.daemon.serve import rights
from a2m_router.daemon.serve.authentication import admission
from a2m_router.protocol.server.event_log import Feed
from a2m_router.protocol.server.http import application, serve_http
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.capabilities import METHODS
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.events import Forgotten, Place, Sight, named
from a2m_router.protocol.wire.jsonrpc import render_call, render_error
from a2m_router.protocol.wire.method_params import Describe
from tests.support import two_worlds as w
from tests.support.examples import examples, run
from tests.support.federated import (
    FOUR_TIERS,
    START,
    Steered,
    Task,
    Trial,
    Weather,
    at_once,
    method_of,
    settings_of,
    trial,
)
from tests.support.histories import restless
from tests.support.principals import EVERYTHING, common_ground, remember, secluded
from tests.support.two_worlds import PRIVATE, SECLUDED, SECRET, SHARED, Answer, Call, Step, ask, two_worlds

# --- no call of "b" tells the two worlds apart


# "b" may write to every tier, or to private tiers alone.
rights_to_write: Final = st.sampled_from([None, frozenset(PRIVATE)])


@asynccontextmanager
async def allowed_to_b(writes: frozenset[str] | None) -> AsyncIterator[None]:
    """Restrict the tiers to which "b" may write. A refusal must reveal no more than a result."""
    with patch.dict(w.CALLERS, b=Caller(asserts_owner=False, owner="b", writes=writes)):
        yield


@pytest.mark.rule(n=14)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(6)
@given(history=st.lists(w.steps, min_size=1, max_size=4), distil=st.booleans(), writes=rights_to_write)
def test_no_answer_tells_what_another_does_in_private(
    anyio_backend: str, history: list[Step], distil: bool, writes: frozenset[str] | None
) -> None:
    async def scenario() -> None:
        async with two_worlds(secluded("background", distil=distil)) as worlds, allowed_to_b(writes):
            await common_ground(worlds)
            for step in history:
                await worlds.apart(step.first, step.second)
                for who, call in step.seen_by_all:
                    await worlds.alike(who, call)
                for call in step.asked:
                    await worlds.compare(call)
            for call in EVERYTHING:
                await worlds.compare(call)

    run(anyio_backend, scenario)


# A pass that "a" requests also moves "b"'s records that are due, and need not stay hidden.
secrets_without_passes = w.private.filter(lambda call: call.method not in ("consolidate", "session/close"))


@pytest.mark.rule(n=14)
@examples(5)
@given(
    secrets=st.lists(secrets_without_passes, min_size=2, max_size=8),
    asked=st.lists(w.reads | w.writes, min_size=2, max_size=8),
    seed=st.integers(0, 2**32),
    writes=rights_to_write,
)
def test_nothing_of_it_shows_while_it_happens(
    anyio_backend: str, secrets: list[Call], asked: list[Call], seed: int, writes: frozenset[str] | None
) -> None:
    async def scenario() -> None:
        weather = restless(seed), restless(seed)
        async with two_worlds(secluded(), weather=weather, settle=False) as worlds, allowed_to_b(writes):
            await common_ground(worlds)

            async def busy() -> None:
                for call in secrets:
                    await worlds.ask_in_private(worlds.first, call)

            async def curious() -> None:
                for call in [*asked, *EVERYTHING]:
                    await worlds.compare(call)

            await at_once(busy, curious)

    run(anyio_backend, scenario)


def test_every_method_is_asked() -> None:
    """The subscriptions have tests of their own below, with a connection that carries notifications."""
    methods = {method.removeprefix("memory/") for each in METHODS.values() for method in each}
    assert methods - {"events/subscribe", "events/unsubscribe"} == {*w.READS, *w.WRITES}


# --- each way by itself

HIS: Final = tuple(f"a-{tier}" for tier in PRIVATE)


@asynccontextmanager
async def with_secrets(settings: Settings | None = None, weather: Weather | None = None) -> AsyncIterator[Trial]:
    """A federation in which "a" has a record in each private tier, in the session "s" and the group "g".

    The ids and keys can be guessed.
    """
    async with trial(settings or secluded(), weather=weather) as fed:
        for tier, id in zip(PRIVATE, HIS, strict=True):
            record = {
                "id": id,
                "content": f"alpha {SECRET}",
                "tier": tier,
                "key": f"k/{tier}",
                "session": "s",
                "group": "g",
                "role": "user",
                "metadata": {"m": 1},
                "embedding": [1.0, 0.0],
            }
            await done(fed, "remember", records=[record])
        yield fed


async def done(fed: Trial, method: str, **params: Any) -> Any:
    """Return the result of a call by "a", which must succeed."""
    return (await ask(fed, "a", method, **params)).result


async def told(fed: Trial, method: str, **params: Any) -> Any:
    """Return the result of a call by "b". Raise A2MError for an error."""
    answer = await ask(fed, "b", method, **params)
    assert SECRET.encode() not in answer.raw
    return answer.result


async def his(fed: Trial) -> list[dict[str, Any]]:
    """Return all records of "a"."""
    records: list[dict[str, Any]] = (await ask(fed, "a", "timeline", embeddings=True)).result["records"]
    return records


# Every way to select the records of "a".
POINTING: Final[Sequence[dict[str, Any]]] = (
    *({"tier": tier} for tier in PRIVATE),
    *(
        {"where": {name: value}}
        for name, value in {"id": list(HIS), "owner": "a", "session": "s", "group": "g"}.items()
    ),
    *({"where": {name: value}} for name, value in {"key": "k/working", "role": "user", "m": 1, "revision": 0}.items()),
    {"where": {"access_count": 0}},
    {"key_prefix": "k"},
)
NOTHING: Final[dict[str, Any]] = {}
NAMING: Final[Sequence[dict[str, Any]]] = ({"ids": list(HIS)}, {"query": "alpha"}, *POINTING)


@pytest.mark.anyio
async def test_a_recall_finds_nothing_of_another_s() -> None:
    async with with_secrets() as fed:
        for pointing in (NOTHING, *POINTING):
            for ranking in (NOTHING, {"query": f"alpha {SECRET}"}, {"embedding": [1.0, 0.0]}):
                assert await told(fed, "recall", **pointing, **ranking, embeddings=True) == {"records": []}


@pytest.mark.anyio
async def test_a_timeline_shows_nothing_of_another_s() -> None:
    async with with_secrets() as fed:
        for pointing in (NOTHING, *POINTING):
            assert await told(fed, "timeline", **pointing) == {"records": []}


@pytest.mark.anyio
async def test_a_limit_is_filled_with_ones_own_records() -> None:
    """Another owner has written many records since."""
    async with with_secrets(settings_of(policy="explicit")) as fed:
        await told(fed, "remember", records=[{"content": f"alpha {n}", "metadata": {"m": 1}} for n in range(2)])
        await ask(fed, "a", "remember", records=[{"content": f"alpha {SECRET}", "metadata": {"m": 1}}] * 9)
        for where in ({}, {"m": 1}, {"access_count": [0, 1, 2, 3, 4, 5, 6]}):
            for method, ranking in (("timeline", NOTHING), ("recall", NOTHING), ("recall", {"query": "alpha"})):
                records = (await told(fed, method, where=where, limit=2, **ranking))["records"]
                assert {record["content"] for record in records} == {"alpha 0", "alpha 1"}


@pytest.mark.anyio
async def test_a_fetch_does_not_find_another_s_key() -> None:
    async with with_secrets() as fed:
        for tier in PRIVATE:
            assert await told(fed, "fetch", key=f"k/{tier}") == {"record": None}


@pytest.mark.anyio
async def test_a_prompt_holds_nothing_of_another_s() -> None:
    async with with_secrets() as fed:
        for method in ("recall", "timeline"):
            answer = await told(fed, method, prompt={"cite": True})
            assert answer == {"records": [], "prompt": "", "prompt_ids": []}


@pytest.mark.anyio
async def test_a_forget_counts_nothing_of_another_s_and_deletes_nothing() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        for pointing in NAMING:
            assert await told(fed, "forget", **pointing) == {"forgotten": 0}
        assert await his(fed) == before


@pytest.mark.anyio
async def test_a_promotion_counts_nothing_of_another_s_and_moves_nothing() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        for tier in (*PRIVATE, SHARED):
            assert await told(fed, "promote", ids=list(HIS), tier=tier, salience=1.0) == {"promoted": 0}
        assert await his(fed) == before


@pytest.mark.anyio
async def test_a_reinforcement_counts_nothing_of_another_s_and_adds_nothing() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        assert await told(fed, "reinforce", ids=list(HIS), amount=5.0) == {"reinforced": 0}
        assert await his(fed) == before


@pytest.mark.anyio
async def test_a_summary_reads_nothing_of_another_s() -> None:
    async with with_secrets() as fed:
        for pointing in NAMING:
            answer = await told(fed, "summarize", **pointing, into="semantic", key="k/semantic")
            assert answer == {"records": [], "read": 0, "written": 0}


@pytest.mark.anyio
async def test_a_list_of_sessions_names_none_of_another_s() -> None:
    async with with_secrets() as fed:
        assert await told(fed, "session/list") == {"sessions": []}
        await told(fed, "remember", records=[{"content": "mine", "session": "s"}])
        [session] = (await told(fed, "session/list"))["sessions"]
        assert (session["records"], session["tiers"], session["owner"]) == (1, {"working": 1}, "b")


@pytest.mark.anyio
async def test_closing_another_s_session_moves_nothing_of_it() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        answer = await told(fed, "session/close", session="s")
        assert (answer.pop("closed"), set(answer.pop("counts").values())) == ("s", {0})
        assert set(answer.values()) == {0}
        assert await his(fed) == before


@pytest.mark.rule(n=14)
@pytest.mark.anyio
async def test_no_count_of_describe_or_of_a_pass_holds_another_s() -> None:
    async with with_secrets() as fed:
        full = [{"content": f"{SECRET} {n}", "session": "s"} for n in range(9)]
        await ask(fed, "a", "remember", records=full)
        described = await told(fed, "describe")
        assert {tier["count"] for tier in described["tiers"]} == {0}
        passed = await told(fed, "consolidate")
        assert set(passed.pop("counts").values()) == {0}
        assert set(passed.values()) == {0}
        assert len({record["tier"] for record in await his(fed) if record["content"] != f"alpha {SECRET}"}) > 1


async def everything_that_is_an_event(fed: Trial) -> None:
    await done(fed, "remember", records=[{"content": SECRET, "session": "s", "key": "k"}] * 2)
    await done(fed, "promote", ids=[HIS[0]], tier="semantic")
    await done(fed, "session/close", session="s")
    await done(fed, "summarize", ids=list(HIS), key="k")
    await done(fed, "consolidate")
    await done(fed, "forget", where={"session": "s"})


@pytest.mark.rule(n=14)
@pytest.mark.anyio
async def test_no_event_tells_of_another_s_changes() -> None:
    async with with_secrets() as fed:
        cursor = (await told(fed, "events"))["cursor"]
        his_cursor = (await ask(fed, "a", "events")).result["cursor"]
        await everything_that_is_an_event(fed)
        kinds = {event["kind"] for event in (await ask(fed, "a", "events", cursor=his_cursor)).result["events"]}
        assert kinds == {"written", "forgotten", "promoted", "consolidated", "session_closed"}
        # Another caller's cursor, or an invalid one, reads from the oldest event on. It shows nothing more.
        for start in (cursor, his_cursor, "AAAA"):
            answer = await told(fed, "events", cursor=start)
            assert (answer["events"], answer.get("more")) == ([], None)


@pytest.mark.anyio
async def test_of_a_change_of_many_records_only_what_one_sees_is_told() -> None:
    async with with_secrets() as fed:
        await ask(fed, "local", "remember", records=[{"content": "nobody's", "id": "n0"}, {"content": "x", "id": "n1"}])
        cursor = (await told(fed, "events"))["cursor"]
        assert (await ask(fed, "a", "promote", ids=[*HIS, "n0"], tier="episodic")).result == {"promoted": 3}
        assert (await ask(fed, "a", "forget", ids=[*HIS, "n0", "n1"])).result == {"forgotten": 5}
        promoted, forgotten = (await told(fed, "events", cursor=cursor))["events"]
        assert (promoted["count"], promoted["ids"]) == (1, ["n0"])
        assert (forgotten["count"], forgotten["ids"]) == (2, ["n0", "n1"])


class Line:
    """A connection that carries notifications. `feed` is the feed of its subscription."""

    feed: Feed | None = None

    def follow(self, start: Callable[[Callable[[], None]], Feed] | None) -> None:
        self.feed = None if start is None else start(lambda: None)


@pytest.mark.anyio
async def test_no_notification_tells_of_another_s_changes() -> None:
    async with with_secrets() as fed:
        line = Line()
        caller = Caller(asserts_owner=False, owner="b", channel=line)
        await fed.federation.answer(render_call(1, "memory/events/subscribe", {}), caller)
        assert line.feed is not None
        await everything_that_is_an_event(fed)
        assert line.feed.next() is None
        await told(fed, "remember", records=[{"content": "mine"}])
        notice = line.feed.next()
        assert notice is not None
        assert json.loads(notice.line)["params"]["kind"] == "written"


@pytest.mark.anyio
async def test_a_write_with_another_s_id_is_refused_and_changes_nothing() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        for id in HIS:
            for more in (NOTHING, {"key": "k/working"}, {"group": "g", "session": "s", "tier": SHARED}):
                answer = await ask(
                    fed, "b", "remember", records=[{"content": "mine"}, {"content": "x", "id": id, **more}]
                )
                w.assert_says_only_that_it_is_taken(answer, [id])
        assert await his(fed) == before
        assert await told(fed, "timeline") == {"records": []}


@pytest.mark.anyio
async def test_a_write_with_another_s_key_is_a_record_of_one_s_own() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        [id] = (await told(fed, "remember", records=[{"content": "mine", "key": "k/semantic"}]))["ids"]
        assert id not in HIS
        record = (await told(fed, "fetch", key="k/semantic"))["record"]
        assert (record["id"], record["revision"], record["tier"]) == (id, 0, "working")
        assert await his(fed) == before


@pytest.mark.anyio
async def test_another_s_group_of_the_same_name_is_another_group() -> None:
    async with with_secrets() as fed:
        before = await his(fed)
        [id] = (await told(fed, "remember", records=[{"content": "mine", "group": "g"}]))["ids"]
        assert await told(fed, "promote", ids=[id], tier=SHARED) == {"promoted": 1}
        assert await his(fed) == [*before, *(await told(fed, "timeline"))["records"]]


@pytest.mark.anyio
async def test_nobody_can_ask_in_another_s_name() -> None:
    async with with_secrets() as fed:
        required: dict[str, dict[str, Any]] = {
            "remember": {"records": [{"content": "x"}]},
            "forget": {"ids": list(HIS)},
            "promote": {"ids": list(HIS), "tier": SHARED},
            "reinforce": {"ids": list(HIS)},
            "fetch": {"key": "k/working"},
            "session/close": {"session": "s"},
            "summarize": {"ids": list(HIS)},
        }
        for name, method in fed.federation.methods.items():
            if any(field.name == "owner" for field in msgspec.structs.fields(method.params)):
                params = required.get(name.removeprefix("memory/"), {})
                answer = await ask(fed, "b", name.removeprefix("memory/"), **params, owner="a")
                if name != "memory/events/subscribe":  # the channel is checked first, and there is none
                    assert answer.error == {"code": Code.SCOPE_DENIED, "message": "owner: you are 'b', not 'a'"}, name
        answer = await ask(fed, "b", "remember", records=[{"content": "x", "owner": "a"}])
        assert answer.error["code"] == Code.SCOPE_DENIED


@pytest.mark.anyio
async def test_a_shared_record_is_seen_by_all_and_changed_by_its_owner() -> None:
    async with trial(secluded()) as fed:
        published = {"id": "open", "content": "for all", "key": "k", "session": "s", "tier": SHARED}
        await ask(fed, "a", "remember", records=[published])
        [record] = (await told(fed, "timeline"))["records"]
        assert (record["id"], record["owner"]) == ("open", "a")
        assert await told(fed, "forget", ids=["open"]) == {"forgotten": 0}
        assert await told(fed, "promote", ids=["open"], tier="semantic") == {"promoted": 0}
        assert await told(fed, "reinforce", ids=["open"]) == {"reinforced": 0}
        assert await told(fed, "fetch", key="k") == {"record": None}
        assert (await told(fed, "timeline"))["records"] == [record]
        # A record that its owner moves back to a private tier is gone for all others at once.
        await ask(fed, "a", "promote", ids=["open"], tier="semantic")
        assert await told(fed, "timeline") == {"records": []}
        assert await told(fed, "session/list") == {"sessions": []}


@pytest.mark.anyio
@pytest.mark.parametrize(("method", "where"), [("recall", {}), ("timeline", {"m": 1}), ("timeline", {"id": ["open"]})])
async def test_what_its_owner_takes_back_while_it_is_being_read_is_not_shown(
    method: str, where: dict[str, Any]
) -> None:
    steer = Steered()
    async with trial(secluded(), weather=steer) as fed, anyio.create_task_group() as tasks:
        published = {"id": "open", "content": f"alpha {SECRET}", "metadata": {"m": 1}, "tier": SHARED}
        await ask(fed, "a", "remember", records=[published])
        sent = "timeline" if where == {"m": 1} else "recall"
        found = steer.hold(SHARED, sent, after=True)
        read = Task(tasks, lambda: told(fed, method, where=where))
        await found.reached.wait()
        assert (await ask(fed, "a", "promote", ids=["open"], tier="semantic")).result == {"promoted": 1}
        found.release()
        assert await read.ended() == {"records": []}


# --- the ranking of a recall


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("mine", "his", "query", "limit"),
    [
        (["apple", "banana"], ["banana"], "apple banana", 8),  # whether others use a word
        (["apple"] * 3 + ["banana"] * 3, ["banana"] * 9, "apple banana", 1),  # which records are candidates
        (["apple", "apple apple and some more words"], ["how long others write " * 20] * 9, "apple", 8),
    ],
)
async def test_the_order_of_a_recall_tells_nothing_of_another_s_words(
    mine: list[str], his: list[str], query: str, limit: int
) -> None:
    """The rarity of a word must be counted over the records that the caller sees. Otherwise the ranks reveal the words
    that others use.
    """
    async with two_worlds(settings_of(FOUR_TIERS, policy="explicit"), settle=False) as worlds:
        await worlds.alike("b", remember(*mine, tier="semantic"))
        await worlds.apart([remember(*(f"{words} {SECRET}" for words in his), tier="semantic")])
        await worlds.compare(Call("recall", {"query": query, "limit": limit}))


# --- errors, and tiers that fail

ASKING_FOR_TROUBLE: Final = (
    Call("recall", {"query": "alpha"}),
    Call("recall", {"query": "alpha", "tier": "semantic"}),
    Call("timeline", {"where": {"m": 1}}),
    Call("timeline", {"where": {"id": ["mine"]}}),
    Call("fetch", {"key": "mine"}),
    Call("forget", {"query": "alpha"}),
    Call("forget", {"where": {"m": 1}}),
    Call("remember", {"records": [{"content": "new", "tier": "semantic"}]}),
    Call("remember", {"records": [{"content": "changed", "id": "mine", "key": "mine"}]}),
    Call("promote", {"ids": ["mine"], "tier": "working"}),
    Call("session/close", {"session": "mine"}),
    Call("consolidate", {}),
    Call("summarize", {"ids": ["mine"]}),
    Call("summarize", {"query": "alpha"}),
    Call("session/list", {}),
    Call("describe", {}),
)


@pytest.mark.anyio
@pytest.mark.parametrize("refused", ["every call", "the greeting"])
async def test_what_a_tier_says_of_its_trouble_is_not_passed_on(refused: str) -> None:
    """A tier's error may quote its records; the reason why it is down may be its server's last line on stderr."""
    trouble = refused == "the greeting"

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        greeting = method_of(message) == "memory/describe"
        if tier != "semantic" or not trouble or greeting != (refused == "the greeting"):
            return await go_on()
        id = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(message)["id"]))
        return render_error(id, A2MError(Code.INTERNAL_ERROR, f"row 7 is damaged: 'alpha {SECRET}'"))

    async with trial(secluded(), weather=weather) as fed:
        tier = "working" if trouble else "semantic"
        mine = {"id": "mine", "key": "mine", "content": "alpha", "session": "mine", "tier": tier}
        await told(fed, "remember", records=[mine])
        trouble = True
        answers = {str(call): await ask(fed, "b", call.method, **call.params) for call in ASKING_FOR_TROUBLE}
        assert any(b"degraded" in answer.raw or answer.error for answer in answers.values())
        assert [call for call, answer in answers.items() if SECRET.encode() in answer.raw] == []


@pytest.mark.anyio
async def test_describe_says_why_a_tier_is_down_to_none_but_the_local_caller() -> None:
    async with trial(secluded(), down={"semantic"}) as fed:
        assert "it is not there" in json.dumps((await ask(fed, "local", "describe")).result)
        described = await told(fed, "describe")
        assert {tier["name"]: tier["status"] for tier in described["tiers"]}["semantic"] == "down"
        assert "it is not there" not in json.dumps(described)


# --- exceptions of the protocol, and their limits


@pytest.mark.anyio
async def test_that_an_id_is_taken_tells_nothing_of_the_record_that_has_it() -> None:
    kept = {"id": "x", "content": f"beta {SECRET}", "key": "q", "session": "t", "group": "h", "tier": "semantic"}
    async with two_worlds(secluded(), settle=False) as worlds:
        await worlds.apart([remember(SECRET, id="x")], [Call("remember", {"records": [kept]})])
        for more in (NOTHING, {"key": "q"}, {"tier": SHARED}, {"group": "h", "session": "t"}):
            answer = await worlds.compare(remember("mine", id="x", **more))
            w.assert_says_only_that_it_is_taken(answer, ["x"])
        # After a forget no error reveals that the id existed.
        await worlds.apart([Call("forget", {"ids": ["x"]})], [Call("forget", {"where": {"key": "q"}})])
        assert (await worlds.compare(remember("mine", id="x"))).result == {"ids": ["x"]}


@pytest.mark.anyio
async def test_the_width_of_vectors_tells_only_that_there_are_vectors() -> None:
    """The width of vectors is one number for all owners."""
    async with two_worlds(secluded(), settle=False) as worlds:
        secret = remember(SECRET, embedding=[0.25, 0.5, 0.75])
        await worlds.apart([secret], [remember(SECRET, SECRET, embedding=[1.0, 0.0, 0.0], tier="semantic")])
        assert (await worlds.compare(Call("describe", {}))).result["embeddings"]["dimensions"] == 3
        refused = await worlds.compare(remember("mine", embedding=[1.0, 2.0]))
        assert (refused.error["code"], refused.error["data"]) == (
            Code.EMBEDDING_MISMATCH,
            {"parameter": "records[0].embedding", "dimensions": 3},
        )
        await worlds.compare(Call("recall", {"embedding": [1.0, 2.0]}))
        await worlds.compare(Call("recall", {"embedding": [1.0, 2.0, 3.0]}))


@pytest.mark.anyio
async def test_a_log_that_has_overflowed_tells_no_more_than_that() -> None:
    """All owners share the number of retained events (§4.12). A late reader may find that others changed much."""
    settings = settings_of("[events]\nretained = 4\n" + SECLUDED.replace("DISTIL", "false"), policy="explicit")
    async with two_worlds(settings, settle=False) as worlds:
        for world in (worlds.first, worlds.second):
            await world.ask("b", Call("events", {}))
        await worlds.alike("b", remember("mine"))
        await worlds.apart([remember(*[SECRET] * 9)], [])
        await worlds.alike("b", remember("mine, too"))
        late, in_time = [
            (await world.ask("b", Call("events", {"cursor": world.cursors["b"][0]}))).result
            for world in (worlds.first, worlds.second)
        ]
        assert (late.pop("reset"), in_time.pop("reset", False)) == (True, False)
        assert set(late) == set(in_time) == {"events", "cursor"}
        assert len(late["events"]) == 1
        assert {**late["events"][0], "id": ""} == {**in_time["events"][-1], "id": ""}
        # A reader that continues with its new cursor gets the same events in both worlds.
        await worlds.alike("b", remember("mine, once more"))
        await worlds.compare(Call("events", {"cursor": "<cursor:1>"}))


CROWDED: Final = SECLUDED.replace("DISTIL", "false").replace("per_session = true\n", "")


def without_places(answer: Answer, world: w.World) -> Any:
    """Return an answer without the tiers of its records."""
    decoded = msgspec.json.decode(world.blurred(answer, set()))
    for record in decoded["result"]["records"]:
        del record["tier"]
    return decoded


@pytest.mark.anyio
async def test_a_shared_capacity_moves_records_and_shows_no_others() -> None:
    """A tier that is not per_session has one capacity (§4.7): one owner's writes make another's records spill."""
    async with two_worlds(settings_of(CROWDED, policy="background")) as worlds:
        await worlds.alike("b", remember("alpha 1", "alpha 2", "beta", session="s"))
        await worlds.apart([remember(*[f"alpha {SECRET}"] * 3)])
        for call in (Call("timeline", {}), Call("recall", {"limit": 100})):
            crowded, alone = [await world.ask("b", call) for world in (worlds.first, worlds.second)]
            assert without_places(crowded, worlds.first) == without_places(alone, worlds.second)
            assert SECRET.encode() not in crowded.raw
            assert [r["tier"] for r in crowded.result["records"]] != [r["tier"] for r in alone.result["records"]]


@pytest.mark.anyio
async def test_a_shared_capacity_tells_how_many_others_there_are_and_no_more() -> None:
    """The records of others differ between the worlds in everything but their number."""
    one = {"content": f"alpha {SECRET}", "session": "s", "key": "k", "group": "g", "metadata": {"m": 1}}
    another = {"content": f"a long {SECRET} of something else", "session": "t", "key": "q", "role": "tool"}
    async with two_worlds(settings_of(CROWDED, policy="background")) as worlds:
        await common_ground(worlds)
        await worlds.alike("b", remember("alpha 1", "alpha 2", session="s"))
        for n in range(3):
            first, second = [{**kept, "key": f"{kept['key']}{n}", "group": f"{n}"} for kept in (one, another)]
            await worlds.apart([Call("remember", {"records": [first]})], [Call("remember", {"records": [second]})])
        for call in EVERYTHING:
            await worlds.compare(call)


@pytest.mark.anyio
async def test_each_reader_gets_an_event_as_if_there_were_only_his_records() -> None:
    """The log keeps a limited number of ids of one change. An event must not show whether there were more."""
    nobodys = [("open", Place(None, "working"))]
    secrets = [(f"a{n}", Place("a", "working")) for n in range(1000)]
    alone, in_company = (
        Forgotten(at=START, by="a", records=named(records)).seen_by(Sight("b"))
        for records in (nobodys, secrets + nobodys)
    )
    assert in_company == alone


# --- over HTTP, where the token selects the principal

TOKENS: Final = {"a": "token of a", "b": "token of b"}


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[tuple[Trial, httpx.AsyncClient]]:
    async with trial(settings) as fed, anyio.create_task_group() as tasks:
        app = application(
            fed.federation.answer,
            admit=admission((), settings.serve.principals),
            profile=lambda caller: fed.federation.describe(Describe(), caller),
        )
        _, port = await tasks.start(serve_http, app, "127.0.0.1", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, verify=False) as client:
            yield fed, client
        tasks.cancel_scope.cancel()


async def post(client: httpx.AsyncClient, who: str, method: str, **params: Any) -> Answer:
    headers = {"Authorization": f"Bearer {TOKENS[who]}", "Content-Type": "application/json"}
    answer = await client.post("/", content=render_call(1, f"memory/{method}", params), headers=headers)
    assert answer.status_code == 200
    return Answer(answer.content)


@pytest.mark.rule(n=14)
def test_over_http_a_token_shows_what_is_its_owner_s_and_nothing_else() -> None:
    principals = "".join(
        f'[[serve.principals]]\nowner = "{owner}"\ntoken_sha256 = "{sha256(token.encode()).hexdigest()}"\n'
        for owner, token in TOKENS.items()
    )
    settings = settings_of(principals + SECLUDED.replace("DISTIL", "false"), policy="explicit")
    asked: list[tuple[str, dict[str, Any]]] = [
        *(("timeline", pointing) for pointing in POINTING),
        *(("recall", {**pointing, "query": "alpha"}) for pointing in POINTING),
        *(("forget", pointing) for pointing in POINTING),
        *(("summarize", pointing) for pointing in POINTING),
        *(("fetch", {"key": f"k/{tier}"}) for tier in PRIVATE),
        *(("timeline", {"owner": "a"}), ("remember", {"records": [{"content": "x", "owner": "a"}]})),
        *(("promote", {"ids": list(HIS), "tier": SHARED}), ("reinforce", {"ids": list(HIS)})),
        *(("session/close", {"session": "s"}), ("consolidate", {}), ("session/list", {}), ("describe", {})),
    ]

    async def answers(secrets: bool) -> list[bytes]:
        async with served(settings) as (_, client):
            await post(client, "b", "remember", records=[{"content": "width", "id": "b0", "embedding": [1.0, 0.0]}])
            cursor = (await post(client, "b", "events")).result["cursor"]
            if secrets:
                for tier, id in zip(PRIVATE, HIS, strict=True):
                    record = {"id": id, "content": f"alpha {SECRET}", "tier": tier, "key": f"k/{tier}", "session": "s"}
                    assert (await post(client, "a", "remember", records=[record])).result == {"ids": [id]}
            came = [(await post(client, "b", method, **params)).raw for method, params in asked]
            came.append(msgspec.json.encode((await post(client, "b", "events", cursor=cursor)).result["events"]))
            shown = {"Authorization": f"Bearer {TOKENS['b']}"}
            came.append((await client.get("/.well-known/a2m-server.json", headers=shown)).content)
            for strange in ({}, {"Authorization": f"Bearer {TOKENS['a']}x"}):
                assert (await client.get("/.well-known/a2m-server.json", headers=strange)).status_code == 401
            assert len((await post(client, "a", "timeline")).result["records"]) == (len(PRIVATE) if secrets else 0)
            return [w.without_moments(raw) for raw in came]

    with_a, without_a = (anyio.run(partial(answers, secrets), backend="asyncio") for secrets in (True, False))
    for question, one, another in zip([*asked, "events", "profile"], with_a, without_a, strict=True):
        assert one == another, question
        assert SECRET.encode() not in one


# --- what the policy may publish

KINDS: Final = ("working", "episodic", "semantic", "procedural")


class Tier(msgspec.Struct, frozen=True):
    """A tier of a generated file. `spill` and `promote` count how many tiers further down their target is."""

    kind: str
    shared: bool
    may_publish: bool
    spill: int | None
    promote: int | None
    per_session: bool
    distil: bool


class File(msgspec.Struct, frozen=True):
    """A generated federation file. Its tiers are t0, t1, …"""

    tiers: list[Tier]

    def arrows(self) -> list[tuple[int, str, int]]:
        """Return each spill and promotion in the file: the number of its tier, its key, the number of its target."""
        ways = [
            (n, key, way)
            for n, t in enumerate(self.tiers)
            for key, way in (("spill_to", t.spill), ("promote_to", t.promote))
        ]
        return [(n, key, n + way) for n, key, way in ways if way is not None and n + way < len(self.tiers)]

    def text(self) -> str:
        lines = ['[policy]\npass = "explicit"']
        arrows = {(n, key): target for n, key, target in self.arrows()}
        for n, tier in enumerate(self.tiers):
            lines += [f'[tiers.t{n}]\nkind = "{tier.kind}"\ncommand = ["-"]\ncapacity = 1']
            lines += [f"{name} = true" for name in ("shared", "may_publish", "per_session") if getattr(tier, name)]
            if (n, "spill_to") in arrows:
                lines += [f'spill_to = "t{arrows[n, "spill_to"]}"\ndistil = {json.dumps(tier.distil)}']
            else:
                lines += ['overflow = "drop"']
            if (n, "promote_to") in arrows:
                lines += [f'promote_to = "t{arrows[n, "promote_to"]}"\npromote_after = 1']
        return "\n".join(lines)

    def publishing(self) -> list[str]:
        """Return the paths of the arrows that would publish private records without `may_publish`."""
        return [
            f"tiers.t{n}.{key}"
            for n, key, target in self.arrows()
            if self.tiers[target].shared and not self.tiers[n].shared and not self.tiers[n].may_publish
        ]

    def may_come_out(self) -> set[int]:
        """Return the tiers whose records others may come to see.

        These are the shared tiers, and those from which a path leads through a tier with `may_publish`. A path follows
        the arrows, and leads from every tier to the default target of summaries.
        """
        summaries = next((n for n, tier in enumerate(self.tiers) if tier.kind == "semantic"), None)
        if summaries is None:
            summaries = next((n for n, tier in enumerate(self.tiers) if tier.kind == "working"), 0)
        ways = {n: {summaries, *(target for m, _, target in self.arrows() if m == n)} for n in range(len(self.tiers))}
        out = {n for n, tier in enumerate(self.tiers) if tier.shared or tier.may_publish}
        private = {n for n, tier in enumerate(self.tiers) if not tier.shared}
        # Only a tier with `may_publish` has an arrow to a shared tier, so that this follows private tiers alone.
        while more := {n for n in private - out if any(way in out & private for way in ways[n])}:
            out |= more
        return out


file_tiers = st.builds(
    Tier,
    st.sampled_from(KINDS[1:]),
    st.sampled_from([False, False, True]),
    st.sampled_from([False, False, True]),
    st.none() | st.integers(1, 2),
    st.none() | st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
files = st.builds(
    lambda first, others: File([msgspec.structs.replace(first, kind="working"), *others]),
    file_tiers,
    st.lists(file_tiers, min_size=1, max_size=4),
)
# Actions of "a": write to a tier, recall, summarize, or close the session. A pass runs after each.
doings = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, 4)),
        st.tuples(st.just("write"), st.integers(0, 4)),
        st.tuples(st.sampled_from(["recall", "summarize", "close"]), st.integers(0, 4)),
    ),
    min_size=2,
    max_size=10,
)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(12)
@given(file=files, doings=doings, groups=st.booleans())
def test_a_file_publishes_only_where_it_says_so(
    anyio_backend: str, file: File, doings: list[tuple[str, int]], groups: bool
) -> None:
    """A file that would publish without `may_publish` is refused."""
    try:
        settings = parse(file.text(), base=Path("/nowhere"), environ={})
    except ConfigError as refused:
        places = [line.partition(":")[0] for line in str(refused).splitlines() if "publish" in line]
        assert places == file.publishing()
        procedural = [
            n for n, key, target in file.arrows() if key == "spill_to" and file.tiers[target].kind == "procedural"
        ]
        assert places or procedural
        return
    assert file.publishing() == []

    async def scenario() -> None:
        async with trial(settings) as fed:
            for number, (doing, place) in enumerate(doings):
                tier = place % len(file.tiers)
                await carry_out(fed, doing, tier, number, group=f"g{number // 2}" if groups else None)
                await done(fed, "consolidate")
                await fed.federation.reconciler.idle()
                await nothing_has_come_out(fed, file)

    run(anyio_backend, scenario)


async def carry_out(fed: Trial, doing: str, tier: int, number: int, group: str | None) -> None:
    """Do one action of "a". A refused action has no effect."""
    content = f"A {SECRET} of t{tier}, came late. Some {SECRET} of t{tier}, was never seen."
    record = {"id": f"a{number}", "content": content, "tier": f"t{tier}", "session": f"s{tier}", "group": group}
    call = {
        "write": Call("remember", {"records": [record]}),
        "recall": Call("recall", {"limit": 100}),
        "summarize": Call("summarize", {"tier": f"t{tier}"}),
        "close": Call("session/close", {"session": f"s{tier}"}),
    }[doing]
    answer = await ask(fed, "a", call.method, **call.params)
    assert answer.error is None or (doing == "summarize" and answer.error["code"] == Code.INVALID_PARAMS)


async def nothing_has_come_out(fed: Trial, file: File) -> None:
    """Assert that "b" sees only records that were written to tiers whose records may come out."""
    seen = {}
    for method, params in {"timeline": {}, "recall": {"query": SECRET, "limit": 100}, "session/list": {}}.items():
        seen[method] = (await ask(fed, "b", method, **params)).raw.decode()
    described = (await ask(fed, "b", "describe")).result["tiers"]
    allowed = file.may_come_out()
    for n in set(range(len(file.tiers))) - allowed:
        assert f"of t{n}," not in seen["timeline"] + seen["recall"]
        assert f'"s{n}"' not in seen["session/list"]
    shown = [record["tier"] for record in json.loads(seen["timeline"])["result"]["records"]]
    assert {tier["name"]: tier["count"] for tier in described} == {
        f"t{n}": shown.count(f"t{n}") for n in range(len(file.tiers))
    }
    assert all(file.tiers[int(tier[1:])].shared for tier in shown)


@pytest.mark.anyio
async def test_publishing_by_hand_is_for_what_is_one_s_own() -> None:
    async with with_secrets() as fed:
        await ask(fed, "local", "remember", records=[{"content": "nobody's", "id": "n0"}])
        assert await told(fed, "promote", ids=[*HIS, "n0"], tier=SHARED) == {"promoted": 1}
        assert (await ask(fed, "a", "promote", ids=[HIS[0]], tier=SHARED)).result == {"promoted": 1}
        seen = (await ask(fed, "b", "timeline")).result["records"]
        assert {record["id"] for record in seen} == {"n0", HIS[0]}


@pytest.mark.anyio
async def test_what_is_rewritten_when_it_spills_stays_its_owner_s() -> None:
    async with trial(secluded(distil=True)) as fed:
        kept = {"content": w.secret("The alpha came late. Some beta was never seen."), "session": "s"}
        await done(fed, "remember", records=[kept] * 5)
        assert (await done(fed, "consolidate"))["summarized"] == 2
        written = [(r["role"], r["owner"], r["tier"]) for r in await his(fed) if r.get("role") == "memory"]
        assert written == [("memory", "a", "episodic")] * 2
        assert await told(fed, "timeline") == {"records": []}
        assert await told(fed, "session/list") == {"sessions": []}


PUBLIC_FACTS: Final = FOUR_TIERS.replace('kind = "semantic"\n', 'kind = "semantic"\nshared = true\n').replace(
    'spill_to = "semantic"\npromote_to = "semantic"\npromote_after = 3\n', 'overflow = "drop"\n'
)


@pytest.mark.anyio
async def test_a_summary_of_what_is_private_is_published_on_purpose_only() -> None:
    async with with_secrets_in("working", PUBLIC_FACTS) as fed:
        for selector in ({"ids": ["x"]}, {"query": "alpha"}, {"tier": "working"}, {"ids": ["x"], "key": "new"}):
            [summary] = (await ask(fed, "a", "summarize", **selector)).result["records"]
            assert summary["tier"] == "episodic"
            assert await told(fed, "timeline") == {"records": []}
        assert (await ask(fed, "a", "summarize", ids=["x"], into="semantic")).result["written"] == 1
        [summary] = (await ask(fed, "b", "timeline")).result["records"]
        assert (summary["tier"], SECRET in summary["content"]) == ("semantic", True)
        assert "ids" not in json.dumps(summary["metadata"])


@pytest.mark.anyio
async def test_a_private_summary_replaces_a_shared_page_only_when_told_to() -> None:
    async with with_secrets_in("working", PUBLIC_FACTS) as fed:
        page = {"content": "a page", "key": "page", "tier": "semantic"}
        await done(fed, "remember", records=[page])
        refused = await ask(fed, "a", "summarize", ids=["x"], key="page")
        assert [record["content"] for record in (await told(fed, "timeline"))["records"]] == ["a page"]
        assert refused.error is not None
        assert (await ask(fed, "a", "summarize", ids=["x"], key="page", into="semantic")).result["written"] == 1


@asynccontextmanager
async def with_secrets_in(tier: str, text: str) -> AsyncIterator[Trial]:
    async with trial(settings_of(text, policy="explicit")) as fed:
        record = {"id": "x", "content": w.secret("The alpha came late. Some beta was never seen."), "tier": tier}
        await done(fed, "remember", records=[record])
        yield fed


# --- rights to write

POOL: Final = '[tiers.pool]\nkind = "semantic"\ncommand = ["-"]\nshared = true\n'
SHARED_TIERS: Final = (SHARED, "pool")


class Right(msgspec.Struct, frozen=True):
    """A principal's entry in the file."""

    owner: str
    write: tuple[str, ...] | None = None
    admin: bool = False

    def text(self) -> str:
        digest = sha256(self.owner.encode()).hexdigest()
        lines = ["[[serve.principals]]", f'owner = "{self.owner}"', f'token_sha256 = "{digest}"']
        lines += [] if self.write is None else [f"write = {json.dumps(self.write)}"]
        return "\n".join([*lines, *(["admin = true"] if self.admin else []), ""])


def with_rights(*principals: Right, more: str = POOL, policy: str = "explicit", tiers: str = SECLUDED) -> Settings:
    text = "".join(principal.text() for principal in principals) + tiers.replace("DISTIL", "false") + more
    return settings_of(text, policy=policy)


def caller_of(settings: Settings, owner: str) -> Caller:
    """Return the caller with that owner's token."""
    admit = admission((), settings.serve.principals, rights_of(settings))
    caller = admit({"authorization": f"Bearer {owner}"})
    assert isinstance(caller, Caller)
    return caller


def rights_of(settings: Settings) -> Callable[[Any], Caller]:
    return partial(rights.caller, principals=settings.serve.principals, tiers=settings.tiers)


async def ask_as(fed: Trial, who: str, method: str, **params: Any) -> Answer:
    """Return the answer to a call by a principal of the file."""
    caller = caller_of(fed.federation.settings, who)
    answer = await fed.federation.answer(render_call(1, f"memory/{method}", params), caller)
    assert answer is not None
    return Answer(answer)


async def account(fed: Trial) -> dict[str, dict[str, Any]]:
    """Return all records by id, without the fields that a read changes."""
    records = (await ask(fed, "local", "timeline", embeddings=True)).result["records"]
    read = ("access_count", "accessed_at")
    return {record["id"]: {name: value for name, value in record.items() if name not in read} for record in records}


def changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the former and the new states of the records that differ."""
    ids = {id for id in before | after if before.get(id) != after.get(id)}
    return [there[id] for there in (before, after) for id in ids if id in there]


OWNERS: Final = ("a", "b", None)
ALL_TIERS: Final = (*PRIVATE, *SHARED_TIERS)


async def furnish(fed: Trial) -> None:
    """Write one record of each owner to each tier, as a local caller, with a key and in a group."""
    for tier in ALL_TIERS:
        for owner in OWNERS:
            name = f"{tier}-{owner}"
            record = {"id": name, "key": f"k/{name}", "content": f"alpha of {name}", "tier": tier, "group": tier}
            answer = await ask(fed, "local", "remember", records=[{**record, "owner": owner}])
            assert answer.error is None


_named = st.sampled_from([f"{tier}-{owner}" for tier in ALL_TIERS for owner in OWNERS])
_some = st.lists(_named, min_size=1, max_size=3)
_into = st.sampled_from(ALL_TIERS)
_page = _named.map(lambda name: f"k/{name}")
_meant: dict[str, st.SearchStrategy[Any]] = {
    "tier": _into,
    "where": st.sampled_from([{"tier": [SHARED, "working"]}, {"owner": ["a", "b"]}, {"group": "pool"}]),
    "key_prefix": st.sampled_from(["k", "k/pool-a"]),
    "query": st.just("alpha"),
}
_drafts = st.fixed_dictionaries(
    {"content": st.sampled_from(["beta", "gamma"])},
    optional={
        "tier": _into,
        "key": _page,
        "id": st.sampled_from(["new0", "new1"]) | _named,
        "group": st.sampled_from(ALL_TIERS),
        "owner": st.sampled_from(["a", "b"]),
    },
)
changes = st.one_of(
    w.calls("remember", {"records": st.lists(_drafts, min_size=1, max_size=3)}),
    w.calls("remember", {"records": st.lists(_drafts, min_size=1, max_size=3)}, owner=st.sampled_from(["a", "b"])),
    w.calls("forget", {"ids": _some}, **_meant),
    w.calls("forget", {}, **_meant),
    w.calls("promote", {"ids": _some, "tier": _into}, salience=st.just(1.0)),
    w.calls("reinforce", {"ids": _some}),
    w.calls("summarize", {"ids": _some}, into=_into, key=_page),
    w.calls("summarize", {}, into=_into, key=_page, **_meant),
)
_writes = st.none() | st.lists(st.sampled_from(["private", *SHARED_TIERS]), unique=True, max_size=3).map(tuple)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@examples(15)
@given(
    principals=st.tuples(*(st.builds(Right, st.just(owner), _writes, st.booleans()) for owner in ("a", "b"))),
    asked=st.lists(st.tuples(st.sampled_from(["a", "b"]), changes), min_size=1, max_size=8),
)
def test_a_principal_changes_what_the_file_says_and_nothing_else(
    anyio_backend: str, principals: tuple[Right, ...], asked: list[tuple[str, Call]]
) -> None:
    everywhere = all(principal.write is None for principal in principals)

    def may_write(who: Right, tier: str) -> bool:
        if everywhere or (who.admin and who.write is None):
            return True
        listed = ("private",) if who.write is None else who.write
        return (tier if tier in SHARED_TIERS else "private") in listed

    async def scenario() -> None:
        async with trial(with_rights(*principals)) as fed:
            await furnish(fed)
            before = await account(fed)
            for owner, call in asked:
                [who] = [principal for principal in principals if principal.owner == owner]
                answer = await ask_as(fed, owner, call.method, **call.params)
                after = await account(fed)
                if answer.error is not None:
                    assert before == after
                for record in changed(before, after):
                    assert may_write(who, record["tier"])
                    assert who.admin or record.get("owner") in (owner, None)
                if all(may_write(who, tier) for tier in ALL_TIERS) and answer.error is not None:
                    assert "may not write into" not in answer.error["message"]
                before = after

    run(anyio_backend, scenario)


# Each way to change the records of a shared tier, or to bring a record there.
INTRUSIONS: Final[Mapping[str, Call]] = {
    "a record": Call("remember", {"records": [{"content": "x", "tier": SHARED}]}),
    "a record among others": Call("remember", {"records": [{"content": "x"}, {"content": "y", "tier": SHARED}]}),
    "a page of its own that lives there": Call("remember", {"records": [{"content": "x", "key": f"k/{SHARED}-b"}]}),
    "one by its id and key": Call(
        "remember", {"records": [{"content": "x", "id": f"{SHARED}-b", "key": f"k/{SHARED}-b"}]}
    ),
    "a page that is taken out": Call(
        "remember", {"records": [{"content": "x", "key": f"k/{SHARED}-b", "tier": "working"}]}
    ),
    "a page that is brought in": Call(
        "remember", {"records": [{"content": "x", "key": "k/working-b", "tier": SHARED}]}
    ),
    "a page with its group": Call(
        "remember", {"records": [{"content": "x", "key": "k/working-b", "group": "working", "tier": SHARED}]}
    ),
    "a group, for another that may be moved": Call(
        "remember",
        {
            "records": [
                {"content": "x", "key": "k/working-b", "group": "working", "tier": "episodic"},
                {"content": "x", "tier": SHARED},
            ]
        },
    ),
    **{f"forgetting {owner}'s": Call("forget", {"ids": [f"{SHARED}-{owner}"]}) for owner in OWNERS},
    "forgetting it among others": Call("forget", {"ids": ["working-b", f"{SHARED}-None"]}),
    "forgetting it by its key": Call("forget", {"key_prefix": f"k/{SHARED}-b"}),
    "forgetting it by a query": Call("forget", {"query": "alpha"}),
    "forgetting it by its group": Call("forget", {"where": {"group": [SHARED, "working"]}}),
    "forgetting all of it": Call("forget", {"tier": SHARED}),
    "promoting into it": Call("promote", {"ids": ["working-b"], "tier": SHARED}),
    "promoting nothing into it": Call("promote", {"ids": [], "tier": SHARED}),
    **{
        f"promoting {owner}'s out of it": Call("promote", {"ids": [f"{SHARED}-{owner}"], "tier": "semantic"})
        for owner in OWNERS
    },
    **{f"reinforcing {owner}'s": Call("reinforce", {"ids": [f"{SHARED}-{owner}"]}) for owner in OWNERS},
    "reinforcing among others": Call("reinforce", {"ids": ["working-b", f"{SHARED}-b"]}),
    "a summary into it": Call("summarize", {"ids": ["working-b"], "into": SHARED}),
    "a summary at a page of its own there": Call("summarize", {"ids": [f"{SHARED}-b"], "key": f"k/{SHARED}-b"}),
    "a summary that takes a page out": Call(
        "summarize", {"ids": ["working-b"], "key": f"k/{SHARED}-b", "into": "working"}
    ),
}


@pytest.mark.anyio
@pytest.mark.parametrize("write", [None, ("private",), ("private", "pool"), ()], ids=str)
async def test_a_write_into_a_shared_tier_without_the_right_changes_nothing(write: tuple[str, ...] | None) -> None:
    """All INTRUSIONS are tried, one after the other, in one federation."""
    async with trial(with_rights(Right("a", ("private", SHARED)), Right("b", write))) as fed:
        await furnish(fed)
        before = await account(fed)
        for intrusion, call in INTRUSIONS.items():
            answer = await ask_as(fed, "b", call.method, **call.params)
            assert (intrusion, answer.error["code"]) == (intrusion, Code.SCOPE_DENIED)
            assert (intrusion, await account(fed)) == (intrusion, before)


@pytest.mark.anyio
@pytest.mark.parametrize("intrusion", INTRUSIONS)
@pytest.mark.parametrize("write", [("private", *SHARED_TIERS), None], ids=str)
async def test_who_may_write_into_it_or_where_nobody_is_said_to_is_not_refused(
    intrusion: str, write: tuple[str, ...] | None
) -> None:
    call = INTRUSIONS[intrusion]
    async with trial(with_rights(Right("a", write), Right("b", write))) as fed:
        await furnish(fed)
        answer = await ask_as(fed, "b", call.method, **call.params)
        assert answer.error is None or answer.error["code"] != Code.SCOPE_DENIED


@pytest.mark.anyio
@pytest.mark.parametrize("write", [(SHARED,), ()], ids=str)
async def test_who_may_not_write_what_it_owns_is_refused_in_private_tiers(write: tuple[str, ...]) -> None:
    async with trial(with_rights(Right("a", ("private",)), Right("b", write))) as fed:
        await furnish(fed)
        before = await account(fed)
        for call in (
            Call("remember", {"records": [{"content": "x"}]}),
            Call("remember", {"records": [{"content": "x", "key": "k/semantic-b"}]}),
            Call("forget", {"ids": ["semantic-b"]}),
            Call("forget", {"tier": "semantic"}),
            Call("promote", {"ids": ["semantic-b"], "tier": "working"}),
            Call("reinforce", {"ids": ["semantic-b"]}),
            Call("summarize", {"ids": ["semantic-b"]}),
        ):
            answer = await ask_as(fed, "b", call.method, **call.params)
            assert answer.error["code"] == Code.SCOPE_DENIED
            assert await account(fed) == before


@pytest.mark.anyio
async def test_a_forget_passes_by_what_it_only_describes_and_is_not_one_s_own() -> None:
    async with trial(with_rights(Right("a", (SHARED,)), Right("b"))) as fed:
        await furnish(fed)
        await ask(fed, "local", "forget", ids=[f"{tier}-b" for tier in SHARED_TIERS])
        assert (await ask_as(fed, "b", "forget", query="alpha")).result == {"forgotten": 6}
        left = await account(fed)
        assert {record["tier"] for record in left.values() if record.get("owner") is None} == set(SHARED_TIERS)


@pytest.mark.anyio
async def test_a_forget_that_names_a_tier_is_refused_whoever_s_records_are_in_it() -> None:
    async with trial(with_rights(Right("a", (SHARED,)), Right("b"))) as fed:
        for _ in range(2):
            refused = await ask_as(fed, "b", "forget", tier=SHARED)
            assert refused.error["code"] == Code.SCOPE_DENIED
            await ask(fed, "local", "remember", records=[{"content": "x", "owner": "a", "tier": SHARED}])
        assert (await ask_as(fed, "b", "forget", tier="no such tier")).error["code"] == Code.UNKNOWN_TIER


@pytest.mark.anyio
async def test_no_group_has_moved_for_a_batch_that_is_refused() -> None:
    async with trial(with_rights(Right("a", (SHARED,)), Right("b"))) as fed:
        group = [{"content": "x", "id": f"g{n}", "key": f"g/{n}", "group": "g"} for n in range(3)]
        await ask_as(fed, "b", "remember", records=group)
        before = await account(fed)
        for last in ({"tier": SHARED}, {"tier": SHARED, "key": "g/1", "group": "g"}):
            moving = {"content": "y", "key": "g/0", "group": "g", "tier": "episodic"}
            refused = await ask_as(fed, "b", "remember", records=[moving, {"content": "z", **last}])
            assert refused.error["code"] == Code.SCOPE_DENIED
            assert await account(fed) == before


@pytest.mark.anyio
async def test_a_refusal_says_which_tier_and_where_one_may_write() -> None:
    async with trial(with_rights(Right("a", (SHARED,)), Right("b", ("private", "pool")))) as fed:
        refused = (await ask_as(fed, "b", "remember", records=[{"content": "x", "tier": SHARED}])).error
        assert refused["message"] == (
            "records: you may not write into the tier 'procedural'; the tiers that you may write into: 'episodic', "
            "'pool', 'semantic', 'working'"
        )
        assert refused["data"] == {"tier": SHARED}


@pytest.mark.anyio
async def test_a_write_that_is_repeated_is_answered_by_whoever_repeats_it() -> None:
    async with trial(with_rights(Right("a", (SHARED,)), Right("b"))) as fed:
        record = {"content": "for all", "id": "x", "tier": SHARED}
        await ask(fed, "local", "remember", records=[record])
        assert (await ask_as(fed, "b", "remember", records=[record])).result == {"ids": ["x"]}


@pytest.mark.anyio
async def test_what_the_policy_publishes_it_publishes_whoever_may_write_there() -> None:
    settings = with_rights(
        Right("a", ("private", SHARED)),
        Right("b", ("private",)),
        more="",
        tiers=SECLUDED.replace('promote_to = "semantic"', 'promote_to = "procedural"\nmay_publish = true'),
    )
    async with trial(settings) as fed:
        await ask_as(fed, "b", "remember", records=[{"content": "alpha", "id": "x", "tier": "episodic"}])
        for _ in range(2):
            await ask_as(fed, "b", "recall", query="alpha")
        assert (await ask_as(fed, "b", "consolidate")).result["promoted"] == 1
        assert (await account(fed))["x"]["tier"] == SHARED
        # A published record can be changed only by principals with the right to write there.
        assert (await ask_as(fed, "b", "forget", ids=["x"])).error["code"] == Code.SCOPE_DENIED


@pytest.mark.anyio
async def test_an_admin_sees_all_records_and_may_delete_those_of_others() -> None:
    async with trial(with_rights(Right("a", ("private", SHARED)), Right("root", admin=True))) as fed:
        await furnish(fed)
        everything = set(await account(fed))
        assert {r["id"] for r in (await ask_as(fed, "root", "timeline")).result["records"]} == everything
        for_b = (await ask_as(fed, "root", "timeline", owner="b", where={"owner": "b"})).result["records"]
        assert {record["owner"] for record in for_b} == {"b"}
        mine = {"content": "x", "id": "x", "owner": "c"}
        assert (await ask_as(fed, "root", "remember", records=[mine])).result == {"ids": ["x"]}
        assert (await ask_as(fed, "root", "forget", ids=[f"{SHARED}-a", "working-b"])).result == {"forgotten": 2}
        assert set(await account(fed)) == everything - {f"{SHARED}-a", "working-b"} | {"x"}


@pytest.mark.anyio
async def test_an_admin_with_a_list_may_write_what_that_says() -> None:
    async with trial(with_rights(Right("a"), Right("root", ("pool",), admin=True))) as fed:
        await furnish(fed)
        assert (await ask_as(fed, "root", "forget", ids=["pool-a"])).result == {"forgotten": 1}
        assert (await ask_as(fed, "root", "forget", ids=["working-a"])).error["code"] == Code.SCOPE_DENIED


@pytest.mark.anyio
async def test_a_record_not_yet_seen_is_not_forgotten_without_the_right() -> None:
    """A tombstone of an unknown id would also delete a record that turns up when the tier that is down comes back."""
    down = {SHARED}
    async with trial(with_rights(Right("a", ("private", SHARED)), Right("b")), down=down) as fed:
        await ask(fed, "local", "remember", records=[{"content": "x", "id": "mine", "owner": "b"}])
        await ask(fed, "local", "remember", records=[{"content": "x", "id": "his", "owner": "a"}])
        for id in ("unheard", "his"):  # another owner's id is refused like an unknown one
            refused = (await ask_as(fed, "b", "forget", ids=[id])).error
            assert (refused["code"], refused["data"]["tier"]) == (Code.INTERNAL_ERROR, SHARED)
        assert (await ask_as(fed, "b", "forget", ids=["mine"])).result == {"forgotten": 1}
        assert (await ask_as(fed, "a", "forget", ids=["unheard"])).result == {"forgotten": 0}


@pytest.mark.parametrize(
    ("principals", "sentences", "warned"),
    [
        ((), [], False),
        (
            (Right("a"), Right("b", admin=True)),
            [
                "principal 'a' may write: its own records in working, episodic, semantic and the shared procedural, "
                "pool",
                "principal 'b' (admin) may write: every owner's records in working, episodic, semantic and the "
                "shared procedural, pool",
            ],
            True,
        ),
        (
            (Right("a", ("pool",)), Right("b"), Right("c", ()), Right("d", ("private", "pool"), admin=True)),
            [
                "principal 'a' may write: the shared pool",
                "principal 'b' may write: its own records in working, episodic, semantic",
                "principal 'c' may write: nothing",
                "principal 'd' (admin) may write: every owner's records in working, episodic, semantic and the "
                "shared pool",
            ],
            False,
        ),
    ],
    ids=["nobody", "as it was", "some"],
)
def test_who_may_write_where_is_told(principals: tuple[Right, ...], sentences: list[str], warned: bool) -> None:
    settings = with_rights(*principals)
    assert list(rights.write_rights(settings.serve.principals, settings.tiers)) == sentences
    warning = rights.warning(settings.serve.principals, settings.tiers)
    assert (warning is not None) == warned
    assert warning is None or "(procedural, pool)" in warning


def test_where_nothing_is_shared_there_is_nothing_to_warn_of() -> None:
    settings = with_rights(Right("a"), more="", tiers=SECLUDED.replace("shared = true", ""))
    assert rights.warning(settings.serve.principals, settings.tiers) is None
