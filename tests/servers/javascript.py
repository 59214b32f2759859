"""JSON as JavaScript reads and writes it: what a store in that language does to a text.

Every number is a double. Names that are array indices come first, in ascending order. Of several members with one name
the last one counts, in the place of the first. Halves of surrogate pairs are written as escapes.
"""

import json
import math
import re
from decimal import Decimal
from typing import Any, Final, Never

# names of members that objects keep in numeric order: integers below 2**32 - 1 in canonical form
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,9}")
_PAST_INDICES: Final = 2**32 - 1
_HALF_OF_A_PAIR: Final = re.compile("[\ud800-\udfff]")


def reencoded(text: str) -> str:
    """Return JSON.stringify(JSON.parse(text)). Raises ValueError where JSON.parse throws."""
    return stringify(parse(text))


def parse(text: str) -> Any:
    """Return JSON.parse(text): every number is a float, and objects list their members in JavaScript's order."""
    return json.loads(
        text, parse_int=float, parse_float=float, parse_constant=_no_such_word, object_pairs_hook=_in_order
    )


def stringify(value: Any) -> str:
    """Return JSON.stringify(value)."""
    return _HALF_OF_A_PAIR.sub(lambda half: f"\\u{ord(half[0]):04x}", _written(value))


def _written(value: Any) -> str:
    match value:
        case None | bool():
            return json.dumps(value)
        case int() | float():
            return _number(float(value))
        case str():
            return json.dumps(value, ensure_ascii=False)
        case list():
            return f"[{','.join([_written(each) for each in value])}]"
        case dict():
            members = [f"{json.dumps(name, ensure_ascii=False)}:{_written(each)}" for name, each in value.items()]
            return f"{{{','.join(members)}}}"
        case _:
            raise TypeError(f"expected a JSON value, got {type(value).__name__}")


def _number(value: float) -> str:
    """Return Number.prototype.toString(), but null for a number that JSON cannot express."""
    if not math.isfinite(value):
        return "null"
    if value == 0:
        return "0"
    negative, places, exponent = Decimal(repr(value)).as_tuple()
    assert isinstance(exponent, int)
    point = len(places) + exponent  # the decimal point comes after so many digits
    digits = "".join(map(str, places)).rstrip("0")
    sign = "-" if negative else ""
    if len(digits) <= point <= 21:
        return sign + digits.ljust(point, "0")
    if 0 < point <= 21:
        return f"{sign}{digits[:point]}.{digits[point:]}"
    if -6 < point <= 0:
        return f"{sign}0.{'0' * -point}{digits}"
    fraction = f".{digits[1:]}" if len(digits) > 1 else ""
    return f"{sign}{digits[0]}{fraction}e{point - 1:+d}"


def _in_order(members: list[tuple[str, Any]]) -> dict[str, Any]:
    named = dict(members)
    indices = [name for name in named if _INDEX.fullmatch(name) and int(name) < _PAST_INDICES]
    return {name: named[name] for name in (*sorted(indices, key=int), *named)}


def _no_such_word(word: str) -> Never:
    raise ValueError(f"JSON has no {word}")
