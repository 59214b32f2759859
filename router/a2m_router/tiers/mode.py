"""The mode of a tier: how its server is spoken to on one connection, and who that server is.

- A mode follows from what the file says of the tier, what its server says of itself, and what the catalog knows of the
  records there. As long as the tier may hold records that were written lifted, all are lifted; and as long as it may
  hold records whose vectors are indexed here, those of all are.
- A mode belongs to a connection. When the tier has come up anew, what its server promises may be something else, so a
  call that waits meanwhile is prepared for the new mode, and its answer is read by the mode that it was prepared for.
- Whether a server takes writes it only shows when it is asked. One that takes none, and holds no record of ours, is a
  mount, whatever the file says, until a connection on which it takes some.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import urlsplit

import msgspec

from a2m_router.config.settings import Tier
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.profile import CannotServe, Profile


class TierMode(msgspec.Struct, frozen=True):
    """How records and questions are put to one server.

    native: it is told records as they are; else they are lifted.
    vectors: it searches by vector itself; else its vectors are indexed by the router.
    mount: it is only read.
    remote: the name of the one of its own tiers that is meant; None where it has none, or all are meant.
    risen: the connection, by how often the tier had come up.
    """

    native: bool
    vectors: bool
    mount: bool
    remote: str | None
    risen: int


# By a tier's name and its server's identity: whether the server may hold records that were written there lifted, and
# whether their vectors are indexed by the router; as a catalog durably knows it.
Lifting = Callable[[str, str], tuple[bool, bool]]


def mode_of(
    tier: Tier, profile: Profile, *, risen: int = 0, mount: bool = False, lifted: bool = False, indexed: bool = False
) -> TierMode:
    """The mode for a server that says this of itself.

    Over HTTP an owner is who shows the token (§6): what the router says of owners could not count there, so that
    records are lifted whatever the server declares.

    Args:
        mount: it has shown that it takes no writes.
        lifted: it holds lifted records.
        indexed: it holds records whose vectors are indexed by the router.

    Raises CannotServe where the server has several tiers, and it cannot be told which one is meant.
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
        self._profiles: dict[str, Profile] = {}  # by which they were decided

    def of(self, tier: str) -> TierMode:
        """The mode for the tier's connection of now; for the last one while the tier is down. Raises TierDown where
        there was none yet, or where its server cannot be spoken to."""
        mode, link = self._modes.get(tier), self._links[tier]
        # what a mount says of itself may change while it is connected
        if mode is not None and mode.risen == link.risen and self._profiles[tier] is link.profile:
            return mode
        # until its server is asked anew, it takes writes or not as it last did
        return self.decide(tier, mount=mode is not None and mode.mount)

    def decide(self, tier: str, *, mount: bool) -> TierMode:
        """Decide the mode for the tier's connection of now, whose server takes no writes and is a `mount`, or is none.
        Raises as `of` does."""
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
        """Whether `tier` is only read: by the file, or by what its server was last seen to be."""
        mode = self._modes.get(tier.name)
        return tier.mount or (mode is not None and mode.mount)


def identity_of(tier: Tier, profile: Profile) -> str:
    """Who is behind a tier: as its store says, else what it is called and how it is reached, without what may be
    secret."""
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
