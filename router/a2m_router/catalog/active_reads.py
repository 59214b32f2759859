"""Active reads: which copies a read may accept, and when a superseded copy may be deleted (read-copy-update).

A read calls several tiers at different moments while records move between them. It accepts a copy in the home that the
record had when the read began. A copy that a move left behind is deleted after the grace period: when every read that
began before the move has ended. So a read neither misses a record nor finds it in two places. Nor does it accept a copy
that a tier held before the record came to live there, whether an older state or one that the tier altered.

A record that was written after the read began is not shown. The copy found under its id may belong to an earlier
record with the same id, which was forgotten meanwhile. That content must not be shown to the owner of the new record,
must not count as an access to it, and must not cause a forget by content to delete it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from a2m_router.catalog.entries import Entry


class Reading:
    """One read, from its first call to its result. `newest` is the number of the newest record when it began."""

    def __init__(self, began: int, newest: int) -> None:
        self.began = began
        self.newest = newest
        self.ended = anyio.Event()


class ActiveReads:
    """The active reads, and the homes that records had before the moves that these reads may have missed.

    Args:
        newest: the number of the newest record, see `Entry.seq`.
    """

    def __init__(self, newest: Callable[[], int]) -> None:
        self._newest = newest
        self._moves = 0
        self._reads: dict[Reading, None] = {}  # in the order of their beginnings
        self._left: dict[str, deque[tuple[int, str]]] = {}  # id -> (number of the move, home before it), in order
        self._order: deque[tuple[int, str]] = deque()  # the same moves, (number, id), oldest first

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Register a read: enter before the first call to a tier, leave when the result is complete."""
        read = Reading(self._moves, self._newest())
        self._reads[read] = None
        try:
            yield read
        finally:
            del self._reads[read]
            read.ended.set()
            self._forget_moves_before(next((oldest.began for oldest in self._reads), self._moves))

    def moved(self, id: str, home: str) -> None:
        """Note that `id` has just left `home`. Call it right after the commit, with no await between them."""
        self._moves += 1
        if self._reads:
            self._left.setdefault(id, deque()).append((self._moves, home))
            self._order.append((self._moves, id))

    def accepts(self, read: Reading, entry: Entry, found_in: str) -> bool:
        """Return whether `read` may show the copy found in `found_in`. `entry` is the record's present entry."""
        left = self._left_since(read, entry.id)
        return entry.seq <= read.newest and found_in == (entry.home if left is None else left)

    def left(self, read: Reading, home: str) -> list[str]:
        """Return the ids of the records that lived in `home` when `read` began and have moved since."""
        return [id for id in self._left if self._left_since(read, id) == home]

    def _left_since(self, read: Reading, id: str) -> str | None:
        """Return the first home that the record has left since `read` began; None if it has not moved."""
        return next((home for number, home in self._left.get(id, ()) if number > read.began), None)

    async def grace(self) -> None:
        """Wait for the grace period: until every read that is active now has ended."""
        for read in list(self._reads):
            await read.ended.wait()

    def _forget_moves_before(self, oldest: int) -> None:
        # no active read began before these moves, so no read may accept the homes that they left
        while self._order and self._order[0][0] <= oldest:
            _, id = self._order.popleft()
            homes = self._left[id]
            homes.popleft()
            if not homes:
                del self._left[id]
