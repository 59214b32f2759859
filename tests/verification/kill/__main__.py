"""The command line: how many rounds, from which seed on."""

import argparse
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.support.processes import INTERRUPTED, positive
from tests.support.progress import Bar, progress
from tests.verification.kill.rounds import Round, run_round


def main(arguments: Sequence[str] | None = None) -> int:
    """Play the rounds; return 0 if nothing was found, else 1."""
    options = _parser().parse_args(arguments)
    # killed routers leave half lines behind, so warnings about them are expected
    logging.getLogger("a2m_router.protocol").setLevel(logging.CRITICAL)
    print(f"seeds {options.seed} to {options.seed + options.rounds - 1}", flush=True)
    began = time.monotonic()
    rounds: list[Round] = []
    interrupted = False
    try:
        with progress("rounds", options.rounds) as bar:
            for seed in range(options.seed, options.seed + options.rounds):
                rounds.append(_one(seed, bar))
                bar.advance()
    except KeyboardInterrupt:
        interrupted = True
    if rounds:
        print(_summary(rounds, time.monotonic() - began))
    if interrupted:
        print(f"interrupted after {len(rounds)} of {options.rounds} rounds")
        return INTERRUPTED
    return 1 if any(each.wrong for each in rounds) else 0


def _one(seed: int, bar: Bar) -> Round:
    """Play a round; keep its files if there is a finding."""
    folder = Path(tempfile.mkdtemp(prefix=f"a2m-kill-{seed}-"))
    try:
        result = run_round(seed, folder)
    except KeyboardInterrupt:
        shutil.rmtree(folder)
        raise
    if result.wrong is None:
        shutil.rmtree(folder)
    else:
        bar.tell(
            f"seed {seed}: {result.wrong}\n  its files: {folder};"
            f" again: python -m tests.verification.kill --rounds 1 --seed {seed}"
        )
    return result


def _summary(rounds: Sequence[Round], seconds: float) -> str:
    outcomes: Counter[str] = sum((each.outcomes for each in rounds), Counter())
    deaths: Counter[str] = sum((each.deaths for each in rounds), Counter())
    failed = [each.seed for each in rounds if each.wrong]
    lines = [
        f"{len(rounds)} rounds in {seconds:.0f} s, {seconds / max(1, len(rounds)):.1f} s each; {len(failed)} failed",
        f"  {outcomes.total():,} calls: " + ", ".join(f"{count:,} {name}" for name, count in outcomes.most_common()),
        f"  {deaths.total():,} deaths: " + ", ".join(f"{count:,} {name}" for name, count in deaths.most_common()),
        f"  {sum(each.records for each in rounds):,} records at the end, each compared with what was acknowledged",
        f"  whoever lost its router was gone after {max(each.longest_orphan for each in rounds):.2f} s at most",
    ]
    if failed:
        lines.append(f"  FAILED: seeds {', '.join(map(str, failed))}")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.kill",
        description="Kills routers and stores under load, and looks whether anything that was acknowledged is lost.",
    )
    parser.add_argument("--rounds", type=positive, default=200, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed",
        type=int,
        default=random.SystemRandom().randrange(2**31),
        help="of the first round; each has the next. When a process dies depends on the machine, too: a seed repeats "
        "what is done, not what it meets",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
