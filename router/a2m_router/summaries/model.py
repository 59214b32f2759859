"""A chat model behind an OpenAI-compatible endpoint: one call for one text.

- A call either returns a complete text that can be stored, or raises ModelFailed. This module neither retries nor logs.
- A model's reasoning is not part of the text, whether the endpoint marks it by tags or channels within the content, by
  parts of another type, or in a member beside the content.
- The token is sent to the endpoint and nowhere else. An endpoint's error may contain it, and is quoted without it. The
  HTTP library's error for a broken exchange may contain it, too, and is not quoted.
- The HTTP library is imported when there is a model to call, because most federations have none.
- Each call has a connection of its own. A summary takes seconds, so a kept connection would save little, and the
  endpoint might close it just as the next call is sent.
"""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final
from urllib.parse import urlsplit

import anyio
import msgspec
import orjson

from a2m_router.config.settings import Summarizer
from a2m_router.process.budget import left
from a2m_router.protocol.client.http_coding import unpacked
from a2m_router.summaries.reasoning import without_reasoning

if TYPE_CHECKING:
    import httpx

MAX_ANSWER: Final = 2**20  # bytes; far more than a summary needs
MAX_QUOTED: Final = 200  # characters quoted of an endpoint's error
MAX_WAIT: Final = 86_400.0  # seconds; the longest Retry-After that is obeyed

_WRONG_ADDRESS: Final = "check that url in [summarizer] is the base address of an OpenAI-compatible endpoint"
# prefixes of the types of parts that hold reasoning
_REASONING: Final = ("reasoning", "thinking", "redacted_thinking", "thought")
_SECONDS: Final = re.compile(r"[0-9]+")


class ModelFailed(Exception):
    """The model returned no usable text.

    Args:
        reason: one sentence: what was wrong with which endpoint, and what to do. It does not contain the token.
        retry_after: seconds to wait before a retry, if the endpoint named them; at most MAX_WAIT.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


@asynccontextmanager
async def connect_model(settings: Summarizer) -> AsyncIterator["Model"]:
    """Open the model of these settings. This sends nothing, so it does not fail.

    The environment's proxies are not used.
    """
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    is_encrypted = urlsplit(settings.url).scheme == "https"  # certificates take a while to load; http:// needs none
    async with httpx.AsyncClient(
        timeout=None, follow_redirects=False, trust_env=False, limits=limits, verify=is_encrypted
    ) as client:
        yield Model(client, settings)


class Model:
    """A model that writes texts. Any number of calls may be under way at once.

    Args:
        client: an HTTP client without a timeout that does not follow redirects.
    """

    def __init__(self, client: "httpx.AsyncClient", settings: Summarizer) -> None:
        self.name = settings.model
        self._client = client
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._token = settings.token
        self._timeout = settings.timeout

    def __repr__(self) -> str:
        return f"Model({self.name!r} at {self._url})"

    async def write(self, instructions: str, text: str) -> str:
        """Return the text that the model writes: not empty, complete, without reasoning, without space around it.

        The input is sent unchanged; the caller limits its length (`Summarizer.max_input`).

        Raises:
            ModelFailed: the endpoint cannot be reached, or its answer is not usable.
        """
        import httpx

        # after these nothing can have reached the endpoint; none of their texts contains a header
        never_sent = (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
            UnicodeError,  # a host name that no resolver accepts
        )
        messages = [{"role": "system", "content": instructions}, {"role": "user", "content": text}]
        allowed = min(self._timeout, left())
        message = orjson.dumps({"model": self.name, "messages": messages, "temperature": 0})
        try:
            with anyio.fail_after(allowed):
                response, body = await self._post(message)
        except TimeoutError:
            raise self._failed(
                f"gave no whole answer within {allowed:.3g} s",
                "check whether it is overloaded; in [summarizer], lower max_input or raise timeout",
            ) from None
        except never_sent as problem:
            raise self._failed(
                f"cannot be reached: {str(problem) or type(problem).__name__}",
                "check that it runs, and that url in [summarizer] is its address",
            ) from None
        except (httpx.HTTPError, OSError):
            raise self._failed("broke off before its answer was whole", "check its own log") from None
        unreadable = None
        try:
            body = body and unpacked(body, response.headers.get("Content-Encoding", ""), MAX_ANSWER)
        except ValueError as problem:
            body, unreadable = b"", problem
        if response.status_code != 200:
            raise self._refused(response, body or b"")
        if unreadable is not None:
            raise self._failed(
                f"gave an answer that cannot be read: {unreadable}",
                "check that no proxy on the way compresses answers",
            )
        if body is None:
            raise self._failed(f"answered with more than {MAX_ANSWER:,} bytes, and was not read on", _WRONG_ADDRESS)
        return self._text(body)

    async def _post(self, message: bytes) -> "tuple[httpx.Response, bytes | None]":
        """Post the message; return the response and its body, still encoded; None if that is longer than MAX_ANSWER."""
        # some endpoints and proxies compress although the request does not ask for it
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        body = bytearray()
        with anyio.CancelScope() as reading:
            async with self._client.stream("POST", self._url, content=message, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER:
                        # a break would leave the inner generators unclosed; this ends the innermost one
                        reading.cancel()
        return response, bytes(body) if len(body) <= MAX_ANSWER else None

    def _text(self, body: bytes) -> str:
        try:
            answer = json.loads(body)  # msgspec's decoder would report half a surrogate pair as broken JSON
        except (ValueError, RecursionError):
            raise self._failed("answered with something else than JSON", _WRONG_ADDRESS) from None
        try:
            choice = msgspec.convert(answer, _Completion).choices[0]
        except msgspec.ValidationError as problem:
            what = f"gave an answer that is no chat completion: {problem}{self._quoted(body)}"
            raise self._failed(what, _WRONG_ADDRESS) from None
        if choice.finish_reason == "length":
            raise self._failed(
                'stopped in the middle of its text (finish_reason "length")',
                "raise the number of tokens it may write, or lower max_input in [summarizer]",
            )
        if choice.finish_reason == "content_filter":
            raise self._failed(
                'withheld its text (finish_reason "content_filter")',
                "the records contain what it filters out; try another model",
            )
        written, reasoned = _written(choice.message)
        if written is None and not reasoned:
            lacking = "is missing or null" if choice.message.content is None else "has no part of type text"
            raise self._failed(
                f"answered without a text: choices[0].message.content {lacking}",
                "check that model in [summarizer] is a chat model that answers in text",
            )
        text = without_reasoning(written or "")
        if not text and (reasoned or (written or "").strip()):
            raise self._failed(
                "answered with reasoning alone, and nothing is left without the reasoning",
                "let it write more tokens, have the endpoint turn its reasoning off, or take another model",
            )
        if not text:
            raise self._failed(
                "answered with an empty text", "try again, or check that model in [summarizer] can write summaries"
            )
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self._failed(
                "wrote half a surrogate pair, which is no character and cannot be stored",
                "try again, or take another model",
            ) from None
        return text

    def _refused(self, response: "httpx.Response", body: bytes) -> ModelFailed:
        import httpx

        status = response.status_code
        named = f"{status} {httpx.codes.get_reason_phrase(status)}".rstrip()
        return self._failed(
            f"answered HTTP {named}{self._quoted(body)}", self._advice(status), _retry_after(response.headers)
        )

    def _advice(self, status: int) -> str:
        if status in (401, 403):
            held = "check that the environment variable named by token_env in [summarizer] holds a valid token"
            return (
                held
                if self._token
                else "if it asks for a token, name its environment variable in [summarizer]: token_env"
            )
        if status == 404:
            return "check url and model in [summarizer]"
        if status == 429:
            return "it accepts no more calls at present; retry later, or less often"
        if 300 <= status < 400:
            return "redirects are not followed; make url in [summarizer] the address that it leads to"
        if status >= 500:
            return "the error is on its side; check its own log"
        return "check that it accepts model and max_input in [summarizer]"

    def _quoted(self, body: bytes) -> str:
        """Return the endpoint's error message on one line and without the token, as the end of a sentence."""
        quote = " ".join("".join(char if char.isprintable() else " " for char in _message(body)).split())
        if self._token:
            quote = quote.replace(self._token, "…")  # first, because a cut could leave half a token
        if len(quote) > MAX_QUOTED:
            quote = f"{quote[: MAX_QUOTED - 1]}…"
        return f', saying "{quote}"' if quote else ""

    def _failed(self, what: str, advice: str, retry_after: float | None = None) -> ModelFailed:
        return ModelFailed(f"the model's endpoint {self._url} {what}; {advice}", retry_after)


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    # the model's reasoning, if the endpoint separates it
    reasoning_content: object = None
    reasoning: object = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: object = None


class _Completion(msgspec.Struct):
    """The part of a chat completion that is read."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


def _written(message: _Message) -> tuple[str | None, bool]:
    """Return the text in a message, None if it has none, and whether there is reasoning beside it.

    If the content has parts, the text is in the parts of type text, in order.
    """
    reasoned = bool(message.reasoning_content or message.reasoning)
    if not isinstance(message.content, list):
        return message.content, reasoned
    texts = []
    for part in message.content:
        match part:
            case str() | {"type": "text" | "output_text", "text": str()}:
                texts.append(part if isinstance(part, str) else part["text"])
            case {"type": str(kind)}:
                reasoned |= kind.startswith(_REASONING)
    return "".join(texts) if texts else None, reasoned


def _message(body: bytes) -> str:
    """Return the message in an error's body, in the forms that such servers use; empty if there is none."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    match answer:
        case {"error": {"message": str(text)}} | {"error": str(text)} | {"message": str(text)} | {"detail": str(text)}:
            return text
    return ""


def _retry_after(headers: "httpx.Headers") -> float | None:
    """Return the seconds in Retry-After, in either of its forms (RFC 9110 §10.2.3); None if there is none."""
    value = headers.get("Retry-After", "")
    if _SECONDS.fullmatch(value):
        return min(float(value), MAX_WAIT)
    moment = _moment(value)
    if moment is None:
        return None
    # counted from the endpoint's Date, because its clock may differ from ours
    now = _moment(headers.get("Date", "")) or datetime.now(UTC)
    return min(max((moment - now).total_seconds(), 0.0), MAX_WAIT)


def _moment(http_date: str) -> datetime | None:
    """Parse an HTTP-date, in any of its three forms (RFC 9110 §5.6.7); None if it is not one."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(http_date)
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
