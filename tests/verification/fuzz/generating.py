"""Generated messages: an endless stream of good and bad ones that follows from a seed.

They are written as JSON text, since no encoder would write many of them.
"""

import base64
import random
from collections.abc import Callable
from typing import Final

from msgspec import inspect

from a2m_router.protocol.wire import method_params
from a2m_router.protocol.wire.jsonrpc import MAX_DEPTH

# small, so that lines beyond it are cheap
MAX_MESSAGE: Final = 256 * 2**10
TIERS: Final = ("working", "episodic", "semantic", "procedural")
PARAMS: Final[dict[str, type[method_params.Params]]] = {
    "memory/describe": method_params.Describe,
    "memory/remember": method_params.Remember,
    "memory/recall": method_params.PromptedRecall,
    "memory/timeline": method_params.PromptedPages,
    "memory/forget": method_params.Forget,
    "memory/promote": method_params.Promote,
    "memory/consolidate": method_params.Consolidate,
    "memory/reinforce": method_params.Reinforce,
    "memory/fetch": method_params.Fetch,
    "memory/session/list": method_params.SessionList,
    "memory/session/close": method_params.SessionClose,
    "memory/events": method_params.Events,
    "memory/events/subscribe": method_params.Subscribe,
    "memory/events/unsubscribe": method_params.Unsubscribe,
    "memory/summarize": method_params.Summarize,
}
METHODS: Final = tuple(PARAMS)
# writes and reads are the most frequent methods
OFTEN: Final = tuple({"memory/remember": 8, "memory/recall": 6, "memory/timeline": 3}.get(name, 1) for name in METHODS)

Render = Callable[[random.Random], str]

WORDS: Final = (
    *("figs", "rome", "anna", "key", "tea", "river", "stone", "lamp", "north"),
    *("seven", "code", "moon", "wind", "salt", "bread", "the", "and", "of"),
)

NUMBERS: Final = (
    *("0", "-0", "-0.0", "1", "1.0", "2", "8", "0.5", "1e0", "1E+2", "5e-324", "1e-400", "1.7976931348623157e308"),
    *("1e400", "-1e400", "9007199254740993", "9223372036854775807", "9223372036854775808", "18446744073709551616"),
    *("-9223372036854775809", "1" + "0" * 400, "0." + "3" * 400, "1e99999999999999999999", "-1", "100000000"),
)
NO_JSON: Final = (
    *("NaN", "Infinity", "-Infinity", "01", "+1", ".5", "1.", "0x10", "'x'", "undefined", "True", '"\t"', ""),
)
STRINGS: Final = (
    *('""', '" "', '"\\u0000"', '"a\\u0000b"', '"\\ud83d\\ude00"', '"\\u00e9"', '"é漢😀"'),
    '"\\"\\\\\\/\\b\\f\\n\\r\\t"',
    *('"\\u2028"', '"\u2028\u2029\u202e"', '"%s%d{}"', '"\'; DROP TABLE records; --"', '"a* OR NEAR(b"', '"../../x"'),
    '"*"',
    *('"null"', '"\ufeff"', '"\\ufffe\\uffff"', '"a/b"', '"a/"', '"/"', '"e\u0301"', '"ﬁﬀ İ ß"', '"1"', '"-"'),
)
HALVES: Final = ('"\\ud800"', '"x\\udfffy"', '"\\ud83d\\ud83d\\ude00"', '"\\ude00\\ud83d"')
IDS_WRONG: Final = ("true", "[1]", '{"a":1}', "[]", "{}", "false")
INSTANTS: Final = (
    *('"2026-01-01T00:00:00.000Z"', '"2026-02-29T00:00:00Z"', '"0001-01-01T00:00:00.000Z"'),
    *('"9999-12-31T23:59:59.999Z"', '"2026-01-01T00:00:00+02:00"', '"2026-06-30T23:59:60Z"'),
    *('"yesterday"', '"10000-01-01T00:00:00Z"', '"2026-01-01"'),
)


def _one_of(*texts: str) -> Render:
    return lambda chance: chance.choice(texts)


def _words(chance: random.Random) -> str:
    size = chance.choices((1, 4, 12, 200, 5_000, 60_000), (30, 40, 25, 3, 0.5, 0.05))[0]
    return '"' + " ".join(chance.choices(WORDS, k=size)) + '"'


def _numbered(prefix: str, count: int) -> Render:
    return lambda chance: f'"{prefix}{chance.randrange(count)}"'


# plausible values, by the name of the parameter or the field
NAMED: Final[dict[str, Render]] = {
    "id": _numbered("r", 200),
    "ids": _numbered("r", 200),
    "tier": _one_of(*(f'"{tier}"' for tier in TIERS)),
    "into": _one_of('"semantic"', '"procedural"', '"episodic"'),
    "key": _numbered("k/", 40),
    "key_prefix": _one_of('"k"', '"k/"', '"k/1"', '"none/"'),
    "session": _numbered("s", 6),
    "owner": _one_of('"fuzz"', '"anna"', "null", "null", "null"),
    "group": _numbered("g", 10),
    "role": _one_of('"user"', '"assistant"', '"tool"', '"memory"', '"bystander"'),
    "created_at": _one_of(*INSTANTS),
    "style": _one_of('"facts"', '"transcript"', '"auto"'),
    "method": _one_of('"template"', '"none"', '"model"'),
    "kinds": _one_of('"written"', '"forgotten"', '"promoted"', '"consolidated"', '"session_closed"', '"other"'),
    "protocol": _one_of('"a2m/0.1"', '"a2m/0.1.7"', '"a2m/0.2"', '"a2m/1"'),
    "cursor": lambda chance: (
        f'"{base64.urlsafe_b64encode(chance.randbytes(chance.choice((0, 8, 16, 24, 33)))).decode()}"'
    ),
    "limit": _one_of("0", "1", "2", "8", "100", "1000", "1001"),
    "budget": _one_of("0", "10", "1000"),
    "embedding": _one_of("0.5", "-0.0", "1", "1e-300", "0"),
    "salience": _one_of("0", "1", "2.5", "1e300"),
}


def _any_text(chance: random.Random) -> str:
    if chance.random() < 0.01:
        return chance.choice(HALVES)
    return chance.choice(STRINGS) if chance.random() < 0.5 else _words(chance)


def _any_value(chance: random.Random, depth: int = 0) -> str:
    kind = chance.random()
    if kind < 0.3:
        return chance.choice(NUMBERS)
    if kind < 0.6 or depth > 3:
        return _any_text(chance)
    if kind < 0.72:
        return chance.choice(("null", "true", "false", "[]", "{}"))
    if kind < 0.84:
        return "[" + ",".join(_any_value(chance, depth + 1) for _ in range(chance.randrange(4))) + "]"
    if kind < 0.985:
        return _any_object(chance, depth + 1)
    if kind < 0.99:
        return chance.choice(NO_JSON)
    return _nested(chance)


def _any_object(chance: random.Random, depth: int = 0) -> str:
    # a name may occur twice
    names = [chance.choice(('"a"', '"b"', '"id"', '"n"', _any_text(chance))) for _ in range(chance.randrange(4))]
    return "{" + ",".join(f"{name}:{_any_value(chance, depth)}" for name in names) + "}"


def _nested(chance: random.Random) -> str:
    levels = chance.choice((MAX_DEPTH - 4, MAX_DEPTH - 3, MAX_DEPTH - 2, MAX_DEPTH - 1, MAX_DEPTH, 1_000, 20_000))
    opening, closing = chance.choice((("[", "]"), ('{"a":', "}"), ('[{"]":', "}]")))
    times = levels // (opening.count("[") + opening.count("{"))
    return opening * times + chance.choice(("1", '"\\"]"', "[]")) + closing * times


def _where(chance: random.Random) -> str:
    if chance.random() < 0.003:
        return "{" + ",".join(f'"n{number}":{chance.choice(NUMBERS[:8])}' for number in range(3_000)) + "}"
    names = chance.sample(
        ("session", "key", "id", "role", "owner", "group", "n", "a", "tier", "salience"), chance.randrange(3)
    )
    return "{" + ",".join(f'"{name}":{NAMED.get(name, _any_value)(chance)}' for name in names) + "}"


def _renders(type: inspect.Type, name: str) -> Render:
    """Return a function that writes random values of this type, for a field of this name."""
    match type:
        case inspect.UnionType(types=types):
            choices = [_renders(one, name) for one in types if not isinstance(one, inspect.NoneType)]
            return lambda chance: chance.choice(choices)(chance) if chance.random() < 0.95 else "null"
        case inspect.StructType():
            return _renders_struct(type)
        case inspect.ListType(item_type=item) | inspect.CollectionType(item_type=item):
            one = _renders(item, name)
            # most vectors have the same width, so that some can be compared
            sizes = (3, 3, 3, 3, 3, 3, 3, 2, 4, 0) if name == "embedding" else (0, 1, 1, 1, 2, 3, 5)
            return lambda chance: "[" + ",".join([one(chance) for _ in range(chance.choice(sizes))]) + "]"
        case inspect.DictType():
            return _where
        case inspect.RawType():
            return _any_object
        case inspect.BoolType():
            return _one_of("true", "false")
        case inspect.StrType():
            return NAMED.get(name, _words)
        case inspect.IntType() | inspect.FloatType():
            return NAMED.get(name, _one_of(*NUMBERS[:9]))
        case _:
            return _any_value


def _renders_struct(type: inspect.StructType) -> Render:
    members = [
        (f'"{field.encode_name}":', 0.97 if field.required else 0.25, _renders(field.type, field.encode_name))
        for field in type.fields
    ]

    def render(chance: random.Random) -> str:
        parts = []
        for name, often, value in members:
            drawn = chance.random()
            if drawn < often or (name == '"content":' and drawn < 0.95):
                parts.append(name + (_any_value(chance) if drawn < often * 0.04 else value(chance)))
                if drawn < 0.004:
                    parts.append(name + value(chance))
        if chance.random() < 0.03:
            parts.append(f"{_any_text(chance)}:{_any_value(chance)}")
        return "{" + ",".join(parts) + "}"

    return render


RENDERS: Final = {name: _renders(inspect.type_info(type), "") for name, type in PARAMS.items()}


class Messages:
    """An endless stream of messages that follows from a source of chance. A message may contain line breaks."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._number = 0
        self._last = b"{}"

    def next(self) -> bytes:
        """Return the next message, without a newline at its end."""
        chance = self._chance
        self._number += 1
        kind = chance.random()
        if kind < 0.72:
            self._last = self._call()
            return self._last
        if kind < 0.78:
            return self._reply().encode()
        if kind < 0.93:
            return self._mutated(self._call())
        if kind < 0.96:
            return chance.randbytes(chance.choice((1, 2, 7, 40, 300)))
        if kind < 0.98:
            return chance.choice(
                (b"", b" ", b"\r", b"\t \r", b"\n", b"\r\n\r\n", b"\x00", b"\x0c", b"null", b"[]", b"{}", b"1")
            )
        if kind < 0.999:
            return chance.choice((_any_value(chance), f"[{_any_value(chance)}]", _nested(chance))).encode()
        padding = b" " * chance.choice((MAX_MESSAGE - 200, MAX_MESSAGE, MAX_MESSAGE + 1))
        return chance.choice((b"", self._call())) + padding

    def _call(self) -> bytes:
        chance = self._chance
        method = chance.choices(METHODS, OFTEN)[0]
        members = ['"jsonrpc":"2.0"', f'"method":"{method}"']
        odd = chance.random()
        if odd > 0.05:
            members.append(f'"id":{self._id()}')
        if odd < 0.97:
            members.append(f'"params":{RENDERS[method](chance)}')
        if 0.06 < odd < 0.1:
            members.append(
                f'"{chance.choice(("id", "jsonrpc", "method", "params", "result", "error", "x"))}":{_any_value(chance)}'
            )
        elif 0.1 < odd < 0.13:
            del members[chance.randrange(len(members))]
        elif 0.13 < odd < 0.15:
            members[0] = f'"jsonrpc":{chance.choice(("2.0", "2", "1.0", _any_text(chance)))}'
        elif 0.15 < odd < 0.17:
            members[1] = f'"method":{chance.choice(("null", "7", "memory/nothing", _any_text(chance)))}'
        if odd > 0.8:
            chance.shuffle(members)
        between = chance.choice((",", ",", ",", " , ", ",\t", ",\r")) if odd > 0.5 else ","
        return ("{" + between.join(members) + "}").encode()

    def _id(self) -> str:
        chance, number = self._chance, self._number
        drawn = chance.random()
        if drawn < 0.5:
            return str(number)
        if drawn < 0.8:
            return f'"{number}"'
        if drawn < 0.97:
            return chance.choice(
                (
                    f"{number}.5",
                    f"-{number}",
                    f"{number}e2",
                    f'"\\u0041{number}"',
                    f'"é{number}\\n"',
                    f"{number}" + "0" * 30,
                )
            )
        return chance.choice(
            ("null", _any_text(chance), chance.choice(NUMBERS), chance.choice(IDS_WRONG), chance.choice(NO_JSON))
        )

    def _reply(self) -> str:
        chance = self._chance
        code = chance.choice(("-32602", "-32603", "0", "1.5", chance.choice(NUMBERS)))
        error = f'{{"code":{code},"message":{_any_text(chance)},"data":{_any_value(chance)}}}'
        told = chance.choice((f'"result":{_any_value(chance)}', f'"error":{error}', f'"error":{_any_value(chance)}'))
        return f'{{"jsonrpc":"2.0","id":{self._id()},{told}}}'

    def _mutated(self, message: bytes) -> bytes:
        chance = self._chance
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            message = chance.choice(MUTATIONS)(chance, message, self._last)
        return message


Mutation = Callable[[random.Random, bytes, bytes], bytes]


def _flip(chance: random.Random, message: bytes, _: bytes) -> bytes:
    flipped = bytearray(message or b" ")
    flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
    return bytes(flipped)


def _cut(chance: random.Random, message: bytes, _: bytes) -> bytes:
    return message[: chance.randint(0, len(message))]


def _drop(chance: random.Random, message: bytes, _: bytes) -> bytes:
    start = chance.randint(0, len(message))
    return message[:start] + message[start + chance.choice((1, 2, 9)) :]


def _duplicate(chance: random.Random, message: bytes, _: bytes) -> bytes:
    start, end = sorted((chance.randint(0, len(message)), chance.randint(0, len(message))))
    return message[:end] + message[start:]


def _insert(chance: random.Random, message: bytes, _: bytes) -> bytes:
    place = chance.randint(0, len(message))
    odd = (
        *(b"\r", b"\n", b"\x00", b"\\", b'"', b"{", b"}", b"[", b",", b"\xff", b"\xed\xa0\x80", b"\\ud800"),
        *(b"\x1b[2J", b"1e400"),
    )
    return message[:place] + chance.choice((*odd, chance.randbytes(4))) + message[place:]


def _splice(chance: random.Random, message: bytes, other: bytes) -> bytes:
    return message[: chance.randint(0, len(message))] + other[chance.randint(0, len(other)) :]


def _encoded(chance: random.Random, message: bytes, _: bytes) -> bytes:
    text = message.decode("utf-8", "replace")
    encoding = chance.choice(("utf-16", "utf-16-le", "utf-16-be", "utf-32", "latin-1", "cp1252", "utf-8-sig", "utf-7"))
    return text.encode(encoding, "replace")


def _overlong(chance: random.Random, message: bytes, _: bytes) -> bytes:
    return message.replace(
        *chance.choice(((b"/", b"\xc0\xaf"), (b'"', b"\xc0\xa2"), (b"a", b"\xe0\x81\xa1"), (b"e", b"\xf5\x80\x80\x80")))
    )


def _requoted(chance: random.Random, message: bytes, _: bytes) -> bytes:
    return message.replace(b'"', chance.choice((b"'", b"`", b'\\"', b"\xe2\x80\x9c", b'""')))


def _spread(chance: random.Random, message: bytes, _: bytes) -> bytes:
    return message.replace(b",", chance.choice((b",\r", b",\n", b"\r\n,", b",,", b";", b" , ")), chance.choice((1, -1)))


MUTATIONS: Final[tuple[Mutation, ...]] = (
    *(_flip, _flip, _cut, _drop, _duplicate, _insert, _insert, _splice, _encoded, _overlong, _requoted, _spread),
)


def pieces_of(stream: bytes, chance: random.Random) -> list[bytes]:
    """Cut a stream into chunks at random."""
    cuts = sorted(chance.randint(0, len(stream)) for _ in range(chance.choice((0, 0, 1, 2, 5))))
    return [stream[start:end] for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
