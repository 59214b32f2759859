"""Taking a tier into the account when it comes up: who it is, what a crash left under way there, what it brings along.

Only here are records adopted: an id that the catalog does not know is never shown by a read. A tier takes part in
writes, forgets and passes once all that it holds is accounted for.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from router.a2m.messages import Describe, Timeline
from router.a2m.records import Record, digest
from router.catalog.catalog import Catalog
from router.catalog.entries import Entry, entry_of
from router.config import Settings, Tier
from router.sweeping import Sweeper
from router.tiers.copies import Copies
from router.tiers.link import TierDown
from router.tiers.profile import CannotServe, Profile, read_profile

log = logging.getLogger(__name__)

# Until lesser tiers are lifted, a tier has to declare all of this.
_NEEDED: Final = ("core", "scopes", "sessions", "keys", "embeddings", "external")
_KEPT: Final = frozenset({"created_at", "revision"})


class Recovery:
    """Takes tiers into the account of one catalog.

    Args:
        changed: called when records came into the account, or went, that no event tells of.
        adopt: another server behind a tier than last time is taken as it is.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        copies: Copies,
        sweeper: Sweeper,
        changed: Callable[[], None],
        *,
        adopt: bool = False,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies
        self._sweeper = sweeper
        self._changed = changed
        self._adopt = adopt
        self._counted: set[str] = set()

    def check(self, tier: Tier, profile: Profile) -> None:
        """Raises CannotServe unless the server behind `tier` can be part of this federation."""
        lacking = [name for name in _NEEDED if name not in profile.capabilities]
        store = profile.store
        if lacking or store.identity is None or not _KEPT.issubset(store.keeps) or not store.pages:
            what = ", ".join(lacking) or "keeping created_at and revision, and paging its timeline"
            raise CannotServe(
                f"tiers.{tier.name}: the server {profile.name!r} lacks what a tier needs so far: {what}; use a2m-store"
            )
        known = self._catalog.identity(tier.name)
        if known is not None and known != store.identity and not self._adopt:
            raise CannotServe(
                f"tiers.{tier.name}: another store is behind this tier than last time ({store.identity}, not {known}); "
                "bring the old one back, or start once with --adopt to take the new one as it is"
            )
        width, metric = self._catalog.dimensions(), self._catalog.metric()
        strays = self._catalog.strays(tier.name, "", 1)  # a vector among them may have fixed its width; they go
        if profile.dimensions is not None and width is not None and profile.dimensions != width and not strays:
            raise CannotServe(
                f"tiers.{tier.name}: its vectors have {profile.dimensions} dimensions, the federation's have {width}"
            )
        if width is not None and profile.metric is not None and profile.metric != metric:
            raise CannotServe(
                f"tiers.{tier.name}: its server compares vectors by {profile.metric}, the federation does by {metric}"
            )

    def agree_on_metric(self, profiles: Sequence[tuple[Tier, Profile]]) -> None:
        """Takes the tiers' metric as the federation's. Raises CannotServe where they differ."""
        metrics = {profile.metric: tier.name for tier, profile in profiles if profile.metric is not None}
        if len(metrics) > 1:
            told = ", ".join(f"{name} by {metric}" for metric, name in metrics.items())
            raise CannotServe(f"tiers: records move between them, but they compare vectors differently: {told}")
        for metric in metrics:
            self._catalog.set_metric(metric)

    async def welcome(self, tier: str) -> None:
        """Bring the account and `tier` together. Raises TierDown and A2MError if it does not answer that long."""
        profile = self._copies.link(tier).profile
        assert profile is not None
        assert profile.store.identity is not None, "checked before"
        another = self._catalog.identity(tier) not in (None, profile.store.identity)
        self._catalog.set_identity(tier, profile.store.identity)
        if another:
            # what lived in the store that was there before is not in this one, and must not look as if it were
            dropped = self._catalog.drop_home(tier)
            log.warning("%s: another store is behind it now; %d records went with the old one", tier, dropped)
            self._changed()
        if profile.dimensions is not None and self._catalog.dimensions() is None:
            self._catalog.fix_dimensions(profile.dimensions)
        await self._finish_writes(tier)
        if tier not in self._counted:
            await self._count(tier)
            self._counted.add(tier)

    async def _finish_writes(self, tier: str) -> None:
        reserved, replacing = self._catalog.unfinished(tier)
        # of what this router has under way itself, somebody holds a claim and will settle it
        ids = [entry.id for entry in reserved if self._catalog.is_left_over(entry.id)]
        replaced = [id for id in replacing if self._catalog.is_left_over(id)]
        if not ids and not replaced:
            return
        found = await self._copies.read(tier, [*ids, *replaced], embeddings=True)
        digests = {id: digest(record) for id, record in found.items()}
        there = {entry.id: digests.get(entry.id) == entry.digest for entry in reserved if entry.id in set(ids)}
        kept = self._catalog.recover_reservations(tier, there)
        for id in replaced:
            self._catalog.settle_replacement(id, digests.get(id))
        if kept or replaced:
            self._changed()
        log.info("%s: %d interrupted writes looked into, %d of them had arrived", tier, len(ids) + len(replaced), kept)

    async def _count(self, tier: str) -> None:
        """Compare how many records there are with how many there should be; scan where they differ."""
        if self._catalog.is_scanned(tier):
            await self._sweeper.sweep(tier)
        raw = await self._copies.link(tier).call("memory/describe", Describe())
        store = read_profile(raw).store
        expected = self._catalog.records_in(tier)
        if not self._catalog.is_scanned(tier) or store.records != expected:
            # until all is accounted for, nothing is written there that a page read before might bring back
            self._catalog.set_scanned(tier, False)
            if store.records or expected:
                log.info("%s holds %d records, %d are accounted for: scanning", tier, store.records, expected)
                await self._scan(tier)
            self._catalog.set_scanned(tier, True)

    async def _scan(self, tier: str) -> None:
        adopted = seen = 0
        async for page in self._copies.pages(tier, Timeline(embeddings=True)):
            new, refused = self._catalog.adopt(self._entries(page, tier))
            adopted += new
            if new:
                self._changed()
            seen += len(page)
            for entry in refused:
                log.error("%s: %r is not adopted: its owner's key %r has another record", tier, entry.id, entry.key)
        missing = self._catalog.records_in(tier) - seen
        log.info("%s: scanned %d records, adopted %d", tier, seen, adopted)
        if missing > 0:
            log.error("%s: at least %d records that should live there are gone", tier, missing)

    def _entries(self, page: Sequence[Record], tier: str) -> list[Entry]:
        try:
            return [entry_of(record, tier) for record in page]
        except ValueError as problem:
            raise TierDown(tier, f"holds a record that is none: {problem}", 60.0, None) from None
