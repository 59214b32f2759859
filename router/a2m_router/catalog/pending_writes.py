"""Pending writes (write-behind): replacements that are true in the catalog before their tiers hold them.

See docs/decisions/0004.
"""

from collections.abc import Iterable

import msgspec

from a2m_router.catalog.tables import Tables
from a2m_router.protocol.wire.records import Draft


class PendingWrites:
    """The table `redo`: the new records, whole, each with the tier that it has to be written to."""

    def __init__(self, tables: Tables) -> None:
        self._execute = tables.execute
        self._no = tables.no

    def is_open(self) -> bool:
        """Return whether any write is pending."""
        return self._execute("SELECT 1 FROM redo LIMIT 1").get is not None

    def among(self, ids: Iterable[str], tier: str | None = None) -> set[str]:
        """Return those of `ids` that have a pending write, to `tier` if one is given."""
        if not self.is_open():
            return set()
        found = ((id, self._execute("SELECT tier FROM redo WHERE id = ?", (id,)).get) for id in ids)
        return {id for id, no in found if no is not None and (tier is None or no == self._no[tier])}

    def drafts(self, ids: Iterable[str]) -> dict[str, Draft]:
        """Return the new records, by id, of those of `ids` that have a pending write."""
        if not self.is_open():
            return {}
        found = ((id, self._execute("SELECT draft FROM redo WHERE id = ?", (id,)).get) for id in ids)
        return {id: msgspec.json.decode(draft, type=Draft) for id, draft in found if draft is not None}

    def ids_in(self, tier: str) -> list[str]:
        """Return the ids of the records with a pending write to `tier`."""
        return [id for (id,) in self._execute("SELECT id FROM redo WHERE tier = ?", (self._no[tier],))]

    def begin(self, id: str, tier: str, draft: Draft) -> None:
        """Begin a pending write of the record to `tier`."""
        self._execute("INSERT OR REPLACE INTO redo VALUES (?, ?, ?)", (id, self._no[tier], msgspec.json.encode(draft)))

    def end(self, id: str) -> None:
        """End the pending write of the record, if there is one."""
        self._execute("DELETE FROM redo WHERE id = ?", (id,))
