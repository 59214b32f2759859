"""A few rounds of real processes that are killed, and tests that the rounds notice faults.

    python -m tests.verification.kill

plays many more.
"""

import os
import random
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest
from msgspec import Raw

from a2m_router.protocol.wire.records import Record
from tests.verification.kill.__main__ import main
from tests.verification.kill.account import Account, Found, Version, Wrong
from tests.verification.kill.processes import MARK, TIERS, Processes
from tests.verification.kill.rounds import check_files, deaths_of, run_round

# --- a share of the rounds

PIPES: Final = 16
HTTP_DOOR: Final = 1
A_STORE_OVER_HTTP: Final = 22


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("seed", [PIPES, HTTP_DOOR, A_STORE_OVER_HTTP])
def test_whatever_dies_nothing_acknowledged_is_lost(seed: int, tmp_path: Path) -> None:
    played = run_round(seed, tmp_path)
    assert played.wrong is None
    assert played.outcomes["answered"] > 50
    assert played.deaths.total() == 3


LOSING: Final = """
[[fault]]
do = "lose-write"
after = 6
every = 3
"""


@pytest.mark.slow
@pytest.mark.process
def test_a_store_that_loses_what_it_acknowledged_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "faults.toml").write_text(LOSING)
    chaos = str(Path(sys.executable).with_name("a2m-chaos"))
    played = run_round(PIPES, tmp_path, before=(chaos, "--plan", "faults.toml", "--"))
    assert played.wrong is not None
    assert "missing is what was acknowledged" in played.wrong
    assert "WRONG" in (tmp_path / "history").read_text()


def test_what_happens_in_a_round_follows_from_its_seed() -> None:
    assert deaths_of(random.Random(1)) == deaths_of(random.Random(1)) != deaths_of(random.Random(2))
    every = {death.what for seed in range(50) for death in deaths_of(random.Random(seed))}
    assert every == {"router", "store", "several", "hang", "restart"}


@pytest.mark.process
def test_a_process_that_is_left_behind_is_noticed(tmp_path: Path) -> None:
    processes = Processes(tmp_path, ["c0"], http=False, remote=None, tell=lambda _: None)
    with subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: str(tmp_path)},
    ) as orphan:
        assert orphan.stdout is not None
        assert orphan.stdout.readline() == b"up\n"  # a new process does not show its environment at once
        assert [process.pid for process in processes.left_over()] == [orphan.pid]
        orphan.communicate(b"\n")
    assert processes.left_over() == []


def test_the_command_line_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--rounds" in said
    assert "--seed" in said


# --- which answers a client accepts


def version(number: str, name: str | None = None, batch: str = "b1", **fields: Any) -> Version:
    return Version(number, name or number, {"content": f"{number} words", **fields}, batch)


def shown(written: Version, **fields: Any) -> Record:
    """Return the record as a correct router shows it."""
    standard = {"id": written.name, "owner": "c", "tier": "working", "created_at": "2026-01-01T00:00:00.000Z"}
    return Record(**{**standard, **written.fields, **fields})


def account(*acknowledged: Version) -> Account:
    kept = Account("c")
    kept.begin_write(acknowledged)
    kept.end_write(acknowledged, [each.name for each in acknowledged])
    return kept


ONE: Final = version("v1", metadata=Raw(b'{"one": 1.0}'), embedding=[0.5, 0.25])
TWO: Final = version("v2")


def test_what_was_acknowledged_is_as_it_was_written() -> None:
    account(ONE, TWO).check(Found([shown(ONE), shown(TWO)]), all_of_it=True)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (Found([shown(ONE)]), "missing is what was acknowledged"),
        (Found([shown(ONE), shown(ONE), shown(TWO)]), "comes twice"),
        (Found([shown(ONE), shown(TWO), shown(TWO, id="another")]), "id is altered|is there twice"),
        (Found([shown(ONE, content="v1 other"), shown(TWO)]), "content is altered"),
        (Found([shown(ONE, metadata=Raw(b'{"one":1}')), shown(TWO)]), "metadata is altered"),
        (Found([shown(ONE, embedding=[0.5, 0.125]), shown(TWO)]), "embedding is altered"),
        (Found([shown(ONE, owner="d"), shown(TWO)]), "owner is altered"),
        (Found([shown(ONE), shown(TWO), shown(version("v9"))]), "nobody wrote"),
        (Found([shown(ONE)], [{"tier": "working", "reason": "down"}]), "down though all has settled"),
    ],
)
def test_what_is_not_so_at_the_end_is_noticed(found: Found, said: str) -> None:
    with pytest.raises(Wrong, match=said):
        account(ONE, TWO).check(found, all_of_it=True)


def test_an_answer_may_lack_what_a_tier_that_is_down_holds() -> None:
    account(ONE, TWO).check(Found([shown(ONE)], [{"tier": "episodic", "reason": "down"}]), ["v1", "v2"])


def test_a_birth_date_that_changes_is_noticed() -> None:
    kept = account(version("v1"))
    kept.check(Found([shown(version("v1"))]))
    with pytest.raises(Wrong, match="created_at is altered"):
        kept.check(Found([shown(version("v1"), created_at="2026-01-01T00:00:00.001Z")]))


def test_what_was_forgotten_must_not_come_back() -> None:
    kept = account(ONE, TWO)
    kept.end_forget(["v1"], answered=True)
    kept.check(Found([shown(TWO)]), all_of_it=True)
    with pytest.raises(Wrong, match="v1 is shown as v1"):
        kept.check(Found([shown(ONE), shown(TWO)]))


def test_a_forget_that_nobody_answered_may_have_happened_or_not() -> None:
    kept = account(ONE)
    kept.end_forget(["v1"], answered=False)
    kept.check(Found([shown(ONE)]), all_of_it=True)
    kept.check(Found([]), all_of_it=True)


def test_a_write_that_nobody_answered_has_happened_wholly_or_not_at_all() -> None:
    kept = account(ONE)
    batch = [version("v3", batch="b2"), version("v4", batch="b2")]
    kept.begin_write(batch)
    kept.end_write(batch, None)
    kept.check(Found([shown(ONE)]), all_of_it=True)
    kept.check(Found([shown(ONE), *map(shown, batch)]), all_of_it=True)
    with pytest.raises(Wrong, match=r"of the batch \[v3, v4\] only \[v3\] became true"):
        kept.check(Found([shown(ONE), shown(batch[0])]), all_of_it=True)


def test_a_write_that_was_refused_has_not_happened() -> None:
    kept = account(ONE)
    kept.begin_write([TWO])
    kept.check(Found([shown(ONE)]), all_of_it=True)
    with pytest.raises(Wrong, match="v2 is shown"):
        kept.check(Found([shown(ONE), shown(TWO)]))


def test_an_answered_replacement_ends_the_doubt_about_those_before_it() -> None:
    first, second, third = (version(f"v{number}", "key", f"b{number}", key="key") for number in range(3))
    kept = account(first)
    kept.begin_write([second])
    kept.end_write([second], None)
    kept.check(Found([shown(first)]), ["key"])
    kept.check(Found([shown(second)]), ["key"])
    kept.begin_write([third])
    kept.end_write([third], ["key"])
    kept.check(Found([shown(third)]), all_of_it=True)
    with pytest.raises(Wrong, match="key is shown as v1"):
        kept.check(Found([shown(second)]))


def test_a_group_in_two_tiers_is_noticed() -> None:
    mates = [version("v1", group="g"), version("v2", group="g")]
    kept = account(*mates)
    kept.check(Found([shown(mates[0], tier="episodic"), shown(mates[1], tier="episodic")]))
    with pytest.raises(Wrong, match="groups that are not whole"):
        kept.check(Found([shown(mates[0], tier="episodic"), shown(mates[1])]))


# --- what the stores' files may hold


def files(folder: Path, **held: list[Record]) -> None:
    for tier in TIERS:
        with closing(sqlite3.connect(folder / f"{tier}.db")) as store, store:
            store.execute("CREATE TABLE record (id TEXT, content TEXT)")
            store.executemany(
                "INSERT INTO record VALUES (?, ?)", [(each.id, each.content) for each in held.get(tier, [])]
            )


def test_files_that_hold_what_was_shown_are_right(tmp_path: Path) -> None:
    files(tmp_path, working=[shown(ONE)])
    check_files(tmp_path, [shown(ONE)])


@pytest.mark.parametrize(
    ("held", "said"),
    [
        ({"working": [shown(ONE)], "semantic": [shown(ONE)]}, "hold what was not shown"),
        ({"semantic": [shown(ONE)]}, "hold what was not shown"),
        ({"working": [shown(ONE), shown(TWO)]}, "hold what was not shown"),
        ({}, "lack"),
        ({"working": [shown(ONE, content="v1 other")]}, "other contents"),
    ],
)
def test_files_that_hold_something_else_are_noticed(held: dict[str, list[Record]], said: str, tmp_path: Path) -> None:
    files(tmp_path, **held)
    with pytest.raises(Wrong, match=said):
        check_files(tmp_path, [shown(ONE)])
