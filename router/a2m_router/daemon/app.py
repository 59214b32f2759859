"""One federation, from its parts: builds the objects, owns the tasks, recovers, and ends in order.

What is started last ends first: a door stops before this is left; then the background work, which finishes the move it
is at; then the links, which let their children go; then the catalog is closed.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import anyio
import anyio.abc

from a2m_router.backup.backing_up import Backups
from a2m_router.catalog.catalog import Catalog, Torn
from a2m_router.config.settings import Settings
from a2m_router.methods.backing_up import BackingUp
from a2m_router.methods.core import Core, scope_of
from a2m_router.methods.describing import CAPABILITIES, Describing
from a2m_router.methods.forgetting import Forgetting
from a2m_router.methods.reading import Readings
from a2m_router.methods.summaries import Summaries
from a2m_router.methods.table import table
from a2m_router.methods.upkeep import Upkeep
from a2m_router.methods.writing import Writing
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.distilling import Distilling
from a2m_router.placement.moves import Moves
from a2m_router.placement.passes import Passes
from a2m_router.placement.planning import Planner, new_id
from a2m_router.placement.recovery import Recovery
from a2m_router.placement.redoing import Redoing
from a2m_router.placement.settling import Settling
from a2m_router.placement.sweeping import MAY_STILL_LAND, Sweeper
from a2m_router.placement.writing import Writes
from a2m_router.process.budget import budget
from a2m_router.process.repeats import Repeats
from a2m_router.protocol.client.http_client import SETTLING
from a2m_router.protocol.server.event_log import EventLog
from a2m_router.protocol.server.server import Dispatcher, Gate
from a2m_router.protocol.server.watching import Watching
from a2m_router.protocol.wire.errors import A2MError
from a2m_router.ranking.policy import strength
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import Homes
from a2m_router.reading.recalls import Recalls
from a2m_router.reading.resolving import Resolving
from a2m_router.reading.timelines import Timelines
from a2m_router.summaries.model import Model, connect_model
from a2m_router.summaries.prompting import Prompting
from a2m_router.summaries.summarizing import Extracts, ModelSummaries, Summarizer
from a2m_router.tiers.copies import Copies, OfAnother, Untrusted
from a2m_router.tiers.link import Link, TierDown
from a2m_router.tiers.mounts import Mounts
from a2m_router.tiers.profile import CannotServe

log = logging.getLogger(__name__)

# How long the start waits for tiers; those that are not up by then join later.
_START_SECONDS: Final = 15.0

# How long of that it waits until all were looked at, before it changes any; a look that fails is tried again.
_LOOK_SECONDS: Final = 10.0

# How often notes of what was forgotten are looked through, and how long a failed welcome waits.
_HOUSEKEEPING_SECONDS: Final = 3600.0
_WELCOME_SECONDS: Final = 2.0

# How long a tier whose answers cannot be trusted is left alone before it is tried again.
_DISTRUST_SECONDS: Final = 60.0

# How long background work rests after a fault.
_RESTART_SECONDS: Final = 5.0


# How long calls under way may take once the router is told to end; then their tiers are waited for no more, and a
# moment later they are answered with what is known of them. Both are within what a door waits for its last answers.
_LAST_CALLS_SECONDS: Final = 7.0
_LAST_WORDS_SECONDS: Final = 1.0


def now() -> int:
    """The time, in milliseconds since 1970."""
    return time.time_ns() // 1_000_000


class Federation:
    """A running federation. `answer` serves any binding; the rest is for those who watch or wait."""

    def __init__(
        self,
        settings: Settings,
        catalog: Catalog,
        links: Mapping[str, Link],
        tasks: anyio.abc.TaskGroup,
        clock: Callable[[], int],
        summarizer: Summarizer,
        model: Model | None,
        *,
        adopt: bool,
        threads: bool,
    ) -> None:
        self.settings = settings
        self.catalog = catalog
        self.links = links
        self._tasks = tasks
        self._clock = clock
        self.mounts = mounts = Mounts(settings.tiers)
        copies = Copies(links, mounts, settings.limits.max_message, catalog.note_metadata, catalog)
        settling = Settling(catalog, copies, self._spawn)
        self.sweeper = Sweeper(catalog, copies, settling, mounts, settings.managed)
        self._redoing = Redoing(catalog, copies, self.sweeper, self._spawn, settings.managed)
        self.moves = Moves(catalog, copies, self.sweeper, settling)
        events = EventLog(settings.events.retained)
        distilling = Distilling(
            catalog,
            copies,
            self.sweeper,
            settling,
            self.moves,
            summarizer,
            settings.limits.max_content_length,
            new_id,
            clock,
        )
        self.passes = Passes(settings, catalog, self.moves, distilling, self.sweeper, events.append, clock)
        self.recovery = Recovery(
            settings, catalog, copies, self.sweeper, mounts, events.break_off, adopt=adopt, gather=self._gather
        )
        planner = Planner(settings, catalog, copies, mounts, clock)
        delivering = Delivering(catalog, copies, self.sweeper, self.moves)
        writes = Writes(catalog, planner, delivering, settling, self._redoing)
        fan_out = FanOut(catalog, copies, mounts)
        homes = Homes(catalog, copies, mounts)
        core = Core(settings, catalog, copies, mounts, clock, events.append, self.passes.wake)
        prompting = Prompting(model, settings.summarizer.max_input if settings.summarizer else 0)
        readings = Readings(
            core,
            Recalls(settings, catalog, fan_out, homes),
            Timelines(catalog, fan_out, homes, mounts),
            prompting,
        )
        writing = Writing(core, writes)
        backups = Backups(settings, catalog, links, self._spawn, clock, threads=threads)
        describing = Describing(core, summarizer, prompting, backup=backups.offered)
        families = (
            describing,
            writing,
            Forgetting(core, Resolving(catalog, fan_out), self.sweeper),
            readings,
            Upkeep(core, self.moves, self.passes),
            Summaries(core, readings, writing, summarizer),
            Watching(events, lambda caller, owner: core.sight(scope_of(caller, owner))),
            BackingUp(backups),
        )
        self.describe = describing.describe
        self.methods = table(families, catalog, settings.serve.timeout)
        self.answer = Gate(Dispatcher(self.methods, CAPABILITIES), settings.serve.max_requests)
        self._ending = False
        self._welcoming: dict[str, anyio.CancelScope] = {}
        self._refusing: list[CannotServe] = []  # what tiers turned out to be that refuses the start
        self._looked: dict[str, anyio.Event] = {name: anyio.Event() for name in links}
        self._begun = anyio.Event()  # no tier is changed before: the start may be refused
        self._welcomed: dict[str, anyio.Event] = {name: anyio.Event() for name in links}
        self._taken_in: set[str] = set()

    @property
    def problems(self) -> dict[str, str]:
        """Why tiers that are up take no part, by their names."""
        return {name: link.obstacle for name, link in self.links.items() if link.obstacle is not None}

    async def start(self) -> None:
        """Recover, and wait until every tier has joined, or has shown that it does not come up by itself.

        Raises CannotServe when a tier that is up cannot be part of the federation.
        """
        self.catalog.begin_recovery()
        with anyio.move_on_after(_START_SECONDS):
            for link in self.links.values():
                await link.wait_greeted()
        profiles = []
        problems: list[CannotServe] = []
        for tier in self.settings.tiers:
            profile = self.links[tier.name].profile
            if profile is not None:
                if not tier.mount:
                    profiles.append((tier, profile))
                try:
                    self.recovery.check(tier, profile)
                except CannotServe as problem:
                    problems.append(problem)
        _refuse(problems)
        for tier in self.settings.managed:
            # of a tier's own process nothing is left that could land; a power cut may have taken the note of what could
            if tier.url is not None and (not self.catalog.ended_well or self.catalog.has_notes(tier.name)):
                self.sweeper.hold(tier.name, SETTLING)
        for link in self.links.values():
            link.on_change(self._tier_changed)
            if link.status == "up":
                self._tier_changed(link)
        until = anyio.current_time() + _START_SECONDS
        with anyio.move_on_after(_LOOK_SECONDS):
            await self._all_up(self._looked)
        _refuse(self._refusing)
        # what is written from here on bears the epoch of this start, which a power cut must not take from the catalog
        await self.catalog.synced()
        self.recovery.agree_on_metric(profiles)
        self._begun.set()
        with anyio.CancelScope(deadline=until):
            await self._all_up(self._welcomed)
        _refuse(self._refusing)
        self._redoing.resume()
        self._tasks.start_soon(_kept_running, self.sweeper.run)
        if self.settings.policy.background:
            self._tasks.start_soon(_kept_running, self.passes.run)
        self._tasks.start_soon(_kept_running, self._keep_house)

    async def _all_up(self, reached: Mapping[str, anyio.Event]) -> None:
        """Return when all tiers that are up have reached this."""
        for name, link in self.links.items():
            if link.status == "up":
                await reached[name].wait()

    def end_calls(self) -> None:
        """The router has been told to end. What is under way has a while to come to its end; then it is answered with
        what has come of it so far."""
        if not self._ending:
            self._ending = True
            self._tasks.start_soon(self._cut_short)

    async def _cut_short(self) -> None:
        await anyio.sleep(_LAST_CALLS_SECONDS)
        self.passes.stop()
        for link in self.links.values():
            link.give_up()
        await anyio.sleep(_LAST_WORDS_SECONDS)
        self.answer.end()

    async def _gather(self, torn: Torn) -> None:
        """Moves the part of a torn group that is in one tier to where the rest of it is."""
        await self.moves.carry_out([torn.unit], torn.source, torn.target)

    def _spawn(self, function: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start work that outlives the call it began in, and that call's time. A fault of it goes to the log."""

        async def guarded() -> None:
            try:
                with budget(None):
                    await function()
            except Exception:
                log.exception("background work failed; what is left undone is noted in the catalog")

        self._tasks.start_soon(guarded)

    def _tier_changed(self, link: Link) -> None:
        if link.status == "up":
            self._spawn(partial(self._welcome, link))

    async def _welcome(self, link: Link) -> None:
        """Bring the account and a tier that has come up together; again until it works or the tier is down."""
        earlier = self._welcoming.get(link.name)
        if earlier is not None:
            earlier.cancel()
        with anyio.CancelScope() as scope:
            self._welcoming[link.name] = scope
            link.obstacle = None
            while link.status == "up":
                tier = self.settings.tier(link.name)
                try:
                    look = await self.recovery.look(tier)
                    self._looked[link.name].set()
                    await self._begun.wait()
                    await self.recovery.admit(tier, look)
                    if self.sweeper.held_for(link.name):
                        self._welcomed[link.name].set()  # what it is known to hold can be read meanwhile
                        link.obstacle = MAY_STILL_LAND
                        await anyio.sleep(self.sweeper.held_for(link.name))
                        link.obstacle = None
                        look = await self.recovery.look(tier)  # at what has landed, too
                    await self.recovery.welcome(tier, look)
                    link.obstacle = None
                    self._end_recovery(link.name)
                except Untrusted as problem:
                    log.error("%s: not taken into the account: %s", link.name, problem)
                    link.obstacle = f"tiers.{problem}"
                    self._looked[link.name].set()
                    self._welcomed[link.name].set()  # nobody waits for a server to become what it says it is
                    await anyio.sleep(_DISTRUST_SECONDS)
                    continue
                except (TierDown, A2MError, OSError) as problem:
                    log.warning("%s: not taken into the account yet: %s", link.name, problem)
                    link.obstacle = f"not taken into the account yet: {problem}"
                    await anyio.sleep(_WELCOME_SECONDS)
                    continue
                except CannotServe as problem:
                    if isinstance(problem, OfAnother) or not self._begun.is_set():
                        self._refusing.append(problem)
                    log.error("%s", problem)
                    link.obstacle = str(problem)
                    if self._begun.is_set() and not tier.mount:
                        self.catalog.set_scanned(link.name, False)
                except Exception as problem:
                    # what no one has thought of must not look as if the tier were just slow
                    log.exception("%s: could not be taken into the account", link.name)
                    link.obstacle = f"{link.name}: {problem}; the log has the whole story"
                break
            self._looked[link.name].set()
            self._welcomed[link.name].set()
            self.sweeper.wake()
            self.passes.tier_changed()

    def _end_recovery(self, tier: str) -> None:
        """The tier was taken into the account."""
        self._taken_in.add(tier)
        if self._taken_in.issuperset(managed.name for managed in self.settings.managed):
            self.catalog.end_recovery()

    async def _keep_house(self) -> None:
        while True:
            kept = int(self.settings.policy.forgotten_for * 1000)
            self.catalog.drop_notes_before(self._clock() - kept)
            await anyio.sleep(_HOUSEKEEPING_SECONDS)


def _refuse(problems: Sequence[CannotServe]) -> None:
    """Raises CannotServe for the problems, if there are any: of several tiers that have the same, one."""
    tiers: dict[str, list[str]] = {}
    for problem in problems:
        if isinstance(problem, OfAnother):
            tiers.setdefault(problem.sentence, []).extend(problem.tiers)
    told = [str(OfAnother(sentence, *there)) for sentence, there in tiers.items()]
    told += [str(problem) for problem in problems if not isinstance(problem, OfAnother)]
    if told:
        raise CannotServe("\n".join(told))


async def _kept_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Background work goes on after a fault of ours, or of the catalog's disk; the log has the whole story."""
    repeats = Repeats(log)
    while True:
        try:
            await work()
        except OSError as problem:
            repeats.say(logging.ERROR, f"background work failed, it is tried every {_RESTART_SECONDS:g} s: {problem}")
            await anyio.sleep(_RESTART_SECONDS)
        except Exception:
            # what is left undone is noted in the catalog, and found again
            log.exception("background work failed; it goes on in %g s", _RESTART_SECONDS)
            await anyio.sleep(_RESTART_SECONDS)


@asynccontextmanager
async def running_federation(
    settings: Settings,
    links: Mapping[str, Link],
    *,
    clock: Callable[[], int] = now,
    threads: bool = True,
    adopt: bool = False,
    catalog: Catalog | None = None,
    summarizer: Summarizer | None = None,
) -> AsyncIterator[Federation]:
    """A federation that has recovered and is ready to answer; ended in order when the block is left.

    Args:
        links: one for each tier, by its name; not started yet.
        threads: wait for the disk on worker threads; False for tests with a virtual clock.
        catalog: an open catalog, instead of the file that the settings name; it is closed at the end all the same.
        summarizer: writes summaries, instead of the one that the settings name.

    Raises DatabaseError for a catalog that cannot be used, CannotServe for a tier that cannot be part of it.
    """
    if catalog is None:
        catalog = Catalog(settings.state, settings.managed, strength, threads=threads)
    try:
        async with _model_of(settings) as model, anyio.create_task_group() as connections:
            for link in links.values():
                connections.start_soon(link.run)
            async with anyio.create_task_group() as tasks:
                summarizer = summarizer or _summarizer_of(settings, model, threads=threads)
                federation = Federation(
                    settings, catalog, links, tasks, clock, summarizer, model, adopt=adopt, threads=threads
                )
                await federation.start()
                yield federation
                tasks.cancel_scope.cancel()
            connections.cancel_scope.cancel()
    finally:
        catalog.close()


@asynccontextmanager
async def _model_of(settings: Settings) -> AsyncIterator[Model | None]:
    """The model that the settings name, if they do."""
    if settings.summarizer is None:
        yield None
    else:
        async with connect_model(settings.summarizer) as model:
            yield model


def _summarizer_of(settings: Settings, model: Model | None, *, threads: bool) -> Summarizer:
    if settings.summarizer is None or model is None:
        return Extracts(threads=threads)
    return ModelSummaries(model, settings.summarizer.max_input)
