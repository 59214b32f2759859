"""The HTTP binding's client end (§8.3): one POST for one call.

An exchange carries the POST. There are three kinds, each loaded at its first use:

- over aiohttp, for HTTP/1.1 on asyncio. It needs a third of httpx's time, and with sixteen calls at once an eighth,
  since httpx examines all of its connections whenever a call begins or ends;
- over httpcore, on which httpx is built, for HTTP/2, and on trio;
- over h11, for programs that must start fast and make few calls, without TLS. It keeps no connection.

In all three, a redirect is an ordinary answer, proxies from the environment are not used, and cookies are not kept.
"""

import asyncio
import math
import re
import ssl
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from http import HTTPStatus
from itertools import count
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import certifi
import msgspec
from msgspec import Raw

from a2m_router.protocol.client.client import (
    AnswerTooLong,
    ConnectionLost,
    NoAnswer,
    Settled,
    TooLate,
    Unanswered,
    settled,
)
from a2m_router.protocol.client.http_coding import unpacked
from a2m_router.protocol.client.http_exchange import Answer, Broken, Exchange, Posting
from a2m_router.protocol.wire.capabilities import PROTOCOL, VERSION_HEADER
from a2m_router.protocol.wire.errors import A2MError, cut, unanswered_in
from a2m_router.protocol.wire.jsonrpc import MalformedMessage, Reply, parse_reply, render_call
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE

# seconds that a server may still work on a call after its connection was closed: over HTTP the client cannot see that
SETTLING: Final = 30.0
# an address without TLS, and without characters that must be encoded
_PLAIN: Final = re.compile(r"http://[\x21-\x7e]+")
# bytes of a response body that are read for an error text: enough for its beginning on one line
_SAID: Final = 4096
# characters quoted of an answer that cannot be read: enough to recognise it
_SHOWN: Final = 80
# appended to an error while no call has ever been answered from the address
_NO_SERVER: Final = "; is there an A2M server at this address? `a2m-rag http` puts one before a search service"
# statuses that a server other than A2M's may send for a POST of JSON. Requests for a token (401) or for patience (429,
# 503) are not among them: an A2M server sends these, too
_STRANGE: Final = frozenset({400, 404, 405, 406, 410, 411, 415, 422, 426, 501})
# no compression: on a short way it costs more time than it saves
_HEADERS: Final = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    VERSION_HEADER: PROTOCOL,
}


class HttpFailure(ConnectionLost):
    """The server, or a proxy before it, answered with an HTTP status that the protocol does not use (§8.3)."""


@asynccontextmanager
async def connect_http(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    ca_file: Path | None = None,
    http2: bool = False,
    max_message: int = DEFAULT_MAX_MESSAGE,
    settling: float = SETTLING,
    few: bool = False,
) -> AsyncIterator["HttpClient"]:
    """Yield a client of the server at `url`, with its own connections; see `HttpClient`. It sends nothing by itself.

    Args:
        headers: sent with each call; they cannot replace those of the protocol. Their values are secrets.
        ca_file: certificates in PEM that the server's must be signed by. None trusts the authorities in certifi's list.
        http2: use HTTP/2 if the server offers it, which only https can (RFC 9113 §3).
        few: for a few calls: where possible, libraries that are slow to load are not used.

    Raises:
        ValueError: the URL contains a user or a password.
        OSError: the `ca_file` cannot be used.
    """
    if "@" in urlsplit(url).netloc:
        raise ValueError("the address must not hold a user or a password; send them in the header Authorization")
    given = headers or {}
    ours = {name.lower() for name in _HEADERS}
    sent = {"User-Agent": "a2m-router"}
    sent |= {name: value for name, value in given.items() if name.lower() not in ours}
    tls = _trusting(ca_file) if urlsplit(url).scheme == "https" else None
    async with _exchange(url, sent | _HEADERS, tls, max_message, http2=http2, few=few) as exchange:
        yield HttpClient(exchange, secrets=given.values(), max_message=max_message, settling=settling)


class HttpClient:
    """A `Peer` over HTTP. It has no permanent connection, so `lost` is never set.

    Args:
        secrets: values of headers, which no error may quote even if the server repeats them.
        max_message: bytes in an answer; the exchange enforces it.
        settling: seconds after which a call without an answer counts as settled.
    """

    def __init__(
        self,
        exchange: Exchange,
        *,
        secrets: Collection[str] = (),
        max_message: int = DEFAULT_MAX_MESSAGE,
        settling: float = SETTLING,
    ) -> None:
        self.lost = anyio.Event()
        self.reason: str | None = None
        self.heard = -math.inf
        self._exchange = exchange
        self._secrets = secrets
        self._max_message = max_message
        self._settling = settling
        self._speaks = False  # whether any call has ever been answered
        self._ids = count(1)

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> Raw:
        id = next(self._ids)
        posting = Posting(render_call(id, method, params))
        answered = False
        certain: Settled | None = None
        try:
            with anyio.fail_after(timeout):
                answer = await self._exchange.post(posting)
            body = self._plain(answer)
            answered = answer.status < 500  # after a gateway's 502 or 504, the server behind it may still work
            reply = self._read(answer.status, body)
            if reply.error is None or not unanswered_in(reply.error):
                self.heard = anyio.current_time()
            if bytes(reply.id) == str(id).encode():
                answered = self._speaks = True  # with any status: only the server itself can know the id
            elif not answered:
                raise HttpFailure(_status(answer.status, body, self._secrets), self._later())
            elif reply.error is None or bytes(reply.id) != b"null":
                # only an error may have a null id, if the server could not read the call's
                answered = False
                reason = f"an answer to another call: id {bytes(reply.id)!r:.80}{self._doubt(answer.status)}"
                raise NoAnswer(reason, self._certain(posting))
        except TimeoutError:
            certain = self._certain(posting)
            what = "answer" if posting.sent else "connection"
            raise TooLate(f"no {what} within {round(timeout or 0.0, 2):g} s", certain) from None
        except Broken as problem:
            certain = self._certain(posting)
            what = "the connection broke" if posting.sent else "cannot be reached"
            raise ConnectionLost(f"{what}: {problem}", certain) from None
        except Unanswered as problem:
            certain = problem.settled
            raise
        finally:
            if not answered and on_unsettled is not None:
                certain = certain or self._certain(posting)
                if not certain.is_set():
                    on_unsettled(certain)
        if reply.error is not None:
            error = reply.error
            raise A2MError(error.code, _without(self._secrets, error.message), self._bare(error.data))
        assert reply.result is not None
        return reply.result

    def _bare(self, data: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
        """Return an error's details without the secrets that were sent to the server."""
        if data is None:
            return None
        text = msgspec.json.encode(data).decode()
        bare = _without(self._secrets, text)
        return data if bare == text else {"detail": bare}

    def _plain(self, answer: Answer) -> bytes:
        """Return the answer's body, decompressed: some servers compress unasked."""
        body: bytes | None = answer.body
        if body is not None:
            try:
                body = unpacked(body, answer.coding, self._max_message)
            except ValueError as problem:
                if answer.status != 200:
                    return b""  # an unreadable body must not hide the status
                raise NoAnswer(f"an answer that cannot be read: {problem}", self._settled_by(answer.status)) from None
        if body is None:
            raise AnswerTooLong(f"an answer of more than {self._max_message:,} bytes", self._later())
        return body

    def _read(self, status: int, body: bytes) -> Reply:
        try:
            reply = parse_reply(body)
        except MalformedMessage as malformed:
            if status == 200:
                raise self._unreadable(malformed.message, body) from None
            reply = None
        if isinstance(reply, Reply) and (status == 200 or reply.error is not None):
            return reply
        if status == 200:
            raise self._unreadable("a notification, where the answer to a call is expected", body)
        raise HttpFailure(_status(status, body, self._secrets) + self._doubt(status), self._settled_by(status))

    def _unreadable(self, why: str, body: bytes) -> NoAnswer:
        came = _beginning(body, self._secrets)[:_SHOWN]
        what = f"it begins with {came!r}" if came else "it is empty"
        return NoAnswer(f"an answer that cannot be read: {why}; {what}{self._doubt(200)}", settled())

    def _doubt(self, status: int) -> str:
        """Return a hint that the address may have no A2M server, while no call has ever been answered from it."""
        return _NO_SERVER if not self._speaks and (status == 200 or status in _STRANGE) else ""

    def _settled_by(self, status: int) -> Settled:
        return settled() if status < 500 else self._later()

    def _certain(self, posting: Posting) -> Settled:
        return self._later() if posting.sent else settled()

    def _later(self) -> Settled:
        return _SettledAt(anyio.current_time() + self._settling)


class _SettledAt:
    """A call that is settled at a given time."""

    def __init__(self, moment: float) -> None:
        self._moment = moment

    def is_set(self) -> bool:
        return anyio.current_time() >= self._moment

    async def wait(self) -> None:
        await anyio.sleep_until(self._moment)


def _exchange(
    url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_message: int, *, http2: bool, few: bool
) -> AbstractAsyncContextManager[Exchange]:
    # imported here, since two of them are slow to load, and mostly one is needed
    if few and _PLAIN.fullmatch(url):
        from a2m_router.protocol.client.http_over_h11 import OverH11

        return nullcontext(OverH11(url, headers, max_message))
    if http2 or not _on_asyncio():
        from a2m_router.protocol.client.http_over_httpcore import exchange_over_httpcore

        return exchange_over_httpcore(url, headers, tls, max_message, http2=http2)
    from a2m_router.protocol.client.http_over_aiohttp import exchange_over_aiohttp

    return exchange_over_aiohttp(url, headers, tls, max_message)


def _on_asyncio() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _trusting(ca_file: Path | None) -> ssl.SSLContext:
    """Return a client's TLS context; raise OSError, with a sentence, if the file is not PEM with certificates."""
    try:
        context = ssl.create_default_context(cafile=ca_file or certifi.where())
    except OSError as problem:  # ssl.SSLError is a subclass
        why = "it contains no certificate" if isinstance(problem, ssl.SSLError) else problem.strerror
        raise OSError(f"{ca_file or certifi.where()} cannot be used as ca_file: {why}") from None
    context.set_alpn_protocols(["http/1.1"])  # httpx's transport sets its own
    return context


def _status(status: int, body: bytes, secrets: Collection[str]) -> str:
    try:
        named = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        named = str(status)
    if 300 <= status < 400:
        return f"HTTP {named}: redirects are not followed; use the address that it leads to"
    text = cut(_beginning(body, secrets))
    return f"HTTP {named}: {text}" if text else f"HTTP {named}"


def _beginning(body: bytes, secrets: Collection[str]) -> str:
    """Return the beginning of a body, on one line and without secrets."""
    return _without(secrets, " ".join(body[:_SAID].decode("utf-8", "replace").split()))


def _without(secrets: Collection[str], text: str) -> str:
    """Return a server's text with the secrets that were sent to it removed."""
    bare = [secret.partition(" ")[2].strip() for secret in secrets]  # without e.g. "Bearer "
    for secret in sorted([*secrets, *bare], key=len, reverse=True):
        if len(secret) > 3:  # a shorter one protects nothing, and is part of many words
            text = text.replace(secret, "…")
    return text
