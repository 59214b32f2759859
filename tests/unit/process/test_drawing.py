"""Output for a terminal: no line is wider than the terminal, and no word is broken."""

import re
from collections.abc import Sequence
from io import StringIO

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from a2m_router.process.drawing import blocks, fields, table, wrapped

words = st.text(st.sampled_from("abcé字"), min_size=1, max_size=10)
texts = st.lists(words, max_size=8).map(" ".join)


def drawn(what: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue().splitlines()


def words_of(lines: Sequence[str]) -> list[str]:
    return sorted(word for line in lines for word in re.findall(r"[abcé字]+", line))


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(texts, min_size=n, max_size=n), min_size=1, max_size=4)),
    st.integers(24, 120),
)
def test_no_word_of_a_table_is_broken(rows: list[list[str]], width: int) -> None:
    columns = [(f"{place}", [row[place] for row in rows]) for place in range(len(rows[0]))]
    made = table(columns, width)
    lines = drawn(blocks(columns, width) if made is None else made, width)
    assert words_of(lines) == words_of([cell for row in rows for cell in row])
    assert max(map(cell_len, lines)) <= width


@given(st.lists(st.tuples(words, texts), min_size=1), st.integers(14, 120))
def test_no_word_of_a_field_is_broken(told: list[tuple[str, str]], width: int) -> None:
    told = [(name[:5], " ".join(word[:5] for word in value.split())) for name, value in told]
    lines = drawn(fields(told, width), width)
    assert words_of(lines) == words_of([text for pair in told for text in pair])
    assert max(map(cell_len, lines)) <= width


@given(texts, st.integers(26, 120), st.integers(0, 6))
def test_no_word_of_a_line_is_broken(line: str, width: int, indent: int) -> None:
    lines = wrapped(line, width, indent).splitlines()
    assert words_of(lines) == words_of([line])
    assert max(map(cell_len, lines), default=0) <= width
    assert all(after.startswith(" " * indent) for after in lines[1:])


def test_what_is_longer_than_a_line_is_broken_and_nothing_of_it_is_lost() -> None:
    long = "x" * 99
    for lines in (
        drawn(fields([("id", long)], 40), 40),
        drawn(blocks([("id", [long])], 40), 40),
        wrapped(f"id {long}", 40).splitlines(),
    ):
        assert sum(line.count("x") for line in lines) == 99
        assert max(map(len, lines)) <= 40


def test_what_has_no_room_beside_its_name_stands_whole_beneath_it() -> None:
    assert [line.strip() for line in drawn(fields([("the name", "x" * 36)], 40), 40)] == ["the name", "x" * 36]
