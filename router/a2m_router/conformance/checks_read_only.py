"""The read-only profile (§2.1)."""

from a2m_router.conformance.checking import READ_ONLY, Record, Target, check, expect


@check("2.1-2", read_only=True, writes=False)
def remember_and_forget_are_both_refused(target: Target) -> None:
    target.refused(READ_ONLY, "remember", records=[target.note()])
    target.refused(READ_ONLY, "forget", ids=[target.word()])


@check("2.1-5", "2.1-6", read_only=True, writes=False)
def every_write_is_refused(target: Target) -> None:
    for note in (target.note(id=target.word()), target.note(role="tool", group="g"), target.note(metadata={"a": [1]})):
        target.refused(READ_ONLY, "remember", records=[note])
    selectors: tuple[Record, ...] = ({"where": target.mine}, {"query": target.word()}, {"ids": []}, {})
    for selector in selectors:
        target.refused(READ_ONLY, "forget", **selector)


@check("2.1-3", read_only=True, writes=False)
def it_can_be_read_as_any_other(target: Target) -> None:
    target.ask("describe")
    asked: tuple[Record, ...] = ({}, {"query": ""}, {"query": "harbour", "limit": 3}, {"where": target.mine})
    for params in asked:
        found = target.records("recall", **params)
        expect(len(found) <= params.get("limit", len(found)), f"memory/recall with {params}: got {len(found)} records")
    target.records("timeline", limit=3)
    expect(
        target.records("timeline", where=target.mine) == [], f"memory/timeline where {target.mine}: expected nothing"
    )


@check("4.15-9", needs="summarize", read_only=True, writes=False)
def summarize_is_refused(target: Target) -> None:
    target.refused(READ_ONLY, "summarize", query="harbour")
