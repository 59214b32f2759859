"""Timestamps of callers: every form of RFC 3339 is accepted, and kept as UTC milliseconds."""

import json
import re
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.protocol.wire.equality import parse_where
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import moment, normalised, parse, render
from tests.support.moments import AT, LATEST, NONE, SAME

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
        return  # datetime cannot represent this moment in that zone
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
    # without an offset it is invalid from a caller, and accepted in a server's own record
    assert normalised(text) == ("2026-07-28T10:15:30.000Z" if text == "2026-07-28T10:15:30" else None)


@pytest.mark.parametrize("text", SAME)
def test_a_condition_on_a_moment_takes_every_form(text: str) -> None:
    record = Record(id="1", content="", created_at=AT, accessed_at=AT)
    for name in ("created_at", "accessed_at"):
        assert matches(record, parse_where({name: msgspec.Raw(json.dumps(text).encode())}))
        assert matches(record, parse_where({name: msgspec.Raw(json.dumps([None, text]).encode())}))
        assert not matches(record, parse_where({name: msgspec.Raw(b'"2026-07-28T10:15:30.124Z"')}))
