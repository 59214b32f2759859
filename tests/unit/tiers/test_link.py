"""A link to one tier: supervision, deadlines, the breaker. Time is simulated, and jumps."""

import json
import logging
import sys
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.process.budget import budget, left
from a2m_router.protocol.client.child import CannotStart, connect_process
from a2m_router.protocol.client.client import Connection, Settled, connect_local
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.errors import A2MError, unanswered_in
from a2m_router.tiers.backoff import FIRST, LONGEST, STEADY, Backoff
from a2m_router.tiers.breaker import PATIENCE
from a2m_router.tiers.concurrency import ConcurrencyLimit
from a2m_router.tiers.link import Link, LinkStatus, Overloaded, TierDown
from a2m_router.tiers.profile import BadProfile, Store, read_profile
from tests.support.clocks import simulated

DESCRIBED: dict[str, Any] = {"protocol": "a2m/0.1", "name": "a tier's server", "capabilities": ["core"]}


class Tier:
    """A tier's server in this process, with faults that the test can switch on."""

    def __init__(self) -> None:
        self.described: Any = DESCRIBED
        self.starts: list[float] = []  # the times of its starts
        self.calls: list[tuple[float, str]] = []  # the calls that it got, with their times
        self.cannot_start = False
        self.dies_at_once = False
        self.deaf = False  # takes calls and does not answer
        self.greets_after = 0.0
        self.takes = 0.0  # seconds to answer
        self.one_after_the_other = False
        self.refusal: dict[str, Any] | None = None  # the data of the error that answers a recall
        self.silences = 0  # of the service behind it, in a row
        self._turn = anyio.Lock()
        self._die = anyio.Event()

    def die(self) -> None:
        self._die.set()

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        self.starts.append(anyio.current_time())
        self._die = anyio.Event()
        if self.cannot_start:
            raise CannotStart("'tier' cannot be started: there is no such program")
        async with connect_local(self._answer) as connection, anyio.create_task_group() as tasks:
            if self.dies_at_once:
                connection.lose("it ended with status 1")

            async def lose() -> None:
                await self._die.wait()
                connection.lose("it was killed by SIGKILL")

            tasks.start_soon(lose)
            yield connection
            tasks.cancel_scope.cancel()

    async def _answer(self, message: bytes, _: Caller) -> bytes | None:
        call = json.loads(message)
        method = call["method"]
        self.calls.append((anyio.current_time(), method))
        if method == "memory/describe":
            await anyio.sleep(self.greets_after)
        elif self.one_after_the_other:
            async with self._turn:
                await anyio.sleep(self.takes)
        else:
            await anyio.sleep(self.takes)
        if self.deaf or method == "memory/remember":
            await anyio.sleep_forever()
        if method == "memory/fetch":
            self.die()
            await anyio.sleep_forever()
        answer = {"jsonrpc": "2.0", "id": call["id"]}
        if method == "memory/recall" and self.refusal is not None:
            if "unanswered" in self.refusal:
                self.silences += 1
                self.refusal["unanswered"] = self.silences
            error = {"code": -32603, "message": "pages: no answer within 1 s", "data": self.refusal}
            return json.dumps({**answer, "error": error}).encode()
        if method == "memory/describe":
            return json.dumps({**answer, "result": self.described}).encode()
        if method == "memory/promote":
            return json.dumps({**answer, "error": {"code": -32003, "message": "no"}}).encode()
        return json.dumps({**answer, "result": call["params"]}).encode()


@asynccontextmanager
async def linked(tier: Tier, timeout: float = 5.0) -> AsyncIterator[Link]:
    link = Link("episodic", tier.connect, timeout=timeout, transport="local", random=lambda: 1.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        yield link
        tasks.cancel_scope.cancel()


async def down(link: Link) -> None:
    gone = anyio.Event()
    link.on_change(lambda link: gone.set() if link.status == "down" else None)
    while link.status != "down":
        await gone.wait()


@simulated
async def test_a_link_is_up_when_it_has_greeted() -> None:
    tier = Tier()
    async with linked(tier) as link:
        assert link.describe_status() == LinkStatus("starting", None, None, "local")
        with pytest.raises(TierDown, match="still starting"):
            await link.call("memory/recall", {})
        await link.wait_up()
        assert link.describe_status() == LinkStatus("up", None, "a tier's server", "local")
        assert link.profile is not None
        assert link.profile.capabilities == {"core"}
        assert msgspec.json.decode(await link.call("memory/recall", {"a": 1})) == {"a": 1}


@simulated
async def test_a_tier_that_is_no_a2m_server_stays_down_and_says_why() -> None:
    tier = Tier()
    tier.described = {**DESCRIBED, "protocol": "a2m/0.9"}
    async with linked(tier) as link:
        await link.wait_greeted()
        assert link.status == "down"
        assert link.reason == "memory/describe: protocol: expected a2m/0.1, the server speaks 'a2m/0.9'"
        tier.described = DESCRIBED
        await link.wait_up()


@simulated
async def test_a_lost_tier_is_connected_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    tier = Tier()
    changes: list[str] = []
    async with linked(tier) as link:
        link.on_change(lambda link: changes.append(link.status))
        await link.wait_up()
        tier.die()
        await down(link)
        assert link.reason == "it was killed by SIGKILL"
        with pytest.raises(TierDown) as failure:
            await link.call("memory/recall", {})
        assert (failure.value.tier, failure.value.retry_after) == ("episodic", FIRST)
        assert failure.value.settled is None
        await link.wait_up()
        assert changes == ["up", "down", "up"]
    assert [record.getMessage() for record in caplog.records if record.name == "a2m_router.tiers"] == [
        "tier=episodic up: a tier's server",
        "tier=episodic down, retry in 0.5 s: it was killed by SIGKILL",
        "tier=episodic up: a tier's server",
    ]


@pytest.mark.parametrize("how", ["cannot_start", "dies_at_once"])
@simulated
async def test_a_tier_that_does_not_come_up_is_tried_ever_more_rarely(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    tier = Tier()
    setattr(tier, how, True)
    async with linked(tier) as link:
        await anyio.sleep(120)
        gaps = [round(b - a, 3) for a, b in zip(tier.starts, tier.starts[1:], strict=False)]
        assert gaps == [0.5, 1, 2, 4, 8, 16, 30, 30]
        assert link.status == "down"
        setattr(tier, how, False)
        await link.wait_up()
    assert caplog.text.count("tier=episodic down, retry in") == 1


@simulated
async def test_waits_start_over_only_after_steady_health() -> None:
    tier = Tier()
    async with linked(tier) as link:
        for health, wait in [(1, 0.5), (1, 1.0), (1, 2.0), (STEADY + 1, 0.5), (1, 1.0)]:
            await link.wait_up()
            await anyio.sleep(health)
            tier.die()
            await down(link)
            died = anyio.current_time()
            await link.wait_up()
            assert anyio.current_time() - died == pytest.approx(wait)


@simulated
async def test_a_server_that_starts_slowly_is_given_its_time() -> None:
    tier = Tier()
    tier.greets_after = 20
    async with linked(tier) as link:
        await link.wait_up()
        assert len(tier.starts) == 1


@simulated
async def test_one_late_answer_is_the_matter_of_its_call_alone() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        began = anyio.current_time()
        with pytest.raises(TierDown, match="episodic: no answer within 5 s") as failure:
            await link.call("memory/remember", {})
        assert anyio.current_time() - began == pytest.approx(5)
        assert failure.value.settled is not None
        assert link.status == "up"
        with pytest.raises(TierDown, match=r"no answer within 0\.2 s"):
            await link.call("memory/remember", {}, timeout=0.2)


@simulated
async def test_five_failures_in_a_row_open_the_breaker_and_a_greeting_closes_it() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.deaf = True
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(failing, link)
        assert link.status == "down"
        assert link.reason == "5 calls in a row were not answered; of the last: no answer within 5 s"
        opened = anyio.current_time()
        tier.calls.clear()
        with pytest.raises(TierDown) as failure:
            await link.call("memory/recall", {})
        assert anyio.current_time() == opened
        assert (failure.value.retry_after, failure.value.settled) == (0.5, None)
        await anyio.sleep(20)
        tier.deaf = False
        await link.wait_up()
        # one greeting at a time: the first after 0.5 s, the next one 1 s after its deadline of 30 s
        assert [(round(at - opened, 3), method) for at, method in tier.calls] == [
            (0.5, "memory/describe"),
            (31.5, "memory/describe"),
        ]
        assert len(tier.starts) == 1


async def failing(link: Link) -> None:
    with pytest.raises(TierDown):
        await link.call("memory/recall", {})


@simulated
async def test_any_answer_closes_the_row_of_failures() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        for method in ["memory/recall", "memory/promote"]:
            for _ in range(4):
                with pytest.raises(TierDown):
                    await link.call("memory/remember", {})
            if method == "memory/promote":
                with pytest.raises(A2MError, match="no"):
                    await link.call(method, {})
            else:
                await link.call(method, {})
        for _ in range(4):
            with pytest.raises(TierDown):
                await link.call("memory/remember", {})
        assert link.status == "up"


# the service behind a tier's server

SILENT: dict[str, Any] = {"status": "down", "reason": "pages: no answer within 1 s"}


def behind(tier: Tier, *, silent: bool) -> None:
    """Let the service behind a tier's server answer from now on, or be silent."""
    tier.silences = 0
    tier.refusal = {"reason": "no answer", "unanswered": 0} if silent else None
    tier.described = {**DESCRIBED, "service": SILENT if silent else {"status": "up"}}


@simulated
async def test_a_silent_service_opens_the_breaker_and_is_probed_by_greetings() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        behind(tier, silent=True)
        for number in range(5):
            with pytest.raises(A2MError, match="no answer within 1 s"):
                await link.call("memory/recall", {})
            if number < 4:
                await link.call("memory/timeline", {})  # answered without the service, so that it proves nothing
        assert link.status == "down"
        assert link.reason == "5 calls in a row were not answered; of the last: pages: no answer within 1 s"
        opened = anyio.current_time()
        tier.calls.clear()
        with pytest.raises(TierDown, match="5 calls in a row"):
            await link.call("memory/recall", {})
        assert anyio.current_time() == opened
        await anyio.sleep(10)
        assert (link.status, link.reason) == ("down", "pages: no answer within 1 s")
        assert [(round(at - opened, 3), method) for at, method in tier.calls] == [
            (wait, "memory/describe") for wait in (0.5, 1.5, 3.5, 7.5)
        ]
        behind(tier, silent=False)
        await link.wait_up()
        await link.call("memory/recall", {})
        assert len(tier.starts) == 1


@simulated
async def test_a_service_whose_silence_is_told_too_late_is_not_taken_for_slow() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        behind(tier, silent=True)
        tier.takes = 8.0
        for _ in range(5):
            with pytest.raises(TierDown, match="no answer within 5 s"):
                await link.call("memory/recall", {})
        assert link.status == "down"


@pytest.mark.parametrize("data", [{}, {"reason": "no answer"}, {"reason": "x", "silent": 9}])
@simulated
async def test_what_a_service_refuses_is_no_failure(data: dict[str, Any]) -> None:
    tier = Tier()
    tier.refusal = data
    async with linked(tier) as link:
        await link.wait_up()
        for _ in range(20):
            with pytest.raises(A2MError):
                await link.call("memory/recall", {})
        assert link.status == "up"


@pytest.mark.parametrize("times", [0, -1, True, "5", None, [5], 1.5])
def test_only_a_number_of_times_says_that_a_service_did_not_answer(times: Any) -> None:
    assert unanswered_in(A2MError(-32603, "no", {"unanswered": times})) == 0
    assert unanswered_in(A2MError(-32603, "no")) == 0
    assert unanswered_in(A2MError(-32603, "no", {"unanswered": 5})) == 5


@simulated
async def test_a_service_that_has_answered_in_between_is_given_five_more_calls() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        for _ in range(3):
            behind(tier, silent=True)
            for _ in range(4):
                with pytest.raises(A2MError):
                    await link.call("memory/recall", {})
            behind(tier, silent=False)
            await link.call("memory/recall", {})
        assert link.status == "up"


@simulated
async def test_a_tier_whose_service_is_down_is_down_and_known_all_the_same() -> None:
    tier = Tier()
    behind(tier, silent=True)
    async with linked(tier) as link:
        await link.wait_greeted()
        assert link.describe_status() == LinkStatus("down", SILENT["reason"], "a tier's server", "local")
        # the server itself works, so it is not restarted at once; but the fault may be its own after all
        await anyio.sleep(PATIENCE - 1)
        assert len(tier.starts) == 1
        await anyio.sleep(2000)
        lives = [b - a for a, b in pairwise(tier.starts)]
        assert len(lives) > 3
        for number, life in enumerate(lives):
            assert PATIENCE * 2**number <= life <= PATIENCE * 2**number + 2 * LONGEST
        behind(tier, silent=False)
        await link.wait_up()


@simulated
async def test_a_look_says_at_once_how_the_service_is() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.described = {**DESCRIBED, "name": "renamed"}
        await link.look()
        assert link.describe_status() == LinkStatus("up", None, "renamed", "local")
        behind(tier, silent=True)
        await link.look()
        assert link.describe_status() == LinkStatus("down", SILENT["reason"], "a tier's server", "local")
        with pytest.raises(TierDown, match="no answer within 1 s"):
            await link.look()
        behind(tier, silent=False)
        await link.wait_up()
        tier.described = {"name": "no server any more"}
        with pytest.raises(TierDown, match="memory/describe: "):
            await link.look()


@simulated
async def test_a_slow_look_is_not_waited_for_and_counts() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        assert await link.is_seen_within(1.0)
        behind(tier, silent=True)
        tier.greets_after = 4.0
        tier.calls.clear()
        assert (await link.is_seen_within(1.0), link.status, tier.calls) == (
            True,
            "up",
            [],
        )  # a look stays valid for a while
        await anyio.sleep(10.0)
        began = anyio.current_time()
        seen: list[bool] = []

        async def look() -> None:
            seen.append(await link.is_seen_within(1.0))

        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(look)
        assert (seen, link.status) == ([False] * 3, "up")
        assert anyio.current_time() - began == pytest.approx(1.0)
        assert len(tier.calls) == 1
        await down(link)
        assert link.reason == SILENT["reason"]
        assert anyio.current_time() - began == pytest.approx(4.0)
        tier.greets_after = 0.0
        behind(tier, silent=False)
        await link.wait_up()
        assert await link.is_seen_within(1.0)


@pytest.mark.parametrize("service", ["pages", None, 3, {"status": "ill"}, {"status": "down", "reason": 5}, []])
def test_what_another_server_calls_its_service_is_no_matter(service: Any) -> None:
    assert read_profile(json.dumps({**DESCRIBED, "service": service}).encode()).ailment is None


@simulated
async def test_a_connection_that_stays_deaf_is_replaced() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.deaf = True
        for _ in range(5):
            await failing(link)
        opened = anyio.current_time()
        await anyio.sleep(2000)
        # a server with a long start gets twice the time with every trial
        silences = [b - a for a, b in pairwise([opened, *tier.starts[1:]])]
        assert len(silences) > 3
        for number, silence in enumerate(silences):
            assert PATIENCE * 2**number <= silence <= PATIENCE * 2**number + 100
        tier.deaf = False
        await link.wait_up()


@simulated
async def test_a_server_that_is_slow_is_not_taken_for_dead() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.takes = 8.0
        for _ in range(20):
            with pytest.raises(TierDown, match="no answer within 5 s"):
                await link.call("memory/recall", {})
        assert link.status == "up"
        await anyio.sleep(10)
        tier.takes = tier.greets_after = 20.0
        async with anyio.create_task_group() as tasks:
            for _ in range(7):
                tasks.start_soon(failing, link)
        assert str(link.status) == "down"  # no answer of any kind has come for as long as it takes
        await link.wait_up()
        assert len(tier.starts) == 1


@simulated
async def test_a_call_that_is_given_little_time_says_nothing_of_its_tier() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        for _ in range(20):
            with pytest.raises(TierDown):
                await link.call("memory/remember", {}, timeout=1)
            with budget(2), pytest.raises(TierDown):
                await link.call("memory/remember", {})
        assert link.status == "up"


@simulated
async def test_the_calls_of_a_request_share_its_time() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.takes = 3.0
        began = anyio.current_time()
        with budget(8):
            await link.call("memory/recall", {})
            await link.call("memory/recall", {})
            with pytest.raises(TierDown, match="no answer within 2 s"):
                await link.call("memory/recall", {})
            assert left() == 0
        assert anyio.current_time() - began == pytest.approx(8)
        await link.call("memory/recall", {})


@simulated
async def test_more_calls_than_there_may_be_are_refused_at_once() -> None:
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=2, random=lambda: 1.0)
    ends: list[tuple[float, str]] = []

    async def recall() -> None:
        try:
            await link.call("memory/recall", {})
        except TierDown as refused:
            ends.append((anyio.current_time(), refused.reason))
        else:
            ends.append((anyio.current_time(), "answered"))

    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        tier.takes = 1.0
        async with anyio.create_task_group() as calls:
            with budget(60):
                for _ in range(7):
                    calls.start_soon(recall)
            calls.start_soon(recall)  # background calls wait, and are never rejected
        # two calls at a time, and one waits for its turn
        assert ends == [(0, "overloaded")] * 4 + [(1, "answered")] * 3 + [(2, "answered")]
        with budget(60):
            await recall()
        assert (link.status, ends[-1]) == ("up", (3, "answered"))
        tasks.cancel_scope.cancel()


@pytest.mark.slow
@simulated
async def test_a_tier_that_cannot_do_so_much_in_time_is_asked_for_less() -> None:
    """The tier can answer ten calls a second, and gets many more, each with a deadline of 5 s."""
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=256, random=lambda: 1.0)
    late: list[float] = []
    good: list[float] = []

    async def recall() -> None:
        try:
            await link.call("memory/recall", {})
        except Overloaded:
            pass
        except TierDown:
            late.append(anyio.current_time())
        else:
            good.append(anyio.current_time())

    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        tier.one_after_the_other = True
        tier.takes = 0.1
        with budget(600):
            async with anyio.create_task_group() as calls:
                for _ in range(60 * 25):
                    calls.start_soon(recall)
                    await anyio.sleep(0.04)
        assert link.status == "up"
        assert len([at for at in late if at > 40]) < len([at for at in good if at > 40]) / 10
        assert len([at for at in good if at > 40]) > 0.9 * 10 * 20
        # when the tier is faster again, it gets more calls
        tier.takes = 0.001
        with budget(600):
            async with anyio.create_task_group() as calls:
                for _ in range(1000):
                    calls.start_soon(recall)
                    await anyio.sleep(0.0011)
        assert len([at for at in good if at > 60]) > 980
        tasks.cancel_scope.cancel()


@given(st.lists(st.booleans(), max_size=300), st.integers(1, 300))
def test_the_bound_on_calls_stays_within_its_bounds(answers: list[bool], most: int) -> None:
    room = ConcurrencyLimit(most)
    for in_time in answers:
        before = room.calls
        number = room.begin()
        room.ended(number, in_time=in_time)
        assert 1 <= room.calls <= most
        assert room.calls >= before if in_time else room.calls <= before
        assert 1 <= room.waiting <= max(1, most // 4)


def test_calls_that_were_under_way_together_lower_the_bound_once() -> None:
    room = ConcurrencyLimit(100)
    numbers = [room.begin() for _ in range(100)]
    for number in numbers:
        room.ended(number, in_time=False)
    assert room.calls == 50
    room.ended(room.begin(), in_time=False)
    assert room.calls == 25


@simulated
async def test_a_call_does_not_wait_longer_for_its_turn_than_for_its_answer() -> None:
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=1, random=lambda: 1.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        with budget(60):
            tasks.start_soon(failing_write, link)
        await anyio.sleep(2)
        with budget(2), pytest.raises(Overloaded):
            await link.call("memory/recall", {})
        assert anyio.current_time() == pytest.approx(4)
        tasks.cancel_scope.cancel()


async def failing_write(link: Link) -> None:
    with pytest.raises(TierDown):
        await link.call("memory/remember", {})


@simulated
async def test_a_read_is_tried_once_more_when_its_connection_is_lost() -> None:
    tier = Tier()
    async with linked(tier, timeout=60) as link:
        await link.wait_up()
        with pytest.raises(TierDown, match="SIGKILL"):
            await link.call("memory/fetch", {})  # kills the tier each time
        assert [method for _, method in tier.calls].count("memory/fetch") == 2


@simulated
async def test_a_read_that_can_be_answered_the_second_time_is() -> None:
    tier = Tier()
    # calls under way in the old server get 5 s to end
    async with linked(tier, timeout=30) as link:
        await link.wait_up()
        tier.deaf = True
        answers = []
        async with anyio.create_task_group() as tasks:

            async def recall() -> None:
                answers.append(await link.call("memory/recall", {"a": 1}))

            tasks.start_soon(recall)
            await anyio.sleep(1)
            tier.deaf = False
            tier.die()
        assert [msgspec.json.decode(answer) for answer in answers] == [{"a": 1}]


@simulated
async def test_a_read_is_not_tried_again_when_the_tier_is_not_back_in_time() -> None:
    tier = Tier()
    async with linked(tier, timeout=3) as link:
        await link.wait_up()
        began = anyio.current_time()
        tier.greets_after = 10
        with pytest.raises(TierDown, match="SIGKILL"):
            await link.call("memory/fetch", {})
        assert anyio.current_time() - began == pytest.approx(3)


@simulated
async def test_a_write_is_never_tried_again_by_the_link() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        async with anyio.create_task_group() as tasks:

            async def write() -> None:
                with pytest.raises(TierDown, match="SIGKILL") as failure:
                    await link.call("memory/remember", {})
                assert failure.value.settled is not None
                await link.settle(failure.value.settled)

            tasks.start_soon(write)
            await anyio.sleep(1)
            tier.die()
        await link.wait_up()
        assert [method for _, method in tier.calls].count("memory/remember") == 1


@simulated
async def test_a_late_write_is_settled_by_asking() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        with pytest.raises(TierDown) as failure:
            await link.call("memory/remember", {})
        assert failure.value.settled is not None
        assert not failure.value.settled.is_set()
        with anyio.fail_after(1):
            await link.settle(failure.value.settled)


@simulated
async def test_a_write_to_a_deaf_tier_is_settled_when_its_connection_is_replaced() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        tier.deaf = True
        with pytest.raises(TierDown) as failure:
            await link.call("memory/remember", {})
        assert failure.value.settled is not None
        await link.settle(failure.value.settled)
        # its connection has ended, and the next one has at most begun
        assert anyio.current_time() >= PATIENCE


@simulated
async def test_a_cancelled_call_tells_when_it_will_be_settled() -> None:
    tier = Tier()
    unsettled: list[Settled] = []
    async with linked(tier) as link:
        await link.wait_up()
        with anyio.move_on_after(1):
            await link.call("memory/remember", {}, on_unsettled=unsettled.append)
        await link.settle(unsettled[0])


async def asked(link: Link) -> str:
    """Return the result of a client's call."""
    with budget(60):
        try:
            await link.call("memory/recall", {"query": "x"})
        except TierDown as down:
            return down.reason
    return "answered"


@simulated
async def test_an_answer_that_was_lost_does_not_keep_a_place_for_good() -> None:
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=1, random=lambda: 1.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        tier.deaf = True
        assert await asked(link) == "no answer within 5 s"
        tier.deaf = False
        await anyio.sleep(60)
        assert await asked(link) == "answered"
        tasks.cancel_scope.cancel()


@simulated
async def test_a_tier_with_few_places_that_hangs_is_found_to_be_dead() -> None:
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=2, random=lambda: 1.0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        tier.deaf = True
        for _ in range(20):
            await asked(link)
            await anyio.sleep(30)
        assert (link.status, len(tier.starts) > 1) == ("down", True)
        began = anyio.current_time()
        assert "overloaded" not in await asked(link)
        assert anyio.current_time() == began
        tasks.cancel_scope.cancel()


@simulated
async def test_a_request_whose_time_is_over_is_told_so() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        with budget(1):
            await anyio.sleep(2)
            with pytest.raises(TierDown, match="the time that the request may take is over"):
                await link.call("memory/recall", {})
        assert [method for _, method in tier.calls] == ["memory/describe"]


# the schedule


@given(st.lists(st.booleans(), max_size=100), st.floats(0, 1, exclude_max=True))
def test_waits_are_jittered_and_bounded(steady: list[bool], chance: float) -> None:
    backoff = Backoff(lambda: chance)
    now, length = 0.0, FIRST
    for healthy in steady:
        if healthy:
            backoff.succeeded(now)
            now += STEADY + 1
            length = FIRST
        wait = backoff.failed(now)
        assert length / 2 <= wait <= length
        now += wait
        length = min(LONGEST, 2 * length)


# profiles


def test_a_profile_is_what_the_server_declares() -> None:
    described = {
        **DESCRIBED,
        "capabilities": ["core", "embeddings", "keys"],
        "limits": {"max_recall_limit": 50, "other": True},
        "embeddings": {"dimensions": None, "metric": "cosine", "metrics": ["cosine"]},
        "store": {"identity": "x", "records": 3, "keeps": ["created_at"], "pages": True, "similarity": True},
    }
    profile = read_profile(json.dumps(described).encode())
    assert profile.capabilities == {"core", "embeddings", "keys"}
    assert (profile.max_recall_limit, profile.max_records_per_call) == (50, None)
    assert (profile.dimensions, profile.metric) == (None, "cosine")
    expected = Store(identity="x", records=3, keeps=frozenset({"created_at"}), pages=True, similarity=True)
    assert profile.store == expected


@pytest.mark.parametrize("store", ["sqlite", None, 3, {"pages": "many"}])
def test_what_another_server_calls_its_store_is_no_matter(store: Any) -> None:
    assert read_profile(json.dumps({**DESCRIBED, "store": store}).encode()).store == Store()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"protocol": "a2m/0.2"}, "protocol: expected a2m/0.1"),
        ({"protocol": None}, "protocol: expected a string, got null"),
        ({"capabilities": ["keys"]}, "'core' is required"),
        ({"capabilities": "core"}, "capabilities: expected an array"),
        ({"limits": {"max_recall_limit": 8.5}}, "limits.max_recall_limit: expected an integer or null"),
        ({"capabilities": ["core", "embeddings"]}, "embeddings: required"),
    ],
)
def test_what_is_no_profile_is_refused_with_its_place(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadProfile) as failure:
        read_profile(json.dumps({**DESCRIBED, **change}).encode())
    assert sentence in str(failure.value)


def test_a_profile_that_lacks_something_is_refused() -> None:
    with pytest.raises(BadProfile, match=r"^memory/describe: capabilities: required, and missing$"):
        read_profile(b'{"protocol": "a2m/0.1", "name": "n"}')


# a real process

PEER = """
    import json, os, sys

    for line in sys.stdin:
        call = json.loads(line)
        if call["method"] == "memory/forget":
            os._exit(1)
        described = {"protocol": "a2m/0.1", "name": "child", "capabilities": ["core"], "pid": os.getpid()}
        print(json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": described}), flush=True)
"""


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", ("asyncio", {"use_uvloop": True}), "trio"])
async def test_a_child_that_dies_is_started_again(tmp_path: Path) -> None:
    script = tmp_path / "peer.py"
    script.write_text(textwrap.dedent(PEER))

    def connect() -> Any:
        return connect_process([sys.executable, str(script)], name="child", on_stderr=lambda _: None)

    link = Link("working", connect, timeout=20, transport="a child", random=lambda: 0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run)
        with anyio.fail_after(30):
            await link.wait_up()
            first = msgspec.json.decode(await link.call("memory/describe", {}))["pid"]
            with pytest.raises(TierDown, match="it ended with status 1") as failure:
                await link.call("memory/forget", {})
            assert failure.value.settled is not None
            await link.settle(failure.value.settled)
            await link.wait_up()
            assert msgspec.json.decode(await link.call("memory/describe", {}))["pid"] != first
        tasks.cancel_scope.cancel()


# --- calls that may change a tier before it was looked at


async def change(link: Link, timeout: float = 5.0) -> str:
    try:
        await link.call("memory/forget", {}, timeout=timeout)
    except TierDown as problem:
        return problem.reason if problem.settled is None else "it was sent"
    return "answered"


@simulated
async def test_a_barred_tier_is_read_and_not_changed_until_it_is_admitted() -> None:
    tier = Tier()
    async with linked(tier) as link:
        await link.wait_up()
        assert await change(link) == "answered"
        link.bar()
        assert await change(link) == "what it holds is still being taken into the account"
        link.inactive_reason = "it is not looked at yet"
        assert await change(link) == "it is not looked at yet"
        for read in ("memory/recall", "memory/timeline", "memory/session/list", "memory/describe"):
            await link.call(read, {})
        await link.call("memory/forget", {}, is_harmless=True)
        link.admit(link.risen)
        assert await change(link) == "answered"


@simulated
async def test_a_tier_that_has_come_up_anew_is_barred_anew() -> None:
    tier = Tier()
    async with linked(tier) as link:
        link.bar()
        await link.wait_up()
        risen = link.risen
        link.admit(risen)
        tier.die()
        await down(link)
        await link.wait_up()
        link.admit(risen)  # this was an earlier connection
        assert await change(link) == "what it holds is still being taken into the account"
        link.admit(link.risen)
        assert await change(link) == "answered"


@simulated
async def test_a_waiting_change_is_not_sent_to_a_tier_that_came_back() -> None:
    tier = Tier()
    link = Link("episodic", tier.connect, timeout=5, most_calls=1, random=lambda: 1.0)
    found: list[str] = []

    async def waiting() -> None:
        with budget(200):
            found.append(await change(link, timeout=200))

    async def in_its_place() -> None:
        with budget(50), pytest.raises(TierDown):
            await link.call("memory/recall", {}, timeout=50)

    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        link.bar()
        await link.wait_up()
        link.admit(link.risen)
        tier.deaf = True
        tasks.start_soon(in_its_place)
        await anyio.sleep(1)
        tasks.start_soon(waiting)
        while link.status == "up":
            with suppress(TierDown):
                await link.call("memory/recall", {})
        tier.deaf = False
        await link.wait_up()
        assert found == []
        await anyio.sleep(100)
        assert found == ["what it holds is still being taken into the account"]
        tasks.cancel_scope.cancel()
