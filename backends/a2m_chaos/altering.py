"""Changes to messages. All other parts of a message keep their bytes. Pure."""

from collections.abc import Callable
from hashlib import sha256
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_chaos.plan import Field

# an id that no client's counter reaches
_ANOTHER_ID: Final = Raw(b"9007199254740991")
_ADDED: Final = " [altered]"


class Call(msgspec.Struct, frozen=True):
    """The parts of a call that faults need.

    Args:
        method: its method.
        id: its id, as raw JSON.
        key: its id in a normal form, which matches the id of the answer even if that is written differently.
    """

    method: str
    id: Raw
    key: bytes


class _Envelope(msgspec.Struct):
    method: str | UnsetType = UNSET
    id: Raw | UnsetType = UNSET


_Object = dict[str, Raw]

_ids = msgspec.json.Decoder(int | float | str)
_envelopes = msgspec.json.Decoder(_Envelope)
_objects = msgspec.json.Decoder(_Object)
_lists = msgspec.json.Decoder(list[Raw])
_encode = msgspec.json.Encoder().encode


def call_in(message: bytes) -> Call | None:
    """Return the call in a message; None for a notification, an answer, or an invalid message.

    A message whose id is neither a string nor a number is not a call: its answer, if any, has the id null, which no
    call has.
    """
    try:
        envelope = _envelopes.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    if envelope.method is UNSET or envelope.id is UNSET:
        return None
    key = _key(envelope.id)
    return None if key is None else Call(envelope.method, envelope.id, key)


def answered_in(message: bytes) -> bytes | None:
    """Return the key of the call that a message answers; None for a notification, a call, or an invalid message."""
    try:
        envelope = _envelopes.decode(message)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return None if envelope.id is UNSET or envelope.method is not UNSET else _key(envelope.id)


def with_another_id(answer: bytes) -> bytes:
    """Return the answer with an id that no call has."""
    return _with(answer, "id", lambda _: _ANOTHER_ID)


def padded(answer: bytes, size: int) -> bytes:
    """Return the answer with an additional member, so that it has `size` bytes or a few more."""
    return _with(answer, "padding", lambda _: _raw("x" * max(0, size - len(answer))))


def acknowledgement(message: bytes) -> bytes:
    """Return an answer of success to a `memory/remember` that is not carried out."""
    ids = []
    for position, record in enumerate(_lists.decode(_params(message).get("records", Raw(b"[]")))):
        made_up = sha256(b"%d/%b" % (position, message)).hexdigest()[:32]
        ids.append(_objects.decode(record).get("id", _raw(made_up)))
    return _encode({"jsonrpc": "2.0", "id": _id(message), "result": {"ids": ids}})


def with_altered_write(message: bytes, field: Field) -> bytes:
    """Return the `memory/remember` with a changed field in its first record."""
    return _with(message, "params", lambda params: _within(params, "records", lambda given: _first(given, field)))


def with_altered_answer(answer: bytes, field: Field) -> bytes:
    """Return the answer of a read with a changed field in its first record; unchanged if there is no readable one."""

    def alter(result: Raw) -> Raw:
        held = _objects.decode(result)
        if "records" in held:
            return _within(result, "records", lambda given: _first(given, field))
        if bytes(held.get("record", Raw(b"null"))).strip() != b"null":
            return _within(result, "record", lambda record: _altered(record, field))
        return result

    try:
        return _with(answer, "result", alter) if "result" in _objects.decode(answer) else answer
    except msgspec.MsgspecError:
        return answer


def less_to_forget(message: bytes) -> tuple[bytes | None, int]:
    """Return the `memory/forget` without its last id, and how many ids it had. The message is None if no id is left."""
    params = _params(message)
    ids = _lists.decode(params["ids"]) if bytes(params.get("ids", Raw(b"null"))).strip() != b"null" else []
    if len(ids) < 2:
        return None, len(ids)
    return _with(message, "params", lambda params: _within(params, "ids", lambda _: _raw(ids[:-1]))), len(ids)


def as_if_forgotten(message: bytes, count: int) -> bytes:
    """Return the answer to a `memory/forget` that forgot `count` records."""
    return _encode({"jsonrpc": "2.0", "id": _id(message), "result": {"forgotten": count}})


def _key(id: Raw) -> bytes | None:
    try:
        held = _ids.decode(id)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return _encode(int(held) if isinstance(held, float) and held.is_integer() else held)


def _altered(record: Raw, field: Field) -> Raw:
    held = _objects.decode(record)
    if field == "content":
        held["content"] = _raw(msgspec.json.decode(held.get("content", Raw(b'""')), type=str) + _ADDED)
    else:
        metadata = held.get("metadata", Raw(b"null"))
        inner = {} if bytes(metadata).strip() == b"null" else _objects.decode(metadata)
        held["metadata"] = _raw({**inner, "altered": True})
    return _raw(held)


def _first(records: Raw, field: Field) -> Raw:
    given = _lists.decode(records)
    return _raw([*[_altered(record, field) for record in given[:1]], *given[1:]])


def _with(message: bytes, key: str, change: Callable[[Raw], Raw]) -> bytes:
    return bytes(_within(Raw(message), key, change))


def _within(object: Raw, key: str, change: Callable[[Raw], Raw]) -> Raw:
    held = _objects.decode(object)
    return _raw({**held, key: change(held.get(key, Raw(b"null")))})


def _raw(value: Any) -> Raw:
    return Raw(_encode(value))


def _params(message: bytes) -> _Object:
    return _objects.decode(_objects.decode(message).get("params", Raw(b"{}")))


def _id(message: bytes) -> Raw:
    return _objects.decode(message)["id"]
