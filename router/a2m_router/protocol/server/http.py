"""The HTTP binding's server end (§8.3): POST one message, get one answer.

Before any JSON-RPC work a request is checked, in this order: its end is clear (400), it is for this server (421), its
head is small enough (431), the caller is authenticated (403, 401), the path and method exist (404, 405), it is JSON
(415) of this protocol version (400), the limits allow it (503), its body is small enough (413) and arrives in time
(408). After these checks, errors are answers with status 200.

A disconnect cancels the client's call, except writes already sent to a tier. Such a write counts against the limits
until it is done.
"""

import errno
import logging
import math
import socket
import sys
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote

import anyio
import anyio.abc
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.server.http_addressing import addressed, is_loopback
from a2m_router.protocol.server.http_connection import ON_HANG_UP, ConnectionConfig
from a2m_router.protocol.server.http_limits import DEFAULT_LIMITS, MIN_RATE, Busy, HttpLimits, Limiter, patience
from a2m_router.protocol.server.server import Answering, Caller, CannotListen, NoRoom, Refusal
from a2m_router.protocol.wire.capabilities import PROTOCOL, VERSION_HEADER, speaks
from a2m_router.protocol.wire.errors import RETRY_AFTER, A2MError, Code
from a2m_router.protocol.wire.jsonrpc import NULL_ID, render_error, too_long
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE

if sys.platform != "win32":
    import resource

log = logging.getLogger(__name__)
_throttle = LogThrottle(log)

WELL_KNOWN: Final = "/.well-known/a2m-server.json"
ALIVE: Final = "/healthz"
READY: Final = "/readyz"

# seconds for calls in progress when the server stops; longer than a tier's timeout (5 s by default)
_GRACE: Final = 10
# further seconds for calls that continue after their connections were aborted; then uvicorn cancels them
_LAST_RESORT: Final = 20
# a body of up to this many times its limit is read to its end before it is rejected
_PATIENCE: Final = 4
# connections that the system may accept at once, before this process can count them
_BACKLOG: Final = 128
# the log's reason for a request that is rejected by its target or its Host
_NOT_FOR_US: Final = {
    400: "its end or its target is not clear",
    421: "its Host is not this server's; either a web page imitates this server, or a proxy uses a name that is not "
    "listed in hosts",
}
# files that the process has open besides its connections: databases, pipes to children
_OTHER_FILES: Final = 128


def application(
    answer: Answering,
    *,
    admit: Callable[[Mapping[str, str]], Caller | Refusal],
    profile: Callable[[Caller], Awaitable[Any]],
    ready: Callable[[], str | None] = lambda: None,
    max_message: int = DEFAULT_MAX_MESSAGE,
    limits: HttpLimits = DEFAULT_LIMITS,
) -> Starlette:
    """Return the HTTP binding around `answer`, with GET `/healthz` (200: it is alive) and `/readyz` (200, or 503).

    These two need no authentication, but reject web pages with an origin that is not allowed.

    Args:
        answer: must not raise.
        admit: returns the caller for a request's headers (names in any case), or why it is rejected.
        profile: returns the `memory/describe` result for a caller at WELL_KNOWN (§8.3.3).
        ready: returns why calls cannot be answered at present, or None; only authenticated callers see the reason.
        max_message: bytes in a body; a longer one is rejected with 413 and never held.
        limits: of requests; `HttpServer` enforces those of connections.
    """
    limiter = Limiter(limits.max_requests, limits.max_held)

    async def describe(request: Request) -> Response:
        try:
            with limiter.place(0):
                described = msgspec.json.encode(await profile(request.scope["caller"]))
        except Busy as busy:
            return _busy(busy)
        return Response(described, media_type="application/json")

    async def alive(_: Request) -> Response:
        return Response("alive", media_type="text/plain")

    async def readiness(request: Request) -> Response:
        reason = ready()
        if reason is None:
            return Response("ready", media_type="text/plain")
        text = f"not ready: {reason}" if "caller" in request.scope else "not ready"
        return Response(text, 503, media_type="text/plain")

    app = Starlette(
        routes=[
            Route("/", _Calls(answer, limiter, max_message, limits.idle_timeout), methods=["POST"]),
            Route(WELL_KNOWN, describe, methods=["GET"]),
            Route(ALIVE, alive, methods=["GET"]),
            Route(READY, readiness, methods=["GET"]),
        ],
        middleware=[Middleware(_Authentication, admit=admit, max_header=limits.max_header)],
        exception_handlers={HTTPException: _no_such_route, Exception: _fault},
    )
    app.router.redirect_slashes = False  # a redirect would use the Host of the request, which the client controls
    return app


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    limits: HttpLimits = DEFAULT_LIMITS,
    *,
    task_status: anyio.abc.TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serve until cancelled; use `HttpServer` to stop in another way.

    Raises:
        CannotListen: the address cannot be listened on.
    """
    await HttpServer(app, host, port, limits).serve(task_status=task_status)


class HttpServer:
    """An ASGI application, served by uvicorn on asyncio.

    Args:
        host: a name or an address, IPv6 without brackets; a name means all its addresses.
        port: 0 takes a free one.
        limits: of connections; reduced if the process may not open that many files.
        hosts: further accepted names (lower case) in the Host header, besides `host` and the loopback's names. They
            matter only if all addresses are loopback ones; otherwise any Host is accepted.
    """

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        limits: HttpLimits = DEFAULT_LIMITS,
        hosts: Collection[str] = (),
    ) -> None:
        self._app = app
        self._hosts = frozenset([*hosts, host.lower()])
        self._host = host
        self._port = port
        self._limits = limits
        self._stop = anyio.Event()

    def stop(self) -> None:
        """Make `serve` end: it accepts nothing new, and answers calls in progress within 10 s."""
        self._stop.set()

    async def serve(self, *, task_status: anyio.abc.TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` or a cancellation; connections are closed when it returns.

        `task_status` gets the host and the actual port, once connections are accepted.

        Raises:
            CannotListen: the address cannot be listened on.
        """
        sockets = await _listen(self._host, self._port)
        bound: int = sockets[0].getsockname()[1]
        local = all(is_loopback(listening.getsockname()[0]) for listening in sockets)
        server = _Uvicorn(
            ConnectionConfig(
                _Addressed(self._app, self._hosts if local else None),
                _within_open_files(self._limits),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_graceful_shutdown=_GRACE + _LAST_RESORT,
            ),
            lambda: task_status.started((self._host, bound)),
        )

        def hang_up() -> None:
            for connection in list(server.server_state.connections):
                connection.transport.abort()

        async def run() -> None:
            # shielded, so that uvicorn can close its connections; should_exit ends it within _GRACE
            with anyio.CancelScope(shield=True):
                async with anyio.create_task_group() as graces:

                    async def limit() -> None:
                        await ending.wait()
                        await anyio.sleep(_GRACE)
                        # a call then ends as if its client had disconnected
                        hang_up()

                    graces.start_soon(limit)
                    await server.serve(sockets)
                    graces.cancel_scope.cancel()
                hang_up()

        ending = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                await self._stop.wait()
            finally:
                server.should_exit = True
                ending.set()


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers, and with a callback when it accepts connections."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _Addressed:
    """A filter that passes on only requests for this server, with any path and method; see `addressed`."""

    def __init__(self, app: ASGIApp, hosts: Collection[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        meant = addressed(scope["raw_path"], scope["headers"], scope["http_version"], self._hosts)
        if isinstance(meant, Refusal):
            # not the sentence for the client: it quotes the client's text, which would defeat the throttle
            _throttle.say(logging.WARNING, f"client={_client(scope)} request rejected: {_NOT_FOR_US[meant.status]}")
            await _refused(meant)(scope, receive, send)
            return
        if meant.path != scope["raw_path"]:
            scope = {**scope, "raw_path": meant.path, "path": unquote(meant.path.decode("latin-1"))}
        await self._app({**scope, "headers": meant.headers}, receive, send)


class _Calls:
    """The endpoint: it reads a call, carries it out and writes the answer; all three count as one request."""

    def __init__(self, answer: Answering, limiter: Limiter, max_message: int, idle_timeout: float) -> None:
        self._answer = answer
        self._limiter = limiter
        self._max_message = max_message
        self._idle_timeout = idle_timeout
        # a client that reads at the slowest allowed rate needs idle_timeout for a piece of this size
        self._piece = max(2**16, int(MIN_RATE * idle_timeout))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        refusal = _unreadable(headers)
        if refusal is None:
            length = int(headers.get("content-length", "0"))  # h11 has checked that it is a number
            try:
                with self._limiter.place(length if length <= self._max_message else 0) as hold:
                    response = await self._response(scope, receive, length, hold)
                    hold(0)
                    await self._write(response, send)
                return
            except Busy as busy:  # only raised before anything is written
                refusal = _busy(busy)
        await refusal(scope, receive, send)

    async def _response(self, scope: Scope, receive: Receive, length: int, hold: Callable[[int], None]) -> Response:
        try:
            message = await self._body(receive, length, "expect" in Headers(scope=scope), hold)
        except ClientDisconnect:
            return Response(status_code=400)  # not sent: the client is gone
        except TimeoutError:
            slow = f"the body of a request must come within {self._idle_timeout:g} s, and {MIN_RATE:,} bytes a second"
            return _refused(Refusal(408, slow, {"Connection": "close"}))
        if message is None:
            # the rest of the body is not read, so the connection cannot be used again
            return _error(413, too_long(self._max_message), {"Connection": "close"})
        with anyio.CancelScope() as call:
            scope.get("state", {})[ON_HANG_UP] = call.cancel
            return _answered(await self._answer(message, scope["caller"]))
        return Response(status_code=400)  # not sent: the client has disconnected

    async def _body(self, receive: Receive, length: int, asks_first: bool, hold: Callable[[int], None]) -> bytes | None:
        """Return the body, or None if it exceeds the limit; never more than the limit is held.

        A body somewhat above the limit is read to its end and discarded: a client that is still sending when the
        connection closes would see a reset instead of the answer.

        Raises:
            Busy: the limiter has no space for the body.
            ClientDisconnect: the client is gone.
            TimeoutError: the body comes too slowly.
        """
        limit = self._max_message
        if length > limit and (asks_first or length > _PATIENCE * limit):
            return None
        body = bytearray()
        came = 0
        began = anyio.current_time()
        more = True
        with anyio.fail_after(self._idle_timeout) as waiting:
            while more and came <= _PATIENCE * limit:
                now = anyio.current_time()
                waiting.deadline = now + patience(now - began, came, self._idle_timeout)
                event = await receive()
                if event["type"] == "http.disconnect":
                    raise ClientDisconnect
                chunk, more = event["body"], event["more_body"]
                came += len(chunk)
                if max(length, came) <= limit:
                    hold(max(length, came))
                    body += chunk
                else:
                    body.clear()
                    hold(0)
        return bytes(body) if came <= limit else None

    async def _write(self, response: Response, send: Send) -> None:
        """Write an answer in pieces, so that at most one piece waits in a slow reader's connection, and the request
        counts against the limits until the reader has almost all of it."""
        await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
        body = response.body
        if len(body) > self._piece:
            for start in range(0, len(body), self._piece):
                piece = body[start : start + self._piece]
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            body = b""
        await send({"type": "http.response.body", "body": body})


class _Authentication:
    """A filter that calls `admit` for every request, with any path and method, and adds CORS headers to answers.

    Before a browser posts JSON, it sends a preflight request without credentials; so a preflight is rejected only for
    its origin. Without the CORS headers, pages of an allowed origin could not call.
    """

    def __init__(self, app: ASGIApp, admit: Callable[[Mapping[str, str]], Caller | Refusal], max_header: int) -> None:
        self._app = app
        self._admit = admit
        self._max_header = max_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        admitted = self._malformed(scope, headers) or self._admit(headers)
        if isinstance(admitted, Refusal) and admitted.status in (403, 431):
            await _refused(admitted)(scope, receive, send)
            return
        asks_first = "expect" in headers
        is_preflight = (
            origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers
        )
        is_open = scope["path"] in (ALIVE, READY)
        if isinstance(admitted, Refusal) and not is_preflight and not (is_open and "authorization" not in headers):
            _throttle.say(logging.WARNING, f"client={_client(scope)} request rejected: {admitted.message}")

        async def receive_asked() -> Message:
            nonlocal asks_first
            asks_first = False
            return await receive()

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                if asks_first:
                    # the client got no 100 Continue, so its next bytes may be the body or the next request
                    answered["Connection"] = "close"
                if origin is not None:
                    answered["Access-Control-Allow-Origin"] = origin
                    answered["Access-Control-Expose-Headers"] = "Retry-After"
                    answered.add_vary_header("Origin")
            await send(message)

        if is_preflight:
            response = Response(
                status_code=204,
                headers={
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": f"Authorization, Content-Type, {VERSION_HEADER}",
                },
            )
            await response(scope, receive_asked, send_readable)
        elif not isinstance(admitted, Refusal):
            await self._app({**scope, "caller": admitted}, receive_asked, send_readable)
        elif is_open:
            await self._app(scope, receive_asked, send_readable)
        else:
            await _refused(admitted)(scope, receive_asked, send_readable)

    def _malformed(self, scope: Scope, headers: Headers) -> Refusal | None:
        """Return why a request is rejected for any caller; None if it is not."""
        # checked again here: the parser accepts a longer head if it comes in one piece
        size = len(scope["raw_path"]) + len(scope["query_string"]) + sum(len(n) + len(v) + 4 for n, v in headers.raw)
        if size > self._max_header:
            return Refusal(
                431, f"the head of a request may have at most {self._max_header:,} bytes", {"Connection": "close"}
            )
        if len(headers.getlist("origin")) > 1:
            return Refusal(403, "expected one header Origin, got several")
        return None


def _client(scope: Scope) -> str:
    """Return the client's address without the port, which differs each time."""
    client = scope.get("client")
    return "an unknown address" if client is None else str(client[0])


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.message + "\n", refusal.status, dict(refusal.headers), "text/plain")


def _answered(reply: bytes | None) -> Response:
    """Return the response for a call's answer; overload also gets HTTP's own status, for load balancers."""
    if reply is None:
        return Response(status_code=202)
    if isinstance(reply, NoRoom):
        again = {"Retry-After": str(math.ceil(reply.retry_after))}
        return Response(reply, 503, again, media_type="application/json")
    return Response(reply, media_type="application/json")


def _busy(busy: Busy) -> Response:
    sentence = f"{busy}; try again in {RETRY_AFTER} s"
    return _refused(Refusal(503, sentence, {"Retry-After": str(RETRY_AFTER)}))


async def _no_such_route(_: Request, problem: Exception) -> Response:
    assert isinstance(problem, HTTPException)
    if problem.status_code == 405:
        allowed = ", ".join(sorted((problem.headers or {})["Allow"].split(", ")))
        return _refused(Refusal(405, f"this address accepts only {allowed}", {"Allow": allowed}))
    return _refused(Refusal(404, f"there is nothing at this address; calls are POSTed to / (see also {WELL_KNOWN})"))


async def _fault(_: Request, _problem: Exception) -> Response:
    """Return the response for an internal error; Starlette passes the exception on to uvicorn, which logs it."""
    return _refused(Refusal(500, "the server failed; its log has the details"))


def _unreadable(headers: Headers) -> Response | None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        came = media_type or "nothing"
        return _refused(Refusal(415, f"Content-Type: expected application/json, got {came}"))
    for version in headers.getlist(VERSION_HEADER):
        if not speaks(version):
            sentence = f"{VERSION_HEADER}: this server speaks {PROTOCOL}, not {version!r}"
            return _error(400, A2MError(Code.PROTOCOL_NOT_SUPPORTED, sentence))
    return None


def _error(status: int, error: A2MError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(render_error(NULL_ID, error), status, headers, "application/json")


def _within_open_files(limits: HttpLimits) -> HttpLimits:
    """Return the limits with at most as many connections as the process may open files.

    Rejecting some connections is better than failing to open a database because of idle ones."""
    if sys.platform == "win32":
        return limits
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return limits
    most = max(1, files - _BACKLOG - _OTHER_FILES)
    if most < limits.max_connections:
        log.info("max_connections=%d in effect instead of %d: `ulimit -n` is %d", most, limits.max_connections, files)
    return msgspec.structs.replace(limits, max_connections=min(most, limits.max_connections))


_NO_SUCH_FAMILY: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of `host`, all with the same port. Raises CannotListen."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    try:
        found = await anyio.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as problem:
        raise CannotListen(f"cannot listen on {where}: {problem.strerror}") from problem
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            actual = sockets[0].getsockname()[1] if sockets else port
            try:
                sockets.append(_bound(family, kind, protocol, (address[0], actual, *address[2:])))
            except OSError as problem:
                # "localhost" resolves to ::1, too, even on machines without IPv6
                if problem.errno not in _NO_SUCH_FAMILY:
                    raise
                missing = problem
        if not sockets and missing is not None:
            raise missing
    except OSError as problem:
        for bound in sockets:
            bound.close()
        raise CannotListen(f"cannot listen on {where}: {_reason(problem)}") from problem
    return sockets


def _bound(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(address)
        # with SO_REUSEADDR two sockets can bind one address; only `listen` fails if it is in use
        bound.listen()
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _reason(problem: OSError) -> str:
    match problem.errno:
        case errno.EADDRINUSE:
            return "another program already listens there; stop it, or choose another port"
        case errno.EACCES:
            return "not permitted; ports below 1024 need privileges"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address"
        case _:
            return problem.strerror or str(problem)
