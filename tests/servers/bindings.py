"""Bindings of a server: lines on stdio (§8.2), and POSTs over HTTP/1.1 with persistent connections (§8.3)."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from tests.servers.protocol import PROTOCOL, PROTOCOL_NOT_SUPPORTED

# Takes a message, and returns its response or None; every server here is such a function.
Answer = Callable[[bytes], bytes | None]

_WELL_KNOWN: Final = "/.well-known/a2m-server.json"
_DESCRIBE: Final = b'{"jsonrpc":"2.0","id":0,"method":"memory/describe"}'


def over_stdio(answer: Answer) -> None:
    """Answer line by line until stdin ends."""
    for line in sys.stdin.buffer:
        response = answer(line) if line.strip() else None
        if response is not None:
            sys.stdout.buffer.write(response + b"\n")
            sys.stdout.buffer.flush()


def serve_http(answer: Answer, host: str, port: int) -> None:
    """Answer POSTs on `/` until the process ends; the first line on stderr is the server's address."""
    with _bound(answer, host, port) as server:
        print(_url(server), file=sys.stderr, flush=True)
        server.serve_forever()


@contextmanager
def over_http(answer: Answer) -> Iterator[str]:
    """Run a server on loopback, in a thread of this process; yield its address."""
    with _bound(answer, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield _url(server)
        finally:
            server.shutdown()
            thread.join()


def _url(server: ThreadingHTTPServer) -> str:
    return f"http://{server.server_address[0]!s}:{server.server_port}/"


def _bound(answer: Answer, host: str, port: int) -> ThreadingHTTPServer:
    class Bound(_Handler):
        def answered(self, message: bytes) -> bytes | None:
            return answer(message)

    return ThreadingHTTPServer((host, port), Bound)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # the head and body of a response are sent together and at once, so that none waits for an acknowledgement
    wbufsize = -1
    disable_nagle_algorithm = True

    def answered(self, message: bytes) -> bytes | None:
        raise NotImplementedError

    def do_POST(self) -> None:
        # the body is always read: bytes left on the connection would be taken for the next request
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        version = self.headers.get("A2M-Protocol-Version", PROTOCOL)
        if self.headers.get("Origin") is not None:
            self._respond(403, b"")
        elif self.path != "/":
            self._respond(404, b"")
        elif version != PROTOCOL:
            error = {"code": PROTOCOL_NOT_SUPPORTED, "message": f"this server speaks {PROTOCOL}, not {version}"}
            self._respond(400, json.dumps({"jsonrpc": "2.0", "id": None, "error": error}).encode())
        else:
            response = self.answered(body)
            self._respond(202 if response is None else 200, response or b"")

    def do_GET(self) -> None:
        if self.headers.get("Origin") is not None:
            self._respond(403, b"")
        elif self.path == _WELL_KNOWN:
            described = json.loads(self.answered(_DESCRIBE) or b"null")
            self._respond(200, json.dumps(described["result"]).encode())
        else:
            self._respond(405 if self.path == "/" else 404, b"")

    def log_message(self, format: str, *arguments: object) -> None:
        """Log nothing: stderr is for the address."""

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 405:
            self.send_header("Allow", "POST")
        if body:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
