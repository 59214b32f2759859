"""stdin and stdout of the command as cancellable streams.

So an interruption ends the command immediately, and the command ends when the reader of its output does.
"""

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
    """The reader of stdout has closed it."""


class Streams:
    """The streams. `shows`: stdout is a terminal. `asks`: stdin and stderr are, so a person can answer a question."""

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
        """Write to stdout. Raises OutputClosed if its reader has closed it, OSError if the write fails otherwise."""
        try:
            await self._sink.send(data)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as problem:
            cause = problem.__cause__
            if isinstance(cause, OSError) and cause.errno not in _GONE:
                raise OSError(cause.errno, f"stdout: {cause.strerror}") from None
            raise OutputClosed from None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the chunks of stdin until its end."""
        while True:
            try:
                yield await self._source.receive(_CHUNK)
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async def answer(self, question: str) -> str:
        """Print a question to stderr, and return the line that is typed; an empty one at the end of stdin."""
        print(question, end=" ", file=sys.stderr, flush=True)
        held = b""
        async with aclosing(self.chunks()) as chunks:
            async for chunk in chunks:
                held += chunk
                if b"\n" in held:
                    break
        return held.partition(b"\n")[0].decode("utf-8", "replace").strip()

    async def until_reader_closes(self) -> None:
        """Return when the reader of stdout has closed it; never, if stdout is not a pipe: only a pipe shows this."""
        if stat.S_ISFIFO(os.fstat(self._output).st_mode):
            poll = select.poll()
            poll.register(self._output, 0)
            # an event loop reports a pipe without a reader as readable, but may do so in other cases, too
            while not poll.poll(0):
                await anyio.wait_readable(self._output)
        else:
            await anyio.sleep_forever()


@contextmanager
def streams() -> Iterator[Streams]:
    """Yield the streams of this process. While the block runs, all other output to stdout goes to stderr."""
    shows, asks = os.isatty(1), os.isatty(0) and os.isatty(2)
    output = os.dup(1)
    try:
        with standard_streams() as (source, sink):
            yield Streams(source, sink, output, shows=shows, asks=asks)
    finally:
        os.close(output)
