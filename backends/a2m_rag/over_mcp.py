"""A service that is a search tool of an MCP server: a command that is started, or an address (streamable HTTP).

The protocol is the official SDK's. What is here is how a connection comes and goes:
- A connection is opened, held and closed by one task of its own; it is opened by the first question that finds none.
  Whoever waits for it may give up, and it is opened all the same: a server that starts slowly starts once.
- A connection that has ended, or whose session the server knows no more, is replaced, and the question is put again.
- After a question that nobody waited for to the end, the server is asked for its tools first: one that does not answer
  that in time is left, and a command is ended and started anew.
- What a command writes to its stderr goes on to this process's stderr, line by line, whether anybody reads that or not;
  the last line is told where the command has ended. What its stdout holds besides messages is dropped.
- A connection that cannot be had, or that has ended twice, is the service's silence; a refusal to let us in is not.
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

# for a command that is fetched before it runs, as npx and uvx do
_LONGEST_START: Final = 60.0
# of the time for one call, for a server to show that it still answers; the rest is for another one to be started
_SHARE_FOR_A_SIGN: Final = 0.25
# for a server that was told to end; what is left then is cancelled, and a command killed
_LONGEST_END: Final = 5.0
# pages of a listing of tools; one that never ends must not hang a start
_MOST_PAGES: Final = 100


class _Gone(Exception):
    """The connection has ended before the answer was there."""

    def __init__(self, failure: ServiceFailure) -> None:
        super().__init__(str(failure))
        self.failure = failure
        """Why it has ended."""


class _Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the server is: its program, or its address without the query."""

    name: str
    is_command: bool
    open: Callable[[StderrLines], AbstractAsyncContextManager[Any]]
    """Makes the SDK's client anew, each time; what a command says on its stderr goes into what it is given."""


@asynccontextmanager
async def connect_mcp(
    command: Sequence[str], url: str | None, call: Call, *, headers: Mapping[str, str], timeout: float
) -> AsyncIterator["McpService"]:
    """The service that a tool of an MCP server is.

    Args:
        command: what starts the server; empty where there is a `url`.
        headers: sent with every request to `url`.
        timeout: seconds that a caller waits for an answer.

    Raises CannotStart: the server cannot be reached, or has no such tool, or one with other arguments.
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
                cannot_start = problem  # out of the group it would be one among several
            else:
                yield service
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(_LONGEST_END):
                await service.end()
            tasks.cancel_scope.cancel()
    if cannot_start is not None:
        raise cannot_start


def _started(command: Sequence[str]) -> Callable[[StderrLines], AbstractAsyncContextManager[Any]]:
    """Starts the command anew, each time."""
    mcp = library("mcp", "mcp")
    program = shutil.which(command[0]) or executable(command[0], FilePath.cwd())
    # all of the environment: the command is the user's own, and its tokens are there
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
                        theirs.close()  # from here on it ends when the command does
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
    """Connects to the address anew, each time. The environment's proxies are not used."""
    mcp = library("mcp", "mcp")
    streamable = library("mcp.client.streamable_http", "mcp")
    httpx = library("httpx2", "mcp")

    async def refuse(response: Any) -> None:
        # the SDK does not say which error it was; others are part of how two versions of the protocol find each other
        status = response.status_code
        if status in (401, 403) or status >= 500:
            failure = ServiceSilent if status >= 500 else ServiceFailure
            raise failure(answered(status, media_type_of(response), await beginning(response), secrets))

    @asynccontextmanager
    async def client(_stderr: StderrLines) -> AsyncIterator[Any]:
        hooks = {"response": [refuse]}
        async with httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, event_hooks=hooks) as http:
            transport = streamable.streamable_http_client(url, http_client=http)
            async with mcp.Client(transport, message_handler=_Strays(), cache=None) as opened:
                yield opened

    return client


class _Strays:
    """Hears of what comes and is no message; the log says it once for each connection."""

    def __init__(self) -> None:
        self._has_said = False

    async def __call__(self, message: Any) -> None:
        if isinstance(message, Exception) and not self._has_said:
            self._has_said = True
            errors = getattr(message, "errors", None)  # of pydantic, which says much, and where to read more
            what = shown(errors()[0].get("input")) if errors is not None else _told(message)
            log.warning("the MCP server has sent what is no message; that is dropped: %s", what)


class _Connection:
    """A connection, from when it is begun. Mutable state: how far it is, and the questions under way on it."""

    def __init__(self, tasks: anyio.abc.TaskGroup, place: _Place, call: Call) -> None:
        self._tasks = tasks
        self._place = place
        self._call = call
        self._client: Any = None
        self._asking: ToolCall | None = None
        self._under_way: set[_Question] = set()
        self._stderr = StderrLines(_to_stderr)
        self._ending = anyio.Event()
        self.settled = anyio.Event()
        """It is open, or never will be."""
        self.over = anyio.Event()
        """Its task is at its end."""
        self.failure: ServiceFailure | None = None
        """Why it cannot be used; None as long as it can."""
        self.in_doubt = False
        """A question was given up on, so that it may be dead."""

    async def run(self) -> None:
        """Opens it, and holds it until it is to end or ends by itself."""
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
                    f"{self._place.name}: no MCP server has answered within {_LONGEST_START:g} s"
                )
        except Exception as problem:  # noqa: BLE001 - whatever has gone wrong, it is gone
            self.failure = self.failure or _failure(self._place, problem, self._stderr.last)
        finally:
            self.end(_silence(self._place))
            self.settled.set()
            self.over.set()

    def end(self, why: ServiceFailure) -> None:
        """It is not used any more; what is under way on it ends."""
        self.failure = self.failure or why
        self._ending.set()
        for question in self._under_way:
            question.scope.cancel()
            question.done.set()

    async def ask(self, query: str, limit: int) -> Any:
        """The tool's answer. Raises _Gone where the connection ends first, and ServiceFailure for an error."""
        assert self._asking is not None, "asked only when it is open"
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
        except (RuntimeError, ValueError) as problem:  # none that the protocol or the tool's own schema allows
            said = f"the answer of the tool {self._call.tool!r} cannot be used: {_told(problem)}"
            raise ServiceFailure(f"{self._place.name}: {said}") from None
        except Exception as problem:  # noqa: BLE001 - of the transport, of whatever kind
            raise _Gone(await self._why(problem)) from None

    async def _why(self, problem: Exception) -> ServiceFailure:
        """Why the connection has ended; a command's last words may still be on their way."""
        if self._place.is_command:
            with anyio.move_on_after(LAST_WORDS):
                await self._stderr.ended.wait()
        return _failure(self._place, problem, self._stderr.last)

    def _codes_of_an_end(self) -> Sequence[int]:
        """The codes of errors that another connection need not have: it is closed, or the address does not know the
        session."""
        types = library("mcp_types", "mcp")
        closed, invalid = types.CONNECTION_CLOSED, types.INVALID_REQUEST
        return (closed,) if self._place.is_command else (closed, invalid)

    async def answers(self, seconds: float) -> bool:
        """Whether the server still answers anything, within so many seconds."""
        with anyio.move_on_after(seconds):
            try:
                await self._until_the_end(self._client.list_tools)
            except Exception:  # noqa: BLE001 - this is about whether it answers
                return False
            self.in_doubt = False
            return True
        return False

    async def _until_the_end(self, asked: Callable[[], Awaitable[Any]]) -> Any:
        """What comes of a question. Raises _Gone when the connection ends before.

        The question is a task of its own: the SDK may take seconds to give one up, longer than a caller waits.
        """
        if self.failure is not None:
            raise _Gone(self.failure)
        question = _Question(asked)
        self._under_way.add(question)
        try:
            self._tasks.start_soon(question.run)
            await question.done.wait()
        finally:
            self._under_way.discard(question)
            question.scope.cancel()
        if question.failure is not None:
            raise question.failure
        if question.is_answered:
            return question.answer
        raise _Gone(self.failure or _silence(self._place))


class _Question:
    """A question under way. Mutable state: what has come of it."""

    def __init__(self, asked: Callable[[], Awaitable[Any]]) -> None:
        self._asked = asked
        self.scope = anyio.CancelScope()
        self.done = anyio.Event()
        """There is an answer, or a failure; or nobody waits for them any more."""
        self.answer: Any = None
        self.is_answered = False
        self.failure: Exception | None = None

    async def run(self) -> None:
        try:
            with self.scope:
                self.answer = await self._asked()
                self.is_answered = True
        except Exception as problem:  # noqa: BLE001 - for whoever asked
            self.failure = problem
        finally:
            self.done.set()


class McpService(ByWords):
    """A `Service`. Mutable state: the connection in use, and all that have not ended."""

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
        self._patience = timeout * _SHARE_FOR_A_SIGN
        self._connection: _Connection | None = None
        self._all: set[_Connection] = set()

    async def start(self) -> None:
        """Opens the first connection. Raises CannotStart."""
        try:
            await self._open()
        except ServiceFailure as failure:
            raise CannotStart(str(failure)) from None

    async def end(self) -> None:
        """Ends all connections."""
        for connection in list(self._all):
            connection.end(_silence(self._place, "the connection is closed"))
        for connection in list(self._all):
            await connection.over.wait()

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        try:
            query.encode()
        except UnicodeError as problem:  # the SDK would lose its connection by it
            raise ServiceFailure(f"the query cannot be sent: {problem}") from None
        answer = await self._answer(query, limit)
        texts = list(_texts(answer.content))
        if answer.is_error:
            said = on_one_line(self._without_secrets("\n".join(text for text in texts if isinstance(text, str))))
            raise ServiceFailure(f"{self._place.name}: the tool {self._call.tool!r} answered with an error: {said}")
        try:
            found = results_in(answer.structured_content, texts, self._call)
        except ServiceFailure as failure:
            raise ServiceFailure(f"{self._place.name}: the tool {self._call.tool!r}: {failure}") from None
        return [Result(each) for each in found]

    async def _answer(self, query: str, limit: int) -> Any:
        """The tool's answer. A question that a connection has ended on is put once more. Raises ServiceFailure, and
        ServiceSilent where no connection is to be had, or two have ended."""
        for once_more in (True, False):
            connection = await self._open()
            try:
                return await connection.ask(query, limit)
            except _Gone as gone:
                connection.end(gone.failure)
                if not once_more:
                    raise self._told(gone.failure) from None
            except ServiceFailure as failure:
                raise self._told(failure) from None
        raise AssertionError

    async def _open(self) -> _Connection:
        """The connection in use, opened anew if there is none. Raises ServiceFailure; ServiceSilent but for a server
        that refuses whoever asks, or has no such tool any more."""
        connection = self._connection
        if connection is not None and connection.in_doubt and not await connection.answers(self._patience):
            connection.end(_silence(self._place, "the MCP server answers no more"))
        if connection is None or connection.failure is not None:
            # another caller may have begun one while this one asked for a sign
            if self._connection is connection:
                self._connection = self._begun()
            connection = self._connection
        assert connection is not None, "it was begun"
        await connection.settled.wait()
        if connection.failure is not None:
            raise self._told(connection.failure)
        return connection

    def _begun(self) -> _Connection:
        connection = _Connection(self._tasks, self._place, self._call)
        self._all.add(connection)

        async def held() -> None:
            try:
                await connection.run()
            finally:
                self._all.discard(connection)

        self._tasks.start_soon(held)
        return connection

    def _told(self, failure: ServiceFailure) -> ServiceFailure:
        """The failure for one of those who asked, without what was sent in headers."""
        return type(failure)(self._without_secrets(str(failure)))

    def _without_secrets(self, said: str) -> str:
        for secret in self._secrets:
            said = said.replace(secret, "…")
        return said


async def _tools(client: Any) -> dict[str, Mapping[str, Any]]:
    """The input schemas of all tools, by the tools' names."""
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
    """The texts among an answer's blocks, and those of the resources that are in it."""
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
    """What has gone wrong with a connection: the service's silence, unless it was refused to us.

    Args:
        last_line: of what a command has said on its stderr.
    """
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    said, kind = _told(problem), type(problem).__name__
    match problem:
        case ServiceFailure():
            return type(problem)(f"{place.name} {said}")
        case CannotStart():
            return ServiceFailure(f"{place.name}: {said}")
        case OSError(strerror=str(why)):
            return ServiceSilent(f"{place.name} cannot be started: {why}")
        case _ if kind == "MCPError" and place.is_command and "Connection closed" in said:
            last = on_one_line(last_line)
            return _silence(place, f"the MCP server has ended{f': {last}' if last else ', and its stderr is empty'}")
        case _ if kind == "MCPError":
            return _silence(place, f"the MCP server answered with an error: {said}")
        case _ if kind.startswith("Connect"):
            return ServiceSilent(f"{place.name} cannot be reached: {said}; see that it runs")
        case _:
            return _silence(place, said)


def _told(problem: BaseException) -> str:
    return on_one_line(str(problem)) or type(problem).__name__
