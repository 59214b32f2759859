"""Group commit: one sync makes everything durable that was committed before it began."""

from collections.abc import Callable

import anyio
import anyio.to_thread


class GroupCommit:
    """Waits for durability that share their syncs.

    Args:
        sync: makes all earlier commits durable; blocks.
        threads: sync on a worker thread. False syncs at once, for tests with a virtual clock.
    """

    def __init__(self, sync: Callable[[], None], *, threads: bool = True) -> None:
        self._sync = sync
        self._threads = threads
        self._running: _Run | None = None
        self._started = 0
        self._finished = 0

    async def wait(self) -> None:
        """Wait until everything committed before this call is durable. Raises OSError if the disk fails."""
        if not self._threads:
            self._sync()
            return
        needed = self._started + 1  # the next sync to start is the first that surely covers this caller's commits
        while self._finished < needed:
            if self._running is not None:
                await self._running.wait()
                continue
            self._running = running = _Run()
            self._started += 1
            try:
                await anyio.to_thread.run_sync(self._sync)
                self._finished = self._started
            except OSError as failure:
                running.failure = failure
                raise
            finally:
                self._running = None
                running.ended.set()


class _Run:
    """One sync under way. If it fails, every waiting call raises.

    The system reports a lost write only once, so a later sync that succeeds does not prove that the data is there.
    """

    def __init__(self) -> None:
        self.ended = anyio.Event()
        self.failure: OSError | None = None

    async def wait(self) -> None:
        await self.ended.wait()
        if self.failure is not None:
            raise OSError(*self.failure.args) from self.failure
