"""`if_revision`: what a writer has seen of a page, compared with what the page is. Pure.

The drafts of a slot are written one after the other, each making a revision of the page: with `[null, 0]` the first one
begins the page and the second one replaces it.
"""

from msgspec import UNSET

from a2m_router.catalog.entries import Entry
from a2m_router.placement.slots import Slot
from a2m_router.protocol.wire.errors import A2MError, Code


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
