"""The log of events (§4.12): bounded, read by polling, followed by connections that take notifications (§4.13).

Rules:
- an event is appended in the same step as its change, without an await between them: the log has the order of the
  changes. An event about many changes is appended after the last of them, so events about single records in the
  meantime come before it;
- a subscription is a position in the log, not a queue: a slow reader falls behind, costs no memory, and delays nothing;
- a cursor is opaque. It contains a position, encrypted with a key of this log: readers cannot see how much other
  clients do, and the cursor of another log is recognised as foreign.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Final, Protocol

import msgspec

from a2m_router.protocol.wire.cursors import CursorSeal
from a2m_router.protocol.wire.events import Event, Sight
from a2m_router.protocol.wire.jsonrpc import render_call

DEFAULT_RETAINED: Final = 1024

# events in one answer, if the caller gives no limit
_DEFAULT_LIMIT: Final = 1000

NOTIFICATION: Final = "memory/event"


class Call(Protocol):
    """A call in progress on a connection."""

    @property
    def connection(self) -> object: ...
    @property
    def answered(self) -> bool: ...


# The call that the running task carries out; its connection gets the events that it causes after its answer.
UNDERWAY: Final[ContextVar[Call | None]] = ContextVar("UNDERWAY", default=None)


class Polled(msgspec.Struct, omit_defaults=True):
    """The answer to memory/events: oldest first."""

    events: list[Mapping[str, Any]]
    cursor: str
    more: bool = False
    reset: bool = False


class Feed(Protocol):
    """A source of notifications for a connection."""

    def next(self) -> "Notice | None": ...
    def passed(self) -> None: ...
    def close(self) -> None: ...


class Channel(Protocol):
    """A connection that can send notifications besides answers."""

    def follow(self, start: "Callable[[Callable[[], None]], Feed] | None") -> None:
        """Send the notifications of the feed `start(wake)` after the running call's answer, instead of an earlier feed.

        None ends the notifications: none is sent after the running call's answer."""


class Notice(msgspec.Struct, frozen=True):
    """A notification on one line, and the call that caused it."""

    line: bytes
    cause: Call | None


class EventLog:
    """The most recent events.

    Args:
        retained: how many events are kept; older ones are dropped.
    """

    def __init__(self, retained: int = DEFAULT_RETAINED) -> None:
        self._ring: list[tuple[Event, Call | None] | None] = [None] * retained
        self._end = 0  # the number of the next event
        self._gap = 0  # where the last gap ended: the holder of an earlier cursor has missed events
        self._seal = CursorSeal()
        self._wakes: dict[int, Callable[[], None]] = {}
        self._last_follower = 0

    def append(self, event: Event, cause: Call | None = None) -> None:
        """Append an event for a change just made, and wake the followers. `cause` is by default the running call."""
        self._ring[self._end % len(self._ring)] = event, cause or UNDERWAY.get()
        self._end += 1
        for wake in self._wakes.values():
            wake()

    def break_off(self) -> None:
        """Record a gap, for changes without events: every earlier cursor then gets `reset`."""
        self._ring[self._end % len(self._ring)] = None
        self._end += 1
        self._gap = self._end

    def poll(self, reader: Sight, cursor: str | None, limit: int | None, kinds: Collection[str] | None) -> Polled:
        """Return the events after `cursor` that `reader` may see (§4.12); without a cursor, none and the current one.

        `more` is true if there are further events beyond `limit`. A cursor older than the oldest kept event, or not
        from this log, sets `reset`, and the answer starts with the oldest kept event.
        """
        if cursor is None:
            return Polled([], self._seal.close(self._end))
        start = self._seal.open(cursor)
        reset = start is None or start < max(self._first, self._gap)
        events: list[Mapping[str, Any]] = []
        for number, event, _ in self._visible(self._first if start is None else start, reader, kinds):
            if len(events) == (_DEFAULT_LIMIT if limit is None else limit):
                return Polled(events, self._seal.close(number), more=True, reset=reset)
            events.append(event)
        return Polled(events, self._seal.close(self._end), reset=reset)

    def follow(self, reader: Sight, kinds: Collection[str] | None, wake: Callable[[], None]) -> "Follower":
        """Return a follower from the current end on. It calls `wake`, which must not wait, when events may be new."""
        self._last_follower += 1
        self._wakes[self._last_follower] = wake
        return Follower(self, self._last_follower, reader, kinds, self._end)

    @property
    def _first(self) -> int:
        return max(0, self._end - len(self._ring))

    def _visible(
        self, start: int, reader: Sight, kinds: Collection[str] | None
    ) -> Iterator[tuple[int, Mapping[str, Any], Call | None]]:
        """Yield the events from `start` on that `reader` may see, each with its number and cause."""
        for number in range(max(start, self._first), self._end):
            kept = self._ring[number % len(self._ring)]
            if kept is None:
                continue
            event, cause = kept
            if kinds is not None and event.kind not in kinds:
                continue
            visible = event.seen_by(reader)
            if visible is not None:
                yield number, visible, cause


class Follower:
    """A subscription: a position in a log. Events that the log dropped before they were taken are skipped."""

    def __init__(self, log: EventLog, number: int, reader: Sight, kinds: Collection[str] | None, position: int) -> None:
        self._log = log
        self._number = number
        self._reader = reader
        self._kinds = kinds
        self._position = position

    def next(self) -> Notice | None:
        """Return the next notification, or None without a new event; the next call of `passed` moves past it."""
        for number, event, cause in self._log._visible(self._position, self._reader, self._kinds):
            self._position = number
            return Notice(render_call(None, NOTIFICATION, event), cause)
        self._position = self._log._end
        return None

    def passed(self) -> None:
        """Move past the notification that `next` returned; it is being sent."""
        self._position += 1

    def close(self) -> None:
        """Stop following the log."""
        self._log._wakes.pop(self._number, None)
