"""Summarizers that a test controls, and federations whose summaries they write."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import anyio
import pytest

import tests.support.federated
from a2m_router.daemon.app import running_federation
from a2m_router.protocol.wire.records import Record
from a2m_router.summaries.summarizing import Summarizer
from tests.support.federated import CALM, Trial, trial


class Stop:
    """A summarizer call that is stopped: `reached` is set when it has begun, `release` lets it end."""

    def __init__(self) -> None:
        self.reached = anyio.Event()
        self._released = anyio.Event()

    def release(self) -> None:
        self._released.set()

    async def pass_by(self) -> None:
        self.reached.set()
        await self._released.wait()


def naming(records: Sequence[Record]) -> str | None:
    """Return a summary that names the contents of its records."""
    return "gist of " + ", ".join(record.content for record in records)


class Thinker:
    """A summarizer that a test controls.

    Args:
        write: returns the summary of the records; may raise A2MError.
        room: the most records that it reads.
    """

    def __init__(
        self,
        write: Callable[[Sequence[Record]], str | None] = naming,
        *,
        model: str | None = None,
        room: int | None = None,
    ) -> None:
        self.model = model
        self.write = write
        self.thoughts: list[list[str]] = []  # the contents of the records, by summarizer call
        self._room = room
        self._stops: list[Stop] = []

    def stop(self) -> Stop:
        """Stop the next summarizer call that has no stop yet."""
        self._stops.append(Stop())
        return self._stops[-1]

    def material(self, records: Sequence[Record]) -> list[Record]:
        return list(records) if self._room is None else list(records)[-self._room :]

    async def summarize(self, records: Sequence[Record]) -> str | None:
        self.thoughts.append([record.content for record in records])
        if self._stops:
            await self._stops.pop(0).pass_by()
        return self.write(records)


@asynccontextmanager
async def thinking(thinker: Summarizer, settings: Any = CALM, **options: Any) -> AsyncIterator[Trial]:
    """Run a trial in which `thinker` writes the summaries; see `trial` for the options."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tests.support.federated, "running_federation", partial(running_federation, summarizer=thinker))
        async with trial(settings, **options) as fed:
            yield fed
