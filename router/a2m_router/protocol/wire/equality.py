"""Exact JSON equality (§5.2): each value becomes an atom, and two atoms are equal if and only if the values are.

`where` compares the JSON type, then the exact value: 1 equals 1.0 and 10e-1, but not true and not "1". Integers of any
length stay distinct. Numbers never become floats, so nothing is rounded.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from a2m_router.protocol.wire.errors import invalid_params

NULL: Final = b"z"

# names in one `where`; each becomes a part of an SQL query
MOST_NAMES: Final = 500

Where: TypeAlias = Mapping[str, tuple[bytes, ...]]


class _Number(str):
    """The text of a number; a type of its own, to distinguish it from a string."""

    __slots__ = ()


_NUMBER: Final = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", re.ASCII)


def atom(value: bytes) -> bytes:
    """Return the atom of one JSON text; two texts have the same atom if and only if they are equal JSON values."""
    return _atom(_decode(value))


def members(metadata: bytes) -> dict[str, bytes]:
    """Return the atom of each top-level member of a JSON object; if a name comes twice, the last one counts."""
    return {name: _atom(value) for name, value in _decode(metadata).items()}


def parse_where(where: Mapping[str, msgspec.Raw]) -> Where:
    """Return the atoms that each name may equal: those of all elements of an array, otherwise that of the value.

    Raises:
        A2MError: INVALID_PARAMS, if there are more names than one query can test.
    """
    if len(where) > MOST_NAMES:
        raise invalid_params("where", f"expected at most {MOST_NAMES} names, got {len(where):,}")
    parsed: dict[str, tuple[bytes, ...]] = {}
    for name, raw in where.items():
        value = _decode(bytes(raw))
        parsed[name] = tuple(map(_atom, value)) if isinstance(value, list) else (_atom(value),)
    return parsed


def text_atom(text: str | None) -> bytes:
    """Return the atom of a string field; that of null if the field is absent."""
    return NULL if text is None else b"s" + text.encode("utf-8")


def text_of(atom: bytes) -> str | None:
    """Return the string of an atom; None if it is another type."""
    return atom[1:].decode("utf-8") if atom[:1] == b"s" else None


def number_atom(number: float | int) -> bytes:
    """Return the atom of a number field."""
    return _atom(_Number(repr(number)))


def integer_of(atom: bytes) -> int | None:
    """Return the 64-bit integer of an atom; None if it is another value."""
    if atom[:1] != b"n":
        return None
    digits, _, exponent = atom[1:].partition(b"e")
    if len(digits) > 20 or len(exponent) > 2 or exponent.startswith(b"-"):
        return None
    value = int(digits) * 10 ** int(exponent)
    return value if -(2**63) <= value < 2**63 else None


_decoder: Final = json.JSONDecoder(parse_int=_Number, parse_float=_Number)


def _decode(text: bytes) -> Any:
    return _decoder.decode(text.decode("utf-8"))


def _atom(value: Any) -> bytes:
    match value:
        case None:
            return NULL
        case True:
            return b"t"
        case False:
            return b"f"
        case _Number():
            return b"n" + _canonical(value)
        case str():
            return b"s" + value.encode("utf-8")
        case list():
            parts = [_atom(element) for element in value]
            return b"a" + b"".join(b"%d:" % len(part) + part for part in parts)
        case _:
            # sorted, since order does not matter; of two equal names the decoder has kept the last
            pairs = sorted((text_atom(name), _atom(member)) for name, member in value.items())
            return b"o" + b"".join(b"%d:%b%d:%b" % (len(n), n, len(v), v) for n, v in pairs)


def _canonical(number: str) -> bytes:
    """Return `digits e exponent` without trailing zeros in the digits; zero, of either sign, is `0e0`."""
    match = _NUMBER.fullmatch(number)
    if match is None:
        raise ValueError(f"not a JSON number: {number[:40]}")
    sign, whole, fraction, exponent = match.groups(default="")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return b"0e0"
    # int() rejects such a long exponent, so the number is not normalised: its text is the atom
    if len(exponent) > 1000:
        return f"{sign}{whole}.{fraction}e{exponent}".encode()
    power = int(exponent or "0") - len(fraction) + len(digits) - len(significant)
    return f"{sign}{significant}e{power}".encode()
