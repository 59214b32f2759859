"""`store/backup`, an extension of a2m-store: a copy of its file as it is at one moment, while it goes on serving.

The moment lies between the call and its answer. One copy is made at a time; it is removed where it does not become
whole, also when the store ends meanwhile.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Backup
from a2m_router.storage.backup_jobs import METHOD, Job, Jobs, absolute, failed
from a2m_router.storage.snapshots import CannotCopy, Copying, told
from a2m_store.store import Store


class State(msgspec.Struct, omit_defaults=True):
    """The answer. `file` is the store's own; the rest is of a backup: bytes, and the version of the copy's tables."""

    file: str
    backup: str | None = None
    path: str | None = None
    done: bool | None = None
    cancelled: bool = False
    copied: int | None = None
    size: int | None = None
    schema: int | None = None


class _Made(Job):
    copying: Copying  # from when it is opened


class Backups:
    """The backups of one store.

    Args:
        spawn: starts work that outlives the call. May raise A2MError.
    """

    def __init__(
        self,
        store: Store,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        *,
        threads: bool,
    ) -> None:
        self._store = store
        self._threads = threads
        self._jobs: Jobs[_Made] = Jobs(spawn, self._make, self._remove)

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
            raise failed(str(problem)) from None
        if params.path is not None:
            target = absolute(params.path)
            made = await self._jobs.begin(lambda: _Made(target))
        elif params.backup is not None:
            made = await self._jobs.look(params.backup, cancel=params.cancel)
        else:
            return State(mine)
        of = made.copying
        return State(mine, made.id, str(made.path), made.done, made.cancelled, of.copied, of.size, of.schema)

    async def _make(self, made: _Made) -> None:
        made.copying = await self._store.snapshot().copy_to(made.path, threads=self._threads)
        made.opened.set()
        await made.copying.run(threads=self._threads)

    async def _remove(self, made: _Made) -> None:
        """A copy that does not become whole removes itself."""
