"""The rules that may never break, each as a property of what clients see."""

import os
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings

from tests.histories import History, histories, run_history

# A2M_EXAMPLES=50 looks fifty times as long
_TIMES = float(os.environ.get("A2M_EXAMPLES", "1"))


def examples(number: int) -> Callable[[Any], Any]:
    return settings(
        max_examples=max(1, int(number * _TIMES)),
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )


def run(backend: str, scenario: Callable[[], Awaitable[None]]) -> None:
    anyio.run(scenario, backend=backend)


@examples(60)
@given(history=histories())
def test_every_answer_is_true_whatever_happens_at_once(anyio_backend: str, history: History) -> None:
    run(anyio_backend, partial(run_history, history))
