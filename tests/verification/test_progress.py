"""A command shows its progress on a terminal, and its other output is not disturbed."""

import io
import sys

import pytest

from tests.support.progress import progress


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stdout: io.StringIO, stderr: io.StringIO) -> tuple[str, str]:
    """Print lines on stdout and stderr between some steps; return what stdout and stderr got."""
    monkeypatch.setattr(sys, "stdout", stdout)
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with progress("steps", 3, ticks=False) as bar:
        bar.advance()
        print("a line")
        bar.tell("a story of [1, 2]")
        bar.name("last steps")
        bar.reach(3)
    return stdout.getvalue(), stderr.getvalue()


def test_a_bar_is_on_stderr_if_that_is_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    said, bar = shown(monkeypatch, io.StringIO(), Screen())
    assert said == "a line\n"
    assert "a story of [1, 2]" in bar
    assert "1/3" in bar
    assert "last steps" in bar
    assert "3/3" in bar


def test_nothing_is_drawn_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), io.StringIO()) == ("a line\n", "a story of [1, 2]\n")


def test_lines_on_the_same_terminal_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    said, bar = shown(monkeypatch, Screen(), Screen())
    assert said == ""
    assert "a line\n" in bar
