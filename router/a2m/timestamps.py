"""Timestamps (§3.3): RFC 3339, UTC, `Z`, milliseconds on the wire; whole milliseconds since 1970 inside."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

UNDATED: Final = "1970-01-01T00:00:00.000Z"
"""The `created_at` of a record of which nobody knows when it was made: the wire requires one (§3.1), and by this one it
sorts before all others. People and models are told that there is none: see `is_dated`."""

_FORM = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)
_MOMENT = re.compile(
    r"(?P<day>\d{4}-\d{2}-\d{2})[Tt ](?P<time>\d{2}:\d{2}):(?P<second>\d{2})(?P<fraction>\.\d+)?"
    r"(?P<offset>[Zz]|[+-]\d{2}:?\d{2})?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def parse(text: str) -> int:
    """The milliseconds since 1970 that `text` names.

    Raises ValueError, saying what form is expected, for anything but `2026-07-28T10:15:30.123Z`.
    """
    try:
        if _FORM.fullmatch(text):
            return (datetime.fromisoformat(text) - _EPOCH) // _MILLISECOND
    except ValueError:
        pass  # a day or an hour that does not exist: the same sentence serves
    raise ValueError('expected an RFC 3339 timestamp in UTC with milliseconds, like "2026-07-28T10:15:30.123Z"')


def is_dated(timestamp: str) -> bool:
    """Whether a record's `created_at` says when it was made."""
    return timestamp != UNDATED


def render(milliseconds: int) -> str:
    """The wire form of a moment; the inverse of `parse`."""
    return (_EPOCH + milliseconds * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def normalised(text: str) -> str | None:
    """The wire form of a moment that another server writes as RFC 3339 or ISO 8601 allow: with an offset or without
    one, which is UTC, without a fraction or with a longer one, which is cut, in a leap second. None for what names no
    moment."""
    match = _MOMENT.fullmatch(text)
    if match is None:
        return None
    second, leap = ("59", 1000) if match["second"] == "60" else (match["second"], 0)
    try:
        moment = datetime.fromisoformat(
            f"{match['day']}T{match['time']}:{second}{match['fraction'] or ''}{(match['offset'] or 'Z').upper()}"
        )
        return render((moment - _EPOCH) // _MILLISECOND + leap)
    except (ValueError, OverflowError):
        return None
