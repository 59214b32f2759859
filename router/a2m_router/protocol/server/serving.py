"""How a server of ours is run from a command line: on stdio or on a loopback address, until it is told to stop.

One process, one server. Whatever goes wrong on the way is one sentence on stderr and the exit code 1.
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

# over HTTP nobody can be told apart: `scopes` is not declared and every owner ignored (§6)
_ANYBODY: Final = Caller(asserts_owner=False)


class Served(Answering, Protocol):
    """A server that can also be described without a call (§8.3.3)."""

    async def describe(self, caller: Caller, /) -> Mapping[str, Any]: ...


def run(
    program: str, serving: Callable[[], Awaitable[None]], mistakes: tuple[type[Exception], ...], *, log_level: str
) -> int:
    """Runs `serving` to its end; returns the exit code. Nothing that is logged or printed meanwhile blocks.

    Args:
        program: whom the sentence on stderr is from.
        log_level: what goes to stderr, as --log-level names it.
        mistakes: what `serving` raises for reasons that a sentence explains; an address that is taken is one always.
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
    """Serves what `opened` gives: at `address`, or on stdin and stdout where that is None.

    On stdio it is opened when stdout carries messages and nothing else, so that what is printed on the way there goes
    to stderr. Raises CannotListen.
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
    # what serves HTTP is half of all that there is to load, and on stdio a tier is started by its router
    from a2m_router.protocol.server.http import HttpServer, application

    http = HttpServer(application(server, admit=_admit, profile=server.describe), host, port)
    async with until_signalled(http.stop), anyio.create_task_group() as tasks:
        host, port = await tasks.start(http.serve)
        where = f"[{host}]" if ":" in host else host
        print(f"{program}: listening on http://{where}:{port}/", file=sys.stderr, flush=True)


def _admit(headers: Mapping[str, str]) -> Caller | Refusal:
    if headers.get("origin") is not None:
        return Refusal(403, "Origin: this server answers no web page")
    return _ANYBODY


def loopback(text: str) -> tuple[str, int]:
    """The host, without brackets, and the port of a loopback address such as 127.0.0.1:8778. For argparse."""
    host, port = _address(text)
    if not is_loopback(host):
        raise argparse.ArgumentTypeError(
            f"{host} can be reached from elsewhere, and this server tells nobody apart; listen on 127.0.0.1, and put "
            "a2m-router with principals in front"
        )
    return host, port


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT like 127.0.0.1:8778, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)


def positive(text: str) -> int:
    """A whole number of 1 or more. For argparse."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {text!r}")
    return number


def add_log_level(parser: argparse.ArgumentParser) -> None:
    """The option --log-level, as every server has it."""
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
