"""Results as text for a terminal. Pure, except that it reads the terminal's width.

Text from a server is not trusted: control characters are shown as escapes and never sent to the terminal.
The drawing library is imported at the first use: without a terminal it is not needed, and the command starts faster.
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

# the width that the content column needs at least; less important columns are left out for it
_CONTENT: Final = 30

T = TypeVar("T")

Column = tuple[str, Callable[[T], str | None]]


# columns whose values must not be cut or wrapped; and the columns that a narrow terminal leaves out, in this order
_WHOLE: Final = frozenset({"score", "written", "tier", "id"})
_LEFT_OUT_FIRST: Final = ("metadata", "role", "owner", "session", "key", "score", "written")

# the most characters and lines of a content in a table: the layout of more takes seconds
_MOST_SHOWN: Final = 2000
_MOST_LINES: Final = 40


def plain(text: str) -> str:
    """Return a text with escapes in place of control characters and characters that change the writing direction."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def _short(text: str) -> str:
    """Return the part of a text that a table shows. The whole text is available with --json."""
    lines = text[:_MOST_SHOWN].splitlines()[:_MOST_LINES]
    short = "\n".join(lines)
    return short if len(short) >= len(text.rstrip()) else f"{short} …"


def records(found: Sequence[Record]) -> bytes:
    """Return a table of records, with a column for each field that at least one of them has."""
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
    """Return one record as text, one field on each line."""
    fields = [(name, getattr(found, name)) for name in found.__struct_fields__]
    if not is_dated(found.created_at):
        fields = [(name, _UNDATED if name == "created_at" else value) for name, value in fields]
    return _fields((name, value) for name, value in fields if value not in (None, {}))


def sessions(found: Sequence[Session]) -> bytes:
    """Return a table of conversations."""
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
    """Return a server's description: one field on each line, then a table of its tiers."""
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
        "pushes events": None if described.events is None else ("no", "yes")[described.events.push],
        "service behind it": _health(described.service),
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
    """Return what a consolidation or the end of a session changed, one field on each line."""
    fields = {name: getattr(did, name) for name in did.__struct_fields__ if name != "counts"}
    return _fields([*fields.items(), ("in tiers", _counts(did.counts) or "–")])


def event(happened: Mapping[str, Any]) -> bytes:
    """Return one event as one line; on a narrow terminal, as several."""
    rest = {name: value for name, value in happened.items() if name not in ("kind", "at")}
    words = [f"{name} {value if isinstance(value, str) else json.dumps(value)}" for name, value in rest.items()]
    line = plain("  ".join([str(happened.get("at", "")), str(happened.get("kind", "")), *words])).replace("\n", "\\n")
    return fitted(line).encode() + b"\n"


def fitted(text: str) -> str:
    """Return a line wrapped to the width of the terminal."""
    from a2m_router.process import drawing

    return drawing.wrapped(text, drawing.terminal_width())


def _moment(timestamp: str | None) -> str | None:
    """Return a timestamp to the second, without the "T" and the time zone."""
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
    cells = [(name, [value_of(row) for row in rows]) for name, value_of in columns]
    filled = [(name, [plain(cell or "") for cell in column]) for name, column in cells if any(column)]
    table = drawing.table(_fitting(filled, width, left_out), width, whole=_WHOLE)
    return _rendered(drawing.blocks(filled, width) if table is None else table)


def _fitting(columns: list[tuple[str, list[str]]], width: int, left_out: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the columns that fit into the width; columns are dropped in the order of `left_out` until they do."""
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


def _fields(pairs: Iterable[tuple[str, Any]]) -> bytes:
    from a2m_router.process import drawing

    texts = [
        (name, plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
        for name, value in pairs
    ]
    return _rendered(drawing.fields(texts, drawing.terminal_width()))


def _rendered(what: "RenderableType") -> bytes:
    from rich.console import Console

    drawn = StringIO()
    Console(file=drawn, force_terminal=True, highlight=False).print(what)
    return drawn.getvalue().encode("utf-8", "replace")
