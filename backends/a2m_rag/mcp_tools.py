"""Builds the calls of a search tool of an MCP server, and finds the results in its answers. Pure.

Rules:
- Options name the arguments for the query and the limit. Without them, the first usual name that the tool has is used.
  If a tool has no argument for the limit, it decides itself how many results it returns.
- The arguments must fit the tool's input schema. Otherwise the error names the mistake, and the arguments of the tool.
- The results come from the structured content of an answer; without it, from its texts if all of them are JSON; else
  each text is a result.
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

# the most names in an error message
_MOST_NAMES: Final = 40
# the values that are checked against the schema: a query of typical length, and a typical limit
_A_QUERY: Final = "what is in the handbook"
_A_LIMIT: Final = 8


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """The options of the command line about a tool.

    query, limit: the names of the arguments for the query and the limit; None selects a usual name.
    arguments: the other arguments, an object; it may contain `{query}` and `{limit}`.
    results: the path of the results in an answer; None takes the whole answer.
    content: the path of the content in a result. An object that has content there is one result, not a list of them.
    """

    tool: str
    query: str | None = None
    limit: str | None = None
    arguments: Mapping[str, Any] = {}
    results: Path | None = None
    content: Path = Path("content")


class ToolCall(msgspec.Struct, frozen=True):
    """A prepared call: the arguments with `{query}` and `{limit}` as placeholders, and the bounds of the limit."""

    template: Mapping[str, Any]
    least: int
    most: int | None

    def arguments(self, query: str, limit: int) -> dict[str, Any]:
        """Return the arguments of one call."""
        within = max(self.least, limit if self.most is None else min(limit, self.most))
        arguments: dict[str, Any] = filled(self.template, query, within)
        return arguments


def asking(call: Call, tools: Mapping[str, Mapping[str, Any]]) -> ToolCall:
    """Return the prepared call of a tool.

    Args:
        call: the options of the command line.
        tools: the input schemas of the server's tools, by their names.

    Raises:
        CannotStart: the server has no such tool, or the tool does not accept these arguments. The message lists the
            tools or arguments that exist.
    """
    if call.tool not in tools:
        existing = f"its tools are: {', '.join(sorted(tools)[:_MOST_NAMES])}" if tools else "it has no tools"
        raise CannotStart(on_one_line(f"the server has no tool {call.tool!r}; {existing}"))
    schema = tools[call.tool]
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    template = dict(call.arguments)
    # the value in --arguments would be overwritten
    for name, option in ((call.query, "--query-argument"), (call.limit, "--limit-argument")):
        if name is not None and name in template:
            raise CannotStart(f"the argument {name!r} is in --arguments, too; remove it there, or leave out {option}")
    query = call.query or (None if asks(template) else _first(_QUERIES, properties, template))
    if query is None and not asks(template):
        raise CannotStart(_sentence(call, schema, "has no argument with a usual name for the query"))
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
    except Exception:  # noqa: BLE001 - an invalid schema must not prevent the start
        return
    if problem is not None:
        where = ".".join(map(str, problem.absolute_path))
        reason = f"{where}: {problem.message}" if where else problem.message
        raise CannotStart(_sentence(call, schema, f"does not accept the arguments: {on_one_line(reason)}"))


def _sentence(call: Call, schema: Mapping[str, Any], what: str) -> str:
    """Return an error message about arguments that do not fit, with the arguments that the tool has."""
    properties, required = schema.get("properties"), schema.get("required")
    names = [
        f"{name} ({_kind(each)}{', required' if isinstance(required, list) and name in required else ''})"
        for name, each in (properties.items() if isinstance(properties, Mapping) else ())
    ]
    has = f"its arguments are {', '.join(names[:_MOST_NAMES])}" if names else "it has no arguments"
    line = " ".join(f"the tool {call.tool!r} {what}; {has}".split())
    return f"{line}; see --query-argument, --limit-argument and --arguments"


def _kind(schema: Any) -> str:
    kinds = [str(each["type"]) for each in _alternatives(schema) if "type" in each and each["type"] != "null"]
    return " or ".join(kinds) or "anything"


def _bounds(schema: Any) -> tuple[int, int | None]:
    """Return the lowest and the highest limit that a schema allows; 1 and None if it sets none."""
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
    """Yield a schema, and the schemas in its anyOf, oneOf and allOf."""
    if not isinstance(schema, Mapping):
        return
    yield schema
    for name in ("anyOf", "oneOf", "allOf"):
        inner = schema.get(name)
        for each in inner if isinstance(inner, list) else []:
            yield from _alternatives(each)


# --- answers


def results_in(structured: Any, texts: Sequence[Any], call: Call) -> list[Any]:
    """Return the results in a tool's answer.

    Args:
        structured: the structured content of the answer; None if it has none.
        texts: the texts of the answer, in order: strings, and for embedded resources objects with `content` and `uri`.
        call: the options of the command line.

    Raises:
        ServiceFailure: the answer has no list of results, at the path or as a whole.
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
            "; leave out --results to take each text as a result"
        )
    return []


def _values(structured: Any, texts: Sequence[Any]) -> Iterator[Any]:
    """Yield the JSON values of an answer, from the outermost to the innermost."""
    if structured is None:
        read = [_json(text) for text in texts]
        if read and None not in read:
            yield read[0] if len(read) == 1 else read
        return
    yield structured
    # servers wrap a value that is not an object as {"result": value}; a text in it may be JSON
    if isinstance(structured, Mapping) and structured.keys() == {"result"}:
        inner = structured["result"]
        yield inner
        if isinstance(inner, str) and (read_inner := _json(inner)) is not None:
            yield read_inner


def _json(text: Any) -> Any:
    """Return the object or list that a text encodes as JSON; None if it does not."""
    if not isinstance(text, str) or not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return decoded(text)
    except (ValueError, RecursionError):
        return None


def _whole(value: Any, content: Path) -> list[Any]:
    """Return the results of a value that is a list of results, or one result. Else raises ServiceFailure."""
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
    """Return the texts that are not blank."""
    return [each for each in texts if not isinstance(each, str) or each.strip()]


def arguments_from(text: str) -> Mapping[str, Any]:
    """Return the object of --arguments. Raises ValueError, with what was expected."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f'expected JSON, like \'{{"collection": "handbook"}}\': {problem}') from None
    if not isinstance(found, Mapping):
        raise ValueError(f'expected a JSON object, like \'{{"collection": "handbook"}}\', got {shown(found)}')
    return found
