"""Results as a person reads them, on a terminal. Pure but for the terminal's width.

Whatever a server says may have been written by anybody: control characters are shown, never sent to the terminal.
What draws is loaded by the first thing that is drawn: in a pipe nothing is, and there the command starts sooner.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any, Final, TypeVar

from a2m_router.protocol.client.results import Consolidated, Description, Record, Session, Tier
from a2m_router.protocol.wire.timestamps import is_dated

if TYPE_CHECKING:
    from rich.console import RenderableType

_CONTROL: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")

_UNDATED: Final = "undated"

# the narrowest that content is made for the sake of columns that tell less
_CONTENT: Final = 30

T = TypeVar("T")

Column = tuple[str, Callable[[T], str | None]]


# what is cut or broken says nothing any more; and what of a record a narrow terminal does without, in this order
_WHOLE: Final = frozenset({"score", "written", "tier", "id"})
_LEFT_OUT_FIRST: Final = ("metadata", "role", "owner", "session", "key", "score", "written")

# characters and lines of a content in a table; to lay out more takes seconds
_MOST_SHOWN: Final = 2000
_MOST_LINES: Final = 40


def plain(text: str) -> str:
    """A text without what a terminal would obey: control characters, and those that turn the direction of writing."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _short(text: str) -> str:
    """As much of a text as a table can show: what is longer is to be had as JSON."""
    lines = text[:_MOST_SHOWN].splitlines()[:_MOST_LINES]
    short = "\n".join(lines)
    return short if len(short) >= len(text.rstrip()) else f"{short} …"


def records(found: Sequence[Record]) -> bytes:
    """A table of records, with a column for each field that one of them has."""
    return _table(
        found,
        (
            ("score", lambda record: None if record.score is None else f"{record.score:.3f}"),
            ("written", lambda record: _moment(record.created_at)),
            ("tier", lambda record: record.tier),
            ("session", lambda record: record.session),
            ("owner", lambda record: record.owner),
            ("role", lambda record: record.role),
            ("key", lambda record: record.key),
            ("content", lambda record: _short(record.content or record.uri or "–")),
            ("id", lambda record: record.id),
            ("metadata", lambda record: json.dumps(record.metadata, ensure_ascii=False) if record.metadata else None),
        ),
        _LEFT_OUT_FIRST,
    )


def record(found: Record) -> bytes:
    """One record, a field a line."""
    told = [(name, getattr(found, name)) for name in found.__struct_fields__]
    if not is_dated(found.created_at):
        told = [(name, _UNDATED if name == "created_at" else value) for name, value in told]
    return _fields((name, value) for name, value in told if value not in (None, {}))


def sessions(found: Sequence[Session]) -> bytes:
    """A table of conversations."""
    return _table(
        found,
        (
            ("session", lambda session: session.session),
            ("owner", lambda session: session.owner),
            ("records", lambda session: f"{session.records:,}"),
            ("in tiers", lambda session: _counts(session.tiers)),
            ("opened", lambda session: _moment(session.opened_at)),
            ("last written", lambda session: _moment(session.touched_at)),
        ),
    )


def description(described: Description) -> bytes:
    """What a server says of itself: a field a line, then its tiers."""
    limits = described.limits
    embeddings = described.embeddings
    lines = {
        "name": described.name,
        "protocol": described.protocol,
        "capabilities": ", ".join(sorted(described.capabilities)),
        "records in a call": limits and limits.max_records_per_call,
        "records in a recall": limits and limits.max_recall_limit,
        "characters in a record": limits and limits.max_content_length,
        "vectors": embeddings and f"{embeddings.metric}, {embeddings.dimensions or 'any'} dimensions",
        "events come by themselves": None if described.events is None else ("no", "yes")[described.events.push],
        "the service behind it": _health(described.service),
        "text for prompts": described.prompt and ", ".join(described.prompt.styles),
    }
    shown = _fields((name, value) for name, value in lines.items() if value is not None)
    tiers = described.tiers or ()
    reasons = _fields((tier.name, tier.reason) for tier in tiers if tier.reason is not None)
    return shown + _tiers(tiers) + reasons


def _tiers(tiers: Sequence[Tier]) -> bytes:
    return _table(
        tiers,
        (
            ("tier", lambda tier: tier.name),
            ("kind", lambda tier: f"{tier.kind or ''}, mounted".removeprefix(", ") if tier.mount else tier.kind),
            ("records", lambda tier: "–" if tier.mount else f"{tier.count:,}"),
            ("capacity", lambda tier: None if tier.capacity is None else f"{tier.capacity:,}"),
            ("spills to", lambda tier: tier.spill_to),
            ("promotes to", lambda tier: tier.promote_to),
            ("status", lambda tier: tier.status),
        ),
    )


def _health(service: Any) -> str | None:
    match service:
        case {"status": "down", "reason": str(reason)}:
            return f"down: {reason}"
        case {"status": "up" | "down" as status}:
            return str(status)
    return None


def consolidated(did: Consolidated) -> bytes:
    """What a consolidation or the end of a session did."""
    told = {name: getattr(did, name) for name in did.__struct_fields__ if name != "counts"}
    return _fields([*told.items(), ("in tiers", _counts(did.counts) or "–")])


def event(happened: Mapping[str, Any]) -> bytes:
    """One event, on one line if there is room for it."""
    rest = {name: value for name, value in happened.items() if name not in ("kind", "at")}
    words = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in rest.items()]
    line = plain("  ".join([str(happened.get("at", "")), str(happened.get("kind", "")), *words])).replace("\n", "\\n")
    return fitted(line).encode() + b"\n"


def fitted(text: str) -> str:
    """A line as a terminal shows it whole: in several, if it is too narrow."""
    from a2m_router.process import drawing

    return drawing.wrapped(text, drawing.terminal_width())


def _moment(timestamp: str | None) -> str | None:
    """A timestamp to the second, without what is the same in all of them."""
    if timestamp is None:
        return None
    return timestamp[:19].replace("T", " ") if is_dated(timestamp) else _UNDATED


def _counts(tiers: Mapping[str, int] | None) -> str | None:
    return ", ".join(f"{name} {count:,}" for name, count in tiers.items()) if tiers else None


def _table(rows: Sequence[T], columns: Iterable[Column[T]], left_out: Sequence[str] = ()) -> bytes:
    if not rows:
        return b""
    from a2m_router.process import drawing

    width = drawing.terminal_width()
    cells = [(name, [told(row) for row in rows]) for name, told in columns]
    filled = [(name, [plain(cell or "") for cell in column]) for name, column in cells if any(column)]
    table = drawing.table(_fitting(filled, width, left_out), width, whole=_WHOLE)
    return _rendered(drawing.blocks(filled, width) if table is None else table)


def _fitting(columns: list[tuple[str, list[str]]], width: int, left_out: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The columns that a terminal has room for: on a narrow one those are left out that tell least."""
    kept = list(columns)
    for name in left_out:
        needed = sum(_width(title, cells) + 3 for title, cells in kept)
        if needed <= width:
            break
        kept = [column for column in kept if column[0] != name]
    return kept


def _width(title: str, cells: Sequence[str]) -> int:
    if title == "content":
        return _CONTENT
    longest = max(map(len, cells), default=0)
    return max(len(title), longest if title in _WHOLE else min(longest, _CONTENT))


def _fields(told: Iterable[tuple[str, Any]]) -> bytes:
    from a2m_router.process import drawing

    texts = [
        (name, plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        for name, value in told
    ]
    return _rendered(drawing.fields(texts, drawing.terminal_width()))


def _rendered(what: "RenderableType") -> bytes:
    from rich.console import Console

    drawn = StringIO()
    Console(file=drawn, force_terminal=True, highlight=False).print(what)
    return drawn.getvalue().encode("utf-8", "replace")
