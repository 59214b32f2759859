"""The guard of changes: no other change touches the same records while a change may still reach a tier.

Every change of records holds claims on them (catalog/claims.py). The guard does what all changes have in common:
- a cancellation does not interrupt a change. Every call to a tier has a deadline, and a claim that is never released
  would block its records for good;
- a call to a tier without an answer is in doubt: it may still be carried out. The claims are kept until that is
  impossible;
- the catalog's note of a failed change becomes durable before the claims are released. If the catalog's disk refuses
  it, the note is repeated until it succeeds.
"""

import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Protocol

import anyio

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim
from a2m_router.process.alerts import Alerts
from a2m_router.process.timing import doubling
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import TierDown

log = logging.getLogger(__name__)

# Seconds between two attempts to write a note that the catalog's disk refused.
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0


class Spawn(Protocol):
    """Starts a task that outlives the call, owned by the federation."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class Change:
    """A change in progress.

    `note`: a change of the catalog that is made, durably, at the end. It may be made more than once.
    `failures`: the failures of its calls, some of which may be in doubt. An exception of the block is added
    automatically.
    """

    def __init__(self) -> None:
        self.note: Callable[[], None] | None = None
        self.failures: list[Exception] = []


class Guard:
    """Guards the changes of records in one federation.

    Args:
        spawn: starts a task that outlives the call that started it.
        on_end: called at the end of each change, when there may be copies to reconcile.
    """

    def __init__(self, catalog: Catalog, gateway: TierGateway, spawn: Spawn, on_end: Callable[[], None]) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._spawn = spawn
        self._on_end = on_end
        self._refused = 0  # notes that the catalog's disk has not accepted yet
        self._alerts = Alerts(log)

    @asynccontextmanager
    async def change(self, *claims: Claim, wakes: bool = True) -> AsyncIterator[Change]:
        """Shield the block from cancellation, and release the claims at the end.

        The claims are released when the note is durable and no call is in doubt. That may be after the block has
        returned: the block does not wait for it.

        Args:
            wakes: call `on_end`.
        """
        change = Change()
        with anyio.CancelScope(shield=True):
            try:
                yield change
            except Exception as failure:
                change.failures.append(failure)
                raise
            finally:
                try:
                    await self._release(claims, change)
                finally:
                    if wakes:
                        self._on_end()

    async def _release(self, claims: Sequence[Claim], change: Change) -> None:
        in_doubt = [
            failure
            for failure in change.failures
            if isinstance(failure, TierDown) and failure.settled is not None and not failure.settled.is_set()
        ]
        note = change.note
        noted = True
        try:
            noted = note is None or await self._is_noted(note)
        finally:  # also after an unexpected error: it must not block the records for good
            if noted and not in_doubt:
                for claim in claims:
                    claim.release()
            else:
                self._refused += not noted
                self._spawn(lambda: self._resolve(claims, in_doubt, None if noted else note))

    async def _resolve(
        self, claims: Sequence[Claim], in_doubt: Sequence[TierDown], note: Callable[[], None] | None
    ) -> None:
        """Release the claims when the note is durable and no call is in doubt."""
        try:
            if note is not None:
                await self._until_noted(note)
            for failure in in_doubt:
                assert failure.settled is not None
                await self._gateway.link(failure.tier).settle(failure.settled)
        finally:
            for claim in claims:
                claim.release()
        self._on_end()  # the note may have left copies to delete

    async def _until_noted(self, note: Callable[[], None]) -> None:
        try:
            for wait in doubling(_FIRST_WAIT, _LONGEST_WAIT):
                await anyio.sleep(wait)
                if await self._is_noted(note):
                    break
        except anyio.get_cancelled_exc_class():
            with suppress(OSError):  # the router is shutting down: this is the last attempt
                note()
            raise
        self._refused -= 1
        if not self._refused:
            self._alerts.end("disk", "the catalog's disk accepts notes again")

    async def _is_noted(self, note: Callable[[], None]) -> bool:
        """Make a note. Return whether the catalog's disk has accepted it."""
        try:
            note()
            await self._catalog.synced()
        except OSError as problem:
            sentence = "notes not written to the catalog, will retry: %s"
            self._alerts.begin("disk", logging.ERROR, sentence % problem)
            return False
        return True
