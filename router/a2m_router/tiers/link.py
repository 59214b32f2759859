"""The router's connection to one tier: supervision, deadlines, and the gate before changes.

- A link is `starting` until the first greeting has succeeded or failed, then `up` or `down`. While it is down calls
  fail at once, and nothing is sent but the greetings that may bring it up again, one at a time, ever more rarely.
- It goes down when its connection ends, and when its breaker opens; see Breaker. A call that is answered too late is no
  failure of a tier that has answered anything else meanwhile, or that was given less time than it has: it is slow, not
  dead.
- A server may stand before a service, as a2m-rag does. A service that does not answer it counts as a tier that does not
  answer, however quickly the server says so; it is looked for by greetings, since the server says there how it is.
- What may change a tier is refused, each time that it has come up, until somebody has looked at what it holds and
  admits it (see `bar`). Every call passes this gate, whoever makes it.
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

# a server that has just been started may have an index to load; and one that is slow answers a trial late
_GREETING: Final = 30.0
# of a tier's own time; silence for less of it says nothing about the tier
_FAIR: Final = 0.9
# between the probes that settle a call, seconds: the first may be quick, most servers are only late
_PROBE_FIRST: Final = 0.1
_PROBE_LONGEST: Final = 5.0

# A look costs a mounted service a search, and every client begins with one: it is good for so many seconds.
_LOOKED_LATELY: Final = 10.0

# on the brink of being full a disk takes what is small, and not what is large; it has room when it has refused nothing
# for so many seconds
_QUIET: Final = 60.0

_READS: Final = frozenset(
    {"memory/describe", "memory/recall", "memory/timeline", "memory/fetch", "memory/session/list"}
)
# what is sent while changes are held back, or barred; anything else may be one
_PASSES: Final = frozenset({*_READS, "store/backup"})

# why a tier that is up takes no part yet, where nothing else is in the way
UNACCOUNTED: Final = "what it holds is still being taken into the account"

# why a managed tier is only read, as its server says
TAKES_NO_WRITES: Final = "its server takes no writes"

log = logging.getLogger("a2m_router.tiers")


class TierDown(Exception):
    """A tier did not answer: it is down, its deadline has passed, or its connection was lost meanwhile.

    Args:
        retry_after: seconds until it is worth trying again.
        settled: when the call can no longer land; None if it was never sent. One that is set already says nothing
            about whether the call has landed.
    """

    def __init__(self, tier: str, reason: str, retry_after: float, settled: Settled | None) -> None:
        super().__init__(f"{tier}: {reason}")
        self.tier = tier
        self.reason = reason
        self.retry_after = retry_after
        self.settled = settled


class AnswerTooLong(TierDown):
    """The tier's answer was longer than a message may be; asking it for less may help."""


class Overloaded(TierDown):
    """So many calls are under way at the tier that this one was not sent; the tier is well."""

    def __init__(self, tier: str) -> None:
        super().__init__(tier, OVERLOADED, FIRST, None)


class Refused(A2MError):
    """A tier's own answer to a call is an error, in the tier's own words."""


class LinkStatus(msgspec.Struct, frozen=True):
    """A link as `memory/describe` and `--check` show it.

    `server` is the name of the server behind, once known; `reason` is why it is down, or why it takes no part though it
    is up.
    """

    status: Literal["starting", "up", "down"]
    reason: str | None
    server: str | None
    transport: str


class _Call(msgspec.Struct, frozen=True):
    """A call, and what is to be known of it on its way.

    params: as in `Link.call`.
    on_unsettled: as in `Link.call`.
    is_fair: it was given the tier's time, as far as it has not waited for its turn.
    is_change: it may change what the tier holds.
    """

    method: str
    params: Any
    on_unsettled: Callable[[Settled], None] = lambda settled: None
    is_fair: bool = False
    is_change: bool = False


class Link:
    """One tier, as the router reaches it.

    Args:
        name: the tier's.
        connect: opens a connection. May raise CannotStart or OSError.
        timeout: of a call, in seconds, unless the call has one of its own.
        transport: what people are told about how the tier is reached.
        most_calls: clients' calls under way at once; fewer where the tier is too slow for them.
        random: uniform in [0, 1), for the jitter.

    `profile` is what the tier said at the last greeting; `reason` is why it is down; `risen` is how often it has come
    up; `barred` is why what may change the tier is refused, None where it is not. `inactive_reason` is why a tier
    that is up takes no part.
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
        self._is_guarded = False  # is barred anew whenever it has come up
        self.barred: str | None = None
        self._connect = connect
        self._timeout = timeout
        self._transport = transport
        self._backoff = Backoff(random)
        self._retry_at = 0.0
        self._peer: Peer | None = None  # exactly while the link is up
        self._breaker = Breaker()
        # what it last refused for want of room, and when: until it has taken such a thing, and that is long ago
        self._full: tuple[str, float] | None = None
        self._places = Places(name, most_calls, self._spawn)
        self._tasks: anyio.abc.TaskGroup | None = None  # of `run`
        self._looking: anyio.Event | None = None  # until the look that is under way has ended
        self._looked_at = -math.inf
        self._ending = False
        self._underway: set[anyio.CancelScope] = set()  # of calls at the tier
        self._held: anyio.Event | None = None  # set when changes are not held back any more
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
        """The tier's result. A read whose connection is lost is tried once more if the tier is back in time.

        Args:
            params: the parameters; or a function that prepares them, called in the step in which the call is sent, for
                each attempt, so that they are for the connection of that attempt. What it raises ends the call.
            timeout: seconds; the tier's own by default, and never more than the request has left.
            on_unsettled: is told, before the call ends without an answer in whichever way (a cancellation, too), when
                the call will be settled, unless it already is.
            is_harmless: it changes nothing, though another call of the method would: it is sent to a barred tier, too.

        Raises Refused as the tier answered it, Overloaded, and TierDown for everything else.
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
                    log.warning("%s: its disk is full: %s", self.name, answered)
                self._full = method, anyio.current_time()
            raise Refused(answered.code, answered.message, answered.data) from None
        if self._full is not None and method == self._full[0] and anyio.current_time() >= self._full[1] + _QUIET:
            self._full = None
            log.info("%s: there is room on its disk again", self.name)
        return result

    async def _tried(self, call: _Call, deadline: float) -> msgspec.Raw:
        """A read is tried once more if its connection is lost, and the tier is back in time."""
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
        """Whom a call of so many seconds goes to. Raises TierDown where it would be in vain."""
        if self._ending:
            raise TierDown(self.name, STOPPING, FIRST, None)
        if self._peer is None:
            raise TierDown(self.name, self.reason or "it is still starting", self._retry_after(), None)
        if seconds <= 0:
            raise TierDown(self.name, "the time that the request may take is over", FIRST, None)
        return self._peer

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: object) -> bool:
        """Start a task that ends with the link, unless the link has ended; returns whether it was started."""
        if self._tasks is not None:
            self._tasks.start_soon(work, *args)
        return self._tasks is not None

    async def look(self, params: Any = _HOW_IS_IT) -> None:
        """Ask the tier how it is, perhaps with something to keep: what it says of itself is its `profile` from now on,
        unless it has been connected anew meanwhile. Where the service behind it does not answer the link goes down. Of
        tiers that are written to the profile is what was agreed upon: they are only looked at to be told something.

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
        """Take a `look`, unless the last was lately, or wait for the one that is under way; whether it has ended in so
        many seconds. What it finds later counts all the same."""
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
        """Keeps the tier connected until cancelled, and then ends the connection in good order."""
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
        """Returns when the tier can be called."""
        while self._peer is None or self._peer.lost.is_set():
            await self._changed.wait()

    async def wait_greeted(self) -> None:
        """Returns when the first greeting has succeeded or failed."""
        while self.status == "starting":
            await self._changed.wait()

    async def settle(self, settled: Settled) -> None:
        """Returns when `settled` is set. If nothing else proves it, an answer to a call made for that will; one such
        call at a time, whoever waits."""

        async def probe() -> None:
            async with self._probing:
                for wait in doubling(_PROBE_FIRST, _PROBE_LONGEST):
                    await anyio.sleep(wait)
                    # an error settles as well as an answer does; without either the next probe may
                    with suppress(A2MError, TierDown):
                        await self._attempt(_Call("memory/describe", {}), self._timeout)

        await first_of(settled.wait, probe)

    def give_up(self) -> None:
        """The router is about to end: calls under way, and any that come, fail with TierDown, however long their tier
        might still take. Those who made them do what they do for any call without an answer."""
        self._ending = True
        for scope in list(self._underway):
            scope.cancel()

    @contextmanager
    def holding_back(self) -> Iterator[None]:
        """In the block no call is sent that may change what the tier holds; it waits for the end of the block. What has
        been sent is not waited for. One block at a time."""
        self._held = anyio.Event()
        try:
            yield
        finally:
            self._held.set()
            self._held = None

    def bar(self, reason: str = UNACCOUNTED) -> None:
        """From now on what may change the tier is refused with TierDown, for this reason, until it is admitted; and
        anew each time that it has come up."""
        self._is_guarded = True
        self.barred = reason

    def admit(self, risen: int) -> None:
        """The tier as it was when it had come up so often may be changed."""
        if self.risen == risen:
            self.barred = None

    def on_change(self, callback: Callable[["Link"], None]) -> None:
        """`callback` is called, with the link, each time it has come up or gone down."""
        self._callbacks.append(callback)

    def describe_status(self) -> LinkStatus:
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
        # nothing is awaited from here until the call is on its way: none is sent that was not held back, or that was
        # prepared for another connection
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
                # it may have answered other calls meanwhile, for which it had not to ask the service
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
        # else it is a call from before the link went down
        if self._peer is peer and self._breaker.failed(times):
            self._fall(f"{self._breaker.failures} calls in a row were not answered; of the last: {reason}")

    def _retry_after(self) -> float:
        return FIRST if self._peer is not None else max(FIRST, self._retry_at - anyio.current_time())

    async def _tend(self, peer: Peer) -> None:
        """Returns when the connection is to be given up; the link is down by then."""
        self._breaker.connected(anyio.current_time())
        while True:
            asked = anyio.current_time()
            try:
                profile = await _greet(peer, max(_GREETING, self._timeout))
            except BadProfile as problem:
                self._fall(str(problem))
                is_wrong = self._breaker.misgreeted(is_answer=peer.heard >= asked)
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
            log.warning("%s has been silent for %.0f s: its connection is ended, and made anew", self.name, silent)
        return silent is not None

    def _rise(self, peer: Peer, profile: Profile) -> None:
        self._peer = peer
        self.profile = profile
        self.risen += 1
        self.barred = UNACCOUNTED if self._is_guarded else None
        self._breaker.rose()
        self._backoff.succeeded(anyio.current_time())
        self.status, self.reason = "up", None
        log.info("%s is up: %s", self.name, profile.name)
        self._tell()

    def _fall(self, reason: str) -> None:
        news = self.status != "down"
        if news or reason != self.reason:
            log.warning("%s is down: %s", self.name, reason)
        now = anyio.current_time()
        self._retry_at = now + self._backoff.failed(now)
        self._peer = None
        self.status, self.reason = "down", reason
        if news:
            self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
        for callback in self._callbacks:
            callback(self)


async def _greet(peer: Peer, seconds: float) -> Profile:
    """What the tier says of itself. Raises BadProfile for a greeting that fails in any way."""
    try:
        return read_profile(await peer.call("memory/describe", _HOW_IS_IT, timeout=seconds))
    except A2MError as error:
        what = "; it is no A2M server, which has this method" if error.code == Code.METHOD_NOT_FOUND else ""
        raise BadProfile(f"memory/describe: refused with {error.code}: {error.message}{what}") from error
    except client.NoAnswer as problem:
        # of what comes by HTTP nothing is held back in a buffer
        is_mute = peer.heard == -math.inf and isinstance(peer, client.Connection)
        hint = "; does it flush what it writes, line by line?" if is_mute else ""
        raise BadProfile(f"memory/describe: {problem.reason}{hint}") from problem
    except Unanswered as problem:
        raise BadProfile(problem.reason) from problem
