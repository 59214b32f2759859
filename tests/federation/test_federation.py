"""A federation as its clients see it: conversations, keys, promotion, forgetting, owners."""

import pytest

from a2m_router.protocol.wire.errors import A2MError, Code
from tests.support.federated import trial

pytestmark = pytest.mark.anyio


async def test_a_conversation_spills_and_keeps_its_order() -> None:
    async with trial() as fed:
        ids = [(await fed.remember(f"turn {n}", session="s"))[0] for n in range(20)]
        await fed.settled()
        records = await fed.timeline(where={"session": "s"})
        assert [record["id"] for record in records] == ids
        assert [record["tier"] for record in records] == ["semantic"] * 10 + ["episodic"] * 6 + ["working"] * 4
        assert fed.copies() == {record["id"]: [record["tier"]] for record in records}


async def test_a_replaced_key_keeps_its_id_and_counts_its_revisions() -> None:
    async with trial() as fed:
        first = await fed.remember("Rome", key="user/city", tier="semantic", owner="a")
        again = await fed.remember("Milan", key="user/city", owner="a")
        record = (await fed.call("fetch", key="user/city", owner="a"))["record"]
        assert again == first == [record["id"]]
        assert (record["content"], record["revision"], record["tier"]) == ("Milan", 1, "semantic")


async def test_a_replacement_with_another_tier_moves_the_record_there() -> None:
    async with trial() as fed:
        first = await fed.remember("Rome", key="k")
        again = await fed.remember("Milan", key="k", tier="semantic")
        await fed.settled()
        record = (await fed.call("fetch", key="k"))["record"]
        assert again == first == [record["id"]]
        assert (record["content"], record["revision"], record["tier"]) == ("Milan", 1, "semantic")
        assert fed.copies() == {first[0]: ["semantic"]}


async def test_what_is_recalled_often_is_promoted() -> None:
    async with trial() as fed:
        ids = await fed.remember("the deploy key rotates", tier="episodic", group="g")
        ids += await fed.remember("every ninety days", tier="episodic", group="g")
        for _ in range(3):
            await fed.call("recall", query="deploy", limit=1)
        await fed.settled()
        assert {record["tier"] for record in await fed.timeline()} == {"semantic"}
        assert fed.copies() == {id: ["semantic"] for id in ids}


async def test_what_was_forgotten_is_gone_at_once_and_everywhere() -> None:
    async with trial() as fed:
        ids = await fed.remember("a", "b", session="s")
        assert await fed.call("forget", ids=ids[:1]) == {"forgotten": 1}
        assert [record["id"] for record in await fed.timeline()] == ids[1:]
        await fed.settled()
        assert fed.copies() == {ids[1]: ["working"]}


async def test_another_owners_id_is_refused_and_changes_nothing() -> None:
    async with trial() as fed:
        await fed.call("remember", records=[{"id": "x", "content": "mine"}], owner="a")
        with pytest.raises(A2MError) as refused:
            await fed.call("remember", records=[{"id": "x", "content": "yours"}, {"content": "new"}], owner="b")
        assert refused.value.code == Code.SCOPE_DENIED
        assert [record["content"] for record in await fed.timeline()] == ["mine"]
