"""The catalog against a plain dict of records: after any sequence of changes, both have the same content."""

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import Raw

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, Name, group_name, id_name, key_name
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.records import Replacement
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.equality import parse_where
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.policy import strength
from tests.support.catalogs import NAMES, content_of, entry, is_held, opened, rewritten, strays_left
from tests.support.catalogs import TIERS as ALL_ON_PIPES
from tests.support.examples import scaled

# a write to a server over HTTP may land after the router has stopped waiting for it
TIERS = [
    msgspec.structs.replace(tier, command=None, url="http://127.0.0.1:1/") if tier.name == "procedural" else tier
    for tier in ALL_ON_PIPES
]

IDS = ["1", "2", "3", "10", "\0", "1\0", "é", "e\u0301", "\U0001f600"]
OWNERS = [None, "", "a", "b"]
KEYS = ["k", "k/", "k/a", "k/a/b", "k/ab", "k/a!", "k\0/a", "=", "é/a"]
SESSIONS = [None, "", "s", "s\0t", "\U0001f600"]
GROUPS = [None, None, "", "g", "\0g"]
ROLES = [None, "", "user", "\0"]
MOMENTS = [1000, 1001, 2000, -1]
SALIENCES = [1.0, 0.0, 0.5, 7.25, 1e30]

ids = st.sampled_from(IDS)
owners = st.sampled_from(OWNERS)
moments = st.sampled_from(MOMENTS)
homes = st.sampled_from(NAMES)
scopes = st.builds(Scope, owners)
some_ids = st.lists(st.sampled_from([*IDS, "nobody's"]), max_size=4)
entries = st.builds(
    entry,
    ids,
    homes,
    owner=owners,
    session=st.sampled_from(SESSIONS),
    group=st.sampled_from(GROUPS),
    role=st.sampled_from(ROLES),
    key=st.none() | st.sampled_from(KEYS),
    created_at=moments,
    salience=st.sampled_from(SALIENCES),
    revision=st.sampled_from([0, 0, 3]),
)
texts = st.sampled_from([*IDS, "", "user", "a", "s", "s\0t", "g", "k", "k/a", "b\0", *NAMES, *map(render, MOMENTS)])
numbers = st.sampled_from([0, 1, -0.0, 1.0, 0.5, 2, 7.25, 10**30, 1e30, 2**53 + 1, 10**400, -1, 1000])
scalars: st.SearchStrategy[Any] = st.none() | st.booleans() | texts | numbers | st.just({}) | st.just([1])
FIELDS: dict[str, Callable[[Entry], Any]] = {
    "id": lambda e: e.id,
    "tier": lambda e: e.home,
    "owner": lambda e: e.owner,
    "session": lambda e: e.session,
    "group": lambda e: e.group,
    "role": lambda e: e.role,
    "key": lambda e: e.key,
    "revision": lambda e: None if e.key is None else e.revision,
    "created_at": lambda e: render(e.created_at),
    "salience": lambda e: e.salience,
    "access_count": lambda e: e.access_count,
    "accessed_at": lambda e: None if e.accessed_at is None else render(e.accessed_at),
}
wheres = st.dictionaries(st.sampled_from(sorted(FIELDS)), scalars | st.lists(scalars, max_size=4), max_size=2)
likely: dict[str, list[Any]] = {
    "id": IDS,
    "tier": NAMES,
    "owner": OWNERS,
    "session": SESSIONS,
    "group": GROUPS,
    "role": ROLES,
    "key": [None, *KEYS],
    "created_at": [render(moment) for moment in MOMENTS],
}
likely_wheres = st.sampled_from(sorted(likely)).flatmap(
    lambda name: st.fixed_dictionaries({name: st.lists(st.sampled_from(likely[name]), min_size=1, max_size=3)})
)
prefixes = st.none() | st.sampled_from(["", "k", "k/", "k/a", "k/a/", "é", "\0", "="])


def equal(a: Any, b: Any) -> bool:
    """Return whether two JSON values are equal, by the plainest rules that suffice for the values here."""
    if isinstance(a, bool | None) or isinstance(b, bool | None):
        return a is b
    if isinstance(a, str | list | dict) or isinstance(b, str | list | dict):
        return type(a) is type(b) and bool(a == b)
    return Decimal(json.dumps(a)) == Decimal(json.dumps(b))


def meets(record: Entry, where: dict[str, Any]) -> bool:
    return all(
        any(equal(FIELDS[name](record), wanted) for wanted in (value if isinstance(value, list) else [value]))
        for name, value in where.items()
    )


def beneath(key: str | None, prefix: str) -> bool:
    if key is None:
        return False
    return key == prefix or key.startswith(prefix if prefix == "" or prefix.endswith("/") else prefix + "/")


def names(record: Entry) -> set[Name]:
    found = {id_name(record.id)}
    if record.key is not None:
        found.add(key_name(record.owner, record.key))
    if record.group is not None:
        found.add(group_name(record.owner, record.group))
    return found


def plain(record: Entry) -> Entry:
    """Return the record without the numbers that the catalog and the model assign independently."""
    return msgspec.structs.replace(record, seq=0, version=0)


def plains(records: Iterable[Entry]) -> list[Entry]:
    return [plain(record) for record in records]


def is_better(found: Entry, known: Entry, *, was_whole: bool) -> bool:
    """Return whether a copy that a scan finds should become the record in place of the known one.

    See docs/architecture.md, "catalog lost". A catalog that has been whole knows the state of every record.
    """
    way = ["procedural", "working", "episodic", "semantic"]  # the tiers in the order in which moves can reach them
    reach = {("procedural", "semantic"), ("working", "episodic"), ("working", "semantic"), ("episodic", "semantic")}
    assert {name for pair in reach for name in pair} == set(way)
    if found.digest == known.digest:
        return (known.home, found.home) in reach
    if was_whole:
        return False
    if found.revision != known.revision:
        return found.revision > known.revision
    return (found.home, known.home) in reach


class Batch:
    def __init__(self, claim: Claim, new: list[Entry], replacements: list[Replacement]) -> None:
        self.claim, self.new, self.replacements = claim, new, replacements
        self.changed: set[str] = set()  # ids that have changed since the batch began


class Move:
    def __init__(self, claim: Claim, units: list[list[Entry]], target: str) -> None:
        self.claim, self.units, self.target = claim, units, target
        self.changed: set[str] = set()


class Model(RuleBasedStateMachine):
    """The model is `living`, and the few sets beside it."""

    path: Path | None = None

    def __init__(self) -> None:
        super().__init__()
        self.tiers: dict[str, Tier] = {tier.name: tier for tier in TIERS}
        self.catalog: Catalog = opened(self.path, TIERS)
        for name in NAMES:
            self.catalog.tiers.set_scanned(name, True)
        self.unscanned: set[str] = set()
        self.was_whole = False  # set once a scan or a start has found the catalog whole
        self.living: dict[str, Entry] = {}
        self.strays: dict[tuple[str, str], tuple[Stray, str | None, str | None]] = {}
        self.forgotten: set[tuple[str, str | None]] = set()  # ids with the owner of the forget; None: for all owners
        self.due: set[str] = set()
        self.pending: dict[str, Entry] = {}  # the pending writes by id
        self.batches: list[Batch] = []
        self.moves: list[Move] = []
        self.written = 0
        self.digests = 0

    def teardown(self) -> None:
        self.catalog.close()

    # --- how the model changes

    def holds(self, scope: Scope, record: Entry) -> bool:
        return scope.owner is None or record.owner is None or record.owner == scope.owner

    def sees(self, scope: Scope, record: Entry) -> bool:
        return self.holds(scope, record) or self.tiers[record.home].shared

    def note(self, record: Entry, tier: str, kind: Stray) -> None:
        self.strays[tier, record.id] = (kind, record.owner, record.key)

    def unit(self, record: Entry) -> list[Entry]:
        if record.group is None:
            return [record]
        where = (record.home, record.owner, record.group)
        return sorted((r for r in self.living.values() if (r.home, r.owner, r.group) == where), key=lambda r: r.seq)

    def alter(self, id: str, **fields: Any) -> None:
        self.living[id] = msgspec.structs.replace(self.living[id], **fields)
        if "home" in fields:
            self.has_changed(id)

    def has_changed(self, id: str) -> None:
        """Note that the record has changed: earlier plans for it come too late."""
        for changed in (*(batch.changed for batch in self.batches), *(move.changed for move in self.moves)):
            changed.add(id)

    def is_unchanged(self, unit: list[Entry], changed: set[str]) -> bool:
        """Return whether a unit still has the same members, unchanged; a scan may have found other or better copies."""
        ids = {member.id for member in unit}
        return changed.isdisjoint(ids) and all(
            id in self.living and {member.id for member in self.unit(self.living[id])} == ids for id in ids
        )

    def replace(self, replacement: Replacement) -> None:
        new, old = replacement.entry, self.living[replacement.entry.id]
        self.has_changed(new.id)
        self.pending.pop(new.id, None)
        if new.home != old.home:
            self.strays.pop((new.home, new.id), None)
            self.note(old, old.home, Stray.UNWANTED)
            self.due.discard(new.id)
        for place, (kind, owner, key) in self.strays.items():
            if place[1] == new.id and kind == Stray.EQUAL:
                self.strays[place] = (Stray.UNWANTED, owner, key)
        self.living[new.id] = msgspec.structs.replace(
            new,
            seq=old.seq,
            access_count=old.access_count,
            accessed_at=old.accessed_at,
            salience=old.salience if replacement.salience is None else replacement.salience,
        )

    def decide_groups(self) -> None:
        """Move a group with equal copies in two scanned tiers to the tier that holds all of it."""
        further = {"working": 0, "episodic": 1, "procedural": 1.5, "semantic": 2}  # the order if both tiers hold all
        pairs: dict[tuple[str | None, str | None, str, str], None] = {}
        for (tier, id), (kind, *_) in sorted(self.strays.items(), key=lambda s: (NAMES.index(s[0][0]), s[0][1])):
            record = self.living.get(id)
            if kind == Stray.EQUAL and record is not None and record.home != tier:
                upper, lower = sorted((tier, record.home), key=lambda name: further[name])
                if "procedural" in (upper, lower) and "semantic" not in (upper, lower):
                    upper, lower = (
                        "procedural",
                        ({upper, lower} - {"procedural"}).pop(),
                    )  # procedural is shared, and no move leads there
                if not {upper, lower} & self.unscanned:
                    pairs[record.owner, record.group, upper, lower] = None
        for owner, group, upper, lower in pairs:
            unit = [record for record in self.living.values() if (record.owner, record.group) == (owner, group)]
            in_upper = [record for record in unit if record.home == upper]
            in_lower = [record for record in unit if record.home == lower]
            also_lower = [record for record in in_upper if self.is_equal(lower, record)]
            also_upper = [record for record in in_lower if self.is_equal(upper, record)]
            if len(also_lower) == len(in_upper):
                home, other, coming, staying = lower, upper, also_lower, also_upper
            elif len(also_upper) == len(in_lower):
                home, other, coming, staying = upper, lower, also_upper, also_lower
            else:
                continue
            for record in coming:
                del self.strays[home, record.id]
                self.alter(record.id, home=home)
                self.due.discard(record.id)
            for record in [*coming, *staying]:
                self.note(record, other, Stray.SUPERSEDED)

    def is_equal(self, tier: str, record: Entry) -> bool:
        return (tier, record.id) in self.strays and self.strays[tier, record.id][0] == Stray.EQUAL

    def strike_out(self, record: Entry) -> None:
        """Delete a record; no late landing brings it back."""
        self.forgotten.add((record.id, record.owner))
        self.due.discard(record.id)
        self.pending.pop(record.id, None)
        self.has_changed(record.id)
        self.note(record, record.home, Stray.UNWANTED)
        for place, (kind, owner, key) in self.strays.items():
            if place[1] == record.id and (kind != Stray.QUARANTINED or owner == record.owner):
                self.strays[place] = (Stray.UNWANTED, owner, key)

    def come_true(self, batch: Batch) -> None:
        for new in batch.new:
            self.living[new.id] = new
            self.strays.pop((new.home, new.id), None)
            if not self.unscanned:
                self.forgotten = {note for note in self.forgotten if note[0] != new.id}

    def give_up(self, batch: Batch) -> None:
        """Give up a batch: none of it becomes true, not even by a late landing."""
        for new in batch.new:
            self.note(new, new.home, Stray.UNWANTED)
            if self.tiers[new.home].url is not None:
                self.forgotten.add((new.id, new.owner))

    def given_up(self, id: str) -> Stray:
        """Return the kind of a stray of an abandoned move. The copy of a known record is deleted after a look at its
        home."""
        return Stray.SUPERSEDED if id in self.living else Stray.UNWANTED

    def was_forgotten(self, record: Entry) -> bool:
        return any(id == record.id and (by is None or record.owner in (None, by)) for id, by in self.forgotten)

    def has_taken_key(self, entry: Entry) -> bool:
        reserved = [new for batch in self.batches for new in batch.new]
        others = [record for record in [*self.living.values(), *reserved] if record.id != entry.id]
        return entry.key is not None and any((o.owner, o.key) == (entry.owner, entry.key) for o in others)

    def is_reserved(self, id: str) -> bool:
        return any(new.id == id for batch in self.batches for new in batch.new)

    # --- writes

    @rule(
        drafts=st.lists(entries, min_size=1, max_size=3),
        again=st.lists(st.tuples(st.integers(0, 9), homes), max_size=2),
        salience=st.none() | st.sampled_from(SALIENCES),
    )
    def a_write_begins(self, drafts: list[Entry], again: list[tuple[int, str]], salience: float | None) -> None:
        keyed = [record for _, record in sorted(self.living.items()) if record.key is not None]
        drafts = drafts + [msgspec.structs.replace(keyed[n % len(keyed)], home=to) for n, to in again if keyed]
        new: dict[str, Entry] = {}
        replaced: dict[str, Replacement] = {}
        for draft in drafts:
            current = self.catalog.records.get(draft.id)
            if current is None and draft.key is not None:
                current = self.catalog.records.by_key(draft.owner, draft.key)
            self.digests += 1
            digest = b"%d" % self.digests
            if current is None:
                if draft.id not in new and not any(
                    n.key == draft.key and n.owner == draft.owner and n.key is not None for n in new.values()
                ):
                    self.written += 1
                    new[draft.id] = msgspec.structs.replace(draft, digest=digest, seq=self.written)
            elif (draft.key, draft.owner) == (current.key, current.owner) and draft.key is not None:
                changed = rewritten(
                    current, digest=digest, home=draft.home, session=draft.session, group=draft.group, role=draft.role
                )
                replaced[current.id] = Replacement(changed, current.version, salience)
        written = [*new.values(), *(r.entry for r in replaced.values())]
        in_the_way = [stray for each in written for stray in self.catalog.strays.in_the_way(each.home, [each])]
        wanted = {name for each in written for name in names(each)}
        wanted |= {name for id in replaced for name in names(self.living[id])}
        wanted |= {id_name(stray.id) for stray in in_the_way}
        claim = self.catalog.claims.take_if_free(wanted)
        if claim is None:
            return
        for stray in in_the_way:
            self.catalog.remove_notes(stray.tier, [stray.id])
            self.strays.pop((stray.tier, stray.id), None)
        batch = Batch(claim, list(new.values()), list(replaced.values()))
        if batch.new:
            self.catalog.reserve(batch.new)
        for each in batch.new:
            self.note(each, each.home, Stray.PENDING)
        self.batches.append(batch)

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 9))
    def a_write_succeeds(self, which: int) -> None:
        batch = self.batches.pop(which % len(self.batches))
        redo = {r.entry.id: content_of(r.entry) for r in batch.replacements}
        lost = self.catalog.commit_write(batch.new, batch.replacements, redo=redo)
        self.come_true(batch)
        assert [r.entry.id for r in lost] == [r.entry.id for r in batch.replacements if r.entry.id in batch.changed]
        for replacement in batch.replacements:
            if replacement not in lost:
                self.replace(replacement)
                self.pending[replacement.entry.id] = replacement.entry
        batch.claim.release()

    @precondition(lambda self: self.batches)
    @rule(which=st.integers(0, 9))
    def a_write_fails(self, which: int) -> None:
        batch = self.batches.pop(which % len(self.batches))
        self.catalog.abandon(batch.new)
        self.give_up(batch)
        batch.claim.release()

    @precondition(lambda self: self.pending)
    @rule(which=st.sets(st.integers(0, 9), min_size=1, max_size=3))
    def tiers_catch_up(self, which: set[int]) -> None:
        waiting = sorted(self.pending)
        ids = {waiting[n % len(waiting)] for n in which}
        held = [id for id in sorted(ids) if not is_held(self.catalog.claims, id_name(id))]
        self.catalog.end_pending(self.catalog.records.find(held).values(), {})
        for id in held:
            del self.pending[id]

    # --- moves

    @precondition(lambda self: self.living)
    @rule(id=ids, others=some_ids, to=homes)
    def a_move_begins(self, id: str, others: list[str], to: str) -> None:
        start = self.living.get(id)
        if start is None or start.home == to:
            return
        units = {}
        for each in [id, *others]:
            if each in self.living and self.living[each].home == start.home:
                unit = self.catalog.records.unit(self.catalog.records.find([each])[each])
                units[unit[0].id] = unit
        moving = [member for unit in units.values() for member in unit]
        in_the_way = self.catalog.strays.in_the_way(to, moving)
        wanted = {name for member in moving for name in names(member)} | {id_name(stray.id) for stray in in_the_way}
        claim = self.catalog.claims.take_if_free(wanted)
        if claim is None:
            return
        for stray in in_the_way:
            self.catalog.remove_notes(to, [stray.id])
            self.strays.pop((to, stray.id), None)
        self.catalog.note_copies(moving, to)
        for member in moving:
            self.note(member, to, Stray.PENDING)
        self.moves.append(Move(claim, list(units.values()), to))

    @precondition(lambda self: self.moves)
    @rule(which=st.integers(0, 9), salience=st.sampled_from([0.0, 0.5]), given_up=st.booleans())
    def a_move_ends(self, which: int, salience: float, given_up: bool) -> None:
        move = self.moves.pop(which % len(self.moves))
        if not given_up:
            expected = []
            for unit in move.units:
                if self.is_unchanged(unit, move.changed):
                    for member in unit:
                        was = self.living[member.id]
                        expected.append(was)
                        self.alter(member.id, home=move.target, salience=was.salience + salience)
                        self.strays.pop((move.target, member.id))
                        self.note(was, was.home, Stray.SUPERSEDED)
                        self.due.discard(member.id)
                        self.pending.pop(member.id, None)
            assert plains(self.catalog.flip(move.units, move.target, salience)) == plains(expected)
        members = [member for unit in move.units for member in unit]
        self.catalog.give_up(members, move.target)
        for member in members:
            kind, *rest = self.strays.get((move.target, member.id), (Stray.UNWANTED, None, None))
            if kind == Stray.PENDING:
                self.strays[move.target, member.id] = (self.given_up(member.id), rest[0], rest[1])
        move.claim.release()

    @precondition(lambda self: self.living)
    @rule(which=st.integers(0, 9), summary=entries, forgotten=st.none() | st.integers(0, 9))
    def a_unit_gives_way_to_its_summary(self, which: int, summary: Entry, forgotten: int | None) -> None:
        start = self.living[sorted(self.living)[which % len(self.living)]]
        known = {*self.living, *(named for named, _ in self.forgotten)}
        fresh = [id for id in IDS if id not in known and not self.is_reserved(id)]
        if summary.home == start.home or not fresh:
            return
        unit = self.catalog.records.unit(self.catalog.records.find([start.id])[start.id])
        claim = self.catalog.claims.take_if_free({name for member in unit for name in names(member)})
        if claim is None:
            return
        summary = msgspec.structs.replace(summary, id=fresh[0], owner=start.owner, group=start.group, key=None)
        self.catalog.note_copies([summary], summary.home)
        self.note(summary, summary.home, Stray.PENDING)
        if forgotten is not None:
            self.some_are_forgotten([unit[forgotten % len(unit)].id], Scope())
        assert self.catalog.distil(unit, summary, 5000) == (forgotten is None)
        if forgotten is None:
            for member in unit:
                self.strike_out(self.living.pop(member.id))
            self.written += 1
            self.living[summary.id] = msgspec.structs.replace(summary, seq=self.written)
            del self.strays[summary.home, summary.id]
        else:
            self.note(summary, summary.home, Stray.UNWANTED)
        self.catalog.give_up([summary], summary.home)
        claim.release()

    @rule(id=ids, tier=homes, true=st.booleans())
    def a_home_has_lost_a_record(self, id: str, tier: str, true: bool) -> None:
        if is_held(self.catalog.claims, id_name(id)):
            return
        old = self.living.get(id)
        came = self.catalog.come_home(id, old.digest if old and true else b"another", tier)
        assert came == (old is not None and true and old.home != tier)
        if came:
            assert old is not None
            self.alter(id, home=tier)
            self.strays.pop((tier, id), None)
            self.note(old, old.home, Stray.UNWANTED)
            self.due.discard(id)
            self.pending.pop(id, None)

    @rule(tier=homes)
    def the_sweeper_comes_by(self, tier: str) -> None:
        swept = [
            s for s in self.catalog.strays.removable(tier, "", 100) if not is_held(self.catalog.claims, id_name(s.id))
        ]
        self.catalog.remove_notes(tier, [stray.id for stray in swept])
        for stray in swept:
            del self.strays[tier, stray.id]

    # --- forgets, accesses and scans

    @rule(wanted=some_ids, scope=scopes)
    def some_are_forgotten(self, wanted: list[str], scope: Scope) -> None:
        expected: list[Entry] = []
        for id in dict.fromkeys(wanted):
            old = self.living.get(id)
            if old is None or not self.holds(scope, old):
                for (tier, named), (kind, owner, key) in sorted(
                    self.strays.items(), key=lambda s: NAMES.index(s[0][0])
                ):
                    if (named, kind) == (id, Stray.QUARANTINED) and (
                        scope.owner is None or owner in (None, scope.owner)
                    ):
                        self.strays[tier, named] = (Stray.UNWANTED, owner, key)
                        self.forgotten.add((id, owner))
                        if all(each.id != id for each in expected):
                            account = Entry(id=id, home=tier, owner=owner, created_at=5000, digest=b"", access_count=0)
                            expected.append(msgspec.structs.replace(account, key=key))
                if self.unscanned and old is None:
                    self.forgotten.add((id, scope.owner))
            else:
                expected.append(self.living.pop(id))
                self.strike_out(old)
        assert plains(self.catalog.forget(wanted, scope, 5000)) == plains(expected)

    @rule(scope=scopes, where=wheres | likely_wheres, prefix=prefixes)
    def a_selection_is_forgotten(self, scope: Scope, where: dict[str, Any], prefix: str | None) -> None:
        if where or prefix is not None:
            self.some_are_forgotten(self.catalog.queries.ids(selection_of(NAMES, scope, where, prefix)), scope)

    @rule(wanted=some_ids, now=moments)
    def some_are_recalled(self, wanted: list[str], now: int) -> None:
        earned = False
        for id in wanted:
            if id in self.living:
                count = self.living[id].access_count + 1
                self.alter(id, access_count=count, accessed_at=now)
                tier = self.tiers[self.living[id].home]
                if tier.promote_after is not None and count >= tier.promote_after:
                    self.due.add(id)
                    earned = True
        assert self.catalog.touch(wanted, now) == earned

    @rule(wanted=some_ids, amount=st.sampled_from([1.0, 0.25, -1.0]), scope=scopes)
    def some_are_reinforced(self, wanted: list[str], amount: float, scope: Scope) -> None:
        seen = {id for id in wanted if id in self.living and self.holds(scope, self.living[id])}
        for id in seen:
            self.alter(id, salience=max(0.0, self.living[id].salience + amount))
        assert self.catalog.reinforce(wanted, amount, scope) == len(seen)

    @rule(tier=homes)
    def a_tier_must_be_scanned(self, tier: str) -> None:
        self.catalog.tiers.set_scanned(tier, False)
        self.unscanned.add(tier)

    @rule(tier=homes, held=st.lists(entries, max_size=3))
    def a_tier_is_scanned(self, tier: str, held: list[Entry]) -> None:
        held = [msgspec.structs.replace(each, home=tier) for each in held]
        adopted, refused = self.catalog.adopt(held)
        count, expected = 0, []
        for each in held:
            current = self.living.get(each.id)
            known = current is not None and current.home == tier
            noted = self.strays.get((tier, each.id), (None,))[0]
            if noted is not None and not (noted == Stray.QUARANTINED and current is None):
                continue
            if known:
                continue
            if self.was_forgotten(each) and (current is None or current.digest != each.digest):
                self.note(each, tier, Stray.UNWANTED)
            elif self.is_reserved(each.id) or (current is not None and current.owner != each.owner):
                self.note(each, tier, Stray.QUARANTINED)
                expected.append(each)
            elif current is not None and current.group is not None and current.digest == each.digest:
                self.note(each, tier, Stray.EQUAL)
            elif current is not None and not is_better(each, current, was_whole=self.was_whole):
                self.note(each, tier, Stray.SUPERSEDED)
            elif self.has_taken_key(each):
                self.note(each, tier, Stray.QUARANTINED)
                expected.append(each)
            elif current is not None:
                self.replace(Replacement(each, current.version))
                self.note(current, current.home, Stray.SUPERSEDED)
            else:
                self.written += 1
                self.living[each.id] = msgspec.structs.replace(each, seq=self.written)
                self.strays.pop((tier, each.id), None)
                count += 1
        assert (adopted, refused) == (count, expected)
        self.catalog.end_scan(tier)
        self.unscanned.discard(tier)
        if not self.unscanned:
            self.was_whole = True
            self.forgotten = {note for note in self.forgotten if note[0] not in self.living}
        self.decide_groups()

    # --- what the catalog and the model must agree on

    @rule(
        where=wheres | likely_wheres,
        tiers=st.just(NAMES) | st.lists(homes, unique=True),
        scope=scopes,
        prefix=prefixes,
        limit=st.none() | st.integers(0, 4),
    )
    def a_selection_is_what_a_plain_filter_finds(
        self, where: dict[str, Any], tiers: list[str], scope: Scope, prefix: str | None, limit: int | None
    ) -> None:
        selection = selection_of(tiers, scope, where, prefix)
        expected = sorted(
            (
                record
                for record in self.living.values()
                if record.home in tiers
                and self.sees(scope, record)
                and meets(record, where)
                and (prefix is None or beneath(record.key, prefix))
            ),
            key=lambda record: (record.created_at, record.seq),
        )
        assert sorted(self.catalog.queries.ids(selection)) == sorted(record.id for record in expected)
        newest = expected if limit is None else expected[len(expected) - min(limit, len(expected)) :]
        assert plains(self.catalog.queries.newest(selection, limit)) == plains(newest)

    @rule(session=st.sampled_from(["s", "", "s\0t", "t"]), tier=homes, scope=scopes)
    def a_conversation_leaves_in_whole_units(self, session: str, tier: str, scope: Scope) -> None:
        whose = tier, session, scope.owner
        there = (r for r in self.living.values() if (r.home, r.session, r.owner) == whose)
        units: dict[str, tuple[str, ...]] = {}
        for record in sorted(there, key=lambda record: (record.created_at, record.seq)):
            ids = tuple(member.id for member in self.unit(record))
            units.setdefault(ids[0], ids)
        assert [unit.ids for unit in self.catalog.queries.in_session(tier, session, scope.owner)] == list(
            units.values()
        )

    @invariant()
    def every_record_is_as_it_should_be(self) -> None:
        found = self.catalog.records.find([*IDS, "nobody's"])
        assert {id: plain(record) for id, record in found.items()} == {
            id: plain(record) for id, record in self.living.items()
        }
        order = sorted(found.values(), key=lambda record: record.seq)
        assert [record.id for record in order] == sorted(self.living, key=lambda each: self.living[each].seq)
        for record in found.values():
            assert plains(self.catalog.records.unit(record)) == plains(self.unit(self.living[record.id]))

    @invariant()
    def every_key_leads_to_its_record(self) -> None:
        keys = {(record.owner, record.key): record for record in self.living.values() if record.key is not None}
        for owner in OWNERS:
            for key in KEYS:
                found = self.catalog.records.by_key(owner, key)
                expected = keys.get((owner, key))
                assert (found and plain(found)) == (expected and plain(expected))

    @invariant()
    def everything_is_counted(self) -> None:
        per_tier = Counter(record.home for record in self.living.values())
        assert {name: self.catalog.records.count(name) for name in NAMES} == {name: per_tier[name] for name in NAMES}
        for scope in map(Scope, OWNERS):
            seen = [record for record in self.living.values() if self.sees(scope, record)]
            visible = Counter(record.home for record in seen)
            assert self.catalog.queries.counts(scope) == {name: visible[name] for name in NAMES}
            talks: dict[tuple[str, str | None], list[Entry]] = {}
            for record in seen:
                if record.session is not None:
                    talks.setdefault((record.session, record.owner), []).append(record)
            assert [
                (s.session, s.owner, s.tiers, s.opened_at, s.touched_at) for s in self.catalog.queries.sessions(scope)
            ] == [
                (
                    *talk,
                    Counter(record.home for record in records),
                    min(record.created_at for record in records),
                    max(record.created_at for record in records),
                )
                for talk, records in sorted(
                    talks.items(), key=lambda item: (item[0][0], item[0][1] is not None, item[0][1] or "")
                )
            ]

    @invariant()
    def the_weakest_of_every_overfull_bucket_come_first(self) -> None:
        for name, tier in self.tiers.items():
            buckets: dict[Any, list[Entry]] = {}
            for record in self.living.values():
                if record.home == name:
                    place = (record.owner, record.session) if tier.per_session else None
                    buckets.setdefault(place, []).append(record)
            expected = []
            for records in buckets.values():
                if tier.capacity is not None and len(records) > tier.capacity:
                    units = {self.unit(record)[0].id: self.unit(record) for record in records}
                    order = sorted(units.values(), key=lambda unit: max(map(self.standing, unit)))
                    expected.append(
                        (
                            len(records),
                            [(tuple(m.id for m in unit), sum(m in records for m in unit)) for unit in order],
                        )
                    )
            found = [
                (held, [(unit.ids, unit.weight) for unit in self.catalog.buckets.weakest(name, bucket)])
                for bucket, held in self.catalog.buckets.overfull(name)
            ]
            assert sorted(found) == sorted(expected)

    def standing(self, record: Entry) -> tuple[float, int]:
        touched = record.created_at if record.accessed_at is None else record.accessed_at
        worth = strength(record.salience, record.access_count, touched, self.tiers[record.home].half_life)
        return worth, record.seq

    @invariant()
    def what_is_due_is_due(self) -> None:
        expected = {id for id in self.due if self.tiers[self.living[id].home].promote_to is not None}
        assert {record.id for name in NAMES for record in self.catalog.buckets.due(name)} == expected
        self.due = expected

    @invariant()
    def every_stray_is_noted(self) -> None:
        assert strays_left(self.catalog) == len(self.strays)
        for name in NAMES:
            noted = [(s.id, s.tier, s.kind, s.owner, s.key) for s in self.catalog.strays.removable(name, "", 100)]
            assert noted == [
                (id, tier, *stray)
                for (tier, id), stray in sorted(self.strays.items())
                if tier == name and stray[0] in (Stray.SUPERSEDED, Stray.UNWANTED)
            ]
            assert [stray.id for stray in self.catalog.strays.removable(name, "1", 2)] == [
                id for id, *_ in noted if id > "1"
            ][:2]

    @rule(tier=homes, others=st.lists(entries, max_size=2))
    def the_strays_in_the_way_are_those_of_an_id_or_a_key(self, tier: str, others: list[Entry]) -> None:
        found = self.catalog.strays.in_the_way(tier, others)
        assert {(s.id, s.tier, s.kind, s.owner, s.key) for s in found} == {
            (id, where, kind, owner, key)
            for (where, id), (kind, owner, key) in self.strays.items()
            if where == tier
            and any(o.id == id or (key is not None and (o.owner, o.key) == (owner, key)) for o in others)
        }
        assert len({stray.id for stray in found}) == len(found)

    @invariant()
    def notes_of_forgetting_and_reservations_agree(self) -> None:
        for id in IDS:
            assert self.catalog.tombstones.is_forgotten(id) == any(id == named for named, _ in self.forgotten)
            assert self.catalog.records.is_reserved(id) == self.is_reserved(id)

    @invariant()
    def every_tier_is_known_to_be_behind_with_what_it_is_behind_with(self) -> None:
        assert self.pending.keys() <= self.living.keys()
        assert self.catalog.pending.drafts([*IDS, "nobody's"]) == {
            id: content_of(new) for id, new in self.pending.items()
        }
        assert self.catalog.pending.among([*IDS, "nobody's"]) == self.pending.keys()
        assert self.catalog.pending.is_open() == bool(self.pending)
        for name in NAMES:
            there = [id for id in self.pending if self.living[id].home == name]
            assert sorted(self.catalog.pending.ids_in(name)) == sorted(there)
            lives = sum(record.home == name for record in self.living.values())
            strays = [kind for (tier, _), (kind, *_) in self.strays.items() if tier == name]
            least = lives + strays.count(Stray.QUARANTINED) - len(there)
            assert self.catalog.queries.may_hold(name) == range(least, lives + len(strays) + 1)


def selection_of(tiers: list[str], scope: Scope, where: dict[str, Any], prefix: str | None) -> Selection:
    raw = {name: Raw(json.dumps(value).encode()) for name, value in where.items()}
    return Selection(tiers=tiers, scope=scope, where=parse_where(raw), key_prefix=prefix)


CHANGES: dict[str, Any] = {
    "half_life": st.sampled_from([None, 1.0, 300.0]),
    "per_session": st.booleans(),
    "promote_after": st.none() | st.integers(1, 3),
}


class OnFile(Model):
    """The same model on a file that is now and then closed, or left as by a crash, and opened with other settings."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp()
        self.path = Path(self.folder) / "catalog.db"
        super().__init__()

    def teardown(self) -> None:
        super().teardown()
        shutil.rmtree(self.folder)

    def open_anew(self, half_life: float | None, per_session: bool, promote_after: int | None) -> None:
        self.catalog.close()
        before = self.tiers
        working = msgspec.structs.replace(before["working"], half_life=half_life, per_session=per_session)
        episodic = msgspec.structs.replace(
            before["episodic"],
            half_life=None if half_life is None else half_life * 100,
            promote_after=promote_after,
            promote_to=None if promote_after is None else "semantic",
        )
        self.tiers = {**before, "working": working, "episodic": episodic}
        for name, tier in self.tiers.items():
            if _settings(tier) != _settings(before[name]):
                self.due -= {id for id in self.due if self.living[id].home == name}
                if tier.promote_after is not None:
                    self.due |= {
                        record.id
                        for record in self.living.values()
                        if record.home == name and record.access_count >= tier.promote_after
                    }
        self.was_whole |= not self.unscanned
        self.catalog = opened(self.path, list(self.tiers.values()))
        assert {name for name in NAMES if not self.catalog.tiers.is_scanned(name)} == self.unscanned

    @precondition(lambda self: not self.batches and not self.moves)
    @rule(**CHANGES)
    def it_is_closed_and_opened(self, **drawn: Any) -> None:
        self.open_anew(**drawn)

    @rule(**CHANGES)
    def it_crashes_and_recovers(self, **drawn: Any) -> None:
        self.open_anew(**drawn)
        batches, self.batches, self.moves = self.batches, [], []
        self.catalog.begin_recovery()
        for batch in batches:
            self.give_up(batch)
        for place, (kind, owner, key) in self.strays.items():
            if kind == Stray.PENDING:
                self.strays[place] = (self.given_up(place[1]), owner, key)


def _settings(tier: Tier) -> tuple[float | None, bool, int | None]:
    return tier.half_life, tier.per_session, tier.promote_after


TestInMemory: Any = Model.TestCase
TestInMemory.settings = settings(max_examples=scaled(15), stateful_step_count=40)
TestOnFile: Any = OnFile.TestCase
TestOnFile.settings = settings(max_examples=scaled(8), stateful_step_count=40)
