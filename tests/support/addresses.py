"""Addresses at which no server listens, for as long as a test lasts; connecting to one fails at once."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import uvloop

# no name server resolves it (RFC 6761 §6.4)
UNKNOWN_HOST: Final = "nowhere.invalid"


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 on which nothing listens until a test starts a server there.

    The system may give a port that is merely free to another socket, in this process or in another. This port is bound
    to a socket that never listens. A connection to it is refused, and the system gives the port to no other socket. A
    server that names the port can still bind it: Linux binds several sockets with SO_REUSEADDR, which servers set, to
    one port while none listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def ask_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the resolution of `UNKNOWN_HOST` fail at once; asking real name servers may take long."""
    refused = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    ask, ask_uvloop = socket.getaddrinfo, uvloop.Loop.getaddrinfo

    def answer(host: Any, *arguments: Any, **options: Any) -> Any:
        if host in (UNKNOWN_HOST, UNKNOWN_HOST.encode()):
            raise refused
        return ask(host, *arguments, **options)

    async def answer_uvloop(loop: Any, host: Any, *arguments: Any, **options: Any) -> Any:
        if host in (UNKNOWN_HOST, UNKNOWN_HOST.encode()):
            raise refused
        return await ask_uvloop(loop, host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", answer)
    monkeypatch.setattr(uvloop.Loop, "getaddrinfo", answer_uvloop)  # it does not call Python's getaddrinfo
