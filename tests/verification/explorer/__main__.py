"""Explores all of it, and prints how much that was."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from tests.support.processes import INTERRUPTED, positive, processes
from tests.support.progress import progress
from tests.verification.explorer.scenarios import WHOLE
from tests.verification.explorer.search import Found, explore_in_every_order


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the scenarios; return 0 if nothing was found, else 1."""
    options = _parser().parse_args(arguments)
    scenarios = [scenario for scenario in WHOLE if scenario.name == options.only] or [
        scenario for scenario in WHOLE if options.only is None or options.only in scenario.name
    ]
    if not scenarios:
        _parser().error("--only: no scenario has that in its name; there are:\n" + "\n".join(s.name for s in WHOLE))
    began = time.monotonic()
    found: list[Found] = []
    interrupted = False
    try:
        with processes(min(options.jobs, len(scenarios))) as pool, progress("scenarios", len(scenarios)) as bar:
            for one in pool.imap(explore_in_every_order, scenarios):
                found.append(one)
                print(one, flush=True)
                if one.wrong is not None:
                    again = f"python -m tests.verification.explorer --only {shlex.quote(one.scenario)}"
                    print(f"{one.wrong}\nagain: {again}", flush=True)
                bar.advance()
    except KeyboardInterrupt:
        interrupted = True
    states, transitions = sum(one.states for one in found), sum(one.transitions for one in found)
    wrong = [one for one in found if one.wrong is not None]
    print(
        f"{len(found)} scenarios{f' of {len(scenarios)}, interrupted' if interrupted else ''}, {states:,} states, "
        f"{transitions:,} transitions, depth {max((one.depth for one in found), default=0)}, "
        f"{time.monotonic() - began:.0f} s, {len(wrong)} of them with something wrong"
    )
    if interrupted:
        return INTERRUPTED
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.explorer",
        description="Visits every state of small federations, and checks the rules.",
    )
    parser.add_argument("--only", metavar="WORDS", help="only scenarios with this in their name")
    parser.add_argument("--jobs", type=positive, default=2, metavar="N", help="processes (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
