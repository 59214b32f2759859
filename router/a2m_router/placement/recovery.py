"""Recovery: adding a tier to the catalog when it comes up. Is it the same store, and does it match the catalog?

A tier takes part in writes, forgets and passes once all that it holds is in the catalog.

Rules:
- a tier is looked at before anything changes it: its link is barred until `admit`. At a start, all tiers that are up
  are looked at before the first one is admitted, so that a rejected start has changed no tier;
- each time a tier comes up, it is compared with the catalog, at a cost that does not grow with its size: the number of
  records, the newest records, and the records last written there. Records added behind the router's back are among the
  newest; removals change the number; an older copy of the file lacks the last writes. So an exchange of records is
  noticed, too. If something differs, the tier is scanned, and nothing changes it meanwhile;
- each start of the router has an epoch. The catalog notes and syncs it before a native store gets it, and before
  anything is written there; a lifted server gets it with each record. A tier with an epoch that the catalog does not
  have is newer than the catalog, of which an older copy was put back: nothing is removed there, and the start is
  rejected. A store with an earlier epoch than the catalog noted for it is itself an older copy: it is scanned.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET

from a2m_router.config.settings import Settings, Tier
from a2m_router.placement.core import Core
from a2m_router.placement.scanning import Scanner
from a2m_router.protocol.wire.method_params import Describe, Enrol
from a2m_router.protocol.wire.records import Record
from a2m_router.storage.nearest import METRICS
from a2m_router.tiers.answers import LaterWriter, OtherFederation, Written
from a2m_router.tiers.link import TAKES_NO_WRITES, TierDown
from a2m_router.tiers.mode import Modes, identity_of, mode_of
from a2m_router.tiers.profile import CannotServe, Profile, read_profile

log = logging.getLogger(__name__)

# Newest records to read from a server that does not report its number of records; after a crash, from every server.
_NEWEST: Final = 500

# Newest records to read from a server that reports it.
_WITNESSES: Final = 100

# If the newest records are mostly other federations', the next request is so many times larger, up to a limit.
_WIDER: Final = 4
_WIDEST: Final = 10_000

# Seconds until the next attempt with a store that does not keep its federation's id.
_AGAIN: Final = 1.0

# why the same server may look like another one
_HINT: Final = "; a server that says no identity is known by its name, and by the command or address that reaches it"


class Look(msgspec.Struct, frozen=True):
    """The state of a tier that has come up, before anything changes it.

    risen: the link's number of this connection.
    read_only: its server takes no writes.
    difference: how its newest records differ from the catalog, for the log; None if they do not.
    """

    risen: int
    read_only: bool
    difference: str | None


class Recovery:
    """Adds the tiers of one catalog."""

    def __init__(self, settings: Settings, core: Core, modes: Modes, scanner: Scanner) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._gateway = core.gateway
        self._reconciler = core.reconciler
        self._modes = modes
        self._scanner = scanner
        self._intake = scanner.intake
        self._new_tiers: set[str] = set()  # tiers that are new to the catalog and not welcomed yet
        for tier in settings.managed:
            self._gateway.link(tier.name).bar()

    def check(self, tier: Tier, profile: Profile) -> None:
        """Raise CannotServe unless the server behind `tier` can be part of this federation."""
        mode = mode_of(tier, profile)
        if self._modes.is_mount(tier):
            return
        known, identity = self._catalog.tiers.identity(tier.name), identity_of(tier, profile)
        if known is not None and known != identity and not self._intake.adopt:
            raise CannotServe(
                f"tiers.{tier.name}: another store is behind this tier than last time ({identity}, not {known}"
                f"{_HINT if profile.store.identity is None else ''}); bring the old one back, or start once with "
                "--adopt to take the new one as it is"
            )
        for other in self._settings.managed:
            # two servers of a kind may have the same name; only a native store has an identity
            if (
                profile.store.identity
                and other.name != tier.name
                and self._catalog.tiers.identity(other.name) == identity
            ):
                raise CannotServe(
                    f"tiers.{tier.name}: behind it is the store of tiers.{other.name}; a move between the two would "
                    "remove its records. Give each tier a store of its own"
                )
        self._check_age(tier, profile)
        if not mode.vectors:
            if self._catalog.vectors.metric() not in METRICS:
                raise _not_indexable(tier.name, self._catalog.vectors.metric(), "the federation")
            return
        width, metric = self._catalog.vectors.dimensions(), self._catalog.vectors.metric()
        # a stray's vector may have fixed the tier's width; strays will be removed, so a difference is accepted
        strays = self._catalog.strays.removable(tier.name, "", 1)
        if profile.dimensions is not None and width is not None and profile.dimensions != width and not strays:
            raise CannotServe(
                f"tiers.{tier.name}: its vectors have {profile.dimensions} dimensions, the federation's have {width}"
            )
        if width is not None and profile.metric is not None and profile.metric != metric:
            raise CannotServe(
                f"tiers.{tier.name}: its server compares vectors by {profile.metric}, the federation by {metric}"
            )

    def _check_age(self, tier: Tier, profile: Profile) -> None:
        """Raise CannotServe if a native store belongs to another federation, or is newer than the catalog."""
        if not mode_of(tier, profile).native or profile.store.epoch is UNSET:
            return
        federation, epoch = profile.store.federation, profile.store.epoch
        if not self._catalog.lineage.is_ours(federation, epoch):
            if not self._intake.adopt:
                raise OtherFederation(tier.name, federation, self._catalog.lineage.federation)
        elif not self._catalog.lineage.knows_epoch(epoch):
            raise LaterWriter(tier.name, epoch)

    def agree_on_metric(self, profiles: Sequence[tuple[Tier, Profile]]) -> None:
        """Adopt the tiers' metric as the federation's.

        Raises:
            CannotServe: the tiers' metrics differ, or the router would have to index vectors by a metric that it has
                no index for.
        """
        metrics = {profile.metric: tier.name for tier, profile in profiles if profile.metric is not None}
        if len(metrics) > 1:
            differing = ", ".join(f"{name} by {metric}" for metric, name in metrics.items())
            raise CannotServe(
                f"tiers: records move between them, but they compare vectors differently: {differing}; make a tier "
                "that is only to be read a mount (mount = true)"
            )
        for metric in metrics:
            without = [tier.name for tier, profile in profiles if profile.metric is None]
            if metric not in METRICS and without:
                raise _not_indexable(without[0], metric, metrics[metric])
            self._catalog.vectors.set_metric(metric)

    async def look(self, tier: Tier) -> Look:
        """Look at a tier that has come up, and change nothing there.

        Raises:
            CannotServe: it cannot be added to the catalog, for example because it is newer than the catalog.
            TierDown, A2MError: it does not answer.
        """
        name = tier.name
        link = self._gateway.link(name)
        profile, risen = link.profile, link.risen
        assert profile is not None
        self.check(tier, profile)
        if tier.mount:
            return Look(risen, True, None)
        read_only = not profile.is_native and await self._gateway.is_read_only(name)
        if link.risen != risen:
            raise _reconnected(name)
        mount = read_only and not self._catalog.records.count(name)
        if mount != self._modes.of(name).mount:
            self._turn(tier, profile, mount=mount)
        if mount:
            return Look(risen, True, None)
        mode = self._modes.of(name)
        # noted before anything is written to the tier in this mode
        self._catalog.vectors.set_lifting(name, lifted=not mode.native, indexed=not mode.vectors)
        return Look(risen, read_only, await self._difference(name, counts=profile.store.records is not None))

    async def admit(self, tier: Tier, look: Look) -> None:
        """Admit the tier that `look` described. It may be changed from now on, unless it has to be scanned first.

        Raises as `welcome` does.
        """
        if self._modes.is_mount(tier):
            return
        name = tier.name
        link = self._gateway.link(name)
        profile = link.profile
        if profile is None or link.risen != look.risen:
            raise _reconnected(name)
        known, identity = self._catalog.tiers.identity(name), identity_of(tier, profile)
        if known is None:
            self._new_tiers.add(name)
        self._catalog.tiers.set_identity(name, identity)
        if known not in (None, identity):
            # the records of the earlier store are not in this one, and must not count as living here
            dropped = self._catalog.drop_home(name)
            log.warning("tier=%s another store is behind it now: %d records of the old one dropped", name, dropped)
            self._intake.changed()
        if profile.dimensions is not None and self._catalog.vectors.dimensions() is None:
            self._catalog.vectors.fix_dimensions(profile.dimensions)
        await self._enrol(tier, profile)
        if look.difference is None and self._catalog.tiers.is_scanned(name):
            self._open(name, look)

    def _open(self, tier: str, look: Look) -> None:
        link = self._gateway.link(tier)
        if not look.read_only and not self._intake.only_reads:
            link.admit(look.risen)
        elif look.read_only and link.risen == look.risen:
            link.bar(TAKES_NO_WRITES)

    async def welcome(self, tier: Tier, look: Look) -> None:
        """Compare an admitted tier with the catalog, and scan it if they differ.

        Raises:
            TierDown, A2MError: it does not answer.
            CannotServe: it cannot be added to the catalog.
        """
        if self._modes.is_mount(tier):
            return
        name = tier.name
        if look.read_only:
            log.error("tier=%s its server takes no writes any more: its records can be read, but not changed", name)
        await self._count(tier, look)
        if name in self._new_tiers and (holds := self._catalog.records.count(name)):
            log.warning(
                "tier=%s its %d records were in no catalog. If there was an earlier catalog, what only that one had is "
                "lost: accesses and salience count anew, and records that were forgotten while the tier was down may "
                "be there again",
                name,
                holds,
            )
        self._new_tiers.discard(name)
        await self._scanner.adopt_quarantined(name)
        await self._scanner.gather_groups()

    async def _enrol(self, tier: Tier, profile: Profile) -> None:
        """Send a native store the federation's id and the epoch of this start, before any other change there."""
        name, federation, epoch = tier.name, profile.store.federation, profile.store.epoch
        if not mode_of(tier, profile).native or epoch is UNSET:
            return
        if federation is not None and federation != self._catalog.lineage.federation and self._intake.adopt:
            self._catalog.lineage.take_origins([] if epoch is None else [epoch], [federation])
        if self._intake.only_reads:
            return
        if (federation, epoch) != (self._catalog.lineage.federation, self._catalog.lineage.epoch):
            if self._catalog.lineage.is_set_back(name, epoch):
                log.error(
                    "tier=%s its store is older than the catalog: a copy of its file was put back, or its disk has "
                    "lost synced writes. Scanning; lost records are named, and former states are not shown. Bring the "
                    "newer file back, if there is one",
                    name,
                )
                self._catalog.lineage.note_set_back(name, epoch)
            elif federation not in (None, self._catalog.lineage.federation):
                self._catalog.tiers.set_scanned(name, False)
            # synced first: a power cut could leave a store with an epoch that the catalog does not know, or hide that
            # an older copy of the store was put back
            await self._catalog.synced()
            lineage = self._catalog.lineage
            await self._gateway.link(name).look(Enrol(federation=lineage.federation, epoch=lineage.epoch))
        now = self._gateway.link(name).profile
        if now is None or now.store.epoch != self._catalog.lineage.epoch:
            raise TierDown(name, "its store does not keep its federation's id", _AGAIN, None)
        self._catalog.lineage.note_epoch(name)

    def _turn(self, tier: Tier, profile: Profile, *, mount: bool) -> None:
        """Use a server that takes no writes as a mount, or stop using it as one.

        This holds whatever the file says, until the server takes writes. A server that holds records of ours stays a
        tier: they can be read, and a rejected write has the reason.
        """
        self._modes.decide(tier.name, mount=mount)
        self._catalog.tiers.set_scanned(tier.name, mount)
        if mount:
            log.warning(
                "tier=%s its server takes no writes: used as a mount, read-only; set mount = true for it in the file",
                tier.name,
            )
        else:
            log.warning("tier=%s its server takes writes now: no longer used as a mount", tier.name)
            self.check(tier, profile)

    async def _count(self, tier: Tier, look: Look) -> None:
        """Compare a tier with the catalog; scan it if they differ."""
        name = tier.name
        is_scanned = self._catalog.tiers.is_scanned(name)
        if is_scanned and look.difference is None and not look.read_only:
            await self._reconciler.remove_strays(name)
        if not is_scanned or not await self._agrees(name, look):
            # until the scan ends, a write could be undone by a page that was read before it; and the scan may find that
            # the tier is newer than the catalog
            self._catalog.tiers.set_scanned(name, False)
            self._gateway.link(name).bar()
            await self._scanner.scan(name)
            if self._catalog.end_scan(name).changed:
                self._intake.changed()
            self._open(name, look)
        self._catalog.opening.uncounted.discard(name)

    async def _difference(self, tier: str, *, counts: bool) -> str | None:
        """Return how the newest records of a tier differ from the catalog; None if they do not.

        Args:
            counts: whether its server reports its number of records.

        Raises:
            LaterWriter: the tier is newer than the catalog.
        """
        most = _WITNESSES if counts and self._catalog.opening.ended_well else _NEWEST
        before = self._catalog.records.count(tier)
        newest, are_all, written = await self._newest(tier, most)
        others = self._scanner.others(written)
        if others and self._intake.adopt:
            return "holds records of another federation"
        self._scanner.log_others(tier, others)
        ids = [record.id for record in newest]
        expected = self._catalog.records.count(tier)
        unknown = len(ids) - len(self._catalog.queries.accounted(tier, ids))
        if unknown:
            return f"newest records differ from the catalog: {unknown:,} of {len(ids):,} are not in it"
        if are_all:
            self._catalog.tiers.set_strange(tier, others.total())
            here = sum(entry.home == tier for entry in self._catalog.records.find(ids).values())
            # none of the pending writes may have reached the tier; and other changes may be in progress
            if here + len(self._catalog.pending.ids_in(tier)) < min(before, expected):
                return f"newest records differ from the catalog: {here:,} found, {expected:,} expected"
            return None
        if others and len(ids) < self._enough(tier, most):
            profile = self._gateway.link(tier).profile
            if profile is not None and profile.store.pages:
                return f"newest records are mostly another federation's, only {len(ids)} are this one's"
            log.warning(
                "tier=%s of its newest %d records, only %d are this federation's: records added by others cannot be "
                "detected. Give each federation its own server",
                tier,
                len(written),
                len(ids),
            )
        return None

    async def _newest(self, tier: str, most: int) -> tuple[list[Record], bool, list[Written]]:
        """Read the newest records in `tier` that are this federation's.

        Read `most`, or as many as the catalog has for the tier, as far as the server lists them among those of others.
        Return the records, whether they are all of ours, and the writers of everything listed.
        """
        count = min(most, self._gateway.recall_limit(tier, most))
        while True:
            written: list[Written] = []
            newest, are_all = await self._gateway.newest(tier, count, written)
            more = min(_WIDER * count, self._gateway.recall_limit(tier, _WIDEST), _WIDEST)
            is_short = len(written) < count  # more would be too long for one answer
            if are_all or is_short or more <= count or len(newest) >= self._enough(tier, most) or len(newest) == count:
                return newest, are_all, written
            count = more

    def _enough(self, tier: str, most: int) -> int:
        """Return how many records of ours in `tier` are enough to compare."""
        return min(most, max(1, self._catalog.records.count(tier)))

    async def _agrees(self, tier: str, look: Look) -> bool:
        """Return whether a tier seems to match the catalog: its newest records, its number, and its last writes."""
        if look.difference is not None:
            log.info("tier=%s %s: scanning", tier, look.difference)
            return False
        before = self._catalog.queries.may_hold(tier)
        raw = await self._gateway.link(tier).call("memory/describe", Describe())
        holds = read_profile(raw).store.records
        may_hold = self._catalog.queries.may_hold(tier)
        # other changes may be in progress
        may_hold = range(min(before.start, may_hold.start), max(before.stop, may_hold.stop))
        if holds is not None and holds - self._catalog.tiers.strange(tier) not in may_hold:
            log.info(
                "tier=%s holds %d records, the catalog has %d: scanning",
                tier,
                holds,
                self._catalog.records.count(tier),
            )
            return False
        latest = self._catalog.queries.latest(tier, _WITNESSES)
        lacking = await self._scanner.lacking(tier, latest)
        if lacking:
            log.info("tier=%s lacks some of the %d records last written there: scanning", tier, len(latest))
        return not lacking


def _reconnected(tier: str) -> TierDown:
    return TierDown(tier, "it was reconnected meanwhile", _AGAIN, None)


def _not_indexable(tier: str, metric: str, whose: str) -> CannotServe:
    return CannotServe(
        f"tiers.{tier}: its server has no vectors, and the router cannot index them by {metric}, the metric of "
        f"{whose}; only by {' and '.join(METRICS)}"
    )
