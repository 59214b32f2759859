"""The catalog of the model: what `a2m_router.catalog` holds for four records and two tiers, in four numbers.

A book is a value. Each change returns another book, and has the name of the catalog's method that it stands for.
"""

from collections.abc import Iterator
from typing import Final

import msgspec

# the tiers, and their names in a story
SOURCE, TARGET = 0, 1
TIERS: Final = (SOURCE, TARGET)
TIER_NAMES: Final = ("source", "target")

# the records: two of a group, the first with a key; a late member of the group; a new record at that key
A, B, C, D = range(4)
IDS: Final = (A, B, C, D)
ID_NAMES: Final = "abcd"
ALL: Final = 0b1111
KEYED: Final = (A, D)

# the kinds of strays
NONE, PENDING, SUPERSEDED, UNWANTED, EQUAL, QUARANTINED = range(6)
KIND_NAMES: Final = ("", "pending", "superseded", "unwanted", "equal", "set aside")

# the bits of a claim: one for each id, the owner's key, the owner's group
KEY: Final = 1 << 4
GROUP: Final = 1 << 5


def members(mask: int) -> Iterator[int]:
    """Return the ids of a set."""
    return (id for id in IDS if mask >> id & 1)


def written(mask: int) -> str:
    """Return a set of ids as text for a story."""
    return "".join(ID_NAMES[id] for id in members(mask)) or "nothing"


def content_in(held: int, id: int) -> int:
    """Return the content of a record in a set of copies: 0 for none, 1 for the first, 2 and 3 for its replacements."""
    return held >> 2 * id & 3


def with_content(held: int, id: int, content: int) -> int:
    """Return the copies with one content changed."""
    return held & ~(3 << 2 * id) | content << 2 * id


def ids_in(held: int) -> int:
    """Return the ids of which a set has a copy."""
    return sum(1 << id for id in IDS if held >> 2 * id & 3)


def only(held: int, mask: int) -> int:
    """Return the copies of these ids."""
    return sum(held & 3 << 2 * id for id in members(mask))


def record_names(mask: int) -> int:
    """Return the claims of a change of these records' copies: their ids, and the key."""
    return mask | KEY if mask & (1 << A | 1 << D) else mask


class Book(msgspec.Struct, frozen=True, gc=False):
    """The state of the catalog.

    Args:
        records: four bits a record: 0 unknown; 1 to 6 its home and content; 7 and 8 reserved, and where.
        strays: three bits a tier and record: the kind.
        forgotten: the ids that have a tombstone.
        redo: 0, or one more than the tier that has the pending write of the keyed record.
    """

    records: int = 0
    strays: int = 0
    forgotten: int = 0
    redo: int = 0

    def home(self, id: int) -> int | None:
        code = self.records >> 4 * id & 15
        return (code - 1) // 3 if 1 <= code <= 6 else None

    def content(self, id: int) -> int:
        code = self.records >> 4 * id & 15
        return 1 + (code - 1) % 3 if 1 <= code <= 6 else 0

    def reserved(self, id: int) -> int | None:
        code = self.records >> 4 * id & 15
        return code - 7 if code >= 7 else None

    def stray(self, tier: int, id: int) -> int:
        return self.strays >> 3 * (4 * tier + id) & 7

    def known(self) -> int:
        """Return the ids that have a record or a reservation."""
        return sum(1 << id for id in IDS if self.records >> 4 * id & 15)

    def living(self, tier: int) -> int:
        """Return the ids that live in a tier."""
        return sum(1 << id for id in IDS if self.home(id) == tier)

    def noted(self, tier: int) -> int:
        """Return the ids whose copies in a tier are to be deleted; a pending stray is not, it belongs to a change."""
        return sum(1 << id for id in IDS if self.stray(tier, id) in (SUPERSEDED, UNWANTED))

    def in_the_way(self, tier: int, mask: int) -> int:
        """Return the strays in a tier with these ids or at their key."""
        wanted = mask | (1 << A | 1 << D) if record_names(mask) & KEY else mask
        return sum(1 << id for id in members(wanted) if self.stray(tier, id))

    def is_behind(self, id: int) -> bool:
        """Return whether the record has a pending write."""
        return id == A and self.redo > 0

    def has_taken_key(self, id: int) -> bool:
        """Return whether another record has the key, or a reservation for it."""
        others = [other for other in KEYED if other != id] if id in KEYED else []
        return any(self.home(other) is not None or self.reserved(other) is not None for other in others)

    # --- changes

    def note(self, tier: int, mask: int, kind: int) -> "Book":
        strays = self.strays
        for id in members(mask):
            at = 3 * (4 * tier + id)
            strays = strays & ~(7 << at) | kind << at
        return msgspec.structs.replace(self, strays=strays)

    def remove_notes(self, tier: int, mask: int) -> "Book":
        return self.note(tier, mask, NONE)

    def _put(self, id: int, code: int) -> "Book":
        return msgspec.structs.replace(self, records=self.records & ~(15 << 4 * id) | code << 4 * id)

    def enter(self, id: int, tier: int, content: int) -> "Book":
        """Let the record live in a tier; this ends its reservation."""
        return self._put(id, 1 + 3 * tier + content - 1)

    def _caught_up(self, id: int) -> "Book":
        """End the pending write of the record, if it has one."""
        return msgspec.structs.replace(self, redo=0) if self.is_behind(id) else self

    def reserve(self, tier: int, mask: int) -> "Book":
        book = self.note(tier, mask, PENDING)
        for id in members(mask):
            book = book._put(id, 7 + tier)
        return book

    def settle_home(self, id: int, tier: int) -> "Book":
        book = self.enter(id, tier, 1).remove_notes(tier, 1 << id)
        return msgspec.structs.replace(book, forgotten=book.forgotten & ~(1 << id))

    def replace(self, tier: int, content: int) -> "Book":
        """Replace the keyed record; its tier gets a pending write."""
        return msgspec.structs.replace(self.enter(A, tier, content), redo=1 + tier)

    def end_pending(self) -> "Book":
        return msgspec.structs.replace(self, redo=0)

    def _refuse(self, id: int, tier: int, remote: bool) -> "Book":
        """Give up a reservation. If the write may still land after a restart (`remote`), leave a tombstone, too."""
        book = (self if self.reserved(id) is None else self._put(id, 0)).note(tier, 1 << id, UNWANTED)
        return msgspec.structs.replace(book, forgotten=book.forgotten | 1 << id) if remote else book

    def abandon(self, tier: int, mask: int, *, remote: bool = False) -> "Book":
        book = self
        for id in members(mask):
            book = book._refuse(id, tier, remote)
        return book

    def give_up(self, tier: int, mask: int) -> "Book":
        book = self
        for id in members(mask):
            if book.stray(tier, id) == PENDING:
                book = book.note(tier, 1 << id, book._kind_given_up(id))
        return book

    def _kind_given_up(self, id: int) -> int:
        """Return the kind of a stray that was to become a copy: the stray of a known record is deleted only after a
        look at its home."""
        return UNWANTED if self.home(id) is None else SUPERSEDED

    def flip(self, source: int, target: int, mask: int, kind: int = SUPERSEDED) -> "Book":
        """Change the homes of records; `kind` is the kind of the strays at the source."""
        book = self
        for id in members(mask):
            book = book.enter(id, target, book.content(id) or 1)._caught_up(id)
        return book.remove_notes(target, mask).note(source, mask, kind)

    def forget(self, id: int, *, noted: bool = True) -> "Book":
        """Delete a record; all its copies become unwanted strays."""
        where = self.home(id)
        book = self._put(id, 0)._caught_up(id)
        if not noted:
            return book
        if where is not None:
            book = book.note(where, 1 << id, UNWANTED)
        for tier in TIERS:
            if book.stray(tier, id):
                book = book.note(tier, 1 << id, UNWANTED)
        return msgspec.structs.replace(book, forgotten=book.forgotten | 1 << id)

    def come_home(self, id: int, tier: int) -> "Book":
        """The home has lost the record: make `tier`, which has a copy, its home."""
        book = self.enter(id, tier, self.content(id)).remove_notes(tier, 1 << id).note(1 - tier, 1 << id, UNWANTED)
        return book._caught_up(id)

    def lose(self, mask: int, *, spares: bool = True) -> "Book":
        """Remove records that a scan did not find at home and that have no noted copy.

        Args:
            spares: keep those with a pending write.
        """
        book = self
        for id in members(mask):
            copies = any(self.stray(tier, id) in (PENDING, SUPERSEDED, EQUAL) for tier in TIERS)
            if self.home(id) is not None and not copies and not (spares and self.is_behind(id)):
                book = book._put(id, 0)._caught_up(id)
        return book

    def begin_recovery(self, *, noted: bool = True, gives_up: bool = True, remote: bool = False) -> "Book":
        """Begin a start after a crash.

        Records that were being moved stay, and their copies are deleted after a look at the home. Reservations are
        given up; without `gives_up` they are dropped without a trace. Without `noted` the notes of copies are dropped.
        """
        book = self
        for tier in TIERS:
            for id in IDS:
                if book.reserved(id) == tier:
                    book = book._refuse(id, tier, remote) if gives_up else book._put(id, 0).remove_notes(tier, 1 << id)
                elif book.stray(tier, id) == PENDING:
                    book = book.note(tier, 1 << id, book._kind_given_up(id) if noted else NONE)
        return book

    def adopt(self, tier: int, held: int) -> "Book":
        """Add the copies that a scan has found to the catalog."""
        book = self
        for id in IDS:
            content, home = content_in(held, id), book.home(id)
            noted = book.stray(tier, id)
            if noted == QUARANTINED and home is None:
                noted = NONE
            if not content or noted or book.reserved(id) is not None or home == tier:
                continue
            if book.forgotten >> id & 1:
                book = book.note(tier, 1 << id, UNWANTED)
            elif home is not None and content == book.content(id):
                book = book.note(tier, 1 << id, EQUAL)
            elif home is not None and content < book.content(id):
                book = book.note(tier, 1 << id, SUPERSEDED)
            elif book.has_taken_key(id):
                book = book.note(tier, 1 << id, QUARANTINED)
            else:
                book = book.enter(id, tier, content).remove_notes(tier, 1 << id)._caught_up(id)
                if home is not None:
                    book = book.note(home, 1 << id, SUPERSEDED)
        return book

    def decide_groups(self) -> "Book":
        """Decide the home of groups of which both tiers hold equal copies: the tier that holds the whole group; if both
        do, the target. If neither does, nothing changes."""
        equal = [sum(1 << id for id in IDS if self.stray(tier, id) == EQUAL) for tier in TIERS]
        for home, other in ((TARGET, SOURCE), (SOURCE, TARGET)):
            coming = self.living(other)
            if (equal[SOURCE] or equal[TARGET]) and equal[home] == coming:
                book = self.remove_notes(home, coming).note(other, coming | equal[other], SUPERSEDED)
                for id in members(coming):
                    book = book.enter(id, home, self.content(id))
                return book
        return self

    def __str__(self) -> str:
        told = []
        for id in IDS:
            home, reserved = self.home(id), self.reserved(id)
            if home is not None:
                told.append(f"{ID_NAMES[id]}{self.content(id)} in {TIER_NAMES[home]}")
            elif reserved is not None:
                told.append(f"{ID_NAMES[id]} reserved in {TIER_NAMES[reserved]}")
        told += [
            f"{ID_NAMES[id]} {KIND_NAMES[self.stray(tier, id)]} in {TIER_NAMES[tier]}"
            for tier in TIERS
            for id in IDS
            if self.stray(tier, id)
        ]
        if self.forgotten:
            told.append(f"{written(self.forgotten)} forgotten")
        if self.redo:
            told.append(f"{TIER_NAMES[self.redo - 1]} has yet to catch up with a")
        return ", ".join(told) or "nothing"
