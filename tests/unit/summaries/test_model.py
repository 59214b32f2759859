"""The client of an OpenAI-compatible endpoint, against a real server on loopback with scripted answers."""

import gzip
import importlib
import json
import logging
import re
import socket
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import anyio
import anyio.abc
import anyio.to_thread
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from a2m_router.config.settings import Summarizer
from a2m_router.summaries.model import MAX_ANSWER, MAX_QUOTED, MAX_WAIT, ModelFailed, connect_model
from tests.support.addresses import reserved_port
from tests.support.examples import scaled
from tests.support.model_endpoint import PATIENCE, TOKEN, Endpoint, answer, completed, completion, error, serving


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    with serving() as endpoint:
        yield endpoint


def summarizer(url: str, *, token: str = TOKEN, timeout: float = PATIENCE) -> Summarizer:
    return Summarizer(url=url, model="small", token=token, timeout=timeout)


async def written(url: str, **options: Any) -> str:
    async with connect_model(summarizer(url, **options)) as model:
        return await model.write("Be brief.", "A long story.")


async def failure(url: str, *, token: str = TOKEN, timeout: float = PATIENCE) -> ModelFailed:
    """Return the failure of a call; assert that it is one line with the endpoint and the remedy, without the token."""
    with pytest.raises(ModelFailed) as raised:
        await written(url, token=token, timeout=timeout)
    reason = raised.value.reason
    assert reason == str(raised.value)
    assert re.fullmatch(rf"the model's endpoint {re.escape(url)}/chat/completions [^;]+.*; [^;]+.*", reason)
    assert reason.isprintable()
    assert not token or token not in reason + repr(raised.value)
    return raised.value


@pytest.mark.anyio
async def test_a_call_is_one_chat_completion_and_its_text_comes_back_stripped(endpoint: Endpoint) -> None:
    endpoint.answers(completion("\n  It was long: ünï, 😀 and \0.\n"))
    assert await written(endpoint.url) == "It was long: ünï, 😀 and \0."
    (asked,) = endpoint.asked
    assert asked.line == "POST /v1/chat/completions HTTP/1.1"
    assert asked.headers.get_all("Authorization") == [f"Bearer {TOKEN}"]
    assert asked.headers["Content-Type"] == "application/json"
    assert asked.headers["Accept-Encoding"] == "identity"
    assert asked.body == {
        "model": "small",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A long story."},
        ],
        "temperature": 0,
    }


@pytest.mark.anyio
async def test_an_answer_needs_no_more_than_a_text(endpoint: Endpoint) -> None:
    endpoint.answers(answer('{"choices": [{"message": {"content": "short"}}]}'))
    assert await written(f"{endpoint.url}/", token="") == "short"
    assert endpoint.asked[0].line == "POST /v1/chat/completions HTTP/1.1"
    assert "Authorization" not in endpoint.asked[0].headers


@pytest.mark.anyio
async def test_what_the_environment_says_of_proxies_changes_nothing(
    endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")
    endpoint.answers(completion("short"))
    assert await written(endpoint.url) == "short"


@pytest.mark.anyio
async def test_a_model_is_named_as_set_and_writes_several_texts_at_once(endpoint: Endpoint) -> None:
    endpoint.answers(completion("short"))
    texts: list[str] = []
    async with connect_model(summarizer(endpoint.url)) as model:
        assert model.name == "small"

        async def write(number: int) -> None:
            texts.append(await model.write("Be brief.", f"story {number}"))

        async with anyio.create_task_group() as tasks:
            for number in range(5):
                tasks.start_soon(write, number)
        await write(5)
    assert texts == ["short"] * 6
    assert {asked.body["messages"][1]["content"] for asked in endpoint.asked} == {f"story {n}" for n in range(6)}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("content", "beside"),
    [
        ("<think>\nThe story is long.\n</think>\n\nshort", {}),
        ("The story is long.\n</think>\n\nshort", {}),
        ("<|channel|>analysis<|message|>Long.<|end|><|start|>assistant<|channel|>final<|message|>short<|return|>", {}),
        ("short", {"reasoning_content": "The story is long.", "reasoning": {"tokens": 5}}),
        ([{"type": "text", "text": "sh"}, {"type": "text", "text": "ort\n"}], {}),
        (["short"], {}),
        (
            [
                {"type": "thinking", "thinking": [{"type": "text", "text": "The story is long."}]},
                {"type": "reasoning", "text": "It is."},
                {"type": "image_url", "image_url": {"url": "data:,a"}},
                {"type": "text", "text": 5},
                {"type": "text", "text": "<think>Is it?"},
                {"type": "text", "text": "</think>short"},
            ],
            {},
        ),
    ],
)
async def test_a_text_comes_without_the_reasoning_and_out_of_its_parts(
    endpoint: Endpoint, content: Any, beside: dict[str, Any]
) -> None:
    endpoint.answers(completion(content, **beside))
    assert await written(endpoint.url) == "short"


def raw_deflate(data: bytes) -> bytes:
    packing = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packing.compress(data) + packing.flush()


def in_members(data: bytes) -> bytes:
    return gzip.compress(data[:9]) + gzip.compress(b"") + gzip.compress(data[9:])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress),
        ("X-GZIP", gzip.compress),
        ("gzip", in_members),
        ("deflate", zlib.compress),
        ("deflate", raw_deflate),
        ("identity, deflate, gzip", lambda data: gzip.compress(zlib.compress(data))),
        ("identity", bytes),
        ("", bytes),
    ],
)
@pytest.mark.parametrize("in_chunks", [False, True])
async def test_an_answer_is_read_out_of_the_coding_that_nobody_asked_for(
    endpoint: Endpoint, coding: str, packed: Callable[[bytes], bytes], in_chunks: bool
) -> None:
    body = packed(completed("A shört störy.").encode())
    if in_chunks:
        chunks = [body[at : at + 7] for at in range(0, len(body), 7)]
        head = f"HTTP/1.1 200 OK\r\nContent-Encoding: {coding}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        endpoint.answers(head, *(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks), b"0\r\n\r\n")
    else:
        endpoint.answers(answer(body, Content_Encoding=coding))
    assert await written(endpoint.url) == "A shört störy."
    # the client offers only codings that it can decode
    assert endpoint.asked[0].headers["Accept-Encoding"] == "identity"


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        ("gzip", gzip.compress),
        ("deflate", raw_deflate),
        ("gzip, gzip", lambda data: gzip.compress(gzip.compress(data))),
        ("gzip", lambda data: gzip.compress(data[: 2**17]) * (len(data) // 2**17)),
    ],
)
async def test_an_answer_that_unfolds_beyond_the_limit_is_refused_and_never_held(
    endpoint: Endpoint, coding: str, packed: Callable[[bytes], bytes]
) -> None:
    unfolded = bytes(30 * MAX_ANSWER)
    body = packed(unfolded)
    assert len(body) < MAX_ANSWER
    del unfolded
    importlib.import_module("httpx")  # the first call in a process imports it, and that takes memory, too
    endpoint.answers(answer(body, Content_Encoding=coding))
    tracemalloc.start()
    try:
        reason = (await failure(endpoint.url)).reason
        assert tracemalloc.get_traced_memory()[1] < 10 * MAX_ANSWER
    finally:
        tracemalloc.stop()
    assert "answered with more than 1,048,576 bytes, and was not read on; " in reason


@pytest.mark.anyio
async def test_an_answer_in_a_heap_of_codings_is_not_read(endpoint: Endpoint) -> None:
    endpoint.answers(answer(gzip.compress(b"{}"), Content_Encoding="gzip, " * 99 + "gzip"))
    assert "it has 100 codings; expected at most 4; " in (await failure(endpoint.url)).reason


@pytest.mark.anyio
async def test_an_answer_may_be_as_long_as_the_limit_and_no_longer(endpoint: Endpoint) -> None:
    whole = json.dumps({"choices": [{"message": {"content": "short"}}]}).ljust(MAX_ANSWER)
    endpoint.answers(answer(whole))
    assert await written(endpoint.url) == "short"
    endpoint.answers(answer(f"{whole} "))
    failed = await failure(endpoint.url)
    assert "answered with more than 1,048,576 bytes, and was not read on; " in failed.reason


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "words"),
    [("200 OK", "answered with more than 1,048,576 bytes"), ("400 Bad Request", "answered HTTP 400 Bad Request; ")],
)
async def test_an_answer_without_end_is_hung_up_on(endpoint: Endpoint, status: str, words: str) -> None:
    endpoint.answers_without_end(f"HTTP/1.1 {status}\r\n\r\n".encode().ljust(2**16))
    assert words in (await failure(endpoint.url)).reason
    assert endpoint.caller_hung_up.wait(PATIENCE)


@pytest.mark.anyio
@pytest.mark.parametrize("begun", [b"", b"HTTP/1.1 200 OK\r\nContent-", completion("A short story.")[:-20]])
async def test_an_answer_that_is_not_whole_in_time_is_no_answer(endpoint: Endpoint, begun: bytes) -> None:
    endpoint.begins_and_stays(begun)
    failed = await failure(endpoint.url, timeout=0.25)
    assert "gave no whole answer within 0.25 s; " in failed.reason
    assert "timeout" in failed.reason


@pytest.mark.anyio
@pytest.mark.parametrize("begun", [b"", completion("A short story.")[:-20]])
async def test_a_cancelled_call_hangs_up(endpoint: Endpoint, begun: bytes) -> None:
    endpoint.begins_and_stays(begun)
    async with connect_model(summarizer(endpoint.url)) as model:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(model.write, "Be brief.", "A long story.")
            assert await anyio.to_thread.run_sync(endpoint.request_came.wait, PATIENCE)
            tasks.cancel_scope.cancel()
        assert endpoint.caller_hung_up.wait(PATIENCE)  # before the block closes the model


@pytest.mark.anyio
@pytest.mark.parametrize(
    "part",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-",
        completion("A short story.")[:-20],
        b"SSH-2.0\r\n",
        f"HTTP/1.1 200 OK\r\n{TOKEN} \r\n\r\n".encode(),
    ],
)
async def test_a_connection_that_ends_too_soon_or_speaks_no_http_is_told(endpoint: Endpoint, part: bytes) -> None:
    endpoint.answers(part)
    assert "broke off before its answer was whole; " in (await failure(endpoint.url)).reason
    assert len(endpoint.asked) == 1  # this client does not retry


@pytest.mark.anyio
async def test_an_endpoint_that_is_not_there_cannot_be_reached() -> None:
    with reserved_port() as port:
        failed = await failure(f"http://127.0.0.1:{port}/v1")
    assert "cannot be reached: " in failed.reason
    assert "check that it runs, and that url in [summarizer] is its address" in failed.reason


@pytest.mark.anyio
@pytest.mark.parametrize(
    "url",
    [
        "http://256.1.1.1/v1",
        "http://xn--a/v1",
        "http://ä..b/v1",
        "http://a..b/v1",
        f"http://{'a' * 70}/v1",
        "http://[v1.a]",
    ],
)
async def test_a_host_that_cannot_exist_cannot_be_reached(url: str) -> None:
    assert "cannot be reached: " in (await failure(url)).reason


@pytest.mark.anyio
async def test_an_endpoint_without_tls_cannot_be_reached_with_it(endpoint: Endpoint) -> None:
    silent = socket.create_server(("127.0.0.1", 0))

    def refuse() -> None:
        connection, _ = silent.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=refuse)
    thread.start()
    with silent:
        failed = await failure(f"https://127.0.0.1:{silent.getsockname()[1]}/v1")
        thread.join()
    assert "cannot be reached: " in failed.reason


REFUSALS: dict[str, tuple[bytes, str, str]] = {  # an answer, its description in the error, and a word of the remedy
    "no token": (answer("", "401 Unauthorized"), "answered HTTP 401 Unauthorized; ", "token_env in [summarizer] holds"),
    "a bad token": (answer(error("no."), "403 Forbidden"), 'answered HTTP 403 Forbidden, saying "no."; ', "token_env"),
    "no such model": (
        answer(error("no small"), "404 Not Found"),
        'saying "no small"; ',
        "url and model in [summarizer]",
    ),
    "a bad request": (answer(error("too long"), "400 Bad Request"), 'Bad Request, saying "too long"; ', "max_input"),
    "too busy": (answer("", "429 Too Many Requests"), "answered HTTP 429 Too Many Requests; ", "later"),
    "its own fault": (answer("", "500 Oops"), "answered HTTP 500 Internal Server Error; ", "its own log"),
    "a gateway": (answer("<html>", "504 Late"), "answered HTTP 504 Gateway Timeout; ", "its own log"),
    "an unknown status": (answer("", "599 Odd"), "answered HTTP 599; ", "its own log"),
    "nothing": (answer("", "202 Accepted"), "answered HTTP 202 Accepted; ", "model"),
    "an error from ollama": (answer('{"error": "no model"}', "400 Bad"), 'saying "no model"; ', "model"),
    "an error from elsewhere": (answer('{"message": "no"}', "400 Bad"), 'HTTP 400 Bad Request, saying "no"; ', "model"),
    "an error from a framework": (answer('{"detail": "Not Found"}', "404 No"), 'Found, saying "Not Found"; ', "url"),
    "an error of no known shape": (answer('{"error": {"message": 1}}', "400 Bad"), "HTTP 400 Bad Request; ", "model"),
    "an error that is nested": (answer("[" * 100_000, "400 Bad"), "answered HTTP 400 Bad Request; ", "model"),
    "an error of two lines": (answer(error("a\r\n\x1b[1m \ud800b"), "400 Bad"), 'saying "a [1m b"; ', "model"),
    "an empty body": (answer(""), "something else than JSON; ", "url"),
    "a page": (answer("<html></html>"), "something else than JSON; ", "url in [summarizer]"),
    "half of JSON": (answer('{"choices": ['), "something else than JSON; ", "url"),
    "Latin-1": (answer('{"choices": "ä"}'.encode("latin-1")), "something else than JSON; ", "url"),
    "a deep nest": (answer("[" * 100_000), "something else than JSON; ", "url"),
    "a long number": (answer("9" * 10_000), "something else than JSON; ", "url"),
    "a list": (answer("[]"), "is no chat completion: Expected `object`, got `array`; ", "url"),
    "no choices": (answer("{}"), "is no chat completion: Object missing required field `choices`; ", "url"),
    "an error in a good answer": (answer(error("no")), '`choices`, saying "no"; ', "url"),
    "no choice": (answer('{"choices": []}'), "Expected `array` of length >= 1 - at `$.choices`; ", "url"),
    "no message": (answer('{"choices": [{}]}'), "missing required field `message` - at `$.choices[0]`; ", "url"),
    "a null message": (answer('{"choices": [{"message": null}]}'), "got `null` - at `$.choices[0].message`; ", "url"),
    "no content": (
        answer('{"choices": [{"message": {}}]}'),
        "choices[0].message.content is missing or null; ",
        "model",
    ),
    "null": (completion(None), "choices[0].message.content is missing or null; ", "model"),
    "a number": (completion(5), "got `int` - at `$.choices[0].message.content`; ", "url"),
    "no parts": (completion([]), "choices[0].message.content has no part of type text; ", "model"),
    "no part of text": (
        completion([{"type": "image_url", "image_url": {}}, 5, {}]),
        "has no part of type text; ",
        "model",
    ),
    "an empty part": (completion([{"type": "text", "text": " "}]), "answered with an empty text; ", "model"),
    "reasoning": (
        completion("<think>It was long.</think>\n"),
        "answered with reasoning alone, and nothing is",
        "tokens",
    ),
    "open reasoning": (completion("<think>It was long."), "answered with reasoning alone, and nothing is", "tokens"),
    "a channel of reasoning": (completion("<|channel|>analysis<|message|>Long."), "with reasoning alone", "tokens"),
    "reasoning in parts": (completion([{"type": "thinking", "thinking": "Long."}]), "with reasoning alone", "tokens"),
    "reasoning beside null": (completion(None, reasoning_content="Long."), "answered with reasoning alone", "tokens"),
    "reasoning beside nothing": (completion("", reasoning="It was long."), "answered with reasoning alone", "tokens"),
    "gzip that is none": (
        answer("{}", Content_Encoding="gzip"),
        "its Content-Encoding is gzip, but its data is not; ",
        "on the way",
    ),
    "gzip that ends too soon": (
        answer(gzip.compress(b"{}" * 99)[:-9], Content_Encoding="gzip"),
        "cannot be read: its gzip data is incomplete; ",
        "on the way",
    ),
    "an unknown coding": (answer("{}", Content_Encoding="br"), "the coding 'br', which was not requested; ", "way"),
    "an error in an unknown coding": (
        answer("x", "502 No", Content_Encoding="br"),
        "HTTP 502 Bad Gateway; ",
        "its own",
    ),
    "an error in gzip": (
        answer(gzip.compress(error("no.").encode()), "403 No", Content_Encoding="gzip"),
        'answered HTTP 403 Forbidden, saying "no."; ',
        "token_env",
    ),
    "an empty text": (completion(""), "answered with an empty text; ", "model in [summarizer]"),
    "only space": (completion(" \n\t\u2003"), "answered with an empty text; ", "model in [summarizer]"),
    "half a text": (completion("Once", "length"), 'in the middle of its text (finish_reason "length")', "max_input"),
    "no room to begin": (completion("", "length"), 'in the middle of its text (finish_reason "length")', "max_input"),
    "a filtered text": (completion("Once", "content_filter"), '(finish_reason "content_filter"); ', "another model"),
    "nothing but a filter": (completion(None, "content_filter"), '(finish_reason "content_filter"); ', "another model"),
    "half a pair": (completion("a \ud83d b"), "half a surrogate pair, which is no character and cannot be", "model"),
    "half a pair, raw": (
        answer(b'{"choices": [{"message": {"content": "\xed\xa0\xbd"}}]}'),
        "half a surrogate pair, which is no character and cannot be stored; ",
        "model",
    ),
}


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.anyio
@pytest.mark.parametrize("case", REFUSALS)
async def test_what_is_no_text_is_refused_with_its_reason_and_what_to_do(endpoint: Endpoint, case: str) -> None:
    sent, what, to_do = REFUSALS[case]
    endpoint.answers(sent)
    failed = await failure(endpoint.url)
    assert what in failed.reason
    assert to_do in failed.reason.rpartition("; ")[2]
    assert failed.retry_after is None
    assert len(endpoint.asked) == 1


@pytest.mark.anyio
async def test_whoever_has_no_token_is_told_how_to_give_one(endpoint: Endpoint) -> None:
    endpoint.answers(answer("", "401 Unauthorized"))
    failed = await failure(endpoint.url, token="")
    assert "if it asks for a token, name its environment variable in [summarizer]: token_env" in failed.reason


@pytest.mark.anyio
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(endpoint: Endpoint, status: int) -> None:
    with serving() as elsewhere:
        elsewhere.answers(completion("short"))
        endpoint.answers(answer("", f"{status} Elsewhere", Location=f"{elsewhere.url}/chat/completions"))
        failed = await failure(endpoint.url)
        assert elsewhere.asked == []
    assert f"answered HTTP {status} " in failed.reason
    assert "redirects are not followed; make url in [summarizer] the address that it leads to" in failed.reason


NOW = datetime(2031, 5, 4, 3, 2, 1, tzinfo=UTC)


def dates(moment: datetime) -> list[str]:
    """Return the three forms of an HTTP-date (RFC 9110 §5.6.7)."""
    return [
        format_datetime(moment, usegmt=True),
        moment.strftime("%A, %d-%b-%y %H:%M:%S GMT"),
        moment.strftime("%a %b %e %H:%M:%S %Y"),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("asked", "seconds"),
    [
        ("0", 0.0),
        ("120", 120.0),
        ("9" * 5000, MAX_WAIT),
        *((date, 90.0) for date in dates(NOW + timedelta(seconds=90))),
        *((date, 0.0) for date in dates(NOW - timedelta(days=800))),
        *((date, MAX_WAIT) for date in dates(NOW + timedelta(days=800))),
        ("", None),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("²", None),
        ("1, 2", None),
        ("Sun, 99 May 2031 03:02:01 GMT", None),
        ("Sun, 04 May 9999999999999999 03:02:01 GMT", None),
    ],
)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_wait_that_an_endpoint_asks_for_comes_with_the_failure(
    endpoint: Endpoint, asked: str, seconds: float | None
) -> None:
    endpoint.answers(answer(error("slow down"), "429 No", Date=dates(NOW)[0], Retry_After=asked))
    assert (await failure(endpoint.url)).retry_after == seconds


@pytest.mark.anyio
async def test_an_endpoint_may_ask_for_a_wait_with_another_status_too(endpoint: Endpoint) -> None:
    endpoint.answers(answer("", "503 Service Unavailable", Retry_After="7"))
    assert (await failure(endpoint.url)).retry_after == 7


@pytest.mark.anyio
async def test_a_retry_date_is_counted_from_now_without_a_date_in_the_answer(endpoint: Endpoint) -> None:
    for day, seconds in ((datetime(2001, 1, 1, tzinfo=UTC), 0.0), (datetime.now(UTC) + timedelta(days=9), MAX_WAIT)):
        endpoint.answers(answer("", "429 No", Retry_After=format_datetime(day, usegmt=True)))
        assert (await failure(endpoint.url)).retry_after == seconds


@settings(max_examples=scaled(15))
@given(
    st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=40), st.integers(0, 28), st.integers(0, 8)
)
def test_no_retry_after_breaks_a_failure(text: str, at: int, cut: int) -> None:
    date = dates(NOW)[0]
    asked = date[:at] + text + date[at + cut :]
    with serving() as endpoint:
        endpoint.answers(answer("", "429 No", Retry_After=asked))
        wait = anyio.run(failure, endpoint.url).retry_after
    assert wait is None or 0 <= wait <= MAX_WAIT


@settings(max_examples=scaled(15))
@given(
    token=st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=12, max_size=40),
    around=st.lists(st.text(max_size=2 * MAX_QUOTED), min_size=2, max_size=4),
    status=st.sampled_from(["200 OK", "400 Bad Request", "401 Unauthorized", "500 Internal Server Error"]),
)
def test_an_error_is_quoted_on_one_short_line_without_the_token(token: str, around: list[str], status: str) -> None:
    with serving() as endpoint:
        endpoint.answers(answer(error(token.join(around)), status))

        async def fail() -> ModelFailed:
            return await failure(endpoint.url, token=token)

        reason = anyio.run(fail).reason
    said = re.search(r', saying "(.*)"; ', reason)
    assert said is not None
    assert len(said[1]) <= MAX_QUOTED
    assert token[:8] not in said[1].replace("…", "")  # nor a part of it where the line was cut


@pytest.mark.anyio
@pytest.mark.parametrize("room", range(1, len(TOKEN), 4))
async def test_no_half_of_a_token_is_left_where_an_error_is_cut(endpoint: Endpoint, room: int) -> None:
    endpoint.answers(answer(error("~" * (MAX_QUOTED - 1 - room) + TOKEN * 2), "401 Unauthorized"))
    said = re.search(r', saying "~+(.*)"; ', (await failure(endpoint.url)).reason)
    assert said is not None
    assert set(said[1]) == {"…"}


@pytest.mark.anyio
async def test_neither_token_nor_text_is_in_a_log_or_a_repr(
    endpoint: Endpoint, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    seen = []
    async with connect_model(summarizer(endpoint.url)) as model:
        seen += [repr(model), str(model), repr(summarizer(endpoint.url))]
        endpoint.answers(completion("A sh0rt one."))
        await model.write("Be br1ef.", "A l0ng story.")
        for sent in (
            answer(error(f"bad {TOKEN}"), "401 Unauthorized"),
            answer(f'{{"message": "{TOKEN}"}}'),
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n" + TOKEN.encode()[:5],
        ):
            endpoint.answers(sent)
            with pytest.raises(ModelFailed) as raised:
                await model.write("Be br1ef.", "A l0ng story.")
            seen += [str(raised.value), repr(raised.value)]
    assert endpoint.asked[-1].headers["Authorization"] == f"Bearer {TOKEN}"
    seen.append(caplog.text)
    for secret in (TOKEN, "sh0rt", "br1ef", "l0ng"):
        assert not any(secret in words for words in seen)
