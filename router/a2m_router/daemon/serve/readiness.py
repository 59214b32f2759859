"""Whether the federation can be sent calls: what `/readyz` answers, for those who distribute them."""

from collections.abc import Callable, Mapping

from a2m_router.config.settings import Settings
from a2m_router.tiers.link import Link


def unready(settings: Settings, links: Mapping[str, Link], is_scanned: Callable[[str], bool]) -> str | None:
    """Why calls cannot be answered at present, in one sentence; None if they can.

    What counts are the tiers that the file requires; if it requires none, the one that takes writes by default. Such a
    tier must be up, and taken into the account unless it is a mount.

    Args:
        links: one for each tier, by its name.
        is_scanned: whether all that a managed tier holds is accounted for.
    """
    required = [tier for tier in settings.tiers if tier.required] or [tier for tier in [settings.working] if tier]
    for tier in required:
        link = links[tier.name]
        if link.status != "up":
            return f"{tier.name} is {link.status}"  # why, in whatever words, is for the log
        if not tier.mount and not is_scanned(tier.name):
            return f"{tier.name} is up, but what it holds is not taken into the account yet"
    return None
