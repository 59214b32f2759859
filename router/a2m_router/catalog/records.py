"""The rows of records, the counts that depend on them, and the records that have earned a promotion.

Only `enter` and `leave` put a record into a home and take it out. They keep the counts of tiers, buckets, groups and
sessions correct.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from a2m_router.catalog.entries import COLUMNS, Entry, present, row_entry
from a2m_router.catalog.tables import Tables
from a2m_router.config.settings import Tier
from a2m_router.ranking.policy import Unit

# the columns of a record that do not depend on its home
_FIELDS: Final = (
    "id, owner, session, grp, role, key, revision, created_at, digest, version, salience, access_count, accessed_at"
)
_MARKS: Final = "?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?"

_BY_ID: Final = f"SELECT {COLUMNS} FROM records WHERE id = ? AND home IS NOT NULL"

Strength = Callable[[float, int, int, float | None], float]


class Replacement(msgspec.Struct, frozen=True):
    """A replacement of a known record: `entry` takes the place of the record at version `replaces`.

    `salience` is None if the writer gave none: then the record keeps its own.
    """

    entry: Entry
    replaces: int
    salience: float | None = None


class Records:
    """The tables `records`, `buckets`, `groups`, `sessions` and `due`.

    `newest` is the last number in the order of writing. `version` is the version of the latest change of a record's
    home or content; while a router runs, every later version is greater.
    """

    def __init__(self, tables: Tables, strength: Strength) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._strength = strength
        self.newest: int = self._execute(
            "SELECT max(coalesce((SELECT max(seq) FROM records), 0), coalesce((SELECT max(seq) FROM earned), 0))"
        ).get
        self.version: int = tables.fact("opened", 0) << 32

    # --- looking up

    def get(self, id: str) -> Entry | None:
        """Return the record with this id; None if it has no home."""
        row = next(self._execute(_BY_ID, (id,)), None)
        return None if row is None else row_entry(row, self._tables.name[row[2]])

    def find(self, ids: Iterable[str]) -> dict[str, Entry]:
        """Return the entries of those of `ids` that have a home, by id."""
        return {id: entry for id in ids if (entry := self.get(id)) is not None}

    def by_key(self, owner: str | None, key: str) -> Entry | None:
        """Return the record at an owner's key."""
        place = (present(key), present(owner))
        return next(iter(self._where("key = ? AND owner = ? AND key != ''", place)), None)

    def group(self, home: str, owner: str | None, group: str) -> list[Entry]:
        """Return the members of an owner's group in one tier."""
        place = (present(group), present(owner), self._tables.no[home])
        return self._where("grp = ? AND owner = ? AND home = ? AND grp != ''", place, order="seq")

    def count(self, tier: str) -> int:
        """Return how many records live in `tier`."""
        return self._execute("SELECT records FROM tiers WHERE no = ?", (self._tables.no[tier],)).get or 0

    def living_in(self, tier: str) -> list[Entry]:
        """Return all records of a tier; there may be very many."""
        return self._where("home = ?", (self._tables.no[tier],), order="seq")

    def unit(self, entry: Entry) -> list[Entry]:
        """Return the records that move together with `entry`, including itself."""
        return [entry] if entry.group is None else self.group(entry.home, entry.owner, entry.group)

    def units(self, entries: Iterable[Entry]) -> list[list[Entry]]:
        """Return the units of `entries`, each once, in the order of their first members."""
        units = []
        seen: set[str] = set()
        for entry in entries:
            if entry.id not in seen:
                units.append(self.unit(entry))
                seen.update(member.id for member in units[-1])
        return units

    def unchanged(self, unit: Sequence[Entry]) -> list[Entry] | None:
        """Return a unit's present entries if no member, home or content has changed; else None."""
        current = self.get(unit[0].id)
        now = [] if current is None else self.unit(current)
        same = {(e.id, e.version, e.home) for e in now} == {(e.id, e.version, e.home) for e in unit}
        return now if same else None

    def reserved(self) -> list[Entry]:
        """Return the reserved records, each with its destination as home."""
        rows = self._execute(f"SELECT {COLUMNS}, destination FROM records WHERE home IS NULL")
        return [row_entry(row, self._tables.name[row[-1]]) for row in rows]

    def is_reserved(self, id: str) -> bool:
        """Return whether a write of `id` is under way."""
        return self._execute("SELECT 1 FROM records WHERE id = ? AND home IS NULL", (id,)).get is not None

    def is_key_reserved(self, owner: str | None, key: str) -> bool:
        """Return whether a write of a new record to an owner's key is under way."""
        reserved = self._execute(
            "SELECT 1 FROM records INDEXED BY record_by_reservation"
            " WHERE home IS NULL AND key = ? AND owner = ? LIMIT 1",
            (present(key), present(owner)),
        ).get
        return reserved is not None

    # --- changing

    def reserve(self, entry: Entry) -> None:
        """Add a row for a record that is being written to `entry.home`. No read sees it yet."""
        self._insert(entry, self._next_number(), destination=self._tables.no[entry.home])

    def fulfil(self, entry: Entry) -> int:
        """Turn a reservation into a record. Return its number."""
        seq = self._execute("SELECT seq FROM records WHERE id = ? AND home IS NULL", (entry.id,)).get
        assert seq is not None, "a record is reserved before it is written"
        self._execute("UPDATE records SET destination = NULL WHERE seq = ?", (seq,))
        self.enter(msgspec.structs.replace(entry, seq=seq))
        return int(seq)

    def refuse(self, id: str) -> None:
        """Delete a reservation."""
        self._execute("DELETE FROM records WHERE id = ? AND home IS NULL", (id,))

    def insert(self, entry: Entry) -> int:
        """Add a record that has no reservation. It gets its entry's number, if that is free. Return its number."""
        taken = entry.seq == 0 or self._execute("SELECT 1 FROM records WHERE seq = ?", (entry.seq,)).get is not None
        seq = self._next_number() if taken else entry.seq
        self._insert(entry, seq)
        self.enter(msgspec.structs.replace(entry, seq=seq))
        return seq

    def delete(self, entry: Entry) -> None:
        """Remove the record from the catalog."""
        self.leave(entry)
        self._execute("DELETE FROM records WHERE seq = ?", (entry.seq,))
        self._execute("DELETE FROM due WHERE id = ?", (entry.id,))

    def move(self, entry: Entry, home: str, salience: float) -> None:
        """Change the record's home, and set its salience."""
        self.leave(entry)
        self.enter(msgspec.structs.replace(entry, home=home, salience=salience))
        self._execute("DELETE FROM due WHERE id = ?", (entry.id,))

    def replace(self, current: Entry, replacement: Replacement) -> None:
        """Give a record new content, and perhaps a new home; it keeps what it has earned."""
        entry = replacement.entry
        self.leave(current)
        kept = msgspec.structs.replace(
            entry,
            seq=current.seq,
            access_count=current.access_count,
            accessed_at=current.accessed_at,
            salience=current.salience if replacement.salience is None else replacement.salience,
        )
        self._execute(f"UPDATE records SET ({_FIELDS}) = ({_MARKS}) WHERE seq = ?", (*self._account(kept), current.seq))
        if current.home != entry.home:
            self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
        self.enter(kept)

    def earn(self, entry: Entry) -> None:
        """Store what the record has earned, and its new strength."""
        no, owner, _, group = self._places(entry)
        self._execute(
            "UPDATE records SET salience = ?, access_count = ?, accessed_at = ?, strength = ? WHERE seq = ?",
            (entry.salience, entry.access_count, entry.accessed_at, self._strength_of(entry), entry.seq),
        )
        if group:
            self._weigh_group(no, owner, group)

    def promote_if_due(self, entry: Entry) -> bool:
        """Note that the record has earned its promotion, if it has. Return whether it has."""
        tier = self._tables.tiers[entry.home]
        if tier.promote_to is None or tier.promote_after is None or entry.access_count < tier.promote_after:
            return False
        self._execute("INSERT OR REPLACE INTO due VALUES (?, ?)", (entry.id, self._tables.no[entry.home]))
        return True

    def follow_settings(self, tier: Tier) -> None:
        """Recompute a tier's buckets, strengths and due promotions if the settings that they depend on have changed.

        Then it reads all records of the tier.
        """
        no = self._tables.no[tier.name]
        settings = (tier.half_life, int(tier.per_session), tier.promote_after)
        before = self._execute("SELECT half_life, per_session, promote_after FROM tiers WHERE no = ?", (no,))
        if next(before) == settings:
            return
        entries = self.living_in(tier.name)
        for entry in entries:
            self.leave(entry)
        self._execute(
            "UPDATE tiers SET half_life = ?, per_session = ?, promote_after = ? WHERE no = ?", (*settings, no)
        )
        for entry in entries:
            self.enter(entry)
            if not self.promote_if_due(entry):
                self._execute("DELETE FROM due WHERE id = ?", (entry.id,))

    def enter(self, entry: Entry) -> None:
        """Put the record, whose row exists, into its home, and update all counts."""
        no, owner, session, group = self._places(entry)
        strength = self._strength_of(entry)
        place = (no, owner, session) if self._tables.tiers[entry.home].per_session else (no, "", "")
        bucket = self._execute(
            "INSERT INTO buckets (tier, owner, session, records) VALUES (?, ?, ?, 1)"
            " ON CONFLICT DO UPDATE SET records = records + 1 RETURNING no",
            place,
        ).get
        self._execute("UPDATE tiers SET records = records + 1 WHERE no = ?", (no,))
        self._execute(
            "INSERT INTO sessions VALUES (?, ?, ?, 1) ON CONFLICT DO UPDATE SET records = records + 1",
            (owner, session, no),
        )
        self._execute(
            "UPDATE records SET home = ?, bucket = ?, strength = ?, salience = ?, version = ? WHERE seq = ?",
            (no, bucket, strength, entry.salience, self._next_version(), entry.seq),
        )
        if group:
            self._execute(
                "INSERT INTO groups VALUES (?, ?, ?, ?, 1, ?, ?) ON CONFLICT DO UPDATE SET records = records + 1",
                (no, owner, group, bucket, strength, entry.seq),
            )
            self._weigh_group(no, owner, group)

    def leave(self, entry: Entry) -> None:
        """Take the record out of its home, and update all counts; the inverse of `enter`."""
        no, owner, session, group = self._places(entry)
        bucket = self._execute("SELECT bucket FROM records WHERE seq = ?", (entry.seq,)).get
        self._execute("UPDATE records SET home = NULL, bucket = NULL WHERE seq = ?", (entry.seq,))
        self._execute("UPDATE tiers SET records = records - 1 WHERE no = ?", (no,))
        self._execute("UPDATE buckets SET records = records - 1 WHERE no = ?", (bucket,))
        self._execute("DELETE FROM buckets WHERE no = ? AND records = 0", (bucket,))
        self._execute(
            "UPDATE sessions SET records = records - 1 WHERE owner = ? AND session = ? AND tier = ?",
            (owner, session, no),
        )
        self._execute(
            "DELETE FROM sessions WHERE owner = ? AND session = ? AND tier = ? AND records = 0", (owner, session, no)
        )
        if group:
            share = (no, owner, group, bucket)
            at = "WHERE home = ? AND owner = ? AND grp = ? AND bucket = ?"
            self._execute(f"UPDATE groups SET records = records - 1 {at}", share)
            self._execute(f"DELETE FROM groups {at} AND records = 0", share)
            self._weigh_group(no, owner, group)

    def _weigh_group(self, no: int, owner: str, group: str) -> None:
        # a group has the place of its strongest member; the index holds the members in that order
        strongest = self._execute(
            "SELECT strength, seq FROM records WHERE grp = ? AND owner = ? AND home = ? AND grp != ''"
            " ORDER BY strength DESC, seq DESC LIMIT 1",
            (group, owner, no),
        ).get
        if strongest is not None:
            self._execute(
                "UPDATE groups SET (strength, seq) = (?, ?) WHERE home = ? AND owner = ? AND grp = ?",
                (*strongest, no, owner, group),
            )

    def _strength_of(self, entry: Entry) -> float:
        touched = entry.created_at if entry.accessed_at is None else entry.accessed_at
        half_life = self._tables.tiers[entry.home].half_life
        return self._strength(entry.salience, entry.access_count, touched, half_life)

    def _places(self, entry: Entry) -> tuple[int, str, str, str]:
        return self._tables.no[entry.home], present(entry.owner), present(entry.session), present(entry.group)

    def _insert(self, entry: Entry, seq: int, destination: int | None = None) -> None:
        self._execute(
            f"INSERT INTO records (seq, {_FIELDS}, strength, destination) VALUES (?, {_MARKS}, 0, ?)",
            (seq, *self._account(entry), destination),
        )

    def _account(self, entry: Entry) -> tuple[Any, ...]:
        """Return the values of _FIELDS."""
        texts = map(present, (entry.owner, entry.session, entry.group, entry.role, entry.key))
        earned = (entry.salience, entry.access_count, entry.accessed_at)
        return (entry.id, *texts, entry.revision, entry.created_at, entry.digest, self._next_version(), *earned)

    def _where(self, condition: str, parameters: tuple[Any, ...], order: str | None = None) -> list[Entry]:
        in_order = "" if order is None else f" ORDER BY {order}"
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records WHERE {condition} AND home IS NOT NULL{in_order}", parameters
        )
        return self._tables.entries(rows)

    def _next_number(self) -> int:
        self.newest += 1
        return self.newest

    def _next_version(self) -> int:
        self.version += 1
        return self.version


def unit_of(members: Sequence[Entry]) -> Unit:
    """Return the unit of these members, which share group and owner, or of a single record. Its strength is not set."""
    first = members[0]
    ids = tuple(entry.id for entry in members)
    return Unit(ids, first.owner, first.group, max(entry.seq for entry in members), 0.0, len(members))
