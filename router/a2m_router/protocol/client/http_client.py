"""The HTTP binding's client end (§8.3): one POST for one call.

What carries a POST is an exchange, and there are three, each loaded when it is first wanted:

- aiohttp's, for HTTP/1.1 on asyncio. It takes a third of the time that httpx does, and with sixteen calls under way an
  eighth, since httpx looks at each of its connections whenever a call begins or ends;
- httpcore's, which is what carries httpx, where HTTP/2 is wanted, and on trio;
- h11's, for a program that is to begin at once and makes few calls, where there is no TLS. It keeps no connection.

Over all a redirect is an answer like others, the environment's proxies are not used, and no cookie is kept.
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

# when a connection is closed, nothing tells whether the server goes on with the call; this long it may
SETTLING: Final = 30.0
# an address that needs neither TLS nor another spelling
_PLAIN: Final = re.compile(r"http://[\x21-\x7e]+")
# bytes of what a server says beside its status, enough for its beginning on one line
_SAID: Final = 4096
# characters of an answer that cannot be read: enough to know it by
_SHOWN: Final = 80
# said of an address from which no answer to a call has ever come
_NO_SERVER: Final = "; is there an A2M server at this address? `a2m-rag http` puts one before a search service"
# what such an address may answer to a POST of JSON. Who asks for a token, or for patience, may be one all the same
_STRANGE: Final = frozenset({400, 404, 405, 406, 410, 411, 415, 422, 426, 501})
# nothing compressed is asked for: on the way to a neighbour it costs more time than it saves
_HEADERS: Final = {
    "Content-Type": "application/json",
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    VERSION_HEADER: PROTOCOL,
}


class HttpFailure(ConnectionLost):
    """The server, or something before it, answered with another HTTP status than the protocol's (§8.3)."""


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
    """A client of the server at `url`, with connections of its own; see `HttpClient`. Nothing is sent before a call is.

    Args:
        headers: sent with each call beside those of the protocol, which they do not change. Their values are secrets.
        ca_file: certificates in PEM; a server's must be by one of these. None trusts the authorities in certifi's list.
        http2: where the server offers it, which only https can (RFC 9113 §3).
        few: whether few calls will be made, and soon; then what takes long to load is not loaded, as far as that goes.

    Raises ValueError for a URL with a user or a password, OSError for a `ca_file` that cannot be used.
    """
    if "@" in urlsplit(url).netloc:
        raise ValueError("the address must not hold a user or a password; they go into a header, Authorization")
    given = headers or {}
    ours = {name.lower() for name in _HEADERS}
    sent = {"User-Agent": "a2m-router"}
    sent |= {name: value for name, value in given.items() if name.lower() not in ours}
    tls = _trusting(ca_file) if urlsplit(url).scheme == "https" else None
    async with _exchange(url, sent | _HEADERS, tls, max_message, http2=http2, few=few) as exchange:
        yield HttpClient(exchange, secrets=given.values(), max_message=max_message, settling=settling)


class HttpClient:
    """A `Peer` over HTTP. It holds no connection that could be lost, so `lost` is never set.

    Args:
        secrets: what no error may quote, though the server does: the values of headers.
        max_message: bytes in an answer, which the exchange holds to.
        settling: seconds after which a call whose answer did not come counts as settled.
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
        self._speaks = False  # whether an answer to a call has ever come
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
            answered = answer.status < 500  # a gateway's 502 or 504 does not end what is behind it
            reply = self._read(answer.status, body)
            if reply.error is None or not unanswered_in(reply.error):
                self.heard = anyio.current_time()
            if bytes(reply.id) == str(id).encode():
                answered = self._speaks = True  # whatever its status: only the server itself knows the id
            elif not answered:
                raise HttpFailure(_status(answer.status, body, self._secrets), self._later())
            elif reply.error is None or bytes(reply.id) != b"null":
                # only an error may have no id: one that could not tell whose it was
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
        """An error's detail, without what the server was shown."""
        if data is None:
            return None
        text = msgspec.json.encode(data).decode()
        bare = _without(self._secrets, text)
        return data if bare == text else {"detail": bare}

    def _plain(self, answer: Answer) -> bytes:
        """The answer's body, no longer compressed: some servers compress what nobody asked them to."""
        body: bytes | None = answer.body
        if body is not None:
            try:
                body = unpacked(body, answer.coding, self._max_message)
            except ValueError as problem:
                if answer.status != 200:
                    return b""  # what cannot be read of it must not hide the status
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
        came = _said(body, self._secrets)[:_SHOWN]
        what = f"what came begins with {came!r}" if came else "what came is empty"
        return NoAnswer(f"an answer that cannot be read: {why}; {what}{self._doubt(200)}", settled())

    def _doubt(self, status: int) -> str:
        """What is said of what is no answer, where nothing else has ever come."""
        return _NO_SERVER if not self._speaks and (status == 200 or status in _STRANGE) else ""

    def _settled_by(self, status: int) -> Settled:
        return settled() if status < 500 else self._later()

    def _certain(self, posting: Posting) -> Settled:
        return self._later() if posting.sent else settled()

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


def _exchange(
    url: str, headers: Mapping[str, str], tls: ssl.SSLContext | None, max_message: int, *, http2: bool, few: bool
) -> AbstractAsyncContextManager[Exchange]:
    # two of them take long to load, and mostly one will do
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
    """TLS as a client has it. Raises OSError, in a sentence, for a file that is no PEM with certificates."""
    try:
        context = ssl.create_default_context(cafile=ca_file or certifi.where())
    except OSError as problem:  # TLS's own errors are such, too
        why = "there is no certificate in it" if isinstance(problem, ssl.SSLError) else problem.strerror
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
    said = cut(_said(body, secrets))
    return f"HTTP {named}: {said}" if said else f"HTTP {named}"


def _said(body: bytes, secrets: Collection[str]) -> str:
    """The beginning of what a server says, on one line."""
    return _without(secrets, " ".join(body[:_SAID].decode("utf-8", "replace").split()))


def _without(secrets: Collection[str], text: str) -> str:
    """The text, where a server has put what it was shown into what it says."""
    bare = [secret.partition(" ")[2].strip() for secret in secrets]  # behind e.g. Bearer
    for secret in sorted([*secrets, *bare], key=len, reverse=True):
        if len(secret) > 3:  # less keeps nothing secret, and is part of many words
            text = text.replace(secret, "…")
    return text
