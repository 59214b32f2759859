"""A backup of a federation that goes on serving: copies of its catalog and of every store that is on this machine.

All of them are of one moment, as a crash would have left them, and so a router that starts on them does what it does
after one. The moment is made so:
1. calls that may change what one of the stores holds are held back; those under way are not waited for;
2. a snapshot of the catalog is opened, then one in each store. What a store does for a call that the catalog's snapshot
   knows to be answered was done before; and of what is in a store's snapshot, the note that comes before every copy is
   in the catalog's;
3. calls go on, and the snapshots are copied.

A backup has its manifest, and not the file INCOMPLETE, once it is whole. One that fails, or is called off, is removed.
"""

import logging
import os
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import anyio
import msgspec

from router.a2m.budget import budget
from router.a2m.errors import A2MError, Code, disk_failed, invalid_params
from router.a2m.messages import Backup
from router.a2m.timestamps import render
from router.catalog.catalog import Catalog
from router.config import Settings, Tier
from router.database import sync_folder
from router.snapshots import CannotCopy, Copying, told
from router.tiers.link import Link, TierDown

METHOD: Final = "store/backup"
MANIFEST: Final = "manifest.json"
INCOMPLETE: Final = "INCOMPLETE"
FORMAT: Final = "a2m-backup"
VERSION: Final = 1

# where copies of files lie that are not beneath the federation file's folder
_OUTSIDE: Final = "outside"

# how long a store may take to open its snapshot, while changes are held back
_OPENING_SECONDS: Final = 5.0
# how long a store that is slow to say how far its copy has come is asked again
_PATIENCE: Final = 30.0
_ASK_AGAIN: Final = 0.5
# how long it is waited for a store that is to call off its copy
_CALLING_OFF: Final = 2.0
# how long a question for a backup that is not whole yet is held, in case it gets so
_LOOK: Final = 0.2

_INCOMPLETE_TEXT: Final = (
    "This backup is being made, or was left half made by a router that was killed. Do not use it.\n"
)

log = logging.getLogger(__name__)


class File(msgspec.Struct):
    """One copy: of which tier, or of the catalog; where it is, beneath the backup's folder, and where it came from.

    `copied` of `size` bytes are there; `schema` is the version of its tables.
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
    """The answer to `store/backup`: what is in the backup, how far it has come, and what is not in it."""

    files: list[File]
    left_out: list[LeftOut]
    backup: str | None = None
    path: str | None = None
    taken_at: str | None = None
    done: bool | None = None


class _Said(msgspec.Struct):
    """A store's answer."""

    file: str
    backup: str | None = None
    done: bool = False
    copied: int = 0
    size: int = 0
    schema: int = 0


class _Failed(Exception):
    """A backup that cannot be made; a sentence."""


class _Made:
    """One backup, from its beginning on."""

    def __init__(self, folder: Path) -> None:
        self.id = str(uuid4())
        self.folder = folder
        self.scope = anyio.CancelScope()
        self.state = State([], [], self.id, str(folder), done=False)
        self.catalog: Copying | None = None
        self.copies: dict[str, tuple[File, str]] = {}  # by tier, with the store's name for its backup
        self.planned: list[File] = []
        self.folders: list[Path] = []  # that were made for it, outermost first
        self.opened = anyio.Event()
        self.over = anyio.Event()
        self.problem = "it was called off"

    def target(self, file: File) -> Path:
        return self.folder / file.file


class Backups:
    """The backups of one federation; one is made at a time.

    Args:
        spawn: starts work that outlives the call.
        clock: the time, in milliseconds since 1970.
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
        self._spawn = spawn
        self._clock = clock
        self._threads = threads
        self._made: _Made | None = None

    @property
    def offered(self) -> bool:
        """Whether there is a file to copy."""
        return self._catalog.path is not None

    async def backup(self, params: Backup) -> State:
        """Begin a backup, and return when its moment is past; or say how far one has come. See Backup.

        Raises INVALID_PARAMS for a folder that is not empty, INTERNAL_ERROR for a backup that failed.
        """
        if params.path is not None:
            made = self._begin(params.path)
            try:
                await made.opened.wait()
            except BaseException:
                made.scope.cancel()  # nobody would know of it
                raise
        elif params.backup is not None:
            if self._made is None or self._made.id != params.backup:
                raise invalid_params("backup", "expected what an earlier answer of this router gave as `backup`")
            made = self._made
            if params.cancel:
                made.scope.cancel()
                await made.over.wait()
            else:
                with anyio.move_on_after(_LOOK):
                    await made.over.wait()
        else:
            try:
                files, left_out = await self._plan()
            except (_Failed, CannotCopy, TierDown) as problem:
                raise _error(str(problem)) from None
            return State(files, left_out)
        if made.over.is_set() and not made.state.done:
            raise _error(f"the backup failed, and what there was of it is removed: {made.problem}")
        if made.catalog is not None:
            made.state.files[0].copied = made.catalog.copied
        return made.state

    def _begin(self, path: str) -> _Made:
        folder = Path(path)
        if not folder.is_absolute():
            raise invalid_params("path", f"expected an absolute path, got {path!r}")
        if self._made is not None and not self._made.over.is_set():
            raise _error("another backup is under way; try again when that is done", retry_after=1.0)
        made = _Made(folder)
        try:
            _make_empty(folder, made.folders)
            _write(folder / INCOMPLETE, _INCOMPLETE_TEXT.encode())
        except OSError as problem:
            _remove_folders(made.folders)
            raise disk_failed(problem) from None
        self._made = made
        self._spawn(partial(self._make, made))
        return made

    async def _make(self, made: _Made) -> None:
        try:
            with budget(None), made.scope:
                await self._open(made)
                log.info("a backup is being made in %s, as of %s", made.folder, made.state.taken_at)
                made.opened.set()
                await self._copy(made)
                self._complete(made)
                made.state.done = True
        except (A2MError, TierDown, CannotCopy, _Failed) as problem:
            made.problem = str(problem)
        except OSError as problem:
            made.problem = problem.strerror or str(problem)
        finally:
            if not made.state.done:
                with anyio.CancelScope(shield=True):
                    await self._remove(made)
            made.over.set()
            made.opened.set()
        if made.state.done:
            log.info("the backup in %s is whole", made.folder)
        else:
            log.warning("the backup in %s failed, and is removed: %s", made.folder, made.problem)

    # --- step by step

    async def _plan(self) -> tuple[list[File], list[LeftOut]]:
        """What is copied to where, the catalog first; and which tiers are not.

        Raises _Failed for a tier that is down.
        """
        state = self._catalog.path
        assert state is not None, "none is offered otherwise"
        base = (state if self._settings.path is None else self._settings.path).parent.resolve()
        taken = {MANIFEST, INCOMPLETE}
        if self._settings.path is not None:
            taken.add(self._settings.path.name)

        def copy_of(of: str, origin: Path) -> File:
            origin = origin.resolve()
            file = origin.relative_to(base) if origin.is_relative_to(base) else Path(_OUTSIDE, f"{of}.db")
            if str(file) in taken or file.parts[0] in taken:
                file = Path(_OUTSIDE, f"{of}.db")
            taken.add(str(file))
            return File(of, told(file), told(origin))

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
        """Why a tier is no part of backups; None if it is one."""
        if tier.mount:
            return "it is mounted: what it holds is not this federation's"
        if tier.url is not None:
            return "it is a server of its own, reached over HTTP"
        profile = self._links[tier.name].profile
        if self._links[tier.name].status != "up" or profile is None:
            reason = self._links[tier.name].reason or "it is still starting"
            raise _Failed(f"the tier {tier.name!r} is down, and a backup would lack it: {reason}")
        return None if profile.store.backup else f"its server, {profile.name}, makes no backups"

    async def _open(self, made: _Made) -> None:
        """The moment of the backup: snapshots of all that is in it."""
        files, made.state.left_out = await self._plan()
        made.planned = files
        catalog, *stores = files
        for file in files:
            _make_folders(made.target(file).parent, made.folders)
        with ExitStack() as held:
            for file in stores:
                held.enter_context(self._links[file.of].holding_back())
            # before those of the stores, and in one step with the holding back
            snapshot = self._catalog.snapshot()
            try:
                made.state.taken_at = render(self._clock())
                await self._open_stores(made, stores)
            except BaseException:
                snapshot.close()
                raise
        made.state.files = [catalog, *(file for file in stores if file.of in made.copies)]
        made.catalog = await snapshot.copy_to(made.target(catalog), threads=self._threads)
        catalog.size, catalog.schema = made.catalog.size, made.catalog.schema

    async def _open_stores(self, made: _Made, stores: Sequence[File]) -> None:
        failures: list[Exception] = []

        async def begin(file: File) -> None:
            target = made.target(file)
            try:
                said = await self._ask(file.of, Backup(path=str(target)), timeout=_OPENING_SECONDS)
                made.copies[file.of] = file, said.backup or ""
            except A2MError as problem:
                failures.append(_Failed(f"{file.of}: {problem.message}"))
                return
            except (TierDown, _Failed) as problem:
                failures.append(problem)
                return
            file.size, file.schema = said.size, said.schema
            if not target.exists():
                await self._call_off(file.of, said.backup or "")
                del made.copies[file.of]
                made.state.left_out.append(LeftOut(file.of, "its server does not write to the files of this machine"))

        async with anyio.create_task_group() as tasks:
            for file in stores:
                tasks.start_soon(begin, file)
        for failure in failures:
            raise _Failed(str(failure))

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
                    await anyio.sleep(_ASK_AGAIN)
                except A2MError as problem:
                    failures.append(_Failed(f"{file.of}: {problem.message}"))
                    break
                except _Failed as problem:
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
            raise _Failed(str(failure))
        made.state.files[0].copied = made.catalog.copied

    def _complete(self, made: _Made) -> None:
        """What a backup has beside its copies. The last step makes it one."""
        path = self._settings.path
        if path is not None:
            _write(made.folder / path.name, path.read_bytes())
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "router": version("a2m-router"),
            "name": self._settings.name,
            "taken_at": made.state.taken_at,
            "federation": None if path is None else {"file": path.name, "origin": told(path)},
            "files": [
                {"of": file.of, "file": file.file, "origin": file.origin, "bytes": file.size, "schema": file.schema}
                for file in made.state.files
            ],
            "left_out": made.state.left_out,
        }
        _write(made.folder / MANIFEST, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
        (made.folder / INCOMPLETE).unlink()
        for folder in {made.folder, *(made.target(file).parent for file in made.state.files)}:
            sync_folder(folder)

    async def _remove(self, made: _Made) -> None:
        async with anyio.create_task_group() as tasks:
            for tier, (_, id) in made.copies.items():
                tasks.start_soon(self._call_off, tier, id)
        if made.catalog is not None:
            made.catalog.abandon()
        names = [MANIFEST, INCOMPLETE, *([] if self._settings.path is None else [self._settings.path.name])]
        with suppress(OSError):
            # the folder was empty, so that all in it is the backup's; but nothing goes that was not made here
            files = [made.folder / name for name in names]
            for file in [*files, *map(made.target, made.planned)]:
                file.unlink(missing_ok=True)
            _remove_folders(made.folders)

    async def _call_off(self, tier: str, id: str) -> None:
        with anyio.move_on_after(_CALLING_OFF), suppress(A2MError, TierDown, _Failed):
            await self._ask(tier, Backup(backup=id, cancel=True))

    async def _ask(self, tier: str, params: Backup, timeout: float | None = None) -> _Said:
        raw = await self._links[tier].call(METHOD, params, timeout=timeout)
        try:
            return msgspec.json.decode(raw, type=_Said)
        except msgspec.MsgspecError as problem:
            raise _Failed(f"{tier}: gave an answer to {METHOD} that cannot be read: {problem}") from None


def _error(sentence: str, **data: Any) -> A2MError:
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": sentence, **data})


def _make_empty(folder: Path, made: list[Path]) -> None:
    """An empty folder, its owner's alone; which of it was made is added to `made`. Raises INVALID_PARAMS, OSError."""
    if not os.path.lexists(folder):
        _make_folders(folder, made)
    elif not folder.is_dir():
        raise invalid_params("path", f"expected a folder, and {str(folder)!r} is something else")
    elif any(folder.iterdir()):
        raise invalid_params("path", f"expected an empty folder, or none, and there is something in {str(folder)!r}")
    else:
        folder.chmod(0o700)


def _make_folders(folder: Path, made: list[Path]) -> None:
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(0o700)
        made.append(each)


def _remove_folders(made: list[Path]) -> None:
    for folder in reversed(made):
        with suppress(OSError):  # what somebody else has put there stays
            folder.rmdir()


def _write(path: Path, data: bytes) -> None:
    """A new file, its owner's alone, synced."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
