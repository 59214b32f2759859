"""Fills in the template of a request. Pure.

`{query}` and `{limit}` are placeholders inside the strings of a JSON value. A string that consists of `{limit}` alone
becomes a number. Both are filled in at the same time, into decoded values, so the text of a query cannot change the
structure of the request. Names of members are never filled in.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_PLACE: Final = re.compile(r"\{(query|limit)\}")
_THE_LIMIT: Final = "{limit}"


def filled(template: Any, query: str, limit: int) -> Any:
    """Return the JSON value of a template with its placeholders filled in."""
    match template:
        case str():
            if template == _THE_LIMIT:
                return limit
            return filled_text(template, query, limit)
        case list():
            return [filled(each, query, limit) for each in template]
        case Mapping():
            return {name: filled(each, query, limit) for name, each in template.items()}
        case _:
            return template


def filled_text(template: str, query: str, limit: int) -> str:
    """Return a string with its placeholders filled in."""
    return _PLACE.sub(lambda place: query if place[1] == "query" else str(limit), template)


def asks(template: Any) -> bool:
    """Return whether a template contains `{query}`."""
    return _holds(template, "{query}")


def holds_limit(template: Any) -> bool:
    """Return whether a template contains `{limit}`."""
    return _holds(template, _THE_LIMIT)


def _holds(template: Any, place: str) -> bool:
    match template:
        case str():
            return place in template
        case list():
            return any(_holds(each, place) for each in template)
        case Mapping():
            return any(_holds(each, place) for each in template.values())
        case _:
            return False
