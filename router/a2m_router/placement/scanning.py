"""Scanning: reading all that a tier holds into the account.

Only here are records adopted: an id that the catalog does not know is never shown by a read.

Rules:
- a record that should be there is lost when it was asked for by its id, after a scan that did not find it, and no other
  copy is noted. Then it leaves the account, so that nothing waits for it; what it has earned is kept for its return;
- of two records at one owner's key, and of two owners' at one id, one is set aside: kept where it is, named in the log
  and by --check, forgotten by its id like any other. It is taken in when key and id are free;
- a scan that is cut off begins anew: its tier is not accounted for before `end_scan`, and what has been adopted by then
  is adopted already.
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Final

import msgspec
from msgspec import UNSET

from a2m_router.catalog.entries import Entry, entry_of, is_as_it_is
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

# Records that are asked for by id in one step of looking for those that are lost.
_STEP: Final = 500

# Ids that one line of the log names; it says how many there are.
_NAMED: Final = 20


class Intake(msgspec.Struct, frozen=True, kw_only=True):
    """How tiers are taken into the account.

    Args:
        changed: called when records came into the account, or went, that no event tells of.
        adopt: another server behind a tier than last time is taken as it is.
        gather: moves a part of a group to where the rest of it is; without, it stays torn for those who can.
        watch: is told of each page of a scan: the tier, how many records were read, and of how many if that is known.
        only_reads: no tier is told anything that it keeps.
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
        """Those of the records that live in `tier` which it does not hold as they are."""
        with self._catalog.reads.reading():  # until it has ended, the catalog keeps what the tier catches up with
            found = await self._gateway.read(tier, [entry.id for entry in entries])
            behind = self._catalog.pending.among(entry.id for entry in entries)
            now = self._catalog.records.find(entry.id for entry in entries)
        return [
            entry
            for entry in entries
            if entry.id not in behind
            and entry.id in now
            and now[entry.id].version == entry.version
            and not (entry.id in found and is_as_it_is(found[entry.id], entry))
        ]

    async def scan(self, tier: str) -> None:
        adopted = seen = there = 0
        former: list[Entry] = []
        left: list[str] = []
        profile = self._gateway.link(tier).profile
        said = None if profile is None else profile.store.records
        self.intake.watch(tier, 0, said)
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
                    former += [entries[r.id] for r in living if not is_as_it_is(r, entries[r.id])]
                    self.intake.watch(tier, seen, said)
                    for entry in refused:
                        log.error(
                            "%s: %r is set aside, and not shown: %s. It is taken in at the next start when that is "
                            "forgotten; or forget this one, by its id",
                            tier,
                            entry.id,
                            self._catalog.findings.why_set_aside(entry.id, entry.key),
                        )
        except CannotList as problem:
            raise CannotServe(
                f"tiers.{tier}: what its server holds cannot be taken into the account: {problem}; use it empty, or as "
                "a mount (mount = true)"
            ) from None
        if self._adopts_others(tier, written):
            await self.scan(tier)
            return
        self._refuse_if_lost(tier, written)
        if left:
            log.warning(
                "%s: %d records there were forgotten, or given up, since it was as it is now, and go again: %s",
                tier,
                len(left),
                _named(left),
            )
        # what is written or leaves meanwhile makes the comparison too careful, or is seen by the next start
        lost = await self._lose_what_is_gone(tier) if there < self._catalog.records.count(tier) else 0
        former = await self.lacking(tier, former) if former else []
        if former:
            log.error(
                "%s: it holds %d records in another state than they were last in, which is not shown: %s; write them "
                "anew, or forget them",
                tier,
                len(former),
                _named([entry.id for entry in former]),
            )
        if seen or lost:
            log.info("%s: scanned %d records, adopted %d", tier, seen, adopted)

    def others(self, written: Iterable[Written]) -> Counter[Origin]:
        """How many records who else has written."""
        return Counter(
            origin for _, origin in written if not self._catalog.lineage.is_ours(origin.federation, origin.epoch)
        )

    def _adopts_others(self, tier: str, written: Iterable[Written]) -> bool:
        """Whether what other federations have written, as a scan has met it, is taken from now on; else it is named,
        and stays theirs."""
        others = self.others(written)
        if others and self.intake.adopt:
            self._catalog.lineage.take_origins(
                [origin.epoch for origin in others if origin.epoch is not None],
                [origin.federation for origin in others if origin.federation is not None],
            )
            return True
        self._catalog.tiers.set_strange(tier, others.total())
        self.say_whose(tier, others)
        return False

    def _refuse_if_lost(self, tier: str, written: Iterable[Written]) -> None:
        """Raises OtherFederation where a lesser server holds another federation's records, and this one has never had
        any: they are rather its own, and its catalog was lost. A native store tells one from the other, since it is
        one federation's: that of a lost catalog would have been refused."""
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

    def say_whose(self, tier: str, others: Counter[Origin]) -> None:
        """Say once of a tier that it holds what belongs to somebody else."""
        if not others:
            self._alerts.end(tier)
            return
        whose = _federations(others)
        sentence = (
            f"{tier}: at least {others.total()} records there belong to another federation ({whose}; this one is "
            f"{self._catalog.lineage.federation}), and are not taken in; give each a server of its own, or end the "
            "router of the other one, and start once with --adopt to take them"
        )
        self._alerts.begin(tier, logging.ERROR, sentence, cause=whose)

    async def _lose_what_is_gone(self, tier: str) -> int:
        """Take out of the account what `tier` does not hold, asked for by id; returns how many records that are.

        Looks at all that should be there: for the scan, which does, too."""
        lost: list[str] = []
        after: int | None = 0
        while after is not None:
            page, after = self._catalog.queries.walk(Selection(tiers=[tier]), after, _STEP)
            # what the tier is just catching up with may be there by the time that it was not found
            behind = self._catalog.pending.among(entry.id for entry in page)
            found = await self._gateway.read(tier, [entry.id for entry in page])
            gone = [entry for entry in page if entry.id not in found and entry.id not in behind]
            lost += [entry.id for entry in self._catalog.lose(gone)]
        if lost:
            self.intake.changed()
            log.error("%s: %d records that should live there are gone: %s", tier, len(lost), _named(lost))
        return len(lost)

    async def take_in_what_was_set_aside(self, tier: str) -> None:
        """Records whose ids or owners' keys had others, and have none any more."""
        free = self._catalog.findings.free_again(tier)
        if free:
            found = list((await self._gateway.read(tier, free, embeddings=True)).values())
            page = self._own(found, tier)
            adopted, _ = self._catalog.adopt(self._entries(page, tier), _vectors(page))
            self._catalog.strike(tier, set(free) - {record.id for record in found})
            if adopted:
                self.intake.changed()
                log.info("%s: %d records that were set aside are taken in, nothing is in their place", tier, adopted)

    async def gather_groups(self) -> None:
        """Groups of which two tiers hold a part each are made whole, as far as both can be reached."""
        for torn in self._catalog.decide_groups().torn:
            if self.intake.gather is not None:
                await self.intake.gather(torn)
        self._catalog.decide_groups()  # a second copy of what has been gathered is one too many now

    def _own(self, page: Sequence[Record], tier: str) -> Sequence[Record]:
        """Those of a page that may be taken in as they are. What was lifted when it was written there has an owner that
        a native tier does not tell of, and would become everybody's."""
        if not self._gateway.mode(tier).native:
            return page
        own = [record for record in page if not isinstance(record, Lifted)]
        if len(own) < len(page):
            log.error(
                "%s holds %d records that were written there lifted, as to a lesser server; reach it as it was reached "
                "then (by its url), and they are taken in",
                tier,
                len(page) - len(own),
            )
        return own

    def _entries(self, page: Sequence[Record], tier: str) -> list[Entry]:
        try:
            return [entry_of(record, tier) for record in page]
        except ValueError as problem:
            raise Untrusted(tier, f"holds a record that is none: {problem}") from None


def _federations(origins: Iterable[Origin]) -> str:
    return ", ".join(sorted({str(origin.federation) for origin in origins}))


def _named(ids: Sequence[str]) -> str:
    return ", ".join(ids[:_NAMED]) + (", …" if len(ids) > _NAMED else "")


def _vectors(records: Iterable[Record]) -> Vectors:
    given = ((record.id, record.embedding) for record in records)
    return {id: vector for id, vector in given if vector is not None and 1 <= len(vector) <= MAX_WIDTH}
