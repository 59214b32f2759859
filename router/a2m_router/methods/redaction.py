"""Redaction: what a principal learns of failures (§6). It gets the failed tier, but not the error text behind it.

A tier's error, the last line of a child's stderr or a model's error may quote what others have written. They go to the
log. A caller that may see all records (`sees_all`) gets them, too.
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

# reasons that the router itself words: they quote no record
_OURS: Final = frozenset(
    {
        *(UNACCOUNTED, "unsettled", CHANGING, OVERLOADED, STOPPING, DISK_FULL, FILE_HELD, FILE_GONE),
        *(NO_VECTORS, OTHER_WIDTH, NOT_AS_WRITTEN),
    }
)


def redacted(handler: Handler) -> Handler:
    """Wrap a handler: in replies and errors to a principal, keep only reasons that the router itself words."""

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
    if down.reason in _OURS or isinstance(down, Former):  # the router's own words, about records that the caller sees
        return down
    _repeats.say(logging.INFO, f"tier={down.tier} missing or incomplete in an answer: {down.reason}")
    return msgspec.structs.replace(down, reason=_UNAVAILABLE)


def _without_reason(error: A2MError) -> A2MError:
    if isinstance(error, Refused):
        _repeats.say(logging.WARNING, f"a tier refuses a call: {error}")
        return A2MError(error.code, "a tier refuses this call; the router's log has the reason")
    data = error.data or {}
    if error.code != Code.INTERNAL_ERROR or "reason" not in data or data["reason"] in _OURS:
        return error
    _repeats.say(logging.WARNING, f"a call failed: {error}")
    who = f"the tier {data['tier']!r}" if "tier" in data else "a server that this call needs"
    return A2MError(
        Code.INTERNAL_ERROR,
        f"{who} did not do its part; try again, the router's log has the reason",
        {**data, "reason": _UNAVAILABLE},
    )
