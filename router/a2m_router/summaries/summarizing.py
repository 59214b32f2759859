"""Summarizers (§4.15): extracts of the records' own sentences, or a model behind an endpoint.

A summarizer is called without claims and may take long. The caller checks afterwards whether the records have changed.
"""

from collections.abc import Sequence
from functools import partial
from typing import Final, Protocol

import anyio.to_thread
import msgspec
from msgspec import Raw

from a2m_router.protocol.wire.errors import A2MError, Code
from a2m_router.protocol.wire.records import Record
from a2m_router.summaries.model import Model, ModelFailed
from a2m_router.summaries.rendering import NOTHING, SUMMARY_INSTRUCTIONS, Rendered, extract, render, summary_budget


class Summarizer(Protocol):
    """Writes summaries. `model` is the name of its model, None if it has none (§4.15)."""

    @property
    def model(self) -> str | None: ...

    def material(self, records: Sequence[Record]) -> list[Record]:
        """Return the records that it reads: the newest that fit, of those with content."""

    async def summarize(self, records: Sequence[Record]) -> str | None:
        """Return a summary of the durable content of the records; None if there is none.

        Raises:
            A2MError: INTERNAL_ERROR with `data: {reason}` if no summary could be written.
        """


# The most characters that an extract reads.
_MOST_READ: Final = 1_000_000


class Extracts:
    """A summarizer that picks sentences of the records. It is deterministic.

    Args:
        threads: work on worker threads; False for tests with a virtual clock.
    """

    model: str | None = None

    def __init__(self, *, threads: bool = True) -> None:
        self._threads = threads

    def material(self, records: Sequence[Record]) -> list[Record]:
        """See `Summarizer`."""
        left = _MOST_READ
        read: set[int] = set()
        newest_first = sorted(range(len(records)), key=lambda place: (records[place].created_at, place), reverse=True)
        for place in newest_first:
            left -= len(records[place].content)
            if left < 0:
                break
            read.add(place)
        return [record for place, record in enumerate(records) if place in read]

    async def summarize(self, records: Sequence[Record]) -> str | None:
        """See `Summarizer`; this never fails."""
        pick = partial(extract, records, budget=summary_budget(sum(len(record.content) for record in records)))
        return await anyio.to_thread.run_sync(pick) if self._threads else pick()


class ModelSummaries:
    """A summarizer that lets a model write.

    Args:
        max_input: the most characters sent to the model. Whole records that do not fit are left out, oldest first.
    """

    def __init__(self, model: Model, max_input: int) -> None:
        self.model: str | None = model.name
        self._model = model
        self._max_input = max_input

    def material(self, records: Sequence[Record]) -> list[Record]:
        """See `Summarizer`."""
        read = set(self._rendered(records).ids)
        return [record for record in records if record.id in read]

    async def summarize(self, records: Sequence[Record]) -> str | None:
        """See `Summarizer`."""
        material = self._rendered(records)
        if not material.ids:
            return None
        try:
            summary = await self._model.write(SUMMARY_INSTRUCTIONS, material.text)
        except ModelFailed as failure:
            raise model_failed("nothing was written", failure) from None
        return None if summary == NOTHING else summary

    def _rendered(self, records: Sequence[Record]) -> Rendered:
        """Return the text for the model, and the records in it."""
        return render(records, style="auto", budget=self._max_input, cite=False, keep="last")


class _Provenance(msgspec.Struct, omit_defaults=True):
    records: int
    model: str | None
    ids: list[str] | None = None


class _Metadata(msgspec.Struct):
    summary_of: _Provenance


def provenance(records: int, model: str | None, ids: list[str] | None = None) -> Raw:
    """Return the metadata of a summary: the number of records, the model, and the records' ids if given."""
    return Raw(msgspec.json.encode(_Metadata(_Provenance(records, model, ids))))


def check_length(summary: str, most: int) -> None:
    """Raise INTERNAL_ERROR with `data: {reason}` for a summary that is too long for a record."""
    if len(summary) > most:
        reason = f"the summary has {len(summary):,} characters, and a record has at most {most:,}"
        raise A2MError(
            Code.INTERNAL_ERROR, f"nothing was written: {reason}; summarize fewer records", {"reason": reason}
        )


def model_failed(consequence: str, failure: ModelFailed) -> A2MError:
    """Return the error for a call whose model returned no text. `consequence` says what became of the call."""
    data = {"reason": failure.reason}
    waits = {} if failure.retry_after is None else {"retry_after": failure.retry_after}
    return A2MError(Code.INTERNAL_ERROR, f"{consequence}: {failure.reason}", {**data, **waits})
