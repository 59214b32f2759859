"""Tiers: their description, writes, promotion, consolidation, and groups that move together (§3.4, §4.6, §4.7)."""

import time
from typing import Any

from a2m_router.conformance.checking import (
    INVALID_PARAMS,
    UNKNOWN_TIER,
    NotApplicable,
    Target,
    check,
    expect,
    ids_of,
    shown,
)

_KINDS = ("working", "episodic", "semantic", "procedural")

# the largest capacity, in records, that a check exceeds to see which records leave
_MOST_WRITTEN = 200


@check("4.7-3", "4.7-4", needs="tiers", writes=False)
def tiers_have_a_name_and_a_count(target: Target) -> None:
    tiers = target.tiers()
    expect(tiers != [], "memory/describe with tiers declared: expected at least one tier")
    for tier in tiers:
        expect(isinstance(tier.get("name"), str), f"a tier in describe: expected a string as name, got {shown(tier)}")
        expect(type(tier.get("count")) is int, f"a tier in describe: expected an integer as count, got {shown(tier)}")
    names = [tier["name"] for tier in tiers]
    expect(len(set(names)) == len(names), f"tiers in describe: expected names that differ, got {names}")
    for tier in tiers:
        for way in ("spill_to", "promote_to"):
            expect(tier.get(way) in (None, *names), f"a tier in describe: {way} names no tier: {shown(tier)}")


@check("4.7-5", needs="tiers", writes=False)
def a_kind_is_one_of_the_four(target: Target) -> None:
    for tier in target.tiers():
        expect(
            tier.get("kind") in (None, *_KINDS), f"a tier in describe: expected kind one of {_KINDS}, got {shown(tier)}"
        )


@check("4.7-4", needs="tiers")
def counts_count_what_is_there(target: Target) -> None:
    (id,) = target.remember(target.note())
    here = target.read(id).get("tier")
    counts: dict[Any, Any] = {tier.get("name"): tier.get("count") for tier in target.tiers()}
    expect(here in counts, f"a record says it is in tier {here!r}; expected one of {list(counts)}")
    expect(
        counts[here] >= 1,
        f"a record is in tier {here!r}: expected a count of 1 or more in describe, got {counts[here]}",
    )


@check("4.2-1", "4.3-c", needs="tiers")
def a_record_goes_to_the_tier_it_names(target: Target) -> None:
    taken: dict[str, str] = {}
    for tier in target.tiers():
        target.note_written(response := target.call("remember", records=[target.note(tier=tier["name"])]))
        if "result" in response:
            (taken[tier["name"]],) = response["result"]["ids"]
    expect(taken != {}, "expected at least one tier to accept a record")
    for name, id in taken.items():
        expect(target.read(id).get("tier") == name, f"written to tier {name!r}: {shown(target.read(id))} is elsewhere")
        for method in ("timeline", "recall"):
            found = ids_of(target.records(method, tier=name, where=target.mine, limit=20))
            expect(found == [id], f"memory/{method} in tier {name!r}: expected {[id]}, got {found}")


@check("4.3-c", needs="tiers", writes=False)
def a_read_from_an_unknown_tier_fails(target: Target) -> None:
    for method in ("recall", "timeline"):
        target.refused(UNKNOWN_TIER, method, tier=target.word())


@check("4.6-4", needs="tiers")
def a_write_to_an_unknown_tier_fails(target: Target) -> None:
    (id,) = target.remember(target.note())
    target.refused(UNKNOWN_TIER, "remember", records=[target.note(tier=target.word())])
    target.refused(UNKNOWN_TIER, "promote", ids=[id], tier=target.word())
    target.refused(UNKNOWN_TIER, "forget", tier=target.word(), where=target.mine)
    left = ids_of(target.timeline())
    expect(left == [id], f"three calls named unknown tiers: expected {[id]} to be what is there, got {left}")


@check("4.6-1", "4.6-2", needs="tiers")
def promote_wants_ids_and_a_tier(target: Target) -> None:
    (id,) = target.remember(target.note())
    target.refused(INVALID_PARAMS, "promote", ids=[id])
    target.refused(INVALID_PARAMS, "promote", tier=target.read(id).get("tier"))
    target.refused(INVALID_PARAMS, "promote")


@check("4.6-a", "4.6-5", needs="tiers")
def promote_moves_and_counts(target: Target) -> None:
    ids = target.remember(target.note(), target.note())
    to = target.moved(ids[0])
    here = target.read(ids[0]).get("tier")
    expect(here == to, f"{ids[0]!r} was promoted to {to!r}; expected it there, got {here!r}")
    left = ids_of(target.timeline())
    expect(sorted(left) == sorted(ids), f"after a promotion: expected both records once, got {left}")
    unknown = f"no-{target.word()}"
    for moving, count in (([ids[0]], 0), ([unknown], 0), ([unknown, *ids], 1), (ids, 0)):
        came = target.ask("promote", ids=moving, tier=to).get("promoted")
        expect(came == count, f"memory/promote of {moving} to {to!r}: expected promoted {count}, got {came!r}")


@check("4.6-3", needs=("tiers", "salience"))
def promote_adds_salience_on_arrival(target: Target) -> None:
    (id,) = target.remember(target.note(salience=1))
    target.moved(id, salience=40)
    came = target.read(id).get("salience")
    expect(
        isinstance(came, int | float) and 20 < came <= 41.001,
        f"promoted with salience 40 added to 1: expected about 41, got {came!r}",
    )


@check("3.4-1", "3.4-3", needs="tiers")
def a_promoted_group_stays_together(target: Target) -> None:
    ids = target.remember(*target.notes(3, group=target.word()), target.note())
    target.moved(ids[1])
    where = {record["id"]: record.get("tier") for record in target.timeline()}
    tiers = {where.get(id) for id in ids[:3]}
    expect(len(tiers) == 1, f"one record of a group was promoted: expected all of it in one tier, got {where}")


@check("4.7-a", needs="tiers")
def consolidate_says_what_it_did(target: Target) -> None:
    target.remember(*target.notes(2))
    for result in (target.ask("consolidate"), target.ask("consolidate", reason="unheard of")):
        for field in ("moved", "promoted", "dropped", "summarized"):
            expect(
                type(result.get(field)) is int,
                f"memory/consolidate: expected an integer as {field}, got {shown(result)}",
            )
        counts = result.get("counts")
        names = {tier["name"] for tier in target.tiers()}
        expect(
            isinstance(counts, dict) and counts.keys() <= names and all(type(n) is int for n in counts.values()),
            f"memory/consolidate: expected counts of {sorted(names)}, got {shown(counts)}",
        )


@check("3.4-1", "3.4-3", needs=("tiers", "sessions"))
def pressure_moves_groups_whole(target: Target) -> None:
    tier, capacity = _bounded(target)
    session = target.word()
    groups = [target.word() for _ in range((capacity + 12) // 3)]
    for group in groups:
        target.remember(*target.notes(3, session=session, group=group, tier=tier["name"]))
    target.ask("consolidate")
    records = _settled(target)
    for group in groups:
        tiers = [record.get("tier") for record in records if record.get("group") == group]
        expect(
            len(set(tiers)) <= 1 and len(tiers) in (0, 3),
            f"tier {tier['name']!r} was overfilled with groups of three: expected each whole, {group!r} is in {tiers}",
        )


@check("3.5-2", needs=("tiers", "sessions"))
def a_busy_session_does_not_push_out_a_quiet_one(target: Target) -> None:
    tier, capacity = _bounded(target)
    quiet, busy = target.word(), target.word()
    ids = target.remember(*target.notes(2, session=quiet, tier=tier["name"]))
    for _ in range((capacity + 10) // 5):
        target.remember(*target.notes(5, session=busy, tier=tier["name"]))
    target.ask("consolidate")
    _settled(target)
    left = ids_of(target.timeline(where={**target.mine, "session": quiet}, tier=tier["name"]))
    expect(
        sorted(left) == sorted(ids),
        f"tier {tier['name']!r} holds {capacity} per session; a busy one wrote more: expected a quiet one's {ids} "
        f"still there, got {left}",
    )


def _bounded(target: Target) -> tuple[dict[str, object], int]:
    """Return a tier with a capacity per session, so that filling it pushes out no other session's records."""
    for tier in target.tiers():
        capacity = tier.get("capacity")
        if tier.get("per_session") is True and isinstance(capacity, int) and 0 < capacity <= _MOST_WRITTEN:
            return tier, capacity
    raise NotApplicable("no tier with a small capacity per session; in any other tier, other records would leave")


def _settled(target: Target) -> list[dict[str, object]]:
    """Return the timeline when no record seems to move any more."""
    records = target.timeline()
    for _ in range(20):
        time.sleep(0.05)
        before, records = records, target.timeline()
        if [record.get("tier") for record in before] == [record.get("tier") for record in records]:
            break
    return records
