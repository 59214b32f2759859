"""Federations that an earlier version of the router has written: the folders in `federations/`.

Each folder holds the catalog as SQL, the files of its core-only servers, and the timeline that the earlier version
returned.
"""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.lifting import RESERVED, VERSION
from tests.servers.core_only import CoreOnly
from tests.servers.habits import InventsGroups
from tests.support.federated import Foreign, Mix, settings_of, trial
from tests.support.paths import ROOT

pytestmark = pytest.mark.anyio

FOLDER: Final = ROOT / "tests/support/federations/lifted_without_version"
TIERS: Final = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
capacity = 3
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""
SERVERS: Final[Mix] = {"working": Foreign(), "semantic": Foreign()}
TIMELINE: Final[list[dict[str, Any]]] = json.loads((FOLDER / "timeline.json").read_text())


def laid_out(folder: Path, *, catalog: bool = True) -> Path:
    """Copy the earlier version's files to a folder, the catalog only if `catalog` is true. Return the folder."""
    if catalog:
        with closing(sqlite3.connect(folder / "router.db")) as database:
            database.executescript((FOLDER / "router.sql").read_text())
    for tier in SERVERS:
        shutil.copy(FOLDER / f"{tier}.jsonl", folder / f"{tier}.db")
    return folder


def elsewhere(records: list[dict[str, Any]], tier: str) -> list[dict[str, Any]]:
    return [{**record, "tier": tier} for record in records]


def riders_in(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rider of each record in a server's file, as last written."""
    changes = map(json.loads, path.read_text().splitlines())
    written = {record["id"]: record for change in changes for record in change.get("put", ())}
    return {id: json.loads(record["metadata"][RESERVED]) for id, record in written.items()}


async def test_records_with_riders_without_a_version_are_read_and_moved(tmp_path: Path) -> None:
    async with trial(settings_of(TIERS), servers=SERVERS, folder=laid_out(tmp_path)) as fed:
        assert await fed.timeline() == TIMELINE
        assert await fed.call("promote", ids=["turn-1", "page"], tier="semantic") == {"promoted": 3}
        assert await fed.timeline() == elsewhere(TIMELINE, "semantic")
    async with trial(settings_of(TIERS), servers=SERVERS, folder=tmp_path) as fed:
        assert await fed.timeline() == elsewhere(TIMELINE, "semantic")
        found = (await fed.call("recall", query="light", where={"role": "user", "group": "pair"}))["records"]
        assert [record["id"] for record in found] == ["turn-1"]
    riders = riders_in(tmp_path / "semantic.db")
    assert "version" not in riders["plain"]
    assert [riders[id]["version"] for id in ("turn-1", "turn-2", "page")] == [VERSION] * 3
    assert (riders["turn-2"]["role"], riders["turn-2"]["group"]) == ("assistant", "pair")


async def test_a_condition_on_metadata_is_not_sent_to_an_untried_server(tmp_path: Path) -> None:
    """Without evidence that the server keeps metadata, the router sends it no condition on metadata."""
    asked: list[bytes] = []

    async def listening(tier: str, message: bytes, go_on: Any) -> bytes | None:
        asked.append(message)
        answer: bytes | None = await go_on()
        return answer

    async with trial(settings_of(TIERS), servers=SERVERS, folder=laid_out(tmp_path), weather=listening) as fed:
        await fed.remember("another light", metadata={"n": 1}, tier="working")
        for method in ("recall", "timeline"):
            asked.clear()
            found = await fed.call(method, **({"query": "light"} if method == "recall" else {}), where={"n": 1})
            assert "turn-1" in [record["id"] for record in found["records"]]
            assert not any(b'"n":1' in message for message in asked)


async def test_a_role_or_group_that_the_server_has_come_to_invent_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The invented value is not in the rider and does not match the catalog's digest: the router does not move the
    record and does not lose it.
    """

    class Upgraded(InventsGroups):
        pass

    Upgraded.name = CoreOnly.name  # the same server name as before
    servers = {**SERVERS, "semantic": Foreign(kind=Upgraded)}
    async with trial(settings_of(TIERS), servers=servers, folder=laid_out(tmp_path)) as fed:
        with pytest.raises(A2MError, match="'plain': semantic does not hold it as it was written"):
            await fed.call("promote", ids=["plain"], tier="working")
        assert "tier=semantic record not moved: it holds 'plain' altered" in caplog.text
        assert [record["id"] for record in await fed.timeline()] == [record["id"] for record in TIMELINE]


async def test_a_lost_catalog_is_made_anew_of_such_records(tmp_path: Path) -> None:
    async with trial(settings_of(TIERS), servers=SERVERS, folder=laid_out(tmp_path, catalog=False)) as fed:
        assert await fed.timeline() == TIMELINE
