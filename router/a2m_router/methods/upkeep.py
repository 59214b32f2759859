"""memory/promote, consolidate, reinforce, and the sessions (§4.6 to §4.8, §4.10, §4.11)."""

from collections.abc import Mapping

import msgspec

from a2m_router.catalog.records import unit_of
from a2m_router.catalog.selection import Scope
from a2m_router.methods.context import Context, scope_of
from a2m_router.placement.moves import Moved, Moves
from a2m_router.placement.passes import Passes, Report, Stayed
from a2m_router.placement.permission import (
    destination,
    refuse_mounted,
    refuse_named,
    refuse_unless_writable,
)
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code, invalid_params
from a2m_router.protocol.wire.events import Place, Promoted, SessionClosed, named
from a2m_router.protocol.wire.method_params import Consolidate, Promote, Reinforce, SessionClose, SessionList
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.policy import Unit


class PromotedCount(msgspec.Struct):
    """The reply to memory/promote (§4.6)."""

    promoted: int


class ReinforcedCount(msgspec.Struct):
    """The reply to memory/reinforce (§4.8)."""

    reinforced: int


class ConsolidateReply(msgspec.Struct):
    """The reply to memory/consolidate (§4.7)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int]


class CloseReply(msgspec.Struct):
    """The reply to memory/session/close (§4.11)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int]
    closed: str
    flushed: int


class SessionEntry(msgspec.Struct, omit_defaults=True):
    """A conversation in the reply to memory/session/list (§4.10); `owner` is left out if it has none."""

    session: str
    records: int
    tiers: Mapping[str, int]
    opened_at: str
    touched_at: str
    owner: str | None = None


class Sessions(msgspec.Struct):
    """The reply to memory/session/list (§4.10)."""

    sessions: list[SessionEntry]


class Upkeep:
    """Handles the calls that apply the policy on request."""

    def __init__(self, context: Context, moves: Moves, passes: Passes) -> None:
        self._context = context
        self._moves = moves
        self._passes = passes

    def methods(self) -> Mapping[str, Method]:
        return {
            "memory/promote": Method(Promote, self.promote, self._context.refuse_if_read_only),
            "memory/consolidate": Method(Consolidate, self.consolidate),
            "memory/reinforce": Method(Reinforce, self.reinforce, self._context.refuse_if_read_only),
            "memory/session/list": Method(SessionList, self.sessions),
            "memory/session/close": Method(SessionClose, self.close),
        }

    async def promote(self, params: Promote, caller: Caller) -> PromotedCount:
        """Move the whole group of each id to a tier, and return how many records moved.

        ReadReply that are there already, or belong to other owners, are skipped.

        Raises:
            A2MError: UNKNOWN_TIER; INVALID_PARAMS for a mount, and for the id of a mount's record; INTERNAL_ERROR with
                `data: {tier, reason}` if nothing could be moved because a tier failed.
        """
        scope = scope_of(caller, params.owner)
        target = destination(params.tier, self._context.settings, self._context.mounts, "tier").name
        refuse_mounted(params.ids, self._context.mounts, self._context.catalog, scope)
        refuse_unless_writable(scope, target, "tier")
        refuse_named(scope, params.ids, self._context.catalog)
        entries = self._context.catalog.records.find(params.ids).values()
        by_home: dict[str, list[Unit]] = {}
        for unit in self._context.catalog.records.units(
            e for e in entries if e.home != target and scope.holds(e.owner)
        ):
            by_home.setdefault(unit[0].home, []).append(unit_of(unit))
        promoted: list[tuple[str, Place]] = []
        reason = None
        tier, is_broken = target, False
        try:
            for home, units in by_home.items():
                moved = Moved()
                try:
                    await self._moves.carry_out(units, home, target, params.salience or 0.0, result=moved)
                finally:
                    promoted += moved.records
                if moved.reason is not None:
                    reason, tier, is_broken = moved.reason, moved.tier or target, moved.is_broken
        finally:
            if promoted:
                self._emit_promoted(scope, target, promoted)
        if not promoted and reason is not None:
            sentence = f"nothing could be moved to {target!r}: {reason}"
            raise _broken(sentence) if is_broken else _refused(sentence, reason, tier)
        if not promoted:
            self._emit_promoted(scope, target, promoted)
        self._context.on_change()
        return PromotedCount(len(promoted))

    def _emit_promoted(self, scope: Scope, target: str, promoted: list[tuple[str, Place]]) -> None:
        self._context.emit(Promoted(at=self._context.clock(), by=scope.owner, tier=target, records=named(promoted)))

    async def consolidate(self, params: Consolidate, caller: Caller) -> ConsolidateReply:
        """Run a pass. The counts cover only what the caller sees."""
        scope = scope_of(caller, params.owner)
        report = await self._passes.consolidate(scope.owner)
        return ConsolidateReply(**self._figures(report, scope), counts=self._context.catalog.queries.counts(scope))

    async def close(self, params: SessionClose, caller: Caller) -> CloseReply:
        """End the caller's conversation of that name: its records leave the working tiers at once, then a pass runs.

        Nothing is deleted.

        Raises:
            A2MError: INTERNAL_ERROR, nothing could leave because a tier failed.
        """
        scope = scope_of(caller, params.owner)
        if params.session == "":
            raise invalid_params("session", "expected a string that is not empty")
        known = self._context.catalog.queries.newest_of(scope.owner, params.session) is not None
        try:
            flushed, report = await self._passes.close_session(params.session, scope.owner)
        except Stayed as stayed:
            sentence = f"no record of the session could leave the working tier: {stayed}"
            raise (_broken(sentence) if stayed.is_broken else _refused(sentence, str(stayed))) from None
        self._context.emit(
            SessionClosed(at=self._context.clock(), owner=scope.owner, session=params.session, known=known)
        )
        return CloseReply(
            **self._figures(report, scope),
            counts=self._context.catalog.queries.counts(scope),
            closed=params.session,
            flushed=flushed.left,
        )

    def _figures(self, report: Report, scope: Scope) -> dict[str, int]:
        """Return the counts of a pass for what the caller sees; other owners' counts stay private (§6)."""
        sight = self._context.sight(scope)
        return {name: sight.count(places) for name, places in report.figures().items()}

    async def reinforce(self, params: Reinforce, caller: Caller) -> ReinforcedCount:
        """Raise the salience of records, and return how many they were.

        Raises:
            A2MError: INVALID_PARAMS for the id of a mount's record; SCOPE_DENIED for a record that the caller sees and
                may not change.
        """
        scope = scope_of(caller, params.owner)
        refuse_mounted(params.ids, self._context.mounts, self._context.catalog, scope)
        refuse_named(scope, params.ids, self._context.catalog)
        return ReinforcedCount(self._context.catalog.reinforce(params.ids, params.amount, scope))

    async def sessions(self, params: SessionList, caller: Caller) -> Sessions:
        """Return the conversations that the caller sees."""
        scope = scope_of(caller, params.owner)
        sessions = [
            SessionEntry(
                session=session.session,
                records=sum(session.tiers.values()),
                tiers=session.tiers,
                opened_at=render(session.opened_at),
                touched_at=render(session.touched_at),
                owner=session.owner,
            )
            for session in self._context.catalog.queries.sessions(scope)
        ]
        return Sessions(sessions)


def _refused(sentence: str, reason: str, tier: str | None = None) -> A2MError:
    data = {"reason": reason, "retry_after": 1.0}
    return A2MError(Code.INTERNAL_ERROR, sentence, data if tier is None else {"tier": tier, **data})


def _broken(sentence: str) -> A2MError:
    """Return the error of a permanent failure: repeating the call does not help."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": NOT_AS_WRITTEN})
