"""Taking a tier into the account when it comes up: who it is, what a crash left under way there, what it brings along.

Only here are records adopted: an id that the catalog does not know is never shown by a read. A tier takes part in
writes, forgets and passes once all that it holds is accounted for.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from router.a2m.messages import Describe
from router.a2m.records import Record, digest
from router.a2m.vectors import MAX_WIDTH
from router.catalog.accounts import Vectors
from router.catalog.catalog import Catalog
from router.catalog.entries import Entry, entry_of
from router.config import Settings, Tier
from router.nearest import METRICS
from router.sweeping import Sweeper
from router.tiers.copies import CannotList, Copies, Untrusted
from router.tiers.lifting import lowered
from router.tiers.manner import identity_of, manner_of
from router.tiers.mounts import Mounts
from router.tiers.profile import CannotServe, Profile, read_profile

log = logging.getLogger(__name__)

# A server that does not say how many records it holds is asked for so many of the newest.
_NEWEST: Final = 500


# why a server that is the old one may look like another
_HINT: Final = "; a server that says no identity is known by its name, and by the command or address that reaches it"


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
        mounts: Mounts,
        changed: Callable[[], None],
        *,
        adopt: bool = False,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies
        self._sweeper = sweeper
        self._mounts = mounts
        self._changed = changed
        self._adopt = adopt
        self._counted: set[str] = set()

    def check(self, tier: Tier, profile: Profile) -> None:
        """Raises CannotServe unless the server behind `tier` can be part of this federation."""
        manner = manner_of(tier, profile)
        if tier in self._mounts:
            return
        known, identity = self._catalog.identity(tier.name), identity_of(tier, profile)
        if known is not None and known != identity and not self._adopt:
            raise CannotServe(
                f"tiers.{tier.name}: another store is behind this tier than last time ({identity}, not {known}"
                f"{_HINT if profile.store.identity is None else ''}); bring the old one back, or start once with "
                "--adopt to take the new one as it is"
            )
        for other in self._settings.managed:
            # two of a kind may be called alike; only a store knows itself
            if profile.store.identity and other.name != tier.name and self._catalog.identity(other.name) == identity:
                raise CannotServe(
                    f"tiers.{tier.name}: behind it is the store of tiers.{other.name}; what moves from the one to the "
                    "other would be removed. Give each tier a store of its own"
                )
        if not manner.vectors:
            if self._catalog.metric() not in METRICS:
                raise _not_indexable(tier.name, self._catalog.metric(), "the federation")
            return
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
        """Takes the tiers' metric as the federation's. Raises CannotServe where they differ, or where a tier's vectors
        would have to be indexed here by a metric that no index is made for."""
        metrics = {profile.metric: tier.name for tier, profile in profiles if profile.metric is not None}
        if len(metrics) > 1:
            told = ", ".join(f"{name} by {metric}" for metric, name in metrics.items())
            raise CannotServe(
                f"tiers: records move between them, but they compare vectors differently: {told}; what is only to "
                "be read is a mount (mount = true)"
            )
        for metric in metrics:
            without = [tier.name for tier, profile in profiles if profile.metric is None]
            if metric not in METRICS and without:
                raise _not_indexable(without[0], metric, metrics[metric])
            self._catalog.set_metric(metric)

    async def welcome(self, tier: Tier) -> None:
        """Bring the account and `tier` together. Raises TierDown and A2MError if it does not answer that long, and
        CannotServe if it cannot be taken into the account."""
        if tier in self._mounts:
            return
        name = tier.name
        profile = self._copies.link(name).profile
        assert profile is not None
        identity = identity_of(tier, profile)
        another = self._catalog.identity(name) not in (None, identity)
        self._catalog.set_identity(name, identity)
        if another:
            # what lived in the store that was there before is not in this one, and must not look as if it were
            dropped = self._catalog.drop_home(name)
            log.warning("%s: another store is behind it now; %d records went with the old one", name, dropped)
            self._changed()
        await self._keep_manner(tier, profile)
        if await self._turns_out_read_only(tier, profile):
            return
        if profile.dimensions is not None and self._catalog.dimensions() is None:
            self._catalog.fix_dimensions(profile.dimensions)
        await self._finish_writes(name)
        if name not in self._counted or not self._catalog.is_scanned(name):
            await self._count(tier)
            self._counted.add(name)

    async def _keep_manner(self, tier: Tier, profile: Profile) -> None:
        """A tier's records stay lifted, and its vectors indexed here, as long as there are records that were written
        so: a server that promises more than it did has not been told more of them."""
        name = tier.name
        manner = manner_of(tier, profile)
        holds = self._catalog.records_in(name) > 0
        lifted = not manner.native or (holds and self._catalog.is_lifted(name))
        indexed = not manner.vectors or (holds and self._catalog.indexes_vectors(name))
        self._catalog.set_lifted(name, lifted)
        self._catalog.index_vectors(name, indexed)
        self._copies.keep(name, lifted=lifted, indexed=indexed)

    async def _turns_out_read_only(self, tier: Tier, profile: Profile) -> bool:
        """A server that takes no writes is a mount, whatever the file says. One with records of ours was not always so:
        they stay where they are, and what refuses a write says why."""
        read_only = not profile.is_native and await self._copies.is_read_only(tier.name)
        self._mounts.freeze(tier.name, read_only)
        if not read_only:
            return False
        await self._finish_writes(tier.name)
        if self._catalog.records_in(tier.name):
            log.error(
                "%s: its server takes no writes any more; its records can be read, and stay where they are", tier.name
            )
            return False
        log.warning(
            "%s: its server takes no writes, so it is only read, as a mount; say so in the file: mount = true",
            tier.name,
        )
        self._mounts.turn(tier.name)
        self._catalog.set_scanned(tier.name, True)
        return True

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
        kept = self._catalog.recover_reservations(tier, there, _vectors(found.values()))
        for id in replaced:
            self._catalog.settle_replacement(id, digests.get(id))
        if kept or replaced:
            self._changed()
        log.info("%s: %d interrupted writes looked into, %d of them had arrived", tier, len(ids) + len(replaced), kept)

    async def _count(self, tier: Tier) -> None:
        """Compare what is there with what should be; scan where they differ."""
        name = tier.name
        if self._catalog.is_scanned(name):
            await self._sweeper.sweep(name)
        agrees = await self._agrees(name)
        if not self._catalog.is_scanned(name) or not agrees:
            # until all is accounted for, nothing is written there that a page read before might bring back
            self._catalog.set_scanned(name, False)
            await self._scan(name)
            self._catalog.set_scanned(name, True)

    async def _agrees(self, tier: str) -> bool:
        """Whether a tier seems to hold what it should: by its count, or by the newest of what it tells."""
        raw = await self._copies.link(tier).call("memory/describe", Describe())
        holds = read_profile(raw).store.records
        expected = self._catalog.records_in(tier)
        if holds is None:
            count = min(_NEWEST, self._copies.recall_limit(tier, _NEWEST))
            newest, are_all = await self._copies.newest(tier, count)
            known = self._catalog.find(record.id for record in newest)
            if len(known) == len(newest) and (len(newest) == expected or not are_all):
                return True
            log.info("%s tells of others than the %d records that are accounted for: scanning", tier, expected)
            return False
        if holds != expected:
            log.info("%s holds %d records, %d are accounted for: scanning", tier, holds, expected)
        return holds == expected

    async def _scan(self, tier: str) -> None:
        adopted = seen = 0
        try:
            async for whole in self._copies.everything(tier):
                page = self._own(whole, tier)
                new, refused = self._catalog.adopt(self._entries(page, tier), _vectors(page))
                adopted += new
                if new:
                    self._changed()
                seen += len(whole)
                for entry in refused:
                    log.error("%s: %r is not adopted: its owner's key %r has another record", tier, entry.id, entry.key)
        except CannotList as problem:
            raise CannotServe(
                f"tiers.{tier}: what its server holds cannot be taken into the account: {problem}; use it empty, or as "
                "a mount (mount = true)"
            ) from None
        missing = self._catalog.records_in(tier) - seen - len(self._catalog.redo_in(tier))
        if seen or missing:
            log.info("%s: scanned %d records, adopted %d", tier, seen, adopted)
        if missing > 0:
            log.error("%s: at least %d records that should live there are gone", tier, missing)

    def _own(self, page: Sequence[Record], tier: str) -> Sequence[Record]:
        """Those of a page that may be taken in as they are. What was lifted when it was written there has an owner that
        a native tier does not tell of, and would become everybody's."""
        if not self._copies.manner(tier).native:
            return page
        own = [record for record in page if lowered(record) is record]
        if len(own) < len(page):
            log.error(
                "%s holds %d records that were written there lifted, as to a lesser server; reach it as it was reached "
                "then (by its url), and they are taken in",
                tier,
                len(page) - len(own),
            )
        return own

    def _entries(self, page: Sequence[Record], tier: str) -> list[Entry]:
        try:
            return [entry_of(record, tier) for record in page]
        except ValueError as problem:
            raise Untrusted(tier, f"holds a record that is none: {problem}") from None


def _not_indexable(tier: str, metric: str, whose: str) -> CannotServe:
    return CannotServe(
        f"tiers.{tier}: its server has no vectors, and the router cannot index them by {metric}, as {whose} compares "
        f"them; only by {' and '.join(METRICS)}"
    )


def _vectors(records: Iterable[Record]) -> Vectors:
    given = ((record.id, record.embedding) for record in records)
    return {id: vector for id, vector in given if vector is not None and 1 <= len(vector) <= MAX_WIDTH}
