"""The arguments of `a2m`. A mistake ends the program with a sentence and exit code 2."""

import argparse
import json
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from msgspec import UNSET

from a2m_router import __version__
from a2m_router.process.paths import path_argument
from a2m_router.protocol.client.memory import INTERVAL, TIMEOUT

_DESCRIPTION: Final = "Calls any A2M 0.1 memory server: a federation, a single store, or a server of another project."
_EPILOG: Final = """\
Which memory: --http, --stdio or --config, before or after the command; without them the address in A2M_URL; without
that federation.toml in this folder. A token for HTTP is read from the environment only, because every user of this
machine can read a command line.

On a terminal, results are tables. With --json, or if stdout is not a terminal, each result is one line: the server's
result unchanged, a JSON object (A2M 0.1, section 4). watch and export write one line for each event or record.

exit codes:
  0    done, or the reader of stdout has closed it (watch: or it was stopped by a signal)
  1    the server returned an error or could not be reached, or an export or import is incomplete; stderr has the reason
  2    the arguments are not valid
  3    no record was found (recall, timeline, fetch)
  130  interrupted
"""

# the fields that `import --drop` can leave out, for a server that does not declare them
DROPPABLE: Final = ("tier", "salience", "owner", "session", "key", "embedding", "uri", "media_type", "group")


def parser() -> argparse.ArgumentParser:
    """Return the parser. An option of all commands that was not given is absent from the namespace."""
    every = _common()
    whole = argparse.ArgumentParser(
        prog="a2m",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        parents=[every],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, parents=[every], allow_abbrev=False)

    command("describe", "show the server's capabilities, limits and tiers")
    _remember(command("remember", "write a record"))
    _recall(command("recall", "find the records that fit a query best"))
    _timeline(command("timeline", "read records in the order in which they were written"))
    command("fetch", "read the record at a key").add_argument("key", metavar="KEY")
    _forget(command("forget", "delete records"))
    _promote(command("promote", "move records to another tier, each with its whole group"))
    _reinforce(command("reinforce", "raise the salience of records that proved useful"))
    command("sessions", "list the conversations")
    command("close", "end a conversation; its records are kept").add_argument("session", metavar="SESSION")
    command("consolidate", "make the server reorganise its records now")
    _summarize(command("summarize", "rewrite records as durable statements, and store those"))
    _watch(command("watch", "show changes as they happen"))
    _export(command("export", "write every record as a line of JSON, after a header line"))
    _import(command("import", "write the records of an export; records that exist already stay unchanged"))
    _backup(command("backup", "copy the files of a federation, all as of the same moment, while it serves"))
    return whole


def _common() -> argparse.ArgumentParser:
    """Return the parser of the options that may stand before or after the command.

    An option that was not given is absent, so that the default of one place does not override the value of the other.
    """
    every = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    which = every.add_argument_group("which memory")
    which.add_argument("--http", metavar="URL", help="the server at this address")
    which.add_argument(
        "--stdio", metavar="COMMAND", help="the server that this command line starts; quote it as a whole"
    )
    which.add_argument(
        "--config",
        type=path_argument,
        metavar="FILE",
        help="the federation of this file: through the router that serves it over HTTP; without one, it runs in this "
        "process until the command ends",
    )
    which.add_argument(
        "--token-env", metavar="NAME", help="the environment variable that holds the token (default: A2M_TOKEN)"
    )
    which.add_argument(
        "--ca-file",
        type=path_argument,
        metavar="PEM",
        help="the certificate authorities to trust (default: A2M_CA_FILE, else those of the system)",
    )
    which.add_argument("--owner", metavar="O", help="the owner of the memory; over HTTP the token determines it")
    how = every.add_argument_group("how")
    how.add_argument("--json", action="store_true", help="print the result as one line of JSON, also on a terminal")
    how.add_argument(
        "--timeout", type=_seconds, metavar="S", help=f"seconds that a call may take (default: {TIMEOUT:g})"
    )
    how.add_argument("--verbose", action="store_true", help="log to stderr, with the server's own stderr")
    return every


def _remember(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="the content of the record; - reads it from stdin")
    for name, letter, help in (
        ("session", "S", "the conversation it belongs to"),
        ("tier", "T", "the tier to write it to"),
        ("key", "K", "its key; a record that has this key is replaced"),
        ("role", "R", "user, assistant, tool, system, memory, or another"),
        ("group", "G", "its group; the records of a group are kept or deleted together"),
        ("id", "I", "its id; a second write with the same id changes nothing"),
        ("uri", "U", "the address of external content"),
        ("media-type", "M", "the media type of the external content"),
    ):
        parser.add_argument(f"--{name}", metavar=letter, help=help)
    parser.add_argument("--metadata", type=_object, metavar="JSON", help="an object")
    parser.add_argument(
        "--if-revision",
        type=_revision,
        default=UNSET,
        metavar="N",
        help="write only if the record at the key has this revision, as shown by fetch; new: only if the key is free",
    )


def _recall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "query", metavar="QUERY", nargs="?", help="words to search for; without a query, the newest records"
    )
    _limit(parser)
    _selectors(parser, query=False)
    parser.add_argument(
        "--prompt", action="store_true", help="print text for a model's prompt, if the server supports that"
    )


def _timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", metavar="S", help="only this conversation")
    _limit(parser)
    _selectors(parser, query=False)


def _forget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*")
    _selectors(parser, query=True)
    parser.add_argument(
        "--yes", action="store_true", help="do not ask; required without a terminal, unless only ids are given"
    )


def _promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+")
    parser.add_argument("--tier", metavar="T", required=True, help="the tier to move them to")
    parser.add_argument("--salience", type=_finite, metavar="N", help="add N to the salience of each moved record")


def _reinforce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+")
    parser.add_argument("--amount", type=_finite, metavar="N", help="how much to add (default: 1)")


def _summarize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*")
    _selectors(parser, query=True)
    _limit(parser)
    parser.add_argument("--into", metavar="T", help="the tier to write the summary to")
    parser.add_argument("--key", metavar="K", help="the key of the summary; a record that has this key is replaced")


def _watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="written, forgotten, promoted, consolidated, session_closed"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=INTERVAL,
        metavar="S",
        help="seconds between two polls, if the server does not push events (default: %(default)g)",
    )


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        type=path_argument,
        metavar="FILE",
        nargs="?",
        help="the file to write, replaced when the export is complete (default: stdout)",
    )


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path_argument, metavar="FILE", nargs="?", help="the file to read (default: stdin)")
    parser.add_argument(
        "--drop",
        action="append",
        choices=DROPPABLE,
        default=[],
        metavar="FIELD",
        help="leave this field out. Otherwise, a record with a field that the server does not declare is skipped. One "
        "of %(choices)s; may be repeated",
    )


def _backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        type=path_argument,
        metavar="FOLDER",
        help="a folder on the router's machine; it must be empty or not exist yet",
    )


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=_count, metavar="N", help="return at most N records")


def _selectors(parser: argparse.ArgumentParser, *, query: bool) -> None:
    if query:
        parser.add_argument("--query", metavar="Q", help="only records that these words find")
    parser.add_argument("--tier", metavar="T", help="only records of this tier")
    parser.add_argument("--where", type=_object, metavar="JSON", help='e.g. {"role": "user", "tier": ["a", "b"]}')
    parser.add_argument("--key-prefix", metavar="P", help="only records at this key and below it")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got invalid JSON: {problem}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"role": "user"}}, got {text!r}')
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _number(kind: Callable[[str], float], text: str) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _count(text: str) -> int:
    number = _number(int, text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, got {text!r}")
    return int(number)


def _finite(text: str) -> float:
    number = _number(float, text)
    if number is None or not isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return number


def _revision(text: str) -> int | None:
    number = _number(int, text)
    if text == "new":
        return None
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number, 0 or more, or new, got {text!r}")
    return int(number)


def _seconds(text: str) -> float:
    number = _number(float, text)
    if number is None or not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, got {text!r}")
    return number
