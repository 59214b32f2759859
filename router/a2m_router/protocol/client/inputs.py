"""Converts plain Python values into what a client sends: records, conditions, and options for rendered text.

Values arrive unchanged: a value that JSON cannot represent is rejected here, instead of arriving as another one.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.jsonrpc import explain
from a2m_router.protocol.wire.records import ConditionalDraft, Draft


class NewRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record to be written (§4.2): with `content`, a `uri` or an `embedding`; the rest is optional.

    With an `id`, the write can be repeated safely. With a `key`, it replaces the record at that key. With `if_revision`
    it does so only if that record has this revision; with `if_revision=None`, only if there is no record. `created_at`
    and `revision` are for imports of older records; not every server accepts them.
    """

    content: str | None = None
    id: str | None = None
    role: str | None = None
    metadata: Mapping[str, Any] | None = None
    group: str | None = None
    tier: str | None = None
    salience: float | None = None
    owner: str | None = None
    session: str | None = None
    key: str | None = None
    embedding: Sequence[float] | None = None
    uri: str | None = None
    media_type: str | None = None
    created_at: str | None = None
    revision: int | None = None
    if_revision: int | UnsetType | None = UNSET


class Prompt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to render found records as text (§4.16); the server chooses for fields that are None.

    `budget` is in characters; `cite` marks each entry with its uri, else its key. Only `method="model"` may call a
    language model.
    """

    method: Literal["template", "model", "none"] | None = None
    style: str | None = None
    model: str | None = None
    budget: int | None = None
    cite: bool | None = None


def several(
    what: str | NewRecord | Mapping[str, Any] | Iterable[NewRecord | Mapping[str, Any]] | None,
) -> Iterable[NewRecord | Mapping[str, Any]]:
    """Return a list of records for a text, one record, or several."""
    if isinstance(what, str | None):
        return [NewRecord(content=what)]
    return [what] if isinstance(what, NewRecord | Mapping) else what


def draft_from(record: NewRecord | Mapping[str, Any], otherwise: NewRecord) -> ConditionalDraft:
    """Return a record as it is sent; missing fields come from `otherwise`. Raise ValueError if it is not a record."""
    if not isinstance(record, NewRecord):
        try:
            record = msgspec.convert(record, NewRecord)
        except msgspec.ValidationError as problem:
            where, sentence = explain(problem)
            raise ValueError(f"a record: {where + ': ' if where else ''}{sentence}") from None
    fields = {
        name: value
        for name in Draft.__struct_fields__
        if (value := getattr(record, name)) is not None or (value := getattr(otherwise, name)) is not None
    }
    if "metadata" in fields:
        fields["metadata"] = raw_object(fields["metadata"])
    if "embedding" in fields:
        fields["embedding"] = list(fields["embedding"])
    if not fields.keys() & {"content", "uri", "embedding"}:
        raise ValueError("a record: expected content, a uri or an embedding")
    condition = otherwise.if_revision if record.if_revision is UNSET else record.if_revision
    return ConditionalDraft(**fields, if_revision=condition)


def bytes_of(draft: Draft) -> int:
    """Return roughly how many bytes a record takes in a message."""
    metadata = 0 if draft.metadata is msgspec.UNSET else len(bytes(draft.metadata))
    return len((draft.content or "").encode("utf-8", "replace")) + metadata + 20 * len(draft.embedding or ()) + 200


def raw_object(value: Mapping[str, Any] | None) -> Raw | None:
    """Return the exact JSON of an object; raise ValueError for a value that JSON cannot represent.

    Without this check, a number such as infinity would arrive as null."""
    if value is None:
        return None
    try:
        return Raw(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode())
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"expected a value that JSON can represent: {problem}") from None
