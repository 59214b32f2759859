"""Measures how the cost of calls grows with the number of records: the same calls on a small and a large federation.

    python -m bench.scaling [--small 1000] [--large 100000] [--quick]

Each federation is an a2m-router with one a2m-store for each tier, all of them processes with their own files. Records
are spread over three tiers, conversations of equal size, owners, groups and keys. The calls to both are interleaved, so
that other load on the machine affects both equally; the figures are medians.

The router's own share of a recall is measured on the same files with the router in this process and the stores in
others: it is the processor time of this process from the call to its answer, without the wait for tiers.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio

from a2m_router.config.loading import load
from a2m_router.daemon.app import Federation, running_federation
from a2m_router.protocol.server.stdio import LOCAL
from a2m_router.tiers.link_factory import links_for
from tests.support.processes import end_with
from tests.support.progress import Bar, progress

CONVERSATION: Final = 20
CAPACITY: Final = 24
OWNERS: Final = 10
BATCH: Final = 1000

FEDERATION: Final = f"""
state = "router.db"
[policy]
pass = "explicit"
[tiers.working]
kind = "working"
command = ["a2m-store", "working.db"]
capacity = {CAPACITY}
per_session = true
spill_to = "episodic"
half_life = "5m"
timeout = "60s"
[tiers.episodic]
kind = "episodic"
command = ["a2m-store", "episodic.db"]
promote_to = "semantic"
promote_after = 1000
half_life = "1d"
timeout = "60s"
[tiers.semantic]
kind = "semantic"
command = ["a2m-store", "semantic.db"]
timeout = "60s"
"""

# a few words are frequent and most are rare, as in any language
WORDS: Final = [f"{first}{middle}{last}" for first in "bdfgklmnprst" for middle in "aeiou" for last in "bdfgklmnprstvz"]
COMMONNESS: Final = [1 / (place + 1) for place in range(len(WORDS))]


def words(chance: random.Random, count: int) -> str:
    return " ".join(chance.choices(WORDS, COMMONNESS, k=count))


def owner_of(conversation: int) -> str:
    return f"owner {conversation % OWNERS}"


def record(number: int, chance: random.Random) -> dict[str, Any]:
    """Return one of the records of a federation; a conversation is in one tier."""
    conversation = number // CONVERSATION
    tier = ("working", *["episodic"] * 6, *["semantic"] * 3)[conversation % 10]
    made = {
        "id": f"record {number}",
        "content": words(chance, 20),
        "owner": owner_of(conversation),
        "session": f"conversation {conversation}",
        "tier": tier,
        "metadata": {"number": number},
    }
    if number % 10 == 0:
        made["key"] = f"notes/{number}"
    if number % 20 in (5, 6, 7):
        made["group"] = f"group {conversation}"
    return made


class Router:
    """An a2m-router on pipes, and its folder."""

    def __init__(self, folder: Path, size: int) -> None:
        self.folder = folder
        self.size = size
        (folder / "federation.toml").write_text(FEDERATION)
        program = Path(sys.executable).with_name("a2m-router")
        self._process = subprocess.Popen(
            [program, "--log-level", "warning"], cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def call(self, method: str, **params: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        message = {"jsonrpc": "2.0", "id": 1, "method": f"memory/{method}", "params": params}
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["result"]

    def fill(self) -> None:
        chance = random.Random(self.size)
        with progress("records written", self.size, ticks=False) as bar:
            for start in range(0, self.size, BATCH):
                numbers = range(start, min(start + BATCH, self.size))
                self.call("remember", records=[record(number, chance) for number in numbers])
                bar.reach(numbers.stop)
        full = {"session": "full", "owner": owner_of(0), "tier": "working"}
        self.call("remember", records=[{"content": words(chance, 20), **full} for _ in range(CAPACITY)])

    def close(self) -> None:
        self._process.communicate()


# each function takes a router and a new number, and returns the measured seconds
Measure = Callable[[Router, int], float]


def timed(router: Router, method: str, **params: Any) -> float:
    began = time.perf_counter()
    router.call(method, **params)
    return time.perf_counter() - began


def remember(router: Router, turn: int) -> float:
    content = words(random.Random(turn), 20)
    return timed(router, "remember", records=[{"content": content, "tier": "episodic"}], owner=owner_of(turn))


def key_of(router: Router, turn: int) -> tuple[str, str]:
    number = turn * 7919 * 10 % router.size
    return f"notes/{number}", owner_of(number // CONVERSATION)


def replace(router: Router, turn: int) -> float:
    key, owner = key_of(router, turn)
    return timed(router, "remember", records=[{"content": words(random.Random(turn), 20), "key": key}], owner=owner)


def fetch(router: Router, turn: int) -> float:
    key, owner = key_of(router, turn)
    return timed(router, "fetch", key=key, owner=owner)


def promote(router: Router, turn: int) -> float:
    [id] = router.call("remember", records=[{"content": "x", "tier": "episodic"}], owner=owner_of(turn))["ids"]
    return timed(router, "promote", ids=[id], tier="semantic", owner=owner_of(turn))


def timeline(router: Router, turn: int) -> float:
    conversation = turn * 31 % (router.size // CONVERSATION)
    where = {"session": f"conversation {conversation}"}
    return timed(router, "timeline", where=where, owner=owner_of(conversation))


def newest(router: Router, turn: int) -> float:
    return timed(router, "timeline", limit=CONVERSATION, owner=owner_of(turn))


def describe(router: Router, turn: int) -> float:
    return timed(router, "describe", owner=owner_of(turn))


def spill(router: Router, turn: int) -> float:
    full = {"session": "full", "owner": owner_of(0), "tier": "working"}
    began = time.perf_counter()
    router.call("remember", records=[{"content": words(random.Random(turn), 20), **full}])
    moved = router.call("consolidate")["moved"]
    took = time.perf_counter() - began
    assert moved == 1, moved
    return took


def forget(router: Router, turn: int) -> float:
    [id] = router.call("remember", records=[{"content": "x", "tier": "semantic"}], owner=owner_of(turn))["ids"]
    return timed(router, "forget", ids=[id], owner=owner_of(turn))


def recall(router: Router, turn: int) -> float:
    return timed(router, "recall", query=question(turn))


def recall_scoped(router: Router, turn: int) -> float:
    return timed(router, "recall", query=question(turn), owner=owner_of(turn))


def question(turn: int) -> str:
    return words(random.Random(turn), 3)


CALLS: Final[dict[str, Measure]] = {
    "remember, one record": remember,
    "remember, a known key": replace,
    "fetch": fetch,
    "promote": promote,
    "timeline of a conversation": timeline,
    "timeline, an owner's newest": newest,
    "describe, one owner's counts": describe,
    "a spill: write and pass": spill,
    "forget by id": forget,
    "recall, all owners": recall,
    "recall, one owner's": recall_scoped,
}


async def own_shares(folders: Sequence[Path], turns: int, bar: Bar) -> list[float]:
    """Return the median processor time of a recall, in seconds, for the federation in each folder."""
    shares: list[list[float]] = [[] for _ in folders]
    async with AsyncExitStack() as stack:
        federations = []
        for folder in folders:
            settings = load(folder / "federation.toml", os.environ)
            links = links_for(settings, os.environ)
            federations.append(await stack.enter_async_context(running_federation(settings, links)))
        for turn in range(turns):
            for federation, measured in zip(federations, shares, strict=True):
                measured.append(await _processor_time(federation, turn))
            bar.advance()
    return list(map(statistics.median, shares))


async def _processor_time(federation: Federation, turn: int) -> float:
    message = {"jsonrpc": "2.0", "id": 1, "method": "memory/recall", "params": {"query": question(turn)}}
    raw = json.dumps(message).encode()
    began = time.process_time()
    answer = await federation.answer(raw, LOCAL)
    took = time.process_time() - began
    assert answer is not None
    assert b'"result"' in answer
    return took


@contextmanager
def filled(folder: Path, size: int) -> Iterator[Router]:
    folder.mkdir()
    router = Router(folder, size)
    try:
        began = time.perf_counter()
        router.fill()
        took = time.perf_counter() - began
        print(f"{size:,} records written in {took:.1f} s ({size / took:,.0f} a second)", file=sys.stderr)
        yield router
    finally:
        router.close()


def row(name: str, small: float, large: float) -> str:
    return f"{name:30} {small * 1000:10.2f} ms {large * 1000:10.2f} ms {large / small:8.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling", description="Measures how the cost of calls grows with the number of records."
    )
    parser.add_argument(
        "--small", type=int, default=1_000, help="records in the small federation (default: %(default)s)"
    )
    parser.add_argument(
        "--large", type=int, default=100_000, help="records in the large federation (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the large federation, and fewer turns")
    options = parser.parse_args()
    large_size = options.large // 10 if options.quick else options.large
    turns = 30 if options.quick else 150
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        took: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in CALLS}
        with (
            filled(folder / "small", options.small) as small,
            filled(folder / "large", large_size) as large,
            progress("turns", turns, ticks=False) as bar,
        ):
            for turn in range(turns):
                for name, measure in CALLS.items():
                    # the order alternates, so that neither always finds warm caches
                    for router in (small, large) if turn % 2 else (large, small):
                        took[name][router is large].append(measure(router, turn))
                bar.reach(turn + 1)
        with progress("recalls in this process", turns, ticks=False) as bar:
            shares = anyio.run(own_shares, [folder / "small", folder / "large"], turns, bar)
    print(f"{'median of ' + str(turns):30} {options.small:>10,}    {large_size:>10,}    {'ratio':>8}")
    for name, (few, many) in took.items():
        print(row(name, statistics.median(few), statistics.median(many)))
    print(row("recall, the router's own share", *shares))


if __name__ == "__main__":
    end_with(main)
