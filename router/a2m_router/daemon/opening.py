"""A federation inside a program of its own: no server to start, the same memory.

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
    """The memory that the federation file at `path` describes, run in this process and reached through JSON (§8.1).

    It is one process that has a federation at a time; several share one over HTTP, from `a2m-router`. It may be entered
    in one task and left in another.

    Args:
        timeout: seconds that each call may take.
        owner: whose memory it is (§6), where a call does not say.
        environ: the variables that the file may name, and that its programs inherit; by default this process's own.
        on_notification: is told of each event after `Memory.subscribe`, as `kind`, `at` and what its kind has.

    Raises, each in a sentence: ConfigError for the file; DatabaseError for its state, for example since another process
    has it; CannotServe for a tier that cannot be part of it.
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
        told = _told(group)
        if told is None:
            raise
        raise told from None


def _told(group: BaseExceptionGroup[BaseException]) -> Exception | None:
    """Why the federation could not start, where that is all that the group of its tasks says."""
    problem: BaseException = group
    while isinstance(problem, BaseExceptionGroup) and len(problem.exceptions) == 1:
        problem = problem.exceptions[0]
    return problem if isinstance(problem, CannotServe | DatabaseError) else None
