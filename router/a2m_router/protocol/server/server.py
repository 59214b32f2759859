"""The server end, whatever the binding: a message in, the method found and its parameters read, an answer out.

What one binding only needs, and its users must name without loading it, is here, too: `Refusal` and `CannotListen`.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Protocol, Self

import anyio
import msgspec
from msgspec import Raw

from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.server.event_log import Channel
from a2m_router.protocol.wire.capabilities import CAPABILITY_OF
from a2m_router.protocol.wire.errors import (
    OVERLOADED,
    RETRY_AFTER,
    A2MError,
    Code,
    disk_failed,
    not_supported,
    overloaded,
    stopping,
)
from a2m_router.protocol.wire.jsonrpc import (
    MalformedMessage,
    Request,
    parse_request,
    read_params,
    render_error,
    render_result,
)
from a2m_router.protocol.wire.method_params import Params

log = logging.getLogger(__name__)
_repeats = LogThrottle(log)


class Caller(msgspec.Struct, frozen=True):
    """Who is asking, as the binding knows it (§6).

    `asserts_owner`: the binding is local, so the `owner` in a call is taken at its word. Otherwise `owner` here is the
    authenticated principal's, or None where callers are not told apart and `scopes` is not declared. `channel` is how
    the caller can be notified of events (§4.13), None where the binding cannot. `writes` names the tiers whose records
    the caller may change, None where that is any.
    """

    asserts_owner: bool
    owner: str | None = None
    channel: Channel | None = None
    writes: frozenset[str] | None = None


class Refusal(msgspec.Struct, frozen=True):
    """Why a caller does not come in: an HTTP status, a sentence, and headers that go with it."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class CannotListen(Exception):
    """The address cannot be listened on; the message is one sentence that says why."""


class Answering(Protocol):
    """What a binding serves: one message in, the answer out, or None where the message was a notification."""

    async def __call__(self, message: bytes, caller: Caller, /) -> bytes | None: ...


class Method(msgspec.Struct, frozen=True):
    """One method: the type of its parameters and what carries it out.

    `allow` raises what every call is answered with as long as there is no carrying it out, whatever its parameters are.
    """

    params: type[Params]
    handler: Callable[[Any, Caller], Awaitable[Any]]
    allow: Callable[[], None] | None = None


class NoRoom(bytes):
    """An answer that says that the server has no room for the call at present, which a binding may say in its own way,
    too. `retry_after`: seconds."""

    retry_after: float

    def __new__(cls, answer: bytes, retry_after: float) -> Self:
        made = super().__new__(cls, answer)
        made.retry_after = retry_after
        return made


class Gate:
    """Lets so many calls be under way at once, whichever bindings they come by. One more is refused at once; it never
    waits, since a queue would only be another thing without a bound.

    Args:
        answer: carries the calls out.
        most: calls under way.
    """

    def __init__(self, answer: Answering, most: int) -> None:
        self._answer = answer
        self._most = most
        self._underway = 0
        self._scopes: set[anyio.CancelScope] = set()
        self._ended = False

    def __repr__(self) -> str:
        return f"<Gate {self._underway}/{self._most} calls>"

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        if self._underway >= self._most:
            sentence = f"{self._most:,} calls are under way, which is what it takes at once"
            return self._answered(message, overloaded(sentence))
        self._underway += 1
        try:
            with anyio.CancelScope() as scope:
                self._scopes.add(scope)
                if self._ended:
                    scope.cancel()
                return await self._answer(message, caller)
            return self._answered(message, stopping())
        finally:
            self._scopes.discard(scope)
            self._underway -= 1

    def end(self) -> None:
        """Answer at once what is under way, and what comes: the server is stopping. What a call has begun and must not
        be cut short, it ends before that."""
        self._ended = True
        for scope in list(self._scopes):
            scope.cancel()

    def _answered(self, message: bytes, error: A2MError) -> bytes | None:
        try:
            request = parse_request(message)
        except MalformedMessage as malformed:
            return render_error(malformed.id, malformed)
        if request.id is None:
            return None
        return _failed(request.id, error)


class Dispatcher:
    """Serves a table of methods; all errors become answers here, and only here.

    Args:
        methods: what is implemented, by name; also extensions of ours, which are of no capability.
        capabilities: what is declared. Methods of other capabilities answer CAPABILITY_NOT_SUPPORTED (§2).
    """

    def __init__(self, methods: Mapping[str, Method], capabilities: Iterable[str]) -> None:
        self._methods = methods
        self._capabilities = frozenset(capabilities)

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        try:
            request = parse_request(message)
        except MalformedMessage as malformed:
            return render_error(malformed.id, malformed)
        try:
            method, params = self.route(request)
            result = await method.handler(params, caller)
        except A2MError as error:
            return None if request.id is None else _failed(request.id, error)
        except OSError as problem:
            failed = disk_failed(problem)
            _repeats.say(logging.ERROR, f"{request.method}: {failed}")
            return None if request.id is None else render_error(request.id, failed)
        except Exception as problem:  # noqa: BLE001 - the last line: no traceback reaches a caller
            return None if request.id is None else render_error(request.id, internal(problem, request.method))
        return None if request.id is None else render_result(request.id, result)

    def route(self, request: Request) -> tuple[Method, Params]:
        """The method a request names and its parameters, read. Raises A2MError for what §2 and §7 refuse."""
        capability = CAPABILITY_OF.get(request.method)
        method = self._methods.get(request.method)
        if capability is None:
            if method is None:
                raise A2MError(Code.METHOD_NOT_FOUND, f"{request.method!r} is no A2M method")
        elif capability not in self._capabilities or method is None:
            raise not_supported(capability)
        if method.allow is not None:
            method.allow()
        return method, read_params(request.params, method.params)


def _failed(id: Raw, error: A2MError) -> bytes:
    """The answer to a call that failed."""
    answer = render_error(id, error)
    if error.data is not None and error.data.get("reason") == OVERLOADED:
        return NoRoom(answer, error.data.get("retry_after", RETRY_AFTER))
    return answer


def internal(problem: Exception, method: str) -> A2MError:
    """INTERNAL_ERROR for a fault of ours; the whole story goes to the log."""
    log.error("%s failed", method, exc_info=problem)
    return A2MError(Code.INTERNAL_ERROR, f"the server failed in {method}; its log says how")
