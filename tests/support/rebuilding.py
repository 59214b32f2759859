"""A rebuild of a catalog over the stores in a folder, or over servers in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from a2m_router.config.settings import Settings
from a2m_router.placement.rebuilding import Rebuilt, rebuild
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import Peer, connect_local
from a2m_router.tiers.link import Link
from a2m_store.server import serving
from a2m_store.store import Store
from tests.servers.core_only import CoreOnly
from tests.support.federated import Clock, settings_of


def settings_in(folder: Path) -> Settings:
    """Return the settings of the four tiers, with the catalog at the path that a trial uses."""
    return msgspec.structs.replace(settings_of(policy="explicit", folder=folder), state=folder / "router.db")


async def rebuilt(
    folder: Path,
    *,
    down: frozenset[str] = frozenset(),
    servers: dict[str, CoreOnly] | None = None,
    adopt: bool = False,
    federation: str | None = None,
) -> Rebuilt:
    """Rebuild the catalog over the stores in a folder, or over foreign `servers` in their place."""
    settings = settings_in(folder)

    def connect(tier: str) -> Callable[[], AbstractAsyncContextManager[Peer]]:
        @asynccontextmanager
        async def connected() -> AsyncIterator[Peer]:
            if tier in down:
                raise CannotStart("it is not there")
            if servers is not None and tier in servers:
                server = servers[tier]

                async def answer(message: bytes, caller: Any) -> bytes | None:
                    return server.answer(message)

                async with connect_local(answer, name=tier) as peer:
                    yield peer
                return
            store = Store(folder / f"{tier}.db", clock=Clock(), name=tier)
            try:
                async with serving(store, threads=False) as answers, connect_local(answers, name=tier) as peer:
                    yield peer
            finally:
                store.close()

        return connected

    links = {tier.name: Link(tier.name, connect(tier.name), timeout=tier.timeout) for tier in settings.tiers}
    return await rebuild(settings, links, lambda tier, read, of: None, adopt=adopt, federation=federation)
