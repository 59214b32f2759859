"""Records at their homes: which copies a read accepts, and reading by id.

A read accepts each record's copy in the home that the record had when the read began. It returns nothing that was
written later, not even under the same id. If a summary replaces a group during a read, the read is repeated: it could
miss both.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from a2m_router.catalog.active_reads import Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, by_home, former, is_current
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.records import Record, record_of
from a2m_router.reading.answers import Degraded, Former, as_answered, reason_of
from a2m_router.reading.question import Question
from a2m_router.tiers.failures import changing
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.gather import gather_outcomes
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mounts import Mounts

log = logging.getLogger(__name__)

# Attempts of a read if summaries replace groups during it.
_MOST_REWRITES: Final = 50

# A record that was not found is read once more: its pending write may have been sent, or it has another home now.
_ROUNDS: Final = 2

T = TypeVar("T")


class Homes:
    """Returns records as they are at their homes, and no other copies."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, mounts: Mounts) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._mounts = mounts

    def shown(
        self, question: Question, lists: dict[str, list[Record]], read: Reading
    ) -> tuple[dict[str, Record], Mapping[str, Entry], list[Degraded]]:
        """SplitWhere the lists of tiers: keep one copy of each record that may be returned.

        A record that has left the question's tiers meanwhile is not returned. Records that may not be returned are
        removed from `lists`.

        Returns:
            The records, the entries of all that are not a mount's, and the tiers that hold records in another state.
        """
        asked = {tier.name for tier in question.tiers}
        mounts = {tier.name for tier in question.tiers if tier in self._mounts}
        entries = self._catalog.records.find({record.id for records in lists.values() for record in records})
        accepts = acceptable(self._catalog, read, entries.values())
        shown: dict[str, Record] = {}
        degraded: list[Degraded] = []
        for tier, records in lists.items():
            kept, differing = [], []
            for record in records:
                entry = entries.get(record.id)
                if tier in mounts:
                    is_shown = entry is None
                elif entry is None or record.id in shown or not self._catalog.queries.sees(question.scope, entry):
                    is_shown = False
                else:
                    is_shown = entry.home in asked and accepts(entry, tier)
                    if is_shown and not is_current(record, entry):
                        differing.append(record.id)
                        is_shown = False
                if is_shown:
                    shown[record.id] = record
                    kept.append(record)
            lists[tier] = kept
            if differing:
                degraded.append(Former(tier, former(differing)))
        return shown, entries, degraded

    async def read(
        self, entries: Sequence[Entry], tiers: Sequence[Tier], scope: Scope, *, embeddings: bool
    ) -> tuple[dict[str, Record], list[Degraded]]:
        """Read the records of `entries`, which were just looked up, at their homes. The caller is within a read.

        A record is left out if it has left `tiers` or the caller's sight meanwhile, or if its id was written anew.
        """
        asked = {tier.name for tier in tiers}
        found: dict[str, Record] = {}
        degraded: dict[str, Degraded] = {}
        wanted = list(entries)
        differing: dict[str, str] = {}  # ids, and the tiers that hold them in another state
        for _ in range(_ROUNDS):
            differing.clear()
            late = self._catalog.pending.among(entry.id for entry in wanted)
            homes = by_home(entry for entry in wanted if entry.id not in late)
            copies = await gather_outcomes(
                [
                    partial(self._gateway.read, home, [entry.id for entry in there], embeddings=embeddings)
                    for home, there in homes.items()
                ]
            )
            now = {
                entry.id: entry
                for entry in still(wanted, self._catalog.records.find(entry.id for entry in wanted).values())
                if entry.home in asked and self._catalog.queries.sees(scope, entry)
            }
            # a pending write is read from the catalog
            for id, draft in self._catalog.pending.drafts(now).items():
                found[id] = as_answered(record_of(draft), now[id], embeddings)
            for home, answer in zip(homes, copies, strict=True):
                if not isinstance(answer, dict):
                    degraded[home] = Degraded(home, reason_of(answer))
                    continue
                try:
                    check_riders(self._gateway, home, answer.values(), now)
                except TierDown as untrusted:
                    degraded[home] = Degraded(home, untrusted.reason)
                    continue
                for id, record in answer.items():
                    # it may have moved since; the copy it left stays until the read has ended
                    if id in now and id not in found:
                        if not is_current(record, now[id]):
                            differing[id] = home
                            continue
                        found[id] = as_answered(record, now[id], embeddings)
            wanted = [now[e.id] for e in wanted if e.id in now and e.id not in found and now[e.id].home not in degraded]
            if not wanted:
                break
        for entry in wanted:
            if entry.id not in differing:
                log.error("tier=%s record missing: it does not hold %r, which should live there", entry.home, entry.id)
        for home in dict.fromkeys(differing.values()):
            degraded[home] = Former(home, former([id for id, holder in differing.items() if holder == home]))
        return found, list(degraded.values())

    def still_matching(self, entries: Sequence[Entry], selection: Selection) -> list[Entry]:
        """Return the current entries of the records that still exist and still match the selection.

        A record that was replaced meanwhile may have another session; one that moved may have left the tiers or the
        caller's sight.
        """
        return still(entries, self._catalog.queries.among([entry.id for entry in entries], selection))


def acceptable(catalog: Catalog, read: Reading, entries: Iterable[Entry]) -> Callable[[Entry, str], bool]:
    """Return a function that says whether `read` accepts a tier's copy for a record.

    The lists must have the pending writes in place (`FanOut`). Call the function before the next await.
    """
    behind = catalog.pending.among(entry.id for entry in entries)
    accepts = catalog.reads.accepts
    return lambda entry, tier: tier == entry.home if entry.id in behind else accepts(read, entry, tier)


def check_riders(gateway: TierGateway, tier: str, records: Iterable[Record], entries: Mapping[str, Entry]) -> None:
    """Raise Untrusted if a tier's server has returned one of its records without its rider."""
    for record in records:
        entry = entries.get(record.id)
        if entry is not None:
            gateway.check_rider(tier, record, created_at=entry.created_at, owner=entry.owner, key=entry.key)


def still(then: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """Return the current entries of the records that still exist; not of later ones with the same ids."""
    numbers = {entry.id: entry.seq for entry in then}
    return [entry for entry in now if entry.seq == numbers[entry.id]]


async def undisturbed(catalog: Catalog, look: Callable[[], Awaitable[T]]) -> T:
    """Run `look`; repeat it if a group was distilled meanwhile, because the result could miss both the originals and
    the summary.

    Raises:
        A2MError: INTERNAL_ERROR with reason "changing", after too many attempts.
    """
    for _ in range(_MOST_REWRITES):
        rewrites = catalog.rewrites
        found = await look()
        if catalog.rewrites == rewrites:
            return found
    raise changing("groups are distilled faster than they can be read; try again")
