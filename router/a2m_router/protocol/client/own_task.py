"""A context manager that one task may enter and another may leave, as fixtures and lifespans of web frameworks do.

A cancel scope and a task group belong to the task that entered them. So a separate task, which lives as long as the
block, enters and leaves the wrapped context manager; the callers wait for it.

Rules:
- the caller that enters gets the exception of a failed entry; the caller that leaves gets exceptions from the time in
  between and from leaving;
- if the block raises, the wrapped manager is left normally; if the block is cancelled, so is the task. In both cases
  the task ends before the block does, unless asyncio's own cancellation, which ignores shields, interrupts the wait.
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
    """Return a function like `opened` whose context manager is entered and left by a separate task."""

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
    """The separate task. Mutable state: its progress."""

    def __init__(self, manager: AbstractAsyncContextManager[T]) -> None:
        self._manager = manager
        self._scope = anyio.CancelScope()
        self._began = anyio.Event()  # the manager is entered, or has failed
        self._leave = anyio.Event()
        self._over = anyio.Event()
        self._value: list[T] = []
        self._problem: BaseException | None = None
        _start(self._run)

    async def entered(self) -> T:
        """Return the manager's value when it is entered; raise the exception of a failed entry."""
        await self._reached(self._began)
        if not self._value:
            await self.ended()
            self._raise_problem()
        return self._value[0]

    async def left(self) -> None:
        """Leave the manager; raise its exception, or the one that ended the task before."""
        self._leave.set()
        await self._reached(self._over)
        self._raise_problem()

    def cancel(self) -> None:
        """Cancel the task."""
        self._scope.cancel()

    async def ended(self) -> None:
        """Wait until the task has ended, under a shield: leaving a manager takes a bounded time."""
        with anyio.CancelScope(shield=True):
            await self._over.wait()

    async def _reached(self, event: anyio.Event) -> None:
        """Wait for an event of the task; if the wait is cancelled, cancel the task."""
        try:
            await event.wait()
        except BaseException:
            self.cancel()
            await self.ended()
            raise

    def _raise_problem(self) -> None:
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
            # the event loop ended, and cancelled all tasks, before the block did
            self._problem = RuntimeError("the event loop ended while this was open")
        except BaseException as problem:  # noqa: BLE001 - raised again in the callers
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
