"""Copies of records in tiers: written, read back and removed by id, with every answer checked.

A tier may say that it did something and have done something else; whoever calls these functions compares what it reads.
What is asked for at once is bounded, and where an answer is longer than a message may be, less is asked for.
"""

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec

from router.a2m.messages import Forget, Pages, Recall, Remember, Timeline
from router.a2m.records import Draft, Record
from router.tiers.link import AnswerTooLong, Link, TierDown

# Records in one call: enough to share a round trip, few enough that ordinary ones fit into a message many times over.
_CHUNK: Final = 100

# Bytes of records in one write, roughly; a single larger one goes alone.
_CHUNK_BYTES: Final = 4 * 2**20

_PAGE: Final = 500

T = TypeVar("T")


class _Ids(msgspec.Struct):
    ids: list[str]


class _Records(msgspec.Struct):
    records: list[Record]


class _Page(msgspec.Struct):
    records: list[Record]
    next: str | None = None


class Copies:
    """The copies in all tiers, by the tier's name. Every method raises TierDown, or A2MError as a tier answered it."""

    def __init__(self, links: Mapping[str, Link]) -> None:
        self._links = links

    def link(self, tier: str) -> Link:
        """The link to a tier."""
        return self._links[tier]

    async def write(self, tier: str, drafts: Sequence[Draft]) -> None:
        """Write complete records to `tier`; they all carry ids, and the answer must name just those."""
        for chunk in self._chunks(tier, drafts, bytes_of):
            raw = await self._links[tier].call("memory/remember", Remember(records=chunk))
            if decoded(raw, _Ids, tier).ids != [draft.id for draft in chunk]:
                raise TierDown(tier, "answered a write with other ids than it was given", 0.0, None)

    async def read(self, tier: str, ids: Iterable[str], *, embeddings: bool = False) -> dict[str, Record]:
        """Those of `ids` that `tier` holds. Absence is proved, not assumed: the limit is explicit, and an answer with
        other records than those asked for is not trusted."""
        found: dict[str, Record] = {}
        waiting = list(self._chunks(tier, list(dict.fromkeys(ids))))[::-1]
        while waiting:
            chunk = waiting.pop()
            try:
                records = await self._read(tier, chunk, embeddings)
            except AnswerTooLong:
                if len(chunk) == 1:
                    raise
                waiting += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]
            else:
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

    async def recall(self, tier: str, question: Recall) -> list[Record]:
        """The tier's ranking; shorter than the limit where an answer of that many records would be too long."""
        while True:
            try:
                raw = await self._links[tier].call("memory/recall", question)
                return decoded(raw, _Records, tier).records
            except AnswerTooLong:
                if question.limit is None or question.limit <= 1:
                    raise
                question = msgspec.structs.replace(question, limit=question.limit // 2)

    async def pages(self, tier: str, question: Timeline) -> AsyncIterator[list[Record]]:
        """All that a tier's timeline holds for `question`, a page at a time where it can; the pages are in the tier's
        own order."""
        link = self._links[tier]
        if link.profile is None or not link.profile.store.pages:
            yield decoded(await link.call("memory/timeline", question), _Records, tier).records
            return
        size, after = _PAGE, None
        while True:
            try:
                raw = await link.call("memory/timeline", _page_of(question, after, size))
            except AnswerTooLong:
                if size == 1:
                    raise
                size = size // 2
                continue
            page = decoded(raw, _Page, tier)
            yield page.records
            after = page.next
            if after is None:
                return

    async def _read(self, tier: str, ids: list[str], embeddings: bool) -> list[Record]:
        params = Recall(where={"id": raw_json(ids)}, limit=len(ids), embeddings=embeddings)
        records = decoded(await self._links[tier].call("memory/recall", params), _Records, tier).records
        if not {record.id for record in records} <= set(ids):
            raise TierDown(tier, "answered a read by id with other records", 0.0, None)
        return records

    def _chunks(self, tier: str, items: Sequence[T], bytes_of: Callable[[T], int] | None = None) -> Iterable[list[T]]:
        profile = self._links[tier].profile
        limits = () if profile is None else (profile.max_records_per_call, profile.max_recall_limit)
        most = min([_CHUNK, *(limit for limit in limits if limit)])
        chunk: list[T] = []
        held = 0
        for item in items:
            size = 0 if bytes_of is None else bytes_of(item)
            if chunk and (len(chunk) == most or held + size > _CHUNK_BYTES):
                yield chunk
                chunk, held = [], 0
            chunk.append(item)
            held += size
        if chunk:
            yield chunk


def _page_of(question: Timeline, after: str | None, size: int) -> Pages:
    return Pages(**msgspec.structs.asdict(question), after=after, page=size)


def decoded(raw: msgspec.Raw, type: type[T], tier: str) -> T:
    """A tier's result as `type`. Raises TierDown for one that cannot be read: it is not trusted."""
    try:
        return msgspec.json.decode(raw, type=type)
    except msgspec.MsgspecError as problem:
        raise TierDown(tier, f"gave an answer that cannot be read: {problem}", 0.0, None) from None


def raw_json(value: Any) -> msgspec.Raw:
    """A value as raw JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def bytes_of(draft: Draft) -> int:
    """About how many bytes a record takes in a message; exactly, where it is large."""
    texts = (draft.content, draft.id, draft.key, draft.group, draft.session, draft.owner, draft.role, draft.uri)
    metadata = 0 if draft.metadata is msgspec.UNSET else len(bytes(draft.metadata))
    rough = 4 * sum(len(text) for text in texts if text is not None) + metadata + 20 * len(draft.embedding or ())
    return rough if rough < _CHUNK_BYTES else len(msgspec.json.encode(draft))
