"""When the breaker counts a tier as down and gives up its connection, by the results of calls and greetings."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.tiers.breaker import FAILURES, PATIENCE, TRIALS, Breaker

NEVER = float("-inf")


@given(st.lists(st.booleans(), max_size=30))
def test_the_breaker_is_open_after_so_many_failures_in_a_row(calls: list[bool]) -> None:
    breaker = Breaker()
    row = 0
    for is_answered in calls:
        if is_answered:
            breaker.answered()
            row = 0
        else:
            row += 1
            assert breaker.failed() == (row >= FAILURES)


def test_a_service_counts_its_silences_itself() -> None:
    breaker = Breaker()
    assert not breaker.failed(FAILURES - 1)
    assert breaker.failures == FAILURES - 1
    assert not Breaker().failed(1)
    assert breaker.failed(1)  # the service counts fewer failures than the calls show


def test_a_tier_that_has_come_up_begins_anew() -> None:
    breaker = Breaker()
    for _ in range(FAILURES):
        breaker.failed()
    breaker.rose()
    assert not breaker.failed()


def test_one_wrong_greeting_ends_a_connection_and_later_some_do() -> None:
    """A wrong greeting ends a new connection; a connection that has greeted ends after several in a row."""
    breaker = Breaker()
    breaker.connected(0.0)
    assert not breaker.misgreeted(is_answer=False)  # the server may only be slow
    assert breaker.misgreeted(is_answer=True)
    breaker.connected(0.0)
    breaker.greeted()
    for _ in range(TRIALS - 1):
        assert not breaker.misgreeted(is_answer=True)
    assert not breaker.misgreeted(is_answer=False)  # this interrupts the row
    for _ in range(TRIALS - 1):
        assert not breaker.misgreeted(is_answer=True)
    assert breaker.misgreeted(is_answer=True)
    breaker.connected(0.0)
    assert breaker.misgreeted(is_answer=True)


@pytest.mark.parametrize("heard", [NEVER, 30.0])
def test_a_connection_that_is_of_no_use_is_given_up_after_ever_more_time(heard: float) -> None:
    breaker = Breaker()
    used = 10.0
    for times, patience in enumerate([1, 2, 4, 8, 16, 16]):
        breaker.connected(0.0)
        breaker.fell(used)
        since = max(used, heard)
        assert breaker.patience == PATIENCE * patience, times
        assert breaker.is_useless(since + patience * PATIENCE - 1, heard) is None
        assert breaker.is_useless(since + patience * PATIENCE, heard) == patience * PATIENCE
    breaker.rose()
    assert breaker.patience == PATIENCE
