"""The reconciler: brings the copies in each managed tier to the state that the catalog says.

A tier is owed two kinds of work. A stray is a copy that is to be absent. A pending replacement (`redo`, §3.6) is a
record that is true as it stands in the catalog, synced, and that its tier does not hold yet; readers get it from the
catalog. One task a tier works off both, strays first: a tier that replaces by key would put the record in the place of
a copy that is left at its key.

Rules:
- a copy that a move left behind, or was to bring about, goes only after the record was read at its home in the same
  round, as it is. If the home has lost it, or holds it in a former state, the copy becomes the home, but only with the
  digest that the catalog holds;
- copies of what was forgotten, replaced or given up go without asking. A record that was set aside stays, and is in the
  way;
- a copy in a record's home is never removed, and no copy goes while a read is under way that may still need it;
- a pending replacement is sent to its tier, read back and compared. A server that does not replace by key forgets the
  old copy first, and is seen to have done so. When every read has ended that may have looked at the tier before, the
  catalog deletes its own copy. A crash before that leaves the record in the catalog, and the work is done once more;
- no copy goes, and nothing is sent, before the note that asks for it is synced;
- a record that somebody else has claimed is left for later. Its release wakes the tier's task.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, TypeVar

import anyio

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, Name, record_names
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.strays import NotedStray
from a2m_router.config.settings import Tier
from a2m_router.placement.guard import Guard
from a2m_router.process.alerts import Alerts
from a2m_router.process.waiting import doubling
from a2m_router.protocol.wire.errors import A2MError, no_room
from a2m_router.protocol.wire.records import Record, digest, draft_of
from a2m_router.tiers.answers import Untrusted
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import AnswerTooLong, TierDown

log = logging.getLogger(__name__)

# why a tier is not changed for a while after a router has died
MAY_STILL_LAND: Final = "a call of an earlier router may still land there"

# Strays that one step works on; and pending replacements, all of which stay claimed while one call is in doubt.
_PAGE: Final = 200
_FEW: Final = 20

# Seconds between two rounds of a tier in which something failed.
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

# copies that go only when the record was read at its home
_SEEN_FIRST: Final = frozenset({Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL})

_Item = TypeVar("_Item", NotedStray, Entry)


class InTheWay(Exception):
    """What was claimed to clear the way is not all that is in it any more; claim anew."""


class _Queue:
    """When one tier's task is to look for work. `ended` is set at the end of a round; `idle`, too, if nobody woke the
    task meanwhile. What failed is not tried again before its time, unless it is `hurried`."""

    def __init__(self) -> None:
        self.wanted = anyio.Event()
        self.hurried = anyio.Event()
        self.is_working = False
        self.ended = anyio.Event()
        self.idle = anyio.Event()


class Reconciler:
    """Reconciles the managed tiers of one catalog."""

    def __init__(self, catalog: Catalog, copies: Copies, guard: Guard, tiers: Iterable[Tier]) -> None:
        self._catalog = catalog
        self._copies = copies
        self._guard = guard
        self._queues = {tier.name: _Queue() for tier in tiers}
        self._held: dict[str, float] = {}  # tiers where an earlier router's calls may still land, and until when
        self._passed_over: dict[Name, set[str]] = {}  # names that others had claimed, and the tiers that wait for them
        self._is_running = False
        self._alerts = Alerts(log)

    def wake(self) -> None:
        """There may be work. A tier where something has failed waits for its time all the same."""
        for queue in self._queues.values():
            queue.wanted.set()

    def retry(self, *tiers: str) -> None:
        """What failed in `tiers` may work now; in all tiers without a name."""
        for tier in tiers or self._queues:
            self._queues[tier].wanted.set()
            self._queues[tier].hurried.set()

    def hold(self, tier: str, seconds: float) -> None:
        """Change nothing in `tier` for so long: a call of an earlier router may still land there. Without its note
        nobody would remove such a copy, and a replacement could be undone by it."""
        self._held[tier] = anyio.current_time() + seconds
        self.retry(tier)

    def held_for(self, tier: str) -> float:
        """The seconds for which nothing is changed in `tier` yet; 0 if it is not held."""
        return max(0.0, self._held.get(tier, 0.0) - anyio.current_time())

    async def run(self) -> None:
        """Work off what each tier is owed, whenever woken. Ends only by being cancelled."""
        self._is_running = True
        try:
            with self._catalog.claims.on_release(self._on_release):
                async with anyio.create_task_group() as tasks:
                    for tier in self._queues:
                        tasks.start_soon(self._keep, tier)
                    await anyio.sleep_forever()
        finally:
            self._is_running = False

    async def idle(self) -> None:
        """Return when each tier's task has finished a round, and found nothing new to do."""
        queues = self._queues.values()
        is_idle = False
        while not is_idle:
            self.retry()
            for idle in [queue.idle for queue in queues]:
                await idle.wait()
            is_idle = not any(queue.is_working or queue.wanted.is_set() for queue in queues)

    async def replaced(self, tier: str, ids: Iterable[str], seconds: float) -> None:
        """Return when `tier` holds what replaces these records, or has not taken it, or after so many seconds."""
        ids = list(ids)
        with anyio.move_on_after(seconds):
            for _ in range(2):  # the round that is under way may have looked before
                if self._is_running and self._catalog.redo.behind(ids):
                    self.retry(tier)
                    await self._queues[tier].ended.wait()

    async def remove_strays(self, tier: str) -> str | None:
        """Remove all strays of `tier` that can be removed now. Returns why others stay; None if only a release or a
        tier that comes up is waited for, which wake the task. Raises TierDown, A2MError and OSError."""
        after, problem = "", None
        while page := self._catalog.strays.removable(tier, after, _PAGE):
            after = page[-1].id
            # before anything is claimed: a long read must not keep writers waiting
            await self._catalog.readers.grace()
            mine, claims = self._claim(tier, page)
            async with self._guard.change(*claims, wakes=False):
                problem = await self._remove(tier, self._catalog.strays.still_noted(tier, mine)) or problem
        return problem

    def check(self, tier: str, *, writes: bool = True) -> None:
        """Raises TierDown unless `tier` can be reached and all that it holds is known; for `writes`, unless its server
        takes any, too.

        Nothing is written to it, or moved from it, before: a member of a group, or an older copy, may be undiscovered.
        """
        link = self._copies.link(tier)
        if link.status != "up":
            raise TierDown(tier, link.reason or "it is still starting", 1.0, None)
        if not self._catalog.tiers.is_scanned(tier) or (writes and link.barred is not None):
            raise TierDown(tier, self._copies.why_unaccounted(tier), 1.0, None)

    async def clear(self, tier: str, entries: Sequence[Entry]) -> None:
        """Make sure that no stray of these ids, or at these owners' keys, is left in `tier`, before they are written.

        The caller holds claims on all of them (`names_in_the_way`). Raises TierDown if one of them stays, and InTheWay
        if another one, which the caller has no claim on, has come since: a forget claims nothing.
        """
        strays = self._catalog.strays.in_the_way(tier, entries)
        if strays:
            wait = self.held_for(tier)
            if wait:
                raise TierDown(tier, MAY_STILL_LAND, wait, None)
            await self._catalog.readers.grace()
            await self._remove(tier, self._catalog.strays.still_noted(tier, strays))
            left = {stray.id for stray in self._catalog.strays.in_the_way(tier, entries)}
            if not left <= {stray.id for stray in strays}:
                raise InTheWay
            if left:
                raise TierDown(tier, "an older copy of a record could not be removed yet", 1.0, None)

    def names_in_the_way(self, tier: str, entries: Sequence[Entry]) -> set[Name]:
        """What has to be claimed, beside the entries themselves, to `clear` their way into `tier`."""
        strays = self._catalog.strays.in_the_way(tier, entries)
        return {name for stray in strays for name in record_names(stray.id, stray.owner, stray.key)}

    # --- one tier's task

    async def _keep(self, tier: str) -> None:
        queue = self._queues[tier]
        waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)
        while True:
            queue.wanted, queue.hurried, queue.is_working = anyio.Event(), anyio.Event(), True
            problem = await self._round(tier)
            queue.is_working = False
            queue.ended.set()
            queue.ended = anyio.Event()
            if problem is not None:
                sentence = f"tier={tier} copies are not up to date, will retry: {problem}"
                self._alerts.begin(tier, logging.WARNING, sentence, cause=problem)
            elif not self._is_owed(tier):
                self._alerts.end(tier, f"tier={tier} copies are up to date")
            if not queue.wanted.is_set():
                queue.idle.set()
                queue.idle = anyio.Event()
            if problem is None:
                waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)
                with anyio.move_on_after(self.held_for(tier) or None):
                    await queue.wanted.wait()
            else:
                with anyio.move_on_after(next(waits)):
                    await queue.hurried.wait()

    async def _round(self, tier: str) -> str | None:
        """Work off all that can be done now; returns why something is left that will not wake the task by itself."""
        link = self._copies.link(tier)
        if link.status != "up" or link.barred is not None:
            return None  # that it is taken into the account wakes the task
        if self.held_for(tier):
            return None
        problems = []
        for work in (self.remove_strays, self._replace):
            try:
                problems.append(await work(tier))
            except (TierDown, A2MError, OSError) as problem:
                problems.append(str(problem))
        return next((problem for problem in problems if problem is not None), None)

    def _is_owed(self, tier: str) -> bool:
        return bool(self._catalog.strays.removable(tier, "", 1) or self._catalog.redo.ids_in(tier))

    def _claim(self, tier: str, items: Iterable[_Item]) -> tuple[list[_Item], list[Claim]]:
        """Those of the items that nobody else has claimed, and the claims on them. A release of what is passed over
        wakes the tier's task."""
        mine: list[_Item] = []
        claims: list[Claim] = []
        names: set[Name] = set()  # several may be at one key
        for item in items:
            wanted: set[Name] = set(record_names(item.id, item.owner, item.key)) - names
            claim = self._catalog.claims.take_if_free(wanted)
            if claim is None:
                for name in wanted:
                    self._passed_over.setdefault(name, set()).add(tier)
            else:
                names |= wanted
                mine.append(item)
                claims.append(claim)
        return mine, claims

    def _on_release(self, names: frozenset[Name]) -> None:
        for tier in {tier for name in names for tier in self._passed_over.pop(name, ())}:
            self._queues[tier].wanted.set()

    # --- copies that are to be absent

    async def _remove(self, tier: str, strays: Sequence[NotedStray]) -> str | None:
        """Remove those copies that may go; returns why others stay, as `remove_strays` does. The caller has claimed
        them, and has waited for the reads under way to end."""
        entries = self._catalog.records.find(stray.id for stray in strays)
        at_home = {stray.id for stray in strays if stray.id in entries and entries[stray.id].home == tier}
        self._catalog.strike(tier, at_home)
        superseded = [
            entries[stray.id]
            for stray in strays
            if stray.kind in _SEEN_FIRST and stray.id in entries and stray.id not in at_home
        ]
        seen, problem = await self._seen_at_home(superseded, tier)
        unwanted = {
            stray.id
            for stray in strays
            if stray.kind != Stray.ASIDE and (stray.id not in entries or stray.kind not in _SEEN_FIRST)
        }
        leaving = (seen.keys() | unwanted) - at_home
        if leaving:
            # a note that a power cut could take back must not cost the copy it would need then
            await self._catalog.synced()
            gone = await self._copies.remove(tier, sorted(leaving))
            self._catalog.strike(tier, gone)
            if not leaving <= gone:
                problem = f"its server does not forget {min(leaving - gone)!r}, though it says so"
            if not self._copies.mode(tier).native:
                await self._restore(seen, tier)
        return problem

    async def _restore(self, seen: Mapping[str, Record], tier: str) -> None:
        """Two tiers may lead to one server without saying so: then what was removed from the one was the record in the
        other. It is written back."""
        entries = self._catalog.records.find(seen)
        for home in dict.fromkeys(entry.home for entry in entries.values()):
            there = [id for id, entry in entries.items() if entry.home == home]
            left = await self._copies.read(home, there)
            lost = [seen[id] for id in there if id not in left]
            if lost:
                await self._copies.write_new(home, [draft_of(record) for record in lost])
                log.error("%s and %s seem to lead to one server; give each a store of its own", tier, home)

    async def _seen_at_home(self, entries: Sequence[Entry], tier: str) -> tuple[dict[str, Record], str | None]:
        """Those of the records that left `tier` which were read at their homes just now, and are there as they should
        be, vectors included; and why others were not seen, as `remove_strays` returns it."""
        seen: dict[str, Record] = {}
        problem = None
        for home in dict.fromkeys(entry.home for entry in entries):
            there = [entry for entry in entries if entry.home == home]
            try:
                found = await self._copies.read(home, [entry.id for entry in there], embeddings=True)
                # a pending replacement is not lost: its end wakes the tasks
                pending = self._catalog.redo.behind(entry.id for entry in there)
                lost = []
                for entry in there:
                    copy = found.get(entry.id)
                    if copy is not None and (entry.id in pending or digest(copy) == entry.digest):
                        seen[entry.id] = copy
                    elif entry.id not in pending:
                        lost.append(entry)
                if lost and not await self._bring_home(lost, tier, gone=[e for e in lost if e.id not in found]):
                    problem = "a copy belongs to no record any more"
            except (TierDown, A2MError) as failure:
                log.info("%s: copies stay until %s can be read: %s", tier, home, failure)
                if self._copies.link(home).status == "up":  # else its coming back wakes us
                    problem = str(failure)
        return seen, problem

    async def _bring_home(self, lost: Sequence[Entry], tier: str, gone: Sequence[Entry]) -> bool:
        """For each record that its home does not hold as it should: if `tier` holds it with the catalog's digest,
        `tier` becomes its home. If it is `gone` from its home, an older copy in `tier` becomes the record, or the
        record is lost. If its home holds a former state, nothing changes.

        Returns False if another round can remove a copy."""
        copies = await self._copies.read(tier, [entry.id for entry in lost], embeddings=True)
        is_done = True
        for entry in lost:
            copy = copies.get(entry.id)
            if copy is not None and self._catalog.come_home(entry.id, digest(copy), tier, copy.embedding):
                log.error("%s has lost %r; its copy in %s is its home again", entry.home, entry.id, tier)
            elif copy is None:
                self._catalog.strike(tier, [entry.id])
                if entry in gone and self._catalog.tiers.is_scanned(entry.home) and self._catalog.lose([entry]):
                    log.error("%s: a record that should live there is gone: %s", entry.home, entry.id)
            elif entry in gone and self._catalog.fall_back(entry, copy, tier):
                log.error("%s has lost %r; %s holds it as it once was, which it is now", entry.home, entry.id, tier)
            elif not self._catalog.records.find([entry.id]):
                is_done = False
        return is_done

    # --- records that are to be there

    async def _replace(self, tier: str) -> str | None:
        """Have `tier` hold what replaces its records; returns why some are not replaced. Raises as `remove_strays`."""
        if not self._catalog.tiers.is_scanned(tier):
            return None  # that it is taken into the account wakes the task
        problems: dict[str, str] = {}
        pending = self._catalog.redo.ids_in(tier)
        for start in range(0, len(pending), _FEW):
            page = self._catalog.records.find(pending[start : start + _FEW]).values()
            # one that has been replaced since may have another home
            mine, claims = self._claim(tier, [entry for entry in page if entry.home == tier])
            async with self._guard.change(*claims, wakes=False) as change:
                problems |= await self._replace_each(tier, mine, change.failures)
        return next((f"{id!r} is not replaced: {problem}" for id, problem in problems.items()), None)

    async def _replace_each(self, tier: str, entries: Sequence[Entry], failures: list[Exception]) -> dict[str, str]:
        """Replace the records, all at once; one by one if `tier` refuses that. Returns which are not, and why."""
        try:
            return await self._replace_all(tier, entries)
        except (A2MError, AnswerTooLong, Untrusted) as refused:
            if isinstance(refused, A2MError) and no_room(refused) is not None:
                raise  # whichever record it is sent
            failures.append(refused)
            if len(entries) == 1:
                return {entries[0].id: str(refused)}
        problems: dict[str, str] = {}
        for entry in entries:
            problems |= await self._replace_each(tier, [entry], failures)
        return problems

    async def _replace_all(self, tier: str, entries: Sequence[Entry]) -> dict[str, str]:
        """Replace the records, as far as nothing is in their way. Returns which are not replaced, and why."""
        drafts = self._catalog.redo.drafts(entry.id for entry in entries)
        problems: dict[str, str] = {}
        for entry in entries:
            if entry.id in drafts and self._catalog.strays.in_the_way(tier, [entry]):
                problems[entry.id] = "an older copy is in its way"
                del drafts[entry.id]
        if not drafts:
            return problems
        # a power cut must not take the one place where the new record is, when the old one is gone
        await self._catalog.synced()
        if not self._copies.mode(tier).native:
            gone = await self._copies.remove(tier, list(drafts))
            problems |= dict.fromkeys(drafts.keys() - gone, "its server does not forget what it held")
        left = await self._copies.write_seen(tier, [draft for id, draft in drafts.items() if id not in problems])
        problems |= {id: f"its server {what}" for id, what in left.items()}
        await self._catalog.readers.grace()
        still = self._catalog.redo.behind(drafts.keys() - problems.keys())  # others were forgotten meanwhile
        vectors = {id: drafts[id].embedding for id in still}
        self._catalog.end_redo([entry for entry in entries if entry.id in still], vectors)
        if still:
            self.wake()  # copies elsewhere wait until the record can be read at its home
        return problems
