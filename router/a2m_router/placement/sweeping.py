"""The sweeper: removes the copies that are noted as strays, whenever their tier can be reached.

Rules:
- it trusts nothing: a copy that a move left behind, or was to bring about, goes only after the record was read at its
  home in the same sweep, as it is; if the home has lost it, or holds it as it once was, the copy becomes home, but only
  with the digest that the catalog holds;
- copies of what was forgotten, replaced or given up go without asking; what was set aside stays, and is in the way;
- no copy goes while a read is under way that may still need it;
- what somebody has a claim on is left for later; a copy in a record's home is never touched.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import anyio

from a2m_router.catalog.accounts import NotedStray
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Name, record_names
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.config.settings import Tier
from a2m_router.placement.settling import Settling
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.records import Record, digest, draft_of
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import TierDown

log = logging.getLogger(__name__)

# why a tier is not touched for a while after the router has died
MAY_STILL_LAND: Final = "a call of an earlier router may still land there"

_PAGE: Final = 200

# copies that go only when the record was read at its home
_SEEN_FIRST: Final = frozenset({Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL})

# How long a tier that refused to forget is left alone.
_PAUSE_SECONDS: Final = 5.0


class InTheWay(Exception):
    """What was claimed to clear the way is not all that is in it any more; claim anew."""


class Sweeper:
    """Sweeps the managed tiers of one catalog."""

    def __init__(self, catalog: Catalog, copies: Copies, settling: Settling, tiers: Iterable[Tier]) -> None:
        self._catalog = catalog
        self._copies = copies
        self._settling = settling
        self._tiers = [tier.name for tier in tiers]
        self._due: set[str] = set()  # tiers to be swept
        self._held: dict[str, float] = {}  # tiers where an earlier router's calls may still land, and until when
        self._wanted = anyio.Event()
        self._idle = anyio.Event()
        self._passed_over: dict[Name, set[str]] = {}  # what others had claimed, and in which tiers it waits
        # tiers whose copies stay, though nothing is down: a home did not answer, or they were not removed
        self._put_off: set[str] = set()
        self._said: dict[str, str] = {}  # why the strays of a tier stay, as far as the log has said it

    def wake(self, *tiers: str) -> None:
        """There is something to remove in `tiers`, or what could not be reached can be now; in all without a name."""
        self._due.update(tiers or self._tiers)
        self._wanted.set()

    def hold(self, tier: str, seconds: float) -> None:
        """Leave the strays of `tier` alone for so long: what an earlier router had under way there may still land, and
        would be nobody's if its note were gone by then."""
        self._held[tier] = anyio.current_time() + seconds

    def held_for(self, tier: str) -> float:
        """The seconds for which the strays of `tier` are left alone yet; none if they are not."""
        return max(0.0, self._held.get(tier, 0.0) - anyio.current_time())

    async def run(self) -> None:
        """Sweep whenever woken. Ends only by being cancelled."""
        with self._catalog.claims.on_release(self._on_release):
            while True:
                self._wanted = anyio.Event()
                due, self._due = self._due, set()
                try:
                    failed = {tier for tier in self._tiers if tier in due and not await self._try(tier)}
                except OSError:  # of the catalog's disk, which may work again
                    self._due |= due
                    raise
                if not self._wanted.is_set():
                    self._idle.set()
                    self._idle = anyio.Event()
                with anyio.move_on_after(_PAUSE_SECONDS if failed else None):
                    await self._wanted.wait()
                self._due |= failed

    async def idle(self) -> None:
        """Return when the sweeper has been through all tiers once more and found nothing new to do."""
        self.wake()
        await self._idle.wait()

    async def sweep(self, tier: str) -> None:
        """Remove all strays of `tier` that can be removed now. Raises TierDown and A2MError as the tier does."""
        after = ""
        while page := self._catalog.strays(tier, after, _PAGE):
            after = page[-1].id
            # before anything is claimed: a long read must not keep writers waiting
            await self._catalog.readers.grace()
            claims = []
            mine = []
            failures: list[object] = []
            # a cancellation must not let a claim go while a call may still land; every call has a deadline
            with anyio.CancelScope(shield=True):
                try:
                    for stray in page:
                        claim = self._catalog.claims.take_if_free(_names(stray))
                        if claim is None:
                            for name in _names(stray):
                                self._passed_over.setdefault(name, set()).add(tier)
                        else:
                            claims.append(claim)
                            mine.append(stray)
                    await self._remove(tier, self._catalog.still_noted(tier, mine))
                except (TierDown, A2MError) as failure:
                    failures.append(failure)
                    raise
                finally:
                    await self._settling.release(claims, failures)

    def check(self, tier: str, *, writes: bool = True) -> None:
        """Raises TierDown unless `tier` can be reached and all that it holds is known; for `writes`, unless its server
        takes any, too.

        Nothing is written to it, or moved from it, before: a member of a group, or an older copy, may be undiscovered.
        """
        link = self._copies.link(tier)
        if link.status != "up":
            raise TierDown(tier, link.reason or "it is still starting", 1.0, None)
        if not self._catalog.is_scanned(tier) or (writes and link.barred is not None):
            raise TierDown(tier, self._copies.why_unaccounted(tier), 1.0, None)

    async def clear(self, tier: str, entries: Sequence[Entry]) -> None:
        """Make sure that no stray of these ids, or at these owners' keys, is left in `tier`, before they are written.

        The caller holds claims on all of them (`names_in_the_way`). Raises TierDown if one of them stays, and InTheWay
        if another one, which the caller has no claim on, has come since: a forget claims nothing.
        """
        strays = self._catalog.strays_in_the_way(tier, entries)
        if strays:
            wait = self.held_for(tier)
            if wait:
                raise TierDown(tier, MAY_STILL_LAND, wait, None)
            await self._catalog.readers.grace()
            await self._remove(tier, self._catalog.still_noted(tier, strays))
            left = {stray.id for stray in self._catalog.strays_in_the_way(tier, entries)}
            if not left <= {stray.id for stray in strays}:
                raise InTheWay
            if left:
                raise TierDown(tier, "an older copy of a record could not be removed yet", 1.0, None)

    def names_in_the_way(self, tier: str, entries: Sequence[Entry]) -> set[Name]:
        """What has to be claimed, beside the entries themselves, to `clear` their way into `tier`."""
        strays = self._catalog.strays_in_the_way(tier, entries)
        return {name for stray in strays for name in _names(stray)}

    def _on_release(self, names: frozenset[Name]) -> None:
        tiers = {tier for name in names for tier in self._passed_over.pop(name, ())}
        if tiers:
            self.wake(*tiers)

    async def _try(self, tier: str) -> bool:
        link = self._copies.link(tier)
        if link.status != "up" or link.barred is not None:
            return True  # that it is taken into the account wakes us
        if self.held_for(tier):
            return False
        self._put_off.discard(tier)
        try:
            await self.sweep(tier)
        except (TierDown, A2MError) as problem:
            if self._said.get(tier) != str(problem):
                log.warning("%s: strays stay for now: %s", tier, problem)
                self._said[tier] = str(problem)
            return False
        self._said.pop(tier, None)
        return tier not in self._put_off

    async def _remove(self, tier: str, strays: Sequence[NotedStray]) -> None:
        """Remove those copies that may go. The caller has claimed them, and let the reads under way end."""
        entries = self._catalog.find(stray.id for stray in strays)
        at_home = [stray.id for stray in strays if stray.id in entries and entries[stray.id].home == tier]
        self._catalog.strike(tier, at_home)
        superseded = [
            entries[stray.id]
            for stray in strays
            if stray.kind in _SEEN_FIRST and stray.id in entries and entries[stray.id].home != tier
        ]
        seen = await self._seen_at_home(superseded, tier)
        unwanted = {
            stray.id
            for stray in strays
            if stray.kind != Stray.ASIDE and (stray.id not in entries or stray.kind not in _SEEN_FIRST)
        }
        leaving = (seen.keys() | unwanted) - set(at_home)
        if leaving:
            # a note that a power cut could take back must not cost the copy it would need then
            await self._catalog.synced()
            gone = await self._copies.remove(tier, sorted(leaving))
            self._catalog.strike(tier, gone)
            if not leaving <= gone:
                self._put_off.add(tier)  # it said that it had removed them, and will be asked again
            if not self._copies.mode(tier).native:
                await self._restore(seen, tier)

    async def _restore(self, seen: Mapping[str, Record], tier: str) -> None:
        """Two tiers may lead to one server without saying so: then what was removed from the one was the record in the
        other. It is written back."""
        entries = self._catalog.find(seen)
        for home in dict.fromkeys(entry.home for entry in entries.values()):
            there = [id for id, entry in entries.items() if entry.home == home]
            left = await self._copies.read(home, there)
            lost = [seen[id] for id in there if id not in left]
            if lost:
                await self._copies.write_new(home, [draft_of(record) for record in lost])
                log.error("%s and %s seem to lead to one server; give each a store of its own", tier, home)

    async def _seen_at_home(self, entries: Sequence[Entry], tier: str) -> dict[str, Record]:
        """Those of the records that left `tier` which were read at their homes just now, and are there as they should
        be; vectors included."""
        seen: dict[str, Record] = {}
        for home in dict.fromkeys(entry.home for entry in entries):
            there = [entry for entry in entries if entry.home == home]
            try:
                found = await self._copies.read(home, [entry.id for entry in there], embeddings=True)
                # one that its home has yet to catch up with is not lost: that it has caught up wakes us
                behind = self._catalog.behind(entry.id for entry in there)
                lost = []
                for entry in there:
                    copy = found.get(entry.id)
                    if copy is not None and (entry.id in behind or digest(copy) == entry.digest):
                        seen[entry.id] = copy
                    elif entry.id not in behind:
                        lost.append(entry)
                if lost:
                    await self._bring_home(lost, tier, gone=[entry for entry in lost if entry.id not in found])
            except (TierDown, A2MError) as problem:
                log.info("%s: copies stay until %s can be read: %s", tier, home, problem)
                if self._copies.link(home).status == "up":  # else its coming back wakes us
                    self._put_off.add(tier)
        return seen

    async def _bring_home(self, lost: Sequence[Entry], tier: str, gone: Sequence[Entry]) -> None:
        """What `tier` holds of records that are not at their homes as they should be. Those that are `gone` from there
        are what it holds of them, or no more. Of others their homes have a former state, which is not shown."""
        copies = await self._copies.read(tier, [entry.id for entry in lost], embeddings=True)
        for entry in lost:
            copy = copies.get(entry.id)
            if copy is not None and self._catalog.come_home(entry.id, digest(copy), tier, copy.embedding):
                log.error("%s has lost %r; its copy in %s is its home again", entry.home, entry.id, tier)
            elif copy is None:
                self._catalog.strike(tier, [entry.id])
                if entry in gone and self._catalog.is_scanned(entry.home) and self._catalog.lose([entry]):
                    log.error("%s: a record that should live there is gone: %s", entry.home, entry.id)
            elif entry in gone and self._catalog.fall_back(entry, copy, tier):
                log.error("%s has lost %r; %s holds it as it once was, which it is now", entry.home, entry.id, tier)
            elif not self._catalog.find([entry.id]):
                self._put_off.add(tier)  # the copy is nobody's now


def _names(stray: NotedStray) -> set[Name]:
    return set(record_names(stray.id, stray.owner, stray.key))
