"""`a2m export` and `a2m import` as commands: files and streams, progress, and what is said at the end."""

import sys
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import BinaryIO, Final

import msgspec
from msgspec import Raw

from a2m_router.command.exporting import Export, written_whole
from a2m_router.command.importing import Import, Line, Numbered
from a2m_router.command.running import DONE, FAILED, Running, say

# of skipped records so many are told one by one for each reason
_EXAMPLES: Final = 10
_CHUNK: Final = 65_536


async def export(run: Running) -> int:
    """Writes everything to a file or to stdout."""
    path: Path | None = run.options.file
    export = Export(run.asking, run.way.owner)
    await export.open()
    if path is None or str(path) == "-":
        written = await _copied(export, run.streams.write)
    else:
        with written_whole(path) as file:
            written = await _copied(export, _into(file))
    if sys.stderr.isatty():
        say(f"{written:,} records exported")
    return DONE


async def _copied(export: Export, write: Callable[[bytes], Awaitable[None]]) -> int:
    """How many records were written."""
    written = 0
    with _progress(export.header.records, beside_data=True) as advance:

        async def take(records: list[Raw]) -> None:
            nonlocal written
            if records:
                await write(b"\n".join(map(bytes, records)) + b"\n")
            written += len(records)
            advance(written, None)

        await write(msgspec.json.encode(export.header) + b"\n")
        await export.copy(take)
    return written


async def import_(run: Running) -> int:
    """Writes what a file or stdin holds to the server. FAILED if something was skipped."""
    path: Path | None = run.options.file
    told: Counter[str] = Counter()

    def say_skipped(line: Line, reason: str) -> None:
        kind = reason.partition(":")[0]
        told[kind] += 1
        if told[kind] <= _EXAMPLES:
            say(f"line {line.number} is skipped: {reason}")

    into = Import(
        run.asking,
        owner=run.way.owner,
        drop=run.options.drop,
        told_by_token=run.over_http,
        on_skipped=say_skipped,
    )
    await into.open()
    try:
        if path is None or str(path) == "-":
            await _import_from(into, run.streams.chunks())
        else:
            with path.open("rb") as file:
                await _import_from(into, _chunks(file))
    except Exception:
        say(f"{_counted(into)}; it can be repeated, what is there is left alone")
        raise
    counts = into.counts
    run.asking.last = msgspec.json.encode(counts)
    await run.show(lambda: _counted(into).encode() + b"\n")
    announced, came = into.header.records, counts.written + counts.already_there + counts.skipped.total()
    if announced is not None and came < announced:
        say(f"the file says that it has {announced:,} records, and {came:,} came: it is not whole")
        return FAILED
    return FAILED if counts.skipped else DONE


async def _import_from(into: Import, chunks: AsyncGenerator[bytes, None]) -> None:
    lines = Numbered()
    counts = into.counts
    with _progress(None, beside_data=False) as advance:

        async def take(ended: list[tuple[int, bytes]]) -> None:
            for number, text in ended:
                if await into.take(number, text):
                    done = counts.written + counts.already_there + counts.skipped.total()
                    advance(done, into.header.records)

        async with aclosing(chunks):
            async for chunk in chunks:
                await take(lines.feed(chunk))
        await take(lines.end())
        await into.finish()


def _counted(into: Import) -> str:
    counts = into.counts
    reasons = [f"{number:,} skipped ({reason})" for reason, number in counts.skipped.items()]
    return ", ".join([f"{counts.written:,} written", f"{counts.already_there:,} already there", *reasons])


async def _chunks(file: BinaryIO) -> AsyncGenerator[bytes, None]:
    while chunk := file.read(_CHUNK):
        yield chunk


def _into(file: BinaryIO) -> Callable[[bytes], Awaitable[None]]:
    async def write(data: bytes) -> None:
        file.write(data)

    return write


@contextmanager
def _progress(total: int | None, *, beside_data: bool) -> Iterator[Callable[[int, int | None], None]]:
    """A bar on stderr, where that is a terminal, and what goes to stdout `beside` it does not go there, too. What is
    yielded takes how many are done, and of how many if that has become known."""
    if not sys.stderr.isatty() or (beside_data and sys.stdout.isatty()):
        yield lambda done, of: None
        return
    # loaded where somebody sees it
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(done: int, of: int | None) -> None:
            bar.update(task, completed=done, total=of)

        yield advance
