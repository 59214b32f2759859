"""The log of events (§4.12): bounded, read by polling, followed by connections that take notifications (§4.13).

Rules:
- an event is appended in the same step, without waiting, in which what it tells becomes true: the order of the log is
  the order of the changes. One that stands for many changes is appended when the last of them has been made,
  so that what happened to one of its records meanwhile stands before it;
- a subscription is a position in the log and not a queue: whoever does not read falls behind and costs nothing, and
  nobody waits for him;
- a cursor says nothing to its holder. It carries a position, hidden and sealed with a key that is made with the log, so
  that it tells no reader how much others do, and one of another log is seen to be none of ours.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec

from a2m_router.protocol.wire.cursors import CursorSeal
from a2m_router.protocol.wire.events import Event, Sight
from a2m_router.protocol.wire.jsonrpc import render_call

DEFAULT_RETAINED: Final = 1024

# events in one answer, where the caller gives no limit
_DEFAULT_LIMIT: Final = 1000

NOTIFICATION: Final = "memory/event"


class Call(Protocol):
    """A call that a connection has begun."""

    @property
    def connection(self) -> object: ...
    @property
    def answered(self) -> bool: ...


# The call that the running task carries out; events are told to its connection after its answer.
UNDERWAY: Final[ContextVar[Call | None]] = ContextVar("UNDERWAY", default=None)


class Polled(msgspec.Struct, omit_defaults=True):
    """The answer to memory/events: oldest first."""

    events: list[Mapping[str, Any]]
    cursor: str
    more: bool = False
    reset: bool = False


class Feed(Protocol):
    """What a connection takes its notifications from."""

    def next(self) -> "Notice | None": ...
    def passed(self) -> None: ...
    def close(self) -> None: ...


class Channel(Protocol):
    """A connection that carries notifications beside answers."""

    def follow(self, start: "Callable[[Callable[[], None]], Feed] | None") -> None:
        """Notify of what `start(wake)` gives, from after the running call's answer on; instead of what was followed
        before. None ends it: nothing is sent behind the running call's answer."""


class Notice(msgspec.Struct, frozen=True):
    """A notification on one line, and the call that caused it."""

    line: bytes
    cause: Call | None


class EventLog:
    """What has happened lately.

    Args:
        retained: events that are kept; older ones are gone.
    """

    def __init__(self, retained: int = DEFAULT_RETAINED) -> None:
        self._ring: list[tuple[Event, Call | None] | None] = [None] * retained
        self._end = 0  # the number of the next event
        self._gap = 0  # where the last gap ended: a cursor from before it has missed something
        self._seal = CursorSeal()
        self._wakes: dict[int, Callable[[], None]] = {}
        self._last_follower = 0

    def append(self, event: Event, cause: Call | None = None) -> None:
        """Log what has just become true, and wake those who follow. `cause` is the running task's call by default."""
        self._ring[self._end % len(self._ring)] = event, cause or UNDERWAY.get()
        self._end += 1
        for wake in self._wakes.values():
            wake()

    def break_off(self) -> None:
        """Something has changed that is too much to tell: every cursor that was given out so far answers `reset`."""
        self._ring[self._end % len(self._ring)] = None
        self._end += 1
        self._gap = self._end

    def poll(self, reader: Sight, cursor: str | None, limit: int | None, kinds: Collection[str] | None) -> Polled:
        """The events after `cursor` that `reader` may know (§4.12); without a cursor none, and where the log ends now.

        `more` says whether there are others beyond `limit`. A cursor that lies before what is kept, or that this log
        has not given out, answers `reset` and goes on with the oldest event that is kept.
        """
        if cursor is None:
            return Polled([], self._seal.close(self._end))
        start = self._seal.open(cursor)
        reset = start is None or start < max(self._first, self._gap)
        events: list[Mapping[str, Any]] = []
        for number, told, _ in self._told(self._first if start is None else start, reader, kinds):
            if len(events) == (_DEFAULT_LIMIT if limit is None else limit):
                return Polled(events, self._seal.close(number), more=True, reset=reset)
            events.append(told)
        return Polled(events, self._seal.close(self._end), reset=reset)

    def follow(self, reader: Sight, kinds: Collection[str] | None, wake: Callable[[], None]) -> "Follower":
        """Follow the log from here on; `wake` is called, and must not wait, whenever there may be something new."""
        self._last_follower += 1
        self._wakes[self._last_follower] = wake
        return Follower(self, self._last_follower, reader, kinds, self._end)

    @property
    def _first(self) -> int:
        return max(0, self._end - len(self._ring))

    def _told(
        self, start: int, reader: Sight, kinds: Collection[str] | None
    ) -> Iterator[tuple[int, Mapping[str, Any], Call | None]]:
        """What `reader` may know from event `start` on, with its number and cause."""
        for number in range(max(start, self._first), self._end):
            kept = self._ring[number % len(self._ring)]
            if kept is None:
                continue
            event, cause = kept
            if kinds is not None and event.kind not in kinds:
                continue
            told = event.seen_by(reader)
            if told is not None:
                yield number, told, cause


class Follower:
    """A subscription: a position in a log. What fell out of the log before it was taken is passed over."""

    def __init__(self, log: EventLog, number: int, reader: Sight, kinds: Collection[str] | None, position: int) -> None:
        self._log = log
        self._number = number
        self._reader = reader
        self._kinds = kinds
        self._position = position

    def next(self) -> Notice | None:
        """The next notification, or None if nothing has happened since; it stays the next until `passed`."""
        for number, told, cause in self._log._told(self._position, self._reader, self._kinds):
            self._position = number
            return Notice(render_call(None, NOTIFICATION, told), cause)
        self._position = self._log._end
        return None

    def passed(self) -> None:
        """What `next` gave is on its way."""
        self._position += 1

    def close(self) -> None:
        """Follow no longer."""
        self._log._wakes.pop(self._number, None)
