"""The command line of a2m: connects to a memory and runs a command; an error becomes one sentence and an exit code."""

import argparse
import os
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any, Final

import anyio

from a2m_router.command import commands, copying
from a2m_router.command.arguments import parser
from a2m_router.command.backing_up import NoBackups, backup
from a2m_router.command.exporting import Incomplete
from a2m_router.command.importing import NotAnExport
from a2m_router.command.peer import PatientPeer
from a2m_router.command.reaching import Address, NotServed, Unusable, chosen_address, reached
from a2m_router.command.running import DONE, FAILED, INTERRUPTED, MISUSED, Running, say
from a2m_router.command.streams import OutputClosed, Streams, streams
from a2m_router.command.watching import watch
from a2m_router.config.loading import ConfigError
from a2m_router.daemon.logs import log_to_stderr
from a2m_router.process.descriptors import open_missing_streams
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.client.client import Unanswered
from a2m_router.protocol.client.http_client import HttpClient, HttpFailure
from a2m_router.protocol.client.memory import through
from a2m_router.protocol.client.results import BadAnswer
from a2m_router.protocol.server.shutdown import until_signalled
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.storage.database import DatabaseError
from a2m_router.tiers.profile import CannotServe

_COMMANDS: Final[Mapping[str, Callable[[Running], Awaitable[int]]]] = {
    "describe": commands.describe,
    "remember": commands.remember,
    "recall": commands.recall,
    "timeline": commands.timeline,
    "fetch": commands.fetch,
    "forget": commands.forget,
    "promote": commands.promote,
    "reinforce": commands.reinforce,
    "sessions": commands.sessions,
    "close": commands.close,
    "consolidate": commands.consolidate,
    "summarize": commands.summarize,
    "watch": watch,
    "export": copying.export,
    "import": copying.import_,
    "backup": backup,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code. `a2m --help` lists the exit codes."""
    open_missing_streams()
    try:
        with _help_may_be_unread():
            options = parser().parse_args(arguments)
        log_to_stderr("info" if hasattr(options, "verbose") else "critical", "text")
        try:
            _check_text(options)
            return anyio.run(_run, options, chosen_address(options, os.environ))
        except Unusable as problem:
            say(str(problem))
            return MISUSED
    except KeyboardInterrupt:
        return INTERRUPTED


async def _run(options: argparse.Namespace, address: Address) -> int:
    with streams() as ours, anyio.CancelScope() as scope:
        async with until_signalled(scope.cancel):
            return await _execute(options, address, ours)
    # reached only after a signal, which is the normal end of a watch
    return DONE if options.command == "watch" else INTERRUPTED


async def _execute(options: argparse.Namespace, address: Address, ours: Streams) -> int:
    """Connect and run the command. Every error becomes a sentence on stderr and an exit code."""
    arrived, pushed = anyio.create_memory_object_stream[Mapping[str, Any]](inf)
    try:
        with arrived, pushed:
            # a federation that runs only for this watch would have no changes to show
            may_run = options.command != "watch"
            async with reached(address, arrived.send_nowait, may_run=may_run) as greeted:
                asking = PatientPeer(greeted.peer, address.timeout)
                memory = through(asking, greeted)  # a second describe would cost a mounted service another search
                over_http = isinstance(greeted.peer, HttpClient)
                running = Running(memory, asking, options, address, ours, pushed, arrived.close, over_http)
                return await _COMMANDS[options.command](running)
    except Exception as problem:  # noqa: BLE001 - the outermost handler: a user gets no traceback
        return _failed(_innermost(problem), address, options)


def _failed(problem: BaseException, address: Address, options: argparse.Namespace) -> int:
    """Print the error, and return the exit code."""
    match problem:
        case OutputClosed():
            if options.command == "export":
                say("stdout was closed before everything was written")
                return FAILED
            return DONE
        case ConfigError():
            say(f"{address} cannot be used: {'; '.join(str(problem).splitlines())}")
        case Unusable() | ValueError():
            say(str(problem))
            return MISUSED
        case A2MError():
            name = Code(problem.code).name if problem.code in list(Code) else f"error {problem.code}"
            say(f"{name}: {problem.message}{_retry_hint(problem)}")
        case HttpFailure() if problem.reason.startswith("HTTP 401"):
            say(
                f"{address}: {problem.reason}; the token is read from the environment variable {address.token_variable}"
            )
        case Unanswered():
            say(f"{address}: {problem.reason}")
        case BadAnswer() | CannotServe() | CannotStart() | DatabaseError() | Incomplete() | NotAnExport() | NotServed():
            say(str(problem))
        case NoBackups():
            say(str(problem))
        case OSError():
            where = "" if problem.filename is None else f"{problem.filename}: "
            say(where + (problem.strerror or str(problem)))
        case _:
            say(f"unexpected error: {type(problem).__name__}: {problem}")
    return FAILED


def _retry_hint(problem: A2MError) -> str:
    """Return when to retry the call, if the server says so."""
    seconds = (problem.data or {}).get("retry_after")
    return f" (retry in {seconds:.3g} s)" if isinstance(seconds, int | float) and seconds > 0 else ""


def _innermost(problem: BaseException) -> BaseException:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return problem


def _check_text(options: argparse.Namespace) -> None:
    """Raise Unusable for an argument that is not valid text: it could not be sent."""
    for name, value in vars(options).items():
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and any("\ud800" <= character <= "\udfff" for character in text):
                raise Unusable(f"{name}: not valid UTF-8")


@contextmanager
def _help_may_be_unread() -> Iterator[None]:
    """Prevent an error message at exit if the help was printed to a pipe whose reader has ended."""
    try:
        yield
    except SystemExit:
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        raise


if __name__ == "__main__":
    sys.exit(main())
