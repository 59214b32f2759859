"""JSON equality, exactly (§5.2): values as atoms, byte strings that are equal just when the values are.

`where` compares by JSON type, then exactly: 1 equals 1.0 and 10e-1 but not true and not "1"; integers of any length are
told apart. No float is ever made, so nothing is rounded on the way.
"""

import json
import re
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from a2m_router.protocol.wire.errors import invalid_params

NULL: Final = b"z"

# names in one `where`; each becomes a part of a query
MOST_NAMES: Final = 500

Where: TypeAlias = Mapping[str, tuple[bytes, ...]]


class _Number(str):
    """A number's own text, kept apart from a string's."""

    __slots__ = ()


_NUMBER: Final = re.compile(r"(-?)(\d+)(?:\.(\d+))?(?:[eE]([+-]?\d+))?", re.ASCII)


def atom(value: bytes) -> bytes:
    """The atom of one JSON text; two texts have the same atom just when they are equal as JSON values."""
    return _atom(_decode(value))


def members(metadata: bytes) -> dict[str, bytes]:
    """The atom of each top-level member of a JSON object; of a name that comes twice the last counts."""
    return {name: _atom(value) for name, value in _decode(metadata).items()}


def parse_where(where: Mapping[str, msgspec.Raw]) -> Where:
    """What each name may equal: an array in `where` means any of its elements, anything else means itself.

    Raises INVALID_PARAMS for more names than a query can test at once.
    """
    if len(where) > MOST_NAMES:
        raise invalid_params("where", f"expected at most {MOST_NAMES} names, got {len(where):,}")
    parsed: dict[str, tuple[bytes, ...]] = {}
    for name, raw in where.items():
        value = _decode(bytes(raw))
        parsed[name] = tuple(map(_atom, value)) if isinstance(value, list) else (_atom(value),)
    return parsed


def text_atom(text: str | None) -> bytes:
    """The atom of a string field, or of null where there is none."""
    return NULL if text is None else b"s" + text.encode("utf-8")


def text_of(atom: bytes) -> str | None:
    """The string that an atom stands for; None where it stands for anything else."""
    return atom[1:].decode("utf-8") if atom[:1] == b"s" else None


def number_atom(number: float | int) -> bytes:
    """The atom of a number field."""
    return _atom(_Number(repr(number)))


def integer_of(atom: bytes) -> int | None:
    """The 64-bit integer that an atom stands for; None where it stands for anything else."""
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
            # the last of two equal names has already won, and the order of names does not matter
            pairs = sorted((text_atom(name), _atom(member)) for name, member in value.items())
            return b"o" + b"".join(b"%d:%b%d:%b" % (len(n), n, len(v), v) for n, v in pairs)


def _canonical(number: str) -> bytes:
    """`digits e exponent` without trailing zeros in the digits; zero, of either sign, is `0e0`."""
    match = _NUMBER.fullmatch(number)
    if match is None:
        raise ValueError(f"not a JSON number: {number[:40]}")
    sign, whole, fraction, exponent = match.groups(default="")
    digits = (whole + fraction).lstrip("0")
    significant = digits.rstrip("0")
    if not significant:
        return b"0e0"
    # an exponent too long to be an int cannot be normalised; its text stands for itself
    if len(exponent) > 1000:
        return f"{sign}{whole}.{fraction}e{exponent}".encode()
    power = int(exponent or "0") - len(fraction) + len(digits) - len(significant)
    return f"{sign}{significant}e{power}".encode()
