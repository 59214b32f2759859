"""Fuzzes a server on HTTP over several connections. All of them send before any answer is read."""

import http.client
import random
import re
import socket
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec

from tests.verification.fuzz.exchanges import Exchange, Exchanges, posted
from tests.verification.fuzz.generating import MAX_MESSAGE
from tests.verification.fuzz.owing import Owed, read_answer, shown, strict, suits
from tests.verification.fuzz.reporting import Advance, Report, Wrong, check_memory, nowhere, resident
from tests.verification.fuzz.serving import CANARY, FEDERATION, PATIENCE, check_alive, kill, program

# the connections to the server
CONNECTIONS: Final = 8
# The permitted status codes, see a2m_router.protocol.server.http. 204 answers a browser's preflight, 501 a foreign
# Transfer-Encoding.
STATUSES: Final = frozenset({200, 202, 204, 400, 401, 403, 404, 405, 408, 413, 415, 421, 431, 501, 503})


def fuzz_http(
    seed: int,
    count: int,
    advance: Advance = nowhere,
    *,
    command: Sequence[str] | None = None,
    patience: float = PATIENCE,
) -> Report:
    """Send `count` messages to a server on HTTP, over several connections at once. The default server is the router.

    Its stderr must say `listens on http://host:port/`; SIGTERM must end it.
    """
    report = Report("http")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "federation.toml").write_text(FEDERATION)
        default = [program("a2m-router"), "--http", "127.0.0.1:0", "--log-level", "warning"]
        said: list[str] = []
        process = subprocess.Popen(
            command or default, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        listening = threading.Thread(target=_listen, args=(process, said), daemon=True)
        try:
            port = _port(process, said, patience)
            listening.start()
            _Posted(seed, port, patience, process.pid, report).run(count, advance)
            process.terminate()
            status = process.wait(patience)
            if status:
                raise Wrong(f"it ended with status {status}")
        except subprocess.TimeoutExpired:
            report.find("it does not end")
        except Wrong as wrong:
            report.find(str(wrong))
        except OSError as problem:
            report.find(f"it cannot be reached any more: {problem}")
        finally:
            kill(process)
            if listening.ident is not None:
                listening.join()
            assert process.stdout is not None
            assert process.stderr is not None
            if printed := process.stdout.read():
                report.find(f"on its stdout: {shown(printed)}")
            process.stdout.close()
            process.stderr.close()
        if any("Traceback" in line for line in said):
            report.find(f"a traceback on stderr: {''.join(said)[-4_000:]}")
    check_memory(report)
    report.seconds = time.monotonic() - began
    return report


def _port(process: subprocess.Popen[bytes], said: list[str], patience: float) -> int:
    """Return the port of the server. Raises Wrong if stderr does not name it in time."""
    assert process.stderr is not None
    impatience = threading.Timer(patience, process.kill)
    impatience.start()
    try:
        for line in process.stderr:
            said.append(line.decode("utf-8", "replace"))
            if found := re.search(r"listens on http://[^/]*:(\d+)/", said[-1]):
                return int(found[1])
    finally:
        impatience.cancel()
    raise Wrong(f"it does not listen: {''.join(said)}")


def _listen(process: subprocess.Popen[bytes], said: list[str]) -> None:
    assert process.stderr is not None
    said += (line.decode("utf-8", "replace") for line in process.stderr)


class Got(msgspec.Struct, frozen=True):
    """One response over HTTP."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Connection:
    """One connection that sends arbitrary bytes."""

    def __init__(self, port: int, patience: float) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), patience)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file: BinaryIO = self._socket.makefile("rb")

    def send(self, wire: bytes) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):  # the server may have closed early; its answer tells why
            self._socket.sendall(wire)

    def end(self) -> None:
        """Shut down the sending side."""
        with suppress(OSError):  # the server may have closed before
            self._socket.shutdown(socket.SHUT_WR)

    def got(self) -> Got | None:
        """Return the next response, or None at the end. Raises Wrong after a timeout, and if it is not a response."""
        try:
            while True:
                line = self._file.readline(65_537)
                if not line:
                    return None
                found = re.fullmatch(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n", line)
                if found is None:
                    raise Wrong(f"no response of HTTP: {shown(line)}")
                headers = http.client.parse_headers(self._file)
                if not found[1].startswith(b"1"):
                    break
            size = int(headers.get("Content-Length", 0))
            body = self._file.read(size)
            return None if len(body) < size else Got(int(found[1]), headers, body)
        except TimeoutError:
            raise Wrong("no answer over HTTP in time") from None
        except ConnectionResetError:
            return None

    def close(self, *, rudely: bool = False) -> None:
        if rudely:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._file.close()
        self._socket.close()


class _Posted:
    """One run over HTTP: all connections send, then all are read."""

    def __init__(self, seed: int, port: int, patience: float, pid: int, report: Report) -> None:
        self._exchanges = Exchanges(random.Random(f"{seed} http"))
        self._port = port
        self._patience = patience
        self._pid = pid
        self._report = report
        self._open: list[Connection | None] = [None] * CONNECTIONS

    def run(self, count: int, advance: Advance) -> None:
        """Send and read everything; findings go to the report. Raises Wrong and OSError if the run cannot go on."""
        report = self._report
        rounds = 0
        checked = 0
        try:
            while report.messages < count and not report.is_hopeless:
                self._round()
                rounds += 1
                if rounds % 10 == 0:
                    report.resident.append(resident(self._pid))
                    advance(report.messages)
                if report.messages - checked >= CANARY:
                    checked = report.messages
                    check_alive(self._ask, report)
            check_alive(self._ask, report)
        finally:
            for connection in self._open:
                if connection is not None:
                    connection.close()

    def _round(self) -> None:
        under_way: list[Exchange] = []
        for place in range(CONNECTIONS):
            exchange, messages = self._exchanges.next()
            self._report.messages += messages
            under_way.append(exchange)
            self._connection(place).send(exchange.wire)
        for place, exchange in enumerate(under_way):
            try:
                self._finish(place, exchange)
            except Wrong as wrong:
                self._report.find(str(wrong), exchange.wire)
                self._drop(place)

    def _connection(self, place: int) -> Connection:
        connection = self._open[place]
        if connection is None:
            connection = self._open[place] = Connection(self._port, self._patience)
        return connection

    def _drop(self, place: int, *, rudely: bool = False) -> None:
        connection = self._open[place]
        if connection is not None:
            connection.close(rudely=rudely)
        self._open[place] = None

    def _finish(self, place: int, exchange: Exchange) -> None:
        """Read the answers to an exchange. Raises Wrong."""
        connection = self._connection(place)
        if not exchange.owed:
            if not exchange.rude:
                connection.end()
                while (got := connection.got()) is not None:
                    self._report.answers[str(got.status)] += 1
                    if got.status not in STATUSES:
                        raise Wrong(f"answered with the status {got.status}: {shown(got.body)}")
                    if exchange.wire.startswith(b"HEAD"):
                        break  # whether there is a body depends on whether the server could read the head
                    if got.headers.get_content_type() == "application/json":
                        _check_json(got.body)
            self._drop(place, rudely=exchange.rude)
            return
        over = False
        for due in exchange.owed:
            got = None if over else connection.got()
            if got is None:
                raise Wrong("closed without an answer")
            self._report.answers[str(got.status)] += 1
            if exchange.status is None:
                _check_posted(got, due)
            elif got.status != exchange.status:
                raise Wrong(f"expected the status {exchange.status}, got {got.status}: {shown(got.body)}")
            over = exchange.status is not None or got.headers.get("Connection", "").lower() == "close"
        if over:
            self._drop(place)

    def _ask(self, message: bytes) -> Any:
        connection = Connection(self._port, self._patience)
        connection.send(posted(message))
        got = connection.got()
        connection.close()
        if got is None or got.status != 200:
            raise Wrong(f"after {self._report.messages:,} messages a good one is answered with {got}")
        return msgspec.json.decode(got.body)


def _check_json(body: bytes) -> None:
    try:
        strict(body)
    except (ValueError, RecursionError) as problem:
        raise Wrong(f"not JSON, {problem}: {shown(body)}") from None


def _check_posted(got: Got, due: Owed | None) -> None:
    """Check the answer to a posted message. Raises Wrong."""
    if due is None:
        if got.status != 202 or got.body:
            raise Wrong(f"a notification is answered with {got.status}: {shown(got.body)}")
    elif len(due.message) > MAX_MESSAGE:
        if got.status != 413:
            raise Wrong(f"a body that is too long is answered with {got.status}: {shown(got.body)}")
        read_answer(got.body)
    elif got.status != 200:
        raise Wrong(f"a call is answered with {got.status}: {shown(got.body)}")
    else:
        answer = read_answer(got.body)
        if answer.fault is not None:
            raise Wrong(answer.fault)
        if not suits(due, answer.id):
            raise Wrong(f"the id {shown(due.id or b'null')} is answered with {shown(answer.id)}")
