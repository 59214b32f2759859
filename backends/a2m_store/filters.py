"""`where`, `key_prefix` and the scope of a read, compiled to SQL over the table `record`. Pure.

Rules:
- the name of a declared record field tests that field. Every other name tests a top-level member of metadata (§5.2);
- values are compared by exact JSON equality;
- a condition that no record can meet is `0`;
- values are always bound. Several values are bound as one list, so a statement's text does not depend on their number.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeAlias

import msgspec

from a2m_router.protocol.wire.equality import NULL, Where, integer_of, number_atom, text_of
from a2m_router.protocol.wire.timestamps import moment

Value: TypeAlias = str | int | float | bytes | None

# The index holds a longer atom or name as its hash. The hash is one byte longer than this, so no plain text equals it.
_LONGEST: Final = 63


class SqlCondition(msgspec.Struct, frozen=True):
    """A piece of SQL, and the values bound to it."""

    sql: str
    values: tuple[Value, ...] = ()


class Filter(msgspec.Struct, frozen=True):
    """The filter of a read: all `conditions` hold and, if `owner` is given, the record's owner is that or none (§6)."""

    conditions: tuple[SqlCondition, ...] = ()
    owner: str | None = None

    @property
    def condition(self) -> SqlCondition | None:
        """The whole filter; None if every record passes."""
        scope = (
            () if self.owner is None else (SqlCondition("(record.owner = ? OR record.owner IS NULL)", (self.owner,)),)
        )
        whole = self.conditions + scope
        return _all(whole) if whole else None

    @property
    def arms(self) -> list[SqlCondition]:
        """The filter as disjoint parts, one for each owner: an index holds each part in order of time."""
        if self.owner is None:
            return [_all(self.conditions)]
        owners = (SqlCondition("record.owner = ?", (self.owner,)), SqlCondition("record.owner IS NULL"))
        return [_all((owner, *self.conditions)) for owner in owners]


def compiled(where: Where, fields: frozenset[str]) -> tuple[SqlCondition, ...]:
    """Return one condition for each name of `where`; `fields` are the declared record fields."""
    return tuple(
        _FIELDS[name](atoms) if name in fields else _member_is(name, atoms) for name, atoms in sorted(where.items())
    )


def any_id(ids: Sequence[str]) -> SqlCondition:
    """Return the condition that the record's id is one of `ids`."""
    return _any("record.id", ids)


def beneath(key_prefix: str) -> SqlCondition:
    """Return the condition that the key is `key_prefix` or beneath it.

    `a/b` selects `a/b` and `a/b/c`, but not `a/bc`. The empty prefix selects every key.
    """
    if not key_prefix:
        return SqlCondition("record.key IS NOT NULL")
    folder = key_prefix.removesuffix("/")
    # "0" is the character after "/": the keys between the two are those that begin with `folder/`
    inside = SqlCondition("(record.key >= ? AND record.key < ?)", (folder + "/", folder + "0"))
    return inside if key_prefix.endswith("/") else _either([SqlCondition("record.key = ?", (key_prefix,)), inside])


def short(text: bytes) -> bytes:
    """Return a name or an atom as the index of metadata holds it."""
    if len(text) <= _LONGEST:
        return text
    return hashlib.blake2b(text, digest_size=_LONGEST + 1).digest()


def _text(column: str) -> Callable[[Sequence[bytes]], SqlCondition]:
    return lambda atoms: _test(column, atoms, text_of)


def _moment(column: str) -> Callable[[Sequence[bytes]], SqlCondition]:
    def milliseconds(atom: bytes) -> int | None:
        try:
            return moment(text_of(atom) or "")
        except ValueError:
            return None  # no record has such a time

    return lambda atoms: _test(column, atoms, milliseconds)


def _integer(column: str) -> Callable[[Sequence[bytes]], SqlCondition]:
    return lambda atoms: _test(column, atoms, integer_of)


def _float_of(atom: bytes) -> float | None:
    if atom[:1] != b"n":
        return None
    try:
        number = float(atom[1:])
    except ValueError:
        return None
    # a number between two floats equals neither of them
    return number if number - number == 0 and number_atom(number) == atom else None


def _metadata(atoms: Sequence[bytes]) -> SqlCondition:
    # few filters name the whole object, so it has no index: each row's text is read
    present = [atom for atom in atoms if atom != NULL]
    return _either([_any("json_atom(record.metadata)", present), *_absent("record.metadata", atoms)])


def _embedding(atoms: Sequence[bytes]) -> SqlCondition:
    # vectors are not compared: a filter can only select the records that have none
    return SqlCondition("record.seq NOT IN (SELECT record FROM vector)") if NULL in atoms else SqlCondition("0")


_FIELDS: Final = {
    **{
        name: _text(f'record."{name}"')
        for name in ("id", "content", "role", "group", "owner", "session", "key", "uri", "media_type")
    },
    "created_at": _moment("record.created_at"),
    "accessed_at": _moment("(SELECT access.at FROM access WHERE access.record = record.seq)"),
    "access_count": _integer("ifnull((SELECT access.count FROM access WHERE access.record = record.seq), 0)"),
    "revision": _integer("record.revision"),
    "salience": lambda atoms: _test("record.salience", atoms, _float_of),
    "metadata": _metadata,
    "embedding": _embedding,
}


def _member_is(name: str, atoms: Sequence[bytes]) -> SqlCondition:
    key = short(name.encode())
    values = [short(atom) for atom in atoms if atom != NULL]
    tests = []
    if values:
        match = _any("atom", values)
        tests.append(
            SqlCondition(
                f"record.seq IN (SELECT record FROM member WHERE name = ? AND {match.sql})", (key, *match.values)
            )
        )
    if NULL in atoms:
        tests.append(SqlCondition("record.seq NOT IN (SELECT record FROM member WHERE name = ?)", (key,)))
    return _either(tests)


def _test(column: str, atoms: Sequence[bytes], read: Callable[[bytes], Value]) -> SqlCondition:
    values = [value for atom in atoms if (value := read(atom)) is not None]
    return _either([_any(column, values), *_absent(column, atoms)])


def _absent(column: str, atoms: Sequence[bytes]) -> list[SqlCondition]:
    return [SqlCondition(f"{column} IS NULL")] if NULL in atoms else []


def _any(column: str, values: Sequence[Value]) -> SqlCondition:
    if len(values) < 2:
        return SqlCondition(f"{column} = ?", tuple(values)) if values else SqlCondition("0")
    # texts and bytes are passed as hex: SQLite's JSON cannot hold all of them
    listed = [
        each.encode().hex() if isinstance(each, str) else each.hex() if isinstance(each, bytes) else each
        for each in values
    ]
    match values[0]:
        case str():
            element = "CAST(unhex(value) AS TEXT)"
        case bytes():
            element = "unhex(value)"
        case _:
            element = "value"
    return SqlCondition(f"{column} IN (SELECT {element} FROM json_each(?))", (json.dumps(listed),))


def _all(conditions: Iterable[SqlCondition]) -> SqlCondition:
    parts = list(conditions)
    sql = " AND ".join(part.sql for part in parts) or "1"
    return SqlCondition(sql, tuple(value for part in parts for value in part.values))


def _either(conditions: Iterable[SqlCondition]) -> SqlCondition:
    parts = [part for part in conditions if part.sql != "0"]
    if not parts:
        return SqlCondition("0")
    sql = " OR ".join(part.sql for part in parts)
    return SqlCondition(f"({sql})", tuple(value for part in parts for value in part.values))
