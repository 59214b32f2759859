"""The event log against the plainest model: a list of all events.

A2M_EXAMPLES=50 runs fifty times as many examples.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.protocol.server.event_log import UNDERWAY, EventLog, Follower, Polled
from a2m_router.protocol.wire.events import Event, Place, SessionClosed, Sight, Written
from tests.support.examples import examples

SHARED: Final = frozenset({"agora"})
OWNERS: Final = (None, "a", "b")
TIERS: Final = ("working", "agora")
BASE64: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"


class Reader(msgspec.Struct, frozen=True):
    """A client that polls, with its filter."""

    owner: str | None = None
    kinds: tuple[str, ...] | None = None

    @property
    def sight(self) -> Sight:
        return Sight(self.owner, SHARED)


class Happening(msgspec.Struct, frozen=True):
    """An event of the model, with its owner."""

    number: int
    kind: str
    owner: str | None
    tier: str

    def event(self) -> Event:
        if self.kind == "written":
            return Written(at=self.number, id=f"{self.number}", place=Place(self.owner, self.tier))
        return SessionClosed(at=self.number, owner=self.owner, session=f"{self.number}")

    def is_for(self, reader: Reader) -> bool:
        if reader.kinds is not None and self.kind not in reader.kinds:
            return False
        shared = self.kind == "written" and self.tier in SHARED
        return reader.owner is None or self.owner in (None, reader.owner) or shared


def number_of(told: Mapping[str, Any]) -> int:
    return int(told["id"] if told["kind"] == "written" else told["session"])


# --- the drawn steps


class Append(msgspec.Struct, frozen=True):
    kind: str
    owner: str | None
    tier: str


class Poll(msgspec.Struct, frozen=True):
    who: int
    limit: int | None
    anew: bool


class Forge(msgspec.Struct, frozen=True):
    """A poll with a cursor that this log did not return: a corrupted one, or one of an earlier log."""

    who: int
    limit: int | None
    how: int
    place: int


class Restart(msgspec.Struct, frozen=True):
    pass


class Follow(msgspec.Struct, frozen=True):
    who: int


class Take(msgspec.Struct, frozen=True):
    """Take up to so many notifications of a follower."""

    who: int
    most: int


class Unfollow(msgspec.Struct, frozen=True):
    who: int


Step = Append | Poll | Forge | Restart | Follow | Take | Unfollow

limits = st.sampled_from([None, None, 1, 2, 3, 100])
whoever = st.integers(0, 3)
readers = st.builds(
    Reader, st.sampled_from(OWNERS), st.sampled_from([None, None, ("written",), ("session_closed", "nonsense"), ()])
)
appends = st.builds(
    Append, st.sampled_from(["written", "written", "session_closed"]), st.sampled_from(OWNERS), st.sampled_from(TIERS)
)
polls = st.builds(Poll, whoever, limits, st.integers(0, 9).map(lambda drawn: drawn == 0))
steps = st.one_of(
    appends, appends, appends, appends, polls, polls, polls,
    st.builds(Forge, whoever, limits, st.integers(0, 6), st.integers(0, 63)),
    st.builds(Follow, whoever), st.builds(Take, whoever, st.integers(1, 4)), st.builds(Unfollow, whoever),
    st.integers(0, 9).map(lambda drawn: Restart() if drawn == 0 else Append("written", None, "working")),
)  # fmt: skip


class Position(msgspec.Struct, frozen=True):
    """The range of positions of a reader's cursor: after the last event that it got, at most at its next one."""

    cursor: str
    earliest: int
    latest: int


class Subscription(msgspec.Struct):
    follower: Follower
    position: int
    wakes: list[int]


class Machine:
    """A log and its model. Each step raises AssertionError for an answer that cannot be true."""

    def __init__(self, retained: int, readers: Sequence[Reader]) -> None:
        self.retained = retained
        self.readers = readers
        self.cursors: list[str] = []
        self.others: list[str] = []  # cursors of earlier logs
        self._start()

    def _start(self) -> None:
        self.log = EventLog(self.retained)
        self.happened: list[Happening] = []
        self.positions: dict[int, Position] = {}
        self.following: dict[int, Subscription] = {}

    @property
    def first(self) -> int:
        return max(0, len(self.happened) - self.retained)

    def carry_out(self, step: Step) -> None:
        match step:
            case Append():
                happening = Happening(len(self.happened), step.kind, step.owner, step.tier)
                self.happened.append(happening)
                self.log.append(happening.event())
                for subscription in self.following.values():
                    assert len(subscription.wakes) == 1
                    subscription.wakes.clear()
            case Poll():
                self._poll(step.who % len(self.readers), step.limit, anew=step.anew)
            case Forge():
                self._forge(step.who % len(self.readers), step)
            case Restart():
                self.others += [position.cursor for position in self.positions.values()]
                self._start()
            case Follow():
                self._unfollow(step.who % len(self.readers))
                self._follow(step.who % len(self.readers))
            case Take():
                self._take(step.who % len(self.readers), step.most)
            case Unfollow():
                self._unfollow(step.who % len(self.readers))

    def _poll(self, who: int, limit: int | None, *, anew: bool) -> None:
        reader, before = self.readers[who], self.positions.get(who)
        if anew or before is None:
            polled = self._asked(reader, None, limit)
            assert (polled.events, polled.more, polled.reset) == ([], False, False)
            self.positions[who] = Position(polled.cursor, len(self.happened), len(self.happened))
            return
        polled = self._asked(reader, before.cursor, limit)
        assert polled.reset or before.earliest >= self.first or before.latest >= self.first
        assert not polled.reset or before.earliest < self.first
        self._told(who, polled, before.earliest, limit)

    def _forge(self, who: int, forge: Forge) -> None:
        own = self.positions[who].cursor if who in self.positions else self._asked(self.readers[who], None, None).cursor
        another = self._asked(self.readers[who], None, None).cursor
        place = forge.place % len(own)
        changed = next(char for char in BASE64[forge.place :] + BASE64 if char != own[place])
        cursor = [
            self.others[-1] if self.others else "",
            own[:place],
            own[:place] + changed + own[place + 1 :],
            own[:place] + another[place:],
            own + own[place:],
            own[:place] + "\xe9 \ud800"[forge.place % 3] + own[place + 1 :],
            own.replace("-", "+").replace("_", "/") + "=" * (forge.place % 3),
        ][forge.how]
        if cursor in (own, another):
            return
        polled = self._asked(self.readers[who], cursor, forge.limit)
        assert polled.reset
        self._told(who, polled, self.first, forge.limit)

    def _told(self, who: int, polled: Polled, start: int, limit: int | None) -> None:
        """Assert that a poll returned the retained events for this reader from `start` on, and at most `limit`."""
        reader = self.readers[who]
        due = [each for each in self.happened[max(start, self.first) :] if each.is_for(reader)]
        told = due[:limit]
        assert polled.events == [each.event().seen_by(reader.sight) for each in told]
        assert polled.more == (len(due) > len(told))
        end = len(self.happened)
        earliest = (told[-1].number + 1 if told else start) if polled.more else end
        self.positions[who] = Position(polled.cursor, earliest, due[len(told)].number if polled.more else end)

    def _asked(self, reader: Reader, cursor: str | None, limit: int | None) -> Polled:
        polled = self.log.poll(reader.sight, cursor, limit, reader.kinds)
        self.cursors.append(polled.cursor)
        return polled

    def _follow(self, who: int) -> None:
        wakes: list[int] = []
        reader = self.readers[who]
        follower = self.log.follow(reader.sight, reader.kinds, lambda: wakes.append(1))
        self.following[who] = Subscription(follower, len(self.happened), wakes)

    def _unfollow(self, who: int) -> None:
        if who in self.following:
            ended = self.following.pop(who)
            ended.follower.close()
            ended.follower.close()  # a second close has no effect
            self.carry_out(Append("written", None, "working"))
            assert ended.wakes == []

    def _take(self, who: int, most: int) -> None:
        if who not in self.following:
            return
        subscription, reader = self.following[who], self.readers[who]
        for _ in range(most):
            start = max(subscription.position, self.first)
            due = next((each for each in self.happened[start:] if each.is_for(reader)), None)
            notice = subscription.follower.next()
            assert subscription.follower.next() == notice
            if due is None:
                assert notice is None
                subscription.position = len(self.happened)
                return
            assert notice is not None
            told = due.event().seen_by(reader.sight)
            assert msgspec.json.decode(notice.line) == {"jsonrpc": "2.0", "method": "memory/event", "params": told}
            subscription.follower.passed()
            subscription.position = due.number + 1


@pytest.mark.rule(n=10)
@examples(40)
@given(
    retained=st.integers(1, 8),
    readers=st.lists(readers, min_size=1, max_size=4),
    steps=st.lists(steps, min_size=10, max_size=60),
)
def test_successive_polls_see_every_retained_event_once_in_order(
    retained: int, readers: list[Reader], steps: list[Step]
) -> None:
    machine = Machine(retained, readers)
    for step in steps:
        machine.carry_out(step)
    for who in range(len(readers)):
        machine.carry_out(Poll(who, None, anew=False))
        machine.carry_out(Take(who, retained + 1))
    # cursors have one length and are all different, so that they reveal nothing
    assert len({len(cursor) for cursor in machine.cursors}) == 1
    assert len(set(machine.cursors)) == len(machine.cursors)


@examples(15)
@given(
    owner=st.sampled_from(["a", "b"]),
    story=st.lists(appends | limits.map(lambda limit: Poll(0, limit, anew=False)), max_size=40),
)
def test_a_reader_cannot_tell_whether_others_did_anything(owner: str, story: list[Append | Poll]) -> None:
    reader = Reader(owner)

    def seen(*, others_too: bool) -> list[tuple[Any, ...]]:
        log = EventLog(100)
        polled = log.poll(reader.sight, None, None, None)
        seen = [observed(polled)]
        for number, step in enumerate(story):
            if isinstance(step, Poll):
                polled = log.poll(reader.sight, polled.cursor, step.limit, None)
                seen.append(observed(polled))
            elif others_too or Happening(number, step.kind, step.owner, step.tier).is_for(reader):
                log.append(Happening(number, step.kind, step.owner, step.tier).event())
        return seen

    assert seen(others_too=True) == seen(others_too=False)


def observed(polled: Polled) -> tuple[Any, ...]:
    """Return everything that a reader without the key can observe."""
    return polled.events, polled.more, polled.reset, len(polled.cursor)


def test_no_byte_of_a_cursor_stands_for_a_position() -> None:
    log = EventLog(4)
    cursors = [base64.urlsafe_b64decode(log.poll(Sight(), None, None, None).cursor) for _ in range(200)]
    # no byte is the same in 200 cursors
    assert all(len(set(column)) > 1 for column in zip(*cursors, strict=True))


def test_a_cursor_of_another_log_is_not_taken_at_the_same_position() -> None:
    logs = [EventLog(4), EventLog(4)]
    for log in logs:
        log.append(written(1))
    other = logs[0].poll(Sight(), None, None, None).cursor
    polled = logs[1].poll(Sight(), other, None, None)
    assert polled.reset
    assert [event["id"] for event in polled.events] == ["1"]


def test_without_a_limit_a_poll_returns_a_thousand_events() -> None:
    """Without a limit a poll returns a thousand events; later polls return the rest."""
    log = EventLog(3000)
    cursor = log.poll(Sight(), None, None, None).cursor
    for number in range(2500):
        log.append(written(number))
    told: list[str] = []
    sizes = []
    more = True
    while more:
        polled = log.poll(Sight(), cursor, None, None)
        cursor, more = polled.cursor, polled.more
        sizes.append(len(polled.events))
        told += [event["id"] for event in polled.events]
    assert told == [f"{number}" for number in range(2500)]
    assert sizes == [1000, 1000, 500]


class Counted:
    """An event that counts how often it is read."""

    def __init__(self) -> None:
        self.looks = 0

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        self.looks += 1
        assert self.looks <= 30
        return None if reader.owner == "nobody" else {"kind": "written", "id": "x"}


def test_a_poll_near_the_end_of_a_long_log_reads_only_what_is_new() -> None:
    counted: Any = Counted()
    log = EventLog(100_000)
    for _ in range(100_005):
        log.append(counted)
    for sight in (Sight(), Sight("nobody")):
        counted.looks = 0
        cursor = log.poll(sight, None, None, None).cursor
        follower = log.follow(sight, None, lambda: None)
        for _ in range(100):
            cursor = log.poll(sight, cursor, None, None).cursor
            follower.next()
        assert counted.looks == 0
        for _ in range(10):
            log.append(counted)
            cursor = log.poll(sight, cursor, 1, None).cursor
            if follower.next() is not None:
                follower.passed()


def test_a_follower_is_told_the_call_that_caused_an_event() -> None:
    log = EventLog(4)
    follower = log.follow(Sight(), None, lambda: None)
    running, other = Call(), Call()
    token = UNDERWAY.set(running)
    log.append(written(1))
    log.append(written(2), other)
    UNDERWAY.reset(token)
    log.append(written(3))
    causes = []
    while (notice := follower.next()) is not None:
        causes.append(notice.cause)
        follower.passed()
    assert causes == [running, other, None]


def test_whoever_falls_behind_goes_on_with_the_oldest_event_that_is_kept() -> None:
    log = EventLog(3)
    follower = log.follow(Sight("a"), None, lambda: None)
    for number in range(10):
        log.append(written(number, owner="a" if number % 2 else "b"))
    numbers = []
    while (notice := follower.next()) is not None:
        numbers.append(msgspec.json.decode(notice.line)["params"]["id"])
        follower.passed()
    assert numbers == ["7", "9"]


class Call:
    connection: object = None
    answered = False


def written(number: int, owner: str | None = None) -> Written:
    return Written(at=number, id=f"{number}", place=Place(owner, "working"))
