"""Which tiers are only read: those that the file mounts, and those that turned out to take no writes (§2.1)."""

from collections.abc import Iterable, Sequence

from a2m_router.config.settings import Tier


class Mounts:
    """Mutable state: which tiers have turned out to be read-only since this router started."""

    def __init__(self, tiers: Iterable[Tier]) -> None:
        self.tiers = tuple(tiers)
        self._names = {tier.name for tier in self.tiers if tier.mount}
        self._frozen: set[str] = set()

    def __contains__(self, tier: Tier) -> bool:
        return tier.name in self._names

    def turn(self, tier: str) -> None:
        """From now on `tier` is a mount."""
        self._names.add(tier)

    def freeze(self, tier: str, frozen: bool) -> None:
        """Whether a managed tier takes no writes any more; what lives there is read, and stays."""
        (self._frozen.add if frozen else self._frozen.discard)(tier)

    def takes_writes(self, tier: Tier) -> bool:
        """Whether anything can be written to `tier`, or removed from it."""
        return tier not in self and tier.name not in self._frozen

    @property
    def managed(self) -> Sequence[Tier]:
        """The tiers that the router writes to, in the file's order."""
        return [tier for tier in self.tiers if tier.name not in self._names]

    def of(self, id: str) -> Tier | None:
        """The mount that an id, as it is shown, belongs to."""
        name, slash, _ = id.partition("/")
        return next((tier for tier in self.tiers if slash and tier.name == name and tier in self), None)
