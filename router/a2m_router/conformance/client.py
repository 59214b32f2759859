"""Two small A2M clients, for a child process on pipes and for HTTP. Every wait has a deadline.

They give access to a server's raw output (`Stdio.arrived`, `Http.post`).
"""

import http.client
import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol
from urllib.parse import urlsplit

from a2m_router.conformance.process import CannotStart, Process

PROTOCOL: Final = "a2m/0.1"
WELL_KNOWN: Final = "/.well-known/a2m-server.json"

# how often a server that dies before it answers is restarted
_STARTS: Final = 3
_START_SECONDS: Final = 20.0

# seconds between two tests whether a server over HTTP answers again
_LOOK_SECONDS: Final = 0.1

Message = dict[str, Any]


class NoAnswer(Exception):
    """The server did not answer, or broke a rule of its binding; the message is one sentence."""


class Client(Protocol):
    """The interface that all checks use; checks of one binding use more of its client.

    `binding` is "stdio", "http", or "process" for a server in this process.
    """

    binding: str

    def request(self, method: str, params: Any = None, id: Any = None) -> Message:
        """Return the whole response to one call; `params` of None are left out. Raises NoAnswer."""
        ...

    def raw(self, body: bytes) -> Message:
        """Return the response to any bytes, valid message or not. Raises NoAnswer."""
        ...

    def notify(self, method: str, params: Any) -> None:
        """Send a call without an id."""
        ...

    def lost(self, *, doubtful: bool) -> str | None:
        """Return a sentence on how the server was lost; None if it still works.

        With `doubtful`, after an unanswered call, this calls the server to find out."""
        ...

    def restart(self) -> str | None:
        """Make a lost server answer again; return None, or a sentence on why that failed."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


def rendered(method: str, params: Any, id: Any) -> bytes:
    """Return one request on one line."""
    message: Message = {"jsonrpc": "2.0", "id": id, "method": method}
    if params is not None:
        message["params"] = params
    return json.dumps(message).encode()


def notification(method: str, params: Any) -> bytes:
    """Return one notification on one line."""
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode()


class Arrived(NamedTuple):
    """One received or sent line: its bytes, and its message, or None if it is not a message."""

    line: bytes
    message: Message | None

    @property
    def is_notification(self) -> bool:
        return self.message is not None and "method" in self.message and "id" not in self.message

    @property
    def is_request(self) -> bool:
        return self.message is not None and "method" in self.message and "id" in self.message

    @property
    def is_response(self) -> bool:
        return self.message is not None and "method" not in self.message

    @property
    def id(self) -> str:
        """The message's id, as JSON: 1 is not "1", nor true."""
        return json.dumps(self.message.get("id") if self.message is not None else None)


class Stdio:
    """A server as a child process. `arrived` has all lines of its stdout, in order.

    A server that dies can be restarted; `arrived` and the ids then continue.

    `may_be_answered` counts the sent lines by the ids that their answers may have, as JSON.
    """

    binding = "stdio"

    def __init__(self, command: Sequence[str], timeout: float = 20) -> None:
        """Start the server. Raises CannotStart."""
        self.timeout = timeout
        self.arrived: list[Arrived] = []
        self._command = command
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self.may_be_answered: Counter[str] = Counter()
        self._done: set[str] = set()  # ids without an expected answer: answered, or given up
        self._notified_at: int | None = None  # lines that had arrived before the notifications since the last call
        self._over = False  # its stdin was closed, so that it may end
        self._process = self._started()

    def request(self, method: str, params: Any = None, id: Any = None) -> Message:
        id = next(self._ids) if id is None else id
        since = self._before_a_call()
        self.send(rendered(method, params, id))
        return self.response(id, since, method)

    def raw(self, body: bytes) -> Message:
        since = self._before_a_call()
        self.send(body)
        return self._first(lambda came: came.is_response, since, "what was sent")

    def notify(self, method: str, params: Any) -> None:
        """Send a call without an id. If the server answers it, the next call finds that answer before its own."""
        if self._notified_at is None:
            self._notified_at = len(self.arrived)
        self.send(notification(method, params))

    def send(self, line: bytes) -> None:
        """Write one line, without waiting for anything."""
        self.may_be_answered.update(ids_for(line))
        if not self._process.write(line):
            raise NoAnswer(f"the server no longer reads its stdin{self._last_line()}")

    def response(self, id: Any, since: int, asked: str) -> Message:
        """Return the response to `id`, which must be the next one after the first `since` lines. Raises NoAnswer."""
        done = self._done - {json.dumps(id)}
        self._done.add(json.dumps(id))
        try:
            came = self._first(lambda came: came.is_response and came.id not in done, since, asked)
        except NoAnswer as none:
            passed = [each.id for each in self.arrived[since:] if each.is_response]
            raise NoAnswer(f"{none}; responses had the ids {', '.join(passed)}" if passed else str(none)) from None
        if came.get("id") != id or type(came.get("id")) is not type(id):
            raise NoAnswer(f"{asked} was sent with id {id!r} and answered with id {came.get('id')!r}: {came}")
        return came

    def responses(self, count: int, since: int) -> list[Message]:
        """Return the first `count` responses after the first `since` lines, in their order."""
        self._until(lambda: sum(came.is_response for came in self.arrived[since:]) >= count, f"{count} requests")
        return [came.message for came in self.arrived[since:] if came.is_response and came.message is not None]

    def wait_for(self, wanted: Callable[[Arrived], bool], since: int, seconds: float) -> bool:
        """Return whether a wanted line is among those after the first `since` lines, or comes within `seconds`."""
        try:
            self._until(lambda: any(map(wanted, self.arrived[since:])), "", seconds)
        except NoAnswer:
            return False
        return True

    def end_input(self) -> int | None:
        """Close stdin; return the exit code once stdout has ended, too, or None if that takes too long."""
        self._over = True
        self._process.close_stdin()
        code = self._process.exit_code(self.timeout)
        try:
            self._until(lambda: self._process.ended, "the end of stdin")
        except NoAnswer:
            return None
        return code

    def lost(self, *, doubtful: bool) -> str | None:
        if self._over:
            return None
        if not self._process.is_lost:
            if not doubtful or self._is_answered(self.timeout):
                return None
            self._process.end()
            return f"The server stopped answering: no answer within {self.timeout:g} s; it was killed."
        how = self._process.how_it_ended()
        if self.arrived and not self.arrived[-1].line.endswith(b"\n"):
            self.arrived.pop()  # an incomplete last line is not a second fault
        return how

    def restart(self) -> str | None:
        how = ""
        for _ in range(_STARTS):
            self._notified_at = None
            try:
                self._process = self._started()
            except CannotStart as problem:
                return str(problem)
            # a start may take longer than an answer
            if self._is_answered(max(self.timeout, _START_SECONDS)):
                return None
            how = self.lost(doubtful=True) or how
        return f"It was restarted {_STARTS} times, and did not answer. {how}"

    def close(self) -> None:
        if not self._over:
            self.end_input()
        self._process.end()

    def _started(self) -> Process:
        return Process(self._command, self._take, self._wake)

    def _is_answered(self, seconds: float) -> bool:
        """Return whether any answer comes within these seconds, also a wrong or a late one."""
        id = next(self._ids)
        self._done.add(json.dumps(id))
        since = len(self.arrived)
        try:
            self.send(rendered("memory/describe", {"protocol": PROTOCOL}, id))
        except NoAnswer:
            return False
        return self.wait_for(lambda came: came.is_response, since, seconds)

    def _before_a_call(self) -> int:
        """Return how many lines arrived before the next call, and before the notifications right before it."""
        since, self._notified_at = self._notified_at, None
        return len(self.arrived) if since is None else since

    def _first(self, wanted: Callable[[Arrived], bool], since: int, asked: str) -> Message:
        self._until(lambda: any(map(wanted, self.arrived[since:])), asked)
        found = next(came.message for came in self.arrived[since:] if wanted(came))
        assert found is not None
        return found

    def _until(self, true: Callable[[], bool], asked: str, seconds: float | None = None) -> None:
        deadline = time.monotonic() + (self.timeout if seconds is None else seconds)
        with self._changed:
            while not true():
                left = deadline - time.monotonic()
                if self._process.ended:
                    raise NoAnswer(f"the server closed its stdout; {asked} was not answered{self._last_line()}")
                if left <= 0:
                    raise NoAnswer(f"{asked} was not answered within {self.timeout:g} s{self._last_line()}")
                self._changed.wait(left)

    def _last_line(self) -> str:
        """Return a clause about the last line, if it is not a message."""
        if not self.arrived or self.arrived[-1].message is not None:
            return ""
        return f"; the last line of its stdout is not a message: {self.arrived[-1].line[:80]!r}"

    def _take(self, line: bytes) -> bool:
        arrived = Arrived(line, message_in(line))
        with self._changed:
            self.arrived.append(arrived)
            self._changed.notify_all()
        return arrived.message is not None

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()


def ids_for(line: bytes) -> set[str]:
    """Return the ids that the answer to a line may have, as JSON: none for a notification, two for a faulty request."""
    sent = Arrived(line, message_in(line))
    if sent.is_notification or not line.strip():
        return set()
    if sent.is_request:
        return {sent.id}
    try:
        given = json.loads(line)
    except (ValueError, RecursionError):
        given = None
    return {"null", json.dumps(given.get("id"))} if isinstance(given, dict) else {"null"}


def message_in(line: bytes) -> Message | None:
    """Return the JSON-RPC message in a line, or None."""
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
        return None
    is_response = "id" in message and (("result" in message) != ("error" in message))
    return message if isinstance(message.get("method"), str) or is_response else None


class Reply(NamedTuple):
    """An HTTP response."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def media_type(self) -> str:
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def message(self) -> Message:
        """Return the JSON object in the body. Raises NoAnswer."""
        try:
            message = json.loads(self.body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NoAnswer(f"expected a JSON object as the body, got {self.status} with {self.body[:200]!r}")
        return message


class Http:
    """A server at an address; one connection for each request."""

    binding = "http"

    def __init__(self, url: str, token: str | None = None, timeout: float = 20) -> None:
        self.timeout = timeout
        self.token = token
        self._url = urlsplit(url)
        self._ids = itertools.count(1)

    def request(self, method: str, params: Any = None, id: Any = None) -> Message:
        id = next(self._ids) if id is None else id
        reply = self.post(rendered(method, params, id), {"A2M-Protocol-Version": PROTOCOL})
        if reply.status != 200:
            raise NoAnswer(f"{method}: expected status 200, got {reply.status}: {reply.body[:200]!r}")
        message = reply.message()
        if message.get("id") != id or type(message.get("id")) is not type(id):
            raise NoAnswer(f"{method} was sent with id {id!r} and answered with id {message.get('id')!r}: {message}")
        return message

    def raw(self, body: bytes) -> Message:
        return self.post(body).message()

    def notify(self, method: str, params: Any) -> None:
        self.post(notification(method, params))

    def post(self, body: bytes, headers: Mapping[str, str] | None = None, *, authorized: bool = True) -> Reply:
        """Return the answer to a POST to the endpoint. Raises NoAnswer."""
        return self.send("POST", self._url.path or "/", body, headers, authorized=authorized)

    def get(self, path: str | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        """Return the answer to a GET, of the endpoint if no path is given. Raises NoAnswer."""
        return self.send("GET", path or self._url.path or "/", None, headers)

    def send(
        self,
        verb: str,
        path: str,
        body: bytes | None,
        headers: Mapping[str, str] | None = None,
        *,
        authorized: bool = True,
    ) -> Reply:
        sent = {} if body is None else {"Content-Type": "application/json"}
        if self.token is not None and authorized:
            sent["Authorization"] = f"Bearer {self.token}"
        kind = http.client.HTTPSConnection if self._url.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self.timeout)
        try:
            connection.request(verb, path, body, {**sent, **(headers or {})})
            response = connection.getresponse()
            named = {name.lower(): value for name, value in response.getheaders()}
            return Reply(response.status, named, response.read())
        except (OSError, http.client.HTTPException) as problem:
            raise NoAnswer(f"{verb} {path} was not answered: {problem or type(problem).__name__}") from problem
        finally:
            connection.close()

    def lost(self, *, doubtful: bool) -> str | None:
        if not doubtful or self._is_answered():
            return None
        return f"The server at {self._url.geturl()} stopped answering."

    def restart(self) -> str | None:
        """Wait for the server to answer again: this client cannot start it."""
        deadline = time.monotonic() + self.timeout
        while not self._is_answered():
            if time.monotonic() >= deadline:
                return f"It cannot be started from here, and did not come back within {self.timeout:g} s."
            time.sleep(_LOOK_SECONDS)
        return None

    def _is_answered(self) -> bool:
        """Return whether any answer comes, also an error."""
        try:
            self.post(rendered("memory/describe", {"protocol": PROTOCOL}, next(self._ids)))
        except NoAnswer:
            return False
        return True

    def close(self) -> None:
        """Do nothing: no connection stays open."""


class InProcess:
    """A server as a function in this process, from a message to its answer or None."""

    binding = "process"

    def __init__(self, answer: Callable[[bytes], bytes | None]) -> None:
        self._answer = answer
        self._ids = itertools.count(1)

    def request(self, method: str, params: Any = None, id: Any = None) -> Message:
        id = next(self._ids) if id is None else id
        message = self.raw(rendered(method, params, id))
        if message.get("id") != id or type(message.get("id")) is not type(id):
            raise NoAnswer(f"{method} was sent with id {id!r} and answered with id {message.get('id')!r}: {message}")
        return message

    def raw(self, body: bytes) -> Message:
        answer = self._answer(body)
        message = None if answer is None else message_in(answer)
        if message is None:
            raise NoAnswer(f"expected a response, got {answer!r}")
        return message

    def notify(self, method: str, params: Any) -> None:
        answer = self._answer(notification(method, params))
        if answer is not None:
            raise NoAnswer(f"{method} was sent as a notification, and answered with {answer!r}")

    def lost(self, *, doubtful: bool) -> str | None:
        return None

    def restart(self) -> str | None:
        raise AssertionError("a server in this process is never lost")

    def close(self) -> None:
        """Do nothing: no connection stays open."""
