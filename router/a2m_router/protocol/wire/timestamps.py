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


def moment(text: str) -> int:
    """The milliseconds since 1970 that a caller's `text` names, in any form of RFC 3339: with an offset, without a
    fraction or with a longer one, which is cut. A leap second is the one after it.

    Raises ValueError, saying what form is expected.
    """
    found = _MOMENT.fullmatch(text)
    milliseconds = None if found is None or len(found["offset"] or "") not in (1, 6) else _milliseconds(found)
    if milliseconds is None:
        raise ValueError(
            'expected an RFC 3339 timestamp, like "2026-07-28T10:15:30.123Z" or "2026-07-28T12:15:30+02:00", '
            f"got {text[:40]!r}"
        )
    return milliseconds


# the last moment that there is a text for
LATEST: Final = 253_402_300_799_999


def after(milliseconds: int) -> int:
    """The moment after this one; of the last there is, itself."""
    return min(milliseconds + 1, LATEST)


def render(milliseconds: int) -> str:
    """The wire form of a moment; the inverse of `parse`. Raises OverflowError for a year before 1 or after 9999."""
    return (_EPOCH + milliseconds * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def normalised(text: str) -> str | None:
    """The wire form of a moment that another server writes as RFC 3339 or ISO 8601 allow: as `moment` takes it, and
    without an offset, which is UTC. None for what names no moment."""
    found = _MOMENT.fullmatch(text)
    milliseconds = None if found is None else _milliseconds(found)
    return None if milliseconds is None else render(milliseconds)


def _milliseconds(found: re.Match[str]) -> int | None:
    """What a match of _MOMENT names; None for a day or an hour that does not exist, and for a year without a name."""
    second, leap = ("59", 1000) if found["second"] == "60" else (found["second"], 0)
    fraction, offset = found["fraction"] or "", (found["offset"] or "Z").upper()
    try:
        at = datetime.fromisoformat(f"{found['day']}T{found['time']}:{second}{fraction[:7]}{offset}")
        milliseconds = (at - _EPOCH) // _MILLISECOND + leap
        render(milliseconds)
    except (ValueError, OverflowError):
        return None
    return milliseconds
