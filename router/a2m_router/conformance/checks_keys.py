"""Keys (§3.6, §4.9)."""

from typing import Any

from a2m_router.conformance.checking import INVALID_PARAMS, Record, Target, an_object, check, expect, ids_of, shown


@check("3.6-1", needs="keys")
def an_occupied_key_is_replaced(target: Target) -> None:
    key = f"{target.word()}/user/city"
    ids: list[str] = []
    revisions: list[Any] = []
    notes = target.notes(3, key=key)
    for note in notes:
        ids += target.remember(note)
        record = _fetched(target, key)
        expect(
            record.get("content") == note["content"],
            f"key {key!r} was written; expected {note['content']!r}: {shown(record)}",
        )
        expect(record.get("key") == key, f"expected the key {key!r} on its record, got {shown(record)}")
        revisions.append(record.get("revision"))
    expect(len(set(ids)) == 1, f"three writes to key {key!r}: expected one id, got {ids}")
    expect(
        all(type(revision) is int for revision in revisions)
        and [revision - revisions[0] for revision in revisions] == [0, 1, 2],
        f"three writes to key {key!r}: expected revision to rise by one each time, got {revisions}",
    )
    left = ids_of(target.timeline())
    expect(left == ids[:1], f"three writes to key {key!r}: expected one record, got {left}")


@check("3.6-a", needs="keys")
def what_was_replaced_is_not_recalled(target: Target) -> None:
    key = target.word()
    old, new = target.note(key=key), target.note(key=key)
    target.remember(old)
    target.remember(new)
    for query in (old["content"], new["content"], ""):
        contents = [record.get("content") for record in target.recall(query)]
        expect(
            old["content"] not in contents and (query == old["content"] or new["content"] in contents),
            f"{key!r} was rewritten; memory/recall for {query!r}: expected the new content only, got {shown(contents)}",
        )


@check("3.6-2", needs=("keys", "scopes"))
def a_key_is_each_owner_s_own(target: Target) -> None:
    one, other = target.agents()
    key = f"{target.word()}/city"
    a, b = target.note(key=key), target.note(key=key)
    ids = one.remember(a) + other.remember(b)
    expect(ids[0] != ids[1], f"two owners wrote key {key!r}: expected two records, got {ids}")
    for agent, note in ((one, a), (other, b)):
        record = agent.ask("fetch", key=key).get("record")
        came = record.get("content") if isinstance(record, dict) else record
        expect(
            came == note["content"], f"two owners wrote key {key!r}: expected each to fetch its own, got {shown(came)}"
        )


@check("3.6-3", needs="keys")
def a_prefix_selects_what_is_at_it_and_beneath(target: Target) -> None:
    root = target.word()
    keys = [f"{root}/wf", f"{root}/wf/a", f"{root}/wf/a/b", f"{root}/other", f"{target.word()}/wf/a"]
    ids = dict(zip(keys, target.remember(*[target.note(key=key) for key in keys], target.note()), strict=False))
    for prefix, wanted in (
        (f"{root}/wf", keys[:3]),
        (f"{root}/", keys[:4]),
        (f"{root}/wf/a/b", keys[2:3]),
        (f"{root}/x", []),
    ):
        expected = sorted(ids[key] for key in wanted)
        for method in ("timeline", "recall"):
            found = sorted(ids_of(target.records(method, key_prefix=prefix, where=target.mine, limit=20)))
            expect(
                found == expected,
                f"memory/{method} with key_prefix {prefix!r} of {keys}: expected {wanted}, got {found}",
            )
    forgotten = target.ask("forget", key_prefix=f"{root}/wf").get("forgotten")
    expect(
        forgotten == 3, f"memory/forget with key_prefix {root}/wf of {keys}: expected forgotten 3, got {forgotten!r}"
    )
    left = [record.get("key") for record in target.timeline()]
    expect(
        sorted(filter(None, left)) == sorted(keys[3:]) and len(left) == 3,
        f"after memory/forget with key_prefix {root}/wf: expected {keys[3:]} and a record without a key, got {left}",
    )


@check("4.9-a", "4.9-2", needs="keys", writes=False)
def an_unused_key_is_null(target: Target) -> None:
    for params in ({}, {"embeddings": False}):
        result = target.ask("fetch", key=f"{target.word()}/nothing", **params)
        expect(
            "record" in result and result["record"] is None,
            f"memory/fetch of an unused key: expected null, got {shown(result)}",
        )


@check("4.9-1", "4.9-3", needs="keys", writes=False)
def fetch_wants_a_key(target: Target) -> None:
    target.refused(INVALID_PARAMS, "fetch")
    target.refused(INVALID_PARAMS, "fetch", key="")


@check("4.9-a", "4.5-a", needs="keys")
def a_forgotten_key_is_free_again(target: Target) -> None:
    key = f"{target.word()}/fact"
    ids = target.remember(target.note(key=key))
    target.ask("forget", ids=ids)
    record = target.ask("fetch", key=key).get("record", "nothing")
    expect(record is None, f"the record at {key!r} was forgotten: expected null, got {shown(record)}")


def _fetched(target: Target, key: str) -> Record:
    return an_object(target.ask("fetch", key=key).get("record"), f"memory/fetch of {key!r}, which was written")
