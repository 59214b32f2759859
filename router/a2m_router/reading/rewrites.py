"""A group that gives way to its summary while it is read: the read could meet neither of the two, and begins anew."""

from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from a2m_router.catalog.catalog import Catalog
from a2m_router.tiers.failures import changing

# How often a read begins anew.
_MOST_REWRITES: Final = 50

T = TypeVar("T")


async def undisturbed(catalog: Catalog, look: Callable[[], Awaitable[T]]) -> T:
    """What a look finds during which no group gives way to its summary.

    Raises INTERNAL_ERROR, reason "changing", if that goes on all the time.
    """
    for _ in range(_MOST_REWRITES):
        rewrites = catalog.rewrites
        found = await look()
        if catalog.rewrites == rewrites:
            return found
    raise changing("groups are being rewritten faster than they can be read; try again")
