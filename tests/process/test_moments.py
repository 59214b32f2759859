"""Moments as callers write them to a store and to a router, over the protocol and with the command."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import pytest

from a2m_router.daemon.opening import open_federation
from a2m_router.protocol.client.connecting import connect_command
from a2m_router.protocol.client.memory import Memory
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.timestamps import render
from tests.support.moments import AT, LATEST, NONE, SAME

pytestmark = pytest.mark.anyio


# seconds, and far more than anything here takes
PATIENCE: Final = 60


@asynccontextmanager
async def reached(way: str, folder: Path) -> AsyncIterator[Memory]:
    store = str(Path(sys.executable).with_name("a2m-store"))
    if way == "store":
        async with connect_command([store, str(folder / "notes.db")], timeout=PATIENCE) as memory:
            yield memory
        return
    config = folder / "federation.toml"
    config.write_text(
        'state = "router.db"\n'
        '[tiers.working]\nkind = "working"\ncommand = ["a2m-store", "working.db"]\n'
        '[tiers.semantic]\nkind = "semantic"\ncommand = ["a2m-store", "semantic.db"]\n'
    )
    async with open_federation(config) as memory:
        yield memory


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", ["store", "router"])
async def test_what_was_written_elsewhere_keeps_its_moment_in_utc(way: str, tmp_path: Path) -> None:
    async with reached(way, tmp_path) as memory:
        for number, text in enumerate([AT, *SAME]):
            await memory.remember(f"turn {number}", id=str(number), created_at=text, key=f"k/{number}")
        await memory.remember("earlier", id="earlier", created_at="2026-07-28T11:15:30+02:00")
        await memory.remember("later", id="later", created_at="2026-07-28T09:15:30.5-02:00")
        found = (await memory.timeline()).records
        assert [record.created_at for record in found] == [
            "2026-07-28T09:15:30.000Z",
            *[AT] * 6,
            "2026-07-28T11:15:30.500Z",
        ]
        # a repeated write, with another spelling of the moment, is the same record
        assert (await memory.remember("turn 0", id="0", created_at=SAME[2], key="k/0")) == ["0"]
        same = {str(number) for number in range(6)}
        for text in [AT, *SAME]:
            where = {"created_at": text}
            assert {record.id for record in (await memory.timeline(where=where)).records} == same
            assert {record.id for record in (await memory.recall("turn", where=where)).records} == same
        assert not (await memory.timeline(where={"created_at": "tomorrow"})).records
        for text in NONE:
            with pytest.raises(A2MError, match=r"records\[0\]\.created_at: expected an RFC 3339 timestamp"):
                await memory.remember("when?", created_at=text)
        assert await memory.forget(where={"created_at": [SAME[0], "2026-07-28T13:15:30.500+02:00"]}) == 7
        assert [record.id for record in (await memory.timeline()).records] == ["earlier"]


def a2m(folder: Path, *arguments: str) -> str:
    programs = Path(sys.executable).parent
    command = [
        str(programs / "a2m"),
        "--stdio",
        f"{programs / 'a2m-store'} {folder / 'notes.db'}",
        "--json",
        *arguments,
    ]
    ended = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=PATIENCE, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_import_takes_every_form(tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(n), "content": "x", "created_at": text}) for n, text in enumerate([AT, *SAME])]
    (tmp_path / "notes.jsonl").write_text("\n".join(lines))
    a2m(tmp_path, "import", "notes.jsonl")
    exported = [json.loads(line) for line in a2m(tmp_path, "export").splitlines()]
    assert [record["created_at"] for record in exported if "id" in record] == [AT] * 6


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("way", ["store", "router"])
async def test_a_conversation_that_has_come_to_the_last_moment_goes_on_there(way: str, tmp_path: Path) -> None:
    last = render(LATEST)
    async with reached(way, tmp_path) as memory:
        await memory.remember("far", created_at=last, session="s")
        await memory.remember("now", session="s")
        await memory.remember("then", session="s")
        found = (await memory.timeline()).records
    assert [(record.content, record.created_at) for record in found] == [("far", last), ("now", last), ("then", last)]
    with pytest.raises(OverflowError):
        render(LATEST + 1)
