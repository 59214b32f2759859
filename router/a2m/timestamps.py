"""Timestamps (§3.3): RFC 3339, UTC, `Z`, milliseconds on the wire; whole milliseconds since 1970 inside."""

import re
from datetime import UTC, datetime, timedelta

_FORM = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)
_RFC_3339 = re.compile(
    r"(\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:)(\d{2})(\.\d+)?([Zz]|[+-]\d{2}:\d{2})",
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


def moment(text: str) -> int:
    """The milliseconds since 1970 that a caller's `text` names, in any form of RFC 3339: with an offset, without a
    fraction or with a longer one, which is cut. A leap second is the one after it.

    Raises ValueError, saying what form is expected.
    """
    found = _RFC_3339.fullmatch(text)
    try:
        if found is not None:
            minute, second, fraction, zone = found.groups(default="")
            leap = second == "60"
            at = datetime.fromisoformat(f"{minute}{'59' if leap else second}{fraction[:7]}{zone}".upper()) - _EPOCH
            milliseconds = at // _MILLISECOND + (1000 if leap else 0)
            render(milliseconds)  # in UTC it may be a year that has no name
            return milliseconds
    except (ValueError, OverflowError):
        pass  # a day or an hour that does not exist: the same sentence serves
    raise ValueError(
        'expected an RFC 3339 timestamp, like "2026-07-28T10:15:30.123Z" or "2026-07-28T12:15:30+02:00", '
        f"got {text[:40]!r}"
    )


def render(milliseconds: int) -> str:
    """The wire form of a moment; the inverse of `parse`. Raises OverflowError for a year before 1 or after 9999."""
    return (_EPOCH + milliseconds * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def normalised(text: str) -> str:
    """The wire form of a moment that another server writes as RFC 3339 allows: with an offset, without a fraction or
    with a longer one, which is cut. What names no moment comes back as it is."""
    try:
        return text if _FORM.fullmatch(text) else render(moment(text))
    except ValueError:
        return text
