"""HTTP/1.1 without TLS, by h11 alone, on asyncio and trio: one connection for each call, closed after it.

This is for commands that make a few calls: the other libraries take longer to load than such a call takes.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import h11

from a2m_router.protocol.client.http_exchange import Answer, Broken, Posting, reason_of

_PIECE: Final = 65_536  # bytes of one read
_LONGEST_HEAD: Final = 65_536  # bytes of an answer's head


class OverH11:
    """An `Exchange`.

    Args:
        url: with the scheme http, in visible ASCII.
        max_message: bytes in an answer's body.
    """

    def __init__(self, url: str, headers: Mapping[str, str], max_message: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = [("Host", parts.netloc), *headers.items()]
        self._max_message = max_message

    async def post(self, posting: Posting) -> Answer:
        """See `Exchange`."""
        protocol = h11.Connection(h11.CLIENT, max_incomplete_event_size=_LONGEST_HEAD)
        length = ("Content-Length", str(len(posting.message)))
        request = h11.Request(method="POST", target=self._target, headers=[*self._headers, length])
        try:
            stream = await anyio.connect_tcp(*self._address)
        except Exception as problem:  # noqa: BLE001 - the lookup of a name can fail in many ways
            raise Broken(reason_of(problem, type(problem).__name__)) from None
        answer: Answer | Broken = Broken("it has ended the connection")
        async with stream, anyio.create_task_group() as tasks:
            parts = (request, h11.Data(posting.message), h11.EndOfMessage())
            message = b"".join(protocol.send(part) or b"" for part in parts)
            posting.sent = True
            # in a task, since a server may answer before it has read the whole message
            tasks.start_soon(_send, stream, message)
            # kept as a value: the task group would wrap the exception in a group
            try:
                answer = await self._read(protocol, stream)
            except Broken as problem:
                answer = problem
            tasks.cancel_scope.cancel()
        if isinstance(answer, Broken):
            raise answer
        return answer

    async def _read(self, protocol: h11.Connection, stream: anyio.abc.ByteStream) -> Answer:
        """Return the answer; raise Broken if none is complete."""
        status = 0
        coding = ""
        body = bytearray()
        received = 0
        while True:
            try:
                event = protocol.next_event()
            except h11.RemoteProtocolError:
                ended = protocol.trailing_data[1]
                if not ended or (received and not status):
                    raise Broken("its answer is not HTTP") from None
                raise Broken("its answer broke off" if status else "it has ended the connection") from None
            match event:
                case h11.NEED_DATA:
                    data = await _received(stream)
                    received += len(data)
                    protocol.receive_data(data)
                case h11.Response():
                    status = event.status_code
                    coding = b", ".join(value for name, value in event.headers if name == b"content-encoding").decode()
                    lengths = [int(value) for name, value in event.headers if name == b"content-length"]
                    if any(length > self._max_message for length in lengths):
                        return Answer(status, None, coding)
                case h11.Data():
                    body += event.data
                    if len(body) > self._max_message:
                        return Answer(status, None, coding)
                case h11.EndOfMessage():
                    return Answer(status, bytes(body), coding)
                case h11.InformationalResponse():
                    pass
                case _:
                    raise Broken("it has ended the connection")


async def _send(stream: anyio.abc.ByteStream, message: bytes) -> None:
    with suppress(anyio.BrokenResourceError):  # the reading task reports this, perhaps with a better reason
        await stream.send(message)


async def _received(stream: anyio.abc.ByteStream) -> bytes:
    """Return the next bytes, or none at the end; raise Broken if the connection broke."""
    try:
        return await stream.receive(_PIECE)
    except anyio.EndOfStream:
        return b""
    except anyio.BrokenResourceError as problem:
        raise Broken(reason_of(problem, "it has ended the connection")) from None
