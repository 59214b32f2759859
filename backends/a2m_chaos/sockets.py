"""TCP connections that can be reset. The sockets are non-blocking, and not shared with other code."""

import socket
import struct
from typing import Final

import anyio
import anyio.abc

from a2m_router.protocol.server.server import CannotListen

_CHUNK: Final = 65_536
# SO_LINGER with a time of 0: close sends a reset
_NO_LINGER: Final = struct.pack("ii", 1, 0)
_BACKLOG: Final = 128


class Stream(anyio.abc.ByteStream):
    """A TCP connection."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._closed = False

    async def receive(self, max_bytes: int = _CHUNK) -> bytes:
        while not self._closed:
            try:
                data = self._socket.recv(max_bytes)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except OSError as problem:
                raise anyio.BrokenResourceError from problem
            if not data:
                raise anyio.EndOfStream
            return data
        raise anyio.ClosedResourceError

    async def send(self, item: bytes) -> None:
        view = memoryview(item)
        while view:
            if self._closed:
                raise anyio.ClosedResourceError
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._socket)
            except OSError as problem:
                raise anyio.BrokenResourceError from problem

    async def send_eof(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            anyio.notify_closing(self._socket)
            self._socket.close()

    def reset(self) -> None:
        """Close the connection with a reset, which the other end receives as an error."""
        if not self._closed:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            self.close()


class Listener:
    """A listening socket. `port` is the actual port. Raises CannotListen."""

    def __init__(self, host: str, port: int) -> None:
        try:
            family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.create_server(address[:2], family=family, backlog=_BACKLOG)
        except OSError as problem:
            raise CannotListen(f"cannot listen on {host}:{port}: {problem.strerror or problem}") from problem
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]

    async def accept(self) -> Stream:
        while True:
            try:
                connected, _ = self._socket.accept()
            except (BlockingIOError, ConnectionAbortedError):
                await anyio.wait_readable(self._socket)
                continue
            connected.setblocking(False)
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return Stream(connected)

    def close(self) -> None:
        anyio.notify_closing(self._socket)
        self._socket.close()
