"""Snapshots: the state of a database at one moment, copied into another file while writes to the database go on.

Rules:
- a snapshot is a read transaction of a second connection. The write-ahead log grows while it is open, so it is copied
  immediately and closed;
- the copy is page by page. Deleted content is zeroed in the database, so the copy does not contain it either;
- a copy is a new file, readable only by its owner, and synced when it is complete. An incomplete copy is removed. If
  another process removes the file, copying stops.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import anyio.lowlevel
import anyio.to_thread
import apsw

# pages copied in one step, about 4 MiB: short enough to react to a cancellation soon
_PAGES: Final = 1024

# How long to wait for a short lock on the log, milliseconds.
_BUSY: Final = 1_000


class CannotCopy(Exception):
    """A snapshot cannot be written to its file; the message is one sentence that names the file."""


def path_text(path: Path) -> str:
    """Return a path as JSON can carry it; raise CannotCopy if it is not UTF-8."""
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise CannotCopy(
            f"the path {os.fsencode(path)!r} is not UTF-8, so no answer can contain it; use another folder"
        ) from None
    return str(path)


class Snapshot:
    """The committed state of the file at `path` at the moment of construction.

    `size` is in bytes; `schema` is its schema version. Use it from one thread at a time.

    Args:
        closed: called once, when the snapshot no longer keeps the write-ahead log from restarting.

    Raises:
        apsw.Error: the file cannot be read.
    """

    def __init__(self, path: Path, closed: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as resources:
            self._source = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            resources.callback(self._source.close)
            self._source.set_busy_timeout(_BUSY)
            self._source.execute("BEGIN")
            self.schema: int = self._source.pragma("user_version")  # the first read fixes the state that is seen
            self.size: int = self._source.pragma("page_count") * self._source.pragma("page_size")
            resources.callback(closed)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Close the snapshot; further calls do nothing."""
        self._resources.close()

    async def copy_to(self, target: Path, *, threads: bool = True) -> "Copying":
        """Begin a copy in a new file. The copy takes over the snapshot and closes it.

        Raises:
            CannotCopy: the file cannot be made; the snapshot is closed.
        """
        try:
            begin = partial(Copying, self, self._source, target)
            return await anyio.to_thread.run_sync(begin) if threads else begin()
        except BaseException:
            self.close()
            raise


class Copying:
    """A copy in progress: `copied` of `size` bytes are written. The caller must call `run` or `abandon`."""

    def __init__(self, snapshot: Snapshot, source: apsw.Connection, target: Path) -> None:
        self.size = snapshot.size
        self.schema = snapshot.schema
        self.copied = 0
        self._target = target
        self._resources = contextlib.ExitStack()
        with _disk(target), contextlib.ExitStack() as resources:
            resources.callback(snapshot.close)
            descriptor = os.open(target, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._made = os.fstat(descriptor)
            os.close(descriptor)
            resources.callback(self._unlink)
            file = apsw.Connection(str(target), flags=apsw.SQLITE_OPEN_READWRITE)
            resources.callback(file.close)
            # no journal: an incomplete copy is removed, and a complete one is synced at its end
            file.pragma("journal_mode", "off")
            file.pragma("synchronous", "off")
            self._backup: apsw.Backup = file.backup("main", source, "main")
            resources.callback(self._backup.close, True)
            self._file = file
            self._snapshot = snapshot
            self._resources = resources.pop_all()

    async def run(self, *, threads: bool = True) -> None:
        """Copy the rest. Raise CannotCopy on failure; after any exception the file is removed."""
        try:
            more = True
            while more:
                if threads:
                    more = await anyio.to_thread.run_sync(self._step)
                else:
                    await anyio.lowlevel.checkpoint()
                    more = self._step()
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Remove the file, unless the copy is complete."""
        self._resources.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._target.stat(), self._made)
        except FileNotFoundError:
            return False

    def _unlink(self) -> None:
        if self._is_there():  # never a file that another program put there meanwhile
            self._target.unlink(missing_ok=True)

    def _step(self) -> bool:
        """Copy the next pages; return whether there are more."""
        with _disk(self._target):
            if not self._is_there():
                raise CannotCopy(f"{self._target}: removed by another program before the copy was complete")
            self._backup.step(_PAGES)
            pages = max(1, self._backup.page_count)
            self.copied = self.size * (pages - self._backup.remaining) // pages
            if not self._backup.done:
                return True
            self._backup.finish()
            self._file.close()
            descriptor = os.open(self._target, os.O_RDWR | os.O_CLOEXEC)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._resources.pop_all()  # keep the file
            self._snapshot.close()
            return False


@contextlib.contextmanager
def _disk(target: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CannotCopy(f"{target}: {problem.strerror}") from problem
    except apsw.Error as problem:
        why = "the disk is full" if isinstance(problem, apsw.FullError) else str(problem)
        raise CannotCopy(f"{target}: cannot be written: {why}") from problem
