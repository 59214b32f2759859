"""Lifted tiers: any server but an `a2m-store`. It gets the core query; the router applies the remaining conditions.

If the catalog knows that only a few records match, the router sends their ids with the query. It does so, too, if the
server was seen to hold another federation's records. If the router makes the order itself (by time, or by vectors of
its own), it reads the records by id.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.method_params import Recall
from a2m_router.protocol.wire.records import Record
from a2m_router.ranking.fusion import lexical
from a2m_router.reading.candidates import FEW, MORE, MOST, Ask, Candidates, TierResult, one_ranking
from a2m_router.reading.question import Question
from a2m_router.storage.nearest import MAX_NEAREST
from a2m_router.tiers.gateway import TierGateway, raw_json
from a2m_router.tiers.gather import gather
from a2m_router.tiers.lifting import delegable

# Returns the ids of the first records that match a question in a tier, at most a given number.
_Order = Callable[[Question, Tier, int], list[str]]


class Lifted:
    """Calls lifted tiers (`SearchCalls`)."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, candidates: Candidates) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._candidates = candidates

    def ranking(self, tier: Tier, question: Question) -> Ask:
        if question.query is None and question.embedding is None:
            # a server's own times are those of its writes, not of the records
            return self._in_order(tier, question, self._newest, MOST)
        if question.embedding is None or self._gateway.mode(tier.name).vectors:
            return self._by_its_own_ranking(tier, question)
        by_vector = self._in_order(tier, question, self._nearest, MAX_NEAREST)
        if question.query is None:
            return by_vector
        return partial(_blended, self._by_its_own_ranking(tier, question), by_vector)

    def listing(self, tier: Tier, question: Question) -> Ask:
        return partial(self._among, tier, question, self._catalog.queries.ids(question.selection([tier])))

    def search(self, tier: Tier, question: Question) -> Ask:
        return partial(self._search, tier, question, self._catalog.queries.ids(question.selection([tier])))

    async def _search(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """Return the matches that share a word with the query: a server may rank all its records, however distant."""
        found = await self._among(tier, question, ids)
        sharing = set(lexical(question.query or "", {record.id: record.content for record in found}))
        return [record for record in found if record.id in sharing]

    async def _among(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """Return the matching records among `ids`.

        The server applies no condition: lists and forgets must not depend on how it applies one.
        """
        asked = msgspec.structs.replace(self._core_of(tier, question), where=None)
        return self._candidates.in_lifted(tier, question, await self._gateway.among(tier.name, ids, asked))

    def _core_of(self, tier: Tier, question: Question) -> Recall:
        """Return the part of a question that the server gets. The router applies the rest to the result."""
        where = delegable(question.where.given, metadata=self._catalog.tiers.shows_metadata(tier.name))
        return Recall(
            query=question.query,
            embedding=question.embedding,
            where=where or None,
            embeddings=question.embeddings or question.embedding is not None,
        )

    # --- in the server's own order

    def _by_its_own_ranking(self, tier: Tier, question: Question) -> Ask:
        sends_ids = question.is_narrow or self._gateway.is_shared(tier.name)
        few = self._catalog.queries.few(question.selection([tier]), FEW) if sends_ids else None
        return partial(self._ranking, tier, question, few)

    async def _ranking(self, tier: Tier, question: Question, few: Sequence[str] | None) -> list[Record]:
        """Rank the tier's candidates.

        Args:
            few: the matching ids if the server gets them; None if all its records match, or too many to send.
        """
        if few == []:
            return []
        found = await self._among_few(tier, question, few)
        if found.is_enough:
            return found.kept
        if few is None and found.is_shared:
            return await self._among_others(tier, question, found)
        if few is None:
            few = self._candidates.here(tier, question, FEW)
        return await self._in_parts(tier, question, few) if found.is_full and few is not None else found.kept

    async def _among_few(self, tier: Tier, question: Question, few: Sequence[str] | None) -> TierResult:
        asked = self._core_of(tier, question)
        if few is not None:
            asked.where = {**(asked.where or {}), "id": raw_json(few)}
        keep = partial(self._candidates.in_lifted, tier, question)
        return await self._candidates.enough(tier, asked, question, keep)

    async def _among_others(self, tier: Tier, question: Question, found: TierResult) -> list[Record]:
        """Return the candidates of a server whose results another federation's records fill, or nearly fill.

        The server gets the ids of our records, some at a time.
        """
        # a result that is not full is complete, unless the server returns fewer at once than it declares
        ids = self._candidates.here(tier, question, FEW if found.is_all else MOST)
        if ids is None:
            if not found.is_all:
                question.crowded.add(tier.name)
            return found.kept
        parts = []
        for start in range(0, len(ids), FEW):
            few = ids[start : start + FEW]
            part = await self._among_few(tier, question, few)
            parts.append(await self._in_parts(tier, question, few) if part.is_full else part.kept)
        return one_ranking(parts)[: question.limit]

    async def _in_parts(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """Return the ranking of a server that returns fewer records at once than wanted.

        For a few ids at a time, it returns all matches.
        """
        keep = partial(self._candidates.in_lifted, tier, question)
        asked = self._core_of(tier, question)
        parts = [keep(part) async for part in self._gateway.parts(tier.name, ids, asked)]
        return one_ranking(parts)[: question.limit]

    # --- in the catalog's order

    def _in_order(self, tier: Tier, question: Question, order: _Order, most: int) -> Ask:
        """Return a function that gets the records in an order of the catalog.

        If the tier is asked for more, up to `most`, records that have left it since the read began come last.
        """
        asked = msgspec.structs.replace(self._core_of(tier, question), query=None, embedding=None)
        begun = min(question.limit, most)
        prepared = order(question, tier, begun)

        async def ask() -> list[Record]:
            count, ids = begun, prepared
            is_all = len(ids) < count
            while True:
                found = {record.id: record for record in await self._gateway.among(tier.name, ids, asked)}
                kept = self._candidates.in_lifted(tier, question, [found[id] for id in ids if id in found])
                if is_all or self._candidates.standing(kept) >= question.wanted or count >= most:
                    return kept
                count = min(MORE * count, most)
                here = order(question, tier, count)
                is_all = len(here) < count
                ids = self._candidates.with_left(tier, question, here)

        return ask

    def _newest(self, question: Question, tier: Tier, count: int) -> list[str]:
        return [entry.id for entry in reversed(self._catalog.queries.newest(question.selection([tier]), count))]

    def _nearest(self, question: Question, tier: Tier, count: int) -> list[str]:
        assert question.embedding is not None
        return self._catalog.queries.nearest(question.selection([tier]), question.embedding, count)


async def _blended(by_words: Ask, by_vector: Ask) -> list[Record]:
    """Merge two rankings of one tier."""
    return one_ranking(await gather([by_words, by_vector]))
