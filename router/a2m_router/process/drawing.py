"""Tables and lines that fit the width of a terminal without breaking words.

A table that is too wide becomes one field a line. Only text longer than any word, such as an id or an address, is
broken at the end of its column.
"""

import sys
from collections.abc import Collection, Iterable, Sequence
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

_WORD: Final = 24  # cells of a word, at most; longer text may be broken
_INDENT: Final = 4
_PIPE_WIDTH: Final = 160  # cells of a line when stdout is not a terminal

Column = tuple[str, Sequence[str]]  # a title, and a cell for each row


def terminal_width() -> int:
    """Return the cells in a line of the terminal; COLUMNS overrides it, and 80 is the default without a terminal."""
    return Console(stderr=True).width


def wrapped(line: str, width: int, indent: int = _INDENT) -> str:
    """Return the line, wrapped to the width; the lines after the first are indented."""
    if cell_len(line) <= width:
        return line
    text = line.lstrip()
    own = line[: len(line) - len(text)]
    lines = Text(text).wrap(Console(width=width), max(width - max(indent, len(own)), 1), overflow="fold")
    return own + f"\n{' ' * indent}".join(each.plain.rstrip() for each in lines)


def print_report(title: str, columns: Sequence[Column], lines: Iterable[str], *, right: Collection[str] = ()) -> None:
    """Print a table and the lines that explain it to stdout; see `table`."""
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False)
    console.print(title, style="italic")
    drawn = table(columns, console.width, right=right)
    console.print(blocks(columns, console.width) if drawn is None else drawn)
    for line in lines:
        console.print(line)


def table(
    columns: Sequence[Column], width: int, *, whole: Collection[str] = (), right: Collection[str] = ()
) -> Table | None:
    """Return a table; None if it does not fit the width.

    Args:
        columns: at least one. All have the same number of cells.
        whole: the titles of columns whose cells must not be broken.
        right: the titles of columns of numbers, aligned to the right.
    """
    widths = _widths(columns, width - 3 * len(columns) - 1, whole)
    if widths is None:
        return None
    drawn = Table(box=box.SIMPLE_HEAD)
    for (title, _), each in zip(columns, widths, strict=True):
        drawn.add_column(Text(title), overflow="fold", width=each, justify="right" if title in right else "left")
    for row in zip(*(cells for _, cells in columns), strict=True):
        drawn.add_row(*map(Text, row))
    return drawn


def blocks(columns: Sequence[Column], width: int) -> RenderableType:
    """Return the content of a table, one field a line, without empty fields."""
    drawn: list[RenderableType] = [Text()]
    for row in zip(*(cells for _, cells in columns), strict=True):
        titles = (title for title, _ in columns)
        drawn += [fields([(title, cell) for title, cell in zip(titles, row, strict=True) if cell], width), Text()]
    return Group(*drawn)


def fields(pairs: Sequence[tuple[str, str]], width: int) -> RenderableType:
    """Return a name and a value a line; a value too wide to stand beside its name goes below it, if it fits there."""
    room = width - 4
    names, values = ([pair[place] for pair in pairs] for place in (0, 1))
    widths = _widths([("", names), ("", values)], room, ())
    drawn: list[RenderableType] = []
    for name, value in pairs:
        row = Table(box=None, show_header=False)
        if widths is None or widths[1] < max(map(cell_len, value.split()), default=0) <= width - 2:
            row.add_column(width=max(width - 2, 1), overflow="fold")
            row.add_row(Text(name, style="bold"))
            row.add_row(Text(value))
        else:
            row.add_column(width=widths[0], overflow="fold")
            row.add_column(width=widths[1], overflow="fold")
            row.add_row(Text(name, style="bold"), Text(value))
        drawn.append(row)
    return Group(*drawn)


def _widths(columns: Sequence[Column], room: int, whole: Collection[str]) -> list[int] | None:
    """Return the width of each column, in total at most `room`; None if words would break."""
    wanted = [_longest_line([title, *cells]) for title, cells in columns]
    widths = [
        wanted[place] if title in whole else _longest_word([title, *cells])
        for place, (title, cells) in enumerate(columns)
    ]
    left = room - sum(widths)
    if left < 0:
        return None
    # the columns that lack least first, so that most cells fit on one line
    for place in sorted(range(len(columns)), key=lambda place: wanted[place] - widths[place]):
        more = min(wanted[place] - widths[place], left)
        widths[place] += more
        left -= more
    return widths


def _longest_line(cells: Iterable[str]) -> int:
    return max((cell_len(line.expandtabs()) for cell in cells for line in cell.splitlines()), default=0) or 1


def _longest_word(cells: Iterable[str]) -> int:
    return max((min(cell_len(word), _WORD) for cell in cells for word in cell.split()), default=1)
