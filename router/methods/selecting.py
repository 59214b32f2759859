"""Which records a selector means: what the catalog can tell it tells, and only for the rest are tiers asked."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Final

import msgspec
from msgspec import Raw

from router.a2m.equality import Where, parse_where, text_of
from router.a2m.errors import A2MError, Code, invalid_params, unknown_tier
from router.a2m.events import Sight
from router.a2m.messages import Forget, Recall, Selector, Timeline
from router.catalog.accounts import UNACCOUNTED
from router.catalog.catalog import Catalog
from router.catalog.lookup import Selection
from router.catalog.selection import FIELDS, Scope
from router.config import Settings, Tier
from router.tiers.copies import Copies, raw_json
from router.tiers.link import TierDown
from router.tiers.together import failures_in, outcomes

# What the router counts itself, or shows otherwise; a tier's own numbers mean something else.
OWNED: Final = frozenset({"tier", "salience", "access_count", "accessed_at", "revision"})

# Why a call came to nothing whose subject did not stand still.
CHANGING: Final = "changing"

# What a tier without a limit of its own is asked to tell at most.
_MOST_MATCHES: Final = 4096

# How often the tiers are asked anew because what they found was replaced meanwhile.
_LOOKS: Final = 20


class Filter(msgspec.Struct, frozen=True):
    """A caller's `where`, taken apart: `known` is what the catalog can tell, `sent` what a tier can be asked.

    `foreign` says whether there is something that only a tier can tell: content, metadata, uri, media_type.
    """

    known: Where
    sent: dict[str, Raw] | None
    foreign: bool

    @property
    def needs_catalog(self) -> bool:
        """Whether no tier could apply all of it."""
        return not (OWNED - {"tier"}).isdisjoint(self.known)


def read_where(where: Mapping[str, Raw] | None) -> Filter:
    """Takes a `where` apart (§5.2)."""
    if not where:
        return Filter({}, None, False)
    known = {name: atoms for name, atoms in parse_where(where).items() if name in FIELDS}
    sent = {name: value for name, value in where.items() if name not in OWNED}
    return Filter(known, sent or None, any(name not in FIELDS for name in where))


def tiers_in_question(tier: str | None, where: Filter, settings: Settings) -> list[Tier]:
    """The tiers a read is about, by its `tier` and by `tier` in its `where`. Raises UNKNOWN_TIER."""
    chosen = list(settings.tiers)
    if tier is not None:
        chosen = [candidate for candidate in chosen if candidate.name == tier]
        if not chosen:
            raise unknown_tier(tier, [candidate.name for candidate in settings.tiers])
    if "tier" in where.known:
        named = {text_of(atom) for atom in where.known["tier"]}
        chosen = [candidate for candidate in chosen if candidate.name in named]
    return chosen


def owner_for(tier: Tier, scope: Scope) -> str | None:
    """The owner to name to a tier: in a shared one everybody sees everything."""
    return None if tier.shared else scope.owner


def sight_of(scope: Scope, settings: Settings) -> Sight:
    """What `scope` sees, as events and counts of places are told by it."""
    return Sight(scope.owner, frozenset(tier.name for tier in settings.tiers if tier.shared))


class Selecting:
    """Resolves selectors to ids."""

    def __init__(self, settings: Settings, catalog: Catalog, copies: Copies) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies

    async def ids(self, params: Forget, scope: Scope) -> list[str]:
        """The ids of managed records that a forget's selectors all mean.

        Raises INTERNAL_ERROR if a tier that must be asked does not answer; UNKNOWN_TIER; INVALID_PARAMS for a mount.
        """
        where = read_where(narrowed_to_ids(params))
        tiers = tiers_in_question(params.tier, where, self._settings)
        if params.tier is not None and tiers and tiers[0].mount:
            raise invalid_params("tier", f"{params.tier!r} is mounted read-only; nothing in it can be forgotten")
        if (params.query, params.tier, params.where, params.key_prefix) == (None,) * 4:
            return params.ids or []
        managed = [tier for tier in tiers if not tier.mount]
        for tier in managed:
            if not self._catalog.is_scanned(tier.name):
                raise unanswered(tier.name, UNACCOUNTED, 1.0)
        selection = Selection(
            tiers=[tier.name for tier in managed], scope=scope, where=where.known, key_prefix=params.key_prefix
        )
        if params.query is None and not where.foreign:
            return self._catalog.ids(selection)
        for _ in range(_LOOKS):
            found = await self._found(managed, where, scope, params, selection)
            if found is not None:
                return found
        raise changing(
            "what matches is being replaced all the time, so that it cannot be told what still does; try again"
        )

    async def _found(
        self, tiers: Sequence[Tier], where: Filter, scope: Scope, params: Forget, selection: Selection
    ) -> list[str] | None:
        """The ids that the tiers find; None if one of them was replaced meanwhile: then it takes another look.

        With every other content a record has another revision. What a group said that gives way to its summary
        meanwhile may stand in the summary, which nobody has been asked for.
        """
        rewrites = self._catalog.rewrites
        with self._catalog.readers.reading() as read:
            asked = await self._ask_all(tiers, where, scope, params.query, params.key_prefix)
            accepts = self._catalog.readers.accepts
            ids = []
            for entry in self._catalog.among({id for found in asked.values() for id in found}, selection):
                revisions = {
                    found[entry.id]
                    for tier, found in asked.items()
                    if entry.id in found and accepts(read, entry.id, entry.home, tier)
                }
                if entry.revision in revisions:
                    ids.append(entry.id)
                elif revisions:
                    return None
            return ids if self._catalog.rewrites == rewrites else None

    async def _ask_all(
        self, tiers: Sequence[Tier], where: Filter, scope: Scope, query: str | None, key_prefix: str | None
    ) -> dict[str, dict[str, int]]:
        """The ids that each tier finds, with their revisions. Raises INTERNAL_ERROR if one of them does not answer."""
        found = await outcomes([partial(self._ask, tier, where, scope, query, key_prefix) for tier in tiers])
        for failure in failures_in(found):
            if isinstance(failure, TierDown):
                raise unanswered(failure.tier, failure.reason, failure.retry_after)
            raise failure
        return {tier.name: ids for tier, ids in zip(tiers, found, strict=True) if isinstance(ids, dict)}

    async def _ask(
        self, tier: Tier, where: Filter, scope: Scope, query: str | None, key_prefix: str | None
    ) -> dict[str, int]:
        owner = owner_for(tier, scope)
        if query is None:
            question = Timeline(where=where.sent, owner=owner, key_prefix=key_prefix)
            return {r.id: r.revision or 0 async for page in self._copies.pages(tier.name, question) for r in page}
        profile = self._copies.link(tier.name).profile
        most = (profile.max_recall_limit if profile else None) or _MOST_MATCHES
        found = await self._copies.recall(
            tier.name, Recall(query=query, where=where.sent, owner=owner, key_prefix=key_prefix, limit=most)
        )
        if len(found) >= most:
            raise A2MError(
                Code.QUOTA_EXCEEDED,
                f"query: at least {most:,} records of {tier.name!r} match, more than one call can tell; "
                "narrow it by where or key_prefix, or forget in parts",
                {"tier": tier.name, "limit": most},
            )
        return {record.id: record.revision or 0 for record in found}


def selects(selector: Selector) -> bool:
    """Whether there is a selector at all: one that matches all there is does not count as one."""
    return selector.ids is not None or bool(selector.query or selector.tier or selector.where or selector.key_prefix)


def narrowed_to_ids(selector: Selector) -> dict[str, Raw] | None:
    """A selector's `where` and its `ids` as one `where`."""
    if selector.ids is None:
        return selector.where
    where = dict(selector.where or {})
    ids = selector.ids
    if "id" in where:
        named = {text_of(atom) for atom in parse_where({"id": where["id"]})["id"]}
        ids = [id for id in ids if id in named]
    return {**where, "id": raw_json(ids)}


def changing(sentence: str, retry_after: float = 1.0) -> A2MError:
    """INTERNAL_ERROR for a call whose subject did not stand still."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": CHANGING, "retry_after": retry_after})


def unanswered(tier: str, reason: str, retry_after: float) -> A2MError:
    """INTERNAL_ERROR for a call that could not do without a tier."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} does not answer: {reason}",
        {"tier": tier, "reason": reason, "retry_after": retry_after},
    )
