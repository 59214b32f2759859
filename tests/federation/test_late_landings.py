"""Calls of a dead router to a tier over HTTP, which may land while the next router runs. The clock is simulated and
jumps.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from a2m_router.protocol.client.http_client import SETTLING
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.jsonrpc import parse_request, read_params
from a2m_router.protocol.wire.method_params import Remember
from tests.support.clocks import simulated
from tests.support.crashes import forget_what_was_reserved, photograph
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    settings_of,
    trial,
)

# The semantic tier is configured with HTTP. The test supplies the real connection.
OVER_HTTP = settings_of(
    FOUR_TIERS.replace(
        '[tiers.semantic]\nkind = "semantic"\ncommand = ["-"]',
        '[tiers.semantic]\nkind = "semantic"\nurl = "http://127.0.0.1:1/"',
    ),
    policy="explicit",
)


async def killed_in(folder: Path, act: Callable[[Trial], Awaitable[Any]]) -> tuple[Path, Remember]:
    """Return the files of a router that died during `act`, while its remember call to the semantic tier was in
    progress, and that call.
    """
    (folder / "before").mkdir()
    steer = Steered()
    async with trial(OVER_HTTP, weather=steer, folder=folder / "before") as fed, anyio.create_task_group() as tasks:
        await fed.remember("one", id="x", session="s")
        hold = steer.hold("semantic", "remember")
        task = Task(tasks, lambda: act(fed))
        await hold.reached.wait()
        after = photograph(folder / "before", folder / "after")
        hold.release()
        await task.settled()
    message = next(message for tier, message in steer.seen if tier == "semantic" and b"memory/remember" in message)
    return after, read_params(parse_request(message).params, Remember)


def land(fed: Trial, call: Remember) -> None:
    """Deliver the call to its tier."""
    store = fed.stores["semantic"]
    with store.transaction():
        store.remember(call, LOCAL)


@simulated
async def test_a_copy_that_lands_after_the_start_is_removed_all_the_same(tmp_path: Path) -> None:
    folder, under_way = await killed_in(tmp_path, lambda fed: fed.call("promote", ids=["x"], tier="semantic"))
    async with trial(OVER_HTTP, folder=folder) as fed:
        assert [(r["id"], r["tier"]) for r in await fed.timeline()] == [("x", "working")]
        await anyio.sleep(SETTLING / 2)
        land(fed, under_way)
        assert [(r["id"], r["tier"]) for r in await fed.timeline()] == [("x", "working")]
        with pytest.raises(A2MError, match="a call of an earlier router may still land there"):
            await fed.call("promote", ids=["x"], tier="semantic")
        await anyio.sleep(SETTLING)
        await fed.settled()
        assert fed.copies() == {"x": ["working"]}
        assert await fed.call("promote", ids=["x"], tier="semantic") == {"promoted": 1}
        await fed.settled()
        assert fed.copies() == {"x": ["semantic"]}
        assert_nothing_under_way(fed)


@simulated
@pytest.mark.parametrize("again", [{"key": "k"}, {"id": "y"}], ids=["its key", "its id"])
async def test_a_write_lost_in_a_power_cut_does_not_replace_a_later_one(tmp_path: Path, again: dict[str, Any]) -> None:
    """A power cut removed the reservation of the write, so the next router does not know of the call."""
    late = {"id": "y", **again}
    folder, under_way = await killed_in(tmp_path, lambda fed: fed.remember("late", **late, tier="semantic"))
    forget_what_was_reserved(folder)
    async with trial(OVER_HTTP, folder=folder) as fed:
        with pytest.raises(A2MError, match="a call of an earlier router may still land there"):
            await fed.remember("later", **again, tier="semantic")
        land(fed, under_way)
        await anyio.sleep(SETTLING + 1)
        # The call was never answered, so either outcome is allowed. The router adopts the record.
        assert [r["content"] for r in await fed.timeline(tier="semantic")] == ["late"]
        await fed.call("forget", ids=["y"])
        await fed.remember("later", **again, tier="semantic")
        await fed.settled()
        assert [r["content"] for r in await fed.timeline(tier="semantic")] == ["later"]
        assert_nothing_under_way(fed)


@simulated
async def test_a_write_that_lands_after_the_start_is_removed_all_the_same(tmp_path: Path) -> None:
    folder, under_way = await killed_in(tmp_path, lambda fed: fed.remember("two", id="y", tier="semantic"))
    async with trial(OVER_HTTP, folder=folder) as fed:
        assert [r["id"] for r in await fed.timeline()] == ["x"]
        for id in ("y", "z"):
            with pytest.raises(A2MError, match="a call of an earlier router may still land there"):
                await fed.remember("two", id=id, tier="semantic")
        await fed.remember("another", id="w")  # the other tiers take writes
        await anyio.sleep(SETTLING / 2)
        land(fed, under_way)
        await anyio.sleep(SETTLING)
        await fed.settled()
        assert fed.copies() == {"x": ["working"], "w": ["working"]}
        assert sorted(r["id"] for r in await fed.timeline()) == ["w", "x"]
        await fed.remember("two", id="y", tier="semantic")
        assert sorted(r["id"] for r in await fed.timeline()) == ["w", "x", "y"]
        assert_nothing_under_way(fed)


async def killed_at_rest(folder: Path) -> Path:
    """Return the files of a router that died at rest. A power cut may have removed its note of a call in progress."""
    (folder / "before").mkdir()
    async with trial(OVER_HTTP, folder=folder / "before") as fed:
        await fed.remember("one", id="x", tier="semantic")
        return photograph(folder / "before", folder / "after")


async def held_for(folder: Path, seconds: float, **options: Any) -> float:
    """Start a router and stop it after `seconds`. Return how long the start bars calls to the semantic tier."""
    async with trial(OVER_HTTP, folder=folder, **options) as fed:
        held = fed.federation.reconciler.held_for("semantic")
        await anyio.sleep(seconds)
        return held


@simulated
async def test_a_start_that_did_not_wait_for_late_calls_leaves_it_to_the_next(tmp_path: Path) -> None:
    folder = await killed_at_rest(tmp_path)
    for seconds in (0, SETTLING / 2, 2 * SETTLING):
        assert await held_for(folder, seconds) > 0
    assert await held_for(folder, 0) == 0


@simulated
async def test_a_start_that_was_refused_leaves_the_wait_to_the_next(tmp_path: Path) -> None:
    folder = await killed_at_rest(tmp_path)
    away = tmp_path / "away"
    away.mkdir()
    for file in folder.glob("working.db*"):
        file.rename(away / file.name)
    for _ in range(2):
        with pytest.raises(BaseExceptionGroup):  # the tier has another store
            await held_for(folder, 0)
    for file in folder.glob("working.db*"):
        file.unlink()
    for file in away.iterdir():
        file.rename(folder / file.name)
    assert await held_for(folder, 2 * SETTLING) > 0
    assert await held_for(folder, 0) == 0


@simulated
async def test_a_start_in_which_a_tier_was_down_leaves_the_wait_to_the_next(tmp_path: Path) -> None:
    folder = await killed_at_rest(tmp_path)
    assert await held_for(folder, 2 * SETTLING, down={"semantic"}) > 0
    assert await held_for(folder, 2 * SETTLING) > 0
    assert await held_for(folder, 0) == 0


@simulated
async def test_what_can_still_land_is_waited_for_after_each_crash(tmp_path: Path) -> None:
    folder = await killed_at_rest(tmp_path)
    assert await held_for(folder, 2 * SETTLING) > 0
    async with trial(OVER_HTTP, folder=folder):
        again = photograph(folder, tmp_path / "again")
    assert await held_for(again, 0) > 0
