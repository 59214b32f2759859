"""Resolving: which records a forget selects. The catalog answers; tiers are asked only what the catalog cannot tell."""

from typing import Final

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import is_current
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import acceptable
from a2m_router.reading.question import Question
from a2m_router.tiers.failures import changing, unanswered
from a2m_router.tiers.link import TierDown

# Attempts if matching records are replaced during the call.
_LOOKS: Final = 20


class Resolving:
    """Resolves questions to ids."""

    def __init__(self, catalog: Catalog, fan_out: FanOut) -> None:
        self._catalog = catalog
        self._fan_out = fan_out

    async def ids(self, question: Question) -> list[str]:
        """Return the ids of all records that a question to managed tiers selects.

        Raises:
            A2MError: INTERNAL_ERROR, a tier that must be asked does not answer, or may hold records that the catalog
                does not have.
        """
        self._fan_out.refuse_unaccounted(question.tiers)
        if question.query is None and not question.where.rest:
            return self._catalog.queries.ids(question.selection())
        for _ in range(_LOOKS):
            found = await self._found(question)
            if found is not None:
                return found
        raise changing(
            "the matching records are replaced faster than they can be read, so the matches are uncertain; try again"
        )

    async def _found(self, question: Question) -> list[str] | None:
        """Return the ids that the tiers find; None if one of the records was replaced meanwhile.

        A replaced record has another revision or another creation time. A record that its tier holds in a former state
        is never shown, so it is not selected. If a summary replaces a group meanwhile, the result is None, too: the
        summary may match, and no tier was asked for it.
        """
        rewrites, version = self._catalog.rewrites, self._catalog.records.version
        with self._catalog.reads.reading() as read:
            ask = self._fan_out.listings if question.query is None else self._fan_out.searches
            answers = await ask(question)
            for failure in answers.failures.values():
                if isinstance(failure, TierDown):
                    raise unanswered(failure.tier, failure.reason, failure.retry_after)
                raise failure
            copies = {tier: {record.id: record for record in records} for tier, records in answers.lists.items()}
            ids = []
            everything = {id for there in copies.values() for id in there}
            entries = self._catalog.queries.among(everything, question.selection())
            accepts = acceptable(self._catalog, read, entries)
            for entry in entries:
                found = [
                    there[entry.id] for tier, there in copies.items() if entry.id in there and accepts(entry, tier)
                ]
                if any(is_current(record, entry) for record in found):
                    ids.append(entry.id)
                elif found and entry.version > version:
                    return None
            return ids if self._catalog.rewrites == rewrites else None
