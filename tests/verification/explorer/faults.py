"""The faults of a small federation, and the recovery from them: outages, calls without an answer, a crash at any step.

A crash loses what was not durable, from any commit on; each call under way has landed, will land, or will not. The
recovery is here, too: a tier that comes up is welcomed once no earlier call can land there any more.
"""

from collections.abc import Iterator
from itertools import product

import msgspec

from tests.verification.explorer.accounts import (
    ALL,
    ID_NAMES,
    SOURCE,
    SUPERSEDED,
    TARGET,
    TIER_NAMES,
    TIERS,
    Book,
    content_in,
    ids_in,
    members,
    with_content,
    written,
)
from tests.verification.explorer.states import (
    ASKED,
    DONE,
    FAILED,
    FINISHED,
    IDLE,
    LANDS,
    LATER,
    LOSING,
    MOVER,
    NEVER,
    NOBODY,
    OVER,
    RECONCILERS,
    RESTING,
    SENT,
    THE_DEAD,
    WRITER,
    Moment,
    Open,
    State,
    Step,
)
from tests.verification.explorer.steps import RECALL
from tests.verification.explorer.walks import Walks


class Faults:
    """The faults of a scenario, and the steps that recover from them."""

    def __init__(self, walks: Walks) -> None:
        self._walks = walks
        self._design = walks.design
        self._scenario = walks.scenario

    def steps(self, state: State) -> Iterator[Step]:
        """Yield every fault that is possible now, and every step of a recovery."""
        yield from self._welcomes(state)
        yield from self._settlements(state)
        yield from self._outages(state)
        yield from self._crash(state)
        yield from self._losses(state)

    # --- tiers that come up, calls that land late, faults

    def _welcomes(self, state: State) -> Iterator[Step]:
        """Yield the steps of welcoming a tier that has come up: a scan, and the loss of records that it lacks."""
        for tier in TIERS:
            m = Moment(state)
            if not m.is_up(tier) or m.welcomed >> tier & 1 or self._walks.is_held(m, tier):
                continue
            book = m.book
            if m.looking[tier] >= LOSING:
                self._end_the_scan(m, tier, m.looking[tier] - LOSING)
                yield m.step("the router", f"has taken {TIER_NAMES[tier]} into the account, as far as it is there")
                continue
            missing = 0
            if self._design.counts and not m.counted >> tier & 1:
                m.commit("adopt", m.book.adopt(tier, m.held[tier]))
                self._have_changed(m, book)
                missing = self._not_found(m, tier)
            if missing:
                m.look(tier, LOSING | missing)
                yield m.step("the router", f"does not find {written(missing)} in {TIER_NAMES[tier]}")
            else:
                self._end_the_scan(m, tier, 0)
                yield m.step("the router", f"has taken {TIER_NAMES[tier]} into the account")

    def _not_found(self, m: Moment, tier: int) -> int:
        """Return the records that a scan takes for lost: they live in the tier, and have no copy there and no pending
        write."""
        missing = m.book.living(tier) & ~ids_in(m.held[tier])
        if self._design.spares_what_was_behind:
            missing &= ~sum(1 << id for id in members(missing) if m.book.is_behind(id))
        return missing

    def _end_the_scan(self, m: Moment, tier: int, missing: int) -> None:
        m.commit("lose", m.book.lose(missing, spares=self._design.spares_what_is_behind))
        if self._design.counts and m.counted | 1 << tier == 0b11 and m.counted != 0b11:
            before = m.book
            m.commit("decide_groups", before.decide_groups())
            self._have_changed(m, before)
        m.look(tier, ASKED)
        m.welcomed |= 1 << tier
        m.counted |= 1 << tier
        self._end_the_start(m)

    def _have_changed(self, m: Moment, before: Book) -> None:
        """Note that records have new homes without a move."""
        for home in TIERS:
            came = m.book.living(home) & before.living(1 - home)
            m.touched(came)
            m.moved(came, 1 - home)

    def _end_the_start(self, m: Moment) -> None:
        # the start waits for every tier that is up and is not held for earlier calls
        waited_for = sum(1 << tier for tier in TIERS if m.is_up(tier) and not self._walks.is_held(m, tier))
        m.starting = m.starting and bool(waited_for & ~m.welcomed)

    def _settlements(self, state: State) -> Iterator[Step]:
        """Yield the ends of calls without an answer: the call lands, or cannot land any more. Its claim is released."""
        for call in state.open:
            told = f"{call.method} {written(call.ids)} in {TIER_NAMES[call.tier]}"
            m = Moment(state)
            m.open = tuple(other for other in m.open if other is not call)
            m.events.append(("lands", call.tier, call.method, call.ids))
            m.carry_out(call.tier, call.method, call.ids, call.contents, lesser=self._scenario.lesser)
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
                        if work.phase in (SENT, DONE) and self._walks.call_of(m, work)[0] == tier:
                            m.change(who, phase=FAILED)
                    m.up &= ~(1 << tier)
                    m.welcomed &= ~(1 << tier)
                    m.look(tier, ASKED)
                    self._end_the_start(m)
                    yield m.step(TIER_NAMES[tier], f"goes down{_told(waiting, landing)}", fault=True)

    def _under_way(self, state: State, tiers: int) -> list[Open]:
        """Return the calls that change something in these tiers and have not landed."""
        m = Moment(state)
        found = list(m.open)
        for who, work in enumerate(m.work):
            if work.phase == SENT:
                tier, method, ids, contents = self._walks.call_of(m, work)
                if method != RECALL:
                    found.append(Open(who, tier, method, ids, contents))
        return [call for call in found if tiers >> call.tier & 1]

    def _land(self, m: Moment, calls: list[Open]) -> None:
        for call in calls:
            m.carry_out(call.tier, call.method, call.ids, call.contents, lesser=self._scenario.lesser)
            m.events.append(("lands", call.tier, call.method, call.ids))

    def _crash(self, state: State) -> Iterator[Step]:
        """Yield every crash: the router dies, and the next one starts with the durable commits, and with as many of the
        later ones as may be on the disk."""
        if not state.crashes:
            return
        waiting = self._under_way(state, 0b11)
        fates = (LANDS, NEVER, LATER) if self._scenario.outlives else (LANDS, NEVER)
        for landing in product(fates, repeat=len(waiting)):
            for kept, survived in enumerate(state.journal):
                m = Moment(state)
                m.crashes -= 1
                ends = list(zip(waiting, landing, strict=True))
                self._land(m, [call for call, end in ends if end == LANDS])
                m.open = tuple(self._orphaned(call, survived) for call, end in ends if end == LATER)
                late = m.work[WRITER]
                m.work = (RESTING, late if late.phase == IDLE else FINISHED, RESTING, RESTING, RESTING)
                m.forgetting = IDLE if m.forgetting == IDLE else OVER
                m.reading = None
                m.journal = (survived,)
                after = survived.begin_recovery(
                    noted=self._design.keeps_notes, gives_up=self._design.gives_up, remote=self._scenario.outlives
                )
                m.commit("begin_recovery", after)
                m.welcomed = m.counted = 0
                m.looking = (ASKED, ASKED)
                m.starting = True
                self._end_the_start(m)
                lost = len(state.journal) - 1 - kept
                without = f", and {lost} commits are lost" if lost else ""
                yield m.step("the router", f"dies and starts again{without}{_told(waiting, landing)}", fault=True)

    def _orphaned(self, call: Open, survived: Book) -> Open:
        """Return a call of a dead router, with whether the next router takes it into account."""
        noted = any(survived.stray(call.tier, id) for id in members(ALL)) or survived.redo == 1 + call.tier
        is_thought_of = noted or self._design.holds_unnoted
        return msgspec.structs.replace(call, by=THE_DEAD if is_thought_of else NOBODY, claim=0)

    def _losses(self, state: State) -> Iterator[Step]:
        if not state.losses:
            return
        book = state.book
        busy = state.work[RECONCILERS[SOURCE]].mine | state.work[MOVER].mine
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


def _told(calls: list[Open], landing: tuple[int, ...]) -> str:
    ends = {NEVER: "never done", LANDS: "done", LATER: "still to be done"}
    told = [
        f"{call.method} {written(call.ids)} in {TIER_NAMES[call.tier]} {ends[end]}"
        for call, end in zip(calls, landing, strict=True)
    ]
    return f" ({'; '.join(told)})" if told else ""
