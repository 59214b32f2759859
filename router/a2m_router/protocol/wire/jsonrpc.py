"""The JSON-RPC 2.0 codec (§8): bytes in, messages out, and back. No I/O, no state.

Rules for incoming messages, checked here for every binding:
- a message is valid UTF-8 and one JSON object; an array is rejected (§8). A leading byte order mark is skipped;
- nesting is at most MAX_DEPTH deep, and no string contains a lone surrogate, since raw JSON passes through to other
  programs, which must be able to read it;
- line breaks between tokens become spaces, since stdio frames by line;
- the id of a broken message is recovered if possible, so that the sender can match the error.
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
    """A request, or a notification if `id` is None. `params` is one JSON object, not yet decoded."""

    id: Raw | None
    method: str
    params: Raw


class Reply(msgspec.Struct, frozen=True):
    """The answer to call `id`: either `result` or `error`."""

    id: Raw
    result: Raw | None
    error: A2MError | None


class Notification(msgspec.Struct, frozen=True):
    """A message from a server that is not an answer (§4.13)."""

    method: str
    params: Raw


class MalformedMessage(A2MError):
    """A message is not a valid request or reply; `id` is its id if that could be read, else null."""

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
    """Return the request in one message of a client.

    Raises:
        MalformedMessage: PARSE_ERROR, if it is not JSON; INVALID_REQUEST, if it is an array or not a request object;
            INVALID_PARAMS, if it is nested deeper than MAX_DEPTH or contains a lone surrogate.
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
    """Return the reply or the notification in one message of a server.

    A lone surrogate becomes U+FFFD: some servers cut a text in the middle of a surrogate pair.

    Raises:
        MalformedMessage: the message is neither.
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
    envelope.id = Raw(_INTEGRAL.sub(rb"\1", bytes(envelope.id)))  # in some languages all numbers are floats
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
    """Return `params` as `type`; raise INVALID_PARAMS with the parameter, what was expected and what came."""
    try:
        return msgspec.json.decode(params, type=type)
    except msgspec.MsgspecError as problem:
        where, sentence = explain(problem)
        raise invalid_params(where or "params", sentence) from None


def render_call(id: int | None, method: str, params: Any) -> bytes:
    """Return one call on one line; without an id, a notification."""
    return _encode(_Call(UNSET if id is None else id, method, params))


def render_result(id: Raw, result: Any) -> bytes:
    """Return the answer to `id`, on one line."""
    return _encode(_Result(id, result))


def render_error(id: Raw, error: A2MError) -> bytes:
    """Return the error answer to `id`, on one line."""
    body: dict[str, Any] = {"code": int(error.code), "message": error.message}
    if error.data is not None:
        body["data"] = error.data
    return _encode(_Failure(id, body))


def too_long(limit: int) -> A2MError:
    """Return the error for a message of more than `limit` bytes."""
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
    """Return the place of a msgspec error in the parameters (`records[0].content`) and its text in terms of JSON."""
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
    # a line break can only be between tokens: JSON forbids it inside a string, and the decoder has checked that
    text = bytes(raw)
    if b"\n" in text or b"\r" in text:
        return Raw(text.replace(b"\n", b" ").replace(b"\r", b" "))
    return Raw(text)


# No possessive quantifiers here: Python 3.11.2 matches some of them wrongly.
_SURROGATE_PAIR: Final = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")
# a token of a message without escaped quotes; an unclosed string ends with the message
_TOKEN: Final = re.compile(rb'"[^"]*"?|[\[\]{},:]|[^\s\[\]{},:"]+')
_SQUARE: Final = bytes.maketrans(b"{}", b"[]")
_ALL_BUT_SHAPE: Final = bytes(set(range(256)) - set(b'[]{}"'))
_STEP: Final = {ord("["): 1, ord("]"): -1}
# innermost levels of brackets that are removed all at once, before the rest is counted bracket by bracket
_LEVELS: Final = 16
# tokens of a broken message that are searched for its id: a hostile message must not block all other callers
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
            invalid_params("params", "a string contains half of a surrogate pair, which UTF-8 cannot represent"),
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
    escapes = message.replace(rb"\\", b"--")  # the text after an escaped backslash is not an escape
    return _SURROGATE.search(_SURROGATE_PAIR.sub(b"", escapes)) is not None


def _with_whole_pairs(message: bytes) -> bytes:
    if b"\\u" not in message or not _has_half_a_pair(message):
        return message
    # replaced by text of the same length, so that positions stay the same
    escapes = _SURROGATE_PAIR.sub(b"-" * 12, message.replace(rb"\\", b"--"))
    whole = bytearray(message)
    for half in _SURROGATE.finditer(escapes):
        whole[half.start() : half.start() + 6] = rb"\ufffd"
    return bytes(whole)


def _is_too_deep(message: bytes) -> bool:
    # with operations on the whole text, which are fast: a hostile message must not block all other callers for long
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
    """Return the id of a message that cannot be decoded: the value of its outermost `"id"`, else null."""
    depth = 0
    before = [b"", b"", b""]
    unescaped = message.replace(rb"\\", b"--").replace(rb"\"", b"--")  # the same length, so positions stay the same
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
