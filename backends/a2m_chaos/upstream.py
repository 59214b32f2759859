"""The server at a URL: one connection for each request, with the headers of the client's request.

There is no keep-alive and no retry: a test of faults must be able to rely on exactly one request.
"""

import ssl
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import certifi
import h11
import msgspec

Headers = tuple[tuple[bytes, bytes], ...]

# headers of a single connection (RFC 9110 §7.6.1), and headers that are set for each request
_HOP: Final = frozenset(
    {b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"expect"}
)
_OWN: Final = frozenset({b"content-length", b"host"})


class Request(msgspec.Struct, frozen=True):
    """A request of a client; names of headers are in lower case."""

    method: bytes
    target: bytes
    headers: Headers
    body: bytes


class Response(msgspec.Struct, frozen=True):
    """A response of the server."""

    status: int
    headers: Headers
    body: bytes


class Unreachable(Exception):
    """The server cannot be reached, or its answer is not valid HTTP; the message is one sentence."""


class Upstream:
    """The server at `url`. Raises ValueError for an invalid URL."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
            raise ValueError("expected a URL like http://127.0.0.1:9000/, without a user or a password")
        self._tls = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port or (443 if self._tls else 80)
        self._path = (parts.path or "/").encode("ascii", "strict")
        self._authority = parts.netloc.encode("idna" if not parts.netloc.isascii() else "ascii")

    async def ask(self, request: Request) -> Response:
        """Send a request, and return the response. Raises Unreachable."""
        connection = h11.Connection(h11.CLIENT)
        try:
            async with await self._connect() as stream:
                head = h11.Request(
                    method=request.method,
                    target=self._path if request.target == b"/" else request.target,
                    headers=[
                        (b"host", self._authority),
                        *end_to_end(request.headers),
                        (b"content-length", b"%d" % len(request.body)),
                        (b"connection", b"close"),
                    ],
                )
                events = [head, h11.Data(data=request.body), h11.EndOfMessage()]
                await stream.send(b"".join(connection.send(event) or b"" for event in events))
                status, body = 0, bytearray()
                headers: Headers = ()
                while True:
                    event = connection.next_event()
                    match event:
                        case h11.NEED_DATA:
                            try:
                                connection.receive_data(await stream.receive())
                            except anyio.EndOfStream:
                                connection.receive_data(b"")
                        case h11.Response():
                            status, headers = event.status_code, tuple(event.headers)
                        case h11.Data():
                            body += event.data
                        case h11.EndOfMessage():
                            return Response(status, tuple(end_to_end(headers)), bytes(body))
                        case h11.ConnectionClosed():
                            raise Unreachable("the server closed the connection without an answer")
        except (OSError, anyio.BrokenResourceError, h11.RemoteProtocolError) as problem:
            raise Unreachable(f"the server cannot be reached: {problem or type(problem).__name__}") from None

    async def _connect(self) -> anyio.abc.ByteStream:
        if not self._tls:
            return await anyio.connect_tcp(self._host, self._port)
        trusting = ssl.create_default_context(cafile=certifi.where())
        return await anyio.connect_tcp(
            self._host, self._port, tls=True, ssl_context=trusting, tls_standard_compatible=False
        )


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return the headers to forward: without those of a single connection, content-length and host."""
    return [(name, value) for name, value in headers if name not in _HOP and name not in _OWN]
