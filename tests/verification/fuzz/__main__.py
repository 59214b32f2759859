"""The command line: how many messages, from which seed, and where to."""

import argparse
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.verification.fuzz.codec import fuzz_codec
from tests.verification.fuzz.http import fuzz_http
from tests.verification.fuzz.pipes import fuzz_stdio
from tests.verification.fuzz.reporting import Advance, Finding, Report, growth

SHARES: Final = {"codec": 0.6, "stdio": 0.3, "http": 0.1}

DOORS: Final = {"codec": fuzz_codec, "stdio": fuzz_stdio, "http": fuzz_http}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the fuzzer; return 0 if nothing was found, else 1."""
    options = _parser().parse_args(arguments)
    shares = {options.only: 1.0} if options.only else SHARES
    counts = {door: round(options.messages * share) for door, share in shares.items()}
    print(f"seed {options.seed}: " + ", ".join(f"{count:,} messages to {door}" for door, count in counts.items()))
    reports = []
    for door, count in counts.items():
        with _progress(door, count) as advance:
            report = DOORS[door](options.seed, count, advance)
        print(_summary(report), flush=True)
        reports.append(report)
    findings = [finding for report in reports for finding in report.findings]
    sent = sum(report.messages for report in reports)
    seconds = sum(report.seconds for report in reports)
    print(f"{sent:,} messages in {seconds:.0f} s, {len(findings)} findings")
    if findings:
        path = options.findings or Path(tempfile.gettempdir()) / f"a2m-fuzz-{options.seed}.jsonl"
        path.write_bytes(b"".join(_written(options.seed, finding) for finding in findings))
        print(f"what was found, with the messages in base64: {path}; again: --seed {options.seed}")
    return 1 if findings else 0


def _written(seed: int, finding: Finding) -> bytes:
    return msgspec.json.encode({"seed": seed, **msgspec.structs.asdict(finding)}) + b"\n"


def _summary(report: Report) -> str:
    rate = report.messages / report.seconds if report.seconds else 0
    lines = [f"{report.door}: {report.messages:,} messages in {report.seconds:.1f} s, {rate:,.0f} a second"]
    lines.append("  " + ", ".join(f"{number:,} {kind}" for kind, number in report.answers.most_common()))
    if report.resident:
        first, last = report.resident[0] / 2**20, report.resident[-1] / 2**20
        lines.append(
            f"  memory of router and stores: {first:.0f} MiB at first, {last:.0f} MiB at last, at most "
            f"{max(report.resident) / 2**20:.0f} MiB; after the warm-up {growth(report.resident) / 2**20:+.1f} MiB"
        )
    lines += [f"  FOUND after {found.number:,}: {found.what}" for found in report.findings]
    return "\n".join(lines)


@contextmanager
def _progress(door: str, total: int) -> Iterator[Advance]:
    """Show a bar on a terminal's stderr; yield a function that takes the number of messages done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
        task = bar.add_task(door, total=total)
        yield lambda done: bar.update(task, completed=done)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.verification.fuzz",
        description="Sends generated messages to the codec, and to routers that it starts.",
    )
    parser.add_argument("--messages", type=int, default=200_000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=random.SystemRandom().randrange(2**32), help="what they follow from"
    )
    parser.add_argument("--only", choices=tuple(DOORS), help="send all of them there")
    parser.add_argument(
        "--findings", type=Path, metavar="FILE", help="where findings go (default: the temporary folder)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
