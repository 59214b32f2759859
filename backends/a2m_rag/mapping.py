"""Converts the results of a service to records (§3.1). Pure.

Rules:
- A result is a string, which is the content, or an object. A path (JMESPath) takes each field from the object.
- A record has the id at its path, else the service's own id, else one computed from its content. If several results
  have the same id, the first becomes the record. So the same content twice in one answer is one record.
- A record without a time, or with one that cannot be read, is undated (`UNDATED`).
- Metadata is an object, passed on unchanged. The path `*` means all members of a result that no other field takes.
- A result that cannot be a record is left out, and the reason is passed on. If no result of an answer can be a record,
  that is a ServiceFailure: a wrong path must not look like a service without results.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final
from uuid import UUID

import jmespath
import msgspec
from jmespath.exceptions import ArityError, JMESPathError, UnknownFunctionError
from jmespath.visitor import TreeInterpreter
from msgspec import UNSET, Raw, UnsetType

from a2m_rag import moments
from a2m_rag.service import Result, ServiceFailure
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import UNDATED, render

THE_REST: Final = "*"
"""The path of metadata that takes all members of a result that no other path takes."""

# a message may be nested 128 deep, and metadata is some levels inside it
_DEEPEST: Final = 100
_LONGEST_SHOWN: Final = 80
_MOST_NAMES: Final = 12


class Path:
    """A JMESPath expression. Raises ValueError, with the place of the mistake, for an invalid one."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._compiled = jmespath.compile(text)
            self._compiled.search({})
        except (UnknownFunctionError, ArityError) as problem:
            raise ValueError(f"{text!r} is not a valid JMESPath: {problem}") from None
        except JMESPathError as problem:
            if not hasattr(self, "_compiled"):
                raise ValueError(f"{text!r} is not a valid JMESPath: {' '.join(str(problem).split())}") from None
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{text!r} is not a valid JMESPath: {problem}") from None

    def __repr__(self) -> str:
        return f"Path({self.text!r})"

    def member(self, value: Mapping[str, Any]) -> str | None:
        """Return the name of the member of `value` that the path takes whole: `text`, or one of `text || body`.

        None if the path is of another kind.
        """
        choices = list(_choices(self._compiled.parsed))
        if any(choice["type"] != "field" for choice in choices):
            return None
        names: list[str] = [choice["value"] for choice in choices]
        return next((name for name in names if value.get(name)), names[-1])

    def find(self, value: Any) -> Any:
        """Return the value at the path; None if there is none. Raises ServiceFailure if the path fails on `value`."""
        try:
            return self._compiled.search(value)
        except (JMESPathError, RecursionError) as problem:
            reason = " ".join(str(problem).split())
            raise ServiceFailure(f"the path {self.text!r} cannot be applied: {reason}") from None

    def passed_over(self, value: Any) -> list[Any] | None:
        """Return the elements of a list that the path goes through, if all of them lack the member that it takes.

        For a path that finds an empty list. `hits[].document` finds one if all hits lack `document`. None if there is
        no such list.
        """
        node, find = self._compiled.parsed, TreeInterpreter().visit
        while node["type"] in ("projection", "flatten") and find(node, value) == []:
            before = node["children"][0]
            elements = find(before, value)
            if node["type"] == "projection" and isinstance(elements, list) and elements:
                return elements
            node = before
        return None


def _choices(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a path that are joined by `||`."""
    if node["type"] != "or_expression":
        yield node
        return
    for child in node["children"]:
        yield from _choices(child)


class Paths(msgspec.Struct, frozen=True, kw_only=True):
    """The paths of a record's fields in a result. A field without a path is absent; `metadata` may be THE_REST.

    score: not a field of a record; the member that it takes is not part of THE_REST.
    """

    content: Path
    id: Path | None = None
    created_at: Path | None = None
    metadata: Path | str | None = None
    uri: Path | None = None
    role: Path | None = None
    group: Path | None = None
    score: Path | None = None


FIELDS: Final = frozenset(("id", "content", "created_at", "role", "metadata", "group", "uri", "embedding"))
"""The fields that a record may have here. Every other name in a `where` is a member of the metadata (§5.2)."""


def records(
    results: Sequence[Result], paths: Paths, left_out: Callable[[str], None] = lambda _why: None
) -> list[Record]:
    """Return the records of results, in the same order.

    There are fewer records than results if ids repeat, or if a result is left out or cannot be a record.

    Args:
        results: the results of one answer.
        paths: the paths of the fields.
        left_out: called with one sentence for each result that cannot be a record.

    Raises:
        ServiceFailure: there are results, and none of them can be a record.
    """
    found: dict[str, Record] = {}
    reasons: list[str] = []
    for place, result in enumerate(results):
        if result.left_out is not None:
            continue
        try:
            record = _record(result, paths)
        except ServiceFailure as failure:
            reasons.append(f"result {place + 1} of {len(results)}: {failure}")
        else:
            found.setdefault(record.id, record)
    if reasons and not found:
        raise ServiceFailure(reasons[0])
    for reason in reasons:
        left_out(reason)
    return list(found.values())


def useless_paths(results: Sequence[Result], paths: Paths) -> Iterator[str]:
    """Yield one sentence for each of the paths of the id and of the time that finds nothing in any object of an answer.

    Without a path's value, the record has another id, or is undated: nothing else shows that the path is wrong.
    """
    values = [result.value for result in results if result.left_out is None and isinstance(result.value, Mapping)]
    for option, path, what, is_there, instead in (
        ("--id", paths.id, "an id", _is_given, "the service's own ids, or ids from the content, are used"),
        (
            "--created-at",
            paths.created_at,
            "a readable date",
            lambda found: moments.milliseconds(found) is not None,
            "these records are undated (1970)",
        ),
    ):
        if path is not None and values and not any(is_there(_found(path, value)) for value in values):
            yield (
                f"none of {len(values)} results has {what} at {path.text!r}: {instead}; see {option}; "
                f"the first result: {has(values[0])}"
            )


def _is_given(found: Any) -> bool:
    return found is not None and not (isinstance(found, str) and not found)


def _found(path: Path, value: Mapping[str, Any]) -> Any:
    try:
        return path.find(value)
    except ServiceFailure:
        return None


def _record(result: Result, paths: Paths) -> Record:
    value = result.value
    if result.unusable is not None:
        raise ServiceFailure(result.unusable)
    if isinstance(value, str):
        content = _encodable("content", value)
        return Record(
            id=result.id or _id_of(content), content=content, created_at=UNDATED, embedding=_vector(result.embedding)
        )
    if not isinstance(value, Mapping):
        raise ServiceFailure(f"expected an object or a string, got {shown(value)}")
    content = _content(value, paths.content)
    id = _name("id", value, paths.id) or result.id or _id_of(content)
    made = None if paths.created_at is None else moments.milliseconds(paths.created_at.find(value))
    return Record(
        id=_encodable("id", id),
        content=content,
        created_at=UNDATED if made is None else render(made),
        role=_name("role", value, paths.role),
        group=_name("group", value, paths.group),
        metadata=_metadata(value, paths),
        uri=_uri(value, paths.uri),
        embedding=_vector(result.embedding),
    )


def _content(value: Mapping[str, Any], path: Path) -> str:
    content = path.find(value)
    if not isinstance(content, str):
        raise ServiceFailure(f"expected its content, a string, at {path.text!r}, got {shown(content)}; {has(value)}")
    return _encodable("content", content)


def _name(field: str, value: Mapping[str, Any], path: Path | None) -> str | None:
    """Return a field that is an id or a similar name; None if it is absent or empty."""
    found = None if path is None else path.find(value)
    match found:
        case None:
            return None
        case bool():
            pass
        case str():
            return _encodable(field, found) or None
        case int() | UUID():
            return str(found)
        case Raw():  # a number that is too long for an integer or a float
            return bytes(found).decode()
    assert path is not None
    raise ServiceFailure(f"expected its {field}, a string or a whole number, at {path.text!r}, got {shown(found)}")


def _uri(value: Mapping[str, Any], path: Path | None) -> str | None:
    found = None if path is None else path.find(value)
    if found is None or path is None:
        return None
    if not isinstance(found, str):
        raise ServiceFailure(f"expected its uri, a string, at {path.text!r}, got {shown(found)}")
    return _encodable("uri", found)


def _metadata(value: Mapping[str, Any], paths: Paths) -> Raw | UnsetType:
    path = paths.metadata
    if path is None:
        return UNSET
    if isinstance(path, Path):
        found = path.find(value)
        if found is None:
            return UNSET
        where = f"at {path.text!r}"
    else:
        others = (paths.content, paths.id, paths.created_at, paths.uri, paths.role, paths.group, paths.score)
        taken = {other.member(value) for other in others if other is not None}
        found = {name: member for name, member in value.items() if name not in taken}
        where = "in the members that no other field takes"
        if not found:
            return UNSET
    if not isinstance(found, Mapping):
        raise ServiceFailure(f"expected its metadata, an object, {where}, got {shown(found)}")
    return _json(found, f"its metadata {where}")


def _json(value: Mapping[str, Any], what: str) -> Raw:
    try:
        if _is_too_deep(value):
            raise ServiceFailure(f"{what} is nested more than {_DEEPEST} deep")
        text = msgspec.json.encode(value, enc_hook=_plain)
        text.decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as problem:
        raise ServiceFailure(f"{what} cannot be encoded as JSON: {problem}") from None
    return Raw(text)


def _plain(value: Any) -> Any:
    """Return a JSON equivalent of a mapping, or of a library's array or number. Raises TypeError for other types."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"it contains an object of the type {type(value).__name__}")


def _is_too_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEEPEST):
        inner: list[Any] = []
        for each in level:
            if isinstance(each, Mapping):
                inner += each.values()
            elif isinstance(each, list | tuple):
                inner += each
        if not inner:
            return False
        level = inner
    return True


def _vector(embedding: Sequence[float] | None) -> list[float] | None:
    if embedding is None:
        return None
    vector = [float(each) for each in embedding]
    if not all(map(math.isfinite, vector)):
        raise ServiceFailure("its vector contains a number that is not finite")
    return vector


def _id_of(content: str) -> str:
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def _encodable(field: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ServiceFailure(f"its {field} contains half of a surrogate pair, which UTF-8 cannot encode") from None
    return text


def has(value: Mapping[str, Any]) -> str:
    """Return the names of an object's first members, as the end of a sentence about the object."""
    if not value:
        return "it is empty"
    names = [repr(str(name)[:_LONGEST_SHOWN]) for name in islice(value, _MOST_NAMES)]
    more = len(value) - len(names)
    return f"it has {', '.join(names)}" + (f" and {more} more" if more else "")


def shown(value: Any) -> str:
    """Return the kind of a value, in the terms of JSON; a short value is shown itself."""
    match value:
        case None:
            return "nothing"
        case bool() | int() | float():
            return repr(value)[:_LONGEST_SHOWN]
        case str():
            return f"the string {value[:_LONGEST_SHOWN]!a}"
        case Mapping():
            return "an object"
        case list():
            return "a list"
        case Raw():
            return "a number that is too long"
        case _:
            return f"a {type(value).__name__}"
