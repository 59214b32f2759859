"""Looking things up in the catalog: selections, conversations, what the policy asks, strays. Nothing is changed here.

Every query follows an index; none looks at more than what it is asked for.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Final

import msgspec

from a2m_router.catalog.accounts import Accounts, NotedStray
from a2m_router.catalog.entries import COLUMNS, Entry, Stray, absent_or, present, row_entry
from a2m_router.catalog.selection import (
    Condition,
    Scope,
    any_of,
    conjunction,
    key_prefix_condition,
    scope_condition,
    where_conditions,
)
from a2m_router.protocol.wire.equality import Where, text_atom, text_of
from a2m_router.protocol.wire.records import Draft
from a2m_router.protocol.wire.vectors import indexed
from a2m_router.ranking.policy import Unit
from a2m_router.storage.nearest import MAX_NEAREST

# The values of one field that go into one query: SQLite takes 32,766 parameters, and there are twelve fields.
_MOST_VALUES: Final = 2000

# Sessions of one name under more owners than this are sorted instead of followed one by one.
_MOST_ARMS: Final = 64

# Places that one step of a walk looks at.
_STRETCH: Final = 5000


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """Which records: all of `scope` that live in `tiers` and meet `where` (its catalog part) and `key_prefix`."""

    tiers: Sequence[str]
    scope: Scope = Scope()
    where: Where = msgspec.field(default_factory=dict)
    key_prefix: str | None = None


class Session(msgspec.Struct, frozen=True):
    """A conversation as session/list tells it (§4.10)."""

    session: str
    owner: str | None
    tiers: Mapping[str, int]
    opened_at: int
    touched_at: int


class Lookup(Accounts):
    """The accounts, and how to find among them."""

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

    def few(self, selection: Selection, most: int) -> list[str] | None:
        """The ids of a selection, if they are at most `most`; looks at no more than that."""
        ids: list[str] = []
        for arm in self._arms(selection):
            rows = self._execute(f"SELECT id FROM records {arm.sql} LIMIT ?", (*arm.parameters, most + 1 - len(ids)))
            ids += [id for (id,) in rows]
            if len(ids) > most:
                return None
        return ids

    def nearest(self, selection: Selection, vector: Sequence[float], count: int) -> list[str]:
        """The ids of those of a selection whose vectors are nearest to `vector`, nearest first, as far as they are
        indexed here. It is asked with 32-bit floats: the very order is for those who read the vectors."""
        probe = indexed(vector, self.metric())
        arms = list(self._arms(selection))
        if not self._indexed or self._width != len(vector) or probe is None or not arms:
            return []
        inner = " UNION ALL ".join(f"SELECT seq FROM records {arm.sql}" for arm in arms)
        rows = self._execute(
            "WITH near AS MATERIALIZED (SELECT rowid AS seq, distance FROM nearest WHERE vector MATCH ? AND k = ?"
            f" AND rowid IN ({inner})) SELECT id FROM near JOIN records USING (seq) ORDER BY distance, seq DESC",
            (probe, min(count, MAX_NEAREST), *(parameter for arm in arms for parameter in arm.parameters)),
        )
        return [id for (id,) in rows]

    def is_redoing(self) -> bool:
        """Whether any tier does not hold a record yet as it is."""
        return self._execute("SELECT 1 FROM redo LIMIT 1").get is not None

    def behind(self, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that their tier does not hold yet as they are."""
        if not self.is_redoing():
            return set()
        return {id for id in ids if self._execute("SELECT 1 FROM redo WHERE id = ?", (id,)).get is not None}

    def redone(self, ids: Iterable[str]) -> dict[str, Draft]:
        """Those of `ids` that their tier does not hold yet as they are, and what they are."""
        if not self.is_redoing():
            return {}
        found = ((id, self._execute("SELECT draft FROM redo WHERE id = ?", (id,)).get) for id in ids)
        return {id: msgspec.json.decode(draft, type=Draft) for id, draft in found if draft is not None}

    def redo_in(self, tier: str) -> list[str]:
        """The ids of records in `tier` that it does not hold yet as they are."""
        return [id for (id,) in self._execute("SELECT id FROM redo WHERE tier = ?", (self._no[tier],))]

    def walk(self, selection: Selection, after: int, count: int) -> tuple[list[Entry], int | None]:
        """At most `count` of a selection behind the place `after`, in the order of writing, and where to go on from;
        None at the end.

        A record keeps its place when it moves or is replaced: a walk to the end meets each that is there all the while,
        once. A step looks at a bounded stretch, and may find nothing there.
        """
        last: int = self._execute("SELECT max(seq) FROM records").get or 0
        first = self._execute("SELECT min(seq) FROM records WHERE seq > ?", (after,)).get or 0
        end = max(after, first - 1) + max(_STRETCH, count)
        no = [self._no[name] for name in selection.tiers if name in self._no]
        key = None if selection.key_prefix is None else key_prefix_condition(selection.key_prefix)
        visible = scope_condition(selection.scope, self._shared)
        whole = conjunction(
            [
                Condition("seq > ? AND seq <= ?", (after, end)),
                any_of("home", no),
                visible,
                key,
                *where_conditions(selection.where, self._no),
            ]
        )
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records NOT INDEXED WHERE {whole.sql} ORDER BY seq LIMIT ?",
            (*whole.parameters, count),
        )
        found = [row_entry(row, self._name[row[2]]) for row in rows]
        place = found[-1].seq if len(found) == count else end
        return found, place if place < last else None

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

    def held(self, bucket: int) -> int:
        """How many records a bucket holds."""
        return self._execute("SELECT records FROM buckets WHERE no = ?", (bucket,)).get or 0

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
        for strength, seq, what, owner, group in merge(singles, groups, key=lambda row: row[:2]):
            if group == "":
                yield Unit((what,), absent_or(owner), None, seq, strength, 1)
            else:
                unit = unit_of(self.group(tier, absent_or(owner), group[1:]))
                yield msgspec.structs.replace(unit, strength=strength, weight=what)

    def bucket_of(self, id: str) -> tuple[str, int] | None:
        """The tier and the bucket that a record is in."""
        row = next(self._execute("SELECT home, bucket FROM records WHERE id = ? AND home IS NOT NULL", (id,)), None)
        return None if row is None else (self._name[row[0]], row[1])

    def in_session(self, tier: str, session: str, owner: str | None) -> list[Unit]:
        """The units of an owner's conversation in one tier, oldest first; a group goes along whole."""
        where = {"session": (text_atom(session),), "owner": (text_atom(owner),)}
        return [unit_of(unit) for unit in self.units(self.newest(Selection(tiers=[tier], where=where), None))]

    def has_session(self, session: str, owner: str | None) -> bool:
        """Whether an owner's conversation has a record anywhere."""
        place = (present(owner), present(session))
        return self._execute("SELECT 1 FROM sessions WHERE owner = ? AND session = ? LIMIT 1", place).get is not None

    def strays(self, tier: str, after: str, limit: int) -> list[NotedStray]:
        """Some of the copies to be removed from `tier`, in the order of their ids, beginning after one."""
        return self._strays(
            "tier = ? AND id > ? AND kind IN (?, ?) ORDER BY id LIMIT ?",
            (tier, after, Stray.SUPERSEDED, Stray.UNWANTED, limit),
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

    def set_aside(self, tier: str) -> list[NotedStray]:
        """The records in `tier` that are not taken in, since their ids or their owners' keys have others."""
        return self._strays("tier = ? AND kind = ? AND kind >= 3", (tier, Stray.ASIDE), "stray_by_kind")

    def noted(self, tier: str) -> Mapping[Stray, int]:
        """How many copies are noted for `tier`, of each kind."""
        rows = self._execute("SELECT kind, count(*) FROM strays WHERE tier = ? GROUP BY kind", (self._no[tier],))
        return {**dict.fromkeys(Stray, 0), **{Stray(kind): count for kind, count in rows}}

    def unfound(self) -> int:
        """How many records have earned something, and were found in no tier."""
        return self._execute("SELECT count(*) FROM earned").get or 0

    def may_hold(self, tier: str) -> range:
        """How many records `tier` can hold if all is as this catalog says: without those that it has not caught up
        with, or with every copy that is noted. It looks at the notes, which are few, and at no record."""
        strays = self._execute("SELECT count(*) FROM strays WHERE tier = ?", (self._no[tier],)).get or 0
        aside = len(self.set_aside(tier))
        lives = self.records_in(tier)
        return range(lives + aside - len(self.redo_in(tier)), lives + strays + 1)

    def latest(self, tier: str, count: int) -> list[Entry]:
        """The last `count` records that came to live in `tier`, or were replaced there."""
        rows = self._execute(
            f"SELECT {COLUMNS} FROM records INDEXED BY record_by_version WHERE home = ? AND home IS NOT NULL"
            " ORDER BY version DESC LIMIT ?",
            (self._no[tier], count),
        )
        return [row_entry(row, tier) for row in rows]

    def accounted(self, tier: str, ids: Iterable[str]) -> set[str]:
        """Those of `ids` that `tier` may hold: they live there, are being written there, or are noted."""
        no = self._no[tier]
        lives = "SELECT 1 FROM records WHERE id = ?1 AND ?2 IN (home, destination)"
        noted = "SELECT 1 FROM strays WHERE tier = ?2 AND id = ?1"
        return {id for id in ids if self._execute(f"{lives} UNION ALL {noted} LIMIT 1", (id, no)).get is not None}

    def has_notes(self, tier: str) -> bool:
        """Whether a call to `tier` may have been under way when this catalog was last in use: a copy that may exist, or
        a record that `tier` has yet to catch up with."""
        return bool(self.strays(tier, "", 1) or self.redo_in(tier))

    def lifting(self, tier: str, identity: str) -> tuple[bool, bool]:
        """Whether the server with this identity may hold records for `tier` that were written there lifted, and whether
        their vectors are indexed here. One that holds nothing of ours can be told records in any way."""
        is_same = self.identity(tier) in (None, identity)
        holds = is_same and max(self.may_hold(tier)) > 0
        return holds and self._is_lifted(tier), holds and tier in self._indexed

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


def unit_of(members: Sequence[Entry]) -> Unit:
    """A unit by its members' entries, all of one group and owner, or a single one, where strengths do not matter."""
    first = members[0]
    ids = tuple(entry.id for entry in members)
    return Unit(ids, first.owner, first.group, max(entry.seq for entry in members), 0.0, len(members))


def _arm(index: str, conditions: Sequence[Condition | None]) -> Condition:
    whole = conjunction(conditions)
    return Condition(f"INDEXED BY {index} WHERE {whole.sql}", whole.parameters)
