"""Readers see one home: which copies a read may accept, and when a superseded copy may go (as in RCU).

A read asks several tiers at different moments while records move between them. It accepts a copy in the home that the
record had when the read began, and a copy that a move left behind is removed only when every read that began before the
move has ended. So a record can neither be missed by a read nor be seen in two places; and what a tier held before the
record came to live there, an older copy or one that it altered, is not taken for it.

A record that came to be since the read began had no home then, and is not shown. What was found under its id may be
another, forgotten meanwhile, which nobody may take for it: not to show it to whom it belongs, not to count it, and not
to forget the one for what the other said.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import anyio


class Reading:
    """One read, from its first question to its answer, or a part of one."""

    def __init__(self, began: int) -> None:
        self.began = began
        self.ended = anyio.Event()


class Readers:
    """The reads under way, and the homes that records had before the changes these reads may have missed."""

    def __init__(self) -> None:
        self._changes = 0
        self._reads: dict[Reading, None] = {}  # in the order of their beginnings
        # id -> (number of the change, home before it), in order; before a record came to be it had none
        self._left: dict[str, deque[tuple[int, str | None]]] = {}
        self._order: deque[tuple[int, str]] = deque()  # the same changes, (number, id), oldest first

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Enter before the first tier is asked; leave when the answer is complete."""
        with self._under_way(Reading(self._changes)) as read:
            yield read

    @contextmanager
    def watching(self) -> Iterator[Reading]:
        """For `is_same`: enter when a record is known, leave when that has been asked. It holds up no removal."""
        read = Reading(self._changes)
        read.ended.set()
        with self._under_way(read):
            yield read

    @contextmanager
    def _under_way(self, read: Reading) -> Iterator[Reading]:
        self._reads[read] = None
        try:
            yield read
        finally:
            del self._reads[read]
            read.ended.set()
            self._forget_changes_before(next((oldest.began for oldest in self._reads), self._changes))

    def moved(self, id: str, home: str) -> None:
        """Record that `id` has just left `home`; called in the same breath as the commit."""
        self._change(id, home)

    def born(self, id: str) -> None:
        """Record that there has just come to be a record `id`, perhaps not the first of that id; in the same breath."""
        self._change(id, None)

    def _change(self, id: str, before: str | None) -> None:
        self._changes += 1
        if self._reads:
            self._left.setdefault(id, deque()).append((self._changes, before))
            self._order.append((self._changes, id))

    def accepts(self, read: Reading, id: str, home: str, found_in: str) -> bool:
        """Whether `read` may show the copy of `id` that it found in `found_in`, where `home` is its home now."""
        homes = self._homes_since(read, id)
        return None not in homes and found_in == (homes[0] if homes else home)

    def is_same(self, read: Reading, id: str) -> bool:
        """Whether the record `id`, if there is one, is none that came to be since `read` began."""
        return None not in self._homes_since(read, id)

    def _homes_since(self, read: Reading, id: str) -> list[str | None]:
        """The homes that a record has left since the read began."""
        return [home for number, home in self._left.get(id, ()) if number > read.began]

    async def grace(self) -> None:
        """Return when every read that is under way now has ended."""
        for read in list(self._reads):
            await read.ended.wait()

    def _forget_changes_before(self, oldest: int) -> None:
        # no read is left that began before these changes, so nobody may accept the home they left
        while self._order and self._order[0][0] <= oldest:
            _, id = self._order.popleft()
            homes = self._left[id]
            homes.popleft()
            if not homes:
                del self._left[id]
