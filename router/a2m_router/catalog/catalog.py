"""The catalog: the router's durable account of every managed record. It is composed of parts with one job each.

Rules:
- what changes a record, or a note about one, is a method of `Catalog`, and one transaction. Most of these changes touch
  several parts. The parts' own methods for that expect a transaction; only this module and `changes` call them;
- what a tier, its server, the federation or this file was seen to be stands alone. The part that holds such a fact
  changes it, in one transaction: `tiers`, `lineage`, `vectors`, `opening`;
- a question is asked of the part that knows the answer;
- a note comes before a copy: before a tier may hold a copy outside a record's home, a stray says so;
- methods decide and change in one step and never wait. What must outlive a power cut is followed by `await synced()`.

It never talks to a tier and knows no clock: moments come in as milliseconds since 1970.
"""

import contextlib
import errno
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import anyio
import apsw
import msgspec

from a2m_router.catalog.active_reads import ActiveReads
from a2m_router.catalog.buckets import Buckets
from a2m_router.catalog.changes import Changes, added
from a2m_router.catalog.claims import Claims
from a2m_router.catalog.entries import Entry, Stray, entry_of
from a2m_router.catalog.findings import Decided, Findings, Found
from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.catalog.lineage import Lineage
from a2m_router.catalog.opening import Opening
from a2m_router.catalog.queries import Queries
from a2m_router.catalog.rebuild.salvage import Salvage, TakenOver
from a2m_router.catalog.rebuild.swap import HOLDER, REBUILDING, exchange
from a2m_router.catalog.records import Replacement, Strength
from a2m_router.catalog.schema import APPLICATION, SCHEMA
from a2m_router.catalog.selection import Scope
from a2m_router.catalog.tables import Tables
from a2m_router.catalog.vectors import NO_VECTORS, Vectors
from a2m_router.config.settings import Tier
from a2m_router.process.budget import left
from a2m_router.protocol.wire.records import Draft, Record
from a2m_router.protocol.wire.timestamps import render
from a2m_router.storage import nearest
from a2m_router.storage.database import Damaged, Database, damaged, real

# Seconds that a change waits for another program that holds the file, and between two looks whether it does.
_PATIENCE: Final = 10.0
_LOOK: Final = 0.05


class Catalog:
    """The open catalog of one federation: its parts, and all changes of records and of the notes about them.

    Args:
        path: its file; None keeps it in memory, for trials.
        tiers: the managed tiers, as configured.
        strength: the policy's order of retention.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.

    Raises DatabaseError when the file cannot be used, or when records live in a tier that is not configured any more.
    """

    def __init__(self, path: Path | None, tiers: Sequence[Tier], strength: Strength, *, threads: bool = True) -> None:
        self.claims = Claims()
        self.reads = ActiveReads(lambda: self.records.newest)
        self.rewrites = 0  # how often a unit has given way to its summary
        if path is not None:
            path = real(path)
            exchange(path)
        try:
            self.database = Database(path, SCHEMA, application=APPLICATION, holder=HOLDER, prepare=nearest.load)
            try:
                self._open(Tables(self.database, tiers), strength)
            except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as problem:
                self.database.close()
                raise damaged(path, str(problem)) from problem
            except BaseException:
                self.database.close()
                raise
        except Damaged as problem:
            raise problem.with_remedy(REBUILDING) from problem
        self._syncing = GroupCommit(self.database.sync, threads=threads)

    def _open(self, tables: Tables, strength: Strength) -> None:
        self._tables = tables
        self._transaction = tables.transaction
        self._clock: int = tables.fact("clock", 0)
        self.opening = Opening(tables)
        if not self.opening.was_closed and (wrong := self.damage()):
            raise damaged(self.database.path, wrong)
        with self._transaction():
            tables.number_tiers()
            self._changes = changes = Changes(tables, strength, self.reads)
            self.records = changes.records
            self.strays = changes.strays
            self.tombstones = changes.tombstones
            self.pending = changes.pending
            self.earned = changes.earned
            self.vectors = changes.vectors
            self.tiers = changes.tiers
            self.lineage = Lineage(tables, self.records.newest)
            self.buckets = Buckets(tables, self.records)
            self.queries = Queries(tables, self.records, self.strays, self.pending, self.vectors)
            self.findings = Findings(tables, self.records, self.strays, self.tombstones, self.earned)
            self.opening.begin(self.records.newest)
            for tier in tables.tiers.values():
                self.records.follow_settings(tier)
            if not self.tiers.unscanned():
                tables.set_fact("was_whole", 1)

    async def synced(self) -> None:
        """Return when everything committed so far outlives a power cut. Raises OSError when the disk fails."""
        await self._syncing.wait()

    async def writable(self) -> None:
        """Return when no other program holds a lock on the file that keeps it from being changed: at once, unless one
        does. Raises OSError where it does for longer than anybody waits, and where the file is gone."""
        deadline = anyio.current_time() + min(_PATIENCE, left())
        while True:
            try:
                self.database.check_writable()
            except OSError as problem:
                if problem.errno != errno.EBUSY or anyio.current_time() >= deadline:
                    raise
            else:
                return
            await anyio.sleep(_LOOK)

    def damage(self) -> str | None:
        """What is wrong with the file's pages, if anything is. Reads all of it; the start does so after an unclean
        end."""
        found: str = self._tables.execute("PRAGMA quick_check(1)").get
        return None if found == "ok" else found

    def close(self) -> None:
        """Sync and close the file."""
        try:
            # a disk that does not take it: the next start looks more closely, which is right then
            with contextlib.suppress(OSError, apsw.Error):
                self.opening.end()
        finally:
            self.database.close()

    def look_at_clock(self, now: int) -> int:
        """Note what the clock shows now; returns by how many milliseconds it was set back since the last look, which
        may have been another router's."""
        back, self._clock = self._clock - now, now
        return max(back, 0)

    def reserve(self, new: Sequence[Entry]) -> None:
        """Note the new records of a batch before any tier hears of them.

        `home` of each entry is where it is being written to. Nothing of the batch is visible before `commit_write`.
        """
        with self._transaction():
            self._tables.set_fact("clock", self._clock)
            for entry in new:
                self.records.reserve(entry)
                self.strays.note(entry, entry.home, Stray.PENDING)

    def commit_write(
        self,
        new: Sequence[Entry],
        replacements: Sequence[Replacement],
        vectors: Vectors = NO_VECTORS,
        redo: Mapping[str, Draft] | None = None,
    ) -> list[Replacement]:
        """A batch becomes true, the new records of which their tiers hold. Returns those replacements whose record was
        forgotten meanwhile: they are gone with it.

        `redo`: the replacements' records, whole. For those who read, they are as they are here, until `end_pending`.
        """
        lost = []
        with self._transaction():
            for entry in new:
                self._changes.settle(entry, vectors.get(entry.id))
            for replacement in replacements:
                entry = replacement.entry
                current = self.records.get(entry.id)
                if current is None or current.version != replacement.replaces:
                    lost.append(replacement)
                    continue
                self._changes.replace(current, replacement, vectors.get(entry.id))
                if redo is not None and entry.id in redo:
                    self.pending.begin(entry.id, entry.home, redo[entry.id])
        return lost

    def end_pending(self, entries: Iterable[Entry], vectors: Mapping[str, Sequence[float] | None]) -> None:
        """The records' tiers hold them as they are."""
        with self._transaction():
            for entry in entries:
                self.pending.end(entry.id)
                self.vectors.put(entry.seq, entry.home, vectors.get(entry.id))

    def abandon(self, new: Iterable[Entry]) -> None:
        """A batch failed: nothing of it becomes true. What may have been written is noted as unwanted.

        Over HTTP a call may land later than anybody waits for it, so such ids are noted like forgotten ones, too.
        """
        with self._transaction():
            for entry in new:
                self._changes.refuse(entry, self._clock)

    def note_unwanted(self, entries: Iterable[Entry], tier: str) -> None:
        """TierGateway of these were found in `tier` that are to go."""
        with self._transaction():
            for entry in entries:
                self.strays.note(entry, tier, Stray.UNWANTED)

    def note_copies(self, entries: Iterable[Entry], target: str) -> None:
        """TierGateway are about to be written to `target`."""
        with self._transaction():
            for entry in entries:
                self.strays.note(entry, target, Stray.PENDING)

    def strike(self, tier: str, ids: Iterable[str]) -> None:
        """The copies of `ids` in `tier` are gone."""
        with self._transaction():
            for id in ids:
                self.strays.strike(tier, id)

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
        with self._transaction():
            for unit in units:
                now = self.records.unchanged(unit) or []
                for entry in now:
                    self._changes.move(entry, target, Stray.SUPERSEDED, salience)
                    self.vectors.put(entry.seq, target, vectors.get(entry.id))
                moved += now
        self._tell_readers(moved)
        return moved

    def come_home(self, id: str, digest: bytes, tier: str, vector: Sequence[float] | None = None) -> bool:
        """A record's home has lost it, and a copy with its digest was found in `tier`: that becomes its home."""
        with self._transaction():
            entry = self.records.get(id)
            if entry is None or entry.digest != digest or entry.home == tier:
                return False
            self._changes.move(entry, tier, Stray.UNWANTED)
            self.vectors.put(entry.seq, tier, vector)
        self._tell_readers([entry])
        return True

    def give_up(self, entries: Iterable[Entry], target: str) -> None:
        """A move ends without its flip: what may be at `target` goes, once the record was seen at its home. A copy of
        what is no record goes without asking."""
        with self._transaction():
            for entry in entries:
                self.strays.end_pending(target, entry.id)

    def forget(self, ids: Iterable[str], scope: Scope, now: int) -> list[Entry]:
        """Strike the homes of those of `ids` that `scope` may forget; they are gone for every reader at once.

        Returns what was forgotten. Ids that nobody has heard of are noted while a tier is not scanned yet.
        """
        struck = []
        # a note holds wherever the record turns up, so it takes the right to change all that may turn up yet
        unscanned = self.tiers.unscanned()
        notes_unknown = bool(unscanned) and all(map(scope.writes_to, unscanned))
        with self._transaction():
            for id in dict.fromkeys(ids):
                entry = self.records.get(id)
                if entry is not None and scope.may_change(entry.owner, entry.home):
                    self._changes.strike_out(entry, now)
                    struck.append(entry)
                    continue
                struck += self._changes.drop_set_aside(id, scope, now)[:1]  # wherever else it may be, it is one record
                if entry is None:
                    self.earned.drop(id)
                    if notes_unknown:
                        self.tombstones.note(id, scope.owner, now)
        return struck

    def distil(self, unit: Sequence[Entry], summary: Entry, now: int) -> bool:
        """A unit gives way to its summary, which its tier holds already, if it is still what it was; returns whether.
        The commit point of a spill that rewrites."""
        with self._transaction():
            sources = self.records.unchanged(unit)
            if sources is None:
                return False
            self.strays.strike(summary.home, summary.id)
            self._changes.insert(summary, None)
            for entry in sources:
                self._changes.strike_out(entry, now)
        self.rewrites += 1
        return True

    def drop_notes_before(self, moment: int) -> None:
        """Forget that ids were forgotten, where no copy can be left."""
        with self._transaction():
            self.tombstones.drop_before(moment)

    def touch(self, ids: Iterable[str], now: int) -> bool:
        """Count a recall of each id. Returns whether one of them has earned its promotion by it."""
        earned = False
        with self._transaction():
            for id in ids:
                entry = self.records.get(id)
                if entry is None:
                    continue
                touched = msgspec.structs.replace(entry, access_count=entry.access_count + 1, accessed_at=now)
                self.records.earn(touched)
                earned |= self.records.promote_if_due(touched)
        return earned

    def reinforce(self, ids: Iterable[str], amount: float, scope: Scope) -> int:
        """Add `amount` to the salience of what is `scope`'s own, or nobody's; never below zero. Returns how many were
        found."""
        with self._transaction():
            found = [e for e in self.records.find(ids).values() if scope.may_change(e.owner, e.home)]
            for entry in found:
                self.records.earn(msgspec.structs.replace(entry, salience=added(entry.salience, amount)))
        return len(found)

    def begin_recovery(self) -> None:
        """Right after the start: what was being moved stays where it was, and its copies go once it was seen there; of
        what was being written nothing is true, since it was not acknowledged.

        The move may have ended: this catalog may be a copy that was put back."""
        with self._transaction():
            for entry in self.records.reserved():
                self._changes.refuse(entry, self._clock)
            self.strays.end_pending()

    def adopt(self, entries: Iterable[Entry], vectors: Vectors = NO_VECTORS) -> tuple[int, list[Entry]]:
        """Take records that a tier was found to hold into the account, as `findings` decides.

        Returns how many became known, and those that could not: their id is another owner's, their owner's key has
        another record, or one of the two is just being given to one. They are set aside: noted, never removed unasked,
        and taken in by a later scan if id and key are free.
        """
        adopted = 0
        refused = []
        with self._transaction():
            for entry in entries:
                current, vector = self.records.get(entry.id), vectors.get(entry.id)
                if current is not None and current.home == entry.home and current.digest == entry.digest:
                    self.vectors.put(current.seq, entry.home, vector)
                knows_what_left = self.lineage.knows_what_left(entry.home)
                found = self.findings.judge(entry, current, knows_what_left=knows_what_left)
                if isinstance(found, Stray):
                    self.strays.note(entry, entry.home, found)
                    if found == Stray.ASIDE:
                        refused.append(entry)
                    elif found == Stray.EQUAL and current is not None and self.vectors.indexes(entry.home):
                        self.vectors.put(current.seq, entry.home, vector)  # in case that it becomes the home
                elif found is Found.RECORD and current is not None:
                    self._changes.replace(current, Replacement(entry, current.version), vector)
                    self.strays.note(current, current.home, Stray.SUPERSEDED)
                elif found is Found.RECORD:
                    self.strays.strike(entry.home, entry.id)
                    self._changes.insert_found(entry, vector)
                    adopted += 1
        return adopted, refused

    def end_scan(self, tier: str) -> Decided:
        """All that `tier` holds has been given to `adopt`."""
        with self._transaction():
            self.tiers.set_scanned(tier, True)
            self.lineage.end_set_back(tier)
            if not self.tiers.unscanned():
                self._tables.set_fact("was_whole", 1)
                # what was written anew under a forgotten id cannot meet any more what was forgotten
                self.tombstones.drop_living()
            return self.decide_groups()

    def decide_groups(self) -> Decided:
        """Of each group with equal copies in two tiers, both of them read through, the tier that holds all of it
        becomes the home of all of it; if both do, the one further down the way.

        A move that was cut off leaves all of its group in one of the two (see the crash table of
        docs/architecture.md). Where neither holds all, nothing is changed: returned is what has to be moved so that one
        does. A group whose parts have no copy in common was written so, and stays so. Looks at what is undecided, and
        at nothing else.
        """
        left: list[Entry] = []
        with self._transaction():
            scanned = [tier for tier in self._tables.tiers if self.tiers.is_scanned(tier)]
            whole, torn = self.findings.decide(scanned)
            for group in whole:
                for entry in group.coming:
                    self._changes.move(entry, group.home, Stray.SUPERSEDED)
                for entry in group.staying:
                    self.strays.note(entry, group.other, Stray.SUPERSEDED)
                if not self.vectors.indexes(group.home):
                    for entry in (*group.coming, *group.staying):
                        self.vectors.drop(entry.seq)
                left += group.coming
        self._tell_readers(left)
        return Decided(len(left), torn)

    def fall_back(self, entry: Entry, copy: Record, tier: str) -> bool:
        """A record's home has lost it, and `tier` holds it as it once was, of which a copy was noted: that is the
        record again. Returns whether it is: another tier may hold it as it is, or it has changed meanwhile."""
        with self._transaction():
            self.strays.strike(tier, entry.id)
            if not self.lose([entry]):
                self.strays.note(entry, tier, Stray.SUPERSEDED)
                return False
            if copy.created_at != render(entry.created_at):  # one that was forgotten before this was written
                self.strays.note(entry, tier, Stray.UNWANTED)
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
        with self._transaction():
            for entry in entries:
                current = self.records.get(entry.id)
                if current is None or current.version != entry.version:
                    continue
                if not self.strays.may_be(entry.id) and not self.pending.among([entry.id]):
                    self._changes.lose(current)
                    lost.append(current)
        return lost

    def drop_home(self, tier: str) -> int:
        """Take a tier whose store was exchanged out of the account: what lived there, and what strayed there. What the
        records have earned is kept for when they are found.

        Returns how many records lived there; looks at all of them.
        """
        with self._transaction():
            entries = self.records.living_in(tier)
            for entry in entries:
                self._changes.lose(entry)
            self.strays.drop_all(tier)
        return len(entries)

    def take_over(self, old: Salvage, *, is_behind: bool = False) -> TakenOver:
        """What only an earlier catalog knows, into this one, which is empty; its records come from the tiers. The
        replacements that the tiers had not caught up with are for `restore`, after the scans.

        `is_behind`: the earlier one is older than the tiers. What it holds as forgotten may have been written anew,
        what was a copy too many may be the only one, and what was being written has long been decided: nothing that a
        tier holds goes on its account.
        """
        taken = TakenOver()
        self.findings.spares_found = is_behind
        with self._transaction():
            facts = old.facts()
            if "clock" in facts:
                self._clock = max(self._clock, facts["clock"])
                self._tables.set_fact("clock", self._clock)
            if "dimensions" in facts:
                self.vectors.fix_dimensions(facts["dimensions"])
            for tier, identity in old.identities().items():
                if tier in self._tables.tiers:
                    self.tiers.set_identity(tier, identity)
            for id, seq, salience, count, at, created_at in old.earned():
                self.earned.keep(id, seq, salience, count, at, created_at)
                self.records.newest = max(self.records.newest, seq)
                taken.earned += 1
            for id, by, at in old.forgotten():
                if self.earned.of(id) is None:  # else it lives there
                    self.tombstones.note(id, by, at)
                    taken.forgotten += 1
            for stray in () if is_behind else old.unwanted():
                if stray.tier in self._tables.tiers:
                    self.strays.note(stray, stray.tier, Stray.UNWANTED)
                    taken.unwanted += 1
            for entry in () if is_behind else old.reservations():
                if entry.home in self._tables.tiers:
                    self._changes.refuse(entry, self._clock)
                    taken.interrupted += 1
            taken.redo = [(tier, draft) for tier, draft in old.redo() if tier in self._tables.tiers]
        return taken

    def restore(self, tier: str, draft: Draft) -> bool:
        """A replacement that `tier` has not caught up with is true again, unless the record was forgotten or replaced
        since, or another one was written under its id. Returns whether it is."""
        entry = entry_of(draft, tier)
        with self._transaction():
            current = self.records.get(entry.id)
            if self.findings.is_unwanted(entry) or self.findings.is_key_taken(entry):
                return False
            if current is not None and current.digest == entry.digest:
                return True
            if current is None:
                self._changes.insert_found(entry, draft.embedding)
            elif current.revision <= entry.revision and current.created_at == entry.created_at:
                self._changes.replace(current, Replacement(entry, current.version), draft.embedding)
            else:
                return False
            self.pending.begin(entry.id, tier, draft)
        return True

    def _tell_readers(self, moved: Iterable[Entry]) -> None:
        """These have left their homes just now."""
        for entry in moved:
            self.reads.moved(entry.id, entry.home)
