"""Timestamps (§3.3): RFC 3339, UTC, `Z`, milliseconds on the wire; whole milliseconds since 1970 inside."""

import re
from datetime import UTC, datetime, timedelta

_FORM = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{3}Z", re.ASCII)
_RFC_3339 = re.compile(r"\d{4}-\d{2}-\d{2}[Tt ]\d{2}:\d{2}:\d{2}(?:\.\d+)?(?:[Zz]|[+-]\d{2}:\d{2})", re.ASCII)
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


def render(milliseconds: int) -> str:
    """The wire form of a moment; the inverse of `parse`."""
    return (_EPOCH + milliseconds * _MILLISECOND).replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


def normalised(text: str) -> str:
    """The wire form of a moment that another server writes as RFC 3339 allows: with an offset, without a fraction or
    with a longer one, which is cut. What names no moment comes back as it is."""
    if _FORM.fullmatch(text) or not _RFC_3339.fullmatch(text):
        return text
    try:
        moment = datetime.fromisoformat(text.upper())
        return render((moment - _EPOCH) // _MILLISECOND)
    except (ValueError, OverflowError):
        return text
