"""Lifting: how a server that promises less than the federation holds complete records. Pure.

Rules:
- such a server must keep three things of a record: the id, the content, and one reserved member of the metadata. All
  other fields, role and group among them, are packed into that member, the rider: JSON text inside a string, which no
  codec changes. The router reads them from there;
- the server also gets the protocol's core (role, group and a plain copy of the caller's metadata) and, if it declares
  `embeddings`, a vector, so that it can rank by them. The router ignores what the server adds, fills in, normalises or
  drops there. The plain copy omits members that some programming language cannot read and write back;
- a record without a rider was not written by a router: its fields are what its server returns;
- a rider without a version comes from a router before version 1. Role and group were not in it yet, so they are read
  from the server's result. A rider of a later version than this router's is rejected, not treated as missing;
- if a caller's own metadata has a member of the reserved name, that member is packed with the rest and has no plain
  copy, so it is never taken for a rider. In a native tier such metadata is packed, too, and no other field.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.equality import NULL, integer_of, members, number_atom, parse_where
from a2m_router.protocol.wire.matching import FIELDS
from a2m_router.protocol.wire.records import Draft, Record, Revision, Riderless, vector_bytes, vector_from_bytes
from a2m_router.protocol.wire.timestamps import UNDATED, normalised, parse
from a2m_router.protocol.wire.vectors import MAX_WIDTH

RESERVED: Final = "a2m-router"
"""The member of a lifted record's metadata that holds the rider."""

# every JSON parser distinguishes integers below this
_EXACT: Final = 2**53

VERSION: Final = 1
"""The version of the riders that this router writes; it reads this one and earlier ones."""

# The record fields by which a server may select. Of a managed record only the content is certain to be kept; of a
# mount's own record all of core is.
_KEPT: Final = frozenset({"content"})
_CORE: Final = frozenset({"content", "role", "group"})


class NewerRider(Exception):
    """A record was written by a later version of the router, and this version cannot read it."""


class Origin(msgspec.Struct, frozen=True):
    """The writer of a record: the federation's id, and the epoch of its router; None if the record does not say."""

    federation: str | None = None
    epoch: str | None = None


_NOBODY: Final = Origin()


class Rider(msgspec.Struct, omit_defaults=True):
    """All of a record except id and content, or its metadata alone; `embedding` is little-endian doubles in base64."""

    created_at: str
    version: int = 0
    metadata_alone: bool = False
    role: str | None = None
    group: str | None = None
    metadata: Raw | UnsetType = UNSET
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    revision: Revision = 0
    uri: str | None = None
    media_type: str | None = None
    embedding: str | None = None
    federation: str | None = None
    epoch: str | None = None


def lifted(draft: Draft, *, vector: bool, tier: str | None, origin: Origin | None = None) -> Draft:
    """Return a complete record in the form for a lifted server.

    Args:
        vector: the server declares `embeddings`.
        tier: the server's own tier that the record goes to, by the server's name for it.
        origin: who writes it.
    """
    assert draft.created_at is not None
    rider = Rider(
        created_at=draft.created_at,
        version=VERSION,
        role=draft.role,
        group=draft.group,
        metadata=draft.metadata,
        owner=draft.owner,
        session=draft.session,
        key=draft.key,
        revision=draft.revision or 0,
        uri=draft.uri,
        media_type=draft.media_type,
        embedding=None if draft.embedding is None else b64encode(vector_bytes(draft.embedding)).decode("ascii"),
        federation=None if origin is None else origin.federation,
        epoch=None if origin is None else origin.epoch,
    )
    return Draft(
        id=draft.id,
        content=draft.content or "",
        role=_shown(draft.role),
        group=_shown(draft.group),
        metadata=_carrying(rider),
        embedding=draft.embedding if vector else None,
        tier=tier,
    )


def escaped(draft: Draft) -> Draft:
    """Return a complete record in the form for a native tier: unchanged, except metadata with the reserved name.

    Such metadata is packed into a rider.
    """
    if draft.metadata is UNSET or not _mentions_rider(draft.metadata):
        return draft
    if RESERVED not in msgspec.json.decode(draft.metadata, type=dict[str, Raw]):
        return draft
    assert draft.created_at is not None
    rider = Rider(created_at=draft.created_at, version=VERSION, metadata_alone=True, metadata=draft.metadata)
    return msgspec.structs.replace(draft, metadata=_carrying(rider))


def unescaped(record: Record) -> Record:
    """Return the record that `escaped` was given. A record that was written there lifted is returned as a Lifted."""
    if not _mentions_rider(record.metadata):
        return record
    try:
        rider, _ = _riding(record.metadata)
    except ValueError:
        return record
    except NewerRider:
        rider = None
    if rider is None or not rider.metadata_alone:
        return Lifted(**msgspec.structs.asdict(record))
    return msgspec.structs.replace(record, metadata=rider.metadata)


class ServerRecord(msgspec.Struct, kw_only=True):
    """A record as any server returns it.

    Only the fields that every server must keep have a type here. So a field that a server need not keep cannot make
    its whole result invalid.
    """

    id: str
    content: str
    metadata: Raw | UnsetType = UNSET
    created_at: Raw | UnsetType = UNSET
    role: Raw | UnsetType = UNSET
    group: Raw | UnsetType = UNSET
    tier: Raw | UnsetType = UNSET
    salience: Raw | UnsetType = UNSET
    accessed_at: Raw | UnsetType = UNSET
    access_count: Raw | UnsetType = UNSET
    owner: Raw | UnsetType = UNSET
    session: Raw | UnsetType = UNSET
    key: Raw | UnsetType = UNSET
    revision: Raw | UnsetType = UNSET
    embedding: Raw | UnsetType = UNSET
    uri: Raw | UnsetType = UNSET
    media_type: Raw | UnsetType = UNSET
    score: Raw | UnsetType = UNSET
    similarity: Raw | UnsetType = UNSET


class Lifted(Record):
    """A record that a native tier holds in lifted form; its fields are not lowered."""


def lowered(received: ServerRecord, *, vector: bool) -> Record:
    """Return a record as it was before it was lifted; a record without a rider as a Riderless with its server's fields.

    A field of a Riderless that violates §3.1 counts as absent.

    Args:
        vector: the server declares `embeddings`; otherwise its `embedding` field is ignored.

    Raises:
        NewerRider: a later version of the router has written the record.
    """
    return lowered_of(received, vector=vector)[0]


def lowered_of(received: ServerRecord, *, vector: bool) -> tuple[Record, Origin]:
    """Return what `lowered` returns, and who has written the record, as far as that is known."""
    score, similarity = _field(received.score, float), _field(received.similarity, float)
    rider, embedding = None, None
    with suppress(ValueError):  # there is no rider, it was changed, or another program uses the name
        rider, embedding = _riding(received.metadata)
    if rider is None or rider.metadata_alone:
        riderless = Riderless(
            id=received.id,
            content=received.content,
            created_at=normalised(_field(received.created_at, str) or "") or UNDATED,
            role=_field(received.role, str),
            metadata=_object(received.metadata) if rider is None else rider.metadata,
            group=_field(received.group, str),
            tier=_field(received.tier, str),
            salience=_field(received.salience, float),
            accessed_at=_field(received.accessed_at, str),
            access_count=_field(received.access_count, int),
            owner=_field(received.owner, str),
            session=_field(received.session, str),
            key=_field(received.key, str),
            revision=_field(received.revision, Revision),
            embedding=_field(received.embedding, list[float]) if vector else None,
            uri=_field(received.uri, str),
            media_type=_field(received.media_type, str),
            score=score,
            similarity=similarity,
        )
        return riderless, _NOBODY
    record = Record(
        id=received.id,
        content=received.content,
        created_at=rider.created_at,
        role=rider.role if rider.version else _field(received.role, str),
        group=rider.group if rider.version else _field(received.group, str),
        metadata=rider.metadata,
        owner=rider.owner,
        session=rider.session,
        key=rider.key,
        revision=rider.revision,
        uri=rider.uri,
        media_type=rider.media_type,
        embedding=embedding,
        score=score,
        similarity=similarity,
    )
    return record, Origin(rider.federation, rider.epoch)


def shows_metadata(answered: Raw, metadata: Raw | UnsetType) -> bool | None:
    """Return whether a record in a server's result has the plain copy of the caller's `metadata` unchanged.

    Values are compared as JSON; other members may stand beside them. A further field of the server hides the member of
    the same name from every `where` (§5.2), so it counts as a change. Returns None if there is no plain copy.
    """
    given = _plain(metadata)
    if not given:
        return None
    fields = msgspec.json.decode(answered, type=dict[str, Raw])
    shown = _object(fields.get("metadata", UNSET))
    if shown is UNSET or not fields.keys().isdisjoint(given.keys() - FIELDS.keys()):
        return False
    atoms = members(bytes(shown))
    return all(atoms.get(name) == atom for name, atom in members(msgspec.json.encode(given)).items())


def delegable(where: Mapping[str, Raw] | None, *, metadata: bool, mounted: bool = False) -> dict[str, Raw]:
    """Return the conditions of `where` that a lifted server or a mount may apply first.

    Every server understands these alike, on fields that it is certain to hold. The router applies all conditions again
    to the result.

    Args:
        metadata: the server was seen to keep the plain copies of metadata unchanged.
        mounted: the records are the server's own, not the router's.
    """
    if not where:
        return {}
    fields = _CORE if mounted else _KEPT
    parsed = parse_where(where)
    return {
        name: where[name]
        for name, atoms in parsed.items()
        if (name in fields or (metadata and _is_shown_member(name))) and all(map(_is_plain, atoms))
    }


def _is_shown_member(name: str) -> bool:
    return name not in FIELDS and name != RESERVED and "\0" not in name


def _plain(metadata: Raw | UnsetType) -> dict[str, Raw]:
    if metadata is UNSET:
        return {}
    members = msgspec.json.decode(metadata, type=dict[str, Raw])
    return {name: value for name, value in members.items() if name != RESERVED and _is_common({name: value})}


def _is_common(members: dict[str, Raw]) -> bool:
    """Return whether every programming language can read these members and write them back."""
    try:
        waiting: list[Any] = [msgspec.json.decode(msgspec.json.encode(members))]
    except msgspec.MsgspecError:
        return False  # a number that no double can hold
    while waiting:
        match waiting.pop():
            case dict() as inner:
                waiting += [*inner, *inner.values()]
            case list() as inner:
                waiting += inner
            case str() as text if "\0" in text:
                return False
            case int() as number if abs(number) >= _EXACT:
                return False
    return True


def _riding(metadata: Raw | UnsetType) -> tuple[Rider, list[float] | None]:
    """Return the rider and its vector.

    Raises ValueError if there is no rider that a router has written, and NewerRider for one of a later version.
    """
    if metadata is UNSET or not _mentions_rider(metadata):
        raise ValueError("there is no rider")
    packed = msgspec.json.decode(metadata, type=_Carrier).rider
    version = msgspec.json.decode(packed, type=_Versioned).version
    if version > VERSION:
        raise NewerRider(
            f"holds records of a later version of a2m-router (riders of version {version}, this one reads up to "
            f"{VERSION})"
        )
    rider = msgspec.json.decode(packed, type=Rider)
    parse(rider.created_at)
    if rider.metadata is not UNSET and not bytes(rider.metadata).startswith(b"{"):
        raise ValueError("expected metadata to be an object")
    return rider, None if rider.embedding is None else _vector(rider.embedding)


def _vector(text: str) -> list[float]:
    packed = b64decode(text, validate=True)
    if len(packed) % 8 or not 1 <= len(packed) // 8 <= MAX_WIDTH:
        raise ValueError(f"expected a vector of 1 to {MAX_WIDTH} doubles")
    vector = vector_from_bytes(packed)
    if not all(map(math.isfinite, vector)):
        raise ValueError("expected a vector of finite numbers")
    return vector


def _mentions_rider(metadata: Raw | UnsetType) -> bool:
    """Return whether metadata may have a member of the reserved name, in any JSON spelling. It is a fast first test."""
    text = b"" if metadata is UNSET else bytes(metadata)
    return RESERVED.encode() in text or b"\\u00" in text


def _carrying(rider: Rider) -> Raw:
    riding = Raw(msgspec.json.encode(msgspec.json.encode(rider).decode()))
    return Raw(msgspec.json.encode({**_plain(rider.metadata), RESERVED: riding}))


def _shown(text: str | None) -> str | None:
    """Return a text in the form that a server gets; None for a text with a NUL, which not every server accepts."""
    return None if text is None or "\0" in text else text


class _Carrier(msgspec.Struct):
    rider: str = msgspec.field(name=RESERVED)


class _Versioned(msgspec.Struct):
    version: int = 0


def _field(raw: Raw | UnsetType, type: Any) -> Any:
    """Return a field as `type`; None if it is absent or of another type. An integer may have any form of a number."""
    if raw is UNSET or bytes(raw) == b"null":
        return None
    try:
        return msgspec.json.decode(raw, type=type, strict=bytes(raw).startswith(b'"'))
    except msgspec.MsgspecError:
        return None


def _object(raw: Raw | UnsetType) -> Raw | UnsetType:
    return raw if raw is not UNSET and bytes(raw).startswith(b"{") else UNSET


def _is_plain(atom: bytes) -> bool:
    """Return whether every programming language finds this value equal to itself, as JSON does."""
    if atom == NULL or atom[:1] in (b"a", b"o"):
        return False  # servers differ in how they return an absent value, and the order of names
    if atom[:1] != b"n":
        return b"\0" not in atom
    integer = integer_of(atom)
    if integer is not None:
        return abs(integer) < _EXACT
    number = float(atom[1:])
    return abs(number) < _EXACT and number_atom(number) == atom
