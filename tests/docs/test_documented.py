"""Limits that the pages document, and that a reader could take to be narrower or wider than they are."""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from a2m_router.protocol.wire.errors import A2MError, Code
from tests.servers.core_only import CoreOnly
from tests.support.federated import FOUR_TIERS, Foreign, Mix, Steered, method_of, settings_of, trial
from tests.support.pages import manual
from tests.support.paths import ROOT
from tests.support.router_process import PATIENCE, Said, running

NATIVE: Final[Mix] = {}
OTHERS: Final[Mix] = {"working": Foreign(kind=CoreOnly), "semantic": Foreign(kind=CoreOnly)}


@pytest.mark.anyio
@pytest.mark.parametrize(("servers", "read_back"), [(NATIVE, False), (OTHERS, True)])
async def test_a_write_is_read_back_from_lifted_servers_and_a_move_from_all(servers: Mix, read_back: bool) -> None:
    steered = Steered()
    async with trial(settings_of(FOUR_TIERS, policy="explicit"), servers=servers, weather=steered) as fed:

        def is_read_back(tier: str) -> bool:
            methods = [method_of(message) for to, message in steered.seen if to == tier]
            return "memory/recall" in methods[methods.index("memory/remember") :]

        steered.seen.clear()
        [id] = await fed.remember("note", tier="working")
        assert is_read_back("working") == read_back
        steered.seen.clear()
        await fed.call("promote", ids=[id], tier="semantic")
        assert is_read_back("semantic")


@pytest.mark.anyio
async def test_of_a_group_in_two_tiers_those_move_together_that_live_in_one() -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        first, second = await fed.remember("one", "two", tier="working", group="g")
        [other] = await fed.remember("three", tier="episodic", group="g")
        assert (await fed.call("promote", ids=[first], tier="semantic"))["promoted"] == 2
        assert {record["id"]: record["tier"] for record in await fed.timeline()} == {
            first: "semantic",
            second: "semantic",
            other: "episodic",
        }


@pytest.mark.anyio
async def test_an_id_of_another_owner_is_refused_and_nothing_else_is_told_of_it() -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        await fed.remember("hers", id="diary", owner="alice", session="private", key="k")
        with pytest.raises(A2MError) as refused:
            await fed.remember("his", id="diary", owner="bob")
        assert refused.value.code == Code.SCOPE_DENIED
        assert not any(secret in refused.value.message for secret in ("alice", "private", "hers"))
        # every other call answers as if the record did not exist
        assert await fed.timeline(owner="bob") == []
        assert (await fed.call("forget", ids=["diary"], owner="bob"))["forgotten"] == 0


@pytest.mark.slow
@pytest.mark.process
def test_a_backup_is_restored_as_the_manual_says(tmp_path: Path) -> None:
    """The killed router's logs must not be taken for those of the restored files."""
    shutil.copy(ROOT / "federation.toml", tmp_path)
    [commands] = [block for block in re.findall(r"```sh\n(.*?)```", manual(), re.DOTALL) if "memories.before" in block]
    config = tmp_path / "federation.toml"
    with running(config, "--http", "127.0.0.1:0") as router:
        url = Said(router).until(r"listens on (http://\S+)")[1]

        def a2m(*arguments: str) -> None:
            command = [str(Path(sys.executable).with_name("a2m")), "--http", url, *arguments]
            subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=PATIENCE)

        a2m("remember", "before", "--key", "k")
        a2m("backup", "backups/monday")
        a2m("remember", "after", "--key", "k")
        a2m("remember", "more")
        router.popen.kill()
        router.popen.wait()
    subprocess.run(["/bin/sh", "-ec", commands], cwd=tmp_path, check=True, timeout=PATIENCE)
    with running(config) as router:
        found = router.ask_until(lambda answer: "result" in answer and "degraded" not in answer["result"], "timeline")
        assert [record["content"] for record in found["result"]["records"]] == ["before"]
        router.end()
