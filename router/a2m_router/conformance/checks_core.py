"""Discovery, writing, searching, replaying, deleting (§2, §4.1 to §4.5, §5)."""

from typing import Any

from a2m_router.conformance.checking import (
    CAPABILITY_NOT_SUPPORTED,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    METHOD_NOT_FOUND,
    METHODS,
    PROTOCOL_NOT_SUPPORTED,
    QUOTA_EXCEEDED,
    SCOPE_DENIED,
    UNKNOWN_RECORD,
    NotApplicable,
    Target,
    check,
    expect,
    ids_of,
    shown,
)
from a2m_router.conformance.client import PROTOCOL

# the longest content that is sent to test a limit
_MOST_SENT = 20_000_000


@check("2-a", "4.1-a", "4.1-b", writes=False)
def describe_says_what_the_server_is(target: Target) -> None:
    for params in ({}, {"protocol": PROTOCOL}):
        result = target.ask("describe", **params)
        expect(
            result.get("protocol") == PROTOCOL,
            f"memory/describe: expected protocol {PROTOCOL}, got {result.get('protocol')!r}",
        )
        expect(
            isinstance(result.get("name"), str),
            f"memory/describe: expected a string as name, got {result.get('name')!r}",
        )
        for field in ("capabilities", "methods"):
            listed = result.get(field)
            expect(
                isinstance(listed, list) and all(isinstance(name, str) for name in listed),
                f"memory/describe: expected a list of strings as {field}, got {shown(listed)}",
            )
        expect("core" in result["capabilities"], "memory/describe: expected core among the capabilities")


@check("2-1", writes=False)
def capabilities_have_names_of_the_protocol(target: Target) -> None:
    unknown = sorted(target.capabilities - METHODS.keys())
    expect(not unknown, f"memory/describe: expected only capabilities of {PROTOCOL}, got also {unknown}")


@check("2-1", "2-a", writes=False)
def methods_are_those_of_the_capabilities(target: Target) -> None:
    listed = set(target.described.get("methods") or ())
    for capability, methods in METHODS.items():
        for method in methods:
            if capability in target.capabilities:
                expect(method in listed, f"memory/describe: {capability} is declared and {method} is not in methods")
            else:
                expect(
                    method not in listed, f"memory/describe: {method} is in methods and {capability} is not declared"
                )


@check("2-1", "2-a", writes=False)
def every_method_that_is_listed_is_there(target: Target) -> None:
    push = target.described.get("events")
    pushes = isinstance(push, dict) and push.get("push") is True
    known = {method for methods in METHODS.values() for method in methods}
    for method in sorted(known.intersection(target.described.get("methods") or ())):
        if method == "memory/events/subscribe" and not pushes:
            continue
        response = target.call(method.removeprefix("memory/"))
        code = response.get("error", {}).get("code")
        expect(
            code not in (METHOD_NOT_FOUND, CAPABILITY_NOT_SUPPORTED, INTERNAL_ERROR),
            f"{method} is listed by memory/describe; called without parameters it answers {code}",
        )
    if pushes:
        target.ask("events/unsubscribe")


@check("4.1-5", "4.1-6", writes=False)
def no_other_version_is_pretended(target: Target) -> None:
    for version in ("a2m/0.9", "a2m/7.0"):
        response = target.call("describe", protocol=version)
        if "error" in response:
            code = response["error"].get("code")
            expect(
                code == PROTOCOL_NOT_SUPPORTED,
                f"memory/describe for {version}: expected {PROTOCOL} or error -32007, got error {code}",
            )
        else:
            came = response["result"].get("protocol")
            expect(came == PROTOCOL, f"memory/describe for {version}: expected {PROTOCOL}, got {came!r}")


@check("2-7", "2-8", writes=False)
def unknown_parameters_do_not_trouble_a_read(target: Target) -> None:
    for method, params in (("describe", {}), ("recall", {"query": "harbour"}), ("timeline", {"limit": 3})):
        target.ask(method, **params, xUnheardOf={"a": [1]}, future=True)


@check("2-7", "2-8")
def unknown_parameters_do_not_trouble_a_write(target: Target) -> None:
    written = target.call("remember", records=[target.note(xUnheardOf=[1, {"a": None}])], future={"mode": 2})
    target.note_written(written)
    expect(
        "result" in written, f"memory/remember with an unknown parameter and field: expected ids, got {shown(written)}"
    )
    (id,) = written["result"]["ids"]
    target.read(id)
    target.ask("forget", ids=[id], future="perhaps")


@check("4.1-2", writes=False)
def limits_are_integers(target: Target) -> None:
    limits = _limits(target)
    for name in ("max_records_per_call", "max_recall_limit", "max_content_length"):
        value = limits.get(name, 1)
        expect(type(value) is int and value > 0, f"memory/describe: expected an integer as {name}, got {value!r}")


@check("4.1-4")
def the_limit_of_records_is_enforced(target: Target) -> None:
    most = _limit(target, "max_records_per_call")
    if most > 20_000:
        raise NotApplicable(f"the limit of {most} records in one call is too large to test")
    records = [{"content": f"{target.tag} {number}", "metadata": target.mine} for number in range(most + 1)]
    target.refused((INVALID_PARAMS, QUOTA_EXCEEDED), "remember", records=records)
    expect(target.timeline(limit=5) == [], f"{most + 1} records were rejected: expected none of them to be there")


@check("4.1-4")
def the_limit_of_content_is_enforced(target: Target) -> None:
    most = _limit(target, "max_content_length")
    if most > _MOST_SENT:
        raise NotApplicable(f"the limit of {most} characters of content is too large to test")
    target.refused((INVALID_PARAMS, QUOTA_EXCEEDED), "remember", records=[target.note(content="m" * (most + 1))])


@check("4.1-4", writes=False)
def the_limit_of_recall_is_enforced(target: Target) -> None:
    most = _limit(target, "max_recall_limit")
    target.refused((INVALID_PARAMS, QUOTA_EXCEEDED), "recall", query="harbour", limit=most + 1)


@check("4.2-a", "4.2-6", "4-2")
def ids_come_in_the_order_of_the_records(target: Target) -> None:
    records = target.notes(4)
    ids = target.remember(*records)
    for id, record in zip(ids, records, strict=True):
        came = target.read(id).get("content")
        expect(came == record["content"], f"id {id!r}: expected the content {record['content']!r}, got {came!r}")


@check("4.2-4", "4.2-6")
def a_batch_with_a_mistake_in_it_writes_nothing(target: Target) -> None:
    records = [target.note(), {"content": 17, "metadata": target.mine}, target.note()]
    target.note_written(response := target.call("remember", records=records))
    expect(
        response.get("error", {}).get("code") == INVALID_PARAMS,
        f"memory/remember of three records, the content of one a number: expected -32602, got {shown(response)}",
    )
    left = target.timeline()
    expect(left == [], f"a batch of three was rejected: expected none of its records, got {len(left)}")


@check("4.3-a")
def recall_finds_what_it_is_asked_for(target: Target) -> None:
    records = target.notes(6)
    ids = target.remember(*records)
    for number in (0, 3, 5):
        found = target.records("recall", query=records[number]["content"], limit=5)
        first = found[0].get("id") if found else None
        expect(
            first == ids[number],
            f"memory/recall for the words of {ids[number]!r}: expected it first, got {shown(ids_of(found))}",
        )


@check("4.3-b")
def recall_keeps_to_its_limit(target: Target) -> None:
    target.remember(*[target.note(content=f"{target.tag} {word}") for word in ("red", "green", "blue", "grey")])
    for query in (target.tag, ""):
        found = target.recall(query, limit=2)
        expect(
            len(found) == 2,
            f"memory/recall for {query!r} with limit 2 among four: expected 2 records, got {len(found)}",
        )


@check("4.3-1", writes=False)
def recall_without_a_query_is_no_error(target: Target) -> None:
    target.records("recall")
    target.records("recall", query="", limit=3)


@check("4.3-1")
def recall_without_a_query_still_returns_records(target: Target) -> None:
    ids = target.remember(*target.notes(3))
    for params in ({}, {"query": ""}):
        found = target.records("recall", where=target.mine, limit=10, **params)
        expect(
            sorted(ids_of(found)) == sorted(ids),
            f"memory/recall with {params} where {target.mine}: expected the three records, got {shown(ids_of(found))}",
        )


@check("4.3-3")
def a_limit_of_zero_is_no_limit_only_where_there_is_none(target: Target) -> None:
    most = (target.described.get("limits") or {}).get("max_recall_limit")
    ids = target.remember(*[target.note(content=f"{target.tag} {number}") for number in range(12)])
    response = target.call("recall", query="", where=target.mine, limit=0)
    if most is None:
        found = response.get("result", {}).get("records") or []
        expect(
            sorted(ids_of(found)) == sorted(ids),
            f"memory/recall with limit 0 and no max_recall_limit: expected all 12 records, got {len(found)}",
        )
    elif "error" in response:
        code = response["error"].get("code")
        expect(
            code in (INVALID_PARAMS, QUOTA_EXCEEDED),
            f"memory/recall with limit 0: expected -32602 or -32006, got {code}",
        )
    else:
        count = len(response["result"].get("records") or [])
        expect(count <= most, f"memory/recall with limit 0: expected at most max_recall_limit={most}, got {count}")


@check("5.3-3", writes=False)
def scores_descend(target: Target) -> None:
    if not target.read_only:
        word = target.word()
        target.remember(*[target.note(content=f"{word} " * times + target.word()) for times in (1, 4, 2, 6, 3)])
        found = target.recall(word)
        expect(len(found) == 5, f"memory/recall for a word of five records: expected all five, got {len(found)}")
    else:
        found = target.records("recall", query="the", limit=20)
    scores: list[Any] = [record.get("score") for record in found]
    expect(
        all(isinstance(score, int | float) and not isinstance(score, bool) for score in scores),
        f"memory/recall: expected a number as every score, got {shown(scores)}",
    )
    expect(scores == sorted(scores, reverse=True), f"memory/recall: expected descending scores, got {shown(scores)}")


@check("5.3-2", writes=False)
def scores_are_between_0_and_1(target: Target) -> None:
    note = target.note()
    if not target.read_only:
        target.remember(note, *target.notes(2))
    for query in (note["content"], "harbour", ""):
        for record in target.records("recall", query=query, limit=10):
            score = record.get("score")
            expect(
                isinstance(score, int | float) and 0 <= score <= 1,
                f"memory/recall for {query!r}: expected a score in [0, 1], got {score!r}",
            )


@check("4.4-3", writes=False)
def timeline_ascends(target: Target) -> None:
    if not target.read_only:
        ids = target.remember_apart(*target.notes(4))
        found = target.timeline()
        expect(
            sorted(ids_of(found)) == sorted(ids),
            f"memory/timeline: expected the four records written, got {shown(found)}",
        )
    for found in (target.timeline(), target.records("timeline", limit=50)):
        times = [str(record.get("created_at")) for record in found]
        expect(times == sorted(times), f"memory/timeline: expected ascending created_at, got {shown(times)}")


@check("4.4-4")
def timeline_with_a_limit_takes_the_newest(target: Target) -> None:
    ids = target.remember_apart(*target.notes(5))
    created = {record["id"]: str(record.get("created_at")) for record in target.timeline()}
    newest = sorted(ids, key=lambda each: created.get(each, ""))[-2:]
    found = ids_of(target.timeline(limit=2))
    expect(found == newest, f"memory/timeline with limit 2 of {ids}: expected {newest}, got {found}")


@check("4.4-5")
def timeline_does_not_care_what_is_recalled(target: Target) -> None:
    records = target.notes(4)
    ids = target.remember_apart(*records)
    for _ in range(3):
        target.recall(records[1]["content"], limit=1)
    if "salience" in target.capabilities:
        target.ask("reinforce", ids=[ids[2]], amount=3)
    found = ids_of(target.timeline(query=records[2]["content"]))
    expect(found == ids, f"memory/timeline after some were recalled: expected {ids} in the order written, got {found}")


@check("4.4-5", "4.3-a")
def recall_is_not_in_the_order_of_creation(target: Target) -> None:
    records = target.notes(3)
    ids = target.remember_apart(*records)
    firsts = [next(iter(ids_of(target.recall(record["content"], limit=3))), None) for record in records]
    expect(firsts == ids, f"memory/recall for each of three records: expected each to come first once, got {firsts}")


@check("5.2-2")
def where_selects_by_field_and_by_metadata(target: Target) -> None:
    a = target.note(role="user", metadata={"colour": "red", "number": 1, "nested": {"deep": [1]}})
    b = target.note(role="assistant", metadata={"colour": "blue", "number": 2})
    c = target.note(role="tool", metadata={"colour": "green", "number": 3})
    ids = dict(zip("abc", target.remember(a, b, c), strict=True))
    for where, wanted in (
        ({"role": "user"}, "a"),
        ({"role": ["user", "tool"]}, "ac"),
        ({"colour": "blue"}, "b"),
        ({"number": [2, 3]}, "bc"),
        ({"colour": ["red", "blue"], "role": "assistant"}, "b"),
        ({"role": "user", "colour": "green"}, ""),
        ({"nowhere": "x"}, ""),
        ({"number": "1"}, ""),
    ):
        for method in ("timeline", "recall"):
            found = ids_of(target.records(method, where={**target.mine, **where}, limit=20))
            expected = sorted(ids[name] for name in wanted)
            expect(
                sorted(found) == expected,
                f"memory/{method} where {where}: expected {expected} of {sorted(ids.values())}, got {sorted(found)}",
            )


@check("4.4-2")
def where_works_on_timeline(target: Target) -> None:
    ids = target.remember(target.note(role="user"), target.note(role="tool"))
    found = ids_of(target.timeline(where={**target.mine, "role": "tool"}))
    expect(found == ids[1:], f"memory/timeline where role is tool: expected {ids[1:]}, got {found}")


@check("4.5-a")
def forget_removes_by_id(target: Target) -> None:
    records = target.notes(3)
    ids = target.remember(*records)
    _expect_forgotten(target, 2, ids=ids[:2])
    left = ids_of(target.timeline())
    expect(left == ids[2:], f"after {ids[:2]} were forgotten: expected {ids[2:]} on the timeline, got {left}")
    found = ids_of(target.recall(records[0]["content"]))
    expect(ids[0] not in found, f"after {ids[0]!r} was forgotten: expected not to recall it, got {found}")


@check("4.5-a", "5.2-2")
def forget_removes_where(target: Target) -> None:
    ids = target.remember(target.note(role="user"), target.note(role="tool"), target.note(role="user"))
    _expect_forgotten(target, 2, where={**target.mine, "role": "user"})
    left = ids_of(target.timeline())
    expect(left == [ids[1]], f"after all with role user were forgotten: expected {[ids[1]]}, got {left}")


@check("4.5-a")
def forgetting_what_is_not_there_counts_nothing(target: Target) -> None:
    response = target.call("forget", ids=[f"no-{target.word()}"])
    if response.get("error", {}).get("code") != UNKNOWN_RECORD:
        came = response.get("result")
        expect(
            isinstance(came, dict) and came.get("forgotten") == 0,
            f"memory/forget of an unknown id: expected forgotten 0 (or {UNKNOWN_RECORD}), got {shown(response)}",
        )


@check("4.5-1", "4.5-2")
def forget_without_a_selector_is_refused(target: Target) -> None:
    ids = target.remember(*target.notes(2))
    response = target.call("forget")
    left = ids_of(target.timeline())
    expect(
        sorted(left) == sorted(ids),
        f"memory/forget without a selector: expected nothing deleted, {left} is left of {ids}",
    )
    code = response.get("error", {}).get("code")
    expect(code == INVALID_PARAMS, f"memory/forget without a selector: expected -32602, got {shown(response)}")
    # an owner is not a selector; over a network it may be rejected as another principal's
    target.refused((INVALID_PARAMS, SCOPE_DENIED), "forget", owner=target.word(), limit=1)


def _expect_forgotten(target: Target, count: int, **selector: object) -> None:
    forgotten = target.ask("forget", **selector).get("forgotten")
    expect(forgotten == count, f"memory/forget with {shown(selector)}: expected forgotten {count}, got {forgotten!r}")


def _limits(target: Target) -> dict[str, int]:
    limits = target.described.get("limits")
    if limits is None:
        raise NotApplicable("no limits are declared")
    expect(isinstance(limits, dict), f"memory/describe: expected an object as limits, got {shown(limits)}")
    return dict(limits)


def _limit(target: Target, name: str) -> int:
    limit = _limits(target).get(name)
    if limit is None:
        raise NotApplicable(f"{name} is not declared")
    return limit
