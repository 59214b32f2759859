"""Events about a server's changes (§4.12): their kinds, and which parts of each a reader may see.

A reader gets an event only if it could recall the records that the event is about (§6). An event about many records
counts only those that the reader could recall. If that count is zero, only the client that requested the change, and
readers of all owners, get the event.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from a2m_router.protocol.wire.timestamps import render

# An event about more records than this has their number but no ids: events are kept in memory and sent in one piece.
_MOST_IDS: Final = 1000


class Place(NamedTuple):
    """The owner of a record and the tier where it lives; None without tiers."""

    owner: str | None
    tier: str | None = None


class Sight(msgspec.Struct, frozen=True):
    """A reader's rights (§6): None sees all records; an owner sees its own, those without an owner, and all in `shared`
    tiers."""

    owner: str | None = None
    shared: frozenset[str] = frozenset()

    def sees(self, place: Place) -> bool:
        """Return whether this reader can recall a record of that owner in that tier."""
        return self.owner is None or place.owner in (None, self.owner) or place.tier in self.shared

    def count(self, places: Counter[Place]) -> int:
        """Return how many of the counted records this reader can recall."""
        return sum(number for place, number in places.items() if self.sees(place))


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One record was written; a `revision` above 0 is a replacement. `at` is always in milliseconds since 1970."""

    kind: ClassVar[str] = "written"

    at: int
    id: str
    place: Place
    session: str | None = None
    key: str | None = None
    revision: int = 0

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """Return the event object; None if the reader could not recall the record."""
        if not reader.sees(self.place):
            return None
        revision = None if self.key is None else self.revision
        where = {"tier": self.place.tier, "session": self.session, "key": self.key, "revision": revision}
        present = {name: value for name, value in where.items() if value is not None}
        return {"kind": self.kind, "at": render(self.at), "id": self.id, **present}


class Named(msgspec.Struct, frozen=True):
    """Many records: the count of each place, and the ids from places with at most `_MOST_IDS` records."""

    counts: Counter[Place]
    ids: Sequence[tuple[str, Place]]

    def seen_by(self, reader: Sight) -> dict[str, Any]:
        """Return `count`, and `ids` unless there are too many, of the records that the reader could recall."""
        visible: dict[str, Any] = {"count": reader.count(self.counts)}
        if visible["count"] <= _MOST_IDS:
            visible["ids"] = [id for id, place in self.ids if reader.sees(place)]
        return visible


def named(records: Sequence[tuple[str, Place]]) -> Named:
    """Return the records of one change, counted by place."""
    counts = Counter(place for _, place in records)
    return Named(counts, [(id, place) for id, place in records if counts[place] <= _MOST_IDS])


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """One forget, requested by `by`, and the records that it deleted."""

    kind: ClassVar[str] = "forgotten"

    at: int
    by: str | None
    records: Named

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """Return the event object; None if the reader could recall none of the records."""
        visible = self.records.seen_by(reader)
        if not _concerns(reader, self.by, visible["count"]):
            return None
        return {"kind": self.kind, "at": render(self.at), **visible}


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """One promote, requested by `by`, and the records that it moved to `tier`."""

    kind: ClassVar[str] = "promoted"

    at: int
    by: str | None
    tier: str
    records: Named

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """Return the event object; None if the reader can recall none of the records where they are now."""
        visible = self.records.seen_by(reader)
        if not _concerns(reader, self.by, visible["count"]):
            return None
        return {"kind": self.kind, "at": render(self.at), "tier": self.tier, **visible}


class Consolidated(msgspec.Struct, frozen=True, kw_only=True):
    """One pass, and how many records of each place it changed. `asked`: `by` requested it, rather than the policy."""

    kind: ClassVar[str] = "consolidated"

    at: int
    by: str | None
    asked: bool
    figures: Mapping[str, Counter[Place]]

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """Return the event object; None if it changed nothing that the reader can recall."""
        counts = {name: reader.count(places) for name, places in self.figures.items()}
        if not any(counts.values()) and not (self.asked and _concerns(reader, self.by, 0)):
            return None
        return {"kind": self.kind, "at": render(self.at), **counts}


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """An owner's conversation was closed. `known`: it had a record, so readers who could recall it get the event."""

    kind: ClassVar[str] = "session_closed"

    at: int
    owner: str | None
    session: str
    known: bool = True

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """Return the event object; None for another owner, and for a reader that could recall nothing of it."""
        if not _concerns(reader, self.owner, int(self.known and reader.sees(Place(self.owner)))):
            return None
        return {"kind": self.kind, "at": render(self.at), "session": self.session}


Event = Written | Forgotten | Promoted | Consolidated | SessionClosed


def _concerns(reader: Sight, by: str | None, count: int) -> bool:
    return count > 0 or reader.owner is None or reader.owner == by
