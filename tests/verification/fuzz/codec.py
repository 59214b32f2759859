"""Fuzzes the codec and the framing by line, in this process."""

import random
import time
from contextlib import suppress
from typing import Final

from msgspec import Raw

from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import (
    NULL_ID,
    MalformedMessage,
    Notification,
    parse_reply,
    parse_request,
    read_params,
    render_call,
    render_error,
    render_result,
)
from a2m_router.protocol.wire.lines import LineSplitter
from tests.verification.fuzz.generating import MAX_MESSAGE, PARAMS, Messages, pieces_of
from tests.verification.fuzz.owing import is_blank, owed, read_answer, shown, strict, suits
from tests.verification.fuzz.reporting import Advance, Report, Wrong, nowhere

# the processor time of one message in the codec: far more than it needs, far less than quadratic time would take
MOST_SECONDS: Final = 0.25
MOST_SECONDS_PER_BYTE: Final = 2e-5


def fuzz_codec(seed: int, count: int, advance: Advance = nowhere) -> Report:
    """Give `count` messages to the codec and to the framing by line."""
    report = Report("codec")
    chance = random.Random(f"{seed} codec")
    source = Messages(chance)
    began = time.monotonic()
    recent: list[bytes] = []
    while report.messages < count and not report.is_hopeless:
        message = source.next()
        report.messages += 1
        started = time.perf_counter()
        try:
            report.answers[check_codec(message)] += 1
        except Wrong as wrong:
            report.find(str(wrong), message)
        except Exception as problem:  # noqa: BLE001 - any exception is a finding
            report.find(f"{type(problem).__name__}: {problem}", message)
        if time.perf_counter() - started > MOST_SECONDS and is_slow(message):
            report.find(f"it takes too long for {len(message):,} bytes", message)
        recent.append(message)
        if len(recent) == 100:
            check_framing(b"\n".join(recent), chance, report)
            recent.clear()
            advance(report.messages)
    report.seconds = time.monotonic() - began
    return report


def is_slow(message: bytes) -> bool:
    """Return whether the codec takes more processor time for a message than its length explains."""
    used = time.thread_time()
    for parse in (parse_request, parse_reply):
        with suppress(MalformedMessage):
            parse(message)
    return time.thread_time() - used > MOST_SECONDS + MOST_SECONDS_PER_BYTE * len(message)


def check_codec(message: bytes) -> str:
    """Give a message to the codec as a request, as a reply and as params; return what came of the request.

    Raises Wrong, and every exception that the codec must not raise.
    """
    due = owed(message, len(message))
    try:
        request = parse_request(message)
    except MalformedMessage as malformed:
        kind = _rendered(render_error(malformed.id, malformed), malformed.id)
        if due is None or due.id is not None or not suits(due, bytes(malformed.id)):
            raise Wrong(f"refused with id {shown(bytes(malformed.id))}: {malformed.message}") from None
    else:
        if (due is None) != (request.id is None) or (due is not None and due.id is None):
            raise Wrong(f"taken as a request with id {request.id!r}")
        kind = _params_read(request.method, request.params)
        _rendered(render_result(request.id or NULL_ID, request.params), request.id or NULL_ID)
    _check_reply(message)
    return kind


def _rendered(line: bytes, id: Raw) -> str:
    answer = read_answer(line)
    if answer.id != bytes(id):
        raise Wrong(f"the id {shown(bytes(id))} became {shown(answer.id)}")
    return answer.kind


def _params_read(method: str, params: Raw) -> str:
    wanted = PARAMS.get(method)
    if wanted is None:
        return Code.METHOD_NOT_FOUND.name
    try:
        read = read_params(params, wanted)
    except A2MError as error:
        return Code(error.code).name
    line = render_call(1, method, read)
    again = render_call(1, method, read_params(parse_request(line).params, wanted))
    if again != line:
        raise Wrong(f"read again, parameters differ: {shown(line)} and {shown(again)}")
    return "result"


def _check_reply(message: bytes) -> None:
    try:
        reply = parse_reply(message)
    except MalformedMessage:
        return
    if isinstance(reply, Notification):
        return
    line = render_result(reply.id, reply.result) if reply.error is None else render_error(reply.id, reply.error)
    if b"\n" in line or b"\r" in line:
        raise Wrong("a reply is rendered on more than one line")
    strict(line)


def check_framing(stream: bytes, chance: random.Random, report: Report) -> None:
    """Check that the lines of a stream in random chunks are the same as by splitting the whole stream."""
    limit = chance.choice((64, 1_000, MAX_MESSAGE))
    splitter = LineSplitter(limit)
    lines = [line for chunk in pieces_of(stream, chance) for line in splitter.feed(chunk)] + splitter.end()
    whole = [
        None if len(line) > limit else line for line in stream.split(b"\n") if len(line) > limit or not is_blank(line)
    ]
    # bytes.strip and bytes.isspace have the same definition of white space
    if lines != whole:
        report.find(f"cut into chunks, with lines of {limit} bytes at most, other lines come out", stream)
