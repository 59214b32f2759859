"""`a2m-router --rebuild`: a new catalog, made from what the tiers hold and from what can be read of the old one.

It does its work and ends; the router is started afterwards as usual. (It may be started by a program that speaks to it
on stdin and stdout, with the same arguments each time: a rebuild that went on to serve would be one at every start.)

Rules:
- every managed tier must be up. Without one, what it holds would not be known: a key or an id of its own would be given
  once more, and a write that should have waited for it would go through;
- the tiers are only read. What is to be removed or moved is noted, and done by the router when it has started;
- the new catalog is made beside the old one and takes its place in one step, or not at all (see `exchanging`). Killed
  in the middle, or failed, nothing has changed;
- no old file is removed: they go aside, and their new names are told;
- what only the old catalog knew is taken from it as far as it can be read (see `salvage`), and what cannot is told. If
  it is older than the tiers, nothing that a tier holds is removed on its account;
- whose records these are is what native stores bear, each of which is one federation's: what the old catalog says, if
  one of them bears that, else what most of them do; without any, what most records bear. Where that is not the old
  catalog's id, but some bear that, too, or as many bear one as another, nobody but the caller can tell.
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

# How often a line says how far it is, where there is no terminal to draw a bar on.
_LINE_SECONDS: Final = 5.0

# Told of each page of a scan: the tier, how many records were read, and of how many if that is known.
Watch = Callable[[str, int, int | None], None]

log = logging.getLogger(__name__)


class Found(msgspec.Struct, frozen=True):
    """What a scan of one tier came to. `copies`: of records that live elsewhere; `unwanted`: of what was forgotten or
    replaced; `aside`: records whose owners' keys have others."""

    tier: str
    read: int
    adopted: int
    copies: int
    unwanted: int
    aside: int


class Rebuilt(msgspec.Struct, frozen=True):
    """A new catalog, in its place: what it was made from, and where the old files are. `told`: what could not be taken
    over, in sentences."""

    tiers: list[Found]
    taken: TakenOver
    redone: int
    told: list[str]
    aside: list[Path]
    missing: int  # records that the old catalog knew and that no tier holds


async def rebuild(
    settings: Settings,
    links: Mapping[str, Link],
    watch: Watch,
    *,
    adopt: bool = False,
    federation: str | None = None,
) -> Rebuilt:
    """Makes the catalog of `settings` anew and puts it in its place.

    Args:
        links: one for each tier, by its name; not started yet. Only those of managed tiers are.
        adopt: another store behind a tier than the old catalog says is taken as it is.
        federation: whose records these are, where those that the tiers hold, and the old catalog, do not tell.

    Raises CannotServe for a tier that is down or cannot be part of the federation, InUse while a router has the file,
    DatabaseError for another program's file, OSError for a disk that fails; nothing has changed then.
    """
    path = real(settings.state)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    with locked(path, swap.HOLDER):
        swap.finish(path)  # an earlier one may have been cut off after it was done
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
    """The new catalog, complete and closed, beside the old one."""
    with closing(Salvage(settings.state)) as old:
        path = swap.rebuilding(settings.state)
        with closing(Catalog(path, settings.managed, strength)) as catalog:
            taken, read = await _scanned(settings, links, catalog, old, watch, adopt=adopt, federation=federation)
            redone = 0
            for tier, draft in taken.redo:
                if catalog.restore(tier, draft):
                    redone += 1
                else:
                    old.told.append(f"{tier}: what was to replace {draft.id!r} is left out: it is forgotten or older")
            found = [_found(catalog, tier.name, read[tier.name]) for tier in settings.managed]
            return Rebuilt(found, taken, redone, old.told, [], catalog.earned.count())


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
    """Take all managed tiers into the account, and what only the old catalog knows; returns that, and how many records
    each tier holds."""
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
            await _welcome(recovery, tier)  # checked once more, against those before it: two may lead to one store
        connections.cancel_scope.cancel()
    return taken, {tier.name: read.get(tier.name, 0) for tier in settings.managed}


class _Origins(msgspec.Struct, frozen=True):
    """Who has written how much of what the tiers hold: of native stores, and of records at lesser servers."""

    stores: Counter[Origin]
    records: Counter[Origin]

    @property
    def all(self) -> Counter[Origin]:
        return self.stores + self.records


async def _origins(settings: Settings, links: Mapping[str, Link]) -> _Origins:
    """Find out who has written what the tiers hold."""
    found = _Origins(Counter(), Counter())
    reader = TierGateway(links, Modes(settings.tiers, links), settings.limits.max_message)
    for tier in settings.managed:
        profile = links[tier.name].profile
        assert profile is not None
        try:
            if mode_of(tier, profile).native:
                epoch = None if profile.store.epoch is UNSET else profile.store.epoch
                # one that holds nothing says whose it is all the same
                found.stores[Origin(profile.store.federation, epoch)] += 1 + (profile.store.records or 0)
            else:
                found.records.update(await _origins_at(tier, reader))
        except (TierDown, A2MError) as problem:
            raise CannotServe(f"tiers.{tier.name}: what it holds could not be read: {problem}") from None
    return found


async def _origins_at(tier: Tier, reader: TierGateway) -> Counter[Origin]:
    """Who has written how many of the records that a lesser server holds."""
    written: list[Written] = []
    try:
        async with aclosing(reader.everything(tier.name, written)) as pages:
            async for _ in pages:
                pass
    except CannotList:
        return Counter()  # that is said when it is read for its records
    return Counter(origin for _, origin in written)


def _whose(settings: Settings, origins: _Origins, old: Salvage, *, adopt: bool, chosen: str | None) -> str | None:
    """The id of the federation whose records these are; None where nothing bears any. See this module's rules.

    Raises CannotServe where the caller has to choose, and has not, or has chosen what nothing bears.
    """
    before, known, adopted = old.federation(), {None, *old.epochs()}, set(old.adopted())

    def bearing(met: Counter[Origin]) -> Counter[str]:
        counts = Counter[str]()
        for origin, count in met.items():
            # what was adopted bears another's id for good
            own = before is not None and origin.federation in adopted and origin.epoch in known
            federation = before if own else origin.federation
            if federation is not None:
                counts[federation] += count
        return counts

    stores = bearing(origins.stores)
    counts = stores or bearing(origins.records)
    if chosen is not None:
        if chosen not in counts and chosen != before:
            borne = _counted(counts) or "no record bears any"
            raise CannotServe(
                f"--federation: expected an id that records bear, or the catalog's, got {chosen}: {borne}"
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
    is_of = f"; {before} is what {settings.state} says" if before in counts else ""
    raise CannotServe(
        f"whose records the tiers hold cannot be told: {_counted(counts)}{is_of}. Say which id is this federation's "
        "with --rebuild --federation ID, and what bears another one stays out; or take all of them, with --rebuild "
        "--adopt, when no other router writes there any more"
    )


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} bear the id {federation}" for federation, count in counts.most_common())


def _take_origins(settings: Settings, origins: _Origins, catalog: Catalog, old: Salvage) -> bool:
    """All starts of the router in which what is ours was written are known from now on, and so is what was adopted.
    Returns whether there is a start that the old catalog did not know."""
    known = old.epochs()
    catalog.lineage.take_origins(known, old.adopted())
    ours = {origin.epoch for origin in origins.all if catalog.lineage.is_ours(origin.federation, origin.epoch)}
    later = {epoch for epoch in ours if epoch is not None}.difference(known)
    catalog.lineage.take_origins(sorted(later))
    # of a damaged one of which no start can be read nobody can tell
    is_behind = bool(later) and (bool(known) or old.damage is None)
    if is_behind and old.is_there:
        old.told.append(
            f"{settings.state}: older than what the tiers hold; what it knows as forgotten, as a copy to be removed or "
            "as being written is left out where a tier holds it"
        )
    return is_behind


async def _all_up(links: Mapping[str, Link]) -> None:
    with anyio.move_on_after(_GREETING_SECONDS):
        for link in links.values():
            await link.wait_greeted()
    down = [name for name, link in links.items() if link.profile is None]
    if down:
        reasons = [f"\ntiers.{name}: {links[name].reason or 'it does not answer'}" for name in down]
        raise CannotServe(
            f"a catalog is made anew from all tiers, and what these hold would be missing:{''.join(reasons)}"
        )


async def _welcome(recovery: Recovery, tier: Tier) -> None:
    try:
        look = await recovery.look(tier)
        await recovery.admit(tier, look)
        await recovery.welcome(tier, look)
    except (TierDown, A2MError) as problem:
        raise CannotServe(f"tiers.{tier.name}: what it holds could not be read: {problem}") from None


def _found(catalog: Catalog, tier: str, read: int) -> Found:
    noted = catalog.strays.counts(tier)
    return Found(
        tier,
        read=read,
        adopted=catalog.records.count(tier),
        copies=noted[Stray.SUPERSEDED] + noted[Stray.EQUAL],
        unwanted=noted[Stray.UNWANTED],
        aside=noted[Stray.ASIDE],
    )


def _nothing_is_left_open(function: Callable[[], Coroutine[Any, Any, None]]) -> None:
    raise AssertionError("a rebuild changes nothing in a tier")


@contextmanager
def progress() -> Iterator[Watch]:
    """Shows on stderr how far the scans are: a bar for each tier on a terminal, else a line every so often."""
    if sys.stderr.isatty():
        # loaded where somebody sees it
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
    told_at = time.monotonic()

    def tell(tier: str, read: int, of: int | None) -> None:
        nonlocal told_at
        if time.monotonic() - told_at >= _LINE_SECONDS:
            told_at = time.monotonic()
            log.info("%s: %s records read", tier, f"{read:,}" if of is None else f"{read:,} of {of:,}")

    yield tell


def print_rebuilt(rebuilt: Rebuilt, settings: Settings) -> None:
    """Prints to stdout what was found in each tier, what came from the old catalog, and what is lost with it."""
    from a2m_router.process.drawing import print_report

    numbers = [(each.read, each.adopted, each.copies, each.unwanted, each.aside) for each in rebuilt.tiers]
    counts = [[f"{number:,}" for number in column] for column in zip(*numbers, strict=True)]
    columns = [("tier", [each.tier for each in rebuilt.tiers]), *zip(_COUNTED, counts, strict=True)]
    title = f"{settings.name}: {settings.state}, made anew"
    print_report(title, columns, _lines(rebuilt), right=_COUNTED)


_COUNTED: Final = ("found", "taken in", "second copies", "forgotten or replaced", "set aside")


def _lines(rebuilt: Rebuilt) -> Iterator[str]:
    taken = rebuilt.taken
    yield (
        f"from the old catalog: what {taken.earned:,} records have earned, {taken.forgotten:,} notes of what was "
        f"forgotten, {taken.unwanted:,} of copies to be removed, {taken.interrupted:,} records and {rebuilt.redone:,} "
        "replacements that were being written"
    )
    yield from rebuilt.told
    if rebuilt.told:
        yield (
            "what could not be read is lost with it: accesses and salience count anew, what was forgotten while its "
            "tier was down may be there again, and so may what was replaced"
        )
    if rebuilt.missing:
        yield f"{rebuilt.missing:,} records that the old catalog knew are in no tier"
    aside = sum(each.aside for each in rebuilt.tiers)
    if aside:
        yield f"{aside:,} records are set aside, since others are in their place; a2m-router --check names them"
    for path in rebuilt.aside:
        # an index that SQLite keeps in memory, and an empty log, say nothing to anybody
        if not path.name.endswith("-shm") and path.stat().st_size > 0:
            yield f"the old file is kept: {path}"
