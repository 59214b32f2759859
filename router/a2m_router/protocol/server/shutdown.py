"""Orderly shutdown: after a signal, a server accepts no new calls and answers those in progress."""

import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc


@asynccontextmanager
async def until_signalled(
    stop: Callable[[], None], *, on_hang_up: Callable[[], None] | None = None
) -> AsyncIterator[None]:
    """Call `stop` at each SIGTERM, SIGINT or SIGHUP during the block.

    With `on_hang_up`, SIGHUP calls that instead.
    """

    async def wait(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP and on_hang_up is not None:
                    on_hang_up()
                else:
                    stop()

    async with anyio.create_task_group() as tasks:
        await tasks.start(wait)
        yield
        tasks.cancel_scope.cancel()


class StoppableStream(anyio.abc.ByteReceiveStream):
    """A stream that `end` can end before its source does. `on_end` is called when it has ended, in either way."""

    def __init__(self, source: anyio.abc.AnyByteReceiveStream, on_end: Callable[[], None] = lambda: None) -> None:
        self._source = source
        self._on_end = on_end
        self._ended = False
        self._reading: anyio.CancelScope | None = None

    def end(self) -> None:
        """End the stream after the bytes already received."""
        self._ended = True
        if self._reading is not None:
            self._reading.cancel()

    async def receive(self, max_bytes: int = 65_536) -> bytes:
        if not self._ended:
            with anyio.CancelScope() as self._reading:
                try:
                    return await self._source.receive()
                except (anyio.EndOfStream, anyio.BrokenResourceError):
                    self._ended = True
        self._on_end()
        raise anyio.EndOfStream

    async def aclose(self) -> None:
        await self._source.aclose()
