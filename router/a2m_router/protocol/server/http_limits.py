"""What the HTTP server spends on its callers at most. No I/O, and no clock.

- A request that finds no room is refused and never waits: a queue would only be another thing without a bound.
- What was taken is given back, however the request ends.
- A body counts as held from its announcement until its call has been answered. One alone always finds room.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import msgspec

# bytes a second. Slower than this, after a first idle_timeout, no body need come, and no answer be taken
MIN_RATE: Final = 8 * 2**10


class HttpLimits(msgspec.Struct, frozen=True, kw_only=True):
    max_requests: int = 256  # under way at once
    max_connections: int = 1024
    max_held: int = 256 * 2**20  # bytes of request bodies held at once, over all requests
    max_header: int = 32 * 2**10  # bytes in a request's head
    idle_timeout: float = 30.0  # seconds


DEFAULT_LIMITS: Final = HttpLimits()


class Busy(Exception):
    """There is no room for a request now; the message is a sentence for its caller."""


class Limiter:
    """Counts the requests under way and the bytes of their bodies."""

    def __init__(self, max_requests: int, max_held: int) -> None:
        self._max_requests = max_requests
        self._max_held = max_held
        self._requests = 0
        self._held = 0

    def __repr__(self) -> str:
        return f"<Limiter {self._requests}/{self._max_requests} requests, {self._held}/{self._max_held} bytes>"

    @contextmanager
    def place(self, size: int) -> Iterator[Callable[[int], None]]:
        """A place for one request, with `size` bytes of body; given back when the block is left. Raises Busy.

        The function it gives holds another number of bytes instead: less is always granted; if more does not fit, it
        raises Busy, and what was held stays held.
        """
        if self._requests >= self._max_requests:
            raise Busy(f"{self._max_requests:,} requests are under way, which is what this server takes at once")
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            others = self._held - held
            if size > held and others and others + size > self._max_held:
                raise Busy(f"with {size:,} bytes more, the requests under way would hold too many")
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
    """For how many seconds the next piece of a body may be waited for; none, or less, if it is too slow already.

    Args:
        took: seconds since the body was first waited for.
        came: bytes so far.
    """
    return min(idle_timeout, idle_timeout + came / MIN_RATE - took)
