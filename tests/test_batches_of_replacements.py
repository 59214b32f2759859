"""A batch with a replacement in it is one write: all of it becomes true or nothing, also when something dies of it.

Whether a tier that refuses its part makes the batch fail is the router's to say; but what it says must be so.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import anyio
import pytest
from anyio import wait_all_tasks_blocked

import router.redoing
from router.a2m.errors import A2MError
from tests.federated import Steered, Task, Trial, contents, trial
from tests.test_rules_restart import CALM, crash, one_home_each, photograph

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def nothing_lands_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """No server outlives its router here."""
    monkeypatch.setattr(router.redoing, "_RESUME_SECONDS", 0.0)


async def write_old(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "old", "key": "k"}])


async def write_beside(fed: Trial) -> None:
    await fed.call("remember", records=[{"id": "x", "content": "beside"}, {"content": "new", "key": "k"}])


@pytest.mark.parametrize(("having", "after"), [(b"beside", True), (b"new", False), (b"new", True)])
async def test_a_router_that_dies_between_a_new_record_and_a_replacement_leaves_both_or_neither(
    having: bytes, after: bool, tmp_path: Path
) -> None:
    folder = await crash(
        tmp_path, lambda steer: steer.hold("working", "remember", after=after, having=having), write_beside, write_old
    )
    async with trial(CALM, folder=folder) as fed:
        await one_home_each(fed)
        assert set(contents(await fed.timeline())) in ({"old"}, {"beside", "new"})


TWO: Final = [{"content": "old", "key": "k"}, {"content": "other", "key": "s", "tier": "semantic"}]
BEFORE: Final = {"old": "working", "other": "semantic"}
AFTER: Final = {"new": "working", "newer": "semantic"}


async def replaced(fed: Trial) -> Mapping[str, str]:
    """What is true after the replacement of both, by the answer to it."""
    try:
        await fed.call("remember", records=[{"content": "new", "key": "k"}, {"content": "newer", "key": "s"}])
    except A2MError:
        return BEFORE
    return AFTER


async def test_what_was_refused_is_not_shown_while_its_tiers_are_brought_back() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await fed.call("remember", records=TWO)
        steer.refuse("semantic", "remember")
        true = await replaced(fed)
        assert contents(await fed.timeline()) == true
        steer.allow("semantic", "remember")
        await fed.settled()
        assert contents(await fed.timeline()) == true


async def test_what_was_refused_does_not_come_true_when_the_router_dies(tmp_path: Path) -> None:
    """Killed when the caller has been told, and the tier that did its part has not been told to undo that."""
    (tmp_path / "before").mkdir()
    steer = Steered()
    async with trial(CALM, weather=steer, folder=tmp_path / "before") as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=TWO)
        steer.refuse("semantic", "remember")
        undoing = steer.hold("working", "remember", having=b"old")
        true = await Task(tasks, lambda: replaced(fed)).ended()
        await wait_all_tasks_blocked()
        folder = photograph(tmp_path / "before", tmp_path / "after")
        undoing.release()
        steer.allow("semantic", "remember")
    async with trial(CALM, folder=folder) as fed:
        await one_home_each(fed)
        assert contents(await fed.timeline()) == true
