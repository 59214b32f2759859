"""What is drawn for a terminal: nothing is wider than it, and no word is broken."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import StringIO
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console, RenderableType

from a2m_router.process.drawing import blocks, fields, table, wrapped
from tests.support.paths import ROOT

ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.startswith("A2M_") and name != "COLUMNS"},
    "PYTHONPATH": str(ROOT),
    "TERM": "xterm",
}

PATIENCE: Final = 60.0  # seconds; far more than anything here takes

words = st.text(st.sampled_from("abcé字"), min_size=1, max_size=10)
texts = st.lists(words, max_size=8).map(" ".join)


def drawn(what: RenderableType, width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(what)
    return out.getvalue().splitlines()


def words_of(lines: Sequence[str]) -> list[str]:
    return sorted(word for line in lines for word in re.findall(r"[abcé字]+", line))


@given(
    st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(texts, min_size=n, max_size=n), min_size=1, max_size=4)),
    st.integers(24, 120),
)
def test_no_word_of_a_table_is_broken(rows: list[list[str]], width: int) -> None:
    columns = [(f"{place}", [row[place] for row in rows]) for place in range(len(rows[0]))]
    made = table(columns, width)
    lines = drawn(blocks(columns, width) if made is None else made, width)
    assert words_of(lines) == words_of([cell for row in rows for cell in row])
    assert max(map(cell_len, lines)) <= width


@given(st.lists(st.tuples(words, texts), min_size=1), st.integers(14, 120))
def test_no_word_of_a_field_is_broken(told: list[tuple[str, str]], width: int) -> None:
    told = [(name[:5], " ".join(word[:5] for word in value.split())) for name, value in told]
    lines = drawn(fields(told, width), width)
    assert words_of(lines) == words_of([text for pair in told for text in pair])
    assert max(map(cell_len, lines)) <= width


@given(texts, st.integers(26, 120), st.integers(0, 6))
def test_no_word_of_a_line_is_broken(line: str, width: int, indent: int) -> None:
    lines = wrapped(line, width, indent).splitlines()
    assert words_of(lines) == words_of([line])
    assert max(map(cell_len, lines), default=0) <= width
    assert all(after.startswith(" " * indent) for after in lines[1:])


def test_what_is_longer_than_a_line_is_broken_and_nothing_of_it_is_lost() -> None:
    long = "x" * 99
    for lines in (
        drawn(fields([("id", long)], 40), 40),
        drawn(blocks([("id", [long])], 40), 40),
        wrapped(f"id {long}", 40).splitlines(),
    ):
        assert sum(line.count("x") for line in lines) == 99
        assert max(map(len, lines)) <= 40


def test_what_has_no_room_beside_its_name_stands_whole_beneath_it() -> None:
    assert [line.strip() for line in drawn(fields([("the name", "x" * 36)], 40), 40)] == ["the name", "x" * 36]


# --- real programs, on a terminal of their own


@contextmanager
def on_a_terminal(columns: int, *command: str, cwd: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A program on a terminal so wide, and the descriptor where what it shows is read."""
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
    """What a terminal shows, without colours: all of it, or until these words are there, however they are broken."""
    shown = b""
    with suppress(OSError):  # the last who had the other end has closed it
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
    """A router over HTTP that has the federation of a folder."""
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


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_a_command_or_a_check_is_broken(columns: int, tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    place = ("--tier", "procedural", "--session", "housekeeping", "--key", "a/b", "--id", "x" * 32)
    with serving(tmp_path):
        shown_by(columns, *A2M, "remember", SAID, *place, cwd=tmp_path)
        for arguments, wanted in (
            (["describe"], [*TIERS, "embeddings,", "summarize,", "characters", "themselves", "promotes", "100,000"]),
            (["timeline"], [*SAID.split(), "procedural", "x" * 32]),
            (["recall", "report"], [*SAID.split(), "procedural", "x" * 32]),
            (["fetch", "a/b"], [*SAID.split(), "access_count", "housekeeping", "x" * 32]),
            (["sessions"], ["housekeeping", "procedural", "records"]),
            (["consolidate"], ["summarized", "procedural", "episodic"]),
        ):
            assert_unbroken(shown_by(columns, *A2M, *arguments, cwd=tmp_path), columns, wanted)
    for option, words in (
        ("--check", [*TIERS[:5], "embeddings,", "external,", "sessions", "round"]),
        ("--rebuild", [*TIERS[:4], "forgotten", "replaced", "replacements"]),
    ):
        shown = shown_by(columns, *ROUTER, option, "--log-level", "error", cwd=tmp_path)
        # the path of the state may be longer than a line
        assert_unbroken(shown, columns, words)


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_an_error_is_broken(columns: int, tmp_path: Path) -> None:
    with on_a_terminal(columns, *A2M, "describe", cwd=tmp_path) as (process, leader):
        shown = read(leader)
        assert process.wait(PATIENCE) == 2
    assert_unbroken(shown, columns, ["memory:", "--config", "address", "A2M_URL;", "federation.toml", "folder"])


@pytest.mark.parametrize("columns", [80, 40])
def test_no_word_of_an_event_is_broken(columns: int, tmp_path: Path) -> None:
    (tmp_path / "federation.toml").write_text(FEDERATION)
    with serving(tmp_path), on_a_terminal(columns, *A2M, "watch", "--interval", "0.05", cwd=tmp_path) as (_, leader):
        # it may not be listening yet, and then the next ones are told
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
