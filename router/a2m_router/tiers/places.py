"""Places for clients' calls at one tier: a number of calls is under way at once, a few more wait, and further calls are
rejected. Background work has its own bounds and is not rejected.

A call whose caller has given up is still work for the tier. It keeps its place until it is resolved. Otherwise the tier
would spend all its time on calls whose callers have given up.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio

from a2m_router.process.budget import is_request
from a2m_router.protocol.client.client import Settled
from a2m_router.tiers.concurrency import ConcurrencyLimit

# Seconds that a call may keep its place after its caller has given up. A lost answer and a hanging tier never resolve
# it, and a tier with few places would have none left.
_KEPT: Final = 30.0

log = logging.getLogger("a2m_router.tiers")


class NoPlace(Exception):
    """Too many calls wait for a place already, or no place became free in time."""


class Places:
    """The places at one tier.

    Args:
        tier: the tier's name, for the log.
        most: the most calls under way at once; fewer if the tier is too slow for them.
        spawn: starts a task of the link, and returns whether it could: a link that has ended cannot.
    """

    def __init__(self, tier: str, most: int, spawn: Callable[..., bool]) -> None:
        self._tier = tier
        self._spawn = spawn
        self._limit = ConcurrencyLimit(most)
        self._places = anyio.CapacityLimiter(most)

    def __repr__(self) -> str:
        return f"<Places to {self._tier}: {self._places.borrowed_tokens} of {self._limit.calls} places taken>"

    @asynccontextmanager
    async def place(self, deadline: float) -> AsyncIterator[list[Settled]]:
        """Hold a place for one call. If the call is given up, the caller adds its `Settled` to the list.

        Raises NoPlace.
        """
        given_up: list[Settled] = []
        if not is_request():
            yield given_up
            return
        if self._places.statistics().tasks_waiting >= self._limit.waiting:
            raise NoPlace
        borrower = object()
        with anyio.move_on_after(deadline - anyio.current_time()) as turn:
            await self._places.acquire_on_behalf_of(borrower)
        if turn.cancelled_caught:
            raise NoPlace
        try:
            yield given_up
        finally:
            if not given_up or not self._spawn(self._leave, borrower, given_up):
                self._places.release_on_behalf_of(borrower)

    def begin(self) -> int:
        """Note that a call is sent; return its number, for `ended`."""
        return self._limit.begin()

    def ended(self, number: int, *, in_time: bool) -> None:
        """Note that the call was answered, in time or too late."""
        self._limit.ended(number, in_time=in_time)
        if self._places.total_tokens != self._limit.calls:
            log.debug("tier=%s concurrency limit changed: %d calls", self._tier, self._limit.calls)
            self._places.total_tokens = self._limit.calls

    async def _leave(self, borrower: object, given_up: Sequence[Settled]) -> None:
        try:
            with anyio.move_on_after(_KEPT):
                for settled in given_up:
                    await settled.wait()
        finally:
            self._places.release_on_behalf_of(borrower)
