"""Putting a catalog that was made anew in the place of the old one, which is kept.

Rules:
- the new one is made beside the old one, under a name of its own, and nothing looks at it before it is complete, closed
  and synced. Then it is given the name that says so (`ready`), in one step: this is the commit point;
- whoever opens the catalog next, the rebuild itself or a router after a crash, finds that name and finishes: first
  what SQLite keeps beside the old file, then the old file goes aside, then the new one takes its name. Cut off
  anywhere, it is finished the next time. An old log must not be there when the new file is: SQLite would take it for
  the new one's;
- no old file is ever removed or written to.

| it dies | what the next one finds |
|---|---|
| before the commit point | the old catalog as it was; a `.rebuilding` that the next rebuild discards |
| after it | the new catalog, complete; what is left of the old one goes aside |
"""

import os
import time
from pathlib import Path
from typing import Final

from a2m_router.storage.database import DatabaseError, locked, sync_folder

# under this name the lock of a state file is held
HOLDER: Final = "a2m-router"

# what to do about a catalog that cannot be used
REBUILDING: Final = (
    "a2m-router --config FILE --rebuild makes a new one from the tiers, and keeps this one's files aside. Notes of "
    "what was forgotten, and what records have earned, come along as far as they can be read"
)

_BESIDE: Final = ("-wal", "-shm", "-journal")


def rebuilding(path: Path) -> Path:
    """Where the catalog that is to replace the one at `path` is made."""
    return path.with_name(path.name + ".rebuilding")


def discard(path: Path) -> None:
    """What a rebuild has not completed goes, that of an earlier one, too."""
    for ending in ("", *_BESIDE, ".lock"):
        Path(f"{rebuilding(path)}{ending}").unlink(missing_ok=True)


def commit(path: Path) -> None:
    """The new catalog is complete, and closed. It takes the place of the old one now, or at the next start."""
    new = rebuilding(path)
    for ending in _BESIDE:
        if Path(f"{new}{ending}").exists():
            raise OSError(f"{new}: it was not closed in good order")
    _sync(new)
    new.replace(_ready(path))
    sync_folder(path.parent)
    Path(f"{new}.lock").unlink(missing_ok=True)


def exchange(path: Path) -> None:
    """If a new catalog is ready, it takes the place of the one at `path`. Raises InUse while somebody has that, and
    DatabaseError where it cannot be done."""
    if not _ready(path).exists():
        return
    with locked(path, HOLDER):
        try:
            finish(path)
        except OSError as problem:
            raise DatabaseError(
                f"{_ready(path)}: made anew, and cannot take its place: {problem.strerror}"
            ) from problem


def finish(path: Path) -> list[Path]:
    """As `exchange`, for those who have the lock. Returns where the old files are now."""
    ready = _ready(path)
    if not ready.exists():
        return []
    # the same after a crash, so that what belongs together is called alike
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
    """A name for an old file that no other has; SQLite finds a log that is called like its database."""
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
