"""Every interleaving of small federations, and their steps broken one by one: the explorer must find each."""

import pytest

from tests.explorer.accounts import B
from tests.explorer.machine import Scenario
from tests.explorer.scenarios import KNOWN, SLICE
from tests.explorer.search import explore
from tests.explorer.steps import (
    BUILT,
    FORGET,
    GRACE,
    MOVE,
    REPLACE,
    SWEEP,
    SYNC,
    SYNC_NOTES,
    WRITE,
    Design,
    placed,
    without,
)


@pytest.mark.parametrize("scenario", SLICE, ids=lambda scenario: scenario.name)
def test_no_state_of_a_small_federation_breaks_a_rule(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.wrong is None, str(found.wrong)
    assert found.quiescent > 0


# what is broken, the least that has to happen beside a move, and what is wrong then
BROKEN: dict[str, tuple[Design, Scenario, str]] = {
    "the flip comes before the copies": (
        Design(move=placed(MOVE, "flip", "write the target")),
        Scenario(name="a move"),
        "a was acknowledged, and is not in its home",
    ),
    "the flip comes before what was written is read back": (
        Design(move=placed(MOVE, "flip", "read back")),
        Scenario(name="a tier that does not keep it", unkept=1),
        "a was acknowledged, and is not in its home",
    ),
    "the old copies go before the flip": (
        Design(move=placed(MOVE, "forget the source", "flip")),
        Scenario(name="a move"),
        "a was acknowledged, and is not in its home",
    ),
    "the copies to come are not noted": (
        Design(move=without(MOVE, "note the copies to come")),
        Scenario(name="a call that lands late", timeouts=1),
        "a is in target as well",
    ),
    "the old copies are not noted": (
        Design(notes_at_source=False),
        Scenario(name="a move"),
        "a is in source as well",
    ),
    "a crash costs the notes": (
        Design(keeps_notes=False, counts=False),
        Scenario(name="a crash", crashes=1),
        "a is in target as well",
    ),
    "the sweeper does not read the record at its home": (
        Design(sweep=without(SWEEP, "read it at home")),
        Scenario(name="a record that its new home loses", losses=1),
        "a is not in its home",
    ),
    "the sweeper does not wait for readers": (
        Design(sweep=without(SWEEP, GRACE)),
        Scenario(name="a read", reads=1),
        "a read that began after that misses it",
    ),
    "a read does not know where a record was when it began": (
        Design(knows_former_homes=False),
        Scenario(name="a read", reads=1),
        "a read that began after that misses it",
    ),
    "a read does not ask where a record lives": (
        Design(knows_homes=False),
        Scenario(name="a read", reads=1),
        "an answer holds a twice",
    ),
    "the flip does not look whether its records have changed": (
        Design(checks_versions=False),
        Scenario(name="a forget", forgets=B),
        "b was forgotten, and has come back",
    ),
    "a claim is let go while a call may still land": (
        Design(keeps_claims=False),
        Scenario(name="a call that lands late", timeouts=1),
        "a is in target as well",
    ),
    "a forget notes no copies": (
        Design(notes_the_forgotten=False),
        Scenario(name="a forget", moves=(), forgets=B),
        "b is in source as well",
    ),
    "a forget is answered before it is durable": (
        Design(forget=without(FORGET, SYNC)),
        Scenario(name="a forget and a crash", moves=(), forgets=B, crashes=1),
        "b was forgotten, and has come back",
    ),
    "neither the flip nor the sweep makes the flip durable": (
        Design(move=without(MOVE, SYNC), sweep=without(SWEEP, SYNC_NOTES)),
        Scenario(name="a crash", crashes=1),
        "a was acknowledged, and is not in its home",
    ),
    "a write is answered before its reservation is durable": (
        Design(write=without(WRITE, SYNC)),
        Scenario(name="a write and a crash", moves=(), late=True, crashes=1),
        "c was acknowledged, and is not known any more",
    ),
    "a replacement is sent before it is noted durably": (
        Design(replace=without(REPLACE, SYNC)),
        Scenario(name="a replacement and a crash", moves=(), replaces=True, crashes=1),
        "a is not what the catalog says",
    ),
    "a group is not claimed": (
        Design(claims_groups=False),
        Scenario(name="a late member", late=True),
        "c is left behind by its group",
    ),
    "a tier takes part before its interrupted writes are looked into": (
        Design(accounts_for_reservations=False),
        Scenario(name="a late member, a crash, an outage", late=True, crashes=1, outages=1),
        "c was acknowledged, and a read that begins now misses it",
    ),
    "a tier is not left alone while an earlier router's calls may land there": (
        Design(holds_tiers=False),
        Scenario(name="a server goes on after a crash", crashes=1, outlives=True),
        "a is in target as well",
    ),
    "an interrupted replacement is passed over where somebody has a claim on its record": (
        Design(waits_for_claims=False),
        Scenario(name="a replacement, a crash, an outage", replaces=True, crashes=1, outages=1),
        "leads to rest from here",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_step_is_found(broken: str) -> None:
    design, scenario, wrong = BROKEN[broken]
    found = explore(scenario, design).wrong
    assert found is not None
    assert wrong in found.wrong
    assert len(found.steps) <= 18
    assert explore(scenario, BUILT).wrong is None


@pytest.mark.parametrize(
    "design",
    [
        Design(move=without(MOVE, SYNC)),
        Design(sweep=without(SWEEP, SYNC_NOTES)),
        Design(keeps_notes=False),
    ],
    ids=["the move does not sync", "the sweep does not sync", "a crash costs the notes"],
)
def test_what_two_mechanisms_guard_is_safe_with_one(design: Design) -> None:
    assert explore(Scenario(name="a crash", crashes=1), design).wrong is None


def test_a_counterexample_is_a_story_of_its_fewest_steps() -> None:
    found = explore(Scenario(name="a move"), Design(move=placed(MOVE, "flip", "write the target"))).wrong
    assert str(found).splitlines() == [
        "a move: a was acknowledged, and is not in its home, target (rule 1), after 4 steps:",
        "      source: a1 b1 | target: - | catalog: a1 in source, b1 in source",
        "   1. the move: begins with ab for target",
        "      source: a1 b1 | target: - | catalog: a1 in source, b1 in source, a pending in target, b pending in"
        " target [1 commits not durable]",
        "   2. the move: “read the source” (recall ab in source)",
        "      source: a1 b1 | target: - | catalog: a1 in source, b1 in source, a pending in target, b pending in"
        " target [1 commits not durable]",
        "   3. the move: hears of “read the source”",
        "      source: a1 b1 | target: - | catalog: a1 in source, b1 in source, a pending in target, b pending in"
        " target [1 commits not durable]",
        "   4. the move: what it noted is durable",
        "      source: a1 b1 | target: - | catalog: a1 in target, b1 in target, a superseded in source, b superseded in"
        " source [1 commits not durable]",
    ]


# --- what is known not to hold yet: to be mended, and to become one of the scenarios


def test_what_puts_a_replaced_record_back_may_land_when_nobody_waits_for_it() -> None:
    scenario = KNOWN[0]
    found = explore(scenario).wrong
    assert found is not None
    assert "a is in source as well" in found.wrong
    assert explore(scenario, Design(settles_write_back=True)).wrong is None


def test_a_write_whose_reservation_was_lost_may_land_when_nobody_thinks_of_it() -> None:
    found = explore(KNOWN[1]).wrong
    assert found is not None
    assert "c is in source as well" in found.wrong
