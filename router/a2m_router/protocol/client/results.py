"""The result of each method (§4) as frozen values, with decoded metadata.

Any server may be at the other end: optional fields may be missing or null, and unknown ones are ignored. An answer that
is not as §4 describes raises BadAnswer, and no part of it is used.
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
    """A server's answer is not as §4 describes; the sentence names the method and the fault."""


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One record (§3.1), as the server returned it. A field that it did not return is None.

    Attributes:
        created_at: RFC 3339, UTC, unchanged: "2026-07-28T10:15:30.123Z"; "1970-01-01T00:00:00.000Z" for an undated
            record.
        metadata: decoded; empty if there is none.
        access_count: how often it was recalled; `accessed_at` is the last time.
        revision: how often its key was rewritten.
        embedding: only if the call requested it.
        score: in a recall; comparable only with other scores of the same answer (§5.3).
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
    """A tier that is missing from an answer, in whole or in part, and why: an extension of federations."""

    tier: str
    reason: str


class Recalled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of recall and timeline (§4.3, §4.4).

    Attributes:
        records: by descending score in a recall, by ascending `created_at` in a timeline.
        degraded: tiers that did not answer, or not completely; their missing records are not in `records`.
        prompt: the records as text, if the call requested it and the server offers it (§4.16).
        prompt_ids: the ids of the records in that text.
    """

    records: tuple[Record, ...]
    degraded: tuple[Degraded, ...] = ()
    prompt: str | None = None
    prompt_ids: tuple[str, ...] = ()


class DeclaredLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The server's limits for one call (§4.1); None is not declared."""

    max_records_per_call: int | None = None
    max_recall_limit: int | None = None
    max_content_length: int | None = None


class Tier(msgspec.Struct, frozen=True, kw_only=True):
    """A tier in the answer to describe (§4.7). Extensions of a2m-router: `status`, `server`, `mount` and `reason`."""

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
    """The model that summarizes; None if the server summarizes without one (§4.15)."""

    model: str | None = None


class PromptOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The kinds of text that the server can render (§4.16)."""

    styles: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    model: str | None = None


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """A server's description of itself (§4.1).

    Attributes:
        store: the extensions of a2m-router and a2m-store; not decoded further, since other servers may use the name for
            something else.
        service: the state of the service behind the server: a2m-rag sends `{"status": "up"}`, or "down" with a
            `reason`. An extension; other servers may use the name for something else.
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
        """Whether the server supports `if_revision` on writes; other servers ignore it."""
        return isinstance(self.store, dict) and self.store.get("if_revision") is True


class Consolidated(msgspec.Struct, frozen=True, kw_only=True):
    """How many records a consolidation changed, and how many each tier holds now (§4.7)."""

    moved: int
    promoted: int
    dropped: int
    summarized: int
    counts: Mapping[str, int] | None = None


class Closed(Consolidated, frozen=True, kw_only=True):
    """The result of closing a session; `flushed` is how many records left the working tier (§4.11)."""

    closed: str
    flushed: int


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """A conversation (§4.10); `tiers` has the number of its records in each tier. `owner` is an extension."""

    session: str
    records: int
    tiers: Mapping[str, int] | None = None
    opened_at: str | None = None
    touched_at: str | None = None
    owner: str | None = None


class Events(msgspec.Struct, frozen=True, kw_only=True):
    """The events after a cursor, oldest first (§4.12).

    Attributes:
        events: each with `kind`, `at` and the fields of its kind.
        cursor: the cursor for the next call.
        more: whether more events are available now.
        reset: whether events before these are lost, since the server keeps only a limited number.
    """

    events: tuple[Mapping[str, Any], ...]
    cursor: str
    more: bool | None = None
    reset: bool | None = None


class Summarized(msgspec.Struct, frozen=True, kw_only=True):
    """A summary: its records, how many records were read for it, and how many were written (§4.15)."""

    records: tuple[Record, ...]
    read: int
    written: int


T = TypeVar("T")


def read(method: str, raw: bytes | Raw, type: type[T]) -> T:
    """Return a result as `type`; an integer may come as 3.0. Raise BadAnswer with the method and the place."""
    try:
        return msgspec.json.decode(raw, type=type, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as problem:
        where, sentence = explain(problem) if isinstance(problem, msgspec.MsgspecError) else ("", str(problem))
        raise BadAnswer(f"{method}: the server's answer is not valid: {where or 'result'}: {sentence}") from None


def read_description(raw: bytes | Raw) -> Description:
    """Return the result of memory/describe; raise BadAnswer, also if the server has another protocol version."""
    described = read("memory/describe", raw, Description)
    if not speaks(described.protocol):
        raise BadAnswer(f"memory/describe: the server speaks {described.protocol!r}, and this client {PROTOCOL!r}")
    return described


def read_found(method: str, raw: bytes | Raw) -> Recalled:
    """Return the result of recall or timeline. Raises BadAnswer."""
    found = read(method, raw, _Found)
    return Recalled(
        records=tuple(_decoded(method, record) for record in found.records),
        degraded=_degraded(found.degraded),
        prompt=found.prompt,
        prompt_ids=tuple(found.prompt_ids or ()),
    )


def read_fetched(raw: bytes | Raw) -> Record | None:
    """Return the result of memory/fetch. Raises BadAnswer."""
    record = read("memory/fetch", raw, _Fetched).record
    return None if record is None else _decoded("memory/fetch", record)


def read_summarized(raw: bytes | Raw) -> Summarized:
    """Return the result of memory/summarize. Raises BadAnswer."""
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


def _degraded(value: Any) -> tuple[Degraded, ...]:
    # the field is not the protocol's: other servers may use the name for something else
    try:
        return msgspec.convert(value or (), tuple[Degraded, ...])
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
        # numbers beyond a float's range, such as 1e400, are valid JSON
        metadata = json.loads(bytes(record.metadata), parse_int=_number)
    if not isinstance(metadata, dict | None):
        raise BadAnswer(f"{method}: the record {record.id!r}: metadata: expected an object")
    return metadata or {}


def _number(digits: str) -> int | float:
    # int() rejects a text of more than 4300 digits
    return int(digits) if len(digits) < 4300 else float(digits)
