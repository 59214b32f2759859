"""What a retrieval service is to the server in front of it, and how what goes wrong with one is said."""

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
"""Characters. A value that is shorter stands in too many words that give nothing away."""

# what foreign code meets where nobody answers; the rest of OSError is about files
_SILENCE: Final = (TimeoutError, ConnectionError, socket.gaierror, httpx.TransportError)
_NETWORK: Final = frozenset((errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ETIMEDOUT))


class CannotStart(Exception):
    """What was asked for on the command line cannot be served; the message is one sentence that says why."""


class ServiceFailure(Exception):
    """The service gave no answer that can be used; the message is one sentence that says why."""


class ServiceSilent(ServiceFailure):
    """The service did not answer, whatever it was asked: it cannot be reached, is too slow, or has failed by itself (an
    HTTP status of 500 or more)."""


class Result(msgspec.Struct, frozen=True):
    """One result, as the service gives it.

    value: a string, or an object of JSON's kinds from which the fields of a record are taken.
    id: what the service itself knows it by, if it has such a thing.
    embedding: its vector, where it was asked for.
    unusable: why it cannot be used whatever its value is; one sentence, None where nothing is known against it.
    left_out: it is none of the answer, since it is too far away, or nobody can tell; it keeps its place, so that the
        number of results is the service's.
    """

    value: Any
    id: str | None = None
    embedding: Sequence[float] | None = None
    unusable: str | None = None
    left_out: Literal["far", "unreadable"] | None = None


class Service(Protocol):
    """A retrieval service. Its methods raise ServiceFailure, and may be cancelled at any time.

    lists: `listed` gives everything there is.
    metric: how it compares vectors: cosine, dot or l2; None where it takes none from callers.
    """

    @property
    def lists(self) -> bool: ...

    @property
    def metric(self) -> str | None: ...

    async def dimensions(self) -> int | None:
        """The width of its vectors, None as long as nothing fixes it. Asked only where there is a `metric`."""
        ...

    async def search(self, query: str, vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        """The best results for a `vector`, else for a query that is not blank, best first. Fewer than `limit` means
        that there are no more.

        Args:
            vectors: with their embeddings.
        """
        ...

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        """All it holds, in any order; where that is more than `most`, some of it, but more than `most`."""
        ...


class ByWords:
    """What a `Service` is that takes no vectors from callers; one that can list says so itself."""

    metric: str | None = None

    @property
    def lists(self) -> bool:
        return False

    async def dimensions(self) -> int | None:
        return None

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        return []


def foreign(what: str) -> AbstractContextManager[None]:
    """Whatever is raised inside, by code that is not ours and that is called `what`, becomes a ServiceFailure;
    ServiceSilent, where it is that nobody answered that code."""
    return _turned_into(ServiceFailure, f"{what} raised ")


def starting(what: str) -> AbstractContextManager[None]:
    """Whatever is raised inside, by code that is not ours, becomes a CannotStart that begins with `what`."""
    return _turned_into(CannotStart, f"{what}: ")


@contextmanager
def _turned_into(failure: type[Exception], beginning: str) -> Iterator[None]:
    try:
        yield
    except failure:
        raise
    except (Exception, SystemExit) as problem:  # noqa: BLE001 - nothing is known of it
        said = told(problem)
        if failure is ServiceFailure and is_silence(problem):
            failure = ServiceSilent
        raise failure(f"{beginning}{type(problem).__name__}" + (f": {said}" if said else "")) from None


def is_silence(problem: BaseException) -> bool:
    """Whether foreign code failed since what it asked, of its own or of others', did not answer."""
    for cause in causes(problem):
        status = _status_in(cause)
        if status is not None:
            return status >= 500
        if isinstance(cause, _SILENCE) or (isinstance(cause, OSError) and cause.errno in _NETWORK):
            return True
    return False


def _status_in(problem: BaseException) -> int | None:
    """The HTTP status that a library's exception is about, by the names that libraries give it."""
    for holder in (problem, getattr(problem, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(holder, name, None)
            if type(value) is int and 100 <= value <= 599:
                return value
    return None


def told(problem: BaseException) -> str:
    """What an exception of foreign code says, as `on_one_line` gives it; empty if it says nothing."""
    try:
        said = str(problem)
    except Exception:  # noqa: BLE001 - foreign code, and this is about another of its mistakes
        return ""
    return on_one_line(said)


def on_one_line(said: str) -> str:
    """A text of foreign code, on one printable line of bounded length, without the values of environment variables that
    look like secrets."""
    for name, value in os.environ.items():
        if _SECRET_NAME.search(name) and len(value) >= SHORTEST_SECRET:
            said = said.replace(value, "…")
    line = " ".join(said.split()).encode("utf-8", "replace").decode()
    line = "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in line)
    return cut(line)
