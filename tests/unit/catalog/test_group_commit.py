"""Group commit: one sync serves all waiting callers, and no caller returns before its commit is durable."""

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.storage.database import Database
from tests.support.federated import settings_of, trial

pytestmark = pytest.mark.anyio


class Disk:
    """A disk whose syncs end when the test permits it."""

    def __init__(self) -> None:
        self.committed = 0
        self.durable: list[int] = []  # the last commit that each sync covered, in order
        self.failing: set[int] = set()
        self.started = [threading.Event() for _ in range(9)]
        self.let = [threading.Event() for _ in range(9)]
        self.turn = 0

    def sync(self) -> None:
        turn, covered = self.turn, self.committed
        self.turn += 1
        self.started[turn].set()
        assert self.let[turn].wait(20)
        if turn in self.failing:
            raise OSError(5, "Input/output error")
        self.durable.append(covered)


class Waiters:
    """Callers that commit and then wait until the commit is durable."""

    def __init__(self, tasks: anyio.abc.TaskGroup, disk: Disk, syncing: GroupCommit) -> None:
        self.tasks, self.disk, self.syncing = tasks, disk, syncing
        self.told: list[int] = []
        self.refused: list[int] = []

    async def commit(self) -> anyio.CancelScope:
        self.disk.committed += 1
        scope = anyio.CancelScope()
        self.tasks.start_soon(self._wait, self.disk.committed, scope)
        await anyio.wait_all_tasks_blocked()
        return scope

    async def _wait(self, commit: int, scope: anyio.CancelScope) -> None:
        with scope:
            try:
                await self.syncing.wait()
            except OSError:
                self.refused.append(commit)
            else:
                assert max(self.disk.durable) >= commit
                self.told.append(commit)


async def begun(event: threading.Event) -> None:
    assert await anyio.to_thread.run_sync(event.wait, 20)


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.lowlevel.checkpoint()


async def test_commits_after_a_sync_began_share_the_next_one() -> None:
    disk = Disk()
    syncing = GroupCommit(disk.sync)
    async with anyio.create_task_group() as tasks:
        waiters = Waiters(tasks, disk, syncing)
        await waiters.commit()
        await begun(disk.started[0])
        for _ in range(20):
            await waiters.commit()
        assert not disk.started[1].is_set()
        disk.let[0].set()
        await begun(disk.started[1])
        await until(lambda: waiters.told == [1])
        await waiters.commit()
        disk.let[1].set()
        disk.let[2].set()
    assert sorted(waiters.told) == list(range(1, 23))
    assert disk.durable == [1, 21, 22]


async def test_a_sync_that_fails_is_said_to_all_who_wait_and_the_next_one_works() -> None:
    disk = Disk()
    disk.failing = {0}
    syncing = GroupCommit(disk.sync)
    async with anyio.create_task_group() as tasks:
        waiters = Waiters(tasks, disk, syncing)
        await waiters.commit()
        await begun(disk.started[0])
        for _ in range(3):
            await waiters.commit()
        disk.let[0].set()
        await until(lambda: len(waiters.refused) == 4)
        # no second sync for these callers: the system reports a lost write once, so a later success would prove nothing
        assert not disk.started[1].is_set()
        disk.let[1].set()
        await waiters.commit()
    assert sorted(waiters.refused) == [1, 2, 3, 4]
    assert waiters.told == [5]


async def test_those_who_wait_do_not_depend_on_who_began() -> None:
    disk = Disk()
    syncing = GroupCommit(disk.sync)
    async with anyio.create_task_group() as tasks:
        waiters = Waiters(tasks, disk, syncing)
        first = await waiters.commit()
        await begun(disk.started[0])
        second = await waiters.commit()
        await waiters.commit()
        first.cancel()
        second.cancel()
        disk.let[0].set()
        disk.let[1].set()
    assert waiters.told[-1] == 3
    assert 2 not in waiters.told
    assert waiters.refused == []


async def test_a_waiter_cancelled_before_its_sync_leaves_it_to_the_next() -> None:
    disk = Disk()
    syncing = GroupCommit(disk.sync)
    disk.let[0].set()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await syncing.wait()
    await syncing.wait()
    assert len(disk.durable) == 1


async def test_without_threads_the_sync_is_done_at_once() -> None:
    calls: list[None] = []
    syncing = GroupCommit(lambda: calls.append(None), threads=False)
    await syncing.wait()
    await syncing.wait()
    assert len(calls) == 2


# The number of syncs of each disk during a change: the catalog's, and those of the tiers that it touches.
CALLS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, int]]] = {
    "a write": (("remember", {"records": [{"content": "b"}]}), {"router": 1, "working": 1}),
    "several records to one tier": (
        ("remember", {"records": [{"content": c} for c in "bcd"]}),
        {"router": 1, "working": 1},
    ),
    # repeated although nothing has changed, since the first write may have failed on the disk
    "a write that is repeated": (("remember", {"records": [{"id": "a", "content": "a", "key": "k"}]}), {"router": 1}),
    "a write to two tiers": (
        ("remember", {"records": [{"content": "b"}, {"content": "c", "tier": "semantic"}]}),
        {"router": 2, "working": 1, "semantic": 1},
    ),
    "a replacement": (("remember", {"records": [{"content": "b", "key": "k"}]}), {"router": 2, "working": 1}),
    "a write beside a replacement": (
        ("remember", {"records": [{"content": "b"}, {"content": "c", "key": "k"}]}),
        {"router": 3, "working": 2},
    ),
    "a move": (("promote", {"ids": ["a"], "tier": "episodic"}), {"router": 3, "episodic": 1, "working": 1}),
    "a forget": (("forget", {"ids": ["a"]}), {"router": 2, "working": 1}),
    "a recall": (("recall", {"query": "a"}), {}),
}


@pytest.mark.parametrize("what", CALLS)
async def test_a_change_waits_for_no_more_disks_than_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    (method, params), expected = CALLS[what]
    syncs = Counter[str]()
    sync = Database.sync

    def counted(self: Database) -> None:
        assert self.path is not None
        syncs[self.path.stem] += 1
        sync(self)

    monkeypatch.setattr(Database, "sync", counted)
    async with trial(settings_of(policy="explicit"), folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "a", "content": "a", "key": "k"}])
        await fed.settled()
        syncs.clear()
        await fed.call(method, **params)
        await fed.settled()
        assert syncs == expected
