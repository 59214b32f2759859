"""`store/backup`, an extension of a2m-store: copy the store's file as it is at one moment, while the store serves.

The moment lies between the call and its result. The store makes one copy at a time. It removes an incomplete copy, also
when it stops meanwhile.
"""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.method_params import Backup
from a2m_router.storage.backup_jobs import METHOD, Job, Jobs, absolute, failed
from a2m_router.storage.snapshots import CannotCopy, Copying, path_text
from a2m_store.store import Store


class State(msgspec.Struct, omit_defaults=True):
    """The result. `file` is the store's own file.

    The other fields describe a backup: `copied` and `size` are bytes, `schema` is the version of the copy's tables.
    """

    file: str
    backup: str | None = None
    path: str | None = None
    done: bool | None = None
    cancelled: bool = False
    copied: int | None = None
    size: int | None = None
    schema: int | None = None


class _Made(Job):
    copying: Copying  # set once the snapshot is open


class Backups:
    """The backups of one store.

    Args:
        spawn: starts a task that outlives the call. May raise A2MError.
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
        """Return the methods by name: `store/backup`."""
        return {METHOD: Method(Backup, self.backup)}

    async def backup(self, params: Backup, caller: Caller) -> State:
        """Begin a backup (`path`), report or cancel one (`backup`), or name the store's file (neither).

        Raises:
            A2MError: METHOD_NOT_FOUND for a caller that is not on the store's own pipes, and for a store in memory;
                INTERNAL_ERROR for a backup that failed.
        """
        file = self._store.path
        if not caller.asserts_owner or file is None:
            raise A2MError(
                Code.METHOD_NOT_FOUND,
                f"{METHOD!r} is served only to the program that started this store, and only for a store in a file",
            )
        try:
            own_file = path_text(file.resolve())
        except CannotCopy as problem:
            raise failed(str(problem)) from None
        if params.path is not None:
            target = absolute(params.path)
            made = await self._jobs.begin(lambda: _Made(target))
        elif params.backup is not None:
            made = await self._jobs.look(params.backup, cancel=params.cancel)
        else:
            return State(own_file)
        copy = made.copying
        return State(own_file, made.id, str(made.path), made.done, made.cancelled, copy.copied, copy.size, copy.schema)

    async def _make(self, made: _Made) -> None:
        made.copying = await self._store.snapshot().copy_to(made.path, threads=self._threads)
        made.opened.set()
        await made.copying.run(threads=self._threads)

    async def _remove(self, made: _Made) -> None:
        """Do nothing: `Copying` removes an incomplete copy itself."""
