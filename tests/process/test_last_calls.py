"""The answers of a router that is ended while calls are in progress, on stdio and over HTTP: real processes.

A tier hangs behind a2m-chaos, or the model hangs; the log shows when a call has arrived there.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import cycle, repeat
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

from a2m_router.protocol.wire.errors import STOPPING, Code
from tests.support.addresses import reserved_port
from tests.support.model_endpoint import serving
from tests.support.router_process import PATIENCE, Router, Said, end_of_input, running, terminate

COMMAND: Final = str(Path(sys.executable).with_name("a2m"))

# the same router, with shorter waits for calls that it cannot end
HURRIED: Final = (
    "app._LAST_CALLS_SECONDS, app._LAST_ANSWERS_SECONDS = 0.3, 0.3; "
    "from a2m_router.tiers import places; places._KEPT = 0.1"
)

FEDERATION: Final = """
state = "router.db"
[policy]
pass = "explicit"
{model}
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
capacity = 1
spill_to = "semantic"
timeout = "60s"
[tiers.semantic]
kind = "semantic"
command = ["a2m-chaos", "--plan", "faults.toml", "--", "a2m-store", "semantic.db"]
timeout = "60s"
"""

# 250 records move in rounds of 200, and each round in calls of 100: the second round does not finish
MOVED: Final = 200
FAULT: Final = """
[[fault]]
do = "hang"
method = "{method}"
having = '{having}'
after = {after}
"""
RECORDS: Final = [{"id": f"r{number}", "content": f"note {number}", "session": "s"} for number in range(250)]


class Case:
    """A call that hangs, and the answer that it gets at the end."""

    def __init__(
        self, method: str, hangs: str, *, having: str = "jsonrpc", after: int = 0, moved: bool = False, **params: Any
    ) -> None:
        self.method, self.params = method, params
        self.fault = FAULT.format(method=hangs, having=having, after=after)
        self.moved = moved

    def check(self, answer: Any) -> None:
        if self.moved:
            result = answer["result"]
            assert result["moved"] == MOVED
            assert result.get("flushed", MOVED) == MOVED
            assert result["counts"] == {"working": 50, "semantic": 200}
        else:
            assert answer["error"]["code"] == Code.INTERNAL_ERROR
            assert answer["error"]["data"]["reason"] in (STOPPING, f"semantic: {STOPPING}"), answer


CASES: Final = {
    "close": Case("session/close", "memory/remember", after=2, moved=True, session="s"),
    "close, of which nothing has moved": Case("session/close", "memory/remember", session="s"),
    "consolidate": Case("consolidate", "memory/remember", after=2, moved=True),
    "promote": Case("promote", "memory/remember", ids=["r1"], tier="semantic"),
    "remember": Case("remember", "memory/remember", records=[{"content": "x", "tier": "semantic"}]),
    "recall": Case("recall", "memory/recall", having="pears", query="pears", tier="semantic"),
}


class OnStdio:
    """A router on its standard streams."""

    ends = (terminate, end_of_input)

    def __init__(self, router: Router) -> None:
        self.router = router

    def send(self, method: str, **params: Any) -> None:
        self.router.send(method, id="it", **params)

    def answered(self) -> Any:
        return self.router.answer("it")

    def ask(self, method: str, **params: Any) -> Any:
        return self.router.ask(method, **params)


class OnHttp:
    """A router on HTTP; a call waits on its own thread."""

    ends = (terminate,)

    def __init__(self, router: Router, url: str) -> None:
        self.router = router
        self._url = url
        self._threads = ThreadPoolExecutor()
        self._sent: Any = None

    def send(self, method: str, **params: Any) -> None:
        self._sent = self._threads.submit(self.ask, method, **params)

    def answered(self) -> Any:
        return self._sent.result(PATIENCE)

    def ask(self, method: str, **params: Any) -> Any:
        message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
        return httpx.post(self._url, json=message, timeout=PATIENCE, verify=False).json()


@contextmanager
def router_on(
    binding: type[Any], folder: Path, fault: str, model: str = "", port: int = 0
) -> Iterator[tuple[Any, Said]]:
    (folder / "federation.toml").write_text(FEDERATION.format(model=model))
    (folder / "faults.toml").write_text(f"seed = 1\n{fault}")
    http = () if binding is OnStdio else ("--http", f"127.0.0.1:{port}")
    with running(folder / "federation.toml", *http, hurried=HURRIED) as router:
        said = Said(router)
        if binding is OnStdio:
            yield OnStdio(router), said
        else:
            yield OnHttp(router, said.until(r"listens on (http://\S+)")[1]), said


def ended_well(router: Router, said: Said) -> None:
    assert router.popen.wait(PATIENCE) == 0
    assert "Traceback" not in said.all()
    assert said.all().rstrip().endswith("stopped")


BINDINGS: Final = [(binding, end) for binding in (OnStdio, OnHttp) for end in binding.ends]
# each call at one end of the router, and one call at each end
CALLS: Final = dict.fromkeys(
    [*zip(cycle(BINDINGS), CASES, strict=False), *zip(BINDINGS, repeat("close"), strict=False)]
)


@pytest.mark.parametrize(("binding", "end", "case"), [(*how, case) for how, case in CALLS])
def test_calls_at_a_tier_that_hangs_are_answered_with_what_came_of_them(
    binding: type[Any], end: Callable[[Router], None], case: str, tmp_path: Path
) -> None:
    wanted = CASES[case]
    with router_on(binding, tmp_path, wanted.fault) as (client, said):
        client.ask("remember", records=RECORDS)
        client.send(wanted.method, **wanted.params)
        said.until("fault=hang ")
        end(client.router)
        wanted.check(client.answered())
        ended_well(client.router, said)
    # nothing is lost or doubled
    with router_on(OnStdio, tmp_path, "") as (again, _):
        found = again.router.ask_until(lambda answer: "result" in answer, "timeline")["result"]["records"]
        assert sorted(record["id"] for record in found if record["content"] != "x") == sorted(r["id"] for r in RECORDS)


@pytest.mark.parametrize(("binding", "end"), BINDINGS)
def test_a_summary_that_its_model_is_still_writing_is_answered(
    binding: type[Any], end: Callable[[Router], None], tmp_path: Path
) -> None:
    with serving() as model:
        model.begins_and_stays()
        table = f'[summarizer]\nurl = "{model.url}"\nmodel = "small"\ntimeout = "60s"'
        with router_on(binding, tmp_path, "", table) as (client, said):
            client.ask("remember", records=RECORDS[:3])
            client.send("summarize", ids=["r1", "r2"])
            assert model.request_came.wait(PATIENCE)
            end(client.router)
            Case("summarize", "").check(client.answered())
            ended_well(client.router, said)


def test_an_export_that_spans_a_restart_goes_on(tmp_path: Path) -> None:
    """The router ends while a page is read; the export waits for the next router, and continues at that page."""
    records = [{"id": f"{number:04}", "content": f"note {number}", "tier": "semantic"} for number in range(1200)]
    file = tmp_path / "export.jsonl"
    with reserved_port() as port:
        hanging = FAULT.format(method="memory/recall", having="jsonrpc", after=7)  # a page takes five of them
        with router_on(OnHttp, tmp_path, hanging, port=port) as (client, said):
            for start in range(0, 1200, 600):
                client.ask("remember", records=records[start : start + 600])
            command = [COMMAND, "--http", f"http://127.0.0.1:{port}/", "--timeout", str(PATIENCE), "export", str(file)]
            export = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                said.until("fault=hang ")
                terminate(client.router)
                ended_well(client.router, said)
                with router_on(OnHttp, tmp_path, "", port=port):
                    out, waits = export.communicate(timeout=PATIENCE)
            finally:
                export.kill()
                export.communicate()
    assert export.returncode == 0
    assert out == ""
    assert re.fullmatch(r"a2m: server down, the export waits for it, for at most 60 s: .*\n", waits)
    header, *lines = file.read_text().splitlines()
    assert json.loads(header)["records"] == 1200
    assert [json.loads(line)["id"] for line in lines] == [record["id"] for record in records]


def test_an_answer_that_nobody_takes_does_not_end_in_a_traceback(tmp_path: Path) -> None:
    """The router breaks the connection when the grace time is over, as if the client had hung up."""
    hurried = f"{HURRIED}; from a2m_router.protocol.server import http; http._GRACE = 0.3"
    (tmp_path / "federation.toml").write_text(FEDERATION.format(model=""))
    (tmp_path / "faults.toml").write_text("seed = 1\n")
    with running(tmp_path / "federation.toml", "--http", "127.0.0.1:0", hurried=hurried) as router:
        said = Said(router)
        url = said.until(r"listens on (http://\S+)")[1]
        client = OnHttp(router, url)
        large = [{"content": "x" * 900_000} for _ in range(30)]
        client.ask("remember", records=large)
        asked = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "memory/timeline", "params": {}})
        with (
            httpx.Client(verify=False) as idle,
            idle.stream("POST", url, content=asked, headers={"Content-Type": "application/json"}) as answer,
        ):
            assert answer.status_code == 200  # the head of the answer is received, and the body is not read
            terminate(router)
            ended_well(router, said)
