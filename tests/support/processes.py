"""The end of a long-running command, and the processes over which it spreads its work.

The result of a task does not depend on the process that runs it. The processes end with the command, in any state: only
the command handles Ctrl-C, and the processes' temporary files are deleted at its end.
"""

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.pool import Pool
from typing import Final, NoReturn
from unittest.mock import patch

# the exit code of an interrupted command, as shells have it
INTERRUPTED: Final = 128 + signal.SIGINT


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Run a command, and end the program with its exit code; Ctrl-C ends it without a traceback."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def processes(jobs: int, *, logs: bool = False, exchanged_after: int | None = None) -> Iterator[Pool]:
    """Yield a pool of so many processes, which log only with `logs`; each is replaced after `exchanged_after` tasks."""
    with (
        tempfile.TemporaryDirectory(prefix="a2m-processes-") as folder,
        # else each process would iterate over sets in another order
        patch.dict(os.environ, PYTHONHASHSEED="0"),
    ):
        # the processes inherit this, and so ignore Ctrl-C from their start
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            spawning = multiprocessing.get_context("spawn")
            pool = spawning.Pool(jobs, _begin, [folder, logs], maxtasksperchild=exchanged_after)
        finally:
            signal.signal(signal.SIGINT, interrupt)
        with pool:
            yield pool


def positive(text: str) -> int:
    """Parse a number of a command line that must be at least 1."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return number


def _begin(folder: str, logs: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # processes that are started later do not inherit it
    if not logs:
        logging.disable()
    tempfile.tempdir = folder
