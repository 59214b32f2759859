"""memory/remember (§4.2): a batch is completed and checked, then written; the reply has its ids."""

from collections.abc import Callable, Mapping, Sequence

import msgspec

from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.methods.context import Context, scope_of, tells_owners_apart
from a2m_router.methods.drafting import complete_drafts
from a2m_router.placement.writing import NotDurable, Writes
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import (
    DISK_FULL,
    FILE_GONE,
    A2MError,
    Code,
    disk_failed,
    disk_reason,
    overloaded,
)
from a2m_router.protocol.wire.events import Place, Written
from a2m_router.protocol.wire.method_params import ConditionalRemember
from a2m_router.tiers.link import Overloaded, TierDown


class Ids(msgspec.Struct):
    """The reply to memory/remember."""

    ids: list[str]


class Writing:
    """Handles memory/remember."""

    def __init__(self, context: Context, writes: Writes) -> None:
        self._context = context
        self._writes = writes

    def methods(self) -> Mapping[str, Method]:
        return {"memory/remember": Method(ConditionalRemember, self.remember, self._context.refuse_if_read_only)}

    async def remember(self, params: ConditionalRemember, caller: Caller) -> Ids:
        if not tells_owners_apart(caller):
            params.records = [msgspec.structs.replace(draft, owner=None) for draft in params.records]
        return Ids(await self.write(params, scope_of(caller, params.owner)))

    async def write(
        self, params: ConditionalRemember, scope: Scope, still: Callable[[], bool] | None = None
    ) -> list[str]:
        """Write a batch, all of it or nothing. Return the ids in the order of the records (§4.2).

        Args:
            still: called in the step of the commit; if it returns False, nothing is written.

        Raises:
            A2MError: as `complete_drafts` and `Planner.plan`; INTERNAL_ERROR with `data: {tier, reason, retry_after}`
                if a tier does not do its part.
            WriteConflict: `still` returned False.
        """
        context = self._context
        drafts = complete_drafts(params, scope, context.settings, context.mounts, context.catalog.vectors.dimensions())
        try:
            ids = await self._writes.carry_out(drafts, scope, self._emit, still)
        except NotDurable as failure:
            raise unsure(failure.problem, "the records are written and can be read, but may be lost") from failure
        except (TierDown, OSError) as failure:
            raise _refusal(failure) from failure
        context.on_change()
        return ids

    def _emit(self, written: Sequence[Entry]) -> None:
        for entry in written:
            self._context.emit(
                Written(
                    at=self._context.clock(),
                    id=entry.id,
                    place=Place(entry.owner, entry.home),
                    session=entry.session,
                    key=entry.key,
                    revision=entry.revision,
                )
            )


def unsure(failure: OSError, sentence: str) -> A2MError:
    """Return INTERNAL_ERROR for a change that has taken effect, but may not survive a power cut."""
    reason = disk_reason(failure)
    if reason == FILE_GONE:
        return A2MError(
            Code.INTERNAL_ERROR,
            f"the catalog's file is not reliable: {reason}: {sentence} when the router ends; put the file back",
            {"reason": reason},
        )
    what = "is full" if reason == DISK_FULL else f"failed: {reason}"
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the catalog's disk {what}: {sentence} after a power cut; repeat the call when the disk works again",
        {"reason": reason},
    )


def _refusal(failure: TierDown | OSError) -> A2MError:
    """Return INTERNAL_ERROR for a write that was not carried out."""
    if isinstance(failure, Overloaded):
        sentence = f"the tier {failure.tier!r} has reached its concurrency limit; nothing was written"
        return overloaded(sentence, {"tier": failure.tier})
    if isinstance(failure, TierDown):
        return A2MError(
            Code.INTERNAL_ERROR,
            f"the tier {failure.tier!r} did not take the write: {failure.reason}; nothing was written",
            {"tier": failure.tier, "reason": failure.reason, "retry_after": failure.retry_after},
        )
    return disk_failed(failure, "the catalog's")
