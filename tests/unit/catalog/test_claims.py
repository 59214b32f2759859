"""Claims: one holder for each name, no deadlock, first come first served, and cancelled callers hold nothing."""

from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.catalog.claims import Claim, Claims, Name, group_name, id_name, key_name
from tests.support.catalogs import is_held
from tests.support.examples import scaled

NAMES = [id_name("x"), id_name("\0"), key_name(None, "k"), key_name("", "k"), group_name("a", "g")]

both = pytest.mark.parametrize("backend", ["asyncio", "trio"])
name_sets = st.lists(st.sampled_from(NAMES), max_size=4)


class Taker:
    """Takes `names` at its turn and holds them for some turns; may be cancelled after some turns."""

    def __init__(self, names: list[Name], after: int, holds: int, cancelled: int | None) -> None:
        self.names, self.after, self.holds, self.cancelled = names, after, holds, cancelled

    def __repr__(self) -> str:
        return f"Taker({self.names}, {self.after}, {self.holds}, {self.cancelled})"


takers = st.builds(Taker, name_sets, st.integers(0, 5), st.integers(0, 4), st.none() | st.integers(0, 8))


def run(backend: str, main: Callable[[], Awaitable[Any]]) -> Any:
    async def bounded() -> Any:
        with anyio.fail_after(5):
            return await main()

    return anyio.run(bounded, backend=backend)


@both
@settings(max_examples=scaled(30))
@given(st.lists(takers, max_size=8))
def test_each_name_has_one_holder_and_all_get_their_turn(backend: str, takers: list[Taker]) -> None:
    async def main() -> None:
        claims = Claims()
        holders: dict[Name, Taker] = {}
        served = []

        async def take(taker: Taker, scope: anyio.CancelScope) -> None:
            with scope:
                for _ in range(taker.after):
                    await anyio.lowlevel.checkpoint()
                claim = await claims.take(taker.names)
                try:
                    for name in taker.names:
                        assert holders.setdefault(name, taker) is taker
                        assert is_held(claims, name)
                    for _ in range(taker.holds):
                        await anyio.lowlevel.checkpoint()
                    served.append(taker)
                finally:
                    for name in set(taker.names):
                        del holders[name]
                    claim.release()

        async def cancel(taker: Taker, scope: anyio.CancelScope) -> None:
            for _ in range(taker.cancelled or 0):
                await anyio.lowlevel.checkpoint()
            scope.cancel()

        async with anyio.create_task_group() as tasks:
            for taker in takers:
                scope = anyio.CancelScope()
                tasks.start_soon(take, taker, scope)
                if taker.cancelled is not None:
                    tasks.start_soon(cancel, taker, scope)
        assert set(served) >= {taker for taker in takers if taker.cancelled is None}
        assert not any(is_held(claims, name) for name in NAMES)
        claims.take_if_free(NAMES)

    run(backend, main)


@both
@settings(max_examples=scaled(15))
@given(st.lists(st.booleans(), min_size=1, max_size=8))
def test_who_comes_first_is_served_first(backend: str, stays: list[bool]) -> None:
    async def main() -> None:
        claims = Claims()
        served: list[int] = []
        scopes = [anyio.CancelScope() for _ in stays]

        async def take(turn: int) -> None:
            with scopes[turn]:
                claim = await claims.take([NAMES[0]])
                served.append(turn)
                await anyio.lowlevel.checkpoint()
                claim.release()

        first = await claims.take([NAMES[0]])
        async with anyio.create_task_group() as tasks:
            for turn in range(len(stays)):
                tasks.start_soon(take, turn)
                await anyio.wait_all_tasks_blocked()
            for turn, stay in enumerate(stays):
                if not stay:
                    scopes[turn].cancel()
            await anyio.wait_all_tasks_blocked()
            first.release()
            assert is_held(claims, NAMES[0]) == any(stays)  # handed over directly: no other caller can come between
            assert claims.take_if_free([NAMES[0]]) is None or not any(stays)
        assert served == [turn for turn, stay in enumerate(stays) if stay]

    run(backend, main)


@both
@pytest.mark.parametrize("release_first", [True, False])
def test_a_name_handed_to_one_who_is_being_cancelled_goes_on_to_the_next(backend: str, release_first: bool) -> None:
    async def main() -> None:
        claims = Claims()
        held = await claims.take([NAMES[0], NAMES[1]])
        scope = anyio.CancelScope()
        got: list[Claim] = []

        async def give_up() -> None:
            with scope:
                claim = await claims.take([NAMES[0], NAMES[1]])
                await anyio.lowlevel.checkpoint()  # on trio a claim that was handed over in time is kept until here
                claim.release()
            if scope.cancelled_caught and is_held(claims, NAMES[0]) and not got:
                claim.release()

        async def wait() -> None:
            got.append(await claims.take([NAMES[0], NAMES[1]]))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(give_up)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            for act in [held.release, scope.cancel] if release_first else [scope.cancel, held.release]:
                act()
        [claim] = got
        claim.release()
        assert not any(is_held(claims, name) for name in NAMES)

    run(backend, main)


@given(name_sets, name_sets)
def test_a_claim_that_must_not_wait_takes_all_or_nothing(held: list[Name], wanted: list[Name]) -> None:
    claims = Claims()
    first = claims.take_if_free(held)
    assert first is not None
    second = claims.take_if_free(wanted)
    assert (second is None) == bool(set(held) & set(wanted))
    assert {name for name in NAMES if is_held(claims, name)} == set(held) | set(wanted if second else [])
    first.release()
    first.release()  # a second release has no effect
    assert {name for name in NAMES if is_held(claims, name)} == set(wanted if second else [])


@given(st.lists(name_sets, max_size=5))
def test_those_who_passed_something_over_hear_of_every_release(sets: list[list[Name]]) -> None:
    claims = Claims()
    heard: list[frozenset[Name]] = []
    taken = [(set(names), claim) for names in sets if (claim := claims.take_if_free(names)) is not None]
    with claims.on_release(heard.append):
        for _, claim in taken:
            claim.release()
            claim.release()
    assert heard == [frozenset(names) for names, _ in taken if names]
    again = claims.take_if_free(NAMES)
    assert again is not None
    again.release()
    assert len(heard) == len([names for names, _ in taken if names])


@both
def test_one_who_hears_of_a_release_may_claim_at_once(backend: str) -> None:
    async def main() -> None:
        claims = Claims()
        claim = await claims.take(NAMES)
        seized: list[Claim | None] = []
        with claims.on_release(lambda names: seized.append(claims.take_if_free(sorted(names)))):
            claim.release()
            assert all(is_held(claims, name) for name in NAMES)
        assert len(seized) == 1
        assert seized[0] is not None
        seized[0].release()

    run(backend, main)


def test_names_of_different_owners_and_kinds_differ() -> None:
    number = count()
    names = {
        name(owner, text): next(number)
        for name in (key_name, group_name)
        for owner in (None, "", "=", "a")
        for text in ("", "=", "k")
    }
    assert len(names) == next(number)
    assert id_name("k") not in names
