"""A request's template, filled in. Pure.

`{query}` and `{limit}` stand inside strings of a JSON value; a string that is `{limit}` and nothing else becomes a
number. Both are filled in at once, into values that are already taken apart: so whatever is in a query stays in its
place. Names of members are never filled.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

_PLACE: Final = re.compile(r"\{(query|limit)\}")
_THE_LIMIT: Final = "{limit}"


def filled(template: Any, query: str, limit: int) -> Any:
    """The JSON value that `template` becomes."""
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
    """The string that `template` becomes."""
    return _PLACE.sub(lambda place: query if place[1] == "query" else str(limit), template)


def asks(template: Any) -> bool:
    """Whether `{query}` stands anywhere in it."""
    return _holds(template, "{query}")


def holds_limit(template: Any) -> bool:
    """Whether `{limit}` stands anywhere in it."""
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
