"""The typed client of any A2M server, over any binding.

    async with a2m_router.connect("http://127.0.0.1:8778/") as memory:
        await memory.remember("the deploy key rotates every 90 days", tier="semantic")
        recalled = await memory.recall("how often does the deploy key change?")

It has one method for each of the protocol's (§4). All of them raise:

- A2MError, if the answer is an error; also if the server does not declare the capability, before it is called (§2);
- Unanswered, if no answer came;
- BadAnswer, if the answer is not as §4 describes.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Any, Final, TypeVar

import anyio
import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.client import results
from a2m_router.protocol.client.client import Peer
from a2m_router.protocol.client.inputs import NewRecord, Prompt, bytes_of, draft_from, raw_object, several
from a2m_router.protocol.client.results import (
    BadAnswer,
    Closed,
    Consolidated,
    Description,
    Events,
    Recalled,
    Record,
    Session,
    Summarized,
)
from a2m_router.protocol.wire.capabilities import CAPABILITY_OF, PROTOCOL
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params, not_supported
from a2m_router.protocol.wire.records import ConditionalDraft

# seconds that a call may take by default
TIMEOUT: Final = 60.0
# seconds between two polls of `Memory.watch`
INTERVAL: Final = 1.0
# the kind that `Memory.watch` yields after events were lost
RESET: Final = "reset"

# records in one call if the server declares no limit; and the rough bytes of their texts
_CHUNK: Final = 500
_CHUNK_BYTES: Final = 4 * 2**20

T = TypeVar("T")


class _Server:
    """The state that all views of one connection share."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.description: Description | None = None


class Memory:
    """A client of one server, over any binding.

    Args:
        peer: the connection.
        timeout: seconds that each call may take.
        owner: the default owner of calls (§6); a server that does not declare `scopes` ignores it.
        session: the default conversation of writes, `timeline` and `close_session`.
    """

    def __init__(
        self, peer: Peer, *, timeout: float = TIMEOUT, owner: str | None = None, session: str | None = None
    ) -> None:
        self._server = _Server(peer)
        self._timeout = timeout
        self._owner = owner
        self._session = session

    def __repr__(self) -> str:
        name = "not described yet" if self._server.description is None else repr(self._server.description.name)
        return f"<Memory {name}, owner {self._owner!r}, session {self._session!r}>"

    @property
    def peer(self) -> Peer:
        """The connection, for callers that need raw results."""
        return self._server.peer

    # --- views of the same connection

    def for_owner(self, owner: str | None) -> "Memory":
        """Return a view of this memory for calls of `owner`."""
        return self._view(self._timeout, owner, self._session)

    def in_session(self, session: str | None) -> "Memory":
        """Return a view of this memory for calls in the conversation `session`."""
        return self._view(self._timeout, self._owner, session)

    def within(self, seconds: float) -> "Memory":
        """Return a view of this memory with another timeout."""
        return self._view(seconds, self._owner, self._session)

    def _view(self, timeout: float, owner: str | None, session: str | None) -> "Memory":
        view = Memory(self._server.peer, timeout=timeout, owner=owner, session=session)
        view._server = self._server
        return view

    # --- core

    async def describe(self, *, owner: str | None = None) -> Description:
        """Return the server's description (§4.1). The server is asked at every call of this method, and before the
        first call of any other."""
        params = _given(protocol=PROTOCOL, owner=self._of(owner))
        raw = await self.peer.call("memory/describe", params, timeout=self._timeout)
        self._server.description = results.read_description(raw)
        return self._server.description

    async def remember(
        self,
        what: str | NewRecord | Mapping[str, Any] | Iterable[NewRecord | Mapping[str, Any]] | None = None,
        *,
        session: str | None = None,
        tier: str | None = None,
        key: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        role: str | None = None,
        group: str | None = None,
        owner: str | None = None,
        id: str | None = None,
        salience: float | None = None,
        embedding: Sequence[float] | None = None,
        uri: str | None = None,
        media_type: str | None = None,
        created_at: str | None = None,
        if_revision: int | UnsetType | None = UNSET,
    ) -> list[str]:
        """Write one text, or one or more records, in one call: either all of them are written or none (§4.2).

        Args:
            what: a text, a record, or records; None for a record that has only a `uri` or an `embedding`.
            session: this and the other fields are defaults for records that leave them out.
            if_revision: the revision that the caller last read at `key`; None if there was no page. If the page has
                another revision now, A2MError is raised with the `data` `{"reason": "revision", "revision": …}`, and
                nothing is written. By default, the page is replaced unconditionally.

        Returns:
            The ids, in the order of the records.

        Raises:
            ValueError: an item is not a record, or several records would share `id`, `key` or `if_revision`.
            A2MError: CAPABILITY_NOT_SUPPORTED, if the server would ignore `if_revision`; it is not called then.
        """
        fields = NewRecord(
            tier=tier,
            key=key,
            metadata=metadata,
            role=role,
            group=group,
            id=id,
            salience=salience,
            embedding=embedding,
            uri=uri,
            media_type=media_type,
            created_at=created_at,
            if_revision=if_revision,
        )
        drafts = [draft_from(each, fields) for each in several(what)]
        if len(drafts) > 1 and (id is not None or key is not None or if_revision is not UNSET):
            raise ValueError("an id, a key or an if_revision is for one record; several records need their own")
        return await self._remember(drafts, session, owner)

    async def remember_all(
        self,
        records: Iterable[NewRecord | Mapping[str, Any]],
        *,
        session: str | None = None,
        owner: str | None = None,
    ) -> list[str]:
        """Write any number of records, in as many calls as the server's limits require; each call writes all or none.

        If a call fails, earlier calls stay carried out. Records with ids can safely be written again.

        Returns:
            The ids, in the order of the records.
        """
        limits = (await self._description()).limits
        most = (limits.max_records_per_call if limits else None) or _CHUNK
        ids: list[str] = []
        batch: list[ConditionalDraft] = []
        held = 0
        for record in records:
            draft = draft_from(record, NewRecord())
            size = bytes_of(draft)
            if batch and (len(batch) >= min(most, _CHUNK) or held + size > _CHUNK_BYTES):
                ids += await self._remember(batch, session, owner)
                batch, held = [], 0
            batch.append(draft)
            held += size
        return ids + (await self._remember(batch, session, owner) if batch else [])

    async def recall(
        self,
        query: str | None = None,
        *,
        limit: int | None = None,
        tier: str | None = None,
        where: Mapping[str, Any] | None = None,
        min_score: float | None = None,
        embedding: Sequence[float] | None = None,
        key_prefix: str | None = None,
        embeddings: bool = False,
        prompt: Prompt | bool | None = None,
        owner: str | None = None,
    ) -> Recalled:
        """Return the best records for a query, a vector, or both; without either, the most recent ones (§4.3).

        Args:
            limit: how many records; the server's default is small.
            where: equality on record fields, or else on keys of the metadata; a list matches any of its items (§5.2).
            embeddings: whether to return vectors, too.
            prompt: whether, or how, to return the records as text, too (§4.16).
        """
        return await self._find(
            "memory/recall",
            query=query,
            limit=limit,
            tier=tier,
            where=raw_object(where),
            min_score=min_score,
            embedding=embedding,
            key_prefix=key_prefix,
            embeddings=embeddings or None,
            prompt=prompt,
            owner=self._of(owner),
        )

    async def timeline(
        self,
        *,
        session: str | None = None,
        limit: int | None = None,
        tier: str | None = None,
        where: Mapping[str, Any] | None = None,
        key_prefix: str | None = None,
        embeddings: bool = False,
        prompt: Prompt | bool | None = None,
        owner: str | None = None,
    ) -> Recalled:
        """Return records in the order of writing; with `limit`, only the newest (§4.4).

        `session` selects one conversation; it is added to `where`. The other parameters are as in `recall`.
        """
        session = self._session if session is None else session
        if session is not None:
            where = {**(where or {}), "session": session}
        return await self._find(
            "memory/timeline",
            limit=limit,
            tier=tier,
            where=raw_object(where),
            key_prefix=key_prefix,
            embeddings=embeddings or None,
            prompt=prompt,
            owner=self._of(owner),
        )

    async def forget(
        self,
        ids: Iterable[str] | None = None,
        *,
        query: str | None = None,
        tier: str | None = None,
        where: Mapping[str, Any] | None = None,
        key_prefix: str | None = None,
        owner: str | None = None,
    ) -> int:
        """Delete the records that match all of the selectors, and return their number (§4.5).

        Raises:
            A2MError: INVALID_PARAMS, if there is no selector; the server is not called then.
        """
        selectors = _given(ids=_list(ids), query=query, tier=tier, where=raw_object(where), key_prefix=key_prefix)
        _require_selector(selectors)
        return (await self._read("memory/forget", _Forgotten, **selectors, owner=self._of(owner))).forgotten

    # --- tiers, salience, keys, sessions

    async def promote(
        self, ids: Iterable[str], tier: str, *, salience: float | None = None, owner: str | None = None
    ) -> int:
        """Move records to `tier` and add `salience` to theirs; return how many moved (§4.6)."""
        params = {"ids": _list(ids), "tier": tier, "salience": salience, "owner": self._of(owner)}
        return (await self._read("memory/promote", _Promoted, **params)).promoted

    async def consolidate(self, *, owner: str | None = None) -> Consolidated:
        """Make the server consolidate its tiers now; it may delete records (§4.7)."""
        return await self._read("memory/consolidate", Consolidated, owner=self._of(owner))

    async def reinforce(self, ids: Iterable[str], *, amount: float | None = None, owner: str | None = None) -> int:
        """Raise the salience of records that proved useful; return how many were raised (§4.8)."""
        params = {"ids": _list(ids), "amount": amount, "owner": self._of(owner)}
        return (await self._read("memory/reinforce", _Reinforced, **params)).reinforced

    async def fetch(self, key: str, *, embeddings: bool = False, owner: str | None = None) -> Record | None:
        """Return the record at a key; None if there is none (§4.9)."""
        params = _given(key=key, embeddings=embeddings or None, owner=self._of(owner))
        return results.read_fetched(await self._call("memory/fetch", params))

    async def sessions(self, *, owner: str | None = None) -> list[Session]:
        """Return the conversations (§4.10)."""
        return (await self._read("memory/session/list", _Sessions, owner=self._of(owner))).sessions

    async def close_session(self, session: str | None = None, *, owner: str | None = None) -> Closed:
        """End a conversation: its records leave the working tier, and none is deleted by that (§4.11).

        Raises:
            ValueError: neither the call nor this memory names a session.
        """
        session = self._session if session is None else session
        if session is None:
            raise ValueError("close_session: expected the name of a session, or a memory that has one (in_session)")
        return await self._read("memory/session/close", Closed, session=session, owner=self._of(owner))

    # --- events

    async def events(
        self,
        cursor: str | None = None,
        limit: int | None = None,
        kinds: Iterable[str] | None = None,
        *,
        owner: str | None = None,
    ) -> Events:
        """Return the events after `cursor`; without one, no events and the current cursor (§4.12)."""
        params = {"cursor": cursor, "limit": limit, "kinds": _list(kinds), "owner": self._of(owner)}
        return await self._read("memory/events", Events, **params)

    async def watch(
        self,
        kinds: Iterable[str] | None = None,
        *,
        cursor: str | None = None,
        interval: float = INTERVAL,
        owner: str | None = None,
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield events as they come, by polling; this works over every binding.

        It ends only by an error. A caller that stops early must close it (`contextlib.aclosing`).

        If events were lost, because the server keeps only a limited number or was restarted, `{"kind": "reset"}` comes
        before the remaining ones. The caller should then read again whatever it tracks by events.

        Args:
            kinds: the kinds to yield; `reset` always comes.
            cursor: where to begin; by default at the first poll.
            interval: seconds between two polls when there are no more events.
        """
        wanted = _list(kinds)
        while True:
            try:
                seen = await self.events(cursor, kinds=wanted, owner=owner)
                lost = bool(seen.reset)
            except A2MError as error:
                # a server may reject an unknown cursor, for example after a restart
                if cursor is None or error.code != Code.INVALID_PARAMS:
                    raise
                seen = await self.events(None, kinds=wanted, owner=owner)
                lost = True
            if lost:
                yield {"kind": RESET}
            for event in seen.events:
                yield event
            advanced, cursor = cursor != seen.cursor, seen.cursor
            if not (seen.more and advanced):
                await anyio.sleep(interval)

    async def subscribe(self, kinds: Iterable[str] | None = None, *, owner: str | None = None) -> None:
        """Have the server push events to the `on_notification` of this connection (§4.13)."""
        params = {"kinds": _list(kinds), "owner": self._of(owner)}
        if not (await self._read("memory/events/subscribe", _Subscribed, **params)).subscribed:
            raise BadAnswer("memory/events/subscribe: the server's answer is not valid: expected true, got false")

    async def unsubscribe(self) -> None:
        """Stop the server from pushing events (§4.14)."""
        await self._read("memory/events/unsubscribe", _Subscribed)

    # --- summaries

    async def summarize(
        self,
        ids: Iterable[str] | None = None,
        *,
        query: str | None = None,
        tier: str | None = None,
        where: Mapping[str, Any] | None = None,
        key_prefix: str | None = None,
        limit: int | None = None,
        into: str | None = None,
        key: str | None = None,
        owner: str | None = None,
    ) -> Summarized:
        """Summarize the records that match all of the selectors as durable statements, and store these (§4.15).

        Args:
            limit: how many records are read at most.
            into: the tier of the summary.
            key: the key of the summary; it replaces the record there.

        Raises:
            A2MError: INVALID_PARAMS, if there is no selector; the server is not called then.
        """
        selectors = _given(ids=_list(ids), query=query, tier=tier, where=raw_object(where), key_prefix=key_prefix)
        _require_selector(selectors)
        params = {**selectors, **_given(limit=limit, into=into, key=key, owner=self._of(owner))}
        return results.read_summarized(await self._call("memory/summarize", params))

    # --- calls

    async def _call(self, method: str, params: Mapping[str, Any]) -> Raw:
        """Return the result of one call, after `describe`; raise instead of calling an undeclared capability (§2)."""
        capability = CAPABILITY_OF[method]
        if capability not in (await self._description()).capabilities:
            raise not_supported(capability)
        return await self.peer.call(method, params, timeout=self._timeout)

    async def _description(self) -> Description:
        return self._server.description or await self.describe()

    async def _read(self, method: str, type: type[T], **params: Any) -> T:
        return results.read(method, await self._call(method, _given(**params)), type)

    async def _find(self, method: str, **params: Any) -> Recalled:
        return results.read_found(method, await self._call(method, _given(**params)))

    async def _remember(self, drafts: list[ConditionalDraft], session: str | None, owner: str | None) -> list[str]:
        session = self._session if session is None else session
        conditional = any(draft.if_revision is not UNSET for draft in drafts)
        if conditional and not (await self._description()).heeds_if_revision:
            raise A2MError(
                Code.CAPABILITY_NOT_SUPPORTED,
                "this server's memory/describe does not declare if_revision: it would ignore the condition and replace "
                "the record at the key; leave if_revision out, or use an a2m-router",
            )
        ids = (await self._read("memory/remember", _Ids, records=drafts, session=session, owner=self._of(owner))).ids
        if len(ids) != len(drafts):
            raise BadAnswer(f"memory/remember: the server returned {len(ids)} ids for {len(drafts)} records")
        return ids

    def _of(self, owner: str | None) -> str | None:
        return self._owner if owner is None else owner


class _Ids(msgspec.Struct):
    ids: list[str]


class _Forgotten(msgspec.Struct):
    forgotten: int


class _Promoted(msgspec.Struct):
    promoted: int


class _Reinforced(msgspec.Struct):
    reinforced: int


class _Sessions(msgspec.Struct):
    sessions: list[Session]


class _Subscribed(msgspec.Struct):
    subscribed: bool


def _given(**params: Any) -> dict[str, Any]:
    return {name: value for name, value in params.items() if value is not None}


def _list(items: Iterable[str] | None) -> list[str] | None:
    if isinstance(items, str):
        raise ValueError(f"expected several strings, such as [{items!r}], got the one string {items!r}")
    return None if items is None else list(items)


def through(peer: Peer, memory: Memory) -> Memory:
    """Return the same memory, called through `peer`, which passes calls on to the memory's connection.

    The server's description is kept: the server is not asked for it again.
    """
    view = Memory(peer, timeout=memory._timeout, owner=memory._owner, session=memory._session)
    view._server.description = memory._server.description
    return view


def _require_selector(selectors: Mapping[str, Any]) -> None:
    if not selectors:
        raise invalid_params("params", "expected at least one of ids, query, tier, where and key_prefix")
