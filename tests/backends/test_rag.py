"""a2m-rag: the server in front of a service, its profile, and results as records, with services made up here."""

import email.message
import errno
import json
import re
import socket
import subprocess
import sys
import textwrap
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from pathlib import Path as FilePath
from typing import Any

import anyio
import anyio.to_thread
import httpx
import msgspec
import numpy as np
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from a2m_rag import moments
from a2m_rag.filling import filled
from a2m_rag.headers import headers_from
from a2m_rag.mapping import FIELDS, Path, Paths, records
from a2m_rag.over_python import PythonService, python_service
from a2m_rag.server import Server
from a2m_rag.service import CannotStart, Result, ServiceFailure, ServiceSilent, message_of
from a2m_rag.threads import Threads
from a2m_rag.thresholds import NearService, Threshold
from a2m_router.conformance.__main__ import main as conformance
from a2m_router.conformance.checking import Target
from a2m_router.conformance.client import InProcess
from a2m_router.conformance.running import State, outcomes
from a2m_router.protocol.server.stdio import LOCAL
from a2m_router.protocol.wire.equality import parse_where
from a2m_router.protocol.wire.matching import matches
from a2m_router.protocol.wire.records import Record
from a2m_router.protocol.wire.timestamps import UNDATED, parse, render
from tests.support.addresses import reserved_port
from tests.support.retrieval import PATHS, Corpus, Moody, ask, contents, message, refused, server, unanswered

COMMAND = [sys.executable, "-m", "a2m_rag.cli"]
# far more than anything here takes; a hang becomes a failure
PATIENCE = 60


def note(number: int, **fields: Any) -> dict[str, Any]:
    return {"id": str(number), "content": f"note {number}", **fields}


# --- the profile


@pytest.mark.parametrize("metric", [None, "cosine"])
@pytest.mark.parametrize("lists", [True, False])
def test_the_read_only_profile_is_kept(lists: bool, metric: str | None) -> None:
    corpus = Corpus(*(note(n, at=n, metadata={"n": n}) for n in range(30)), "a text", lists=lists, metric=metric)
    with start_blocking_portal() as portal:
        served = server(corpus)
        target = Target(InProcess(lambda line: portal.call(served, line, LOCAL)))
        target.meet()
        came = list(outcomes(target))
    assert target.read_only
    assert [outcome for outcome in came if outcome.state is State.FAILED] == []
    assert {outcome.check.section for outcome in came if outcome.state is State.PASSED} >= {"core", "read_only"}


@pytest.fixture
def handbook(tmp_path: FilePath) -> FilePath:
    """Make a folder with a module that prints at import and in each call."""
    (tmp_path / "handbook.py").write_text(
        textwrap.dedent("""
        print("noise of an import")
        PAGES = [{"id": n, "content": f"page {n}", "created_at": n, "metadata": {"n": n}} for n in range(20)]
        def search(query, limit):
            print("noise of a call")
            return iter(PAGES)
        def everything():
            return PAGES
        """)
    )
    return tmp_path


def test_a_process_keeps_the_profile_on_stdio(
    handbook: FilePath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FilePath.cwd()))
    monkeypatch.chdir(handbook)
    command = [*COMMAND, "python", "handbook:search", "--list", "handbook:everything"]
    code = conformance(["--stdio", *command])
    assert code == 0, capsys.readouterr().out


@pytest.mark.process
def test_a_process_keeps_the_profile_on_http(
    handbook: FilePath, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FilePath.cwd()))
    monkeypatch.chdir(handbook)
    with serving_http("python", "handbook:search", "--name", "pages") as url:
        code = conformance(["--http", url])
    assert code == 0, capsys.readouterr().out


@contextmanager
def serving_http(*arguments: str) -> Iterator[str]:
    command = [*COMMAND, *arguments, "--serve", "127.0.0.1:0"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as serving:
        try:
            assert serving.stderr is not None
            url = next(found[0].decode() for line in serving.stderr if (found := re.search(rb"http://\S+", line)))
            threading.Thread(target=serving.stderr.read, daemon=True).start()
            yield url
        finally:
            serving.terminate()
            assert serving.wait(PATIENCE) == 0


PARAMS_OF_ALL_KINDS: list[dict[str, Any]] = [
    {},
    {"records": 3},
    {"records": [{"content": "x", "tier": "t"}]},
    {"query": 5},
    {"where": []},
]


@pytest.mark.anyio
async def test_writes_are_refused_whatever_they_carry() -> None:
    served = server(Corpus())
    for method in ("remember", "forget"):
        for params in PARAMS_OF_ALL_KINDS:
            assert (await refused(served, method, **params))[0] == -32004
    assert (await refused(served, "promote", ids=["1"], tier="t"))[0] == -32003
    assert (await refused(served, "fetch"))[0] == -32003


@pytest.mark.anyio
async def test_parameters_of_capabilities_that_are_not_declared_are_ignored() -> None:
    served = server(Corpus("one"))
    found = await contents(served, query="x", embedding="no vector", tier=5, key_prefix=[], owner={}, prompt=1)
    assert found == ["one"]


@pytest.mark.anyio
async def test_another_version_is_not_pretended() -> None:
    assert (await refused(server(Corpus()), "describe", protocol="a2m/7"))[0] == -32007


# --- recall


@pytest.mark.anyio
async def test_the_order_is_the_services_and_scores_descend() -> None:
    found = (await ask(server(Corpus("c", "a", "b")), "recall", query="x"))["records"]
    assert [record["content"] for record in found] == ["c", "a", "b"]
    assert [record["score"] for record in found] == [1.0, 1 / 2, 1 / 3]
    assert await contents(server(Corpus("c", "a", "b")), query="x", min_score=0.5) == ["c", "a"]


@pytest.mark.anyio
async def test_a_limit_is_asked_for_and_kept_to() -> None:
    corpus = Corpus(*map(str, range(300)))
    served = server(corpus, recall=50)
    assert len(await contents(served, query="x")) == 8
    assert len(await contents(served, query="x", limit=50)) == 50
    assert corpus.asked == [("x", 8), ("x", 50)]
    assert (await refused(served, "recall", query="x", limit=51))[0] == -32006
    assert (await refused(served, "recall", query="x", limit=0))[0] == -32602
    assert (await ask(served, "describe"))["limits"] == {"max_recall_limit": 50}


@pytest.mark.anyio
@pytest.mark.parametrize("query", [None, "", "  \n"])
async def test_a_blank_query_is_not_sent_and_finds_the_newest(query: str | None) -> None:
    corpus = Corpus(note(1, at="2020-01-01"), note(2, at="2024-01-01"), note(3), note(4), note(5, at="2022-01-01"))
    served = server(corpus)
    assert await contents(served, query=query, limit=4) == ["note 2", "note 5", "note 1", "note 3"]
    assert corpus.asked == []
    unlisted = Corpus("one", lists=False)
    assert await contents(server(unlisted), query=query) == []
    assert unlisted.asked == []


@pytest.mark.anyio
async def test_an_id_is_looked_up_in_the_listing() -> None:
    served = server(Corpus(*map(note, range(20))))
    assert await contents(served, where={"id": ["3", "17", "nobody's"]}) == ["note 3", "note 17"]


@pytest.mark.anyio
async def test_a_where_is_met_by_asking_for_more_and_more() -> None:
    corpus = Corpus(*(note(n, metadata={"fits": n % 50 == 49}) for n in range(400)))
    served = server(corpus, asked=300)
    assert await contents(served, query="x", limit=3, where={"fits": True}) == ["note 49", "note 99", "note 149"]
    assert [asked for _, asked in corpus.asked] == [12, 48, 192]
    corpus.asked.clear()
    # the search ends at its bound, with fewer results than wanted
    assert len(await contents(served, query="x", limit=8, where={"fits": True})) == 6
    assert [asked for _, asked in corpus.asked] == [32, 128, 300]
    corpus.asked.clear()
    # the search asks for no more results than there are
    few = server(small := Corpus(*map(note, range(5))))
    assert await contents(few, query="x", where={"id": "4"}) == ["note 4"]
    assert len(small.asked) == 1


@pytest.mark.anyio
async def test_results_that_are_one_record_do_not_use_up_the_limit() -> None:
    served = server(Corpus(*["the same"] * 9, "another"))
    assert await contents(served, query="x", limit=2) == ["the same", "another"]


@given(
    values=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(["a", "b", None])), max_size=60),
    limit=st.integers(1, 20),
    wanted=st.lists(st.sampled_from(["a", "b", None, 1]), max_size=3),
)
def test_a_recall_is_the_services_order_filtered_deduplicated_and_cut(
    values: list[tuple[int, str | None]], limit: int, wanted: list[str | None]
) -> None:
    corpus = Corpus(*(note(n, metadata={} if kind is None else {"kind": kind}) for n, kind in values))
    first: dict[int, str | None] = {}
    for number, kind in values:
        first.setdefault(number, kind)
    expected = [f"note {n}" for n, kind in first.items() if kind in wanted][:limit]
    found = anyio.run(lambda: contents(server(corpus), query="x", limit=limit, where={"kind": wanted}))
    assert found == expected


# --- thresholds


def near(corpus: Corpus, option: str, value: float, path: str = "score") -> Server:
    return server(NearService(corpus, Path(path), Threshold(option, value)))


@pytest.mark.anyio
async def test_what_is_not_near_enough_is_gone_before_ranks_are_made() -> None:
    corpus = Corpus(note(1, score=0.9), note(2, score=0.2), note(3, score=0.5), note(4, score=0.49))
    similar = near(corpus, "--min-score", 0.5)
    found = (await ask(similar, "recall", query="x"))["records"]
    assert [(record["id"], record["score"]) for record in found] == [("1", 1.0), ("3", 1 / 2)]
    assert await contents(near(corpus, "--max-distance", 0.49), query="x") == ["note 2", "note 4"]
    assert await contents(near(corpus, "--min-score", 1), query="x") == []
    # a listed record has no meaningful score
    assert len(await contents(similar, "timeline")) == len(await contents(similar)) == 4
    assert await contents(similar, where={"id": "2"}) == ["note 2"]


@pytest.mark.anyio
async def test_a_service_is_not_asked_for_more_where_nothing_more_is_near() -> None:
    corpus = Corpus(*(note(n, score=-n, metadata={"even": n % 2 == 0}) for n in range(300)))
    assert len(await contents(near(corpus, "--min-score", -4), query="x")) == 5
    assert await contents(near(corpus, "--min-score", -4), query="x", where={"even": True}, limit=2) == [
        "note 0",
        "note 2",
    ]
    assert await contents(near(corpus, "--min-score", -4), query="x", where={"even": None}, limit=2) == []
    assert [asked for _, asked in corpus.asked] == [8, 8, 8]


readable_scores: st.SearchStrategy[Any] = (
    st.floats(allow_nan=False)
    | st.integers(-3, 3)
    | st.sampled_from([Decimal("0.5"), Fraction(1, 2), np.float32(0.25), np.int64(1), np.array(0.75)])
    | st.sampled_from(["0.50", "1e400", "-3", "0.30000000000000004001"]).map(lambda text: msgspec.Raw(text.encode()))
)
unreadable_scores = st.sampled_from([None, "0.9", True, float("nan"), [0.9], {"score": 0.9}, np.array([0.9]), ""])


@given(
    scores=st.lists(readable_scores | unreadable_scores, max_size=12),
    value=st.sampled_from([-1, 0, 0.25, 0.5, 1, 2.5]),
    option=st.sampled_from(["--min-score", "--max-distance"]),
)
def test_a_result_is_there_if_its_score_can_be_read_and_is_near(scores: list[Any], value: float, option: str) -> None:
    def number(score: Any) -> float | None:
        if isinstance(score, msgspec.Raw):
            return float(bytes(score))
        if (
            score is None
            or isinstance(score, str | bool | list | dict)
            or bool(getattr(score, "shape", None))
            or score != score
        ):
            return None
        return float(score)

    served = near(Corpus(*(note(n, score=score) for n, score in enumerate(scores))), option, value)
    numbers = list(map(number, scores))
    if scores and all(each is None for each in numbers):
        code, sentence = anyio.run(lambda: refused(served, "recall", query="x", limit=50))
        assert (code, "expected its score, a number, at 'score', got " in sentence) == (-32603, True)
        return
    kept = [
        n
        for n, each in enumerate(numbers)
        if each is not None and (each >= value if "min" in option else each <= value)
    ]
    assert anyio.run(lambda: contents(served, query="x", limit=50)) == [f"note {n}" for n in kept]


@pytest.mark.anyio
async def test_a_score_that_cannot_be_read_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    served = near(
        Corpus(note(1, score="0.9"), "a text", None, note(2, score=0.9), note(3, score=0.1)), "--min-score", 0.5
    )
    for _ in range(2):
        assert await contents(served, query="x") == ["note 2"]
        assert await contents(served, query="x", limit=1) == ["note 2"]
    [line] = [line for line in caplog.messages if line.startswith("--min-score")]
    assert line == (
        "--min-score 0.5: result left out, and later ones like it without a further log line: expected its score, "
        "a number, at 'score', got the string '0.9'; it has 'id', 'content', 'score'; to_number(…) converts a string "
        "to a number"
    )
    assert await contents(near(Corpus(note(1, score="0.9")), "--min-score", 0.5, "to_number(score)"), query="x") == [
        "note 1"
    ]
    wrong = near(Corpus(note(1, rank=1), note(2, rank=2)), "--min-score", 0.5)
    assert "got nothing; it has 'id', 'content', 'rank'" in (await refused(wrong, "recall", query="x"))[1]


def test_a_score_that_has_a_path_is_not_of_the_rest() -> None:
    paths = Paths(content=Path("content"), metadata="*", score=Path("score"))
    assert only({"content": "x", "score": 0.5}, paths).metadata is UNSET


# --- timeline


@pytest.mark.anyio
async def test_a_timeline_ascends_and_a_limit_keeps_the_newest() -> None:
    served = server(Corpus(note(1, at=3000), note(2, at=1000), note(3), note(4, at=2000, metadata={"a": 1})))
    assert await contents(served, "timeline") == ["note 3", "note 2", "note 4", "note 1"]
    assert await contents(served, "timeline", limit=2) == ["note 4", "note 1"]
    assert await contents(served, "timeline", limit=9) == ["note 3", "note 2", "note 4", "note 1"]
    assert await contents(served, "timeline", where={"a": 1.0}) == ["note 4"]
    assert (await refused(served, "timeline", limit=0))[0] == -32602
    assert await contents(server(Corpus("one", lists=False)), "timeline") == []


@pytest.mark.anyio
async def test_what_is_too_much_to_be_listed_is_an_error_and_not_half_of_it() -> None:
    served = server(Corpus(*map(note, range(11))), listed=10)
    for method in ("timeline", "recall"):
        code, sentence = await refused(served, method)
        assert (code, "more than 10 results" in sentence) == (-32603, True)
    assert len(await contents(server(Corpus(*map(note, range(10))), listed=10), "timeline")) == 10


# --- vectors


@pytest.mark.anyio
async def test_vectors_are_taken_and_given_where_the_service_has_them() -> None:
    corpus = Corpus("one", metric="dot")
    served = server(corpus)
    described = await ask(served, "describe")
    assert described["capabilities"] == ["core", "embeddings"]
    assert described["embeddings"] == {"dimensions": 2, "metric": "dot", "metrics": ["dot"], "model": None}
    for method, params in (("recall", {"embedding": [1, 0]}), ("recall", {"query": "x"}), ("timeline", {})):
        [plain] = (await ask(served, method, **params))["records"]
        assert "embedding" not in plain
        [full] = (await ask(served, method, **params, embeddings=True))["records"]
        assert full["embedding"] == [0.5, 2.0]
    assert (await refused(served, "recall", embedding=[1]))[0] == -32008
    assert (await refused(served, "recall", embedding=[]))[0] == -32602
    assert await contents(served, where={"embedding": None}, query="x") == []


# --- failures


class Failing(Corpus):
    async def search(self, query: str, vector: Any, limit: int, *, vectors: bool) -> list[Result]:
        raise ServiceFailure("it is on fire")

    async def listed(self, most: int, *, vectors: bool) -> list[Result]:
        await anyio.sleep_forever()
        raise AssertionError


@pytest.mark.anyio
async def test_failing_and_slow_services_are_errors_that_say_so() -> None:
    served = server(Failing(), timeout=0.02)
    assert await refused(served, "recall", query="x") == (-32603, "corpus: it is on fire")
    code, sentence = await refused(served, "timeline")
    assert (code, "no answer within 0.02 s" in sentence) == (-32603, True)


@pytest.mark.anyio
@pytest.mark.parametrize("odd", [None, {"score": None}, {"score": 0.1}], ids=["none", "unreadable", "out of order"])
async def test_a_result_beyond_the_threshold_does_not_end_the_search(odd: Any) -> None:
    values = [
        {"id": f"{n}", "content": f"note {n}", "metadata": {"team": "x" if n >= 60 else "y"}, "score": 0.9 - n / 1000}
        for n in range(100)
    ]
    if odd is not None:
        values[4].update(odd)
    served = server(NearService(Corpus(*values), Path("score"), Threshold("--min-score", 0.5)))
    found = (await ask(served, "recall", query="q", limit=8, where={"team": "x"}))["records"]
    assert [record["id"] for record in found] == [f"{n}" for n in range(60, 68)]


@pytest.mark.anyio
async def test_silences_of_the_service_are_counted_until_it_answers() -> None:
    moody = Moody("one", lists=False)
    served = server(moody)
    silence, refusal = ServiceSilent("it cannot be reached"), ServiceFailure("400 Bad Request")
    moody.failure = silence
    assert [await unanswered(served, query="x") for _ in range(3)] == [1, 2, 3]
    assert await contents(served, "timeline") == await contents(served) == []  # answered without the service
    assert await unanswered(served, query="x") == 4
    moody.failure = refusal
    assert await unanswered(served, query="x") is None
    moody.failure = silence
    assert await unanswered(served, query="x") == 1  # a refusal is an answer
    moody.failure = None
    assert await contents(served, query="x") == ["one"]
    moody.failure = silence
    assert await unanswered(served, query="x") == 1


@pytest.mark.anyio
async def test_what_takes_too_long_is_silence() -> None:
    served = server(Failing(), timeout=0.02)
    assert [await unanswered(served, "timeline") for _ in range(2)] == [1, 2]
    assert await unanswered(served, query="x") is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failure", "service"),
    [
        (None, {"status": "up"}),
        (ServiceFailure("422: no such query"), {"status": "up"}),
        (ServiceSilent("it cannot be reached"), {"status": "down", "reason": "corpus: it cannot be reached"}),
    ],
    ids=["answers", "refuses", "silent"],
)
async def test_describe_tells_how_the_service_is(failure: Exception | None, service: dict[str, str]) -> None:
    for metric in (None, "cosine"):
        moody = Moody("one", metric=metric)
        moody.failure = failure
        described = await ask(server(moody), "describe")
        assert described["service"] == service
        assert described["name"] == "corpus"


@pytest.mark.anyio
async def test_describe_tells_of_a_service_that_hangs_and_of_one_that_is_back() -> None:
    class Hanging(Moody):
        hangs = True

        async def search(self, *asked: Any, **options: Any) -> list[Result]:
            if self.hangs:
                await anyio.sleep_forever()
            return await super().search(*asked, **options)

    hanging = Hanging("one")
    served = server(hanging, timeout=0.02)
    down = (await ask(served, "describe"))["service"]
    assert (down["status"], "no answer within 0.02 s" in down["reason"]) == ("down", True)
    hanging.hangs = False
    assert (await ask(served, "describe"))["service"] == {"status": "up"}
    hanging.failure = ServiceSilent("gone")
    assert await unanswered(served, query="x") == 1  # failures before its last answer do not count


@pytest.mark.anyio
async def test_a_vector_only_service_is_probed_with_a_vector() -> None:
    class OnlyVectors(Moody):
        async def search(self, query: str, vector: Any, limit: int, *, vectors: bool) -> list[Result]:
            if vector is None:
                raise ServiceFailure("nothing makes vectors of words")
            return await super().search(query, vector, limit, vectors=vectors)

    service = OnlyVectors("one", metric="cosine")
    served = server(service)
    assert (await ask(served, "describe"))["service"] == {"status": "up"}
    assert len(service.asked) == 1
    service.failure = ServiceSilent("it cannot be reached")
    assert (await ask(served, "describe"))["service"]["status"] == "down"


def refused_connection(_query: str, _limit: int) -> Any:
    with reserved_port() as port:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/").read()


def answering(status: int) -> Exception:
    return urllib.error.HTTPError("http://x/", status, "said so", email.message.Message(), None)


def answered_by_httpx(status: int) -> Exception:
    request = httpx.Request("GET", "http://x/")
    return httpx.HTTPStatusError("said so", request=request, response=httpx.Response(status, request=request))


def wrapped(inner: Exception) -> Exception:
    """Return an exception as libraries raise it: their own one, raised while another is handled."""
    outer = RuntimeError("the search failed")
    outer.__context__ = inner
    return outer


SILENCES: list[Exception] = [
    TimeoutError(),
    ConnectionRefusedError(111, "Connection refused"),
    ConnectionResetError(),
    socket.gaierror(-2, "Name or service not known"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    httpx.ConnectError("nobody there"),
    httpx.ReadTimeout("too slow"),
    answering(503),
    answered_by_httpx(500),
    wrapped(ConnectionRefusedError()),
    wrapped(httpx.RemoteProtocolError("it hung up")),
    wrapped(answered_by_httpx(502)),
]
REFUSALS: list[Exception] = [
    ValueError("no such query"),
    KeyError("x"),
    FileNotFoundError(errno.ENOENT, "No such file"),
    PermissionError(errno.EACCES, "Permission denied"),
    answering(404),
    answered_by_httpx(422),
    wrapped(answered_by_httpx(429)),
    wrapped(ValueError()),
]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("failure", "silent"),
    [*((each, True) for each in SILENCES), *((each, False) for each in REFUSALS)],
    ids=lambda value: repr(value)[:60],
)
@pytest.mark.parametrize("is_async", [False, True])
async def test_what_a_function_raises_is_silence_where_nobody_answered_it(
    failure: Exception, silent: bool, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(query: str, limit: int) -> Any:
        raise failure

    async def search_later(query: str, limit: int) -> Any:
        raise failure

    monkeypatch.setattr(sys.modules[__name__], "search", search_later if is_async else search, raising=False)
    served = server(python_service(f"{__name__}:search", None))
    assert (await unanswered(served, query="x") is not None) == silent
    assert (await ask(served, "describe"))["service"]["status"] == ("down" if silent else "up")


@pytest.mark.anyio
async def test_a_function_that_asks_where_nobody_listens_is_silent() -> None:
    assert await unanswered(server(python_service(f"{__name__}:refused_connection", None)), query="x") == 1


each_that_is_no_record = pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "expected an object or a string, got nothing"),
        (True, "expected an object or a string, got True"),
        ({"content": None}, "expected its content, a string, at 'content', got nothing; it has 'content'"),
        ({"content": ["x"]}, "got a list; it has 'content'"),
        ({str(n): 0 for n in range(14)}, "'10', '11' and 2 more"),
        ({"text": "x"}, "expected its content, a string, at 'content', got nothing; it has 'text'"),
        ({}, "got nothing; it is empty"),
        ({"content": 5}, "got 5"),
        (5, "expected an object or a string, got 5"),
        (["x"], "expected an object or a string, got a list"),
        ({"content": "x", "id": 1.5}, "expected its id, a string or a whole number, at 'id', got 1.5"),
        ({"content": "x", "metadata": "m"}, "expected its metadata, an object, at 'metadata', got the string 'm'"),
        ({"content": "x", "uri": 3}, "expected its uri, a string, at 'uri', got 3"),
        ({"content": "\ud800"}, "half of a surrogate pair"),
        ({"content": "x", "metadata": {"a": "\ud800"}}, "cannot be encoded as JSON"),
        ({"content": "x", "metadata": {"a": object()}}, "contains an object of the type object"),
        ({"content": "x", "metadata": {"a": json.loads("[" * 120 + "]" * 120)}}, "nested more than 100 deep"),
    ],
)


@pytest.mark.anyio
@each_that_is_no_record
async def test_a_result_that_is_no_record_is_left_out_and_the_log_says_so_once(
    value: Any, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    served = server(Corpus(note(1, at=1), value, note(2, at=1), value))
    for _ in range(2):
        assert await contents(served, query="x") == ["note 1", "note 2"]
        assert await contents(served, query="x", limit=2) == ["note 1", "note 2"]
        assert await contents(served, "timeline") == ["note 1", "note 2"]
        assert await contents(served, where={"id": "2"}) == ["note 2"]
        assert await contents(served) == ["note 1", "note 2"]
    [line] = caplog.messages
    assert line.startswith("service=corpus result left out, ")
    assert "result 2 of 4: " in line
    assert said in line


@pytest.mark.anyio
@each_that_is_no_record
async def test_an_answer_in_which_nothing_is_a_record_is_an_error(value: Any, said: str) -> None:
    served = server(Corpus(value, value))
    for method, params in (("recall", {"query": "x"}), ("recall", {"query": "x", "limit": 1}), ("timeline", {})):
        code, sentence = await refused(served, method, **params)
        assert code == -32603
        assert "corpus: result 1 of 2: " in sentence
        assert said in sentence


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            [{"content": "x", "ref": 1, "at": "2024-01-01"}, {"content": "y", "at": 5}],
            [
                "service=corpus none of 2 results has an id at 'id': the service's own ids, or ids from the content, "
                "are used; see --id; the first result: it has 'content', 'ref', 'at'"
            ],
        ),
        (
            [{"content": "x", "id": 0, "at": "soon"}, {"content": "y", "id": ""}],
            ["service=corpus none of 2 results has a readable date at 'at': these records are undated (1970); "
             "see --created-at; the first result: it has 'content', 'id', 'at'"],
        ),
        ([{"content": "x"}, {"content": "y", "id": "b", "at": "2024-01-01"}], []),
        ([{"content": "x"}], []),
        (["a text", "another"], []),
        ([], []),
    ],
)  # fmt: skip
async def test_a_path_that_finds_nothing_in_a_whole_answer_is_logged_once(
    values: list[Any], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    served = server(Corpus(*values))
    for _ in range(2):
        await contents(served, query="x")
        await contents(served, "timeline")
    assert caplog.messages == said


@pytest.mark.anyio
async def test_what_is_left_out_does_not_use_up_the_limit() -> None:
    corpus = Corpus(None, {"id": "no content"}, "one", 5, "two")
    assert await contents(server(corpus), query="x", limit=1) == ["one"]
    assert await contents(server(corpus), query="x", limit=2) == ["one", "two"]


class Small(Corpus):
    """A service that refuses a limit over 2."""

    async def search(self, query: str, vector: Any, limit: int, *, vectors: bool) -> list[Result]:
        if limit > 2:
            raise ServiceFailure("no such limit")
        return await super().search(query, vector, limit, vectors=vectors)


@pytest.mark.anyio
async def test_what_is_left_out_of_a_service_with_a_small_limit_leaves_the_rest() -> None:
    assert await contents(server(Small("one", None, "two")), query="x", limit=2) == ["one"]
    assert "result 1 of 2" in (await refused(server(Small(None, None, "two")), "recall", query="x", limit=2))[1]
    assert (await refused(server(Small("one", "two", "three")), "recall", query="x"))[1] == "corpus: no such limit"


@given(
    st.lists(
        st.builds(note, st.integers(0, 5))
        | st.sampled_from(["a text", None, 7, {}, {"content": None}, {"content": "bare", "id": None, "metadata": None}])
    )
)
def test_whatever_is_among_the_results_the_others_are_the_records(values: list[Any]) -> None:
    kept: dict[Any, str] = {}
    for value in values:
        content = value if isinstance(value, str) else value.get("content") if isinstance(value, dict) else None
        if content is not None:
            id = value.get("id") if isinstance(value, dict) else None
            kept.setdefault(id or content, content)
    served = server(Corpus(*values))
    if values and not kept:
        assert anyio.run(lambda: refused(served, "recall", query="x", limit=100))[0] == -32603
        return
    assert anyio.run(lambda: contents(served, query="x", limit=100)) == [*kept.values()]
    assert anyio.run(lambda: contents(served, "timeline")) == [*kept.values()]


# --- results as records


def only(value: Any, paths: Paths = PATHS, **fields: Any) -> Record:
    [record] = records([Result(value, **fields)], paths)
    return record


@given(st.lists(st.text(max_size=3)))
def test_an_id_made_of_content_is_the_contents_own(texts: list[str]) -> None:
    found = records([Result(text) for text in texts], PATHS)
    assert [record.content for record in found] == list(dict.fromkeys(texts))
    assert [only({"content": record.content}).id for record in found] == [record.id for record in found]


def test_an_id_is_the_paths_or_the_services_or_made() -> None:
    assert only({"content": "x", "id": "a"}, id="b").id == "a"
    assert only({"content": "x", "id": 7}, id="b").id == "7"
    assert only({"content": "x", "id": ""}, id="b").id == "b"
    assert only({"content": "x"}).id == only("x").id != only("y").id


def test_the_rest_is_all_that_no_other_field_is() -> None:
    paths = Paths(content=Path("text"), id=Path('"the id"'), created_at=Path("at.time"), metadata="*")
    value = {"text": "x", "the id": 1, "at": {"time": "2024-01-01"}, "author": "Ada", "n": 1.50}
    record = only(value, paths)
    assert isinstance(record.metadata, msgspec.Raw)
    assert msgspec.json.decode(record.metadata) == {"at": {"time": "2024-01-01"}, "author": "Ada", "n": 1.5}
    assert record.created_at == "2024-01-01T00:00:00.000Z"
    assert only({"text": "x"}, paths).metadata is UNSET
    either = Paths(content=Path("content || text || document"), metadata="*")
    record = only({"text": "x", "document": "handbook.pdf"}, either)
    assert (record.content, bytes(record.metadata)) == ("x", b'{"document":"handbook.pdf"}')  # type: ignore[arg-type]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=5), json_values, max_size=4))
def test_metadata_is_what_it_was(metadata: dict[str, Any]) -> None:
    record = only({"content": "x", "metadata": metadata})
    assert json.loads(bytes(record.metadata)) == metadata  # type: ignore[arg-type]  # it is there


few_values = st.sampled_from([None, 1, 1.0, True, "user", "x", [], [None, 1], ["x", "user"]]) | json_values


@given(
    metadata=st.dictionaries(st.sampled_from(["a", "b", "role", "owner"]), few_values, max_size=4),
    conditions=st.dictionaries(
        st.sampled_from(["a", "b", "role", "owner", "tier", "content"]), few_values, min_size=1, max_size=2
    ),
)
def test_a_where_compares_fields_first_and_metadata_otherwise(
    metadata: dict[str, Any], conditions: dict[str, Any]
) -> None:
    record = only({"content": "x", "role": "user", "metadata": metadata})
    expected = True
    for name, wanted in conditions.items():
        value = {"role": "user", "content": "x"}.get(name, metadata.get(name))
        among = wanted if isinstance(wanted, list) else [wanted]
        expected &= any(same(value, each) for each in among)
    where = parse_where({name: msgspec.Raw(json.dumps(wanted).encode()) for name, wanted in conditions.items()})
    assert matches(record, where, FIELDS) == expected


def same(a: Any, b: Any) -> bool:
    """Return whether two values are equal as JSON."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    return bool(a == b)


def test_a_path_that_is_none_is_refused_where_it_is_written() -> None:
    for text in ("", "[", "foo(@)", "a.`", "length()"):
        with pytest.raises(ValueError, match="is not a valid JMESPath"):
            Path(text)


# --- created_at

WHEN = datetime(2024, 5, 1, 10, 30, 15, 123000, UTC)


@pytest.mark.parametrize(
    "said",
    [
        "2024-05-01T10:30:15.123Z",
        "2024-05-01t10:30:15.123z",
        "2024-05-01 12:30:15.123+02:00",
        "2024-05-01T10:30:15.123",
        "20240501T103015.123Z",
        " 2024-05-01T10:30:15.123999Z ",
        WHEN,
        WHEN.replace(tzinfo=None),
        WHEN.astimezone(timezone(timedelta(hours=-7))),
        WHEN.timestamp(),
        round(WHEN.timestamp() * 1000),
        str(round(WHEN.timestamp() * 1000)),
    ],
)
def test_a_time_may_be_spelt_in_many_ways(said: Any) -> None:
    assert only({"content": "x", "at": said}).created_at == "2024-05-01T10:30:15.123Z"


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("2024", "2024-01-01T00:00:00.000Z"),
        ("2024-05", "2024-05-01T00:00:00.000Z"),
        (date(2024, 5, 1), "2024-05-01T00:00:00.000Z"),
        ("2016-12-31T23:59:60Z", "2016-12-31T23:59:59.000Z"),
        ("Wed, 01 May 2024 10:30:15 GMT", "2024-05-01T10:30:15.000Z"),
        (0, "1970-01-01T00:00:00.000Z"),
    ],
)
def test_a_time_may_be_coarse(said: Any, meant: str) -> None:
    assert only({"content": "x", "at": said}).created_at == meant


@given(json_values | st.dates() | st.datetimes() | st.binary())
def test_whatever_is_said_becomes_a_time_or_the_one_fixed_time(said: Any) -> None:
    record = only({"content": "x", "at": said})
    assert render(parse(record.created_at)) == record.created_at
    if moments.milliseconds(said) is None:
        assert record.created_at == UNDATED


@given(st.integers(-62135596800000, 253402300799999))
def test_our_own_spelling_means_what_it_says(moment: int) -> None:
    assert moments.milliseconds(render(moment)) == moment


# --- templates and headers


@given(query=st.text() | st.sampled_from(["{limit}", "{query}{limit}"]), limit=st.integers(1, 1000))
def test_nothing_in_a_query_leaves_its_place(query: str, limit: int) -> None:
    template = {"q": "{query}", "k": "{limit}", "t": ["top {limit} of {query}", 5, None], "{query}": {"x": True}}
    assert filled(template, query, limit) == {
        "q": query,
        "k": limit,
        "t": [f"top {limit} of {query}", 5, None],
        "{query}": {"x": True},
    }


def test_a_token_comes_from_the_environment_and_appears_in_no_error() -> None:
    assert headers_from(["Authorization: Bearer ${T}", "X-Way: a"], {"T": "s3cret"}) == {
        "Authorization": "Bearer s3cret",
        "X-Way": "a",
    }
    for line in ("Authorization: Bearer s3cret", "X-Api-Key: s3cret", "s3cret", "A B: s3cret", "X: ${T}s3cret"):
        with pytest.raises(CannotStart) as refusal:
            headers_from([line], {})
        assert "s3cret" not in str(refusal.value)
    with pytest.raises(CannotStart) as refusal:
        headers_from(["X: ${T}"], {"T": "s3cret\nand more"})
    assert "s3cret" not in str(refusal.value)


def test_what_looks_like_a_secret_of_the_environment_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "s3cret-s3cret")
    assert message_of(ValueError("no\nentry with s3cret-s3cret")) == "no entry with …"


# --- functions


def service(search: Any, monkeypatch: pytest.MonkeyPatch, listing: Any = None) -> PythonService:
    """Return a service of functions, named as on a command line."""
    monkeypatch.setattr(sys.modules[__name__], "searching", search, raising=False)
    monkeypatch.setattr(sys.modules[__name__], "listing", listing, raising=False)
    return python_service(f"{__name__}:searching", None if listing is None else f"{__name__}:listing")


async def in_the_loop(query: str, limit: int) -> list[str]:
    await anyio.lowlevel.checkpoint()
    return [query, str(limit)]


async def one_by_one(query: str, limit: int) -> Any:
    for number in range(1_000_000):
        await anyio.lowlevel.checkpoint()
        yield f"{query} {number}"


def endless(query: str, limit: int) -> Iterator[str]:
    for number in range(10**9):
        yield f"{query} {number}"


@pytest.mark.anyio
async def test_functions_may_be_of_any_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    for function, expected in (
        (lambda query, limit: (query, str(limit)), ["x", "2"]),
        (lambda query, limit: in_the_loop(query, limit), ["x", "2"]),
        (in_the_loop, ["x", "2"]),
        (one_by_one, ["x 0", "x 1"]),
        (endless, ["x 0", "x 1"]),
        (lambda query, limit: [], []),
    ):
        assert await contents(server(service(function, monkeypatch)), query="x", limit=2) == expected
    assert await contents(server(service(endless, monkeypatch, lambda: ["a", "b"])), "timeline") == ["a", "b"]


def exits(query: str, limit: int) -> list[str]:
    raise SystemExit(3)


async def fails_late(query: str, limit: int) -> list[str]:
    raise TimeoutError("of its own")


def fails_on_the_way(query: str, limit: int) -> Iterator[str]:
    yield "one"
    raise KeyError("page")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("function", "said"),
    [
        (exits, "raised SystemExit: 3"),
        (fails_late, "raised TimeoutError: of its own"),
        (fails_on_the_way, "raised KeyError: 'page'"),
        (lambda query, limit: None, "returned nothing; expected an iterable of dicts or strings"),
        (lambda query, limit: "text", "returned the string 'text'"),
        (lambda query, limit: {"content": "x"}, "returned an object"),
        (lambda query, limit: next(iter(())), "raised StopIteration"),
    ],
)
async def test_a_function_that_fails_is_an_error(function: Any, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    code, sentence = await refused(server(service(function, monkeypatch)), "recall", query="x")
    assert code == -32603
    assert f"corpus: {__name__}:searching " in sentence
    assert said in sentence


@pytest.mark.anyio
async def test_calls_that_hang_keep_their_threads_and_no_more() -> None:
    threads = Threads(2)
    held, two = threading.Event(), threading.Event()
    begun: list[int] = []

    def hang() -> None:
        begun.append(1)
        if len(begun) == 2:
            two.set()
        held.wait(PATIENCE)

    try:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(threads.run, "hang", hang)
            await anyio.to_thread.run_sync(two.wait, PATIENCE)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert len(begun) == 2
    finally:
        held.set()
    assert await threads.run("back again", lambda: 5) == 5


@pytest.mark.process
def test_a_function_that_hangs_does_not_keep_the_process(handbook: FilePath) -> None:
    (handbook / "stuck.py").write_text("import time\ndef search(query, limit):\n    time.sleep(10**6)\n")
    command = [*COMMAND, "python", "stuck:search", "--timeout", "0.05"]
    environment = {"PYTHONPATH": str(FilePath.cwd())}
    line = message("recall", {"query": "x"}) + b"\n"
    done = subprocess.run(command, input=line, capture_output=True, cwd=handbook, env=environment, timeout=PATIENCE)
    assert done.returncode == 0
    assert json.loads(done.stdout)["error"]["code"] == -32603


# --- the command


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "required: KIND"),
        (("python", "nowhere:search"), 1, "there is no module 'nowhere'"),
        (("python", "handbook:nothing"), 1, "handbook:nothing: there is no 'nothing' in handbook"),
        (("python", "handbook"), 1, "expected MODULE:NAME, such as handbook:search"),
        (("python", "handbook:PAGES"), 1, "handbook:PAGES: expected a function, got a list"),
        (("python", "handbook:everything"), 1, "cannot be called with 2 arguments"),
        (("python", "broken:search"), 1, "broken cannot be imported: ZeroDivisionError: division by zero"),
        (("python", "needy:search"), 1, "needy cannot be imported: ModuleNotFoundError: No module named 'no_such"),
        (("python", "handbook:search", "--content", "["), 2, "is not a valid JMESPath"),
        (("python", "handbook:search", "--serve", "0.0.0.0:80"), 2, "can be reached from other machines"),
        (("python", "handbook:search", "--timeout", "0"), 2, "expected a number of seconds"),
        (("python", "handbook:search", "--max-asked", "none"), 2, "expected 1 or more"),
        (("python", "handbook:search", "--min-score", "0.5"), 2, "add the path of the score in a result: --score PATH"),
        (
            ("langchain", "handbook:search", "--max-distance", "0.5"),
            2,
            "argument --max-distance: add the path of the score",
        ),
        (
            ("python", "handbook:search", "--score", "s"),
            2,
            "argument --score: add the threshold: --min-score",
        ),
        (("python", "handbook:search", "--score", "[", "--min-score", "1"), 2, "is not a valid JMESPath"),
        (("python", "handbook:search", "--score", "s", "--min-score", "nan"), 2, "expected a number, got 'nan'"),
        (("chroma", "x", "--collection", "c", "--max-distance", "near"), 2, "expected a number, got 'near'"),
        (
            ("qdrant", "x", "--collection", "c", "--max-distance", "1", "--min-score", "1"),
            2,
            "argument --min-score: not allowed with argument --max-distance",
        ),
        (("chroma", "x", "--collection", "c", "--score", "s"), 2, "unrecognized arguments: --score s"),
        (
            ("chroma", "x", "--collection", "c", "--min-score", "1"),
            1,
            "Chroma measures distances, not similarities; use --max-distance X instead of --min-score",
        ),
    ],
)
def test_mistakes_at_the_start_are_sentences(
    arguments: tuple[str, ...], code: int, said: str, handbook: FilePath, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (handbook / "broken.py").write_text("1 / 0\n")
    (handbook / "needy.py").write_text("import no_such_thing\n")
    monkeypatch.chdir(handbook)
    monkeypatch.syspath_prepend(str(handbook))
    assert ended(list(arguments)) == code
    said_there = capfd.readouterr().err
    assert said in said_there
    assert "Traceback" not in said_there


def ended(arguments: list[str]) -> int | str | None:
    """Run the command in this process; return its exit code."""
    from a2m_rag.cli import main

    try:
        return main(arguments)
    except SystemExit as end:
        return end.code
