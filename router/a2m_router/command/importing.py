"""`a2m import`: writes the records of an export to any server. An interrupted import can be repeated.

An import changes no existing record. Before it writes a batch, it looks up the ids and keys: a record whose id exists,
or whose key another record has, is not written. A record with a field that the server would silently lose, because it
does not declare the capability, is skipped, unless --drop leaves the field out.

A record without an id gets one that is computed from its text and its place in the file. So it is written only once,
even if the file is imported several times.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import msgspec
from msgspec import UNSET

from a2m_router.command.exporting import FORMAT, VERSION, Header
from a2m_router.command.peer import PatientPeer
from a2m_router.protocol.client.inputs import bytes_of
from a2m_router.protocol.client.results import BadAnswer
from a2m_router.protocol.wire.capabilities import FIELDS, PROTOCOL
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import MalformedMessage, explain, parse_request
from a2m_router.protocol.wire.lines import BYTE_ORDER_MARK, DEFAULT_MAX_MESSAGE
from a2m_router.protocol.wire.records import Draft
from a2m_router.protocol.wire.timestamps import moment, render

# the most records in a batch, unless the server's limit is lower; and about the most bytes
_BATCH: Final = 200
_BATCH_BYTES: Final = 4 * 2**20

# errors that concern one record: the other records of the batch can still be written
_ABOUT_A_RECORD: Final = frozenset(
    {
        *(Code.INVALID_PARAMS, Code.SCOPE_DENIED, Code.QUOTA_EXCEEDED, Code.EMBEDDING_MISMATCH),
        *(Code.UNKNOWN_TIER, Code.UNKNOWN_RECORD),
    }
)

# the capability that each field of a record belongs to, except the fields of core
_CAPABILITY: Final = {
    field: capability for capability, fields in FIELDS.items() if capability != "core" for field in fields
}


class NotAnExport(Exception):
    """The file cannot be imported; a sentence that names the line."""


class Line(msgspec.Struct, frozen=True):
    """One record of the file, and the number of its line, from 1."""

    number: int
    draft: Draft


class Counts(msgspec.Struct):
    """The number of records by outcome; `skipped` counts by reason."""

    written: int = 0
    already_there: int = 0
    skipped: Counter[str] = msgspec.field(default_factory=Counter)


class Import:
    """An import into one server. Call `open` first, then `take` for every line, then `finish`.

    `counts` has the outcomes so far, `header` the first line of the file.

    Args:
        asking: the connection to the server.
        owner: the owner of records that have none.
        drop: the fields to leave out of every record.
        told_by_token: the server takes the owner of records that have none from the connection.
        on_skipped: called with each skipped record and the reason.
    """

    def __init__(
        self,
        asking: PatientPeer,
        *,
        owner: str | None,
        drop: Collection[str],
        told_by_token: bool,
        on_skipped: Callable[[Line, str], None],
    ) -> None:
        self.counts = Counts()
        self.header = Header()
        self._asking = asking
        self._owner = owner
        self._drop = dict.fromkeys(drop)
        self._told_by_token = told_by_token and owner is None
        self._on_skipped = on_skipped
        self._most = _BATCH
        self._capabilities: frozenset[str] = frozenset()
        self._tiers: frozenset[str] | None = None
        self._batch: list[Line] = []
        self._held = 0  # bytes in the batch
        self._place = 0  # of the last record in the file

    async def open(self) -> None:
        """Read the server's limits, capabilities and tiers."""
        described = await self._asking.read("memory/describe", _Described, protocol=PROTOCOL, owner=self._owner)
        declared = described.limits.max_records_per_call if described.limits else None
        self._most = min(_BATCH, declared or _BATCH)
        self._capabilities = described.capabilities
        if described.tiers is not None and "tiers" in described.capabilities:
            self._tiers = frozenset(tier.name for tier in described.tiers)

    async def take(self, number: int, text: bytes) -> bool:
        """Add one line to the batch. If the batch is full, write it first, and return True.

        Raises:
            NotAnExport: the line is not a record. No record of its batch has been written.
        """
        if number == 1 and (header := _header(text)) is not None:
            self.header = header
            return False
        self._place += 1
        draft = _draft(number, text)
        if draft.id is None:
            draft.id = hashlib.blake2b(b"%d:%s" % (self._place, text), digest_size=16).hexdigest()
        line = Line(number, msgspec.structs.replace(draft, **self._drop))
        size = bytes_of(draft)
        full = bool(self._batch) and (len(self._batch) == self._most or self._held + size > _BATCH_BYTES)
        if full:
            await self.finish()
        self._batch.append(line)
        self._held += size
        return full

    async def finish(self) -> None:
        """Write the current batch; called once more at the end of the file."""
        batch, self._batch, self._held = self._batch, [], 0
        if batch:
            await self._write_new(batch)

    async def _write_new(self, batch: Sequence[Line]) -> None:
        """Write the records of a batch whose id is new and whose key is free."""
        taken = await self._ids_there([id_of(line) for line in batch])
        holders = await self._key_holders(batch)
        new: list[Line] = []
        for line in batch:
            draft = line.draft
            id = id_of(line)
            lost = self._not_kept(draft)
            address = None if draft.key is None else (self._owner_of(draft), draft.key)
            holder = None if address is None else holders.get(address)
            if id in taken:
                self.counts.already_there += 1
            elif lost is not None:
                self._skip(
                    line,
                    f"the server does not declare {lost[1]}, so it would lose the field {lost[0]}; --drop {lost[0]} "
                    "imports the record without it",
                )
            elif self._tiers is not None and draft.tier is not None and draft.tier not in self._tiers:
                self._skip(line, f"the server has no tier {draft.tier!r}; --drop tier lets the server choose one")
            elif holder is not None:
                self._skip(line, "another record has its key", f": {draft.key!r} belongs to {holder!r}")
            else:
                taken.add(id)
                if address is not None:
                    holders[address] = id
                new.append(line)
        if new:
            await self._write(new)

    async def _write(self, lines: Sequence[Line]) -> None:
        """Write lines in one call. If the server rejects a record, write the others without it."""
        drafts = [line.draft for line in lines]
        try:
            ids = (await self._asking.read("memory/remember", _Ids, records=drafts, owner=self._owner)).ids
        except A2MError as error:
            if error.code not in _ABOUT_A_RECORD:
                raise
            if len(lines) == 1:
                self._skip(lines[0], f"rejected with {Code(error.code).name}", f": {error.message}")
                return
            half = len(lines) // 2
            await self._write(lines[:half])
            await self._write(lines[half:])
            return
        if ids != [draft.id for draft in drafts]:
            first, last = lines[0].number, lines[-1].number
            raise BadAnswer(f"memory/remember: the server returned other ids than those of lines {first} to {last}")
        self.counts.written += len(ids)

    async def _ids_there(self, ids: Sequence[str]) -> set[str]:
        return {record.id for record in await self._found({"id": ids})}.intersection(ids)

    async def _key_holders(self, batch: Sequence[Line]) -> dict[tuple[str | None, str], str]:
        """Return the ids of the records that have the keys of a batch, by owner and key."""
        keys = [line.draft.key for line in batch if line.draft.key is not None]
        if not keys or "keys" not in self._capabilities:
            return {}
        found = [record for record in await self._found({"key": keys}) if record.key is not None]
        holders = {(record.owner, str(record.key)): record.id for record in found}
        if self._told_by_token:
            # the owner of the token is not known: a record without an owner might replace any record with its key
            holders |= {(None, str(record.key)): record.id for record in found}
        return holders

    def _owner_of(self, draft: Draft) -> str | None:
        return self._owner if draft.owner is None else draft.owner

    async def _found(self, where: dict[str, Any]) -> "list[_There]":
        # a server that does not support this `where` returns more records than requested
        there = await self._asking.read("memory/timeline", _Timeline, where=where, owner=self._owner)
        if there.degraded:
            raise A2MError(
                Code.INTERNAL_ERROR,
                "a tier did not return all its records, so it is not known which records exist already; run "
                "`a2m timeline` for the reason",
            )
        return there.records

    def _not_kept(self, draft: Draft) -> tuple[str, str] | None:
        """Return a field of the record that the server would lose, and its capability; None if there is none."""
        for field, capability in _CAPABILITY.items():
            # a revision counts the writes to a key; without a key it has no meaning
            means_something = field != "revision" or draft.key is not None
            if capability not in self._capabilities and means_something and getattr(draft, field, None) is not None:
                return field, capability
        return None

    def _skip(self, line: Line, reason: str, detail: str = "") -> None:
        self.counts.skipped[reason] += 1
        self._on_skipped(line, reason + detail)


def id_of(line: Line) -> str:
    """Return the id of a line's record. `Import.take` gives an id to each record that has none."""
    assert line.draft.id is not None
    return line.draft.id


class Numbered:
    """A splitter of a stream into lines, numbered from 1. Blank lines are counted and left out."""

    def __init__(self) -> None:
        self._number = 1
        self._pieces: list[bytes] = []
        self._held = 0

    def feed(self, chunk: bytes) -> list[tuple[int, bytes]]:
        """Return the lines that `chunk` completes. Raises NotAnExport for a line longer than a message may be."""
        lines: list[tuple[int, bytes]] = []
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            self._pieces.append(piece)
            lines += self.end()
            self._number += 1
        self._pieces.append(rest)
        self._held += len(rest)
        if self._held > DEFAULT_MAX_MESSAGE:
            raise NotAnExport(f"line {self._number} is longer than {DEFAULT_MAX_MESSAGE:,} bytes")
        return lines

    def end(self) -> list[tuple[int, bytes]]:
        """Return the last line, which has no newline yet, without a byte order mark at its beginning."""
        line = b"".join(self._pieces).removeprefix(BYTE_ORDER_MARK)
        self._pieces, self._held = [], 0
        return [(self._number, line)] if line.strip() else []


class _Limits(msgspec.Struct):
    max_records_per_call: int | None = None


class _Tier(msgspec.Struct):
    name: str


class _Described(msgspec.Struct):
    capabilities: frozenset[str]
    limits: _Limits | None = None
    tiers: list[_Tier] | None = None


class _There(msgspec.Struct):
    id: str
    owner: str | None = None
    key: str | None = None


class _Timeline(msgspec.Struct):
    records: list[_There]
    degraded: Any = None


class _Ids(msgspec.Struct):
    ids: list[str]


class _FirstLine(msgspec.Struct):
    format: Any = None
    version: Any = None
    server: Any = None
    records: Any = None


def _header(text: bytes) -> Header | None:
    """Return the header, if the first line is one. Raises NotAnExport for a header of another version."""
    try:
        first = msgspec.json.decode(text, type=_FirstLine)
    except msgspec.MsgspecError:
        return None
    if first.format != FORMAT:
        return None
    if first.version != VERSION:
        raise NotAnExport(f"line 1: expected an export of version {VERSION}, got version {first.version!r}")
    return Header(records=first.records if isinstance(first.records, int) else None)


def _draft(number: int, text: bytes) -> Draft:
    """Return the record in a line. Raises NotAnExport."""
    problem = _malformed(text)
    if problem is None:
        try:
            draft = msgspec.json.decode(text, type=Draft)
        except msgspec.ValidationError as found:
            where, sentence = explain(found)
            problem = f"{where}: {sentence}" if where else sentence
        except msgspec.DecodeError as found:
            problem = f"not JSON: {found}"
        else:
            problem = _mistaken(draft)
            if problem is None:
                return draft
    raise NotAnExport(f"line {number} is not a record: {problem}")


def _malformed(text: bytes) -> str | None:
    """Return why any server would reject a whole call that has this record in it; None if it would not."""
    try:
        text.decode()
        parse_request(b'{"jsonrpc":"2.0","id":1,"method":"memory/remember","params":{"record":%s}}' % text.strip())
    except UnicodeDecodeError as problem:
        return f"not valid UTF-8 at byte {problem.start}"
    except MalformedMessage as malformed:
        # for invalid JSON the caller has a better message: it decodes the line without the request around it
        return malformed.message.removeprefix("params: ") if malformed.code == Code.INVALID_PARAMS else None
    return None


def _mistaken(draft: Draft) -> str | None:
    if draft.content is None and draft.uri is None and draft.embedding is None:
        return "expected content, a uri or an embedding"
    if draft.metadata is not UNSET and not bytes(draft.metadata).startswith((b"{", b"null")):
        return "metadata: expected an object"
    if draft.created_at is not None:
        try:
            draft.created_at = render(moment(draft.created_at))  # a server may accept only this form
        except ValueError as problem:
            return f"created_at: {problem}"
    return None
