"""What every command works with: the memory, what was asked of it, the streams; and what it says on stderr."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio.abc
import msgspec

from a2m_router.command import showing
from a2m_router.command.peer import PatientPeer
from a2m_router.command.reaching import Way
from a2m_router.command.streams import Streams
from a2m_router.protocol.client.memory import Memory

PROGRAM: Final = "a2m"

# the exit codes; `a2m --help` says what they mean
DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
NOTHING: Final = 3
INTERRUPTED: Final = 130


class Running(msgspec.Struct, frozen=True):
    """What a command works with. `memory` asks through `asking`. `pushed` are the events that come by themselves; after
    `no_more` they end with those that are there."""

    memory: Memory
    asking: PatientPeer
    options: argparse.Namespace
    way: Way
    streams: Streams
    pushed: anyio.abc.ObjectReceiveStream[Mapping[str, Any]]
    no_more: Callable[[], None]
    over_http: bool

    @property
    def raw(self) -> bool:
        """Whether results are written as they came, instead of drawn for a person."""
        return not self.streams.shows or hasattr(self.options, "json")

    async def show(self, drawn: Callable[[], bytes]) -> None:
        """Writes the last result: as it came, or as `drawn`."""
        await self.streams.write(self.asking.last + b"\n" if self.raw else drawn())


def say(sentence: str) -> None:
    """Says something on stderr, in one line unless that is a terminal and too narrow."""
    line = f"{PROGRAM}: {showing.plain(sentence)}"
    print(showing.fitted(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
