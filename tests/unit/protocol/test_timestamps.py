"""Moments as callers write them: any form of RFC 3339 is taken, and kept as UTC milliseconds."""

import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.daemon.opening import open_federation
from a2m_router.protocol.client.connecting import connect_command
from a2m_router.protocol.client.memory import Memory
from a2m_router.protocol.wire.equality import parse_where
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import moment, normalised, parse, render

pytestmark = pytest.mark.anyio

# seconds, and far more than anything here takes
PATIENCE: Final = 60

AT: Final = "2026-07-28T10:15:30.123Z"
SAME: Final = [
    "2026-07-28t10:15:30.123z",
    "2026-07-28 10:15:30.1239999999Z",
    "2026-07-28T12:15:30.123+02:00",
    "2026-07-28T04:45:30.1230-05:30",
    "2026-07-28T10:15:30.123-00:00",
]
NONE: Final = [
    *("", "yesterday", "2026-07-28", "2026-07-28T10:15:30", "2026-07-28T10:15Z", "20260728T101530Z", "1784801730"),
    *("2026-02-30T10:15:30Z", "2026-07-28T24:00:00Z", "2026-07-28T10:15:61Z", "2026-07-28T10:15:30+24:00"),
    *("2026-07-28T10:15:30.Z", "2026-07-28T10:15:30,5Z", f"{AT} ", "２026-07-28T10:15:30Z"),
    *("0001-01-01T00:00:00+00:01", "9999-12-31T23:59:59-00:01", "9999-12-31T23:59:60Z", "0000-01-01T00:00:00Z"),
]
LATEST: Final = 253_402_300_799_999
EARLIEST: Final = -62_135_596_800_000


@given(
    st.integers(EARLIEST, LATEST),
    st.integers(-24 * 60 + 1, 24 * 60 - 1),
    st.text("0123456789", max_size=12),
    st.sampled_from("Tt "),
)
def test_a_moment_is_the_same_in_every_form(at: int, offset: int, digits: str, separator: str) -> None:
    try:
        local = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=at)).astimezone(
            timezone(timedelta(minutes=offset))
        )
    except OverflowError:
        return  # that place has no name for it
    sign = "-" if offset < 0 else "+"
    zone = f"{sign}{abs(offset) // 60:02}:{abs(offset) % 60:02}"
    text = local.replace(tzinfo=None).isoformat(separator, "milliseconds") + digits + zone
    assert moment(text) == at
    assert normalised(text) == render(at)
    assert parse(render(at)) == at


def test_a_fraction_is_cut_and_may_be_missing() -> None:
    assert [render(moment(f"1969-12-31T23:59:59{fraction}Z")) for fraction in ("", ".9", ".9999", ".0001")] == [
        f"1969-12-31T23:59:59.{digits}Z" for digits in ("000", "900", "999", "000")
    ]


def test_a_leap_second_is_the_one_after_it() -> None:
    assert render(moment("2016-12-31T23:59:60Z")) == "2017-01-01T00:00:00.000Z"
    assert render(moment("2016-12-31T15:59:60.25-08:00")) == "2017-01-01T00:00:00.250Z"


@pytest.mark.parametrize("text", NONE)
def test_what_names_no_moment_is_refused_by_what_it_is(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {text[:40]!r}")):
        moment(text)
    # of a server's own records one without an offset is told apart all the same
    assert normalised(text) == ("2026-07-28T10:15:30.000Z" if text == "2026-07-28T10:15:30" else None)


@pytest.mark.parametrize("text", SAME)
def test_a_condition_on_a_moment_takes_every_form(text: str) -> None:
    record = Record(id="1", content="", created_at=AT, accessed_at=AT)
    for name in ("created_at", "accessed_at"):
        assert matches(record, parse_where({name: msgspec.Raw(json.dumps(text).encode())}))
        assert matches(record, parse_where({name: msgspec.Raw(json.dumps([None, text]).encode())}))
        assert not matches(record, parse_where({name: msgspec.Raw(b'"2026-07-28T10:15:30.124Z"')}))


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
        # the same again is the same record, however it is written
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
    command = [programs / "a2m", "--stdio", f"{programs / 'a2m-store'} {folder / 'notes.db'}", "--json", *arguments]
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
