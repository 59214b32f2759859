"""Vectors, pure: what is accepted, what the index holds of them, and how near two are.

The index holds 32-bit floats and finds candidates; their order and their similarity come from the doubles.
"""

import math
import sys
from array import array
from collections.abc import Sequence
from operator import mul
from typing import Final

from router.a2m.errors import A2MError, Code, invalid_params

METRICS: Final = ("cosine", "l2")

# the widest vector that the index takes
MAX_WIDTH: Final = 8192

# the squares of what is beyond it do not fit the 32-bit floats of the index, summed over the widest vector
_INDEXABLE: Final = 1e17


def check(vector: Sequence[float], where: str) -> None:
    """Raises INVALID_PARAMS unless `vector` is a usable one: 1 to MAX_WIDTH finite numbers."""
    if not 1 <= len(vector) <= MAX_WIDTH:
        raise invalid_params(where, f"expected 1 to {MAX_WIDTH:,} numbers, got {len(vector):,}")
    if not all(map(math.isfinite, vector)):
        raise invalid_params(where, "expected finite numbers")


def check_width(vector: Sequence[float], dimensions: int | None, where: str) -> None:
    """Raises EMBEDDING_MISMATCH unless `vector` is as wide as the store's (§3.7)."""
    if dimensions is not None and len(vector) != dimensions:
        raise A2MError(
            Code.EMBEDDING_MISMATCH,
            f"{where}: this store's vectors have {dimensions:,} numbers, this one has {len(vector):,}",
            {"parameter": where, "dimensions": dimensions},
        )


def indexed(vector: Sequence[float], metric: str) -> bytes | None:
    """What the index holds of `vector`, or is asked with; None where it has no direction and cosine needs one."""
    if metric == "cosine":
        length, scaled = _measured(vector)
        return array("f", [each / length for each in scaled]).tobytes() if length else None
    return array("f", [min(max(each, -_INDEXABLE), _INDEXABLE) for each in vector]).tobytes()


def similarity(metric: str, a: Sequence[float], b: Sequence[float]) -> float:
    """How near two vectors of one width are, higher is nearer, always finite.

    cosine: in [-1, 1], and 0 where either has no direction; l2: the negated distance.
    """
    if metric == "cosine":
        (length_a, scaled_a), (length_b, scaled_b) = _measured(a), _measured(b)
        if not length_a or not length_b:
            return 0.0
        return max(-1.0, min(1.0, math.fsum(map(mul, scaled_a, scaled_b)) / length_a / length_b))
    return 0.0 - min(math.dist(a, b), sys.float_info.max)


def score(metric: str, similarity: float) -> float:
    """A similarity as a score in (0, 1] (§5.3), in the same order; above 0, so that there is room below every one."""
    return (2 + similarity) / 3 if metric == "cosine" else 1 / (1 - similarity)


def _measured(vector: Sequence[float]) -> tuple[float, Sequence[float]]:
    """A vector's length and itself, both scaled by a power of two where products of its numbers might not be floats."""
    length = math.hypot(*vector)
    if 1e-100 < length < 1e100:
        return length, vector
    exponent = math.frexp(max(map(abs, vector)))[1]
    scaled = [math.ldexp(each, -exponent) for each in vector]
    return math.hypot(*scaled), scaled
