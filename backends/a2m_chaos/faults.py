"""The list of faults: what each does, in a sentence, and where it is possible.

This is the vocabulary of a plan. `misbehaving` implements the faults.
"""

from types import MappingProxyType
from typing import Final, Literal

import msgspec

# how clients reach a2m-chaos, and how it reaches the server
Front = Literal["stdio", "http"]
Behind = Literal["command", "url"]

# a Literal, so that the type checker finds a fault that `misbehaving` does not implement
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

# the settings of a fault besides when it applies
Setting = Literal["wait", "size", "field", "in_order", "answer"]

WRITES: Final = (
    *("memory/remember", "memory/forget", "memory/promote", "memory/consolidate", "memory/reinforce"),
    *("memory/session/close", "memory/summarize"),
)
# the methods whose results hold records
READS: Final = ("memory/recall", "memory/timeline", "memory/fetch")

_BOTH: Final[tuple[Front, ...]] = ("stdio", "http")


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault.

    Args:
        name: its name in a plan.
        sentence: what it does, for the log and --list.
        over: the bindings on which it is possible.
        holds_back: the server gets the call late, or never.
        methods: the methods that it can apply to, and the default of `method`; empty for all methods.
        settings: the settings that a plan may give it.
        kills: it kills the server, so a2m-chaos must have started the server.
        memory: the plan must name the files of the server's memory.
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
    Kind(name="drop-answer", sentence="the call is carried out, and its answer is lost"),
    Kind(
        name="answer-late",
        sentence="the call is carried out immediately; its answer waits, past the deadline if the wait is longer",
        settings=("wait", "in_order"),
    ),
    Kind(
        name="apply-late",
        holds_back=True,
        sentence="the call gets no answer, or an error (answer); after a wait it is carried out nevertheless",
        settings=("wait", "in_order", "answer"),
    ),
    # wrong or damaged answers
    Kind(
        name="answer-twice", sentence="the answer is sent a second time, after a wait if one is set", settings=("wait",)
    ),
    Kind(name="wrong-id", sentence="the answer has the id of another call"),
    Kind(
        name="tear-line",
        sentence="the answer is sent in two pieces, with a wait in between",
        over=("stdio",),
        settings=("wait",),
    ),
    Kind(name="log-line", sentence="a log line is sent on stdout before the answer", over=("stdio",)),
    Kind(
        name="garbage-line", sentence="a line that is neither JSON nor UTF-8 is sent before the answer", over=("stdio",)
    ),
    Kind(
        name="huge-line", sentence="a line of this size is sent before the answer", over=("stdio",), settings=("size",)
    ),
    Kind(name="huge-answer", sentence="the answer has this size", settings=("size",)),
    # the end of the server
    Kind(
        name="exit-before-work",
        sentence="the server dies before it carries out the call",
        settings=("wait",),
        kills=True,
    ),
    Kind(
        name="exit-after-work",
        sentence="the call is carried out, then the server dies, and the answer is lost",
        settings=("wait",),
        kills=True,
    ),
    Kind(name="exit-after-answer", sentence="the server dies after its answer", settings=("wait",), kills=True),
    Kind(
        name="restart-empty",
        sentence="the server dies, its memory is moved away, and it starts again with an empty one",
        settings=("wait",),
        kills=True,
        memory=True,
    ),
    # writes and records that are not kept
    Kind(
        name="refuse-writes", sentence="a write is rejected with an error (-32603), and not carried out", methods=WRITES
    ),
    Kind(
        name="disk-full",
        sentence='a write is rejected with -32603 and data.reason "disk full", and not carried out',
        methods=WRITES,
    ),
    Kind(name="lose-write", sentence="a write is acknowledged, but not carried out", methods=("memory/remember",)),
    Kind(
        name="lose-at-crash",
        sentence="a write is acknowledged; when the server next dies, this write and all later ones are lost",
        methods=WRITES,
        memory=True,
    ),
    Kind(
        name="alter-record",
        sentence="a field of the first record that is written (memory/remember) or returned (reads) is changed",
        methods=("memory/remember", *READS),
        settings=("field",),
    ),
    Kind(
        name="forget-less",
        sentence="the record of the last id is kept, or every record if the call has no ids; the answer hides that",
        methods=("memory/forget",),
    ),
    # faults of HTTP
    Kind(name="http-500", sentence="the answer is HTTP 500; the call is not carried out", over=("http",)),
    Kind(name="http-500-after-work", sentence="the answer is HTTP 500; the call is carried out", over=("http",)),
    Kind(
        name="http-429",
        sentence="the answer is HTTP 429 with Retry-After (wait); the call is not carried out",
        over=("http",),
        settings=("wait",),
    ),
    Kind(name="reset", sentence="the connection is reset; the call is not carried out", over=("http",)),
    Kind(name="reset-after-work", sentence="the connection is reset; the call is carried out", over=("http",)),
    Kind(name="half-body", sentence="the connection is closed in the middle of the answer", over=("http",)),
)

KINDS: Final = MappingProxyType[str, Kind]({kind.name: kind for kind in _ALL})
