"""memory/recall, memory/timeline and memory/fetch (§4.3, §4.4, §4.9): parameters become a question, and the answer
becomes the reply. A recall counts the accesses.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final, Literal

import msgspec
from msgspec.structs import replace

from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Tier
from a2m_router.methods.context import Context, scope_of
from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import embedding_mismatch, invalid_params, quota
from a2m_router.protocol.wire.method_params import Fetch, Pages, Prompt, PromptedPages, PromptedRecall, Recall, Timeline
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.text import query_tokens
from a2m_router.reading.answers import Answer, Degraded
from a2m_router.reading.homes import still
from a2m_router.reading.question import question_of
from a2m_router.reading.recalls import Recalls
from a2m_router.reading.timelines import Timelines
from a2m_router.summaries.prompting import Prompting
from a2m_router.tiers.failures import changing

log = logging.getLogger(__name__)

# Requests to tiers exceed the caller's limit only up to this many candidates.
_MOST_CANDIDATES: Final = 1000

# ReadReply in a page: the default, and the maximum.
_PAGE: Final = 1000
_LARGEST_PAGE: Final = 10_000


class ReadReply(msgspec.Struct, omit_defaults=True):
    """The reply to a read: the records, the tiers that are missing or incomplete, and the rendered text (§4.16)."""

    records: list[Record]
    degraded: list[Degraded] | None = None
    prompt: str | None = None
    prompt_ids: list[str] | None = None


class Page(msgspec.Struct):
    """A page of a walk over all records; `next` is the `after` of the next call, None at the end."""

    records: list[Record]
    next: str | None


class Fetched(msgspec.Struct):
    """The reply to memory/fetch."""

    record: Record | None


class Readings:
    """Handles reads."""

    def __init__(self, context: Context, recalls: Recalls, timelines: Timelines, prompting: Prompting) -> None:
        self._context = context
        self._recalls = recalls
        self._timelines = timelines
        self._prompting = prompting
        self._repeats = LogThrottle(log)

    def methods(self) -> Mapping[str, Method]:
        return {
            "memory/recall": Method(PromptedRecall, self.recall),
            "memory/timeline": Method(PromptedPages, self.timeline),
            "memory/fetch": Method(Fetch, self.fetch),
        }

    async def recall(self, params: PromptedRecall, caller: Caller) -> ReadReply:
        scope = scope_of(caller, params.owner)
        asked = self._prompting.asked(params.prompt)
        found = _reply(await self.best(params, scope))
        await self._add_text(found, asked, scope, keep="first")
        self._count(found)
        return found

    async def timeline(self, params: PromptedPages, caller: Caller) -> ReadReply | Page:
        scope = scope_of(caller, params.owner)
        asked = self._prompting.asked(params.prompt)
        if params.walks:
            if asked is not None:
                raise invalid_params("prompt", "expected none with `page` or `after`: pages have no rendered text")
            return await self._page(params, scope)
        found = _reply(await self.newest(params, scope))
        await self._add_text(found, asked, scope, keep="last")
        return found

    async def fetch(self, params: Fetch, caller: Caller) -> Fetched:
        scope = scope_of(caller, params.owner)
        if params.key == "":
            raise invalid_params("key", "expected a string that is not empty")
        tiers = self._context.settings.managed
        return Fetched(await self._timelines.fetch(params.key, tiers, scope, embeddings=params.embeddings))

    async def best(self, params: Recall, scope: Scope) -> Answer:
        """Return the best records for a query, a vector, or both; the newest ones without either (§4.3).

        The accesses are not counted yet.
        """
        settings = self._context.settings.recall
        wanted = self._limit(params.limit)
        question = question_of(params, scope, self._context.settings)
        self._check_vector(params.embedding, question.tiers)
        question = replace(
            question,
            query=params.query if query_tokens(params.query or "") else None,
            embedding=params.embedding,
            limit=min(wanted * settings.candidates, max(wanted, _MOST_CANDIDATES)),  # more than wanted: fusion selects
            wanted=wanted,
            min_score=params.min_score,
            embeddings=params.embeddings,
        )
        return await self._recalls.best(question)

    async def newest(self, params: Timeline, scope: Scope) -> Answer:
        """Return records in the order of their creation; `limit` keeps the newest (§4.4)."""
        question = question_of(params, scope, self._context.settings)
        if params.limit == 0:
            raise invalid_params("limit", "expected 1 or more; leave it out for no limit")
        question = replace(question, limit=params.limit or 0, embeddings=params.embeddings)
        return await self._timelines.newest(question)

    async def _page(self, params: Pages, scope: Scope) -> Page:
        """Return the next page of all that `scope` sees in managed tiers, in the order of writing.

        This is an extension, for callers that want all records without holding them at once. A page may be empty before
        the end. A tier that does not answer is an error, so that a finished walk is complete; so is a condition that
        only tiers could apply. If a summary replaces a group that the walk has passed, the walk meets both.
        """
        context = self._context
        question = question_of(params, scope, context.settings)
        if question.where.rest:
            raise invalid_params(
                "where",
                "with `page` or `after`, expected only fields that the router's own catalog has",
            )
        if params.limit is not None:
            raise invalid_params("limit", "expected none with `page` or `after`: `page` is the number of records")
        if params.page == 0:
            raise invalid_params("page", "expected 1 or more; leave it out for the default")
        question = replace(
            question,
            tiers=[tier for tier in question.tiers if tier not in context.mounts],
            limit=min(params.page or _PAGE, _LARGEST_PAGE),
            embeddings=params.embeddings,
        )
        # the cursor is valid only if this router's catalog has issued it
        place = 0 if params.after is None else context.catalog.lineage.place(params.after)
        if place is None:
            raise invalid_params("after", "expected the `next` of an earlier answer of this router; start again")
        records, next_place = await self._timelines.page(question, place)
        return Page(records, None if next_place is None else context.catalog.lineage.cursor(next_place))

    def _limit(self, limit: int | None) -> int:
        most = self._context.settings.recall.max_limit
        if limit is None:
            return self._context.settings.recall.limit
        if limit == 0:
            raise invalid_params(
                "limit", f"expected 1 to {most:,}, got 0; this server has a max_recall_limit, so 0 cannot mean all"
            )
        if limit > most:
            raise quota("limit", most, limit, "records")
        return limit

    def _check_vector(self, embedding: Sequence[float] | None, tiers: Sequence[Tier]) -> None:
        """Check the vector of a recall.

        Raises:
            A2MError: INVALID_PARAMS, it is empty; EMBEDDING_MISMATCH, its width differs from the federation's. Mounts
                have widths of their own: if only mounts are in question, any width is accepted.
        """
        if embedding is None:
            return
        if not embedding:
            raise invalid_params("embedding", "expected at least one number")
        width = (
            self._context.catalog.vectors.dimensions()
            if any(tier not in self._context.mounts for tier in tiers)
            else None
        )
        if width is not None and len(embedding) != width:
            raise embedding_mismatch("embedding", width, len(embedding))

    def _count(self, found: ReadReply) -> None:
        """Count the records of a recall as accessed, and put the new counts into the reply.

        If the catalog's disk fails, the reply is sent without being counted.
        """
        catalog = self._context.catalog
        ids = [record.id for record in found.records]
        try:
            if catalog.touch(ids, self._context.clock()):
                self._context.on_change()
        except OSError as problem:
            self._repeats.say(logging.ERROR, f"accesses were not counted: {problem}")
        now = catalog.records.find(ids)
        for record in found.records:
            entry = now.get(record.id)
            if entry is not None and entry.accessed_at is not None:
                record.access_count, record.accessed_at = entry.access_count, render(entry.accessed_at)

    async def _add_text(
        self, found: ReadReply, asked: Prompt | None, scope: Scope, keep: Literal["first", "last"]
    ) -> None:
        if asked is not None:
            with self._dropping_gone(found, scope):  # a model may take long
                rendered = await self._prompting.rendered(found.records, asked, keep)
                found.prompt, found.prompt_ids = rendered.text, rendered.ids

    @contextmanager
    def _dropping_gone(self, found: ReadReply, scope: Scope) -> Iterator[None]:
        """Remove records from a reply that were forgotten, or left the caller's sight, while its text was written.

        Enter this right after the read. ReadReply of mounts stay: the catalog does not have them.

        Raises:
            A2MError: INTERNAL_ERROR with reason "changing", the text contains one of these records.
        """
        context = self._context
        before = context.catalog.records.find(record.id for record in found.records)
        yield
        there = still(before.values(), context.catalog.records.find(before).values())
        seen = {entry.id for entry in there if context.catalog.queries.sees(scope, entry)}
        kept = [
            record
            for record in found.records
            if record.id in seen or context.settings.tier(record.tier or "") in context.mounts
        ]
        if not {record.id for record in kept}.issuperset(found.prompt_ids or ()):
            raise changing("a record was forgotten while the model wrote about it; try again", retry_after=0.0)
        found.records = kept


def _reply(answer: Answer) -> ReadReply:
    return ReadReply(answer.records, answer.degraded or None)
