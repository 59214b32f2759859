"""What a client sends, from plain Python values: records to be written, conditions, how text is wanted.

Nothing is changed on the way: what JSON cannot say is refused here, instead of arriving as something else.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from a2m_router.protocol.wire.jsonrpc import explain
from a2m_router.protocol.wire.records import ConditionalDraft, Draft


class NewRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A record to be written (§4.2): with `content`, or a `uri`, or an `embedding`; the rest is optional.

    With an `id`, writing it twice writes it once; with a `key`, it replaces what is at that key: with `if_revision`
    only if that is at this revision, with None only if there is nothing. `created_at` and `revision` are for bringing
    in a past; not every server takes them.
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
    """How found records are to be rendered as text (§4.16); what is None is up to the server.

    `budget` is in characters; `cite` marks each entry with its uri, else its key. Only `method="model"` may cost an
    inference.
    """

    method: Literal["template", "model", "none"] | None = None
    style: str | None = None
    model: str | None = None
    budget: int | None = None
    cite: bool | None = None


def several(
    what: str | NewRecord | Mapping[str, Any] | Iterable[NewRecord | Mapping[str, Any]] | None,
) -> Iterable[NewRecord | Mapping[str, Any]]:
    """The records in what may be a text, one record, or several."""
    if isinstance(what, str | None):
        return [NewRecord(content=what)]
    return [what] if isinstance(what, NewRecord | Mapping) else what


def draft_from(record: NewRecord | Mapping[str, Any], otherwise: NewRecord) -> ConditionalDraft:
    """A record as it is sent, with fields that it leaves out taken from `otherwise`. Raises ValueError."""
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
    """About how many bytes a record takes in a message."""
    metadata = 0 if draft.metadata is msgspec.UNSET else len(bytes(draft.metadata))
    return len((draft.content or "").encode("utf-8", "replace")) + metadata + 20 * len(draft.embedding or ()) + 200


def raw_object(value: Mapping[str, Any] | None) -> Raw | None:
    """A JSON object, to the letter: a number that JSON cannot say would otherwise arrive as null, and mean another
    thing."""
    if value is None:
        return None
    try:
        return Raw(json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode())
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(f"expected what JSON can say: {problem}") from None
