"""Moves: changing a record's home, between two servers that share no transaction.

A move runs by the table `steps.MOVE`. Under a claim on the units and on what is in their way at the target:
- a stray at the target is noted;
- the records are read from the source, vectors included, and compared with the digests in the catalog. The note becomes
  durable meanwhile;
- they are written to the target under their own ids and read back, and every field that must not change is compared;
- the flip: their home becomes the target, if they still are what they were. Synced, this is the commit point.

The reconciler removes the old copies when no reader needs them any more. The crash table of docs/architecture.md says
what remains when anything dies in between.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import anyio.lowlevel
import msgspec

from a2m_router.catalog.claims import Claim, Name, names_of
from a2m_router.catalog.entries import Entry, former, is_as_it_is
from a2m_router.catalog.selection import Selection
from a2m_router.placement.core import Core
from a2m_router.placement.reconciler import StaleClaim
from a2m_router.placement.steps import MOVE, Step, Steps, run
from a2m_router.process.alerts import Alerts
from a2m_router.process.budget import left
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, no_room
from a2m_router.protocol.wire.events import Place
from a2m_router.protocol.wire.records import Record, digest, draft_of
from a2m_router.ranking.policy import Unit, in_batches
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import AnswerTooLong, TierDown

log = logging.getLogger(__name__)

# How long a move waits for another change of the same records before it leaves them to the next pass.
_CLAIM_SECONDS: Final = 5.0

# Records moved in one round of calls: enough to share the round trips, few enough to hold in memory with their vectors.
_ROUND: Final = 200

# Kinds of what is in the way between two tiers that the log tells at once: a server may word each refusal differently.
_MOST_KINDS: Final = 10

# Other records of a tier that are looked for where a record is found that is still on its way there.
_WITNESSES: Final = 5


class Blocker(msgspec.Struct, frozen=True):
    """Why records stay where they are.

    Args:
        kind: what it has in common with others: told once, they are no news.
        sentence: what happened, for people.
        subject: the id of the record that it happened to; None where it is the same for whatever would go this way.
    """

    kind: str
    sentence: str
    subject: str | None = None

    def __str__(self) -> str:
        return self.sentence if self.subject is None else f"{self.subject!r}: {self.sentence}"


class Moved(msgspec.Struct):
    """What came of a move: which records have a new home, how many were rewritten on the way, and why others stayed.

    `tier`: the one that did not do its part, if it is known. `blocked`: a tier did not take part at all, so that it is
    no use to try others on the same way now.
    """

    records: list[tuple[str, Place]] = []
    rewritten: Counter[Place] = msgspec.field(default_factory=Counter)
    blocker: Blocker | None = None
    tier: str | None = None
    blocked: bool = False

    @property
    def reason(self) -> str | None:
        """Why others stayed, in words."""
        return None if self.blocker is None else str(self.blocker)

    @property
    def is_broken(self) -> bool:
        """Whether they stayed since their tier does not hold one of them as it was written: that does not pass."""
        return self.blocker is not None and self.blocker.kind == NOT_AS_WRITTEN

    @property
    def left(self) -> int:
        """How many records have left their tier."""
        return len(self.records) + self.rewritten.total()

    @property
    def places(self) -> Counter[Place]:
        """How many records came to live where."""
        return Counter(place for _, place in self.records)


class Altered(Exception):
    """A tier does not give back what it was given."""


class Moves:
    """Carries moves out."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._catalog = core.catalog
        self._alerts = Alerts(log)

    async def carry_out(
        self, units: Sequence[Unit], source: str, target: str, salience: float = 0.0, *, result: Moved | None = None
    ) -> Moved:
        """Move whole units from `source` to `target`, adding `salience` on arrival.

        A unit that has changed since it was chosen, or that a tier refuses, stays where it is; the reason says why.
        What comes of it is added to `result` as it comes, for those who have to know though they are cancelled.
        """
        result = Moved() if result is None else result
        behind = self._catalog.pending.among(id for unit in units for id in unit.ids)
        # what its tier has yet to catch up with may have to be waited for, which is no reason for others to wait
        late = [unit for unit in units if not behind.isdisjoint(unit.ids)]
        ready = [unit for unit in units if behind.isdisjoint(unit.ids)]
        broken: dict[str, str] = {}
        waiting = in_batches(late, _ROUND)[::-1] + in_batches(ready, _ROUND)[::-1]
        while waiting and not result.blocked:
            await anyio.lowlevel.checkpoint()  # what was cancelled during the last one does not begin another
            batch = waiting.pop()
            try:
                carried = await self._move(batch, source, target, salience)
            except (A2MError, Altered, AnswerTooLong) as refused:
                if isinstance(refused, A2MError) and no_room(refused) is not None:
                    result.blocker, result.blocked = blocker_of(refused), True  # whichever unit it is asked to take
                    continue
                # of several units one may be at fault: halved until it stands alone
                if len(batch) > 1:
                    waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                else:
                    result.blocker = blocker_of(refused, batch[0])
            except (TierDown, OSError) as failure:
                result.blocker, result.blocked = blocker_of(failure), True
                result.tier = failure.tier if isinstance(failure, TierDown) else None
            else:
                if carried is None:
                    sentence = "an earlier change of the same records has not been settled yet"
                    result.blocker = Blocker("unsettled", sentence, batch[0].ids[0])
                    continue
                result.records += [(entry.id, Place(entry.owner, target)) for entry in carried.moved]
                broken |= carried.broken
        still_behind = self._catalog.pending.among(behind)
        if result.blocker is None and still_behind:
            sentence = f"{source} has yet to catch up with what replaced a record"
            result.blocker = Blocker("behind", sentence, min(still_behind))
        self.say(source, target, result)
        if result.blocker is None and broken:  # the log has spoken of it when it was met
            id, how = next(iter(broken.items()))
            result.blocker = Blocker(NOT_AS_WRITTEN, how, id)
        return result

    def say(self, source: str, target: str, moved: Moved) -> None:
        """Why something does not move is logged when it begins and when it is over, not with every trial.

        What hinders one record is over when that record is not there any more; what hinders all, when something moves.
        """
        blocker = moved.blocker
        blocked = self._blocked((source, target))
        for each in blocked:
            subject = self._alerts.cause(each)
            goes_on = moved.left == 0 if subject is None else self._lives_in(source, subject)
            if not goes_on and (subject is not None or blocker is None or blocker.kind != each.kind):
                self._alerts.end(each)
        if blocker is not None:
            alert_key = _AlertKey((source, target), blocker.kind)
            if alert_key not in self._alerts and len(self._blocked((source, target))) < _MOST_KINDS:
                sentence = f"{source} -> {target}: not moved: {blocker}"
                self._alerts.begin(alert_key, logging.WARNING, sentence, cause=blocker.subject)
        elif blocked and not self._blocked((source, target)):
            log.info("%s -> %s: nothing is in the way any more", source, target)

    def say_over(self, waiting: Collection[tuple[str, str]]) -> None:
        """Of all ways but these, (source, target), where something may wait still: nothing does any more."""
        for told in self._alerts:
            if isinstance(told, _Broken) and self._catalog.records.get(told.id) is None:
                self._alerts.end(told)
        over = [each for each in self._alerts if isinstance(each, _AlertKey) and each.way not in waiting]
        for each in over:
            self._alerts.end(each)
        for way in dict.fromkeys(each.way for each in over):
            log.info("%s -> %s: nothing waits to be moved any more", *way)

    def _blocked(self, way: tuple[str, str]) -> list["_AlertKey"]:
        return [each for each in self._alerts if isinstance(each, _AlertKey) and each.way == way]

    def _lives_in(self, tier: str, id: str) -> bool:
        entry = self._catalog.records.get(id)
        return entry is not None and entry.home == tier

    async def _move(self, units: Sequence[Unit], source: str, target: str, salience: float) -> "_Carried | None":
        """What became of the units; None if others are at work on one of the records for too long."""
        core = self._core
        core.reconciler.check(source, writes=False)  # what stays there is a stray
        core.reconciler.check(target)
        behind = core.catalog.pending.among(id for unit in units for id in unit.ids)
        await core.reconciler.replaced(source, behind, min(_CLAIM_SECONDS, left()))
        while True:
            claimed = await self.claim(units, source, target)
            if claimed is None:
                return None
            claim, groups = claimed
            pending = core.catalog.pending.among(entry.id for unit in groups for entry in unit)
            groups = [unit for unit in groups if pending.isdisjoint(entry.id for entry in unit)]
            carried = _Carried(core, self._alerts, groups, (source, target), salience)
            try:
                async with core.guard.change(claim) as change:
                    if groups:
                        # of those that have no new home; and what has one is durable before the claim goes
                        change.note = partial(core.catalog.give_up, carried.entries, target)
                        await run(MOVE, carried.steps)
                return carried
            except StaleClaim:
                continue

    async def claim(self, units: Sequence[Unit], source: str, target: str) -> tuple[Claim, list[list[Entry]]] | None:
        """A claim on all that the units touch, and their entries as they are under it; None if others keep it busy."""

        def look() -> tuple[set[Name], list[list[Entry]]]:
            groups = self.present(units, source)
            entries = [entry for unit in groups for entry in unit]
            names = {name for entry in entries for name in names_of(entry)}
            return names | self._core.reconciler.names_to_clear(target, entries), groups

        try:
            return await self._catalog.claims.take_touched(look, lambda: min(_CLAIM_SECONDS, left()))
        except TimeoutError:
            return None

    def present(self, units: Sequence[Unit], source: str) -> list[list[Entry]]:
        """The units that still live in `source`, each with all the members its group has now; not what was written
        since under an id of theirs."""
        newest = {id: unit.newest for unit in units for id in unit.ids}
        entries = self._catalog.records.find(newest).values()
        return self._catalog.records.units(e for e in entries if e.home == source and e.seq <= newest[e.id])


class _AlertKey(msgspec.Struct, frozen=True):
    """Why nothing moves on a way, (source, target); its cause is the record that it happened to, if it was one."""

    way: tuple[str, str]
    kind: str


class _Broken(msgspec.Struct, frozen=True):
    """A record that its tier does not hold as it was written; its cause says how."""

    id: str


class _Carried:
    """Some units on their way, under their claim. `entries` are their records as the catalog has them; `moved`, as they
    were, those that have a new home; `broken` says how the source holds those that it does not hold as written."""

    def __init__(
        self, core: Core, alerts: Alerts, groups: list[list[Entry]], way: tuple[str, str], salience: float
    ) -> None:
        self._catalog = core.catalog
        self._gateway = core.gateway
        self._reconciler = core.reconciler
        self._alerts = alerts
        self._groups = groups
        self.entries = [entry for unit in groups for entry in unit]
        self._source, self._target = way
        self._salience = salience
        self._records: dict[str, Record] = {}
        self.moved: list[Entry] = []
        self.broken: dict[str, str] = {}
        self.steps: Steps = {
            Step.CLEAR: self._clear,
            Step.NOTE: self._note,
            Step.READ: self._read,
            Step.SYNC: self._catalog.synced,
            Step.COMPARE: self._compare,
            Step.WRITE: self._write,
            Step.COMMIT: self._flip,
        }

    async def _clear(self) -> None:
        await self._reconciler.clear(self._target, self.entries)
        # of what the source has lost, what was to be cleared away at the target may have become the record
        self._groups = [unit for unit in self._groups if self._catalog.records.unchanged(unit) is not None]
        self.entries = [entry for unit in self._groups for entry in unit]
        await self._refuse_one_server()

    async def _refuse_one_server(self) -> None:
        """Raises TierDown if both tiers seem to lead to one server: what would be removed from the one, after the move,
        would be the record in the other. A native store says who it is; of another, the target has what lives in the
        source, and not only what an earlier move has left there."""
        source, target = self._source, self._target
        if self._gateway.mode(target).native:
            return
        ids = [entry.id for entry in self.entries]
        one_server = ("one server", source, target)
        there = await self._gateway.read(target, ids)
        if not there:
            self._alerts.end(one_server)
            return
        newest = self._catalog.queries.newest(Selection(tiers=[source]), len(ids) + _WITNESSES)
        others = [entry.id for entry in newest if entry.id not in set(ids)]
        if not others or await self._gateway.read(target, others):
            sentence = f"{source} and {target} seem to lead to one server; give each a store of its own"
            self._alerts.begin(one_server, logging.ERROR, sentence)
            raise TierDown(target, f"it seems to lead to the same server as {source}", 60.0, None)
        held = await self._gateway.read(source, there)
        left_over = {id for id in there if id in held and digest(held[id]) == digest(there[id])}
        await self._gateway.remove(target, left_over)

    async def _note(self) -> None:
        await self._catalog.writable()
        self._catalog.note_copies(self.entries, self._target)

    async def _read(self) -> None:
        self._records = await self._gateway.read(self._source, [entry.id for entry in self.entries], embeddings=True)

    async def _compare(self) -> None:
        self._groups = [unit for unit in self._groups if self._is_whole(unit)]

    def _is_whole(self, unit: Sequence[Entry]) -> bool:
        source = self._source
        for entry in unit:
            record = self._records.get(entry.id)
            if record is not None and digest(record) == entry.digest:
                self._alerts.end(_Broken(entry.id))
                continue
            how = f"{source} does not hold it as it was written"
            if record is None:
                wrong = f"{source} does not hold {entry.id!r}, which should live there; it cannot be moved"
            elif is_as_it_is(record, entry):
                wrong = f"{source} holds {entry.id!r} altered; it is not moved"
            else:
                how = f"{source}: {former([entry.id])}"
                wrong = f"{how}; it is not moved"
            self._alerts.begin(_Broken(entry.id), logging.ERROR, wrong, cause=how)
            self.broken[entry.id] = how
            return False
        return True

    async def _write(self) -> None:
        await write(self._gateway, self._target, [self._records[entry.id] for unit in self._groups for entry in unit])

    async def _flip(self) -> None:
        vectors = {id: record.embedding for id, record in self._records.items() if record.embedding is not None}
        await self._catalog.writable()
        self.moved = self._catalog.flip(self._groups, self._target, self._salience, vectors)


async def write(gateway: TierGateway, target: str, records: Sequence[Record]) -> None:
    """Write the records to `target` and see that they are there as they were. Once more for those that are not.

    Raises Altered.
    """
    left = await gateway.write_seen(target, [draft_of(record) for record in records])
    for what in left.values():
        raise Altered(f"{target} does not keep what it is given: it {what}")


def blocker_of(failure: A2MError | Altered | TierDown | OSError, unit: Unit | None = None) -> Blocker:
    """What a failure is to a move; `unit` is what could not be moved for it, where others may be."""
    match failure:
        case AnswerTooLong() | Altered():
            kind = type(failure).__name__
        case TierDown():
            kind = f"{failure.tier} is down"  # its link says why, and what changes of that
        case A2MError():
            reason = (failure.data or {}).get("reason")
            kind = reason if isinstance(reason, str) else f"refused with {failure.code}"
            if no_room(failure) is not None:
                unit = None  # whichever it is asked to take
        case _:
            kind = "the catalog's disk"
    return Blocker(kind, str(failure), None if unit is None else unit.ids[0])
