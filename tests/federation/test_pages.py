"""Walks through everything that a federation holds, page by page: an extension of memory/timeline, for exports."""

import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.protocol.wire.errors import A2MError, Code
from tests.support.backups import made
from tests.support.examples import scaled
from tests.support.federated import FOUR_TIERS, Trial, settings_of, trial

pytestmark = pytest.mark.anyio

OWNERS = (None, "a", "b")
SHARED = "procedural"


async def walk(fed: Trial, size: int, between: Any = None, **params: Any) -> list[dict[str, Any]]:
    """Return all records of a walk. Call `between` after each page."""
    found: list[dict[str, Any]] = []
    after: dict[str, str] = {}
    while True:
        page = await fed.call("timeline", page=size, **after, **params)
        assert len(page["records"]) <= size
        found += page["records"]
        if page["next"] is None:
            return found
        after = {"after": page["next"]}
        if between is not None:
            await between()


writes = st.lists(
    st.tuples(st.sampled_from(OWNERS), st.sampled_from(["working", "episodic", "procedural"]), st.booleans()),
    min_size=1,
    max_size=14,
)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@settings(max_examples=scaled(10))
@given(writes=writes, size=st.integers(1, 5), owner=st.sampled_from(OWNERS), data=st.data())
async def test_a_walk_meets_every_record_once_though_records_move(
    writes: list[tuple[str | None, str, bool]], size: int, owner: str | None, data: st.DataObject
) -> None:
    """The records also change during the walk."""
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        ids: list[str] = []
        for number, (whose, tier, keyed) in enumerate(writes):
            key = {"key": f"k{number}"} if keyed else {}
            ids += await fed.remember(f"note {number}", owner=whose, tier=tier, session="s", **key)
        wanted = {record["id"] for record in await fed.timeline(owner=owner)}
        forgotten: set[str] = set()

        async def between() -> None:
            match data.draw(st.sampled_from(["nothing", "move", "replace", "pass", "forget", "write"])):
                case "move":
                    await fed.call("promote", ids=data.draw(st.lists(st.sampled_from(ids))), tier="semantic")
                case "replace":
                    whose, _, keyed = writes[0]
                    if keyed and ids[0] not in forgotten:
                        await fed.remember("anew", key="k0", owner=whose)
                case "pass":
                    await fed.call("consolidate")
                case "forget":
                    id = data.draw(st.sampled_from(ids))
                    forgotten.add(id)
                    await fed.call("forget", ids=[id])
                case "write":
                    await fed.remember("late", owner="b")

        found = await walk(fed, size, between, owner=owner)
        assert owner is None or all(each.get("owner") in (None, owner) or each["tier"] == SHARED for each in found)
        met = [record["id"] for record in found]
        assert len(set(met)) == len(met)
        # A record that moves from a shared tier to a private one may become invisible to the caller during the walk.
        seen_all_along = wanted & {record["id"] for record in await fed.timeline(owner=owner)}
        assert seen_all_along <= set(met)


async def test_a_page_is_what_a_timeline_shows() -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        for number in range(5):
            await fed.remember(f"note {number}", embedding=[0.5, number], metadata={"n": number})
        assert await walk(fed, 2, embeddings=True) == await fed.timeline(embeddings=True)
        assert await walk(fed, 2, tier="semantic") == []
        assert (await fed.call("describe"))["store"]["pages"] is True


async def test_the_place_of_a_walk_tells_nothing() -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        await fed.remember("mine", owner="b")
        await fed.remember("mine too", owner="b")
        before = (await fed.call("timeline", owner="b", page=1))["next"]
        for _ in range(20):
            await fed.remember("another's", owner="a")
        after = (await fed.call("timeline", owner="b", page=1))["next"]
        assert (len(before), before != after) == (len(after), True)
        assert [r["content"] for r in (await fed.call("timeline", owner="b", after=before))["records"]] == ["mine too"]


async def test_a_walk_goes_on_after_a_restart_and_only_in_its_own_federation(tmp_path: Path) -> None:
    settings = settings_of(FOUR_TIERS, policy="explicit")
    contents = [f"note {number}" for number in range(5)]
    async with trial(settings, folder=tmp_path) as fed:
        for content in contents:
            await fed.remember(content)
        first = await fed.call("timeline", page=2)
    async with trial(settings, folder=tmp_path) as fed:
        await fed.remember("since")
        rest = await fed.call("timeline", page=9, after=first["next"])
        found = [record["content"] for record in (*first["records"], *rest["records"])]
        assert sorted(found) == sorted([*contents, "since"])
    async with trial(settings) as other:
        for content in contents:
            await other.remember(content)
        with pytest.raises(A2MError, match=r"^after: "):
            await other.call("timeline", page=9, after=first["next"])


async def test_a_walk_from_after_the_copies_that_were_put_back_is_refused(tmp_path: Path) -> None:
    """After the copy is restored, the positions of later starts belong to other records: their cursors are refused.

    Cursors of the start that made the copy go on, and meet all that was written since.
    """
    settings = settings_of(FOUR_TIERS, policy="explicit")
    (tmp_path / "it").mkdir()
    async with trial(settings, folder=tmp_path / "it") as fed:
        await fed.remember("0", "1", "2")
        before = (await fed.call("timeline", page=2))["next"]
        await made(fed, tmp_path / "copy")
        await fed.remember("3", "4", "5", "6")
        same_start = (await fed.call("timeline", page=6))["next"]
    async with trial(settings, folder=tmp_path / "it") as fed:
        after = (await fed.call("timeline", page=6))["next"]
    async with trial(settings, folder=tmp_path / "copy") as fed:
        await fed.remember("7", "8", "9", "10")
        with pytest.raises(A2MError, match=r"^after: .* start again") as refused:
            await fed.call("timeline", page=9, after=after)
        assert refused.value.code == Code.INVALID_PARAMS
        for cursor, rest in ((before, ["2"]), (same_start, [])):
            found = (await fed.call("timeline", page=9, after=cursor))["records"]
            assert sorted(record["content"] for record in found) == sorted([*rest, "7", "8", "9", "10"])


async def test_a_walk_passes_over_nothing_that_was_written_since_its_last_page(tmp_path: Path) -> None:
    """The records at the cursor are forgotten, and others take their place after one restart, or two."""
    settings = settings_of(FOUR_TIERS, policy="explicit")
    async with trial(settings, folder=tmp_path) as fed:
        ids = await fed.remember(*(str(number) for number in range(8)))
        cursor = (await fed.call("timeline", page=6))["next"]
        await fed.call("forget", ids=ids[2:])
    async with trial(settings, folder=tmp_path) as fed:
        await fed.remember("after one", "and another", "and a third")
    async with trial(settings, folder=tmp_path) as fed:
        await fed.remember(*(f"after two {number}" for number in range(9)))
        found = (await fed.call("timeline", page=99, after=cursor))["records"]
    assert len(found) == 12


async def test_the_key_of_cursors_is_for_the_owner_of_the_catalog_alone(tmp_path: Path) -> None:
    settings = settings_of(FOUR_TIERS, policy="explicit")
    cursors = []
    for _ in range(2):
        async with trial(settings, folder=tmp_path) as fed:
            await fed.remember("one")
            await fed.remember("two")
            # Each cursor of one position is different, also after a restart.
            cursors += [(await fed.call("timeline", page=1))["next"] for _ in range(2)]
    assert len(set(cursors)) == 4
    [catalog] = tmp_path.glob("router.db")  # noqa: ASYNC240 - nothing else is going on
    assert stat.S_IMODE(catalog.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("params", "named"),
    [({"page": 0}, "page"), ({"after": "17"}, "after"), ({"page": 1, "where": {"colour": "red"}}, "where")],
)
async def test_what_cannot_be_walked_is_refused_by_name(params: dict[str, Any], named: str) -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit")) as fed:
        with pytest.raises(A2MError, match=f"^{named}: ") as refused:
            await fed.call("timeline", **params)
        assert refused.value.code == Code.INVALID_PARAMS


async def test_a_walk_needs_every_tier() -> None:
    async with trial(settings_of(FOUR_TIERS, policy="explicit"), down={"semantic"}) as fed:
        with pytest.raises(A2MError, match="semantic") as refused:
            await fed.call("timeline", page=1)
        assert refused.value.code == Code.INTERNAL_ERROR
        assert await walk(fed, 1, tier="working") == []
