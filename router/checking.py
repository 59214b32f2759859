"""`a2m-router --check`: every tier greeted, and what was found in one table."""

import sys
import time
from typing import Final

from rich import box
from rich.console import Console
from rich.table import Table

from router.a2m.errors import A2MError
from router.a2m.messages import Describe
from router.app import Federation
from router.tiers.link import Link, TierDown

# where nobody says how wide a line may be
_PIPE_WIDTH: Final = 160


async def print_check(federation: Federation) -> int:
    """Prints the table to stdout. Returns 0 if every tier is up and taken into the account, else 1."""
    table = Table(title=f"{federation.settings.name}: {federation.settings.state}", box=box.SIMPLE_HEAD)
    for column in ("tier", "kind", "status", "link", "server"):
        table.add_column(column, overflow="fold")
    table.add_column("declares")
    for column in ("records", "round trip"):
        table.add_column(column, justify="right", no_wrap=True)
    problems = []
    for tier in federation.settings.tiers:
        link = federation.links[tier.name]
        took = await _round_trip(link)
        profile = link.profile
        if took is None:
            problems.append(f"{tier.name}: {link.reason or 'does not answer'}")
        elif not federation.catalog.is_scanned(tier.name):
            problems.append(f"{tier.name}: what it holds could not be taken into the account")
        table.add_row(
            tier.name,
            tier.kind,
            link.status,
            link.describe_status().transport,
            profile.name if profile else "–",
            ", ".join(sorted(profile.capabilities)) if profile else "–",
            f"{federation.catalog.records_in(tier.name):,}",
            "–" if took is None else f"{took * 1000:.1f} ms",
        )
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH)
    console.print(table)
    for problem in problems:
        console.print(problem, markup=False)
    return 1 if problems else 0


async def _round_trip(link: Link) -> float | None:
    """Seconds that a describe takes; None without an answer."""
    began = time.perf_counter()
    try:
        await link.call("memory/describe", Describe())
    except (TierDown, A2MError):
        return None
    return time.perf_counter() - began
