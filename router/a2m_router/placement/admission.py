"""Admission: adds each tier that comes up to the catalog, at the start and after each outage.

A tier goes through look, admit and welcome (recovery.py). A failed attempt is repeated until it succeeds or the tier is
down. At the start, every tier that is up is looked at before the first one is admitted, so that a rejected start has
changed no tier.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

import anyio

from a2m_router.config.settings import Settings
from a2m_router.placement.core import Core
from a2m_router.placement.guard import Spawn
from a2m_router.placement.reconciler import MAY_STILL_LAND
from a2m_router.placement.recovery import Recovery
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.answers import OfAnother, Untrusted
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.profile import CannotServe

log = logging.getLogger(__name__)

# The start waits this long for tiers. Tiers that come up later join later.
_START_SECONDS: Final = 15.0

# The start waits this long for all looks before it changes a tier. A failed look is repeated.
_LOOK_SECONDS: Final = 10.0

# Pauses after a failed attempt, and after results that cannot be trusted.
_WELCOME_SECONDS: Final = 2.0
_DISTRUST_SECONDS: Final = 60.0


class Admission:
    """Admits the tiers of one federation.

    Args:
        spawn: starts a task that outlives the call that started it.
        on_change: called when a tier has become active, or inactive for good.

    `welcomed` has an event for each tier. It is set when callers need not wait for the tier any longer: the tier is
    active, is on hold, or has an inactive reason.
    """

    def __init__(
        self, settings: Settings, core: Core, recovery: Recovery, spawn: Spawn, on_change: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._reconciler = core.reconciler
        self._recovery = recovery
        self._spawn = spawn
        self._on_change = on_change
        self._links = {tier.name: core.gateway.link(tier.name) for tier in settings.tiers}
        self._under_way: dict[str, anyio.CancelScope] = {}
        self._start_blockers: list[CannotServe] = []  # reasons to reject the start
        self._looked = {name: anyio.Event() for name in self._links}
        self._begun = anyio.Event()  # no tier is changed before this is set: the start may still be rejected
        self.welcomed = {name: anyio.Event() for name in self._links}
        self._added: set[str] = set()

    async def start(self) -> None:
        """Return when every tier has joined, is inactive, or did not come up in time.

        Raises:
            CannotServe: a tier that is up cannot be part of the federation.
        """
        with anyio.move_on_after(_START_SECONDS):
            for link in self._links.values():
                await link.wait_greeted()
        profiles = []
        problems: list[CannotServe] = []
        for tier in self._settings.tiers:
            profile = self._links[tier.name].profile
            if profile is not None:
                if not tier.mount:
                    profiles.append((tier, profile))
                try:
                    self._recovery.check(tier, profile)
                except CannotServe as problem:
                    problems.append(problem)
        _refuse(problems)
        for link in self._links.values():
            link.on_change(self._changed)
            if link.status == "up":
                self._changed(link)
        until = anyio.current_time() + _START_SECONDS
        with anyio.move_on_after(_LOOK_SECONDS):
            await self._all_up(self._looked)
        _refuse(self._start_blockers)
        # from here on, writes carry the epoch of this start; a power cut must not remove it from the catalog
        await self._catalog.synced()
        self._recovery.agree_on_metric(profiles)
        self._begun.set()
        with anyio.CancelScope(deadline=until):
            await self._all_up(self.welcomed)
        _refuse(self._start_blockers)

    async def _all_up(self, reached: Mapping[str, anyio.Event]) -> None:
        """Return when the events of all tiers that are up are set."""
        for name, link in self._links.items():
            if link.status == "up":
                await reached[name].wait()

    def _changed(self, link: Link) -> None:
        if link.status == "up":
            self._spawn(partial(self._admit, link))

    async def _admit(self, link: Link) -> None:
        """Add a tier that has come up to the catalog. Retry until it succeeds or the tier is down."""
        earlier = self._under_way.get(link.name)
        if earlier is not None:
            earlier.cancel()
        with anyio.CancelScope() as scope:
            self._under_way[link.name] = scope
            link.inactive_reason = None
            while link.status == "up":
                wait = await self._try_once(link)
                if wait is None:
                    break
                await anyio.sleep(wait)
            self._release_waiters(link)
            self._reconciler.came_up(link.name)
            self._on_change()

    async def _try_once(self, link: Link) -> float | None:
        """Try once. Return the seconds until the next attempt, or None after a success or a permanent failure."""
        tier = self._settings.tier(link.name)
        try:
            look = await self._recovery.look(tier)
            self._looked[link.name].set()
            await self._begun.wait()
            await self._recovery.admit(tier, look)
            if self._reconciler.held_for(link.name):
                link.inactive_reason = MAY_STILL_LAND
                self.welcomed[link.name].set()  # the records that the catalog has can be read meanwhile
                await anyio.sleep(self._reconciler.held_for(link.name))
                link.inactive_reason = None
                look = await self._recovery.look(tier)  # a late call may have changed the tier meanwhile
            await self._recovery.welcome(tier, look)
            link.inactive_reason = None
            self._end_recovery(link.name)
        except Untrusted as problem:
            log.error("tier=%s records not added to the catalog: %s", link.name, problem)
            link.inactive_reason = f"tiers.{problem}"
            self._release_waiters(link)  # a protocol violation rarely ends soon
            return _DISTRUST_SECONDS
        except (TierDown, A2MError, OSError) as problem:
            log.warning("tier=%s records not added to the catalog, will retry: %s", link.name, problem)
            link.inactive_reason = f"its records are not in the catalog yet: {problem}"
            return _WELCOME_SECONDS
        except CannotServe as problem:
            if isinstance(problem, OfAnother) or not self._begun.is_set():
                self._start_blockers.append(problem)
            log.error("tier=%s not admitted: %s", link.name, problem)
            link.inactive_reason = str(problem)
            if self._begun.is_set() and not tier.mount:
                self._catalog.tiers.set_scanned(link.name, False)
        except Exception as problem:
            # an unexpected error must not look like a slow tier
            log.exception("tier=%s records not added to the catalog", link.name)
            link.inactive_reason = f"{link.name}: {problem}; the log has the traceback"
        return None

    def _release_waiters(self, link: Link) -> None:
        """Release the callers that wait for the tier."""
        self._looked[link.name].set()
        self.welcomed[link.name].set()

    def _end_recovery(self, tier: str) -> None:
        """Note that the tier's records are in the catalog. After the last managed tier, the recovery ends."""
        self._added.add(tier)
        if self._added.issuperset(managed.name for managed in self._settings.managed):
            self._catalog.opening.end_recovery()


def _refuse(problems: Sequence[CannotServe]) -> None:
    """Raise CannotServe if there are problems. A problem that several tiers share is reported once."""
    tiers: dict[str, list[str]] = {}
    for problem in problems:
        if isinstance(problem, OfAnother):
            tiers.setdefault(problem.sentence, []).extend(problem.tiers)
    sentences = [str(OfAnother(sentence, *names)) for sentence, names in tiers.items()]
    sentences += [str(problem) for problem in problems if not isinstance(problem, OfAnother)]
    if sentences:
        raise CannotServe("\n".join(sentences))
