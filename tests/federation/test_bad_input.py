"""Invalid input: the error has the right code, names the parameter and carries the caller's id; nothing changes.

The tables are raw JSON where an encoder could not produce the case. The in-process tests call the router's `answer`;
the framing of lines and bodies is tested on real processes.
"""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

import httpx
import msgspec
import msgspec.inspect
import pytest

from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.wire import method_params
from a2m_router.protocol.wire.capabilities import METHODS
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Draft
from tests.support.federated import LOCAL, Trial, held_by, settings_of, trial

asynchronous = pytest.mark.anyio

PATIENCE = 60


@pytest.fixture
def anyio_backend() -> str:
    """Run on one event loop: the input is refused before anything waits."""
    return "asyncio"


PARAMS: Final[dict[str, type[method_params.Params]]] = {
    "describe": method_params.Describe,
    "remember": method_params.ConditionalRemember,
    "recall": method_params.PromptedRecall,
    "timeline": method_params.PromptedPages,
    "forget": method_params.Forget,
    "promote": method_params.Promote,
    "consolidate": method_params.Consolidate,
    "reinforce": method_params.Reinforce,
    "fetch": method_params.Fetch,
    "session/list": method_params.SessionList,
    "session/close": method_params.SessionClose,
    "events": method_params.Events,
    "events/subscribe": method_params.Subscribe,
    "events/unsubscribe": method_params.Unsubscribe,
    "summarize": method_params.Summarize,
}

# The required parameters of each method, so that only the parameter under test can be wrong.
NEEDED: Final[dict[str, dict[str, Any]]] = {
    "remember": {"records": []},
    "forget": {"ids": []},
    "promote": {"ids": [], "tier": "semantic"},
    "reinforce": {"ids": []},
    "fetch": {"key": "k"},
    "session/close": {"session": "s"},
    "summarize": {"ids": []},
}

DEEP = "[" * 1000 + "]" * 1000

CONTENT: Final = [
    {"id": "a", "content": "Anna lives in Rome", "session": "s", "group": "g", "embedding": [0.5, -0.0, 1e-300]},
    {"id": "b", "content": "she likes figs", "session": "s", "group": "g", "role": "user"},
    {"id": "c", "content": "the key", "key": "user/key", "owner": "anna", "tier": "semantic", "metadata": {"n": 1}},
]


class Asked:
    """A federation with records. `await asked(raw)` returns the decoded answer and asserts that nothing changed."""

    def __init__(self, fed: Trial) -> None:
        self._fed = fed
        self._before: Any = None

    async def __call__(self, message: bytes, caller: Caller = LOCAL) -> Any:
        # The state after one message is the expected state of the next.
        self._before = self._before or await self._everything()
        answer = await self._fed.federation.answer(message, caller)
        await self._fed.settled()
        assert await self._everything() == self._before
        return None if answer is None else msgspec.json.decode(answer)

    async def refused(self, method: str, params: str, caller: Caller = LOCAL) -> tuple[int, str]:
        """Return the code and the message of the error, and assert that its id is the call's."""
        answer = await self(call(method, params), caller)
        assert answer["id"] == "an id"
        return answer["error"]["code"], answer["error"]["message"]

    async def _everything(self) -> Any:
        fed = self._fed
        told = [await fed.call(method) for method in ("describe", "session/list")]
        behind = {name: list(map(content, held_by(store))) for name, store in fed.stores.items()}
        return told, await fed.timeline(embeddings=True), behind


def content(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record without the access fields, which a tier updates on each read by the router."""
    return {name: value for name, value in record.items() if name not in ("access_count", "accessed_at")}


@asynccontextmanager
async def asking() -> AsyncIterator[Asked]:
    settings = settings_of(FOUR_TIERS_WITH_LIMITS, policy="explicit")
    async with trial(settings) as fed:
        await fed.call("remember", records=CONTENT)
        yield Asked(fed)


FOUR_TIERS_WITH_LIMITS = """
[policy]
pass = "{policy}"
[recall]
max_limit = 50
[limits]
max_records_per_call = 5
max_content_length = 100
[tiers.working]
kind = "working"
command = ["-"]
[tiers.semantic]
kind = "semantic"
command = ["-"]
"""


def call(method: str, params: str, id: str = '"an id"') -> bytes:
    return f'{{"jsonrpc":"2.0","id":{id},"method":"memory/{method}","params":{params}}}'.encode()


# --- the envelope

MALFORMED: Final = {
    "cut off": b'{"jsonrpc":"2.0","id":1,"method":"memory/describe"',
    "nothing but a brace": b"{",
    "words": b"hello",
    "two values": b'{"jsonrpc":"2.0","id":1,"method":"memory/describe"} {}',
    "a trailing comma": b'{"jsonrpc":"2.0","id":1,"method":"memory/describe",}',
    "NaN": call("remember", '{"records":[{"content":"x","salience":NaN}]}'),
    "Infinity": call("remember", '{"records":[{"content":"x","embedding":[Infinity]}]}'),
    "a number with a leading zero": b'{"jsonrpc":"2.0","id":01,"method":"memory/describe"}',
    "single quotes": b"{'jsonrpc':'2.0'}",
    "two byte order marks": b'\xef\xbb\xbf\xef\xbb\xbf{"jsonrpc":"2.0","id":1,"method":"memory/describe"}',
    "a raw control character in a string": call("recall", '{"query":"a\x01b"}'),
    "a raw line break in a string": call("recall", '{"query":"a\nb"}'),
    "a bad escape": call("recall", r'{"query":"\x41"}'),
    "bytes that are no UTF-8": call("recall", '{"query":"?"}').replace(b"?", b"\xff"),
    "an encoded surrogate": call("recall", '{"query":"?"}').replace(b"?", b"\xed\xa0\x80"),
    "an overlong encoding": call("recall", '{"query":"?"}').replace(b"?", b"\xc0\xaf"),
}

NO_REQUEST: Final = {
    "an empty array": (b"[]", None),
    "a batch": (b'[{"jsonrpc":"2.0","id":1,"method":"memory/describe"}]', None),
    "a number": (b"5", None),
    "null": (b"null", None),
    "a string": (b'"memory/describe"', None),
    "an empty object": (b"{}", None),
    "no jsonrpc": (b'{"id":1,"method":"memory/describe"}', 1),
    "another jsonrpc": (b'{"jsonrpc":"1.0","id":"x","method":"memory/describe"}', "x"),
    "jsonrpc as a number": (b'{"jsonrpc":2.0,"id":1,"method":"memory/describe"}', 1),
    "no method": (b'{"jsonrpc":"2.0","id":1}', 1),
    "a method that is no string": (b'{"jsonrpc":"2.0","id":1,"method":["memory/describe"]}', 1),
    "an id that is true": (b'{"jsonrpc":"2.0","id":true,"method":"memory/describe"}', None),
    "an id that is an object": (b'{"jsonrpc":"2.0","id":{},"method":"memory/describe"}', None),
    "an id that is an array": (b'{"jsonrpc":"2.0","id":[1],"method":"memory/describe"}', None),
}


@asynchronous
async def test_what_is_no_json_is_answered_with_a_parse_error() -> None:
    async with asking() as asked:
        for message in MALFORMED.values():
            answer = await asked(message)
            assert (answer["id"], answer["error"]["code"]) == (None, Code.PARSE_ERROR), message


@pytest.mark.parametrize("case", NO_REQUEST)
@asynchronous
async def test_what_is_no_request_is_answered_under_its_id_if_it_has_one(case: str) -> None:
    message, id = NO_REQUEST[case]
    async with asking() as asked:
        answer = await asked(message)
        assert (answer["id"], answer["error"]["code"]) == (id, Code.INVALID_REQUEST)


@pytest.mark.parametrize("id", ["7", '"7"', "1.50", "-0", "1e3", "null", '""', r'"\u0061\n"', "1" * 30, '"𝔸"'])
@asynchronous
async def test_an_id_comes_back_as_it_was_written(id: str) -> None:
    async with trial() as fed:
        for message in (call("nonsense", "{}", id), call("describe", '{"owner":5}', id), call("timeline", "{}", id)):
            answer = await fed.federation.answer(message, LOCAL)
            assert answer is not None
            assert f'"id":{id},'.encode() in answer


@pytest.mark.parametrize(
    ("message", "id"),
    [
        (r'{"id":5,"params":{"a":"\ud800"}}', 5),
        (r'{"params":{"a":"\ud800","id":3,"b":"\" , \"id\":4"},"id":"a\"b"}', 'a"b'),
        (r'{"params":{"a":"\ud800","id":3}}', None),
        (r'{"id":150:{"a":"\ud800"}}', None),
        (r'{"id":[5],"a":"\ud800"}', None),
    ],
)
@asynchronous
async def test_a_refused_message_is_answered_with_the_id_that_it_certainly_has(message: str, id: Any) -> None:
    async with asking() as asked:
        answer = await asked(message.encode())
        assert (answer["id"], answer["error"]["code"]) == (id, Code.INVALID_PARAMS)


@asynchronous
async def test_a_notification_gets_no_answer_whatever_is_wrong_with_it() -> None:
    async with asking() as asked:
        for method, params in (("nonsense", "{}"), ("recall", '{"limit":-1}'), ("forget", "{}"), ("describe", "{}")):
            message = call(method, params).replace(b'"id":"an id",', b"")
            assert await asked(message) is None


@pytest.mark.parametrize("params", ["[]", '["a"]', "null", "5", '"x"', "true"])
@asynchronous
async def test_parameters_that_are_no_object_are_refused(params: str) -> None:
    async with asking() as asked:
        code, message = await asked.refused("describe", params)
        assert code == Code.INVALID_PARAMS
        assert message.startswith("params: expected an object")


# --- methods


@pytest.mark.parametrize("method", ["nonsense", "", "Remember", "remember ", "remember/all"])
@asynchronous
async def test_what_is_no_method_is_named(method: str) -> None:
    async with asking() as asked:
        code, message = await asked.refused(method, "{}")
        assert code == Code.METHOD_NOT_FOUND
        assert f"memory/{method}" in message


@asynchronous
async def test_a_method_of_an_undeclared_capability_names_the_capability() -> None:
    async with asking() as asked:
        described = (await asked(call("describe", "{}")))["result"]
        for capability, methods in METHODS.items():
            for method in methods if capability not in described["capabilities"] else ():
                code, message = await asked.refused(method.removeprefix("memory/"), "{}")
                assert code == Code.CAPABILITY_NOT_SUPPORTED
                assert f"'{capability}'" in message


@asynchronous
async def test_every_method_that_is_served_is_in_the_tables_here() -> None:
    async with trial() as fed:
        served = {name: method.params for name, method in fed.federation.methods.items()}
        extensions = {"store/backup": method_params.Backup}
        assert served == {f"memory/{name}": params for name, params in PARAMS.items()} | extensions


# --- types

WRONG: Final[dict[str, Any]] = {
    "a string": "x",
    "an integer": 7,
    "a number": 1.5,
    "true or false": True,
    "an array": [["x"]],
    "an object": {"x": 1},
    "null": None,
}


def accepted(type: msgspec.inspect.Type) -> set[str]:
    """Return the JSON types, named as in WRONG, that a parameter accepts."""
    match type:
        case msgspec.inspect.UnionType(types):
            return set().union(*map(accepted, types))
        case msgspec.inspect.Metadata(inner):
            return accepted(inner)
        case msgspec.inspect.StrType():
            return {"a string"}
        case msgspec.inspect.IntType():
            return {"an integer"}
        case msgspec.inspect.FloatType():
            return {"an integer", "a number"}
        case msgspec.inspect.BoolType():
            return {"true or false"}
        case msgspec.inspect.ListType():
            return {"an array"}
        case msgspec.inspect.DictType() | msgspec.inspect.StructType():
            return {"an object"}
        case msgspec.inspect.NoneType():
            return {"null"}
        case msgspec.inspect.RawType():  # metadata
            return {"an object", "null"}
        case msgspec.inspect.CustomType():  # a parameter that was left out
            return set()
    raise NotImplementedError(type)


def fields(struct: type[msgspec.Struct]) -> dict[str, msgspec.inspect.Type]:
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: field.type for field in info.fields}


def items(type: msgspec.inspect.Type) -> msgspec.inspect.Type | None:
    """Return the type of an array's items, or None if the type is no array."""
    match type:
        case msgspec.inspect.UnionType(types):
            return next(filter(None, map(items, types)), None)
        case msgspec.inspect.ListType(item):
            return item
    return None


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, p in PARAMS.items() for name in fields(p)])
@asynchronous
async def test_a_parameter_of_another_type_is_named_with_the_type_it_should_have(method: str, name: str) -> None:
    type = fields(PARAMS[method])[name]
    async with asking() as asked:
        for kind in WRONG.keys() - accepted(type):
            params = msgspec.json.encode(NEEDED.get(method, {}) | {name: WRONG[kind]}).decode()
            code, message = await asked.refused(method, params)
            assert (code, message.partition(":")[0]) == (Code.INVALID_PARAMS, name), kind
            assert any(right in message for right in accepted(type)), message
        item = items(type)
        if item is not None and not isinstance(item, msgspec.inspect.StructType):
            for kind in WRONG.keys() - accepted(item):
                params = msgspec.json.encode(NEEDED.get(method, {}) | {name: [WRONG[kind]]}).decode()
                code, message = await asked.refused(method, params)
                assert (code, message.partition(":")[0]) == (Code.INVALID_PARAMS, f"{name}[0]"), kind


@pytest.mark.parametrize("name", fields(Draft))
@asynchronous
async def test_a_record_field_of_another_type_is_named_with_its_place(name: str) -> None:
    type = fields(Draft)[name]
    async with asking() as asked:
        for kind in WRONG.keys() - accepted(type):
            params = msgspec.json.encode({"records": [{"content": "fine"}, {"content": "x", name: WRONG[kind]}]})
            code, message = await asked.refused("remember", params.decode())
            assert (code, message.partition(":")[0]) == (Code.INVALID_PARAMS, f"records[1].{name}"), kind
        for kind in () if items(type) is None else WRONG.keys() - {"an integer", "a number"}:
            params = msgspec.json.encode({"records": [{"content": "x", name: [1.0, WRONG[kind]]}]})
            code, message = await asked.refused("remember", params.decode())
            assert (code, message.partition(":")[0]) == (Code.INVALID_PARAMS, f"records[0].{name}[1]"), kind


@pytest.mark.parametrize(("method", "name"), [(method, name) for method, given in NEEDED.items() for name in given])
@asynchronous
async def test_a_required_parameter_that_is_missing_is_named(method: str, name: str) -> None:
    given = {other: value for other, value in NEEDED[method].items() if other != name}
    async with asking() as asked:
        code, message = await asked.refused(method, json.dumps(given))
        assert code == Code.INVALID_PARAMS
        assert name in message
        assert message.startswith(name) or method in ("forget", "summarize")


# --- values: method, parameters, code, start of the message

VALUES: Final = [
    # tiers
    ("remember", '{"records":[{"content":"x","tier":"nowhere"}]}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    ("remember", '{"records":[{"content":"x","tier":""}]}', Code.UNKNOWN_TIER, "no tier is called ''"),
    ("recall", '{"tier":"nowhere"}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    ("timeline", '{"tier":"nowhere"}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    ("forget", '{"tier":"nowhere"}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    ("forget", '{"ids":["a"],"tier":"nowhere"}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    ("promote", '{"ids":["a"],"tier":"nowhere"}', Code.UNKNOWN_TIER, "no tier is called 'nowhere'"),
    # limits
    ("remember", f'{{"records":[{",".join(["{}"] * 6)}]}}', Code.QUOTA_EXCEEDED, "records"),
    ("remember", f'{{"records":[{{"content":"{"x" * 101}"}}]}}', Code.QUOTA_EXCEEDED, "records[0].content"),
    ("recall", '{"limit":51}', Code.QUOTA_EXCEEDED, "limit"),
    ("recall", '{"limit":0}', Code.INVALID_PARAMS, "limit"),
    ("recall", '{"limit":-1}', Code.INVALID_PARAMS, "limit"),
    ("recall", '{"limit":100000000000000000000}', Code.INVALID_PARAMS, "limit"),
    ("timeline", '{"limit":-1}', Code.INVALID_PARAMS, "limit"),
    ("timeline", '{"limit":1e400}', Code.INVALID_PARAMS, "limit"),
    # vectors
    ("remember", '{"records":[{"content":"x","embedding":[1,2]}]}', Code.EMBEDDING_MISMATCH, "records[0].embedding"),
    (
        "remember",
        '{"records":[{"content":"x","embedding":[1,2,3]},{"content":"y","embedding":[1,2,3,4]}]}',
        Code.EMBEDDING_MISMATCH,
        "records[1].embedding",
    ),
    ("recall", '{"embedding":[1,2]}', Code.EMBEDDING_MISMATCH, "embedding"),
    ("recall", '{"embedding":[1,2],"query":"x"}', Code.EMBEDDING_MISMATCH, "embedding"),
    ("remember", '{"records":[{"content":"x","embedding":[]}]}', Code.INVALID_PARAMS, "records[0].embedding"),
    ("recall", '{"embedding":[]}', Code.INVALID_PARAMS, "embedding"),
    ("remember", '{"records":[{"content":"x","embedding":[1,1e400,1]}]}', Code.INVALID_PARAMS, "records[0].embedding"),
    ("remember", '{"records":[{"content":"x","embedding":[-1e400,1,1]}]}', Code.INVALID_PARAMS, "records[0].embedding"),
    ("recall", '{"embedding":[1,2,1e400]}', Code.INVALID_PARAMS, "embedding[2]"),
    # numbers
    ("remember", '{"records":[{"content":"x","salience":-1}]}', Code.INVALID_PARAMS, "records[0].salience"),
    ("remember", '{"records":[{"content":"x","salience":1e400}]}', Code.INVALID_PARAMS, "records[0].salience"),
    ("remember", '{"records":[{"content":"x","revision":-1}]}', Code.INVALID_PARAMS, "records[0].revision"),
    (
        "remember",
        '{"records":[{"content":"x","revision":9007199254740992}]}',
        Code.INVALID_PARAMS,
        "records[0].revision",
    ),
    ("reinforce", '{"ids":["a"],"amount":1e400}', Code.INVALID_PARAMS, "amount"),
    ("promote", '{"ids":["a"],"tier":"semantic","salience":-1e400}', Code.INVALID_PARAMS, "salience"),
    ("recall", '{"min_score":1e400}', Code.INVALID_PARAMS, "min_score"),
    # records
    ("remember", '{"records":[{}]}', Code.INVALID_PARAMS, "records[0].content"),
    ("remember", '{"records":[{"content":null}]}', Code.INVALID_PARAMS, "records[0].content"),
    ("remember", '{"records":[{"id":"new"},{"content":"x"}]}', Code.INVALID_PARAMS, "records[0].content"),
    ("remember", '{"records":[{"content":"x"},5]}', Code.INVALID_PARAMS, "records[1]"),
    ("remember", '{"records":[{"content":"x","id":""}]}', Code.INVALID_PARAMS, "records[0].id"),
    ("remember", '{"records":[{"content":"x","key":""}]}', Code.INVALID_PARAMS, "records[0].key"),
    ("remember", '{"records":[{"content":"x","metadata":[]}]}', Code.INVALID_PARAMS, "records[0].metadata"),
    ("remember", '{"records":[{"content":"x","metadata":"{}"}]}', Code.INVALID_PARAMS, "records[0].metadata"),
    *(
        (
            "remember",
            f'{{"records":[{{"content":"x"}},{{"content":"x","created_at":"{moment}"}}]}}',
            Code.INVALID_PARAMS,
            "records[1].created_at",
        )
        for moment in (
            *("", "yesterday", "2026-07-28", "2026-07-28T10:15:30", "2026-07-28_10:15:30.123Z"),
            *("2026-02-30T10:15:30.123Z", "2026-07-28T25:15:30.123Z", "2026-07-28T10:15:30.123+24:00"),
            *("0000-07-28T10:15:30.123Z", "٢٠٢٦-07-28T10:15:30.123Z", "2026-07-28T10:15:30,123Z"),
        )
    ),
    # keys and sessions
    ("fetch", '{"key":""}', Code.INVALID_PARAMS, "key"),
    ("session/close", '{"session":""}', Code.INVALID_PARAMS, "session"),
    # the length of names is limited
    *[
        (
            "remember",
            json.dumps({"records": [{"content": "x", field: "x" * 20_000}]}),
            Code.INVALID_PARAMS,
            f"records[0].{field}: ",
        )
        for field in ("id", "key", "session", "group", "role", "owner", "media_type", "uri")
    ],
    # forget needs a selector
    ("forget", "{}", Code.INVALID_PARAMS, "params: expected ids, a query, a tier"),
    ("forget", '{"owner":"anna"}', Code.INVALID_PARAMS, "params: expected ids, a query, a tier"),
    ("forget", '{"ids":null,"where":null}', Code.INVALID_PARAMS, "params: expected ids, a query, a tier"),
    ("forget", '{"where":{}}', Code.INVALID_PARAMS, "params: expected ids, a query, a tier"),
    ("forget", '{"query":""}', Code.INVALID_PARAMS, "query"),
    ("forget", '{"query":"the"}', Code.INVALID_PARAMS, "query"),
    ("forget", '{"query":"?!","tier":"working"}', Code.INVALID_PARAMS, "query"),
    # lone surrogates, which UTF-8 cannot encode
    *(
        (
            "remember",
            f'{{"records":[{{"content":"x",{field}}}]}}',
            Code.INVALID_PARAMS,
            "params: a string contains half",
        )
        for field in (
            *(rf'"{name}":"\ud800"' for name in ("content", "id", "key", "role", "group", "owner", "session", "uri")),
            *(r'"metadata":{"a":["\udfff"]}', r'"metadata":{"\ud83d":1}', r'"metadata":{"a":"\ude00\ud83d"}'),
            r'"unknown\ud800":1',
        )
    ),
    ("recall", r'{"query":"\ud800"}', Code.INVALID_PARAMS, "params: a string contains half"),
    ("recall", r'{"where":{"\ud800":1}}', Code.INVALID_PARAMS, "params: a string contains half"),
    ("timeline", r'{"where":{"a":["\ud800"]}}', Code.INVALID_PARAMS, "params: a string contains half"),
    ("forget", r'{"ids":["a","\ud800"]}', Code.INVALID_PARAMS, "params: a string contains half"),
    # nesting
    ("recall", f'{{"query":{DEEP}}}', Code.INVALID_PARAMS, "params: nested more than 128 deep"),
    ("timeline", f'{{"where":{{"a":{DEEP}}}}}', Code.INVALID_PARAMS, "params: nested more than 128 deep"),
    ("forget", f'{{"where":{{"a":{DEEP}}}}}', Code.INVALID_PARAMS, "params: nested more than 128 deep"),
    (
        "remember",
        f'{{"records":[{{"content":"x","metadata":{{"a":{DEEP}}}}}]}}',
        Code.INVALID_PARAMS,
        "params: nested more than 128 deep",
    ),
    ("remember", f'{{"unknown":{DEEP},"records":[]}}', Code.INVALID_PARAMS, "params: nested more than 128 deep"),
    # records of other owners
    ("remember", '{"records":[{"id":"c","content":"x"}]}', Code.SCOPE_DENIED, "records: the id 'c'"),
    ("remember", '{"owner":"bert","records":[{"content":"y"},{"id":"c","content":"x"}]}', Code.SCOPE_DENIED, "records"),
    (
        "remember",
        '{"owner":"bert","records":[{"content":"x","owner":"anna"}]}',
        Code.SCOPE_DENIED,
        "records[0].owner",
    ),
    # other protocols
    ("describe", '{"protocol":"a2m/0.2"}', Code.PROTOCOL_NOT_SUPPORTED, "protocol"),
    ("describe", '{"protocol":"mcp"}', Code.PROTOCOL_NOT_SUPPORTED, "protocol"),
]


@asynchronous
@pytest.mark.parametrize(("method", "params", "code", "begins"), VALUES, ids=lambda value: str(value)[:50])
async def test_a_value_that_cannot_be_is_named(method: str, params: str, code: Code, begins: str) -> None:
    async with asking() as asked:
        answered, message = await asked.refused(method, params)
        assert answered == code
        assert message.startswith(begins)


@asynchronous
async def test_what_is_another_owners_is_not_counted_and_not_touched() -> None:
    async with asking() as asked:
        for method, params, answer in (
            ("forget", '{"ids":["c","nobody"],"owner":"bert"}', {"forgotten": 0}),
            ("forget", '{"where":{"id":"c"},"owner":"bert"}', {"forgotten": 0}),
            ("promote", '{"ids":["c","nobody"],"tier":"working","owner":"bert"}', {"promoted": 0}),
            ("reinforce", '{"ids":["c","nobody"],"owner":"bert"}', {"reinforced": 0}),
            ("fetch", '{"key":"user/key","owner":"bert"}', {"record": None}),
            ("timeline", '{"owner":"bert","where":{"id":"c"}}', {"records": []}),
            ("timeline", '{"owner":"bert","where":{"owner":"anna"}}', {"records": []}),
        ):
            assert (await asked(call(method, params)))["result"] == answer


@asynchronous
async def test_a_refused_batch_fixes_no_width() -> None:
    async with trial() as fed:
        for params in (
            '{"records":[{"content":"x","embedding":[1,2]},{"content":"x","embedding":[1]}]}',
            '{"records":[{"content":"x","embedding":[1,2]},{"content":"x","tier":"nowhere"}]}',
        ):
            await fed.federation.answer(call("remember", params), LOCAL)
        assert (await fed.call("describe"))["embeddings"]["dimensions"] is None
        await fed.remember("x", embedding=[1, 2, 3])


@asynchronous
async def test_numbers_at_the_edge_of_what_can_be_are_kept() -> None:
    huge = sys.float_info.max
    async with trial() as fed:
        [id] = await fed.remember("x", salience=huge, embedding=[huge, -huge, 5e-324], revision=2**53 - 1, key="k")
        await fed.call("reinforce", ids=[id], amount=huge)
        await fed.call("promote", ids=[id], tier="semantic", salience=huge)
        await fed.remember("y", key="k")
        [record] = await fed.timeline(embeddings=True)
        assert (record["salience"], record["revision"], record["content"]) == (huge, 2**53, "y")
        await fed.call("reinforce", ids=[id], amount=-huge)
        await fed.call("reinforce", ids=[id], amount=-huge)
        [record] = await fed.timeline()
        assert record["salience"] == 0


@asynchronous
async def test_a_selector_of_any_length_is_answered() -> None:
    many = [f"id {number}" for number in range(40_000)]
    async with trial() as fed:
        ids = await fed.remember("x", "y")
        assert len(await fed.timeline(where={"id": ids + many})) == 2
        assert len((await fed.call("recall", where={"id": many + ids}))["records"]) == 2
        assert (await fed.call("reinforce", ids=many + ids)) == {"reinforced": 2}
        assert (await fed.call("promote", ids=many + ids, tier="semantic")) == {"promoted": 2}
        assert len(await fed.timeline(where={"session": many})) == 0
        assert len(await fed.timeline(where={f"name {n}": None for n in range(500)})) == 2
        with pytest.raises(A2MError, match="where: expected at most 500 names, got 501"):
            await fed.timeline(where={f"name {n}": None for n in range(501)})
        assert (await fed.call("forget", ids=many + ids[:1])) == {"forgotten": 1}
        assert (await fed.call("forget", where={"id": many + ids})) == {"forgotten": 1}


@asynchronous
async def test_nul_characters_are_kept_everywhere() -> None:
    fields = {name: f"\0{name}\0" for name in ("id", "content", "key", "group", "session", "owner", "role", "uri")}
    record = fields | {"metadata": {"\0a": "\0", "b\0": ["\0"]}, "media_type": "\0"}
    async with trial() as fed:
        assert await fed.call("remember", records=[record]) == {"ids": [fields["id"]]}
        await fed.call("promote", ids=[fields["id"]], tier="episodic")
        for answer in (
            await fed.timeline(where={"id": fields["id"]}),
            await fed.timeline(where={"session": fields["session"], "\0a": "\0"}),
            await fed.timeline(owner=fields["owner"], key_prefix=fields["key"]),
            (await fed.call("recall", where={"group": fields["group"]}))["records"],
            [(await fed.call("fetch", key=fields["key"], owner=fields["owner"]))["record"]],
        ):
            assert [{name: got.get(name) for name in record} for got in answer] == [record]
        assert await fed.timeline(where={"session": "session"}) == []
        [session] = (await fed.call("session/list"))["sessions"]
        assert (session["session"], session["owner"]) == (fields["session"], fields["owner"])
        assert await fed.call("forget", ids=["id"]) == {"forgotten": 0}
        assert await fed.call("forget", ids=[fields["id"]]) == {"forgotten": 1}


@asynchronous
async def test_what_is_not_known_is_ignored() -> None:
    async with trial() as fed:
        for method in PARAMS:
            params = NEEDED.get(method, {}) | {"unknown": [{"x": None}], "Records": 5}
            await fed.call(method, **params)
        [id] = (await fed.call("remember", records=[{"content": "x", "colour": "red", "score": "high"}]))["ids"]
        [record] = await fed.timeline()
        assert record["id"] == id
        assert not {"colour", "score"} & record.keys()


# --- real processes: messages after a bad one are still answered

ENVELOPES: Final = [*MALFORMED.values(), *(message for message, _ in NO_REQUEST.values())]
# On stdio a line break would split a message into two malformed ones.
LINES: Final = [message for message in ENVELOPES if b"\n" not in message]


def expected(messages_sent: list[bytes]) -> list[tuple[Any, int]]:
    ids = dict(NO_REQUEST.values())
    return [
        (ids[message], Code.INVALID_REQUEST) if message in ids else (None, Code.PARSE_ERROR)
        for message in messages_sent
    ]


def summed_up(answers: list[Any]) -> list[tuple[Any, int]]:
    return [(answer["id"], answer["error"]["code"]) for answer in answers]


def by_text(pairs: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
    return sorted(pairs, key=str)


@pytest.fixture
def federation(tmp_path: Path) -> Path:
    path = tmp_path / "federation.toml"
    tiers = "".join(
        f'[tiers.{kind}]\nkind = "{kind}"\ncommand = ["a2m-store", "{kind}.db"]\n' for kind in ("working", "semantic")
    )
    path.write_text(f'state = "router.db"\n{tiers}')
    return path


def router(federation: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("a2m-router")), "--config", str(federation), "--log-level", "warning"]


def store(federation: Path) -> list[str]:
    return [sys.executable, "-m", "a2m_store.cli", str(federation.with_name("store.db"))]


@contextmanager
def lines(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def conversation(command: list[str], sent: list[bytes]) -> list[Any]:
    """Return the answers to some lines in the order of their arrival, and assert that stdout holds nothing else."""
    with lines(command) as process:
        out, _ = process.communicate(b"\n".join(sent) + b"\n", timeout=PATIENCE)
        assert process.returncode == 0
    return [json.loads(line) for line in out.splitlines()]


@pytest.mark.process
@pytest.mark.parametrize("command", [router, store])
def test_a_stream_goes_on_after_every_bad_line(command: Any, federation: Path) -> None:
    sent = [line for bad in LINES for line in (bad, b"", call("describe", "{}"))]
    answers = conversation(command(federation), sent)
    good = [answer for answer in answers if "result" in answer]
    assert len(good) == len(LINES)
    assert by_text(summed_up([a for a in answers if "error" in a])) == by_text(expected(LINES))


@pytest.mark.process
@pytest.mark.parametrize("command", [router, store])
def test_a_stream_goes_on_after_a_line_of_fifty_megabytes(command: Any, federation: Path) -> None:
    content = "x" * 50_000_000
    sent = [
        call("remember", f'{{"records":[{{"content":"{content}"}}]}}', "1"),
        b"y" * 70_000_000,  # longer than the limit of a line
        b"[" * 50_000_000,
        call("remember", '{"records":[{"id":"after","content":"x"}]}', "2"),
        call("timeline", "{}", "3"),
    ]
    answers = {json.dumps(answer["id"]): answer for answer in conversation(command(federation), sent[:1] + sent[3:4])}
    assert answers["1"]["error"]["code"] == Code.QUOTA_EXCEEDED
    assert "records[0].content" in answers["1"]["error"]["message"]
    assert answers["2"]["result"] == {"ids": ["after"]}
    broken = [answer for answer in conversation(command(federation), sent[1:3] + sent[4:]) if answer["id"] is None]
    assert sorted(answer["error"]["code"] for answer in broken) == [Code.INVALID_PARAMS, Code.INVALID_REQUEST]
    assert "67,108,864 bytes at most" in " ".join(answer["error"]["message"] for answer in broken)


@contextmanager
def over_http(command: list[str]) -> Iterator[httpx.Client]:
    process = subprocess.Popen([*command, "--http", "127.0.0.1:0"], stderr=subprocess.PIPE)
    try:
        assert process.stderr is not None
        url = next(
            word for line in process.stderr for word in line.decode().split() if word.startswith("http://127.0.0.1:")
        )
        with httpx.Client(base_url=url, timeout=PATIENCE, verify=False) as client:
            yield client
    finally:
        process.kill()
        process.communicate()


@pytest.mark.process
@pytest.mark.parametrize("command", [router, store])
def test_a_bad_body_is_an_answer_and_a_bad_request_is_none(command: Any, federation: Path) -> None:
    json_type = {"Content-Type": "application/json"}
    with over_http(command(federation)) as client:
        answers = [client.post("/", content=bad, headers=json_type) for bad in ENVELOPES]
        assert {answer.status_code for answer in answers} == {200}
        assert summed_up([answer.json() for answer in answers]) == expected(ENVELOPES)

        assert client.post("/", content=b"", headers=json_type).json()["error"]["code"] == Code.PARSE_ERROR
        good = call("timeline", "{}")
        assert client.post("/", content=good, headers={"Content-Type": "text/plain"}).status_code == 415
        assert client.post("/", content=good).status_code == 415
        assert client.get("/").status_code == 405
        assert client.put("/", content=good, headers=json_type).status_code == 405
        assert client.post("/elsewhere", content=good, headers=json_type).status_code == 404
        foreign = client.post("/", content=good, headers=json_type | {"Origin": "https://app.example"})
        assert foreign.status_code == 403
        other = client.post("/", content=good, headers=json_type | {"A2M-Protocol-Version": "a2m/9"})
        assert (other.status_code, other.json()["error"]["code"]) == (400, Code.PROTOCOL_NOT_SUPPORTED)
        large = client.post("/", content=b" " * 70_000_000, headers=json_type)
        assert (large.status_code, large.json()["error"]["code"]) == (413, Code.INVALID_REQUEST)
        notification = good.replace(b'"id":"an id",', b"")
        assert client.post("/", content=notification, headers=json_type).status_code == 202
        assert client.post("/", content=good, headers=json_type).json()["result"] == {"records": []}
