"""The clock that jumps: it detects tasks that wait by yielding. With `Pace`, a task may look often and time still
passes."""

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import pytest
import trio

from tests.support.clocks import Pace, StandsStill, jumping, simulated
from tests.support.paths import ROOT


async def yielding(done: anyio.Event) -> None:
    while not done.is_set():
        await anyio.lowlevel.checkpoint()


async def asking(done: anyio.Event) -> None:
    """Calls that are answered at once let no time pass either."""
    requests, served = anyio.create_memory_object_stream[int](0)
    with requests, served:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serving, served)
            while not done.is_set():
                await requests.send(1)
            tasks.cancel_scope.cancel()


async def serving(served: anyio.abc.ObjectReceiveStream[int]) -> None:
    async for _ in served:
        pass


async def instantly(done: anyio.Event) -> None:
    while not done.is_set():
        await anyio.lowlevel.checkpoint()


@pytest.mark.parametrize("waiting", [yielding, asking, instantly])
@pytest.mark.parametrize("through_anyio", [False, True])
def test_a_run_whose_clock_stands_still_fails_and_names_who_is_busy(
    waiting: Callable[[anyio.Event], Coroutine[Any, Any, None]], through_anyio: bool
) -> None:
    async def run() -> None:
        done = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(waiting, done, name="the busy one")
            await anyio.sleep(1)
            done.set()

    options = jumping(most_turns=1000)
    through = (
        partial(anyio.run, run, backend="trio", backend_options=options)
        if through_anyio
        else partial(trio.run, run, **options)
    )
    with pytest.raises(trio.TrioInternalError) as failure:
        through()
    [cause] = causes(failure.value)
    assert "the busy one" in str(cause)
    assert "1,000 turns" in str(cause)


def causes(failure: BaseException | None) -> list[StandsStill]:
    """Return the failures of the clock in the causes of a failed run."""
    if isinstance(failure, BaseExceptionGroup):
        return [found for each in failure.exceptions for found in causes(each)]
    if failure is None or isinstance(failure, StandsStill):
        return [failure] if failure else []
    return causes(failure.__cause__)


@simulated
async def test_a_pace_sees_every_step_and_lets_time_pass_with_few_looks() -> None:
    """A task that looks at a pace sees every step at first, and a long time passes with few looks."""
    pace = Pace(looks=10, longest=5.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.sleep, 600)
        began = anyio.current_time()
        moments = []
        while anyio.current_time() - began < 600:
            await pace()
            moments.append(anyio.current_time() - began)
    assert moments[:9] == [0] * 9
    assert moments[9] == pytest.approx(0.001)
    assert len(moments) < 10 * (600 / 5 + 10)


def test_every_clock_that_jumps_is_watched() -> None:
    named = {path.name for path in (ROOT / "tests").rglob("*.py") if "MockClock" in path.read_text()}
    assert named == {"clocks.py", Path(__file__).name}
