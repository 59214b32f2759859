"""The services that every change of records uses."""

from collections.abc import Iterable

import msgspec

from a2m_router.catalog.catalog import Catalog
from a2m_router.config.settings import Tier
from a2m_router.placement.guard import Guard, Spawn
from a2m_router.placement.reconciler import Reconciler
from a2m_router.tiers.gateway import TierGateway


class Core(msgspec.Struct, frozen=True):
    """The services: the catalog, the tier gateway, the guard of changes, and the background reconciler."""

    catalog: Catalog
    gateway: TierGateway
    guard: Guard
    reconciler: Reconciler


def core_of(catalog: Catalog, gateway: TierGateway, managed: Iterable[Tier], spawn: Spawn) -> Core:
    """Return the core of one federation. Each change that ends wakes the reconciler."""
    guard = Guard(catalog, gateway, spawn, lambda: reconciler.wake())
    reconciler = Reconciler(catalog, gateway, guard, managed)
    return Core(catalog, gateway, guard, reconciler)
