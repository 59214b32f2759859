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
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final

import anyio

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, record_names
from a2m_router.catalog.entries import Entry
from a2m_router.config.settings import Tier
from a2m_router.placement.settling import Spawn
from a2m_router.placement.sweeping import MAY_STILL_LAND, Sweeper
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Draft
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mode import identity_of
from a2m_router.tiers.together import outcomes

log = logging.getLogger(__name__)

_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

# Records of a tier that are worked on at once, where the first trial was in vain.
_WORKERS: Final = 4


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
        self._behind: dict[str, dict[str, None]] = {
            name: {} for name in self._tiers
        }  # ids, in the order of their turns
        self._workers = Counter[str]()  # of each tier
        self._reasons: dict[str, str] = {}  # why a tier has not caught up, as far as the log has said it

    def resume(self) -> None:
        """At the start: what an earlier router left undone. As long as a call of its may still land at a tier, that is
        tried in vain; readers do not notice, since they are served from the catalog."""
        for name in self._tiers:
            self._begin(self._catalog.redo_in(name))

    def begin(self, ids: Iterable[str], claim: Claim) -> None:
        """Let the tiers of these records, all of them under `claim`, catch up. It is released after the first trial."""
        self._spawn(partial(self._catch_up_together, tuple(ids), claim))

    async def _catch_up_together(self, ids: Sequence[str], claim: Claim) -> None:
        try:
            problems = await self._try(ids)
        finally:
            claim.release()
        self._begin(problems)

    def _begin(self, ids: Iterable[str]) -> None:
        """A few of a tier's records are worked on at once, each again and again; the others wait for their turn."""
        for id, entry in self._catalog.find(ids).items():
            self._behind[entry.home][id] = None
            if self._workers[entry.home] < _WORKERS:
                self._workers[entry.home] += 1
                self._spawn(partial(self._work, entry.home))

    async def _work(self, tier: str) -> None:
        """Returns when none of the tier's records is behind that others are not at work on."""
        behind = self._behind[tier]
        wait = _FIRST_WAIT
        try:
            while behind:
                id = next(iter(behind))
                del behind[id]
                problem: str | None = "it was not finished"
                try:
                    problem = await self._catch_up(id)
                finally:
                    if problem is not None:
                        behind[id] = None
                self._say(tier, id, problem)
                if problem is None:
                    wait = _FIRST_WAIT
                    continue
                await anyio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)
        finally:
            self._workers[tier] -= 1

    async def _catch_up(self, id: str) -> str | None:
        """Why the record's tier does not hold it as it is; None if it does, or there is nothing to catch up with."""
        entry = self._catalog.find([id]).get(id)
        if entry is None or not self._catalog.behind([id]):
            return None
        claim = await self._catalog.claims.take(record_names(id, entry.owner, entry.key))
        try:
            return (await self._try([id])).get(id)
        finally:
            claim.release()

    def _say(self, tier: str, id: str, problem: str | None) -> None:
        if problem is None:
            self._reasons.pop(tier, None)
        elif self._reasons.get(tier) != problem:
            self._reasons[tier] = problem
            log.warning("%s has not caught up with what replaced %r: %s", tier, id, problem)

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
        if not self._copies.mode(tier).native:
            gone = await self._copies.remove(tier, [entry.id for entry in entries])
            problems = {entry.id: "it does not forget what it held" for entry in entries if entry.id not in gone}
        left = await self._copies.write_seen(tier, [draft for draft in drafts if draft.id not in problems])
        problems |= {id: f"it {what}" for id, what in left.items()}
        await self._catalog.readers.grace()
        vectors = {draft.id: draft.embedding for draft in drafts if draft.id is not None}
        held = [entry for entry in entries if entry.id not in problems]
        still = self._catalog.behind(entry.id for entry in held)  # else forgotten meanwhile, and its copy is noted
        self._catalog.end_redo([entry for entry in held if entry.id in still], vectors)
        self._sweeper.wake()  # copies elsewhere wait until the record can be read at its home
        return problems

    def _check(self, tier: str) -> None:
        """Raises TierDown unless the tier can be written to, and is the one whose record this is."""
        self._sweeper.check(tier)
        wait = self._sweeper.held_for(tier)
        if wait:
            # that call may be an earlier replacement of the same record, which would take the place of this one
            raise TierDown(tier, MAY_STILL_LAND, wait, None)
        profile = self._copies.link(tier).profile
        if profile is None or identity_of(self._tiers[tier], profile) != self._catalog.identity(tier):
            raise TierDown(tier, "another server is behind it", 60.0, None)
