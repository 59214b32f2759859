"""What a selector says: whether there is one at all, and its ids as a condition."""

from msgspec import Raw

from a2m_router.protocol.wire.equality import parse_where, text_of
from a2m_router.protocol.wire.messages import Selector
from a2m_router.tiers.copies import raw_json


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
