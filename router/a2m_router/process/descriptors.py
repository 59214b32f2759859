"""Byte streams on file descriptors: the ends of a child's pipes, and this process's own standard streams.

The process's own pipes are non-blocking. Inherited descriptors keep their mode: O_NONBLOCK would also affect every
other process that holds them (a shell's terminal, a shared stderr). How much they accept without blocking is determined
differently for each kind.
"""

import os
import select
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Final

import anyio
import anyio.abc
import anyio.to_thread

from a2m_router.process.stderr import UnblockedStderr

_CHUNK: Final = 65_536  # the capacity of a pipe on Linux


class DescriptorSource(anyio.abc.ByteReceiveStream):
    """A reader for a descriptor that supports waiting: a pipe, a socket, a terminal."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive(self, max_bytes: int = _CHUNK) -> bytes:
        while True:
            if self._descriptor < 0:
                raise anyio.ClosedResourceError
            await anyio.wait_readable(self._descriptor)
            try:
                data = os.read(self._descriptor, max_bytes)
            except BlockingIOError:
                continue  # another process with the same descriptor read first
            except OSError as problem:  # a reset connection, or a terminal that hung up
                raise anyio.BrokenResourceError from problem
            if not data:
                raise anyio.EndOfStream
            return data

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; tasks that wait for it get ClosedResourceError."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            anyio.notify_closing(descriptor)
            os.close(descriptor)


class DescriptorSink(anyio.abc.ByteSendStream):
    """A writer for a descriptor that supports waiting.

    Args:
        write: writes as many bytes as possible without blocking and returns their number; raises BlockingIOError if
            there is no space. By default `os.write`, for a non-blocking descriptor.
    """

    def __init__(self, descriptor: int, write: Callable[[int, memoryview], int] = os.write) -> None:
        self._descriptor = descriptor
        self._write = write

    async def send(self, item: bytes) -> None:
        view = memoryview(item)
        while view:
            if self._descriptor < 0:
                raise anyio.ClosedResourceError
            try:
                view = view[self._write(self._descriptor, view) :]
            except BlockingIOError:
                await anyio.wait_writable(self._descriptor)
            except OSError as problem:
                raise anyio.BrokenResourceError from problem

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the descriptor; tasks that wait for it get ClosedResourceError."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            anyio.notify_closing(descriptor)
            os.close(descriptor)


@contextmanager
def standard_streams() -> Iterator[tuple[anyio.abc.ByteReceiveStream, anyio.abc.ByteSendStream]]:
    """Yield this process's stdin and stdout as byte streams, of whatever kind they are.

    Until the end of the block, descriptor 1 leads to stderr and descriptor 0 is empty. So a stray print (of Python, a C
    library or a child) cannot get into the stream of messages, and no child can read from it (rule 13).
    """
    with ExitStack() as undo:
        source = _diverted(0, os.open(os.devnull, os.O_RDONLY), undo)
        _flush()
        sink = _diverted(1, os.dup(2), undo)
        undo.callback(_flush)  # before descriptor 1 is restored: text printed in the block belongs to stderr
        if isinstance(sys.stderr, UnblockedStderr):
            # stdout leads to stderr here: `print` must not block either when nobody reads stderr
            undo.enter_context(redirect_stdout(sys.stderr))
        yield _source(source), _sink(sink)


def open_missing_streams() -> None:
    """Open /dev/null for each of stdin, stdout and stderr that is closed when the process starts.

    Call this first. Otherwise the next open descriptors, such as those of the event loop, get these numbers, and
    `standard_streams` would divert them.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)


def _flush() -> None:
    if sys.stdout is not None:  # it is None in a process that was started with descriptor 1 closed
        sys.stdout.flush()


def _diverted(descriptor: int, instead: int, undo: ExitStack) -> int:
    """Point `descriptor` at `instead` until `undo` closes; return a duplicate of what it was. Closes `instead`."""
    own = os.dup(descriptor)
    undo.callback(os.close, own)
    os.dup2(instead, descriptor)
    os.close(instead)
    undo.callback(os.dup2, own, descriptor)
    return own


def _source(descriptor: int) -> anyio.abc.ByteReceiveStream:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor):
        return DescriptorSource(descriptor)
    return _FileSource(descriptor)


def _sink(descriptor: int) -> anyio.abc.ByteSendStream:
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode):
        return DescriptorSink(descriptor, _write_pipe)
    if stat.S_ISSOCK(mode):
        return DescriptorSink(descriptor, _write_socket)
    return _FileSink(descriptor)


def _write_pipe(descriptor: int, view: memoryview) -> int:
    # a pipe reported as writable is guaranteed to accept PIPE_BUF bytes without blocking, and no more
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    if not poll.poll(0):
        raise BlockingIOError
    return os.write(descriptor, view[: select.PIPE_BUF])


def _write_socket(descriptor: int, view: memoryview) -> int:
    borrowed = socket.socket(fileno=descriptor)
    try:
        return borrowed.send(view, socket.MSG_DONTWAIT)
    finally:
        borrowed.detach()


class _FileSource(anyio.abc.ByteReceiveStream):
    """A reader for a descriptor without support for waiting, where a read never blocks for long: a file, /dev/null."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def receive(self, max_bytes: int = _CHUNK) -> bytes:
        try:
            data = await anyio.to_thread.run_sync(os.read, self._descriptor, max_bytes)
        except OSError as problem:
            raise anyio.BrokenResourceError from problem
        if not data:
            raise anyio.EndOfStream
        return data

    async def aclose(self) -> None:
        pass


class _FileSink(anyio.abc.ByteSendStream):
    """A writer for a file, /dev/null or a terminal. A terminal may block, so cancellation abandons the thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    async def send(self, item: bytes) -> None:
        view = memoryview(item)
        while view:
            try:
                written = await anyio.to_thread.run_sync(os.write, self._descriptor, view, abandon_on_cancel=True)
            except OSError as problem:
                raise anyio.BrokenResourceError from problem
            view = view[written:]

    async def aclose(self) -> None:
        pass
