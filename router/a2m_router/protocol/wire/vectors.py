"""How near two vectors are (§3.7), exactly, whatever numbers they hold, and what an index holds of one. Pure."""

import math
import sys
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Final

# the widest vector that an index takes
MAX_WIDTH: Final = 8192

_LARGEST: Final = sys.float_info.max

# the squares of what is beyond it do not fit the 32-bit floats of an index, summed over the widest vector
_INDEXABLE: Final = 1e17


def similarity(a: Sequence[float], b: Sequence[float], metric: str) -> float:
    """How near two vectors of finite numbers are: higher is nearer, and the answer is always finite.

    `cosine` is in [-1, 1], and 0 if either vector is zero; `dot` is the inner product; `l2` the negated Euclidean
    distance. What a float cannot hold becomes the largest or smallest it can.

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
    """What an index by `metric` (cosine or l2) holds of `vector`, or is asked with: 32-bit floats, which find
    candidates. None where the vector has no direction and cosine needs one."""
    if metric == "cosine":
        length, scaled = measured(vector)
        return array("f", [each / length for each in scaled]).tobytes() if length else None
    return array("f", [min(max(each, -_INDEXABLE), _INDEXABLE) for each in vector]).tobytes()


def measured(vector: Sequence[float]) -> tuple[float, Sequence[float]]:
    """A vector's length and itself, both scaled by a power of two where products of its numbers might not be floats."""
    length = math.hypot(*vector)
    if 1e-100 < length < 1e100:
        return length, vector
    exponent = math.frexp(max(map(abs, vector), default=0.0))[1]
    scaled = [math.ldexp(each, -exponent) for each in vector]
    return math.hypot(*scaled), scaled


def _exponent(vector: Sequence[float]) -> int:
    """The power of two that brings the largest component to between 1/2 and 1, or, if it is minute, nearer to it."""
    return max(-1000, math.frexp(max(map(abs, vector), default=0.0))[1])


def _scaled(vector: Sequence[float], exponent: int) -> list[float]:
    """`vector` / 2 ** `exponent`, in which no product or sum can overflow; a power of two costs no precision."""
    factor = math.ldexp(1.0, -exponent)
    return [component * factor for component in vector]


def _finite(value: float, exponent: int) -> float:
    """`value` * 2 ** `exponent`, or the nearest float there is."""
    try:
        return math.ldexp(value, exponent)
    except OverflowError:
        return math.copysign(_LARGEST, value)
