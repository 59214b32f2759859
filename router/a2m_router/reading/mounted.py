"""Mounts: a mount applies the question to its own records; they are returned under the mount's name."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Final, NamedTuple

import msgspec
from msgspec import Raw

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.equality import NULL, text_of
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.method_params import Recall, Timeline
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import parse
from a2m_router.reading.candidates import EMBEDDING, Ask, Candidates
from a2m_router.reading.question import Question
from a2m_router.tiers.answers import Untrusted
from a2m_router.tiers.gateway import TierGateway, raw_json
from a2m_router.tiers.lifting import delegable

# Fields that no record of a mount has: it has no owner and no conversation, and earns nothing.
_NOT_IN_MOUNTS: Final = ("owner", "session", "key", "revision", "salience", "access_count", "accessed_at")

# Why a mount is not asked by a vector. If the question has words, the mount gets these.
NO_VECTORS: Final = "it cannot search by a vector, and there are no words to ask it by"
OTHER_WIDTH: Final = "its vectors have another width than the one given, and there are no words to ask it by"


class Barred(NamedTuple):
    """Why a mount cannot be asked: the reason for `degraded`, and the error if the mount is needed."""

    reason: str
    error: A2MError


class Mounted:
    """Calls mounts (`TierCalls`)."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, candidates: Candidates) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._candidates = candidates

    def ranking(self, tier: Tier, question: Question) -> Ask:
        return partial(self._ranking, tier, question)

    def listing(self, tier: Tier, question: Question) -> Ask:
        return partial(self._listing, tier, question)

    def why_not(self, tier: Tier, question: Question) -> Barred | None:
        """Return why a mount cannot rank: it cannot use the question's vector, and there are no words.

        None if it can rank, or if none of its records can match.
        """
        if question.query is not None or _where(tier, question) is None:
            return None
        return self._why_no_vector(tier, question.embedding)

    async def _ranking(self, tier: Tier, question: Question) -> list[Record]:
        where = _where(tier, question)
        if where is None:
            return []
        barred = self._why_no_vector(tier, question.embedding)
        if barred is not None and question.query is None:
            raise barred.error  # without both, the server would return its newest records
        vector = question.embedding if barred is None else None
        asked = Recall(
            query=question.query,
            embedding=vector,
            where=where or None,
            embeddings=question.embeddings or vector is not None or EMBEDDING in question.where.rest,
        )
        show = partial(self._show, tier, question)
        try:
            return (await self._candidates.enough(tier, asked, question, show)).kept
        except A2MError as refused:
            # the width may have been fixed since the server declared it
            if refused.code != Code.EMBEDDING_MISMATCH or vector is None or question.query is None:
                raise
            by_words = msgspec.structs.replace(asked, embedding=None)
            return (await self._candidates.enough(tier, by_words, question, show)).kept

    async def _listing(self, tier: Tier, question: Question) -> list[Record]:
        where = _where(tier, question)
        if where is None:
            return []
        # the server may ignore `where`, and other owners' records are filtered out here: with a limit, they could
        # displace records that match
        limit = question.limit if tier.shared and not question.where.given else None
        asked = Timeline(
            where=where or None,
            limit=limit or None,
            embeddings=question.embeddings or EMBEDDING in question.where.rest,
        )
        found: dict[str, Record] = {}  # a server may return a record twice
        async for page in self._gateway.pages(tier.name, asked):
            found.update((record.id, record) for record in self._show(tier, question, page))
        return list(found.values())

    def _why_no_vector(self, tier: Tier, embedding: Sequence[float] | None) -> Barred | None:
        """Return why a mount that is up cannot search by a vector; None if it can, or may be able to.

        Its metric does not matter: only the ranks of its results count.
        """
        link = self._gateway.link(tier.name)
        if embedding is None or link.status != "up" or link.profile is None:
            return None  # its capabilities may have changed since it went down
        if "embeddings" not in link.profile.capabilities:
            problem = f"{tier.name!r} cannot search by a vector; ask it in words, with a query"
            return Barred(NO_VECTORS, invalid_params("embedding", problem))
        width = link.profile.dimensions
        if width is None or width == len(embedding):
            return None
        problem = (
            f"embedding: the vectors of {tier.name!r} have {width} dimensions, this one has {len(embedding)}; ask it "
            "by one of that width, or in words, with a query"
        )
        return Barred(OTHER_WIDTH, A2MError(Code.EMBEDDING_MISMATCH, problem, {"tier": tier.name, "dimensions": width}))

    def _show(self, tier: Tier, question: Question, records: Iterable[Record]) -> list[Record]:
        """Return the records of a mount that match, in the form that callers get."""
        shown = []
        profile = self._gateway.link(tier.name).profile
        # similarities by another metric have another scale; then they are computed from the vectors
        is_comparable = profile is not None and profile.metric == self._catalog.vectors.metric()
        for record in records:
            # a mount that federation.toml does not declare as one is as private as the file says
            if not (tier.shared or question.scope.holds(record.owner)):
                continue
            try:
                parse(record.created_at)
            except ValueError as problem:
                raise Untrusted(
                    tier.name, f"answered a record {record.id!r} with an invalid created_at: {problem}"
                ) from None
            each = Record(
                id=f"{tier.name}/{record.id}",
                content=record.content,
                created_at=record.created_at,
                role=record.role,
                metadata=record.metadata,
                group=record.group,
                # a record of a declared mount has no owner; other mounts are as private as federation.toml says
                owner=None if tier.shared else record.owner,
                tier=tier.name,
                uri=record.uri,
                media_type=record.media_type,
                embedding=record.embedding,
                score=record.score,
                similarity=record.similarity if is_comparable else None,
            )
            if matches(each, question.where.known) and matches(each, question.where.rest):
                shown.append(each)
        return shown


def _where(tier: Tier, question: Question) -> dict[str, Raw] | None:
    """Return the conditions that the mount itself applies; None if none of its records can meet all conditions."""
    where = question.where
    if question.key_prefix is not None:
        return None
    if any(NULL not in where.known[name] for name in _NOT_IN_MOUNTS if name in where.known):
        return None
    asked = delegable(where.given, metadata=True, mounted=True)
    if "id" in where.known:
        prefix = f"{tier.name}/"
        named = [text for text in map(text_of, where.known["id"]) if text is not None and text.startswith(prefix)]
        if not named:
            return None
        asked["id"] = raw_json([text.removeprefix(prefix) for text in named])
    return asked
