"""The settings of a federation, frozen: the values of the file, or their defaults."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["working", "episodic", "semantic", "procedural"]
Ranking = Literal["tier", "lexical", "vector"]
Overflow = Literal["spill", "drop"]
_DAY = 86_400.0
PRIVATE = "private"  # in a principal's `write`: its own records in the tiers that are not shared


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """A client that may call over HTTP: a request with the token of this digest acts as this owner."""

    owner: str
    token_sha256: str  # lower-case hex
    write: tuple[str, ...] | None = None  # shared tiers, and PRIVATE; None: the file does not set it
    admin: bool = False  # may read all owners' records, and act for any owner


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    http: str | None = None  # host:port; None is stdio
    origins: tuple[str, ...] = ()  # lower-case
    hosts: tuple[str, ...] = ()  # lower-case; accepted in the Host header, besides the names of the loopback
    principals: tuple[Principal, ...] = ()
    timeout: float = 60.0  # seconds for a whole request; a pass that a request starts has no such limit
    max_requests: int = 256  # in progress at once, over all transports
    max_connections: int = 1024
    max_held: int = 256 * 2**20  # bytes of request bodies held at once, over all requests; at least limits.max_message
    max_header: int = 32 * 2**10  # bytes in a request's head
    idle_timeout: float = 30.0  # seconds


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    fusion: Literal["rrf"] = "rrf"
    k: int = 60
    rankings: tuple[Ranking, ...] = ("tier", "lexical", "vector")
    candidates: int = 3  # the router requests limit x this from each tier
    limit: int = 8  # if the caller gives none
    max_limit: int = 1000


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    background: bool = True  # False: passes run only on memory/consolidate and memory/session/close
    forgotten_for: float = 30 * _DAY  # seconds that a tombstone is kept after its sweep


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_records_per_call: int = 1000
    max_content_length: int = 1_000_000  # characters
    max_message: int = 64 * 2**20  # bytes


class Events(msgspec.Struct, frozen=True, kw_only=True):
    retained: int = 1024  # the number of newest events kept for clients that poll (§4.12)


class Summarizer(msgspec.Struct, frozen=True, kw_only=True):
    """The model that writes summaries, behind an OpenAI-compatible endpoint."""

    url: str  # the base address, to which /chat/completions is appended; it holds no password
    model: str
    token: str = ""  # printable ASCII without spaces; empty if the endpoint needs none
    timeout: float = 60.0  # seconds
    max_input: int = 100_000  # characters of one request, at most

    def __repr__(self) -> str:  # without the token
        return f"Summarizer({self.url!r}, model={self.model!r})"


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """One tier. Exactly one of `command` and `url` is set."""

    name: str
    kind: Kind
    command: tuple[str, ...] | None = None
    env: Mapping[str, str] = {}
    cwd: Path  # absolute
    url: str | None = None  # it holds no password, but may hold a key
    headers: Mapping[str, str] = {}  # with the environment's variables filled in
    ca_file: Path | None = None  # absolute; PEM with the certificates to trust instead of the usual authorities
    http2: bool = False
    remote_tier: str | None = None  # the tier to name in calls, if the server has several
    capacity: int | None = None  # records in a bucket; None is unbounded
    per_session: bool = False
    spill_to: str | None = None
    distil: bool = False  # records that spill from here are rewritten on their way
    overflow: Overflow = "spill"
    promote_to: str | None = None
    promote_after: int | None = None  # accesses
    half_life: float | None = None  # seconds; None is no decay
    required: bool = False
    shared: bool = False
    may_publish: bool = False
    mount: bool = False
    weight: float = 1.0
    timeout: float = 5.0  # seconds
    max_calls: int = 256  # calls in progress at once for clients' requests; see tiers.concurrency

    def __repr__(self) -> str:  # the headers and the environment hold tokens
        return f"Tier({self.name!r}, kind={self.kind!r}, mount={self.mount})"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    name: str = "federation"
    path: Path | None = None  # the file, if there is one; absolute
    state: Path  # absolute
    serve: Serve = Serve()
    recall: Recall = Recall()
    policy: Policy = Policy()
    limits: Limits = Limits()
    events: Events = Events()
    summarizer: Summarizer | None = None  # None: summaries are extractive
    tiers: tuple[Tier, ...]  # in the file's order
    token_variables: frozenset[str] = frozenset()  # the environment variables that the file names as tokens

    def tier(self, name: str) -> Tier:
        """Return the tier of that name; raise KeyError if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    @property
    def managed(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in self.tiers if not tier.mount)

    @property
    def working(self) -> Tier | None:
        """The tier for writes that name none: the working tier, else the first managed one, if there is any."""
        managed = self.managed
        return next((tier for tier in managed if tier.kind == "working"), managed[0] if managed else None)

    def child_environment(self, tier: Tier, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the tier's process: without the token variables, with the tier's own table."""
        inherited = {name: value for name, value in environ.items() if name not in self.token_variables}
        return {**inherited, **tier.env}
