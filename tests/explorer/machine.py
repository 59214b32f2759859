"""The state machine: what may happen next in a small federation, whatever that is.

A state is a value. What goes on between two awaits of the router is one step; a call to a tier is two, the tier does it
and the router hears of it, and between them anything else may happen. A crash takes away what was not durable, from any
point on, and each call under way has landed or has not.

Rougher than the router, and why that loses nothing that is looked for here:
- a claim is taken in one step (`Claims` has tests of its own);
- a sweep may begin whenever there is something noted, without being woken; there is one at a time;
- a read that has failed may be asked once more whenever its tier is up;
- copies that are written and come back altered end a move; no tier alters anything here;
- a tier that comes back is looked into in two steps, its scan included.
"""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

import msgspec

from tests.explorer.accounts import (
    ALL,
    ASIDE,
    EQUAL,
    GROUP,
    ID_NAMES,
    KEYED,
    NONE,
    PENDING,
    SOURCE,
    SUPERSEDED,
    TARGET,
    TIER_NAMES,
    TIERS,
    UNWANTED,
    A,
    B,
    Book,
    C,
    D,
    content_in,
    ids_in,
    members,
    only,
    record_names,
    with_content,
    written,
)
from tests.explorer.steps import (
    BUILT,
    CALLS,
    GRACE,
    MOVING,
    RECALL,
    REMEMBER,
    REMOVAL,
    REPLACE_UNDONE,
    REPLACING,
    SETTLE,
    SWEEPING,
    SYNC,
    SYNC_NOTES,
    WRITE_UNDONE,
    WRITING,
    Design,
)

# who works
MOVER, WRITER, REPLACER, SWEEPER = range(4)
WORKERS: Final = ("the move", "the late write", "the replacement", "the sweeper")
NOBODY: Final = -1
# who asked for what may still land in the next router's time
THE_DEAD: Final = -2

# where a worker is: not begun, at a call that the tier has not seen, that it has done, that has failed, at a
# wait (for the disk, for readers; these have ended; for calls that are open), done
IDLE, SENT, DONE, FAILED, SYNCING, WAITING, READY, SETTLING, OVER = range(9)

# what becomes of a call under way when a process dies
NEVER, LANDS, LATER = range(3)

# what a read has of a tier: nothing yet; or the tier was silent
ASKED, SILENT = -1, -2

# the acknowledgement of the replacement, beside those of records
REPLACED: Final = 1 << 4

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
    """A read under way: what each tier has answered, what must be in it, whose homes have changed since it began.

    `newest`: the replacement was acknowledged before. `gone`: what was acknowledged to be forgotten before.
    """

    got: tuple[int, int] = (ASKED, ASKED)
    must: int = 0
    gone: int = 0
    newest: bool = False
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
        lost: what its home has lost behind the router's back, since it began.
        moves, reads, crashes, outages, timeouts, losses, unkept: how many there may still be.
    """

    journal: tuple[Book, ...]
    held: tuple[int, int]
    work: tuple[Work, Work, Work, Work] = (RESTING, RESTING, RESTING, RESTING)
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
    lost: int = 0
    moves: int = 0
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
        replaces: what is at the key is replaced.
        forgets: an id, if one is forgotten.
        reads: recalls of both tiers, one after the other.
        crashes: of the router, with what was not durable gone or not; `outlives`: what it had asked of a tier may
            still land in the next one's time.
        outages: a tier goes, and comes back.
        timeouts: calls without an answer, which may land later.
        losses: a tier loses a record that a move has brought there, while the old copy is still in the other.
        unkept: a tier says that it has what a move brings, and has not.
    """

    name: str
    moves: tuple[tuple[int, int], ...] = ((SOURCE, TARGET),)
    late: bool = False
    replaces: bool = False
    forgets: int | None = None
    reads: int = 0
    crashes: int = 0
    outlives: bool = False
    outages: int = 0
    timeouts: int = 0
    losses: int = 0
    unkept: int = 0


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
    work: tuple[Work, Work, Work, Work]
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
    lost: int
    moves: int
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
            self.journal += (book,)
            self.events.append(("commit", name))

    def sync(self) -> None:
        self.journal = self.journal[-1:]

    def is_up(self, tier: int) -> bool:
        return bool(self.up >> tier & 1)

    def put(self, who: int, work: Work) -> None:
        self.work = (*self.work[:who], work, *self.work[who + 1 :])  # type: ignore[assignment]  # still four

    def change(self, who: int, **fields: int) -> None:
        self.put(who, msgspec.structs.replace(self.work[who], **fields))

    def touched(self, mask: int, by: int = NOBODY) -> None:
        """The records have changed: whoever looked them up before will notice."""
        for who, work in enumerate(self.work):
            if who != by and work.ids & mask & ~work.stale:
                self.change(who, stale=work.stale | work.ids & mask)

    def moved(self, mask: int, home: int) -> None:
        """The records have just left `home`: a read that began before may show them as they are there."""
        if self.reading is not None:
            left = self.reading.left
            for id in members(mask):
                if not content_in(left, id):
                    left = with_content(left, id, 1 + home)
            self.reading = msgspec.structs.replace(self.reading, left=left)

    def claimed(self, *, but: int = NOBODY) -> int:
        held = 0
        for who, work in enumerate(self.work):
            if who != but:
                held |= work.claim
        for call in self.open:
            held |= call.claim
        return held

    def carry_out(self, tier: int, method: str, ids: int, contents: int) -> bool:
        """A tier does what it is asked; False if its answer to a write names another id than it was given."""
        held = self.held[tier]
        named = True
        if method == REMOVAL:
            held = held & ~only(held, ids)
        elif method == REMEMBER:
            for id in members(ids):
                content, there = content_in(contents, id), content_in(held, id)
                other = next((o for o in KEYED if o != id and content_in(held, o)), None) if id in KEYED else None
                if not there and other is not None:
                    # a tier that still holds the key replaces what is there, and says so
                    held, named = with_content(held, other, content), False
                elif not there or id in KEYED:
                    held = with_content(held, id, content)
        self.held = (held, self.held[TARGET]) if tier == SOURCE else (self.held[SOURCE], held)
        return named


class Machine:
    """One scenario under one design."""

    def __init__(self, scenario: Scenario, design: Design = BUILT) -> None:
        self.scenario = scenario
        self.design = design
        self._programs = design.programs
        self._work: dict[str, Callable[[Moment, int, Work], bool]] = {
            "look what is in the way": self._look_what_is_in_the_way,
            "look at what is noted now": self._look_at_what_is_noted,
            "see what its home has lost": self._see_what_its_home_has_lost,
            "bring it home": self._bring_home,
            "strike the notes": self._strike_the_notes,
            "see that the way is clear": self._see_that_the_way_is_clear,
            "claim what is free": self._claim_what_is_free,
            "note the copies to come": self._note_the_copies,
            "compare with the catalog": self._compare_with_the_catalog,
            "compare with what was given": self._compare_with_what_was_given,
            "flip": self._flip,
            "give up the rest": self._give_up,
            "reserve": self._reserve,
            "commit the write": self._commit_the_write,
            "note the replacement": self._note_the_replacement,
            "commit the replacement": self._commit_the_replacement,
            "see which it is": self._see_which_it_is,
            "look again": self._look_again,
            "settle the replacement": self._settle_the_replacement,
            "let go": self._let_go,
        }

    def initial(self) -> State:
        """Two records of a group in the source, acknowledged long ago."""
        book = Book().enter(A, SOURCE, 1).enter(B, SOURCE, 1)
        held = with_content(with_content(0, A, 1), B, 1)
        s = self.scenario
        return State(
            journal=(book,),
            held=(held, 0),
            moves=len(s.moves),
            reads=s.reads,
            crashes=s.crashes,
            outages=s.outages,
            timeouts=s.timeouts,
            losses=s.losses,
            unkept=s.unkept,
        )

    def successors(self, state: State) -> Iterator[Step]:
        """Every step that is possible now, and what it leads to."""
        # before a tier takes part again, it is swept; nobody is served before the tiers take part
        for who in (SWEEPER,) if state.starting else (MOVER, WRITER, REPLACER, SWEEPER):
            if state.work[who].phase == IDLE:
                yield from self._begin(state, who)
            else:
                yield from self._go_on(state, who)
        if not state.starting:
            yield from self._forget(state)
            yield from self._read(state)
        yield from self._welcomes(state)
        yield from self._settlements(state)
        yield from self._outages(state)
        yield from self._crash(state)
        yield from self._losses(state)

    # --- the workers

    def _begin(self, state: State, who: int) -> Iterator[Step]:
        m = Moment(state)
        book = m.book
        if who == MOVER:
            if not m.moves:
                return
            source, target = self.scenario.moves[-m.moves]
            if m.up != 0b11 or not (self._is_accounted(m, source) and self._is_accounted(m, target)):
                return
            ids = book.living(source)
            m.moves -= 1
            if not ids:
                yield m.step(WORKERS[who], "finds nothing to move")
                return
            yield from self._claimed(m, who, Work(MOVING, tier=target, ids=ids))
        elif who == WRITER:
            if self.scenario.late and m.is_up(SOURCE) and self._is_accounted(m, SOURCE):
                yield from self._claimed(m, who, Work(WRITING, tier=SOURCE, ids=1 << C))
        elif who == REPLACER:
            if not self.scenario.replaces:
                return
            home = book.home(A)
            work = Work(REPLACING, tier=home, ids=1 << A) if home is not None else Work(WRITING, ids=1 << D)
            if m.is_up(work.tier) and self._is_accounted(m, work.tier) and book.home(D) is None:
                yield from self._claimed(m, who, work)
        else:
            for tier in TIERS:
                page = book.noted(tier)
                if page and m.is_up(tier) and not self._is_held(m, tier):
                    m = Moment(state)
                    m.put(who, Work(SWEEPING, tier=tier, mine=page))
                    self._run(m, who)
                    yield m.step(WORKERS[who], f"begins with {written(page)} in {TIER_NAMES[tier]}")

    def _is_held(self, m: Moment, tier: int) -> bool:
        """Whether the tier is left alone, since what an earlier router had asked of it may still land."""
        return self.design.holds_tiers and any(call.by == THE_DEAD and call.tier == tier for call in m.open)

    def _is_accounted(self, m: Moment, tier: int) -> bool:
        """Whether nothing that an earlier router wrote there is still to be looked into."""
        if not self.design.accounts_for_reservations or m.counted >> tier & 1:
            return True
        return all(m.book.reserved(id) != tier for id in members(ALL))

    def _claimed(self, m: Moment, who: int, work: Work) -> Iterator[Step]:
        """The change begins, if all that it touches is free, or there is nothing left of it to be done."""
        book = m.book
        names = record_names(work.ids | book.in_the_way(work.tier, work.ids))
        if self.design.claims_groups:
            names |= GROUP
        if names & m.claimed():
            return
        if any(book.reserved(id) is not None for id in members(work.ids)):
            return  # an interrupted write has not been looked into yet; the caller is told so, and nothing was done
        was = 0
        for id in members(work.ids):
            was = with_content(was, id, book.content(id) or 1)
        m.put(who, msgspec.structs.replace(work, claim=names, was=was))
        self._run(m, who)
        yield m.step(WORKERS[who], f"begins with {written(work.ids)} for {TIER_NAMES[work.tier]}")

    def _run(self, m: Moment, who: int) -> None:
        """Go on to the next call or wait, or to the end."""
        while True:
            work = m.work[who]
            line = self._programs[work.program][work.at]
            if line in CALLS:
                tier, _, ids, _ = self._call(m, work, line)
                if ids:
                    m.change(who, phase=SENT if m.is_up(tier) else FAILED, got=0)
                    return
            elif line == SYNC or (line == SYNC_NOTES and work.leaving):
                m.change(who, phase=SYNCING)
                return
            elif line == GRACE:
                if m.reading is not None:
                    m.change(who, phase=WAITING)
                    return
            elif line == SETTLE:
                if any(call.by == who for call in m.open):
                    m.change(who, phase=SETTLING)
                    return
            elif line != SYNC_NOTES and not self._work[line](m, who, work):
                return
            m.change(who, at=m.work[who].at + 1)

    def _call(self, m: Moment, work: Work, line: str) -> tuple[int, str, int, int]:
        """What a line asks of which tier: its method, the ids, and the contents that it writes."""
        method, changed = CALLS[line]
        tier = work.tier if changed else 1 - work.tier
        if line in ("read it at home", "read the copies that are left of it"):
            ids = work.old
        elif line in ("forget the copies", "see that they are gone"):
            ids = work.leaving
        elif line in ("write the target", "read back", "forget the source"):
            ids = work.whole
        elif line == "read what is replaced":
            ids = work.ids if m.book.home(A) == work.tier else 0
        elif line == "read what is there":
            ids = work.whole
        else:
            ids = work.ids
        contents = with_content(0, A, 2) if line == "replace it" else work.was
        return tier, method, ids, contents

    def _go_on(self, state: State, who: int) -> Iterator[Step]:
        work = state.work[who]
        if work.phase == OVER:
            return
        line = self._programs[work.program][work.at]
        name = WORKERS[who]
        m = Moment(state)
        if work.phase == SYNCING:
            m.sync()
            m.change(who, at=work.at + 1)
            self._run(m, who)
            yield m.step(name, "what it noted is durable", syncs=True)
        elif work.phase == READY:
            m.change(who, at=work.at + 1)
            self._run(m, who)
            yield m.step(name, "no read is left that began before")
        elif work.phase == SETTLING:
            if not any(call.by == who for call in m.open):
                m.change(who, at=work.at + 1)
                self._run(m, who)
                yield m.step(name, "nothing of it can land any more")
        elif work.phase == SENT:
            yield from self._call_under_way(state, who, line)
        elif work.phase == DONE:
            m.change(who, at=work.at + 1)
            self._run(m, who)
            yield m.step(name, f"hears of “{line}”")
            if m.timeouts:
                m = Moment(state)
                m.timeouts -= 1
                m.change(who, phase=FAILED)
                yield m.step(name, f"the answer to “{line}” is lost", fault=True)
        elif work.phase == FAILED:
            if work.program == REPLACE_UNDONE and not m.is_up(work.tier):
                return  # it waits, and tries again
            self._fail(m, who, work, line)
            yield m.step(name, f"fails at “{line}”")
            if CALLS[line][0] == RECALL and state.is_up(self._call(m, work, line)[0]):
                m = Moment(state)
                m.change(who, phase=SENT)
                yield m.step(name, f"once more “{line}”")

    def _call_under_way(self, state: State, who: int, line: str) -> Iterator[Step]:
        m = Moment(state)
        work = m.work[who]
        tier, method, ids, contents = self._call(m, work, line)
        m.events.append(("lands", tier, method, ids))
        if method == RECALL:
            m.change(who, phase=DONE, got=only(m.held[tier], ids))
        else:
            named = m.carry_out(tier, method, ids, contents)
            m.change(who, phase=DONE if named else FAILED)
        yield m.step(WORKERS[who], f"“{line}” ({method} {written(ids)} in {TIER_NAMES[tier]})")
        if state.unkept and line == "write the target":
            m = Moment(state)
            m.unkept -= 1
            m.change(who, phase=DONE)
            yield m.step(WORKERS[who], f"“{line}” is answered, and was not done", fault=True)
        if state.timeouts:
            m = Moment(state)
            m.timeouts -= 1
            m.change(who, phase=FAILED)
            if method != RECALL:
                m.open += (Open(self._tracked(who, work), tier, method, ids, contents),)
            yield m.step(WORKERS[who], f"“{line}” is not answered in time", fault=True)

    def _tracked(self, who: int, work: Work) -> int:
        """Who will wait for a call without an answer."""
        return NOBODY if work.program == REPLACE_UNDONE and not self.design.settles_write_back else who

    def _fail(self, m: Moment, who: int, work: Work, line: str) -> None:
        """What the router makes of a call that failed."""
        steps = self._programs[work.program]
        if line in ("read it at home", "read the copies that are left of it"):
            m.change(who, at=steps.index("bring it home") + 1, old=0, got=0)
            self._run(m, who)
        elif work.program == REPLACE_UNDONE:
            again = SETTLE if self.design.settles_write_back else "read what is there"
            m.change(who, at=steps.index(again), got=0)
            self._run(m, who)
        elif work.program == WRITING and work.at > steps.index("reserve"):
            m.commit("abandon", m.book.abandon(work.tier, work.ids))
            m.change(who, program=WRITE_UNDONE, at=0)
            self._run(m, who)
        elif work.program == REPLACING and work.at > steps.index("note the replacement"):
            if m.book.home(A) != work.tier:
                m.commit("abandon", m.book.end_replacing().note(work.tier, 1 << A, UNWANTED))
            m.change(who, program=REPLACE_UNDONE, at=0)
            self._run(m, who)
        elif work.program == MOVING:
            m.change(who, at=steps.index("give up the rest"), whole=0, got=0)
            self._run(m, who)
        else:
            self._let_go(m, who, work)

    # --- the lines of the tables; each says whether to go on to the next

    def _look_what_is_in_the_way(self, m: Moment, who: int, work: Work) -> bool:
        strays = m.book.in_the_way(work.tier, work.ids)
        if strays and self._is_held(m, work.tier):
            self._fail(m, who, work, "look what is in the way")
            return False
        if strays:
            m.change(who, mine=strays)
        else:
            m.change(who, at=self._programs[work.program].index("see that the way is clear"))
        return True

    def _look_at_what_is_noted(self, m: Moment, who: int, work: Work) -> bool:
        book = m.book
        noted = sum(1 << id for id in members(work.mine) if book.stray(work.tier, id))
        at_home = noted & book.living(work.tier)
        m.commit("strike", book.strike(work.tier, at_home))
        elsewhere = noted & book.living(1 - work.tier)
        old = sum(1 << id for id in members(elsewhere) if book.stray(work.tier, id) in (SUPERSEDED, EQUAL))
        aside = sum(1 << id for id in members(noted) if book.stray(work.tier, id) == ASIDE)
        leaving = noted & ~at_home & ~old & ~aside
        if "read it at home" not in self._programs[work.program]:
            leaving, old = leaving | old, 0
        m.change(who, old=old, leaving=leaving, mine=noted if work.program == SWEEPING else work.mine)
        return True

    def _see_what_its_home_has_lost(self, m: Moment, who: int, work: Work) -> bool:
        seen = ids_in(work.got) & work.old
        m.change(who, leaving=work.leaving | seen, old=work.old & ~seen, got=0)
        return True

    def _bring_home(self, m: Moment, who: int, work: Work) -> bool:
        for id in members(work.old):
            home = m.book.home(id)
            if content_in(work.got, id) and content_in(work.got, id) == m.book.content(id) and home == 1 - work.tier:
                m.commit("come_home", m.book.come_home(id, work.tier))
                m.touched(1 << id, by=who)
                m.moved(1 << id, 1 - work.tier)
        m.change(who, old=0, got=0)
        return True

    def _strike_the_notes(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("strike", m.book.strike(work.tier, work.leaving & ~ids_in(work.got)))
        m.change(who, leaving=0, got=0)
        return True

    def _see_that_the_way_is_clear(self, m: Moment, who: int, work: Work) -> bool:
        left = m.book.in_the_way(work.tier, work.ids)
        if left and not left & ~work.mine:
            self._fail(m, who, work, "see that the way is clear")
            return False
        if left and work.mine:
            # something has come in the way that is not claimed: claim anew
            m.put(who, RESTING)
            m.moves += who == MOVER
            return False
        m.change(who, mine=0)
        return True

    def _claim_what_is_free(self, m: Moment, who: int, work: Work) -> bool:
        held = m.claimed(but=who)
        mine = claim = 0
        for id in members(work.mine):
            names = record_names(1 << id)
            if not names & (held | claim):
                mine, claim = mine | 1 << id, claim | names
        m.change(who, mine=mine, claim=claim)
        return True

    def _note_the_copies(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("note_copies", m.book.note(work.tier, work.ids, PENDING))
        return True

    def _compare_with_the_catalog(self, m: Moment, who: int, work: Work) -> bool:
        m.change(who, whole=work.ids if work.got == work.was else 0, got=0)
        return True

    def _compare_with_what_was_given(self, m: Moment, who: int, work: Work) -> bool:
        if work.whole and work.got != work.was:
            self._fail(m, who, work, "compare with what was given")
            return False
        m.change(who, got=0)
        return True

    def _flip(self, m: Moment, who: int, work: Work) -> bool:
        source = 1 - work.tier
        book = m.book
        same = not work.stale & work.whole and book.living(source) == work.whole
        if not work.whole or not (same or not self.design.checks_versions):
            return True
        kind = SUPERSEDED if self.design.notes_at_source else NONE
        m.commit("flip", book.flip(source, work.tier, work.whole, kind))
        m.touched(work.whole, by=who)
        m.moved(work.whole, source)
        behind = m.book.living(source) | sum(1 << id for id in (C, D) if m.book.reserved(id) == source)
        if behind:
            m.wrong = f"{written(behind)} is left behind by its group (rule 4)"
        return True

    def _give_up(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("give_up", m.book.give_up(work.tier, work.ids))
        return True

    def _reserve(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("reserve", m.book.reserve(work.tier, work.ids))
        return True

    def _commit_the_write(self, m: Moment, who: int, work: Work) -> bool:
        for id in members(work.ids):
            m.commit("commit_write", m.book.settle_home(id, work.tier))
        m.told |= work.ids
        return True

    def _note_the_replacement(self, m: Moment, who: int, work: Work) -> bool:
        book = m.book.begin_replacing(work.tier)
        if book.home(A) != work.tier:
            book = book.note(work.tier, 1 << A, PENDING)
        m.commit("reserve", book)
        m.change(who, whole=ids_in(work.got), got=0)
        return True

    def _commit_the_replacement(self, m: Moment, who: int, work: Work) -> bool:
        book = m.book.end_replacing()
        if book.home(A) is None or work.stale:
            m.commit("commit_write", book.note(work.tier, 1 << A, UNWANTED))
        else:
            m.commit("commit_write", book.enter(A, work.tier, 2))
            m.touched(1 << A, by=who)
        m.told |= REPLACED
        return True

    def _see_which_it_is(self, m: Moment, who: int, work: Work) -> bool:
        if content_in(work.got, A) != 2:
            steps = self._programs[work.program]
            m.change(who, at=steps.index("settle the replacement") - 1)
        m.change(who, got=0)
        return True

    def _look_again(self, m: Moment, who: int, work: Work) -> bool:
        m.change(who, at=self._programs[work.program].index("read what is there") - 1)
        return True

    def _settle_the_replacement(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("settle_replacement", m.book.end_replacing())
        return True

    def _let_go(self, m: Moment, who: int, work: Work) -> bool:
        """Let the claim go, at once or when what is open is settled."""
        mine = [call for call in m.open if call.by == who and not call.claim]
        if mine and self.design.keeps_claims:
            kept = msgspec.structs.replace(mine[-1], claim=work.claim)
            m.open = (*[call for call in m.open if call is not mine[-1]], kept)
        m.put(who, RESTING if who in (MOVER, SWEEPER) else FINISHED)
        return False

    # --- the clients that claim nothing

    def _forget(self, state: State) -> Iterator[Step]:
        id = self.scenario.forgets
        m = Moment(state)
        if id is None or m.forgetting == OVER:
            return
        if m.forgetting == IDLE:
            book = m.book
            struck = book.home(id) is not None
            if struck or (book.reserved(id) is not None and not m.claimed() >> id & 1):
                m.commit("forget", book.forget(id, noted=self.design.notes_the_forgotten))
                m.touched(1 << id)
                m.begun |= 1 << id
            m.forgetting = SYNCING if struck else OVER
            if struck and SYNC not in self.design.forget:
                m.forgetting, m.gone = OVER, m.gone | 1 << id
            yield m.step("the forget", f"strikes {ID_NAMES[id]} out" if struck else f"finds no {ID_NAMES[id]}")
        else:
            m.sync()
            m.forgetting, m.gone = OVER, m.gone | 1 << id
            yield m.step("the forget", "is durable, and answered", syncs=True)

    def _read(self, state: State) -> Iterator[Step]:
        m = Moment(state)
        read = m.reading
        if read is None:
            if m.reads:
                m.reads -= 1
                m.reading = Reading(must=m.told & ALL & ~m.begun & ~m.lost, gone=m.gone, newest=bool(m.told & REPLACED))
                yield m.step("the read", "begins")
            return
        for tier in TIERS:
            if read.got[tier] == ASKED:
                m = Moment(state)
                answer = m.held[tier] if m.is_up(tier) else SILENT
                if not self._is_accounted(m, tier):
                    answer = SILENT  # the answer says that it had to do without
                got = (answer, read.got[TARGET]) if tier == SOURCE else (read.got[SOURCE], answer)
                m.reading = msgspec.structs.replace(read, got=got)
                if answer != SILENT:
                    m.events.append(("lands", tier, "question"))
                yield m.step("the read", f"is answered by {TIER_NAMES[tier]}" if answer != SILENT else "not answered")
        if ASKED not in read.got:
            m = Moment(state)
            m.reading = None
            m.wrong = self._judge(m, read)
            m.events.append(("read",))
            for who, work in enumerate(m.work):
                if work.phase == WAITING:
                    m.change(who, phase=READY)
            yield m.step("the read", "is complete")

    def _judge(self, m: Moment, read: Reading) -> str | None:
        """Which rule the answer of a read breaks."""
        book = m.book
        for id in members(ALL):
            home, left = book.home(id), content_in(read.left, id)
            before = left - 1 if left and self.design.knows_former_homes else home
            shown = []
            for tier in TIERS:
                copy = 0 if read.got[tier] == SILENT else content_in(read.got[tier], id)
                if copy and (not self.design.knows_homes or (home is not None and tier in (home, before))):
                    shown.append(copy)
            if self.design.knows_homes:
                del shown[1:]  # what is shown already is passed over
            name = ID_NAMES[id]
            if len(shown) > 1:
                return f"an answer holds {name} twice (rule 2)"
            if shown and read.gone >> id & 1:
                return f"{name} was forgotten, and is in the answer of a read that began after that (rule 11)"
            if id == A and read.newest and 1 in shown:
                return "the old a is in the answer of a read that began after it was replaced (rule 1)"
            where = {book.reserved(id)} if home is None else {home, before}
            silent = any(read.got[tier] == SILENT for tier in where if tier is not None)
            if read.must & ~m.begun & ~m.lost & 1 << id and not shown and not silent:
                return f"{name} was acknowledged, and a read that began after that misses it (rules 1, 11)"
        return None

    # --- tiers that come back, calls that land late, faults

    def _welcomes(self, state: State) -> Iterator[Step]:
        """What a crash left under way at a tier is looked into when it comes up, and what it holds is counted."""
        for tier in TIERS:
            m = Moment(state)
            if not m.is_up(tier) or m.welcomed >> tier & 1 or self._is_held(m, tier):
                continue
            claimed = m.claimed()
            if self.design.waits_for_claims:
                if m.looking[tier] == ASKED and m.book.left_over(tier, 0) & claimed:
                    continue  # until nobody is at work on it
                claimed = 0
            if m.looking[tier] == ASKED and (left := m.book.left_over(tier, claimed)):
                self._look(m, tier, left << 8 | only(m.held[tier], left))
                m.events.append(("lands", tier, RECALL, left))
                yield m.step("the router", f"looks for {written(left)} in {TIER_NAMES[tier]}")
                continue
            if m.looking[tier] != ASKED:
                left, found = divmod(m.looking[tier], 1 << 8)
                m.commit("recover_reservations", m.book.recover(tier, left & ~(1 << A), found))
                m.commit("settle_replacement", m.book.recover(tier, left & 1 << A, found))
                m.touched(left & 1 << A)
            if self.design.counts and not m.counted >> tier & 1:
                before = m.book
                m.commit("adopt", before.adopt(tier, m.held[tier]))
                if m.counted | 1 << tier == 0b11:
                    m.commit("decide_groups", m.book.decide_groups())
                for home in TIERS:
                    came = m.book.living(home) & before.living(1 - home)
                    m.touched(came)
                    m.moved(came, 1 - home)
            self._look(m, tier, ASKED)
            m.welcomed |= 1 << tier
            m.counted |= 1 << tier
            self._end_the_start(m)
            yield m.step("the router", f"has taken {TIER_NAMES[tier]} into the account")

    def _look(self, m: Moment, tier: int, seen: int) -> None:
        m.looking = (seen, m.looking[TARGET]) if tier == SOURCE else (m.looking[SOURCE], seen)

    def _end_the_start(self, m: Moment) -> None:
        # the start waits for every tier that is up, and not held
        waited_for = sum(1 << tier for tier in TIERS if m.is_up(tier) and not self._is_held(m, tier))
        m.starting = m.starting and bool(waited_for & ~m.welcomed)

    def _settlements(self, state: State) -> Iterator[Step]:
        """A call without an answer lands at last, or it is certain that it cannot any more; its claim is let go."""
        for call in state.open:
            told = f"{call.method} {written(call.ids)} in {TIER_NAMES[call.tier]}"
            m = Moment(state)
            m.open = tuple(other for other in m.open if other is not call)
            m.events.append(("lands", call.tier, call.method, call.ids))
            m.carry_out(call.tier, call.method, call.ids, call.contents)
            yield m.step(TIER_NAMES[call.tier], f"does late what it was asked: {told}")
            m = Moment(state)
            m.open = tuple(other for other in m.open if other is not call)
            yield m.step(TIER_NAMES[call.tier], f"cannot do any more what it was asked: {told}")

    def _outages(self, state: State) -> Iterator[Step]:
        for tier in TIERS:
            if not state.up >> tier & 1:
                m = Moment(state)
                m.up |= 1 << tier
                yield m.step(TIER_NAMES[tier], "is back")
            elif state.outages:
                waiting = self._under_way(state, 1 << tier)
                for landing in product((LANDS, NEVER, LATER), repeat=len(waiting)):
                    m = Moment(state)
                    m.outages -= 1
                    ends = list(zip(waiting, landing, strict=True))
                    self._land(m, [call for call, end in ends if end == LANDS])
                    elsewhere = tuple(call for call in m.open if call.tier != tier)
                    m.open = (*elsewhere, *(call for call, end in ends if end == LATER))
                    for who, work in enumerate(m.work):
                        if work.phase in (SENT, DONE) and self._asks(m, work) == tier:
                            m.change(who, phase=FAILED)
                    m.up &= ~(1 << tier)
                    m.welcomed &= ~(1 << tier)
                    self._look(m, tier, ASKED)
                    self._end_the_start(m)
                    yield m.step(TIER_NAMES[tier], f"goes down{_told(waiting, landing)}", fault=True)

    def _asks(self, m: Moment, work: Work) -> int:
        return self._call(m, work, self._programs[work.program][work.at])[0]

    def _under_way(self, state: State, tiers: int) -> list[Open]:
        """The calls to some tiers that change something there, and have not landed."""
        m = Moment(state)
        found = list(m.open)
        for who, work in enumerate(m.work):
            if work.phase == SENT:
                tier, method, ids, contents = self._call(m, work, self._programs[work.program][work.at])
                if method != RECALL:
                    found.append(Open(self._tracked(who, work), tier, method, ids, contents))
        return [call for call in found if tiers >> call.tier & 1]

    def _land(self, m: Moment, calls: list[Open]) -> None:
        for call in calls:
            m.carry_out(call.tier, call.method, call.ids, call.contents)
            m.events.append(("lands", call.tier, call.method, call.ids))

    def _crash(self, state: State) -> Iterator[Step]:
        """The router dies, and the next one starts: with what was durable, and as many of the later commits as happen
        to be on the disk."""
        if not state.crashes:
            return
        waiting = self._under_way(state, 0b11)
        fates = (LANDS, NEVER, LATER) if self.scenario.outlives else (LANDS, NEVER)
        for landing in product(fates, repeat=len(waiting)):
            for kept, survived in enumerate(state.journal):
                m = Moment(state)
                m.crashes -= 1
                ends = list(zip(waiting, landing, strict=True))
                self._land(m, [call for call, end in ends if end == LANDS])
                m.open = tuple(_orphaned(call, survived) for call, end in ends if end == LATER)
                m.work = (
                    RESTING,
                    *(done if done.phase == IDLE else FINISHED for done in m.work[WRITER : REPLACER + 1]),  # type: ignore[assignment]
                    RESTING,
                )
                m.forgetting = IDLE if m.forgetting == IDLE else OVER
                m.reading = None
                m.journal = (survived,)
                m.commit("begin_recovery", survived.begin_recovery(noted=self.design.keeps_notes))
                m.welcomed = m.counted = 0
                m.looking = (ASKED, ASKED)
                m.starting = True
                self._end_the_start(m)
                lost = len(state.journal) - 1 - kept
                without = f", and {lost} commits are lost" if lost else ""
                yield m.step("the router", f"dies and starts again{without}{_told(waiting, landing)}", fault=True)

    def _losses(self, state: State) -> Iterator[Step]:
        if not state.losses:
            return
        book = state.book
        busy = state.work[SWEEPER].mine | state.work[MOVER].mine
        for id in members(book.living(TARGET) & ~busy):
            copy = content_in(state.held[TARGET], id)
            if copy and content_in(state.held[SOURCE], id) == copy and book.stray(SOURCE, id) == SUPERSEDED:
                m = Moment(state)
                m.losses -= 1
                m.held = (m.held[SOURCE], with_content(m.held[TARGET], id, 0))
                m.lost |= 1 << id
                if m.reading is not None:
                    m.reading = msgspec.structs.replace(m.reading, must=m.reading.must & ~(1 << id))
                yield m.step(TIER_NAMES[TARGET], f"loses {ID_NAMES[id]} behind the router's back", fault=True)


def _orphaned(call: Open, survived: Book) -> Open:
    """A call of a router that is dead. That it may still land is only thought of where something is noted."""
    noted = any(survived.stray(call.tier, id) for id in members(ALL)) or survived.replacing == 1 + call.tier
    return msgspec.structs.replace(call, by=THE_DEAD if noted else NOBODY, claim=0)


def _told(calls: list[Open], landing: tuple[int, ...]) -> str:
    ends = {NEVER: "never done", LANDS: "done", LATER: "still to be done"}
    told = [
        f"{call.method} {written(call.ids)} in {TIER_NAMES[call.tier]} {ends[end]}"
        for call, end in zip(calls, landing, strict=True)
    ]
    return f" ({'; '.join(told)})" if told else ""
