"""Who has written what: this federation's id, the epochs of its routers' starts, and the cursors given out in each.

An epoch that the catalog does not know is later than the catalog: a copy of it was put back (docs/decisions/0009).
"""

import secrets
from collections.abc import Iterable
from hashlib import blake2b

from a2m_router.catalog.tables import Tables
from a2m_router.protocol.wire.cursors import KEY_BYTES, CursorSeal, fresh_key


class Lineage:
    """Draws an epoch of this start; the federation's id was drawn by the first.

    Args:
        newest: the last number in the order of writing.
    """

    def __init__(self, tables: Tables, newest: int) -> None:
        self._tables = tables
        self._execute = tables.execute
        self._no = tables.no
        self.federation: str = tables.fact("federation", None) or secrets.token_hex(8)
        tables.set_fact("federation", self.federation)
        # for cursors into this account, which outlive the process as the account does; a rebuilt one numbers anew
        self._cursor_key: bytes = tables.fact("cursor_key", None) or fresh_key()
        tables.set_fact("cursor_key", self._cursor_key)
        self.epoch = secrets.token_hex(8)
        self._execute("INSERT INTO epochs (epoch, newest) VALUES (?, ?)", (self.epoch, newest))
        self._epochs: dict[str, int] = dict(self._execute("SELECT epoch, number FROM epochs"))
        self._adopted = {id for (id,) in self._execute("SELECT federation FROM adopted")}

    def is_ours(self, federation: str | None, epoch: str | None) -> bool:
        """Whether what bears this federation's id, or none, belongs to this one. Of another one that is what was
        adopted, and not what that one has written since."""
        if federation is None or federation == self.federation:
            return True
        return federation in self._adopted and self.knows_epoch(epoch)

    def knows_epoch(self, epoch: str | None) -> bool:
        """Whether what bears this epoch, or none, was written by a router that this catalog knows of."""
        return epoch is None or epoch in self._epochs

    def take_origins(self, epochs: Iterable[str], federations: Iterable[str] = ()) -> None:
        """What bears these epochs is known from now on, and what bears the ids of these federations is ours."""
        with self._tables.transaction():
            for epoch in epochs:
                self._execute("INSERT OR IGNORE INTO epochs (epoch) VALUES (?)", (epoch,))
                self._epochs[epoch] = self._execute("SELECT number FROM epochs WHERE epoch = ?", (epoch,)).get
            # of what came and went in those starts this account knows a part
            self._tables.set_fact("origins_taken", max(self._epochs.values()))
            for federation in federations:
                self._execute("INSERT OR IGNORE INTO adopted VALUES (?)", (federation,))
                self._adopted.add(federation)

    def set_federation(self, federation: str) -> None:
        """Whose records these are; for a catalog that is made anew."""
        with self._tables.transaction():
            self._tables.set_fact("federation", federation)
            self._tables.set_fact("federation_found", 1)
        self.federation = federation

    def cursor(self, place: int) -> str:
        """A place in the order of writing, as callers are given it: how many records there are is not everybody's to
        know."""
        return self._seal(self.epoch).close(place)

    def place(self, cursor: str) -> int | None:
        """The place of a cursor that was given out since a start that this account knows of; else None: what was given
        out behind the back of a copy that was put back counts what the copy has never known.

        What stood last may have been forgotten, or be unknown to a copy, when the numbers went on with a later start.
        So nothing that was written since that is passed over.
        """
        for epoch in (self.epoch, *self._epochs):
            place = self._seal(epoch).open(cursor)
            if place is not None:
                later = self._execute("SELECT min(newest) FROM epochs WHERE number > ?", (self._epochs[epoch],)).get
                return place if later is None else min(place, later)
        return None

    def has_enrolled(self) -> bool:
        """Whether the store of any tier was seen to hold an epoch of this account's."""
        return self._execute("SELECT 1 FROM tiers WHERE epoch IS NOT NULL LIMIT 1").get is not None

    def note_epoch(self, tier: str) -> None:
        """The store of `tier` holds the epoch of this start. To be noted when it says so, and not before."""
        with self._tables.transaction():
            self._execute("UPDATE tiers SET epoch = ? WHERE no = ?", (self._epochs[self.epoch], self._no[tier]))

    def is_set_back(self, tier: str, epoch: str | None) -> bool:
        """Whether the store of `tier`, which holds this epoch, has held a later one: a copy of it was put back."""
        noted = self._execute("SELECT epoch FROM tiers WHERE no = ?", (self._no[tier],)).get
        return noted is not None and (epoch is None or self._epochs.get(epoch, noted) < noted)

    def note_set_back(self, tier: str, epoch: str | None) -> None:
        """The store of `tier` is older than this account. If it is from a start since which this account was kept
        without a break, what it holds and the account does not know has left it since: see `Catalog.adopt`."""
        kept_since = self._tables.fact("origins_taken", 0)
        knows_all = epoch is not None and self._epochs.get(epoch, 0) > kept_since
        with self._tables.transaction():
            self._execute("UPDATE tiers SET scanned = 0, set_back = ? WHERE no = ?", (knows_all, self._no[tier]))

    def end_set_back(self, tier: str) -> None:
        """The tier was read through."""
        self._execute("UPDATE tiers SET set_back = 0 WHERE no = ?", (self._no[tier],))

    def knows_what_left(self, tier: str) -> bool:
        """Whether what the store of `tier` holds, and this account does not know, was forgotten or given up since."""
        return bool(self._execute("SELECT set_back FROM tiers WHERE no = ?", (self._no[tier],)).get)

    def _seal(self, epoch: str) -> CursorSeal:
        return CursorSeal(blake2b(epoch.encode(), key=self._cursor_key, digest_size=KEY_BYTES).digest())
