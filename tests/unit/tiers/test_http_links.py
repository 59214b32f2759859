"""Links over HTTP, on real sockets: the requests, the rejected answers, and calls in doubt.

The exchange uses aiohttp on asyncio, httpcore on trio, and h11 for clients with few calls. The tests on all backends
therefore cover all three.
"""

import asyncio
import gzip
import json
import logging
import socket
import ssl
import threading
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import hypercorn.asyncio
import hypercorn.config
import msgspec
import pytest
import trustme
from anyio.streams.tls import TLSListener

from a2m_router.protocol.client.client import AnswerTooLong, ConnectionLost, NoAnswer, Settled, Unanswered
from a2m_router.protocol.client.http_client import HttpClient, HttpFailure, connect_http
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.link import TierDown
from tests.support.addresses import UNKNOWN_HOST, ask_no_name_server
from tests.support.deadlines import Deadline
from tests.support.links import linked

pytestmark = pytest.mark.anyio

LOCALHOST = "127.0.0.1"
TOKEN = "s3cret-and-nobodys-business"
DESCRIBED = {"protocol": "a2m/0.1", "name": "a tier's server", "capabilities": ["core"]}


@pytest.fixture(params=["asyncio", "trio", "few calls"])
def anyio_backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "few calls":  # as the command runs
        monkeypatch.setitem(globals(), "connect_http", partial(connect_http, few=True))
        return "asyncio"
    # as the router runs
    return ("asyncio", {"use_uvloop": True}) if request.param == "asyncio" else request.param


@pytest.fixture
def keeps_connections(request: pytest.FixtureRequest, anyio_backend: Any) -> None:
    if "few calls" in request.node.callspec.id:
        pytest.skip("where few calls are made, no connection is kept")


@pytest.fixture
def deadline(monkeypatch: pytest.MonkeyPatch) -> Deadline:
    return Deadline(monkeypatch)


class Request(msgspec.Struct, frozen=True):
    line: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    connection: int  # counted from 1
    send: Callable[[bytes], Awaitable[None]]

    def answer(self, result: Any = None, **headers: str) -> bytes:
        id = json.loads(self.body)["id"]
        return http(json.dumps({"jsonrpc": "2.0", "id": id, "result": result}).encode(), **headers)


def http(body: bytes = b"", status: str = "200 OK", **headers: str) -> bytes:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    fields = "".join(f"{name}: {value}\r\n" for name, value in {"Content-Length": str(len(body)), **named}.items())
    return f"HTTP/1.1 {status}\r\n{fields}\r\n".encode() + body


# the bytes of an answer; None closes the connection
Reply = Callable[[Request], Awaitable[bytes | None]]


async def told(request: Request) -> bytes:
    return request.answer("fine")


class Server:
    """A server with scripted answers that records its requests and the end of its connections."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.url = ""
        self.requests: list[Request] = []
        self.connections = 0
        self.closed = [anyio.Event() for _ in range(20)]  # by either side, in the order of the connections

    async def serve(self, stream: anyio.abc.ByteStream) -> None:
        self.connections += 1
        number = self.connections
        try:
            async with stream:
                buffer = b""
                while True:
                    while b"\r\n\r\n" not in buffer:
                        buffer += await stream.receive()
                    head, _, buffer = buffer.partition(b"\r\n\r\n")
                    line, *fields = head.decode().split("\r\n")
                    headers = {name.lower(): value for name, value in (field.split(": ", 1) for field in fields)}
                    length = int(headers["content-length"])
                    while len(buffer) < length:
                        buffer += await stream.receive()
                    request = Request(line, headers, buffer[:length], number, stream.send)
                    buffer = buffer[length:]
                    self.requests.append(request)
                    answer = await self.reply(request)
                    if answer is None:
                        return
                    await stream.send(answer)
        except (anyio.EndOfStream, anyio.BrokenResourceError, ssl.SSLError):
            pass
        finally:
            self.closed[number - 1].set()


@asynccontextmanager
async def served(reply: Reply = told, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    server = Server(reply)
    listener: anyio.abc.Listener[Any] = await anyio.create_tcp_listener(local_host=LOCALHOST)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    if tls is not None:
        listener = TLSListener(listener, tls, standard_compatible=False)
    server.url = f"{'http' if tls is None else 'https'}://{LOCALHOST}:{port}/"
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, server.serve)
        yield server
        tasks.cancel_scope.cancel()


async def asked(client: HttpClient, timeout: float | None = 20, **params: Any) -> Any:
    return msgspec.json.decode(await client.call("memory/recall", params, timeout=timeout))


class Failed(msgspec.Struct):
    problem: Unanswered
    unsettled: list[Settled]


async def failed(client: HttpClient, timeout: float | None = 20) -> Failed:
    """Return how a call failed to get an answer."""
    unsettled: list[Settled] = []
    with pytest.raises(Unanswered) as problem:
        await client.call("memory/remember", {}, timeout=timeout, on_unsettled=unsettled.append)
    assert unsettled == [] if problem.value.settled.is_set() else len(unsettled) == 1
    return Failed(problem.value, unsettled)


async def to_the_end(stream: anyio.abc.ByteReceiveStream) -> None:
    with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
        while True:
            await stream.receive()


async def looked_around() -> None:
    """Let the event loop process what has arrived."""
    for _ in range(5):
        await anyio.lowlevel.checkpoint()


# requests


async def test_a_call_is_one_post_with_the_protocols_headers_and_the_tiers_own() -> None:
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Tenant": "home", "accept-encoding": "br", "CONTENT-TYPE": "a/b"}
    async with served() as server, connect_http(f"{server.url}deep?er=1", headers=headers) as client:
        assert await asked(client, query="Bücher") == "fine"
        assert await asked(client) == "fine"
    first, second = server.requests
    assert first.line == "POST /deep?er=1 HTTP/1.1"
    assert json.loads(first.body)["params"] == {"query": "Bücher"}
    assert first.headers == {
        "host": server.url.removeprefix("http://").rstrip("/"),
        "user-agent": "a2m-router",
        "authorization": f"Bearer {TOKEN}",
        "x-tenant": "home",
        "content-type": "application/json",
        "accept": "application/json",
        "accept-encoding": "identity",
        "a2m-protocol-version": "a2m/0.1",
        "content-length": str(len(first.body)),
    }
    assert second.headers == {**first.headers, "content-length": str(len(second.body))}


async def test_no_cookie_is_kept_and_no_proxy_of_the_environment_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reply(request: Request) -> bytes:
        return request.answer("fine", Set_Cookie="a=b")

    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    # a host name, since no client keeps cookies for a plain address
    async with served(reply) as server, connect_http(server.url.replace(LOCALHOST, "localhost")) as client:
        await asked(client)
        await asked(client)
    assert all("cookie" not in request.headers for request in server.requests)


async def test_a_long_message_arrives_whole() -> None:
    async def reply(request: Request) -> bytes:
        return request.answer(json.loads(request.body)["params"])

    long = "0123456789" * 200_000
    async with served(reply) as server, connect_http(server.url) as client:
        assert await asked(client, content=long) == {"content": long}


# connections


@pytest.mark.usefixtures("keeps_connections")
async def test_calls_one_after_the_other_share_a_connection() -> None:
    async with served() as server, connect_http(server.url) as client:
        for _ in range(5):
            await asked(client)
        assert server.connections == 1
    await server.closed[0].wait()


@pytest.mark.usefixtures("keeps_connections")
async def test_calls_at_once_have_a_connection_each_that_is_used_again() -> None:
    all_there = anyio.Event()

    async def reply(request: Request) -> bytes:
        if len(server.requests) == 8:
            all_there.set()
        await all_there.wait()
        return request.answer("fine")

    async with served(reply) as server, connect_http(server.url) as client:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                for _ in range(8):
                    tasks.start_soon(asked, client)
        assert len(server.requests) == 16
        assert server.connections == 8


@pytest.mark.parametrize("announced", [True, False])
async def test_a_connection_that_the_server_has_closed_is_not_used_again(announced: bool) -> None:
    async def reply(request: Request) -> bytes | None:
        await request.send(request.answer("fine", **({"Connection": "close"} if announced else {})))
        return None

    async with served(reply) as server, connect_http(server.url) as client:
        for number in range(3):
            assert await asked(client) == "fine"
            await server.closed[number].wait()
            await looked_around()
        assert server.connections == 3


@pytest.mark.parametrize("calls_before", [0, 1])
async def test_a_message_is_not_sent_twice_when_the_server_hangs_up_on_it(calls_before: int) -> None:
    async def reply(request: Request) -> bytes | None:
        return request.answer("fine") if len(server.requests) <= calls_before else None

    async with served(reply) as server, connect_http(server.url) as client:
        for _ in range(calls_before):
            await asked(client)
        outcome = await failed(client)
        assert isinstance(outcome.problem, ConnectionLost)
        assert "the connection broke: it has ended the connection" in outcome.problem.reason
        assert len(outcome.unsettled) == 1
        await looked_around()
        assert len(server.requests) == calls_before + 1


@pytest.mark.parametrize("http2", [False, True])
async def test_a_message_whose_connection_was_never_made_cannot_land(http2: bool) -> None:
    # the listener accepts connections and never sends a byte, so that TLS is never established
    listener = await anyio.create_tcp_listener(local_host=LOCALHOST)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, connect_http(f"https://{LOCALHOST}:{port}/", http2=http2) as client:
        outcome = await failed(client, timeout=0.1)
    assert isinstance(outcome.problem, NoAnswer)
    assert outcome.problem.reason == "no connection within 0.1 s"
    assert outcome.unsettled == []


@pytest.mark.parametrize(
    "url", [f"http://{UNKNOWN_HOST}/", f"http://{'a' * 70}.example/", "http://a..b/", "ftp://x/", "http://[::1]:1/"]
)
async def test_an_address_where_nobody_is_says_so_and_nothing_can_have_landed(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_no_name_server(monkeypatch)
    async with connect_http(url) as client:
        outcome = await failed(client)
    assert isinstance(outcome.problem, ConnectionLost)
    assert outcome.problem.reason.startswith("cannot be reached: ")
    assert outcome.unsettled == []


@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"], ids=["call", "answer"])
@pytest.mark.parametrize("how", ["cancelled", "deadline"])
async def test_a_call_given_up_in_the_middle_takes_its_connection_with_it(
    begun: bytes, how: str, deadline: Deadline
) -> None:
    there = anyio.Event()
    unsettled: list[Settled] = []

    async def reply(request: Request) -> bytes:
        if request.connection > 1:
            return request.answer("fine")
        if begun:
            await request.send(begun)
        there.set()
        await anyio.sleep_forever()
        raise AssertionError

    async with served(reply) as server, connect_http(server.url) as client:
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                try:
                    await client.call("memory/remember", {}, timeout=deadline.SECONDS, on_unsettled=unsettled.append)
                except NoAnswer as problem:
                    assert problem.reason == "no answer within 98765 s"  # noqa: PT017 - one of two cases

            tasks.start_soon(call)
            await there.wait()
            await looked_around()
            if how == "cancelled":
                tasks.cancel_scope.cancel()
            else:
                deadline.passes()
        assert len(unsettled) == 1
        assert not unsettled[0].is_set()
        assert await asked(client) == "fine"
        assert server.connections == 2


async def test_a_cancelled_call_hangs_up_on_the_server() -> None:
    gone = anyio.Event()

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            tasks.cancel_scope.cancel()
            await to_the_end(stream)
            gone.set()

    listener = await anyio.create_tcp_listener(local_host=LOCALHOST)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, connect_http(f"http://{LOCALHOST}:{port}/") as client, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, serve)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(asked, client, None)
        await gone.wait()
        serving.cancel_scope.cancel()


# answers


@pytest.mark.parametrize("how", ["with a length", "in chunks", "until it ends"])
async def test_an_answer_that_is_too_long_is_not_read_on(how: str) -> None:
    piece = b"x" * 65_536
    sent = 0

    async def reply(request: Request) -> bytes | None:
        nonlocal sent
        if request.connection > 1:
            return request.answer("fine")
        framing = {
            "with a length": "Content-Length: 999999999999",
            "in chunks": "Transfer-Encoding: chunked",
            "until it ends": "Connection: close",
        }
        await request.send(f"HTTP/1.1 200 OK\r\n{framing[how]}\r\n\r\n".encode())
        while True:  # until the client closes the connection
            await request.send(b"10000\r\n" + piece + b"\r\n" if how == "in chunks" else piece)
            sent += len(piece)

    async with served(reply) as server, connect_http(server.url, max_message=200_000) as client:
        outcome = await failed(client)
        assert isinstance(outcome.problem, AnswerTooLong)
        assert outcome.problem.reason == "an answer of more than 200,000 bytes"
        await server.closed[0].wait()
        assert sent < 50_000_000  # as much as the system's buffers take
        assert await asked(client) == "fine"
        assert server.connections == 2


async def test_an_answer_of_just_the_longest_length_is_taken() -> None:
    async def reply(request: Request) -> bytes:
        return request.answer("x" * 1000)

    async def unused(part: bytes) -> None:
        raise AssertionError("nothing is sent")

    async with served(reply) as server:
        length = len(Request("", {}, b'{"id": 1}', 1, unused).answer("x" * 1000).partition(b"\r\n\r\n")[2])
        async with connect_http(server.url, max_message=length) as client:
            assert await asked(client) == "x" * 1000
        async with connect_http(server.url, max_message=length - 1) as client:
            assert isinstance((await failed(client)).problem, AnswerTooLong)


@pytest.mark.usefixtures("keeps_connections")
async def test_an_unasked_compressed_answer_is_read_up_to_the_limit() -> None:
    """An answer that is compressed without a request for it is read until its decoded length reaches the limit."""

    async def reply(request: Request) -> bytes:
        plain = request.answer("x" * 3_000_000 if len(server.requests) == 2 else "fine").partition(b"\r\n\r\n")[2]
        return http(gzip.compress(plain), Content_Encoding="gzip")

    async with served(reply) as server, connect_http(server.url, max_message=1_000_000) as client:
        assert await asked(client) == "fine"
        assert isinstance((await failed(client)).problem, AnswerTooLong)
        assert await asked(client) == "fine"
        assert server.connections == 1


@pytest.mark.parametrize("status", ["301 Moved Permanently", "302 Found", "307 Temporary Redirect", "308 Permanent"])
async def test_a_redirect_is_refused(status: str) -> None:
    async with served() as elsewhere:

        async def reply(_: Request) -> bytes:
            return http(b"over there", status, Location=elsewhere.url)

        async with served(reply) as server, connect_http(server.url) as client:
            outcome = await failed(client)
        assert isinstance(outcome.problem, HttpFailure)
        assert outcome.problem.reason.startswith(f"HTTP {status[:3]} ")
        assert "redirects are not followed" in outcome.problem.reason
        assert elsewhere.requests == []


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"220 mail.example ESMTP\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", "not HTTP"),
        (http(b"<html>"), "an answer that cannot be read: "),
        (http(b""), "an answer that cannot be read: "),
        (http(b"", "202 Accepted"), "HTTP 202 Accepted"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{}", "the connection broke: "),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000, "not HTTP"),
    ],
    ids=["no HTTP", "no length", "HTML", "empty", "a notification's", "half an answer", "endless head"],
)
async def test_an_answer_that_is_none_says_why_and_harms_no_other(answer: bytes, sentence: str) -> None:
    async def reply(request: Request) -> bytes | None:
        if len(server.requests) > 1:
            return request.answer("fine")
        await request.send(answer)
        return None

    async with served(reply) as server, connect_http(server.url) as client:
        assert sentence in (await failed(client)).problem.reason
        await server.closed[0].wait()
        await looked_around()
        assert await asked(client) == "fine"


async def test_a_server_may_refuse_a_message_before_it_has_it_all() -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(http(b"too large", "413 Content Too Large", Connection="close"))
            await stream.send_eof()
            await to_the_end(stream)

    listener = await anyio.create_tcp_listener(local_host=LOCALHOST)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, connect_http(f"http://{LOCALHOST}:{port}/") as client, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, serve)
        with pytest.raises(HttpFailure, match=r"^HTTP 413 .*: too large$"):
            await asked(client, content="x" * 8_000_000)
        serving.cancel_scope.cancel()


# TLS


class Certificates:
    """A certificate for this machine, and its authority."""

    def __init__(self, folder: Path) -> None:
        authority = trustme.CA()
        self.ca_file = folder / "ca.pem"
        authority.cert_pem.write_to_path(self.ca_file)
        self.chain, self.key = folder / "chain.pem", folder / "key.pem"
        issued = authority.issue_cert(LOCALHOST)
        for number, pem in enumerate(issued.cert_chain_pems):
            pem.write_to_path(self.chain, append=number > 0)
        issued.private_key_pem.write_to_path(self.key)
        self.elsewhere = folder / "elsewhere.pem"
        elsewhere = authority.issue_cert("elsewhere.example")
        elsewhere.private_key_and_cert_chain_pem.write_to_path(self.elsewhere)
        self.other_ca_file = folder / "other.pem"
        trustme.CA().cert_pem.write_to_path(self.other_ca_file)

    def server(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.chain, self.key)
        return context

    def server_elsewhere(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(self.elsewhere)
        return context


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


async def test_a_server_with_a_certificate_by_the_files_authority_is_trusted(certificates: Certificates) -> None:
    async with served(tls=certificates.server()) as server:
        async with connect_http(server.url, ca_file=certificates.ca_file) as client:
            assert await asked(client) == "fine"
            assert await asked(client) == "fine"
        assert server.connections == 1


@pytest.mark.parametrize(
    ("ca_file", "there", "reason"),
    [
        (None, Certificates.server, "cannot be reached: its certificate is not trusted: "),
        ("other_ca_file", Certificates.server, "cannot be reached: its certificate is not trusted: "),
        (
            "ca_file",
            Certificates.server_elsewhere,
            "is not trusted: IP address mismatch",
        ),
    ],
)
async def test_a_server_that_is_not_who_it_should_be_is_told_nothing(
    certificates: Certificates, ca_file: str | None, there: Callable[[Certificates], ssl.SSLContext], reason: str
) -> None:
    async with served(tls=there(certificates)) as server:
        trusted = None if ca_file is None else getattr(certificates, ca_file)
        async with connect_http(server.url, ca_file=trusted, headers={"Authorization": f"Bearer {TOKEN}"}) as client:
            outcome = await failed(client)
        assert reason in outcome.problem.reason
        assert outcome.unsettled == []
        assert server.requests == []


async def test_a_server_that_speaks_no_tls_is_told_nothing() -> None:
    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(http(b"this is no TLS", "400 Bad Request"))

    listener = await anyio.create_tcp_listener(local_host=LOCALHOST)
    port = listener.extra(anyio.abc.SocketAttribute.local_port)
    async with listener, connect_http(f"https://{LOCALHOST}:{port}/") as client, anyio.create_task_group() as serving:
        serving.start_soon(listener.serve, serve)
        outcome = await failed(client)
        serving.cancel_scope.cancel()
    assert outcome.problem.reason.startswith("cannot be reached: TLS failed: ")
    assert outcome.unsettled == []


async def test_a_file_of_certificates_that_is_none_any_more_is_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("nothing")
    for name, why in (("ca.pem", "it contains no certificate"), ("gone.pem", "No such file or directory")):
        with pytest.raises(OSError, match=f"{name} cannot be used as ca_file: {why}"):
            async with connect_http("https://127.0.0.1/", ca_file=tmp_path / name):
                pass


# HTTP/2


class App:
    """An ASGI application that returns how it was reached."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return
        self.headers = list(scope["headers"])
        body = b""
        more = True
        while more:
            event = await receive()
            body += event["body"]
            more = event["more_body"]
        call = json.loads(body)
        params = call["params"]
        if params.get("release"):
            self.released.set()
        if params.get("wait"):
            await self.released.wait()
        if params.get("hang"):
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        told = {"version": scope["http_version"], "connection": scope["client"][1], **DESCRIBED}
        result = "x" * params["long"] if "long" in params else told
        answer = json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}).encode()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        for start in range(0, len(answer), 65_536):
            await send({"type": "http.response.body", "body": answer[start : start + 65_536], "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Modern(msgspec.Struct):
    """A server of HTTP/1.1 and HTTP/2 over TLS."""

    url: str
    app: App
    ca_file: Path


@pytest.fixture(scope="module")
def modern(certificates: Certificates) -> Iterator[Modern]:
    app = App()
    listener = socket.create_server((LOCALHOST, 0))
    config = hypercorn.config.Config()
    config.bind = [f"fd://{listener.fileno()}"]
    config.certfile, config.keyfile = str(certificates.chain), str(certificates.key)
    config.errorlog = None
    config.graceful_timeout = 0.1
    loop = asyncio.new_event_loop()
    stopped = asyncio.Event()
    serving = hypercorn.asyncio.serve(app, config, shutdown_trigger=stopped.wait)
    thread = threading.Thread(target=loop.run_until_complete, args=(serving,))
    thread.start()
    yield Modern(f"https://{LOCALHOST}:{listener.getsockname()[1]}/", app, certificates.ca_file)
    loop.call_soon_threadsafe(stopped.set)
    thread.join()
    loop.close()
    listener.detach()  # the server has closed it


@asynccontextmanager
async def over_http2(server: Modern, **options: Any) -> AsyncIterator[HttpClient]:
    async with connect_http(server.url, ca_file=server.ca_file, http2=True, **options) as client:
        yield client


@pytest.mark.parametrize(("http2", "version"), [(True, "2"), (False, "1.1")])
async def test_http_2_is_spoken_where_it_is_wanted(modern: Modern, http2: bool, version: str) -> None:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with connect_http(modern.url, ca_file=modern.ca_file, http2=http2, headers=headers) as client:
        told = [await asked(client) for _ in range(3)]
    assert [one["version"] for one in told] == [version] * 3
    assert len({one["connection"] for one in told}) == 1
    sent = dict(modern.app.headers)
    assert sent[b"authorization"] == f"Bearer {TOKEN}".encode()
    assert sent[b"a2m-protocol-version"] == b"a2m/0.1"
    assert sent[b"user-agent"] == b"a2m-router"


async def test_a_server_without_http_2_is_spoken_to_as_it_can(certificates: Certificates) -> None:
    async with served(tls=certificates.server()) as server:
        async with connect_http(server.url, ca_file=certificates.ca_file, http2=True) as client:
            assert await asked(client) == "fine"
        assert server.requests[0].line.endswith("HTTP/1.1")


async def test_calls_over_http_2_share_a_connection(modern: Modern) -> None:
    told: list[Any] = []
    modern.app.released.clear()

    async def ask(**params: Any) -> None:
        told.append(await asked(client, **params))

    async with over_http2(modern) as client:
        told.append(await asked(client))
        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(partial(ask, wait=True))
            tasks.start_soon(partial(ask, release=True))
    assert len(told) == 10
    assert len({one["connection"] for one in told}) == 1


@pytest.mark.parametrize("how", ["cancelled", "deadline", "too long"])
async def test_a_call_given_up_over_http_2_harms_no_other(modern: Modern, how: str) -> None:
    others: list[Any] = []
    modern.app.released.clear()

    async def other() -> None:
        others.append(await asked(client, wait=True))

    async with over_http2(modern, max_message=1_000_000) as client, anyio.create_task_group() as tasks:
        before = await asked(client)
        tasks.start_soon(other)
        # given up when nothing is being written: a write that is cut off breaks the connection for all its calls
        if how == "cancelled":
            with anyio.move_on_after(0.1):
                await asked(client, hang=True)
        else:
            kind = NoAnswer if how == "deadline" else AnswerTooLong
            with pytest.raises(kind):
                await asked(client, timeout=0.1 if how == "deadline" else 20, hang=how == "deadline", long=3_000_000)
        after = [await asked(client, release=True), await asked(client)]
        assert len({one["connection"] for one in after}) == 1
        assert after[0]["connection"] != before["connection"]
    assert [one["connection"] for one in others] == [before["connection"]]


# shown addresses


@pytest.mark.parametrize("http2", [False, True])
async def test_a_token_is_in_no_error_log_or_repr(
    certificates: Certificates, modern: Modern, http2: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    replies: list[Callable[[Request], bytes | None]] = [
        lambda request: request.answer("fine"),
        lambda request: http(json.dumps(dict(request.headers)).encode(), "401 Unauthorized"),
        lambda request: http(f"<p>Bearer  {TOKEN}</p>".encode(), "500 Internal Server Error"),
        lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
        lambda _: None,
    ]

    async def reply(request: Request) -> Any:
        return replies.pop(0)(request)

    options: dict[str, Any] = {"headers": {"Authorization": f"Bearer {TOKEN}"}, "http2": http2}
    problems: list[BaseException] = []
    async with served(reply, certificates.server()) as server:
        async with connect_http(server.url, ca_file=certificates.ca_file, **options) as client:
            await asked(client)
            while replies:
                problems.append((await failed(client)).problem)
            shown = repr(client)
        async with connect_http(server.url, **options) as client:
            problems.append((await failed(client)).problem)
    async with connect_http(modern.url, ca_file=modern.ca_file, **options) as client:
        await asked(client)
    shown += "".join(f"{problem!r} {''.join(traceback.format_exception(problem))}" for problem in problems)
    assert len(problems) == 5
    assert TOKEN not in shown
    assert TOKEN not in caplog.text


# whole links


async def test_a_tier_over_https_is_up_with_its_authority_and_its_token(certificates: Certificates) -> None:
    async def reply(request: Request) -> bytes:
        return request.answer(DESCRIBED)

    async with served(reply, certificates.server()) as server:
        lines = f"""
            url = "{server.url}"
            ca_file = "{certificates.ca_file.name}"
            headers = {{ Authorization = "Bearer ${{TIER_TOKEN}}" }}
        """
        async with linked(lines, certificates.ca_file.parent, TIER_TOKEN=TOKEN) as link:
            await link.wait_up()
            assert link.describe_status().transport == "https"
            assert link.describe_status().server == "a tier's server"
            assert TOKEN not in repr(link)
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


async def test_a_tier_over_http_2_is_up(modern: Modern) -> None:
    lines = f'url = "{modern.url}"\nca_file = "{modern.ca_file}"\nhttp2 = true'
    async with linked(lines, modern.ca_file.parent) as link:
        await link.wait_up()
        assert msgspec.json.decode(await link.call("memory/recall", {}))["version"] == "2"


async def test_a_tier_whose_certificate_is_not_trusted_is_down_and_says_why(certificates: Certificates) -> None:
    async with served(tls=certificates.server()) as server:
        lines = f'url = "{server.url}"\nca_file = "{certificates.other_ca_file}"'
        async with linked(lines, certificates.ca_file.parent) as link:
            await link.wait_greeted()
            assert link.status == "down"
            assert "its certificate is not trusted: " in str(link.reason)
            assert "ca_file" in str(link.reason)


@pytest.mark.parametrize(
    "status",
    [
        "401 Unauthorized",
        "403 Forbidden",
        "408 Request Timeout",
        "500 Internal Server Error",
        "503 Service Unavailable",
    ],
)
async def test_a_tier_that_answers_with_another_status_is_down_and_names_it(status: str, tmp_path: Path) -> None:
    async def reply(_: Request) -> bytes:
        return http(b"and why", status)

    async with served(reply) as server, linked(f'url = "{server.url}"', tmp_path) as link:
        await link.wait_greeted()
        assert (link.status, link.reason) == ("down", f"HTTP {status}: and why")


# answers of foreign services to any POST, and the part of them that is quoted
STRANGERS: dict[str, tuple[bytes, str]] = {
    "results": (http(b'{"results": [], "took": 3}'), '{"results": [], "took": 3}'),
    "a page": (http(b"<!doctype html>\n<title>Sign in</title>", Content_Type="text/html"), "<!doctype html> <title>"),
    "nothing": (http(b""), "empty"),
    "a list": (http(b'[{"text": "x"}]'), '[{"text": "x"}]'),
    "a string": (http(b'"ok"'), '"ok"'),
    "null": (http(b"null"), "null"),
    "not UTF-8": (http(b"\xff\xfe"), "UTF-8"),
    "a model's answer": (http(b'{"id": "chatcmpl-1", "choices": []}'), '{"id": "chatcmpl-1"'),
    "a model's error": (http(b'{"error": {"message": "no such model", "type": "x"}}'), '"no such model"'),
    "a model's error with a status": (http(b'{"error": {"message": "no"}}', "404 Not Found"), '{"error": {"message"'),
    "a framework's 405": (http(b'{"detail": "Method Not Allowed"}', "405 Method Not Allowed"), "Method Not Allowed"),
    "a framework's 422": (http(b'{"detail": [{"loc": ["body", "q"]}]}', "422 Unprocessable Entity"), '"loc"'),
    "an answer to another": (http(b'{"id": "q-1", "result": {}}'), "an answer to another call: id b'\"q-1\"'"),
    "a notification": (http(b'{"method": "hello"}'), '{"method": "hello"}'),
    "a stream": (http(b'event: message\ndata: {"x": 1}\n\n', Content_Type="text/event-stream"), "event: message"),
}


@pytest.mark.parametrize(("answer", "beginning"), STRANGERS.values(), ids=STRANGERS.keys())
async def test_an_address_that_is_no_a2m_server_s_says_so_with_what_came(
    answer: bytes, beginning: str, tmp_path: Path
) -> None:
    async def reply(_: Request) -> bytes:
        return answer

    async with served(reply) as server, linked(f'url = "{server.url}"', tmp_path) as link:
        await link.wait_greeted()
        assert link.status == "down"
        assert link.reason is not None
        assert beginning in link.reason
        assert link.reason.endswith(
            "; is there an A2M server at this address? `a2m-rag http` puts one before a search service"
        )
        assert "flush" not in link.reason


async def test_a_server_that_has_answered_once_is_not_doubted() -> None:
    answers = [http(b"<p>later"), http(b"<p>gone", "404 Not Found"), http(b"")]

    async def reply(request: Request) -> bytes:
        return request.answer("fine") if len(server.requests) == 1 else answers.pop()

    async with served(reply) as server, connect_http(server.url) as client:
        await asked(client)
        while answers:
            assert "a2m-rag" not in (await failed(client)).problem.reason


async def test_what_is_shown_of_an_address_is_no_token() -> None:
    async def reply(request: Request) -> bytes:
        return http(f"you are {request.headers['authorization']}".encode())

    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with served(reply) as server, connect_http(server.url, headers=headers) as client:
        reason = (await failed(client)).problem.reason
    assert "you are …" in reason
    assert TOKEN not in reason


async def test_a_json_rpc_server_of_something_else_says_so(tmp_path: Path) -> None:
    async def reply(request: Request) -> bytes:
        error = {"code": -32601, "message": "Method not found"}
        return http(json.dumps({"jsonrpc": "2.0", "id": json.loads(request.body)["id"], "error": error}).encode())

    async with served(reply) as server, linked(f'url = "{server.url}"', tmp_path) as link:
        await link.wait_greeted()
        assert link.reason == (
            "memory/describe: refused with -32601: Method not found; every A2M server has this method, so it is not one"
        )


async def test_a_server_that_answers_nothing_is_not_told_to_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("a2m_router.tiers.link._GREETING", 0.1)

    async def reply(_: Request) -> bytes:
        await anyio.sleep_forever()
        raise AssertionError

    async with served(reply) as server, linked(f'url = "{server.url}"\ntimeout = "100ms"', tmp_path) as link:
        await link.wait_greeted()
        assert str(link.reason).endswith(" within 0.1 s")


async def test_a_read_is_asked_again_and_a_write_is_not_when_the_server_hangs_up(tmp_path: Path) -> None:
    async def reply(request: Request) -> bytes | None:
        method = json.loads(request.body)["method"]
        asked = sum(method in request.body.decode() for request in server.requests)
        return None if method != "memory/describe" and asked == 1 else request.answer(DESCRIBED)

    async with served(reply) as server, linked(f'url = "{server.url}"', tmp_path) as link:
        await link.wait_up()
        await link.call("memory/recall", {})
        with pytest.raises(TierDown, match="the connection broke"):
            await link.call("memory/remember", {"records": []})
    methods = [json.loads(request.body)["method"] for request in server.requests]
    assert methods == ["memory/describe", "memory/recall", "memory/recall", "memory/remember"]


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "id", "is_settled"), [(503, b"1", True), (504, b"null", False), (200, b"7", False)])
async def test_only_who_knows_the_calls_id_has_answered_it(status: int, id: bytes, is_settled: bool) -> None:
    """An error in JSON from a gateway does not prove that the call has ended; an error with the call's id does."""
    body = b'{"jsonrpc":"2.0","id":%s,"error":{"code":-32603,"message":"no room","data":{"reason":"overloaded"}}}' % id

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n" % (status, len(body)) + body)
            with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
                await stream.receive()

    told: list[Settled] = []
    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with connect_http(f"http://127.0.0.1:{port}/") as peer:
            with pytest.raises(A2MError if is_settled else Unanswered):
                await peer.call("memory/remember", {}, timeout=30, on_unsettled=told.append)
        tasks.cancel_scope.cancel()
    assert [settled.is_set() for settled in told] == ([] if is_settled else [False])
