"""How far a command has come that takes long: a bar on stderr, where that is a terminal, and nothing elsewhere.

What is printed meanwhile stands above the bar. What goes to stdout goes there: a file or a pipe gets every line.
"""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

# between two drawings of a bar that is drawn when it is told something
_EVERY: Final = 0.25


class Bar:
    """A bar that is on the screen, or would be if there were one."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._drawn = 0.0

    def reach(self, done: float) -> None:
        """So much is done."""
        draw = not self._progress.live.auto_refresh and time.monotonic() >= self._drawn + _EVERY
        self._progress.update(self._task, completed=done, refresh=draw)
        if draw:
            self._drawn = time.monotonic()

    def advance(self) -> None:
        """One more is done."""
        self.reach(self._progress.tasks[0].completed + 1)

    def name(self, what: str) -> None:
        """What is under way now."""
        self._progress.update(self._task, description=what)

    def tell(self, text: str) -> None:
        """A line, or several, on stderr."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: float, *, ticks: bool = True) -> Iterator[Bar]:
    """A bar of so many of what.

    Args:
        ticks: whether it is drawn by a thread, so that its clock goes on while nothing is done. What measures times in
            this process says False, and is then the one who draws: where it says how much is done.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=ticks,
        disable=not sys.stderr.isatty(),
        transient=True,
        # what is in its way goes above it; what goes elsewhere must not end on the screen
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        yield Bar(bar, bar.add_task(what, total=total))
