"""`store/backup` for federations and stores: begin a backup, query it, cancel it.

One backup runs at a time. Once its snapshot is taken it continues in the background. A failed or cancelled backup is
removed completely.
"""

import logging
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeVar
from uuid import uuid4

import anyio

from a2m_router.protocol.wire.errors import A2MError, Code, disk_reason, invalid_params
from a2m_router.storage.snapshots import CannotCopy

METHOD: Final = "store/backup"

# seconds that a query waits for an unfinished backup to finish
_LOOK: Final = 0.2


log = logging.getLogger(__name__)


class Failed(Exception):
    """A backup cannot be made; the message is one sentence that says why."""


class Job:
    """One backup at an absolute path.

    `opened` is set when the snapshot is taken, or the backup is over. `over` is set when the backup is complete (then
    `done` is true) or removed.
    """

    def __init__(self, path: Path) -> None:
        self.id = str(uuid4())
        self.path = path
        self.scope = anyio.CancelScope()
        self.opened = anyio.Event()
        self.over = anyio.Event()
        self.done = False
        self.problem: str | None = None  # why it failed

    @property
    def cancelled(self) -> bool:
        """Whether it was cancelled before it was complete."""
        return self.over.is_set() and not self.done and self.problem is None


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The backups of one process.

    Args:
        spawn: starts work that outlives the call.
        make: makes a backup, and sets `opened`. May raise Failed, CannotCopy, OSError.
        remove: removes the files of an incomplete backup.
    """

    def __init__(
        self,
        spawn: Callable[[Callable[[], Coroutine[Any, Any, None]]], None],
        make: Callable[[J], Awaitable[None]],
        remove: Callable[[J], Awaitable[None]],
    ) -> None:
        self._spawn = spawn
        self._make = make
        self._remove = remove
        self._job: J | None = None

    async def begin(self, job: Callable[[], J]) -> J:
        """Start the backup that `job` returns, and return it when its snapshot is taken.

        `job` is called only if no other backup is in progress. Cancelling this call cancels the backup.

        Raises:
            A2MError: INTERNAL_ERROR, if this backup failed or another one is in progress.
        """
        if self._job is not None and not self._job.over.is_set():
            raise failed("another backup is in progress; try again when it is done", retry_after=1.0)
        begun = job()
        self._spawn(partial(self._run, begun))
        self._job = begun
        try:
            await begun.opened.wait()
        except BaseException:
            begun.scope.cancel()  # its id was not returned, so no client could ask for it or cancel it
            raise
        return _checked(begun)

    async def look(self, id: str, *, cancel: bool) -> J:
        """Return the backup with that id: when it is over, or after a short wait. `cancel` cancels an incomplete one.

        Raises:
            A2MError: INVALID_PARAMS, if this process has no backup with that id; INTERNAL_ERROR, if the backup failed
                or another call cancelled it.
        """
        job = self._job
        if job is None or job.id != id:
            raise invalid_params(
                "backup",
                "expected the value of `backup` from an earlier answer of this process; a backup ends with the process "
                "that makes it",
            )
        if cancel:
            job.scope.cancel()
            await job.over.wait()
            return job if job.cancelled else _checked(job)
        with anyio.move_on_after(_LOOK):
            await job.over.wait()
        return _checked(job)

    async def _run(self, job: J) -> None:
        try:
            with job.scope:
                await self._make(job)
                job.done = True
        except (CannotCopy, Failed) as problem:
            job.problem = str(problem)
        except OSError as problem:
            job.problem = disk_reason(problem)
        except Exception:  # the server must go on serving
            job.problem = "an internal error; the log of this program has the details"
            log.exception("backup=%s failed", job.path)
        finally:
            if not job.done:
                with anyio.CancelScope(shield=True):
                    await self._remove(job)
            job.over.set()
            job.opened.set()


def absolute(path: str) -> Path:
    """Return the path that a call names; raise INVALID_PARAMS unless it is absolute."""
    if not Path(path).is_absolute():
        raise invalid_params("path", f"expected an absolute path, got {path!r}")
    if "\0" in path:
        raise invalid_params("path", f"expected a path without the character NUL, which no file can have, got {path!r}")
    return Path(path)


def failed(sentence: str, **data: Any) -> A2MError:
    """Return INTERNAL_ERROR for a backup that cannot be made; `data` may replace the sentence as the reason."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": sentence, **data})


def _checked(job: J) -> J:
    if not job.over.is_set() or job.done:
        return job
    if job.problem is None:
        raise failed("the backup was cancelled, and its files are removed", reason="called off")
    raise failed(
        f"the backup failed, and its files are removed: {job.problem}",
        reason=job.problem,
    )
