"""Orphan processes of an earlier router: a killed router cannot end its children, and a child that does not read its
input outlives the router.

Each tier's process is started with a mark in its environment, which its own children inherit. Before a tier's process
is started, all processes with its mark are ended. Otherwise an orphan could still write to the tier unnoticed, and two
servers would share one store. The router holds the lock of the federation's state by then, so no marked process is in
use.
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

# seconds for an orphan to end by itself, at the end of its input
_BY_ITSELF: Final = 2.0
# seconds for one that does not, to end properly after SIGTERM
_TERMINATED: Final = 2.0
# seconds after SIGKILL, when only the kernel can be slow
_KILLED: Final = 5.0
_LOOK: Final = 0.02  # seconds between two looks

log = logging.getLogger("a2m_router.tiers")


def mark_of(state: Path, tier: str) -> dict[str, str]:
    """Return the environment variable that marks a tier's processes.

    It names the lock file by device and inode: one path may be spelled in several ways, and in another container the
    same path may be another file.
    """
    try:
        lock = Path(f"{state}.lock").stat()
    except OSError:
        return {_MARK: f"{state}:{tier}"}
    return {_MARK: f"{lock.st_dev}:{lock.st_ino}:{tier}"}


async def end_orphans(mark: dict[str, str], tier: str) -> None:
    """End all processes with this mark. Processes that cannot be ended are logged."""
    # on a thread: it reads every process of the machine, and other tiers' calls go on meanwhile
    left = await anyio.to_thread.run_sync(_marked, mark[_MARK])
    if not left:
        return
    log.warning("tier=%s ending orphan processes of an earlier router: %s", tier, ", ".join(map(_named, left)))
    left = await _running_after(_BY_ITSELF, left)
    for stop, patience in (("terminate", _TERMINATED), ("kill", _KILLED)):
        for process in left:
            log.warning("tier=%s orphan process still runs, will %s it: %s", tier, stop, _named(process))
            _signal(process, stop)
        left = await _running_after(patience, left)
    for process in left:
        log.error(
            "tier=%s orphan process cannot be ended and may still write to the tier's store; end it yourself: %s",
            tier,
            _named(process),
        )


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    own = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter():
        if process.pid not in own:
            try:
                if process.environ().get(_MARK) == mark:
                    found.append(process)
            except (psutil.Error, OSError):
                continue  # it has ended, or belongs to another user
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
