"""Questions: what one caller asks of some tiers at once, and who applies which part of its `where`. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec
from msgspec import Raw

from a2m_router.catalog.active_reads import Reading
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import FIELDS, Scope, Selection
from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.wire.equality import Where, parse_where, text_of
from a2m_router.protocol.wire.errors import unknown_tier
from a2m_router.protocol.wire.method_params import Read, Selector
from a2m_router.tiers.gateway import raw_json

# Fields that the router counts or computes itself. It does not use a tier's values for them.
OWNED: Final = frozenset({"tier", "salience", "access_count", "accessed_at", "revision"})


class SplitWhere(msgspec.Struct, frozen=True):
    """A caller's `where`, as `given` and split into parts.

    `known`: conditions that the catalog can apply. `rest`: conditions that need the records themselves (content,
    metadata, uri, media_type). `sent`: conditions that a native tier applies.
    """

    given: Mapping[str, Raw] = {}
    known: Where = {}
    rest: Where = {}
    sent: dict[str, Raw] | None = None

    @property
    def needs_catalog(self) -> bool:
        """Whether no tier could apply all conditions."""
        return not (OWNED - {"tier"}).isdisjoint(self.known)


def read_where(where: Mapping[str, Raw] | None) -> SplitWhere:
    """Split a `where` (§5.2)."""
    if not where:
        return SplitWhere()
    parsed = parse_where(where)
    return SplitWhere(
        given=where,
        known={name: atoms for name, atoms in parsed.items() if name in FIELDS},
        rest={name: atoms for name, atoms in parsed.items() if name not in FIELDS},
        sent={name: value for name, value in where.items() if name not in OWNED} or None,
    )


def _tiers_in_question(tier: str | None, where: SplitWhere, settings: Settings) -> list[Tier]:
    """Return the tiers of a read, by its `tier` and by `tier` in its `where`. Raise UNKNOWN_TIER."""
    chosen = list(settings.tiers)
    if tier is not None:
        chosen = [candidate for candidate in chosen if candidate.name == tier]
        if not chosen:
            raise unknown_tier(tier, [candidate.name for candidate in settings.tiers])
    if "tier" in where.known:
        named = {text_of(atom) for atom in where.known["tier"]}
        chosen = [candidate for candidate in chosen if candidate.name in named]
    return chosen


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What one caller asks of some tiers at once.

    Args:
        query: the words; None for a question without words.
        limit: the candidates to request from each tier; 0 for all.
        wanted: the most records of the answer. A tier with fewer matching candidates is asked for more.
        min_score: the lowest score of a record in the answer.
        read: the read in progress. Records written later do not match, and only the copies that it accepts count. None
            if that does not matter.
        ids: the matching ids, if no tier could apply the conditions itself.
        crowded: the tiers whose results another federation's records fill; added during the calls.
    """

    tiers: Sequence[Tier]
    scope: Scope
    where: SplitWhere
    key_prefix: str | None = None
    query: str | None = None
    embedding: list[float] | None = None
    limit: int = 1
    wanted: int = 1
    min_score: float | None = None
    read: Reading | None = None
    embeddings: bool = False
    ids: Sequence[str] | None = None
    crowded: set[str] = msgspec.field(default_factory=set)

    def selection(self, tiers: Sequence[Tier] | None = None) -> Selection:
        """Return the conditions that the catalog can apply."""
        names = [tier.name for tier in (self.tiers if tiers is None else tiers)]
        return Selection(tiers=names, scope=self.scope, where=self.where.known, key_prefix=self.key_prefix)

    def may_match(self, entry: Entry) -> bool:
        """Return whether the record existed when the read began."""
        return self.read is None or entry.seq <= self.read.newest

    @property
    def is_narrow(self) -> bool:
        """Whether the question matches only a part of a tier's records, as far as the catalog can tell."""
        return not self.scope.everyone or bool(self.where.known) or self.key_prefix is not None


def question_of(params: Read | Selector, scope: Scope, settings: Settings) -> Question:
    """Return the tiers and conditions that the parameters of all reads have in common. Raise UNKNOWN_TIER."""
    where = read_where(narrowed_to_ids(params) if isinstance(params, Selector) else params.where)
    tiers = _tiers_in_question(params.tier, where, settings)
    return Question(tiers=tiers, scope=scope, where=where, key_prefix=params.key_prefix)


def selects(selector: Selector) -> bool:
    """Return whether there is a selector at all; one that matches everything does not count."""
    return selector.ids is not None or bool(selector.query or selector.tier or selector.where or selector.key_prefix)


def narrowed_to_ids(selector: Selector) -> dict[str, Raw] | None:
    """Combine a selector's `where` and its `ids` into one `where`."""
    if selector.ids is None:
        return selector.where
    where = dict(selector.where or {})
    ids = selector.ids
    if "id" in where:
        named = {text_of(atom) for atom in parse_where({"id": where["id"]})["id"]}
        ids = [id for id in ids if id in named]
    return {**where, "id": raw_json(ids)}
