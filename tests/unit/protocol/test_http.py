"""The server side of the HTTP binding and its authentication, over real sockets."""

import contextlib
import hashlib
import json
import logging
import re
import socket
from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import httpx
import msgspec
import pytest

from a2m_router.daemon.serve.authentication import admission
from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.server.http import HttpServer, application, serve_http
from a2m_router.protocol.server.server import Caller, CannotListen
from tests.support.addresses import UNKNOWN_HOST, ask_no_name_server, reserved_port

pytestmark = pytest.mark.anyio

CALL = {"jsonrpc": "2.0", "id": 1, "method": "memory/describe"}
JSON = {"Content-Type": "application/json"}
HTTP = "a2m_router.protocol.server.http"


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return "asyncio", {"use_uvloop": request.param}


class Principal(msgspec.Struct, frozen=True):
    owner: str
    token_sha256: str


ALICE = Principal("alice", hashlib.sha256(b"open sesame").hexdigest())
BOB = Principal("bob", hashlib.sha256("geöffnet".encode()).hexdigest())


async def name_the_caller(message: bytes, caller: Caller) -> bytes | None:
    call = json.loads(message)
    return json.dumps({"id": call["id"], "result": caller.owner}).encode() if "id" in call else None


async def profile(_: Caller) -> Any:
    return {"protocol": "a2m/0.1", "name": "home"}


def app(
    origins: Collection[str] = (),
    principals: Collection[Principal] = (),
    answer: Any = name_the_caller,
    max_message: int = 1000,
) -> Any:
    return application(answer, admit=admission(origins, principals), profile=profile, max_message=max_message)


@asynccontextmanager
async def served(app: Any, host: str = "127.0.0.1", hosts: Collection[str] = ()) -> AsyncIterator[httpx.AsyncClient]:
    async with anyio.create_task_group() as tasks:
        server = HttpServer(app, host, 0, hosts=hosts)
        _, port = await tasks.start(server.serve)
        where = f"[{host}]" if ":" in host else host
        async with httpx.AsyncClient(base_url=f"http://{where}:{port}", timeout=20, verify=False) as client:
            yield client
        tasks.cancel_scope.cancel()


async def test_a_call_is_answered_and_a_notification_accepted() -> None:
    async with served(app()) as client:
        answer = await client.post("/", json=CALL)
        assert (answer.status_code, answer.json()) == (200, {"id": 1, "result": None})
        assert answer.headers["content-type"] == "application/json"
        accepted = await client.post("/", json={"jsonrpc": "2.0", "method": "memory/describe"})
        assert (accepted.status_code, accepted.content) == (202, b"")


async def test_the_profile_is_at_its_well_known_place() -> None:
    async with served(app()) as client:
        shown = await client.get("/.well-known/a2m-server.json")
        assert (shown.status_code, shown.json()) == (200, {"protocol": "a2m/0.1", "name": "home"})


@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "BREW"])
async def test_other_methods_are_not_allowed(method: str) -> None:
    async with served(app()) as client:
        refused = await client.request(method, "/")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert method == "HEAD" or refused.text == "this address accepts only POST\n"


async def test_the_profile_is_only_read() -> None:
    async with served(app()) as client:
        refused = await client.post("/.well-known/a2m-server.json", json=CALL)
        assert (refused.status_code, refused.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize("path", ["/nowhere", "/healthz/", "/.well-known", "/%2e%2e/%00"])
async def test_elsewhere_there_is_nothing_and_no_way_on_is_shown(path: str) -> None:
    async with served(app(), hosts=["a2m.example"]) as client:
        refused = await client.request("POST", client.base_url.join(path), headers={"Host": "a2m.example"})
        assert refused.status_code == 404
        assert refused.headers["content-type"].startswith("text/plain")
        assert "location" not in refused.headers
        assert "POST" in refused.text


async def test_a_fault_is_one_sentence_and_the_server_goes_on() -> None:
    async def faulty(message: bytes, caller: Caller) -> bytes | None:
        raise RuntimeError("the secret")

    async with served(app(answer=faulty)) as client:
        for _ in range(2):
            failed = await client.post("/", json=CALL)
            assert (failed.status_code, failed.text) == (500, "the server failed; its log has the details\n")


async def test_no_answer_says_what_it_is_served_by() -> None:
    async with served(app(principals=[ALICE])) as client:
        for answer in [await client.get("/"), await client.get("/healthz"), await client.post("/", json=CALL)]:
            assert not {"server", "x-powered-by", "via"} & set(answer.headers)


@pytest.mark.parametrize("content_type", ["text/plain", "", "application/x-www-form-urlencoded", "application/jsonp"])
async def test_what_is_not_declared_json_is_refused(content_type: str) -> None:
    async with served(app()) as client:
        refused = await client.post("/", content=json.dumps(CALL), headers={"Content-Type": content_type})
        assert refused.status_code == 415


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
async def test_json_may_be_declared_in_any_of_its_spellings(content_type: str) -> None:
    async with served(app()) as client:
        answer = await client.post("/", content=json.dumps(CALL), headers={"Content-Type": content_type})
        assert answer.status_code == 200


async def test_another_version_is_refused_and_ours_and_none_are_not() -> None:
    async with served(app()) as client:
        refused = await client.post("/", json=CALL, headers={"A2M-Protocol-Version": "a2m/0.2"})
        assert (refused.status_code, refused.json()["error"]["code"], refused.json()["id"]) == (400, -32007, None)
        answer = await client.post("/", json=CALL, headers={"A2M-Protocol-Version": "a2m/0.1"})
        assert answer.status_code == 200


async def test_every_header_counts_that_names_a_version_or_an_origin() -> None:
    async with served(app(origins=["https://app.example"])) as client:
        versions = [("A2M-Protocol-Version", "a2m/0.1"), ("A2M-Protocol-Version", "a2m/0.2")]
        assert (await client.post("/", json=CALL, headers=versions)).status_code == 400
        origins = [("Origin", "https://app.example"), ("Origin", "https://evil.example")]
        assert (await client.post("/", json=CALL, headers=origins)).status_code == 403


async def test_a_body_that_is_too_long_is_refused_by_its_length() -> None:
    async with served(app()) as client:
        assert (await client.post("/", content=b"x" * 1000, headers=JSON)).status_code != 413
        refused = await client.post("/", content=b"x" * 1001, headers=JSON)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, -32600)


async def test_a_body_of_unknown_length_is_refused_once_it_is_too_long() -> None:
    async def body(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 2**16):
            yield b" " * 2**16

    async with served(app(max_message=2**20)) as client:
        refused = await client.post("/", content=body(3 * 2**20), headers=JSON)
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, -32600)


async def test_an_endless_body_is_not_read() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < 2**30:
            sent += 2**16
            yield b"x" * 2**16

    async with served(app()) as client:
        with anyio.fail_after(20), contextlib.suppress(httpx.ReadError):
            await client.post("/", content=endless(), headers=JSON)
        assert sent < 2**26  # only as much as the sockets buffer


async def test_a_client_that_asks_first_is_refused_before_it_sends() -> None:
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 1500\r\n"
    async with served(app()) as client, await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as asking:
        await asking.send(head + b"Expect: 100-continue\r\n\r\n")
        assert (await asking.receive()).startswith(b"HTTP/1.1 413 ")


async def test_a_page_that_is_not_listed_is_refused_everywhere() -> None:
    async with served(app(origins=["https://app.example"])) as client:
        for origin in ["https://evil.example", "null", "https://app.example.evil"]:
            foreign = {"Origin": origin}
            assert (await client.post("/", json=CALL, headers=foreign)).status_code == 403
            assert (await client.get("/", headers=foreign)).status_code == 403
            assert (await client.get("/nowhere", headers=foreign)).status_code == 403
            assert (await client.get("/.well-known/a2m-server.json", headers=foreign)).status_code == 403
            preflight = {**foreign, "Access-Control-Request-Method": "POST"}
            refused = await client.options("/", headers=preflight)
            assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (403, False)


async def test_a_page_that_is_listed_may_ask_and_call() -> None:
    page = {"Origin": "https://App.example"}
    async with served(app(origins=["https://app.example"], principals=[ALICE])) as client:
        asked = await client.options("/", headers={**page, "Access-Control-Request-Method": "POST"})
        assert asked.status_code == 204
        assert asked.headers["access-control-allow-origin"] == page["Origin"]
        assert "Authorization" in asked.headers["access-control-allow-headers"]
        answer = await client.post("/", json=CALL, headers={**page, "Authorization": "Bearer open sesame"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
        refused = await client.post("/", json=CALL, headers=page)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, page["Origin"])


async def test_a_caller_is_who_its_token_says() -> None:
    async with served(app(principals=[ALICE, BOB])) as client:
        for token, owner in [(b"Bearer open sesame", "alice"), ("bearer geöffnet".encode(), "bob")]:
            answer = await client.post("/", json=CALL, headers=[(b"Authorization", token)])
            assert answer.json()["result"] == owner


@pytest.mark.parametrize("shown", [None, "", "Bearer", "Bearer wrong", "Basic open sesame", "open sesame"])
async def test_without_a_right_token_nobody_comes_in(shown: str | None) -> None:
    async with served(app(principals=[ALICE])) as client:
        refused = await client.post("/", json=CALL, headers={} if shown is None else {"Authorization": shown})
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith('Bearer realm="a2m"')


async def answers_to(shown: Iterable[str | None]) -> set[tuple[Any, ...]]:
    """Return the distinct answers to calls with these values in `Authorization`."""
    answers = set()
    async with served(app(principals=[ALICE, BOB])) as client:
        for value in shown:
            refused = await client.post("/", json=CALL, headers={} if value is None else {"Authorization": value})
            fields = sorted((name, value) for name, value in refused.headers.items() if name != "date")
            answers.add((refused.status_code, refused.text, tuple(fields)))
    return answers


async def test_wrong_tokens_are_answered_alike_and_so_are_missing_ones() -> None:
    wrong = ["Bearer wrong", "Bearer open sesam", "Bearer " + ALICE.token_sha256, "Bearer open sesame and more"]
    missing = [None, "", "Bearer", "bearer"]
    [(of_wrong, said_wrong, _)], [(of_missing, said_missing, _)] = await answers_to(wrong), await answers_to(missing)
    assert (of_wrong, of_missing) == (401, 401)
    assert said_wrong == "wrong token: no principal has the token of the header Authorization\n"
    assert said_missing.startswith("no token: ")


@pytest.mark.parametrize("shown", ["Digest open sesame", "open sesame", "s3cret", "Bearer\ts3cret", "Bearer: s3cret"])
async def test_what_is_no_bearer_is_not_called_a_token_and_not_repeated(shown: str) -> None:
    [(status, said, fields)] = await answers_to([shown])
    assert (status, "scheme Bearer" in said) == (401, True)
    assert not any(word in said + repr(fields) for word in ("open", "sesame", "s3cret", "Digest"))


@pytest.mark.parametrize(("headers", "word"), [({}, "no token"), ({"Authorization": "Bearer s3cret"}, "wrong token")])
async def test_a_refused_client_is_logged_by_its_address_without_its_token(
    headers: dict[str, str], word: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log has one line with the address of a rejected client, and without its token."""
    monkeypatch.setattr(f"{HTTP}._throttle", LogThrottle(logging.getLogger(HTTP)))
    async with served(app(principals=[ALICE])) as client:
        for _ in range(9):
            await client.post("/", json=CALL, headers=headers)
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().startswith(f"client=127.0.0.1 request rejected: {word}: ")
    assert "s3cret" not in caplog.text


async def test_a_liveness_check_is_logged_only_with_a_wrong_token(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{HTTP}._throttle", LogThrottle(logging.getLogger(HTTP)))
    page = {"Origin": "https://app.example"}
    async with served(app(origins=["https://app.example"], principals=[ALICE])) as client:
        for path in ("/healthz", "/readyz"):
            assert (await client.get(path)).status_code == 200
        asked = await client.options("/", headers={**page, "Access-Control-Request-Method": "POST"})
        assert asked.status_code == 204
        assert caplog.records == []
        assert (await client.get("/readyz", headers={"Authorization": "Bearer wrong"})).status_code == 200
        assert [record.levelno for record in caplog.records] == [logging.WARNING]


# --- the host of a request

EVERY_PATH = ["/", "/healthz", "/readyz", "/.well-known/a2m-server.json", "/nowhere", "/%00"]
OURS = ["localhost", "LocalHost", "127.0.0.1", "127.9.8.7", "[::1]", "[0:0::1]"]
NOT_OURS = [
    *("evil.example", "localhost.evil.example", "evil.localhost", "localhost.", "127.0.0.1.evil.example", "0.0.0.0"),
    *("10.0.0.1", "128.0.0.1", "[::]", "[fe80::1]", "::1", "[::1", "2130706433", "127.1", "evil.example@127.0.0.1", ""),
    *("a2m.example.evil", "127.0.0.1, evil.example", "127.0.0.1:80:80", "127.0.0.1/evil", "*"),
]


async def answered(client: httpx.AsyncClient, request: bytes) -> bytes:
    """Return all bytes of the answer on a connection of its own."""
    came = bytearray()
    async with await anyio.connect_tcp("127.0.0.1", client.base_url.port or 0) as stream:
        await stream.send(request)
        with anyio.fail_after(20), contextlib.suppress(anyio.EndOfStream):
            while True:
                came += await stream.receive()
    return bytes(came)


def status_of(came: bytes) -> int:
    return int(came.split(b" ", 2)[1])


@pytest.mark.parametrize("path", EVERY_PATH)
async def test_a_request_for_another_host_is_refused_at_every_path(path: str) -> None:
    async with served(app()) as client:
        for method in ("GET", "POST", "HEAD", "OPTIONS"):
            for host in ["evil.example", "evil.example:80", f"evil.example:{client.base_url.port}"]:
                refused = await client.request(method, path, headers={"Host": host})
                assert refused.status_code == 421
                assert method == "HEAD" or "expected localhost" in refused.text
            meant = await client.request(method, path, headers={"Host": "localhost"})
            assert meant.status_code != 421


async def test_a_web_page_whose_name_resolves_to_this_machine_learns_nothing() -> None:
    """For its browser the page has the same origin, so it sends no preflight and no Origin."""
    async with served(app(principals=[ALICE])) as client:
        page = {"Host": f"evil.example:{client.base_url.port}", "Sec-Fetch-Site": "same-origin"}
        for path in EVERY_PATH:
            refused = await client.get(path, headers=page)
            assert (refused.status_code, "WWW-Authenticate" in refused.headers) == (421, False)


@pytest.mark.parametrize("host", OURS)
async def test_this_machine_may_be_called_what_it_is(host: str) -> None:
    async with served(app()) as client:
        for port in ("", ":", ":1", f":{client.base_url.port}"):
            assert (await client.post("/", json=CALL, headers={"Host": host + port})).status_code == 200


@pytest.mark.parametrize("host", NOT_OURS)
async def test_no_other_name_is_this_machine_s(host: str) -> None:
    async with served(app(), hosts=["a2m.example"]) as client:
        came = await answered(client, f"GET /healthz HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        assert status_of(came) in (400, 421)


async def test_a_name_that_the_settings_list_is_this_server_s_too() -> None:
    async with served(app(), hosts=["a2m.example"]) as client:
        for host in ("a2m.example", "A2M.Example:443"):
            assert (await client.post("/", json=CALL, headers={"Host": host})).status_code == 200
        assert (await client.post("/", json=CALL, headers={"Host": "b.a2m.example"})).status_code == 421


async def test_what_it_was_told_to_listen_on_is_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On many machines the host name is an address of the loopback interface."""

    async def known(host: str, *rest: Any, **more: Any) -> Any:
        return await found("127.0.1.1" if host == "This.Machine" else host, *rest, **more)

    found = anyio.getaddrinfo
    monkeypatch.setattr(anyio, "getaddrinfo", known)
    async with anyio.create_task_group() as tasks:
        _, port = await tasks.start(serve_http, app(), "This.Machine", 0)
        async with httpx.AsyncClient(base_url=f"http://127.0.1.1:{port}", timeout=20, verify=False) as client:
            for host, status in (("this.machine", 200), ("another.machine", 421)):
                answer = await client.post("/", json=CALL, headers={"Host": f"{host}:{port}"})
                assert answer.status_code == status
        tasks.cancel_scope.cancel()


async def test_a_server_that_others_reach_may_be_called_anything() -> None:
    async with served(app(), host="0.0.0.0") as client:
        assert (await client.post("/", json=CALL, headers={"Host": "a2m.example"})).status_code == 200


async def test_a_client_from_before_there_were_hosts_is_answered() -> None:
    async with served(app()) as client:
        assert status_of(await answered(client, b"GET /healthz HTTP/1.0\r\n\r\n")) == 200
        assert status_of(await answered(client, b"GET /healthz HTTP/1.0\r\nHost: evil.example\r\n\r\n")) == 421


def as_to_a_proxy(method: str, target: str, host: str = "localhost", more: str = "", body: str = "") -> bytes:
    length = f"Content-Length: {len(body)}\r\n" if body else ""
    head = f"{method} {target} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{length}{more}"
    return f"{head}Connection: close\r\n\r\n{body}".encode()


@pytest.mark.parametrize(
    "target", ["http://localhost/", "HTTP://127.0.0.1:80/?x=http://y/", "https://[::1]", "http://a2m.example"]
)
async def test_a_target_in_absolute_form_is_taken_for_what_it_names(target: str) -> None:
    async with served(app(), hosts=["a2m.example"]) as client:
        came = await answered(client, as_to_a_proxy("POST", target, body=json.dumps(CALL)))
        assert (status_of(came), came.endswith(b'{"id": 1, "result": null}')) == (200, True)


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz", "/.well-known/a2m-server.json", "/nowhere", "/%2e", "//"])
async def test_absolute_form_or_not_the_answer_is_the_same(path: str) -> None:
    async with served(app(principals=[ALICE])) as client:
        for more in ("", "Authorization: Bearer open sesame\r\n"):
            for method in ("GET", "POST", "OPTIONS"):
                answers = [
                    await answered(client, as_to_a_proxy(method, target, more=more, body=json.dumps(CALL)))
                    for target in (path, f"http://localhost:{client.base_url.port}{path}")
                ]
                one, another = [re.sub(rb"date: [^\r]*", b"", answer) for answer in answers]
                assert one == another


async def test_the_target_s_host_counts_and_not_the_header_s() -> None:
    async with served(app()) as client:
        assert status_of(await answered(client, as_to_a_proxy("GET", "http://evil.example/healthz"))) == 421
        assert (
            status_of(await answered(client, as_to_a_proxy("GET", "http://localhost/healthz", "evil.example"))) == 200
        )


@pytest.mark.parametrize("target", ["http:///healthz", "http://u:p@localhost/healthz", "http://[::1/", "http://a b/"])
async def test_a_target_without_a_host_is_refused(target: str) -> None:
    async with served(app()) as client:
        assert status_of(await answered(client, as_to_a_proxy("GET", target))) == 400


# a second request for a parser that uses the other one of the two headers
SMUGGLED = b"GET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
TWO_LENGTHS = [
    b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: %d\r\n",
    b"transfer-encoding: CHUNKED\r\nContent-Length: %d\r\nContent-Length: %d\r\n",
]


@pytest.mark.parametrize("lengths", TWO_LENGTHS)
@pytest.mark.parametrize("path", [b"/", b"/healthz", b"/nowhere"])
async def test_two_lengths_of_a_body_are_refused_and_end_the_connection(lengths: bytes, path: bytes) -> None:
    """A request with two lengths of its body is rejected, and the connection is closed."""
    body = b"0\r\n\r\n" + SMUGGLED
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" % path
    said = lengths % ((len(body),) * lengths.count(b"%d"))
    async with served(app()) as client:
        came = await answered(client, head + said + b"\r\n" + body)
        assert status_of(came) == 400
        assert came.count(b"HTTP/1.1 ") == 1
        assert b"connection: close" in came.lower()


async def test_http_1_0_has_no_chunks() -> None:
    head = b"POST / HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n"
    async with served(app()) as client:
        came = await answered(client, head + b"Connection: keep-alive\r\n\r\n0\r\n\r\n" + SMUGGLED)
        assert (status_of(came), came.count(b"HTTP/1.1 ")) == (400, 1)


async def test_a_network_caller_s_word_for_its_owner_is_never_taken() -> None:
    assert admission((), ())({}) == Caller(asserts_owner=False, owner=None)
    assert admission((), [ALICE])({"authorization": "Bearer open sesame"}) == Caller(False, "alice")


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
async def test_ipv6_is_listened_on() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    async with served(app(), host="::1") as client:
        assert (await client.post("/", json=CALL)).status_code == 200


async def test_a_name_is_listened_on() -> None:
    async with served(app(), host="localhost") as client:
        assert (await client.post("/", json=CALL)).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_an_address_in_use_is_one_sentence(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"^cannot listen on {host}:{port}: another program already listens"):
            await serve_http(app(), host, port)


@pytest.mark.parametrize("host", ["192.0.2.1", UNKNOWN_HOST])
async def test_an_address_that_is_not_ours_is_one_sentence(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask_no_name_server(monkeypatch)
    with pytest.raises(CannotListen, match=f"^cannot listen on {host}:0: "):
        await serve_http(app(), host, 0)


@pytest.mark.parametrize("by", ["stop", "cancel"])
async def test_calls_under_way_are_answered_when_the_server_stops(by: str) -> None:
    begun, finish = anyio.Event(), anyio.Event()

    async def answer(message: bytes, caller: Caller) -> bytes | None:
        begun.set()
        await finish.wait()
        return b"{}"

    async def call(port: int) -> None:
        async with httpx.AsyncClient(timeout=20, verify=False) as client:
            answers.append(await client.post(f"http://127.0.0.1:{port}/", json=CALL))

    answers: list[httpx.Response] = []
    scope = anyio.CancelScope()

    async def serve(*, task_status: anyio.abc.TaskStatus[tuple[str, int]]) -> None:
        with scope:
            await server.serve(task_status=task_status)

    with reserved_port() as port:
        server = HttpServer(app(answer=answer), "127.0.0.1", port)
        async with anyio.create_task_group() as tasks:
            await tasks.start(serve)
            tasks.start_soon(call, port)
            await begun.wait()
            if by == "stop":
                server.stop()
            else:
                scope.cancel()
            await anyio.lowlevel.checkpoint()
            finish.set()
        assert [answer.status_code for answer in answers] == [200]
        with pytest.raises(httpx.ConnectError):
            await call(port)


async def test_an_unfinished_request_does_not_keep_the_server_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("a2m_router.protocol.server.http._GRACE", 1)
    async with anyio.create_task_group() as tasks:
        server = HttpServer(app(), "127.0.0.1", 0)
        _, port = await tasks.start(server.serve)
        async with await anyio.connect_tcp("127.0.0.1", port) as torn:
            await torn.send(
                b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n{"
            )
            async with httpx.AsyncClient(timeout=20, verify=False) as client:
                await client.post(f"http://127.0.0.1:{port}/", json=CALL)  # `torn` was accepted before this one
            server.stop()
            with anyio.fail_after(20), contextlib.suppress(anyio.BrokenResourceError):
                assert b"".join([chunk async for chunk in torn]) == b""
