"""The HTTP binding's client end (§8.3): one POST for one call."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from itertools import count
from typing import Any, Final

import anyio
import httpx
from msgspec import Raw

from router.a2m.capabilities import PROTOCOL, VERSION_HEADER
from router.a2m.client import AnswerTooLong, ConnectionLost, NoAnswer, Settled, Unanswered, settled
from router.a2m.jsonrpc import MalformedMessage, Reply, parse_reply, render_call
from router.a2m.lines import DEFAULT_MAX_MESSAGE

# when a connection is closed, nothing tells whether the server goes on with the call; this long it may
SETTLING: Final = 30.0
# of these nothing can have reached the server
_NEVER_SENT: Final = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.PoolTimeout,
    httpx.UnsupportedProtocol,
    httpx.LocalProtocolError,
)


class HttpFailure(ConnectionLost):
    """The server, or something before it, answered with another HTTP status than the protocol's (§8.3)."""


@asynccontextmanager
async def connect_http(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    max_message: int = DEFAULT_MAX_MESSAGE,
    settling: float = SETTLING,
) -> AsyncIterator["HttpClient"]:
    """A client of the server at `url`; see `HttpClient`. The environment's proxies are not used."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4)
    async with httpx.AsyncClient(
        headers=headers, timeout=None, follow_redirects=False, trust_env=False, limits=limits
    ) as client:
        yield HttpClient(client, url, max_message=max_message, settling=settling)


class HttpClient:
    """A `Peer` over HTTP. It holds no connection that could be lost, so `lost` is never set.

    Args:
        client: without a timeout of its own, and not following redirects.
        max_message: bytes in an answer.
        settling: seconds after which a call whose answer did not come counts as settled.
    """

    def __init__(
        self, client: httpx.AsyncClient, url: str, *, max_message: int = DEFAULT_MAX_MESSAGE, settling: float = SETTLING
    ) -> None:
        self.lost = anyio.Event()
        self.reason: str | None = None
        self._client = client
        self._url = url
        self._max_message = max_message
        self._settling = settling
        self._ids = count(1)

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> Raw:
        answered = False
        certain: Settled | None = None
        try:
            with anyio.fail_after(timeout):
                status, body = await self._post(render_call(next(self._ids), method, params))
            if body is None:
                raise AnswerTooLong(f"an answer of more than {self._max_message:,} bytes", self._later())
            answered = status < 500  # a gateway's 502 or 504 does not end what is behind it
            reply = self._read(status, body)
        except TimeoutError:
            certain = self._later()
            raise NoAnswer(f"no answer within {timeout:g} s", certain) from None
        except httpx.HTTPError as problem:
            certain = settled() if isinstance(problem, _NEVER_SENT) else self._later()
            raise ConnectionLost(_sentence(problem), certain) from problem
        except Unanswered as problem:
            certain = problem.settled
            raise
        finally:
            if not answered and on_unsettled is not None:
                certain = certain or self._later()
                if not certain.is_set():
                    on_unsettled(certain)
        if reply.error is not None:
            raise reply.error
        assert reply.result is not None
        return reply.result

    async def _post(self, message: bytes) -> tuple[int, bytes | None]:
        """The answer's status and body; None for a body of more than `max_message`."""
        # nothing compressed: a few bytes that come may be many that are held
        headers = {
            "Content-Type": "application/json",
            "Accept": "application/json",
            "Accept-Encoding": "identity",
            VERSION_HEADER: PROTOCOL,
        }
        body = bytearray()
        with anyio.CancelScope() as reading:
            async with self._client.stream("POST", self._url, content=message, headers=headers) as response:
                async for chunk in response.aiter_bytes():
                    body += chunk
                    if len(body) > self._max_message:
                        # to leave the loop would leave the generators beneath it unclosed; this ends the innermost
                        reading.cancel()
        return response.status_code, bytes(body) if len(body) <= self._max_message else None

    def _read(self, status: int, body: bytes) -> Reply:
        certain = settled() if status < 500 else self._later()
        try:
            reply = parse_reply(body)
        except MalformedMessage as malformed:
            if status == 200:
                raise NoAnswer(f"an answer that cannot be read: {malformed.message}", certain) from None
            reply = None
        if isinstance(reply, Reply) and (status == 200 or reply.error is not None):
            return reply
        raise HttpFailure(_status(status, body), certain)

    def _later(self) -> Settled:
        return _SettledAt(anyio.current_time() + self._settling)


class _SettledAt:
    """Settled by the clock."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def is_set(self) -> bool:
        return anyio.current_time() >= self._moment

    async def wait(self) -> None:
        await anyio.sleep_until(self._moment)


def _status(status: int, body: bytes) -> str:
    try:
        named = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        named = str(status)
    if 300 <= status < 400:
        return f"HTTP {named}: redirects are not followed; use the address that it leads to"
    said = " ".join(body[:200].decode("utf-8", "replace").split())
    return f"HTTP {named}: {said}" if said else f"HTTP {named}"


def _sentence(problem: httpx.HTTPError) -> str:
    what = str(problem) or type(problem).__name__
    return f"cannot be reached: {what}" if isinstance(problem, _NEVER_SENT) else f"the connection broke: {what}"
