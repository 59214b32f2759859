"""The explorer finds no broken rule in the design as built, and finds each step that is broken on purpose."""

import pytest

from tests.verification.explorer.accounts import A, B
from tests.verification.explorer.scenarios import SLICE
from tests.verification.explorer.search import explore
from tests.verification.explorer.states import Scenario
from tests.verification.explorer.steps import (
    CATCH_UP,
    CLEAR,
    FORGET,
    GRACE,
    MOVE,
    REORDERED,
    REPLACE,
    SWEEP,
    SYNC,
    SYNC_NOTES,
    WRITE,
    Design,
    placed,
    without,
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SLICE, ids=lambda scenario: scenario.name)
def test_no_state_of_a_small_federation_breaks_a_rule(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.wrong is None, str(found.wrong)
    assert found.quiescent > 0


@pytest.mark.parametrize("design", REORDERED)
def test_overlapping_steps_in_another_order_break_no_rule(design: Design) -> None:
    """An order of a move in which overlapping steps are swapped breaks no rule either."""
    # with a crash, because the order decides what is durable
    for scenario in (
        Scenario(name="a crash of a move", crashes=1),
        Scenario(name="a read, a crash", reads=1, crashes=1),
    ):
        found = explore(scenario, design)
        assert found.wrong is None, str(found.wrong)


# the broken step, the smallest scenario beside a move that shows it, and the expected finding
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
    "the reconciler does not read the record at its home": (
        Design(sweep=without(SWEEP, "read it at home")),
        Scenario(name="a record that its new home loses", losses=1),
        "a is not in its home",
    ),
    "the reconciler does not wait for readers": (
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
    "a write is answered before it is durable": (
        Design(write=without(WRITE, SYNC)),
        Scenario(name="a write and a crash", moves=(), late=True, crashes=1),
        "c was acknowledged, and is not known any more",
    ),
    "a replacement is answered before it is durable": (
        Design(replace=without(REPLACE, SYNC)),
        Scenario(name="a replacement and a crash", moves=(), replaces=1, crashes=1),
        "a was replaced, and is not any more",
    ),
    "the catalog lets go before the tier is told": (
        Design(catch_up=placed(CATCH_UP, "end the redo", "tell the tier")),
        Scenario(name="a replacement", moves=(), replaces=1),
        "a was replaced, and the old one is shown",
    ),
    "the catalog lets go before what replaces is read back": (
        Design(catch_up=placed(CATCH_UP, "end the redo", "read it back")),
        Scenario(name="a tier that does not keep it", moves=(), replaces=1, unkept=1),
        "a was replaced, and the old one is shown",
    ),
    "the catalog lets go while somebody reads": (
        Design(catch_up=without(CATCH_UP, GRACE)),
        Scenario(name="a replacement and a read", moves=(), replaces=1, reads=1),
        "an old a is in the answer of a read that began after it was replaced",
    ),
    "the catalog lets go while somebody reads a tier that has to forget first": (
        Design(catch_up=without(CATCH_UP, GRACE)),
        Scenario(name="a replacement at a lesser tier, a read", moves=(), replaces=1, reads=1, lesser=True),
        "a was acknowledged, and a read that began after that misses it",
    ),
    "a lesser tier is told before it has forgotten": (
        Design(
            catch_up=without(
                CATCH_UP,
                *("forget what is replaced", "see that it is gone", "read it back", "see whether it is kept"),
            )
        ),
        Scenario(name="a replacement at a lesser tier", moves=(), replaces=1, lesser=True),
        "a was replaced, and the old one is shown",
    ),
    "readers are not served what a tier is behind with": (
        Design(serves_redo=False),
        Scenario(name="a replacement", moves=(), replaces=1),
        "a was replaced, and the old one is shown",
    ),
    "a tier catches up and nobody has a claim": (
        Design(catches_up_claimed=False),
        Scenario(name="two replacements and a forget", moves=(), replaces=2, forgets=A),
        "a was replaced, and the old one is shown",
    ),
    "a tier is had to catch up while it may still do what it was asked before": (
        Design(keeps_claims=False),
        Scenario(name="a replacement, a forget, a call that lands late", moves=(), replaces=1, forgets=A, timeouts=1),
        "a is in source as well",
    ),
    "a tier is had to catch up while an earlier router's calls may land there": (
        Design(holds_back_redo=False),
        Scenario(name="two replacements, a crash", moves=(), replaces=2, crashes=1, outlives=True),
        "a was replaced, and the old one is shown",
    ),
    "a move takes a record whose tier is behind, as the tier has it": (
        Design(leaves_what_is_behind=False, compares=False),
        Scenario(name="a replacement, an outage", replaces=1, outages=1),
        "a was replaced, and the old one is shown",
    ),
    "a scan takes for lost what its tier is behind with": (
        Design(spares_what_is_behind=False, spares_what_was_behind=False),
        Scenario(name="a replacement at a lesser tier, a crash", moves=(), replaces=1, crashes=1, lesser=True),
        "a was acknowledged, and is not known any more",
    ),
    "a scan takes for lost what its tier caught up with meanwhile": (
        Design(spares_what_was_behind=False),
        Scenario(name="a replacement at a lesser tier, a crash", moves=(), replaces=1, crashes=1, lesser=True),
        "a was acknowledged, and is not known any more",
    ),
    "a new record becomes true after a crash without the replacement of its batch": (
        Design(gives_up=False),
        Scenario(name="a batch, a crash", moves=(), replaces=1, batch=True, crashes=1),
        "a part of a batch has become true",
    ),
    "a tier hears of a part of a batch whose reservation a power cut can take": (
        Design(batch=(*CLEAR, "reserve", "write the tier", "commit the batch", SYNC, "answer", "let go")),
        Scenario(name="a batch, a crash", moves=(), replaces=1, batch=True, crashes=1),
        "a part of a batch has become true",
    ),
    "a group is not claimed": (
        Design(claims_groups=False),
        Scenario(name="a late member", late=True),
        "c is left behind by its group",
    ),
    "a tier is not left alone while an earlier router's calls may land there": (
        Design(holds_tiers=False),
        Scenario(name="a server goes on after a crash", crashes=1, outlives=True),
        "a is in target as well",
    ),
    "only a tier of which something is noted is left alone after a crash": (
        Design(holds_unnoted=False),
        Scenario(name="a server goes on after a crash", moves=(), late=True, crashes=1, outlives=True),
        "c is in source as well",
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_step_is_found(broken: str) -> None:
    design, scenario, wrong = BROKEN[broken]
    found = explore(scenario, design).wrong
    assert found is not None
    assert wrong in found.wrong
    assert len(found.steps) <= 18
    assert explore(scenario).wrong is None


@pytest.mark.parametrize(
    ("design", "scenario"),
    [
        (Design(move=without(MOVE, SYNC)), Scenario(name="the move does not sync", crashes=1)),
        (Design(sweep=without(SWEEP, SYNC_NOTES)), Scenario(name="the sweep does not sync", crashes=1)),
        (Design(keeps_notes=False), Scenario(name="a crash costs the notes", crashes=1)),
        (
            Design(catch_up=without(CATCH_UP, SYNC)),
            Scenario(name="the catching up does not sync", moves=(), replaces=1, crashes=1),
        ),
        (
            Design(leaves_what_is_behind=False),
            Scenario(name="a move takes what its tier is behind with, compared", replaces=1, outages=1),
        ),
    ],
    ids=lambda given: given.name if isinstance(given, Scenario) else "",
)
def test_what_two_mechanisms_guard_is_safe_with_one(design: Design, scenario: Scenario) -> None:
    assert explore(scenario, design).wrong is None


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
