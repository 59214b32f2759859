"""A disk that can lose its power: what SQLite and the journals of a folder write, and how much of it would be found.

Rules:
- what is written is seen by everybody at once, and outlives the end of a process; a power cut leaves what was synced;
- of what was not synced a power cut leaves any part: each sector is found as it was or as it was written, and a file
  that was made, or deleted, since its folder was synced is there or is not;
- a sync that fails has dropped what it should have written: a later one that succeeds says nothing about it, as Linux
  has it;
- locks and mappings end with their process, and are not looked at.

The files themselves stay where they are, on a real disk that nobody waits for; here is only the account of them.
`mounted` puts itself under SQLite as its default way to files, and under the few calls by which the project syncs files
itself.
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

# What each file of a folder holds, by its name.
Files = Mapping[str, bytes]

# What is about to happen to a file, or has: a transaction's last page is written, a sync.
Moment = tuple[str, str]
BEFORE_COMMIT: Final = "before commit"
AFTER_COMMIT: Final = "after commit"
BEFORE_SYNC: Final = "before sync"
AFTER_SYNC: Final = "after sync"

_numbers = count(1)

# they die with the process: the lock says by whom a file is used, and the mapping is built from the log
_PASSING: Final = (".lock", "-shm")
_FRAME_HEADER: Final = 24


class Fate(Enum):
    """What becomes of what is not synced."""

    KEPT = "kept"
    LOST = "lost"
    TORN = "torn"


class Written(msgspec.Struct, frozen=True):
    offset: int
    data: bytes


class Cut(msgspec.Struct, frozen=True):
    """A file has been cut to this size."""

    size: int


Change = Written | Cut


class Found(msgspec.Struct, frozen=True):
    """One file: as it is, as it was when it was last synced, and what has been done to it since."""

    now: bytes
    durable: bytes
    changes: tuple[Change, ...]

    def after(self, fate: Fate, chance: random.Random) -> bytes:
        """What the next process finds in it."""
        match fate:
            case Fate.KEPT:
                return self.now
            case Fate.LOST:
                return self.durable
            case Fate.TORN:
                return _torn(self.durable, self.changes, chance)


class Photograph(msgspec.Struct, frozen=True):
    """A folder at one moment: what is in it by name, and what it is certain to have in it."""

    present: Mapping[str, Found]
    durable: Mapping[str, Found]

    def after(self, fates: Callable[[str], Fate], seed: int = 0) -> Files:
        """The files that are found afterwards; `fates`: what becomes of what a file, by its name, has not synced."""
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
        """What is left when processes end: everything."""
        return {name: entry.now for name, entry in self.present.items()}

    def cut(self) -> Files:
        """What is left at the least when the power ends."""
        return {name: entry.durable for name, entry in self.durable.items()}


def laid(files: Files, folder: Path) -> Path:
    """The folder, new, with these files in it."""
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


class Disk:
    """The account of one folder. All that is in it when the account begins is durable.

    `room`: asked whether there is room for a file, by its name, to grow.
    `failure`: asked at each sync of a file, or of the folder itself (""), by its name: an errno to fail with, or None.
    `watch`: is told of each moment of a file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.room: Callable[[str], bool] = lambda name: True
        self.failure: Callable[[str], int | None] = lambda name: None
        self.watch: Callable[[Moment], None] = lambda moment: None
        self._present: dict[str, _File] = {}
        self._durable: dict[str, _File] = {}
        self._told: set[str] = set()  # files of which SQLite tells what it does with them
        self._ending: set[str] = set()  # logs whose transaction's last frame is being written
        self._take_in_what_is_there()
        for file in self._present.values():
            file.sync()
        self._durable = dict(self._present)

    @contextmanager
    def mounted(self) -> Iterator["Disk"]:
        """This process's databases and syncs in this folder go through the account; syncs elsewhere do nothing."""
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

    # --- what SQLite does

    def opened(self, path: str) -> str | None:
        """A file was opened, and perhaps made; its name, None if it is not in this folder."""
        name = self._own(path)
        if name is not None and name not in self._present:
            self._present[name] = _File(Path(path).read_bytes())
        if name is not None:
            self._told.add(name)
        return name

    def check_room(self, name: str, offset: int, data: bytes) -> None:
        """Raises apsw.FullError where there is none."""
        grows = offset + len(data) - len(self._present[name].now)
        if grows > 0 and not self.room(name):
            raise apsw.FullError("no room")

    def write(self, name: str, offset: int, data: bytes) -> None:
        ends = name in self._ending
        if name.endswith("-wal") and len(data) == _FRAME_HEADER and data[4:8] != b"\0\0\0\0":
            # the frame that says how large the database is by then is the last one of its transaction
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
        """Raises OSError as `failure` says."""
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
        """Which of the files a descriptor is open on; "" for the folder itself."""
        wanted = os.fstat(descriptor)
        if os.path.samestat(wanted, self.folder.stat()):
            return ""
        for path in self.folder.iterdir():
            if path.is_file() and not path.name.endswith(_PASSING) and os.path.samestat(wanted, path.stat()):
                return path.name
        return None

    def _take_in_what_is_there(self) -> None:
        """What others than SQLite write: journals, to which lines are added, and files that are made empty."""
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
    """A file, whatever name it has by now."""

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
        """Everything is durable, but for what a failed sync has dropped."""
        durable = bytearray(self._durable)
        for change in self._changes:
            _make(durable, change)
        self._durable = bytes(durable)
        self.drop()

    def drop(self) -> None:
        """What was done since the last sync will not be written any more, though everybody sees it."""
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
    """A disk writes in whatever order it likes, sector by sector."""
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
    """SQLite's way to its files, with a disk's account beside it."""

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
    """A file that SQLite has opened. A sync ends in the account: the real disk need not be waited for."""

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
