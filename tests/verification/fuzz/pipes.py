"""Fuzzes a server on pipes: many messages under way, cut and joined as pipes do."""

import queue
import random
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from tests.verification.fuzz.generating import MAX_MESSAGE, Messages, pieces_of
from tests.verification.fuzz.owing import Pending, is_blank, owed, read_answer, shown
from tests.verification.fuzz.reporting import Advance, Report, Wrong, check_memory, nowhere, resident
from tests.verification.fuzz.serving import CANARY, CANARY_ID, FEDERATION, PATIENCE, check_alive, kill, program

# the messages under way to the server
WINDOW: Final = 50


def fuzz_stdio(
    seed: int,
    count: int,
    advance: Advance = nowhere,
    *,
    command: Sequence[str] | None = None,
    patience: float = PATIENCE,
) -> Report:
    """Send `count` messages to a server on pipes, WINDOW of them under way; the default server is the router."""
    report = Report("stdio")
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "federation.toml").write_text(FEDERATION)
        pipes = Pipes(command or [program("a2m-router"), "--log-level", "warning"], Path(folder), patience)
        try:
            _Piped(seed, pipes, report).run(count, advance)
            pipes.end()
        except Wrong as wrong:
            report.find(str(wrong))
        finally:
            said = pipes.kill()
        if "Traceback" in said:
            report.find(f"a traceback on stderr: {said[-4_000:]}")
    check_memory(report)
    report.seconds = time.monotonic() - began
    return report


class Pipes:
    """A server on pipes, in its own folder. A thread reads its stdout, so that the server never has to wait."""

    def __init__(self, command: Sequence[str], folder: Path, patience: float) -> None:
        self._stderr = (folder / "stderr").open("w+b")
        self._process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr
        )
        self._patience = patience
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(b"")

    def send(self, piece: bytes) -> None:
        """Send bytes. Raises Wrong if the server has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(piece)
            self._process.stdin.flush()
        except OSError as problem:
            raise Wrong(f"it does not read any more: {problem}") from None

    def line(self) -> bytes:
        """Return the next line of stdout. Raises Wrong if none comes."""
        try:
            line = self._lines.get(timeout=self._patience)
        except queue.Empty:
            raise Wrong(f"no answer within {self._patience:g} s") from None
        if not line:
            raise Wrong("its stdout has ended")
        if not line.endswith(b"\n"):
            raise Wrong(f"half a line: {shown(line)}")
        return line[:-1]

    def end(self) -> None:
        """Close stdin. Raises Wrong unless the server then ends with status 0, and without another answer."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            status = self._process.wait(self._patience)
        except subprocess.TimeoutExpired:
            raise Wrong(f"it did not end within {self._patience:g} s of the end of its stdin") from None
        if status:
            raise Wrong(f"it ended with status {status}")
        while line := self._lines.get(timeout=self._patience):
            if read_answer(line.removesuffix(b"\n")).kind != "notification":
                raise Wrong(f"an answer that nobody asked: {shown(line)}")

    def kill(self) -> str:
        """Kill the process if it runs; return all that it wrote to stderr."""
        kill(self._process)
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        with self._stderr:
            self._stderr.seek(0)
            return self._stderr.read().decode("utf-8", "replace")


class _Piped:
    """One run over pipes: the last messages, and the answers that they must get."""

    def __init__(self, seed: int, pipes: Pipes, report: Report) -> None:
        self._chance = random.Random(f"{seed} stdio")
        self._source = Messages(self._chance)
        self._pipes = pipes
        self._report = report
        self._pending = Pending()

    def run(self, count: int, advance: Advance) -> None:
        """Send and read everything; findings go to the report. Raises Wrong if the run cannot go on."""
        report = self._report
        batches = 0
        checked = 0
        while report.messages < count and not report.is_hopeless:
            batch = [self._source.next() for _ in range(min(self._chance.randint(1, 20), count - report.messages))]
            report.messages += len(batch)
            stream = b"".join(message + b"\n" for message in batch)
            for line in stream.split(b"\n"):
                if (len(line) > MAX_MESSAGE or not is_blank(line)) and (due := owed(line)) is not None:
                    self._pending.add(due)
            for piece in pieces_of(stream, self._chance):
                self._pipes.send(piece)
            self._take(WINDOW)
            batches += 1
            if batches % 20 == 0:
                report.resident.append(resident(self._pipes.pid))
                advance(report.messages)
            if report.messages - checked >= CANARY:
                checked = report.messages
                self._check_alive()
        self._check_alive()

    def _take(self, most: int) -> None:
        """Read answers until at most so many are outstanding."""
        while len(self._pending) > most and not self._report.is_hopeless:
            try:
                line = self._pipes.line()
            except Wrong as wrong:
                self._report.find(str(wrong), *self._pending.messages())
                raise
            self._note(line)

    def _note(self, line: bytes) -> None:
        try:
            answer = read_answer(line)
            self._report.answers[answer.kind] += 1
            if answer.kind != "notification":
                asked = self._pending.take(answer.id)
                if answer.fault is not None:
                    self._report.find(answer.fault, *asked)
        except Wrong as wrong:
            self._report.find(str(wrong), *self._pending.messages())

    def _check_alive(self) -> None:
        self._take(0)
        if self._report.is_hopeless:
            return
        sent = self._pending.messages()
        try:
            self._pending.settle()
        except Wrong as wrong:
            self._report.find(str(wrong), *sent)
        check_alive(self._ask, self._report)

    def _ask(self, message: bytes) -> Any:
        self._pipes.send(message + b"\n")
        while True:
            line = self._pipes.line()
            answer = read_answer(line)
            if answer.kind == "notification":
                continue
            if answer.id != CANARY_ID:
                raise Wrong(f"an answer to {shown(answer.id)}, which nobody asked")
            return msgspec.json.decode(line)
