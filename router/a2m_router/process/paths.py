"""Paths as people write them: `~` at the head of one is a home directory, also where no shell has had a look at it."""

from pathlib import Path


def expanded(text: str) -> Path:
    """The path, with `~` and `~user` at its head filled in. Raises ValueError, in a sentence, where there is none."""
    try:
        # `./~` is a name like any other, and a Path does not tell it apart
        return Path(text).expanduser() if text.startswith("~") else Path(text)
    except RuntimeError:
        head = text.partition("/")[0]
        raise ValueError(f"{text!r}: there is no home directory {head}; write ./{head} for a name like that") from None


def path_argument(text: str) -> Path:
    """`expanded`, for argparse."""
    # those who read no command line need not load it
    from argparse import ArgumentTypeError

    try:
        return expanded(text)
    except ValueError as problem:
        raise ArgumentTypeError(str(problem)) from None
