"""Scans: reading all that a tier holds, and adding it to the catalog.

Only scans adopt records: a read never shows an id that the catalog does not have.

Rules:
- a record is lost if its home does not return it by its id, after a scan that did not find it, and no other copy is
  noted. It is removed from the catalog, so that nothing waits for it. What it has earned is kept for its return;
- of two records at one owner's key, or of two owners at one id, one is quarantined. It stays where it is, the log and
  --check name it, and a forget by its id removes it. It is adopted when its key and id are free;
- an interrupted scan starts again from the beginning. Its tier counts as scanned only after `end_scan`; records adopted
  before stay adopted.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import UNSET

from a2m_router.catalog.entries import Entry, entry_of, is_current
from a2m_router.catalog.findings import Torn
from a2m_router.catalog.selection import Selection
from a2m_router.catalog.vectors import Vectors
from a2m_router.config.settings import Settings
from a2m_router.placement.core import Core
from a2m_router.process.alerts import Alerts
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.vectors import MAX_WIDTH
from a2m_router.tiers.answers import OtherFederation, Untrusted, Written
from a2m_router.tiers.gateway import CannotList
from a2m_router.tiers.lifting import Lifted, Origin
from a2m_router.tiers.mode import mode_of
from a2m_router.tiers.profile import CannotServe

log = logging.getLogger(__name__)

# Records that one step reads by id, to find lost ones.
_STEP: Final = 500

# Ids named in one log line, which also has their number.
_NAMED: Final = 20


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """How tiers are added to the catalog.

    Args:
        changed: called when records were added or removed without an event.
        adopt: accept another server behind a tier than last time.
        gather: moves a part of a group to the tier of the rest; None leaves the group split.
        watch: called for each page of a scan with the tier, the number of records read, and the total if it is known.
        only_reads: send no tier anything that it stores.
    """

    changed: Callable[[], None] = lambda: None
    adopt: bool = False
    gather: Callable[[Torn], Awaitable[object]] | None = None
    watch: Callable[[str, int, int | None], None] = lambda tier, read, of: None
    only_reads: bool = False


class Scanner:
    """Reads the tiers of one catalog."""

    def __init__(self, settings: Settings, core: Core, intake: Intake) -> None:
        self._settings = settings
        self._catalog = core.catalog
        self._gateway = core.gateway
        self.intake = intake
        self._alerts = Alerts(log)

    async def lacking(self, tier: str, entries: Sequence[Entry]) -> list[Entry]:
        """Return the entries, of some that live in `tier`, that it does not hold in their current state."""
        with self._catalog.reads.reading():  # during a read, the catalog keeps its copies of pending writes
            found = await self._gateway.read(tier, [entry.id for entry in entries])
            behind = self._catalog.pending.among(entry.id for entry in entries)
            now = self._catalog.records.find(entry.id for entry in entries)
        return [
            entry
            for entry in entries
            if entry.id not in behind
            and entry.id in now
            and now[entry.id].version == entry.version
            and not (entry.id in found and is_current(found[entry.id], entry))
        ]

    async def scan(self, tier: str) -> None:
        """Read all that `tier` holds, adopt its records, and remove lost records from the catalog.

        Raises:
            CannotServe: its server cannot list what it holds, or its records are another federation's.
            TierDown, A2MError: it does not answer.
        """
        adopted = seen = there = 0
        former: list[Entry] = []
        left: list[str] = []
        profile = self._gateway.link(tier).profile
        total = None if profile is None else profile.store.records
        self.intake.watch(tier, 0, total)
        written: list[Written] = []
        try:
            async with aclosing(self._gateway.everything(tier, written)) as pages:
                async for whole in pages:
                    page = self._own(whole, tier)
                    new, refused = self._catalog.adopt(self._entries(page, tier), _vectors(page))
                    adopted += new
                    if new:
                        self.intake.changed()
                    seen += len(whole)
                    entries = self._catalog.records.find(record.id for record in page)
                    if self._catalog.lineage.knows_what_left(tier):
                        aside = {entry.id for entry in refused}
                        left += [record.id for record in page if record.id not in entries and record.id not in aside]
                    there += sum(entry.home == tier for entry in entries.values())
                    living = [record for record in page if record.id in entries and entries[record.id].home == tier]
                    former += [entries[r.id] for r in living if not is_current(r, entries[r.id])]
                    self.intake.watch(tier, seen, total)
                    for entry in refused:
                        log.error(
                            "tier=%s record quarantined, not shown: %r: %s. The first start after that one is "
                            "forgotten adopts it; or forget this one, by its id",
                            tier,
                            entry.id,
                            self._catalog.findings.why_set_aside(entry.id, entry.key),
                        )
        except CannotList as problem:
            raise CannotServe(
                f"tiers.{tier}: its server cannot list what it holds, so it cannot be added to the catalog: {problem}; "
                "use it empty, or as a mount (mount = true)"
            ) from None
        if self._adopts_others(tier, written):
            await self.scan(tier)
            return
        self._refuse_if_lost(tier, written)
        if left:
            log.warning(
                "tier=%s %d records found that were forgotten or given up, will be removed again: %s",
                tier,
                len(left),
                _named(left),
            )
        # a write or a removal meanwhile makes this check stricter than needed, or the next start sees it
        lost = await self._lose_what_is_gone(tier) if there < self._catalog.records.count(tier) else 0
        former = await self.lacking(tier, former) if former else []
        if former:
            log.error(
                "tier=%s %d records found in a former state, not shown: %s; write them again, or forget them",
                tier,
                len(former),
                _named([entry.id for entry in former]),
            )
        if seen or lost:
            log.info("tier=%s scanned: %d records, %d adopted", tier, seen, adopted)

    def others(self, written: Iterable[Written]) -> Counter[Origin]:
        """Return how many of the records each other federation or unknown start has written."""
        return Counter(
            origin for _, origin in written if not self._catalog.lineage.is_ours(origin.federation, origin.epoch)
        )

    def _adopts_others(self, tier: str, written: Iterable[Written]) -> bool:
        """Adopt what other federations have written, if the settings say so, and return whether there was any.

        Otherwise their records are logged, and stay theirs.
        """
        others = self.others(written)
        if others and self.intake.adopt:
            self._catalog.lineage.take_origins(
                [origin.epoch for origin in others if origin.epoch is not None],
                [origin.federation for origin in others if origin.federation is not None],
            )
            return True
        self._catalog.tiers.set_strange(tier, others.total())
        self.log_others(tier, others)
        return False

    def _refuse_if_lost(self, tier: str, written: Iterable[Written]) -> None:
        """Raise OtherFederation if a lifted server's records are probably our own, written under a lost catalog.

        That is so if it holds another federation's records and this federation never had any. With a native store this
        check is not needed: it belongs to one federation, and the one of a lost catalog is rejected earlier.
        """
        others = self.others(written)
        if (
            not others
            or not self._catalog.opening.began_blank
            or self.intake.only_reads
            or self._catalog.lineage.has_enrolled()
        ):
            return
        profiles = ((each, self._gateway.link(each.name).profile) for each in self._settings.managed)
        if any(p is not None and mode_of(t, p).native and p.store.epoch is not UNSET for t, p in profiles):
            return
        ours = self._catalog.lineage.federation
        raise OtherFederation(
            tier,
            _federations(others),
            ours,
            f"; if this one is new, and the server is for both, a2m-router --config FILE --rebuild --federation {ours} "
            "begins it",
        )

    def log_others(self, tier: str, others: Counter[Origin]) -> None:
        """Log once that a tier holds records of other federations."""
        if not others:
            self._alerts.end(tier)
            return
        whose = _federations(others)
        sentence = (
            f"tier={tier} records of another federation not adopted: at least {others.total()} there belong to "
            f"{whose}, this one is {self._catalog.lineage.federation}; give each federation its own server, or stop "
            "the router of the other one, and start once with --adopt to adopt them"
        )
        self._alerts.begin(tier, logging.ERROR, sentence, cause=whose)

    async def _lose_what_is_gone(self, tier: str) -> int:
        """Remove records from the catalog that `tier` does not return by their ids. Return their number.

        This reads all records that should be there, so only scans call it.
        """
        lost: list[str] = []
        after: int | None = 0
        while after is not None:
            page, after = self._catalog.queries.walk(Selection(tiers=[tier]), after, _STEP)
            # the tier may receive a pending write right after it was read
            behind = self._catalog.pending.among(entry.id for entry in page)
            found = await self._gateway.read(tier, [entry.id for entry in page])
            gone = [entry for entry in page if entry.id not in found and entry.id not in behind]
            lost += [entry.id for entry in self._catalog.lose(gone)]
        if lost:
            self.intake.changed()
            log.error("tier=%s %d records lost that should live there: %s", tier, len(lost), _named(lost))
        return len(lost)

    async def adopt_quarantined(self, tier: str) -> None:
        """Adopt quarantined records whose ids and owners' keys are free now."""
        free = self._catalog.findings.free_again(tier)
        if free:
            found = list((await self._gateway.read(tier, free, embeddings=True)).values())
            page = self._own(found, tier)
            adopted, _ = self._catalog.adopt(self._entries(page, tier), _vectors(page))
            self._catalog.remove_notes(tier, set(free) - {record.id for record in found})
            if adopted:
                self.intake.changed()
                log.info("tier=%s %d quarantined records adopted: their ids and keys are free now", tier, adopted)

    async def gather_groups(self) -> None:
        """Make groups whole that are split between two tiers, if both tiers can be reached."""
        for torn in self._catalog.decide_groups().torn:
            if self.intake.gather is not None:
                await self.intake.gather(torn)
        self._catalog.decide_groups()  # after gathering, second copies are superfluous

    def _own(self, page: Sequence[Record], tier: str) -> Sequence[Record]:
        """Return the records of a page that may be adopted as they are.

        If a lifted record is found on a native tier, its owner is in the rider, which a native tier does not read.
        Adopted as it is, it would be visible to everyone.
        """
        if not self._gateway.mode(tier).native:
            return page
        own = [record for record in page if not isinstance(record, Lifted)]
        if len(own) < len(page):
            log.error(
                "tier=%s %d records not adopted: they were written there lifted, as to a server over HTTP; reach the "
                "tier as before (by its url) to have them adopted",
                tier,
                len(page) - len(own),
            )
        return own

    def _entries(self, page: Sequence[Record], tier: str) -> list[Entry]:
        try:
            return [entry_of(record, tier) for record in page]
        except ValueError as problem:
            raise Untrusted(tier, f"holds an invalid record: {problem}") from None


def _federations(origins: Iterable[Origin]) -> str:
    return ", ".join(sorted({str(origin.federation) for origin in origins}))


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (", …" if len(ids) > _NAMED else "")


def _vectors(records: Iterable[Record]) -> Vectors:
    given = ((record.id, record.embedding) for record in records)
    return {id: vector for id, vector in given if vector is not None and 1 <= len(vector) <= MAX_WIDTH}
