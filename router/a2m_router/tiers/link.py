"""The router's connection to one tier: supervision, deadlines, and a breaker.

- A link is `starting` until the first greeting has succeeded or failed, then `up` or `down`. While it is down calls
  fail at once, and nothing is sent but the greetings that may bring it up again, one at a time, ever more rarely.
- It goes down when its connection ends, and when FAILURES calls in a row went without an answer (the breaker). An
  answer that is an error is an answer; and a call that is answered too late is no failure of a tier that has answered
  anything else meanwhile, or that was given less time than it has: it is slow, not dead.
- A server may stand before a service, as a2m-rag does. A service that does not answer it counts as a tier that does not
  answer, however quickly the server says so; it is looked for by greetings, since the server says there how it is.
- Behind an open breaker the connection is kept, since it may be well. It is replaced when the tier has been silent for
  PATIENCE seconds, which doubles as long as that does not help (also a service's silence may be its server's fault,
  such as threads that hang), or has answered TRIALS greetings in a row as it must not.
- What may change a tier is refused, each time that it has come up, until somebody has looked at what it holds and
  admits it (see `bar`). Every call passes this gate, whoever makes it.
- Of clients' requests only so many calls are under way at the tier, and a few more wait for their turn; see Room. What
  comes then is refused. Work in the background is bounded by itself and is not refused.
"""

import logging
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Final, Literal

import anyio
import anyio.abc
import msgspec

from a2m_router.process.budget import budget, is_request, left
from a2m_router.process.waiting import until_any
from a2m_router.protocol.client import client
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import ConnectionLost, Peer, Settled, TooLate, Unanswered
from a2m_router.protocol.client.http_client import HttpFailure
from a2m_router.protocol.wire.capabilities import PROTOCOL
from a2m_router.protocol.wire.errors import DISK_FULL, OVERLOADED, STOPPING, A2MError, Code, no_room, unanswered_in
from a2m_router.tiers.backoff import FIRST, Backoff
from a2m_router.tiers.profile import BadProfile, Profile, read_profile
from a2m_router.tiers.room import Room

FAILURES: Final = 5
TRIALS: Final = 5
PATIENCE: Final = 60.0
MOST_CALLS: Final = 256

# a server that has just been started may have an index to load; and one that is slow answers a trial late
_GREETING: Final = 30.0
# killing a server that takes longer than PATIENCE to start would never let it come up
_LONGEST_PATIENCE: Final = 960.0
# of a tier's own time; silence for less of it says nothing about the tier
_FAIR: Final = 0.9
# between the probes that settle a call, seconds: the first may be quick, most servers are only late
_PROBE_FIRST: Final = 0.1
_PROBE_LONGEST: Final = 5.0

# A look costs a mounted service a search, and every client begins with one: it is good for so many seconds.
_LOOKED_LATELY: Final = 10.0

# how long a call that nobody waits for any more may keep its place, seconds
_KEPT: Final = 30.0

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
    up; `barred` is why what may change the tier is refused, None where it is not. `obstacle` is for those who use the
    link to say why a tier that is up takes no part all the same.
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
        self.obstacle: str | None = None
        self.risen = 0
        self._is_guarded = False  # is barred anew whenever it has come up
        self.barred: str | None = None
        self._connect = connect
        self._timeout = timeout
        self._transport = transport
        self._backoff = Backoff(random)
        self._retry_at = 0.0
        self._peer: Peer | None = None  # exactly while the link is up
        self._failures = 0
        self._replaced = 0  # connections in a row that were given up for being silent
        # what it last refused for want of room, and when: until it has taken such a thing, and that is long ago
        self._full: tuple[str, float] | None = None
        self._room = Room(most_calls)
        self._places = anyio.CapacityLimiter(most_calls)
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
            async with self._place(deadline) as given_up:

                def unsettled(settled: Settled) -> None:
                    given_up.append(settled)
                    if on_unsettled is not None:
                        on_unsettled(settled)

                result = await self._call(
                    method,
                    params,
                    deadline,
                    unsettled,
                    is_fair=allowed >= _FAIR * self._timeout,
                    is_change=not is_harmless and method not in _PASSES,
                )
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

    async def _call(
        self,
        method: str,
        params: Any,
        deadline: float,
        on_unsettled: Callable[[Settled], None] | None,
        *,
        is_fair: bool,
        is_change: bool,
    ) -> msgspec.Raw:
        seconds = deadline - anyio.current_time()
        try:
            return await self._attempt(method, params, seconds, on_unsettled, is_fair=is_fair, is_change=is_change)
        except TierDown as down:
            lost = isinstance(down.__cause__, ConnectionLost) and not isinstance(down.__cause__, HttpFailure)
            if method not in _READS or not lost:
                raise
            with anyio.move_on_after(deadline - anyio.current_time()):
                await self.wait_up()
            remaining = deadline - anyio.current_time()
            if remaining <= 0:
                raise
        return await self._attempt(method, params, remaining, on_unsettled)

    @asynccontextmanager
    async def _place(self, deadline: float) -> AsyncIterator[list[Settled]]:
        """Room for one call among those of clients. Raises Overloaded where too many wait for it already, or where it
        does not come in time.

        A call that is given up is still the tier's work, and keeps its place, until what it yields is settled: else the
        tier would only ever be at what nobody waits for any more.
        """
        given_up: list[Settled] = []
        if not is_request():
            yield given_up
            return
        if self._places.statistics().tasks_waiting >= self._room.waiting:
            raise Overloaded(self.name)
        borrower = object()
        with anyio.move_on_after(deadline - anyio.current_time()) as turn:
            await self._places.acquire_on_behalf_of(borrower)
        if turn.cancelled_caught:
            raise Overloaded(self.name)
        try:
            yield given_up
        finally:
            if given_up and self._tasks is not None:
                self._tasks.start_soon(self._leave, borrower, given_up)
            else:
                self._places.release_on_behalf_of(borrower)

    async def _leave(self, borrower: object, given_up: list[Settled]) -> None:
        try:
            # an answer that was lost, and a tier that hangs, prove nothing ever: a narrow tier would have no place left
            with anyio.move_on_after(_KEPT):
                for settled in given_up:
                    await settled.wait()
        finally:
            self._places.release_on_behalf_of(borrower)

    def _peer_for(self, seconds: float) -> Peer:
        """Whom a call of so many seconds goes to. Raises TierDown where it would be in vain."""
        if self._ending:
            raise TierDown(self.name, STOPPING, FIRST, None)
        if self._peer is None:
            raise TierDown(self.name, self.reason or "it is still starting", self._retry_after(), None)
        if seconds <= 0:
            raise TierDown(self.name, "the time that the request may take is over", FIRST, None)
        return self._peer

    def _learn(self, call: int, *, in_time: bool) -> None:
        self._room.ended(call, in_time=in_time)
        if self._places.total_tokens != self._room.calls:
            log.debug("%s: %d calls may be under way", self.name, self._room.calls)
            self._places.total_tokens = self._room.calls

    async def look(self) -> None:
        """Ask the tier how it is: what it says of itself is its `profile` from now on, and where the service behind it
        does not answer the link goes down. Only for tiers that are read: of others the profile is what was agreed upon.

        Raises as `call` does.
        """
        peer = self._peer
        raw = await self.call("memory/describe", {"protocol": PROTOCOL})
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
        if self._looking is None and self._tasks is not None and is_late:
            self._looking = anyio.Event()
            self._tasks.start_soon(self._look_by_itself, self._looking)
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

    async def enrol(self, params: Any) -> None:
        """Greet the tier once more, with something to keep: what it answers is its profile from now on, unless it has
        been connected anew meanwhile. Raises as `call` does."""
        peer = self._peer
        try:
            profile = read_profile(await self.call("memory/describe", params))
        except BadProfile as problem:
            raise TierDown(self.name, str(problem), FIRST, None) from problem
        if self._peer is peer:
            self.profile = profile

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
                wait = _PROBE_FIRST
                while True:
                    await anyio.sleep(wait)
                    wait = min(2 * wait, _PROBE_LONGEST)
                    # an error settles as well as an answer does; without either the next probe may
                    with suppress(A2MError, TierDown):
                        await self._attempt("memory/describe", {}, self._timeout, None)

        await until_any(settled.wait, probe)

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
        return LinkStatus(self.status, self.reason or self.obstacle, server, self._transport)

    async def _attempt(
        self,
        method: str,
        params: Any,
        timeout: float,
        on_unsettled: Callable[[Settled], None] | None,
        *,
        is_fair: bool = False,
        is_change: bool = False,
    ) -> msgspec.Raw:
        """`is_fair`: the call was given its time, as far as it has not waited for its turn. `is_change`: it may change
        what the tier holds."""
        certain: Settled = client.settled()

        def unsettled(settled: Settled) -> None:
            nonlocal certain
            certain = settled
            if on_unsettled is not None:
                on_unsettled(settled)

        with anyio.CancelScope() as scope:
            self._underway.add(scope)
            try:
                return await self._answer_of(method, params, timeout, unsettled, is_fair=is_fair, is_change=is_change)
            finally:
                self._underway.discard(scope)
        raise TierDown(self.name, STOPPING, FIRST, certain)

    async def _answer_of(
        self,
        method: str,
        params: Any,
        timeout: float,
        on_unsettled: Callable[[Settled], None],
        *,
        is_fair: bool,
        is_change: bool,
    ) -> msgspec.Raw:
        while self._held is not None and is_change:
            await self._held.wait()
        # nothing is awaited from here until the call is on its way: none is sent that was not held back, or that was
        # prepared for another connection
        peer = self._peer_for(timeout)
        if self.barred is not None and is_change:
            raise TierDown(self.name, self.obstacle or self.barred, FIRST, None)
        prepared = params() if callable(params) else params
        began = anyio.current_time()
        number = self._room.begin()
        try:
            result = await peer.call(method, prepared, timeout=timeout, on_unsettled=on_unsettled)
        except A2MError as error:
            times = unanswered_in(error)
            if times:
                # it may have answered other calls meanwhile, for which it had not to ask the service
                self._count_failure(peer, error.message, max(times, self._failures + 1))
            else:
                self._failures = 0
            raise
        except client.AnswerTooLong as problem:
            raise AnswerTooLong(self.name, problem.reason, 0.0, problem.settled) from problem
        except Unanswered as problem:
            is_slow = peer.heard > began
            if not isinstance(problem, TooLate) or (timeout >= _FAIR * self._timeout and not is_slow):
                self._count_failure(peer, problem.reason, self._failures + 1)
            elif is_fair and is_slow:
                self._learn(number, in_time=False)
            raise TierDown(self.name, problem.reason, self._retry_after(), problem.settled) from problem
        self._failures = 0
        self._learn(number, in_time=True)
        return result

    def _count_failure(self, peer: Peer, reason: str, failures: int) -> None:
        if self._peer is not peer:
            return  # a call from before the link went down
        self._failures = failures
        if self._failures >= FAILURES:
            self._fall(f"{self._failures} calls in a row were not answered; of the last: {reason}")

    def _retry_after(self) -> float:
        return FIRST if self._peer is not None else max(FIRST, self._retry_at - anyio.current_time())

    async def _tend(self, peer: Peer) -> None:
        """Returns when the connection is to be given up; the link is down by then."""
        since = anyio.current_time()  # when it was first asked in vain, as far as that goes on
        greeted = False
        wrong = 0  # greetings in a row that were answered otherwise than they must be
        while True:
            asked = anyio.current_time()
            try:
                profile = await _greet(peer, max(_GREETING, self._timeout))
            except BadProfile as problem:
                self._fall(str(problem))
                wrong = wrong + 1 if peer.heard >= asked else 0
                if peer.lost.is_set() or wrong >= (TRIALS if greeted else 1):
                    return
                if self._is_to_be_replaced(max(since, peer.heard)):
                    return
            else:
                greeted, wrong = True, 0
                if profile.ailment is None:
                    self._rise(peer, profile)
                    while self._peer is peer and not peer.lost.is_set():
                        await until_any(peer.lost.wait, self._changed.wait)
                    if peer.lost.is_set():
                        self._fall(peer.reason or "the connection was lost")
                        return
                    since = anyio.current_time()
                else:
                    self.profile = profile
                    self._fall(profile.ailment)
                    if self._is_to_be_replaced(since):
                        return
            with anyio.move_on_after(self._retry_at - anyio.current_time()):
                await peer.lost.wait()
                return

    def _is_to_be_replaced(self, since: float) -> bool:
        """Whether a connection that has been of no use since then is given up."""
        silent = anyio.current_time() - since
        if silent < self._patience():
            return False
        log.warning("%s has been silent for %.0f s: its connection is ended, and made anew", self.name, silent)
        self._replaced += 1
        return True

    def _patience(self) -> float:
        return float(min(PATIENCE * 2.0 ** min(self._replaced, 16), _LONGEST_PATIENCE))

    def _rise(self, peer: Peer, profile: Profile) -> None:
        self._peer = peer
        self.profile = profile
        self.risen += 1
        self.barred = UNACCOUNTED if self._is_guarded else None
        self._failures = self._replaced = 0
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
        return read_profile(await peer.call("memory/describe", {"protocol": PROTOCOL}, timeout=seconds))
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
