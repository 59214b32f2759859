"""A server on the standard streams that a process was started with: pipes, files, sockets, a terminal, or none."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SERVER = """
    from a2m_router.process.descriptors import open_missing_streams
    open_missing_streams()

    import sys, os, subprocess, anyio
    from a2m_router.protocol.server.stdio import serve_stdio

    async def answer(message, caller):
        print("a stray print")
        os.write(1, b"a stray write\\n")
        subprocess.run([sys.executable, "-c", "print('a stray child', input())"], stderr=subprocess.DEVNULL)
        return message[:20]

    options = {"use_uvloop": True} if sys.argv[1] == "uvloop" else {}
    anyio.run(serve_stdio, answer, backend="trio" if sys.argv[1] == "trio" else "asyncio", backend_options=options)
    print("after")
"""


@pytest.fixture(params=["asyncio", "uvloop", "trio"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    return [sys.executable, str(script), request.param]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


@pytest.mark.rule(n=13)
def test_stdout_carries_answers_and_nothing_else(server: list[str]) -> None:
    done = subprocess.run(server, input=b"one\ntwo", capture_output=True, env=ENVIRONMENT, timeout=30, check=True)
    assert done.stdout == b"one\ntwo\nafter\n"
    assert done.stderr.count(b"a stray print\n") == 2
    assert done.stderr.count(b"a stray write\n") == 2


def test_files_serve_as_standard_streams(server: list[str], tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(b"one\ntwo\n" + b"x" * 200_000)
    with (tmp_path / "in").open("rb") as source, (tmp_path / "out").open("wb") as sink:
        subprocess.run(server, stdin=source, stdout=sink, stderr=subprocess.DEVNULL, env=ENVIRONMENT, timeout=30)
    assert (tmp_path / "out").read_bytes() == b"one\ntwo\n" + b"x" * 20 + b"\nafter\n"


def test_dev_null_serves_as_standard_streams(server: list[str]) -> None:
    null = subprocess.DEVNULL
    assert subprocess.run(server, stdin=null, stdout=null, env=ENVIRONMENT, timeout=30).returncode == 0


def test_a_socket_serves_as_standard_streams(server: list[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(30)
        end = theirs.fileno()
        with subprocess.Popen(server, stdin=end, stdout=end, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as child:
            theirs.close()
            ours.sendall(b"hello\n")
            assert ours.recv(100) == b"hello\n"
            ours.shutdown(socket.SHUT_WR)
            assert child.wait(30) == 0


def test_a_terminal_serves_as_standard_streams(server: list[str]) -> None:
    ours, theirs = os.openpty()
    with subprocess.Popen(server, stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=ENVIRONMENT) as child:
        os.close(theirs)
        os.write(ours, b"hello\n")
        said = b""
        while said.count(b"hello") < 2:  # the terminal's echo, and the answer
            said += os.read(ours, 100)
        os.write(ours, b"\x04")  # Ctrl-D
        assert child.wait(30) == 0
    os.close(ours)


def test_a_server_started_without_standard_streams_ends_at_once(server: list[str]) -> None:
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *server], env=ENVIRONMENT, timeout=30)
    assert done.returncode == 0
