"""The change of one record in all tables at once: its row, its copies, its notes, its vector."""

import sys
from collections.abc import Sequence

import msgspec

from a2m_router.catalog.active_reads import ActiveReads
from a2m_router.catalog.earned import Earned
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.pending_writes import PendingWrites
from a2m_router.catalog.records import Records, Replacement, Strength
from a2m_router.catalog.selection import Scope
from a2m_router.catalog.strays import Strays
from a2m_router.catalog.tables import Tables
from a2m_router.catalog.tier_facts import TierFacts
from a2m_router.catalog.tombstones import Tombstones
from a2m_router.catalog.vectors import VectorIndex


class Changes:
    """Changes of single records, each in a transaction of `Catalog`, and the parts of the catalog that they use."""

    def __init__(self, tables: Tables, strength: Strength, reads: ActiveReads) -> None:
        self._tables = tables
        self._reads = reads
        self.tiers = TierFacts(tables)
        self.records = Records(tables, strength)
        self.strays = Strays(tables)
        self.tombstones = Tombstones(tables)
        self.pending = PendingWrites(tables)
        self.earned = Earned(tables)
        self.vectors = VectorIndex(tables)

    def fulfil(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """Turn a reservation into a record.

        The write is deliberate, so it removes a tombstone of the id, unless a tier is unscanned: the forgotten record
        may still be found there.
        """
        self.strays.remove(entry.home, entry.id)
        if self.tombstones.is_forgotten(entry.id) and not self.tiers.unscanned():
            self.tombstones.drop(entry.id)
        self.earned.drop(entry.id)  # earned by an earlier record of this id, which was lost
        self.vectors.put(self.records.fulfil(entry), entry.home, vector)

    def insert(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """Add a record that has no reservation."""
        self.vectors.put(self.records.insert(entry), entry.home, vector)

    def insert_found(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """Add a record that a scan has found, with what it is known to have earned."""
        earned = self.earned.of(entry.id, entry.created_at)
        if earned is not None:
            seq, salience, count, at = earned
            entry = msgspec.structs.replace(entry, seq=seq, salience=salience, access_count=count, accessed_at=at)
        self.earned.drop(entry.id)
        self.insert(entry, vector)
        self.records.promote_if_due(entry)

    def replace(self, current: Entry, replacement: Replacement, vector: Sequence[float] | None) -> None:
        """Give a record new content, and perhaps a new home; it keeps what it has earned."""
        entry = replacement.entry
        self.records.replace(current, replacement)
        if current.home != entry.home:
            self.strays.remove(entry.home, entry.id)
            self.strays.note(current, current.home, Stray.UNWANTED)
            self._reads.moved(entry.id, current.home)
        self.strays.end_equal(entry.id)
        # an earlier pending write is obsolete; the caller begins a new one if the tier needs it
        self.pending.end(entry.id)
        self.vectors.put(current.seq, entry.home, vector)

    def move(self, entry: Entry, home: str, left: Stray, salience: float = 0.0) -> None:
        """Change a record's home to a tier that holds an equal copy, and note the old copy as `left`.

        `salience` is added to the record's.
        """
        self.records.move(entry, home, added(entry.salience, salience))
        self.strays.remove(home, entry.id)
        self.strays.note(entry, entry.home, left)
        self.pending.end(entry.id)

    def delete(self, entry: Entry) -> None:
        """Remove the record from the catalog, without a note."""
        self.records.delete(entry)
        self.pending.end(entry.id)
        self.vectors.drop(entry.seq)

    def lose(self, entry: Entry) -> None:
        """Remove the record from the catalog, and keep what it has earned for when it is found again."""
        self.delete(entry)
        self.earned.keep_of(entry)

    def forget(self, entry: Entry, now: int) -> None:
        """Remove the record, mark all its copies as unwanted, and note a tombstone against copies that land late."""
        self.delete(entry)
        self.strays.note(entry, entry.home, Stray.UNWANTED)
        self.strays.unwant(entry)
        self.tombstones.note(entry.id, entry.owner, now)

    def refuse(self, entry: Entry, now: int) -> None:
        """Give up a reservation. Its copy is unwanted, whether it is there already or lands later."""
        self.records.refuse(entry.id)
        self.strays.note(entry, entry.home, Stray.UNWANTED)
        tier = self._tables.tiers.get(entry.home)
        # over HTTP the copy may land late; a tier that is not managed any more (None) may be managed again
        if tier is None or tier.url is not None:
            self.tombstones.note(entry.id, entry.owner, now)

    def forget_quarantined(self, id: str, scope: Scope, now: int) -> list[Entry]:
        """Forget the quarantined records with this id; return what is known of them."""
        dropped = [stray for stray in self.strays.quarantined(id) if scope.may_change(stray.owner, stray.tier)]
        for stray in dropped:
            self.strays.note(stray, stray.tier, Stray.UNWANTED)
            self.tombstones.note(id, stray.owner, now)
        return [
            Entry(id=id, home=stray.tier, owner=stray.owner, key=stray.key, created_at=now, digest=b"")
            for stray in dropped
        ]


def added(salience: float, amount: float) -> float:
    """Return the sum of a salience and an amount, between 0 and the largest number that JSON can hold."""
    return min(max(0.0, salience + amount), sys.float_info.max)
