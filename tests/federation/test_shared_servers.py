"""Several federations on one lifted server: each finds all of its records, whatever the others hold there.

The router removes other federations' records from every answer, so the number of records left does not show whether the
answer was complete. The owner federation of a record must survive the loss of a catalog.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from anyio import wait_all_tasks_blocked

from a2m_router.catalog.rebuild.salvage import Salvage
from a2m_router.reading import candidates, lifted
from a2m_router.tiers.profile import CannotServe
from tests.servers.core_only import CoreOnly
from tests.support.commands import ran
from tests.support.disk import Files
from tests.support.federated import CALM, FOUR_TIERS, Foreign, Mix, Trial, contents, settings_of, told_by, trial
from tests.support.paths import ROOT
from tests.support.restored_files import CATALOG, TIERS, copied, files_of, heal, leaves, put_back, refusal
from tests.support.shared_servers import Shared
from tests.support.short_answers import TellsFew, too_long

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

# TellsFew has no case with many records of ours: there the router accepts a short answer as complete
MANY_AND_FEW: Final = [
    pytest.param(server, few, id=f"{name}, {'many' if few < len(OURS) else 'few'} of ours")
    for name, server in SERVERS.items()
    for few in ((1000,) if server is TellsFew else (1000, 4))
]


async def begin_empty(folder: Path, mix: Mix) -> None:
    """Start both federations while the server is empty, so that a server that returns few records is accepted."""
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
    """Write records of the other federation: more than ours, and better matches."""
    async with trial(CALM, servers=mix, folder=folder / "theirs") as fed:
        contents = contents or tuple(f"apple {n}" for n in range(100))
        await fed.remember(*contents, tier="semantic", embedding=[1.0, 0.0])


async def assert_all_is_found(fed: Trial, ids: list[str]) -> None:
    """Assert that every way of reading finds exactly the records `ids`."""
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
    found: list[dict[str, Any]] = []
    after = None
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
    monkeypatch.setattr(lifted, "FEW", few)
    monkeypatch.setattr(candidates, "MOST", 60)
    monkeypatch.setattr(lifted, "MOST", 60)  # the other federation's 100 records exceed what a server is asked for
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
    monkeypatch.setattr(lifted, "FEW", few)
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        ids = await write_ours(fed)
        await write_theirs(tmp_path, mix, *(f"apple {'x' * 20_000} {n}" for n in range(60)))
        too_long(monkeypatch, lambda method, params: method == "memory/recall", most=30_000)
        found = await fed.call("recall", query="apple", limit=len(ids))
        assert sorted(record["id"] for record in found["records"]) == sorted(ids)


async def test_an_answer_that_may_lack_some_of_ours_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix = Shared(CoreOnly(tmp_path / "shared.db")).mix()
    monkeypatch.setattr(lifted, "FEW", 4)
    monkeypatch.setattr(candidates, "MOST", 12)
    monkeypatch.setattr(lifted, "MOST", 12)  # we have more records than the router reads by their ids
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


async def test_all_that_is_ours_is_found_in_a_store_shared_over_http(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store returns its records in pages, some of them with records of the other federation only."""
    remote = 'kind = "semantic"\nurl = "http://127.0.0.1:9/"\n'
    settings = settings_of(FOUR_TIERS.replace('kind = "semantic"\ncommand = ["-"]\n', remote), policy="explicit")
    ids: list[str] = []
    store: Files = {}
    for name, count in (("ours", 20), ("theirs", 600), ("ours", 0)):
        (folder := tmp_path / name).mkdir(exist_ok=True)
        put_back(folder, store, "semantic")
        async with trial(settings, folder=folder) as fed:
            if name == "theirs":
                await fed.remember(*(f"apple {n}" for n in range(count)), tier="semantic", embedding=[1.0, 0.0])
            elif count:
                ids = await write_ours(fed)
                fed.federation.catalog.tiers.set_scanned("semantic", False)
            else:
                assert "at least 600 there belong to" in caplog.text
                await assert_all_is_found(fed, ids)
        store = copied(folder, "semantic")


async def test_a_scan_that_others_records_fill_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    mix = Shared(TellsFew(tmp_path / "shared.db", limits={"max_recall_limit": 20})).mix()
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        ids = await fed.remember("a", "b", tier="semantic")
        fed.federation.catalog.tiers.set_scanned("semantic", False)
    await write_theirs(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        assert "it answers at most 20 records at once" in fed.federation.problems["semantic"]
        assert {record["id"] for record in await fed.timeline()} == set(ids)


# --- reads by id


async def test_anothers_records_of_our_ids_do_not_hide_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server returns 20 records a call, those of the other federation first when asked for 50 ids."""
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
        assert "25 records lost that should live there" in caplog.text
        assert {record["id"] for record in await fed.timeline()} == left
        assert (await fed.call("recall", query="foreign"))["records"] == []
    assert [record.content for record in told_by(shared.server)].count("foreign") == 20


async def test_a_server_that_answers_others_records_for_our_ids_has_lost_none(tmp_path: Path) -> None:
    class IgnoresWhere(CoreOnly):
        ignores = False

        def recall(self, params: Mapping[str, Any]) -> dict[str, Any]:
            if self.ignores:
                params = {name: value for name, value in params.items() if name != "where"}
            return super().recall(params)

    server = IgnoresWhere(tmp_path / "shared.db")
    shared = Shared(server)
    await begin_empty(tmp_path, shared.mix())
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        ids = await fed.remember("a", "b", tier="semantic")
    await write_theirs(tmp_path, shared.mix())
    server.ignores = True
    async with trial(CALM, servers=shared.mix(), folder=tmp_path / "ours") as fed:
        [degraded] = (await fed.call("timeline"))["degraded"]
        assert "answered a read by id with other records" in degraded["reason"]
        assert fed.federation.catalog.records.count("semantic") == len(ids)


# --- the federation of a record


ALL_LESSER: Final = dict.fromkeys(TIERS, Foreign())


def lose_catalog(folder: Path) -> None:
    for path in files_of(folder, CATALOG):
        path.unlink()


async def refused_rebuild(folder: Path, mix: Mix, **how: Any) -> str:
    with pytest.raises(BaseExceptionGroup) as refused:
        await heal(folder, mix, **how)
    [problem] = leaves(refused.value)
    assert isinstance(problem, CannotServe)
    return str(problem)


def same_server_behind_all(server: CoreOnly) -> Mix:
    """Return a mix of lifted servers: each tier has its own, and semantic a shared one."""
    return {**ALL_LESSER, **Shared(server).mix()}


async def test_lifted_servers_without_their_catalog_do_not_start_empty(
    tmp_path: Path,
) -> None:
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path) as fed:
        await fed.remember("a", "b", "c", tier="semantic")
        lost = fed.federation.catalog.lineage.federation
    lose_catalog(tmp_path)
    for _ in range(2):
        sentence = await refusal(tmp_path, ALL_LESSER)
        assert re.search(rf"another federation \({lost}, this one is \w+\).*--adopt.*--rebuild", sentence)
    await heal(tmp_path, ALL_LESSER)
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == dict.fromkeys("abc", "semantic")
        assert fed.federation.catalog.lineage.federation == lost


async def test_what_such_a_federation_lost_is_also_taken_by_adoption(tmp_path: Path) -> None:
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path) as fed:
        await fed.remember("a", tier="semantic")
    lose_catalog(tmp_path)
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path, adopt=True) as fed:
        assert contents(await fed.timeline()) == {"a": "semantic"}
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path) as fed:
        assert contents(await fed.timeline()) == {"a": "semantic"}


async def test_a_tier_that_comes_up_late_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path) as fed:
        await fed.remember("a", tier="semantic")
    lose_catalog(tmp_path)
    down = {"semantic"}
    async with trial(CALM, servers=ALL_LESSER, folder=tmp_path, down=down) as fed:
        await fed.remember("new", tier="working")
        down.clear()
        await fed.federation.links["semantic"].wait_up()
        await wait_all_tasks_blocked()
        assert "--rebuild" in fed.federation.problems["semantic"]
        assert [degraded["tier"] for degraded in (await fed.call("timeline"))["degraded"]] == ["semantic"]


async def test_a_new_federation_begins_on_a_shared_server_when_told_to(tmp_path: Path) -> None:
    mix = same_server_behind_all(CoreOnly(tmp_path / "shared.db"))
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    async with trial(CALM, servers=mix, folder=tmp_path / "one") as fed:
        await fed.remember("one's", tier="semantic")
    [federation] = re.findall(r"--rebuild --federation (\w+) begins it", await refusal(tmp_path / "two", mix))
    await heal(tmp_path / "two", mix, federation=federation)
    for _ in range(2):
        async with trial(CALM, servers=mix, folder=tmp_path / "two") as fed:
            assert fed.federation.catalog.lineage.federation == federation
            assert await fed.timeline() == []
    async with trial(CALM, servers=mix, folder=tmp_path / "two") as fed:
        await fed.remember("two's", tier="semantic")
    for name in ("one", "two"):
        async with trial(CALM, servers=mix, folder=tmp_path / name) as fed:
            assert contents(await fed.timeline()) == {f"{name}'s": "semantic"}


@pytest.mark.parametrize("forgets", [False, True], ids=["with a record", "that has forgotten its records"])
async def test_a_federation_that_has_had_a_record_is_no_lost_one(tmp_path: Path, *, forgets: bool) -> None:
    mix = same_server_behind_all(CoreOnly(tmp_path / "shared.db"))
    await begin_empty(tmp_path, mix)
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        ids = await fed.remember("ours", tier="working")
        if forgets:
            await fed.call("forget", ids=ids)
            await fed.settled()
            fed.federation.catalog.drop_notes_before(2**62)
        fed.federation.catalog.tiers.set_scanned("semantic", False)
    await write_theirs(tmp_path, mix, "theirs")
    async with trial(CALM, servers=mix, folder=tmp_path / "ours") as fed:
        assert contents(await fed.timeline()) == ({} if forgets else {"ours": "working"})


async def two_on_one_server(folder: Path, ours: int, theirs: int, *, natives: bool) -> tuple[Mix, str, str]:
    """Let two federations write `ours` and `theirs` records to a shared server; return the mix and their ids."""
    shared = Shared(CoreOnly(folder / "shared.db")).mix()
    mix = shared if natives else {**ALL_LESSER, **shared}
    await begin_empty(folder, mix)
    federations = []
    for name, count in (("ours", ours), ("theirs", theirs)):
        async with trial(CALM, servers=mix, folder=folder / name) as fed:
            await fed.remember(*(f"{name} {n}" for n in range(count)), tier="semantic")
            federations.append(fed.federation.catalog.lineage.federation)
    first, second = federations
    return mix, first, second


async def seen(folder: Path, mix: Mix) -> dict[str, int]:
    """Return how many records of each federation the router shows."""
    async with trial(CALM, servers=mix, folder=folder) as fed:
        return Counter(content.partition(" ")[0] for content in contents(await fed.timeline()))


@pytest.mark.parametrize("lost", [False, True], ids=["and the catalog", "and no catalog"])
async def test_a_rebuild_keeps_the_id_that_its_native_stores_bear(tmp_path: Path, *, lost: bool) -> None:
    mix, ours, _ = await two_on_one_server(tmp_path, 1, 5, natives=True)
    folder = tmp_path / "ours"
    if lost:
        lose_catalog(folder)
    await heal(folder, mix)
    async with trial(CALM, servers=mix, folder=folder) as fed:
        assert fed.federation.catalog.lineage.federation == ours
    assert await seen(folder, mix) == {"ours": 1}


@pytest.mark.parametrize(("ours", "theirs"), [(2, 2), (1, 2)], ids=["as many", "fewer"])
async def test_a_rebuild_asks_whose_the_records_are_where_nobody_can_tell(
    tmp_path: Path, ours: int, theirs: int
) -> None:
    mix, our_id, their_id = await two_on_one_server(tmp_path, ours, theirs, natives=False)
    folder = tmp_path / "ours"
    sentence = await refused_rebuild(folder, mix)
    for told in (f"{ours} have the id {our_id}", f"{theirs} have the id {their_id}", "--federation", "--adopt"):
        assert told in sentence
    assert await seen(folder, mix) == {"ours": ours}  # nothing has changed
    sentence = await refused_rebuild(folder, mix, federation="nobody")
    assert "expected an id that records have, or the catalog's, got nobody" in sentence
    await heal(folder, mix, federation=our_id)
    assert await seen(folder, mix) == {"ours": ours}
    await refused_rebuild(folder, mix)
    await heal(folder, mix, adopt=True)
    assert await seen(folder, mix) == {"ours": ours, "theirs": theirs}
    await heal(folder, mix)  # adopted records count as ours
    assert await seen(folder, mix) == {"ours": ours, "theirs": theirs}


async def test_a_rebuild_without_a_catalog_takes_the_id_that_most_records_bear(tmp_path: Path) -> None:
    """A rebuild without a catalog takes the federation id that most records have; in a tie it asks."""
    for count in (1, 2):
        (tmp_path / f"{count}").mkdir()
        mix, _, their_id = await two_on_one_server(tmp_path / f"{count}", count, 2, natives=False)
        folder = tmp_path / f"{count}" / "ours"
        lose_catalog(folder)
        if count == 2:
            assert f"2 have the id {their_id}" in await refused_rebuild(folder, mix)
        else:
            await heal(folder, mix)
            assert await seen(folder, mix) == {"theirs": 2}


@pytest.mark.parametrize("natives", [True, False], ids=["beside native stores", "of lesser servers"])
async def test_what_was_adopted_stays_ours_in_a_catalog_that_is_made_anew(tmp_path: Path, *, natives: bool) -> None:
    mix, _, _ = await two_on_one_server(tmp_path, 1, 3, natives=natives)
    folder = tmp_path / "ours"
    async with trial(CALM, servers=mix, folder=folder, adopt=True) as fed:
        assert len(await fed.timeline()) == 4
    async with trial(CALM, servers=mix, folder=tmp_path / "theirs") as fed:
        await fed.remember("later", tier="semantic")
    for _ in range(2):
        assert (await heal(folder, mix)).missing == 0
        assert await seen(folder, mix) == {"ours": 1, "theirs": 3}


async def test_a_damaged_catalog_tells_what_was_adopted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mix, _, _ = await two_on_one_server(tmp_path, 1, 3, natives=False)
    folder = tmp_path / "ours"
    async with trial(CALM, servers=mix, folder=folder, adopt=True):
        pass
    look = Salvage._look

    def find_damage(self: Salvage, path: Path) -> None:
        look(self, path)
        self.damage = "a page"

    with monkeypatch.context() as patch:
        patch.setattr(Salvage, "_look", find_damage)
        await heal(folder, mix)
    assert await seen(folder, mix) == {"ours": 1, "theirs": 3}


# --- as commands


@pytest.mark.process
def test_a_start_without_the_catalog_is_refused_and_the_ways_out_work(tmp_path: Path) -> None:
    config = tmp_path / "federation.toml"
    server = [sys.executable, "-m", "tests.servers.core_only", "--file"]
    commands = {tier: json.dumps([*server, str(tmp_path / tier)]) for tier in ("working", "semantic")}
    config.write_text(
        'name = "home"\nstate = "router.db"\n'
        + "".join(
            f'[tiers.{tier}]\nkind = "{tier}"\ncwd = "{ROOT}"\ncommand = {command}\n'
            for tier, command in commands.items()
        )
    )

    run = partial(ran, config)
    run("a2m", "remember", "one", "--id", "t")
    lose_catalog(tmp_path)
    sentence = (
        r"a2m-router: tiers\.working: the records there belong to another federation \((\w+), this one is (\w+)\): "
        r"give each federation stores of its own, or stop the router of the other federation and start once with "
        r"--adopt to take its records over; if they belong to this federation and its catalog was lost, a2m-router "
        r"--config FILE --rebuild makes a new one; if this one is new, and the server is for both, a2m-router "
        r"--config FILE --rebuild --federation (\w+) begins it"
    )
    for arguments in ((), ("--check",)):
        told = re.fullmatch(sentence, run("a2m-router", *arguments, code=1).stderr.splitlines()[-1])
        assert told is not None
        theirs, ours, named = told.groups()
        assert theirs != ours == named
    run("a2m", "timeline", code=1)
    assert "add --rebuild, or leave it out" in run("a2m-router", "--federation", ours, code=2).stderr
    run("a2m-router", "--rebuild", "--federation", ours)
    assert "no record was found" in run("a2m", "timeline", code=3).stderr
    run("a2m-router", "--rebuild", "--federation", theirs)
    found = json.loads(run("a2m", "timeline", "--json").stdout)["records"]
    assert [(record["id"], record["content"]) for record in found] == [("t", "one")]
