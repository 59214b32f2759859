"""The origin of data: this federation's id, the epochs of its routers' starts, and the cursors issued in each epoch.

An epoch that the catalog does not know is later than the catalog: an older copy of the catalog was restored
(docs/decisions/0009).
"""

import secrets
from collections.abc import Iterable
from hashlib import blake2b

from a2m_router.catalog.tables import Tables
from a2m_router.protocol.wire.cursors import KEY_BYTES, CursorSeal, fresh_key


class Lineage:
    """The federation's id, drawn at the first start, and the epochs. Creating the object draws this start's epoch.

    Args:
        newest: the last number in the order of writing.
    """

    def __init__(self, tables: Tables, newest: int) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._no = tables.no
        self.federation: str = tables.fact("federation", None) or secrets.token_hex(8)
        tables.set_fact("federation", self.federation)
        # cursors outlive the process, so their key is stored; a rebuilt catalog numbers records anew and has a new key
        self._cursor_key: bytes = tables.fact("cursor_key", None) or fresh_key()
        tables.set_fact("cursor_key", self._cursor_key)
        self.epoch = secrets.token_hex(8)
        self._execute("INSERT INTO epochs (epoch, newest) VALUES (?, ?)", (self.epoch, newest))
        self._epochs: dict[str, int] = dict(self._execute("SELECT epoch, number FROM epochs"))
        self._adopted = {id for (id,) in self._execute("SELECT federation FROM adopted")}

    def is_ours(self, federation: str | None, epoch: str | None) -> bool:
        """Return whether data with this federation id, or without one, belongs to this federation.

        Data of another federation does if it was adopted. Data that the other federation has written since does not.
        """
        if federation is None or federation == self.federation:
            return True
        return federation in self._adopted and self.knows_epoch(epoch)

    def knows_epoch(self, epoch: str | None) -> bool:
        """Return whether data with this epoch, or without one, was written by a router that this catalog knows."""
        return epoch is None or epoch in self._epochs

    def take_origins(self, epochs: Iterable[str], federations: Iterable[str] = ()) -> None:
        """Accept these epochs as known, and data with the ids of these federations as ours."""
        with self._tables.transaction():
            for epoch in epochs:
                self._execute("INSERT OR IGNORE INTO epochs (epoch) VALUES (?)", (epoch,))
                self._epochs[epoch] = self._execute("SELECT number FROM epochs WHERE epoch = ?", (epoch,)).get
            # this catalog knows only a part of what was written and forgotten in those starts
            self._tables.set_fact("origins_taken", max(self._epochs.values()))
            for federation in federations:
                self._execute("INSERT OR IGNORE INTO adopted VALUES (?)", (federation,))
                self._adopted.add(federation)

    def set_federation(self, federation: str) -> None:
        """Set this federation's id, in a catalog that is being rebuilt."""
        with self._tables.transaction():
            self._tables.set_fact("federation", federation)
            self._tables.set_fact("federation_found", 1)
        self.federation = federation

    def cursor(self, place: int) -> str:
        """Return the opaque cursor of a place in the order of writing. A plain number would reveal the record count."""
        return self._seal(self.epoch).close(place)

    def place(self, cursor: str) -> int | None:
        """Return the place of a cursor that was issued in a known epoch; None for any other cursor.

        A cursor of an unknown epoch counts records that a restored older copy of the catalog does not have.

        The place is at most the last number that a later start began with. The cursor's last record may have been
        forgotten, or be unknown to a restored copy, and later starts may have given its number to another record. So a
        caller skips no record that was written since.
        """
        for epoch in (self.epoch, *self._epochs):
            place = self._seal(epoch).open(cursor)
            if place is not None:
                later = self._execute("SELECT min(newest) FROM epochs WHERE number > ?", (self._epochs[epoch],)).get
                return place if later is None else min(place, later)
        return None

    def has_enrolled(self) -> bool:
        """Return whether the store of any tier was seen to hold an epoch of this catalog."""
        return self._execute("SELECT 1 FROM tiers WHERE epoch IS NOT NULL LIMIT 1").get is not None

    def note_epoch(self, tier: str) -> None:
        """Note that the store of `tier` holds this start's epoch. Call it when the store reports that, not before."""
        with self._tables.transaction():
            self._execute("UPDATE tiers SET epoch = ? WHERE no = ?", (self._epochs[self.epoch], self._no[tier]))

    def is_set_back(self, tier: str, epoch: str | None) -> bool:
        """Return whether the store of `tier`, which holds this epoch, is a restored copy: it has held a later epoch."""
        noted = self._execute("SELECT epoch FROM tiers WHERE no = ?", (self._no[tier],)).get
        return noted is not None and (epoch is None or self._epochs.get(epoch, noted) < noted)

    def note_set_back(self, tier: str, epoch: str | None) -> None:
        """Note that the store of `tier` is older than this catalog.

        If this catalog has been kept without a break since the store's epoch, it knows every record of that time. Then
        the store's records that it does not know were deleted since: see `Catalog.adopt`.
        """
        kept_since = self._tables.fact("origins_taken", 0)
        knows_all = epoch is not None and self._epochs.get(epoch, 0) > kept_since
        with self._tables.transaction():
            self._execute("UPDATE tiers SET scanned = 0, set_back = ? WHERE no = ?", (knows_all, self._no[tier]))

    def end_set_back(self, tier: str) -> None:
        """Note that the tier was scanned."""
        self._execute("UPDATE tiers SET set_back = 0 WHERE no = ?", (self._no[tier],))

    def knows_what_left(self, tier: str) -> bool:
        """Return whether the records in `tier` that this catalog does not know were forgotten or given up since."""
        return bool(self._execute("SELECT set_back FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def _seal(self, epoch: str) -> CursorSeal:
        return CursorSeal(blake2b(epoch.encode(), key=self._cursor_key, digest_size=KEY_BYTES).digest())
