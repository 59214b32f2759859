"""The programs' stderr: writes never wait for a reader, and lost lines are counted."""

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from typing import Final

import pytest

from a2m_router.daemon.logs import _Json
from a2m_router.process.descriptors import standard_streams
from a2m_router.process.log_text import TextFormatter
from a2m_router.process.stderr import UnblockedStderr, unblocked_stderr
from tests.support.unread import ROOM, Unread

# seconds, far more than any step here takes; a hang becomes a failure
PATIENCE: Final = 60


@pytest.fixture
def unread() -> Iterator[Unread]:
    pipe = Unread()
    yield pipe
    pipe.close()


def test_a_name_that_is_no_utf_8_is_logged_in_either_form() -> None:
    name = os.fsdecode(b"caf\xe9.db")
    record = logging.makeLogRecord({"msg": "%s is gone", "args": (name,), "levelname": "INFO", "name": "n"})
    assert json.loads(_Json().format(record))["message"] == r"caf\udce9.db is gone"
    assert TextFormatter().format(record).endswith("is gone")


def test_what_is_written_comes_out_whole_and_in_order(unread: Unread) -> None:
    stream = os.fdopen(unread.writing, "w", closefd=False)
    unblocked = UnblockedStderr(stream)
    handler = logging.StreamHandler(unblocked)
    logger = logging.Logger("said")
    logger.addHandler(handler)
    for number in range(50):
        logger.info("log %d", number)
        print("print", number, file=unblocked)
    print("a question?", end=" ", flush=True, file=unblocked)
    text = b""
    expected = "".join(f"log {n}\nprint {n}\n" for n in range(50)) + "a question? "
    while len(text) < len(expected):
        text += os.read(unread.reading, ROOM)
    assert text.decode() == expected
    assert unblocked.end(PATIENCE)


def test_what_does_not_fit_goes_as_whole_lines(unread: Unread, caplog: pytest.LogCaptureFixture) -> None:
    unread.fill()
    stream = os.fdopen(unread.writing, "w", closefd=False)
    unblocked = UnblockedStderr(stream, most=100)
    for number in range(30):
        print("line", number, file=unblocked)
    assert not unblocked.drain(0.0)
    taken = os.read(unread.reading, ROOM)
    assert taken == b"." * ROOM
    text = b""
    while not unblocked.drain(0.01):
        pass
    text = os.read(unread.reading, ROOM)
    kept = text.count(b"\n")
    assert text.decode() == "".join(f"line {n}\n" for n in range(kept))
    assert [record.getMessage() for record in caplog.records] == [
        f"{30 - kept} lines of the log were dropped: stderr was not read"
    ]
    assert unblocked.end(PATIENCE)


def test_a_pipe_that_somebody_has_made_non_blocking_is_waited_for(unread: Unread) -> None:
    unread.fill()
    os.set_blocking(unread.writing, False)
    stream = os.fdopen(unread.writing, "w", closefd=False)
    unblocked = UnblockedStderr(stream)
    print("at last", file=unblocked)
    assert not unblocked.drain(0.01)
    while os.read(unread.reading, ROOM).strip(b".") != b"at last\n":
        pass
    assert unblocked.end(PATIENCE)


def test_a_stderr_that_is_gone_is_not_missed() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        unblocked = UnblockedStderr(stream)
        print("to nobody", file=unblocked)
        assert unblocked.end(PATIENCE)


def test_stderr_is_what_it_was_after_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    before = io.StringIO()
    monkeypatch.setattr(sys, "stderr", before)
    with unblocked_stderr():
        assert sys.stderr is not before
        print("inside", file=sys.stderr)
        with standard_streams():
            print("printed")
    assert sys.stderr is before
    assert before.getvalue() == "inside\nprinted\n"


def test_a_stderr_that_is_stuck_stays_away_after_the_block(unread: Unread, monkeypatch: pytest.MonkeyPatch) -> None:
    unread.fill()
    stuck = os.fdopen(unread.writing, "w", closefd=False)
    monkeypatch.setattr(sys, "stderr", stuck)
    monkeypatch.setattr("a2m_router.process.stderr._LAST_LINES", 0.01)
    with unblocked_stderr():
        print("inside", file=sys.stderr)
    assert sys.stderr is not stuck
    print("later", file=sys.stderr)  # does not block
    while os.read(unread.reading, ROOM).strip(b".") != b"inside\n":
        pass
