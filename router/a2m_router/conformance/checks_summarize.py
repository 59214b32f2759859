"""Summaries (§4.15)."""

from a2m_router.conformance.checking import (
    INVALID_PARAMS,
    SCOPE_DENIED,
    UNKNOWN_TIER,
    NotApplicable,
    Record,
    Target,
    check,
    expect,
    ids_of,
    shown,
)


@check("4.15-8", needs="summarize", writes=False)
def describe_says_with_what_it_summarizes(target: Target) -> None:
    entry = target.ask("describe").get("summarize")
    expect(
        isinstance(entry, dict) and "model" in entry and isinstance(entry["model"], str | None),
        f"memory/describe with summarize declared: expected summarize with model, a string or null, got {shown(entry)}",
    )


@check("4.15-1", "4.15-2", "4.15-3", needs="summarize")
def summarize_wants_a_selector(target: Target) -> None:
    ids = target.remember(*target.notes(2))
    for params in ({}, {"limit": 5}, {"owner": target.word()}):
        # an owner is not a selector; over a network it may be rejected as another principal's
        target.refused((INVALID_PARAMS, SCOPE_DENIED) if params.get("owner") else INVALID_PARAMS, "summarize", **params)
    left = ids_of(target.timeline())
    expect(sorted(left) == sorted(ids), f"memory/summarize without a selector: expected nothing to change, got {left}")


@check("4.15-a", "4.15-6", "4.15-7", needs="summarize")
def a_summary_is_ordinary_records(target: Target) -> None:
    ids = target.remember(*target.notes(4))
    for selector in ({"ids": ids}, {"where": target.mine}):
        records = _summarized(target, 4, **selector)
        for record in records:
            found = target.recall(record["content"], where={}, limit=50)
            expect(
                record["id"] in ids_of(found),
                f"a summary: expected to recall {record['id']!r} by its words, got {ids_of(found)}",
            )
        if records:
            forgotten = target.ask("forget", ids=ids_of(records)).get("forgotten")
            expect(
                forgotten == len(records),
                f"a summary of {len(records)} records: expected to forget them, got {forgotten!r}",
            )


@check("4.15-4", needs="summarize")
def summarize_leaves_its_sources(target: Target) -> None:
    notes = target.notes(4)
    ids = target.remember(*notes)
    target.note_written({"result": {"ids": ids_of(_summarized(target, 4, ids=ids))}})
    left = {record["id"]: record.get("content") for record in target.timeline()}
    for id, note in zip(ids, notes, strict=True):
        expect(
            left.get(id) == note["content"],
            f"summarized: expected the source {note['content']!r} unchanged, got {left.get(id)!r}",
        )


@check("4.15-b", needs=("summarize", "keys"))
def a_summary_with_a_key_replaces_what_is_there(target: Target) -> None:
    key = f"{target.word()}/page"
    (page,) = target.remember(target.note(key=key))
    ids = target.remember(*target.notes(3))
    records = _summarized(target, 3, ids=ids, key=key)
    if not records:
        raise NotApplicable("the server declined to summarize")
    record = target.ask("fetch", key=key).get("record") or {}
    expect(
        record.get("id") == page and record.get("revision") == 1,
        f"memory/summarize to the occupied key {key!r}: expected id {page!r} at revision 1, got {shown(record)}",
    )
    expect(
        page in ids_of(records),
        f"memory/summarize to key {key!r}: expected {page!r} among its records, got {shown(records)}",
    )


@check("4.15-b", needs=("summarize", "tiers"))
def a_summary_goes_where_it_is_told(target: Target) -> None:
    ids = target.remember(*target.notes(3))
    target.refused(UNKNOWN_TIER, "summarize", ids=ids, into=target.word())
    for tier in reversed(target.tiers()):
        response = target.call("summarize", ids=ids, into=tier["name"])
        if "result" in response:
            records = response["result"].get("records") or []
            target.note_written({"result": {"ids": ids_of(records)}})
            if not records:
                raise NotApplicable("the server declined to summarize")
            found = ids_of(target.records("timeline", tier=tier["name"], limit=50))
            expect(
                set(ids_of(records)) <= set(found),
                f"summarized into {tier['name']!r}: expected {ids_of(records)}, got {found}",
            )
            return
    raise NotApplicable("no tier accepts a summary")


def _summarized(target: Target, read: int, **params: object) -> list[Record]:
    """Return the records of a summary after checking its counts. An empty summary is valid, too."""
    result = target.ask("summarize", **params)
    records = result.get("records")
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        expect(False, f"memory/summarize: expected records, got {shown(result)}")
    target.note_written({"result": {"ids": ids_of(records or ())}})
    expect(
        result.get("written") == len(records or ()),
        f"memory/summarize: expected written to count records, got {shown(result)}",
    )
    came = result.get("read")
    expect(
        type(came) is int and 0 <= came <= read,
        f"memory/summarize of {read} records: expected at most as many read, got {came!r}",
    )
    for record in records or ():
        expect(
            isinstance(record.get("id"), str)
            and isinstance(record.get("content"), str)
            and isinstance(record.get("created_at"), str),
            f"memory/summarize: expected records with id, content and created_at, got {shown(record)}",
        )
    return list(records or ())
