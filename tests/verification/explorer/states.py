"""What is, and how it changes: the states of a small federation as values, and a moment in which one is being changed.

A state is frozen, and two that are equal are one. A `Moment` is a state on its way to the next. How it changes is here;
when it may, and who may do it, is in `walks` and `faults`.
"""

from typing import Any, Final

import msgspec

from tests.verification.explorer.accounts import (
    KEYED,
    SOURCE,
    TARGET,
    A,
    B,
    Book,
    content_in,
    members,
    only,
    with_content,
)
from tests.verification.explorer.steps import REMEMBER, REMOVAL

# who works; the last are the reconcilers of the tiers, in their order
MOVER, WRITER, REPLACER, *RECONCILERS = range(5)
WORKERS: Final = ("the move", "the late write", "the replacement", "source's reconciler", "target's reconciler")
NOBODY: Final = -1
# who asked for what may still land in the next router's time
THE_DEAD: Final = -2

# where a worker is: not begun, at a call that the tier has not seen, that it has done, that has failed, at a
# wait (for the disk, for readers; these have ended), done
IDLE, SENT, DONE, FAILED, SYNCING, WAITING, READY, OVER = range(8)

# what becomes of a call under way when a process dies
NEVER, LANDS, LATER = range(3)

# what a read has of a tier: nothing yet; or the tier was silent
ASKED, SILENT = -1, -2

# the home, before, of what was written since a read began
NOWHERE: Final = 3

# what a tier is seen to hold when it is welcomed: nothing was asked yet (ASKED); from LOSING on, those records that a
# scan has not found where they live
LOSING: Final = 1 << 16

# what happened, for those who compare it with a real run: a tier did what it was asked, a commit, the end of a read
Event = tuple[Any, ...]


class Work(msgspec.Struct, frozen=True, gc=False):
    """A change under way: at which line of which program, in which tier.

    Args:
        ids: the records that are changed, `was` their contents; `whole`: those of them that may move.
        stale: those that have changed since they were looked up.
        mine: the strays that are looked at; `old`: those to be seen at home; `leaving`: those to be removed.
        got: the answer of the last call.
        claim: what is claimed.
    """

    program: int = 0
    at: int = 0
    phase: int = IDLE
    tier: int = 0
    ids: int = 0
    was: int = 0
    whole: int = 0
    stale: int = 0
    mine: int = 0
    old: int = 0
    leaving: int = 0
    got: int = 0
    claim: int = 0


RESTING: Final = Work()
FINISHED: Final = Work(phase=OVER)


class Reading(msgspec.Struct, frozen=True, gc=False):
    """A read under way: what each tier has answered, what must be in it, and `left`, which homes records had when it
    began, of those that have another since: 1 + the tier, or NOWHERE for what was written since.

    `newest`: which content of the keyed record was acknowledged before. `gone`: what was acknowledged to be forgotten
    before.
    """

    got: tuple[int, int] = (ASKED, ASKED)
    must: int = 0
    gone: int = 0
    newest: int = 0
    left: int = 0


class Open(msgspec.Struct, frozen=True, gc=False):
    """A call that was not answered, and may still land. `claim` is let go when it cannot any more."""

    by: int
    tier: int
    method: str
    ids: int
    contents: int
    claim: int = 0


class State(msgspec.Struct, frozen=True, gc=False):
    """All of it at one moment.

    Args:
        journal: the catalog as it is on the disk, and after each commit since; the last is what the router sees.
        held: the copies that each tier holds.
        up, welcomed, counted: sets of tiers; `looking`: what a tier that is being welcomed was seen to hold.
        starting: the router has just been started, and serves nobody yet.
        told: what was acknowledged as written; `gone`: as forgotten; `begun`: what a forget was begun of.
        newest: which content of the keyed record was acknowledged.
        lost: what its home has lost behind the router's back, since it began.
        moves, replaces, reads, crashes, outages, timeouts, losses, unkept: how many there may still be.
    """

    journal: tuple[Book, ...]
    held: tuple[int, int]
    work: tuple[Work, Work, Work, Work, Work] = (RESTING, RESTING, RESTING, RESTING, RESTING)
    forgetting: int = IDLE
    reading: Reading | None = None
    open: tuple[Open, ...] = ()
    up: int = 0b11
    welcomed: int = 0b11
    counted: int = 0b11
    looking: tuple[int, int] = (ASKED, ASKED)
    starting: bool = False
    told: int = 1 << A | 1 << B
    gone: int = 0
    begun: int = 0
    newest: int = 1
    lost: int = 0
    moves: int = 0
    replaces: int = 0
    reads: int = 0
    crashes: int = 0
    outages: int = 0
    timeouts: int = 0
    losses: int = 0
    unkept: int = 0

    @property
    def book(self) -> Book:
        return self.journal[-1]

    def is_up(self, tier: int) -> bool:
        return bool(self.up >> tier & 1)


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """What there is besides the two records in the source, and how often.

    Args:
        moves: one after the other, each from a tier to the other.
        late: a third member of the group is written to the source.
        replaces: how often what is at the key is replaced; `batch`: each brings the late member as well.
        forgets: an id, if one is forgotten.
        reads: recalls of both tiers, one after the other.
        crashes: of the router, with what was not durable gone or not; `outlives`: what it had asked of a tier may
            still land in the next one's time.
        outages: a tier goes, and comes back.
        timeouts: calls without an answer, which may land later.
        losses: a tier loses a record that a move has brought there, while the old copy is still in the other.
        unkept: a tier says that it has what it is given, and has not.
        lesser: the tiers do not replace by themselves, and keep what they hold of an id; only without moves and new
            records, since these are more steps at such a tier.
    """

    name: str
    moves: tuple[tuple[int, int], ...] = ((SOURCE, TARGET),)
    late: bool = False
    replaces: int = 0
    batch: bool = False
    forgets: int | None = None
    reads: int = 0
    crashes: int = 0
    outlives: bool = False
    outages: int = 0
    timeouts: int = 0
    losses: int = 0
    unkept: int = 0
    lesser: bool = False

    def begins(self) -> State:
        """Two records of a group in the source, acknowledged long ago."""
        return State(
            journal=(Book().enter(A, SOURCE, 1).enter(B, SOURCE, 1),),
            held=(with_content(with_content(0, A, 1), B, 1), 0),
            moves=len(self.moves),
            replaces=self.replaces,
            reads=self.reads,
            crashes=self.crashes,
            outages=self.outages,
            timeouts=self.timeouts,
            losses=self.losses,
            unkept=self.unkept,
        )


class Label(msgspec.Struct, frozen=True):
    """One step: who, what, and what of it could be observed. `fault`: nobody has a right to it; `syncs`: it is that the
    disk has taken what was committed."""

    who: str
    what: str
    events: tuple[Event, ...] = ()
    fault: bool = False
    syncs: bool = False

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


Step = tuple[Label, State, str | None]


class Moment:
    """A state that is being changed. `wrong` says which rule the step broke, if it did."""

    __slots__ = (*State.__struct_fields__, "events", "wrong")

    def __init__(self, state: State) -> None:
        for name in State.__struct_fields__:
            setattr(self, name, getattr(state, name))
        self.events: list[Event] = []
        self.wrong: str | None = None

    journal: tuple[Book, ...]
    held: tuple[int, int]
    work: tuple[Work, Work, Work, Work, Work]
    forgetting: int
    reading: Reading | None
    open: tuple[Open, ...]
    up: int
    welcomed: int
    counted: int
    looking: tuple[int, int]
    starting: bool
    told: int
    gone: int
    begun: int
    newest: int
    lost: int
    moves: int
    replaces: int
    reads: int
    crashes: int
    outages: int
    timeouts: int
    losses: int
    unkept: int

    def frozen(self) -> State:
        return State(*[getattr(self, name) for name in State.__struct_fields__])

    def step(self, who: str, what: str, *, fault: bool = False, syncs: bool = False) -> Step:
        return Label(who, what, tuple(self.events), fault, syncs), self.frozen(), self.wrong

    @property
    def book(self) -> Book:
        return self.journal[-1]

    def commit(self, name: str, book: Book) -> None:
        if book != self.journal[-1]:
            self._note_left(book.known() & ~self.journal[-1].known(), NOWHERE)
            self.journal += (book,)
            self.events.append(("commit", name))

    def sync(self) -> None:
        self.journal = self.journal[-1:]

    def is_up(self, tier: int) -> bool:
        return bool(self.up >> tier & 1)

    def put(self, who: int, work: Work) -> None:
        self.work = (*self.work[:who], work, *self.work[who + 1 :])  # type: ignore[assignment]  # still five

    def change(self, who: int, **fields: int) -> None:
        self.put(who, msgspec.structs.replace(self.work[who], **fields))

    def touched(self, mask: int, by: int = NOBODY) -> None:
        """The records have changed: whoever looked them up before will notice."""
        for who, work in enumerate(self.work):
            if who != by and work.ids & mask & ~work.stale:
                self.change(who, stale=work.stale | work.ids & mask)
        for tier, seen in enumerate(self.looking):
            if seen >= LOSING:
                self.look(tier, seen & ~mask)

    def look(self, tier: int, seen: int) -> None:
        """What a tier that is being welcomed was seen to hold."""
        self.looking = (seen, self.looking[TARGET]) if tier == SOURCE else (self.looking[SOURCE], seen)

    def moved(self, mask: int, home: int) -> None:
        """The records have just left `home`: a read that began before may show them as they are there."""
        self._note_left(mask, 1 + home)

    def _note_left(self, mask: int, home: int) -> None:
        if self.reading is not None and mask:
            left = self.reading.left
            for id in members(mask):
                if home == NOWHERE or not content_in(left, id):
                    left = with_content(left, id, home)
            self.reading = msgspec.structs.replace(self.reading, left=left)

    def claimed(self, *, but: int = NOBODY) -> int:
        held = 0
        for who, work in enumerate(self.work):
            if who != but:
                held |= work.claim
        for call in self.open:
            held |= call.claim
        return held

    def carry_out(self, tier: int, method: str, ids: int, contents: int, *, lesser: bool) -> bool:
        """A tier does what it is asked; False if its answer to a write names another id than it was given."""
        held = self.held[tier]
        named = True
        if method == REMOVAL:
            held = held & ~only(held, ids)
        elif method == REMEMBER:
            for id in members(ids):
                content, there = content_in(contents, id), content_in(held, id)
                replaces = id in KEYED and not lesser
                other = next((o for o in KEYED if o != id and content_in(held, o)), None) if replaces else None
                if not there and other is not None:
                    # a tier that still holds the key replaces what is there, and says so
                    held, named = with_content(held, other, content), False
                elif not there or replaces:
                    held = with_content(held, id, content)
        self.held = (held, self.held[TARGET]) if tier == SOURCE else (self.held[SOURCE], held)
        return named
