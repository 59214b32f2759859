"""The number of examples that hypothesis draws, and the way to run a scenario with one.

A2M_EXAMPLES=50 draws fifty times as many. The numbers in the tests are for a run that ends within minutes.
"""

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from hypothesis import HealthCheck, settings

_TIMES: Final = float(os.environ.get("A2M_EXAMPLES", "1"))


def scaled(number: int) -> int:
    """Return this number of examples times A2M_EXAMPLES, and at least one."""
    return max(1, int(number * _TIMES))


def examples(number: int) -> Callable[[Any], Any]:
    """Set the number of examples of a test that runs a whole federation with each."""
    return settings(
        max_examples=scaled(number),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


def run(backend: str, scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario on one of the event loops, inside a synchronous test."""
    anyio.run(scenario, backend=backend)
