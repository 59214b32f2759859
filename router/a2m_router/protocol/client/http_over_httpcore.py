"""HTTP/1.1 and HTTP/2, on asyncio and trio, by httpcore, on which httpx is built.

When a caller gives up a call, the pool of connections is retired: other calls on it finish there, and new calls get a
new pool. With HTTP/2 all calls share a connection, and after a cancelled call the library leaves two things in it:
unsent parts of the message, which might be sent much later, and the unread answer, which uses up the server's window.
"""

import logging
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import httpcore
import httpx

from a2m_router.protocol.client.http_exchange import KEPT_ALIVE, Answer, Broken, Exchange, Posting, reason_of

# seconds for connections to close
_CLOSING: Final = 1.0


@asynccontextmanager
async def exchange_over_httpcore(
    url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_message: int, *, http2: bool
) -> AsyncIterator[Exchange]:
    """Yield an exchange with `url` for the block; see `connect_http`."""
    # at lower levels hpack logs the headers of requests, including tokens
    logging.getLogger("hpack").setLevel(logging.WARNING)

    def connect() -> httpcore.AsyncConnectionPool:
        return httpcore.AsyncConnectionPool(
            ssl_context=tls,
            max_connections=None,
            keepalive_expiry=KEPT_ALIVE,
            http2=http2,
            network_backend=_Network(),
        )

    exchange = _OverHttpcore(connect, url, headers, max_message)
    try:
        yield exchange
    finally:
        await exchange.close()


class _Line:
    """A pool of connections, and the number of calls in progress on them."""

    def __init__(self, pool: httpcore.AsyncConnectionPool) -> None:
        self.pool = pool
        self.calls = 0

    async def close(self) -> None:
        with anyio.move_on_after(_CLOSING, shield=True):
            await self.pool.aclose()


class _OverHttpcore:
    def __init__(
        self,
        connect: Callable[[], httpcore.AsyncConnectionPool],
        url: str,
        headers: Mapping[str, str],
        max_message: int,
    ) -> None:
        self._connect = connect
        self._url = url
        self._headers = headers
        self._max_message = max_message
        self._line = _Line(connect())

    async def post(self, posting: Posting) -> Answer:
        line = self._line
        line.calls += 1
        whole = False
        try:
            answer = await self._post(line.pool, posting)
            whole = answer.body is not None
        except Exception as problem:  # noqa: BLE001 - any failure of the library is this tier's fault, not the router's
            raise Broken(reason_of(problem, _reason(problem))) from None
        finally:
            line.calls -= 1
            if not whole and line is self._line:
                self._line = _Line(self._connect())
            if line is not self._line and line.calls == 0:
                await line.close()
        return answer

    async def close(self) -> None:
        await self._line.close()

    async def _post(self, pool: httpcore.AsyncConnectionPool, posting: Posting) -> Answer:
        url = httpx.URL(self._url)
        request = httpcore.Request(
            "POST",
            httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=url.port, target=url.raw_path),
            headers=httpx.Headers(
                {"Host": url.netloc.decode("ascii"), **self._headers, "Content-Length": str(len(posting.message))}
            ).raw,
            content=_Body(posting),
        )
        response = await pool.handle_async_request(request)
        headers = httpx.Headers(response.headers)
        try:
            body = await self._read(response, headers.get("Content-Length", ""))
        finally:
            await response.aclose()
        return Answer(response.status, body, headers.get("Content-Encoding", ""))

    async def _read(self, response: httpcore.Response, length: str) -> bytes | None:
        if length.isdecimal() and int(length) > self._max_message:
            return None
        body = bytearray()
        with anyio.CancelScope() as reading:
            async for chunk in response.aiter_stream():
                body += chunk
                if len(body) > self._max_message:
                    # not `break`: that would leave the generators of the library unclosed; a cancellation closes them
                    reading.cancel()
        return bytes(body) if len(body) <= self._max_message else None


class _Body:
    """A message as an iterator for httpcore's writer.

    The writer calls it once there is a connection. Only the head of the request may be sent before `sent` is set, and a
    server carries out nothing without the body. A generator would stay unclosed when a call is cancelled."""

    def __init__(self, posting: Posting) -> None:
        self._posting = posting
        self._taken = False

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._taken:
            raise StopAsyncIteration
        self._taken = self._posting.sent = True
        return self._posting.message


class _Network(httpcore.AnyIOBackend):
    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        return _Stream(await super().connect_tcp(host, port, timeout, local_address, socket_options))


class _Stream(httpcore.AsyncNetworkStream):
    """A connection that is closed when a call is cancelled during the TLS handshake; the library's own stays open."""

    def __init__(self, stream: httpcore.AsyncNetworkStream) -> None:
        self._stream = stream

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return await self._stream.read(max_bytes, timeout)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        await self._stream.write(buffer, timeout)

    async def aclose(self) -> None:
        await self._stream.aclose()

    async def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.AsyncNetworkStream:
        try:
            return await self._stream.start_tls(ssl_context, server_hostname, timeout)
        except BaseException:
            with anyio.move_on_after(_CLOSING, shield=True):
                await self.aclose()
            raise

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _reason(problem: Exception) -> str:
    match problem:
        case httpcore.RemoteProtocolError():
            return "it has ended the connection, or its answer is not HTTP"
        case httpx.InvalidURL() | httpcore.UnsupportedProtocol():
            return "its address is not a valid URL"
        case _:
            return type(problem).__name__
