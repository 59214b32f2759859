"""Native tiers: an `a2m-store` applies the whole question itself."""

from functools import partial
from typing import Final

from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Recall, Timeline
from a2m_router.protocol.wire.records import Record
from a2m_router.reading.candidates import FEW, Ask, Candidates, one_ranking
from a2m_router.reading.question import Question
from a2m_router.tiers.gateway import TierGateway, raw_json

# A forget by query requests at most so many matches from a tier without a limit of its own.
_MOST_MATCHES: Final = 4096


class Native:
    """Calls native tiers (`SearchCalls`)."""

    def __init__(self, gateway: TierGateway, candidates: Candidates) -> None:
        self._gateway = gateway
        self._candidates = candidates

    def ranking(self, tier: Tier, question: Question) -> Ask:
        return partial(self._ranking, tier, question)

    def listing(self, tier: Tier, question: Question) -> Ask:
        return partial(self._listing, tier, question)

    def search(self, tier: Tier, question: Question) -> Ask:
        return partial(self._search, tier, question)

    async def _ranking(self, tier: Tier, question: Question) -> list[Record]:
        profile = self._gateway.link(tier.name).profile
        similar = profile is not None and profile.store.similarity
        where = question.where.sent
        asked = Recall(
            query=question.query,
            embedding=question.embedding,
            where=where if question.ids is None else {**(where or {}), "id": raw_json(question.ids)},
            owner=_owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            embeddings=question.embeddings or (question.embedding is not None and not similar),
        )
        keep = partial(self._candidates.in_native, tier, question)
        found = await self._candidates.enough(tier, asked, question, keep)
        few = self._candidates.here(tier, question, FEW) if found.is_full and not found.is_enough else None
        if few is None:
            return found.kept
        # records that do not match fill the result; for a few ids at a time, the tier returns all matches
        return one_ranking([keep(part) async for part in self._gateway.parts(tier.name, few, asked)])

    async def _listing(self, tier: Tier, question: Question) -> list[Record]:
        asked = Timeline(
            where=question.where.sent,
            owner=_owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            embeddings=question.embeddings,
        )
        return [record async for page in self._gateway.pages(tier.name, asked) for record in page]

    async def _search(self, tier: Tier, question: Question) -> list[Record]:
        most = self._gateway.recall_limit(tier.name, _MOST_MATCHES)
        asked = Recall(
            query=question.query,
            where=question.where.sent,
            owner=_owner_for(tier, question.scope),
            key_prefix=question.key_prefix,
            limit=most,
        )
        found = await self._gateway.recall(tier.name, asked)
        if not found.is_all:
            raise A2MError(
                Code.QUOTA_EXCEEDED,
                f"query: at least {found.returned:,} records of {tier.name!r} match, more than one call can return; "
                "narrow it by where or key_prefix, or forget in parts",
                {"tier": tier.name, "limit": most},
            )
        return found.records


def _owner_for(tier: Tier, scope: Scope) -> str | None:
    """Return the owner to send to a tier; None for a shared one, where every caller sees all records."""
    return None if tier.shared else scope.owner
