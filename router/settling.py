"""Settling: what becomes of a claim when a tier has not answered."""

from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from router.catalog.claims import Claim
from router.tiers.copies import Copies
from router.tiers.link import TierDown


class Spawn(Protocol):
    """Starts a task that outlives the call, owned by the federation."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class Settling:
    """Keeps claims while a tier's answer is open: nothing more is written or removed for their ids until it is certain
    that a call whose outcome is unknown cannot land any more."""

    def __init__(self, copies: Copies, spawn: Spawn) -> None:
        self._copies = copies
        self._spawn = spawn

    def release(
        self,
        claim: Claim,
        failures: Sequence[object] = (),
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Release `claim`: at once if nothing is open, else when every call among `failures` is settled and `then` is
        done."""
        open_calls = [
            f for f in failures if isinstance(f, TierDown) and f.settled is not None and not f.settled.is_set()
        ]
        if not open_calls and then is None:
            claim.release()
            return

        async def settle() -> None:
            try:
                for failure in open_calls:
                    assert failure.settled is not None
                    await self._copies.link(failure.tier).settle(failure.settled)
                if then is not None:
                    await then()
            finally:
                claim.release()

        self._spawn(settle)
