"""Operations of clients, drawn from a seed; tests/support/histories.py defines them."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Final, TypeVar

from a2m_router.protocol.wire.timestamps import render
from tests.support import histories as h
from tests.support.federated import START

T = TypeVar("T")

_FIELDS: Final[dict[str, Sequence[Any]]] = {
    "content": ("beta", "beta gamma", "delta"),
    "role": ("user", "tool"),
    "session": ("s", "t"),
    "salience": (0.0, 0.5, 2.0),
    "uri": ("http://127.0.0.1:9/x", "u:1"),
    "media_type": ("text/plain",),
    "embedding": ([0.1, -0.0, 3.0], [1e-310, 0.2, 1.0], [1.0, 0.0, 0.0]),
    "created_at": (render(START), render(START + 5)),
}
_WHERES: Final[Sequence[dict[str, Any]]] = (
    {"session": "s"},
    {"session": "t"},
    {"role": "user"},
    {"m": 1},
    {"m": 2, "session": "s"},
    {"uri": "u:1"},
)
_KEYS: Final = ("k", "k/a", "x")


def draw_operation(chance: Random) -> h.Operation:
    """Draw any operation."""
    return chance.choices(_DRAWN, _WEIGHTS)[0](chance)


def draw_write(chance: Random) -> h.Operation:
    """Draw the write of a batch or of a group."""
    if chance.random() < 0.25:
        records = [h.Draft(_fields(chance), _metadata(chance)) for _ in range(chance.randint(2, 3))]
        return h.WriteGroup(records, _owner(chance), _some_tier(chance))
    drafts = [_draft(chance) for _ in range(chance.choice((1, 1, 2, 3)))]
    return h.Write(drafts, _owner(chance), chance.choice((None, "s")))


def _draft(chance: Random) -> h.Draft:
    kind = chance.random()
    rest: dict[str, Any] = {"fields": _fields(chance), "metadata": _metadata(chance), "tier": _some_tier(chance)}
    if kind < 0.5:
        return h.Draft(**rest, late=_maybe(chance, 0.3, lambda: chance.randrange(6)))
    if kind < 0.7:
        return h.Draft(**rest, id=chance.choice(list(h.POOL)))
    return h.Draft(**rest, key=chance.choice(_KEYS), known=chance.random() < 0.5)


def _edit(chance: Random) -> h.Operation:
    draft = h.Draft(_fields(chance), _metadata(chance), key=chance.choice(_KEYS), tier=_some_tier(chance))
    return h.Edit(draft, _owner(chance), chance.choice((0, 0, 0, 1)), chance.random() < 0.3)


def _read(chance: Random) -> h.Operation:
    if chance.random() < 0.5:
        return h.Read(chance.choice(("timeline", "recall")), _owner(chance), limit=100)
    return h.Read(
        chance.choice(("timeline", "recall")),
        _owner(chance),
        _some_tier(chance),
        chance.choice(({}, {}, *_WHERES)),
        chance.choice((None, None, "k", "k/a")),
        chance.choice((None, 1, 3, 100)),
        chance.random() < 0.5,
        chance.choice((None, "alpha", "alpha beta")),
        chance.choice((None, None, [1.0, 0.5, 0.0])),
    )


def _fetch(chance: Random) -> h.Operation:
    return h.Fetch(chance.choice(_KEYS), _owner(chance))


def _promote(chance: Random) -> h.Operation:
    return h.Promote(_which(chance), chance.choice(h.TIERS), _owner(chance), chance.choice((None, None, None, 1.0)))


def _forget(chance: Random) -> h.Operation:
    kind = chance.randrange(8)
    owner = _owner(chance)
    if kind == 0:
        return h.Forget(None, owner, chance.choice(_WHERES), _some_tier(chance))
    if kind == 1:
        return h.Forget(None, owner, tier=chance.choice(h.TIERS))
    if kind == 2:
        return h.Forget(None, owner, key_prefix=chance.choice(("k", "k/a")))
    if kind == 3:
        return h.Forget(None, owner, chance.choice(({}, *_WHERES)), query="beta")
    if kind == 4:
        return h.Forget(_which(chance), owner, chance.choice(_WHERES))
    return h.Forget(_which(chance), owner)


def _reinforce(chance: Random) -> h.Operation:
    return h.Reinforce(list(_which(chance)), chance.choice((0.5, 1.0, 2.0)))


def _consolidate(chance: Random) -> h.Operation:
    return h.Consolidate()


def _close(chance: Random) -> h.Operation:
    return h.Close(chance.choice(("s", "t")), _owner(chance))


_DRAWN: Final[Sequence[Callable[[Random], h.Operation]]] = (
    *(draw_write, _edit, _read, _fetch, _promote),
    *(_forget, _reinforce, _consolidate, _close),
)
_WEIGHTS: Final = (30, 3, 24, 6, 14, 11, 4, 3, 5)


def _fields(chance: Random) -> dict[str, Any]:
    return {name: chance.choice(values) for name, values in _FIELDS.items() if chance.random() < 0.3}


def _metadata(chance: Random) -> int | None:
    return _maybe(chance, 0.4, lambda: chance.randrange(len(h.METADATA)))


def _owner(chance: Random) -> str | None:
    return chance.choice(h.OWNERS)


def _some_tier(chance: Random) -> str | None:
    return _maybe(chance, 0.4, lambda: chance.choice(h.TIERS))


def _which(chance: Random) -> list[int]:
    # the latest records, which other clients work on, too
    return [-chance.randint(1, 16) for _ in range(chance.randint(1, 3))]


def _maybe(chance: Random, probability: float, draw: Callable[[], T]) -> T | None:
    return draw() if chance.random() < probability else None
