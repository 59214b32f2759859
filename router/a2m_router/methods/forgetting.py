"""memory/forget (§4.5): find the selected records, and remove them for every reader before the reply.

A forget takes no claim, and waits only for tiers that must be asked. It takes effect with its note in the catalog.
"""

from collections.abc import Mapping, Sequence

import msgspec
from msgspec.structs import replace

from a2m_router.catalog.selection import Scope
from a2m_router.methods.context import Context, scope_of
from a2m_router.methods.writing import unsure
from a2m_router.placement.permission import (
    passing_by,
    refuse_mounted,
    refuse_unless_writable,
)
from a2m_router.placement.reconciler import Reconciler
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import invalid_params
from a2m_router.protocol.wire.events import Forgotten, Place, named
from a2m_router.protocol.wire.method_params import Forget
from a2m_router.ranking.text import query_tokens
from a2m_router.reading.question import question_of, selects
from a2m_router.reading.resolving import Resolving
from a2m_router.tiers.failures import unaccounted


class ForgottenCount(msgspec.Struct):
    """The reply to memory/forget."""

    forgotten: int


class Forgetting:
    """Handles memory/forget."""

    def __init__(self, context: Context, resolving: Resolving, reconciler: Reconciler) -> None:
        self._context = context
        self._resolving = resolving
        self._reconciler = reconciler

    def methods(self) -> Mapping[str, Method]:
        return {"memory/forget": Method(Forget, self.forget, self._context.refuse_if_read_only)}

    async def forget(self, params: Forget, caller: Caller) -> ForgottenCount:
        """Forget the selected records, and return how many they were. ReadReply of mounts are skipped.

        Raises:
            A2MError: INVALID_PARAMS, there is no selector, or an id belongs to a mount's record. If a tier that must be
                asked does not answer, nothing is forgotten.
        """
        scope = scope_of(caller, params.owner)
        if params.query is not None and not query_tokens(params.query):
            raise invalid_params("query", "expected words to search for, got none")
        if not selects(params):
            raise invalid_params(
                "params",
                "expected ids, a query, a tier, a where with a condition, or a key_prefix; an empty selector does not "
                "forget everything",
            )
        ids = self._changeable(await self._selected(params, scope), params, scope)
        now, catalog = self._context.clock, self._context.catalog
        deleted = catalog.forget(ids, scope, now())
        records = named([(entry.id, Place(entry.owner, entry.home)) for entry in deleted])
        self._context.emit(Forgotten(at=now(), by=scope.owner, records=records))
        self._reconciler.wake()  # before the sync: the reconciler itself waits until the note is durable
        try:
            await catalog.synced()
        except OSError as failure:
            raise unsure(failure, "the records are forgotten, but may come back") from failure
        return ForgottenCount(len(deleted))

    async def _selected(self, params: Forget, scope: Scope) -> Sequence[str]:
        """Return the ids of the managed records that match all selectors."""
        context = self._context
        question = question_of(params, scope, context.settings)
        if params.tier is not None and question.tiers and question.tiers[0] in context.mounts:
            raise invalid_params("tier", f"{params.tier!r} is mounted read-only; nothing in it can be forgotten")
        refuse_mounted(params.ids or (), context.mounts, context.catalog, scope)
        if (params.query, params.tier, params.where, params.key_prefix) == (None,) * 4:
            return params.ids or []
        managed = [tier for tier in question.tiers if tier not in context.mounts]
        return await self._resolving.ids(replace(question, tiers=managed, query=params.query or None))

    def _changeable(self, ids: Sequence[str], params: Forget, scope: Scope) -> list[str]:
        """Return the selected ids that `scope` may forget.

        Raises:
            A2MError: SCOPE_DENIED, the call names a record or tier that the scope may not change; INTERNAL_ERROR, one
                of the ids may belong to a tier that is not scanned and that the scope may not change.
        """
        catalog = self._context.catalog
        if params.tier is not None:
            refuse_unless_writable(scope, params.tier, "tier")
        for tier in catalog.tiers.unscanned():
            if not scope.writes_to(tier):
                # a record of another owner is treated like one that does not exist
                seen = [entry for entry in catalog.records.find(ids).values() if catalog.queries.sees(scope, entry)]
                if len(seen) < len(set(ids)):
                    raise unaccounted(tier, self._context.gateway.why_unaccounted(tier))
        return passing_by(scope, ids, params.ids or (), catalog)
