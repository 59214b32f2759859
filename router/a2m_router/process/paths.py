"""Paths as people write them: a leading `~` is a home directory, also if no shell has expanded it."""

from pathlib import Path


def expanded(text: str) -> Path:
    """Return the path with a leading `~` or `~user` expanded; raise ValueError, with a sentence, if there is no such
    home directory."""
    try:
        # test the text, since Path("./~") is Path("~"), and `./~` names an ordinary file
        return Path(text).expanduser() if text.startswith("~") else Path(text)
    except RuntimeError:
        head = text.partition("/")[0]
        raise ValueError(
            f"{text!r}: there is no home directory {head}; write ./{head} for a file of that name"
        ) from None


def path_argument(text: str) -> Path:
    """Return the expanded path; raise argparse's error instead of ValueError."""
    # imported here, since programs without a command line do not need it
    from argparse import ArgumentTypeError

    try:
        return expanded(text)
    except ValueError as problem:
        raise ArgumentTypeError(str(problem)) from None
