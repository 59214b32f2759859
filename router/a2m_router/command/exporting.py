"""`a2m export`: a header line, then every record as a line of JSON, unchanged from the server's result.

Memory use is bounded if the server supports pages, as a2m-router and a2m-store declare. Pages are an extension of the
protocol. From other servers the timeline is read conversation by conversation, or as a whole if there are few records.
A part that is too long for one message is read tier by tier. A record that moves meanwhile may then appear twice;
`a2m import` ignores the second copy.
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
# up to this number, records are read in one call
_FEW: Final = 2000
# how long to wait for a server that is down, and between two attempts, in seconds
_PATIENCE: Final = 60.0
_FIRST_WAIT: Final = 0.1
_LONGEST_WAIT: Final = 2.0

Take = Callable[[list[Raw]], Awaitable[None]]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. `records` is their number by the server's count; None if it does not count them."""

    format: str = FORMAT
    version: int = VERSION
    server: str | None = None
    records: int | None = None


class Incomplete(Exception):
    """Not everything could be exported; a sentence."""


class Export:
    """An export of all records of one server, byte for byte.

    Call `open` first. Then `header` is the first line, and `copy` passes on the records.
    """

    def __init__(self, asking: PatientPeer, owner: str | None) -> None:
        self.header = Header()
        self._asking = asking
        self._owner = owner
        self._described = _Described(name="")

    async def open(self) -> None:
        """Read the server's description."""
        self._described = described = await self._asking.read(
            "memory/describe", _Described, protocol=PROTOCOL, owner=self._owner
        )
        counted = None if described.tiers is None else sum(tier.count for tier in self._tiers)
        self.header = Header(
            server=described.name, records=_of_store(described.store).records if counted is None else counted
        )

    async def copy(self, take: Take) -> None:
        """Pass every record to `take`, several at a time. At least within a conversation, older records come first.

        Raises:
            Incomplete: a tier does not answer.
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
        """The tiers that the server writes to. The records of mounts belong to other services."""
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
                # a page of long records may exceed the length of one message: halve it
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
        """Return the page after the cursor `after`.

        A cursor stays valid when the server restarts. So if the server is down or shuts down, wait for its restart.
        """
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
                    say(f"server down, the export waits for it, for at most {_PATIENCE:.0f} s: {problem}")
                if now >= until:
                    raise
                await anyio.sleep(wait)
                wait = min(2 * wait, _LONGEST_WAIT)

    async def _copy_conversations(self, take: Take) -> None:
        """Copy each conversation, in the order in which they were opened; then the records without a conversation."""
        found = (await self._asking.read("memory/session/list", _Sessions, owner=self._owner)).sessions
        found.sort(key=lambda session: session.opened_at or "")
        # several owners may have a conversation with the same name; one call reads them all
        for name in (*dict.fromkeys(session.session for session in found), None):
            await self._copy_part(take, where={"session": name})

    async def _copy_part(self, take: Take, where: dict[str, Any] | None = None, tier: str | None = None) -> None:
        """Copy the records that `where` and `tier` select, in several calls if they are too long for one result."""
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
            raise Incomplete(
                f"the export is incomplete, the tier {down.tier!r} did not return its records: {down.reason}"
            )
        mounted = {tier.name for tier in self._described.tiers or () if tier.mount}
        if mounted:
            page.records = [raw for raw in page.records if msgspec.json.decode(raw, type=_Lives).tier not in mounted]
        return page


def _is_restart(problem: ConnectionLost | A2MError, *, is_known: bool) -> bool:
    """Return whether an error may come from a restart of the server. `is_known`: an earlier error certainly did."""
    if isinstance(problem, HttpFailure):
        return problem.reason.startswith("HTTP 50")  # a proxy in front of the server may answer in its place
    if isinstance(problem, A2MError):
        data = problem.data or {}
        # after a restart the router is up before its tiers are; until then it returns errors with retry_after
        return data.get("reason") == STOPPING or (is_known and "retry_after" in data)
    return True


@contextmanager
def written_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, readable by its owner only, that replaces the one at `path` if the block ends without an error.

    If `path` is not a regular file (a pipe, a device), it is written to directly.
    """
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


def _of_store(store: Any) -> _Store:
    # `store` is not part of the protocol: in another server's description it may have another meaning
    try:
        return msgspec.convert(store, _Store)
    except msgspec.ValidationError:
        return _Store()


def _degraded(degraded: Any) -> list[Degraded]:
    try:
        return msgspec.convert(degraded or [], list[Degraded])
    except msgspec.ValidationError as problem:
        raise BadAnswer(f"memory/timeline: degraded: {problem}") from None
