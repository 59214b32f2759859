"""memory/summarize (§4.15): records are read, the summarizer writes a summary of them, and it is written as a record.

Nothing is locked while the summarizer runs. In the step of the commit, two things are compared with their state before:
- the records that were read. If they have changed, the summary is discarded, and they are summarized again;
- the page at the summary's key. If it has changed, it stays as it is, and the call fails: the summarizer has not read
  the edit.

Private records stay private: only `into` sends a summary of them to a shared tier.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Tier
from a2m_router.methods.context import Context, scope_of
from a2m_router.methods.reading import Readings
from a2m_router.methods.writing import Writing
from a2m_router.placement.permission import destination, refuse_unless_writable
from a2m_router.placement.writing import WriteConflict
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import invalid_params, quota
from a2m_router.protocol.wire.method_params import ConditionalRemember, Recall, Summarize, Timeline
from a2m_router.protocol.wire.records import ConditionalDraft, Draft, Record, digest
from a2m_router.protocol.wire.timestamps import render
from a2m_router.ranking.text import query_tokens
from a2m_router.reading.question import narrowed_to_ids, selects
from a2m_router.summaries.summarizing import Summarizer, check_length, provenance
from a2m_router.tiers.failures import changing

# ReadReply to read if the caller gives no limit: the newest, or the best matches of a query.
_DEFAULT_LIMIT: Final = 200

# Attempts if the records change while they are summarized.
_MOST_ATTEMPTS: Final = 3

# A summary keeps the ids of its sources up to this many.
_MOST_SOURCES: Final = 100

# Kinds of private tiers for a summary of private records if the default tier is shared, best first.
_PRIVATE_KINDS: Final = ("semantic", "episodic", "working")


class Summarized(msgspec.Struct):
    """The reply to memory/summarize: the records written, and how many were read."""

    records: list[Record]
    read: int
    written: int


class Summaries:
    """Handles memory/summarize."""

    def __init__(self, context: Context, readings: Readings, writing: Writing, summarizer: Summarizer) -> None:
        self._context = context
        self._settings = context.settings
        self._mounts = context.mounts
        self._catalog = context.catalog
        self._readings = readings
        self._writing = writing
        self._summarizer = summarizer

    def methods(self) -> Mapping[str, Method]:
        return {"memory/summarize": Method(Summarize, self.summarize, self._context.refuse_if_read_only)}

    async def summarize(self, params: Summarize, caller: Caller) -> Summarized:
        """Summarize the selected records, at most `limit` of them. The sources stay as they are.

        Raises:
            A2MError: INVALID_PARAMS, there is no selector, or the summary would publish private records without
                `into`; UNKNOWN_TIER; INTERNAL_ERROR, a tier or the model did not answer; INTERNAL_ERROR with `data:
                {reason: "changing"}`, the page at `key` has changed meanwhile, or the sources kept changing. Nothing is
                written then.
        """
        scope = scope_of(caller, params.owner)
        if not selects(params):
            raise invalid_params("params", "expected ids, a query, a tier, a where with a condition, or a key_prefix")
        if params.query and not query_tokens(params.query):
            # without words it would find the newest records, whatever they are
            raise invalid_params("query", "expected words to search for, got none")
        if params.key == "":
            raise invalid_params("key", "expected a string that is not empty, or no key at all")
        if params.into is not None:
            destination(params.into, self._settings, self._mounts, "into")
        # the pages by owner, as this call first saw them
        pages = {scope.owner: self._page(scope.owner, params.key)}
        for _ in range(_MOST_ATTEMPTS):
            try:
                return await self._attempt(params, scope, pages)
            except WriteConflict:
                continue
        raise changing(
            "the records to summarize changed each time before the summary could be written; nothing was written, try "
            "again"
        )

    async def _attempt(self, params: Summarize, scope: Scope, pages: dict[str | None, Entry | None]) -> Summarized:
        """Summarize once. Raise WriteConflict if the sources have changed, INTERNAL_ERROR if the page has changed."""
        records = self._summarizer.material(await self._read(params, scope))
        owner = _owner(records, scope)
        before = pages.setdefault(owner, self._page(owner, params.key))
        sources = self._sources(records)
        page = self._unedited(before, owner, params.key)
        # a mount's records do not move; a mount that federation.toml does not declare is as private as the file says
        mounted = {record.tier or "" for record in records if record.id not in sources}
        target = self._target(params, {*mounted, *(entry.home for entry in sources.values())}, page)
        if page is not None:
            refuse_unless_writable(scope, page.home, "key")
        refuse_unless_writable(scope, target.name, "into")
        summary = await self._summarizer.summarize(records) if records else None
        if summary is None:
            return Summarized([], len(records), 0)

        def still() -> bool:
            page = self._unedited(before, owner, params.key)
            now = self._catalog.records.find(sources)
            same = all(
                id in now and now[id].digest == source.digest and self._catalog.queries.sees(scope, now[id])
                for id, source in sources.items()
            )
            # the page, or a source, may have moved to another tier meanwhile
            goes_to = target if page is None or params.into is not None else self._settings.tier(page.home)
            homes = {*mounted, *(entry.home for entry in now.values())}
            publishes = params.into is None and goes_to.shared and self._private(homes) is not None
            return same and goes_to.shared == target.shared and not publishes

        check_length(summary, self._settings.limits.max_content_length)
        ids = [record.id for record in records] if len(records) <= _MOST_SOURCES and not target.shared else None
        draft = ConditionalDraft(
            content=summary,
            role="memory",
            tier=target.name if page is None else params.into,
            key=params.key,
            owner=owner,
            metadata=provenance(len(records), self._summarizer.model, ids),
        )
        [id] = await self._writing.write(ConditionalRemember(records=[draft]), scope, still)
        return Summarized(self._as_written(id, draft), len(records), 1)

    async def _read(self, params: Summarize, scope: Scope) -> list[Record]:
        """Read the records to summarize, sorted by time. A missing tier is an error: its records would be left out."""
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
            found = await self._readings.newest(newest, scope)
        for down in found.degraded:
            raise down.error()
        entries = self._catalog.records.find(record.id for record in found.records)
        numbers = {id: entry.seq for id, entry in entries.items()}  # orders records of the same millisecond
        return sorted(found.records, key=lambda record: (record.created_at, numbers.get(record.id, 0)))

    def _sources(self, records: Sequence[Record]) -> dict[str, Entry]:
        """Return the catalog's entries of the records that were read. Raise WriteConflict if one has changed since."""
        entries = self._catalog.records.find(record.id for record in records)
        for record in records:
            entry = entries.get(record.id)
            if entry is None:
                if self._tier_of(record) not in self._mounts:
                    raise WriteConflict
            elif entry.key is not None and entry.revision != (record.revision or 0):  # only pages show a revision
                raise WriteConflict
        return entries

    def _as_written(self, id: str, draft: Draft) -> list[Record]:
        """Return the summary as a read would, but without a read: a failing tier must not fail a committed write.

        The list is empty if the summary was changed or forgotten meanwhile.
        """
        entry = self._catalog.records.get(id)
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

    def _page(self, owner: str | None, key: str | None) -> Entry | None:
        """Return the record at an owner's key, if there is one."""
        return None if key is None else self._catalog.records.by_key(owner, key)

    def _unedited(self, before: Entry | None, owner: str | None, key: str | None) -> Entry | None:
        """Return the current page at the key, if its content and revision have not changed. A move is no change.

        Raises:
            A2MError: INTERNAL_ERROR with `data: {reason: "changing"}`, the page has changed.
        """
        now = self._page(owner, key)
        if _content(now) == _content(before):
            return now
        what = "was forgotten" if now is None else "was written" if before is None else "was edited"
        raise changing(
            f"the page at {key!r} {what} while its summary was written; it stays as it is, and nothing was written: "
            "fetch it, and summarize again to replace it"
        )

    def _target(self, params: Summarize, homes: Iterable[str], page: Entry | None) -> Tier:
        """Return the tier of the summary: `into`, or the home of the page that it replaces, or the default.

        Raises:
            A2MError: INVALID_PARAMS, the summary would publish private records, and there is no `into`.
        """
        if params.into is not None:
            return self._settings.tier(params.into)
        private = self._private(homes)
        target = self._default(private) if page is None else self._settings.tier(page.home)
        if private is None or not target.shared:
            return target
        if page is None:
            why = f"every default tier of summaries is shared, such as {target.name!r}"
        else:
            why = f"the page at {params.key!r} is in {target.name!r}, which is shared"
        raise invalid_params(
            "into",
            f"records in {private.name!r} are private, and {why}, so every caller could read the summary; set into to "
            "that tier to publish it there, or to a private tier",
        )

    def _private(self, homes: Iterable[str]) -> Tier | None:
        """Return a private tier among the sources' homes, if there is one.

        ReadReply that the policy may publish later are private until then.
        """
        return next((tier for tier in map(self._settings.tier, sorted(homes)) if not tier.shared), None)

    def _default(self, private: Tier | None) -> Tier:
        """Return the semantic tier, or the default tier of writes.

        For `private` records it is a private tier instead, if there is one that holds facts or events. From there the
        policy may publish the summary, if federation.toml says so.
        """
        managed = self._mounts.managed
        semantic = next((tier for tier in managed if tier.kind == "semantic"), None)
        default = destination(None, self._settings, self._mounts, "into") if semantic is None else semantic
        if private is None or not default.shared:
            return default
        instead = (tier for kind in _PRIVATE_KINDS for tier in managed if tier.kind == kind and not tier.shared)
        return next(instead, default)

    def _tier_of(self, record: Record) -> Tier:
        return self._settings.tier(record.tier or "")


def _content(page: Entry | None) -> tuple[str, bytes] | None:
    return None if page is None else (page.id, page.digest)


def _owner(records: Sequence[Record], scope: Scope) -> str | None:
    """Return the owner of the summary: the caller's, or the sources'. Raise INVALID_PARAMS if they have several."""
    owners = {record.owner for record in records} - {None}
    if scope.owner is not None or not owners:
        return scope.owner
    if len(owners) > 1:
        raise invalid_params(
            "owner",
            "the records have several owners; name the owner whose records to summarize, who gets the summary",
        )
    return owners.pop()
