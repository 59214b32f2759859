"""A lifted tier: any server but an `a2m-store`. It gets the core query, and the router applies the rest to its answer.

Where the catalog knows that only a few records are meant, their ids go along; likewise where its server was seen to
hold another federation's records, too. What the router has to order itself (by time, or by vectors of its own) is read
by id.
"""

from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.method_params import Recall
from a2m_router.protocol.wire.records import Record
from a2m_router.ranking.fusion import lexical
from a2m_router.reading.candidates import FEW, MORE, MOST, Ask, Candidates, Found, one_ranking
from a2m_router.reading.question import Question
from a2m_router.storage.nearest import MAX_NEAREST
from a2m_router.tiers.gateway import TierGateway, raw_json
from a2m_router.tiers.gather import gather
from a2m_router.tiers.lifting import delegable

# The first ids, so many, of what a question means in a tier.
_Order = Callable[[Question, Tier, int], list[str]]


class Lifted:
    """Asks lifted tiers (`Searched`)."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, candidates: Candidates) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._candidates = candidates

    def ranking(self, tier: Tier, question: Question) -> Ask:
        if question.query is None and question.embedding is None:
            # a server's own times are those of its writes
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
        """What the query finds and shares a word with it: a server may rank all that it has, however far away."""
        found = await self._among(tier, question, ids)
        sharing = set(lexical(question.query or "", {record.id: record.content for record in found}))
        return [record for record in found if record.id in sharing]

    async def _among(self, tier: Tier, question: Question, ids: Sequence[str]) -> list[Record]:
        """Those of `ids` that are meant. The server selects by no condition: what is listed or forgotten must not
        depend on how it does that."""
        asked = msgspec.structs.replace(self._core_of(tier, question), where=None)
        return self._candidates.in_lifted(tier, question, await self._gateway.among(tier.name, ids, asked))

    def _core_of(self, tier: Tier, question: Question) -> Recall:
        """What of a question the server is sent; the rest is applied to its answer."""
        where = delegable(question.where.given, metadata=self._catalog.tiers.shows_metadata(tier.name))
        return Recall(
            query=question.query,
            embedding=question.embedding,
            where=where or None,
            embeddings=question.embeddings or question.embedding is not None,
        )

    # --- as its server ranks

    def _by_its_own_ranking(self, tier: Tier, question: Question) -> Ask:
        is_told = question.is_narrow or self._gateway.is_shared(tier.name)
        few = self._catalog.queries.few(question.selection([tier]), FEW) if is_told else None
        return partial(self._ranking, tier, question, few)

    async def _ranking(self, tier: Tier, question: Question, few: Sequence[str] | None) -> list[Record]:
        """`few`: the ids that are meant, where the server is to be told them; None where all that it has is meant, or
        too much to be told."""
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

    async def _among_few(self, tier: Tier, question: Question, few: Sequence[str] | None) -> Found:
        asked = self._core_of(tier, question)
        if few is not None:
            asked.where = {**(asked.where or {}), "id": raw_json(few)}
        meant = partial(self._candidates.in_lifted, tier, question)
        return await self._candidates.enough(tier, asked, question, meant)

    async def _among_others(self, tier: Tier, question: Question, found: Found) -> list[Record]:
        """What is meant, at a server whose answer another federation's records have filled, or as good as: it is asked
        for the ids of ours, so many at a time."""
        # an answer that is not full is all, unless the server tells fewer at once than it says
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
        """The ranking of a server that tells fewer records at once than are wanted: asked of a few ids at a time, it
        tells all that it finds."""
        meant = partial(self._candidates.in_lifted, tier, question)
        asked = self._core_of(tier, question)
        parts = [meant(part) async for part in self._gateway.parts(tier.name, ids, asked)]
        return one_ranking(parts)[: question.limit]

    # --- as the catalog orders

    def _in_order(self, tier: Tier, question: Question, order: _Order, most: int) -> Ask:
        """What gets the records in an order that the catalog knows; where the tier is asked for more, of `most` at
        most, what has moved on since the read began comes last."""
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
    """One ranking out of two of the same tier."""
    return one_ranking(await gather([by_words, by_vector]))
