"""Queries of a pass: buckets that exceed their capacity, their weakest units, and records due for promotion."""

from collections.abc import Iterator
from heapq import merge
from typing import Final

import msgspec

from a2m_router.catalog.entries import Entry, absent_or
from a2m_router.catalog.records import Records, unit_of
from a2m_router.catalog.tables import Tables
from a2m_router.ranking.policy import Unit

# The most records that `due` returns at once.
_MOST_DUE: Final = 2000


class Buckets:
    """Read-only queries about capacities and promotions."""

    def __init__(self, tables: Tables, records: Records) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._records = records

    def due(self, tier: str) -> list[Entry]:
        """Return records of `tier` that have earned their promotion, at most `_MOST_DUE`."""
        if self._tables.tiers[tier].promote_to is None:
            return []
        rows = self._execute("SELECT id FROM due WHERE tier = ? LIMIT ?", (self._tables.no[tier], _MOST_DUE))
        return list(self._records.find([id for (id,) in rows]).values())

    def overfull(self, tier: str) -> list[tuple[int, int]]:
        """Return the buckets of `tier` that exceed its capacity, each with its number of records."""
        capacity = self._tables.tiers[tier].capacity
        if capacity is None:
            return []
        rows = self._execute(
            "SELECT no, records FROM buckets WHERE tier = ? AND records > ?", (self._tables.no[tier], capacity)
        )
        return [(no, records) for no, records in rows]

    def held(self, bucket: int) -> int:
        """Return how many records a bucket holds."""
        return self._execute("SELECT records FROM buckets WHERE no = ?", (bucket,)).get or 0

    def of(self, id: str) -> tuple[str, int] | None:
        """Return the tier and the bucket of a record; None if it has no home."""
        row = next(self._execute("SELECT home, bucket FROM records WHERE id = ? AND home IS NOT NULL", (id,)), None)
        return None if row is None else (self._tables.name[row[0]], row[1])

    def weakest(self, tier: str, bucket: int) -> Iterator[Unit]:
        """Yield the units of a bucket, weakest first; of two equally weak ones the older first.

        A group has the place of its strongest member.
        """
        singles = self._execute(
            "SELECT strength, seq, id, owner, '' FROM records"
            " WHERE bucket = ? AND grp = '' AND home IS NOT NULL ORDER BY strength, seq",
            (bucket,),
        )
        groups = self._execute(
            "SELECT strength, seq, records, owner, grp FROM groups WHERE bucket = ? ORDER BY strength, seq",
            (bucket,),
        )
        for strength, seq, what, owner, group in merge(singles, groups, key=lambda row: row[:2]):
            if group == "":
                yield Unit((what,), absent_or(owner), None, seq, strength, 1)
            else:
                unit = unit_of(self._records.group(tier, absent_or(owner), group[1:]))
                yield msgspec.structs.replace(unit, strength=strength, weight=what)
