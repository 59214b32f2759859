"""What a tier says of itself (§4.1), as far as the router acts on it."""

from typing import Any

import msgspec

from router.a2m.capabilities import PROTOCOL, speaks
from router.a2m.jsonrpc import explain


class BadProfile(Exception):
    """The answer is no A2M 0.1 `memory/describe` result; the message is one sentence that says why."""


class CannotServe(Exception):
    """A tier that cannot be part of the federation, in a sentence that names it and says why."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """What our own store says beyond the protocol; of another server nothing of it is known.

    identity: of the data, whatever file or address it is reached by.
    records: how many it holds.
    keeps: the fields it stores as they are given, where the protocol lets a server set them.
    pages: `memory/timeline` takes `after` and `page`.
    similarity: `memory/recall` answers each hit's exact similarity.
    """

    identity: str | None = None
    records: int | None = None
    keeps: frozenset[str] = frozenset()
    pages: bool = False
    similarity: bool = False


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A `memory/describe` result. A limit that is None is not declared; so are dimensions until a vector fixes them."""

    protocol: str
    name: str
    capabilities: frozenset[str]
    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None
    dimensions: int | None = None
    metric: str | None = None
    metrics: frozenset[str] = frozenset()
    store: Store = Store()


def read_profile(raw: bytes | msgspec.Raw) -> Profile:
    """The profile in a `memory/describe` result. Raises BadProfile."""
    try:
        described = msgspec.json.decode(raw, type=_Described)
    except msgspec.MsgspecError as problem:
        where, sentence = explain(problem)
        raise BadProfile(f"memory/describe: {where or 'result'}: {sentence}") from None
    if not speaks(described.protocol):
        raise BadProfile(f"memory/describe: protocol: expected {PROTOCOL}, the server speaks {described.protocol!r}")
    if "core" not in described.capabilities:
        raise BadProfile("memory/describe: capabilities: 'core' is required of every server, and missing")
    if "embeddings" in described.capabilities and described.embeddings is None:
        raise BadProfile("memory/describe: embeddings: required of a server that declares them, and missing (§3.7)")
    limits = described.limits or _Limits()
    embeddings = described.embeddings if "embeddings" in described.capabilities else None
    return Profile(
        protocol=described.protocol,
        name=described.name,
        capabilities=described.capabilities,
        max_records_per_call=limits.max_records_per_call,
        max_recall_limit=limits.max_recall_limit,
        max_content_length=limits.max_content_length,
        dimensions=embeddings.dimensions if embeddings else None,
        metric=embeddings.metric if embeddings else None,
        metrics=frozenset(embeddings.metrics or [embeddings.metric]) if embeddings else frozenset(),
        store=_store(described.store),
    )


class _Limits(msgspec.Struct):
    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None


class _Embeddings(msgspec.Struct):
    metric: str
    dimensions: int | None = None
    metrics: list[str] | None = None


class _Described(msgspec.Struct):
    protocol: str
    name: str
    capabilities: frozenset[str]
    limits: _Limits | None = None
    embeddings: _Embeddings | None = None
    store: Any = None


def _store(said: Any) -> Store:
    # the name is not the protocol's: another server may mean something else by it
    try:
        return msgspec.convert(said, Store)
    except msgspec.ValidationError:
        return Store()
