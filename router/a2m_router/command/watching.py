"""`a2m watch`: shows events as they happen, by push if the server supports it, else by polling."""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import anyio
import msgspec

from a2m_router.command import showing
from a2m_router.command.running import DONE, Running
from a2m_router.protocol.client.client import ConnectionLost, settled

Emit = Callable[[Mapping[str, Any]], Awaitable[None]]


async def watch(run: Running) -> int:
    """Show events until a signal stops the command, or the reader of its output has closed it."""
    described = await run.memory.describe()

    async def emit(event: Mapping[str, Any]) -> None:
        await run.streams.write(msgspec.json.encode(event) + b"\n" if run.raw else showing.event(event))

    async def follow() -> None:
        if described.events is not None and described.events.push:
            await run.memory.subscribe(run.options.kinds)
            await _emit_pushed(run, emit)
        else:
            async with aclosing(run.memory.watch(run.options.kinds, interval=run.options.interval)) as events:
                async for event in events:
                    await emit(event)

    async with anyio.create_task_group() as tasks:

        async def end_with_the_reader() -> None:
            await run.streams.until_reader_closes()
            tasks.cancel_scope.cancel()

        tasks.start_soon(end_with_the_reader)
        await follow()
    return DONE


async def _emit_pushed(run: Running, emit: Emit) -> None:
    """Emit pushed events until the connection is lost, then raise ConnectionLost."""

    async def end_with_the_server() -> None:
        await run.asking.lost.wait()
        run.no_more()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(end_with_the_server)
        async for event in run.pushed:
            await emit(event)
    raise ConnectionLost(run.asking.reason or "the server has ended", settled())
