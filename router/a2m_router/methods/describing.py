"""memory/describe (§4.1): what the router offers, and the state of its tiers."""

from collections.abc import Container, Mapping
from functools import partial
from typing import Final

import msgspec

from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Tier
from a2m_router.methods.context import Context, scope_of, sees_all, tells_owners_apart
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.server.watching import EventsEntry
from a2m_router.protocol.wire.capabilities import METHODS, PROTOCOL, methods_of, speaks
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Describe
from a2m_router.storage.nearest import METRICS
from a2m_router.summaries.prompting import PromptEntry, Prompting
from a2m_router.summaries.summarizing import Summarizer
from a2m_router.tiers.gather import gather_outcomes
from a2m_router.tiers.link import Link

CAPABILITIES: Final = tuple(METHODS)  # all of them

# A describe waits this long for the mounts' status: every client begins with a describe, so it has to be quick.
_LOOK_SECONDS: Final = 1.0
_UNSEEN: Final = f"no answer to a status check within {_LOOK_SECONDS:g} s"


class SummarizeEntry(msgspec.Struct):
    """The `summarize` part of a description: the model that writes summaries; None if there is no model."""

    model: str | None


class TierEntry(msgspec.Struct, omit_defaults=True):
    """A tier in a description (§4.7); `status`, `reason`, `server` and `mount` are extensions."""

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


class DeclaredLimits(msgspec.Struct):
    max_records_per_call: int
    max_recall_limit: int
    max_content_length: int


class Embeddings(msgspec.Struct):
    dimensions: int | None
    metric: str
    metrics: list[str]
    model: str | None


class Extensions(msgspec.Struct, omit_defaults=True):
    """The router's extensions of the protocol, in the member where a2m-store declares its own.

    `pages`: `memory/timeline` takes `after` and `page`. `if_revision`: `memory/remember` applies
    `records[].if_revision`. `backup`: the caller may call `store/backup`.
    """

    pages: bool
    if_revision: bool
    backup: bool = False


class Description(msgspec.Struct):
    """The reply to memory/describe (§4.1)."""

    protocol: str
    name: str
    capabilities: list[str]
    methods: list[str]
    limits: DeclaredLimits
    tiers: list[TierEntry]
    embeddings: Embeddings
    events: EventsEntry
    summarize: SummarizeEntry
    prompt: PromptEntry
    store: Extensions


class Describing:
    """Handles memory/describe.

    Args:
        backup: whether backups are offered.
    """

    def __init__(self, context: Context, summarizer: Summarizer, prompting: Prompting, *, backup: bool) -> None:
        self._context = context
        self._summarizer = summarizer
        self._prompting = prompting
        self._backup = backup

    def methods(self) -> Mapping[str, Method]:
        return {"memory/describe": Method(Describe, self.describe)}

    async def describe(self, params: Describe, caller: Caller) -> Description:
        if params.protocol is not None and not speaks(params.protocol):
            raise A2MError(
                Code.PROTOCOL_NOT_SUPPORTED,
                f"protocol: this server speaks {PROTOCOL}, not {params.protocol!r}",
                {"supported": [PROTOCOL]},
            )
        capabilities = [name for name in CAPABILITIES if name != "scopes" or tells_owners_apart(caller)]
        scope = scope_of(caller, params.owner)
        unseen = await self._unseen()
        counts = self._context.catalog.queries.counts(scope)
        limits = self._context.settings.limits
        metric = self._context.catalog.vectors.metric()
        return Description(
            protocol=PROTOCOL,
            name=self._context.settings.name,
            capabilities=capabilities,
            methods=methods_of(capabilities),
            limits=DeclaredLimits(
                limits.max_records_per_call, self._context.settings.recall.max_limit, limits.max_content_length
            ),
            tiers=[self._tier(tier, counts, scope, caller, unseen) for tier in self._context.settings.tiers],
            embeddings=Embeddings(self._context.catalog.vectors.dimensions(), metric, self._metrics(metric), None),
            events=EventsEntry(push=caller.channel is not None),
            summarize=SummarizeEntry(self._summarizer.model),
            prompt=self._prompting.describe(),
            store=Extensions(pages=True, if_revision=True, backup=self._backup and sees_all(caller)),
        )

    async def _unseen(self) -> set[str]:
        """Return the mounts that do not answer a status check in time. Recent checks are not repeated."""
        mounts = [tier.name for tier in self._context.mounts.tiers if tier in self._context.mounts]
        links = [link for link in map(self._context.gateway.link, mounts) if link.status == "up"]
        seen = await gather_outcomes([partial(link.is_seen_within, _LOOK_SECONDS) for link in links])
        return {link.name for link, is_seen in zip(links, seen, strict=True) if is_seen is False}

    def _metrics(self, metric: str) -> list[str]:
        """Return the metrics that all tiers could be configured for (§3.7), with the one in use."""
        profiles = [self._context.gateway.link(tier.name).profile for tier in self._context.mounts.managed]
        # the router itself indexes the vectors of a tier that has no vectors
        can = [profile.metrics or frozenset(METRICS) for profile in profiles if profile is not None]
        return sorted(frozenset.intersection(*can) | {metric}) if can else [metric]

    def _tier(
        self, tier: Tier, counts: Mapping[str, int], scope: Scope, caller: Caller, unseen: Container[str]
    ) -> TierEntry:
        link = self._context.gateway.link(tier.name)
        reason = link.describe_status().reason or (_UNSEEN if tier.name in unseen else None)
        mounted = tier in self._context.mounts
        count = counts.get(tier.name, 0)
        if mounted:  # only the server of a private mount could count records by owner
            count = _count_of(link, tier) if tier.shared or scope.everyone else 0
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
            reason=reason if sees_all(caller) else None,  # it may quote a child's stderr
        )


def _count_of(link: Link, tier: Tier) -> int:
    """Return how many records a mount has, if its server reports it; otherwise 0."""
    profile = link.profile
    if profile is None:
        return 0
    if tier.remote_tier is not None and tier.remote_tier in profile.tiers:
        return profile.tiers[tier.remote_tier].count
    return profile.store.records or sum(remote.count for remote in profile.tiers.values())
