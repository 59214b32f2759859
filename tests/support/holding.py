"""Another program that holds a write lock on a database, as a backup or a database browser does."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# a separate process: the locks of this process do not exclude this process
_HOLDING: Final = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """Hold the write lock of the database at `path` until the block ends, or the yielded function is called."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HOLDING, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )

    def let_go() -> None:
        process.communicate()

    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        yield let_go
    finally:
        if process.poll() is None:
            let_go()
