"""Answers: the records as the router returns them, and the tiers that failed or are incomplete."""

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
    """A tier that is missing or incomplete in an answer, and why."""

    tier: str
    reason: str

    def error(self) -> A2MError:
        """Return the error for a call that needs this tier."""
        return unanswered(self.tier, self.reason, 1.0)


class Former(Degraded, frozen=True):
    """A tier that answered, but holds some records in another state than the catalog says; these are not returned."""

    def error(self) -> A2MError:
        """Return the error for a call that needs this tier; it says that the tier has answered."""
        return untrue(self.tier, self.reason)


class Answer(msgspec.Struct):
    """The records found, in order, and the tiers that are missing or incomplete."""

    records: list[Record]
    degraded: list[Degraded]


class TierAnswers(msgspec.Struct):
    """The results of several tiers, by tier name: `lists` of records, and the `failures` of the others."""

    lists: dict[str, list[Record]]
    failures: dict[str, Failure]

    def missing(self, tiers: Sequence[Tier]) -> list[Degraded]:
        """Return the tiers that failed, of the `tiers` that were asked.

        Raises:
            A2MError: no tier answered, and one of the errors is the caller's to correct (a vector width that was fixed
                just now, a limit of the tier's own); or INTERNAL_ERROR as in `refuse_if_nothing`.
        """
        if len(self.failures) == len(tiers):
            for failure in self.failures.values():
                if isinstance(failure, A2MError) and failure.code in CALLERS_ERRORS:
                    raise failure
        missing = [Degraded(tier, reason_of(failure)) for tier, failure in self.failures.items()]
        refuse_if_nothing(tiers, missing)
        return missing


def reason_of(failure: Failure) -> str:
    """Return why a tier failed."""
    return failure.reason if isinstance(failure, TierDown) else str(failure)


def refuse_if_nothing(tiers: Sequence[Tier], missing: Iterable[Degraded]) -> None:
    """Raise INTERNAL_ERROR if a required tier failed, or all tiers that were asked."""
    required = {tier.name for tier in tiers if tier.required}
    silent = [down for down in missing if not isinstance(down, Former)]
    for down in silent:
        if down.tier in required or len(tiers) <= len(silent):
            raise down.error()


def with_unaccounted(degraded: Sequence[Degraded], unaccounted: Mapping[str, str]) -> list[Degraded]:
    """Return `degraded` with the tiers of `unaccounted` added.

    These may hold, or held during the read, records that the catalog does not have.
    """
    named = {down.tier for down in degraded}
    return [*degraded, *(Degraded(tier, why) for tier, why in unaccounted.items() if tier not in named)]


def age(record: Record, entries: Mapping[str, Entry]) -> tuple[int, int]:
    """Return a record's position in the order of time."""
    entry = entries.get(record.id)
    return (parse(record.created_at), 0) if entry is None else (entry.created_at, entry.seq)


def as_answered(record: Record, entry: Entry | None, embeddings: bool, score: float | None = None) -> Record:
    """Return the record as the router answers it, with the catalog's fields: its tier and what it has earned.

    A record without an entry belongs to a mount. The revision comes from the tier: it belongs to the content, which may
    have been replaced since it was read.
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
