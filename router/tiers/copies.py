"""Copies of records in tiers: written, read back and removed by id, with every answer checked.

A tier may say that it did something and have done something else; whoever calls these functions compares what it reads.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from router.a2m.messages import Forget, Recall, Remember
from router.a2m.records import Draft, Record
from router.tiers.link import Link, TierDown

# Ids asked for in one call: large enough that calls are few, small enough that answers stay far below message limits.
_CHUNK: Final = 250

T = TypeVar("T")


class _Ids(msgspec.Struct):
    ids: list[str]


class _Records(msgspec.Struct):
    records: list[Record]


class Copies:
    """The copies in all tiers, by the tier's name. Every method raises TierDown, or A2MError as a tier answered it."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links

    def link(self, tier: str) -> Link:
        """The link to a tier."""
        return self._links[tier]

    async def write(self, tier: str, drafts: Sequence[Draft]) -> None:
        """Write complete records to `tier`; they all carry ids, and the answer must name just those."""
        for chunk in self._chunks(tier, drafts):
            raw = await self._links[tier].call("memory/remember", Remember(records=chunk))
            answered = self._read(tier, raw, _Ids).ids
            if answered != [draft.id for draft in chunk]:
                raise TierDown(tier, "answered a write with other ids than it was given", 0.0, None)

    async def read(self, tier: str, ids: Iterable[str], *, embeddings: bool = False) -> dict[str, Record]:
        """Those of `ids` that `tier` holds. Absence is proved, not assumed: the limit is explicit, and an answer with
        other records than those asked for is not trusted."""
        found: dict[str, Record] = {}
        for chunk in self._chunks(tier, list(dict.fromkeys(ids))):
            params = Recall(where={"id": raw_json(chunk)}, limit=len(chunk), embeddings=embeddings)
            wanted = frozenset(chunk)
            records = self._read(tier, await self._links[tier].call("memory/recall", params), _Records).records
            if any(record.id not in wanted for record in records):
                raise TierDown(tier, "answered a read by id with other records", 0.0, None)
            found.update((record.id, record) for record in records)
        return found

    async def remove(self, tier: str, ids: Iterable[str]) -> set[str]:
        """Have `tier` forget `ids`. Returns those that it was seen not to hold any more."""
        gone: set[str] = set()
        for chunk in self._chunks(tier, list(ids)):
            await self._links[tier].call("memory/forget", Forget(ids=chunk))
            left = await self.read(tier, chunk)
            gone.update(id for id in chunk if id not in left)
        return gone

    def _chunks(self, tier: str, items: Sequence[T]) -> Iterable[list[T]]:
        profile = self._links[tier].profile
        limits = () if profile is None else (profile.max_records_per_call, profile.max_recall_limit)
        size = min([_CHUNK, *(limit for limit in limits if limit)])
        rest = iter(items)
        while chunk := list(islice(rest, size)):
            yield chunk

    def _read(self, tier: str, raw: msgspec.Raw, type: type[T]) -> T:
        try:
            return msgspec.json.decode(raw, type=type)
        except msgspec.MsgspecError as problem:
            raise TierDown(tier, f"gave an answer that cannot be read: {problem}", 0.0, None) from None


def raw_json(value: Any) -> msgspec.Raw:
    """A value as raw JSON."""
    return msgspec.Raw(msgspec.json.encode(value))
