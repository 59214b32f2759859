"""Concurrent calls to several tiers, each of which may fail by itself."""

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.link import TierDown

T = TypeVar("T")

Failure = A2MError | TierDown | OSError


async def gather_outcomes(calls: Sequence[Callable[[], Awaitable[T]]]) -> list[T | Failure]:
    """Run the calls at once; return for each, in order, its result or its failure. No failure cancels another call."""
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
    """Run the calls at once; return their results in order. Raises the first failure once all calls have ended."""
    found: list[T] = []
    for outcome in await gather_outcomes(calls):
        if isinstance(outcome, (A2MError, TierDown, OSError)):
            raise outcome
        found.append(outcome)
    return found
