"""The time that a client's request may take: one deadline, shared by all that the request causes.

It travels in the context, so that a call deep below need not be handed it. Work that outlives its request has none.
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
    """What is done in the block has so many seconds, all in all; None: as long as it takes, as in the background."""
    outer = _DEADLINE.set(None if seconds is None else anyio.current_time() + seconds)
    try:
        yield
    finally:
        _DEADLINE.reset(outer)


def left() -> float:
    """The seconds that are left of the request, not fewer than none; infinite where nobody waits for an answer."""
    deadline = _DEADLINE.get()
    return math.inf if deadline is None else max(0.0, deadline - anyio.current_time())


def is_request() -> bool:
    """Whether what is being done is a client's request, and not work in the background."""
    return _DEADLINE.get() is not None
