"""The catalog: the router's durable account of every managed record. All of its changes are here, one transaction each.

Rules:
- a note comes before a copy: before a tier may hold a copy outside a record's home, a stray says so;
- every change of a home goes through `_enter` and `_leave`, which keep the counts of tiers, buckets and sessions;
- methods decide and change in one step and never wait. What must outlive a power cut is followed by `await synced()`.

It never talks to a tier and knows no clock: moments come in as milliseconds since 1970.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec

from router.a2m.equality import Where, text_atom, text_of
from router.catalog.claims import Claims, id_name
from router.catalog.entries import COLUMNS, Entry, Stray, absent_or, present, row_entry
from router.catalog.readers import Readers
from router.catalog.schema import APPLICATION, SCHEMA
from router.catalog.selection import (
    Condition,
    Scope,
    any_of,
    conjunction,
    key_prefix_condition,
    scope_condition,
    where_conditions,
)
from router.catalog.syncing import Syncing
from router.config import Tier
from router.database import Database, DatabaseError
from router.policy import Unit

Strength = Callable[[float, int, int, float | None], float]

# The values of one field that go into one query: SQLite takes 32,766 parameters, and there are twelve fields.
_MOST_VALUES: Final = 2000

# Sessions of one name under more owners than this are sorted instead of followed one by one.
_MOST_ARMS: Final = 64


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which records: all of `scope` that live in `tiers` and meet `where` (its catalog part) and `key_prefix`."""

    tiers: Sequence[str]
    scope: Scope = Scope()
    where: Where = msgspec.field(default_factory=dict)
    key_prefix: str | None = None


class NotedStray(msgspec.Struct, frozen=True):
    """A copy that may exist in `tier`."""

    id: str
    tier: str
    kind: Stray
    owner: str | None
    key: str | None


class Replacement(msgspec.Struct, frozen=True):
    """What is to take a known record's place: `entry`, for the record as it was at version `replaces`.

    `salience` is None where the writer gave none: what the record has earned stays.
    """

    entry: Entry
    replaces: int
    salience: float | None = None


class Session(msgspec.Struct, frozen=True):
    """A conversation as session/list tells it (§4.10)."""

    session: str
    owner: str | None
    tiers: Mapping[str, int]
    opened_at: int
    touched_at: int


class Catalog:
    """The open catalog of one federation.

    Args:
        path: its file; None keeps it in memory, for trials.
        tiers: the managed tiers, as configured.
        strength: the policy's order of retention.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.

    Raises DatabaseError when the file cannot be used, or when records live in a tier that is not configured any more.
    """

    def __init__(self, path: Path | None, tiers: Sequence[Tier], strength: Strength, *, threads: bool = True) -> None:
        self._database = Database(path, SCHEMA, application=APPLICATION, holder="a2m-router")
        self._execute = self._database.connection.execute
        self._syncing = Syncing(self._database.sync, threads=threads)
        self._strength = strength
        self.claims = Claims()
        self.readers = Readers()
        self._tiers = {tier.name: tier for tier in tiers}
        self._no: dict[str, int] = {}
        self._name: dict[int, str] = {}
        try:
            self._begin(tiers)
        except BaseException:
            self._database.close()
            raise
        self._shared = [self._no[tier.name] for tier in tiers if tier.shared]

    def _begin(self, tiers: Sequence[Tier]) -> None:
        with self._database.transaction():
            self._versions: int = self._fact("opened", 0) << 32
            self._set_fact("opened", self._fact("opened", 0) + 1)
            self._clock: int = self._fact("clock", 0)
            self._reservations = self._execute("SELECT max(batch) FROM records WHERE home IS NULL").get or 0
            self._know(tiers)

    async def synced(self) -> None:
        """Return when everything committed so far outlives a power cut. Raises OSError when the disk fails."""
        await self._syncing.wait()

    def close(self) -> None:
        """Sync and close the file."""
        self._database.close()

    # --- what tiers are

    def identity(self, tier: str) -> str | None:
        """Who was behind `tier` when it was last greeted; None before the first time."""
        known: str | None = self._execute("SELECT identity FROM tiers WHERE no = ?", (self._no[tier],)).get
        return known

    def set_identity(self, tier: str, identity: str) -> None:
        """Another identity means other contents: they have to be scanned."""
        self._execute(
            "UPDATE tiers SET scanned = scanned AND identity IS ?1, identity = ?1 WHERE no = ?2",
            (identity, self._no[tier]),
        )

    def is_scanned(self, tier: str) -> bool:
        """Whether all that `tier` holds is accounted for."""
        return bool(self._execute("SELECT scanned FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def set_scanned(self, tier: str, scanned: bool) -> None:
        self._execute("UPDATE tiers SET scanned = ? WHERE no = ?", (scanned, self._no[tier]))

    def dimensions(self) -> int | None:
        """The width of the federation's vectors; None until the first has fixed it (§3.7)."""
        width: int | None = self._fact("dimensions", None)
        return width

    def metric(self) -> str:
        """How vectors are compared in this federation (§3.7)."""
        metric: str = self._fact("metric", "cosine")
        return metric

    def set_metric(self, metric: str) -> None:
        self._set_fact("metric", metric)

    def fix_dimensions(self, width: int) -> None:
        self._set_fact("dimensions", width)

    # --- reading

    def next_moment(self, now: int) -> int:
        """The `created_at` of a record written now: never earlier than the last one given."""
        self._clock = max(self._clock, now)
        return self._clock

    def find(self, ids: Iterable[str]) -> dict[str, Entry]:
        """The entries of those `ids` that live somewhere."""
        found = {}
        for id in ids:
            entry = self._find(id)
            if entry is not None:
                found[id] = entry
        return found

    def by_key(self, owner: str | None, key: str) -> Entry | None:
        """The record at an owner's key."""
        return self._one("key = ? AND owner = ? AND key != ''", (present(key), present(owner)))

    def group(self, home: str, owner: str | None, group: str) -> list[Entry]:
        """The members of an owner's group in one tier."""
        place = (present(group), present(owner), self._no[home])
        return self._all("grp = ? AND owner = ? AND home = ? AND grp != ''", place, order="seq")

    def unit(self, entry: Entry) -> list[Entry]:
        """The records that move together with `entry`, itself among them."""
        return [entry] if entry.group is None else self.group(entry.home, entry.owner, entry.group)

    def units(self, entries: Iterable[Entry]) -> list[list[Entry]]:
        """What moves together with each of `entries`; each unit once, in the order of their first."""
        units = []
        seen: set[str] = set()
        for entry in entries:
            if entry.id not in seen:
                units.append(self.unit(entry))
                seen.update(member.id for member in units[-1])
        return units

    def newest(self, selection: Selection, limit: int | None) -> list[Entry]:
        """The newest `limit` of a selection, oldest first; ties in the order of writing."""
        count = -1 if limit is None else limit
        arms = (
            self._execute(
                f"SELECT {COLUMNS} FROM records {arm.sql} ORDER BY created_at DESC, seq DESC LIMIT ?",
                (*arm.parameters, count),
            )
            for arm in self._arms(selection)
        )
        newest_first = islice(merge(*arms, key=lambda row: (-row[9], -row[0])), limit)
        return [row_entry(row, self._name[row[2]]) for row in newest_first][::-1]

    def among(self, ids: Iterable[str], selection: Selection) -> list[Entry]:
        """Those of `ids` that belong to a selection, in the order of `newest`; costs by the ids, not the selection."""
        given = frozenset(selection.where["id"]) if "id" in selection.where else None
        atoms = tuple(atom for atom in map(text_atom, ids) if given is None or atom in given)
        return self.newest(msgspec.structs.replace(selection, where={**selection.where, "id": atoms}), None)

    def ids(self, selection: Selection) -> list[str]:
        """The ids of a selection, in no particular order."""
        return [
            row[0]
            for arm in self._arms(selection)
            for row in self._execute(f"SELECT id FROM records {arm.sql}", arm.parameters)
        ]

    def sessions(self, scope: Scope) -> list[Session]:
        """The conversations that `scope` sees, by name; those of one name under different owners are different."""
        visible = (
            [Condition("TRUE")]
            if scope.everyone
            else [any_of("owner", ["", present(scope.owner)]), any_of("tier", self._shared)]
        )
        arms = (f"SELECT session, owner, tier, records FROM sessions WHERE session != '' AND {v.sql}" for v in visible)
        found: dict[tuple[str, str], dict[str, int]] = {}
        rows = self._execute(
            f"{' UNION '.join(arms)} ORDER BY session, owner, tier",
            tuple(parameter for v in visible for parameter in v.parameters),
        )
        for session, owner, tier, records in rows:
            found.setdefault((session, owner), {})[self._name[tier]] = records
        return [
            Session(session[1:], absent_or(owner), tiers, *self._span(session, owner, tiers))
            for (session, owner), tiers in found.items()
        ]

    def counts(self, scope: Scope) -> dict[str, int]:
        """How many records of each tier `scope` sees."""
        counts = {tier: self.records_in(tier) for tier in self._tiers}
        if scope.everyone:
            return counts
        shared = {self._name[no] for no in self._shared}
        visible = {name: (records if name in shared else 0) for name, records in counts.items()}
        rows = self._execute(
            "SELECT tier, sum(records) FROM sessions WHERE owner IN ('', ?) GROUP BY tier", (present(scope.owner),)
        )
        for no, records in rows:
            if no not in self._shared and self._name[no] in visible:
                visible[self._name[no]] = records
        return visible

    # --- a write, in its steps

    def reserve(self, new: Sequence[Entry], replacements: Sequence[Replacement]) -> None:
        """Note a batch before any tier hears of it: the new records, and the replacements of known ones.

        `home` of each entry is where it is being written to. Nothing of it is visible before `commit_write`.
        """
        self._reservations += 1
        with self._database.transaction():
            self._set_fact("clock", self._clock)
            for entry in new:
                self._execute(
                    "INSERT INTO records (id, owner, session, grp, role, key, revision, created_at, digest, version,"
                    " salience, access_count, accessed_at, strength, destination, batch)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?)",
                    (*self._account(entry), self._no[entry.home], self._reservations),
                )
                self._note(entry, entry.home, Stray.PENDING)
            for replacement in replacements:
                entry = replacement.entry
                self._execute(
                    "INSERT OR REPLACE INTO replacing VALUES (?, ?, ?)",
                    (entry.id, self._no[entry.home], msgspec.msgpack.encode(replacement)),
                )
                if self._is_elsewhere(entry):
                    self._note(entry, entry.home, Stray.PENDING)

    def is_reserved(self, id: str) -> bool:
        """Whether a write of `id` is under way, or was when the last router died."""
        return self._execute("SELECT 1 FROM records WHERE id = ? AND home IS NULL", (id,)).get is not None

    def commit_write(self, new: Sequence[Entry], replacements: Sequence[Replacement]) -> list[Replacement]:
        """A batch's tiers hold all of it: it becomes true. Returns those replacements whose record was forgotten
        meanwhile; their copies are noted as unwanted, and have to be written anew."""
        lost = []
        with self._database.transaction():
            for entry in new:
                self._settle_home(entry)
            for replacement in replacements:
                entry = replacement.entry
                self._execute("DELETE FROM replacing WHERE id = ?", (entry.id,))
                current = self._find(entry.id)
                if current is None or current.version != replacement.replaces:
                    self._note(entry, entry.home, Stray.UNWANTED)
                    lost.append(replacement)
                else:
                    self._replace(current, replacement)
        return lost

    def abandon(self, new: Iterable[Entry], replacements: Iterable[Replacement]) -> None:
        """A batch failed: nothing of it becomes true. What may have been written is noted as unwanted. Replacements in
        place stay noted until `settle_replacement` learns which content their tier holds."""
        with self._database.transaction():
            for entry in new:
                self._execute("DELETE FROM records WHERE id = ? AND home IS NULL", (entry.id,))
                self._note(entry, entry.home, Stray.UNWANTED)
            for replacement in replacements:
                entry = replacement.entry
                if self._is_elsewhere(entry):
                    self._execute("DELETE FROM replacing WHERE id = ?", (entry.id,))
                    self._note(entry, entry.home, Stray.UNWANTED)

    def settle_replacement(self, id: str, found: bytes | None) -> None:
        """An unfinished replacement in place: the tier holds a record with the digest `found`, or none."""
        with self._database.transaction():
            row = next(self._execute("SELECT entry FROM replacing WHERE id = ?", (id,)), None)
            self._execute("DELETE FROM replacing WHERE id = ?", (id,))
            current = self._find(id)
            if row is not None and current is not None:
                replacement = msgspec.msgpack.decode(row[0], type=Replacement)
                if replacement.entry.digest == found and replacement.entry.home == current.home:
                    self._replace(current, replacement)

    # --- a move, in its steps

    def note_copies(self, entries: Iterable[Entry], target: str) -> None:
        """Copies are about to be written to `target`."""
        with self._database.transaction():
            for entry in entries:
                self._note(entry, target, Stray.PENDING)

    def flip(self, units: Iterable[Sequence[Entry]], target: str, salience: float = 0.0) -> list[Entry]:
        """Change the home of each unit that is still what it was, and note its old copies. The commit point of a move.

        Returns the entries that moved, as they were. `salience` is added on arrival.
        """
        moved: list[Entry] = []
        with self._database.transaction():
            for unit in units:
                now = self.unit(current) if (current := self._find(unit[0].id)) else []
                if {(e.id, e.version, e.home) for e in now} != {(e.id, e.version, e.home) for e in unit}:
                    continue
                for entry in now:
                    arrived = msgspec.structs.replace(entry, home=target, salience=_added(entry.salience, salience))
                    self._leave(entry)
                    self._strike(target, entry.id)
                    self._note(entry, entry.home, Stray.SUPERSEDED)
                    self._enter(arrived)
                    self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
                moved += now
        for entry in moved:
            self.readers.moved(entry.id, entry.home)
        return moved

    def come_home(self, id: str, digest: bytes, tier: str) -> bool:
        """A record's home has lost it, and a copy with its digest was found in `tier`: that becomes its home."""
        with self._database.transaction():
            entry = self._find(id)
            if entry is None or entry.digest != digest or entry.home == tier:
                return False
            self._leave(entry)
            self._strike(tier, id)
            self._note(entry, entry.home, Stray.UNWANTED)
            self._enter(msgspec.structs.replace(entry, home=tier))
            self._execute("DELETE FROM due WHERE id = ?", (id,))
        self.readers.moved(id, entry.home)
        return True

    def give_up(self, entries: Iterable[Entry], target: str) -> None:
        """A move ends without its flip: what may be at `target` is unwanted."""
        with self._database.transaction():
            for entry in entries:
                self._execute(
                    "UPDATE strays SET kind = ? WHERE tier = ? AND id = ? AND kind = ?",
                    (Stray.UNWANTED, self._no[target], entry.id, Stray.PENDING),
                )

    # --- forgetting

    def forget(self, ids: Iterable[str], scope: Scope, now: int) -> list[Entry]:
        """Strike the homes of those of `ids` that `scope` may forget; they are gone for every reader at once.

        Returns what was forgotten. Ids that nobody has heard of are noted while a tier is not scanned yet.
        """
        struck = []
        unaccounted = not all(map(self.is_scanned, self._tiers))
        with self._database.transaction():
            for id in dict.fromkeys(ids):
                entry = self._find(id)
                if entry is None:
                    if unaccounted:
                        by = present(scope.owner)
                        self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (id, by, now))
                    continue
                if not scope.holds(entry.owner):
                    continue
                self._leave(entry)
                self._execute("DELETE FROM records WHERE seq = ?", (entry.seq,))
                self._execute("DELETE FROM due WHERE id = ?", (id,))
                self._note(entry, entry.home, Stray.UNWANTED)
                self._execute("UPDATE strays SET kind = ? WHERE id = ?", (Stray.UNWANTED, id))
                self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, '', ?)", (id, now))
                struck.append(entry)
        return struck

    def is_forgotten(self, id: str) -> bool:
        """Whether a note says that `id` was forgotten."""
        return self._execute("SELECT 1 FROM forgotten WHERE id = ? LIMIT 1", (id,)).get is not None

    def drop_notes_before(self, moment: int) -> None:
        """Forget that ids were forgotten, where no copy can be left."""
        self._execute(
            "DELETE FROM forgotten WHERE at < ? AND id NOT IN (SELECT id FROM strays)",
            (moment,),
        )

    # --- what is earned

    def touch(self, ids: Iterable[str], now: int) -> bool:
        """Count a recall of each id. Returns whether one of them has earned its promotion by it."""
        earned = False
        with self._database.transaction():
            for id in ids:
                entry = self._find(id)
                if entry is None:
                    continue
                count = entry.access_count + 1
                self._earn(msgspec.structs.replace(entry, access_count=count, accessed_at=now))
                tier = self._tiers[entry.home]
                if tier.promote_to is not None and tier.promote_after is not None and count >= tier.promote_after:
                    self._execute("INSERT OR REPLACE INTO due VALUES (?, ?)", (id, self._no[entry.home]))
                    earned = True
        return earned

    def reinforce(self, ids: Iterable[str], amount: float, scope: Scope) -> int:
        """Add `amount` to the salience of what is `scope`'s own, or nobody's; never below zero. Returns how many were
        found."""
        found = 0
        with self._database.transaction():
            for id in dict.fromkeys(ids):
                entry = self._find(id)
                if entry is None or not scope.holds(entry.owner):
                    continue
                self._earn(msgspec.structs.replace(entry, salience=_added(entry.salience, amount)))
                found += 1
        return found

    def sees(self, scope: Scope, entry: Entry) -> bool:
        """Whether `scope` may read the record (§6)."""
        return scope.holds(entry.owner) or self._tiers[entry.home].shared

    # --- what the policy asks

    def due(self, tier: str) -> list[Entry]:
        """The records of `tier` that have earned their promotion; some of them, if they are many."""
        if self._tiers[tier].promote_to is None:
            return []
        rows = self._execute("SELECT id FROM due WHERE tier = ? LIMIT ?", (self._no[tier], _MOST_VALUES))
        return list(self.find([row[0] for row in rows]).values())

    def overfull(self, tier: str) -> list[tuple[int, int]]:
        """The buckets of `tier` that hold more than its capacity, and how many records they hold."""
        capacity = self._tiers[tier].capacity
        if capacity is None:
            return []
        rows = self._execute(
            "SELECT no, records FROM buckets WHERE tier = ? AND records > ?", (self._no[tier], capacity)
        )
        return [(no, records) for no, records in rows]

    def weakest(self, tier: str, bucket: int) -> Iterator[Unit]:
        """The units of a bucket, weakest first; of two equally weak ones the older. A group stands where its strongest
        member would."""
        singles = self._execute(
            "SELECT strength, seq, id, owner, '' FROM records"
            " WHERE bucket = ? AND grp = '' AND home IS NOT NULL ORDER BY strength, seq",
            (bucket,),
        )
        groups = self._execute(
            "SELECT strength, seq, records, owner, grp FROM groups WHERE bucket = ? ORDER BY strength, seq",
            (bucket,),
        )
        for strength, _, what, owner, group in merge(singles, groups, key=lambda row: row[:2]):
            if group == "":
                yield Unit((what,), strength, 1, absent_or(owner))
            else:
                members = self.group(tier, absent_or(owner), group[1:])
                yield Unit(tuple(e.id for e in members), strength, what, absent_or(owner), absent_or(group))

    def in_session(self, tier: str, session: str, owner: str | None) -> list[Unit]:
        """The units of an owner's conversation in one tier, oldest first; a group goes along whole."""
        where = {"session": (text_atom(session),), "owner": (text_atom(owner),)}
        return [
            Unit(tuple(entry.id for entry in unit), 0.0, len(unit), owner, unit[0].group)
            for unit in self.units(self.newest(Selection(tiers=[tier], where=where), None))
        ]

    # --- strays

    def strays(self, tier: str, after: str, limit: int) -> list[NotedStray]:
        """Some of the copies to be removed from `tier`, in the order of their ids, beginning after one."""
        return self._strays(
            "tier = ? AND id > ? AND kind != ? ORDER BY id LIMIT ?", (tier, after, Stray.PENDING, limit)
        )

    def still_noted(self, tier: str, strays: Iterable[NotedStray]) -> list[NotedStray]:
        """Those of `strays` that are noted for `tier` now, as they are noted now."""
        return [now for stray in strays for now in self._strays("tier = ? AND id = ?", (tier, stray.id))]

    def strays_in_the_way(self, tier: str, entries: Iterable[Entry]) -> list[NotedStray]:
        """The copies in `tier` of these ids, or at these owners' keys: they go before anything is written there."""
        found: dict[str, NotedStray] = {}
        for entry in entries:
            for stray in self._strays("tier = ? AND id = ?", (tier, entry.id)):
                found[stray.id] = stray
            if entry.key is not None:
                place = (tier, present(entry.key), present(entry.owner))
                at_key = self._strays("tier = ? AND key = ? AND owner = ? AND key != ''", place, "stray_by_key")
                found.update((stray.id, stray) for stray in at_key)
        return list(found.values())

    def strays_left(self) -> int:
        """How many copies outside their homes there may be."""
        return self._execute("SELECT count(*) FROM strays").get or 0

    def strike(self, tier: str, ids: Iterable[str]) -> None:
        """The copies of `ids` in `tier` are gone."""
        with self._database.transaction():
            for id in ids:
                self._strike(tier, id)

    # --- coming back

    def unfinished(self, tier: str) -> tuple[list[Entry], list[str]]:
        """What a crash left under way at `tier`: reserved records, and ids whose replacement in place is unsettled."""
        no = self._no[tier]
        reserved = self._execute(
            f"SELECT {COLUMNS} FROM records WHERE home IS NULL AND destination = ? AND found IS NULL", (no,)
        )
        replacing = self._execute("SELECT id FROM replacing WHERE tier = ?", (no,))
        return [row_entry(row, tier) for row in reserved], [row[0] for row in replacing]

    def is_left_over(self, id: str) -> bool:
        """Whether a reservation or replacement was left by an earlier router, and nobody here is at work on it."""
        return not self.claims.is_held(id_name(id))

    def records_in(self, tier: str) -> int:
        """How many records live in `tier`."""
        return self._execute("SELECT records FROM tiers WHERE no = ?", (self._no[tier],)).get or 0

    def begin_recovery(self) -> None:
        """Right after the start: what was being moved stays where it was, and its copies are unwanted."""
        with self._database.transaction():
            elsewhere = self._execute(
                "SELECT replacing.id, tier FROM replacing LEFT JOIN records USING (id) WHERE tier IS NOT home"
            )
            for id, _ in list(elsewhere):
                self._execute("DELETE FROM replacing WHERE id = ?", (id,))
            self._execute(
                "UPDATE strays SET kind = ? WHERE kind = ? AND id NOT IN (SELECT id FROM records WHERE home IS NULL)",
                (Stray.UNWANTED, Stray.PENDING),
            )

    def recover_reservations(self, tier: str, found: Mapping[str, bool]) -> int:
        """What `tier` turned out to hold of the writes that a crash interrupted.

        A batch becomes true if all of it is where it was to be written, once all of its tiers have been asked, and if
        nobody else was given one of its keys meanwhile; else nothing of it does. Returns how many records became true.
        """
        with self._database.transaction():
            batches = set()
            for id, there in found.items():
                batch = self._execute("SELECT batch FROM records WHERE id = ? AND home IS NULL", (id,)).get
                if batch is not None:
                    batches.add(batch)
                    self._execute("UPDATE records SET found = ? WHERE id = ?", (there, id))
            return sum(map(self._finish, batches))

    def adopt(self, entries: Iterable[Entry]) -> tuple[int, list[Entry]]:
        """Take records that a tier was found to hold into the account, forgotten ones excepted.

        Of two copies one is a stray: of equal ones that which is not as far down the way of spills and promotions, of
        different ones that with the lower revision, else the one further down.

        Returns how many became known, and those that could not: their owner's key has another record, or is just being
        given one.
        """
        adopted = 0
        refused = []
        with self._database.transaction():
            for entry in entries:
                current = self._find(entry.id)
                noted = self._strays("tier = ? AND id = ?", (entry.home, entry.id))
                if noted or self.is_reserved(entry.id) or (current is not None and current.home == entry.home):
                    continue
                if self._is_unwanted(entry):
                    self._note(entry, entry.home, Stray.UNWANTED)
                elif current is not None and self._is_better(entry, current):
                    self._replace(current, Replacement(entry, current.version))
                    self._note(current, current.home, Stray.SUPERSEDED)
                elif current is not None:
                    self._note(entry, entry.home, Stray.SUPERSEDED)
                elif entry.key is not None and self._is_taken(entry.owner, entry.key):
                    refused.append(entry)
                else:
                    self._insert(entry)
                    adopted += 1
        return adopted, refused

    def drop_home(self, tier: str) -> int:
        """Take a tier whose store was exchanged out of the account: what lived there, and what strayed there.

        Returns how many records lived there; looks at all of them.
        """
        no = self._no[tier]
        with self._database.transaction():
            entries = self._all("home = ?", (no,), order="seq")
            for entry in entries:
                self._leave(entry)
                self._execute("DELETE FROM records WHERE seq = ?", (entry.seq,))
                self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
            self._execute("DELETE FROM strays WHERE tier = ?", (no,))
        return len(entries)

    # --- inside

    def _know(self, tiers: Sequence[Tier]) -> None:
        self._name = dict(self._execute("SELECT no, name FROM tiers"))
        self._no = {name: no for no, name in self._name.items()}
        for name, records in self._execute("SELECT name, records FROM tiers WHERE records > 0"):
            if name not in self._tiers:
                raise DatabaseError(
                    f"{self._database.path}: {records} records live in the tier {name!r}, which is not among the"
                    " managed tiers any more; bring it back, and have its records forgotten or moved before it goes"
                )
        for tier in tiers:
            if tier.name not in self._no:
                self._execute("INSERT INTO tiers (name) VALUES (?)", (tier.name,))
                self._no[tier.name] = self._database.connection.last_insert_rowid()
                self._name[self._no[tier.name]] = tier.name
            before = next(
                self._execute(
                    "SELECT half_life, per_session, promote_after FROM tiers WHERE no = ?", (self._no[tier.name],)
                )
            )
            settings = (tier.half_life, int(tier.per_session), tier.promote_after)
            if before != settings:
                self._compute_anew(tier, settings)

    def _compute_anew(self, tier: Tier, settings: tuple[Any, ...]) -> None:
        """A tier's settings have changed: its buckets, its strengths and what is due follow from them. Looks at all its
        records."""
        no = self._no[tier.name]
        entries = self._all("home = ?", (no,), order="seq")
        for entry in entries:
            self._leave(entry)
        self._execute(
            "UPDATE tiers SET half_life = ?, per_session = ?, promote_after = ? WHERE no = ?", (*settings, no)
        )
        for entry in entries:
            self._enter(entry)
            if tier.promote_to and tier.promote_after and entry.access_count >= tier.promote_after:
                self._execute("INSERT OR REPLACE INTO due VALUES (?, ?)", (entry.id, self._no[entry.home]))
            else:
                self._execute("DELETE FROM due WHERE id = ?", (entry.id,))

    def _arms(self, selection: Selection) -> list[Condition]:
        """Disjoint queries that make up a selection, each along one index in the order of time."""
        for name, atoms in selection.where.items():
            if len(atoms) > _MOST_VALUES:
                different = list(dict.fromkeys(atoms))
                parts = [tuple(different[i : i + _MOST_VALUES]) for i in range(0, len(different), _MOST_VALUES)]
                narrower = [{**selection.where, name: part} for part in parts]
                return [arm for w in narrower for arm in self._arms(msgspec.structs.replace(selection, where=w))]
        no = [self._no[name] for name in selection.tiers if name in self._no]
        if not no:
            return []
        all_tiers = len(no) == len(self._name)
        homes = Condition("home IS NOT NULL") if all_tiers else any_of("home", no)
        conditions = where_conditions(selection.where, self._no)
        if selection.key_prefix is not None:
            conditions.append(key_prefix_condition(selection.key_prefix))
        scope = selection.scope
        visible = scope_condition(scope, self._shared)
        narrow = {"id": "sqlite_autoindex_records_1", "key": "record_by_key", "group": "record_by_group"}
        for name, index in narrow.items():
            by_prefix = name == "key" and selection.key_prefix is not None
            if by_prefix or (name in selection.where and all(map(text_of, selection.where[name]))):
                # an index that needs its own condition to be seen in the query
                given = None if name == "id" else Condition(f"{'grp' if name == 'group' else 'key'} != ''")
                return [_arm(index, [Condition("home IS NOT NULL"), given, homes, visible, *conditions])]
        if "session" in selection.where:
            return self._session_arms(selection, [homes, *conditions], visible)
        if scope.everyone:
            return [
                _arm("record_by_home", [Condition("home = ? AND home IS NOT NULL", (tier,)), *conditions])
                for tier in no
            ]
        own = [present(scope.owner), ""]
        arms = [
            _arm(
                "record_by_owner",
                [Condition("owner = ? AND home IS NOT NULL", (owner,)), homes, *conditions],
            )
            for owner in own
        ]
        others = Condition("owner NOT IN (?, ?)", (own[0], own[1]))
        return arms + [
            _arm("record_by_home", [Condition("home = ? AND home IS NOT NULL", (tier,)), others, *conditions])
            for tier in no
            if tier in self._shared
        ]

    def _session_arms(
        self, selection: Selection, conditions: Sequence[Condition], visible: Condition | None
    ) -> list[Condition]:
        names = sorted({present(text_of(atom)) for atom in selection.where["session"]})
        conversations = [
            (session, owner)
            for session in names
            for (owner,) in self._execute(
                "SELECT DISTINCT owner FROM sessions INDEXED BY session_by_name WHERE session = ? LIMIT ?",
                (session, _MOST_ARMS),
            )
        ]
        if len(conversations) < _MOST_ARMS:
            return [
                _arm(
                    "record_by_session",
                    [Condition("session = ? AND owner = ? AND home IS NOT NULL", pair), visible, *conditions],
                )
                for pair in conversations
            ]
        return [_arm("record_by_session", [Condition("home IS NOT NULL"), visible, *conditions])]

    def _span(self, session: str, owner: str, tiers: Iterable[str]) -> tuple[int, int]:
        there = conjunction(
            [
                Condition("session = ? AND owner = ? AND home IS NOT NULL", (session, owner)),
                any_of("home", [self._no[tier] for tier in tiers]),
            ]
        )
        # asked for one by one, each is found at an end of the index
        opened: int = self._execute(f"SELECT min(created_at) FROM records WHERE {there.sql}", there.parameters).get
        touched: int = self._execute(f"SELECT max(created_at) FROM records WHERE {there.sql}", there.parameters).get
        return opened, touched

    def _finish(self, batch: int) -> int:
        rows = list(
            self._execute(
                f"SELECT {COLUMNS}, destination, found FROM records WHERE batch = ? AND home IS NULL", (batch,)
            )
        )
        if any(found is None for *_, found in rows):
            return 0  # another of its tiers has not been asked yet
        entries = [row_entry(row, self._name[row[-2]]) for row in rows]
        taken = any(e.key is not None and self.by_key(e.owner, e.key) is not None for e in entries)
        if all(found for *_, found in rows) and not taken:
            for entry in entries:
                self._settle_home(entry)
            return len(entries)
        for entry in entries:
            self._execute("DELETE FROM records WHERE seq = ?", (entry.seq,))
            self._note(entry, entry.home, Stray.UNWANTED)
        return 0

    def _is_unwanted(self, entry: Entry) -> bool:
        said = [by for (by,) in self._execute("SELECT by FROM forgotten WHERE id = ?", (entry.id,))]
        return bool(said) and (entry.owner is None or not {"", present(entry.owner)}.isdisjoint(said))

    def _is_better(self, entry: Entry, current: Entry) -> bool:
        """Whether a copy that was found is to be the record, rather than the one that is known."""
        if entry.digest == current.digest:
            return self._leads_to(current.home, entry.home)
        if entry.revision != current.revision:
            return entry.revision > current.revision
        return self._leads_to(entry.home, current.home)

    def _leads_to(self, source: str, target: str) -> bool:
        """Whether records can get from `source` to `target` by spills and promotions."""
        ways = {self._tiers[source].spill_to, self._tiers[source].promote_to} - {None}
        return target in ways or any(self._leads_to(way, target) for way in ways if way is not None)

    def _is_taken(self, owner: str | None, key: str) -> bool:
        reserved = self._execute(
            "SELECT 1 FROM records INDEXED BY record_by_reservation"
            " WHERE home IS NULL AND key = ? AND owner = ? LIMIT 1",
            (present(key), present(owner)),
        ).get
        return reserved is not None or self.by_key(owner, key) is not None

    def _account(self, entry: Entry) -> tuple[Any, ...]:
        return (
            entry.id,
            present(entry.owner),
            present(entry.session),
            present(entry.group),
            present(entry.role),
            present(entry.key),
            entry.revision,
            entry.created_at,
            entry.digest,
            self._next_version(),
            entry.salience,
            entry.access_count,
            entry.accessed_at,
        )

    def _insert(self, entry: Entry) -> None:
        self._execute(
            "INSERT INTO records (id, owner, session, grp, role, key, revision, created_at, digest, version,"
            " salience, access_count, accessed_at, strength) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
            self._account(entry),
        )
        self._enter(msgspec.structs.replace(entry, seq=self._database.connection.last_insert_rowid()))

    def _settle_home(self, entry: Entry) -> None:
        """A reserved record becomes one; on purpose, so a note that its id was forgotten ends."""
        seq = self._execute("SELECT seq FROM records WHERE id = ? AND home IS NULL", (entry.id,)).get
        assert seq is not None, "a record is reserved before it is written"
        self._execute("UPDATE records SET destination = NULL, batch = NULL, found = NULL WHERE seq = ?", (seq,))
        self._strike(entry.home, entry.id)
        self._execute("DELETE FROM forgotten WHERE id = ?", (entry.id,))
        self._enter(msgspec.structs.replace(entry, seq=seq))

    def _replace(self, current: Entry, replacement: Replacement) -> None:
        """New content for a record, and perhaps a new home; what it has earned stays."""
        entry = replacement.entry
        self._leave(current)
        kept = msgspec.structs.replace(
            entry,
            seq=current.seq,
            access_count=current.access_count,
            accessed_at=current.accessed_at,
            salience=current.salience if replacement.salience is None else replacement.salience,
        )
        self._execute(
            "UPDATE records SET (id, owner, session, grp, role, key, revision, created_at, digest, version,"
            " salience, access_count, accessed_at) = (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) WHERE seq = ?",
            (*self._account(kept), current.seq),
        )
        if current.home != entry.home:
            self._strike(entry.home, entry.id)
            self._note(current, current.home, Stray.UNWANTED)
            self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
            self.readers.moved(entry.id, current.home)
        self._enter(kept)

    def _is_elsewhere(self, entry: Entry) -> bool:
        current = self._find(entry.id)
        return current is None or current.home != entry.home

    def _enter(self, entry: Entry) -> None:
        """The record comes to live in its home. Its row exists; everything that counts it is brought up to date."""
        no, owner, session, group = self._places(entry)
        tier = self._tiers[entry.home]
        touched = entry.created_at if entry.accessed_at is None else entry.accessed_at
        strength = self._strength(entry.salience, entry.access_count, touched, tier.half_life)
        place = (no, owner, session) if tier.per_session else (no, "", "")
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

    def _leave(self, entry: Entry) -> None:
        """The record stops living in its home; the inverse of `_enter`."""
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

    def _earn(self, entry: Entry) -> None:
        """What the record has earned has changed, and with it its strength."""
        no, owner, _, group = self._places(entry)
        touched = entry.created_at if entry.accessed_at is None else entry.accessed_at
        strength = self._strength(entry.salience, entry.access_count, touched, self._tiers[entry.home].half_life)
        self._execute(
            "UPDATE records SET salience = ?, access_count = ?, accessed_at = ?, strength = ? WHERE seq = ?",
            (entry.salience, entry.access_count, entry.accessed_at, strength, entry.seq),
        )
        if group:
            self._weigh_group(no, owner, group)

    def _weigh_group(self, no: int, owner: str, group: str) -> None:
        # a group stands where its strongest member would; the index holds the members in that order
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

    def _places(self, entry: Entry) -> tuple[int, str, str, str]:
        return self._no[entry.home], present(entry.owner), present(entry.session), present(entry.group)

    def _note(self, entry: Entry, tier: str, kind: Stray) -> None:
        self._execute(
            "INSERT OR REPLACE INTO strays VALUES (?, ?, ?, ?, ?)",
            (self._no[tier], entry.id, kind, present(entry.owner), present(entry.key)),
        )

    def _strike(self, tier: str, id: str) -> None:
        self._execute("DELETE FROM strays WHERE tier = ? AND id = ?", (self._no[tier], id))

    def _strays(self, condition: str, parameters: tuple[Any, ...], index: str | None = None) -> list[NotedStray]:
        tier, *others = parameters
        strays = "strays" if index is None else f"strays INDEXED BY {index}"
        rows = self._execute(f"SELECT id, kind, owner, key FROM {strays} WHERE {condition}", (self._no[tier], *others))
        return [NotedStray(id, tier, Stray(kind), absent_or(o), absent_or(key)) for id, kind, o, key in rows]

    def _find(self, id: str) -> Entry | None:
        return self._one("id = ?", (id,))

    def _one(self, condition: str, parameters: tuple[Any, ...]) -> Entry | None:
        row = next(
            self._execute(f"SELECT {COLUMNS} FROM records WHERE {condition} AND home IS NOT NULL", parameters), None
        )
        return None if row is None else row_entry(row, self._name[row[2]])

    def _all(self, condition: str, parameters: tuple[Any, ...], order: str) -> list[Entry]:
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records WHERE {condition} AND home IS NOT NULL ORDER BY {order}", parameters
        )
        return [row_entry(row, self._name[row[2]]) for row in rows]

    def _next_version(self) -> int:
        self._versions += 1
        return self._versions

    def _fact(self, name: str, otherwise: Any) -> Any:
        row = next(self._execute("SELECT value FROM facts WHERE name = ?", (name,)), None)
        return otherwise if row is None else row[0]

    def _set_fact(self, name: str, value: Any) -> None:
        self._execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))


def _arm(index: str, conditions: Sequence[Condition | None]) -> Condition:
    whole = conjunction(conditions)
    return Condition(f"INDEXED BY {index} WHERE {whole.sql}", whole.parameters)


def _added(salience: float, amount: float) -> float:
    # neither less than nothing nor more than JSON can say
    return min(max(0.0, salience + amount), sys.float_info.max)
