"""memory/summarize (§4.15): records are read, thought about, and what they come to is written as a record.

Nothing is locked while the summarizer thinks. What was thought of records that have changed meanwhile is thrown away
and thought anew, and a page that has been written meanwhile is not overwritten with what is older: both are looked at
in the step in which the summary becomes true.
"""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from router.a2m.errors import invalid_params, quota
from router.a2m.messages import Recall, Remember, Summarize, Timeline
from router.a2m.records import Draft, Record, digest
from router.a2m.timestamps import render
from router.catalog.catalog import Catalog
from router.catalog.entries import Entry
from router.catalog.selection import Scope
from router.config import Settings, Tier
from router.methods.drafting import destination, refuse_if_read_only
from router.methods.permission import refuse_unless_writable
from router.methods.reading import Readings
from router.methods.selecting import changing, narrowed_to_ids, selects, unanswered
from router.methods.writing import Overtaken, Writing
from router.summarizing import Summarizer, check_length, provenance
from router.text import query_tokens
from router.tiers.mounts import Mounts

# Records that are read where the caller gives no limit: the newest, or those that fit a query best.
_DEFAULT_LIMIT: Final = 200

# How often it is thought anew because what it was about has changed.
_THOUGHTS: Final = 3

# The ids of so many sources are kept with a summary.
_MOST_SOURCES: Final = 100


class Summarized(msgspec.Struct):
    """The answer: the records written, and how many were read."""

    records: list[Record]
    read: int
    written: int


class SummarizeEntry(msgspec.Struct):
    """What describe says of it: the model that writes, None where none does."""

    model: str | None


class Summaries:
    """Carries out summaries."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        readings: Readings,
        writing: Writing,
        mounts: Mounts,
        summarizer: Summarizer,
    ) -> None:
        self._settings = settings
        self._mounts = mounts
        self._catalog = catalog
        self._readings = readings
        self._writing = writing
        self._summarizer = summarizer

    def describe(self) -> SummarizeEntry:
        """The `summarize` object of describe."""
        return SummarizeEntry(self._summarizer.model)

    async def summarize(self, params: Summarize, scope: Scope) -> Summarized:
        """Summarize what the selectors mean, at most `limit` of it; the sources stay as they are.

        Raises:
            A2MError: INVALID_PARAMS without a selector, and where the summary would publish what is private without
                `into` saying so; UNKNOWN_TIER; INTERNAL_ERROR if a tier or the model did not answer, or what was
                summarized kept changing. Nothing is written then.
        """
        refuse_if_read_only(self._mounts)
        if not selects(params):
            raise invalid_params("params", "expected ids, a query, a tier, a where with a condition, or a key_prefix")
        if params.query and not query_tokens(params.query):
            # it would find whatever is newest, and all of it
            raise invalid_params("query", "expected words to search for; this one holds none")
        if params.key == "":
            raise invalid_params("key", "expected a string that is not empty, or no key at all")
        if params.into is not None:
            destination(params.into, self._settings, self._mounts, "into")
        for _ in range(_THOUGHTS):
            try:
                return await self._think(params, scope)
            except Overtaken:
                continue
        raise changing(
            "what was to be summarized, or the record at the key, has changed each time before the summary could be "
            "written; nothing was written, try again"
        )

    async def _think(self, params: Summarize, scope: Scope) -> Summarized:
        """One thought. Raises Overtaken if it is out of date."""
        records = self._summarizer.material(await self._read(params, scope))
        owner = _owner(records, scope)
        page = None if params.key is None else self._catalog.by_key(owner, params.key)
        sources = self._sources(records)
        into = self._into(params, sources.values(), page)
        shared = self._target(params, page).shared
        if page is not None:
            refuse_unless_writable(scope, page.home, "key")
        refuse_unless_writable(scope, self._target(params, page).name, "into")
        summary = await self._summarizer.summarize(records) if records else None
        if summary is None:
            return Summarized([], len(records), 0)

        def still() -> bool:
            now = self._catalog.find(sources)
            same = all(
                id in now and now[id].digest == source.digest and self._catalog.sees(scope, now[id])
                for id, source in sources.items()
            )
            there = None if params.key is None else self._catalog.by_key(owner, params.key)
            # what is private must not have got into a shared place meanwhile
            target = self._target(params, there)
            safe = target.shared == shared and (params.into is not None or not self._private(target, now.values()))
            return same and _content(there) == _content(page) and safe

        check_length(summary, self._settings.limits.max_content_length)
        ids = [record.id for record in records] if len(records) <= _MOST_SOURCES and not shared else None
        draft = Draft(
            content=summary,
            role="memory",
            tier=into,
            key=params.key,
            owner=owner,
            metadata=provenance(len(records), self._summarizer.model, ids),
        )
        [id] = await self._writing.remember(Remember(records=[draft]), scope, still)
        return Summarized(self._as_written(id, draft), len(records), 1)

    async def _read(self, params: Summarize, scope: Scope) -> list[Record]:
        """What is to be summarized, by time. A tier that does not answer is an error: half of it is not it."""
        limit = params.limit
        where = narrowed_to_ids(params)
        if params.query is not None:
            best = Recall(
                query=params.query,
                tier=params.tier,
                where=where,
                key_prefix=params.key_prefix,
                limit=min(_DEFAULT_LIMIT, self._settings.recall.max_limit) if limit is None else limit,
            )
            found = await self._readings.best(best, scope)
        else:
            most = self._settings.recall.max_limit
            if limit is not None and limit > most:
                raise quota("limit", most, limit, "records")
            newest = Timeline(
                tier=params.tier,
                where=where,
                key_prefix=params.key_prefix,
                limit=_DEFAULT_LIMIT if limit is None else limit,
            )
            found = await self._readings.timeline(newest, scope)
        for down in found.degraded or ():
            raise unanswered(down.tier, down.reason, 1.0)
        return sorted(found.records, key=lambda record: record.created_at)

    def _sources(self, records: Sequence[Record]) -> dict[str, Entry]:
        """What the catalog says of the records that were read. Raises Overtaken if one has changed since."""
        entries = self._catalog.find(record.id for record in records)
        for record in records:
            entry = entries.get(record.id)
            if entry is None:
                if self._tier_of(record) not in self._mounts:
                    raise Overtaken
            elif entry.key is not None and entry.revision != (record.revision or 0):  # without a key it is not shown
                raise Overtaken
        return entries

    def _as_written(self, id: str, draft: Draft) -> list[Record]:
        """The summary as a read would give it, without one: no tier is to fail what is true already. Nothing if it has
        been changed or forgotten since."""
        entry = self._catalog.find([id]).get(id)
        if entry is None:
            return []
        written = Record(
            id=id,
            content=draft.content or "",
            created_at=render(entry.created_at),
            role=draft.role,
            metadata=draft.metadata,
            owner=draft.owner,
            key=draft.key,
            revision=None if draft.key is None else entry.revision,
        )
        if digest(written) != entry.digest:
            return []
        written.tier, written.salience, written.access_count = entry.home, entry.salience, entry.access_count
        written.accessed_at = None if entry.accessed_at is None else render(entry.accessed_at)
        return [written]

    def _into(self, params: Summarize, sources: Iterable[Entry], page: Entry | None) -> str | None:
        """The tier that the summary goes to; None for the one where what it replaces lives."""
        if params.into is not None:
            return params.into
        target = self._target(params, page)
        private = self._private(target, sources)
        if private is not None:
            raise invalid_params(
                "into",
                f"it would be {target.name!r}, which everybody reads, and what is in {private.name!r} is private; name "
                "the tier to publish the summary there, or another one",
            )
        return None if page is not None else target.name

    def _target(self, params: Summarize, page: Entry | None) -> Tier:
        if params.into is not None:
            return self._settings.tier(params.into)
        return self._settings.tier(page.home) if page is not None else self._default()

    def _private(self, target: Tier, sources: Iterable[Entry]) -> Tier | None:
        """A tier whose records a summary in `target` would publish, if there is one."""
        if not target.shared:
            return None
        homes = (self._settings.tier(entry.home) for entry in sources)
        return next((home for home in homes if not (home.shared or home.may_publish)), None)

    def _default(self) -> Tier:
        semantic = next((tier for tier in self._mounts.managed if tier.kind == "semantic"), None)
        return destination(None, self._settings, self._mounts, "into") if semantic is None else semantic

    def _tier_of(self, record: Record) -> Tier:
        return self._settings.tier(record.tier or "")


def _content(page: Entry | None) -> tuple[str, bytes] | None:
    return None if page is None else (page.id, page.digest)


def _owner(records: Sequence[Record], scope: Scope) -> str | None:
    """Whose the summary is: the caller's, else whose the records are. Raises INVALID_PARAMS if that are several."""
    owners = {record.owner for record in records} - {None}
    if scope.owner is not None or not owners:
        return scope.owner
    if len(owners) > 1:
        raise invalid_params(
            "owner",
            "these are records of several owners; name the one whose records are meant, and who is to have the summary",
        )
    return owners.pop()
