"""Claims: the right to change some ids, keys and groups, taken whole and in order.

Rules:
- a write and a move hold a claim on each record's id, its owner's key and its owner's group; the reconciler, on its id
  and its owner's key. A forget claims nothing;
- a claim's names are taken one after the other in sorted order, so two claims can never wait for each other in a ring;
- a claim may outlive the call that took it: where a tier's answer is still open, it is kept until that is settled.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import anyio

from a2m_router.catalog.entries import Entry

Name = tuple[str, str, str]

T = TypeVar("T")


def id_name(id: str) -> Name:
    """What a claim on a record is called."""
    return ("id", "", id)


def key_name(owner: str | None, key: str) -> Name:
    """What a claim on an owner's key is called."""
    return ("key", _owner(owner), key)


def group_name(owner: str | None, group: str) -> Name:
    """What a claim on an owner's group is called."""
    return ("group", _owner(owner), group)


def record_names(id: str, owner: str | None, key: str | None) -> list[Name]:
    """What is claimed by whoever changes a record, or a copy of it, and not its group: its id, its owner's key."""
    return [id_name(id)] if key is None else [id_name(id), key_name(owner, key)]


def names_of(entry: Entry) -> list[Name]:
    """What is claimed by whoever changes a record: its id, its owner's key, its owner's group."""
    names = record_names(entry.id, entry.owner, entry.key)
    if entry.group is not None:
        names.append(group_name(entry.owner, entry.group))
    return names


def _owner(owner: str | None) -> str:
    return "" if owner is None else "=" + owner


class Claim:
    """Names that are held until `release`, which may be called more than once."""

    def __init__(self, claims: "Claims", names: tuple[Name, ...]) -> None:
        self._claims = claims
        self._names = names

    def release(self) -> None:
        names, self._names = self._names, ()
        self._claims._release(names)

    def __repr__(self) -> str:
        return f"<Claim on {len(self._names)} names>"


class Claims:
    """All claims of one router. Its one piece of state is who waits for each held name, first come first served."""

    def __init__(self) -> None:
        self._waiting: dict[Name, deque[anyio.Event]] = {}
        self._on_release: list[Callable[[frozenset[Name]], None]] = []

    async def take(self, names: Iterable[Name]) -> Claim:
        """A claim on all of `names`, once they are free. Cancelling it leaves nothing held."""
        held: list[Name] = []
        try:
            for name in sorted(set(names)):
                await self._take(name)
                held.append(name)
        except BaseException:
            self._release(tuple(held))
            raise
        return Claim(self, tuple(held))

    async def take_touched(
        self, look: Callable[[], tuple[set[Name], T]], seconds: Callable[[], float]
    ) -> tuple[Claim, T]:
        """A claim on all that is touched by what `look` finds, and what it finds under that claim: it looks again,
        since something else may be touched by the time that the names are free.

        Raises TimeoutError if they are not within `seconds`, and what `look` raises; then nothing is held.
        """
        names, found = look()
        while True:
            with anyio.fail_after(seconds()):
                claim = await self.take(names)
            try:
                needed, found = look()
            except BaseException:
                claim.release()
                raise
            if needed <= names:
                return claim, found
            claim.release()
            names = needed

    def take_if_free(self, names: Iterable[Name]) -> Claim | None:
        """A claim on all of `names` if none of them is held, else None. Never waits."""
        wanted = tuple(sorted(set(names)))
        if any(name in self._waiting for name in wanted):
            return None
        self._waiting.update((name, deque()) for name in wanted)
        return Claim(self, wanted)

    @contextmanager
    def on_release(self, notify: Callable[[frozenset[Name]], None]) -> Iterator[None]:
        """Call `notify` with the names that are let go, for those who passed over what they could not claim."""
        self._on_release.append(notify)
        try:
            yield
        finally:
            self._on_release.remove(notify)

    async def _take(self, name: Name) -> None:
        waiting = self._waiting.get(name)
        if waiting is None:
            self._waiting[name] = deque()
            return
        turn = anyio.Event()
        waiting.append(turn)
        try:
            await turn.wait()
        except BaseException:
            if turn.is_set():  # the name was handed over while the wait was being cancelled
                self._release((name,))
            else:
                waiting.remove(turn)
            raise

    def _release(self, names: tuple[Name, ...]) -> None:
        for name in names:
            waiting = self._waiting[name]
            if waiting:
                waiting.popleft().set()
            else:
                del self._waiting[name]
        if names:
            for notify in list(self._on_release):
                notify(frozenset(names))
