"""Several federations on one lesser server: each finds all that is its own, whatever the others hold there.

Another federation's records are left out of every answer of the server; so how many are left tells nothing of whether
the answer was all. And whose the records are that a server holds must survive the loss of a catalog.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from router.methods import asking
from tests.federated import Mix, Trial, told_by, trial
from tests.servers.core_only import CoreOnly
from tests.test_put_back import CALM, Shared
from tests.test_short_answers import TellsFew, too_long

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


OURS: Final = [f"apple {n} orchard" for n in range(20)]

SERVERS: Final[dict[str, Callable[[Path], CoreOnly]]] = {
    "tells all": CoreOnly,
    "tells 5 at once": lambda path: CoreOnly(path, limits={"max_recall_limit": 5}),
    "tells 20 at once and does not say so": TellsFew,
    "searches by vectors": lambda path: CoreOnly(path, capabilities=("embeddings",)),
}

# where many are ours, a server that finds less than it is asked for is believed
MANY_AND_FEW: Final = [
    pytest.param(server, few, id=f"{name}, {'many' if few < len(OURS) else 'few'} of ours")
    for name, server in SERVERS.items()
    for few in ((1000,) if server is TellsFew else (1000, 4))
]


async def begin_empty(folder: Path, mix: Mix) -> None:
    """Both federations take the server into their accounts while it is empty: what tells few at once is taken so."""
    for name in ("ours", "theirs"):
        (folder / name).mkdir()
        async with trial(CALM, servers=mix, folder=folder / name):
            pass


async def write_ours(fed: Trial) -> list[str]:
    records = [
        {"content": content, "key": f"k/{n}", "session": f"s{n % 3}", "tier": "semantic", "embedding": [1.0, n]}
        for n, content in enumerate(OURS)
    ]
    ids: list[str] = (await fed.call("remember", records=records))["ids"]
    return ids


async def write_theirs(folder: Path, mix: Mix, *contents: str) -> None:
    """Another federation writes more, and what is a better match."""
    async with trial(CALM, servers=mix, folder=folder / "theirs") as fed:
        contents = contents or tuple(f"apple {n}" for n in range(100))
        await fed.remember(*contents, tier="semantic", embedding=[1.0, 0.0])


async def assert_all_is_found(fed: Trial, ids: list[str]) -> None:
    """By every way of reading, and nothing of the others'."""
    for question in (
        {"query": "apple"},
        {"query": "apple", "tier": "semantic"},
        {"query": "apple", "embedding": [1.0, 0.0]},
        {"embedding": [1.0, 0.0]},
        {},
        {"query": "apple", "where": {"session": ["s0", "s1", "s2"]}},
    ):
        answer = await fed.call("recall", limit=len(ids), **question)
        assert sorted(record["id"] for record in answer["records"]) == sorted(ids), question
        assert "degraded" not in answer, question
    assert len((await fed.call("recall", query="apple", limit=8))["records"]) == 8
    assert {record["id"] for record in await fed.timeline()} == set(ids)
    assert {record["content"] for record in await fed.timeline(where={"content": OURS[:9]})} == set(OURS[:9])
    found, after = [], None
    while after or not found:
        page = await fed.call("timeline", page=7, **({} if after is None else {"after": after}))
        found, after = found + page["records"], page["next"]
    assert [record["id"] for record in found] == ids
    for n in (0, len(ids) - 1):
        assert (await fed.call("fetch", key=f"k/{n}"))["record"]["id"] == ids[n]


@pytest.mark.parametrize(("server", "few"), MANY_AND_FEW)
@pytest.mark.parametrize("restarted", [False, True], ids=["while it runs", "since it ran"])
async def test_all_that_is_ours_is_found_among_what_fills_the_servers_answers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Callable[[Path], CoreOnly],
    few: int,
    *,
    restarted: bool,
) -> None:
    shared = Shared(server(tmp_path / "shared.db"))
    mix = shared.mix()
    monkeypatch.setattr(asking, "_FEW", few)
    monkeypatch.setattr(asking, "_MOST", 60)  # their 100 records are more than a server is asked for
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        ids = await write_ours(fed)
        await write_theirs(tmp_path, mix)
        if not restarted:
            await assert_all_is_found(fed, ids)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        await assert_all_is_found(fed, ids)
        assert await fed.call("forget", query="orchard") == {"forgotten": len(ids)}
        await fed.settled()
    assert len(told_by(shared.server)) == (20 if server is TellsFew else 100)


@pytest.mark.parametrize("few", [1000, 4], ids=["few of ours", "many of ours"])
async def test_all_that_is_ours_is_found_among_what_does_not_fit_into_a_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    mix = Shared(CoreOnly(tmp_path / "shared.db")).mix()
    monkeypatch.setattr(asking, "_FEW", few)
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        ids = await write_ours(fed)
        await write_theirs(tmp_path, mix, *(f"apple {'x' * 20_000} {n}" for n in range(60)))
        too_long(monkeypatch, lambda method, params: method == "memory/recall", most=30_000)
        found = await fed.call("recall", query="apple", limit=len(ids))
        assert sorted(record["id"] for record in found["records"]) == sorted(ids)


async def test_an_answer_that_may_lack_some_of_ours_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Shared(CoreOnly(tmp_path / "shared.db")).mix()
    monkeypatch.setattr(asking, "_FEW", 4)
    monkeypatch.setattr(asking, "_MOST", 12)  # ours are more than are asked for by their ids
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        await write_ours(fed)
        assert "degraded" not in await fed.call("recall", query="apple", limit=8)
        await write_theirs(tmp_path, mix)
        [degraded] = (await fed.call("recall", query="apple", limit=8))["degraded"]
        assert degraded["tier"] == "semantic"
        assert "another federation's records" in degraded["reason"]
        answer = await fed.call("recall", query="apple", limit=8, where={"session": "s0", "key": "k/3"})
        assert [record["content"] for record in answer["records"]] == [OURS[3]]
        assert "degraded" not in answer


# --- what is read by its id


async def test_what_another_federation_has_under_our_ids_does_not_hide_what_is_ours(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server tells 20 at once: of 50 ids, those that others have taken first."""
    shared = Shared(TellsFew(tmp_path / "shared.db"))
    await begin_empty(tmp_path, shared.mix())
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        ids = await fed.remember(*(f"n{n}" for n in range(50)), tier="semantic")
    shared.server.call("memory/forget", {"ids": ids[10:35]})
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "theirs") as fed:
        records = [{"id": id, "content": "foreign", "tier": "semantic"} for id in ids[10:35]]
        await fed.call("remember", records=records)
    left = {*ids[:10], *ids[35:]}
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        assert "25 records that should live there are gone" in caplog.text
        assert {record["id"] for record in await fed.timeline()} == left
        assert (await fed.call("recall", query="foreign"))["records"] == []
    assert [record.content for record in told_by(shared.server)].count("foreign") == 20


async def test_a_server_that_answers_others_records_for_the_ids_of_ours_has_lost_none(tmp_path: Path) -> None:
    class IgnoresWhere(CoreOnly):
        ignores = False

        def recall(self, params: dict[str, Any]) -> dict[str, Any]:
            if self.ignores:
                params = {name: value for name, value in params.items() if name != "where"}
            return super().recall(params)

    shared = Shared(IgnoresWhere(tmp_path / "shared.db"))
    await begin_empty(tmp_path, shared.mix())
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        ids = await fed.remember("a", "b", tier="semantic")
    await write_theirs(tmp_path, shared.mix())
    shared.server.ignores = True
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        [degraded] = (await fed.call("timeline"))["degraded"]
        assert "answered a read by id with other records" in degraded["reason"]
        assert fed.federation.catalog.records_in("semantic") == len(ids)
