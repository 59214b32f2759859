"""An answer: records as they are shown, and the tiers that it had to do without."""

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from a2m_router.catalog.entries import Entry
from a2m_router.config.settings import Tier
from a2m_router.protocol.wire.errors import CALLERS_ERRORS, A2MError
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import parse, render
from a2m_router.tiers.failures import unanswered, untrue
from a2m_router.tiers.gather import Failure
from a2m_router.tiers.link import TierDown


class Degraded(msgspec.Struct, frozen=True):
    """A tier that an answer had to do without, and why."""

    tier: str
    reason: str

    def error(self) -> A2MError:
        """What a call is refused with that cannot do without it."""
        return unanswered(self.tier, self.reason, 1.0)


class Former(Degraded, frozen=True):
    """A tier that has answered, but some records not as they are by the account; these are not shown."""

    def error(self) -> A2MError:
        """As of any other, but that the tier has answered."""
        return untrue(self.tier, self.reason)


class Answer(msgspec.Struct):
    """The records that were found, in their order, and the tiers that it had to do without."""

    records: list[Record]
    degraded: list[Degraded]


class TierAnswers(msgspec.Struct):
    """What several tiers answered, by their names: `lists` of records, and the `failures` of those that did not."""

    lists: dict[str, list[Record]]
    failures: dict[str, Failure]

    def missing(self, tiers: Sequence[Tier]) -> list[Degraded]:
        """Those of the `tiers` that were asked that did not answer.

        Raises what the caller can mend, where none has answered: a width that was fixed only just now, a limit of the
        tier's own; and INTERNAL_ERROR as `refuse_if_nothing` does.
        """
        if len(self.failures) == len(tiers):
            for failure in self.failures.values():
                if isinstance(failure, A2MError) and failure.code in CALLERS_ERRORS:
                    raise failure
        missing = [Degraded(tier, reason_of(failure)) for tier, failure in self.failures.items()]
        refuse_if_nothing(tiers, missing)
        return missing


def reason_of(failure: Failure) -> str:
    """Why a tier did not answer."""
    return failure.reason if isinstance(failure, TierDown) else str(failure)


def refuse_if_nothing(tiers: Sequence[Tier], missing: Iterable[Degraded]) -> None:
    """Raises INTERNAL_ERROR without a required tier, and when none of those asked has answered."""
    required = {tier.name for tier in tiers if tier.required}
    silent = [down for down in missing if not isinstance(down, Former)]
    for down in silent:
        if down.tier in required or len(tiers) <= len(silent):
            raise down.error()


def with_unaccounted(degraded: Sequence[Degraded], unaccounted: Mapping[str, str]) -> list[Degraded]:
    """The tiers that an answer had to do without, and those that hold, or held, what is not accounted for."""
    named = {down.tier for down in degraded}
    return [*degraded, *(Degraded(tier, why) for tier, why in unaccounted.items() if tier not in named)]


def age(record: Record, entries: Mapping[str, Entry]) -> tuple[int, int]:
    """A record's place in the order of time."""
    entry = entries.get(record.id)
    return (parse(record.created_at), 0) if entry is None else (entry.created_at, entry.seq)


def as_answered(record: Record, entry: Entry | None, embeddings: bool, score: float | None = None) -> Record:
    """The record as it is answered, with what the router keeps account of: where it lives and what it has earned. What
    has no entry is a mount's.

    Its revision is the tier's word: it belongs to the content, which may have been replaced since it was read.
    """
    embedding = record.embedding if embeddings else None
    if entry is None:
        return msgspec.structs.replace(record, embedding=embedding, similarity=None, score=score)
    return msgspec.structs.replace(
        record,
        tier=entry.home,
        salience=entry.salience,
        access_count=entry.access_count,
        accessed_at=None if entry.accessed_at is None else render(entry.accessed_at),
        revision=None if entry.key is None else record.revision or 0,
        embedding=embedding,
        similarity=None,
        score=score,
    )
