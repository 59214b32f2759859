"""Clocks that a test controls.

A clock that jumps does so when every task waits. A task that never waits, because it yields with `checkpoint()` or its
calls are answered at once, stops the clock for all others. So a loop that polls for something waits with a `Pace`. A
run whose clock stands still fails with the names of the busy tasks.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.lowlevel
import trio
import trio.testing

# far more turns of the loop than any run needs at one moment: some need two thousand
_MOST_TURNS: Final = 100_000

# in so many of the last turns the names of the running tasks are recorded
_NOTED_TURNS: Final = 100


def jumping(most_turns: int = _MOST_TURNS) -> dict[str, Any]:
    """Return the options of a run on trio whose clock jumps to the next deadline when every task waits.

    The run fails with TrioInternalError, from StandsStill, when more than `most_turns` turns of the loop pass at one
    moment.
    """
    return {"clock": trio.testing.MockClock(autojump_threshold=0), "instruments": [_Watchman(most_turns)]}


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Run a test on trio with a clock that jumps."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(functools.partial(test, **fixtures), **jumping())

    return run


class Pace:
    """The wait between two polls.

    It is one turn of the loop, so that the test polls at every step. Every `looks`-th wait is a sleep, so that a clock
    that jumps can do so. The first sleep takes 1 ms, each further one four times as long, up to `longest` seconds.
    """

    def __init__(self, looks: int, longest: float) -> None:
        self._looks = looks
        self._longest = longest
        self._look = 0
        self._wait = 0.001

    async def __call__(self) -> None:
        self._look += 1
        if self._look % self._looks:
            await anyio.lowlevel.checkpoint()
        else:
            await anyio.sleep(self._wait)
            self._wait = min(4 * self._wait, self._longest)


class StandsStill(Exception):
    """Some tasks never wait, and so keep a clock that jumps from jumping."""


class _Watchman(trio.abc.Instrument):
    """Counts the turns of the loop at one moment, and ends the run when there are too many."""

    def __init__(self, most_turns: int) -> None:
        self._most = most_turns
        self._moment = 0.0
        self._turns = 0
        self._busy: set[str] = set()

    def before_io_wait(self, timeout: float) -> None:
        now = trio.current_time()
        if now != self._moment:
            self._moment, self._turns = now, 0
        self._turns += 1
        if self._turns == self._most:
            # trio only logs an instrument's exceptions; an exception in a system task ends the run
            trio.lowlevel.spawn_system_task(self._fail)  # trio wraps it in TrioInternalError

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if 0 <= self._most - self._turns <= _NOTED_TURNS:
            self._busy.add(task.name)

    async def _fail(self) -> None:
        raise StandsStill(
            f"the clock stands still: {self._most:,} turns of the loop were taken at one moment. It jumps when all "
            f"tasks wait, and these did not: {', '.join(sorted(self._busy))}. What is looked for again and again needs "
            "time in between: tests.support.clocks.Pace"
        )
