"""What becomes of copies that a scan finds: each is the record, or is noted as a stray. Nothing is changed here.

- Of two equal copies the record is the one further down the way of spills and promotions.
- Of two different ones the record is the one in the account, once the account has been whole; before that, the one with
  the higher revision, else the one less far down.
- Equal copies of a group are decided for the whole group, when both tiers are read through: only then is it known which
  of them holds all of it. Until then the second copy is noted, and neither goes.
- Of a store that is older than the account (`Lineage.note_set_back`) no copy is the record of one that lives elsewhere.
  What is in no account was forgotten or given up since, unless a tier has lost it.
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


class Found(Enum):
    """What a found copy is that is not to be noted as a stray."""

    KNOWN = auto()  # accounted for already
    RECORD = auto()  # the record from now on


class Torn(msgspec.Struct, frozen=True):
    """A group of which two tiers hold a part each, and neither all: what is to be moved, from where to where."""

    unit: Unit
    source: str
    target: str


class Decided(msgspec.Struct, frozen=True):
    """What came of deciding groups: how many records have another home now, and which groups are still torn."""

    changed: int = 0
    torn: list[Torn] = []


class Whole(msgspec.Struct, frozen=True):
    """A group of which `home` holds all: `coming` lives in `other` so far, of `staying` that holds equal copies."""

    home: str
    other: str
    coming: list[Entry]
    staying: list[Entry]


class Findings:
    """Decides from what the other parts know.

    `spares_found`: this catalog is made from one that is older than the tiers, so what they hold is later than the
    notes of what was forgotten.
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

    def judge(self, entry: Entry, current: Entry | None, *, knows_what_left: bool) -> Found | Stray:
        """What a copy is that was found in `entry.home`: `Found`, or the kind of stray that it is to be noted as.

        Args:
            current: the record with its id in the account.
            knows_what_left: see `Lineage.knows_what_left`; of the tier where the copy was found.
        """
        noted = self._strays.at(entry.home, entry.id)
        is_reserved = self._records.is_reserved(entry.id)
        is_former = knows_what_left and noted is None and not is_reserved
        if noted is not None and (noted.kind != Stray.ASIDE or current is not None):
            return Found.KNOWN  # of one set aside, the id and its owner's key may be free by now
        if current is None:
            if self.is_unwanted(entry) or (is_former and self._earned.of(entry.id, entry.created_at) is None):
                return Stray.UNWANTED
            return Stray.ASIDE if is_reserved or self.is_key_taken(entry) else Found.RECORD
        if current.home == entry.home:
            return Found.KNOWN
        is_equal = current.digest == entry.digest
        if not is_equal and self.is_unwanted(entry):
            return Stray.UNWANTED
        if is_former:
            return Stray.SUPERSEDED
        if current.owner != entry.owner:
            return Stray.ASIDE
        if is_equal and current.group is not None:
            return Stray.EQUAL
        if not self._is_better(entry, current):
            return Stray.SUPERSEDED
        return Stray.ASIDE if self.is_key_taken(entry) else Found.RECORD

    def is_unwanted(self, entry: Entry) -> bool:
        """Whether a record that was found is noted as forgotten by who might forget it; not one that was written anew,
        and then lost, or since the note was made."""
        if self.spares_found or not self._tombstones.hold(entry):
            return False
        return self._earned.of(entry.id, entry.created_at) is None

    def is_key_taken(self, entry: Entry | NotedStray) -> bool:
        """Whether the entry's key is another record's, or is just being given to one."""
        if entry.key is None:
            return False
        holder = self._records.by_key(entry.owner, entry.key)
        return self._records.is_key_reserved(entry.owner, entry.key) or (holder is not None and holder.id != entry.id)

    def free_again(self, tier: str) -> list[str]:
        """The ids of those records set aside in `tier` of which neither the id nor the owner's key has another record
        any more."""
        aside = self._strays.of_kind(tier, Stray.ASIDE)
        return [stray.id for stray in aside if not self._is_id_taken(stray.id) and not self.is_key_taken(stray)]

    def why_set_aside(self, id: str, key: str | None) -> str:
        """Why a record that was found is not taken in."""
        if key is None or self._is_id_taken(id):
            return "its id has another record"
        return f"its owner's key {key!r} has another record"

    def decide(self, scanned: list[str]) -> tuple[list[Whole], list[Torn]]:
        """What becomes of each group with equal copies in two of the `scanned` tiers. It is torn where neither of them
        holds all of it."""
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
        """The groups with equal copies in two tiers, both of them `scanned`: owner, group, and the two tiers, that
        which is further down last."""
        found: dict[tuple[str | None, str, str, str], None] = {}
        for tier in scanned:
            for stray in self._strays.of_kind(tier, Stray.EQUAL):
                entry = self._records.get(stray.id)
                if entry is None or entry.group is None or entry.home == tier or entry.home not in scanned:
                    continue
                upper, lower = sorted((entry.home, tier), key=scanned.index)
                related = self._leads_to(upper, lower) or self._leads_to(lower, upper)
                if self._leads_to(lower, upper) if related else self._tables.tiers[lower].shared:
                    upper, lower = lower, upper  # without a way between them, it is not published
                found[entry.owner, entry.group, upper, lower] = None
        return list(found)

    def _has_equal(self, tier: str, id: str) -> bool:
        """Whether `tier` was found to hold an equal copy of a record whose home is another."""
        noted = self._strays.at(tier, id)
        return noted is not None and noted.kind == Stray.EQUAL

    def _is_id_taken(self, id: str) -> bool:
        return self._records.get(id) is not None or self._records.is_reserved(id)

    def _is_better(self, entry: Entry, current: Entry) -> bool:
        """Whether a copy that was found is to be the record, rather than the one that is known."""
        if entry.digest == current.digest:
            return self._leads_to(current.home, entry.home)
        if self._tables.fact("was_whole", 0):
            return False  # it knows every record's state, and another one is a former one
        if entry.revision != current.revision:
            return entry.revision > current.revision
        return self._leads_to(entry.home, current.home)

    def _leads_to(self, source: str, target: str) -> bool:
        """Whether records can get from `source` to `target` by spills and promotions."""
        tier = self._tables.tiers[source]
        ways = [way for way in (tier.spill_to, tier.promote_to) if way is not None]
        return target in ways or any(self._leads_to(way, target) for way in ways)
