"""Programs on a terminal: no line is wider than it, and no word is broken."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
from rich.cells import cell_len

from tests.support.paths import ROOT

ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.startswith("A2M_") and name != "COLUMNS"},
    "PYTHONPATH": str(ROOT),
    "TERM": "xterm",
}


PATIENCE: Final = 60.0  # seconds; far more than anything here takes


@contextmanager
def on_a_terminal(columns: int, *command: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Run a program on a terminal of this width; yield it, and the descriptor from which its output is read."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, cwd=cwd, env=ENVIRONMENT, start_new_session=True
    )
    os.close(follower)
    try:
        yield process, leader
    finally:
        process.kill()
        process.wait()
        os.close(leader)


def read(leader: int, until: str | None = None) -> str:
    """Return what a terminal shows, without colours: all of it, or up to these words, regardless of line breaks."""
    shown = b""
    with suppress(OSError):  # the last process with the other end open has closed it
        while until is None or until not in re.sub(r"\s", "", plain(shown)):
            ready, _, _ = select.select([leader], [], [], PATIENCE)
            assert ready, f"it shows no more than {shown!r}"
            if not (chunk := os.read(leader, 65_536)):
                break
            shown += chunk
    return plain(shown)


def plain(shown: bytes) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode("utf-8", "replace"))


def assert_unbroken(shown: str, columns: int, wanted: Iterable[str]) -> None:
    lines = re.split(r"[\r\n]+", shown)
    assert [word for word in wanted if not any(word in line for line in lines)] == [], shown
    assert max(map(cell_len, lines)) <= columns, shown


def shown_by(columns: int, *command: str, cwd: Path) -> str:
    with on_a_terminal(columns, *command, cwd=cwd) as (process, leader):
        shown = read(leader)
        assert process.wait(PATIENCE) == 0, shown
    return shown


FEDERATION: Final = """
state = "router.db"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
capacity = 24
spill_to = "episodic"
[tiers.episodic]
kind = "episodic"
command = ["a2m-store", "episodic.db"]
capacity = 100_000
spill_to = "semantic"
promote_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = ["a2m-store", "semantic.db"]
[tiers.procedural]
kind = "procedural"
command = ["a2m-store", "procedural.db"]
"""


TIERS: Final = ("working", "episodic", "semantic", "procedural", "records", "status")


SAID: Final = "The quarterly infrastructure report mentions international responsibilities"


A2M: Final = (sys.executable, "-m", "a2m_router.command.cli")


ROUTER: Final = (sys.executable, "-m", "a2m_router.daemon.cli")


@contextmanager
def serving(folder: Path) -> Iterator[None]:
    """Run a router over HTTP with the federation of a folder."""
    command = [*ROUTER, "--http", "127.0.0.1:0"]
    with subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stderr=subprocess.PIPE) as router:
        try:
            assert router.stderr is not None
            while b"listens on" not in (line := router.stderr.readline()):
                assert line, "it has ended"
            yield
        finally:
            router.terminate()
            router.communicate()


def test_no_word_of_a_command_or_a_check_is_broken(tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    place = ("--tier", "procedural", "--session", "housekeeping", "--key", "a/b", "--id", "x" * 32)
    with serving(tmp_path):
        shown_by(80, *A2M, "remember", SAID, *place, cwd=tmp_path)
        for arguments, wanted in (
            (["describe"], [*TIERS, "embeddings,", "summarize,", "characters", "promotes", "100,000"]),
            (["timeline"], [*SAID.split(), "procedural", "x" * 32]),
            (["recall", "report"], [*SAID.split(), "procedural", "x" * 32]),
            (["fetch", "a/b"], [*SAID.split(), "access_count", "housekeeping", "x" * 32]),
            (["sessions"], ["housekeeping", "procedural", "records"]),
            (["consolidate"], ["summarized", "procedural", "episodic"]),
        ):
            for columns in (80, 40):
                assert_unbroken(shown_by(columns, *A2M, *arguments, cwd=tmp_path), columns, wanted)
    for option, words in (
        ("--check", [*TIERS[:5], "embeddings,", "external,", "sessions", "round"]),
        ("--rebuild", [*TIERS[:4], "forgotten", "replaced", "pending"]),
    ):
        for columns in (80, 40):
            shown = shown_by(columns, *ROUTER, option, "--log-level", "error", cwd=tmp_path)
            # the path of the state may be longer than a line
            assert_unbroken(shown, columns, words)


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_an_error_is_broken(columns: int, tmp_path: Path) -> None:
    with on_a_terminal(columns, *A2M, "describe", cwd=tmp_path) as (process, leader):
        shown = read(leader)
        assert process.wait(PATIENCE) == 2
    assert_unbroken(shown, columns, ["memory", "--config", "address", "A2M_URL", "federation.toml", "folder"])


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_an_event_is_broken(columns: int, tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    with serving(tmp_path), on_a_terminal(columns, *A2M, "watch", "--interval", "0.05", cwd=tmp_path) as (_, leader):
        # the watch may not be listening yet; then it shows the next events
        shown = ""
        while not all(kind in re.sub(r"\s", "", shown) for kind in ("written", "consolidated")):
            place = ["--session", "housekeeping", "--key", "user/preferences"]
            subprocess.run([*A2M, "remember", SAID, *place], cwd=tmp_path, env=ENVIRONMENT, check=True)
            subprocess.run([*A2M, "consolidate"], cwd=tmp_path, env=ENVIRONMENT, check=True)
            if select.select([leader], [], [], 0.5)[0]:
                shown += read(leader, "summarized0")
    wanted = ("written", "session", "housekeeping", "user/preferences", "consolidated", "promoted", "summarized")
    assert_unbroken(shown, columns, wanted)


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_the_demonstration_is_broken(columns: int, tmp_path: Path) -> None:
    shown = shown_by(columns, sys.executable, str(ROOT / "scripts" / "demo.py"), "--questions", "1", cwd=tmp_path)
    wanted = ("working", "episodic", "sessions;", "capacity", "wooden", "evidence", "questions);", "Sandpiper.")
    assert_unbroken(shown, columns, wanted)
