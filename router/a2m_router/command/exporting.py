"""`a2m export`: every record as a line of JSON, as the server tells it, after a line that says what this is.

What is held at once is bounded where the server can be read in pages (a2m-router and a2m-store say that they can). The
protocol itself has none: elsewhere the timeline is read conversation by conversation, or whole where there are few
records; a part that is too long for one message is read tier by tier. A record that moves meanwhile may then come
twice, which `a2m import` does not mind.
"""

import os
import stat
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, Final

import anyio
import msgspec
from msgspec import Raw

from a2m_router.command.peer import PatientPeer
from a2m_router.command.running import say
from a2m_router.protocol.client.client import AnswerTooLong, ConnectionLost
from a2m_router.protocol.client.http_client import HttpFailure
from a2m_router.protocol.client.results import BadAnswer, Degraded, Session, Tier
from a2m_router.protocol.wire.capabilities import PROTOCOL
from a2m_router.protocol.wire.errors import STOPPING, A2MError

FORMAT: Final = "a2m-export"
VERSION: Final = 1

_PAGE: Final = 500
# so many records are read at once
_FEW: Final = 2000
# a server that is away is waited for so long, with so long between two questions, seconds
_PATIENCE: Final = 60.0
_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 2.0

Take = Callable[[list[Raw]], Awaitable[None]]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `records` is how many the server counted, None where it does not."""

    format: str = FORMAT
    version: int = VERSION
    server: str | None = None
    records: int | None = None


class Incomplete(Exception):
    """Not everything could be exported; a sentence."""


class Export:
    """The records of one server, to the byte. `open` comes first.

    `header` and the records that `copy` hands on are all there is to an export.
    """

    def __init__(self, asking: PatientPeer, owner: str | None) -> None:
        self.header = Header()
        self._asking = asking
        self._owner = owner
        self._described = _Described(name="")

    async def open(self) -> None:
        """Ask what there is."""
        self._described = described = await self._asking.read(
            "memory/describe", _Described, protocol=PROTOCOL, owner=self._owner
        )
        counted = None if described.tiers is None else sum(tier.count for tier in self._tiers)
        self.header = Header(
            server=described.name, records=_of_store(described.store).records if counted is None else counted
        )

    async def copy(self, take: Take) -> None:
        """Hands every record to `take`, some at a time; oldest first within each conversation at least.

        Raises Incomplete where a tier does not answer.
        """
        counted = self.header.records
        if _of_store(self._described.store).pages:
            await self._copy_pages(take)
        elif self._has_sessions and (counted is None or counted > _FEW):
            await self._copy_conversations(take)
        else:
            await self._copy_part(take)

    @property
    def _tiers(self) -> list[Tier]:
        """Those that the server writes to; what is mounted belongs to somebody else."""
        return [tier for tier in self._described.tiers or () if not tier.mount]

    @property
    def _has_sessions(self) -> bool:
        return "sessions" in self._described.capabilities

    async def _copy_pages(self, take: Take) -> None:
        after: str | None = None
        size = _PAGE
        while True:
            try:
                page = await self._page(size, after)
            except AnswerTooLong:
                # a page of long records may be too long for one message
                if size == 1:
                    raise
                size //= 2
                continue
            await take(page.records)
            if page.next is None:
                return
            after = page.next
            size = min(2 * size, _PAGE)

    async def _page(self, size: int, after: str | None) -> "_Page":
        """The page behind `after`. A cursor outlives the server: one that is away, or says that it stops, is waited for
        until it has been started again."""
        until, wait = -inf, _FIRST_WAIT
        while True:
            try:
                return await self._timeline(page=size, after=after)
            except (ConnectionLost, A2MError) as problem:
                now = anyio.current_time()
                if self._asking.lost.is_set() or not _is_restart(problem, is_known=until > -inf):
                    raise
                if until == -inf:
                    until = now + _PATIENCE
                    say(f"the export waits for the server, for {_PATIENCE:.0f} s at most, and then goes on: {problem}")
                if now >= until:
                    raise
                await anyio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)

    async def _copy_conversations(self, take: Take) -> None:
        """Each conversation, in the order in which they were opened; then the records of none."""
        found = (await self._asking.read("memory/session/list", _Sessions, owner=self._owner)).sessions
        found.sort(key=lambda session: session.opened_at or "")
        # owners may have conversations of one name; they are read together
        for name in (*dict.fromkeys(session.session for session in found), None):
            await self._copy_part(take, where={"session": name})

    async def _copy_part(self, take: Take, where: dict[str, Any] | None = None, tier: str | None = None) -> None:
        """What a `where` and a tier mean: in one piece, or in several where that is too much for one answer."""
        try:
            whole = await self._timeline(where=where, tier=tier)
        except AnswerTooLong:
            if where is None and self._has_sessions:
                await self._copy_conversations(take)
            elif tier is None and len(self._tiers) > 1:
                for each in self._tiers:
                    await self._copy_part(take, where, each.name)
            else:
                raise
        else:
            await take(whole.records)

    async def _timeline(self, **params: Any) -> "_Page":
        embeddings = True if "embeddings" in self._described.capabilities else None
        page = await self._asking.read("memory/timeline", _Page, embeddings=embeddings, owner=self._owner, **params)
        for down in _degraded(page.degraded):
            raise Incomplete(f"an export must not lack what the tier {down.tier!r} holds: {down.reason}")
        mounted = {tier.name for tier in self._described.tiers or () if tier.mount}
        if mounted:
            page.records = [raw for raw in page.records if msgspec.json.decode(raw, type=_Lives).tier not in mounted]
        return page


def _is_restart(problem: ConnectionLost | A2MError, *, is_known: bool) -> bool:
    """Whether a server that fails so may just be started again; `is_known`: it has been so before."""
    if isinstance(problem, HttpFailure):
        return problem.reason.startswith("HTTP 50")  # something before it speaks for it
    if isinstance(problem, A2MError):
        data = problem.data or {}
        # a server that has just come up may have to be waited for by one that has not
        return data.get("reason") == STOPPING or (is_known and "retry_after" in data)
    return True


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of what is at `path` when the block has ended well; readable by its
    owner alone. What is no ordinary file (a pipe, a device) is written to at once."""
    path = path.resolve()
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        with path.open("wb") as file:
            yield file
        return
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class _Store(msgspec.Struct, frozen=True):
    records: int | None = None
    pages: bool = False


class _Described(msgspec.Struct):
    name: str
    capabilities: frozenset[str] = frozenset()
    tiers: list[Tier] | None = None
    store: Any = None


class _Sessions(msgspec.Struct):
    sessions: list[Session]


class _Page(msgspec.Struct):
    records: list[Raw]
    next: str | None = None
    degraded: Any = None


class _Lives(msgspec.Struct):
    tier: str | None = None


def _of_store(said: Any) -> _Store:
    # the name is not the protocol's: another server may mean something else by it
    try:
        return msgspec.convert(said, _Store)
    except msgspec.ValidationError:
        return _Store()


def _degraded(said: Any) -> list[Degraded]:
    try:
        return msgspec.convert(said or [], list[Degraded])
    except msgspec.ValidationError as problem:
        raise BadAnswer(f"memory/timeline: degraded: {problem}") from None
