"""Drafts: checking and completing the records that a caller wants to write. Pure.

All errors of a batch that need no tier and no catalog are found here, before either is called.
"""

from collections.abc import Sequence
from typing import Final

import msgspec
from msgspec import UNSET

from a2m_router.catalog.selection import Scope
from a2m_router.config.settings import Settings
from a2m_router.placement.permission import destination, refuse_if_read_only
from a2m_router.protocol.wire.errors import A2MError, Code, embedding_mismatch, invalid_params, quota
from a2m_router.protocol.wire.method_params import ConditionalRemember
from a2m_router.protocol.wire.records import ConditionalDraft, Draft
from a2m_router.protocol.wire.timestamps import moment, render
from a2m_router.protocol.wire.vectors import MAX_WIDTH
from a2m_router.tiers.gateway import bytes_of
from a2m_router.tiers.mounts import Mounts

_JSON_NULL: Final = b"null"

# A tier gets more fields of a record than the caller sends, in one message with others: allow half of a message.
_LARGEST_RECORD: Final = 32 * 2**20

# The event log keeps these fields in memory, and indexes look them up, so they are limited. Longer text is content.
_LONGEST: Final = dict.fromkeys(("id", "key", "session", "group", "role", "owner", "media_type"), 1024) | {
    "uri": 16_384
}

# every JSON parser can represent this number, and the record can still be replaced
_MOST_REVISIONS: Final = 2**53 - 1


def complete_drafts(
    params: ConditionalRemember, scope: Scope, settings: Settings, mounts: Mounts, dimensions: int | None
) -> list[ConditionalDraft]:
    """Return the drafts of a batch with owner, session and tier filled in.

    `metadata` and `created_at` are checked; `created_at` is converted to UTC.

    Raises:
        A2MError: READ_ONLY if all tiers are mounts; INVALID_PARAMS naming `records[i].field`; QUOTA_EXCEEDED over a
            limit; UNKNOWN_TIER; SCOPE_DENIED for another owner's records; EMBEDDING_MISMATCH for a vector with another
            width than `dimensions` or than other vectors of the batch.
    """
    refuse_if_read_only(mounts)
    most = settings.limits.max_records_per_call
    if len(params.records) > most:
        raise quota("records", most, len(params.records), "records")
    width = dimensions
    drafts = []
    for place, draft in enumerate(params.records):
        where = f"records[{place}]"
        _check_text(draft, where, settings.limits.max_content_length)
        size = bytes_of(draft)
        if size > _LARGEST_RECORD:
            raise quota(where, _LARGEST_RECORD, size, "bytes of one record")
        _check_metadata(draft, where)
        if draft.if_revision is not UNSET and draft.key is None:
            raise invalid_params(f"{where}.if_revision", "expected a key beside it: the condition is about that key")
        try:
            created_at = None if draft.created_at is None else render(moment(draft.created_at))
        except ValueError as problem:
            raise invalid_params(f"{where}.created_at", str(problem)) from None
        if draft.embedding is not None:
            width = _check_width(draft.embedding, width, where)
        whole = msgspec.structs.replace(
            draft,
            tier=destination(draft.tier, settings, mounts, f"{where}.tier").name if draft.tier is not None else None,
            owner=_owner(draft.owner, scope, where),
            session=params.session if draft.session is None else draft.session,
            created_at=created_at,
            revision=draft.revision or 0,
        )
        _check_names(whole, where)
        drafts.append(whole)
    return drafts


def _check_text(draft: Draft, where: str, longest: int) -> None:
    if draft.content is None and draft.uri is None and draft.embedding is None:
        raise invalid_params(f"{where}.content", "required, unless the record has a uri or an embedding")
    if draft.content is not None and len(draft.content) > longest:
        raise quota(f"{where}.content", longest, len(draft.content), "characters")
    if draft.id == "":
        raise invalid_params(f"{where}.id", "expected a string that is not empty, or no id at all")
    if draft.revision is not None and draft.revision > _MOST_REVISIONS:
        raise invalid_params(f"{where}.revision", f"expected at most {_MOST_REVISIONS:,}, so that it can be increased")
    if draft.key == "":
        raise invalid_params(f"{where}.key", "expected a string that is not empty, or no key at all")


def _check_names(draft: Draft, where: str) -> None:
    for field, longest in _LONGEST.items():
        name = getattr(draft, field)
        if name is not None and len(name) > longest:
            raise invalid_params(f"{where}.{field}", f"expected at most {longest:,} characters, got {len(name):,}")


def _check_metadata(draft: Draft, where: str) -> None:
    if draft.metadata is UNSET:
        return
    text = bytes(draft.metadata)
    if text == _JSON_NULL:
        draft.metadata = UNSET
    elif not text.startswith(b"{"):
        raise invalid_params(f"{where}.metadata", "expected a JSON object")


def _check_width(embedding: Sequence[float], width: int | None, where: str) -> int:
    if not 1 <= len(embedding) <= MAX_WIDTH:
        raise invalid_params(f"{where}.embedding", f"expected 1 to {MAX_WIDTH:,} numbers, got {len(embedding):,}")
    if width is not None and len(embedding) != width:
        raise embedding_mismatch(f"{where}.embedding", width, len(embedding))
    return len(embedding)


def _owner(explicit: str | None, scope: Scope, where: str) -> str | None:
    """Return the owner of a record: the caller's by default. `records[].owner` never widens a scope."""
    if explicit is None:
        return scope.owner
    if scope.owner is not None and explicit != scope.owner:
        raise A2MError(Code.SCOPE_DENIED, f"{where}.owner: expected your own, {scope.owner!r}, got {explicit!r}")
    return explicit
