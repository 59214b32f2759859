"""Queries about records: selections, sessions, what a tier may hold, and what a caller may see.

Every query follows an index and reads no more rows than it needs. Nothing is changed here.
"""

from collections.abc import Iterable, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Final

import msgspec

from a2m_router.catalog.entries import COLUMNS, Entry, Stray, absent_or, present
from a2m_router.catalog.pending_writes import PendingWrites
from a2m_router.catalog.records import Records, unit_of
from a2m_router.catalog.selection import (
    Condition,
    Scope,
    Selection,
    any_of,
    conjunction,
    key_prefix_condition,
    scope_condition,
    where_conditions,
)
from a2m_router.catalog.strays import Strays
from a2m_router.catalog.tables import Tables
from a2m_router.catalog.vectors import VectorIndex
from a2m_router.protocol.wire.equality import text_atom, text_of
from a2m_router.ranking.policy import Unit
from a2m_router.storage.nearest import MAX_NEAREST

# The most values of one field in one query: SQLite takes 32,766 parameters, and there are twelve fields.
_MOST_VALUES: Final = 2000

# If the sessions asked for have more owners than this, the rows are sorted instead of read session by session.
_MOST_ARMS: Final = 64

# The numbers (`seq`) that one step of a walk reads.
_STRETCH: Final = 5000


class Session(msgspec.Struct, frozen=True):
    """A session as session/list returns it (§4.10)."""

    session: str
    owner: str | None
    tiers: Mapping[str, int]
    opened_at: int
    touched_at: int


class Queries:
    """Read-only queries."""

    def __init__(
        self, tables: Tables, records: Records, strays: Strays, pending: PendingWrites, vectors: VectorIndex
    ) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._records = records
        self._strays = strays
        self._pending = pending
        self._vectors = vectors

    def newest(self, selection: Selection, limit: int | None) -> list[Entry]:
        """Return the newest `limit` records of a selection, oldest first; ties in the order of writing."""
        count = -1 if limit is None else limit
        arms = (
            self._execute(
                f"SELECT {COLUMNS} FROM records {arm.sql} ORDER BY created_at DESC, seq DESC LIMIT ?",
                (*arm.parameters, count),
            )
            for arm in self._arms(selection)
        )
        newest_first = islice(merge(*arms, key=lambda row: (-row[9], -row[0])), limit)
        return self._tables.entries(newest_first)[::-1]

    def among(self, ids: Iterable[str], selection: Selection) -> list[Entry]:
        """Return those of `ids` that a selection has, in the order of `newest`. The cost follows the number of ids."""
        given = frozenset(selection.where["id"]) if "id" in selection.where else None
        atoms = tuple(atom for atom in map(text_atom, ids) if given is None or atom in given)
        return self.newest(msgspec.structs.replace(selection, where={**selection.where, "id": atoms}), None)

    def few(self, selection: Selection, most: int) -> list[str] | None:
        """Return the ids of a selection; None if there are more than `most`. Reads at most one row more."""
        ids: list[str] = []
        for arm in self._arms(selection):
            rows = self._execute(f"SELECT id FROM records {arm.sql} LIMIT ?", (*arm.parameters, most + 1 - len(ids)))
            ids += [id for (id,) in rows]
            if len(ids) > most:
                return None
        return ids

    def nearest(self, selection: Selection, vector: Sequence[float], count: int) -> list[str]:
        """Return the ids of a selection whose vectors are nearest to `vector`, nearest first.

        Only vectors that are indexed here count. The index holds 32-bit floats, so the order is approximate; a caller
        that needs the exact order has to read the vectors.
        """
        probe, arms = self._vectors.probe(vector), self._arms(selection)
        if probe is None or not arms:
            return []
        inner = " UNION ALL ".join(f"SELECT seq FROM records {arm.sql}" for arm in arms)
        rows = self._execute(
            "WITH near AS MATERIALIZED (SELECT rowid AS seq, distance FROM nearest WHERE vector MATCH ? AND k = ?"
            f" AND rowid IN ({inner})) SELECT id FROM near JOIN records USING (seq) ORDER BY distance, seq DESC",
            (probe, min(count, MAX_NEAREST), *(parameter for arm in arms for parameter in arm.parameters)),
        )
        return [id for (id,) in rows]

    def walk(self, selection: Selection, after: int, count: int) -> tuple[list[Entry], int | None]:
        """Return at most `count` records of a selection after the place `after`, and the place to continue from.

        Records come in the order of writing; the place is None at the end. A record keeps its place when it moves or is
        replaced, so a walk to the end returns each record that exists throughout, exactly once. A step reads a bounded
        stretch of places, and may find no record there.
        """
        last: int = self._execute("SELECT max(seq) FROM records").get or 0
        first = self._execute("SELECT min(seq) FROM records WHERE seq > ?", (after,)).get or 0
        end = max(after, first - 1) + max(_STRETCH, count)
        no = [self._tables.no[name] for name in selection.tiers if name in self._tables.no]
        whole = conjunction(
            [
                Condition("seq > ? AND seq <= ?", (after, end)),
                any_of("home", no),
                scope_condition(selection.scope, self._tables.shared),
                None if selection.key_prefix is None else key_prefix_condition(selection.key_prefix),
                *where_conditions(selection.where, self._tables.no),
            ]
        )
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records NOT INDEXED WHERE {whole.sql} ORDER BY seq LIMIT ?",
            (*whole.parameters, count),
        )
        found = self._tables.entries(rows)
        place = found[-1].seq if len(found) == count else end
        return found, place if place < last else None

    def ids(self, selection: Selection) -> list[str]:
        """Return the ids of a selection, in no particular order."""
        return [
            row[0]
            for arm in self._arms(selection)
            for row in self._execute(f"SELECT id FROM records {arm.sql}", arm.parameters)
        ]

    def sessions(self, scope: Scope) -> list[Session]:
        """Return the sessions that `scope` sees, by name. Sessions of one name under two owners are two sessions."""
        visible = (
            [Condition("TRUE")]
            if scope.everyone
            else [any_of("owner", ["", present(scope.owner)]), any_of("tier", self._tables.shared)]
        )
        arms = (f"SELECT session, owner, tier, records FROM sessions WHERE session != '' AND {v.sql}" for v in visible)
        found: dict[tuple[str, str], dict[str, int]] = {}
        rows = self._execute(
            f"{' UNION '.join(arms)} ORDER BY session, owner, tier",
            tuple(parameter for v in visible for parameter in v.parameters),
        )
        for session, owner, tier, records in rows:
            found.setdefault((session, owner), {})[self._tables.name[tier]] = records
        return [
            Session(session[1:], absent_or(owner), tiers, *self._span(session, owner, tiers))
            for (session, owner), tiers in found.items()
        ]

    def counts(self, scope: Scope) -> dict[str, int]:
        """Return how many records of each tier `scope` sees."""
        own = {}
        if not scope.everyone:
            rows = "SELECT tier, sum(records) FROM sessions WHERE owner IN ('', ?) GROUP BY tier"
            own = dict(self._execute(rows, (present(scope.owner),)))
        return {
            name: self._records.count(name) if scope.everyone or tier.shared else own.get(self._tables.no[name], 0)
            for name, tier in self._tables.tiers.items()
        }

    def newest_of(self, owner: str | None, session: str) -> int | None:
        """Return the creation time of the newest record of an owner's session; None if there is none."""
        newest: int | None = self._execute(
            "SELECT created_at FROM records WHERE session = ? AND owner = ? AND home IS NOT NULL"
            " ORDER BY created_at DESC LIMIT 1",
            (present(session), present(owner)),
        ).get
        return newest

    def in_session(self, tier: str, session: str, owner: str | None) -> list[Unit]:
        """Return the units of an owner's session in one tier, oldest first. Each group is complete."""
        where = {"session": (text_atom(session),), "owner": (text_atom(owner),)}
        return [unit_of(unit) for unit in self._records.units(self.newest(Selection(tiers=[tier], where=where), None))]

    def sees(self, scope: Scope, entry: Entry) -> bool:
        """Return whether `scope` may read the record (§6)."""
        return scope.holds(entry.owner) or self._tables.tiers[entry.home].shared

    def knows_of(self, scope: Scope, id: str) -> bool:
        """Return whether `scope` sees a record with this id, or might forget a quarantined or forgotten one."""
        entry = self._records.get(id)
        if entry is not None and self.sees(scope, entry):
            return True
        noted = "SELECT owner FROM strays WHERE id = ? AND kind = ? UNION ALL SELECT by FROM forgotten WHERE id = ?"
        return any(scope.holds(absent_or(owner)) for (owner,) in self._execute(noted, (id, Stray.QUARANTINED, id)))

    def latest(self, tier: str, count: int) -> list[Entry]:
        """Return the last `count` records that came to live in `tier`, or were replaced there."""
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records INDEXED BY record_by_version WHERE home = ? AND home IS NOT NULL"
            " ORDER BY version DESC LIMIT ?",
            (self._tables.no[tier], count),
        )
        return self._tables.entries(rows)

    def accounted(self, tier: str, ids: Iterable[str]) -> set[str]:
        """Return those of `ids` that `tier` may hold: they live there, are being written there, or are noted."""
        no = self._tables.no[tier]
        lives = "SELECT 1 FROM records WHERE id = ?1 AND ?2 IN (home, destination)"
        noted = "SELECT 1 FROM strays WHERE tier = ?2 AND id = ?1"
        return {id for id in ids if self._execute(f"{lives} UNION ALL {noted} LIMIT 1", (id, no)).get is not None}

    def may_hold(self, tier: str) -> range:
        """Return how many records `tier` can hold if this catalog is right.

        The least is without the records whose writes are pending, the most is with every noted copy. This reads the
        notes, which are few, and no record.
        """
        lives, noted = self._records.count(tier), self._strays.counts(tier)
        return range(
            lives + noted[Stray.QUARANTINED] - len(self._pending.ids_in(tier)), lives + sum(noted.values()) + 1
        )

    def tiers_with_work(self) -> set[str]:
        """Return the tiers for which work is noted: a copy to delete, or a pending write."""
        rows = self._execute(
            "SELECT no FROM tiers WHERE EXISTS (SELECT 1 FROM redo WHERE tier = no)"
            " OR EXISTS (SELECT 1 FROM strays WHERE tier = no AND kind IN (?, ?))",
            (Stray.SUPERSEDED, Stray.UNWANTED),
        )
        return {self._tables.name[no] for (no,) in rows}

    def lifting(self, tier: str, identity: str) -> tuple[bool, bool]:
        """Return whether this server may hold lifted records of `tier`, and whether their vectors are indexed here.

        Both are false for a server that holds no record of ours: it can be written to in either mode.
        """
        facts = self._execute("SELECT identity, lifted FROM tiers WHERE no = ?", (self._tables.no[tier],))
        known, lifted = next(facts)
        holds = known in (None, identity) and max(self.may_hold(tier)) > 0
        return holds and bool(lifted), holds and self._vectors.indexes(tier)

    def _arms(self, selection: Selection) -> list[Condition]:
        """Return the disjoint queries of a selection, each along one index in the order of time."""
        for name, atoms in selection.where.items():
            if len(atoms) > _MOST_VALUES:
                different = list(dict.fromkeys(atoms))
                parts = [tuple(different[i : i + _MOST_VALUES]) for i in range(0, len(different), _MOST_VALUES)]
                narrower = [{**selection.where, name: part} for part in parts]
                return [arm for w in narrower for arm in self._arms(msgspec.structs.replace(selection, where=w))]
        no = [self._tables.no[name] for name in selection.tiers if name in self._tables.no]
        if not no:
            return []
        all_tiers = len(no) == len(self._tables.name)
        homes = Condition("home IS NOT NULL") if all_tiers else any_of("home", no)
        conditions = where_conditions(selection.where, self._tables.no)
        if selection.key_prefix is not None:
            conditions.append(key_prefix_condition(selection.key_prefix))
        scope = selection.scope
        visible = scope_condition(scope, self._tables.shared)
        narrow = {"id": "sqlite_autoindex_records_1", "key": "record_by_key", "group": "record_by_group"}
        for name, index in narrow.items():
            by_prefix = name == "key" and selection.key_prefix is not None
            if by_prefix or (name in selection.where and all(map(text_of, selection.where[name]))):
                # SQLite uses a partial index only if the query repeats the index's condition
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
            if tier in self._tables.shared
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
                any_of("home", [self._tables.no[tier] for tier in tiers]),
            ]
        )
        # two queries: each then reads one end of the index
        opened: int = self._execute(f"SELECT min(created_at) FROM records WHERE {there.sql}", there.parameters).get
        touched: int = self._execute(f"SELECT max(created_at) FROM records WHERE {there.sql}", there.parameters).get
        return opened, touched


def _arm(index: str, conditions: Sequence[Condition | None]) -> Condition:
    whole = conjunction(conditions)
    return Condition(f"INDEXED BY {index} WHERE {whole.sql}", whole.parameters)
