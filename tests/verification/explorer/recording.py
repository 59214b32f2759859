"""Compares a real run with the model: each observed step of the router must be a step of the model at that point.

Observable are the calls that tiers carry out, the commits of the catalog, the moments when commits become durable, and
the ends of reads. After each of them, the real catalog and the real stores must be as in the model. Steps that cannot
be observed (the router receives an answer, a claim is released) may have happened in any way that the model allows. So
a run is followed in all states in which it may be; if none is left, it has left the model.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final

import msgspec

from a2m_router.catalog.active_reads import ActiveReads, Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.strays import NotedStray
from a2m_router.placement.scanning import Scanner
from tests.support.federated import Steered, Trial, held_by, settings_of
from tests.verification.explorer.accounts import (
    EQUAL,
    ID_NAMES,
    IDS,
    PENDING,
    QUARANTINED,
    SUPERSEDED,
    TIER_NAMES,
    TIERS,
    UNWANTED,
    Book,
    with_content,
)
from tests.verification.explorer.machine import Machine
from tests.verification.explorer.rules import is_quiescent, told
from tests.verification.explorer.states import Event, Label, Scenario, State
from tests.verification.explorer.steps import BUILT, RECALL, Design

# The two tiers of the model; every record goes to the tier that its write names. While a test holds a call, no other
# call times out. Where a call must time out, time jumps.
TWO_TIERS: Final = settings_of(
    """
[policy]
pass = "explicit"
[tiers.source]
kind = "episodic"
command = ["-"]
timeout = "60s"
[tiers.target]
kind = "semantic"
command = ["-"]
timeout = "60s"
"""
)

_KINDS: Final = {
    Stray.PENDING: PENDING,
    Stray.SUPERSEDED: SUPERSEDED,
    Stray.UNWANTED: UNWANTED,
    Stray.EQUAL: EQUAL,
    Stray.QUARANTINED: QUARANTINED,
}

# the catalog's changes that the model has
CHANGES: Final = (
    *("reserve", "commit_write", "abandon", "end_pending", "note_copies", "flip", "give_up", "remove_notes"),
    *("come_home", "forget", "begin_recovery", "adopt", "lose", "decide_groups"),
)


class Left(Exception):
    """A run has left the model. The message has the event, and the states in which the run might have been."""


def book_of(catalog: Catalog) -> Book:
    """Return a real catalog as a book of the model."""
    book = Book()
    entries = catalog.records.find(ID_NAMES)
    for id in IDS:
        entry = entries.get(ID_NAMES[id])
        if entry is not None:
            # a replacement has the next revision
            book = book.enter(id, TIER_NAMES.index(entry.home), 1 + entry.revision)
    for tier in TIERS:
        for name in catalog.queries.accounted(TIER_NAMES[tier], filter(catalog.records.is_reserved, ID_NAMES)):
            book = book.reserve(tier, 1 << ID_NAMES.index(name))
        if catalog.pending.ids_in(TIER_NAMES[tier]):
            book = msgspec.structs.replace(book, redo=1 + tier)
    for tier in TIERS:
        name = TIER_NAMES[tier]
        asked = [NotedStray(id, name, Stray.PENDING, None, None) for id in ID_NAMES]
        book = book.remove_notes(tier, 0b1111)
        for stray in catalog.strays.still_noted(name, asked):
            book = book.note(tier, 1 << ID_NAMES.index(stray.id), _KINDS[stray.kind])
    forgotten = sum(1 << id for id in IDS if catalog.tombstones.is_forgotten(ID_NAMES[id]))
    return msgspec.structs.replace(book, forgotten=forgotten)


def held_in(fed: Trial) -> tuple[int, int]:
    """Return what the real stores hold, as in the model. A content is the record's name and the content's number."""
    held = []
    for tier in TIERS:
        copies = 0
        for record in held_by(fed.stores[TIER_NAMES[tier]]):
            copies = with_content(copies, ID_NAMES.index(record["id"]), int(record["content"][1:]))
        held.append(copies)
    return held[0], held[1]


class Followed:
    """A run, followed in the model."""

    def __init__(self, scenario: Scenario, design: Design = BUILT) -> None:
        self._machine = Machine(scenario, design)
        # the states in which the run may be, each with the events of its last step that are still to be observed
        self._places: set[tuple[State, tuple[Event, ...]]] = {(self._machine.initial(), ())}
        self.seen: list[str] = []

    def happens(self, event: Event, book: Book | None, held: tuple[int, int] | None) -> None:
        """Follow an event. Raises Left if the model does not have it, or if the catalog or the stores differ after
        it."""
        before = self._places
        places = set()
        for state, pending in before:
            if pending:
                if pending[0] == event:
                    places.add((state, pending[1:]))
                continue
            if self._may_be_late(event):
                places.add((state, ()))
            for quiet in self._quietly(state):
                for label, after, _ in self._machine.successors(quiet):
                    if label.events and label.events[0] == event and not _is_crash(label):
                        places.add((after, label.events[1:]))
        self.seen.append(str(event))
        self._places = {
            (state, pending)
            for state, pending in places
            if pending or ((book is None or state.book == book) and (held is None or state.held == held))
        }
        if not self._places:
            possible = [told(state) for state, _ in places] or [told(state) for state, _ in before]
            raise Left("\n  ".join([f"{event}: {book}, {held}", *self.seen, "the model has:", *possible[:5]]))

    def _may_be_late(self, event: Event) -> bool:
        """Return whether the event may be a late read that changes nothing, and whose caller waits no more."""
        scenario = self._machine.scenario
        return event[0] == "lands" and event[2] == RECALL and bool(scenario.timeouts or scenario.outages)

    def is_durable(self) -> None:
        """Note that all commits are durable."""
        self.seen.append("sync")
        self._places = {
            (msgspec.structs.replace(state, journal=state.journal[-1:]), pending) for state, pending in self._places
        }

    def crashes(self) -> None:
        """Note that the router dies with all its commits on the disk."""
        self.seen.append("crash")
        places = set()
        for state, _ in self._places:
            for quiet in self._quietly(state):
                for label, after, _ in self._machine.successors(quiet):
                    if _is_crash(label) and after.journal[0] == quiet.book:
                        places.add((after, tuple(event for event in label.events if event[0] == "commit")))
        self._places = places

    def rests(self) -> bool:
        """Return whether the run may be in a state in which nothing is left to do."""
        return any(
            is_quiescent(quiet) for state, pending in self._places if not pending for quiet in self._quietly(state)
        )

    def _quietly(self, state: State) -> Iterable[State]:
        """Return the states that the run may reach without an event."""
        found = {state}
        waiting = [state]
        while waiting:
            at = waiting.pop()
            for label, after, _ in self._machine.successors(at):
                # a step that waits for the disk is taken when the sync was observed
                waits = label.syncs and len(at.journal) > 1
                if not label.events and not waits and not _is_crash(label) and after not in found:
                    found.add(after)
                    waiting.append(after)
        return found


def _is_crash(label: Label) -> bool:
    return label.fault and label.who == "the router"


class Recorder:
    """Weather that passes everything on to `steer`, and reports it to `followed`. `fed` is the run, if it has begun."""

    def __init__(self, followed: Followed, steer: Steered) -> None:
        self.followed = followed
        self.fed: Trial | None = None
        self.wrong: Left | None = None
        self._steer = steer
        self._listening = False
        self._book: Book | None = None
        self._at_death: Book | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Record everything within this block."""
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def dies(self) -> None:
        """Ignore all that this router still does. The next one starts with the present state."""
        self._listening = False
        self.fed = None
        self._at_death = self._book

    def starts_again(self) -> None:
        """Note that the next router is about to open its catalog."""
        self._book = self._at_death
        self.followed.crashes()

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        async def land() -> bytes | None:
            answer = await go_on()
            event = _landing(tier, message)
            if event is not None:
                self._tell(event)
            return answer

        return await self._steer(tier, message, land)

    def committed(self, catalog: Catalog, name: str) -> None:
        book = book_of(catalog)
        if book != self._book:
            self._book = book
            self._tell(("commit", name))

    def read(self) -> None:
        self._tell(("read",))

    def synced(self) -> None:
        if self._listening:
            self.followed.is_durable()

    def _tell(self, event: Event) -> None:
        if self._listening and self.wrong is None:
            held = None if self.fed is None else held_in(self.fed)
            try:
                self.followed.happens(event, self._book, held)
            except Left as wrong:
                self.wrong = wrong  # the router must not get this exception; `wrong` keeps it for the test


def _landing(tier: str, message: bytes) -> Event | None:
    """Return a call to a tier as an event of the model; None for a call that the model does not have."""
    call = msgspec.json.decode(message)
    method, params = call["method"], call.get("params") or {}
    if method == "memory/recall":
        if "query" in params:
            return "lands", TIER_NAMES.index(tier), "question"
        ids = params["where"]["id"]
    elif method == "memory/remember":
        ids = [record["id"] for record in params["records"]]
    elif method == "memory/forget":
        ids = params["ids"]
    else:
        return None
    mask = sum(1 << ID_NAMES.index(id) for id in ids)
    return "lands", TIER_NAMES.index(tier), method.removeprefix("memory/"), mask


def record(recorder: Recorder, replace: Callable[[object, str, Any], None]) -> None:
    """Record every change of a catalog, and every read. `replace` sets an attribute for the duration of a test."""
    for name in CHANGES:
        replace(Catalog, name, _recorded(getattr(Catalog, name), name, recorder))
    synced, reading = Catalog.synced, ActiveReads.reading

    @wraps(synced)
    async def and_told(self: Catalog) -> None:
        await synced(self)
        recorder.synced()

    @contextmanager
    def until_told(self: ActiveReads) -> Iterator[Reading]:
        with reading(self) as read:
            yield read
        recorder.read()

    async def nothing(self: Scanner, tier: str, entries: Sequence[Entry]) -> list[Entry]:
        """Return nothing: in the model no file is set back, so there is nothing to look for."""
        return []

    replace(Catalog, "synced", and_told)
    replace(Scanner, "lacking", nothing)
    replace(ActiveReads, "reading", until_told)


def _recorded(change: Callable[..., Any], name: str, recorder: Recorder) -> Callable[..., Any]:
    @wraps(change)
    def and_told(self: Catalog, *given: Any, **named: Any) -> Any:
        result = change(self, *given, **named)
        recorder.committed(self, name)
        return result

    return and_told
