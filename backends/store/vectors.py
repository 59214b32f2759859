"""Vectors, pure: what is accepted, what the index holds of them, and how near two are.

The index holds 32-bit floats and finds candidates; their order and their similarity come from the doubles.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Final

from router.a2m.errors import A2MError, Code, invalid_params
from router.a2m.vectors import measured

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
        length, scaled = measured(vector)
        return array("f", [each / length for each in scaled]).tobytes() if length else None
    return array("f", [min(max(each, -_INDEXABLE), _INDEXABLE) for each in vector]).tobytes()


def score(metric: str, similarity: float) -> float:
    """A similarity as a score in (0, 1] (§5.3), in the same order; above 0, so that there is room below every one."""
    return (2 + similarity) / 3 if metric == "cosine" else 1 / (1 - similarity)
