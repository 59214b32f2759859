"""Records at their homes: which copies a read may take, and reading by id.

A read takes of each record the copy in the home that it had when the read began, and nothing of what was written since,
or under its id. A read during which a group gives way to its summary begins anew: it could meet neither of the two.
"""

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from a2m_router.catalog.active_reads import Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, by_home, former, is_as_it_is
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

# How often a read begins anew.
_MOST_REWRITES: Final = 50

# A record is asked for once more if it was not read: its tier was behind and has caught up, or it has another home now.
_ROUNDS: Final = 2

T = TypeVar("T")


class Homes:
    """Shows records as they are at their homes, and no other copy."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, mounts: Mounts) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._mounts = mounts

    def shown(
        self, question: Question, lists: dict[str, list[Record]], read: Reading
    ) -> tuple[dict[str, Record], Mapping[str, Entry], list[Degraded]]:
        """What may be shown, one copy a record, and the entries of what is not a mount's; the rest is struck from the
        lists. With it the tiers that answer records in another state than they are in.

        What has left the tiers in question meanwhile is not shown as if it were still there.
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
                    if is_shown and not is_as_it_is(record, entry):
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
        """The records of `entries`, as they have just been looked up, read at their homes. To be called within a
        read.

        What has left the tiers in question meanwhile, or the caller's sight, is not shown; nor is what was written anew
        under an id.
        """
        asked = {tier.name for tier in tiers}
        found: dict[str, Record] = {}
        degraded: dict[str, Degraded] = {}
        wanted = list(entries)
        differing: dict[str, str] = {}  # ids, and which tier holds them in another state
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
            # what a tier has not caught up with is as it stands here
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
                    # it may have moved since, and what it left behind stays until the read has ended
                    if id in now and id not in found:
                        if not is_as_it_is(record, now[id]):
                            differing[id] = home
                            continue
                        found[id] = as_answered(record, now[id], embeddings)
            wanted = [now[e.id] for e in wanted if e.id in now and e.id not in found and now[e.id].home not in degraded]
            if not wanted:
                break
        for entry in wanted:
            if entry.id not in differing:
                log.error("%s does not hold %r, which should live there", entry.home, entry.id)
        for home in dict.fromkeys(differing.values()):
            degraded[home] = Former(home, former([id for id, holder in differing.items() if holder == home]))
        return found, list(degraded.values())

    def still_meant(self, entries: Sequence[Entry], selection: Selection) -> list[Entry]:
        """Those of the entries that are there still, as they are now, and still are what was asked for: one that has
        been replaced meanwhile may have another session; and one that has moved may have left the tiers in question, or
        the caller's sight."""
        return still(entries, self._catalog.queries.among([entry.id for entry in entries], selection))


def acceptable(catalog: Catalog, read: Reading, entries: Iterable[Entry]) -> Callable[[Entry, str], bool]:
    """Whether `read` may take the copy that is in a tier's list for the record, once the list has been overlaid
    (`FanOut`); to be asked before anything is awaited."""
    behind = catalog.pending.among(entry.id for entry in entries)
    accepts = catalog.reads.accepts
    return lambda entry, tier: tier == entry.home if entry.id in behind else accepts(read, entry, tier)


def check_riders(gateway: TierGateway, tier: str, records: Iterable[Record], entries: Mapping[str, Entry]) -> None:
    """Raises Untrusted where a tier's server has returned one of its records without its rider."""
    for record in records:
        entry = entries.get(record.id)
        if entry is not None:
            gateway.check_rider(tier, record, created_at=entry.created_at, owner=entry.owner, key=entry.key)


def still(then: Iterable[Entry], now: Iterable[Entry]) -> list[Entry]:
    """Those of the records that are there still, as they are now; not others, written under their ids since."""
    numbers = {entry.id: entry.seq for entry in then}
    return [entry for entry in now if entry.seq == numbers[entry.id]]


async def undisturbed(catalog: Catalog, look: Callable[[], Awaitable[T]]) -> T:
    """What a look finds during which no group gives way to its summary.

    Raises INTERNAL_ERROR, reason "changing", if that goes on all the time.
    """
    for _ in range(_MOST_REWRITES):
        rewrites = catalog.rewrites
        found = await look()
        if catalog.rewrites == rewrites:
            return found
    raise changing("groups are being rewritten faster than they can be read; try again")
