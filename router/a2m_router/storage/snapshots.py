"""What a database held at one moment, copied into a file of its own while writes to the database go on.

Rules:
- a snapshot is a read transaction of a second connection: it keeps what it sees for as long as it is open, and the log
  of changes grows meanwhile. So it is copied at once, and closed;
- the copy is page by page, so that what is deleted in the database is not in the copy either;
- a copy is new, readable by its owner alone, and synced when it is whole. One that does not become whole is removed;
  one that somebody removes is given up.
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

# what is copied in one step, about 4 MiB: short enough to be called off soon
_PAGES: Final = 1024

# How long is waited for whoever has the log for a moment, milliseconds.
_BUSY: Final = 1_000


class CannotCopy(Exception):
    """A snapshot that cannot be written to its file; a sentence that names it."""


def told(path: Path) -> str:
    """A path as an answer can tell it. Raises CannotCopy where it is no UTF-8."""
    try:
        path.as_posix().encode()
    except UnicodeEncodeError:
        raise CannotCopy(f"{os.fsencode(path)!r} is not UTF-8, and so cannot be told; move it elsewhere") from None
    return str(path)


class Snapshot:
    """What was committed in the file at `path` when this was made.

    Args:
        closed: called once, when the snapshot does not hold back the log of changes any more.

    `size` is in bytes, `schema` the version of what is in it. One thread at a time may use it. Raises apsw.Error.
    """

    def __init__(self, path: Path, closed: Callable[[], None] = lambda: None) -> None:
        self._path = path
        self._resources = contextlib.ExitStack()
        with contextlib.ExitStack() as resources:
            self._source = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
            resources.callback(self._source.close)
            self._source.set_busy_timeout(_BUSY)
            self._source.execute("BEGIN")
            self.schema: int = self._source.pragma("user_version")  # the first read is what opens the snapshot
            self.size: int = self._source.pragma("page_count") * self._source.pragma("page_size")
            resources.callback(closed)
            self._resources = resources.pop_all()

    def close(self) -> None:
        """Let go of it; more than once is as good as once."""
        self._resources.close()

    async def copy_to(self, target: Path, *, threads: bool = True) -> "Copying":
        """Begin a copy in a new file. The snapshot is the copy's from here on.

        Raises CannotCopy, when the snapshot is closed.
        """
        try:
            begin = partial(Copying, self, self._source, target)
            return await anyio.to_thread.run_sync(begin) if threads else begin()
        except BaseException:
            self.close()
            raise


class Copying:
    """A snapshot on its way into a file. `copied` of `size` bytes are there. `run` must be called, or `abandon`."""

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
            # half a copy is worth nothing, and a whole one is synced at its end
            file.pragma("journal_mode", "off")
            file.pragma("synchronous", "off")
            self._backup: apsw.Backup = file.backup("main", source, "main")
            resources.callback(self._backup.close, True)
            self._file = file
            self._snapshot = snapshot
            self._resources = resources.pop_all()

    async def run(self, *, threads: bool = True) -> None:
        """Copy it to its end. Raises CannotCopy; without an end nothing is left of it."""
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
        """Remove what there is of the copy, unless it is whole."""
        self._resources.close()

    def _is_there(self) -> bool:
        try:
            return os.path.samestat(self._target.stat(), self._made)
        except FileNotFoundError:
            return False

    def _unlink(self) -> None:
        if self._is_there():  # and not what somebody else has put there since
            self._target.unlink(missing_ok=True)

    def _step(self) -> bool:
        """Copies some of it; whether there is more."""
        with _disk(self._target):
            if not self._is_there():
                raise CannotCopy(f"{self._target}: it was removed before it was whole")
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
            self._resources.pop_all()  # it stays
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
