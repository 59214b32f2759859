"""The link of a tier whose server the test starts."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio.lowlevel

from a2m_router.config.loading import parse
from a2m_router.tiers.link import Link
from a2m_router.tiers.link_factory import links_for


@asynccontextmanager
async def linked(server: str, folder: Path, **environ: str) -> AsyncIterator[Link]:
    """Run the link of a tier whose server these lines of the federation file name."""
    settings = parse(f'[tiers.remote]\nkind = "semantic"\n{server}\n', base=folder, environ=environ)
    link = links_for(settings, environ)["remote"]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        yield link
        tasks.cancel_scope.cancel()
