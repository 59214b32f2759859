"""The arrows of the house: who may import whom, and what the pure rooms must never touch.

ARROWS is the one table. A room is a module of `router`, or a package with all that is in it; what it may import of ours
stands beside it, and nothing else of ours may be imported there. Every import counts, inside functions too.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# from the bottom of the house to its top; every arrow points to a line above its own
ARROWS: dict[str, set[str]] = {
    "router.a2m": set(),
    "router.text": set(),
    "router.wal": set(),
    "router.snapshots": set(),
    "router.database": {"router.a2m", "router.snapshots", "router.wal"},
    "router.backup_jobs": {"router.a2m", "router.snapshots"},
    "router.logs": set(),
    "router.tokens": set(),
    "router.table": {"router.a2m"},
    "router.drawing": set(),
    "router.config": {"router.a2m", "router.table"},
    "router.reasoning": set(),
    "router.model": {"router.a2m", "router.config", "router.reasoning"},
    "router.policy": set(),
    "router.nearest": set(),
    "router.fusion": {"router.text"},
    "router.rendering": {"router.a2m", "router.text"},
    "router.catalog": {
        *("router.a2m", "router.config", "router.database", "router.nearest", "router.policy", "router.snapshots"),
    },
    "router.tiers": {"router.a2m", "router.config"},
    "router.settling": {"router.catalog", "router.tiers"},
    "router.sweeping": {"router.a2m", "router.catalog", "router.config", "router.settling", "router.tiers"},
    "router.redoing": {
        *("router.a2m", "router.catalog", "router.config", "router.settling", "router.sweeping", "router.tiers"),
    },
    "router.recovery": {
        *("router.a2m", "router.catalog", "router.config", "router.nearest", "router.sweeping", "router.tiers"),
    },
    "router.moves": {
        *("router.a2m", "router.policy", "router.catalog", "router.tiers", "router.sweeping", "router.settling"),
    },
    "router.summarizing": {"router.a2m", "router.model", "router.rendering"},
    "router.distilling": {
        *("router.a2m", "router.policy", "router.catalog", "router.tiers", "router.sweeping", "router.settling"),
        *("router.moves", "router.summarizing"),
    },
    "router.passes": {
        *("router.a2m", "router.policy", "router.config", "router.catalog", "router.sweeping", "router.moves"),
        *("router.distilling",),
    },
    "router.backing_up": {
        *("router.a2m", "router.backup_jobs", "router.catalog", "router.config", "router.database"),
        *("router.snapshots", "router.tiers"),
    },
    "router.methods": {
        *("router.backing_up", "router.backup_jobs"),
        *("router.a2m", "router.text", "router.config", "router.policy", "router.fusion", "router.rendering"),
        *("router.catalog", "router.tiers", "router.sweeping", "router.settling", "router.moves", "router.passes"),
        *("router.model", "router.nearest", "router.redoing", "router.summarizing"),
    },
    "router.app": {
        "router.backing_up",
        *("router.a2m", "router.config", "router.policy", "router.catalog", "router.tiers"),
        *("router.sweeping", "router.settling", "router.recovery", "router.moves", "router.passes", "router.methods"),
        *("router.model", "router.redoing", "router.summarizing", "router.distilling"),
    },
    "router.opening": {"router.a2m", "router.app", "router.config", "router.database", "router.tiers"},
    "router.blocking": {"router.a2m", "router.opening"},
    "router": {"router.a2m", "router.blocking", "router.opening"},  # the version, and what programs use
    "router.command": {
        *("router", "router.a2m", "router.config", "router.database", "router.logs", "router.tiers", "router.opening"),
        *("router.drawing",),
    },
    "router.serve": {"router.a2m", "router.config", "router.tiers", "router.methods"},
    "router.rebuilding": {
        *("router.a2m", "router.catalog", "router.config", "router.database", "router.policy", "router.recovery"),
        *("router.drawing", "router.settling", "router.sweeping", "router.tiers"),
    },
    "router.checking": {
        *("router.a2m", "router.catalog", "router.config", "router.database", "router.tiers", "router.app"),
        *("router.drawing", "router.serve"),
    },
    "router.cli": {
        "router.command",
        *("router", "router.a2m", "router.database", "router.logs", "router.config", "router.tiers"),
        *("router.tokens", "router.recovery", "router.rebuilding", "router.app", "router.serve", "router.checking"),
    },
    "backends": {
        *(
            "router",
            "router.a2m",
            "router.text",
            "router.backup_jobs",
            "router.database",
            "router.nearest",
            "router.snapshots",
            "router.table",
        ),
    },
}

# rooms that the plan names and that are not built yet
PLANNED: set[str] = set()

# no I/O, and no clock: time comes in as an argument
PURE = {
    "router.policy",
    "router.fusion",
    "router.rendering",
    "router.text",
    "router.reasoning",
    "router.a2m.capabilities",
    "router.a2m.equality",
    "router.a2m.errors",
    "router.a2m.events",
    "router.a2m.http_addressing",
    "router.a2m.http_limits",
    "router.a2m.jsonrpc",
    "router.a2m.lines",
    "router.a2m.matching",
    "router.a2m.messages",
    "router.a2m.records",
    "router.a2m.timestamps",
    "router.catalog.entries",
    "router.catalog.selection",
    "router.tiers.backoff",
    "router.tiers.lifting",
    "router.tiers.room",
}
IMPURE = {
    *("anyio", "asyncio", "trio", "socket", "ssl", "select", "selectors", "subprocess", "signal", "http", "urllib"),
    *("httpx", "uvicorn", "starlette", "apsw", "sqlite3", "os", "io", "pathlib", "shutil", "tempfile", "fcntl"),
    *("logging", "time", "random", "secrets", "uuid"),
}
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today"}

# where uvicorn serves HTTP, in an HTTP link's transport, and where a task starts that no other one waits for
ASYNCIO = {"router.a2m.http", "router.a2m.http_client", "router.a2m.http_connection", "router.a2m.own_task"}


def modules() -> dict[str, str]:
    """The source of every module of ours, by its dotted name."""
    found = {}
    for package in ("router", "backends"):
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


MODULES = modules()


def room(module: str) -> str | None:
    """The room a module is in: the longest name in ARROWS that it is, or lies in. A root holds only itself."""
    names = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)]
    return next((name for name in names if name in ARROWS and (name != "router" or module == "router")), None)


def imported(module: str, source: str) -> Iterator[str]:
    """The dotted name of all that a module imports; `from package import module` is the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in ("router", "backends")


def crossings(module: str, source: str) -> list[str]:
    """What a module imports of ours and may not, as sentences."""
    here = room(module)
    assert here is not None, f"{module} is in no room"
    return [
        f"{module} imports {name}"
        for name in imported(module, source)
        if is_ours(name) and room(name) != here and room(name) not in ARROWS[here]
    ]


def impurities(module: str, source: str) -> list[str]:
    """What a pure module reaches out with, as sentences."""
    found = [f"{module} imports {name}" for name in imported(module, source) if name.partition(".")[0] in IMPURE]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name in IMPURE_CALLS:
                found.append(f"{module} calls {name}")
    return found


def test_every_module_is_in_a_room_and_every_room_is_there() -> None:
    assert [module for module in MODULES if room(module) is None] == []
    assert set(ARROWS) - {room(module) for module in MODULES} <= PLANNED
    assert set(MODULES) >= PURE - PLANNED


def test_every_arrow_points_down() -> None:
    order = list(ARROWS)
    assert [(a, b) for a, below in ARROWS.items() for b in below if order.index(b) >= order.index(a)] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    assert crossings(module, MODULES[module]) == []


@pytest.mark.parametrize("module", sorted(PURE & set(MODULES)))
def test_what_is_pure_does_no_io_and_knows_no_clock(module: str) -> None:
    assert impurities(module, MODULES[module]) == []


def test_asyncio_is_where_http_is_served_and_nowhere_else() -> None:
    users = {
        module
        for module, source in MODULES.items()
        for name in imported(module, source)
        if name.partition(".")[0] == "asyncio"
    }
    assert users <= ASYNCIO


@pytest.mark.parametrize(
    ("module", "source", "crossing"),
    [
        ("router.a2m.stdio", "from router.text import tokens", "router.text"),
        ("router.catalog.catalog", "from router.tiers.link import Link", "router.tiers.link"),
        ("router.catalog.catalog", "def f() -> None:\n    import router.tiers.copies", "router.tiers.copies"),
        ("router.tiers.link", "from router.catalog.catalog import Catalog", "router.catalog.catalog"),
        ("router.tiers.link", "from router.methods import reading", "router.methods.reading"),
        ("router.tiers.link", "from router import moves", "router.moves"),
        ("router.moves", "from router.methods.writing import Writing", "router.methods.writing"),
        ("router.fusion", "import router.catalog.catalog", "router.catalog.catalog"),
        ("router.methods.reading", "from router.serve.door import admission", "router.serve.door"),
        ("backends.store.store", "from router.config import Settings", "router.config"),
        ("backends.store.store", "from router import catalog", "router.catalog"),
        ("router.app", "from backends.store.store import Store", "backends.store.store"),
        (
            "router.catalog.readers",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from router.tiers.link import Link",
            "router.tiers.link",
        ),
    ],
)
def test_an_import_against_the_arrows_is_caught(module: str, source: str, crossing: str) -> None:
    assert crossings(module, source) == [f"{module} imports {crossing}"]


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import os.path",
        "from anyio import sleep",
        "from datetime import datetime\ndatetime.now()",
        "def f() -> None:\n    open('x')",
        "import logging",
    ],
)
def test_a_pure_module_that_reaches_out_is_caught(source: str) -> None:
    assert len(impurities("router.policy", source)) == 1
