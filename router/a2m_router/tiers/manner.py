"""How a tier's server is spoken to, and who it is: by what it says of itself, and by what the file says of the tier."""

import hashlib
from urllib.parse import urlsplit

import msgspec

from a2m_router.config.settings import Tier
from a2m_router.tiers.profile import CannotServe, Profile


class Manner(msgspec.Struct, frozen=True):
    """How records and questions are put to one server.

    native: it is told records as they are; else they are lifted.
    vectors: it searches by vector itself.
    remote: the name of the one of its own tiers that is meant; None where it has none, or all are meant.
    """

    native: bool
    vectors: bool
    remote: str | None = None


def manner_of(tier: Tier, profile: Profile) -> Manner:
    """Raises CannotServe where the server has several tiers, and it cannot be told which one is meant.

    Over HTTP an owner is who shows the token (§6): what the router says of owners could not count there, so that
    records are lifted whatever the server declares.
    """
    return Manner(
        native=profile.is_native and tier.url is None and not tier.mount,
        vectors="embeddings" in profile.capabilities,
        remote=_remote(tier, profile),
    )


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
