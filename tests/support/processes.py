"""How a command that takes long ends, and the processes over which it spreads its work.

They do the same whichever of them does it, and end when the command does, whatever they are at: Ctrl-C is for the
command alone, and what they leave on the disk goes with them.
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

# the exit code of a command that was interrupted, as a shell has it
INTERRUPTED: Final = 128 + signal.SIGINT


def end_with(main: Callable[[], int | None]) -> NoReturn:
    """Runs a command, and ends the program with its exit code; Ctrl-C ends it without a traceback."""
    try:
        code = main()
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


@contextmanager
def processes(jobs: int, *, logs: bool = False, exchanged_after: int | None = None) -> Iterator[Pool]:
    """So many processes, which log nothing unless told to; each is exchanged after so many tasks."""
    with (
        tempfile.TemporaryDirectory(prefix="a2m-processes-") as folder,
        # the order in which sets are gone through would be another one in each
        patch.dict(os.environ, PYTHONHASHSEED="0"),
    ):
        # they inherit that, and are deaf to it from their first moment on
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            spawning = multiprocessing.get_context("spawn")
            pool = spawning.Pool(jobs, _begin, [folder, logs], maxtasksperchild=exchanged_after)
        finally:
            signal.signal(signal.SIGINT, interrupt)
        with pool:
            yield pool


def positive(text: str) -> int:
    """The number of processes, or of whatever else there must be one of, that a command line says."""
    number = int(text) if text.isdecimal() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return number


def _begin(folder: str, logs: bool) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # those that come later inherit nothing
    if not logs:
        logging.disable()
    tempfile.tempdir = folder
