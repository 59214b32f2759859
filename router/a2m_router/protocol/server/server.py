"""The server end for any binding: it takes a message, finds the method, reads the parameters, and returns an answer.

`Refusal` and `CannotListen` belong to HTTP only. They are here so that other modules can use them without loading HTTP.
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
_throttle = LogThrottle(log)


class Caller(msgspec.Struct, frozen=True):
    """The client of a call, as the binding identifies it (§6).

    Attributes:
        asserts_owner: the binding is local, so the `owner` in a call is trusted.
        owner: otherwise, the authenticated principal's; None if callers are not distinguished and `scopes` is not
            declared.
        channel: sends notifications of events to the caller (§4.13); None if the binding cannot.
        writes: the tiers whose records the caller may change; None for all.
    """

    asserts_owner: bool
    owner: str | None = None
    channel: Channel | None = None
    writes: frozenset[str] | None = None


class Refusal(msgspec.Struct, frozen=True):
    """The rejection of an HTTP request: a status, a sentence, and headers."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class CannotListen(Exception):
    """An address cannot be listened on; the message is one sentence that says why."""


class Answering(Protocol):
    """The function that a binding serves: it takes a message and returns the answer, or None for a notification."""

    async def __call__(self, message: bytes, caller: Caller, /) -> bytes | None: ...


class Method(msgspec.Struct, frozen=True):
    """One method: the type of its parameters and its handler.

    `allow` raises the error for every call while the method cannot be carried out, before its parameters are read.
    """

    params: type[Params]
    handler: Callable[[Any, Caller], Awaitable[Any]]
    allow: Callable[[], None] | None = None


class NoRoom(bytes):
    """The answer to a call that is rejected for overload; a binding may express that in its own way, too.

    `retry_after` is in seconds."""

    retry_after: float

    def __new__(cls, answer: bytes, retry_after: float) -> Self:
        made = super().__new__(cls, answer)
        made.retry_after = retry_after
        return made


class Gate:
    """A limit for the calls in progress, over all bindings. It rejects a further call immediately: a queue would need a
    limit, too.

    Args:
        answer: carries out the calls.
        most: calls in progress.
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
            sentence = f"{self._most:,} calls are in progress, which is the limit of this server"
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
        """Answer calls in progress and new ones at once, since the server is stopping. A call that must not be
        interrupted finishes first."""
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
    """Serves a table of methods; errors become answers only here.

    Args:
        methods: the implemented methods by name, including our extensions, which have no capability.
        capabilities: the declared ones. Methods of others answer CAPABILITY_NOT_SUPPORTED (§2).
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
            _throttle.say(logging.ERROR, f"method={request.method} failed: {failed}")
            return None if request.id is None else render_error(request.id, failed)
        except Exception as problem:  # noqa: BLE001 - every fault must become an answer without a traceback
            return None if request.id is None else render_error(request.id, internal(problem, request.method))
        return None if request.id is None else render_result(request.id, result)

    def route(self, request: Request) -> tuple[Method, Params]:
        """Return the method of a request and its parameters; raise the A2MError that §2 or §7 prescribes."""
        capability = CAPABILITY_OF.get(request.method)
        method = self._methods.get(request.method)
        if capability is None:
            if method is None:
                raise A2MError(Code.METHOD_NOT_FOUND, f"{request.method!r} is not an A2M method")
        elif capability not in self._capabilities or method is None:
            raise not_supported(capability)
        if method.allow is not None:
            method.allow()
        return method, read_params(request.params, method.params)


def _failed(id: Raw, error: A2MError) -> bytes:
    """Return the answer to a failed call."""
    answer = render_error(id, error)
    if error.data is not None and error.data.get("reason") == OVERLOADED:
        return NoRoom(answer, error.data.get("retry_after", RETRY_AFTER))
    return answer


def internal(problem: Exception, method: str) -> A2MError:
    """Return INTERNAL_ERROR for a fault of this program, and log its traceback."""
    log.error("method=%s failed", method, exc_info=problem)
    return A2MError(Code.INTERNAL_ERROR, f"the server failed in {method}; its log has the details")
