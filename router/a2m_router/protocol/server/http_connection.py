"""One HTTP connection: uvicorn's, with an end to every wait and a limit to how many there are.

uvicorn ends a connection only when nothing at all comes after an answer. So a client that never sends, sends a byte now
and then, or does not take what it is sent, would keep its connection for as long as it likes. Here each thing that a
connection can wait for has `idle_timeout` to come, from when it began to wait for that, and whatever else comes
meanwhile does not extend it. The body of a request under way is the application's to wait for.
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

# in the `state` of a request's scope, what its application wants called when the client hangs up before it is answered;
# to wait for that with `receive` takes a task more for each call, and more time than all the rest that is done here
ON_HANG_UP: Final = "a2m.on_hang_up"
# seconds that a client has to stop sending and to close, once it has had its last answer
_LINGER: Final = 2.0


class ConnectionConfig(uvicorn.Config):
    """uvicorn's configuration with our limits, for a server whose connections are `HttpConnection`s."""

    def __init__(self, app: Any, limits: HttpLimits, **rest: Any) -> None:
        super().__init__(app, http=HttpConnection, h11_max_incomplete_event_size=limits.max_header, **rest)
        self.limits = limits


class _Awaited(Enum):
    REQUEST = "the next request, of which nothing has come"
    HEAD = "the rest of a request's head"
    BODY = "the rest of a body whose request is answered already"
    READER = "that the client takes what it is sent"
    END = "that the client takes the last of what it is sent"
    CLOSE = "that the client, which has had its last answer, closes"
    NOTHING = "nothing: the application is at work"


class HttpConnection(H11Protocol):
    def __init__(
        self,
        config: ConnectionConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._limits = config.limits
        self._over = False  # its last answer is given, what else comes is thrown away
        self._awaited = _Awaited.NOTHING
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > self._limits.max_connections:
            most = f"{self._limits.max_connections:,} connections are open, which is what this server takes at once"
            self._write(503, most, {"Retry-After": str(RETRY_AFTER)})
            self.transport.close()  # at once, however rude: these must not pile up
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        if not self._over:
            super().data_received(data)
            self._set_deadline()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unset_keepalive_if_required()  # its timer is for one of our waits only
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
        # called while the parser's exception is handled, which knows the better status: a head that is too long is 431
        problem = sys.exception()
        status = problem.error_status_hint if isinstance(problem, h11.RemoteProtocolError) else 400
        if status == 431:
            msg = f"the head of a request may have {self._limits.max_header:,} bytes"
        self._end_with(status, msg)

    def _should_upgrade(self) -> bool:
        return False  # an offer to upgrade may be ignored (RFC 9110 §7.8), and some clients always make one

    def _set_deadline(self) -> None:
        """To be called whenever what the connection waits for may have changed."""
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
        # the parser's buffer is looked at (which copies it) once a head; what is HEAD stays HEAD until it is whole
        begun = self._awaited is _Awaited.HEAD or bool(self.conn.trailing_data[0])
        return _Awaited.HEAD if begun else _Awaited.REQUEST

    def _time_is_up(self) -> None:
        match self._awaited:
            case _Awaited.HEAD:
                self._end_with(408, f"the head of a request must come within {self._limits.idle_timeout:g} s")
            case _Awaited.REQUEST | _Awaited.BODY:
                self.transport.close()
            case _Awaited.READER | _Awaited.END | _Awaited.CLOSE:
                self.transport.abort()  # close would wait for the reader
        self._set_deadline()

    def _end_with(self, status: int, sentence: str) -> None:
        """Gives the connection's last answer, and leaves it to the client to close: if we did so while it is still
        sending, it would see a reset and not the answer."""
        self._write(status, sentence)
        self.transport.write_eof()
        self._over = True
        if self.cycle is not None and not self.cycle.response_complete:
            # its application must neither wait for the rest of a body nor answer after us
            self.cycle.disconnected = self.cycle.response_complete = True
            self.cycle.message_event.set()
        self._set_deadline()

    def _write(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        """Writes an answer, unless the client would take it for a part of another."""
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
