"""Taking a tier into the account when it comes up: who it is, and whether it holds what the account says.

A tier takes part in writes, forgets and passes once all that it holds is accounted for.

Rules:
- a tier is looked at before anything is changed there, by whomever: until `admit` its link is barred. Of several that a
  start finds up, all are looked at before one is admitted, so that a start that is refused has changed none;
- what a tier holds is compared with the account each time it comes up, at a cost that does not grow with it: how many
  records, which are its newest, and whether it holds what was last written there. Whoever adds records behind the
  router's back adds new ones, whoever only removes them changes the count, and a file that was set back lacks what came
  last; so an exchange is noticed, too. Only where they differ is all of it read, and nothing changed there meanwhile;
- each start has an epoch, which the catalog notes, synced, before a native store is told of it, and before anything is
  written there; what a lesser server is told carries it. Whoever holds one that the catalog does not know is later than
  the catalog, of which a copy was put back: nothing is removed there, and the start is refused. A store that holds an
  earlier one than was noted of it was put back itself: it is read through.
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

# A server that does not say how many records it holds is asked for so many of the newest; after a crash, each is.
_NEWEST: Final = 500

# One that does is asked for so many, to see that they are those that are accounted for.
_WITNESSES: Final = 100


# Where the newest of what a server tells are other federations', it is asked for so many times more, up to so many.
_WIDER: Final = 4
_WIDEST: Final = 10_000

# How long a store that does not keep what it is told is left alone, seconds.
_AGAIN: Final = 1.0

# why a server that is the old one may look like another
_HINT: Final = "; a server that says no identity is known by its name, and by the command or address that reaches it"


class Look(msgspec.Struct, frozen=True):
    """What was seen of a tier that has come up, before anything is changed there.

    risen: by its link's count, when that was.
    read_only: its server takes no writes.
    difference: in what its newest records differ from the account, for the log; None where they do not.
    """

    risen: int
    read_only: bool
    difference: str | None


class Recovery:
    """Takes tiers into the account of one catalog."""

    def __init__(self, settings: Settings, core: Core, modes: Modes, scanner: Scanner) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._gateway = core.gateway
        self._reconciler = core.reconciler
        self._modes = modes
        self._scanner = scanner
        self._intake = scanner.intake
        self._unheard_of: set[str] = set()  # tiers that were in no account before, and are not in this one yet
        for tier in settings.managed:
            self._gateway.link(tier.name).bar()

    def check(self, tier: Tier, profile: Profile) -> None:
        """Raises CannotServe unless the server behind `tier` can be part of this federation."""
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
            # two of a kind may be called alike; only a store knows itself
            if (
                profile.store.identity
                and other.name != tier.name
                and self._catalog.tiers.identity(other.name) == identity
            ):
                raise CannotServe(
                    f"tiers.{tier.name}: behind it is the store of tiers.{other.name}; what moves from the one to the "
                    "other would be removed. Give each tier a store of its own"
                )
        self._check_age(tier, profile)
        if not mode.vectors:
            if self._catalog.vectors.metric() not in METRICS:
                raise _not_indexable(tier.name, self._catalog.vectors.metric(), "the federation")
            return
        width, metric = self._catalog.vectors.dimensions(), self._catalog.vectors.metric()
        strays = self._catalog.strays.removable(
            tier.name, "", 1
        )  # a vector among them may have fixed its width; they go
        if profile.dimensions is not None and width is not None and profile.dimensions != width and not strays:
            raise CannotServe(
                f"tiers.{tier.name}: its vectors have {profile.dimensions} dimensions, the federation's have {width}"
            )
        if width is not None and profile.metric is not None and profile.metric != metric:
            raise CannotServe(
                f"tiers.{tier.name}: its server compares vectors by {profile.metric}, the federation does by {metric}"
            )

    def _check_age(self, tier: Tier, profile: Profile) -> None:
        """Raises CannotServe for a native store of another federation, and for one that is later than the catalog."""
        if not mode_of(tier, profile).native or profile.store.epoch is UNSET:
            return
        federation, epoch = profile.store.federation, profile.store.epoch
        if not self._catalog.lineage.is_ours(federation, epoch):
            if not self._intake.adopt:
                raise OtherFederation(tier.name, federation, self._catalog.lineage.federation)
        elif not self._catalog.lineage.knows_epoch(epoch):
            raise LaterWriter(tier.name, epoch)

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
            self._catalog.vectors.set_metric(metric)

    async def look(self, tier: Tier) -> Look:
        """Look at what has come up behind `tier`, and change nothing there. Raises CannotServe if it cannot be taken
        into the account, as what is later than the catalog; TierDown and A2MError if it does not answer."""
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
        # before anything is written there so
        self._catalog.vectors.set_lifting(name, lifted=not mode.native, indexed=not mode.vectors)
        return Look(risen, read_only, await self._difference(name, counts=profile.store.records is not None))

    async def admit(self, tier: Tier, look: Look) -> None:
        """Take what is behind `tier` for what it was seen to be. From now on it may be changed, unless it has to be
        read through first. Raises as `welcome` does."""
        if self._modes.is_mount(tier):
            return
        name = tier.name
        link = self._gateway.link(name)
        profile = link.profile
        if profile is None or link.risen != look.risen:
            raise _reconnected(name)
        known, identity = self._catalog.tiers.identity(name), identity_of(tier, profile)
        if known is None:
            self._unheard_of.add(name)
        self._catalog.tiers.set_identity(name, identity)
        if known not in (None, identity):
            # what lived in the store that was there before is not in this one, and must not look as if it were
            dropped = self._catalog.drop_home(name)
            log.warning("%s: another store is behind it now; %d records went with the old one", name, dropped)
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
        """Bring the account and `tier` together, which was admitted. Raises TierDown and A2MError if it does not answer
        that long, and CannotServe if it cannot be taken into the account."""
        if self._modes.is_mount(tier):
            return
        name = tier.name
        if look.read_only:
            log.error("%s: its server takes no writes any more; its records can be read, and stay where they are", name)
        await self._count(tier, look)
        if name in self._unheard_of and (holds := self._catalog.records.count(name)):
            log.warning(
                "%s: its %d records were in no account. If there was a catalog before this one, what it alone knew is "
                "lost with it: accesses and salience count anew, and what was forgotten while its tier was down may be "
                "there again",
                name,
                holds,
            )
        self._unheard_of.discard(name)
        await self._scanner.take_in_what_was_set_aside(name)
        await self._scanner.gather_groups()

    async def _enrol(self, tier: Tier, profile: Profile) -> None:
        """Tell a native store whose it is, and of this start. Nothing is written to it before that, or removed."""
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
                    "%s: its store is older than the catalog: a copy of its file was put back, or its disk has lost "
                    "what it had confirmed. It is read through; what is gone is named, and what it holds as it once "
                    "was is not shown. Bring the newer file back, if there is one",
                    name,
                )
                self._catalog.lineage.note_set_back(name, epoch)
            elif federation not in (None, self._catalog.lineage.federation):
                self._catalog.tiers.set_scanned(name, False)
            # first of all: else a power cut leaves a store that bears an epoch nobody knows, or one that was older,
            # and does not show it any more
            await self._catalog.synced()
            lineage = self._catalog.lineage
            await self._gateway.link(name).look(Enrol(federation=lineage.federation, epoch=lineage.epoch))
        now = self._gateway.link(name).profile
        if now is None or now.store.epoch != self._catalog.lineage.epoch:
            raise TierDown(name, "its store does not keep whose it is", _AGAIN, None)
        self._catalog.lineage.note_epoch(name)

    def _turn(self, tier: Tier, profile: Profile, *, mount: bool) -> None:
        """A server that takes no writes is a mount, whatever the file says, until it takes some. One with records of
        ours was not always so, and stays a tier: they can be read, and what refuses a write says why."""
        self._modes.decide(tier.name, mount=mount)
        self._catalog.tiers.set_scanned(tier.name, mount)
        if mount:
            log.warning(
                "%s: its server takes no writes, so it is only read, as a mount; say so in the file: mount = true",
                tier.name,
            )
        else:
            log.warning("%s: its server takes writes now; it is a mount no more", tier.name)
            self.check(tier, profile)

    async def _count(self, tier: Tier, look: Look) -> None:
        """Compare what is there with what should be; scan where they differ."""
        name = tier.name
        is_scanned = self._catalog.tiers.is_scanned(name)
        if is_scanned and look.difference is None and not look.read_only:
            await self._reconciler.remove_strays(name)
        if not is_scanned or not await self._agrees(name, look):
            # until all is accounted for, nothing is written there that a page read before might bring back; and what
            # the scan meets may be later than the catalog
            self._catalog.tiers.set_scanned(name, False)
            self._gateway.link(name).bar()
            await self._scanner.scan(name)
            if self._catalog.end_scan(name).changed:
                self._intake.changed()
            self._open(name, look)
        self._catalog.opening.uncounted.discard(name)

    async def _difference(self, tier: str, *, counts: bool) -> str | None:
        """In what the newest records that a tier tells of differ from the account. Raises LaterWriter.

        Args:
            counts: its server says how many it holds.
        """
        most = _WITNESSES if counts and self._catalog.opening.ended_well else _NEWEST
        before = self._catalog.records.count(tier)
        newest, are_all, written = await self._newest(tier, most)
        others = self._scanner.others(written)
        if others and self._intake.adopt:
            return "holds records of another federation"
        self._scanner.say_whose(tier, others)
        ids = [record.id for record in newest]
        expected = self._catalog.records.count(tier)
        told = f"tells of others than the {expected} records that are accounted for"
        if len(self._catalog.queries.accounted(tier, ids)) < len(ids):
            return told
        if are_all:
            self._catalog.tiers.set_strange(tier, others.total())
            here = sum(entry.home == tier for entry in self._catalog.records.find(ids).values())
            # it may have caught up with none of what was replaced; and others may be at work meanwhile
            return told if here + len(self._catalog.pending.ids_in(tier)) < min(before, expected) else None
        if others and len(ids) < self._enough(tier, most):
            profile = self._gateway.link(tier).profile
            if profile is not None and profile.store.pages:
                return f"holds so many newer records of another federation that {len(ids)} of ours are seen"
            log.warning(
                "%s: among its newest %d records are %d of this federation; whether more came there that is not in the "
                "account cannot be seen. Give each federation a server of its own",
                tier,
                len(written),
                len(ids),
            )
        return None

    async def _newest(self, tier: str, most: int) -> tuple[list[Record], bool, list[Written]]:
        """The newest records in `tier` that are ours, `most` of them, or as many as are accounted for, as far as its
        server tells of so many with those of others between them; whether they are all that are ours; and who has
        written what it told."""
        count = min(most, self._gateway.recall_limit(tier, most))
        while True:
            written: list[Written] = []
            newest, are_all = await self._gateway.newest(tier, count, written)
            more = min(_WIDER * count, self._gateway.recall_limit(tier, _WIDEST), _WIDEST)
            is_short = len(written) < count  # so many are too long for an answer
            if are_all or is_short or more <= count or len(newest) >= self._enough(tier, most) or len(newest) == count:
                return newest, are_all, written
            count = more

    def _enough(self, tier: str, most: int) -> int:
        """Of how many records of ours in `tier` it is seen what they are."""
        return min(most, max(1, self._catalog.records.count(tier)))

    async def _agrees(self, tier: str, look: Look) -> bool:
        """Whether a tier seems to hold what it should, by the newest of what it tells, by its count, and by what was
        last written there."""
        if look.difference is not None:
            log.info("%s %s: scanning", tier, look.difference)
            return False
        before = self._catalog.queries.may_hold(tier)
        raw = await self._gateway.link(tier).call("memory/describe", Describe())
        holds = read_profile(raw).store.records
        may_hold = self._catalog.queries.may_hold(tier)
        # others may be at work meanwhile
        may_hold = range(min(before.start, may_hold.start), max(before.stop, may_hold.stop))
        if holds is not None and holds - self._catalog.tiers.strange(tier) not in may_hold:
            log.info(
                "%s holds %d records, %d are accounted for: scanning", tier, holds, self._catalog.records.count(tier)
            )
            return False
        latest = self._catalog.queries.latest(tier, _WITNESSES)
        lacking = await self._scanner.lacking(tier, latest)
        if lacking:
            log.info("%s lacks some of the %d records that were last written there: scanning", tier, len(latest))
        return not lacking


def _reconnected(tier: str) -> TierDown:
    return TierDown(tier, "it has been connected anew meanwhile", _AGAIN, None)


def _not_indexable(tier: str, metric: str, whose: str) -> CannotServe:
    return CannotServe(
        f"tiers.{tier}: its server has no vectors, and the router cannot index them by {metric}, as {whose} compares "
        f"them; only by {' and '.join(METRICS)}"
    )
