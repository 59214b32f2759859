"""Foreign code that blocks, on threads of its own.

A call that is given up on is left to itself: nothing can end a thread. So its thread must not keep the process from
ending, which anyio's own worker threads would, and it keeps its place among those that may be under way until it has
come back: a service that hangs costs a bounded number of threads.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import anyio
import anyio.from_thread
import anyio.lowlevel

from a2m_rag.service import ServiceFailure, foreign

MOST: Final = 16
"""Calls under way at once."""


class Threads:
    """Mutable state: the room that is left."""

    def __init__(self, most: int = MOST) -> None:
        self._room = anyio.Semaphore(most, max_value=most)

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """What `call` returns; waits for room first. Raises ServiceFailure, naming `what`, for whatever it raises."""
        await self._room.acquire()
        done = anyio.Event()
        outcome: list[Any] = []
        failures: list[ServiceFailure] = []
        loop = anyio.lowlevel.current_token()

        def finish() -> None:
            self._room.release()
            done.set()

        def work() -> None:
            try:
                with foreign(what):
                    outcome.append(call())
            except ServiceFailure as failure:
                failures.append(failure)
            except BaseException as problem:  # noqa: BLE001 - whatever ends the thread must not keep its room
                failures.append(ServiceFailure(f"{what} ended with {type(problem).__name__}"))
            with suppress(RuntimeError):  # nobody is there any more
                anyio.from_thread.run_sync(finish, token=loop)

        try:
            threading.Thread(target=work, name=f"a2m-rag {what}", daemon=True).start()
        except RuntimeError as problem:
            self._room.release()
            raise ServiceFailure(f"{what} cannot be called: {problem}") from None
        await done.wait()
        if failures:
            raise failures[0]
        return outcome[0]
