"""a2m-store: one A2M server on one SQLite file, over stdio or HTTP."""

import argparse
import importlib.metadata
import logging
import sys
import time
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Final

import anyio
import anyio.abc

from backends.store.drafts import Limits
from backends.store.server import Server, serving
from backends.store.store import Store
from backends.store.vectors import METRICS
from router.a2m.descriptors import open_missing_streams, standard_streams
from router.a2m.ending import EndingStream, until_signalled
from router.a2m.event_log import DEFAULT_RETAINED
from router.a2m.http import CannotListen, HttpServer, Refusal, application
from router.a2m.server import Caller
from router.a2m.stdio import serve_lines
from router.database import DatabaseError

_KINDS: Final = ("working", "episodic", "semantic", "procedural")

# over HTTP nobody can be told apart: `scopes` is not declared and every owner ignored (§6)
_ANYBODY: Final = Caller(asserts_owner=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    open_missing_streams()
    options = _parser().parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=options.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    code = 0
    try:
        anyio.run(_serve, options, backend_options={"use_uvloop": sys.platform != "win32"})
    except* (DatabaseError, CannotListen) as problems:
        print(f"a2m-store: {_sentence(problems)}", file=sys.stderr)
        code = 1
    return code


def _parser() -> argparse.ArgumentParser:
    limits = Limits()
    parser = argparse.ArgumentParser(
        prog="a2m-store",
        description="One A2M 0.1 memory server on one SQLite file. It serves stdin and stdout unless --http is given.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="the file; it is made if it is not there")
    parser.add_argument("--kind", choices=_KINDS, help="the kind of memory that `describe` reports")
    parser.add_argument("--name", metavar="N", help="the name that `describe` reports; by default the file's")
    parser.add_argument(
        "--http",
        type=_loopback,
        metavar="HOST:PORT",
        help="serve HTTP there; callers are not told apart, so owners are ignored, and no browser's page may call",
    )
    parser.add_argument(
        "--durability",
        choices=("full", "normal"),
        default="full",
        help="full (the default): what is acknowledged outlives a power cut; normal: only the end of this process",
    )
    parser.add_argument(
        "--metric",
        choices=METRICS,
        help="how vectors are compared; by default as the file did so far, cosine for a new one",
    )
    parser.add_argument(
        "--max-records",
        type=_positive,
        default=limits.max_records_per_call,
        metavar="N",
        help="records in one call (default: %(default)s)",
    )
    parser.add_argument(
        "--max-content",
        type=_positive,
        default=limits.max_content_length,
        metavar="N",
        help="characters in one record's content (default: %(default)s)",
    )
    parser.add_argument(
        "--events",
        type=_positive,
        default=DEFAULT_RETAINED,
        metavar="N",
        help="events kept for those who poll for them (default: %(default)s)",
    )
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="what goes to stderr"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {importlib.metadata.version('a2m-router')}")
    return parser


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT like 127.0.0.1:8778, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _loopback(text: str) -> tuple[str, int]:
    host, port = _address(text)
    try:
        local = host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local:
        raise argparse.ArgumentTypeError(
            f"{host} can be reached from elsewhere, and a store tells nobody apart; listen on 127.0.0.1, and put "
            "a2m-router with principals in front"
        )
    return host, port


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return number


async def _serve(options: argparse.Namespace) -> None:
    store = Store(
        options.path,
        clock=lambda: time.time_ns() // 1_000_000,
        name=options.name,
        kind=options.kind,
        metric=options.metric,
        limits=Limits(max_records_per_call=options.max_records, max_content_length=options.max_content),
    )
    try:
        async with serving(store, durable=options.durability == "full", retained=options.events) as server:
            if options.http is None:
                await _serve_stdio(server)
            else:
                await _serve_http(server, *options.http)
    finally:
        store.close()


async def _serve_stdio(server: Server) -> None:
    with standard_streams() as (source, sink):
        ending = EndingStream(source)
        async with until_signalled(ending.end):
            await serve_lines(server, ending, sink)


async def _serve_http(server: Server, host: str, port: int) -> None:
    http = HttpServer(
        application(server, admit=_admit, profile=server.describe),
        host,
        port,
    )
    async with until_signalled(http.stop), anyio.create_task_group() as tasks:
        host, port = await tasks.start(http.serve)
        where = f"[{host}]" if ":" in host else host
        print(f"a2m-store: listening on http://{where}:{port}/", file=sys.stderr, flush=True)


def _admit(headers: Mapping[str, str]) -> Caller | Refusal:
    if headers.get("origin") is not None:
        return Refusal(403, "Origin: this server answers no web page")
    return _ANYBODY


def _sentence(problem: BaseException) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return str(problem)


if __name__ == "__main__":
    sys.exit(main())
