"""A context manager that may be entered in one task and left in another, as fixtures and the lifespans of web
frameworks do.

A cancel scope and a task group belong to the task that entered them. So what has some inside is entered and left by a
task of its own, which lives as long as the block; those who enter and leave wait for it.

Rules:
- whoever enters is told why that failed, and whoever leaves what went wrong in the meantime or on the way out;
- a block that raises is left as if it had come to its end; a block that is cancelled cancels the task. Either way the
  task has ended when the block has, unless asyncio's own cancellation, which knows no shield, cuts the wait short.
"""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import copy_context
from functools import wraps
from typing import Final, Generic, ParamSpec, TypeVar

import anyio

P = ParamSpec("P")
T = TypeVar("T")

# a loop holds its tasks weakly
_running: Final[set[asyncio.Task[None]]] = set()


def in_own_task(
    opened: Callable[P, AbstractAsyncContextManager[T]],
) -> Callable[P, AbstractAsyncContextManager[T]]:
    """The way to a context manager, which a task of its own enters and leaves."""

    @asynccontextmanager
    @wraps(opened)
    async def enter(*args: P.args, **kwargs: P.kwargs) -> AsyncIterator[T]:
        task = _OwnTask(opened(*args, **kwargs))
        value = await task.entered()
        problem: Exception | KeyboardInterrupt | SystemExit | None = None
        try:
            yield value
        except (Exception, KeyboardInterrupt, SystemExit) as raised:  # noqa: BLE001 - raised again below, in order
            problem = raised
        except BaseException:
            task.cancel()
            await task.ended()
            raise
        await task.left()
        if problem is not None:
            raise problem

    return enter


class _OwnTask(Generic[T]):
    """The task. Mutable state: how far it is."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._scope = anyio.CancelScope()
        self._began = anyio.Event()  # to be inside, or failed before
        self._leave = anyio.Event()
        self._over = anyio.Event()
        self._value: list[T] = []
        self._problem: BaseException | None = None
        _start(self._run)

    async def entered(self) -> T:
        """What the manager gives, once it is there. Raises what entering it raised."""
        await self._reached(self._began)
        if not self._value:
            await self.ended()
            self._tell()
        return self._value[0]

    async def left(self) -> None:
        """Leave the manager. Raises what that raised, or what had ended it before."""
        self._leave.set()
        await self._reached(self._over)
        self._tell()

    def cancel(self) -> None:
        """Cancel what the task is at."""
        self._scope.cancel()

    async def ended(self) -> None:
        """Return when the task has ended. What it does then is bounded, as every way out is."""
        with anyio.CancelScope(shield=True):
            await self._over.wait()

    async def _reached(self, event: anyio.Event) -> None:
        """Return when the task has come so far; who is cancelled meanwhile cancels it, too."""
        try:
            await event.wait()
        except BaseException:
            self.cancel()
            await self.ended()
            raise

    def _tell(self) -> None:
        if self._problem is not None:
            raise self._problem

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._manager as value:
                    self._value.append(value)
                    self._began.set()
                    await self._leave.wait()
        except anyio.get_cancelled_exc_class():
            # the loop ends, and with it all tasks, before the block did
            self._problem = RuntimeError("the event loop has ended what is open here")
        except BaseException as problem:  # noqa: BLE001 - it belongs to those who enter and leave
            self._problem = problem
        finally:
            self._over.set()
            self._began.set()


def _start(run: Callable[[], Coroutine[object, object, None]]) -> None:
    trio = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        trio.lowlevel.spawn_system_task(run, context=copy_context())
        return
    task = asyncio.get_running_loop().create_task(run())
    _running.add(task)
    task.add_done_callback(_running.discard)
