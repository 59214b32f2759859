"""A backup of a federation while it serves: copies of its catalog and of every store on this machine.

All copies show the same moment, like the files after a crash. A router that starts on them recovers as after a crash.
The moment is made in three steps:
1. calls that may change a store are held back. Calls in progress are not awaited;
2. a snapshot of the catalog is opened, then one in each store. A call that the catalog's snapshot knows as answered was
   carried out before, so the store's snapshot has its effect. A copy in a store's snapshot has its note in the
   catalog's snapshot, because the note comes before the copy;
3. calls are released, and the snapshots are copied.

The copies are made in a folder of their own, INCOMPLETE, and are moved out of it when all of them are synced. A backup
is complete when it has its manifest and no such folder. If a backup fails or is cancelled, that folder is removed: then
a late store cannot begin its copy, and a store that has begun gives up.
"""

import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Settings, Tier
from a2m_router.protocol.wire.errors import A2MError, Code, disk_failed, disk_reason, invalid_params
from a2m_router.protocol.wire.method_params import Backup
from a2m_router.protocol.wire.timestamps import render
from a2m_router.storage.backup_jobs import METHOD, Failed, Job, Jobs, absolute, failed
from a2m_router.storage.database import sync_folder
from a2m_router.storage.permissions import explained, running_user
from a2m_router.storage.snapshots import CannotCopy, Copying, path_text
from a2m_router.tiers.link import Link, TierDown

MANIFEST: Final = "manifest.json"
INCOMPLETE: Final = "INCOMPLETE"
FORMAT: Final = "a2m-backup"
VERSION: Final = 1

# the folder for copies of files that are not beneath federation.toml's folder
_OUTSIDE: Final = "outside"

# reserved names: no copy, and no folder of a copy, may have one
_TAKEN: Final = (Path(MANIFEST), Path(INCOMPLETE))

# how long a store may take to open its snapshot, while changes are held back
_OPENING_SECONDS: Final = 5.0
# how long a store's progress is polled without an answer
_PATIENCE: Final = 30.0
_POLL_SECONDS: Final = 0.5
# how long the router waits for a store to cancel its copy
_CANCEL_SECONDS: Final = 2.0
log = logging.getLogger(__name__)


class File(msgspec.Struct):
    """One copy, of a tier's store or of the catalog.

    `file` is its path beneath the backup's folder, `origin` the path of the copied file. `copied` of its `size`
    bytes have been copied. `schema` is the version of the tables in the copied file.
    """

    of: str
    file: str
    origin: str
    copied: int = 0
    size: int = 0
    schema: int = 0


class LeftOut(msgspec.Struct):
    """A tier that is not in a backup, and why."""

    tier: str
    reason: str


class State(msgspec.Struct, omit_defaults=True):
    """The reply to `store/backup`: the contents of the backup, its progress, and the tiers that it leaves out.

    `cancelled`: it was cancelled, and its files were removed.
    """

    files: list[File]
    left_out: list[LeftOut]
    backup: str | None = None
    path: str | None = None
    taken_at: str | None = None
    done: bool | None = None
    cancelled: bool = False


class _Said(msgspec.Struct):
    """A store's reply."""

    file: str
    backup: str | None = None
    done: bool = False
    copied: int = 0
    size: int = 0
    schema: int = 0


class _Made(Job):
    """One backup; its path is its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.work = folder / INCOMPLETE
        self.files: list[File] = []  # the catalog's first, then those that stores copy
        self.left_out: list[LeftOut] = []
        self.taken_at: str | None = None
        self.catalog: Copying | None = None
        self.copies: dict[str, tuple[File, str]] = {}  # by tier, with the id of the store's own backup
        self.folders: list[Path] = []  # created for the backup, each after its parent
        self.moved: list[str] = []  # names of files that were moved out of INCOMPLETE

    def target(self, file: File) -> Path:
        return self.work / file.file

    def state(self) -> State:
        if self.catalog is not None:
            self.files[0].copied = self.catalog.copied
        return State(
            files=self.files,
            left_out=self.left_out,
            backup=self.id,
            path=str(self.path),
            taken_at=self.taken_at,
            done=self.done,
            cancelled=self.cancelled,
        )


class Backups:
    """The backups of one federation, one at a time.

    Args:
        spawn: starts a task that outlives the call that started it, and its time budget.
        clock: returns the time, in milliseconds since 1970.
        threads: copy on worker threads.
    """

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        links: Mapping[str, Link],
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        clock: Callable[[], int],
        *,
        threads: bool = True,
    ) -> None:
        self._settings = settings
        self._catalog = catalog
        self._links = links
        self._clock = clock
        self._threads = threads
        self._jobs: Jobs[_Made] = Jobs(spawn, self._make, self._remove)

    @property
    def offered(self) -> bool:
        """Whether there is a file to copy."""
        return self._catalog.database.path is not None

    async def backup(self, params: Backup) -> State:
        """Begin a backup, and return when its snapshots are open; or return the progress of one. See Backup.

        Raises:
            A2MError: INVALID_PARAMS, the folder is not empty; INTERNAL_ERROR, the backup failed.
        """
        if params.path is not None:
            folder = absolute(params.path)
            return (await self._jobs.begin(lambda: _begun(folder))).state()
        if params.backup is not None:
            return (await self._jobs.look(params.backup, cancel=params.cancel)).state()
        try:
            files, left_out = await self._plan()
        except (Failed, CannotCopy, TierDown) as problem:
            raise failed(str(problem)) from None
        return State(files, left_out)

    async def _make(self, made: _Made) -> None:
        try:
            await self._open(made)
            log.info("backup started: folder=%s taken_at=%s", made.path, made.taken_at)
            made.opened.set()
            await self._copy(made)
        except TierDown as down:
            raise Failed(str(down)) from None
        if self._threads:
            await anyio.to_thread.run_sync(self._complete, made)
        else:
            self._complete(made)
        log.info("backup complete: folder=%s", made.path)

    # --- the steps

    async def _plan(self) -> tuple[list[File], list[LeftOut]]:
        """Return the files to copy, the catalog first, and the tiers that are left out.

        Raises:
            Failed: a tier is down.
        """
        state, federation = self._catalog.database.path, self._settings.path
        assert state is not None, "backups are offered only for a catalog with a file"
        base = (federation or state).parent.resolve()
        taken = [*_TAKEN, *([] if federation is None else [_place_of_federation(federation)])]

        def copy_of(of: str, origin: Path) -> File:
            origin = origin.resolve()
            beneath = origin.relative_to(base) if origin.is_relative_to(base) else None
            file = _place(beneath, of, ".db", taken)
            taken.append(file)
            return File(of, path_text(file), path_text(origin))

        files = [copy_of("router", state)]
        left_out = []
        for tier in self._settings.tiers:
            reason = self._left_out(tier)
            if reason is None:
                files.append(copy_of(tier.name, Path((await self._ask(tier.name, Backup())).file)))
            else:
                left_out.append(LeftOut(tier.name, reason))
        return files, left_out

    def _left_out(self, tier: Tier) -> str | None:
        """Return why backups leave a tier out; None if they include it."""
        if tier.mount:
            return "it is a mount: its records are not this federation's"
        if tier.url is not None:
            return "it is a separate server, reached over HTTP"
        profile = self._links[tier.name].profile
        if self._links[tier.name].status != "up" or profile is None:
            reason = self._links[tier.name].reason or "it is still starting"
            raise Failed(f"the tier {tier.name!r} is down, so the backup would not have its records: {reason}")
        return None if profile.store.backup else f"its server, {profile.name}, makes no backups"

    async def _open(self, made: _Made) -> None:
        """Open the snapshots of everything in the backup, all of one moment."""
        files, made.left_out = await self._plan()
        catalog, *stores = files
        for file in files:
            _make_folders(made.target(file).parent, made.folders)
        with ExitStack() as held:
            for file in stores:
                held.enter_context(self._links[file.of].holding_back())
            # before the stores' snapshots, and without an await after the holding back
            snapshot = self._catalog.database.snapshot()
            try:
                made.taken_at = render(self._clock())
                await self._open_stores(made, stores)
            except BaseException:
                snapshot.close()
                raise
        made.files = [catalog, *(file for file in stores if file.of in made.copies)]
        made.catalog = await snapshot.copy_to(made.target(catalog), threads=self._threads)
        catalog.size, catalog.schema = made.catalog.size, made.catalog.schema

    async def _open_stores(self, made: _Made, stores: Sequence[File]) -> None:
        failures: list[Exception] = []

        async def begin(file: File) -> None:
            target = made.target(file)
            try:
                said = await self._ask(file.of, Backup(path=str(target)), timeout=_OPENING_SECONDS)
                made.copies[file.of] = file, said.backup or ""
            except (TierDown, Failed) as problem:
                failures.append(problem)
                return
            file.size, file.schema = said.size, said.schema
            if not target.exists():
                try:  # a failed copy has removed its file, and this call raises its error
                    await self._ask(file.of, Backup(backup=said.backup))
                except (TierDown, Failed) as problem:
                    failures.append(problem)
                    return
                await self._cancel(file.of, said.backup or "")
                del made.copies[file.of]
                made.left_out.append(LeftOut(file.of, "its server does not write to the files of this machine"))

        async with anyio.create_task_group() as tasks:
            for file in stores:
                tasks.start_soon(begin, file)
        for failure in failures:
            raise Failed(str(failure))

    async def _copy(self, made: _Made) -> None:
        failures: list[Exception] = []

        async def follow(file: File, id: str) -> None:
            until = anyio.current_time() + _PATIENCE
            while True:
                try:
                    said = await self._ask(file.of, Backup(backup=id))
                    until = anyio.current_time() + _PATIENCE
                    file.copied = said.copied
                    if said.done:
                        return
                except TierDown as down:
                    if anyio.current_time() >= until:
                        failures.append(down)
                        break
                    await anyio.sleep(_POLL_SECONDS)
                except Failed as problem:
                    failures.append(problem)
                    break
            tasks.cancel_scope.cancel()

        async def copy_catalog(copying: Copying) -> None:
            try:
                await copying.run(threads=self._threads)
            except CannotCopy as problem:
                failures.append(problem)
                tasks.cancel_scope.cancel()

        assert made.catalog is not None
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(copy_catalog, made.catalog)
            for file, id in made.copies.values():
                tasks.start_soon(follow, file, id)
        for failure in failures:
            raise Failed(str(failure))

    def _complete(self, made: _Made) -> None:
        """Add the federation file and the manifest, and move everything out of INCOMPLETE.

        Each step is synced before the next begins. The last one makes the backup complete.
        """
        path = self._settings.path
        federation = None
        if path is not None:
            place = _place_of_federation(path)
            _make_folders((made.work / place).parent, made.folders)
            _write(made.work / place, path.read_bytes())
            federation = {"file": path_text(place), "origin": path_text(path)}
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "router": version("a2m-router"),
            "name": self._settings.name,
            "taken_at": made.taken_at,
            "federation": federation,
            "files": [
                {"of": file.of, "file": file.file, "origin": file.origin, "bytes": file.size, "schema": file.schema}
                for file in made.files
            ],
            "left_out": made.left_out,
        }
        _write(made.work / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        for folder in reversed([made.folders[0].parent, *made.folders]):
            sync_folder(folder)
        # the manifest last
        for name in sorted((each.name for each in made.work.iterdir()), key=MANIFEST.__eq__):
            if os.path.lexists(made.path / name):
                raise Failed(f"{made.path / name}: another program has created this file meanwhile")
            (made.work / name).rename(made.path / name)
            made.moved.append(name)
        sync_folder(made.path)
        made.work.rmdir()
        sync_folder(made.path)

    async def _remove(self, made: _Made) -> None:
        log.warning("backup removed: folder=%s: %s", made.path, made.problem or "it was cancelled")
        async with anyio.create_task_group() as tasks:
            for tier, (_, id) in made.copies.items():
                tasks.start_soon(self._cancel, tier, id)
        if made.catalog is not None:
            made.catalog.abandon()
        with suppress(OSError):
            made.work.mkdir(0o700, exist_ok=True)
            for name in made.moved:
                (made.path / name).rename(made.work / name)
        # a store that got the request late may create its file in the removed folder, once
        for _ in range(1 + len(self._links)):
            shutil.rmtree(made.work, ignore_errors=True)
            if not made.work.exists():
                break
        _remove_folders(made.folders)

    async def _cancel(self, tier: str, id: str) -> None:
        with anyio.move_on_after(_CANCEL_SECONDS), suppress(TierDown, Failed):
            await self._ask(tier, Backup(backup=id, cancel=True))

    async def _ask(self, tier: str, params: Backup, timeout: float | None = None) -> _Said:
        """Return a store's reply.

        Raises:
            TierDown: the store does not answer.
            Failed: the reply is an error, or cannot be read.
        """
        try:
            return msgspec.json.decode(await self._links[tier].call(METHOD, params, timeout=timeout), type=_Said)
        except A2MError as problem:
            if problem.code == Code.INVALID_PARAMS and params.backup is not None:
                raise Failed(f"{tier}: its server has ended meanwhile, and its copy with it") from None
            raise Failed(f"{tier}: {(problem.data or {}).get('reason', problem.message)}") from None
        except msgspec.MsgspecError as problem:
            raise Failed(f"{tier}: its reply to {METHOD} cannot be read: {problem}") from None


def _place_of_federation(path: Path) -> Path:
    return _place(Path(path.name), "federation", ".toml", _TAKEN)


def _place(beneath: Path | None, of: str, suffix: str, taken: Iterable[Path]) -> Path:
    """Return the path of a copy within the backup.

    It is the file's path beneath federation.toml's folder. A file from elsewhere, or whose path is taken, gets a name
    in the folder `outside`.
    """
    outside = Path(_OUTSIDE)
    numbered = (outside / f"{of}-{number}{suffix}" for number in itertools.count(2))
    inside = [] if beneath in (None, outside) else [beneath]
    places = itertools.chain(inside, [outside / f"{of}{suffix}"], numbered)
    return next(place for place in places if not any(_overlap(place, other) for other in taken))


def _overlap(one: Path, other: Path) -> bool:
    """Return whether two files exclude each other: they are one path, or one would have to be the other's folder."""
    return one.is_relative_to(other) or other.is_relative_to(one)


def _begun(folder: Path) -> _Made:
    """Begin a backup in an empty folder with access for its owner only. Raise A2MError for any other path."""
    made = _Made(folder)
    try:
        _make_empty(folder, made.folders)
        _make_folders(made.work, made.folders)
    except OSError as problem:
        _remove_folders(made.folders)
        raise _unusable(folder, problem) from None
    return made


def _unusable(folder: Path, problem: OSError) -> A2MError:
    """Return the error for a folder that cannot be made ready for a backup."""
    if problem.errno in (errno.ENOSPC, errno.EIO):
        return disk_failed(problem)
    return A2MError(
        Code.INTERNAL_ERROR,
        f"no backup can be made in {str(folder)!r}: {explained(problem, folder)}; name a folder on the router's "
        f"machine that the user {running_user()} can create or write",
        {"reason": disk_reason(problem)},
    )


def _make_empty(folder: Path, made: list[Path]) -> None:
    """Make an empty folder with access for its owner only. Append new folders to `made`.

    Raises:
        A2MError: INVALID_PARAMS, the path is no folder or not empty.
        OSError: the disk failed.
    """
    if not os.path.lexists(folder):
        _make_folders(folder, made)
    elif not folder.is_dir():
        raise invalid_params("path", f"expected a folder, got something else at {str(folder)!r}")
    elif (folder / INCOMPLETE).is_dir():
        raise invalid_params(
            "path",
            f"expected an empty folder or a new one; in {str(folder)!r} is an incomplete backup of a router that was "
            "killed: remove it, or name another folder",
        )
    elif any(folder.iterdir()):
        raise invalid_params("path", f"expected an empty folder or a new one; {str(folder)!r} is not empty")
    else:
        folder.chmod(0o700)


def _make_folders(folder: Path, made: list[Path]) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(0o700)
        made.append(each)


def _remove_folders(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):  # a folder stays if other programs have files there
            folder.rmdir()


def _write(path: Path, data: bytes) -> None:
    """Write a new file with access for its owner only, and sync it."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
