"""Decodes a JSON answer, and finds the results in it. Pure."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from msgspec import Raw

from a2m_rag.mapping import Path, has, shown
from a2m_rag.service import ServiceFailure, on_one_line
from a2m_router.protocol.wire.equality import atom, number_atom

# how deep to look for lists to suggest in an error; results rarely lie deeper
_DEEPEST: Final = 4
_MOST_LISTS: Final = 5
_INT64: Final = range(-(2**63), 2**63)
_PLAIN_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def decoded(text: str) -> Any:
    """Return the value of a JSON text. A number that no 64-bit integer and no float represents exactly is a `Raw`.

    Raises:
        ValueError: the text is not JSON.
        RecursionError: the text is nested too deeply.
    """
    return _decoder.decode(text)


def _integer(digits: str) -> int | Raw:
    # metadata is passed on unchanged, so a number beyond 64 bits keeps its text
    if len(digits) < 20 and (number := int(digits)) in _INT64:
        return number
    return Raw(digits.encode())


def _float(text: str) -> float | Raw:
    number = float(text)
    exact = number - number == 0 and (repr(number) == text or number_atom(number) == atom(text.encode()))
    return number if exact else Raw(text.encode())


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid in JSON")


_decoder: Final = json.JSONDecoder(parse_int=_integer, parse_float=_float, parse_constant=_no_constant)


def results_at(path: Path, answer: Any, *, option: str) -> list[Any]:
    """Return the list that `path` finds in an answer.

    Args:
        path: where the results are.
        answer: the decoded answer.
        option: the option that gave the path; error messages name it.

    Raises:
        ServiceFailure: there is no list at the path. The message says what is there, and where the answer has lists.
    """
    found = path.find(answer)
    if found == [] and (elements := path.passed_over(answer)):
        first = next((each for each in elements if isinstance(each, Mapping)), None)
        there = shown(elements[0]) if first is None else f"an object; {has(first)}"
        raise ServiceFailure(
            f"expected results at {path.text!r} of its answer, but the path finds nothing in any of {len(elements)} "
            f"elements; the first is {there}; see {option}"
        )
    if isinstance(found, list):
        return found
    raise ServiceFailure(
        f"expected a list of results at {path.text!r} of its answer, got {shown(found)}; {_described(answer, option)}"
    )


def _described(answer: Any, option: str) -> str:
    match answer:
        case Mapping():
            lists = list(_lists(answer))[:_MOST_LISTS]
            where = f"; a list is at {' and at '.join(map(repr, lists))}, see {option}" if lists else f"; see {option}"
            return f"{has(answer)}{where}"
        case list():
            return f"the answer itself is a list; use {option} '@'"
        case _:
            return f"the answer is {shown(answer)}"


def _lists(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield the paths of lists in an object and in those nested in it, to a limited depth; the least deep first."""
    level: list[tuple[str, Mapping[str, Any]]] = [("", answer)]
    for _ in range(_DEEPEST):
        inner: list[tuple[str, Mapping[str, Any]]] = []
        for place, value in level:
            for name, member in value.items():
                path = f"{place}{'.' if place else ''}{_quoted(str(name))}"
                if isinstance(member, list):
                    yield path
                elif isinstance(member, Mapping):
                    inner.append((path, member))
        level = inner


def _quoted(name: str) -> str:
    """Return the name of a member in the syntax of a path."""
    return on_one_line(name if _PLAIN_NAME.fullmatch(name) else json.dumps(name))
