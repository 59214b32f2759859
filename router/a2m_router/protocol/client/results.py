"""What a client gets back: the result of each method (§4) as small frozen values, with metadata decoded.

Servers are of all kinds: what a result need not hold may be missing or null, and what is not known here is ignored.
What is not as §4 has it raises BadAnswer, and nothing of such an answer is used.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw

from a2m_router.protocol.wire import records
from a2m_router.protocol.wire.capabilities import PROTOCOL, speaks
from a2m_router.protocol.wire.jsonrpc import explain


class BadAnswer(Exception):
    """A server's answer is not what §4 says; the sentence names the method and what is wrong with it."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One remembered thing (§3.1), as the server told it. None is a field that it did not tell.

    Attributes:
        created_at: RFC 3339, UTC, as it came: "2026-07-28T10:15:30.123Z"; "1970-01-01T00:00:00.000Z" of a record that
            is undated.
        metadata: decoded; empty where there is none.
        access_count: how often it has been recalled, `accessed_at` when last.
        revision: how often its key was rewritten.
        embedding: only where it was asked for.
        score: in a recall; compares with the others of the same answer and with nothing else (§5.3).
        similarity: an extension: the exact similarity to the query's vector, under the server's metric.
    """

    id: str
    content: str
    created_at: str
    role: str | None = None
    metadata: Mapping[str, Any] = {}
    group: str | None = None
    tier: str | None = None
    salience: float | None = None
    accessed_at: str | None = None
    access_count: int | None = None
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    revision: int | None = None
    embedding: tuple[float, ...] | None = None
    uri: str | None = None
    media_type: str | None = None
    score: float | None = None
    similarity: float | None = None


class Degraded(msgspec.Struct, frozen=True):
    """A tier that an answer had to do without, and why: an extension of federations."""

    tier: str
    reason: str


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """What recall and timeline found (§4.3, §4.4).

    Attributes:
        records: by descending score in a recall, by ascending `created_at` in a timeline.
        degraded: tiers that did not answer, or not with all that they hold; what is missing is not among the records.
        prompt: the records as text, where that was asked for and the server offers it (§4.16).
        prompt_ids: which records are in that text.
    """

    records: tuple[Record, ...]
    degraded: tuple[Degraded, ...] = ()
    prompt: str | None = None
    prompt_ids: tuple[str, ...] = ()


class DeclaredLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the server takes in one call (§4.1); None is not declared."""

    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier in the answer to describe (§4.7). `status`, `server`, `mount` and `reason` are told by a2m-router."""

    name: str
    count: int
    kind: str | None = None
    capacity: int | None = None
    spill_to: str | None = None
    promote_to: str | None = None
    shared: bool | None = None
    per_session: bool | None = None
    status: str | None = None
    server: str | None = None
    mount: bool | None = None
    reason: str | None = None


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """How vectors are compared (§3.7). `dimensions` is None until the first vector fixes it."""

    metric: str
    dimensions: int | None = None
    metrics: tuple[str, ...] | None = None
    model: str | None = None


class EventsOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Whether this connection can be notified of events (§4.13)."""

    push: bool = False


class SummarizeOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The model that summarizes, None where it is done without one (§4.15)."""

    model: str | None = None


class PromptOffer(msgspec.Struct, frozen=True, kw_only=True):
    """What text can be asked for (§4.16)."""

    styles: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    model: str | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a server says of itself (§4.1).

    Attributes:
        store: where a2m-router and a2m-store say what they do beyond the protocol; as it came, since another server may
            mean something else by it.
        service: how the service is that the server stands before: a2m-rag says `{"status": "up"}`, or "down" with a
            `reason`. An extension; another server may mean something else by it.
    """

    protocol: str
    name: str
    capabilities: frozenset[str]
    methods: tuple[str, ...] = ()
    limits: DeclaredLimits | None = None
    tiers: tuple[Tier, ...] | None = None
    embeddings: Embeddings | None = None
    events: EventsOffer | None = None
    summarize: SummarizeOffer | None = None
    prompt: PromptOffer | None = None
    store: Any = None
    service: Any = None

    @property
    def heeds_if_revision(self) -> bool:
        """Whether it writes a page only at the revision that its writer names; any other server ignores that."""
        return isinstance(self.store, dict) and self.store.get("if_revision") is True


class Consolidated(msgspec.Struct, frozen=True, kw_only=True):
    """What a consolidation did, in records, and how many each tier holds now (§4.7)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int] | None = None


class Closed(Consolidated, frozen=True, kw_only=True):
    """What closing a session did; `flushed` is how many records left the working tier (§4.11)."""

    closed: str
    flushed: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation (§4.10); `tiers` says how many of its records each tier holds. `owner` is an extension."""

    session: str
    records: int
    tiers: Mapping[str, int] | None = None
    opened_at: str | None = None
    touched_at: str | None = None
    owner: str | None = None


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """What happened after a cursor, oldest first (§4.12).

    Attributes:
        events: each with `kind` and `at` and what its kind has.
        cursor: what to ask with next time.
        more: there are more already.
        reset: some events before these are lost, since the server keeps only so many.
    """

    events: tuple[Mapping[str, Any], ...]
    cursor: str
    more: bool | None = None
    reset: bool | None = None


class Summarized(msgspec.Struct, frozen=True, kw_only=True):
    """The records that a summary was written as, how many records were read for it and how many written (§4.15)."""

    records: tuple[Record, ...]
    read: int
    written: int


T = TypeVar("T")


def read(method: str, raw: bytes | Raw, type: type[T]) -> T:
    """A result as `type`; an integer may come as 3.0. Raises BadAnswer naming the method and the place."""
    try:
        return msgspec.json.decode(raw, type=type, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        where, sentence = explain(problem) if isinstance(problem, msgspec.MsgspecError) else ("", str(problem))
        raise BadAnswer(
            f"{method}: the server's answer is not what it should be: {where or 'result'}: {sentence}"
        ) from None


def read_description(raw: bytes | Raw) -> Description:
    """The result of memory/describe. Raises BadAnswer, also for a server that speaks another version."""
    described = read("memory/describe", raw, Description)
    if not speaks(described.protocol):
        raise BadAnswer(f"memory/describe: the server speaks {described.protocol!r}, and this client {PROTOCOL!r}")
    return described


def read_found(method: str, raw: bytes | Raw) -> Recalled:
    """The result of recall or timeline. Raises BadAnswer."""
    found = read(method, raw, _Found)
    return Recalled(
        records=tuple(_decoded(method, record) for record in found.records),
        degraded=_degraded(found.degraded),
        prompt=found.prompt,
        prompt_ids=tuple(found.prompt_ids or ()),
    )


def read_fetched(raw: bytes | Raw) -> Record | None:
    """The result of memory/fetch. Raises BadAnswer."""
    record = read("memory/fetch", raw, _Fetched).record
    return None if record is None else _decoded("memory/fetch", record)


def read_summarized(raw: bytes | Raw) -> Summarized:
    """The result of memory/summarize. Raises BadAnswer."""
    method = "memory/summarize"
    summed = read(method, raw, _Summarized)
    written = tuple(_decoded(method, record) for record in summed.records)
    return Summarized(records=written, read=summed.read, written=summed.written)


class _Found(msgspec.Struct):
    records: list[records.Record]
    degraded: Any = None
    prompt: str | None = None
    prompt_ids: list[str] | None = None


class _Fetched(msgspec.Struct):
    record: records.Record | None


class _Summarized(msgspec.Struct):
    records: list[records.Record]
    read: int
    written: int


def _degraded(said: Any) -> tuple[Degraded, ...]:
    # the name is not the protocol's: another server may mean something else by it
    try:
        return msgspec.convert(said or (), tuple[Degraded, ...])
    except msgspec.ValidationError:
        return ()


def _decoded(method: str, record: records.Record) -> Record:
    fields = {name: getattr(record, name) for name in Record.__struct_fields__}
    fields["metadata"] = _metadata(method, record)
    fields["embedding"] = None if record.embedding is None else tuple(record.embedding)
    return Record(**fields)


def _metadata(method: str, record: records.Record) -> Mapping[str, Any]:
    if record.metadata is UNSET:
        return {}
    try:
        metadata = msgspec.json.decode(record.metadata)
    except msgspec.MsgspecError:
        # numbers that are no floats, such as 1e400, are still JSON
        metadata = json.loads(bytes(record.metadata), parse_int=_number)
    if not isinstance(metadata, dict | None):
        raise BadAnswer(f"{method}: the record {record.id!r}: metadata: expected an object")
    return metadata or {}


def _number(digits: str) -> int | float:
    # Python takes only so many digits for an integer
    return int(digits) if len(digits) < 4300 else float(digits)
