"""Replacing a record in a tier whose server cannot replace: forget, then remember (§3.6 for those who lack it).

The replacement is true as soon as it stands, synced, in the catalog: readers are served from there, and the caller is
told so. Here its tier catches up:
1. the old copy is forgotten, and seen to be gone;
2. the new one is written, read back, and compared;
3. when every read has ended that may have looked at the tier before, the catalog lets go of its own copy.

A crash anywhere before 3 leaves the record in the catalog, and it is done once more. Each trial holds a claim on the
record, so that nothing else is written for it meanwhile; a forget claims nothing, and takes the catalog's copy.
"""

import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

import anyio

from router.a2m.errors import A2MError
from router.a2m.http_client import SETTLING
from router.a2m.records import Draft
from router.catalog.catalog import Catalog
from router.catalog.claims import record_names
from router.catalog.entries import Entry
from router.config import Tier
from router.settling import Spawn
from router.sweeping import Sweeper
from router.tiers.copies import Copies
from router.tiers.link import TierDown
from router.tiers.manner import identity_of

log = logging.getLogger(__name__)

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

# What an earlier router was at when it died may land at a tier that is reached over HTTP for so long after the start; a
# tier's own process has been ended by then, if it was left behind. Readers do not notice: the catalog serves them.
_RESUME_SECONDS: Final = SETTLING


class Redoing:
    """Lets the tiers of one catalog catch up.

    Args:
        spawn: starts a task that outlives the call it began in.
    """

    def __init__(self, catalog: Catalog, copies: Copies, sweeper: Sweeper, spawn: Spawn, tiers: Iterable[Tier]) -> None:
        self._catalog = catalog
        self._copies = copies
        self._sweeper = sweeper
        self._spawn = spawn
        self._tiers = {tier.name: tier for tier in tiers}

    def resume(self) -> None:
        """At the start: what an earlier router left undone, when nothing of it can land any more."""
        for name, tier in self._tiers.items():
            self.begin(self._catalog.redo_in(name), after=_RESUME_SECONDS if tier.url is not None else 0.0)

    def begin(self, ids: Iterable[str], after: float = 0.0) -> None:
        """Let the tiers of these records catch up, each in its own time, after so many seconds."""
        for id in ids:
            self._spawn(partial(self._catch_up, id, after))

    async def _catch_up(self, id: str, after: float) -> None:
        """Returns when the record's tier holds it as it is, or there is nothing to catch up with any more."""
        await anyio.sleep(after)
        wait = _FIRST_WAIT
        reason = ""
        while (entry := self._catalog.find([id]).get(id)) is not None and self._catalog.redone([id]):
            claim = await self._catalog.claims.take(record_names(id, entry.owner, entry.key))
            try:
                problem = await self._try(id)
            finally:
                claim.release()
            if problem is None:
                break
            if problem != reason:
                log.warning("%s has not caught up with what replaced %r: %s", entry.home, id, problem)
                reason = problem
            await anyio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _try(self, id: str) -> str | None:
        """Why the tier has not caught up this time; None if it has, or if nothing is left to do."""
        entry, draft = self._catalog.find([id]).get(id), self._catalog.redone([id]).get(id)
        if entry is None or draft is None:
            return None
        try:
            return await self._carry_out(entry, draft)
        except TierDown as problem:
            if problem.settled is not None:
                # what has been sent may land after what is sent next
                await self._copies.link(entry.home).settle(problem.settled)
            return str(problem)
        except (A2MError, OSError) as problem:
            return str(problem)

    async def _carry_out(self, entry: Entry, draft: Draft) -> str | None:
        self._check(entry.home)
        # a power cut must not take the one place where the new record is, when the old one is gone
        await self._catalog.synced()
        if entry.id not in await self._copies.remove(entry.home, [entry.id]):
            return "it does not forget what it held"
        await self._copies.write(entry.home, [draft])
        if await self._copies.unkept(entry.home, [draft]):
            return "it does not keep the record as it is given"
        await self._catalog.readers.grace()
        if self._catalog.redone([entry.id]):  # else it was forgotten meanwhile, and its copy is noted
            self._catalog.end_redo(entry, draft.embedding)
            self._sweeper.wake()  # copies elsewhere wait until the record can be read at its home
        return None

    def _check(self, tier: str) -> None:
        """Raises TierDown unless the tier can be written to, and is the one whose record this is."""
        self._sweeper.check(tier)
        profile = self._copies.link(tier).profile
        if profile is None or identity_of(self._tiers[tier], profile) != self._catalog.identity(tier):
            raise TierDown(tier, "another server is behind it", 60.0, None)
