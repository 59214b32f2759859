"""The table of methods: each A2M method the router serves, as it is asked over any binding (§4)."""

from collections.abc import Container, Mapping
from functools import partial
from typing import Any, Final, Literal

import msgspec

from a2m_router.backup.backing_up import Backups, State
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings, Tier
from a2m_router.methods.discretion import Handler, discreet, hears_reasons
from a2m_router.methods.drafting import refuse_if_read_only
from a2m_router.methods.reading import Fetched, Page, Readings, Records
from a2m_router.methods.selecting import sight_of
from a2m_router.methods.summaries import Summaries, Summarized, SummarizeEntry
from a2m_router.methods.upkeep import Closed, Consolidated, SessionEntry, Upkeep
from a2m_router.methods.writing import Writing
from a2m_router.process.budget import budget
from a2m_router.protocol.server.event_log import EventLog
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.server.watching import EventsEntry, Watching
from a2m_router.protocol.wire.capabilities import METHODS, PROTOCOL, methods_of, speaks
from a2m_router.protocol.wire.errors import A2MError, Code, disk_failed, invalid_params
from a2m_router.protocol.wire.messages import (
    Backup,
    ConditionalRemember,
    Consolidate,
    Describe,
    Fetch,
    Forget,
    Promote,
    Prompt,
    PromptedPages,
    PromptedRecall,
    Reinforce,
    SessionClose,
    SessionList,
    Summarize,
)
from a2m_router.storage.backup_jobs import METHOD as BACKUP
from a2m_router.storage.nearest import METRICS
from a2m_router.summaries.prompting import PromptEntry, Prompting
from a2m_router.tiers.copies import Copies
from a2m_router.tiers.link import Link
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.together import outcomes

CAPABILITIES: Final = tuple(METHODS)  # all of them


# what asks for a pass: how much there is to move is not the caller's doing, and what has been moved stays moved
_AS_LONG_AS_IT_TAKES: Final = frozenset({"memory/consolidate", "memory/session/close"})


# How long a describe waits to learn how the mounts are: every client begins with one, whatever it wants.
_LOOK_SECONDS: Final = 1.0
_UNSEEN: Final = f"asked how it is, it has not answered for {_LOOK_SECONDS:g} s"
# what changes the catalog on purpose, and can do nothing where that cannot be
_CHANGE: Final = frozenset(
    {
        *("memory/remember", "memory/forget", "memory/promote", "memory/consolidate", "memory/reinforce"),
        *("memory/session/close", "memory/summarize"),
    }
)


class Ids(msgspec.Struct):
    ids: list[str]


class Forgotten(msgspec.Struct):
    forgotten: int


class Promoted(msgspec.Struct):
    promoted: int


class Reinforced(msgspec.Struct):
    reinforced: int


class Sessions(msgspec.Struct):
    sessions: list[SessionEntry]


class TierEntry(msgspec.Struct, omit_defaults=True):
    """A tier in the answer to describe (§4.7); `status`, `server` and `mount` are ours."""

    name: str
    count: int
    kind: str
    status: str
    capacity: int | None = None
    spill_to: str | None = None
    promote_to: str | None = None
    shared: bool | None = None
    per_session: bool | None = None
    server: str | None = None
    mount: bool | None = None
    reason: str | None = None


class Limits(msgspec.Struct):
    max_records_per_call: int
    max_recall_limit: int
    max_content_length: int


class Embeddings(msgspec.Struct):
    dimensions: int | None
    metric: str
    metrics: list[str]
    model: str | None


class Extensions(msgspec.Struct, omit_defaults=True):
    """What the router does beyond the protocol, where a2m-store says what it does: `memory/timeline` takes `after` and
    `page`, `records[].if_revision` of `memory/remember` is heeded, and the caller may call `store/backup`."""

    pages: bool
    if_revision: bool
    backup: bool = False


class Description(msgspec.Struct):
    """The answer to describe (§4.1)."""

    protocol: str
    name: str
    capabilities: list[str]
    methods: list[str]
    limits: Limits
    tiers: list[TierEntry]
    embeddings: Embeddings
    events: EventsEntry
    summarize: SummarizeEntry
    prompt: PromptEntry
    store: Extensions


class Methods:
    """What the router answers, by method; each reads whose scope it is asked in, and hands on."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        copies: Copies,
        mounts: Mounts,
        writing: Writing,
        readings: Readings,
        upkeep: Upkeep,
        summaries: Summaries,
        prompting: Prompting,
        log: EventLog,
        backups: Backups,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._copies = copies
        self._mounts = mounts
        self._writing = writing
        self._readings = readings
        self._upkeep = upkeep
        self._summaries = summaries
        self._prompting = prompting
        self._backups = backups
        self._watching = Watching(log, lambda caller, owner: sight_of(scope_of(caller, owner), settings))

    def table(self) -> Mapping[str, Method]:
        """Every method that is served, by name."""
        writable = partial(refuse_if_read_only, self._mounts)
        table = {
            "memory/describe": Method(Describe, self.describe),
            "memory/remember": Method(ConditionalRemember, self.remember, writable),
            "memory/recall": Method(PromptedRecall, self.recall),
            "memory/timeline": Method(PromptedPages, self.timeline),
            "memory/forget": Method(Forget, self.forget, writable),
            "memory/promote": Method(Promote, self.promote, writable),
            "memory/consolidate": Method(Consolidate, self.consolidate),
            "memory/reinforce": Method(Reinforce, self.reinforce, writable),
            "memory/session/list": Method(SessionList, self.session_list),
            "memory/session/close": Method(SessionClose, self.session_close),
            "memory/fetch": Method(Fetch, self.fetch),
            "memory/summarize": Method(Summarize, self.summarize, writable),
            **self._watching.methods(),
            BACKUP: Method(Backup, self.backup),
        }
        most = self._settings.serve.timeout
        return {
            name: Method(
                method.params,
                discreet(handler if name in _AS_LONG_AS_IT_TAKES else _in_time(handler, most)),
                method.allow,
            )
            for name, method in table.items()
            for handler in (self._when_writable(method.handler) if name in _CHANGE else method.handler,)
        }

    def _when_writable(self, handler: Handler) -> Handler:
        """The handler, begun when the catalog can be changed: what waits here holds up nobody else."""

        async def handle(params: Any, caller: Caller) -> Any:
            try:
                await self._catalog.writable()
            except OSError as problem:
                raise disk_failed(problem, "the catalog's") from None
            return await handler(params, caller)

        return handle

    async def describe(self, params: Describe, caller: Caller) -> Description:
        if params.protocol is not None and not speaks(params.protocol):
            raise A2MError(
                Code.PROTOCOL_NOT_SUPPORTED,
                f"protocol: this server speaks {PROTOCOL}, not {params.protocol!r}",
                {"supported": [PROTOCOL]},
            )
        capabilities = [name for name in CAPABILITIES if name != "scopes" or _tells_owners_apart(caller)]
        scope = scope_of(caller, params.owner)
        unseen = await self._unseen()
        counts = self._catalog.queries.counts(scope)
        limits = self._settings.limits
        metric = self._catalog.vectors.metric()
        return Description(
            protocol=PROTOCOL,
            name=self._settings.name,
            capabilities=capabilities,
            methods=methods_of(capabilities),
            limits=Limits(limits.max_records_per_call, self._settings.recall.max_limit, limits.max_content_length),
            tiers=[self._tier(tier, counts, scope, caller, unseen) for tier in self._settings.tiers],
            embeddings=Embeddings(self._catalog.vectors.dimensions(), metric, self._metrics(metric), None),
            events=EventsEntry(push=caller.channel is not None),
            summarize=self._summaries.describe(),
            prompt=self._prompting.describe(),
            store=Extensions(pages=True, if_revision=True, backup=self._backups.offered and may_back_up(caller)),
        )

    async def _unseen(self) -> set[str]:
        """The mounts of which it takes too long to learn how they are: nobody else may have asked them lately."""
        mounts = [tier.name for tier in self._mounts.tiers if tier in self._mounts]
        links = [link for link in map(self._copies.link, mounts) if link.status == "up"]
        seen = await outcomes([partial(link.is_seen_within, _LOOK_SECONDS) for link in links])
        return {link.name for link, is_seen in zip(links, seen, strict=True) if is_seen is False}

    async def remember(self, params: ConditionalRemember, caller: Caller) -> Ids:
        if not _tells_owners_apart(caller):
            params.records = [msgspec.structs.replace(draft, owner=None) for draft in params.records]
        return Ids(await self._writing.remember(params, scope_of(caller, params.owner)))

    async def recall(self, params: PromptedRecall, caller: Caller) -> Records:
        scope = scope_of(caller, params.owner)
        asked = self._prompting.asked(params.prompt)
        found = await self._readings.best(params, scope)
        await self._add_text(found, asked, scope, keep="first")
        self._readings.count(found)
        return found

    async def timeline(self, params: PromptedPages, caller: Caller) -> Records | Page:
        scope = scope_of(caller, params.owner)
        asked = self._prompting.asked(params.prompt)
        if params.walks:
            if asked is not None:
                raise invalid_params("prompt", "expected none where `page` or `after` is: a page is for programs")
            return await self._readings.page(params, scope)
        found = await self._readings.timeline(params, scope)
        await self._add_text(found, asked, scope, keep="last")
        return found

    async def _add_text(
        self, found: Records, asked: Prompt | None, scope: Scope, keep: Literal["first", "last"]
    ) -> None:
        if asked is not None:
            with self._readings.dropping_gone(found, scope):  # a model may write for a while
                rendered = await self._prompting.rendered(found.records, asked, keep)
                found.prompt, found.prompt_ids = rendered.text, rendered.ids

    async def summarize(self, params: Summarize, caller: Caller) -> Summarized:
        return await self._summaries.summarize(params, scope_of(caller, params.owner))

    async def fetch(self, params: Fetch, caller: Caller) -> Fetched:
        return await self._readings.fetch(params, scope_of(caller, params.owner))

    async def forget(self, params: Forget, caller: Caller) -> Forgotten:
        return Forgotten(await self._writing.forget(params, scope_of(caller, params.owner)))

    async def promote(self, params: Promote, caller: Caller) -> Promoted:
        return Promoted(await self._upkeep.promote(params, scope_of(caller, params.owner)))

    async def consolidate(self, params: Consolidate, caller: Caller) -> Consolidated:
        return await self._upkeep.consolidate(scope_of(caller, params.owner))

    async def reinforce(self, params: Reinforce, caller: Caller) -> Reinforced:
        return Reinforced(self._upkeep.reinforce(params, scope_of(caller, params.owner)))

    async def session_list(self, params: SessionList, caller: Caller) -> Sessions:
        return Sessions(self._upkeep.sessions(scope_of(caller, params.owner)))

    async def session_close(self, params: SessionClose, caller: Caller) -> Closed:
        return await self._upkeep.close(params, scope_of(caller, params.owner))

    async def backup(self, params: Backup, caller: Caller) -> State:
        if not may_back_up(caller):
            raise A2MError(
                Code.SCOPE_DENIED, "a backup holds what belongs to others: only who may see all may have one"
            )
        if not self._backups.offered:
            raise A2MError(Code.METHOD_NOT_FOUND, f"{BACKUP!r}: this federation is kept in memory, without files")
        return await self._backups.backup(params)

    def _metrics(self, metric: str) -> list[str]:
        """The comparisons that all tiers could be configured for (§3.7), the one in use among them."""
        profiles = [self._copies.link(tier.name).profile for tier in self._mounts.managed]
        # the vectors of a tier that has none are indexed here
        can = [profile.metrics or frozenset(METRICS) for profile in profiles if profile is not None]
        return sorted(frozenset.intersection(*can) | {metric}) if can else [metric]

    def _tier(
        self, tier: Tier, counts: Mapping[str, int], scope: Scope, caller: Caller, unseen: Container[str]
    ) -> TierEntry:
        link = self._copies.link(tier.name)
        reason = link.describe_status().reason or (_UNSEEN if tier.name in unseen else None)
        mounted = tier in self._mounts
        count = counts.get(tier.name, 0)
        if mounted:  # whose the records are of one that is private, only its server could count
            count = _told(link, tier) if tier.shared or scope.everyone else 0
        return TierEntry(
            name=tier.name,
            count=count,
            kind=tier.kind,
            status=link.status,
            capacity=tier.capacity,
            spill_to=tier.spill_to,
            promote_to=tier.promote_to,
            shared=tier.shared,
            per_session=tier.per_session,
            server=link.profile.name if link.profile else None,
            mount=mounted,
            reason=reason if hears_reasons(caller) else None,  # it may quote a child's stderr
        )


def _told(link: Link, tier: Tier) -> int:
    """How many records a mount has, as far as its server says; 0 where it does not."""
    profile = link.profile
    if profile is None:
        return 0
    if tier.remote_tier is not None and tier.remote_tier in profile.tiers:
        return profile.tiers[tier.remote_tier].count
    return profile.store.records or sum(remote.count for remote in profile.tiers.values())


def _in_time(handler: Handler, seconds: float) -> Handler:
    """The handler, all of whose calls to tiers, and waits for others, have so many seconds together."""

    async def handle(params: Any, caller: Caller) -> Any:
        with budget(seconds):
            return await handler(params, caller)

    return handle


def scope_of(caller: Caller, owner: str | None) -> Scope:
    """Whose eyes a call sees with (§6): the owner it asserts where that is believed, else its principal's.

    Raises SCOPE_DENIED when a principal asserts another owner than itself.
    """
    if caller.asserts_owner:
        return Scope(owner, caller.writes)
    if owner is not None and caller.owner is not None and owner != caller.owner:
        raise A2MError(Code.SCOPE_DENIED, f"owner: you are {caller.owner!r}, not {owner!r}")
    return Scope(caller.owner, caller.writes)


def may_back_up(caller: Caller) -> bool:
    """Whether a caller sees what belongs to any owner, and may have all of it copied to this machine's disk."""
    return caller.asserts_owner or caller.owner is None


def _tells_owners_apart(caller: Caller) -> bool:
    return caller.asserts_owner or caller.owner is not None
