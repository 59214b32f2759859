"""Candidates: what one tier answers, brought to what was meant, and asked for more where that leaves too little."""

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

# How many times more a tier is asked for when too little of its answer may be shown.
MORE: Final = 8

# A tier is asked for at most so many candidates.
MOST: Final = 10_000

# Where no more records than this are meant, their ids can go along with a question.
FEW: Final = 1000

# A record that is told without its vector does not show whether it has one.
EMBEDDING: Final = "embedding"

Ask = Callable[[], Awaitable[list[Record]]]


class Way(Protocol):
    """How one kind of tier is asked. A question is prepared when a method is called, and asked when the result is."""

    def ranking(self, tier: Tier, question: Question) -> Ask:
        """What gets the tier's ranking of its candidates."""
        ...

    def listing(self, tier: Tier, question: Question) -> Ask:
        """What gets all that the tier holds of what is meant."""
        ...


class Searched(Way, Protocol):
    """How one kind of managed tier is asked."""

    def search(self, tier: Tier, question: Question) -> Ask:
        """What gets all that the query finds; it raises QUOTA_EXCEEDED if that is more than a call tells."""
        ...


class Found(NamedTuple):
    """What a tier's server was seen to find.

    Args:
        kept: of its answer, what is meant.
        is_enough: of these there are as many as are wanted.
        is_full: the answer has as many records as the server tells at once.
        is_all: the server finds no more.
        is_shared: some of the answer was another federation's.
    """

    kept: list[Record]
    is_enough: bool
    is_full: bool
    is_all: bool
    is_shared: bool


class Candidates:
    """Gets the candidates of single tiers, and knows which of them are meant."""

    def __init__(self, catalog: Catalog, gateway: TierGateway) -> None:
        self._catalog = catalog
        self._gateway = gateway

    async def enough(
        self, tier: Tier, asked: Recall, question: Question, keep: Callable[[list[Record]], list[Record]]
    ) -> Found:
        """What `keep` leaves of a tier's candidates. Where copies that are only waiting to be removed, or that are not
        meant, or another federation's records fill its answer, so that not even the wanted number is left, it is asked
        for more."""
        most = self._gateway.recall_limit(tier.name, MOST)
        limit = min(question.limit, most)
        while True:
            found = await self._gateway.recall(tier.name, msgspec.structs.replace(asked, limit=limit))
            kept = keep(found.records)
            standing = self.standing(kept)
            if found.told < limit or standing >= min(question.wanted, limit) or limit == most:
                is_full = found.told >= limit == most
                return Found(kept, standing >= question.wanted, is_full, found.is_all, found.is_shared)
            limit = min(MORE * limit, most)

    def standing(self, kept: Sequence[Record]) -> int:
        """How many of a tier's records its answer stands for: what has been replaced may not be meant any more."""
        return len(kept) - len(self._catalog.pending.among(record.id for record in kept))

    def in_native(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Those of a native tier's records that are meant: these live in the question's tiers now, in the caller's
        sight, and were there when it was asked. What else it says the tier has judged."""
        names = {tier.name for tier in question.tiers}
        entries = self._catalog.records.find(record.id for record in records)
        meant = {
            entry.id
            for entry in self._told_by(tier, entries.values(), question)
            if entry.home in names and question.may_mean(entry) and self._catalog.queries.sees(question.scope, entry)
        }
        return [record for record in records if record.id in meant]

    def in_lifted(self, tier: Tier, question: Question, records: list[Record]) -> list[Record]:
        """Those of a lifted tier's records that are meant."""
        entries = self._catalog.queries.among((record.id for record in records), question.selection())
        check_riders(self._gateway, tier.name, records, {entry.id: entry for entry in entries})
        meant = {entry.id for entry in self._told_by(tier, entries, question) if question.may_mean(entry)}
        return [record for record in records if record.id in meant and matches(record, question.where.rest)]

    def _told_by(self, tier: Tier, entries: Collection[Entry], question: Question) -> Iterable[Entry]:
        """Those that the tier's copies stand for: what a move has left behind is its new home's to tell."""
        if question.read is None:
            return entries
        accepts = acceptable(self._catalog, question.read, entries)
        return [entry for entry in entries if accepts(entry, tier.name)]

    def here(self, tier: Tier, question: Question, most: int) -> list[str] | None:
        """The ids of what is meant in a tier, now that it has answered; None if they are more than `most`."""
        here = self._catalog.queries.few(question.selection([tier]), most)
        return None if here is None else self.with_left(tier, question, here)

    def with_left(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[str]:
        """The ids, and behind them those of what has moved on since the read began: it is in the list of no tier but
        this, where it still may be read."""
        left = [] if question.read is None else self._catalog.reads.left(question.read, tier.name)
        meant = [entry.id for entry in self._catalog.queries.among(left, question.selection())]
        return list(dict.fromkeys([*ids, *meant]))


def one_ranking(rankings: Sequence[Sequence[Record]]) -> list[Record]:
    """One ranking out of several of the same tier. Only places count: scores of two calls are never compared (§5.3)."""
    records = {record.id: record for ranking in rankings for record in ranking}
    ranked = reciprocal_rank([Ranking([record.id for record in ranking]) for ranking in rankings])
    return [records[id] for id, _ in ranked]
