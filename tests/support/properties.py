"""The rules as properties of what clients see, apart from the tests that draw their examples.

Each property takes the servers behind the tiers: tests/federation/test_rules.py runs it with stores, and
tests/federation/test_mixes.py with foreign servers.
"""

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Raw

from a2m_router.protocol.wire.records import Record, vector_bytes
from a2m_router.protocol.wire.timestamps import render
from tests.support import histories as h
from tests.support.federated import ALL_NATIVE, FOUR_TIERS, START, Mix, Trial, at_once, settings_of, stored, trial
from tests.support.histories import TIERS, Run, histories, restless


async def raw_records(fed: Trial, method: str, **params: Any) -> list[Record]:
    answer = await fed.raw(method, msgspec.json.encode(params))
    return msgspec.json.decode(answer, type=_Records).records


class _Records(msgspec.Struct):
    records: list[Record]


async def within_capacity(run: Run) -> None:
    """Check the capacities after a pass that ran alone."""
    await run.fed.call("consolidate")
    buckets: dict[tuple[Any, ...], list[Record]] = {}
    for record in await run.everything():
        tier = run.fed.federation.settings.tier(record.tier or "")
        conversation = (record.owner, record.session) if tier.per_session else ()
        buckets.setdefault((tier.name, *conversation), []).append(record)
    for (tier_name, *_), records in buckets.items():
        capacity = run.fed.federation.settings.tier(tier_name).capacity
        one_group = records[0].group is not None and len({record.group for record in records}) == 1
        assert capacity is None or len(records) <= capacity or one_group, (tier_name, records)


new_writes = st.builds(h.Write, st.lists(h.new_drafts, min_size=1, max_size=3), h.owners)
moving = histories(st.one_of(new_writes, h.groups, h.moves, h.moves, h.full_reads), first=new_writes)


async def all_there(run: Run) -> None:
    written = {version.number for version in run.model.versions.values()}
    assert {run.model.version_of(record).number for record in await run.everything()} == written


key_writes = st.builds(h.Write, st.lists(h.key_drafts, min_size=1, max_size=2), h.owners)
replacing = histories(st.one_of(key_writes, h.edits, h.moves, h.promotes, h.full_reads, h.full_reads), first=key_writes)
texts = st.text(st.characters(codec="utf-8"), max_size=6)
names = texts.filter(bool)
json_texts = st.recursive(
    st.sampled_from(["null", "true", "1", "1.0", "-0", "1e400", "123456789012345678901234567890", "0.1e1"])
    | texts.map(json.dumps)
    | texts.map(partial(json.dumps, ensure_ascii=False)),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda parts: "[ " + " , ".join(parts) + "]")
        | st.lists(st.tuples(texts.map(json.dumps), inner), max_size=3).map(
            lambda pairs: "{" + " ,".join(f"{name} : {value}" for name, value in pairs) + " }"
        )
    ),
    max_leaves=6,
)
objects = st.lists(st.tuples(texts.map(json.dumps), json_texts), max_size=3).map(
    lambda pairs: "{" + ",".join(f"{name}:{value}" for name, value in pairs) + "}"
)
vectors = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=3, max_size=3)
whole_records = st.fixed_dictionaries(
    {"content": texts},
    optional={
        "role": texts,
        "metadata": objects.map(lambda text: Raw(text.encode())),
        "group": texts,
        "owner": texts,
        "session": texts,
        "key": names,
        "revision": st.integers(0, 2**40),
        "uri": texts,
        "media_type": texts,
        "embedding": vectors,
        "created_at": st.integers(0, START * 2).map(render),
        "salience": st.floats(0, 1e300),
    },
)
several_records = st.lists(whole_records, min_size=1, max_size=4)
paths = st.lists(st.sampled_from(TIERS), min_size=1, max_size=5)


async def moves_change_nothing(
    records: list[dict[str, Any]], path: Sequence[str], recalls: int, servers: Mix = ALL_NATIVE
) -> None:
    """Write records, recall them so often, promote them from tier to tier, and check that no move changes them."""
    async with trial(settings_of(policy="explicit"), servers=servers) as fed:
        written = msgspec.json.encode({"records": records})
        ids = msgspec.json.decode(await fed.raw("remember", written))["ids"]
        for _ in range(recalls):
            await raw_records(fed, "recall", where={"id": ids[:1]})
        before = {record.id: record for record in await raw_records(fed, "timeline", embeddings=True)}
        for given, id in zip(records, ids, strict=True):
            if "key" not in given:
                as_written(before[id], given)
        for tier in path:
            await fed.call("promote", ids=ids, tier=tier)
            after = {record.id: record for record in await raw_records(fed, "timeline", embeddings=True)}
            assert {id: moved(record, tier) for id, record in before.items()} == after
            assert {id: bits(record) for id, record in before.items()} == {id: bits(r) for id, r in after.items()}
        await fed.settled()
        assert {id: [bits(copy) for _, copy in copies] for id, copies in stored(fed).items()} == {
            id: [bits(record)] for id, record in before.items()
        }


def as_written(record: Record, given: dict[str, Any]) -> None:
    for name in ("content", "role", "group", "owner", "session", "uri", "media_type", "created_at", "salience"):
        if name in given:
            assert getattr(record, name) == given[name]
    assert bits(record) == (
        bytes(given["metadata"]) if "metadata" in given else None,
        vector_bytes(given["embedding"]) if "embedding" in given else None,
    )


def moved(record: Record, tier: str) -> Record:
    return msgspec.structs.replace(record, tier=tier)


def bits(record: Record) -> tuple[bytes | None, bytes | None]:
    return (
        bytes(record.metadata) if isinstance(record.metadata, Raw) else None,
        None if record.embedding is None else vector_bytes(record.embedding),
    )


late_writes = st.builds(h.Write, st.lists(st.builds(h.Draft, late=st.integers(0, 5), fields=st.just({})), min_size=1))
grouping = histories(st.one_of(h.groups, late_writes, h.moves, h.promotes, h.forgets, h.full_reads))
filling = histories(st.one_of(new_writes, h.groups, late_writes, h.promotes))
EARNING = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
capacity = 3
spill_to = "attic"
promote_to = "honours"
promote_after = 2
[tiers.attic]
kind = "episodic"
command = ["-"]
[tiers.honours]
kind = "semantic"
command = ["-"]
"""


class Earning(msgspec.Struct, frozen=True):
    """A weak record with so many group mates, written after the first `place` of `others`, which are stronger."""

    others: int
    place: int
    mates: int
    seed: int


earnings = st.builds(Earning, st.integers(3, 8), st.integers(0, 8), st.integers(0, 2), st.integers(0, 2**32))


async def promoted_before_spilled(earning: Earning, servers: Mix = ALL_NATIVE) -> None:
    """Check that a weak record that has earned its promotion is promoted before the others make it spill."""
    mates = range(earning.mates + 1)
    weak = [{"id": f"weak{n}", "content": f"weak {n}", "group": "g", "salience": 1e-9} for n in mates]
    strong = [{"id": f"strong{n}", "content": f"strong {n}"} for n in range(earning.others)]
    async with trial(settings_of(EARNING), servers=servers, weather=restless(earning.seed)) as fed:
        await fed.call("remember", records=strong[: earning.place] + weak + strong[earning.place :])
        for _ in range(2):
            await fed.call("recall", where={"id": ["weak0"]})
        report = await fed.call("consolidate")
        assert (report["promoted"], report["moved"]) == (len(weak), len(strong) - 3)
        where = {record["id"]: record["tier"] for record in await fed.timeline()}
        assert {where[record["id"]] for record in weak} == {"honours"}


births = st.lists(
    st.tuples(st.sampled_from(TIERS), st.none() | st.integers(START - 3, START + 3)), min_size=1, max_size=14
)


async def timelines_ascend(
    written: list[tuple[str, int | None]], limit: int, metadata: bool, seed: int, servers: Mix = ALL_NATIVE
) -> None:
    """Write records to tiers, some with their own `created_at`; check the order of the timeline, whole and limited."""
    async with trial(settings_of(policy="background"), servers=servers, weather=restless(seed)) as fed:
        numbers = {}
        for number, (tier, moment) in enumerate(written):
            fields = {} if moment is None else {"created_at": render(moment)}
            [id] = await fed.remember(f"{number}", tier=tier, metadata={"m": 1}, **fields)
            numbers[id] = number
        where = {"m": 1} if metadata else {"role": None}
        answers = [await fed.timeline(where=where), await fed.timeline(where=where, limit=limit)]
        ordered = sorted(answers[0], key=lambda record: (record["created_at"], numbers[record["id"]]))
        assert [record["id"] for record in answers[0]] == [record["id"] for record in ordered]
        assert [record["id"] for record in answers[1]] == [record["id"] for record in ordered[-limit:]]
        given = {f"{number}": render(moment) for number, (_, moment) in enumerate(written) if moment is not None}
        assert given.items() <= {record["content"]: record["created_at"] for record in ordered}.items()
        assert len(ordered) == len(written)


Doings = list[list[tuple[str, bool, bool]]]
doings = st.lists(
    st.lists(st.tuples(st.sampled_from(TIERS), st.booleans(), st.booleans()), min_size=1, max_size=5),
    min_size=2,
    max_size=4,
)


async def own_doings_are_seen_at_once(clients: Doings, seed: int, servers: Mix = ALL_NATIVE) -> None:
    """Run concurrent clients, each with its own owner; a write has a tier, may have a key, and may be forgotten."""

    async def client(fed: Trial, me: str, writes: list[tuple[str, bool, bool]]) -> None:
        mine: set[str] = set()
        for number, (tier, keyed, forgets) in enumerate(writes):
            fields = {"key": f"k{number}"} if keyed else {}
            [id] = await fed.remember(f"{number}", tier=tier, owner=me, session="s", **fields)
            mine.add(id)
            await sees(fed, me, mine)
            if keyed:
                assert (await fed.call("fetch", key=f"k{number}", owner=me))["record"]["id"] == id
            if forgets:
                assert await fed.call("forget", ids=[id], owner=me) == {"forgotten": 1}
                mine.remove(id)
                await sees(fed, me, mine)
                if keyed:
                    assert (await fed.call("fetch", key=f"k{number}", owner=me))["record"] is None

    async def sees(fed: Trial, me: str, mine: set[str]) -> None:
        timeline = await fed.timeline(where={"owner": me})
        recall = (await fed.call("recall", where={"owner": me}, limit=100))["records"]
        assert {record["id"] for record in timeline} == {record["id"] for record in recall} == mine

    async with trial(settings_of(FOUR_TIERS, policy="background"), servers=servers, weather=restless(seed)) as fed:
        await at_once(*(partial(client, fed, f"c{n}", writes) for n, writes in enumerate(clients)))
