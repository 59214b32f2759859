"""One SQLite file: locked, opened, versioned, migrated, synced.

Rules:
- one process uses a file at a time; the lock names this process, and its address if the process announced one;
- commits do not wait for the disk. A change that must survive a power cut is followed by `sync`, which makes every
  earlier commit durable. `sync` may run on another thread than the commits, and one call serves all waiting callers;
- after a failed sync, a successful one proves nothing until the write-ahead log has been rewritten. Until then no
  change is confirmed, and no checkpoint runs, since a power cut could leave the database half changed;
- while another program holds a lock, a change is rejected immediately: waiting here would block all other callers.
  `check_writable` tests without a change whether one would succeed;
- if the file was moved, removed or replaced, changes are rejected: they would be lost when this process ends;
- a full disk, a disk that does not confirm writes, another program's lock and a missing file are each logged once when
  the condition begins and once when it ends;
- a newer schema is rejected; an older one is migrated in one transaction.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import apsw

from a2m_router.protocol.wire.errors import FILE_GONE, FILE_HELD
from a2m_router.storage.permissions import explained
from a2m_router.storage.snapshots import Snapshot
from a2m_router.storage.wal import write_all_anew, write_anew

log = logging.getLogger(__name__)

# How long a starting process waits for the lock of one that is just ending: after an immediate restart, the children of
# the previous router may still be closing their files.
_HANDOVER_SECONDS: Final = 2.0

# Pages in the log that trigger a checkpoint; SQLite's own default.
_CHECKPOINT: Final = 1_000

# How long the start and the rewriting of the log wait for another program's lock or a commit, milliseconds.
_BUSY: Final = 10_000

_MAGIC: Final = b"SQLite format 3\0"

Migration = str | Callable[[apsw.Connection], None]


# What a process announces if it serves its standard streams, where no other client can reach it.
STDIO: Final = "stdio"

# The first line of a lock names the holder. The second, if there is one, is the address of that process.
_HOLDER: Final = re.compile(r"(?P<name>.*) \(process (?P<pid>\d+)\)")
_LONGEST_LOCK: Final = 4096


# An almost full disk accepts small writes and rejects large ones. So it counts as having space again only after so many
# seconds without a rejected write.
QUIET: Final = 60.0


class DatabaseError(Exception):
    """A file cannot be used; the message is one sentence that names it and says why."""


class Damaged(DatabaseError):
    """The content of the file cannot be used: it is not a database, is damaged, or has a newer schema.

    Args:
        remedy: what the user can do; only callers that know the purpose of the file can say this.
        detail: SQLite's own message; it comes last, in parentheses.
    """

    def __init__(self, sentence: str, *, remedy: str | None = None, detail: str | None = None) -> None:
        message = sentence if remedy is None else f"{sentence}; {remedy}"
        # on one line: SQLite's message may have several
        super().__init__(message if detail is None else f"{message} ({' '.join(detail.split())})")
        self._sentence = sentence
        self._detail = detail

    def with_remedy(self, remedy: str) -> "Damaged":
        """Return the same error with what the user can do."""
        return Damaged(self._sentence, remedy=remedy, detail=self._detail)


class InUse(DatabaseError):
    """Another process uses the file. The sentence names the process, and its address if it announced one."""


class Database:
    """An open file. Use `connection` from one thread at a time; `sync` and `snapshot` may be called from any.

    Args:
        path: the file; None is a private database in memory, for tests and trials, which is never durable.
        schema: the steps from an empty file to the current version, oldest first. Never edit a released step.
        application: four bytes that mark files of this schema, to reject another program's file.
        holder: the name of this process for the lock.
        prepare: called with the new connection before its first use, to load extensions.

    Raises:
        DatabaseError: the file is in use, newer, damaged, another program's, or cannot be opened.
    """

    def __init__(
        self,
        path: Path | None,
        schema: Sequence[Migration],
        *,
        application: bytes,
        holder: str,
        prepare: Callable[[apsw.Connection], None] | None = None,
    ) -> None:
        self.path = path = None if path is None else real(path)
        self._resources = contextlib.ExitStack()
        self._wal: int | None = None
        self._lock: int | None = None
        self._depth = 0
        self._frames = 0  # in the log, with the last commit
        self._checkpoint_at = _CHECKPOINT
        self._syncing = threading.Lock()  # held by the one thread that syncs
        self._doubtful = False  # from a failed sync until the log has been rewritten
        self._writing_anew = False
        self._snapshots: set[object] = set()  # the open ones; the thread that closes one removes it
        self._full_at: float | None = None  # when the disk last was full; None after QUIET seconds without that
        self._held = False  # whether another program held the file at the last attempt
        self._files: dict[Path, tuple[int, int] | None] = {}  # the files that must stay in place
        self._gone = False
        try:
            if path is not None:
                _make_folder(path.parent)
                self._lock = self._resources.enter_context(locked(path, holder))
                _refuse_other_files(path)
                if not path.exists():
                    # only the owner may read memories; SQLite gives its other files the mode of this one
                    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
                _renew_log(path)
            self.connection = apsw.Connection(":memory:" if path is None else str(path), statementcachesize=256)
            self._resources.callback(self.connection.close)
            if prepare is not None:
                prepare(self.connection)
            self._open(schema, int.from_bytes(application, "big"))
        except (apsw.CorruptError, apsw.NotADBError, apsw.SQLError) as problem:
            self._resources.close()
            raise damaged(path, str(problem)) from problem
        except apsw.BusyError as problem:
            self._resources.close()
            raise DatabaseError(f"{path}: cannot be opened: {FILE_HELD}") from problem
        except apsw.Error as problem:
            self._resources.close()
            raise DatabaseError(f"{path}: cannot be used as a database ({problem})") from problem
        except OSError as problem:
            self._resources.close()
            why = problem.strerror if path is None else explained(problem, path)
            raise DatabaseError(f"{path}: cannot be opened: {why}") from problem
        except BaseException:
            self._resources.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Commit the block's changes at its end, or none of them; inside another transaction, as a savepoint.

        Raises:
            OSError: the disk failed or is full, another program holds the file, or the file is gone. No change of the
                block is kept.
        """
        name = f"level{self._depth}"
        with self._reporting():
            if self._depth == 0:
                self._check_files()
                self.connection.execute("BEGIN IMMEDIATE")
                self._let_go()
            else:
                self.connection.execute(f"SAVEPOINT {name}")
        self._depth += 1
        try:
            with self._reporting():
                yield self.connection
        except BaseException:
            self._depth -= 1
            # after some errors (a full disk) SQLite has already rolled back
            if self.connection.in_transaction:
                undo = "ROLLBACK" if self._depth == 0 else f"ROLLBACK TO {name}; RELEASE {name}"
                self.connection.execute(undo)
            raise
        self._depth -= 1
        try:
            with self._reporting():
                self.connection.execute("COMMIT" if self._depth == 0 else f"RELEASE {name}")
        except (OSError, apsw.Error):
            if self._depth == 0 and self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Read a consistent state in the block, without changes; for use while the file cannot be written."""
        self.connection.execute("BEGIN")
        try:
            yield self.connection
        finally:
            self.connection.execute("ROLLBACK")

    def check_writable(self) -> None:
        """Raise OSError if a change would: EBUSY while another program holds the file, ESTALE if the file is gone."""
        if self.path is not None and self._depth == 0:
            with self._reporting():
                self._check_files()
                self.connection.execute("BEGIN IMMEDIATE")
                self.connection.execute("ROLLBACK")
                self._let_go()

    def sync(self) -> None:
        """Make every commit so far survive a power cut. Blocks; may be called on any thread.

        Raises:
            OSError: the disk does not confirm it. The commits are there, but a power cut may lose them.
        """
        if self._wal is None:
            return
        with self._syncing:
            self._check_files()
            if self._doubtful:
                self._write_log_anew(self._wal)
            try:
                os.fdatasync(self._wal)
            except OSError as problem:
                if not self._doubtful:
                    log.error("file=%s the disk does not confirm writes: %s", self.path, problem)
                self._doubtful = True
                raise
            if self._doubtful:
                self._doubtful = False
                log.warning("file=%s the disk works again; unconfirmed writes have been repeated", self.path)

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the committed state, to be copied while writes go on.

        May be called on any thread, also during another thread's transaction, which the snapshot does not include.

        Raises:
            OSError: the file cannot be read.
            ValueError: the database is in memory.
        """
        if self.path is None:
            raise ValueError("a database in memory has no file to copy")

        mark = object()

        def closed() -> None:
            self._snapshots.discard(mark)

        with _disk_errors():
            snapshot = Snapshot(self.path, closed)
        self._snapshots.add(mark)
        return snapshot

    def announce(self, text: str | None) -> None:
        """Write this process's address, or STDIO, into the lock, for processes that find the file in use.

        It stays until the file is closed or the next call; None removes it.

        Raises:
            ValueError: the text is empty or has more than one line.
            OSError: the lock cannot be written.
        """
        if text is not None and ("\n" in text or not text):
            raise ValueError(f"expected one line, got {text!r}")
        if self._lock is not None:
            first = os.pread(self._lock, _LONGEST_LOCK, 0).partition(b"\n")[0]
            whole = first + b"\n" + (b"" if text is None else text.encode() + b"\n")
            os.pwrite(self._lock, whole, 0)
            os.ftruncate(self._lock, len(whole))

    def close(self) -> None:
        """Sync and close the file, then release its lock.

        Raises:
            OSError: the sync failed; the file is closed.
            DatabaseError: the file is gone.
        """
        self._lock = None
        try:
            self.sync()
        except OSError as problem:
            # keep the log: the next process that opens the file rewrites it
            self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if problem.errno == errno.ESTALE:
                raise DatabaseError(f"{self.path}: {FILE_GONE}; the latest writes may be lost with it") from problem
            raise
        finally:
            self._resources.close()

    def _open(self, schema: Sequence[Migration], application: int) -> None:
        found = self.connection.pragma("application_id")
        version = self.connection.pragma("user_version")
        empty = self.connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
        if found != application and not (found == 0 and empty):
            raise DatabaseError(f"{self.path}: this file belongs to another program")
        if version > len(schema):
            raise Damaged(
                f"{self.path}: written by a newer version (schema {version}; this one reads up to {len(schema)}); "
                "use that version, or another file"
            )
        if self.path is not None:
            self.connection.set_busy_timeout(_BUSY)
            # in WAL mode NORMAL writes the log without waiting; `sync` waits if a caller needs durability
            self.connection.pragma("journal_mode", "wal")
            self.connection.pragma("synchronous", "normal")
            # no checkpoint before the log's name is durable: a power cut could leave half a change in the database
            self.connection.wal_autocheckpoint(0)
        self.connection.pragma("foreign_keys", True)
        self.connection.pragma("cache_size", -32_000)
        # overwrite deleted content with zeros, so that it cannot be read from the file
        self.connection.pragma("secure_delete", True)
        if 0 < version < len(schema):
            self._leave_nothing_deleted()
        with self.transaction() as connection:
            for step in schema[version:]:
                if callable(step):
                    step(connection)
                else:
                    connection.execute(step)
            connection.pragma("user_version", len(schema))
            connection.pragma("application_id", application)
        if self.path is not None:
            # The transaction above created the log, which stays the same file while the connection is open. This
            # descriptor is for syncing only; closing it drops no lock, since SQLite's locks are on the other files.
            self._wal = os.open(f"{self.path}-wal", os.O_RDWR)
            self._resources.callback(os.close, self._wal)
            self.sync()
            sync_folder(self.path.parent)
            self._files = {file: _identity(file) for file in (self.path, Path(f"{self.path}-wal"))}
            self.connection.set_busy_timeout(0)
            self.connection.set_wal_hook(self._committed)

    def _leave_nothing_deleted(self) -> None:
        """Remove free pages, where an earlier version may have left deleted content, before a migration.

        That needs space for a second copy of the file; without it the pages stay until they are reused."""
        try:
            with _disk_errors():
                self.connection.execute("VACUUM")
        except OSError as problem:
            log.warning("file=%s content deleted by an earlier version may still be in it: %s", self.path, problem)

    def _committed(self, connection: apsw.Connection, name: str, frames: int) -> int:
        """Sync and checkpoint a log that has grown long. SQLite calls this after each commit."""
        self._frames = frames
        if self._full_at is not None and time.monotonic() >= self._full_at + QUIET:
            self._full_at = None
            log.info("file=%s the disk has space again", self.path)
        if frames >= self._checkpoint_at:
            try:
                self.sync()
                connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
                # while a snapshot is open the log cannot restart; retrying at each commit would cost a sync each time
                self._checkpoint_at = frames + _CHECKPOINT if self._snapshots else _CHECKPOINT
            except (OSError, apsw.Error) as problem:
                # the commit is valid, and the log can still grow
                self._doubtful |= not isinstance(problem, apsw.FullError)
                self._checkpoint_at = frames + _CHECKPOINT
                log.warning("file=%s write-ahead log keeps growing, checkpoint failed: %s", self.path, problem)
        return apsw.SQLITE_OK

    def _check_files(self) -> None:
        """Raise OSError if the file or its log is no longer at its path: SQLite would go on writing to a removed file.

        This uses `stat` and opens no descriptor, since closing one of a database's file drops SQLite's locks."""
        gone = any(_identity(file) != was for file, was in self._files.items())
        if gone != self._gone:
            self._gone = gone
            if gone:
                log.error("file=%s writes rejected until the file is back: %s", self.path, FILE_GONE)
            else:
                log.warning("file=%s the file is back", self.path)
        if gone:
            raise OSError(errno.ESTALE, FILE_GONE)

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            log.info("file=%s no other program holds the file any more", self.path)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Translate errors as `_disk_errors` does; log a full disk and another program's lock when they begin."""
        try:
            with _disk_errors():
                yield
        except OSError as problem:
            if isinstance(problem.__cause__, apsw.BusyError):
                if self._writing_anew:
                    raise OSError(errno.EBUSY, "unconfirmed writes are still being repeated") from None
                if not self._held:
                    log.error("file=%s writes rejected until the lock is released: %s", self.path, FILE_HELD)
                self._held = True
            if isinstance(problem.__cause__, apsw.FullError):
                if self._full_at is None:
                    log.error("file=%s writes rejected until the disk has space: disk full", self.path)
                self._full_at = time.monotonic()
            raise

    def _write_log_anew(self, wal: int) -> None:
        """Repeat the writes that the disk may have dropped. The lock keeps all threads from committing meanwhile."""
        with _disk_errors(), contextlib.closing(apsw.Connection(str(self.path))) as other:
            other.set_busy_timeout(_BUSY)
            other.execute("BEGIN IMMEDIATE")
            self._writing_anew = True
            try:
                write_anew(wal, self._frames)
            finally:
                self._writing_anew = False


def real(path: Path) -> Path:
    """Return the path without symbolic links, so that a file has one lock and one log under all its names.

    Raises:
        DatabaseError: the path cannot be resolved, or is not valid UTF-8, which SQLite requires.
    """
    try:
        found = path.resolve()
        str(found).encode()
    except UnicodeEncodeError:
        raise DatabaseError(
            f"{found}: the path is not valid UTF-8, which SQLite requires; rename the folder, or name another file"
        ) from None
    except RuntimeError:  # newer versions of Python raise an OSError
        raise DatabaseError(f"{path}: cannot be opened: a symbolic link leads back to itself") from None
    except OSError as problem:
        raise DatabaseError(f"{path}: cannot be opened: {explained(problem, path)}") from problem
    return found


def damaged(path: Path | None, detail: str) -> Damaged:
    """Return the error for a damaged file of this program; `detail` is SQLite's message."""
    return Damaged(f"{path}: damaged: some of what was written to this file cannot be read from it", detail=detail)


def announced(path: Path) -> str | None:
    """Return the address announced by the process that uses the file at `path`; None if there is none."""
    try:
        lock = os.open(f"{real(path)}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, DatabaseError):
        return None
    try:
        # a shared lock, released immediately: a starting process waits longer than that for the lock
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        where = _holder(lock)[1]
        return None if where == STDIO else where
    else:
        return None
    finally:
        os.close(lock)


def _holder(lock: int) -> tuple[str | None, str | None]:
    """Return the holder of a lock and its announced address; None for each that is unknown."""
    first, *more = os.pread(lock, _LONGEST_LOCK, 0).decode("utf-8", "replace").split("\n")
    holder = _HOLDER.fullmatch(first)
    # a process that has just taken the lock may not have cleared the text of a killed predecessor yet
    if holder is None or not _is_alive(int(holder["pid"])):
        return None, None
    return first, more[0] if len(more) > 1 else None


def _in_use(path: Path, lock: int) -> InUse:
    who, where = _holder(lock)
    used = f"{path}: in use by {who or 'another process'}. Only one process can use a file"
    sharing = (
        "to share one federation between several clients, run a router on HTTP "
        "(a2m-router --config … --http 127.0.0.1:8778)"
    )
    if where is None:
        return InUse(f"{used}; {sharing}")
    if where == STDIO:
        return InUse(f"{used}, and that process serves its own stdin and stdout; {sharing}")
    return InUse(f"{used}, and that process listens on {where}: call it there (a2m --http {where} …), or end it first")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it runs, as another user
    return True


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """Translate SQLite's errors for a failing disk into OSError."""
    try:
        yield
    except apsw.FullError as problem:
        raise OSError(errno.ENOSPC, "disk full") from problem
    except apsw.BusyError as problem:
        raise OSError(errno.EBUSY, FILE_HELD) from problem
    except (apsw.IOError, apsw.ReadOnlyError, apsw.CantOpenError) as problem:
        raise OSError(errno.EIO, f"the disk failed: {problem}") from problem


@contextlib.contextmanager
def locked(path: Path, holder: str) -> Iterator[int]:
    """Lock the file at `path` for this process; yield the descriptor of the lock file beside it.

    The holder may write to the lock file from its second line on.

    Raises:
        InUse: another process uses the file.
    """
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + _HANDOVER_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise _in_use(path, lock) from None
                time.sleep(0.05)
        os.ftruncate(lock, 0)
        _close_to_others(lock, path)
        os.pwrite(lock, f"{holder} (process {os.getpid()})\n".encode(), 0)
        try:
            yield lock
        finally:
            with contextlib.suppress(OSError):  # a failing disk must not prevent the release of the lock
                os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _close_to_others(lock: int, path: Path) -> None:
    """Restrict the lock, which contains the router's address, to users who may read the file."""
    with contextlib.suppress(OSError):  # there is no file yet, or the lock belongs to another user
        mode = stat.S_IMODE(os.fstat(lock).st_mode)
        allowed = stat.S_IMODE(path.stat().st_mode) | 0o600
        if mode & ~allowed:
            os.fchmod(lock, mode & allowed)


def _identity(file: Path) -> tuple[int, int] | None:
    """Return device and inode of the file at a path; None without one. An open file's inode number is not reused."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _refuse_other_files(path: Path) -> None:
    # SQLite treats a file of a few bytes as an empty database and would overwrite it
    if path.is_file() and path.stat().st_size > 0:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Damaged(f"{path}: this file is not a database")


def _renew_log(path: Path) -> None:
    # A process that died left this log. The disk may have failed to write parts of it, and would not report that again.
    try:
        wal = os.open(f"{path}-wal", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        write_all_anew(wal)
        os.fdatasync(wal)
    finally:
        os.close(wal)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise DatabaseError(f"{folder}: expected a folder, this is a file") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut: a new file is durable only once its folder is synced."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
