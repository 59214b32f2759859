"""An a2m-store that declares only the protocol's core, to measure the cost of lifting with the same engine.

python -m bench.core_store PATH
"""

import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.server.serving import run, serve
from a2m_router.protocol.wire.capabilities import METHODS
from a2m_store.server import Server, serving
from a2m_store.store import Store

_TOLD: Final = {"protocol": "a2m/0.1", "name": "core-store", "capabilities": ["core"], "methods": METHODS["core"]}


class CoreStore:
    """The store's server with another description of itself."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        request = msgspec.json.decode(message)
        if request.get("method") == "memory/describe":
            return msgspec.json.encode({"jsonrpc": "2.0", "id": request.get("id"), "result": _TOLD})
        return await self._server(message, caller)

    async def describe(self, _caller: Caller) -> Mapping[str, Any]:
        return _TOLD


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[CoreStore]:
    store = Store(path, clock=lambda: time.time_ns() // 1_000_000)
    try:
        async with serving(store) as server:
            yield CoreStore(server)
    finally:
        store.close()


if __name__ == "__main__":
    sys.exit(run("core-store", partial(serve, "core-store", opened(Path(sys.argv[1])), None), (), log_level="info"))
