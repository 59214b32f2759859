"""A chat model behind an OpenAI-compatible endpoint: one call for one text.

- A call either gives a whole text that can be stored, or raises ModelFailed. Nothing is tried twice in here, and
  nothing is logged.
- What a model thinks before it answers is no part of the text, however it is told apart: by tags or channels within the
  content, by parts of another type, or in a member beside it.
- The token is sent to the endpoint and told to nobody else: what the endpoint says in an error may hold it, and is
  quoted without it; what the HTTP library says of a broken exchange may, too, and is not quoted.
- The HTTP library is loaded when there is a model to ask, since most federations have none.
- Each call has a connection of its own. A summary takes seconds, which makes a kept one worth little, and a kept one
  may be closed by the endpoint just as the next call goes out.
"""

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final

import anyio
import msgspec
import orjson

from a2m_router.config.settings import Summarizer
from a2m_router.process.budget import left
from a2m_router.protocol.client.http_coding import unpacked
from a2m_router.summaries.reasoning import without_reasoning

if TYPE_CHECKING:
    import httpx

MAX_ANSWER: Final = 2**20  # bytes; no summary comes near it
MAX_QUOTED: Final = 200  # characters of what an endpoint says in an error
MAX_WAIT: Final = 86_400.0  # seconds; no endpoint can put its callers off for longer than a day

_WRONG_ADDRESS: Final = "see that url in [summarizer] is the base address of an OpenAI-compatible endpoint"
# how the types of parts begin that hold reasoning
_REASONING: Final = ("reasoning", "thinking", "redacted_thinking", "thought")
_SECONDS: Final = re.compile(r"[0-9]+")


class ModelFailed(Exception):
    """No text came.

    Args:
        reason: one sentence: what was wrong with which endpoint, and what to do. The token is not in it.
        retry_after: seconds after which the endpoint wants to be asked again, if it said so; at most MAX_WAIT.
    """

    def __init__(self, reason: str, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after = retry_after


@asynccontextmanager
async def connect_model(settings: Summarizer) -> AsyncIterator["Model"]:
    """The model of these settings. Nothing is sent before the first text is wanted, so this does not fail.

    The environment's proxies are not used.
    """
    import httpx

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(timeout=None, follow_redirects=False, trust_env=False, limits=limits) as client:
        yield Model(client, settings)


class Model:
    """Writes texts. Any number of calls may be under way at once.

    Args:
        client: without a timeout of its own, and not following redirects.
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
        """What the model makes of the text: not empty, without its reasoning, without space around it, and whole.

        The text is sent as it is; how long it may be is the caller's to heed (`Summarizer.max_input`).

        Raises:
            ModelFailed: for everything that can go wrong out there.
        """
        import httpx

        # of these nothing can have reached the endpoint; none of their texts holds a header
        never_sent = (
            httpx.ConnectError,
            httpx.ConnectTimeout,
            httpx.UnsupportedProtocol,
            httpx.InvalidURL,
            UnicodeError,  # a host's name that no resolver takes
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
                "see whether it is overloaded; in [summarizer], a smaller max_input gives it less to do and a longer "
                "timeout more time",
            ) from None
        except never_sent as problem:
            raise self._failed(
                f"cannot be reached: {str(problem) or type(problem).__name__}",
                "see that it runs, and that url in [summarizer] is its address",
            ) from None
        except (httpx.HTTPError, OSError):
            raise self._failed("broke off before its answer was whole", "its own log may say why") from None
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
                "see that nothing on the way to it compresses answers",
            )
        if body is None:
            raise self._failed(f"answered with more than {MAX_ANSWER:,} bytes, and was not read on", _WRONG_ADDRESS)
        return self._text(body)

    async def _post(self, message: bytes) -> "tuple[httpx.Response, bytes | None]":
        """The answer, and its body, still in its coding; None if that is longer than MAX_ANSWER."""
        # nothing compressed is asked for; some endpoints, and what stands before them, compress all the same
        headers = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        body = bytearray()
        with anyio.CancelScope() as reading:
            async with self._client.stream("POST", self._url, content=message, headers=headers) as response:
                async for chunk in response.aiter_raw():
                    body += chunk
                    if len(body) > MAX_ANSWER:
                        # to leave the loop would leave the generators beneath it unclosed; this ends the innermost
                        reading.cancel()
        return response, bytes(body) if len(body) <= MAX_ANSWER else None

    def _text(self, body: bytes) -> str:
        try:
            answer = json.loads(body)  # msgspec's own decoder would not tell half a surrogate pair from broken JSON
        except (ValueError, RecursionError):
            raise self._failed("answered with something else than JSON", _WRONG_ADDRESS) from None
        try:
            choice = msgspec.convert(answer, _Completion).choices[0]
        except msgspec.ValidationError as problem:
            what = f"gave an answer that is no chat completion: {problem}{self._quoted(body)}"
            raise self._failed(what, _WRONG_ADDRESS) from None
        if choice.finish_reason == "length":
            raise self._failed(
                'stopped in the middle of its text (finish_reason "length"), and half a summary is worse than none',
                "raise the number of tokens it may write, or lower max_input in [summarizer]",
            )
        if choice.finish_reason == "content_filter":
            raise self._failed(
                'withheld its text (finish_reason "content_filter")',
                "what it objects to is in the records; another model may write of it",
            )
        written, reasoned = _written(choice.message)
        if written is None and not reasoned:
            lacking = "is missing or null" if choice.message.content is None else "has no part of type text"
            raise self._failed(
                f"answered without a text: choices[0].message.content {lacking}",
                "see that model in [summarizer] is a chat model that answers in text",
            )
        text = without_reasoning(written or "")
        if not text and (reasoned or (written or "").strip()):
            raise self._failed(
                "answered with reasoning alone, and nothing is left without it",
                "let it write more tokens, have the endpoint turn its reasoning off, or take another model",
            )
        if not text:
            raise self._failed(
                "answered with an empty text", "try again, or see that model in [summarizer] can write summaries"
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
            held = (
                "see that the environment variable named by token_env in [summarizer] holds a token that is good there"
            )
            return (
                held
                if self._token
                else "if it asks for a token, name its environment variable in [summarizer]: token_env"
            )
        if status == 404:
            return "see that url and model in [summarizer] are right"
        if status == 429:
            return "it takes no more calls for now; ask it again later, or less often"
        if 300 <= status < 400:
            return "redirects are not followed; make url in [summarizer] the address that it leads to"
        if status >= 500:
            return "the fault is on its side; its own log may say why"
        return "see that model and max_input in [summarizer] are what it takes"

    def _quoted(self, body: bytes) -> str:
        """What the endpoint says of an error, on one line and without the token, ready to go on a sentence."""
        said = " ".join("".join(char if char.isprintable() else " " for char in _message(body)).split())
        if self._token:
            said = said.replace(self._token, "…")  # before it is cut, since that would leave half a token
        if len(said) > MAX_QUOTED:
            said = f"{said[: MAX_QUOTED - 1]}…"
        return f', saying "{said}"' if said else ""

    def _failed(self, what: str, advice: str, retry_after: float | None = None) -> ModelFailed:
        return ModelFailed(f"the model's endpoint {self._url} {what}; {advice}", retry_after)


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    # what it thought, where the endpoint has told it apart
    reasoning_content: object = None
    reasoning: object = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: object = None


class _Completion(msgspec.Struct):
    """What is read of a chat completion."""

    choices: Annotated[list[_Choice], msgspec.Meta(min_length=1)]


def _written(message: _Message) -> tuple[str | None, bool]:
    """The text in a message, None if it has none; and whether there is reasoning beside it. Of content in parts, the
    text is in those of type text, in order."""
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
    """The message in an error's body, in the shapes that such servers give it; empty if there is none."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    match answer:
        case {"error": {"message": str(said)}} | {"error": str(said)} | {"message": str(said)} | {"detail": str(said)}:
            return said
    return ""


def _retry_after(headers: "httpx.Headers") -> float | None:
    """The seconds that Retry-After asks for, in either of its forms (RFC 9110 §10.2.3); None if it does not."""
    asked = headers.get("Retry-After", "")
    if _SECONDS.fullmatch(asked):
        return min(float(asked), MAX_WAIT)
    moment = _moment(asked)
    if moment is None:
        return None
    # counted from the endpoint's own time, since its clock need not be ours
    now = _moment(headers.get("Date", "")) or datetime.now(UTC)
    return min(max((moment - now).total_seconds(), 0.0), MAX_WAIT)


def _moment(http_date: str) -> datetime | None:
    """An HTTP-date, in any of its three forms (RFC 9110 §5.6.7)."""
    from email.utils import parsedate_to_datetime

    try:
        moment = parsedate_to_datetime(http_date)
    except (ValueError, OverflowError):
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
