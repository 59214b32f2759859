"""Replacing a record in a tier whose server cannot replace: forget, then remember (§3.6 for those who lack it).

The replacement is true as soon as it stands, synced, in the catalog: readers are served from there, and the caller is
told so. Here its tier catches up:
1. the old copy is forgotten, and seen to be gone;
2. the new one is written, read back, and compared;
3. when every read has ended that may have looked at the tier before, the catalog lets go of its own copy.

A crash anywhere before 3 leaves the record in the catalog, and it is done once more. Whoever runs this holds the claim
on the record, so that nothing else is written for it meanwhile; a forget claims nothing, and takes the catalog's copy.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

import anyio

from router.a2m.errors import A2MError
from router.a2m.records import Draft, digest
from router.catalog.catalog import Catalog
from router.catalog.claims import id_name
from router.catalog.entries import Entry
from router.settling import Settling
from router.tiers.copies import Copies
from router.tiers.link import TierDown

log = logging.getLogger(__name__)

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0


class Redoing:
    """Lets the tiers of one catalog catch up."""

    def __init__(self, catalog: Catalog, copies: Copies, settling: Settling, tiers: Iterable[str]) -> None:
        self._catalog = catalog
        self._copies = copies
        self._settling = settling
        self._tiers = list(tiers)

    def resume(self) -> None:
        """Right after the start, before anybody else has claimed anything: what an earlier router left undone."""
        ids = [id for tier in self._tiers for id in self._catalog.redo_in(tier)]
        for id in self._catalog.find(ids):
            claim = self._catalog.claims.take_if_free([id_name(id)])
            assert claim is not None, "nothing has been claimed yet"
            self._settling.release(claim, then=partial(self.catch_up, [id]))

    async def catch_up(self, ids: Iterable[str]) -> None:
        """Returns when the tiers hold these records as they are, or the records are no more. The caller has claimed
        them, and holds the claim until then."""
        for id in ids:
            wait = _FIRST_WAIT
            while (draft := self._catalog.redone([id]).get(id)) is not None:
                entry = self._catalog.find([id])[id]
                try:
                    if await self._carry_out(entry, draft):
                        break
                    reason = f"it does not keep {id!r} as it is given"
                except (TierDown, A2MError, OSError) as problem:
                    reason = str(problem)
                    if isinstance(problem, TierDown) and problem.settled is not None:
                        # what has been sent may land after what is sent next
                        await self._copies.link(entry.home).settle(problem.settled)
                log.log(
                    logging.WARNING if wait == _FIRST_WAIT else logging.DEBUG,
                    "%s has not caught up with what replaced %r: %s",
                    entry.home,
                    id,
                    reason,
                )
                await anyio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)

    async def _carry_out(self, entry: Entry, draft: Draft) -> bool:
        if entry.id not in await self._copies.remove(entry.home, [entry.id]):
            return False
        await self._copies.write(entry.home, [draft])
        copy = (await self._copies.read(entry.home, [entry.id], embeddings=True)).get(entry.id)
        if copy is None or digest(copy) != entry.digest:
            return False
        await self._catalog.readers.grace()
        self._catalog.end_redo(entry.id)
        return True
