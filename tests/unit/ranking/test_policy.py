"""The policy: an order that does not age, and evictions that split no group."""

from fractions import Fraction
from itertools import pairwise

from hypothesis import assume, given
from hypothesis import strategies as st

from a2m_router.ranking.policy import WORTHLESS, Unit, evictions, in_batches, strength

HALF_LIVES = [60, 300, 3600, 86_400]


def retention(salience: Fraction, count: int, touched: int, half_life: int, now: int) -> Fraction:
    """Return the retention of §3.4 exactly, for ages that are whole half-lives."""
    halvings, rest = divmod(now - touched, half_life * 1000)
    assert rest == 0
    return salience * (1 + count) * (Fraction(1, 2**halvings) if halvings >= 0 else Fraction(2**-halvings))


worths = st.tuples(
    st.fractions(0, 1000, max_denominator=64).filter(lambda worth: worth.denominator & (worth.denominator - 1) == 0),
    st.integers(0, 10_000),
    st.integers(0, 40),  # half-lives ago
)


@given(st.sampled_from(HALF_LIVES), st.integers(40, 60), worths, worths)
def test_strength_has_the_order_of_retention_at_every_moment(
    half_life: int, passed: int, one: tuple[Fraction, int, int], other: tuple[Fraction, int, int]
) -> None:
    (a, n, since_a), (b, m, since_b) = one, other
    touched_a, touched_b = (1000 * half_life * (40 - since) for since in (since_a, since_b))
    now = 1000 * half_life * passed
    exact = retention(a, n, touched_a, half_life, now), retention(b, m, touched_b, half_life, now)
    found = strength(float(a), n, touched_a, half_life), strength(float(b), m, touched_b, half_life)
    if exact[0] == exact[1]:
        assert abs(found[0] - found[1]) < 1e-9
    else:
        assert (found[0] < found[1]) == (exact[0] < exact[1])


@given(worths, st.sampled_from(HALF_LIVES), st.integers(0, 2_000_000_000_000))
def test_what_is_recalled_becomes_stronger_and_what_is_not_never_does(
    worth: tuple[Fraction, int, int], half_life: int, touched: int
) -> None:
    salience, count, _ = worth
    assume(salience > 0)
    before = strength(float(salience), count, touched, half_life)
    assert strength(float(salience), count + 1, touched, half_life) > before
    assert strength(float(salience), count, touched + 1000, half_life) > before


@given(worths, st.integers(0, 2_000_000_000_000))
def test_without_a_half_life_nothing_decays(worth: tuple[Fraction, int, int], touched: int) -> None:
    salience, count, _ = worth
    assert strength(float(salience), count, touched, None) == strength(float(salience), count, 0, None)


@given(st.floats(max_value=0), st.integers(0), st.integers(), st.none() | st.sampled_from(HALF_LIVES), worths)
def test_what_is_worth_nothing_is_weaker_than_anything(
    nothing: float, count: int, touched: int, half_life: int | None, worth: tuple[Fraction, int, int]
) -> None:
    assume(worth[0] > 0)
    assert strength(nothing, count, touched, half_life) == WORTHLESS
    assert strength(float(worth[0]), worth[1], -(10**15), half_life) > WORTHLESS


units = st.lists(st.integers(1, 5), max_size=12).map(
    lambda weights: [
        Unit(tuple(f"{place}.{i}" for i in range(weight)), None, None, 0, float(place), weight)
        for place, weight in enumerate(weights)
    ]
)


def gone(units: list[Unit], capacity: int) -> list[Unit]:
    """Return the units that leave: the weakest, while there are too many records and more than one unit."""
    left = list(units)
    while len(left) > 1 and sum(unit.weight for unit in left) > capacity:
        left.remove(min(left, key=lambda unit: unit.strength))
    return [unit for unit in units if unit not in left]


@given(units, st.integers(0, 40))
def test_the_weakest_go_first_whole_until_the_rest_fits(units: list[Unit], capacity: int) -> None:
    held = sum(unit.weight for unit in units)
    leaving = evictions(iter(units), held, capacity)
    assert leaving == gone(units, capacity)
    left = held - sum(unit.weight for unit in leaving)
    assert left <= capacity or len(units) - len(leaving) == 1
    if leaving:
        assert left + leaving[-1].weight > capacity


@given(units, st.integers(1, 8))
def test_evictions_read_no_further_than_needed(units: list[Unit], capacity: int) -> None:
    unread = iter(units)
    leaving = evictions(unread, sum(unit.weight for unit in units), capacity)
    assert len(list(unread)) >= len(units) - len(leaving) - 1


@given(units, st.integers(1, 8))
def test_batches_keep_the_order_and_tear_nothing(units: list[Unit], most: int) -> None:
    batches = in_batches(units, most)
    assert [unit for batch in batches for unit in batch] == units
    sizes = [sum(len(unit.ids) for unit in batch) for batch in batches]
    assert all(size <= most or len(batch) == 1 for size, batch in zip(sizes, batches, strict=True))
    assert all(size + len(after[0].ids) > most for size, (_, after) in zip(sizes, pairwise(batches), strict=False))
