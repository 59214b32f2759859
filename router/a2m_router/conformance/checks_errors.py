"""Errors and answers of JSON-RPC (§2, §7, §8)."""

import json
import time

from a2m_router.conformance.checking import (
    CAPABILITY_NOT_SUPPORTED,
    INVALID_PARAMS,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    METHODS,
    PARSE_ERROR,
    NotApplicable,
    Target,
    check,
    expect,
    shown,
)


@check("2-2", "2-3", writes=False)
def methods_of_undeclared_capabilities_say_so(target: Target) -> None:
    missing = [
        method for capability, methods in METHODS.items() if capability not in target.capabilities for method in methods
    ]
    if not missing:
        raise NotApplicable("every capability with methods is declared")
    for method in missing:
        for params in ({}, {"ids": ["a"], "tier": "t", "key": "k", "session": "s", "query": "q"}):
            target.refused(CAPABILITY_NOT_SUPPORTED, method.removeprefix("memory/"), **params)


@check("7-a", "7-b", writes=False)
def an_unknown_method_is_not_found(target: Target) -> None:
    for method in ("no/such", target.word(), "describe/more"):
        error = target.refused(METHOD_NOT_FOUND, method)
        expect(
            type(error.get("code")) is int and isinstance(error.get("message"), str),
            f"memory/{method}: expected an error with an integer code and a string message, got {shown(error)}",
        )


@check("7-b", writes=False)
def malformed_json_is_a_parse_error(target: Target) -> None:
    for body in (b'{"jsonrpc":"2.0","id":1,"method":', b"{]", b"memory/describe"):
        _expect_error(target, body, PARSE_ERROR)


@check("7-b", writes=False)
def what_is_no_request_is_invalid(target: Target) -> None:
    for body in (b'{"jsonrpc":"2.0","id":71}', b'{"jsonrpc":"2.0","id":72,"method":5}', b"5", b'"memory/describe"'):
        _expect_error(target, body, INVALID_REQUEST)


@check("7-b", writes=False)
def bad_parameters_of_a_read_are_invalid(target: Target) -> None:
    target.refused(INVALID_PARAMS, "recall", query="harbour", limit="ten")
    target.refused(INVALID_PARAMS, "recall", query=["harbour"])
    target.refused(INVALID_PARAMS, "timeline", where="role")


@check("7-b")
def bad_parameters_of_a_write_are_invalid(target: Target) -> None:
    target.refused(INVALID_PARAMS, "remember")
    target.refused(INVALID_PARAMS, "remember", records="one")
    target.refused(INVALID_PARAMS, "remember", records=["one"])
    target.refused(INVALID_PARAMS, "remember", records=[{"role": "user", "metadata": target.mine}])
    target.refused(INVALID_PARAMS, "remember", records=[target.note(content=["one"])])
    target.refused(INVALID_PARAMS, "forget", ids="one")


@check("8-a", writes=False)
def an_answer_has_the_id_of_its_request(target: Target) -> None:
    # the clients reject an answer with another id
    for id in (7_000_001, f"id-{target.word()}", "7000002"):
        response = target.client.request("memory/describe", {}, id)
        expect(response.get("jsonrpc") == "2.0", f"expected jsonrpc 2.0 in the response, got {shown(response)}")
        response = target.client.request("memory/nothing", {}, id)
        expect(
            "error" in response and "result" not in response, f"expected an error and no result, got {shown(response)}"
        )


@check("4-2", "8-a", writes=False)
def a_request_may_come_without_parameters(target: Target) -> None:
    for method in ("memory/describe", "memory/recall"):
        response = target.client.request(method)
        expect("result" in response, f"{method} without params: expected a result, got {shown(response)}")


@check("8-1", writes=False)
def a_batch_is_refused(target: Target) -> None:
    call = {"jsonrpc": "2.0", "id": 81, "method": "memory/describe", "params": {}}
    for batch in ([call], [call, {**call, "id": 82}], []):
        _expect_error(target, json.dumps(batch).encode(), INVALID_REQUEST)


@check("8-a", writes=False)
def a_notification_is_not_answered(target: Target) -> None:
    # an answer to the notification would come before that of the next call, and the stdio client rejects it
    target.client.notify("memory/describe", {})
    target.client.notify("memory/no/such", {})
    target.ask("describe")


@check("8-a")
def a_notification_is_carried_out(target: Target) -> None:
    note = target.note(id=f"unasked-{target.word()}")
    target.client.notify("memory/remember", {"records": [note]})
    deadline = time.monotonic() + target.patience
    while target.timeline() == [] and time.monotonic() < deadline:
        time.sleep(0.05)
    carried_out = target.timeline()
    target.remember(note)  # so that it is forgotten in the end
    created = [record.get("content") for record in target.timeline()]
    expect(
        created == [note["content"]],
        f"a write as a notification, repeated as a call: expected one record, got {created}",
    )
    expect(
        carried_out != [],
        f"memory/remember as a notification: expected the record within {target.patience:g} s, got nothing",
    )


def _expect_error(target: Target, body: bytes, code: int) -> None:
    response = target.client.raw(body)
    error = response.get("error")
    came = error.get("code") if isinstance(error, dict) else None
    expect(came == code, f"{body[:80]!r}: expected error {code}, got {shown(response)}")
