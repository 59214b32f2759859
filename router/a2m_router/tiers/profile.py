"""A server's description of itself (§4.1), as far as the router uses it."""

from collections.abc import Mapping
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from a2m_router.protocol.wire.capabilities import METHODS, PROTOCOL, speaks
from a2m_router.protocol.wire.jsonrpc import explain

# What a server must be able to do, and the fields that it must keep unchanged, to get records as they are.
_NATIVE: Final = frozenset({"core", "scopes", "sessions", "keys", "embeddings", "external"})
_KEPT: Final = frozenset({"created_at", "revision", "metadata", "embedding"})

_CORE_METHODS: Final = METHODS["core"]


class BadProfile(Exception):
    """The answer is not an A2M 0.1 `memory/describe` result. The message is one sentence that says why."""


class CannotServe(Exception):
    """A tier cannot be part of the federation. The message is a sentence that names it and says why."""


class Store(msgspec.Struct, frozen=True, kw_only=True):
    """What a2m-store declares beyond the protocol. Other servers declare nothing of it.

    identity: of the data, independent of its file or address.
    records: how many it holds.
    keeps: the fields that it stores exactly as given.
    pages: `memory/timeline` accepts `after` and `page`.
    similarity: `memory/recall` returns each hit's exact similarity.
    backup: it serves `store/backup`.
    federation, epoch: the federation that it belongs to, and the last epoch that a router sent; None before that. A
        store without an `epoch` field does not accept one.
    """

    identity: str | None = None
    records: int | None = None
    keeps: frozenset[str] = frozenset()
    pages: bool = False
    similarity: bool = False
    backup: bool = False
    federation: str | None = None
    epoch: str | UnsetType | None = UNSET


class RemoteTier(msgspec.Struct, frozen=True):
    """A tier of a server that has several (§4.7)."""

    name: str
    count: int
    kind: str | None = None


class Service(msgspec.Struct, frozen=True, kw_only=True):
    """The service behind a server, as a2m-rag declares it. Other servers declare none.

    status: "up", or "down" when it does not answer; `reason` then says why.
    """

    status: Literal["up", "down"] = "up"
    reason: str | None = None


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """A `memory/describe` result. A limit of None is not declared; `dimensions` is None until a vector fixes them."""

    protocol: str
    name: str
    capabilities: frozenset[str]
    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None
    dimensions: int | None = None
    metric: str | None = None
    metrics: frozenset[str] = frozenset()
    tiers: Mapping[str, RemoteTier] = {}
    store: Store = Store()
    service: Service = Service()

    @property
    def ailment(self) -> str | None:
        """Why the service behind the server does not answer; None if it does, as far as is known."""
        return None if self.service.status == "up" else self.service.reason or "the service behind it does not answer"

    @property
    def is_native(self) -> bool:
        """Whether the server does all that the federation promises and keeps records unchanged; if not, lift them."""
        store = self.store
        return (
            self.capabilities >= _NATIVE
            and "tiers" not in self.capabilities
            and store.keeps >= _KEPT
            and store.pages
            and store.identity is not None
        )

    @property
    def lacking(self) -> list[str]:
        """What the server lacks to be native, in the order of the specification; for display."""
        missing = [name for name in METHODS if name in _NATIVE - self.capabilities]
        altered = ", ".join(sorted(_KEPT - self.store.keeps))
        return [*missing, f"a promise to keep {altered} as given"] if altered else missing


def read_profile(raw: bytes | msgspec.Raw) -> Profile:
    """Return the profile in a `memory/describe` result. Raises BadProfile."""
    try:
        described = msgspec.json.decode(raw, type=_Described, strict=False)  # integers may come as 3.0
    except msgspec.MsgspecError as problem:
        where, sentence = explain(problem)
        raise BadProfile(f"memory/describe: {where or 'result'}: {sentence}") from None
    if not speaks(described.protocol):
        raise BadProfile(f"memory/describe: protocol: expected {PROTOCOL}, the server speaks {described.protocol!r}")
    if "core" not in described.capabilities:
        raise BadProfile("memory/describe: capabilities: 'core' is required of every server, and missing")
    missing = [] if described.methods is None else [name for name in _CORE_METHODS if name not in described.methods]
    if missing:
        raise BadProfile(f"memory/describe: methods: {', '.join(missing)} is of 'core', and missing")
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
        tiers={tier.name: tier for tier in described.tiers or ()} if "tiers" in described.capabilities else {},
        store=_extension(described.store, Store()),
        service=_extension(described.service, Service()),
    )


class _Limits(msgspec.Struct):
    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None


class _Embeddings(msgspec.Struct):
    metric: Literal["cosine", "dot", "l2"]
    dimensions: int | None = None
    metrics: list[str] | None = None


class _Described(msgspec.Struct):
    protocol: str
    name: str
    capabilities: frozenset[str]
    methods: frozenset[str] | None = None
    limits: _Limits | None = None
    tiers: list[RemoteTier] | None = None
    embeddings: _Embeddings | None = None
    store: Any = None
    service: Any = None


T = TypeVar("T")


def _extension(value: Any, otherwise: T) -> T:
    """Return what a server declares beyond the protocol; `otherwise` if there is nothing that can be decoded."""
    # the name is not part of the protocol: another server may use it for something else
    try:
        return msgspec.convert(value, type(otherwise))
    except msgspec.ValidationError:
        return otherwise
