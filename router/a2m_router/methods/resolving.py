"""Which records a forget's selectors mean: what the catalog can tell it tells; only for the rest are tiers asked. And
which ids cannot be meant by whoever wants to change something."""

from collections.abc import Sequence
from typing import Final

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import is_as_it_is
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.methods.asking import Asking, Question
from a2m_router.methods.drafting import refuse_if_read_only
from a2m_router.methods.selecting import changing, narrowed_to_ids, read_where, tiers_in_question, unanswered
from a2m_router.protocol.wire.errors import invalid_params
from a2m_router.protocol.wire.messages import Forget
from a2m_router.protocol.wire.records import Record
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import TierDown
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.together import Failure, failures_in, outcomes

# How often the tiers are asked anew because what they found was replaced meanwhile.
_LOOKS: Final = 20


class Resolving:
    """Resolves selectors to ids."""

    def __init__(self, settings: Settings, catalog: Catalog, copies: Copies, asking: Asking, mounts: Mounts) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies
        self._asking = asking
        self._mounts = mounts

    async def ids(self, params: Forget, scope: Scope) -> list[str]:
        """The ids of managed records that a forget's selectors all mean.

        Raises INTERNAL_ERROR if a tier that must be asked does not answer; UNKNOWN_TIER; INVALID_PARAMS for a mount,
        and for the id of a mount's record.
        """
        where = read_where(narrowed_to_ids(params))
        tiers = tiers_in_question(params.tier, where, self._settings)
        if params.tier is not None and tiers and tiers[0] in self._mounts:
            raise invalid_params("tier", f"{params.tier!r} is mounted read-only; nothing in it can be forgotten")
        refuse_mounted(params.ids or (), self._mounts, self._catalog, scope)
        if (params.query, params.tier, params.where, params.key_prefix) == (None,) * 4:
            return params.ids or []
        managed = [tier for tier in tiers if tier not in self._mounts]
        self._asking.refuse_unaccounted(managed)
        question = Question(
            tiers=managed, scope=scope, where=where, key_prefix=params.key_prefix, query=params.query or None
        )
        if question.query is None and not where.rest:
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
        with self._catalog.readers.reading() as read:
            asks = self._asking.listings if question.query is None else self._asking.searches
            lists = _all_answered(question.tiers, await outcomes(asks(question)))
            self._asking.overlay(lists, question)
            copies = {tier: {record.id: record for record in records} for tier, records in lists.items()}
            ids = []
            everything = {id for there in copies.values() for id in there}
            entries = self._catalog.queries.among(everything, question.selection())
            accepts = self._asking.acceptable(read, entries)
            for entry in entries:
                found = [
                    there[entry.id] for tier, there in copies.items() if entry.id in there and accepts(entry, tier)
                ]
                if any(is_as_it_is(record, entry) for record in found):
                    ids.append(entry.id)
                elif found and entry.version > version:
                    return None
            return ids if self._catalog.rewrites == rewrites else None


def refuse_mounted(ids: Sequence[str], mounts: Mounts, catalog: Catalog, scope: Scope) -> None:
    """Raises INVALID_PARAMS naming the first of `ids` that is one of a mount's, where something is to be changed; a
    record of the federation's own may have such an id, from before there was the mount. READ_ONLY where there are only
    mounts."""
    refuse_if_read_only(mounts)
    for place, id in enumerate(ids):
        mount = mounts.of(id)
        if mount is None or catalog.queries.knows_of(scope, id):
            continue
        # what nobody has looked through yet may hold it, and a forget is to reach it there
        if all(catalog.tiers.is_scanned(tier.name) for tier in mounts.managed):
            problem = f"{id!r} is a record of {mount.name!r}, which is mounted read-only; nothing was changed"
            raise invalid_params(f"ids[{place}]", problem)


def _all_answered(tiers: Sequence[Tier], found: Sequence[list[Record] | Failure]) -> dict[str, list[Record]]:
    """What each tier found. Raises INTERNAL_ERROR if one of them did not answer."""
    for failure in failures_in(found):
        if isinstance(failure, TierDown):
            raise unanswered(failure.tier, failure.reason, failure.retry_after)
        raise failure
    return {tier.name: records for tier, records in zip(tiers, found, strict=True) if isinstance(records, list)}
