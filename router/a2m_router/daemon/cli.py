"""a2m-router: the command line. Arguments in, one readable error out, and an exit code."""

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
from a2m_router.daemon.serve.reloading import Door
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
    """Runs the command; returns its exit code: 0 for a clean end, 1 for what could not be done, 2 for bad arguments."""
    open_missing_streams()
    options = _options(arguments)
    if options.command == "token":
        print(handing_out(options.owner, fresh_token()), end="")
        return 0
    with unblocked_stderr():
        log_to_stderr(options.log_level, options.log_format)
        return _done(options)


def _done(options: argparse.Namespace) -> int:
    """Does what is asked for; returns the exit code."""
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
            f"{_PROGRAM}: the disk does not take what it must: {_sentence(problems)}",
            file=sys.stderr,
        )
        code = 1
    return code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """What was asked for. Ends the program with 2, and a sentence, for what makes no sense."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.federation is not None and not options.rebuild:
        parser.error("--federation says whose records a rebuild is to take: it goes with --rebuild")
    if options.rebuild and options.check:
        parser.error("--rebuild and --check do one thing each, and end: say one of them, then the other")
    beside = [name for name in ("rebuild", "check", "adopt", "http") if getattr(options, name)]
    if options.backup is not None and beside:
        parser.error(f"--backup makes a backup, and ends: leave out --{beside[0]}")
    asked = [name for name in ("rebuild", "check", "adopt", "backup") if getattr(options, name)]
    if options.command == "token" and asked:
        parser.error(f"token prints a token, and does nothing else: leave out --{asked[0]}")
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
        help="what the federation is made of (default: %(default)s)",
    )
    parser.add_argument("--http", metavar="HOST:PORT", help="serve HTTP there; wins over the file's [serve] http")
    parser.add_argument(
        "--check",
        action="store_true",
        help="start and greet every tier, print what was found, and end: 0 if all is well",
    )
    parser.add_argument(
        "--adopt",
        action="store_true",
        help="take another store behind a tier than last time as it is, with all that it holds; end the router that "
        "wrote it first",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="make the catalog anew from what the tiers hold and what can be read of the old one, and end: 0 if that "
        "is done. The old files are kept",
    )
    parser.add_argument(
        "--federation",
        metavar="ID",
        help="with --rebuild, where the tiers hold records of several federations: the id of this one",
    )
    parser.add_argument(
        "--backup",
        type=path_argument,
        metavar="FOLDER",
        help="copy the catalog and the stores on this machine, as they are at one moment, and end: 0 if that is done. "
        "A router that runs on HTTP makes the copies itself, and goes on serving",
    )
    parser.add_argument(
        "--log-level",
        choices=("debug", "info", "warning", "error"),
        default="info",
        help="what goes to stderr (default: %(default)s)",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text", help="how (default: %(default)s)")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(prog=_PROGRAM, dest="command", title="instead of serving", metavar="")
    token = commands.add_parser(
        "token",
        help="print a new token for somebody who shall call over HTTP, and what to add to the file for it",
        description="Prints a new token with which somebody may call over HTTP, and the lines for federation.toml that "
        "say whose calls those are. Nothing is kept or changed.",
    )
    token.add_argument("owner", type=_owner, metavar="OWNER", help="whose records the caller reads and writes")
    return parser


def _owner(text: str) -> str:
    try:
        return checked_owner(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


class _Ending:
    """What a signal does: it calls off the start; and once there is a door, closes that, which answers what is under
    way."""

    def __init__(self) -> None:
        self.start = anyio.CancelScope()
        self.close: Callable[[], None] = self.start.cancel


async def _run(settings: Settings, options: argparse.Namespace) -> int:
    """Opens the federation and does what the options say; returns the exit code."""
    links = links_for(settings, os.environ)
    ending = _Ending()
    door = Door(settings, lambda: load(options.config, os.environ))
    serves_http = settings.serve.http is not None and not options.check
    on_hang_up = door.read_soon if serves_http and not _has_terminal() else None
    async with until_signalled(lambda: ending.close(), on_hang_up=on_hang_up):
        with ending.start:
            async with running_federation(settings, links, adopt=options.adopt) as federation:
                if options.check:
                    # loaded by those who see the table that it draws
                    from a2m_router.daemon.checking import print_check

                    return await print_check(federation)
                if settings.serve.http is not None:
                    await _serve_http(federation, *host_port(settings.serve.http), options, ending, door)
                else:
                    await _serve_stdio(federation, ending)
    log.info("stopped")
    return 1 if options.check else 0


async def _rebuild(settings: Settings, options: argparse.Namespace) -> int:
    """Makes the catalog anew; returns the exit code."""
    from a2m_router.placement.rebuilding import print_rebuilt, progress, rebuild

    links = links_for(settings, os.environ)
    scope = anyio.CancelScope()
    done = None
    try:
        async with until_signalled(scope.cancel):
            with scope, progress() as watch:
                done = await rebuild(settings, links, watch, adopt=options.adopt, federation=options.federation)
    except* OSError as problems:
        raise DatabaseError(f"{settings.state}: could not be made anew: {_sentence(problems)}") from None
    if done is None:
        log.info("stopped; the catalog is as it was")
        return 1
    drain_stderr()
    print_rebuilt(done, settings)
    return 0


async def _backup(settings: Settings, options: argparse.Namespace) -> int:
    """Makes a backup, by the router that has the federation or by one that runs for it; returns the exit code."""
    from a2m_router.command.backing_up import NoBackups, back_up, not_included, progress, summary
    from a2m_router.command.peer import PatientPeer
    from a2m_router.command.reaching import NotServed, reached, way_to
    from a2m_router.protocol.client.http_client import HttpFailure

    scope = anyio.CancelScope()
    made = None
    try:
        async with until_signalled(scope.cancel):
            with scope, progress() as watch:
                async with reached(way_to(options.config, os.environ), lambda _: None) as memory:
                    made = await back_up(PatientPeer(memory.peer, TIMEOUT), options.backup, watch)
    except* HttpFailure as problems:
        token = "; a token is taken from the variable A2M_TOKEN" if "HTTP 401" in _sentence(problems) else ""
        raise DatabaseError(f"no backup was made: {_sentence(problems)}{token}") from None
    except* (A2MError, Unanswered, BadAnswer, NoBackups, NotServed) as problems:
        raise DatabaseError(f"no backup was made: {_sentence(problems)}") from None
    if made is None:
        log.info("stopped; what there was of the backup is removed")
        return 1
    for line in (summary(made), *not_included(made)):
        print(line)
    return 0


async def _serve_stdio(federation: Federation, ending: _Ending) -> None:
    if sys.stdin.isatty():
        print(
            f"{_PROGRAM} speaks JSON-RPC on stdin and stdout, one message a line; to serve HTTP instead: "
            f"{_PROGRAM} --config {federation.settings.path} --http 127.0.0.1:8778",
            file=sys.stderr,
        )
    with standard_streams() as (source, sink), _announced(federation, STDIO):
        requests = StoppableStream(source, federation.end_calls)
        ending.close = requests.end
        settings = federation.settings
        await serve_lines(
            federation.answer,
            requests,
            sink,
            max_message=settings.limits.max_message,
            # what is more than may be under way is read, and refused; what is more than that is not read
            max_underway=2 * settings.serve.max_requests,
            max_held=settings.serve.max_held,
        )


def _has_terminal() -> bool:
    """Whether stderr is a terminal, so that a hang-up says that there is nobody any more."""
    try:
        return os.isatty(2)
    except OSError:
        return False


async def _serve_http(
    federation: Federation, host: str, port: int, options: argparse.Namespace, ending: _Ending, door: Door
) -> None:
    # what serves HTTP is half of all that there is to load
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
        admit=door.admit,
        profile=lambda caller: federation.describe(Describe(), caller),
        ready=lambda: unready(federation.settings, federation.links, federation.catalog.tiers.is_scanned),
        max_message=federation.settings.limits.max_message,
        limits=limits,
    )
    http = HttpServer(app, host, port, limits, serve.hosts)

    def close() -> None:
        http.stop()
        federation.end_calls()

    ending.close = close
    door.say_who_may_write()
    with ExitStack() as noted:
        async with anyio.create_task_group() as reading:
            reading.start_soon(door.run)
            async with anyio.create_task_group() as tasks:
                host, port = await tasks.start(http.serve)
                url = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
                noted.enter_context(_announced(federation, url))
                _announce(federation, url, options)
            reading.cancel_scope.cancel()


@contextmanager
def _announced(federation: Federation, where: str) -> Iterator[None]:
    """Whoever wants the state file meanwhile is told that the router is reached there."""

    def note(text: str | None) -> None:
        try:
            federation.catalog.database.announce(text)
        except OSError as problem:  # only those who look for a running router miss it
            log.warning("where the router listens cannot be noted beside %s: %s", federation.settings.state, problem)

    note(where)
    try:
        yield
    finally:
        note(None)


def _announce(federation: Federation, url: str, options: argparse.Namespace) -> None:
    """Says where the router listens, which tiers are up, and how to try it."""
    up = [name for name, link in federation.links.items() if link.status == "up"]
    down = [
        f"{name} ({link.reason or 'it is still starting'})"
        for name, link in federation.links.items()
        if link.status != "up"
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
            with suppress(OSError):  # nobody need listen
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
