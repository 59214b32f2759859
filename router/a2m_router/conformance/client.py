"""Two tiny A2M clients: a child process on its pipes, and HTTP. Every wait has a deadline.

They hide nothing: what a server sent can be looked at as it came (`Stdio.arrived`, `Http.post`).
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

# so often a server that dies before it answers is started anew, until it is given up
_STARTS: Final = 3
_START_SECONDS: Final = 20.0

# between two looks whether a server over HTTP has come back
_LOOK_SECONDS: Final = 0.1

Message = dict[str, Any]


class NoAnswer(Exception):
    """The server did not answer, or not as its binding demands; one sentence."""


class Client(Protocol):
    """What all checks use; those of one binding use more.

    `binding` is "stdio", "http", or "process" for a server in this process.
    """

    binding: str

    def request(self, method: str, params: Any = None, id: Any = None) -> Message:
        """The whole response to one call; without `params` none are sent. Raises NoAnswer."""
        ...

    def raw(self, body: bytes) -> Message:
        """The response to something that need not be a message. Raises NoAnswer."""
        ...

    def notify(self, method: str, params: Any) -> None:
        """Sends a call without an id."""
        ...

    def lost(self, *, doubtful: bool) -> str | None:
        """How the server was lost, so that nothing more can be asked of it, in a sentence; None if it goes on.

        Where it is `doubtful`, since something was not answered, it is asked."""
        ...

    def restart(self) -> str | None:
        """Makes a server that was lost answer again; returns None, or why that cannot be, in a sentence."""
        ...

    def close(self) -> None:
        """Ends the connection."""
        ...


def rendered(method: str, params: Any, id: Any) -> bytes:
    """One request on one line."""
    message: Message = {"jsonrpc": "2.0", "id": id, "method": method}
    if params is not None:
        message["params"] = params
    return json.dumps(message).encode()


def notification(method: str, params: Any) -> bytes:
    """One notification on one line."""
    return json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode()


class Arrived(NamedTuple):
    """One line that came, or was sent: its bytes, and the message in it, or None if it holds none."""

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
    """A server as a child process. `arrived` is all that was read from its stdout, in order.

    A server that dies can be started anew; `arrived` goes on then, as do the ids.

    `may_be_answered` counts what was sent, by the ids with which it may be answered, as JSON.
    """

    binding = "stdio"

    def __init__(self, command: Sequence[str], timeout: float = 20) -> None:
        """Starts the server. Raises CannotStart."""
        self.timeout = timeout
        self.arrived: list[Arrived] = []
        self._command = command
        self._changed = threading.Condition()
        self._ids = itertools.count(1)
        self.may_be_answered: Counter[str] = Counter()
        self._done: set[str] = set()  # of these nobody expects an answer: they have one, or have been given up
        self._notified_at: int | None = None  # how many lines had arrived before what was sent without a call after it
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
        """Sends a call without an id. Were it answered, the next call would find that answer before its own."""
        if self._notified_at is None:
            self._notified_at = len(self.arrived)
        self.send(notification(method, params))

    def send(self, line: bytes) -> None:
        """Writes one line, without waiting for anything."""
        self.may_be_answered.update(ids_for(line))
        if not self._process.write(line):
            raise NoAnswer(f"the server no longer reads its stdin{self._last_line()}")

    def response(self, id: Any, since: int, asked: str) -> Message:
        """The response to `id`, which is the next to arrive after the first `since` lines. Raises NoAnswer."""
        done = self._done - {json.dumps(id)}
        self._done.add(json.dumps(id))
        try:
            came = self._first(lambda came: came.is_response and came.id not in done, since, asked)
        except NoAnswer as none:
            passed = [each.id for each in self.arrived[since:] if each.is_response]
            raise NoAnswer(f"{none}; what came had the ids {', '.join(passed)}" if passed else str(none)) from None
        if came.get("id") != id or type(came.get("id")) is not type(id):
            raise NoAnswer(f"{asked} was sent with id {id!r} and answered with id {came.get('id')!r}: {came}")
        return came

    def responses(self, count: int, since: int) -> list[Message]:
        """The first `count` responses after the first `since` lines, in their order."""
        self._until(lambda: sum(came.is_response for came in self.arrived[since:]) >= count, f"{count} requests")
        return [came.message for came in self.arrived[since:] if came.is_response and came.message is not None]

    def wait_for(self, wanted: Callable[[Arrived], bool], since: int, seconds: float) -> bool:
        """Whether what is wanted is among what arrived after the first `since` lines, or comes within `seconds`."""
        try:
            self._until(lambda: any(map(wanted, self.arrived[since:])), "", seconds)
        except NoAnswer:
            return False
        return True

    def end_input(self) -> int | None:
        """Closes stdin; returns the exit code once stdout has ended too, or None if that takes too long."""
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
            return f"The server answered nothing any more, not within {self.timeout:g} s; it was killed."
        how = self._process.how_it_ended()
        if self.arrived and not self.arrived[-1].line.endswith(b"\n"):
            self.arrived.pop()  # that it was cut off is no fault of its own
        return how

    def restart(self) -> str | None:
        how = ""
        for _ in range(_STARTS):
            self._notified_at = None
            try:
                self._process = self._started()
            except CannotStart as problem:
                return str(problem)
            # to start may take longer than to answer
            if self._is_answered(max(self.timeout, _START_SECONDS)):
                return None
            how = self.lost(doubtful=True) or how
        return f"It was started anew {_STARTS} times, and answered nothing. {how}"

    def close(self) -> None:
        if not self._over:
            self.end_input()
        self._process.end()

    def _started(self) -> Process:
        return Process(self._command, self._take, self._wake)

    def _is_answered(self, seconds: float) -> bool:
        """Whether anything is answered within these seconds, be it right or late."""
        id = next(self._ids)
        self._done.add(json.dumps(id))
        since = len(self.arrived)
        try:
            self.send(rendered("memory/describe", {"protocol": PROTOCOL}, id))
        except NoAnswer:
            return False
        return self.wait_for(lambda came: came.is_response, since, seconds)

    def _before_a_call(self) -> int:
        """How many lines arrived before the next call, and before the notifications that it is the first call after."""
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
        """What to say of the last line that came, where that is no message."""
        if not self.arrived or self.arrived[-1].message is not None:
            return ""
        return f"; the last line of its stdout is no message: {self.arrived[-1].line[:80]!r}"

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
    """The ids with which a line may be answered, as JSON: none for a notification, two where it is no request."""
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
    """The JSON-RPC message that a line is, or None."""
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
        """The JSON object in the body. Raises NoAnswer."""
        try:
            message = json.loads(self.body)
        except ValueError:
            message = None
        if not isinstance(message, dict):
            raise NoAnswer(f"expected a JSON object as the body, got {self.status} with {self.body[:200]!r}")
        return message


class Http:
    """A server behind an address; one connection for each request."""

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
            raise NoAnswer(f"{method} was answered {reply.status} and not 200: {reply.body[:200]!r}")
        message = reply.message()
        if message.get("id") != id or type(message.get("id")) is not type(id):
            raise NoAnswer(f"{method} was sent with id {id!r} and answered with id {message.get('id')!r}: {message}")
        return message

    def raw(self, body: bytes) -> Message:
        return self.post(body).message()

    def notify(self, method: str, params: Any) -> None:
        self.post(notification(method, params))

    def post(self, body: bytes, headers: Mapping[str, str] | None = None, *, authorized: bool = True) -> Reply:
        """The answer to a POST on the endpoint. Raises NoAnswer."""
        return self.send("POST", self._url.path or "/", body, headers, authorized=authorized)

    def get(self, path: str | None = None, headers: Mapping[str, str] | None = None) -> Reply:
        """The answer to a GET, on the endpoint if no path is given. Raises NoAnswer."""
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
        return f"The server at {self._url.geturl()} answered no more."

    def restart(self) -> str | None:
        """It is somebody else's to start: it is given some time to come back."""
        deadline = time.monotonic() + self.timeout
        while not self._is_answered():
            if time.monotonic() >= deadline:
                return f"It cannot be started from here, and did not come back within {self.timeout:g} s."
            time.sleep(_LOOK_SECONDS)
        return None

    def _is_answered(self) -> bool:
        """Whether anything is answered, be it an error."""
        try:
            self.post(rendered("memory/describe", {"protocol": PROTOCOL}, next(self._ids)))
        except NoAnswer:
            return False
        return True

    def close(self) -> None:
        """Nothing is held open."""


class InProcess:
    """A server that is a function of this process: a message in, its answer or None out."""

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
        """Nothing is held open."""
