"""What every change of records works with."""

from collections.abc import Iterable

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.placement.guard import Guard, Spawn
from a2m_router.placement.reconciler import Reconciler
from a2m_router.tiers.copies import Copies


class Core(msgspec.Struct, frozen=True):
    """The catalog, the copies in the tiers, what guards a change, and what finishes it in the background."""

    catalog: Catalog
    copies: Copies
    guard: Guard
    reconciler: Reconciler


def core_of(catalog: Catalog, copies: Copies, managed: Iterable[Tier], spawn: Spawn) -> Core:
    """The core of one federation. Each change that ends wakes the reconciler."""
    guard = Guard(catalog, copies, spawn, lambda: reconciler.wake())
    reconciler = Reconciler(catalog, copies, guard, managed)
    return Core(catalog, copies, guard, reconciler)
