"""Addresses where nobody is, for certain and for as long as a test lasts, and at once."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
import uvloop

# a name that no name server knows (RFC 6761 §6.4)
UNKNOWN_HOST: Final = "nowhere.invalid"


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port of 127.0.0.1 on which nobody listens but who is told to.

    A port that is merely free may be given to whoever asks for any, in this process or in another. This one is held by
    a socket that never listens: a connection is refused, the system gives the port to nobody, and a server that names
    it can have it: Linux lets several sockets with SO_REUSEADDR, which servers have, be bound to it while none listens.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def ask_no_name_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on `UNKNOWN_HOST` is unknown at once; to be told so by name servers may take long."""
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
    monkeypatch.setattr(uvloop.Loop, "getaddrinfo", answer_uvloop)  # it does not go by Python's
