"""Error codes (§7), and the one exception that turns into a JSON-RPC error object.

Errors are raised where the mistake is seen and become answers in one place, the dispatcher.
"""

import errno
from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Final


class Code(IntEnum):
    """JSON-RPC's own codes and those that A2M allocates (§7)."""

    PARSE_ERROR = -32700
    INVALID_REQUEST = -32600
    METHOD_NOT_FOUND = -32601
    INVALID_PARAMS = -32602
    INTERNAL_ERROR = -32603
    UNKNOWN_RECORD = -32001
    UNKNOWN_TIER = -32002
    CAPABILITY_NOT_SUPPORTED = -32003
    READ_ONLY = -32004
    SCOPE_DENIED = -32005
    QUOTA_EXCEEDED = -32006
    PROTOCOL_NOT_SUPPORTED = -32007
    EMBEDDING_MISMATCH = -32008


# Why a call was not begun: as many are under way as there may be. In an error's data, as `reason`.
OVERLOADED: Final = "overloaded"

# After so many seconds it may be tried again what found no room.
RETRY_AFTER: Final = 1

# Why nothing was written: there is no room; another program holds a lock on the file; the file is not where it was. In
# an error's data, as `reason`.
DISK_FULL: Final = "disk full"
FILE_HELD: Final = "another program holds the file"
FILE_GONE: Final = "the file was removed or replaced while it is open"


# How many times in a row by now the service behind a server, such as a2m-rag, has not answered it. In an error's data.
UNANSWERED: Final = "unanswered"

# Why a call was not carried out, or not to its end: the server is being ended. In an error's data, as `reason`.
STOPPING: Final = "stopping"


# Characters of what a server says, in a sentence of ours.
MAX_QUOTED: Final = 300

# Errors of a server behind that are the caller's to hear; any other is the federation's own trouble.
CALLERS_ERRORS: Final = frozenset({Code.INVALID_PARAMS, Code.QUOTA_EXCEEDED, Code.EMBEDDING_MISMATCH})


class A2MError(Exception):
    """An answer that is an error: a code of §7, a sentence for a person, and detail for a program.

    Args:
        code: one of `Code`, or whatever number a foreign server sent.
        message: what was expected, what came and what to do. Never parsed by a client.
        data: structured detail, if any; must be JSON.
    """

    def __init__(self, code: int, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __repr__(self) -> str:
        return f"A2MError({self.code}, {self.message!r}, {self.data!r})"


# Why a call about a record is refused that its tier has lost, or holds otherwise than it was written.
NOT_AS_WRITTEN: Final = "not as it was written"


def cut(said: str, most: int = MAX_QUOTED) -> str:
    """What a server says, as far as a sentence quotes it; where that is not all, an ellipsis shows it."""
    return said if len(said) <= most else f"{said[: most - 1]}…"


def invalid_params(where: str, problem: str) -> A2MError:
    """INVALID_PARAMS naming the parameter and what it should have been."""
    return A2MError(Code.INVALID_PARAMS, f"{where}: {problem}")


def unknown_tier(name: str, known: list[str]) -> A2MError:
    """UNKNOWN_TIER naming the tiers there are."""
    return A2MError(Code.UNKNOWN_TIER, f"no tier is called {name!r}; there are: {', '.join(known)}")


def not_supported(capability: str) -> A2MError:
    """CAPABILITY_NOT_SUPPORTED for a method, or a write's `tier`, of an undeclared capability."""
    return A2MError(Code.CAPABILITY_NOT_SUPPORTED, f"this server does not implement the '{capability}' capability")


def quota(where: str, limit: int, came: int, unit: str) -> A2MError:
    """QUOTA_EXCEEDED for a declared limit (§4.1)."""
    return A2MError(
        Code.QUOTA_EXCEEDED,
        f"{where}: at most {limit:,} {unit} in one call, {came:,} came",
        {"parameter": where, "limit": limit},
    )


def embedding_mismatch(where: str, width: int, came: int) -> A2MError:
    """EMBEDDING_MISMATCH naming both widths (§3.7)."""
    return A2MError(
        Code.EMBEDDING_MISMATCH,
        f"{where}: the vectors kept here have {width} dimensions, this one has {came}",
        {"parameter": where, "dimensions": width},
    )


def overloaded(sentence: str, more: Mapping[str, Any] | None = None) -> A2MError:
    """INTERNAL_ERROR for a call that was not begun, since too many are under way."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"no room for this call: {sentence}; try again in a while",
        {"reason": OVERLOADED, "retry_after": RETRY_AFTER, **(more or {})},
    )


def stopping() -> A2MError:
    """INTERNAL_ERROR for a call that the end of the server has cut short, or kept from being begun."""
    return A2MError(
        Code.INTERNAL_ERROR,
        "the server is stopping; repeat the call when it is back",
        {"reason": STOPPING, "retry_after": RETRY_AFTER},
    )


def no_room(error: A2MError) -> str | None:
    """The reason of an error that says that nothing can be taken at present, whatever is asked for: there is no room
    for the call or on the disk, or the file is held; None of any other."""
    reason = (error.data or {}).get("reason")
    return reason if reason in (OVERLOADED, DISK_FULL, FILE_HELD) else None


def unanswered_in(error: A2MError) -> int:
    """How many times in a row the service behind a server has not answered it, as its error says; 0 where it does not
    say so."""
    times = (error.data or {}).get(UNANSWERED)
    return times if type(times) is int and times > 0 else 0


def disk_reason(problem: OSError) -> str:
    """Why a disk did not take, or give, what was needed; DISK_FULL where it has no room."""
    return DISK_FULL if problem.errno == errno.ENOSPC else problem.strerror or str(problem)


def disk_failed(problem: OSError, whose: str = "the") -> A2MError:
    """INTERNAL_ERROR for a disk that did not take, or give, what the call needed."""
    reason = disk_reason(problem)
    data: dict[str, Any] = {"reason": reason}
    if reason == DISK_FULL:
        sentence = "disk is full: nothing was written; try again when there is room"
    elif reason == FILE_HELD:
        sentence = f"file cannot be written to: {reason}; nothing was written; try again when that has let go of it"
        data["retry_after"] = RETRY_AFTER
    elif reason == FILE_GONE:
        sentence = f"file cannot be written to: {reason}; nothing was written; put it back, or end this server"
    else:
        sentence = f"disk failed: {reason}"
    return A2MError(Code.INTERNAL_ERROR, f"{whose} {sentence}", data)
