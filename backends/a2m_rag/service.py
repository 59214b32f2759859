"""The interface of a retrieval service, and the error messages about one."""

import errno
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, Literal, Protocol

import httpx
import msgspec

from a2m_router.protocol.client.http_exchange import causes
from a2m_router.protocol.wire.errors import cut

_SECRET_NAME: Final = re.compile(r"TOKEN|SECRET|PASSWORD|KEY|CREDENTIAL", re.IGNORECASE)

SHORTEST_SECRET: Final = 6
"""The fewest characters of a value that is hidden in messages. A shorter one occurs by chance in too many words."""

# the exceptions of foreign code whose server does not answer; the other kinds of OSError concern files
_SILENCE: Final = (TimeoutError, ConnectionError, socket.gaierror, httpx.TransportError)
_NETWORK: Final = frozenset((errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT))


class CannotStart(Exception):
    """The options of the command line cannot be served; the message is one sentence with the reason."""


class ServiceFailure(Exception):
    """The service returned no usable answer; the message is one sentence with the reason."""


class ServiceSilent(ServiceFailure):
    """The service did not answer, for reasons that do not depend on the request.

    It cannot be reached, is too slow, or failed itself (an HTTP status of 500 or more).
    """


class Result(msgspec.Struct, frozen=True):
    """One result of a service.

    value: a string, or an object of JSON values with the fields of a record.
    id: the service's own id of the result, if it has one.
    embedding: the vector, if it was requested.
    unusable: why the result cannot be used, in one sentence, whatever its value is; None if it can.
    left_out: the result is not part of the answer, because it is too far away, or because its score cannot be read. It
        stays in the list, so that the number of results remains that of the service.
    """

    value: Any
    id: str | None = None
    embedding: Sequence[float] | None = None
    unusable: str | None = None
    left_out: Literal["far", "unreadable"] | None = None


class Service(Protocol):
    """A retrieval service. Its methods raise ServiceFailure, and may be cancelled at any time.

    lists: `listed` returns all results of the service.
    metric: how the service compares vectors: cosine, dot or l2; None if it accepts no vectors from callers.
    """

    @property
    def lists(self) -> bool: ...

    @property
    def metric(self) -> str | None: ...

    async def dimensions(self) -> int | None:
        """Return the width of the vectors; None if it is not fixed yet. Called only if there is a `metric`."""
        ...

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        """Return the best results, best first. Fewer than `limit` means that there are no more.

        Args:
            query: the query, not blank unless there is a vector.
            vector: the vector to search with, instead of the query.
            limit: the most results.
            vectors: return the results with their embeddings.
        """
        ...

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        """Return all results, in any order. If there are more than `most`, return some, but more than `most`."""
        ...


class ByWords:
    """The base of a `Service` that accepts no vectors from callers. A subclass that can list overrides `lists`."""

    metric: str | None = None

    @property
    def lists(self) -> bool:
        return False

    async def dimensions(self) -> int | None:
        return None

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        return []


def foreign(what: str) -> AbstractContextManager[None]:
    """Convert any exception in the block, raised by foreign code with the name `what`, to a ServiceFailure.

    It becomes a ServiceSilent if the code failed because its own server did not answer.
    """
    return _turned_into(ServiceFailure, f"{what} raised ")


def starting(what: str) -> AbstractContextManager[None]:
    """Convert any exception in the block, raised by foreign code, to a CannotStart whose message begins with `what`."""
    return _turned_into(CannotStart, f"{what}: ")


@contextmanager
def _turned_into(failure: type[Exception], beginning: str) -> Iterator[None]:
    try:
        yield
    except failure:
        raise
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - foreign code may raise anything
        reason = message_of(problem)
        if failure is ServiceFailure and is_silence(problem):
            failure = ServiceSilent
        raise failure(f"{beginning}{type(problem).__name__}" + (f": {reason}" if reason else "")) from None


def is_silence(problem: BaseException) -> bool:
    """Return whether foreign code failed because a server that it called did not answer."""
    for cause in causes(problem):
        status = _status_in(cause)
        if status is not None:
            return status >= 500
        if isinstance(cause, _SILENCE) or (isinstance(cause, OSError) and cause.errno in _NETWORK):
            return True
    return False


def _status_in(problem: BaseException) -> int | None:
    """Return the HTTP status of a library's exception, by the usual names of attributes; None if it has none."""
    for holder in (problem, getattr(problem, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 100 <= value <= 599:
                return value
    return None


def message_of(problem: BaseException) -> str:
    """Return the message of an exception of foreign code, as `on_one_line` does; empty if it has none."""
    try:
        message = str(problem)
    except Exception:  # noqa: BLE001 - the exception's own __str__ may be wrong, too
        return ""
    return on_one_line(message)


def on_one_line(text: str) -> str:
    """Return a text of foreign code as one printable line of bounded length.

    Values of environment variables whose names look like secrets are hidden.
    """
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "…")
    line = " ".join(text.split()).encode("utf-8", "replace").decode()
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return cut(line)
