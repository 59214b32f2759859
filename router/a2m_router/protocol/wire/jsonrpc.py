"""The JSON-RPC 2.0 codec (§8): bytes in, messages out, and back. No I/O, no state.

Rules of the door, kept here for every binding:
- a message is valid UTF-8 and one JSON object; an array is refused (§8). A byte order mark at its head is skipped;
- nothing is nested deeper than MAX_DEPTH, and no string holds a lone surrogate: what is let through as raw JSON must be
  readable by everybody further on;
- line breaks between tokens become spaces, since stdio frames by line;
- whatever can be learnt of a broken message's id is learnt, so that its sender can match the error.
"""

import re
from itertools import accumulate, islice
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.lines import BYTE_ORDER_MARK

MAX_DEPTH: Final = 128

NULL_ID: Final = Raw(b"null")

_NO_PARAMS: Final = Raw(b"{}")


class Request(msgspec.Struct, frozen=True):
    """A request, or a notification where `id` is None. `params` is one JSON object, unread."""

    id: Raw | None
    method: str
    params: Raw


class Reply(msgspec.Struct, frozen=True):
    """The answer to call `id`: `result`, or `error`."""

    id: Raw
    result: Raw | None
    error: A2MError | None


class Notification(msgspec.Struct, frozen=True):
    """A message of a server that answers nothing (§4.13)."""

    method: str
    params: Raw


class MalformedMessage(A2MError):
    """A message that is no request; `id` is its id as far as it could be read, else null."""

    def __init__(self, error: A2MError, id: Raw = NULL_ID) -> None:
        super().__init__(error.code, error.message, error.data)
        self.id = id


class _Envelope(msgspec.Struct):
    jsonrpc: Raw = Raw(b"")
    id: Raw | UnsetType = UNSET
    method: Raw | UnsetType = UNSET
    params: Raw | UnsetType = UNSET
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _ErrorObject(msgspec.Struct):
    code: int
    message: str = ""
    data: Any = None


class _Call(msgspec.Struct):
    id: int | UnsetType
    method: str
    params: Any
    jsonrpc: str = "2.0"


class _Result(msgspec.Struct):
    id: Raw
    result: Any
    jsonrpc: str = "2.0"


class _Failure(msgspec.Struct):
    id: Raw
    error: dict[str, Any]
    jsonrpc: str = "2.0"


_INTEGRAL: Final = re.compile(rb"(-?\d+)\.0+", re.ASCII)
_envelopes = msgspec.json.Decoder(_Envelope)
_texts = msgspec.json.Decoder(str)
_encode = msgspec.json.Encoder().encode


def parse_request(message: bytes) -> Request:
    """The request in one message of a client.

    Raises MalformedMessage: PARSE_ERROR for what is not JSON, INVALID_REQUEST for an array and for what is no request
    object, INVALID_PARAMS for nesting beyond MAX_DEPTH and for lone surrogates.
    """
    envelope = _open(message)
    id = NULL_ID if envelope.id is UNSET else envelope.id
    if not _is_id(bytes(id)):
        raise MalformedMessage(A2MError(Code.INVALID_REQUEST, "id: expected a string, a number or null"))
    if bytes(envelope.jsonrpc) != b'"2.0"':
        raise MalformedMessage(A2MError(Code.INVALID_REQUEST, 'jsonrpc: expected "2.0"'), id)
    try:
        method = _texts.decode(b"" if envelope.method is UNSET else envelope.method)
    except msgspec.MsgspecError:
        raise MalformedMessage(
            A2MError(Code.INVALID_REQUEST, 'method: expected a string like "memory/recall"'), id
        ) from None
    params = _NO_PARAMS if envelope.params is UNSET else envelope.params
    if not bytes(params).startswith(b"{"):
        raise MalformedMessage(invalid_params("params", "expected an object, parameters go by name (§4)"), id)
    return Request(None if envelope.id is UNSET else id, method, _on_one_line(params))


def parse_reply(message: bytes) -> Reply | Notification:
    """The reply or the notification in one message of a server.

    Half of a surrogate pair, as a server leaves it that cuts a text in two, counts as U+FFFD.

    Raises MalformedMessage for anything else; a client must not trust what it cannot read.
    """
    envelope = _open(_with_whole_pairs(message), "answer")
    if envelope.method is not UNSET and envelope.id is UNSET:
        params = _NO_PARAMS if envelope.params is UNSET else envelope.params
        try:
            return Notification(_texts.decode(envelope.method), _on_one_line(params))
        except msgspec.MsgspecError:
            raise MalformedMessage(A2MError(Code.INVALID_REQUEST, "method: expected a string")) from None
    if envelope.id is UNSET or not _is_id(bytes(envelope.id)):
        raise MalformedMessage(A2MError(Code.INVALID_REQUEST, "a reply without the id of a call"))
    envelope.id = Raw(_INTEGRAL.sub(rb"\1", bytes(envelope.id)))  # some languages have floats alone
    if envelope.error is not UNSET and bytes(envelope.error) != b"null":
        try:
            error = msgspec.json.decode(envelope.error, type=_ErrorObject, strict=False)  # a code may come as -32602.0
        except msgspec.MsgspecError as problem:
            raise MalformedMessage(A2MError(Code.INVALID_REQUEST, f"error: {problem}"), envelope.id) from None
        data = error.data if isinstance(error.data, dict) else None
        return Reply(envelope.id, None, A2MError(error.code, error.message, data))
    if envelope.result is UNSET:
        raise MalformedMessage(A2MError(Code.INVALID_REQUEST, "a reply with neither result nor error"), envelope.id)
    return Reply(envelope.id, _on_one_line(envelope.result), None)


P = TypeVar("P")


def read_params(params: Raw, type: type[P]) -> P:
    """`params` as `type`. Raises INVALID_PARAMS naming the parameter, what it should have been and what it is."""
    try:
        return msgspec.json.decode(params, type=type)
    except msgspec.MsgspecError as problem:
        where, sentence = explain(problem)
        raise invalid_params(where or "params", sentence) from None


def render_call(id: int | None, method: str, params: Any) -> bytes:
    """One call on one line; without an id, a notification."""
    return _encode(_Call(UNSET if id is None else id, method, params))


def render_result(id: Raw, result: Any) -> bytes:
    """The answer to `id`, on one line."""
    return _encode(_Result(id, result))


def render_error(id: Raw, error: A2MError) -> bytes:
    """The answer to `id` that says what went wrong, on one line."""
    body: dict[str, Any] = {"code": int(error.code), "message": error.message}
    if error.data is not None:
        body["data"] = error.data
    return _encode(_Failure(id, body))


def too_long(limit: int) -> A2MError:
    """The error for a message of more than `limit` bytes, of which nothing else can be known."""
    return A2MError(Code.INVALID_REQUEST, f"a message may have {limit:,} bytes at most; this one is longer")


_EXPECTED: Final = re.compile(r"^(?P<what>.*?)(?: - at `(?P<where>[^`]*)`)?$", re.DOTALL)
_NAMES: Final = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "an array",
    "object": "an object",
    "null": "null",
}


def explain(problem: msgspec.MsgspecError) -> tuple[str, str]:
    """Where in the parameters a msgspec error lies (`records[0].content`), and what it says, in JSON's words."""
    match = _EXPECTED.match(str(problem))
    assert match is not None
    where = (match["where"] or "").removeprefix("$").removeprefix(".")
    what = re.sub(r"`([^`]*)`", lambda m: _in_json_words(m[1]), match["what"])
    missing = re.fullmatch(r"Object missing required field (\w+)", what)
    if missing:
        return f"{where}.{missing[1]}".lstrip("."), "required, and missing"
    return where, what if what.startswith("JSON") else what[:1].lower() + what[1:]


def _in_json_words(types: str) -> str:
    names = [_NAMES.get(name, name) for name in types.split(" | ")]
    return " or ".join(names)


def _is_id(id: bytes) -> bool:
    return id[:1] in b'"-0123456789n' and id != b""


def _on_one_line(raw: Raw) -> Raw:
    # a line break can only stand between tokens: inside a string JSON forbids it, and the decoder has looked
    text = bytes(raw)
    if b"\n" in text or b"\r" in text:
        return Raw(text.replace(b"\n", b" ").replace(b"\r", b" "))
    return Raw(text)


# Groups that repeat without giving back are not used here: Python 3.11.2 matches some of them wrongly.
_SURROGATE_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# of a message without escaped quotes; an open string ends with it
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]|[^\s\[\]{},:"]+')
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_SHAPE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_STEP: Final = {ord("["): 1, ord("]"): -1}
# levels that are taken away at once where nothing is in them, before brackets are looked at one by one
_LEVELS: Final = 16
# tokens among which the id of a broken message is looked for: a hostile one must not hold up everybody else
_LOOKED_AT: Final = 100_000


def _open(message: bytes, expected: Literal["request", "answer"] = "request") -> _Envelope:
    message = message.removeprefix(BYTE_ORDER_MARK)
    try:
        message.decode("utf-8")
    except UnicodeDecodeError as problem:
        raise MalformedMessage(
            A2MError(Code.PARSE_ERROR, f"not valid UTF-8 at byte {problem.start}; messages are UTF-8 (§8.2)")
        ) from None
    if b"\\u" in message and _has_half_a_pair(message):
        raise MalformedMessage(
            invalid_params("params", "a string holds half of a surrogate pair, which no UTF-8 text can hold"),
            _scan_id(message),
        )
    if message.count(b"[") + message.count(b"{") > MAX_DEPTH and _is_too_deep(message):
        raise MalformedMessage(invalid_params("params", f"nested more than {MAX_DEPTH} deep"), _scan_id(message))
    try:
        return _envelopes.decode(message)
    except msgspec.ValidationError:
        what = "an array; batches are not part of A2M (§8)" if message.lstrip()[:1] == b"[" else "something else"
        raise MalformedMessage(
            A2MError(Code.INVALID_REQUEST, f"expected one JSON-RPC {expected} object, got {what}")
        ) from None
    except msgspec.DecodeError as problem:
        raise MalformedMessage(A2MError(Code.PARSE_ERROR, str(problem))) from None


def _has_half_a_pair(message: bytes) -> bool:
    escapes = message.replace(rb"\\", b"--")  # what follows an escaped backslash is no escape
    return _SURROGATE.search(_SURROGATE_PAIR.sub(b"", escapes)) is not None


def _with_whole_pairs(message: bytes) -> bytes:
    if b"\\u" not in message or not _has_half_a_pair(message):
        return message
    # of the same length, so that a place in the one is a place in the other
    escapes = _SURROGATE_PAIR.sub(b"-" * 12, message.replace(rb"\\", b"--"))
    whole = bytearray(message)
    for half in _SURROGATE.finditer(escapes):
        whole[half.start() : half.start() + 6] = rb"\ufffd"
    return bytes(whole)


def _is_too_deep(message: bytes) -> bool:
    # in whole sweeps, since even a hostile message must not hold up everybody else for long
    unescaped = message.replace(b"\\\\", b"").replace(b'\\"', b"")
    shape = unescaped.translate(_SQUARE, _ALL_BUT_SHAPE).replace(b'""', b"")
    brackets = b"".join(shape.split(b'"')[::2])
    depth = 0
    for _ in range(_LEVELS):
        within = brackets.replace(b"[]", b"")
        if within == brackets:
            break
        brackets = within
        depth += 1
    depths = accumulate(map(_STEP.__getitem__, brackets), initial=depth)
    return any(map(MAX_DEPTH.__lt__, depths))


def _scan_id(message: bytes) -> Raw:
    """The id of a message that cannot be decoded whole: what stands behind its outermost `"id"`, else null."""
    depth = 0
    before = [b"", b"", b""]
    unescaped = message.replace(rb"\\", b"--").replace(rb"\"", b"--")  # of the same length
    for match in islice(_TOKEN.finditer(unescaped), _LOOKED_AT):
        token = message[slice(*match.span())]
        *name, id = before
        if depth == 1 and name == [b'"id"', b":"] and _is_id(id) and token in (b",", b"}"):
            try:
                return Raw(msgspec.json.encode(msgspec.json.decode(id)))
            except msgspec.MsgspecError:
                return NULL_ID
        depth += (token in (b"{", b"[")) - (token in (b"}", b"]"))
        before = [*before[1:], token]
    return NULL_ID
