"""Another program that holds a write lock on a database, as a backup does, or a browser of databases."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

# a process of its own: the locks of one process do not keep it out
_HOLDING: Final = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def held(path: Path) -> Iterator[Callable[[], None]]:
    """The database at `path` is held until the block ends, or what it yields is called."""
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
