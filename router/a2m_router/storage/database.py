"""One SQLite file: locked, opened, versioned, migrated, synced.

Rules:
- a file is used by one process at a time; the lock says by whom, and where that process can be reached if it said so;
- commits do not wait for the disk. What must outlive a power cut is followed by `sync`, which makes every commit before
  it durable; it may run on another thread than the one that commits, and one call serves all who wait;
- a sync that failed is not made good by one that succeeds: what the log holds is written anew first. Until then nothing
  is confirmed, and nothing goes from the log into the database, which a power cut would leave half new;
- while another program holds a lock, a change is refused at once: nobody waits in here, since others have to be
  served meanwhile. `check_writable` tells without a change whether one is worth a trial;
- a file that is not where it was any more, or is another one, takes no change: what would be acknowledged is gone with
  the end of this process;
- that the disk is full, or confirms nothing, that another program holds the file, or that it is gone, is logged when it
  begins and when it is over, and not with every trial;
- a schema that is newer than the program is refused, an older one is brought up in one transaction.
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

# How long a starting process waits for one that is just ending: a router that is started again at once finds its
# predecessor's children still closing their files.
_HANDOVER_SECONDS: Final = 2.0

# Pages in the log when they go into the database, which is what SQLite does by itself.
_CHECKPOINT: Final = 1_000

# How long the start, and a log that is written anew, wait for another program's lock or a commit, milliseconds.
_BUSY: Final = 10_000

_MAGIC: Final = b"SQLite format 3\0"

Migration = str | Callable[[apsw.Connection], None]


# What a process announces that serves its standard streams: nobody else reaches it there.
STDIO: Final = "stdio"

# The first line of a lock: who has the file. The second, if there is one: where that process is reached.
_HOLDER: Final = re.compile(r"(?P<name>.*) \(process (?P<pid>\d+)\)")
_LONGEST_LOCK: Final = 4096


# On the brink of being full a disk takes what is small, and not what is large: it is said to have room again when it
# has taken whatever it was given for so many seconds.
QUIET: Final = 60.0


class DatabaseError(Exception):
    """A file that cannot be used, in a sentence that names it and says why."""


class Damaged(DatabaseError):
    """What is in the file cannot be used: it is no database, or damaged, or of a newer schema.

    Args:
        remedy: what can be done about it, for those who know what the file is.
        detail: SQLite's own words, for those who look further; they stand last, in parentheses.
    """

    def __init__(self, sentence: str, *, remedy: str | None = None, detail: str | None = None) -> None:
        told = sentence if remedy is None else f"{sentence}; {remedy}"
        # a sentence is one line, and SQLite may say several
        super().__init__(told if detail is None else f"{told} ({' '.join(detail.split())})")
        self._sentence = sentence
        self._detail = detail

    def with_remedy(self, remedy: str) -> "Damaged":
        """The same, and what can be done about it."""
        return Damaged(self._sentence, remedy=remedy, detail=self._detail)


class InUse(DatabaseError):
    """Another process has the file. The sentence says which, and where it is reached if it announced that."""


class Database:
    """An open file. Use `connection` from one thread at a time; `sync` and `snapshot` may be called from any.

    Args:
        path: the file; None is a private database in memory, for tests and trials: nothing of it is ever durable.
        schema: the steps from an empty file to the current version, oldest first. Never edit one that was released.
        application: four bytes that mark files of this schema, so that another program's file is not taken for one.
        holder: the name under which the lock tells others who has the file.
        prepare: called with the new connection before anything else, to load extensions.

    Raises DatabaseError when the file is in use, newer, another program's, damaged, or cannot be opened.
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
        self._doubtful = False  # since a sync has failed, until the log has been written anew
        self._writing_anew = False
        self._snapshots: set[object] = set()  # that are open; whichever thread closes one takes it out
        self._full_at: float | None = None  # when the disk last had no room for a change, until that is long ago
        self._held = False  # by another program, when that was last tried
        self._files: dict[Path, tuple[int, int] | None] = {}  # those that must stay where they are
        self._gone = False
        try:
            if path is not None:
                _make_folder(path.parent)
                self._lock = self._resources.enter_context(locked(path, holder))
                _refuse_other_files(path)
                if not path.exists():
                    # memories are their owner's alone; what SQLite puts beside the file is made like it
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
        """All or nothing; a transaction inside another is a savepoint of it.

        Raises OSError when the disk does not take it, another program holds the file, or that is gone: nothing of it is
        kept then.
        """
        name = f"level{self._depth}"
        with self._hearing():
            if self._depth == 0:
                self._check_files()
                self.connection.execute("BEGIN IMMEDIATE")
                self._let_go()
            else:
                self.connection.execute(f"SAVEPOINT {name}")
        self._depth += 1
        try:
            with self._hearing():
                yield self.connection
        except BaseException:
            self._depth -= 1
            # some errors (a full disk) have rolled everything back already
            if self.connection.in_transaction:
                undo = "ROLLBACK" if self._depth == 0 else f"ROLLBACK TO {name}; RELEASE {name}"
                self.connection.execute(undo)
            raise
        self._depth -= 1
        try:
            with self._hearing():
                self.connection.execute("COMMIT" if self._depth == 0 else f"RELEASE {name}")
        except (OSError, apsw.Error):
            if self._depth == 0 and self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """What is read in the block is of one moment, and nothing can be changed. For when a change cannot be made."""
        self.connection.execute("BEGIN")
        try:
            yield self.connection
        finally:
            self.connection.execute("ROLLBACK")

    def check_writable(self) -> None:
        """Raises OSError, as a change would: EBUSY while another program holds the file, ESTALE where it is gone."""
        if self.path is not None and self._depth == 0:
            with self._hearing():
                self._check_files()
                self.connection.execute("BEGIN IMMEDIATE")
                self.connection.execute("ROLLBACK")
                self._let_go()

    def sync(self) -> None:
        """Make everything committed so far outlive a power cut. Blocks; may be called on any thread.

        Raises OSError when the disk does not confirm it: what was committed is there, and may not outlive a power cut.
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
                    log.error("%s: the disk does not confirm what was written: %s", self.path, problem)
                self._doubtful = True
                raise
            if self._doubtful:
                self._doubtful = False
                log.warning("%s: the disk works again; what it may have dropped has been written anew", self.path)

    def snapshot(self) -> Snapshot:
        """What is committed now, to be copied while writes go on. Raises OSError, ValueError for a database in memory.

        May be called on any thread, also while another one is in a transaction: nothing of that is in it.
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
        """Tell those who find the file in use where this process is reached: an address, or STDIO; for as long as it is
        open, or until it is told anew. None takes it back.

        Raises ValueError for more than a line, OSError when the disk does not take it.
        """
        if text is not None and ("\n" in text or not text):
            raise ValueError(f"expected one line, got {text!r}")
        if self._lock is not None:
            first = os.pread(self._lock, _LONGEST_LOCK, 0).partition(b"\n")[0]
            whole = first + b"\n" + (b"" if text is None else text.encode() + b"\n")
            os.pwrite(self._lock, whole, 0)
            os.ftruncate(self._lock, len(whole))

    def close(self) -> None:
        """Sync and close the file, then let others have it. Raises OSError as `sync` does, when it is closed, and
        DatabaseError where the file is gone."""
        self._lock = None
        try:
            self.sync()
        except OSError as problem:
            # the log stays, for the next one who opens it to write anew
            self.connection.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            if problem.errno == errno.ESTALE:
                raise DatabaseError(f"{self.path}: {FILE_GONE}; what was written last may be gone with it") from problem
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
                f"{self.path}: written by a newer version (schema {version}; this one knows {len(schema)}); "
                "use that version, or another file"
            )
        if self.path is not None:
            self.connection.set_busy_timeout(_BUSY)
            # in WAL mode NORMAL writes the log without waiting; `sync` waits where it matters
            self.connection.pragma("journal_mode", "wal")
            self.connection.pragma("synchronous", "normal")
            # not before the log's name is durable: what is in the database alone by then would be half of a change
            self.connection.wal_autocheckpoint(0)
        self.connection.pragma("foreign_keys", True)
        self.connection.pragma("cache_size", -32_000)
        # what is deleted is overwritten with zeros: nobody finds it in the file afterwards
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
            # The log exists since the transaction above, and is the same file for as long as the connection is open.
            # Its descriptor is for syncing only, so closing it drops no lock: SQLite's locks are on the other files.
            self._wal = os.open(f"{self.path}-wal", os.O_RDWR)
            self._resources.callback(os.close, self._wal)
            self.sync()
            sync_folder(self.path.parent)
            self._files = {file: _identity(file) for file in (self.path, Path(f"{self.path}-wal"))}
            self.connection.set_busy_timeout(0)
            self.connection.set_wal_hook(self._committed)

    def _leave_nothing_deleted(self) -> None:
        """An earlier version may have left what it deleted on free pages. They go before the file is brought up to
        date; without room for a second copy of it they stay until they are used."""
        try:
            with _disk_errors():
                self.connection.execute("VACUUM")
        except OSError as problem:
            log.warning("%s: what an earlier version deleted may still be found in it: %s", self.path, problem)

    def _committed(self, connection: apsw.Connection, name: str, frames: int) -> int:
        """Called by SQLite after each commit. A log that has grown long goes into the database once it is durable."""
        self._frames = frames
        if self._full_at is not None and time.monotonic() >= self._full_at + QUIET:
            self._full_at = None
            log.info("%s: there is room on the disk again", self.path)
        if frames >= self._checkpoint_at:
            try:
                self.sync()
                connection.wal_checkpoint(name, apsw.SQLITE_CHECKPOINT_PASSIVE)
                # what a snapshot sees stays in the log, which is not begun anew before: to try that with each commit
                # would cost a sync each time
                self._checkpoint_at = frames + _CHECKPOINT if self._snapshots else _CHECKPOINT
            except (OSError, apsw.Error) as problem:
                # the commit stands, and the log can take more of them
                self._doubtful |= not isinstance(problem, apsw.FullError)
                self._checkpoint_at = frames + _CHECKPOINT
                log.warning("%s: the log of changes grows, it cannot be emptied: %s", self.path, problem)
        return apsw.SQLITE_OK

    def _check_files(self) -> None:
        """Raises OSError if the file, or its log, is not where it was opened: SQLite would go on with what nobody can
        open again. Two looks at folders; no descriptor, since to close one of a database's file drops its locks."""
        gone = any(_identity(file) != was for file, was in self._files.items())
        if gone != self._gone:
            self._gone = gone
            if gone:
                log.error("%s: %s; nothing is written until it is back", self.path, FILE_GONE)
            else:
                log.warning("%s: the file is back", self.path)
        if gone:
            raise OSError(errno.ESTALE, FILE_GONE)

    def _let_go(self) -> None:
        if self._held:
            self._held = False
            log.info("%s: no other program holds the file any more", self.path)

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[None]:
        """`_disk_errors`, of which a full disk, and another program's lock, are told when they begin."""
        try:
            with _disk_errors():
                yield
        except OSError as problem:
            if isinstance(problem.__cause__, apsw.BusyError):
                if self._writing_anew:
                    raise OSError(errno.EBUSY, "what the disk may have dropped is still being written anew") from None
                if not self._held:
                    log.error("%s: %s; nothing is written until it lets go", self.path, FILE_HELD)
                self._held = True
            if isinstance(problem.__cause__, apsw.FullError):
                if self._full_at is None:
                    log.error("%s: the disk is full; nothing is written until there is room", self.path)
                self._full_at = time.monotonic()
            raise

    def _write_log_anew(self, wal: int) -> None:
        """What the disk may have dropped, it is given again. Nobody commits meanwhile, on whatever thread."""
        with _disk_errors(), contextlib.closing(apsw.Connection(str(self.path))) as other:
            other.set_busy_timeout(_BUSY)
            other.execute("BEGIN IMMEDIATE")
            self._writing_anew = True
            try:
                write_anew(wal, self._frames)
            finally:
                self._writing_anew = False


def real(path: Path) -> Path:
    """Where the file at `path` lies, behind symbolic links: it has one lock and one log, by whatever name it is opened.

    Raises DatabaseError for a path that leads nowhere, and for one that SQLite cannot take.
    """
    try:
        found = path.resolve()
        str(found).encode()
    except UnicodeEncodeError:
        raise DatabaseError(
            f"{found}: the path is not valid UTF-8, and SQLite takes no other; rename the folder, or name another file"
        ) from None
    except RuntimeError:  # newer versions of Python say it with an OSError
        raise DatabaseError(f"{path}: cannot be opened: a symbolic link leads back to itself") from None
    except OSError as problem:
        raise DatabaseError(f"{path}: cannot be opened: {explained(problem, path)}") from problem
    return found


def damaged(path: Path | None, detail: str) -> Damaged:
    """A file of ours that does not hold what it should any more; `detail` is what SQLite says of it."""
    return Damaged(f"{path}: damaged: some of what was written to this file cannot be read from it", detail=detail)


def announced(path: Path) -> str | None:
    """The address that the process announced that has the file at `path`; None if it announced none, or nobody has the
    file."""
    try:
        lock = os.open(f"{real(path)}.lock", os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, DatabaseError):
        return None
    try:
        # a shared lock, given back at once: a process that starts meanwhile waits longer than that
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        where = _holder(lock)[1]
        return None if where == STDIO else where
    else:
        return None
    finally:
        os.close(lock)


def _holder(lock: int) -> tuple[str | None, str | None]:
    """Who has a lock that is held, and where that process said that it is reached; None for what is not known."""
    first, *more = os.pread(lock, _LONGEST_LOCK, 0).decode("utf-8", "replace").split("\n")
    holder = _HOLDER.fullmatch(first)
    # a process that has just taken the lock has not cleared yet what the last one left, if that was killed
    if holder is None or not _is_alive(int(holder["pid"])):
        return None, None
    return first, more[0] if len(more) > 1 else None


def _in_use(path: Path, lock: int) -> InUse:
    who, where = _holder(lock)
    said = f"{path}: in use by {who or 'another process'}. One process has a file at a time"
    sharing = (
        "a router on HTTP (a2m-router --config … --http 127.0.0.1:8778) is how several clients share one federation"
    )
    if where is None:
        return InUse(f"{said}; {sharing}")
    if where == STDIO:
        return InUse(f"{said}, and that one serves its own stdin and stdout; {sharing}")
    return InUse(f"{said}, and that one listens on {where}: call it there (a2m --http {where} …), or end it first")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # another user's
    return True


@contextlib.contextmanager
def _disk_errors() -> Iterator[None]:
    """SQLite's words for a disk that fails, in Python's."""
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
    """The file at `path` is this process's alone; yields the descriptor of the lock beside it, in which its holder
    may write from the second line on. Raises InUse."""
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
            with contextlib.suppress(OSError):  # a disk that fails must not keep the lock from being given back
                os.ftruncate(lock, 0)
    finally:
        os.close(lock)


def _close_to_others(lock: int, path: Path) -> None:
    """The lock says where the memory is reached: nobody may read it who may not read the file."""
    with contextlib.suppress(OSError):  # there is no file yet, or the lock is another user's
        mode = stat.S_IMODE(os.fstat(lock).st_mode)
        allowed = stat.S_IMODE(path.stat().st_mode) | 0o600
        if mode & ~allowed:
            os.fchmod(lock, mode & allowed)


def _identity(file: Path) -> tuple[int, int] | None:
    """Which file is at a path; None if none is. Its number is given to no other file as long as it is open."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _refuse_other_files(path: Path) -> None:
    # SQLite would take a file of a few bytes for an empty database and write over it
    if path.is_file() and path.stat().st_size > 0:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise Damaged(f"{path}: this file is not a database")


def _renew_log(path: Path) -> None:
    # left by a process that died; the disk may have refused to write some of it, and would never say so again
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
        raise DatabaseError(f"{folder}: a file stands where a folder is needed") from None


def sync_folder(folder: Path) -> None:
    """What the files in a folder are called outlives a power cut: a new name is durable only once its folder is."""
    if sys.platform != "win32":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
