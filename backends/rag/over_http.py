"""A service that is a JSON endpoint over HTTP, asked by GET or POST.

- Redirects are not followed: the headers would go along, to whomever. The environment's proxies are not used.
- What comes is JSON in UTF-8, and no more than a number of bytes; it is read no further.
- Headers, and what the service says in an error, appear in no message: they may hold tokens.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, Final, Literal
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import anyio
import httpx
import msgspec
from msgspec import Raw

from backends.rag.filling import asks, filled, filled_text
from backends.rag.mapping import Path, shown
from backends.rag.service import ByWords, CannotStart, Result, ServiceFailure, ServiceSilent
from router.a2m.equality import atom, number_atom

MAX_ANSWER: Final = 16 * 2**20
"""Bytes in an answer, if nothing else is said."""

_INT64: Final = range(-(2**63), 2**63)


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """An address, what to send there, and where in the answer the results are.

    url: http or https, without a password; `{query}` and `{limit}` may stand in its query.
    request: the JSON value that is posted; for GET an object, whose members are added to the address.
    """

    url: str
    method: Literal["GET", "POST"]
    request: Any = None
    results: Path


@asynccontextmanager
async def connect_http(
    search: Endpoint, listing: Endpoint | None, *, headers: Mapping[str, str], max_answer: int = MAX_ANSWER
) -> AsyncIterator["HttpService"]:
    """The service behind these endpoints. Nothing is sent before the first question. Raises CannotStart."""
    for endpoint in (search, listing):
        if endpoint is not None:
            check(endpoint)
    if not asks(search.request) and "{query}" not in urlsplit(search.url).query:
        raise CannotStart("nothing that is sent holds the query: write {query} into --request, or after ? in --url")
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=32, keepalive_expiry=4)
    async with httpx.AsyncClient(
        headers=headers, timeout=None, follow_redirects=False, trust_env=False, limits=limits
    ) as client:
        yield HttpService(client, search, listing, max_answer)


def check(endpoint: Endpoint) -> None:
    """Raises CannotStart for an address or a request that cannot be sent."""
    try:
        parts = urlsplit(endpoint.url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        httpx.URL(endpoint.url)
        _ = parts.port
    except (ValueError, httpx.InvalidURL):
        usable = False
    if not usable:
        raise CannotStart("the address is none that can be asked; expected one like http://127.0.0.1:9000/search")
    if parts.username is not None or parts.password is not None:
        raise CannotStart("the address holds a name or a password, which everybody sees; send it in a --header")
    if asks(parts.path) or "{limit}" in parts.path:
        raise CannotStart("{query} and {limit} may stand in an address only after its ?")
    if endpoint.method == "GET":
        _check_parameters(endpoint.request)


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
    """A `Service`. It holds connections, and nothing else.

    Args:
        client: without a timeout of its own, and not following redirects.
    """

    def __init__(self, client: httpx.AsyncClient, search: Endpoint, listing: Endpoint | None, max_answer: int) -> None:
        self._client = client
        self._search = search
        self._listing = listing
        self._max_answer = max_answer

    @property
    def lists(self) -> bool:
        return self._listing is not None

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        return await self._asked(self._search, query, limit)

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        assert self._listing is not None, "asked only where it lists"
        return await self._asked(self._listing, "", most + 1)

    async def _asked(self, endpoint: Endpoint, query: str, limit: int) -> list[Result]:
        try:
            query.encode()
            request = self._request(endpoint, query, limit)
        except (UnicodeError, httpx.InvalidURL) as problem:
            raise ServiceFailure(f"the query cannot be sent: {problem}") from None
        where = str(request.url.copy_with(query=None))
        self._client.cookies.clear()  # what one caller's answer has set is no business of the next one's
        try:
            status, media_type, body = await self._sent(request)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.UnsupportedProtocol, UnicodeError) as problem:
            said = str(problem) or type(problem).__name__
            raise ServiceSilent(f"{where} cannot be reached: {said}; see that it runs") from None
        except httpx.HTTPError as problem:
            raise ServiceSilent(f"{where} broke off before its answer was whole ({type(problem).__name__})") from None
        if status != 200:
            failure = ServiceSilent if status >= 500 else ServiceFailure
            raise failure(f"{where} answered {_status(status)}")
        if body is None:
            raise ServiceFailure(
                f"{where} answered with more than {self._max_answer:,} bytes; ask for less, or raise --max-answer"
            )
        found = endpoint.results.find(_json(where, media_type, body))
        if not isinstance(found, list):
            raise ServiceFailure(
                f"{where}: expected a list of results at {endpoint.results.text!r} of its answer, got {shown(found)}"
            )
        return [Result(each) for each in found]

    def _request(self, endpoint: Endpoint, query: str, limit: int) -> httpx.Request:
        parts = urlsplit(endpoint.url)
        parameters = [
            (name, filled_text(value, query, limit))
            for name, value in parse_qsl(parts.query, keep_blank_values=True, errors="strict")
        ]
        request = filled(endpoint.request, query, limit)
        content = None
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}  # so that the bytes counted are all
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
        """The answer's status, media type and body; None for a body that is longer than it may be."""
        body = bytearray()
        response = await self._client.send(request, stream=True)
        try:
            if response.status_code == 200:
                with anyio.CancelScope() as reading:
                    async for chunk in response.aiter_bytes():
                        body += chunk
                        if len(body) > self._max_answer:
                            # to leave the loop would leave the generators beneath it unclosed; this ends the innermost
                            reading.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                await response.aclose()
        media_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        return response.status_code, media_type, bytes(body) if len(body) <= self._max_answer else None


def _parameter(value: Any) -> str:
    match value:
        case str():
            return value
        case None:
            return ""
        case _:
            return json.dumps(value)


def _status(status: int) -> str:
    """The status, its phrase, and what to do about it."""
    try:
        phrase = f"{status} {HTTPStatus(status).phrase}"
    except ValueError:
        phrase = str(status)
    match status:
        case 401 | 403:
            return f"{phrase}: it wants to know who asks, or another token; see --header"
        case 404:
            return f"{phrase}: there is nothing at this address; see --url"
        case 405:
            return f"{phrase}: it may want to be asked by another --method"
        case _ if 300 <= status < 400:
            return f"{phrase}: redirects are not followed, since the headers would go along; see --url"
        case _ if 400 <= status < 500:
            return (
                f"{phrase}: it does not take what it is sent; see --request, and --max-asked if it takes no such limit"
            )
        case _ if status >= 500:
            return f"{phrase}: its own log may say why"
        case _:
            return f"{phrase}, where 200 with results is expected"


def _json(where: str, media_type: str, body: bytes) -> Any:
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as problem:
        raise ServiceFailure(f"{where} answered with what is not UTF-8, at byte {problem.start}") from None
    try:
        return _decoder.decode(text)
    except RecursionError:
        raise ServiceFailure(f"{where} answered with JSON that is nested too deeply") from None
    except ValueError as problem:
        what = f"{media_type}, not JSON" if media_type and "json" not in media_type else f"what is not JSON: {problem}"
        raise ServiceFailure(f"{where} answered with {what}; see --url") from None


def _integer(digits: str) -> int | Raw:
    # metadata goes on as it came: what a 64-bit integer does not hold stays as it is written
    if len(digits) < 20 and (number := int(digits)) in _INT64:
        return number
    return Raw(digits.encode())


def _float(text: str) -> float | Raw:
    number = float(text)
    exact = number - number == 0 and (repr(number) == text or number_atom(number) == atom(text.encode()))
    return number if exact else Raw(text.encode())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


_decoder: Final = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_no_constant)
