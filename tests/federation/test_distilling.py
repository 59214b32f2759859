"""Spills that rewrite (§4.7): a summary replaces a whole group atomically, or the group stays; also after a crash."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

import a2m_router.placement.passes
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Record
from a2m_router.summaries.rendering import extract, summary_budget
from tests.support.clocks import simulated
from tests.support.crashes import photograph
from tests.support.examples import scaled
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    claims_released,
    contents,
    has_claims,
    kept,
    plant,
    settings_of,
    stored,
    trial,
)
from tests.support.summarizers import Thinker, naming, thinking

anyio_test = pytest.mark.anyio

# The working tier holds four records a conversation; a spill from it writes summaries.
DISTIL = FOUR_TIERS.replace('spill_to = "episodic"', 'spill_to = "episodic"\ndistil = true')
CALM = settings_of(DISTIL, policy="explicit")

GROUP = ["one", "two", "three"]
LATER = ["four", "five"]
AS_IT_WAS = dict.fromkeys([*GROUP, *LATER], "working")
REWRITTEN = {"gist of one, two, three": "episodic", "four": "working", "five": "working"}

Act = Callable[[Trial], Awaitable[Any]]


async def talk(fed: Trial) -> None:
    """Write one record more than the capacity: the oldest group and two single records. The ids are the contents."""
    records = [{"id": text, "content": text, "group": "g"} for text in GROUP]
    records += [{"id": text, "content": text} for text in LATER]
    for record in records:
        await fed.call("remember", records=[record], owner="a", session="s")


async def consolidate(fed: Trial) -> Any:
    return await fed.call("consolidate")


async def assert_settled(fed: Trial, expected: dict[str, str]) -> None:
    """Assert that exactly these contents exist, each in one tier, and that no work is left."""
    assert contents(await fed.timeline()) == expected
    await fed.settled()
    records = await fed.timeline()
    assert contents(records) == expected
    assert fed.copies() == {record["id"]: [record["tier"]] for record in records}
    assert_nothing_under_way(fed)


# --- the summary of a group


@anyio_test
async def test_a_group_that_spills_becomes_one_record_in_its_place() -> None:
    async with thinking(Thinker(model="small"), CALM) as fed:
        await talk(fed)
        [last] = await fed.timeline(where={"id": "three"})
        answer = await consolidate(fed)
        assert answer == {
            "moved": 0,
            "promoted": 0,
            "dropped": 0,
            "summarized": 3,
            "counts": {"working": 2, "episodic": 1, "semantic": 0, "procedural": 0},
        }
        [record] = await fed.timeline(tier="episodic")
        assert record.pop("id") not in GROUP
        assert record == {
            "content": "gist of one, two, three",
            "created_at": last["created_at"],
            "role": "memory",
            "metadata": {"summary_of": {"records": 3, "model": "small"}},
            "group": "g",
            "tier": "episodic",
            "salience": 1.0,
            "access_count": 0,
            "owner": "a",
            "session": "s",
        }
        await assert_settled(fed, REWRITTEN)
        assert (await fed.call("session/list"))["sessions"][0]["tiers"] == {"working": 2, "episodic": 1}


@anyio_test
async def test_a_summary_is_worth_what_the_best_of_its_sources_was() -> None:
    async with thinking(Thinker(), CALM) as fed:
        await talk(fed)
        await fed.call("recall", query="two", owner="a")
        await fed.call("reinforce", ids=["two"], amount=2.5)
        await fed.call("session/close", session="s", owner="a")
        worth = {record["content"]: (record["salience"], record["access_count"]) for record in await fed.timeline()}
        assert worth == {
            "gist of one, two, three": (3.5, 0),
            "gist of four": (1.0, 0),
            "gist of five": (1.0, 0),
        }


@anyio_test
async def test_a_summary_belongs_to_a_conversation_only_if_all_of_its_group_did() -> None:
    async with thinking(Thinker(), CALM) as fed:
        await fed.remember("one", group="g", session="s")
        await fed.remember("two", group="g", session="t")
        await fed.call("session/close", session="s")
        [record] = await fed.timeline()
        assert (record["content"], record["group"], record.get("session")) == ("gist of one, two", "g", None)


@anyio_test
async def test_closing_a_conversation_rewrites_all_of_its_groups_and_records() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed:
        await talk(fed)
        answer = await fed.call("session/close", session="s", owner="a")
        assert (answer["flushed"], answer["summarized"], answer["moved"]) == (5, 5, 0)
        assert thinker.thoughts == [GROUP, ["four"], ["five"]]
        expected = ["gist of one, two, three", "gist of four", "gist of five"]
        await assert_settled(fed, dict.fromkeys(expected, "episodic"))


@anyio_test
async def test_who_hears_of_it_is_who_could_recall_it() -> None:
    async with thinking(Thinker(), CALM) as fed:
        for act, figures in (
            (partial(fed.call, "consolidate", owner="b"), {"a": 3, "b": 0, None: 3}),
            (partial(fed.call, "session/close", session="s", owner="a"), {"a": 2, "b": None, None: 2}),
        ):
            if act.args == ("consolidate",):
                await talk(fed)
            cursor = (await fed.call("events"))["cursor"]
            assert (await act())["summarized"] == figures[act.keywords["owner"]]
            for owner, told in figures.items():
                events = (await fed.call("events", cursor=cursor, owner=owner, kinds=["consolidated"]))["events"]
                assert [event["summarized"] for event in events] == ([] if told is None else [told])
                assert all(event["moved"] == 0 for event in events)


sentence = st.sampled_from(
    [
        "Ada lives in Ghent.",
        "The deploy key rotates every 90 days.",
        "Hello!",
        "Bread keeps three days.",
        "ok",
        "Why not?",
    ]
)


@settings(max_examples=scaled(4))
@given(st.lists(st.lists(sentence, min_size=1, max_size=5).map(" ".join), min_size=1, max_size=5))
def test_without_a_model_a_group_becomes_its_best_sentences_or_moves(said: list[str]) -> None:
    """Without a model the summary is the group's own best sentences. If there are none, the group moves as it is."""

    async def scenario() -> None:
        async with trial(CALM) as fed:
            ids = await fed.remember(*said, group="g", session="s")
            before = await fed.timeline()
            written = [msgspec.convert(record, Record) for record in before]
            summary = extract(written, budget=summary_budget(sum(map(len, said))))
            answer = await fed.call("session/close", session="s")
            found = await fed.timeline()
            assert {record["tier"] for record in found} == {"episodic"}
            if summary is None:
                assert (answer["moved"], answer["summarized"]) == (len(said), 0)
                assert found == [{**record, "tier": "episodic"} for record in before]
            else:
                assert (answer["moved"], answer["summarized"]) == (0, len(said))
                assert [record["content"] for record in found] == [summary]
                assert found[0]["id"] not in ids

    anyio.run(scenario)


AS_THEY_ARE: dict[str, tuple[dict[str, Any], Thinker]] = {
    "one has a key": ({"content": "two", "key": "k"}, Thinker()),
    "one has a uri": ({"content": "two", "uri": "file:///two"}, Thinker()),
    "one has a vector": ({"content": "two", "embedding": [1.0, 0.5]}, Thinker()),
    "one says nothing": ({"content": " \n"}, Thinker()),
    "there is nothing durable to say": ({"content": "two"}, Thinker(lambda _: None)),
    "they are more than can be read at once": ({"content": "two"}, Thinker(room=2)),
}


@anyio_test
@pytest.mark.parametrize("why", AS_THEY_ARE)
async def test_a_group_that_no_summary_can_stand_for_moves_as_it_is(why: str) -> None:
    fields, thinker = AS_THEY_ARE[why]
    thinker.thoughts.clear()
    async with thinking(thinker, CALM) as fed:
        for record in ({"content": "one"}, fields, {"content": "three"}):
            await fed.call("remember", records=[{**record, "group": "g", "metadata": {"m": 1}}], session="s")
        before = {id: bytes for (id, _), bytes in kept(fed).items()}
        answer = await fed.call("session/close", session="s")
        assert (answer["flushed"], answer["moved"], answer["summarized"]) == (3, 3, 0)
        assert len(thinker.thoughts) == (why == "there is nothing durable to say")
        await fed.settled()
        assert kept(fed) == {(id, "episodic"): bytes for id, bytes in before.items()}
        assert_nothing_under_way(fed)


@anyio_test
async def test_a_summary_that_spills_on_is_as_good_as_any_record() -> None:
    text = DISTIL.replace('spill_to = "semantic"', 'spill_to = "semantic"\ndistil = true').replace(
        "capacity = 6", "capacity = 1"
    )
    async with thinking(Thinker(), settings_of(text, policy="explicit")) as fed:
        await talk(fed)
        answer = await fed.call("session/close", session="s", owner="a")
        assert (answer["flushed"], answer["summarized"]) == (5, 7)
        await assert_settled(
            fed,
            {
                "gist of gist of one, two, three": "semantic",
                "gist of gist of four": "semantic",
                "gist of five": "episodic",
            },
        )


# --- failures


class Failing:
    """A summarizer that fails for groups in which a record contains `word`. With `word` None it never fails."""

    def __init__(self, word: str | None) -> None:
        self.word = word
        self.wrote = anyio.Event()

    def __call__(self, records: Sequence[Record]) -> str | None:
        if self.word is not None and any(self.word in record.content for record in records):
            raise A2MError(Code.INTERNAL_ERROR, "no words came", {"reason": "no words came", "retry_after": 7.0})
        self.wrote.set()
        return naming(records)


@anyio_test
async def test_without_a_summarizer_everything_stays_until_there_is_one() -> None:
    """The pass after the summarizer has recovered rewrites the group."""
    failing = Failing("")
    thinker = Thinker(failing)
    async with thinking(thinker, CALM) as fed:
        await talk(fed)
        more = dict.fromkeys(["six", "seven"], "working")
        await fed.remember(*more, owner="a", session="s")
        answer = await consolidate(fed)
        assert (answer["moved"], answer["summarized"], answer["counts"]["working"]) == (0, 0, 7)
        assert len(thinker.thoughts) == 3, "an endpoint that is down is not asked about every group"
        await assert_settled(fed, {**AS_IT_WAS, **more})
        with pytest.raises(A2MError) as error:
            await fed.call("session/close", session="s", owner="a")
        assert "no words came" in error.value.message
        assert error.value.data is not None
        assert error.value.data["reason"].endswith("no words came")
        await assert_settled(fed, {**AS_IT_WAS, **more})
        failing.word = None
        assert (await consolidate(fed))["summarized"] == 3
        await assert_settled(fed, {**REWRITTEN, **more})


@anyio_test
async def test_a_pass_in_the_background_rests_and_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.placement.passes, "_FIRST_WAIT", 0.01)
    failing = Failing("")
    thinker = Thinker(failing)
    async with thinking(thinker, settings_of(DISTIL, policy="background")) as fed:
        *in_vain, again = [thinker.stop() for _ in range(4)]
        await talk(fed)
        for stop in in_vain:
            await stop.reached.wait()
            stop.release()
        await again.reached.wait()
        assert contents(await fed.timeline()) == AS_IT_WAS
        failing.word = None
        again.release()
        await failing.wrote.wait()
        await fed.settled()
        await assert_settled(fed, REWRITTEN)


@anyio_test
async def test_one_group_that_cannot_be_rewritten_does_not_hold_up_the_others() -> None:
    async with thinking(Thinker(Failing("one")), CALM) as fed:
        await talk(fed)
        for text in ("six", "seven"):
            await fed.remember(text, owner="a", session="s")
        answer = await consolidate(fed)
        assert (answer["summarized"], answer["counts"]["working"]) == (3, 4)
        gists = {f"gist of {text}": "episodic" for text in ("four", "five", "six")}
        await assert_settled(fed, {**dict.fromkeys([*GROUP, "seven"], "working"), **gists})


class Bent(Steered):
    """The episodic tier returns other content than it was given."""

    bent = True

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        answer = await super().__call__(tier, message, go_on)
        return answer.replace(b"gist", b"jest") if self.bent and answer and tier == "episodic" else answer


@anyio_test
async def test_a_target_that_alters_the_summary_gets_nothing_and_keeps_nothing() -> None:
    steer = Bent()
    async with thinking(Thinker(), CALM, weather=steer) as fed:
        await talk(fed)
        assert (await consolidate(fed))["summarized"] == 0
        await assert_settled(fed, AS_IT_WAS)
        steer.bent = False
        await consolidate(fed)
        await assert_settled(fed, REWRITTEN)


@anyio_test
@pytest.mark.parametrize(
    "refusals",
    [
        [("working", "recall")],
        [("episodic", "remember")],
        [("episodic", "recall")],
        [("episodic", "recall"), ("episodic", "forget")],
    ],
)
async def test_what_a_tier_refuses_stays_and_leaves_nothing_behind(refusals: list[tuple[str, str]]) -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed:
        await talk(fed)
        for refusal in refusals:
            steer.refuse(*refusal)
        assert (await consolidate(fed))["summarized"] == 0
        for refusal in refusals:
            steer.allow(*refusal)
        await assert_settled(fed, AS_IT_WAS)
        assert (await consolidate(fed))["summarized"] == 3
        await assert_settled(fed, REWRITTEN)


@anyio_test
async def test_old_copies_that_cannot_be_removed_are_never_seen_again() -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed:
        await talk(fed)
        steer.refuse("working", "forget")
        assert (await consolidate(fed))["summarized"] == 3
        assert contents(await fed.timeline()) == REWRITTEN
        assert contents((await fed.call("recall", limit=20))["records"]) == REWRITTEN
        assert await fed.call("forget", ids=GROUP) == {"forgotten": 0}
        assert set(fed.copies()) > {*GROUP}
        steer.allow("working", "forget")
        await assert_settled(fed, REWRITTEN)


@simulated
@pytest.mark.parametrize("method", ["remember", "recall"])
@pytest.mark.parametrize("after", [False, True])
async def test_a_target_that_does_not_answer_leaves_neither_a_loss_nor_an_orphan(method: str, after: bool) -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed:
        await talk(fed)
        held = steer.hold("episodic", method, after=after)
        assert (await consolidate(fed))["summarized"] == 0
        await wait_all_tasks_blocked()
        if not after:
            # The router does not delete the copy while the write may still land: the copy would seem deleted and appear
            # later.
            assert not [message for tier, message in steer.seen if tier == "episodic" and b"memory/forget" in message]
        assert contents(await fed.timeline()) == AS_IT_WAS
        held.release()
        await claims_released(fed)
        await assert_settled(fed, AS_IT_WAS)
        assert (await consolidate(fed))["summarized"] == 3
        await assert_settled(fed, REWRITTEN)


@anyio_test
async def test_a_target_that_is_down_is_not_thought_for() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM, down={"episodic"}) as fed:
        await talk(fed)
        assert (await consolidate(fed))["counts"]["working"] == 5
        assert thinker.thoughts == []


# --- while the summarizer runs

# What another call changes meanwhile, and the expected records after the session is closed.
CHANGES: dict[str, tuple[Act, dict[str, str]]] = {
    "a member is written": (
        lambda fed: fed.remember("late", group="g", owner="a", session="s"),
        {"gist of one, two, three, late": "episodic"},
    ),
    "a member is forgotten": (lambda fed: fed.call("forget", ids=["two"]), {"gist of one, three": "episodic"}),
    "the first is forgotten": (lambda fed: fed.call("forget", ids=["one"]), {"gist of two, three": "episodic"}),
    "all are forgotten": (lambda fed: fed.call("forget", where={"group": "g"}), {}),
    "it is promoted": (
        lambda fed: fed.call("promote", ids=["one"], tier="semantic"),
        dict.fromkeys(GROUP, "semantic"),
    ),
    "a member is written anew": (
        lambda fed: anew(fed, {"id": "two", "content": "new two", "group": "g"}),
        {"gist of one, three, new two": "episodic"},
    ),
    "a member gets a key": (
        lambda fed: anew(fed, {"id": "two", "content": "new two", "key": "k", "group": "g"}),
        dict.fromkeys(["one", "new two", "three"], "episodic"),
    ),
}


async def anew(fed: Trial, record: dict[str, Any]) -> None:
    await fed.call("forget", ids=[record["id"]])
    await fed.call("remember", records=[record], owner="a", session="s")


@anyio_test
@pytest.mark.parametrize("change", CHANGES)
async def test_a_group_that_changes_while_it_thinks_is_left_and_tried_again(change: str) -> None:
    act, expected = CHANGES[change]
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        stop = thinker.stop()
        call = Task(tasks, lambda: consolidate(fed))
        await stop.reached.wait()
        await act(fed)  # the group is not locked
        assert not call.done
        stop.release()
        await call.ended()
        assert "gist of one, two, three" not in held_anywhere(fed)
        await fed.call("session/close", session="s", owner="a")
        await assert_settled(fed, {**expected, **dict.fromkeys(["gist of four", "gist of five"], "episodic")})


@anyio_test
async def test_a_summary_that_comes_too_late_lets_go_of_what_it_was_about() -> None:
    steer = Steered()
    thinker = Thinker()
    async with thinking(thinker, CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        stop = thinker.stop()
        spill = Task(tasks, lambda: consolidate(fed))
        await stop.reached.wait()
        copying = steer.hold("semantic", "remember")
        promote = Task(tasks, lambda: fed.call("promote", ids=["one"], tier="semantic", owner="a"))
        await copying.reached.wait()
        stop.release()
        await wait_all_tasks_blocked()
        copying.release()
        assert await promote.ended() == {"promoted": 3}
        await spill.ended()
        await wait_all_tasks_blocked()
        assert not has_claims(fed)
        await fed.settled()
        assert_nothing_under_way(fed)


@anyio_test
async def test_closing_a_conversation_does_not_rewrite_a_later_record_of_an_id() -> None:
    """The id was forgotten and written anew, in another session, while the summary was made."""
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        for id in ["one", "two"]:
            await fed.call("remember", records=[{"id": id, "content": id}], session="s")
        stop = thinker.stop()
        close = Task(tasks, lambda: fed.call("session/close", session="s"))
        await stop.reached.wait()
        await fed.call("forget", ids=["two"])
        await fed.call("remember", records=[{"id": "two", "content": "two anew"}], session="another")
        stop.release()
        assert (await close.ended())["flushed"] == 1
        assert contents(await fed.timeline()) == {"gist of one": "episodic", "two anew": "working"}


def held_anywhere(fed: Trial) -> set[str]:
    """Return the contents of all copies in all tiers."""
    return {record.content for copies in stored(fed).values() for _, record in copies}


@anyio_test
async def test_while_it_thinks_everybody_else_goes_on() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        stop = thinker.stop()
        call = Task(tasks, lambda: consolidate(fed))
        await stop.reached.wait()
        assert contents(await fed.timeline()) == AS_IT_WAS
        assert {record["id"] for record in (await fed.call("recall", query="one two"))["records"]} == {"one", "two"}
        assert await fed.call("reinforce", ids=["one"]) == {"reinforced": 1}
        await fed.remember("elsewhere", session="t")
        await fed.call("promote", ids=["four"], tier="semantic")
        await fed.call("forget", ids=["five"])
        assert (await fed.call("summarize", ids=["two", "three"], into="procedural"))["written"] == 1
        assert not call.done
        stop.release()
        assert (await call.ended())["summarized"] == 3
        [record] = await fed.timeline(tier="episodic")
        assert (record["content"], record["salience"]) == ("gist of one, two, three", 2.0)
        await fed.settled()
        assert_nothing_under_way(fed)


# --- at every step

STEPS: dict[str, tuple[str, str, bool]] = {
    "read": ("working", "recall", True),
    "think": ("", "", False),
    "write": ("episodic", "remember", False),
    "written": ("episodic", "remember", True),
    "compare": ("episodic", "recall", False),
    "compared": ("episodic", "recall", True),
    "sweep": ("working", "forget", False),
    "swept": ("working", "forget", True),
}
BEFORE_THE_COMMIT = [step for step in STEPS if not step.startswith("sw")]


def held_at(step: str, steer: Steered, thinker: Thinker) -> Any:
    tier, method, after = STEPS[step]
    return thinker.stop() if step == "think" else steer.hold(tier, method, after=after)


@anyio_test
@pytest.mark.parametrize("step", STEPS)
async def test_at_every_step_a_reader_sees_the_group_or_its_summary(step: str) -> None:
    steer, thinker = Steered(), Thinker()
    async with thinking(thinker, CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        hold = held_at(step, steer, thinker)
        call = Task(tasks, lambda: consolidate(fed))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        reads = [
            Task(tasks, partial(fed.call, method, **params))
            for method, params in (("timeline", {}), ("recall", {"limit": 20}), ("recall", {"query": "one two three"}))
        ]
        await wait_all_tasks_blocked()
        done = [read for read in reads if read.done]
        expected = AS_IT_WAS if step in BEFORE_THE_COMMIT else REWRITTEN
        for read in done:
            found = contents((await read.ended())["records"])
            assert found.keys() & {*GROUP, *REWRITTEN} <= expected.keys()
            assert read is reads[2] or found == expected
        assert done or step == "sweep"
        hold.release()
        await call.ended()
        for read in reads:
            await read.ended()
        await assert_settled(fed, REWRITTEN)


@anyio_test
@pytest.mark.parametrize("step", BEFORE_THE_COMMIT)
async def test_what_is_forgotten_at_any_step_is_gone_and_in_no_summary(step: str) -> None:
    steer, thinker = Steered(), Thinker()
    async with thinking(thinker, CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        hold = held_at(step, steer, thinker)
        call = Task(tasks, lambda: consolidate(fed))
        await hold.reached.wait()
        assert await fed.call("forget", ids=["two"]) == {"forgotten": 1}
        hold.release()
        await call.ended()
        await assert_settled(fed, {text: tier for text, tier in AS_IT_WAS.items() if text != "two"})


@anyio_test
@pytest.mark.parametrize("step", STEPS)
async def test_a_consolidation_that_is_cancelled_leaves_the_group_or_its_summary(step: str) -> None:
    steer, thinker = Steered(), Thinker()
    message = b'{"jsonrpc":"2.0","id":1,"method":"memory/consolidate"}'
    async with thinking(thinker, CALM, weather=steer) as fed:
        await talk(fed)
        hold = held_at(step, steer, thinker)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fed.federation.answer, message, LOCAL)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
            hold.release()
        await assert_settled(fed, AS_IT_WAS if step in ("read", "think") else REWRITTEN)
        await consolidate(fed)
        await assert_settled(fed, REWRITTEN)


# --- after a crash


async def crash(folder: Path, step: str) -> Path:
    """Return the files of a router that crashed at this step."""
    (folder / "before").mkdir()
    steer, thinker = Steered(), Thinker()
    async with (
        thinking(thinker, CALM, weather=steer, folder=folder / "before") as fed,
        anyio.create_task_group() as tasks,
    ):
        await talk(fed)
        hold = held_at(step, steer, thinker)
        call = Task(tasks, lambda: consolidate(fed))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        after = photograph(folder / "before", folder / "after")
        hold.release()
        await call.settled()
    return after


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@anyio_test
@pytest.mark.parametrize("step", STEPS)
async def test_after_a_crash_there_is_the_group_or_its_summary_and_nothing_else(tmp_path: Path, step: str) -> None:
    folder = await crash(tmp_path, step)
    async with thinking(Thinker(), CALM, folder=folder) as fed:
        await assert_settled(fed, AS_IT_WAS if step in BEFORE_THE_COMMIT else REWRITTEN)
        await consolidate(fed)
        await assert_settled(fed, REWRITTEN)


@anyio_test
async def test_what_gave_way_does_not_come_back_from_a_scan(tmp_path: Path) -> None:
    async with thinking(Thinker(), CALM, folder=tmp_path) as fed:
        await talk(fed)
        await consolidate(fed)
        await assert_settled(fed, REWRITTEN)
        for text in GROUP:
            plant(fed, "working", id=text, content=text, group="g", owner="a", session="s")
        fed.federation.catalog.tiers.set_scanned("working", False)
    async with thinking(Thinker(), CALM, folder=tmp_path) as fed:
        assert fed.federation.catalog.tiers.is_scanned("working")
        await assert_settled(fed, REWRITTEN)


# --- concurrent passes and reads


@anyio_test
async def test_while_one_pass_thinks_others_run_and_take_nothing_more_out() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        thought = thinker.stop()
        first = Task(tasks, lambda: consolidate(fed))
        await thought.reached.wait()
        # The leaving group no longer counts for the capacity, so the other pass spills nothing more.
        assert (await consolidate(fed))["summarized"] == 0
        await fed.call("remember", records=[{"id": "x", "content": "x"}], owner="b", session="t")
        closed = await fed.call("session/close", session="t", owner="b")
        assert (closed["flushed"], thinker.thoughts) == (1, [GROUP, ["x"]])
        thought.release()
        assert (await first.ended())["summarized"] == 3
        await assert_settled(fed, {**REWRITTEN, "gist of x": "episodic"})


@anyio_test
@pytest.mark.parametrize(("method", "params"), [("timeline", {}), ("recall", {}), ("recall", {"query": "one gist"})])
async def test_a_read_during_which_a_group_gives_way_shows_the_summary(method: str, params: dict[str, Any]) -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=[{"id": t, "content": t, "group": "g"} for t in GROUP], session="s")
        # A timeline reads records by id, with recalls to the tier.
        held = steer.hold("working", "recall", after=True)
        read = Task(tasks, lambda: fed.call(method, **params))
        await held.reached.wait()
        assert (await fed.call("session/close", session="s"))["summarized"] == 3
        held.release()
        assert [r["content"] for r in (await read.ended())["records"]] == ["gist of one, two, three"]


@anyio_test
async def test_what_leaves_is_decided_anew_after_each_thought() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        for session in ("s", "t"):
            for number in range(8):
                await fed.remember(f"{session}{number}", session=session)
        thought = thinker.stop()
        call = Task(tasks, lambda: consolidate(fed))
        await thought.reached.wait()
        [[first]] = thinker.thoughts
        other = "t" if first.startswith("s") else "s"
        held = await fed.timeline(where={"session": other})
        await fed.call("forget", ids=[record["id"] for record in held[:4]])
        thought.release()
        await call.ended()
        # The four remaining records do not exceed the capacity, so that conversation keeps all of them.
        assert [r["tier"] for r in await fed.timeline(where={"session": other})] == ["working"] * 4
        assert [r["tier"] for r in await fed.timeline(where={"session": first[0]})].count("working") == 4


@anyio_test
async def test_a_summary_that_is_too_long_for_a_record_rewrites_nothing() -> None:
    narrow = settings_of("[limits]\nmax_content_length = 20\n" + DISTIL, policy="explicit")
    async with thinking(Thinker(), narrow) as fed:
        await talk(fed)
        await consolidate(fed)
        where = contents(await fed.timeline())
        assert [where.get(text) for text in GROUP] == ["working"] * 3


@anyio_test
async def test_what_is_forgotten_by_query_while_its_group_gives_way_is_gone() -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        held = steer.hold("working", "recall", after=True, having=b'"two"')
        forget = Task(tasks, lambda: fed.call("forget", query="two"))
        await held.reached.wait()
        await consolidate(fed)
        held.release()
        assert await forget.ended() == {"forgotten": 1}
        assert not any("two" in record["content"] for record in await fed.timeline())


@anyio_test
async def test_a_walk_during_which_a_group_gives_way_meets_it_or_its_summary() -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        held = steer.hold("working", "recall", after=True)
        walk = Task(tasks, lambda: fed.call("timeline", page=100))
        await held.reached.wait()
        await consolidate(fed)
        held.release()
        page = await walk.ended()
        assert (contents(page["records"]), page["next"]) == (REWRITTEN, None)


@anyio_test
async def test_however_often_groups_give_way_a_read_shows_all() -> None:
    steer = Steered()
    async with thinking(Thinker(), CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        for number in range(4):
            await fed.remember(f"r{number}", session=f"s{number}")
        held = steer.hold("working", "recall", after=True)
        read = Task(tasks, fed.timeline)
        for number in range(4):
            await held.reached.wait()
            before = held
            await fed.call("session/close", session=f"s{number}")
            held = steer.hold("working", "recall", after=True)  # holds the reader's next recall, not the close's
            before.release()
        held.release()
        assert [record["content"] for record in await read.ended()] == [f"gist of r{number}" for number in range(4)]


@anyio_test
async def test_a_conversation_can_be_closed_while_it_is_being_summarized() -> None:
    thinker = Thinker()
    async with thinking(thinker, CALM) as fed, anyio.create_task_group() as tasks:
        await talk(fed)
        thought = thinker.stop()
        first = Task(tasks, lambda: consolidate(fed))
        await thought.reached.wait()
        close = Task(tasks, lambda: fed.call("session/close", session="s", owner="a"))
        await wait_all_tasks_blocked()
        thought.release()
        assert (await first.ended())["summarized"] == 3
        assert (await close.ended())["flushed"] == 2
        assert thinker.thoughts == [GROUP, ["four"], ["five"]]
