"""The catalog: the router's durable account of every managed record. All of its changes are here, one transaction each.

Rules:
- a note comes before a copy: before a tier may hold a copy outside a record's home, a stray says so;
- every change of a home goes through `_enter` and `_leave`, which keep the counts of tiers, buckets and sessions;
- methods decide and change in one step and never wait. What must outlive a power cut is followed by `await synced()`;
- a record that a scan finds in two tiers, equal, is decided for its whole group, once both tiers are read through: only
  then is it known which of them holds all of it. Until then the second copy is noted, and neither goes.

It never talks to a tier and knows no clock: moments come in as milliseconds since 1970.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from a2m_router.catalog.accounts import NO_VECTORS, NotedStray, Replacement, Vectors
from a2m_router.catalog.entries import COLUMNS, Entry, Stray, absent_or, entry_of, present, row_entry
from a2m_router.catalog.lookup import Lookup, unit_of
from a2m_router.catalog.rebuild.salvage import Salvage
from a2m_router.catalog.selection import Scope
from a2m_router.protocol.wire.records import Draft, Record
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.policy import Unit

# A record's number is less, unless what it stands in is damaged.
_NO_NUMBER: Final = 1 << 62


# What becomes of notes of copies to come when none comes any more: superseded where there is a record, else unwanted.
_END_PENDING: Final = (
    "UPDATE strays"
    " SET kind = iif(EXISTS (SELECT 1 FROM records WHERE records.id = strays.id AND home IS NOT NULL), ?, ?)"
    " WHERE kind = ?"
)
_ENDED: Final = (Stray.SUPERSEDED, Stray.UNWANTED, Stray.PENDING)


class TakenOver(msgspec.Struct):
    """How much an earlier catalog knew that no tier does: records' earnings, notes of forgetting, copies to be removed,
    records that were being written; and the replacements that tiers had not caught up with."""

    earned: int = 0
    forgotten: int = 0
    unwanted: int = 0
    interrupted: int = 0
    redo: list[tuple[str, Draft]] = []


class Torn(msgspec.Struct, frozen=True):
    """A group of which two tiers hold a part each, and neither all: what is to be moved, from where to where."""

    unit: Unit
    source: str
    target: str


class Decided(msgspec.Struct, frozen=True):
    """What came of deciding groups: how many records have another home now, and which groups are still torn."""

    changed: int = 0
    torn: list[Torn] = []


class Catalog(Lookup):
    """The open catalog of one federation.

    Args:
        path: its file; None keeps it in memory, for trials.
        tiers: the managed tiers, as configured.
        strength: the policy's order of retention.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.

    Raises DatabaseError when the file cannot be used, or when records live in a tier that is not configured any more.
    """

    def reserve(self, new: Sequence[Entry]) -> None:
        """Note the new records of a batch before any tier hears of them.

        `home` of each entry is where it is being written to. Nothing of the batch is visible before `commit_write`.
        """
        with self._database.transaction():
            self._set_fact("clock", self._clock)
            for entry in new:
                self._execute(
                    "INSERT INTO records (seq, id, owner, session, grp, role, key, revision, created_at, digest,"
                    " version, salience, access_count, accessed_at, strength, destination)"
                    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
                    (self._next_number(), *self._account(entry), self._no[entry.home]),
                )
                self._note(entry, entry.home, Stray.PENDING)

    def commit_write(
        self,
        new: Sequence[Entry],
        replacements: Sequence[Replacement],
        vectors: Vectors = NO_VECTORS,
        redo: Mapping[str, Draft] | None = None,
    ) -> list[Replacement]:
        """A batch becomes true, the new records of which their tiers hold. Returns those replacements whose record was
        forgotten meanwhile: they are gone with it.

        `redo`: the replacements' records, whole. For those who read, they are as they are here, until `end_redo`.
        """
        lost = []
        with self._database.transaction():
            for entry in new:
                self._index(self._settle_home(entry), entry.home, vectors.get(entry.id))
                self._know_width(len(vectors[entry.id]) if entry.id in vectors else None)
            for replacement in replacements:
                entry = replacement.entry
                current = self._find(entry.id)
                if current is None or current.version != replacement.replaces:
                    lost.append(replacement)
                    continue
                self._replace(current, replacement, vectors.get(entry.id))
                if redo is not None and entry.id in redo:
                    draft = msgspec.json.encode(redo[entry.id])
                    self._execute(
                        "INSERT OR REPLACE INTO redo VALUES (?, ?, ?)", (entry.id, self._no[entry.home], draft)
                    )
        return lost

    def end_redo(self, entries: Iterable[Entry], vectors: Mapping[str, Sequence[float] | None]) -> None:
        """The records' tiers hold them as they are."""
        with self._database.transaction():
            for entry in entries:
                self._execute("DELETE FROM redo WHERE id = ?", (entry.id,))
                self._index(entry.seq, entry.home, vectors.get(entry.id))

    def abandon(self, new: Iterable[Entry]) -> None:
        """A batch failed: nothing of it becomes true. What may have been written is noted as unwanted.

        Over HTTP a call may land later than anybody waits for it, so such ids are noted like forgotten ones, too.
        """
        with self._database.transaction():
            for entry in new:
                self._refuse(entry)

    def note_unwanted(self, entries: Iterable[Entry], tier: str) -> None:
        """Copies of these were found in `tier` that are to go."""
        with self._database.transaction():
            for entry in entries:
                self._note(entry, tier, Stray.UNWANTED)

    def note_copies(self, entries: Iterable[Entry], target: str) -> None:
        """Copies are about to be written to `target`."""
        with self._database.transaction():
            for entry in entries:
                self._note(entry, target, Stray.PENDING)

    def flip(
        self,
        units: Iterable[Sequence[Entry]],
        target: str,
        salience: float = 0.0,
        vectors: Vectors = NO_VECTORS,
    ) -> list[Entry]:
        """Change the home of each unit that is still what it was, and note its old copies. The commit point of a move.

        Returns the entries that moved, as they were. `salience` is added on arrival.
        """
        moved: list[Entry] = []
        with self._database.transaction():
            for unit in units:
                now = self.unchanged(unit)
                if now is None:
                    continue
                for entry in now:
                    arrived = msgspec.structs.replace(entry, home=target, salience=_added(entry.salience, salience))
                    self._leave(entry)
                    self._strike(target, entry.id)
                    self._note(entry, entry.home, Stray.SUPERSEDED)
                    self._enter(arrived)
                    self._index(entry.seq, target, vectors.get(entry.id))
                    self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
                    self._execute("DELETE FROM redo WHERE id = ?", (entry.id,))
                moved += now
        for entry in moved:
            self.readers.moved(entry.id, entry.home)
        return moved

    def come_home(self, id: str, digest: bytes, tier: str, vector: Sequence[float] | None = None) -> bool:
        """A record's home has lost it, and a copy with its digest was found in `tier`: that becomes its home."""
        with self._database.transaction():
            entry = self._find(id)
            if entry is None or entry.digest != digest or entry.home == tier:
                return False
            self._leave(entry)
            self._strike(tier, id)
            self._note(entry, entry.home, Stray.UNWANTED)
            self._enter(msgspec.structs.replace(entry, home=tier))
            self._index(entry.seq, tier, vector)
            self._execute("DELETE FROM due WHERE id = ?", (id,))
            self._execute("DELETE FROM redo WHERE id = ?", (id,))
        self.readers.moved(id, entry.home)
        return True

    def give_up(self, entries: Iterable[Entry], target: str) -> None:
        """A move ends without its flip: what may be at `target` goes, once the record was seen at its home. A copy of
        what is no record goes without asking."""
        with self._database.transaction():
            for entry in entries:
                self._execute(f"{_END_PENDING} AND tier = ? AND id = ?", (*_ENDED, self._no[target], entry.id))

    def forget(self, ids: Iterable[str], scope: Scope, now: int) -> list[Entry]:
        """Strike the homes of those of `ids` that `scope` may forget; they are gone for every reader at once.

        Returns what was forgotten. Ids that nobody has heard of are noted while a tier is not scanned yet.
        """
        struck = []
        # a note holds wherever the record turns up, so it takes the right to change all that may turn up yet
        unaccounted = not self.is_all_scanned() and all(map(scope.writes_to, self.unscanned()))
        with self._database.transaction():
            for id in dict.fromkeys(ids):
                entry = self._find(id)
                if entry is None:
                    self._execute("DELETE FROM earned WHERE id = ?", (id,))
                    gone = self._drop_set_aside(id, scope, now)
                    if unaccounted:
                        by = present(scope.owner)
                        self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (id, by, now))
                    struck += gone[:1]  # wherever else it may be, it is one record
                    continue
                if not scope.may_change(entry.owner, entry.home):
                    struck += self._drop_set_aside(id, scope, now)[:1]
                    continue
                self._strike_out(entry, now)
                struck.append(entry)
        return struck

    def distil(self, unit: Sequence[Entry], summary: Entry, now: int) -> bool:
        """A unit gives way to its summary, which its tier holds already, if it is still what it was; returns whether.
        The commit point of a spill that rewrites."""
        with self._database.transaction():
            sources = self.unchanged(unit)
            if sources is None:
                return False
            self._strike(summary.home, summary.id)
            self._insert(summary, None)
            for entry in sources:
                self._strike_out(entry, now)
        self.rewrites += 1
        return True

    def drop_notes_before(self, moment: int) -> None:
        """Forget that ids were forgotten, where no copy can be left."""
        with self._database.transaction():
            self._execute("DELETE FROM forgotten WHERE at < ? AND id NOT IN (SELECT id FROM strays)", (moment,))

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
                if entry is not None and scope.may_change(entry.owner, entry.home):
                    self._earn(msgspec.structs.replace(entry, salience=_added(entry.salience, amount)))
                    found += 1
        return found

    def strike(self, tier: str, ids: Iterable[str]) -> None:
        """The copies of `ids` in `tier` are gone."""
        with self._database.transaction():
            for id in ids:
                self._strike(tier, id)

    def begin_recovery(self) -> None:
        """Right after the start: what was being moved stays where it was, and its copies go once it was seen there; of
        what was being written nothing is true, since it was not acknowledged.

        The move may have ended: this catalog may be a copy that was put back."""
        with self._database.transaction():
            for entry in self._reserved():
                self._refuse(entry)
            self._execute(_END_PENDING, _ENDED)

    def adopt(self, entries: Iterable[Entry], vectors: Vectors = NO_VECTORS) -> tuple[int, list[Entry]]:
        """Take records that a tier was found to hold into the account, forgotten ones excepted.

        Of two copies one is a stray: of equal ones that which is not as far down the way of spills and promotions, of
        different ones that which is not in this account, once that has been whole; before, that with the lower
        revision, else the one further down. Of equal ones that belong to a group, `end_scan` decides for the group.
        Of a store that is older than this account (`note_set_back`) no copy is the record of one that lives elsewhere,
        and what is in no account was forgotten or given up since, unless a tier has lost it.

        Returns how many became known, and those that could not: their id is another owner's, their owner's key has
        another record, or one of the two is just being given to one. They are set aside: noted, never removed unasked,
        and taken in by a later scan if id and key are free.
        """
        adopted = 0
        refused = []
        with self._database.transaction():
            for entry in entries:
                current = self._find(entry.id)
                noted = self._strays("tier = ? AND id = ?", (entry.home, entry.id))
                is_former = self.knows_what_left(entry.home) and not noted and not self.is_reserved(entry.id)
                if noted and noted[0].kind == Stray.ASIDE and current is None:
                    noted = []  # its id and its owner's key may be free by now
                vector = vectors.get(entry.id)
                if current is not None and current.home == entry.home and current.digest == entry.digest:
                    self._know_width(None if vector is None else len(vector))
                    self._index(current.seq, entry.home, vector)
                if noted or (current is not None and current.home == entry.home):
                    continue
                if self._is_unwanted(entry) and (current is None or current.digest != entry.digest):
                    self._note(entry, entry.home, Stray.UNWANTED)
                elif is_former and current is not None:
                    self._note(entry, entry.home, Stray.SUPERSEDED)
                elif is_former and not self._is_lost(entry.id, entry.created_at):
                    self._note(entry, entry.home, Stray.UNWANTED)
                elif self.is_reserved(entry.id) or (current is not None and current.owner != entry.owner):
                    self._note(entry, entry.home, Stray.ASIDE)
                    refused.append(entry)
                elif current is not None and current.group is not None and current.digest == entry.digest:
                    self._note(entry, entry.home, Stray.EQUAL)
                    if entry.home in self._indexed:
                        self._index(current.seq, entry.home, vector)  # in case that it becomes the home
                elif current is not None and not self._is_better(entry, current):
                    self._note(entry, entry.home, Stray.SUPERSEDED)
                elif self._has_taken_key(entry):
                    self._note(entry, entry.home, Stray.ASIDE)
                    refused.append(entry)
                elif current is not None:
                    self._replace(current, Replacement(entry, current.version), vector)
                    self._note(current, current.home, Stray.SUPERSEDED)
                else:
                    self._strike(entry.home, entry.id)
                    self._insert_found(entry, vector)
                    adopted += 1
        return adopted, refused

    def end_scan(self, tier: str) -> Decided:
        """All that `tier` holds has been given to `adopt`."""
        with self._database.transaction():
            self.set_scanned(tier, True)
            self._execute("UPDATE tiers SET set_back = 0 WHERE no = ?", (self._no[tier],))
            if self.is_all_scanned():
                self._set_fact("was_whole", 1)
                # what was written anew under a forgotten id cannot meet any more what was forgotten
                self._execute(
                    "DELETE FROM forgotten"
                    " WHERE EXISTS (SELECT 1 FROM records WHERE records.id = forgotten.id AND home IS NOT NULL)"
                )
            return self.decide_groups()

    def decide_groups(self) -> Decided:
        """Of each group with equal copies in two tiers, both of them read through, the tier that holds all of it
        becomes the home of all of it; if both do, the one further down the way.

        A move that was cut off leaves all of its group in one of the two (see the crash table of
        docs/architecture.md). Where neither holds all, nothing is changed: returned is what has to be moved so that one
        does. A group whose parts have no copy in common was written so, and stays so. Looks at what is undecided, and
        at nothing else.
        """
        torn = []
        left: list[Entry] = []
        with self._database.transaction():
            for owner, group, upper, lower in self._undecided():
                in_upper, in_lower = self.group(upper, owner, group), self.group(lower, owner, group)
                also_lower = [entry for entry in in_upper if self._has_equal(lower, entry.id)]
                also_upper = [entry for entry in in_lower if self._has_equal(upper, entry.id)]
                if len(also_lower) == len(in_upper):
                    home, coming, staying = lower, also_lower, also_upper
                elif len(also_upper) == len(in_lower):
                    home, coming, staying = upper, also_upper, also_lower
                else:
                    torn.append(Torn(unit_of(in_upper), upper, lower))
                    continue
                other = upper if home == lower else lower
                for entry in coming:
                    self._leave(entry)
                    self._strike(home, entry.id)
                    self._note(entry, other, Stray.SUPERSEDED)
                    self._enter(msgspec.structs.replace(entry, home=home))
                    self._execute("DELETE FROM due WHERE id = ?", (entry.id,))
                    if home not in self._indexed:
                        self._index(entry.seq, home, None)
                for entry in staying:
                    self._note(entry, other, Stray.SUPERSEDED)
                    if home not in self._indexed:
                        self._index(entry.seq, home, None)
                left += coming
        for entry in left:
            self.readers.moved(entry.id, entry.home)
        return Decided(len(left), torn)

    def fall_back(self, entry: Entry, copy: Record, tier: str) -> bool:
        """A record's home has lost it, and `tier` holds it as it once was, of which a copy was noted: that is the
        record again. Returns whether it is: another tier may hold it as it is, or it has changed meanwhile."""
        with self._database.transaction():
            self._strike(tier, entry.id)
            if not self.lose([entry]):
                self._note(entry, tier, Stray.SUPERSEDED)
                return False
            if copy.created_at != render(entry.created_at):  # one that was forgotten before this was written
                self._note(entry, tier, Stray.UNWANTED)
                return False
            found = entry_of(copy, tier)
            self.adopt([found], NO_VECTORS if copy.embedding is None else {found.id: copy.embedding})
        return True

    def lose(self, entries: Iterable[Entry]) -> list[Entry]:
        """Take those out of the account that were seen not to be in their homes, if they are still what they were then
        and no other copy is noted, which may be the record. What they have earned is kept for when they are found.

        Returns those that are lost.
        """
        lost = []
        with self._database.transaction():
            for entry in entries:
                current = self._find(entry.id)
                copies = self._execute(
                    "SELECT 1 FROM strays WHERE id = ? AND kind IN (?, ?, ?) LIMIT 1",
                    (entry.id, Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL),
                ).get
                if current is None or current.version != entry.version or copies is not None or self.behind([entry.id]):
                    continue
                self._lose(current)
                lost.append(current)
        return lost

    def free_again(self, tier: str) -> list[str]:
        """The ids of those records set aside in `tier` of which neither the id nor the owner's key has another record
        any more."""
        return [
            stray.id
            for stray in self.set_aside(tier)
            if not self._is_taken(stray.id)
            and (
                stray.key is None or (self.by_key(stray.owner, stray.key) is None and not self._is_key_reserved(stray))
            )
        ]

    def why_set_aside(self, id: str, key: str | None) -> str:
        """Why a record that was found is not taken in."""
        if key is None or self._is_taken(id):
            return "its id has another record"
        return f"its owner's key {key!r} has another record"

    def _is_taken(self, id: str) -> bool:
        return self._find(id) is not None or self.is_reserved(id)

    def take_over(self, old: Salvage, *, is_behind: bool = False) -> TakenOver:
        """What only an earlier catalog knows, into this one, which is empty; its records come from the tiers. The
        replacements that the tiers had not caught up with are for `restore`, after the scans.

        `is_behind`: the earlier one is older than the tiers. What it holds as forgotten may have been written anew,
        what was a copy too many may be the only one, and what was being written has long been decided: nothing that a
        tier holds goes on its account.
        """
        taken = TakenOver()
        self._spares_found = is_behind
        with self._database.transaction():
            facts = old.facts()
            if isinstance(facts.get("clock"), int):
                self._clock = max(self._clock, facts["clock"])
                self._set_fact("clock", self._clock)
            if isinstance(facts.get("dimensions"), int):
                self.fix_dimensions(facts["dimensions"])
            for tier, identity in old.identities().items():
                if tier in self._tiers:
                    self.set_identity(tier, identity)
            for row in old.earned():
                if _is_row(row, (str, int, float, int, int | None, int | None)):
                    id, seq, *rest = row
                    seq = seq if 0 < seq < _NO_NUMBER else 0
                    self._execute("INSERT OR REPLACE INTO earned VALUES (?, ?, ?, ?, ?, ?)", (id, seq, *rest))
                    self._newest = max(self._newest, seq)
                    taken.earned += 1
            for note in old.forgotten():
                if not _is_row(note, (str, str, int)):
                    continue
                if not self._is_lost(note[0]):  # else it lives there
                    self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", note)
                    taken.forgotten += 1
            for tier, id, owner, key in () if is_behind else old.unwanted():
                if tier in self._tiers:
                    self._execute(
                        "INSERT OR REPLACE INTO strays VALUES (?, ?, ?, ?, ?)",
                        (self._no[tier], id, Stray.UNWANTED, owner, key),
                    )
                    taken.unwanted += 1
            for entry in () if is_behind else old.reservations():
                if entry.home in self._tiers:
                    self._refuse(entry)
                    taken.interrupted += 1
            taken.redo = [(tier, draft) for tier, draft in old.redo() if tier in self._tiers]
        return taken

    def restore(self, tier: str, draft: Draft) -> bool:
        """A replacement that `tier` has not caught up with is true again, unless the record was forgotten or replaced
        since, or another one was written under its id. Returns whether it is."""
        entry = entry_of(draft, tier)
        with self._database.transaction():
            current = self._find(entry.id)
            if self._is_unwanted(entry) or self._has_taken_key(entry):
                return False
            if current is not None and current.digest == entry.digest:
                return True
            if current is None:
                self._insert_found(entry, draft.embedding)
            elif current.revision <= entry.revision and current.created_at == entry.created_at:
                self._replace(current, Replacement(entry, current.version), draft.embedding)
            else:
                return False
            self._execute(
                "INSERT OR REPLACE INTO redo VALUES (?, ?, ?)", (entry.id, self._no[tier], msgspec.json.encode(draft))
            )
        return True

    def drop_home(self, tier: str) -> int:
        """Take a tier whose store was exchanged out of the account: what lived there, and what strayed there. What the
        records have earned is kept for when they are found.

        Returns how many records lived there; looks at all of them.
        """
        no = self._no[tier]
        with self._database.transaction():
            entries = self._all("home = ?", (no,), order="seq")
            for entry in entries:
                self._lose(entry)
            self._execute("DELETE FROM strays WHERE tier = ?", (no,))
        return len(entries)

    def _lose(self, entry: Entry) -> None:
        self._leave(entry)
        self._delete(entry)
        self._execute(
            "INSERT OR REPLACE INTO earned VALUES (?, ?, ?, ?, ?, ?)",
            (entry.id, entry.seq, entry.salience, entry.access_count, entry.accessed_at, entry.created_at),
        )

    def announce(self, where: str | None) -> None:
        """Tell others who want this file where the router that has it is reached; see `Database.announce`."""
        self._database.announce(where)

    def _strike_out(self, entry: Entry, now: int) -> None:
        """The record is no more, wherever copies of it may be, and nothing late brings it back."""
        self._leave(entry)
        self._delete(entry)
        self._note(entry, entry.home, Stray.UNWANTED)
        self._execute(
            "UPDATE strays SET kind = ? WHERE id = ? AND (kind != ? OR owner = ?)",
            (Stray.UNWANTED, entry.id, Stray.ASIDE, present(entry.owner)),  # another owner's is another record
        )
        self._note_forgotten(entry, now)

    def _note_forgotten(self, entry: Entry, now: int) -> None:
        self._execute("INSERT OR REPLACE INTO forgotten VALUES (?, ?, ?)", (entry.id, present(entry.owner), now))

    def _reserved(self) -> list[Entry]:
        """The records that are being written, each with the tier where to."""
        rows = self._execute(f"SELECT {COLUMNS}, destination FROM records WHERE home IS NULL")
        return [row_entry(row, self._name[row[-1]]) for row in rows]

    def _refuse(self, entry: Entry) -> None:
        """What was reserved does not become true; its copy goes, now, or when it lands at last."""
        self._execute("DELETE FROM records WHERE id = ? AND home IS NULL", (entry.id,))
        self._note(entry, entry.home, Stray.UNWANTED)
        tier = self._tiers.get(entry.home)
        if tier is None or tier.url is not None:  # None: it is not managed any more, and may be again
            self._note_forgotten(entry, self._clock)

    def knows_of(self, scope: Scope, id: str) -> bool:
        """Whether `id` is that of a record which `scope` sees, or was that of one which it might forget."""
        entry = self._find(id)
        if entry is not None and self.sees(scope, entry):
            return True
        noted = "SELECT owner FROM strays WHERE id = ? AND kind = ? UNION ALL SELECT by FROM forgotten WHERE id = ?"
        return any(scope.holds(absent_or(owner)) for (owner,) in self._execute(noted, (id, Stray.ASIDE, id)))

    def _drop_set_aside(self, id: str, scope: Scope, now: int) -> list[Entry]:
        """A record that was set aside is forgotten like any other; returns it as far as it is known."""
        dropped = []
        rows = self._execute("SELECT tier, owner, key FROM strays WHERE id = ? AND kind = ?", (id, Stray.ASIDE))
        for no, owner, key in list(rows):
            entry = Entry(
                id=id,
                home=self._name[no],
                owner=absent_or(owner),
                key=absent_or(key),
                created_at=now,
                digest=b"",
            )
            if scope.may_change(entry.owner, entry.home):
                self._note(entry, entry.home, Stray.UNWANTED)
                self._note_forgotten(entry, now)
                dropped.append(entry)
        return dropped

    def _insert_found(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """A record that a scan has found, with what it is known to have earned."""
        earned = self._earned(entry.id, entry.created_at)
        if earned is not None:
            seq, salience, count, at = earned
            entry = msgspec.structs.replace(entry, seq=seq, salience=salience, access_count=count, accessed_at=at)
        self._execute("DELETE FROM earned WHERE id = ?", (entry.id,))
        self._insert(entry, vector)
        tier = self._tiers[entry.home]
        if tier.promote_to is not None and tier.promote_after and entry.access_count >= tier.promote_after:
            self._execute("INSERT OR REPLACE INTO due VALUES (?, ?)", (entry.id, self._no[entry.home]))

    def _is_unwanted(self, entry: Entry) -> bool:
        """Whether a record that was found is noted as forgotten by who might forget it; not one that was written anew,
        and then lost, or since the note was made."""
        if self._spares_found:
            return False
        said = {by for (by,) in self._execute("SELECT by FROM forgotten WHERE id = ?", (entry.id,))}
        if not said or self._is_lost(entry.id, entry.created_at):
            return False
        return entry.owner is None or not said.isdisjoint({"", present(entry.owner)})

    def _is_lost(self, id: str, created_at: int | None = None) -> bool:
        """Whether a tier was to hold a record of this id, created at this moment, and has lost it."""
        return self._earned(id, created_at) is not None

    def _earned(self, id: str, created_at: int | None) -> tuple[int, float, int, int | None] | None:
        """Place, salience, accesses and the last one of a record that is in no tier: of this id, and of this birth
        where both are known."""
        rows = "SELECT seq, salience, access_count, accessed_at FROM earned WHERE id = ? AND ifnull(created_at = ?, 1)"
        return next(self._execute(rows, (id, created_at)), None)

    def _undecided(self) -> list[tuple[str | None, str, str, str]]:
        """The groups with equal copies in two tiers, both of them read through: owner, group, and the two tiers, that
        which is further down last."""
        found: dict[tuple[str | None, str, str, str], None] = {}
        scanned = [tier for tier in self._tiers if self.is_scanned(tier)]
        for tier in scanned:
            for stray in self._strays("tier = ? AND kind = ? AND kind >= 3", (tier, Stray.EQUAL), "stray_by_kind"):
                entry = self._find(stray.id)
                if entry is None or entry.group is None or entry.home == tier or not self.is_scanned(entry.home):
                    continue
                upper, lower = sorted((entry.home, tier), key=scanned.index)
                related = self._leads_to(upper, lower) or self._leads_to(lower, upper)
                if self._leads_to(lower, upper) if related else self._tiers[lower].shared:
                    upper, lower = lower, upper  # without a way between them, it is not published
                found[entry.owner, entry.group, upper, lower] = None
        return list(found)

    def _has_equal(self, tier: str, id: str) -> bool:
        """Whether `tier` was found to hold an equal copy of a record whose home is another."""
        return any(stray.kind == Stray.EQUAL for stray in self._strays("tier = ? AND id = ?", (tier, id)))

    def _is_better(self, entry: Entry, current: Entry) -> bool:
        """Whether a copy that was found is to be the record, rather than the one that is known."""
        if entry.digest == current.digest:
            return self._leads_to(current.home, entry.home)
        if self._fact("was_whole", 0):
            return False  # it knows every record's state, and another one is a former one
        if entry.revision != current.revision:
            return entry.revision > current.revision
        return self._leads_to(entry.home, current.home)

    def _leads_to(self, source: str, target: str) -> bool:
        """Whether records can get from `source` to `target` by spills and promotions."""
        ways = {self._tiers[source].spill_to, self._tiers[source].promote_to} - {None}
        return target in ways or any(self._leads_to(way, target) for way in ways if way is not None)

    def _has_taken_key(self, entry: Entry) -> bool:
        """Whether the entry's key is another record's, or is just being given to one."""
        if entry.key is None:
            return False
        holder = self.by_key(entry.owner, entry.key)
        return self._is_key_reserved(entry) or (holder is not None and holder.id != entry.id)

    def _is_key_reserved(self, entry: Entry | NotedStray) -> bool:
        reserved = self._execute(
            "SELECT 1 FROM records INDEXED BY record_by_reservation"
            " WHERE home IS NULL AND key = ? AND owner = ? LIMIT 1",
            (present(entry.key), present(entry.owner)),
        ).get
        return reserved is not None


def _is_row(row: tuple[Any, ...], types: tuple[Any, ...]) -> bool:
    # of a damaged file whatever comes out
    return len(row) == len(types) and all(map(isinstance, row, types))


def _added(salience: float, amount: float) -> float:
    # neither less than nothing nor more than JSON can say
    return min(max(0.0, salience + amount), sys.float_info.max)
