"""Candidates: the results of one tier, filtered by the question, and requests for more if too few remain."""

from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import Final, NamedTuple, Protocol

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.method_params import Recall
from a2m_router.protocol.wire.records import Record
from a2m_router.ranking.fusion import Ranking, reciprocal_rank
from a2m_router.reading.homes import acceptable, check_riders
from a2m_router.reading.question import Question
from a2m_router.tiers.gateway import TierGateway

# Factor for the next request if too few candidates of a tier remain after filtering.
MORE: Final = 8

# The most candidates to request from a tier.
MOST: Final = 10_000

# If at most so many records match, a request can contain their ids.
FEW: Final = 1000

# A record returned without its vector does not show whether it has one.
EMBEDDING: Final = "embedding"

Ask = Callable[[], Awaitable[list[Record]]]


class TierCalls(Protocol):
    """How to call one kind of tier. Each method prepares a call, and returns the function that makes it."""

    def ranking(self, tier: Tier, question: Question) -> Ask:
        """Return a function that gets the tier's ranking of its candidates."""
        ...

    def listing(self, tier: Tier, question: Question) -> Ask:
        """Return a function that gets all matching records of the tier."""
        ...


class SearchCalls(TierCalls, Protocol):
    """How to call one kind of managed tier."""

    def search(self, tier: Tier, question: Question) -> Ask:
        """Return a function that gets all matches of the query.

        It raises QUOTA_EXCEEDED if they are more than one call returns.
        """
        ...


class TierResult(NamedTuple):
    """The candidates of one tier.

    Args:
        kept: the candidates that passed the filter.
        is_enough: they are as many as wanted.
        is_full: the server returned as many records as it can at once.
        is_all: the server has no more.
        is_shared: some results belonged to another federation.
    """

    kept: list[Record]
    is_enough: bool
    is_full: bool
    is_all: bool
    is_shared: bool


class Candidates:
    """Gets the candidates of single tiers, and filters them."""

    def __init__(self, catalog: Catalog, gateway: TierGateway) -> None:
        self._catalog = catalog
        self._gateway = gateway

    async def enough(
        self, tier: Tier, asked: Recall, question: Question, keep: Callable[[list[Record]], list[Record]]
    ) -> TierResult:
        """Get a tier's candidates, and filter them by `keep`.

        Copies that wait for their removal, records that do not match, and records of another federation may fill the
        result. If less than the wanted number remains, the tier is asked for more.
        """
        most = self._gateway.recall_limit(tier.name, MOST)
        limit = min(question.limit, most)
        while True:
            found = await self._gateway.recall(tier.name, msgspec.structs.replace(asked, limit=limit))
            kept = keep(found.records)
            standing = self.standing(kept)
            if found.returned < limit or standing >= min(question.wanted, limit) or limit == most:
                is_full = found.returned >= limit == most
                return TierResult(kept, standing >= question.wanted, is_full, found.is_all, found.is_shared)
            limit = min(MORE * limit, most)

    def standing(self, kept: Sequence[Record]) -> int:
        """Return how many of the kept records count as found: one with a pending write may not match any more."""
        return len(kept) - len(self._catalog.pending.among(record.id for record in kept))

    def in_native(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Return the records of a native tier that match.

        They live in the question's tiers now, the caller may see them, and they existed when the read began. The tier
        itself has applied all other conditions.
        """
        names = {tier.name for tier in question.tiers}
        entries = self._catalog.records.find(record.id for record in records)
        matching = {
            entry.id
            for entry in self._accepted(tier, entries.values(), question)
            if entry.home in names and question.may_match(entry) and self._catalog.queries.sees(question.scope, entry)
        }
        return [record for record in records if record.id in matching]

    def in_lifted(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Return the records of a lifted tier that match."""
        entries = self._catalog.queries.among((record.id for record in records), question.selection())
        check_riders(self._gateway, tier.name, records, {entry.id: entry for entry in entries})
        matching = {entry.id for entry in self._accepted(tier, entries, question) if question.may_match(entry)}
        return [record for record in records if record.id in matching and matches(record, question.where.rest)]

    def _accepted(self, tier: Tier, entries: Collection[Entry], question: Question) -> Iterable[Entry]:
        """Return the entries whose copies in `tier` the read accepts. A copy left by a move is skipped."""
        if question.read is None:
            return entries
        accepts = acceptable(self._catalog, question.read, entries)
        return [entry for entry in entries if accepts(entry, tier.name)]

    def here(self, tier: Tier, question: Question, most: int) -> list[str] | None:
        """Return the ids of the matching records in a tier after its answer; None if they are more than `most`."""
        here = self._catalog.queries.few(question.selection([tier]), most)
        return None if here is None else self.with_left(tier, question, here)

    def with_left(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[str]:
        """Append the matching records that have left the tier since the read began.

        No other tier's list has them, and their copies here may still be read.
        """
        left = [] if question.read is None else self._catalog.reads.left(question.read, tier.name)
        matching = [entry.id for entry in self._catalog.queries.among(left, question.selection())]
        return list(dict.fromkeys([*ids, *matching]))


def one_ranking(rankings: Sequence[Sequence[Record]]) -> list[Record]:
    """Merge several rankings of one tier. Only ranks count: scores of two calls are never compared (§5.3)."""
    records = {record.id: record for ranking in rankings for record in ranking}
    ranked = reciprocal_rank([Ranking([record.id for record in ranking]) for ranking in rankings])
    return [records[id] for id, _ in ranked]
