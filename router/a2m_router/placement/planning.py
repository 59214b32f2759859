"""Plans: which drafts of a batch become new records, which replace known ones, and which are known already.

Making a plan changes nothing but its slots, which get their ids. The router carries out only a plan that was made under
a claim; a plan made before the claim only lists what to claim. A plan also checks the conditions (`if_revision`): of
several writers that have seen the same revision, one is first, and the others are rejected before any call to a tier.
"""

import logging
import os
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Final

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, entry_of
from a2m_router.catalog.records import Replacement
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.placement.permission import destination, refuse_unless_writable
from a2m_router.placement.slots import Slot, is_written, rewrites_of, rewritten, slots_of, whole_of
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.records import ConditionalDraft, Draft
from a2m_router.protocol.wire.timestamps import after, parse, render
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.mounts import Mounts

# Smaller corrections of the clock are not logged, milliseconds.
_SET_BACK: Final = 1000

log = logging.getLogger(__name__)


class Plan(msgspec.Struct):
    """What a batch becomes, under a claim: for each slot, the draft that its tier gets, and the catalog entry."""

    new: list[tuple[Slot, Draft, Entry]]
    replaced: list[tuple[Slot, Draft, Replacement]]
    known: list[tuple[Slot, Draft, Entry]]

    @property
    def entries(self) -> list[Entry]:
        """The catalog entries of the new records."""
        return [entry for _, _, entry in self.new]

    @property
    def replacements(self) -> list[Replacement]:
        return [replacement for _, _, replacement in self.replaced]

    @property
    def drafts(self) -> list[Draft]:
        """All drafts to write."""
        return [draft for _, draft, _ in [*self.new, *self.replaced]]


class Planner:
    """Makes plans.

    Args:
        clock: returns the time, in milliseconds since 1970.
    """

    def __init__(
        self, settings: Settings, catalog: Catalog, gateway: TierGateway, mounts: Mounts, clock: Callable[[], int]
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._gateway = gateway
        self._mounts = mounts
        self._clock = clock
        # a write waits for another change of the same names no longer than for a tier's answer
        self.patience = max((tier.timeout for tier in settings.managed), default=0.0)

    def slots(self, drafts: Iterable[ConditionalDraft]) -> tuple[list[Slot], list[Slot]]:
        """Date the drafts. Return the slots of the batch, and the slot of each draft, in order."""
        return slots_of(self._dated(drafts), self._is_another)

    def plan(self, slots: Iterable[Slot], scope: Scope) -> Plan:
        """Return what the slots become now. Each slot gets the id of its record.

        Raises:
            A2MError: SCOPE_DENIED; INVALID_PARAMS, with `data: {reason: "revision", revision}` if a page is not at the
                revision that its writer has seen.
        """
        plan = Plan([], [], [])
        for slot in slots:
            draft = slot.last
            entry = None if slot.id is None else self._catalog.records.get(slot.id)
            by_id = entry is not None
            if entry is None and draft.key is not None:
                entry = self._catalog.records.by_key(draft.owner, draft.key)
            if by_id and entry is not None and entry.owner is not None and entry.owner != draft.owner:
                raise A2MError(Code.SCOPE_DENIED, f"records: the id {entry.id!r} belongs to another owner")
            if entry is None and slot.is_conditional:
                self._refuse_unaccounted()
            is_done = slot.is_conditional and is_written(slot, entry)
            if entry is None:
                plan.new.append(self._new(slot, scope))
                continue
            slot.answer = entry.id
            rewrites = len(slot.drafts)
            if is_done:
                rewrites = 0
            elif by_id and not slot.is_conditional:
                rewrites = rewrites_of(slot, entry)
            if rewrites == 0:
                plan.known.append((slot, rewritten(draft, entry), entry))
            else:
                plan.replaced.append(self._replaced(slot, entry, rewrites, scope))
        return plan

    def _new(self, slot: Slot, scope: Scope) -> tuple[Slot, Draft, Entry]:
        draft = slot.last
        slot.answer = slot.id = slot.id or new_id()
        mount = self._mounts.of(slot.id)
        if mount is not None:
            problem = f"the id {slot.id!r} has the form of ids of the mount {mount.name!r}; choose another"
            raise invalid_params("records", problem)
        home = destination(draft.tier, self._settings, self._mounts, "tier").name
        refuse_unless_writable(scope, home, "records")
        whole = whole_of(draft, slot.id, slot.first.created_at, (draft.revision or 0) + len(slot.drafts) - 1)
        self._gateway.check(home, whole)
        return slot, whole, entry_of(whole, home)

    def _replaced(self, slot: Slot, entry: Entry, rewrites: int, scope: Scope) -> tuple[Slot, Draft, Replacement]:
        draft = slot.last
        whole = rewritten(draft, entry, rewrites)
        new = entry_of(whole, draft.tier or entry.home)
        for tier in (entry.home, new.home):
            refuse_unless_writable(scope, tier, f"records: the key {draft.key!r}")
        self._gateway.check(new.home, whole)
        return slot, whole, Replacement(new, entry.version, draft.salience)

    def _refuse_unaccounted(self) -> None:
        """Raise INTERNAL_ERROR if a tier may hold a page that the catalog does not have."""
        for tier in self._mounts.managed:
            if not self._catalog.tiers.is_scanned(tier.name):
                raise self._gateway.without(tier.name)

    def _is_another(self, draft: Draft) -> bool:
        """Return whether a draft's id belongs to a record that is not the one at its owner's key."""
        entry = None if draft.id is None else self._catalog.records.get(draft.id)
        return entry is not None and (entry.owner, entry.key) != (draft.owner, draft.key)

    def _dated(self, drafts: Iterable[ConditionalDraft]) -> list[ConditionalDraft]:
        """Return the drafts with their dates.

        The date is the clock's, but never before the newest record of the conversation, so that a conversation is
        replayed in the order in which it was written.
        """
        newest: dict[tuple[str | None, str], int] = {}
        dated = []
        for draft in drafts:
            now = self._clock()
            self._look_at_clock(now)
            conversation = None if draft.session is None else (draft.owner, draft.session)
            if conversation is not None and conversation not in newest:
                newest[conversation] = self._catalog.queries.newest_of(*conversation) or now
            if draft.created_at is None:
                # if the clock is behind, dates advance by a millisecond: the records themselves then keep the order
                moment = now if conversation is None or newest[conversation] <= now else after(newest[conversation])
                draft = msgspec.structs.replace(draft, created_at=render(moment))
            if conversation is not None:
                newest[conversation] = max(newest[conversation], parse(draft.created_at or ""))
            dated.append(draft)
        return dated

    def _look_at_clock(self, now: int) -> None:
        back = self._catalog.look_at_clock(now)
        if back > _SET_BACK:
            log.warning(
                "clock set back by %s: new records of a conversation are not dated before its newest record",
                timedelta(seconds=back // 1000),
            )


def new_id() -> str:
    """Return a fresh record id: 48 bits of time and 80 random bits, so that successive ids are close in an index."""
    return (int(time.time() * 1000).to_bytes(6, "big") + os.urandom(10)).hex()
