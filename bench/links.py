"""Compares the cost of ways to reach a tier: the same calls to a native tier, a lifted one, and one over HTTP.

    python -m bench.links [--quick]

Each of TIERS is the only tier of a federation in this process, with its server in another process. The calls to all
are interleaved, so that other load on the machine affects all equally. Times are medians of calls one after the other;
calls a second are counted with several in progress at once. Ratios are to the first of TIERS.

All have the same engine, an a2m-store: unchanged; declaring only the core; and over HTTP, where it declares no
`scopes` and is lifted, too. A `describe` of the tier's server measures the link alone, without the router.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import anyio

from a2m_router.config.loading import parse
from a2m_router.daemon.app import Federation, running_federation
from a2m_router.protocol.server.stdio import LOCAL
from a2m_router.tiers.link_factory import links_for
from bench.scaling import words
from tests.support.processes import end_with
from tests.support.progress import Bar, progress

ROOT: Final = Path(__file__).parent.parent
AT_ONCE: Final = 16
BATCH: Final = 500


class Tier(NamedTuple):
    """A way to reach a tier.

    Args:
        lines: the lines of its table in federation.toml; `{url}` is the address of its server.
        serve: the command of a server that prints its address on stderr. Without one the router starts the server.
    """

    name: str
    lines: str
    serve: Sequence[str] = ()


TIERS: Final = (
    Tier("native, stdio", 'command = ["a2m-store", "records.db"]'),
    Tier(
        "lifted, stdio",
        f'command = ["{sys.executable}", "-m", "bench.core_store", "records.db"]\nenv = {{ PYTHONPATH = "{ROOT}" }}',
    ),
    Tier("lifted, HTTP", 'url = "{url}"', ["a2m-store", "records.db", "--http", "127.0.0.1:0"]),
)


async def call(federation: Federation, method: str, **params: Any) -> Any:
    message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
    answer = await federation.answer(json.dumps(message).encode(), LOCAL)
    assert answer is not None
    answered = json.loads(answer)
    if "error" in answered:
        raise RuntimeError(answered["error"])
    return answered["result"]


async def remember(federation: Federation, turn: int) -> None:
    await call(federation, "remember", records=[{"content": words(random.Random(turn), 20)}])


async def recall(federation: Federation, turn: int) -> None:
    await call(federation, "recall", query=words(random.Random(turn), 3))


async def describe(federation: Federation, _: int) -> None:
    await federation.links["all"].call("memory/describe", {})


CALLS: Final[dict[str, Callable[[Federation, int], Coroutine[Any, Any, None]]]] = {
    "recall": recall,
    "remember": remember,
    "the link alone": describe,
}


@contextmanager
def server(command: Sequence[str], folder: Path) -> Iterator[str]:
    """Return the address where the command's server listens."""
    program, *arguments = command
    path = Path(sys.executable).with_name(program)
    with subprocess.Popen([path, *arguments], cwd=folder, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            found = re.search(r"http://\S+", process.stderr.readline())
            if found is None:
                raise RuntimeError(f"{program} does not print its address")
            yield found[0]
        finally:
            process.terminate()


@asynccontextmanager
async def federation_of(tier: Tier, folder: Path, records: int) -> AsyncIterator[Federation]:
    """A federation with only this tier, which holds that many records."""
    with ExitStack() as stack:
        url = stack.enter_context(server(tier.serve, folder)) if tier.serve else ""
        lines = tier.lines.replace("{url}", url)
        text = f'state = "router.db"\n[tiers.all]\nkind = "semantic"\ntimeout = "60s"\n{lines}\n'
        settings = parse(text, base=folder, environ=os.environ)
        async with running_federation(settings, links_for(settings, os.environ)) as federation:
            chance = random.Random(records)
            for start in range(0, records, BATCH):
                count = min(BATCH, records - start)
                await call(federation, "remember", records=[{"content": words(chance, 20)} for _ in range(count)])
            yield federation


async def measured(folders: Sequence[Path], records: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Return for each call, and each of TIERS in order, the median in seconds and the calls a second."""
    async with AsyncExitStack() as stack:
        federations = [
            await stack.enter_async_context(federation_of(tier, folder, records))
            for tier, folder in zip(TIERS, folders, strict=True)
        ]
        bar = stack.enter_context(progress("", len(CALLS) * (turns + _rounds(turns)), ticks=False))
        figures = {}
        for name, make in CALLS.items():
            bar.name(name)
            figures[name] = await _measured(federations, make, turns, bar)
        return figures


async def _measured(
    federations: Sequence[Federation],
    make: Callable[[Federation, int], Coroutine[Any, Any, None]],
    turns: int,
    bar: Bar,
) -> list[tuple[float, float]]:
    took: list[list[float]] = [[] for _ in federations]
    for turn in range(turns):
        for place in _in_turn(len(federations), turn):
            began = time.perf_counter()
            await make(federations[place], turn)
            took[place].append(time.perf_counter() - began)
        bar.advance()
    together = [0.0 for _ in federations]
    rounds = _rounds(turns)
    for turn in range(rounds):
        for place in _in_turn(len(federations), turn):
            began = time.perf_counter()
            async with anyio.create_task_group() as tasks:
                for number in range(AT_ONCE):
                    tasks.start_soon(make, federations[place], turns + turn * AT_ONCE + number)
            together[place] += time.perf_counter() - began
        bar.advance()
    return [
        (statistics.median(alone), rounds * AT_ONCE / all_of_it)
        for alone, all_of_it in zip(took, together, strict=True)
    ]


def _rounds(turns: int) -> int:
    return max(1, turns // AT_ONCE)


def _in_turn(count: int, turn: int) -> list[int]:
    # the order alternates, so that none always finds warm caches
    return [(place + turn) % count for place in range(count)]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.links", description="Compares the cost of ways to reach a tier."
    )
    parser.add_argument("--records", type=int, default=2_000, help="in each tier (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer records and turns")
    options = parser.parse_args()
    records, turns = (200, 48) if options.quick else (options.records, 320)
    with tempfile.TemporaryDirectory() as made:
        folders = [Path(made) / tier.name for tier in TIERS]
        for folder in folders:
            folder.mkdir()
        uvloop = {"use_uvloop": sys.platform != "win32"}
        figures = anyio.run(measured, folders, records, turns, backend_options=uvloop)
    many = f"{AT_ONCE} at once"
    print(f"{f'{records:,} records, {turns} calls':28} {'median':>12} {'ratio':>7} {many:>14} {'ratio':>7}")
    for name, by_tier in figures.items():
        first_median, first_rate = by_tier[0]
        for tier, (median, rate) in zip(TIERS, by_tier, strict=True):
            print(
                f"{f'{name}, {tier.name}':28} {median * 1000:9.2f} ms {median / first_median:7.2f} "
                f"{rate:12,.0f}/s {rate / first_rate:7.2f}"
            )


if __name__ == "__main__":
    end_with(main)
