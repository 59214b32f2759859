"""The files that are a server's memory: kept aside, put back, moved away.

- What is kept aside survives this process: whoever finds it at a start knows that the last one had no orderly end, and
  puts it back. It is kept once; what comes later is lost with the rest.
- Nothing is deleted but copies made here, and what a copy replaces.
"""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

# beside the plan, so that patterns for the server's files hardly ever meet it
_KEPT = "chaos-kept"
_MOVED = "chaos-moved"


class MemoryFiles:
    """The files that match any of `patterns` below `folder`; `name` tells them from those of other plans there.

    The server must not be at work, or at least not be writing, meanwhile.
    """

    def __init__(self, folder: Path, patterns: Sequence[str], name: str) -> None:
        self._folder = folder
        self._patterns = patterns
        self._kept = folder / f"{name}.{_KEPT}"
        self._moved = folder / f"{name}.{_MOVED}"

    def keep(self) -> None:
        """Copies them aside, unless there is a copy already."""
        if self._kept.exists():
            return
        making = self._kept.with_suffix(".making")
        shutil.rmtree(making, ignore_errors=True)
        making.mkdir()
        self._each_into(making, shutil.copy2)
        making.rename(self._kept)  # so that half a copy is never taken for one

    def put_back(self) -> bool:
        """Makes them what was kept aside, if anything was; whether it was."""
        if not self._kept.exists():
            return False
        for path in self._files():
            path.unlink()
        for path in sorted(self._kept.rglob("*")):
            if path.is_file():
                back = self._folder / path.relative_to(self._kept)
                back.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, back)
        shutil.rmtree(self._kept)
        return True

    def release(self) -> None:
        """Lets go of what was kept aside."""
        shutil.rmtree(self._kept, ignore_errors=True)

    def move_away(self) -> Path:
        """Moves them, and what was kept aside, out of the server's sight; returns the folder they are in now."""
        number = 1
        while (into := self._moved.with_name(f"{self._moved.name}-{number}")).exists():
            number += 1
        into.mkdir()
        self._each_into(into, shutil.move)
        self.release()
        return into

    def _each_into(self, folder: Path, carry: Callable[[Path, Path], object]) -> None:
        for path in self._files():
            there = folder / path.relative_to(self._folder)
            there.parent.mkdir(parents=True, exist_ok=True)
            carry(path, there)

    def _files(self) -> list[Path]:
        found = {path for pattern in self._patterns for path in self._folder.glob(pattern) if path.is_file()}
        return sorted(path for path in found if not self._is_ours(path))

    def _is_ours(self, path: Path) -> bool:
        return any(_KEPT in part or _MOVED in part for part in path.relative_to(self._folder).parts[:-1])
