"""Conversations (§3.5, §4.10, §4.11)."""

from typing import Any

from a2m_router.conformance.checking import (
    INVALID_PARAMS,
    TIMESTAMP,
    Failure,
    NotApplicable,
    Target,
    check,
    expect,
    ids_of,
    shown,
)


@check("3.5-1", "3.5-4", needs="sessions")
def a_session_comes_back(target: Target) -> None:
    one, default = target.word(), target.word()
    a, b = target.note(session=one), target.note()
    ids = target.remember(a, b, session=default)
    ids += target.remember(target.note())
    for id, wanted in zip(ids, (one, default, None), strict=True):
        came = target.read(id).get("session")
        expect(came == wanted, f"{id!r} was written in session {wanted!r} and came back in {came!r}")


@check("3.5-3", "4.4-1", needs="sessions")
def a_session_can_be_replayed(target: Target) -> None:
    one, other = target.word(), target.word()
    ids = target.remember_apart(*[target.note(session=name) for name in (one, other, one, other, one)])
    for name, wanted in ((one, ids[0::2]), (other, ids[1::2])):
        found = ids_of(target.records("timeline", where={"session": name}))
        expect(found == wanted, f"memory/timeline where session is {name!r}: expected {wanted}, got {found}")
    found = ids_of(target.records("timeline", where={"session": one}, limit=2))
    expect(found == ids[2::2], f"memory/timeline where session is {one!r}, limit 2: expected {ids[2::2]}, got {found}")


@check("3.5-5", "3.5-4", needs="sessions")
def records_without_a_session_belong_to_none(target: Target) -> None:
    session = target.word()
    inside = target.remember(target.note(session=session))
    outside = target.remember(target.note())
    found = ids_of(target.records("timeline", where={"session": session}))
    expect(found == inside, f"memory/timeline where session is {session!r}: expected {inside}, got {found}")
    names = [listed.get("session") for listed in _listed(target)]
    expect(
        all(isinstance(name, str) and name for name in names),
        f"memory/session/list: expected only sessions with a name, got {shown(names)}",
    )
    before = target.read(outside[0]).get("tier")
    target.ask("session/close", session=session)
    record = target.read(outside[0])
    expect(
        record.get("tier") == before and not record.get("session"),
        f"{session!r} was closed; outside of it: {shown(record)}",
    )


@check("4.10-2", "3.3-a", needs="sessions")
def sessions_are_listed_with_their_counts(target: Target) -> None:
    session = target.word()
    target.remember(*target.notes(3, session=session))
    listed = [entry for entry in _listed(target) if entry.get("session") == session]
    expect(len(listed) == 1, f"memory/session/list: expected {session!r} once, got {shown(listed)}")
    (entry,) = listed
    count = entry.get("records")
    expect(type(count) is int and count == 3, f"session {session!r} has 3 records; memory/session/list says {count!r}")
    tiers = entry.get("tiers")
    expect(
        tiers is None or (isinstance(tiers, dict) and sum(tiers.values()) == 3),
        f"memory/session/list: expected tiers to count the 3 records, got {shown(tiers)}",
    )
    for field in ("opened_at", "touched_at"):
        at = entry.get(field)
        expect(
            at is None or (isinstance(at, str) and bool(TIMESTAMP.fullmatch(at))),
            f"memory/session/list: expected a timestamp as {field}, got {at!r}",
        )


@check("4.11-1", "4.11-3", needs="sessions")
def close_wants_a_session(target: Target) -> None:
    target.refused(INVALID_PARAMS, "session/close")
    target.refused(INVALID_PARAMS, "session/close", session="")


@check("4.11-6", "4.11-a", "4.11-2", needs="sessions")
def closing_an_unknown_session_does_nothing(target: Target) -> None:
    ids = target.remember(target.note(session=target.word()))
    name = target.word()
    result = target.ask("session/close", session=name)
    expect(
        result.get("flushed") == 0 and result.get("closed") == name,
        f"memory/session/close of an unknown session: expected closed {name!r} and flushed 0, got {shown(result)}",
    )
    target.read(ids[0])
    if "scopes" not in target.capabilities or target.client.binding != "http":
        target.ask("session/close", session=name, owner=target.word())


@check("4.11-a", needs="sessions")
def close_says_what_it_did(target: Target) -> None:
    session = target.word()
    target.remember(*target.notes(2, session=session))
    result = target.ask("session/close", session=session)
    expect(result.get("closed") == session, f"memory/session/close: expected closed {session!r}, got {shown(result)}")
    for field in ("flushed", "moved", "promoted", "dropped", "summarized"):
        expect(
            type(result.get(field)) is int, f"memory/session/close: expected an integer as {field}, got {shown(result)}"
        )
    expect(isinstance(result.get("counts"), dict), f"memory/session/close: expected counts, got {shown(result)}")


@check("4.11-5", needs="sessions")
def closing_destroys_nothing(target: Target) -> None:
    session = target.word()
    notes = target.notes(4, session=session)
    ids = target.remember(*notes)
    result = target.ask("session/close", session=session)
    if result.get("dropped") or result.get("summarized"):
        raise NotApplicable("the policy of a tier dropped or rewrote the records that moved there")
    left = ids_of(target.timeline())
    expect(sorted(left) == sorted(ids), f"{session!r} was closed: expected its records {ids} to be there, got {left}")
    found = ids_of(target.recall(notes[1]["content"]))
    expect(ids[1] in found, f"{session!r} was closed: expected to recall {ids[1]!r} by its words, got {found}")


@check("4.11-4", "3.4-3", needs=("sessions", "tiers"))
def a_closed_session_leaves_the_working_tier(target: Target) -> None:
    working = [tier for tier in target.tiers() if tier.get("kind") == "working" and tier.get("spill_to")]
    if not working:
        raise NotApplicable("no tier of kind working that spills anywhere")
    name = working[0]["name"]
    session = target.word()
    ids = target.remember(
        *target.notes(2, session=session, tier=name), *target.notes(3, session=session, tier=name, group=target.word())
    )
    result = target.ask("session/close", session=session)
    left = ids_of(target.timeline(tier=name))
    expect(left == [], f"{session!r} was closed: expected none of {ids} in tier {name!r}, got {left}")
    expect(result.get("flushed") == 5, f"5 records left tier {name!r}: expected flushed 5, got {shown(result)}")
    tiers = {str(record.get("tier")) for record in target.timeline() if record.get("group")}
    expect(len(tiers) <= 1, f"{session!r} was closed: expected its group in one tier, got {sorted(tiers)}")


@check("4.11-b", needs=("sessions", "tiers"))
def closing_leaves_procedural_memory_alone(target: Target) -> None:
    names = [tier["name"] for tier in target.tiers() if tier.get("kind") == "procedural"]
    session = target.word()
    for name in names:
        response = target.call("remember", records=[target.note(session=session, tier=name)])
        target.note_written(response)
        if "result" in response:
            (id,) = response["result"]["ids"]
            target.remember(target.note(session=session))
            target.ask("session/close", session=session)
            here = target.read(id).get("tier")
            expect(here == name, f"{session!r} was closed: expected its procedure still in {name!r}, got {here!r}")
            procedural = ids_of(target.timeline(tier=name))
            expect(procedural == [id], f"{session!r} was closed: expected only {[id]} in {name!r}, got {procedural}")
            return
    raise NotApplicable("no tier of kind procedural accepts a write")


def _listed(target: Target) -> list[dict[str, Any]]:
    listed = target.ask("session/list").get("sessions")
    if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
        raise Failure(f"memory/session/list: expected a list of objects as sessions, got {shown(listed)}")
    return listed
