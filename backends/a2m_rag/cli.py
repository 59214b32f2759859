"""The command line of a2m-rag: serves an existing retrieval service as a read-only A2M server, over stdio or HTTP."""

import argparse
import json
import logging
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn
from urllib.parse import urlsplit

from a2m_rag import mapping
from a2m_rag.chroma import chroma_service
from a2m_rag.headers import headers_from
from a2m_rag.langchain import langchain_service
from a2m_rag.llamaindex import llamaindex_service
from a2m_rag.mcp_tools import Call, arguments_from
from a2m_rag.over_http import MAX_ANSWER, Endpoint, connect_http
from a2m_rag.over_mcp import connect_mcp
from a2m_rag.over_python import python_service
from a2m_rag.qdrant import API_KEY, qdrant_service
from a2m_rag.server import SearchLimits, Server
from a2m_rag.service import CannotStart, Service
from a2m_rag.settings import BadFile, arguments_in
from a2m_rag.thresholds import DISTANCE, SIMILARITY, NearService, Threshold
from a2m_router import __version__
from a2m_router.process.descriptors import open_missing_streams
from a2m_router.process.paths import path_argument
from a2m_router.protocol.server.serving import add_log_level, loopback, positive, run, serve

log = logging.getLogger(__name__)

# the highest timeout, in seconds
_LONGEST: Final = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    open_missing_streams()
    options = _options(sys.argv[1:] if arguments is None else list(arguments))
    # their lines repeat ours, and show addresses that contain queries
    for library, level in (
        *(("httpx", logging.WARNING), ("httpcore", logging.WARNING)),
        *(("httpx2", logging.WARNING), ("httpcore2", logging.WARNING)),
        # these log a traceback for each line of a server that is not a message
        *(("mcp", logging.CRITICAL), ("client", logging.CRITICAL)),
    ):
        logging.getLogger(library).setLevel(level)
    serving = partial(serve, "a2m-rag", _opened(options), options.serve)
    return run("a2m-rag", serving, (CannotStart,), log_level=options.log_level)


@asynccontextmanager
async def _opened(options: argparse.Namespace) -> AsyncIterator[Server]:
    limits = SearchLimits(
        recall=min(options.max_limit, options.max_asked),
        asked=options.max_asked,
        listed=options.max_listed,
        timeout=options.timeout,
    )
    paths = mapping.Paths(
        content=options.content,
        id=options.id,
        created_at=options.created_at,
        metadata=options.metadata,
        uri=options.uri,
        role=options.role,
        group=options.group,
        score=options.score,
    )
    async with options.opened(options) as found:
        threshold = _threshold(options)
        near = None if threshold is None or options.score is None else NearService(found, options.score, threshold)
        service: Service = near or found
        yield Server(service, paths, name=options.name or options.named(options), limits=limits)


# --- the services


@asynccontextmanager
async def _http(options: argparse.Namespace) -> AsyncIterator[Service]:
    method: Literal["GET", "POST"] = options.method or ("GET" if options.request is None else "POST")
    search = Endpoint(url=options.url, method=method, request=options.request, results=options.results)
    listing = None
    if options.list is not None:
        listing = Endpoint(url=options.list, method="GET", results=options.list_results or options.results)
    headers = headers_from(options.header, os.environ)
    async with connect_http(search, listing, headers=headers, max_answer=options.max_answer) as service:
        yield service


@asynccontextmanager
async def _mcp(options: argparse.Namespace) -> AsyncIterator[Service]:
    call = Call(
        tool=options.tool,
        query=options.query_argument,
        limit=options.limit_argument,
        arguments=options.arguments,
        results=options.results,
        content=options.content,
    )
    headers = headers_from(options.header, os.environ)
    connecting = connect_mcp(options.command, options.url, call, headers=headers, timeout=options.timeout)
    async with connecting as service:
        yield service


def _ready(
    made: Callable[[argparse.Namespace], Service],
) -> Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]]:
    """Return a context manager for a service that needs no start and no end."""

    @asynccontextmanager
    async def opened(options: argparse.Namespace) -> AsyncIterator[Service]:
        yield made(options)

    return opened


@asynccontextmanager
async def _qdrant(options: argparse.Namespace) -> AsyncIterator[Service]:
    if options.embed is None:
        log.warning("no --embed: queries in words are rejected, only calls with a vector can be answered")
    service = qdrant_service(
        options.place,
        options.collection,
        options.embed,
        vector=options.vector,
        timeout=options.timeout,
        threshold=_threshold(options),
    )
    try:
        yield service
    finally:
        service.close()


# --- the command line


class _Parser(argparse.ArgumentParser):
    """A parser whose errors name the file that an argument came from, if it came from one."""

    file: Path | None = None

    def error(self, message: str) -> NoReturn:
        super().error(message if self.file is None else f"{self.file}: {message}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser, http = _parsers()
    command: list[str] = []
    if arguments[:1] == ["mcp"] and "--" in arguments:
        # everything after the first -- belongs to the command, including a further --
        after = arguments.index("--")
        arguments, command = arguments[:after], arguments[after + 1 :]
    if arguments[:1] == ["http"]:
        arguments = ["http", *_from_file(arguments, http), *arguments[1:]]
    options = parser.parse_args(arguments)
    _check_threshold(options)
    if arguments[:1] == ["mcp"]:
        _check_mcp(options, command)
    if arguments[:1] == ["http"] and options.url is None:
        http.error("the following arguments are required: --url (here or in --config FILE)")
    return options


def _check_mcp(options: argparse.Namespace, command: list[str]) -> None:
    options.command = command
    if options.url is None and not command:
        options.parser.error("expected the MCP server: its command at the end, after --, or its address with --url")
    if options.url is not None and command:
        options.parser.error("argument --url: not allowed with a command after --; give only one of them")
    if options.header and command:
        options.parser.error("argument --header: only with --url; a command gets its tokens from the environment")


def _check_threshold(options: argparse.Namespace) -> None:
    wanted = _threshold(options)
    if not options.scored or (options.score is None) == (wanted is None):
        return
    if wanted is not None:
        options.parser.error(f"argument {wanted.option}: add the path of the score in a result: --score PATH")
    if options.score is not options.parser.get_default("score"):
        options.parser.error(f"argument --score: add the threshold: {SIMILARITY} X, or {DISTANCE} X")


def _threshold(options: argparse.Namespace) -> Threshold | None:
    if options.min_score is not None:
        return Threshold(SIMILARITY, options.min_score)
    return None if options.max_distance is None else Threshold(DISTANCE, options.max_distance)


def _from_file(arguments: list[str], http: _Parser) -> list[str]:
    """Return the arguments in the file of --config. They are parsed first, so the command line overrides them."""
    looking = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    looking.add_argument("--config", type=path_argument)
    try:
        path = looking.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:
        return []  # the main parser reports the mistake
    if path is None:
        return []
    known = [option for action in http._actions for option in action.option_strings if option.startswith("--")]
    try:
        found = arguments_in(path, [each for each in known if each not in ("--config", "--header", "--help")])
    except BadFile as problem:
        http.error(str(problem))
    http.file = path
    http.parse_args(found)
    http.file = None
    return found


def _parsers() -> tuple[_Parser, _Parser]:
    parser = _Parser(
        prog="a2m-rag",
        description="Serves an existing retrieval service as a read-only A2M 0.1 memory server, on stdin and stdout "
        "unless --serve is given.",
        epilog="a2m-rag KIND --help shows the options of a kind.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    http = _http_parser(kinds)
    _python_parser(kinds)
    _mcp_parser(kinds)
    _langchain_parser(kinds)
    _llamaindex_parser(kinds)
    _chroma_parser(kinds)
    _qdrant_parser(kinds)
    return parser, http


def _http_parser(kinds: Any) -> _Parser:
    parser: _Parser = kinds.add_parser("http", help="any JSON search endpoint", allow_abbrev=False)
    parser.add_argument(
        "--config", type=path_argument, metavar="FILE", help='a TOML file with these options, as url = "…"'
    )
    parser.add_argument("--url", help="the endpoint; it may contain {query} and {limit} after its ?")
    parser.add_argument("--method", choices=("GET", "POST"), help="(default: POST with a --request, else GET)")
    parser.add_argument(
        "--request",
        type=_json,
        metavar="JSON",
        help="the body to post, or for GET the parameters of the address; {query} and {limit} are filled in",
    )
    parser.add_argument(
        "--results", type=_path, default="@", metavar="PATH", help="the list of results (default: the whole answer)"
    )
    _add_headers(parser)
    parser.add_argument("--list", metavar="URL", help="an endpoint that returns all results in answer to GET")
    parser.add_argument(
        "--list-results", type=_path, metavar="PATH", help="the list of results in its answer (default: --results)"
    )
    parser.add_argument(
        "--max-answer",
        type=positive,
        default=MAX_ANSWER,
        metavar="N",
        help="the most bytes in an answer (default: %(default)s)",
    )
    _add_paths(parser, id="id", created_at="created_at", metadata="metadata")
    _add_threshold(parser)
    _add_common(parser, _http, lambda options: _place_of(options.url))
    return parser


def _python_parser(kinds: Any) -> None:
    parser = kinds.add_parser("python", help="a Python function", allow_abbrev=False)
    parser.add_argument("search", metavar="MODULE:FUNCTION", help="(query, limit) -> dicts or strings; sync or async")
    parser.add_argument(
        "--list", metavar="MODULE:FUNCTION", help="a function without arguments that returns all results"
    )
    _add_paths(parser, id="id", created_at="created_at", metadata="metadata", uri="uri", role="role", group="group")
    _add_threshold(parser)
    _add_common(
        parser, _ready(lambda options: python_service(options.search, options.list)), lambda options: options.search
    )


def _mcp_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "mcp",
        help="a search tool of an MCP server",
        usage="%(prog)s --tool NAME [options] (--url URL | -- COMMAND ...)",
        epilog="After -- comes the command that starts the MCP server. It inherits this environment and stderr.",
        allow_abbrev=False,
    )
    parser.add_argument("--tool", required=True, metavar="NAME", help="the tool to call for each search")
    parser.add_argument("--url", help="the address of the MCP server (streamable HTTP), instead of a command")
    _add_headers(parser)
    parser.add_argument(
        "--query-argument",
        metavar="NAME",
        help="the tool's argument for the query (default: query, q, or a similar name)",
    )
    parser.add_argument(
        "--limit-argument",
        metavar="NAME",
        help="the tool's argument for the number of results (default: limit, k, top_k, or a similar name, if there is "
        "one)",
    )
    parser.add_argument(
        "--arguments",
        type=_arguments,
        default={},
        metavar="JSON",
        help="the other arguments of the tool, an object; {query} and {limit} are filled in",
    )
    parser.add_argument(
        "--results",
        type=_path,
        metavar="PATH",
        help="the list of results in the structured content, or in text that is JSON (default: all of it; if there is "
        "neither, each text is a result)",
    )
    _add_paths(
        parser,
        content="content || text || page_content || document",
        id="id",
        created_at="created_at",
        metadata="metadata",
        uri="uri",
    )
    _add_threshold(parser)
    _add_common(parser, _mcp, lambda options: options.tool)


def _add_headers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="a header of every request; ${VARIABLE} is filled in from the environment; may be repeated",
    )


def _langchain_parser(kinds: Any) -> None:
    parser = kinds.add_parser("langchain", help="a LangChain retriever", allow_abbrev=False)
    parser.add_argument(
        "retriever", metavar="MODULE:RETRIEVER", help="a retriever or vector store, or a function that returns one"
    )
    _add_paths(parser, created_at="metadata.created_at", metadata="metadata")
    _add_threshold(parser)
    _add_common(parser, _ready(lambda options: langchain_service(options.retriever)), lambda options: options.retriever)


def _llamaindex_parser(kinds: Any) -> None:
    parser = kinds.add_parser("llamaindex", help="a LlamaIndex retriever", allow_abbrev=False)
    parser.add_argument(
        "retriever", metavar="MODULE:RETRIEVER", help="a retriever or index, or a function that returns one"
    )
    _add_paths(parser, created_at="metadata.created_at", metadata="metadata", group="document")
    _add_threshold(parser, score="score")
    _add_common(
        parser, _ready(lambda options: llamaindex_service(options.retriever)), lambda options: options.retriever
    )


def _chroma_parser(kinds: Any) -> None:
    parser = kinds.add_parser("chroma", help="a collection of a Chroma database", allow_abbrev=False)
    parser.add_argument("path", type=path_argument, metavar="PATH", help="the folder that holds chroma.sqlite3")
    parser.add_argument("--collection", required=True, metavar="C")
    parser.add_argument(
        "--embed", metavar="MODULE:FUNCTION", help="texts -> vectors (default: the collection's own function)"
    )
    _add_paths(parser, created_at="metadata.created_at", metadata="metadata")
    _add_threshold(parser, scored=False)
    _add_common(
        parser,
        _ready(lambda options: chroma_service(options.path, options.collection, options.embed, _threshold(options))),
        lambda options: options.collection,
    )


def _qdrant_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "qdrant",
        help="a collection of a Qdrant server",
        epilog=f"The key of a server is read from the environment variable {API_KEY}.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "place", type=_place, metavar="URL", help="the address of the server, or the folder of a local collection"
    )
    parser.add_argument("--collection", required=True, metavar="C")
    parser.add_argument("--embed", metavar="MODULE:FUNCTION", help="texts -> vectors")
    parser.add_argument("--vector", metavar="NAME", help="the vectors to search, if the points have several")
    _add_paths(
        parser,
        content="content || text || page_content || document",
        created_at="created_at",
        metadata=mapping.THE_REST,
    )
    _add_threshold(parser, scored=False)
    _add_common(parser, _qdrant, lambda options: options.collection)


def _add_paths(parser: argparse.ArgumentParser, *, content: str = "content", **defaults: str) -> None:
    """Add the options for the paths of a record's fields in a result."""
    group = parser.add_argument_group("paths of fields in a result (JMESPath)")
    group.add_argument("--content", type=_path, default=content, metavar="PATH", help="(default: %(default)s)")
    for field, what in (
        ("id", "without it, the service's own id, or one computed from the content"),
        ("created_at", "a date, or a number of seconds or milliseconds since 1970"),
        ("metadata", "an object; * takes all members that no other path takes"),
        ("uri", "the address of the document; it is not fetched"),
        ("role", "such as user or assistant"),
        ("group", "such as the id of the source document"),
    ):
        default = defaults.get(field)
        group.add_argument(
            "--" + field.replace("_", "-"),
            type=_metadata_path if field == "metadata" else _path,
            default=default,
            metavar="PATH",
            help=what if default is None else f"{what} (default: {default})",
        )


def _add_threshold(parser: argparse.ArgumentParser, *, score: str | None = None, scored: bool = True) -> None:
    """Add the options for the threshold of results.

    Args:
        score: the default path of the score.
        scored: results have a score at a path; else the service applies the threshold itself.
    """
    parser.set_defaults(scored=scored, score=None)
    group = parser.add_argument_group("threshold of results (default: none)")
    if scored:
        place = "the path of a result's similarity or distance, a number (JMESPath)"
        group.add_argument(
            "--score",
            type=_path,
            default=None if score is None else _path(score),
            metavar="PATH",
            help=place if score is None else f"{place} (default: {score})",
        )
    either = group.add_mutually_exclusive_group()
    either.add_argument(SIMILARITY, type=_number, metavar="X", help="keep results with a similarity of X or more")
    either.add_argument(DISTANCE, type=_number, metavar="X", help="keep results with a distance of X or less")


def _add_common(
    parser: argparse.ArgumentParser,
    opened: Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]],
    named: Callable[[argparse.Namespace], str],
) -> None:
    """Add the options that every kind has.

    Args:
        opened: returns the context manager of the service.
        named: returns the default for --name.
    """
    limits = SearchLimits()
    parser.set_defaults(opened=opened, named=named, parser=parser)
    parser.add_argument("--name", metavar="N", help="the name in the result of `describe`")
    parser.add_argument("--serve", type=loopback, metavar="HOST:PORT", help="serve HTTP at this address")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=limits.timeout,
        metavar="S",
        help="seconds for one call of a client (default: %(default)g)",
    )
    for option, default, what in (
        ("--max-limit", limits.recall, "the most records in a result"),
        ("--max-asked", limits.asked, "the most results of one search, if few of them meet a `where`"),
        ("--max-listed", limits.listed, "the most results in a listing"),
    ):
        parser.add_argument(option, type=positive, default=default, metavar="N", help=f"{what} (default: %(default)s)")
    add_log_level(parser)


def _place_of(url: str) -> str:
    """Return the host, port and path of an address: what tells two endpoints of one host apart."""
    parts = urlsplit(url)
    return (parts.netloc + parts.path).rstrip("/")


def _place(text: str) -> str:
    """Return the address of a server unchanged, or the path of a folder expanded."""
    return text if "://" in text else str(path_argument(text))


def _path(text: str) -> mapping.Path:
    try:
        return mapping.Path(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _metadata_path(text: str) -> mapping.Path | str:
    return text if text == mapping.THE_REST else _path(text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise argparse.ArgumentTypeError(f'expected JSON, like \'{{"q": "{{query}}"}}\': {problem}') from None


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        return arguments_from(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}")
    return number


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0, up to {_LONGEST:g}, got {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
