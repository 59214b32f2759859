"""Events, polled and pushed (§4.12 to §4.14)."""

import time
from typing import Any

from a2m_router.conformance.checking import (
    CAPABILITY_NOT_SUPPORTED,
    INVALID_PARAMS,
    TIMESTAMP,
    Failure,
    NotApplicable,
    Target,
    check,
    expect,
    shown,
)
from a2m_router.conformance.client import Arrived

Event = dict[str, Any]

# seconds to wait for a notification that must not come
_SILENCE = 0.3

# polls after which a whole log is read, even with one event at a time
_MOST_POLLS = 3000


@check("4.13-1", needs="events", writes=False)
def describe_says_whether_events_are_pushed(target: Target) -> None:
    entry = target.ask("describe").get("events")
    expect(
        isinstance(entry, dict) and isinstance(entry.get("push"), bool),
        f"memory/describe with events declared: expected events with a boolean push, got {shown(entry)}",
    )


@check("4.12-a", needs="events")
def a_first_poll_begins_now(target: Target) -> None:
    ids = target.remember(target.note())
    result = target.ask("events")
    expect(isinstance(result.get("cursor"), str), f"memory/events: expected a string as cursor, got {shown(result)}")
    seen = [event.get("id") for event in _events(result)]
    expect(ids[0] not in seen, f"memory/events without a cursor: expected nothing from before, got {seen}")
    later = target.remember(target.note())
    seen = [event.get("id") for event in _of(_polled(target, result["cursor"]), ids + later)]
    expect(seen == later, f"memory/events from the cursor of the first poll: expected {later}, got {seen}")


@check("4.12-b", "4.12-1", "3.3-a", needs="events")
def every_record_written_is_an_event(target: Target) -> None:
    cursor = _now(target)
    fields = {"session": target.word()} if "sessions" in target.capabilities else {}
    ids = target.remember(*target.notes(3, **fields)) + target.remember(target.note(**fields))
    events = _of(_polled(target, cursor), ids)
    expect(
        [event["id"] for event in events] == ids,
        f"four records were written: expected {ids} in order, got {shown(events)}",
    )
    tiers = {record["id"]: record.get("tier") for record in target.timeline()}
    for event in events:
        at = event.get("at")
        expect(
            isinstance(at, str) and bool(TIMESTAMP.fullmatch(at)), f"an event: expected a timestamp as at, got {at!r}"
        )
        expect(event.get("kind") == "written", f"a write: expected an event of kind written, got {shown(event)}")
        if fields:
            expect(event.get("session") == fields["session"], f"a write in a session: expected it in {shown(event)}")
        if "tiers" in target.capabilities:
            expect(
                isinstance(event.get("tier"), str),
                f"a write to {tiers[event['id']]!r}: expected a tier in {shown(event)}",
            )


@check("4.12-b", needs=("events", "keys"))
def a_replacement_shows_its_revision(target: Target) -> None:
    key = f"{target.word()}/fact"
    cursor = _now(target)
    ids = [id for _ in range(3) for id in target.remember(target.note(key=key))]
    events = _of(_polled(target, cursor), ids)
    came = [(event.get("key"), event.get("revision")) for event in events]
    expect(
        [key for key, _ in came] == [key] * 3 and [revision or 0 for _, revision in came] == [0, 1, 2],
        f"three writes to {key!r}: expected an event each, with the key and revisions 0, 1, 2, got {came}",
    )


@check("4.12-1", "4.12-d", needs="events")
def polls_see_every_event_once(target: Target) -> None:
    cursor = _now(target)
    ids = target.remember(*target.notes(5)) + [id for _ in range(2) for id in target.remember(target.note())]
    whole = [event["id"] for event in _of(_polled(target, cursor), ids)]
    expect(whole == ids, f"seven records were written: expected their events in order, {ids}, got {whole}")
    seen: list[Any] = []
    for limit in (1, 2, 1, 3, 1, 1, 50, 50):
        result = target.ask("events", cursor=cursor, limit=limit)
        events = _events(result)
        expect(len(events) <= limit, f"memory/events with limit {limit}: got {len(events)} events")
        if len(seen) + len(events) < len(ids):
            expect(
                bool(result.get("more")),
                f"memory/events with limit {limit}, others left: expected more, got {shown(result)}",
            )
        expect(not result.get("reset"), f"memory/events with the last cursor: expected no reset, got {shown(result)}")
        seen += [event["id"] for event in _of(events, ids)]
        cursor = str(result.get("cursor"))
    expect(seen == ids, f"polls with small limits: expected each of {ids} once, in order, got {seen}")
    # a cursor can be used again, and no new event means none
    expect(_of(_polled(target, cursor), ids) == [], "memory/events at the end: expected nothing more")


@check("4.12-d", needs="events")
def kinds_choose_among_events(target: Target) -> None:
    cursor = _now(target)
    ids = target.remember(*target.notes(3))
    target.ask("forget", ids=ids[:1])
    for kinds, wanted in (
        (["forgotten"], {"forgotten"}),
        (["written"], {"written"}),
        (["written", "forgotten"], {"written", "forgotten"}),
    ):
        events = _events(target.ask("events", cursor=cursor, kinds=kinds, limit=50))
        came = {event.get("kind") for event in events}
        expect(
            came == wanted,
            f"memory/events with kinds {kinds}, after writes and a forget: got kinds {sorted(map(str, came))}",
        )


@check("4.12-c", needs="events")
def a_forget_is_one_event(target: Target) -> None:
    ids = target.remember(*target.notes(4))
    cursor = _now(target)
    target.ask("forget", ids=ids)
    events = [event for event in _polled(target, cursor) if event.get("kind") == "forgotten"]
    expect(
        len(events) == 1 and events[0].get("count") == 4,
        f"four records were forgotten in one call: expected one event with count 4, got {shown(events)}",
    )
    named = events[0].get("ids")
    expect(named is None or sorted(named) == sorted(ids), f"forgotten: expected ids {ids} or none, got {named}")


@check("4.12-c", needs=("events", "tiers"))
def a_promotion_is_one_event(target: Target) -> None:
    ids = target.remember(*target.notes(3))
    to = target.moved(ids[0])
    cursor = _now(target)
    target.ask("promote", ids=ids, tier=to)
    events = [event for event in _polled(target, cursor) if event.get("kind") == "promoted"]
    expect(len(events) == 1, f"one memory/promote of two records: expected one event, got {shown(events)}")
    expect(
        events[0].get("tier") == to and sorted(events[0].get("ids") or ()) == sorted(ids[1:]),
        f"memory/promote of {ids[1:]} to {to!r}: expected an event that says so, got {shown(events[0])}",
    )


@check("4.12-c", needs=("events", "tiers"))
def a_consolidation_is_one_event(target: Target) -> None:
    target.remember(*target.notes(3))
    cursor = _now(target)
    target.ask("consolidate")
    events = [event for event in _polled(target, cursor) if event.get("kind") == "consolidated"]
    expect(len(events) >= 1, "memory/consolidate: expected an event of kind consolidated, got none")
    for event in events:
        for field in ("moved", "promoted", "dropped", "summarized"):
            expect(type(event.get(field)) is int, f"consolidated: expected an integer as {field}, got {shown(event)}")


@check("4.12-c", needs=("events", "sessions"))
def the_end_of_a_session_is_one_event(target: Target) -> None:
    session = target.word()
    ids = target.remember(*target.notes(6, session=session))
    cursor = _now(target)
    target.ask("session/close", session=session)
    events = _polled(target, cursor)
    closed = [event for event in events if event.get("kind") == "session_closed" and event.get("session") == session]
    expect(len(closed) == 1, f"{session!r} was closed: expected one event session_closed, got {shown(events)}")
    expect(
        _of(events, ids) == [],
        f"six records moved at the end of {session!r}: expected no event for each, got {shown(events)}",
    )
    passes = sum(event.get("kind") == "consolidated" for event in events)
    expect(
        1 <= passes < 6, f"{session!r} was closed: expected its moves as one event consolidated, got {shown(events)}"
    )


@check("4.12-3", "4.12-1", needs="events")
def a_cursor_from_before_the_log_answers_reset(target: Target) -> None:
    note = {"metadata": target.mine, **_room(target)}
    cursor = _now(target)
    most = (target.described.get("limits") or {}).get("max_records_per_call") or 200
    ids: list[str] = []
    while len(ids) < 1300:
        ids += target.remember(*[{"content": f"{target.tag} {len(ids) + n}", **note} for n in range(min(most, 200))])
    events = _polled(target, cursor)
    reset = bool(target.ask("events", cursor=cursor).get("reset"))
    seen = [event["id"] for event in _of(events, ids)]
    if reset:
        expect(
            len(seen) > 0 and seen == ids[-len(seen) :],
            f"reset: expected the last of {len(ids)} events in order, got {len(seen)}",
        )
    else:
        expect(seen == ids, f"{len(ids)} events and no reset: expected each once, in order, got {len(seen)}")


@check("4.12-5", needs="events", writes=False)
def a_cursor_that_was_never_given_out_is_no_fault_of_the_server(target: Target) -> None:
    response = target.call("events", cursor=f"not-a-cursor-{target.word()}")
    if "error" in response:
        code = response["error"].get("code")
        expect(code == INVALID_PARAMS, f"memory/events with an unknown cursor: expected a result or -32602, got {code}")
    else:
        result = response["result"]
        expect(
            isinstance(result.get("events"), list) and isinstance(result.get("cursor"), str),
            f"memory/events with an unknown cursor: expected events and a cursor, or -32602, got {shown(result)}",
        )


@check("4.12-6", needs=("events", "scopes"))
def another_owner_s_events_are_not_told(target: Target) -> None:
    one, other = target.agents()
    cursors = [agent.ask("events")["cursor"] for agent in (one, other)]
    ids = one.remember(*target.notes(2))
    tiers = (
        {tier.get("name") for tier in target.tiers() if tier.get("shared")} if "tiers" in target.capabilities else set()
    )
    seen = _of(_events(one.ask("events", cursor=cursors[0], limit=50)), ids)
    expect([event["id"] for event in seen] == ids, f"memory/events by the owner: expected {ids}, got {shown(seen)}")
    if any(event.get("tier") in tiers for event in seen):
        raise NotApplicable("writes go to a tier that all agents share")
    one.ask("forget", ids=ids[:1])
    events = _events(other.ask("events", cursor=cursors[1], limit=50))
    leaked = [event for event in events if event.get("id") in ids or set(event.get("ids") or ()) & set(ids)]
    expect(leaked == [], f"memory/events by another owner: expected nothing of {ids}, got {shown(leaked)}")


@check("4.14-1", needs="events", writes=False)
def unsubscribing_without_a_subscription_is_no_error(target: Target) -> None:
    for _ in range(2):
        response = target.call("events/unsubscribe")
        if target.client.binding == "http" and response.get("error", {}).get("code") == CAPABILITY_NOT_SUPPORTED:
            continue  # the specification names only subscribe here
        came = response.get("result")
        expect(
            isinstance(came, dict) and came.get("subscribed") is False,
            f"memory/events/unsubscribe: expected subscribed false, got {shown(response)}",
        )


@check("4.13-2", "4.13-3", needs="events", binding="stdio", writes=False)
def subscribe_fails_where_push_is_not_offered(target: Target) -> None:
    if _pushes(target):
        raise NotApplicable("push is offered")
    target.refused(CAPABILITY_NOT_SUPPORTED, "events/subscribe")


@check("4.13-5", needs="events", binding="stdio")
def nothing_is_pushed_before_a_subscription(target: Target) -> None:
    since = len(target.stdio.arrived)
    target.remember(*target.notes(2))
    target.ask("events")
    _expect_silence(target, since, "without a subscription")


@check("4.13-a", "4.13-c", needs="events", binding="stdio")
def events_are_pushed_after_the_response(target: Target) -> None:
    _subscribe(target)
    cursor = _now(target)
    since = len(target.stdio.arrived)
    ids = target.remember(*target.notes(2)) + target.remember(target.note())
    target.ask("forget", ids=ids[:1])
    complete = target.stdio.wait_for(lambda came: _is_event(came, "forgotten"), since, target.patience)
    arrived = list(target.stdio.arrived[since:])
    target.ask("events/unsubscribe")
    pushed = [came.message for came in arrived if came.is_notification and came.message is not None]
    expect(
        complete, f"subscribed, three records written, one forgotten: expected four events pushed, got {shown(pushed)}"
    )
    expect(
        all(message.get("method") == "memory/event" and isinstance(message.get("params"), dict) for message in pushed),
        f"pushed: expected memory/event notifications with an event as params, got {shown(pushed)}",
    )
    events = [message["params"] for message in pushed]
    expect([event["id"] for event in _of(events, ids)] == ids, f"pushed: expected {ids} in order, got {shown(events)}")
    forgotten = [event for event in events if event.get("kind") == "forgotten"]
    expect(len(forgotten) == 1, f"pushed: expected one event for one forget, got {shown(forgotten)}")
    response = next(place for place, came in enumerate(arrived) if came.is_response)
    first = next(place for place, came in enumerate(arrived) if _is_event(came, "written"))
    expect(response < first, f"the event of a call was pushed before its response: {shown(arrived[first].message)}")
    # events may also be about changes that the server makes by itself
    polled = _polled(target, cursor)
    for event in [*_of(events, ids), *forgotten]:
        expect(event in polled, f"{shown(event)} was pushed: expected to poll it as well, got {shown(polled)}")


@check("4.13-4", needs="events", binding="stdio")
def only_the_kinds_subscribed_to_are_pushed(target: Target) -> None:
    _subscribe(target, kinds=["forgotten"])
    since = len(target.stdio.arrived)
    ids = target.remember(*target.notes(2))
    target.ask("forget", ids=ids)
    complete = target.stdio.wait_for(lambda came: _is_event(came, "forgotten"), since, target.patience)
    target.ask("events/unsubscribe")
    kinds = [came.message["params"].get("kind") for came in _notifications(target, since) if came.message is not None]
    expect(
        complete and set(kinds) == {"forgotten"}, f"subscribed to kinds ['forgotten']: expected only those, got {kinds}"
    )


@check("4.12-6", "4.13-4", needs=("events", "scopes"), binding="stdio")
def another_owner_s_events_are_not_pushed(target: Target) -> None:
    one, other = target.agents()
    _subscribe(target, **other.named)
    since = len(target.stdio.arrived)
    private = one.remember(target.note())
    own = other.remember(target.note())
    complete = target.stdio.wait_for(lambda came: _is_event(came, "written", own[0]), since, target.patience)
    shared = (
        {tier.get("name") for tier in target.tiers() if tier.get("shared")} if "tiers" in target.capabilities else set()
    )
    target.ask("events/unsubscribe")
    events = [came.message["params"] for came in _notifications(target, since) if came.message is not None]
    ids = [event.get("id") for event in events if event.get("tier") not in shared or event.get("id") in own]
    expect(
        complete and own[0] in ids,
        f"subscribed as {other.owner!r}: expected the event of its own record {own}, got {shown(events)}",
    )
    expect(private[0] not in ids, f"subscribed as {other.owner!r}: expected nothing of {private}, got {shown(events)}")


@check("4.13-b", "4.13-5", needs="events", binding="stdio")
def nothing_is_pushed_after_unsubscribing(target: Target) -> None:
    _subscribe(target)
    since = len(target.stdio.arrived)
    target.remember(target.note())
    target.stdio.wait_for(lambda came: _is_event(came, "written"), since, target.patience)
    result = target.ask("events/unsubscribe")
    expect(
        result.get("subscribed") is False, f"memory/events/unsubscribe: expected subscribed false, got {shown(result)}"
    )
    since = len(target.stdio.arrived)
    target.remember(target.note())
    _expect_silence(target, since, "after memory/events/unsubscribe")


def _now(target: Target) -> str:
    cursor = target.ask("events").get("cursor")
    if not isinstance(cursor, str):
        raise Failure(f"memory/events: expected a string as cursor, got {cursor!r}")
    return cursor


def _events(result: dict[str, Any]) -> list[Event]:
    events = result.get("events")
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise Failure(f"memory/events: expected a list of objects as events, got {shown(events)}")
    return events


def _room(target: Target) -> dict[str, str]:
    """Return a tier where many records push out no others, if there are tiers."""
    if "tiers" in target.capabilities:
        for tier in target.tiers():
            if not tier.get("capacity"):
                response = target.call("remember", records=[target.note(tier=tier["name"])])
                target.note_written(response)
                if "result" in response:
                    return {"tier": tier["name"]}
    return {}


def _polled(target: Target, cursor: str) -> list[Event]:
    """Return all events after the cursor. Raise Failure if they do not end."""
    events: list[Event] = []
    for _ in range(_MOST_POLLS):
        result = target.ask("events", cursor=cursor)
        came = _events(result)
        events += came
        if not result.get("more"):
            return events
        expect(result.get("cursor") != cursor, f"memory/events: more, and the same cursor again: {shown(result)}")
        cursor = str(result.get("cursor"))
    raise Failure(f"memory/events: after {_MOST_POLLS} polls there are still more, {len(events)} so far")


def _of(events: list[Event], ids: list[str]) -> list[Event]:
    """Return the events of kind written about these records."""
    return [event for event in events if event.get("kind") == "written" and event.get("id") in ids]


def _pushes(target: Target) -> bool:
    entry = target.described.get("events")
    return isinstance(entry, dict) and entry.get("push") is True


def _subscribe(target: Target, **params: Any) -> None:
    if not _pushes(target):
        raise NotApplicable("push is not offered")
    result = target.ask("events/subscribe", **params)
    expect(result.get("subscribed") is True, f"memory/events/subscribe: expected subscribed true, got {shown(result)}")


def _is_event(came: Arrived, kind: str, id: str | None = None) -> bool:
    params = came.message.get("params") if came.is_notification and came.message is not None else None
    return isinstance(params, dict) and params.get("kind") == kind and id in (None, params.get("id"))


def _notifications(target: Target, since: int) -> list[Arrived]:
    return [came for came in target.stdio.arrived[since:] if came.is_notification]


def _expect_silence(target: Target, since: int, when: str) -> None:
    target.ask("describe")  # notifications pushed at once come before this answer, however long it takes
    deadline = time.monotonic() + _SILENCE
    while time.monotonic() < deadline:
        target.stdio.wait_for(lambda came: came.is_notification, since, deadline - time.monotonic())
    pushed = [came.message for came in _notifications(target, since)]
    expect(pushed == [], f"records were written {when}: expected no notification, got {shown(pushed)}")
