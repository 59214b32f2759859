"""Fusion: many rankings become one, by rank alone; and the router's own rankings of the pool."""

import math
import sys
from collections.abc import Mapping
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from a2m_router.protocol.wire.vectors import similarity
from a2m_router.ranking.fusion import Ranking, by_similarity, lexical, reciprocal_rank
from a2m_router.ranking.text import query_tokens, tokens

ids = st.lists(st.sampled_from("abcdefghij"), unique=True)
weights = st.floats(0.01, 100)
rankings = st.lists(st.builds(Ranking, ids=ids, weight=weights), max_size=5)
ks = st.integers(0, 100)
pools = st.dictionaries(
    st.text("0123456789", min_size=1, max_size=3),
    st.lists(st.sampled_from(["cat", "cats", "dog", "the", "Bird", "猫", "fish!"]), max_size=8).map(" ".join),
    max_size=8,
)
queries = st.lists(st.sampled_from(["cat", "dog", "bird", "the", "猫", "whale"]), max_size=4).map(" ".join)
finite = st.floats(allow_nan=False, allow_infinity=False)
vector_pairs = st.integers(0, 6).flatmap(
    lambda width: st.tuples(*[st.lists(finite, min_size=width, max_size=width)] * 2)
)
modest_pairs = st.integers(1, 6).flatmap(
    lambda width: st.tuples(*[st.lists(st.integers(-1000, 1000), min_size=width, max_size=width)] * 2)
)
metrics = st.sampled_from(["cosine", "dot", "l2"])


@given(rankings, ks)
def test_every_id_comes_out_once(lists: list[Ranking], k: int) -> None:
    fused = [each for each, _ in reciprocal_rank(lists, k)]
    assert len(fused) == len(set(fused))
    assert set(fused) == {each for ranking in lists for each in ranking.ids}


@given(rankings, ks)
def test_scores_descend_and_stay_above_0_and_up_to_1(lists: list[Ranking], k: int) -> None:
    scores = [score for _, score in reciprocal_rank(lists, k)]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score <= 1 for score in scores)


@given(st.lists(st.tuples(ids, weights), min_size=1, max_size=5), ks)
def test_first_everywhere_scores_1(lists: list[tuple[list[str], float]], k: int) -> None:
    fused = reciprocal_rank([Ranking(["best", *rest], weight) for rest, weight in lists], k)
    assert fused[0] == ("best", 1.0)


@given(rankings, ids, weights)
def test_another_ranking_drops_no_id(lists: list[Ranking], more: list[str], weight: float) -> None:
    before = {each for each, _ in reciprocal_rank(lists)}
    assert before <= {each for each, _ in reciprocal_rank([*lists, Ranking(more, weight)])}


@given(rankings.flatmap(lambda lists: st.tuples(st.just(lists), st.permutations(lists))))
def test_the_order_of_the_rankings_changes_no_score(orders: tuple[list[Ranking], list[Ranking]]) -> None:
    one, other = orders
    assert dict(reciprocal_rank(one)) == dict(reciprocal_rank(other))


@given(ids, weights)
def test_one_ranking_alone_keeps_its_order(ranked: list[str], weight: float) -> None:
    assert [each for each, _ in reciprocal_rank([Ranking(ranked, weight)])] == ranked


@given(st.dictionaries(st.sampled_from("abcdef"), st.floats(0.001, 1), max_size=6), st.floats(0.01, 10))
def test_only_places_count_and_never_the_scores_behind_them(scores: dict[str, float], factor: float) -> None:
    other_tier = Ranking(["x", "y"])
    stretched = {each: math.log(score) * factor for each, score in scores.items()}
    assume(len({*scores.values()}) == len({*stretched.values()}))
    assert reciprocal_rank([Ranking(by_similarity(scores)), other_tier]) == reciprocal_rank(
        [Ranking(by_similarity(stretched)), other_tier]
    )


def test_equals_come_in_the_order_in_which_they_are_met() -> None:
    fused = reciprocal_rank([Ranking(["z", "y"]), Ranking(["a", "b"])])
    assert [each for each, _ in fused] == ["z", "a", "y", "b"]


def test_an_empty_ranking_lowers_no_score() -> None:
    assert reciprocal_rank([Ranking(["a"]), Ranking([])]) == [("a", 1.0)]
    assert reciprocal_rank([Ranking([])]) == reciprocal_rank([]) == []


def test_a_repeated_id_counts_where_it_stands_first() -> None:
    assert reciprocal_rank([Ranking(["a", "a", "b"])]) == reciprocal_rank([Ranking(["a", "b"])])


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_weight_that_is_not_above_0_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="expected a weight above 0"):
        Ranking(["a"], weight)


def bm25(query: str, text: str, pool: Mapping[str, str]) -> float:
    """Return the textbook's BM25 score of one document."""
    words = tokens(text)
    mean = sum(len(tokens(each)) for each in pool.values()) / len(pool)
    score = 0.0
    for word in query_tokens(query):
        holders = sum(word in tokens(each) for each in pool.values())
        idf = math.log(1 + (len(pool) - holders + 0.5) / (holders + 0.5))
        tf = words.count(word)
        score += idf * tf * 2.2 / (tf + 1.2 * (0.25 + 0.75 * len(words) / mean)) if tf else 0.0
    return score


@given(queries, pools)
def test_lexical_ranks_as_bm25_does(query: str, pool: dict[str, str]) -> None:
    ranked = lexical(query, pool)
    scores = {each: bm25(query, text, pool) for each, text in pool.items()}
    assert set(ranked) == {each for each, score in scores.items() if score > 0}
    for better, worse in pairwise(ranked):
        assert scores[better] > scores[worse] or scores[better] == pytest.approx(scores[worse])


@given(queries, pools)
def test_lexical_leaves_out_exactly_what_shares_no_word(query: str, pool: dict[str, str]) -> None:
    wanted = set(query_tokens(query))
    assert set(lexical(query, pool)) == {each for each, text in pool.items() if wanted & set(tokens(text))}


@given(st.lists(st.sampled_from("abcdef"), unique=True))
def test_texts_that_match_equally_keep_their_order(order: list[str]) -> None:
    assert lexical("cat", dict.fromkeys(order, "a cat")) == order


def test_a_rare_word_outweighs_a_common_one() -> None:
    assert lexical("cat whale", {"1": "cat", "2": "cat", "3": "whale"})[0] == "3"


@given(st.dictionaries(st.text(max_size=2), finite))
def test_by_similarity_puts_the_nearest_first(similarities: dict[str, float]) -> None:
    ranked = by_similarity(similarities)
    assert sorted(ranked) == sorted(similarities)
    assert [similarities[each] for each in ranked] == sorted(similarities.values(), reverse=True)


@given(vector_pairs, metrics)
def test_similarity_is_finite_and_mutual(pair: tuple[list[float], list[float]], metric: str) -> None:
    a, b = pair
    there = similarity(a, b, metric)
    assert math.isfinite(there)
    assert there == similarity(b, a, metric)


@given(vector_pairs)
def test_cosine_is_within_1_and_distance_never_above_0(pair: tuple[list[float], list[float]]) -> None:
    assert -1 <= similarity(*pair, "cosine") <= 1
    assert similarity(*pair, "l2") <= 0
    assert similarity(pair[0], pair[0], "l2") == 0


@given(modest_pairs)
def test_similarity_is_what_the_schoolbook_says(pair: tuple[list[int], list[int]]) -> None:
    a, b = pair
    dot = sum(x * y for x, y in zip(a, b, strict=True))
    assert similarity(a, b, "dot") == dot
    assert similarity(a, b, "l2") == pytest.approx(-math.dist(a, b))
    if any(a) and any(b):
        assert similarity(a, b, "cosine") == pytest.approx(dot / math.hypot(*a) / math.hypot(*b), abs=1e-12)


@given(st.lists(finite, min_size=1, max_size=6))
def test_a_vector_is_like_itself_whatever_its_size(vector: list[float]) -> None:
    expected = pytest.approx(1.0) if any(vector) else 0.0
    assert similarity(vector, vector, "cosine") == expected


def test_what_a_float_cannot_hold_becomes_the_largest_it_can() -> None:
    largest = sys.float_info.max
    assert similarity([largest, largest], [largest, largest], "dot") == largest
    assert similarity([largest], [-largest], "dot") == -largest
    assert similarity([largest], [-largest], "l2") == -largest
    assert similarity([largest, 1.0], [-largest, 1.0], "cosine") == -1.0


def test_a_zero_vector_is_like_nothing() -> None:
    assert similarity([0.0, 0.0], [1.0, 2.0], "cosine") == 0.0


def test_other_widths_and_metrics_are_refused() -> None:
    with pytest.raises(ValueError, match="got 1 and 2"):
        similarity([1.0], [1.0, 2.0], "dot")
    with pytest.raises(ValueError, match="got 'manhattan'"):
        similarity([1.0], [1.0], "manhattan")
