"""memory/remember and memory/forget: how records come to be, are replaced, and go (§4.2, §4.5).

A new record is two notes around one call: it is reserved before its tier hears of it, and becomes true when the tier
has it; it is acknowledged when that is durable. What was only reserved when a router ended is given up by the next.
What replaces a record is true when it is noted, and its tier catches up. All of a batch becomes true in one step, or
nothing of it does. A forget never waits for a tier that need not be asked: it is true when it is noted.

Conditions (`if_revision`) are looked at under the claim, so of several writers who have seen the same revision one is
first, and the others are refused. No tier hears of them.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from operator import itemgetter
from typing import Final

import msgspec
from msgspec import UNSET

from a2m_router.catalog.claims import Claim, Name, names_of
from a2m_router.catalog.entries import Entry, entry_of, former, is_as_it_is
from a2m_router.catalog.records import Replacement, unit_of
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.methods.asking import Asking
from a2m_router.methods.conditions import unmet, was_met
from a2m_router.methods.drafting import (
    Slot,
    complete_drafts,
    destination,
    embedding_mismatch,
    new_id,
    not_at_key,
    refuse_if_read_only,
    slots_of,
    width_of,
)
from a2m_router.methods.permission import passing_by, refuse_unless_writable
from a2m_router.methods.resolving import Resolving
from a2m_router.methods.selecting import selects, unaccounted, untrue
from a2m_router.placement.core import Core
from a2m_router.placement.moves import Moves
from a2m_router.placement.reconciler import InTheWay
from a2m_router.process.budget import left
from a2m_router.protocol.wire.errors import (
    CALLERS_ERRORS,
    DISK_FULL,
    FILE_GONE,
    RETRY_AFTER,
    A2MError,
    Code,
    disk_failed,
    disk_reason,
    invalid_params,
    no_room,
    overloaded,
)
from a2m_router.protocol.wire.events import Event, Forgotten, Place, Written, named
from a2m_router.protocol.wire.messages import ConditionalRemember, Forget
from a2m_router.protocol.wire.records import ConditionalDraft, Draft, digest
from a2m_router.protocol.wire.timestamps import after, parse, render
from a2m_router.ranking.text import query_tokens
from a2m_router.tiers.link import Overloaded, TierDown
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.together import Failure, outcomes

# A clock that is corrected by less is not worth a word, milliseconds.
_SET_BACK: Final = 1000

log = logging.getLogger(__name__)


class Overtaken(Exception):
    """What a write depended on has changed before it could become true; nothing was written."""


class _Plan(msgspec.Struct):
    """What some slots come to, under a claim: new records, replacements of known ones, and records that are known."""

    new: list[tuple[Slot, Draft, Entry]]
    replaced: list[tuple[Slot, Draft, Replacement]]
    known: list[tuple[Slot, Draft, Entry]]


class Writing:
    """Carries out writes and forgets.

    Args:
        tell: logs an event.
        clock: the time, in milliseconds since 1970.
        changed: called after every write, so that the policy looks at what it filled.
    """

    def __init__(
        self,
        settings: Settings,
        core: Core,
        moves: Moves,
        resolving: Resolving,
        asking: Asking,
        mounts: Mounts,
        tell: Callable[[Event], None],
        clock: Callable[[], int],
        changed: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._copies = core.copies
        self._guard = core.guard
        self._reconciler = core.reconciler
        self._moves = moves
        self._resolving = resolving
        self._asking = asking
        self._mounts = mounts
        self._tell = tell
        self._clock = clock
        self._changed = changed
        self._widths: Counter[int] = Counter()  # of the vectors in batches under way
        # how long a write waits for another change of the same ids, keys or groups: no longer than for an answer
        self._patience = max((tier.timeout for tier in settings.managed), default=0.0)

    async def remember(
        self, params: ConditionalRemember, scope: Scope, still: Callable[[], bool] | None = None
    ) -> list[str]:
        """Write a batch, all of it or nothing; the ids in the order of the records (§4.2).

        With `still`, only as long as that holds: it is asked in the step in which the batch becomes true, and if it
        does not hold, Overtaken is raised and nothing was written.

        Raises A2MError as `complete_drafts` does; INVALID_PARAMS with `data: {reason: "revision", revision}` where a
        page is not at the revision that its writer has seen; INTERNAL_ERROR with `data: {tier, reason, retry_after}`
        where a tier does not take its part.
        """
        drafts = complete_drafts(params, scope, self._settings, self._mounts, self._catalog.vectors.dimensions())
        slots, places = slots_of(self._dated(drafts), self._is_another)
        await self._take_groups_along(slots, scope)
        written = False
        while not written:
            claim, plan = await self._claim(slots, scope)
            written = await self._write(plan, claim, still)
        self._changed()
        return [slot.answer for slot in places if slot.answer is not None]

    async def forget(self, params: Forget, scope: Scope) -> int:
        """How many records were forgotten; gone for every reader when this returns (§4.5). Mounts are passed by.

        Raises READ_ONLY where there is nothing else; INVALID_PARAMS without a selector, and for the id of a mount's
        record. If a tier that must be asked does not answer, nothing is forgotten.
        """
        refuse_if_read_only(self._mounts)
        if params.query is not None and not query_tokens(params.query):
            raise invalid_params("query", "expected words to search for; this one holds none")
        if not selects(params):
            raise invalid_params(
                "params",
                "expected ids, a query, a tier, a where with a condition, or a key_prefix: forgetting everything takes "
                "more than an empty selector",
            )
        ids = await self._resolving.ids(params, scope)
        ids = self._changeable(ids, params, scope)
        struck = self._catalog.forget(ids, scope, self._clock())
        records = named([(entry.id, Place(entry.owner, entry.home)) for entry in struck])
        self._tell(Forgotten(at=self._clock(), by=scope.owner, records=records))
        self._reconciler.wake()  # it waits for the note to be durable itself, so it may be told at once
        try:
            await self._catalog.synced()
        except OSError as failure:
            raise _unsure(failure, "what was forgotten is gone, but may be back") from failure
        return len(struck)

    def _changeable(self, ids: list[str], params: Forget, scope: Scope) -> list[str]:
        """Those of the ids that `params` mean and `scope` may forget. Raises SCOPE_DENIED for what it names and may
        not, and INTERNAL_ERROR for ids that may yet turn out to be such."""
        if params.tier is not None:
            refuse_unless_writable(scope, params.tier, "tier")
        for tier in self._catalog.tiers.unscanned():
            if not scope.writes_to(tier):
                # one that is another's is like one that nobody has heard of
                seen = [
                    entry
                    for entry in self._catalog.records.find(ids).values()
                    if self._catalog.queries.sees(scope, entry)
                ]
                if len(seen) < len(set(ids)):
                    raise unaccounted(tier, self._copies.why_unaccounted(tier))
        return passing_by(scope, ids, params.ids or (), self._catalog)

    async def _take_groups_along(self, slots: Sequence[Slot], scope: Scope) -> None:
        """A replacement that names another tier moves its record there; if that stays in its group, the whole group."""
        if not any(slot.last.tier is not None and slot.last.group is not None for slot in slots):
            return
        for slot, _, _ in self._plan(slots, scope).replaced:  # a batch that is refused moves nothing
            draft = slot.last
            # a forget in the middle of a move makes it let go, and leaves less to be moved
            while draft.tier is not None and (members := self._members_left_behind(draft, draft.tier)):
                refuse_unless_writable(scope, members[0].home, "records")
                moved = await self._moves.carry_out([unit_of(members)], members[0].home, draft.tier)
                if moved.is_broken:
                    problem = f"the record's group could not move: {moved.reason}; nothing was written"
                    raise untrue(members[0].home, problem)
                if moved.reason is not None:
                    raise _answer(TierDown(draft.tier, f"the record's group could not move: {moved.reason}", 1.0, None))

    def _members_left_behind(self, draft: Draft, tier: str) -> list[Entry]:
        """The group of the record that `draft` would move to `tier` alone."""
        entry = None if draft.key is None else self._catalog.records.by_key(draft.owner, draft.key)
        if entry is None or entry.home == tier or draft.group is None or draft.group != entry.group:
            return []
        members = self._catalog.records.unit(entry)
        return list(members) if len(members) > 1 else []

    def _is_another(self, draft: Draft) -> bool:
        """Whether a draft's id is that of a record, and not of the one at its owner's key."""
        entry = None if draft.id is None else self._catalog.records.get(draft.id)
        return entry is not None and (entry.owner, entry.key) != (draft.owner, draft.key)

    def _dated(self, drafts: Iterable[ConditionalDraft]) -> list[ConditionalDraft]:
        """The drafts with the moment of each: the clock's, but never before the newest of its own conversation, so that
        a conversation is replayed as it was written."""
        newest: dict[tuple[str | None, str], int] = {}
        dated = []
        for draft in drafts:
            now = self._clock()
            self._look_at_clock(now)
            conversation = None if draft.session is None else (draft.owner, draft.session)
            if conversation is not None and conversation not in newest:
                newest[conversation] = self._catalog.queries.newest_of(*conversation) or now
            if draft.created_at is None:
                # a millisecond later each, where the clock is behind: their order is then in the records themselves
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
                "the clock was set back by %s: a conversation's new records are not dated before those that it has",
                timedelta(seconds=back // 1000),
            )

    # --- under which claim, and what it comes to

    async def _claim(self, slots: Sequence[Slot], scope: Scope) -> tuple[Claim, _Plan]:
        """A claim on all that the slots touch, and what they come to under it."""

        def look() -> tuple[set[Name], _Plan]:
            plan = self._plan(slots, scope)
            return self._names(plan), plan

        try:
            return await self._catalog.claims.take_touched(look, lambda: min(self._patience, left()))
        except TimeoutError:
            raise A2MError(
                Code.INTERNAL_ERROR,
                "an earlier change of the same records has not been settled by its tier yet; try again",
                {"reason": "unsettled", "retry_after": self._patience},
            ) from None

    def _plan(self, slots: Sequence[Slot], scope: Scope) -> _Plan:
        plan = _Plan([], [], [])
        for slot in slots:
            draft = slot.last
            entry = None if slot.id is None else self._catalog.records.get(slot.id)
            by_id = entry is not None
            if entry is None and draft.key is not None:
                entry = self._catalog.records.by_key(draft.owner, draft.key)
            if by_id and entry is not None and entry.owner is not None and entry.owner != draft.owner:
                raise A2MError(Code.SCOPE_DENIED, f"records: the id {entry.id!r} belongs to another owner")
            is_done = slot.is_conditional and self._is_done(slot, entry)
            if entry is None:
                slot.id = slot.id or new_id()
                mount = self._mounts.of(slot.id)
                if mount is not None:
                    raise invalid_params(
                        "records",
                        f"the id {slot.id!r} would be one of {mount.name!r}, which is mounted; choose another",
                    )
                home = destination(draft.tier, self._settings, self._mounts, "tier").name
                refuse_unless_writable(scope, home, "records")
                whole = _whole(draft, slot.id, slot.first.created_at, (draft.revision or 0) + len(slot.drafts) - 1)
                self._copies.check(home, whole)
                plan.new.append((slot, whole, entry_of(whole, home)))
                continue
            rewrites = len(slot.drafts)
            if is_done:
                rewrites = 0
            elif by_id and not slot.is_conditional:
                rewrites = _rewrites(slot.drafts, entry)
            if rewrites == 0:
                plan.known.append((slot, _whole(draft, entry.id, render(entry.created_at), entry.revision), entry))
            else:
                whole = _whole(draft, entry.id, render(entry.created_at), entry.revision + rewrites)
                new = entry_of(whole, draft.tier or entry.home)
                for tier in (entry.home, new.home):
                    refuse_unless_writable(scope, tier, f"records: the key {draft.key!r}")
                self._copies.check(new.home, whole)
                plan.replaced.append((slot, whole, Replacement(new, entry.version, draft.salience)))
        return plan

    def _is_done(self, slot: Slot, page: Entry | None) -> bool:
        """Whether a slot whose conditions are not met any more has been written before, and is there: then the call is
        a repeated one. Raises INVALID_PARAMS if they are not met and it is not; INTERNAL_ERROR if that cannot be told
        yet."""
        draft = slot.last
        assert draft.key is not None, "a condition is about a key"
        if page is None:
            self._asking.refuse_unaccounted(self._settings.managed)
        elif (page.owner, page.key) != (draft.owner, draft.key):
            raise not_at_key(slot.places[-1], draft, f"there is a record with the id {page.id!r}")
        error = unmet(slot, page)
        if error is None:
            return False
        if page is not None and was_met(slot, page):
            there = _whole(draft, page.id, render(page.created_at), page.revision)
            if digest(there) == page.digest:
                return True
        raise error

    def _names(self, plan: _Plan) -> set[Name]:
        names: set[Name] = set()
        entries = [entry for _, _, entry in plan.new + plan.known] + [r.entry for _, _, r in plan.replaced]
        before = self._catalog.records.find(r.entry.id for _, _, r in plan.replaced)
        for entry in [*entries, *before.values()]:
            names.update(names_of(entry))
        for tier, there in _by_home(entries).items():
            names |= self._reconciler.names_in_the_way(tier, there)
        return names

    # --- the walk

    async def _write(self, plan: _Plan, claim: Claim, still: Callable[[], bool] | None) -> bool:
        """Carry out a plan under its claim, which is released at the end, or when none of its calls is in doubt.

        Returns False if a scan or a forget has brought about what the plan did not know: it has to be made anew.
        """
        new = [entry for _, _, entry in plan.new]
        replacements = [replacement for _, _, replacement in plan.replaced]
        redo = {replacement.entry.id: draft for _, draft, replacement in plan.replaced}
        drafts = [draft for _, draft, _ in [*plan.new, *plan.replaced]]
        is_true = False
        try:
            async with self._guard.change(claim) as change:
                await self._check_known(plan)
                self._check_counted(plan)
                await self._make_way(new + [r.entry for r in replacements])
                await self._refuse_what_is_there(plan)
                if self._is_outdated(plan) or self._is_overtaken(replacements):
                    return False
                _check(still)
                with self._width(drafts):
                    if new:
                        self._catalog.reserve(new)
                        change.note = partial(self._catalog.abandon, new)
                        change.failures += await self._tell_tiers(
                            [(draft, entry.home) for _, draft, entry in plan.new], are_all=not replacements
                        )
                    for failure in change.failures:
                        raise failure
                    await self._catalog.writable()
                    _check(still)
                    if self._is_overtaken(replacements):
                        return False
                    vectors = {draft.id: draft.embedding for draft in drafts if draft.id and draft.embedding}
                    lost = self._catalog.commit_write(new, replacements, vectors, redo)
                    is_true, change.note = True, None
                    self._tell_written(plan, lost)
                # what is acknowledged outlives a power cut; so must what is known: the disk may have refused it before
                await self._catalog.synced()
        except InTheWay:
            return False
        except OSError as failure:
            sentence = "what was written can be read, but may be gone"
            raise _unsure(failure, sentence) if is_true else _answer(failure) from failure
        except (A2MError, TierDown) as failure:
            raise _answer(failure) from failure
        for slot, _, entry in plan.new + plan.known:
            slot.answer = entry.id
        for slot, _, replacement in plan.replaced:
            # one that was forgotten meanwhile was written before that, and is gone
            slot.answer = replacement.entry.id
        return True

    def _tell_written(self, plan: _Plan, lost: Sequence[Replacement]) -> None:
        """An event for each record written, in the order of the batch. A replacement that was forgotten before it
        became true is no news: the forget has been told."""
        gone = {replacement.entry.id for replacement in lost}
        written = [(slot.place, entry) for slot, _, entry in plan.new]
        written += [(slot.place, r.entry) for slot, _, r in plan.replaced if r.entry.id not in gone]
        for _, entry in sorted(written, key=itemgetter(0)):
            self._tell(
                Written(
                    at=self._clock(),
                    id=entry.id,
                    place=Place(entry.owner, entry.home),
                    session=entry.session,
                    key=entry.key,
                    revision=entry.revision,
                )
            )

    async def _check_known(self, plan: _Plan) -> None:
        """Known means readable: each known record is read at its home. One that its home has lost is written there anew
        if the caller brings it back as it was."""
        behind = self._catalog.redo.behind(entry.id for _, _, entry in plan.known)  # these are readable here
        homes = _by_home([entry for _, _, entry in plan.known if entry.id not in behind])
        found = await outcomes(
            [partial(self._copies.read, home, [e.id for e in there], embeddings=True) for home, there in homes.items()]
        )
        wrong: dict[str, str] = {}
        for (home, entries), copies in zip(homes.items(), found, strict=True):
            if not isinstance(copies, dict):
                raise _as_down(home, copies)
            for entry in entries:
                if entry.id not in copies:
                    wrong[entry.id] = f"it has lost the record {entry.id!r}; write it anew as it was, or forget it"
                elif not is_as_it_is(copies[entry.id], entry):
                    wrong[entry.id] = former([entry.id])
                elif digest(copies[entry.id]) != entry.digest:
                    raise untrue(home, f"it holds the record {entry.id!r} otherwise than it was given it; forget it")
        for _, draft, entry in plan.known:
            if entry.id not in wrong:
                continue
            if digest(draft) != entry.digest:
                raise untrue(entry.home, f"{wrong[entry.id]}; nothing was written")
            for unkept in (await self._copies.write_seen(entry.home, [draft])).values():
                raise TierDown(entry.home, unkept, 60.0, None)

    def _check_counted(self, plan: _Plan) -> None:
        """Raises TierDown where a tier may hold, or be about to do, what an earlier router was writing when its power
        was cut, under an id that a caller has chosen, or at an owner's key. What has neither is nothing's successor."""
        for slot, _, entry in plan.new:
            if entry.home in self._catalog.opening.uncounted and (slot.first.id is not None or entry.key is not None):
                raise TierDown(entry.home, self._copies.why_unaccounted(entry.home), 1.0, None)

    async def _make_way(self, entries: Sequence[Entry]) -> None:
        """See that nothing is in the way of these records where they are going, before anything is noted of them."""
        for tier, there in _by_home(entries).items():
            self._reconciler.check(tier)
            try:
                await self._reconciler.clear(tier, there)
            except A2MError as refused:
                raise _as_down(tier, refused) from refused

    async def _refuse_what_is_there(self, plan: _Plan) -> None:
        """A lesser server may hold what others have written to it, under an id that a caller has chosen, or that comes
        to it with a replacement, too. Raises TierDown for that, before anything is noted that would have it cleared
        away, and INVALID_PARAMS for what is another federation's; but what is noted as forgotten, or as given up, has
        landed late, and is cleared away."""
        home = {
            id: entry.home for id, entry in self._catalog.records.find(r.entry.id for _, _, r in plan.replaced).items()
        }
        coming = [r.entry for _, _, r in plan.replaced if home.get(r.entry.id, r.entry.home) != r.entry.home]
        chosen = [entry for slot, _, entry in plan.new if slot.first.id is not None]
        for tier, there in _by_home(coming + chosen).items():
            if self._copies.mode(tier).native:
                continue
            found, others = await self._copies.there(tier, [entry.id for entry in there])
            for id, whose in others.items():
                problem = f"{tier!r} holds a record with the id {id!r} already, {whose}; choose another id, or tier"
                raise invalid_params("records", problem)
            late = [entry for entry in there if entry.id in found and self._catalog.tombstones.is_forgotten(entry.id)]
            for id in found.keys() - {entry.id for entry in [*late, *coming]}:
                raise TierDown(tier, f"it holds {id!r} already, of which nothing is accounted for", 60.0, None)
            if late:
                self._catalog.note_unwanted(late, tier)
                await self._reconciler.clear(tier, late)

    def _is_outdated(self, plan: _Plan) -> bool:
        """Whether a scan has taken a record into the account, which needs no claim, that the plan takes for new."""
        return any(
            self._catalog.records.find([entry.id])
            or (entry.key is not None and self._catalog.records.by_key(entry.owner, entry.key) is not None)
            for _, _, entry in plan.new
        )

    def _is_overtaken(self, replacements: Sequence[Replacement]) -> bool:
        """Whether a scan, which needs no claim, has changed a record that is to be replaced: it has another home now,
        or a newer copy of it was found. One that was forgotten is gone, and stays so."""
        now = self._catalog.records.find(replacement.entry.id for replacement in replacements)
        return any(r.entry.id in now and now[r.entry.id].version != r.replaces for r in replacements)

    @contextmanager
    def _width(self, drafts: Sequence[Draft]) -> Iterator[None]:
        """The width of a batch's vectors, while it is being written: until the first is there, it holds for no others.

        Raises EMBEDDING_MISMATCH if the federation's vectors, or those of a batch under way, have another one.
        """
        width = width_of(drafts)
        fixed = self._catalog.vectors.dimensions() or next(iter(self._widths), None)
        if width is not None and fixed is not None and width != fixed:
            raise embedding_mismatch("records", fixed, width)
        if width is not None:
            self._widths[width] += 1
        try:
            yield
        finally:
            if width is not None:
                self._widths[width] -= 1
                self._widths += Counter()  # drops what has come down to zero

    async def _tell_tiers(self, written: Sequence[tuple[Draft, str]], *, are_all: bool) -> list[Failure]:
        """Write to all tiers at once. What was reserved becomes durable before that, where one call is not all of the
        batch: else, after a power cut, a part of it could be all that is left, and a scan would find it."""
        by_tier: dict[str, list[Draft]] = {}
        for draft, tier in written:
            by_tier.setdefault(tier, []).append(draft)
        calls: list[Callable[[], Awaitable[None]]] = [
            partial(self._copies.write_new, tier, drafts) for tier, drafts in by_tier.items()
        ]
        is_one = len(calls) == 1 and all(self._copies.is_one_call(tier, drafts) for tier, drafts in by_tier.items())
        if not (are_all and is_one):
            await self._catalog.synced()
        found = await outcomes(calls)
        return [
            failure if isinstance(failure, A2MError) and failure.code in CALLERS_ERRORS else _as_down(tier, failure)
            for tier, failure in zip(by_tier, found, strict=True)
            if failure is not None
        ]


def _check(still: Callable[[], bool] | None) -> None:
    if still is not None and not still():
        raise Overtaken


def _whole(draft: ConditionalDraft, id: str, created_at: str | None, revision: int) -> Draft:
    """The draft as a tier is given it."""
    return msgspec.structs.replace(
        draft,
        id=id,
        content=draft.content or "",
        created_at=created_at,
        revision=revision,
        tier=None,
        if_revision=UNSET,
    )


def _rewrites(drafts: Iterable[ConditionalDraft], entry: Entry) -> int:
    """How often these writes under a known id replace its record: each that carries its owner's key, with another
    content. The same key under another owner is another key."""
    rewrites = 0
    current = entry.digest
    for draft in drafts:
        same = digest(_whole(draft, entry.id, render(entry.created_at), entry.revision + rewrites))
        if draft.key is not None and (draft.key, draft.owner) == (entry.key, entry.owner) and same != current:
            rewrites += 1
            current = digest(_whole(draft, entry.id, render(entry.created_at), entry.revision + rewrites))
    return rewrites


def _by_home(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    homes: dict[str, list[Entry]] = {}
    for entry in entries:
        homes.setdefault(entry.home, []).append(entry)
    return homes


def _as_down(tier: str, failure: Failure) -> Failure:
    """A tier's refusal as what it is to a caller: the federation's own trouble, not the caller's."""
    if not isinstance(failure, A2MError):
        return failure
    reason = no_room(failure)
    if reason is not None:
        return TierDown(tier, reason, RETRY_AFTER, None)  # what passes, and what programs know by its name
    return TierDown(tier, f"it refuses: {failure.message}", 60.0, None)


def _unsure(failure: OSError, sentence: str) -> A2MError:
    """What a caller hears of a change that is true, and may not outlive a power cut."""
    reason = disk_reason(failure)
    if reason == FILE_GONE:
        return A2MError(
            Code.INTERNAL_ERROR,
            f"the catalog's file cannot be relied on: {reason}: {sentence} when the router ends; put it back",
            {"reason": reason},
        )
    what = "is full" if reason == DISK_FULL else f"failed: {reason}"
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the catalog's disk {what}: {sentence} after a power cut; repeat the call when the disk is well",
        {"reason": reason},
    )


def _answer(failure: Failure) -> A2MError:
    """What a caller hears of a failed write."""
    if isinstance(failure, Overloaded):
        sentence = f"the tier {failure.tier!r} has as many calls under way as it takes; nothing was written"
        return overloaded(sentence, {"tier": failure.tier})
    if isinstance(failure, TierDown):
        return A2MError(
            Code.INTERNAL_ERROR,
            f"the tier {failure.tier!r} did not take the write: {failure.reason}; nothing was written",
            {"tier": failure.tier, "reason": failure.reason, "retry_after": failure.retry_after},
        )
    if isinstance(failure, OSError):
        return disk_failed(failure, "the catalog's")
    return failure
