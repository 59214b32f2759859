"""A model's HTTP endpoint that plays a script, and the answers of such an endpoint."""

import json
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from email.message import Message
from email.parser import BytesHeaderParser
from itertools import repeat
from typing import Any, NamedTuple

TOKEN = "sk-s3cret/of+ours"
PATIENCE = 30.0  # seconds before a test that waits for the other side gives up


class Asked(NamedTuple):
    """One request, as it was received."""

    line: str
    headers: Message
    body: Any


class Endpoint:
    """A server that plays the same script on every connection.

    It sends the parts, and then hangs up, unless the script says to stay.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.asked: list[Asked] = []
        self.request_came = threading.Event()
        self.caller_hung_up = threading.Event()
        self._parts: Iterable[bytes] = ()
        self._stays = False

    def answers(self, *parts: bytes) -> None:
        self._parts, self._stays = parts, False

    def answers_without_end(self, part: bytes) -> None:
        self._parts, self._stays = repeat(part), False

    def begins_and_stays(self, *parts: bytes) -> None:
        """Send these parts, and then nothing more until the caller has hung up."""
        self._parts, self._stays = parts, True

    def play(self, connection: socketserver.StreamRequestHandler) -> None:
        line, *lines = iter(lambda: connection.rfile.readline().strip(), b"")
        headers = BytesHeaderParser().parsebytes(b"\n".join(lines))
        body = connection.rfile.read(int(headers["Content-Length"]))
        self.asked.append(Asked(line.decode(), headers, json.loads(body)))
        self.request_came.set()
        with suppress(ConnectionError):  # a caller may hang up during the answer
            for part in self._parts:
                connection.wfile.write(part)
            if not self._stays:
                connection.connection.shutdown(socket.SHUT_WR)
            while connection.connection.recv(65536):
                pass
        self.caller_hung_up.set()


@contextmanager
def serving() -> Iterator[Endpoint]:
    class Handler(socketserver.StreamRequestHandler):
        timeout = PATIENCE

        def handle(self) -> None:
            if self.connection.recv(1, socket.MSG_PEEK):  # else the caller gave up before it sent its request
                endpoint.play(self)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}/v1")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield endpoint
        finally:
            server.shutdown()
            thread.join()


def answer(body: bytes | str, status: str = "200 OK", **headers: str) -> bytes:
    content = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status}", "Content-Type: application/json", f"Content-Length: {len(content)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + content


def completed(content: Any, finish_reason: str | None = "stop", **beside: Any) -> str:
    message = {"role": "assistant", "content": content, **beside}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]})


def completion(content: Any, finish_reason: str | None = "stop", **beside: Any) -> bytes:
    return answer(completed(content, finish_reason, **beside))


def error(message: Any) -> str:
    return json.dumps({"error": {"message": message, "type": "invalid_request_error"}})
