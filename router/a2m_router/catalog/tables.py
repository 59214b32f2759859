"""The tables of one open file, which the parts of the catalog share, and the tiers' numbers in them."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from a2m_router.catalog.entries import Entry, row_entry
from a2m_router.config.settings import Tier
from a2m_router.storage.database import Database, DatabaseError


class Tables:
    """The tables of one open file.

    `tiers` holds the managed tiers by name, as configured. `no` and `name` translate between names and numbers; they
    also hold tiers that are not configured any more. `shared` holds the numbers of the shared tiers.
    """

    def __init__(self, database: Database, tiers: Sequence[Tier]) -> None:
        self._database = database
        self.connection = database.connection
        self.execute = database.connection.execute
        self.tiers = {tier.name: tier for tier in tiers}
        self.no: dict[str, int] = {}
        self.name: dict[int, str] = {}
        self.shared: list[int] = []

    def transaction(self) -> AbstractContextManager[object]:
        """Run the block in a transaction; see `Database.transaction`."""
        return self._database.transaction()

    def number_tiers(self) -> None:
        """Give each configured tier a number.

        Raises:
            DatabaseError: records live in a tier that is not configured any more.
        """
        for name, records in self.execute("SELECT name, records FROM tiers WHERE records > 0"):
            if name not in self.tiers:
                raise DatabaseError(
                    f"{self._database.path}: {records} records live in the tier {name!r}, which is not among the"
                    " managed tiers any more; add it again, and move or forget its records before you remove it"
                )
        self.connection.executemany("INSERT OR IGNORE INTO tiers (name) VALUES (?)", [(name,) for name in self.tiers])
        self.name = dict(self.execute("SELECT no, name FROM tiers"))
        self.no = {name: no for no, name in self.name.items()}
        self.shared = [self.no[tier.name] for tier in self.tiers.values() if tier.shared]

    def entries(self, rows: Iterable[Any]) -> list[Entry]:
        """Return the entries in rows of COLUMNS, all of which have a home."""
        return [row_entry(row, self.name[row[2]]) for row in rows]

    def fact(self, name: str, otherwise: Any) -> Any:
        """Return a fact about the whole catalog; `otherwise` if it was never noted."""
        row = next(self.execute("SELECT value FROM facts WHERE name = ?", (name,)), None)
        return otherwise if row is None else row[0]

    def set_fact(self, name: str, value: Any) -> None:
        self.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
