"""Tombstones: notes that ids were forgotten, so that no copy that lands late brings a record back."""

from a2m_router.catalog.entries import Entry, present
from a2m_router.catalog.tables import Tables


class Tombstones:
    """The table `forgotten`."""

    def __init__(self, tables: Tables) -> None:
        self._execute = tables.execute

    def is_forgotten(self, id: str) -> bool:
        """Return whether `id` has a tombstone."""
        return self._execute("SELECT 1 FROM forgotten WHERE id = ? LIMIT 1", (id,)).get is not None

    def hold(self, entry: Entry) -> bool:
        """Return whether the record has a tombstone by a caller who might forget it."""
        owners = {by for (by,) in self._execute("SELECT by FROM forgotten WHERE id = ?", (entry.id,))}
        return bool(owners) and (entry.owner is None or not owners.isdisjoint({"", present(entry.owner)}))

    def note(self, id: str, by: str | None, now: int) -> None:
        """Add a tombstone of `id`.

        `by` is the owner of its record. If the id is unknown, it is the owner who forgot it, None for all owners.
        """
        self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (id, present(by), now))

    def drop(self, id: str) -> None:
        self._execute("DELETE FROM forgotten WHERE id = ?", (id,))

    def drop_living(self) -> None:
        """Drop the tombstones of ids that were written again."""
        self._execute(
            "DELETE FROM forgotten"
            " WHERE EXISTS (SELECT 1 FROM records WHERE records.id = forgotten.id AND home IS NOT NULL)"
        )

    def drop_before(self, moment: int) -> None:
        """Drop the tombstones older than `moment` whose ids have no noted copies."""
        self._execute("DELETE FROM forgotten WHERE at < ? AND id NOT IN (SELECT id FROM strays)", (moment,))
