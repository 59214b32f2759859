"""The faults, independent of the binding: each is applied to a call through a `Wire`.

This module uses no pipes, sockets or processes, and takes the time from anyio. So a2m-chaos and a simulation with a
virtual clock share it. If a fault leaves a call without an answer, nothing is sent on stdio; over HTTP the connection
stays open until the client closes it.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Final, Protocol, assert_never, cast

import anyio
import msgspec
from msgspec import Raw

from a2m_chaos.altering import (
    acknowledgement,
    as_if_forgotten,
    call_in,
    less_to_forget,
    padded,
    with_altered_answer,
    with_altered_write,
    with_another_id,
)
from a2m_chaos.faults import FaultName
from a2m_chaos.plan import Fault
from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.jsonrpc import render_error

# Sends a message to the server; returns its answer, or None if there is none.
GoOn = Callable[[bytes], Awaitable[bytes | None]]

_LOG_LINE: Final = b"INFO 12:00:00 server: a call has come in"
# the beginning of a message, then bytes that are valid in no encoding
_GARBAGE: Final = b'{"jsonrpc": "2.0", \xff\xfe\x00 "resu'
_BODY: Final = b"a2m-chaos: on purpose"


class Wire(Protocol):
    """The means to apply a fault to one call: to its client, and to the server."""

    async def send(self, message: bytes) -> None:
        """Send a message to the client, in the framing of the binding."""

    async def send_in_two(self, message: bytes, pause: float) -> None:
        """Send a message in two pieces; between them send nothing to the client for `pause` seconds. stdio only."""

    async def send_half(self, message: bytes) -> None:
        """Send the beginning of a message, and close the connection. HTTP only."""

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer with this HTTP status. HTTP only."""

    async def reset(self) -> None:
        """Reset the connection to the client. HTTP only."""

    async def die(self, away: float, *, empty: bool) -> None:
        """Kill the server, with all its connections. It may start again after `away` seconds.

        Args:
            empty: move its memory away before it starts again.
        """

    async def keep_aside(self) -> None:
        """Save the server's memory as it is now. When the server next dies, this state is restored."""

    def note(self, sentence: str) -> None:
        """Log what is done now."""


async def misbehave(fault: Fault, message: bytes, go_on: GoOn, wire: Wire) -> None:
    """Apply `fault` to the call in `message`, and return when the fault is complete.

    This may be long after the client has given up (apply-late), or never (a hang that blocks the calls behind it).

    Args:
        fault: the fault.
        message: the call.
        go_on: sends a message, this or another one, to the server.
        wire: the means to reach the client and the server.
    """
    try:
        await _do(fault, message, go_on, wire)
    except msgspec.MsgspecError:
        wire.note("not possible with this message, forwarded unchanged")
        await _answer(message, go_on, wire)


async def _do(fault: Fault, message: bytes, go_on: GoOn, wire: Wire) -> None:
    name = cast(FaultName, fault.do)
    match name:
        case "delay":
            await anyio.sleep(fault.wait)
            await _answer(message, go_on, wire)
        case "hang":
            if fault.in_order:
                await anyio.sleep_forever()
        case "drop-answer":
            await go_on(message)
        case "answer-late":
            answer = await go_on(message)
            await anyio.sleep(fault.wait)
            await _send(answer, wire)
        case "apply-late":
            if fault.answer == "error":
                await wire.send(_error(message, "it takes too long", "timeout"))
            await anyio.sleep(fault.wait)
            wire.note("carried out now")
            await go_on(message)
        case "answer-twice":
            answer = await go_on(message)
            await _send(answer, wire)
            await anyio.sleep(fault.wait)
            await _send(answer, wire)
            wire.note("sent again")
        case "wrong-id":
            await _answer(message, go_on, wire, with_another_id)
        case "tear-line":
            answer = await go_on(message)
            if answer is not None:
                await wire.send_in_two(answer, fault.wait)
        case "log-line":
            answer = await go_on(message)
            await wire.send(_LOG_LINE)
            await _send(answer, wire)
        case "garbage-line":
            answer = await go_on(message)
            await wire.send(_GARBAGE)
            await _send(answer, wire)
        case "huge-line":
            answer = await go_on(message)
            await wire.send(b"x" * fault.size)
            await _send(answer, wire)
        case "huge-answer":
            await _answer(message, go_on, wire, lambda answer: padded(answer, fault.size))
        case "exit-before-work":
            await wire.die(fault.wait, empty=False)
        case "exit-after-work":
            await go_on(message)
            await wire.die(fault.wait, empty=False)
        case "exit-after-answer":
            await _answer(message, go_on, wire)
            await wire.die(fault.wait, empty=False)
        case "restart-empty":
            await wire.die(fault.wait, empty=True)
        case "refuse-writes":
            await wire.send(_error(message, "this server takes no writes at present", "refused"))
        case "disk-full":
            await wire.send(_error(message, "nothing of this call was kept: the disk is full", "disk full"))
        case "lose-write":
            await wire.send(acknowledgement(message))
        case "lose-at-crash":
            await wire.keep_aside()
            await _answer(message, go_on, wire)
        case "alter-record":
            await _alter_record(fault, message, go_on, wire)
        case "forget-less":
            less, count = less_to_forget(message)
            if less is None or await go_on(less) is not None:
                await wire.send(as_if_forgotten(message, count))
        case "http-500":
            await wire.refuse(500, {}, _BODY)
        case "http-500-after-work":
            if await go_on(message) is not None:
                await wire.refuse(500, {}, _BODY)
        case "http-429":
            await wire.refuse(429, {"Retry-After": f"{max(1, round(fault.wait))}"}, _BODY)
        case "reset":
            await wire.reset()
        case "reset-after-work":
            await go_on(message)
            await wire.reset()
        case "half-body":
            answer = await go_on(message)
            if answer is not None:
                await wire.send_half(answer)
        case _:
            assert_never(name)


async def _alter_record(fault: Fault, message: bytes, go_on: GoOn, wire: Wire) -> None:
    call = call_in(message)
    if call is not None and call.method == "memory/remember":
        await _answer(with_altered_write(message, fault.field), go_on, wire)
    else:
        await _answer(message, go_on, wire, lambda answer: with_altered_answer(answer, fault.field))


async def _answer(
    message: bytes, go_on: GoOn, wire: Wire, change: Callable[[bytes], bytes] = lambda answer: answer
) -> None:
    answer = await go_on(message)
    if answer is not None:
        await wire.send(change(answer))


async def _send(answer: bytes | None, wire: Wire) -> None:
    if answer is not None:
        await wire.send(answer)


def _error(message: bytes, sentence: str, reason: str) -> bytes:
    call = call_in(message)
    id = Raw(b"null") if call is None else call.id
    return render_error(id, A2MError(Code.INTERNAL_ERROR, sentence, {"reason": reason}))
