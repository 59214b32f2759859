"""Time that tests own.

A clock that jumps does so when every task waits. A task that goes on yielding, by `checkpoint()` or by calls that are
answered at once, never waits: the clock stands still for all the others, for ever. Whoever looks again and again until
something has happened looks at a `Pace`, and a run whose clock stands still fails with the names of those who are busy.
"""

import functools
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
import anyio.lowlevel
import trio
import trio.testing

# far more turns of the loop than any run has to take at one moment: some take two thousand
_MOST_TURNS: Final = 100_000

# for so many of the last of them it is noted who takes a step
_NOTED_TURNS: Final = 100


def jumping(most_turns: int = _MOST_TURNS) -> dict[str, Any]:
    """The options of a run on trio whose clock jumps to the next deadline when nothing else is to be done.

    The run fails with TrioInternalError, from StandsStill, where more turns of the loop than `most_turns` are taken at
    one moment.
    """
    return {"clock": trio.testing.MockClock(autojump_threshold=0), "instruments": [_Watchman(most_turns)]}


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on trio with a clock that jumps."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(functools.partial(test, **fixtures), **jumping())

    return run


class Pace:
    """The wait between two looks: a turn of the loop, so that what goes on is seen at every step; every `looks`-th time
    some time, so that a clock that jumps does. It takes 1 ms, then four times as long each time, up to `longest` s."""

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
    """Tasks go on at one moment of a clock that jumps, and keep it from jumping."""


class _Watchman(trio.abc.Instrument):
    """Counts the turns that are taken at one moment, and ends the run where there are too many."""

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
            # an instrument's own exceptions are only logged; a system task's end the run
            trio.lowlevel.spawn_system_task(self._fail)  # with trio's TrioInternalError around it

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        if 0 <= self._most - self._turns <= _NOTED_TURNS:
            self._busy.add(task.name)

    async def _fail(self) -> None:
        raise StandsStill(
            f"the clock stands still: {self._most:,} turns of the loop were taken at one moment. It jumps when all "
            f"tasks wait, and these did not: {', '.join(sorted(self._busy))}. What is looked for again and again needs "
            "time in between: tests.support.clocks.Pace"
        )
