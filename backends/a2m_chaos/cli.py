"""The command line of a2m-chaos: makes any A2M server misbehave, on a schedule or by chance with a seed."""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import anyio
import msgspec

from a2m_chaos.faults import KINDS, Behind, Front
from a2m_chaos.memory_files import CannotCarry, MemoryFiles
from a2m_chaos.plan import Plan, PlanError, defaults_of, files_of, read_plan
from a2m_chaos.running import Run, to_stderr
from a2m_router import __version__
from a2m_router.process.descriptors import open_missing_streams
from a2m_router.process.paths import path_argument
from a2m_router.process.stderr import unblocked_stderr
from a2m_router.protocol.client.child import CannotStart
from a2m_router.protocol.server.server import CannotListen
from a2m_router.protocol.server.serving import loopback

_DESCRIPTION: Final = """\
A proxy in front of an A2M server that injects faults: it forwards every message unchanged, and applies the faults of a
plan to some calls. It logs every fault to stderr. It serves stdin and stdout unless --http is given.
"""

_EXAMPLE: Final = """\
a plan:
  seed = 7
  counts = "faults.counts"       # keeps the counts over restarts; without it, each start counts from 0

  [[fault]]                      # the server dies at the fourth write, after it has written the record; once
  method = "memory/remember"
  after = 3
  times = 1
  do = "exit-after-work"

  [[fault]]                      # one answer in ten, on average, is 2 s late
  chance = 0.1
  do = "answer-late"
  wait = "2s"

  [[fault]]                      # as long as there is a file "full" beside the plan
  while = "full"
  do = "disk-full"

A fault concerns the calls of its `method` (without it, of all methods) that contain the text `having`. It skips the
first `after` of them, and then applies to every `every`-th, at most `times` times, with the probability `chance`.
`from` and `until` are times since the start; `while` names a file that must exist. If several faults apply to a call,
the first of them is used. --list shows all faults and their settings.
As a tier of a2m-router:  command = ["a2m-chaos", "--plan", "faults.toml", "--", "a2m-store", "notes.db"]
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    open_missing_streams()
    parser = _parser()
    given = sys.argv[1:] if arguments is None else list(arguments)
    # everything after the first -- belongs to the server's command
    own, command = (given[: given.index("--")], given[given.index("--") + 1 :]) if "--" in given else (given, [])
    options = parser.parse_args(own)
    if options.list:
        with suppress(BrokenPipeError):  # the reader may close the pipe early
            sys.stdout.write(_listed())
            sys.stdout.flush()
        return 0
    if bool(command) == (options.url is not None):
        parser.error("expected either a server's command after --, or --url with the address of a server")
    if options.plan is None:
        parser.error("the following argument is required: --plan (see --help for an example)")
    with unblocked_stderr():
        return _execute(options, command)


def _execute(options: argparse.Namespace, command: list[str]) -> int:
    """Read the plan, then serve. Return the exit code."""
    front: Front = "stdio" if options.http is None else "http"
    behind: Behind = "url" if options.url is not None else "command"
    try:
        plan = read_plan(options.plan, front=front, behind=behind)
        if options.seed is not None:
            plan = msgspec.structs.replace(plan, seed=options.seed)
        run = Run(plan, to_stderr)
    except PlanError as problem:
        print(f"a2m-chaos: {problem}", file=sys.stderr)
        return 1
    return _run(options, command, plan, run)


def _run(options: argparse.Namespace, command: list[str], plan: Plan, run: Run) -> int:
    code = 1
    try:
        # `_serve` imports only the binding it needs: a router restarts a tier often, and imports take time
        code = anyio.run(
            partial(_serve, options, command, plan, run), backend_options={"use_uvloop": sys.platform != "win32"}
        )
    except* (CannotStart, CannotListen, CannotCarry, ValueError) as problems:
        problem: BaseException = problems
        while isinstance(problem, BaseExceptionGroup):
            problem = problem.exceptions[0]
        print(f"a2m-chaos: {problem}", file=sys.stderr)
    return code


async def _serve(options: argparse.Namespace, command: list[str], plan: Plan, run: Run) -> int:
    memory = MemoryFiles(plan.folder, plan.memory, options.plan.stem, without=(options.plan, *files_of(plan)))
    if options.http is not None:
        from a2m_chaos import over_http

        host, port = options.http
        if options.url is not None:
            return await over_http.serve_url(options.url, host, port, run)
        return await over_http.serve_child(command, host, port, run, memory)
    from a2m_chaos import over_stdio

    if options.url is not None:
        return await over_stdio.serve_url(options.url, run)
    return await over_stdio.serve_child(command, run, memory)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="a2m-chaos",
        usage="%(prog)s --plan FILE [--seed N] [--http HOST:PORT] (--url URL | -- COMMAND...)\n       %(prog)s --list",
        description=_DESCRIPTION,
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--plan", type=path_argument, metavar="FILE", help="the faults, and when they apply: a TOML file, see below"
    )
    parser.add_argument("--seed", type=_seed, metavar="N", help="the seed of chance (default: the plan's, or 0)")
    parser.add_argument(
        "--http", type=loopback, metavar="HOST:PORT", help="serve HTTP at this address; port 0 selects a free one"
    )
    parser.add_argument("--url", metavar="URL", help="the address of a running server, instead of a command")
    parser.add_argument("--list", action="store_true", help="print all faults with their settings, and end")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _seed(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}") from None


def _listed() -> str:
    lines = []
    for kind in KINDS.values():
        notes = []
        if len(kind.over) == 1:
            notes.append("stdio only" if kind.over == ("stdio",) else "HTTP only")
        if kind.kills or kind.memory:
            notes.append("not with --url")
        if kind.memory:
            notes.append("needs memory = [...]")
        if kind.settings:
            notes.append(f"settings: {', '.join(defaults_of(kind))}" + (" over HTTP" if kind.kills else ""))
        lines.append(f"{kind.name:20}  {kind.sentence}" + (f" ({'; '.join(notes)})" if notes else ""))
    lines += ["", "Settings are shown with their defaults."]
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
