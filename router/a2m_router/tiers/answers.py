"""Results from servers, none of which is trusted: decode them, and separate the records of other federations.

- A result is decoded in the mode that its call was prepared for. Lifted records are lowered again.
- One server may serve several federations. Records of another federation are left out, and only counted. A record with
  our federation's id and an unknown epoch shows that the catalog is an older copy.
- A mount is shown as it is; records that cannot be decoded are left out. From any other server, a result that violates
  the protocol counts as none.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol, TypeVar
from unicodedata import normalize

import msgspec

from a2m_router.process.alerts import Alerts
from a2m_router.protocol.wire.records import Draft, Record, Riderless
from a2m_router.protocol.wire.timestamps import render
from a2m_router.tiers.lifting import RESERVED, NewerRider, Origin, ServerRecord, lowered_of, shows_metadata, unescaped
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mode import TierMode
from a2m_router.tiers.profile import CannotServe

# How many records of a result are compared with what the server was sent, in a read for another purpose; and all.
EXAMINED: Final = 3
ALL: Final = 1 << 31

# Characters of a text that an error quotes.
_EXCERPT: Final = 20


T = TypeVar("T")

log = logging.getLogger(__name__)


class Untrusted(TierDown):
    """A tier's server has violated the protocol; its result counts as none."""

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(tier, reason, 0.0, None)


class OfAnother(CannotServe):
    """A tier holds records of a router that the catalog does not know. The message says what to do."""

    def __init__(self, sentence: str, *tiers: str) -> None:
        super().__init__(f"{', '.join(f'tiers.{tier}' for tier in tiers)}: {sentence}")
        self.sentence = sentence
        self.tiers = tiers


class LaterWriter(OfAnother):
    """The catalog is older than what a tier holds."""

    def __init__(self, tier: str, epoch: str | None) -> None:
        super().__init__(
            f"the catalog is older than the records there: it does not know the router start ({epoch}) that last wrote "
            "there; restore the newer catalog, or make a new one from the tiers, which keeps what is still true of "
            "this one: a2m-router --config FILE --rebuild",
            tier,
        )


class OtherFederation(OfAnother):
    """A tier's store belongs to another federation. `otherwise`: a further remedy, for the message."""

    def __init__(self, tier: str, theirs: str | None, ours: str, otherwise: str = "") -> None:
        super().__init__(
            f"the records there belong to another federation ({theirs}, this one is {ours}): give each federation "
            "stores of its own, or stop the router of the other federation and start once with --adopt to take its "
            "records over; if they belong to this federation and its catalog was lost, a2m-router --config FILE "
            f"--rebuild makes a new one{otherwise}",
            tier,
        )


class Lineage(Protocol):
    """The part of a catalog that knows who writes now, and whose records are ours. `Origin` explains the texts."""

    @property
    def federation(self) -> str: ...

    @property
    def epoch(self) -> str: ...

    def is_ours(self, federation: str | None, epoch: str | None) -> bool: ...

    def knows_epoch(self, epoch: str | None) -> bool: ...


# The id of a record on a lifted server, and who has written it.
Written = tuple[str, Origin]


class Ranked(NamedTuple):
    """A server's result of a recall.

    Args:
        records: our records, best first.
        returned: how many records the server returned, including those of other federations.
        is_all: whether the server finds no more records.
    """

    records: list[Record]
    returned: int
    is_all: bool

    @property
    def is_shared(self) -> bool:
        """Whether some of the returned records belong to another federation."""
        return self.returned > len(self.records)


class Answer(NamedTuple):
    """The records of a result that are ours, and the ids of all its records."""

    records: list[Record]
    ids: list[str]


class _Records(msgspec.Struct):
    records: list[Record]


class _RawRecords(msgspec.Struct):
    records: list[msgspec.Raw]


class Answers:
    """Decodes the results of all tiers' servers.

    Args:
        on_metadata: called for lifted records that are read, with the tier's name, and whether its server has kept the
            plain metadata. It is called for every record that is compared with what was sent or added to the catalog.
        lineage: decides whose records are ours. Without it, every record counts as ours.
    """

    def __init__(
        self, links: Mapping[str, Link], on_metadata: Callable[[str, bool], None], lineage: Lineage | None
    ) -> None:
        self._links = links
        self._on_metadata = on_metadata
        self._lineage = lineage
        self._alerts = Alerts(log)
        self._shared: set[str] = set()  # tiers that were seen to hold records of another federation

    def is_shared(self, tier: str) -> bool:
        """Return whether the tier's server was seen to hold records of another federation."""
        return tier in self._shared

    def records(
        self,
        tier: str,
        mode: TierMode,
        raw: msgspec.Raw,
        *,
        examine: int = EXAMINED,
        written: list[Written] | None = None,
    ) -> Answer:
        """Return our records in a result, as they were before they were lifted; of a mount, all its records.

        Use the ids, not the records, to decide whether the result is complete.

        Args:
            mode: the mode that the call was prepared for.
            examine: for how many records to note whether the server has kept the plain metadata.
            written: a list that gets the id and the writer of each record of a lifted server, of any federation.

        Raises:
            LaterWriter: `written` is given, and a router that the catalog does not know has written one of our records.
            Untrusted: the result violates the protocol.
        """
        if mode.native:
            records = [unescaped(record) for record in self.decoded(raw, _Records, tier).records]
            return Answer(records, [record.id for record in records])
        answered = self.decoded(raw, _RawRecords, tier).records
        read = self._lowered(tier, mode, answered)
        ids = [record.id for record, _ in read]
        if mode.mount:
            return Answer([record for record, _ in read], ids)
        ours = [self._lineage is None or self._lineage.is_ours(each.federation, each.epoch) for _, each in read]
        if written is not None:
            written += [(record.id, origin) for record, origin in read]
            for (_, origin), is_ours in zip(read, ours, strict=True):
                if is_ours and self._lineage is not None and not self._lineage.knows_epoch(origin.epoch):
                    raise LaterWriter(tier, origin.epoch)
        for each, (record, _) in zip(answered[:examine], read, strict=False):
            shown = None if isinstance(record, Riderless) else shows_metadata(each, record.metadata)
            if shown is not None:
                self._on_metadata(tier, shown)
        if not all(ours):
            self._shared.add(tier)
        return Answer([record for (record, _), is_ours in zip(read, ours, strict=True) if is_ours], ids)

    def _lowered(self, tier: str, mode: TierMode, answered: Sequence[msgspec.Raw]) -> list[tuple[Record, Origin]]:
        read: list[tuple[Record, Origin]] = []
        for each in answered:
            try:
                received = self.decoded(each, ServerRecord, tier)
            except Untrusted:  # it is logged already
                if not mode.mount:
                    raise
                continue
            try:
                read.append(lowered_of(received, vector=mode.vectors))
            except NewerRider as problem:
                if not mode.mount:
                    raise self.untrusted(tier, str(problem)) from None
                read.append(lowered_of(msgspec.structs.replace(received, metadata=msgspec.UNSET), vector=mode.vectors))
        profile = self._links[tier].profile
        if profile is None or not profile.store.similarity:
            for record, _ in read:
                record.similarity = None  # in another server's result the field may mean anything
        return read

    def ranked(self, tier: str, answer: Answer, limit: int | None) -> Ranked:
        """Return a checked recall result: each record once, best first (§5.3). Raises Untrusted if it is not one."""
        records, ids = answer
        if len(set(ids)) < len(ids):
            raise self.untrusted(tier, "answered a recall with the same record twice")
        scores = [record.score for record in records if record.score is not None]
        if any(first < second for first, second in pairwise(scores)):
            raise self.untrusted(tier, "answered a recall with scores that do not descend")
        if limit is not None and len(ids) > limit:
            self.distrust(tier, "answered a recall with more records than its limit; they are left out")
        return Ranked(records[:limit], len(ids), is_all=limit is None or len(ids) < limit)

    def decoded(self, raw: msgspec.Raw, type: type[T], tier: str) -> T:
        """Decode a result, or a part of one, as `type`. Raises Untrusted if that fails."""
        try:
            return msgspec.json.decode(raw, type=type)
        except msgspec.MsgspecError as problem:
            raise self.untrusted(tier, f"gave an answer that cannot be read: {problem}") from None

    def check_rider(self, tier: str, record: Record, *, created_at: int, owner: str | None, key: str | None) -> None:
        """Raise Untrusted for a record without its rider that differs from the catalog: its fields are the server's."""
        fields = (record.created_at, record.owner, record.key)
        if isinstance(record, Riderless) and fields != (render(created_at), owner, key):
            raise self.untrusted(tier, _without_rider(record.id))

    def untrusted(self, tier: str, reason: str) -> Untrusted:
        """Log a protocol violation of a server, and return the exception to raise for it."""
        self.distrust(tier, reason)
        return Untrusted(tier, reason)

    def distrust(self, tier: str, reason: str) -> None:
        """Log a protocol violation of a server. A further one of the same kind is not logged, whatever the record."""
        kind = reason.partition(":")[0]
        self._alerts.begin(tier, logging.ERROR, f"tier={tier} protocol violation: its server {reason}", cause=kind)


def alteration(given: Draft, kept: Record) -> str:
    """Return how a tier's copy of a record differs from the record that was sent."""
    content = given.content or ""
    if kept.content != content:
        at = next((i for i, pair in enumerate(zip(content, kept.content, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(content), len(kept.content)) if at is None else at
        # texts that differ only in how a letter is encoded look the same
        looks_alike = normalize("NFKC", content) == normalize("NFKC", kept.content)
        parts = [_excerpt(text, at, ascii if looks_alike else repr) for text in (content, kept.content)]
        return (
            f"has altered the content of a record that it was given: {given.id!r}: from character {at + 1} on it was "
            f"given {parts[0]}, and returned {parts[1]}"
        )
    if isinstance(kept, Riderless):
        return _without_rider(kept.id)
    return f"has altered a record that it was given: {given.id!r}"


def _without_rider(id: str) -> str:
    return (
        f"returns a record without the metadata member {RESERVED!r} as it was given it, which holds all that a tier's "
        f"server need not keep: {id!r}; a server must keep metadata (§3.1)"
    )


def _excerpt(text: str, at: int, quoted: Callable[[str], str]) -> str:
    if at >= len(text):
        return "nothing"
    return quoted(text[at : at + _EXCERPT]) + ("…" if len(text) > at + _EXCERPT else "")
