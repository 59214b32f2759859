"""The mechanisms behind the rules under concurrency, each in the scenario that needs it.

Where a mechanism can be switched off, a second test does so and asserts that the same scenario fails. This shows that
the first test exercises the mechanism.
"""

import errno
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import anyio
import msgspec
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

import a2m_router.placement.guard
import a2m_router.placement.moves
import a2m_router.placement.writing
import a2m_router.reading.candidates
import a2m_router.reading.homes
import a2m_router.reading.lifted
import a2m_router.reading.resolving
import a2m_router.reading.timelines
import a2m_router.tiers.gateway
import a2m_store.store
from a2m_router.catalog.active_reads import ActiveReads, Reading
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import Claim, Claims, id_name
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.strays import Strays
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.guard import Guard
from a2m_router.placement.moves import Moves
from a2m_router.placement.reconciler import Reconciler
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.reading.question import Question
from a2m_store.drafts import StoreLimits
from tests.support.clocks import simulated
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Foreign,
    Steered,
    Task,
    assert_nothing_under_way,
    claims_released,
    contents,
    has_claims,
    lose,
    plant,
    settings_of,
    trial,
    while_recalled,
)

pytestmark = pytest.mark.anyio

Scenario = Callable[[], Awaitable[None]]

# the router soon gives up a call that a tier does not answer
IMPATIENT = FOUR_TIERS.replace('command = ["-"]', 'command = ["-"]\ntimeout = "300ms"')


def patient(text: str = FOUR_TIERS, policy: str = "explicit") -> Any:
    return settings_of(text, policy=policy)


async def goes_wrong(scenario: Scenario) -> None:
    """Assert that the scenario fails one of its own assertions."""
    try:
        await scenario()
    except AssertionError:
        return
    except BaseExceptionGroup as group:
        wrong, other = group.split(AssertionError)
        assert wrong is not None, other
        return
    raise AssertionError("nothing went wrong without the mechanism: the scenario does not test it")


# --- claims


async def a_late_member_of_a_moving_group() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("one", "two", group="g")
        copying = steer.hold("episodic", "remember")
        move = Task(tasks, lambda: fed.call("promote", ids=ids[:1], tier="episodic"))
        await copying.reached.wait()
        late = Task(tasks, lambda: fed.remember("late", group="g"))
        await wait_all_tasks_blocked()
        waited = not late.done
        copying.release()
        assert await move.ended() == {"promoted": 2}
        await late.ended()
        assert waited
        assert contents(await fed.timeline()) == {"one": "episodic", "two": "episodic", "late": "working"}


async def test_a_late_member_of_a_moving_group_waits_and_is_written_as_told() -> None:
    await a_late_member_of_a_moving_group()


async def test_without_claims_a_late_member_comes_between(monkeypatch: pytest.MonkeyPatch) -> None:
    async def take(self: Claims, names: Any) -> Claim:
        await checkpoint()
        return Claim(self, ())

    monkeypatch.setattr(Claims, "take", take)
    await goes_wrong(a_late_member_of_a_moving_group)


# --- a forget takes no claims

STEPS = [("working", "recall", False), ("working", "recall", True), ("episodic", "remember", False),
         ("episodic", "remember", True), ("episodic", "recall", False), ("episodic", "recall", True)]  # fmt: skip


async def a_forget_during_a_move(tier: str, method: str, after: bool) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("one", "two", group="g")
        step = steer.hold(tier, method, after=after)
        move = Task(tasks, lambda: fed.call("promote", ids=ids[:1], tier="episodic"))
        await step.reached.wait()
        assert await fed.call("forget", ids=ids[:1]) == {"forgotten": 1}
        assert not move.done
        step.release()
        await move.ended()
        assert set(contents(await fed.timeline())) == {"two"}
        await fed.settled()
        [record] = await fed.timeline()
        assert fed.copies() == {ids[1]: [record["tier"]]}
        assert_nothing_under_way(fed)


@pytest.mark.parametrize(("tier", "method", "after"), STEPS)
async def test_what_is_forgotten_during_any_step_of_a_move_stays_forgotten(tier: str, method: str, after: bool) -> None:
    await a_forget_during_a_move(tier, method, after)


async def test_without_a_version_check_at_the_flip_the_forgotten_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def flip(self: Catalog, units: Any, target: str, salience: float = 0.0, vectors: Any = None) -> list[Any]:
        moved = [entry for unit in units for entry in unit]
        with self.database.transaction():
            for entry in moved:
                if self.records.get(entry.id) is not None:
                    self.records.leave(entry)
                    self._tables.execute("DELETE FROM records WHERE id = ?", (entry.id,))
                self.strays.remove(target, entry.id)
                self._changes.insert(msgspec.structs.replace(entry, home=target), None)
        return moved

    monkeypatch.setattr(Catalog, "flip", flip)
    await goes_wrong(lambda: a_forget_during_a_move("episodic", "remember", True))


# --- a read sees one home


async def a_recall_that_overlaps_a_flip(*, source_first: bool) -> None:
    """One tier answers the recall before the record moves, the other one afterwards."""
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("alpha", tier="episodic")
        early, late = ("episodic", "semantic") if source_first else ("semantic", "episodic")
        answered = steer.hold(early, "recall", after=True, having=b"alpha")
        asked = steer.hold(late, "recall", after=False, having=b"alpha")
        recall = Task(tasks, lambda: fed.call("recall", query="alpha"))
        await answered.reached.wait()
        await asked.reached.wait()
        if late == "semantic":
            # the tier carries out its calls in order: the copy would wait behind the recall
            asked.release()
            asked = answered
        move = Task(tasks, lambda: fed.call("promote", ids=ids, tier="semantic"))
        if late == "semantic":
            await move.ended()
        else:
            asked.release()
            await move.ended()
            asked = answered
        await wait_all_tasks_blocked()
        answered.release()
        asked.release()
        records = (await recall.ended())["records"]
        assert [record["content"] for record in records] == ["alpha"]
        await fed.settled()
        assert fed.copies() == {ids[0]: ["semantic"]}


@pytest.mark.rule(n=2)
async def test_a_recall_that_overlaps_a_flip_sees_the_record_once() -> None:
    await a_recall_that_overlaps_a_flip(source_first=True)
    await a_recall_that_overlaps_a_flip(source_first=False)


async def test_without_the_home_that_a_record_had_it_falls_between_two_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActiveReads, "accepts", lambda self, read, entry, found_in: found_in == entry.home)
    await goes_wrong(lambda: a_recall_that_overlaps_a_flip(source_first=True))


async def a_copy_that_is_not_at_home() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        await fed.remember("alpha old", key="k")
        steer.refuse("working", "forget")
        await fed.remember("alpha new", key="k", tier="semantic")
        await fed.caught_up()
        records = (await fed.call("recall", query="alpha"))["records"]
        assert [record["content"] for record in records] == ["alpha new"]
        assert [record["content"] for record in await fed.timeline()] == ["alpha new"]


@pytest.mark.rule(n=2)
async def test_a_copy_that_is_not_in_its_records_home_is_never_shown() -> None:
    await a_copy_that_is_not_at_home()


async def test_a_reader_that_takes_any_copy_sees_what_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActiveReads, "accepts", lambda *_: True)
    monkeypatch.setattr(a2m_router.reading.homes, "is_current", lambda *_: True)
    await goes_wrong(a_copy_that_is_not_at_home)


async def a_read_that_still_needs_the_old_copy() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("alpha", tier="procedural")
        # the new home answers the recall before it gets the copy, so that the recall may still need the old copy
        answered = steer.hold("semantic", "recall", after=True, having=b"alpha")
        recall = Task(tasks, lambda: fed.call("recall", query="alpha", where={"tier": ["semantic"]}))
        await answered.reached.wait()
        await fed.call("promote", ids=ids, tier="semantic")
        await wait_all_tasks_blocked()
        assert fed.copies() == {ids[0]: ["procedural", "semantic"]} or fed.copies() == {
            ids[0]: ["semantic", "procedural"]
        }
        answered.release()
        await recall.ended()
        await fed.settled()
        assert fed.copies() == {ids[0]: ["semantic"]}


async def test_an_old_copy_stays_until_the_last_read_that_may_need_it_has_ended() -> None:
    await a_read_that_still_needs_the_old_copy()


async def test_without_that_wait_the_copy_goes_under_a_readers_eyes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def grace(self: ActiveReads) -> None:
        await checkpoint()

    monkeypatch.setattr(ActiveReads, "grace", grace)
    await goes_wrong(a_read_that_still_needs_the_old_copy)


# --- the reconciler verifies before it deletes


async def a_tier_that_loses_a_record_after_the_flip() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        ids = await fed.remember("precious", tier="episodic")
        # the first read by id is made by the move, the second by the reconciler
        verified = steer.hold("semantic", "recall")
        seen = steer.hold("semantic", "recall")
        async with anyio.create_task_group() as tasks:
            move = Task(tasks, lambda: fed.call("promote", ids=ids, tier="semantic"))
            await verified.reached.wait()
            verified.release()
            await move.ended()
            await seen.reached.wait()
            lose(fed, "semantic", *ids)
            seen.release()
        await fed.settled()
        assert contents(await fed.timeline()) == {"precious": "episodic"}
        assert fed.copies() == {ids[0]: ["episodic"]}


async def test_a_true_copy_becomes_home_again_when_the_new_home_loses_the_record() -> None:
    await a_tier_that_loses_a_record_after_the_flip()


async def test_a_sweeper_that_does_not_read_the_home_first_removes_the_last_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def believed(self: Reconciler, entries: Any, tier: str) -> tuple[dict[str, Any], None]:
        for home in {entry.home for entry in entries}:
            await self._gateway.read(home, [entry.id for entry in entries])
        return {entry.id: None for entry in entries}, None

    monkeypatch.setattr(Reconciler, "_seen_at_home", believed)
    await goes_wrong(a_tier_that_loses_a_record_after_the_flip)


async def test_a_copy_with_other_content_does_not_become_home() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        ids = await fed.remember("precious", tier="episodic")
        verified = steer.hold("semantic", "recall")
        seen = steer.hold("semantic", "recall")
        async with anyio.create_task_group() as tasks:
            move = Task(tasks, lambda: fed.call("promote", ids=ids, tier="semantic"))
            await verified.reached.wait()
            verified.release()
            await move.ended()
            await seen.reached.wait()
            lose(fed, "semantic", *ids)
            lose(fed, "episodic", *ids)
            plant(fed, "episodic", id=ids[0], content="forged")
            seen.release()
        await fed.settled()
        assert await fed.timeline() == []


async def a_move_leaves_one_copy() -> None:
    async with trial(patient()) as fed:
        ids = await fed.remember("one")
        await fed.call("promote", ids=ids, tier="semantic")
        await fed.settled()
        assert fed.copies() == {ids[0]: ["semantic"]}


@pytest.mark.rule(n=2)
async def test_a_move_leaves_one_copy() -> None:
    await a_move_leaves_one_copy()


async def test_a_copy_of_which_there_is_no_note_stays_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Strays, "note", lambda self, entry, tier, kind: None)
    await goes_wrong(a_move_leaves_one_copy)


# --- ids that a tier already holds


async def a_forgotten_id_written_on_purpose() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "old"}])
        steer.refuse("working", "forget")
        assert await fed.call("forget", ids=["x"]) == {"forgotten": 1}
        with pytest.raises(A2MError):
            await fed.call("remember", records=[{"id": "x", "content": "new"}])
        assert await fed.timeline() == []
        steer.allow("working", "forget")
        await fed.call("remember", records=[{"id": "x", "content": "new"}])
        assert [record["content"] for record in await fed.timeline()] == ["new"]
        assert not fed.federation.catalog.tombstones.is_forgotten("x")


async def test_a_forgotten_id_can_be_written_anew_on_purpose() -> None:
    await a_forgotten_id_written_on_purpose()


async def a_key_that_a_stray_still_holds() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        [old] = await fed.remember("old", key="k")
        held = steer.hold("working", "forget")
        await fed.call("forget", ids=[old])
        await held.reached.wait()
        async with anyio.create_task_group() as tasks:
            write = Task(tasks, lambda: fed.remember("new", key="k"))
            await wait_all_tasks_blocked()
            held.release()
            [new] = await write.ended()
        await fed.settled()
        assert new != old
        [record] = await fed.timeline()
        assert (record["id"], record["content"], record["revision"]) == (new, "new", 0)
        assert fed.copies() == {new: ["working"]}


async def test_a_new_record_at_a_forgotten_key_is_a_new_record() -> None:
    await a_key_that_a_stray_still_holds()


async def test_without_clearing_the_way_a_tier_keeps_what_was_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def clear(self: Reconciler, tier: str, entries: Any) -> None:
        await checkpoint()

    monkeypatch.setattr(Reconciler, "clear", clear)

    async def refused_forget() -> None:
        steer = Steered()
        async with trial(patient(), weather=steer) as fed:
            await fed.call("remember", records=[{"id": "x", "content": "old"}])
            steer.refuse("working", "forget")
            await fed.call("forget", ids=["x"])
            await fed.call("remember", records=[{"id": "x", "content": "new"}])
            assert [record["content"] for record in await fed.timeline()] == ["new"]

    await goes_wrong(refused_forget)


async def a_target_that_holds_the_id_with_other_content() -> None:
    async with trial(patient()) as fed:
        ids = await fed.remember("true", metadata={"m": 1})
        plant(fed, "semantic", id=ids[0], content="forged")
        await fed.call("promote", ids=ids, tier="semantic")
        await fed.settled()
        assert contents(await fed.timeline()) == {"true": "semantic"}
        assert fed.copies() == {ids[0]: ["semantic"]}


async def test_a_tier_with_old_content_for_an_id_is_made_to_take_the_true_one() -> None:
    await a_target_that_holds_the_id_with_other_content()


async def test_a_move_that_does_not_compare_takes_any_content_for_the_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(a2m_router.tiers.gateway, "digest", lambda record: b"")
    await goes_wrong(a_target_that_holds_the_id_with_other_content)


# --- a call without an answer may still land


async def an_id_whose_first_write_is_still_on_its_way(tier: str = "semantic") -> None:
    steer = Steered()
    async with trial(patient(IMPATIENT), weather=steer) as fed, anyio.create_task_group() as tasks:
        held = steer.hold(tier, "remember")
        with pytest.raises(A2MError) as failed:
            await fed.call("remember", records=[{"id": "x", "content": "first", "tier": tier}])
        assert failed.value.code == Code.INTERNAL_ERROR
        assert failed.value.data is not None
        assert failed.value.data["tier"] == tier
        again = Task(tasks, lambda: fed.call("remember", records=[{"id": "x", "content": "second", "tier": tier}]))
        await wait_all_tasks_blocked()
        told = [message for where, message in steer.seen if where == tier and b'"x"' in message]
        assert await fed.timeline() == []
        held.release()
        await again.ended()
        assert len(told) == 1  # only the first write was sent: all others have to wait for it
        await fed.settled()
        assert contents(await fed.timeline()) == {"second": tier}
        assert fed.copies() == {"x": [tier]}


@simulated
async def test_nothing_is_written_for_an_id_whose_write_may_still_land() -> None:
    await an_id_whose_first_write_is_still_on_its_way()


@simulated
async def test_without_settling_a_tier_is_told_more_while_a_write_may_land(monkeypatch: pytest.MonkeyPatch) -> None:
    async def resolve(self: Guard, claims: Sequence[Claim], *_: Any) -> None:
        for claim in claims:
            claim.release()

    monkeypatch.setattr(Guard, "_resolve", resolve)
    await goes_wrong(an_id_whose_first_write_is_still_on_its_way)


@simulated
async def test_a_write_that_landed_late_is_removed_and_never_seen() -> None:
    steer = Steered()
    async with trial(patient(IMPATIENT), weather=steer) as fed:
        held = steer.hold("semantic", "remember")
        with pytest.raises(A2MError):
            await fed.remember("never", tier="semantic")
        held.release()
        await claims_released(fed)
        await fed.settled()
        assert fed.copies() == {}
        assert await fed.timeline() == []
        assert_nothing_under_way(fed)


@simulated
async def test_a_moves_copy_that_landed_late_is_deleted_and_the_move_repeated() -> None:
    steer = Steered()
    async with trial(patient(IMPATIENT), weather=steer) as fed:
        ids = await fed.remember("one")
        held = steer.hold("semantic", "remember")
        with pytest.raises(A2MError):
            await fed.call("promote", ids=ids, tier="semantic")
        assert contents(await fed.timeline(tier="working")) == {"one": "working"}
        held.release()
        await claims_released(fed)
        await fed.settled()
        assert fed.copies() == {ids[0]: ["working"]}
        assert await fed.call("promote", ids=ids, tier="semantic") == {"promoted": 1}
        await fed.settled()
        assert fed.copies() == {ids[0]: ["semantic"]}


async def test_a_forget_that_lands_late_does_not_take_what_was_written_since() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=[{"id": "x", "content": "first"}])
        held = steer.hold("working", "forget")
        await fed.call("forget", ids=["x"])
        await held.reached.wait()
        again = Task(tasks, lambda: fed.call("remember", records=[{"id": "x", "content": "second"}]))
        await wait_all_tasks_blocked()
        held.release()
        await again.ended()
        await fed.settled()
        assert contents(await fed.timeline()) == {"second": "working"}
        assert fed.copies() == {"x": ["working"]}


# --- a known record is readable


async def a_known_record_that_its_home_has_lost() -> None:
    async with trial(patient()) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "one"}])
        lose(fed, "working", "x")
        await fed.call("remember", records=[{"id": "x", "content": "one"}])
        assert contents(await fed.timeline()) == {"one": "working"}
        lose(fed, "working", "x")
        with pytest.raises(A2MError):
            await fed.call("remember", records=[{"id": "x", "content": "another"}])


async def test_a_write_is_answered_known_only_if_the_record_can_be_read() -> None:
    await a_known_record_that_its_home_has_lost()


async def test_known_without_a_read_is_a_promise_nobody_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def believed(self: Delivering, plan: Any) -> None:
        await checkpoint()

    monkeypatch.setattr(Delivering, "_check_known", believed)
    await goes_wrong(a_known_record_that_its_home_has_lost)


# --- batches


async def test_a_batch_that_one_tier_refuses_is_never_seen() -> None:
    """A batch that one tier refuses is never shown and can be written again."""
    steer = Steered()
    records = [{"id": "w", "content": "here"}, {"id": "s", "content": "there", "tier": "semantic", "key": "k"}]
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        steer.refuse("semantic", "remember")
        held = steer.hold("working", "remember", after=True)
        write = Task(tasks, lambda: fed.call("remember", records=records))
        await held.reached.wait()
        assert await fed.timeline() == []
        held.release()
        with pytest.raises(A2MError):
            await write.ended()
        assert await fed.timeline() == []
        assert (await fed.call("recall"))["records"] == []
        assert (await fed.call("fetch", key="k"))["record"] is None
        await fed.settled()
        assert fed.copies() == {}
        steer.allow("semantic", "remember")
        await fed.call("remember", records=records)
        assert contents(await fed.timeline()) == {"here": "working", "there": "semantic"}


# --- cancellation


async def a_write_cancelled_between_answer_and_commit() -> None:
    steer = Steered()
    message = b'{"jsonrpc":"2.0","id":1,"method":"memory/remember","params":{"records":[{"id":"x","content":"one"}]}}'
    async with trial(patient(), weather=steer) as fed:
        held = steer.hold("working", "remember", after=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fed.federation.answer, message, LOCAL)
            await held.reached.wait()
            tasks.cancel_scope.cancel()
            held.release()
        assert fed.copies() == {"x": ["working"]}
        assert contents(await fed.timeline()) == {"one": "working"}
        assert_nothing_under_way(fed)


async def test_a_request_cancelled_before_its_commit_is_carried_out() -> None:
    await a_write_cancelled_between_answer_and_commit()


async def test_without_the_shield_the_reservation_has_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    open_scope = SimpleNamespace(CancelScope=lambda **_: anyio.CancelScope())
    monkeypatch.setattr(a2m_router.placement.guard, "anyio", open_scope)
    await goes_wrong(a_write_cancelled_between_answer_and_commit)


async def test_a_promotion_cancelled_in_the_middle_leaves_one_copy() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        [id] = await fed.remember("one")
        promote = {"ids": [id], "tier": "semantic"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "memory/promote", "params": promote}
        held = steer.hold("semantic", "remember", after=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(fed.federation.answer, msgspec.json.encode(message), LOCAL)
            await held.reached.wait()
            tasks.cancel_scope.cancel()
            held.release()
        await fed.settled()
        [record] = await fed.timeline()
        assert fed.copies() == {id: [record["tier"]]}
        assert_nothing_under_way(fed)


# --- two changes at once


async def test_a_forget_by_a_tiers_condition_finds_a_record_that_moves() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("one", tier="episodic", metadata={"m": 1})
        # the new home answered before it had the copy, and the old home had the record when it answered
        answered = steer.hold("episodic", "timeline", after=True)
        forget = Task(tasks, lambda: fed.call("forget", where={"m": 1}))
        await answered.reached.wait()
        await fed.call("promote", ids=ids, tier="semantic")
        answered.release()
        assert await forget.ended() == {"forgotten": 1}
        assert await fed.timeline() == []


async def test_a_forget_does_not_take_what_a_record_was_replaced_by_meanwhile() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k", metadata={"m": 1})
        answered = steer.hold("working", "timeline", after=True)
        forget = Task(tasks, lambda: fed.call("forget", where={"m": 1}))
        await answered.reached.wait()
        await fed.remember("new", key="k", metadata={"m": 2})
        answered.release()
        assert await forget.ended() == {"forgotten": 0}
        assert [record["content"] for record in await fed.timeline()] == ["new"]


async def test_a_forget_takes_what_matches_before_and_after_a_replacement() -> None:
    """A forget deletes a record that matches before and after a concurrent replacement."""
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("the old beta", key="k")
        found = steer.hold("working", "recall", after=True)
        forget = Task(tasks, lambda: fed.call("forget", query="beta"))
        await found.reached.wait()
        await fed.remember("the new beta", key="k")
        found.release()
        assert (await forget.ended())["forgotten"] == 1
        assert (await fed.call("fetch", key="k"))["record"] is None


async def test_a_timeline_never_shows_what_does_not_match_its_filter() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k", metadata={"m": 1})
        answered = steer.hold("working", "timeline", after=True)
        read = Task(tasks, lambda: fed.timeline(where={"m": 1}))
        await answered.reached.wait()
        await fed.remember("new", key="k", metadata={"m": 2})
        answered.release()
        assert [(r["content"], r["metadata"], r["revision"]) for r in await read.ended()] in (
            [], [("old", {"m": 1}, 0)]
        )  # fmt: skip


# each method with its params, and whether the router asks tiers for all matches (or only for records it knows)
QUESTIONS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "recall": ("recall", {"query": "alpha"}, True),
    "recall without words": ("recall", {}, True),
    "timeline": ("timeline", {}, False),
    "timeline by metadata": ("timeline", {"where": {"m": 1}}, True),
    "timeline with a limit": ("timeline", {"limit": 1}, False),
    "page": ("timeline", {"page": 10}, False),
    "page by session": ("timeline", {"page": 10, "where": {"session": "s"}}, False),
    "fetch": ("fetch", {"key": "k"}, False),
    "forget by words": ("forget", {"query": "alpha"}, True),
    "forget by metadata": ("forget", {"where": {"m": 1}}, True),
}


async def a_record_written_anew_under_an_id_that_was_read(asked: str, owner: str, kind: str) -> None:
    """A read finds a record, which then moves and is forgotten; a new record with other content gets its id."""
    method, params, _ = QUESTIONS[asked]
    steer = Steered()
    servers = {"working": Foreign(), "episodic": Foreign()} if kind == "lesser" else {}
    async with trial(patient(), weather=steer, servers=servers) as fed, anyio.create_task_group() as tasks:
        place = {"id": "x", "key": "k", "session": "s"}
        await fed.call("remember", records=[{**place, "content": "alpha", "metadata": {"m": 1}, "owner": "a"}])
        answers = [steer.hold("working", name, after=True) for name in ("recall", "timeline")]
        read = Task(tasks, lambda: fed.call(method, owner=owner, **params))
        await wait_all_tasks_blocked()
        [answered] = [hold for hold in answers if hold.reached.is_set()]
        for hold in answers:
            if hold is not answered:
                hold.release()
        assert await fed.call("promote", ids=["x"], tier="semantic") == {"promoted": 1}
        assert await fed.call("forget", ids=["x"]) == {"forgotten": 1}
        await fed.call("remember", records=[{**place, "content": "beta", "tier": "episodic", "owner": owner}])
        answered.release()
        answer = await read.ended()
        told = [answer["record"]] if answer.get("record") else answer.get("records", [])
        written = await fed.timeline(owner=owner)
        assert [record["content"] for record in written] == ["beta"]
        [new] = written
        assert all(each[name] == new[name] for each in told for name in ("content", "owner", "tier")), told
        assert new.get("access_count", 0) == (len(told) if method == "recall" else 0)
        assert answer.get("forgotten", 0) == 0


# a lifted tier cannot distinguish owners and is not asked where the caller owns no record
CALLERS = [("a", "native"), ("a", "lesser"), ("b", "native")]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # each step is held, so the loop does not matter
@pytest.mark.parametrize(
    ("asked", "owner", "kind"),
    [(asked, *caller) for asked in QUESTIONS for caller in CALLERS if caller[0] == "a" or QUESTIONS[asked][2]],
)
async def test_what_is_read_of_a_forgotten_record_is_not_a_later_one_of_its_id(
    asked: str, owner: str, kind: str
) -> None:
    await a_record_written_anew_under_an_id_that_was_read(asked, owner, kind)


@pytest.mark.parametrize("asked", QUESTIONS)
async def test_a_reader_that_goes_by_ids_alone_takes_one_record_for_another(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accepts = ActiveReads.accepts

    def accepts_another(self: ActiveReads, read: Reading, entry: Entry, found_in: str) -> bool:
        return accepts(self, read, msgspec.structs.replace(entry, seq=0), found_in)

    monkeypatch.setattr(ActiveReads, "accepts", accepts_another)
    monkeypatch.setattr(Question, "may_match", lambda self, entry: True)
    for module in (a2m_router.reading.homes, a2m_router.reading.timelines):
        monkeypatch.setattr(module, "still", lambda then, now: list(now))
    for module in (a2m_router.reading.homes, a2m_router.reading.resolving):
        monkeypatch.setattr(module, "is_current", lambda *_: True)
    await goes_wrong(lambda: a_record_written_anew_under_an_id_that_was_read(asked, "a", "native"))


@pytest.mark.parametrize("owner", ["a", "b"])
async def test_a_promotion_does_not_take_a_later_record_of_an_id(owner: str) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        [first] = await fed.remember("first", tier="working", owner="a")
        await fed.call("remember", records=[{"id": "x", "content": "old", "tier": "semantic", "owner": "a"}])
        copying = steer.hold("procedural", "remember", having=first.encode())
        promote = Task(tasks, lambda: fed.call("promote", ids=[first, "x"], tier="procedural", owner="a"))
        await copying.reached.wait()
        assert await fed.call("forget", ids=["x"], owner="a") == {"forgotten": 1}
        await fed.call("remember", records=[{"id": "x", "content": "new", "tier": "semantic", "owner": owner}])
        copying.release()
        assert await promote.ended() == {"promoted": 1}
        assert contents(await fed.timeline(owner=owner)) == {"first": "procedural", "new": "semantic"}


async def test_closing_a_conversation_does_not_take_a_later_record_of_an_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(a2m_router.placement.moves, "_ROUND", 1)
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        for id in ["one", "two"]:
            await fed.call("remember", records=[{"id": id, "content": id}], session="s")
        copying = steer.hold("episodic", "remember")
        close = Task(tasks, lambda: fed.call("session/close", session="s"))
        await copying.reached.wait()
        await fed.call("forget", ids=["two"])
        await fed.call("remember", records=[{"id": "two", "content": "two anew"}], session="another")
        copying.release()
        assert (await close.ended())["flushed"] == 1
        assert contents(await fed.timeline()) == {"one": "episodic", "two anew": "working"}


@pytest.mark.parametrize("wanted", ["promote", "remember"])
async def test_a_group_with_a_lost_member_stays_and_the_move_says_so(wanted: str) -> None:
    async with trial(patient()) as fed:
        pair = [{"id": id, "content": id, "group": "g", "tier": "episodic"} for id in "pq"]
        await fed.call("remember", records=[{**pair[0], "key": "k"}, pair[1]])
        lose(fed, "episodic", "q")
        new = {"content": "new", "key": "k", "group": "g", "tier": "semantic"}
        params = {"ids": ["p"], "tier": "semantic"} if wanted == "promote" else {"records": [new]}
        with pytest.raises(A2MError, match="does not hold it as it was written"):
            await fed.call(wanted, **params)
        assert contents(await fed.timeline()) == {"p": "episodic"}


async def test_a_fault_of_the_catalogs_disk_lets_go_of_what_a_move_has_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    present = Moves.present
    faults = iter([False, True])

    def failing(self: Moves, *given: Any) -> Any:
        if next(faults, False):
            raise OSError(errno.EIO, "the disk fails")
        return present(self, *given)

    async with trial(patient()) as fed:
        [id] = await fed.remember("one")
        monkeypatch.setattr(Moves, "present", failing)
        held = await fed.federation.catalog.claims.take({id_name(id)})
        async with anyio.create_task_group() as tasks:
            move = Task(tasks, lambda: fed.call("promote", ids=[id], tier="semantic"))
            await wait_all_tasks_blocked()
            held.release()  # the move looks again, under its claim
        assert move.error is not None
        assert not has_claims(fed)
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}


async def test_a_damaged_catalog_keeps_no_claims() -> None:
    """A change whose note cannot be written to a damaged catalog releases its claims."""
    async with trial(patient()) as fed:
        claim = await fed.federation.catalog.claims.take({id_name("x")})

        def note() -> None:
            raise ValueError("damaged")

        with pytest.raises(ValueError, match="damaged"):
            async with fed.federation.moves._core.guard.change(claim) as change:
                change.note = note
        assert not has_claims(fed)


@pytest.mark.parametrize("kind", ["native", "lesser"])
@pytest.mark.parametrize("params", [{}, {"query": "alpha"}, {"embedding": [1.0, 0.0]}])
async def test_a_recall_finds_what_is_there_however_much_is_written_meanwhile(
    params: dict[str, Any], kind: str
) -> None:
    """A recall finds a record although a concurrent write fills the tier's answer with better matches."""
    steer = Steered()
    servers = {"semantic": Foreign()} if kind == "lesser" else {}
    async with trial(patient(), weather=steer, servers=servers) as fed, anyio.create_task_group() as tasks:
        await fed.remember("alpha and more of it", tier="semantic", embedding=[0.5, 1.0])
        writing = steer.hold("semantic", "remember")
        write = Task(tasks, lambda: fed.remember(*["alpha"] * 30, tier="semantic", embedding=[1.0, 0.0]))
        await writing.reached.wait()
        recall = Task(tasks, lambda: fed.call("recall", limit=1, **params))
        await wait_all_tasks_blocked()
        writing.release()
        assert len((await recall.ended())["records"]) == 1
        assert len(await write.ended()) == 30


async def test_a_stray_copy_does_not_answer_for_the_record() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        await fed.remember("old", key="k", metadata={"m": 1})
        steer.refuse("working", "forget")
        await fed.remember("new", key="k", tier="semantic", metadata={"m": 2})
        assert await fed.timeline(where={"m": 1}) == []
        assert await fed.call("forget", where={"m": 1}) == {"forgotten": 0}
        assert [record["content"] for record in await fed.timeline(where={"m": 2})] == ["new"]


@pytest.mark.parametrize("method", ["timeline", "recall"])
async def test_a_read_of_one_tier_shows_nothing_that_has_left_it(method: str) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("one", tier="episodic")
        answered = steer.hold("episodic", "recall", after=True)
        read = Task(tasks, lambda: fed.call(method, tier="episodic"))
        await answered.reached.wait()
        await fed.call("promote", ids=ids, tier="semantic")
        answered.release()
        assert {record["tier"] for record in (await read.ended())["records"]} <= {"episodic"}


async def test_a_content_is_never_shown_with_anothers_revision() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k")
        answered = steer.hold("working", "recall", after=True)
        read = Task(tasks, lambda: fed.call("fetch", key="k"))
        await answered.reached.wait()
        await fed.remember("new", key="k")
        answered.release()
        record = (await read.ended())["record"]
        assert (record["content"], record["revision"]) in (("old", 0), ("new", 1))


async def test_a_fetch_falls_back_to_the_unowned_record_when_its_own_goes() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("everybody's", key="k")
        ids = await fed.remember("mine", key="k", owner="a")
        answered = steer.hold("working", "recall", after=True)
        read = Task(tasks, lambda: fed.call("fetch", key="k", owner="a"))
        await answered.reached.wait()
        await fed.call("forget", ids=ids)
        answered.release()
        assert (await read.ended())["record"]["content"] in ("mine", "everybody's")


async def test_a_replacement_of_a_record_forgotten_meanwhile_is_gone() -> None:
    """A replacement whose record is forgotten meanwhile counts as earlier than the forget, or is a new record."""
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=[{"id": "x", "content": "old", "key": "k"}])
        done = steer.hold("working", "remember", after=True)
        write = Task(tasks, lambda: fed.call("remember", records=[{"id": "x", "content": "new", "key": "k"}]))
        await done.reached.wait()
        assert await fed.call("forget", ids=["x"]) == {"forgotten": 1}
        done.release()
        assert await write.ended() == {"ids": ["x"]}
        await fed.settled()
        assert [(r["id"], r["content"], r["revision"]) for r in await fed.timeline()] in ([], [("x", "new", 0)])
        assert fed.copies() == {record["id"]: [record["tier"]] for record in await fed.timeline()}
        assert_nothing_under_way(fed)


async def test_the_same_key_of_another_owner_is_another_key() -> None:
    async with trial(patient()) as fed:
        await fed.call("remember", records=[{"id": "x", "content": "everybody's", "key": "k"}])
        await fed.remember("a's", key="k", owner="a")
        answer = await fed.call("remember", records=[{"id": "x", "content": "changed", "key": "k"}], owner="a")
        assert answer == {"ids": ["x"]}
        assert {record["content"] for record in await fed.timeline()} == {"everybody's", "a's"}


async def test_a_record_is_not_followed_from_a_shared_into_a_private_tier() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("published", key="k", owner="a", tier="procedural")
        answered = steer.hold("procedural", "recall", after=True)
        read = Task(tasks, lambda: fed.timeline(owner="b"))
        await answered.reached.wait()
        await fed.remember("private", key="k", owner="a", tier="working")
        answered.release()
        assert [record["tier"] for record in await read.ended()] in ([], ["procedural"])


async def a_tier_that_catches_up_while_a_timeline_goes_on() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.remember("old", key="k", tier="semantic")
        await fed.remember("other", tier="procedural")
        # as long as the first read is running, the catalog keeps the replacement
        before = steer.hold("procedural", "recall", after=True)
        first = Task(tasks, fed.timeline)
        await before.reached.wait()
        await fed.remember("new", key="k")
        await wait_all_tasks_blocked()
        meanwhile = steer.hold("procedural", "recall", after=True)
        second = Task(tasks, fed.timeline)
        await meanwhile.reached.wait()
        assert fed.federation.catalog.pending.is_open()
        before.release()
        assert {record["content"] for record in await first.ended()} == {"new", "other"}
        await wait_all_tasks_blocked()
        assert not fed.federation.catalog.pending.is_open()
        meanwhile.release()
        assert {record["content"] for record in await second.ended()} == {"new", "other"}


async def test_what_its_tier_was_behind_with_is_read_there_once_it_has_caught_up() -> None:
    await a_tier_that_catches_up_while_a_timeline_goes_on()


async def test_a_timeline_that_asks_no_tier_again_lacks_pending_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(a2m_router.reading.homes, "_ROUNDS", 1)
    await goes_wrong(a_tier_that_catches_up_while_a_timeline_goes_on)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # each step is held, so the loop does not matter
@pytest.mark.parametrize("server", [None, Foreign()])
@pytest.mark.parametrize("becomes", ["forgotten", "another's", "moved away", "moved", "replaced"])
async def test_a_timeline_asks_once_and_lacks_only_later_changes(becomes: str, server: Foreign | None) -> None:
    """A timeline calls each tier once and lacks only records that were changed after it began."""
    steer = Steered()
    servers = {} if server is None else {"semantic": server}
    async with trial(patient(), weather=steer, servers=servers) as fed, anyio.create_task_group() as tasks:
        drafts = [{"content": f"r{n}", "key": f"k{n}", "session": "s", "tier": "semantic"} for n in range(4)]
        ids = (await fed.call("remember", records=drafts))["ids"]
        answered = steer.hold("semantic", "recall", after=True)
        asked = {"where": {"session": "s", "tier": ["semantic", "procedural"]}, "limit": 2}
        read = Task(tasks, lambda: fed.call("timeline", **asked))
        await answered.reached.wait()
        if becomes == "forgotten":
            await fed.call("forget", ids=ids[3:])
        elif becomes in ("another's", "replaced"):
            session = "s" if becomes == "replaced" else "t"
            await fed.call("remember", records=[{**drafts[3], "content": "anew", "session": session}])
        else:
            await fed.call("promote", ids=ids[3:], tier="procedural" if becomes == "moved" else "working")
        steer.refuse("semantic", "recall")
        answered.release()
        found = await read.ended()
        newest = {"moved": ["r3"], "replaced": ["anew"]}.get(becomes, [])
        assert [record["content"] for record in found["records"]] == ["r2", *newest]
        assert "degraded" not in found
        steer.allow("semantic", "recall")


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # each step is held, so the loop does not matter
@pytest.mark.parametrize("ranking", [{}, {"query": "alpha"}])
@pytest.mark.parametrize("server", [None, Foreign()])
@pytest.mark.parametrize("becomes", ["forgotten", "replaced", "moved"])
@pytest.mark.parametrize("changed", [0, 1, 4, 6])
async def test_a_recall_asks_once_and_lacks_only_what_was_changed_after_it_began(
    changed: int, becomes: str, server: Foreign | None, ranking: dict[str, str]
) -> None:
    steer = Steered()
    servers = {} if server is None else {"semantic": server}
    async with trial(patient(), weather=steer, servers=servers) as fed:
        # the tier returns 6 of 8 equal matches, the newest first
        drafts = [{"id": f"r{n}", "content": "alpha", "key": f"k{n}", "metadata": {"m": 1}} for n in range(8)]
        for draft in drafts:
            await fed.call("remember", records=[{**draft, "tier": "semantic"}])
        ids = [f"r{n}" for n in reversed(range(8))]
        where = {"m": 1, "tier": ["semantic", "procedural"]}
        async with while_recalled(fed, steer, limit=2, where=where, **ranking) as read:
            if becomes == "forgotten" and changed:
                await fed.call("forget", ids=ids[:changed])
            elif becomes == "replaced":
                for draft in drafts[8 - changed :]:
                    await fed.call("remember", records=[{**draft, "metadata": {"m": 2}}])
            elif changed:
                await fed.call("promote", ids=ids[:changed], tier="working")
            steer.refuse("semantic", "recall")
        found = await read.ended()
        assert [record["id"] for record in found["records"]] == ids[changed:6][:2]
        assert "degraded" not in found
        steer.allow("semantic", "recall")


@pytest.mark.parametrize("ranking", [{}, {"query": "alpha"}])
async def test_a_recall_searches_what_replaces_a_record_while_it_goes_on(ranking: dict[str, str]) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        await fed.remember("alpha", key="k", tier="semantic", metadata={"m": 1})
        async with while_recalled(fed, steer, where={"m": 1}, **ranking) as read:
            await fed.remember("alpha anew", key="k", metadata={"m": 1})
        assert [record["content"] for record in (await read.ended())["records"]] == ["alpha anew"]


@pytest.mark.parametrize("ranking", [{}, {"query": "alpha"}])
async def test_a_recalls_limit_is_filled_past_copies_that_a_tier_keeps(ranking: dict[str, str]) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        ids = await fed.remember("alpha and much else besides", *["alpha"] * 3, tier="semantic")
        steer.refuse("semantic", "forget")
        await fed.call("promote", ids=ids[1:], tier="procedural")
        found = await fed.call("recall", limit=1, tier="semantic", **ranking)
        assert [record["id"] for record in found["records"]] == ids[:1]


@pytest.mark.parametrize("ranking", [{}, {"query": "alpha"}])
async def test_a_recalls_limit_is_filled_past_records_with_pending_writes(
    ranking: dict[str, str],
) -> None:
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        kept, *replaced = [
            {"content": content, "tier": "semantic", "key": f"k{n}", "metadata": {"m": 1}}
            for n, content in enumerate(["alpha and much else besides", *["alpha"] * 3])
        ]
        await fed.call("remember", records=[kept, *replaced])
        steer.refuse("semantic", "remember")
        for record in replaced:
            await fed.call("remember", records=[{**record, "metadata": {"m": 2}}])
        found = await fed.call("recall", limit=1, where={"m": 1}, **ranking)
        assert [record["key"] for record in found["records"]] == [kept["key"]]


@pytest.mark.parametrize("ranking", [{}, {"query": "alpha"}])
async def test_stray_copies_hide_nothing_while_their_home_is_down(
    ranking: dict[str, str],
) -> None:
    """Stray copies do not use up a recall's limit while their home is down."""
    steer = Steered()
    async with trial(patient(), weather=steer) as fed:
        ids = await fed.remember("alpha and much else besides", *["alpha"] * 3, tier="semantic")
        steer.refuse("semantic", "forget")
        await fed.call("promote", ids=ids[1:], tier="procedural")
        steer.refuse("procedural", "recall")
        found = await fed.call("recall", limit=1, where={"tier": ["semantic", "procedural"]}, **ranking)
        assert [record["id"] for record in found["records"]] == ids[:1]
        assert [down["tier"] for down in found["degraded"]] == ["procedural"]


async def test_stray_copies_hide_nothing_where_their_home_ranks_otherwise() -> None:
    steer = Steered()
    async with trial(patient(), weather=steer, servers={"procedural": Foreign()}) as fed:
        ids = await fed.remember("running and much else besides", *["running"] * 3, tier="semantic")
        steer.refuse("semantic", "forget")
        await fed.call("promote", ids=ids[1:], tier="procedural")
        # a store finds "running" for the query "run" by its stem; the foreign server does not
        found = await fed.call("recall", limit=1, query="run", where={"tier": ["semantic", "procedural"]})
        assert [record["id"] for record in found["records"]] == ids[:1]


async def test_a_lesser_tier_is_looked_through_however_much_is_written_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (a2m_router.reading.candidates, a2m_router.reading.lifted):
        monkeypatch.setattr(module, "MOST", 50)
    async with trial(patient(), servers={"semantic": Foreign()}) as fed:
        meant = [{"content": f"old {n}", "tier": "semantic", "metadata": {"m": 1}} for n in range(3)]
        newer = [{"content": f"newer {n}", "tier": "semantic"} for n in range(30)]
        elsewhere = [{"content": f"newest {n}", "tier": "procedural"} for n in range(60)]
        await fed.call("remember", records=[*meant, *newer, *elsewhere])
        found = await fed.call("recall", limit=3, where={"m": 1})
        assert {record["content"] for record in found["records"]} == {record["content"] for record in meant}


async def test_what_moves_is_found_in_a_lifted_tier_that_is_asked_for_more() -> None:
    """A lifted tier that has to be asked for more results does not lose a record that moves meanwhile."""
    steer = Steered()
    servers = {"semantic": Foreign()}
    async with trial(patient(), weather=steer, servers=servers) as fed, anyio.create_task_group() as tasks:
        meant = await fed.remember("old", tier="semantic", metadata={"m": 1})
        await fed.remember(*["newer"] * 8, tier="semantic")
        answered = steer.hold("semantic", "recall", after=True)
        read = Task(tasks, lambda: fed.call("recall", limit=1, where={"m": 1}))
        await answered.reached.wait()
        await fed.call("promote", ids=meant, tier="procedural")
        answered.release()
        assert [record["id"] for record in (await read.ended())["records"]] == meant


@pytest.mark.parametrize("params", [{}, {"query": "alpha"}, {"embedding": [1.0, 0.0]}])
@pytest.mark.parametrize("filled_by", ["what has moved on", "what has been replaced", "what is written meanwhile"])
async def test_records_outside_the_condition_do_not_hide_the_rest(
    filled_by: str, params: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records outside the condition hide no match, even if they fill the largest answer that the store returns."""
    monkeypatch.setattr(a2m_store.store, "StoreLimits", lambda: StoreLimits(max_recall_limit=4))
    steer = Steered()
    asked = {"limit": 3, "where": {"m": 1, "tier": "semantic"}, **params}
    better = {"content": "alpha", "embedding": [1.0, 0.0], "metadata": {"m": 1}, "tier": "semantic"}
    others = [{**better, "key": f"k{n}"} for n in range(7)]
    async with trial(patient(), weather=steer) as fed, anyio.create_task_group() as tasks:
        kept = [{**better, "content": "alpha and more of it", "embedding": [0.5, 1.0]}] * 3
        ids = (await fed.call("remember", records=kept))["ids"]
        if filled_by == "what is written meanwhile":
            writing = steer.hold("semantic", "remember")
            write = Task(tasks, lambda: fed.call("remember", records=others))
            await writing.reached.wait()
            recall = Task(tasks, lambda: fed.call("recall", **asked))
            await wait_all_tasks_blocked()
            writing.release()
            found = await recall.ended()
            await write.ended()
        else:
            moved = (await fed.call("remember", records=others))["ids"]
            if filled_by == "what has moved on":
                steer.refuse("semantic", "forget")
                await fed.call("promote", ids=moved, tier="procedural")
            else:
                steer.refuse("semantic", "remember")
                await fed.call("remember", records=[{**other, "metadata": {"m": 2}} for other in others])
            found = await fed.call("recall", **asked)
        assert {record["id"] for record in found["records"]} == set(ids)
