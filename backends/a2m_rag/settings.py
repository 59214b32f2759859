"""Reads a TOML file of options as command-line arguments.

Each key is the name of an option without its dashes, `max_limit` or `max-limit`. `headers` is a table of headers.
`request` may be a table, too.
"""

import json
import tomllib
from collections.abc import Collection, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class BadFile(Exception):
    """The file cannot be used; the message is one sentence with its name and the reason."""


def arguments_in(path: Path, known: Collection[str]) -> list[str]:
    """Return the arguments in a file.

    Args:
        path: the file.
        known: the options that the file may contain, with their dashes.

    Raises BadFile.
    """
    try:
        content = tomllib.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as problem:
        raise BadFile(f"{path}: cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise BadFile(f"{path}: is not valid UTF-8") from None
    except (ValueError, RecursionError) as problem:  # TOMLDecodeError is a ValueError
        raise BadFile(f"{path}: is not valid TOML: {problem}") from None
    arguments: list[str] = []
    for key, value in content.items():
        option = "--" + key.replace("_", "-")
        if key == "headers":
            arguments += _headers(path, value)
        elif option not in known:
            near = get_close_matches(option, known, n=1)
            hint = f"; did you mean {near[0].removeprefix('--').replace('-', '_')}?" if near else ""
            raise BadFile(f"{path}: {key}: unknown key{hint}")
        else:
            arguments.append(f"{option}={_argument(path, key, value)}")
    return arguments


def _headers(path: Path, value: Any) -> Iterator[str]:
    if not isinstance(value, dict) or not all(isinstance(each, str) for each in value.values()):
        raise BadFile(f"{path}: headers: expected a table of strings")
    for name, each in value.items():
        yield f"--header={name}: {each}"


def _argument(path: Path, key: str, value: Any) -> str:
    match value:
        case bool():
            pass
        case str():
            return value
        case int() | float():
            return str(value)
        case dict() | list() if key in ("request", "list_request", "list-request"):
            try:
                return json.dumps(value)
            except (TypeError, ValueError):
                raise BadFile(
                    f"{path}: {key}: expected only values that JSON has, got a date or another TOML type"
                ) from None
    raise BadFile(f"{path}: {key}: expected a string or a number")
