"""The commands `a2m export` and `a2m import`: their files and streams, progress bars and final messages."""

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

# skipped records are reported one by one up to this number for each reason; all are counted
_EXAMPLES: Final = 10
_CHUNK: Final = 65_536


async def export(run: Running) -> int:
    """Write all records to a file or to stdout."""
    path: Path | None = run.options.file
    export = Export(run.asking, run.address.owner)
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
    """Write the header and all records with `write`, and return the number of records."""
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
    """Write the records of a file or of stdin to the server. Return FAILED if a record was skipped or is missing."""
    path: Path | None = run.options.file
    reported: Counter[str] = Counter()

    def say_skipped(line: Line, reason: str) -> None:
        kind = reason.partition(":")[0]
        reported[kind] += 1
        if reported[kind] <= _EXAMPLES:
            say(f"line {line.number} skipped: {reason}")

    into = Import(
        run.asking,
        owner=run.address.owner,
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
        say(f"{_counted(into)}; the import can be repeated, records that exist stay unchanged")
        raise
    counts = into.counts
    run.asking.last = msgspec.json.encode(counts)
    await run.show(lambda: _counted(into).encode() + b"\n")
    announced, read = into.header.records, counts.written + counts.already_there + counts.skipped.total()
    if announced is not None and read < announced:
        say(f"the file is incomplete: its header announces {announced:,} records, and it has {read:,}")
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
    """Return the counts of an import in words."""
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
    """Show a progress bar on stderr while the block runs, if stderr is a terminal.

    If data is written to stdout meanwhile (`beside_data`), there is a bar only if that is not a terminal, too. The
    yielded function takes the number of records done, and their total number or None.
    """
    if not sys.stderr.isatty() or (beside_data and sys.stdout.isatty()):
        yield lambda done, of: None
        return
    # imported here: only a terminal needs it
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def advance(done: int, of: int | None) -> None:
            bar.update(task, completed=done, total=of)

        yield advance
