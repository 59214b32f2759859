"""Measures a router under several times the load that it can carry: how much it answers, and how it rejects the rest.

    python -m bench.overload [--seconds 60] [--factor 4] [--connections 500] [--delay 10ms] [--max-requests N] [--quick]

The federation is an a2m-router on HTTP with one tier. An a2m-chaos slows down the tier's server: its calls run one
after the other, each for --delay, which sets the tier's capacity. First the peak is measured: the good answers a second
with AT_ONCE calls in progress, each followed by the next. Then --factor times as many calls a second begin, without
waiting for earlier ones (an open loop), over --connections connections. Four calls in five are recalls; the others
write a record.

Every answer is good, or an explicit rejection (HTTP 503 with Retry-After, or the error -32603 whose data.reason is
"overloaded"), or anything else, which is a fault. The exit code is 1 if there was a fault, if a call got no answer, or
if the rate of good answers was below TARGET of the peak.

Memory is that of the router, the store and the a2m-chaos before it, sampled twice a second. The client is a separate
process, so that its own use of the machine is known.
"""

import argparse
import asyncio
import json
import math
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import psutil

from bench.scaling import words
from tests.support.processes import end_with
from tests.support.progress import Bar, progress

AT_ONCE: Final = 16
TARGET: Final = 0.8
# seconds after which a call counts as unanswered
PATIENCE: Final = 30.0
RECORDS: Final = 500
QUICK: Final = ("--seconds", "2", "--connections", "300")

_FEDERATION: Final = """
state = "router.db"
[serve]
http = "127.0.0.1:0"
{serve}
[tiers.all]
kind = "semantic"
command = ["a2m-chaos", "--plan", "slow.toml", "--", {store}, "records.db"]
"""
_PLAN: Final = """
[[fault]]
do = "delay"
wait = "{delay}"
in_order = true
"""
_HEAD: Final = (
    "POST / HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nA2M-Protocol-Version: a2m/0.1\r\n"
    "Content-Length: {length}\r\n\r\n"
)


class Came(msgspec.Struct, frozen=True):
    """The outcome of a call: the kind of answer, when it came, in seconds since the start, and how long it took."""

    kind: str
    at: float
    took: float


class Figures(msgspec.Struct):
    """The client's results. Times are in seconds."""

    peak: float = 0.0  # good answers a second
    begun: int = 0
    seconds: float = 0.0
    came: list[Came] = []
    silent: int = 0
    late: int = 0  # calls that were not begun, since all connections were in use
    processor: float = 0.0  # seconds of processor time of the client during the load


# --- the client


class Line(asyncio.Protocol):
    """One connection, with one call in progress at a time."""

    def __init__(self) -> None:
        self.alive = False
        self._transport: asyncio.Transport | None = None
        self._held = b""
        self._waiting: asyncio.Future[tuple[int, bytes, bytes]] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.alive = True

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(exc or ConnectionResetError("closed without an answer"))

    def data_received(self, data: bytes) -> None:
        self._held += data
        head, blank, body = self._held.partition(b"\r\n\r\n")
        if not blank:
            return
        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
        if len(body) >= int(length[1] if length else 0) and self._waiting is not None and not self._waiting.done():
            self._held = b""
            self._waiting.set_result((int(head[9:12]), head, body))

    async def post(self, message: bytes) -> tuple[int, bytes, bytes]:
        """Return the status, the head and the body of the answer. Raises OSError, TimeoutError."""
        if self._transport is None or not self.alive:
            raise ConnectionResetError("the connection is closed")
        self._waiting = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        async with asyncio.timeout(PATIENCE):
            return await self._waiting

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class Caller:
    """Makes calls, and keeps their outcomes."""

    def __init__(self, host: str, port: int) -> None:
        self.came: list[Came] = []
        self.silent = 0
        self._host = host
        self._port = port
        self._chance = random.Random(0)
        self._count = 0

    async def line(self) -> Line:
        _, line = await asyncio.get_running_loop().create_connection(Line, self._host, self._port)
        return line

    def message(self, method: str, params: dict[str, Any]) -> bytes:
        self._count += 1
        body = json.dumps({"jsonrpc": "2.0", "id": self._count, "method": f"memory/{method}", "params": params})
        return f"{_HEAD.format(host=f'{self._host}:{self._port}', length=len(body))}{body}".encode()

    def next(self) -> bytes:
        """Make the next call of the load."""
        if self._count % 5 == 0:
            return self.message("remember", {"records": [{"content": words(self._chance, 20)}]})
        return self.message("recall", {"query": words(self._chance, 3)})

    async def call(self, line: Line, message: bytes) -> None:
        began = time.monotonic()
        try:
            kind = kind_of(*await line.post(message))
        except TimeoutError:
            self.silent += 1
            line.close()  # a late answer on it would be read as the next call's
            return
        except OSError as problem:
            kind = f"connection: {problem}"
        now = time.monotonic()
        self.came.append(Came(kind, now, now - began))


def kind_of(status: int, head: bytes, body: bytes) -> str:
    """Return the kind of an answer: `good`, one of REFUSALS, or another one in a few words."""
    if status == 503:
        return "503 with Retry-After" if b"\r\nretry-after:" in head.lower() else "503 without Retry-After"
    if status != 200:
        return f"HTTP {status}"
    answer = json.loads(body)
    if "error" in answer:
        reason = (answer["error"].get("data") or {}).get("reason")
        return f"error {answer['error']['code']}, reason {reason!r}"
    return "degraded" if answer["result"].get("degraded") else "good"


REFUSALS: Final = ("503 with Retry-After", "error -32603, reason 'overloaded'")


async def load(url: str, seconds: float, factor: float, connections: int) -> Figures:
    """Put the load on the router at `url`; return the results."""
    host, _, port = url.removeprefix("http://").rstrip("/").partition(":")
    caller = Caller(host, int(port))
    figures = Figures()
    first = await caller.line()
    for _ in range(RECORDS // 100):
        records = [{"content": words(random.Random(number), 20)} for number in range(100)]
        await first.post(caller.message("remember", {"records": records}))
    first.close()
    figures.peak = await _peak(caller, _seconds_of_peak(seconds))
    if not figures.peak:
        sys.exit(f"without any load there are no good answers: {Counter(each.kind for each in caller.came)}")
    caller.came.clear()
    caller.silent = 0
    lines = [await caller.line() for _ in range(connections)]
    used = _processor()
    began = time.monotonic()
    figures.begun, figures.late = await _offer(caller, lines, figures.peak * factor, seconds)
    figures.processor = _processor() - used
    figures.seconds = seconds
    figures.came = [Came(each.kind, each.at - began, each.took) for each in caller.came]
    figures.silent = caller.silent
    for line in lines:
        line.close()
    return figures


def _seconds_of_peak(seconds: float) -> float:
    return max(1.0, seconds / 6)


async def _peak(caller: Caller, seconds: float) -> float:
    """Return the good answers a second with always AT_ONCE calls in progress."""
    ends = time.monotonic() + seconds

    async def go_on() -> None:
        line = await caller.line()
        while time.monotonic() < ends:
            await caller.call(line, caller.next())
        line.close()

    began = time.monotonic()
    await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
    took = time.monotonic() - began
    return sum(each.kind == "good" for each in caller.came) / took


async def _offer(caller: Caller, lines: Sequence[Line], rate: float, seconds: float) -> tuple[int, int]:
    """Begin `rate` calls a second, each on the connection that was idle longest; return when all are over."""
    idle = deque(lines)
    under_way: set[asyncio.Task[None]] = set()
    begun = late = 0
    began = time.monotonic()

    async def one(line: Line) -> None:
        await caller.call(line, caller.next())
        idle.append(line if line.alive else await caller.line())

    while (now := time.monotonic()) < began + seconds:
        due = int((now - began) * rate) - begun
        late += max(0, due - len(idle))
        for _ in range(min(due, len(idle))):
            task = asyncio.create_task(one(idle.popleft()))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        begun += due
        await asyncio.sleep(0.002)
    await asyncio.gather(*under_way)
    return begun - late, late


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


# --- the federation


@contextmanager
def router(folder: Path, delay: str, max_requests: int | None) -> Iterator[tuple[psutil.Process, str]]:
    """A router's process, and its address."""
    serve = "" if max_requests is None else f"max_requests = {max_requests}"
    store = json.dumps(str(Path(sys.executable).with_name("a2m-store")))
    (folder / "federation.toml").write_text(_FEDERATION.format(store=store, serve=serve))
    (folder / "slow.toml").write_text(_PLAN.format(delay=delay))
    program = Path(sys.executable).with_name("a2m-router")
    with (
        (folder / "stderr").open("wb") as stderr,
        subprocess.Popen([program, "--log-level", "error"], cwd=folder, stderr=stderr) as process,
    ):
        try:
            yield psutil.Process(process.pid), _listening(folder / "stderr", process)
        finally:
            process.terminate()


def _listening(stderr: Path, process: "subprocess.Popen[bytes]") -> str:
    while process.poll() is None:
        found = re.search(r"listens on (http://\S+)", stderr.read_text())
        if found is not None:
            return found[1]
        time.sleep(0.05)
    raise RuntimeError(f"the router does not start: {stderr.read_text()}")


class Watched(msgspec.Struct):
    """The use of the federation's processes: bytes of memory, at first and at most, and seconds of processor time."""

    first: int = 0
    most: int = 0
    router: int = 0  # the router's own share of the maximum
    processor: float = 0.0


def _watch(
    process: psutil.Process, client: "subprocess.Popen[bytes]", seconds: float, bar: Bar
) -> tuple[Watched, bytes]:
    watched = Watched()
    began = time.monotonic()
    everybody = [process, *process.children(recursive=True)]
    before = sum(sum(each.cpu_times()[:2]) for each in everybody)
    while True:
        resident = [each.memory_info().rss for each in everybody]
        watched.first = watched.first or sum(resident)
        watched.most = max(watched.most, sum(resident))
        watched.router = max(watched.router, resident[0])
        bar.reach(min(time.monotonic() - began, seconds))
        try:
            out, _ = client.communicate(timeout=0.5)
        except subprocess.TimeoutExpired:
            continue
        watched.processor = sum(sum(each.cpu_times()[:2]) for each in everybody) - before
        return watched, out


# --- what is printed


def report(figures: Figures, watched: Watched) -> int:
    """Print the results; return the exit code."""
    # the last answers come after the last call, when nothing is rejected any more
    during = [each for each in figures.came if each.at <= figures.seconds]
    good = [each for each in during if each.kind == "good"]
    rate = len(good) / figures.seconds
    kinds = Counter(each.kind for each in figures.came)
    other = {kind: count for kind, count in kinds.items() if kind != "good" and kind not in REFUSALS}
    if figures.silent:
        other["no answer"] = figures.silent
    print(f"peak, {AT_ONCE} calls at once: {figures.peak:,.0f} good answers a second")
    print(
        f"{figures.begun:,} calls in {figures.seconds:g} s, {figures.begun / figures.seconds:,.0f} a second; "
        f"{figures.late:,} were not begun, since all connections were in use"
    )
    print(f"{'answer':36} {'number':>9} {'a second':>9} {'median':>11} {'p99':>11}")
    for kind, count in kinds.most_common():
        took = sorted(each.took for each in figures.came if each.kind == kind)
        print(
            f"{kind:36} {count:9,} {sum(each.kind == kind for each in during) / figures.seconds:9,.0f} "
            f"{statistics.median(took) * 1000:8,.1f} ms {took[int(len(took) * 0.99)] * 1000:8,.1f} ms"
        )
    each_second = Counter(int(one.at) for one in good)
    whole = [each_second[second] for second in range(int(figures.seconds))]
    ratio = rate / figures.peak if figures.peak else 0.0
    print(
        f"good answers: {ratio:.0%} of the peak; in the worst second {min(whole, default=0):,}, "
        f"in the best {max(whole, default=0):,}"
    )
    print(
        f"memory of router, store and a2m-chaos: {watched.first / 2**20:.0f} MiB at first, "
        f"{watched.most / 2**20:.0f} MiB at most, of it the router {watched.router / 2**20:.0f} MiB"
    )
    print(
        f"processor: the client {figures.processor / figures.seconds:.0%} of one core, the federation "
        f"{watched.processor:.0f} s in all"
    )
    if other:
        print(f"MISSED: neither good nor an explicit rejection: {other}")
    if ratio < TARGET:
        print(f"MISSED: good answers at {ratio:.0%} of the peak, the target is {TARGET:.0%}")
    return 1 if other or ratio < TARGET else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    options = _parser().parse_args(arguments)
    if options.client is not None:
        figures = asyncio.run(load(options.client, options.seconds, options.factor, options.connections))
        sys.stdout.buffer.write(msgspec.json.encode(figures))
        return 0
    if options.quick:
        options = _parser().parse_args([*QUICK, *(arguments if arguments is not None else sys.argv[1:])])
    with (
        tempfile.TemporaryDirectory() as made,
        router(Path(made), options.delay, options.max_requests) as (process, url),
    ):
        command = [sys.executable, "-m", "bench.overload", "--client", url, "--seconds", str(options.seconds)]
        command += ["--factor", str(options.factor), "--connections", str(options.connections)]
        root = Path(__file__).parent.parent
        seconds = math.ceil(_seconds_of_peak(options.seconds) + options.seconds)
        with (
            subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, env={**os.environ}) as client,
            progress("seconds of peak and load", seconds, ticks=False) as bar,
        ):
            watched, printed = _watch(process, client, seconds, bar)
        if client.returncode:
            return 1
    return report(msgspec.json.decode(printed, type=Figures), watched)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload", description="Measures a router under more load than it can carry."
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="the duration of the load (default: %(default)g)")
    parser.add_argument(
        "--factor", type=float, default=4.0, help="the load as a multiple of the peak (default: %(default)g)"
    )
    parser.add_argument("--connections", type=int, default=500, help="connections of the client (default: %(default)s)")
    parser.add_argument(
        "--delay", default="10ms", help="the time of each call at the tier's server (default: %(default)s)"
    )
    parser.add_argument(
        "--max-requests", type=int, metavar="N", help="the router's max_requests (default: the router's own)"
    )
    parser.add_argument("--quick", action="store_true", help=f"the same as {' '.join(QUICK)}")
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)  # the process that makes the calls
    return parser


if __name__ == "__main__":
    end_with(main)
