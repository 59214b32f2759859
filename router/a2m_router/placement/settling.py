"""Settling: what becomes of a claim when a tier, or the catalog's disk, has not done its part yet."""

import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

import anyio

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import TierDown

log = logging.getLogger(__name__)

# How long a change that the catalog's disk did not take waits before it is tried again.
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0


class Spawn(Protocol):
    """Starts a task that outlives the call, owned by the federation."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class Settling:
    """Keeps claims while a tier's answer is open: nothing more is written or removed for their ids until it is certain
    that a call whose outcome is unknown cannot land any more. Likewise while the catalog's disk does not take what has
    to be noted of them; the log says when that begins, and when it is over."""

    def __init__(self, catalog: Catalog, copies: Copies, spawn: Spawn) -> None:
        self._catalog = catalog
        self._copies = copies
        self._spawn = spawn
        self._not_noted = 0  # changes that the disk has not taken

    async def release(
        self,
        claims: Sequence[Claim],
        failures: Sequence[object] = (),
        *,
        note: Callable[[], None] | None = None,
    ) -> None:
        """Make `note`, durably, and release the claims: at once if nothing is open, else when every call among
        `failures` is settled.

        `note` is a change of the catalog, which may be made more than once: where the disk does not take it, it is
        tried again until it does.
        """
        if note is not None:
            try:
                problem = await self._problem_with(note)
            except Exception:  # of no disk's, and nothing will ever be noted: that must not hold up others for good
                await self.release(claims, failures)
                raise
            if problem is None:
                note = None
            else:
                self._not_noted += 1
                if self._not_noted == 1:
                    log.error("the catalog's disk does not take what has to be noted; it is tried again: %s", problem)
        open_calls = [
            f for f in failures if isinstance(f, TierDown) and f.settled is not None and not f.settled.is_set()
        ]
        if not open_calls and note is None:
            for claim in claims:
                claim.release()
            return

        async def settle() -> None:
            try:
                if note is not None:
                    try:
                        await self._until_noted(note)
                    except anyio.get_cancelled_exc_class():
                        with suppress(OSError):  # the router ends: the last chance
                            note()
                        raise
                for failure in open_calls:
                    assert failure.settled is not None
                    await self._copies.link(failure.tier).settle(failure.settled)
            finally:
                for claim in claims:
                    claim.release()

        self._spawn(settle)

    async def _until_noted(self, note: Callable[[], None]) -> None:
        """Returns when a change of the catalog that was refused has been made, and is durable."""
        wait = _FIRST_WAIT
        while (problem := await self._problem_with(note)) is not None:
            log.debug("the catalog's disk still does not take what has to be noted: %s", problem)
            await anyio.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)
        self._not_noted -= 1
        if self._not_noted == 0:
            log.info("the catalog's disk has taken all that had to be noted")

    async def _problem_with(self, note: Callable[[], None]) -> OSError | None:
        try:
            note()
            await self._catalog.synced()
        except OSError as problem:
            return problem
        return None
