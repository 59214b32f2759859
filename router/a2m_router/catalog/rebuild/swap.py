"""Swap an old catalog for a rebuilt one, and keep the old files.

Rules:
- the new catalog is built beside the old one, under a name of its own. No program reads it until it is complete, closed
  and synced. Then one step renames it to `.rebuilt`: this is the commit point;
- the next program that opens the catalog, the rebuild itself or a router after a crash, finds that name and finishes
  the swap. First the files that SQLite keeps beside the old file are renamed, then the old file, then the new one takes
  its name. If the swap is interrupted anywhere, the next program finishes it. The order matters: an old log beside the
  new file would be applied to it by SQLite;
- no old file is ever deleted or written to.

| the process dies | what the next one finds |
|---|---|
| before the commit point | the old catalog as it was; a `.rebuilding` that the next rebuild discards |
| after it | the new catalog, complete; the remaining old files are renamed |
"""

import os
import time
from pathlib import Path
from typing import Final

from a2m_router.storage.database import DatabaseError, locked, sync_folder

# the name under which the lock of a state file is held
HOLDER: Final = "a2m-router"

# what to do about a catalog that cannot be used
REBUILDING: Final = (
    "a2m-router --config FILE --rebuild makes a new one from the tiers, and renames this one's files. It keeps the "
    "tombstones of forgotten records, and what records have earned, as far as they can be read"
)

_BESIDE: Final = ("-wal", "-shm", "-journal")


def rebuilding(path: Path) -> Path:
    """Return the path at which the new catalog for `path` is built."""
    return path.with_name(path.name + ".rebuilding")


def discard(path: Path) -> None:
    """Delete the files of an incomplete rebuild, this one's or an earlier one's."""
    for ending in ("", *_BESIDE, ".lock"):
        Path(f"{rebuilding(path)}{ending}").unlink(missing_ok=True)


def commit(path: Path) -> None:
    """Commit the new catalog, which is complete and closed. `exchange` or `finish` then swaps it in, now or later."""
    new = rebuilding(path)
    for ending in _BESIDE:
        if Path(f"{new}{ending}").exists():
            raise OSError(f"{new}: it was not closed properly: {new}{ending} exists")
    _sync(new)
    new.replace(_ready(path))
    sync_folder(path.parent)
    Path(f"{new}.lock").unlink(missing_ok=True)


def exchange(path: Path) -> None:
    """Swap in the new catalog for the one at `path`, if one is ready.

    Raises:
        InUse: another program uses the catalog at `path`.
        DatabaseError: the files cannot be renamed.
    """
    if not _ready(path).exists():
        return
    with locked(path, HOLDER):
        try:
            finish(path)
        except OSError as problem:
            raise DatabaseError(
                f"{_ready(path)}: this rebuilt catalog cannot be renamed to {path.name}: {problem.strerror}"
            ) from problem


def finish(path: Path) -> list[Path]:
    """Do as `exchange`, for a caller that holds the lock. Return the new paths of the old files."""
    ready = _ready(path)
    if not ready.exists():
        return []
    # the same stamp after a crash, so that files that belong together have the same name
    stamp = time.strftime("%Y-%m-%dT%H%M%SZ", time.gmtime(ready.stat().st_mtime))
    moved = []
    for ending in (*_BESIDE, ""):
        old = Path(f"{path}{ending}")
        if old.exists():
            moved.append(_aside(path, stamp, ending))
            old.rename(moved[-1])
    sync_folder(path.parent)
    ready.rename(path)
    sync_folder(path.parent)
    return moved


def _ready(path: Path) -> Path:
    return path.with_name(path.name + ".rebuilt")


def _aside(path: Path, stamp: str, ending: str) -> Path:
    """Return an unused name for an old file. The ending stays last: SQLite finds a log by its database's name."""
    place = 0
    while True:
        again = f".{place}" if place else ""
        new = Path(f"{path}.aside-{stamp}{again}{ending}")
        if not new.exists():
            return new
        place += 1


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
