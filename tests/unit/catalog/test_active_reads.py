"""ActiveReads: a read sees each record in one home, and delays the deletion of copies that it may still need."""

from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from a2m_router.catalog.active_reads import ActiveReads, Reading
from a2m_router.catalog.entries import Entry
from tests.support.examples import scaled

TIERS = ["working", "episodic", "semantic"]
IDS = ["x", "y", ""]


def record(id: str, home: str, number: int = 1) -> Entry:
    return Entry(id=id, home=home, created_at=0, digest=b"", seq=number)


class Read:
    def __init__(self, reading: Reading, ending: ExitStack, homes: dict[str, str | None]) -> None:
        self.reading, self.ending, self.homes = reading, ending, homes


class Model(RuleBasedStateMachine):
    """Each read remembers the homes at its beginning; records that did not exist had none."""

    def __init__(self) -> None:
        super().__init__()
        self.newest = 1
        self.active = ActiveReads(lambda: self.newest)
        self.homes = dict.fromkeys(IDS, TIERS[0])
        self.numbers = dict.fromkeys(IDS, 1)
        self.reads: list[Read] = []

    @rule()
    def a_read_begins(self) -> None:
        ending = ExitStack()
        reading = ending.enter_context(self.active.reading())
        self.reads.append(Read(reading, ending, dict(self.homes)))

    @precondition(lambda self: self.reads)
    @rule(which=st.integers(0, 9))
    def a_read_ends(self, which: int) -> None:
        self.reads.pop(which % len(self.reads)).ending.close()

    @rule(id=st.sampled_from(IDS), home=st.sampled_from(TIERS))
    def a_record_moves(self, id: str, home: str) -> None:
        if home != self.homes[id]:
            self.active.moved(id, self.homes[id])
            self.homes[id] = home

    @rule(id=st.sampled_from(IDS), home=st.sampled_from(TIERS))
    def a_record_is_forgotten_and_another_written_under_its_id(self, id: str, home: str) -> None:
        self.newest += 1
        self.numbers[id] = self.newest
        self.homes[id] = home
        for read in self.reads:
            read.homes[id] = None

    @invariant()
    def each_read_accepts_the_home_at_its_beginning(self) -> None:
        for read in self.reads:
            for id, home in self.homes.items():
                entry = record(id, home, self.numbers[id])
                accepted = [tier for tier in TIERS if self.active.accepts(read.reading, entry, tier)]
                before = read.homes[id]
                assert accepted == ([] if before is None else [before])

    @invariant()
    def each_read_is_told_what_has_left_a_home_since_it_began(self) -> None:
        for read in self.reads:
            for tier in TIERS:
                left = self.active.left(read.reading, tier)
                lived = {id for id, home in read.homes.items() if home == tier}
                assert lived.issuperset(id for id in left if read.homes[id] is not None)
                assert {id for id in lived if self.homes[id] != tier}.issubset(left)

    @invariant()
    def without_reads_nothing_is_remembered(self) -> None:
        if not self.reads:
            assert remembered(self.active) == 0


def remembered(active: ActiveReads) -> int:
    return len(active._order) + sum(map(len, active._left.values())) + len(active._reads)


TestReaders: Any = Model.TestCase
TestReaders.settings = settings(max_examples=scaled(40), stateful_step_count=30)


def test_memory_does_not_grow_while_reads_always_overlap() -> None:
    active = ActiveReads(lambda: 1)
    earlier = ExitStack()
    earlier.enter_context(active.reading())
    most = 0
    for turn in range(1000):
        later = ExitStack()
        later.enter_context(active.reading())
        active.moved(f"{turn % 7}", TIERS[turn % 3])
        earlier.close()
        earlier = later
        most = max(most, remembered(active))
    assert most < 10
    earlier.close()


def test_a_long_read_accepts_where_everything_was_when_it_began() -> None:
    active = ActiveReads(lambda: 1)
    with active.reading() as long:
        for turn in range(100):
            with active.reading():
                active.moved("x", TIERS[turn % 3])
        assert active.accepts(long, record("x", TIERS[1]), TIERS[0])
        assert not active.accepts(long, record("x", TIERS[1]), TIERS[2])
    assert remembered(active) == 0


@pytest.mark.anyio
async def test_grace_is_over_when_every_read_that_was_under_way_has_ended() -> None:
    active = ActiveReads(lambda: 1)
    over = False

    async def wait() -> None:
        nonlocal over
        await active.grace()
        over = True

    first, second, late = ExitStack(), ExitStack(), ExitStack()
    first.enter_context(active.reading())
    second.enter_context(active.reading())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(wait)
        await anyio.wait_all_tasks_blocked()
        late.enter_context(active.reading())
        second.close()
        await anyio.wait_all_tasks_blocked()
        assert not over
        first.close()
        await anyio.wait_all_tasks_blocked()
        assert over
    late.close()
    await active.grace()  # returns at once: no read is under way
