"""Lifting: records on a server that promises less of them than the federation does. Pure.

Rules:
- of what it is given, such a server must keep the id, the content, and one reserved member of the metadata; nothing
  else. All other fields, role and group among them, ride in that member, as JSON text inside a string, which no codec
  alters. They are read from there;
- the server is shown the protocol's core (role, group and a plain copy of the caller's metadata) and, if it declares
  `embeddings`, a vector, so that it can rank by them. What it adds to these, fills in, normalises or drops is ignored.
  Members that some language could not take or give back are left out of the plain copy;
- a record that carries no rider was not written by a router, and is what its server says;
- a rider without a version comes from a router before version 1: role and group did not ride yet, and are read from
  what the server answers. A rider of a later version than this router's is refused, and never taken for none;
- a member of the reserved name in a caller's own metadata rides with the rest, and has no plain copy: it is never taken
  for a rider. For its sake such metadata rides in a native tier, too; there nothing else of the record does.
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
"""The member of a lifted record's metadata in which the rest of it rides."""

# every JSON parser tells these integers apart
_EXACT: Final = 2**53

VERSION: Final = 1
"""The version of the riders that this router writes; it reads this one and those before."""

# record fields by which a server may select: of a managed record only the content is certain to be what it was given,
# of a mount's own record all of core
_KEPT: Final = frozenset({"content"})
_CORE: Final = frozenset({"content", "role", "group"})


class NewerRider(Exception):
    """A record that a later version of the router has written, which this one cannot read."""


class Origin(msgspec.Struct, frozen=True):
    """Who has written a record: the federation's id, and the epoch of the start of its router; None where it does not
    say, as before there was any."""

    federation: str | None = None
    epoch: str | None = None


_NOBODY: Final = Origin()


class Rider(msgspec.Struct, omit_defaults=True):
    """All of a record but its id and content, or its metadata alone; `embedding` is little-endian doubles in base64."""

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
    """A complete record as a lesser server is told it.

    Args:
        vector: the server declares `embeddings`.
        tier: which of its tiers it goes to, by the server's own name.
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
    """A complete record as a native tier is told it: as it is. Only metadata that has a member of the reserved name
    rides."""
    if draft.metadata is UNSET or not _mentions_rider(draft.metadata):
        return draft
    if RESERVED not in msgspec.json.decode(draft.metadata, type=dict[str, Raw]):
        return draft
    assert draft.created_at is not None
    rider = Rider(created_at=draft.created_at, version=VERSION, metadata_alone=True, metadata=draft.metadata)
    return msgspec.structs.replace(draft, metadata=_carrying(rider))


def unescaped(record: Record) -> Record:
    """The inverse of `escaped`. A record that was lifted when it was written there comes as a Lifted."""
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


class Told(msgspec.Struct, kw_only=True):
    """A record as a server of any kind answers it. Only what every server must keep has a type here: how a server
    writes a field that it was not asked to keep must not cost its whole answer."""

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
    """A record that a native tier holds as it was lifted; its fields are what that tier says."""


def lowered(told: Told, *, vector: bool) -> Record:
    """A record as it was before it was lifted; one that never was, as a Riderless, is what its server says of it: a
    field that is not as §3.1 has it counts as absent.

    Args:
        vector: the server declares `embeddings`; else what it calls a vector is none.

    Raises NewerRider.
    """
    return lowered_of(told, vector=vector)[0]


def lowered_of(told: Told, *, vector: bool) -> tuple[Record, Origin]:
    """As `lowered`, and who has written it, as far as that is known."""
    score, similarity = _field(told.score, float), _field(told.similarity, float)
    rider, embedding = None, None
    with suppress(ValueError):  # there is none, or it was altered, or is somebody else's
        rider, embedding = _riding(told.metadata)
    if rider is None or rider.metadata_alone:
        riderless = Riderless(
            id=told.id,
            content=told.content,
            created_at=normalised(_field(told.created_at, str) or "") or UNDATED,
            role=_field(told.role, str),
            metadata=_object(told.metadata) if rider is None else rider.metadata,
            group=_field(told.group, str),
            tier=_field(told.tier, str),
            salience=_field(told.salience, float),
            accessed_at=_field(told.accessed_at, str),
            access_count=_field(told.access_count, int),
            owner=_field(told.owner, str),
            session=_field(told.session, str),
            key=_field(told.key, str),
            revision=_field(told.revision, Revision),
            embedding=_field(told.embedding, list[float]) if vector else None,
            uri=_field(told.uri, str),
            media_type=_field(told.media_type, str),
            score=score,
            similarity=similarity,
        )
        return riderless, _NOBODY
    record = Record(
        id=told.id,
        content=told.content,
        created_at=rider.created_at,
        role=rider.role if rider.version else _field(told.role, str),
        group=rider.group if rider.version else _field(told.group, str),
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
    """Whether a record, as a server `answered` it, shows the plain copy of a caller's `metadata` as it was given, as
    JSON has it, beside whatever else; None where there is no plain copy, so that nothing can be seen. A field of the
    server's own hides a member of its name from every `where` (§5.2)."""
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
    """The conditions of `where` that a lesser server may be asked to apply first: those that every server understands
    alike, on what it is certain to hold. All of them are applied once more to what it answers.

    Args:
        metadata: the server was seen to keep the plain copies of metadata that it was given.
        mounted: the records are the server's own, and none of the router's.
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
    """Whether every language can hold these members and write them down again."""
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
    """What rides along, and its vector. Raises ValueError unless it is what a router has written, NewerRider where that
    was a later version."""
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
        raise ValueError("metadata is an object")
    return rider, None if rider.embedding is None else _vector(rider.embedding)


def _vector(text: str) -> list[float]:
    packed = b64decode(text, validate=True)
    if len(packed) % 8 or not 1 <= len(packed) // 8 <= MAX_WIDTH:
        raise ValueError("a vector is whole doubles, and not too many")
    vector = vector_from_bytes(packed)
    if not all(map(math.isfinite, vector)):
        raise ValueError("a vector is finite numbers")
    return vector


def _mentions_rider(metadata: Raw | UnsetType) -> bool:
    """Whether metadata may have a member of the reserved name, however its letters are written; to be asked of all."""
    text = b"" if metadata is UNSET else bytes(metadata)
    return RESERVED.encode() in text or b"\\u00" in text


def _carrying(rider: Rider) -> Raw:
    riding = Raw(msgspec.json.encode(msgspec.json.encode(rider).decode()))
    return Raw(msgspec.json.encode({**_plain(rider.metadata), RESERVED: riding}))


def _shown(text: str | None) -> str | None:
    """A text as a server is shown it; not every one takes a NUL."""
    return None if text is None or "\0" in text else text


class _Carrier(msgspec.Struct):
    rider: str = msgspec.field(name=RESERVED)


class _Versioned(msgspec.Struct):
    version: int = 0


def _field(raw: Raw | UnsetType, type: Any) -> Any:
    """A field as `type`, an integer in whichever form of a number; None where it is absent or something else."""
    if raw is UNSET or bytes(raw) == b"null":
        return None
    try:
        return msgspec.json.decode(raw, type=type, strict=bytes(raw).startswith(b'"'))
    except msgspec.MsgspecError:
        return None


def _object(raw: Raw | UnsetType) -> Raw | UnsetType:
    return raw if raw is not UNSET and bytes(raw).startswith(b"{") else UNSET


def _is_plain(atom: bytes) -> bool:
    """Whether every language compares this value as JSON does, at least never calls it different from itself."""
    if atom == NULL or atom[:1] in (b"a", b"o"):
        return False  # what is absent, and the order of names, are told in many ways
    if atom[:1] != b"n":
        return b"\0" not in atom
    integer = integer_of(atom)
    if integer is not None:
        return abs(integer) < _EXACT
    number = float(atom[1:])
    return abs(number) < _EXACT and number_atom(number) == atom
