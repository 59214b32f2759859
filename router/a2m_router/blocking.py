"""The client without `async`, for scripts: the names and types of `a2m_router.protocol.client.memory`.

    from a2m_router import blocking

    with blocking.connect("http://127.0.0.1:8778/") as memory:
        memory.remember("the deploy key rotates every 90 days")

An event loop on its own thread does the work; it ends with the block. Several threads may use one memory. A callback
for notifications runs on the loop's thread and must not call the memory itself: that would deadlock.
"""

from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager, suppress
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from a2m_router.daemon.opening import open_federation as open_waiting
from a2m_router.protocol.client import connecting
from a2m_router.protocol.client import memory as waiting

P = ParamSpec("P")
R = TypeVar("R")


def _finished(
    method: Callable[Concatenate[waiting.Memory, P], Coroutine[Any, Any, R]],
) -> "Callable[Concatenate[Memory, P], R]":
    """Return a blocking version of an asynchronous method."""

    @wraps(method)
    def call(self: "Memory", /, *args: P.args, **kwargs: P.kwargs) -> R:
        async def finished() -> R:
            return await method(self._memory, *args, **kwargs)

        return self._portal.call(finished)

    return call


def _viewed(
    method: Callable[Concatenate[waiting.Memory, P], waiting.Memory],
) -> "Callable[Concatenate[Memory, P], Memory]":
    """Return a method that makes a view of the same connection."""

    @wraps(method)
    def view(self: "Memory", /, *args: P.args, **kwargs: P.kwargs) -> "Memory":
        return Memory(method(self._memory, *args, **kwargs), self._portal)

    return view


def _iterated(
    method: Callable[Concatenate[waiting.Memory, P], AsyncGenerator[R, None]],
) -> "Callable[Concatenate[Memory, P], Generator[R, None, None]]":
    """Return a blocking version of an asynchronous generator method."""

    @wraps(method)
    def iterate(self: "Memory", /, *args: P.args, **kwargs: P.kwargs) -> Generator[R, None, None]:
        items = method(self._memory, *args, **kwargs)

        async def following() -> R:
            return await anext(items)

        try:
            while True:
                try:
                    item = self._portal.call(following)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            with suppress(RuntimeError):  # the block ended first, and the event loop with it
                self._portal.call(items.aclose)

    return iterate


class Memory:
    """A client of one server, like `a2m_router.Memory`, with methods that block until the call is done."""

    def __init__(self, memory: waiting.Memory, portal: BlockingPortal) -> None:
        self._memory = memory
        self._portal = portal

    def __repr__(self) -> str:
        return repr(self._memory)

    for_owner = _viewed(waiting.Memory.for_owner)
    in_session = _viewed(waiting.Memory.in_session)
    within = _viewed(waiting.Memory.within)

    describe = _finished(waiting.Memory.describe)
    remember = _finished(waiting.Memory.remember)
    remember_all = _finished(waiting.Memory.remember_all)
    recall = _finished(waiting.Memory.recall)
    timeline = _finished(waiting.Memory.timeline)
    forget = _finished(waiting.Memory.forget)
    promote = _finished(waiting.Memory.promote)
    consolidate = _finished(waiting.Memory.consolidate)
    reinforce = _finished(waiting.Memory.reinforce)
    fetch = _finished(waiting.Memory.fetch)
    sessions = _finished(waiting.Memory.sessions)
    close_session = _finished(waiting.Memory.close_session)
    events = _finished(waiting.Memory.events)
    watch = _iterated(waiting.Memory.watch)
    subscribe = _finished(waiting.Memory.subscribe)
    unsubscribe = _finished(waiting.Memory.unsubscribe)
    summarize = _finished(waiting.Memory.summarize)


def _entered(
    way: Callable[P, AbstractAsyncContextManager[waiting.Memory]],
) -> Callable[P, AbstractContextManager[Memory]]:
    """Return a blocking version of a function that opens a memory; each memory gets its own event loop."""

    @contextmanager
    @wraps(way)
    def enter(*args: P.args, **kwargs: P.kwargs) -> Iterator[Memory]:
        with start_blocking_portal() as portal, portal.wrap_async_context_manager(way(*args, **kwargs)) as memory:
            yield Memory(memory, portal)

    return enter


connect = _entered(connecting.connect)
connect_command = _entered(connecting.connect_command)
open_federation = _entered(open_waiting)
