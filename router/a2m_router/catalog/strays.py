"""Notes of copies that may exist in a tier that is not their record's home."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

from a2m_router.catalog.entries import Entry, Stray, absent_or, present
from a2m_router.catalog.tables import Tables


class NotedStray(msgspec.Struct, frozen=True):
    """A copy that may exist in `tier`."""

    id: str
    tier: str
    kind: Stray
    owner: str | None
    key: str | None


# A pending copy whose change has ended is superseded if its record lives, else unwanted.
_END_PENDING: Final = (
    "UPDATE strays"
    " SET kind = iif(EXISTS (SELECT 1 FROM records WHERE records.id = strays.id AND home IS NOT NULL), ?, ?)"
    " WHERE kind = ?"
)
_ENDED: Final = (Stray.SUPERSEDED, Stray.UNWANTED, Stray.PENDING)


class Strays:
    """The table `strays`: at most one note for each tier and id."""

    def __init__(self, tables: Tables) -> None:
        self._execute = tables.execute
        self._no = tables.no
        self._name = tables.name

    def at(self, tier: str, id: str) -> NotedStray | None:
        """Return the note of a copy of `id` in `tier`."""
        return next(iter(self._where("tier = ? AND id = ?", (tier, id))), None)

    def of_kind(self, tier: str, kind: Stray) -> list[NotedStray]:
        """Return the undecided copies noted for `tier`: `kind` is EQUAL or QUARANTINED."""
        return self._where("tier = ? AND kind = ? AND kind >= 3", (tier, kind), "stray_by_kind")

    def removable(self, tier: str, after: str, limit: int) -> list[NotedStray]:
        """Return at most `limit` copies to delete from `tier`, in the order of ids, from the id after `after`."""
        return self._where(
            "tier = ? AND id > ? AND kind IN (?, ?) ORDER BY id LIMIT ?",
            (tier, after, Stray.SUPERSEDED, Stray.UNWANTED, limit),
        )

    def still_noted(self, tier: str, strays: Iterable[NotedStray]) -> list[NotedStray]:
        """Return the present notes of those of `strays` that are still noted for `tier`."""
        return [now for stray in strays if (now := self.at(tier, stray.id)) is not None]

    def in_the_way(self, tier: str, entries: Iterable[Entry]) -> list[NotedStray]:
        """Return the copies in `tier` with these ids or at these owners' keys: a write must delete them first."""
        found: dict[str, NotedStray] = {}
        for entry in entries:
            same_id = self.at(tier, entry.id)
            if same_id is not None:
                found[entry.id] = same_id
            if entry.key is not None:
                place = (tier, present(entry.key), present(entry.owner))
                at_key = self._where("tier = ? AND key = ? AND owner = ? AND key != ''", place, "stray_by_key")
                found.update((stray.id, stray) for stray in at_key)
        return list(found.values())

    def quarantined(self, id: str) -> list[NotedStray]:
        """Return the quarantined records with this id, in all tiers."""
        rows = self._execute("SELECT tier, owner, key FROM strays WHERE id = ? AND kind = ?", (id, Stray.QUARANTINED))
        return [NotedStray(id, self._name[no], Stray.QUARANTINED, absent_or(o), absent_or(key)) for no, o, key in rows]

    def may_be(self, id: str) -> bool:
        """Return whether a noted copy in some tier may be the record."""
        kinds = (Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL)
        found = self._execute("SELECT 1 FROM strays WHERE id = ? AND kind IN (?, ?, ?) LIMIT 1", (id, *kinds))
        return found.get is not None

    def counts(self, tier: str) -> Mapping[Stray, int]:
        """Return how many copies of each kind are noted for `tier`."""
        rows = self._execute("SELECT kind, count(*) FROM strays WHERE tier = ? GROUP BY kind", (self._no[tier],))
        return {**dict.fromkeys(Stray, 0), **{Stray(kind): count for kind, count in rows}}

    def note(self, copy: Entry | NotedStray, tier: str, kind: Stray) -> None:
        """Note that `tier` may hold a copy."""
        self._execute(
            "INSERT OR REPLACE INTO strays VALUES (?, ?, ?, ?, ?)",
            (self._no[tier], copy.id, kind, present(copy.owner), present(copy.key)),
        )

    def remove(self, tier: str, id: str) -> None:
        """Delete the note of a copy in `tier`: the copy is gone, or is the record now."""
        self._execute("DELETE FROM strays WHERE tier = ? AND id = ?", (self._no[tier], id))

    def drop_all(self, tier: str) -> None:
        self._execute("DELETE FROM strays WHERE tier = ?", (self._no[tier],))

    def end_pending(self, tier: str | None = None, id: str | None = None) -> None:
        """Note that the changes of all pending copies, or of one, have ended: no copy will be written any more."""
        if tier is None:
            self._execute(_END_PENDING, _ENDED)
        else:
            self._execute(f"{_END_PENDING} AND tier = ? AND id = ?", (*_ENDED, self._no[tier], id))

    def end_equal(self, id: str) -> None:
        """Mark equal copies as unwanted: the record has new content, so they are not equal any more."""
        self._execute("UPDATE strays SET kind = ? WHERE id = ? AND kind = ?", (Stray.UNWANTED, id, Stray.EQUAL))

    def unwant(self, entry: Entry) -> None:
        """Mark all copies of a deleted record as unwanted. A quarantined one of another owner is another record."""
        self._execute(
            "UPDATE strays SET kind = ? WHERE id = ? AND (kind != ? OR owner = ?)",
            (Stray.UNWANTED, entry.id, Stray.QUARANTINED, present(entry.owner)),
        )

    def _where(self, condition: str, parameters: tuple[Any, ...], index: str | None = None) -> list[NotedStray]:
        tier, *others = parameters
        strays = "strays" if index is None else f"strays INDEXED BY {index}"
        rows = self._execute(f"SELECT id, kind, owner, key FROM {strays} WHERE {condition}", (self._no[tier], *others))
        return [NotedStray(id, tier, Stray(kind), absent_or(o), absent_or(key)) for id, kind, o, key in rows]
