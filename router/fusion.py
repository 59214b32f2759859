"""Rankings in, one ranking out.

Rules: of several rankings only the places count, never the scores, since two tiers' scores mean different things;
what ranks by a score (`lexical`, `by_similarity`) gave every one of them itself. Every order is deterministic.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from operator import mul, sub

import msgspec

from router.text import query_tokens, tokens


class Ranking(msgspec.Struct, frozen=True):
    """One voice in the fusion: ids, best first, and how much it has to say.

    Raises:
        ValueError: the weight is not above 0; leave a ranking out that shall have no say.
    """

    ids: Sequence[str]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"expected a weight above 0, got {self.weight}; leave the ranking out instead")


POOL_WEIGHT = 2.0
"""What a ranking of the whole pool weighs beside a tier's 1. It compares what the tiers cannot; measured with
`bench.recall` it finds as much as 1 or a little more in every division tried, and from 3 on nothing is gained."""


def reciprocal_rank(rankings: Sequence[Ranking], k: int = 60) -> list[tuple[str, float]]:
    """Every id of `rankings` with its score, best first (reciprocal rank fusion).

    An id earns weight / (k + place) from each ranking that holds it; places count from 1, and a repeated id counts
    where it stands first. Scores are in (0, 1]: 1 is first place in every ranking that is not empty. Among equals
    the one met first comes first, reading the rankings in order. `k` is at least 0; the larger, the less special
    are the top places.
    """
    earned: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        for place, record_id in enumerate(dict.fromkeys(ranking.ids), start=1):
            earned[record_id].append(ranking.weight / (k + place))
    best = math.fsum(ranking.weight / (k + 1) for ranking in rankings if ranking.ids)
    # fsum rounds once: equal places give equal scores, in whatever order the rankings came.
    scores = {record_id: math.fsum(shares) / best for record_id, shares in earned.items()}
    return sorted(scores.items(), key=lambda scored: -scored[1])


# BM25's usual constants: how soon repeats of a word stop counting, and how far long texts are held back.
_K1 = 1.2
_B = 0.75


def lexical(query: str, texts: Mapping[str, str]) -> list[str]:
    """The ids of the `texts` that share a word with `query`, best first by BM25; equals keep the order of `texts`.

    A word's rarity is its rarity among `texts`, so the pool is judged by one measure, wherever its parts came from.
    """
    wanted = query_tokens(query)
    if not wanted:
        return []
    counts = {record_id: Counter(tokens(text)) for record_id, text in texts.items()}
    lengths = {record_id: count.total() for record_id, count in counts.items()}
    mean_length = sum(lengths.values()) / max(1, len(lengths))
    scores: defaultdict[str, float] = defaultdict(float)
    for token in wanted:
        holders = [record_id for record_id, count in counts.items() if token in count]
        rarity = math.log1p((len(texts) - len(holders) + 0.5) / (len(holders) + 0.5))
        for record_id in holders:
            times = counts[record_id][token]
            held_back = _K1 * (1 - _B + _B * lengths[record_id] / mean_length)
            scores[record_id] += rarity * times * (_K1 + 1) / (times + held_back)
    return sorted((record_id for record_id in texts if record_id in scores), key=lambda each: -scores[each])


def by_similarity(similarities: Mapping[str, float]) -> list[str]:
    """The ids, best first; equals keep the order of `similarities`."""
    return sorted(similarities, key=lambda record_id: -similarities[record_id])


def similarity(a: Sequence[float], b: Sequence[float], metric: str) -> float:
    """How near two vectors of finite numbers are: higher is nearer, and the answer is always finite.

    `cosine` is in [-1, 1], and 0 if either vector is zero; `dot` is the inner product; `l2` the negated Euclidean
    distance. What a float cannot hold becomes the largest or smallest it can.

    Raises:
        ValueError: the widths differ, or the metric is none of the three.
    """
    if len(a) != len(b):
        raise ValueError(f"expected two vectors of one width, got {len(a)} and {len(b)}")
    scale_a, scale_b = _exponent(a), _exponent(b)
    match metric:
        case "cosine":
            unit_a, unit_b = _scaled(a, scale_a), _scaled(b, scale_b)
            lengths = math.hypot(*unit_a) * math.hypot(*unit_b)
            return max(-1.0, min(1.0, math.fsum(map(mul, unit_a, unit_b)) / lengths)) if lengths else 0.0
        case "dot":
            product = math.fsum(map(mul, _scaled(a, scale_a), _scaled(b, scale_b)))
            return _finite(product, scale_a + scale_b)
        case "l2":
            scale = max(scale_a, scale_b)
            distance = math.hypot(*map(sub, _scaled(a, scale), _scaled(b, scale)))
            return 0.0 - _finite(distance, scale)
        case _:
            raise ValueError(f"expected the metric cosine, dot or l2, got {metric!r}")


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
        return math.copysign(sys.float_info.max, value)
