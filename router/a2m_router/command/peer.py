"""A connection that keeps the bytes of the last result.

So the command prints or copies exactly what the server returned, with fields that this client does not know.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import anyio
from msgspec import Raw

from a2m_router.protocol.client.client import Peer, Settled
from a2m_router.protocol.client.results import read

T = TypeVar("T")


class PatientPeer:
    """A `Peer` that forwards to another one. `last` is the last result in bytes; `timeout` holds for `read`."""

    def __init__(self, peer: Peer, timeout: float) -> None:
        self.last = b"{}"
        self._peer = peer
        self._timeout = timeout

    @property
    def lost(self) -> anyio.Event:
        return self._peer.lost

    @property
    def reason(self) -> str | None:
        return self._peer.reason

    @property
    def heard(self) -> float:
        return self._peer.heard

    async def call(
        self,
        method: str,
        params: Any,
        *,
        timeout: float | None,
        on_unsettled: Callable[[Settled], None] | None = None,
    ) -> Raw:
        raw = await self._peer.call(method, params, timeout=timeout, on_unsettled=on_unsettled)
        self.last = bytes(raw)
        return raw

    async def read(self, method: str, type: type[T], **params: Any) -> T:
        """Call a method, and return its result as `type`. Parameters that are None are left out."""
        given = {name: value for name, value in params.items() if value is not None}
        return read(method, await self.call(method, given, timeout=self._timeout), type)
