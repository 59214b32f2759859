"""One tier on SQLite: the methods of A2M 0.1, carried out one after the other.

Rules:
- a method runs inside the caller's transaction. It does all its work or raises; the caller decides what to roll back;
- two things are kept outside the file: the tally, which the transaction that changed it also writes, and `happened`,
  the events since the caller last cleared it. The caller emits them (§4.12) once the changes are certain;
- records that a scoped caller cannot see do not exist for it. Only a write to another owner's id reveals one (§6).
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeGuard

import apsw
import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import replace

from a2m_router.protocol.server import vectors
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.server.watching import EventsEntry
from a2m_router.protocol.wire import method_params
from a2m_router.protocol.wire.capabilities import FIELDS, PROTOCOL, methods_of, speaks
from a2m_router.protocol.wire.equality import NULL, atom, members, parse_where
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params, quota
from a2m_router.protocol.wire.events import Consolidated, Event, Forgotten, Place, SessionClosed, Written, named
from a2m_router.protocol.wire.records import Draft, Record, digest, vector_bytes, vector_from_bytes
from a2m_router.protocol.wire.timestamps import after, parse, render
from a2m_router.protocol.wire.vectors import indexed
from a2m_router.ranking.text import query_tokens, tokens
from a2m_router.storage import nearest
from a2m_router.storage.snapshots import Snapshot
from a2m_store import search
from a2m_store.drafts import OwnerScope, StoreLimits, checked
from a2m_store.filters import Filter, SqlCondition, any_id, beneath, compiled, short
from a2m_store.identifiers import new_id
from a2m_store.schema import open_file

CAPABILITIES: Final = ("core", "salience", "scopes", "sessions", "keys", "embeddings", "external", "events")

_DEFAULT_LIMIT: Final = 8
_DEFAULT_PAGE: Final = 1_000

_READ: Final = """
SELECT id, content, created_at, role, metadata, "group", salience, at, ifnull(count, 0), owner, session, key, revision,
    uri, media_type
FROM record LEFT JOIN access ON access.record = record.seq WHERE seq = ?
"""
_INSERT: Final = """
INSERT INTO record (content, role, metadata, "group", owner, session, key, uri, media_type, tokens,
    id, created_at, salience, revision) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_REPLACE: Final = """
UPDATE record SET content = ?, role = ?, metadata = ?, "group" = ?, owner = ?, session = ?, key = ?, uri = ?,
    media_type = ?, tokens = ?, created_at = ?, salience = ?, revision = ? WHERE seq = ?
"""
_ADD_TO_SHARE: Final = """
INSERT INTO share VALUES (coalesce('=' || ?1, ''), ?2, ?3)
ON CONFLICT (owner) DO UPDATE SET records = records + ?2, tokens = tokens + ?3
"""
_NEWEST_OF: Final = """
SELECT created_at FROM record WHERE session = ? AND owner IS ? ORDER BY created_at DESC LIMIT 1
"""
_COUNT_ACCESS: Final = """
INSERT INTO access (record, count, at) VALUES (?, 1, ?)
ON CONFLICT (record) DO UPDATE SET count = count + 1, at = excluded.at
"""


class _Tally(msgspec.Struct, frozen=True):
    """Facts about the whole store that are kept in memory."""

    dimensions: int | None
    records: int
    federation: str | None
    epoch: str | None


class _Known(msgspec.Struct, frozen=True):
    """The fields of an existing record that a write needs."""

    seq: int
    id: str
    owner: str | None
    key: str | None
    created_at: int
    salience: float
    revision: int | None


class Store:
    """The records of one file. Call its methods inside a `transaction`, and from one thread at a time.

    Args:
        path: the file; None for a store in memory.
        clock: returns the time in milliseconds since 1970.
        name: the name that `describe` reports; the file's stem by default.
        kind: the kind that `describe` reports, if any: working, episodic, semantic or procedural.
        metric: how vectors are compared; by default the file's metric, cosine for a new file. If it differs from the
            file's, the index of vectors is rebuilt.

    Raises:
        DatabaseError: the file cannot be used.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        clock: Callable[[], int],
        name: str | None = None,
        kind: str | None = None,
        metric: str | None = None,
        limits: StoreLimits | None = None,
    ) -> None:
        self.limits = limits or StoreLimits()
        self._clock = clock
        self._name = name or ("store" if path is None else path.stem)
        self._kind = kind
        self.happened: list[Event] = []
        self._counts = True  # whether recalls are counted
        self._database = open_file(path)
        self._connection = self._database.connection
        try:
            self._connection.create_scalar_function("json_atom", _json_atom, 1, deterministic=True)
            row = self._connection.execute("SELECT identity, metric, dimensions, records, federation, epoch FROM store")
            self._identity, self._metric, *tally = row.get
            self._tally = _Tally(*tally)
            if metric not in (None, self._metric):
                self._change_metric(str(metric))
        except BaseException:
            self._database.close()
            raise

    @contextlib.contextmanager
    def transaction(self) -> Iterator[apsw.Connection]:
        """Run the block in a transaction; inside another transaction, in a savepoint."""
        before = self._tally
        try:
            with self._database.transaction() as connection:
                yield connection
                if self._tally != before:
                    connection.execute(
                        "UPDATE store SET dimensions = ?, records = ?, federation = ?, epoch = ?",
                        msgspec.structs.astuple(self._tally),
                    )
        except BaseException:
            self._tally = before
            raise

    @contextlib.contextmanager
    def reading(self) -> Iterator[apsw.Connection]:
        """Run reads while the file cannot be written: recalls are not counted."""
        self._counts = False
        try:
            with self._database.reading() as connection:
                yield connection
        finally:
            self._counts = True

    def sync(self) -> None:
        """Make all commits survive a power cut. Blocks."""
        self._database.sync()

    @property
    def path(self) -> Path | None:
        """The file; None for a store in memory."""
        return self._database.path

    def snapshot(self) -> Snapshot:
        """Return a snapshot of all that is committed. Raises OSError; ValueError for a store in memory."""
        return self._database.snapshot()

    def close(self) -> None:
        """Sync and close the file."""
        self._database.close()

    def describe(self, params: method_params.Describe, caller: Caller) -> dict[str, Any]:
        """Describe the server (§4.1), and under `store` what it offers beyond the protocol.

        A router on the store's pipes sends here its federation's id and the epoch of its start. Both stay in the file,
        so the router recognises an older copy of the file.
        """
        if params.protocol is not None and not speaks(params.protocol):
            raise A2MError(
                Code.PROTOCOL_NOT_SUPPORTED,
                f"protocol: this server speaks {PROTOCOL}, not {params.protocol!r}",
                {"supported": [PROTOCOL]},
            )
        if enrols(params, caller):
            self._tally = replace(self._tally, federation=params.federation, epoch=params.epoch)
        capabilities = _capabilities(scope_of(params.owner, caller))
        described: dict[str, Any] = {
            "protocol": PROTOCOL,
            "name": self._name,
            "capabilities": capabilities,
            "methods": methods_of(capabilities),
            "limits": self.limits,
            "embeddings": {
                "dimensions": self._tally.dimensions,
                "metric": self._metric,
                "metrics": list(nearest.METRICS),
                "model": None,
            },
            "events": EventsEntry(push=caller.channel is not None),
            "store": {
                "identity": self._identity,
                "records": self._tally.records,
                "keeps": ["created_at", "embedding", "metadata", "revision"],
                "pages": True,
                "similarity": True,
                "federation": self._tally.federation,
                "epoch": self._tally.epoch,
            },
        }
        if caller.asserts_owner and self._database.path is not None:
            # a backup writes a file at any path: only the program that started this process may request one
            described["store"]["backup"] = True
        if self._kind is not None:
            described["kind"] = self._kind
        return described

    def remember(self, params: method_params.Remember, caller: Caller) -> dict[str, Any]:
        """Write records (§4.2); a given `created_at` or `revision` is kept."""
        scope = scope_of(params.owner, caller)
        drafts = checked(params, scope, self.limits, self._tally.dimensions)
        now = self._clock()
        return {"ids": [self._write(draft, scope, now) for draft in drafts]}

    def recall(self, params: method_params.Recall, caller: Caller) -> dict[str, Any]:
        """Search records (§4.3). Each record with a vector gets its exact `similarity` to the caller's `embedding`."""
        limit = self._recall_limit(params.limit)
        if params.embedding is not None:
            vectors.check(params.embedding, "embedding")
            vectors.check_width(params.embedding, self._tally.dimensions, "embedding")
        query = search.Query(
            words=query_tokens(params.query or ""),
            vector=params.embedding,
            probe=self._probe(params.embedding),
            metric=self._metric,
        )
        now = self._clock()
        records = []
        for found in search.ranked(self._connection, query, self._filter(params, caller), limit):
            if params.min_score is not None and found.score < params.min_score:
                break
            record = self._read(found.seq, params.embeddings)
            record.score = found.score
            record.similarity = search.similarity_to(self._connection, query, found.seq)
            if self._counts:
                record.access_count = (record.access_count or 0) + 1
                record.accessed_at = render(now)
                self._connection.execute(_COUNT_ACCESS, (found.seq, now))
            records.append(record)
        return {"records": records}

    def timeline(self, params: method_params.Pages, caller: Caller) -> dict[str, Any]:
        """Return the newest records, oldest first (§4.4).

        With `after` or `page`, walk over all matching records in order of insertion, page by page. `next` is the value
        to send as `after`, null at the end; `limit` is ignored.
        """
        for name, number in (("limit", params.limit), ("page", params.page)):
            if number == 0:
                raise invalid_params(name, "expected 1 or more; leave it out for no limit")
        filter = self._filter(params, caller)
        if params.walks:
            return self._page(filter, params.after, params.page or _DEFAULT_PAGE, params.embeddings)
        newest = search.newest_first(self._connection, filter, params.limit)
        return {"records": [self._read(seq, params.embeddings) for seq in reversed(newest)]}

    def forget(self, params: method_params.Forget, caller: Caller) -> dict[str, Any]:
        """Delete the records that all selectors match (§4.5). Reject an empty selector: it would match every record."""
        words = query_tokens(params.query or "")
        if not (words or params.where or params.key_prefix) and params.ids is None:
            raise invalid_params(
                "params",
                "expected ids, a query with words to search for, a where with a condition, or a key_prefix: "
                "an empty selector does not forget everything",
            )
        if params.query is not None and not words:
            raise invalid_params("query", "expected words to search for; this query contains none")
        filter = self._filter(params, caller)
        if params.ids is not None:
            filter = replace(filter, conditions=(any_id(params.ids), *filter.conditions))
        found = search.matching(self._connection, words, filter)
        removed = [self._remove(seq) for seq in found]
        self._tally = replace(self._tally, records=self._tally.records - len(found))
        by = scope_of(params.owner, caller).owner
        self.happened.append(Forgotten(at=self._clock(), by=by, records=named(removed)))
        return {"forgotten": len(found)}

    def reinforce(self, params: method_params.Reinforce, caller: Caller) -> dict[str, Any]:
        """Change the salience of records (§4.8); it stays between 0 and the largest float."""
        filter = Filter((any_id(params.ids),), scope_of(params.owner, caller).owner)
        found = search.matching(self._connection, (), filter)
        for seq in found:
            self._connection.execute(
                "UPDATE record SET salience = min(max(salience + ?, 0), ?) WHERE seq = ?",
                (params.amount, sys.float_info.max, seq),
            )
        return {"reinforced": len(found)}

    def fetch(self, params: method_params.Fetch, caller: Caller) -> dict[str, Any]:
        """Return the record at a key (§4.9): the caller's own, else the one without an owner, else null."""
        if not params.key:
            raise invalid_params("key", "expected at least one character")
        owner = scope_of(params.owner, caller).owner
        known = self._by_key(params.key, owner) or self._by_key(params.key, None)
        return {"record": None if known is None else self._read(known.seq, params.embeddings)}

    def session_list(self, params: method_params.SessionList, caller: Caller) -> dict[str, Any]:
        """List the sessions that the caller sees (§4.10)."""
        visible = Filter(owner=scope_of(params.owner, caller).owner).condition or SqlCondition("1")
        rows = self._connection.execute(
            "SELECT session, count(*), min(created_at), max(created_at) FROM record "
            f"WHERE session IS NOT NULL AND {visible.sql} GROUP BY session",
            visible.values,
        )
        return {
            "sessions": [
                {"session": session, "records": records, "opened_at": render(first), "touched_at": render(last)}
                for session, records, first, last in rows
            ]
        }

    def session_close(self, params: method_params.SessionClose, caller: Caller) -> dict[str, Any]:
        """Close a session (§4.11). A store has no tiers, so nothing moves."""
        if not params.session:
            raise invalid_params("session", "expected at least one character")
        owner, now = scope_of(params.owner, caller).owner, self._clock()
        nothing = dict.fromkeys(("moved", "promoted", "dropped", "summarized"), 0)
        unmoved = {name: Counter[Place]() for name in nothing}
        self.happened.append(Consolidated(at=now, by=owner, asked=True, figures=unmoved))
        known = self._connection.execute(
            "SELECT 1 FROM record WHERE session = ? AND owner IS ? LIMIT 1", (params.session, owner)
        ).fetchone()
        closed = SessionClosed(at=now, owner=owner, session=params.session, known=known is not None)
        self.happened.append(closed)
        return {**nothing, "counts": {}, "closed": params.session, "flushed": 0}

    def _recall_limit(self, limit: int | None) -> int:
        most = self.limits.max_recall_limit
        if limit is None:
            return min(_DEFAULT_LIMIT, most)
        if limit == 0:
            raise invalid_params("limit", f"expected 1..{most}, got 0")
        if limit > most:
            raise quota("limit", most, limit, "records")
        return limit

    def _filter(self, params: method_params.Read | method_params.Forget, caller: Caller) -> Filter:
        scope = scope_of(params.owner, caller)
        fields = frozenset(field for each in _capabilities(scope) for field in FIELDS.get(each, ()))
        conditions = compiled(parse_where(params.where or {}), fields)
        if params.key_prefix is not None:
            conditions = (beneath(params.key_prefix), *conditions)
        return Filter(conditions, scope.owner)

    def _probe(self, vector: Sequence[float] | None) -> bytes | None:
        if vector is None or self._tally.dimensions is None:
            return None
        return indexed(vector, self._metric)

    def _page(self, filter: Filter, after: str | None, size: int, embeddings: bool) -> dict[str, Any]:
        try:
            start = 0 if after is None else int(after)
        except ValueError:
            raise invalid_params("after", "expected the `next` of an earlier result") from None
        whole = filter.condition or SqlCondition("1")
        # one row more than requested shows whether there is a next page
        size = min(size, 2**62)
        sql = f"SELECT seq FROM record WHERE seq > ? AND {whole.sql} ORDER BY seq LIMIT ?"
        found = [seq for (seq,) in self._connection.execute(sql, (start, *whole.values, size + 1))]
        records = [self._read(seq, embeddings) for seq in found[:size]]
        records.sort(key=lambda record: parse(record.created_at))
        return {"records": records, "next": str(found[size - 1]) if len(found) > size else None}

    def _read(self, seq: int, embeddings: bool) -> Record:
        row: tuple[Any, ...] = next(self._connection.execute(_READ, (seq,)))
        id, content, created, role, metadata, group, salience, accessed, count, owner, session, key, revision, *rest = (
            row
        )
        record = Record(
            id=id,
            content=content,
            created_at=render(created),
            role=role,
            metadata=UNSET if metadata is None else Raw(metadata),
            group=group,
            salience=salience,
            accessed_at=None if accessed is None else render(accessed),
            access_count=count,
            owner=owner,
            session=session,
            key=key,
            revision=revision,
            uri=rest[0],
            media_type=rest[1],
        )
        if embeddings:
            doubles = self._connection.execute("SELECT doubles FROM vector WHERE record = ?", (seq,)).get
            record.embedding = None if doubles is None else vector_from_bytes(doubles)
        return record

    def _write(self, draft: Draft, scope: OwnerScope, now: int) -> str:
        known = None if draft.id is None else self._by_id(draft.id)
        if known is not None:
            _check_owner(known, draft, scope)
            address = (draft.key, draft.owner)
            if draft.key is not None and address == (known.key, known.owner) and self._differs(draft, known):
                self._replace(known, draft)
            return known.id
        known = None if draft.key is None else self._by_key(draft.key, draft.owner)
        if known is not None:
            self._replace(known, draft)
            return known.id
        return self._insert(draft, now)

    def _differs(self, draft: Draft, known: _Known) -> bool:
        as_known = replace(
            draft,
            created_at=draft.created_at or render(known.created_at),
            revision=known.revision if draft.revision is None else draft.revision,
        )
        return digest(as_known) != digest(self._read(known.seq, embeddings=True))

    def _insert(self, draft: Draft, now: int) -> str:
        id = draft.id or new_id(now)
        created = self._moment(draft, now) if draft.created_at is None else parse(draft.created_at)
        revision = 0 if draft.revision is None and draft.key is not None else draft.revision
        salience = 1.0 if draft.salience is None else draft.salience
        words = tokens(draft.content or "")
        self._connection.execute(_INSERT, (*_common(draft), len(words), id, created, salience, revision))
        self._index(self._connection.last_insert_rowid(), draft, words)
        self._tally = replace(self._tally, records=self._tally.records + 1)
        self._note_written(id, draft, revision or 0)
        return id

    def _moment(self, draft: Draft, now: int) -> int:
        """Return the creation time of a new record: now, or just after its session's newest record.

        So a session is replayed in the order in which it was written.
        """
        if draft.session is None:
            return now
        newest = self._connection.execute(_NEWEST_OF, (draft.session, draft.owner)).get
        # if the clock is behind, each record is a millisecond later, so `created_at` alone gives the order
        return now if newest is None or newest <= now else after(newest)

    def _replace(self, known: _Known, draft: Draft) -> None:
        self._unindex(known.seq)
        created = known.created_at if draft.created_at is None else parse(draft.created_at)
        revision = (known.revision or 0) + 1 if draft.revision is None else draft.revision
        salience = known.salience if draft.salience is None else draft.salience
        words = tokens(draft.content or "")
        self._connection.execute(_REPLACE, (*_common(draft), len(words), created, salience, revision, known.seq))
        self._index(known.seq, draft, words)
        self._note_written(known.id, draft, revision)

    def _note_written(self, id: str, draft: Draft, revision: int) -> None:
        self.happened.append(
            Written(
                at=self._clock(),
                id=id,
                place=Place(draft.owner),
                session=draft.session,
                key=draft.key,
                revision=revision,
            )
        )

    def _remove(self, seq: int) -> tuple[str, Place]:
        """Delete a record, and return its id and its owner."""
        self._unindex(seq)
        self._connection.execute("DELETE FROM access WHERE record = ?", (seq,))
        id, owner = next(self._connection.execute("DELETE FROM record WHERE seq = ? RETURNING id, owner", (seq,)))
        return id, Place(owner)

    def _index(self, seq: int, draft: Draft, words: Sequence[str]) -> None:
        execute = self._connection.execute
        if words:
            execute("INSERT INTO lexical (rowid, tokens) VALUES (?, ?)", (seq, " ".join(words)))
            execute(_ADD_TO_SHARE, (draft.owner, 1, len(words)))
        if draft.metadata is not UNSET:
            for row in _members(seq, bytes(draft.metadata)):
                execute("INSERT OR IGNORE INTO member (name, atom, record) VALUES (?, ?, ?)", row)
        if draft.embedding is not None:
            self._fix_width(len(draft.embedding))
            execute("INSERT INTO vector (record, doubles) VALUES (?, ?)", (seq, vector_bytes(draft.embedding)))
            self._put_in_reach(seq, draft.embedding)

    def _unindex(self, seq: int) -> None:
        execute = self._connection.execute
        metadata, owner, words = next(execute("SELECT metadata, owner, tokens FROM record WHERE seq = ?", (seq,)))
        if words:
            execute(_ADD_TO_SHARE, (owner, -1, -words))
        if metadata is not None:
            for row in _members(seq, metadata):
                execute("DELETE FROM member WHERE name = ? AND atom = ? AND record = ?", row)
        execute("DELETE FROM lexical WHERE rowid = ?", (seq,))
        execute("DELETE FROM vector WHERE record = ?", (seq,))
        if self._connection.changes():
            execute("DELETE FROM nearest WHERE rowid = ?", (seq,))
            if execute("SELECT max(record) FROM vector").get is None:
                # no vector is left, so the next one fixes the width
                self._tally = replace(self._tally, dimensions=None)

    def _fix_width(self, dimensions: int) -> None:
        if self._tally.dimensions is None:
            nearest.create(self._connection, dimensions, self._metric)
            self._tally = replace(self._tally, dimensions=dimensions)

    def _put_in_reach(self, seq: int, vector: Sequence[float]) -> None:
        # a vector without direction is stored but not indexed: no query is near it
        packed = indexed(vector, self._metric)
        if packed is not None:
            self._connection.execute("INSERT INTO nearest (rowid, vector) VALUES (?, ?)", (seq, packed))

    def _change_metric(self, metric: str) -> None:
        with self._database.transaction() as connection:
            connection.execute("UPDATE store SET metric = ?", (metric,))
            self._metric = metric
            if self._tally.dimensions is not None:
                nearest.create(connection, self._tally.dimensions, metric)
                for seq, doubles in connection.execute("SELECT record, doubles FROM vector ORDER BY record"):
                    self._put_in_reach(seq, vector_from_bytes(doubles))

    def _by_id(self, id: str) -> _Known | None:
        return self._known("id = ?", (id,))

    def _by_key(self, key: str, owner: str | None) -> _Known | None:
        return self._known("key = ? AND owner IS ?", (key, owner))

    def _known(self, test: str, values: tuple[str | None, ...]) -> _Known | None:
        row = self._connection.execute(
            f"SELECT seq, id, owner, key, created_at, salience, revision FROM record WHERE {test}", values
        ).fetchone()
        return None if row is None else _Known(*row)


def enrols(params: method_params.Params, caller: Caller) -> TypeGuard[method_params.Enrol]:
    """Return whether a router enrols the store into its federation; over HTTP the caller could be any program."""
    has_both = isinstance(params, method_params.Enrol) and params.federation is not None and params.epoch is not None
    return has_both and caller.asserts_owner


def scope_of(owner: str | None, caller: Caller) -> OwnerScope:
    """Return the scope of a call: the given owner on a local binding, else the owner that the binding knows (§6)."""
    if caller.asserts_owner:
        return OwnerScope(knows_caller=True, owner=owner)
    return OwnerScope(knows_caller=caller.owner is not None, owner=caller.owner)


def _capabilities(scope: OwnerScope) -> list[str]:
    return [each for each in CAPABILITIES if each != "scopes" or scope.knows_caller]


def _check_owner(known: _Known, draft: Draft, scope: OwnerScope) -> None:
    # a record without an owner belongs to every caller
    if known.owner is not None and known.owner != draft.owner and (scope.owner or draft.owner) is not None:
        raise A2MError(
            Code.SCOPE_DENIED,
            f"records: the id {known.id[:80]!r} belongs to a record of another owner; choose another id",
        )


def _common(draft: Draft) -> tuple[str | bytes | None, ...]:
    """Return the columns that depend on the draft alone, in the order of the two statements that write them."""
    metadata = None if draft.metadata is UNSET else bytes(draft.metadata)
    return (
        draft.content or "",
        draft.role,
        metadata,
        draft.group,
        draft.owner,
        draft.session,
        draft.key,
        draft.uri,
        draft.media_type,
    )


def _members(seq: int, metadata: bytes) -> list[tuple[bytes, bytes, int]]:
    found: Mapping[str, bytes] = members(metadata)
    return [(short(name.encode()), short(atom), seq) for name, atom in found.items() if atom != NULL]


def _json_atom(*metadata: Any) -> bytes | None:
    return None if metadata[0] is None else atom(metadata[0])
