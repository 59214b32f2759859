"""Salience and reinforcement (§3.1, §4.8)."""

from typing import Any

from a2m_router.conformance.checking import INVALID_PARAMS, TIMESTAMP, UNKNOWN_RECORD, Target, check, expect, shown


@check("3.1-a", "4.2-1", needs="salience")
def salience_comes_back(target: Target) -> None:
    (id,) = target.remember(target.note(salience=7.5))
    came = target.read(id).get("salience")
    # it may have decayed slightly since
    expect(
        isinstance(came, int | float) and 5 < came <= 7.501, f"salience was written as 7.5 and came back as {came!r}"
    )


@check("4.8-a", "4.8-2", needs="salience")
def reinforce_raises_salience(target: Target) -> None:
    ids = target.remember(*target.notes(3, salience=1))
    came = target.ask("reinforce", ids=ids[:2], amount=30).get("reinforced")
    expect(came == 2, f"memory/reinforce of two records: expected reinforced 2, got {came!r}")
    came = target.ask("reinforce", ids=[ids[2]]).get("reinforced")
    expect(came == 1, f"memory/reinforce of one record without an amount: expected reinforced 1, got {came!r}")
    saliences: list[Any] = [target.read(id).get("salience") for id in ids]
    expect(
        all(isinstance(salience, int | float) for salience in saliences)
        and all(20 < salience <= 31.001 for salience in saliences[:2])
        and 1 < saliences[2] < 20,
        f"of three with salience 1 two were reinforced by 30 and one by the default: got {saliences}",
    )


@check("4.8-1", needs="salience")
def reinforce_wants_ids(target: Target) -> None:
    target.refused(INVALID_PARAMS, "reinforce")
    target.refused(INVALID_PARAMS, "reinforce", amount=1)


@check("4.8-a", needs="salience")
def reinforcing_what_is_not_there_counts_nothing(target: Target) -> None:
    response = target.call("reinforce", ids=[f"no-{target.word()}"])
    if response.get("error", {}).get("code") != UNKNOWN_RECORD:
        came = response.get("result")
        expect(
            isinstance(came, dict) and came.get("reinforced") == 0,
            f"memory/reinforce of an unknown id: expected reinforced 0 (or {UNKNOWN_RECORD}), got {shown(response)}",
        )


@check("3.1-a", "3.3-a", needs="salience")
def access_is_counted(target: Target) -> None:
    note = target.note()
    (id,) = target.remember(note)
    for _ in range(2):
        target.recall(note["content"], limit=1)
    record = target.read(id)
    count, at = record.get("access_count"), record.get("accessed_at")
    expect(
        count is None or (type(count) is int and count >= 1),
        f"recalled twice: expected an access_count above 0, or none, got {count!r}",
    )
    expect(
        at is None or (isinstance(at, str) and bool(TIMESTAMP.fullmatch(at))),
        f"expected a timestamp as accessed_at, or none, got {at!r}",
    )
