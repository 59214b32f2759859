"""The stdio binding's server end (§8.2): one JSON message per line in, one per line out.

- Requests are begun in the order in which they came, and served concurrently; all lines of a chunk are begun before the
  first is worked on, so that a store can carry out together what came together.
- A request is under way until its answer is written. At `max_underway` nothing more is read: a peer that does not
  read its answers is not read either.
- One task writes. Answers that are ready together go out in one piece.
"""

from collections import deque
from typing import Final

import anyio
import anyio.abc

from router.a2m.descriptors import standard_streams
from router.a2m.jsonrpc import NULL_ID, render_error, too_long
from router.a2m.lines import DEFAULT_MAX_MESSAGE, LineSplitter
from router.a2m.server import Answering, Caller

LOCAL: Final = Caller(asserts_owner=True)


async def serve_stdio(
    answer: Answering,
    *,
    caller: Caller = LOCAL,
    max_message: int = DEFAULT_MAX_MESSAGE,
    max_underway: int = 256,
    grace: float = 10.0,
) -> None:
    """Serves this process's stdin and stdout as `serve_lines` does; meanwhile what is printed goes to stderr."""
    with standard_streams() as (source, sink):
        await serve_lines(
            answer, source, sink, caller=caller, max_message=max_message, max_underway=max_underway, grace=grace
        )


async def serve_lines(
    answer: Answering,
    source: anyio.abc.AnyByteReceiveStream,
    sink: anyio.abc.AnyByteSendStream,
    *,
    caller: Caller = LOCAL,
    max_message: int = DEFAULT_MAX_MESSAGE,
    max_underway: int = 256,
    grace: float = 10.0,
) -> None:
    """Serves until `source` ends, then answers what is under way; returns early if `sink` breaks.

    Args:
        answer: must not raise.
        caller: who is at the other end.
        max_message: bytes in a line; a longer one is answered INVALID_REQUEST with id null and skipped.
        max_underway: requests begun whose answers are not yet written.
        grace: seconds after the end of `source` for what is under way; then it is cancelled.
    """
    service = _Service(answer, sink, caller, max_message, max_underway)
    async with anyio.create_task_group() as whole:
        whole.start_soon(service.write, whole.cancel_scope)
        async with anyio.create_task_group() as requests:
            await service.read(source, requests)
            whole.cancel_scope.deadline = anyio.current_time() + grace
        await service.written()
        whole.cancel_scope.cancel()


class _Service:
    def __init__(
        self,
        answer: Answering,
        sink: anyio.abc.AnyByteSendStream,
        caller: Caller,
        max_message: int,
        max_underway: int,
    ) -> None:
        self._answer = answer
        self._sink = sink
        self._caller = caller
        self._max_message = max_message
        self._max_underway = max_underway
        self._room = anyio.Semaphore(max_underway, max_value=max_underway, fast_acquire=True)
        self._came: deque[bytes | None] = deque()
        self._ready: list[bytes] = []
        self._more = anyio.Event()

    async def read(self, source: anyio.abc.AnyByteReceiveStream, requests: anyio.abc.TaskGroup) -> None:
        """Begins a task for every line until the source ends."""
        splitter = LineSplitter(self._max_message)
        ended = False
        while not ended:
            try:
                lines = splitter.feed(await source.receive())
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError):
                lines = splitter.end()
                ended = True
            for line in lines:
                await self._room.acquire()
                self._came.append(line)
                requests.start_soon(self._serve_next)

    async def _serve_next(self) -> None:
        # whichever task happens to run first takes the line that came first: no scheduler promises an order of tasks
        line = self._came.popleft()
        if line is None:
            reply: bytes | None = render_error(NULL_ID, too_long(self._max_message))
        else:
            reply = await self._answer(line, self._caller)
        if reply is None:
            self._room.release()
        else:
            self._ready.append(reply)
            self._more.set()

    async def write(self, scope: anyio.CancelScope) -> None:
        """Writes answers as they get ready; cancels `scope` when there is nobody left to write to."""
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            replies, self._ready = self._ready, []
            try:
                await self._sink.send(b"\n".join(replies) + b"\n")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                scope.cancel()
                return
            for _ in replies:
                self._room.release()

    async def written(self) -> None:
        """Returns when no request is under way and every answer has been written."""
        for _ in range(self._max_underway):
            await self._room.acquire()
