"""A federation with mounts, and every message that its tiers get."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Container, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from a2m_rag import server as rag
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.protocol.wire.timestamps import render
from tests.support.federated import LOCAL, START, Foreign, Trial, settings_of, trial

Records = list[dict[str, Any]]
# the methods that a mount may be sent
READS: Final = {"describe", "recall", "timeline"}


class SentMessage(NamedTuple):
    """A message that the router has sent to a tier."""

    tier: str
    method: str
    params: dict[str, Any]


class Watched:
    """A running federation, and every message that its tiers got."""

    def __init__(self, trial: Trial, told: list[SentMessage]) -> None:
        self.federation = trial.federation
        self.servers = trial.servers
        self.call = trial.call
        self.told = told

    async def refused(self, method: str, **params: Any) -> A2MError:
        """Return the error that a call is answered with."""
        with pytest.raises(A2MError) as refusal:
            await self.call(method, **params)
        return refusal.value

    async def records(self, method: str = "timeline", **params: Any) -> Records:
        """Return the records of a read whose answer names no missing tier."""
        answer = await self.call(method, **params)
        assert answer.keys() == {"records"}
        found: Records = answer["records"]
        return found

    async def ids(self, method: str = "timeline", **params: Any) -> list[str]:
        return [record["id"] for record in await self.records(method, **params)]

    def told_to(self, tier: str, *methods: str) -> list[dict[str, Any]]:
        """Return the parameters of all calls of these methods that a tier got."""
        return [told.params for told in self.told if told.tier == tier and told.method in methods]


@asynccontextmanager
async def federation(
    tiers: str,
    servers: Mapping[str, Foreign | rag.Server],
    *,
    folder: Path | None = None,
    down: Container[str] = (),
) -> AsyncIterator[Watched]:
    """Run a federation with these servers behind its tiers, by the tiers' names; the other tiers have stores.

    At the end of the block, assert that no mount got anything but reads.

    Args:
        folder: where the files are; without it, all data is in memory.
        down: tiers that cannot be connected, as long as they are in this container.
    """
    told: list[SentMessage] = []

    async def pass_on(tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        call = json.loads(message)
        told.append(SentMessage(tier, call["method"].removeprefix("memory/"), call.get("params") or {}))
        served = servers.get(tier)
        return await (served(message, LOCAL) if isinstance(served, rag.Server) else go_on())

    foreign = {name: served for name, served in servers.items() if isinstance(served, Foreign)}
    async with trial(settings_of(tiers), servers=foreign, weather=pass_on, folder=folder, down=down) as fed:
        yield Watched(fed, told)
        for tier in filter(fed.federation.mounts.__contains__, fed.federation.settings.tiers):
            written = [each for each in told if each.tier == tier.name and each.method not in READS]
            assert [each for each in written if tier.mount or not _means_nobody(each)] == []
            assert len(written) <= 1


def _means_nobody(told: SentMessage) -> bool:
    """Return whether a message is the probe whether a server takes writes: a forget of an id that no record has."""
    return told.method == "forget" and told.params.keys() == {"ids"} and "a2m-router:" in str(told.params["ids"])


def at(seconds: int) -> str:
    """Return the moment so many seconds after the start of this federation's clock; negative: before it."""
    return render(START + 1000 * seconds)


MEMORY: Final = """
[tiers.working]
kind = "working"
command = ["-"]
[tiers.notes]
kind = "semantic"
command = ["-"]
"""
MOUNT: Final = """
[tiers.handbook]
kind = "semantic"
command = ["-"]
mount = true
"""
