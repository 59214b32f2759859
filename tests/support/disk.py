"""A simulated disk that can lose its power: it records what is written to a folder, and how much of it survives.

Rules:
- A write is visible to every process at once, and survives the end of the process. A power cut keeps what was synced.
- Of what was not synced, a power cut keeps any part: each sector holds its old or its new content, and a file that was
  made or deleted since the last sync of its folder exists or does not.
- A sync that fails drops what it should have written. As on Linux, a later sync that succeeds does not write it.
- Locks and mappings end with their process, and are ignored.

The files themselves stay on a real disk, which is never synced; this module only records the writes. `mounted` installs
a layer under SQLite as its default VFS, and replaces the few calls by which the project writes and syncs files itself.
"""

import os
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from itertools import count
from pathlib import Path
from typing import Final

import apsw
import msgspec

SECTOR: Final = 512

# the content of each file of a folder, by the file's name
Files = Mapping[str, bytes]

# a moment in the life of a file (before or after its transaction's last page is written, or a sync), and its name
Moment = tuple[str, str]
BEFORE_COMMIT: Final = "before commit"
AFTER_COMMIT: Final = "after commit"
BEFORE_SYNC: Final = "before sync"
AFTER_SYNC: Final = "after sync"

_numbers = count(1)

# they end with the process: the lock names the process that uses a file, and the mapping is rebuilt from the log
_PASSING: Final = (".lock", "-shm")
_FRAME_HEADER: Final = 24


class Fate(Enum):
    """What happens to unsynced writes."""

    KEPT = "kept"
    LOST = "lost"
    TORN = "torn"


class Written(msgspec.Struct, frozen=True):
    offset: int
    data: bytes


class Cut(msgspec.Struct, frozen=True):
    """The truncation of a file to this size."""

    size: int


Change = Written | Cut


class Found(msgspec.Struct, frozen=True):
    """One file: its content now, its content at the last sync, and the changes since."""

    now: bytes
    durable: bytes
    changes: tuple[Change, ...]

    def after(self, fate: Fate, chance: random.Random) -> bytes:
        """Return the content that the next process finds."""
        match fate:
            case Fate.KEPT:
                return self.now
            case Fate.LOST:
                return self.durable
            case Fate.TORN:
                return _torn(self.durable, self.changes, chance)


class Photograph(msgspec.Struct, frozen=True):
    """A folder at one moment: its files by name, as they are visible, and those that are certain to survive."""

    present: Mapping[str, Found]
    durable: Mapping[str, Found]

    def after(self, fates: Callable[[str], Fate], seed: int = 0) -> Files:
        """Return the files that survive; `fates` maps a file's name to the fate of its unsynced writes."""
        chance = random.Random(seed)
        files: dict[str, bytes] = {}
        for name in sorted({*self.present, *self.durable}):
            fate = fates(name)
            if fate is Fate.TORN:
                entry = chance.choice([self.present, self.durable]).get(name)
            else:
                entry = (self.present if fate is Fate.KEPT else self.durable).get(name)
            if entry is not None:
                files[name] = entry.after(fate, chance)
        return files

    def killed(self) -> Files:
        """Return the files after the end of all processes: every write is kept."""
        return {name: entry.now for name, entry in self.present.items()}

    def cut(self) -> Files:
        """Return the files after a power cut that keeps no unsynced write."""
        return {name: entry.durable for name, entry in self.durable.items()}


def laid(files: Files, folder: Path) -> Path:
    """Make the folder with these files in it; return it."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


class Disk:
    """The record of one folder. What the folder holds at the beginning counts as durable.

    `room`: returns whether a file of this name may grow.
    `failure`: called at each sync of a file, or of the folder itself (""), with its name; returns an errno to fail
    with, or None.
    `watch`: called with each moment of a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room: Callable[[str], bool] = lambda name: True
        self.failure: Callable[[str], int | None] = lambda name: None
        self.watch: Callable[[Moment], None] = lambda moment: None
        self._present: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._told: set[str] = set()  # files whose writes SQLite reports
        self._ending: set[str] = set()  # logs whose transaction's last frame is being written
        self._take_in_what_is_there()
        for file in self._present.values():
            file.sync()
        self._durable = dict(self._present)

    @contextmanager
    def mounted(self) -> Iterator["Disk"]:
        """Record the writes and syncs of this process in this folder; syncs elsewhere do nothing."""
        name = f"disk-{next(_numbers)}"
        default = apsw.vfs_names()[0]
        layer = _Layer(name, self, default)
        sync, data_sync, write = os.fsync, os.fdatasync, os.pwrite

        def written(descriptor: int, data: bytes, offset: int, /) -> int:
            length = write(descriptor, data, offset)
            name = self._name_of(descriptor)
            if name in self._present:
                self._present[name].write(offset, bytes(data[:length]))
            return length

        apsw.set_default_vfs(name)
        os.fsync = os.fdatasync = self._sync_descriptor  # type: ignore[assignment]
        os.pwrite = written  # type: ignore[assignment]
        try:
            yield self
        finally:
            os.fsync, os.fdatasync, os.pwrite = sync, data_sync, write
            apsw.set_default_vfs(default)
            layer.unregister()

    def photograph(self) -> Photograph:
        self._take_in_what_is_there()
        shots = {file: file.found() for file in {*self._present.values(), *self._durable.values()}}
        return Photograph(
            {name: shots[file] for name, file in self._present.items()},
            {name: shots[file] for name, file in self._durable.items()},
        )

    # --- called by the layer under SQLite

    def opened(self, path: str) -> str | None:
        """Record that a file was opened, and perhaps made; return its name, or None if it is not in this folder."""
        name = self._own(path)
        if name is not None and name not in self._present:
            self._present[name] = _File(Path(path).read_bytes())
        if name is not None:
            self._told.add(name)
        return name

    def check_room(self, name: str, offset: int, data: bytes) -> None:
        """Raise apsw.FullError if the file would grow and there is no room."""
        grows = offset + len(data) - len(self._present[name].now)
        if grows > 0 and not self.room(name):
            raise apsw.FullError("no room")

    def write(self, name: str, offset: int, data: bytes) -> None:
        ends = name in self._ending
        if name.endswith("-wal") and len(data) == _FRAME_HEADER and data[4:8] != b"\0\0\0\0":
            # the last frame of a transaction has the size of the database in its header
            self._ending.add(name)
            self.watch((BEFORE_COMMIT, name))
        self._present[name].write(offset, data)
        if ends:
            self._ending.discard(name)
            self.watch((AFTER_COMMIT, name))

    def truncate(self, name: str, size: int) -> None:
        self._present[name].truncate(size)

    def delete(self, path: str, *, durably: bool) -> None:
        name = self._own(path)
        if name is not None:
            self._present.pop(name, None)
            self._told.discard(name)
            if durably:
                self._durable = dict(self._present)

    def sync(self, name: str) -> None:
        """Sync a file, or the folder (""); raise OSError if `failure` returns an errno."""
        self.watch((BEFORE_SYNC, name))
        number = self.failure(name)
        if name == "":
            if number is None:
                self._durable = dict(self._present)
        elif number is None:
            self._present[name].sync()
        else:
            self._present[name].drop()
        if number is not None:
            raise OSError(number, os.strerror(number))
        self.watch((AFTER_SYNC, name))

    # --- inside

    def _own(self, path: str) -> str | None:
        at = Path(path)
        return at.name if at.parent == self.folder and not at.name.endswith(_PASSING) else None

    def _sync_descriptor(self, descriptor: int) -> None:
        name = self._name_of(descriptor)
        if name is not None:
            self._take_in_what_is_there()
            self.sync(name)

    def _name_of(self, descriptor: int) -> str | None:
        """Return the name of the file that a descriptor is open on; "" for the folder itself."""
        wanted = os.fstat(descriptor)
        if os.path.samestat(wanted, self.folder.stat()):
            return ""
        for path in self.folder.iterdir():
            if path.is_file() and not path.name.endswith(_PASSING) and os.path.samestat(wanted, path.stat()):
                return path.name
        return None

    def _take_in_what_is_there(self) -> None:
        """Record what other code than SQLite writes: lines appended to journals, and new empty files."""
        for path in self.folder.iterdir():
            if path.name.endswith(_PASSING) or path.name in self._told or not path.is_file():
                continue
            if path.name not in self._present:
                self._present[path.name] = _File(b"")
            file = self._present[path.name]
            had, has = len(file.now), path.stat().st_size
            if has < had:
                file.truncate(has)
            elif has > had:
                with path.open("rb") as content:
                    content.seek(had)
                    file.write(had, content.read())


class _File:
    """The record of one file, which outlives a change of its name."""

    def __init__(self, content: bytes) -> None:
        self.now = bytearray(content)
        self._durable = b""
        self._changes: list[Change] = [Written(0, content)] if content else []
        self._shot: Found | None = None

    def write(self, offset: int, data: bytes) -> None:
        self._change(Written(offset, bytes(data)))

    def truncate(self, size: int) -> None:
        if size != len(self.now):
            self._change(Cut(size))

    def sync(self) -> None:
        """Make every change durable that a failed sync has not dropped."""
        durable = bytearray(self._durable)
        for change in self._changes:
            _make(durable, change)
        self._durable = bytes(durable)
        self.drop()

    def drop(self) -> None:
        """Drop the changes since the last sync: they stay visible, and are never written."""
        self._changes.clear()
        self._shot = None

    def found(self) -> Found:
        if self._shot is None:
            self._shot = Found(bytes(self.now), self._durable, tuple(self._changes))
        return self._shot

    def _change(self, change: Change) -> None:
        _make(self.now, change)
        self._changes.append(change)
        self._shot = None


def _make(content: bytearray, change: Change) -> None:
    match change:
        case Written(offset, data):
            if offset > len(content):
                content.extend(bytes(offset - len(content)))
            content[offset : offset + len(data)] = data
        case Cut(size):
            del content[size:]
            content.extend(bytes(size - len(content)))


def _torn(durable: bytes, changes: Collection[Change], chance: random.Random) -> bytes:
    """Return a file after a power cut: the disk has written any of the changed sectors, in any order."""
    content = bytearray(durable)
    likely = chance.choice([0.1, 0.5, 0.9])
    for change in changes:
        if isinstance(change, Written):
            for part in _sectors(change):
                if chance.random() < likely:
                    _make(content, part)
        elif chance.random() < likely:
            _make(content, change)
    return bytes(content)


def _sectors(write: Written) -> Iterator[Written]:
    at = 0
    while at < len(write.data):
        end = at + SECTOR - (write.offset + at) % SECTOR
        yield Written(write.offset + at, write.data[at:end])
        at = end


class _Layer(apsw.VFS):
    """A VFS that passes SQLite's calls to its files on, and records them in a disk."""

    def __init__(self, name: str, disk: Disk, below: str) -> None:
        super().__init__(name, below)
        self._disk = disk
        self._below = below

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        return _Opened(self._disk, self._below, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        super().xDelete(filename, syncdir)
        self._disk.delete(filename, durably=syncdir)


class _Opened(apsw.VFSFile):
    """A file that SQLite has opened. A sync is only recorded: the real disk is not synced."""

    def __init__(self, disk: Disk, below: str, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        super().__init__(below, name, flags)
        self._disk = disk
        path = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._name = None if path is None else disk.opened(path)

    def xWrite(self, data: bytes, offset: int) -> None:  # noqa: N802
        if self._name is not None:
            self._disk.check_room(self._name, offset, data)
        super().xWrite(data, offset)
        if self._name is not None:
            self._disk.write(self._name, offset, bytes(data))

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        super().xTruncate(newsize)
        if self._name is not None:
            self._disk.truncate(self._name, newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        if self._name is None:
            return
        try:
            self._disk.sync(self._name)
        except OSError as problem:
            failed = apsw.IOError(str(problem))
            failed.extendedresult = apsw.SQLITE_IOERR_FSYNC  # type: ignore[attr-defined]  # read by apsw
            raise failed from problem
