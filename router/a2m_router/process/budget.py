"""The deadline of a client's request, shared by all work that the request causes.

It is a context variable, so that functions need not pass it down. Work that outlives its request has no deadline.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import anyio

_DEADLINE: Final[ContextVar[float | None]] = ContextVar("deadline", default=None)


@contextmanager
def budget(seconds: float | None) -> Iterator[None]:
    """Limit the block to so many seconds in total; None: no limit, as for background work."""
    outer = _DEADLINE.set(None if seconds is None else anyio.current_time() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(outer)


def left() -> float:
    """Return the remaining seconds of the request, at least 0; infinite for background work."""
    deadline = _DEADLINE.get()
    return math.inf if deadline is None else max(0.0, deadline - anyio.current_time())


def is_request() -> bool:
    """Return whether the current work belongs to a client's request, rather than to the background."""
    return _DEADLINE.get() is not None
