"""A record's catalog entry: what is known of it without a call to a tier."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from a2m_router.protocol.wire.records import Draft, Record, Riderless, digest
from a2m_router.protocol.wire.timestamps import parse, render


class Stray(IntEnum):
    """Why a copy may exist outside its record's home."""

    PENDING = 0  # of a change under way
    SUPERSEDED = 1  # left behind by a move, or of a move given up; deleted once the record was read at its home
    UNWANTED = 2  # forgotten, replaced or given up; deleted without a check
    EQUAL = 3  # found by a scan beside the record's home; which of the two is deleted is decided for the group
    QUARANTINED = 4  # quarantined by a scan: another record has the id or the owner's key; only a forget deletes it


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One record's catalog entry. Times are milliseconds since 1970; `home` is a tier's name.

    `version` changes with every change of home or content, and no value is used twice. `seq` is the record's number in
    the order of writing. It identifies the record, even among records that have had the same id: while a router runs, a
    new record gets a greater number than every earlier one.
    """

    id: str
    home: str
    owner: str | None = None
    session: str | None = None
    group: str | None = None
    role: str | None = None
    key: str | None = None
    revision: int = 0
    created_at: int
    digest: bytes
    salience: float = 1.0
    access_count: int = 0
    accessed_at: int | None = None
    seq: int = 0
    version: int = 0


def entry_of(record: Record | Draft, home: str) -> Entry:
    """Return the entry of a complete record that comes to live in `home`."""
    assert record.id is not None
    assert record.created_at is not None
    return Entry(
        id=record.id,
        home=home,
        owner=record.owner,
        session=record.session,
        group=record.group,
        role=record.role,
        key=record.key,
        revision=record.revision or 0,
        created_at=parse(record.created_at),
        digest=digest(record),
        salience=1.0 if record.salience is None else record.salience,
    )


def by_home(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Group entries by the tier that they live in, or are to live in."""
    homes: dict[str, list[Entry]] = {}
    for entry in entries:
        homes.setdefault(entry.home, []).append(entry)
    return homes


def is_current(record: Record, entry: Entry) -> bool:
    """Return whether a tier's copy has the revision and the creation time of its catalog entry.

    Otherwise the copy is a former state, or another record that was written under the same id: the tier's file or the
    catalog is an older copy. Do not call it for a record with a pending write. Content is not compared: a third-party
    server may change it, and the vector need not be at hand.
    """
    if isinstance(record, Riderless):
        return True
    # most servers return the text that `render` gives: then there is nothing to parse
    same_time = record.created_at == render(entry.created_at) or parse(record.created_at) == entry.created_at
    return same_time and (record.revision or 0) == entry.revision


def former(ids: Sequence[str]) -> str:
    """Return the sentence for records of which `is_current` is false, and what to do. "it" is the tier."""
    which, again, by = repr(ids[0]), "it again as it was, forget it", "its id"
    if len(ids) > 1:
        which, again, by = f"{ids[0]!r} and {len(ids) - 1:,} more", "them again as they were, forget them", "their ids"
    return (
        f"it holds {which} in another state than the catalog, which is not shown: an older copy of the tier's file, or "
        f"of the catalog's, was restored; write {again} by {by}, or restore the newer file"
    )


# the order in which `row_entry` reads a row
COLUMNS: Final = (
    "seq, id, home, owner, session, grp, role, key, revision, created_at, digest, version, salience, access_count, "
    "accessed_at, bucket"
)


def present(text: str | None) -> str:
    """Return the stored form of a text that may be absent."""
    return "" if text is None else "=" + text


def absent_or(kept: str) -> str | None:
    """Return the text of a stored form; the inverse of `present`."""
    return kept[1:] if kept else None


def row_entry(row: tuple[Any, ...], home: str) -> Entry:
    """Return the entry in a row of COLUMNS."""
    return Entry(
        seq=row[0],
        id=row[1],
        home=home,
        owner=absent_or(row[3]),
        session=absent_or(row[4]),
        group=absent_or(row[5]),
        role=absent_or(row[6]),
        key=absent_or(row[7]),
        revision=row[8],
        created_at=row[9],
        digest=row[10],
        version=row[11],
        salience=row[12],
        access_count=row[13],
        accessed_at=row[14],
    )
