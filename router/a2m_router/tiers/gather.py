"""Asking several tiers at once, where each may fail for itself."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.link import TierDown

T = TypeVar("T")

Failure = A2MError | TierDown | OSError


async def gather_outcomes(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Failure]:
    """What each call came to, in order: its result, or the failure it ended with. None of them cancels another."""
    found: list[T | Failure | None] = [None] * len(calls)

    async def note(place: int, call: Callable[[], Awaitable[T]]) -> None:
        try:
            found[place] = await call()
        except (A2MError, TierDown, OSError) as failure:
            found[place] = failure

    if len(calls) == 1:
        await note(0, calls[0])
    else:
        async with anyio.create_task_group() as tasks:
            for place, call in enumerate(calls):
                tasks.start_soon(note, place, call)
    return found  # type: ignore[return-value]  # every place has been filled


async def gather(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T]:
    """What each call returned, in order. Raises the first failure among them, when all have ended."""
    found: list[T] = []
    for outcome in await gather_outcomes(calls):
        if isinstance(outcome, (A2MError, TierDown, OSError)):
            raise outcome
        found.append(outcome)
    return found
