"""`a2m-router --check`: connects to every tier and prints the results in one table."""

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

# the query of the recall that tests a mount
_QUERY: Final = "is anybody there"

_TITLES: Final = ("tier", "kind", "status", "link", "server", "declares", "records", "round trip")
_NUMBERS: Final = frozenset({"records", "round trip"})


async def print_check(federation: Federation) -> int:
    """Print the table to stdout, then remarks (such as what is lifted for a tier) and problems.

    Returns:
        0 if every tier is up, and all records of the managed tiers are in the catalog; else 1.
    """
    rows = []
    problems = []
    remarks = []
    for tier in federation.settings.tiers:
        link = federation.links[tier.name]
        took, no_answer = await _round_trip(link)
        profile = link.profile
        mounted = tier in federation.mounts
        failure = no_answer or (mounted and await _failure_of(link)) or _inactive_reason(federation, tier, link)
        if failure:
            problems.append(failure if failure.startswith(f"tiers.{tier.name}") else f"{tier.name}: {failure}")
        if profile is not None:
            remarks += _remarks(tier, profile, mounted=mounted)
        if not mounted:
            remarks += _quarantined(federation, tier)
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
    drain_stderr()  # the tiers' own output belongs before the table
    principals, tiers = federation.settings.serve.principals, federation.settings.tiers
    warning = rights.warning(principals, tiers)
    remarks += [*rights.write_rights(principals, tiers), *([] if warning is None else [warning])]
    columns = list(zip(_TITLES, zip(*rows, strict=True), strict=True))
    title = f"{federation.settings.name}: {federation.settings.state}"
    print_report(title, columns, [*remarks, *problems], right=_NUMBERS)
    return 1 if problems else 0


def _remarks(tier: Tier, profile: Profile, *, mounted: bool) -> list[str]:
    """Return what the server of a tier lacks and how the router makes up for it; nothing for a native server."""
    if mounted:
        declared = "" if tier.mount else "; its server accepts no writes: set mount = true"
        return [f"{tier.name}: read-only; its records are shown as {tier.name}/<id>{declared}"]
    try:
        mode = mode_of(tier, profile)
    except CannotServe:
        return []  # reported as a problem, not as a remark
    if mode.native:
        return []
    lacking = profile.lacking
    if tier.url is not None and "scopes" in profile.capabilities:
        lacking = ["scopes (an owner cannot be sent over HTTP)", *lacking]
    vectors = "searched by its server" if mode.vectors else "indexed beside the catalog"
    carried = "role, group, owner, session, key, revision, uri, media_type, created_at and metadata"
    chosen = "" if mode.remote is None else f"; only the tier {mode.remote!r} of its server is used"
    return [
        f"{tier.name}: its server lacks {', '.join(lacking)}. It is lifted: {carried} are stored as part of its "
        f"records, vectors are {vectors}{chosen}"
    ]


async def _failure_of(link: Link) -> str | None:
    """Return why a recall of a mount fails; None if it succeeds.

    A describe is not enough: the mount's server may be up while the service behind it is down.
    """
    try:
        await link.call("memory/recall", Recall(query=_QUERY, limit=1))
    except (TierDown, A2MError) as problem:
        return f"a recall fails: {problem}"
    return None


def _state(link: Link, failure: str | None) -> str:
    """Return the state of a link in a word or two. The reason is printed below the table."""
    return f"{link.status}, inactive" if failure and link.status == "up" else link.status


def _inactive_reason(federation: Federation, tier: Tier, link: Link) -> str | None:
    """Return why a tier is inactive although its server answers."""
    if link.inactive_reason is not None or tier in federation.mounts or federation.catalog.tiers.is_scanned(tier.name):
        return link.inactive_reason
    so_far = federation.catalog.records.count(tier.name)
    return f"its records are still being added to the catalog, {so_far:,} so far"


def _quarantined(federation: Federation, tier: Tier) -> list[str]:
    """Return a remark for each quarantined record of a tier."""
    return [
        f"{tier.name}: record {stray.id!r} is quarantined and not shown: "
        f"{federation.catalog.findings.why_set_aside(stray.id, stray.key)}; "
        "to add it to the catalog, forget that other record and restart; to delete it, forget it by its id"
        for stray in federation.catalog.strays.of_kind(tier.name, Stray.QUARANTINED)
    ]


async def _round_trip(link: Link) -> tuple[float | None, str | None]:
    """Return the seconds that a describe takes; or None, and why it was not answered."""
    began = time.perf_counter()
    try:
        await link.call("memory/describe", Describe())
    except TierDown as problem:
        return None, problem.reason
    except A2MError as problem:
        return None, str(problem)
    return time.perf_counter() - began, None
