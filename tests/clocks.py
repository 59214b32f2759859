"""Time that tests own."""

import functools
from collections.abc import Awaitable, Callable
from typing import Any

import trio
import trio.testing


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Runs a test on trio with a clock that jumps to the next deadline when nothing else is to be done."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(functools.partial(test, **fixtures), clock=trio.testing.MockClock(autojump_threshold=0))

    return run
