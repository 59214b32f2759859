"""The catalog: where every managed record lives, durably. It consists of parts with one job each.

Rules:
- a change of a record, or of a note about one, is a method of `Catalog`, and one transaction. Most of these changes
  touch several parts. The parts' own methods for that expect a transaction; only this module and `changes` call them;
- a fact about a tier, its server, the federation or this file stands alone. The part that holds such a fact changes it,
  in one transaction: `tiers`, `lineage`, `vectors`, `opening`;
- a query is a method of the part that holds the data;
- a note comes before a copy: before a tier may hold a copy outside a record's home, a stray is noted;
- methods decide and change in one step and never wait. A change that must survive a power cut is followed by
  `await synced()`.

The catalog never calls a tier and has no clock: times come in as milliseconds since 1970.
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
from a2m_router.catalog.findings import Decided, Findings, Verdict
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

# Seconds that a change waits for another program to unlock the file, and between two attempts.
_PATIENCE: Final = 10.0
_LOOK: Final = 0.05


class Catalog:
    """The open catalog of one federation: its parts, and all changes of records and of the notes about them.

    Args:
        path: the file; None keeps the catalog in memory, for trials.
        tiers: the managed tiers, as configured.
        strength: the policy's order of retention.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.

    Raises:
        DatabaseError: the file cannot be used, or records live in a tier that is not configured any more.
    """

    def __init__(self, path: Path | None, tiers: Sequence[Tier], strength: Strength, *, threads: bool = True) -> None:
        self.claims = Claims()
        self.reads = ActiveReads(lambda: self.records.newest)
        self.rewrites = 0  # how often a summary has replaced a unit
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
        """Wait until everything committed so far survives a power cut. Raises OSError if the disk fails."""
        await self._syncing.wait()

    async def writable(self) -> None:
        """Wait until no other program locks the file against changes; normally this returns at once.

        Raises OSError if the lock outlasts the wait, or if the file is gone.
        """
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
        """Return what is wrong with the file's pages, or None. Reads the whole file; used after an unclean end."""
        found: str = self._tables.execute("PRAGMA quick_check(1)").get
        return None if found == "ok" else found

    def close(self) -> None:
        """Sync and close the file."""
        try:
            # if the disk refuses this, the next start checks more, which is right then
            with contextlib.suppress(OSError, apsw.Error):
                self.opening.end()
        finally:
            self.database.close()

    def look_at_clock(self, now: int) -> int:
        """Note the time; return by how many milliseconds the clock was set back since it was last noted.

        An earlier router may have noted it.
        """
        back, self._clock = self._clock - now, now
        return max(back, 0)

    def reserve(self, new: Sequence[Entry]) -> None:
        """Reserve the new records of a batch before any tier is sent one.

        `home` of each entry is its destination. Nothing of the batch is visible before `commit_write`.
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
        """Commit a batch whose new records their tiers hold already.

        Args:
            redo: the replacements as whole records, by id: the pending writes. Reads get them from here until
                `end_pending`.

        Returns:
            The replacements that were dropped, because their records were forgotten or changed meanwhile.
        """
        lost = []
        with self._transaction():
            for entry in new:
                self._changes.fulfil(entry, vectors.get(entry.id))
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
        """End the pending writes of records that their tiers now hold."""
        with self._transaction():
            for entry in entries:
                self.pending.end(entry.id)
                self.vectors.put(entry.seq, entry.home, vectors.get(entry.id))

    def abandon(self, new: Iterable[Entry]) -> None:
        """Give up a batch that failed. Copies that may have been written are noted as unwanted.

        Over HTTP a call may land after the router has stopped waiting for it, so those ids get tombstones, too.
        """
        with self._transaction():
            for entry in new:
                self._changes.refuse(entry, self._clock)

    def note_unwanted(self, entries: Iterable[Entry], tier: str) -> None:
        """Note copies that were found in `tier` as unwanted."""
        with self._transaction():
            for entry in entries:
                self.strays.note(entry, tier, Stray.UNWANTED)

    def note_copies(self, entries: Iterable[Entry], target: str) -> None:
        """Note copies that are about to be written to `target`."""
        with self._transaction():
            for entry in entries:
                self.strays.note(entry, target, Stray.PENDING)

    def remove_notes(self, tier: str, ids: Iterable[str]) -> None:
        """Remove the notes about copies of `ids` in `tier`: they are deleted."""
        with self._transaction():
            for id in ids:
                self.strays.remove(tier, id)

    def flip(
        self,
        units: Iterable[Sequence[Entry]],
        target: str,
        salience: float = 0.0,
        vectors: Vectors = NO_VECTORS,
    ) -> list[Entry]:
        """Change the home of each unit that is unchanged, and note its old copies. The commit point of a move.

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
        self._note_moved(moved)
        return moved

    def come_home(self, id: str, digest: bytes, tier: str, vector: Sequence[float] | None = None) -> bool:
        """Make `tier` the home of a record that its home has lost, if the copy found there has the record's digest.

        Returns whether the home has changed.
        """
        with self._transaction():
            entry = self.records.get(id)
            if entry is None or entry.digest != digest or entry.home == tier:
                return False
            self._changes.move(entry, tier, Stray.UNWANTED)
            self.vectors.put(entry.seq, tier, vector)
        self._note_moved([entry])
        return True

    def give_up(self, entries: Iterable[Entry], target: str) -> None:
        """Note that a move has ended without its flip.

        A copy at `target` is deleted once the record was read at its home. A copy without a record is deleted without
        a check.
        """
        with self._transaction():
            for entry in entries:
                self.strays.end_pending(target, entry.id)

    def forget(self, ids: Iterable[str], scope: Scope, now: int) -> list[Entry]:
        """Forget those of `ids` that `scope` may forget; no read returns them from now on.

        Returns what was forgotten. While a tier is unscanned, unknown ids get tombstones: it may hold their records.
        """
        forgotten = []
        # a tombstone acts wherever the record is found, so it needs the right to write to every unscanned tier
        unscanned = self.tiers.unscanned()
        notes_unknown = bool(unscanned) and all(map(scope.writes_to, unscanned))
        with self._transaction():
            for id in dict.fromkeys(ids):
                entry = self.records.get(id)
                if entry is not None and scope.may_change(entry.owner, entry.home):
                    self._changes.forget(entry, now)
                    forgotten.append(entry)
                    continue
                # several tiers may hold quarantined copies; they count as one record
                forgotten += self._changes.forget_quarantined(id, scope, now)[:1]
                if entry is None:
                    self.earned.drop(id)
                    if notes_unknown:
                        self.tombstones.note(id, scope.owner, now)
        return forgotten

    def distil(self, unit: Sequence[Entry], summary: Entry, now: int) -> bool:
        """Replace a unit by its summary, which its tier holds already, if the unit is unchanged. Return whether it was.

        The commit point of a spill that distils.
        """
        with self._transaction():
            sources = self.records.unchanged(unit)
            if sources is None:
                return False
            self.strays.remove(summary.home, summary.id)
            self._changes.insert(summary, None)
            for entry in sources:
                self._changes.forget(entry, now)
        self.rewrites += 1
        return True

    def drop_notes_before(self, moment: int) -> None:
        """Drop tombstones older than `moment` whose ids have no noted copies."""
        with self._transaction():
            self.tombstones.drop_before(moment)

    def touch(self, ids: Iterable[str], now: int) -> bool:
        """Count an access to each record. Return whether one of them has earned its promotion by it."""
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
        """Add `amount` to the salience of the records that `scope` may change; it stays at 0 or above.

        Returns how many records were found.
        """
        with self._transaction():
            found = [e for e in self.records.find(ids).values() if scope.may_change(e.owner, e.home)]
            for entry in found:
                self.records.earn(msgspec.structs.replace(entry, salience=added(entry.salience, amount)))
        return len(found)

    def begin_recovery(self) -> None:
        """Clean up after the last router, right after the start.

        Interrupted writes are given up: they were not acknowledged. Interrupted moves are undone: a copy at the target
        is deleted once the record was read at its home. That read is needed because this catalog may be a restored
        older copy, and the move may have ended.
        """
        with self._transaction():
            for entry in self.records.reserved():
                self._changes.refuse(entry, self._clock)
            self.strays.end_pending()

    def adopt(self, entries: Iterable[Entry], vectors: Vectors = NO_VECTORS) -> tuple[int, list[Entry]]:
        """Add records that were found in a tier to the catalog, as `findings` decides.

        Returns how many were added, and the records that were quarantined: another owner has their id, another record
        has their owner's key, or a write under way has reserved one of the two. A quarantined record is noted. The
        router never deletes it on its own; a later scan adds it if id and key are free.
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
                    if found == Stray.QUARANTINED:
                        refused.append(entry)
                    elif found == Stray.EQUAL and current is not None and self.vectors.indexes(entry.home):
                        self.vectors.put(current.seq, entry.home, vector)  # in case it becomes the home
                elif found is Verdict.RECORD and current is not None:
                    self._changes.replace(current, Replacement(entry, current.version), vector)
                    self.strays.note(current, current.home, Stray.SUPERSEDED)
                elif found is Verdict.RECORD:
                    self.strays.remove(entry.home, entry.id)
                    self._changes.insert_found(entry, vector)
                    adopted += 1
        return adopted, refused

    def end_scan(self, tier: str) -> Decided:
        """Note that everything in `tier` was given to `adopt`, and decide the groups."""
        with self._transaction():
            self.tiers.set_scanned(tier, True)
            self.lineage.end_set_back(tier)
            if not self.tiers.unscanned():
                self._tables.set_fact("was_whole", 1)
                # all tiers are scanned, so no forgotten record can be found under an id that was written again
                self.tombstones.drop_living()
            return self.decide_groups()

    def decide_groups(self) -> Decided:
        """Choose one home for each group with equal copies in two scanned tiers.

        The tier that holds the whole group becomes the home of all of it; if both do, the one further down the way. A
        move that was cut off leaves the whole group in one of the two (see the crash table of docs/architecture.md). If
        neither tier holds the whole group, nothing is changed, and the result names the move that unites it. A group
        whose parts have no copy in common was written so, and stays so. Reads only the undecided groups.
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
        self._note_moved(left)
        return Decided(len(left), torn)

    def fall_back(self, entry: Entry, copy: Record, tier: str) -> bool:
        """Make a former state in `tier`, noted as a stray, the record again, because its home has lost the record.

        Returns whether it is the record now. It is not if another tier may hold the present state, or if the record
        has changed meanwhile.
        """
        with self._transaction():
            self.strays.remove(tier, entry.id)
            if not self.lose([entry]):
                self.strays.note(entry, tier, Stray.SUPERSEDED)
                return False
            if copy.created_at != render(entry.created_at):  # an earlier record of this id, which was forgotten
                self.strays.note(entry, tier, Stray.UNWANTED)
                return False
            found = entry_of(copy, tier)
            self.adopt([found], NO_VECTORS if copy.embedding is None else {found.id: copy.embedding})
        return True

    def lose(self, entries: Iterable[Entry]) -> list[Entry]:
        """Remove records from the catalog that were not found in their homes.

        A record stays if it has changed since, if a write of it is pending, or if another noted copy may be the record.
        What lost records have earned is kept for when they are found.

        Returns the records that were removed.
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
        """Remove the records and the strays of a tier whose store was exchanged from the catalog.

        What the records have earned is kept for when they are found. Reads all of them.

        Returns how many records lived there.
        """
        with self._transaction():
            entries = self.records.living_in(tier)
            for entry in entries:
                self._changes.lose(entry)
            self.strays.drop_all(tier)
        return len(entries)

    def take_over(self, old: Salvage, *, is_behind: bool = False) -> TakenOver:
        """Copy what only an earlier catalog knows into this one, which is empty. The records come from the tiers.

        The earlier catalog's pending writes are returned for `restore`, after the scans.

        Args:
            is_behind: the earlier catalog is older than the tiers. A record with a tombstone may have been written
                again, an unwanted copy may be the only one, and writes under way have ended since. So nothing is
                deleted from a tier because of the earlier catalog.
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
                if self.earned.of(id) is None:  # otherwise its record lives in the earlier catalog
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
        """Begin a pending write of an earlier catalog again. Return whether it is true again.

        It is not if the record was forgotten or replaced since, or if another record was written under its id.
        """
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

    def _note_moved(self, moved: Iterable[Entry]) -> None:
        """Note for the active reads that these records have just left their homes."""
        for entry in moved:
            self.reads.moved(entry.id, entry.home)
