"""Vectors, pure: what is accepted, and what a similarity is as a score.

The index holds 32-bit floats and finds candidates; their order and their similarity come from the doubles.
"""

import math
from collections.abc import Sequence

from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.vectors import MAX_WIDTH


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


def score(metric: str, similarity: float) -> float:
    """A similarity as a score in (0, 1] (§5.3), in the same order; above 0, so that there is room below every one."""
    return (2 + similarity) / 3 if metric == "cosine" else 1 / (1 - similarity)
