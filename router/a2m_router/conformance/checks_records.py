"""Records, and how they come back (§3.1 to §3.3, §4.2)."""

from typing import Any

from a2m_router.conformance.checking import (
    CAPABILITY_NOT_SUPPORTED,
    INVALID_PARAMS,
    READ_ONLY,
    TIMESTAMP,
    NotApplicable,
    Target,
    check,
    expect,
    ids_of,
    same,
    shown,
)

_METADATA: dict[str, Any] = {
    "text": 'tab\t quote" back\\slash / new\nline é 漢字 🦆 \u2028',
    "numbers": [0, -1, 2**53 - 1, 0.5, 1e-7, 1.25e20],
    "truth": [True, False, None],
    "empty": [{}, [], ""],
    "deep": {"a": {"b": {"c": [{"d": [[["e"]]]}]}}},
    "": "an empty name",
    "content": "a name that fields have, too",
}
# characters: more than a column or a buffer of a usual width holds
_LONG_CONTENT = 4000
_LONG_TEXT = 2000


@check("3.1-a", "4.2-1")
def a_record_has_its_fields(target: Target) -> None:
    note = target.note(role="user", group=target.word())
    target.remember(note, target.note())
    for record in (*target.timeline(), *target.recall(note["content"])):
        for field in ("id", "content", "created_at"):
            value = record.get(field)
            expect(
                isinstance(value, str),
                f"expected a string as {field} of every record, got {value!r} in {shown(record)}",
            )
        for field, kind in (("role", str), ("group", str), ("metadata", dict)):
            value = record.get(field)
            expect(
                value is None or isinstance(value, kind), f"expected no other {field} than a {kind.__name__}: {value!r}"
            )


@check("3.1-a", "3.3-a", writes=False)
def what_is_read_has_the_fields_of_a_record(target: Target) -> None:
    for record in (*target.records("recall", limit=5), *target.records("timeline", limit=5)):
        for field in ("id", "content", "created_at"):
            value = record.get(field)
            expect(
                isinstance(value, str),
                f"expected a string as {field} of every record, got {value!r} in {shown(record)}",
            )
        expect(bool(TIMESTAMP.fullmatch(record["created_at"])), f"created_at: got {record['created_at']!r}")


@check("3.1-b", "4.2-1")
def content_role_and_group_come_back_as_written(target: Target) -> None:
    content = f'{target.word()}  two  spaces\ttab\nline\r\n"quoted" \\ é ı ﬀ 漢字 🦆 \u2028\u00a0 e\u0301 end '
    group = f"turn {target.word()}/é"
    most = (target.described.get("limits") or {}).get("max_content_length", _LONG_CONTENT)
    for text in (content, _long_text(target, min(most, _LONG_CONTENT))):
        (id,) = target.remember(target.note(content=text, role="assistant", group=group))
        record = target.read(id)
        for field, written in (("content", text), ("role", "assistant"), ("group", group)):
            came = record.get(field)
            expect(came == written, _changed(field, written, came))


@check("3.1-1", "3.1-2", "3.1-3", "4.2-1")
def metadata_comes_back_as_written(target: Target) -> None:
    for metadata in (_METADATA, {"long": _long_text(target, _LONG_TEXT)}):
        note = target.note(metadata=metadata)
        target.note_written(response := target.call("remember", records=[note]))
        if "error" in response:
            code = response["error"].get("code")
            expect(code == INVALID_PARAMS, f"a write whose metadata cannot be kept: expected -32602, got {code}")
            continue
        (id,) = response["result"]["ids"]
        found = [record for record in (*target.timeline(), *target.recall("", limit=20)) if record.get("id") == id]
        expect(
            len(found) == 2,
            f"expected {id!r} on the timeline and in a recall, where {target.mine}; got it {len(found)} times",
        )
        for record in found:
            came = record.get("metadata")
            expect(same(came, note["metadata"]), _changed("metadata", note["metadata"], came))


@check("3.1-3")
def metadata_that_is_no_object_is_refused(target: Target) -> None:
    for metadata in ("text", [1], 7):
        target.note_written(response := target.call("remember", records=[{**target.note(), "metadata": metadata}]))
        code = response.get("error", {}).get("code")
        expect(code == INVALID_PARAMS, f"metadata {metadata!r}: expected -32602, got {shown(response)}")


@check("3.2-6")
def ids_are_assigned_where_none_is_chosen(target: Target) -> None:
    ids = [id for _ in range(3) for id in target.remember(*target.notes(3))]
    expect(len(set(ids)) == 9 and all(ids), f"nine records without an id: expected nine different ones, got {ids}")
    came = ids_of(target.timeline())
    expect(sorted(came) == sorted(ids), f"expected the records under the ids that were returned, {ids}, got {came}")


@check("3.2-2", "4.2-1")
def a_chosen_id_is_kept(target: Target) -> None:
    chosen = f"chosen {target.word()}/é:1"
    ids = target.remember(target.note(id=chosen))
    expect(ids == [chosen], f"a write with id {chosen!r}: expected ids {[chosen]}, got {ids}")
    target.read(chosen)


@check("3.2-3", "3.2-4", "3.2-5")
def a_repeated_write_makes_no_second_record(target: Target) -> None:
    note = target.note(id=f"again-{target.word()}")
    other = target.note()
    for attempt in (1, 2, 3):
        ids = target.remember(note, *([other] if attempt == 2 else []))
        expect(ids[0] == note["id"], f"write {attempt} with id {note['id']!r}: expected that id, got {ids[0]!r}")
    count = ids_of(target.timeline()).count(note["id"])
    expect(count == 1, f"three writes with id {note['id']!r}: expected one record, got {count}")
    total = len(target.timeline())
    expect(total == 2, f"three writes with one id and one without: expected two records, got {total}")


@check("3.3-a")
def timestamps_are_utc_with_milliseconds(target: Target) -> None:
    note = target.note(session=target.word())
    (id,) = target.remember(note)
    target.recall(note["content"])
    record = target.read(id)
    for field in ("created_at", "accessed_at"):
        value = record.get(field)
        if field == "created_at" or value is not None:
            expect(
                isinstance(value, str) and bool(TIMESTAMP.fullmatch(value)),
                f"{field}: expected a timestamp like 2026-07-28T10:15:30.123Z, got {value!r}",
            )


@check("2.1-5", "2.1-6")
def no_write_is_refused_as_if_the_server_were_read_only(target: Target) -> None:
    for note in (
        target.note(id=target.word(), role="tool", group=target.word()),
        target.note(metadata={}),
        target.note(role="system"),
        target.note(content="x" * 5000),
    ):
        target.note_written(response := target.call("remember", records=[note]))
        code = response.get("error", {}).get("code")
        expect(code != READ_ONLY, f"the server accepts writes, but this one answers READ_ONLY: {shown(note)}")
    for selector in ({"ids": ["nobody"]}, {"where": target.mine}):
        code = target.call("forget", **selector).get("error", {}).get("code")
        expect(code != READ_ONLY, f"the server accepts writes, but memory/forget with {selector} answers READ_ONLY")


@check("4.2-2")
def fields_of_capabilities_that_are_not_declared_are_ignored(target: Target) -> None:
    fields: dict[str, dict[str, Any]] = {
        "salience": {"salience": 2},
        "scopes": {"owner": target.word()},
        "sessions": {"session": target.word()},
        "keys": {"key": target.word()},
        "embeddings": {"embedding": [0.5, 0.25]},
        "external": {"uri": "urn:example:1", "media_type": "text/plain"},
    }
    ignored = {
        name: value
        for capability, more in fields.items()
        if capability not in target.capabilities
        for name, value in more.items()
    }
    if not ignored:
        raise NotApplicable("every capability with fields for a write is declared")
    for name, value in ignored.items():
        target.note_written(response := target.call("remember", records=[target.note(**{name: value})]))
        expect(
            "result" in response,
            f"a write with {name}, which no capability declares: expected ids, got {shown(response)}",
        )
    expect(
        len(target.timeline()) == len(ignored), f"expected the {len(ignored)} records with {list(ignored)} to be there"
    )


@check("4.2-3", unless="tiers")
def a_tier_without_tiers_is_refused(target: Target) -> None:
    target.refused(CAPABILITY_NOT_SUPPORTED, "remember", records=[target.note(tier="working")])
    expect(target.timeline() == [], "a write with tier was rejected: expected nothing written")


def _long_text(target: Target, length: int) -> str:
    """Return new words with that many characters in total."""
    text = target.word()
    while len(text) < length:
        text += f" {target.word()}"
    return f"{text[: length - 1]}."


def _changed(field: str, written: Any, came: Any) -> str:
    """Return the sentence for a field that came back changed; for long ones, with the place of the difference."""
    one, other = repr(written), repr(came)
    if max(len(one), len(other)) > 300:
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        around = slice(max(at - 40, 0), at + 40)
        one, other = (f"…{text[around]}…, of {len(text):,} characters in all" for text in (one, other))
    return f"{field} was written as {one}, and came back as {other}"
