"""The catalog in longer scenarios: flips that come too late, crashes, settings that change."""

import errno
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry, Stray
from a2m_router.catalog.records import Replacement
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.protocol.wire.equality import text_atom
from a2m_router.protocol.wire.records import Draft
from a2m_router.storage.database import DatabaseError
from tests.support.catalogs import (
    NAMES,
    TIERS,
    content_of,
    entry,
    move,
    opened,
    replace,
    rewritten,
    strays_left,
    tier,
    write,
)

ALL = Scope()


def home(catalog: Catalog, id: str) -> str | None:
    return found.home if (found := catalog.records.get(id)) else None


def kinds(catalog: Catalog, tier: str) -> dict[str, Stray]:
    """Return all strays of a tier, with those of changes under way, which `strays` leaves out."""
    found = catalog.strays.in_the_way(tier, [entry(id) for id in "xyz"])
    return {stray.id: stray.kind for stray in found}


def recovered(path: Path) -> Catalog:
    catalog = opened(path)
    catalog.begin_recovery()
    return catalog


# --- a flip that comes too late


def test_a_group_moves_whole_and_leaves_its_old_copies_noted() -> None:
    catalog = opened()
    unit = write(catalog, entry("x", group="g"), entry("y", group="g"))
    assert move(catalog, [unit], "episodic") == unit
    assert (home(catalog, "x"), home(catalog, "y")) == ("episodic", "episodic")
    assert kinds(catalog, "working") == {"x": Stray.SUPERSEDED, "y": Stray.SUPERSEDED}
    assert kinds(catalog, "episodic") == {}


def test_a_unit_stays_whole_where_one_of_its_members_was_forgotten() -> None:
    catalog = opened()
    unit = write(catalog, entry("x", group="g"), entry("y", group="g"))
    single = write(catalog, entry("z"))
    catalog.note_copies([*unit, *single], "episodic")
    catalog.forget(["y"], ALL, 2000)
    assert catalog.flip([unit, single], "episodic") == single
    catalog.give_up([*unit, *single], "episodic")
    assert (home(catalog, "x"), home(catalog, "y"), home(catalog, "z")) == ("working", None, "episodic")
    assert kinds(catalog, "episodic") == {"x": Stray.SUPERSEDED, "y": Stray.UNWANTED}
    assert kinds(catalog, "working") == {"y": Stray.UNWANTED, "z": Stray.SUPERSEDED}


@pytest.mark.parametrize("first", [True, False])
def test_a_unit_stays_where_one_of_its_members_was_replaced(first: bool) -> None:
    catalog = opened()
    unit = write(catalog, entry("x", group="g", key="k"), entry("y", group="g", key="l"))
    replaced = unit[0 if first else 1]
    assert replace(catalog, rewritten(replaced), replaced)
    assert move(catalog, [unit], "episodic") == []
    assert home(catalog, "x") == home(catalog, "y") == "working"


def test_a_unit_stays_where_a_member_has_joined_it() -> None:
    catalog = opened()
    unit = write(catalog, entry("x", group="g"))
    write(catalog, entry("y", group="g"))
    assert move(catalog, [unit], "episodic") == []


def test_a_unit_has_one_owners_group_in_one_tier() -> None:
    """Another owner's group of the same name, or that group in another tier, does not belong to a unit."""
    catalog = opened()
    unit = write(catalog, entry("x", group="g"))
    write(catalog, entry("y", group="g", owner="a"), entry("z", "semantic", group="g"))
    assert move(catalog, [unit], "episodic") == unit


def test_what_was_recalled_meanwhile_moves_and_keeps_what_it_earned() -> None:
    """A record that was recalled or reinforced before the flip moves all the same, and keeps what it earned."""
    catalog = opened()
    unit = write(catalog, entry("x"))
    catalog.touch(["x"], 3000)
    catalog.reinforce(["x"], 2.0, ALL)
    catalog.note_copies(unit, "episodic")
    assert len(catalog.flip([unit], "episodic", salience=0.5)) == 1
    moved = catalog.records.find(["x"])["x"]
    assert (moved.access_count, moved.accessed_at, moved.salience) == (1, 3000, 3.5)


def test_the_same_unit_twice_moves_once() -> None:
    catalog = opened()
    unit = write(catalog, entry("x"))
    assert move(catalog, [unit, unit], "episodic") == unit
    assert move(catalog, [unit], "semantic") == []


@pytest.mark.parametrize("reopened", [True, False])
def test_an_id_that_was_forgotten_and_written_again_is_another_record(tmp_path: Path, reopened: bool) -> None:
    catalog = opened(tmp_path / "catalog.db")
    old = write(catalog, entry("x", group="g"), entry("y", group="g"))
    catalog.note_copies(old, "episodic")
    catalog.forget(["x"], ALL, 2000)
    if reopened:
        catalog.close()
        catalog = opened(tmp_path / "catalog.db")
    [new] = write(catalog, entry("x", group="g"))
    assert catalog.flip([old], "episodic") == []
    assert home(catalog, "x") == "working"
    assert not replace(catalog, rewritten(old[0]), old[0])
    assert catalog.records.find(["x"]) == {"x": new}
    catalog.close()


def test_versions_never_repeat(tmp_path: Path) -> None:
    seen: set[int] = set()
    for turn in range(3):
        catalog = opened(tmp_path / "catalog.db")
        known = catalog.records.find(["x", "y"])
        if turn:
            assert {known["y"].version} <= seen  # opening alone changes no version
        catalog.forget(["x"], ALL, 1000)
        for made in write(catalog, entry("x"), *([] if turn else [entry("y")])):
            assert made.version not in seen
            seen.add(made.version)
        for target in ("episodic", "semantic", "working"):
            move(catalog, [[catalog.records.find(["x"])["x"]]], target)
            version = catalog.records.find(["x"])["x"].version
            assert version not in seen
            seen.add(version)
        catalog.close()


def test_what_a_group_joins_in_its_new_tier_moves_on_with_it() -> None:
    catalog = opened()
    write(catalog, entry("y", "episodic", group="g"))
    unit = write(catalog, entry("x", group="g"))
    move(catalog, [unit], "episodic")
    [x] = catalog.records.find(["x"]).values()
    assert [member.id for member in catalog.records.unit(x)] == ["y", "x"]


# --- after a crash


def test_what_was_being_written_is_given_up_and_its_copies_go(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    catalog.reserve([entry("x"), entry("y", "episodic", key="k")])
    catalog.reserve([entry("z", "episodic", owner="a")])
    [v] = write(catalog, entry("v"))
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")
    assert catalog.records.find("vxyz") == {"v": v}
    assert not any(map(catalog.records.is_reserved, "xyz"))
    assert kinds(catalog, "working") == {"x": Stray.UNWANTED}
    assert kinds(catalog, "episodic") == {"y": Stray.UNWANTED, "z": Stray.UNWANTED}
    assert catalog.queries.counts(ALL) == {name: int(name == "working") for name in NAMES}
    # their ids and keys are free
    assert catalog.adopt([entry("y", "semantic", key="k")]) == (1, [])
    write(catalog, entry("x"))
    assert kinds(catalog, "working") == {}
    catalog.close()


def test_a_write_to_a_tier_no_longer_configured_is_abandoned(tmp_path: Path) -> None:
    without = [tier for tier in TIERS if tier.name != "semantic"]
    catalog = opened(tmp_path / "catalog.db")
    catalog.reserve([entry("x"), entry("y", "semantic")])
    catalog.close()
    catalog = opened(tmp_path / "catalog.db", without)
    catalog.begin_recovery()
    assert not any(map(catalog.records.is_reserved, "xy"))
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")  # the tier is configured again
    assert kinds(catalog, "semantic") == {"y": Stray.UNWANTED}
    catalog.close()


def test_what_was_being_moved_stays_where_it_was(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    unit = write(catalog, entry("x"))
    catalog.note_copies(unit, "episodic")
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")
    assert home(catalog, "x") == "working"
    assert [stray.id for stray in catalog.strays.removable("episodic", "", 9)] == ["x"]
    catalog.close()


def test_a_move_that_was_committed_stays_committed(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    move(catalog, [write(catalog, entry("x"))], "episodic")
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")
    assert home(catalog, "x") == "episodic"
    assert kinds(catalog, "working") == {"x": Stray.SUPERSEDED}
    catalog.close()


# --- replacements and pending writes

REMOTE = [
    msgspec.structs.replace(each, command=None, url="http://127.0.0.1:1/") if each.name == "semantic" else each
    for each in TIERS
]


def behind(catalog: Catalog) -> dict[str, str | None]:
    """Return the content of each pending write by id; assert that the catalog's queries for pending writes agree."""
    redone = catalog.pending.drafts("xyz")
    assert sorted(id for name in NAMES for id in catalog.pending.ids_in(name)) == sorted(redone)
    assert all(home(catalog, id) == name for name in NAMES for id in catalog.pending.ids_in(name))
    assert catalog.pending.is_open() == bool(redone)
    return {id: draft.content for id, draft in redone.items()}


def test_a_pending_write_is_true_at_once_and_survives_a_restart(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    [old] = write(catalog, entry("x", key="k", salience=3.0))
    catalog.touch(["x"], 5000)
    new = rewritten(old, session="s")
    assert replace(catalog, new, old)
    for _ in range(2):
        [now] = catalog.records.find(["x"]).values()
        assert (now.digest, now.session, now.revision) == (new.digest, "s", 1)
        assert (now.salience, now.access_count, now.accessed_at) == (3.0, 1, 5000)
        assert now.version != old.version
        assert behind(catalog) == {"x": "again of x"}
        assert strays_left(catalog) == 0
        catalog.close()
        catalog = recovered(tmp_path / "catalog.db")
    catalog.end_pending([now], {})
    assert behind(catalog) == {}
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")
    assert behind(catalog) == {}
    assert catalog.records.find(["x"]) == {"x": now}
    catalog.close()


def test_a_batch_becomes_true_in_all_tiers_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of a new record and replacements becomes true in all tiers or not at all."""
    catalog = opened(tmp_path / "catalog.db")
    x, y = write(catalog, entry("x", key="k"), entry("y", "semantic", key="l"))
    replacements = [Replacement(rewritten(each), each.version) for each in (x, y)]
    redo = {each.entry.id: content_of(each.entry) for each in replacements}
    catalog.reserve([entry("z", "episodic")])

    before = catalog._changes.replace

    def fail_at_the_last(current: Entry, *rest: Any) -> None:
        if current.id == "y":
            raise OSError(errno.ENOSPC, "no room")
        before(current, *rest)

    monkeypatch.setattr(catalog._changes, "replace", fail_at_the_last)
    with pytest.raises(OSError, match="no room"):
        catalog.commit_write([entry("z", "episodic")], replacements, redo=redo)
    assert catalog.records.find("xyz") == {"x": x, "y": y}
    assert behind(catalog) == {}
    assert catalog.records.is_reserved("z")

    monkeypatch.undo()
    assert catalog.commit_write([entry("z", "episodic")], replacements, redo=redo) == []
    catalog.close()
    catalog = recovered(tmp_path / "catalog.db")
    found = catalog.records.find("xyz")
    assert {id: each.digest for id, each in found.items()} == {
        "x": b"again of x",
        "y": b"again of y",
        "z": b"first of z",
    }
    assert behind(catalog) == {"x": "again of x", "y": "again of y"}
    catalog.close()


def test_a_write_over_http_is_kept_from_coming_true_late(tmp_path: Path) -> None:
    """A write in progress to a server over HTTP leaves a tombstone after a crash: a scan does not adopt a late copy."""
    catalog = opened(tmp_path / "catalog.db", REMOTE)
    [x] = write(catalog, entry("x", key="k"))
    catalog.reserve([entry("y"), entry("z", "semantic")])
    catalog.close()
    catalog = opened(tmp_path / "catalog.db", REMOTE)
    catalog.begin_recovery()
    assert catalog.records.find("xyz") == {"x": x}
    assert kinds(catalog, "working") == {"y": Stray.UNWANTED}
    assert kinds(catalog, "semantic") == {"z": Stray.UNWANTED}
    # a call to a server over HTTP may land after the router has stopped waiting for it
    assert [catalog.tombstones.is_forgotten(id) for id in "yz"] == [False, True]
    catalog.remove_notes("semantic", ["z"])
    assert catalog.adopt([entry("z", "semantic")]) == (0, [])
    assert kinds(catalog, "semantic") == {"z": Stray.UNWANTED}
    catalog.close()


def test_what_recovery_gave_up_can_be_written_again_on_purpose(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db", REMOTE)
    catalog.reserve([entry("z", "semantic")])
    catalog.close()
    catalog = opened(tmp_path / "catalog.db", REMOTE)
    catalog.begin_recovery()
    for name in NAMES:
        catalog.tiers.set_scanned(name, True)
    write(catalog, entry("z", "semantic"))
    assert home(catalog, "z") == "semantic"
    assert not catalog.tombstones.is_forgotten("z")
    assert strays_left(catalog) == 0
    catalog.close()


@pytest.mark.parametrize("owner", [None, "a"])
def test_a_new_record_is_not_taken_for_an_old_copy_of_its_id(owner: str | None) -> None:
    catalog = opened()
    catalog.tiers.set_scanned("episodic", True)
    assert catalog.forget(["x"], Scope(owner), 1) == []  # the other tiers have not been scanned
    write(catalog, entry("x", "semantic", owner=owner))
    assert catalog.adopt([entry("x", "working", digest=b"the old one", owner=owner)]) == (0, [])
    assert kinds(catalog, "working") == {"x": Stray.UNWANTED}
    assert home(catalog, "x") == "semantic"
    for name in NAMES:
        assert catalog.tombstones.is_forgotten("x")
        catalog.end_scan(name)
    assert not catalog.tombstones.is_forgotten("x")


def test_a_walk_does_not_go_through_numbers_that_no_record_has() -> None:
    catalog = opened()
    catalog.records.newest = 1 << 60  # a damaged file may contain such a number
    write(catalog, entry("x"))
    there, after = catalog.queries.walk(Selection(tiers=NAMES), 0, 10)
    assert ([each.id for each in there], after) == (["x"], None)


def test_what_is_written_under_the_id_of_a_lost_record_has_earned_nothing() -> None:
    catalog = opened()
    [x] = write(catalog, entry("x"))
    catalog.touch(["x"], 1)
    assert catalog.lose([x]) != []
    assert catalog.earned.count() == 1
    [anew] = write(catalog, entry("x", "semantic"))
    assert (anew.access_count, catalog.earned.count()) == (0, 0)


def test_an_abandoned_write_is_kept_from_landing_late() -> None:
    """An abandoned write leaves a tombstone where it may still land."""
    catalog = opened(tiers=REMOTE)
    given_up = [entry("x"), entry("y", "semantic"), entry("z", "semantic")]
    catalog.reserve(given_up)
    catalog.abandon(given_up)
    catalog.abandon(given_up)  # noted again, as after a disk fault at the first time
    assert not any(map(catalog.records.is_reserved, "xyz"))
    assert [catalog.tombstones.is_forgotten(id) for id in "xyz"] == [False, True, True]
    assert kinds(catalog, "working") == {"x": Stray.UNWANTED}
    assert kinds(catalog, "semantic") == {"y": Stray.UNWANTED, "z": Stray.UNWANTED}
    catalog.remove_notes("semantic", ["y", "z"])
    assert catalog.adopt(given_up[1:]) == (0, [])  # it has landed, and a scan finds it
    assert kinds(catalog, "semantic") == {"y": Stray.UNWANTED, "z": Stray.UNWANTED}
    for name in NAMES:
        catalog.tiers.set_scanned(name, True)
    write(catalog, entry("y", "semantic"))
    assert [catalog.tombstones.is_forgotten(id) for id in "xyz"] == [False, False, True]


def test_the_catalog_lets_go_of_several_at_once_and_of_no_others() -> None:
    catalog = opened()
    written = write(catalog, *(entry(id, key=id) for id in "xyz"))
    for each in written:
        replace(catalog, rewritten(each), each)
    found = catalog.records.find("xyz")
    catalog.end_pending([found["x"], found["z"]], {})
    assert behind(catalog) == {"y": "again of y"}
    assert catalog.records.find("xyz") == found
    catalog.end_pending([], {})
    assert behind(catalog) == {"y": "again of y"}


def test_of_two_pending_writes_the_last_is_kept_in_whatever_tier() -> None:
    """Of two pending writes of a record the last one counts, even if it is for another tier."""
    catalog = opened()
    [first] = write(catalog, entry("x", key="k"))
    replace(catalog, rewritten(first), first)
    [second] = catalog.records.find(["x"]).values()
    assert replace(catalog, rewritten(second, digest=b"third", home="semantic"), second)
    assert behind(catalog) == {"x": "third"}
    assert catalog.pending.ids_in("semantic") == ["x"]
    assert kinds(catalog, "working") == {"x": Stray.UNWANTED}


def forget_and_write_again(catalog: Catalog) -> None:
    catalog.forget(["x"], ALL, 2000)
    write(catalog, entry("x", key="k"))


CHANGES_OF_X: dict[str, Callable[[Catalog], object]] = {
    "it was forgotten": lambda catalog: catalog.forget(["x"], ALL, 2000),
    "it was forgotten and written again": forget_and_write_again,
    "it was replaced": lambda catalog: replace(
        catalog, rewritten(catalog.records.find(["x"])["x"], digest=b"another"), catalog.records.find(["x"])["x"]
    ),
    "it was moved": lambda catalog: move(catalog, [catalog.records.unit(catalog.records.find(["x"])["x"])], "episodic"),
    "it came home": lambda catalog: catalog.come_home("x", b"first of x", "episodic"),
    "a scan found a newer one": lambda catalog: catalog.adopt([entry("x", "episodic", key="k", revision=7)]),
}


@pytest.mark.parametrize("meanwhile", CHANGES_OF_X)
def test_a_replacement_of_a_record_changed_meanwhile_is_not_made(meanwhile: str) -> None:
    catalog = opened()
    [x] = write(catalog, entry("x", key="k"))
    CHANGES_OF_X[meanwhile](catalog)
    then, were_behind = catalog.records.find(["x"]), behind(catalog)
    assert not replace(catalog, rewritten(x), x)
    assert catalog.records.find(["x"]) == then
    assert behind(catalog) == were_behind


def test_a_replacement_is_made_though_the_record_was_recalled_meanwhile() -> None:
    """A replacement is made although its record was recalled and reinforced since it was planned."""
    catalog = opened()
    [x] = write(catalog, entry("x", key="k"))
    catalog.touch(["x"], 5000)
    catalog.reinforce(["x"], 2.0, ALL)
    assert replace(catalog, rewritten(x), x)
    [now] = catalog.records.find(["x"]).values()
    assert (now.access_count, now.accessed_at, now.salience) == (1, 5000, 3.0)


LETTING_GO: dict[str, Callable[[Catalog], object]] = {
    "it is forgotten": lambda catalog: catalog.forget(["x"], ALL, 2000),
    "it moves": lambda catalog: move(catalog, [catalog.records.unit(catalog.records.find(["x"])["x"])], "episodic"),
    "it comes home": lambda catalog: catalog.come_home("x", b"again of x", "episodic"),
    "it gives way to a summary": lambda catalog: catalog.distil(
        catalog.records.unit(catalog.records.find(["x"])["x"]), entry("summary", "episodic"), 2000
    ),
    "its store is exchanged": lambda catalog: catalog.drop_home("working"),
    "a scan finds a newer one": lambda catalog: catalog.adopt([entry("x", "episodic", key="k", revision=7)]),
}


@pytest.mark.parametrize("what", LETTING_GO)
def test_a_tier_has_nothing_to_catch_up_with_when(what: str) -> None:
    catalog = opened()
    x, y = write(catalog, entry("x", key="k"), entry("y", "semantic", key="l"))
    replace(catalog, rewritten(x), x)
    replace(catalog, rewritten(y), y)
    assert LETTING_GO[what](catalog)
    assert behind(catalog) == {"y": "again of y"}


def test_a_record_is_not_lost_while_its_tier_has_yet_to_catch_up_with_it() -> None:
    catalog = opened()
    [x, _] = write(catalog, entry("x", key="k"), entry("y"))
    replace(catalog, rewritten(x), x)
    found = catalog.records.find("xy")
    assert catalog.queries.may_hold("working") == range(1, 3)
    assert [lost.id for lost in catalog.lose(found.values())] == ["y"]
    catalog.end_pending([found["x"]], {})
    assert [lost.id for lost in catalog.lose([found["x"]])] == ["x"]


def test_a_replacement_is_found_by_its_own_vector_at_once() -> None:
    """A replacement is found by its own vector at once, and also after its pending write has ended."""
    catalog = opened()
    catalog.vectors.set_lifting("working", lifted=True, indexed=True)
    catalog.reserve([entry("x", key="k"), entry("y")])
    catalog.commit_write([entry("x", key="k"), entry("y")], [], {"x": [1.0, 0.0], "y": [0.6, 0.8]})
    x = catalog.records.find(["x"])["x"]
    nearest_first = partial(catalog.queries.nearest, Selection(tiers=NAMES), [1.0, 0.0], 2)
    assert nearest_first() == ["x", "y"]
    away = {"x": [0.0, 1.0]}
    catalog.commit_write([], [Replacement(rewritten(x), x.version)], away, {"x": Draft(id="x")})
    assert nearest_first() == ["y", "x"]
    catalog.end_pending(catalog.records.find(["x"]).values(), away)
    assert nearest_first() == ["y", "x"]


def test_records_stay_lifted_while_their_server_may_hold_lifted_ones() -> None:
    catalog = opened()
    catalog.vectors.set_lifting("working", lifted=True, indexed=True)
    assert catalog.queries.lifting("working", "here") == (False, False)
    catalog.tiers.set_identity("working", "here")
    catalog.reserve([entry("x")])  # from here on a write of the record may be under way
    assert catalog.queries.lifting("working", "here") == (True, True)
    catalog.commit_write([entry("x")], [])
    assert catalog.queries.lifting("working", "here") == (True, True)
    assert catalog.queries.lifting("working", "another server") == (False, False)
    assert catalog.queries.lifting("semantic", "here") == (False, False)
    catalog.forget(["x"], ALL, 0)
    assert catalog.queries.lifting("working", "here") == (True, True)
    catalog.remove_notes("working", ["x"])
    assert catalog.queries.lifting("working", "here") == (False, False)


# --- salience and accesses, and changed settings


def test_a_record_that_moves_on_has_to_earn_its_next_promotion() -> None:
    tiers = [tier("a", promote_to="b", promote_after=2), tier("b", promote_to="c", promote_after=9), tier("c")]
    for moved in ("flip", "replaced", "come home"):
        catalog = opened(tiers=tiers)
        [x] = write(catalog, entry("x", "a", key="k"))
        assert [catalog.touch(["x"], 2000) for _ in range(2)] == [False, True]
        assert [due.id for due in catalog.buckets.due("a")] == ["x"]
        if moved == "flip":
            move(catalog, [[x]], "b")
        elif moved == "replaced":
            replace(catalog, rewritten(x, home="b"), x)
        else:
            catalog.come_home("x", x.digest, "b")
        assert home(catalog, "x") == "b"
        assert [each for name in "abc" for each in catalog.buckets.due(name)] == []


def test_a_promotion_that_is_asked_more_of_is_not_due_any_more(tmp_path: Path) -> None:
    for after, due in ((2, ["x"]), (3, []), (1, ["x", "y"])):
        changed = [tier("a", promote_to="b", promote_after=after), tier("b")]
        catalog = opened(tmp_path / "catalog.db", changed)
        if not catalog.records.find("x"):
            write(catalog, entry("x", "a"), entry("y", "a"))
            catalog.touch(["x", "x", "y"], 2000)
        assert sorted(each.id for each in catalog.buckets.due("a")) == due
        catalog.close()


@given(st.permutations("abcd"), st.integers(1, 4))
def test_a_group_stands_where_its_strongest_member_would(order: list[str], size: int) -> None:
    catalog = opened(tiers=[tier("t", capacity=1)])
    write(catalog, *(entry(id, "t", group="g" if id in "abcd"[:size] else None) for id in order))
    write(catalog, entry("late", "t", group="g"))
    catalog.forget(["late"], ALL, 2000)
    [(bucket, held)] = catalog.buckets.overfull("t")
    assert held == 4
    group = tuple(id for id in order if id in "abcd"[:size])
    expected = [group if id == group[-1] else (id,) for id in order if id == group[-1] or id not in group]
    assert [unit.ids for unit in catalog.buckets.weakest("t", bucket)] == expected


def test_salience_never_grows_beyond_what_json_can_say() -> None:
    catalog = opened()
    unit = write(catalog, entry("x", salience=1.7e308))
    catalog.reinforce(["x"], 1.7e308, ALL)
    assert catalog.records.find(["x"])["x"].salience == 1.7976931348623157e308
    catalog.note_copies(unit, "semantic")
    catalog.flip([unit], "semantic", salience=1e308)
    assert catalog.records.find(["x"])["x"].salience == 1.7976931348623157e308


def test_a_tier_with_records_cannot_be_taken_out_of_the_settings(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    write(catalog, entry("x", "procedural"))
    catalog.close()
    with pytest.raises(DatabaseError, match=r"1 record.* the tier 'procedural', which"):
        opened(tmp_path / "catalog.db", TIERS[:3])
    catalog = opened(tmp_path / "catalog.db")  # the refused catalog has released the file
    catalog.forget(["x"], ALL, 2000)
    catalog.close()
    opened(tmp_path / "catalog.db", TIERS[:3]).close()


# --- the effect of a scope


def test_a_conversation_is_as_old_as_what_the_caller_sees_of_it() -> None:
    catalog = opened()
    write(catalog, entry("x", owner="b", session="s", created_at=1), entry("y", owner="b", session="s", created_at=9))
    write(catalog, entry("z", "procedural", owner="b", session="s", created_at=5))
    [seen] = catalog.queries.sessions(Scope("a"))
    assert (seen.tiers, seen.opened_at, seen.touched_at) == ({"procedural": 1}, 5, 5)
    [whole] = catalog.queries.sessions(Scope("b"))
    assert (whole.tiers, whole.opened_at, whole.touched_at) == ({"working": 2, "procedural": 1}, 1, 9)


def test_a_conversation_of_many_owners_is_found_whole_and_in_order() -> None:
    catalog = opened()
    write(
        catalog,
        *(entry(f"{i}", owner=f"{i % 90}", session="s", created_at=(i * 37) % 100) for i in range(200)),
        entry("other", session="t"),
    )
    selection = Selection(tiers=NAMES, where={"session": (text_atom("s"),)})
    expected = sorted(range(200), key=lambda i: ((i * 37) % 100, i))
    assert [found.id for found in catalog.queries.newest(selection, 50)] == [f"{i}" for i in expected[-50:]]
    assert len(catalog.queries.ids(selection)) == 200


@pytest.mark.parametrize("name", ["id", "key", "session", "role", "owner"])
def test_a_filter_may_list_more_values_than_a_query_takes(name: str) -> None:
    catalog = opened()
    fields = {"owner": "a", "session": "s", "role": "r", "key": "k"}
    write(catalog, entry("x", **fields), entry("y", owner="b"))
    many = [*(f"nothing {i}" for i in range(40_000)), {"id": "x", **fields}[name]]
    where = {name: tuple(text_atom(value) for value in [*many, many[-1]])}
    assert catalog.queries.ids(Selection(tiers=NAMES, where=where)) == ["x"]
    assert [found.id for found in catalog.queries.newest(Selection(tiers=NAMES, where=where, scope=Scope("a")), 3)] == [
        "x"
    ]


# --- adoption, tombstones and counts


def test_what_a_scan_finds_does_not_take_a_key_that_is_being_written() -> None:
    catalog = opened()
    new, old = entry("x", key="k", owner="a"), entry("y", "semantic", key="k", owner="a")
    catalog.reserve([new])
    assert catalog.adopt([old, entry("z", "semantic", key="k")]) == (1, [old])
    assert catalog.commit_write([new], []) == []
    assert set(catalog.records.find("xyz")) == {"x", "z"}


def test_a_better_copy_is_not_adopted_at_the_cost_of_anothers_key() -> None:
    catalog = opened()
    write(catalog, entry("x"), entry("y", key="k"))
    better = entry("x", "episodic", key="k", revision=1)
    assert catalog.adopt([better]) == (0, [better])
    assert (home(catalog, "x"), home(catalog, "y")) == ("working", "working")


def test_a_clock_that_is_set_back_is_seen_once_also_over_a_restart(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    assert [catalog.look_at_clock(now) for now in (5, 3, 3, 7)] == [0, 2, 0, 0]
    write(catalog, entry("x"))
    catalog.close()
    catalog = opened(tmp_path / "catalog.db")
    assert [catalog.look_at_clock(now) for now in (1, 1, 8)] == [6, 0, 0]
    catalog.close()


def test_another_identity_means_other_contents() -> None:
    catalog = opened()
    assert catalog.tiers.identity("working") is None
    catalog.tiers.set_identity("working", "one")
    catalog.tiers.set_scanned("working", True)
    catalog.tiers.set_identity("working", "one")
    assert catalog.tiers.is_scanned("working")
    catalog.tiers.set_identity("working", "another")
    assert (catalog.tiers.identity("working"), catalog.tiers.is_scanned("working")) == ("another", False)


def test_notes_of_forgetting_go_once_they_are_old_and_no_copy_is_left() -> None:
    catalog = opened()
    for name in NAMES:
        catalog.tiers.set_scanned(name, True)
    write(catalog, entry("x"), entry("y"), entry("z"))
    catalog.forget(["x", "y"], ALL, 2000)
    catalog.forget(["z"], ALL, 3000)
    catalog.remove_notes("working", ["x", "z"])
    catalog.drop_notes_before(3000)
    assert [id for id in "xyz" if catalog.tombstones.is_forgotten(id)] == ["y", "z"]


def test_an_unknown_id_gets_a_tombstone_only_while_tiers_are_unread() -> None:
    catalog = opened()
    for name in NAMES[1:]:
        catalog.tiers.set_scanned(name, True)
    catalog.forget(["x"], ALL, 2000)
    catalog.tiers.set_scanned(NAMES[0], True)
    catalog.forget(["y"], ALL, 2000)
    assert (catalog.tombstones.is_forgotten("x"), catalog.tombstones.is_forgotten("y")) == (True, False)
    assert catalog.adopt([entry("x"), entry("y")]) == (1, [])
    assert kinds(catalog, "working") == {"x": Stray.UNWANTED}


def test_the_federations_vectors_have_one_width_and_metric(tmp_path: Path) -> None:
    catalog = opened(tmp_path / "catalog.db")
    assert (catalog.vectors.dimensions(), catalog.vectors.metric()) == (None, "cosine")
    catalog.vectors.fix_dimensions(384)
    catalog.vectors.set_metric("dot")
    catalog.close()
    catalog = opened(tmp_path / "catalog.db")
    assert (catalog.vectors.dimensions(), catalog.vectors.metric()) == (384, "dot")
    catalog.close()


def test_a_read_under_way_may_show_a_copy_that_has_just_been_moved() -> None:
    catalog = opened()
    [x] = write(catalog, entry("x"))
    with catalog.reads.reading() as read:
        move(catalog, [[x]], "episodic")
        [x] = catalog.records.find(["x"]).values()
        accepted = {name for name in NAMES if catalog.reads.accepts(read, x, name)}
        assert accepted == {"working"}
    with catalog.reads.reading() as read:
        assert not catalog.reads.accepts(read, x, "working")
