"""Rankings in, one ranking out.

Rules: of several rankings only the places count, never the scores, since two tiers' scores mean different things;
what ranks by a score (`lexical`, `by_similarity`) gave every one of them itself. Every order is deterministic.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from a2m_router.ranking.text import query_tokens, tokens


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
