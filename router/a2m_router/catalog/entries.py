"""A record's account: what the catalog knows of it without asking a tier."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any, Final

import msgspec

from a2m_router.protocol.wire.records import Draft, Record, Riderless, digest
from a2m_router.protocol.wire.timestamps import parse, render


class Stray(IntEnum):
    """Why a copy may exist outside its record's home."""

    PENDING = 0  # of a change under way
    SUPERSEDED = 1  # left behind by a move, or of one that was given up; goes once the record was seen at its home
    UNWANTED = 2  # forgotten, replaced or given up; goes without asking
    EQUAL = 3  # found by a scan beside the record's home; which of the two goes is decided for the group
    ASIDE = 4  # found by a scan, and no record since its owner's key has another one; never removed unasked


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One record's account. Times are milliseconds since 1970; `home` is a tier's name.

    `version` changes with every change of home or content, and never comes twice. `seq` is the record's number in the
    order of writing, and tells it from every other one, also of its id: while a router runs, one that is written later
    has a greater number than any that was there before.
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
    """The account of a complete record that comes to live in `home`."""
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
    """The entries by the tiers that they live in, or are to live in."""
    homes: dict[str, list[Entry]] = {}
    for entry in entries:
        homes.setdefault(entry.home, []).append(entry)
    return homes


def is_as_it_is(record: Record, entry: Entry) -> bool:
    """Whether a tier answers a record in the revision that its account has, and not as it once was, or as another that
    was written anew under its id: then one of the two is older than the other. To be asked of what is not `behind`.

    Content is not compared: a server of somebody else's may change it, and no vector need be at hand.
    """
    if isinstance(record, Riderless):
        return True
    # most are told as they are rendered here
    same_time = record.created_at == render(entry.created_at) or parse(record.created_at) == entry.created_at
    return same_time and (record.revision or 0) == entry.revision


def former(ids: Sequence[str]) -> str:
    """What a tier's answer is that holds records of which `is_as_it_is` is not true, and what to do about it: a
    sentence with the tier as "it"."""
    which, anew, by = repr(ids[0]), "it anew as it was, forget it", "its id"
    if len(ids) > 1:
        which, anew, by = f"{ids[0]!r} and {len(ids) - 1:,} more", "them anew as they were, forget them", "their ids"
    return (
        f"it holds {which} in another state than the catalog says, which is not shown: a copy of its file was put "
        f"back, or one of the catalog's; write {anew} by {by}, or bring the newer file back"
    )


# the order in which `row_entry` takes a row apart
COLUMNS: Final = (
    "seq, id, home, owner, session, grp, role, key, revision, created_at, digest, version, salience, access_count, "
    "accessed_at, bucket"
)


def present(text: str | None) -> str:
    """A text that may be absent, as it is kept."""
    return "" if text is None else "=" + text


def absent_or(kept: str) -> str | None:
    """The inverse of `present`."""
    return kept[1:] if kept else None


def row_entry(row: tuple[Any, ...], home: str) -> Entry:
    """The entry in a row of COLUMNS."""
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
