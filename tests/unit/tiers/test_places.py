"""The concurrency limit for clients' calls at a tier. Time is simulated, and jumps."""

from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio
import anyio.abc
import pytest

from a2m_router.process.budget import budget
from a2m_router.protocol.client.client import settled
from a2m_router.tiers.places import NoPlace, Places
from tests.support.clocks import simulated

MOST: Final = 8
WAITING: Final = 2  # a quarter of them


def ended(work: Callable[..., Coroutine[Any, Any, object]], *args: object) -> bool:
    """Start no task, as a link that has ended."""
    return False


def going_on(tasks: anyio.abc.TaskGroup) -> Callable[..., bool]:
    """Return a function that starts tasks in this group, as a running link does."""

    def spawn(work: Callable[..., Coroutine[Any, Any, object]], *args: object) -> bool:
        tasks.start_soon(work, *args)
        return True

    return spawn


async def occupied(places: Places, seconds: float, found: list[str], within: float = 60.0) -> None:
    """Make a client's call that takes so many seconds, and waits for its place no longer than `within`."""
    with budget(100):
        try:
            async with places.place(anyio.current_time() + within):
                found.append("placed")
                await anyio.sleep(seconds)
        except NoPlace:
            found.append("refused")


@simulated
async def test_as_many_as_there_are_places_are_under_way_and_a_few_more_wait() -> None:
    places = Places("working", MOST, ended)
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(MOST + WAITING + 3):
            tasks.start_soon(occupied, places, 1.0, found)
            await anyio.wait_all_tasks_blocked()
        assert (found.count("placed"), found.count("refused")) == (MOST, 3)
        await anyio.sleep(1.5)
        assert found.count("placed") == MOST + WAITING


@simulated
async def test_one_that_comes_to_no_place_in_time_is_refused() -> None:
    places = Places("working", 1, ended)
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(occupied, places, 10.0, found)
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()
        await occupied(places, 1.0, found, within=3.0)
        assert anyio.current_time() - began == pytest.approx(3.0)
    assert found == ["placed", "refused"]
    await occupied(places, 1.0, found)
    assert found[-1] == "placed"


@simulated
async def test_work_in_the_background_needs_no_place() -> None:
    places = Places("working", 1, ended)
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(occupied, places, 10.0, found)
        await anyio.wait_all_tasks_blocked()
        began = anyio.current_time()
        async with places.place(began):
            assert anyio.current_time() == began


@pytest.mark.parametrize("settles", [True, False])
@simulated
async def test_a_cancelled_call_keeps_its_place_until_it_is_settled(
    settles: bool,
) -> None:
    """A cancelled call keeps its place until it is resolved, or until that has taken too long."""
    found: list[str] = []
    landed = anyio.Event()
    async with anyio.create_task_group() as tasks:
        places = Places("working", 1, going_on(tasks))
        with budget(100):
            async with places.place(anyio.current_time() + 1) as given_up:
                given_up.append(landed)
        began = anyio.current_time()
        async with anyio.create_task_group() as waiting:
            waiting.start_soon(occupied, places, 0.0, found)
            await anyio.sleep(5)
            assert found == []
            if settles:
                landed.set()
        assert anyio.current_time() - began == pytest.approx(5.0 if settles else 30.0)
    assert found == ["placed"]


@simulated
async def test_a_call_that_is_given_up_and_settled_leaves_at_once() -> None:
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        places = Places("working", 1, going_on(tasks))
        with budget(100):
            async with places.place(anyio.current_time() + 1) as given_up:
                given_up.append(settled())
        await anyio.wait_all_tasks_blocked()
        await occupied(places, 0.0, found, within=0.1)
    assert found == ["placed"]


@simulated
async def test_a_call_that_is_given_up_after_the_link_has_ended_leaves_at_once() -> None:
    places = Places("working", 1, ended)
    found: list[str] = []
    with budget(100):
        async with places.place(anyio.current_time() + 1) as given_up:
            given_up.append(anyio.Event())
    await occupied(places, 0.0, found, within=0.1)
    assert found == ["placed"]


@simulated
async def test_a_tier_that_answers_too_late_has_fewer_places() -> None:
    places = Places("working", MOST, ended)
    calls = [places.begin() for _ in range(MOST)]
    for call in calls:
        places.ended(call, in_time=False)
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        for _ in range(MOST):
            tasks.start_soon(occupied, places, 1.0, found)
            await anyio.wait_all_tasks_blocked()
        assert found.count("placed") == MOST // 2
