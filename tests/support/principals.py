"""A federation that principals share, and the calls by which one could learn of another's records."""

import json
from typing import Any, Final

from a2m_router.config.settings import Settings
from tests.support.federated import settings_of
from tests.support.two_worlds import SECLUDED, Call, TwoWorlds


def secluded(policy: str = "explicit", *, distil: bool = False) -> Settings:
    return settings_of(SECLUDED.replace("DISTIL", json.dumps(distil)), policy=policy)


def remember(*contents: str, **fields: Any) -> Call:
    """Return a call that writes one record for each content, all with the same further fields."""
    return Call("remember", {"records": [{"content": content, **fields} for content in contents]})


EVERYTHING: Final = (
    Call("describe", {}),
    Call("timeline", {"embeddings": True, "prompt": True}),
    Call("recall", {"limit": 100}),
    Call("recall", {"query": "alpha beta", "embedding": [1.0, 0.0], "limit": 100}),
    Call("session/list", {}),
    *(Call("fetch", {"key": key}) for key in ("k", "k/a", "x")),
    Call("summarize", {"query": "alpha", "tier": "working"}),
    Call("session/close", {"session": "s"}),
    Call("consolidate", {}),
    Call("forget", {"query": "alpha"}),
    Call("events", {"cursor": "<cursor:0>"}),
)


async def common_ground(worlds: TwoWorlds) -> None:
    """Fix the width of vectors, which is one for all, and let both principals read the end of the event log."""
    await worlds.alike("local", remember("alpha", id="n0", embedding=[1.0, 1.0]))
    await worlds.alike("a", Call("events", {}))
    await worlds.compare(Call("events", {}))
