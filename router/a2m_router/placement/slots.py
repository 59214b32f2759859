"""Slots: which drafts of a batch become one record, and what a writer has seen of it (`if_revision`). Pure.

The drafts of a slot are written one after the other, each making a revision of the page: with `[null, 0]` the first one
begins the page and the second one replaces it.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from a2m_router.catalog.entries import Entry
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.records import ConditionalDraft, Draft, digest
from a2m_router.protocol.wire.timestamps import render


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


def whole_of(draft: ConditionalDraft, id: str, created_at: str | None, revision: int) -> Draft:
    """The draft as a tier is given it."""
    return msgspec.structs.replace(
        draft,
        id=id,
        content=draft.content or "",
        created_at=created_at,
        revision=revision,
        tier=None,
        if_revision=UNSET,
    )


def rewritten(draft: ConditionalDraft, entry: Entry, times: int = 0) -> Draft:
    """The draft as a tier is given it under the id of a known record, after it was replaced so many times."""
    return whole_of(draft, entry.id, render(entry.created_at), entry.revision + times)


def rewrites_of(slot: Slot, entry: Entry) -> int:
    """How often the writes of a slot under a known id replace its record: each that carries its owner's key, with
    another content. The same key under another owner is another key."""
    rewrites = 0
    current = entry.digest
    for draft in slot.drafts:
        at_its_key = draft.key is not None and (draft.key, draft.owner) == (entry.key, entry.owner)
        if at_its_key and digest(rewritten(draft, entry, rewrites)) != current:
            rewrites += 1
            current = digest(rewritten(draft, entry, rewrites))
    return rewrites


def is_written(slot: Slot, page: Entry | None) -> bool:
    """Whether a slot whose conditions are not met any more has been written before, and is there: then the call is a
    repeated one. False if they are met. Raises INVALID_PARAMS if they are not, and it is not there."""
    draft = slot.last
    assert draft.key is not None, "a condition is about a key"
    if page is not None and (page.owner, page.key) != (draft.owner, draft.key):
        raise not_at_key(slot.places[-1], draft, f"there is a record with the id {page.id!r}")
    error = unmet(slot, page)
    if error is None:
        return False
    if page is not None and was_met(slot, page) and digest(rewritten(draft, page)) == page.digest:
        return True
    raise error


def unmet(slot: Slot, page: Entry | None) -> A2MError | None:
    """INVALID_PARAMS with `data: {reason: "revision", revision}` for the first draft whose condition is not met by the
    page as it is, and as earlier drafts leave it; None if all are met. `revision` is the page's, as it is."""
    revision = None if page is None else page.revision
    index = _first_unmet(slot, revision)
    if index is None:
        return None
    draft = slot.drafts[index]
    whose = "" if draft.owner is None else f" of {draft.owner!r}"
    wanted = "no page" if draft.if_revision is None else f"a page at revision {draft.if_revision}"
    came = "there is none" if revision is None else f"it is at revision {revision}"
    left = _revisions(slot, revision)[index]
    if left != revision:
        came += f" ({left} after the earlier records of this call)"
    todo = "fetch it, and repeat the change on what it is now"
    if revision is None:
        todo = "to begin one, say that there must be none (null)"
        if draft.owner is not None:
            todo += f"; a page that is not of {draft.owner!r} is another one"
    return A2MError(
        Code.INVALID_PARAMS,
        f"records[{slot.places[index]}].if_revision: expected {wanted} at the key {draft.key!r}{whose}, and {came}; "
        f"{todo}",
        {"reason": "revision", "revision": revision},
    )


def was_met(slot: Slot, page: Entry) -> bool:
    """Whether a page that met the conditions is at the revision of `page` after the slot was written."""
    before = page.revision - len(slot.drafts)
    began = _revisions(slot, None)[-1] == page.revision and _first_unmet(slot, None) is None
    return began or (before >= 0 and _first_unmet(slot, before) is None)


def _first_unmet(slot: Slot, revision: int | None) -> int | None:
    """The index of the first draft whose condition is not met by a page at `revision`; None if all are met."""
    left = _revisions(slot, revision)
    return next(
        (
            index
            for index, draft in enumerate(slot.drafts)
            if draft.if_revision is not UNSET and draft.if_revision != left[index]
        ),
        None,
    )


def _revisions(slot: Slot, revision: int | None) -> list[int | None]:
    """The revisions that the drafts lead to: before the first one, which is `revision`, and after each of them. None is
    that of a page that is not there."""
    first = (slot.last.revision or 0) if revision is None else revision + 1
    return [revision, *range(first, first + len(slot.drafts))]
