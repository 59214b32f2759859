"""One run of a2m-chaos: the schedule, what is counted, and what is said about it."""

import sys
import time
from collections.abc import Callable

import msgspec

from a2m_chaos.altering import Call, call_in
from a2m_chaos.faults import KINDS
from a2m_chaos.plan import Plan, PlanError
from a2m_chaos.schedule import Applied, Count, Schedule


class Run:
    """Decides about each call as it comes, once. Mutable state: the schedule's counts, kept in the plan's file.

    Args:
        say: takes one line for people.

    Raises PlanError for counts that cannot be kept where the plan says. If that comes later, people are told, and the
    run goes on: what it was begun for is not the counts.
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
        """The call that a message is, if it is one, and the fault that is to be done to it, which is now said."""
        call = call_in(message)
        if call is None:
            return None, None
        applied = self._schedule.next(call.method, message, time.monotonic() - self._began)
        if applied is not None:
            # before it is done, since this process may not live to see the end of it
            self._keep_counts()
            self.note(call, applied, KINDS[applied.fault.do].sentence)
        return call, applied

    def note(self, call: Call, applied: Applied, sentence: str) -> None:
        """Says something about a fault that is done to a call."""
        id = bytes(call.id).decode("utf-8", "replace")[:40]
        self.say(f"{call.method} {id} (call {applied.number}): {applied.fault.do}: {sentence}")

    def say(self, sentence: str) -> None:
        """Says something that is about no call."""
        self._say(sentence)

    def keep(self) -> None:
        """Keeps what was counted, at the end."""
        self._keep_counts()

    def _keep_counts(self) -> None:
        try:
            self._write_counts()
        except OSError as problem:
            self.say(f"counts: {self._plan.counts}: cannot be written any more: {problem.strerror}")

    def _write_counts(self) -> None:
        if self._plan.counts is not None:
            self._plan.counts.write_bytes(msgspec.json.encode(self._schedule.counts))


def to_stderr(sentence: str) -> None:
    """Says it under this program's name. One write, since the child writes to the same stream."""
    sys.stderr.write(f"a2m-chaos: {sentence}\n")
    sys.stderr.flush()


def _counts_of(plan: Plan) -> list[Count]:
    """What an earlier run has kept. Raises PlanError for a file of something else, which must not be written over."""
    if plan.counts is None:
        return []
    try:
        kept = plan.counts.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as problem:
        raise PlanError(f"counts: {plan.counts}: cannot be read: {problem.strerror}") from None
    try:
        # an empty one is what is left of a process that died while it wrote
        return msgspec.json.decode(kept, type=list[Count]) if kept else []
    except (msgspec.MsgspecError, UnicodeDecodeError):
        raise PlanError(f"counts: {plan.counts}: is no file of counts; name one that a2m-chaos may write to") from None
