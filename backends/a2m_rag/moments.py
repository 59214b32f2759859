"""Reads the creation time of a result, in the many forms that services use. Pure.

Texts: the dates of ISO 8601, which include RFC 3339, with or without a time; or the date format of mail. Without a time
zone, a text is UTC. Numbers: seconds since 1970; or milliseconds, if as seconds they were beyond the year 5000.
"""

import math
import re
from datetime import UTC, date, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)
# as seconds this is the year 5138, as milliseconds the year 1973
_LEAST_MILLISECONDS: Final = 1e11

_YEAR_OR_MONTH: Final = re.compile(r"(\d{4})(?:-(\d{2}))?", re.ASCII)
# eight digits are a date; fewer digits are too ambiguous to be seconds
_EPOCH_DIGITS: Final = re.compile(r"\d{9,13}(?:\.\d+)?", re.ASCII)
_LEAP_SECOND: Final = re.compile(r"(:\d{2}):60")


def milliseconds(value: Any) -> int | None:
    """Return `value` in milliseconds since 1970; None if it is not a time between the years 1 and 9999."""
    try:
        match value:
            case bool():
                return None
            case datetime():
                moment = value
            case date():
                moment = datetime(value.year, value.month, value.day)
            case int() | float():
                return _of_number(value)
            case str():
                text = value.strip()
                if _EPOCH_DIGITS.fullmatch(text):
                    return _of_number(float(text))
                moment = _of_text(text)
            case _:
                return None
        return _checked((_in_utc(moment) - _EPOCH) // _MILLISECOND)
    except (ValueError, OverflowError, TypeError):
        return None


def _of_number(number: float) -> int | None:
    if not math.isfinite(number):
        return None
    seconds = abs(number) < _LEAST_MILLISECONDS
    return _checked(round(number * 1000 if seconds else number))


def _of_text(text: str) -> datetime:
    coarse = _YEAR_OR_MONTH.fullmatch(text)
    if coarse is not None:
        return datetime(int(coarse[1]), int(coarse[2] or 1), 1)
    try:
        # Python has no leap seconds: treat one as the second before it
        return datetime.fromisoformat(_LEAP_SECOND.sub(r"\1:59", text.upper()))
    except ValueError:
        return parsedate_to_datetime(text)


def _in_utc(moment: datetime) -> datetime:
    return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)


def _checked(moment: int) -> int | None:
    try:
        _EPOCH + moment * _MILLISECOND
    except OverflowError:
        return None
    return moment
