"""a2m-rag http: real endpoints on a real server, called by the command itself or by the service alone."""

import json
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path as FilePath
from typing import Any
from urllib.parse import quote

import anyio
import anyio.lowlevel
import msgspec
import pytest
import uvicorn
from anyio.from_thread import BlockingPortal, start_blocking_portal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from a2m_rag import over_http
from a2m_rag.cli import main
from a2m_rag.mapping import Path, Paths
from a2m_rag.over_http import Endpoint, HttpService, connect_http
from a2m_rag.server import SearchLimits, Server
from a2m_router.protocol.server.stdio import LOCAL
from tests.support.addresses import UNKNOWN_HOST, ask_no_name_server
from tests.support.examples import scaled
from tests.support.retrieval import answer, contents, refused

PATIENCE = 60
COMMAND = [sys.executable, "-m", "a2m_rag.cli", "http"]
TOKEN = "a-token-that-is-nobody's-business"

PAGES = [
    {"id": "e1", "text": "Expenses are paid on the 15th.", "published": "2024-05-01", "link": "https://h/e", "v": 1.50},
    {"id": "o1", "text": "The office opens at eight.", "published": 1609459200, "link": None, "team": "people"},
    {"id": "t1", "text": "Tea is in the kitchen.", "team": "people", "long": 123456789012345678901234567890},
]


class Endpoints:
    """The endpoints' server, and the requests that it got, in order."""

    def __init__(self) -> None:
        self.url = ""
        self.asked: list[tuple[Any, Mapping[str, str]]] = []

    async def search(self, request: Request) -> Response:
        sent = await request.json() if request.method == "POST" else list(request.query_params.multi_items())
        self.asked.append((sent, request.headers))
        return JSONResponse({"hits": PAGES, "took": 3})

    async def all(self, request: Request) -> Response:
        self.asked.append((list(request.query_params.multi_items()), request.headers))
        return JSONResponse({"all": [{"hit": page} for page in PAGES]})


async def html(_: Request) -> Response:
    return Response("<html>sign in</html>", media_type="text/html")


async def status(request: Request) -> Response:
    body = bytes.fromhex(request.query_params.get("hex", f"you are {TOKEN}".encode().hex()))
    return Response(body, int(request.query_params["code"]), media_type=request.query_params.get("type"))


async def half_an_error(_: Request) -> Response:
    """Answer an error whose body never ends: its first line comes, and then nothing."""

    async def lines() -> AsyncIterator[bytes]:
        yield b"the index is being built\n"
        await anyio.sleep(PATIENCE)

    return StreamingResponse(lines(), 503)


async def endless_error(_: Request) -> Response:
    async def words() -> AsyncIterator[bytes]:
        while True:
            yield b"word " * 100
            await anyio.lowlevel.checkpoint()

    return StreamingResponse(words(), 500)


async def false_error(_: Request) -> Response:
    return Response(b"this is no gzip", 500, headers={"Content-Encoding": "gzip"})


async def raw(request: Request) -> Response:
    return Response(bytes.fromhex(request.query_params["hex"]), media_type="application/json")


async def elsewhere(_: Request) -> Response:
    return RedirectResponse("/search")


async def never(_: Request) -> Response:
    await anyio.sleep(PATIENCE)
    return Response()


async def endless(_: Request) -> Response:
    async def spaces() -> AsyncIterator[bytes]:
        while True:
            yield b" " * 1000
            await anyio.lowlevel.checkpoint()

    return StreamingResponse(spaces())


@contextmanager
def listening() -> Iterator[Endpoints]:
    endpoints = Endpoints()
    app = Starlette(
        routes=[
            Route("/search", endpoints.search, methods=["GET", "POST"]),
            Route("/all", endpoints.all),
            Route("/html", html),
            Route("/status", status),
            Route("/raw", raw),
            Route("/half-an-error", half_an_error),
            Route("/endless-error", endless_error),
            Route("/false-error", false_error),
            Route("/elsewhere", elsewhere),
            Route("/never", never),
            Route("/endless", endless),
        ]
    )
    served = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, ws="none", timeout_graceful_shutdown=0))
    begun = threading.Event()
    startup = served.startup

    async def started(sockets: Any = None) -> None:
        await startup(sockets)
        begun.set()

    served.startup = started  # type: ignore[method-assign]  # to notice when it listens
    thread = threading.Thread(target=served.run)
    thread.start()
    try:
        assert begun.wait(PATIENCE)
        endpoints.url = f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}"
        yield endpoints
    finally:
        served.should_exit = True
        thread.join(PATIENCE)


@pytest.fixture(scope="module")
def endpoints() -> Iterator[Endpoints]:
    with listening() as found:
        yield found


HITS = Paths(content=Path("text"), id=Path("id"), created_at=Path("published"), metadata="*", uri=Path("link"))


def posting(endpoints: Endpoints) -> Endpoint:
    return Endpoint(
        url=f"{endpoints.url}/search",
        method="POST",
        request={"q": "{query}", "k": "{limit}"},
        results=Path("hits"),
    )


def at(endpoints: Endpoints, path: str) -> Endpoint:
    """Return an endpoint that gets the query, whatever it answers."""
    mark = "&" if "?" in path else "?"
    return Endpoint(url=f"{endpoints.url}{path}{mark}q={{query}}", method="GET", results=Path("hits"))


def served(service: HttpService, **limits: Any) -> Server:
    return Server(service, HITS, name="handbook", limits=SearchLimits(**limits))


# --- the command


def talk(arguments: list[str], *calls: tuple[str, dict[str, Any]], environment: Mapping[str, str]) -> list[Any]:
    """Return the command's answers to calls on its stdin; assert that it writes nothing else."""
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": number, "method": f"memory/{method}", "params": params})
        for number, (method, params) in enumerate(calls)
    ]
    done = subprocess.run(
        [*COMMAND, *arguments], input="\n".join(lines).encode(), capture_output=True, env=environment, timeout=PATIENCE
    )
    assert (done.returncode, done.stderr) == (0, b"")
    answers = {answer["id"]: answer["result"] for answer in map(json.loads, done.stdout.splitlines())}
    return [answers[number] for number in range(len(calls))]


@pytest.mark.process
def test_one_line_makes_a_server_of_an_endpoint(endpoints: Endpoints) -> None:
    endpoints.asked.clear()
    described, recalled, listed, filtered = talk(
        ["--url", f"{endpoints.url}/search", "--request", '{"q": "{query}", "k": "{limit}"}', "--results", "hits",
         "--content", "text", "--id", "id", "--created-at", "published", "--metadata", "*", "--uri", "link",
         "--header", "Authorization: Bearer ${HANDBOOK_TOKEN}",
         "--list", f"{endpoints.url}/all?most={{limit}}", "--list-results", "all[].hit", "--max-listed", "50"],
        ("describe", {}),
        ("recall", {"query": 'when are "expenses" paid? {limit}', "limit": 2}),
        ("timeline", {}),
        ("recall", {"query": "x", "where": {"team": "people", "long": 123456789012345678901234567890}}),
        environment={"HANDBOOK_TOKEN": TOKEN, "PYTHONPATH": str(FilePath.cwd())},
    )  # fmt: skip
    assert described["name"] == endpoints.url.removeprefix("http://") + "/search"
    assert recalled["records"] == [
        {
            "id": "e1",
            "content": "Expenses are paid on the 15th.",
            "created_at": "2024-05-01T00:00:00.000Z",
            "metadata": {"v": 1.5},
            "uri": "https://h/e",
            "score": 1.0,
        },
        {
            "id": "o1",
            "content": "The office opens at eight.",
            "created_at": "2021-01-01T00:00:00.000Z",
            "metadata": {"team": "people"},
            "score": 0.5,
        },
    ]
    assert [record["id"] for record in listed["records"]] == ["t1", "o1", "e1"]
    assert [record["id"] for record in filtered["records"]] == ["t1"]
    assert filtered["records"][0]["metadata"]["long"] == 123456789012345678901234567890
    sent = [asked for asked, _ in endpoints.asked]
    assert {"q": 'when are "expenses" paid? {limit}', "k": 2} in sent
    assert [("most", "51")] in sent  # one more than may be listed, so that the service notices that there are more
    assert {headers["authorization"] for _, headers in endpoints.asked} == {f"Bearer {TOKEN}"}


@pytest.mark.process
def test_a_file_says_the_same_and_the_command_line_wins(endpoints: Endpoints, tmp_path: FilePath) -> None:
    endpoints.asked.clear()
    (tmp_path / "handbook.toml").write_text(
        f"""
        url = "{endpoints.url}/search"
        request = {{ q = "{{query}}", k = "{{limit}}" }}
        results = "hits"
        content = "text"
        created_at = "published"
        name = "from the file"
        max-limit = 2
        timeout = 9.5
        [headers]
        Authorization = "Bearer ${{HANDBOOK_TOKEN}}"
        """
    )
    described, recalled = talk(
        ["--config", str(tmp_path / "handbook.toml"), "--name", "from the line"],
        ("describe", {}),
        ("recall", {"query": "x"}),
        environment={"HANDBOOK_TOKEN": TOKEN, "PYTHONPATH": str(FilePath.cwd())},
    )
    assert (described["name"], described["limits"]) == ("from the line", {"max_recall_limit": 2})
    assert [record["id"] for record in recalled["records"]] == ["e1", "o1"]
    assert {"q": "x", "k": 2} in [asked for asked, _ in endpoints.asked]
    assert endpoints.asked[0][1]["authorization"] == f"Bearer {TOKEN}"


@pytest.mark.process
@pytest.mark.parametrize("where", ["line", "file"])
def test_a_threshold_leaves_out_what_is_not_near(where: str, endpoints: Endpoints, tmp_path: FilePath) -> None:
    scores = b'"a": 0.8300000131130218507, "b": 0.2, "c": 7.5e-1'
    hits = [{"text": name, "score": None} for name in "abcd"]
    body = json.dumps({"hits": hits}).encode()
    for part in scores.split(b", "):
        name, _, score = part.partition(b": ")
        body = body.replace(b'{"text": %b, "score": null}' % name, b'{"text": %b, "score": %b}' % (name, score))
    url = f"{endpoints.url}/raw?hex={body.hex()}&q={{query}}"
    arguments = ["--url", url, "--results", "hits", "--content", "text", "--metadata", "*", "--log-level", "error"]
    if where == "line":
        arguments += ["--score", "score", "--min-score", "0.75"]
    else:
        (tmp_path / "near.toml").write_text("score = 'score'\nmin_score = 0.75\n")
        arguments = ["--config", str(tmp_path / "near.toml"), *arguments]
    environment = {"PYTHONPATH": str(FilePath.cwd())}
    [recalled] = talk(arguments, ("recall", {"query": "x"}), environment=environment)
    assert [(record["content"], record["score"]) for record in recalled["records"]] == [("a", 1.0), ("c", 0.5)]
    assert all("metadata" not in record for record in recalled["records"])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("url = 'http://x?q={query}'\nmin_score = 'near'", "argument --min-score: expected a number, got 'near'"),
        ("url = 'http://x?q={query}'\nresuts = 'hits'", "resuts: unknown key; did you mean results?"),
        ("url = 'http://x?q={query}'\ntimeout = true", "timeout: expected a string or a number"),
        ("url = 'http://x?q={query}'\ntimeout = 'soon'", "argument --timeout: expected a number of seconds"),
        (
            "url = 'http://x?q={query}'\nrequest = { at = 2024-01-01 }",
            "request: expected only values that JSON has, got a date",
        ),
        ("url = 'http://x?q={query}'\nheaders = 3", "headers: expected a table of strings"),
        ("config = 'other.toml'", "config: unknown key"),
        ("url", "is not valid TOML"),
        ("name = 'x'", "the following arguments are required: --url"),
    ],
)
def test_a_file_that_is_mistaken_is_a_sentence(
    content: str, said: str, tmp_path: FilePath, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "handbook.toml"
    path.write_text(content)
    with pytest.raises(SystemExit) as end:
        main(["http", "--config", str(path)])
    assert end.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert "--url" in said or str(path) in told


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--url", "http://x", "--request", "{"], 2, "argument --request: expected JSON"),
        (["--url", "http://x", "--results", "hits["], 2, "argument --results: 'hits[' is not a valid JMESPath"),
        (["--url", "http://x"], 1, "the request does not contain the query"),
        (["--url", "http://x", "--request", '{"{query}": 1}'], 1, "the request does not contain the query"),
        (["--url", "handbook", "--request", '"{query}"'], 1, "the address is not valid"),
        (["--url", "http://[/", "--request", '"{query}"'], 1, "the address is not valid"),
        (["--url", f"http://me:{TOKEN}@x/?q={{query}}"], 1, "the address contains a user name or a password"),
        (["--url", "http://x/{query}", "--request", '"{query}"'], 1, "only after its ?"),
        (["--url", "http://x", "--method", "GET", "--request", '["{query}"]'], 1, "an object of query parameters"),
        (["--url", "http://x", "--method", "GET", "--request", '{"a": {"q": "{query}"}}'], 1, "'a' is an object"),
        (["--url", "http://x?q={query}", "--list", "ftp://x"], 1, "the address is not valid"),
        (["--url", "http://x?q={query}", "--header", f"Authorization: Bearer {TOKEN}"], 1, "a literal token"),
        (
            ["--url", "http://x?q={query}", "--header", "A: ${NOT_SET}"],
            1,
            "variable NOT_SET is not set",
        ),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(
    arguments: list[str], code: int, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: int | str | None = main(["http", *arguments])
    except SystemExit as end:
        ended = end.code
    told = capfd.readouterr().err
    assert ended == code
    assert said in told
    assert TOKEN not in told
    assert "Traceback" not in told


# --- what is sent


@pytest.mark.anyio
async def test_get_sends_query_parameters(endpoints: Endpoints) -> None:
    endpoints.asked.clear()
    search = Endpoint(
        url=f"{endpoints.url}/search?lang=en&top={{limit}}#part",
        method="GET",
        request={"q": "about {query}", "tag": ["a", "b"], "exact": True, "k": "{limit}", "none": None},
        results=Path("hits"),
    )
    async with connect_http(search, None, headers={}) as service:
        assert len(await contents(served(service), query="a&b=c #%41 é+ ", limit=3)) == 3
    assert endpoints.asked[0][0] == [
        *(("lang", "en"), ("top", "3"), ("q", "about a&b=c #%41 é+ "), ("tag", "a"), ("tag", "b")),
        *(("exact", "true"), ("k", "3"), ("none", "")),
    ]


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as found:
        yield found


@pytest.fixture(scope="module")
def both(endpoints: Endpoints, portal: BlockingPortal) -> Iterator[list[HttpService]]:
    """Yield a service called by POST, and one called by GET."""
    get = Endpoint(url=f"{endpoints.url}/search?a=1&q={{query}}&b=2", method="GET", results=Path("hits"))
    with ExitStack() as opened:
        yield [
            opened.enter_context(portal.wrap_async_context_manager(connect_http(search, None, headers={})))
            for search in (posting(endpoints), get)
        ]


@settings(max_examples=scaled(10), suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(query=st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip))
def test_nothing_in_a_query_leaves_its_place(
    query: str, endpoints: Endpoints, portal: BlockingPortal, both: list[HttpService]
) -> None:
    endpoints.asked.clear()
    for service in both:
        portal.call(partial(contents, served(service), query=query, limit=2))
    assert [asked for asked, _ in endpoints.asked] == [{"q": query, "k": 2}, [("a", "1"), ("q", query), ("b", "2")]]


# --- failures


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/html", "/html answered with text/html, not JSON"),
        ("/nowhere", "answered 404 Not Found: it has no such address; see --url"),
        ("/status?code=401", "answered 401 Unauthorized: it expects authentication"),
        ("/status?code=422", "answered 422"),
        ("/status?code=503", "answered 503 Service Unavailable: its own log may have the reason"),
        ("/status?code=204", "answered 204 No Content, expected 200 with results"),
        ("/elsewhere", "answered 307 Temporary Redirect: redirects are not followed"),
        (
            "/all",
            "expected a list of results at 'hits' of its answer, got nothing; it has 'all'; a list is at 'all', see "
            "--results",
        ),
        (
            "/raw?hex=" + b'{"hits": {"a": 1}}'.hex(),
            "expected a list of results at 'hits' of its answer, got an object; it has 'hits'; see --results",
        ),
        ("/raw?hex=" + b'{"hits": ['.hex(), "answered with invalid JSON"),
        ("/raw?hex=" + b'{"hits": [NaN]}'.hex(), "answered with invalid JSON: NaN is not valid in JSON"),
        ("/raw?hex=" + b'{"hits": ["\xff"]}'.hex(), "answered with text that is not valid UTF-8, at byte 11"),
        ("/raw?hex=" + (b"[" * 5000).hex(), "answered with JSON that is nested too deeply"),
        ("/raw?hex=" + b'{"hits": [{"id": 5}]}'.hex(), "result 1 of 1: expected its content, a string, at 'text'"),
        ("/endless", "answered with more than 5,500 bytes"),
        ("/raw?hex=" + (b" " * 5600).hex(), "answered with more than 5,500 bytes"),
    ],
)
async def test_what_is_no_answer_is_an_error(path: str, said: str, endpoints: Endpoints) -> None:
    async with connect_http(at(endpoints, path), None, headers={"X": TOKEN}, max_answer=5500) as service:
        code, sentence = await refused(served(service), "recall", query="x")
    assert code == -32603
    assert said in sentence
    assert TOKEN not in sentence
    assert sentence.startswith("handbook: ")


def erring(body: bytes, media_type: str = "text/plain", code: int = 422) -> str:
    return f"/status?code={code}&type={quote(media_type)}&hex={body.hex()}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "end"),
    [
        (erring(b"limit must be 20 or less"), "; its message: limit must be 20 or less"),
        (erring(b"\n \r\nlimit must be\t20\nat line 5"), "; its message: limit must be 20"),
        (
            erring(b'{\n  "detail": "no\\n such index"\n}', "application/json"),
            '; its message: { "detail": "no\\n such index" }',
        ),
        (erring(b'{\n"title": "x"}', "application/problem+json", 500), '; its message: { "title": "x"}'),
        (erring(b"\xef\xbb\xbfno \xff\x1b[31m\xe2\x80\xae\x00."), "; its message: no \ufffd\ufffd[31m\ufffd\ufffd."),
        (erring(b"x" * 5000), "; its message: " + "x" * 299 + "…"),
        (erring(f"Bearer {TOKEN} is no key".encode(), code=401), "; its message: … is no key"),
        (erring(f"'{TOKEN}'?".encode(), code=403), "; its message: '…'?"),
        (erring(b"the Bearer"), "; its message: the Bearer"),
        (erring(b"my s3cret-s3cret is gone", code=500), "; its message: my … is gone"),
        (erring(b"  \n ", code=500), "its own log may have the reason"),
        (erring(b"", code=500), "its own log may have the reason"),
        ("/nowhere", "; see --url; its message: Not Found"),
        ("/half-an-error", "its own log may have the reason"),
        ("/endless-error", "word word…"),
        ("/false-error", "its own log may have the reason"),
        ("/elsewhere", "see --url"),
    ],
)
async def test_an_error_is_quoted_on_one_printable_line(
    path: str, end: str, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cret-s3cret")
    monkeypatch.setattr(over_http, "_PATIENCE_WITH_AN_ERROR", 0.2)
    async with connect_http(at(endpoints, path), None, headers={"Authorization": f"Bearer {TOKEN}"}) as service:
        code, sentence = await refused(served(service, timeout=PATIENCE), "recall", query="x")
    assert code == -32603
    assert sentence.endswith(end)
    assert " answered " in sentence
    assert TOKEN not in sentence
    assert sentence.isprintable()
    assert len(sentence) < 700


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "results", "said"),
    [
        ({"hits": [], "took": 3}, "data", "got nothing; it has 'hits', 'took'; a list is at 'hits', see --results"),
        (
            {"data": {"my hits": [1], "n": {"o": []}}},
            "hits",
            "it has 'data'; a list is at 'data.\"my hits\"' and at 'data.n.o', see --results",
        ),
        ({"hits": "none"}, "hits", "got the string 'none'; it has 'hits'; see --results"),
        ({}, "hits", "got nothing; it is empty; see --results"),
        ([{"text": "x"}], "hits", "got nothing; the answer itself is a list; use --results '@'"),
        ("hits", "hits", "got nothing; the answer is the string 'hits'"),
        (None, "@", "got nothing; the answer is nothing"),
        ({str(n): n for n in range(30)}, "hits", "'11' and 18 more; see --results"),
        ({"a\u202e\n": 1}, "hits", r"it has 'a\u202e\n'; see --results"),
        (
            {"hits": [{"doc": 1}, {}]},
            "hits[].document",
            "but the path finds nothing in any of 2 elements; the first is an object; it has",
        ),
        ({"hits": [{"docs": [{"x": 1}]}]}, "hits[].docs[].y", "but the path finds nothing in any of 1 elements"),
        ({"hits": [None, "x"]}, "hits[*].doc", "the first is nothing; see --results"),
    ],
)
async def test_a_wrong_path_of_results_names_what_the_answer_has(
    answer: Any, results: str, said: str, endpoints: Endpoints
) -> None:
    raw = at(endpoints, f"/raw?hex={json.dumps(answer).encode().hex()}")
    raw = msgspec.structs.replace(raw, results=Path(results))
    async with connect_http(raw, raw, headers={}) as service:
        handbook = served(service)
        code, sentence = await refused(handbook, "recall", query="x")
        assert (code, said in sentence) == (-32603, True), sentence
        assert sentence.isprintable()
        code, sentence = await refused(handbook, "timeline")
        assert (code, said.replace("--results", "--list-results") in sentence) == (-32603, True), sentence


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answer", "results"),
    [
        ({"hits": []}, "hits"),
        ({"hits": []}, "hits[].doc"),
        ({"hits": [{"docs": []}, {"docs": []}]}, "hits[].docs[]"),
        ({"hits": [{"docs": []}]}, "hits[].docs[].text"),
        ({"hits": [{"v": 1}]}, "hits[?v > `5`]"),
        ({"hits": [{"v": 1}]}, "hits[?v > `5`].doc"),
    ],
)
async def test_an_answer_without_results_is_no_mistake(answer: Any, results: str, endpoints: Endpoints) -> None:
    raw = at(endpoints, f"/raw?hex={json.dumps(answer).encode().hex()}")
    async with connect_http(msgspec.structs.replace(raw, results=Path(results)), None, headers={}) as service:
        assert await contents(served(service), query="x") == []


@pytest.mark.anyio
async def test_an_endpoint_that_hangs_or_is_not_there_is_an_error(endpoints: Endpoints) -> None:
    async with connect_http(at(endpoints, "/never"), None, headers={}) as service:
        code, sentence = await refused(served(service, timeout=0.1), "recall", query="x")
        assert (code, "no answer within 0.1 s" in sentence) == (-32603, True)
        # a longer --timeout alone would only run into the tier's `timeout`
        assert sentence.endswith("raise --timeout, and the tier's `timeout` above that")
    gone = Endpoint(url="http://127.0.0.1:1/?q={query}", method="GET", results=Path("@"))
    async with connect_http(gone, None, headers={}) as service:
        code, sentence = await refused(served(service), "recall", query="x")
        assert (code, "http://127.0.0.1:1/ cannot be reached" in sentence) == (-32603, True)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/search", "up"),
        ("/status?code=400", "up"),
        ("/status?code=401", "up"),
        ("/status?code=404", "up"),
        ("/status?code=422", "up"),
        ("/status?code=429", "up"),
        ("/html", "up"),
        ("/elsewhere", "up"),
        ("/status?code=500", "down"),
        ("/status?code=502", "down"),
        ("/status?code=503", "down"),
        ("/never", "down"),
        ("http://127.0.0.1:1/", "down"),
        (f"http://{UNKNOWN_HOST}/", "down"),
    ],
)
async def test_a_silent_endpoint_is_down_and_one_that_refuses_is_not(
    path: str, status: str, endpoints: Endpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_no_name_server(monkeypatch)
    sign = "&" if "?" in path else "?"
    url = f"{path if path.startswith('http') else endpoints.url + path}{sign}query={{query}}"
    where = Endpoint(url=url, method="GET", results=Path("hits"))
    async with connect_http(where, None, headers={}) as service:
        # an endpoint that answers at once needs no short timeout
        server = served(service, timeout=0.1 if path == "/never" else PATIENCE)
        for times in (1, 2):
            described = await answer(server, "describe")
            assert described["result"]["service"]["status"] == status
            error = (await answer(server, "recall", query="x")).get("error", {"data": {}})
            assert error["data"].get("unanswered") == (2 * times if status == "down" else None)


@pytest.mark.anyio
async def test_a_listing_that_fails_is_no_empty_timeline(endpoints: Endpoints) -> None:
    async with connect_http(posting(endpoints), at(endpoints, "/html"), headers={}) as service:
        for method in ("timeline", "recall"):
            assert (await refused(served(service), method))[0] == -32603
        assert len(await contents(served(service), query="x")) == 3


@pytest.mark.anyio
async def test_results_without_content_are_left_out(endpoints: Endpoints, caplog: pytest.LogCaptureFixture) -> None:
    hits = [None, {"id": "a"}, {"id": "b", "text": None}, {"id": "c", "text": "tea"}, {"text": "bare"}, {"id": "c"}]
    body = json.dumps({"hits": hits}).encode().hex()
    raw = at(endpoints, f"/raw?hex={body}")
    async with connect_http(raw, raw, headers={}) as service:
        handbook = served(service)
        for params in ({"query": "x"}, {"query": "x", "limit": 2}, {}):
            assert await contents(handbook, **params) == ["tea", "bare"]
        assert await contents(handbook, "timeline") == ["tea", "bare"]
        assert await contents(handbook, where={"id": "c"}) == ["tea"]
    left_out, undated = caplog.messages
    assert left_out.startswith("service=handbook result left out, ")
    assert undated.startswith("service=handbook none of 5 results has a readable date at 'published': ")


@pytest.mark.anyio
async def test_numbers_stay_as_they_are_written(endpoints: Endpoints) -> None:
    numbers = b'"a":1e400,"b":0.1,"c":12345678901234567890123,"d":1.0,"e":0.30000000000000004001'
    body = b'{"hits": [{"text": "x", ' + numbers + b"}]}"
    async with connect_http(at(endpoints, f"/raw?hex={body.hex()}"), None, headers={}) as service:
        [record] = await service.search("x", None, 5, vectors=False)
        line = await served(service)(
            b'{"jsonrpc":"2.0","id":1,"method":"memory/recall","params":{"query":"x","where":{"a":10e399,"e":0.30000000000000004001}}}',
            LOCAL,
        )
    assert record.value["b"] == 0.1
    assert line is not None
    assert numbers in line
