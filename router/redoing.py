"""Replacing records (§3.6): what replaces one is true as soon as it stands, synced, in the catalog. Readers are served
from there, and the caller is told so; all of a batch becomes true at once, whichever tiers it is for. Here they catch
up:

1. a tier that replaces by itself is told the new record; from another the old copy is forgotten first, and seen to be
   gone;
2. the new one is read back, and compared;
3. when every read has ended that may have looked at the tier before, the catalog lets go of its own copy.

A crash anywhere before 3 leaves the record in the catalog, and it is done once more. Each trial holds a claim on the
record, the first one that of the write itself, so that nothing else is written for it meanwhile; a forget claims
nothing, and takes the catalog's copy.
"""

import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import anyio

from router.a2m.errors import A2MError
from router.a2m.http_client import SETTLING
from router.a2m.records import Draft
from router.catalog.catalog import Catalog
from router.catalog.claims import Claim, record_names
from router.catalog.entries import Entry
from router.config import Tier
from router.settling import Spawn
from router.sweeping import Sweeper
from router.tiers.copies import Copies
from router.tiers.link import TierDown
from router.tiers.manner import identity_of
from router.tiers.together import outcomes

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

    def begin(self, ids: Iterable[str], claim: Claim | None = None, after: float = 0.0) -> None:
        """Let the tiers of these records catch up, after so many seconds.

        With `claim`, which is on all of them, they are tried together once, and it is released.
        """
        if claim is not None:
            self._spawn(partial(self._catch_up_together, tuple(ids), claim))
            return
        for id in ids:
            self._spawn(partial(self._catch_up, id, after))

    async def _catch_up_together(self, ids: Sequence[str], claim: Claim) -> None:
        try:
            problems = await self._try(ids)
        finally:
            claim.release()
        self.begin(problems)

    async def _catch_up(self, id: str, after: float) -> None:
        """Returns when the record's tier holds it as it is, or there is nothing to catch up with any more."""
        await anyio.sleep(after)
        wait = _FIRST_WAIT
        reason = ""
        while (entry := self._catalog.find([id]).get(id)) is not None and self._catalog.redone([id]):
            claim = await self._catalog.claims.take(record_names(id, entry.owner, entry.key))
            try:
                problem = (await self._try([id])).get(id)
            finally:
                claim.release()
            if problem is None:
                break
            if problem != reason:
                log.warning("%s has not caught up with what replaced %r: %s", entry.home, id, problem)
                reason = problem
            await anyio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    async def _try(self, ids: Sequence[str]) -> dict[str, str]:
        """Which of them their tiers have not caught up with this time, and why."""
        entries, drafts = self._catalog.find(ids), self._catalog.redone(ids)
        by_home: dict[str, list[Entry]] = {}
        for id, entry in entries.items():
            if id in drafts:
                by_home.setdefault(entry.home, []).append(entry)
        found = await outcomes(
            [partial(self._settled, tier, there, [drafts[e.id] for e in there]) for tier, there in by_home.items()]
        )
        return {id: problem for problems in found if isinstance(problems, dict) for id, problem in problems.items()}

    async def _settled(self, tier: str, entries: Sequence[Entry], drafts: Sequence[Draft]) -> dict[str, str]:
        try:
            return await self._carry_out(tier, entries, drafts)
        except TierDown as problem:
            if problem.settled is not None:
                # what has been sent may land after what is sent next
                await self._copies.link(tier).settle(problem.settled)
            reason = str(problem)
        except (A2MError, OSError) as problem:
            reason = str(problem)
        return {entry.id: reason for entry in entries}

    async def _carry_out(self, tier: str, entries: Sequence[Entry], drafts: Sequence[Draft]) -> dict[str, str]:
        self._check(tier)
        # a power cut must not take the one place where the new record is, when the old one is gone
        await self._catalog.synced()
        problems: dict[str, str] = {}
        if not self._copies.manner(tier).native:
            gone = await self._copies.remove(tier, [entry.id for entry in entries])
            problems = {entry.id: "it does not forget what it held" for entry in entries if entry.id not in gone}
        left = await self._copies.write_seen(tier, [draft for draft in drafts if draft.id not in problems])
        problems |= {draft.id: "it does not keep the record as it is given" for draft in left if draft.id}
        await self._catalog.readers.grace()
        vectors = {draft.id: draft.embedding for draft in drafts if draft.id is not None}
        held = [entry for entry in entries if entry.id not in problems]
        still = self._catalog.redone(entry.id for entry in held)  # else forgotten meanwhile, and its copy is noted
        self._catalog.end_redo([entry for entry in held if entry.id in still], vectors)
        self._sweeper.wake()  # copies elsewhere wait until the record can be read at its home
        return problems

    def _check(self, tier: str) -> None:
        """Raises TierDown unless the tier can be written to, and is the one whose record this is."""
        self._sweeper.check(tier)
        profile = self._copies.link(tier).profile
        if profile is None or identity_of(self._tiers[tier], profile) != self._catalog.identity(tier):
            raise TierDown(tier, "another server is behind it", 60.0, None)
