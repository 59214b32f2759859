"""Which tiers are only read, by their modes (§2.1): those that the file mounts, and those that take no writes."""

from collections.abc import Sequence

from a2m_router.config.settings import Tier
from a2m_router.tiers.mode import Modes


class Mounts:
    """The tiers of a federation, as they are mounts or not."""

    def __init__(self, modes: Modes) -> None:
        self.tiers = modes.tiers
        self._modes = modes

    def __contains__(self, tier: Tier) -> bool:
        return self._modes.is_mount(tier)

    @property
    def managed(self) -> Sequence[Tier]:
        """The tiers that the router writes to, in the file's order."""
        return [tier for tier in self.tiers if tier not in self]

    def of(self, id: str) -> Tier | None:
        """The mount that an id, as it is shown, belongs to."""
        name, slash, _ = id.partition("/")
        return next((tier for tier in self.tiers if slash and tier.name == name and tier in self), None)
