"""Timestamps (§3.3): RFC 3339, UTC, `Z`, milliseconds on the wire; whole milliseconds since 1970 inside."""

import re
from datetime import UTC, datetime, timedelta
from typing import Final

UNDATED: Final = "1970-01-01T00:00:00.000Z"
"""The `created_at` of a record whose time of creation is unknown: the wire requires one (§3.1), and this one sorts
before all others. Text for people and models shows such a record as undated: see `is_dated`."""

_FORM = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)
_MOMENT = re.compile(
    r"(?P<day>\d{4}-\d{2}-\d{2})[Tt ](?P<time>\d{2}:\d{2}):(?P<second>\d{2})(?P<fraction>\.\d+)?"
    r"(?P<offset>[Zz]|[+-]\d{2}:?\d{2})?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)


def parse(text: str) -> int:
    """Return the milliseconds since 1970 of a text in exactly the form `2026-07-28T10:15:30.123Z`.

    Raises:
        ValueError: the text has another form; the message names the expected one.
    """
    try:
        if _FORM.fullmatch(text):
            return (datetime.fromisoformat(text) - _EPOCH) // _MILLISECOND
    except ValueError:
        pass  # a day or an hour that does not exist: the sentence below fits, too
    raise ValueError('expected an RFC 3339 timestamp in UTC with milliseconds, like "2026-07-28T10:15:30.123Z"')


def is_dated(timestamp: str) -> bool:
    """Return whether a record's `created_at` is a known time."""
    return timestamp != UNDATED


def moment(text: str) -> int:
    """Return the milliseconds since 1970 of a caller's `text` in any form of RFC 3339.

    It may have an offset, and any fraction or none; a longer fraction is cut. A leap second counts as the second after
    it.

    Raises:
        ValueError: the text has another form; the message names the expected one.
    """
    found = _MOMENT.fullmatch(text)
    milliseconds = None if found is None or len(found["offset"] or "") not in (1, 6) else _milliseconds(found)
    if milliseconds is None:
        raise ValueError(
            'expected an RFC 3339 timestamp, like "2026-07-28T10:15:30.123Z" or "2026-07-28T12:15:30+02:00", '
            f"got {text[:40]!r}"
        )
    return milliseconds


# the last moment that RFC 3339 can express
LATEST: Final = 253_402_300_799_999


def after(milliseconds: int) -> int:
    """Return the moment after this one; the last moment is its own successor."""
    return min(milliseconds + 1, LATEST)


def render(milliseconds: int) -> str:
    """Return the wire form of a moment: the inverse of `parse`. Raise OverflowError outside the years 1 to 9999."""
    return (_EPOCH + milliseconds * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def normalised(text: str) -> str | None:
    """Return the wire form of another server's timestamp; None if it is not one.

    Accepted are the forms of `moment`, and ISO 8601 without an offset, which counts as UTC."""
    found = _MOMENT.fullmatch(text)
    milliseconds = None if found is None else _milliseconds(found)
    return None if milliseconds is None else render(milliseconds)


def _milliseconds(found: re.Match[str]) -> int | None:
    """Return the moment of a match of _MOMENT; None if the day, hour or year does not exist."""
    second, leap = ("59", 1000) if found["second"] == "60" else (found["second"], 0)
    fraction, offset = found["fraction"] or "", (found["offset"] or "Z").upper()
    try:
        at = datetime.fromisoformat(f"{found['day']}T{found['time']}:{second}{fraction[:7]}{offset}")
        milliseconds = (at - _EPOCH) // _MILLISECOND + leap
        render(milliseconds)
    except (ValueError, OverflowError):
        return None
    return milliseconds
