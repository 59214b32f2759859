"""The command line: which seeds, on how many processes; what is found is printed whole."""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence

from tests.support.processes import INTERRUPTED, end_with, positive, processes
from tests.support.progress import progress
from tests.verification.simulation.lives import Outcome, live_quietly


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the seeds; return 0 if nothing was found, else 1."""
    options = _parser().parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # without a fixed hash seed, sets of strings would have another order in each process
        sys.stdout.flush()
        again = [
            sys.executable,
            "-m",
            "tests.verification.simulation",
            *(sys.argv[1:] if arguments is None else arguments),
        ]
        os.execve(sys.executable, again, {**os.environ, "PYTHONHASHSEED": "0"})
    if options.seed is not None:
        [outcome] = _lived([options.seed], 1)
        print(_story(outcome))
        return 0 if outcome.failure is None else 1
    began = time.monotonic()
    lives = operations = deaths = refusals = set_back = 0
    found = []
    interrupted = False
    try:
        with progress("seeds", options.seeds) as bar:
            for outcome in _lived(range(options.first, options.first + options.seeds), options.jobs):
                bar.advance()
                lives += 1
                operations += outcome.operations
                deaths += outcome.deaths
                refusals += outcome.refusals
                set_back += outcome.set_back
                if outcome.failure is not None:
                    found.append(outcome.seed)
                    bar.tell(_story(outcome))
    except KeyboardInterrupt:
        interrupted = True
    seconds = time.monotonic() - began
    print(
        f"{lives:,} seeds, {operations:,} operations, {deaths:,} deaths of routers, {refusals:,} catalogs and"
        f" {set_back:,} stores put back in {seconds:.0f} s on {options.jobs} processes;"
        f" {len(found)} found something{': ' if found else ''}{', '.join(map(str, found))}"
    )
    if interrupted:
        print(f"interrupted after {lives:,} of {options.seeds:,} seeds")
        return INTERRUPTED
    return 1 if found else 0


def _lived(seeds: Sequence[int], jobs: int) -> Iterator[Outcome]:
    """Yield the outcome of each seed. Lives never run in this process, where Ctrl-C would interrupt one halfway.

    A process is replaced after many lives, since it may hold much memory.
    """
    with processes(jobs, logs=True, exchanged_after=500) as pool:  # lives are judged by their logs, too
        yield from pool.imap_unordered(live_quietly, seeds)


def _story(outcome: Outcome) -> str:
    ending = "nothing was found" if outcome.failure is None else f"BROKEN: {outcome.failure}"
    again = f"again: python -m tests.verification.simulation --seed {outcome.seed}"
    return "\n".join([*outcome.history, f"seed {outcome.seed}: {ending}", again])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.simulation", description="Lives of federations, by seeds."
    )
    parser.add_argument("--seeds", type=positive, default=300, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the first of them (default: %(default)s)")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes (default: %(default)s)")
    parser.add_argument("--seed", type=int, metavar="N", help="this one only; print its history")
    return parser


if __name__ == "__main__":
    end_with(main)
