"""HTTP/1.1 on asyncio, by aiohttp: one connection for each call in progress, kept for a while for the next one."""

import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import aiohttp.abc
import aiohttp.connector
import anyio

from a2m_router.protocol.client.http_exchange import KEPT_ALIVE, Answer, Broken, Exchange, Posting, reason_of

# seconds for connections to close
_CLOSING: Final = 1.0


@asynccontextmanager
async def exchange_over_aiohttp(
    url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_message: int
) -> AsyncIterator[Exchange]:
    """Yield an exchange with `url` for the block; see `connect_http`."""
    connector = _Connector(
        limit=0,
        keepalive_timeout=KEPT_ALIVE,
        ssl=tls or True,
        resolver=aiohttp.ThreadedResolver(),  # the system's, even if aiodns is installed
    )
    session = aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(),  # none: the caller has its own deadlines
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trust_env=False,
    )
    try:
        yield _OverAiohttp(session, url, max_message)
    finally:
        with anyio.move_on_after(_CLOSING, shield=True):
            await session.close()


class _Connector(aiohttp.TCPConnector):
    """A connector that never reuses a connection with unread data: that would be read as the next call's answer."""

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> aiohttp.connector.Connection:
        while True:
            connection = await super().connect(req, traces, timeout)
            if connection.protocol is None or not connection.protocol.should_close:
                return connection
            connection.close()


class _OverAiohttp:
    def __init__(self, session: aiohttp.ClientSession, url: str, max_message: int) -> None:
        self._session = session
        self._url = url
        self._max_message = max_message

    async def post(self, posting: Posting) -> Answer:
        try:
            response = await self._session.post(self._url, data=_Body(posting), allow_redirects=False)
            try:
                body = await self._read(response)
            finally:
                # a connection whose answer was read to its end is already back in the pool; this closes any other
                response.close()
        except Exception as problem:  # noqa: BLE001 - any failure of the library is this tier's fault, not the router's
            raise Broken(reason_of(problem, _reason(problem))) from None
        return Answer(response.status, body, ", ".join(response.headers.getall("Content-Encoding", [])))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes | None:
        if (response.content_length or 0) > self._max_message:
            return None
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self._max_message:
                return None
        return bytes(body)


class _Body(aiohttp.payload.Payload):
    """A message as a payload for aiohttp's writer.

    The writer calls it once there is a connection. Only the head of the request may be sent before `sent` is set, and a
    server carries out nothing without the body."""

    _autoclose = True  # it holds nothing that must be closed

    def __init__(self, posting: Posting) -> None:
        super().__init__(posting, content_type="application/json")
        self._posting = posting
        self._size = len(posting.message)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._posting.message.decode(encoding, errors)

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        self._posting.sent = True
        await writer.write(self._posting.message)


def _reason(problem: Exception) -> str:
    match problem:
        case aiohttp.ServerDisconnectedError():
            return "it has ended the connection"
        case aiohttp.ClientPayloadError():
            return "its answer broke off"
        case aiohttp.ClientResponseError():
            return "its answer is not HTTP"
        case aiohttp.InvalidURL():
            return "its address is not a valid URL"
        case _:
            return type(problem).__name__
