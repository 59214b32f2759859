"""The capability table (§2): which methods and which record fields each capability adds.

This is the only place with the protocol's names: servers declare names from it, and clients check names against it.
"""

from collections.abc import Iterable
from types import MappingProxyType
from typing import Final

PROTOCOL: Final = "a2m/0.1"

VERSION_HEADER: Final = "A2M-Protocol-Version"  # of every POST (§8.3.2)

METHODS: Final = MappingProxyType(
    {
        "core": (
            "memory/describe",
            "memory/remember",
            "memory/recall",
            "memory/timeline",
            "memory/forget",
        ),
        "tiers": ("memory/promote", "memory/consolidate"),
        "salience": ("memory/reinforce",),
        "scopes": (),
        "sessions": ("memory/session/list", "memory/session/close"),
        "keys": ("memory/fetch",),
        "embeddings": (),
        "external": (),
        "events": ("memory/events", "memory/events/subscribe", "memory/events/unsubscribe"),
        "summarize": ("memory/summarize",),
        "prompt": (),
    }
)

FIELDS: Final = MappingProxyType(
    {
        "core": ("id", "content", "created_at", "role", "metadata", "group"),
        "tiers": ("tier",),
        "salience": ("salience", "access_count", "accessed_at"),
        "scopes": ("owner",),
        "sessions": ("session",),
        "keys": ("key", "revision"),
        "embeddings": ("embedding",),
        "external": ("uri", "media_type"),
    }
)

CAPABILITY_OF: Final = MappingProxyType({m: capability for capability, ms in METHODS.items() for m in ms})


def methods_of(capabilities: Iterable[str]) -> list[str]:
    """Return the methods of a server that declares `capabilities`, in the order of the table."""
    declared = frozenset(capabilities)
    return [method for capability, methods in METHODS.items() if capability in declared for method in methods]


def speaks(protocol: str) -> bool:
    """Return whether a peer's `protocol` version is compatible (§4.1: while the major is 0, the minor must match)."""
    return protocol == PROTOCOL or protocol.startswith(PROTOCOL + ".")
