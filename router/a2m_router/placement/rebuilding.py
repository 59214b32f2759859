"""`a2m-router --rebuild`: a new catalog, made from what the tiers hold and from what can be read of the old catalog.

The program rebuilds and exits; the router is started afterwards as usual. (Some programs start the router with the same
arguments each time and speak to it on stdin and stdout. If --rebuild went on to serve, each start would rebuild.)

Rules:
- every managed tier must be up. Without the records of one, the router could assign a key or an id a second time, and
  accept writes that had to wait for it;
- the tiers are only read. Removals and moves are noted; the router carries them out after its start;
- the new catalog is made beside the old one and replaces it in one step (see `swap`). After a crash or a failure before
  that step, nothing has changed;
- no old file is deleted: the old files are renamed, and their new names are reported;
- what only the old catalog has is copied as far as it can be read (see `salvage`); the rest is reported. If the old
  catalog is older than the tiers, its notes remove nothing that a tier holds;
- the federation id comes from the native stores, each of which belongs to one federation: it is the old catalog's id if
  one of them has that, and the most frequent id otherwise. Without native stores it is the id of most records. The
  caller has to choose if two ids are equally frequent, or if the old catalog's id is among them but not the most
  frequent.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import msgspec
from msgspec import UNSET

from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.entries import Stray
from a2m_router.catalog.rebuild import swap
from a2m_router.catalog.rebuild.salvage import Salvage, TakenOver
from a2m_router.config.settings import Settings, Tier
from a2m_router.placement.core import core_of
from a2m_router.placement.recovery import Recovery
from a2m_router.placement.scanning import Intake, Scanner
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.ranking.policy import strength
from a2m_router.storage.database import locked, real
from a2m_router.tiers.answers import Written
from a2m_router.tiers.gateway import CannotList, TierGateway
from a2m_router.tiers.lifting import Origin
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mode import Modes, mode_of
from a2m_router.tiers.profile import CannotServe

# How long the rebuild waits for tiers to come up.
_GREETING_SECONDS: Final = 30.0

# Seconds between two progress lines if there is no terminal for a progress bar.
_LINE_SECONDS: Final = 5.0

# Called for each page of a scan: the tier, the number of records read, and the total if it is known.
Watch = Callable[[str, int, int | None], None]

log = logging.getLogger(__name__)


class ScanResult(msgspec.Struct, frozen=True):
    """The result of the scan of one tier, in records.

    `copies`: second copies of records that live elsewhere. `unwanted`: copies of forgotten or replaced records.
    `quarantined`: records that stay where they are, outside the catalog: others have their ids or keys.
    """

    tier: str
    read: int
    adopted: int
    copies: int
    unwanted: int
    quarantined: int


class Rebuilt(msgspec.Struct, frozen=True):
    """A new catalog in place: its sources, and the new names of the old files (`aside`).

    `warnings`: sentences about what could not be copied from the old catalog.
    """

    tiers: list[ScanResult]
    taken: TakenOver
    redone: int
    warnings: list[str]
    aside: list[Path]
    missing: int  # records that the old catalog had and that no tier holds


async def rebuild(
    settings: Settings,
    links: Mapping[str, Link],
    watch: Watch,
    *,
    adopt: bool = False,
    federation: str | None = None,
) -> Rebuilt:
    """Rebuild the catalog of `settings` and put it in place.

    Args:
        links: a link for each tier, by its name, not started yet. Only the links of managed tiers are started.
        adopt: accept another store behind a tier than the old catalog has noted.
        federation: the federation id to use if the tiers and the old catalog leave a choice.

    Raises:
        CannotServe: a tier is down or cannot be part of the federation.
        InUse: a router has the file open.
        DatabaseError: the file belongs to another program.
        OSError: the disk failed.

    After an exception nothing has changed.
    """
    path = real(settings.state)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with locked(path, swap.HOLDER):
        swap.finish(path)  # an earlier rebuild may have stopped after its commit
        swap.discard(path)
        try:
            rebuilt = await _made(settings, links, watch, adopt=adopt, federation=federation)
        except BaseException:
            swap.discard(path)  # it may be why the disk is full
            raise
        swap.commit(path)
        return msgspec.structs.replace(rebuilt, aside=swap.finish(path))


async def _made(
    settings: Settings, links: Mapping[str, Link], watch: Watch, *, adopt: bool, federation: str | None
) -> Rebuilt:
    """Make the new catalog, complete and closed, beside the old one."""
    with closing(Salvage(settings.state)) as old:
        path = swap.rebuilding(settings.state)
        with closing(Catalog(path, settings.managed, strength)) as catalog:
            taken, read = await _scanned(settings, links, catalog, old, watch, adopt=adopt, federation=federation)
            redone = 0
            for tier, draft in taken.redo:
                if catalog.restore(tier, draft):
                    redone += 1
                else:
                    old.warnings.append(
                        f"{tier}: pending write of {draft.id!r} left out: the record is forgotten or newer"
                    )
            found = [_scan_result(catalog, tier.name, read[tier.name]) for tier in settings.managed]
            return Rebuilt(found, taken, redone, old.warnings, [], catalog.earned.count())


async def _scanned(
    settings: Settings,
    links: Mapping[str, Link],
    catalog: Catalog,
    old: Salvage,
    watch: Watch,
    *,
    adopt: bool,
    federation: str | None,
) -> tuple[TakenOver, dict[str, int]]:
    """Add all managed tiers, and what only the old catalog has. Return the latter, and the records read by tier."""
    read: dict[str, int] = {}

    def seen(tier: str, count: int, of: int | None) -> None:
        read[tier] = count
        watch(tier, count, of)

    managed = {tier.name: links[tier.name] for tier in settings.managed}
    modes = Modes(settings.tiers, links, catalog.queries.lifting)
    gateway = TierGateway(links, modes, settings.limits.max_message, catalog.tiers.note_metadata, catalog.lineage)
    core = core_of(catalog, gateway, settings.managed, _nothing_is_left_open)
    scanner = Scanner(settings, core, Intake(adopt=adopt, watch=seen, only_reads=True))
    recovery = Recovery(settings, core, modes, scanner)
    async with anyio.create_task_group() as connections:
        for link in managed.values():
            connections.start_soon(link.run)
        await _all_up(managed)
        origins = await _origins(settings, links)
        catalog.lineage.set_federation(
            _whose(settings, origins, old, adopt=adopt, chosen=federation) or catalog.lineage.federation
        )
        taken = catalog.take_over(old, is_behind=_take_origins(settings, origins, catalog, old))
        profiles = []
        for tier in settings.managed:
            profile = managed[tier.name].profile
            assert profile is not None
            recovery.check(tier, profile)
            profiles.append((tier, profile))
        recovery.agree_on_metric(profiles)
        for tier, _ in profiles:
            await _welcome(recovery, tier)  # this compares the tier with those before it: two may lead to one store
        connections.cancel_scope.cancel()
    return taken, {tier.name: read.get(tier.name, 0) for tier in settings.managed}


class _Origins(msgspec.Struct, frozen=True):
    """How many records each federation and start of a router has written: in native stores, and at lifted servers."""

    stores: Counter[Origin]
    records: Counter[Origin]

    @property
    def all(self) -> Counter[Origin]:
        return self.stores + self.records


async def _origins(settings: Settings, links: Mapping[str, Link]) -> _Origins:
    """Return who has written the records that the tiers hold."""
    found = _Origins(Counter(), Counter())
    reader = TierGateway(links, Modes(settings.tiers, links), settings.limits.max_message)
    for tier in settings.managed:
        profile = links[tier.name].profile
        assert profile is not None
        try:
            if mode_of(tier, profile).native:
                epoch = None if profile.store.epoch is UNSET else profile.store.epoch
                # a store without records has a federation id, too
                found.stores[Origin(profile.store.federation, epoch)] += 1 + (profile.store.records or 0)
            else:
                found.records.update(await _origins_at(tier, reader))
        except (TierDown, A2MError) as problem:
            raise CannotServe(f"tiers.{tier.name}: what it holds could not be read: {problem}") from None
    return found


async def _origins_at(tier: Tier, reader: TierGateway) -> Counter[Origin]:
    """Return who has written how many of the records that a lifted server holds."""
    written: list[Written] = []
    try:
        async with aclosing(reader.everything(tier.name, written)) as pages:
            async for _ in pages:
                pass
    except CannotList:
        return Counter()  # the scan of its records reports it
    return Counter(origin for _, origin in written)


def _whose(settings: Settings, origins: _Origins, old: Salvage, *, adopt: bool, chosen: str | None) -> str | None:
    """Return the federation id of the records, by this module's rules; None if no record has one.

    Raises:
        CannotServe: the caller has to choose an id and has not, or has chosen one that no record has.
    """
    before, known, adopted = old.federation(), {None, *old.epochs()}, set(old.adopted())

    def bearing(met: Counter[Origin]) -> Counter[str]:
        counts = Counter[str]()
        for origin, count in met.items():
            # an adopted record keeps the id of its earlier federation
            own = before is not None and origin.federation in adopted and origin.epoch in known
            federation = before if own else origin.federation
            if federation is not None:
                counts[federation] += count
        return counts

    stores = bearing(origins.stores)
    counts = stores or bearing(origins.records)
    if chosen is not None:
        if chosen not in counts and chosen != before:
            borne = _counted(counts) or "no record has any"
            raise CannotServe(
                f"--federation: expected an id that records have, or the catalog's, got {chosen}: {borne}"
            )
        return chosen
    if before in stores or not counts:
        return before
    most = max(counts.values())
    first = sorted(id for id, count in counts.items() if count == most)
    if first == [before] or (len(first) == 1 and before not in counts):
        return first[0]
    if adopt:
        return before if before in counts else first[0]
    is_of = f"; {before} is the id in {settings.state}" if before in counts else ""
    raise CannotServe(
        f"the tiers hold records of several federations: {_counted(counts)}{is_of}. Choose this federation's id with "
        "--rebuild --federation ID; records with other ids are left out. Or adopt all records with --rebuild --adopt, "
        "if no other router writes there any more"
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} have the id {federation}" for federation, count in counts.most_common())


def _take_origins(settings: Settings, origins: _Origins, catalog: Catalog, old: Salvage) -> bool:
    """Note all epochs in which our records were written, and the adopted federations.

    Return whether one of these epochs is missing in the old catalog.
    """
    known = old.epochs()
    catalog.lineage.take_origins(known, old.adopted())
    ours = {origin.epoch for origin in origins.all if catalog.lineage.is_ours(origin.federation, origin.epoch)}
    later = {epoch for epoch in ours if epoch is not None}.difference(known)
    catalog.lineage.take_origins(sorted(later))
    # if no epoch of a damaged catalog can be read, its age is unknown
    is_behind = bool(later) and (bool(known) or old.damage is None)
    if is_behind and old.is_there:
        old.warnings.append(
            f"{settings.state}: older than what the tiers hold; its tombstones and its notes of unwanted or unfinished "
            "copies are left out where a tier holds the record"
        )
    return is_behind


async def _all_up(links: Mapping[str, Link]) -> None:
    with anyio.move_on_after(_GREETING_SECONDS):
        for link in links.values():
            await link.wait_greeted()
    down = [name for name, link in links.items() if link.profile is None]
    if down:
        reasons = [f"\ntiers.{name}: {links[name].reason or 'it does not answer'}" for name in down]
        raise CannotServe(f"a rebuild needs all tiers, and the records of these would be missing:{''.join(reasons)}")


async def _welcome(recovery: Recovery, tier: Tier) -> None:
    try:
        look = await recovery.look(tier)
        await recovery.admit(tier, look)
        await recovery.welcome(tier, look)
    except (TierDown, A2MError) as problem:
        raise CannotServe(f"tiers.{tier.name}: what it holds could not be read: {problem}") from None


def _scan_result(catalog: Catalog, tier: str, read: int) -> ScanResult:
    noted = catalog.strays.counts(tier)
    return ScanResult(
        tier,
        read=read,
        adopted=catalog.records.count(tier),
        copies=noted[Stray.SUPERSEDED] + noted[Stray.EQUAL],
        unwanted=noted[Stray.UNWANTED],
        quarantined=noted[Stray.QUARANTINED],
    )


def _nothing_is_left_open(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    raise AssertionError("a rebuild changes nothing in a tier")


@contextmanager
def progress() -> Iterator[Watch]:
    """Show the progress of the scans on stderr: a bar for each tier on a terminal, otherwise a line now and then."""
    if sys.stderr.isatty():
        # imported only where it is shown
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

        bars: dict[str, TaskID] = {}
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:

            def advance(tier: str, read: int, of: int | None) -> None:
                if tier not in bars:
                    bars[tier] = bar.add_task(tier, total=of)
                bar.update(bars[tier], completed=read, total=of)

            yield advance
        return
    logged_at = time.monotonic()

    def log_line(tier: str, read: int, of: int | None) -> None:
        nonlocal logged_at
        if time.monotonic() - logged_at >= _LINE_SECONDS:
            logged_at = time.monotonic()
            log.info("tier=%s records read: %s", tier, f"{read:,}" if of is None else f"{read:,} of {of:,}")

    yield log_line


def print_rebuilt(rebuilt: Rebuilt, settings: Settings) -> None:
    """Print to stdout what each tier holds, what came from the old catalog, and what is lost with it."""
    from a2m_router.process.drawing import print_report

    numbers = [(each.read, each.adopted, each.copies, each.unwanted, each.quarantined) for each in rebuilt.tiers]
    counts = [[f"{number:,}" for number in column] for column in zip(*numbers, strict=True)]
    columns = [("tier", [each.tier for each in rebuilt.tiers]), *zip(_COUNTED, counts, strict=True)]
    title = f"{settings.name}: {settings.state}, rebuilt"
    print_report(title, columns, _lines(rebuilt), right=_COUNTED)


_COUNTED: Final = ("found", "adopted", "second copies", "forgotten or replaced", "quarantined")


def _lines(rebuilt: Rebuilt) -> Iterator[str]:
    taken = rebuilt.taken
    yield (
        f"from the old catalog: accesses and salience of {taken.earned:,} records, {taken.forgotten:,} tombstones, "
        f"{taken.unwanted:,} notes of copies to remove, {taken.interrupted:,} unfinished writes and "
        f"{rebuilt.redone:,} pending writes"
    )
    yield from rebuilt.warnings
    if rebuilt.warnings:
        yield (
            "what could not be read is lost with it: accesses and salience count anew, and records that were forgotten "
            "or replaced while their tier was down may be there again"
        )
    if rebuilt.missing:
        yield f"{rebuilt.missing:,} records of the old catalog are in no tier"
    quarantined = sum(each.quarantined for each in rebuilt.tiers)
    if quarantined:
        yield (
            f"{quarantined:,} records are quarantined, since others have their ids or keys; "
            "a2m-router --check names them"
        )
    for path in rebuilt.aside:
        # SQLite's shared-memory file and an empty log hold nothing to keep
        if not path.name.endswith("-shm") and path.stat().st_size > 0:
            yield f"the old file is kept: {path}"
