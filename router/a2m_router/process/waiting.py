"""Waiting for whichever of several things comes first."""

from collections.abc import Awaitable, Callable

import anyio


async def until_any(*waits: Callable[[], Awaitable[object]]) -> None:
    """Returns when the first of `waits` has; the others are cancelled."""
    async with anyio.create_task_group() as tasks:

        async def until(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            tasks.cancel_scope.cancel()

        for wait in waits:
            tasks.start_soon(until, wait)
