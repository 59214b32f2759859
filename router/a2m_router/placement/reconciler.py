"""The reconciler: makes the copies in each managed tier match the catalog.

A tier can need two kinds of work. A stray is a copy that has to be removed. A pending write (table `redo`, §3.6) is a
replacement that is committed and synced in the catalog and that its tier does not hold yet; readers get it from the
catalog. One task a tier does both, strays first: a tier that replaces by key would put the record in the place of a
copy that is left at its key.

Rules:
- a copy left by a move, finished or not, is removed only after the record was read at its home in the same round and
  matched. If the home has lost the record or holds a former state, the copy becomes the home, but only with the digest
  that the catalog has;
- copies of forgotten, replaced or given-up records are removed without that read. A quarantined record stays, and
  blocks its id and key;
- a copy in a record's home is never removed. A copy is removed only after the grace period: when every read that began
  before has ended;
- a pending write is sent to its tier, read back and compared. A server that does not replace by key deletes the old
  copy first, and the deletion is verified. After the grace period the catalog deletes its own copy. A crash before that
  leaves the record in the catalog, and the work is repeated;
- no copy is removed, and no write is sent, before the note that asks for it is synced;
- a record that another change has claimed is skipped. The release of the claim wakes the tier's task;
- records of a failed step are retried one by one, ever more rarely, so that they do not delay others.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import anyio.lowlevel
import apsw
import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, Name, record_names
from a2m_router.catalog.entries import Entry, Stray, by_home
from a2m_router.catalog.strays import NotedStray
from a2m_router.config.settings import Tier
from a2m_router.placement.guard import Guard
from a2m_router.process.alerts import Alerts
from a2m_router.process.timing import doubling
from a2m_router.protocol.wire.errors import A2MError, no_room
from a2m_router.protocol.wire.records import Record, digest, draft_of
from a2m_router.tiers.answers import Untrusted
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import AnswerTooLong, TierDown

log = logging.getLogger(__name__)

# why a tier is not changed for a while after the crash of a router
MAY_STILL_LAND: Final = "a call of an earlier router may still land there"

# Strays of one step; and pending writes of one step, which all stay claimed while one call is in doubt.
_PAGE: Final = 200
_FEW: Final = 20

# Seconds between two attempts for a failed record, or for a tier that failed completely.
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

# copies that are removed only after the record was read at its home
_SEEN_FIRST: Final = frozenset({Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL})

# copies that are removed when no change is in progress there
_REMOVABLE: Final = frozenset({Stray.SUPERSEDED, Stray.UNWANTED})

_Item = TypeVar("_Item", NotedStray, Entry)


class StaleClaim(Exception):
    """A stray that blocks a write is not covered by the claim; claim again."""


class _Failed(msgspec.Struct):
    """A record whose last step failed. It is retried alone, not before `until`; `wait` grows with each failure."""

    problem: str
    wait: float
    until: float


class _Queue:
    """The work of one tier's task: whether to look for work, and which records have failed.

    `ended` is set at the end of each round. `idle` is set then, too, if the task was not woken meanwhile.
    """

    def __init__(self) -> None:
        self.wanted = anyio.Event()
        self.is_working = False
        self.ended = anyio.Event()
        self.idle = anyio.Event()
        self.failed: dict[str, _Failed] = {}  # by the record's id
        self.held_until = 0.0
        # why the tier failed completely in the last round, and until when it rests
        self.problem: str | None = None
        self.rests_until = 0.0
        self.waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)

    def begin(self) -> None:
        self.wanted, self.is_working = anyio.Event(), True

    def rest(self, problem: str | None) -> None:
        """Note the result of a round. After a complete failure the tier rests."""
        self.problem = problem
        if problem is None:
            self.waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)
        else:
            self.rests_until = anyio.current_time() + next(self.waits)

    def end(self) -> None:
        """End a round."""
        self.is_working = False
        self.ended.set()
        self.ended = anyio.Event()
        if not self.wanted.is_set():
            self.idle.set()
            self.idle = anyio.Event()

    def fail(self, id: str, problem: str) -> None:
        """Retry the record alone from now on, ever more rarely."""
        earlier = self.failed.get(id)
        wait = _FIRST_WAIT if earlier is None else min(2 * earlier.wait, _LONGEST_WAIT)
        self.failed[id] = _Failed(problem, wait, anyio.current_time() + wait)

    @property
    def is_resting(self) -> bool:
        return anyio.current_time() < max(self.held_until, self.rests_until)

    @property
    def due(self) -> float:
        """The time of the next work if nothing wakes the task."""
        if self.is_resting:
            return max(self.held_until, self.rests_until)
        return min((failed.until for failed in self.failed.values()), default=math.inf)


class Reconciler:
    """Reconciles the managed tiers of one catalog."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, guard: Guard, tiers: Iterable[Tier]) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._guard = guard
        self._queues = {tier.name: _Queue() for tier in tiers}
        self._waiting_tiers: dict[Name, set[str]] = {}  # names that other changes had claimed, and the waiting tiers
        self._is_running = False
        self._alerts = Alerts(log)

    def wake(self) -> None:
        """Wake the tasks of the tiers that have work. Failed records still wait for their time."""
        try:
            noted: Collection[str] = self._catalog.queries.tiers_with_work()
        except apsw.Error:
            noted = self._queues  # a round reports the disk's fault; the caller's change does not fail by it
        for tier, queue in self._queues.items():
            # a task that has reported a problem also reports its end
            if tier in noted or queue.failed or tier in self._alerts:
                queue.wanted.set()

    def came_up(self, tier: str) -> None:
        """Wake the tasks that have work: the tier has become active, or inactive for good. Its rest ends.

        Records that failed there still wait for their time: one of them may have crashed the tier.
        """
        if tier in self._queues:
            self._queues[tier].rests_until = 0.0
        self.wake()  # copies in other tiers may wait for a home that can be read now

    def retry(self, tier: str, ids: Iterable[str] | None = None) -> None:
        """Retry the failed records of `tier` now, or those among `ids`."""
        queue = self._queues[tier]
        queue.rests_until = 0.0
        for id in list(queue.failed if ids is None else ids):
            if id in queue.failed:
                queue.failed[id].until = 0.0
        queue.wanted.set()

    def hold(self, tier: str, seconds: float) -> None:
        """Change nothing in `tier` for so many seconds: a call of an earlier router may still land there.

        If its note were removed first, the late copy would stay for good. A late call could also undo a replacement.
        """
        self._queues[tier].held_until = anyio.current_time() + seconds
        self.wake()

    def held_for(self, tier: str) -> float:
        """Return the seconds for which `tier` is still held; 0 if it is not. A mount is never held."""
        return max(0.0, self._queues[tier].held_until - anyio.current_time()) if tier in self._queues else 0.0

    async def run(self) -> None:
        """Do the work of each tier whenever woken, until cancelled."""
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
        """Return when each tier's task has retried everything and found no new work."""
        queues = self._queues.values()
        is_idle = False
        while not is_idle:
            for tier in self._queues:
                self.retry(tier)
            for idle in [queue.idle for queue in queues]:
                await idle.wait()
            is_idle = not any(queue.is_working or queue.wanted.is_set() for queue in queues)

    async def replaced(self, tier: str, ids: Iterable[str], seconds: float) -> None:
        """Return when the pending writes of these records in `tier` are done or have failed, or after `seconds`.

        A record that another change has claimed has not failed, unless it failed before: the release of the claim
        wakes the tier's task.
        """
        ids = list(ids)
        if self._catalog.pending.among(ids, tier):
            self.retry(tier, ids)
        with anyio.move_on_after(seconds):
            while self._is_running and self._is_replacing(tier, ids):
                await self._queues[tier].ended.wait()

    def _is_replacing(self, tier: str, ids: Sequence[str]) -> bool:
        """Return whether a round that is in progress or to come may do a pending write of these records."""
        queue = self._queues[tier]
        if queue.is_resting or not self._takes_changes(tier):
            return False
        now = anyio.current_time()
        pending = self._catalog.pending.among(ids, tier)
        return any(id not in queue.failed or queue.failed[id].until <= now for id in pending)

    async def remove_strays(self, tier: str) -> None:
        """Remove the strays of `tier` that can be removed now, except those that failed before.

        Raises:
            TierDown, A2MError, OSError: the tier or the catalog's disk failed completely.
        """
        after = ""
        while page := self._catalog.strays.removable(tier, after, _PAGE):
            after = page[-1].id
            failed = self._queues[tier].failed
            # before the claims: a long read must not keep writers waiting
            await self._catalog.reads.grace()
            await self._step(tier, [stray for stray in page if stray.id not in failed], self._remove)

    def check(self, tier: str, *, writes: bool = True) -> None:
        """Raise TierDown unless `tier` can be reached and is scanned, and, for `writes`, its link accepts changes.

        Before that no record is written to it or moved from it: the catalog may not know all members of a group, or an
        older copy.
        """
        link = self._gateway.link(tier)
        if link.status != "up":
            raise TierDown(tier, link.reason or "it is still starting", 1.0, None)
        if not self._catalog.tiers.is_scanned(tier) or (writes and link.barred is not None):
            raise TierDown(tier, self._gateway.why_unaccounted(tier), 1.0, None)

    async def clear(self, tier: str, entries: Sequence[Entry]) -> None:
        """Remove the strays in `tier` that have these ids or these owners' keys, before the records are written there.

        The caller holds claims on all of them (`names_to_clear`).

        Raises:
            TierDown: one of the strays could not be removed.
            StaleClaim: a forget, which takes no claim, has added a stray that the caller's claim does not cover.
        """
        strays = self._catalog.strays.in_the_way(tier, entries)
        if strays:
            wait = self.held_for(tier)
            if wait:
                raise TierDown(tier, MAY_STILL_LAND, wait, None)
            await self._catalog.reads.grace()
            await self._remove(tier, strays)
            left = {stray.id for stray in self._catalog.strays.in_the_way(tier, entries)}
            if not left <= {stray.id for stray in strays}:
                raise StaleClaim
            if left:
                raise TierDown(tier, "an older copy of a record could not be removed yet", 1.0, None)

    def names_to_clear(self, tier: str, entries: Sequence[Entry]) -> set[Name]:
        """Return the names that `clear` needs claimed in `tier`, beside those of the entries themselves."""
        strays = self._catalog.strays.in_the_way(tier, entries)
        return {name for stray in strays for name in record_names(stray.id, stray.owner, stray.key)}

    # --- one tier's task

    async def _keep(self, tier: str) -> None:
        queue = self._queues[tier]
        while True:
            queue.begin()
            if self._takes_changes(tier) and not queue.is_resting:
                queue.rest(await self._round(tier))
            queue.end()
            self._log_state(tier)
            # the admission of the tier wakes its task
            with anyio.CancelScope(deadline=queue.due if self._takes_changes(tier) else math.inf):
                await queue.wanted.wait()

    def _takes_changes(self, tier: str) -> bool:
        link = self._gateway.link(tier)
        return link.status == "up" and link.barred is None

    async def _round(self, tier: str) -> str | None:
        """Do all work that can be done now. Return why the tier failed completely, or None."""
        try:
            await self.remove_strays(tier)
            if self._catalog.tiers.is_scanned(tier):
                await self._replace_new(tier)
            await self._try_failed(tier)
        except (TierDown, A2MError, OSError) as problem:
            return str(problem)
        return None

    async def _try_failed(self, tier: str) -> None:
        """Retry failed records whose time has come, one by one, until there is new work."""
        queue = self._queues[tier]
        for id, failed in sorted(queue.failed.items(), key=lambda each: each[1].until):
            now = anyio.current_time()
            if failed.until > now or queue.wanted.is_set():
                break
            failed.until = now + failed.wait  # also if another change has claimed the record
            stray, entry = self._catalog.strays.at(tier, id), self._catalog.records.get(id)
            if stray is not None and stray.kind in _REMOVABLE:
                await self._catalog.reads.grace()
                await self._step(tier, [stray], self._remove)
            elif entry is None or entry.home != tier or not self._catalog.pending.among([id]):
                del queue.failed[id]
            elif self._catalog.tiers.is_scanned(tier):
                await self._step(tier, [entry], self._replace)

    async def _step(
        self, tier: str, items: Sequence[_Item], work: Callable[[str, Sequence[_Item]], Awaitable[dict[str, str]]]
    ) -> None:
        """Do some work on the items that are free, under claims. Items that fail are retried alone later.

        Args:
            work: returns the ids of the items that failed, with the reasons.

        Raises:
            TierDown, A2MError, OSError: the fault is the tier's or the disk's, not a single record's.
        """
        mine, claims = self._claim(tier, items)
        if not mine:
            return
        queue = self._queues[tier]
        problems: dict[str, str]
        try:
            async with self._guard.change(*claims, wakes=False):
                problems = await work(tier, mine)
        except (A2MError, TierDown) as failure:
            is_refusal = isinstance(failure, A2MError) and no_room(failure) is None
            is_of_one = is_refusal or isinstance(failure, Untrusted | AnswerTooLong)
            # sending one of the records may be what crashes the tier
            if is_of_one or any(isinstance(item, Entry) for item in mine):
                for item in mine:
                    queue.fail(item.id, str(failure))
            if not is_of_one:
                raise
            await anyio.lowlevel.checkpoint()
            return
        for item in mine:
            if item.id in problems:
                queue.fail(item.id, problems[item.id])
            else:
                queue.failed.pop(item.id, None)
        await anyio.lowlevel.checkpoint()  # shutdown is possible between two steps, but not within one

    def _log_state(self, tier: str) -> None:
        """Log why copies are not up to date, once, and when they are up to date again."""
        queue = self._queues[tier]
        first = next((f"{id!r}: {failed.problem}" for id, failed in queue.failed.items()), None)
        problem = queue.problem or first
        if problem is not None:
            sentence = f"tier={tier} copies are not up to date, will retry: {problem}"
            self._alerts.begin(tier, logging.WARNING, sentence, cause=problem)
        elif tier in self._alerts and tier not in self._catalog.queries.tiers_with_work():
            self._alerts.end(tier, f"tier={tier} copies are up to date")

    def _claim(self, tier: str, items: Iterable[_Item]) -> tuple[list[_Item], list[Claim]]:
        """Claim the items that are free. Return them and the claims. The release of a skipped one wakes the task."""
        mine: list[_Item] = []
        claims: list[Claim] = []
        names: set[Name] = set()  # two items may be at the same key
        for item in items:
            wanted: set[Name] = set(record_names(item.id, item.owner, item.key)) - names
            claim = self._catalog.claims.take_if_free(wanted)
            if claim is None:
                for name in wanted:
                    self._waiting_tiers.setdefault(name, set()).add(tier)
            else:
                names |= wanted
                mine.append(item)
                claims.append(claim)
        return mine, claims

    def _on_release(self, names: frozenset[Name]) -> None:
        for tier in {tier for name in names for tier in self._waiting_tiers.pop(name, ())}:
            self._queues[tier].wanted.set()

    # --- copies to remove

    async def _remove(self, tier: str, strays: Sequence[NotedStray]) -> dict[str, str]:
        """Remove the copies that may be removed. Return the ids of the others, with the reasons.

        A copy that waits for a tier that is down is left out of the result: the tier's coming up wakes the task. The
        caller has claimed the copies, and has waited for the grace period.
        """
        strays = self._catalog.strays.still_noted(tier, strays)
        entries = self._catalog.records.find(stray.id for stray in strays)
        at_home = {stray.id for stray in strays if stray.id in entries and entries[stray.id].home == tier}
        self._catalog.remove_notes(tier, at_home)
        superseded = [
            entries[stray.id]
            for stray in strays
            if stray.kind in _SEEN_FIRST and stray.id in entries and stray.id not in at_home
        ]
        seen, problems = await self._seen_at_home(superseded, tier)
        unwanted = {
            stray.id
            for stray in strays
            if stray.kind != Stray.QUARANTINED and (stray.id not in entries or stray.kind not in _SEEN_FIRST)
        }
        leaving = (seen.keys() | unwanted) - at_home
        if leaving:
            # a power cut must not undo the note: the copy would be needed again then
            await self._catalog.synced()
            gone = await self._gateway.remove(tier, sorted(leaving))
            self._catalog.remove_notes(tier, gone)
            problems |= dict.fromkeys(leaving - gone, "its server still holds it after a successful forget")
            if not self._gateway.mode(tier).native:
                await self._restore(seen, tier)
        return problems

    async def _restore(self, seen: Mapping[str, Record], tier: str) -> None:
        """Write records back if removing their copies has removed them from their home, too.

        Two tiers may lead to one server, and not every server has an identity that shows it.
        """
        for home, there in by_home(self._catalog.records.find(seen).values()).items():
            left = await self._gateway.read(home, [entry.id for entry in there])
            lost = [seen[entry.id] for entry in there if entry.id not in left]
            if lost:
                await self._gateway.write_new(home, [draft_of(record) for record in lost])
                log.error("tier=%s this tier and %s seem to lead to one server; give each its own store", tier, home)

    async def _seen_at_home(self, entries: Sequence[Entry], tier: str) -> tuple[dict[str, Record], dict[str, str]]:
        """Read the records that left `tier` at their homes.

        Return those that match, with vectors; and the ids of copies that stay, as `_remove` returns them.
        """
        seen: dict[str, Record] = {}
        problems: dict[str, str] = {}
        for home, there in by_home(entries).items():
            try:
                found = await self._gateway.read(home, [entry.id for entry in there], embeddings=True)
                # a record with a pending write is not lost; the end of the write wakes the tasks
                pending = self._catalog.pending.among(entry.id for entry in there)
                lost = []
                for entry in there:
                    copy = found.get(entry.id)
                    if copy is not None and (entry.id in pending or digest(copy) == entry.digest):
                        seen[entry.id] = copy
                    elif entry.id not in pending:
                        lost.append(entry)
                if lost:
                    problems |= await self._bring_home(lost, tier, gone=[e for e in lost if e.id not in found])
            except (TierDown, A2MError) as failure:
                log.info("tier=%s copies kept until tier %s can be read: %s", tier, home, failure)
                if self._gateway.link(home).status == "up":  # otherwise the home's coming up wakes this task
                    problems |= dict.fromkeys((entry.id for entry in there), str(failure))
        return seen, problems

    async def _bring_home(self, lost: Sequence[Entry], tier: str, gone: Sequence[Entry]) -> dict[str, str]:
        """Handle records that their home does not hold as the catalog says, but `tier` may.

        If `tier` holds the record with the catalog's digest, `tier` becomes its home. If the record is `gone` from its
        home, an older copy in `tier` becomes the record; without a copy the record is lost. If its home holds a former
        state, nothing changes. Return the ids of copies that another round can remove, with the reasons.
        """
        copies = await self._gateway.read(tier, [entry.id for entry in lost], embeddings=True)
        problems: dict[str, str] = {}
        for entry in lost:
            copy = copies.get(entry.id)
            if copy is not None and self._catalog.come_home(entry.id, digest(copy), tier, copy.embedding):
                log.error("tier=%s record lost: %r; its copy in %s is the record now", entry.home, entry.id, tier)
                self.wake()  # its former home may still have a copy
            elif copy is None:
                self._catalog.remove_notes(tier, [entry.id])
                if entry in gone and self._catalog.tiers.is_scanned(entry.home) and self._catalog.lose([entry]):
                    log.error("tier=%s record lost: %r, which should live there", entry.home, entry.id)
            elif entry in gone and self._catalog.fall_back(entry, copy, tier):
                log.error("tier=%s record lost: %r; its older copy in %s is the record now", entry.home, entry.id, tier)
                self.wake()
            elif self._catalog.records.get(entry.id) is None:
                problems[entry.id] = "the copy's record was deleted meanwhile"
        return problems

    # --- pending writes

    async def _replace_new(self, tier: str) -> None:
        """Send the pending writes of `tier`, except those that failed before. Raises as `remove_strays`."""
        failed = self._queues[tier].failed
        pending = [id for id in self._catalog.pending.ids_in(tier) if id not in failed]
        for start in range(0, len(pending), _FEW):
            page = self._catalog.records.find(pending[start : start + _FEW]).values()
            # a record that was replaced again may have another home
            await self._step(tier, [entry for entry in page if entry.home == tier], self._replace)

    async def _replace(self, tier: str, entries: Sequence[Entry]) -> dict[str, str]:
        """Send the pending writes of these records unless a stray blocks them. Return the failed ids, with reasons."""
        drafts = self._catalog.pending.drafts(entry.id for entry in entries)
        problems: dict[str, str] = {}
        for entry in entries:
            if entry.id in drafts and self._catalog.strays.in_the_way(tier, [entry]):
                problems[entry.id] = "an older copy in the tier blocks the write"
                del drafts[entry.id]
        if not drafts:
            return problems
        # when the old copy is deleted, the catalog has the only copy of the new record: a power cut must not take it
        await self._catalog.synced()
        if not self._gateway.mode(tier).native:
            gone = await self._gateway.remove(tier, list(drafts))
            problems |= dict.fromkeys(drafts.keys() - gone, "its server still holds the old copy after a forget")
        left = await self._gateway.write_seen(tier, [draft for id, draft in drafts.items() if id not in problems])
        problems |= {id: f"its server {what}" for id, what in left.items()}
        await self._catalog.reads.grace()
        still = self._catalog.pending.among(drafts.keys() - problems.keys())  # without those forgotten meanwhile
        vectors = {id: drafts[id].embedding for id in still}
        self._catalog.end_pending([entry for entry in entries if entry.id in still], vectors)
        if still:
            self.wake()  # copies in other tiers wait until the record can be read at its home
        return problems
