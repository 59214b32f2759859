"""Reads the conversations that a benchmark gets on its command line."""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")


def given(arguments: Sequence[str] | None, kind: type[T], prog: str, description: str) -> list[T]:
    """Return the files in `arguments` (by default those of the command line), each read as `kind`.

    If a file cannot be read, the program ends with a sentence."""
    parser = argparse.ArgumentParser(prog=prog, description=description)
    parser.add_argument(
        "conversations",
        nargs="+",
        type=_read_as(kind),
        metavar="FILE",
        help='a JSON object with "turns" and "questions", such as scripts/demo-conversation.json',
    )
    conversations: list[T] = parser.parse_args(arguments).conversations
    return conversations


def _read_as(kind: type[T]) -> Callable[[str], T]:
    def read(name: str) -> T:
        try:
            return msgspec.json.decode(Path(name).read_bytes(), type=kind)
        except OSError as problem:
            raise argparse.ArgumentTypeError(f"{name} cannot be read: {problem.strerror}") from None
        except msgspec.DecodeError as problem:
            raise argparse.ArgumentTypeError(f"{name} is not a conversation: {problem}") from None

    return read
