"""Moves: changing a record's home, between two servers that share no transaction.

A move follows the table `steps.MOVE`. Under a claim on the units and on the strays that block them at the target:
- a stray at the target is noted;
- the records are read from the source, vectors included, and compared with the digests in the catalog. The note becomes
  durable meanwhile;
- the records are written to the target under their own ids and read back, and every field that must not change is
  compared;
- the flip: if the records have not changed, their home becomes the target. Synced, this is the commit point.

The reconciler removes the old copies when no reader needs them any more. The crash table of docs/architecture.md says
what remains if a process dies in between.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import anyio.lowlevel
import msgspec

from a2m_router.catalog.claims import Claim, Name, names_of
from a2m_router.catalog.entries import Entry, former, is_current
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

# Records moved in one round of calls: enough to share round trips, few enough to hold in memory with their vectors.
_ROUND: Final = 200

# Kinds of blockers between two tiers that are logged at the same time: a server may word each refusal differently.
_MOST_KINDS: Final = 10

# Other records of the source that are looked up at the target, to detect two tiers that lead to one server.
_WITNESSES: Final = 5


class Blocker(msgspec.Struct, frozen=True):
    """The reason why records stay where they are.

    Args:
        kind: the group of equal reasons; only the first of a kind is logged.
        sentence: what happened, for people.
        subject: the id of the record it concerns; None if it concerns every record between these tiers.
    """

    kind: str
    sentence: str
    subject: str | None = None

    def __str__(self) -> str:
        return self.sentence if self.subject is None else f"{self.subject!r}: {self.sentence}"


class Moved(msgspec.Struct):
    """The result of a move: which records have a new home, how many were rewritten, and why others stayed.

    `tier`: the tier that failed, if it is known. `blocked`: a tier failed completely, so further attempts between
    these tiers are useless now.
    """

    records: list[tuple[str, Place]] = []
    rewritten: Counter[Place] = msgspec.field(default_factory=Counter)
    blocker: Blocker | None = None
    tier: str | None = None
    blocked: bool = False

    @property
    def reason(self) -> str | None:
        """Return why records stayed, as a sentence."""
        return None if self.blocker is None else str(self.blocker)

    @property
    def is_broken(self) -> bool:
        """Return whether records stayed because their tier does not hold one as it was written. This is permanent."""
        return self.blocker is not None and self.blocker.kind == NOT_AS_WRITTEN

    @property
    def left(self) -> int:
        """Return how many records have left their tier."""
        return len(self.records) + self.rewritten.total()

    @property
    def places(self) -> Counter[Place]:
        """Return how many records have each place as their new home."""
        return Counter(place for _, place in self.records)


class Altered(Exception):
    """A tier returns a record otherwise than it was written."""


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

        A unit that has changed since it was chosen, or that a tier refuses, stays where it is. The reason is in the
        result.

        Args:
            result: filled step by step, so that the caller has it after a cancellation, too.
        """
        result = Moved() if result is None else result
        behind = self._catalog.pending.among(id for unit in units for id in unit.ids)
        # units with pending writes go last, so that the others need not wait for these writes
        late = [unit for unit in units if not behind.isdisjoint(unit.ids)]
        ready = [unit for unit in units if behind.isdisjoint(unit.ids)]
        broken: dict[str, str] = {}
        waiting = in_batches(late, _ROUND)[::-1] + in_batches(ready, _ROUND)[::-1]
        while waiting and not result.blocked:
            await anyio.lowlevel.checkpoint()  # a cancelled move does not begin another batch
            batch = waiting.pop()
            try:
                carried = await self._move(batch, source, target, salience)
            except (A2MError, Altered, AnswerTooLong) as refused:
                if isinstance(refused, A2MError) and no_room(refused) is not None:
                    result.blocker, result.blocked = blocker_of(refused), True  # a full tier refuses every unit
                    continue
                # one unit of several may be at fault: halve the batch until that unit is alone
                if len(batch) > 1:
                    waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                else:
                    result.blocker = blocker_of(refused, batch[0])
            except (TierDown, OSError) as failure:
                result.blocker, result.blocked = blocker_of(failure), True
                result.tier = failure.tier if isinstance(failure, TierDown) else None
            else:
                if carried is None:
                    sentence = "an earlier change of the same records is still in doubt"
                    result.blocker = Blocker("unsettled", sentence, batch[0].ids[0])
                    continue
                result.records += [(entry.id, Place(entry.owner, target)) for entry in carried.moved]
                broken |= carried.broken
        still_behind = self._catalog.pending.among(behind, source)  # a replacement may have given a record another home
        if result.blocker is None and still_behind:
            sentence = f"{source} has pending writes for a record"
            result.blocker = Blocker("behind", sentence, min(still_behind))
        self.log_blocker(source, target, result)
        if result.blocker is None and broken:  # already logged when it was found
            id, how = next(iter(broken.items()))
            result.blocker = Blocker(NOT_AS_WRITTEN, how, id)
        return result

    def log_blocker(self, source: str, target: str, moved: Moved) -> None:
        """Log why records do not move, once when it begins and once when it ends.

        A blocker of one record ends when the record has left the source. A blocker of all records ends when one moves.
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
                sentence = f"move={source}->{target} records not moved: {blocker}"
                self._alerts.begin(alert_key, logging.WARNING, sentence, cause=blocker.subject)
        elif blocked and not self._blocked((source, target)):
            log.info("move=%s->%s records move again", source, target)

    def end_alerts(self, waiting: Collection[tuple[str, str]]) -> None:
        """End the alerts of all (source, target) pairs but `waiting`: no record waits there any more."""
        for alert in self._alerts:
            if isinstance(alert, _Broken) and self._catalog.records.get(alert.id) is None:
                self._alerts.end(alert)
        over = [each for each in self._alerts if isinstance(each, _AlertKey) and each.way not in waiting]
        for each in over:
            self._alerts.end(each)
        for way in dict.fromkeys(each.way for each in over):
            log.info("move=%s->%s no records wait any more", *way)

    def _blocked(self, way: tuple[str, str]) -> list["_AlertKey"]:
        return [each for each in self._alerts if isinstance(each, _AlertKey) and each.way == way]

    def _lives_in(self, tier: str, id: str) -> bool:
        entry = self._catalog.records.get(id)
        return entry is not None and entry.home == tier

    async def _move(self, units: Sequence[Unit], source: str, target: str, salience: float) -> "_Carried | None":
        """Move the units. Return None if other changes of the same records take too long."""
        core = self._core
        core.reconciler.check(source, writes=False)  # no write is needed there: the old copies become strays
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
                        # give up the records that get no new home; a flip is durable before the claim is released
                        change.note = partial(core.catalog.give_up, carried.entries, target)
                        await run(MOVE, carried.steps)
                return carried
            except StaleClaim:
                continue

    async def claim(self, units: Sequence[Unit], source: str, target: str) -> tuple[Claim, list[list[Entry]]] | None:
        """Claim all names that the units touch. Return the claim and the current entries; None if others keep them."""

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
        """Return the units that still live in `source`, each with all current members of its group.

        A record that was written later under one of the ids is left out.
        """
        newest = {id: unit.newest for unit in units for id in unit.ids}
        entries = self._catalog.records.find(newest).values()
        return self._catalog.records.units(e for e in entries if e.home == source and e.seq <= newest[e.id])


class _AlertKey(msgspec.Struct, frozen=True):
    """The alert that records do not move from a source to a target. Its cause is the id of the record, if it is one."""

    way: tuple[str, str]
    kind: str


class _Broken(msgspec.Struct, frozen=True):
    """The alert that a tier does not hold a record as it was written. Its cause is the difference."""

    id: str


class _Carried:
    """The units of one move, under their claim.

    `entries`: their records as the catalog has them. `moved`: the old entries of the records that have a new home.
    `broken`: for each record that the source does not hold as it was written, the difference.
    """

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
        # if the source has lost a record, clearing may have made the stray at the target its home
        self._groups = [unit for unit in self._groups if self._catalog.records.unchanged(unit) is not None]
        self.entries = [entry for unit in self._groups for entry in unit]
        await self._refuse_one_server()

    async def _refuse_one_server(self) -> None:
        """Raise TierDown if both tiers seem to lead to one server.

        After such a move, removing the old copy would remove the record. A native store has an identity, so only a
        lifted target is checked. If it already holds records of the move, but no others that live in the source, these
        are copies of an earlier move, and are removed.
        """
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
            sentence = f"move={source}->{target} both seem to lead to one server; give each tier a store of its own"
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
                wrong = f"tier={source} record not moved: it does not hold {entry.id!r}, which should live there"
            elif is_current(record, entry):
                wrong = f"tier={source} record not moved: it holds {entry.id!r} altered"
            else:
                how = f"{source}: {former([entry.id])}"
                wrong = f"tier={source} record not moved: {former([entry.id])}"
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
    """Write the records to `target`, read them back and compare. Repeat the write once for those that differ.

    Raises:
        Altered: the target still holds a record otherwise.
    """
    left = await gateway.write_seen(target, [draft_of(record) for record in records])
    for what in left.values():
        raise Altered(f"{target} does not keep a record as it was written: it {what}")


def blocker_of(failure: A2MError | Altered | TierDown | OSError, unit: Unit | None = None) -> Blocker:
    """Return a failure as a blocker of a move. `unit` is the unit that could not move, if others may still move."""
    match failure:
        case AnswerTooLong() | Altered():
            kind = type(failure).__name__
        case TierDown():
            kind = f"{failure.tier} is down"  # the tier's link logs the reason, and its changes
        case A2MError():
            reason = (failure.data or {}).get("reason")
            kind = reason if isinstance(reason, str) else f"refused with {failure.code}"
            if no_room(failure) is not None:
                unit = None  # a full tier refuses every unit
        case _:
            kind = "the catalog's disk"
    return Blocker(kind, str(failure), None if unit is None else unit.ids[0])
