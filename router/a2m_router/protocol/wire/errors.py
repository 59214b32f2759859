"""Error codes (§7), and the one exception that turns into a JSON-RPC error object.

Code raises an error at the place that detects it; the dispatcher alone turns errors into answers.
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


# The reason of a call that was not begun: too many calls are in progress. In an error's data, as `reason`.
OVERLOADED: Final = "overloaded"

# Seconds after which a client may retry a call that was rejected for overload.
RETRY_AFTER: Final = 1

# The reasons of a rejected write: the disk is full; another program has locked the file; the file was removed or
# replaced. In an error's data, as `reason`.
DISK_FULL: Final = "disk full"
FILE_HELD: Final = "another program holds the file"
FILE_GONE: Final = "the file was removed or replaced while it is open"


# How many requests in a row the service behind a server, such as a2m-rag, has left unanswered. In an error's data.
UNANSWERED: Final = "unanswered"

# The reason of a call that was not carried out, or only in part: the server is stopping. In an error's data, `reason`.
STOPPING: Final = "stopping"


# Characters of a server's text that a sentence quotes, at most.
MAX_QUOTED: Final = 300

# Errors of a tier's server that go on to the caller; all others are faults of the federation.
CALLERS_ERRORS: Final = frozenset({Code.INVALID_PARAMS, Code.QUOTA_EXCEEDED, Code.EMBEDDING_MISMATCH})


class A2MError(Exception):
    """An error answer: a code of §7, a sentence for people, and details for programs.

    Args:
        code: one of `Code`, or any other number from a foreign server.
        message: what was expected, what came and what to do. Clients must not parse it.
        data: structured details, if any; must be JSON.
    """

    def __init__(self, code: int, message: str, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data

    def __repr__(self) -> str:
        return f"A2MError({self.code}, {self.message!r}, {self.data!r})"


# The reason of a rejected call about a record that its tier has lost or holds with other content.
NOT_AS_WRITTEN: Final = "not as it was written"


def cut(text: str, most: int = MAX_QUOTED) -> str:
    """Return a server's text, cut to `most` characters; an ellipsis marks the cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def invalid_params(where: str, problem: str) -> A2MError:
    """Return INVALID_PARAMS with the name of the parameter and what was expected."""
    return A2MError(Code.INVALID_PARAMS, f"{where}: {problem}")


def unknown_tier(name: str, known: list[str]) -> A2MError:
    """Return UNKNOWN_TIER with the names of the existing tiers."""
    return A2MError(Code.UNKNOWN_TIER, f"no tier is called {name!r}; there are: {', '.join(known)}")


def not_supported(capability: str) -> A2MError:
    """Return CAPABILITY_NOT_SUPPORTED for a method, or a write's `tier`, of an undeclared capability."""
    return A2MError(Code.CAPABILITY_NOT_SUPPORTED, f"this server does not implement the '{capability}' capability")


def quota(where: str, limit: int, came: int, unit: str) -> A2MError:
    """Return QUOTA_EXCEEDED for a declared limit (§4.1)."""
    return A2MError(
        Code.QUOTA_EXCEEDED,
        f"{where}: expected at most {limit:,} {unit} in one call, got {came:,}",
        {"parameter": where, "limit": limit},
    )


def embedding_mismatch(where: str, width: int, came: int) -> A2MError:
    """Return EMBEDDING_MISMATCH with both widths (§3.7)."""
    return A2MError(
        Code.EMBEDDING_MISMATCH,
        f"{where}: expected a vector of {width} dimensions, as all vectors here, got {came}",
        {"parameter": where, "dimensions": width},
    )


def overloaded(sentence: str, more: Mapping[str, Any] | None = None) -> A2MError:
    """Return INTERNAL_ERROR for a call that was not begun, since too many are in progress."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"overloaded: {sentence}; try again in a while",
        {"reason": OVERLOADED, "retry_after": RETRY_AFTER, **(more or {})},
    )


def stopping() -> A2MError:
    """Return INTERNAL_ERROR for a call that the stopping server has cancelled or not begun."""
    return A2MError(
        Code.INTERNAL_ERROR,
        "the server is stopping; repeat the call when it is back",
        {"reason": STOPPING, "retry_after": RETRY_AFTER},
    )


def no_room(error: A2MError) -> str | None:
    """Return the reason of an error that affects every call to the server at present: overload, a full disk, or a
    locked file. Return None for any other error."""
    reason = (error.data or {}).get("reason")
    return reason if reason in (OVERLOADED, DISK_FULL, FILE_HELD) else None


def unanswered_in(error: A2MError) -> int:
    """Return how many requests in a row the service behind a server has left unanswered, by its error; 0 by default."""
    times = (error.data or {}).get(UNANSWERED)
    return times if type(times) is int and times > 0 else 0


def disk_reason(problem: OSError) -> str:
    """Return why the disk failed; DISK_FULL if it is full."""
    return DISK_FULL if problem.errno == errno.ENOSPC else problem.strerror or str(problem)


def disk_failed(problem: OSError, whose: str = "the") -> A2MError:
    """Return INTERNAL_ERROR for a disk that failed during the call."""
    reason = disk_reason(problem)
    data: dict[str, Any] = {"reason": reason}
    if reason == DISK_FULL:
        sentence = "disk is full: nothing was written; try again when there is space"
    elif reason == FILE_HELD:
        sentence = f"file cannot be written to: {reason}; nothing was written; try again when the lock is released"
        data["retry_after"] = RETRY_AFTER
    elif reason == FILE_GONE:
        sentence = f"file cannot be written to: {reason}; nothing was written; put it back, or stop this server"
    else:
        sentence = f"disk failed: {reason}"
    return A2MError(Code.INTERNAL_ERROR, f"{whose} {sentence}", data)
