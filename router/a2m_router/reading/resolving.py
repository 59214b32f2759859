"""Which records a question means, for a forget: the catalog is asked, and the tiers only for what it cannot tell."""

from typing import Final

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import is_as_it_is
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import acceptable
from a2m_router.reading.question import Question
from a2m_router.tiers.failures import changing, unanswered
from a2m_router.tiers.link import TierDown

# How often the tiers are asked anew because what they found was replaced meanwhile.
_LOOKS: Final = 20


class Resolving:
    """Resolves questions to ids."""

    def __init__(self, catalog: Catalog, fan_out: FanOut) -> None:
        self._catalog = catalog
        self._fan_out = fan_out

    async def ids(self, question: Question) -> list[str]:
        """The ids of all records that a question to managed tiers means.

        Raises INTERNAL_ERROR if a tier that must be asked does not answer, or is not accounted for.
        """
        self._fan_out.refuse_unaccounted(question.tiers)
        if question.query is None and not question.where.rest:
            return self._catalog.queries.ids(question.selection())
        for _ in range(_LOOKS):
            found = await self._found(question)
            if found is not None:
                return found
        raise changing(
            "what matches is being replaced all the time, so that it cannot be told what still does; try again"
        )

    async def _found(self, question: Question) -> list[str] | None:
        """The ids that the tiers find; None if one of them was replaced meanwhile: then it takes another look.

        With every other content a record has another revision, or another birth. One that its tier holds as it once was
        is shown to nobody, so that it is not meant by what it was. What a group said that gives way to its summary
        meanwhile may stand in the summary, which nobody has been asked for.
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
                if any(is_as_it_is(record, entry) for record in found):
                    ids.append(entry.id)
                elif found and entry.version > version:
                    return None
            return ids if self._catalog.rewrites == rewrites else None
