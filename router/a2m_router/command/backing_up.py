"""`a2m backup`: makes the router copy the files of its federation while it serves.

The router makes the copies. The command polls its progress, and cancels the backup when it is interrupted.
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
# how long the command waits for the router to cancel a backup, in seconds
_CANCEL_SECONDS: Final = 5.0


class NoBackups(Exception):
    """The server makes no backups, or not for this caller; a sentence."""


class File(msgspec.Struct):
    """One copy in progress: the tier or catalog that it is of, the bytes copied so far, and its size."""

    of: str
    copied: int
    size: int


class LeftOut(msgspec.Struct):
    """A tier that the backup does not include, and why."""

    tier: str
    reason: str


class Progress(msgspec.Struct):
    """The state of a backup, as the router returns it."""

    backup: str
    path: str
    files: list[File]
    left_out: list[LeftOut] = []
    done: bool = False


Watch = Callable[[list[File]], None]


async def backup(run: Running) -> int:
    """Run the command `backup`."""
    with progress() as watch:
        made = await back_up(run.asking, run.options.folder, watch)
    for line in not_included(made):
        say(line)
    await run.show(lambda: f"{summary(made)}\n".encode())
    return DONE


async def back_up(asking: PatientPeer, folder: Path, watch: Watch) -> Progress:
    """Make the router behind `asking` create a backup, and return when it is complete.

    If this call is cancelled, the backup is cancelled, too.

    Args:
        asking: the connection to the router.
        folder: a folder on the router's machine; `~` and relative paths are resolved in this process.
        watch: called with the copies in progress.

    Raises:
        NoBackups: the server makes no backups, or not for this caller.
        A2MError: the router returned an error.
        Unanswered: the connection failed, and the outcome is not known.
    """
    described = await asking.read("memory/describe", _Described)
    if not _makes_backups(described.store):
        raise NoBackups(
            f"{described.name} makes no backups, or not for this caller: only a federation makes them, and only for a "
            "caller that may read all its records: a principal with `admin = true`, or a local process"
        )
    state = await asking.read(_METHOD, Progress, path=_absolute(folder))
    try:
        while not state.done:
            watch(state.files)
            state = await asking.read(_METHOD, Progress, backup=state.backup)
        watch(state.files)
    except anyio.get_cancelled_exc_class():
        with anyio.move_on_after(_CANCEL_SECONDS, shield=True), suppress(A2MError, Unanswered, BadAnswer):
            await asking.read(_METHOD, Progress, backup=state.backup, cancel=True)
        raise
    return state


def summary(made: Progress) -> str:
    """Return a line about a complete backup."""
    return f"{len(made.files):,} files, {sum(file.size for file in made.files):,} bytes, in {made.path}"


def not_included(made: Progress) -> Iterator[str]:
    """Yield a line for each tier that the backup does not include."""
    for each in made.left_out:
        yield f"not included: {each.tier}: {each.reason}"


@contextmanager
def progress() -> Iterator[Watch]:
    """Show the progress of each copy while the block runs, if stderr is a terminal. Yield the function to call."""
    if not sys.stderr.isatty():
        yield lambda files: None
        return
    # imported here: only a terminal needs it
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    bars: list[TaskID] = []  # by position, not by name: a tier may have the same name as the catalog
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
        raise NoBackups(f"{os.fsencode(path)!r}: the folder's name cannot be sent: it is not valid UTF-8") from None
    return path


class _Described(msgspec.Struct):
    name: str
    store: Any = None


class _Store(msgspec.Struct):
    pages: bool = False
    backup: bool = False


def _makes_backups(store: Any) -> bool:
    # a single store (one with an identity) copies only its own file, and only for the router that started it
    try:
        return msgspec.convert(store, _Store).backup and "identity" not in store
    except msgspec.ValidationError:
        return False
