"""Lifting: records on a server that promises less of them than the federation does. Pure.

Rules:
- a server that is not known to keep everything as it is given is told of the protocol's core only: id, content, role,
  group and metadata; and a vector, if it declares `embeddings`, so that it can search by it;
- what a record really is rides along in one reserved member of its metadata, as JSON text inside a string, which no
  codec alters. Beside it stands a plain copy of the caller's metadata, which serves `where` and is never read back;
  what some language could not take or give back is left out of it;
- a record that carries no rider was not written by a router, and is what its server says;
- a member of the reserved name in a caller's own metadata rides with the rest, and has no plain copy: it is never taken
  for a rider.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from router.a2m.equality import NULL, integer_of, number_atom, parse_where
from router.a2m.matching import FIELDS
from router.a2m.records import Draft, Record, vector_bytes, vector_from_bytes
from router.a2m.timestamps import parse
from router.a2m.vectors import MAX_WIDTH

RESERVED: Final = "a2m-router"
"""The member of a lifted record's metadata in which the rest of it rides."""

# every JSON parser tells these integers apart
_EXACT: Final = 2**53

# record fields that a lifted record shows to its server
_SHOWN: Final = frozenset({"content", "role", "group"})


Revision = Annotated[int, Meta(ge=0, le=2**62)]


class Rider(msgspec.Struct, omit_defaults=True):
    """What a server does not keep of a record, or not for certain; `embedding` is little-endian doubles in base64."""

    created_at: str
    metadata: Raw | UnsetType = UNSET
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    revision: Revision = 0
    uri: str | None = None
    media_type: str | None = None
    embedding: str | None = None


def lifted(draft: Draft, *, vector: bool, tier: str | None) -> Draft:
    """A complete record as a lesser server is told it.

    Args:
        vector: the server declares `embeddings`.
        tier: which of its tiers it goes to, by the server's own name.
    """
    assert draft.created_at is not None
    rider = Rider(
        created_at=draft.created_at,
        metadata=draft.metadata,
        owner=draft.owner,
        session=draft.session,
        key=draft.key,
        revision=draft.revision or 0,
        uri=draft.uri,
        media_type=draft.media_type,
        embedding=None if draft.embedding is None else b64encode(vector_bytes(draft.embedding)).decode("ascii"),
    )
    riding = Raw(msgspec.json.encode(msgspec.json.encode(rider).decode()))
    return Draft(
        id=draft.id,
        content=draft.content or "",
        role=draft.role,
        group=draft.group,
        metadata=Raw(msgspec.json.encode({**_plain(draft.metadata), RESERVED: riding})),
        embedding=draft.embedding if vector else None,
        tier=tier,
    )


def lowered(record: Record) -> Record:
    """A record as it was before it was lifted; one that never was is returned as its server tells it."""
    if record.metadata is UNSET:
        return record
    try:
        rider, vector = _riding(bytes(record.metadata))
    except ValueError:
        return record  # there is none, or it was altered, or is somebody else's: what its server says it is
    return Record(
        id=record.id,
        content=record.content,
        role=record.role,
        group=record.group,
        created_at=rider.created_at,
        metadata=rider.metadata,
        owner=rider.owner,
        session=rider.session,
        key=rider.key,
        revision=rider.revision,
        uri=rider.uri,
        media_type=rider.media_type,
        embedding=vector,
        score=record.score,
        similarity=record.similarity,
    )


def delegable(where: Mapping[str, Raw] | None) -> dict[str, Raw]:
    """The conditions of `where` that a lesser server may be asked to apply first: those that every server understands
    alike, on what it is shown. All of them are applied once more to what it answers."""
    if not where:
        return {}
    parsed = parse_where(where)
    return {
        name: where[name]
        for name, atoms in parsed.items()
        if (name in _SHOWN or _is_shown_member(name)) and all(map(_is_plain, atoms))
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


def _riding(metadata: bytes) -> tuple[Rider, list[float] | None]:
    """What rides along, and its vector. Raises ValueError unless it is what a router has written."""
    if RESERVED.encode() not in metadata:
        raise ValueError("there is no rider")
    rider = msgspec.json.decode(msgspec.json.decode(metadata, type=_Carrier).rider, type=Rider)
    parse(rider.created_at)
    if rider.metadata is not UNSET and not bytes(rider.metadata).startswith(b"{"):
        raise ValueError("metadata is an object")
    if rider.embedding is None:
        return rider, None
    packed = b64decode(rider.embedding, validate=True)
    if len(packed) % 8 or not 1 <= len(packed) // 8 <= MAX_WIDTH:
        raise ValueError("a vector is whole doubles, and not too many")
    vector = vector_from_bytes(packed)
    if not all(map(math.isfinite, vector)):
        raise ValueError("a vector is finite numbers")
    return rider, vector


class _Carrier(msgspec.Struct):
    rider: str = msgspec.field(name=RESERVED)


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
