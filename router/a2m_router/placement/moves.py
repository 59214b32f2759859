"""Moves: changing a record's home, between two servers that share no transaction.

The steps, in their order; the crash table of docs/architecture.md says what remains when anything dies in between:
1. a stray at the target is noted;
2. the records are read from the source, vectors included, and compared with the digests in the catalog;
3. they are written to the target under their own ids;
4. they are read back from there, and every field that must not change is compared;
5. the flip: their home becomes the target, if they still are what they were. Synced. This is the commit point;
6. the sweeper removes the old copies when no reader needs them any more.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Final

import anyio
import anyio.lowlevel
import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, Name, names_of
from a2m_router.catalog.entries import Entry, former, is_as_it_is
from a2m_router.catalog.lookup import Selection
from a2m_router.placement.settling import Settling
from a2m_router.placement.sweeping import InTheWay, Sweeper
from a2m_router.process.budget import left
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, no_room
from a2m_router.protocol.wire.events import Place
from a2m_router.protocol.wire.records import Record, digest, draft_of
from a2m_router.ranking.policy import Unit, in_batches
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import AnswerTooLong, TierDown
from a2m_router.tiers.together import failures_in, outcomes

log = logging.getLogger(__name__)

# How long a move waits for another change of the same records before it leaves them to the next pass.
_CLAIM_SECONDS: Final = 5.0

# Records moved in one round of calls: enough to share the round trips, few enough to hold in memory with their vectors.
_ROUND: Final = 200

# Kinds of what is in the way between two tiers that the log tells at once: a server may word each refusal differently.
_MOST_KINDS: Final = 10

# Other records of a tier that are looked for where a record is found that is still on its way there.
_WITNESSES: Final = 5


class Hindrance(msgspec.Struct, frozen=True):
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
    hindrance: Hindrance | None = None
    tier: str | None = None
    blocked: bool = False

    @property
    def reason(self) -> str | None:
        """Why others stayed, in words."""
        return None if self.hindrance is None else str(self.hindrance)

    @property
    def is_broken(self) -> bool:
        """Whether they stayed since their tier does not hold one of them as it was written: that does not pass."""
        return self.hindrance is not None and self.hindrance.kind == NOT_AS_WRITTEN

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

    def __init__(self, catalog: Catalog, copies: Copies, sweeper: Sweeper, settling: Settling) -> None:
        self._catalog = catalog
        self._copies = copies
        self._sweeper = sweeper
        self._settling = settling
        # what the log has said of each way, by its kind, and of which record, as far as it goes on
        self._said: dict[tuple[str, str], dict[str, str | None]] = {}
        self._one_server: set[tuple[str, str]] = set()  # of which the log has said that they seem to lead to one
        # ids of which the log has said that their tier does not hold them as they were, and how it holds them
        self._broken: dict[str, str] = {}

    async def carry_out(
        self, units: Sequence[Unit], source: str, target: str, salience: float = 0.0, *, result: Moved | None = None
    ) -> Moved:
        """Move whole units from `source` to `target`, adding `salience` on arrival.

        A unit that has changed since it was chosen, or that a tier refuses, stays where it is; the reason says why.
        What comes of it is added to `result` as it comes, for those who have to know though they are cancelled.
        """
        result = Moved() if result is None else result
        behind = self._catalog.behind(id for unit in units for id in unit.ids)
        # what its tier has yet to catch up with may have to be waited for, which is no reason for others to wait
        late = [unit for unit in units if not behind.isdisjoint(unit.ids)]
        ready = [unit for unit in units if behind.isdisjoint(unit.ids)]
        waiting = in_batches(late, _ROUND)[::-1] + in_batches(ready, _ROUND)[::-1]
        while waiting and not result.blocked:
            await anyio.lowlevel.checkpoint()  # what was cancelled during the last one does not begin another
            batch = waiting.pop()
            try:
                moved = await self._move(batch, source, target, salience)
            except (A2MError, Altered, AnswerTooLong) as refused:
                if isinstance(refused, A2MError) and no_room(refused) is not None:
                    result.hindrance, result.blocked = hindrance_of(refused), True  # whichever unit it is asked to take
                    continue
                # of several units one may be at fault: halved until it stands alone
                if len(batch) > 1:
                    waiting += [batch[len(batch) // 2 :], batch[: len(batch) // 2]]
                else:
                    result.hindrance = hindrance_of(refused, batch[0])
            except (TierDown, OSError) as failure:
                result.hindrance, result.blocked = hindrance_of(failure), True
                result.tier = failure.tier if isinstance(failure, TierDown) else None
            else:
                if moved is None:
                    sentence = "an earlier change of the same records has not been settled yet"
                    result.hindrance = Hindrance("unsettled", sentence, batch[0].ids[0])
                result.records += [(entry.id, Place(entry.owner, target)) for entry in moved or ()]
        still_behind = self._catalog.behind(behind)
        if result.hindrance is None and still_behind:
            sentence = f"{source} has yet to catch up with what replaced a record"
            result.hindrance = Hindrance("behind", sentence, min(still_behind))
        self.say(source, target, result)
        if result.hindrance is None:  # of what is broken the log has spoken when it was met
            broken = next((id for unit in units for id in unit.ids if id in self._broken), None)
            if broken is not None:
                result.hindrance = Hindrance(NOT_AS_WRITTEN, self._broken[broken], broken)
        return result

    def say(self, source: str, target: str, moved: Moved) -> None:
        """Why something does not move is logged when it begins and when it is over, not with every trial.

        What hinders one record is over when that record is not there any more; what hinders all, when something moves.
        """
        said = self._said.setdefault((source, target), {})
        hindrance = moved.hindrance
        for kind, subject in list(said.items()):
            goes_on = moved.left == 0 if subject is None else self._lives_in(source, subject)
            if not goes_on and (subject is not None or hindrance is None or hindrance.kind != kind):
                del said[kind]
                if not said and hindrance is None:
                    log.info("%s -> %s: nothing is in the way any more", source, target)
        if hindrance is not None and hindrance.kind not in said and len(said) < _MOST_KINDS:
            log.warning("%s -> %s: not moved: %s", source, target, hindrance)
            said[hindrance.kind] = hindrance.subject

    def say_over(self, waiting: Collection[tuple[str, str]]) -> None:
        """Of all ways but these, (source, target), where something may wait still: nothing does any more."""
        for way in [way for way, said in self._said.items() if said and way not in waiting]:
            del self._said[way]
            log.info("%s -> %s: nothing waits to be moved any more", *way)

    def _lives_in(self, tier: str, id: str) -> bool:
        entry = self._catalog.find([id]).get(id)
        return entry is not None and entry.home == tier

    async def _move(self, units: Sequence[Unit], source: str, target: str, salience: float) -> list[Entry] | None:
        """What moved; None if others are at work on one of the records for too long."""
        self._sweeper.check(source, writes=False)  # what stays there is a stray
        self._sweeper.check(target)
        claimed = await self.claim(units, source, target)
        if claimed is None:
            return None
        claim, groups = claimed
        failure: Exception | None = None
        moved: list[Entry] = []
        # from here on a cancellation could leave the claim or the copies without an owner; every call has a deadline
        with anyio.CancelScope(shield=True):
            try:
                moved = await self._copy_and_flip(groups, source, target, salience)
            except (TierDown, A2MError, Altered, InTheWay, OSError) as problem:
                failure = problem
            finally:
                # of those that have no new home; and what has one is durable before the claim goes
                given_up = partial(self._catalog.give_up, [entry for unit in groups for entry in unit], target)
                await self._settling.release([claim], [failure], note=given_up if groups else None)
                self._sweeper.wake(source, target)
        if isinstance(failure, InTheWay):
            return await self._move(units, source, target, salience)
        if failure is not None:
            raise failure
        return moved

    async def claim(self, units: Sequence[Unit], source: str, target: str) -> tuple[Claim, list[list[Entry]]] | None:
        """A claim on all that the units touch, and their entries as they are under it; None if others keep it busy."""

        def look() -> tuple[set[Name], list[list[Entry]]]:
            groups = self.present(units, source)
            entries = [entry for unit in groups for entry in unit]
            names = {name for entry in entries for name in names_of(entry)}
            return names | self._sweeper.names_in_the_way(target, entries), groups

        try:
            return await self._catalog.claims.take_touched(look, lambda: min(_CLAIM_SECONDS, left()))
        except TimeoutError:
            return None

    def present(self, units: Sequence[Unit], source: str) -> list[list[Entry]]:
        """The units that still live in `source`, each with all the members its group has now; not what was written
        since under an id of theirs."""
        newest = {id: unit.newest for unit in units for id in unit.ids}
        entries = self._catalog.find(newest).values()
        return self._catalog.units(e for e in entries if e.home == source and e.seq <= newest[e.id])

    async def _copy_and_flip(
        self, groups: Sequence[Sequence[Entry]], source: str, target: str, salience: float
    ) -> list[Entry]:
        entries = [entry for unit in groups for entry in unit]
        if not entries:
            return []
        await self._sweeper.clear(target, entries)
        # of what the source has lost, what was to be cleared away at the target may have become the record
        groups = [unit for unit in groups if self._catalog.unchanged(unit) is not None]
        entries = [entry for unit in groups for entry in unit]
        await self._refuse_one_server(entries, source, target)
        await self._catalog.writable()
        self._catalog.note_copies(entries, target)
        records, _ = _all_well(
            await outcomes(
                [
                    lambda: self._copies.read(source, [entry.id for entry in entries], embeddings=True),
                    self._note_synced,
                ]
            )
        )
        behind = self._catalog.behind(entry.id for entry in entries)
        groups = [
            unit
            for unit in groups
            if behind.isdisjoint(entry.id for entry in unit) and self._is_whole(unit, records, source)
        ]
        await self.write(target, [records[entry.id] for unit in groups for entry in unit])
        vectors = {id: record.embedding for id, record in records.items() if record.embedding is not None}
        await self._catalog.writable()
        return self._catalog.flip(groups, target, salience, vectors)

    async def _refuse_one_server(self, entries: Sequence[Entry], source: str, target: str) -> None:
        """Raises TierDown if both tiers seem to lead to one server: what would be removed from the one, after the move,
        would be the record in the other. A native store says who it is; of another, the target has what lives in the
        source, and not only what an earlier move has left there."""
        if self._copies.mode(target).native:
            return
        ids = [entry.id for entry in entries]
        there = await self._copies.read(target, ids)
        if not there:
            return
        newest = self._catalog.newest(Selection(tiers=[source]), len(ids) + _WITNESSES)
        others = [entry.id for entry in newest if entry.id not in set(ids)]
        if not others or await self._copies.read(target, others):
            if (source, target) not in self._one_server:
                self._one_server.add((source, target))
                log.error("%s and %s seem to lead to one server; give each a store of its own", source, target)
            raise TierDown(target, f"it seems to lead to the same server as {source}", 60.0, None)
        held = await self._copies.read(source, there)
        left_over = {id for id in there if id in held and digest(held[id]) == digest(there[id])}
        await self._copies.remove(target, left_over)

    async def _note_synced(self) -> dict[str, Record]:
        await self._catalog.synced()
        return {}

    def _is_whole(self, unit: Sequence[Entry], records: dict[str, Record], source: str) -> bool:
        for entry in unit:
            record = records.get(entry.id)
            if record is not None and digest(record) == entry.digest:
                self._broken.pop(entry.id, None)
                continue
            how = f"{source} does not hold it as it was written"
            if record is None:
                wrong = f"{source} does not hold {entry.id!r}, which should live there; it cannot be moved"
            elif is_as_it_is(record, entry):
                wrong = f"{source} holds {entry.id!r} altered; it is not moved"
            else:
                how = f"{source}: {former([entry.id])}"
                wrong = f"{how}; it is not moved"
            if entry.id not in self._broken:
                log.error("%s", wrong)
            self._broken[entry.id] = how
            return False
        return True

    async def write(self, target: str, records: Sequence[Record]) -> None:
        """Write the records to `target` and see that they are there as they were. Once more for those that are not.

        Raises Altered.
        """
        left = await self._copies.write_seen(target, [draft_of(record) for record in records])
        for what in left.values():
            raise Altered(f"{target} does not keep what it is given: it {what}")


def _all_well(found: Sequence[dict[str, Record] | A2MError | TierDown | OSError]) -> list[dict[str, Record]]:
    for failure in failures_in(found):
        raise failure
    return [outcome for outcome in found if isinstance(outcome, dict)]


def hindrance_of(failure: A2MError | Altered | TierDown | OSError, unit: Unit | None = None) -> Hindrance:
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
    return Hindrance(kind, str(failure), None if unit is None else unit.ids[0])
