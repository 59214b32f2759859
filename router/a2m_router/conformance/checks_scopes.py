"""Scopes: which records of other owners a caller may see (§6)."""

from a2m_router.conformance.checking import SCOPE_DENIED, Agent, NotApplicable, Target, check, expect, ids_of, shown


@check("6-a", "4.2-1", needs="scopes")
def an_owner_sees_its_own_records(target: Target) -> None:
    one, _ = target.agents()
    note = target.note()
    ids = one.remember(note)
    for method, params in (("timeline", {}), ("recall", {"query": note["content"]})):
        found = one.ids(method, **params)
        expect(found == ids, f"memory/{method} by the owner: expected {ids}, got {found}")


@check("6-a", needs="scopes")
def nobody_sees_another_s_records(target: Target) -> None:
    one, other = target.agents()
    note = target.note()
    ids = one.remember(note)
    _private(target, one)
    for method, params in (("timeline", {}), ("recall", {"query": note["content"]}), ("recall", {})):
        found = other.ids(method, **params)
        expect(found == [], f"memory/{method} {params} by another owner: expected nothing of {ids}, got {found}")


@check("6-a", needs="scopes")
def nobody_deletes_another_s_records(target: Target) -> None:
    one, other = target.agents()
    ids = one.remember(target.note())
    _private(target, one)
    for selector in ({"ids": ids}, {"where": target.mine}):
        response = other.call("forget", **selector)
        if response.get("error", {}).get("code") != SCOPE_DENIED:
            came = response.get("result")
            expect(
                isinstance(came, dict) and came.get("forgotten") == 0,
                f"memory/forget with {selector} by another owner: expected 0 or -32005, got {shown(response)}",
            )
    left = one.ids("timeline")
    expect(left == ids, f"another owner tried to forget {ids}: expected them still there, got {left}")


@check("6-a", needs=("scopes", "keys"))
def nobody_fetches_another_s_key(target: Target) -> None:
    one, other = target.agents()
    key = f"{target.word()}/city"
    one.remember(target.note(key=key))
    _private(target, one)
    response = other.call("fetch", key=key)
    if response.get("error", {}).get("code") != SCOPE_DENIED:
        came = response.get("result")
        expect(
            isinstance(came, dict) and came.get("record", "") is None,
            f"memory/fetch of another owner's key: expected null or -32005, got {shown(response)}",
        )


@check("6-a", "4.10-1", needs=("scopes", "sessions"))
def nobody_sees_another_s_sessions(target: Target) -> None:
    one, other = target.agents()
    session = target.word()
    one.remember(target.note(session=session))
    _private(target, one)
    names = [listed.get("session") for listed in one.ask("session/list")["sessions"]]
    expect(session in names, f"memory/session/list by the owner: expected {session!r} among {shown(names)}")
    names = [listed.get("session") for listed in other.ask("session/list")["sessions"]]
    expect(session not in names, f"memory/session/list by another owner: expected no {session!r}, got {shown(names)}")


@check("6-a", needs=("scopes", "salience"))
def nobody_reinforces_another_s_records(target: Target) -> None:
    one, other = target.agents()
    ids = one.remember(target.note(salience=1))
    if one.client is other.client:
        raise NotApplicable("memory/reinforce has no owner parameter, and a local caller has no identity")
    _private(target, one)
    response = other.call("reinforce", ids=ids, amount=50)
    came = response.get("result", {}).get("reinforced")
    expect(
        came in (0, None), f"memory/reinforce of another owner's record: expected 0 or an error, got {shown(response)}"
    )


@check("4.2-1", "6-1", needs="scopes")
def an_owner_comes_back(target: Target) -> None:
    one, _ = target.agents()
    if one.owner is None:
        raise NotApplicable("over a network a caller cannot choose its owner")
    own = {"owner": one.owner}
    ids = target.remember(target.note(), owner=one.owner) + target.remember(target.note(owner=one.owner))
    target.note_written({"result": {"ids": ids}}, owner=one.owner)
    found = target.records("timeline", where=target.mine, **own)
    owners = [record.get("owner") for record in found]
    expect(owners == [one.owner] * 2, f"written with owner {one.owner!r}, for the call and on the record: got {owners}")
    expect(sorted(ids_of(found)) == sorted(ids), f"expected {ids}, got {ids_of(found)}")


@check("6-2", "6-3", "6-4", needs="scopes", binding="http")
def an_owner_that_is_named_is_not_believed(target: Target) -> None:
    one, other = target.agents()
    victim = one.remember(target.note())
    _private(target, one)
    found = target.records("timeline", by=one.client, where=target.mine)
    owner = found[0].get("owner") if found else None
    for named in dict.fromkeys(filter(None, (owner, "admin", target.word()))):
        for method, params in (
            ("timeline", {"where": target.mine}),
            ("recall", {"where": target.mine}),
            ("forget", {"ids": victim}),
        ):
            response = target.call(method, by=other.client, owner=named, **params)
            if response.get("error", {}).get("code") == SCOPE_DENIED:
                continue
            result = response.get("result")
            expect(
                isinstance(result, dict) and not result.get("records") and not result.get("forgotten"),
                f"memory/{method} with the foreign owner {named!r}: expected nothing or -32005, got {shown(response)}",
            )
    left = target.records("timeline", by=one.client, where=target.mine)
    expect(
        ids_of(left) == victim,
        f"another principal claimed to be the owner: expected {victim} untouched, got {ids_of(left)}",
    )


@check("6-3", "6-4", needs="scopes", binding="http")
def what_is_written_belongs_to_who_wrote_it(target: Target) -> None:
    one, other = target.agents()
    claimed = target.word()
    response = target.call("remember", by=one.client, records=[target.note()], owner=claimed)
    target.note_written(response, by=one.client)
    if response.get("error", {}).get("code") != SCOPE_DENIED:
        owners = [record.get("owner") for record in target.records("timeline", by=one.client, where=target.mine)]
        expect(
            len(owners) == 1 and owners[0] != claimed,
            f"written with owner {claimed!r} over a network: expected the writer's own record or -32005, got {owners}",
        )
    found = other.ids("timeline")
    expect(found == [], f"records of one principal: expected another to see none of them, got {found}")


def _private(target: Target, one: Agent) -> None:
    """Raise NotApplicable if writes go to a tier that all agents share."""
    if "tiers" not in target.capabilities:
        return
    shared = {tier.get("name") for tier in target.tiers() if tier.get("shared") is True}
    found = target.records("timeline", by=one.client, **{**one.named, "where": target.mine})
    if any(record.get("tier") in shared for record in found):
        raise NotApplicable("writes go to a tier that all agents share")
