"""How a search tool of an MCP server is asked, and what its answer holds. Pure.

Rules:
- Arguments are named by their options. Without these, the first of the usual names that the tool has is taken; a tool
  without an argument for the limit answers as many as it likes.
- What would be sent must fit the tool's own input schema. Else the mistake is said, with the arguments that there are.
- An answer is its structured content; else its texts, as far as they are JSON; else each of its texts is a result.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from a2m_rag.answers import decoded, results_at
from a2m_rag.filling import asks, filled, holds_limit
from a2m_rag.importing import library
from a2m_rag.mapping import Path, shown
from a2m_rag.service import CannotStart, ServiceFailure, on_one_line

_QUERIES: Final = ("query", "q", "question", "text", "search", "search_query", "query_text")
_LIMITS: Final = ("limit", "k", "top_k", "n", "n_results", "num_results", "max_results", "count")

# enough to find the one that was meant
_MOST_NAMES: Final = 40
# what is tried on the schema; as long as a query in words, and as great as a usual limit
_A_QUERY: Final = "what is in the handbook"
_A_LIMIT: Final = 8


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a tool on the command line.

    query, limit: the names of its arguments for these; None leaves the choice to the usual names.
    arguments: its other arguments, an object; `{query}` and `{limit}` may stand in it.
    results: where in its answer the results are; None takes the answer as a whole.
    content: where a result has its content: by that an answer that is one result is told from one that holds some.
    """

    tool: str
    query: str | None = None
    limit: str | None = None
    arguments: Mapping[str, Any] = {}
    results: Path | None = None
    content: Path = Path("content")


class ToolCall(msgspec.Struct, frozen=True):
    """How the tool is asked: its arguments with `{query}` and `{limit}` in their places, and the limits it takes."""

    template: Mapping[str, Any]
    least: int
    most: int | None

    def arguments(self, query: str, limit: int) -> dict[str, Any]:
        """The arguments of one call."""
        within = max(self.least, limit if self.most is None else min(limit, self.most))
        arguments: dict[str, Any] = filled(self.template, query, within)
        return arguments


def asking(call: Call, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """How to ask the tool that is meant.

    Args:
        tools: the input schemas of the server's tools, by their names.

    Raises CannotStart, with what there is instead: no such tool, no such arguments, or not these values for them.
    """
    if call.tool not in tools:
        there = f"there are: {', '.join(sorted(tools)[:_MOST_NAMES])}" if tools else "there is none"
        raise CannotStart(on_one_line(f"there is no tool {call.tool!r}; {there}"))
    schema = tools[call.tool]
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    template = dict(call.arguments)
    # a name that is said twice would lose what is said first
    for name, option in ((call.query, "--query-argument"), (call.limit, "--limit-argument")):
        if name is not None and name in template:
            raise CannotStart(f"the argument {name!r} stands in --arguments already; leave it out there, or {option}")
    query = call.query or (None if asks(template) else _first(_QUERIES, properties, template))
    if query is None and not asks(template):
        raise CannotStart(_sentence(call, schema, "has no argument that is called as a query's usually is"))
    limit = call.limit or (None if holds_limit(template) else _first(_LIMITS, properties, template))
    if query is not None:
        template[query] = "{query}"
    least, most = 1, None
    if limit is not None:
        template[limit] = "{limit}"
        least, most = _bounds(properties.get(limit))
    found = ToolCall(template, least, most)
    _check(call, found, schema, properties)
    return found


def _first(names: Sequence[str], properties: Mapping[str, Any], taken: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in properties and name not in taken), None)


def _check(call: Call, found: ToolCall, schema: Mapping[str, Any], properties: Mapping[str, Any]) -> None:
    takes_others = not properties or schema.get("additionalProperties", False) is not False
    unknown = next((name for name in found.template if name not in properties), None)
    if unknown is not None and not takes_others:
        raise CannotStart(_sentence(call, schema, f"has no argument {unknown!r}"))
    jsonschema = library("jsonschema", "mcp")
    try:
        validator = jsonschema.validators.validator_for(schema)(schema)
        problem = jsonschema.exceptions.best_match(validator.iter_errors(found.arguments(_A_QUERY, _A_LIMIT)))
    except Exception:  # noqa: BLE001 - a schema that cannot be read forbids nothing
        return
    if problem is not None:
        where = ".".join(map(str, problem.absolute_path))
        said = f"{where}: {problem.message}" if where else problem.message
        raise CannotStart(_sentence(call, schema, f"does not take what would be sent: {on_one_line(said)}"))


def _sentence(call: Call, schema: Mapping[str, Any], what: str) -> str:
    """The sentence about arguments that do not fit, which names those that the tool has."""
    properties, required = schema.get("properties"), schema.get("required")
    names = [
        f"{name} ({_kind(each)}{', required' if isinstance(required, list) and name in required else ''})"
        for name, each in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    has = f"it has {', '.join(names[:_MOST_NAMES])}" if names else "it has none"
    line = " ".join(f"the tool {call.tool!r} {what}; {has}".split())
    return f"{line}; see --query-argument, --limit-argument and --arguments"


def _kind(schema: Any) -> str:
    kinds = [str(each["type"]) for each in _alternatives(schema) if "type" in each and each["type"] != "null"]
    return " or ".join(kinds) or "anything"


def _bounds(schema: Any) -> tuple[int, int | None]:
    """The least and the greatest limit that a schema allows; 1 and None where it says nothing."""
    least, most = 1, None
    for each in _alternatives(schema):
        match each.get("minimum"):
            case int(low) if low > least:
                least = low
        match each.get("maximum"):
            case int(high) if high >= 1:
                most = high
    return least, most


def _alternatives(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that it is any of."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        for each in inner if isinstance(inner, list) else []:
            yield from _alternatives(each)


# --- answers


def results_in(structured: Any, texts: Sequence[Any], call: Call) -> list[Any]:
    """The results in a tool's answer.

    Args:
        structured: its structured content; None where it has none.
        texts: its texts, in their order: strings, and of embedded resources objects with `content` and `uri`.

    Raises ServiceFailure where there is no list of results in it, at its path or as a whole.
    """
    values = list(_values(structured, texts))
    path = call.results
    if path is None:
        return _whole(values[-1], call.content) if values else _written(texts)
    for value in values:
        found = path.find(value)
        if isinstance(found, list) and (found or not path.passed_over(value)):
            return found
    if values:
        return results_at(path, values[-1], option="--results")
    if written := _written(texts):
        raise ServiceFailure(
            f"expected a list of results at {path.text!r} of its answer, got text that is not JSON, {shown(written[0])}"
            "; leave out --results, and each text is a result"
        )
    return []


def _values(structured: Any, texts: Sequence[Any]) -> Iterator[Any]:
    """The JSON values that an answer is, from the outermost to the innermost."""
    if structured is None:
        read = [_json(text) for text in texts]
        if read and None not in read:
            yield read[0] if len(read) == 1 else read
        return
    yield structured
    # servers wrap whatever is no object, texts too, and a text may be JSON
    if isinstance(structured, Mapping) and structured.keys() == {"result"}:
        inner = structured["result"]
        yield inner
        if isinstance(inner, str) and (read_inner := _json(inner)) is not None:
            yield read_inner


def _json(text: Any) -> Any:
    """The object or list that a text is as JSON; None where it is none."""
    if not isinstance(text, str) or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, content: Path) -> list[Any]:
    """The results that a value is as it stands: a list of them, or one. Raises ServiceFailure for what is neither."""
    match value:
        case Mapping() if isinstance(content.find(value), str):
            return [value]
        case list():
            return value
        case str():
            return _written([value])
        case None:
            return []
        case _:
            return results_at(Path("@"), value, option="--results")


def _written(texts: Sequence[Any]) -> list[Any]:
    """The texts that are not blank."""
    return [each for each in texts if not isinstance(each, str) or each.strip()]


def arguments_from(text: str) -> Mapping[str, Any]:
    """The object that --arguments is. Raises ValueError, saying what was expected."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f'expected JSON, like \'{{"collection": "handbook"}}\': {problem}') from None
    if not isinstance(found, Mapping):
        raise ValueError(f'expected a JSON object, like \'{{"collection": "handbook"}}\', got {shown(found)}')
    return found
