"""memory/recall, memory/timeline and memory/fetch (§4.3, §4.4, §4.9): parameters become a question, and what is found
the reply; a recall is counted.
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

# Candidates beyond the caller's limit are asked for up to this many.
_MOST_CANDIDATES: Final = 1000

# ReadReply in a page, where the caller gives no number, and where it gives a great one.
_PAGE: Final = 1000
_LARGEST_PAGE: Final = 10_000


class ReadReply(msgspec.Struct, omit_defaults=True):
    """The answer to a read: its records, the tiers that did not answer, and the text that was asked for (§4.16)."""

    records: list[Record]
    degraded: list[Degraded] | None = None
    prompt: str | None = None
    prompt_ids: list[str] | None = None


class Page(msgspec.Struct):
    """A page of a walk over everything; `next` is what to give as `after`, None at the end."""

    records: list[Record]
    next: str | None


class Fetched(msgspec.Struct):
    """The answer to a fetch."""

    record: Record | None


class Readings:
    """Takes reads."""

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
                raise invalid_params("prompt", "expected none where `page` or `after` is: a page is for programs")
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
        """The best records for a query, a vector, or both; by recency without either (§4.3); not yet counted."""
        settings = self._context.settings.recall
        wanted = self._limit(params.limit)
        question = question_of(params, scope, self._context.settings)
        self._check_vector(params.embedding, question.tiers)
        question = replace(
            question,
            query=params.query if query_tokens(params.query or "") else None,
            embedding=params.embedding,
            limit=min(wanted * settings.candidates, max(wanted, _MOST_CANDIDATES)),  # more, since fusion chooses
            wanted=wanted,
            min_score=params.min_score,
            embeddings=params.embeddings,
        )
        return await self._recalls.best(question)

    async def newest(self, params: Timeline, scope: Scope) -> Answer:
        """ReadReply in the order of their creation; `limit` keeps the newest (§4.4)."""
        question = question_of(params, scope, self._context.settings)
        if params.limit == 0:
            raise invalid_params("limit", "expected 1 or more; leave it out for no limit")
        question = replace(question, limit=params.limit or 0, embeddings=params.embeddings)
        return await self._timelines.newest(question)

    async def _page(self, params: Pages, scope: Scope) -> Page:
        """The next page of all that `scope` sees in managed tiers, in the order of writing; it may be empty before the
        end.

        An extension, for those who want everything without holding it at once. A tier that does not answer is an error,
        so that what has been walked to its end was whole; so is a `where` that only tiers could answer. A group that
        gives way to its summary behind the walk is met as both.
        """
        context = self._context
        question = question_of(params, scope, context.settings)
        if question.where.rest:
            raise invalid_params(
                "where", "expected only fields that the router knows itself, where `page` or `after` is"
            )
        if params.limit is not None:
            raise invalid_params("limit", "expected none where `page` or `after` is: `page` is the number of records")
        if params.page == 0:
            raise invalid_params("page", "expected 1 or more; leave it out for the default")
        question = replace(
            question,
            tiers=[tier for tier in question.tiers if tier not in context.mounts],
            limit=min(params.page or _PAGE, _LARGEST_PAGE),
            embeddings=params.embeddings,
        )
        # a place is what this router has given out, as far as its catalog knows
        place = 0 if params.after is None else context.catalog.lineage.place(params.after)
        if place is None:
            raise invalid_params("after", "expected what an earlier answer of this router gave as `next`; begin anew")
        records, next_place = await self._timelines.page(question, place)
        return Page(records, None if next_place is None else context.catalog.lineage.cursor(next_place))

    def _limit(self, limit: int | None) -> int:
        most = self._context.settings.recall.max_limit
        if limit is None:
            return self._context.settings.recall.limit
        if limit == 0:
            raise invalid_params(
                "limit", f"expected 1 to {most:,}; this server has a max_recall_limit, so 0 means nothing"
            )
        if limit > most:
            raise quota("limit", most, limit, "records")
        return limit

    def _check_vector(self, embedding: Sequence[float] | None, tiers: Sequence[Tier]) -> None:
        """Raises INVALID_PARAMS for what is no vector; EMBEDDING_MISMATCH for one of another width than the vectors
        that are kept, unless only mounts are in question, of which each has a width of its own."""
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
        """Count what a recall has found as accessed, as the answer then says. An answer is not refused because it
        cannot be counted."""
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
            with self._dropping_gone(found, scope):  # a model may write for a while
                rendered = await self._prompting.rendered(found.records, asked, keep)
                found.prompt, found.prompt_ids = rendered.text, rendered.ids

    @contextmanager
    def _dropping_gone(self, found: ReadReply, scope: Scope) -> Iterator[None]:
        """To be entered right after the read, while what takes long makes a text of an answer: at the end what has been
        forgotten meanwhile, or has left the caller's sight, is taken out of it. Mounts keep no account.

        Raises INTERNAL_ERROR, reason "changing", if one of these is in its text.
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
            raise changing("a record has been forgotten while the model wrote of it; try again", retry_after=0.0)
        found.records = kept


def _reply(answer: Answer) -> ReadReply:
    return ReadReply(answer.records, answer.degraded or None)
