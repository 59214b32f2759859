"""The method table: each A2M method that the router serves, for all bindings (§4)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from a2m_router.catalog.catalog import Catalog
from a2m_router.methods.redaction import Handler, redacted
from a2m_router.process.budget import budget
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import disk_failed

# methods that run a pass: their duration does not depend on the caller, and finished moves stay
_AS_LONG_AS_IT_TAKES: Final = frozenset({"memory/consolidate", "memory/session/close"})

# methods that exist to change the catalog, and fail if it cannot be written
_CHANGE: Final = frozenset(
    {
        *("memory/remember", "memory/forget", "memory/promote", "memory/consolidate", "memory/reinforce"),
        *("memory/session/close", "memory/summarize"),
    }
)


class Family(Protocol):
    """A class that handles some methods, each within the scope of its caller."""

    def methods(self) -> Mapping[str, Method]:
        """Return the methods, by name."""
        ...


def table(families: Iterable[Family], catalog: Catalog, seconds: float) -> Mapping[str, Method]:
    """Return every method of the families, by name.

    Args:
        seconds: the time budget of one call: for all its calls to tiers, and for waiting, together.
    """
    methods = {name: method for family in families for name, method in family.methods().items()}
    return {name: _served(name, method, catalog, seconds) for name, method in methods.items()}


def _served(name: str, method: Method, catalog: Catalog, seconds: float) -> Method:
    handler = method.handler
    if name in _CHANGE:
        handler = _when_writable(handler, catalog)
    if name not in _AS_LONG_AS_IT_TAKES:
        handler = _in_time(handler, seconds)
    return Method(method.params, redacted(handler), method.allow)


def _when_writable(handler: Handler, catalog: Catalog) -> Handler:
    """Wrap a handler: wait before it until the catalog can be written. This waiting blocks no other call."""

    async def handle(params: Any, caller: Caller) -> Any:
        try:
            await catalog.writable()
        except OSError as problem:
            raise disk_failed(problem, "the catalog's") from None
        return await handler(params, caller)

    return handle


def _in_time(handler: Handler, seconds: float) -> Handler:
    """Wrap a handler: give it a time budget for all its calls to tiers, and for waiting, together."""

    async def handle(params: Any, caller: Caller) -> Any:
        with budget(seconds):
            return await handler(params, caller)

    return handle
