"""Files of a federation that are copied at one moment and restored at another, and the next start with them."""

import contextlib
import re
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from a2m_router.placement.rebuilding import Rebuilt
from a2m_router.tiers.profile import CannotServe
from tests.servers.core_only import CoreOnly
from tests.support.disk import Files
from tests.support.federated import ALL_NATIVE, CALM, Mix, told_by, trial
from tests.support.rebuilding import rebuilt

TIERS: Final = tuple(tier.name for tier in CALM.tiers)
CATALOG: Final = "router"
T: Final = {"id": "t", "content": "one"}
ANEW: Final = {"id": "t", "content": "anew"}


def files_of(folder: Path, name: str) -> Iterable[Path]:
    return [path for path in folder.iterdir() if path.name in (f"{name}.db", f"{name}.db-wal")]


def copied(folder: Path, name: str = CATALOG) -> Files:
    """Return the file of the catalog, or of a tier's store, with its log, as they are now."""
    return {path.name: path.read_bytes() for path in files_of(folder, name)}


def put_back(folder: Path, copy: Files, name: str = CATALOG) -> None:
    """Replace the file by the copy."""
    for path in files_of(folder, name):
        path.unlink()
    for file, content in copy.items():
        (folder / file).write_bytes(content)


def held(folder: Path) -> dict[str, list[tuple[str, str]]]:
    """Return the tiers and contents of the copies of each record, read from the files without the router."""
    found: dict[str, list[tuple[str, str]]] = {}
    for tier in TIERS:
        path = folder / f"{tier}.db"
        if path.exists() and path.read_bytes().startswith(b"SQLite"):
            with contextlib.closing(sqlite3.connect(path)) as store:
                records = list(store.execute("SELECT id, content FROM record"))
        else:
            records = [(each.id, each.content) for each in told_by(CoreOnly(path))] if path.exists() else []
        for id, content in records:
            found.setdefault(id, []).append((tier, content))
    return found


async def refusal(folder: Path, mix: Mix = ALL_NATIVE) -> str:
    """Return the one sentence with which the start is refused; assert that it removes nothing."""
    before = held(folder)
    with pytest.raises(BaseExceptionGroup) as refused:
        async with trial(CALM, servers=mix, folder=folder):
            pass
    [problem] = leaves(refused.value)
    assert isinstance(problem, CannotServe)
    assert held(folder) == before
    return str(problem)


async def is_refused(folder: Path, mix: Mix = ALL_NATIVE) -> None:
    """Assert that the start is refused with one sentence that names the way out, and removes nothing."""
    assert re.fullmatch(
        r"tiers\.\w+(, tiers\.\w+)*: the catalog is older than the records there.*--rebuild",
        await refusal(folder, mix),
    )


def leaves(problem: BaseException) -> list[BaseException]:
    if isinstance(problem, BaseExceptionGroup):
        return [leaf for each in problem.exceptions for leaf in leaves(each)]
    return [problem]


async def heal(folder: Path, mix: Mix = ALL_NATIVE, **how: Any) -> Rebuilt:
    servers = {tier: foreign.behind(CALM.tier(tier), folder / f"{tier}.db") for tier, foreign in mix.items()}
    return await rebuilt(folder, servers=servers, **how)
