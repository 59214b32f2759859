"""The HTTP binding (§6, §8.3)."""

import json
from typing import Any

from a2m_router.conformance.checking import (
    CAPABILITY_NOT_SUPPORTED,
    INVALID_REQUEST,
    METHOD_NOT_FOUND,
    PARSE_ERROR,
    PROTOCOL_NOT_SUPPORTED,
    Skipped,
    Target,
    check,
    expect,
    shown,
)
from a2m_router.conformance.client import PROTOCOL, WELL_KNOWN, Reply, notification, rendered

_DESCRIBE = rendered("memory/describe", {"protocol": PROTOCOL}, 801)
_VERSION = "A2M-Protocol-Version"


@check("8.3-2", binding="http", writes=False)
def a_request_is_answered_200_with_json(target: Target) -> None:
    reply = target.http.post(_DESCRIBE)
    _expect_status(reply, 200, "a request")
    expect(
        reply.media_type == "application/json",
        f"a request: expected Content-Type application/json, got {reply.media_type!r}",
    )
    expect(reply.message().get("id") == 801, f"a request with id 801: got {shown(reply.message())}")


@check("8.3-3", binding="http", writes=False)
def a_notification_is_answered_202_with_nothing(target: Target) -> None:
    for method in ("memory/describe", "memory/no/such"):
        reply = target.http.post(notification(method, {}))
        _expect_status(reply, 202, f"{method} without an id")
        expect(reply.body == b"", f"{method} without an id: expected an empty body, got {reply.body[:200]!r}")


@check("8.3-4", binding="http", writes=False)
def errors_of_the_protocol_are_200(target: Target) -> None:
    asked: list[tuple[str, Any]] = [("memory/no/such", {}), ("memory/forget", {}), ("memory/recall", {"limit": "ten"})]
    if "tiers" in target.capabilities:
        asked += [("memory/recall", {"tier": target.word()}), ("memory/timeline", {"tier": target.word()})]
    for method, params in asked:
        reply = target.http.post(rendered(method, params, 802))
        _expect_status(reply, 200, f"{method} with {params}")
        message = reply.message()
        expect(
            "error" in message and message.get("id") == 802,
            f"{method} with {params}: expected an error, got {shown(message)}",
        )


@check("8.3-1", "8-1", binding="http", writes=False)
def an_array_is_refused_over_http(target: Target) -> None:
    for body in (b"[" + _DESCRIBE + b"]", b"[]", b"[" + notification("memory/describe", {}) + b"]"):
        reply = target.http.post(body)
        error = reply.message().get("error") or {}
        expect(
            error.get("code") == INVALID_REQUEST,
            f"{body[:60]!r}: expected error -32600, got {reply.status} {reply.body[:200]!r}",
        )


@check("7-b", binding="http", writes=False)
def malformed_json_is_told_as_json(target: Target) -> None:
    for body in (b"{", b'{"jsonrpc":"2.0","id":1,'):
        reply = target.http.post(body)
        error = reply.message().get("error") or {}
        expect(
            error.get("code") == PARSE_ERROR and reply.status < 500,
            f"the body {body!r}: expected error -32700, got {reply.status} {reply.body[:200]!r}",
        )


@check("8.3-5", binding="http", writes=False)
def get_on_the_endpoint_is_405(target: Target) -> None:
    _expect_status(target.http.get(), 405, "GET on the endpoint")


@check("8.3.1-1", "8.3.1-2", "8.3.1-4", binding="http", writes=False)
def an_unknown_origin_is_403(target: Target) -> None:
    for origin in (f"https://{target.word()}.invalid", f"http://{target.word()}.invalid:8080", "null"):
        for body in (_DESCRIBE, notification("memory/describe", {}), b"{"):
            _expect_status(target.http.post(body, {"Origin": origin}), 403, f"a POST with Origin {origin}")


@check("8.3.1-a", binding="http", writes=False)
def a_request_without_an_origin_is_admitted(target: Target) -> None:
    _expect_status(target.http.post(_DESCRIBE), 200, "a POST without Origin")


@check("8.3.2-2", binding="http", writes=False)
def another_version_in_the_header_is_400(target: Target) -> None:
    for version in ("a2m/0.9", "a2m/1.0", "mcp/1"):
        reply = target.http.post(_DESCRIBE, {_VERSION: version})
        _expect_status(reply, 400, f"{_VERSION}: {version}")
        code = (reply.message().get("error") or {}).get("code")
        expect(
            code == PROTOCOL_NOT_SUPPORTED,
            f"{_VERSION}: {version}: expected error -32007 as the body, got {reply.body[:200]!r}",
        )


@check("8.3.2-3", binding="http", writes=False)
def the_version_header_may_be_there_or_not(target: Target) -> None:
    for headers in ({}, {_VERSION: PROTOCOL}):
        reply = target.http.post(_DESCRIBE, headers)
        _expect_status(reply, 200, f"a POST with {headers or 'no version header'}")
        expect(
            "result" in reply.message(),
            f"a POST with {headers or 'no version header'}: expected a result, got {reply.body[:200]!r}",
        )


@check("8.3.3-1", binding="http", writes=False)
def the_profile_is_at_its_well_known_place(target: Target) -> None:
    reply = target.http.get(WELL_KNOWN)
    _expect_status(reply, 200, f"GET {WELL_KNOWN}")
    profile = reply.message()
    for field in ("protocol", "name"):
        expect(
            profile.get(field) == target.described.get(field),
            f"GET {WELL_KNOWN}: expected {field} {target.described.get(field)!r}, got {profile.get(field)!r}",
        )
    for field in ("capabilities", "methods"):
        listed = profile.get(field)
        expect(isinstance(listed, list), f"GET {WELL_KNOWN}: expected a list as {field}, got {shown(listed)}")


@check("8.3-7", "4.13-2", needs="events", binding="http", writes=False)
def push_is_not_offered_over_http(target: Target) -> None:
    entry = target.ask("describe").get("events")
    expect(
        isinstance(entry, dict) and entry.get("push") is False,
        f"memory/describe over HTTP: expected push false, got {shown(entry)}",
    )


@check("8.3-8", "4.13-3", binding="http", writes=False)
def subscribe_fails_over_http(target: Target) -> None:
    target.refused(CAPABILITY_NOT_SUPPORTED, "events/subscribe")


@check("6-5", "8.3-6", "6-2", binding="http", writes=False)
def scopes_are_declared_only_to_who_has_shown_who_they_are(target: Target) -> None:
    reply = target.http.post(_DESCRIBE, authorized=False)
    if reply.status != 200:
        return
    result = reply.message().get("result")
    declared = result.get("capabilities") if isinstance(result, dict) else None
    expect(
        isinstance(declared, list) and "scopes" not in declared,
        f"memory/describe over HTTP without any credential: expected no scopes, got {shown(declared)}",
    )


@check("6.1-a", binding="http", writes=False)
def a_caller_without_a_credential_is_401(target: Target) -> None:
    if target.http.token is None:
        raise Skipped("needs --token")
    for body in (_DESCRIBE, b"{", json.dumps({"jsonrpc": "2.0", "id": 1, "method": "memory/no/such"}).encode()):
        _expect_status(target.http.post(body, authorized=False), 401, "a POST without a token")
        for shown_token in (f"Bearer {target.word()}", "Bearer", f"Basic {target.http.token}", target.http.token):
            reply = target.http.post(body, {"Authorization": shown_token}, authorized=False)
            _expect_status(reply, 401, "a POST with a wrong token")


@check("8-2", binding="http", writes=False)
def a_response_is_no_request(target: Target) -> None:
    for method in ("memory/describe", "memory/no/such"):
        message = target.http.post(rendered(method, {}, 803)).message()
        expect("method" not in message, f"{method}: expected a response, got {shown(message)}")
        code = (message.get("error") or {}).get("code")
        expect(("result" in message) != (code == METHOD_NOT_FOUND), f"{method}: got {shown(message)}")


def _expect_status(reply: Reply, status: int, what: str) -> None:
    expect(reply.status == status, f"{what}: expected {status}, got {reply.status} {reply.body[:200]!r}")
