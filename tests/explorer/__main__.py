"""Explores all of it, and prints how much that was."""

import argparse
import sys
from collections.abc import Sequence

from tests.explorer.scenarios import WHOLE
from tests.explorer.search import explore


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs it; 0 if nothing was found, else 1."""
    options = _parser().parse_args(arguments)
    if not any(options.only is None or options.only in scenario.name for scenario in WHOLE):
        _parser().error("--only: no scenario has that in its name; there are:\n" + "\n".join(s.name for s in WHOLE))
    found = []
    for scenario in WHOLE:
        if options.only is None or options.only in scenario.name:
            one = explore(scenario, on_progress=_progress if sys.stderr.isatty() else _silence)
            print(one, flush=True)
            if one.wrong is not None:
                print(one.wrong, flush=True)
            found.append(one)
    states, transitions = sum(one.states for one in found), sum(one.transitions for one in found)
    wrong = [one for one in found if one.wrong is not None]
    print(
        f"{len(found)} scenarios, {states:,} states, {transitions:,} transitions, "
        f"depth {max((one.depth for one in found), default=0)}, {sum(one.seconds for one in found):.0f} s, "
        f"{len(wrong)} of them with something wrong"
    )
    return 1 if wrong else 0


def _progress(seen: int, waiting: int) -> None:
    print(f"\r{seen:,} seen, {waiting:,} waiting ", end="", file=sys.stderr, flush=True)


def _silence(seen: int, waiting: int) -> None:
    return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.explorer", description="Visits every state of small federations, and checks the rules."
    )
    parser.add_argument("--only", metavar="WORDS", help="only scenarios whose name contains this")
    return parser


if __name__ == "__main__":
    sys.exit(main())
