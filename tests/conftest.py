"""Configuration of all tests: anyio runs asynchronous tests on asyncio and on trio.

Tests of concurrency run on both loops, since the loops schedule tasks in different orders. Tests that make one call
after the other run on one loop. In the modules of FROM_CALL_TO_CALL, half of the tests run on each loop. Elsewhere,
slow tests name their loop: their `anyio_backend` is parametrized. With A2M_EXAMPLES of at least 2, the modules of
FROM_CALL_TO_CALL run on both loops, too.
"""

import os
import sys
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# modules where the loop does not matter: half of the tests run on asyncio, the other half on trio
FROM_CALL_TO_CALL: Final = frozenset(
    {
        *("test_a2m_command", "test_bad_input", "test_conditions", "test_distilling", "test_documented"),
        *("test_earlier_federations", "test_explorer_recorded", "test_interrupted_batches", "test_lifting"),
        *("test_memory_client", "test_mixes", "test_model", "test_mounts", "test_principals", "test_prompting"),
        *("test_rag", "test_rag_http", "test_rag_libraries", "test_rag_mcp", "test_recovery", "test_round_trip"),
        *("test_rules_restart", "test_short_answers", "test_summaries", "test_trouble", "test_untrue_copies"),
    }
)
TESTS: Final = Path(__file__).parent
BACKENDS: Final = ("asyncio", "trio")

# pytest shows the values of failed assertions in these modules, too
pytest.register_assert_rewrite("tests.support")

# The tests start hundreds of our processes. PYTHONDONTWRITEBYTECODE, which container images often set, would make each
# process compile all its imports. That takes a third of the time to start it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Tests start servers in other folders.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

# No deadline: on a busy machine the duration of an example says nothing about the code. Without CI every run draws
# other examples, so that many short runs cover as much as one long run.
settings.register_profile(
    "here",
    settings.default,
    deadline=None,
    max_examples=max(1, int(25 * float(os.environ.get("A2M_EXAMPLES", "1")))),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("here")


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that start processes, and choose the loops that tests run on.

    Where one loop is enough for a test, the same one is chosen in every run. A test that is selected by its full name
    runs as it is named.
    """
    for item in items:
        if _starts_processes(item.path):
            item.add_marker(pytest.mark.process)
    if float(os.environ.get("A2M_EXAMPLES", "1")) >= 2:
        return
    named = {item.nodeid for item in items}
    items[:] = [item for item in items if not _is_enough_without(item, named)]


def _starts_processes(module: Path) -> bool:
    """Return whether all tests of a module start processes, by the module's folder or name."""
    folder = module.relative_to(TESTS).parts[0]
    return folder == "process" or (folder == "backends" and module.stem.endswith("_process"))


def _is_enough_without(item: pytest.Item, named: set[str]) -> bool:
    backend = (
        item.callspec.params.get("anyio_backend")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else None
    )
    if item.path.stem not in FROM_CALL_TO_CALL or backend not in BACKENDS:
        return False
    head, _, parameters = item.nodeid.partition("[")
    parts = parameters.removesuffix("]").split("-")
    place = parts.index(backend)
    ids = [f"{head}[{'-'.join([*parts[:place], each, *parts[place + 1 :]])}]" for each in BACKENDS]
    chosen = crc32(ids[0].encode()) % len(BACKENDS)
    return ids[chosen] in named and item.nodeid != ids[chosen]


@pytest.fixture(params=BACKENDS)
def anyio_backend(request: pytest.FixtureRequest) -> str:
    backend: str = request.param
    return backend
