"""JSON equality: two atoms are equal exactly when the values are."""

import json
from decimal import Decimal
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from a2m_router.protocol.wire.equality import (
    NULL,
    atom,
    integer_of,
    members,
    number_atom,
    parse_where,
    text_atom,
    text_of,
)

texts = st.text(st.characters(codec="utf-8"), max_size=4)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def equal(a: Any, b: Any) -> bool:
    """Return whether two decoded values are equal, by the plainest rules."""
    if isinstance(a, bool) or isinstance(b, bool) or a is None or b is None:
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, str) or isinstance(b, str):
        return isinstance(a, str) and isinstance(b, str) and a == b
    return not isinstance(a, list | dict) and not isinstance(b, list | dict) and a == b


def decoded(text: str) -> Any:
    return json.loads(text, parse_float=Decimal)


@given(values, values)
def test_two_values_have_one_atom_just_when_they_are_equal(a: Any, b: Any) -> None:
    first, second = json.dumps(a), json.dumps(b, ensure_ascii=False)
    assert (atom(first.encode()) == atom(second.encode())) == equal(decoded(first), decoded(second))


@given(values)
def test_spelling_does_not_matter(value: Any) -> None:
    assert atom(json.dumps(value).encode()) == atom(json.dumps(value, indent=1, ensure_ascii=False).encode())


@pytest.mark.parametrize(
    "spellings",
    [
        ["1", "1.0", "10e-1", "0.1e1", "1E0", "1.00e+0"],
        ["0", "-0", "0.0", "-0.0e5"],
        ["100", "1e2", "1.0E+2"],
        ["123456789012345678901234567890", "123456789012345678901234567890.0"],
        ["1e400", "10e399"],
        ['"a"', '"\\u0061"'],
        ['{"a":1,"b":2}', '{"b":2.0,"a":1}', '{"a":0,"b":2,"a":1}'],
    ],
)
def test_one_value_spelt_in_several_ways_has_one_atom(spellings: list[str]) -> None:
    assert len({atom(spelling.encode()) for spelling in spellings}) == 1


def test_values_that_some_codecs_take_for_one_are_told_apart() -> None:
    different = [
        "1", "true", '"1"', "0", "false", "null", '""', "[]", "{}", "[1]", '{"1":1}', "[[]]", '"null"',
        "123456789012345678901234567890", "123456789012345678901234567891", "1e400", "1e401", "0.1",
        "0.1000000000000000055", '"é"', '"e\\u0301"', '"\\u0000"', '["a","b"]', '["ab"]', '["a:1b"]',
    ]  # fmt: skip
    assert len({atom(text.encode()) for text in different}) == len(different)


def test_an_array_in_where_means_any_of_its_elements() -> None:
    where = parse_where({"a": Raw(b'[1, "x", null]'), "b": Raw(b"[[1]]"), "c": Raw(b"[]"), "d": Raw(b"true")})
    assert where == {"a": (atom(b"1"), atom(b'"x"'), NULL), "b": (atom(b"[1]"),), "c": (), "d": (atom(b"true"),)}


def test_members_are_those_of_the_top_level_and_the_last_of_one_name() -> None:
    assert members(b'{"a": 1, "b": {"a": 2}, "a": 3}') == {"a": atom(b"3"), "b": atom(b'{"a":2}')}


@given(texts)
def test_a_text_comes_back_from_its_atom(text: str) -> None:
    assert text_of(text_atom(text)) == text
    assert text_atom(text) == atom(msgspec.json.encode(text))


@given(st.integers())
def test_an_integer_comes_back_if_it_has_64_bits(number: int) -> None:
    assert integer_of(number_atom(number)) == (number if -(2**63) <= number < 2**63 else None)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_field_is_equal_to_its_own_json(number: float) -> None:
    assert number_atom(number) == atom(json.dumps(number).encode())


@pytest.mark.parametrize("text", [b"1.5", b'"7"', b"true", b"null", b"1e30"])
def test_what_is_no_64_bit_integer_is_none(text: bytes) -> None:
    assert integer_of(atom(text)) is None
