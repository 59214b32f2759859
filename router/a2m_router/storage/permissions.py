"""Explain why the operating system denies a process a path: which user runs, and whose file or folder it is."""

import errno
import os
import pwd
from contextlib import suppress
from pathlib import Path
from typing import Final

_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def explained(problem: OSError, path: Path) -> str:
    """Return why `path` cannot be used, with the users concerned if the reason is a permission.

    Args:
        problem: what the operating system reported. If it names a file, that one is explained instead of `path`.
        path: the file or folder that this process wants to read, write or create.
    """
    reason = problem.strerror or str(problem)
    if problem.errno not in _DENIED:
        return reason
    if isinstance(problem.filename, str):
        path = Path(problem.filename)
    existing, missing = _nearest(path)
    creates = "" if missing is None else f"{missing} cannot be created: "
    try:
        owner = _name(existing.stat().st_uid)
    except OSError:
        return f"{reason}; {creates}this process runs as the user {running_user()}"
    return f"{reason}; {creates}{existing} belongs to the user {owner}, and this process runs as {running_user()}"


def running_user() -> str:
    """Return the name of the user that this process runs as; the number if the user has no name."""
    return _name(os.geteuid())


def _nearest(path: Path) -> tuple[Path, Path | None]:
    """Return the last file or folder on a path that this process can see, and the one that is missing in it."""
    found = Path(path.anchor)
    for each in (*reversed(path.parents), path):
        try:
            os.lstat(each)
        except FileNotFoundError:
            return found, each
        except OSError:
            return found, None
        found = each
    return found, None


def _name(uid: int) -> str:
    with suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)
