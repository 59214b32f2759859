"""The answer that a message must get, and whether an answer is correct, by the decoder of the standard library.

The router's own codec is under test and is not used here.
"""

import json
import re
from itertools import accumulate
from typing import Any, Final

import msgspec
from msgspec import Raw

from a2m_router.protocol.wire.errors import Code
from a2m_router.protocol.wire.jsonrpc import MAX_DEPTH
from a2m_router.protocol.wire.lines import BYTE_ORDER_MARK
from tests.verification.fuzz.generating import MAX_MESSAGE
from tests.verification.fuzz.reporting import Wrong

CODES: Final = frozenset(Code)


class Owed(msgspec.Struct, frozen=True):
    """The answer that a message must get.

    `id` are its bytes; None for a malformed message, whose answer has the id null or one of `ids`.
    """

    message: bytes
    id: bytes | None = None
    ids: tuple[Any, ...] = ()


def is_blank(line: bytes) -> bool:
    """Return whether a line needs no answer because it is empty except for a byte order mark."""
    return not line.removeprefix(BYTE_ORDER_MARK).strip()


def owed(message: bytes, limit: int = MAX_MESSAGE) -> Owed | None:
    """Return the answer that a message must get; None for a notification. The message must not be blank."""
    if len(message) > limit:
        return Owed(message)
    text = message.removeprefix(BYTE_ORDER_MARK)
    try:
        value = strict(text)
    except (ValueError, RecursionError):
        return Owed(message, None, _ids(message))
    # objects are tuples of pairs here, so that a member hidden by a second one of the same name is checked, too
    if not isinstance(value, tuple):
        return Owed(message)
    members = dict(value)
    good = (
        members.get("jsonrpc") == "2.0"
        and isinstance(members.get("method"), str)
        and isinstance(members.get("params", ()), tuple)
        and not isinstance(members.get("id"), bool | list | tuple)
        and not _has_half_a_pair(message, value)
        and not _is_too_deep(message)
    )
    if not good:
        return Owed(message, None, _ids(message))
    if "id" not in members:
        return None
    return Owed(message, bytes(msgspec.json.decode(text, type=dict[str, Raw])["id"]))


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def strict(text: bytes) -> Any:
    """Return the value with objects as tuples of pairs and numbers as `_Number`. Raises ValueError, RecursionError."""
    return json.loads(
        text.decode(), parse_constant=_refuse, parse_int=_Number, parse_float=_Number, object_pairs_hook=tuple
    )


class _Number:
    """Any number; some are larger than any type."""

    def __init__(self, text: str) -> None:
        pass


def _has_half_a_pair(message: bytes, value: Any) -> bool:
    if b"\\u" not in message:
        return False
    try:
        json.dumps(value, ensure_ascii=False, default=id).encode()
    except UnicodeEncodeError:
        return True
    return False


def _is_too_deep(message: bytes) -> bool:
    if message.count(b"[") + message.count(b"{") <= MAX_DEPTH:
        return False
    outside = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", message)
    steps = ((byte in b"[{") - (byte in b"]}") for byte in outside)
    return max(accumulate(steps)) > MAX_DEPTH


_ID: Final = re.compile(rb'"id"\s*:\s*("(?:[^"\\]|\\.)*"|[^\s,}\]"]+)', re.DOTALL)


def _ids(message: bytes) -> tuple[Any, ...]:
    return tuple(value for token in _ID.findall(message) if (value := _scalar(token)) is not None)


def _scalar(token: bytes) -> Any:
    try:
        return json.loads(token.decode())
    except (ValueError, RecursionError):
        return None


class Answer(msgspec.Struct, frozen=True):
    """An answer as it came.

    `kind` is `result`, the name of an error code, or `notification`, which has no id. `fault` is a finding where the
    server reports that it failed, unless a tier was late or other calls were faster.
    """

    id: bytes
    kind: str
    fault: str | None = None


def read_answer(line: bytes) -> Answer:
    """Read an answer. Raises Wrong if it is not a JSON-RPC answer on one line, or has a code that §7 does not have."""
    if b"\n" in line or b"\r" in line:
        raise Wrong("a line break within an answer")
    try:
        value = strict(line)
        members = msgspec.json.decode(line, type=dict[str, Raw])
    except (ValueError, RecursionError, msgspec.MsgspecError) as problem:
        raise Wrong(f"not JSON, {problem}: {shown(line)}") from None
    if not isinstance(value, tuple) or len(members) != len(value) or bytes(members.get("jsonrpc", b"")) != b'"2.0"':
        raise Wrong(f"not one JSON-RPC 2.0 object: {shown(line)}")
    names = members.keys() - {"jsonrpc"}
    if names == {"method", "params"} and bytes(members["method"]) == b'"memory/event"':
        return Answer(b"", "notification")
    if names == {"id", "result"}:
        return Answer(bytes(members["id"]), "result")
    if names != {"id", "error"}:
        raise Wrong(f"neither a result nor an error: {shown(line)}")
    error = msgspec.json.decode(members["error"])
    if not isinstance(error, dict) or error.get("code") not in CODES or not isinstance(error.get("message"), str):
        raise Wrong(f"not an error of §7: {shown(line)}")
    code = Code(error["code"])
    is_fault = code is Code.INTERNAL_ERROR and not _is_excused(error)
    return Answer(bytes(members["id"]), code.name, f"the server failed: {shown(line)}" if is_fault else None)


def _is_excused(error: dict[str, Any]) -> bool:
    # the machine may be slow, and many calls change the sources of a summary
    data = error.get("data")
    if not isinstance(data, dict) or "retry_after" not in data:
        return False
    return data.get("reason") == "changing" or ("tier" in data and "no answer within" in str(data.get("reason")))


def shown(line: bytes) -> str:
    return repr(line if len(line) <= 400 else line[:400] + b"...")[2:-1]


def suits(owed: Owed, id: bytes) -> bool:
    """Return whether an answer with this id belongs to the message."""
    if owed.id is not None:
        return id == owed.id
    return id == b"null" or _scalar(id) in owed.ids


class Pending:
    """Messages that wait for an answer; answers may come in any order.

    A malformed message may be answered with the id null. Such answers are only counted until all have come.
    """

    def __init__(self) -> None:
        self._owed: list[Owed] = []
        self._nulls = 0

    def __len__(self) -> int:
        return len(self._owed) - self._nulls

    def add(self, owed: Owed) -> None:
        self._owed.append(owed)

    def take(self, id: bytes) -> tuple[bytes, ...]:
        """Return the messages that an answer may belong to. Raises Wrong if no message waits for it."""
        if id == b"null":
            self._nulls += 1
            if self._nulls > len(self._owed):
                raise Wrong("more answers with id null than messages")
            return tuple(owed.message for owed in self._owed if suits(owed, id))
        fitting = [owed for owed in self._owed if suits(owed, id)]
        if not fitting:
            raise Wrong(f"an answer to {shown(id)}, which nobody asked or which is answered")
        taken = next((owed for owed in fitting if owed.id is not None), fitting[0])
        self._owed.remove(taken)
        return (taken.message,)

    def settle(self) -> None:
        """Check the answers with id null, after all answers. Raises Wrong if a message with a readable id got one."""
        left = [owed for owed in self._owed if not suits(owed, b"null")]
        self._owed.clear()
        self._nulls = 0
        if left:
            raise Wrong(f"null answered the message with id {shown(left[0].id or b'')}")

    def messages(self) -> tuple[bytes, ...]:
        return tuple(owed.message for owed in self._owed)
