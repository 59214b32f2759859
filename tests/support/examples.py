"""How many examples hypothesis draws, and how a scenario is run with one. A2M_EXAMPLES=50 draws fifty times as many."""

import os
from collections.abc import Awaitable, Callable
from typing import Any, Final

import anyio
from hypothesis import HealthCheck, settings

_TIMES: Final = float(os.environ.get("A2M_EXAMPLES", "1"))


def examples(number: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=max(1, int(number * _TIMES)),
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


def run(backend: str, scenario: Callable[[], Awaitable[None]]) -> None:
    anyio.run(scenario, backend=backend)
