"""What each fault does, whatever the binding: to a call, by what a wire can do.

Nothing here knows of pipes, sockets or processes, and time is anyio's, so that the same faults are done by a2m-chaos
and by a simulation with a clock that jumps. A call that a fault leaves without an answer is simply not answered: on
stdio nothing is said, over HTTP the connection stays open until the client has enough of it.
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

# Hands a message to the server; its answer, or None where none came or comes.
GoOn = Callable[[bytes], Awaitable[bytes | None]]

_LOG_LINE: Final = b"INFO 12:00:00 server: a call has come in"
# the beginning of a message, in no encoding there is
_GARBAGE: Final = b'{"jsonrpc": "2.0", \xff\xfe\x00 "resu'
_TOLD: Final = b"a2m-chaos: on purpose"


class Wire(Protocol):
    """What can be done about one call: to its client, and to the server behind."""

    async def send(self, message: bytes) -> None:
        """Says this to the client, as its binding frames a message."""

    async def send_in_two(self, message: bytes, pause: float) -> None:
        """Says it in two pieces, and nothing else to the client for `pause` seconds in between. stdio only."""

    async def send_half(self, message: bytes) -> None:
        """Begins to say it, and ends the connection. HTTP only."""

    async def refuse(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answers with this HTTP status. HTTP only."""

    async def reset(self) -> None:
        """Resets the connection to the client. HTTP only."""

    async def die(self, away: float, *, empty: bool) -> None:
        """Ends the server as a kill would, with all its connections; it may start again after `away` seconds.

        Args:
            empty: its memory is moved away before it starts again.
        """

    async def keep_aside(self) -> None:
        """Sees to it that when the server next dies, its memory will be what it is now."""

    def note(self, sentence: str) -> None:
        """Tells people what is done now."""


async def misbehave(fault: Fault, message: bytes, go_on: GoOn, wire: Wire) -> None:
    """Does `fault` to the call that `message` is; returns when all is done that will ever be.

    It may return long after the client has given up (apply-late), and not at all (a hang that holds up others).

    Args:
        go_on: hands a message, this or another, to the server.
    """
    try:
        await _do(fault, message, go_on, wire)
    except msgspec.MsgspecError:
        wire.note("it cannot be done to such a message, which is passed on")
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
            await _say(answer, wire)
        case "apply-late":
            if fault.answer == "error":
                await wire.send(_error(message, "it takes too long", "timeout"))
            await anyio.sleep(fault.wait)
            wire.note("carried out now")
            await go_on(message)
        case "answer-twice":
            answer = await go_on(message)
            await _say(answer, wire)
            await anyio.sleep(fault.wait)
            await _say(answer, wire)
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
            await _say(answer, wire)
        case "garbage-line":
            answer = await go_on(message)
            await wire.send(_GARBAGE)
            await _say(answer, wire)
        case "huge-line":
            answer = await go_on(message)
            await wire.send(b"x" * fault.size)
            await _say(answer, wire)
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
            less, asked = less_to_forget(message)
            if less is None or await go_on(less) is not None:
                await wire.send(as_if_forgotten(message, asked))
        case "http-500":
            await wire.refuse(500, {}, _TOLD)
        case "http-500-after-work":
            if await go_on(message) is not None:
                await wire.refuse(500, {}, _TOLD)
        case "http-429":
            await wire.refuse(429, {"Retry-After": f"{max(1, round(fault.wait))}"}, _TOLD)
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


async def _say(answer: bytes | None, wire: Wire) -> None:
    if answer is not None:
        await wire.send(answer)


def _error(message: bytes, sentence: str, reason: str) -> bytes:
    call = call_in(message)
    id = Raw(b"null") if call is None else call.id
    return render_error(id, A2MError(Code.INTERNAL_ERROR, sentence, {"reason": reason}))
