"""The rules of every state, and of every quiescent state. They do not depend on how a state came about."""

from tests.verification.explorer.accounts import (
    ALL,
    ID_NAMES,
    NONE,
    QUARANTINED,
    SOURCE,
    TARGET,
    TIER_NAMES,
    TIERS,
    A,
    C,
    content_in,
    members,
)
from tests.verification.explorer.states import IDLE, OVER, Scenario, State
from tests.verification.explorer.steps import Design


def wrong_in(state: State, scenario: Scenario, design: Design) -> str | None:
    """Return the rule that a state breaks for a read that begins now and is answered at once, or None."""
    book = state.book
    if book.home(A) is not None and book.content(A) < state.newest:
        return "a was replaced, and is not any more (rule 1)"
    replaced, written = book.content(A) > 1, book.home(C) is not None
    if scenario.batch and not state.begun & (1 << A | 1 << C) and replaced != written:
        return "a part of a batch has become true, and the rest has not"
    for id in members(state.told & ALL & ~state.begun & ~state.lost):
        name = ID_NAMES[id]
        home = book.home(id)
        if home is None:
            return f"{name} was acknowledged, and is not known any more (rule 1)"
        if state.up >> home & 1 and not (design.serves_redo and book.is_behind(id)):
            copy = content_in(state.held[home], id)
            if not copy:
                return f"{name} was acknowledged, and is not in its home, {TIER_NAMES[home]} (rule 1)"
            if id == A and copy < state.newest:
                return "a was replaced, and the old one is shown (rule 1)"
    for id in members(state.gone):
        if book.home(id) is not None or book.reserved(id) is not None:
            return f"{ID_NAMES[id]} was forgotten, and has come back (rule 11)"
    return None


def is_quiescent(state: State) -> bool:
    """Return whether nothing is under way and nothing is left to do."""
    book = state.book
    return (
        state.up == state.welcomed == 0b11
        and not state.starting
        and not state.open
        and state.reading is None
        and all(book.stray(tier, id) in (NONE, QUARANTINED) for tier in TIERS for id in members(ALL))
        and book.redo == 0
        and all(work.phase in (IDLE, OVER) for work in state.work)
        and state.forgetting in (IDLE, OVER)
        and all(book.reserved(id) is None for id in members(ALL))
    )


def wrong_at_rest(state: State) -> str | None:
    """Return the rule that a quiescent state breaks: one copy of each record, in its home, as the catalog has it."""
    book = state.book
    for id in members(ALL):
        home = book.home(id)
        for tier in TIERS:
            copy = content_in(state.held[tier], id)
            if tier == home and not copy:
                return f"nothing is left to be done, and {ID_NAMES[id]} is not in its home (rule 1)"
            if tier == home and copy != book.content(id):
                return f"nothing is left to be done, and {ID_NAMES[id]} is not what the catalog says (rule 3)"
            if tier != home and copy and book.stray(tier, id) != QUARANTINED:
                return f"nothing is left to be done, and {ID_NAMES[id]} is in {TIER_NAMES[tier]} as well (rule 2)"
    return None


def told(state: State) -> str:
    """Return a state as text for a story: the copies of each tier, the catalog, the commits that are not durable."""
    tiers = []
    for tier in (SOURCE, TARGET):
        copies = [
            f"{ID_NAMES[id]}{content_in(state.held[tier], id)}"
            for id in members(ALL)
            if content_in(state.held[tier], id)
        ]
        down = "" if state.up >> tier & 1 else " (down)"
        tiers.append(f"{TIER_NAMES[tier]}{down}: {' '.join(copies) or '-'}")
    later = len(state.journal) - 1
    undurable = f" [{later} commits not durable]" if later else ""
    return f"{tiers[0]} | {tiers[1]} | catalog: {state.book}{undurable}"
