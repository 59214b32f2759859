"""A Python function as a service: `(query, limit)` to an iterable of dicts or strings.

A sync function runs on a thread. An async function runs in the event loop, so it must not block.
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
        threads: the threads for a sync function.
        arguments: example arguments, to check the signature; the function is not called.

    Raises:
        CannotStart: there is no such function, or it does not accept such arguments.
    """

    def __init__(self, reference: str, threads: Threads, *arguments: Any) -> None:
        self._reference = reference
        self._call = _function(reference, arguments)
        self._threads = threads

    async def __call__(self, *arguments: Any) -> Any:
        """Call the function, and return its result. Raises ServiceFailure for any exception of the function."""
        if not _is_async(self._call):
            return await self._awaited(await self._threads.run(self._reference, partial(self._call, *arguments)))
        with foreign(self._reference):
            return await self._awaited(self._call(*arguments))

    async def items(self, *arguments: Any, most: int) -> list[Any]:
        """Call the function, and return the first `most` items of its result, an iterable or async iterable.

        Raises ServiceFailure.
        """

        def listed() -> Any:
            # a lazy iterable may block; so iterate on the thread that called the function
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
        """Return the first items of an iterable; or the value itself, if it must be awaited.

        Raises ServiceFailure for other values, and for a string or a mapping: those are iterable, but surely a mistake.
        """
        if inspect.isawaitable(returned) or isinstance(returned, AsyncIterable):
            return returned
        if isinstance(returned, str | bytes | Mapping) or not isinstance(returned, Iterable):
            raise ServiceFailure(
                f"{self._reference} returned {shown(returned)}; expected an iterable of dicts or strings"
            )
        return list(islice(returned, most))

    async def _awaited(self, returned: Any) -> Any:
        if not inspect.isawaitable(returned):
            return returned
        with foreign(self._reference):
            return await returned


class Embedding:
    """An embedding of single texts by a function from texts to vectors. Raises CannotStart as `Function` does."""

    def __init__(self, reference: str, threads: Threads) -> None:
        self._reference = reference
        self._function = Function(reference, threads, [""])

    async def __call__(self, text: str) -> list[float]:
        """Return the vector of a text. Raises ServiceFailure, also if the result is not one vector of numbers."""
        vectors = await self._function([text])
        try:
            (vector,) = vectors
            numbers = [float(each) for each in vector]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)):
            raise ServiceFailure(
                f"{self._reference}: expected a list of one vector of finite numbers for one text, the function "
                "returned something else"
            )
        return numbers


class PythonService(ByWords):
    """The `Service` of a search function, and optionally of a function without arguments that returns all results."""

    def __init__(self, search: Function, listing: Function | None) -> None:
        self._search = search
        self._listing = listing

    @property
    def lists(self) -> bool:
        return self._listing is not None

    async def search(self, query: str, _vector: Sequence[float] | None, limit: int, *, vectors: bool) -> list[Result]:
        return [Result(item) for item in await self._search.items(query, limit, most=limit)]

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        assert self._listing is not None, "called only if `lists`"
        return [Result(item) for item in await self._listing.items(most=most + 1)]


def python_service(search: str, listing: str | None) -> PythonService:
    """Return the service of the functions that `search` and `listing` name. Raises CannotStart."""
    threads = Threads()
    return PythonService(Function(search, threads, "", 1), None if listing is None else Function(listing, threads))


@asynccontextmanager
async def _closing(items: AsyncIterable[Any]) -> AsyncIterator[None]:
    """Close an async generator at the end of the block. Otherwise the garbage collector would close it at any time."""
    try:
        yield
    finally:
        if isinstance(items, AsyncGenerator):
            with anyio.CancelScope(shield=True):
                await items.aclose()


def _function(reference: str, arguments: Sequence[Any]) -> Callable[..., Any]:
    found = named(reference)
    if not callable(found):
        raise CannotStart(f"{reference}: expected a function, got {shown(found)}")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as problem:
        count = f"{len(arguments)} arguments" if len(arguments) != 1 else "one argument"
        raise CannotStart(f"{reference} cannot be called with {count}: {problem}") from None
    except ValueError:
        pass  # a function in C may have no signature
    result: Callable[..., Any] = found
    return result


def _is_async(function: Callable[..., Any]) -> bool:
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004 - this asks of what kind it is, not whether there is one
    return any(inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each) for each in kinds)
