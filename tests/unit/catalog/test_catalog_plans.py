"""No frequent query scans the whole catalog: each uses an index, and the right one."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import apsw
import pytest

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Entry
from a2m_router.catalog.selection import Scope, Selection
from a2m_router.protocol.wire.equality import text_atom
from tests.support.catalogs import NAMES, entry, move, opened, replace, rewritten, write

MINE = Scope("a")
X = entry("x", owner="a", session="s", group="g", key="k")


def atoms(*texts: str | None) -> tuple[bytes, ...]:
    return tuple(map(text_atom, texts))


def newest(limit: int | None = 5, tiers: list[str] = NAMES, **fields: Any) -> Callable[[Catalog], object]:
    return lambda catalog: catalog.queries.newest(Selection(tiers=tiers, **fields), limit)


def fail(catalog: Catalog) -> None:
    catalog.reserve([entry("new")])
    catalog.abandon([entry("new")])


def replace_twice(catalog: Catalog) -> None:
    for home in ("working", "semantic"):
        known = catalog.records.find("x")["x"]
        replace(catalog, rewritten(known, home=home), known)


def catch_up(catalog: Catalog) -> None:
    replace_twice(catalog)
    catalog.end_pending(catalog.records.find(catalog.pending.ids_in("semantic")).values(), {})


QUESTIONS: dict[str, Callable[[Catalog], object]] = {
    "find": lambda catalog: catalog.records.find(["x", "y"]),
    "by_key": lambda catalog: (catalog.records.by_key("a", "k"), catalog.records.by_key(None, "k")),
    "group": lambda catalog: catalog.records.group("working", "a", "g"),
    "newest of a session": newest(where={"session": atoms("s")}),
    "when a conversation was last written to": lambda catalog: catalog.queries.newest_of("a", "s"),
    "newest of no session": newest(where={"session": atoms(None)}, scope=MINE),
    "newest of an owner": newest(scope=MINE),
    "newest of a tier": newest(tiers=["working"]),
    "newest of all": newest(),
    "all of an owner in a tier": newest(None, ["procedural"], scope=MINE),
    "newest of some ids": newest(where={"id": atoms("x", "y")}),
    "newest of a key": newest(where={"key": atoms("k")}),
    "newest beneath a key": newest(key_prefix="k"),
    "newest beneath a key's slash": newest(key_prefix="k/", scope=MINE),
    "newest of a group": newest(where={"group": atoms("g")}),
    "ids of a session": lambda catalog: catalog.queries.ids(Selection(tiers=NAMES, where={"session": atoms("s")})),
    "walk": lambda catalog: catalog.queries.walk(Selection(tiers=NAMES, scope=MINE), 3, 2),
    "held": lambda catalog: catalog.buckets.held(1),
    "what was last written to a tier": lambda catalog: catalog.queries.latest("working", 5),
    "whether a store was set back": lambda catalog: catalog.lineage.is_set_back("working", catalog.lineage.epoch),
    "a store is told of the start": lambda catalog: catalog.lineage.note_epoch("working"),
    "bucket_of": lambda catalog: catalog.buckets.of("x"),
    "in_session": lambda catalog: catalog.queries.in_session("working", "s", "a"),
    "sessions of an owner": lambda catalog: catalog.queries.sessions(MINE),
    "counts of an owner": lambda catalog: catalog.queries.counts(MINE),
    "overfull": lambda catalog: [catalog.buckets.overfull(name) for name in NAMES],
    "weakest": lambda catalog: [
        list(catalog.buckets.weakest("working", bucket)) for bucket, _ in catalog.buckets.overfull("working")
    ],
    "a write": lambda catalog: write(catalog, entry("new", group="g", key="new", owner="a")),
    "a write that fails": fail,
    "replacements": replace_twice,
    "catching up": catch_up,
    "what is to be caught up with": lambda catalog: (
        catalog.pending.drafts(["x", "y"]),
        catalog.pending.among(["x"]),
        catalog.pending.ids_in("working"),
    ),
    "is_scanned": lambda catalog: catalog.tiers.is_scanned("working"),
    "which tiers have work": lambda catalog: catalog.queries.tiers_with_work(),
    "whether a key is taken": lambda catalog: catalog.findings.is_key_taken(entry("n", key="k", owner="a")),
    "knows_of": lambda catalog: catalog.queries.knows_of(MINE, "x"),
    "a move": lambda catalog: move(catalog, [catalog.records.unit(catalog.records.find("x")["x"])], "episodic"),
    "giving up": lambda catalog: catalog.give_up([X], "episodic"),
    "coming home": lambda catalog: catalog.come_home("x", X.digest, "semantic"),
    "forget": lambda catalog: catalog.forget(["x", "y", "nobody's"], MINE, 2000),
    "touch": lambda catalog: catalog.touch(["x", "y"], 2000),
    "reinforce": lambda catalog: catalog.reinforce(["x", "y"], 1.0, MINE),
    "strays": lambda catalog: catalog.strays.removable("working", "1", 5),
    "strays_in_the_way": lambda catalog: catalog.strays.in_the_way("working", [X]),
    "removing notes": lambda catalog: catalog.remove_notes("working", ["x"]),
    "adopt": lambda catalog: catalog.adopt([entry("new", key="new")]),
    "is_reserved": lambda catalog: catalog.records.is_reserved("x"),
    "is_forgotten": lambda catalog: catalog.tombstones.is_forgotten("x"),
}


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    catalog = opened()
    known = write(catalog, X, entry("y", owner="a", session="s"), entry("z", "procedural", owner="b"))
    write(catalog, entry("v", owner="a", session="s"), entry("w", owner="a", session="s"))
    catalog.note_copies(known, "semantic")
    move(catalog, [[known[1]]], "episodic")
    yield catalog
    catalog.close()


@contextmanager
def statements_of(connection: apsw.Connection) -> Iterator[list[str]]:
    """Yield a list that has the executed statements after the block."""
    seen: dict[str, None] = {}
    connection.trace_v2(apsw.SQLITE_TRACE_STMT, lambda event: seen.setdefault(event["sql"]))
    statements: list[str] = []
    try:
        yield statements
    finally:
        connection.trace_v2(0, None)
        statements += seen


def plan(connection: apsw.Connection, statement: str) -> list[str]:
    if not statement.startswith(("SELECT", "UPDATE", "DELETE", "INSERT")):
        return []
    bindings = tuple(range(statement.count("?")))
    return [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {statement}", bindings)]


@pytest.mark.parametrize("name", QUESTIONS)
def test_nothing_is_looked_for_without_an_index(catalog: Catalog, name: str) -> None:
    connection = catalog.database.connection
    with statements_of(connection) as statements:
        QUESTIONS[name](catalog)
    plans = {statement: plan(connection, statement) for statement in statements}
    assert any(plans.values())
    for statement, steps in plans.items():
        for step in steps:
            # there are few tiers and few writes under way, and one row shows whether a tier has pending writes
            few = ("CONSTANT ROW", "SCAN tiers", "record_by_reservation")
            if not any(each in step for each in few) and statement != "SELECT 1 FROM redo LIMIT 1":
                assert not step.startswith("SCAN"), f"{statement}: {steps}"
            # SQLite materializes an uncorrelated list completely, however many rows it has
            assert not step.startswith("LIST SUBQUERY"), f"{statement}: {steps}"


INDEXES: dict[str, str] = {
    "by_key": "record_by_key (key=? AND owner=?)",
    "group": "record_by_group (grp=? AND owner=? AND home=?)",
    "newest of a session": "record_by_session (session=? AND owner=?)",
    "newest of an owner": "record_by_owner (owner=?)",
    "newest of a tier": "record_by_home (home=?)",
    "newest beneath a key": "record_by_key (key>? AND key<?)",
    "weakest": "record_by_strength (bucket=?)",
    "a move": "record_by_group (grp=? AND owner=? AND home=?)",
    "strays": "PRIMARY KEY (tier=? AND id>?)",
    "strays_in_the_way": "stray_by_key (tier=? AND key=? AND owner=?)",
}


@pytest.mark.parametrize("name", INDEXES)
def test_the_narrowest_index_is_the_one_that_is_followed(catalog: Catalog, name: str) -> None:
    connection = catalog.database.connection
    with statements_of(connection) as statements:
        QUESTIONS[name](catalog)
    assert any(INDEXES[name] in step for statement in statements for step in plan(connection, statement))


@pytest.mark.parametrize(
    "name", ["newest of a session", "newest of an owner", "newest of a tier", "newest of all", "weakest"]
)
def test_the_first_few_are_found_without_sorting_the_rest(catalog: Catalog, name: str) -> None:
    connection = catalog.database.connection
    with statements_of(connection) as statements:
        QUESTIONS[name](catalog)
    searched = [plan(connection, s) for s in statements if "LIMIT" in s or "ORDER BY strength, seq" in s]
    assert searched
    assert not any("TEMP B-TREE" in step for steps in searched for step in steps)


def rows_stepped_over(catalog: Catalog, ask: Callable[[Catalog], object]) -> int:
    """Return the number of steps of SQLite's virtual machine for a query."""
    steps = 0

    def count(event: dict[str, Any]) -> None:
        nonlocal steps
        steps += event["stmt_status"]["SQLITE_STMTSTATUS_VM_STEP"]

    catalog.database.connection.trace_v2(apsw.SQLITE_TRACE_PROFILE, count)
    try:
        ask(catalog)
    finally:
        catalog.database.connection.trace_v2(0, None)
    return steps


def grown(size: int, path: Path) -> Catalog:
    catalog = opened(path)
    owners = ["a", "b", None]
    records: list[Entry] = [
        entry(
            f"{i}",
            NAMES[i % 4],
            owner=owners[i % 3],
            session=f"{i % 7}",
            group=f"{i // 5}" if i % 2 else None,
            key=f"{i}/k",
            created_at=i,
        )
        for i in range(size)
    ]
    write(catalog, X, entry("y", owner="a", session="s"), *records)
    catalog.forget([f"{i}" for i in range(0, size, 10)], Scope(), 2000)
    return catalog


@pytest.mark.parametrize(
    "name",
    sorted(set(QUESTIONS) - {"in_session", "ids of a session", "overfull", "weakest", "all of an owner in a tier"}),
)
def test_a_catalog_ten_times_as_large_takes_no_more_work(name: str, grown_catalogs: list[Catalog]) -> None:
    small, large = (rows_stepped_over(catalog, QUESTIONS[name]) for catalog in grown_catalogs)
    assert large <= 2 * small + 50


@pytest.fixture(scope="module")
def grown_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Grown once for all tests, since growing takes longer than the queries."""
    files = [tmp_path_factory.mktemp("grown") / "router.db" for _ in range(2)]
    for path, size in zip(files, (300, 3000), strict=True):
        grown(size, path).close()
    return files


@pytest.fixture
def grown_catalogs(grown_files: list[Path], tmp_path: Path) -> Iterator[list[Catalog]]:
    both = [opened(Path(shutil.copy(path, tmp_path / f"{number}.db"))) for number, path in enumerate(grown_files)]
    yield both
    for catalog in both:
        catalog.close()
