"""One run of a2m-chaos: the schedule, the counts and the log."""

import sys
import time
from collections.abc import Callable

import msgspec

from a2m_chaos.altering import Call, call_in
from a2m_chaos.faults import KINDS
from a2m_chaos.plan import Plan, PlanError
from a2m_chaos.schedule import Applied, Count, Schedule
from a2m_router.process.log_text import text_line


class Run:
    """The decisions of one run. Mutable state: the counts of the schedule, stored in the plan's file of counts.

    Args:
        plan: the plan.
        say: called with each message for the log.

    Raises:
        PlanError: the file of counts cannot be written. If a later write fails, that is only logged.
    """

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._schedule = Schedule(plan, _counts_of(plan))
        self._say = say
        self._began = time.monotonic()
        try:
            self._write_counts()
        except OSError as problem:
            raise PlanError(f"counts: {plan.counts}: cannot be written: {problem.strerror}") from None

    def decide(self, message: bytes) -> tuple[Call | None, Applied | None]:
        """Return the call in a message, if it is one, and the fault to apply to it, which is logged."""
        call = call_in(message)
        if call is None:
            return None, None
        applied = self._schedule.next(call.method, message, time.monotonic() - self._began)
        if applied is not None:
            # stored before the fault: it may end this process
            self._keep_counts()
            self.note(call, applied, KINDS[applied.fault.do].sentence)
        return call, applied

    def note(self, call: Call, applied: Applied, sentence: str) -> None:
        """Log a sentence about a fault that is applied to a call."""
        id = bytes(call.id).decode("utf-8", "replace")[:40]
        self.say(f"method={call.method} id={id} call={applied.number} fault={applied.fault.do} {sentence}")

    def say(self, sentence: str) -> None:
        """Log a sentence."""
        self._say(sentence)

    def keep(self) -> None:
        """Store the counts, at the end."""
        self._keep_counts()

    def _keep_counts(self) -> None:
        try:
            self._write_counts()
        except OSError as problem:
            self.say(f"counts={self._plan.counts} no longer written: {problem.strerror}")

    def _write_counts(self) -> None:
        if self._plan.counts is not None:
            self._plan.counts.write_bytes(msgspec.json.encode(self._schedule.counts))


def to_stderr(sentence: str) -> None:
    """Write a log line to stderr, in the text form of the router. One write, because the child shares the stream."""
    sys.stderr.write(f"{text_line(time.time(), 'info', sentence)}\n")
    sys.stderr.flush()


def _counts_of(plan: Plan) -> list[Count]:
    """Return the counts of an earlier run. Raises PlanError for a file of another kind: it must not be overwritten."""
    if plan.counts is None:
        return []
    try:
        kept = plan.counts.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise PlanError(f"counts: {plan.counts}: cannot be read: {problem.strerror}") from None
    try:
        # a process that dies while it writes the counts leaves an empty file
        return msgspec.json.decode(kept, type=list[Count]) if kept else []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise PlanError(
            f"counts: {plan.counts}: not a file of counts; name a file that a2m-chaos may overwrite"
        ) from None
