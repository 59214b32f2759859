"""Prompts beside the records (§4.16), and failures of a model's endpoint."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.config.loading import parse
from a2m_router.config.settings import Settings
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.timestamps import UNDATED
from a2m_router.summaries.model import Model
from tests.support.examples import scaled
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Task,
    Trial,
    assert_nothing_under_way,
    contents,
    refused,
    settings_of,
    trial,
)
from tests.support.model_endpoint import PATIENCE, TOKEN, Endpoint, answer, completion, error, serving

anyio_test = pytest.mark.anyio

CALM = settings_of(policy="explicit")
RECORDS: list[dict[str, Any]] = [
    {"id": "1", "content": "I moved to Ghent.", "role": "user", "key": "home/city", "session": "s"},
    {"id": "2", "content": "Ghent is in Belgium.", "role": "assistant", "session": "s"},
    {"id": "3", "content": "The bakery in Ghent\nopens at six.", "role": "user", "tier": "episodic", "session": "s"},
    {"id": "4", "content": "", "uri": "file:///ghent.png", "tier": "semantic"},
    {"id": "5", "content": "", "embedding": [1.0, 0.0], "tier": "semantic"},
]
READS: list[tuple[str, dict[str, Any]]] = [
    ("recall", {"query": "Ghent", "limit": 3}),
    ("recall", {"limit": 10}),
    ("timeline", {"limit": 4}),
    ("timeline", {"where": {"session": "s"}}),
]


def with_model(url: str, *, timeout: str = "30s", max_input: int = 100_000, tiers: str = FOUR_TIERS) -> Settings:
    text = f'[summarizer]\nurl = "{url}"\nmodel = "small"\ntoken_env = "T"\ntimeout = "{timeout}"\n'
    tiers = tiers.replace("{policy}", "explicit")
    return parse(f"{text}max_input = {max_input}\n{tiers}", base=CALM.state.parent, environ={"T": TOKEN})


@asynccontextmanager
async def remembering(config: Settings = CALM) -> AsyncIterator[Trial]:
    async with trial(config) as fed:
        await fed.call("remember", records=RECORDS)
        yield fed


async def counted(fed: Trial) -> list[Any]:
    return [(record["id"], record["access_count"], record.get("accessed_at")) for record in await fed.timeline()]


# --- prompts beside the records

prompts = st.sampled_from([True, {}]) | st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["template", "none"]),
        "style": st.sampled_from(["facts", "transcript", "auto"]),
        "budget": st.integers(0, 200),
        "cite": st.booleans(),
    },
)
calls = st.lists(st.tuples(st.sampled_from(READS), prompts), min_size=1, max_size=4)


@settings(max_examples=scaled(5))
@given(calls)
def test_asking_for_text_changes_nothing_that_is_recalled_or_counted(made: list[Any]) -> None:
    async def scenario() -> None:
        async with remembering() as plain, remembering() as prompted:
            for (method, params), prompt in made:
                alone = await plain.call(method, **params)
                beside = await prompted.call(method, **params, prompt=prompt)
                assert beside["records"] == alone["records"]
                asked = prompt is True or prompt.get("method") != "none"
                assert ("prompt" in beside, "prompt_ids" in beside) == (asked, asked)
            assert await plain.timeline() == await prompted.timeline()

    anyio.run(scenario)


@anyio_test
async def test_true_means_the_defaults_and_whoever_does_not_ask_gets_no_text() -> None:
    async with remembering() as fed:
        assert (await fed.call("describe"))["prompt"] == {
            "styles": ["facts", "transcript", "auto"],
            "methods": ["template", "none"],
        }
        for method, params in READS:
            asked = [
                await fed.call(method, **params, prompt=prompt)
                for prompt in (True, {}, {"method": "template", "style": "auto", "cite": False, "budget": None})
            ]
            texts = [(each["prompt"], each["prompt_ids"]) for each in asked]
            assert texts == [texts[0]] * 3
            assert texts[0][0]
            for prompt in ({}, {"prompt": False}, {"prompt": None}, {"prompt": {"method": "none", "budget": 5}}):
                assert (await fed.call(method, **params, **prompt)).keys() == {"records"}


@anyio_test
async def test_the_styles_are_what_they_are_called() -> None:
    async with remembering() as fed:
        day = "2026-09-21"
        told = {
            style: (await fed.call("timeline", tier="working", prompt={"style": style}))["prompt"]
            for style in ("facts", "transcript", "auto")
        }
        facts = f"- {day}, user: I moved to Ghent.\n- {day}, assistant: Ghent is in Belgium."
        transcript = f"{day}\nuser: I moved to Ghent.\nassistant: Ghent is in Belgium."
        assert told == {"facts": facts, "transcript": transcript, "auto": transcript}
        cited = (await fed.call("timeline", prompt={"style": "facts", "cite": True}))["prompt"]
        assert f"- {day}, user [home/city]: I moved to Ghent." in cited
        assert f"- {day} [file:///ghent.png]: file:///ghent.png" in cited
        [found, *_] = (await fed.call("recall", query="bakery opens"))["records"]
        text = (await fed.call("recall", query="bakery opens", prompt={"style": "facts"}))["prompt"]
        assert found["id"] == "3"
        assert text.startswith(f"- {day}, user: The bakery in Ghent\n  opens at six.")


@settings(max_examples=scaled(4))
@given(
    st.lists(
        st.tuples(st.sampled_from(READS), st.sampled_from(["facts", "transcript"]), st.integers(0, 160)), max_size=12
    )
)
def test_a_budget_drops_whole_records_and_those_worth_least(asked: list[Any]) -> None:
    async def scenario() -> None:
        async with remembering() as fed:
            for (method, params), style, budget in asked:
                got = await fed.call(method, **params, prompt={"style": style, "budget": budget})
                whole = await fed.call(method, **params, prompt={"style": style})
                assert len(got["prompt"]) <= budget
                assert set(got["prompt"].split("\n")) <= {*whole["prompt"].split("\n"), ""}
                assert got["prompt_ids"] == [id for id in whole["prompt_ids"] if id in got["prompt_ids"]]
                for record in got["records"]:
                    said = record["content"].replace("\n", "\n  ") or record.get("uri")
                    assert not said or (said in got["prompt"]) == (record["id"] in got["prompt_ids"])
                # A budget for one record goes to the best one of a recall, or to the newest one of a timeline.
                shown = [record["id"] for record in got["records"] if record["content"] or record.get("uri")]
                best = shown[-1] if method == "timeline" else shown[0]
                alone = await fed.call("timeline", where={"id": best}, prompt={"style": style})
                tight = await fed.call(method, **params, prompt={"style": style, "budget": len(alone["prompt"])})
                assert tight["prompt_ids"] == [best]
                assert tight["prompt"] == alone["prompt"]

    anyio.run(scenario)


REFUSED: list[tuple[Any, list[str]]] = [
    ({"method": "magic"}, ["prompt.method", "'magic'", "template, none"]),
    ({"method": "model"}, ["prompt.method", "'model'", "template, none"]),
    ({"style": "haiku"}, ["prompt.style", "'haiku'", "facts, transcript, auto"]),
    ({"style": "haiku", "method": "none"}, ["prompt.style", "'haiku'"]),
    ({"model": "large"}, ["prompt.model", "'large'", "no model"]),
    ({"budget": -1}, ["prompt", "budget"]),
    ({"budget": 1.5}, ["prompt", "budget"]),
    ({"cite": "yes"}, ["prompt", "cite"]),
    ("template", ["prompt"]),
    (1, ["prompt"]),
]


@anyio_test
async def test_a_prompt_that_is_not_offered_is_rejected_and_counts_nothing() -> None:
    async with remembering() as fed:
        before = await counted(fed)
        for prompt, words in REFUSED:
            for method in ("recall", "timeline"):
                failed = await refused(fed.call(method, prompt=prompt), Code.INVALID_PARAMS)
                assert all(word in failed.message for word in words), failed.message
        assert await counted(fed) == before


# --- with a model


@anyio_test
async def test_the_model_is_asked_only_where_the_caller_asks_for_it() -> None:
    with serving() as endpoint:
        endpoint.answers(completion("- Somebody moved to Ghent."))
        async with remembering(with_model(endpoint.url)) as fed:
            described = await fed.call("describe")
            assert described["prompt"] == {
                "styles": ["facts", "transcript", "auto"],
                "methods": ["template", "none", "model"],
                "model": "small",
            }
            assert described["summarize"] == {"model": "small"}
            for prompt in (True, {}, {"method": "template", "model": "small"}, {"method": "none"}, False, None):
                await fed.call("recall", query="Ghent", prompt=prompt)
                await fed.call("timeline", prompt=prompt)
            await refused(fed.call("recall", prompt={"method": "model", "model": "large"}), Code.INVALID_PARAMS)
            await refused(fed.call("recall", prompt={"method": "model", "style": "haiku"}), Code.INVALID_PARAMS)
            nothing = await fed.call("recall", query="zebra", prompt={"method": "model"})
            assert (nothing["prompt"], nothing["prompt_ids"]) == ("", [])
            assert endpoint.asked == []
            template = await fed.call("recall", query="Ghent", prompt={"cite": True})
            written = await fed.call("recall", query="Ghent", prompt={"method": "model", "budget": 60, "cite": True})
            assert (written["prompt"], written["prompt_ids"]) == ("- Somebody moved to Ghent.", template["prompt_ids"])
            assert contents(written["records"]) == contents(template["records"])
            [asked] = endpoint.asked
            instructions, material = (message["content"] for message in asked.body["messages"])
            assert "60 characters" in instructions
            assert material == template["prompt"]


@anyio_test
async def test_a_model_is_not_told_of_a_date_that_there_is_not() -> None:
    with serving() as endpoint:
        endpoint.answers(completion("short"))
        async with remembering(with_model(endpoint.url)) as fed:
            undated = {"id": "u", "content": "Tea is in the kitchen.", "created_at": UNDATED, "tier": "semantic"}
            await fed.call("remember", records=[undated])
            await fed.call("recall", query="tea", prompt={"method": "model", "style": "facts"})
            await fed.call("summarize", ids=["u"], into="working")
            written = [asked.body["messages"][1]["content"] for asked in endpoint.asked]
            assert written == ["- undated: Tea is in the kitchen."] * 2


@anyio_test
async def test_a_model_is_handed_whole_records_and_the_answer_says_which() -> None:
    with serving() as endpoint:
        endpoint.answers(completion("short"))
        async with remembering(with_model(endpoint.url, max_input=60)) as fed:
            written = await fed.call("timeline", tier="working", prompt={"method": "model", "style": "facts"})
            assert written["prompt_ids"] == ["2"]
            assert endpoint.asked[0].body["messages"][1]["content"] == "- 2026-09-21, assistant: Ghent is in Belgium."


@anyio_test
async def test_a_text_longer_than_its_budget_is_an_error_and_is_not_cut() -> None:
    with serving() as endpoint:
        endpoint.answers(completion("x" * 21))
        async with remembering(with_model(endpoint.url)) as fed:
            prompt = {"method": "model", "budget": 20}
            failed = await refused(fed.call("timeline", prompt=prompt), Code.INTERNAL_ERROR)
            assert "wrote 21 characters where the budget is 20" in failed.message
            assert (await fed.call("timeline", prompt={**prompt, "budget": 21}))["prompt"] == "x" * 21


@anyio_test
async def test_while_the_model_writes_everybody_else_goes_on() -> None:
    with serving() as endpoint:
        endpoint.begins_and_stays()
        message = b'{"jsonrpc":"2.0","id":1,"method":"memory/recall","params":{"prompt":{"method":"model"}}}'
        async with remembering(with_model(endpoint.url)) as fed, anyio.create_task_group() as tasks:
            tasks.start_soon(fed.federation.answer, message, LOCAL)
            assert await anyio.to_thread.run_sync(endpoint.request_came.wait, PATIENCE)
            await fed.remember("meanwhile")
            assert await fed.call("forget", ids=["1"]) == {"forgotten": 1}
            assert not endpoint.caller_hung_up.is_set()
            tasks.cancel_scope.cancel()
        assert endpoint.caller_hung_up.wait(PATIENCE)


@anyio_test
async def test_a_model_summarizes_distils_and_may_find_nothing_to_say() -> None:
    distil = FOUR_TIERS.replace('spill_to = "episodic"', 'spill_to = "episodic"\ndistil = true')
    with serving() as endpoint:
        async with trial(with_model(endpoint.url, tiers=distil, max_input=200)) as fed:
            await fed.call("remember", records=[{**record, "key": None, "group": "g"} for record in RECORDS[:2]])
            endpoint.answers(completion("NOTHING"))
            assert await fed.call("summarize", tier="working") == {"records": [], "read": 2, "written": 0}
            endpoint.answers(completion("They live in Ghent."))
            [record] = (await fed.call("summarize", tier="working", key="page"))["records"]
            assert record["content"] == "They live in Ghent."
            assert record["metadata"]["summary_of"]["model"] == "small"
            closed = await fed.call("session/close", session="s")
            assert (closed["summarized"], closed["moved"]) == (2, 0)
            assert contents(await fed.timeline(tier="episodic")) == {"They live in Ghent.": "episodic"}
            # The model cannot read these records whole, so they move unchanged.
            await fed.remember("a" * 150, "b" * 150, group="h", session="t")
            asked = len(endpoint.asked)
            assert (await fed.call("session/close", session="t"))["moved"] == 2
            assert len(endpoint.asked) == asked
            endpoint.answers(completion("NOTHING"))
            await fed.remember("short", session="u")
            assert (await fed.call("session/close", session="u"))["moved"] == 1


@anyio_test
async def test_what_a_model_thinks_reaches_no_record_and_no_prompt() -> None:
    distil = FOUR_TIERS.replace('spill_to = "episodic"', 'spill_to = "episodic"\ndistil = true')
    with serving() as endpoint:
        async with trial(with_model(endpoint.url, tiers=distil)) as fed:
            await fed.call("remember", records=[{**record, "key": None, "group": "g"} for record in RECORDS[:2]])
            endpoint.answers(completion("<think>Where do they live?</think>\n\nNOTHING"))
            assert await fed.call("summarize", tier="working") == {"records": [], "read": 2, "written": 0}
            endpoint.answers(completion("<think>Where do they live?</think>\n\nThey live in Ghent."))
            await fed.call("summarize", tier="working", key="page")
            prompt = {"method": "model", "style": "facts"}
            assert (await fed.call("timeline", prompt=prompt))["prompt"] == "They live in Ghent."
            assert (await fed.call("session/close", session="s"))["summarized"] == 2
            assert contents(await fed.timeline(tier="episodic")) == {"They live in Ghent.": "episodic"}
            assert set(contents(await fed.timeline())) == {"They live in Ghent."}


# The endpoint's behaviour, words of the error, and the error's retry_after.
FAILURES: dict[str, tuple[Callable[[Endpoint], None], str, float | None]] = {
    "it does not answer": (lambda endpoint: endpoint.begins_and_stays(), "gave no whole answer within 0.2 s", None),
    "it takes no more calls": (
        lambda endpoint: endpoint.answers(
            answer(error(f"slow down, {TOKEN}"), "429 Too Many Requests", Retry_After="7")
        ),
        "429 Too Many Requests",
        7.0,
    ),
    "it speaks no JSON": (lambda endpoint: endpoint.answers(answer("<html>")), "something else than JSON", None),
    "it writes nothing": (lambda endpoint: endpoint.answers(completion(" ")), "an empty text", None),
    "it only thinks": (
        lambda endpoint: endpoint.answers(completion("<think>They live in Ghent.")),
        "answered with reasoning alone",
        None,
    ),
}
ASKING: dict[str, dict[str, Any]] = {
    "summarize": {"ids": ["1", "2"], "key": "page"},
    "session/close": {"session": "s"},
    "recall": {"prompt": {"method": "model"}},
    "timeline": {"prompt": {"method": "model", "budget": 100}},
}


@anyio_test
@pytest.mark.parametrize("failure", FAILURES)
async def test_a_failure_at_the_endpoint_is_a_clear_error_and_writes_nothing(
    failure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: list[bytes] = []
    post = Model._post

    # Messages are recorded here, because the endpoint may see a call that was given up later, or never.
    async def and_noted(self: Model, message: bytes) -> Any:
        posted.append(message)
        return await post(self, message)

    monkeypatch.setattr(Model, "_post", and_noted)
    play, words, retry_after = FAILURES[failure]
    distil = FOUR_TIERS.replace('spill_to = "episodic"', 'spill_to = "episodic"\ndistil = true')
    with serving() as endpoint:
        play(endpoint)
        timeout = "200ms" if "no whole answer" in words else "30s"
        async with trial(with_model(endpoint.url, tiers=distil, timeout=timeout)) as fed:
            await fed.call("remember", records=[{"content": each["content"], "id": each["id"], "session": "s"}
                                                for each in RECORDS[:2]])  # fmt: skip
            await fed.remember("old page", key="page", tier="semantic")
            before = contents(await fed.timeline())
            for method, params in ASKING.items():
                posted.clear()
                with pytest.raises(A2MError) as raised:
                    await fed.call(method, **params)
                failed = raised.value
                assert failed.code == Code.INTERNAL_ERROR
                assert words in failed.message
                assert failed.data is not None
                assert words in failed.data["reason"]
                assert TOKEN not in failed.message + str(failed.data)
                if method != "session/close":
                    assert failed.data.get("retry_after") == retry_after
                assert posted
                assert contents(await fed.timeline()) == before
            assert (await fed.call("fetch", key="page"))["record"]["revision"] == 0
            await fed.settled()
            assert_nothing_under_way(fed)
            assert len(fed.copies()) == len(before)


@anyio_test
@pytest.mark.parametrize("anew", [False, True])
async def test_what_is_forgotten_while_a_model_writes_of_it_is_not_told(
    anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = anyio.Event(), anyio.Event()

    async def write(self: Model, instructions: str, text: str) -> str:
        reached.set()
        await go_on.wait()
        return "short"

    monkeypatch.setattr(Model, "write", write)
    async with remembering(with_model("http://127.0.0.1:9/v1")) as fed, anyio.create_task_group() as tasks:
        before = await counted(fed)
        prompt = {"method": "model", "style": "facts"}
        recall = Task(tasks, lambda: fed.call("recall", prompt=prompt, limit=50))
        await reached.wait()
        await fed.call("forget", ids=["1"])
        if anew:
            await fed.call("remember", records=[{"id": "1", "content": "something else"}])
        go_on.set()
        error = await refused(recall.ended(), Code.INTERNAL_ERROR)
        assert error.data is not None
        assert error.data["reason"] == "changing"
        # The call failed, so its records do not count as recalled.
        another = [("1", 0, None)] if anew else []
        assert await counted(fed) == [each for each in before if each[0] != "1"] + another
