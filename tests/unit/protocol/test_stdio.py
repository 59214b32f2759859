"""The framing by line and the server side of the stdio binding, over pipes, sockets, files and real processes."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from a2m_router.process.descriptors import DescriptorSink, DescriptorSource
from a2m_router.protocol.server.server import Caller
from a2m_router.protocol.server.stdio import serve_lines
from a2m_router.protocol.wire.lines import LineSplitter

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "asyncio+uvloop", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    name, _, loop = request.param.partition("+")
    return (name, {"use_uvloop": bool(loop)}) if name == "asyncio" else name


def model(stream: bytes, limit: int) -> list[bytes | None]:
    lines = [None if len(line) > limit else line for line in stream.split(b"\n")]
    return [line for line in lines if line is None or line.strip(b" \t\r\v\f")]


@given(stream=st.lists(st.sampled_from([b"a", b"bc", b"\n", b" ", b"\r\n", b"dddd"])).map(b"".join), data=st.data())
def test_any_chunking_gives_the_same_lines(stream: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)))))
    splitter = LineSplitter(limit=4)
    lines = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        lines += splitter.feed(stream[start:stop])
    assert [*lines, *splitter.end()] == model(stream, limit=4)


def test_a_line_that_is_too_long_is_told_before_it_ends_and_not_held() -> None:
    splitter = LineSplitter(limit=10)
    assert splitter.feed(b"x" * 11) == [None]
    assert splitter.feed(b"x" * 1000) == []
    assert splitter.feed(b"x\ngood\n") == [b"good"]


async def echo(message: bytes, _: Caller) -> bytes | None:
    return message


@contextmanager
def pipe() -> Iterator[tuple[DescriptorSource, DescriptorSink]]:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    source, sink = DescriptorSource(reading), DescriptorSink(writing)
    try:
        yield source, sink
    finally:
        source.close()
        sink.close()


async def everything(source: anyio.abc.ByteReceiveStream) -> bytes:
    return b"".join([chunk async for chunk in source])


class Sent:
    """A sink that keeps the sent pieces."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    async def send(self, item: bytes) -> None:
        await anyio.lowlevel.checkpoint()
        self.pieces.append(item)

    async def aclose(self) -> None: ...
    async def send_eof(self) -> None: ...
    @property
    def extra_attributes(self) -> dict[Any, Any]:
        return {}


async def served(*chunks: bytes, answer: Any = echo, **limits: Any) -> list[bytes]:
    """Return the pieces that the server sends for these chunks and the end of input."""
    sent = Sent()
    sending, receiving = anyio.create_memory_object_stream[bytes](len(chunks))
    with sending, receiving:
        for chunk in chunks:
            sending.send_nowait(chunk)
        sending.close()
        await serve_lines(answer, receiving, sent, **limits)  # type: ignore[arg-type]  # all that it needs
    return sent.pieces


async def test_a_last_line_without_newline_counts_and_blank_lines_do_not() -> None:
    assert b"".join(await served(b"\n  \r\none\ntw", b"o\n\nthree")) == b"one\ntwo\nthree\n"


async def test_answers_that_are_ready_together_go_out_in_one_piece() -> None:
    assert await served(b"a\nb\nc\n") == [b"a\nb\nc\n"]


async def test_all_lines_of_a_chunk_are_begun_before_the_first_is_worked_on() -> None:
    story: list[str] = []

    async def answer(message: bytes, _: Caller) -> bytes | None:
        story.append(f"begin {message.decode()}")
        await anyio.lowlevel.checkpoint()
        story.append("work")
        return None

    await served(b"".join(b"%d\n" % number for number in range(100)), answer=answer)
    assert story == [f"begin {number}" for number in range(100)] + ["work"] * 100


async def test_a_line_that_is_too_long_is_refused_and_the_next_one_served() -> None:
    (refusal, good) = b"".join(await served(b"x" * 50, b"x" * 50 + b"\ngood\n", max_message=60)).splitlines()
    assert msgspec.json.decode(refusal)["error"]["code"] == -32600
    assert msgspec.json.decode(refusal)["id"] is None
    assert good == b"good"


async def test_a_notification_is_not_answered() -> None:
    async def answer(message: bytes, _: Caller) -> bytes | None:
        return None if message == b"note" else message

    assert b"".join(await served(b"note\nask\nnote\n", answer=answer, max_underway=1)) == b"ask\n"


async def test_what_is_under_way_at_the_end_is_answered() -> None:
    finish = anyio.Event()

    async def answer(message: bytes, _: Caller) -> bytes | None:
        if message == b"last":
            finish.set()
        await finish.wait()
        return message

    assert sorted(b"".join(await served(b"first\n", b"last", answer=answer)).split()) == [b"first", b"last"]


async def test_what_is_not_answered_within_the_grace_is_cancelled() -> None:
    async def answer(message: bytes, _: Caller) -> bytes | None:
        if message == b"never":
            await anyio.sleep_forever()
        return message

    with anyio.fail_after(10):
        assert b"".join(await served(b"never\ngood\n", answer=answer, grace=0.5)) == b"good\n"


async def test_no_more_is_begun_than_may_be_under_way() -> None:
    underway = most = 0

    async def answer(message: bytes, _: Caller) -> bytes | None:
        nonlocal underway, most
        underway += 1
        most = max(most, underway)
        await anyio.lowlevel.checkpoint()
        underway -= 1
        return message

    replies = b"".join(await served(b"x\n" * 50, answer=answer, max_underway=3))
    assert (most, replies.count(b"x")) == (3, 50)


async def test_a_reader_who_is_slow_is_not_read_and_loses_nothing() -> None:
    line = b"y" * 50_000
    with pipe() as (source, to_server), pipe() as (from_server, sink):

        async def serve() -> None:
            await serve_lines(echo, source, sink, max_underway=4)
            sink.close()

        async def ask() -> None:
            for _ in range(100):
                await to_server.send(line + b"\n")
            to_server.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            with anyio.fail_after(30):
                assert await everything(from_server) == (line + b"\n") * 100


async def test_serving_ends_quietly_when_nobody_listens_any_more() -> None:
    with pipe() as (source, to_server), pipe() as (from_server, sink):
        from_server.close()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve_lines, echo, source, sink)
            with anyio.fail_after(10):
                await to_server.send(b"hello\n")


async def test_a_fifty_megabyte_line_then_a_good_one() -> None:
    async def length(message: bytes, _: Caller) -> bytes | None:
        return b"%d" % len(message)

    size = 50 * 2**20
    with pipe() as (source, to_server), pipe() as (from_server, sink):

        async def serve() -> None:
            await serve_lines(length, source, sink)
            sink.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(serve)
            with anyio.fail_after(30):
                await to_server.send(b"z" * size + b"\ngood\n")
                to_server.close()
                assert await everything(from_server) == b"%d\n4\n" % size
