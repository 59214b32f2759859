"""HTTP/1.1 and HTTP/2, on asyncio and trio, by httpcore, which is what carries httpx.

A call that is given up takes its connections with it: others under way on them go on to their end, new ones go over new
ones. On HTTP/2 all calls share a connection, and the library leaves in there what a call was given up over: what it had
not yet written, which might leave long after, and an answer that nobody takes, which fills up what the server may send.
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
    """Carries messages to `url` while the block lasts; see `connect_http`."""
    # it writes the headers of a request into the log, and tokens with them
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
    """A pool of connections, and how many calls are under way on them."""

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
        except Exception as problem:  # noqa: BLE001 - whatever goes wrong in there is this tier's trouble, not the router's
            raise Broken(reason_of(problem, _said(problem))) from None
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
                    # to leave the loop would leave the generators beneath it unclosed; this ends the innermost
                    reading.cancel()
        return bytes(body) if len(body) <= self._max_message else None


class _Body:
    """A message as httpcore's writer takes it. It is asked for when there is a connection; with no more than the head
    of a request nothing can be carried out. A generator would be left unclosed when the call is given up."""

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
    """A connection that does not stay behind when a call is given up while TLS begins, as the library's own does."""

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


def _said(problem: Exception) -> str:
    match problem:
        case httpcore.RemoteProtocolError():
            return "it has ended the connection, or what it answers is not HTTP"
        case httpx.InvalidURL() | httpcore.UnsupportedProtocol():
            return "its address is none that can be called"
        case _:
            return type(problem).__name__
