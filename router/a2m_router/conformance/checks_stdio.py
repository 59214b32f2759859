"""The stdio binding (§8.2). The last two checks end the server, so this comes after everything else."""

import json
from collections import Counter

from a2m_router.conformance.checking import Target, check, expect, shown
from a2m_router.conformance.client import PROTOCOL, rendered


@check("8-a", binding="stdio", writes=False)
def requests_that_come_together_are_each_answered(target: Target) -> None:
    since = len(target.stdio.arrived)
    ids = [f"pipelined-{number}" for number in range(20)]
    for id in ids:
        target.stdio.send(rendered("memory/describe", {"protocol": PROTOCOL}, id))
    came = [response.get("id") for response in target.stdio.responses(len(ids), since)]
    expect(sorted(map(str, came)) == sorted(ids), f"20 requests at once: expected an answer to each, got {came}")


@check("8.2-a", binding="stdio", writes=False)
def blank_lines_and_rubbish_do_not_end_it(target: Target) -> None:
    for line in (b"", b"  ", b"\xff\xfe\x00", b"}{"):
        since = len(target.stdio.arrived)
        target.stdio.send(line)
        target.stdio.send(rendered("memory/describe", None, f"after-{target.word()}"))
        answered = target.stdio.wait_for(lambda came: came.is_response and "result" in (came.message or ()), since, 10)
        expect(
            answered,
            f"memory/describe after the line {line!r}: expected a result, got {shown(target.stdio.arrived[since:])}",
        )
        if line.strip():
            # an error answer to the line may come late, or not at all; it must not count as the next call's answer
            target.stdio.wait_for(lambda came: came.is_response and came.id == "null", since, target.patience)


@check("8.2-a", "8.2-1", binding="stdio")
def a_message_is_one_line_whatever_is_in_it(target: Target) -> None:
    content = f"{target.word()}\nsecond line\r\nthird\u2028fourth\u0085fifth \N{DUCK}"
    (id,) = target.remember(target.note(content=content))
    since = len(target.stdio.arrived)
    came = target.read(id).get("content")
    expect(came == content, f"content {content!r} came back as {came!r}")
    lines = [arrived.line for arrived in target.stdio.arrived[since:]]
    expect(
        len(lines) == 1 and lines[0].endswith(b"\n"),
        f"a record with newlines in it: expected its message as one line with its end, got {shown(lines)}",
    )


@check("8-2", binding="stdio", writes=False)
def the_server_asks_nothing(target: Target) -> None:
    asked = [came.message for came in target.stdio.arrived if came.is_request]
    expect(asked == [], f"expected responses and notifications, got a request: {shown(asked)}")


@check("8-a", binding="stdio", writes=False)
def nothing_is_answered_that_is_no_request_and_nothing_twice(target: Target) -> None:
    target.client.notify("memory/describe", {})
    for _ in range(2):  # further answers that are sent at once have arrived after these
        target.ask("describe")
    answers = Counter(came.id for came in target.stdio.arrived if came.is_response)
    beyond = answers - target.stdio.may_be_answered
    expect(
        not beyond,
        f"expected one answer to each request and none to notifications; got more, by their ids: {shown(dict(beyond))}",
    )


@check("8.2-5", "8.2-6", binding="stdio", writes=False)
def the_end_of_stdin_ends_it(target: Target) -> None:
    since = len(target.stdio.arrived)
    target.stdio.send(rendered("memory/describe", {}, "last"))
    code = target.stdio.end_input()
    expect(code is not None, f"stdin was closed: expected the server to exit within {target.stdio.timeout:g} s")
    expect(code == 0, f"stdin was closed: expected exit code 0, got {code}")
    ids = [came.message.get("id") for came in target.stdio.arrived[since:] if came.message is not None]
    expect("last" in ids, "stdin was closed after a request: expected it to be answered")


@check("8.2-2", "8.2-3", "8.2-a", binding="stdio", writes=False)
def stdout_carried_only_json_rpc(target: Target) -> None:
    for came in target.stdio.arrived:
        expect(
            came.message is not None,
            f"stdout: expected only JSON-RPC 2.0 messages, one per line, got {came.line[:200]!r}",
        )
        expect(came.line.endswith(b"\n"), f"stdout: expected a newline after every message, got {came.line[-80:]!r}")
        json.loads(came.line)
