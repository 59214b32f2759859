"""uvicorn's HTTP connection, with a deadline for every wait and a limit to the number of connections.

uvicorn closes a connection only when nothing at all comes after an answer. So a client that never sends, sends single
bytes, or does not read its answers could keep its connection forever. Here each wait of a connection has a deadline of
`idle_timeout` from its beginning, which nothing extends. The application itself limits the wait for the body of a
request in progress.
"""

import asyncio
import sys
from collections.abc import Mapping
from enum import Enum
from http import HTTPStatus
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from a2m_router.protocol.server.http_limits import HttpLimits
from a2m_router.protocol.wire.errors import RETRY_AFTER

# in the `state` of a request's scope: a callback for when the client disconnects before its answer. Waiting with
# `receive` instead would need another task for each call, and more time than everything else here
ON_HANG_UP: Final = "a2m.on_hang_up"
# seconds for a client to stop sending and close, after its last answer
_LINGER: Final = 2.0


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration with limits, for a server with `HttpConnection`s."""

    def __init__(self, app: Any, limits: HttpLimits, **rest: Any) -> None:
        super().__init__(app, http=HttpConnection, h11_max_incomplete_event_size=limits.max_header, **rest)
        self.limits = limits


class _Awaited(Enum):
    REQUEST = "the next request, of which nothing has come"
    HEAD = "the rest of a request's head"
    BODY = "the rest of a body whose request is already answered"
    READER = "the client must read its answer"
    END = "the client must read the last part before the close"
    CLOSE = "the client must close, after its last answer"
    NOTHING = "nothing: the application is working"


class HttpConnection(H11Protocol):
    """A connection with deadlines. Mutable state: what it waits for, and until when."""

    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._over = False  # the last answer is sent; later input is discarded
        self._awaited = _Awaited.NOTHING
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            most = f"{self._limits.max_connections:,} connections are open, which is the limit of this server"
            self._write(503, most, {"Retry-After": str(RETRY_AFTER)})
            self.transport.close()  # without lingering: rejected connections must not pile up
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if not self._over:
            super().data_received(data)
            self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # uvicorn's timer would cover only one of the waits
        self._set_deadline()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._set_deadline()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._set_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.cycle is not None and self.cycle.disconnected and ON_HANG_UP in self.scope["state"]:
            self.scope["state"][ON_HANG_UP]()
        if self._deadline is not None:
            self._deadline.cancel()

    def send_400_response(self, msg: str) -> None:
        # called while the parser's exception is handled, which has the exact status: 431 for a head that is too long
        problem = sys.exception()
        status = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the head of a request may have at most {self._limits.max_header:,} bytes"
        self._end_with(status, msg)

    def _should_upgrade(self) -> bool:
        return False  # a server may ignore an upgrade (RFC 9110 §7.8), and some clients always offer one

    def _set_deadline(self) -> None:
        """Restart the deadline if the connection now waits for something else; call this after every change."""
        awaited = self._now_awaited()
        if awaited is self._awaited:
            return
        self._awaited = awaited
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if awaited is not _Awaited.NOTHING:
            most = _LINGER if awaited is _Awaited.CLOSE else self._limits.idle_timeout
            self._deadline = self.loop.call_later(min(most, self._limits.idle_timeout), self._time_is_up)

    def _now_awaited(self) -> _Awaited:
        if self._over:
            return _Awaited.CLOSE
        if self.transport.is_closing():
            return _Awaited.END
        if self.flow.write_paused:
            return _Awaited.READER
        if self.cycle is not None and not self.cycle.response_complete:
            return _Awaited.NOTHING
        if self.conn.their_state is h11.SEND_BODY:
            return _Awaited.BODY
        # reading the parser's buffer copies it, so do it once a head: HEAD stays until the head is complete
        begun = self._awaited is _Awaited.HEAD or bool(self.conn.trailing_data[0])
        return _Awaited.HEAD if begun else _Awaited.REQUEST

    def _time_is_up(self) -> None:
        match self._awaited:
            case _Awaited.HEAD:
                self._end_with(408, f"the head of a request must come within {self._limits.idle_timeout:g} s")
            case _Awaited.REQUEST | _Awaited.BODY:
                self.transport.close()
            case _Awaited.READER | _Awaited.END | _Awaited.CLOSE:
                self.transport.abort()  # `close` would wait for the client to read
        self._set_deadline()

    def _end_with(self, status: int, sentence: str) -> None:
        """Send the last answer and let the client close. If the server closed while the client is still sending, the
        client would see a reset instead of the answer."""
        self._write(status, sentence)
        self.transport.write_eof()
        self._over = True
        if self.cycle is not None and not self.cycle.response_complete:
            # the application must neither wait for the rest of the body nor send another answer
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        self._set_deadline()

    def _write(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        """Write an answer, unless another one has begun: the client would read it as a part of that."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = f"{sentence}\n".encode()
        fields = {
            "Content-Type": "text/plain; charset=utf-8",
            "Content-Length": str(len(body)),
            "Connection": "close",
            **(headers or {}),
        }
        response = h11.Response(
            status_code=status, headers=list(fields.items()), reason=HTTPStatus(status).phrase.encode()
        )
        is_head = self.conn.our_state is h11.SEND_RESPONSE and self.scope["method"] == "HEAD"
        for event in (response, h11.Data(data=b"" if is_head else body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
