"""Processes that an earlier router has left running: a killed one cannot end its children, and one that does not look
at its input outlives it.

Each tier's process is started with a mark in its environment, which those that it starts inherit, too. Before a tier's
process is started, all that carry its mark are ended: what such a one still does could otherwise land in the tier
behind the router's back, and two servers would have one store. Only a router that has the federation's state gets so
far, so none that is in use can be meant.
"""

import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import psutil

_MARK: Final = "A2M_ROUTER_TIER"

# for what has lost its router, and ends by itself when it sees the end of its input
_BY_ITSELF: Final = 2.0
# for what does not, to end in good order after SIGTERM
_TERMINATED: Final = 2.0
# after SIGKILL only the kernel can be slow
_KILLED: Final = 5.0
_LOOK: Final = 0.02  # seconds between two looks

log = logging.getLogger("a2m_router.tiers")


def mark_of(state: Path, tier: str) -> dict[str, str]:
    """The variable that tells a tier's processes from all others', by the lock that their router holds: its path may be
    written in several ways, and another file may have the same one where another router looks."""
    try:
        lock = Path(f"{state}.lock").stat()
    except OSError:
        return {_MARK: f"{state}:{tier}"}
    return {_MARK: f"{lock.st_dev}:{lock.st_ino}:{tier}"}


async def end_orphans(mark: dict[str, str], tier: str) -> None:
    """Returns when no process with this mark runs any more; what cannot be ended is told in the log."""
    # it looks at every process there is, and the other tiers have their calls meanwhile
    left = await anyio.to_thread.run_sync(_marked, mark[_MARK])
    if not left:
        return
    log.warning("%s: left running by an earlier router: %s", tier, ", ".join(map(_named, left)))
    left = await _running_after(_BY_ITSELF, left)
    for stop, patience in (("terminate", _TERMINATED), ("kill", _KILLED)):
        for process in left:
            log.warning("%s: %s does not end by itself: %s", tier, _named(process), stop)
            _signal(process, stop)
        left = await _running_after(patience, left)
    for process in left:
        log.error("%s: %s cannot be ended; what it still does may spoil the tier's store", tier, _named(process))


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in own:
            try:
                if process.environ().get(_MARK) == mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it has ended, or is another user's
    return found


async def _running_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    deadline = anyio.current_time() + seconds
    left = [process for process in processes if _is_running(process)]
    while left and anyio.current_time() < deadline:
        await anyio.sleep(_LOOK)
        left = [process for process in left if _is_running(process)]
    return left


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(process: psutil.Process, stop: str) -> None:
    with suppress(psutil.Error):  # it has ended meanwhile
        getattr(process, stop)()


def _named(process: psutil.Process) -> str:
    try:
        return f"{process.name()} (process {process.pid})"
    except psutil.Error:
        return f"process {process.pid}"
