"""What servers answer, none of which is trusted: read, and sorted by whose it is.

- An answer is read in the mode that its question was prepared for. Lifted records are lowered again.
- A server at hand may serve several federations. Records of another one are left out, and only counted; what bears our
  federation's id, and a start of the router that the catalog does not know, says that the catalog is an older copy.
- A mount is shown as it is: what of it cannot be read is left out. Of any other server an answer that is not as the
  protocol has it counts as none.
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
from a2m_router.tiers.lifting import RESERVED, NewerRider, Origin, Told, lowered_of, shows_metadata, unescaped
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mode import TierMode
from a2m_router.tiers.profile import CannotServe

# Records of an answer that are compared with what the server was sent, in a read that has another purpose; and all.
EXAMINED: Final = 3
ALL: Final = 1 << 31

# Characters of a text that an error quotes.
_EXCERPT: Final = 20


T = TypeVar("T")

log = logging.getLogger(__name__)


class Untrusted(TierDown):
    """A tier's server is not what it says; its answer counts as none."""

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(tier, reason, 0.0, None)


class OfAnother(CannotServe):
    """What a tier holds was written by a router that the catalog does not know; says what to do about it."""

    def __init__(self, sentence: str, *tiers: str) -> None:
        super().__init__(f"{', '.join(f'tiers.{tier}' for tier in tiers)}: {sentence}")
        self.sentence = sentence
        self.tiers = tiers


class LaterWriter(OfAnother):
    """The catalog is older than what a tier holds."""

    def __init__(self, tier: str, epoch: str | None) -> None:
        super().__init__(
            f"the catalog is older than what is held there: it does not know the start of the router ({epoch}) that "
            "has last written there; bring the newer catalog back, or make one from what the tiers hold, which keeps "
            "of this one what is still true: a2m-router --config FILE --rebuild",
            tier,
        )


class OtherFederation(OfAnother):
    """A tier's store is another federation's. `otherwise`: what else may be done about it."""

    def __init__(self, tier: str, theirs: str | None, ours: str, otherwise: str = "") -> None:
        super().__init__(
            f"what is held there belongs to another federation ({theirs}, this one is {ours}): give each federation "
            "stores of its own, or end the router of the other one, and start once with --adopt to take it as it is; "
            "if it is this one's, and its catalog was lost, a2m-router --config FILE --rebuild makes a new one"
            f"{otherwise}",
            tier,
        )


class Lineage(Protocol):
    """Who writes now, and whose writing is known; a catalog. See `Origin` for what the texts are."""

    @property
    def federation(self) -> str: ...

    @property
    def epoch(self) -> str: ...

    def is_ours(self, federation: str | None, epoch: str | None) -> bool: ...

    def knows_epoch(self, epoch: str | None) -> bool: ...


# The id of a record at a lesser server, and who has written it.
Written = tuple[str, Origin]


class Ranked(NamedTuple):
    """A server's answer to a recall.

    Args:
        records: those that are ours, best first.
        told: how many records the server told, another federation's among them.
        is_all: whether it finds no more.
    """

    records: list[Record]
    told: int
    is_all: bool

    @property
    def is_shared(self) -> bool:
        """Whether some of what it told is another federation's."""
        return self.told > len(self.records)


class Answer(NamedTuple):
    """The records of an answer that are ours, and the ids of all that it has."""

    records: list[Record]
    ids: list[str]


class _Records(msgspec.Struct):
    records: list[Record]


class _TellsRecords(msgspec.Struct):
    records: list[msgspec.Raw]


class Answers:
    """Reads what the servers of all tiers answer.

    Args:
        on_metadata: is called for lifted records that are read, among them all that are compared with what was given,
            or are taken into the account: the tier's name, and whether its server keeps the metadata that it is shown.
        lineage: whose writing is known. Without, what is read may be anybody's.
    """

    def __init__(
        self, links: Mapping[str, Link], on_metadata: Callable[[str, bool], None], lineage: Lineage | None
    ) -> None:
        self._links = links
        self._on_metadata = on_metadata
        self._lineage = lineage
        self._alerts = Alerts(log)
        self._shared: set[str] = set()  # tiers that were seen to hold what is another federation's

    def is_shared(self, tier: str) -> bool:
        """Whether the tier's server was seen to hold what is another federation's, beside ours."""
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
        """The records in an answer, as they were before they were lifted; but not those of another federation, except
        where all that a mount holds is shown. Whether an answer is all that there is its ids tell, and not its records.

        Args:
            mode: the one that the question was prepared for.
            examine: of so many it is noted whether the server keeps the metadata that it is shown.
            written: takes the id of each record of a lesser server, others' among them, and who has written it. One
                that a router has written of which the catalog knows nothing raises LaterWriter then.
        """
        if mode.native:
            records = [unescaped(record) for record in self.decoded(raw, _Records, tier).records]
            return Answer(records, [record.id for record in records])
        answered = self.decoded(raw, _TellsRecords, tier).records
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
                told = self.decoded(each, Told, tier)
            except Untrusted:  # the log has said so
                if not mode.mount:
                    raise
                continue
            try:
                read.append(lowered_of(told, vector=mode.vectors))
            except NewerRider as problem:
                if not mode.mount:
                    raise self.untrusted(tier, str(problem)) from None
                read.append(lowered_of(msgspec.structs.replace(told, metadata=msgspec.UNSET), vector=mode.vectors))
        profile = self._links[tier].profile
        if profile is None or not profile.store.similarity:
            for record, _ in read:
                record.similarity = None  # a field of that name may mean anything
        return read

    def ranked(self, tier: str, answer: Answer, limit: int | None) -> Ranked:
        """An answer to a recall, if it is one: each record once, best first (§5.3)."""
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
        """An answer, or a part of one, as `type`. Raises Untrusted for one that is none."""
        try:
            return msgspec.json.decode(raw, type=type)
        except msgspec.MsgspecError as problem:
            raise self.untrusted(tier, f"gave an answer that cannot be read: {problem}") from None

    def check_rider(self, tier: str, record: Record, *, created_at: int, owner: str | None, key: str | None) -> None:
        """Raises Untrusted for a record that has come without its rider, and is not as it is accounted for: what its
        server says of it is not the record."""
        told = (record.created_at, record.owner, record.key)
        if isinstance(record, Riderless) and told != (render(created_at), owner, key):
            raise self.untrusted(tier, _without_rider(record.id))

    def untrusted(self, tier: str, reason: str) -> Untrusted:
        """What to raise for an answer that shows that a server is not what it says; the log says so, too."""
        self.distrust(tier, reason)
        return Untrusted(tier, reason)

    def distrust(self, tier: str, reason: str) -> None:
        """Say in the log that a server is not what it says; not again until it is so in another way, whichever record
        shows it."""
        kind = reason.partition(":")[0]
        self._alerts.begin(tier, logging.ERROR, f"{tier}: its server is not what it says: it {reason}", cause=kind)


def alteration(given: Draft, kept: Record) -> str:
    """What a tier did to a record, which it holds otherwise than it was given it."""
    content = given.content or ""
    if kept.content != content:
        at = next((i for i, pair in enumerate(zip(content, kept.content, strict=False)) if pair[0] != pair[1]), None)
        at = min(len(content), len(kept.content)) if at is None else at
        # texts that differ in how they spell a letter look the same
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
