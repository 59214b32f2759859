"""The link factory: links for the tiers of a federation file, over stdio or HTTP as the file says."""

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from urllib.parse import urlsplit

from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.client.child import connect_process, executable
from a2m_router.protocol.client.client import Peer
from a2m_router.protocol.client.http_client import connect_http
from a2m_router.tiers.link import Link
from a2m_router.tiers.profile import CannotServe


def links_for(settings: Settings, environ: Mapping[str, str]) -> dict[str, Link]:
    """Return one link for each tier, by its name, not started. Raises CannotServe if two tiers have one server."""
    _refuse_one_server(settings)
    links = {}
    for tier in settings.tiers:
        connect: Callable[[], AbstractAsyncContextManager[Peer]]
        if tier.url is None:
            connect, transport = partial(_child, tier, settings, environ), "stdio"
        else:
            connect, transport = partial(_client, tier, settings), urlsplit(tier.url).scheme
        links[tier.name] = Link(
            tier.name, connect, timeout=tier.timeout, transport=transport, most_calls=tier.max_calls
        )
    return links


def _refuse_one_server(settings: Settings) -> None:
    """Reject two tiers with one server: a record would be in both, and a delete from one would lose it in the other."""
    seen: dict[object, Tier] = {}
    for tier in settings.tiers:
        other = seen.setdefault(_reached(tier), tier)
        if other is not tier and not (other.mount and tier.mount):
            what = "url" if tier.url is not None else "command"
            raise CannotServe(
                f"tiers.{tier.name}.{what}: it is that of tiers.{other.name}; each tier needs a server and a store of "
                "its own (if each process of the program has a store of its own, set a different variable in env)"
            )


def _reached(tier: Tier) -> object:
    if tier.url is None:
        return tier.command, tier.cwd, tuple(sorted(tier.env.items()))
    parts = urlsplit(tier.url)
    return parts.scheme, (parts.hostname or "").lower(), parts.port, parts.path.rstrip("/")


@asynccontextmanager
async def _child(tier: Tier, settings: Settings, environ: Mapping[str, str]) -> AsyncIterator[Peer]:
    # imported here, because only tiers with a command need psutil
    from a2m_router.tiers.orphans import end_orphans, mark_of

    assert tier.command is not None
    program, *arguments = tier.command
    mark = mark_of(settings.state, tier.name)
    await end_orphans(mark, tier.name)
    async with connect_process(
        [executable(program, tier.cwd), *arguments],
        env=settings.child_environment(tier, environ) | mark,
        cwd=tier.cwd,
        on_stderr=lambda line: logging.getLogger("a2m_router.tiers").warning("tier=%s stderr: %s", tier.name, line),
        name=tier.name,
        max_message=settings.limits.max_message,
    ) as peer:
        yield peer


def _client(tier: Tier, settings: Settings) -> AbstractAsyncContextManager[Peer]:
    assert tier.url is not None
    return connect_http(
        tier.url,
        headers=tier.headers,
        ca_file=tier.ca_file,
        http2=tier.http2,
        max_message=settings.limits.max_message,
    )
