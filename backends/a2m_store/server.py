"""The store as an A2M server for every binding: calls wait in a queue, and one worker runs them in batches.

While another program locks the file, writes stay in the queue in their order, and reads are answered.
"""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import anyio
import anyio.to_thread
import msgspec
from anyio.abc import TaskGroup

from a2m_router.protocol.server.event_log import DEFAULT_RETAINED, UNDERWAY, EventLog
from a2m_router.protocol.server.server import Caller, Dispatcher, Method
from a2m_router.protocol.server.watching import Watching
from a2m_router.protocol.wire import method_params
from a2m_router.protocol.wire.errors import FILE_HELD, A2MError, stopping
from a2m_router.protocol.wire.events import Event, Sight
from a2m_router.protocol.wire.method_params import Params
from a2m_store.backups import Backups
from a2m_store.batch import Call, carry_out
from a2m_store.store import CAPABILITIES, Store, enrols, scope_of

# Seconds that a write waits for another program to unlock the file; less than a router's deadline.
_PATIENCE: Final = 2.0
# Seconds between two attempts.
_LOOK: Final = 0.05


class Served(msgspec.Struct, frozen=True):
    """The handler of one method. `writes`: what it confirms must survive a power cut."""

    params: type[Params]
    carried_out_by: Callable[[Store, Any, Caller], Any]
    writes: bool = False


# A recall counts accesses, but its result promises nothing, so it does not wait for the disk.
METHODS: Final = MappingProxyType(
    {
        "memory/describe": Served(method_params.Enrol, Store.describe),
        "memory/remember": Served(method_params.Remember, Store.remember, writes=True),
        "memory/recall": Served(method_params.Recall, Store.recall),
        "memory/timeline": Served(method_params.Pages, Store.timeline),
        "memory/forget": Served(method_params.Forget, Store.forget, writes=True),
        "memory/reinforce": Served(method_params.Reinforce, Store.reinforce, writes=True),
        "memory/fetch": Served(method_params.Fetch, Store.fetch),
        "memory/session/list": Served(method_params.SessionList, Store.session_list),
        "memory/session/close": Served(method_params.SessionClose, Store.session_close),
    }
)


@asynccontextmanager
async def serving(
    store: Store, *, threads: bool = True, durable: bool = True, retained: int = DEFAULT_RETAINED
) -> AsyncIterator["Server"]:
    """Serve `store` as long as the context lasts; at its end the waiting calls are still carried out.

    Args:
        threads: run batches on a worker thread while the event loop goes on reading. False runs them in the event
            loop, for tests with a virtual clock.
        durable: acknowledged writes survive a power cut; otherwise only the end of the process.
        retained: the number of events kept for clients that poll.
    """
    server = Server(store, threads=threads, durable=durable, retained=retained)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.work)
        try:
            yield server
        finally:
            server.close()


class Server:
    """An `Answering` for one store. Mutable state: `_waiting`, in the order in which calls came, and `_closed`."""

    def __init__(self, store: Store, *, threads: bool, durable: bool, retained: int) -> None:
        self._store = store
        self._threads = threads
        self._durable = durable
        self._waiting: list[_Waiting] = []
        self._closed = False
        self._more = anyio.Event()
        self._log = EventLog(retained)
        watching = Watching(self._log, lambda caller, owner: Sight(scope_of(owner, caller).owner))
        stored = {name: Method(served.params, partial(self._carried_out, served)) for name, served in METHODS.items()}
        self._tasks: TaskGroup | None = None  # set by `work`
        backups = Backups(store, self._spawn, threads=threads)
        self._dispatcher = Dispatcher({**stored, **watching.methods(), **backups.methods()}, CAPABILITIES)

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        return await self._dispatcher(message, caller)

    async def describe(self, caller: Caller) -> Mapping[str, Any]:
        """Return the `memory/describe` result for `caller`. Raises A2MError if the server is closed."""
        described: Mapping[str, Any] = await self._carried_out(
            METHODS["memory/describe"], method_params.Enrol(), caller
        )
        return described

    def close(self) -> None:
        """Reject new calls; `work` returns when the waiting ones are carried out."""
        self._closed = True
        self._more.set()

    async def work(self) -> None:
        """Run the waiting calls, batch after batch, until `close`; backups run beside them."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            await self._work()
            tasks.cancel_scope.cancel()

    def _spawn(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        if self._closed or self._tasks is None:
            raise stopping()
        self._tasks.start_soon(function)

    async def _work(self) -> None:
        try:
            while self._waiting or not self._closed:
                if not self._waiting:
                    self._more = anyio.Event()
                    await self._more.wait()
                    continue
                batch, self._waiting = self._waiting, []
                # a batch that has begun is finished and answered, even if its callers are cancelled meanwhile
                with anyio.CancelScope(shield=True):
                    outcomes = await self._outcomes([waiting.call for waiting in batch])
                again = []
                for waiting, outcome in zip(batch, outcomes, strict=True):
                    if waiting.call.writes and _is_held(outcome) and anyio.current_time() < waiting.deadline:
                        again.append(waiting)
                    else:
                        self._settle(waiting, outcome)
                if again:
                    has_new = bool(self._waiting)
                    self._waiting = again + self._waiting
                    if not has_new:
                        self._more = anyio.Event()
                        with anyio.move_on_after(_LOOK):
                            await self._more.wait()
        finally:
            self._closed = True
            for waiting in self._waiting:
                waiting.outcome = stopping()
                waiting.done.set()

    def _settle(self, waiting: "_Waiting", outcome: "_Done | Exception") -> None:
        if isinstance(outcome, _Done):
            for event in outcome.happened:
                self._log.append(event, waiting.cause)
        waiting.outcome = outcome
        waiting.done.set()

    async def _outcomes(self, calls: list[Call]) -> list[Any]:
        carry = partial(carry_out, self._store, calls, durable=self._durable)
        return await anyio.to_thread.run_sync(carry) if self._threads else carry()

    async def _carried_out(self, served: Served, params: Params, caller: Caller) -> Any:
        if self._closed:
            raise stopping()
        # no await before the call is in the queue: this keeps calls in order
        run = partial(_noting_what_happens, self._store, partial(served.carried_out_by, self._store, params, caller))
        waiting = _Waiting(Call(run, served.writes or enrols(params, caller)))
        self._waiting.append(waiting)
        self._more.set()
        await waiting.done.wait()
        if isinstance(waiting.outcome, _Done):
            return waiting.outcome.result
        assert waiting.outcome is not None, "`done` is set after the outcome"
        raise waiting.outcome


def _is_held(outcome: "_Done | Exception") -> bool:
    """Return whether a call failed because another program locks the file."""
    return isinstance(outcome, A2MError) and (outcome.data or {}).get("reason") == FILE_HELD


class _Done(msgspec.Struct, frozen=True):
    """A call's result, and the events of its changes."""

    result: Any
    happened: list[Event]


def _noting_what_happens(store: Store, run: Callable[[], Any]) -> _Done:
    store.happened = []
    return _Done(run(), store.happened)


class _Waiting:
    """A call in the queue, and later its outcome."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.cause = UNDERWAY.get()
        self.deadline = anyio.current_time() + _PATIENCE
        self.done = anyio.Event()
        self.outcome: _Done | Exception | None = None
