"""`a2m backup`: a copy of a federation's files, which its router makes while it goes on serving.

The router has it in its hands; the command asks how far it has come, and calls it off when it is interrupted.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from a2m_router.command.peer import PatientPeer
from a2m_router.command.running import DONE, Running, say
from a2m_router.protocol.client.client import Unanswered
from a2m_router.protocol.client.results import BadAnswer
from a2m_router.protocol.wire.errors import A2MError

_METHOD: Final = "store/backup"
# how long is waited for a router that is to call a backup off
_CALLING_OFF: Final = 5.0


class NoBackups(Exception):
    """The server makes none, or not for this caller; a sentence."""


class File(msgspec.Struct):
    """A copy on its way: of which tier, and how many of its bytes are there."""

    of: str
    copied: int
    size: int


class LeftOut(msgspec.Struct):
    tier: str
    reason: str


class Progress(msgspec.Struct):
    """How far a backup has come."""

    backup: str
    path: str
    files: list[File]
    left_out: list[LeftOut] = []
    done: bool = False


Watch = Callable[[list[File]], None]


async def backup(run: Running) -> int:
    """The command."""
    with progress() as watch:
        made = await back_up(run.asking, run.options.folder, watch)
    for line in not_included(made):
        say(line)
    await run.show(lambda: f"{summary(made)}\n".encode())
    return DONE


async def back_up(asking: PatientPeer, folder: Path, watch: Watch) -> Progress:
    """Have the router behind `asking` make a backup; returns when it is whole. Cancelled, it is called off.

    Args:
        folder: where the router runs; `~` and relative paths are this process's.

    Raises NoBackups; A2MError as the router answers it; Unanswered where it is not known what became of it.
    """
    described = await asking.read("memory/describe", _Described)
    if not _makes_backups(described.store):
        raise NoBackups(
            f"{described.name} makes no backups, or not for this caller: a federation does, for who sees all of it"
        )
    state = await asking.read(_METHOD, Progress, path=_absolute(folder))
    try:
        while not state.done:
            watch(state.files)
            state = await asking.read(_METHOD, Progress, backup=state.backup)
        watch(state.files)
    except anyio.get_cancelled_exc_class():
        with anyio.move_on_after(_CALLING_OFF, shield=True), suppress(A2MError, Unanswered, BadAnswer):
            await asking.read(_METHOD, Progress, backup=state.backup, cancel=True)
        raise
    return state


def summary(made: Progress) -> str:
    """What was made, in a line."""
    return f"{len(made.files):,} files, {sum(file.size for file in made.files):,} bytes, in {made.path}"


def not_included(made: Progress) -> Iterator[str]:
    """What was not, a line each."""
    for each in made.left_out:
        yield f"not included: {each.tier}: {each.reason}"


@contextmanager
def progress() -> Iterator[Watch]:
    """Shows how far each copy is, on a terminal."""
    if not sys.stderr.isatty():
        yield lambda files: None
        return
    # loaded where somebody sees it
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars: list[TaskID] = []  # a tier may have the name by which the catalog goes
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Bars(*columns, console=Console(stderr=True), transient=True) as shown:

        def watch(files: list[File]) -> None:
            for number, file in enumerate(files):
                if number == len(bars):
                    bars.append(shown.add_task(file.of, total=file.size))
                shown.update(bars[number], completed=file.copied)

        yield watch


def _absolute(folder: Path) -> str:
    path = str(folder.expanduser().absolute())
    try:
        path.encode()
    except UnicodeEncodeError:
        raise NoBackups(f"{os.fsencode(path)!r}: the name of the folder is not UTF-8, and so cannot be sent") from None
    return path


class _Described(msgspec.Struct):
    name: str
    store: Any = None


class _Store(msgspec.Struct):
    pages: bool = False
    backup: bool = False


def _makes_backups(said: Any) -> bool:
    # a store copies its own file only, for the router that has started it; of a federation it is one tier
    try:
        return msgspec.convert(said, _Store).backup and "identity" not in said
    except msgspec.ValidationError:
        return False
