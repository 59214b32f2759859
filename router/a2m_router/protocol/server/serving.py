"""Runs one of our servers from a command line: on stdio or on a loopback address, until a signal stops it.

One process is one server. A failure becomes one sentence on stderr and the exit code 1.
"""

import argparse
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Protocol

import anyio

from a2m_router.process.descriptors import standard_streams
from a2m_router.process.log_text import TextFormatter
from a2m_router.process.stderr import unblocked_stderr
from a2m_router.protocol.server.http_addressing import is_loopback
from a2m_router.protocol.server.server import Answering, Caller, CannotListen, Refusal
from a2m_router.protocol.server.shutdown import StoppableStream, until_signalled
from a2m_router.protocol.server.stdio import serve_lines

# over HTTP, callers cannot be distinguished: `scopes` is not declared, and every owner is ignored (§6)
_ANYBODY: Final = Caller(asserts_owner=False)


class Served(Answering, Protocol):
    """A server whose description is also available without a call (§8.3.3)."""

    async def describe(self, caller: Caller, /) -> Mapping[str, Any]: ...


def run(
    program: str, serving: Callable[[], Awaitable[None]], mistakes: tuple[type[Exception], ...], *, log_level: str
) -> int:
    """Run `serving` to its end; return the exit code. Logging and printing never block meanwhile.

    Args:
        program: the name before the sentence on stderr.
        log_level: a value of --log-level.
        mistakes: the exceptions of `serving` whose message is shown without a traceback, besides CannotListen.
    """
    expected: tuple[type[Exception], ...] = (CannotListen, *mistakes)
    code = 0
    with unblocked_stderr():
        _log_to_stderr(log_level)
        try:
            anyio.run(serving, backend_options={"use_uvloop": sys.platform != "win32"})
        except* expected as problems:
            print(f"{program}: {_sentence(problems)}", file=sys.stderr)
            code = 1
    return code


async def serve(program: str, opened: AbstractAsyncContextManager[Served], address: tuple[str, int] | None) -> None:
    """Serve the server that `opened` yields: at `address`, or on stdin and stdout if that is None.

    On stdio, stdout is reserved for messages before the server is opened, so that prints during its start go to stderr.

    Raises:
        CannotListen: the address cannot be listened on.
    """
    if address is None:
        with standard_streams() as (source, sink):
            async with opened as server:
                ending = StoppableStream(source)
                async with until_signalled(ending.end):
                    await serve_lines(server, ending, sink)
    else:
        async with opened as server:
            await _serve_http(program, server, *address)


async def _serve_http(program: str, server: Served, host: str, port: int) -> None:
    # imported here: the HTTP server is half of the load time, and a router starts its tiers on stdio
    from a2m_router.protocol.server.http import HttpServer, application

    http = HttpServer(application(server, admit=_admit, profile=server.describe), host, port)
    async with until_signalled(http.stop), anyio.create_task_group() as tasks:
        host, port = await tasks.start(http.serve)
        where = f"[{host}]" if ":" in host else host
        print(f"{program}: listening on http://{where}:{port}/", file=sys.stderr, flush=True)


def _admit(headers: Mapping[str, str]) -> Caller | Refusal:
    if headers.get("origin") is not None:
        return Refusal(403, "Origin: this server does not answer web pages")
    return _ANYBODY


def loopback(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of a loopback address such as 127.0.0.1:8778. For argparse."""
    host, port = _address(text)
    if not is_loopback(host):
        raise argparse.ArgumentTypeError(
            f"{host} can be reached from other machines, and this server has no authentication; listen on 127.0.0.1, "
            "and put a2m-router with principals in front"
        )
    return host, port


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT like 127.0.0.1:8778, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def positive(text: str) -> int:
    """Return a whole number of 1 or more. For argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return number


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """Add the option --log-level, which every server has."""
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning", help="what goes to stderr"
    )


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler])


def _sentence(problem: BaseException) -> str:
    while isinstance(problem, BaseExceptionGroup):
        problem = problem.exceptions[0]
    return str(problem)
