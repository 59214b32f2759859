"""Selects the memory that the command calls, and connects to it."""

import argparse
import logging
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import msgspec

from a2m_router.config.loading import load
from a2m_router.process.paths import expanded
from a2m_router.protocol.client.child import executable
from a2m_router.protocol.client.connecting import connect, connect_command
from a2m_router.protocol.client.memory import TIMEOUT, Memory
from a2m_router.storage.database import DatabaseError, InUse, announced

_DEFAULT_CONFIG: Final = Path("federation.toml")
_USUAL_ADDRESS: Final = "127.0.0.1:8778"
_TOKEN_VARIABLE: Final = "A2M_TOKEN"
_CA_VARIABLE: Final = "A2M_CA_FILE"
_HOW: Final = (
    "no memory selected, and there is no federation.toml in this folder: give --http URL, --stdio COMMAND or "
    "--config FILE, or put an address into A2M_URL"
)

log = logging.getLogger(__name__)

OnEvent = Callable[[Mapping[str, Any]], None]


class Unusable(Exception):
    """The arguments are not valid; a sentence."""


class NotServed(Exception):
    """No router serves the federation over HTTP; a sentence."""


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The address of a memory, exactly one of `http`, `stdio` and `config`; and how to connect to it."""

    http: str | None = None
    stdio: tuple[str, ...] | None = None
    config: Path | None = None
    token_variable: str = _TOKEN_VARIABLE
    token: str | None = None
    ca_file: Path | None = None
    owner: str | None = None
    timeout: float = TIMEOUT

    def __str__(self) -> str:
        if self.http is not None:
            return self.http
        return shlex.join(self.stdio) if self.stdio is not None else str(self.config)

    def __repr__(self) -> str:  # without the token: a repr may end up in a log
        return f"<Address {self}>"


def chosen_address(options: argparse.Namespace, environ: Mapping[str, str]) -> Address:
    """Return the address that the options select, else the environment or this folder. Raises Unusable."""
    given = {name: getattr(options, name) for name in ("http", "stdio", "config") if hasattr(options, name)}
    if len(given) > 1:
        raise Unusable(f"expected one of --http, --stdio and --config, got --{' and --'.join(given)}")
    if not given:
        if environ.get("A2M_URL"):
            given["http"] = environ["A2M_URL"]
        elif _DEFAULT_CONFIG.is_file():
            given["config"] = _DEFAULT_CONFIG
        else:
            raise Unusable(_HOW)
    ca_file = _ca_file(options, environ)
    if ca_file is not None and not ca_file.is_file():
        raise Unusable(f"--ca-file: there is no file {str(ca_file)!r}")
    variable = getattr(options, "token_env", _TOKEN_VARIABLE)
    if hasattr(options, "token_env") and not environ.get(variable):
        raise Unusable(f"--token-env: the environment variable {variable} is empty or not set")
    return Address(
        http=given.get("http"),
        stdio=None if "stdio" not in given else _words(given["stdio"]),
        config=given.get("config"),
        token_variable=variable,
        token=environ.get(variable) or None,
        ca_file=ca_file,
        owner=getattr(options, "owner", None),
        timeout=getattr(options, "timeout", TIMEOUT),
    )


def _ca_file(options: argparse.Namespace, environ: Mapping[str, str]) -> Path | None:
    given: Path | None = getattr(options, "ca_file", None)
    if given is None and environ.get(_CA_VARIABLE):
        try:
            given = expanded(environ[_CA_VARIABLE])
        except ValueError as problem:
            raise Unusable(f"{_CA_VARIABLE}: {problem}") from None
    return given


def config_address(config: Path, environ: Mapping[str, str]) -> Address:
    """Return the address to the federation of a file, with the token and certificates that the environment names."""
    token = environ.get(_TOKEN_VARIABLE) or None
    return Address(config=config, token=token, ca_file=_ca_file(argparse.Namespace(), environ))


def reached(address: Address, on_event: OnEvent, *, may_run: bool = True) -> AbstractAsyncContextManager[Memory]:
    """Connect to a memory for the length of a block.

    Args:
        address: the memory, and how to connect to it.
        on_event: called with each pushed event, if the connection supports push.
        may_run: run the federation in this process if no router has it. No other process can have it meanwhile.

    Raises:
        NotServed: no router has the federation, and `may_run` is False.
        Exception: the errors of `connect`, `connect_command` and `open_federation`.
    """
    if address.http is not None:
        return connect(
            address.http, address.token, timeout=address.timeout, owner=address.owner, ca_file=address.ca_file, few=True
        )
    if address.stdio is not None:
        program, *arguments = address.stdio
        return connect_command(
            [executable(program, Path.cwd()), *arguments],
            timeout=address.timeout,
            owner=address.owner,
            on_notification=on_event,
        )
    assert address.config is not None
    return _federation(address, address.config, on_event, may_run)


@asynccontextmanager
async def _federation(address: Address, config: Path, on_event: OnEvent, may_run: bool) -> AsyncIterator[Memory]:
    """Yield the federation of a file: through the router that serves it over HTTP, else run in this process."""
    state = load(config, os.environ).state
    async with AsyncExitStack() as stack:
        url = announced(state)
        memory: Memory | None = None
        if url is None and not may_run:
            raise NotServed(
                f"no router serves the federation of {config} over HTTP; start a2m-router with --http {_USUAL_ADDRESS}"
            )
        if url is None:
            # imported here: this loads the whole router, which most calls do not need
            from a2m_router.daemon.opening import open_federation

            here = open_federation(config, timeout=address.timeout, owner=address.owner, on_notification=on_event)
            try:
                memory = await stack.enter_async_context(here)
            except InUse as problem:
                url = announced(state)  # a router may have started meanwhile
                if url is None:
                    raise DatabaseError(
                        f"{problem}. That process does not serve HTTP (yet), so a2m cannot use it: end it, or restart "
                        f"it with --http {_USUAL_ADDRESS}"
                    ) from None
        if memory is None:
            assert url is not None
            log.info("a router serves this federation already, connecting to %s", url)
            there = connect(url, address.token, timeout=address.timeout, owner=address.owner, few=True)
            memory = await stack.enter_async_context(there)
        yield memory


def _words(line: str) -> tuple[str, ...]:
    try:
        words = shlex.split(line)
    except ValueError as problem:
        raise Unusable(f"--stdio: expected a command line with shell quoting: {problem}") from None
    if not words:
        raise Unusable("--stdio: expected a command line, such as 'a2m-store notes.db'")
    return tuple(words)
