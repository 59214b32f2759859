"""A model of what must be true of a federation with concurrent clients: simpler than the code, and independent of it.

Every operation has a beginning and an end; between the two it may take effect at any moment. An *object* is one record
that a client can name: a generated one by its content, one with an explicit id by the id, a keyed one by owner and key.
For each object the model keeps its touches: the operations that may have changed it, and the states that it may have
after each. A read may show any state that a touch has left and that was not certainly overwritten before the read
began, and no other.

Where calls fail, an operation may end with an error, or with an unknown outcome:
- a write that was refused has not happened;
- a write with an unknown outcome has happened wholly or not at all. It is undecided until `decide`: then nothing is in
  progress, every record is read, and the state that is seen is the final one.
"""

import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import count, pairwise
from math import inf
from typing import Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.records import Record, vector_bytes
from a2m_router.protocol.wire.timestamps import parse

# one record: ("new", number) | ("id", id) | ("key", owner, key)
Object: TypeAlias = tuple[Any, ...]


class Version(msgspec.Struct, eq=False):
    """One content of one record, as a client wrote it; `id` once it is known, `m` the value of its metadata's `m`."""

    number: int
    object: Object
    fields: dict[str, Any]
    tier: str | None
    m: Any
    began: int  # the clock's time when it was written
    id: str | None = None
    ended: int | None = None
    group_mates: frozenset[int] = frozenset()

    @property
    def owner(self) -> str | None:
        owner: str | None = self.fields.get("owner")
        return owner


class State(msgspec.Struct, frozen=True):
    """A possible state of an object: a version, at a revision (None: unknown)."""

    number: int
    revision: int | None


ABSENT: Final = State(0, None)

Answer = Literal["yes", "no", "maybe"]
Matching = Callable[[Version], Answer]


def none_excused(version: "Version") -> bool:
    """Excuse no record: every tier answers, so none may be missing."""
    return False


class Touch(msgspec.Struct, eq=False):
    """The effect of one operation on one object."""

    begin: int
    end: int | None
    effects: frozenset[State]
    matching: Matching | None = None


class Promotion(msgspec.Struct, eq=False):
    """One call that moves records: those with these ids, and those in these owners' groups."""

    begin: int
    end: int | None
    ids: frozenset[str | None]
    groups: frozenset[tuple[str | None, str]]

    def means(self, version: Version) -> bool:
        return version.id in self.ids or (version.owner, version.fields.get("group")) in self.groups


class Selector(msgspec.Struct, frozen=True):
    """A selection by fields that the model knows; a tier is never certain, since records move by themselves.

    `query`: matches every record that contains one of its words. `uncertain`: something else decides, too.
    """

    owner: str | None = None
    ids: tuple[str, ...] | None = None
    where: Mapping[str, Any] = msgspec.field(default_factory=dict)
    key_prefix: str | None = None
    tier: str | None = None
    query: str | None = None
    uncertain: bool = False

    def matches(self, version: Version) -> Answer:
        certain = not self.uncertain and self.tier is None
        if self.ids is not None:
            if version.id is None and version.object[0] != "id":
                certain = False
            elif (version.id or version.object[1]) not in self.ids:
                return "no"
        for name, wanted in self.where.items():
            value = version.m if name == "m" else version.fields.get(name)
            if value != wanted:
                return "no"
        if self.key_prefix is not None:
            key = version.fields.get("key")
            if key is None or not (key == self.key_prefix or key.startswith(self.key_prefix + "/")):
                return "no"
        if self.query is not None and not set(self.query.split()) & set(version.fields["content"].split()):
            return "no"
        return "yes" if certain else "maybe"

    def forgets(self, version: Version) -> Answer:
        return self.matches(version) if self.owner is None or version.owner in (None, self.owner) else "no"

    def shows(self, version: Version) -> Answer:
        if self.owner is None or version.owner in (None, self.owner):
            return self.matches(version)
        return "no" if self.matches(version) == "no" else "maybe"  # it may live in a shared tier


class Model:
    """The history so far. Each method that ends an operation raises AssertionError for an answer that cannot be true.

    Args:
        clock: returns the federation's time without moving it.
        shared: the tiers that every principal sees.
    """

    def __init__(self, clock: Callable[[], int], shared: Iterable[str]) -> None:
        self._clock = clock
        self._shared = frozenset(shared)
        self._ticks = count(1)
        self._numbers = count(1)
        self.versions: dict[int, Version] = {}
        self._touches: dict[Object, list[Touch]] = {}
        self._forgetting: list[tuple[int, Selector]] = []
        self._reinforced: list[tuple[int, int, tuple[str, ...], float]] = []
        self._salience_unknown: set[str] = set()  # ids and groups
        self._promotions: list[Promotion] = []
        self._recalled: dict[tuple[str, str], int] = {}
        self._recalls_unheard = 0
        self._recalled_before_cut: dict[tuple[str, str], int] = {}
        self._unheard: list[list[Written]] = []  # the batches with an unknown outcome
        self._put_back_at = 0
        self._created: dict[int, str] = {}
        self._created_by_id: dict[str, str] = {}

    def tick(self) -> int:
        return next(self._ticks)

    def known_ids(self) -> list[str]:
        """Return the ids that a client has received, in the order of writing."""
        return list(dict.fromkeys(version.id for version in self.versions.values() if version.id is not None))

    # --- writes

    def new_version(self, object: Object | None, fields: dict[str, Any], tier: str | None, m: Any) -> Version:
        number = next(self._numbers)
        fields = {**fields, "content": f"n{number} alpha {fields.get('content', '')}".strip()}
        version = Version(number, object or ("new", number), fields, tier, m, self._clock())
        self.versions[number] = version
        return version

    def begin_write(self, versions: list[Version]) -> "list[Written]":
        """Begin the write of a batch; return for each object its last version, and how many rewrites lead to it."""
        begin = self.tick()
        last: dict[Object, tuple[Version, int]] = {}
        for version in versions:
            if version.object not in last:
                last[version.object] = (version, 1)
            elif version.object[0] == "key":
                last[version.object] = (version, last[version.object][1] + 1)
        writes = []
        for object, (version, times) in last.items():
            touch = Touch(begin, None, frozenset({State(version.number, None)}))
            self._of(object).append(touch)
            writes.append((version, touch, times))
        return writes

    def end_write(self, writes: "list[Written]", ids: Mapping[int, str]) -> None:
        end = self.tick()
        for version, touch, times in writes:
            before = self._allowed(version.object, touch.begin, end, without=touch)
            version.id = ids[version.number]
            version.ended = self._clock()
            if version.object[0] == "id":
                assert version.id == version.object[1]
            after: set[State] = set()
            for state in before:
                if state == ABSENT:
                    after.add(State(version.number, times - 1 if version.object[0] == "key" else None))
                elif version.object[0] == "key":
                    after.add(State(version.number, None if state.revision is None else state.revision + times))
                else:
                    after.add(state)
            touch.effects = frozenset(after)
            touch.end = end

    def end_edit(self, writes: "list[Written]", id: str, seen: int | None) -> None:
        """End a write of a page that was at the revision `seen`; None: there was no page."""
        [(version, touch, _)] = writes
        before = self._allowed(version.object, touch.begin, self.tick(), without=touch)
        assert any(_is_at(state, seen) for state in before), f"written at {seen}, where it may be {before}: {version}"
        self.end_write(writes, {version.number: id})
        touch.effects = frozenset({State(version.number, 0 if seen is None else seen + 1)})

    def end_repeat(self, begin: int, version: Version, id: str) -> None:
        """End a repeated write that was answered as done: the page must still be what was written."""
        allowed = self._allowed(version.object, begin, self.tick())
        assert version.id == id
        assert any(state.number == version.number for state in allowed), f"{version} is not there, but {allowed}"

    def end_conflict(self, begin: int, object: Object, revision: int | None) -> None:
        """End a write that was refused because its page is at this revision; None: there is no page."""
        allowed = self._allowed(object, begin, self.tick())
        assert any(_is_at(state, revision) for state in allowed), f"{object} is not at {revision}, but {allowed}"

    def refuse_write(self, writes: "list[Written]") -> None:
        """End a write that was answered with an error: no record of the batch is or becomes visible."""
        for version, touch, _ in writes:
            self._touches[version.object].remove(touch)

    def leave_write(self, writes: "list[Written]") -> None:
        """End a write with an unknown outcome: all records of the batch are or become visible, or none."""
        self._unheard.append(writes)

    # --- forgetting

    def begin_forget(self, selector: Selector) -> int:
        begin = self.tick()
        self._forgetting.append((begin, selector))
        for touches in self._touches.values():
            touches.append(Touch(begin, None, frozenset(), selector.forgets))
        return begin

    def end_forget(self, begin: int, selector: Selector, forgotten: int) -> None:
        end = self.tick()
        self._forgetting.remove((begin, selector))
        least = most = 0
        for object, touches in self._touches.items():
            touch = next(t for t in touches if t.begin == begin)
            before = self._allowed(object, begin, end, without=touch)
            present = [state for state in before if state != ABSENT]
            answers = [selector.forgets(self.versions[state.number]) for state in present]
            least += bool(answers) and ABSENT not in before and all(answer == "yes" for answer in answers)
            most += any(answer != "no" for answer in answers)
            if all(answer == "no" for answer in answers):
                touches.remove(touch)
                continue
            after = {state for state, answer in zip(present, answers, strict=True) if answer != "yes"}
            if ABSENT in before or any(answer != "no" for answer in answers):
                after.add(ABSENT)
            touch.effects = frozenset(after)
            touch.end = end
            touch.matching = None
        assert least <= forgotten <= most, f"{forgotten} forgotten, expected {least} to {most}: {selector}"

    def refuse_forget(self, begin: int, selector: Selector) -> None:
        """End a forget that was answered with an error: no record is forgotten."""
        self._forgetting.remove((begin, selector))
        for touches in self._touches.values():
            touches[:] = [touch for touch in touches if touch.begin != begin]

    def leave_forget(self, begin: int, selector: Selector) -> None:
        """End a forget with an unknown outcome: each selected record may be deleted, or not."""
        end = self.tick()
        self._forgetting.remove((begin, selector))
        for object, touches in self._touches.items():
            touch = next(t for t in touches if t.begin == begin)
            before = self._allowed(object, begin, end, without=touch)
            if all(selector.forgets(self.versions[state.number]) == "no" for state in before - {ABSENT}):
                touches.remove(touch)
                continue
            touch.effects = before | {ABSENT}
            touch.end = end
            touch.matching = None

    # --- reads

    def end_read(
        self,
        begin: int,
        selector: Selector,
        records: list[Record],
        *,
        embeddings: bool = False,
        limit: int | None = None,
        newest: bool = False,
        excused: Callable[[Version], bool] = none_excused,
    ) -> None:
        """End a timeline (`newest`: its limit keeps the newest) or a recall (`limit` keeps the best).

        Both answer from one set of records; only a record that was changed after they began may be missing from it. So
        each such record that is not shown may have had a place within the limit.

        `excused`: whether a record may be missing because it lives in a tier that the answer names as missing.
        """
        end = self.tick()
        self._consistent(records, selector)
        shown = {self._check(record, begin, end, selector, embeddings) for record in records}
        assert len(shown) == len(records), "one record under two ids"
        assert limit is None or len(records) <= limit
        must = [version for object in self._touches if (version := self._must(object, begin, end, selector))]
        is_full = limit is not None and len(records) + self._changed(begin, end, selector, shown) >= limit
        if is_full and newest:
            oldest = min((parse(record.created_at) for record in records), default=inf)
            must = [v for v in must if v.object[0] == "new" and "created_at" not in v.fields and v.began > oldest]
        elif is_full or (limit is not None and newest and excused is not none_excused):
            must = []  # the newest may all live in tiers that do not answer
        missing = [version for version in must if version.object not in shown and not excused(version)]
        assert not missing, f"not shown: {missing}, shown: {[record.content for record in records]}"

    def end_timeline(self, begin: int, selector: Selector, records: list[Record], **options: Any) -> None:
        self.end_read(begin, selector, records, newest=True, **options)
        moments = [record.created_at for record in records]
        assert moments == sorted(moments), "a timeline ascends"
        for earlier, later in pairwise(records):
            if earlier.created_at == later.created_at:
                assert not self._written_before(later, earlier), "ties come in the order of writing"

    def end_recall(self, begin: int, selector: Selector, records: list[Record], **options: Any) -> None:
        self.end_read(begin, selector, records, **options)
        scores = [record.score for record in records]
        assert all(score is not None and 0 <= score <= 1 for score in scores), scores
        assert scores == sorted(scores, key=lambda score: -(score or 0)), "scores descend"
        for record in records:
            self._recalled[record.id, record.created_at] = self._recalled.get((record.id, record.created_at), 0) + 1

    def leave_recall(self) -> None:
        """End a recall with an unknown outcome: accesses may have been counted."""
        self._recalls_unheard += 1

    def end_fetch(self, begin: int, owner: str | None, key: str, record: Record | None) -> None:
        end = self.tick()
        selector = Selector(owner=owner)
        own: Object = ("key", owner, key)
        allowed = set(self._allowed(own, begin, end))
        if record is None:
            assert ABSENT in allowed, f"{own} is there"
            nobodys: Object = ("key", None, key)
            assert ABSENT in self._allowed(nobodys, begin, end), f"{nobodys} is there"
            return
        object = self._check(record, begin, end, selector, embeddings=False)
        assert object == own or (object == ("key", None, key) and ABSENT in allowed), f"{record} is not at {own}"

    # --- accesses and salience

    def end_reinforce(self, begin: int, ids: tuple[str, ...], amount: float) -> None:
        self._reinforced.append((begin, self.tick(), ids, amount))

    def leave_reinforce(self, ids: tuple[str, ...]) -> None:
        """End a reinforce with an unknown outcome: the model no longer follows the salience of these records."""
        self._salience_unknown.update(ids)

    def begin_promote(self, ids: Collection[str | None], *, adds: bool) -> Promotion:
        """Begin a promote of whole groups. `adds`: it adds salience to these records, which is not followed here."""
        meant = [version for version in self.versions.values() if version.id in ids]
        if adds:
            for version in meant:
                self._salience_unknown |= {version.id or "", version.fields.get("group") or ""}
        groups = frozenset((v.owner, v.fields["group"]) for v in meant if "group" in v.fields)
        promotion = Promotion(self.tick(), None, frozenset(ids), groups)
        self._promotions.append(promotion)
        return promotion

    def end_promote(self, promotion: Promotion) -> None:
        """End a promote that was answered; one that was not answered may still go on."""
        promotion.end = self.tick()

    def cut(self) -> None:
        """Note a power cut of the router: accesses and added salience so far may be lost, and nothing else."""
        self._recalled_before_cut = dict(self._recalled)
        self._salience_unknown.update(id for _, _, ids, _ in self._reinforced for id in ids)

    def put_back(self) -> None:
        """Note that an older catalog was restored and rebuilt.

        Accesses, salience, and the order of writes within a millisecond are as that catalog had them.
        """
        self.cut()
        self._put_back_at = self.tick()
        for version in self.versions.values():
            self._salience_unknown |= {version.id or "", version.fields.get("group") or ""}

    def lose(self, records: Iterable[Record]) -> None:
        """Note that an older copy of a store's file was restored, which does not have these records."""
        for record in records:
            del self._touches[self.version_of(record).object]

    # --- at the end

    def check_the_end(self, records: list[Record]) -> None:
        """Check the records when nothing runs any more; `records`: all of them, vectors included."""
        begin = self.tick()
        self.end_timeline(begin, Selector(), records, embeddings=True)
        for record in records:
            most = self._recalled.get((record.id, record.created_at), 0)
            least = most - self._recalled_before_cut.get((record.id, record.created_at), 0)
            assert least <= (record.access_count or 0) <= most + self._recalls_unheard, (least, most, record)
            salience = self._salience(record)
            assert salience is None or record.salience == salience, (record, salience)

    def decide(self, records: list[Record]) -> None:
        """Resolve every unknown outcome by `records`: all records, with vectors, when nothing is in progress."""
        self.check_the_end(records)
        shown = {self.version_of(record).object: record for record in records}
        for batch in self._unheard:
            alone = [version for version, touch, _ in batch if self._touches[version.object][-1] is touch]
            there = {v.object in shown and self.version_of(shown[v.object]) is v for v in alone if self._is_sole(v)}
            assert len(there) < 2, f"a batch of which only a part is there: {alone}, shown: {list(shown)}"
        self._unheard.clear()
        self._promotions.clear()
        now = self.tick()
        for object, touches in list(self._touches.items()):
            record = shown.get(object)
            if record is None:
                del self._touches[object]
                continue
            self.version_of(record).id = record.id  # of a write in doubt, the id is first seen here
            state = State(self.version_of(record).number, record.revision if object[0] == "key" else None)
            begun = [touch for touch in touches if touch.begin > 0]
            if len(begun) == 1 and begun[0].end is not None and begun[0].effects == {state}:
                self._touches[object] = begun
            else:
                self._salience_unknown.add(record.id)
                first = self._write_of(self.version_of(record)) or begun[0]
                self._touches[object] = [Touch(first.begin, first.end or now, frozenset({state}))]

    def version_of(self, record: Record) -> Version:
        return self.versions[int(record.content.split()[0][1:])]

    def unlike(self, record: Record, version: Version, *, embeddings: bool) -> str | None:
        """Return the name of a field that differs from what was written; None if there is none."""
        for name in ("content", "role", "group", "owner", "session", "key", "uri", "media_type"):
            if getattr(record, name) != version.fields.get(name):
                return name
        metadata: Raw | UnsetType = version.fields.get("metadata", UNSET)
        if (record.metadata is UNSET) != (metadata is UNSET):
            return "metadata"
        if record.metadata is not UNSET and metadata is not UNSET and bytes(record.metadata) != bytes(metadata):
            return "metadata"
        vector = version.fields.get("embedding") if embeddings else None
        if (record.embedding is None) != (vector is None):
            return "embedding"
        if vector is not None and record.embedding is not None and vector_bytes(record.embedding) != packed(vector):
            return "embedding"
        if "created_at" in version.fields and version.object[0] == "new":
            return None if record.created_at == version.fields["created_at"] else "created_at"
        return None

    # --- inside

    def _of(self, object: Object) -> list[Touch]:
        if object not in self._touches:
            # the object was absent from the beginning, and a forget in progress may already select it
            begun = [Touch(begin, None, frozenset(), selector.forgets) for begin, selector in self._forgetting]
            self._touches[object] = [Touch(-1, -1, frozenset({ABSENT})), *begun]
        return self._touches[object]

    def _allowed(self, object: Object, begin: int, end: int, without: Touch | None = None) -> frozenset[State]:
        if object not in self._touches:
            return _NOTHING
        touches = [touch for touch in self._touches[object] if touch.begin <= end and touch is not without]
        done = [touch for touch in touches if touch.end is not None]
        allowed: set[State] = set()
        for touch in touches:
            ended = touch.end
            if ended is not None and any(o.begin > ended and o.end is not None and o.end < begin for o in done):
                continue
            allowed |= touch.effects
            if touch.matching is not None and any(
                touch.matching(version) != "no" for version in self.versions.values() if version.object == object
            ):
                allowed.add(ABSENT)
        return frozenset(allowed)

    def _is_sole(self, version: Version) -> bool:
        """Return whether no other record has, or may have, the name of this version's object."""
        return len(self._touches[version.object]) == 2 and self._touches[version.object][0].effects == _NOTHING

    def _must(self, object: Object, begin: int, end: int, selector: Selector) -> Version | None:
        allowed = self._allowed(object, begin, end)
        if ABSENT in allowed:
            return None
        versions = [self.versions[state.number] for state in allowed]
        return versions[0] if all(selector.shows(version) == "yes" for version in versions) else None

    def _changed(self, begin: int, end: int, selector: Selector, shown: Collection[Object]) -> int:
        """Return how many records that are not shown may have been selected by a read, and changed while it went on."""
        return sum(self._may_change(object, begin, end, selector) for object in self._touches.keys() - shown)

    def _may_change(self, object: Object, begin: int, end: int, selector: Selector) -> bool:
        """Return whether the read may have selected the object, and it may have been changed while the read went on.

        A change is a forget, a replacement, or a move out of the caller's scope. A write to an existing id changes
        nothing.
        """
        for touch in self._touches[object]:
            if touch.begin <= end and (touch.end is None or touch.end >= begin):
                meant = self._meant(object, self._allowed(object, begin, end, without=touch), selector)
                forgets = ABSENT in touch.effects or (
                    touch.matching is not None and any(touch.matching(version) != "no" for version in meant)
                )
                if meant and (forgets or object[0] == "key"):
                    return True
        if selector.owner is None:
            return False
        moving = [each for each in self._promotions if each.begin <= end and (each.end is None or each.end >= begin)]
        return any(
            version.owner not in (None, selector.owner) and any(each.means(version) for each in moving)
            for version in self._meant(object, self._allowed(object, begin, end), selector)
        )

    def _meant(self, object: Object, states: Iterable[State], selector: Selector) -> list[Version]:
        """Return the versions among these states that the selector may show."""
        versions = [self.versions[state.number] for state in states if state != ABSENT]
        return [version for version in versions if selector.shows(version) != "no"]

    def _check(self, record: Record, begin: int, end: int, selector: Selector, embeddings: bool) -> Object:
        version = self.version_of(record)
        allowed = self._allowed(version.object, begin, end)
        states = [state for state in allowed if state.number == version.number]
        assert states, f"{record} is not there any more, or never was; it may be {allowed}"
        wrong = self.unlike(record, version, embeddings=embeddings)
        assert wrong is None, f"{wrong} differs: {record}, written as {version}"
        if version.object[0] == "key":
            assert any(state.revision in (None, record.revision) for state in states), (record, states)
        else:
            assert record.revision is None
        assert selector.shows(version) != "no", f"{record} was not asked for: {selector}"
        assert selector.tier in (None, record.tier), f"{record} is not of the tier that was asked for"
        if selector.owner is not None and version.owner not in (None, selector.owner):
            assert record.tier in self._shared, f"{selector.owner!r} must not see {record}"
        assert version.id in (None, record.id), (version, record)
        assert self._created.setdefault(version.number, record.created_at) == record.created_at
        if version.object[0] == "new":
            assert self._created_by_id.setdefault(record.id, record.created_at) == record.created_at
        return version.object

    def _consistent(self, records: list[Record], selector: Selector) -> None:
        ids = [record.id for record in records]
        assert len(set(ids)) == len(ids), f"an id comes twice: {ids}"
        tiers: dict[frozenset[int], set[str | None]] = {}
        for record in records:
            mates = self.version_of(record).group_mates
            if mates:
                tiers.setdefault(mates, set()).add(record.tier)
        torn = [mates for mates, where in tiers.items() if len(where) > 1]
        assert not torn, f"a group is in two tiers: {records}"

    def _written_before(self, one: Record, other: Record) -> bool:
        a, b = self.version_of(one), self.version_of(other)
        if a.object[0] != "new" or b.object[0] != "new":
            return False
        first, second = self._write_of(a), self._write_of(b)
        return (
            first is not None
            and second is not None
            and first.end is not None
            and first.end < second.begin
            and first.begin > self._put_back_at
        )

    def _write_of(self, version: Version) -> Touch | None:
        """Return the write of a record with its own id, unless it is in doubt. Forgets may have begun before it."""
        touches = (touch for touch in self._touches[version.object] if touch.begin > 0)
        return next((touch for touch in touches if touch.effects and ABSENT not in touch.effects), None)

    def _salience(self, record: Record) -> float | None:
        """Return the salience that the record must have; None if it is not certain."""
        version = self.version_of(record)
        touches = [t for t in self._touches[version.object] if t.begin > 0]
        if (
            not self._salience_unknown.isdisjoint({record.id, record.group})
            or len(touches) != 1
            or touches[0].end is None
        ):
            return None
        salience: float = version.fields.get("salience", 1.0)
        for begin, _, ids, amount in self._reinforced:
            if record.id in ids:
                if begin < touches[0].end:
                    return None
                salience += amount
        return salience


# the effect of a write on one object: the version that counts, and how many rewrites lead to it
Written: TypeAlias = tuple[Version, Touch, int]

_NOTHING: Final = frozenset({ABSENT})


def _is_at(state: State, revision: int | None) -> bool:
    """Return whether this may be the state of a page at the revision; None: of no page."""
    if revision is None:
        return state == ABSENT
    return state != ABSENT and state.revision in (None, revision)


def packed(vector: Iterable[float]) -> bytes:
    """Return the bits of a vector."""
    return b"".join(struct.pack("<d", number) for number in vector)
