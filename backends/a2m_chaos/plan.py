"""The plan: the faults, and when they apply. A TOML file, read into frozen settings; an error names its place.

    seed = 7
    memory = ["notes.db*"]           # the files of the server's memory; patterns, below this file's folder
    counts = "faults.counts"         # keeps the counts over a restart; without it, each start counts from 0

    [[fault]]
    do = "exit-after-work"           # a2m-chaos --list
    method = "memory/remember"       # absent: every method that the fault can apply to
    having = "pears"                 # only calls whose message contains this
    after = 3                        # skip the first 3 such calls,
    every = 2                        # then apply to every second one,
    times = 5                        # at most 5 times,
    chance = 0.5                     # and each time only with this probability
    from = "10s"                     # not earlier after the start than this
    until = "1m"                     # and not later
    while = "disk-is-full"           # only while this file exists
    wait = "2s"                      # for faults that take time

All conditions of a fault must hold. If several faults apply to a call, the first one is used. The plan, the file of
counts and the files of `while` are never part of the server's memory, even if a pattern matches them.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

import msgspec

from a2m_chaos.faults import KINDS, Behind, Front, Kind, Setting
from a2m_router.config.toml_table import Table, quoted, suggestion
from a2m_router.protocol.wire.capabilities import CAPABILITY_OF

Answer = Literal["nothing", "error"]
Field = Literal["content", "metadata"]

_SETTINGS: Final[tuple[Setting, ...]] = ("wait", "size", "field", "in_order", "answer")
# longer than a message may be by default (64 MiB)
_HUGE: Final = 65 * 2**20
_WAIT: Final = 1.0
_WAITS: Final = {"apply-late": 120.0, "answer-twice": 0.0}
_FIELD: Final[Field] = "content"
_ANSWER: Final[Answer] = "nothing"
# a server on a pipe works in order: a late call there delays all calls behind it
_IN_ORDER: Final = ("delay", "apply-late")


class PlanError(ValueError):
    """The plan has mistakes: one sentence on each line, with the place of the mistake."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One `[[fault]]`: what it does, and to which calls."""

    do: str  # one of KINDS
    # when it applies
    methods: tuple[str, ...] = ()  # empty: all methods
    having: bytes = b""
    after: int = 0
    every: int = 1
    times: int | None = None
    chance: float = 1.0
    begins: float = 0.0  # seconds since the start
    ends: float | None = None
    switch: Path | None = None
    # its settings
    wait: float = _WAIT  # seconds
    size: int = _HUGE  # bytes
    field: Field = _FIELD
    answer: Answer = _ANSWER
    in_order: bool = False  # later calls wait until the fault is complete


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A whole file. `memory` are patterns of files below `folder`, where the plan is."""

    faults: tuple[Fault, ...]
    seed: int = 0
    memory: tuple[str, ...] = ()
    counts: Path | None = None
    folder: Path = Path()


def read_plan(path: Path, *, front: Front, behind: Behind) -> Plan:
    """Return the plan in a file, for these ways to reach a2m-chaos and the server. Raises PlanError."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        reason = getattr(problem, "strerror", None) or "it is not valid UTF-8"
        raise PlanError(f"{path}: cannot be read: {reason}") from None
    try:
        return parse_plan(text, base=path.absolute().parent, front=front, behind=behind)
    except PlanError as mistakes:
        raise PlanError("\n".join(f"{path}: {line}" for line in str(mistakes).splitlines())) from None


def parse_plan(text: str, *, base: Path = Path(), front: Front = "stdio", behind: Behind = "command") -> Plan:
    """Return the plan in a text; its paths are relative to `base`. Raises PlanError with all mistakes."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as problem:
        raise PlanError(f"not valid TOML: {problem}") from None
    mistakes: list[str] = []
    table = Table(content, mistakes)
    memory = table.texts("memory", ())
    for position, pattern in enumerate(memory):
        wrong = _wrong_with(pattern)
        if wrong:
            table.note("memory", wrong, item=position)
    counts = table.path("counts", None, base)
    reading = _Reading(base, front, behind, has_memory=bool(memory))
    plan = Plan(
        faults=tuple(reading.fault(each) for each in table.tables("fault")),
        seed=table.integer("seed", 0, least=0),
        memory=memory,
        counts=counts,
        folder=base,
    )
    table.refuse_the_rest()
    if mistakes:
        raise PlanError("\n".join(mistakes))
    return plan


def defaults_of(kind: Kind) -> list[str]:
    """Return the settings of a kind of fault with their defaults, as a plan would have them."""
    wait = _WAITS.get(kind.name, _WAIT)
    written: Mapping[Setting, str] = {
        "wait": f'"{wait:g}s"' if wait else "none",
        "size": f'"{_HUGE // 2**20}MiB"',
        "field": f'"{_FIELD}"',
        "answer": f'"{_ANSWER}"',
        "in_order": "true on stdio" if kind.name in _IN_ORDER else "false",
    }
    return [f"{setting} = {written[setting]}" for setting in kind.settings]


def files_of(plan: Plan) -> list[Path]:
    """Return the files that belong to the plan: the file of counts, and the files of `while`."""
    named = (plan.counts, *(fault.switch for fault in plan.faults))
    return [path for path in named if path is not None]


def _wrong_with(pattern: str) -> str:
    """Return the mistake in a pattern of the server's files; empty if there is none.

    a2m-chaos moves, deletes and writes these files, so a pattern must not leave the plan's folder.
    """
    path = Path(pattern)
    if not pattern:
        return "must not be empty"
    if path.is_absolute():
        return f"{quoted(pattern)} is absolute; expected a path relative to this file"
    if ".." in path.parts or path.parts[:1] == ("~",):
        return f"{quoted(pattern)} leads out of this file's folder; the server's files must be in it"
    if not path.parts:
        return f'{quoted(pattern)} is this file\'s folder; expected files in it, such as "notes.db*"'
    if any("**" in part and part != "**" for part in path.parts):
        return f'{quoted(pattern)}: "**" matches folders, and must stand alone between two slashes'
    return ""


class _Reading:
    """The reader of faults, for one combination of bindings."""

    def __init__(self, base: Path, front: Front, behind: Behind, *, has_memory: bool) -> None:
        self._base = base
        self._front = front
        self._behind = behind
        self._has_memory = has_memory

    def fault(self, table: Table) -> Fault:
        """Return one `[[fault]]`. Its mistakes are collected by its table."""
        name = table.text("do", "")
        kind = KINDS.get(name)
        if name and kind is None:
            table.note("do", f"there is no fault {quoted(name)}{suggestion(name, KINDS, 'the faults are')}")
        elif kind is None and not table.has("do"):
            table.note_here(f"do is required, the name of the fault; the faults are {', '.join(KINDS)}")
        if kind is not None:
            self._refuse_elsewhere(table, kind)
        switch = table.path("while", None, self._base)
        having = table.text("having", "")
        begins = table.duration("from", 0.0, example="10s")
        ends = table.duration("until", None, example="1m")
        if ends is not None and ends <= begins:
            table.note("until", "must be later than from")
        chance = table.number("chance", 1.0)
        if chance > 1:
            table.note("chance", f"must be a probability from 0 to 1, got {chance:g}")
        fault = Fault(
            do=name,
            methods=_methods(table, kind),
            having=having.encode(),
            after=table.integer("after", 0, least=0),
            every=table.integer("every", 1, least=1),
            times=table.integer("times", None, least=1),
            chance=chance,
            begins=begins,
            ends=ends,
            switch=switch,
            wait=table.duration("wait", _WAITS.get(name, _WAIT), example="2s"),
            size=table.size("size", _HUGE),
            field=table.choice("field", ("content", "metadata"), _FIELD),
            answer=table.choice("answer", ("nothing", "error"), _ANSWER),
            in_order=table.flag("in_order", name in _IN_ORDER and self._front == "stdio"),
        )
        if kind is not None:
            _refuse_settings_of_others(table, kind)
        table.refuse_the_rest()
        return fault

    def _refuse_elsewhere(self, table: Table, kind: Kind) -> None:
        if self._front not in kind.over:
            here, there = ("stdio", "HTTP (--http)") if self._front == "stdio" else ("HTTP", "stdio")
            table.note("do", f"{quoted(kind.name)} is a fault of {there}, but a2m-chaos serves {here} here")
        if kind.kills and self._front == "stdio" and table.has("wait"):
            table.note(
                "wait", "has no meaning on stdio: the client that started this server decides when to restart it"
            )
        if kind.kills and self._behind == "url":
            table.note("do", f"{quoted(kind.name)} kills the server, which is not possible with --url")
        if kind.memory and self._behind == "url":
            table.note("do", f"{quoted(kind.name)} needs a server that a2m-chaos starts, not one with --url")
        elif kind.memory and not self._has_memory:
            table.note("do", f'{quoted(kind.name)} needs the server\'s files; name them: memory = ["notes.db*"]')


def _methods(table: Table, kind: Kind | None) -> tuple[str, ...]:
    method = table.text("method", None)
    can = () if kind is None else kind.methods
    if method is None:
        return can
    if method not in CAPABILITY_OF:
        methods = suggestion(method, CAPABILITY_OF, "the methods are")
        table.note("method", f"A2M has no method {quoted(method)}{methods}")
    elif can and method not in can:
        table.note("method", f"{quoted(kind.name if kind else '')} can only apply to {', '.join(can)}")
    return (method,)


def _refuse_settings_of_others(table: Table, kind: Kind) -> None:
    for setting in _SETTINGS:
        if table.has(setting) and setting not in kind.settings:
            takes = f"its settings are {', '.join(kind.settings)}" if kind.settings else "it has no settings"
            table.note(setting, f"has no meaning for {quoted(kind.name)}; {takes}")
