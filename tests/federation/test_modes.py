"""The mode of a tier belongs to a connection: a call that waits for the next connection is prepared for that one's
mode.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import msgspec
import pytest
import trio
from hypothesis import example, given
from hypothesis import strategies as st

from a2m_router.config.settings import Tier
from a2m_router.process.budget import budget
from a2m_router.protocol.client.client import Connection, connect_local
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire.method_params import Recall, Timeline
from a2m_router.protocol.wire.records import Draft
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.lifting import RESERVED, lifted
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mode import Modes
from tests.support.clocks import jumping
from tests.support.federated import settings_of

TIER: Final = '[tiers.working]\nkind = "working"\ncommand = ["-"]\n'

# Seconds: the time of a call at the server, the life of a connection, and the timeout of a call.
TAKES: Final = 1.0
LIFE: Final = 2.5
PATIENT: Final = 60.0

DRAFT: Final = Draft(
    id="a",
    content="text",
    created_at="2026-01-01T00:00:00.000Z",
    owner="alice",
    session="s",
    key="k",
    embedding=[1.0, 0.5],
)
NATIVE: Final = {
    "capabilities": ["core", "scopes", "sessions", "keys", "embeddings", "external"],
    "store": {
        "identity": "here",
        "keeps": ["created_at", "revision", "metadata", "embedding"],
        "pages": True,
        "similarity": True,
    },
}


class Kind(msgspec.Struct, frozen=True):
    """What a server is on one connection: native, or lifted with or without vectors and tiers."""

    native: bool
    vectors: bool = True
    remote: str | None = None

    def described(self) -> dict[str, Any]:
        vectors = {"embeddings": {"metric": "cosine"}}
        if self.native:
            return {**NATIVE, **vectors}
        tiers = [{"name": self.remote, "count": 0, "kind": "working"}, {"name": "other", "count": 0}]
        capabilities = ["core", *["embeddings"] * self.vectors, *["tiers"] * (self.remote is not None)]
        return {
            "capabilities": capabilities,
            **(vectors if self.vectors else {}),
            "tiers": tiers if self.remote else [],
        }

    def faults(self, method: str, params: dict[str, Any]) -> list[str]:
        """Return the faults that a call has for this kind of server."""
        asked = params["records"][0] if method == "remember" else params
        wrong = [
            asked.get("tier") != self.remote and "tier",
            (asked.get("owner") is not None) != self.native and "owner",
            not self.vectors and not self.native and asked.get("embedding") is not None and "embedding",
            (RESERVED in (asked.get("metadata") or {})) != (method == "remember" and not self.native) and "rider",
        ]
        return [f"{method}: {each} of {asked}" for each in wrong if each]

    def told(self) -> Any:
        """Return the record as this kind of server returns it."""
        if self.native:
            return msgspec.to_builtins(DRAFT)
        told = json.loads(msgspec.json.encode(lifted(DRAFT, vector=self.vectors, tier=self.remote)))
        return {**told, "owner": "the server's"}


KINDS: Final = st.builds(
    lambda native, vectors, remote: Kind(True) if native else Kind(False, vectors, remote),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "mine", "yours"]),
)


class Changing:
    """A server that has the next of some kinds on each connection, and keeps the last one."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds = list(kinds)
        self.faults: list[str] = []
        self.answered = 0

    @asynccontextmanager
    async def connect(self) -> AsyncIterator[Connection]:
        is_last = len(self._kinds) == 1
        kind = self._kinds[0] if is_last else self._kinds.pop(0)

        async def answer(message: bytes, _: Caller) -> bytes:
            call = json.loads(message)
            method = call["method"].removeprefix("memory/")
            if method == "describe":
                result = {"protocol": "a2m/0.1", "name": "changing", **kind.described()}
            else:
                self.faults += kind.faults(method, call["params"])
                await anyio.sleep(TAKES)
                self.answered += 1
                result = {"ids": ["a"]} if method == "remember" else {"records": [kind.told()]}
            return json.dumps({"jsonrpc": "2.0", "id": call["id"], "result": result}).encode()

        async with connect_local(answer) as connection, anyio.create_task_group() as tasks:

            async def end() -> None:
                await anyio.sleep(LIFE)
                connection.lose("it ended")

            if not is_last:
                tasks.start_soon(end)
            yield connection
            tasks.cancel_scope.cancel()


async def scenario(kinds: Sequence[Kind], calls: Sequence[str], *, held: bool, places: int) -> None:
    settings = settings_of(TIER)
    server = Changing(kinds)
    link = Link("working", server.connect, timeout=PATIENT, most_calls=places, random=lambda: 0.0)
    copies = TierGateway({"working": link}, Modes(settings.tiers, {"working": link}))
    question = Recall(query="text", embedding=[1.0, 0.5], owner="alice", limit=1)
    found: list[Any] = []

    async def asked(method: str) -> None:
        with budget(PATIENT):  # a client's request waits for its turn
            try:
                if method == "remember":
                    await copies.write("working", [DRAFT])
                elif method == "recall":
                    found.extend((await copies.recall("working", question)).records)
                else:
                    timeline = Timeline(owner="alice", limit=1)
                    found.extend([record async for page in copies.pages("working", timeline) for record in page])
            except TierDown:
                pass  # a write lost its connection, or a read lost two

    async with anyio.create_task_group() as tasks:
        await tasks.start(link.run)
        await link.wait_up()
        async with anyio.create_task_group() as callers:
            for method in calls:
                callers.start_soon(asked, method)
            if held:
                with link.holding_back():
                    await anyio.sleep(LIFE + 1.0)
        tasks.cancel_scope.cancel()
    assert server.faults == []
    assert {(record.owner, record.key) for record in found} <= {("alice", "k")}


@given(
    kinds=st.lists(KINDS, min_size=2, max_size=4),
    calls=st.lists(st.sampled_from(["remember", "recall", "timeline"]), min_size=1, max_size=8),
    held=st.booleans(),
    places=st.integers(1, 3),
)
@example(kinds=[Kind(True), Kind(False)], calls=["timeline"] * 4, held=False, places=1)  # one waits for its turn
@example(kinds=[Kind(False), Kind(True)], calls=["remember"], held=True, places=1)  # one waits for a backup's snapshots
@example(kinds=[Kind(False, remote="mine"), Kind(False, remote="yours")], calls=["recall"] * 3, held=False, places=3)
def test_a_call_that_waits_for_another_connection_is_prepared_anew(
    kinds: list[Kind], calls: list[str], held: bool, places: int
) -> None:
    async def run() -> None:
        await scenario(kinds, calls, held=held, places=places)

    trio.run(run, **jumping())


def test_the_mode_of_a_tier_that_is_down_is_its_last_one() -> None:
    tier: Tier = settings_of(TIER).tier("working")

    async def run() -> None:
        server = Changing([Kind(False, remote="mine"), Kind(True)])
        link = Link("working", server.connect, timeout=PATIENT, random=lambda: 0.0)
        modes = Modes([tier], {"working": link})
        async with anyio.create_task_group() as tasks:
            await tasks.start(link.run)
            with pytest.raises(TierDown, match="still starting"):
                modes.of("working")
            await link.wait_up()
            first = modes.of("working")
            assert (first.native, first.remote, first.mount, first.risen) == (False, "mine", False, 1)
            modes.decide("working", mount=True)
            await anyio.sleep(LIFE + 0.1)
            assert link.status == "down"
            assert modes.of("working") == msgspec.structs.replace(first, mount=True)
            await link.wait_up()
            # The router tests anew whether it takes writes. Until then the tier stays a mount.
            assert modes.of("working").mount
            assert modes.is_mount(tier)
            now = modes.decide("working", mount=False)
            assert (now.native, now.remote, now.mount, now.risen) == (True, None, False, 2)
            assert not modes.is_mount(tier)
            tasks.cancel_scope.cancel()

    trio.run(run, **jumping())
