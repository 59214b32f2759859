"""Batches that the end of the router interrupts: afterwards all of a batch exists or nothing.

An acknowledged batch exists. A router ends in one of two ways. If it is killed, all that was written remains. In a
power cut only what was synced remains: of the router's files alone, or of its files and those of its tiers.
"""

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.schema import SCHEMA
from a2m_router.placement.delivering import Delivering
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.gateway import TierGateway
from tests.support.crashes import crash
from tests.support.disk import Disk, Fate, Files, Moment, Photograph, laid
from tests.support.federated import CALM, Foreign, Mix, joined, one_home_each, trial
from tests.support.rebuilding import rebuilt

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])

Records = list[dict[str, Any]]

# The record before the batch: a page, which the batch may replace.
BEFORE: Records = [{"id": "p", "content": "page", "key": "p"}]

# First batches that take one call to one tier, then batches that take several calls or contain a replacement.
ONE_CALL: dict[str, Records] = {
    "one record": [{"id": "a", "content": "a", "key": "k", "group": "g"}],
    "three records": [{"id": id, "content": id} for id in "abc"],
}
SEVERAL: dict[str, Records] = {
    "two tiers": [{"id": "a", "content": "a"}, {"id": "b", "content": "b", "tier": "semantic"}],
    "a replacement beside": [{"id": "a", "content": "a"}, {"content": "page anew", "key": "p"}],
}
MIXES: Mapping[str, Mix] = {
    "native": {},
    "lesser": {"working": Foreign(), "semantic": Foreign()},
}
# This server takes one record in a call.
ONE_BY_ONE: Mix = {"working": Foreign(limits={"max_records_per_call": 1})}

BATCHES = [
    *((name, mix, servers) for name in [*ONE_CALL, *SEVERAL] for mix, servers in MIXES.items()),
    ("three records", "one by one", ONE_BY_ONE),
]
batches = pytest.mark.parametrize(
    ("batch", "servers"),
    [({**ONE_CALL, **SEVERAL}[name], servers) for name, _, servers in BATCHES],
    ids=[f"{name}, {mix}" for name, mix, _ in BATCHES],
)


def is_routers(name: str) -> bool:
    return name.startswith("router.")


def ends(photograph: Photograph) -> Iterator[Files]:
    """Yield the files that remain after each possible end of the router."""
    yield photograph.killed()
    yield photograph.cut()
    yield photograph.after(lambda name: Fate.LOST if is_routers(name) else Fate.KEPT)


def shown(records: Records) -> set[str]:
    return {record["content"] for record in records}


class Moments:
    """All moments of a disk since `begin`, each with whether the write was already answered."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.answered = False
        self.seen: list[tuple[Photograph, bool]] = []

    def begin(self) -> None:
        self._disk.watch = self.look

    def look(self, moment: Moment | None = None) -> None:
        self.seen.append((self._disk.photograph(), self.answered))

    def end(self) -> None:
        self._disk.watch = lambda moment: None


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def written(folder: Path, batch: Records, servers: Mix) -> list[tuple[Photograph, bool]]:
    """Write a batch and return the moments of the files until it is acknowledged."""
    with (disk := Disk(folder)).mounted():
        async with trial(CALM, servers=servers, folder=folder) as fed:
            await fed.call("remember", records=BEFORE)
            await fed.settled()
            moments = Moments(disk)
            moments.begin()
            await fed.call("remember", records=batch)
            moments.answered = True
            moments.look()
            moments.end()
    return moments.seen


async def begun_again(files: Files, folder: Path, servers: Mix, whole: set[str], *, is_acknowledged: bool) -> bool:
    """Start the next router on these files. Return whether it has the batch."""
    with Disk(laid(files, folder)).mounted():
        async with trial(CALM, servers=servers, folder=folder) as fed:
            there = shown(await fed.timeline())
            assert there in ([whole] if is_acknowledged else [whole, shown(BEFORE)])
            await one_home_each(fed)
            assert shown(await fed.timeline()) == there
            return there == whole


async def look_into_all(folder: Path, batch: Records, servers: Mix) -> None:
    """Raise AssertionError if there is an end after which the batch is not as it must be."""
    whole = shown([*BEFORE, *batch])
    if any("id" not in record for record in batch):  # the batch replaces the page
        whole -= shown(BEFORE)
    looked: dict[tuple[Any, ...], bool] = {}
    for photograph, is_acknowledged in await written(made(folder / "written"), batch, servers):
        for files in ends(photograph):
            shot = (*sorted(files.items()), is_acknowledged)
            if shot not in looked:
                next_ = folder / str(len(looked))
                looked[shot] = await begun_again(files, next_, servers, whole, is_acknowledged=is_acknowledged)
    assert len(looked) > 6
    assert set(looked.values()) == {False, True}


@batches
async def test_a_batch_is_whole_or_not_at_all_and_there_if_it_was_acknowledged(
    tmp_path: Path, anyio_backend: str, batch: Records, servers: Mix
) -> None:
    await look_into_all(tmp_path, batch, servers)


_write = Delivering.write


async def as_all_of_the_batch(self: Delivering, written: Any, *, are_all: bool) -> Any:
    return await _write(self, written, are_all=True)


BROKEN: dict[str, tuple[Any, str, Any, Records, Mix]] = {
    "several calls are taken for one": (
        TierGateway,
        "is_one_call",
        lambda *_: True,
        ONE_CALL["three records"],
        ONE_BY_ONE,
    ),
    "what is new is taken for all of a batch": (
        *(Delivering, "write", as_all_of_the_batch),
        *(SEVERAL["a replacement beside"], MIXES["native"]),
    ),
    "what was being written is not given up": (
        *(Catalog, "begin_recovery", lambda self: None),
        *(SEVERAL["two tiers"], MIXES["native"]),
    ),
}


@pytest.mark.parametrize("broken", BROKEN)
async def test_what_makes_a_batch_whole_is_needed(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    owner, name, instead, batch, servers = BROKEN[broken]
    monkeypatch.setattr(owner, name, instead)
    with pytest.raises(BaseExceptionGroup) as wrong:
        await look_into_all(tmp_path, batch, servers)
    assert wrong.group_contains(AssertionError)


@contextmanager
def without_the_sync_before_the_answer(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Acknowledge new records without the sync after the commit."""

    async def nothing(self: Catalog) -> None:
        """Skip the sync. The syncs within `Delivering.write` remain."""

    tell, synced = Delivering.write, Catalog.synced

    async def synced_first(self: Delivering, *given: Any, **named: Any) -> Any:
        with pytest.MonkeyPatch.context() as within:
            within.setattr(Catalog, "synced", synced)
            return await tell(self, *given, **named)

    with patch.context() as broken:
        broken.setattr(Catalog, "synced", nothing)
        broken.setattr(Delivering, "write", synced_first)
        yield


async def test_a_batch_that_is_acknowledged_before_it_is_durable_is_found_out(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = SEVERAL["two tiers"]
    with without_the_sync_before_the_answer(monkeypatch):
        moments = await written(made(tmp_path / "written"), batch, {})
    photograph, is_acknowledged = moments[-1]
    assert is_acknowledged
    with pytest.raises(BaseExceptionGroup) as wrong:
        await begun_again(photograph.cut(), tmp_path / "cut", {}, shown([*BEFORE, *batch]), is_acknowledged=True)
    assert wrong.group_contains(AssertionError)


async def test_what_the_disk_did_not_take_is_durable_when_it_is_written_again(
    tmp_path: Path, anyio_backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The repeated write finds its records in the catalog. Its answer comes only after they are durable."""
    folder, batch = made(tmp_path / "before"), SEVERAL["two tiers"]
    with (disk := Disk(folder)).mounted():
        async with trial(CALM, folder=folder) as fed:
            await fed.call("remember", records=BEFORE)
            await fed.settled()
            refuses = False
            commit_write = Catalog.commit_write

            def committed(*args: Any) -> Any:
                nonlocal refuses
                lost = commit_write(*args)
                refuses = True  # fail the syncs after the commit, not that of the reservation
                return lost

            disk.failure = lambda name: 5 if refuses and is_routers(name) else None
            monkeypatch.setattr(Catalog, "commit_write", committed)
            with pytest.raises(A2MError, match="the records are written and can be read, but may be lost"):
                await fed.call("remember", records=batch)
            monkeypatch.undo()
            refuses = False
            assert await fed.call("remember", records=batch) == {"ids": ["a", "b"]}
            files = disk.photograph().cut()
    assert await begun_again(files, tmp_path / "after", {}, shown([*BEFORE, *batch]), is_acknowledged=True)


# --- catalogs of the version before, which acknowledged a batch once its reservation was durable


def of_the_version_before(path: Path) -> None:
    """Convert a catalog to the schema of the version before, with reservations that may have been acknowledged."""
    with closing(apsw.Connection(str(path))) as catalog:
        catalog.execute("DROP INDEX record_by_reservation")
        catalog.execute("ALTER TABLE records ADD COLUMN batch INTEGER")
        catalog.execute("ALTER TABLE records ADD COLUMN found INTEGER")
        catalog.execute("UPDATE records SET batch = 1 WHERE home IS NULL")
        catalog.execute("CREATE INDEX record_by_reservation ON records (batch) WHERE home IS NULL")
        catalog.pragma("user_version", len(SCHEMA) - 1)


async def reserved_by_the_version_before(folder: Path, *, replaces: bool) -> Path:
    """Return the files of a router that died when all tiers of a batch had it, with a catalog of the version before.

    A power cut after the acknowledgement leaves the same files.
    """
    batch = [*SEVERAL["two tiers"], *(SEVERAL["a replacement beside"][1:] if replaces else [])]
    left = await crash(
        folder,
        lambda steer: steer.hold("semantic", "remember", after=True),
        lambda fed: fed.call("remember", records=batch),
        lambda fed: fed.call("remember", records=BEFORE),
    )
    of_the_version_before(left / "router.db")
    if replaces:  # that version acknowledged a batch with replacements only after its commit
        with closing(apsw.Connection(str(left / "router.db"))) as catalog:
            catalog.execute("UPDATE records SET found = 0 WHERE home IS NULL")
    return left


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("is_down", [False, True])
async def test_what_the_version_before_may_have_acknowledged_is_there(
    tmp_path: Path, anyio_backend: str, *, replaces: bool, is_down: bool
) -> None:
    down = {"semantic"} if is_down else set[str]()
    folder = await reserved_by_the_version_before(tmp_path, replaces=replaces)
    async with trial(CALM, folder=folder, down=down) as fed:
        if is_down and not replaces:
            with pytest.raises(A2MError, match="the tier 'semantic'"):
                await fed.call("fetch", key="k")  # the tier that is down may hold the record
        down.clear()
        for tier in ("working", "semantic"):
            await joined(fed, tier)
        assert shown(await fed.timeline()) == ({"page"} if replaces else {"page", "a", "b"})
        await one_home_each(fed)
    async with trial(CALM, folder=folder) as fed:
        assert shown(await fed.timeline()) == ({"page"} if replaces else {"page", "a", "b"})


@pytest.mark.parametrize("replaces", [False, True])
async def test_a_rebuild_takes_in_what_the_version_before_may_have_acknowledged(
    tmp_path: Path, anyio_backend: str, *, replaces: bool
) -> None:
    folder = await reserved_by_the_version_before(tmp_path, replaces=replaces)
    assert (await rebuilt(folder)).taken.interrupted == (2 if replaces else 0)
    async with trial(CALM, folder=folder) as fed:
        assert shown(await fed.timeline()) == ({"page"} if replaces else {"page", "a", "b"})
        await one_home_each(fed)
