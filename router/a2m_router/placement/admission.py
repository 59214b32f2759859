"""Admission: takes each tier that comes up into the account, at the start and whenever it is back.

A tier is looked at, admitted and welcomed (recovery.py), again until that works or the tier is down. At the start every
tier that is up is looked at before one is admitted: a start that is refused has changed none of them.
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

# How long the start waits for tiers; those that are not up by then join later.
_START_SECONDS: Final = 15.0

# How long of that it waits until all were looked at, before it changes any; a look that fails is tried again.
_LOOK_SECONDS: Final = 10.0

# How long a failed welcome waits, and a tier whose answers cannot be trusted.
_WELCOME_SECONDS: Final = 2.0
_DISTRUST_SECONDS: Final = 60.0


class Admission:
    """Admits the tiers of one federation.

    Args:
        spawn: starts a task that outlives the call it began in.
        on_change: called when a tier that came up takes part, or turned out not to.

    `welcomed` is set, by a tier's name, when nobody has to wait for the tier any more: it takes part, is held, or its
    obstacle says why it does not.
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
        self._refusing: list[CannotServe] = []  # what tiers turned out to be that refuses the start
        self._looked = {name: anyio.Event() for name in self._links}
        self._begun = anyio.Event()  # no tier is changed before: the start may be refused
        self.welcomed = {name: anyio.Event() for name in self._links}
        self._taken_in: set[str] = set()

    async def start(self) -> None:
        """Return when every tier has joined, or has shown that it does not come up by itself.

        Raises CannotServe when a tier that is up cannot be part of the federation.
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
        _refuse(self._refusing)
        # what is written from here on bears the epoch of this start, which a power cut must not take from the catalog
        await self._catalog.synced()
        self._recovery.agree_on_metric(profiles)
        self._begun.set()
        with anyio.CancelScope(deadline=until):
            await self._all_up(self.welcomed)
        _refuse(self._refusing)

    async def _all_up(self, reached: Mapping[str, anyio.Event]) -> None:
        """Return when all tiers that are up have reached this."""
        for name, link in self._links.items():
            if link.status == "up":
                await reached[name].wait()

    def _changed(self, link: Link) -> None:
        if link.status == "up":
            self._spawn(partial(self._admit, link))

    async def _admit(self, link: Link) -> None:
        """Bring the account and a tier that has come up together; again until it works or the tier is down."""
        earlier = self._under_way.get(link.name)
        if earlier is not None:
            earlier.cancel()
        with anyio.CancelScope() as scope:
            self._under_way[link.name] = scope
            link.inactive_reason = None
            while link.status == "up":
                wait = await self._trial(link)
                if wait is None:
                    break
                await anyio.sleep(wait)
            self._let_on(link)
            self._reconciler.came_up(link.name)
            self._on_change()

    async def _trial(self, link: Link) -> float | None:
        """Try once. Returns after how many seconds to try again; None where that would be in vain, or it has worked."""
        tier = self._settings.tier(link.name)
        try:
            look = await self._recovery.look(tier)
            self._looked[link.name].set()
            await self._begun.wait()
            await self._recovery.admit(tier, look)
            if self._reconciler.held_for(link.name):
                link.inactive_reason = MAY_STILL_LAND
                self.welcomed[link.name].set()  # what it is known to hold can be read meanwhile
                await anyio.sleep(self._reconciler.held_for(link.name))
                link.inactive_reason = None
                look = await self._recovery.look(tier)  # at what has landed, too
            await self._recovery.welcome(tier, look)
            link.inactive_reason = None
            self._end_recovery(link.name)
        except Untrusted as problem:
            log.error("%s: not taken into the account: %s", link.name, problem)
            link.inactive_reason = f"tiers.{problem}"
            self._let_on(link)  # nobody waits for a server to become what it says it is
            return _DISTRUST_SECONDS
        except (TierDown, A2MError, OSError) as problem:
            log.warning("%s: not taken into the account yet: %s", link.name, problem)
            link.inactive_reason = f"not taken into the account yet: {problem}"
            return _WELCOME_SECONDS
        except CannotServe as problem:
            if isinstance(problem, OfAnother) or not self._begun.is_set():
                self._refusing.append(problem)
            log.error("%s", problem)
            link.inactive_reason = str(problem)
            if self._begun.is_set() and not tier.mount:
                self._catalog.tiers.set_scanned(link.name, False)
        except Exception as problem:
            # what no one has thought of must not look as if the tier were just slow
            log.exception("%s: could not be taken into the account", link.name)
            link.inactive_reason = f"{link.name}: {problem}; the log has the whole story"
        return None

    def _let_on(self, link: Link) -> None:
        """Nobody has to wait for the tier any more."""
        self._looked[link.name].set()
        self.welcomed[link.name].set()

    def _end_recovery(self, tier: str) -> None:
        """The tier was taken into the account."""
        self._taken_in.add(tier)
        if self._taken_in.issuperset(managed.name for managed in self._settings.managed):
            self._catalog.opening.end_recovery()


def _refuse(problems: Sequence[CannotServe]) -> None:
    """Raises CannotServe for the problems, if there are any: of several tiers that have the same, one."""
    tiers: dict[str, list[str]] = {}
    for problem in problems:
        if isinstance(problem, OfAnother):
            tiers.setdefault(problem.sentence, []).extend(problem.tiers)
    told = [str(OfAnother(sentence, *there)) for sentence, there in tiers.items()]
    told += [str(problem) for problem in problems if not isinstance(problem, OfAnother)]
    if told:
        raise CannotServe("\n".join(told))
