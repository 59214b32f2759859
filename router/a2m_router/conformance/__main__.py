"""The command line of the conformance suite."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from a2m_router.conformance import report
from a2m_router.conformance.checking import Failure, Target
from a2m_router.conformance.client import Client, Http, NoAnswer, Stdio
from a2m_router.conformance.process import CannotStart
from a2m_router.conformance.running import SECTIONS, Outcome, State, outcomes


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suite; return 0 if no check failed, else 1. Raise SystemExit with 2 if the arguments are wrong."""
    options = _parser().parse_args(arguments)
    if options.list:
        print("\n".join(report.sentence_lines(tested=True)))
        return 0
    if options.stdio is None and options.http is None:
        _parser().error("expected --stdio CMD... or --http URL")
    if options.http is not None and not is_url(options.http):
        _parser().error(f"--http: expected a URL such as http://127.0.0.1:8080/, got {options.http!r}")
    if options.http is None and not (options.stdio and options.stdio[0].strip()):
        _parser().error("--stdio: expected a server's command, got nothing")
    try:
        client: Client = (
            Http(options.http, options.token, options.timeout)
            if options.http is not None
            else Stdio(options.stdio, options.timeout)
        )
    except CannotStart as problem:
        return cannot_be_judged(str(problem))
    other = Http(options.http, options.other_token, options.timeout) if options.http and options.other_token else None
    try:
        return judge(
            Target(client, other, patience=options.timeout / 2), options.only or SECTIONS, verbose=options.verbose
        )
    finally:
        client.close()


def judge(target: Target, sections: Sequence[str], *, verbose: bool) -> int:
    """Read the server's description, run the checks and print the report; return the exit code."""
    try:
        target.meet()
    except (Failure, NoAnswer) as failure:
        lost = target.client.lost(doubtful=False)
        return cannot_be_judged(f"{failure}." if lost is None else f"{failure}. {lost}")
    profile = "read-only" if target.read_only else "takes writes"
    print(
        f"{target.described.get('name')} over {target.client.binding}, {profile};",
        ", ".join(sorted(target.capabilities)),
    )
    came: list[Outcome] = []
    for line in report.lines(kept(outcomes(target, sections), came)):
        print(line, flush=True)
    if verbose:
        print("\nsentences that no check can test")
        print("\n".join(report.sentence_lines(tested=False)))
    print()
    for line in (*report.failed(came), report.counts(came)):
        print(line)
    return 1 if any(outcome.state is State.FAILED for outcome in came) else 0


def is_url(text: str) -> bool:
    """Return whether the text has a scheme of HTTP, and a host."""
    try:
        url = urlsplit(text)
        return url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:
        return False


def cannot_be_judged(why: str) -> int:
    """Print why no check can run; return the exit code."""
    print(f"The server cannot be judged: {why}\n\n0 passed, 1 failed, 0 skipped")
    return 1


def kept(stream: Iterable[Outcome], came: list[Outcome]) -> Iterator[Outcome]:
    """Yield the stream unchanged, and append its items to `came`."""
    for outcome in stream:
        came.append(outcome)
        yield outcome


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m a2m_router.conformance",
        description="Checks whether a server conforms to A2M 0.1. Use a test server: records are written and "
        "forgotten again, memory/consolidate is called, and the width of vectors may be fixed.",
    )
    server = parser.add_mutually_exclusive_group()
    server.add_argument("--http", metavar="URL", help="the server's endpoint")
    server.add_argument(
        "--stdio", nargs=argparse.REMAINDER, metavar="CMD", help="a server's command; put other options before it"
    )
    parser.add_argument("--token", help="sent as a bearer token with every request over HTTP")
    parser.add_argument("--other-token", metavar="T2", help="another principal's token, to test what it can see")
    parser.add_argument(
        "--only",
        action="append",
        choices=SECTIONS,
        metavar="SECTION",
        help=f"run only this section, one of {', '.join(SECTIONS)}; may be repeated",
    )
    parser.add_argument(
        "--timeout", type=float, default=20, help="seconds to wait for an answer (default: %(default)s)"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="also list the sentences that no check can test, and why"
    )
    parser.add_argument("--list", action="store_true", help="list every sentence with its checks, and run none")
    return parser


if __name__ == "__main__":
    sys.exit(main())
