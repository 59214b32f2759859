"""Carries messages to a server: lines on stdio (§8.2), POSTs over HTTP/1.1 with connections that are kept (§8.3)."""

import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from tests.servers.protocol import PROTOCOL, PROTOCOL_NOT_SUPPORTED

# A message in, its response or None out; what every server here is.
Answer = Callable[[bytes], bytes | None]

_WELL_KNOWN: Final = "/.well-known/a2m-server.json"
_DESCRIBE: Final = b'{"jsonrpc":"2.0","id":0,"method":"memory/describe"}'


def over_stdio(answer: Answer) -> None:
    """Answers line by line until stdin ends."""
    for line in sys.stdin.buffer:
        response = answer(line) if line.strip() else None
        if response is not None:
            sys.stdout.buffer.write(response + b"\n")
            sys.stdout.buffer.flush()


def serve_http(answer: Answer, host: str, port: int) -> None:
    """Answers POSTs on `/` until the process ends; its address is the first line on stderr."""
    with _bound(answer, host, port) as server:
        print(_url(server), file=sys.stderr, flush=True)
        server.serve_forever()


@contextmanager
def over_http(answer: Answer) -> Iterator[str]:
    """The address of a server that listens on loopback meanwhile, in a thread of this process."""
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
    # head and body of a response leave together and at once, so that no acknowledgement is waited for between them
    wbufsize = -1
    disable_nagle_algorithm = True

    def answered(self, message: bytes) -> bytes | None:
        raise NotImplementedError

    def do_POST(self) -> None:
        # the body is read in any case: what stayed on the connection would be taken for the next request
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
        """Nothing: stderr is for the address."""

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        if status == 405:
            self.send_header("Allow", "POST")
        if body:
            self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
