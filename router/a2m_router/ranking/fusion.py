"""Fuses several rankings into one.

Rules: the fusion uses only places, never scores, since the scores of two tiers are not comparable; `lexical` and
`by_similarity` sort by scores, but these come from one measure for the whole pool. Every order is deterministic.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from a2m_router.ranking.text import query_tokens, tokens


class Ranking(msgspec.Struct, frozen=True):
    """One input of the fusion: ids, best first, and their weight.

    Raises:
        ValueError: the weight is not above 0; leave out a ranking that should not count.
    """

    ids: Sequence[str]
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise ValueError(f"expected a weight above 0, got {self.weight}; leave the ranking out instead")


POOL_WEIGHT = 2.0
"""The weight of a ranking of the whole pool; a tier's ranking has 1. The pool ranking compares records of different
tiers, which no tier can. In every division measured with `bench.recall`, 2 finds as much as 1 or slightly more; 3 and
above gain nothing."""


def reciprocal_rank(rankings: Sequence[Ranking], k: int = 60) -> list[tuple[str, float]]:
    """Return every id of `rankings` with its score, best first (reciprocal rank fusion).

    An id gets weight / (k + place) from each ranking that contains it. Places count from 1; a repeated id counts at its
    first place. Scores are in (0, 1]: 1 is first place in every ranking that is not empty. Ids with equal scores keep
    the order in which they first appear, reading the rankings in order. `k` is at least 0; a larger `k` reduces the
    advantage of the top places.
    """
    earned: defaultdict[str, list[float]] = defaultdict(list)
    for ranking in rankings:
        for place, record_id in enumerate(dict.fromkeys(ranking.ids), start=1):
            earned[record_id].append(ranking.weight / (k + place))
    best = math.fsum(ranking.weight / (k + 1) for ranking in rankings if ranking.ids)
    # fsum rounds once: equal places give equal scores, whatever the order of the rankings.
    scores = {record_id: math.fsum(shares) / best for record_id, shares in earned.items()}
    return sorted(scores.items(), key=lambda scored: -scored[1])


# BM25's usual constants: how soon repeats of a word stop counting, and how much long texts are penalised.
_K1 = 1.2
_B = 0.75


def lexical(query: str, texts: Mapping[str, str]) -> list[str]:
    """Return the ids of the `texts` that share a word with `query`, best first by BM25; equals keep their order.

    A word's rarity is its rarity among `texts`: one measure for the whole pool, whichever tiers the texts are from.
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
            length_penalty = _K1 * (1 - _B + _B * lengths[record_id] / mean_length)
            scores[record_id] += rarity * times * (_K1 + 1) / (times + length_penalty)
    return sorted((record_id for record_id in texts if record_id in scores), key=lambda each: -scores[each])


def by_similarity(similarities: Mapping[str, float]) -> list[str]:
    """Return the ids, best first; equals keep the order of `similarities`."""
    return sorted(similarities, key=lambda record_id: -similarities[record_id])
