"""The context of a command: the memory, the options and the streams; and its messages on stderr."""

import argparse
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

import anyio.abc
import msgspec

from a2m_router.command import showing
from a2m_router.command.peer import PatientPeer
from a2m_router.command.reaching import Address
from a2m_router.command.streams import Streams
from a2m_router.protocol.client.memory import Memory

PROGRAM: Final = "a2m"

# the exit codes; `a2m --help` explains them
DONE: Final = 0
FAILED: Final = 1
MISUSED: Final = 2
NOTHING: Final = 3
INTERRUPTED: Final = 130


class Running(msgspec.Struct, frozen=True):
    """The context of a command.

    `memory` sends its calls through `asking`. `pushed` yields the events that the server pushes; after `no_more` it
    ends once the events already received are consumed.
    """

    memory: Memory
    asking: PatientPeer
    options: argparse.Namespace
    address: Address
    streams: Streams
    pushed: anyio.abc.ObjectReceiveStream[Mapping[str, Any]]
    no_more: Callable[[], None]
    over_http: bool

    @property
    def raw(self) -> bool:
        """Whether results are written unchanged, as JSON, instead of as tables."""
        return not self.streams.shows or hasattr(self.options, "json")

    async def show(self, drawn: Callable[[], bytes]) -> None:
        """Write the last result, unchanged if `raw`, else as `drawn` returns it."""
        await self.streams.write(self.asking.last + b"\n" if self.raw else drawn())


def say(sentence: str) -> None:
    """Print a sentence to stderr, in one line; on a narrow terminal, in several."""
    line = f"{PROGRAM}: {showing.plain(sentence)}"
    print(showing.fitted(line) if sys.stderr.isatty() else line, file=sys.stderr, flush=True)
