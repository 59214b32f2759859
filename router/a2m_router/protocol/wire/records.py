"""Records (§3.1) as clients write them and servers return them, and the digest that a move must preserve.

Metadata is raw JSON from end to end: it is never decoded and encoded again, because every codec changes some of it.
"""

import hashlib
import struct
from array import array
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

Revision = Annotated[int, Meta(ge=0, le=2**62)]


class Draft(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A record as a caller writes it (§4.2). `created_at` and `revision` are for imports of older records."""

    id: str | None = None
    content: str | None = None
    created_at: str | None = None
    role: str | None = None
    metadata: Raw | UnsetType = UNSET
    group: str | None = None
    tier: str | None = None
    salience: Annotated[float, Meta(ge=0)] | None = None
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    revision: Revision | None = None
    embedding: list[float] | None = None
    uri: str | None = None
    media_type: str | None = None


class ConditionalDraft(Draft, kw_only=True, omit_defaults=True):
    """A draft with an extension of a2m-router: the write succeeds only if the page at its key has `if_revision`.

    None: only if there is no page at the key. UNSET: unconditionally.
    """

    if_revision: Revision | UnsetType | None = UNSET


class Record(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A record as a server returns it. An absent or null field is None; `metadata` is the JSON text as it was written.

    `similarity` is an extension: the exact similarity to the query's vector under the store's metric; higher is nearer.
    """

    id: str
    content: str
    created_at: str
    role: str | None = None
    metadata: Raw | UnsetType = UNSET
    group: str | None = None
    tier: str | None = None
    salience: float | None = None
    accessed_at: str | None = None
    access_count: int | None = None
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    revision: Revision | None = None
    embedding: list[float] | None = None
    uri: str | None = None
    media_type: str | None = None
    score: float | None = None
    similarity: float | None = None


class Riderless(Record):
    """A record with no rider, or with one that carries only metadata: all other fields are as the server sent them."""


def draft_of(record: Record) -> Draft:
    """Return the draft that recreates a record in any tier."""
    return Draft(
        id=record.id,
        content=record.content,
        created_at=record.created_at,
        role=record.role,
        metadata=record.metadata,
        group=record.group,
        salience=record.salience,
        owner=record.owner,
        session=record.session,
        key=record.key,
        revision=record.revision,
        embedding=record.embedding,
        uri=record.uri,
        media_type=record.media_type,
    )


def record_of(draft: Draft) -> Record:
    """Return the record of a complete draft, without access counts; the inverse of `draft_of`."""
    assert draft.id is not None
    assert draft.created_at is not None
    return Record(
        id=draft.id,
        content=draft.content or "",
        created_at=draft.created_at,
        role=draft.role,
        metadata=draft.metadata,
        group=draft.group,
        salience=draft.salience,
        owner=draft.owner,
        session=draft.session,
        key=draft.key,
        revision=draft.revision,
        embedding=draft.embedding,
        uri=draft.uri,
        media_type=draft.media_type,
    )


_ABSENT: Final = b"\x00"
_PRESENT: Final = b"\x01"


def digest(record: Record | Draft) -> bytes:
    """Return a 16-byte digest of every field that a move must not change: all but the tier and the router's counts.

    Covered: id, content, role, metadata (its bytes), group, owner, session, key, revision, uri, media_type, embedding
    (its bits) and created_at. An absent revision counts as 0, with and without a key.
    """
    state = hashlib.blake2b(digest_size=16)
    for text in (
        record.id,
        record.content or "",
        record.created_at,
        record.role,
        record.group,
        record.owner,
        record.session,
        record.key,
        record.uri,
        record.media_type,
    ):
        _feed(state, None if text is None else text.encode())
    state.update(struct.pack("<q", record.revision or 0))
    _feed(state, None if record.metadata is UNSET else bytes(record.metadata))
    _feed(state, None if record.embedding is None else vector_bytes(record.embedding))
    return state.digest()


def _feed(state: "hashlib.blake2b", field: bytes | None) -> None:
    # the length first, so that two different records never produce the same bytes
    if field is None:
        state.update(_ABSENT)
    else:
        state.update(_PRESENT + struct.pack("<q", len(field)))
        state.update(field)


def vector_bytes(vector: Sequence[float]) -> bytes:
    """Return a vector as little-endian doubles, exact to the bit."""
    packed = array("d", vector)
    if struct.pack("=d", 1.0) != struct.pack("<d", 1.0):  # pragma: no cover - big-endian machines
        packed.byteswap()
    return packed.tobytes()


def vector_from_bytes(packed: bytes) -> list[float]:
    """Return the vector of its bytes; the inverse of `vector_bytes`."""
    vector = array("d", packed)
    if struct.pack("=d", 1.0) != struct.pack("<d", 1.0):  # pragma: no cover - big-endian machines
        vector.byteswap()
    return vector.tolist()
