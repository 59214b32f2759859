"""The steps of every change of the router as tables, one line for each call, wait or commit.

A line is a call to a tier (in CALLS), a wait, or a piece of work on the catalog. Pieces of work between two calls or
waits are one step, since the router awaits nothing between them. A table is a parameter: a test removes or moves a line
and asserts that the explorer finds the fault.

The order of a move comes from the router's own table of moves.
"""

from itertools import permutations, product
from typing import Final

import msgspec

from a2m_router.placement import steps as router
from a2m_router.placement.steps import Step

SYNC: Final = "make it durable"
SYNC_NOTES: Final = "make the notes durable"
GRACE: Final = "wait for readers"

# what `Reconciler._remove` does
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

# what `Reconciler.clear` does before a write to a tier
CLEAR: Final = ("look what is in the way", GRACE, *_REMOVE, "see that the way is clear")

SWEEP: Final = (GRACE, "claim what is free", *_REMOVE, "let go")

# the lines of each step of the router
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
    """Return every permitted order of a table's lines: the steps of a row may happen in any order."""
    return tuple(
        tuple(line for row in rows for step in row for line in LINES[step])
        for rows in product(*(permutations(row) for row in table))
    )


# every order of a move; the guard of a change comes last
MOVES: Final = tuple((*order, "give up the rest", SYNC, "let go") for order in orders(router.MOVE))
MOVE: Final = MOVES[0]

WRITE: Final = (*CLEAR, "reserve", "write the tier", "commit the write", SYNC, "answer", "let go")
WRITE_FAILED: Final = (SYNC, "let go")

# true as soon as it is durable; the tier's reconciler carries out the pending write
REPLACE: Final = (*CLEAR, "commit the batch", SYNC, "answer", "let go")
# a batch that also has a new record: the tier gets a part of the batch, so the reservation must survive a crash
BATCH: Final = (
    *CLEAR,
    *("reserve", SYNC, "write the tier", "commit the batch", SYNC, "answer", "let go"),
)

CATCH_UP: Final = (
    "see what the tier has yet to catch up with",
    SYNC,
    # only where the tier does not replace in place
    "forget what is replaced",
    "see that it is gone",
    "tell the tier",
    "read it back",
    "see whether it is kept",
    # only records that it does not keep
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

# the calls: the method, and the tier (True: the one that is changed, False: the other one)
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

# the programs, in the order of Design.programs
MOVING, WRITING, REPLACING, REPLACING_AND_WRITING, WRITE_UNDONE, CATCHING_UP, SWEEPING = range(7)


class Design(msgspec.Struct, frozen=True, kw_only=True):
    """The design of the router: its tables, and statements about it that can be switched off.

    Args:
        claims_groups: a change of a record claims its group.
        keeps_claims: a claim is kept until a call without an answer cannot land any more.
        checks_versions: a flip checks whether its records have changed.
        notes_at_source: a flip notes the old copies.
        knows_former_homes: a read accepts a copy in the home that a record had when the read began.
        knows_homes: a read accepts no copy elsewhere.
        notes_the_forgotten: a forget notes the copies.
        keeps_notes: notes of copies survive a crash.
        counts: the start compares what a tier holds with the catalog, and adopts the rest.
        holds_tiers: after a crash, a tier is held until an earlier router's calls cannot land there any more: it is not
            welcomed, and no stray is deleted there.
        holds_unnoted: tiers without a note are held, too, since a power cut may have undone the note.
        holds_back_redo: a held tier gets no pending writes either.
        catches_up_claimed: a pending write is carried out under a claim on the record.
        serves_redo: a read shows a record with a pending write as the catalog has it.
        compares: a move compares what it reads with the catalog.
        leaves_what_is_behind: a move leaves a record with a pending write where it is.
        spares_what_is_behind: a record with a pending write is not lost when a scan does not find it;
            `spares_what_was_behind`: nor if it had a pending write when the scan looked.
        gives_up: a write in progress when a router died does not become true by a copy in its tier.
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
        """Return the programs, in the order of the numbers above."""
        return self.move, self.write, self.replace, self.batch, self.write_failed, self.catch_up, self.sweep


# the router as built; and the other permitted orders of a move
BUILT: Final = Design()
REORDERED: Final = tuple(Design(move=order) for order in MOVES[1:])


def without(steps: tuple[str, ...], *lines: str) -> tuple[str, ...]:
    """Return a table without some of its lines."""
    assert set(lines) <= set(steps), f"no such step: {set(lines) - set(steps)}"
    return tuple(step for step in steps if step not in lines)


def placed(steps: tuple[str, ...], line: str, before: str) -> tuple[str, ...]:
    """Return a table with one line put before another; the line is moved if the table has it already."""
    rest = tuple(step for step in steps if step != line)
    at = rest.index(before)
    return (*rest[:at], line, *rest[at:])
