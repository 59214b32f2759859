"""Slots: which drafts of a batch become one record, and which revision a writer has seen (`if_revision`). Pure.

The drafts of a slot are written one after the other, and each creates a revision of the page: with `[null, 0]`, the
first one creates the page and the second one replaces it.
"""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET

from a2m_router.catalog.entries import Entry
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params
from a2m_router.protocol.wire.records import ConditionalDraft, Draft, digest
from a2m_router.protocol.wire.timestamps import render


class Slot(msgspec.Struct, eq=False):
    """The drafts of a batch that become one record: they write the same id or key. The last one counts.

    `place` is the slot's index in its batch; `places` are the indexes of its drafts. `answer` is the id of the record.
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
        """Whether one of the drafts has a condition on the revision of its page."""
        return any(draft.if_revision is not UNSET for draft in self.drafts)

    def add(self, draft: ConditionalDraft, place: int) -> None:
        self.drafts.append(draft)
        self.places.append(place)


def slots_of(
    drafts: Sequence[ConditionalDraft], is_another: Callable[[ConditionalDraft], bool]
) -> tuple[list[Slot], list[Slot]]:
    """Return the slots of a batch, and the slot of each draft, in order.

    Drafts with the same id are one record; drafts with the same key are a write and its replacement. A draft whose id
    names a record other than the one at its key (`is_another`) writes to the record with that id.

    Raises:
        A2MError: INVALID_PARAMS for a draft with a condition that would not be written, because an earlier one has its
            id.
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
    """Return INVALID_PARAMS for a draft with a condition whose id belongs to a record that is not at its key.

    Without the condition, the reply would be that record's id, and nothing would be written at the key.
    """
    return invalid_params(
        f"records[{place}].if_revision",
        f"{why}, and that is not the record at the key {draft.key!r}; leave the id out, or take another",
    )


def whole_of(draft: ConditionalDraft, id: str, created_at: str | None, revision: int) -> Draft:
    """Return the draft in the form that a tier gets."""
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
    """Return the draft as a tier gets it: under the id of a known record, after `times` replacements."""
    return whole_of(draft, entry.id, render(entry.created_at), entry.revision + times)


def rewrites_of(slot: Slot, entry: Entry) -> int:
    """Return how often the writes of a slot under a known id replace its record.

    A write replaces it if it has the record's key and owner, and another content. The same key under another owner is
    another key.
    """
    rewrites = 0
    current = entry.digest
    for draft in slot.drafts:
        at_its_key = draft.key is not None and (draft.key, draft.owner) == (entry.key, entry.owner)
        if at_its_key and digest(rewritten(draft, entry, rewrites)) != current:
            rewrites += 1
            current = digest(rewritten(draft, entry, rewrites))
    return rewrites


def is_written(slot: Slot, page: Entry | None) -> bool:
    """Return whether the slot was written by an earlier, identical call, so that its conditions fail now.

    Return False if the conditions are met.

    Raises:
        A2MError: INVALID_PARAMS, the conditions are not met and the slot was not written before.
    """
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
    """Return INVALID_PARAMS for the first draft whose condition is not met; None if all are met.

    Each condition applies to the page as the earlier drafts of the call leave it. The error has `data: {reason:
    "revision", revision}`, with the page's current revision.
    """
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
    todo = "fetch it, and repeat the change on its current content"
    if revision is None:
        todo = "to create a page, send null (no page expected)"
        if draft.owner is not None:
            todo += f"; a page of another owner than {draft.owner!r} is another page"
    return A2MError(
        Code.INVALID_PARAMS,
        f"records[{slot.places[index]}].if_revision: expected {wanted} at the key {draft.key!r}{whose}, and {came}; "
        f"{todo}",
        {"reason": "revision", "revision": revision},
    )


def was_met(slot: Slot, page: Entry) -> bool:
    """Return whether `page` has the revision that writing the slot to a page that met its conditions leads to."""
    before = page.revision - len(slot.drafts)
    began = _revisions(slot, None)[-1] == page.revision and _first_unmet(slot, None) is None
    return began or (before >= 0 and _first_unmet(slot, before) is None)


def _first_unmet(slot: Slot, revision: int | None) -> int | None:
    """Return the index of the first draft whose condition a page at `revision` does not meet; None if all are met."""
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
    """Return the revisions before the first draft, which is `revision`, and after each draft. None: no page exists."""
    first = (slot.last.revision or 0) if revision is None else revision + 1
    return [revision, *range(first, first + len(slot.drafts))]
