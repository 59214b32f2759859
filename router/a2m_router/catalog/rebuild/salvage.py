"""What can still be read of a catalog that is to be replaced: the facts that no tier holds, table by table.

Rules:
- the old files are only read, never written to;
- a damaged table is read from both ends, as far as possible. What is missing is reported;
- if the old catalog contradicts itself, the record stays: a tombstone whose record lives in it is left out. Notes of
  unwanted copies, and of writes under way, are used only if every page is intact.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import apsw
import msgspec

from a2m_router.catalog.entries import COLUMNS, Entry, Stray, absent_or, entry_of, row_entry
from a2m_router.catalog.schema import APPLICATION, SCHEMA
from a2m_router.catalog.strays import NotedStray
from a2m_router.protocol.wire.records import Draft
from a2m_router.storage.database import Damaged, DatabaseError

# Every valid number of a record is less.
_NO_NUMBER: Final = 1 << 62

_UNREADABLE: Final = (apsw.Error, UnicodeDecodeError, msgspec.MsgspecError)


class TakenOver(msgspec.Struct):
    """How much was taken over from an earlier catalog that no tier holds.

    The numbers count what records have earned (`earned`), tombstones (`forgotten`), copies to delete (`unwanted`) and
    writes under way (`interrupted`). `redo` holds the pending writes.
    """

    earned: int = 0
    forgotten: int = 0
    unwanted: int = 0
    interrupted: int = 0
    redo: list[tuple[str, Draft]] = []


class Salvage:
    """An old catalog's file. Read each table once, and close it before the file is renamed.

    `warnings`: sentences about what could not be read so far. `damage`: what is wrong with its pages.

    Raises:
        DatabaseError: the file belongs to another program and must not be renamed.
    """

    def __init__(self, path: Path) -> None:
        self.warnings: list[str] = []
        self.damage: str | None = None
        self._connection: apsw.Connection | None = None
        if not path.exists():
            self.warnings.append(f"{path}: there is no catalog")
            return
        try:
            self._connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            self._look(path)
        except _UNREADABLE as problem:
            self.close()
            self.warnings.append(f"{path}: nothing of it can be read ({problem})")

    @property
    def is_there(self) -> bool:
        """Whether there is a catalog of which some part can be read."""
        return self._connection is not None

    def close(self) -> None:
        """Close the file."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def facts(self) -> dict[str, int]:
        """Return the facts that are numbers, such as the last clock time and the width of vectors.

        Returns nothing for a damaged file: a wrong fact would stay for good, and the tiers show these facts, too.
        """
        if self.damage is not None:
            return {}
        rows = self._rows("facts of the whole", "name, value", "facts", "name")
        return {name: value for name, value in rows if isinstance(value, int)}

    def federation(self) -> str | None:
        """Return the federation's id; None if it cannot be read. For a damaged file, a tier has to confirm it."""
        rows = self._rows("the federation's id", "value", "facts", "name", "name = 'federation'")
        return next((value for (value,) in rows if isinstance(value, str)), None)

    def adopted(self) -> list[str]:
        """Return the ids of other federations whose records were adopted, as far as their epochs are known."""
        if not self._has("adopted"):
            return []
        rows = self._rows("adopted federations", "federation", "adopted", "federation")
        return [federation for (federation,) in rows if isinstance(federation, str)]

    def epochs(self) -> list[str]:
        """Return the epochs of the known starts, in order."""
        if not self._has("epochs"):
            return []
        return [
            epoch for _, epoch in self._rows("starts", "number, epoch", "epochs", "number") if isinstance(epoch, str)
        ]

    def identities(self) -> dict[str, str]:
        """Return the identity of each tier's store, by the tier's name."""
        rows = self._rows("identities of the tiers' stores", "name, identity", "tiers", "no")
        return {name: identity for name, identity in rows if isinstance(name, str) and isinstance(identity, str)}

    def earned(self) -> Iterator[tuple[str, int, float, int, int | None, int | None]]:
        """Yield, of each living or lost record: id, number, salience, accesses, last access and creation time.

        The number is 0 if it is damaged.
        """
        columns = "id, seq, salience, access_count, accessed_at"
        tables = [("created_at", "records", "seq", "home IS NOT NULL")]
        if self._has("earned"):
            born = "created_at" if self._has("created_at", of="earned") else "NULL"
            tables.append((born, "earned", "id", "TRUE"))
        for born, table, order, condition in tables:
            for row in self._rows("what records have earned", f"{columns}, {born}", table, order, condition):
                if _is_row(row, (str, int, float, int, int | None, int | None)):
                    id, seq, *rest = row
                    yield (id, seq if 0 < seq < _NO_NUMBER else 0, *rest)

    def forgotten(self) -> Iterator[tuple[str, str | None, int]]:
        """Yield the tombstones: id, owner, time."""
        for note in self._rows("tombstones", "id, by, at", "forgotten", "id"):
            if _is_row(note, (str, str, int)):
                id, by, at = note
                yield id, absent_or(by), at

    def redo(self) -> list[tuple[str, Draft]]:
        """Return the pending writes: tier and new record."""
        rows = self._rows("pending writes", "tier, draft", "redo", "id")
        names = dict(self._rows("the tiers", "no, name", "tiers", "no"))
        found = []
        for no, draft in rows:
            try:
                decoded = msgspec.json.decode(draft, type=Draft)
                if decoded.id is None or decoded.created_at is None:
                    raise ValueError("it is incomplete")
                entry_of(decoded, names[no])
                found.append((names[no], decoded))
            except (KeyError, ValueError, TypeError) as problem:
                self.warnings.append(f"a pending write cannot be read: {problem}")
        return found

    def unwanted(self) -> Iterator[NotedStray]:
        """Yield the copies that were still to be deleted."""
        if self.damage is not None:
            self.warnings.append("copies to be deleted: not read from a damaged file")
            return
        names = dict(self._rows("the tiers", "no, name", "tiers", "no"))
        for no, id, owner, key in self._rows(
            "copies to be deleted",
            "strays.tier, strays.id, strays.owner, strays.key",
            "strays LEFT JOIN records ON records.id = strays.id AND records.home = strays.tier",
            "strays.tier, strays.id",
            f"kind = {Stray.UNWANTED:d} AND records.id IS NULL",
        ):
            if no in names:
                yield NotedStray(id, names[no], Stray.UNWANTED, absent_or(owner), absent_or(key))

    def reservations(self) -> list[Entry]:
        """Return the records of writes under way, each with its destination as home; none of a damaged file.

        An earlier version acknowledged some writes at their reservation. They are left out: scans find their records.
        """
        if self.damage is not None:
            self.warnings.append("writes under way: not read from a damaged file")
            return []
        names = dict(self._rows("the tiers", "no, name", "tiers", "no"))
        given_up = "home IS NULL AND found = 0" if self._has("found", of="records") else "home IS NULL"
        rows = self._rows("writes under way", f"{COLUMNS}, destination", "records", "seq", given_up)
        return [row_entry(tuple(account), names.get(no, "")) for *account, no in rows]

    def _look(self, path: Path) -> None:
        assert self._connection is not None
        found = self._connection.pragma("application_id")
        if found not in (0, int.from_bytes(APPLICATION, "big")):
            raise DatabaseError(f"{path}: this file belongs to another program; [state] names the router's own file")
        version = self._connection.pragma("user_version")
        if version > len(SCHEMA):
            self.warnings.append(
                f"{path}: written by a newer version; facts that this version does not know are left out"
            )
        try:
            problem = self._connection.execute("PRAGMA quick_check(1)").get
        except apsw.Error as failure:
            problem = str(failure)
        if problem != "ok":
            self.damage = str(problem)
            remedy = "what can still be read of it is kept"
            self.warnings.append(str(Damaged(f"{path}: damaged", remedy=remedy, detail=self.damage)))

    def _has(self, name: str, *, of: str | None = None) -> bool:
        """Return whether there is a table of this name, or a column of this name in the table `of`."""
        if self._connection is None:
            return False
        there = "SELECT 1 FROM sqlite_schema WHERE name = ?1"
        if of is not None:
            there = "SELECT 1 FROM pragma_table_info(?2) WHERE name = ?1"
        try:
            return self._connection.execute(there, (name,) if of is None else (name, of)).get is not None
        except apsw.Error:
            return False

    def _rows(self, what: str, columns: str, table: str, order: str, condition: str = "TRUE") -> Iterator[Any]:
        if self._connection is None:
            return
        backwards = ", ".join(f"{column} DESC" for column in order.split(", "))
        select = f"SELECT {columns} FROM {table} WHERE {condition} ORDER BY "
        try:
            yield from self._connection.execute(select + order)
        except _UNREADABLE as problem:
            self.warnings.append(f"{what}: not all of it can be read ({problem})")
            try:
                yield from self._connection.execute(select + backwards)
            except _UNREADABLE:
                return


def _is_row(row: tuple[Any, ...], types: tuple[Any, ...]) -> bool:
    # a damaged file may yield values of any type
    return len(row) == len(types) and all(map(isinstance, row, types))
