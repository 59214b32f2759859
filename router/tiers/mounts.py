"""Which tiers are only read: those that the file mounts, and those that turned out to take no writes (§2.1)."""

from collections.abc import Iterable, Sequence

from router.config import Tier


class Mounts:
    """Mutable state: which tiers have turned out to be read-only since this router started."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self._tiers = tuple(tiers)
        self._names = {tier.name for tier in self._tiers if tier.mount}

    def __contains__(self, tier: Tier) -> bool:
        return tier.name in self._names

    def turn(self, tier: str) -> None:
        """From now on `tier` is a mount."""
        self._names.add(tier)

    @property
    def managed(self) -> Sequence[Tier]:
        """The tiers that the router writes to, in the file's order."""
        return [tier for tier in self._tiers if tier.name not in self._names]

    def of(self, id: str) -> Tier | None:
        """The mount that an id, as it is shown, belongs to."""
        name, slash, _ = id.partition("/")
        return next((tier for tier in self._tiers if slash and tier.name == name and tier in self), None)
