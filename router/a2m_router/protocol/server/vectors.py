"""Checks vectors, and turns similarities into scores. Pure.

The index holds 32-bit floats and finds candidates; their order and similarity are computed from the exact doubles.
"""

import math
from collections.abc import Sequence

from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.vectors import MAX_WIDTH


def check(vector: Sequence[float], where: str) -> None:
    """Raise INVALID_PARAMS unless `vector` has 1 to MAX_WIDTH finite numbers."""
    if not 1 <= len(vector) <= MAX_WIDTH:
        raise invalid_params(where, f"expected 1 to {MAX_WIDTH:,} numbers, got {len(vector):,}")
    if not all(map(math.isfinite, vector)):
        raise invalid_params(where, "expected finite numbers")


def check_width(vector: Sequence[float], dimensions: int | None, where: str) -> None:
    """Raise EMBEDDING_MISMATCH unless `vector` has the store's width (§3.7)."""
    if dimensions is not None and len(vector) != dimensions:
        raise A2MError(
            Code.EMBEDDING_MISMATCH,
            f"{where}: this store's vectors have {dimensions:,} numbers, this one has {len(vector):,}",
            {"parameter": where, "dimensions": dimensions},
        )


def score(metric: str, similarity: float) -> float:
    """Return a similarity as a score in (0, 1] (§5.3) that keeps the order; above 0, so that lower scores remain."""
    return (2 + similarity) / 3 if metric == "cosine" else 1 / (1 - similarity)
