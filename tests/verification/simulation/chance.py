"""Makes all chance follow from a seed: ids, jitter, the order of tasks, time.

The order of a set of strings differs between processes unless PYTHONHASHSEED is given; the command line sets it.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from heapq import heappush
from itertools import count
from random import Random
from types import SimpleNamespace
from unittest.mock import patch

import trio
import trio._core._run
from trio._core._run import Deadlines

import a2m_router.catalog.lineage
import a2m_router.daemon.app
import a2m_router.placement.planning
import a2m_router.tiers.gateway
import a2m_store.identifiers
import a2m_store.schema
import tests.servers.core_only
from tests.support.federated import START, Clock


class JumpingClock(Clock):
    """Follows the event loop's clock, and moves on at every look."""

    def __call__(self) -> int:
        self.now = max(self.now + 1, self.look())
        return self.now

    def look(self) -> int:
        """Return the time without moving it."""
        return max(self.now, START + int(trio.current_time() * 1000))


@contextmanager
def following(seed: int, clock: Clock) -> Iterator[Random]:
    """Make all chance within the block follow from the seed; yield a source of more."""
    chance = Random(f"router {seed}")
    order = Random(f"order {seed}")
    with ExitStack() as patches:

        def put(owner: object, name: str, value: object) -> None:
            patches.enter_context(patch.object(owner, name, value))

        new_id = _numbered("r")
        put(a2m_router.daemon.app, "new_id", new_id)
        put(a2m_router.placement.planning, "new_id", new_id)
        numbered = _numbered("u")
        uuid = SimpleNamespace(uuid4=numbered)
        put(a2m_store.schema, "uuid", uuid)
        put(a2m_router.tiers.gateway, "uuid", uuid)
        put(tests.servers.core_only, "uuid", uuid)
        put(tests.servers.core_only, "time", SimpleNamespace(time=lambda: clock() / 1000))
        put(a2m_router.catalog.lineage, "secrets", SimpleNamespace(token_hex=lambda size: numbered()))
        put(a2m_store.identifiers, "secrets", SimpleNamespace(token_hex=lambda size: numbered()))
        # with these two, trio runs the tasks of each round in an order that follows from the seed
        put(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
        put(trio._core._run, "_r", order)
        # of scopes with one deadline, the first made ends first, independent of memory addresses
        turns = count()
        put(Deadlines, "add", lambda deadlines, *deadline: _add_deadline(deadlines, next(turns), *deadline))
        yield chance


def _add_deadline(deadlines: Deadlines, turn: int, deadline: float, scope: trio.CancelScope) -> None:
    heappush(deadlines._heap, (deadline, turn, scope))
    deadlines._active += 1


def _numbered(prefix: str) -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"{prefix}{next(numbers):04}"
