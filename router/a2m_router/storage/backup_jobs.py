"""How `store/backup` is carried out, by a federation and by a store alike: a backup is begun, asked after, called off.

One backup is made at a time; when its moment is past it goes on by itself. Where it fails, or is called off, nothing of
it is left.
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

# how long a question for a backup that is not whole yet is held, in case it gets so
_LOOK: Final = 0.2


log = logging.getLogger(__name__)


class Failed(Exception):
    """A backup that cannot be made; a sentence."""


class Job:
    """One backup, from its beginning on, at an absolute path.

    `opened` is set when its moment is past, or it is over; `over` when it is whole, which is `done`, or is removed.
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
        """Whether it was called off before it was whole."""
        return self.over.is_set() and not self.done and self.problem is None


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The backups of one process.

    Args:
        spawn: starts work that outlives the call.
        make: makes a backup, and sets `opened`. May raise Failed, CannotCopy, OSError.
        remove: removes what there is of one that does not become whole.
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
        """The backup that `job` returns, when its moment is past. `job` is called if no other backup is under way.

        Raises INTERNAL_ERROR for one that failed, or is under way. Called off if this call is cancelled.
        """
        if self._job is not None and not self._job.over.is_set():
            raise failed("another backup is under way; try again when that is done", retry_after=1.0)
        begun = job()
        self._spawn(partial(self._run, begun))
        self._job = begun
        try:
            await begun.opened.wait()
        except BaseException:
            begun.scope.cancel()  # nobody would know of it
            raise
        return _checked(begun)

    async def look(self, id: str, *, cancel: bool) -> J:
        """The backup of that name: soon, or when it is over. With `cancel` it is called off, unless it is whole.

        Raises INVALID_PARAMS for a name that this process has not given, INTERNAL_ERROR for a backup that failed; and
        for one that was called off by another call.
        """
        job = self._job
        if job is None or job.id != id:
            raise invalid_params(
                "backup",
                "expected what an earlier answer of this process gave as `backup`; a backup ends with the process that "
                "makes it",
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
        except Exception:  # whoever serves goes on serving
            job.problem = "a fault of this program; its log says how"
            log.exception("the backup in %s failed", job.path)
        finally:
            if not job.done:
                with anyio.CancelScope(shield=True):
                    await self._remove(job)
            job.over.set()
            job.opened.set()


def absolute(path: str) -> Path:
    """A path that a call names. Raises INVALID_PARAMS for what is no absolute one."""
    if not Path(path).is_absolute():
        raise invalid_params("path", f"expected an absolute path, got {path!r}")
    if "\0" in path:
        raise invalid_params("path", f"expected a path without the character NUL, which no file can have, got {path!r}")
    return Path(path)


def failed(sentence: str, **data: Any) -> A2MError:
    """INTERNAL_ERROR for a backup that cannot be made; the reason is the whole sentence, unless it is given."""
    return A2MError(Code.INTERNAL_ERROR, sentence, {"reason": sentence, **data})


def _checked(job: J) -> J:
    if not job.over.is_set() or job.done:
        return job
    if job.problem is None:
        raise failed("the backup was called off, and what there was of it is removed", reason="called off")
    raise failed(
        f"the backup failed, and what there was of it is removed: {job.problem}",
        reason=job.problem,
    )
