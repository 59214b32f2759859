"""Group commit: the calls that wait together share one transaction and one sync.

Rules:
- calls run in the order in which they came;
- a call that fails rolls back its own changes, and no other call's;
- a call that writes gets its result only when its changes are on disk;
- if the disk accepts no writes, each call that writes gets an error. Calls that only read get their results.
"""

import errno
from collections.abc import Callable, Sequence
from typing import Any, Final

import apsw
import msgspec

from a2m_router.protocol.wire.errors import DISK_FULL, A2MError, Code, disk_failed, disk_reason
from a2m_store.store import Store


class Call(msgspec.Struct, frozen=True):
    """One call: the function that runs it, and whether it writes. The store must keep the changes that it confirms."""

    run: Callable[[], Any]
    writes: bool


def carry_out(store: Store, calls: Sequence[Call], *, durable: bool) -> list[Any]:
    """Run the calls, and return for each its result, or the exception to answer it with.

    Blocks until the changes are on disk, if `durable`.
    """
    try:
        outcomes = _together(store, calls)
    except (apsw.Error, OSError) as problem:
        return _nothing_kept(store, calls, problem)
    if durable and any(call.writes for call in calls):
        try:
            store.sync()
        except OSError as problem:
            unsure = _unsure(_reason(problem))
            return [unsure if call.writes else outcome for call, outcome in zip(calls, outcomes, strict=True)]
    return outcomes


def _together(store: Store, calls: Sequence[Call]) -> list[Any]:
    try:
        with store.transaction() as connection:
            return [_unless_it_wrote(connection, call) for call in calls]
    except _Unfinished:
        # a savepoint makes the index of words flush its buffer: only a batch that needs savepoints pays for them
        with store.transaction() as connection:
            return [_in_savepoint(store, connection, call) for call in calls]


class _Unfinished(Exception):
    """A call failed after it had begun to write."""


def _unless_it_wrote(connection: apsw.Connection, call: Call) -> Any:
    changes = connection.total_changes()
    outcome = _attempt(connection, call.run)
    if isinstance(outcome, Exception) and connection.total_changes() != changes:
        raise _Unfinished
    return outcome


def _in_savepoint(store: Store, connection: apsw.Connection, call: Call) -> Any:
    def run() -> Any:
        with store.transaction():
            return call.run()

    return _attempt(connection, run)


# the disk causes these, not the call
_FATAL: Final = (OSError, apsw.FullError, apsw.IOError, apsw.NoMemError, apsw.CorruptError, apsw.ReadOnlyError)


def _attempt(connection: apsw.Connection, run: Callable[[], Any]) -> Any:
    try:
        return run()
    except A2MError as error:
        return error
    except _FATAL:
        raise
    except Exception as problem:
        if not connection.in_transaction:
            raise
        return problem


def _nothing_kept(store: Store, calls: Sequence[Call], problem: Exception) -> list[Any]:
    lost = _lost(problem)
    with store.reading() as connection:
        return [lost if call.writes else _look(connection, call) for call in calls]


def _lost(problem: Exception) -> A2MError:
    """Return the error for a call of which nothing was stored."""
    if isinstance(problem, OSError) and problem.errno in (errno.EBUSY, errno.ESTALE):
        return disk_failed(problem, "the store's")
    reason = _reason(problem)
    return A2MError(
        Code.INTERNAL_ERROR,
        f"nothing of this call was stored: {reason}; free some disk space, then repeat the call",
        {"reason": reason},
    )


def _unsure(reason: str) -> A2MError:
    return A2MError(
        Code.INTERNAL_ERROR,
        f"the call was carried out, but the disk did not confirm the write: {reason}; check the disk before you rely "
        "on this store",
        {"reason": reason},
    )


def _look(connection: apsw.Connection, call: Call) -> Any:
    try:
        return _attempt(connection, call.run)
    except (apsw.Error, OSError) as problem:
        return A2MError(Code.INTERNAL_ERROR, f"the store cannot be read: {problem}", {"reason": _reason(problem)})


def _reason(problem: Exception) -> str:
    if isinstance(problem, OSError):
        return disk_reason(problem)
    return DISK_FULL if isinstance(problem, apsw.FullError) else str(problem)
