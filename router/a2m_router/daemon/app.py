"""One federation, from its parts: builds the objects, owns the tasks, recovers, and ends in order.

What is started last ends first: a door stops before this is left; then the background work, which finishes the move it
is at; then the links, which let their children go; then the catalog is closed.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

import anyio
import anyio.abc

from a2m_router.backup.backing_up import Backups
from a2m_router.catalog.catalog import Catalog
from a2m_router.catalog.findings import Torn
from a2m_router.config.settings import Settings
from a2m_router.methods.backing_up import BackingUp
from a2m_router.methods.context import Context, scope_of
from a2m_router.methods.describing import CAPABILITIES, Describing
from a2m_router.methods.dispatch import table
from a2m_router.methods.forgetting import Forgetting
from a2m_router.methods.reading import Readings
from a2m_router.methods.summaries import Summaries
from a2m_router.methods.upkeep import Upkeep
from a2m_router.methods.writing import Writing
from a2m_router.placement.admission import Admission
from a2m_router.placement.core import core_of
from a2m_router.placement.delivering import Delivering
from a2m_router.placement.distilling import Distilling, Rewriter
from a2m_router.placement.moves import Moves
from a2m_router.placement.passes import Passes
from a2m_router.placement.planning import Planner, new_id
from a2m_router.placement.recovery import Recovery
from a2m_router.placement.scanning import Intake, Scanner
from a2m_router.placement.writing import Writes
from a2m_router.process.budget import budget
from a2m_router.process.log_throttle import LogThrottle
from a2m_router.protocol.client.http_client import SETTLING
from a2m_router.protocol.server.event_log import EventLog
from a2m_router.protocol.server.server import Dispatcher, Gate
from a2m_router.protocol.server.watching import Watching
from a2m_router.ranking.policy import strength
from a2m_router.reading.fan_out import FanOut
from a2m_router.reading.homes import Homes
from a2m_router.reading.recalls import Recalls
from a2m_router.reading.resolving import Resolving
from a2m_router.reading.timelines import Timelines
from a2m_router.summaries.model import Model, connect_model
from a2m_router.summaries.prompting import Prompting
from a2m_router.summaries.summarizing import Extracts, ModelSummaries, Summarizer
from a2m_router.tiers.gateway import TierGateway
from a2m_router.tiers.link import Link
from a2m_router.tiers.mode import Modes
from a2m_router.tiers.mounts import Mounts

log = logging.getLogger(__name__)

# How often notes of what was forgotten are looked through.
_HOUSEKEEPING_SECONDS: Final = 3600.0

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
        modes = Modes(settings.tiers, links, catalog.queries.lifting)
        self.mounts = mounts = Mounts(modes)
        gateway = TierGateway(links, modes, settings.limits.max_message, catalog.tiers.note_metadata, catalog.lineage)
        core = core_of(catalog, gateway, settings.managed, self._spawn)
        self.reconciler = core.reconciler
        self.moves = Moves(core)
        events = EventLog(settings.events.retained)
        rewriter = Rewriter(summarizer, settings.limits.max_content_length, new_id)
        distilling = Distilling(core, self.moves, rewriter, clock)
        self.passes = Passes(settings, core, distilling, events.append, clock)
        intake = Intake(changed=events.break_off, adopt=adopt, gather=self._gather)
        self.recovery = Recovery(settings, core, modes, Scanner(settings, core, intake))
        self.admission = Admission(settings, core, self.recovery, self._spawn, self.passes.tier_changed)
        planner = Planner(settings, catalog, gateway, mounts, clock)
        writes = Writes(core, planner, Delivering(core, self.moves))
        fan_out = FanOut(catalog, gateway, mounts)
        homes = Homes(catalog, gateway, mounts)
        context = Context(settings, catalog, gateway, mounts, clock, events.append, self.passes.wake)
        prompting = Prompting(model, settings.summarizer.max_input if settings.summarizer else 0)
        readings = Readings(
            context,
            Recalls(settings, catalog, fan_out, homes),
            Timelines(catalog, fan_out, homes, mounts),
            prompting,
        )
        writing = Writing(context, writes)
        backups = Backups(settings, catalog, links, self._spawn, clock, threads=threads)
        describing = Describing(context, summarizer, prompting, backup=backups.offered)
        families = (
            describing,
            writing,
            Forgetting(context, Resolving(catalog, fan_out), self.reconciler),
            readings,
            Upkeep(context, self.moves, self.passes),
            Summaries(context, readings, writing, summarizer),
            Watching(events, lambda caller, owner: context.sight(scope_of(caller, owner))),
            BackingUp(backups),
        )
        self.describe = describing.describe
        self.methods = table(families, catalog, settings.serve.timeout)
        self.answer = Gate(Dispatcher(self.methods, CAPABILITIES), settings.serve.max_requests)
        self._ending = False

    @property
    def problems(self) -> dict[str, str]:
        """Why tiers that are up take no part, by their names."""
        return {name: link.inactive_reason for name, link in self.links.items() if link.inactive_reason is not None}

    async def start(self) -> None:
        """Recover, and wait until every tier has joined, or has shown that it does not come up by itself.

        Raises CannotServe when a tier that is up cannot be part of the federation.
        """
        self.catalog.begin_recovery()
        for tier in self.settings.managed:
            # of a tier's own process nothing is left that could land; a power cut may have taken the note of what could
            if tier.url is not None and (
                not self.catalog.opening.ended_well or self.catalog.queries.has_notes(tier.name)
            ):
                self.reconciler.hold(tier.name, SETTLING)
        await self.admission.start()
        self._tasks.start_soon(_kept_running, self.reconciler.run)
        if self.settings.policy.background:
            self._tasks.start_soon(_kept_running, self.passes.run)
        self._tasks.start_soon(_kept_running, self._keep_house)

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

    async def _keep_house(self) -> None:
        while True:
            kept = int(self.settings.policy.forgotten_for * 1000)
            self.catalog.drop_notes_before(self._clock() - kept)
            await anyio.sleep(_HOUSEKEEPING_SECONDS)


async def _kept_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Background work goes on after a fault of ours, or of the catalog's disk; the log has the whole story."""
    repeats = LogThrottle(log)
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
