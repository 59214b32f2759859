"""What a copy found by a scan is: the record, or a stray of some kind. Nothing is changed here.

- Of two equal copies, the record is the one further down the way of spills and promotions.
- Of two different copies, the record is the one in the catalog, if all tiers have once been scanned. Before that, it is
  the one with the higher revision, else the one less far down.
- Equal copies of a group are decided for the whole group when both tiers are scanned: only then is it known which tier
  holds the whole group. Until then the second copy is noted, and neither is deleted.
- If a store is older than the catalog (`Lineage.note_set_back`), none of its copies replaces a record that lives
  elsewhere. A copy that has no record was forgotten or given up since, unless a tier has lost the record.
"""

from enum import Enum, auto

import msgspec

from a2m_router.catalog.earned import Earned
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.records import Records, unit_of
from a2m_router.catalog.strays import NotedStray, Strays
from a2m_router.catalog.tables import Tables
from a2m_router.catalog.tombstones import Tombstones
from a2m_router.ranking.policy import Unit


class Verdict(Enum):
    """The verdict on a found copy that is not to be noted as a stray."""

    KNOWN = auto()  # in the catalog already
    RECORD = auto()  # becomes the record


class Torn(msgspec.Struct, frozen=True):
    """A group split between two tiers, neither of which holds all of it: `unit` has to move to `target`."""

    unit: Unit
    source: str
    target: str


class Decided(msgspec.Struct, frozen=True):
    """The result of deciding groups: how many records got a new home, and which groups are still torn."""

    changed: int = 0
    torn: list[Torn] = []


class Whole(msgspec.Struct, frozen=True):
    """A group that `home` holds completely. `coming` lives in `other` so far; `other` has equal copies of `staying`."""

    home: str
    other: str
    coming: list[Entry]
    staying: list[Entry]


class Findings:
    """Verdicts on found copies, from the facts in the other parts of the catalog.

    `spares_found`: this catalog is rebuilt from one that is older than the tiers. The tiers' records are newer than its
    tombstones, so these do not apply.
    """

    def __init__(
        self, tables: Tables, records: Records, strays: Strays, tombstones: Tombstones, earned: Earned
    ) -> None:
        self._tables = tables
        self._records = records
        self._strays = strays
        self._tombstones = tombstones
        self._earned = earned
        self.spares_found = False

    def judge(self, entry: Entry, current: Entry | None, *, knows_what_left: bool) -> Verdict | Stray:
        """Return what a copy found in `entry.home` is: `Verdict`, or the kind of stray to note it as.

        Args:
            current: the catalog's record with this id.
            knows_what_left: the result of `Lineage.knows_what_left` for the tier where the copy was found.
        """
        noted = self._strays.at(entry.home, entry.id)
        is_reserved = self._records.is_reserved(entry.id)
        is_former = knows_what_left and noted is None and not is_reserved
        if noted is not None and (noted.kind != Stray.QUARANTINED or current is not None):
            return Verdict.KNOWN  # a quarantined copy is judged again: its id and its owner's key may be free by now
        if current is None:
            if self.is_unwanted(entry) or (is_former and self._earned.of(entry.id, entry.created_at) is None):
                return Stray.UNWANTED
            return Stray.QUARANTINED if is_reserved or self.is_key_taken(entry) else Verdict.RECORD
        if current.home == entry.home:
            return Verdict.KNOWN
        is_equal = current.digest == entry.digest
        if not is_equal and self.is_unwanted(entry):
            return Stray.UNWANTED
        if is_former:
            return Stray.SUPERSEDED
        if current.owner != entry.owner:
            return Stray.QUARANTINED
        if is_equal and current.group is not None:
            return Stray.EQUAL
        if not self._is_better(entry, current):
            return Stray.SUPERSEDED
        return Stray.QUARANTINED if self.is_key_taken(entry) else Verdict.RECORD

    def is_unwanted(self, entry: Entry) -> bool:
        """Return whether a found record was forgotten by a caller who might forget it.

        It was not if the same record was written again later and its tier then lost it, or if the tombstones do not
        apply (`spares_found`).
        """
        if self.spares_found or not self._tombstones.hold(entry):
            return False
        return self._earned.of(entry.id, entry.created_at) is None

    def is_key_taken(self, entry: Entry | NotedStray) -> bool:
        """Return whether the entry's key belongs to another record, or is reserved by a write under way."""
        if entry.key is None:
            return False
        holder = self._records.by_key(entry.owner, entry.key)
        return self._records.is_key_reserved(entry.owner, entry.key) or (holder is not None and holder.id != entry.id)

    def free_again(self, tier: str) -> list[str]:
        """Return the ids of the quarantined records in `tier` whose id and owner's key are free again."""
        aside = self._strays.of_kind(tier, Stray.QUARANTINED)
        return [stray.id for stray in aside if not self._is_id_taken(stray.id) and not self.is_key_taken(stray)]

    def why_set_aside(self, id: str, key: str | None) -> str:
        """Return why a found record is quarantined."""
        if key is None or self._is_id_taken(id):
            return "another record has its id"
        return f"another record has its owner's key {key!r}"

    def decide(self, scanned: list[str]) -> tuple[list[Whole], list[Torn]]:
        """Sort the groups with equal copies in two `scanned` tiers: whole in one of the two, or torn."""
        whole, torn = [], []
        for owner, group, upper, lower in self._undecided(scanned):
            in_upper, in_lower = self._records.group(upper, owner, group), self._records.group(lower, owner, group)
            also_lower = [entry for entry in in_upper if self._has_equal(lower, entry.id)]
            also_upper = [entry for entry in in_lower if self._has_equal(upper, entry.id)]
            if len(also_lower) == len(in_upper):
                whole.append(Whole(lower, upper, also_lower, also_upper))
            elif len(also_upper) == len(in_lower):
                whole.append(Whole(upper, lower, also_upper, also_lower))
            else:
                torn.append(Torn(unit_of(in_upper), upper, lower))
        return whole, torn

    def _undecided(self, scanned: list[str]) -> list[tuple[str | None, str, str, str]]:
        """Return the groups with equal copies in two `scanned` tiers: owner, group, the upper and the lower tier."""
        found: dict[tuple[str | None, str, str, str], None] = {}
        for tier in scanned:
            for stray in self._strays.of_kind(tier, Stray.EQUAL):
                entry = self._records.get(stray.id)
                if entry is None or entry.group is None or entry.home == tier or entry.home not in scanned:
                    continue
                upper, lower = sorted((entry.home, tier), key=scanned.index)
                related = self._leads_to(upper, lower) or self._leads_to(lower, upper)
                if self._leads_to(lower, upper) if related else self._tables.tiers[lower].shared:
                    upper, lower = lower, upper  # no way connects them: the shared tier loses, to publish nothing
                found[entry.owner, entry.group, upper, lower] = None
        return list(found)

    def _has_equal(self, tier: str, id: str) -> bool:
        """Return whether an equal copy is noted in `tier` of a record that lives elsewhere."""
        noted = self._strays.at(tier, id)
        return noted is not None and noted.kind == Stray.EQUAL

    def _is_id_taken(self, id: str) -> bool:
        return self._records.get(id) is not None or self._records.is_reserved(id)

    def _is_better(self, entry: Entry, current: Entry) -> bool:
        """Return whether a found copy is to replace the known record."""
        if entry.digest == current.digest:
            return self._leads_to(current.home, entry.home)
        if self._tables.fact("was_whole", 0):
            return False  # the catalog has seen every state of the record, so a different one is a former state
        if entry.revision != current.revision:
            return entry.revision > current.revision
        return self._leads_to(entry.home, current.home)

    def _leads_to(self, source: str, target: str) -> bool:
        """Return whether records can get from `source` to `target` by spills and promotions."""
        tier = self._tables.tiers[source]
        ways = [way for way in (tier.spill_to, tier.promote_to) if way is not None]
        return target in ways or any(self._leads_to(way, target) for way in ways)
