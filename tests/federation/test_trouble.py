"""A tier refuses, loses records or answers too much: what the caller sees, and that nothing else is affected."""

import errno
import logging
from collections.abc import Awaitable, Callable
from itertools import count
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.claims import id_name
from a2m_router.catalog.selection import Scope
from a2m_router.daemon import app
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import parse_request, render_error
from a2m_router.protocol.wire.method_params import Promote, Remember
from a2m_router.protocol.wire.records import Draft
from a2m_router.tiers import link
from tests.support.catalogs import is_held
from tests.support.federated import (
    FOUR_TIERS,
    LOCAL,
    Steered,
    Task,
    Trial,
    assert_nothing_under_way,
    has_claims,
    settings_of,
    stored,
    trial,
)

pytestmark = pytest.mark.anyio

Go = Callable[[], Awaitable[bytes | None]]


class Refusing:
    """Answer messages to tiers with the error that `says(tier, method, params)` returns; None lets the message pass."""

    def __init__(self, says: Callable[[str, str, dict[str, Any]], A2MError | None]) -> None:
        self.says = says

    async def __call__(self, tier: str, message: bytes, go: Go) -> bytes | None:
        request = parse_request(message)
        error = self.says(tier, request.method.removeprefix("memory/"), msgspec.json.decode(request.params))
        if error is not None and request.id is not None:
            return render_error(request.id, error)
        return await go()


def full() -> A2MError:
    return A2MError(Code.QUOTA_EXCEEDED, "full")


async def contents(fed: Trial) -> list[str]:
    return [record["content"] for record in await fed.timeline()]


async def test_a_vector_that_its_tier_refuses_fixes_no_width() -> None:
    async with trial() as fed:
        with pytest.raises(A2MError):
            await fed.remember("too wide for the store", embedding=[1.0] * 9000)
        await fed.remember("first", embedding=[1.0, 2.0])
        assert (await fed.call("describe"))["embeddings"]["dimensions"] == 2


async def test_a_record_that_the_target_refuses_lets_the_others_go() -> None:
    def says(tier: str, method: str, params: dict[str, Any]) -> A2MError | None:
        refused = method == "remember" and tier == "episodic"
        return full() if refused and any(r["content"] == "poison" for r in params["records"]) else None

    async with trial(settings_of(policy="explicit"), weather=Refusing(says)) as fed:
        await fed.remember("poison", *[f"turn {n}" for n in range(7)], session="s")
        await fed.call("consolidate")
        working = [r["content"] for r in await fed.timeline(tier="working")]
        assert len(working) == 4
        assert "poison" in working


def said_of_moves(log: pytest.LogCaptureFixture) -> list[str]:
    return [
        record.getMessage()
        for record in log.records
        if record.name in ("a2m_router.placement.moves", "a2m_router.placement.passes")
    ]


async def test_why_a_record_does_not_move_is_said_once_however_often_it_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    refused = {"poison", "venom"}

    def says(tier: str, method: str, params: dict[str, Any]) -> A2MError | None:
        if method != "remember" or tier != "episodic":
            return None
        return full() if any(r["content"] in refused for r in params["records"]) else None

    async with trial(settings_of(policy="explicit"), weather=Refusing(says)) as fed:
        ids = await fed.remember("poison", "venom", session="s")
        for number in range(3):  # later records move past them
            await fed.remember(*[f"turn {number} {n}" for n in range(5)], session="s")
            await fed.call("consolidate")
        [told] = said_of_moves(caplog)
        lines = {f"move=working->episodic records not moved: {id!r}: full": id for id in ids}
        # the router logs the other record that stays only when the first one is gone
        await fed.call("forget", ids=[lines.pop(told)])
        await fed.remember("another", "and another", session="s")
        await fed.call("consolidate")
        assert said_of_moves(caplog)[1:] == list(lines)
        refused.clear()
        await fed.remember("one more", session="s")
        await fed.call("consolidate")
        assert said_of_moves(caplog)[2:] == ["move=working->episodic records move again"]


async def test_a_server_with_ever_new_refusals_does_not_fill_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    numbers = count()

    def says(tier: str, method: str, params: dict[str, Any]) -> A2MError | None:
        if method != "remember" or tier != "episodic":
            return None
        return A2MError(Code.INTERNAL_ERROR, "not now", {"reason": f"request {next(numbers)} failed"})

    async with trial(settings_of(policy="explicit"), weather=Refusing(says)) as fed:
        await fed.remember(*[f"turn {n}" for n in range(6)], session="s")
        for _ in range(30):
            await fed.call("consolidate")
    assert next(numbers) > 30
    assert len(said_of_moves(caplog)) <= 10


async def test_a_way_that_is_blocked_is_said_to_be_and_said_to_be_free_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO)
    has_room = False

    def says(tier: str, method: str, params: dict[str, Any]) -> A2MError | None:
        if has_room or method != "remember" or tier != "episodic":
            return None
        return A2MError(Code.INTERNAL_ERROR, "no space left", {"reason": "disk full"})

    async with trial(settings_of(policy="explicit"), weather=Refusing(says)) as fed:
        await fed.remember(*[f"turn {n}" for n in range(6)], session="s")
        for _ in range(3):
            assert (await fed.call("consolidate"))["moved"] == 0
        assert said_of_moves(caplog) == ["move=working->episodic records not moved: no space left"]
        monkeypatch.setattr(link, "_QUIET", 0.0)
        has_room = True
        assert (await fed.call("consolidate"))["moved"] == 2
        assert said_of_moves(caplog)[1:] == ["move=working->episodic records move again"]
    assert [record.getMessage() for record in caplog.records if "disk" in record.getMessage()] == [
        "tier=episodic disk full: no space left",
        "tier=episodic disk has room again",
    ]


async def test_a_record_that_its_tier_holds_altered_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        [id] = await fed.remember("as it was", session="s")
        with fed.stores["working"].transaction() as connection:
            connection.execute("UPDATE record SET content = 'another' WHERE id = ?", (id,))
        for number in range(3):
            await fed.remember(*[f"turn {number} {n}" for n in range(5)], session="s")
            await fed.call("consolidate")
        assert said_of_moves(caplog) == [f"tier=working record not moved: it holds {id!r} altered"]


async def test_a_group_that_alone_is_too_large_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    told = "tier=working group 'g' kept whole over the capacity of 4: it alone has {} records"
    async with trial(settings_of(policy="explicit")) as fed:
        await fed.remember(*[f"turn {n}" for n in range(6)], session="s", group="g")
        for _ in range(3):
            await fed.call("consolidate")
        assert said_of_moves(caplog) == [told.format(6)]
        await fed.remember("a late member", session="s", group="g")
        await fed.call("consolidate")
        assert len(said_of_moves(caplog)) == 1
        ids = [record["id"] for record in await fed.timeline()]
        await fed.call("forget", ids=ids[4:])
        await fed.call("consolidate")
        await fed.remember("five", session="s", group="g")
        await fed.call("consolidate")
        assert said_of_moves(caplog)[1:] == [told.format(5)]


async def test_a_record_that_its_tier_has_lost_does_not_keep_its_bucket_full() -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        ids = await fed.remember(*[f"turn {n}" for n in range(5)], session="s")
        store = fed.stores["working"]
        with store.transaction() as connection:
            connection.execute("DELETE FROM record WHERE id = ?", (ids[0],))
        await fed.call("consolidate")
        assert fed.federation.catalog.buckets.overfull("working") == []


async def test_a_replacement_that_its_tier_refuses_is_true_until_it_catches_up() -> None:
    """A replacement that its tier refuses is true at once, and the tier gets it later."""
    broken = True

    def says(tier: str, method: str, params: dict[str, Any]) -> A2MError | None:
        refused = broken and tier == "semantic" and method == "remember" and "new" in str(params)
        return A2MError(Code.INTERNAL_ERROR, "ailing") if refused else None

    async with trial(weather=Refusing(says)) as fed:
        await fed.remember("old", key="k", tier="semantic", metadata={"n": 1.0})
        await fed.remember("new", key="k")
        record = (await fed.call("fetch", key="k"))["record"]
        assert (record["content"], record["revision"], record["tier"]) == ("new", 1, "semantic")
        assert [r["content"] for r in (await fed.call("recall", query="new old"))["records"]] == ["new"]
        broken = False
        await fed.settled()
        assert [record.content for _, record in stored(fed)[record["id"]]] == ["new"]
        assert_nothing_under_way(fed)


async def test_a_disk_that_fails_keeps_no_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trial() as fed:

        def fail(*_: object) -> None:
            raise OSError(5, "the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "reserve", fail)
            patch.setattr(Catalog, "abandon", fail)
            with pytest.raises(A2MError, match="disk"):
                await fed.call("remember", records=[{"id": "x", "content": "x", "key": "k", "group": "g"}])
        assert not has_claims(fed)
        assert await fed.call("remember", records=[{"id": "x", "content": "x"}]) == {"ids": ["x"]}


class FullDisk:
    """While `full`, makes the given changes of the catalog fail with a full disk."""

    def __init__(self, patch: pytest.MonkeyPatch, *changes: str) -> None:
        self.full = True
        for name in changes:
            patch.setattr(Catalog, name, self._failing(getattr(Catalog, name)))

    def _failing(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def attempted(*given: Any, **named: Any) -> Any:
            if self.full:
                raise OSError(errno.ENOSPC, "disk full")
            return change(*given, **named)

        return attempted


async def test_a_write_that_failed_for_want_of_room_is_undone_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    record = {"id": "x", "content": "x", "key": "k", "group": "g"}
    async with trial() as fed:
        disk = FullDisk(monkeypatch, "commit_write", "abandon")
        with pytest.raises(A2MError, match="the catalog's disk is full: nothing was written") as failure:
            await fed.call("remember", records=[record])
        assert failure.value.data == {"reason": "disk full"}
        assert await fed.timeline() == []
        # the claims of the write are held until the catalog can note that its copy is unwanted
        assert has_claims(fed)
        disk.full = False
        await fed.settled()
        assert fed.copies() == {}
        assert await fed.call("remember", records=[record]) == {"ids": ["x"]}
        await fed.settled()
        assert_nothing_under_way(fed)


async def test_that_the_catalog_takes_no_notes_is_said_once_and_so_is_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("a2m_router.placement.guard._FIRST_WAIT", 0.001)
    caplog.set_level(logging.INFO, "a2m_router.placement.guard")
    trials = 0

    def counting(abandon: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any) -> Any:
            nonlocal trials
            trials += 1
            return abandon(*given)

        return counted

    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "a2m_router.placement.guard"]

    async with trial() as fed:
        disk = FullDisk(monkeypatch, "commit_write", "abandon")
        monkeypatch.setattr(Catalog, "abandon", counting(Catalog.abandon))
        for id in ("x", "y"):
            with pytest.raises(A2MError, match="disk is full"):
                await fed.call("remember", records=[{"id": id, "content": id}])
        with anyio.fail_after(30):
            while trials < 10:
                await anyio.lowlevel.checkpoint()
        [begun] = said()
        assert "notes not written to the catalog, will retry" in begun
        disk.full = False
        await fed.settled()
        assert said()[1:] == ["the catalog's disk accepts notes again"]


async def test_a_move_that_failed_for_want_of_room_is_undone_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        [id] = await fed.remember("x", session="s")
        disk = FullDisk(monkeypatch, "flip", "give_up")
        with pytest.raises(A2MError, match="disk full"):
            await fed.call("promote", ids=[id], tier="semantic")
        assert [(r["id"], r["tier"]) for r in await fed.timeline()] == [(id, "working")]
        disk.full = False
        await fed.settled()
        assert fed.copies() == {id: ["working"]}
        assert await fed.call("promote", ids=[id], tier="semantic") == {"promoted": 1}
        await fed.settled()
        assert fed.copies() == {id: ["semantic"]}


async def test_a_write_that_was_rejected_stays_so_after_an_orderly_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that was reported as not written stays so after an orderly shutdown."""
    async with trial(settings_of(policy="explicit"), folder=tmp_path) as fed:
        disk = FullDisk(monkeypatch, "commit_write", "abandon")
        with pytest.raises(A2MError, match="nothing was written"):
            await fed.remember("a")
        disk.full = False  # the router shuts down before it has retried
    async with trial(settings_of(policy="explicit"), folder=tmp_path) as fed:
        assert await fed.timeline() == []


async def test_a_write_that_fails_does_not_fix_the_width_of_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        disk = FullDisk(monkeypatch, "commit_write")
        with pytest.raises(A2MError, match="disk is full"):
            await fed.remember("a", embedding=[1.0, 0.0, 0.0])
        disk.full = False
        await fed.remember("b", embedding=[1.0, 0.0])
        assert (await fed.call("describe"))["embeddings"]["dimensions"] == 2


async def test_a_forget_that_may_not_outlive_a_power_cut_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        ids = await fed.remember("a")

        async def fail(_: object) -> None:
            raise OSError(errno.ENOSPC, "disk full")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "synced", fail)
            with pytest.raises(A2MError, match="the records are forgotten, but may come back") as failure:
                await fed.call("forget", ids=ids)
        assert failure.value.data == {"reason": "disk full"}
        assert await fed.timeline() == []


async def test_a_promotion_that_is_called_off_is_told_as_far_as_it_went(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("a2m_router.placement.moves._ROUND", 1)
    async with trial(settings_of(policy="explicit")) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("a", "b")
        cursor = (await fed.call("events"))["cursor"]
        # another change holds the claim of the second record
        claim = await fed.federation.catalog.claims.take([id_name(ids[1])])
        call = anyio.CancelScope()
        promoting = fed.federation.methods["memory/promote"].handler

        async def promote() -> None:
            with call:
                await promoting(Promote(ids=ids, tier="semantic"), LOCAL)

        tasks.start_soon(promote)
        with anyio.fail_after(30):
            while [r["tier"] for r in await fed.timeline() if r["id"] == ids[0]] != ["semantic"]:
                await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        call.cancel()
        await anyio.wait_all_tasks_blocked()
        claim.release()
        events = (await fed.call("events", cursor=cursor))["events"]
        assert [event["kind"] for event in events] == ["promoted"]


async def test_a_cancelled_sweep_keeps_its_claims_while_its_forget_may_land() -> None:
    steer = Steered()
    async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
        ids = await fed.remember("a")
        hold = steer.hold("working", "forget")
        sweep = anyio.CancelScope()

        async def welcome() -> None:
            with sweep:  # like the sweep of a tier's welcome, which is cancelled when the tier comes up again
                await fed.federation.reconciler.remove_strays("working")

        fed.federation.catalog.forget(ids, Scope(), fed.clock())
        tasks.start_soon(welcome)
        await hold.reached.wait()
        sweep.cancel()
        await anyio.wait_all_tasks_blocked()
        assert is_held(fed.federation.catalog.claims, id_name(ids[0]))
        hold.release()
        await fed.settled()
        assert not has_claims(fed)


async def test_no_copy_goes_before_the_note_that_lets_it_go_is_durable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_RESTART_SECONDS", 0.01)
    async with trial(settings_of(policy="explicit")) as fed:
        ids = await fed.remember("x", session="s")

        async def fail(_: object) -> None:
            raise OSError(5, "the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(Catalog, "synced", fail)
            with pytest.raises(A2MError):
                await fed.call("forget", ids=ids)
            with pytest.raises(OSError, match="disk"):
                await fed.federation.reconciler.remove_strays("working")
        assert fed.copies() == {ids[0]: ["working"]}
        await fed.settled()
        assert fed.copies() == {}


async def test_a_recall_that_cannot_be_counted_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    async with trial() as fed:
        await fed.remember("pears")

        def fail(*_: object) -> bool:
            raise OSError(28, "disk full")

        monkeypatch.setattr(Catalog, "touch", fail)
        assert [r["content"] for r in (await fed.call("recall", query="pears"))["records"]] == ["pears"]


async def test_a_session_that_cannot_leave_says_so_and_stays() -> None:
    refusing = Refusing(lambda tier, method, _: full() if (tier, method) == ("episodic", "remember") else None)
    async with trial(settings_of(policy="explicit"), weather=refusing) as fed:
        await fed.remember("a", "b", session="s")
        with pytest.raises(A2MError) as refused:
            await fed.call("session/close", session="s")
        assert refused.value.code == Code.INTERNAL_ERROR
        assert {r["tier"] for r in await fed.timeline()} == {"working"}


async def test_closing_a_session_closes_the_callers_own_and_no_other() -> None:
    async with trial() as fed:
        for owner in ("a", "b", None):
            await fed.remember("x", session="s", owner=owner)
        assert (await fed.call("session/close", session="s", owner="a"))["flushed"] == 1
        where = {r.get("owner"): r["tier"] for r in await fed.timeline()}
        assert where == {"a": "episodic", "b": "working", None: "working"}


async def test_what_no_chosen_ranking_places_is_found_all_the_same() -> None:
    text = '[recall]\nrankings = ["vector"]\n' + FOUR_TIERS
    async with trial(settings_of(text)) as fed:
        await fed.remember("pears")
        assert [r["content"] for r in (await fed.call("recall", query="pears"))["records"]] == ["pears"]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_forget_of_more_than_a_tier_can_list_is_rejected() -> None:
    """A forget of more records than a tier can list in one answer is rejected and forgets nothing."""
    async with trial() as fed:
        for batch in range(5):
            await fed.remember(*[f"pears {batch} {n}" for n in range(1000)], tier="semantic")
        with pytest.raises(A2MError) as refused:
            await fed.call("forget", query="pears")
        assert refused.value.code == Code.QUOTA_EXCEEDED
        assert (await fed.call("forget", query="pears", ids=["nobody's"])) == {"forgotten": 0}
        assert (await fed.call("forget", query="pears", where={"tier": "working"})) == {"forgotten": 0}
        assert (await fed.call("consolidate"))["counts"]["semantic"] == 5000


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_answers_that_would_be_too_long_are_asked_for_in_parts() -> None:
    async with trial() as fed:
        for place in range(70):
            await fed.remember(f"{place} " + "x" * 999_000, tier="semantic", metadata={"a": 1}, session="s")
        assert len(await fed.timeline(where={"a": 1}, limit=3)) == 3
        assert len((await fed.call("recall", query="7", limit=3))["records"]) == 1
        assert {link.status for link in fed.federation.links.values()} == {"up"}


async def test_a_scoped_forget_of_an_unknown_id_costs_no_other_owner_a_record() -> None:
    async with trial() as fed:
        catalog = fed.federation.catalog
        catalog.tiers.set_scanned("semantic", False)
        await fed.call("forget", ids=["b1"], owner="alice")
        store = fed.stores["semantic"]
        with store.transaction():
            store.remember(Remember(records=[Draft(id="b1", content="bob's", owner="bob")]), LOCAL)
        await fed.federation.recovery._scanner.scan("semantic")
        catalog.tiers.set_scanned("semantic", True)
        await fed.settled()
        assert await contents(fed) == ["bob's"]


async def test_a_failed_batch_leaves_no_width_behind() -> None:
    refuse = True
    refusing = Refusing(
        lambda tier, method, _: full() if refuse and (tier, method) == ("episodic", "remember") else None
    )
    async with trial(weather=refusing) as fed:
        with pytest.raises(A2MError):
            await fed.call(
                "remember",
                records=[
                    {"content": "x", "embedding": [1, 2, 3], "tier": "semantic"},
                    {"content": "y", "tier": "episodic"},
                ],
            )
        await fed.settled()
        refuse = False
        await fed.remember("z", embedding=[1, 2, 3, 4], tier="semantic")
        assert (await fed.call("describe"))["embeddings"]["dimensions"] == 4


async def test_a_query_beyond_all_bounds_is_refused() -> None:
    async with trial() as fed:
        with pytest.raises(A2MError, match="query") as refused:
            await fed.call("recall", query="pear " * 10_000)
        assert refused.value.code == Code.INVALID_PARAMS


async def test_copies_that_wait_to_be_removed_do_not_hide_what_is_there() -> None:
    async with trial() as fed:
        ids = await fed.remember(*["apple apple apple"] * 200, tier="semantic")
        await fed.remember("one apple among other fruit", tier="semantic")
        with fed.federation.catalog.reads.reading():  # no copy is deleted while this read is under way
            await fed.call("forget", ids=ids)
            found = (await fed.call("recall", query="apple", limit=2))["records"]
        assert [record["content"] for record in found] == ["one apple among other fruit"]


async def test_nobody_learns_how_many_records_of_others_moved() -> None:
    async with trial(settings_of(policy="explicit")) as fed:
        await fed.remember(*[f"turn {n}" for n in range(9)], session="s", owner="bob")
        answer = await fed.call("session/close", session="nobody's", owner="alice")
        assert (answer["moved"], answer["flushed"]) == (0, 0)
        assert set(answer["counts"].values()) == {0}
        await fed.remember(*[f"turn {n}" for n in range(9)], session="t", owner="bob")
        assert (await fed.call("consolidate", owner="bob"))["moved"] > 0


async def test_a_replacement_in_another_tier_takes_its_group_along() -> None:
    async with trial() as fed:
        for n in range(3):
            await fed.remember(f"g{n}", key=f"k{n}", group="g")
        await fed.remember("g0 again", key="k0", group="g", tier="semantic")
        await fed.settled()
        found = {record["content"]: record["tier"] for record in await fed.timeline()}
        assert found == {"g0 again": "semantic", "g1": "semantic", "g2": "semantic"}


async def test_a_record_that_no_message_to_a_tier_could_hold_is_refused_at_once() -> None:
    async with trial() as fed:
        with pytest.raises(A2MError, match=r"records\[0\]") as refused:
            await fed.remember("x", metadata={"m": "y" * 34_000_000})
        assert refused.value.code == Code.QUOTA_EXCEEDED


@pytest.mark.parametrize(
    "where", [{"revision": None}, {"revision": 0}, {"revision": 1}, {"revision": None, "uri": None}]
)
async def test_every_method_means_the_same_by_a_revision(where: dict[str, Any]) -> None:
    async with trial() as fed:
        await fed.remember("without a key")
        await fed.remember("first", key="k")
        await fed.remember("old", key="replaced")
        await fed.remember("new", key="replaced")
        timeline = {record["content"] for record in await fed.timeline(where=where)}
        recall = {record["content"] for record in (await fed.call("recall", where=where))["records"]}
        assert timeline == recall == {None: {"without a key"}, 0: {"first"}, 1: {"new"}}[where["revision"]]


async def test_a_key_whose_record_its_tier_has_lost_can_be_written_again() -> None:
    async with trial() as fed:
        [id] = await fed.remember("old", key="k", tier="semantic")
        store = fed.stores["semantic"]
        with store.transaction() as connection:
            connection.execute("DELETE FROM record WHERE id = ?", (id,))
        assert await fed.remember("new", key="k") == [id]
        assert (await fed.call("fetch", key="k"))["record"]["content"] == "new"


async def test_a_pass_that_is_told_to_end_does_not_begin_another_round() -> None:
    """A round moves 200 records, even if its caller no longer wants them."""
    steer = Steered()
    async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
        await fed.call("remember", records=[{"content": f"note {number}", "session": "s"} for number in range(450)])
        copied = steer.hold("episodic", "remember", after=True)
        close = Task(tasks, lambda: fed.call("session/close", session="s"))
        await copied.reached.wait()
        fed.federation.passes.stop()
        copied.release()
        assert (await close.ended())["flushed"] == 200
        assert len(await fed.timeline(tier="working")) == 250
