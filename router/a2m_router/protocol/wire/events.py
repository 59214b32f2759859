"""What a server tells of its changes (§4.12): the kinds of events, and what of each a reader may know.

An event is told only to those who could recall what it is about (§6). One that stands for many records counts, for
each reader, those that he could recall; one that counts none of his is told to whoever asked for the change alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec

from a2m_router.protocol.wire.timestamps import render

# An event of more of a reader's records than this gives their number and not their ids: it is kept in memory, and told
# whole.
_MOST_IDS: Final = 1000


class Place(NamedTuple):
    """Whose a record is, and in which tier it lives; None where there are no tiers."""

    owner: str | None
    tier: str | None = None


class Sight(msgspec.Struct, frozen=True):
    """Who reads (§6): None sees all; an owner sees its own, what has no owner, and all in `shared` tiers."""

    owner: str | None = None
    shared: frozenset[str] = frozenset()

    def sees(self, place: Place) -> bool:
        """Whether a record of that owner in that tier can be recalled by this reader."""
        return self.owner is None or place.owner in (None, self.owner) or place.tier in self.shared

    def count(self, places: Counter[Place]) -> int:
        """How many of the counted records this reader can recall."""
        return sum(number for place, number in places.items() if self.sees(place))


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """One record was written; `revision` > 0 shows a replacement. `at` is in milliseconds since 1970, as everywhere."""

    kind: ClassVar[str] = "written"

    at: int
    id: str
    place: Place
    session: str | None = None
    key: str | None = None
    revision: int = 0

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """The event object; None for who could not recall the record."""
        if not reader.sees(self.place):
            return None
        revision = None if self.key is None else self.revision
        where = {"tier": self.place.tier, "session": self.session, "key": self.key, "revision": revision}
        present = {name: value for name, value in where.items() if value is not None}
        return {"kind": self.kind, "at": render(self.at), "id": self.id, **present}


class Named(msgspec.Struct, frozen=True):
    """Many records: how many of each place, and the ids of those places where they are not too many."""

    counts: Counter[Place]
    ids: Sequence[tuple[str, Place]]

    def seen_by(self, reader: Sight) -> dict[str, Any]:
        """`count`, and `ids` if they are not too many, of what the reader could recall; others' do not matter."""
        told: dict[str, Any] = {"count": reader.count(self.counts)}
        if told["count"] <= _MOST_IDS:
            told["ids"] = [id for id, place in self.ids if reader.sees(place)]
        return told


def named(records: Sequence[tuple[str, Place]]) -> Named:
    """The records of one change."""
    counts = Counter(place for _, place in records)
    return Named(counts, [(id, place) for id, place in records if counts[place] <= _MOST_IDS])


class Forgotten(msgspec.Struct, frozen=True, kw_only=True):
    """One forget, asked for by `by`, and what it struck."""

    kind: ClassVar[str] = "forgotten"

    at: int
    by: str | None
    records: Named

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """The event object; None for who could recall none of the records."""
        told = self.records.seen_by(reader)
        return {"kind": self.kind, "at": render(self.at), **told} if _concerns(reader, self.by, told["count"]) else None


class Promoted(msgspec.Struct, frozen=True, kw_only=True):
    """One promote, asked for by `by`, and what it moved to `tier`."""

    kind: ClassVar[str] = "promoted"

    at: int
    by: str | None
    tier: str
    records: Named

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """The event object; None for who can recall none of the records where they are now."""
        told = self.records.seen_by(reader)
        if not _concerns(reader, self.by, told["count"]):
            return None
        return {"kind": self.kind, "at": render(self.at), "tier": self.tier, **told}


class Consolidated(msgspec.Struct, frozen=True, kw_only=True):
    """One pass: how many records of each place. `asked`: `by` asked for it, rather than the policy by itself."""

    kind: ClassVar[str] = "consolidated"

    at: int
    by: str | None
    asked: bool
    figures: Mapping[str, Counter[Place]]

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """The event object; None for whom it changed nothing."""
        told = {name: reader.count(places) for name, places in self.figures.items()}
        if not any(told.values()) and not (self.asked and _concerns(reader, self.by, 0)):
            return None
        return {"kind": self.kind, "at": render(self.at), **told}


class SessionClosed(msgspec.Struct, frozen=True, kw_only=True):
    """An owner's conversation was closed; `known`: there was a record of it, so it is no secret of who closed it."""

    kind: ClassVar[str] = "session_closed"

    at: int
    owner: str | None
    session: str
    known: bool = True

    def seen_by(self, reader: Sight) -> Mapping[str, Any] | None:
        """The event object; None for another owner, and for whom there was nothing to recall."""
        if not _concerns(reader, self.owner, int(self.known and reader.sees(Place(self.owner)))):
            return None
        return {"kind": self.kind, "at": render(self.at), "session": self.session}


Event = Written | Forgotten | Promoted | Consolidated | SessionClosed


def _concerns(reader: Sight, by: str | None, count: int) -> bool:
    return count > 0 or reader.owner is None or reader.owner == by
