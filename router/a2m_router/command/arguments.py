"""What `a2m` can be told on its command line. Mistakes end the program with exit code 2 and a sentence."""

import argparse
import json
from collections.abc import Callable
from math import isfinite
from typing import Any, Final

from msgspec import UNSET

from a2m_router import __version__
from a2m_router.process.paths import path_argument
from a2m_router.protocol.client.memory import INTERVAL, TIMEOUT

_DESCRIPTION: Final = "Talks to any A2M 0.1 memory: a federation, a single store, or somebody else's."
_EPILOG: Final = """\
Which memory: --http, --stdio or --config, before or after the command; else the address in A2M_URL, else
federation.toml in this folder. A token for HTTP is taken from the environment only, since all who are on this machine
can read a command line.

On a terminal, results are tables. With --json, or where stdout is no terminal, each is one line: the server's result as
it came, a JSON object (A2M 0.1, section 4). Only watch and export write a line for each event and each record.

exit codes:
  0    done, or nobody reads what is written any more (watch: or it was told to stop)
  1    the server answered an error or could not be reached, or not all of an export or import was done; stderr says why
  2    the arguments make no sense
  3    nothing was found (recall, timeline, fetch)
  130  interrupted
"""

# fields that `import` can leave out where a server does not declare them
DROPPABLE: Final = ("tier", "salience", "owner", "session", "key", "embedding", "uri", "media_type", "group")


def parser() -> argparse.ArgumentParser:
    """The parser. What was not given of the options that every command has is not in the namespace at all."""
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

    command("describe", "what the server says of itself")
    _remember(command("remember", "write a record"))
    _recall(command("recall", "find what is worth knowing for a query"))
    _timeline(command("timeline", "read records in the order in which they were written"))
    command("fetch", "read the record at a key").add_argument("key", metavar="KEY")
    _forget(command("forget", "delete records"))
    _promote(command("promote", "move records to another tier, each with its whole group"))
    _reinforce(command("reinforce", "raise the salience of records that proved useful"))
    command("sessions", "list the conversations")
    command("close", "end a conversation; nothing is deleted for that").add_argument("session", metavar="SESSION")
    command("consolidate", "have the server reorganise itself now")
    _summarize(command("summarize", "rewrite records as durable statements, and store those"))
    _watch(command("watch", "show what changes, as it changes"))
    _export(command("export", "write every record as a line of JSON, after a line that says what it is"))
    _import(command("import", "write the records of an export; what is there already is left alone"))
    _backup(command("backup", "copy a federation's files, as they are at one moment, while it goes on serving"))
    return whole


def _common() -> argparse.ArgumentParser:
    """Options that stand before or after the command: absent where they were not given, so that neither place hides
    what was said in the other."""
    every = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS, allow_abbrev=False)
    which = every.add_argument_group("which memory")
    which.add_argument("--http", metavar="URL", help="the server at this address")
    which.add_argument("--stdio", metavar="COMMAND", help="the server that this command line starts, quoted as one")
    which.add_argument(
        "--config",
        type=path_argument,
        metavar="FILE",
        help="the federation of this file: the router that has it, if that serves HTTP, else run it here meanwhile",
    )
    which.add_argument("--token-env", metavar="NAME", help="the variable that holds the token (default: A2M_TOKEN)")
    which.add_argument(
        "--ca-file",
        type=path_argument,
        metavar="PEM",
        help="whose certificates to trust (default: A2M_CA_FILE, else the usual)",
    )
    which.add_argument("--owner", metavar="O", help="whose memory; over HTTP the token says it")
    how = every.add_argument_group("how")
    how.add_argument("--json", action="store_true", help="the result as one line of JSON, on a terminal too")
    how.add_argument(
        "--timeout", type=_seconds, metavar="S", help=f"seconds that a call may take (default: {TIMEOUT:g})"
    )
    how.add_argument("--verbose", action="store_true", help="say on stderr what goes on, with the server's own stderr")
    return every


def _remember(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", metavar="TEXT", help="what to remember; - reads it from stdin")
    for name, letter, help in (
        ("session", "S", "the conversation it belongs to"),
        ("tier", "T", "where it is to live"),
        ("key", "K", "its address; what is there is replaced"),
        ("role", "R", "user, assistant, tool, system, memory, or another"),
        ("group", "G", "what it is kept or discarded with"),
        ("id", "I", "its id; written twice, it is there once"),
        ("uri", "U", "what it points at"),
        ("media-type", "M", "what is there"),
    ):
        parser.add_argument(f"--{name}", metavar=letter, help=help)
    parser.add_argument("--metadata", type=_object, metavar="JSON", help="an object")
    parser.add_argument(
        "--if-revision",
        type=_revision,
        default=UNSET,
        metavar="N",
        help="write only if what is at the key is at revision N, as fetch shows it; or new: if there is nothing",
    )


def _recall(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("query", metavar="QUERY", nargs="?", help="by recency without one")
    _limit(parser)
    _selectors(parser, query=False)
    parser.add_argument(
        "--prompt", action="store_true", help="as text for a model's prompt, where the server offers it"
    )


def _timeline(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--session", metavar="S", help="only this conversation")
    _limit(parser)
    _selectors(parser, query=False)


def _forget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*")
    _selectors(parser, query=True)
    parser.add_argument(
        "--yes", action="store_true", help="do not ask; needed without a terminal, unless only ids are given"
    )


def _promote(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+")
    parser.add_argument("--tier", metavar="T", required=True, help="where they go")
    parser.add_argument("--salience", type=_finite, metavar="N", help="what is added to theirs on arrival")


def _reinforce(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="+")
    parser.add_argument("--amount", type=_finite, metavar="N", help="by how much; 1 without")


def _summarize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*")
    _selectors(parser, query=True)
    _limit(parser)
    parser.add_argument("--into", metavar="T", help="the tier that the summary is written to")
    parser.add_argument("--key", metavar="K", help="where the summary is kept; what is there is replaced")


def _watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kinds", nargs="+", metavar="KIND", help="written, forgotten, promoted, consolidated, session_closed"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=INTERVAL,
        metavar="S",
        help="seconds between two questions, where events do not come by themselves (default: %(default)g)",
    )


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", type=path_argument, metavar="FILE", nargs="?", help="replaced once all is written; stdout without"
    )


def _import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=path_argument, metavar="FILE", nargs="?", help="stdin without")
    parser.add_argument(
        "--drop",
        action="append",
        choices=DROPPABLE,
        default=[],
        metavar="FIELD",
        help="leave this field out; for a server that does not declare it, which otherwise does not get the record. "
        "One of %(choices)s; may be given again",
    )


def _backup(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=path_argument, metavar="FOLDER", help="where the router runs; it must be empty, or not be there"
    )


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--limit", type=_count, metavar="N", help="at most so many records")


def _selectors(parser: argparse.ArgumentParser, *, query: bool) -> None:
    if query:
        parser.add_argument("--query", metavar="Q", help="what these words find")
    parser.add_argument("--tier", metavar="T", help="only what lives there")
    parser.add_argument("--where", type=_object, metavar="JSON", help='e.g. {"role": "user", "tier": ["a", "b"]}')
    parser.add_argument("--key-prefix", metavar="P", help="only keys at and beneath this one")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f"expected a JSON object, and this is no JSON: {problem}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'expected a JSON object such as {{"role": "user"}}, got {text!r}')
    return value


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no number")


def _number(kind: Callable[[str], float], text: str) -> float | None:
    try:
        return kind(text)
    except ValueError:
        return None


def _count(text: str) -> int:
    number = _number(int, text)
    if number is None or number < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, got {text!r}")
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
        raise argparse.ArgumentTypeError(f"expected a whole number from 0, or new, got {text!r}")
    return int(number)


def _seconds(text: str) -> float:
    number = _number(float, text)
    if number is None or not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text!r}")
    return number
