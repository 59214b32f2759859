"""Measures how a tier that hangs slows down recalls that do not need it.

    python -m bench.hanging [--turns 2000] [--greets] [--quick]

Two federations run side by side, each an a2m-router on pipes with one store for each tier. In the first, an a2m-chaos
before the store of `semantic` neither carries out nor answers any call, greetings included; in the second it passes all
calls on. Both get the same calls. Recalls of `working` run one after the other, alternating between the federations,
so that other load on the machine affects both equally. Meanwhile, every EVERY seconds, a recall of all tiers begins,
which needs the tier that hangs.

With --greets the tier hangs only in recalls. Then each greeting closes its breaker again, and some calls always wait
for it.

The output compares the recalls of `working` and their p99, and shows the recalls of all tiers with the hanging one.
These first return at its deadline and, once its breaker is open, at once; `degraded` names the missing tier. The exit
code is 1 if the ratio of the p99 is above TARGET, if `degraded` does not name the tier, or if such a recall takes
longer than the deadline and GRACE.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec

from a2m_router.protocol.client.child import connect_process
from a2m_router.protocol.client.client import Peer
from bench.scaling import words
from tests.support.processes import end_with
from tests.support.progress import progress

TARGET: Final = 1.5
DEADLINE: Final = 1.0  # of a call to a tier, seconds
GRACE: Final = 0.5  # seconds for the work of a recall besides waiting
EVERY: Final = 0.1  # seconds between two recalls of all tiers
RECORDS: Final = 500  # in each tier
TIERS: Final = ("working", "episodic", "semantic")
HANGING: Final = "semantic"
# turns that are not counted, since the first ones find empty caches
WARM_UP: Final = 50

_TIER: Final = """
[tiers.{name}]
kind = "{name}"
command = {command}
timeout = "1s"
"""
# it hangs as soon as a file of that name exists
_PLAN: Final = """
[[fault]]
do = "hang"
while = "hanging"
{further}
"""


class Wide(msgspec.Struct, frozen=True):
    """A recall of all tiers: its seconds, and the tiers that it reported as missing."""

    took: float
    missing: list[str]


class Seen(msgspec.Struct):
    """The recalls of one federation: the seconds of those of `working`, and those of all tiers."""

    narrow: list[float] = []
    wide: list[Wide] = []


@asynccontextmanager
async def federation(folder: Path, further: str) -> AsyncIterator[Peer]:
    """A router on pipes, with records in every tier; `further` lines of the fault's plan limit what hangs."""
    _prepare(folder, further)
    program = str(Path(sys.executable).with_name("a2m-router"))
    with (folder / "stderr").open("w") as log:
        async with connect_process(
            [program, "--log-level", "warning"],
            name="router",
            cwd=folder,
            on_stderr=lambda line: print(line, file=log, flush=True),
        ) as peer:
            chance = random.Random(0)
            for tier in TIERS:
                for _ in range(RECORDS // 100):
                    records = [{"content": words(chance, 20), "tier": tier} for _ in range(100)]
                    await peer.call("memory/remember", {"records": records}, timeout=60)
            yield peer


def _prepare(folder: Path, further: str) -> None:
    folder.mkdir()
    (folder / "faults.toml").write_text(_PLAN.format(further=further))
    store = str(Path(sys.executable).with_name("a2m-store"))
    chaos = ["a2m-chaos", "--plan", "faults.toml", "--"]
    tiers = [
        _TIER.format(name=name, command=json.dumps([*(chaos if name == HANGING else ()), store, f"{name}.db"]))
        for name in TIERS
    ]
    (folder / "federation.toml").write_text(f'state = "router.db"\n{"".join(tiers)}')


async def recall(peer: Peer, turn: int, **params: Any) -> tuple[float, list[str]]:
    """Return how long a recall took, and which tiers were missing in it."""
    query = words(random.Random(turn), 3)
    began = time.perf_counter()
    raw = await peer.call("memory/recall", {"query": query, **params}, timeout=60)
    took = time.perf_counter() - began
    return took, [each["tier"] for each in msgspec.json.decode(raw).get("degraded", ())]


async def measured(folder: Path, turns: int, further: str) -> dict[str, Seen]:
    """Return the recalls of the federation where all tiers work, and of the one where a tier hangs."""
    folders = {"all tiers work": folder / "well", f"{HANGING} hangs": folder / "hanging"}
    seen = {name: Seen() for name in folders}
    async with AsyncExitStack() as stack:
        peers = {name: await stack.enter_async_context(federation(path, further)) for name, path in folders.items()}
        for turn in range(WARM_UP):
            for peer in peers.values():
                await recall(peer, turn, tier="working")
                await recall(peer, turn)
        (folder / "hanging" / "hanging").touch()
        bar = stack.enter_context(progress("turns", turns, ticks=False))
        async with anyio.create_task_group() as asking:
            for name, peer in peers.items():
                asking.start_soon(_ask_widely, peer, seen[name])
            for turn in range(turns):
                # the order alternates, so that neither always finds warm caches
                for name in (list(peers), list(peers)[::-1])[turn % 2]:
                    took, missing = await recall(peers[name], turn, tier="working")
                    assert not missing, missing
                    seen[name].narrow.append(took)
                bar.reach(turn + 1)
            asking.cancel_scope.cancel()
    return seen


async def _ask_widely(peer: Peer, seen: Seen) -> None:
    """Begin a recall of all tiers every EVERY seconds, without waiting for earlier ones."""

    async def one(turn: int) -> None:
        seen.wide.append(Wide(*await recall(peer, turn)))

    async with anyio.create_task_group() as tasks:
        for turn in range(sys.maxsize):
            tasks.start_soon(one, turn)
            await anyio.sleep(EVERY)


def p99(took: Sequence[float]) -> float:
    return sorted(took)[int(len(took) * 0.99)]


def report(seen: dict[str, Seen]) -> int:
    """Print the results; return the exit code."""
    well, hanging = seen.values()
    ratio = p99(hanging.narrow) / p99(well.narrow)
    print(f"{'recalls of one tier':28} {'number':>7} {'median':>11} {'p99':>11} {'ratio':>8}")
    for title, each in seen.items():
        compared = f"{ratio:8.2f}" if each is hanging else ""
        print(
            f"{title:28} {len(each.narrow):7,} {_ms(statistics.median(each.narrow))} {_ms(p99(each.narrow))}{compared}"
        )
    print(f"\n{'recalls of all tiers':28} {'number':>7} {'median':>11} {'longest':>11} {'reported':>8}")
    waited = [wide for wide in hanging.wide if wide.took >= DEADLINE / 2]
    at_once = [wide for wide in hanging.wide if wide.took < DEADLINE / 2]
    groups = {
        "all tiers work": well.wide,
        f"{HANGING} hangs: at its deadline": waited,
        "… behind its breaker": at_once,
    }
    for title, some in groups.items():
        if some:
            took = [wide.took for wide in some]
            reported = f"{sum(map(_is_reported, some)):8,}"
            print(f"{title:28} {len(some):7,} {_ms(statistics.median(took))} {_ms(max(took))}{reported}")
    silent = sum(not _is_reported(wide) for wide in hanging.wide)
    longest = max(wide.took for wide in hanging.wide)
    missed = {
        f"the p99 is {ratio:.2f} times that without a hanging tier, the target is {TARGET:g}": ratio > TARGET,
        f"{silent} recalls of all tiers do not report {HANGING} as missing": silent > 0,
        f"a recall of all tiers took {longest:.2f} s, the deadline is {DEADLINE:g} s": longest > DEADLINE + GRACE,
    }
    for sentence, is_missed in missed.items():
        if is_missed:
            print(f"MISSED: {sentence}")
    return 1 if any(missed.values()) else 0


def _is_reported(wide: Wide) -> bool:
    return wide.missing == [HANGING]


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:8.1f} ms"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.hanging",
        description="Measures how a tier that hangs slows down recalls that do not need it.",
    )
    parser.add_argument("--turns", type=int, default=2_000, help="recalls of one tier (default: %(default)s)")
    parser.add_argument("--greets", action="store_true", help="the tier hangs only in recalls and answers greetings")
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    options = parser.parse_args(arguments)
    further = 'method = "memory/recall"' if options.greets else ""
    turns = 200 if options.quick else options.turns
    with tempfile.TemporaryDirectory() as made:
        backend = {"use_uvloop": sys.platform != "win32"}
        seen = anyio.run(measured, Path(made), turns, further, backend_options=backend)
    return report(seen)


if __name__ == "__main__":
    end_with(main)
