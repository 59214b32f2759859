"""a2m-rag mcp: real MCP servers of the official SDK, as commands and at addresses."""

import importlib.util
import json
import os
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path as FilePath
from typing import Any, Final

import anyio
import anyio.to_thread
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mcp import MCPError
from mcp.types import ListToolsResult, Tool

from a2m_rag import over_mcp
from a2m_rag.cli import main
from a2m_rag.mapping import Path, Paths
from a2m_rag.mcp_tools import Call, asking, results_in
from a2m_rag.over_mcp import connect_mcp
from a2m_rag.server import SearchLimits, Server
from a2m_rag.service import CannotStart, ServiceFailure
from a2m_router.conformance.__main__ import main as conformance
from a2m_router.protocol.client.child import StderrLines
from tests.support.addresses import reserved_port
from tests.support.examples import scaled
from tests.support.paths import SERVERS
from tests.support.retrieval import ask, contents, refused, unanswered

PATIENCE = 60

# the order of steps from one call to the next is the same on every event loop


@pytest.fixture
def anyio_backend() -> str:
    """a2m-rag runs on asyncio only."""
    return "asyncio"


on_one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
TOKEN = "a-token-that-is-nobody's-business"
PROGRAM: Final = [sys.executable, str(SERVERS / "mcp_search.py")]
# without the SDK, which takes a second to import
SMALL: Final = [sys.executable, str(SERVERS / "small_mcp.py")]
COMMAND: Final = [sys.executable, "-m", "a2m_rag.cli", "mcp"]

PATHS = Paths(
    content=Path("content || text"),
    id=Path("id"),
    created_at=Path("created_at"),
    metadata=Path("metadata"),
    uri=Path("uri"),
)
EXPENSES, OFFICE, TEA = "Expenses are paid on the 15th.", "The office opens at eight.", "Tea is in the kitchen."


@contextmanager
def listening(*options: str, port: int) -> Iterator[str]:
    """Run the server of `mcp_search.py` on a port; yield its address."""
    command = [*PROGRAM, "--http", str(port), *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as serving:
        try:
            assert serving.stderr is not None
            assert any(b"running on" in line for line in serving.stderr)
            threading.Thread(target=serving.stderr.read, daemon=True).start()
            yield f"http://127.0.0.1:{port}/mcp"
        finally:
            serving.kill()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with reserved_port() as port, listening(port=port) as found:
        yield found


@asynccontextmanager
async def served(
    server: str | list[str],
    tool: str,
    *,
    timeout: float = PATIENCE,
    headers: Mapping[str, str] | None = None,
    **call: Any,
) -> AsyncIterator[Server]:
    command, url = ([], server) if isinstance(server, str) else (server, None)
    asked = Call(tool=tool, content=PATHS.content, **call)
    async with connect_mcp(command, url, asked, headers=headers or {}, timeout=timeout) as service:
        yield Server(service, PATHS, name="handbook", limits=SearchLimits(timeout=timeout))


# --- answers


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
@pytest.mark.parametrize(
    ("tool", "results", "expected"),
    [
        ("search", None, [EXPENSES, OFFICE, TEA]),
        ("search", "result", [EXPENSES, OFFICE, TEA]),
        ("search", "@", [EXPENSES, OFFICE, TEA]),
        ("search", "result[?score > `0.3`]", [EXPENSES, OFFICE]),
        ("envelope", "hits", [EXPENSES, OFFICE, TEA]),
        ("as_json", "data.hits", [EXPENSES, OFFICE, TEA, "long"]),
        ("wrapped_json", None, [EXPENSES, OFFICE, TEA]),
        ("wrapped_json", "@", [EXPENSES, OFFICE, TEA]),
        ("each_json", None, [EXPENSES, OFFICE, TEA]),
        ("each_json", "@", [EXPENSES, OFFICE, TEA]),
        ("texts", None, [EXPENSES, OFFICE, TEA]),
        ("prose", None, [EXPENSES]),
        ("nothing", None, []),
        ("nothing", "result", []),
        ("silent", None, []),
        ("silent", "hits", []),
        ("resources", None, ["Two pages:", TEA]),
    ],
)
async def test_answers_of_every_shape_are_results(
    tool: str, results: str | None, expected: list[str], url: str
) -> None:
    async with served(url, tool, results=None if results is None else Path(results)) as server:
        assert await contents(server, query="x") == expected
        assert await contents(server, "timeline") == await contents(server) == []


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
@pytest.mark.parametrize(
    ("tool", "results", "said"),
    [
        (
            "envelope",
            None,
            "at '@' of its answer, got an object; it has 'hits', 'took'; a list is at 'hits', see --results",
        ),
        ("envelope", "pages", "at 'pages' of its answer, got nothing; it has 'hits', 'took'; a list is at 'hits', see"),
        (
            "envelope",
            "hits[].page",
            "but the path finds nothing in any of 3 elements; the first is an object; it has 'id', 'content'",
        ),
        ("as_json", None, "it has 'data'; a list is at 'data.hits', see --results"),
        ("search", "pages", "got nothing; the answer itself is a list; use --results '@'"),
        (
            "texts",
            "hits",
            "got text that is not JSON, the string 'Expenses are paid on the 15th.'; leave out --results",
        ),
    ],
)
async def test_an_answer_without_a_list_names_what_it_has(tool: str, results: str | None, said: str, url: str) -> None:
    async with served(url, tool, results=None if results is None else Path(results)) as server:
        code, sentence = await refused(server, "recall", query="x")
    assert code == -32603
    assert f"handbook: {url}: the tool '{tool}': expected " in sentence
    assert said in sentence


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_an_embedded_resource_is_a_result_with_its_uri(url: str) -> None:
    async with served(url, "resources") as server:
        found = (await ask(server, "recall", query="x"))["records"]
    assert [(record["content"], record.get("uri")) for record in found] == [
        ("Two pages:", None),
        (TEA, "file:///handbook.md"),
    ]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["result", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    structured=json_values,
    texts=st.lists(st.text(max_size=4) | json_values.map(json.dumps), max_size=3),
    path=st.sampled_from([None, "@", "result", "x[].content"]),
)
def test_whatever_a_tool_answers_is_results_or_a_sentence(structured: Any, texts: list[str], path: str | None) -> None:
    call = Call(tool="t", results=None if path is None else Path(path))
    said: str | list[Any]
    try:
        said = results_in(structured, texts, call)
    except ServiceFailure as failure:
        said = str(failure)
    assert isinstance(said, list) or said.isprintable()


# --- arguments


@pytest.mark.process
@settings(max_examples=scaled(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(queries=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(str.strip), min_size=5))
def test_nothing_in_a_query_leaves_its_place(queries: list[str], url: str) -> None:
    async def scenario() -> None:
        async with served(url, "echo", arguments={"lang": "{query}"}, query="text") as server:
            for query in queries:
                assert await contents(server, query=query, limit=3) == [f"{query} 3 {query}"]

    anyio.run(scenario)


@pytest.mark.process
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("tool", "call", "expected"),
    [
        # within the bounds of the tool's own schema, 2 to 20
        ("echo", {}, {1: "x 2 en", 7: "x 7 en", 50: "x 20 en"}),
        ("echo", {"arguments": {"lang": "de", "top_k": 4}}, {7: "x 4 de"}),
        ("echo", {"query": "lang", "arguments": {"text": "a {query} b"}}, {7: "a x b 7 x"}),
        ("listed", {"arguments": {"queries": ["{query}", "y"], "collection": "c"}}, {7: "['x', 'y'] c 7"}),
        ("listed", {"limit": "n", "arguments": {"queries": ["{query}"], "collection": "{limit}"}}, None),
        ("listed", {"arguments": {"queries": ["{query}"], "collection": "c", "n": None}}, {7: "['x'] c None"}),
    ],
)
async def test_arguments_have_their_values(tool: str, call: dict[str, Any], expected: dict[int, str], url: str) -> None:
    if expected is None:  # a limit is a number where its placeholder stands alone
        with pytest.raises(CannotStart, match=r"collection: 8 is not of type 'string'"):
            async with served(url, tool, **call):
                raise AssertionError
        return
    async with served(url, tool, **call) as server:
        for limit, echoed in expected.items():
            assert await contents(server, query="x", limit=limit) == [echoed]


SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "find": {
        "type": "object",
        "properties": {
            "words": {"type": "string"},
            "most": {"anyOf": [{"type": "integer", "maximum": 20}, {"type": "null"}]},
            "lang": {"enum": ["en", "de"]},
        },
        "required": ["words"],
    },
    "open": {"type": "object", "properties": {"q": {}}, "additionalProperties": True},
    "bare": {"type": "object"},
    "odd": {"type": "object", "properties": {"query": {"type": "no such type"}}},
}
HAS: Final = (
    "; its arguments are words (string, required), most (integer), lang (anything); see --query-argument, "
    "--limit-argument"
)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (Call(tool="search"), "the server has no tool 'search'; its tools are: bare, find, odd, open"),
        (Call(tool="find"), "the tool 'find' has no argument with a usual name for the query" + HAS),
        (Call(tool="find", query="query"), "the tool 'find' has no argument 'query'" + HAS),
        (Call(tool="find", query="words", limit="limit"), "the tool 'find' has no argument 'limit'" + HAS),
        (Call(tool="find", query="words", arguments={"x": 1}), "the tool 'find' has no argument 'x'" + HAS),
        (Call(tool="find", query="most"), "the tool 'find' does not accept the arguments: "),
        (Call(tool="find", query="words", arguments={"lang": "fr"}), "lang: 'fr' is not one of ['en', 'de']" + HAS),
        (Call(tool="find", query="words", arguments={"words": "x"}), "the argument 'words' is in --arguments, too"),
        (Call(tool="bare"), "has no argument with a usual name for the query; it has no arguments"),
    ],
)
def test_a_call_that_does_not_fit_is_a_sentence(call: Call, said: str) -> None:
    with pytest.raises(CannotStart) as refusal:
        asking(call, SCHEMAS)
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    ("call", "limit", "expected"),
    [
        (Call(tool="find", query="words"), 50, {"words": "x"}),
        (Call(tool="find", query="words", limit="most"), 50, {"words": "x", "most": 20}),
        (Call(tool="open", arguments={"more": 1}), 5, {"q": "x", "more": 1}),
        (Call(tool="bare", query="any", limit="n"), 5, {"any": "x", "n": 5}),
        (Call(tool="odd"), 5, {"query": "x"}),
    ],
)
def test_a_call_that_fits_is_made(call: Call, limit: int, expected: dict[str, Any]) -> None:
    assert asking(call, SCHEMAS).arguments("x", limit) == expected


# --- servers that end and restart


def started(folder: FilePath) -> int:
    """Return how often the server has been started."""
    return len(list(folder.glob("started-*")))


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_server_that_dies_is_started_anew(tmp_path: FilePath) -> None:
    async with served([*SMALL, "--marks", str(tmp_path)], "search") as server:
        assert await contents(server, query="x", limit=1) == [EXPENSES]
        assert started(tmp_path) == 1
        # it dies during a call: the call is repeated
        (tmp_path / "die").touch()
        assert await contents(server, query="x", limit=1) == [EXPENSES]
        assert started(tmp_path) == 2
        # it dies between calls
        [pid] = [pid for pid in pids(tmp_path) if alive(pid)]
        os.kill(pid, 9)
        assert await contents(server, query="x", limit=1) == [EXPENSES]
        assert started(tmp_path) == 3
    assert not any(map(alive, pids(tmp_path)))


@pytest.mark.process
@pytest.mark.anyio
async def test_questions_that_a_server_dies_of_together_start_it_once(tmp_path: FilePath) -> None:
    found: list[list[str]] = []

    async def asked(server: Server) -> None:
        found.append(await contents(server, query="x", limit=1))

    async with served([*SMALL, "--marks", str(tmp_path)], "search") as server:
        (tmp_path / "die").touch()
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(asked, server)
    assert found == [[EXPENSES]] * 5
    assert started(tmp_path) == 2


def pids(folder: FilePath) -> list[int]:
    return [int(mark.name.removeprefix("started-")) for mark in folder.glob("started-*")]


def alive(pid: int) -> bool:
    try:
        state = (FilePath("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in ("Z", "X")


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_server_that_cannot_be_started_again_is_a_sentence(tmp_path: FilePath) -> None:
    (tmp_path / "once.py").write_text(
        "import pathlib, runpy, sys\n"
        "pathlib.Path(sys.argv[1]).rename(sys.argv[1] + '-gone')\n"
        f"sys.argv[1:] = ['--marks', {str(tmp_path)!r}]\n"
        f"runpy.run_path({SMALL[1]!r}, run_name='__main__')\n"
    )
    (tmp_path / "ticket").touch()
    async with served([sys.executable, str(tmp_path / "once.py"), str(tmp_path / "ticket")], "search") as server:
        (tmp_path / "die").touch()
        for _ in range(2):
            code, sentence = await refused(server, "recall", query="x")
            assert code == -32603
            assert sentence.startswith(f"handbook: {sys.executable}: the MCP server has ended: FileNotFoundError: [Err")
        (tmp_path / "ticket-gone").rename(tmp_path / "ticket")
        assert await contents(server, query="x", limit=1) == [EXPENSES]


# the program that replaces the server's
DEAD: Final = "import sys; sys.exit('the index is gone')"


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_command_that_is_dead_is_silence(tmp_path: FilePath) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import runpy\nrunpy.run_path({SMALL[1]!r}, run_name='__main__')\n")
    async with served([sys.executable, str(program), "--marks", str(tmp_path)], "search") as server:
        assert (await ask(server, "describe"))["service"] == {"status": "up"}
        alive_before = program.read_text()
        program.write_text(DEAD)
        (tmp_path / "die").touch()
        said = f"handbook: {sys.executable}: the MCP server has ended: the index is gone"
        for times in (1, 3):
            assert await unanswered(server, query="x") == times
            assert (await ask(server, "describe"))["service"] == {"status": "down", "reason": said}
        program.write_text(alive_before)
        assert (await ask(server, "describe"))["service"] == {"status": "up"}
        # a server that dies of every call
        program.write_text(
            alive_before.replace("runpy\n", f"runpy, pathlib\npathlib.Path({str(tmp_path)!r}, 'die').touch()\n")
        )
        (tmp_path / "die").touch()
        assert await unanswered(server, query="x") == 1


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_an_address_that_cannot_be_reached_is_silence() -> None:
    with reserved_port() as port:
        with listening(port=port) as url:
            serving = served(url, "search")
            server = await serving.__aenter__()
            assert (await ask(server, "describe"))["service"] == {"status": "up"}
        try:
            for times in (1, 3):
                assert await unanswered(server, query="x") == times
                service = (await ask(server, "describe"))["service"]
                assert service["status"] == "down"
                assert f"{url} cannot be reached: " in service["reason"]
            with listening(port=port):
                assert (await ask(server, "describe"))["service"] == {"status": "up"}
        finally:
            await serving.__aexit__(None, None, None)


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
@pytest.mark.parametrize(("status", "state"), [(500, "down"), (503, "down"), (401, "up"), (403, "up")])
async def test_a_server_that_fails_is_silent_and_one_that_refuses_is_not(status: int, state: str) -> None:
    with reserved_port() as port:
        with listening(port=port) as url:
            serving = served(url, "search")
            server = await serving.__aenter__()
        try:
            with answering(status, "no", "text/plain", port=port):
                assert await unanswered(server, query="x") == (1 if state == "down" else None)
                assert (await ask(server, "describe"))["service"]["status"] == state
        finally:
            await serving.__aexit__(None, None, None)


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_tool_that_is_gone_when_the_server_comes_back_is_no_silence(tmp_path: FilePath) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import runpy\nrunpy.run_path({SMALL[1]!r}, run_name='__main__')\n")
    async with served([sys.executable, str(program), "--marks", str(tmp_path)], "search") as server:
        program.write_text(f"import runpy, sys\nsys.argv += ['--tool', 'another']\nrunpy.run_path({SMALL[1]!r})\n")
        (tmp_path / "die").touch()
        assert "the server has no tool 'search'" in (await refused(server, "recall", query="x"))[1]
        assert await unanswered(server, query="x") is None


async def give_up_on(server: Server, folder: FilePath) -> None:
    """Make a call at which the server hangs; once it does, cancel the call."""
    os.mkfifo(folder / "hanging")
    (folder / "hang").touch()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(contents, server, query="x"))
        await anyio.to_thread.run_sync((folder / "hanging").read_bytes)
        tasks.cancel_scope.cancel()


@pytest.mark.anyio
async def test_a_server_that_hangs_is_started_anew(tmp_path: FilePath) -> None:
    (tmp_path / "stuck.py").write_text(STUCK)
    command = [sys.executable, str(tmp_path / "stuck.py"), str(tmp_path)]
    async with connect_mcp(command, None, Call(tool="search"), headers={}, timeout=0.8) as service:
        patient = Server(service, PATHS, name="handbook", limits=SearchLimits(timeout=PATIENCE))
        hasty = Server(service, PATHS, name="handbook", limits=SearchLimits(timeout=0.2))
        assert await contents(patient, query="x") == ["x"]
        await give_up_on(patient, tmp_path)
        # the server starts while this call waits, and goes on starting when this call has given up
        code, sentence = await refused(hasty, "recall", query="x")
        assert (code, "no answer within 0.2 s" in sentence) == (-32603, True)
        assert await contents(patient, query="x") == ["x"]
        assert started(tmp_path) == 2
    assert not any(map(alive, pids(tmp_path)))


# a server that blocks its event loop, as many do
STUCK: Final = """
import os, pathlib, sys, time
from mcp.server.mcpserver import MCPServer

marks = pathlib.Path(sys.argv[1])
server = MCPServer("stuck")

@server.tool()
async def search(query: str) -> list[str]:
    if (marks / "hang").exists():
        (marks / "hang").unlink()
        (marks / "hanging").write_bytes(b"")
        time.sleep(10**6)
    return [query]

(marks / f"started-{os.getpid()}").touch()
server.run("stdio")
"""


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_slow_answer_does_not_cost_the_server(tmp_path: FilePath) -> None:
    async with served([*PROGRAM, "--marks", str(tmp_path)], "search") as server:
        await give_up_on(server, tmp_path)  # the tool runs on a thread of its own: the server answers other calls
        assert await contents(server, query="x", limit=1) == [EXPENSES]
        assert started(tmp_path) == 1


class Fake:
    """A client of a server that returns what `answer` returns. `opened` counts its connections."""

    def __init__(self, answer: Callable[[], Awaitable[Any]]) -> None:
        self.answer = answer
        self.opened = 0

    @asynccontextmanager
    async def open(self, stderr: StderrLines) -> AsyncIterator["Fake"]:
        self.opened += 1
        stderr.last = "no pages"
        stderr.ended.set()
        yield self

    async def list_tools(self, cursor: str | None = None) -> Any:
        return ListToolsResult(tools=[Tool(name="search", input_schema={"properties": {"query": {}}})])

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        return await self.answer()

    @asynccontextmanager
    async def served(self, timeout: float) -> AsyncIterator[Server]:
        place = over_mcp._Place(name="program", is_command=True, open=self.open)
        async with anyio.create_task_group() as tasks:
            service = over_mcp.McpService(tasks, place, Call(tool="search"), (), PATIENCE)
            yield Server(service, PATHS, name="handbook", limits=SearchLimits(timeout=timeout))
            tasks.cancel_scope.cancel()


@pytest.mark.process
@pytest.mark.anyio
async def test_nobody_waits_until_a_question_is_given_up() -> None:
    let_go = anyio.Event()

    async def take_time() -> None:
        with anyio.CancelScope(shield=True):
            await let_go.wait()

    async with Fake(take_time).served(timeout=0.05) as server:
        for _ in range(2):
            assert "no answer within 0.05 s" in (await refused(server, "recall", query="x"))[1]
        let_go.set()


@pytest.mark.process
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("problem", "said", "opened"),
    [
        (ValueError("no such\nfield"), "the answer of the tool 'search' cannot be used: no such field", 1),
        (RuntimeError("no schema"), "the answer of the tool 'search' cannot be used: no schema", 1),
        (MCPError(-32602, "no such tool"), "the MCP server returned an error: no such tool", 1),
        (MCPError(-32600, "no request"), "the MCP server returned an error: no request", 1),
        (MCPError(-32000, "Connection closed"), "the MCP server has ended: no pages", 2),
        (anyio.BrokenResourceError(), "BrokenResourceError", 2),
        (ExceptionGroup("two", [OSError("no pipe")]), "no pipe", 2),
    ],
)
async def test_only_a_connection_that_has_ended_is_replaced(problem: Exception, said: str, opened: int) -> None:
    async def fail() -> None:
        raise problem

    client = Fake(fail)
    async with client.served(timeout=PATIENCE) as server:
        assert await refused(server, "recall", query="x") == (-32603, f"handbook: program: {said}")
    assert client.opened == opened


@pytest.mark.anyio
@on_one_loop
async def test_a_query_that_is_no_text_costs_no_connection(tmp_path: FilePath) -> None:
    async with connect_mcp(
        [*SMALL, "--marks", str(tmp_path)], None, Call(tool="search"), headers={}, timeout=PATIENCE
    ) as service:
        with pytest.raises(ServiceFailure, match="the query cannot be sent"):
            await service.search("\ud800", None, 1, vectors=False)
        assert len(await service.search("x", None, 1, vectors=False)) == 1
    assert started(tmp_path) == 1


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_server_at_an_address_may_go_and_come_back() -> None:
    with reserved_port() as port:
        with listening(port=port) as url:
            serving = served(url, "search", headers={"Authorization": f"Bearer {TOKEN}"})
            server = await serving.__aenter__()
            assert await contents(server, query="x", limit=1) == [EXPENSES]
        try:
            for _ in range(2):
                code, sentence = await refused(server, "recall", query="x")
                assert (code, f"handbook: {url} cannot be reached: " in sentence) == (-32603, True), sentence
                assert TOKEN not in sentence
            with listening(port=port):
                assert await contents(server, query="x", limit=1) == [EXPENSES]
            with listening(port=port):  # the session of the previous server is unknown to this one
                assert await contents(server, query="x", limit=1) == [EXPENSES]
        finally:
            await serving.__aexit__(None, None, None)


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_a_tool_that_fails_is_quoted(tmp_path: FilePath) -> None:
    async with served([*PROGRAM, "--marks", str(tmp_path)], "search") as server:
        (tmp_path / "fail").touch()
        code, sentence = await refused(server, "recall", query="the pay")
        assert code == -32603
        assert f"handbook: {sys.executable}: the tool 'search' returned an error: " in sentence
        assert sentence.isprintable()
        assert await contents(server, query="x", limit=1) == [EXPENSES]


@contextmanager
def answering(status: int, body: str, media_type: str, port: int = 0) -> Iterator[str]:
    """Run an HTTP server that answers every POST with one status and body; yield its address."""

    class Refusing(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(status)
            self.send_header("Content-Type", media_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", port), Refusing) as http:
        threading.Thread(target=http.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{http.server_address[1]}/mcp"
        finally:
            http.shutdown()


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
@pytest.mark.parametrize(
    ("status", "body", "media_type", "said"),
    [
        (401, f"not {TOKEN}\nat all", "text/plain", "answered 401 Unauthorized: it expects authentication, or another "
         "token; see --header; its message: not …"),
        (403, '{\n"error": "no"}', "application/json", '; see --header; its message: { "error": "no"}'),
        (500, "", "text/plain", "answered 500 Internal Server Error: its own log may have the reason"),
        (503, "soon", "text/html", "its own log may have the reason; its message: soon"),
        (404, "nothing", "text/plain", ": the MCP server returned an error: Not Found"),
        (200, "<html>", "text/html", ": the MCP server returned an error: Unexpected content type: text/html"),
        (200, "{}", "application/json", ": the MCP server returned an error: Failed to parse JSON response: "),
    ],
)  # fmt: skip
async def test_an_address_with_something_else_is_a_sentence(status: int, body: str, media_type: str, said: str) -> None:
    with answering(status, body, media_type) as url, pytest.raises(CannotStart) as refusal:
        async with served(url, "search", headers={"Authorization": f"Bearer {TOKEN}"}):
            raise AssertionError
    sentence = str(refusal.value)
    assert sentence.startswith(url)
    assert said in sentence
    assert TOKEN not in sentence
    assert sentence.isprintable()


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_what_never_answers_is_no_mcp_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_mcp, "_LONGEST_START", 0.2)
    with pytest.raises(CannotStart, match=r"^sleep: no answer of an MCP server within 0\.2 s$"):
        async with served(["sleep", "1000000"], "search"):
            raise AssertionError
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/mcp"
        with pytest.raises(CannotStart, match="no answer of an MCP server within 0"):
            async with served(url, "search"):
                raise AssertionError


# --- the command


def talk(arguments: list[str], calls: int = 1, **environment: str) -> tuple[list[Any], str]:
    """Return the command's answers to so many recalls, and its output on stderr."""
    lines = [
        json.dumps({"jsonrpc": "2.0", "id": n, "method": "memory/recall", "params": {"query": "x"}})
        for n in range(calls)
    ]
    done = subprocess.run(
        [*COMMAND, *arguments],
        input="\n".join(lines).encode(),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": str(FilePath.cwd()), **environment},
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line)["result"]["records"] for line in done.stdout.splitlines()], done.stderr.decode()


@pytest.mark.process
def test_one_line_makes_a_mount_of_a_command(tmp_path: FilePath) -> None:
    (tmp_path / "print").touch()
    [records], said = talk(
        [
            "--tool",
            "search",
            "--score",
            "score",
            "--min-score",
            "0.3",
            "--metadata",
            "*",
            "--",
            *PROGRAM,
            "--marks",
            str(tmp_path),
        ]
    )
    assert records == [
        {"id": "pay", "content": EXPENSES, "created_at": "2024-05-01T00:00:00.000Z", "score": 1.0},
        {"id": "doors", "content": OFFICE, "created_at": "2023-11-20T00:00:00.000Z", "score": 0.5},
    ]
    assert "the handbook starts\n" in said
    assert "noise on stderr\n" in said
    assert "Traceback" not in said


@pytest.mark.process
def test_a_command_has_the_environment_and_all_that_comes_after_the_dashes(tmp_path: FilePath) -> None:
    (tmp_path / "asked.py").write_text(
        "import os, sys\n"
        "from mcp.server.mcpserver import MCPServer\n"
        "print('starting', flush=True)\n"
        "server = MCPServer('asked')\n"
        "@server.tool()\n"
        "def search(query: str) -> list[str]:\n"
        "    return [os.environ['OF_OURS'], *sys.argv[1:]]\n"
        "server.run('stdio')\n"
    )
    arguments = ["--tool", "search", "--", sys.executable, str(tmp_path / "asked.py"), "--tool", "--", "-x"]
    [records], said = talk(arguments, OF_OURS="a value")
    assert [record["content"] for record in records] == ["a value", "--tool", "--", "-x"]
    assert "MCP server sent input that is not a message, dropped: the string 'starting'" in said
    assert "Traceback" not in said


# it writes more than a pipe holds before its first answer
LOUD: Final = """
import sys
from mcp.server.mcpserver import MCPServer
server = MCPServer('loud')
print(('x' * 99 + chr(10)) * 5000, file=sys.stderr, flush=True)
@server.tool()
def search(query: str) -> list[str]:
    return [query]
server.run('stdio')
"""


@pytest.mark.process
def test_a_stderr_that_nobody_reads_stops_no_server(tmp_path: FilePath) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    arguments = ["--tool", "search", "--", sys.executable, str(tmp_path / "loud.py")]
    call = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "memory/recall", "params": {"query": "x"}})
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        watch = threading.Timer(PATIENCE, process.kill)
        watch.start()
        process.stdin.write(call.encode() + b"\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        watch.cancel()
        process.communicate()
    assert [record["content"] for record in json.loads(answer)["result"]["records"]] == ["x"]


@pytest.mark.process
def test_whoever_starts_it_is_told_why_its_server_is_dead() -> None:
    rag = shlex.join([*COMMAND, "--tool", "search", "--", sys.executable, "-c", DEAD])
    done = subprocess.run(
        [sys.executable, "-m", "a2m_router.command.cli", "--stdio", rag, "recall", "x"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    assert f"{sys.executable}: the MCP server has ended: the index is gone" in done.stderr.splitlines()[-1]


@pytest.mark.process
def test_an_address_is_asked_with_headers_from_the_environment(url: str) -> None:
    arguments = ["--tool", "search", "--url", url, "--header", "Authorization: Bearer ${HANDBOOK_TOKEN}"]
    [records], said = talk(arguments, HANDBOOK_TOKEN=TOKEN)
    assert [record["id"] for record in records] == ["pay", "doors", "tea"]
    assert said == ""


def test_a_process_keeps_the_profile_on_stdio(capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.join([*COMMAND, "--tool", "search", "--timeout", "60", "--", *PROGRAM])
    code = conformance(["--stdio", "sh", "-c", f"exec {command}"])
    assert code == 0, capsys.readouterr().out


@pytest.mark.process
@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--", "true"], 2, "the following arguments are required: --tool"),
        (["--tool", "t"], 2, "expected the MCP server: its command at the end, after --, or its address with --url"),
        (["--tool", "t", "--"], 2, "expected the MCP server"),
        (["--tool", "t", "--url", "http://x", "--", "true"], 2, "argument --url: not allowed with a command after --"),
        (["--tool", "t", "--header", "A: b", "--", "true"], 2, "argument --header: only with --url"),
        (["--tool", "t", "--arguments", "{", "--", "true"], 2, "argument --arguments: expected JSON"),
        (["--tool", "t", "--arguments", "[]", "--", "true"], 2, 'expected a JSON object, like \'{"collection"'),
        (["--tool", "t", "--min-score", "1", "--", "true"], 2, "add the path of the score in a result: --score PATH"),
        (["--tool", "t", "--url", "handbook"], 1, "the address is not valid"),
        (["--tool", "t", "--url", f"http://me:{TOKEN}@x/"], 1, "the address contains a user name or a password"),
        (["--tool", "t", "--url", "http://127.0.0.1:1/mcp"], 1, "http://127.0.0.1:1/mcp cannot be reached: "),
        (["--tool", "t", "--", "no-such-program"], 1, "no-such-program cannot be started: No such file or directory"),
        (["--tool", "t", "--", "true"], 1, "true: the MCP server has ended, and its stderr is empty"),
        (["--tool", "t", "--", "echo", "<html>"], 1, "echo: the MCP server has ended, and its stderr is empty"),
        (
            ["--tool", "find", "--", *PROGRAM],
            1,
            "the server has no tool 'find'; its tools are: as_json, each_json, echo, envelope,",
        ),
        (
            ["--tool", "listed", "--", *PROGRAM],
            1,
            "its arguments are queries (array, required), collection (string, required), n (int",
        ),
        (["--tool", "t", "--url", "{url}/nowhere"], 1, "/nowhere: the MCP server returned an error: "),
    ],
)
def test_mistakes_at_the_start_are_sentences(
    arguments: list[str], code: int, said: str, url: str, capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        ended: int | str | None = main(["mcp", *(each.replace("{url}", url) for each in arguments)])
    except SystemExit as end:
        ended = end.code
    told = capfd.readouterr().err
    assert ended == code
    assert said in told
    assert TOKEN not in told
    assert "Traceback" not in told


@pytest.mark.process
@pytest.mark.anyio
@on_one_loop
async def test_an_sdk_that_is_missing_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(CannotStart, match=r"^mcp is not installed; .*: pip install '\.\[mcp\]'$"):
        async with served(["true"], "search"):
            raise AssertionError
