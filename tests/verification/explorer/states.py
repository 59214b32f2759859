"""The states of a small federation as values, and how they change.

A state is frozen, and equal states are one state. A `Moment` is a state that is being changed into the next one.
`walks` and `faults` decide which change is possible when.
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

# the workers; the last two are the reconcilers of the tiers, in the order of the tiers
MOVER, WRITER, REPLACER, *RECONCILERS = range(5)
WORKERS: Final = ("the move", "the late write", "the replacement", "source's reconciler", "target's reconciler")
NOBODY: Final = -1
# the caller of a call of a dead router that may still land
THE_DEAD: Final = -2

# The phases of a worker: not begun; at a call that was sent, carried out, or has failed; at a wait for the disk or for
# reads; after the end of a wait; finished.
IDLE, SENT, DONE, FAILED, SYNCING, WAITING, READY, OVER = range(8)

# the fates of a call under way at the death of a process
NEVER, LANDS, LATER = range(3)

# a read's answer from a tier: none yet, or none at all
ASKED, SILENT = -1, -2

# the former home of a record that was written since a read began
NOWHERE: Final = 3

# The progress of a welcome: not begun (ASKED); from LOSING on, the records that a scan has not found where they live.
LOSING: Final = 1 << 16

# an observable event, for the comparison with a real run: a tier carries out a call, a commit, the end of a read
Event = tuple[Any, ...]


class Work(msgspec.Struct, frozen=True, gc=False):
    """A change under way: its line, its program, its tier.

    Args:
        ids: the records that are changed, `was` their contents; `whole`: those of them that may move.
        stale: those that have changed since the change looked them up.
        mine: the strays in question; `old`: those to be read at home; `leaving`: those to be deleted.
        got: the answer of the last call.
        claim: the names that are claimed.
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
    """A read under way.

    `got` are the answers of the tiers, and `must` the records that have to be in the result. `left` are the homes that
    records had when the read began, for those that have another one since: 1 + the tier, or NOWHERE for a new record.

    `newest` is the content of the keyed record that was acknowledged before the read, `gone` the records whose forget
    was.
    """

    got: tuple[int, int] = (ASKED, ASKED)
    must: int = 0
    gone: int = 0
    newest: int = 0
    left: int = 0


class Open(msgspec.Struct, frozen=True, gc=False):
    """A call without an answer that may still land. `claim` is released when it cannot land any more."""

    by: int
    tier: int
    method: str
    ids: int
    contents: int
    claim: int = 0


class State(msgspec.Struct, frozen=True, gc=False):
    """The whole state at one moment.

    Args:
        journal: the catalog as it is on the disk, and after each commit since; the router sees the last one.
        held: the copies that each tier holds.
        up, welcomed, counted: sets of tiers; `looking`: the progress of each tier's welcome.
        starting: the router has just been started, and serves no client yet.
        told: the records whose write was acknowledged; `gone`: whose forget was; `begun`: whose forget has begun.
        newest: the content of the keyed record that was acknowledged.
        lost: the records that their home has lost behind the router's back, since the beginning.
        moves, replaces, reads, crashes, outages, timeouts, losses, unkept: how many are still possible.
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
    """What happens besides the two records in the source, and how often.

    Args:
        moves: one after the other, each from one tier to the other.
        late: a third member of the group is written to the source.
        replaces: the number of replacements of the keyed record; `batch`: each one also writes the late member.
        forgets: the id that is forgotten, if any.
        reads: recalls of both tiers, one after the other.
        crashes: of the router, with or without the loss of commits that are not durable; `outlives`: its calls to tiers
            may still land after the next start.
        outages: a tier goes down, and comes back.
        timeouts: calls without an answer, which may land later.
        losses: a tier loses a record that a move has brought there, while the old copy is still in the other tier.
        unkept: a tier acknowledges a record and does not keep it.
        lesser: the tiers are lifted: they do not replace in place, and keep the content that they hold for an id. Only
            without moves and new records, which take more steps at such a tier.
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
        """Return the first state: two records of a group in the source, acknowledged long ago."""
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
    """One step: the actor, its action, and the observable events. `fault`: it is a fault; `syncs`: it makes commits
    durable."""

    who: str
    what: str
    events: tuple[Event, ...] = ()
    fault: bool = False
    syncs: bool = False

    def __str__(self) -> str:
        return f"{self.who}: {self.what}"


Step = tuple[Label, State, str | None]


class Moment:
    """A state that is being changed. `wrong` is the rule that the step broke, if it broke one."""

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
        """Note that the records have changed, for every change that has looked them up before."""
        for who, work in enumerate(self.work):
            if who != by and work.ids & mask & ~work.stale:
                self.change(who, stale=work.stale | work.ids & mask)
        for tier, seen in enumerate(self.looking):
            if seen >= LOSING:
                self.look(tier, seen & ~mask)

    def look(self, tier: int, seen: int) -> None:
        """Set the progress of a tier's welcome."""
        self.looking = (seen, self.looking[TARGET]) if tier == SOURCE else (self.looking[SOURCE], seen)

    def moved(self, mask: int, home: int) -> None:
        """Note that the records have left `home`; a read that began before may show them as they are there."""
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
        """Let a tier carry out a call. Returns False if its answer to a write names another id than the one written."""
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
                    # a tier that still holds the key replaces that record, and returns its id
                    held, named = with_content(held, other, content), False
                elif not there or replaces:
                    held = with_content(held, id, content)
        self.held = (held, self.held[TARGET]) if tier == SOURCE else (self.held[SOURCE], held)
        return named
