"""Recalls: all tiers in question are asked once, at the same time, and their rankings are fused (§4.3)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec

from a2m_router.catalog.active_reads import Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Settings
from a2m_router.protocol.wire.errors import quota
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.vectors import similarity
from a2m_router.ranking.fusion import POOL_WEIGHT, Ranking, by_similarity, lexical, reciprocal_rank
from a2m_router.reading.answers import Answer, Degraded, age, as_answered, with_unaccounted
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import Homes, undisturbed
from a2m_router.reading.question import Question

# A recall by fields that only the catalog has sends the matching ids to the tiers, at most so many.
_MOST_IDS: Final = 10_000

# Why a tier may hold better matches than it returned.
_CROWDED: Final = (
    "its server also holds another federation's records, which fill its results, so some of this federation's may be "
    "missing; give each federation its own server"
)


class Recalls:
    """Carries out recalls."""

    def __init__(self, settings: Settings, catalog: Catalog, fan_out: FanOut, homes: Homes) -> None:
        self._settings = settings
        self._catalog = catalog
        self._fan_out = fan_out
        self._homes = homes

    async def best(self, question: Question) -> Answer:
        """Return the best records for a question; the newest ones if it has neither words nor a vector.

        They are not counted as accessed.

        Raises:
            A2MError: no tier answered, or a required one failed.
        """
        return await undisturbed(self._catalog, partial(self._best, question))

    async def _best(self, question: Question) -> Answer:
        in_question = question.tiers
        barred = self._fan_out.barred(question)
        for tier in in_question:
            if tier.name in barred and (tier.required or len(barred) == len(in_question)):
                raise barred[tier.name].error
        question = msgspec.structs.replace(question, tiers=[tier for tier in in_question if tier.name not in barred])
        with self._catalog.reads.reading() as read:
            question = self._as_of(question, read)
            unaccounted = self._fan_out.unaccounted(question.tiers)
            answers = await self._fan_out.rankings(question)
            # no await from here on: the answer shows one moment of the catalog
            degraded = answers.missing(question.tiers)
            shown, entries, differing = self._homes.shown(question, answers.lists, read)
        if question.query is not None or question.embedding is not None:
            ranked = self._fused(question, shown, answers.lists)
        else:
            newest = sorted(shown, key=lambda each: age(shown[each], entries), reverse=True)
            ranked = [(id, 1 - place / (len(newest) + 1)) for place, id in enumerate(newest)]
        least = question.min_score
        best = [(id, score) for id, score in ranked if least is None or score >= least][: question.wanted]
        degraded += [*differing, *(Degraded(name, _CROWDED) for name in question.crowded)]
        degraded += [Degraded(name, why.reason) for name, why in barred.items()]
        return Answer(
            [as_answered(shown[id], entries.get(id), question.embeddings, score) for id, score in best],
            with_unaccounted(degraded, {**unaccounted, **self._fan_out.unaccounted(question.tiers)}),
        )

    def _as_of(self, question: Question, read: Reading) -> Question:
        """Return the question as the tiers get it within a read."""
        question = msgspec.structs.replace(question, read=read, crowded=set())
        if not question.where.needs_catalog:
            return question
        ids = self._catalog.queries.ids(question.selection())
        if len(ids) > _MOST_IDS:
            raise quota("where", _MOST_IDS, len(ids), "records that match the fields that only the router has")
        return msgspec.structs.replace(question, ids=ids)

    def _fused(
        self, question: Question, shown: Mapping[str, Record], lists: Mapping[str, Sequence[Record]]
    ) -> list[tuple[str, float]]:
        settings = self._settings.recall
        rankings = []
        if "tier" in settings.rankings:
            rankings += [
                Ranking([record.id for record in records], self._settings.tier(tier).weight)
                for tier, records in lists.items()
            ]
        if "lexical" in settings.rankings and question.query is not None:
            texts = {id: record.content for id, record in shown.items()}
            rankings.append(Ranking(lexical(question.query, texts), POOL_WEIGHT))
        if "vector" in settings.rankings and question.embedding is not None:
            rankings.append(Ranking(by_similarity(self._similarities(question.embedding, shown)), POOL_WEIGHT))
        fused = reciprocal_rank(rankings, settings.k)
        # records without a place in the chosen rankings come last
        placed = {id for id, _ in fused}
        last = fused[-1][1] if fused else 1.0
        rest = [id for id in shown if id not in placed]
        return fused + [(id, last / (place + 2)) for place, id in enumerate(rest)]

    def _similarities(self, embedding: Sequence[float], shown: Mapping[str, Record]) -> dict[str, float]:
        """Return similarities on one scale: the store's own, which is exact, or computed from the returned vector."""
        found = {}
        for id, record in shown.items():
            if record.similarity is not None:
                found[id] = record.similarity
            elif record.embedding is not None and len(record.embedding) == len(embedding):
                found[id] = similarity(embedding, record.embedding, self._catalog.vectors.metric())
        return found
