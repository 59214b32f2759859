"""The fan-out: one question is sent to several tiers at once, in the way of each kind of tier.

- The question is prepared for all tiers in one step without an await. So a record that moves meanwhile is looked up
  where it was at that moment.
- A record with a pending write is returned as the catalog has it, whatever its tier returns.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.records import Record, record_of
from a2m_router.ranking.fusion import lexical
from a2m_router.reading.answers import TierAnswers
from a2m_router.reading.candidates import Ask, Candidates, SearchCalls, TierCalls
from a2m_router.reading.lifted import Lifted
from a2m_router.reading.mounted import Barred, Mounted
from a2m_router.reading.native import Native
from a2m_router.reading.question import Question
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.gather import gather_outcomes
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mounts import Mounts


class FanOut:
    """Sends questions to the tiers of one federation."""

    def __init__(self, catalog: Catalog, gateway: TierGateway, mounts: Mounts) -> None:
        self._catalog = catalog
        self._gateway = gateway
        self._mounts = mounts
        self._candidates = Candidates(catalog, gateway)
        self._native = Native(gateway, self._candidates)
        self._lifted = Lifted(catalog, gateway, self._candidates)
        self._mounted = Mounted(catalog, gateway, self._candidates)

    async def rankings(self, question: Question) -> TierAnswers:
        """Return each tier's ranking of its candidates."""
        return await self._ask(lambda tier: self._calls_to(tier).ranking(tier, question), question)

    async def listings(self, question: Question) -> TierAnswers:
        """Return all matching records of each tier."""
        return await self._ask(lambda tier: self._calls_to(tier).listing(tier, question), question)

    async def searches(self, question: Question) -> TierAnswers:
        """Return all matches of the query in each tier, none of which is a mount.

        The failure of a tier is QUOTA_EXCEEDED if it has more matches than one call returns.
        """
        return await self._ask(lambda tier: self._managed_calls_to(tier).search(tier, question), question)

    def barred(self, question: Question) -> Mapping[str, Barred]:
        """Return the question's mounts that a recall cannot ask, by name."""
        asked = {tier.name: self._mounted.why_not(tier, question) for tier in question.tiers if tier in self._mounts}
        return {name: reason for name, reason in asked.items() if reason is not None}

    def unaccounted(self, tiers: Iterable[Tier]) -> dict[str, str]:
        """Return the tiers that may hold records that the catalog does not have, by name, and why."""
        managed = [tier.name for tier in tiers if tier not in self._mounts]
        return {
            name: self._gateway.why_unaccounted(name) for name in managed if not self._catalog.tiers.is_scanned(name)
        }

    def refuse_unaccounted(self, tiers: Iterable[Tier]) -> None:
        """Raise INTERNAL_ERROR if one of the tiers may hold records that the catalog does not have."""
        for name in self.unaccounted(tiers):
            raise self._gateway.without(name)

    def _calls_to(self, tier: Tier) -> TierCalls:
        return self._mounted if tier in self._mounts else self._managed_calls_to(tier)

    def _managed_calls_to(self, tier: Tier) -> SearchCalls:
        return self._native if self._gateway.mode(tier.name).native else self._lifted

    async def _ask(self, prepare: Callable[[Tier], Ask], question: Question) -> TierAnswers:
        found = await gather_outcomes([_prepared(prepare, tier) for tier in question.tiers])
        answers = TierAnswers({}, {})
        for tier, outcome in zip(question.tiers, found, strict=True):
            if isinstance(outcome, list):
                answers.lists[tier.name] = outcome
            else:
                answers.failures[tier.name] = outcome
        self._overlay(answers.lists, question)
        return answers

    def _overlay(self, lists: dict[str, list[Record]], question: Question) -> None:
        """Put the catalog's records in place of copies whose tiers have pending writes for them."""
        pending = self._pending(question.tiers)
        if not pending:
            return
        written = self._catalog.pending.drafts(id for _, ids in pending for id in ids)
        for name, records in lists.items():
            lists[name] = [record for record in records if record.id not in written]
        matching = [
            record
            for tier, ids in pending
            for record in self._candidates.in_lifted(tier, question, [record_of(written[id]) for id in ids])
        ]
        if question.query is not None:
            found = set(lexical(question.query, {record.id: record.content for record in matching}))
            matching = [r for r in matching if r.id in found or None not in (question.embedding, r.embedding)]
        elif question.embedding is not None:
            matching = [record for record in matching if record.embedding is not None]
        for tier, ids in pending:
            lists.setdefault(tier.name, []).extend(record for record in matching if record.id in ids)

    def _pending(self, tiers: Sequence[Tier]) -> list[tuple[Tier, list[str]]]:
        """Return the tiers with pending writes, and the ids of these."""
        if not self._catalog.pending.is_open():
            return []
        pending = [(tier, self._catalog.pending.ids_in(tier.name)) for tier in tiers if tier not in self._mounts]
        return [(tier, ids) for tier, ids in pending if ids]


def _prepared(prepare: Callable[[Tier], Ask], tier: Tier) -> Ask:
    """Prepare the call of one tier. If that fails, the call raises the failure."""
    try:
        return prepare(tier)
    except TierDown as down:
        failure = down

    async def fail() -> list[Record]:
        raise failure

    return fail
