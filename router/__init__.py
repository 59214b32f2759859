"""a2m-router: the federated memory of AI agents.

    import router

    async with router.open_federation("federation.toml") as memory:  # or router.connect("http://127.0.0.1:8778/")
        await memory.remember("the deploy key rotates every 90 days")

What is offered here is loaded when it is first used, so that a program that only needs `router.a2m` does not load the
whole router.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from router import blocking
    from router.a2m.answers import BadAnswer
    from router.a2m.client import Unanswered
    from router.a2m.connecting import connect, connect_command
    from router.a2m.errors import A2MError
    from router.a2m.memory import Memory
    from router.a2m.questions import NewRecord, Prompt
    from router.opening import open_federation

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

__version__ = "0.1.0"

_HOMES = {
    "A2MError": "router.a2m.errors",
    "BadAnswer": "router.a2m.answers",
    "Memory": "router.a2m.memory",
    "NewRecord": "router.a2m.questions",
    "Prompt": "router.a2m.questions",
    "Unanswered": "router.a2m.client",
    "connect": "router.a2m.connecting",
    "connect_command": "router.a2m.connecting",
    "open_federation": "router.opening",
}


def __getattr__(name: str) -> Any:
    if name == "blocking":
        return import_module("router.blocking")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
