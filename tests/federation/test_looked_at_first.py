"""Before the router changes a tier, it checks whether the tier is later than the catalog, an old copy of which was put
back.

A refused start has changed nothing. A tier that comes up late or does not answer the first look is not changed either.
"""

import json
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from anyio import wait_all_tasks_blocked

import a2m_router.placement.recovery
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.profile import CannotServe
from tests.servers.core_only import CoreOnly
from tests.support.clocks import simulated
from tests.support.disk import Files
from tests.support.federated import (
    CALM,
    FOUR_TIERS,
    Clock,
    Foreign,
    Mix,
    Steered,
    Task,
    Trial,
    contents,
    joined,
    lose,
    plant,
    settings_of,
    trial,
)
from tests.support.restored_files import ANEW, TIERS, T, copied, held, is_refused, leaves, put_back
from tests.support.shared_servers import Shared

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


MIXES: Final[Mapping[str, Mix]] = {
    "native": {},
    "lesser": {"working": Foreign()},
    "all lesser": dict.fromkeys(TIERS, Foreign()),
}
mixes = pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)


async def forgotten(fed: Trial, steer: Steered) -> Files:
    """Return a catalog in which t is forgotten and the deletion of its copy is pending."""
    await fed.call("remember", records=[T])
    steer.refuse("working", "forget")
    await fed.call("forget", ids=["t"])
    await wait_all_tasks_blocked()
    copy = copied_of(fed)
    steer.allow("working", "forget")
    return copy


async def being_written(fed: Trial, steer: Steered) -> Files:
    """Return a catalog in which the write of t is in progress, in another state than t has later."""
    async with anyio.create_task_group() as tasks:
        hold = steer.hold("working", "remember")
        task = Task(tasks, lambda: fed.call("remember", records=[T]))
        await hold.reached.wait()
        await wait_all_tasks_blocked()
        copy = copied_of(fed)
        hold.release()
        await task.settled()
    return copy


async def replaced(fed: Trial, steer: Steered) -> Files:
    """Return a catalog in which t is replaced and the pending write is not done."""
    await fed.call("remember", records=[{**T, "key": "k"}])
    for method in ("remember", "forget"):
        steer.refuse("working", method)
    await fed.call("remember", records=[{"content": "two", "key": "k"}])
    await wait_all_tasks_blocked()
    copy = copied_of(fed)
    for method in ("remember", "forget"):
        steer.allow("working", method)
    await fed.caught_up()
    return copy


def copied_of(fed: Trial) -> Files:
    path = fed.federation.catalog.database.path
    assert path is not None
    return copied(path.parent)


Noted = Callable[[Trial, Steered], Awaitable[Files]]
noted = pytest.mark.parametrize("noted", [forgotten, being_written, replaced], ids=lambda noted: noted.__name__)


async def is_later(folder: Path, mix: Mix, noted: Noted, starts: Iterable[str] = ("u",)) -> Files:
    """Put an older catalog back that has a note about t. Return the newer catalog.

    After the older catalog was copied, t was forgotten and written anew in the same start of the router. Each of the
    later `starts` wrote another record, with only the working tier up.
    """
    steer = Steered()
    async with trial(CALM, servers=mix, folder=folder, weather=steer) as fed:
        copy = await noted(fed, steer)
        await fed.call("forget", ids=["t"])
        await fed.settled()
        await fed.call("remember", records=[ANEW])
        await fed.settled()
    for id in starts:
        async with trial(CALM, servers=mix, folder=folder, down={*TIERS} - {"working"}) as fed:
            await fed.call("remember", records=[{"id": id, "content": id}])
    newer = copied(folder)
    put_back(folder, copy)
    return newer


class Failing(Steered):
    """Weather in which the first calls of a method to a tier fail."""

    def __init__(self, tier: str, method: str, times: int) -> None:
        super().__init__()
        self._failing = (tier, f'"memory/{method}"'.encode())
        self.left = times

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if tier == self._failing[0] and self._failing[1] in message and self.left:
            self.left -= 1
            error = {"code": -32603, "message": "busy for a moment"}
            return json.dumps({"jsonrpc": "2.0", "id": json.loads(message)["id"], "error": error}).encode()
        return await super().__call__(tier, message, go_on)


@mixes
@noted
async def test_a_tier_that_is_later_and_comes_up_late_is_not_changed_by_anything(
    tmp_path: Path, mix: Mix, noted: Noted
) -> None:
    await is_later(tmp_path, mix, noted)
    down = {"working"}
    before = held(tmp_path)
    steer = Steered()
    async with trial(CALM, servers=mix, folder=tmp_path, down=down, weather=steer) as fed:
        [moved] = await fed.remember("moved", tier="episodic")
        look = steer.hold("working", "timeline")
        down.clear()
        fed.federation.admission.welcomed["working"] = anyio.Event()
        await fed.federation.links["working"].wait_up()
        if mix:  # the greeting of a native store already shows that it is later
            await look.reached.wait()
        for _ in range(2):  # during the look, then after it
            for call in (
                lambda: fed.remember("x", tier="working"),
                lambda: fed.call("promote", ids=[moved], tier="working"),
                lambda: fed.call("remember", records=[{"content": "x", "key": "other", "tier": "working"}]),
            ):
                with pytest.raises(A2MError):
                    await call()
            with suppress(A2MError):  # a catalog that has the record may answer without the tier
                await fed.call("remember", records=[{**T, "tier": "working"}])
            look.release()
            await fed.federation.admission.welcomed["working"].wait()
        await fed.federation.reconciler.idle()
        await wait_all_tasks_blocked()
        assert "--rebuild" in fed.federation.problems["working"]
    assert {id: where for id, where in held(tmp_path).items() if id != moved} == before
    assert {json.loads(message)["method"] for tier, message in steer.seen if tier == "working"} <= {
        *("memory/describe", "memory/timeline", "memory/recall"),
        *(("memory/forget",) if mix else ()),  # of no ids, to test whether it takes writes
    }


@mixes
@noted
@pytest.mark.parametrize("times", [0, 1, 2])
async def test_a_refused_start_has_changed_nothing_though_a_look_failed_before(
    tmp_path: Path, mix: Mix, noted: Noted, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    monkeypatch.setattr("a2m_router.placement.admission._WELCOME_SECONDS", 0.01)
    await is_later(tmp_path, mix, noted)
    before = held(tmp_path)
    weather = Failing("working", "timeline", times)
    with pytest.raises(BaseExceptionGroup) as refused:
        async with trial(CALM, servers=mix, folder=tmp_path, weather=weather):
            pass
    [problem] = leaves(refused.value)
    assert isinstance(problem, CannotServe)
    assert "--rebuild" in str(problem)
    assert held(tmp_path) == before


@mixes
async def test_a_refused_start_leaves_no_trace_in_any_store(
    tmp_path: Path, mix: Mix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After refused starts the newer catalog can be put back, and the next start accepts it."""
    monkeypatch.setattr("a2m_router.placement.admission._WELCOME_SECONDS", 0.01)
    newer = await is_later(tmp_path, mix, forgotten)
    for times in (0, 1):
        copy = copied(tmp_path)
        with pytest.raises(BaseExceptionGroup):
            async with trial(CALM, servers=mix, folder=tmp_path, weather=Failing("working", "timeline", times)):
                pass
        put_back(tmp_path, copy)
    put_back(tmp_path, newer)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"anew": "working", "u": "working"}


async def test_a_refused_start_removes_nothing_from_other_tiers_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older catalog has a pending deletion for a tier that no later start has written to. It must stay pending."""
    monkeypatch.setattr("a2m_router.placement.admission._WELCOME_SECONDS", 0.01)
    mix, steer = MIXES["all lesser"], Steered()
    async with trial(CALM, servers=mix, folder=tmp_path, weather=steer) as fed:
        await fed.call("remember", records=[{**T, "tier": "semantic"}])
        steer.refuse("semantic", "forget")
        await fed.call("forget", ids=["t"])
        await wait_all_tasks_blocked()
        copy = copied(tmp_path)
    async with trial(CALM, servers=mix, folder=tmp_path, down={"semantic"}) as fed:
        await fed.remember("later")
    put_back(tmp_path, copy)
    weather = Failing("working", "timeline", 1)
    before = held(tmp_path)
    assert "t" in before
    with pytest.raises(BaseExceptionGroup):
        async with trial(CALM, servers=mix, folder=tmp_path, weather=weather):
            pass
    assert held(tmp_path) == before


@simulated
async def test_a_tier_that_does_not_answer_the_look_hides_no_other_that_is_later(tmp_path: Path) -> None:
    mix, steer = MIXES["all lesser"], Steered()
    async with trial(CALM, servers=mix, folder=tmp_path, weather=steer) as fed:
        await fed.call("remember", records=[{**T, "tier": "semantic"}])
        steer.refuse("semantic", "forget")
        await fed.call("forget", ids=["t"])
        await anyio.sleep(1)
        copy = copied(tmp_path)
        steer.allow("semantic", "forget")
        await fed.settled()
        await fed.call("remember", records=[{**ANEW, "tier": "semantic"}])
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        await fed.remember("later", tier="semantic")
    put_back(tmp_path, copy)
    before = held(tmp_path)
    slow = Steered()
    slow.hold("working", "timeline")
    patient = settings_of(FOUR_TIERS.replace('"working"\n', '"working"\ntimeout = "1m"\n'), policy="explicit")
    with pytest.raises(BaseExceptionGroup) as refused:
        async with trial(patient, servers=mix, folder=tmp_path, weather=slow):
            pass
    [problem] = leaves(refused.value)
    assert str(problem).startswith("tiers.semantic: the catalog is older")
    assert held(tmp_path) == before


@simulated
async def test_a_tier_that_answers_no_look_does_not_keep_the_others_from_serving(tmp_path: Path) -> None:
    mix = MIXES["lesser"]
    slow = Steered()
    for _ in range(99):
        slow.hold("working", "timeline")
    began = anyio.current_time()
    async with trial(CALM, servers=mix, folder=tmp_path, weather=slow) as fed:
        assert anyio.current_time() - began <= 15
        await fed.remember("one", tier="semantic")
        with pytest.raises(A2MError):
            await fed.remember("two", tier="working")


@mixes
async def test_a_start_asks_each_tier_for_its_newest_records_once(tmp_path: Path, mix: Mix) -> None:
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        for tier in TIERS:
            await fed.remember("one", tier=tier)
    steer = Steered()
    async with trial(CALM, servers=mix, folder=tmp_path, weather=steer):
        asked = [tier for tier, message in steer.seen if b"memory/timeline" in message]
        assert sorted(asked) == sorted(TIERS)


# --- servers that other federations use, too


async def crowded(
    folder: Path, shared: Shared, *, others: int = 600, later: Callable[[Trial], Awaitable[Any]] | None = None
) -> Files:
    """Fill a server of two federations, so that its newest records are those of the other federation.

    Return our catalog from before `later`, which runs in a start of its own.
    """
    for name in ("one", "two"):
        (folder / name).mkdir()
    mix = shared.mix()
    async with trial(CALM, servers=mix, folder=folder / "two") as fed:
        await fed.remember("before", tier="semantic")
    copy = copied(folder / "two")
    if later is not None:
        async with trial(CALM, servers=mix, folder=folder / "two", down={*TIERS} - {"semantic"}) as fed:
            await later(fed)
    async with trial(CALM, servers=mix, folder=folder / "one") as fed:
        await fed.remember(*(f"n{n}" for n in range(others)), tier="semantic")
    return copy


async def test_a_catalog_that_is_older_than_a_busy_shared_server_is_refused(tmp_path: Path) -> None:
    shared = Shared(CoreOnly(tmp_path / "shared.db"))
    copy = await crowded(tmp_path, shared, later=lambda fed: fed.remember("later", tier="semantic"))
    put_back(tmp_path / "two", copy)
    await is_refused(tmp_path / "two", shared.mix())


async def test_what_came_to_a_busy_shared_server_behind_the_router_is_taken_in(tmp_path: Path) -> None:
    shared = Shared(CoreOnly(tmp_path / "shared.db"))

    await crowded(tmp_path, shared, others=0)
    shared.server.call("memory/remember", {"records": [{"id": "by hand", "content": "by hand"}]})
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "one") as fed:
        await fed.remember(*(f"m{n}" for n in range(600)), tier="semantic")
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "two") as fed:
        assert {"before", "by hand"} <= contents(await fed.timeline()).keys()


async def test_a_shared_server_that_lists_too_little_goes_on_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The tier serves, and the log warns that records added by others cannot be detected."""
    shared = Shared(CoreOnly(tmp_path / "shared.db", limits={"max_recall_limit": 50}))
    await crowded(tmp_path, shared)
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "two") as fed:
        assert contents((await fed.call("recall", query="before", tier="semantic"))["records"]) == {
            "before": "semantic"
        }
        await fed.remember("since", tier="semantic")
        assert "records added by others cannot be detected" in caplog.text


OVER_HTTP: Final = settings_of(
    FOUR_TIERS.replace(
        '[tiers.semantic]\nkind = "semantic"\ncommand = ["-"]',
        '[tiers.semantic]\nkind = "semantic"\nurl = "http://127.0.0.1:1/"',
    ),
    policy="explicit",
)


async def two_on_one_store(folder: Path, *, first: int, then: int, last: int) -> Path:
    """Write to one a2m-store from two federations over HTTP: `first` by one, `then` by the other, `last` by the first
    again.

    Return the folder of the first federation.
    """
    for name in ("one", "two"):
        (folder / name).mkdir()
    (folder / "two" / "semantic.db").symlink_to(folder / "one" / "semantic.db")
    clock = Clock()
    for name, count in (("one", first), ("two", then), ("one", last)):
        async with trial(OVER_HTTP, folder=folder / name, clock=clock) as fed:
            await fed.remember(*(f"{name} {n}" for n in range(count)), tier="semantic")
    return folder / "one"


async def scans_of(folder: Path) -> list[bytes]:
    """Return the requests for pages that a start sends to the shared store."""
    steer = Steered()
    async with trial(OVER_HTTP, folder=folder, weather=steer) as fed:
        await joined(fed, "semantic")
        return [message for tier, message in steer.seen if tier == "semantic" and b'"page"' in message]


@pytest.mark.parametrize(("first", "then", "last"), [(3, 3, 3), (3, 150, 5), (3, 3, 150)])
async def test_a_shared_store_that_counts_is_rescanned_only_after_writes(
    tmp_path: Path, first: int, then: int, last: int
) -> None:
    folder = await two_on_one_store(tmp_path, first=first, then=then, last=last)
    await scans_of(folder)
    assert await scans_of(folder) == []
    async with trial(OVER_HTTP, folder=folder) as fed:
        plant(fed, "semantic", id="by hand", content="by hand")
    async with trial(OVER_HTTP, folder=folder) as fed:
        await joined(fed, "semantic")
        assert "by hand" in contents(await fed.timeline(limit=1000))


async def test_a_small_shared_store_is_not_rescanned_for_what_others_write(
    tmp_path: Path,
) -> None:
    """The look covers all records of a small store, so that no scan is needed."""
    folder = await two_on_one_store(tmp_path, first=3, then=3, last=0)
    async with trial(OVER_HTTP, folder=tmp_path / "two") as fed:
        await fed.remember("since", tier="semantic")
    assert await scans_of(folder) == []


async def test_how_much_a_scan_has_found_of_others_is_known_to_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(a2m_router.placement.recovery, "_WIDEST", 100)
    folder = await two_on_one_store(tmp_path, first=3, then=150, last=150)
    assert await scans_of(folder) == []


async def test_a_store_whose_newest_show_too_few_of_ours_is_rescanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = await two_on_one_store(tmp_path, first=3, then=150, last=0)
    assert await scans_of(folder) == []  # the widened look has shown enough of ours
    monkeypatch.setattr(a2m_router.placement.recovery, "_WIDEST", 100)
    assert len(await scans_of(folder)) == 1


async def test_a_tier_that_differs_is_rescanned_before_anything_is_deleted(tmp_path: Path) -> None:
    """Newer records hide what a later start has written from the look. Only the scan finds it."""
    mix = MIXES["lesser"]
    await is_later(tmp_path, mix, forgotten)
    by_hand = [{"id": f"h{n}", "content": "by hand"} for n in range(600)]
    CoreOnly(tmp_path / "working.db").call("memory/remember", {"records": by_hand})
    await is_refused(tmp_path, mix)


@pytest.mark.parametrize("newer", [0, 150], ids=["seen by the look", "seen by the count"])
async def test_nothing_is_removed_from_a_tier_while_it_is_read_through(tmp_path: Path, newer: int) -> None:
    async with trial(CALM, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": id, "content": id, "tier": "semantic"} for id in ("x", "y", "z")])
        await fed.remember(*(f"n{n}" for n in range(newer)), tier="semantic")
        lose(fed, "semantic", "x")
    steer, down = Steered(), {"semantic"}
    async with trial(CALM, folder=tmp_path, weather=steer, down=down) as fed:
        scan = steer.hold("semantic", "timeline", having=b'"page"')
        fed.federation.admission.welcomed["semantic"] = anyio.Event()
        down.clear()
        await scan.reached.wait()
        await fed.call("forget", ids=["y"])
        await fed.federation.reconciler.idle()
        assert [message for _, message in steer.seen if b"memory/forget" in message] == []
        scan.release()
        await joined(fed, "semantic")
        await fed.settled()
        assert not {"x", "y"} & fed.copies().keys()
        assert len(fed.copies()) == 1 + newer
