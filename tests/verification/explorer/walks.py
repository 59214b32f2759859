"""The walks: the steps of the router and its clients, without faults except those that a call may meet.

The router's work between two awaits is one step. A call to a tier is two steps: the tier carries it out, and the router
receives the answer; anything else may happen between them. A walk follows its table in `steps`; this module has the
effect of each line.
"""

from collections.abc import Callable, Iterator

import msgspec

from tests.verification.explorer.accounts import (
    ALL,
    EQUAL,
    GROUP,
    ID_NAMES,
    NONE,
    PENDING,
    QUARANTINED,
    SOURCE,
    SUPERSEDED,
    TARGET,
    TIER_NAMES,
    TIERS,
    A,
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
from tests.verification.explorer.states import (
    ASKED,
    DONE,
    FAILED,
    FINISHED,
    IDLE,
    LOSING,
    MOVER,
    NOWHERE,
    OVER,
    READY,
    RECONCILERS,
    REPLACER,
    RESTING,
    SENT,
    SILENT,
    SYNCING,
    THE_DEAD,
    WAITING,
    WORKERS,
    WRITER,
    Moment,
    Open,
    Reading,
    Scenario,
    State,
    Step,
    Work,
)
from tests.verification.explorer.steps import (
    CALLS,
    CATCHING_UP,
    GRACE,
    MOVING,
    RECALL,
    REPLACING,
    REPLACING_AND_WRITING,
    SWEEPING,
    SYNC,
    SYNC_NOTES,
    WRITE_UNDONE,
    WRITING,
    Design,
)

_REPLACED = 1 << A


# calls about a part of the changed records: those that may move, and those that the tier has not kept
_OF_WHAT_IS_WHOLE = (
    *("write the target", "read back", "forget the source"),
    *("forget what is not kept", "see that this is gone", "tell the tier again", "read it again"),
)


class Walks:
    """The walks of one scenario under one design."""

    def __init__(self, scenario: Scenario, design: Design) -> None:
        self.scenario = scenario
        self.design = design
        self._programs = design.programs
        self._work: dict[str, Callable[[Moment, int, Work], bool]] = {
            "look what is in the way": self._look_what_is_in_the_way,
            "look at what is noted now": self._look_at_what_is_noted,
            "see what its home has lost": self._see_what_its_home_has_lost,
            "bring it home": self._bring_home,
            "remove the notes": self._remove_the_notes,
            "see that the way is clear": self._see_that_the_way_is_clear,
            "claim what is free": self._claim_what_is_free,
            "note the copies to come": self._note_the_copies,
            "compare with the catalog": self._compare_with_the_catalog,
            "compare with what was given": self._compare_with_what_was_given,
            "flip": self._flip,
            "give up the rest": self._give_up,
            "reserve": self._reserve,
            "commit the write": self._commit_the_write,
            "answer": self._answer,
            "commit the batch": self._commit_the_batch,
            "see what the tier has yet to catch up with": self._see_what_it_is_behind_with,
            "see whether it is kept": self._see_whether_it_is_kept,
            "see that it is kept": self._see_that_it_is_kept,
            "end the redo": self._end_the_redo,
            "let go": self._let_go,
        }

    def steps(self, state: State) -> Iterator[Step]:
        """Yield every step that a worker or a client can take now."""
        # a start reconciles its tiers first, and serves no client until the tiers are active
        for who in RECONCILERS if state.starting else (MOVER, WRITER, REPLACER, *RECONCILERS):
            if state.work[who].phase == IDLE:
                yield from self._begin(state, who)
            else:
                yield from self._go_on(state, who)
        if not state.starting:
            yield from self._forget(state)
            yield from self._read(state)

    # --- what the faults use, too

    def is_held(self, m: Moment, tier: int) -> bool:
        """Return whether the tier is held because a call of an earlier router may still land there."""
        return self.design.holds_tiers and any(call.by == THE_DEAD and call.tier == tier for call in m.open)

    def is_accounted(self, m: Moment, tier: int) -> bool:
        """Return whether the tier is not being scanned."""
        return bool(m.counted >> tier & 1) or m.looking[tier] < LOSING

    def call_of(self, m: Moment, work: Work) -> tuple[int, str, int, int]:
        """Return the call of a worker's present line: the tier, the method, the ids, and the contents to write."""
        return self._call(m, work, self._programs[work.program][work.at])

    # --- the workers

    def _begin(self, state: State, who: int) -> Iterator[Step]:
        m = Moment(state)
        book = m.book
        if who == MOVER:
            if not m.moves:
                return
            source, target = self.scenario.moves[-m.moves]
            if m.up != 0b11 or not (self.is_accounted(m, source) and self.is_accounted(m, target)):
                return
            ids = book.living(source)
            m.moves -= 1
            is_behind = any(book.is_behind(id) for id in members(ids))
            if not ids or (is_behind and self.design.leaves_what_is_behind):
                yield m.step(WORKERS[who], "finds nothing to move")
                return
            yield from self._claimed(m, who, Work(MOVING, tier=target, ids=ids))
        elif who == WRITER:
            if self.scenario.late and m.is_up(SOURCE) and self.is_accounted(m, SOURCE):
                yield from self._claimed(m, who, Work(WRITING, tier=SOURCE, ids=1 << C))
        elif who == REPLACER:
            home = book.home(A)
            work = Work(REPLACING, tier=home, ids=1 << A) if home is not None else Work(WRITING, ids=1 << D)
            if self.scenario.batch and home is not None:
                work = Work(REPLACING_AND_WRITING, tier=home, ids=1 << A | 1 << C)
            needed = {work.tier, SOURCE} if _new_in(work) else {work.tier}
            can_begin = m.replaces and book.home(D) is None
            can_begin = can_begin and all(m.is_up(tier) and self.is_accounted(m, tier) for tier in needed)
            if can_begin:
                m.replaces -= 1
                yield from self._claimed(m, who, work)
        else:
            yield from self._reconcile(state, who)

    def _reconcile(self, state: State, who: int) -> Iterator[Step]:
        tier = RECONCILERS.index(who)
        m = Moment(state)
        page = m.book.noted(tier)
        if page and m.is_up(tier) and not self.is_held(m, tier):
            m.put(who, Work(SWEEPING, tier=tier, mine=page))
            self._run(m, who)
            yield m.step(WORKERS[who], f"begins with {written(page)}")
        m = Moment(state)
        claim = record_names(_REPLACED) if self.design.catches_up_claimed else 0
        is_owed = m.book.redo and m.book.home(A) == tier
        if is_owed and not claim & m.claimed() and self._can_catch_up(m, tier):
            m.put(who, Work(CATCHING_UP, tier=tier, claim=claim))
            self._run(m, who)
            yield m.step(WORKERS[who], "has its tier catch up")

    def _can_catch_up(self, m: Moment, tier: int) -> bool:
        """Return whether a try to carry out pending writes can succeed."""
        waits = self.design.holds_back_redo and self.is_held(m, tier)
        return m.is_up(tier) and self.is_accounted(m, tier) and not waits

    def _claimed(self, m: Moment, who: int, work: Work) -> Iterator[Step]:
        """Begin the change if all its names are free."""
        book = m.book
        names = record_names(work.ids | book.in_the_way(work.tier, work.ids))
        if self.design.claims_groups:
            names |= GROUP
        if names & m.claimed():
            return
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
            elif line != SYNC_NOTES and not self._work[line](m, who, work):
                return
            m.change(who, at=m.work[who].at + 1)

    def _call(self, m: Moment, work: Work, line: str) -> tuple[int, str, int, int]:
        """Return the call of a line: the tier, the method, the ids, and the contents that it writes."""
        method, changed = CALLS[line]
        tier = work.tier if changed else 1 - work.tier
        if line in ("read it at home", "read the copies that are left of it"):
            ids = work.old
        elif line in ("forget the copies", "see that they are gone"):
            ids = work.leaving
        elif line in _OF_WHAT_IS_WHOLE:
            ids = work.whole
        elif line in ("forget what is replaced", "see that it is gone"):
            ids = work.ids if self.scenario.lesser else 0
        elif line == "write the tier":
            tier, ids = SOURCE, _new_in(work)
        else:
            ids = work.ids
        return tier, method, ids, work.was

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
            named = m.carry_out(tier, method, ids, contents, lesser=self.scenario.lesser)
            m.change(who, phase=DONE if named else FAILED)
        yield m.step(WORKERS[who], f"“{line}” ({method} {written(ids)} in {TIER_NAMES[tier]})")
        if state.unkept and line in ("write the target", "tell the tier"):
            m = Moment(state)
            m.unkept -= 1
            m.change(who, phase=DONE)
            yield m.step(WORKERS[who], f"“{line}” is answered, and was not done", fault=True)
        if state.timeouts:
            m = Moment(state)
            m.timeouts -= 1
            m.change(who, phase=FAILED)
            if method != RECALL:
                m.open += (Open(who, tier, method, ids, contents),)
            yield m.step(WORKERS[who], f"“{line}” is not answered in time", fault=True)

    def _fail(self, m: Moment, who: int, work: Work, line: str) -> None:
        """Handle a call that has failed."""
        steps = self._programs[work.program]
        if line in ("read it at home", "read the copies that are left of it"):
            m.change(who, at=steps.index("bring it home") + 1, old=0, got=0)
            self._run(m, who)
        elif work.program in (WRITING, REPLACING_AND_WRITING) and work.at > steps.index("reserve"):
            m.commit("abandon", m.book.abandon(SOURCE, _new_in(work), remote=self.scenario.outlives))
            m.change(who, program=WRITE_UNDONE, at=0)
            self._run(m, who)
        elif work.program == CATCHING_UP:
            m.change(who, at=steps.index("let go"), whole=0, got=0)
            self._run(m, who)
        elif work.program == MOVING:
            m.change(who, at=steps.index("give up the rest"), whole=0, got=0)
            self._run(m, who)
        else:
            self._let_go(m, who, work)

    # --- the lines of the tables; each returns whether to go on to the next line

    def _look_what_is_in_the_way(self, m: Moment, who: int, work: Work) -> bool:
        strays = m.book.in_the_way(work.tier, work.ids)
        if strays and self.is_held(m, work.tier):
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
        m.commit("remove_notes", book.remove_notes(work.tier, at_home))
        elsewhere = noted & book.living(1 - work.tier)
        old = sum(1 << id for id in members(elsewhere) if book.stray(work.tier, id) in (PENDING, SUPERSEDED, EQUAL))
        aside = sum(1 << id for id in members(noted) if book.stray(work.tier, id) == QUARANTINED)
        leaving = noted & ~at_home & ~old & ~aside
        if "read it at home" not in self._programs[work.program]:
            leaving, old = leaving | old, 0
        m.change(who, old=old, leaving=leaving, mine=noted if work.program == SWEEPING else work.mine)
        return True

    def _see_what_its_home_has_lost(self, m: Moment, who: int, work: Work) -> bool:
        # an old content does not count as seen
        seen = sum(1 << id for id in members(work.old) if content_in(work.got, id) == m.book.content(id))
        # a record with a pending write at its home is not lost
        behind = sum(1 << id for id in members(work.old) if m.book.is_behind(id))
        m.change(who, leaving=work.leaving | seen, old=work.old & ~seen & ~behind, got=0)
        return True

    def _bring_home(self, m: Moment, who: int, work: Work) -> bool:
        for id in members(work.old):
            home = m.book.home(id)
            if content_in(work.got, id) and content_in(work.got, id) == m.book.content(id) and home == 1 - work.tier:
                m.commit("come_home", m.book.come_home(id, work.tier))
                m.touched(1 << id, by=who)
                m.moved(1 << id, 1 - work.tier)
            elif not content_in(work.got, id):
                m.commit("remove_notes", m.book.remove_notes(work.tier, 1 << id))
        m.change(who, old=0, got=0)
        return True

    def _remove_the_notes(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("remove_notes", m.book.remove_notes(work.tier, work.leaving & ~ids_in(work.got)))
        m.change(who, leaving=0, got=0)
        return True

    def _see_that_the_way_is_clear(self, m: Moment, who: int, work: Work) -> bool:
        left = m.book.in_the_way(work.tier, work.ids)
        if left and not left & ~work.mine:
            self._fail(m, who, work, "see that the way is clear")
            return False
        if left and work.mine:
            # a record that is not claimed has come in the way: claim again
            m.put(who, RESTING)
            m.moves += who == MOVER
            m.replaces += who == REPLACER
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
        was = work.was if self.design.compares else work.got
        m.change(who, whole=work.ids if work.got == was else 0, was=was, got=0)
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
        m.commit("reserve", m.book.reserve(SOURCE, _new_in(work)))
        return True

    def _commit_the_write(self, m: Moment, who: int, work: Work) -> bool:
        book = m.book
        for id in members(work.ids):
            book = book.settle_home(id, SOURCE)
        m.commit("commit_write", book)
        return True

    def _answer(self, m: Moment, who: int, work: Work) -> bool:
        m.told |= work.ids
        if work.program in (REPLACING, REPLACING_AND_WRITING):
            m.newest = content_in(work.was, A) + 1
        return True

    def _commit_the_batch(self, m: Moment, who: int, work: Work) -> bool:
        book = m.book
        for id in members(_new_in(work)):
            book = book.settle_home(id, SOURCE)
        # a record that was forgotten meanwhile counts as replaced before that, and is gone
        if book.home(A) is not None and not work.stale & _REPLACED:
            book = book.replace(work.tier, content_in(work.was, A) + 1)
            m.touched(_REPLACED, by=who)
        m.commit("commit_write", book)
        return True

    def _see_what_it_is_behind_with(self, m: Moment, who: int, work: Work) -> bool:
        home = m.book.home(A)
        if home is None or not m.book.redo or not self._can_catch_up(m, home):
            return self._let_go(m, who, work)
        m.change(who, tier=home, ids=_REPLACED, was=with_content(0, A, m.book.content(A)))
        return True

    def _see_whether_it_is_kept(self, m: Moment, who: int, work: Work) -> bool:
        m.change(who, whole=0 if work.got == work.was else work.ids, got=0)
        return True

    def _see_that_it_is_kept(self, m: Moment, who: int, work: Work) -> bool:
        if work.whole and work.got != work.was:
            self._fail(m, who, work, "see that it is kept")
            return False
        m.change(who, whole=0, got=0)
        return True

    def _end_the_redo(self, m: Moment, who: int, work: Work) -> bool:
        m.commit("end_pending", m.book.end_pending())  # unless it was forgotten meanwhile, and there is none
        return True

    def _let_go(self, m: Moment, who: int, work: Work) -> bool:
        """Release the claim, at once or when the calls in doubt are resolved."""
        mine = [call for call in m.open if call.by == who and not call.claim]
        if mine and self.design.keeps_claims:
            kept = msgspec.structs.replace(mine[-1], claim=work.claim)
            m.open = (*[call for call in m.open if call is not mine[-1]], kept)
        m.put(who, FINISHED if who == WRITER else RESTING)
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
            if struck:
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
                m.reading = Reading(must=m.told & ALL & ~m.begun & ~m.lost, gone=m.gone, newest=m.newest)
                yield m.step("the read", "begins")
            return
        for tier in TIERS:
            if read.got[tier] == ASKED:
                m = Moment(state)
                answer = m.held[tier] if m.is_up(tier) else SILENT
                if not self.is_accounted(m, tier):
                    answer = SILENT  # the answer names the tier as missing
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
        """Return the rule that the result of a read breaks; None if it breaks none."""
        book = m.book
        for id in members(ALL):
            home, left = book.home(id), content_in(read.left, id)
            before = home
            if left and self.design.knows_former_homes:
                before = None if left == NOWHERE else left - 1
            shown = []
            for tier in TIERS:
                copy = 0 if read.got[tier] == SILENT else content_in(read.got[tier], id)
                if copy and (not self.design.knows_homes or (home is not None and tier == before)):
                    shown.append(copy)
            if self.design.knows_homes:
                del shown[1:]  # a record that is already shown is skipped
            if self.design.serves_redo and book.is_behind(id):
                shown = [book.content(id)]
            name = ID_NAMES[id]
            if len(shown) > 1:
                return f"an answer holds {name} twice (rule 2)"
            if shown and read.gone >> id & 1:
                return f"{name} was forgotten, and is in the answer of a read that began after that (rule 11)"
            if id == A and any(content < read.newest for content in shown):
                return "an old a is in the answer of a read that began after it was replaced (rule 1)"
            silent = any(read.got[tier] == SILENT for tier in (home, before) if tier is not None)
            if read.must & ~m.begun & ~m.lost & 1 << id and not shown and not silent:
                return f"{name} was acknowledged, and a read that began after that misses it (rules 1, 11)"
        return None


def _new_in(work: Work) -> int:
    """Return the new records of a write, without the replaced one. They go to the source."""
    return work.ids & ~_REPLACED
