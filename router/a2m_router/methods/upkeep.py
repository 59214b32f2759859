"""memory/promote, consolidate, reinforce and the sessions (§4.6 to §4.8, §4.10, §4.11)."""

from collections.abc import Callable, Mapping

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.records import unit_of
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.methods.drafting import destination
from a2m_router.methods.permission import refuse_named, refuse_unless_writable
from a2m_router.methods.resolving import refuse_mounted
from a2m_router.methods.selecting import sight_of
from a2m_router.placement.moves import Moved, Moves
from a2m_router.placement.passes import Passes, Report, Stayed
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code, invalid_params
from a2m_router.protocol.wire.events import Event, Place, Promoted, SessionClosed, named
from a2m_router.protocol.wire.messages import Promote, Reinforce, SessionClose
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.policy import Unit
from a2m_router.tiers.mounts import Mounts


class Consolidated(msgspec.Struct):
    """The answer to memory/consolidate (§4.7)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int]


class Closed(msgspec.Struct):
    """The answer to memory/session/close (§4.11)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int]
    closed: str
    flushed: int


class SessionEntry(msgspec.Struct, omit_defaults=True):
    """A conversation in the answer to memory/session/list (§4.10); `owner` is there where it has one."""

    session: str
    records: int
    tiers: Mapping[str, int]
    opened_at: str
    touched_at: str
    owner: str | None = None


class Upkeep:
    """Carries out what is asked of the policy by hand.

    Args:
        tell: logs an event.
        clock: the time, in milliseconds since 1970.
        changed: called after every promotion, so that the policy looks at what it filled.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        moves: Moves,
        passes: Passes,
        mounts: Mounts,
        tell: Callable[[Event], None],
        clock: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._moves = moves
        self._passes = passes
        self._mounts = mounts
        self._tell = tell
        self._clock = clock
        self._changed = changed

    async def promote(self, params: Promote, scope: Scope) -> int:
        """How many records moved: the whole group of each id, but for what is there already or is not the caller's.

        Raises UNKNOWN_TIER; INVALID_PARAMS for a mount, and for the id of a mount's record; INTERNAL_ERROR with
        `data: {tier, reason}` when nothing could be moved because a tier did not take part.
        """
        target = destination(params.tier, self._settings, self._mounts, "tier").name
        refuse_mounted(params.ids, self._mounts, self._catalog, scope)
        refuse_unless_writable(scope, target, "tier")
        refuse_named(scope, params.ids, self._catalog)
        entries = self._catalog.records.find(params.ids).values()
        by_home: dict[str, list[Unit]] = {}
        for unit in self._catalog.records.units(e for e in entries if e.home != target and scope.holds(e.owner)):
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
                self._tell_promoted(scope, target, promoted)
        if not promoted and reason is not None:
            sentence = f"nothing could be moved to {target!r}: {reason}"
            raise _broken(sentence) if is_broken else _refused(sentence, reason, tier)
        if not promoted:
            self._tell_promoted(scope, target, promoted)
        self._changed()
        return len(promoted)

    def _tell_promoted(self, scope: Scope, target: str, promoted: list[tuple[str, Place]]) -> None:
        self._tell(Promoted(at=self._clock(), by=scope.owner, tier=target, records=named(promoted)))

    async def consolidate(self, scope: Scope) -> Consolidated:
        """Runs a pass; the counts are those of what the caller sees."""
        report = await self._passes.consolidate(scope.owner)
        return Consolidated(**self._figures(report, scope), counts=self._catalog.queries.counts(scope))

    async def close(self, params: SessionClose, scope: Scope) -> Closed:
        """Ends the caller's conversation of that name: its records leave the working tiers at once, then a pass runs.

        Nothing is deleted. Raises INTERNAL_ERROR when nothing could leave because a tier did not take part.
        """
        if params.session == "":
            raise invalid_params("session", "expected a string that is not empty")
        known = self._catalog.queries.newest_of(scope.owner, params.session) is not None
        try:
            flushed, report = await self._passes.close_session(params.session, scope.owner)
        except Stayed as stayed:
            sentence = f"nothing of the session could leave the working tier: {stayed}"
            raise (_broken(sentence) if stayed.is_broken else _refused(sentence, str(stayed))) from None
        self._tell(SessionClosed(at=self._clock(), owner=scope.owner, session=params.session, known=known))
        return Closed(
            **self._figures(report, scope),
            counts=self._catalog.queries.counts(scope),
            closed=params.session,
            flushed=flushed.left,
        )

    def _figures(self, report: Report, scope: Scope) -> dict[str, int]:
        """What a pass did of what the caller sees: the rest is nobody else's to know (§6)."""
        sight = sight_of(scope, self._settings)
        return {name: sight.count(places) for name, places in report.figures().items()}

    def reinforce(self, params: Reinforce, scope: Scope) -> int:
        """How many records had their salience raised.

        Raises INVALID_PARAMS for the id of a mount's record, SCOPE_DENIED for what is seen and may not be changed.
        """
        refuse_mounted(params.ids, self._mounts, self._catalog, scope)
        refuse_named(scope, params.ids, self._catalog)
        return self._catalog.reinforce(params.ids, params.amount, scope)

    def sessions(self, scope: Scope) -> list[SessionEntry]:
        """The conversations the caller sees."""
        return [
            SessionEntry(
                session=session.session,
                records=sum(session.tiers.values()),
                tiers=session.tiers,
                opened_at=render(session.opened_at),
                touched_at=render(session.touched_at),
                owner=session.owner,
            )
            for session in self._catalog.queries.sessions(scope)
        ]


def _refused(sentence: str, reason: str, tier: str | None = None) -> A2MError:
    data = {"reason": reason, "retry_after": 1.0}
    return A2MError(Code.INTERNAL_ERROR, sentence, data if tier is None else {"tier": tier, **data})


def _broken(sentence: str) -> A2MError:
    """Of what does not pass: to repeat the call does not help."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": NOT_AS_WRITTEN})
