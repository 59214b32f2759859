"""Answers with fewer records than were asked for: the server sends few, or the message would be too long."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import AnswerTooLong
from a2m_router.tiers.mode import TierMode
from tests.servers.core_only import CoreOnly


def too_long(monkeypatch: pytest.MonkeyPatch, is_asked: Callable[[str, Any], bool], most: int = 2000) -> None:
    """Make answers of more than `most` bytes to the calls that `is_asked` selects too long for a message."""
    call = TierGateway._call

    async def narrow(
        gateway: TierGateway, tier: str, method: str, prepare: Callable[[TierMode], Any], *, is_harmless: bool = False
    ) -> tuple[Any, TierMode]:
        raw, mode = await call(gateway, tier, method, prepare, is_harmless=is_harmless)
        if is_asked(method, prepare(mode)) and len(raw) > most:
            raise AnswerTooLong(tier, f"an answer of more than {most:,} bytes", 1.0, None)
        return raw, mode

    monkeypatch.setattr(TierGateway, "_call", narrow)


class TellsFew(CoreOnly):
    """A server that returns at most 20 records at once, and does not declare that limit."""

    def recall(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return super().recall({**params, "limit": min(params.get("limit", 8), 20)})

    def timeline(self, params: Mapping[str, Any]) -> dict[str, Any]:
        return {"records": super().timeline(params)["records"][-20:]}
