"""a2m-router as a process on pipes or on HTTP, and its output on stderr."""

import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

COMMAND: Final = str(Path(sys.executable).with_name("a2m-router"))
# the same router with shorter timeouts for a tier that never answers, so that a test sees sooner that it gives up
HURRIED: Final = """
from a2m_router.daemon import app, cli
from a2m_router.protocol.client import child
{}
raise SystemExit(cli.main())
"""
# only for tests in which nothing answers at all: for a slow tier, these timeouts may be too short
AT_ITS_START: Final = "from a2m_router.placement import admission; admission._START_SECONDS = 2.0"
AT_ITS_END: Final = "child._CLOSED = child._TERMINATED = 0.3"
# far more than anything here takes; a hang becomes a failure
PATIENCE = 60


def federation(folder: Path, head: str = "", **commands: str) -> Path:
    """Write a federation file with a working and a semantic tier; `commands` replace their stores by shell lines."""
    path = folder / "federation.toml"
    tiers = ""
    for tier in ("working", "semantic"):
        line = commands.get(tier)
        command = ["a2m-store", f"{tier}.db"] if line is None else ["/bin/sh", "-c", line]
        tiers += f'[tiers.{tier}]\nkind = "{tier}"\ncommand = {json.dumps(command)}\n'
    path.write_text(f'state = "router.db"\n{head}\n{tiers}')
    return path


class Router:
    """A router on pipes. Its output is not read ahead, since `communicate` would not get what was read before."""

    def __init__(self, config: Path, *arguments: str, hurried: str | None = None) -> None:
        self.popen = subprocess.Popen(
            [*command(hurried), "--config", str(config), *arguments],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.answers: dict[Any, Any] = {}

    def send(self, method: str, id: Any = 1, **params: Any) -> None:
        assert self.popen.stdin is not None
        message = {"jsonrpc": "2.0", "id": id, "method": f"memory/{method}", "params": params}
        line = json.dumps(message).encode() + b"\n"
        assert self.popen.stdin.write(line) == len(line)

    def answer(self, id: Any = 1) -> Any:
        """Return the answer to `id`; keep other answers that come before it."""
        assert self.popen.stdout is not None
        while id not in self.answers:
            line = self.popen.stdout.readline()
            assert line, self.popen.communicate()[1].decode()
            answer = json.loads(line)
            self.answers[answer["id"]] = answer
        return self.answers.pop(id)

    def ask(self, method: str, **params: Any) -> Any:
        """Make one call; return its whole answer."""
        self.send(method, **params)
        return self.answer()

    def ask_until(self, wanted: Callable[[Any], bool], method: str, **params: Any) -> Any:
        """Repeat a call until its answer is the wanted one; return that answer."""
        deadline = time.monotonic() + PATIENCE
        while not wanted(answer := self.ask(method, **params)):
            assert time.monotonic() < deadline, answer
        return answer

    def children(self) -> list[int]:
        """Return the process ids of the router's children."""
        return [child.pid for child in psutil.Process(self.popen.pid).children()]

    def end(self) -> tuple[list[Any], str]:
        """Close the router's input if it is open; return the remaining answers, and its output on stderr."""
        out, err = self.popen.communicate(timeout=PATIENCE)
        return [json.loads(line) for line in out.splitlines()], err.decode()


def command(hurried: str | None) -> list[str]:
    return [COMMAND] if hurried is None else [sys.executable, "-c", HURRIED.format(hurried)]


@contextmanager
def running(config: Path, *arguments: str, hurried: str | None = None) -> Iterator[Router]:
    router = Router(config, *arguments, hurried=hurried)
    try:
        yield router
    finally:
        router.popen.kill()
        router.popen.communicate()


def child_of(router: Router, program: str) -> int:
    """Return the process id of the child whose command line mentions `program`."""
    for child in psutil.Process(router.popen.pid).children():
        if any(program in argument for argument in child.cmdline()):
            return int(child.pid)
    raise AssertionError(f"no child runs {program}")


def end_of_input(router: Router) -> None:
    assert router.popen.stdin is not None
    router.popen.stdin.close()
    router.popen.stdin = None


def terminate(router: Router) -> None:
    router.popen.send_signal(signal.SIGTERM)


@contextmanager
def on_http(config: Path) -> Iterator[tuple[Router, httpx.Client, str]]:
    """Run a router on HTTP; yield it, a client of it, and the command line that it offers."""
    with running(config, "--http", "127.0.0.1:0") as router:
        assert router.popen.stderr is not None
        said = iter(router.popen.stderr)
        url = next(found[1] for line in said if (found := re.search(r"listens on (http://\S+)", line.decode())))
        offered = next(found[1] for line in said if (found := re.search(r"try: (.*)", line.decode())))
        with httpx.Client(base_url=url, timeout=PATIENCE, verify=False) as client:
            yield router, client, offered


def post(client: httpx.Client, method: str, token: str | None = None, **params: Any) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answered = client.post("/", json=message, headers=headers)
    assert answered.status_code == 200, answered.text
    answer = answered.json()
    return answer["result"] if "result" in answer else answer["error"]


PRINCIPALS: Final = "".join(
    f'[[serve.principals]]\nowner = "{owner}"\ntoken_sha256 = "{sha256(token.encode()).hexdigest()}"\n'
    for owner, token in (("alice", "a-token"), ("bob", "b-token"))
)


class Said:
    """The router's output on stderr, as it is written."""

    def __init__(self, router: Router) -> None:
        assert router.popen.stderr is not None
        self._source = router.popen.stderr
        self._lines: list[str] = []
        self._more = threading.Condition()
        self._ended = False
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def until(self, pattern: str) -> re.Match[str]:
        """Wait for the first line that matches the pattern; return the match."""

        def found() -> re.Match[str] | None:
            return next((match for line in self._lines if (match := re.search(pattern, line))), None)

        with self._more:
            self._more.wait_for(lambda: found() is not None or self._ended, PATIENCE)
            match = found()
            assert match is not None, self._lines
            return match

    def all(self) -> str:
        """Return everything that the router wrote; fail if it does not end."""
        self._reader.join(PATIENCE)
        assert not self._reader.is_alive(), f"the router has not ended after {PATIENCE} s: {self._lines}"
        return "".join(self._lines)

    def _read(self) -> None:
        with suppress(ValueError):  # it is closed when a test fails, and then is not read to its end
            for line in self._source:
                with self._more:
                    self._lines.append(line.decode())
                    self._more.notify_all()
        with self._more:
            self._ended = True
            self._more.notify_all()
