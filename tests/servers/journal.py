"""An append-only file of changes, one JSON object a line, that is replayed at start.

A change is on disk when `append` returns. A last line without its end was never acknowledged and is cut off.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Change = dict[str, Any]


class Journal:
    """The changes in the file at `path`, which need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def replayed(self) -> Iterator[Change]:
        """Yield every change in the order in which it was appended. Read it to its end before anything is appended."""
        if not self._path.exists():
            return
        whole = 0
        with self._path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                yield json.loads(line)
            file.truncate(whole)

    def append(self, change: Change) -> None:
        """Append a change. Raises OSError if it cannot be written."""
        is_new = not self._path.exists()
        with self._path.open("ab") as file:
            file.write(json.dumps(change).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            # the file's name is on disk once its folder is synced
            folder = os.open(self._path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
