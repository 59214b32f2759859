"""The read-only A2M server in front of a service (§2.1).

Rules:
- Every write is rejected. A read returns results or an error with the reason. A failure never looks like an empty
  result.
- The records keep the order of the service, but not its scores: a record's score depends only on its rank.
- A blank query is not sent to a service. The result is the newest records that the service can list; none if it cannot.
- A result that cannot be a record is left out, and logged once. If an answer has no other result, that is a failure.
- The health of this server is that of the service: `memory/describe` sends the service a test search, and returns under
  `service` whether it answered. If the service does not answer a call, the error has the number of such failures in a
  row, so that the router can stop calling it for a while.
- A service cannot check a `where`. So the server requests more results than needed, and again more, until enough fit.
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

# the query of the test search
_PROBE: Final = "is anybody there"

# the factor by which the number of requested results grows if too few fit
_MORE: Final = 4


class SearchLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of calls to a service.

    recall: the most records in a result; `max_recall_limit` (§4.1).
    asked: the most results of one search, when a `where` requires more than the limit.
    listed: the most results of a listing; a service with more results cannot be listed.
    timeout: seconds for one call of a client, which may take several calls of the service. The default is less than the
        default timeout of a tier (5 s), so that the router gets the reason before its own timeout.
    """

    recall: int = 100
    asked: int = 1000
    listed: int = 10_000
    timeout: float = 4.0


class Recall(Params):
    """The parameters of §4.3 that belong to `core`; the others are ignored (§2)."""

    query: Query | None = None
    limit: Count | None = None
    where: dict[str, msgspec.Raw] | None = None
    min_score: float | None = None


class VectorRecall(Recall):
    """The parameters of §4.3 with those of §3.7."""

    embedding: list[float] | None = None
    embeddings: bool = False


class Timeline(Params):
    """The parameters of §4.4 that belong to `core`."""

    limit: Count | None = None
    where: dict[str, msgspec.Raw] | None = None


class VectorTimeline(Timeline):
    """The parameters of §4.4 with those of §3.7."""

    embeddings: bool = False


class Server:
    """The server, an `Answering`. It stores nothing: each call reads from the service.

    Mutable state: how many times in a row the service did not answer, whether a left-out result was logged, and whether
    the paths have been checked.
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
        """Return a handler with a time limit, which converts failures of the service to errors of the call."""

        async def handler(params: Any, _caller: Caller) -> Any:
            try:
                with self._in_time():
                    return await carry_out(params)
            except ServiceFailure as problem:
                raise self._error(problem) from None

        return handler

    def _error(self, problem: ServiceFailure) -> A2MError:
        failure = f"{self._name}: {problem}"
        log.warning("service=%s call failed: %s", self._name, problem)
        silent = {UNANSWERED: self._unanswered} if isinstance(problem, ServiceSilent) else {}
        return A2MError(Code.INTERNAL_ERROR, failure, {"reason": failure, **silent})

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Count failures of the service to answer. If the time limit is exceeded, raises ServiceSilent, too."""
        try:
            with anyio.fail_after(self._limits.timeout):
                yield
        except TimeoutError:
            self._unanswered += 1
            raise ServiceSilent(
                f"no answer within {self._limits.timeout:g} s; if it needs more time, raise --timeout, and the tier's "
                "`timeout` above that"
            ) from None
        except ServiceSilent:
            self._unanswered += 1
            raise

    async def describe(self, caller: Caller) -> Mapping[str, Any]:
        """Return the result of `memory/describe`. If the service does not answer, the result says so.

        Raises A2MError if the service answers with an error to a request for the width of its vectors.
        """
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
                await self._probe(width)
        except ServiceSilent as silent:
            log.warning("service=%s down: %s", self._name, silent)
            described["service"] = {"status": "down", "reason": f"{self._name}: {silent}"}
        except ServiceFailure as problem:
            raise self._error(problem) from None
        else:
            described["service"] = {"status": "up"}
        if metric is not None:
            described["embeddings"] = {"dimensions": width, "metric": metric, "metrics": [metric], "model": None}
        return described

    async def _probe(self, width: int | None) -> None:
        """Send the service a test search in words; if that fails, one by vector. Raises ServiceSilent.

        The second search is needed because a service may reject words without any call to its server. A service that
        returns another error is up.
        """
        vectors = [None] if not width else [None, [1.0, *[0.0] * (width - 1)]]
        for vector in vectors:
            try:
                await self._request(self._service.search(_PROBE, vector, 1, vectors=False))
            except ServiceSilent:
                raise
            except ServiceFailure as failure:
                log.info("service=%s test search failed: %s", self._name, failure)
            else:
                return

    async def _request(self, call: Awaitable[list[Result]]) -> list[Result]:
        """Await a request to the service. Any answer, also an error, resets the count of failures to answer."""
        try:
            results = await call
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
        requested = min(limit * _MORE, most) if where else limit
        full = embeddings or "embedding" in where
        results = await self._request(self._service.search(query, vector, requested, vectors=full))
        while True:
            found, failure = [], None
            try:
                found = self._fitting(self._records(results), where, embeddings)
            except ServiceFailure as problem:  # no result is a record; a later one may be
                failure = problem
            # the nearest results come first: after one that is too far away there are only farther ones
            is_far = bool(results) and results[-1].left_out == "far"
            if len(found) >= limit or len(results) < requested or requested >= most or is_far:
                break
            requested = min(requested * _MORE, most)
            try:
                results = await self._request(self._service.search(query, vector, requested, vectors=full))
            except ServiceFailure:
                if where:
                    raise
                break  # the service rejects the higher limit, but it has answered for the lower one
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
        """Return all records that the service lists and that meet `where`, in its order. Raises ServiceFailure."""
        if not self._service.lists:
            return []
        most = self._limits.listed
        results = await self._request(self._service.listed(most, vectors=embeddings or "embedding" in where))
        if len(results) > most:
            raise ServiceFailure(
                f"it has more than {most:,} results, too many to list for each call; raise --max-listed, or recall "
                "with a query"
            )
        return self._fitting(self._records(results), where, embeddings)

    def _records(self, results: Sequence[Result]) -> list[Record]:
        """Return the records that results are. Raises ServiceFailure if there are results, but no record."""
        found = records(results, self._paths, self._left_out)
        if len(found) > 1 and not self._has_checked_paths:  # one result alone may well lack a date
            self._has_checked_paths = True
            for useless in useless_paths(results, self._paths):
                log.warning("service=%s %s", self._name, useless)
        return found

    def _left_out(self, why: str) -> None:
        if not self._has_left_out:
            self._has_left_out = True
            log.warning(
                "service=%s result left out, and later ones like it without a further log line: %s", self._name, why
            )

    def _fitting(self, found: Sequence[Record], where: Where, embeddings: bool) -> list[Record]:
        """Return the records that meet `where`, without their vectors unless `embeddings` is set."""
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
    raise A2MError(Code.READ_ONLY, "this server is read-only: its records come from the service behind it (§2.1)")
