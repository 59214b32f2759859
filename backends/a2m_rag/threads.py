"""Runs blocking foreign code on separate threads.

A thread cannot be stopped, so a cancelled call runs on. The threads are daemons, so that such a call cannot prevent the
process from ending, as anyio's worker threads would. And a cancelled call counts as running until it returns, so that a
service that hangs uses a limited number of threads.
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
"""The most calls at the same time."""


class Threads:
    """The threads of one service. Mutable state: how many more calls may start."""

    def __init__(self, most: int = MOST) -> None:
        self._slots = anyio.Semaphore(most, max_value=most)

    async def run(self, what: str, call: Callable[[], Any]) -> Any:
        """Wait until a call may start, run `call`, and return its result.

        Raises ServiceFailure, naming `what`, for any exception of `call`.
        """
        await self._slots.acquire()
        done = anyio.Event()
        outcome: list[Any] = []
        failures: list[ServiceFailure] = []
        loop = anyio.lowlevel.current_token()

        def finish() -> None:
            self._slots.release()
            done.set()

        def work() -> None:
            try:
                with foreign(what):
                    outcome.append(call())
            except ServiceFailure as failure:
                failures.append(failure)
            except BaseException as problem:  # noqa: BLE001 - any exception must release the slot
                failures.append(ServiceFailure(f"{what} ended with {type(problem).__name__}"))
            with suppress(RuntimeError):  # the event loop may have ended
                anyio.from_thread.run_sync(finish, token=loop)

        try:
            threading.Thread(target=work, name=f"a2m-rag {what}", daemon=True).start()
        except RuntimeError as problem:
            self._slots.release()
            raise ServiceFailure(f"{what} cannot be called: {problem}") from None
        await done.wait()
        if failures:
            raise failures[0]
        return outcome[0]
