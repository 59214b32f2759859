"""ActiveReads see one home: which copies a read may accept, and when a superseded copy may go (as in RCU).

A read asks several tiers at different moments while records move between them. It accepts a copy in the home that the
record had when the read began, and a copy that a move left behind is removed only when every read that began before the
move has ended. So a record can neither be missed by a read nor be seen in two places; and what a tier held before the
record came to live there, an older copy or one that it altered, is not taken for it.

A record that was written since the read began is not shown. What was found under its id may be another one, forgotten
meanwhile, which nobody may take for it: not to show it to whom it belongs, not to count it, and not to forget the one
for what the other said.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from a2m_router.catalog.entries import Entry


class Reading:
    """One read, from its first question to its answer. `newest` is the number of the newest record there was then."""

    def __init__(self, began: int, newest: int) -> None:
        self.began = began
        self.newest = newest
        self.ended = anyio.Event()


class ActiveReads:
    """The reads under way, and the homes that records had before the moves these reads may have missed.

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
        """Enter before the first tier is asked; leave when the answer is complete."""
        read = Reading(self._moves, self._newest())
        self._reads[read] = None
        try:
            yield read
        finally:
            del self._reads[read]
            read.ended.set()
            self._forget_moves_before(next((oldest.began for oldest in self._reads), self._moves))

    def moved(self, id: str, home: str) -> None:
        """Record that `id` has just left `home`; called in the same breath as the commit."""
        self._moves += 1
        if self._reads:
            self._left.setdefault(id, deque()).append((self._moves, home))
            self._order.append((self._moves, id))

    def accepts(self, read: Reading, entry: Entry, found_in: str) -> bool:
        """Whether `read` may show the copy that it found in `found_in` for the record, whose entry is as it is now."""
        left = self._left_since(read, entry.id)
        return entry.seq <= read.newest and found_in == (entry.home if left is None else left)

    def left(self, read: Reading, home: str) -> list[str]:
        """The ids of what has moved since `read` began, and lived in `home` then."""
        return [id for id in self._left if self._left_since(read, id) == home]

    def _left_since(self, read: Reading, id: str) -> str | None:
        """The home that the record has left since `read` began, and of several the first; None if it has not moved."""
        return next((home for number, home in self._left.get(id, ()) if number > read.began), None)

    async def grace(self) -> None:
        """Return when every read that is under way now has ended."""
        for read in list(self._reads):
            await read.ended.wait()

    def _forget_moves_before(self, oldest: int) -> None:
        # no read is left that began before these moves, so nobody may accept the home they left
        while self._order and self._order[0][0] <= oldest:
            _, id = self._order.popleft()
            homes = self._left[id]
            homes.popleft()
            if not homes:
                del self._left[id]
