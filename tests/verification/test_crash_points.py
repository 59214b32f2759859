"""No crash, at any moment, loses, doubles or alters an acknowledged change.

`python -m tests.verification.crashing` tries all crash points. These tests try a part of them, the same part each time.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from a2m_router.protocol.wire.records import Draft
from tests.verification.crashing.points import (
    KINDS,
    Fact,
    Ledger,
    Tally,
    Way,
    crash_points,
    deaths,
    distilled,
    draft,
    forgotten,
    watched,
    written,
)

# of so many scenes, and of so many deaths of tiers, the tests try one
EVERY = int(os.environ.get("A2M_CRASH_EVERY", "20"))

# the least number of moments of a kind on either way; fewer mean that the moments are not recorded as before
LEAST = {"write to one tier": 12, "forget": 14, "forget at a lesser server": 14, "key replaced": 14}


@pytest.fixture(scope="module")
def tally(request: pytest.FixtureRequest) -> Iterator[Tally]:
    tally = Tally()
    yield tally
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\ncrash points: {tally}")


@pytest.mark.parametrize("sync_last", [False, True], ids=["sync first", "sync last"])
@pytest.mark.parametrize("name", KINDS)
def test_the_router_dies_or_the_power_goes(tmp_path: Path, tally: Tally, name: str, sync_last: bool) -> None:
    before = tally.points
    crash_points(KINDS[name], Way(sync_last), tmp_path, tally, torn=1, every=EVERY, first=len(name))
    assert tally.points - before >= LEAST.get(name, 20)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.victim is not None])
def test_the_router_dies_while_a_record_is_being_forgotten(tmp_path: Path, tally: Tally, name: str) -> None:
    at = 1 + len(name) % 5
    crash_points(KINDS[name], Way(at % 2 == 0, at), tmp_path, tally, every=2 * EVERY, first=len(name))


@pytest.mark.parametrize("name", KINDS)
def test_a_tier_dies_while_the_router_lives(tmp_path: Path, tally: Tally, name: str) -> None:
    # always try one of the first deaths: some kinds have no others
    deaths(KINDS[name], Way(len(name) % 2 == 0), tmp_path, tally, every=EVERY, first=len(name) % 4)


@pytest.mark.parametrize("name", KINDS)
def test_a_reader_sees_all_that_is_certain_all_the_while(tmp_path: Path, name: str) -> None:
    watched(KINDS[name], Way(len(name) % 2 == 0, 3), tmp_path)


def test_a_power_cut_leaves_no_part_of_a_batch_for_several_tiers(tmp_path: Path) -> None:
    kind = KINDS["write to several tiers"]
    crash_points(kind, Way(sync_last=True), tmp_path, Tally(), every=4, only="power cut at the router")


def test_copies_stay_until_the_target_of_a_move_is_seen_to_hold_the_record(tmp_path: Path) -> None:
    crash_points(KINDS["spill"], Way(sync_last=False), tmp_path, Tally(), only="has lost what it acknowledged")


# --- the ledger


def world(*drafts: Draft) -> frozenset[Fact]:
    return frozenset(map(Fact, drafts))


ONE = draft("one", key="k")
TWO = draft(None, "two", key="k")
OTHER = draft("other")


def test_what_is_under_way_has_happened_or_has_not() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.begin(written([ONE])))
    ledger.begin(written([OTHER]))
    assert ledger.worlds() == {world(ONE), world(ONE, OTHER)}


def test_acknowledged_calls_have_an_order_that_their_callers_could_see() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.begin(written([ONE])))
    forget, write = ledger.begin(forgotten(["one"])), ledger.begin(written([OTHER]))
    ledger.acknowledge(forget)
    assert ledger.worlds() == {world(), world(OTHER)}
    ledger.acknowledge(write)
    assert ledger.worlds() == {world(OTHER)}


def test_what_was_refused_never_happens() -> None:
    ledger = Ledger()
    ledger.refuse(ledger.begin(written([ONE])))
    assert ledger.worlds() == {world()}


def test_a_key_changes_its_record_and_a_forgotten_one_makes_a_new_record() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.begin(written([ONE])))
    ledger.acknowledge(ledger.begin(written([TWO])))
    [[fact]] = ledger.worlds()
    assert (fact.id, fact.draft.content, fact.draft.revision, fact.draft.created_at) == (
        "one",
        "two",
        1,
        ONE.created_at,
    )


def test_a_reader_may_have_seen_what_was_there_while_he_looked() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.begin(written([ONE])))
    since = ledger.tick()
    ledger.acknowledge(ledger.begin(forgotten(["one"])))
    assert ledger.worlds(since) == {world(ONE), world()}
    assert ledger.worlds() == {world()}


def test_a_group_gives_way_to_its_summary_whole_or_stays() -> None:
    ledger = Ledger()
    ledger.acknowledge(ledger.begin(written([ONE, OTHER])))
    ledger.acknowledge(ledger.begin(distilled(["one", "other"])))
    summary = Draft(content=f"gist of {ONE.content}, {OTHER.content}", role="memory")
    assert ledger.worlds() == {world(ONE, OTHER), world(summary)}
