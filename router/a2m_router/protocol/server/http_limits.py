"""Limits of the HTTP server: requests, connections, memory, time. No I/O, and no clock.

- A request above a limit is rejected immediately and never waits: a queue would need a limit, too.
- A request's share is released however the request ends.
- A body counts as held from the announcement of its length until its call is answered. A single body always fits.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

# bytes a second: the slowest accepted rate of a body, or of reading an answer, after a first idle_timeout
MIN_RATE: Final = 8 * 2**10


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_requests: int = 256  # in progress at once
    max_connections: int = 1024
    max_held: int = 256 * 2**20  # bytes of request bodies held at once, over all requests
    max_header: int = 32 * 2**10  # bytes in a request's head
    idle_timeout: float = 30.0  # seconds


DEFAULT_LIMITS: Final = HttpLimits()


class Busy(Exception):
    """A request exceeds a limit now; the message is a sentence for its caller."""


class Limiter:
    """Counts the requests in progress and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_held: int) -> None:
        self._max_requests = max_requests
        self._max_held = max_held
        self._requests = 0
        self._held = 0

    def __repr__(self) -> str:
        return f"<Limiter {self._requests}/{self._max_requests} requests, {self._held}/{self._max_held} bytes>"

    @contextmanager
    def place(self, size: int) -> Iterator[Callable[[int], None]]:
        """Count one request with `size` bytes of body until the end of the block. Raises Busy above a limit.

        The yielded function changes the number of bytes. Fewer bytes are always granted; if more do not fit, it raises
        Busy, and the number stays as it was.
        """
        if self._requests >= self._max_requests:
            raise Busy(f"{self._max_requests:,} requests are in progress, which is the limit of this server")
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            others = self._held - held
            if size > held and others and others + size > self._max_held:
                raise Busy(f"with {size:,} more bytes, the requests in progress would exceed the limit of memory")
            self._held = others + size
            held = size

        self._requests += 1
        try:
            hold(size)
            yield hold
        finally:
            self._held -= held
            self._requests -= 1


def patience(took: float, came: int, idle_timeout: float) -> float:
    """Return how many seconds to wait for the next piece of a body; 0 or less if the body is already too slow.

    Args:
        took: seconds since the wait for the body began.
        came: bytes so far.
    """
    return min(idle_timeout, idle_timeout + came / MIN_RATE - took)
