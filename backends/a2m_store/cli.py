"""a2m-store: one A2M server on one SQLite file, over stdio or HTTP."""

import argparse
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Final

from a2m_router import __version__
from a2m_router.process.descriptors import open_missing_streams
from a2m_router.process.paths import path_argument
from a2m_router.protocol.server.event_log import DEFAULT_RETAINED
from a2m_router.protocol.server.serving import add_log_level, loopback, positive, run, serve
from a2m_router.storage.database import DatabaseError
from a2m_router.storage.nearest import METRICS
from a2m_store.drafts import StoreLimits
from a2m_store.server import Server, serving
from a2m_store.store import Store

_KINDS: Final = ("working", "episodic", "semantic", "procedural")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    open_missing_streams()
    options = _parser().parse_args(arguments)
    return run("a2m-store", partial(_serve, options), (DatabaseError,), log_level=options.log_level)


def _parser() -> argparse.ArgumentParser:
    limits = StoreLimits()
    parser = argparse.ArgumentParser(
        prog="a2m-store",
        description="One A2M 0.1 memory server on one SQLite file. It serves stdin and stdout unless --http is given.",
    )
    parser.add_argument("path", type=path_argument, metavar="PATH", help="the file; created if it is missing")
    parser.add_argument("--kind", choices=_KINDS, help="the kind of memory that `describe` reports")
    parser.add_argument("--name", metavar="N", help="the name that `describe` reports (default: the file's)")
    parser.add_argument(
        "--http",
        type=loopback,
        metavar="HOST:PORT",
        help="serve HTTP there, without authentication: owners are ignored, and calls from web pages are rejected",
    )
    parser.add_argument(
        "--durability",
        choices=("full", "normal"),
        default="full",
        help="full (the default): acknowledged writes survive a power cut; normal: only the end of this process",
    )
    parser.add_argument(
        "--metric",
        choices=METRICS,
        help="how vectors are compared (default: the file's metric; cosine for a new file)",
    )
    parser.add_argument(
        "--max-records",
        type=positive,
        default=limits.max_records_per_call,
        metavar="N",
        help="records in one call (default: %(default)s)",
    )
    parser.add_argument(
        "--max-content",
        type=positive,
        default=limits.max_content_length,
        metavar="N",
        help="characters in one record's content (default: %(default)s)",
    )
    parser.add_argument(
        "--events",
        type=positive,
        default=DEFAULT_RETAINED,
        metavar="N",
        help="events kept for clients that poll (default: %(default)s)",
    )
    add_log_level(parser)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


async def _serve(options: argparse.Namespace) -> None:
    await serve("a2m-store", _opened(options), options.http)


@asynccontextmanager
async def _opened(options: argparse.Namespace) -> AsyncIterator[Server]:
    store = Store(
        options.path,
        clock=lambda: time.time_ns() // 1_000_000,
        name=options.name,
        kind=options.kind,
        metric=options.metric,
        limits=StoreLimits(max_records_per_call=options.max_records, max_content_length=options.max_content),
    )
    try:
        async with serving(store, durable=options.durability == "full", retained=options.events) as server:
            yield server
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(main())
