"""Check and complete the drafts of a write (§4.2). Pure: this module has no access to the stored records."""

import math
from collections.abc import Sequence

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from a2m_router.protocol.server import vectors
from a2m_router.protocol.wire.errors import A2MError, Code, invalid_params, not_supported, quota
from a2m_router.protocol.wire.method_params import Remember
from a2m_router.protocol.wire.records import Draft
from a2m_router.protocol.wire.timestamps import moment, render


class StoreLimits(msgspec.Struct, frozen=True):
    """The limits that `describe` declares and every call must keep (§4.1)."""

    max_records_per_call: int = 1_000
    max_content_length: int = 1_000_000
    max_recall_limit: int = 4_096


class OwnerScope(msgspec.Struct, frozen=True):
    """The owner of a call.

    `knows_caller`: the binding distinguishes callers; otherwise every `owner` is ignored (§6).
    """

    knows_caller: bool
    owner: str | None


def checked(params: Remember, scope: OwnerScope, limits: StoreLimits, dimensions: int | None) -> list[Draft]:
    """Return the drafts of one call with the call's defaults filled in.

    Args:
        dimensions: the width of the store's vectors; None if it holds none yet: then the first vector fixes it.

    Raises:
        A2MError: INVALID_PARAMS, CAPABILITY_NOT_SUPPORTED, SCOPE_DENIED, QUOTA_EXCEEDED or EMBEDDING_MISMATCH, for the
            first problem found.
    """
    if len(params.records) > limits.max_records_per_call:
        raise quota("records", limits.max_records_per_call, len(params.records), "records")
    drafts = [
        _whole(draft, f"records[{place}]", params.session, scope, limits) for place, draft in enumerate(params.records)
    ]
    _check_widths(drafts, dimensions)
    return drafts


def _whole(draft: Draft, where: str, session: str | None, scope: OwnerScope, limits: StoreLimits) -> Draft:
    if draft.tier is not None:
        raise not_supported("tiers")
    if draft.content is None and draft.uri is None and draft.embedding is None:
        raise invalid_params(where, "expected content, a uri or an embedding")
    if draft.content is not None and len(draft.content) > limits.max_content_length:
        raise quota(f"{where}.content", limits.max_content_length, len(draft.content), "characters")
    for name, text in (("id", draft.id), ("key", draft.key)):
        if text == "":
            raise invalid_params(f"{where}.{name}", "expected at least one character; omit the field to set none")
    if draft.embedding is not None:
        vectors.check(draft.embedding, f"{where}.embedding")
    if draft.salience is not None and not math.isfinite(draft.salience):
        raise invalid_params(f"{where}.salience", "expected a finite number")
    if draft.created_at is not None:
        try:
            draft = replace(draft, created_at=render(moment(draft.created_at)))
        except ValueError as problem:
            raise invalid_params(f"{where}.created_at", str(problem)) from None
    owner = _owner(draft, where, scope)
    metadata = draft.metadata
    if metadata is not UNSET:
        raw = bytes(metadata)
        if raw == b"null":
            metadata = UNSET
        elif not raw.startswith(b"{"):
            raise invalid_params(f"{where}.metadata", "expected an object")
    if owner == draft.owner and metadata is draft.metadata and (draft.session is not None or session is None):
        return draft
    return replace(draft, owner=owner, metadata=metadata, session=session if draft.session is None else draft.session)


def _owner(draft: Draft, where: str, scope: OwnerScope) -> str | None:
    if not scope.knows_caller:
        return None
    if draft.owner is None or scope.owner is None:
        return scope.owner if draft.owner is None else draft.owner
    if draft.owner != scope.owner:
        raise A2MError(
            Code.SCOPE_DENIED,
            f"{where}.owner: this call belongs to {scope.owner!r} and cannot write for {draft.owner!r}",
        )
    return draft.owner


def _check_widths(drafts: Sequence[Draft], dimensions: int | None) -> None:
    for place, draft in enumerate(drafts):
        if draft.embedding is not None:
            vectors.check_width(draft.embedding, dimensions, f"records[{place}].embedding")
            dimensions = len(draft.embedding)
