"""The report of a run, and whether memory stayed flat."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import psutil

# more findings of one server add nothing new
MOST_FINDINGS: Final = 20
# The bytes that router and stores together may grow by from their second quarter to their last. All records are
# forgotten again and again, and other growth is bounded, too: five page caches of SQLite (2 MiB a connection, filled as
# the files grow by tombstones) and the slack of five allocators.
FLAT: Final = 32 * 2**20


class Wrong(Exception):
    """A finding; the message is one sentence."""


class Finding(msgspec.Struct, frozen=True):
    """A finding: the number of messages before it, a description, and the messages that may have caused it."""

    door: str
    number: int
    what: str
    messages: tuple[bytes, ...]


class Report(msgspec.Struct):
    """The report on one share. `resident` are the bytes that its processes held, sampled over the run."""

    door: str
    messages: int = 0
    seconds: float = 0.0
    answers: Counter[str] = msgspec.field(default_factory=Counter)
    findings: list[Finding] = []
    resident: list[int] = []

    def find(self, what: str, *came: bytes) -> None:
        self.findings.append(Finding(self.door, self.messages, what, came))

    @property
    def is_hopeless(self) -> bool:
        return len(self.findings) >= MOST_FINDINGS


Advance = Callable[[int], None]


def nowhere(_: int) -> None:
    """Ignore the progress."""


def resident(pid: int) -> int:
    """Return the bytes of memory of a process and its children."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))
    except psutil.NoSuchProcess:
        return 0


def growth(samples: Sequence[int]) -> int:
    """Return the bytes between the minimum of the second quarter, when caches are warm, and the minimum of the last."""
    quarter = len(samples) // 4
    if quarter == 0:
        return 0
    return min(samples[-quarter:]) - min(samples[quarter : 2 * quarter])


def check_memory(report: Report) -> None:
    grown = growth(report.resident)
    if grown > FLAT:
        report.find(f"memory grew by {grown / 2**20:.0f} MiB after the warm-up; {FLAT // 2**20} are explained")
