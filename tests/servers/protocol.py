"""What the protocol defines: methods and record fields of each capability, error codes, and the forms of values.

Fields and parameters beyond what is declared are ignored (§2); null is the same as absent.
"""

import json
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

PROTOCOL: Final = "a2m/0.1"

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
UNKNOWN_TIER: Final = -32002
CAPABILITY_NOT_SUPPORTED: Final = -32003
READ_ONLY: Final = -32004
QUOTA_EXCEEDED: Final = -32006
PROTOCOL_NOT_SUPPORTED: Final = -32007
EMBEDDING_MISMATCH: Final = -32008

# the methods each capability adds (§2)
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "core": ("memory/describe", "memory/remember", "memory/recall", "memory/timeline", "memory/forget"),
    "tiers": ("memory/promote", "memory/consolidate"),
    "salience": ("memory/reinforce",),
    "scopes": (),
    "sessions": ("memory/session/list", "memory/session/close"),
    "keys": ("memory/fetch",),
    "embeddings": (),
    "external": (),
    "events": ("memory/events", "memory/events/subscribe", "memory/events/unsubscribe"),
    "summarize": ("memory/summarize",),
    "prompt": (),
}
CAPABILITY_OF: Final = {method: capability for capability, methods in METHODS.items() for method in methods}
READS: Final = frozenset(
    {"memory/describe", "memory/recall", "memory/timeline", "memory/fetch", "memory/session/list"},
)

# nothing is stored that nests deeper, so that everything stored can be read again
MOST_NESTED: Final = 200

Record = dict[str, Any]
Params = Mapping[str, Any]


class Refused(Exception):
    """A call that is answered with an error: its code (§7) and one sentence."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Shape(NamedTuple):
    """What a value has to be, in words and as a predicate."""

    expected: str
    fits: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an integer that no double holds
        return False


def _is_storable(value: Any) -> bool:
    """Return whether it is an object that can be written as JSON: not deeper than MOST_NESTED, with finite numbers."""
    level, depth = [value], 0
    while level:
        inner = [each for each in level if isinstance(each, dict | list)]
        level = [child for each in inner for child in (each.values() if isinstance(each, dict) else each)]
        depth += 1
    if depth > MOST_NESTED or not isinstance(value, dict):
        return False
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


STRING: Final = Shape("a string", lambda value: isinstance(value, str))
NAME: Final = Shape("a string that is not empty", lambda value: isinstance(value, str) and value != "")
ID: Final = Shape("a string or a number", lambda value: isinstance(value, str) or _is_number(value))
FLAG: Final = Shape("true or false", lambda value: isinstance(value, bool))
COUNT: Final = Shape("an integer of 0 or more", lambda value: type(value) is int and value >= 0)
NUMBER: Final = Shape("a number", _is_number)
WEIGHT: Final = Shape("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
OBJECT: Final = Shape("an object", lambda value: isinstance(value, dict))
METADATA: Final = Shape(f"an object of finite numbers, at most {MOST_NESTED} levels deep", _is_storable)
LIST: Final = Shape("an array", lambda value: isinstance(value, list))
STRINGS: Final = Shape(
    "an array of strings", lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value)
)
VECTOR: Final = Shape(
    "an array of numbers that is not empty",
    lambda value: isinstance(value, list) and value != [] and all(map(_is_number, value)),
)

# fields of a record that a client may set (§3.1), by capability; created_at and the counters are the server's own
_FIELDS: Final[Mapping[str, Mapping[str, Shape]]] = {
    "core": {"id": NAME, "content": STRING, "role": STRING, "metadata": METADATA, "group": STRING},
    "tiers": {"tier": STRING},
    "salience": {"salience": WEIGHT},
    "scopes": {"owner": STRING},
    "sessions": {"session": STRING},
    "keys": {"key": NAME},
    "embeddings": {"embedding": VECTOR},
    "external": {"uri": STRING, "media_type": STRING},
}
CAPABILITIES: Final = tuple(_FIELDS)


def taken(holder: Params, name: str, shape: Shape, place: str = "") -> Any:
    """Return the value of that name, or None if it is absent. Raises Refused with INVALID_PARAMS."""
    value = holder.get(name)
    if value is None or shape.fits(value):
        return value
    raise Refused(INVALID_PARAMS, f"{place}{name}: expected {shape.expected}, got {_shown(value)}")


def required(holder: Params, name: str, shape: Shape) -> Any:
    """Return the value of that name. Raises Refused with INVALID_PARAMS."""
    value = taken(holder, name, shape)
    if value is None:
        raise Refused(INVALID_PARAMS, f"{name}: expected {shape.expected}, got nothing")
    return value


def fields_of(entry: Any, place: str, capabilities: Collection[str]) -> Record:
    """Return the fields of one entry of `records` that these capabilities keep, vectors as doubles (§4.2).

    Raises Refused with INVALID_PARAMS, or CAPABILITY_NOT_SUPPORTED for a tier without tiers.
    """
    if not isinstance(entry, dict):
        raise Refused(INVALID_PARAMS, f"{place}: expected an object, got {_shown(entry)}")
    if entry.get("tier") is not None and "tiers" not in capabilities:
        raise Refused(CAPABILITY_NOT_SUPPORTED, f"{place}.tier: this server does not implement tiers; leave it out")
    shapes = {name: shape for capability in capabilities for name, shape in _FIELDS[capability].items()}
    values = {name: taken(entry, name, shape, f"{place}.") for name, shape in shapes.items()}
    fields = {name: value for name, value in values.items() if value is not None}
    if not fields.keys() & {"content", "uri", "embedding"}:
        raise Refused(INVALID_PARAMS, f"{place}.content: expected a string, got nothing")
    if "embedding" in fields:
        fields["embedding"] = list(map(float, fields["embedding"]))
    return fields


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"
