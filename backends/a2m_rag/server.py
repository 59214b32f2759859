"""The read-only A2M server in front of a service (§2.1).

Rules:
- Writes are refused whatever they carry; reads answer, or say why they cannot. No failure looks like an empty answer.
- The order is the service's. Its scores are not: a record's score says only at which place of the answer it is.
- A query that is blank is not sent to a service: the newest of what it can list is the answer, or nothing.
- A result that cannot be a record is left out. The log says so once; an answer without any other result is a failure.
- Its health is the service's: `memory/describe` asks it a question, and says under `service` whether it answers. An
  error that is due to its silence says how often in a row that has been so, so that whoever asks can leave it alone.
- A service cannot test a `where`. So it is asked for more, and again for more, until enough of what it gives fits.
"""

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import anyio
import msgspec

from a2m_rag.mapping import FIELDS, Paths, records, useless_paths
from a2m_rag.service import Result, Service, ServiceFailure, ServiceSilent
from a2m_router.protocol.server import vectors
from a2m_router.protocol.server.server import Caller, Dispatcher, Method
from a2m_router.protocol.wire.capabilities import PROTOCOL, methods_of, speaks
from a2m_router.protocol.wire.equality import Where, parse_where
from a2m_router.protocol.wire.errors import UNANSWERED, A2MError, Code, invalid_params, quota
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.method_params import Count, Describe, Params, Query
from a2m_router.protocol.wire.records import Record

log = logging.getLogger(__name__)

_DEFAULT_LIMIT: Final = 8

# what a service is asked only to see that it answers
_PROBE: Final = "is anybody there"

# how many times more a service is asked for when too little of its answer fits
_MORE: Final = 4


class SearchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked of a service at most.

    recall: records in an answer; `max_recall_limit` (§4.1).
    asked: results of one search, where a `where` wants more than the limit.
    listed: results of a listing; a service that holds more cannot be listed.
    timeout: seconds for one call, however often the service is asked for it. Less than a tier's timeout (5 s) by
        default, so that the reason is heard before that has passed.
    """

    recall: int = 100
    asked: int = 1000
    listed: int = 10_000
    timeout: float = 4.0


class Recall(Params):
    """§4.3, as far as a server of `core` alone knows it; the other parameters are ignored (§2)."""

    query: Query | None = None
    limit: Count | None = None
    where: dict[str, msgspec.Raw] | None = None
    min_score: float | None = None


class VectorRecall(Recall):
    """§4.3 with §3.7"""

    embedding: list[float] | None = None
    embeddings: bool = False


class Timeline(Params):
    """§4.4, as far as a server of `core` alone knows it"""

    limit: Count | None = None
    where: dict[str, msgspec.Raw] | None = None


class VectorTimeline(Timeline):
    """§4.4 with §3.7"""

    embeddings: bool = False


class Server:
    """An `Answering`: what it says is what the service says now.

    Mutable state: how many times in a row the service has not answered, whether the log has said that a result is left
    out, and whether the paths have been checked.
    """

    def __init__(self, service: Service, paths: Paths, *, name: str, limits: SearchLimits) -> None:
        self._service = service
        self._paths = paths
        self._name = name
        self._limits = limits
        self._has_left_out = False
        self._has_checked_paths = False
        self._unanswered = 0
        self._capabilities = ("core",) if service.metric is None else ("core", "embeddings")
        recall, timeline = (Recall, Timeline) if service.metric is None else (VectorRecall, VectorTimeline)
        self._dispatcher = Dispatcher(
            {
                "memory/describe": Method(Describe, self._describe),
                "memory/remember": Method(Params, _refuse_to_write),
                "memory/recall": Method(recall, self._answering(self._recall)),
                "memory/timeline": Method(timeline, self._answering(self._timeline)),
                "memory/forget": Method(Params, _refuse_to_write),
            },
            self._capabilities,
        )

    async def __call__(self, message: bytes, caller: Caller) -> bytes | None:
        return await self._dispatcher(message, caller)

    def _answering(self, carry_out: Callable[[Any], Awaitable[Any]]) -> Callable[[Any, Caller], Awaitable[Any]]:
        """A handler that comes to an end in time, and for which the service's failures are errors of its own."""

        async def handler(params: Any, _caller: Caller) -> Any:
            try:
                with self._in_time():
                    return await carry_out(params)
            except ServiceFailure as problem:
                raise self._error(problem) from None

        return handler

    def _error(self, problem: ServiceFailure) -> A2MError:
        failure = f"{self._name}: {problem}"
        log.warning("%s", failure)
        silent = {UNANSWERED: self._unanswered} if isinstance(problem, ServiceSilent) else {}
        return A2MError(Code.INTERNAL_ERROR, failure, {"reason": failure, **silent})

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Notes where the service does not answer. Raises ServiceSilent for what takes too long, too."""
        try:
            with anyio.fail_after(self._limits.timeout):
                yield
        except TimeoutError:
            self._unanswered += 1
            raise ServiceSilent(
                f"no answer within {self._limits.timeout:g} s; it may need a longer --timeout, and the tier's own "
                "`timeout` has to be longer than that"
            ) from None
        except ServiceSilent:
            self._unanswered += 1
            raise

    async def describe(self, caller: Caller) -> Mapping[str, Any]:
        """The `memory/describe` result; it comes also when the service does not answer, and says so. Raises A2MError
        when the service answers, and does not say what is needed for it."""
        return await self._describe(Describe(), caller)

    async def _describe(self, params: Describe, _caller: Caller) -> Mapping[str, Any]:
        if params.protocol is not None and not speaks(params.protocol):
            raise A2MError(
                Code.PROTOCOL_NOT_SUPPORTED,
                f"protocol: this server speaks {PROTOCOL}, not {params.protocol!r}",
                {"supported": [PROTOCOL]},
            )
        described: dict[str, Any] = {
            "protocol": PROTOCOL,
            "name": self._name,
            "capabilities": self._capabilities,
            "methods": methods_of(self._capabilities),
            "limits": {"max_recall_limit": self._limits.recall},
        }
        metric = self._service.metric
        width = None
        try:
            with self._in_time():
                width = None if metric is None else await self._service.dimensions()
                await self._see_that_it_answers(width)
        except ServiceSilent as silent:
            log.warning("%s: %s", self._name, silent)
            described["service"] = {"status": "down", "reason": f"{self._name}: {silent}"}
        except ServiceFailure as problem:
            raise self._error(problem) from None
        else:
            described["service"] = {"status": "up"}
        if metric is not None:
            described["embeddings"] = {"dimensions": width, "metric": metric, "metrics": [metric], "model": None}
        return described

    async def _see_that_it_answers(self, width: int | None) -> None:
        """Asks the service in words, and by a vector where it refuses those, maybe before anything is asked. Whatever
        else it refuses, it is there. Raises ServiceSilent."""
        vectors = [None] if not width else [None, [1.0, *[0.0] * (width - 1)]]
        for vector in vectors:
            try:
                await self._asked(self._service.search(_PROBE, vector, 1, vectors=False))
            except ServiceSilent:
                raise
            except ServiceFailure as refused:
                log.info("%s: asked whether it is there: %s", self._name, refused)
            else:
                return

    async def _asked(self, question: Awaitable[list[Result]]) -> list[Result]:
        """The service's answer to a question; that there is one, if only a refusal, is noted."""
        try:
            results = await question
        except ServiceSilent:
            raise
        except ServiceFailure:
            self._unanswered = 0
            raise
        self._unanswered = 0
        return results

    async def _recall(self, params: Recall) -> dict[str, Any]:
        limit = self._limit(params.limit)
        where = parse_where(params.where or {})
        query = params.query or ""
        vector, embeddings = None, False
        if isinstance(params, VectorRecall):
            vector, embeddings = params.embedding, params.embeddings
            if vector is not None:
                vectors.check(vector, "embedding")
                vectors.check_width(vector, await self._service.dimensions(), "embedding")
        if vector is None and not query.strip():
            newest = sorted(await self._listed(where, embeddings), key=lambda each: each.created_at, reverse=True)
            found = newest[:limit]
        else:
            found = await self._best(query, vector, limit, where, embeddings)
        for place, record in enumerate(found):
            record.score = 1 / (place + 1)
        least = params.min_score
        return {"records": [record for record in found if least is None or (record.score or 0) >= least]}

    async def _best(
        self, query: str, vector: Sequence[float] | None, limit: int, where: Where, embeddings: bool
    ) -> list[Record]:
        most = max(limit, self._limits.asked)
        asked = min(limit * _MORE, most) if where else limit
        full = embeddings or "embedding" in where
        results = await self._asked(self._service.search(query, vector, asked, vectors=full))
        while True:
            found, failure = [], None
            try:
                found = self._fitting(self._records(results), where, embeddings)
            except ServiceFailure as problem:  # no result is a record; a later one may be
                failure = problem
            # what a service finds comes nearest first: behind what is too far away there is nothing
            is_far = bool(results) and results[-1].left_out == "far"
            if len(found) >= limit or len(results) < asked or asked >= most or is_far:
                break
            asked = min(asked * _MORE, most)
            try:
                results = await self._asked(self._service.search(query, vector, asked, vectors=full))
            except ServiceFailure:
                if where:
                    raise
                break  # a service that does not take such a limit has answered for the one that was wanted
        if failure is not None:
            raise failure
        return found[:limit]

    async def _timeline(self, params: Timeline) -> dict[str, Any]:
        if params.limit == 0:
            raise invalid_params("limit", "expected 1 or more; leave it out for no limit")
        where = parse_where(params.where or {})
        embeddings = isinstance(params, VectorTimeline) and params.embeddings
        found = sorted(await self._listed(where, embeddings), key=lambda each: each.created_at)
        return {"records": found if params.limit is None else found[-params.limit :]}

    async def _listed(self, where: Where, embeddings: bool) -> list[Record]:
        """All that the service can list and that fits, in its order. Raises ServiceFailure."""
        if not self._service.lists:
            return []
        most = self._limits.listed
        results = await self._asked(self._service.listed(most, vectors=embeddings or "embedding" in where))
        if len(results) > most:
            raise ServiceFailure(
                f"it holds more than {most:,} results, too many to be listed at each call; raise --max-listed, or ask "
                "with a query"
            )
        return self._fitting(self._records(results), where, embeddings)

    def _records(self, results: Sequence[Result]) -> list[Record]:
        """Return the records that results are. Raises ServiceFailure if there are results, but no record."""
        found = records(results, self._paths, self._left_out)
        if len(found) > 1 and not self._has_checked_paths:  # one result alone may well lack a date
            self._has_checked_paths = True
            for useless in useless_paths(results, self._paths):
                log.warning("%s: %s", self._name, useless)
        return found

    def _left_out(self, why: str) -> None:
        if not self._has_left_out:
            self._has_left_out = True
            log.warning("%s: %s; it is left out, and so is every later result that is no record", self._name, why)

    def _fitting(self, found: Sequence[Record], where: Where, embeddings: bool) -> list[Record]:
        """Those that meet `where`; without their vectors unless these are wanted."""
        fitting = [record for record in found if matches(record, where, FIELDS)]
        if not embeddings:
            for record in fitting:
                record.embedding = None
        return fitting

    def _limit(self, limit: int | None) -> int:
        most = self._limits.recall
        if limit is None:
            return min(_DEFAULT_LIMIT, most)
        if limit == 0:
            raise invalid_params("limit", f"expected 1 to {most:,}, got 0")
        if limit > most:
            raise quota("limit", most, limit, "records")
        return limit


async def _refuse_to_write(_params: Params, _caller: Caller) -> Any:
    raise A2MError(
        Code.READ_ONLY, "this server takes no writes: what it holds is loaded by the service behind it (§2.1)"
    )
