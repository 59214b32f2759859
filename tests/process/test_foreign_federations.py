"""Federations of foreign servers.

Honest ones run as processes behind a router that must pass the conformance suite as with stores. Lying ones are
reported by their tier's name, and the router does not trust them.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from a2m_router.conformance.checking import same
from a2m_router.conformance.client import Stdio
from a2m_router.conformance.running import ALL_CHECKS, State
from a2m_router.protocol.wire.errors import A2MError, Code
from tests.servers.habits import HABITS
from tests.servers.lying import LIES
from tests.support.federated import Foreign
from tests.support.judging import judged, store
from tests.support.mounted import Watched, federation
from tests.support.paths import PROGRAMS, SERVERS

NODE: Final = shutil.which("node")

# --- honest servers

WAYS: Final = {
    "working": 'capacity = 12\nper_session = true\nspill_to = "semantic"\nrequired = true',
    "episodic": 'promote_to = "semantic"\npromote_after = 50',
    "semantic": "",
    "procedural": "",
}
THREE: Final = ("working", "semantic", "procedural")
HEAD: Final = """state = "router.db"
[events]
retained = 128"""  # a check that writes more events than are retained is soon done


# checks for servers that lack something, or of another binding; four of them find at run time that they do not apply
OF_OTHERS: Final = {
    *(check.name for check in ALL_CHECKS if check.read_only or check.unless or check.binding == "http"),
    "errors.methods_of_undeclared_capabilities_say_so",
    "events.subscribe_fails_where_push_is_not_offered",
    "records.fields_of_capabilities_that_are_not_declared_are_ignored",
    "scopes.nobody_reinforces_another_s_records",
}


def in_python(folder: Path, kind: str) -> list[str]:
    return [sys.executable, str(SERVERS / "core_only.py"), "--file", str(folder / f"{kind}.jsonl")]


def in_javascript(folder: Path, kind: str) -> list[str]:
    return [NODE or "node", str(SERVERS / "core_only.mjs"), "--file", str(folder / f"{kind}.jsonl")]


def command(servers: list[str]) -> str:
    return f"command = {json.dumps(servers)}"


@contextmanager
def over_http(folder: Path, kind: str) -> Iterator[str]:
    """Run a server in a separate process; yield its tier's line in the file."""
    with subprocess.Popen(
        [*in_python(folder, kind), "--http", "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            yield f'url = "{process.stderr.readline().strip()}"'
        finally:
            process.terminate()


def check_that_it_passes(folder: Path, servers: Mapping[str, str]) -> None:
    """Assert that the router in front of these tiers passes every check for a server that declares everything."""
    tiers = [f'[tiers.{kind}]\nkind = "{kind}"\n{server}\n{WAYS[kind]}' for kind, server in servers.items()]
    config = folder / "federation.toml"
    config.write_text("\n".join([HEAD, *tiers]))
    client = Stdio([str(PROGRAMS / "a2m-router"), "--config", str(config), "--log-level", "warning"], timeout=60)
    try:
        came = judged(client)
    finally:
        client.close()
    assert {each.check.name: each.why for each in came if each.state in (State.FAILED, State.SKIPPED)} == {}
    assert {each.check.name for each in came if each.state is State.NOT_APPLICABLE} == OF_OTHERS


def riders_in(path: Path) -> bool:
    """Return whether lifted records have been written to a server's file."""
    return b'"a2m-router"' in path.read_bytes()


@pytest.mark.slow
def test_four_core_only_servers_make_a_whole_federation(tmp_path: Path) -> None:
    check_that_it_passes(tmp_path, {kind: command(in_python(tmp_path, kind)) for kind in WAYS})
    assert all(riders_in(tmp_path / f"{kind}.jsonl") for kind in WAYS)


def with_habit(folder: Path, kind: str, habit: str) -> list[str]:
    return [sys.executable, str(SERVERS / "habits.py"), habit, "--file", str(folder / f"{kind}.jsonl")]


# each habit is also in a mixture below
FOUR_OF_EACH: Final = list(HABITS) if float(os.environ.get("A2M_EXAMPLES", "1")) > 1 else []


@pytest.mark.slow
@pytest.mark.parametrize("habit", FOUR_OF_EACH)
def test_four_servers_with_habits_make_a_whole_federation(habit: str, tmp_path: Path) -> None:
    check_that_it_passes(tmp_path, {kind: command(with_habit(tmp_path, kind, habit)) for kind in WAYS})
    assert all(riders_in(tmp_path / f"{kind}.jsonl") for kind in WAYS)


MIXTURES: Final = [
    ("FillsInARole", "InventsGroups", "AnswersFloats", "KeepsOurMetadataAlone"),
    ("AddsMetadata", "AnswersNulls", "FlattensMetadata", "AnswersNanoseconds"),
    ("AddsFields", "SortsMetadata", "AnswersOffsets", "AnswersWholeSeconds"),
]


@pytest.mark.slow
@pytest.mark.parametrize("mixture", MIXTURES, ids="-".join)
def test_such_servers_serve_tiers_together(mixture: tuple[str, ...], tmp_path: Path) -> None:
    habits = zip(WAYS, mixture, strict=True)
    check_that_it_passes(tmp_path, {kind: command(with_habit(tmp_path, kind, habit)) for kind, habit in habits})


def test_every_habit_is_in_a_mixture() -> None:
    assert {habit for mixture in MIXTURES for habit in mixture} == HABITS.keys()


@pytest.mark.slow
def test_stores_and_core_only_servers_serve_tiers_together(tmp_path: Path) -> None:
    """One of the core-only servers is reached over HTTP, the other by its command."""
    ours = {kind: command(store(tmp_path, kind)) for kind in ("semantic", "procedural")}
    with over_http(tmp_path, "working") as url:
        theirs = {"working": url, "episodic": command(in_python(tmp_path, "episodic"))}
        check_that_it_passes(tmp_path, {kind: {**ours, **theirs}[kind] for kind in WAYS})
    assert all(riders_in(tmp_path / f"{kind}.jsonl") for kind in theirs)


@pytest.mark.slow
@pytest.mark.skipif(NODE is None, reason="there is no node")
def test_a_server_in_javascript_serves_a_tier(tmp_path: Path) -> None:
    stores = {kind: command(store(tmp_path, kind)) for kind in THREE}
    check_that_it_passes(tmp_path, {**stores, "working": command(in_javascript(tmp_path, "working"))})
    assert riders_in(tmp_path / "working.jsonl")


# --- lying servers


@pytest.fixture
def anyio_backend() -> str:
    """The trust in a tier does not depend on the event loop."""
    return "asyncio"


TIERS: Final = """
[tiers.working]
kind = "working"
command = ["-"]
[tiers.liar]
kind = "episodic"
command = ["-"]
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""

ALTERED: Final = "has altered the content of a record that it was given: 'l0': from character"

# what the router reports of each lie, in its log or in an answer
REPORTS: Final = {
    "HasNoTimeline": "does not serve memory/timeline as it says",
    "DeclinesTimeline": "does not serve memory/timeline as it says",
    "AnswersWithFewerIds": "answered a write with other ids than it was given",
    "ChoosesOtherIds": "answered a write with other ids than it was given",
    "ScoresAscending": "answered a recall with scores that do not descend",
    "LeavesOutAnId": "gave an answer that cannot be read: Object missing required field `id`",
    "RepeatsARecord": "answered a recall with the same record twice",
    "IgnoresWhere": "answered a read by id with other records",
    "IgnoresLimit": "answered a recall with more records than its limit",
    "AnswersRecallWithAString": "gave an answer that cannot be read: Expected `array`, got `str`",
    "ForgetsNothing": "says that it has forgotten records, and holds them still",
    "LosesWrites": "does not hold a record that it was given: 'l1'",
    "TruncatesContent": f"{ALTERED} 21 on it was given '0, as told. ', and returned nothing",
    "RewritesContent": f"{ALTERED} 13 on it was given ' number 0, as told. ', and returned 'number 0, as told.'",
    "TrimsContent": f"{ALTERED} 32 on it was given ' ', and returned nothing",
    "ComposesContent": "has altered the content of a record that it was given: 'l1': from character 40 on it was given "
    "'e\\u0301. ', and returned '\\xe9. '",
    "DropsMetadata": "returns a record without the metadata member 'a2m-router' as it was given it, which holds all "
    "that a tier's server need not keep: 'l0'; a server must keep metadata (§3.1)",
    "SpeaksAnotherVersion": "protocol: expected a2m/0.1, the server speaks 'a2m/0.2'",
    "DeclaresNoCore": "'core' is required of every server, and missing",
    "IsReadOnlySometimes": "its server takes no writes",
}

Records = list[dict[str, Any]]

# records in tiers of ours
KEPT: Final[Records] = [
    {"id": "k0", "content": "The  harbour wall was mended in the spring. ", "metadata": {"n": 1}, "tier": "working"},
    {"id": "k1", "content": "The  harbour light burns until the morning. ", "metadata": {"n": 2}, "tier": "semantic"},
    {"id": "k2", "content": "A  rope for the harbour is made of hemp. ", "metadata": {"n": 1}, "tier": "semantic"},
]

WORDS: Final = ["harbour", "wall", "light", "storm"]
ACCENT: Final = " cafe\u0301"  # two characters that compose to one

# records for the tier that lies; they share more and more words with the question below
TOLD: Final[Records] = [
    {
        "id": f"l{number}",
        "content": f"The {' '.join(words)}  number {number}, as told{ACCENT * (number == 1)}. ",
        "metadata": {"n": number},
        "tier": "liar",
    }
    for number, words in enumerate([WORDS[:count] for count in range(1, 5)])
]
GIVEN: Final = {record["id"]: record for record in [*KEPT, *TOLD]}
QUESTION: Final = "harbour wall light storm"


class Witness:
    """A client that checks every answer of a federation, and records the reports on the tier that lies."""

    def __init__(self, fed: Watched, prefix: str = "") -> None:
        self._fed = fed
        self._prefix = prefix  # the prefix of the lying tier's ids
        self.said: list[str] = []
        self.forgotten: set[str] = set()

    async def ask(self, method: str, **params: Any) -> Any:
        """Return the result; None for an error, which must name the tier and not be a failure of the router."""
        refusal: A2MError | None = None
        try:
            answer = await self._fed.call(method, **params)
        except A2MError as error:
            refusal = error
        if refusal is not None:
            assert refusal.code == Code.INTERNAL_ERROR
            assert "the server failed in" not in refusal.message
            assert "liar" in refusal.message
            self.said.append(refusal.message)
            return None
        for missing in answer.get("degraded", ()):
            assert missing["tier"] == "liar"
            self.said.append(missing["reason"])
        return answer

    async def read(self, method: str, **params: Any) -> Records:
        """Return the records of an answer; assert that each may be in it."""
        answer = await self.ask(method, **params)
        if answer is None:
            return []
        records: Records = answer["records"]
        ids = [record["id"] for record in records]
        assert len(set(ids)) == len(ids) <= params.get("limit", len(ids))
        assert self.forgotten.isdisjoint(ids)
        scores = [record.get("score", 0) for record in records]
        assert scores == sorted(scores, reverse=True)
        for record in records:
            given = GIVEN[record["id"].removeprefix(self._prefix)]
            if record["tier"] != "liar":
                assert (record["content"], record["metadata"]) == (given["content"], given["metadata"])
            for name, wanted in params.get("where", {}).items():
                assert same(record.get(name, record.get("metadata", {}).get(name)), wanted)
        return records


async def live_with(fed: Watched) -> Witness:
    """Make every kind of call with records in the tier that lies, and with records that move from or to it."""
    witness = Witness(fed)
    assert (await witness.ask("remember", records=KEPT))["ids"] == ["k0", "k1", "k2"]
    for record in TOLD:
        await witness.ask("remember", records=[record])
    for _ in range(2):
        await witness.read("recall", query=QUESTION)
        await witness.read("recall", query=QUESTION, tier="liar")
        await witness.read("recall", query=QUESTION, limit=1)
        await witness.read("recall", query=QUESTION, where={"n": 1})
        await witness.read("recall")
        await witness.read("timeline")
        await witness.read("timeline", limit=2)
        await witness.read("timeline", where={"n": 2})
        await witness.read("timeline", where={"content": KEPT[0]["content"]})
        await witness.ask("promote", ids=["l0"], tier="semantic")
        await witness.ask("promote", ids=["k0"], tier="liar")
    for id, selector in (("l2", {"ids": ["l2"]}), ("l3", {"where": {"n": 3}})):
        answer = await witness.ask("forget", **selector)
        if answer is not None and answer["forgotten"]:
            witness.forgotten.add(id)
    await fed.federation.reconciler.idle()
    await witness.read("recall", query=QUESTION)
    await witness.read("timeline")
    for tier in (await fed.call("describe"))["tiers"]:
        if tier["name"] == "liar" and "reason" in tier:
            witness.said.append(tier["reason"])
    return witness


@pytest.mark.anyio
@pytest.mark.parametrize("name", LIES)
async def test_a_tier_that_lies_is_reported_and_not_believed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with federation(TIERS, {"liar": Foreign(kind=LIES[name])}) as fed:
        witness = await live_with(fed)
        # nothing is lost elsewhere; a record moved to the tier that lies had been read back there unchanged
        there = {record["id"]: record for record in (await fed.call("timeline"))["records"]}
        for kept in KEPT:
            assert there[kept["id"]]["content"] == kept["content"]
            assert there[kept["id"]]["metadata"] == kept["metadata"]
    logged = [record for record in caplog.records if "liar" in record.getMessage()]
    said = [*witness.said, *(record.getMessage() for record in logged if record.levelno >= logging.WARNING)]
    assert any(REPORTS[name] in each for each in said), said
    assert [record for record in caplog.records if record.exc_info] == []


# lies that only affect writers, or that need no report: the router applies `where` itself
UNSEEN_IN_A_MOUNT: Final = {
    *("AnswersWithFewerIds", "ChoosesOtherIds", "ForgetsNothing", "LosesWrites", "TruncatesContent", "RewritesContent"),
    *("TrimsContent", "ComposesContent", "DropsMetadata", "IsReadOnlySometimes", "IgnoresWhere"),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", LIES)
async def test_a_mount_that_lies_is_reported_and_not_believed(name: str, caplog: pytest.LogCaptureFixture) -> None:
    class Filled(LIES[name]):  # type: ignore[misc, valid-type]  # any of the lies
        def __init__(self, path: Path | None = None, **options: Any) -> None:
            super().__init__(path, **options)
            born = "2020-01-01T00:00:00.000Z"
            self._make_true({"put": [{**record, "created_at": born, "tier": None} for record in TOLD]})

    tiers = TIERS.replace("[tiers.liar]", "[tiers.liar]\nmount = true")
    async with federation(tiers, {"liar": Foreign(kind=Filled)}) as fed:
        witness = Witness(fed, prefix="liar/")
        await witness.ask("remember", records=KEPT)
        for params in ({}, {"limit": 1}, {"where": {"n": 1}}, {"where": {"id": "liar/l2"}}):
            await witness.read("recall", query=QUESTION, **params)
            await witness.read("recall", **params)
            await witness.read("timeline", **params)
        assert (await witness.ask("forget", query="harbour wall"))["forgotten"] == 3
        assert {record["tier"] for record in await witness.read("timeline")} <= {"liar"}
    said = [*witness.said, *(record.getMessage() for record in caplog.records if "liar" in record.getMessage())]
    assert name in UNSEEN_IN_A_MOUNT or any(REPORTS[name] in each for each in said), said
    assert [record for record in caplog.records if record.exc_info] == []


def test_every_lie_has_its_report() -> None:
    assert REPORTS.keys() == LIES.keys()


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["HasNoTimeline", "DeclinesTimeline"])
async def test_the_start_does_not_wait_for_a_tier_that_lies(name: str) -> None:
    async with federation(TIERS, {"liar": Foreign(kind=LIES[name])}) as fed:
        problems = fed.federation.problems
    assert problems.keys() == {"liar"}
    assert problems["liar"].startswith(f"tiers.liar: {REPORTS[name]}")


@pytest.mark.anyio
async def test_what_a_tier_will_not_forget_is_not_taken_for_what_is_written_anew() -> None:
    async with federation(TIERS, {"liar": Foreign(kind=LIES["ForgetsNothing"])}) as fed:
        await fed.call("remember", records=[{"id": "a", "content": "old", "tier": "liar"}])
        assert await fed.call("forget", ids=["a"]) == {"forgotten": 1}
        await fed.federation.reconciler.idle()
        refusal = await fed.refused("remember", records=[{"id": "a", "content": "new", "tier": "liar"}])
        assert refusal.message == (
            "the tier 'liar' did not take the write: an older copy of a record could not be removed yet; nothing was "
            "written"
        )
        assert await fed.records() == await fed.records("recall") == []
        await fed.call("remember", records=[{"id": "a", "content": "new", "tier": "semantic"}])
        for method in ("timeline", "recall"):
            assert [(record["id"], record["content"]) for record in await fed.records(method)] == [("a", "new")]


@pytest.mark.anyio
async def test_of_an_honest_tier_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    async with federation(TIERS, {"liar": Foreign()}) as fed:
        witness = await live_with(fed)
        assert witness.forgotten == {"l2", "l3"}
        assert {record["id"]: record["tier"] for record in (await fed.call("timeline"))["records"]} == {
            "k0": "liar",
            "k1": "semantic",
            "k2": "semantic",
            "l0": "semantic",
            "l1": "liar",
        }
    assert witness.said == []
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
