"""The command line of a2m-router: reads the arguments, runs the command, prints one readable error."""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final

import anyio
import msgspec

from a2m_router import __version__
from a2m_router.config.loading import ConfigError, check_bind, host_port, load
from a2m_router.config.settings import Serve, Settings
from a2m_router.daemon.app import Federation, running_federation
from a2m_router.daemon.logs import log_to_stderr
from a2m_router.daemon.serve.readiness import unready
from a2m_router.daemon.serve.reloading import Authentication
from a2m_router.daemon.tokens import checked_owner, fresh_token, handing_out
from a2m_router.process.descriptors import open_missing_streams, standard_streams
from a2m_router.process.paths import path_argument
from a2m_router.process.stderr import drain_stderr, unblocked_stderr
from a2m_router.protocol.client.client import Unanswered
from a2m_router.protocol.client.memory import TIMEOUT
from a2m_router.protocol.client.results import BadAnswer
from a2m_router.protocol.server.http_limits import HttpLimits
from a2m_router.protocol.server.server import CannotListen
from a2m_router.protocol.server.shutdown import StoppableStream, until_signalled
from a2m_router.protocol.server.stdio import serve_lines
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.method_params import Describe
from a2m_router.storage.database import STDIO, DatabaseError
from a2m_router.tiers.link_factory import links_for
from a2m_router.tiers.profile import CannotServe

_PROGRAM: Final = "a2m-router"

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code: 0 for a clean end, 1 for a failure, 2 for bad arguments."""
    open_missing_streams()
    options = _options(arguments)
    if options.command == "token":
        print(handing_out(options.owner, fresh_token()), end="")
        return 0
    with unblocked_stderr():
        log_to_stderr(options.log_level, options.log_format)
        return _execute(options)


def _execute(options: argparse.Namespace) -> int:
    """Do what the options request, and return the exit code."""
    code = 0
    try:
        settings = load(options.config, os.environ)
        if options.http is not None:
            settings = msgspec.structs.replace(
                settings, serve=msgspec.structs.replace(settings.serve, http=_bind(options.http, settings.serve))
            )
        work = _rebuild if options.rebuild else _run if options.backup is None else _backup
        code = anyio.run(work, settings, options, backend_options={"use_uvloop": sys.platform != "win32"})
    except* ConfigError as problems:
        print(f"{_PROGRAM}: {options.config} cannot be used:\n{_sentence(problems)}", file=sys.stderr)
        code = 1
    except* (DatabaseError, CannotListen, CannotServe) as problems:
        print(f"{_PROGRAM}: {_sentence(problems)}", file=sys.stderr)
        code = 1
    except* OSError as problems:
        print(
            f"{_PROGRAM}: a file could not be read or written: {_sentence(problems)}",
            file=sys.stderr,
        )
        code = 1
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the arguments. Options that contradict each other end the program with a sentence and exit code 2."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.federation is not None and not options.rebuild:
        parser.error("--federation names the federation whose records --rebuild reads: add --rebuild, or leave it out")
    if options.rebuild and options.check:
        parser.error("--rebuild and --check each do one thing and end: run a2m-router once for each")
    beside = [name for name in ("rebuild", "check", "adopt", "http") if getattr(options, name)]
    if options.backup is not None and beside:
        parser.error(f"--backup makes a backup and ends: leave out --{beside[0]}")
    others = [name for name in ("rebuild", "check", "adopt", "backup") if getattr(options, name)]
    if options.command == "token" and others:
        parser.error(f"token prints a token and does nothing else: leave out --{others[0]}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        usage="%(prog)s [option ...]\n       %(prog)s token OWNER",
        description="One memory made of several: an A2M 0.1 server in front of one A2M server for each tier. "
        "It speaks JSON-RPC on stdin and stdout unless it serves HTTP.",
    )
    parser.add_argument(
        "--config",
        type=path_argument,
        default=Path("federation.toml"),
        metavar="FILE",
        help="the federation file: its tiers and settings (default: %(default)s)",
    )
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="serve HTTP at this address; overrides [serve] http of the file"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="start and connect to every tier, print a report, and end; the exit code is 0 if there is no problem",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="accept that a tier has another store than at the last start, and take over all its records; first stop "
        "the router that wrote that store",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="rebuild the catalog from the records of the tiers and the readable part of the old catalog, and end; the "
        "exit code is 0 if that succeeded. The old files are kept",
    )
    parser.add_argument(
        "--federation",
        metavar="ID",
        help="with --rebuild: the id of this federation, for tiers that hold records of several federations",
    )
    parser.add_argument(
        "--backup",
        type=path_argument,
        metavar="FOLDER",
        help="copy the catalog and the stores on this machine, all as of the same moment, and end; the exit code is 0 "
        "if that succeeded. If a router serves this federation over HTTP, it makes the copies and keeps serving",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="the lowest level that is logged to stderr (default: %(default)s)",
    )
    parser.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="the form of the log (default: %(default)s)"
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(prog=_PROGRAM, dest="command", title="instead of serving", metavar="")
    token = commands.add_parser(
        "token",
        help="print a new token for a client that calls over HTTP, and the lines to add to the file",
        description="Prints a new token for a client that calls over HTTP, and the lines for federation.toml that "
        "assign the token to OWNER. Nothing is stored or changed.",
    )
    token.add_argument(
        "owner", type=_owner, metavar="OWNER", help="the owner whose records the client reads and writes"
    )
    return parser


def _owner(text: str) -> str:
    try:
        return checked_owner(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


class _Shutdown:
    """What a signal does: it cancels the start; or, once the router serves, it closes the server, which first answers
    the calls that are running."""

    def __init__(self) -> None:
        self.start = anyio.CancelScope()
        self.close: Callable[[], None] = self.start.cancel


async def _run(settings: Settings, options: argparse.Namespace) -> int:
    """Start the federation, then check or serve it as the options say. Return the exit code."""
    links = links_for(settings, os.environ)
    shutdown = _Shutdown()
    authentication = Authentication(settings, lambda: load(options.config, os.environ))
    serves_http = settings.serve.http is not None and not options.check
    on_hang_up = authentication.reload_soon if serves_http and not _has_terminal() else None
    async with until_signalled(lambda: shutdown.close(), on_hang_up=on_hang_up):
        with shutdown.start:
            async with running_federation(settings, links, adopt=options.adopt) as federation:
                if options.check:
                    # imported here: only --check needs what draws the table
                    from a2m_router.daemon.checking import print_check

                    return await print_check(federation)
                if settings.serve.http is not None:
                    await _serve_http(federation, *host_port(settings.serve.http), options, shutdown, authentication)
                else:
                    await _serve_stdio(federation, shutdown)
    log.info("stopped")
    return 1 if options.check else 0


async def _rebuild(settings: Settings, options: argparse.Namespace) -> int:
    """Rebuild the catalog, and return the exit code."""
    from a2m_router.placement.rebuilding import print_rebuilt, progress, rebuild

    links = links_for(settings, os.environ)
    scope = anyio.CancelScope()
    done = None
    try:
        async with until_signalled(scope.cancel):
            with scope, progress() as watch:
                done = await rebuild(settings, links, watch, adopt=options.adopt, federation=options.federation)
    except* OSError as problems:
        raise DatabaseError(f"{settings.state}: the catalog could not be rebuilt: {_sentence(problems)}") from None
    if done is None:
        log.info("stopped; the catalog is unchanged")
        return 1
    drain_stderr()
    print_rebuilt(done, settings)
    return 0


async def _backup(settings: Settings, options: argparse.Namespace) -> int:
    """Make a backup, and return the exit code.

    The router that serves the federation makes it; if none does, one is started in this process.
    """
    from a2m_router.command.backing_up import NoBackups, back_up, not_included, progress, summary
    from a2m_router.command.peer import PatientPeer
    from a2m_router.command.reaching import NotServed, config_address, reached
    from a2m_router.protocol.client.http_client import HttpFailure

    scope = anyio.CancelScope()
    made = None
    try:
        async with until_signalled(scope.cancel):
            with scope, progress() as watch:
                async with reached(config_address(options.config, os.environ), lambda _: None) as memory:
                    made = await back_up(PatientPeer(memory.peer, TIMEOUT), options.backup, watch)
    except* HttpFailure as problems:
        token = "; a token is taken from the variable A2M_TOKEN" if "HTTP 401" in _sentence(problems) else ""
        raise DatabaseError(f"no backup was made: {_sentence(problems)}{token}") from None
    except* (A2MError, Unanswered, BadAnswer, NoBackups, NotServed) as problems:
        raise DatabaseError(f"no backup was made: {_sentence(problems)}") from None
    if made is None:
        log.info("stopped; the incomplete backup is deleted")
        return 1
    for line in (summary(made), *not_included(made)):
        print(line)
    return 0


async def _serve_stdio(federation: Federation, shutdown: _Shutdown) -> None:
    """Serve on stdin and stdout until stdin ends or the shutdown begins."""
    if sys.stdin.isatty():
        print(
            f"{_PROGRAM} speaks JSON-RPC on stdin and stdout, one message per line; to serve HTTP instead: "
            f"{_PROGRAM} --config {federation.settings.path} --http 127.0.0.1:8778",
            file=sys.stderr,
        )
    with standard_streams() as (source, sink), _announced(federation, STDIO):
        requests = StoppableStream(source, federation.end_calls)
        shutdown.close = requests.end
        settings = federation.settings
        await serve_lines(
            federation.answer,
            requests,
            sink,
            max_message=settings.limits.max_message,
            # up to twice the limit, requests are read; those beyond the limit are rejected. Beyond that, none is read
            max_underway=2 * settings.serve.max_requests,
            max_held=settings.serve.max_held,
        )


def _has_terminal() -> bool:
    """Return whether stderr is a terminal: then a hang-up means that the terminal was closed, not "reload"."""
    try:
        return os.isatty(2)
    except OSError:
        return False


async def _serve_http(
    federation: Federation,
    host: str,
    port: int,
    options: argparse.Namespace,
    shutdown: _Shutdown,
    authentication: Authentication,
) -> None:
    """Serve HTTP until the shutdown begins."""
    # imported here: the HTTP server takes half of the whole import time
    from a2m_router.protocol.server.http import HttpServer, application

    serve = federation.settings.serve
    limits = HttpLimits(
        max_requests=serve.max_requests,
        max_connections=serve.max_connections,
        max_held=serve.max_held,
        max_header=serve.max_header,
        idle_timeout=serve.idle_timeout,
    )
    app = application(
        federation.answer,
        admit=authentication.admit,
        profile=lambda caller: federation.describe(Describe(), caller),
        ready=lambda: unready(federation.settings, federation.links, federation.catalog.tiers.is_scanned),
        max_message=federation.settings.limits.max_message,
        limits=limits,
    )
    http = HttpServer(app, host, port, limits, serve.hosts)

    def close() -> None:
        http.stop()
        federation.end_calls()

    shutdown.close = close
    authentication.log_rights()
    with ExitStack() as noted:
        async with anyio.create_task_group() as reading:
            reading.start_soon(authentication.run)
            async with anyio.create_task_group() as tasks:
                host, port = await tasks.start(http.serve)
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
                noted.enter_context(_announced(federation, url))
                _announce(federation, url, options)
            reading.cancel_scope.cancel()


@contextmanager
def _announced(federation: Federation, where: str) -> Iterator[None]:
    """Record beside the state file, while the block runs, where this router can be reached.

    Other processes that need the federation read it there.
    """

    def note(text: str | None) -> None:
        try:
            federation.catalog.database.announce(text)
        except OSError as problem:  # the router works without it; other processes cannot find it
            log.warning("the address of this router not recorded beside %s: %s", federation.settings.state, problem)

    note(where)
    try:
        yield
    finally:
        note(None)


def _announce(federation: Federation, url: str, options: argparse.Namespace) -> None:
    """Print where the router listens, which tiers are up, and a command to try. If the log is JSON, print log lines."""
    up = [name for name, link in federation.links.items() if link.status == "up"]
    down = [
        f"{name} ({link.reason or 'still starting'})" for name, link in federation.links.items() if link.status != "up"
    ]
    lines = [f"{_PROGRAM} {__version__} listens on {url}", f"tiers up: {', '.join(up) or 'none'}"]
    if down:
        lines.append(f"tiers down: {', '.join(down)}")
    token = " -H 'Authorization: Bearer TOKEN'" if federation.settings.serve.principals else ""
    lines.append(
        f"""try: curl -s {url} -H 'Content-Type: application/json'{token} """
        """-d '{"jsonrpc":"2.0","id":1,"method":"memory/describe"}'"""
    )
    for line in lines:
        if options.log_format == "json":
            log.info("%s", line)
        else:
            with suppress(OSError):  # stderr may be closed
                print(line, file=sys.stderr, flush=True)


def _bind(http: str, serve: Serve) -> str:
    try:
        check_bind(http, serve)
    except ConfigError as problem:
        raise CannotListen(f"--http: {problem}") from None
    return http


def _sentence(problem: BaseException) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem)


if __name__ == "__main__":
    sys.exit(main())
