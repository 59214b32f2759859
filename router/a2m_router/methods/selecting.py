"""What a selector says: which tiers are in question, whose eyes it sees with, and who can tell what of its `where`."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from a2m_router.catalog.selection import FIELDS, Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.wire.equality import Where, parse_where, text_of
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code, unknown_tier
from a2m_router.protocol.wire.events import Sight
from a2m_router.protocol.wire.messages import Selector
from a2m_router.tiers.copies import raw_json

# What the router counts itself, or shows otherwise; a tier's own numbers mean something else.
OWNED: Final = frozenset({"tier", "salience", "access_count", "accessed_at", "revision"})

# Why a call came to nothing whose subject did not stand still.
CHANGING: Final = "changing"


class Filter(msgspec.Struct, frozen=True):
    """A caller's `where` as it was `given`, taken apart: `known` is what the catalog can tell, `rest` what only the
    records can: content, metadata, uri, media_type. `sent` is what a native tier is asked to apply itself."""

    given: Mapping[str, Raw] = {}
    known: Where = {}
    rest: Where = {}
    sent: dict[str, Raw] | None = None

    @property
    def needs_catalog(self) -> bool:
        """Whether no tier could apply all of it."""
        return not (OWNED - {"tier"}).isdisjoint(self.known)


def read_where(where: Mapping[str, Raw] | None) -> Filter:
    """Takes a `where` apart (§5.2)."""
    if not where:
        return Filter()
    parsed = parse_where(where)
    return Filter(
        given=where,
        known={name: atoms for name, atoms in parsed.items() if name in FIELDS},
        rest={name: atoms for name, atoms in parsed.items() if name not in FIELDS},
        sent={name: value for name, value in where.items() if name not in OWNED} or None,
    )


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


def unaccounted(tier: str, reason: str) -> A2MError:
    """INTERNAL_ERROR for a call that could not do without knowing what a tier holds."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"what the tier {tier!r} holds is not known yet: {reason}",
        {"tier": tier, "reason": reason, "retry_after": 1.0},
    )


def untrue(tier: str, problem: str) -> A2MError:
    """INTERNAL_ERROR for a call about a record that its tier has lost, or holds otherwise than it was written. It has
    no `retry_after`: to repeat the call does not help, and `problem` says what does."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} has answered, but {problem}",
        {"tier": tier, "reason": NOT_AS_WRITTEN},
    )


def unanswered(tier: str, reason: str, retry_after: float) -> A2MError:
    """INTERNAL_ERROR for a call that could not do without a tier."""
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the tier {tier!r} does not answer: {reason}",
        {"tier": tier, "reason": reason, "retry_after": retry_after},
    )
