"""memory/summarize in the federation (§4.15): what it reads, the tier of the summary, and concurrent changes."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Record
from a2m_router.summaries.summarizing import Extracts
from tests.support.examples import scaled
from tests.support.federated import (
    CALM,
    FOUR_TIERS,
    LOCAL,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    kept,
    refused,
    settings_of,
    stored,
    trial,
)
from tests.support.summarizers import Thinker, naming, thinking

anyio_test = pytest.mark.anyio

ALL_MAY_PUBLISH_TEXT = (
    FOUR_TIERS.replace("promote_after = 3", "promote_after = 3\nmay_publish = true")
    .replace('half_life = "5m"', 'half_life = "5m"\nmay_publish = true')
    .replace('[tiers.semantic]\nkind = "semantic"', '[tiers.semantic]\nkind = "semantic"\nshared = true')
)
ALL_MAY_PUBLISH = settings_of(ALL_MAY_PUBLISH_TEXT, policy="explicit")


async def everything(fed: Trial) -> list[dict[str, Any]]:
    """Return every record with all that the router counts."""
    return await fed.timeline(embeddings=True)


# --- which records are read

MEMORY: list[dict[str, Any]] = [
    {"id": "1", "content": "the shop opens early", "role": "user", "key": "shop/hours"},
    {
        "id": "2",
        "content": "the shop sells bread",
        "metadata": {"of": "goods"},
        "tier": "episodic",
        "key": "shop/goods",
    },
    {"id": "3", "content": "Ada lives in Ghent", "role": "user", "owner": "a"},
    {"id": "4", "content": "bread keeps three days", "metadata": {"of": "goods"}, "tier": "semantic"},
]

SELECTORS: list[tuple[dict[str, Any], str]] = [
    ({"ids": ["4", "1", "nobody's"]}, "14"),
    ({"query": "bread"}, "24"),
    ({"tier": "semantic"}, "4"),
    ({"where": {"role": "user"}}, "13"),
    ({"where": {"of": "goods"}}, "24"),
    ({"where": {"tier": ["working", "semantic"], "role": None}}, "4"),
    ({"key_prefix": "shop"}, "12"),
    ({"key_prefix": "shop/goods"}, "2"),
    ({"ids": ["1", "2", "3"], "where": {"role": "user"}, "owner": "b"}, "1"),
    ({"where": {"role": "user"}, "owner": "a"}, "13"),
    ({"query": "bread", "tier": "episodic"}, "2"),
    ({"ids": ["1", "2"], "where": {"id": ["2", "4"]}}, "2"),
    ({"ids": []}, ""),
    ({"query": "zebra"}, ""),
]


@anyio_test
async def test_each_selector_reads_its_records_by_time_and_says_how_many() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed:
        await fed.call("remember", records=MEMORY)
        texts = {str(record["id"]): record["content"] for record in MEMORY}
        for selector, ids in SELECTORS:
            thinker.thoughts.clear()
            answer = await fed.call("summarize", **selector, into="procedural")
            assert thinker.thoughts == ([[texts[id] for id in ids]] if ids else []), selector
            assert (answer["read"], answer["written"], len(answer["records"])) == (len(ids), *[int(bool(ids))] * 2)
            await fed.call("forget", tier="procedural")


@anyio_test
@pytest.mark.parametrize(("selector", "newest"), [({"tier": "working"}, "45"), ({"query": "fact number"}, None)])
async def test_a_limit_keeps_the_newest_or_the_best(selector: dict[str, Any], newest: str | None) -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed:
        await fed.remember(*(f"fact number {number}" for number in range(6)))
        answer = await fed.call("summarize", **selector, limit=2)
        [thought] = thinker.thoughts
        assert (answer["read"], len(thought)) == (2, 2)
        assert thought == sorted(thought)
        assert newest is None or thought == [f"fact number {number}" for number in newest]
        assert "limit" in (await refused(fed.call("summarize", **selector, limit=0), Code.INVALID_PARAMS)).message


NOTHING_NAMED: list[dict[str, Any]] = [
    {},
    {"limit": 5},
    {"into": "semantic", "key": "k"},
    {"owner": "a"},
    {"where": {}},
    {"query": "", "key_prefix": ""},
    {"ids": None},
]


@anyio_test
async def test_a_call_that_selects_nothing_is_rejected_in_a_sentence() -> None:
    """A call that selects nothing, or names something unknown, is rejected with a message that names the parameter."""
    thinker = Thinker()
    async with thinking(thinker) as fed:
        await fed.call("remember", records=MEMORY)
        before = await everything(fed)
        for empty in NOTHING_NAMED:
            assert "params" in (await refused(fed.call("summarize", **empty), Code.INVALID_PARAMS)).message
        for wrong, code, word in (
            ({"tier": "attic"}, Code.UNKNOWN_TIER, "attic"),
            ({"ids": ["1"], "into": "attic"}, Code.UNKNOWN_TIER, "attic"),
            ({"ids": ["1"], "key": ""}, Code.INVALID_PARAMS, "key"),
            ({"query": " "}, Code.INVALID_PARAMS, "query"),
            ({"query": "what is the", "tier": "working"}, Code.INVALID_PARAMS, "query"),
            ({"ids": "1"}, Code.INVALID_PARAMS, "ids"),
        ):
            assert word in (await refused(fed.call("summarize", **wrong), code)).message
        assert thinker.thoughts == []
        assert await everything(fed) == before


@anyio_test
async def test_the_sources_stay_as_they_are_and_are_not_counted_as_recalled() -> None:
    async with thinking(Thinker()) as fed:
        await fed.raw("remember", msgspec.json.encode({"records": MEMORY}).replace(b'"goods"', b'"g\\u006fods"'))
        before, seen = kept(fed), await everything(fed)
        for selector, _ in SELECTORS:
            await fed.call("summarize", **selector)
        assert before.items() <= kept(fed).items()
        ids = {record["id"] for record in MEMORY}
        assert [record for record in await everything(fed) if record["id"] in ids] == seen


# --- which tier the summary goes to


@anyio_test
async def test_the_summary_goes_into_the_semantic_tier_unless_another_is_named() -> None:
    async with thinking(Thinker()) as fed:
        await fed.call("remember", records=MEMORY)
        for into, tier in ((None, "semantic"), ("working", "working"), ("procedural", "procedural")):
            [record] = (await fed.call("summarize", ids=["1"], into=into))["records"]
            assert (record["tier"], record["content"]) == (tier, "gist of the shop opens early")
    no_semantic = FOUR_TIERS.replace('kind = "semantic"', 'kind = "episodic"')
    async with thinking(Thinker(), settings_of(no_semantic, policy="explicit")) as fed:
        await fed.call("remember", records=MEMORY)
        assert [record["tier"] for record in (await fed.call("summarize", ids=["1"]))["records"]] == ["working"]


@anyio_test
@pytest.mark.parametrize("thinker", [Thinker(), Thinker(model="small"), None], ids=["by hand", "a model", "extracts"])
async def test_a_private_summary_goes_to_a_shared_tier_only_when_told_to(thinker: Thinker | None) -> None:
    """This holds although the policy may publish from every tier."""
    async with thinking(thinker or Extracts(threads=False), ALL_MAY_PUBLISH) as fed:
        said = "Ada keeps bread in the shop. Tea is sold on Monday in Ghent."
        mine = await fed.remember(said, said[::-1].title() + ".", session="s", owner="a")
        [nobodys] = await fed.remember(said, tier="episodic")
        [shared] = await fed.remember(said, tier="semantic", owner="a")
        private: list[dict[str, Any]] = [
            {"ids": mine[:1]},
            {"where": {"session": "s"}},
            {"ids": [*mine, shared]},
            {"ids": [nobodys]},
            {"ids": [nobodys, shared]},
            {"query": "bread"},
            {"ids": mine[:1], "key": "page"},
        ]
        for selector in private:
            [record] = (await fed.call("summarize", **selector, owner="a"))["records"]
            assert (record["tier"], record["owner"]) == ("episodic", "a"), selector
            assert record["id"] not in {each["id"] for each in await fed.timeline(owner="b")}
        for params in ({"ids": [shared]}, {"ids": mine, "into": "semantic"}):
            [record] = (await fed.call("summarize", **params, owner="a"))["records"]
            assert (record["tier"], record["owner"]) == ("semantic", "a")
            assert "ids" not in record["metadata"]["summary_of"], "whose ids these are is private"
            assert record["id"] in {each["id"] for each in await fed.timeline(owner="b")}


@anyio_test
@pytest.mark.parametrize(
    ("kinds", "tier"),
    [
        ({"a": "semantic", "b": "semantic"}, "b"),
        ({"a": "semantic", "b": "working", "c": "episodic"}, "c"),
        ({"a": "semantic", "b": "working"}, "b"),
        ({"a": "semantic", "p": "procedural"}, None),
        ({"a": "working", "p": "procedural"}, None),
    ],
)
async def test_a_private_summary_goes_to_the_most_semantic_private_tier(
    kinds: dict[str, str], tier: str | None
) -> None:
    text = "\n".join(f'[tiers.{name}]\nkind = "{kind}"\ncommand = ["-"]' for name, kind in kinds.items())
    text = text.replace("[tiers.a]", "[tiers.a]\nshared = true")
    thinker = Thinker()
    async with thinking(thinker, settings_of(text)) as fed:
        source = list(kinds)[-1]
        [id] = await fed.remember("a secret", tier=source, owner="a")
        if tier is not None:
            assert [r["tier"] for r in (await fed.call("summarize", ids=[id], owner="a"))["records"]] == [tier]
            return
        error = await refused(fed.call("summarize", ids=[id], owner="a"), Code.INVALID_PARAMS)
        assert all(word in error.message for word in ("into: ", "'a'", f"{source!r} are private", "to that tier"))
        assert thinker.thoughts == []
        assert [record["id"] for record in await fed.timeline()] == [id]
        assert (await fed.call("summarize", ids=[id], owner="a", into="a"))["written"] == 1


@anyio_test
async def test_a_shared_page_is_replaced_by_private_text_only_when_told_to() -> None:
    thinker = Thinker()
    async with thinking(thinker, ALL_MAY_PUBLISH) as fed:
        [id] = await fed.remember("a secret", owner="a")
        [page] = await fed.remember("for all", key="page", tier="semantic", owner="a")
        error = await refused(fed.call("summarize", ids=[id], key="page", owner="a"), Code.INVALID_PARAMS)
        assert all(word in error.message for word in ("into: ", "'page'", "'semantic'", "'working' are private"))
        assert thinker.thoughts == []
        for into in ("episodic", "semantic"):
            [record] = (await fed.call("summarize", ids=[id], key="page", into=into, owner="a"))["records"]
            assert (record["id"], record["tier"]) == (page, into)


@anyio_test
async def test_what_the_policy_may_publish_is_still_published() -> None:
    """The policy still publishes records as the configuration file permits."""
    distilling = ALL_MAY_PUBLISH_TEXT.replace("capacity = 6\n", "capacity = 1\ndistil = true\n")
    async with thinking(Thinker(), settings_of(distilling, policy="explicit")) as fed:
        await fed.remember("one two", "three four", tier="episodic", owner="a")
        await fed.call("consolidate")
        assert [record["content"] for record in await fed.timeline(tier="semantic", owner="b")] == ["gist of one two"]


@anyio_test
async def test_the_metadata_says_what_it_is_of_and_by_which_model() -> None:
    async with thinking(Thinker(model="small")) as fed:
        assert (await fed.call("describe"))["summarize"] == {"model": "small"}
        ids = await fed.remember("one", "two")
        [record] = (await fed.call("summarize", ids=ids))["records"]
        assert record["metadata"] == {"summary_of": {"records": 2, "model": "small", "ids": ids}}
        assert record["role"] == "memory"
        await fed.remember(*map(str, range(101)), session="many")
        [record] = (await fed.call("summarize", where={"session": "many"}))["records"]
        assert record["metadata"] == {"summary_of": {"records": 101, "model": "small"}}


@anyio_test
async def test_a_key_is_a_page_that_is_replaced_where_it_is() -> None:
    async with thinking(Thinker()) as fed:
        ids = await fed.remember("one", "two")
        [first] = (await fed.call("summarize", ids=ids[:1], key="page", into="episodic"))["records"]
        assert (first["content"], first["tier"], first["revision"]) == ("gist of one", "episodic", 0)
        [second] = (await fed.call("summarize", ids=ids, key="page"))["records"]
        assert (second["id"], second["tier"], second["revision"]) == (first["id"], "episodic", 1)
        assert second["content"] == "gist of one, two"
        [third] = (await fed.call("summarize", key_prefix="page", key="page", into="semantic"))["records"]
        assert (third["id"], third["tier"], third["revision"]) == (first["id"], "semantic", 2)
        assert (await fed.call("fetch", key="page"))["record"] == third
        await fed.settled()
        assert fed.copies() == {ids[0]: ["working"], ids[1]: ["working"], first["id"]: ["semantic"]}


@anyio_test
async def test_the_same_key_of_another_owner_or_of_nobody_is_another_page() -> None:
    async with thinking(Thinker()) as fed:
        others = await fed.remember("b's page", key="page", owner="b")
        nobodys = await fed.remember("everybody's page", key="page")
        mine = await fed.remember("fact", owner="a")
        [record] = (await fed.call("summarize", ids=mine, key="page", owner="a"))["records"]
        assert (record["owner"], record["revision"]) == ("a", 0)
        pages = {owner: (await fed.call("fetch", key="page", owner=owner))["record"] for owner in ("a", "b", None)}
        assert {owner: page["id"] for owner, page in pages.items()} == {"a": record["id"], "b": others[0],
                                                                       None: nobodys[0]}  # fmt: skip


@anyio_test
async def test_the_summary_is_its_callers_else_its_records_one_owners() -> None:
    """The summary belongs to its caller; without an owner in the call, to the one owner of its records."""
    async with thinking(Thinker()) as fed:
        a, b, nobody = [(await fed.remember(f"{owner}'s", owner=owner))[0] for owner in ("a", "b", None)]
        error = await refused(fed.call("summarize", ids=[a, b]), Code.INVALID_PARAMS)
        assert "several owners" in error.message
        for ids, asked, owner in (([a, nobody], None, "a"), ([nobody], None, None), ([a, b], "b", "b"),
                                  ([nobody], "b", "b")):  # fmt: skip
            answer = await fed.call("summarize", ids=ids, owner=asked)
            assert [record.get("owner") for record in answer["records"]] == [owner]
            assert answer["read"] == (len(ids) if asked is None else 1)


@anyio_test
async def test_the_summary_is_an_ordinary_record() -> None:
    async with thinking(Thinker()) as fed:
        ids = await fed.remember("the shop opens early", "the shop sells bread", session="s")
        cursor = (await fed.call("events"))["cursor"]
        answer = await fed.call("summarize", ids=ids, key="page")
        [record] = answer["records"]
        assert (answer["read"], answer["written"]) == (2, 1)
        [event] = (await fed.call("events", cursor=cursor))["events"]
        told = {name: event.get(name) for name in ("kind", "id", "tier", "key", "revision")}
        assert told == {"kind": "written", "id": record["id"], "tier": "semantic", "key": "page", "revision": 0}
        assert (await fed.call("fetch", key="page"))["record"] == record
        assert record in await fed.timeline()
        [found] = (await fed.call("recall", query="gist"))["records"]
        assert (found["id"], found["access_count"]) == (record["id"], 1)
        assert await fed.call("promote", ids=[record["id"]], tier="procedural") == {"promoted": 1}
        assert await fed.call("forget", ids=[record["id"]]) == {"forgotten": 1}
        await fed.settled()
        assert fed.copies() == {id: ["working"] for id in ids}
        assert_nothing_under_way(fed)


# --- what the summary contains

words = st.sampled_from(["Ada", "keeps", "sells", "bread", "tea", "shop", "Ghent", "Monday", "12", "and", "the", "店"])
statements = st.lists(words, min_size=1, max_size=9).map(lambda said: f"{' '.join(said)}.")
texts = st.lists(statements | st.text(max_size=20), max_size=6).map(" ".join)


@settings(max_examples=scaled(6))
@given(st.lists(texts, min_size=1, max_size=6))
def test_an_extract_has_only_lines_of_its_sources(said: list[str]) -> None:
    """An extract consists of lines of its sources; where it writes nothing, no record changes."""

    async def scenario() -> None:
        async with trial(CALM) as fed:
            ids = await fed.remember(*said)
            before = await everything(fed)
            answer = await fed.call("summarize", ids=ids)
            assert answer["read"] == len(said)
            assert answer["written"] == len(answer["records"]) <= 1
            for record in answer["records"]:
                assert all(any(line in text for text in said) for line in record["content"].split("\n"))
                assert len(record["content"]) < sum(map(len, said))
            assert await everything(fed) == [*before, *answer["records"]]

    anyio.run(scenario)


@anyio_test
async def test_a_federation_without_a_model_says_so_and_extracts() -> None:
    async with trial(CALM) as fed:
        assert (await fed.call("describe"))["summarize"] == {"model": None}
        ids = await fed.remember(
            "Hello there! The deploy key rotates every 90 days. Well, well.",
            "Oh, I see. The staging database is rebuilt each Monday. Right.",
        )
        [record] = (await fed.call("summarize", ids=ids))["records"]
        assert "deploy key" in record["content"]


@anyio_test
async def test_declining_is_an_answer_and_changes_nothing() -> None:
    async with thinking(Thinker(lambda _: None)) as fed:
        ids = await fed.remember("hello")
        page = await fed.remember("as it was", key="page", tier="semantic")
        before = await everything(fed)
        cursor = (await fed.call("events"))["cursor"]
        assert await fed.call("summarize", ids=ids, key="page") == {"records": [], "read": 1, "written": 0}
        assert await fed.call("summarize", ids=["nobody's"], key="page") == {"records": [], "read": 0, "written": 0}
        assert await everything(fed) == before
        assert (await fed.call("events", cursor=cursor))["events"] == []
        assert set(fed.copies()) == {*ids, *page}


# --- what fails


@anyio_test
@pytest.mark.parametrize(
    ("tier", "method", "page"),
    [
        ("working", "recall", False),
        ("semantic", "remember", False),
        (None, "", False),
        (None, "", True),
    ],
)
async def test_what_fails_names_itself_and_nothing_is_written(tier: str | None, method: str, page: bool) -> None:
    def fail(records: Sequence[Record]) -> str | None:
        if tier is None:
            raise A2MError(Code.INTERNAL_ERROR, "no words came", {"reason": "no words came", "retry_after": 7.0})
        return naming(records)

    steer = Steered()
    async with thinking(Thinker(fail), weather=steer) as fed:
        ids = await fed.remember("one")
        if page:
            await fed.remember("as it was", key="page", tier="semantic")
        before = await everything(fed)
        if tier is not None:
            steer.refuse(tier, method)
        error = await refused(fed.call("summarize", ids=ids, key="page"), Code.INTERNAL_ERROR)
        assert error.data is not None
        if tier is not None:
            assert tier in error.message
            assert error.data["tier"] == tier
            steer.allow(tier, method)
        else:
            assert error.data == {"reason": "no words came", "retry_after": 7.0}
        assert await everything(fed) == before
        await fed.settled()
        assert set(fed.copies()) == {record["id"] for record in before}
        assert_nothing_under_way(fed)


@pytest.mark.rule(n=12)
@anyio_test
async def test_with_a_tier_down_only_what_needs_it_fails() -> None:
    thinker = Thinker()
    async with thinking(thinker, down={"semantic"}) as fed:
        ids = await fed.remember("one two three")
        for params in ({"ids": ids}, {"query": "two"}):
            assert "semantic" in (await refused(fed.call("summarize", **params), Code.INTERNAL_ERROR)).message
        assert (await fed.call("summarize", query="two", tier="working", into="episodic"))["written"] == 1


@anyio_test
async def test_what_is_written_needs_no_tier_to_be_told() -> None:
    steer = Steered()
    required = settings_of(
        FOUR_TIERS.replace('kind = "semantic"', 'kind = "semantic"\nrequired = true'), policy="explicit"
    )
    async with thinking(Thinker(), required, weather=steer) as fed:
        ids = await fed.remember("one")
        steer.refuse("semantic", "recall")
        answer = await fed.call("summarize", ids=ids)
        assert [record["content"] for record in answer["records"]] == ["gist of one"]
        steer.allow("semantic", "recall")
        assert answer["records"] == await fed.timeline(tier="semantic")


@anyio_test
async def test_a_summary_longer_than_a_record_may_be_is_not_written() -> None:
    short = settings_of("[limits]\nmax_content_length = 20\n" + FOUR_TIERS, policy="explicit")
    async with thinking(Thinker(), short) as fed:
        ids = await fed.remember("a rather long fact", tier="semantic")
        error = await refused(fed.call("summarize", ids=ids), Code.INTERNAL_ERROR)
        assert "26 characters" in error.message
        assert [record["id"] for record in await fed.timeline()] == ids


@anyio_test
async def test_a_record_without_a_key_may_have_come_with_any_revision() -> None:
    async with thinking(Thinker()) as fed:
        ids = await fed.remember("one", revision=5)
        assert (await fed.call("summarize", ids=ids))["written"] == 1


# --- changes while the reasoner works

Change = Callable[[Trial], Awaitable[Any]]

# changes by others meanwhile, and the sources that remain
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "a source is replaced": (lambda fed: fed.remember("new one", key="source"), ["new one", "two"]),
    "a source is forgotten": (lambda fed: fed.call("forget", ids=["2"]), ["one"]),
    "a source is written anew": (lambda fed: anew(fed, {"id": "2", "content": "another two"}), ["one", "another two"]),
}

OLD_PAGE = {"id": "p", "content": "old page", "key": "page", "tier": "semantic"}

# changes of the page by others meanwhile, and what the error says about the page
EDITS: dict[str, tuple[Change, str]] = {
    "edited": (lambda fed: fed.remember("newer", key="page"), "was edited"),
    "replaced by the same content": (lambda fed: fed.remember("old page", key="page"), "was edited"),
    "edited there and back": (lambda fed: there_and_back(fed), "was edited"),
    "edited into another tier": (lambda fed: fed.remember("newer", key="page", tier="episodic"), "was edited"),
    "forgotten": (lambda fed: fed.call("forget", key_prefix="page"), "was forgotten"),
    "written anew": (
        lambda fed: anew(fed, {**OLD_PAGE, "created_at": "2001-01-01T00:00:00.000Z"}),
        "was edited",
    ),
}


async def anew(fed: Trial, record: dict[str, Any]) -> None:
    await fed.call("forget", ids=[record["id"]])
    await fed.call("remember", records=[record])


async def there_and_back(fed: Trial) -> None:
    for content in ("newer", "old page"):
        await fed.remember(content, key="page")


async def sources_and_page(fed: Trial, *, page: bool = True) -> None:
    await fed.call("remember", records=[{"id": "1", "content": "one", "key": "source"}, {"id": "2", "content": "two"}])
    if page:
        await fed.call("remember", records=[OLD_PAGE])


async def summarize_both(fed: Trial) -> Any:
    return await fed.call("summarize", ids=["1", "2"], key="page")


async def assert_only_the_second_thought(fed: Trial, answer: Any, left: list[str], revision: int) -> None:
    """Assert that the page summarizes what is left, nothing else was stored, and nothing is under way."""
    gist = "gist of " + ", ".join(left)
    [record] = answer["records"]
    assert (record["content"], record["revision"], answer["read"]) == (gist, revision, len(left))
    assert (await fed.call("fetch", key="page"))["record"] == record
    await fed.settled()
    texts = sorted(copy.content for copies in stored(fed).values() for _, copy in copies)
    assert texts == sorted([gist, *left])
    assert_nothing_under_way(fed)


@anyio_test
@pytest.mark.parametrize("change", CHANGES)
async def test_what_is_changed_while_it_thinks_is_thought_anew(change: str) -> None:
    act, left = CHANGES[change]
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        stop = thinker.stop()
        call = Task(tasks, lambda: summarize_both(fed))
        await stop.reached.wait()
        await act(fed)  # nothing is locked: the change is carried out while the reasoner works
        assert not call.done
        stop.release()
        await assert_only_the_second_thought(fed, await call.ended(), left, 1)
        assert len(thinker.thoughts) == 2


async def assert_the_edit_stays(fed: Trial, call: Task, before: list[dict[str, Any]], what: str) -> None:
    """Assert that the call fails, that it changed nothing, and that nothing is under way."""
    error = await refused(call.ended(), Code.INTERNAL_ERROR)
    assert error.data == {"reason": "changing", "retry_after": 1.0}
    assert all(word in error.message for word in ("'page'", what, "nothing was written"))
    assert await everything(fed) == before
    await fed.settled()
    assert set(fed.copies()) == {record["id"] for record in before}
    assert_nothing_under_way(fed)


@anyio_test
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("params", [{}, {"into": "episodic"}, {"ids": None, "key_prefix": "page"}], ids=str)
async def test_a_page_that_is_edited_while_it_thinks_stays_as_it_is(edit: str, params: dict[str, Any]) -> None:
    act, what = EDITS[edit]
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        stop = thinker.stop()
        call = Task(tasks, lambda: fed.call("summarize", **{"ids": ["1", "2"], "key": "page", **params}))
        await stop.reached.wait()
        await act(fed)
        before = await everything(fed)
        stop.release()
        await assert_the_edit_stays(fed, call, before, what)
        assert len(thinker.thoughts) == 1, "what comes to nothing is not thought anew"
        assert (await fed.call("summarize", ids=["1", "2"], key="page"))["written"] == 1


@anyio_test
async def test_a_page_that_is_made_while_it_thinks_stays_as_it_is() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed, page=False)
        stop = thinker.stop()
        call = Task(tasks, lambda: summarize_both(fed))
        await stop.reached.wait()
        await fed.remember("somebody else's", key="page", tier="episodic")
        before = await everything(fed)
        stop.release()
        await assert_the_edit_stays(fed, call, before, "was written")


@anyio_test
async def test_a_page_that_is_edited_while_it_is_summarized_stays() -> None:
    """A page keeps an edit that is made while the sources are read, for the first time or again."""
    thinker, steer = Thinker(), Steered()
    async with thinking(thinker, weather=steer) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        for when in ("read", "read again"):
            if when == "read again":
                stop = thinker.stop()
                call = Task(tasks, lambda: summarize_both(fed))
                await stop.reached.wait()
                await fed.remember("new one", key="source")
            reading = steer.hold("working", "recall")
            if when == "read":
                call = Task(tasks, lambda: summarize_both(fed))
            else:
                stop.release()
            await reading.reached.wait()
            await fed.remember(f"edited when it {when}", key="page")
            reading.release()
            assert (await refused(call.ended(), Code.INTERNAL_ERROR)).data == {"reason": "changing", "retry_after": 1.0}
            assert (await fed.call("fetch", key="page"))["record"]["content"] == f"edited when it {when}"


@anyio_test
@pytest.mark.parametrize("page", [True, False])
async def test_of_two_summaries_of_one_page_at_once_one_is_written(page: bool) -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed, page=page)
        stops = [thinker.stop(), thinker.stop()]
        calls = [
            Task(tasks, lambda: fed.call("summarize", ids=["1"], key="page")),
            Task(tasks, lambda: fed.call("summarize", ids=["2"], key="page")),
        ]
        for stop in stops:
            await stop.reached.wait()
        for stop in stops:
            stop.release()
        for call in calls:
            await call.settled()
        [lost] = [call.error for call in calls if call.error is not None]
        [won] = [call.result for call in calls if call.error is None]
        assert lost.data == {"reason": "changing", "retry_after": 1.0}
        assert won["records"] == [(await fed.call("fetch", key="page"))["record"]]
        assert won["records"][0]["revision"] == int(page)


@anyio_test
async def test_the_page_of_another_owner_may_be_edited_meanwhile() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("fact", owner="a")
        stop = thinker.stop()
        call = Task(tasks, lambda: fed.call("summarize", ids=[id], key="page"))  # the summary will belong to a
        await stop.reached.wait()
        for owner in ("b", None):
            await fed.remember("another page", key="page", owner=owner)
        stop.release()
        assert [record["owner"] for record in (await call.ended())["records"]] == ["a"]


@anyio_test
async def test_what_only_moves_or_earns_while_it_thinks_is_thought_of_once() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        stop = thinker.stop()
        call = Task(tasks, lambda: summarize_both(fed))
        await stop.reached.wait()
        await fed.call("promote", ids=["1", "p"], tier="episodic")
        await fed.call("reinforce", ids=["2"])
        await fed.call("recall", query="two")
        await fed.call("summarize", ids=["1"], key="another page")
        await fed.call("consolidate")
        stop.release()
        assert [record["tier"] for record in (await call.ended())["records"]] == ["episodic"]
        assert thinker.thoughts == [["one", "two"], ["one"]]


@anyio_test
@pytest.mark.parametrize("after", [False, True])
async def test_what_is_forgotten_while_the_summary_is_being_written_is_not_in_it(after: bool) -> None:
    steer = Steered()
    async with thinking(Thinker(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed, page=False)
        writing = steer.hold("semantic", "remember", after=after)
        call = Task(tasks, lambda: summarize_both(fed))
        await writing.reached.wait()
        await fed.call("forget", ids=["2"])
        writing.release()
        await assert_only_the_second_thought(fed, await call.ended(), ["one"], 0)


@anyio_test
@pytest.mark.parametrize("forgotten", ["2", "p"])
async def test_a_page_is_true_before_its_tier_has_it(
    forgotten: str,
) -> None:
    """A page is shown before its tier has it. A record forgotten in that state stays forgotten."""
    steer = Steered()
    async with thinking(Thinker(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        writing = steer.hold("semantic", "remember")
        call = Task(tasks, lambda: summarize_both(fed))
        await call.ended()
        page = (await fed.call("fetch", key="page"))["record"]
        assert (page["content"], page["revision"]) == ("gist of one, two", 1)
        await writing.reached.wait()
        await fed.call("forget", ids=[forgotten])
        writing.release()
        await fed.settled()
        page = (await fed.call("fetch", key="page"))["record"]
        assert page is None if forgotten == "p" else page["content"] == "gist of one, two"
        assert set(fed.copies()) == {"1", "2", "p"} - {forgotten}
        assert_nothing_under_way(fed)


@anyio_test
async def test_what_never_stops_changing_is_given_up_and_nothing_is_written() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        stops = [thinker.stop() for _ in range(3)]
        call = Task(tasks, lambda: summarize_both(fed))
        for number, stop in enumerate(stops):
            await stop.reached.wait()
            await fed.remember(f"version {number}", key="source")
            stop.release()
        error = await refused(call.ended(), Code.INTERNAL_ERROR)
        assert error.data == {"reason": "changing", "retry_after": 1.0}
        assert (await fed.call("fetch", key="page"))["record"]["content"] == "old page"
        await fed.settled()
        assert set(fed.copies()) == {"1", "2", "p"}
        assert_nothing_under_way(fed)


@anyio_test
async def test_a_record_replaced_while_it_is_read_is_not_summarized_as_it_was() -> None:
    thinker, steer = Thinker(), Steered()
    async with thinking(thinker, weather=steer) as fed, anyio.create_task_group() as tasks:
        await sources_and_page(fed)
        reading = steer.hold("working", "recall", after=True)
        call = Task(tasks, lambda: summarize_both(fed))
        await reading.reached.wait()
        await fed.remember("new one", key="source")
        reading.release()
        await call.ended()
        assert thinker.thoughts == [["new one", "two"]]


@anyio_test
async def test_a_source_that_leaves_the_callers_sight_meanwhile_is_left_out() -> None:
    thinker = Thinker()
    async with thinking(thinker) as fed, anyio.create_task_group() as tasks:
        [shared] = await fed.remember("published", owner="b", tier="procedural", key="k")
        [mine] = await fed.remember("mine", owner="a")
        stop = thinker.stop()
        call = Task(tasks, lambda: fed.call("summarize", ids=[shared, mine], owner="a"))
        await stop.reached.wait()
        await fed.call("promote", ids=[shared], tier="working", owner="b")
        stop.release()
        assert [record["content"] for record in (await call.ended())["records"]] == ["gist of mine"]


@anyio_test
@pytest.mark.parametrize("where", ["thinking", "remember", "remember, after"])
async def test_a_summary_that_is_cancelled_is_there_whole_or_not_at_all(where: str) -> None:
    thinker, steer = Thinker(), Steered()
    async with thinking(thinker, weather=steer) as fed:
        await sources_and_page(fed)
        params = {"ids": ["1", "2"], "key": "page"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "memory/summarize", "params": params}
        hold = thinker.stop() if where == "thinking" else steer.hold("semantic", "remember", after="after" in where)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fed.federation.answer, msgspec.json.encode(message), LOCAL)
            await hold.reached.wait()
            tasks.cancel_scope.cancel()
            hold.release()
        await wait_all_tasks_blocked()
        page = (await fed.call("fetch", key="page"))["record"]
        expected = ("old page", 0) if where == "thinking" else ("gist of one, two", 1)
        assert (page["content"], page["revision"]) == expected
        await fed.settled()
        assert fed.copies() == {"1": ["working"], "2": ["working"], "p": ["semantic"]}
        assert_nothing_under_way(fed)


@anyio_test
async def test_a_page_that_gets_into_a_shared_tier_meanwhile_publishes_nothing() -> None:
    thinker = Thinker()
    async with thinking(thinker, ALL_MAY_PUBLISH) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=MEMORY, owner="a")
        [page] = await fed.remember("a page", key="page", owner="a")
        thought = thinker.stop()
        call = Task(tasks, lambda: fed.call("summarize", ids=["1"], key="page", owner="a"))
        await thought.reached.wait()
        await fed.call("promote", ids=[page], tier="semantic", owner="a")
        thought.release()
        error = await refused(call.ended(), Code.INVALID_PARAMS)
        assert "private" in error.message
        assert [r["content"] for r in await fed.timeline(owner="b", tier="semantic") if r["id"] == page] == ["a page"]


@anyio_test
async def test_what_a_summarizer_has_no_room_for_is_not_said_to_be_read() -> None:
    async with thinking(Thinker(room=2)) as fed:
        ids = await fed.remember("one", "two", "three")
        answer = await fed.call("summarize", ids=ids)
        assert (answer["read"], answer["records"][0]["content"]) == (2, "gist of two, three")
        assert answer["records"][0]["metadata"] == {"summary_of": {"records": 2, "model": None, "ids": ids[1:]}}
