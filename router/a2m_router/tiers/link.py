"""The router's connection to one tier: supervision, deadlines, and the gate before changes.

- A link is `starting` until the first greeting has succeeded or failed, then `up` or `down`. While it is down, calls
  fail at once. The link then sends only greetings, one at a time and ever more rarely, until one brings the tier up.
- It goes down when its connection ends, and when its breaker opens; see Breaker. A late answer is not a failure if the
  tier has answered another call meanwhile, or if the call had less time than the tier's own deadline: the tier is slow,
  not dead.
- A server may stand before a service, as a2m-rag does. If the service does not answer its server, the tier counts as
  silent, however quickly the server reports that. Greetings then check for the service: their results describe it.
- Each time the tier has come up, calls that may change it are rejected until a caller has compared what it holds with
  the catalog and admits it (see `bar`). Every call passes this gate.
- Clients' requests wait for a place at the tier; see Places.
"""

import logging
import math
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager, suppress
from typing import Any, Final, Literal

import anyio
import anyio.abc
import msgspec

from a2m_router.process.budget import budget, left
from a2m_router.process.timing import doubling, first_of
from a2m_router.protocol.client import client
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import ConnectionLost, Peer, Settled, TooLate, Unanswered
from a2m_router.protocol.client.http_client import HttpFailure
from a2m_router.protocol.wire.capabilities import PROTOCOL
from a2m_router.protocol.wire.errors import DISK_FULL, OVERLOADED, STOPPING, A2MError, Code, no_room, unanswered_in
from a2m_router.tiers.backoff import FIRST, Backoff
from a2m_router.tiers.breaker import Breaker
from a2m_router.tiers.places import NoPlace, Places
from a2m_router.tiers.profile import BadProfile, Profile, read_profile

MOST_CALLS: Final = 256

_HOW_IS_IT: Final = {"protocol": PROTOCOL}

# seconds: a server that has just started may have to load an index, and a slow one answers late
_GREETING: Final = 30.0
# of the tier's own deadline; silence for a shorter time proves nothing about the tier
_FAIR: Final = 0.9
# seconds between the probes that resolve a call; the first comes soon, because most servers are only late
_PROBE_FIRST: Final = 0.1
_PROBE_LONGEST: Final = 5.0

# A look costs a mounted service a search, and every client begins with one: a result is used for so many seconds.
_LOOKED_LATELY: Final = 10.0

# An almost full disk accepts small writes and rejects large ones. It has room again when it has rejected nothing for so
# many seconds.
_QUIET: Final = 60.0

_READS: Final = frozenset(
    {"memory/describe", "memory/recall", "memory/timeline", "memory/fetch", "memory/session/list"}
)
# methods that are sent while changes are held back or barred; every other method may change a tier
_PASSES: Final = frozenset({*_READS, "store/backup"})

# the inactive reason of a tier that is up but not admitted yet
UNACCOUNTED: Final = "what it holds is still being taken into the account"

# the inactive reason of a managed tier whose server is read-only
TAKES_NO_WRITES: Final = "its server takes no writes"

log = logging.getLogger("a2m_router.tiers")


class TierDown(Exception):
    """A tier did not answer: it is down, its deadline has passed, or its connection was lost meanwhile.

    Args:
        retry_after: seconds to wait before a retry.
        settled: is set when the call can no longer land; None if the call was never sent. A set one does not show
            whether the call has landed.
    """

    def __init__(self, tier: str, reason: str, retry_after: float, settled: Settled | None) -> None:
        super().__init__(f"{tier}: {reason}")
        self.tier = tier
        self.reason = reason
        self.retry_after = retry_after
        self.settled = settled


class AnswerTooLong(TierDown):
    """The tier's answer was longer than a message may be; a request for less may succeed."""


class Overloaded(TierDown):
    """The call was not sent, because too many calls are under way at the tier; the tier is healthy."""

    def __init__(self, tier: str) -> None:
        super().__init__(tier, OVERLOADED, FIRST, None)


class Refused(A2MError):
    """The tier answered a call with an error; code and message are the tier's."""


class LinkStatus(msgspec.Struct, frozen=True):
    """A link as `memory/describe` and `--check` show it.

    `server` is the name of the tier's server, once known. `reason` is why the tier is down, or up but inactive.
    """

    status: Literal["starting", "up", "down"]
    reason: str | None
    server: str | None
    transport: str


class _Call(msgspec.Struct, frozen=True):
    """A call, and its properties.

    params: as in `Link.call`.
    on_unsettled: as in `Link.call`.
    is_fair: it had the tier's own deadline, less the wait for a place.
    is_change: it may change what the tier holds.
    """

    method: str
    params: Any
    on_unsettled: Callable[[Settled], None] = lambda settled: None
    is_fair: bool = False
    is_change: bool = False


class Link:
    """The connection to one tier.

    Args:
        name: the tier's name.
        connect: opens a connection. May raise CannotStart or OSError.
        timeout: seconds for a call that has no timeout of its own.
        transport: how the tier is reached, for display.
        most_calls: the most client calls under way at once; fewer if the tier is too slow for them.
        random: uniform in [0, 1), for the jitter.

    `profile` is the tier's last description of itself; `reason` is why the tier is down; `risen` is how often it has
    come up; `barred` is why calls that may change the tier are rejected, None if they are not. `inactive_reason` is why
    a tier that is up is inactive.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[], AbstractAsyncContextManager[Peer]],
        *,
        timeout: float,
        transport: str = "local",
        most_calls: int = MOST_CALLS,
        random: Callable[[], float] = random.random,
    ) -> None:
        self.name = name
        self.profile: Profile | None = None
        self.status: Literal["starting", "up", "down"] = "starting"
        self.reason: str | None = None
        self.inactive_reason: str | None = None
        self.risen = 0
        self._is_guarded = False  # whether each coming up bars it again
        self.barred: str | None = None
        self._connect = connect
        self._timeout = timeout
        self._transport = transport
        self._backoff = Backoff(random)
        self._retry_at = 0.0
        self._peer: Peer | None = None  # exactly while the link is up
        self._breaker = Breaker()
        # the method last rejected for a full disk, and when; None once such a call has succeeded _QUIET seconds later
        self._full: tuple[str, float] | None = None
        self._places = Places(name, most_calls, self._spawn)
        self._tasks: anyio.abc.TaskGroup | None = None  # while `run` runs
        self._looking: anyio.Event | None = None  # while a look is under way; set at its end
        self._looked_at = -math.inf
        self._ending = False
        self._underway: set[anyio.CancelScope] = set()  # of calls at the tier
        self._held: anyio.Event | None = None  # while changes are held back; set at the end
        self._probing = anyio.Lock()
        self._changed = anyio.Event()
        self._callbacks: list[Callable[[Link], None]] = []

    def __repr__(self) -> str:
        return f"<Link {self.name}: {self.status}{f', {self.reason}' if self.reason else ''}>"

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None = None,
        on_unsettled: Callable[[Settled], None] | None = None,
        is_harmless: bool = False,
    ) -> msgspec.Raw:
        """Call the tier, and return its result. If a read loses its connection, it is retried once if time is left.

        Args:
            params: the parameters, or a function that prepares them. Each attempt calls the function in the step that
                sends the call, so that the parameters suit that attempt's connection. An exception of it ends the call.
            timeout: seconds; the tier's own by default, and never more than the request has left.
            on_unsettled: called before the call ends without an answer in any way, also by cancellation, if it is still
                in doubt. Its argument is set when the call is resolved.
            is_harmless: this call changes nothing, although its method may: send it to a barred tier, too.

        Raises:
            Refused: the tier answered with an error.
            Overloaded: too many calls are under way.
            TierDown: the tier did not answer, for any other reason.
        """
        allowed = min(self._timeout if timeout is None else timeout, left())
        self._peer_for(allowed)
        deadline = anyio.current_time() + allowed
        try:
            async with self._places.place(deadline) as given_up:

                def unsettled(settled: Settled) -> None:
                    given_up.append(settled)
                    if on_unsettled is not None:
                        on_unsettled(settled)

                is_change = not is_harmless and method not in _PASSES
                is_fair = allowed >= _FAIR * self._timeout
                result = await self._tried(_Call(method, params, unsettled, is_fair, is_change), deadline)
        except NoPlace:
            raise Overloaded(self.name) from None
        except A2MError as answered:
            if no_room(answered) == DISK_FULL:
                if self._full is None:
                    log.warning("tier=%s disk full: %s", self.name, answered)
                self._full = method, anyio.current_time()
            raise Refused(answered.code, answered.message, answered.data) from None
        if self._full is not None and method == self._full[0] and anyio.current_time() >= self._full[1] + _QUIET:
            self._full = None
            log.info("tier=%s disk has room again", self.name)
        return result

    async def _tried(self, call: _Call, deadline: float) -> msgspec.Raw:
        """Attempt a call; retry a read once if its connection is lost and the tier is back in time."""
        try:
            return await self._attempt(call, deadline - anyio.current_time())
        except TierDown as down:
            lost = isinstance(down.__cause__, ConnectionLost) and not isinstance(down.__cause__, HttpFailure)
            if call.method not in _READS or not lost:
                raise
            with anyio.move_on_after(deadline - anyio.current_time()):
                await self.wait_up()
            remaining = deadline - anyio.current_time()
            if remaining <= 0:
                raise
        return await self._attempt(msgspec.structs.replace(call, is_fair=False), remaining)

    def _peer_for(self, seconds: float) -> Peer:
        """Return the peer for a call of so many seconds. Raises TierDown if the call cannot succeed."""
        if self._ending:
            raise TierDown(self.name, STOPPING, FIRST, None)
        if self._peer is None:
            raise TierDown(self.name, self.reason or "it is still starting", self._retry_after(), None)
        if seconds <= 0:
            raise TierDown(self.name, "the time that the request may take is over", FIRST, None)
        return self._peer

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        """Start a task that ends with the link, unless the link has ended. Return whether it was started."""
        if self._tasks is not None:
            self._tasks.start_soon(work, *args)
        return self._tasks is not None

    async def look(self, params: Any = _HOW_IS_IT) -> None:
        """Ask the tier for its description, which becomes its `profile`, unless it was reconnected meanwhile.

        If the service behind the tier's server does not answer, the link goes down. Look at a managed tier only to send
        it something in `params`: its profile from the greeting is what its mode was decided by.

        Raises as `call` does.
        """
        peer = self._peer
        raw = await self.call("memory/describe", params)
        try:
            profile = read_profile(raw)
        except BadProfile as problem:
            raise TierDown(self.name, str(problem), self._retry_after(), None) from None
        if self._peer is peer is not None:
            self.profile = profile
            if profile.ailment is not None:
                self._fall(profile.ailment)

    async def is_seen_within(self, seconds: float) -> bool:
        """Take a `look`, unless the last one is recent, or wait for the one under way.

        Returns whether it has ended within `seconds`. A later result still counts.
        """
        is_late = anyio.current_time() >= self._looked_at + _LOOKED_LATELY
        ended = anyio.Event()
        if self._looking is None and is_late and self._spawn(self._look_by_itself, ended):
            self._looking = ended
        if self._looking is not None:
            with anyio.move_on_after(seconds) as waiting:
                await self._looking.wait()
            return not waiting.cancelled_caught
        return True

    async def _look_by_itself(self, ended: anyio.Event) -> None:
        try:
            with budget(None), suppress(A2MError, TierDown):
                await self.look()
        finally:
            self._looking = None
            self._looked_at = anyio.current_time()
            ended.set()

    async def run(self, *, task_status: anyio.abc.TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Keep the tier connected until cancelled, then close the connection properly."""
        task_status.started()
        try:
            async with anyio.create_task_group() as tasks:
                self._tasks = tasks
                try:
                    await self._keep_connected()
                finally:
                    self._tasks = None
        finally:
            self._peer = None
            self.status, self.reason = "down", "the router has ended its link"

    async def _keep_connected(self) -> None:
        while True:
            try:
                async with self._connect() as peer:
                    await self._tend(peer)
            except (CannotStart, OSError) as problem:
                self._fall(str(problem))
            await anyio.sleep_until(self._retry_at)

    async def wait_up(self) -> None:
        """Wait until the tier can be called."""
        while self._peer is None or self._peer.lost.is_set():
            await self._changed.wait()

    async def wait_greeted(self) -> None:
        """Wait until the first greeting has succeeded or failed."""
        while self.status == "starting":
            await self._changed.wait()

    async def settle(self, settled: Settled) -> None:
        """Wait until a call in doubt is resolved: until `settled` is set.

        If nothing else resolves it, the answer to a probe call does. At most one probe is under way.
        """

        async def probe() -> None:
            async with self._probing:
                for wait in doubling(_PROBE_FIRST, _PROBE_LONGEST):
                    await anyio.sleep(wait)
                    # an error resolves the call as a result does; without either, the next probe may
                    with suppress(A2MError, TierDown):
                        await self._attempt(_Call("memory/describe", {}), self._timeout)

        await first_of(settled.wait, probe)

    def give_up(self) -> None:
        """Fail calls under way, and all later calls, with TierDown: the router is about to stop.

        The callers handle that like any call without an answer.
        """
        self._ending = True
        for scope in list(self._underway):
            scope.cancel()

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """Hold back calls that may change the tier until the end of the block. Only one block may be open.

        Calls that have been sent are not waited for.
        """
        self._held = anyio.Event()
        try:
            yield
        finally:
            self._held.set()
            self._held = None

    def bar(self, reason: str = UNACCOUNTED) -> None:
        """Reject calls that may change the tier with TierDown, for this reason, until the tier is admitted.

        Each time the tier comes up it is barred again.
        """
        self._is_guarded = True
        self.barred = reason

    def admit(self, risen: int) -> None:
        """Admit changes to the tier, unless it has come up again: `risen` is the value for which it was checked."""
        if self.risen == risen:
            self.barred = None

    def on_change(self, callback: Callable[["Link"], None]) -> None:
        """Call `callback`, with the link, each time the link has gone up or down."""
        self._callbacks.append(callback)

    def describe_status(self) -> LinkStatus:
        """Return the link's status, for display."""
        server = None if self.profile is None else self.profile.name
        return LinkStatus(self.status, self.reason or self.inactive_reason, server, self._transport)

    async def _attempt(self, call: _Call, timeout: float) -> msgspec.Raw:
        certain: Settled = client.settled()

        def unsettled(settled: Settled) -> None:
            nonlocal certain
            certain = settled
            call.on_unsettled(settled)

        with anyio.CancelScope() as scope:
            self._underway.add(scope)
            try:
                return await self._answer_of(msgspec.structs.replace(call, on_unsettled=unsettled), timeout)
            finally:
                self._underway.discard(scope)
        raise TierDown(self.name, STOPPING, FIRST, certain)

    async def _answer_of(self, call: _Call, timeout: float) -> msgspec.Raw:
        while self._held is not None and call.is_change:
            await self._held.wait()
        # No await from here until the call is sent. Otherwise a call could escape being held back, or be prepared for
        # another connection.
        peer = self._peer_for(timeout)
        if self.barred is not None and call.is_change:
            raise TierDown(self.name, self.inactive_reason or self.barred, FIRST, None)
        params = call.params() if callable(call.params) else call.params
        began = anyio.current_time()
        number = self._places.begin()
        try:
            result = await peer.call(call.method, params, timeout=timeout, on_unsettled=call.on_unsettled)
        except A2MError as error:
            times = unanswered_in(error)
            if times:
                # the server may have answered other calls meanwhile that did not need the service
                self._count_failure(peer, error.message, times)
            else:
                self._breaker.answered()
            raise
        except client.AnswerTooLong as problem:
            raise AnswerTooLong(self.name, problem.reason, 0.0, problem.settled) from problem
        except Unanswered as problem:
            is_slow = peer.heard > began
            if not isinstance(problem, TooLate) or (timeout >= _FAIR * self._timeout and not is_slow):
                self._count_failure(peer, problem.reason)
            elif call.is_fair and is_slow:
                self._places.ended(number, in_time=False)
            raise TierDown(self.name, problem.reason, self._retry_after(), problem.settled) from problem
        self._breaker.answered()
        self._places.ended(number, in_time=True)
        return result

    def _count_failure(self, peer: Peer, reason: str, times: int = 0) -> None:
        # a call of an earlier connection does not count
        if self._peer is peer and self._breaker.failed(times):
            self._fall(f"{self._breaker.failures} calls in a row were not answered; of the last: {reason}")

    def _retry_after(self) -> float:
        return FIRST if self._peer is not None else max(FIRST, self._retry_at - anyio.current_time())

    async def _tend(self, peer: Peer) -> None:
        """Greet and watch a connection until it has to be closed; the link is down by then."""
        self._breaker.connected(anyio.current_time())
        while True:
            greeted_at = anyio.current_time()
            try:
                profile = await _greet(peer, max(_GREETING, self._timeout))
            except BadProfile as problem:
                self._fall(str(problem))
                is_wrong = self._breaker.misgreeted(is_answer=peer.heard >= greeted_at)
                if peer.lost.is_set() or is_wrong or self._is_useless(peer.heard):
                    return
            else:
                self._breaker.greeted()
                if profile.ailment is None:
                    self._rise(peer, profile)
                    while self._peer is peer and not peer.lost.is_set():
                        await first_of(peer.lost.wait, self._changed.wait)
                    if peer.lost.is_set():
                        self._fall(peer.reason or "the connection was lost")
                        return
                    self._breaker.fell(anyio.current_time())
                else:
                    self.profile = profile
                    self._fall(profile.ailment)
                    if self._is_useless(-math.inf):
                        return
            with anyio.move_on_after(self._retry_at - anyio.current_time()):
                await peer.lost.wait()
                return

    def _is_useless(self, heard: float) -> bool:
        silent = self._breaker.is_useless(anyio.current_time(), heard)
        if silent is not None:
            log.warning("tier=%s reconnecting: silent for %.0f s", self.name, silent)
        return silent is not None

    def _rise(self, peer: Peer, profile: Profile) -> None:
        self._peer = peer
        self.profile = profile
        self.risen += 1
        self.barred = UNACCOUNTED if self._is_guarded else None
        self._breaker.rose()
        self._backoff.succeeded(anyio.current_time())
        self.status, self.reason = "up", None
        log.info("tier=%s up: %s", self.name, profile.name)
        self._emit_change()

    def _fall(self, reason: str) -> None:
        is_new = self.status != "down"
        now = anyio.current_time()
        wait = self._backoff.failed(now)
        if is_new or reason != self.reason:
            log.warning("tier=%s down, retry in %.1f s: %s", self.name, wait, reason)
        self._retry_at = now + wait
        self._peer = None
        self.status, self.reason = "down", reason
        if is_new:
            self._emit_change()

    def _emit_change(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        for callback in self._callbacks:
            callback(self)


async def _greet(peer: Peer, seconds: float) -> Profile:
    """Greet the tier, and return its description of itself. Raises BadProfile if the greeting fails in any way."""
    try:
        return read_profile(await peer.call("memory/describe", _HOW_IS_IT, timeout=seconds))
    except A2MError as error:
        what = "; every A2M server has this method, so it is not one" if error.code == Code.METHOD_NOT_FOUND else ""
        raise BadProfile(f"memory/describe: refused with {error.code}: {error.message}{what}") from error
    except client.NoAnswer as problem:
        # an HTTP server's answer is not kept in a buffer, so the hint is for pipes only
        is_mute = peer.heard == -math.inf and isinstance(peer, client.Connection)
        hint = "; does it flush what it writes, line by line?" if is_mute else ""
        raise BadProfile(f"memory/describe: {problem.reason}{hint}") from problem
    except Unanswered as problem:
        raise BadProfile(problem.reason) from problem
