"""Simulated lives: the first seeds run without a finding, a seed replays to the byte, and the simulation finds faults.

`python -m tests.verification.simulation --seeds 10000` runs more seeds. A2M_EXAMPLES=10 runs ten times as many here.
"""

import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
import pytest
import trio

from a2m_chaos.faults import KINDS
from a2m_router.catalog.claims import id_name
from tests.support.catalogs import strays_left
from tests.support.clocks import jumping
from tests.support.crashes import crash
from tests.support.federated import Steered, Task, method_of, retried, settings_of, trial
from tests.support.paths import ROOT
from tests.verification.simulation.tiers import FAULTS

_SEEDS: Final = int(8 * float(os.environ.get("A2M_EXAMPLES", "1")))
_PARTS: Final = 2


def simulated(*options: str) -> "subprocess.CompletedProcess[str]":
    """Run the command in a process with a fixed hash seed, so that sets have the same order each time."""
    command = [sys.executable, "-m", "tests.verification.simulation", "--jobs", "1", *options]
    environ = {**os.environ, "PYTHONHASHSEED": "0"}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("part", range(_PARTS))
def test_nothing_is_lost_doubled_or_altered_whatever_dies_and_whenever(part: int) -> None:
    each = _SEEDS // _PARTS
    done = simulated("--first", str(part * each), "--seeds", str(each))
    assert done.returncode == 0, f"{done.stdout[-20_000:]}{done.stderr}"


@pytest.mark.process
def test_a_seed_replays_to_the_byte() -> None:
    one, other = (simulated("--seed", "1") for _ in range(2))
    assert one.stdout == other.stdout
    assert one.returncode == 0
    assert len(one.stdout.splitlines()) > 200


def test_what_goes_wrong_here_is_what_a2m_chaos_does() -> None:
    assert FAULTS.keys() <= KINDS.keys()


# --- faults that the simulation has found


def calmly(scenario: Any) -> None:
    """Run a scenario on a clock that jumps."""
    trio.run(scenario, **jumping())


def test_a_copy_goes_though_its_home_did_not_answer_when_it_was_swept() -> None:
    async def scenario() -> None:
        steer = Steered()
        async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
            ids = await fed.remember("one")
            read_back = steer.hold("episodic", "recall", after=True)
            tasks.start_soon(lambda: fed.call("promote", ids=ids, tier="episodic"))
            await read_back.reached.wait()
            steer.refuse("episodic", "recall")
            read_back.release()
            await anyio.sleep(1)
            assert {id: sorted(tiers) for id, tiers in fed.copies().items()} == {ids[0]: ["episodic", "working"]}
            steer.allow("episodic", "recall")
            await anyio.sleep(60)
            assert fed.copies() == {ids[0]: ["episodic"]}

    calmly(scenario)


def test_copies_in_two_tiers_go_when_what_claimed_them_both_lets_go() -> None:
    async def scenario() -> None:
        steer = Steered()
        async with trial(settings_of(policy="explicit"), weather=steer) as fed:
            ids = await fed.remember("one")
            catalog = fed.federation.catalog
            # two copies that no reconciler deletes, since the record is claimed
            entry = catalog.records.find(ids)[ids[0]]
            claim = await catalog.claims.take([id_name(ids[0])])
            catalog.note_copies([entry], "episodic")
            catalog.note_copies([entry], "semantic")
            catalog.give_up([entry], "episodic")
            catalog.give_up([entry], "semantic")
            retried(fed)
            await anyio.sleep(1)
            assert strays_left(catalog) == 2
            claim.release()
            await anyio.sleep(1)
            assert strays_left(catalog) == 0

    calmly(scenario)


def test_what_a_replacement_leaves_in_another_tier_goes() -> None:
    async def scenario() -> None:
        async with trial(settings_of(policy="explicit")) as fed:
            await fed.call("remember", records=[{"content": "one", "key": "k", "tier": "episodic"}])
            [id] = (await fed.call("remember", records=[{"content": "two", "key": "k", "tier": "semantic"}]))["ids"]
            await anyio.sleep(3600)
            assert fed.copies() == {id: ["semantic"]}

    calmly(scenario)


def test_what_an_abandoned_batch_left_makes_way_for_a_write_of_its_key(tmp_path: Path) -> None:
    batch = [{"content": "one", "key": "k"}, {"content": "other", "tier": "semantic"}]

    async def scenario() -> None:
        calm = settings_of(policy="explicit")
        folder = await crash(
            tmp_path,
            lambda steer: steer.hold("semantic", "remember", after=True),
            lambda fed: fed.call("remember", records=batch),
        )
        down = {"semantic"}
        async with trial(calm, folder=folder, down=down) as fed:
            await fed.call("remember", records=[{"content": "two", "key": "k"}])
            down.clear()
            await anyio.sleep(60)
            assert [record["content"] for record in await fed.timeline()] == ["two"]
            assert sorted(fed.copies().values()) == [["working"]]

    calmly(scenario)


def test_a_timeline_does_not_show_what_was_replaced_meanwhile() -> None:
    """A timeline does not show a record that a replacement has moved out of its condition."""

    async def scenario() -> None:
        steer = Steered()
        async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
            await fed.call("remember", records=[{"content": "one", "key": "k", "session": "t"}])
            read = steer.hold("working", "recall", after=True)
            look = Task(tasks, lambda: fed.timeline(where={"session": "t"}))
            await read.reached.wait()
            # the catalog has the replacement; the tier gets it after the timeline has ended
            await fed.call("remember", records=[{"content": "two", "key": "k", "session": "s"}])
            read.release()
            assert await look.ended() == []
            await fed.settled()

    calmly(scenario)


def test_a_timeline_does_not_show_what_has_left_its_callers_sight() -> None:
    async def scenario() -> None:
        steer = Steered()
        async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
            await fed.remember("mine", owner="a")
            shared = await fed.remember("another's, for all to see", owner="b", tier="procedural")
            read = steer.hold("procedural", "recall")
            look = Task(tasks, lambda: fed.timeline(owner="a", limit=1))
            await read.reached.wait()
            [there] = fed.federation.catalog.records.find(shared).values()
            fed.federation.catalog.flip([[there]], "working")
            read.release()
            # a timeline reads once, so that the lost record leaves it one short of its limit
            assert await look.ended() == []
            assert [record["content"] for record in await fed.timeline(owner="a", limit=1)] == ["mine"]

    calmly(scenario)


def test_a_tier_that_still_holds_a_removed_copy_is_asked_again() -> None:
    lies = [True, True]

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if tier == "working" and b'"memory/forget"' in message and lies:
            lies.pop()
            id = msgspec.json.decode(message)["id"]
            return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "result": {"forgotten": 1}})
        return await go_on()

    async def scenario() -> None:
        async with trial(settings_of(policy="explicit"), weather=weather) as fed:
            ids = await fed.remember("one")
            await fed.call("promote", ids=ids, tier="episodic")
            await anyio.sleep(3600)
            assert not lies
            assert fed.copies() == {ids[0]: ["episodic"]}

    calmly(scenario)


def test_a_read_does_not_take_an_altered_copy_for_the_record() -> None:
    async def scenario() -> None:
        steer = Steered()
        async with trial(settings_of(policy="explicit"), weather=steer) as fed, anyio.create_task_group() as tasks:
            ids = await fed.remember("one", tier="episodic")
            copied = steer.hold("working", "remember", after=True)
            tasks.start_soon(lambda: fed.call("promote", ids=ids, tier="working"))
            await copied.reached.wait()
            fed.stores["working"]._connection.execute("UPDATE record SET content = 'another'")
            met = steer.hold("working", "recall", after=True)
            look = Task(tasks, lambda: fed.call("recall"))
            await met.reached.wait()
            copied.release()
            await anyio.sleep(1)
            met.release()
            assert [record["content"] for record in (await look.ended())["records"]] == ["one"]
            await anyio.sleep(60)
            assert [(record["content"], record["tier"]) for record in await fed.timeline()] == [("one", "working")]

    calmly(scenario)


def test_what_a_tier_held_before_a_record_came_is_not_taken_for_it() -> None:
    removing, remove, met, read_on = (anyio.Event() for _ in range(4))
    waiting = {"memory/forget": (removing, remove), "memory/recall": (met, read_on)}

    async def weather(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        method = method_of(message)
        if tier != "working" or (method == "memory/recall" and not removing.is_set()):
            return await go_on()
        reached, release = waiting.pop(method, (anyio.Event(), None))
        # the copy exists until the forget is carried out, and the read gets it before its answer arrives
        answer = await go_on() if method == "memory/recall" else None
        reached.set()
        if release is not None:
            await release.wait()
        return answer if method == "memory/recall" else await go_on()

    async def scenario() -> None:
        async with trial(settings_of(policy="explicit"), weather=weather) as fed, anyio.create_task_group() as tasks:
            ids = await fed.remember("one", key="k")
            await fed.remember("two", key="k", tier="episodic")
            await removing.wait()
            look = Task(tasks, lambda: fed.call("recall"))
            await met.wait()
            remove.set()
            await anyio.sleep(1)
            assert fed.copies() == {ids[0]: ["episodic"]}
            await fed.call("promote", ids=ids, tier="working")
            read_on.set()
            assert [record["content"] for record in (await look.ended())["records"]] == ["two"]

    calmly(scenario)
