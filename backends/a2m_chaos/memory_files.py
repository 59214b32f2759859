"""The files of a server's memory: saved, restored, moved away.

- A saved copy outlives this process. If one exists at a start, the last run did not end in order, and the copy is
  restored. Only the first save makes a copy. Restoring it loses all later changes.
- Only copies made here are deleted, and the files that a copy replaces.
- If a file cannot be copied or moved, the run ends with a sentence: a server must not continue with half a memory, and
  a fault must not seem to be applied if it is not. The saved copy stays for the next start.
- Only files in the folder are touched. A link is copied as a link. The files behind a link to a folder are ignored, and
  nothing is written through a link.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path

# unusual names beside the plan, which patterns for the server's files rarely match
_KEPT = "chaos-kept"
_MOVED = "chaos-moved"


class CannotCarry(Exception):
    """The server's files cannot be copied or moved; a sentence with the file and the reason."""


class MemoryFiles:
    """The files that match any of `patterns` below `folder`. All methods raise CannotCarry.

    The server must not write to them while a method runs.

    Args:
        folder: the plan's folder.
        patterns: the patterns of the server's files.
        name: distinguishes the copies from those of other plans in this folder.
        without: files that are not the server's, even if a pattern matches them.
    """

    def __init__(self, folder: Path, patterns: Sequence[str], name: str, *, without: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._patterns = patterns
        self._without = frozenset(map(realpath, without))
        self._kept = folder / f"{name}.{_KEPT}"
        self._making = folder / f"{name}.{_KEPT}-making"  # renamed when complete, so half a copy is never restored
        self._moved = folder / f"{name}.{_MOVED}"

    def keep(self) -> None:
        """Save a copy of the files, unless there is one already."""
        if self._kept.exists():
            return
        shutil.rmtree(self._making, ignore_errors=True)
        with _converted("saved"):
            self._making.mkdir()
            self._each_into(self._making, _copy)
            self._making.rename(self._kept)

    def put_back(self) -> bool:
        """Restore the saved copy, if there is one. Return whether there was one."""
        if not self._kept.exists():
            return False
        with _converted("restored"):
            for path in self._files():
                path.unlink()
            for path in sorted(self._kept.rglob("*")):
                if _is_file(path):
                    back = self._folder / path.relative_to(self._kept)
                    for step in (*self._way_to(back), back):
                        if step.is_symlink():  # a link made since the save: the copy would overwrite its target
                            step.unlink()
                    back.parent.mkdir(parents=True, exist_ok=True)
                    _copy(path, back)
        self.release()
        return True

    def release(self) -> None:
        """Delete the saved copy."""
        if self._kept.exists():
            shutil.rmtree(self._making, ignore_errors=True)
            with _converted("released"):
                self._kept.rename(self._making)  # renamed first: half a deleted copy must not be restored
            shutil.rmtree(self._making, ignore_errors=True)

    def move_away(self) -> Path:
        """Move the files to a new folder beside the plan, delete the saved copy, and return the new folder."""
        number = 1
        while (into := self._moved.with_name(f"{self._moved.name}-{number}")).exists():
            number += 1
        with _converted("moved away"):
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
        found = {path for pattern in self._patterns for path in self._folder.glob(pattern) if _is_file(path)}
        return sorted(path for path in found if self._is_the_servers(path))

    def _is_the_servers(self, path: Path) -> bool:
        parts = path.relative_to(self._folder).parts
        return not (
            any(_KEPT in part or _MOVED in part for part in parts)
            or any(step.is_symlink() for step in self._way_to(path))
            or realpath(path) in self._without
        )

    def _way_to(self, path: Path) -> list[Path]:
        """Return the folders between this one and a file in it, from the top."""
        return [self._folder / between for between in reversed(path.relative_to(self._folder).parents[:-1])]


@contextmanager
def _converted(done: str) -> Iterator[None]:
    """Convert an OSError in the block to CannotCarry."""
    try:
        yield
    except OSError as problem:
        why = problem.strerror or str(problem)
        where = "" if problem.filename is None else f"{problem.filename}: "
        raise CannotCarry(f"the server's memory cannot be {done}: {where}{why}") from problem


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _copy(path: Path, there: Path) -> None:
    shutil.copy2(path, there, follow_symlinks=False)
