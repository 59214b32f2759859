"""The files of a router that dies during a call.

A crash is simulated by a copy of all files at that moment; what the router does afterwards does not reach the copy.
"""

import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
from anyio import wait_all_tasks_blocked

from tests.support.federated import CALM, Clock, Hold, Steered, Task, Trial, trial

Act = Callable[[Trial], Awaitable[Any]]


def photograph(folder: Path, into: Path) -> Path:
    """Copy the files as they are now, without those that end with the process: locks and shared-memory files."""
    into.mkdir()
    for file in folder.iterdir():
        if file.suffix in (".db", ".db-wal") or file.name.endswith(".db-wal"):
            shutil.copy(file, into / file.name)
    return into


async def crash(
    folder: Path, at: Callable[[Steered], Hold], act: Act, prepare: Act | None = None, clock: Clock | None = None
) -> Path:
    """Return the folder of a router that died while `act` was held at the call that `at` selects."""
    (folder / "before").mkdir()
    steer = Steered()
    async with (
        trial(CALM, weather=steer, folder=folder / "before", clock=clock) as fed,
        anyio.create_task_group() as tasks,
    ):
        if prepare is not None:
            await prepare(fed)
        hold = at(steer)
        task = Task(tasks, lambda: act(fed))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        after = photograph(folder / "before", folder / "after")
        hold.release()
        await task.settled()
    return after


RECORD = {"id": "x", "content": "one", "key": "k", "metadata": {"m": 1}}


async def write_one(fed: Trial) -> None:
    await fed.call("remember", records=[RECORD])


async def write_group(fed: Trial) -> None:
    await fed.call(
        "remember", records=[{"id": "a", "content": "a", "group": "g"}, {"id": "b", "content": "b", "group": "g"}]
    )


async def promote(fed: Trial) -> None:
    await fed.call("promote", ids=["a"], tier="episodic")


BEFORE_THE_FLIP: list[Callable[[Steered], Hold]] = [
    lambda steer: steer.hold("working", "recall"),
    lambda steer: steer.hold("working", "recall", after=True),
    lambda steer: steer.hold("episodic", "remember"),
    lambda steer: steer.hold("episodic", "remember", after=True),
    lambda steer: steer.hold("episodic", "recall"),
    lambda steer: steer.hold("episodic", "recall", after=True),
]


def forget_what_was_reserved(folder: Path) -> None:
    """Delete the reservation from the catalog, as a power cut does that comes before it is durable."""
    with closing(sqlite3.connect(folder / "router.db")) as catalog, catalog:
        catalog.execute("DELETE FROM strays WHERE id IN (SELECT id FROM records WHERE home IS NULL)")
        assert catalog.execute("DELETE FROM records WHERE home IS NULL").rowcount == 1
