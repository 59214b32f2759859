"""A federation inside the caller's own process: the same memory, without a server to start.

async with open_federation("federation.toml") as memory:
    await memory.recall("how often does the deploy key change?")
"""

import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from a2m_router.config.loading import load
from a2m_router.daemon.app import running_federation
from a2m_router.protocol.client.client import connect_local
from a2m_router.protocol.client.connecting import OnNotification, events_for, greeted
from a2m_router.protocol.client.memory import TIMEOUT, Memory
from a2m_router.protocol.client.own_task import in_own_task
from a2m_router.storage.database import DatabaseError
from a2m_router.tiers.link_factory import links_for
from a2m_router.tiers.profile import CannotServe


@in_own_task
@asynccontextmanager
async def open_federation(
    path: str | os.PathLike[str],
    *,
    timeout: float = TIMEOUT,
    owner: str | None = None,
    environ: Mapping[str, str] | None = None,
    on_notification: OnNotification | None = None,
) -> AsyncIterator[Memory]:
    """Run the federation of the file at `path` in this process, and yield its memory (through JSON, §8.1).

    Only one process can run a federation at a time. Several processes share one over HTTP, with `a2m-router`. The
    context may be entered in one task and left in another.

    Args:
        path: the federation file.
        timeout: seconds that each call may take.
        owner: the owner of calls that name none (§6).
        environ: the variables that the file may name and that its programs inherit; by default those of this process.
        on_notification: called with each event after `Memory.subscribe`: `kind`, `at` and the fields of its kind.

    Raises:
        ConfigError: the file is not valid.
        DatabaseError: the state file cannot be used, for example because another process has it open.
        CannotServe: a tier cannot be part of the federation.
    """
    variables = os.environ if environ is None else environ
    settings = load(Path(path), variables)
    links = links_for(settings, variables)
    try:
        async with (
            running_federation(settings, links) as federation,
            connect_local(
                federation.answer,
                name=settings.name,
                max_message=settings.limits.max_message,
                on_notification=events_for(on_notification),
            ) as peer,
        ):
            yield await greeted(Memory(peer, timeout=timeout, owner=owner))
    except BaseExceptionGroup as group:
        reason = _start_failure(group)
        if reason is None:
            raise
        raise reason from None


def _start_failure(group: BaseExceptionGroup[BaseException]) -> Exception | None:
    """Return why the federation could not start, if the group holds nothing else."""
    problem: BaseException = group
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1:
        problem = problem.exceptions[0]
    return problem if isinstance(problem, CannotServe | DatabaseError) else None
