"""a2m-router: the federated memory of AI agents.

    import a2m_router

    # or a2m_router.connect("http://127.0.0.1:8778/")
    async with a2m_router.open_federation("federation.toml") as memory:
        await memory.remember("the deploy key rotates every 90 days")

Every name here is imported at its first use, so that a program that only needs `a2m_router.protocol` does not load the
whole router.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from a2m_router import blocking
    from a2m_router.daemon.opening import open_federation
    from a2m_router.protocol.client.client import Unanswered
    from a2m_router.protocol.client.connecting import connect, connect_command
    from a2m_router.protocol.client.inputs import NewRecord, Prompt
    from a2m_router.protocol.client.memory import Memory
    from a2m_router.protocol.client.results import BadAnswer
    from a2m_router.protocol.wire.errors import A2MError

__all__ = [
    "A2MError",
    "BadAnswer",
    "Memory",
    "NewRecord",
    "Prompt",
    "Unanswered",
    "__version__",
    "blocking",
    "connect",
    "connect_command",
    "open_federation",
]

__version__ = "0.2.0"

_HOMES = {
    "A2MError": "a2m_router.protocol.wire.errors",
    "BadAnswer": "a2m_router.protocol.client.results",
    "Memory": "a2m_router.protocol.client.memory",
    "NewRecord": "a2m_router.protocol.client.inputs",
    "Prompt": "a2m_router.protocol.client.inputs",
    "Unanswered": "a2m_router.protocol.client.client",
    "connect": "a2m_router.protocol.client.connecting",
    "connect_command": "a2m_router.protocol.client.connecting",
    "open_federation": "a2m_router.daemon.opening",
}


def __getattr__(name: str) -> Any:
    if name == "blocking":
        return import_module("a2m_router.blocking")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
