"""The reconcilers of two tiers, which are owed different things of one record."""

import logging
from collections.abc import Sequence
from pathlib import Path

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.entries import Entry
from a2m_router.placement.reconciler import Reconciler
from a2m_router.protocol.client.client import Connection
from a2m_router.protocol.wire.records import Record
from tests.catalogs import strays_left
from tests.clocks import simulated
from tests.federated import Foreign, Mix, Steered, Task, contents, held_by, plant, trial
from tests.test_rules_restart import CALM, photograph

pytestmark = pytest.mark.anyio

# it cannot replace in place: what replaces a record is forgotten there, then remembered
LIFTED = {"semantic": Foreign()}


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
    # the one has looked before the home catches up
    look, replace = Reconciler._seen_at_home, Reconciler._replace
    looked = anyio.Event()

    async def look_first(self: Reconciler, entries: Sequence[Entry], tier: str) -> tuple[dict[str, Record], str | None]:
        seen = await look(self, entries, tier)
        if entries:
            looked.set()
        return seen

    async def replace_late(self: Reconciler, tier: str) -> str | None:
        if tier == "semantic":
            await looked.wait()
        return await replace(self, tier)

    monkeypatch.setattr(Reconciler, "_seen_at_home", look_first)
    monkeypatch.setattr(Reconciler, "_replace", replace_late)
    caplog.set_level(logging.ERROR)
    async with trial(CALM, servers=LIFTED, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"new": "semantic"}
        with anyio.fail_after(60):
            while strays_left(fed.federation.catalog):  # noqa: ASYNC110 - nothing tells when, and to ask would wake it
                await anyio.sleep(0.01)
        assert contents(await fed.timeline()) == {"new": "semantic"}
    assert "has lost" not in caplog.text


@pytest.mark.parametrize("servers", [{}, LIFTED], ids=["native", "lesser"])
async def test_a_record_that_was_just_replaced_can_be_moved_though_its_tier_has_copies_to_remove_first(
    servers: Mix,
) -> None:
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
        await fed.federation.reconciler.idle()
        assert sorted(record["content"] for record in held_by(fed.stores["working"])) == ["new b", "old a"]
        assert sorted(contents(await fed.timeline())) == ["new a", "new b"]
        steer.allow("working", "remember")
        await fed.settled()
        assert sorted(record["content"] for record in held_by(fed.stores["working"])) == ["new a", "new b"]


@simulated
async def test_a_tier_that_refuses_is_tried_ever_more_rarely_however_much_is_written() -> None:
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
async def test_the_log_says_that_copies_are_up_to_date_when_they_are(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "a2m_router.placement.reconciler")
    steer = Steered()
    async with trial(CALM, weather=steer) as fed:
        ids = await fed.remember("a")
        steer.refuse("working", "forget")
        await fed.call("forget", ids=ids)
        await anyio.sleep(1)
        peer = fed.federation.links["working"]._peer
        assert isinstance(peer, Connection)
        peer.lose("it died")
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
        catalog = fed.federation.catalog
        [first] = await fed.remember("one", key="k", owner="a")
        steer.refuse("working", "forget")
        await fed.call("forget", ids=[first], owner="a")
        plant(fed, "working", id="second", content="two", created_at="2026-01-01T00:00:00.000Z", owner="a")
        entry = Entry(id="second", home="working", owner="a", key="k", created_at=1, digest=b"")
        catalog.note_unwanted([entry], "working")
        steer.allow("working", "forget")
        asked = len(steer.seen)
        await fed.federation.reconciler.idle()
        assert fed.copies() == {}
        removals = [message for _, message in steer.seen[asked:] if b"memory/forget" in message]
        assert len(removals) == 1
