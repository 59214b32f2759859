"""The steps of every change, as tables: what `router` does, in its order, one line for each call, wait or commit.

A line is a call to a tier (in CALLS), a wait, or a piece of work on the catalog; pieces of work that stand together are
done in one breath, since nothing is awaited between them. A table is a parameter: a test takes a line out, or puts it
elsewhere, and sees the explorer find what that breaks.

The order of a move is not written here: it is the table that the router runs moves by, line by line.
"""

from itertools import permutations, product
from typing import Final

import msgspec

from a2m_router.placement import steps as router
from a2m_router.placement.steps import Step

SYNC: Final = "make it durable"
SYNC_NOTES: Final = "make the notes durable"
GRACE: Final = "wait for readers"

# what `Reconciler._remove` does, whoever asks for it
_REMOVE: Final = (
    "look at what is noted now",
    "read it at home",
    "see what its home has lost",
    "read the copies that are left of it",
    "bring it home",
    SYNC_NOTES,
    "forget the copies",
    "see that they are gone",
    "remove the notes",
)

# what `Reconciler.clear` does before anything is written to a tier
CLEAR: Final = ("look what is in the way", GRACE, *_REMOVE, "see that the way is clear")

SWEEP: Final = (GRACE, "claim what is free", *_REMOVE, "let go")

# the router's steps, line by line
LINES: Final = {
    Step.CLEAR: CLEAR,
    Step.NOTE: ("note the copies to come",),
    Step.READ: ("read the source",),
    Step.SYNC: (SYNC,),
    Step.COMPARE: ("compare with the catalog",),
    Step.WRITE: ("write the target", "read back", "compare with what was given"),
    Step.COMMIT: ("flip",),
}


def orders(table: router.Table) -> tuple[tuple[str, ...], ...]:
    """Every order in which the steps of a table may happen, line by line: those of a row in any order."""
    return tuple(
        tuple(line for row in rows for step in row for line in LINES[step])
        for rows in product(*(permutations(row) for row in table))
    )


# every order of a move; the guard of a change ends it
MOVES: Final = tuple((*order, "give up the rest", SYNC, "let go") for order in orders(router.MOVE))
MOVE: Final = MOVES[0]

WRITE: Final = (*CLEAR, "reserve", "write the tier", "commit the write", SYNC, "answer", "let go")
WRITE_FAILED: Final = (SYNC, "let go")

# true as soon as it is durable; the reconciler of its tier has it catch up
REPLACE: Final = (*CLEAR, "commit the batch", SYNC, "answer", "let go")
# a batch that brings a new record as well: the tier is told of a part of it, so its reservation must outlive that
BATCH: Final = (
    *CLEAR,
    *("reserve", SYNC, "write the tier", "commit the batch", SYNC, "answer", "let go"),
)

CATCH_UP: Final = (
    "see what the tier has yet to catch up with",
    SYNC,
    # only where the tier does not replace by itself
    "forget what is replaced",
    "see that it is gone",
    "tell the tier",
    "read it back",
    "see whether it is kept",
    # only what it does not keep
    "forget what is not kept",
    "see that this is gone",
    "tell the tier again",
    "read it again",
    "see that it is kept",
    GRACE,
    "end the redo",
    "let go",
)

FORGET: Final = ("note that it is forgotten", SYNC, "answer")

RECALL: Final = "recall"
REMEMBER: Final = "remember"
REMOVAL: Final = "forget"

# the calls: of which method, and of which tier: the one that is changed, or the other
CALLS: Final = {
    "read it at home": (RECALL, False),
    "read the copies that are left of it": (RECALL, True),
    "forget the copies": (REMOVAL, True),
    "see that they are gone": (RECALL, True),
    "read the source": (RECALL, False),
    "write the target": (REMEMBER, True),
    "read back": (RECALL, True),
    "forget the source": (REMOVAL, False),
    "write the tier": (REMEMBER, True),
    "forget what is replaced": (REMOVAL, True),
    "see that it is gone": (RECALL, True),
    "tell the tier": (REMEMBER, True),
    "read it back": (RECALL, True),
    "forget what is not kept": (REMOVAL, True),
    "see that this is gone": (RECALL, True),
    "tell the tier again": (REMEMBER, True),
    "read it again": (RECALL, True),
}

# the programs, by their place in Design.programs
MOVING, WRITING, REPLACING, REPLACING_AND_WRITING, WRITE_UNDONE, CATCHING_UP, SWEEPING = range(7)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """How it is built. What is not a step in a table is a statement that holds of the router, or does not.

    Args:
        claims_groups: whoever changes a record has a claim on its group.
        keeps_claims: a claim is kept until a call without an answer cannot land any more.
        checks_versions: a flip finds out whether its records still are what they were.
        notes_at_source: a flip notes the old copies.
        knows_former_homes: a read accepts a copy in the home that a record had when the read began.
        knows_homes: a read accepts no copy elsewhere.
        notes_the_forgotten: a forget notes the copies.
        keeps_notes: notes of what was under way outlive a crash.
        counts: the start compares what a tier holds with what is accounted for, and takes the rest in.
        holds_tiers: after a crash, a tier is left alone until an earlier router's calls cannot land there any more:
            it is not welcomed, and nothing is swept there.
        holds_unnoted: also one for which nothing is noted, since a power cut may have taken the note.
        holds_back_redo: a tier that is left alone has not to catch up with anything meanwhile either.
        catches_up_claimed: whoever has a tier catch up has a claim on the record.
        serves_redo: a read shows what a tier has yet to catch up with as the catalog has it.
        compares: a move compares what it reads with what the catalog says.
        leaves_what_is_behind: a move leaves a record where it is that its tier has yet to catch up with.
        spares_what_is_behind: what its tier has yet to catch up with is not lost when a scan does not find it;
            `spares_what_was_behind`: nor if its tier had yet to catch up when the scan looked.
        gives_up: what was being written when a router died does not become true by what its tier holds.
    """

    move: tuple[str, ...] = MOVE
    write: tuple[str, ...] = WRITE
    write_failed: tuple[str, ...] = WRITE_FAILED
    replace: tuple[str, ...] = REPLACE
    batch: tuple[str, ...] = BATCH
    catch_up: tuple[str, ...] = CATCH_UP
    sweep: tuple[str, ...] = SWEEP
    forget: tuple[str, ...] = FORGET
    claims_groups: bool = True
    keeps_claims: bool = True
    checks_versions: bool = True
    notes_at_source: bool = True
    knows_former_homes: bool = True
    knows_homes: bool = True
    notes_the_forgotten: bool = True
    keeps_notes: bool = True
    counts: bool = True
    holds_tiers: bool = True
    holds_unnoted: bool = True
    holds_back_redo: bool = True
    catches_up_claimed: bool = True
    serves_redo: bool = True
    compares: bool = True
    leaves_what_is_behind: bool = True
    spares_what_is_behind: bool = True
    spares_what_was_behind: bool = True
    gives_up: bool = True

    @property
    def programs(self) -> tuple[tuple[str, ...], ...]:
        """By the numbers above."""
        return self.move, self.write, self.replace, self.batch, self.write_failed, self.catch_up, self.sweep


# as the router is; and in the other orders that a move may have
BUILT: Final = Design()
REORDERED: Final = tuple(Design(move=order) for order in MOVES[1:])


def without(steps: tuple[str, ...], *lines: str) -> tuple[str, ...]:
    """A table without some of its lines, wherever they stand."""
    assert set(lines) <= set(steps), f"no such step: {set(lines) - set(steps)}"
    return tuple(step for step in steps if step not in lines)


def placed(steps: tuple[str, ...], line: str, before: str) -> tuple[str, ...]:
    """A table with one line put before another, from wherever it stood, if it did."""
    rest = tuple(step for step in steps if step != line)
    at = rest.index(before)
    return (*rest[:at], line, *rest[at:])
