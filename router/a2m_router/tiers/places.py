"""Places for clients' calls at one tier: so many are under way at once, a few more wait for their turn, and what comes
then is refused. Work in the background is bounded by itself and is not refused.

A call that is given up is still the tier's work, and keeps its place, until what it yields is settled: else the tier
would only ever be at what nobody waits for any more.
"""

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Final

import anyio

from a2m_router.process.budget import is_request
from a2m_router.protocol.client.client import Settled
from a2m_router.tiers.concurrency import ConcurrencyLimit

# how long a call that nobody waits for any more may keep its place, seconds: an answer that was lost, and a tier that
# hangs, prove nothing ever, and a narrow tier would have no place left
_KEPT: Final = 30.0

log = logging.getLogger("a2m_router.tiers")


class NoPlace(Exception):
    """Too many calls wait for a place already, or none came free in time."""


class Places:
    """The places at one tier.

    Args:
        tier: its name, for the log.
        most: calls under way at once; fewer where the tier is too slow for them.
        spawn: starts a task of the link's, and returns whether it could: a link that has ended has none.
    """

    def __init__(self, tier: str, most: int, spawn: Callable[..., bool]) -> None:
        self._tier = tier
        self._spawn = spawn
        self._room = ConcurrencyLimit(most)
        self._places = anyio.CapacityLimiter(most)

    def __repr__(self) -> str:
        return f"<Places to {self._tier}: {self._places.borrowed_tokens} of {self._room.calls} places taken>"

    @asynccontextmanager
    async def place(self, deadline: float) -> AsyncIterator[list[Settled]]:
        """A place for one call. A call that is given up puts in when it will be settled. Raises NoPlace."""
        given_up: list[Settled] = []
        if not is_request():
            yield given_up
            return
        if self._places.statistics().tasks_waiting >= self._room.waiting:
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
        """A call is sent; returns what `ended` is to be told of it."""
        return self._room.begin()

    def ended(self, number: int, *, in_time: bool) -> None:
        """The call was answered, in time or too late."""
        self._room.ended(number, in_time=in_time)
        if self._places.total_tokens != self._room.calls:
            log.debug("%s: %d calls may be under way", self._tier, self._room.calls)
            self._places.total_tokens = self._room.calls

    async def _leave(self, borrower: object, given_up: Sequence[Settled]) -> None:
        try:
            with anyio.move_on_after(_KEPT):
                for settled in given_up:
                    await settled.wait()
        finally:
            self._places.release_on_behalf_of(borrower)
