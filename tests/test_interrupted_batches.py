"""A batch that a crash cut off while its tiers were being told: it may have been acknowledged, since a power cut takes
away what was noted last. Until all of its tiers are looked into nobody can tell, and one of them may stay down.

What must be true meanwhile: it is neither denied nor touched, nor is anything done that it would make wrong; nobody
else is held up by it. And when all of its tiers are back it is true, wholly.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

from router.a2m.errors import A2MError
from tests.disk import Disk, laid
from tests.federated import FOUR_TIERS, Hold, Steered, Task, Trial, settings_of, trial
from tests.test_rules_restart import CALM, crash, joined
from tests.test_summaries import Thinker, thinking

pytestmark = pytest.mark.parametrize("anyio_backend", ["asyncio"])

Records = list[dict[str, Any]]

THERE: Records = [{"id": "s", "content": "s", "tier": "semantic"}]


async def acknowledged(folder: Path, *records: dict[str, Any]) -> Path:
    """What a power cut leaves of a batch right after its acknowledgement: files in which it is reserved."""
    (folder / "before").mkdir()
    with (disk := Disk(folder / "before")).mounted():
        async with trial(CALM, folder=folder / "before") as fed:
            await fed.call("remember", records=list(records))
            files = disk.photograph().cut()
    return laid(files, folder / "after")


async def written(folder: Path, batch: Records, before: Records) -> Path:
    """What a crash leaves of a batch when all of its tiers have been told, and nobody has heard of it."""

    def all_told(steer: Steered) -> Hold:
        return steer.hold("semantic", "remember", after=True)

    return await crash(
        folder,
        all_told,
        lambda fed: fed.call("remember", records=batch),
        lambda fed: fed.call("remember", records=before),
    )


@asynccontextmanager
async def without_semantic(
    folder: Path, text: str = FOUR_TIERS, **options: Any
) -> AsyncIterator[tuple[Trial, set[str]]]:
    """The next router, and the tiers that are down: `semantic`. The others are accounted for as far as they can be."""
    down = {"semantic"}
    async with trial(settings_of(text, policy="explicit"), folder=folder, down=down, **options) as fed:
        await joined(fed, "working")
        await joined(fed, "episodic")
        yield fed, down


async def back(fed: Trial, down: set[str], tier: str = "semantic") -> None:
    down.clear()
    await joined(fed, tier)
    await fed.settled()


# --- it is not touched


async def test_what_was_acknowledged_outlives_an_attempt_to_write_its_key_again(
    tmp_path: Path, anyio_backend: str
) -> None:
    folder = await acknowledged(tmp_path, {"id": "w", "content": "w", "key": "k"}, *THERE)
    async with without_semantic(folder) as (fed, down):
        for record in [{"id": "n", "content": "n", "key": "k"}, {"content": "n", "key": "k", "tier": "episodic"}]:
            with pytest.raises(A2MError, match="an interrupted write of the key 'k' has not been looked into yet"):
                await fed.call("remember", records=[record, {"content": "beside"}])
        # of another owner, or another key
        await fed.call("remember", records=[{"id": "a", "content": "a", "key": "k", "owner": "a"}])
        await fed.call("remember", records=[{"id": "l", "content": "l", "key": "l"}])
        await back(fed, down)
        assert fed.copies() == {"s": ["semantic"]} | {id: ["working"] for id in ("w", "a", "l")}
        assert await fed.remember("n", key="k") == ["w"]


async def test_what_was_acknowledged_at_a_tier_that_is_down_outlives_it_too(tmp_path: Path, anyio_backend: str) -> None:
    folder = await acknowledged(tmp_path, {"id": "w", "content": "w", "key": "k"}, {"id": "v", "content": "v"})
    down = {"working"}
    async with trial(CALM, folder=folder, down=down) as fed:
        await joined(fed, "episodic")
        with pytest.raises(A2MError, match="an interrupted write of the key 'k'"):
            await fed.call("remember", records=[{"id": "n", "content": "n", "key": "k", "tier": "episodic"}])
        await back(fed, down, "working")
        assert fed.copies() == {"w": ["working"], "v": ["working"]}


async def test_a_batch_of_which_a_record_has_not_arrived_holds_up_nobody(tmp_path: Path, anyio_backend: str) -> None:
    batch = [{"id": "w", "content": "w"}, *THERE]

    def only_semantic(steer: Steered) -> Hold:
        steer.hold("working", "remember")
        return steer.hold("semantic", "remember", after=True)

    folder = await crash(tmp_path, only_semantic, lambda fed: fed.call("remember", records=batch))
    async with without_semantic(folder) as (fed, down):
        assert await fed.call("timeline", tier="working") == {"records": []}
        assert await fed.call("forget", where={"session": "s"}, tier="working") == {"forgotten": 0}
        await fed.call("remember", records=[{"id": "w", "content": "w"}])
        await back(fed, down)
        assert fed.copies() == {"w": ["working"]}


async def test_what_is_done_to_it_counts_beside_a_repetition_of_its_write(tmp_path: Path, anyio_backend: str) -> None:
    steer = Steered()
    known = {"id": "e", "content": "e", "tier": "episodic"}
    batch = [{"id": "w", "content": "w"}, *THERE]
    folder = await written(tmp_path, batch, [known])
    async with without_semantic(folder, weather=steer) as (fed, down), anyio.create_task_group() as tasks:
        look = steer.hold("episodic", "recall")
        again = Task(tasks, lambda: fed.call("remember", records=[known, *batch]))
        await look.reached.wait()  # it has claimed all of them
        assert await fed.call("forget", ids=["w"]) == {"forgotten": 1}
        assert await fed.call("reinforce", ids=["s"], amount=1.0) == {"reinforced": 1}
        look.release()
        with pytest.raises(A2MError):
            await again.ended()
        await back(fed, down)
        assert {record["id"]: record["salience"] for record in await fed.timeline()} == {"e": 1.0, "s": 2.0}


async def test_the_policy_looks_at_what_became_true_by_a_forget(tmp_path: Path, anyio_backend: str) -> None:
    folder = await written(tmp_path, [*({"content": f"{n}"} for n in range(9)), *THERE], [])
    settings = settings_of(policy="background")
    async with trial(settings, folder=folder, down={"semantic"}) as fed:
        await joined(fed, "working")
        await joined(fed, "episodic")
        assert await fed.call("forget", ids=["s"]) == {"forgotten": 1}
        with anyio.fail_after(60):
            # nobody tells when it has: it has not been asked to
            while len(await fed.timeline(tier="working")) != settings.tier("working").capacity:  # noqa: ASYNC110
                await anyio.sleep(0.01)


# --- its group stays together


@pytest.mark.parametrize("what_leaves", ["is rewritten", "is dropped", "is moved"])
async def test_no_group_leaves_of_which_a_member_may_be_missing(
    tmp_path: Path, anyio_backend: str, what_leaves: str
) -> None:
    spill = 'spill_to = "episodic"'
    ways = {"is rewritten": f"{spill}\ndistil = true", "is dropped": 'overflow = "drop"', "is moved": spill}
    text = FOUR_TIERS.replace(spill, ways[what_leaves])
    group = [{"id": id, "content": id, "group": "g"} for id in ("x", "y")]
    folder = await written(tmp_path, [{"id": "a", "content": "a", "group": "g"}, *THERE], group)
    down = {"semantic"}
    thinker = Thinker(model="small")
    async with thinking(thinker, settings_of(text, policy="explicit"), folder=folder, down=down) as fed:
        await joined(fed, "working")
        await fed.call("remember", records=[{"id": f"r{n}", "content": f"r{n}"} for n in range(4)])
        await fed.call("consolidate")
        assert fed.copies().keys() >= {"x", "y"}
        await back(fed, down)
        there = {record["id"]: record["tier"] for record in await fed.timeline()}
        assert {there[id] for id in ("a", "x", "y")} == {"working"}
        # and when it is known, the group leaves as ever
        await fed.call("remember", records=[{"id": f"q{n}", "content": f"q{n}"} for n in range(4)])
        await fed.call("consolidate")
        await fed.settled()
        assert not {"a", "x", "y"} & {record["id"] for record in await fed.timeline(tier="working")}


async def test_why_a_group_stays_is_said_once_and_so_is_that_it_may_go(
    tmp_path: Path, anyio_backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    group = [{"id": id, "content": id, "group": "g"} for id in ("x", "y")]
    folder = await written(tmp_path, [{"id": "a", "content": "a", "group": "g"}, *THERE], group)
    caplog.set_level(logging.INFO, "router.moves")
    async with without_semantic(folder) as (fed, down):
        for turn in range(3):
            await fed.call("remember", records=[{"content": f"{turn}.{n}"} for n in range(5)])
            await fed.call("consolidate")
        sentence = "working -> episodic: not moved: 'x': an earlier change of the same records has not been settled yet"
        told = [message for message in caplog.messages if message.startswith("working -> episodic")]
        assert told == [sentence]
        await back(fed, down)
        for turn in range(2):
            await fed.call("remember", records=[{"content": f"again {turn}.{n}"} for n in range(5)])
            await fed.call("consolidate")
        told = [message for message in caplog.messages if message.startswith("working -> episodic")]
        assert told == [sentence, "working -> episodic: nothing is in the way any more"]


# --- it is not denied


async def test_a_promotion_of_what_may_be_a_record_is_refused(tmp_path: Path, anyio_backend: str) -> None:
    folder = await written(tmp_path, [{"id": "w", "content": "w", "owner": "a"}, *THERE], [])
    async with without_semantic(folder) as (fed, down):
        with pytest.raises(A2MError, match="waits for another tier"):
            await fed.call("promote", ids=["w"], tier="episodic")
        assert await fed.call("promote", ids=["w"], tier="episodic", owner="b") == {"promoted": 0}
        await back(fed, down)
        assert await fed.call("promote", ids=["w"], tier="episodic") == {"promoted": 1}


async def test_an_answer_says_of_which_tiers_nobody_could_tell_when_it_began(
    tmp_path: Path, anyio_backend: str
) -> None:
    steer = Steered()
    folder = await written(tmp_path, [{"id": "w", "content": "w"}, *THERE], [{"content": "e", "tier": "episodic"}])
    async with without_semantic(folder, weather=steer) as (fed, down), anyio.create_task_group() as tasks:
        for method in ("timeline", "recall"):
            read = steer.hold("episodic", "recall")
            look = Task(tasks, partial(fed.call, method))
            await read.reached.wait()
            if method == "recall":
                await back(fed, down)
            read.release()
            found = await look.ended()
            assert {each["tier"] for each in found["degraded"]} == {"working", "semantic"}


async def test_what_another_owner_was_writing_is_no_reason_to_refuse(tmp_path: Path, anyio_backend: str) -> None:
    records = [{"id": id, "content": id, "owner": "b", "key": f"k/{id}"} for id in ("w", "s")]
    folder = await written(tmp_path, [records[0], {**records[1], "tier": "semantic"}], [{"id": "m", "content": "m"}])
    async with without_semantic(folder) as (fed, down):
        for owner in ("a", "b"):
            for method in ("timeline", "recall"):
                found = await fed.call(method, owner=owner)
                assert ("working" in {each["tier"] for each in found.get("degraded", ())}) == (owner == "b")
        assert await fed.call("fetch", key="k/w", owner="a") == {"record": None}
        assert await fed.call("fetch", key="other", owner="b") == {"record": None}
        assert (await fed.call("timeline", page=10, tier="working", owner="a"))["records"]
        assert await fed.call("forget", where={"session": "s"}, tier="working", owner="a") == {"forgotten": 0}
        for refused in [
            fed.call("fetch", key="k/w", owner="b"),
            fed.call("timeline", page=10, tier="working", owner="b"),
            fed.call("forget", where={"session": "s"}, tier="working", owner="b"),
            fed.call("forget", where={"session": "s"}, tier="working"),
        ]:
            with pytest.raises(A2MError, match="what the tier 'working' holds is not known yet"):
                await refused
        await back(fed, down)
        assert (await fed.call("fetch", key="k/w", owner="b"))["record"]["id"] == "w"
