"""`store/backup`, an extension of a2m-store: a copy of its file as it is at one moment, while it goes on serving.

The moment lies between the call and its answer. One copy is made at a time; it is removed where it does not become
whole, also when the store ends meanwhile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final
from uuid import uuid4

import anyio
import msgspec

from backends.store.store import Store
from router.a2m.errors import A2MError, Code, disk_failed, invalid_params
from router.a2m.messages import Backup
from router.a2m.server import Caller, Method
from router.snapshots import CannotCopy, Copying, told

METHOD: Final = "store/backup"

# how long a question for a copy that is not whole yet is held, in case it gets so
_LOOK: Final = 0.2


class State(msgspec.Struct, omit_defaults=True):
    """The answer. `file` is the store's own; the rest is of a backup: bytes, and the version of the copy's tables."""

    file: str
    backup: str | None = None
    path: str | None = None
    done: bool | None = None
    copied: int | None = None
    size: int | None = None
    schema: int | None = None


class _Made:
    """One backup, from its beginning on."""

    def __init__(self, target: Path, copying: Copying) -> None:
        self.id = str(uuid4())
        self.target = target
        self.copying = copying
        self.scope = anyio.CancelScope()
        self.over = anyio.Event()
        self.whole = False
        self.problem = "it was called off"


class Backups:
    """The backups of one store. `run` makes them, for as long as it runs."""

    def __init__(self, store: Store, *, threads: bool) -> None:
        self._store = store
        self._threads = threads
        self._made: _Made | None = None
        self._begun = anyio.Event()
        self._beginning = False

    def methods(self) -> Mapping[str, Method]:
        return {METHOD: Method(Backup, self.backup)}

    async def backup(self, params: Backup, caller: Caller) -> State:
        """Raises METHOD_NOT_FOUND for callers that may be anybody, and INTERNAL_ERROR for a backup that failed."""
        file = self._store.path
        if not caller.asserts_owner or file is None:
            raise A2MError(
                Code.METHOD_NOT_FOUND, f"{METHOD!r} is for who has started this store, and for stores in files"
            )
        try:
            mine = told(file.resolve())
        except CannotCopy as problem:
            raise A2MError(Code.INTERNAL_ERROR, str(problem), {"reason": str(problem)}) from None
        if params.path is not None:
            self._made = await self._begin(params.path)
            self._begun.set()
        elif params.backup is not None:
            await self._look_at(params.backup, cancel=params.cancel)
        else:
            return State(mine)
        made = self._made
        assert made is not None
        if made.over.is_set() and not made.whole:
            raise A2MError(Code.INTERNAL_ERROR, f"the backup failed: {made.problem}", {"reason": made.problem})
        copying = made.copying
        return State(mine, made.id, str(made.target), made.whole, copying.copied, copying.size, copying.schema)

    async def _begin(self, path: str) -> _Made:
        target = Path(path)
        if not target.is_absolute():
            raise invalid_params("path", f"expected an absolute path, got {path!r}")
        if self._beginning or (self._made is not None and not self._made.over.is_set()):
            raise A2MError(
                Code.INTERNAL_ERROR, "another backup is under way; try again when that is done", {"retry_after": 1.0}
            )
        self._beginning = True
        try:
            return _Made(target, await self._store.snapshot().copy_to(target, threads=self._threads))
        except OSError as problem:
            raise disk_failed(problem) from None
        except CannotCopy as problem:
            raise A2MError(Code.INTERNAL_ERROR, str(problem), {"reason": str(problem)}) from None
        finally:
            self._beginning = False

    async def _look_at(self, id: str, *, cancel: bool) -> None:
        if self._made is None or self._made.id != id:
            raise invalid_params("backup", "expected what an earlier answer of this process gave as `backup`")
        if cancel:
            self._made.scope.cancel()
            await self._made.over.wait()
        else:
            with anyio.move_on_after(_LOOK):
                await self._made.over.wait()

    async def run(self) -> None:
        """Makes the backups that are begun. Ends only by being cancelled."""
        try:
            while True:
                await self._begun.wait()
                self._begun = anyio.Event()
                made = self._made
                assert made is not None
                try:
                    with made.scope:
                        await made.copying.run(threads=self._threads)
                        made.whole = True
                except CannotCopy as problem:
                    made.problem = str(problem)
                finally:
                    made.over.set()
        finally:
            if self._made is not None and not self._made.over.is_set():
                self._made.copying.abandon()  # it was begun, and its turn has not come
