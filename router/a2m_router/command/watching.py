"""`a2m watch`: events as they come, by themselves where the server offers that, else by asking for them."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import anyio
import msgspec

from a2m_router.command import showing
from a2m_router.command.running import DONE, Running
from a2m_router.protocol.client.client import ConnectionLost, settled

Tell = Callable[[Mapping[str, Any]], Awaitable[None]]


async def watch(run: Running) -> int:
    """Ends when it is told to, or when nobody reads what it writes."""
    described = await run.memory.describe()

    async def tell(event: Mapping[str, Any]) -> None:
        await run.streams.write(msgspec.json.encode(event) + b"\n" if run.raw else showing.event(event))

    async def follow() -> None:
        if described.events is not None and described.events.push:
            await run.memory.subscribe(run.options.kinds)
            await _tell_pushed(run, tell)
        else:
            async with aclosing(run.memory.watch(run.options.kinds, interval=run.options.interval)) as events:
                async for event in events:
                    await tell(event)

    async with anyio.create_task_group() as tasks:

        async def end_with_the_reader() -> None:
            await run.streams.until_nobody_reads()
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_with_the_reader)
        await follow()
    return DONE


async def _tell_pushed(run: Running, tell: Tell) -> None:
    """Tells events as they come by themselves, until the connection is lost."""

    async def end_with_the_server() -> None:
        await run.asking.lost.wait()
        run.no_more()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_with_the_server)
        async for event in run.pushed:
            await tell(event)
    raise ConnectionLost(run.asking.reason or "it has ended", settled())
