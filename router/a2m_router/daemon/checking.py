"""`a2m-router --check`: every tier greeted, and what was found in one table."""

import time
from typing import Final

from a2m_router.catalog.entries import Stray
from a2m_router.catalog.rebuild.swap import REBUILDING
from a2m_router.config.settings import Tier
from a2m_router.daemon.app import Federation
from a2m_router.daemon.serve import rights
from a2m_router.process.drawing import print_report
from a2m_router.process.stderr import drain_stderr
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import Describe, Recall
from a2m_router.storage.database import damaged
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mode import mode_of
from a2m_router.tiers.profile import CannotServe, Profile

# what a mount is asked, to see that it can be
_QUERY: Final = "is anybody there"

_TITLES: Final = ("tier", "kind", "status", "link", "server", "declares", "records", "round trip")
_NUMBERS: Final = frozenset({"records", "round trip"})


async def print_check(federation: Federation) -> int:
    """Prints the table to stdout, and what is lifted for which tier. Returns 0 if every tier is up and taken into the
    account, else 1."""
    rows = []
    problems = []
    remarks = []
    for tier in federation.settings.tiers:
        link = federation.links[tier.name]
        took, silent = await _round_trip(link)
        profile = link.profile
        mounted = tier in federation.mounts
        failure = silent or (mounted and await _failure_of(link)) or _inactive_reason(federation, tier, link)
        if failure:
            problems.append(failure if failure.startswith(f"tiers.{tier.name}") else f"{tier.name}: {failure}")
        if profile is not None:
            remarks += _remarks(tier, profile, mounted=mounted)
        if not mounted:
            remarks += _set_aside(federation, tier)
        rows.append(
            (
                tier.name,
                f"{tier.kind}, mounted" if mounted else tier.kind,
                _state(link, failure),
                link.describe_status().transport,
                profile.name if profile else "–",
                ", ".join(sorted(profile.capabilities)) if profile else "–",
                "–" if mounted else f"{federation.catalog.records.count(tier.name):,}",
                "–" if took is None else f"{took * 1000:.1f} ms",
            )
        )
    damage = federation.catalog.damage()
    if damage is not None:
        problems.append(str(damaged(federation.settings.state, damage).with_remedy(REBUILDING)))
    drain_stderr()  # what the tiers said on the way here belongs before the table
    principals, tiers = federation.settings.serve.principals, federation.settings.tiers
    warning = rights.warning(principals, tiers)
    remarks += [*rights.told(principals, tiers), *([] if warning is None else [warning])]
    columns = list(zip(_TITLES, zip(*rows, strict=True), strict=True))
    title = f"{federation.settings.name}: {federation.settings.state}"
    print_report(title, columns, [*remarks, *problems], right=_NUMBERS)
    return 1 if problems else 0


def _remarks(tier: Tier, profile: Profile, *, mounted: bool) -> list[str]:
    """What a tier's server lacks of what the federation promises, and how it is made good; nothing of a native one."""
    if mounted:
        declared = "" if tier.mount else "; its server takes no writes: say mount = true"
        return [f"{tier.name}: only read; its records are shown as {tier.name}/<id>{declared}"]
    try:
        mode = mode_of(tier, profile)
    except CannotServe:
        return []  # a problem, and told as one
    if mode.native:
        return []
    lacking = profile.lacking
    if tier.url is not None and "scopes" in profile.capabilities:
        lacking = ["scopes (an owner cannot be told over HTTP)", *lacking]
    vectors = "searched by its server" if mode.vectors else "indexed beside the catalog"
    carried = "role, group, owner, session, key, revision, uri, media_type, created_at and metadata ride along"
    chosen = "" if mode.remote is None else f"; of its server's tiers {mode.remote!r} is meant"
    return [f"{tier.name}: lacks {', '.join(lacking)}; lifted: {carried}, vectors are {vectors}{chosen}"]


async def _failure_of(link: Link) -> str | None:
    """Why a mount does not answer a recall; None if it does. What is behind its server may be down all the same."""
    try:
        await link.call("memory/recall", Recall(query=_QUERY, limit=1))
    except (TierDown, A2MError) as problem:
        return f"a recall fails: {problem}"
    return None


def _state(link: Link, failure: str | None) -> str:
    """A link's state in a word or two; the reason stands below the table."""
    return f"{link.status}, takes no part" if failure and link.status == "up" else link.status


def _inactive_reason(federation: Federation, tier: Tier, link: Link) -> str | None:
    """Why a tier whose server answers takes no part."""
    if link.inactive_reason is not None or tier in federation.mounts or federation.catalog.tiers.is_scanned(tier.name):
        return link.inactive_reason
    so_far = federation.catalog.records.count(tier.name)
    return f"what it holds is still being taken into the account, {so_far:,} records so far"


def _set_aside(federation: Federation, tier: Tier) -> list[str]:
    return [
        f"{tier.name}: {stray.id!r} is set aside and not shown: "
        f"{federation.catalog.findings.why_set_aside(stray.id, stray.key)}; "
        "it is taken in at the next start when that is forgotten, or forgotten itself by its id"
        for stray in federation.catalog.strays.of_kind(tier.name, Stray.ASIDE)
    ]


async def _round_trip(link: Link) -> tuple[float | None, str | None]:
    """Seconds that a describe takes; without an answer, why there is none."""
    began = time.perf_counter()
    try:
        await link.call("memory/describe", Describe())
    except TierDown as problem:
        return None, problem.reason
    except A2MError as problem:
        return None, str(problem)
    return time.perf_counter() - began, None
