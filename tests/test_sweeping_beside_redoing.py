"""A copy that a move has left behind, and a replacement that the record's home has yet to catch up with, at once."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.entries import Entry
from a2m_router.placement.redoing import Redoing
from a2m_router.placement.sweeping import Sweeper
from a2m_router.protocol.wire.records import Record
from tests.catalogs import strays_left
from tests.federated import Foreign, Steered, contents, trial
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
    # the sweeper has looked before the home catches up
    look, begin = Sweeper._seen_at_home, Redoing._begin
    looked = anyio.Event()

    async def look_first(self: Sweeper, entries: Sequence[Entry], tier: str) -> dict[str, Record]:
        seen = await look(self, entries, tier)
        if entries:
            looked.set()
        return seen

    def begin_late(self: Redoing, ids: Iterable[str]) -> None:
        async def wait() -> None:
            await looked.wait()
            begin(self, there)

        there = list(ids)
        self._spawn(wait)

    monkeypatch.setattr(Sweeper, "_seen_at_home", look_first)
    monkeypatch.setattr(Redoing, "_begin", begin_late)
    caplog.set_level(logging.ERROR)
    async with trial(CALM, servers=LIFTED, folder=folder) as fed:
        assert contents(await fed.timeline()) == {"new": "semantic"}
        with anyio.fail_after(60):
            while strays_left(fed.federation.catalog):  # noqa: ASYNC110 - nothing tells when, and to ask would wake it
                await anyio.sleep(0.01)
        assert contents(await fed.timeline()) == {"new": "semantic"}
    assert "has lost" not in caplog.text
