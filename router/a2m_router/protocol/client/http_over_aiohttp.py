"""HTTP/1.1 on asyncio, by aiohttp: a connection for each call under way, kept for a while for the next one."""

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
    """Carries messages to `url` while the block lasts; see `connect_http`."""
    connector = _Connector(
        limit=0,
        keepalive_timeout=KEPT_ALIVE,
        ssl=tls or True,
        resolver=aiohttp.ThreadedResolver(),  # the system's, whatever else happens to be installed
    )
    session = aiohttp.ClientSession(
        connector=connector,
        headers=headers,
        timeout=aiohttp.ClientTimeout(),  # the caller has deadlines of its own
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
    """Gives no connection out in which something waits: what came unasked would be taken for the next call's answer."""

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
                # a connection whose answer was read to its end has been given back by now; any other is closed
                response.close()
        except Exception as problem:  # noqa: BLE001 - whatever goes wrong in there is this tier's trouble, not the router's
            raise Broken(reason_of(problem, _said(problem))) from None
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
    """A message as aiohttp's writer takes it. It is asked for when there is a connection; with no more than the head of
    a request nothing can be carried out."""

    _autoclose = True  # there is nothing to close

    def __init__(self, posting: Posting) -> None:
        super().__init__(posting, content_type="application/json")
        self._posting = posting
        self._size = len(posting.message)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self._posting.message.decode(encoding, errors)

    async def write(self, writer: aiohttp.abc.AbstractStreamWriter) -> None:
        self._posting.sent = True
        await writer.write(self._posting.message)


def _said(problem: Exception) -> str:
    match problem:
        case aiohttp.ServerDisconnectedError():
            return "it has ended the connection"
        case aiohttp.ClientPayloadError():
            return "its answer broke off"
        case aiohttp.ClientResponseError():
            return "what it answers is not HTTP"
        case aiohttp.InvalidURL():
            return "its address is none that can be called"
        case _:
            return type(problem).__name__
