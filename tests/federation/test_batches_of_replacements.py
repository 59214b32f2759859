"""A batch with replacements is one write: every reader sees all of it or nothing.

The batch of these tests writes a new record and replaces one record in each of two tiers. The replacements are written
behind: their tiers get them only after the commit, so a tier that refuses its replacement does not fail the batch. The
tier of the new record does.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.protocol.wire.errors import A2MError, Code
from tests.support.clocks import simulated
from tests.support.crashes import photograph
from tests.support.federated import (
    ALL_NATIVE,
    CALM,
    Foreign,
    Mix,
    Steered,
    Task,
    Trial,
    contents,
    method_of,
    one_home_each,
    stored,
    trial,
)

pytestmark = pytest.mark.anyio

SERVERS: Final[dict[str, Mix]] = {
    "native": ALL_NATIVE,
    "lesser": {"working": Foreign(), "semantic": Foreign()},
    "one of each": {"semantic": Foreign()},
}

servers_of_all_kinds = pytest.mark.parametrize("servers", SERVERS.values(), ids=SERVERS)
on_one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])

BEFORE: Final = {"old": "working", "dated": "semantic"}
AFTER: Final = {"new": "working", "fresh": "semantic", "beside": "episodic"}


async def write_old(fed: Trial) -> None:
    await fed.call(
        "remember",
        records=[
            {"id": "w", "content": "old", "key": "k"},
            {"id": "s", "content": "dated", "key": "l", "tier": "semantic"},
        ],
    )


async def write_batch(fed: Trial) -> None:
    await fed.call(
        "remember",
        records=[
            {"id": "e", "content": "beside", "tier": "episodic"},
            {"content": "new", "key": "k"},
            {"content": "fresh", "key": "l"},
        ],
    )


async def replace_both(fed: Trial) -> None:
    await fed.call("remember", records=[{"content": "new", "key": "k"}, {"content": "fresh", "key": "l"}])


class Photographer(Steered):
    """Weather that photographs the files before and after each call to a tier while `begun` is true.

    `taken` maps the folder of each photograph to whether the caller had its answer by then.
    """

    def __init__(self, folder: Path, into: Path) -> None:
        super().__init__()
        self.taken: dict[Path, bool] = {}
        self.begun = self.told = False
        self._folder, self._into = folder, into

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if not self.begun:
            return await super().__call__(tier, message, go_on)
        what = f"{method_of(message).removeprefix('memory/')} in {tier}"
        self._take(f"before {what}")
        answer = await super().__call__(tier, message, go_on)
        self._take(f"after {what}")
        return answer

    def _take(self, moment: str) -> None:
        folder = photograph(self._folder, self._into / f"{len(self.taken)} {moment}")
        self.taken[folder] = self.told


async def photographed(folder: Path, servers: Mix) -> dict[Path, bool]:
    """Return photographs of the batch and its pending writes, and whether each was taken after the caller's answer."""
    (folder / "before").mkdir()
    (folder / "at").mkdir()
    camera = Photographer(folder / "before", folder / "at")
    async with trial(CALM, servers=servers, weather=camera, folder=folder / "before") as fed:
        await write_old(fed)
        await fed.settled()
        camera.begun = True
        await write_batch(fed)
        camera.told = True
        await fed.settled()
        camera.begun = False
        assert contents(await fed.timeline()) == AFTER
    return camera.taken


@servers_of_all_kinds
@on_one_loop
async def test_killed_at_any_call_it_has_happened_whole_or_not_at_all(tmp_path: Path, servers: Mix) -> None:
    taken = await photographed(tmp_path, servers)
    found = []
    for folder, told in taken.items():
        async with trial(CALM, servers=servers, folder=folder) as fed:
            at_once = contents(await fed.timeline())
            assert at_once in ([AFTER] if told else [BEFORE, AFTER]), folder.name
            await one_home_each(fed)
            assert contents(await fed.timeline()) == at_once, folder.name
            assert {record.content for copies in stored(fed).values() for _, record in copies} == set(at_once)
            found.append(at_once)
    assert found[0] == BEFORE
    assert found[-1] == AFTER
    assert found == sorted(found, key=[BEFORE, AFTER].index)  # the batch does not come undone
    # One call writes the new record; each replacement takes a call and a check of its result.
    assert len(taken) >= 2 * 5


async def held_at(call: int, servers: Mix, *, after: bool) -> bool:
    """Read while call number `call` of the batch or its pending writes is held. Return False if it has fewer."""
    steer = Stopping(call, after=after)
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        await write_old(fed)
        await fed.settled()
        steer.begin()
        writing = Task(tasks, lambda: write_batch(fed))
        await wait_all_tasks_blocked()
        stopped = steer.stopped.is_set()
        told = writing.done
        steer.end()
        readers = [Task(tasks, look) for look in (fed.timeline, lambda: found_by_recall(fed))]
        await wait_all_tasks_blocked()
        blocked = [reader for reader in readers if not reader.done]
        steer.released.set()
        for reader in readers:
            shown = contents(await reader.ended())
            # A reader that had to wait for the tier sees one whole state, too.
            assert shown in ([AFTER] if told else [BEFORE, AFTER]), (steer.where, bool(blocked))
        await writing.ended()
        assert contents(await fed.timeline()) == AFTER
        await one_home_each(fed)
    return stopped


async def found_by_recall(fed: Trial) -> list[dict[str, Any]]:
    words = " ".join([*BEFORE, *AFTER])
    return cast("list[dict[str, Any]]", (await fed.call("recall", query=words, limit=50))["records"])


class Stopping:
    """Weather that stops one call, by its number since `begin`: before it reaches the tier, or after it is done."""

    def __init__(self, number: int, *, after: bool) -> None:
        self.stopped, self.released = anyio.Event(), anyio.Event()
        self.where = ""
        self._number, self._after = number, after
        self._left: int | None = None

    def begin(self) -> None:
        self._left = self._number

    def end(self) -> None:
        self._left = None

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        is_it = self._left == 0
        if self._left is not None:
            self._left -= 1
        if is_it:
            self.where = f"{'after' if self._after else 'before'} {method_of(message)} in {tier}"
            self.stopped.set()
        if is_it and not self._after:
            await self.released.wait()
        answer = await go_on()
        if is_it and self._after:
            await self.released.wait()
        return answer


@servers_of_all_kinds
@pytest.mark.parametrize("after", [False, True], ids=["before the tier has seen it", "when the tier has done it"])
async def test_stopped_at_any_call_every_reader_sees_all_of_it_or_nothing(servers: Mix, after: bool) -> None:
    call = 0
    while await held_at(call, servers, after=after):
        call += 1
    assert call >= 5


@servers_of_all_kinds
@pytest.mark.parametrize("tier", ["working", "semantic"])
async def test_an_earlier_read_does_not_see_half_of_a_batch(tier: str, servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed, anyio.create_task_group() as tasks:
        await write_old(fed)
        await fed.settled()
        has_read_the_old = steer.hold(tier, "recall", after=True)
        other = "semantic" if tier == "working" else "working"
        reads_the_other_late = steer.hold(other, "recall")
        reading = Task(tasks, fed.timeline)
        await has_read_the_old.reached.wait()
        await reads_the_other_late.reached.wait()
        await replace_both(fed)
        reads_the_other_late.release()
        await wait_all_tasks_blocked()
        assert contents(await fed.timeline()) == {"new": "working", "fresh": "semantic"}
        has_read_the_old.release()
        assert contents(await reading.ended()) in (BEFORE, {"new": "working", "fresh": "semantic"})
        await one_home_each(fed)


@contextmanager
def a_disk_that_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[anyio.Event]:
    """Make each sync of the catalog wait until the returned event is set."""
    is_well = anyio.Event()
    wait = GroupCommit.wait

    async def slow(syncing: GroupCommit) -> None:
        await is_well.wait()
        await wait(syncing)

    monkeypatch.setattr(GroupCommit, "wait", slow)
    yield is_well
    is_well.set()


async def test_no_answer_and_no_tiers_write_comes_before_the_batch_is_durable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The caller gets no answer and no tier gets a replacement before the commit is synced."""
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        await write_old(fed)
        await fed.settled()
        with a_disk_that_waits(monkeypatch) as is_well:
            writing = Task(tasks, lambda: replace_both(fed))
            steer.seen.clear()
            await wait_all_tasks_blocked()
            assert not writing.done
            assert not [tier for tier, message in steer.seen if method_of(message) == "memory/remember"]
            is_well.set()
            await writing.ended()
        await one_home_each(fed)


# --- tiers that refuse a write


@servers_of_all_kinds
@pytest.mark.parametrize("tier", ["working", "semantic"])
async def test_a_tier_that_refuses_a_replacement_does_not_fail_the_batch(tier: str, servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        await write_old(fed)
        steer.refuse(tier, "remember")
        await write_batch(fed)
        assert contents(await fed.timeline()) == AFTER
        steer.allow(tier, "remember")
        await one_home_each(fed)
        assert contents(await fed.timeline()) == AFTER


async def refused(fed: Trial) -> Mapping[str, str]:
    """Send the batch, assert that the refusal of the new record's tier fails it, and return the expected contents."""
    with pytest.raises(A2MError, match="the tier 'episodic' did not take the write"):
        await write_batch(fed)
    return BEFORE


@servers_of_all_kinds
async def test_a_tier_that_refuses_the_new_record_makes_all_of_the_batch_fail(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        await write_old(fed)
        steer.refuse("episodic", "remember")
        assert contents(await fed.timeline()) == await refused(fed)
        steer.allow("episodic", "remember")
        await one_home_each(fed)
        assert contents(await fed.timeline()) == BEFORE
        await write_batch(fed)
        assert contents(await fed.timeline()) == AFTER
        await one_home_each(fed)


@servers_of_all_kinds
@on_one_loop
async def test_what_has_failed_does_not_come_true_when_the_router_dies(tmp_path: Path, servers: Mix) -> None:
    (tmp_path / "before").mkdir()
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer, folder=tmp_path / "before") as fed:
        await write_old(fed)
        steer.refuse("episodic", "remember")
        true = await refused(fed)
        folder = photograph(tmp_path / "before", tmp_path / "after")
    async with trial(CALM, servers=servers, folder=folder) as fed:
        await one_home_each(fed)
        assert contents(await fed.timeline()) == true


@servers_of_all_kinds
@simulated
async def test_a_failed_write_does_not_come_true_when_it_lands_late(servers: Mix) -> None:
    steer = Steered()
    async with trial(CALM, servers=servers, weather=steer) as fed:
        await write_old(fed)
        late = steer.hold("episodic", "remember", having=b"beside")
        true = await refused(fed)
        assert contents(await fed.timeline()) == true
        late.release()
        await one_home_each(fed)
        assert contents(await fed.timeline()) == true
        await write_batch(fed)
        assert contents(await fed.timeline()) == AFTER
        await one_home_each(fed)


@pytest.mark.anyio
@pytest.mark.parametrize("first", [{"key": "k"}, {"id": "page", "key": "k"}])
async def test_an_id_beside_a_key_means_the_same_in_a_batch_as_alone(
    first: dict[str, Any],
) -> None:
    """In a batch, too, an id beside the key of another record selects the record with that id."""
    async with trial() as fed:
        await fed.call(
            "remember", records=[{"id": "page", "key": "k", "content": "one"}, {"id": "n", "content": "other"}]
        )
        await fed.remember("bob's", id="q", owner="bob")
        changed = {**first, "content": "two"}
        answer = await fed.call("remember", records=[changed, {"id": "n", "key": "k", "content": "three"}])
        assert answer == {"ids": ["page", "n"]}
        with pytest.raises(A2MError) as refused:
            await fed.call("remember", records=[changed, {"id": "q", "key": "k", "content": "three", "owner": "ann"}])
        assert refused.value.code == Code.SCOPE_DENIED
        contents = {record["id"]: record["content"] for record in await fed.timeline()}
        assert contents == {"page": "two", "n": "other", "q": "bob's"}
