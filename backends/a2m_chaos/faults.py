"""The list of faults: what each does, in a sentence, and where it can be done.

What a fault does is `misbehaving`'s to say; this is the vocabulary that a plan is written in.
"""

from types import MappingProxyType
from typing import Final, Literal

import msgspec

# how clients reach a2m-chaos, and what is behind it
Front = Literal["stdio", "http"]
Behind = Literal["command", "url"]

# by name, so that a type checker sees that each of them is done
FaultName = Literal[
    "delay",
    "hang",
    "drop-answer",
    "answer-late",
    "apply-late",
    "answer-twice",
    "wrong-id",
    "tear-line",
    "log-line",
    "garbage-line",
    "huge-line",
    "huge-answer",
    "exit-before-work",
    "exit-after-work",
    "exit-after-answer",
    "restart-empty",
    "refuse-writes",
    "disk-full",
    "lose-write",
    "lose-at-crash",
    "alter-record",
    "forget-less",
    "http-500",
    "http-500-after-work",
    "http-429",
    "reset",
    "reset-after-work",
    "half-body",
]

# what a fault may be told beside when it applies
Setting = Literal["wait", "size", "field", "in_order", "answer"]

WRITES: Final = (
    *("memory/remember", "memory/forget", "memory/promote", "memory/consolidate", "memory/reinforce"),
    *("memory/session/close", "memory/summarize"),
)
# their answers hold records
READS: Final = ("memory/recall", "memory/timeline", "memory/fetch")

_BOTH: Final[tuple[Front, ...]] = ("stdio", "http")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault.

    Args:
        sentence: what it does, for people.
        over: the bindings on which there is such a thing.
        holds_back: the server gets the call late, or never.
        methods: those it can be done to, and is done to where a plan names none; empty for all.
        settings: what a plan may set for it.
        kills: the server dies of it, so it must be ours to start.
        memory: the plan must name the files in which the server keeps its memory.
    """

    name: FaultName
    sentence: str
    over: tuple[Front, ...] = _BOTH
    holds_back: bool = False
    methods: tuple[str, ...] = ()
    settings: tuple[Setting, ...] = ()
    kills: bool = False
    memory: bool = False


_ALL: Final = (
    # late, or never
    Kind(
        name="delay", holds_back=True, sentence="the call waits before it is carried out", settings=("wait", "in_order")
    ),
    Kind(name="hang", holds_back=True, sentence="the call is neither carried out nor answered", settings=("in_order",)),
    Kind(name="drop-answer", sentence="the call is carried out, and its answer lost"),
    Kind(
        name="answer-late",
        sentence="the call is carried out at once; its answer waits, past the deadline if that is shorter",
        settings=("wait", "in_order"),
    ),
    Kind(
        name="apply-late",
        holds_back=True,
        sentence="the call gets no answer, or an error (answer), and is carried out all the same, after a wait",
        settings=("wait", "in_order", "answer"),
    ),
    # answers that are not in order
    Kind(
        name="answer-twice", sentence="the answer is sent a second time, after a wait if one is set", settings=("wait",)
    ),
    Kind(name="wrong-id", sentence="the answer bears the id of another call"),
    Kind(
        name="tear-line",
        sentence="the answer comes in two pieces, with a wait between",
        over=("stdio",),
        settings=("wait",),
    ),
    Kind(name="log-line", sentence="a line of a log comes before the answer, on stdout", over=("stdio",)),
    Kind(
        name="garbage-line", sentence="a line that is neither JSON nor UTF-8 comes before the answer", over=("stdio",)
    ),
    Kind(name="huge-line", sentence="a line of this size comes before the answer", over=("stdio",), settings=("size",)),
    Kind(name="huge-answer", sentence="the answer is as long as this size", settings=("size",)),
    # the end of the server
    Kind(name="exit-before-work", sentence="the server dies, the call not carried out", settings=("wait",), kills=True),
    Kind(
        name="exit-after-work",
        sentence="the server dies, the call carried out, its answer lost",
        settings=("wait",),
        kills=True,
    ),
    Kind(name="exit-after-answer", sentence="the server dies once it has answered", settings=("wait",), kills=True),
    Kind(
        name="restart-empty",
        sentence="the server dies, its memory is moved away, and it starts again with none",
        settings=("wait",),
        kills=True,
        memory=True,
    ),
    # what is not kept
    Kind(
        name="refuse-writes", sentence="a write is answered with an error (-32603), and not carried out", methods=WRITES
    ),
    Kind(
        name="disk-full",
        sentence='a write is answered with -32603 and data.reason "disk full", and not carried out',
        methods=WRITES,
    ),
    Kind(name="lose-write", sentence="a write is acknowledged, and not carried out", methods=("memory/remember",)),
    Kind(
        name="lose-at-crash",
        sentence="a write is carried out and acknowledged, and gone with all after it when the server next dies",
        methods=WRITES,
        memory=True,
    ),
    Kind(
        name="alter-record",
        sentence="the first record that is written (memory/remember) or answered (the reads) has another field",
        methods=("memory/remember", *READS),
        settings=("field",),
    ),
    Kind(
        name="forget-less",
        sentence="of what is to be forgotten the last id stays, or all where no ids are given, and the answer hides it",
        methods=("memory/forget",),
    ),
    # HTTP's own
    Kind(name="http-500", sentence="the answer is HTTP 500, the call not carried out", over=("http",)),
    Kind(name="http-500-after-work", sentence="the answer is HTTP 500, the call carried out", over=("http",)),
    Kind(
        name="http-429",
        sentence="the answer is HTTP 429 with Retry-After (wait), the call not carried out",
        over=("http",),
        settings=("wait",),
    ),
    Kind(name="reset", sentence="the connection is reset, the call not carried out", over=("http",)),
    Kind(name="reset-after-work", sentence="the connection is reset, the call carried out", over=("http",)),
    Kind(name="half-body", sentence="the connection ends in the middle of the answer", over=("http",)),
)

KINDS: Final = MappingProxyType[str, Kind]({kind.name: kind for kind in _ALL})
