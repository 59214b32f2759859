"""What the change of one record is to all tables at once: its row, its copies, its notes, its vector."""

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
    """Changes of single records, each within a transaction of `Catalog`; and the parts that these are made of."""

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

    def settle(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """A reserved record becomes one; on purpose, so the notes that its id was forgotten end: as soon as there is no
        tier left where what was forgotten may be found."""
        self.strays.strike(entry.home, entry.id)
        if self.tombstones.is_forgotten(entry.id) and not self.tiers.unscanned():
            self.tombstones.drop(entry.id)
        self.earned.drop(entry.id)  # by another, which was lost
        self.vectors.put(self.records.settle(entry), entry.home, vector)

    def insert(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """A record that no write reserved."""
        self.vectors.put(self.records.insert(entry), entry.home, vector)

    def insert_found(self, entry: Entry, vector: Sequence[float] | None) -> None:
        """A record that a scan has found, with what it is known to have earned."""
        earned = self.earned.of(entry.id, entry.created_at)
        if earned is not None:
            seq, salience, count, at = earned
            entry = msgspec.structs.replace(entry, seq=seq, salience=salience, access_count=count, accessed_at=at)
        self.earned.drop(entry.id)
        self.insert(entry, vector)
        self.records.promote_if_due(entry)

    def replace(self, current: Entry, replacement: Replacement, vector: Sequence[float] | None) -> None:
        """New content for a record, and perhaps a new home; what it has earned stays."""
        entry = replacement.entry
        self.records.replace(current, replacement)
        if current.home != entry.home:
            self.strays.strike(entry.home, entry.id)
            self.strays.note(current, current.home, Stray.UNWANTED)
            self._reads.moved(entry.id, current.home)
        self.strays.end_equal(entry.id)
        # what was to be caught up with is not true any more; whoever replaces says whether this is to be
        self.pending.end(entry.id)
        self.vectors.put(current.seq, entry.home, vector)

    def move(self, entry: Entry, home: str, left: Stray, salience: float = 0.0) -> None:
        """The record lives in another tier from now on, which holds it as it is; what it has left behind is noted.
        `salience` is added."""
        self.records.move(entry, home, added(entry.salience, salience))
        self.strays.strike(home, entry.id)
        self.strays.note(entry, entry.home, left)
        self.pending.end(entry.id)

    def delete(self, entry: Entry) -> None:
        """The record leaves the account, without a trace."""
        self.records.delete(entry)
        self.pending.end(entry.id)
        self.vectors.drop(entry.seq)

    def lose(self, entry: Entry) -> None:
        """The record leaves the account, and what it has earned is kept for when it is found."""
        self.delete(entry)
        self.earned.keep_of(entry)

    def strike_out(self, entry: Entry, now: int) -> None:
        """The record is no more, wherever copies of it may be, and nothing late brings it back."""
        self.delete(entry)
        self.strays.note(entry, entry.home, Stray.UNWANTED)
        self.strays.unwant(entry)
        self.tombstones.note(entry.id, entry.owner, now)

    def refuse(self, entry: Entry, now: int) -> None:
        """What was reserved does not become true; its copy goes, now, or when it lands at last."""
        self.records.refuse(entry.id)
        self.strays.note(entry, entry.home, Stray.UNWANTED)
        tier = self._tables.tiers.get(entry.home)
        if tier is None or tier.url is not None:  # None: it is not managed any more, and may be again
            self.tombstones.note(entry.id, entry.owner, now)

    def drop_set_aside(self, id: str, scope: Scope, now: int) -> list[Entry]:
        """A record that was set aside is forgotten like any other; returns it as far as it is known."""
        dropped = [stray for stray in self.strays.set_aside(id) if scope.may_change(stray.owner, stray.tier)]
        for stray in dropped:
            self.strays.note(stray, stray.tier, Stray.UNWANTED)
            self.tombstones.note(id, stray.owner, now)
        return [
            Entry(id=id, home=stray.tier, owner=stray.owner, key=stray.key, created_at=now, digest=b"")
            for stray in dropped
        ]


def added(salience: float, amount: float) -> float:
    """A salience and what is added to it: neither less than nothing nor more than JSON can say."""
    return min(max(0.0, salience + amount), sys.float_info.max)
