"""Moves: changing a record's home, between two servers that share no transaction.

The steps, in their order; ARCHITECTURE's table says what remains when anything dies in between:
1. a stray at the target is noted;
2. the records are read from the source, vectors included, and compared with the digests in the catalog;
3. they are written to the target under their own ids;
4. they are read back from there, and every field that must not change is compared;
5. the flip: their home becomes the target, if they still are what they were. Synced. This is the commit point;
6. the sweeper removes the old copies when no reader needs them any more.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Final, Protocol

import anyio
import msgspec

from router.a2m.errors import A2MError
from router.a2m.records import Draft, Record, digest
from router.catalog.catalog import Catalog
from router.catalog.claims import Claim, Name, group_name, id_name, key_name
from router.catalog.entries import Entry
from router.policy import Unit, in_batches
from router.sweeping import Sweeper
from router.tiers.copies import Copies
from router.tiers.link import TierDown
from router.tiers.together import failures_in, outcomes

log = logging.getLogger(__name__)

# How long a move waits for another change of the same records before it leaves them to the next pass.
_CLAIM_SECONDS: Final = 5.0

# Records moved in one round of calls: enough to share the round trips, few enough to hold in memory with their vectors.
_ROUND: Final = 200


class Moved(msgspec.Struct):
    """What came of a move: how many records have a new home, and why the others have not."""

    records: int = 0
    reason: str | None = None


class Spawn(Protocol):
    """Starts a task that outlives the call, owned by the federation."""

    def __call__(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None: ...


class Settling:
    """Keeps claims while a tier's answer is open: nothing more is written or removed for their ids until it is certain
    that a call whose outcome is unknown cannot land any more."""

    def __init__(self, copies: Copies, sweeper: Sweeper, spawn: Spawn) -> None:
        self._copies = copies
        self._sweeper = sweeper
        self._spawn = spawn

    def release(
        self,
        claim: Claim,
        failures: Sequence[object] = (),
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """Release `claim`: at once if nothing is open, else when every call among `failures` is settled and `then` is
        done."""
        open_calls = [
            f for f in failures if isinstance(f, TierDown) and f.settled is not None and not f.settled.is_set()
        ]
        if not open_calls and then is None:
            claim.release()
            self._sweeper.wake()
            return

        async def settle() -> None:
            try:
                for failure in open_calls:
                    assert failure.settled is not None
                    await self._copies.link(failure.tier).settle(failure.settled)
                if then is not None:
                    await then()
            finally:
                claim.release()
                self._sweeper.wake()

        self._spawn(settle)


class Moves:
    """Carries moves out."""

    def __init__(self, catalog: Catalog, copies: Copies, sweeper: Sweeper, settling: Settling) -> None:
        self._catalog = catalog
        self._copies = copies
        self._sweeper = sweeper
        self._settling = settling
        self._reasons: dict[tuple[str, str], str] = {}

    async def carry_out(self, units: Sequence[Unit], source: str, target: str, salience: float = 0.0) -> Moved:
        """Move whole units from `source` to `target`, adding `salience` on arrival.

        A unit that has changed since it was chosen, or that a tier refuses, stays where it is; the reason says why.
        """
        for tier in (source, target):
            link = self._copies.link(tier)
            if link.status != "up":
                return Moved(0, f"{tier}: {link.reason}")
        result = Moved()
        for batch in in_batches(units, _ROUND):
            part = await self._move(batch, source, target, salience)
            result.records += part.records
            result.reason = part.reason or result.reason
        self._say(source, target, result)
        return result

    def _say(self, source: str, target: str, result: Moved) -> None:
        """Why nothing moves is logged when it begins, not with every trial."""
        known = self._reasons.get((source, target))
        if result.reason is not None and result.reason != known:
            log.warning("%s -> %s: not moved: %s", source, target, result.reason)
        if result.reason is not None:
            self._reasons[source, target] = result.reason
        else:
            self._reasons.pop((source, target), None)

    async def _move(self, units: Sequence[Unit], source: str, target: str, salience: float) -> Moved:
        claimed = await self._claim(units, source, target)
        if claimed is None:
            return Moved(0, "an earlier change of the same records has not been settled yet")
        claim, groups = claimed
        moved = Moved()
        failures: list[object] = []
        # from here on a cancellation could leave the claim or the copies without an owner; every call has a deadline
        with anyio.CancelScope(shield=True):
            try:
                moved.records = await self._copy_and_flip(groups, source, target, salience)
            except (TierDown, A2MError, OSError) as failure:
                failures.append(failure)
                self._catalog.give_up([entry for unit in groups for entry in unit], target)
                moved.reason = str(failure)
            finally:
                self._settling.release(claim, failures)
        return moved

    async def _claim(self, units: Sequence[Unit], source: str, target: str) -> tuple[Claim, list[list[Entry]]] | None:
        """A claim on all that the units touch, and their entries as they are under it; None if others keep it busy."""
        claim: Claim | None = None
        names: set[Name] = set()
        while True:
            groups = self._present(units, source)
            entries = [entry for unit in groups for entry in unit]
            needed = {name for entry in entries for name in _names(entry)}
            needed |= self._sweeper.names_in_the_way(target, entries)
            if claim is not None and needed <= names:
                return claim, groups
            if claim is not None:
                claim.release()
            names = needed
            with anyio.move_on_after(_CLAIM_SECONDS):
                claim = await self._catalog.claims.take(names)
                continue
            return None

    def _present(self, units: Sequence[Unit], source: str) -> list[list[Entry]]:
        """The units that still live in `source`, each with all the members its group has now."""
        found: dict[str, list[Entry]] = {}
        for unit in units:
            entry = next(iter(self._catalog.find(unit.ids).values()), None)
            if entry is not None and entry.home == source:
                whole = self._catalog.unit(entry)
                found[whole[0].id] = whole
        return list(found.values())

    async def _copy_and_flip(self, groups: Sequence[Sequence[Entry]], source: str, target: str, salience: float) -> int:
        entries = [entry for unit in groups for entry in unit]
        if not entries:
            return 0
        if not self._catalog.is_scanned(target):
            raise TierDown(target, "what it holds is still being taken into the account", 1.0, None)
        await self._sweeper.clear(target, entries)
        self._catalog.note_copies(entries, target)
        records, _ = _all_well(
            await outcomes(
                [
                    lambda: self._copies.read(source, [entry.id for entry in entries], embeddings=True),
                    self._note_synced,
                ]
            )
        )
        groups = [unit for unit in groups if self._is_whole(unit, records, source)]
        await self._write(target, [records[entry.id] for unit in groups for entry in unit])
        moved = self._catalog.flip(groups, target, salience)
        self._catalog.give_up(entries, target)
        await self._catalog.synced()
        return len(moved)

    async def _note_synced(self) -> dict[str, Record]:
        await self._catalog.synced()
        return {}

    def _is_whole(self, unit: Sequence[Entry], records: dict[str, Record], source: str) -> bool:
        for entry in unit:
            if entry.id not in records:
                log.error("%s does not hold %r, which should live there; it cannot be moved", source, entry.id)
                return False
            if digest(records[entry.id]) != entry.digest:
                log.error("%s holds %r altered; it is not moved", source, entry.id)
                return False
        return True

    async def _write(self, target: str, records: Sequence[Record]) -> None:
        """Write the records to `target` and see that they are there as they were. Once more for those that are not."""
        left = list(records)
        if not left:
            return
        for _ in range(2):
            await self._copies.write(target, [_draft(record) for record in left])
            found = await self._copies.read(target, [record.id for record in left], embeddings=True)
            left = [record for record in left if not _same(record, found.get(record.id))]
            if not left:
                return
            # a tier that holds an id keeps the old content and still answers with the id
            await self._copies.remove(target, [record.id for record in left])
        raise TierDown(target, f"does not keep what it is given: {left[0].id!r} came back altered", 60.0, None)


def _same(record: Record, copy: Record | None) -> bool:
    return copy is not None and digest(copy) == digest(record)


def _draft(record: Record) -> Draft:
    return Draft(
        id=record.id,
        content=record.content,
        created_at=record.created_at,
        role=record.role,
        metadata=record.metadata,
        group=record.group,
        salience=record.salience,
        owner=record.owner,
        session=record.session,
        key=record.key,
        revision=record.revision,
        embedding=record.embedding,
        uri=record.uri,
        media_type=record.media_type,
    )


def _names(entry: Entry) -> list[Name]:
    names = [id_name(entry.id)]
    if entry.key is not None:
        names.append(key_name(entry.owner, entry.key))
    if entry.group is not None:
        names.append(group_name(entry.owner, entry.group))
    return names


def _all_well(found: Sequence[dict[str, Record] | A2MError | TierDown | OSError]) -> list[dict[str, Record]]:
    for failure in failures_in(found):
        raise failure
    return [outcome for outcome in found if isinstance(outcome, dict)]
