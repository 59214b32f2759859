"""Who writes summaries (§4.15): the records' own sentences, or a model behind an endpoint.

A summarizer is asked while nothing is locked, and may take long: whoever asks looks afterwards whether the records
still are what they were.
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
    """Writes summaries. `model` is the name of the model that does, None where it takes none (§4.15)."""

    @property
    def model(self) -> str | None: ...

    def material(self, records: Sequence[Record]) -> list[Record]:
        """Those of the records that it reads: the newest that it has room for, of those that hold something."""

    async def summarize(self, records: Sequence[Record]) -> str | None:
        """What the records have to say that lasts; None if that is nothing.

        Raises A2MError, INTERNAL_ERROR with `data: {reason}`, if none could be written.
        """


# Characters that an extract reads.
_MOST_READ: Final = 1_000_000


class Extracts:
    """Picks sentences. Deterministic, and says no word that the records do not say.

    Args:
        threads: on worker threads; False for tests with a virtual clock.
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
        """See `Summarizer`; this one does not fail."""
        pick = partial(extract, records, budget=summary_budget(sum(len(record.content) for record in records)))
        return await anyio.to_thread.run_sync(pick) if self._threads else pick()


class ModelSummaries:
    """Has a model write.

    Args:
        max_input: characters handed over at most; the oldest records that do not fit are left out, whole.
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
        """What the model is handed, and of which records that is."""
        return render(records, style="auto", budget=self._max_input, cite=False, keep="last")


class _Provenance(msgspec.Struct, omit_defaults=True):
    records: int
    model: str | None
    ids: list[str] | None = None


class _Metadata(msgspec.Struct):
    summary_of: _Provenance


def provenance(records: int, model: str | None, ids: list[str] | None = None) -> Raw:
    """The metadata of a summary: of how many records, by which model, and of which where that is worth telling."""
    return Raw(msgspec.json.encode(_Metadata(_Provenance(records, model, ids))))


def check_length(summary: str, most: int) -> None:
    """Raises A2MError, INTERNAL_ERROR with `data: {reason}`, for a summary that no record can hold."""
    if len(summary) > most:
        reason = f"the summary has {len(summary):,} characters, and a record has at most {most:,}"
        raise A2MError(
            Code.INTERNAL_ERROR, f"nothing was written: {reason}; summarize fewer records", {"reason": reason}
        )


def model_failed(consequence: str, failure: ModelFailed) -> A2MError:
    """What a caller hears when the endpoint gave no text, and what came of that."""
    data = {"reason": failure.reason}
    waits = {} if failure.retry_after is None else {"retry_after": failure.retry_after}
    return A2MError(Code.INTERNAL_ERROR, f"{consequence}: {failure.reason}", {**data, **waits})
