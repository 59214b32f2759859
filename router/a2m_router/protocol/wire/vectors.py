"""The exact similarity of two vectors (§3.7), for any finite numbers, and the form of a vector in an index. Pure."""

import math
import sys
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Final

# the widest vector that an index accepts
MAX_WIDTH: Final = 8192

_LARGEST: Final = sys.float_info.max

# larger components would overflow the 32-bit floats of an index: it sums their squares over the widest vector
_INDEXABLE: Final = 1e17


def similarity(a: Sequence[float], b: Sequence[float], metric: str) -> float:
    """Return the similarity of two vectors of finite numbers: higher is nearer, and the result is always finite.

    `cosine` is in [-1, 1], and 0 if either vector is zero; `dot` is the inner product; `l2` the negated Euclidean
    distance. A result beyond the range of a float becomes the largest or smallest float.

    Raises:
        ValueError: the widths differ, or the metric is none of the three.
    """
    if len(a) != len(b):
        raise ValueError(f"expected two vectors of one width, got {len(a)} and {len(b)}")
    match metric:
        case "cosine":
            (length_a, scaled_a), (length_b, scaled_b) = measured(a), measured(b)
            if not length_a or not length_b:
                return 0.0
            return max(-1.0, min(1.0, math.fsum(map(mul, scaled_a, scaled_b)) / (length_a * length_b)))
        case "dot":
            exponent_a, exponent_b = _exponent(a), _exponent(b)
            product = math.fsum(map(mul, _scaled(a, exponent_a), _scaled(b, exponent_b)))
            return _finite(product, exponent_a + exponent_b)
        case "l2":
            return 0.0 - min(math.dist(a, b), _LARGEST)
        case _:
            raise ValueError(f"expected the metric cosine, dot or l2, got {metric!r}")


def indexed(vector: Sequence[float], metric: str) -> bytes | None:
    """Return `vector` as 32-bit floats, for an index by `metric` (cosine or l2) or a query to it, to find candidates.

    Return None for the zero vector with cosine, which needs a direction."""
    if metric == "cosine":
        length, scaled = measured(vector)
        return array("f", [each / length for each in scaled]).tobytes() if length else None
    return array("f", [min(max(each, -_INDEXABLE), _INDEXABLE) for each in vector]).tobytes()


def measured(vector: Sequence[float]) -> tuple[float, Sequence[float]]:
    """Return a vector's length and the vector, both scaled by a power of two if products might not be valid floats."""
    length = math.hypot(*vector)
    if 1e-100 < length < 1e100:
        return length, vector
    exponent = math.frexp(max(map(abs, vector), default=0.0))[1]
    scaled = [math.ldexp(each, -exponent) for each in vector]
    return math.hypot(*scaled), scaled


def _exponent(vector: Sequence[float]) -> int:
    """Return the power of two that scales the largest component to between 1/2 and 1; limited for tiny components."""
    return max(-1000, math.frexp(max(map(abs, vector), default=0.0))[1])


def _scaled(vector: Sequence[float], exponent: int) -> list[float]:
    """Return `vector` / 2 ** `exponent`, whose products and sums cannot overflow; a power of two costs no precision."""
    factor = math.ldexp(1.0, -exponent)
    return [component * factor for component in vector]


def _finite(value: float, exponent: int) -> float:
    """Return `value` * 2 ** `exponent`, or the nearest float."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(_LARGEST, value)
