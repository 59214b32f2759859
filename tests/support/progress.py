"""The progress of a long-running command: a bar on stderr, where that is a terminal, and nothing elsewhere.

Output during the run appears above the bar. If stdout is a file or a pipe, it gets every line.
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

# seconds between two drawings of a bar that is drawn on updates
_EVERY: Final = 0.25


class Bar:
    """A progress bar, which is not drawn if stderr is no terminal."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task
        self._drawn = 0.0

    def reach(self, done: float) -> None:
        """Set how much is done."""
        draw = not self._progress.live.auto_refresh and time.monotonic() >= self._drawn + _EVERY
        self._progress.update(self._task, completed=done, refresh=draw)
        if draw:
            self._drawn = time.monotonic()

    def advance(self) -> None:
        """Add one to what is done."""
        self.reach(self._progress.tasks[0].completed + 1)

    def name(self, what: str) -> None:
        """Set the name of the current task."""
        self._progress.update(self._task, description=what)

    def tell(self, text: str) -> None:
        """Print one or several lines on stderr."""
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress(what: str, total: float, *, ticks: bool = True) -> Iterator[Bar]:
    """Show a bar that ends at `total`.

    Args:
        ticks: draw the bar by a thread, so that its clock runs while nothing is done. A command that measures times in
    this process passes False; then `reach` draws the bar.
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
        # output to the terminal goes above the bar; other output must not end on the screen
        redirect_stdout=sys.stdout.isatty(),
    ) as bar:
        yield Bar(bar, bar.add_task(what, total=total))
