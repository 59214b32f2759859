"""A lifted server that begins to return altered data: the router never takes such a copy for the record.

The server loses the rider, alters the content, or selects by altered values. No record is lost, the records shown are
true, and the answer names the tier whose records are missing.
"""

import json
from pathlib import Path
from typing import Any, Final

import pytest

from a2m_router.protocol.wire.errors import A2MError
from a2m_router.tiers.lifting import RESERVED, VERSION
from tests.servers.habits import Habitual
from tests.servers.protocol import Record
from tests.support.federated import Foreign, Steered, Trial, settings_of, trial

pytestmark = pytest.mark.anyio

ONE: Final = """
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["-"]
"""
TWO: Final = f"""{ONE}
capacity = 50
spill_to = "semantic"
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""


class Switched(Habitual):
    """A server that alters records while its class attribute `on` is True."""

    on = False


def changing(*ways: str) -> type[Switched]:
    """Return a class of server that alters its records in these ways while its attribute `on` is True."""

    class Changing(Switched):
        def told(self, record: Record) -> Record:
            if not type(self).on:
                return record
            if "content" in ways:
                record = {**record, "content": "garbled"}
            if "rider" in ways:
                members = record.get("metadata") or {}
                record = {**record, "metadata": {name: members[name] for name in members if name != RESERVED}}
            return record

        def filed(self, record: Record) -> Record:
            return {**record, "content": record["content"].strip()} if type(self).on and "trim" in ways else record

    return Changing


@pytest.mark.parametrize("way", ["content", "rider"])
async def test_a_true_copy_stays_until_its_record_is_read_unaltered_at_home(way: str, tmp_path: Path) -> None:
    """A copy as it was written stays until its record is read unaltered at its home."""
    kind = changing(way)
    steer = Steered()
    servers = {"semantic": Foreign(kind=kind)}
    async with trial(settings_of(TWO), servers=servers, weather=steer, folder=tmp_path) as fed:
        await fed.remember("a light", id="a", owner="ann", metadata={"x": 1})
        steer.refuse("working", "forget")
        await fed.call("promote", ids=["a"], tier="semantic", owner="ann")
    kind.on = True
    async with trial(settings_of(TWO), servers=servers, folder=tmp_path) as fed:
        await fed.settled()
        [shown] = await fed.timeline(owner="ann")
        assert (shown["content"], shown["metadata"], shown["tier"]) == ("a light", {"x": 1}, "working")


@pytest.mark.parametrize("way", ["content", "rider"])
async def test_a_known_write_is_not_answered_for_what_its_tier_returns_altered(way: str) -> None:
    kind = changing(way)
    record = {"id": "a", "content": "a light", "metadata": {"x": 1}, "owner": "ann"}
    async with trial(settings_of(ONE), servers={"working": Foreign(kind=kind)}) as fed:
        await fed.call("remember", records=[record])
        kind.on = True
        with pytest.raises(A2MError, match="it does not hold the record 'a' as it was written"):
            await fed.call("remember", records=[record])
        kind.on = False
        assert await fed.call("remember", records=[record]) == {"ids": ["a"]}


async def test_a_lost_record_that_is_written_anew_is_read_back() -> None:
    """When a known record that its tier has lost is written again, the router reads it back."""
    kind = changing("trim")
    async with trial(settings_of(ONE), servers={"working": Foreign(kind=kind)}) as fed:
        record = {"id": "a", "content": "a light "}
        await fed.call("remember", records=[record])
        fed.servers["working"]._make_true({"drop": ["a"]})
        kind.on = True
        with pytest.raises(A2MError, match="has altered the content of a record that it was given: 'a'"):
            await fed.call("remember", records=[record])
        assert await fed.timeline() == []


async def test_a_record_without_its_rider_is_not_shown_and_the_answer_says_so(caplog: pytest.LogCaptureFixture) -> None:
    kind = changing("rider")
    async with trial(settings_of(TWO), servers={"working": Foreign(kind=kind)}) as fed:
        [id] = await fed.remember("a light", owner="ann", metadata={"big": 2**60, "x": 1}, session="s", key="k")
        kind.on = True
        for method, params in (("recall", {"query": "light"}), ("timeline", {}), ("timeline", {"limit": 1})):
            answer = await fed.call(method, owner="ann", **params)
            assert answer["records"] == []
            [missing] = answer["degraded"]
            assert missing["tier"] == "working"
            assert "without the metadata member 'a2m-router'" in missing["reason"]
        refused: list[tuple[str, dict[str, Any]]] = [("fetch", {"key": "k"}), ("forget", {"where": {"big": 2**60}})]
        for method, params in refused:
            with pytest.raises(A2MError, match="without the metadata member 'a2m-router'"):
                await fed.call(method, owner="ann", **params)
        kind.on = False
        assert [record["id"] for record in await fed.timeline(where={"big": 2**60})] == [id]
    assert caplog.text.count("protocol violation") == 1


async def test_what_a_server_held_before_it_was_a_tier_needs_no_rider(tmp_path: Path) -> None:
    record = {"id": "a", "content": "a light", "created_at": "2020-01-01T00:00:00Z", "role": "x"}
    (tmp_path / "working.db").write_text(json.dumps({"put": [record]}) + "\n")
    async with trial(settings_of(TWO), servers={"working": Foreign()}, folder=tmp_path) as fed:
        for _ in range(2):
            [shown] = await fed.timeline()
            assert (shown["role"], shown["created_at"]) == ("x", "2020-01-01T00:00:00.000Z")
            assert [each["id"] for each in (await fed.call("recall", query="light"))["records"]] == ["a"]
            await fed.call("promote", ids=["a"], tier="semantic")
            await fed.settled()


@pytest.mark.parametrize(
    ("born", "taken"),
    [
        (None, "1970-01-01T00:00:00.000Z"),
        ("yesterday", "1970-01-01T00:00:00.000Z"),
        (1753693530, "1970-01-01T00:00:00.000Z"),
        ("2026-07-28T10:15:30", "2026-07-28T10:15:30.000Z"),
        ("2026-07-28T12:15:30+0200", "2026-07-28T10:15:30.000Z"),
        ("2016-12-31T23:59:60Z", "2017-01-01T00:00:00.000Z"),
    ],
)
async def test_a_record_with_an_odd_date_is_taken_into_the_account(born: Any, taken: str, tmp_path: Path) -> None:
    record = {"id": "a", "content": "a light", "created_at": born}
    (tmp_path / "working.db").write_text(json.dumps({"put": [record]}) + "\n")

    class KeepsOddDates(Habitual):
        def timeline(self, params: Any) -> Any:
            self._records = {id: {**each, "created_at": str(each["created_at"])} for id, each in self._records.items()}
            answer = super().timeline(params)
            answer["records"] = [
                {**each, "created_at": born} if each["id"] == "a" else each for each in answer["records"]
            ]
            return answer

    async with trial(settings_of(TWO), servers={"working": Foreign(kind=KeepsOddDates)}, folder=tmp_path) as fed:
        await fed.remember("a rope", id="b")
        told = {each["id"]: each["created_at"] for each in await fed.timeline()}
        assert told["a"] == taken
        assert await fed.call("promote", ids=["a"], tier="semantic") == {"promoted": 1}


# --- what a server selects by


async def selected(fed: Trial, where: dict[str, Any]) -> None:
    """Assert that timeline finds the record by the condition, and that forget by it forgets the record."""
    assert [each["id"] for each in await fed.timeline(where=where)] == ["a"]
    assert await fed.call("forget", where=where) == {"forgotten": 1}


async def test_a_server_that_begins_to_alter_metadata_hides_nothing() -> None:
    """A server that begins to alter metadata hides no record from a timeline or a forget."""
    async with trial(settings_of(ONE), servers={"working": Foreign()}) as fed:
        await fed.remember("a light", id="a", metadata={"topic": "Light"})
        server = fed.servers["working"]
        record = server._records["a"]
        server._make_true({"put": [{**record, "metadata": {**record["metadata"], "topic": "light"}}]})
        await selected(fed, {"topic": "Light"})


@pytest.mark.parametrize("method", ["recall", "timeline"])
async def test_a_server_s_own_field_hides_no_member_of_that_name(method: str) -> None:
    class HasATenant(Habitual):
        def filed(self, record: Record) -> Record:
            return {**record, "status": "public"}

    async with trial(settings_of(ONE), servers={"working": Foreign(kind=HasATenant)}) as fed:
        await fed.remember("a light", id="a", metadata={"status": "secret"})
        question = {"query": "light"} if method == "recall" else {}
        found = (await fed.call(method, where={"status": "secret"}, **question))["records"]
        assert [each["id"] for each in found] == ["a"]
        await selected(fed, {"status": "secret"})


async def test_half_of_a_surrogate_pair_in_a_server_s_own_field_costs_nothing() -> None:
    class CutsTitles(Habitual):
        def _written(self, response: dict[str, Any]) -> bytes:
            return super()._written(response).replace(b'"title": "?"', rb'"title": "\ud83d"')

        def told(self, record: Record) -> Record:
            return {**record, "title": "?"}

    async with trial(settings_of(ONE), servers={"working": Foreign(kind=CutsTitles)}) as fed:
        await fed.remember("a light \U0001f600", id="a")
        assert [each["content"] for each in await fed.timeline()] == ["a light \U0001f600"]


# --- a caller's own member of the reserved name

FORGED: Final = [
    {RESERVED: json.dumps({"version": VERSION + 6})},
    {RESERVED: json.dumps({"created_at": "2001-01-01T00:00:00.000Z", "version": VERSION, "owner": "bob", "role": "x"})},
    {RESERVED: json.dumps({"created_at": "2001-01-01T00:00:00.000Z", "version": VERSION, "metadata_alone": True})},
    {RESERVED: {"created_at": 1}, "n": 1},
]


@pytest.mark.parametrize("metadata", FORGED)
@pytest.mark.parametrize("lesser", [False, True])
async def test_a_caller_s_own_rider_is_metadata_like_any_other(
    metadata: dict[str, Any], lesser: bool, tmp_path: Path
) -> None:
    servers = {"working": Foreign()} if lesser else {}
    expected = None
    for catalog in (True, False):
        async with trial(settings_of(TWO), servers=servers, folder=tmp_path, adopt=not catalog) as fed:
            if catalog:
                await fed.remember("a light", id="a", owner="ann", metadata=metadata, session="s", role="user")
            [shown] = await fed.timeline(owner="ann")
            assert (shown["metadata"], shown["owner"], shown["role"]) == (metadata, "ann", "user")
            expected = expected or shown["created_at"]
            assert shown["created_at"] == expected
            await fed.call("promote", ids=["a"], tier="semantic" if catalog else "working", owner="ann")
            await fed.settled()
            [shown] = await fed.timeline(owner="ann")
            assert (shown["metadata"], shown["created_at"]) == (metadata, expected)
        (tmp_path / "router.db").unlink()


async def test_a_member_whose_name_is_written_in_escapes_is_the_reserved_one() -> None:
    class Escapes(Habitual):
        def _written(self, response: dict[str, Any]) -> bytes:
            return super()._written(response).replace(b"a2m-router", rb"a2m\u002drouter")

    async with trial(settings_of(ONE), servers={"working": Foreign(kind=Escapes)}) as fed:
        await fed.remember("a light", id="a", owner="ann")
        assert [each["owner"] for each in await fed.timeline()] == ["ann"]
