"""A simulated federation: its tiers, the router that lives at the moment, and the history of both."""

import logging
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Final

import anyio
import msgspec
import trio

from a2m_router.catalog.claims import Claims
from a2m_router.config.settings import Settings
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.profile import CannotServe
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly
from tests.support.catalogs import strays_left
from tests.support.federated import LOCAL, Clock, Foreign, Trial, assert_nothing_under_way, redone
from tests.support.histories import Unheard
from tests.verification.simulation.routers import Router, is_redoing, made_anew, restored, stumbling
from tests.verification.simulation.tiers import AFTERMATH, Tier

# the seconds within which everything must come to rest
_PATIENCE: Final = 2 * 3600.0


class World:
    """Everything but the clients.

    `history` has a line for each event so far. The router dies at the `dying`th moment from now; with `dying_at`, only
    moments of one kind count: calls of one method to tiers, or commits.
    """

    def __init__(self, settings: Settings, mix: Mapping[str, Foreign], chance: Random, clock: Clock) -> None:
        self.settings = settings
        self.chance = chance
        self.clock = clock
        self.history: list[str] = []
        self.dying: int | None = None
        self.dying_at: str | None = None
        self.ended = False
        self.deaths = 0
        self.router: Router | None = None
        self.on_power_cut: Callable[[], None] = lambda: None
        self.refusals = 0  # starts on a catalog that was too old, each followed by a rebuild
        # copies of the catalog and of the native stores' files, with the generation of the router
        self._copies: list[tuple[int, bytes]] = []
        self._older: list[tuple[int, str, bytes]] = []
        self._generation = 0
        self._putting_back: bytes | None = None
        self._setting_back: tuple[str, bytes] | None = None
        self.set_back = 0  # the number of stores whose file was put back
        self._started_at = 0.0
        self._changed = anyio.Event()
        self._stores: dict[str, Store] = {}
        self._servers: dict[str, CoreOnly] = {}
        self.tiers: dict[str, Tier] = {}
        for tier in settings.tiers:
            if tier.name in mix:
                kept: Store | CoreOnly = self._servers.setdefault(tier.name, mix[tier.name].behind(tier, None))
            else:
                kept = self._stores[tier.name] = Store(None, clock=clock, name=tier.name)
            self.tiers[tier.name] = Tier(
                tier.name,
                kept,
                Random(f"{tier.name} {chance.random()}"),
                tier.timeout,
                self.tell,
                is_remote=tier.url is not None,
            )

    def close(self) -> None:
        """Close the tiers' stores."""
        for store in self._stores.values():
            store.close()

    def tell(self, who: str, what: str) -> None:
        """Add a line to the history."""
        self.history.append(f"{_moment(trio.current_time())} {who:>10}  {what}")

    # --- routers

    async def run(self) -> None:
        """Run one router after the other, until `end`."""
        async with trio.open_nursery() as nursery:
            for tier in self.tiers.values():
                if tier.is_remote:
                    nursery.start_soon(tier.run)
            await self._routers()
            nursery.cancel_scope.cancel()

    async def _routers(self) -> None:
        image: bytes | None = None
        while not self.ended:
            self._started_at = trio.current_time()
            self._generation += 1
            self.tell("router", "starts" if image is None else "starts again")
            self.router = Router(self.settings, self.tiers, self.clock, self.chance, image, self._stir, self._point)
            put_back, self._putting_back = self._putting_back, None
            try:
                await self.router.run()
            except BaseExceptionGroup as group:
                refused = _refused(group)
                if put_back is None or refused is None:
                    raise
                self.tell("router", f"refuses to start: {refused}")
                self.refusals += 1
                image = await made_anew(self.settings, self.tiers, self.clock, self.chance, put_back)
                continue
            image = self.router.left
            if image is not None and not is_redoing(image):
                self._copies.append((self._generation, image))
            self._copy_stores()
            if self.router.dead and self.router.loses_power:
                self.on_power_cut()
            if self._setting_back is not None:
                self._set_back(*self._setting_back)
            if self._putting_back is not None:
                image = self._putting_back
            elif not self.ended:
                await anyio.sleep(self.chance.choice((0.0, 0.0, 2.0, 60.0)))

    def copy(self) -> None:
        """Copy the catalog and the stores' files, at any moment."""
        self._copy_stores()
        # only the native stores reveal the age of a copy from the middle of a router's life
        if self._stores and self.router is not None and self.router.is_ready:
            image = self.router.image()
            if not is_redoing(image):
                self._copies.append((self._generation, image))

    async def put_back(self, chance: Random) -> bool:
        """End the router in good order, put an older catalog in the place of its own, and start another router.

        The next router starts on that catalog, or on a rebuilt one. Returns False if there is no copy of an earlier
        router.
        """
        older = [copy for copy in self._copies if copy[0] < self._generation]
        if not older:
            return False
        generation, image = chance.choice(older)
        self.tell("catalog", f"IS PUT BACK as it was with router {generation}, this is router {self._generation}")
        self._putting_back = image
        await self.restart()
        await self.ready()
        return True

    async def set_back_a_store(self, chance: Random) -> str | None:
        """End the router in good order, put an older file in the place of a native store's, and start another router.

        Returns the name of the tier; None if there is no copy of an earlier router.
        """
        older = [copy for copy in self._older if copy[0] < self._generation]
        if not older:
            return None
        generation, name, image = chance.choice(older)
        self.tell(name, f"IS PUT BACK as it was with router {generation}, this is router {self._generation}")
        # records that are lost by this leave the catalog; an older file that still holds them would rightly bring them
        # back
        self._older = [copy for copy in self._older if copy[1] != name]
        self._setting_back = name, image
        self.set_back += 1
        await self.restart()
        await self.ready()
        return name

    def _copy_stores(self) -> None:
        self._older += [(self._generation, name, self.tiers[name].image()) for name in self._stores]

    def _set_back(self, name: str, image: bytes) -> None:
        self._setting_back = None
        self._stores.pop(name).close()
        with restored(image):
            store = self._stores[name] = Store(None, clock=self.clock, name=name)
        self.tiers[name].kept = store

    async def end(self) -> None:
        """End the last router in good order."""
        self.ended = True
        await (await self.ready()).stop()

    async def restart(self) -> None:
        """End the router in good order; another one starts."""
        router = await self.ready()
        self.tell("router", "stops")
        # shielded: a router that takes no calls and never ends would block all others for ever
        with anyio.CancelScope(shield=True):
            await router.stop()

    async def ready(self) -> Router:
        """Return the router, when there is one that clients can reach."""
        while self.router is None or not self.router.is_ready:
            await self._changed.wait()
        return self.router

    @property
    def trial(self) -> Trial:
        """The router that lives, as tests see it."""
        assert self.router is not None
        assert self.router.federation is not None
        return Trial(self.router.federation, None, self._stores, self._servers, self.clock)  # type: ignore[arg-type]  # `raw` is not used

    def _stir(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def _point(self, what: str) -> None:
        if self.dying is None or self.dying_at not in (None, what):
            return
        self.dying -= 1
        if self.dying <= 0:
            self.dying = None
            assert self.router is not None
            self.deaths += 1
            self.tell("router", "LOSES POWER" if self.router.loses_power else "DIES")
            self.router.die()

    # --- clients

    async def call(self, method: str, params: dict[str, Any], patience: float | None) -> bytes:
        """Return the result of a client's call. Raises A2MError for an error, Unheard if no answer came."""
        router = await self.ready()
        federation = router.federation
        assert federation is not None
        message = msgspec.json.encode({"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params})
        reply: bytes | None = None
        with anyio.CancelScope() as scope:
            router.calls[scope] = None
            try:
                with anyio.move_on_after(patience), stumbling(router):
                    reply = await federation.answer(message, LOCAL)
            finally:
                del router.calls[scope]
        if reply is None or router.dead:
            raise Unheard
        answer = msgspec.json.decode(reply, type=_Answer)
        if answer.error is not None:
            raise A2MError(answer.error.code, answer.error.message, answer.error.data)
        return bytes(answer.result)

    # --- the state of the federation

    def is_troubled(self, since: float) -> bool:
        """Return whether there has been a reason for a failure at any time since then."""
        return self._started_at + AFTERMATH >= since or any(tier.is_troubled(since) for tier in self.tiers.values())

    def is_tier_troubled(self, tier: str, since: float) -> bool:
        """Return whether a tier has had a reason not to answer at any time since then."""
        return self._started_at + AFTERMATH >= since or self.tiers[tier].is_troubled(since)

    async def rest(self) -> None:
        """End all faults; return when nothing is under way any more."""
        self.dying = None
        for tier in self.tiers.values():
            tier.calm()
        with anyio.move_on_after(_PATIENCE) as patience:
            await self.ready()
            await self._nothing_under_way()
            if self.settings.policy.background:
                await self.trial.federation.passes.idle()
                await self._nothing_under_way()
        assert not patience.cancelled_caught, f"nothing comes to rest: {self._under_way()}"
        assert_nothing_under_way(self.trial)

    async def _nothing_under_way(self) -> None:
        """Wait until nothing is under way. This wakes no task, so that the router has to finish on its own."""
        wait = 1.0
        while self._under_way():
            await trio.sleep(wait)
            wait = min(2 * wait, 30.0)

    def _under_way(self) -> str | None:
        """Return what is still under way; None if nothing is."""
        assert self.router is not None
        fed = self.trial
        federation, catalog = fed.federation, fed.federation.catalog
        for name, link in federation.links.items():
            if link.status != "up":
                return f"{name} is {link.status}: {link.reason}"
        for busy in self.tiers.values():
            if busy.is_busy:
                return f"calls at {busy.name}"
        for tier in self.settings.managed:
            if not catalog.tiers.is_scanned(tier.name):
                return f"{tier.name} is not accounted for"
        if catalog.records.reserved():
            return f"writes: {catalog.records.reserved()}"
        if redone(fed):
            return f"replacements: {redone(fed)}"
        if strays_left(catalog):
            left = [stray for tier in self.settings.managed for stray in catalog.strays.removable(tier.name, "", 10)]
            return f"{strays_left(catalog)} strays: {left}"
        if catalog.reads._reads:
            return "a read: a tier that has come up is compared with the account"
        return _held(catalog.claims) or ("calls" if self.router.calls else None)


def _refused(group: BaseExceptionGroup[BaseException]) -> CannotServe | None:
    """Return the refusal of a catalog that is too old, if the group consists of nothing else."""
    problem: BaseException = group
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1:
        problem = problem.exceptions[0]
    return problem if isinstance(problem, CannotServe) and "--rebuild" in str(problem) else None


def _held(claims: Claims) -> str | None:
    return f"claims on {sorted(claims._waiting)}" if claims._waiting else None


class _Error(msgspec.Struct):
    code: int
    message: str
    data: dict[str, Any] | None = None


class _Answer(msgspec.Struct):
    result: msgspec.Raw = msgspec.Raw(b"null")
    error: _Error | None = None


def _moment(seconds: float) -> str:
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{int(days)}d{int(hours):02}:{int(minutes):02}:{rest:06.3f}"


class Troubles(logging.Handler):
    """Collects the log's reports of the router's own faults: unexpected exceptions.

    Args:
        is_dead: returns whether the log comes from a dead router.
    """

    def __init__(self, is_dead: Callable[[], bool]) -> None:
        super().__init__(logging.ERROR)
        self._is_dead = is_dead
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and not self._is_dead():
            self.found.append(f"{record.getMessage()}: {logging.Formatter().formatException(record.exc_info)}")
