"""Tests one record against a `where` (§5.2), for servers without an index. Pure.

The name of a record field tests that field; every other name tests a top-level member of metadata. Comparison is exact
JSON equality; null matches an absent value.
"""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Final

from msgspec import UNSET

from a2m_router.protocol.wire.equality import NULL, Where, atom, members, number_atom, text_atom, text_of
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import moment

_JSON_NULL: Final = b"null"


def matches(record: Record, where: Where, fields: Collection[str] | None = None) -> bool:
    """Return whether `record` meets every condition of `where`. Metadata is decoded only if a condition needs it.

    Args:
        fields: the names that stand for fields, for a server that does not declare all; by default all of FIELDS.
    """
    inner: dict[str, bytes] | None = None
    for name, atoms in where.items():
        if name in FIELDS and (fields is None or name in fields):
            if not FIELDS[name](record, atoms):
                return False
            continue
        if inner is None:
            inner = members(_metadata(record))
        if inner.get(name, NULL) not in atoms:
            return False
    return True


def _text(name: str) -> Callable[[Record, tuple[bytes, ...]], bool]:
    return lambda record, atoms: text_atom(getattr(record, name)) in atoms


def _number(name: str) -> Callable[[Record, tuple[bytes, ...]], bool]:
    def test(record: Record, atoms: tuple[bytes, ...]) -> bool:
        value = getattr(record, name)
        return (NULL if value is None else number_atom(value)) in atoms

    return test


def _moment(name: str) -> Callable[[Record, tuple[bytes, ...]], bool]:
    def test(record: Record, atoms: tuple[bytes, ...]) -> bool:
        value = getattr(record, name)
        if value is None:
            return NULL in atoms
        moment = _milliseconds(value)
        return any(moment is not None and moment == _milliseconds(text_of(each)) for each in atoms)

    return test


def _milliseconds(text: str | None) -> int | None:
    try:
        return None if text is None else moment(text)
    except ValueError:
        return None  # not a timestamp, so equal to none


def _whole_metadata(record: Record, atoms: tuple[bytes, ...]) -> bool:
    absent = record.metadata is UNSET or bytes(record.metadata) == _JSON_NULL
    return (NULL if absent else atom(_metadata(record))) in atoms


def _metadata(record: Record) -> bytes:
    text = b"{}" if record.metadata is UNSET else bytes(record.metadata)
    return b"{}" if text == _JSON_NULL else text


def _embedding(record: Record, atoms: tuple[bytes, ...]) -> bool:
    # vectors are not compared: only null, for a record without one, can match
    return record.embedding is None and NULL in atoms


FIELDS: Final[Mapping[str, Callable[[Record, tuple[bytes, ...]], bool]]] = MappingProxyType(
    {
        **{
            name: _text(name)
            for name in ("id", "content", "role", "group", "tier", "owner", "session", "key", "uri", "media_type")
        },
        **{name: _number(name) for name in ("salience", "access_count", "revision")},
        **{name: _moment(name) for name in ("created_at", "accessed_at")},
        "metadata": _whole_metadata,
        "embedding": _embedding,
    }
)
"""The names of record fields, and the test for each."""
