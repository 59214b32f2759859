"""The settings of a federation, frozen: what the file has said, or what holds where it says nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec

Kind = Literal["working", "episodic", "semantic", "procedural"]
Ranking = Literal["tier", "lexical", "vector"]
Overflow = Literal["spill", "drop"]
_DAY = 86_400.0
PRIVATE = "private"  # in a principal's `write`: what it owns, in the tiers that are not shared


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """Who may call over HTTP: whoever shows the token with this digest acts as this owner."""

    owner: str
    token_sha256: str  # lower-case hex
    write: tuple[str, ...] | None = None  # shared tiers, and PRIVATE; None says nothing
    admin: bool = False  # it sees all owners' records, and may name any owner


class Serve(msgspec.Struct, frozen=True, kw_only=True):
    http: str | None = None  # host:port; None is stdio
    origins: tuple[str, ...] = ()  # lower-case
    hosts: tuple[str, ...] = ()  # lower-case: what a request may name as its Host, beside what the loopback is called
    principals: tuple[Principal, ...] = ()
    timeout: float = 60.0  # seconds that a request may take all in all; passes that one asks for have no such bound
    max_requests: int = 256  # under way at once, whichever way they come
    max_connections: int = 1024
    max_held: int = 256 * 2**20  # bytes of request bodies held at once, over all requests; at least limits.max_message
    max_header: int = 32 * 2**10  # bytes in a request's head
    idle_timeout: float = 30.0  # seconds


class Recall(msgspec.Struct, frozen=True, kw_only=True):
    fusion: Literal["rrf"] = "rrf"
    k: int = 60
    rankings: tuple[Ranking, ...] = ("tier", "lexical", "vector")
    candidates: int = 3  # a tier is asked for limit x this
    limit: int = 8  # where the caller gives none
    max_limit: int = 1000


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    background: bool = True  # False: passes run only on memory/consolidate and memory/session/close
    forgotten_for: float = 30 * _DAY  # seconds a note of a forgotten id outlives its sweep


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    max_records_per_call: int = 1000
    max_content_length: int = 1_000_000  # characters
    max_message: int = 64 * 2**20  # bytes


class Events(msgspec.Struct, frozen=True, kw_only=True):
    retained: int = 1024  # the newest so many are kept for those who poll (§4.12)


class Summarizer(msgspec.Struct, frozen=True, kw_only=True):
    """The model that writes summaries, behind an OpenAI-compatible endpoint."""

    url: str  # the base address, to which /chat/completions is appended; it holds no password
    model: str
    token: str = ""  # printable ASCII without spaces; empty where the endpoint asks for none
    timeout: float = 60.0  # seconds
    max_input: int = 100_000  # characters handed over at most

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
    ca_file: Path | None = None  # absolute; PEM, with what to trust in place of the usual authorities
    http2: bool = False
    remote_tier: str | None = None  # the tier to name in calls, if the server behind has several
    capacity: int | None = None  # records in a bucket; None is unbounded
    per_session: bool = False
    spill_to: str | None = None
    distil: bool = False  # what spills from here is rewritten on its way
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
    max_calls: int = 256  # of clients' requests under way at once, at most; see tiers.room

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
        """The tier of that name; KeyError if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise KeyError(name)

    @property
    def managed(self) -> tuple[Tier, ...]:
        return tuple(tier for tier in self.tiers if not tier.mount)

    @property
    def working(self) -> Tier | None:
        """Where a write goes that names no tier: the working tier, else the first managed one, if there is any."""
        managed = self.managed
        return next((tier for tier in managed if tier.kind == "working"), managed[0] if managed else None)

    def child_environment(self, tier: Tier, environ: Mapping[str, str]) -> dict[str, str]:
        """What the tier's process inherits: no variable the file names as a token, then the tier's own table."""
        inherited = {name: value for name, value in environ.items() if name not in self.token_variables}
        return {**inherited, **tier.env}
