"""Claims: the right to change some ids, keys and groups.

Rules:
- a write and a move claim each record's id, its owner's key and its owner's group. The reconciler claims a record's id
  and its owner's key. A forget claims nothing;
- a claim takes its names one after the other in sorted order, so two claims can never wait for each other in a ring;
- a claim may outlive the call that took it: while a call to a tier is in doubt, the claim is kept until it is resolved.
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
    """Return the name that claims a record."""
    return ("id", "", id)


def key_name(owner: str | None, key: str) -> Name:
    """Return the name that claims an owner's key."""
    return ("key", _owner(owner), key)


def group_name(owner: str | None, group: str) -> Name:
    """Return the name that claims an owner's group."""
    return ("group", _owner(owner), group)


def record_names(id: str, owner: str | None, key: str | None) -> list[Name]:
    """Return the names to claim for a change of a record or a copy without its group: its id, its owner's key."""
    return [id_name(id)] if key is None else [id_name(id), key_name(owner, key)]


def names_of(entry: Entry) -> list[Name]:
    """Return the names to claim for a change of a record: its id, its owner's key, its owner's group."""
    names = record_names(entry.id, entry.owner, entry.key)
    if entry.group is not None:
        names.append(group_name(entry.owner, entry.group))
    return names


def _owner(owner: str | None) -> str:
    return "" if owner is None else "=" + owner


class Claim:
    """Names that are held until `release`."""

    def __init__(self, claims: "Claims", names: tuple[Name, ...]) -> None:
        self._claims = claims
        self._names = names

    def release(self) -> None:
        """Release the names. It is safe to call this more than once."""
        names, self._names = self._names, ()
        self._claims._release(names)

    def __repr__(self) -> str:
        return f"<Claim on {len(self._names)} names>"


class Claims:
    """All claims of one router. Its state is a queue of waiting claims for each held name, first come first served."""

    def __init__(self) -> None:
        self._waiting: dict[Name, deque[anyio.Event]] = {}
        self._on_release: list[Callable[[frozenset[Name]], None]] = []

    async def take(self, names: Iterable[Name]) -> Claim:
        """Claim all of `names`, waiting until they are free. A cancelled wait leaves nothing held."""
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
        """Claim all names that `look` returns; return the claim, and what `look` found under it.

        If the claim has to wait, the records may change meanwhile: `look` runs again under the claim, and if it then
        needs other names, the claim is taken anew.

        Args:
            look: returns the names to claim, and its finding.
            seconds: returns for how many seconds one wait may last.

        Raises:
            TimeoutError: the names did not become free in time. Nothing is held, nor if `look` raises.
        """
        names, found = look()
        free = self.take_if_free(names)
        if free is not None:
            return free, found
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
        """Claim all of `names` if none of them is held; otherwise return None. Never waits."""
        wanted = tuple(sorted(set(names)))
        if any(name in self._waiting for name in wanted):
            return None
        self._waiting.update((name, deque()) for name in wanted)
        return Claim(self, wanted)

    @contextmanager
    def on_release(self, notify: Callable[[frozenset[Name]], None]) -> Iterator[None]:
        """Call `notify` with released names while in the block, for tasks that skipped what they could not claim."""
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
