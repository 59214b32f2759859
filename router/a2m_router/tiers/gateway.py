"""The gateway to the records in tiers: write, read back and delete copies by id.

The gateway lifts records for servers that are not native, and `Answers` lowers them again: callers see records as they
are. Each call is prepared for the mode of the connection on which it is sent. A tier may report one thing and have done
another, so callers compare what they read back. The size of a call is bounded; if a result is longer than a message
may be, the gateway requests less.
"""

import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from itertools import islice
from typing import Any, Final, TypeVar

import msgspec

from a2m_router.protocol.wire.errors import A2MError, Code, quota
from a2m_router.protocol.wire.lines import DEFAULT_MAX_MESSAGE
from a2m_router.protocol.wire.method_params import Forget, Pages, Recall, Remember, SessionList, Timeline
from a2m_router.protocol.wire.records import Draft, Record, digest
from a2m_router.tiers.answers import ALL, EXAMINED, Answers, LaterWriter, Lineage, Ranked, Written, alteration
from a2m_router.tiers.failures import unaccounted, unanswered
from a2m_router.tiers.lifting import RESERVED, Origin, escaped, lifted
from a2m_router.tiers.link import TAKES_NO_WRITES, UNACCOUNTED, AnswerTooLong, Link, Refused, TierDown
from a2m_router.tiers.mode import Modes, TierMode

# Records in one call: enough to share a round trip, and few enough to fit easily into a message.
_CHUNK: Final = 100

# Bytes of records in one write, roughly; a larger record is written alone.
_CHUNK_BYTES: Final = 4 * 2**20

_PAGE: Final = 500

T = TypeVar("T")


class ReadOnly(TierDown):
    """A tier's server rejected a write because it is read-only."""

    def __init__(self, tier: str) -> None:
        super().__init__(tier, TAKES_NO_WRITES, 60.0, None)


class CannotList(Exception):
    """A server cannot list all its records. The message says why."""


class _Ids(msgspec.Struct):
    ids: list[str]


class _Next(msgspec.Struct):
    next: str | None = None


class _Session(msgspec.Struct):
    session: str


class _Sessions(msgspec.Struct):
    sessions: list[_Session]


class TierGateway:
    """Access to the copies in all tiers, by the tier's name. Methods raise TierDown, or the A2MError of a tier.

    Args:
        on_metadata: see Answers.
        lineage: who writes. Without it, written records do not name their writer, and every record counts as ours.
    """

    def __init__(
        self,
        links: Mapping[str, Link],
        modes: Modes,
        max_message: int = DEFAULT_MAX_MESSAGE,
        on_metadata: Callable[[str, bool], None] = lambda tier, shown: None,
        lineage: Lineage | None = None,
    ) -> None:
        self._links = links
        self._lineage = lineage
        self._answers = Answers(links, on_metadata, lineage)
        self._modes = modes
        self._largest = max_message // 2  # bytes of the largest record; it surely fits into a message

    def link(self, tier: str) -> Link:
        """Return the link to a tier."""
        return self._links[tier]

    def why_unaccounted(self, tier: str) -> str:
        """Return why the catalog does not have all records of `tier` yet. The text may come from the tier's server."""
        link = self._links[tier]
        return (link.reason if link.status != "up" else link.inactive_reason or link.barred) or UNACCOUNTED

    def without(self, tier: str) -> A2MError:
        """Return the error for a call that needs to know all that `tier` holds."""
        why = self.why_unaccounted(tier)
        return unaccounted(tier, why) if self._links[tier].status == "up" else unanswered(tier, why, 1.0)

    def recall_limit(self, tier: str, otherwise: int) -> int:
        """Return how many records one recall of `tier` returns; `otherwise` if its server does not declare that."""
        profile = self._links[tier].profile
        return (None if profile is None else profile.max_recall_limit) or otherwise

    def is_shared(self, tier: str) -> bool:
        """Return whether the tier's server was seen to hold records of another federation."""
        return self._answers.is_shared(tier)

    def check_rider(self, tier: str, record: Record, *, created_at: int, owner: str | None, key: str | None) -> None:
        """See `Answers.check_rider`."""
        self._answers.check_rider(tier, record, created_at=created_at, owner=owner, key=key)

    def mode(self, tier: str) -> TierMode:
        """Return the mode of `tier`; see `Modes.of`."""
        return self._modes.of(tier)

    def check(self, tier: str, draft: Draft) -> None:
        """Raise QUOTA_EXCEEDED for a complete record that is too large for the tier's server or for a message."""
        profile = self._links[tier].profile
        if profile is None:
            return  # the tier has never been up, so the write fails anyway
        # a lifted record carries its metadata twice, once escaped
        if 4 * bytes_of(draft) > self._largest and not (mode := self.mode(tier)).native:
            size = bytes_of(lifted(draft, vector=mode.vectors, tier=mode.remote))
            if size > self._largest:
                raise quota(f"a record in {tier!r}", self._largest, size, "bytes as it is sent to its server")
        most = profile.max_content_length
        if most is not None and len(draft.content or "") > most:
            raise quota(f"content of a record in {tier!r}", most, len(draft.content or ""), "characters")

    def is_one_call(self, tier: str, drafts: Sequence[Draft]) -> bool:
        """Return whether these records go to `tier` in one call, which writes all of them or none."""
        return len(drafts) <= 1 or sum(1 for _ in islice(self._chunks(tier, drafts, bytes_of), 2)) == 1

    async def write(self, tier: str, drafts: Sequence[Draft]) -> bool:
        """Write complete records to `tier`. They all carry ids, and the result must name exactly those.

        Returns whether the server is native, which promises to keep them as they are.
        """
        for draft in drafts:
            self.check(tier, draft)
        is_native = True
        for chunk in self._chunks(tier, drafts, bytes_of):
            raw, mode = await self._call(tier, "memory/remember", partial(self._as_sent, chunk))
            if self._answers.decoded(raw, _Ids, tier).ids != [draft.id for draft in chunk]:
                raise self._answers.untrusted(tier, "answered a write with other ids than it was given")
            is_native = is_native and mode.native
        return is_native

    def _as_sent(self, drafts: Iterable[Draft], mode: TierMode) -> Remember:
        """Return complete records in the form that a server gets."""
        if mode.native:
            return Remember(records=[escaped(draft) for draft in drafts])
        origin = None if self._lineage is None else Origin(self._lineage.federation, self._lineage.epoch)
        return Remember(
            records=[lifted(draft, vector=mode.vectors, tier=mode.remote, origin=origin) for draft in drafts]
        )

    async def write_seen(self, tier: str, drafts: Sequence[Draft]) -> dict[str, str]:
        """Write complete records to `tier`, and read them back; write those that differ once more.

        Returns the ids of the records that differ even then, each with what is wrong.
        """
        left, unkept = list(drafts), dict[str, str]()
        for _ in range(2):
            if not left:
                break
            await self.write(tier, left)
            unkept = await self.unkept(tier, left)
            left = [draft for draft in left if draft.id in unkept]
            if left:
                # a server that holds an id may keep the old content and still answer with the id
                await self.remove(tier, unkept)
        return unkept

    async def write_new(self, tier: str, drafts: Sequence[Draft]) -> None:
        """Write records that exist nowhere else. If the server is not native, read them back. Raises Untrusted."""
        if await self.write(tier, drafts):
            return
        for wrong in (await self.unkept(tier, drafts)).values():
            raise self._answers.untrusted(tier, wrong)

    async def unkept(self, tier: str, drafts: Sequence[Draft]) -> dict[str, str]:
        """Return the ids of the records that `tier` does not hold as given, each with what is wrong.

        Vectors are compared, too.
        """
        given = {draft.id: draft for draft in drafts if draft.id is not None}
        found, others = await self.there(tier, given, embeddings=True)
        unkept = {}
        for id, draft in given.items():
            copy = found.get(id)
            if id in others:
                unkept[id] = f"holds another record under its id, {others[id]}: {id!r}"
            elif copy is None:
                unkept[id] = f"does not hold a record that it was given: {id!r}"
            elif digest(copy) != digest(draft):
                unkept[id] = alteration(draft, copy)
        return unkept

    async def read(
        self, tier: str, ids: Iterable[str], *, embeddings: bool = False, written: list[Written] | None = None
    ) -> dict[str, Record]:
        """Return those of `ids` that `tier` holds, by id. `written` is as in `Answers.records`.

        Absence is proved: the limit is explicit, and a result with other records than requested is not trusted.
        """
        found: dict[str, Record] = {}
        question = Recall(embeddings=embeddings)
        async for records in self.parts(tier, list(dict.fromkeys(ids)), question, examine=ALL, written=written):
            found.update((record.id, record) for record in records)
        return found

    async def there(
        self, tier: str, ids: Iterable[str], *, embeddings: bool = False
    ) -> tuple[dict[str, Record], dict[str, str]]:
        """Return what `read` finds, and those of `ids` under which the server holds another federation's record.

        The second result says for each id whose record it is.

        Raises:
            Untrusted: a router that the catalog does not know has written one of the records.
        """
        if self._lineage is None or not self._may_be_shared(tier):
            return await self.read(tier, ids, embeddings=embeddings), {}
        written: list[Written] = []
        try:
            found = await self.read(tier, ids, embeddings=embeddings, written=written)
        except LaterWriter as problem:
            raise self._answers.untrusted(tier, str(problem)) from None
        ours = self._lineage.federation
        return found, {
            id: f"which belongs to another federation ({origin.federation}; this one is {ours})"
            for id, origin in written
            if not self._lineage.is_ours(origin.federation, origin.epoch)
        }

    def _may_be_shared(self, tier: str) -> bool:
        """Return whether a tier's server may hold records of another federation."""
        return self._lineage is not None and not self.mode(tier).native

    async def among(self, tier: str, ids: Sequence[str], question: Recall) -> list[Record]:
        """Return those of `ids` that `tier` holds and its server finds to meet the conditions of `question`."""
        return [record async for records in self.parts(tier, ids, question) for record in records]

    async def remove(self, tier: str, ids: Iterable[str]) -> set[str]:
        """Delete `ids` from `tier`. Return those under which it was then seen to hold no record of this federation.

        Another federation's record under one of the ids stays.

        Raises:
            Untrusted: a router that the catalog does not know has written one of the records. Nothing is deleted: the
                copy may be the record, and the catalog a restored older copy.
        """
        removed: set[str] = set()
        for chunk in self._chunks(tier, list(ids)):
            strange = (await self.there(tier, chunk))[1].keys() if self._may_be_shared(tier) else set[str]()
            own = [id for id in chunk if id not in strange]
            if own:
                await self._call(tier, "memory/forget", _alike(Forget(ids=own)))
                left = await self.read(tier, own)
                if left:
                    self._answers.distrust(tier, "says that it has forgotten records, and holds them still")
                removed.update(id for id in own if id not in left)
            removed |= strange
        return removed

    async def recall(self, tier: str, question: Recall) -> Ranked:
        """Return the tier's ranking. It is shorter than the limit if a result of that length does not fit a message."""
        while True:
            try:
                raw, mode = await self._call(tier, "memory/recall", partial(_put, question))
            except AnswerTooLong:
                if question.limit is None or question.limit <= 1:
                    raise
                question = msgspec.structs.replace(question, limit=question.limit // 2)
            else:
                return self._answers.ranked(tier, self._answers.records(tier, mode, raw), question.limit)

    async def pages(
        self, tier: str, question: Timeline, *, examine: int = EXAMINED, written: list[Written] | None = None
    ) -> AsyncGenerator[list[Record], None]:
        """Yield all records of a tier's timeline for `question`, in pages if the server has pages, in its own order.

        See `Answers.records` for the other arguments.
        """
        link = self._links[tier]
        if link.profile is None or not link.profile.store.pages:
            raw, mode = await self._call(tier, "memory/timeline", partial(_put, question))
            yield self._answers.records(tier, mode, raw, examine=examine, written=written).records
            return
        size, after = _PAGE, None
        while True:
            try:
                raw, mode = await self._call(tier, "memory/timeline", partial(_put, _page_of(question, after, size)))
            except AnswerTooLong:
                if size == 1:
                    raise
                size = size // 2
                continue
            yield self._answers.records(tier, mode, raw, examine=examine, written=written).records
            after = self._answers.decoded(raw, _Next, tier).next
            if after is None:
                return

    async def newest(self, tier: str, count: int, written: list[Written] | None = None) -> tuple[list[Record], bool]:
        """Return a tier's newest records, at most `count`, and whether these are all that it holds.

        Records of another federation are left out. `written` is as in `everything`. Raises LaterWriter.
        """
        while True:
            try:
                raw, mode = await self._call(tier, "memory/timeline", partial(_put, Timeline(limit=count)))
            except AnswerTooLong:
                if count <= 1:
                    raise
                count = count // 2
            else:
                records, ids = self._answers.records(tier, mode, raw, written=[] if written is None else written)
                return records, len(ids) < count

    async def everything(self, tier: str, written: list[Written] | None = None) -> AsyncGenerator[list[Record], None]:
        """Yield all records of a tier, vectors included: page by page, in one timeline, or session by session.

        Records of another federation are left out.

        Args:
            written: a list that gets the id and the writer of each record of a lifted server, of any federation.

        Raises:
            CannotList: the server may hold more records than it can list.
            LaterWriter: a router that the catalog does not know has written one of our records.
        """
        profile = self._links[tier].profile
        written = [] if written is None else written

        def is_full(page: list[Record], before: int) -> bool:
            most = None if profile is None else profile.max_recall_limit
            return most is not None and max(len(page), len(written) - before) == most

        before = 0
        try:
            question = Timeline(embeddings=True)
            async with aclosing(self.pages(tier, question, examine=ALL, written=written)) as pages:
                async for page in pages:
                    if profile is not None and not profile.store.pages and is_full(page, before):
                        raise CannotList(f"it answers at most {profile.max_recall_limit:,} records at once")
                    before = len(written)
                    yield page
        except AnswerTooLong:
            if profile is None or profile.store.pages or "sessions" not in profile.capabilities:
                raise CannotList("all that it holds does not fit into one message") from None
        else:
            return
        raw, _ = await self._call(tier, "memory/session/list", _alike(SessionList()))
        names: list[str | None] = [each.session for each in self._answers.decoded(raw, _Sessions, tier).sessions]
        for name in [*names, None]:
            question = Timeline(where={"session": raw_json(name)}, embeddings=True)
            try:
                async with aclosing(self.pages(tier, question, examine=ALL, written=written)) as pages:
                    async for page in pages:
                        if is_full(page, before):
                            raise CannotList(f"it answers at most {profile.max_recall_limit:,} records at once")
                        before = len(written)
                        yield page
            except AnswerTooLong:
                which = "what belongs to no session" if name is None else f"its session {name!r}"
                raise CannotList(f"{which} does not fit into one message") from None

    async def is_read_only(self, tier: str) -> bool:
        """Return whether the tier's server is read-only (§2.1). The test is a forget of an id that no record has."""
        unused = f"{RESERVED}:{uuid.uuid4()}"  # a server could read an empty list as no selector: forget everything
        try:
            await self._call(tier, "memory/forget", _alike(Forget(ids=[unused])), is_harmless=True)
        except ReadOnly:
            return True
        except Refused:
            pass
        return False

    async def _call(
        self, tier: str, method: str, prepare: Callable[[TierMode], Any], *, is_harmless: bool = False
    ) -> tuple[msgspec.Raw, TierMode]:
        """Make a call; return its result, and the mode of the connection on which it was sent.

        The parameters are prepared for that mode.
        """
        mode: TierMode

        def prepared() -> Any:
            nonlocal mode
            mode = self.mode(tier)
            return prepare(mode)

        try:
            return await self._links[tier].call(method, prepared, is_harmless=is_harmless), mode
        except Refused as refused:
            if refused.code in (Code.METHOD_NOT_FOUND, Code.CAPABILITY_NOT_SUPPORTED):
                raise self._answers.untrusted(tier, f"does not serve {method} as it says: {refused.message}") from None
            if refused.code == Code.READ_ONLY:
                raise ReadOnly(tier) from None
            raise

    async def parts(
        self,
        tier: str,
        ids: Sequence[str],
        question: Recall,
        *,
        examine: int = EXAMINED,
        written: list[Written] | None = None,
    ) -> AsyncGenerator[list[Record], None]:
        """Yield what `among` finds, one part of `ids` at a time, each part in the server's order."""
        waiting = list(self._chunks(tier, ids))[::-1]
        while waiting:
            chunk = waiting.pop()
            asked = msgspec.structs.replace(
                question, where={**(question.where or {}), "id": raw_json(chunk)}, limit=len(chunk)
            )
            try:
                raw, mode = await self._call(tier, "memory/recall", partial(_put_anywhere, asked))
            except AnswerTooLong:
                if len(chunk) == 1:
                    raise
                waiting += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]
                continue
            records, ids = self._answers.records(tier, mode, raw, examine=examine, written=written)
            returned = set(ids)  # another federation may have records under the same ids
            if not returned <= set(chunk):
                raise self._answers.untrusted(tier, "answered a read by id with other records")
            if returned and len(returned) < len(chunk) and question.query is None and not question.where:
                # its real limit may be below the declared one
                waiting.append([id for id in chunk if id not in returned])
            yield records

    def _chunks(self, tier: str, items: Sequence[T], bytes_of: Callable[[T], int] | None = None) -> Iterable[list[T]]:
        profile = self._links[tier].profile
        limits = () if profile is None else (profile.max_records_per_call, profile.max_recall_limit)
        most = min([_CHUNK, *(limit for limit in limits if limit)])
        chunk: list[T] = []
        held = 0
        for item in items:
            size = 0 if bytes_of is None else bytes_of(item)
            if chunk and (len(chunk) == most or held + size > _CHUNK_BYTES):
                yield chunk
                chunk, held = [], 0
            chunk.append(item)
            held += size
        if chunk:
            yield chunk


_Question = TypeVar("_Question", Recall, Timeline, Pages)


def _alike(params: Any) -> Callable[[TierMode], Any]:
    """Return a function that prepares the same parameters in every mode."""
    return lambda mode: params


def _put(question: _Question, mode: TierMode) -> _Question:
    """Return a query in the form that the server understands."""
    if mode.native:
        return question
    asked = msgspec.structs.replace(
        question, tier=mode.remote, owner=None, key_prefix=None, embeddings=question.embeddings and mode.vectors
    )
    if isinstance(asked, Recall) and not mode.vectors:
        asked = msgspec.structs.replace(asked, embedding=None)
    return asked


def _put_anywhere(question: Recall, mode: TierMode) -> Recall:
    """Do as `_put`, without a tier's name: a record counts even if its server has moved it to another of its tiers."""
    return msgspec.structs.replace(_put(question, mode), tier=None)


def _page_of(question: Timeline, after: str | None, size: int) -> Pages:
    return Pages(**msgspec.structs.asdict(question), after=after, page=size)


def raw_json(value: Any) -> msgspec.Raw:
    """Return a value as raw JSON."""
    return msgspec.Raw(msgspec.json.encode(value))


def bytes_of(draft: Draft) -> int:
    """Return about how many bytes a record takes in a message; for a large record, exactly how many."""
    texts = (draft.content, draft.id, draft.key, draft.group, draft.session, draft.owner, draft.role, draft.uri)
    metadata = 0 if draft.metadata is msgspec.UNSET else len(bytes(draft.metadata))
    rough = 4 * sum(len(text) for text in texts if text is not None) + metadata + 20 * len(draft.embedding or ())
    return rough if rough < _CHUNK_BYTES else len(msgspec.json.encode(draft))
