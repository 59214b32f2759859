"""The command line: which kinds, on how many processes, how far it has come, and what is found.

What is to be done is cut into parts: one way of one kind, and one thing to try with it. A part is carried out by one
process, and nothing in it depends on what that process did before: the points are the same on any number of processes,
and one of them alone is the same again.
"""

import argparse
import shlex
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from tests.support.processes import INTERRUPTED, positive, processes
from tests.support.progress import progress
from tests.verification.crashing.points import (
    KINDS,
    READER,
    Broken,
    Kind,
    Tally,
    Way,
    crash_points,
    deaths,
    watched,
    ways,
)

_FORGETS: Final = 12
_TORN: Final = 4


class Asked(msgspec.Struct, frozen=True):
    """The selection of the command line; the fields are its options."""

    kinds: tuple[str, ...]
    way: str | None
    only: str
    every: int
    torn: int
    forgets: int
    jobs: int


class Part(msgspec.Struct, frozen=True):
    """A unit of work of one process."""

    kind: str
    way: Way
    attempt: str
    asked: Asked


class Outcome(msgspec.Struct, frozen=True):
    """The result of a part. `story` describes what is broken, None if nothing is."""

    kind: str
    tally: Tally
    seconds: float
    story: str | None


def _crash_points(kind: Kind, way: Way, folder: Path, tally: Tally, asked: Asked) -> None:
    crash_points(kind, way, folder, tally, torn=asked.torn, every=asked.every, only=asked.only)


def _deaths(kind: Kind, way: Way, folder: Path, tally: Tally, asked: Asked) -> None:
    deaths(kind, way, folder, tally, every=asked.every, only=asked.only)


def _watched(kind: Kind, way: Way, folder: Path, tally: Tally, asked: Asked) -> None:
    if asked.only in READER:
        watched(kind, way, folder)
        tally.watched += 1


# the longest parts first, so that no process has to finish alone
_ATTEMPTS: Final[Mapping[str, Callable[[Kind, Way, Path, Tally, Asked], None]]] = {
    "deaths": _deaths,
    "crash points": _crash_points,
    "reader": _watched,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 if nothing was found, 1 if something was, 2 if the options select nothing."""
    asked = asked_for(arguments)
    parts = parts_of(asked)
    jobs = min(asked.jobs, len(parts))
    began = time.monotonic()
    left = Counter(part.kind for part in parts)
    tallies = {kind: Tally() for kind in left}
    seconds = dict.fromkeys(left, 0.0)  # of all processes that worked on the kind
    broken: Counter[str] = Counter()
    interrupted = False
    try:
        with processes(jobs) as pool, progress("", len(parts)) as bar:
            for outcome in pool.imap_unordered(what_came_of, parts):
                kind = outcome.kind
                tallies[kind].add(outcome.tally)
                seconds[kind] += outcome.seconds
                left[kind] -= 1
                if outcome.story is not None:
                    broken[kind] += 1
                    bar.tell(outcome.story)
                if not left[kind]:
                    print(f"{kind}: {tallies[kind]}; {seconds[kind]:.0f} s; {_verdict(broken[kind])}", flush=True)
                bar.name(kind)
                bar.advance()
    except KeyboardInterrupt:
        interrupted = True
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    ended = sum(not parts for parts in left.values())
    print(
        f"{ended} of {len(left)} kinds{', interrupted' if interrupted else ''}: {whole}; "
        f"{time.monotonic() - began:.0f} s, {jobs} at a time; {_verdict(broken.total())}"
    )
    if interrupted:
        return INTERRUPTED
    if not (broken or whole.looked or whole.deaths or whole.watched):
        print("nothing was looked into: is what --only says in a label?", file=sys.stderr)
        return 2
    return 1 if broken else 0


def parts_of(asked: Asked) -> list[Part]:
    """Return all parts that the options select."""
    return [
        Part(kind, way, attempt, asked)
        for kind in asked.kinds
        for way in _ways(kind, asked.forgets)
        if asked.way in (None, str(way))
        for attempt in _ATTEMPTS
    ]


def _ways(kind: str, forgets: int) -> list[Way]:
    return list(ways(KINDS[kind], range(1, forgets + 1)))


def what_came_of(part: Part) -> Outcome:
    """Carry out a part in this process."""
    began = time.monotonic()
    tally = Tally()
    story = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            _ATTEMPTS[part.attempt](KINDS[part.kind], part.way, Path(folder), tally, part.asked)
        except Broken as broken:
            story = _story(part, broken)
    return Outcome(part.kind, tally, time.monotonic() - began, story)


def _story(part: Part, broken: Broken) -> str:
    """Return the findings of a part, and the command that repeats it alone."""
    again = [
        "python",
        "-m",
        "tests.verification.crashing",
        "--kind",
        part.kind,
        "--way",
        str(part.way),
        "--only",
        broken.at,
    ]
    for option, value, default in (("--torn", part.asked.torn, _TORN), ("--forgets", part.asked.forgets, _FORGETS)):
        again += [] if value == default else [option, str(value)]
    trace = "".join(traceback.format_tb(broken.problem.__traceback__)).rstrip()
    before = [f"point {number}, {label}" for number, label in enumerate(broken.before)]
    lines = [f"BROKEN: {part.kind}: {broken}", *before, *trace.splitlines()]
    return "\n  ".join([*lines, f"again: {shlex.join(again)}"])


def _verdict(broken: int) -> str:
    return f"BROKEN {broken} times" if broken else "nothing is broken"


def asked_for(arguments: Sequence[str] | None = None) -> Asked:
    """Parse the command line; exit with a message if it selects an unknown kind or way."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.crashing",
        description="Tries every crash point of every kind of change, which takes some minutes a kind.",
        epilog=f"kinds: {', '.join(KINDS)}",
    )
    add = parser.add_argument
    add("--kind", action="append", choices=KINDS, metavar="KIND", help="only this one; may be repeated")
    add("--way", metavar="WAY", help='only this one, such as "sync first" or "sync last, a forget at call 3"')
    add("--only", default="", metavar="TEXT", help="only the point of this label, or all that have it in theirs")
    add("--every", type=positive, default=1, metavar="N", help="look into one of N points (default: %(default)s)")
    add("--torn", type=int, default=_TORN, metavar="SEEDS", help="random halves of what was not synced (%(default)s)")
    add("--forgets", type=int, default=_FORGETS, metavar="CALLS", help="forget at each of so many calls (%(default)s)")
    add("--jobs", type=positive, default=2, metavar="N", help="processes (default: %(default)s)")
    options = parser.parse_args(arguments)
    kinds = tuple(dict.fromkeys(options.kind or KINDS))
    there = dict.fromkeys(str(way) for kind in kinds for way in _ways(kind, options.forgets))
    if options.way not in (None, *there):
        parser.error(f"--way: there is no {options.way!r}; there are:\n" + "\n".join(there))
    every, torn, forgets, jobs = options.every, options.torn, options.forgets, options.jobs
    return Asked(kinds, options.way, options.only, every, torn, forgets, jobs)
