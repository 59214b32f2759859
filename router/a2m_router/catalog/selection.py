"""Selecting records from the catalog: the filters that it can apply, and the queries for them. Pure.

A selection is one query or several ("arms"). Each arm follows one index in the order of time: of a session, an owner or
a tier, whichever is narrowest. So the newest few records of a large catalog are found without reading the rest.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import msgspec

from a2m_router.catalog.entries import present
from a2m_router.protocol.wire.equality import NULL, Where, integer_of, number_atom, text_of
from a2m_router.protocol.wire.timestamps import moment

# the record fields that the catalog holds; only a tier can return the others
FIELDS: Final = frozenset(
    {
        "id",
        "role",
        "group",
        "owner",
        "session",
        "key",
        "revision",
        "created_at",
        "salience",
        "access_count",
        "accessed_at",
        "tier",
    }
)

_TEXTS: Final = {"role": "role", "group": "grp", "owner": "owner", "session": "session", "key": "key"}
_MOMENTS: Final = frozenset({"created_at", "accessed_at"})


class Scope(msgspec.Struct, frozen=True):
    """What a caller may see and change (§6).

    `owner` None sees all records. An owner sees its own records, records without an owner, and all in shared tiers.
    `writes` names the tiers in which it may change its own records and those without an owner; None means every tier.
    """

    owner: str | None = None
    writes: frozenset[str] | None = None

    @property
    def everyone(self) -> bool:
        """Whether the caller sees the records of every owner."""
        return self.owner is None

    def holds(self, owner: str | None) -> bool:
        """Return whether a record of `owner` is the caller's own, or has no owner."""
        return self.owner is None or owner is None or owner == self.owner

    def writes_to(self, tier: str) -> bool:
        """Return whether the caller may change records in a tier."""
        return self.writes is None or tier in self.writes

    def may_change(self, owner: str | None, tier: str) -> bool:
        """Return whether the caller may change a record of `owner` that lives in `tier`."""
        return self.holds(owner) and self.writes_to(tier)


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """The records that `scope` sees, live in `tiers`, and meet `where` (its catalog fields) and `key_prefix`."""

    tiers: Sequence[str]
    scope: Scope = Scope()
    where: Where = msgspec.field(default_factory=dict)
    key_prefix: str | None = None


class Condition(msgspec.Struct, frozen=True):
    """A piece of SQL over `records`, and its parameters."""

    sql: str
    parameters: tuple[Any, ...] = ()


NOTHING: Final = Condition("FALSE")


def any_of(column: str, values: Sequence[Any]) -> Condition:
    """Return the condition that `column` holds one of `values`."""
    if not values:
        return NOTHING
    return Condition(f"{column} IN ({', '.join('?' * len(values))})", tuple(values))


def field_condition(field: str, atoms: Collection[bytes], tiers: Mapping[str, int]) -> Condition:
    """Return the condition that `field`, one of FIELDS, equals one of the JSON values `atoms` (§5.2)."""
    if field == "tier":
        return any_of("home", [no for name, no in tiers.items() if b"s" + name.encode() in atoms])
    if field == "id":
        return any_of("id", [text for text in map(text_of, atoms) if text is not None])
    if field in _TEXTS:
        texts = (("" if atom == NULL else _kept(text_of(atom))) for atom in atoms)
        return any_of(_TEXTS[field], [text for text in texts if text is not None])
    if field == "revision":
        # only a record with a key has a revision
        shown = any_of("revision", [number for number in map(_number, atoms) if number is not None])
        with_key = conjunction([Condition("key != ''"), shown])
        return any_condition(with_key, Condition("key = ''")) if NULL in atoms else with_key
    if field in _MOMENTS:
        condition = any_of(field, [moment for moment in map(_moment, atoms) if moment is not None])
    else:
        condition = any_of(field, [number for number in map(_number, atoms) if number is not None])
    if NULL in atoms and field == "accessed_at":
        return Condition(f"({condition.sql} OR accessed_at IS NULL)", condition.parameters)
    return condition


def where_conditions(where: Where, tiers: Mapping[str, int]) -> list[Condition]:
    """Return the conditions for those names in `where` that the catalog holds."""
    return [field_condition(name, atoms, tiers) for name, atoms in where.items() if name in FIELDS]


def key_prefix_condition(prefix: str) -> Condition:
    """Return the condition that the key is `prefix` or beneath it: `a/b` does not select `a/bc`."""
    if prefix == "":
        return Condition("key != ''")
    if prefix.endswith("/"):
        return Condition("key >= ? AND key < ?", ("=" + prefix, "=" + prefix[:-1] + "0"))  # '0' follows '/'
    # the range comes first, so that an index serves it; the second condition excludes keys between, such as `a/b!`
    beneath = Condition("(key = ? OR key >= ?)", ("=" + prefix, f"={prefix}/"))
    return conjunction([Condition("key >= ? AND key < ?", ("=" + prefix, f"={prefix}0")), beneath])


def scope_condition(scope: Scope, shared: Collection[int]) -> Condition | None:
    """Return the condition that `scope` sees the record; None if it sees all."""
    if scope.everyone:
        return None
    own = any_of("owner", ["", present(scope.owner)])
    open_to_all = any_of("home", list(shared))
    return Condition(f"({own.sql} OR {open_to_all.sql})", own.parameters + open_to_all.parameters)


def conjunction(conditions: Sequence[Condition | None]) -> Condition:
    """Return the conjunction of `conditions`; None stands for one that always holds."""
    given = [condition for condition in conditions if condition is not None]
    sql = " AND ".join(condition.sql for condition in given) or "TRUE"
    return Condition(sql, tuple(parameter for condition in given for parameter in condition.parameters))


def any_condition(first: Condition, second: Condition) -> Condition:
    """Return the disjunction of two conditions."""
    return Condition(f"(({first.sql}) OR ({second.sql}))", first.parameters + second.parameters)


def _kept(text: str | None) -> str | None:
    return None if text is None else present(text)


def _moment(atom: bytes) -> int | None:
    text = text_of(atom)
    try:
        return None if text is None else moment(text)
    except ValueError:
        return None


def _number(atom: bytes) -> int | float | None:
    integer = integer_of(atom)
    if integer is not None:
        return integer
    if not atom.startswith(b"n"):
        return None
    try:
        number = float(atom[1:].decode())
        return number if number_atom(number) == atom else None
    except (ValueError, OverflowError):
        return None
