"""The client end of the line framing (§8.1, §8.2): many calls at once on one stream, matched by id.

- One task writes, in the order of the calls; no other task uses the sink. A line that was begun is finished, even if
  its caller gave up: half a line would corrupt the next one.
- If a caller gives up before the writer takes its line, the call never reaches the peer.
- If a caller gives up later, the peer may still carry out the call; it is in doubt. It is *settled* when that can no
  longer happen: its late answer arrives, or a call made after the caller gave up is answered (the peer works in order),
  or the connection has ended.
"""

import logging
import math
import re
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, Final, Protocol

import anyio
import anyio.abc
from msgspec import Raw

from a2m_router.protocol.server.server import Answering, Caller
from a2m_router.protocol.server.stdio import LOCAL, serve_lines
from a2m_router.protocol.wire.errors import unanswered_in
from a2m_router.protocol.wire.jsonrpc import MalformedMessage, Notification, Reply, parse_reply, render_call
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE, LineSplitter

# seconds of grace for the other direction when one has ended: it may still carry answers, and the reason
LAST_WORDS: Final = 0.5
# seconds for a server in this process to finish its calls when the connection is closed
_GRACE: Final = 5.0
# bytes of the lines written in one group: a smaller group leaves more calls in the queue, where they can be withdrawn
_GROUP: Final = 65_536

log = logging.getLogger(__name__)


class Settled(Protocol):
    """An event that is set when a call can certainly no longer be carried out; `anyio.Event` fits."""

    def is_set(self) -> bool: ...
    async def wait(self) -> None: ...


class Unanswered(Exception):
    """A call got no answer. `settled` is set when the call can no longer be carried out."""

    def __init__(self, reason: str, settled: Settled) -> None:
        super().__init__(reason)
        self.reason = reason
        self.settled = settled


class NoAnswer(Unanswered):
    """No answer came, or one that cannot be read. The connection may still work."""


class TooLate(NoAnswer):
    """The call's deadline has passed. The server may only be slow."""


class AnswerTooLong(NoAnswer):
    """The answer exceeds the limit of a message; a smaller request may help. The connection still works."""


class ConnectionLost(Unanswered):
    """The connection ended or broke, before or during the call."""


class Peer(Protocol):
    """A server as its client sees it, over any binding."""

    @property
    def lost(self) -> anyio.Event:
        """Set when no further call can succeed; `reason` then says why."""

    @property
    def reason(self) -> str | None: ...

    @property
    def heard(self) -> float:
        """The event loop's time of the server's last answer, late ones included; -inf before the first one.

        An error saying that the service behind the server does not answer does not count as an answer."""

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> Raw:
        """Return the result of one call, on one line.

        Args:
            timeout: seconds; None waits forever.
            on_unsettled: is called with the call's `Settled` event before the call ends without an answer (also by
                cancellation), unless the event is already set.

        Raises:
            A2MError: the answer is an error.
            NoAnswer: there is no usable answer (TooLate, AnswerTooLong).
            ConnectionLost: the connection ended.
        """


class Connection:
    """The client end of one stream of lines; a `Peer`.

    Args:
        name: the peer's name in the log.
        max_message: bytes in a line from the peer. A longer answer fails its call; any other longer line ends the
            connection.
        on_notification: is called with each notification (§4.13).
    """

    def __init__(
        self,
        name: str,
        *,
        max_message: int = DEFAULT_MAX_MESSAGE,
        on_notification: Callable[[Notification], None] | None = None,
    ) -> None:
        self.lost = anyio.Event()
        self.reason: str | None = None
        self.heard = -math.inf
        self._name = name
        self._max_message = max_message
        self._on_notification = on_notification
        self._ids = count(1)
        self._last_id = 0
        self._queue: OrderedDict[int, bytes] = OrderedDict()  # lines that the writer has not taken yet
        self._more = anyio.Event()
        self._waiting: dict[int, _Waiting] = {}
        self._unsettled: dict[int, _GivenUp] = {}
        self._ended = False

    def __repr__(self) -> str:
        state = "up" if self.reason is None else f"lost: {self.reason}"
        return f"<Connection {self._name}, {len(self._waiting)} calls, {len(self._unsettled)} unsettled, {state}>"

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> Raw:
        if self.reason is not None:
            raise ConnectionLost(self.reason, settled())
        id = self._last_id = next(self._ids)
        # raw JSON in the parameters may contain line breaks, but only between tokens
        self._queue[id] = render_call(id, method, params).replace(b"\n", b" ") + b"\n"
        self._more.set()
        waiting = self._waiting[id] = _Waiting()
        try:
            with anyio.move_on_after(timeout):
                await waiting.over.wait()
        finally:
            del self._waiting[id]
            if waiting.reply is None:
                certain = self._give_up(id)
                if on_unsettled is not None and not certain.is_set():
                    on_unsettled(certain)
        match waiting.reply:
            case None if self.reason is not None:
                raise ConnectionLost(self.reason, certain)
            case None:
                raise TooLate(f"no answer within {round(timeout or 0.0, 2):g} s", certain)
            case _TooLong():
                raise AnswerTooLong(f"an answer of more than {self._max_message:,} bytes", settled())
            case MalformedMessage() as malformed:
                raise NoAnswer(f"an answer that cannot be read: {malformed.message}", settled())
            case Reply(error=error, result=result):
                if error is not None:
                    raise error
                assert result is not None
                return result

    async def run(self, source: anyio.abc.AnyByteReceiveStream, sink: anyio.abc.AnyByteSendStream) -> str:
        """Carry calls until the stream has ended; return why. The owner then calls `lose`, and `end`."""
        reasons: list[str] = []
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                if await self._write(sink):
                    # answers that the peer sent before it stopped reading may still arrive
                    await anyio.sleep(LAST_WORDS)
                    reasons.append("it stopped reading calls")
                    tasks.cancel_scope.cancel()

            tasks.start_soon(write)
            reasons.append(await self._read(source))
            tasks.cancel_scope.cancel()
        return reasons[0]

    def lose(self, reason: str) -> None:
        """Fail all calls, those in progress and later ones, with ConnectionLost. The first reason is kept."""
        if self.reason is None:
            self.reason = reason
            self.lost.set()
            self._more.set()
            for waiting in self._waiting.values():
                waiting.over.set()

    def end(self) -> None:
        """Settle every call in doubt: the peer has ended and will not return."""
        self.lose("the connection has ended")
        self._ended = True
        for given_up in self._unsettled.values():
            given_up.settled.set()
        self._unsettled.clear()

    def _give_up(self, id: int) -> Settled:
        if self._queue.pop(id, None) is not None or self._ended:
            return settled()
        given_up = self._unsettled[id] = _GivenUp(self._last_id)
        return given_up.settled

    async def _write(self, sink: anyio.abc.AnyByteSendStream) -> bool:
        """Write calls as they come, until the connection is lost; return True if the sink broke."""
        while True:
            await self._more.wait()
            self._more = anyio.Event()
            while self._queue and self.reason is None:
                group = bytearray()
                while self._queue and len(group) < _GROUP:
                    group += self._queue.popitem(last=False)[1]
                try:
                    await sink.send(bytes(group))
                except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                    return True
            if self.reason is not None:
                return False

    async def _read(self, source: anyio.abc.AnyByteReceiveStream) -> str:
        """Read the peer's messages until the stream ends; return why it ended."""
        splitter = LineSplitter(self._max_message)
        ending: str | None = None
        while ending is None:
            try:
                lines = splitter.feed(await source.receive())
            except anyio.EndOfStream:
                lines, ending = splitter.end(), "it has ended the connection"
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                lines, ending = [], "the connection broke"
            for line in lines:
                if line is not None:
                    self._take(line)
                elif not self._answered(_id_in(splitter.beginnings.pop(0)), _TooLong()):
                    return f"it sent a message of more than {self._max_message:,} bytes"
        return ending

    def _take(self, line: bytes) -> None:
        try:
            message = parse_reply(line)
        except MalformedMessage as malformed:
            log.warning("peer=%s unreadable line received: %s: %.200r", self._name, malformed, line)
            self._answered(malformed.id, malformed)
            return
        match message:
            case Notification():
                if self._on_notification is not None:
                    self._on_notification(message)
            case Reply(id=id, error=error):
                if not self._answered(id, message):
                    about = "an answer" if error is None else f"an error ({error})"
                    log.warning("peer=%s %s received for an unknown call: id %.80r", self._name, about, bytes(id))

    def _answered(self, raw: Raw, reply: "Reply | MalformedMessage | _TooLong") -> bool:
        """Pass a reply to its caller, and settle calls that it proves over; return False if the id is of no call."""
        text = bytes(raw)
        id = int(text) if text.isdigit() and len(text) < 20 else 0
        if not 0 < id <= self._last_id:
            return False
        if not (isinstance(reply, Reply) and reply.error is not None and unanswered_in(reply.error)):
            self.heard = anyio.current_time()
        waiting = self._waiting.get(id)
        if waiting is not None and not waiting.over.is_set():
            waiting.reply = reply
            waiting.over.set()
        for other, given_up in list(self._unsettled.items()):
            if other == id or given_up.last_id < id:
                del self._unsettled[other]
                given_up.settled.set()
        return True


class _TooLong:
    """A marker for an answer that was longer than a message may be."""


_ID: Final = re.compile(rb'"id"\s*:\s*(\d{1,19})\s*[,}]')


def _id_in(beginning: bytes) -> Raw:
    """Return the id in the beginning of an answer; null if it is not there."""
    # only before the result, which may contain text that looks like an id
    found = _ID.search(beginning.partition(b'"result"')[0])
    return Raw(found[1] if found else b"null")


@asynccontextmanager
async def connect_local(
    answer: Answering,
    *,
    name: str = "local",
    caller: Caller = LOCAL,
    max_message: int = DEFAULT_MAX_MESSAGE,
    on_notification: Callable[[Notification], None] | None = None,
) -> AsyncIterator[Connection]:
    """Connect to a server in this process (§8.1), with lines of JSON in both directions as for any other server.

    When the block ends, calls in progress have 5 s to finish.
    """
    connection = Connection(name, max_message=max_message, on_notification=on_notification)
    to_server, requests = anyio.create_memory_object_stream[bytes](1)
    replies, from_server = anyio.create_memory_object_stream[bytes](1)

    async def serve() -> None:
        with requests, replies:
            await serve_lines(answer, requests, replies, caller=caller, max_message=max_message, grace=_GRACE)

    async def carry() -> None:
        connection.lose(await connection.run(from_server, to_server))

    try:
        with to_server, from_server:
            async with tending() as tasks:
                tasks.start_soon(carry)
                async with tending() as serving:
                    serving.start_soon(serve)
                    try:
                        yield connection
                    finally:
                        connection.lose("the connection was closed")
                        to_server.close()
                        # a server at its limit of calls does not read, so it does not see the end of its input
                        serving.cancel_scope.deadline = anyio.current_time() + _GRACE
                tasks.cancel_scope.cancel()
    finally:
        connection.end()


@asynccontextmanager
async def tending() -> AsyncIterator[anyio.abc.TaskGroup]:
    """Open a task group whose block's exception leaves it unchanged; a plain one would wrap it in a group."""
    problem: Exception | KeyboardInterrupt | SystemExit | None = None
    async with anyio.create_task_group() as tasks:
        try:
            yield tasks
        except (Exception, KeyboardInterrupt, SystemExit) as raised:  # noqa: BLE001 - raised again below
            problem = raised
            tasks.cancel_scope.cancel()
    if problem is not None:
        raise problem


def settled() -> Settled:
    """Return an event that is set, for a call that can no longer be carried out."""
    event = anyio.Event()
    event.set()
    return event


class _Waiting:
    def __init__(self) -> None:
        self.over = anyio.Event()
        self.reply: Reply | MalformedMessage | _TooLong | None = None


class _GivenUp:
    """A call whose caller gave up when `last_id` was the latest call."""

    def __init__(self, last_id: int) -> None:
        self.last_id = last_id
        self.settled = anyio.Event()
