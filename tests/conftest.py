"""What all tests share: they run on asyncio and on trio, and asynchronous ones are run by anyio.

What goes on at once is tried on both loops, since they take turns in different ways. Tests that go from one call to the
next are run on one: on either in turn in the modules of FROM_CALL_TO_CALL, and elsewhere on the one that they name, if
they would take seconds: their `anyio_backend` is parametrized. With A2M_EXAMPLES from 2 on these modules, too, are run
on both.
"""

import os
import sys
from pathlib import Path
from typing import Final
from zlib import crc32

import pytest
from hypothesis import HealthCheck, settings

# where the loop is not the point: half of each is run on asyncio, the other half on trio
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

# an assertion that fails there, too, shows its values
pytest.register_assert_rewrite("tests.support")

# The tests start hundreds of processes of ours. Where Python is told to write no bytecode, as container images like to,
# each of them would compile all that it imports anew, and that is a third of what it costs to start one.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Servers of the tests are started in other folders.
os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])

# How long an example takes says nothing about the code on a machine that has other things to do.
# Every run draws other examples, unless CI is set: a few in each run find as much in time as many in one.
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
    """Mark what starts processes, and choose the loops that tests are run on.

    Of a test that would be run on both loops, where one is enough, the same one is left each time. A test that is asked
    for by its name is run as it is named.
    """
    for item in items:
        if _starts_processes(item.path):
            item.add_marker(pytest.mark.process)
    if float(os.environ.get("A2M_EXAMPLES", "1")) >= 2:
        return
    named = {item.nodeid for item in items}
    items[:] = [item for item in items if not _is_enough_without(item, named)]


def _starts_processes(module: Path) -> bool:
    """Return whether all tests of a module start processes: it says so itself by its folder or its name."""
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
