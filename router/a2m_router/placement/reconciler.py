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
- a record that somebody else has claimed is left for later. Its release wakes the tier's task;
- what a step fails with is tried alone from then on, and ever more rarely, so that it keeps nothing else waiting.
"""

import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Final, TypeVar

import anyio.lowlevel
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

# why a tier is not changed for a while after a router has died
MAY_STILL_LAND: Final = "a call of an earlier router may still land there"

# Strays that one step works on; and pending replacements, all of which stay claimed while one call is in doubt.
_PAGE: Final = 200
_FEW: Final = 20

# Seconds between two trials of a record that a step has failed with, and of a tier that took no part.
_FIRST_WAIT: Final = 0.5
_LONGEST_WAIT: Final = 30.0

# copies that go only when the record was read at its home
_SEEN_FIRST: Final = frozenset({Stray.PENDING, Stray.SUPERSEDED, Stray.EQUAL})

# copies that go when nobody is at work on them
_REMOVABLE: Final = frozenset({Stray.SUPERSEDED, Stray.UNWANTED})

_Item = TypeVar("_Item", NotedStray, Entry)


class StaleClaim(Exception):
    """What was claimed to clear the way is not all that is in it any more; claim anew."""


class _Failed(msgspec.Struct):
    """What a step has failed with: why, and after how many seconds it is tried again, alone: not before `until`."""

    problem: str
    wait: float
    until: float


class _Queue:
    """One tier's task: when it is to look for work, and what has failed. `ended` is set at the end of a round; `idle`,
    too, if nobody woke the task meanwhile."""

    def __init__(self) -> None:
        self.wanted = anyio.Event()
        self.is_working = False
        self.ended = anyio.Event()
        self.idle = anyio.Event()
        self.failed: dict[str, _Failed] = {}  # by the record's id
        self.held_until = 0.0
        # why the tier took no part in the last round, and until when it is left alone
        self.problem: str | None = None
        self.rests_until = 0.0
        self.waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)

    def begin(self) -> None:
        self.wanted, self.is_working = anyio.Event(), True

    def rest(self, problem: str | None) -> None:
        """The tier was asked, and rests if it took no part."""
        self.problem = problem
        if problem is None:
            self.waits = doubling(_FIRST_WAIT, _LONGEST_WAIT)
        else:
            self.rests_until = anyio.current_time() + next(self.waits)

    def end(self) -> None:
        """The round is over."""
        self.is_working = False
        self.ended.set()
        self.ended = anyio.Event()
        if not self.wanted.is_set():
            self.idle.set()
            self.idle = anyio.Event()

    def fail(self, id: str, problem: str) -> None:
        """The record is tried alone from now on, ever more rarely."""
        earlier = self.failed.get(id)
        wait = _FIRST_WAIT if earlier is None else min(2 * earlier.wait, _LONGEST_WAIT)
        self.failed[id] = _Failed(problem, wait, anyio.current_time() + wait)

    @property
    def is_resting(self) -> bool:
        return anyio.current_time() < max(self.held_until, self.rests_until)

    @property
    def due(self) -> float:
        """When there is work without being woken."""
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
        self._passed_over: dict[Name, set[str]] = {}  # names that others had claimed, and the tiers that wait for them
        self._is_running = False
        self._alerts = Alerts(log)

    def wake(self) -> None:
        """There may be work. What has failed waits for its time all the same."""
        for queue in self._queues.values():
            queue.wanted.set()

    def came_up(self, tier: str) -> None:
        """The tier takes part, or turned out not to. What has failed there waits for its time: it may be what the tier
        went down of."""
        if tier in self._queues:
            self._queues[tier].rests_until = 0.0
        self.wake()  # copies elsewhere may wait for a home that can be read now

    def retry(self, tier: str, ids: Iterable[str] | None = None) -> None:
        """Try what failed in `tier` now, or what failed of `ids`."""
        queue = self._queues[tier]
        queue.rests_until = 0.0
        for id in list(queue.failed if ids is None else ids):
            if id in queue.failed:
                queue.failed[id].until = 0.0
        queue.wanted.set()

    def hold(self, tier: str, seconds: float) -> None:
        """Change nothing in `tier` for so long: a call of an earlier router may still land there. Without its note
        nobody would remove such a copy, and a replacement could be undone by it."""
        self._queues[tier].held_until = anyio.current_time() + seconds
        self.wake()

    def held_for(self, tier: str) -> float:
        """The seconds for which nothing is changed in `tier` yet; 0 if it is not held. A mount never is."""
        return max(0.0, self._queues[tier].held_until - anyio.current_time()) if tier in self._queues else 0.0

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
        """Return when each tier's task has tried everything once more, and found nothing new to do."""
        queues = self._queues.values()
        is_idle = False
        while not is_idle:
            for tier in self._queues:
                self.retry(tier)
            for idle in [queue.idle for queue in queues]:
                await idle.wait()
            is_idle = not any(queue.is_working or queue.wanted.is_set() for queue in queues)

    async def replaced(self, tier: str, ids: Iterable[str], seconds: float) -> None:
        """Return when `tier` holds what replaces these records, or has not taken it, or after so many seconds."""
        ids = list(ids)
        with anyio.move_on_after(seconds):
            for _ in range(2):  # the round that is under way may have looked before
                if self._is_running and self._catalog.pending.among(ids):
                    self.retry(tier, ids)
                    await self._queues[tier].ended.wait()

    async def remove_strays(self, tier: str) -> None:
        """Remove the strays of `tier` that can be removed now, but for those that a step has failed with before.
        Raises TierDown, A2MError and OSError where the tier, or the catalog's disk, takes no part at all."""
        after = ""
        while page := self._catalog.strays.removable(tier, after, _PAGE):
            after = page[-1].id
            failed = self._queues[tier].failed
            # before anything is claimed: a long read must not keep writers waiting
            await self._catalog.reads.grace()
            await self._step(tier, [stray for stray in page if stray.id not in failed], self._remove)

    def check(self, tier: str, *, writes: bool = True) -> None:
        """Raises TierDown unless `tier` can be reached and all that it holds is known; for `writes`, unless its server
        takes any, too.

        Nothing is written to it, or moved from it, before: a member of a group, or an older copy, may be undiscovered.
        """
        link = self._gateway.link(tier)
        if link.status != "up":
            raise TierDown(tier, link.reason or "it is still starting", 1.0, None)
        if not self._catalog.tiers.is_scanned(tier) or (writes and link.barred is not None):
            raise TierDown(tier, self._gateway.why_unaccounted(tier), 1.0, None)

    async def clear(self, tier: str, entries: Sequence[Entry]) -> None:
        """Make sure that no stray of these ids, or at these owners' keys, is left in `tier`, before they are written.

        The caller holds claims on all of them (`names_to_clear`). Raises TierDown if one of them stays, and StaleClaim
        if another one, which the caller has no claim on, has come since: a forget claims nothing.
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
        """What has to be claimed, beside the entries themselves, to `clear` their way into `tier`."""
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
            self._tell(tier)
            # that a tier is taken into the account wakes its task
            with anyio.CancelScope(deadline=queue.due if self._takes_changes(tier) else math.inf):
                await queue.wanted.wait()

    def _takes_changes(self, tier: str) -> bool:
        link = self._gateway.link(tier)
        return link.status == "up" and link.barred is None

    async def _round(self, tier: str) -> str | None:
        """Work off all that can be done now; returns why the tier took no part."""
        try:
            await self.remove_strays(tier)
            if self._catalog.tiers.is_scanned(tier):
                await self._replace_new(tier)
            await self._try_failed(tier)
        except (TierDown, A2MError, OSError) as problem:
            return str(problem)
        return None

    async def _try_failed(self, tier: str) -> None:
        """Try each of those alone that a step has failed with, when its time has come; as long as nothing new is to be
        done."""
        queue = self._queues[tier]
        for id, failed in sorted(queue.failed.items(), key=lambda each: each[1].until):
            now = anyio.current_time()
            if failed.until > now or queue.wanted.is_set():
                break
            failed.until = now + failed.wait  # also where somebody else has claimed it
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
        """Do some work on those of the items that are free, under claims. `work` returns which are not done, and why;
        what it fails with is tried alone from then on, ever more rarely. Raises what is the tier's fault, or the
        disk's, and no single record's."""
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
            # a record that is sent may be what the tier goes down of
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
        await anyio.lowlevel.checkpoint()  # the router may end between two steps, and not within one

    def _tell(self, tier: str) -> None:
        """Say in the log why copies are not up to date, and when they are."""
        queue = self._queues[tier]
        told = next((f"{id!r}: {failed.problem}" for id, failed in queue.failed.items()), None)
        problem = queue.problem or told
        if problem is not None:
            sentence = f"tier={tier} copies are not up to date, will retry: {problem}"
            self._alerts.begin(tier, logging.WARNING, sentence, cause=problem)
        elif tier in self._alerts and not self._is_owed(tier):
            self._alerts.end(tier, f"tier={tier} copies are up to date")

    def _is_owed(self, tier: str) -> bool:
        return bool(self._catalog.strays.removable(tier, "", 1) or self._catalog.pending.ids_in(tier))

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

    async def _remove(self, tier: str, strays: Sequence[NotedStray]) -> dict[str, str]:
        """Remove those copies that may go. Returns why others stay, by their ids; not those for which a tier is waited
        for that wakes the task when it comes up. The caller has claimed them, and has waited for the reads under way to
        end."""
        strays = self._catalog.strays.still_noted(tier, strays)
        entries = self._catalog.records.find(stray.id for stray in strays)
        at_home = {stray.id for stray in strays if stray.id in entries and entries[stray.id].home == tier}
        self._catalog.strike(tier, at_home)
        superseded = [
            entries[stray.id]
            for stray in strays
            if stray.kind in _SEEN_FIRST and stray.id in entries and stray.id not in at_home
        ]
        seen, problems = await self._seen_at_home(superseded, tier)
        unwanted = {
            stray.id
            for stray in strays
            if stray.kind != Stray.ASIDE and (stray.id not in entries or stray.kind not in _SEEN_FIRST)
        }
        leaving = (seen.keys() | unwanted) - at_home
        if leaving:
            # a note that a power cut could take back must not cost the copy it would need then
            await self._catalog.synced()
            gone = await self._gateway.remove(tier, sorted(leaving))
            self._catalog.strike(tier, gone)
            problems |= dict.fromkeys(leaving - gone, "its server does not forget it, though it says so")
            if not self._gateway.mode(tier).native:
                await self._restore(seen, tier)
        return problems

    async def _restore(self, seen: Mapping[str, Record], tier: str) -> None:
        """Two tiers may lead to one server without saying so: then what was removed from the one was the record in the
        other. It is written back."""
        for home, there in by_home(self._catalog.records.find(seen).values()).items():
            left = await self._gateway.read(home, [entry.id for entry in there])
            lost = [seen[entry.id] for entry in there if entry.id not in left]
            if lost:
                await self._gateway.write_new(home, [draft_of(record) for record in lost])
                log.error("%s and %s seem to lead to one server; give each a store of its own", tier, home)

    async def _seen_at_home(self, entries: Sequence[Entry], tier: str) -> tuple[dict[str, Record], dict[str, str]]:
        """Those of the records that left `tier` which were read at their homes just now, and are there as they should
        be, vectors included; and why others were not seen, as `_remove` returns it."""
        seen: dict[str, Record] = {}
        problems: dict[str, str] = {}
        for home, there in by_home(entries).items():
            try:
                found = await self._gateway.read(home, [entry.id for entry in there], embeddings=True)
                # a pending replacement is not lost: its end wakes the tasks
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
                log.info("%s: copies stay until %s can be read: %s", tier, home, failure)
                if self._gateway.link(home).status == "up":  # else its coming back wakes us
                    problems |= dict.fromkeys((entry.id for entry in there), str(failure))
        return seen, problems

    async def _bring_home(self, lost: Sequence[Entry], tier: str, gone: Sequence[Entry]) -> dict[str, str]:
        """For each record that its home does not hold as it should: if `tier` holds it with the catalog's digest,
        `tier` becomes its home. If it is `gone` from its home, an older copy in `tier` becomes the record, or the
        record is lost. If its home holds a former state, nothing changes.

        Returns the ids of copies that another round can remove, and why."""
        copies = await self._gateway.read(tier, [entry.id for entry in lost], embeddings=True)
        problems: dict[str, str] = {}
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
            elif self._catalog.records.get(entry.id) is None:
                problems[entry.id] = "a copy belongs to no record any more"
        return problems

    # --- records that are to be there

    async def _replace_new(self, tier: str) -> None:
        """Have `tier` hold what replaces its records, but for those that a step has failed with before. Raises as
        `remove_strays`."""
        failed = self._queues[tier].failed
        pending = [id for id in self._catalog.pending.ids_in(tier) if id not in failed]
        for start in range(0, len(pending), _FEW):
            page = self._catalog.records.find(pending[start : start + _FEW]).values()
            # one that has been replaced since may have another home
            await self._step(tier, [entry for entry in page if entry.home == tier], self._replace)

    async def _replace(self, tier: str, entries: Sequence[Entry]) -> dict[str, str]:
        """Replace the records, as far as nothing is in their way. Returns which are not replaced, and why."""
        drafts = self._catalog.pending.drafts(entry.id for entry in entries)
        problems: dict[str, str] = {}
        for entry in entries:
            if entry.id in drafts and self._catalog.strays.in_the_way(tier, [entry]):
                problems[entry.id] = "an older copy is in its way"
                del drafts[entry.id]
        if not drafts:
            return problems
        # a power cut must not take the one place where the new record is, when the old one is gone
        await self._catalog.synced()
        if not self._gateway.mode(tier).native:
            gone = await self._gateway.remove(tier, list(drafts))
            problems |= dict.fromkeys(drafts.keys() - gone, "its server does not forget what it held")
        left = await self._gateway.write_seen(tier, [draft for id, draft in drafts.items() if id not in problems])
        problems |= {id: f"its server {what}" for id, what in left.items()}
        await self._catalog.reads.grace()
        still = self._catalog.pending.among(drafts.keys() - problems.keys())  # others were forgotten meanwhile
        vectors = {id: drafts[id].embedding for id in still}
        self._catalog.end_pending([entry for entry in entries if entry.id in still], vectors)
        if still:
            self.wake()  # copies elsewhere wait until the record can be read at its home
        return problems
