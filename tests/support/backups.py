"""Backups of a federation in this process."""

from pathlib import Path
from typing import Any, Final

import msgspec

from tests.support.federated import Trial

METHOD: Final = "store/backup"


async def made(fed: Trial, folder: Path) -> dict[str, Any]:
    """Make a backup to its end; return the state that the last call returned."""
    state = await asked(fed, path=str(folder))
    while not state["done"]:
        state = await asked(fed, backup=state["backup"])
    return state


async def asked(fed: Trial, **params: Any) -> dict[str, Any]:
    """Call `store/backup`; return its result."""
    state: dict[str, Any] = msgspec.json.decode(await fed.client.call(METHOD, params, timeout=None))
    return state
