"""The import rules: which room may import which, and what the pure rooms must never use.

ARROWS is the one table of permitted imports. A room is a folder of `a2m_router`, or a package beside it, with all its
modules. A room may import only the rooms that its entry names. Imports inside functions count, too.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.support.paths import ROOT

ROUTER = "a2m_router"
PACKAGES = (ROUTER, "a2m_store", "a2m_rag", "a2m_chaos")


def rooms(*names: str) -> set[str]:
    """Return the full names of rooms of the router."""
    return {f"{ROUTER}.{name}" for name in names}


SERVER = {"process", "protocol.wire", "protocol.server"}

# in order of dependency: every room imports only rooms of earlier lines
ARROWS: dict[str, set[str]] = {
    "a2m_router.process": set(),
    "a2m_router.protocol.wire": set(),
    "a2m_router.protocol.server": rooms("process", "protocol.wire"),
    "a2m_router.protocol.client": rooms(*SERVER),
    "a2m_router.protocol": set(),
    "a2m_router.conformance": set(),
    "a2m_router.storage": rooms("protocol.wire"),
    "a2m_router.config": rooms("process", "protocol.server"),
    "a2m_router.ranking": set(),
    "a2m_router.catalog": rooms("config", "process", "protocol.wire", "ranking", "storage"),
    "a2m_router.tiers": rooms("config", "process", "protocol.client", "protocol.wire"),
    "a2m_router.summaries": rooms("config", "process", "protocol.client", "protocol.wire", "ranking"),
    "a2m_router.placement": {
        *rooms("catalog", "config", "process", "protocol.wire", "ranking", "storage", "summaries", "tiers"),
    },
    "a2m_router.reading": rooms("catalog", "config", "protocol.wire", "ranking", "storage", "tiers"),
    "a2m_router.backup": rooms("catalog", "config", "process", "protocol.wire", "storage", "tiers"),
    "a2m_router.methods": {
        *rooms("backup", "catalog", "config", "placement", "ranking", "reading", "storage", "summaries", "tiers"),
        *rooms(*SERVER),
    },
    "a2m_router.daemon": {
        *rooms("backup", "catalog", "config", "methods", "placement", "ranking", "reading", "storage", "summaries"),
        *rooms("tiers", "protocol.client", *SERVER),
    },
    "a2m_router.blocking": rooms("daemon", "process", "protocol.client", "protocol.wire"),
    ROUTER: rooms("blocking", "daemon", "protocol.client", "protocol.wire"),  # the version, and what programs use
    "a2m_router.command": {
        ROUTER,
        *rooms("config", "daemon", "storage", "tiers", "protocol.client", *SERVER),
    },
    # `a2m-router --backup` runs the code of `a2m backup`
    "a2m_router.daemon.cli": {
        ROUTER,
        *rooms("command", "config", "daemon", "placement", "storage", "tiers", "protocol.client", *SERVER),
    },
    "a2m_router.__main__": rooms("daemon.cli"),
    "a2m_store": {ROUTER, *rooms("ranking", "storage", *SERVER)},
    "a2m_rag": {ROUTER, *rooms("protocol.client", *SERVER)},
    "a2m_chaos": {ROUTER, *rooms("config", "protocol.client", *SERVER)},
}

# no I/O and no clock: times are arguments
PURE = {
    *rooms("ranking.policy", "ranking.fusion", "ranking.text", "summaries.rendering", "summaries.reasoning"),
    *rooms("protocol.server.http_addressing", "protocol.server.http_limits", "protocol.server.vectors"),
    *rooms("protocol.wire.capabilities", "protocol.wire.equality", "protocol.wire.errors", "protocol.wire.events"),
    *rooms("protocol.wire.jsonrpc", "protocol.wire.lines", "protocol.wire.matching", "protocol.wire.method_params"),
    *rooms("protocol.wire.records", "protocol.wire.timestamps", "protocol.wire.vectors"),
    *rooms("catalog.entries", "catalog.selection"),
    *rooms("tiers.backoff", "tiers.breaker", "tiers.failures", "tiers.lifting", "tiers.concurrency"),
    *rooms("placement.slots", "reading.question", "methods.drafting"),
}
IMPURE = {
    *("anyio", "asyncio", "trio", "socket", "ssl", "select", "selectors", "subprocess", "signal", "http", "urllib"),
    *("httpx", "uvicorn", "starlette", "apsw", "sqlite3", "os", "io", "pathlib", "shutil", "tempfile", "fcntl"),
    *("logging", "time", "random", "secrets", "uuid"),
}
IMPURE_CALLS = {"open", "print", "input", "now", "utcnow", "today"}

# modules that may import asyncio: they serve HTTP, carry HTTP links, or start tasks that no other task waits for
ASYNCIO = {
    "a2m_router.protocol.server.http",
    "a2m_router.protocol.server.http_connection",
    "a2m_router.protocol.client.http_client",
    "a2m_router.protocol.client.own_task",
}


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Return all nodes of a module's syntax tree."""
    return tuple(ast.walk(ast.parse(source)))


@cache
def modules() -> dict[str, str]:
    """Return the source of every module of ours, by its dotted name."""
    found = {}
    for root in ("router", "backends"):
        for path in sorted((ROOT / root).rglob("*.py")):
            parts = path.relative_to(ROOT / root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text()
    return found


MODULES = modules()


def room(module: str) -> str | None:
    """Return the room of a module: the longest name in ARROWS that contains it. A root contains only itself."""
    names = [module.rsplit(".", cut)[0] for cut in range(module.count(".") + 1)]
    return next((name for name in names if name in ARROWS and (name != ROUTER or module == ROUTER)), None)


def imported(module: str, source: str) -> Iterator[str]:
    """Yield the dotted name of every import of a module; `from package import module` yields the module."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else str(node.module)


def is_ours(name: str) -> bool:
    return name.partition(".")[0] in PACKAGES


@cache
def modules_of_tests() -> dict[str, str]:
    """Return the source of every module of tests/, bench/ and scripts/, by its dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
        for folder in ("tests", "bench", "scripts")
        for path in sorted((ROOT / folder).rglob("*.py"))
    }


# the whole import statement, with or without parentheses; parsing all tests would take seconds
IMPORT = re.compile(r"^[ \t]*(?:from\s+([\w.]+)\s+import\s+(\([^)]*\)|.*)|import\s+(.*))$", re.MULTILINE)


def imports_of_test_modules(module: str, source: str) -> list[str]:
    """Return the imports of test modules in a module, as sentences."""
    found = []
    for package, names, modules in IMPORT.findall(source):
        parts = [*package.split("."), *re.findall(r"\w+", names), *re.findall(r"\w+", modules)]
        found += [f"{module} imports {part}" for part in parts if part.startswith("test_")]
    return found


def crossings(module: str, source: str) -> list[str]:
    """Return the imports of a module that ARROWS does not permit, as sentences."""
    here = room(module)
    assert here is not None, f"{module} is in no room"
    return [
        f"{module} imports {name}"
        for name in imported(module, source)
        if is_ours(name) and room(name) != here and room(name) not in ARROWS[here]
    ]


def impurities(module: str, source: str) -> list[str]:
    """Return the impure imports and calls of a pure module, as sentences."""
    found = [f"{module} imports {name}" for name in imported(module, source) if name.partition(".")[0] in IMPURE]
    for node in nodes(source):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.id if isinstance(called, ast.Name) else getattr(called, "attr", "")
            if name in IMPURE_CALLS:
                found.append(f"{module} calls {name}")
    return found


def test_every_module_is_in_a_room_and_every_room_is_there() -> None:
    assert [module for module in MODULES if room(module) is None] == []
    assert set(ARROWS) <= {room(module) for module in MODULES}
    assert set(MODULES) >= PURE


def test_every_arrow_points_down() -> None:
    order = list(ARROWS)
    assert [(a, b) for a, below in ARROWS.items() for b in below if order.index(b) >= order.index(a)] == []


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_is_below_it(module: str) -> None:
    assert crossings(module, MODULES[module]) == []


@pytest.mark.parametrize("module", sorted(PURE))
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
        ("a2m_router.protocol.server.stdio", "from a2m_router.ranking.text import tokens", "a2m_router.ranking.text"),
        ("a2m_router.catalog.catalog", "from a2m_router.tiers.link import Link", "a2m_router.tiers.link"),
        (
            "a2m_router.catalog.catalog",
            "def f() -> None:\n    import a2m_router.tiers.gateway",
            "a2m_router.tiers.gateway",
        ),
        ("a2m_router.tiers.link", "from a2m_router.catalog.catalog import Catalog", "a2m_router.catalog.catalog"),
        ("a2m_router.tiers.link", "from a2m_router.methods import writing", "a2m_router.methods.writing"),
        ("a2m_router.tiers.link", "from a2m_router.placement import moves", "a2m_router.placement.moves"),
        ("a2m_router.placement.moves", "from a2m_router.methods.writing import Writing", "a2m_router.methods.writing"),
        ("a2m_router.ranking.fusion", "import a2m_router.catalog.catalog", "a2m_router.catalog.catalog"),
        (
            "a2m_router.methods.reading",
            "from a2m_router.daemon.serve import authentication",
            "a2m_router.daemon.serve.authentication",
        ),
        ("a2m_store.store", "from a2m_router.config.settings import Settings", "a2m_router.config.settings"),
        ("a2m_store.store", "from a2m_rag import server", "a2m_rag.server"),
        ("a2m_router.daemon.app", "from a2m_store.store import Store", "a2m_store.store"),
        (
            "a2m_router.catalog.active_reads",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from a2m_router.tiers.link import Link",
            "a2m_router.tiers.link",
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
    assert len(impurities("a2m_router.ranking.policy", source)) == 1


def test_no_module_imports_a_test_module() -> None:
    """Code that several tests use belongs in tests/support."""
    assert [
        each for module, source in modules_of_tests().items() for each in imports_of_test_modules(module, source)
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "from tests.federation.test_rules import run",
        "from tests.federation import test_rules as rules",
        "import tests.federation.test_rules",
        "def f() -> None:\n    from tests.federation.test_rules import run",
    ],
)
def test_an_import_of_a_test_module_is_caught(source: str) -> None:
    assert len(imports_of_test_modules("tests.federation.test_mixes", source)) == 1


def test_each_rule_has_a_test_that_is_marked_with_it() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    table = page.partition("## Rules that may never break")[2].partition("\n## ")[0]
    rules = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    marked = {int(n) for source in modules_of_tests().values() for n in re.findall(r"mark\.rule\(n=(\d+)\)", source)}
    assert rules
    assert marked == rules


def test_a_tests_name_has_at_most_seventy_characters() -> None:
    names = {name for source in modules_of_tests().values() for name in re.findall(r"def (test_\w+)", source)}
    assert len(names) > 1000
    assert sorted(name for name in names if len(name) > 70) == []
