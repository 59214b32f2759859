"""Readiness: whether the federation can answer calls, as `/readyz` returns it to load balancers and supervisors."""

from collections.abc import Callable, Mapping

from a2m_router.config.settings import Settings
from a2m_router.tiers.link import Link


def unready(settings: Settings, links: Mapping[str, Link], is_scanned: Callable[[str], bool]) -> str | None:
    """Return why calls cannot be answered at present, in one sentence; None if they can.

    The tiers with `required = true` count; if there are none, the tier that gets writes by default. Such a tier must be
    up. Unless it is a mount, all its records must be in the catalog, too.

    Args:
        settings: the settings of the federation.
        links: one for each tier, by its name.
        is_scanned: returns whether all records of a managed tier are in the catalog.
    """
    required = [tier for tier in settings.tiers if tier.required] or [tier for tier in [settings.working] if tier]
    for tier in required:
        link = links[tier.name]
        if link.status != "up":
            return f"{tier.name} is {link.status}"  # the reason is in the log; it may hold text of the server
        if not tier.mount and not is_scanned(tier.name):
            return f"{tier.name} is up, but its records are still being added to the catalog"
    return None
