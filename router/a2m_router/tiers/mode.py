"""The mode of a tier: which form of records its server gets on one connection, and the server's identity.

- A mode follows from the federation file, the server's description of itself, and what the catalog knows of the tier's
  records. As long as the tier may hold lifted records, all its records are lifted. As long as it may hold records whose
  vectors are indexed by the router, the vectors of all its records are.
- A mode belongs to a connection. When the tier has come up again, its server may promise something else. So a call that
  has waited is prepared for the new mode, and its result is decoded by the mode that it was prepared for.
- Whether a server is read-only shows only when it is called. A read-only server that holds no record of ours is a
  mount, whatever the file says, until a connection on which it accepts writes.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from a2m_router.config.settings import Tier
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.profile import CannotServe, Profile


class TierMode(msgspec.Struct, frozen=True):
    """The form in which one server gets records and queries.

    native: it gets records as they are; otherwise they are lifted.
    vectors: it searches by vector itself; otherwise the router indexes its vectors.
    mount: it is read-only.
    remote: the name of the server's own tier that this tier is; None if it has no tiers, or if all of them are.
    risen: the number of the connection: how often the tier had come up.
    """

    native: bool
    vectors: bool
    mount: bool
    remote: str | None
    risen: int


# Takes a tier's name and its server's identity. Returns whether the server may hold lifted records, and whether the
# router indexes their vectors, as the catalog knows it durably.
Lifting = Callable[[str, str], tuple[bool, bool]]


def mode_of(
    tier: Tier, profile: Profile, *, risen: int = 0, mount: bool = False, lifted: bool = False, indexed: bool = False
) -> TierMode:
    """Return the mode for a server with this profile.

    Over HTTP the token decides the owner (§6), and an `owner` that the router sends is ignored. So records are lifted
    there, whatever the server declares.

    Args:
        mount: the server is known to be read-only.
        lifted: it holds lifted records.
        indexed: it holds records whose vectors are indexed by the router.

    Raises:
        CannotServe: the server has several tiers, and the file does not say which one to use.
    """
    return TierMode(
        native=profile.is_native and tier.url is None and not (tier.mount or mount or lifted),
        vectors="embeddings" in profile.capabilities and not indexed,
        mount=tier.mount or mount,
        remote=_remote(tier, profile),
        risen=risen,
    )


class Modes:
    """The modes of all tiers."""

    def __init__(
        self,
        tiers: Iterable[Tier],
        links: Mapping[str, Link],
        lifting: Lifting = lambda tier, identity: (False, False),
    ) -> None:
        self.tiers = tuple(tiers)
        self._by_name = {tier.name: tier for tier in self.tiers}
        self._links = links
        self._lifting = lifting
        self._modes: dict[str, TierMode] = {}
        self._profiles: dict[str, Profile] = {}  # from which the modes were decided

    def of(self, tier: str) -> TierMode:
        """Return the mode for the tier's present connection; while the tier is down, for the last one.

        Raises:
            TierDown: there was no connection yet, or the server cannot be used for this tier.
        """
        mode, link = self._modes.get(tier), self._links[tier]
        # a mount's description of itself may change while it is connected
        if mode is not None and mode.risen == link.risen and self._profiles[tier] is link.profile:
            return mode
        # until the server is tested again, it counts as a mount if it last was one
        return self.decide(tier, mount=mode is not None and mode.mount)

    def decide(self, tier: str, *, mount: bool) -> TierMode:
        """Decide the mode for the tier's present connection. `mount`: its server is read-only. Raises as `of` does."""
        settings, link = self._by_name[tier], self._links[tier]
        profile = link.profile
        if profile is None:
            raise TierDown(tier, link.reason or "it is still starting", 1.0, None)
        is_mount = settings.mount or mount
        lifted, indexed = (False, False) if is_mount else self._lifting(tier, identity_of(settings, profile))
        try:
            mode = mode_of(settings, profile, risen=link.risen, mount=is_mount, lifted=lifted, indexed=indexed)
        except CannotServe as problem:
            raise TierDown(tier, str(problem), 60.0, None) from None
        self._modes[tier], self._profiles[tier] = mode, profile
        return mode

    def is_mount(self, tier: Tier) -> bool:
        """Return whether `tier` is a mount: by the file, or because its server was last seen to be read-only."""
        mode = self._modes.get(tier.name)
        return tier.mount or (mode is not None and mode.mount)


def identity_of(tier: Tier, profile: Profile) -> str:
    """Return the identity of a tier's server: its store's own, else its name and address without secrets."""
    if profile.store.identity is not None:
        return profile.store.identity
    if tier.url is not None:
        parts = urlsplit(tier.url)
        reached = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    else:
        command = "\0".join(tier.command or ()).encode("utf-8", "surrogateescape")
        reached = f"{(tier.command or ('',))[0]} #{hashlib.sha256(command).hexdigest()[:12]}"
    part = "" if tier.remote_tier is None else f", {tier.remote_tier}"
    return f"{profile.name} at {reached}{part}"


def _remote(tier: Tier, profile: Profile) -> str | None:
    place = f"tiers.{tier.name}"
    if tier.remote_tier is not None:
        if tier.remote_tier not in profile.tiers:
            has = f"has {', '.join(map(repr, profile.tiers))}" if profile.tiers else "declares no tiers"
            raise CannotServe(f"{place}.remote_tier: the server {profile.name!r} {has}, not {tier.remote_tier!r}")
        return tier.remote_tier
    if tier.mount or not profile.tiers:
        return None
    alike = [name for name, remote in profile.tiers.items() if remote.kind == tier.kind]
    if len(profile.tiers) == 1 or len(alike) == 1:
        return (alike or list(profile.tiers))[0]
    there = ", ".join(map(repr, profile.tiers))
    raise CannotServe(
        f"{place}: the server {profile.name!r} has several tiers, {there}; say which one is meant: remote_tier"
    )
