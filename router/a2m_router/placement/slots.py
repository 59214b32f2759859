"""Slots: which drafts of a batch become one record. Pure."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from a2m_router.protocol.wire.errors import A2MError, invalid_params
from a2m_router.protocol.wire.records import ConditionalDraft, Draft


class Slot(msgspec.Struct, eq=False):
    """What becomes one record: the drafts of a batch that write the same id or key, in order; the last one counts.

    `place` is its own among the slots of its batch, `places` are the drafts' among those of the batch. `answer` is the
    id of the record that it comes to.
    """

    place: int
    drafts: list[ConditionalDraft]
    places: list[int]
    id: str | None
    answer: str | None = None

    @property
    def first(self) -> ConditionalDraft:
        return self.drafts[0]

    @property
    def last(self) -> ConditionalDraft:
        return self.drafts[-1]

    @property
    def is_conditional(self) -> bool:
        """Whether one of the drafts says at which revision its page must be."""
        return any(draft.if_revision is not UNSET for draft in self.drafts)

    def add(self, draft: ConditionalDraft, place: int) -> None:
        self.drafts.append(draft)
        self.places.append(place)


def slots_of(
    drafts: Sequence[ConditionalDraft], is_another: Callable[[ConditionalDraft], bool]
) -> tuple[list[Slot], list[Slot]]:
    """The slots of a batch, and the slot that each draft falls into, in order.

    The same id twice is one record, the same key twice a write and its replacement; but a draft whose id names a record
    that `is_another` than the one at its key is a write to that.

    Raises INVALID_PARAMS for a draft with a condition that would not be written, since an earlier one has its id.
    """
    slots: list[Slot] = []
    places: list[Slot] = []
    by_id: dict[str, Slot] = {}
    by_key: dict[tuple[str | None, str], Slot] = {}
    for place, draft in enumerate(drafts):
        slot = None if draft.id is None else by_id.get(draft.id)
        if slot is not None:
            if draft.key is not None and draft.key == slot.last.key and draft.owner == slot.last.owner:
                slot.add(draft, place)
            elif draft.if_revision is not UNSET:
                raise not_at_key(place, draft, f"an earlier record of this call has the id {draft.id!r}")
        elif draft.key is not None and (draft.owner, draft.key) in by_key and not is_another(draft):
            slot = by_key[draft.owner, draft.key]
            slot.add(draft, place)
        else:
            slot = Slot(len(slots), [draft], [place], draft.id)
            slots.append(slot)
        if draft.id is not None:
            by_id[draft.id] = slot
        if draft.key is not None:
            by_key.setdefault((draft.owner, draft.key), slot)
        places.append(slot)
    return slots, places


def not_at_key(place: int, draft: Draft, why: str) -> A2MError:
    """INVALID_PARAMS for a draft with a condition whose id is that of a record elsewhere: without the condition it
    would be answered with that record's id, and nothing would be written at its key."""
    return invalid_params(
        f"records[{place}].if_revision",
        f"{why}, and that is not the record at the key {draft.key!r}; leave the id out, or take another",
    )
