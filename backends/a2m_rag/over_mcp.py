"""A search tool of an MCP server as a service. The server is a command to start, or an address (streamable HTTP).

The official SDK implements the protocol. This module manages the connection:
- A separate task opens, holds and closes a connection. A search starts one if there is none. If the search is cancelled
  meanwhile, the connection is opened nevertheless: so a server that starts slowly is started only once.
- If a connection has ended, or the server no longer knows its session, it is replaced, and the call is sent again.
- After a cancelled call, the next search first requests the list of tools. If the server does not answer that in time,
  the connection is dropped; a command is ended and started again.
- The stderr of a command is forwarded to this process's stderr, line by line, without blocking the command. If the
  command ends, the error quotes its last line. Lines on its stdout that are not messages are dropped.
- If no connection can be opened, or two have ended, the failure is a ServiceSilent. A rejected authentication is not.
"""

import logging
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from pathlib import Path as FilePath
from typing import Any, Final
from urllib.parse import urlsplit

import anyio
import anyio.abc
import msgspec

from a2m_rag.headers import secrets_in
from a2m_rag.importing import library
from a2m_rag.mapping import shown
from a2m_rag.mcp_tools import Call, ToolCall, asking, results_in
from a2m_rag.over_http import answered, beginning, check_address, media_type_of
from a2m_rag.service import ByWords, CannotStart, Result, ServiceFailure, ServiceSilent, on_one_line
from a2m_router.process.descriptors import DescriptorSource
from a2m_router.protocol.client.child import StderrLines, executable
from a2m_router.protocol.client.client import LAST_WORDS

log = logging.getLogger(__name__)

# seconds for the start of a server: npx and uvx download a command before they run it
_LONGEST_START: Final = 60.0
# the share of a call's time for a doubtful server to answer a test; the rest is for the start of another one
_TEST_SHARE: Final = 0.25
# seconds for an orderly end of the connections; then their tasks are cancelled, and a command is killed
_LONGEST_END: Final = 5.0
# the most pages of a listing of tools, so that an endless listing cannot block the start
_MOST_PAGES: Final = 100


class _Gone(Exception):
    """The connection ended before the answer arrived."""

    def __init__(self, failure: ServiceFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """Why it ended."""


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """The server: its program, or its address without the query."""

    name: str
    is_command: bool
    open: Callable[[StderrLines], AbstractAsyncContextManager[Any]]
    """Opens a new client of the SDK. Its argument receives the stderr of a command."""


@asynccontextmanager
async def connect_mcp(
    command: Sequence[str], url: str | None, call: Call, *, headers: Mapping[str, str], timeout: float
) -> AsyncIterator["McpService"]:
    """Yield the service of a tool of an MCP server.

    Args:
        command: the command that starts the server; empty if there is a `url`.
        url: the address of the server; None if there is a command.
        call: the options of the command line about the tool.
        headers: sent with every request to `url`.
        timeout: seconds that a client waits for an answer.

    Raises:
        CannotStart: the server cannot be reached, has no such tool, or the tool has other arguments.
    """
    library("mcp", "mcp")
    secrets = secrets_in(headers)
    if url is None:
        place = _Place(name=command[0], is_command=True, open=_started(command))
    else:
        check_address(url)
        place = _Place(name=url.partition("?")[0], is_command=False, open=_connected(url, headers, secrets))
    cannot_start: CannotStart | None = None
    async with anyio.create_task_group() as tasks:
        service = McpService(tasks, place, call, secrets, timeout)
        try:
            try:
                await service.start()
            except CannotStart as problem:
                cannot_start = problem  # raised here, the task group would wrap it in an exception group
            else:
                yield service
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LONGEST_END):
                await service.end()
            tasks.cancel_scope.cancel()
    if cannot_start is not None:
        raise cannot_start


def _started(command: Sequence[str]) -> Callable[[StderrLines], AbstractAsyncContextManager[Any]]:
    """Return the function that starts the command and opens a client."""
    mcp = library("mcp", "mcp")
    program = shutil.which(command[0]) or executable(command[0], FilePath.cwd())
    # the whole environment: the command is the user's own, and may need tokens from there
    parameters = mcp.StdioServerParameters(command=program, args=list(command[1:]), env=dict(os.environ))

    @asynccontextmanager
    async def client(stderr: StderrLines) -> AsyncIterator[Any]:
        with ExitStack() as ours, ExitStack() as theirs:
            reading, writing = os.pipe()
            theirs.callback(os.close, writing)
            os.set_blocking(reading, False)
            source = DescriptorSource(reading)
            ours.callback(source.close)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(stderr.relay, source)
                try:
                    transport = mcp.stdio_client(parameters, errlog=writing)
                    async with mcp.Client(transport, message_handler=_Strays(), cache=None) as opened:
                        theirs.close()  # from here on the pipe ends when the command does
                        yield opened
                finally:
                    theirs.close()
                    with anyio.CancelScope(shield=True), anyio.move_on_after(LAST_WORDS):
                        await stderr.ended.wait()
                    tasks.cancel_scope.cancel()

    return client


def _connected(
    url: str, headers: Mapping[str, str], secrets: Sequence[str]
) -> Callable[[StderrLines], AbstractAsyncContextManager[Any]]:
    """Return the function that connects to the address. The proxies of the environment are not used."""
    mcp = library("mcp", "mcp")
    streamable = library("mcp.client.streamable_http", "mcp")
    httpx = library("httpx2", "mcp")

    async def refuse(response: Any) -> None:
        # raised here because the SDK hides the status; other errors are part of the negotiation of the version
        status = response.status_code
        if status in (401, 403) or status >= 500:
            failure = ServiceSilent if status >= 500 else ServiceFailure
            raise failure(answered(status, media_type_of(response), await beginning(response), secrets))

    @asynccontextmanager
    async def client(_stderr: StderrLines) -> AsyncIterator[Any]:
        hooks = {"response": [refuse]}
        is_encrypted = urlsplit(url).scheme == "https"  # certificates take a while to load; http:// needs none
        async with httpx.AsyncClient(
            headers=headers, timeout=None, trust_env=False, event_hooks=hooks, verify=is_encrypted
        ) as http:
            transport = streamable.streamable_http_client(url, http_client=http)
            async with mcp.Client(transport, message_handler=_Strays(), cache=None) as opened:
                yield opened

    return client


class _Strays:
    """A handler of input that is not a message; it logs the first one of each connection."""

    def __init__(self) -> None:
        self._has_logged = False

    async def __call__(self, message: Any) -> None:
        if isinstance(message, Exception) and not self._has_logged:
            self._has_logged = True
            errors = getattr(message, "errors", None)  # of pydantic, whose own message is long
            what = shown(errors()[0].get("input")) if errors is not None else _message(message)
            log.warning("MCP server sent input that is not a message, dropped: %s", what)


class _Connection:
    """A connection, from the start of its opening. Mutable state: its phase, and the calls that are running on it."""

    def __init__(self, tasks: anyio.abc.TaskGroup, place: _Place, call: Call) -> None:
        self._tasks = tasks
        self._place = place
        self._call = call
        self._client: Any = None
        self._asking: ToolCall | None = None
        self._running: set[_RunningCall] = set()
        self._stderr = StderrLines(_to_stderr)
        self._ending = anyio.Event()
        self.settled = anyio.Event()
        """Set when the connection is open, or could not be opened."""
        self.over = anyio.Event()
        """Set when the connection's task has ended."""
        self.failure: ServiceFailure | None = None
        """Why the connection cannot be used; None as long as it can."""
        self.in_doubt = False
        """A call was cancelled, perhaps because the connection is dead."""

    async def run(self) -> None:
        """Open the connection, and hold it until `end` is called or it ends by itself."""
        try:
            with anyio.CancelScope(deadline=anyio.current_time() + _LONGEST_START) as scope:
                async with self._place.open(self._stderr) as client:
                    self._asking = asking(self._call, await _tools(client))
                    self._client = client
                    scope.deadline = math.inf
                    self.settled.set()
                    await self._ending.wait()
            if scope.cancelled_caught:
                self.failure = ServiceSilent(
                    f"{self._place.name}: no answer of an MCP server within {_LONGEST_START:g} s"
                )
        except Exception as problem:  # noqa: BLE001 - any exception ends the connection
            self.failure = self.failure or _failure(self._place, problem, self._stderr.last)
        finally:
            self.end(_silence(self._place))
            self.settled.set()
            self.over.set()

    def end(self, why: ServiceFailure) -> None:
        """Make the connection end, and end the calls that are running on it."""
        self.failure = self.failure or why
        self._ending.set()
        for running in self._running:
            running.scope.cancel()
            running.done.set()

    async def ask(self, query: str, limit: int) -> Any:
        """Call the tool, and return its answer. Raises ServiceFailure; _Gone if the connection ends first."""
        assert self._asking is not None, "called only while the connection is open"
        arguments = self._asking.arguments(query, limit)
        mcp = library("mcp", "mcp")
        try:
            return await self._until_the_end(lambda: self._client.call_tool(self._call.tool, arguments))
        except anyio.get_cancelled_exc_class():
            self.in_doubt = True
            raise
        except _Gone:
            raise
        except mcp.MCPError as problem:
            if problem.code in self._codes_of_an_end():
                raise _Gone(await self._why(problem)) from None
            raise ServiceFailure(str(_failure(self._place, problem))) from None
        except (RuntimeError, ValueError) as problem:  # the answer violates the protocol or the tool's own schema
            reason = f"the answer of the tool {self._call.tool!r} cannot be used: {_message(problem)}"
            raise ServiceFailure(f"{self._place.name}: {reason}") from None
        except Exception as problem:  # noqa: BLE001 - any other exception comes from the transport
            raise _Gone(await self._why(problem)) from None

    async def _why(self, problem: Exception) -> ServiceFailure:
        """Return why the connection ended. First wait a moment for the last lines of a command's stderr."""
        if self._place.is_command:
            with anyio.move_on_after(LAST_WORDS):
                await self._stderr.ended.wait()
        return _failure(self._place, problem, self._stderr.last)

    def _codes_of_an_end(self) -> Sequence[int]:
        """Return the codes of errors that a new connection can solve: it is closed, or the session is not known."""
        types = library("mcp_types", "mcp")
        closed, invalid = types.CONNECTION_CLOSED, types.INVALID_REQUEST
        return (closed,) if self._place.is_command else (closed, invalid)

    async def answers(self, seconds: float) -> bool:
        """Return whether the server answers a request within so many seconds."""
        with anyio.move_on_after(seconds):
            try:
                await self._until_the_end(self._client.list_tools)
            except Exception:  # noqa: BLE001 - any failure means that the connection cannot be trusted
                return False
            self.in_doubt = False
            return True
        return False

    async def _until_the_end(self, function: Callable[[], Awaitable[Any]]) -> Any:
        """Run a request, and return its answer. Raises _Gone if the connection ends first.

        The request runs in a separate task: the SDK may take seconds to cancel one, longer than a client waits.
        """
        if self.failure is not None:
            raise _Gone(self.failure)
        running = _RunningCall(function)
        self._running.add(running)
        try:
            self._tasks.start_soon(running.run)
            await running.done.wait()
        finally:
            self._running.discard(running)
            running.scope.cancel()
        if running.failure is not None:
            raise running.failure
        if running.is_answered:
            return running.answer
        raise _Gone(self.failure or _silence(self._place))


class _RunningCall:
    """A request that is running. Mutable state: its outcome."""

    def __init__(self, function: Callable[[], Awaitable[Any]]) -> None:
        self._function = function
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        """Set when there is an answer or a failure, or when the connection ends."""
        self.answer: Any = None
        self.is_answered = False
        self.failure: Exception | None = None

    async def run(self) -> None:
        try:
            with self.scope:
                self.answer = await self._function()
                self.is_answered = True
        except Exception as problem:  # noqa: BLE001 - raised again in the task that waits
            self.failure = problem
        finally:
            self.done.set()


class McpService(ByWords):
    """The `Service` of a tool. Mutable state: the current connection, and all connections that have not ended."""

    def __init__(
        self,
        tasks: anyio.abc.TaskGroup,
        place: _Place,
        call: Call,
        secrets: Sequence[str],
        timeout: float,
    ) -> None:
        self._tasks = tasks
        self._place = place
        self._call = call
        self._secrets = secrets
        self._patience = timeout * _TEST_SHARE
        self._connection: _Connection | None = None
        self._all: set[_Connection] = set()

    async def start(self) -> None:
        """Open the first connection. Raises CannotStart."""
        try:
            await self._open()
        except ServiceFailure as failure:
            raise CannotStart(str(failure)) from None

    async def end(self) -> None:
        """End all connections."""
        for connection in list(self._all):
            connection.end(_silence(self._place, "the connection is closed"))
        for connection in list(self._all):
            await connection.over.wait()

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        try:
            query.encode()
        except UnicodeError as problem:  # in the SDK this error would end the connection
            raise ServiceFailure(f"the query cannot be sent: {problem}") from None
        answer = await self._answer(query, limit)
        texts = list(_texts(answer.content))
        if answer.is_error:
            error = on_one_line(self._without_secrets("\n".join(text for text in texts if isinstance(text, str))))
            raise ServiceFailure(f"{self._place.name}: the tool {self._call.tool!r} returned an error: {error}")
        try:
            found = results_in(answer.structured_content, texts, self._call)
        except ServiceFailure as failure:
            raise ServiceFailure(f"{self._place.name}: the tool {self._call.tool!r}: {failure}") from None
        return [Result(each) for each in found]

    async def _answer(self, query: str, limit: int) -> Any:
        """Call the tool, and return its answer. If the connection ends meanwhile, call once more on a new one.

        Raises ServiceFailure; ServiceSilent if no connection can be opened, or two have ended.
        """
        for once_more in (True, False):
            connection = await self._open()
            try:
                return await connection.ask(query, limit)
            except _Gone as gone:
                connection.end(gone.failure)
                if not once_more:
                    raise self._redacted(gone.failure) from None
            except ServiceFailure as failure:
                raise self._redacted(failure) from None
        raise AssertionError

    async def _open(self) -> _Connection:
        """Return the current connection; open a new one if there is none.

        Raises ServiceSilent; or ServiceFailure, if the server rejects the authentication or no longer has the tool.
        """
        connection = self._connection
        if connection is not None and connection.in_doubt and not await connection.answers(self._patience):
            connection.end(_silence(self._place, "the MCP server does not answer any more"))
        if connection is None or connection.failure is not None:
            # another search may have started a connection while this one tested the old one
            if self._connection is connection:
                self._connection = self._start_connection()
            connection = self._connection
        assert connection is not None, "it was started"
        await connection.settled.wait()
        if connection.failure is not None:
            raise self._redacted(connection.failure)
        return connection

    def _start_connection(self) -> _Connection:
        connection = _Connection(self._tasks, self._place, self._call)
        self._all.add(connection)

        async def held() -> None:
            try:
                await connection.run()
            finally:
                self._all.discard(connection)

        self._tasks.start_soon(held)
        return connection

    def _redacted(self, failure: ServiceFailure) -> ServiceFailure:
        """Return a copy of a failure without the secrets of headers, for one caller."""
        return type(failure)(self._without_secrets(str(failure)))

    def _without_secrets(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return text


async def _tools(client: Any) -> dict[str, Mapping[str, Any]]:
    """Return the input schemas of all tools, by the tools' names."""
    found: dict[str, Mapping[str, Any]] = {}
    cursor: str | None = None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        found.update((tool.name, tool.input_schema) for tool in page.tools)
        cursor = page.next_cursor
        if cursor is None:
            break
    return found


def _texts(content: Sequence[Any]) -> Any:
    """Yield the texts of an answer, and objects for its embedded text resources."""
    for block in content:
        if block.type == "text":
            yield block.text
        elif block.type == "resource" and hasattr(block.resource, "text"):
            yield {"content": block.resource.text, "uri": str(block.resource.uri)}


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def _silence(place: _Place, why: str = "the connection has ended") -> ServiceSilent:
    return ServiceSilent(f"{place.name}: {why}")


def _failure(place: _Place, problem: BaseException, last_line: str = "") -> ServiceFailure:
    """Return the failure for an exception of a connection: a ServiceSilent, unless the connection was rejected.

    Args:
        last_line: the last line of a command's stderr.
    """
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    message, kind = _message(problem), type(problem).__name__
    match problem:
        case ServiceFailure():
            return type(problem)(f"{place.name} {message}")
        case CannotStart():
            return ServiceFailure(f"{place.name}: {message}")
        case OSError(strerror=str(why)):
            return ServiceSilent(f"{place.name} cannot be started: {why}")
        case _ if kind == "MCPError" and place.is_command and "Connection closed" in message:
            last = on_one_line(last_line)
            return _silence(place, f"the MCP server has ended{f': {last}' if last else ', and its stderr is empty'}")
        case _ if kind == "MCPError":
            return _silence(place, f"the MCP server returned an error: {message}")
        case _ if kind.startswith("Connect"):
            return ServiceSilent(f"{place.name} cannot be reached: {message}; check that the server runs")
        case _:
            return _silence(place, message)


def _message(problem: BaseException) -> str:
    return on_one_line(str(problem)) or type(problem).__name__
