"""Waiting: for the first of several events, and between retries."""

from collections.abc import Awaitable, Callable, Iterator

import anyio


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Wait until the first of `waits` returns, and cancel the others."""
    async with anyio.create_task_group() as tasks:

        async def until(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(until, wait)


def doubling(first: float, longest: float) -> Iterator[float]:
    """Yield the waits between retries, in seconds: each twice the one before, up to the longest. Never ends."""
    while True:
        yield first
        first = min(2 * first, longest)
