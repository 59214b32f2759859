"""What a principal is told of trouble (§6): that there is some, and where, but nothing in the words of those behind.

A tier's refusal, the last line of a child's stderr or a model's error may quote what others have written. They go to
the log; whoever is at the router's own console, or on a federation where all callers see everything, is told them, too.
"""

import logging
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from a2m_router.methods.context import sees_all
from a2m_router.methods.reading import ReadReply
from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import (
    DISK_FULL,
    FILE_GONE,
    FILE_HELD,
    NOT_AS_WRITTEN,
    OVERLOADED,
    STOPPING,
    A2MError,
    Code,
)
from a2m_router.reading.answers import Degraded, Former
from a2m_router.reading.mounted import NO_VECTORS, OTHER_WIDTH
from a2m_router.tiers.failures import CHANGING
from a2m_router.tiers.link import UNACCOUNTED, Refused

_repeats = LogThrottle(logging.getLogger(__name__))

Handler = Callable[[Any, Caller], Awaitable[Any]]

_UNAVAILABLE: Final = "unavailable"

# reasons that are the router's own words
_OURS: Final = frozenset(
    {
        *(UNACCOUNTED, "unsettled", CHANGING, OVERLOADED, STOPPING, DISK_FULL, FILE_HELD, FILE_GONE),
        *(NO_VECTORS, OTHER_WIDTH, NOT_AS_WRITTEN),
    }
)


def redacted(handler: Handler) -> Handler:
    """The handler, whose answers and errors tell a principal no reason but the router's own."""

    async def handle(params: Any, caller: Caller) -> Any:
        if sees_all(caller):
            return await handler(params, caller)
        try:
            result = await handler(params, caller)
        except A2MError as error:
            raise _without_reason(error) from None
        if isinstance(result, ReadReply) and result.degraded is not None:
            result.degraded = [_without_words(down) for down in result.degraded]
        return result

    return handle


def _without_words(down: Degraded) -> Degraded:
    if down.reason in _OURS or isinstance(down, Former):  # of what the caller sees, in the router's own words
        return down
    _repeats.say(logging.INFO, f"an answer had to do without {down.tier}: {down.reason}")
    return msgspec.structs.replace(down, reason=_UNAVAILABLE)


def _without_reason(error: A2MError) -> A2MError:
    if isinstance(error, Refused):
        _repeats.say(logging.WARNING, f"a tier refuses a call: {error}")
        return A2MError(error.code, "a tier refuses this call; the router's log says why")
    data = error.data or {}
    if error.code != Code.INTERNAL_ERROR or "reason" not in data or data["reason"] in _OURS:
        return error
    _repeats.say(logging.WARNING, f"a call failed: {error}")
    who = f"the tier {data['tier']!r}" if "tier" in data else "a server that this takes"
    return A2MError(
        Code.INTERNAL_ERROR,
        f"{who} did not do its part; try again, the router's log says why",
        {**data, "reason": _UNAVAILABLE},
    )
