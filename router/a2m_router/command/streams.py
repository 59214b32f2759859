"""stdin and stdout of the command, as streams that can be waited for and given up: an interruption ends it at once, and
a reader that has gone is noticed."""

import errno
import os
import select
import stat
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from typing import Final

import anyio
import anyio.abc

from a2m_router.process.descriptors import standard_streams

_CHUNK: Final = 65_536
_GONE: Final = frozenset({errno.EPIPE, errno.ECONNRESET})


class OutputClosed(Exception):
    """Nobody reads stdout any more."""


class Streams:
    """`shows` says whether stdout is a terminal, `asks` whether a question can be put to a person."""

    def __init__(
        self,
        source: anyio.abc.ByteReceiveStream,
        sink: anyio.abc.ByteSendStream,
        output: int,
        *,
        shows: bool,
        asks: bool,
    ) -> None:
        self.shows = shows
        self.asks = asks
        self._source = source
        self._sink = sink
        self._output = output

    async def write(self, data: bytes) -> None:
        """Writes to stdout. Raises OutputClosed, and OSError when it cannot be written."""
        try:
            await self._sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as problem:
            cause = problem.__cause__
            if isinstance(cause, OSError) and cause.errno not in _GONE:
                raise OSError(cause.errno, f"stdout: {cause.strerror}") from None
            raise OutputClosed from None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """stdin, as it comes, to its end."""
        while True:
            try:
                yield await self._source.receive(_CHUNK)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async def answer(self, question: str) -> str:
        """What a person answers to a question on stderr; empty at the end of stdin."""
        print(question, end=" ", file=sys.stderr, flush=True)
        held = b""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                held += chunk
                if b"\n" in held:
                    break
        return held.partition(b"\n")[0].decode("utf-8", "replace").strip()

    async def until_nobody_reads(self) -> None:
        """Returns when the reader of stdout has gone; not where that cannot be told without writing."""
        if stat.S_ISFIFO(os.fstat(self._output).st_mode):
            poll = select.poll()
            poll.register(self._output, 0)
            # an event loop reports a pipe without a reader as readable
            while not poll.poll(0):
                await anyio.wait_readable(self._output)
        else:
            await anyio.sleep_forever()


@contextmanager
def streams() -> Iterator[Streams]:
    """This process's; meanwhile whatever else is printed goes to stderr."""
    shows, asks = os.isatty(1), os.isatty(0) and os.isatty(2)
    output = os.dup(1)
    try:
        with standard_streams() as (source, sink):
            yield Streams(source, sink, output, shows=shows, asks=asks)
    finally:
        os.close(output)
