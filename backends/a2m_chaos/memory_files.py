"""The files that are a server's memory: kept aside, put back, moved away.

- What is kept aside survives this process: whoever finds it at a start knows that the last one had no orderly end, and
  puts it back. It is kept once; what comes later is lost with the rest.
- Nothing is deleted but copies made here, and what a copy replaces.
- What cannot be carried ends the run, in a sentence: a server whose memory is half of another must not go on, and a
  fault that is not done must not look as if it were. What is kept aside stays then, for the next start.
- Nothing outside the folder is touched. A link is a file itself, carried as a link; what is behind a link to a folder
  is left, and nothing is written through a link.
"""

import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from os.path import realpath
from pathlib import Path

# beside the plan, so that patterns for the server's files hardly ever meet it
_KEPT = "chaos-kept"
_MOVED = "chaos-moved"


class CannotCarry(Exception):
    """The server's files cannot be copied or moved; says which, and why."""


class MemoryFiles:
    """The files that match any of `patterns` below `folder`.

    The server must not be at work, or at least not be writing, meanwhile.

    Args:
        name: tells what is made here from what is made of other plans in this folder.
        without: files that are not the server's, whatever the patterns match.

    All that it does raises CannotCarry.
    """

    def __init__(self, folder: Path, patterns: Sequence[str], name: str, *, without: Iterable[Path] = ()) -> None:
        self._folder = folder
        self._patterns = patterns
        self._without = frozenset(map(realpath, without))
        self._kept = folder / f"{name}.{_KEPT}"
        self._making = folder / f"{name}.{_KEPT}-making"  # half a copy is never taken for one
        self._moved = folder / f"{name}.{_MOVED}"

    def keep(self) -> None:
        """Copy them aside, unless there is a copy already."""
        if self._kept.exists():
            return
        shutil.rmtree(self._making, ignore_errors=True)
        with _or_told("kept aside"):
            self._making.mkdir()
            self._each_into(self._making, _copy)
            self._making.rename(self._kept)

    def put_back(self) -> bool:
        """Makes them what was kept aside, if anything was; whether it was."""
        if not self._kept.exists():
            return False
        with _or_told("put back"):
            for path in self._files():
                path.unlink()
            for path in sorted(self._kept.rglob("*")):
                if _is_file(path):
                    back = self._folder / path.relative_to(self._kept)
                    for step in (*self._way_to(back), back):
                        if step.is_symlink():  # made since, and what it leads to would be written over
                            step.unlink()
                    back.parent.mkdir(parents=True, exist_ok=True)
                    _copy(path, back)
        self.release()
        return True

    def release(self) -> None:
        """Lets go of what was kept aside."""
        if self._kept.exists():
            shutil.rmtree(self._making, ignore_errors=True)
            with _or_told("let go of"):
                self._kept.rename(self._making)  # of what is half removed half would be put back
            shutil.rmtree(self._making, ignore_errors=True)

    def move_away(self) -> Path:
        """Moves them, and what was kept aside, out of the server's sight; returns the folder they are in now."""
        number = 1
        while (into := self._moved.with_name(f"{self._moved.name}-{number}")).exists():
            number += 1
        with _or_told("moved away"):
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
        """The folders between this one and a file in it, from the top."""
        return [self._folder / between for between in reversed(path.relative_to(self._folder).parents[:-1])]


@contextmanager
def _or_told(done: str) -> Iterator[None]:
    """Raises CannotCarry for what the system does not do."""
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
