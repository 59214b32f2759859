"""The router does not take a short answer of a tier for a complete one: an answer that a limit on messages or calls cut
off, or an answer of a tier that has lost records.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from a2m_router.protocol.wire.errors import A2MError, Code
from tests.servers.core_only import CoreOnly
from tests.support.federated import FOUR_TIERS, Foreign, filled, lose, settings_of, trial
from tests.support.short_answers import TellsFew, too_long

pytestmark = pytest.mark.anyio

SETTINGS = settings_of(FOUR_TIERS, policy="explicit")


async def test_a_forget_by_query_of_more_than_an_answer_holds_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with trial(SETTINGS) as fed:
        ids = await fed.remember(*["alpha"] * 20, tier="semantic")
        with monkeypatch.context() as patch:
            too_long(patch, lambda method, params: method == "memory/recall")
            with pytest.raises(A2MError, match="more than one call can return") as refused:
                await fed.call("forget", query="alpha")
        assert refused.value.code == Code.QUOTA_EXCEEDED
        assert {record["id"] for record in await fed.timeline()} == set(ids)
        assert await fed.call("forget", query="alpha") == {"forgotten": 20}


async def test_what_a_short_answer_left_out_is_asked_for(tmp_path: Path) -> None:
    """A server that returns few records a call is called again for the rest; its records are not given up as lost."""
    servers = {"semantic": Foreign(kind=TellsFew)}
    async with trial(SETTINGS, folder=tmp_path, servers=servers) as fed:
        ids = await fed.remember(*["alpha"] * 50, tier="semantic")
        assert {record["id"] for record in await fed.timeline()} == set(ids)
    async with trial(SETTINGS, folder=tmp_path, servers=servers) as fed:
        assert {record["id"] for record in await fed.timeline()} == set(ids)
        assert await fed.call("forget", ids=ids) == {"forgotten": 50}


async def test_a_tier_whose_sessions_are_cut_short_is_not_accounted_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tier counts as not scanned where its server's limit cuts the answer for one session."""

    class InSessions(CoreOnly):
        def __init__(self, path: Path | None = None, **chosen: Any) -> None:
            super().__init__(path, **chosen)
            made = [
                {
                    "id": f"r{n}",
                    "content": "x" * 100,
                    "created_at": f"2026-01-01T00:00:{n:02}.000Z",
                    "session": f"s{n % 3}",
                }
                for n in range(60)
            ]
            self._make_true({"put": made})

        def timeline(self, params: Mapping[str, Any]) -> dict[str, Any]:
            return {"records": super().timeline(params)["records"][-15:]}

    server = Foreign(kind=InSessions, capabilities=("sessions",), limits={"max_recall_limit": 15})
    # the whole timeline does not fit into an answer, so the scan reads one session after the other
    too_long(monkeypatch, lambda method, params: method == "memory/timeline" and params.where is None)
    async with trial(SETTINGS, servers={"semantic": server}) as fed:
        found = await fed.call("timeline")
        assert [down["tier"] for down in found["degraded"]] == ["semantic"]


async def test_a_timelines_limit_is_filled_past_what_belongs_to_others() -> None:
    """A timeline reaches its limit although most records of a read-only tier belong to other owners."""
    pages = [
        {
            "id": f"r{n}",
            "content": f"c{n}",
            "created_at": f"2026-01-01T00:00:{n:02}.000Z",
            "owner": "me" if n < 3 else "other",
        }
        for n in range(10)
    ]
    server = filled(*pages, read_only=True, capabilities=("scopes",))
    async with trial(SETTINGS, servers={"semantic": server}) as fed:
        assert [record["content"] for record in await fed.timeline(owner="me", limit=3)] == ["c0", "c1", "c2"]


async def test_a_page_is_refused_where_a_tier_has_lost_what_belongs_on_it() -> None:
    async with trial(SETTINGS) as fed:
        ids = await fed.remember(*"abcd", tier="semantic")
        lose(fed, "semantic", ids[0])
        with pytest.raises(A2MError, match=f"it has lost the record '{ids[0]}'"):
            await fed.call("timeline", page=100)
