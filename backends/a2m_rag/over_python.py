"""A service that is a Python function: `(query, limit)` to an iterable of dicts or strings.

It may be sync, and runs on a thread then, or async, and runs in the event loop: then it must not block.
"""

import inspect
import math
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import Any

import anyio

from a2m_rag.importing import named
from a2m_rag.mapping import shown
from a2m_rag.service import ByWords, CannotStart, Result, ServiceFailure, foreign
from a2m_rag.threads import Threads


class Function:
    """A function named on the command line, sync or async.

    Args:
        reference: `module:function`.
        arguments: such ones as it will be called with; it is not called.

    Raises CannotStart unless there is such a function, and it takes these arguments.
    """

    def __init__(self, reference: str, threads: Threads, *arguments: Any) -> None:
        self._reference = reference
        self._call = _function(reference, arguments)
        self._threads = threads

    async def __call__(self, *arguments: Any) -> Any:
        """What it returns. Raises ServiceFailure for whatever it raises."""
        if not _is_async(self._call):
            return await self._awaited(await self._threads.run(self._reference, partial(self._call, *arguments)))
        with foreign(self._reference):
            return await self._awaited(self._call(*arguments))

    async def items(self, *arguments: Any, most: int) -> list[Any]:
        """The first `most` of what it returns, which is an iterable or an async one. Raises ServiceFailure."""

        def listed() -> Any:
            # an iterable may be lazy, and block; so it is walked where the function was called
            return self._listed(self._call(*arguments), most)

        if _is_async(self._call):
            return await self._taken(await self(*arguments), most)
        return await self._taken(await self._threads.run(self._reference, listed), most)

    async def _taken(self, returned: Any, most: int) -> list[Any]:
        returned = await self._awaited(returned)
        items = []
        with foreign(self._reference):
            if not isinstance(returned, AsyncIterable):
                listed: list[Any] = self._listed(returned, most)
                return listed
            async with _closing(returned):
                async for item in returned:
                    items.append(item)
                    if len(items) >= most:
                        break
        return items

    def _listed(self, returned: Any, most: int) -> Any:
        """The first items of an iterable; what has to be awaited as it is. Raises ServiceFailure for what is neither,
        and for what is iterable, but surely not meant like that."""
        if inspect.isawaitable(returned) or isinstance(returned, AsyncIterable):
            return returned
        if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
            raise ServiceFailure(
                f"{self._reference} returned {shown(returned)}, where an iterable of dicts or strings is expected"
            )
        return list(islice(returned, most))

    async def _awaited(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned
        with foreign(self._reference):
            return await returned


class Embedding:
    """Turns a text into a vector, by a function from texts to vectors. Raises CannotStart as Function does."""

    def __init__(self, reference: str, threads: Threads) -> None:
        self._reference = reference
        self._function = Function(reference, threads, [""])

    async def __call__(self, text: str) -> list[float]:
        """Raises ServiceFailure, also where what comes is not one vector of finite numbers."""
        vectors = await self._function([text])
        try:
            (vector,) = vectors
            numbers = [float(each) for each in vector]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)):
            raise ServiceFailure(
                f"{self._reference}, given one text, returned something else than a list of one vector of numbers"
            )
        return numbers


class PythonService(ByWords):
    """A `Service` made of a function, and of one without arguments that lists everything, if there is one."""

    def __init__(self, search: Function, listing: Function | None) -> None:
        self._search = search
        self._listing = listing

    @property
    def lists(self) -> bool:
        return self._listing is not None

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        return [Result(item) for item in await self._search.items(query, limit, most=limit)]

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        assert self._listing is not None, "asked only where it lists"
        return [Result(item) for item in await self._listing.items(most=most + 1)]


def python_service(search: str, listing: str | None) -> PythonService:
    """The service of the functions that `search` and `listing` name. Raises CannotStart."""
    threads = Threads()
    return PythonService(Function(search, threads, "", 1), None if listing is None else Function(listing, threads))


@asynccontextmanager
async def _closing(items: AsyncIterable[Any]) -> AsyncIterator[None]:
    """Closes an async generator at the end: one that is left behind would be closed by whoever finds it."""
    try:
        yield
    finally:
        if isinstance(items, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                await items.aclose()


def _function(reference: str, arguments: Sequence[Any]) -> Callable[..., Any]:
    found = named(reference)
    if not callable(found):
        raise CannotStart(f"{reference} is {shown(found)}, and no function")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as problem:
        said = f"with {len(arguments)} arguments" if len(arguments) != 1 else "with one argument"
        raise CannotStart(f"{reference} cannot be called {said}: {problem}") from None
    except ValueError:
        pass  # a function in C may not say what it takes
    result: Callable[..., Any] = found
    return result


def _is_async(function: Callable[..., Any]) -> bool:
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004 - not whether it has one, but of what kind
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in kinds)
