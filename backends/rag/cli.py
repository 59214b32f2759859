"""a2m-rag: an existing retrieval service as a read-only A2M server, over stdio or HTTP."""

import argparse
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NoReturn
from urllib.parse import urlsplit

from backends.rag import mapping
from backends.rag.chroma import chroma_service
from backends.rag.headers import headers_from
from backends.rag.langchain import langchain_service
from backends.rag.llamaindex import llamaindex_service
from backends.rag.over_http import MAX_ANSWER, Endpoint, connect_http
from backends.rag.over_python import python_service
from backends.rag.qdrant import API_KEY, qdrant_service
from backends.rag.server import Limits, Server
from backends.rag.service import CannotStart, Service
from backends.rag.settings import BadFile, arguments_in
from backends.serving import add_log_level, loopback, positive, run, serve
from router import __version__
from router.a2m.descriptors import open_missing_streams
from router.a2m.paths import path_argument

log = logging.getLogger(__name__)

# longer than anybody waits
_LONGEST: Final = 3600.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    open_missing_streams()
    options = _options(sys.argv[1:] if arguments is None else list(arguments))
    # their own lines say nothing that ours do not, and show addresses with what is asked
    for library in ("httpx", "httpcore"):
        logging.getLogger(library).setLevel(logging.WARNING)
    serving = partial(serve, "a2m-rag", _opened(options), options.serve)
    return run("a2m-rag", serving, (CannotStart,), log_level=options.log_level)


@asynccontextmanager
async def _opened(options: argparse.Namespace) -> AsyncIterator[Server]:
    limits = Limits(
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
    )
    async with options.opened(options) as service:
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


def _ready(
    made: Callable[[argparse.Namespace], Service],
) -> Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]]:
    """A service that is there when it is made, and needs no end."""

    @asynccontextmanager
    async def opened(options: argparse.Namespace) -> AsyncIterator[Service]:
        yield made(options)

    return opened


@asynccontextmanager
async def _qdrant(options: argparse.Namespace) -> AsyncIterator[Service]:
    if options.embed is None:
        log.warning("without --embed, only callers that bring a vector are answered")
    service = qdrant_service(
        options.place, options.collection, options.embed, vector=options.vector, timeout=options.timeout
    )
    try:
        yield service
    finally:
        service.close()


# --- the command line


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say which file an argument came from, if it came from one."""

    file: Path | None = None

    def error(self, message: str) -> NoReturn:
        super().error(message if self.file is None else f"{self.file}: {message}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser, http = _parsers()
    if arguments[:1] == ["http"]:
        arguments = ["http", *_from_file(arguments, http), *arguments[1:]]
    options = parser.parse_args(arguments)
    if arguments[:1] == ["http"] and options.url is None:
        http.error("the following arguments are required: --url (here or in --config FILE)")
    return options


def _from_file(arguments: list[str], http: _Parser) -> list[str]:
    """The arguments in the file that --config names; they come first, so that the command line wins."""
    looking = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    looking.add_argument("--config", type=path_argument)
    try:
        path = looking.parse_known_args(arguments)[0].config
    except argparse.ArgumentError:
        return []  # the parser proper says what is wrong
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
        description="An existing retrieval service as a read-only A2M 0.1 memory server. It serves stdin and stdout "
        "unless --serve is given.",
        epilog="a2m-rag KIND --help says what each kind takes.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    kinds = parser.add_subparsers(metavar="KIND", required=True)
    http = _http_parser(kinds)
    _python_parser(kinds)
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
    parser.add_argument("--url", help="the endpoint; {query} and {limit} may stand after its ?")
    parser.add_argument("--method", choices=("GET", "POST"), help="(default: POST with a --request, else GET)")
    parser.add_argument(
        "--request",
        type=_json,
        metavar="JSON",
        help="what is posted, or for GET the query's parameters; {query} and {limit} are filled in",
    )
    parser.add_argument(
        "--results", type=_path, default="@", metavar="PATH", help="the list of results (default: the whole answer)"
    )
    parser.add_argument(
        "--header",
        action="append",
        default=[],
        metavar="'NAME: VALUE'",
        help="sent with every request; ${VARIABLE} is filled in from the environment",
    )
    parser.add_argument("--list", metavar="URL", help="an endpoint whose answer to GET is everything there is")
    parser.add_argument("--list-results", type=_path, metavar="PATH", help="its results (default: as --results)")
    parser.add_argument(
        "--max-answer", type=positive, default=MAX_ANSWER, metavar="N", help="bytes in an answer (default: %(default)s)"
    )
    _add_paths(parser, id="id", created_at="created_at", metadata="metadata")
    _add_common(parser, _http, lambda options: str(urlsplit(options.url).hostname))
    return parser


def _python_parser(kinds: Any) -> None:
    parser = kinds.add_parser("python", help="a Python function", allow_abbrev=False)
    parser.add_argument("search", metavar="MODULE:FUNCTION", help="(query, limit) -> dicts or strings; sync or async")
    parser.add_argument("--list", metavar="MODULE:FUNCTION", help="a function without arguments: everything there is")
    _add_paths(parser, id="id", created_at="created_at", metadata="metadata", uri="uri", role="role", group="group")
    _add_common(
        parser, _ready(lambda options: python_service(options.search, options.list)), lambda options: options.search
    )


def _langchain_parser(kinds: Any) -> None:
    parser = kinds.add_parser("langchain", help="a LangChain retriever", allow_abbrev=False)
    parser.add_argument("retriever", metavar="MODULE:RETRIEVER", help="a retriever or vector store, or what makes one")
    _add_paths(parser, created_at="metadata.created_at", metadata="metadata")
    _add_common(parser, _ready(lambda options: langchain_service(options.retriever)), lambda options: options.retriever)


def _llamaindex_parser(kinds: Any) -> None:
    parser = kinds.add_parser("llamaindex", help="a LlamaIndex retriever", allow_abbrev=False)
    parser.add_argument("retriever", metavar="MODULE:RETRIEVER", help="a retriever or index, or what makes one")
    _add_paths(parser, created_at="metadata.created_at", metadata="metadata", group="document")
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
    _add_common(
        parser,
        _ready(lambda options: chroma_service(options.path, options.collection, options.embed)),
        lambda options: options.collection,
    )


def _qdrant_parser(kinds: Any) -> None:
    parser = kinds.add_parser(
        "qdrant",
        help="a collection of a Qdrant server",
        epilog=f"A server's key is taken from the environment variable {API_KEY}.",
        allow_abbrev=False,
    )
    parser.add_argument("place", type=_place, metavar="URL", help="the server, or the folder of a local collection")
    parser.add_argument("--collection", required=True, metavar="C")
    parser.add_argument("--embed", metavar="MODULE:FUNCTION", help="texts -> vectors")
    parser.add_argument("--vector", metavar="NAME", help="which vectors, where points have several")
    _add_paths(
        parser,
        content="content || text || page_content || document",
        created_at="created_at",
        metadata=mapping.THE_REST,
    )
    _add_common(parser, _qdrant, lambda options: options.collection)


def _add_paths(parser: argparse.ArgumentParser, *, content: str = "content", **defaults: str) -> None:
    """The options that say where a result has the fields of a record."""
    group = parser.add_argument_group("where a result has it (JMESPath)")
    group.add_argument("--content", type=_path, default=content, metavar="PATH", help="(default: %(default)s)")
    for field, what in (
        ("id", "by default what the service knows it by, else one made from its content"),
        ("created_at", "a date, or a number of seconds or milliseconds since 1970"),
        ("metadata", "an object; * is all that no other path takes"),
        ("uri", "where the document lies; it is not fetched"),
        ("role", "such as user or assistant"),
        ("group", "such as the document that it was cut from"),
    ):
        default = defaults.get(field)
        group.add_argument(
            "--" + field.replace("_", "-"),
            type=_metadata_path if field == "metadata" else _path,
            default=default,
            metavar="PATH",
            help=what if default is None else f"{what} (default: {default})",
        )


def _add_common(
    parser: argparse.ArgumentParser,
    opened: Callable[[argparse.Namespace], AbstractAsyncContextManager[Service]],
    named: Callable[[argparse.Namespace], str],
) -> None:
    """The options that every kind has; how its service is opened, and what it is called if nobody says it."""
    limits = Limits()
    parser.set_defaults(opened=opened, named=named)
    parser.add_argument("--name", metavar="N", help="the name that `describe` reports")
    parser.add_argument("--serve", type=loopback, metavar="HOST:PORT", help="serve HTTP there")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=limits.timeout,
        metavar="S",
        help="seconds for the answer to one call (default: %(default)g)",
    )
    for option, default, what in (
        ("--max-limit", limits.recall, "records in an answer"),
        ("--max-asked", limits.asked, "results of one search, where a `where` fits few of them"),
        ("--max-listed", limits.listed, "results in a listing"),
    ):
        parser.add_argument(
            option, type=positive, default=default, metavar="N", help=f"{what}, at most (default: %(default)s)"
        )
    add_log_level(parser)


def _place(text: str) -> str:
    """A server's address, or a folder."""
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


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _LONGEST:
        raise argparse.ArgumentTypeError(f"expected a number of seconds, up to {_LONGEST:g}, got {text!r}")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
