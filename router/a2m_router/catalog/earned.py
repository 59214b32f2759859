"""What records have earned that are in no tier: records that a tier has lost, and records of an earlier catalog."""

from a2m_router.catalog.entries import Entry
from a2m_router.catalog.tables import Tables


class Earned:
    """The table `earned`. A record that a scan finds gets back the values kept here."""

    def __init__(self, tables: Tables) -> None:
        self._execute = tables.execute

    def count(self) -> int:
        """Return the number of records with kept values that were found in no tier."""
        return self._execute("SELECT count(*) FROM earned").get or 0

    def of(self, id: str, created_at: int | None = None) -> tuple[int, float, int, int | None] | None:
        """Return number, salience, accesses and last access of the lost record with this id; None if there is none.

        If both creation times are known, they must be equal: another record may have had the id.
        """
        rows = "SELECT seq, salience, access_count, accessed_at FROM earned WHERE id = ? AND ifnull(created_at = ?, 1)"
        return next(self._execute(rows, (id, created_at)), None)

    def keep(self, id: str, seq: int, salience: float, count: int, at: int | None, created_at: int | None) -> None:
        """Keep the values of a record that is in no tier."""
        self._execute(
            "INSERT OR REPLACE INTO earned VALUES (?, ?, ?, ?, ?, ?)", (id, seq, salience, count, at, created_at)
        )

    def keep_of(self, entry: Entry) -> None:
        """Keep the values of a record that its tier has lost."""
        self.keep(entry.id, entry.seq, entry.salience, entry.access_count, entry.accessed_at, entry.created_at)

    def drop(self, id: str) -> None:
        self._execute("DELETE FROM earned WHERE id = ?", (id,))
