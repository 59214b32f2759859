"""The rules over mixes of tiers: native stores beside servers that promise less, one of which re-encodes like
JavaScript.

The properties are those of test_rules.py and test_principals.py. They are promises of the federation that hold with any
server. How a foreign server ranks its results is not tested.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec import Raw

import a2m_router.reading.lifted
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.matching import FIELDS
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import render
from a2m_router.protocol.wire.vectors import similarity
from tests.servers.core_only import CoreOnly
from tests.servers.habits import HABITS
from tests.servers.protocol import CAPABILITIES, READS
from tests.support import histories as h
from tests.support import properties as rules
from tests.support import two_worlds as w
from tests.support.crashes import photograph
from tests.support.examples import examples, run
from tests.support.federated import (
    FOUR_TIERS,
    START,
    Foreign,
    Hold,
    Mix,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    at_once,
    redone,
    settings_of,
    told_by,
    trial,
)
from tests.support.histories import TIERS, History, Run, histories, run_history
from tests.support.principals import EVERYTHING, common_ground, secluded
from tests.support.properties import bits, moved, raw_records

pytestmark = pytest.mark.anyio


# Each example runs on one of the two event loops; the examples are not about their differences.
loops = st.sampled_from(["asyncio", "trio"])

further = st.lists(st.sampled_from(CAPABILITIES[1:]), max_size=2, unique=True).map(tuple)
limits: Final[Sequence[Mapping[str, int]]] = (
    {},
    {},
    {"max_records_per_call": 2},
    {"max_recall_limit": 3},
    {"max_records_per_call": 1, "max_recall_limit": 1},
)


kinds: Final = st.just(CoreOnly) | st.sampled_from(list(HABITS.values()))


def mixes(tiers: Sequence[str] = TIERS, limits: Sequence[Mapping[str, int]] = limits) -> st.SearchStrategy[Mix]:
    """Return a strategy for the foreign servers of some tiers.

    At least one server is like JavaScript. The other tiers may have native stores. A server may have a habit: it then
    returns other fields than it was given.
    """
    foreign = st.builds(Foreign, further, st.booleans(), st.sampled_from(limits), kind=kinds)
    javascript = st.builds(Foreign, further, st.just(True), st.sampled_from(limits), kind=kinds)
    others = st.fixed_dictionaries({}, optional=dict.fromkeys(tiers, foreign))
    return st.builds(lambda mix, tier, server: {**mix, tier: server}, others, st.sampled_from(tiers), javascript)


# --- all of them together


@examples(4)
@given(history=histories(), mix=mixes(), loop=loops)
def test_every_answer_is_true_whatever_happens_at_once(history: History, mix: Mix, loop: str) -> None:
    run(loop, partial(run_history, history, rules.within_capacity, mix))


# --- 1, 2, 4, 5


@pytest.mark.rule(n=1)
@examples(3)
@given(history=rules.moving, mix=mixes(), loop=loops)
def test_an_acknowledged_record_stays_readable_while_everything_moves(history: History, mix: Mix, loop: str) -> None:
    run(loop, partial(run_history, history, rules.all_there, mix))


@pytest.mark.rule(n=2)
@examples(3)
@given(history=rules.replacing, mix=mixes(), loop=loops)
def test_no_answer_holds_an_id_twice_and_in_the_end_there_is_one_copy(history: History, mix: Mix, loop: str) -> None:
    run(loop, partial(run_history, history, servers=mix))


@pytest.mark.rule(n=4)
@examples(3)
@given(history=rules.grouping, mix=mixes(), loop=loops)
def test_a_group_leaves_its_tier_whole_in_every_kind_of_move(history: History, mix: Mix, loop: str) -> None:
    run(loop, partial(run_history, history, servers=mix))


@pytest.mark.rule(n=5)
@examples(3)
@given(history=rules.filling, mix=mixes(), loop=loops)
def test_after_a_pass_no_bucket_is_over_its_capacity(history: History, mix: Mix, loop: str) -> None:
    run(loop, partial(run_history, history, rules.within_capacity, mix))


# --- 7, 8, 11


@pytest.mark.rule(n=7)
@examples(3)
@given(earning=rules.earnings, mix=mixes(["working", "attic", "honours"]), loop=loops)
def test_what_is_due_is_promoted_and_not_spilled(earning: rules.Earning, mix: Mix, loop: str) -> None:
    run(loop, partial(rules.promoted_before_spilled, earning, mix))


@pytest.mark.rule(n=8)
@examples(4)
@given(
    written=rules.births,
    limit=st.integers(1, 15),
    metadata=st.booleans(),
    seed=st.integers(0, 2**32),
    mix=mixes(),
    loop=loops,
)
def test_a_timeline_ascends_across_tiers_and_its_limit_takes_the_newest(
    written: list[tuple[str, int | None]], limit: int, metadata: bool, seed: int, mix: Mix, loop: str
) -> None:
    run(loop, partial(rules.timelines_ascend, written, limit, metadata, seed, mix))


@pytest.mark.rule(n=11)
@examples(3)
@given(clients=rules.doings, seed=st.integers(0, 2**32), mix=mixes(), loop=loops)
def test_a_client_sees_its_writes_and_forgets_at_once(clients: rules.Doings, seed: int, mix: Mix, loop: str) -> None:
    run(loop, partial(rules.own_doings_are_seen_at_once, clients, seed, mix))


# --- 3

KINDS: Final[Mapping[str, Foreign | None]] = {
    "a2m-store": None,
    "core": Foreign(),
    "javascript": Foreign(like_javascript=True),
    "embeddings": Foreign(("embeddings",), like_javascript=True),
    "everything": Foreign(CAPABILITIES[1:]),
    "a little at once": Foreign(limits={"max_records_per_call": 1, "max_recall_limit": 2}),
}


# Records move both ways between two kinds of server. Each habit is in one pair.
_IN_PAIRS: Final = [*HABITS, *["a2m-store"] * (len(HABITS) % 2)]
PAIRS: Final = [*combinations_with_replacement(KINDS, 2), *zip(_IN_PAIRS[::2], _IN_PAIRS[1::2], strict=True)]
KINDS_AND_HABITS: Final = {**KINDS, **{name: Foreign(kind=habit) for name, habit in HABITS.items()}}


def behind(**kinds: str) -> Mix:
    """Return the foreign servers of some tiers, by the names of their kinds."""
    return {tier: server for tier, kind in kinds.items() if (server := KINDS_AND_HABITS[kind]) is not None}


def nested(depth: int) -> str:
    """Return metadata with `depth` levels."""
    return '{"a":' * (depth // 2) + "[" * (depth - depth // 2) + "]" * (depth - depth // 2) + "}" * (depth // 2)


# A message has four levels around the metadata of a record.
DEEPEST: Final = 128 - 4

NASTY: Final = (
    '{"n":123456789012345678901234567890,"m":-0.1e-400,"f":1.0,"e":1e400,"z":-0,"s":9007199254740993}',
    '{"d":1,"d":2,"10":"ten","9":{"b":1,"a":2,"1":3},"a":[[],[[{}],[1.0]]],"n":null}',
    r'{"\u0000":"\u0000\u2028\u2029","\u0041":"\/","x":"\ud83d\ude00\u00e9"}',
    '{"\u2028":"\u2029\U0001f600\x7f","":"","__proto__":{"id":1},"constructor":1}',
    '{"a2m-router":"{\\"created_at\\":\\"2001-01-01T00:00:00.000Z\\",\\"owner\\":\\"b\\",\\"key\\":\\"k\\"}"}',
    '{"a2m-router":{"created_at":1},"a2m-router":[]}',
    '{ "content" : "b" , "id" : "b" , "owner" : "b" ,\t"metadata" : {} }',
    "{}",
    nested(DEEPEST),
)
WIDE: Final = [-0.0, 5e-324, 1e308]
nasty = st.fixed_dictionaries(
    {"content": rules.texts | st.just("\0 \u2028 \U0001f600 " * 100), "embedding": st.just(WIDE) | rules.vectors},
    optional={
        "metadata": (st.sampled_from(NASTY).map(str.encode)).map(Raw) | rules.objects.map(str.encode).map(Raw),
        "role": rules.texts,
        "group": rules.texts,
        "owner": rules.texts,
        "session": rules.texts,
        "key": rules.names,
        "revision": st.integers(0, 2**40),
        "uri": rules.texts,
        "media_type": rules.texts,
        "created_at": st.integers(0, START * 2).map(render),
        "salience": st.floats(0, 1e6),
    },
)
ALL_THAT_IS_NASTY: Final[list[dict[str, Any]]] = [
    {"content": "\0 \u2028 \U0001f600 " * 10 ** (4 * (text == "{}")), "metadata": Raw(text.encode()), "embedding": WIDE}
    for text in NASTY
]

LEFT_AND_RIGHT: Final = """
[policy]
pass = "explicit"
[tiers.left]
kind = "working"
command = ["-"]
capacity = 1
spill_to = "right"
[tiers.right]
kind = "episodic"
command = ["-"]
"""


async def a_spill_and_the_way_back_change_nothing(records: Sequence[dict[str, Any]], servers: Mix) -> None:
    async with trial(settings_of(LEFT_AND_RIGHT), servers=servers) as fed:
        await fed.call("remember", records=[{"id": "stays", "content": "", "salience": 1e300}])
        ids = msgspec.json.decode(await fed.raw("remember", msgspec.json.encode({"records": records})))["ids"]
        before = {record.id: record for record in await raw_records(fed, "timeline", embeddings=True)}
        for record, id in zip(records, ids, strict=True):
            if "key" not in record:
                rules.as_written(before[id], record)

        async def all_in(tier: str) -> None:
            await fed.settled()
            after = {record.id: record for record in await raw_records(fed, "timeline", embeddings=True)}
            assert {id: record.tier for id, record in after.items()} == dict.fromkeys(ids, tier) | {"stays": "left"}
            # The field names alone, because the values may be long.
            assert [name for id, record in after.items() for name in unlike(record, before[id])] == []
            assert fed.copies() == {id: [record.tier] for id, record in after.items()}

        await all_in("left")
        await fed.call("consolidate")
        await all_in("right")
        await fed.call("promote", ids=ids, tier="left")
        await all_in("left")
        await fed.call("promote", ids=ids, tier="right")
        await all_in("right")


def unlike(one: Record, other: Record) -> list[str]:
    """Return the names of the fields in which two records differ, except the tier."""
    differing = [name for name in Record.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    return [name for name in differing if name != "tier"] + ["bits"] * (bits(one) != bits(other))


@pytest.mark.rule(n=3)
@pytest.mark.parametrize(("left", "right"), PAIRS)
@examples(1)
@example(records=ALL_THAT_IS_NASTY, loop="asyncio")
@given(records=st.lists(nasty, min_size=1, max_size=3), loop=loops)
def test_between_every_two_kinds_of_tiers_a_move_changes_nothing(
    left: str, right: str, records: list[dict[str, Any]], loop: str
) -> None:
    run(loop, partial(a_spill_and_the_way_back_change_nothing, records, behind(left=left, right=right)))


@pytest.mark.rule(n=3)
@examples(3)
@given(records=rules.several_records, path=rules.paths, recalls=st.integers(0, 2), mix=mixes(), loop=loops)
def test_a_move_changes_nothing_but_the_tier(
    records: list[dict[str, Any]], path: list[str], recalls: int, mix: Mix, loop: str
) -> None:
    run(loop, partial(rules.moves_change_nothing, records, path, recalls, mix))


# --- 6

MOUNTED: Final = f"""{FOUR_TIERS}
[tiers.manual]
kind = "semantic"
command = ["-"]
mount = true
"""


class Manual(CoreOnly):
    """A corpus that records the calls to it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.asked: list[tuple[str, Any]] = []
        super().__init__(*arguments, **options)
        pages = [{"id": "p0", "content": "n1 alpha beta", "metadata": {"m": 1}}, {"id": "m", "content": "alpha"}]
        super().call("memory/remember", {"records": pages})

    def call(self, method: str, params: Any) -> Any:
        self.asked.append((method, params))
        return super().call(method, params)


class RunBesideAMount(Run):
    """A run of a history with a model that leaves out the mount's records."""

    async def _records(self, method: str, **params: Any) -> list[Record]:
        records = await super()._records(method, **params)
        assert {record.id for record in records if record.tier == "manual"} <= {"manual/p0", "manual/m"}
        return [record for record in records if record.tier != "manual"]


# A promotion to procedural is allowed, so the histories have none. The high limit leaves room for the mount's records.
aimed_elsewhere = h.promotes.filter(lambda promote: promote.tier != "procedural")
unlimited = h.reads.map(lambda read: msgspec.structs.replace(read, limit=200))
beside_a_mount = histories(
    st.one_of(h.writes, h.groups, unlimited, aimed_elsewhere, h.forgets, h.closes, st.just(h.Consolidate()))
)


@pytest.mark.rule(n=6)
@examples(4)
@given(history=beside_a_mount, mix=mixes(), loop=loops)
def test_nothing_spills_into_procedural_and_nothing_is_written_to_a_mount(
    history: History, mix: Mix, loop: str
) -> None:
    async def as_it_was(run: Run) -> None:
        versions = run.model.versions.values()
        sent = {version.object for version in versions if version.tier == "procedural"}
        there = [record for record in await run.everything() if record.tier == "procedural"]
        assert sent.issuperset(run.model.version_of(record).object for record in there)
        manual = run.fed.servers["manual"]
        assert isinstance(manual, Manual)
        assert {record.id: record.content for record in told_by(manual)} == {"p0": "n1 alpha beta", "m": "alpha"}
        changing = [(method, params) for method, params in manual.asked if method not in READS]
        assert all(method == "memory/forget" and params == {"ids": []} for method, params in changing), changing

    servers = {**mix, "manual": Foreign(kind=Manual)}
    run(loop, partial(run_history, history, as_it_was, servers, text=MOUNTED, kind=RunBesideAMount))


# --- 14


@pytest.mark.rule(n=14)
@examples(3)
@given(history=st.lists(w.steps, min_size=1, max_size=3), mix=mixes(), loop=loops)
def test_nothing_that_can_be_asked_tells_what_another_does_in_private(
    history: list[w.Step], mix: Mix, loop: str
) -> None:
    async def scenario() -> None:
        clocks = w.StillClock(), w.StillClock()
        for clock in clocks:
            clock.now = START
        settings = secluded("background")
        async with (
            trial(settings, servers=mix, clock=clocks[0]) as first,
            trial(settings, servers=mix, clock=clocks[1]) as second,
        ):
            worlds = w.TwoWorlds(w.World(first), w.World(second), settle=True)
            await common_ground(worlds)
            for step in history:
                await worlds.apart(step.first, step.second)
                for who, call in step.seen_by_all:
                    await worlds.alike(who, call)
                for call in [*step.asked, *EVERYTHING]:
                    await worlds.compare(call)

    run(loop, scenario)


# --- a replaced key in a tier whose server cannot replace

KEYED: Final = {"working": Foreign(), "episodic": Foreign(("embeddings", "tiers"), like_javascript=True)}
CALM: Final = settings_of(policy="explicit")
FIRST: Final = {"id": "x", "content": "alpha", "key": "k/a", "session": "s", "metadata": {"m": 1}, "embedding": [1, 0]}
SECOND: Final = {"content": "beta", "key": "k/a", "session": "t", "metadata": {"m": 2}, "embedding": [0, 1]}
THIRD: Final = {"content": "gamma", "key": "k/a", "session": "t", "metadata": {"m": 3}}

STEPS: Final = [(method, after) for method in ("forget", "remember", "recall") for after in (False, True)]
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
steps = pytest.mark.parametrize(("method", "after"), STEPS)
tiers_with_keys = pytest.mark.parametrize("tier", list(KEYED))


async def replaced(fed: Trial, steer: Steered, tier: str, method: str, after: bool) -> Hold:
    """Write and replace a record, and hold the pending write: at the delete of the old copy, at the write of the new
    one or at the read that checks it.
    """
    await fed.call("remember", records=[{**FIRST, "tier": tier}, {"content": "other", "tier": tier}])
    written = steer.hold(tier, "remember", after=True, having=b"beta") if method == "recall" else None
    hold = steer.hold(tier, method, after=after, having=b'"x"') if written is None else None
    assert (await fed.call("remember", records=[SECOND])) == {"ids": ["x"]}
    if hold is None:
        assert written is not None
        await written.reached.wait()  # the recalls before this one belong to other steps
        hold = steer.hold(tier, method, after=after, having=b'"x"')
        written.release()
    await hold.reached.wait()
    return hold


async def the_second_is_seen(fed: Trial) -> None:
    """Assert that every kind of read finds the second state once and never the first. All reads run at once."""

    async def finds(method: str, *expected: str, **params: Any) -> None:
        records = (await fed.call(method, **params))["records"]
        there = [record["content"] for record in records]
        assert there == list(expected), (method, params, there)
        for record in records:
            assert record["id"] != "x" or (record["revision"], record["metadata"]) == (1, {"m": 2})

    async def fetched() -> None:
        record = (await fed.call("fetch", key="k/a"))["record"]
        assert (record["id"], record["content"], record["revision"]) == ("x", "beta", 1)

    await at_once(
        fetched,
        partial(finds, "timeline", "beta", "other"),
        partial(finds, "timeline", "beta", where={"m": 2}),
        partial(finds, "timeline", where={"m": 1}),
        partial(finds, "timeline", "beta", where={"content": ["beta", "alpha"]}),
        partial(finds, "timeline", "beta", where={"session": "t"}),
        partial(finds, "timeline", where={"session": "s"}),
        partial(finds, "timeline", "beta", key_prefix="k", limit=1),
        partial(finds, "recall", "beta", query="beta"),
        partial(finds, "recall", query="alpha"),
        partial(finds, "recall", "beta", query="alpha beta", where={"id": "x"}),
        partial(finds, "recall", "beta", embedding=[0, 1]),
        partial(finds, "recall", "other", "beta"),
        partial(finds, "recall", "beta", where={"revision": 1}),
    )


@tiers_with_keys
@steps
async def test_a_replacement_is_seen_at_once_and_once_while_its_tier_catches_up(
    tier: str, method: str, after: bool
) -> None:
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed, anyio.create_task_group() as tasks:
        hold = await replaced(fed, steer, tier, method, after)
        look = Task(tasks, partial(the_second_is_seen, fed))
        await wait_all_tasks_blocked()
        hold.release()
        await look.ended()
        await fed.settled()
        await the_second_is_seen(fed)
        assert fed.copies()["x"] == [tier]
        assert_nothing_under_way(fed)


@tiers_with_keys
async def test_who_asked_when_the_old_copy_was_gone_is_told_of_the_new_one(tier: str) -> None:
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed, anyio.create_task_group() as tasks:
        hold = await replaced(fed, steer, tier, "forget", after=True)
        answered = steer.hold(tier, "recall", after=True, having=b"beta")
        look = Task(tasks, partial(fed.call, "recall", query="beta"))
        await answered.reached.wait()
        hold.release()
        await wait_all_tasks_blocked()
        answered.release()
        assert [record["content"] for record in (await look.ended())["records"]] == ["beta"]
        await fed.settled()


@one_loop
@tiers_with_keys
@steps
async def test_a_router_that_dies_while_a_tier_catches_up_has_lost_nothing(
    tmp_path: Path, tier: str, method: str, after: bool
) -> None:
    (tmp_path / "before").mkdir()
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer, folder=tmp_path / "before") as fed:
        hold = await replaced(fed, steer, tier, method, after)
        folder = photograph(tmp_path / "before", tmp_path / "after")
        hold.release()
    down = {tier}
    async with trial(CALM, servers=KEYED, folder=folder, down=down) as fed:
        assert redone(fed) == ["x"]
        down.clear()
        await fed.federation.admission.welcomed[tier].wait()
        await the_second_is_seen(fed)
        await fed.settled()
        await the_second_is_seen(fed)
        assert fed.copies()["x"] == [tier]
        assert_nothing_under_way(fed)


@one_loop
@tiers_with_keys
async def test_what_is_forgotten_while_its_tier_catches_up_is_gone_after_a_crash(tmp_path: Path, tier: str) -> None:
    (tmp_path / "before").mkdir()
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer, folder=tmp_path / "before") as fed:
        hold = await replaced(fed, steer, tier, "remember", after=True)
        assert await fed.call("forget", ids=["x"]) == {"forgotten": 1}
        folder = photograph(tmp_path / "before", tmp_path / "after")
        hold.release()
    async with trial(CALM, servers=KEYED, folder=folder) as fed:
        await fed.settled()
        assert [record["content"] for record in await fed.timeline()] == ["other"]
        assert "x" not in fed.copies()
        assert_nothing_under_way(fed)


@tiers_with_keys
@steps
async def test_what_is_forgotten_while_its_tier_catches_up_is_gone(tier: str, method: str, after: bool) -> None:
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed:
        hold = await replaced(fed, steer, tier, method, after)
        assert await fed.call("forget", key_prefix="k") == {"forgotten": 1}
        assert await fed.call("fetch", key="k/a") == {"record": None}
        hold.release()
        await fed.settled()
        assert [record["content"] for record in await fed.timeline()] == ["other"]
        assert "x" not in fed.copies()
        assert (await fed.call("remember", records=[{**THIRD, "id": "x"}])) == {"ids": ["x"]}
        await fed.settled()
        assert (await fed.call("fetch", key="k/a"))["record"]["revision"] == 0
        assert_nothing_under_way(fed)


@one_loop
@tiers_with_keys
@steps
@pytest.mark.parametrize("onward", [None, "semantic"])
async def test_the_next_replacement_waits_until_the_tier_has_caught_up(
    tier: str, method: str, after: bool, onward: str | None
) -> None:
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed, anyio.create_task_group() as tasks:
        hold = await replaced(fed, steer, tier, method, after)
        third = {**THIRD, "tier": onward} if onward else THIRD
        write = Task(tasks, partial(fed.call, "remember", records=[third]))
        await wait_all_tasks_blocked()
        assert not write.done
        hold.release()
        assert await write.ended() == {"ids": ["x"]}
        await fed.settled()
        [record] = await fed.timeline(embeddings=True, where={"id": "x"})
        assert (record["content"], record["revision"], record["tier"]) == ("gamma", 2, onward or tier)
        assert "embedding" not in record
        assert fed.copies()["x"] == [onward or tier]
        assert (await fed.call("recall", embedding=[0, 1]))["records"] == []
        assert_nothing_under_way(fed)


@tiers_with_keys
@steps
async def test_a_record_leaves_as_it_was_replaced(tier: str, method: str, after: bool) -> None:
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed, anyio.create_task_group() as tasks:
        hold = await replaced(fed, steer, tier, method, after)
        move = Task(tasks, partial(fed.call, "promote", ids=["x"], tier="semantic"))
        await wait_all_tasks_blocked()
        hold.release()
        assert await move.ended() == {"promoted": 1}
        await fed.settled()
        await the_second_is_seen(fed)
        assert fed.copies()["x"] == ["semantic"]
        assert_nothing_under_way(fed)


@tiers_with_keys
@pytest.mark.parametrize("method", ["forget", "remember", "recall"])
async def test_a_tier_that_refuses_to_catch_up_is_asked_until_it_does(
    tier: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.placement.reconciler, "_FIRST_WAIT", 0.0)
    steer = Steered()
    async with trial(CALM, servers=KEYED, weather=steer) as fed:
        await fed.call("remember", records=[{**FIRST, "tier": tier}, {"content": "other", "tier": tier}])
        steer.refuse(tier, method)
        assert (await fed.call("remember", records=[SECOND])) == {"ids": ["x"]}
        asked = len(steer.seen)
        while sum(each == tier for each, _ in steer.seen[asked:]) < 5:
            await checkpoint()
        assert redone(fed) == ["x"]
        assert (await fed.call("fetch", key="k/a"))["record"]["content"] == "beta"
        steer.allow(tier, method)
        await fed.settled()
        await the_second_is_seen(fed)
        assert fed.copies()["x"] == [tier]


class Altering(CoreOnly):
    """Changes content to upper case while `altering` is true."""

    altering = False
    altered = 0

    def remember(self, params: Any) -> Any:
        if self.altering:
            self.altered += 1
            params = {"records": [{**each, "content": each["content"].upper()} for each in params["records"]]}
        return super().remember(params)


async def test_what_a_tier_alters_is_as_it_was_given_and_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.placement.reconciler, "_FIRST_WAIT", 0.0)
    async with trial(CALM, servers={"working": Foreign(kind=Altering)}) as fed:
        await fed.call("remember", records=[FIRST, {"content": "other"}])
        server = fed.servers["working"]
        assert isinstance(server, Altering)
        server.altering = True
        assert (await fed.call("remember", records=[SECOND])) == {"ids": ["x"]}
        while server.altered < 3:
            await the_second_is_seen(fed)
        server.altering = False
        await fed.settled()
        await the_second_is_seen(fed)
        assert fed.copies()["x"] == ["working"]
        assert_nothing_under_way(fed)


# --- a restart of the router, with its catalog and without

placed = st.lists(st.tuples(nasty, st.sampled_from(TIERS)), min_size=1, max_size=5)
# A server with a limit of recalls may not list all of its records.
listing_all = mixes(limits=[each for each in limits if "max_recall_limit" not in each])


@examples(2)
@given(records=placed, mix=listing_all, loop=loops)
def test_tiers_make_up_for_a_lost_catalog_but_for_what_was_earned(
    records: list[tuple[dict[str, Any], str]], mix: Mix, loop: str
) -> None:
    """Only salience and accesses are lost. All other fields are as before."""

    async def everything(fed: Trial) -> list[Record]:
        return await raw_records(fed, "timeline", embeddings=True)

    async def scenario(folder: Path) -> None:
        async with trial(CALM, servers=mix, folder=folder) as fed:
            written = [{**record, "tier": tier} for record, tier in records]
            await fed.raw("remember", msgspec.json.encode({"records": written}))
            again = [{**record, "content": "again"} for record, _ in records if "key" in record]
            await fed.raw("remember", msgspec.json.encode({"records": again}))
            await raw_records(fed, "recall", limit=2)
            before = await everything(fed)
            await fed.settled()
        async with trial(CALM, servers=mix, folder=folder) as fed:
            assert await everything(fed) == before
        lose_the_catalog(folder)
        async with trial(CALM, servers=mix, folder=folder, adopt=True) as fed:
            after = {record.id: record for record in await everything(fed)}
            assert list(map(unearned, after.values())) == list(map(unearned, before))
            assert {id: bits(record) for id, record in after.items()} == {r.id: bits(r) for r in before}
            for record in after.values():
                if record.embedding is not None and any(record.embedding):
                    [nearest, *_] = await raw_records(fed, "recall", embedding=record.embedding)
                    assert points_as(after[nearest.id], record)
            with pytest.raises(A2MError) as refused:
                await fed.call("remember", records=[{"content": "", "embedding": [1.0, 2.0]}])
            assert refused.value.code == Code.EMBEDDING_MISMATCH
            counted = await everything(fed)
            await fed.call("promote", ids=list(after), tier="semantic")
            await fed.settled()
            assert await everything(fed) == [moved(record, "semantic") for record in counted]

    with TemporaryDirectory() as folder:
        run(loop, partial(scenario, Path(folder)))


def lose_the_catalog(folder: Path) -> None:
    for file in folder.glob("router.db*"):
        file.unlink()


def unearned(record: Record) -> Record:
    return msgspec.structs.replace(record, salience=None, access_count=None, accessed_at=None)


def points_as(one: Record, other: Record) -> bool:
    """Return whether two vectors have the same direction, to the precision of 32-bit floats."""
    if one.embedding is None or other.embedding is None:
        return False
    return similarity(one.embedding, other.embedding, "cosine") > 1 - 1e-6


async def interrupted(folder: Path, records: Sequence[dict[str, Any]], *, after: bool) -> Path:
    """Return the files of a router that died after its write to one tier, during its write to the other."""
    (folder / "before").mkdir()
    steer = Steered()
    servers = {"working": Foreign(), "semantic": Foreign()}
    async with (
        trial(CALM, servers=servers, weather=steer, folder=folder / "before") as fed,
        anyio.create_task_group() as tasks,
    ):
        hold = steer.hold("semantic", "remember", after=after)
        write = Task(tasks, partial(fed.call, "remember", records=records))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        files = photograph(folder / "before", folder / "after")
        hold.release()
        await write.settled()
    return files


@one_loop
@pytest.mark.parametrize("after", [False, True])
async def test_vectors_whose_write_was_given_up_fix_no_width(tmp_path: Path, after: bool) -> None:
    batch = [{"content": tier, "tier": tier, "embedding": [1.0, 0.5]} for tier in ("working", "semantic")]
    folder = await interrupted(tmp_path, batch, after=after)
    async with trial(CALM, servers={"working": Foreign(), "semantic": Foreign()}, folder=folder) as fed:
        assert await fed.timeline() == []
        await fed.call("remember", records=[{"content": "other", "embedding": [1.0, 0.0, 0.0]}])
        found = (await fed.call("recall", embedding=[1.0, 0.0, 0.0]))["records"]
        assert [record["content"] for record in found] == ["other"]
        await fed.settled()
        assert list(fed.copies().values()) == [["working"]]


# --- what each selector finds

VALUES: Final[Sequence[Any]] = (
    1,
    1.0,
    True,
    0,
    False,
    "1",
    None,
    [1],
    [],
    {"a": 1.0},
    10**30,
    0.1,
    "\0",
    2**53 + 1,
    -1e300,
)
MOMENTS: Final = (render(START - 5), render(START - 9))
NAMES: Final[Mapping[str, Sequence[Any]]] = {
    "content": ("alpha", "beta", "alpha beta", ""),
    "role": ("user", "tool"),
    "group": ("g", "h"),
    "owner": ("a", "b"),
    "session": ("s", "t"),
    "uri": ("u:1", "u:2"),
    "media_type": ("text/plain",),
    "salience": (0.5, 2.0),
    "created_at": MOMENTS,
    "tier": TIERS,
}
# Fields that the drafts do not have, or that are different in each of them.
TOLD: Final[Mapping[str, Sequence[Any]]] = {
    "id": ("r0", "r1", "r2", "r3"),
    "key": ("k", "k/r1", "k/r2"),
    "revision": (0, 1),
    "access_count": (0, 1),
    "accessed_at": MOMENTS,
    "embedding": (),
    "metadata": ({}, {"m": 1}),
    "n": ("x",),
    "__proto__": (1,),
    "a2m-router": (1, {}),
}
plain_records = st.lists(
    st.fixed_dictionaries(
        {
            "content": st.sampled_from(["beta", *NAMES["content"]]),
            "tier": st.sampled_from(["working", *TIERS]),
            "keyed": st.booleans(),
        },
        optional={
            **{name: st.sampled_from(NAMES[name]) for name in NAMES if name not in ("content", "tier")},
            "metadata": st.dictionaries(
                st.sampled_from(["m", "m", "n", "content", "__proto__", "a2m-router"]),
                st.sampled_from(VALUES),
                max_size=3,
            ),
            "embedding": st.sampled_from([[1.0, 0.0], [0.0, 1.0], [0.6, -0.8]]),
        },
    ),
    min_size=4,
    max_size=10,
)


def condition(name: str, values: Sequence[Any]) -> st.SearchStrategy[tuple[str, Any]]:
    """Return a strategy for conditions on a field: one value or several, which may occur in records, or null."""
    value = st.sampled_from((*values, None))
    return st.tuples(st.just(name), value | st.lists(value, min_size=1, max_size=4) | st.lists(value, max_size=4))


# The fields of `known` are in the catalog. The other fields are in the records alone.
known = st.one_of(*(condition(name, NAMES[name]) for name in ("owner", "session", "role", "group", "tier")))
conditions = known | st.one_of(*(condition(name, values) for name, values in {**NAMES, **TOLD, "m": VALUES}.items()))
selectors: Final[Mapping[str, st.SearchStrategy[Any]]] = {
    "where": st.lists(conditions, min_size=1, max_size=2).map(dict),
    "owner": st.sampled_from(["a", "b"]),
    "tier": st.sampled_from(TIERS),
    "key_prefix": st.sampled_from(["k", "k", "k/r1"]),
}
# Questions with one selector match more records than questions with several.
questions = st.one_of(
    st.fixed_dictionaries({"where": known.map(lambda each: dict([each]))}),
    *(st.fixed_dictionaries({name: selector}) for name, selector in selectors.items()),
    st.fixed_dictionaries({}, optional=dict(selectors)),
)


class Kept(msgspec.Struct):
    """A record in the state that the test expects."""

    fields: dict[str, Any]
    metadata: dict[str, Any]

    def meets(self, question: Mapping[str, Any]) -> bool:
        owner, key = self.fields.get("owner"), self.fields.get("key")
        prefix = question.get("key_prefix")
        return (
            question.get("owner") in (None, owner if owner is not None else question.get("owner"))
            or self.fields["tier"] == "procedural"
        ) and (
            question.get("tier") in (None, self.fields["tier"])
            and (prefix is None or (key is not None and (key == prefix or key.startswith(f"{prefix}/"))))
            and all(self._has(name, wanted) for name, wanted in question.get("where", {}).items())
        )

    def _has(self, name: str, wanted: Any) -> bool:
        value = self.fields.get(name) if name in FIELDS else self.metadata.get(name)
        return any(same(value, each) for each in (wanted if isinstance(wanted, list) else [wanted]))


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal as JSON (§5.2)."""
    match one, other:
        case list(), list():
            return len(one) == len(other) and all(map(same, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


@examples(6)
@given(
    records=plain_records,
    asked=st.lists(questions, min_size=1, max_size=6),
    limit=st.integers(1, 6),
    # FEW: up to how many candidates the router asks for by id. A server with a limit of recalls needs that.
    few_and_mix=st.one_of(st.tuples(st.just(0), listing_all), st.tuples(st.just(1000), mixes())),
    loop=loops,
)
def test_what_is_found_is_what_a_plain_model_says(
    records: list[dict[str, Any]],
    asked: list[dict[str, Any]],
    limit: int,
    few_and_mix: tuple[int, Mix],
    loop: str,
) -> None:
    few, mix = few_and_mix

    async def scenario() -> None:
        async with trial(CALM, servers=mix) as fed:
            kept: dict[str, Kept] = {}
            for number, drawn in enumerate(records):
                fields = {"id": f"r{number}", **drawn}
                if fields.pop("keyed"):
                    fields |= {"key": f"k/r{number}"}
                await fed.call("remember", records=[fields])
                fields = {"salience": 1.0, "access_count": 0, **fields}
                fields |= {"revision": 0} if "key" in fields else {}
                kept[fields["id"]] = Kept(fields, fields.get("metadata", {}))
            for record in await fed.timeline():
                kept[record["id"]].fields["created_at"] = record["created_at"]
            for question in asked:
                meant = {id for id, each in kept.items() if each.meets(question)}
                await finds(fed, kept, question, meant, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(a2m_router.reading.lifted, "FEW", few)
        run(loop, scenario)


@one_loop
@pytest.mark.parametrize(
    "server", [Foreign(limits={"max_recall_limit": 2}), Foreign(("embeddings",), True, {"max_recall_limit": 2})]
)
async def test_a_server_that_tells_two_at_once_tells_as_many_as_are_wanted(server: Foreign) -> None:
    async with trial(CALM, servers={"semantic": server}) as fed:
        drafts = [
            {"content": f"beta {n}", "embedding": [1.0, n], "role": "tool", "metadata": {"n": n}} for n in range(7)
        ]
        ids = (await fed.call("remember", records=[{**draft, "tier": "semantic"} for draft in drafts]))["ids"]
        for question in ({"query": "beta"}, {"embedding": [1.0, 0.0]}, {"query": "beta", "where": {"role": "tool"}}):
            found = (await fed.call("recall", **question, limit=100))["records"]
            assert sorted(ids_of(found)) == sorted(ids)
            assert len((await fed.call("recall", **question, limit=5))["records"]) == 5
        # Only the record itself shows whether it matches, and the match is not among the first two records.
        assert ids_of((await fed.call("recall", query="beta", where={"n": [3, 10**30]}, limit=1))["records"]) == [
            ids[3]
        ]


async def finds(fed: Trial, kept: Mapping[str, Kept], question: dict[str, Any], meant: set[str], limit: int) -> None:
    """Assert that each way to ask a question finds the records that match it."""

    async def recalled(**more: Any) -> list[dict[str, Any]]:
        records: list[dict[str, Any]] = (await fed.call("recall", **{"limit": 100, **question, **more}))["records"]
        scores = [record["score"] for record in records]
        assert scores == sorted(scores, reverse=True)
        assert all(0 <= score <= 1 for score in scores)
        for record in records:
            counted = kept[record["id"]].fields
            counted["access_count"] += 1
            counted["accessed_at"] = record["accessed_at"]
        return records

    def still_meant() -> set[str]:
        """Return the ids that match now. Each recall changes the access fields, on which there may be conditions."""
        return {id for id in kept if kept[id].meets(question)}

    def in_order(ids: set[str]) -> list[str]:
        return sorted(ids, key=lambda each: (kept[each].fields["created_at"], int(each[1:])))

    assert ids_of(await fed.timeline(**question)) == in_order(meant)
    assert ids_of(await fed.timeline(**question, limit=limit)) == in_order(meant)[-limit:]
    # by recency
    assert ids_of(await recalled()) == in_order(meant)[::-1]
    meant = still_meant()
    assert ids_of(await recalled(limit=limit)) == in_order(meant)[: -limit - 1 : -1]
    # by words
    meant = {id for id in still_meant() if "beta" in kept[id].fields["content"]}
    by_words = await recalled(query="beta")
    assert set(ids_of(by_words)) == meant
    meant = {id for id in still_meant() if "beta" in kept[id].fields["content"]}
    assert len(await recalled(query="beta", limit=limit)) == min(limit, len(meant))
    # by vector, and by both
    vectors = {id: each.fields["embedding"] for id, each in kept.items() if "embedding" in each.fields}
    if not vectors:
        return
    meant = still_meant() & vectors.keys()
    by_vector = ids_of(await recalled(embedding=[1.0, 0.1]))
    assert set(by_vector) == meant
    if by_vector:
        best = max(similarity([1.0, 0.1], vectors[id], "cosine") for id in meant)
        assert similarity([1.0, 0.1], vectors[by_vector[0]], "cosine") == best
    meant = {id for id in still_meant() if id in vectors or "beta" in kept[id].fields["content"]}
    both = await recalled(query="beta", embedding=[1.0, 0.1])
    assert set(ids_of(both)) == meant
    if both and still_meant() >= meant:
        least = both[len(both) // 2]["score"]
        enough = await recalled(query="beta", embedding=[1.0, 0.1], min_score=least)
        assert all(record["score"] >= least for record in enough)
        assert len(enough) >= len(both) // 2 + 1


def ids_of(records: Sequence[Mapping[str, Any]]) -> list[str]:
    return [record["id"] for record in records]
