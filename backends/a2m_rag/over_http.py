"""A JSON endpoint over HTTP as a service, called by GET or POST.

- Redirects are not followed: they would send the headers to another server. The proxies of the environment are not
  used.
- An answer is JSON in UTF-8. At most a given number of bytes is read.
- No message contains headers, because they may hold tokens. The message about an error quotes one line of its body,
  without the values of headers.
"""

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from http import HTTPStatus
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import anyio
import httpx
import msgspec

from a2m_rag.answers import decoded, results_at
from a2m_rag.filling import asks, filled, filled_text
from a2m_rag.headers import secrets_in
from a2m_rag.mapping import Path, shown
from a2m_rag.service import ByWords, CannotStart, Result, ServiceFailure, ServiceSilent, on_one_line

MAX_ANSWER: Final = 16 * 2**20
"""The default for the most bytes in an answer."""

# the most bytes and seconds for the body of an error: enough for its first line; a failing service may never end it
_MAX_ERROR: Final = 4096
_PATIENCE_WITH_AN_ERROR: Final = 1.0


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An endpoint: its address, the request to send, and the path of the results in the answer.

    url: http or https, without a password; its query part may contain `{query}` and `{limit}`.
    request: the JSON value to post; for GET an object, whose members are added to the address.
    """

    url: str
    method: Literal["GET", "POST"]
    request: Any = None
    results: Path


@asynccontextmanager
async def connect_http(
    search: Endpoint, listing: Endpoint | None, *, headers: Mapping[str, str], max_answer: int = MAX_ANSWER
) -> AsyncIterator["HttpService"]:
    """Yield the service of the endpoints. Nothing is sent before the first search. Raises CannotStart."""
    for endpoint in (search, listing):
        if endpoint is not None:
            check(endpoint)
    if not asks(search.request) and "{query}" not in urlsplit(search.url).query:
        raise CannotStart("the request does not contain the query: write {query} into --request, or after ? in --url")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4)
    # certificates take a while to load; http:// needs none
    is_encrypted = any(urlsplit(endpoint.url).scheme == "https" for endpoint in (search, listing) if endpoint)
    async with httpx.AsyncClient(
        headers=headers, timeout=None, follow_redirects=False, trust_env=False, limits=limits, verify=is_encrypted
    ) as client:
        yield HttpService(client, search, listing, max_answer, secrets_in(headers))


def check(endpoint: Endpoint) -> None:
    """Raise CannotStart for an endpoint with an address or a request that cannot be sent."""
    check_address(endpoint.url)
    if endpoint.method == "GET":
        _check_parameters(endpoint.request)


def check_address(url: str) -> None:
    """Raise CannotStart for an address that is not valid, or that contains a password or a misplaced placeholder."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        httpx.URL(url)
        _ = parts.port
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise CannotStart("the address is not valid; expected one like http://127.0.0.1:9000/search")
    if parts.username is not None or parts.password is not None:
        raise CannotStart(
            "the address contains a user name or a password, which other users of this machine can read; use --header"
        )
    if asks(parts.path) or "{limit}" in parts.path:
        raise CannotStart("{query} and {limit} are allowed in an address only after its ?")


def _check_parameters(request: Any) -> None:
    if request is None:
        return
    if not isinstance(request, Mapping):
        raise CannotStart(f"the request for GET: expected an object of query parameters, got {shown(request)}")
    for name, value in request.items():
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float | None) for each in values):
            raise CannotStart(
                f"the request for GET: expected strings, numbers, or lists of them; {name!r} is {shown(value)}"
            )


class HttpService(ByWords):
    """The `Service` of an endpoint. Its only state are the connections of the client.

    Args:
        client: without a timeout of its own, and not following redirects.
        search: the endpoint for searches.
        listing: the endpoint that returns all results; None if there is none.
        max_answer: the most bytes in an answer.
        secrets: strings that must not appear in messages.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        search: Endpoint,
        listing: Endpoint | None,
        max_answer: int,
        secrets: Sequence[str] = (),
    ) -> None:
        self._client = client
        self._search = search
        self._listing = listing
        self._max_answer = max_answer
        self._secrets = secrets

    @property
    def lists(self) -> bool:
        return self._listing is not None

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        return await self._call(self._search, query, limit, "--results")

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        assert self._listing is not None, "called only if `lists`"
        return await self._call(self._listing, "", most + 1, "--list-results")

    async def _call(self, endpoint: Endpoint, query: str, limit: int, option: str) -> list[Result]:
        """Call an endpoint, and return its results.

        Args:
            option: the option that gave the path of the results; error messages name it.
        """
        try:
            query.encode()
            request = self._request(endpoint, query, limit)
        except (UnicodeError, httpx.InvalidURL) as problem:
            raise ServiceFailure(f"the query cannot be sent: {problem}") from None
        where = str(request.url.copy_with(query=None))
        self._client.cookies.clear()  # cookies from the answer to one caller must not be sent for the next caller
        try:
            status, media_type, body = await self._sent(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, UnicodeError) as problem:
            reason = str(problem) or type(problem).__name__
            raise ServiceSilent(f"{where} cannot be reached: {reason}; check that the service runs") from None
        except httpx.HTTPError as problem:
            raise ServiceSilent(f"{where} closed the connection in mid-answer ({type(problem).__name__})") from None
        if status != 200:
            failure = ServiceSilent if status >= 500 else ServiceFailure
            raise failure(f"{where} {answered(status, media_type, body or b'', self._secrets)}")
        if body is None:
            raise ServiceFailure(
                f"{where} answered with more than {self._max_answer:,} bytes; use a lower limit, or raise --max-answer"
            )
        answer = _json(where, media_type, body)
        try:
            found = results_at(endpoint.results, answer, option=option)
        except ServiceFailure as failure:
            raise ServiceFailure(f"{where}: {failure}") from None
        return [Result(each) for each in found]

    def _request(self, endpoint: Endpoint, query: str, limit: int) -> httpx.Request:
        parts = urlsplit(endpoint.url)
        parameters = [
            (name, filled_text(value, query, limit))
            for name, value in parse_qsl(parts.query, keep_blank_values=True, errors="strict")
        ]
        request = filled(endpoint.request, query, limit)
        content = None
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # compression would evade the limit
        if endpoint.method == "GET":
            for name, value in (request or {}).items():
                parameters += [(name, _parameter(each)) for each in (value if isinstance(value, list) else [value])]
        elif request is not None:
            content = msgspec.json.encode(request)
            headers["Content-Type"] = "application/json"
        address = httpx.URL(urlunsplit(parts._replace(query="", fragment="")))
        if parameters:
            address = address.copy_with(params=parameters)
        return self._client.build_request(endpoint.method, address, content=content, headers=headers)

    async def _sent(self, request: httpx.Request) -> tuple[int, str, bytes | None]:
        """Send a request; return the status, media type and body of the answer. The body is None if it is too long.

        For an error, the body is only its beginning. For a status below 400 other than 200 it is empty.
        """
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code == 200:
                body = await _read(response, self._max_answer + 1)
            else:
                body = await beginning(response) if response.status_code >= 400 else b""
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        return response.status_code, media_type_of(response), body if len(body) <= self._max_answer else None


def answered(status: int, media_type: str, body: bytes, secrets: Iterable[str]) -> str:
    """Return a message about an answer that is not a success: the status, what to do, and the first line of the body.

    A body that is JSON is quoted whole. The quote is one printable line of bounded length, without the secrets.
    """
    text = body.decode("utf-8", "replace").removeprefix("\ufeff")
    for secret in secrets:
        text = text.replace(secret, "…")
    if "json" not in media_type:
        text = next((line for line in text.splitlines() if line.strip()), "")
    quote = on_one_line(text)
    return f"answered {_status(status)}" + (f"; its message: {quote}" if quote else "")


async def beginning(response: Any) -> bytes:
    """Return the beginning of the body of an error, as much as arrives soon. A slow body must not hide the status."""
    body = b""
    if "content-encoding" not in response.headers:
        with suppress(Exception), anyio.move_on_after(_PATIENCE_WITH_AN_ERROR):
            body = await _read(response, _MAX_ERROR)
    return body


def media_type_of(response: Any) -> str:
    """Return the media type of a body, without its parameters."""
    return str(response.headers.get("content-type", "")).partition(";")[0].strip().lower()


async def _read(response: Any, most: int) -> bytes:
    """Return the first bytes of a body, up to `most` or a few more."""
    body = bytearray()
    with anyio.CancelScope() as reading:
        async for chunk in response.aiter_bytes():
            body += chunk
            if len(body) >= most:
                # a break would leave the inner generators unclosed; cancellation ends the innermost one
                reading.cancel()
    return bytes(body)


def _parameter(value: Any) -> str:
    match value:
        case str():
            return value
        case None:
            return ""
        case _:
            return json.dumps(value)


def _status(status: int) -> str:
    """Return the status with its phrase, and what to do about it."""
    try:
        phrase = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = str(status)
    match status:
        case 401 | 403:
            return f"{phrase}: it expects authentication, or another token; see --header"
        case 404:
            return f"{phrase}: it has no such address; see --url"
        case 405:
            return f"{phrase}: it may expect another --method"
        case _ if 300 <= status < 400:
            return f"{phrase}: redirects are not followed, because they would receive the headers; see --url"
        case _ if 400 <= status < 500:
            return (
                f"{phrase}: it rejected the request; see --request, and --max-asked if the limit may be too high for it"
            )
        case _ if status >= 500:
            return f"{phrase}: its own log may have the reason"
        case _:
            return f"{phrase}, expected 200 with results"


def _json(where: str, media_type: str, body: bytes) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ServiceFailure(f"{where} answered with text that is not valid UTF-8, at byte {problem.start}") from None
    try:
        return decoded(text)
    except RecursionError:
        raise ServiceFailure(f"{where} answered with JSON that is nested too deeply") from None
    except ValueError as problem:
        what = f"{media_type}, not JSON" if media_type and "json" not in media_type else f"invalid JSON: {problem}"
        raise ServiceFailure(f"{where} answered with {what}; see --url") from None
