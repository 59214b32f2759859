"""The mounts of a federation, by the tiers' modes (§2.1): tiers that the file mounts, and read-only servers."""

from collections.abc import Sequence

from a2m_router.config.settings import Tier
from a2m_router.tiers.mode import Modes


class Mounts:
    """The tiers of a federation, divided into mounts and managed tiers."""

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
        """Return the mount that an id, in the form that clients see, belongs to; None if there is none."""
        name, slash, _ = id.partition("/")
        return next((tier for tier in self.tiers if slash and tier.name == name and tier in self), None)
