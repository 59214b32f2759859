"""A write at its tiers: the checks before the catalog notes anything, and the calls that write new records.

- Known means readable: each known record is read at its home.
- Nothing blocks the write: the tier holds no stray of the record's id or at its owner's key. A lifted server holds no
  record of another writer under an id that the caller chose.
"""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from a2m_router.catalog.claims import Name, names_of
from a2m_router.catalog.entries import Entry, by_home, former, is_current
from a2m_router.catalog.records import unit_of
from a2m_router.catalog.selection import Scope
from a2m_router.placement.core import Core
from a2m_router.placement.moves import Moves
from a2m_router.placement.permission import refuse_unless_writable
from a2m_router.placement.planning import Plan
from a2m_router.protocol.wire.errors import CALLERS_ERRORS, RETRY_AFTER, A2MError, invalid_params, no_room
from a2m_router.protocol.wire.records import Draft, digest
from a2m_router.tiers.failures import untrue
from a2m_router.tiers.gather import Failure, gather_outcomes
from a2m_router.tiers.link import TierDown


class Delivering:
    """Prepares the tiers of a plan, and writes to them."""

    def __init__(self, core: Core, moves: Moves) -> None:
        self._catalog = core.catalog
        self._gateway = core.gateway
        self._reconciler = core.reconciler
        self._moves = moves

    def touched(self, plan: Plan) -> set[Name]:
        """Return the names that a write of the plan has to claim."""
        names: set[Name] = set()
        entries = [entry for _, _, entry in plan.new + plan.known] + [r.entry for r in plan.replacements]
        before = self._catalog.records.find(r.entry.id for r in plan.replacements)
        for entry in [*entries, *before.values()]:
            names.update(names_of(entry))
        for tier, there in by_home(entries).items():
            names |= self._reconciler.names_to_clear(tier, there)
        return names

    async def take_groups_along(self, plan: Plan, scope: Scope) -> None:
        """Move whole groups before the write.

        A replacement may name another tier and keep its record in its group: then the whole group moves there first.
        The caller holds no claim, because a move takes its own.
        """
        for slot, _, _ in plan.replaced:
            draft = slot.last
            # a forget during a move makes the move skip the unit; the group is smaller then
            while draft.tier is not None and (members := self._members_left_behind(draft, draft.tier)):
                refuse_unless_writable(scope, members[0].home, "records")
                moved = await self._moves.carry_out([unit_of(members)], members[0].home, draft.tier)
                if moved.is_broken:
                    problem = f"the record's group could not move: {moved.reason}; nothing was written"
                    raise untrue(members[0].home, problem)
                if moved.reason is not None:
                    raise TierDown(draft.tier, f"the record's group could not move: {moved.reason}", 1.0, None)

    async def prepare(self, plan: Plan) -> None:
        """Check that the plan can be carried out, before the catalog notes anything of it.

        The caller holds a claim on all names of `touched`.

        Raises:
            TierDown: a tier cannot do its part.
            A2MError: a record is wrong.
            StaleClaim: a stray outside the claim blocks the write now.
        """
        await self._check_known(plan)
        self._check_counted(plan)
        await self._make_way([*plan.entries, *(r.entry for r in plan.replacements)])
        await self._refuse_what_is_there(plan)

    async def write(self, written: Sequence[tuple[Draft, str]], *, are_all: bool) -> list[Failure]:
        """Write to all tiers at once, and return the failures.

        Unless one call is the whole batch, the reservations are synced first. Otherwise a power cut could leave a part
        of the batch without its reservations, and a scan would adopt that part.
        """
        by_tier: dict[str, list[Draft]] = {}
        for draft, tier in written:
            by_tier.setdefault(tier, []).append(draft)
        calls: list[Callable[[], Awaitable[None]]] = [
            partial(self._gateway.write_new, tier, drafts) for tier, drafts in by_tier.items()
        ]
        is_one = len(calls) == 1 and all(self._gateway.is_one_call(tier, drafts) for tier, drafts in by_tier.items())
        if not (are_all and is_one):
            await self._catalog.synced()
        found = await gather_outcomes(calls)
        return [
            failure if isinstance(failure, A2MError) and failure.code in CALLERS_ERRORS else _as_down(tier, failure)
            for tier, failure in zip(by_tier, found, strict=True)
            if failure is not None
        ]

    def _members_left_behind(self, draft: Draft, tier: str) -> list[Entry]:
        """Return the group of the record that `draft` would move to `tier` alone; empty if that splits no group."""
        entry = None if draft.key is None else self._catalog.records.by_key(draft.owner, draft.key)
        if entry is None or entry.home == tier or draft.group is None or draft.group != entry.group:
            return []
        members = self._catalog.records.unit(entry)
        return list(members) if len(members) > 1 else []

    async def _check_known(self, plan: Plan) -> None:
        """Read each known record at its home.

        If the home has lost a record and the caller sends it unchanged, it is written there again.
        """
        behind = self._catalog.pending.among(entry.id for _, _, entry in plan.known)  # readable in the catalog
        homes = by_home([entry for _, _, entry in plan.known if entry.id not in behind])
        found = await gather_outcomes(
            [partial(self._gateway.read, home, [e.id for e in there], embeddings=True) for home, there in homes.items()]
        )
        wrong: dict[str, str] = {}
        for (home, entries), copies in zip(homes.items(), found, strict=True):
            if not isinstance(copies, dict):
                raise _as_down(home, copies)
            for entry in entries:
                if entry.id not in copies:
                    wrong[entry.id] = f"it has lost the record {entry.id!r}; write it anew as it was, or forget it"
                elif not is_current(copies[entry.id], entry):
                    wrong[entry.id] = former([entry.id])
                elif digest(copies[entry.id]) != entry.digest:
                    raise untrue(home, f"it does not hold the record {entry.id!r} as it was written; forget it")
        for _, draft, entry in plan.known:
            if entry.id not in wrong:
                continue
            if digest(draft) != entry.digest:
                raise untrue(entry.home, f"{wrong[entry.id]}; nothing was written")
            for unkept in (await self._gateway.write_seen(entry.home, [draft])).values():
                raise TierDown(entry.home, unkept, 60.0, None)

    def _check_counted(self, plan: Plan) -> None:
        """Raise TierDown for a new record that could collide with an earlier router's writes.

        After a power cut, a tier may hold writes that the catalog lost, or receive them late. Only a record with an id
        chosen by its caller, or with an owner's key, can collide with one of them.
        """
        for slot, _, entry in plan.new:
            if entry.home in self._catalog.opening.uncounted and (slot.first.id is not None or entry.key is not None):
                raise TierDown(entry.home, self._gateway.why_unaccounted(entry.home), 1.0, None)

    async def _make_way(self, entries: Sequence[Entry]) -> None:
        """Remove the strays that block these records in their new homes."""
        for tier, there in by_home(entries).items():
            self._reconciler.check(tier)
            try:
                await self._reconciler.clear(tier, there)
            except A2MError as refused:
                raise _as_down(tier, refused) from refused

    async def _refuse_what_is_there(self, plan: Plan) -> None:
        """Reject records whose ids a lifted server already uses for other records.

        This concerns ids that a caller chose, and ids that move to the server with a replacement. A copy of a forgotten
        or given-up record is a late write: it is removed.

        Raises:
            TierDown: the catalog does not have the record. The check comes before any note that would delete it.
            A2MError: INVALID_PARAMS, the record belongs to another federation.
        """
        home = {
            id: entry.home for id, entry in self._catalog.records.find(r.entry.id for r in plan.replacements).items()
        }
        coming = [r.entry for r in plan.replacements if home.get(r.entry.id, r.entry.home) != r.entry.home]
        chosen = [entry for slot, _, entry in plan.new if slot.first.id is not None]
        for tier, there in by_home(coming + chosen).items():
            if self._gateway.mode(tier).native:
                continue
            try:
                found, others = await self._gateway.there(tier, [entry.id for entry in there])
            except A2MError as refused:
                raise _as_down(tier, refused) from refused
            for id, whose in others.items():
                problem = f"{tier!r} holds a record with the id {id!r} already, {whose}; choose another id, or tier"
                raise invalid_params("records", problem)
            late = [entry for entry in there if entry.id in found and self._catalog.tombstones.is_forgotten(entry.id)]
            for id in found.keys() - {entry.id for entry in [*late, *coming]}:
                raise TierDown(tier, f"it holds a record {id!r} already that the catalog does not have", 60.0, None)
            if late:
                self._catalog.note_unwanted(late, tier)
                await self._reconciler.clear(tier, late)


def _as_down(tier: str, failure: Failure) -> Failure:
    """Turn a tier's rejection into TierDown: it is a fault of the federation, not of the caller."""
    if not isinstance(failure, A2MError):
        return failure
    reason = no_room(failure)
    if reason is not None:
        return TierDown(tier, reason, RETRY_AFTER, None)  # temporary, and clients match this reason
    return TierDown(tier, f"it refuses: {failure.message}", 60.0, None)
