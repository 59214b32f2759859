"""The table of methods: each A2M method the router serves, as it is asked over any binding (§4)."""

from collections.abc import Iterable, Mapping
from typing import Any, Final, Protocol

from a2m_router.catalog.catalog import Catalog
from a2m_router.methods.redaction import Handler, redacted
from a2m_router.process.budget import budget
from a2m_router.protocol.server.server import Caller, Method
from a2m_router.protocol.wire.errors import disk_failed

# what asks for a pass: how much there is to move is not the caller's doing, and what has been moved stays moved
_AS_LONG_AS_IT_TAKES: Final = frozenset({"memory/consolidate", "memory/session/close"})

# what changes the catalog on purpose, and can do nothing where that cannot be
_CHANGE: Final = frozenset(
    {
        *("memory/remember", "memory/forget", "memory/promote", "memory/consolidate", "memory/reinforce"),
        *("memory/session/close", "memory/summarize"),
    }
)


class Family(Protocol):
    """What carries out some methods; it reads whose scope each is asked in."""

    def methods(self) -> Mapping[str, Method]:
        """The methods, by name."""
        ...


def table(families: Iterable[Family], catalog: Catalog, seconds: float) -> Mapping[str, Method]:
    """Every method of the families, by name.

    Args:
        seconds: what a call has for all its calls to tiers, and waits for others, together.
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
    """The handler, begun when the catalog can be changed: what waits here holds up nobody else."""

    async def handle(params: Any, caller: Caller) -> Any:
        try:
            await catalog.writable()
        except OSError as problem:
            raise disk_failed(problem, "the catalog's") from None
        return await handler(params, caller)

    return handle


def _in_time(handler: Handler, seconds: float) -> Handler:
    """The handler, all of whose calls to tiers, and waits for others, have so many seconds together."""

    async def handle(params: Any, caller: Caller) -> Any:
        with budget(seconds):
            return await handler(params, caller)

    return handle
