"""The stdio binding's server end (§8.2): one JSON message per line in, one per line out.

- Requests begin in the order of their arrival and run concurrently. All lines of a chunk begin before the first one
  runs, so that a store can commit them as a group.
- A request is in progress until its answer is written. At `max_underway` requests, or `max_held` bytes of requests,
  reading stops: a peer that does not read its answers cannot send more calls.
- One task writes. Answers that are ready together go out in one piece.
- The next notifications (§4.13) are taken from the feed only when the earlier ones are written, and after the answer of
  the call that caused them: a peer that does not read blocks no other connection, and needs no memory.
"""

from collections import deque
from collections.abc import Callable
from typing import Final

import anyio
import anyio.abc
import msgspec

from a2m_router.process.descriptors import standard_streams
from a2m_router.protocol.server.event_log import UNDERWAY, Call, Feed
from a2m_router.protocol.server.server import Answering, Caller
from a2m_router.protocol.wire.jsonrpc import NULL_ID, render_error, too_long
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE, LineSplitter

LOCAL: Final = Caller(asserts_owner=True)

DEFAULT_MAX_HELD: Final = 256 * 2**20

# notifications that go out in one piece
_NOTICES: Final = 100


async def serve_stdio(
    answer: Answering,
    *,
    caller: Caller = LOCAL,
    max_message: int = DEFAULT_MAX_MESSAGE,
    max_underway: int = 256,
    grace: float = 10.0,
) -> None:
    """Serve this process's stdin and stdout as `serve_lines` does; prints go to stderr meanwhile."""
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
    max_held: int = DEFAULT_MAX_HELD,
    grace: float = 10.0,
) -> None:
    """Serve until `source` ends, then answer the calls in progress; return early if `sink` breaks.

    Args:
        answer: must not raise.
        caller: the client at the other end.
        max_message: bytes in a line; a longer one is answered INVALID_REQUEST with id null and skipped.
        max_underway: requests in progress: begun, with answers not yet written.
        max_held: bytes of the requests being carried out; one that does not fit waits until it does.
        grace: seconds after the end of `source` for calls in progress; then they are cancelled.
    """
    service = _Service(answer, sink, caller, max_message, max_underway, max_held)
    try:
        async with anyio.create_task_group() as whole:
            whole.start_soon(service.write, whole.cancel_scope)
            whole.start_soon(service.push)
            async with anyio.create_task_group() as requests:
                await service.read(source, requests)
                whole.cancel_scope.deadline = anyio.current_time() + grace
            await service.written()
            whole.cancel_scope.cancel()
    finally:
        service.follow(None)


class _Underway:
    """A request in progress."""

    def __init__(self, connection: object) -> None:
        self.connection = connection
        self.answered = False


class _Service:
    """One connection. Mutable state: received lines, lines ready to be written, and the feed that is followed."""

    def __init__(
        self,
        answer: Answering,
        sink: anyio.abc.AnyByteSendStream,
        caller: Caller,
        max_message: int,
        max_underway: int,
        max_held: int,
    ) -> None:
        self._answer = answer
        self._sink = sink
        self._caller = msgspec.structs.replace(caller, channel=self)
        self._max_message = max_message
        self._max_underway = max_underway
        self._room = anyio.Semaphore(max_underway, max_value=max_underway, fast_acquire=True)
        self._max_held = max_held
        self._held = 0
        self._freed = anyio.Event()
        self._came: deque[bytes | None] = deque()
        self._ready: list[bytes] = []
        self._answers = 0  # how many ready lines are answers; the others are notifications
        self._more = anyio.Event()
        self._sent = anyio.Event()
        self._writing = anyio.Lock()
        self._mark = object()  # identifies this connection in a log, which outlives it
        self._feed: Feed | None = None
        self._subscribing: Call | None = None
        self._stirred = anyio.Event()

    async def read(self, source: anyio.abc.AnyByteReceiveStream, requests: anyio.abc.TaskGroup) -> None:
        """Begin a task for every line until the source ends."""
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
                while self._held and self._held + _size(line) > self._max_held:
                    self._freed = anyio.Event()
                    await self._freed.wait()
                self._held += _size(line)
                self._came.append(line)
                requests.start_soon(self._serve_next)

    async def _serve_next(self) -> None:
        # the first task to run takes the first line, since schedulers do not guarantee the order of tasks
        line = self._came.popleft()
        call = _Underway(self._mark)
        UNDERWAY.set(call)  # each request has its own task, and so its own context
        if line is None:
            reply: bytes | None = render_error(NULL_ID, too_long(self._max_message))
        else:
            reply = await self._answer(line, self._caller)
        self._held -= _size(line)
        self._freed.set()
        if reply is None:
            self._room.release()
        else:
            self._ready.append(reply)
            self._answers += 1
            self._more.set()
        call.answered = True
        self._stirred.set()

    async def write(self, scope: anyio.CancelScope) -> None:
        """Write ready lines; cancel `scope` when the sink has broken."""
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            lines, self._ready = self._ready, []
            answers, self._answers = self._answers, 0
            sent, self._sent = self._sent, anyio.Event()
            try:
                async with self._writing:
                    await self._sink.send(b"\n".join(lines) + b"\n")
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                scope.cancel()
                return
            for _ in range(answers):
                self._room.release()
            sent.set()

    def follow(self, start: Callable[[Callable[[], None]], Feed] | None) -> None:
        """See `Channel`."""
        if self._feed is not None:
            self._feed.close()
        self._feed = None if start is None else start(lambda: self._stirred.set())
        self._subscribing = UNDERWAY.get()

    async def push(self) -> None:
        """Write the due notifications of the feed."""
        while True:
            await self._stirred.wait()
            self._stirred = anyio.Event()
            while notices := self._due_notices():
                # no await since the notices were taken, so the subscription cannot have ended meanwhile
                self._ready += notices
                sent = self._sent
                self._more.set()
                await sent.wait()

    def _due_notices(self) -> list[bytes]:
        lines: list[bytes] = []
        while self._feed is not None and len(lines) < _NOTICES and not self._is_unanswered(self._subscribing):
            notice = self._feed.next()
            if notice is None or self._is_unanswered(notice.cause):
                break
            self._feed.passed()
            lines.append(notice.line)
        return lines

    def _is_unanswered(self, call: Call | None) -> bool:
        """Return whether it is a call on this connection whose answer is not ready yet."""
        return call is not None and call.connection is self._mark and not call.answered

    async def written(self) -> None:
        """Wait until no request is in progress, every answer is written, and no line is half written."""
        for _ in range(self._max_underway):
            await self._room.acquire()
        self.follow(None)
        while self._ready:
            await self._sent.wait()
        async with self._writing:
            pass


def _size(line: bytes | None) -> int:
    return 0 if line is None else len(line)
