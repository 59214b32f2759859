"""The HTTP binding's server end (§8.3): POST one message, get one answer.

What is decided, in this order and before any JSON-RPC work: may this caller come in (403, 401), is there such a door
(404, 405), is it JSON (415), of this version (400), of bearable size (413). From there on, errors are answers with 200.
"""

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import anyio
import anyio.abc
import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.a2m.capabilities import PROTOCOL, VERSION_HEADER, speaks
from router.a2m.errors import A2MError, Code
from router.a2m.jsonrpc import NULL_ID, render_error, too_long
from router.a2m.lines import DEFAULT_MAX_MESSAGE
from router.a2m.server import Answering, Caller

WELL_KNOWN: Final = "/.well-known/a2m-server.json"

# calls under way when the server is asked to stop get this long; a deadline of a tier (5 s by default) fits into it
_GRACE: Final = 10
# idle connections are kept longer than clients keep them: if the server closed first, a call could be lost to that
_KEEP_ALIVE: Final = 30
# a body of up to this many times its limit is read to its end before it is refused
_PATIENCE: Final = 4


class Refusal(msgspec.Struct, frozen=True):
    """Why a caller does not come in: an HTTP status, a sentence, and headers that go with it."""

    status: int
    message: str
    headers: Mapping[str, str] = {}


class CannotListen(Exception):
    """The address cannot be listened on; the message is one sentence that says why."""


def application(
    answer: Answering,
    *,
    admit: Callable[[Mapping[str, str]], Caller | Refusal],
    profile: Callable[[Caller], Awaitable[Any]],
    max_message: int = DEFAULT_MAX_MESSAGE,
) -> Starlette:
    """The HTTP binding around `answer`.

    Args:
        answer: must not raise.
        admit: who a request with these headers (names in any case) comes from, or why it is refused.
        profile: the `memory/describe` result shown to a caller at WELL_KNOWN (§8.3.3).
        max_message: bytes in a body; a longer one is refused with 413 without being held.
    """

    async def call(request: Request) -> Response:
        refusal = _unreadable(request.headers)
        if refusal is not None:
            return refusal
        try:
            message = await _body(request, max_message)
        except ClientDisconnect:
            return Response(status_code=400)  # to nobody
        if message is None:
            # what may be left of the body is not worth reading, so the connection cannot be used again
            return _error(413, too_long(max_message), {"Connection": "close"})
        reply = await answer(message, request.scope["caller"])
        if reply is None:
            return Response(status_code=202)
        return Response(reply, media_type="application/json")

    async def describe(request: Request) -> Response:
        return Response(msgspec.json.encode(await profile(request.scope["caller"])), media_type="application/json")

    return Starlette(
        routes=[Route("/", call, methods=["POST"]), Route(WELL_KNOWN, describe, methods=["GET"])],
        middleware=[Middleware(_Door, admit=admit)],
    )


async def serve_http(
    app: ASGIApp,
    host: str,
    port: int,
    *,
    task_status: anyio.abc.TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Serves until cancelled; `HttpServer` is for those who want to stop it in another way.

    Raises CannotListen.
    """
    await HttpServer(app, host, port).serve(task_status=task_status)


class HttpServer:
    """An ASGI application, served by uvicorn on asyncio.

    Args:
        host: a name or an address, IPv6 without brackets; a name is listened on at all its addresses.
        port: 0 takes a free one.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._port = port
        self._stop = anyio.Event()

    def stop(self) -> None:
        """Asks `serve` to end: nothing new is accepted, calls under way are answered within 10 s."""
        self._stop.set()

    async def serve(self, *, task_status: anyio.abc.TaskStatus[tuple[str, int]] = anyio.TASK_STATUS_IGNORED) -> None:
        """Serves until `stop` or cancelled; either way connections are closed when it returns.

        `task_status` is given the host and the actual port, once connections are accepted. Raises CannotListen.
        """
        sockets = await _listen(self._host, self._port)
        bound: int = sockets[0].getsockname()[1]
        server = _Uvicorn(
            uvicorn.Config(
                self._app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.WARNING,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_GRACE,
            ),
            lambda: task_status.started((self._host, bound)),
        )

        async def run() -> None:
            # a cancellation must not tear uvicorn from its connections; what ends it is should_exit, within _GRACE
            with anyio.CancelScope(shield=True):
                await server.serve(sockets)
                for connection in list(server.server_state.connections):
                    connection.transport.abort()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run)
            try:
                await self._stop.wait()
            finally:
                server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """Signals are the caller's business, and it wants to know when connections are accepted."""

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()


class _Door:
    """Asks `admit` about every request, whatever its path and method, and lets admitted browsers read the answers.

    A browser asks before it posts JSON (a preflight), and it asks without credentials: only the refusal of its origin
    counts there. Without these headers an origin that is listed could not call.
    """

    def __init__(self, app: ASGIApp, admit: Callable[[Mapping[str, str]], Caller | Refusal]) -> None:
        self._app = app
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        admitted = self._admit(headers)
        if isinstance(admitted, Refusal) and admitted.status == 403:
            await _refused(admitted)(scope, receive, send)
            return

        async def send_readable(message: Message) -> None:
            if origin is not None and message["type"] == "http.response.start":
                answered = MutableHeaders(scope=message)
                answered["Access-Control-Allow-Origin"] = origin
                answered.add_vary_header("Origin")
            await send(message)

        if origin is not None and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            response = Response(
                status_code=204,
                headers={
                    "Access-Control-Allow-Methods": "GET, POST",
                    "Access-Control-Allow-Headers": f"Authorization, Content-Type, {VERSION_HEADER}",
                },
            )
            await response(scope, receive, send_readable)
        elif isinstance(admitted, Refusal):
            await _refused(admitted)(scope, receive, send_readable)
        else:
            await self._app({**scope, "caller": admitted}, receive, send_readable)


def _refused(refusal: Refusal) -> Response:
    return Response(refusal.message + "\n", refusal.status, dict(refusal.headers), "text/plain")


def _unreadable(headers: Headers) -> Response | None:
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        came = media_type or "nothing"
        return _refused(Refusal(415, f"Content-Type: expected application/json, got {came}"))
    version = headers.get(VERSION_HEADER)
    if version is not None and not speaks(version):
        sentence = f"{VERSION_HEADER}: this server speaks {PROTOCOL}, not {version!r}"
        return _error(400, A2MError(Code.PROTOCOL_NOT_SUPPORTED, sentence))
    return None


def _error(status: int, error: A2MError, headers: Mapping[str, str] | None = None) -> Response:
    return Response(render_error(NULL_ID, error), status, headers, "application/json")


async def _body(request: Request, limit: int) -> bytes | None:
    """The body, or None if it is longer than `limit`; no more than that is ever held.

    Some more than the limit is read and thrown away: a client that is still sending when the connection closes sees a
    reset and not the answer.
    """
    headers = request.headers
    length = int(headers.get("content-length", "0"))  # h11 has seen to it that it is a number
    if length > limit and ("expect" in headers or length > _PATIENCE * limit):
        return None
    body = bytearray()
    came = 0
    async for chunk in request.stream():
        came += len(chunk)
        if came <= limit:
            body += chunk
        elif came <= _PATIENCE * limit:
            body.clear()
        else:
            break
    return bytes(body) if came <= limit else None


_NO_SUCH_FAMILY: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})


async def _listen(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to every address of `host`, all to the same port. Raises CannotListen."""
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
                # "localhost" is ::1 as well, also on machines without IPv6
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
        # two sockets with SO_REUSEADDR can be bound to one address; that it is in use shows when they listen
        bound.listen()
        bound.setblocking(False)
    except BaseException:
        bound.close()
        raise
    return bound


def _reason(problem: OSError) -> str:
    match problem.errno:
        case errno.EADDRINUSE:
            return "another program is listening there already; stop it, or choose another port"
        case errno.EACCES:
            return "not permitted; ports below 1024 need privileges"
        case errno.EADDRNOTAVAIL:
            return "this machine has no such address"
        case _:
            return problem.strerror or str(problem)
