"""The reconcilers of two tiers that owe different things to one record: a stray and a pending write."""

import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import apsw
import msgspec
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.claims import id_name
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.queries import Queries
from a2m_router.placement.reconciler import Reconciler
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error
from tests.support.catalogs import strays_left
from tests.support.clocks import simulated
from tests.support.crashes import photograph
from tests.support.federated import (
    CALM,
    Foreign,
    Mix,
    Steered,
    Task,
    Trial,
    contents,
    disconnect,
    held_by,
    lose,
    plant,
    redone,
    trial,
)

pytestmark = pytest.mark.anyio

# cannot replace in place: the router forgets the old copy there before it writes the new one
LIFTED = {"semantic": Foreign()}
ALL_LIFTED = {tier: Foreign() for tier in ("working", "semantic")}


async def test_a_copy_left_behind_goes_when_its_home_has_caught_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "before").mkdir()
    steer = Steered()
    async with trial(CALM, servers=LIFTED, weather=steer, folder=tmp_path / "before") as fed:
        [id] = await fed.remember("old", key="k")
        steer.refuse("working", "forget")
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}
        halfway = steer.hold("semantic", "remember", having=b"new")
        await fed.remember("new", key="k")
        await halfway.reached.wait()
        await wait_all_tasks_blocked()
        folder = photograph(tmp_path / "before", tmp_path / "after")
        halfway.release()
    # the reconciler of working looks at the home before the pending write reaches it
    look, replace = Reconciler._seen_at_home, Reconciler._replace
    looked = anyio.Event()

    async def look_first(self: Reconciler, entries: Sequence[Entry], tier: str) -> Any:
        seen = await look(self, entries, tier)
        if entries:
            looked.set()
        return seen

    async def replace_late(self: Reconciler, tier: str, entries: Sequence[Entry]) -> dict[str, str]:
        if tier == "semantic":
            await looked.wait()
        return await replace(self, tier, entries)

    monkeypatch.setattr(Reconciler, "_seen_at_home", look_first)
    monkeypatch.setattr(Reconciler, "_replace", replace_late)
    caplog.set_level(logging.ERROR)
    async with trial(CALM, servers=LIFTED, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"new": "semantic"}
        with anyio.fail_after(60):
            while strays_left(fed.federation.catalog):  # noqa: ASYNC110 - no event to wait for
                await anyio.sleep(0.01)
        assert contents(await fed.timeline()) == {"new": "semantic"}
    assert "record lost" not in caplog.text


@pytest.mark.parametrize("servers", [{}, LIFTED], ids=["native", "lesser"])
async def test_a_replaced_record_can_be_moved_before_stale_copies_are_deleted(
    servers: Mix,
) -> None:
    """A record with a new replacement can be moved although its tier has stray copies to delete first."""
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("old", key="k", tier="semantic")
        [other] = await fed.remember("forgotten", tier="semantic")
        removal = steer.hold("semantic", "forget", having=other.encode())
        await fed.call("forget", ids=[other])
        await removal.reached.wait()
        await fed.remember("new", key="k")
        move = Task(tasks, lambda: fed.call("promote", ids=[id], tier="working"))
        await wait_all_tasks_blocked()
        removal.release()
        assert await move.ended() == {"promoted": 1}
        assert contents(await fed.timeline()) == {"new": "working"}


@pytest.mark.rule(n=12)
async def test_a_tier_that_hangs_keeps_no_other_tier_from_being_reconciled() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        ids = [*await fed.remember("a", tier="working"), *await fed.remember("b", tier="semantic")]
        hung = steer.hold("working", "forget")
        await fed.call("forget", ids=ids)
        await hung.reached.wait()
        await wait_all_tasks_blocked()
        assert fed.copies() == {ids[0]: ["working"]}
        hung.release()
        await fed.settled()
        assert fed.copies() == {}


async def test_one_replacement_that_its_tier_refuses_keeps_no_other_one_from_it() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        await fed.remember("old a", key="a")
        await fed.remember("old b", key="b")
        steer.refuse("working", "remember", having=b"new a")
        await fed.call("remember", records=[{"content": "new a", "key": "a"}, {"content": "new b", "key": "b"}])
        for _ in range(2):  # in one call, then one call for each
            await fed.federation.reconciler.idle()
        assert sorted(record["content"] for record in held_by(fed.stores["working"])) == ["new b", "old a"]
        assert sorted(contents(await fed.timeline())) == ["new a", "new b"]
        steer.allow("working", "remember")
        await fed.settled()
        assert sorted(record["content"] for record in held_by(fed.stores["working"])) == ["new a", "new b"]


@simulated
async def test_a_tier_that_refuses_is_tried_ever_more_rarely() -> None:
    """The interval between retries at a tier that refuses grows, however many writes other tiers get."""
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k")
        steer.refuse("working", "remember", having=b"new")
        await fed.remember("new", key="k")
        asked = len(steer.seen)

        async def write() -> None:
            for number in range(600):
                await fed.remember(f"{number}", tier="semantic")
                await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()

        tasks.start_soon(write)
        await anyio.sleep_forever()
    refused = sum(b"new" in message for _, message in steer.seen[asked:])
    assert 3 <= refused <= 20


@simulated
async def test_a_move_waits_for_a_pending_write_whose_record_is_claimed() -> None:
    async with trial(CALM) as fed, anyio.create_task_group() as tasks:
        [id] = await fed.remember("old", key="k")
        fed.federation.reconciler.hold("working", 1)
        await fed.remember("new", key="k")
        claim = await fed.federation.catalog.claims.take({id_name(id)})
        await anyio.sleep(2)
        assert redone(fed) == [id]
        move = Task(tasks, lambda: fed.call("promote", ids=[id], tier="semantic"))
        await anyio.sleep(1)
        assert not move.done
        claim.release()
        assert await move.ended() == {"promoted": 1}
        await fed.settled()
        assert fed.copies() == {id: ["semantic"]}


@simulated
async def test_a_move_does_not_wait_for_a_pending_write_to_another_tier() -> None:
    async with trial(CALM) as fed:
        [id] = await fed.remember("old", key="k")
        fed.federation.reconciler.hold("semantic", 10)
        await fed.remember("new", key="k", tier="semantic")
        assert redone(fed) == [id]
        began = anyio.current_time()
        await fed.federation.reconciler.replaced("working", [id], 5)
        assert anyio.current_time() == began


@simulated
async def test_a_record_that_comes_home_leaves_no_note_at_its_former_home() -> None:
    async with trial(CALM) as fed:
        fed.federation.reconciler.hold("working", 2)
        [id] = await fed.remember("one")
        await fed.call("promote", ids=[id], tier="semantic")
        lose(fed, "semantic", id)
        await anyio.sleep(60)
        assert fed.copies() == {id: ["working"]}
        assert strays_left(fed.federation.catalog) == 0


async def test_a_change_does_not_fail_if_the_catalog_cannot_say_what_is_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(_: Queries) -> set[str]:
        raise apsw.IOError("disk I/O error")

    async with trial(CALM) as fed:
        [id] = await fed.remember("one")
        monkeypatch.setattr(Queries, "tiers_with_work", failing)
        assert await fed.call("forget", ids=[id]) == {"forgotten": 1}
        monkeypatch.undo()
        await fed.settled()
        assert fed.copies() == {}


async def test_a_change_wakes_only_tasks_that_have_work(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[str] = []
    begin = Reconciler.remove_strays

    async def noted(reconciler: Reconciler, tier: str) -> None:
        rounds.append(tier)
        await begin(reconciler, tier)

    monkeypatch.setattr(Reconciler, "remove_strays", noted)
    async with trial(CALM) as fed:
        await fed.settled()
        rounds.clear()
        [id] = await fed.remember("old", key="k")
        await wait_all_tasks_blocked()
        assert not rounds
        await fed.remember("new", key="k")
        await fed.caught_up()
        assert set(rounds) == {"working"}
        rounds.clear()
        await fed.call("promote", ids=[id], tier="semantic")
        await wait_all_tasks_blocked()
        assert set(rounds) == {"working"}
        assert fed.copies() == {id: ["semantic"]}


@simulated
async def test_the_log_says_that_copies_are_up_to_date_when_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "a2m_router.placement.reconciler")
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        ids = await fed.remember("a")
        steer.refuse("working", "forget")
        await fed.call("forget", ids=ids)
        await anyio.sleep(1)
        disconnect(fed, "working")
        await anyio.sleep(10)
        said = [record.getMessage() for record in caplog.records]
        assert said
        assert not any("up to date" in sentence and "not up to date" not in sentence for sentence in said)
        steer.allow("working", "forget")
        await anyio.sleep(60)
        assert caplog.records[-1].getMessage() == "tier=working copies are up to date"
        assert fed.copies() == {}


async def test_two_copies_at_one_key_go_together() -> None:
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        for id in ("first", "second"):
            plant(fed, "working", id=id, content=id, created_at="2026-01-01T00:00:00.000Z", owner="a")
        ids = ("first", "second")
        there = [Entry(id=id, home="working", owner="a", key="k", created_at=1, digest=b"") for id in ids]
        fed.federation.catalog.note_unwanted(there, "working")
        await fed.federation.reconciler.idle()
        assert fed.copies() == {}
        assert sum(b"memory/forget" in message for _, message in steer.seen) == 1


class Slow:
    """A tier that is slow with every message that contains `words`, and refuses it."""

    def __init__(self, tier: str, method: str, words: bytes) -> None:
        self._refused = tier, f"memory/{method}".encode(), words

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        where, method, words = self._refused
        if tier == where and method in message and words in message:
            await anyio.sleep(0.1)
            id = msgspec.Raw(msgspec.json.encode(msgspec.json.decode(message)["id"]))
            return render_error(id, A2MError(Code.INTERNAL_ERROR, "not this one"))
        return await go_on()


async def many_refused(fed: Trial) -> None:
    """Leave sixty pending writes that their tier refuses."""
    keys = [f"k{number}" for number in range(60)]
    await fed.call("remember", records=[{"content": "old", "key": key} for key in keys])
    await fed.call("remember", records=[{"content": "refused", "key": key} for key in keys])


@simulated
@pytest.mark.parametrize("servers", [{}, ALL_LIFTED], ids=["native", "lesser"])
async def test_what_a_tier_refuses_keeps_nothing_else_waiting(servers: Mix) -> None:
    """Pending writes that a tier refuses delay no write, no move, no deletion of a stray and no shutdown."""
    async with trial(CALM, servers=servers, weather=Slow("working", "remember", b"refused")) as fed:
        [id, gone] = [*await fed.remember("old", key="k"), *await fed.remember("to go")]
        await many_refused(fed)
        await anyio.sleep(1)
        began = anyio.current_time()
        await fed.call("remember", records=[{"content": "refused again", "key": "k7"}])
        await fed.remember("new", key="k")
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}
        assert anyio.current_time() - began < 3
        await fed.call("forget", ids=[gone])
        await anyio.sleep(3)
        assert gone not in fed.copies()
        began = anyio.current_time()
    assert anyio.current_time() - began < 3


@simulated
@pytest.mark.parametrize("servers", [{}, ALL_LIFTED], ids=["native", "lesser"])
async def test_an_unanswered_replacement_keeps_no_other_from_its_tier(servers: Mix) -> None:
    steer = Steered()

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if b"poison" in message and b"memory/remember" in message:
            await anyio.sleep(20)
            return None
        return await steer(tier, message, go_on)

    async with trial(CALM, servers=servers, weather=weather) as fed:
        await fed.call("remember", records=[{"content": "old", "key": "a"}, {"content": "old", "key": "b"}])
        await fed.call("remember", records=[{"content": "poison", "key": "a"}, {"content": "good", "key": "b"}])
        await anyio.sleep(200)
        found = fed.federation.catalog.records.find(redone(fed))
        assert [found[id].key for id in redone(fed)] == ["a"]
        assert sorted(contents(await fed.timeline())) == ["good", "poison"]


@pytest.mark.parametrize("servers", [{}, LIFTED], ids=["native", "lesser"])
async def test_one_copy_that_its_tier_refuses_to_forget_keeps_no_other_one_there(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        ids = await fed.remember("a", "b", "c", tier="semantic")
        steer.refuse("semantic", "forget", having=ids[1].encode())
        await fed.call("forget", ids=ids)
        for _ in range(2):
            await fed.federation.reconciler.idle()
        assert fed.copies() == {ids[1]: ["semantic"]}


@simulated
async def test_a_silent_tier_is_tried_again_however_much_others_write() -> None:
    is_silent = True

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if is_silent and tier == "working" and b"memory/forget" in message:
            await anyio.sleep(20)
            return None
        return await go_on()

    async with trial(CALM, weather=weather) as fed, anyio.create_task_group() as tasks:

        async def write() -> None:
            while True:
                await fed.remember("beside", tier="semantic")
                await anyio.sleep(0.1)

        ids = await fed.remember("to go")
        tasks.start_soon(write)
        await fed.call("forget", ids=ids)
        await anyio.sleep(60)
        is_silent = False
        await anyio.sleep(60)
        assert ids[0] not in fed.copies()
        tasks.cancel_scope.cancel()
