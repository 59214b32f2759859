"""Replacements: the servers behind the tiers, and failures that keep a write pending."""

import errno
from collections.abc import Awaitable, Callable
from typing import Final

import anyio
import msgspec
import pytest

from a2m_router.catalog.group_commit import GroupCommit
from a2m_router.protocol.wire.errors import DISK_FULL, A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error
from tests.support.federated import ALL_NATIVE, Foreign, Mix, method_of

SERVERS: Final[dict[str, Mix]] = {
    "native": ALL_NATIVE,
    "lesser": {"working": Foreign(), "semantic": Foreign()},
    "a lesser one above": {"working": Foreign()},
    "a lesser one below": {"semantic": Foreign()},
}
servers_of_all_kinds = pytest.mark.parametrize("servers", SERVERS.values(), ids=SERVERS)
native_and_lesser = pytest.mark.parametrize("servers", [SERVERS["native"], SERVERS["lesser"]], ids=["native", "lesser"])


class Trouble:
    """Weather in which the semantic tier cannot carry out a pending write, while the trouble lasts.

    It does not take the new record or, where the old one is deleted first, does not delete the old one.
    """

    def __init__(self, what: str, servers: Mix) -> None:
        self._what = what
        self._method = "memory/forget" if servers else "memory/remember"
        self._is_over: anyio.Event | None = None

    def begin(self) -> None:
        self._is_over = anyio.Event()

    def end(self) -> None:
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None

    async def __call__(self, tier: str, message: bytes, go_on: Callable[[], Awaitable[bytes | None]]) -> bytes | None:
        if self._is_over is None or (tier, method_of(message)) != ("semantic", self._method):
            return await go_on()
        if self._what == "hangs":
            await self._is_over.wait()
            return None
        refusal = A2MError(Code.INTERNAL_ERROR, "not today")
        if self._what == "is out of room":
            refusal = A2MError(Code.INTERNAL_ERROR, "the disk is full", {"reason": DISK_FULL})
        return render_error(msgspec.Raw(msgspec.json.encode(msgspec.json.decode(message)["id"])), refusal)


async def fail(syncing: GroupCommit) -> None:
    raise OSError(errno.EIO, "the disk has failed")
