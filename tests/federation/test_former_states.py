"""A record that its tier holds in a former state, or has lost: what clients can do with it, and what they are told.

The tests put back a store's file that is older than the catalog. The catalog's state of such a record is the true one.
No read shows the tier's state, so no call selects the record by it.
"""

import re
from pathlib import Path
from typing import Any, Final

import anyio
import pytest
from msgspec import Raw

from a2m_router.catalog.entries import entry_of
from a2m_router.protocol.wire.errors import NOT_AS_WRITTEN, A2MError, Code
from tests.servers.core_only import CoreOnly
from tests.support.federated import (
    CALM,
    Foreign,
    Mix,
    Steered,
    Task,
    Trial,
    contents,
    held_by,
    lose,
    plant,
    settings_of,
    stored,
    told_by,
    trial,
)
from tests.support.restored_files import copied, put_back
from tests.support.shared_servers import Shared
from tests.support.two_worlds import ask

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


mixes = pytest.mark.parametrize("mix", [{}, {"semantic": Foreign()}], ids=["native", "lesser"])

KEPT: Final = {"id": "kept", "content": "kept words", "tier": "semantic"}
PAGE: Final = {"id": "page", "key": "page", "tier": "semantic"}
BORN: Final = {"id": "born", "tier": "semantic"}  # written again under its id
PAIR: Final = {"group": "pair", "tier": "semantic"}

# Selectors by content or metadata, some combined with fields that the catalog has.
SELECTORS: Final[list[dict[str, Any]]] = [
    {"query": "words"},
    {"query": "former"},
    {"query": "former", "ids": ["page", "born"]},
    {"query": "former", "key_prefix": "page"},
    {"query": "words", "tier": "semantic"},
    {"where": {"content": ["former words", "kept words"]}},
    {"where": {"content": "former words"}},
    {"where": {"content": "former words", "key": "page"}},
    {"where": {"content": "former words", "id": "born"}},
    {"where": {"state": None}},
    {"where": {"state": "now"}},
]


async def set_back(folder: Path, mix: Mix) -> None:
    """Set the semantic tier's store back.

    The store then holds an earlier revision of a page and of a member of a group, and a record that was forgotten and
    written anew since, beside unchanged ones.
    """
    async with trial(CALM, servers=mix, folder=folder) as fed:
        former: dict[str, Any] = {"content": "former words"}
        pair = [{"id": "mate", "content": "mate", **PAIR}, {"id": "pp", "key": "pp", "content": "former pp", **PAIR}]
        await fed.call("remember", records=[KEPT, {**PAGE, **former}, {**BORN, **former}, *pair])
        copy = copied(folder, "semantic")
        now: dict[str, Any] = {"content": "words of now", "metadata": {"state": "now"}}
        await fed.call("forget", ids=["born"])
        await fed.settled()
        await fed.call("remember", records=[{**PAGE, **now}, {**pair[1], "content": "pp of now"}])
        await fed.call("remember", records=[{**BORN, **now, "created_at": "2031-01-01T00:00:00Z"}])
        await fed.caught_up()
        await fed.settled()
    put_back(folder, copy, "semantic")


def copies_in(fed: Trial, tier: str) -> dict[str, str]:
    server = fed.servers.get(tier)
    if isinstance(server, CoreOnly):
        return {record.id: record.content for record in told_by(server)}
    return {record["id"]: record["content"] for record in held_by(fed.stores[tier])}


def assert_no_use_to_repeat(refused: A2MError) -> None:
    assert refused.code == Code.INTERNAL_ERROR
    assert refused.data is not None
    assert refused.data["reason"] == NOT_AS_WRITTEN
    assert "retry_after" not in refused.data
    assert "does not answer" not in str(refused)


async def refusal(fed: Trial, method: str, **params: Any) -> A2MError:
    with pytest.raises(A2MError) as refused:
        await fed.call(method, **params)
    return refused.value


# --- forgetting


@mixes
@pytest.mark.parametrize("selector", SELECTORS, ids=str)
async def test_a_forget_means_what_a_read_by_the_same_shows(tmp_path: Path, mix: Mix, selector: dict[str, Any]) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        before = copies_in(fed, "semantic")
        asked = {name: value for name, value in selector.items() if name != "ids"}
        found = await fed.call("recall" if "query" in selector else "timeline", **asked)
        shown = {r["id"] for r in found["records"]} & set(selector.get("ids", before))
        assert {down["tier"] for down in found.get("degraded", ())} <= {"semantic"}
        assert await fed.call("forget", **selector) == {"forgotten": len(shown)}
        await fed.settled()
        assert copies_in(fed, "semantic").keys() == before.keys() - shown
        # A forget by id or key still forgets them.
        for by in ({"ids": ["born"]}, {"key_prefix": "page"}):
            assert await fed.call("forget", **by) == {"forgotten": 1}
        await fed.settled()
        assert copies_in(fed, "semantic").keys() == before.keys() - shown - {"born", "page"}


async def test_what_a_scan_replaces_while_a_forget_looks_is_looked_at_again() -> None:
    """The condition matches the state that the tier returned and the newer one that the catalog adopted meanwhile."""
    steer = Steered()
    async with trial(CALM, weather=steer) as fed, anyio.create_task_group() as tasks:
        metadata = {"m": 1}
        [id] = await fed.remember("old", key="k", tier="working", metadata=metadata)
        answered = steer.hold("working", "timeline", after=True)
        forget = Task(tasks, lambda: fed.call("forget", where=metadata))
        await answered.reached.wait()
        plant(fed, "semantic", id=id, content="newer", key="k", revision=1, metadata=Raw(b'{"m": 1}'))
        [newer] = [record for tier, record in stored(fed)[id] if tier == "semantic"]
        fed.federation.catalog.adopt([entry_of(newer, "semantic")])
        answered.release()
        assert await forget.ended() == {"forgotten": 1}
        assert await fed.timeline() == []


# --- other calls


@mixes
async def test_it_is_reinforced_by_its_id_and_has_earned_that_when_it_is_back(tmp_path: Path, mix: Mix) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        assert await fed.call("reinforce", ids=["page", "born"], amount=2.0) == {"reinforced": 2}
        now = {"content": "words of now", "metadata": {"state": "now"}}
        await fed.call("remember", records=[{**PAGE, **now}])
        await fed.call("remember", records=[{**BORN, **now, "created_at": "2031-01-01T00:00:00Z"}])
        await fed.caught_up()
        found = await fed.timeline(where={"state": "now"})
        assert {record["id"]: record["salience"] for record in found} == {"page": 3.0, "born": 3.0}


@mixes
async def test_it_moves_nowhere_nor_does_its_group_and_what_else_was_named_does(tmp_path: Path, mix: Mix) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        before = copies_in(fed, "semantic")
        for ids in (["page"], ["born"], ["mate"], ["page", "mate"]):
            refused = await refusal(fed, "promote", ids=ids, tier="procedural")
            assert_no_use_to_repeat(refused)
            assert "in another state than the catalog" in str(refused)
            assert "write it again as it was, forget it by its id, or restore the newer file" in str(refused)
        await fed.settled()
        assert copies_in(fed, "semantic") == before
        assert await fed.call("promote", ids=["page", "kept", "mate"], tier="procedural") == {"promoted": 1}
        assert contents(await fed.timeline()) == {"kept words": "procedural", "mate": "semantic"}
        # A replacement that names another tier and keeps the group fails, too.
        new = {"content": "new", "key": "pp", "group": "pair", "tier": "procedural"}
        refused = await refusal(fed, "remember", records=[new])
        assert_no_use_to_repeat(refused)
        assert "nothing was written" in str(refused)


@mixes
async def test_a_condition_is_about_the_revision_that_the_catalog_says(tmp_path: Path, mix: Mix) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        new = {"key": "page", "content": "new"}
        refused = await refusal(fed, "remember", records=[{**new, "if_revision": 0}])
        assert (refused.code, refused.data) == (Code.INVALID_PARAMS, {"reason": "revision", "revision": 1})
        refused = await refusal(fed, "remember", records=[{**new, "if_revision": None}])
        assert (refused.code, refused.data) == (Code.INVALID_PARAMS, {"reason": "revision", "revision": 1})
        # The repeated call that wrote this revision restores the record.
        written = {**PAGE, "content": "words of now", "metadata": {"state": "now"}, "if_revision": 0}
        await fed.call("remember", records=[written])
        await fed.caught_up()
        record = (await fed.call("fetch", key="page"))["record"]
        assert (record["content"], record["revision"]) == ("words of now", 1)
        await fed.call("remember", records=[{**new, "if_revision": 1}])
        await fed.caught_up()
        record = (await fed.call("fetch", key="page"))["record"]
        assert (record["content"], record["revision"]) == ("new", 2)


@mixes
async def test_it_is_written_anew_as_it_was_and_not_otherwise(tmp_path: Path, mix: Mix) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        before = copies_in(fed, "semantic")
        refused = await refusal(fed, "remember", records=[{**BORN, "content": "other words"}])
        assert_no_use_to_repeat(refused)
        assert "it holds 'born' in another state" in str(refused)
        assert "nothing was written" in str(refused)
        assert copies_in(fed, "semantic") == before
        await fed.call("remember", records=[{**BORN, "content": "words of now", "metadata": {"state": "now"}}])
        [record] = await fed.timeline(where={"id": "born"})
        assert (record["content"], record["created_at"]) == ("words of now", "2031-01-01T00:00:00.000Z")


FULL: Final = settings_of(
    """
[policy]
pass = "explicit"

[tiers.working]
kind = "working"
command = ["-"]
capacity = 1
spill_to = "semantic"

[tiers.semantic]
kind = "semantic"
command = ["-"]
"""
)


@pytest.mark.parametrize("mix", [{}, {"working": Foreign()}], ids=["native", "lesser"])
async def test_the_policy_passes_it_over_and_the_rest_of_its_conversation_leaves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mix: Mix
) -> None:
    async with trial(FULL, servers=mix, folder=tmp_path) as fed:
        await fed.call("remember", records=[{"id": "p", "content": "first", "key": "k"}], session="s")
        copy = copied(tmp_path, "working")
        await fed.call("remember", records=[{"id": "p", "content": "second", "key": "k"}], session="s")
        await fed.caught_up()
    put_back(tmp_path, copy, "working")
    async with trial(FULL, servers=mix, folder=tmp_path) as fed:
        refused = await refusal(fed, "session/close", session="s")
        assert_no_use_to_repeat(refused)
        assert "it holds 'p' in another state" in str(refused)
        await fed.call("remember", records=[{"id": f"n{n}", "content": f"n{n}"} for n in range(3)], session="s")
        assert (await fed.call("consolidate"))["moved"] == 3
        for _ in range(2):
            await fed.call("consolidate")
        assert (await fed.call("session/list"))["sessions"][0]["tiers"] == {"working": 1, "semantic": 3}
        await fed.call("remember", records=[{"id": "n3", "content": "n3"}], session="s")
        assert (await fed.call("session/close", session="s"))["flushed"] == 1
        assert caplog.text.count("it holds 'p' in another state") == 1


# --- error messages


@mixes
async def test_what_cannot_do_without_it_says_so_and_what_to_do(tmp_path: Path, mix: Mix) -> None:
    await set_back(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path) as fed:
        for method, params, which in (
            ("fetch", {"key": "page"}, r"'page'"),
            ("timeline", {"page": 10}, r"'\w+' and 2 more"),
            ("summarize", {"query": "former"}, r"'\w+' and 2 more"),
        ):
            refused = await refusal(fed, method, **params)
            assert_no_use_to_repeat(refused)
            assert re.match(f"the tier 'semantic' has answered, but it holds {which} in another", str(refused))
            assert "or restore the newer file" in str(refused)
        [degraded] = (await fed.call("timeline"))["degraded"]
        assert "forget them by their ids, or restore the newer file" in degraded["reason"]
        # A principal gets the same advice for the records that it sees.
        [degraded] = (await ask(fed, "b", "timeline")).result["degraded"]
        assert "forget them by their ids, or restore the newer file" in degraded["reason"]
        assert "it holds 'page' in another state" in (await ask(fed, "b", "fetch", key="page")).error["message"]


async def test_who_asks_for_what_a_tier_has_lost_is_not_told_to_repeat_the_call() -> None:
    async with trial(CALM) as fed:
        await fed.call("remember", records=[{**KEPT, "key": "k"}])
        lose(fed, "semantic", "kept")
        for method, params in (
            ("fetch", {"key": "k"}),
            ("timeline", {"page": 10}),
            ("remember", {"records": [{"id": "kept", "content": "other words"}]}),
            ("promote", {"ids": ["kept"], "tier": "procedural"}),
        ):
            assert_no_use_to_repeat(await refusal(fed, method, **params))
        await fed.call("remember", records=[KEPT | {"key": "k"}])
        assert contents(await fed.timeline()) == {"kept words": "semantic"}


# --- an id that another federation has


async def test_an_id_of_another_federation_is_refused_in_words_that_blame_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = Shared(CoreOnly(tmp_path / "shared.db"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "one") as fed:
        await fed.call("remember", records=[{"id": "same", "content": "one", "tier": "semantic"}])
        theirs = fed.federation.catalog.lineage.federation
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "two") as fed:
        refused = await refusal(fed, "remember", records=[{"id": "same", "content": "two", "tier": "semantic"}])
        assert refused.code == Code.INVALID_PARAMS
        assert f"belongs to another federation ({theirs};" in str(refused)
        # A replacement or a promotion cannot bring a record with that id into the tier, either.
        await fed.call("remember", records=[{"id": "same", "content": "two", "key": "k"}])
        refused = await refusal(fed, "remember", records=[{"key": "k", "content": "anew", "tier": "semantic"}])
        assert refused.code == Code.INVALID_PARAMS
        refused = await refusal(fed, "promote", ids=["same"], tier="semantic")
        assert f"belongs to another federation ({theirs};" in str(refused)
        assert contents(await fed.timeline()) == {"two": "working"}
        await fed.settled()
    assert "protocol violation" not in caplog.text
    assert [record.content for record in told_by(shared.server)] == ["one"]
